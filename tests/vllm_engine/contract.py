"""What the plugin takes for granted of vLLM: each fact is looked at, or taken away, which must be refused and never ignored.

.venv-vllm/bin/python tests/vllm_engine/contract.py
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "kit")]

from serve import ENVIRONMENT, FIXED  # noqa: E402

os.environ |= ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

import run  # noqa: E402
import vllm.config  # noqa: E402
import vllm.model_executor.layers.attention  # noqa: E402
import vllm.model_executor.models.transformers as backends  # noqa: E402
import vllm.v1.kv_cache_interface  # noqa: E402
from vllm import LLM  # noqa: E402
from vllm.lora.worker_manager import WorkerLoRAManager  # noqa: E402
from vllm.model_executor.models import ModelRegistry  # noqa: E402
from vllm.model_executor.models.transformers.base import Base  # noqa: E402
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata  # noqa: E402

from hf_longattn.integration import patch  # noqa: E402
from hf_longattn.integration.engines import vllm as plugin  # noqa: E402

#: What the plugin imports or wraps, a few of each kind.
NEEDED: tuple[tuple[Any, str], ...] = (
    (vllm.v1.kv_cache_interface, "KVCacheLayout"),
    (vllm.model_executor.layers.attention, "Attention"),
    (vllm.config.ModelConfig, "get_and_verify_max_len"),
    (WorkerLoRAManager, "_load_adapter"),
)
#: How vLLM calls the functions that are wrapped.
CALLED: dict[Callable[..., Any], list[str]] = {
    vllm.config.ModelConfig.get_and_verify_max_len: ["self", "max_model_len"],
    type(ModelRegistry).inspect_model_cls: ["self", "architectures", "model_config"],
    type(ModelRegistry).resolve_model_cls: ["self", "architectures", "model_config"],
    WorkerLoRAManager._load_adapter: ["self", "lora_request"],
    AttentionMetadataBuilder.build: ["self", "common_prefix_len", "common_attn_metadata", "fast_build"],
    Base._get_attn_cls: ["self"],
}


def refused(do: Callable[[], Any]) -> None:
    """Assert that it is, in a sentence that names the release and the way out."""
    said = "nothing"
    try:
        do()
    except (ImportError, NotImplementedError) as error:
        said = str(error)
    assert f"in vLLM {vllm.__version__} " in said, said
    assert 'pip install "vllm==' in said, said


def without_names() -> None:
    """A release that lacks a name is refused whatever model it is started for."""
    for owner, name in NEEDED:
        for module in [m for m in sys.modules if m.startswith(f"{plugin.__name__}.")]:
            del sys.modules[module]
            vars(plugin).pop(module.rpartition(".")[2], None)
        kept = getattr(owner, name)
        delattr(owner, name)
        with mock.patch.object(patch, "_INSTALLED", set()):
            refused(plugin.register)
        setattr(owner, name, kept)
        print(f"without {name}: refused")


def facts() -> None:
    """What would be used wrongly without an error."""
    for function, names in CALLED.items():
        assert list(inspect.signature(function).parameters) == names, function.__qualname__
    known = {field.name for field in fields(CommonAttentionMetadata)}
    assert {"causal", "block_table_tensor", "query_start_loc_cpu", "num_reqs", "seq_lens"} <= known
    assert "attn_backend" in inspect.signature(vllm.model_executor.layers.attention.Attention.__init__).parameters
    assert AttentionMetadataBuilder._cudagraph_support is AttentionCGSupport.NEVER  # no graph captures our attention
    assert any(name.endswith("ForCausalLM") for name in vars(backends))
    print("signatures and fields: as they were")


def without_hook() -> None:
    """A model whose layers vLLM builds in another way is refused before it answers."""
    from hf_longattn.integration.engines.vllm.model import Served

    with mock.patch.object(Served, "_get_attn_cls", Base._get_attn_cls):
        refused(lambda: LLM(str(run.checkpoint("rerope", "llama")), **FIXED))
    print("without _get_attn_cls: refused")


if __name__ == "__main__":
    run.WORK.mkdir(exist_ok=True)
    facts()
    plugin.register()
    without_hook()
    without_names()
