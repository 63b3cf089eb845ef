"""Functions of vLLM that are wrapped: a checkpoint is served under its method, or refused before its weights are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from vllm.config import ModelConfig
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models import transformers as backends
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from ....config import TRIPWIRE
from ....files import ADAPTER_FILE
from ...patch import Patch
from ...patch import install as install_patches
from ...saved_method import computed, method_in, saved_in
from . import fold, model, served
from .backend import Backend

#: vLLM's name for its attention function.
ATTENTION = "vllm"


def install() -> None:
    """Wrap and register; a second call changes nothing."""
    install_patches(*PATCHES)
    register_backend(AttentionBackendEnum.CUSTOM, f"{Backend.__module__}.{Backend.__name__}")
    for name in vars(backends):
        if name.startswith("Transformers") and name.endswith("ForCausalLM"):
            ModelRegistry.register_model(TRIPWIRE + name, f"{model.__name__}:{TRIPWIRE}{name}")
            MODELS_CONFIG_MAP[TRIPWIRE + name] = Checks
    if not hasattr(ALL_ATTENTION_FUNCTIONS[ATTENTION], "__wrapped__"):
        ALL_ATTENTION_FUNCTIONS[ATTENTION] = fold.attention(ALL_ATTENTION_FUNCTIONS[ATTENTION])


def _resolve(original: Callable[..., Any], self: Any, architectures: Any, model_config: Any) -> Any:
    """Whatever architecture a checkpoint of ours names, or is given, it goes to our class."""
    config = model_config.hf_config
    if not served.is_served(config):
        _say_factor(config.get_text_config())
        return original(self, architectures, model_config)
    names = [architectures] if isinstance(architectures, str) else architectures
    names = [name.removeprefix(TRIPWIRE) for name in names]
    config.architectures = names  # by which vLLM finds how weights were renamed
    if model_config.model_impl == "vllm":
        raise ValueError(
            f'model_impl="vllm" would serve {", ".join(names)} without {served.config_of(config).name}, which the checkpoint '
            'runs: leave it out, or set model_impl="transformers"'
        )
    name: str = model_config._get_transformers_backend_cls()
    if not name.endswith("ForCausalLM"):
        raise ValueError(f"hf_longattn serves models that generate text in vLLM, and this would be {name}")
    with _by_name_alone(model_config):
        return original(self, [TRIPWIRE + name], model_config)


def _longest(original: Callable[..., int], self: Any, max_model_len: int | None) -> int:
    """The longest text of an extended model: vLLM multiplies what its config says by the factor of a linear scaling."""
    length = original(self, max_model_len)
    if max_model_len not in (None, -1) or not served.is_served(self.hf_config):
        return length
    return min(length, served.config_of(self.hf_config).extended_to or length)


def _say_factor(text: Any) -> None:
    """longrope's attention_factor (of CoPE: 1) by the names that vLLM's own classes know; else they compute another one."""
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope" and rope.get("attention_factor") is not None:
        for name in ("short_mscale", "long_mscale"):
            rope.setdefault(name, rope["attention_factor"])


@contextmanager
def _by_name_alone(model_config: Any) -> Iterator[None]:
    """While open, vLLM looks a class up by its name alone."""
    before = model_config.model_impl
    object.__setattr__(model_config, "model_impl", "auto")
    try:
        yield
    finally:
        object.__setattr__(model_config, "model_impl", before)


class Checks(VerifyAndUpdateConfig):
    """Checks that vLLM makes in the process of the caller, before it starts an engine."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Raise ValueError for what cannot be served under the checkpoint's method."""
        method = served.config_of(vllm_config.model_config.hf_config)
        cache, parallel = vllm_config.cache_config.cache_dtype, vllm_config.parallel_config
        unfit = {
            f"a KV cache in {cache} (kv_cache_dtype)": cache not in ("auto", "float16", "bfloat16", "float32"),
            "pipeline parallelism": parallel.pipeline_parallel_size > 1,
            "context parallelism": parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "speculative decoding": vllm_config.speculative_config is not None,
        }
        if named := [name for name, value in unfit.items() if value]:
            raise ValueError(f"{method.name} cannot be served in vLLM with {' and '.join(named)}: leave that out")
        served.served_methods(vllm_config)


def _load_adapter(original: Callable[..., Any], self: Any, lora_request: Any) -> Any:
    """An adapter that was trained under another attention than is served would be wrong without a word."""
    trained = method_in(saved_in(Path(lora_request.lora_path) / ADAPTER_FILE))
    config = self._adapter_manager.model.config
    runs = served.config_of(config) if served.is_served(config) else None
    if trained is not None and computed(trained) != computed(runs):
        raise ValueError(
            f"the adapter {lora_request.lora_name!r} was trained under {trained.name}, {trained.to_dict()}, and the model "
            f"is served under {'no method' if runs is None else runs.to_dict()}: merge it (merge_and_unload), save the "
            "model with hf_longattn.save and serve that"
        )
    return original(self, lora_request)


PATCHES = (
    Patch(ModelConfig, "get_and_verify_max_len", _longest, "a scaling that a config's length includes would count twice"),
    Patch(type(ModelRegistry), "inspect_model_cls", _resolve, "a checkpoint of ours would be served without its method"),
    Patch(type(ModelRegistry), "resolve_model_cls", _resolve, "its class would be loaded without its method"),
    Patch(
        WorkerLoRAManager,
        "_load_adapter",
        _load_adapter,
        "an adapter trained under another attention would be wrong in silence",
    ),
)
