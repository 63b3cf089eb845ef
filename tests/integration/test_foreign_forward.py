"""Layers whose forward another package replaced, as Unsloth does: they attend without the method, which is refused."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama import modeling_llama

import hf_longattn

OWN = modeling_llama.LlamaAttention.forward
IDS = torch.arange(64)[None]


def by_itself(self: Any, hidden_states: Any, position_embeddings: Any = None, *args: Any, **kwargs: Any) -> Any:
    """An attention that does not call transformers' interface."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    query, key, value = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
    query, key = modeling_llama.apply_rotary_pos_emb(query, key, *position_embeddings)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return self.o_proj(out.transpose(1, 2).flatten(2)), None


def around(self: Any, *args: Any, **kwargs: Any) -> Any:
    """One that calls the module's own."""
    return OWN(self, *args, **kwargs)


def model(attention: str) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    config = LlamaConfig(**sizes, max_position_embeddings=32, initializer_range=0.5)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def replace_in_layers(of: Any, forward: Any, layers: int = 2) -> None:
    for layer in of.model.layers[:layers]:
        layer.self_attn.forward = types.MethodType(forward, layer.self_attn)


NAMED = r"attention without (infoscale|rerope): .*by_itself runs in place of LlamaAttention.forward"


@pytest.mark.parametrize("method", ["infoscale:clamp=false", "rerope"])
@pytest.mark.parametrize("passes_before", [0, 1])
def test_a_class_that_is_patched_later_is_refused(monkeypatch: pytest.MonkeyPatch, method: str, passes_before: int) -> None:
    ours = model(method)
    for _ in range(passes_before):
        ours(IDS)
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", by_itself)
    for _ in range(2):
        with pytest.raises(ValueError, match=NAMED):
            ours(IDS)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["class", "layer"])
def test_a_patch_is_refused_in_a_compiled_model_too(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """A model that is called compiled alone, before the patch as well, and one patch that calls what it replaced."""
    ours = hf_longattn.apply(model("sdpa"), "infoscale:clamp=false")
    torch.compiler.reset()
    compiled, want = torch.compile(ours, backend="eager"), ours(IDS).logits
    torch.testing.assert_close(compiled(IDS).logits, want)
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama.LlamaAttention, "forward", around)
        torch.testing.assert_close(compiled(IDS).logits, want)
    if where == "class":
        monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", by_itself)
    else:
        replace_in_layers(ours, by_itself, 1)
    with pytest.raises(ValueError, match=NAMED):
        compiled(IDS)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("method", ["infoscale:clamp=false", "rerope"])
def test_patched_layers_are_refused(method: str, layers: int) -> None:
    ours = model(method)
    ours(IDS)
    replace_in_layers(ours, by_itself, layers)
    with pytest.raises(ValueError, match=NAMED):
        ours(IDS)


def test_a_remap_put_into_patched_layers_names_the_patch() -> None:
    other = model("sdpa")
    replace_in_layers(other, by_itself)
    with pytest.raises(ValueError, match=NAMED):
        hf_longattn.apply(other, "rerope")


def test_a_class_that_was_patched_before_is_refused_where_the_method_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", by_itself)
    with pytest.raises(ValueError, match=r"applies to 0 layers .*by_itself runs in place of LlamaAttention.forward"):
        model("infoscale")


def test_a_patch_that_pretends_to_be_what_it_replaced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", functools.wraps(OWN)(lambda *a, **k: by_itself(*a, **k)))
    ours = model("infoscale:clamp=false")
    with pytest.raises(ValueError, match=r"<lambda> runs in place of LlamaAttention.forward"):
        ours(IDS)


def test_a_patch_of_the_model_that_calls_no_attention_module_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, input_ids: Any, **kwargs: Any) -> Any:
        states = self.embed_tokens(input_ids)
        turned = self.rotary_emb(states, torch.arange(states.shape[1])[None])
        for layer in self.layers:
            states = states + by_itself(layer.self_attn, layer.input_layernorm(states), turned)[0]
        return modeling_llama.BaseModelOutputWithPast(last_hidden_state=self.norm(states))

    ours = model("infoscale:clamp=false")
    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", forward)
    with pytest.raises(ValueError, match=r"runs in place of LlamaModel.forward"):
        ours(IDS)


def test_a_patch_that_calls_what_it_replaced_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = model("infoscale:clamp=false")
    want = ours(IDS).logits
    replace_in_layers(ours, around, 1)
    assert torch.equal(ours(IDS).logits, want)


def test_a_model_without_its_method_runs_under_a_patch() -> None:
    ours = model("infoscale:clamp=false")
    replace_in_layers(ours, by_itself)
    hf_longattn.remove(ours)
    assert ours(IDS).logits.isfinite().all()


#: A class as Unsloth writes them anew.
COPY = """
@torch.compile(backend="eager")
@functools.wraps(OWN)
def LlamaAttention_forward(self, **kwargs):
    return OWN(self, **kwargs)

class LlamaAttention(modeling_llama.LlamaAttention):
    def forward(self, hidden_states, **kwargs):
        return LlamaAttention_forward(self, hidden_states=hidden_states, **kwargs)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["infoscale:clamp=false", "rerope"])
def test_a_class_that_hands_over_to_a_compiled_copy_runs(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    want = model(method)(IDS).logits
    module = {"torch": torch, "functools": functools, "modeling_llama": modeling_llama, "OWN": OWN, "__name__": "copies"}
    exec(COPY, module)
    monkeypatch.setattr(modeling_llama, "LlamaAttention", module["LlamaAttention"])
    torch.testing.assert_close(model(method)(IDS).logits, want, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_compiled_layers_are_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = model("infoscale:clamp=false")
    want = ours(IDS).logits
    for layer in ours.model.layers:
        layer.compile(backend="eager")
    probes: list[Any] = []
    evaluating = hf_longattn.integration.verify.evaluating
    monkeypatch.setattr(hf_longattn.integration.verify, "evaluating", lambda x: probes.append(x) or evaluating(x))
    for _ in range(2):
        torch.testing.assert_close(ours(IDS).logits, want, atol=1e-4, rtol=0)
    assert len(probes) == 1


def test_a_rotation_by_another_function_is_undone_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger's kernel takes the place of the modelling module's function, and turns in place."""
    want = model("rerope")(IDS).logits

    def liger_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, position_ids: Any = None, unsqueeze_dim: int = 1) -> Any:
        half = q.shape[-1] // 2
        c, s = cos[:, None, :, :half], sin[:, None, :, :half]
        for x in (q, k):
            first, second = x[..., :half].clone(), x[..., half:].clone()
            x.copy_(torch.cat([first * c - second * s, second * c + first * s], -1))
        return q, k

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", liger_rotary_pos_emb)
    with torch.no_grad():
        torch.testing.assert_close(model("rerope")(IDS).logits, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", ["infoscale:clamp=false", "rerope"])
def test_a_bridge_of_transformer_lens_is_refused(method: str) -> None:
    """It stands around each attention module, adds transformers' mask to its own scores, and knows no other."""
    bridge = type("AttentionBridge", (torch.nn.Module,), {"__module__": "transformer_lens.model_bridge"})
    other = model("sdpa")
    for layer in other.model.layers:
        around = type("PositionEmbeddingsAttentionBridge", (bridge,), {})()
        around._original_component, layer.self_attn = layer.self_attn, around
    with pytest.raises(ValueError, match=r"TransformerLens' PositionEmbeddingsAttentionBridge computes its attention"):
        hf_longattn.apply(other, method)
