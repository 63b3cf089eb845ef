"""The plugin for vLLM against a stand-in with its signatures: a paged KV cache, and sdpa over one sequence."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, DEFAULT
from helpers import close, fresh, pieces, tokens
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_longattn
from hf_longattn.integration.engines import vllm as plugin

PAGE = 4


class Attention:
    """vLLM's attention layer of one model layer: keys and values by page; tokens come as (tokens, heads * head_dim)."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int) -> None:
        self.shape, self.pages = (heads, kv_heads, head_dim), torch.zeros(2, 16, PAGE, kv_heads, head_dim)
        self.table, self.length, self.scale = torch.randperm(16), 0, 1.0

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads, kv_heads, head_dim = self.shape
        at = torch.arange(self.length, self.length + len(query))
        for pages, new in zip(self.pages, (key, value), strict=True):
            pages[self.table[at // PAGE], at % PAGE] = new.view(-1, kv_heads, head_dim)
        self.length += len(query)
        every = torch.arange(self.length)
        k, v = (pages[self.table[every // PAGE], every % PAGE].transpose(0, 1) for pages in self.pages)
        q = query.view(-1, heads, head_dim).transpose(0, 1)
        causal = every <= at[:, None]
        out = nn.functional.scaled_dot_product_attention(q, k, v, causal, scale=self.scale, enable_gqa=True)
        return out.transpose(0, 1).reshape(len(query), -1)


def vllm_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attention_instances: dict[int, Attention] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    assert attention_instances is not None
    layer = attention_instances[module.layer_idx]
    layer.scale = float(scaling)
    tokens = query.shape[-2]
    query, key, value = (x.transpose(1, 2).reshape(tokens, -1) for x in (query, key, value))
    return layer.forward(query, key, value), None


class TransformersForCausalLM(nn.Module):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        config.get_text_config()._attn_implementation = "vllm"
        self.model = AutoModel.from_config(config).eval()
        heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.attention_instances = {i: Attention(*heads) for i in range(config.num_hidden_layers)}

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        arguments = {"position_ids": positions[None], "attention_instances": self.attention_instances}
        return self.model(input_ids=input_ids[None], use_cache=False, return_dict=False, **arguments)[0][0]


class ModelRegistry:
    models: dict[str, str] = {}  # noqa: RUF012

    @classmethod
    def register_model(cls, architecture: str, model: str) -> None:
        cls.models[architecture] = model


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Builds a model from a folder as vLLM would: by its config's architecture, then its weights."""
    names = ["vllm", "vllm.model_executor", "vllm.model_executor.models", "vllm.model_executor.models.transformers"]
    modules = {name: types.ModuleType(name) for name in names}
    modules[names[0]].ModelRegistry = ModelRegistry
    modules[names[2]].transformers = modules[names[3]]
    modules[names[3]].TransformersForCausalLM = TransformersForCausalLM
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    config_type = plugin.PreTrainedConfig
    monkeypatch.setattr(config_type, "from_dict", config_type.__dict__["from_dict"])  # put back afterwards
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "vllm", vllm_attention)
    plugin.register()
    plugin.register()
    assert "LongAttnLlamaForCausalLM" in ModelRegistry.models

    def build(path: Path) -> TransformersForCausalLM:
        config = AutoConfig.from_pretrained(path)
        (architecture,) = config.architectures
        module, _, name = ModelRegistry.models[architecture].partition(":")
        settings = types.SimpleNamespace(model_config=types.SimpleNamespace(hf_config=config))
        return getattr(sys.modules[module], name)(vllm_config=settings)

    yield build
    plugin.__dict__.pop("LongAttnForCausalLM", None)


FOLDED = (
    "output_gain",
    "infoscale",
    "logn",
    "ssmax",
    "logn_learned",
    "log_length",
    "softmax_plus",
    "yarn_temperature",
    "cosscale",
)
FOLDED += ("infoscale+cosscale", "output_standardise", "output_layer_norm")


@torch.no_grad()
@pytest.mark.parametrize("case", FOLDED)
@pytest.mark.parametrize("strict", [True, False])
def test_methods_that_fold_are_exact_in_vllm(
    case: str, strict: bool, engine: Any, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    m = fresh("llama", CASES[case])
    for name, parameter in m.named_parameters():
        if ".longattn." in name:
            parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()))
    hf_longattn.save(m, tmp_path / "m", strict=strict)
    served = engine(tmp_path / "m")
    served.model.load_state_dict(m.model.state_dict())
    ids, out, first = tokens(1), [], 0
    for size in pieces(ids.shape[1]):
        out.append(served(ids[0, first : first + size], torch.arange(first, first + size)))
        first += size
    close(torch.cat(out), m.model(ids, use_cache=False).last_hidden_state[0], 5e-5, case)
    record_property("vLLM (stand-in)", case)


REFUSED = (DEFAULT, "alibi", "adaptive_temperature", "rerope", "leaky_rerope", "self_extend", "dual_chunk", "string")
REFUSED += ("windowed", "streaming", "lm_infinite", "attention_sink", "yarn_beyond", "yarn_far")


@pytest.mark.parametrize("case", REFUSED)
def test_all_others_are_refused_by_name(
    case: str, engine: Any, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    hf_longattn.save(fresh("llama", CASES[case]), tmp_path / "m")
    with pytest.raises(NotImplementedError, match=f"{CASES[case].name} cannot run in vLLM.*transformers serve") as error:
        engine(tmp_path / "m")
    record_property("vLLM (stand-in)", f"{case}: {error.value}")


def test_a_model_that_vllm_built_by_itself_is_refused(engine: Any, tmp_path: Path) -> None:
    """Its own class on a config with a method: forced to the Transformers backend, say."""
    hf_longattn.save(fresh("llama", CASES["infoscale"]), tmp_path / "m")
    settings = types.SimpleNamespace(model_config=types.SimpleNamespace(hf_config=AutoConfig.from_pretrained(tmp_path / "m")))
    with pytest.warns(UserWarning, match="config.longattn is set, but"):
        served = TransformersForCausalLM(vllm_config=settings)
    with pytest.raises(ValueError, match="was not built by hf_longattn's class for vLLM"):
        served(tokens(1)[0], torch.arange(24))
