"""Where a method changes nothing, the model runs the attention that it would run without it."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CASES, DEFAULT, HEADS
from helpers import NO_WINDOWS, SCENARIOS, close, crossed, stock, tokens, with_sinks
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import hf_longattn
from hf_longattn import LongAttnConfig, Rotation, reference_attention
from hf_longattn.core.call import Call
from hf_longattn.core.geometry import AttentionLayout
from hf_longattn.core.kernels.sdpa import few_queries
from hf_longattn.core.plan import ReadyPlan
from hf_longattn.integration import dispatch, unmodified
from hf_longattn.integration.caches import CACHE
from hf_longattn.integration.forward_context import LayerCall
from hf_longattn.integration.observer import observe

preset = LongAttnConfig.preset
#: With a range in which nothing changes that lies between a few tokens and 24.
RANGES = {
    **{
        name: CASES[name] for name in ("rerope", "leaky_rerope", "leaky_by_layer", "self_extend", "dual_chunk", "string_remap")
    },
    **{name: CASES[name] for name in ("yarn_beyond", "windowed", "streaming", "lm_infinite", "logn")},
    "dual_chunk, long steps": preset("dual_chunk", chunk=6, local=5),
    "softmax_plus": preset("softmax_plus", train_length=9),
    "infoscale": preset("infoscale", train_length=9, epsilon=0.2),
    "yarn_temperature": preset("yarn_temperature", train_length=9),
    "scale_invariant": preset("scale_invariant", offset=7),
    "rerope+infoscale": preset("rerope+infoscale", window=12, train_length=9),
}
#: With room for every text of the tests.
WIDE = (
    preset("rerope+infoscale", window=60, train_length=90),
    preset("streaming", window=60),
    preset(DEFAULT, strength=0),
)
#: Ends of scenarios with calls of few queries, whose heads are computed together.
OF_FEW_QUERIES = ("token_by_token", "chunks", "second_turn", "second_turn_static")
#: Nothing of theirs is ever the identity.
NEVER = ("paper_form", "alibi", "ssmax", "logn_learned", "log_length", "cosscale", "adaptive_temperature", "attention_sink")
NEVER += ("output_standardise", "output_layer_norm", "rerope+infoscale+cosscale", "sink+rerope+adaptive")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of queries of the calls that a method computes."""
    seen: list[int] = []
    attend, decode = dispatch.attend, ReadyPlan.run

    def counting(call: Call) -> Tensor:
        before = len(seen)
        out = attend(call)
        if len(seen) == before:
            seen.append(call.query.shape[2])
        return out

    def decoding(self: ReadyPlan, query: Tensor, *others: Any) -> Tensor:
        seen.append(query.shape[2])
        return decode(self, query, *others)

    monkeypatch.setattr(dispatch, "attend", counting)
    monkeypatch.setattr(ReadyPlan, "run", decoding)
    return seen


def applied(config: LongAttnConfig, calls: list[int]) -> Any:
    """A Llama under a method; what verified its rotation is not counted."""
    m = hf_longattn.apply(stock("llama"), config)
    calls.clear()
    return m


@pytest.mark.parametrize("case", RANGES)
def test_the_range_is_what_the_formula_says(case: str) -> None:
    """By the definition, in float64: the last text that is left as it is, and a longer one that is not."""
    config = RANGES[case].for_layer(0)
    length = config.identity_below
    assert 1 < length < 24
    rotation = Rotation(torch.tensor([1.0, 0.1, 0.01, 0.7], dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)

    def difference(n: int) -> float:
        q, k, v = (torch.randn(1, HEADS, n, 8, dtype=torch.float64, generator=generator) for _ in range(3))
        got, want = (reference_attention(q, k, v, c, rotation=rotation) for c in (config, LongAttnConfig()))
        return float((got - want).abs().max())

    assert difference(int(length)) < 1e-12
    assert difference(2 * int(length) + 6) > 1e-6


def test_what_is_never_the_identity_says_so() -> None:
    assert {case: CASES[case].identity_below for case in NEVER} == dict.fromkeys(NEVER, 0)
    assert preset("infoscale").identity_below == preset("rerope").identity_below == 0  # not bound to a model yet
    assert preset("infoscale", train_length=9, clamp=False).identity_below == 0
    assert LongAttnConfig().identity_below == preset(DEFAULT, strength=0).identity_below == math.inf
    assert preset(DEFAULT, decay=0).identity_below == math.inf


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("family", crossed(["llama", "gemma3"], ["llama"]))
def test_within_the_range_the_model_runs_its_own_attention(family: str, scenario: str, calls: list[int]) -> None:
    if family == "gemma3" and scenario in NO_WINDOWS:
        pytest.skip("its own sliding windows count cache indices")
    own_mask = scenario.startswith("interleaved")  # a 4-D mask of the user's says nothing about cache indices
    for config in WIDE:
        run, m = SCENARIOS[scenario], hf_longattn.apply(stock(family), config)
        calls.clear()
        same = family == "llama" and not own_mask and not scenario.endswith(OF_FEW_QUERIES)
        close(run(m, tokens()), run(stock(family), tokens()), 0 if same else 2e-5, config.name)
        assert bool(calls) == own_mask


@torch.no_grad()
@pytest.mark.parametrize("case", ["rerope", "streaming", "yarn_beyond", "infoscale"])
def test_the_longest_text_decides_in_every_step(case: str, calls: list[int]) -> None:
    """A batch of two lengths, token by token across the border: logits as the method's own kernel gives them."""
    config = RANGES[case]
    m, kernel = (hf_longattn.apply(stock("llama"), c) for c in (config, config.replace(backend="tiled")))
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.int64)
    mask[0, :3] = 0
    caches = [DynamicCache(config=m.config), DynamicCache(config=m.config)]
    layers = m.config.num_hidden_layers
    for n in range(3, 20):
        calls.clear()
        inputs = {"attention_mask": mask[:, : n + 1], "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)[:, n : n + 1]}
        first = slice(0, 4) if n == 3 else slice(n, n + 1)
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, first]
        got = m(ids[:, first], **{CACHE: caches[0]}, **inputs).logits
        assert len(calls) == (0 if n + 1 <= config.identity_below else layers), n
        close(got[:, -1], kernel(ids[:, first], **{CACHE: caches[1]}, **inputs).logits[:, -1])


@torch.no_grad()
def test_positions_that_jump_leave_the_range(calls: list[int]) -> None:
    m, ids = applied(preset("rerope", window=60), calls), tokens(1, 12)
    jump = torch.cat([torch.arange(6), torch.arange(6) + 100])[None]
    inputs: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "use_cache": False}
    m(ids, position_ids=jump, **inputs)
    assert len(calls) == m.config.num_hidden_layers
    calls.clear()
    near = jump.clamp(max=40) + torch.arange(12)
    close(m(ids, position_ids=near, **inputs).logits, stock("llama")(ids, position_ids=near, **inputs).logits, 0)
    assert not calls


@torch.no_grad()
def test_a_device_is_not_read(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """By lengths alone where positions are as usual: nothing is read to decide."""
    m, ids = applied(preset("rerope", window=60), calls), tokens(2, 12)

    def refuse(*_: Any) -> Any:
        raise AssertionError("read")

    monkeypatch.setattr(AttentionLayout, "extent", property(refuse))
    close(m(ids).logits, stock("llama")(ids).logits, 0)
    assert not calls


def test_gradients_are_the_models_own() -> None:
    m, plain = hf_longattn.apply(stock("llama"), WIDE[0]), stock("llama")
    for x in (m, plain):
        x.train()(tokens(), use_cache=False).logits.sin().sum().backward()
    for (name, p), q in zip(m.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad), name


@torch.no_grad()
def test_it_is_the_attention_that_the_model_ran_before(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, with its own mask: flash attention would get its own."""
    masks: list[Any] = []

    def own(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        masks.append(mask)
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("own_attention", own)
    AttentionMaskInterface.register("own_attention", sdpa_mask)
    m = stock("llama")
    m.set_attn_implementation("own_attention")
    hf_longattn.apply(m, preset("rerope", window=60))
    masks.clear()
    calls.clear()
    close(m(tokens()).logits, stock("llama")(tokens()).logits, 0)
    assert masks == [None] * m.config.num_hidden_layers
    assert not calls


@torch.no_grad()
@pytest.mark.parametrize("layers", [None, [1]], ids=["no layer acts", "one layer acts"])
@pytest.mark.parametrize("new", [1, 3])
def test_few_queries_read_a_key_once_for_all_heads_that_share_it(
    new: int, layers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads that share a key head are so many queries of it, where sdpa alone is what transformers' function calls."""
    sdpa, seen = torch.nn.functional.scaled_dot_product_attention, []

    def counting(query: Tensor, key: Tensor, *others: Any, **options: Any) -> Tensor:
        seen.append((query.shape[1] == key.shape[1], query.shape[2]))
        return sdpa(query, key, *others, **options)

    plain = stock("llama")
    group = plain.config.num_attention_heads // plain.config.num_key_value_heads
    method = preset("rerope", window=60) if layers is None else preset("scale_invariant", layers=layers)
    m = hf_longattn.apply(stock("llama"), method)
    padded = torch.ones(2, 9 + new, dtype=torch.int64)
    padded[0, :3] = 0
    for mask in (torch.ones_like(padded), padded):
        at = (mask.cumsum(-1) - 1).clamp(min=0)
        caches = [x(tokens(2, 9), attention_mask=mask[:, :9], position_ids=at[:, :9])[CACHE] for x in (plain, m)]
        inputs = {"attention_mask": mask, "position_ids": at[:, 9:]}
        want = plain(tokens(2, new, seed=3), **{CACHE: caches[0]}, **inputs).logits
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counting)
        seen.clear()
        got = m(tokens(2, new, seed=3), **{CACHE: caches[1]}, **inputs).logits
        monkeypatch.undo()
        assert seen == [(True, group * new)] * (m.config.num_hidden_layers - len(layers or ()))
        if layers is None:
            close(got, want, 2e-6)


def test_few_queries_are_left_to_transformers_where_it_knows_more() -> None:
    """Dropout draws what it would draw; a mask by head keeps its heads; gradients flow either way."""
    query, key, value = torch.randn(2, 4, 3, 8, requires_grad=True), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    mask = torch.ones(2, 1, 3, 9, dtype=torch.bool).tril(6)
    out = few_queries(query, key, value, mask.repeat(1, 1, 2, 1), scaling=0.3)
    want = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=0.3, enable_gqa=True).transpose(
        1, 2
    )
    close(out, want, 2e-6)
    close(*(torch.autograd.grad(x.sin().sum(), query)[0] for x in (out, want)), 2e-6)
    asked = LayerCall(None, None, None, None, 3, 9, False, False, 0.0, None, None, None, {})  # type: ignore[arg-type]
    alone = functools.partial(unmodified.are_few, query=query, key=key, mask=mask)
    assert alone(asked)
    assert alone(asked, query=query[:, :, :1], mask=None)
    assert not alone(asked._replace(dropout=0.1))
    assert not alone(asked._replace(softcap=30.0))
    assert not alone(asked._replace(traced=True))
    assert not alone(asked._replace(more={"position_bias": torch.zeros(1)}))
    assert not alone(asked, mask=torch.zeros(2, 4, 3, 9))
    assert not alone(asked, mask=None)  # which is causal, or not, as the module says
    assert not alone(asked, key=torch.randn(2, 4, 9, 8))
    assert not alone(asked, query=torch.randn(2, 4, 17, 8))


@pytest.mark.slow
@torch.no_grad()
def test_eager_computes_single_queries_alone(calls: list[int]) -> None:
    """It holds all pairs, which the method's kernels never do; so with a softcap, and with learned sinks."""

    def capped() -> Any:
        return stock("gemma2")

    def eager() -> Any:
        m = stock("llama")
        m.set_attn_implementation("eager")
        return m

    torch.manual_seed(0)
    sinks = with_sinks("GptOss", num_experts_per_tok=2, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    make: Callable[[], Any]
    for make in (capped, eager, lambda: copy.deepcopy(sinks)):
        plain, m = make(), hf_longattn.apply(make(), preset("infoscale", train_length=60))
        results = []
        for x in (plain, m):
            cache = x(tokens(2, 9))[CACHE]
            calls.clear()
            results.append(x(tokens(2, 1, seed=3), **{CACHE: cache}).logits)
            assert not calls
        close(*results)


@torch.no_grad()
def test_what_looks_on_or_insists_gets_the_method(calls: list[int]) -> None:
    """Observed layers, a backend by name, attention weights; and a strength that rises again."""
    m, ids = hf_longattn.apply(stock("llama"), preset(DEFAULT, strength=0)), tokens()
    with observe(m, lambda layer, call, output: None):
        m(ids)
    assert calls
    calls.clear()
    assert m(ids, output_attentions=True).attentions[0].shape == (2, HEADS, 24, 24)
    hf_longattn.update(m, strength=1.0)
    m(ids)
    assert len(calls) == m.config.num_hidden_layers
    hf_longattn.apply(m, preset("rerope", window=60, backend="tiled"))
    calls.clear()
    m(ids)
    assert len(calls) == m.config.num_hidden_layers
