"""Where formulas end: one key, no key, huge logits, odd sizes, extreme parameters, and random calls of random methods."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from calls import inputs, mask_of, rows_of, with_gradients
from cases import CASES, HEADS
from helpers import close, crossed, stock, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import small
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import hf_longattn
from hf_longattn import LongAttnConfig, Rotation, reference_attention
from hf_longattn.methods import AdaptiveTemperature, Alibi, ScaleInvariant
from hf_longattn.slots.base import LengthTemperature
from hf_longattn.slots.method import SLOTS

CONFIGS = {name: config.for_layer(1) for name, config in CASES.items()}
NORMED = {name for name, config in CONFIGS.items() if config.output_norm is not None}
SUNK = {name for name, config in CONFIGS.items() if config.sink is not None}
LENGTHS = {n: c.temperature for n, c in CONFIGS.items() if isinstance(c.temperature, LengthTemperature)}
CPU = torch.device("cpu")


def rotation(d: int) -> Rotation:
    return Rotation(10.0 ** -torch.arange(d // 2, dtype=torch.float64))


def agree(leaves: Sequence[Tensor], config: LongAttnConfig, tolerance: float = 1e-10, **options: Any) -> list[Tensor]:
    """Finite, and as the reference has it."""
    options["rotation"] = rotation(leaves[0].shape[-1])
    got, want = (with_gradients(f, leaves, config, **options) for f in (hf_longattn.attention, reference_attention))
    for a, b in zip(got, want, strict=True):
        assert a.isfinite().all()
        close(a, b, tolerance)
    return got


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CONFIGS)
def test_short_texts(case: str, n: int) -> None:
    """Shorter than any train_length here, down to one token, which returns its own value."""
    out, *_ = agree(inputs(q=n, k=n, d=6), CONFIGS[case])
    if case not in NORMED | SUNK:
        close(out[:, :, 0], inputs(q=n, k=n, d=6)[2][:, :, 0].repeat_interleave(2, 1), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("case", CONFIGS)
def test_one_visible_key(case: str) -> None:
    """No entropy, no temperature: the value itself, and nothing for the logits to learn."""
    mask = torch.zeros(9, 9, dtype=torch.bool)
    mask[:, 0] = True
    if CONFIGS[case].visibility is not None:
        mask = torch.eye(9, dtype=torch.bool)
    leaves = inputs(q=9, k=9, d=6)
    out, d_query, d_key, _ = agree(leaves, CONFIGS[case], attention_mask=mask)
    if case in SUNK:  # there the sink is one more to share with
        return
    close(d_query, torch.zeros_like(d_query), 1e-12)
    close(d_key, torch.zeros_like(d_key), 1e-12)
    if case not in NORMED:
        seen = leaves[2].repeat_interleave(2, 1)
        close(out, seen if CONFIGS[case].visibility is not None else seen[:, :, :1].expand_as(out), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", CONFIGS)
def test_rows_that_see_nothing(case: str, dtype: torch.dtype) -> None:
    mask = torch.rand(2, 1, 11, 11, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[..., 4, :] = mask[0, :, 0, :] = False
    out, d_query, *_ = agree(
        inputs(q=11, k=11, d=6, dtype=dtype), CONFIGS[case], 1e-10 if dtype == torch.float64 else 2e-5, attention_mask=mask
    )
    if case not in NORMED:
        assert (out[:, :, 4] == 0).all()
        assert (out[0, :, 0] == 0).all()
        assert (d_query[:, :, 4] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CONFIGS)
def test_logits_of_ten_thousand(case: str, dtype: torch.dtype) -> None:
    query, key, value = inputs(q=13, k=13, d=16, dtype=dtype)
    leaves = (90 * query, 90 * key, value)
    scores = leaves[0].double() @ leaves[1].double().repeat_interleave(2, 1).transpose(-1, -2)
    assert scores.abs().max() > 4e4  # divided by sqrt(16)
    if dtype == torch.float64:
        agree(leaves, CONFIGS[case], 1e-6)
    else:
        out, *gradients = with_gradients(hf_longattn.attention, leaves, CONFIGS[case], rotation=rotation(16))
        assert all(x.isfinite().all() for x in (out, *gradients))
        if case == "scale_invariant":
            close(out.double(), reference_attention(*(x.double() for x in leaves), CONFIGS[case]), 0.02)


@pytest.mark.parametrize("d", [1, 2, 3, 64, 256])
@pytest.mark.parametrize("case", CONFIGS)
def test_head_dimensions(case: str, d: int) -> None:
    agree(inputs(q=7, k=7, d=d), CONFIGS[case], 1e-9)


@pytest.mark.parametrize("case", ["cosscale", "infoscale+cosscale"])
def test_vectors_of_length_zero_have_no_direction(case: str) -> None:
    leaves = inputs(q=5, k=5, d=6, dtype=torch.float32)
    for x in leaves[:2]:
        x[:, :, 1] = 0
    found = with_gradients(hf_longattn.attention, leaves, CONFIGS[case], rotation=rotation(6))
    assert all(x.abs().max() < 1e4 for x in found)  # float16 holds 65,504


# tables and factors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [1e-3, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("length", [1, 2, 1000, 1_000_000])
@pytest.mark.parametrize("parameters", [{}, {"logit_mean": -5.0, "logit_variance": 9.0}, {"logit_variance": 1e-4}])
def test_maps_to_a_million_tokens(length: int, tau: float, parameters: dict[str, Any]) -> None:
    gain, bias = (x[0].float() for x in ScaleInvariant(tau=tau, **parameters).tables(HEADS, length, CPU))
    assert gain.isfinite().all()
    assert bias.isfinite().all()
    assert (gain.diff() >= 0).all()
    assert gain[0] == 1
    assert bias[0] == 0
    slope = Alibi().tables(HEADS, length, CPU)[1]
    assert slope.float().isfinite().all()
    assert slope.shape == (HEADS, length)


@pytest.mark.parametrize("head_dim", [1, 2, 64, 256])
@pytest.mark.parametrize("case", LENGTHS)
def test_length_temperatures_from_no_key_to_a_million(case: str, head_dim: int) -> None:
    n = torch.tensor([0, 1, 2, 3, 4, 5, 100, 10_000, 1_000_000], dtype=torch.float64)
    factor = LENGTHS[case].factor(n, head_dim)
    assert factor.float().isfinite().all()
    assert (factor.diff() >= 0).all()
    assert (factor >= (1 if LENGTHS[case].clamp else 0)).all()
    assert factor[0] == factor[1]  # nothing to see counts as one key


@pytest.mark.parametrize("train_length", [2, 512, 1_000_000])
@pytest.mark.parametrize("name", ["infoscale", "logn", "softmax_plus", "yarn_temperature"])
def test_the_trained_length_is_the_identity(name: str, train_length: int) -> None:
    method = LongAttnConfig.preset(name, train_length=train_length, clamp=False).temperature
    assert isinstance(method, LengthTemperature)
    for head_dim in (1, 64, 256):
        assert float(method.factor(torch.tensor([float(train_length)]).double(), head_dim)) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("beyond", ["published", "saturate"])
def test_adaptive_factor_for_every_entropy(beyond: str) -> None:
    entropy = torch.linspace(0, math.log(1e6), 2001, dtype=torch.float64, requires_grad=True)
    factor = AdaptiveTemperature(beyond=beyond).factor(entropy)
    (slope,) = torch.autograd.grad(factor.sum(), entropy)
    entropy, factor = entropy.detach(), factor.detach()
    assert factor.isfinite().all()
    assert slope.isfinite().all()
    assert (factor >= 1 - 1e-12).all()
    assert (factor[entropy <= 0.5] - 1).abs().max() <= 1e-12
    assert factor.max().item() == pytest.approx(2.42, abs=0.01)
    assert entropy[factor.argmax()].item() == pytest.approx(4.41, abs=0.01)
    assert factor[-1].item() == pytest.approx(1.0 if beyond == "published" else factor.max().item(), abs=1e-12)


@pytest.mark.parametrize("ulps", [-1, 0, 1])
@pytest.mark.parametrize("threshold", [0.8485819960098685, 5.9445208279051585])  # where the published polynomial is 1
def test_adaptive_factor_with_its_threshold_at_a_crossing(threshold: float, ulps: int) -> None:
    method = AdaptiveTemperature(threshold=threshold + ulps * math.ulp(threshold))
    entropy = torch.tensor([0.0, 0.5, 2.0, 4.4, 7.0, 15.0], dtype=torch.float64)
    want = AdaptiveTemperature().factor(entropy) if threshold < 1 else torch.ones(6, dtype=torch.float64)
    assert (method.factor(entropy) - want).abs().max() <= 1e-12


# random calls of random methods -----------------------------------------------------------------------------------------

OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "positions": st.one_of(
        st.builds(lambda w: {"name": "rerope", "window": w}, st.integers(1, 40)),
        st.builds(lambda w, k: {"name": "leaky_rerope", "window": w, "stretch": k}, st.integers(1, 40), st.floats(1, 9)),
        st.builds(lambda w, g: {"name": "self_extend", "window": w, "group": g}, st.integers(1, 40), st.integers(1, 9)),
        st.builds(lambda w, s: {"name": "string_remap", "shift": w + s, "window": w}, st.integers(1, 20), st.integers(1, 20)),
        st.builds(lambda s, a: {"name": "dual_chunk", "chunk": s + a, "local": s}, st.integers(1, 9), st.integers(1, 20)),
        st.builds(lambda n, f: {"name": "yarn_beyond", "train_length": n, "factor": f}, st.integers(1, 40), st.floats(1, 9)),
    ),
    "score": st.builds(lambda c: {"name": "cosscale", "scale": c}, st.floats(0.1, 128)),
    "temperature": st.one_of(
        st.builds(
            lambda name, n, c: {"name": name, "train_length": n, "clamp": c},
            st.sampled_from(["infoscale", "logn", "softmax_plus", "yarn_temperature"]),
            st.integers(2, 60),
            st.booleans(),
        ),
        st.just({"name": "log_length"}),
        st.builds(
            lambda t, b: {"name": "adaptive_temperature", "threshold": t, "beyond": b, "coefficients": [-0.2, 1.0, 0.4]},
            st.floats(0, 2),
            st.sampled_from(["published", "saturate"]),
        ),
    ),
    "logit_map": st.one_of(
        st.just({"name": "alibi"}),
        st.builds(
            lambda t, s, x: {"name": "scale_invariant", "tau": t, "sink_tokens": s, "strength": x},
            st.floats(1e-3, 1e4),
            st.integers(0, 4),
            st.floats(0, 1),
        ),
    ),
    "visibility": st.one_of(
        st.builds(lambda w: {"name": "windowed", "window": w}, st.integers(1, 40)),
        st.builds(
            lambda n, w, s: {"name": n, "window": w, "sinks": s},
            st.sampled_from(["streaming", "lm_infinite"]),
            st.integers(1, 40),
            st.integers(0, 6),
        ),
    ),
    "sink": st.builds(
        lambda s, own: {"name": "attention_sink", "logit": s, "learned": own}, st.floats(-30, 30), st.booleans()
    ),
    "output_norm": st.builds(
        lambda p, e: {"name": "output_standardise", "per_head": p, "epsilon": e}, st.booleans(), st.floats(1e-3, 1.0)
    ),
}


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    slots = {slot: draw(OPTIONS[slot]) for slot in SLOTS if draw(st.booleans())}
    if "positions" in slots and slots.get("visibility", {}).get("name") in ("streaming", "lm_infinite"):
        del slots["visibility"]
    if "score" in slots and slots.get("positions", {}).get("name") == "yarn_beyond":
        slots["positions"] |= {"attention_factor": 1.0}
    batch, group, kv_heads = draw(st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3)))
    q_len, kv_len, key_start = draw(st.tuples(st.integers(1, 24), st.integers(1, 32), st.integers(0, 40)))
    first = draw(st.none() | st.integers(max(key_start - 10, 0), key_start + 60))
    if slots.keys() & {"positions", "visibility"}:  # a remap knows no keys that come after their query
        first = None if first is None or first < key_start else first
        q_len = min(q_len, kv_len)
    shape = {"b": batch, "h": group * kv_heads, "kv": kv_heads, "q": q_len, "k": kv_len, "d": draw(st.integers(1, 9))}
    mask = None
    if draw(st.booleans()):
        of = draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, group * kv_heads]))
        mask = mask_of(*of, q_len, kv_len, seed=draw(st.integers(0, 99)))
    options: dict[str, Any] = {"attention_mask": mask, "key_start": key_start, "query_start": first}
    if draw(st.booleans()):  # a whole text, whose positions jump
        shape["k"] = kv_len = shape["q"] = q_len
        options |= {"attention_mask": None, "query_start": None}
        steps = draw(st.lists(st.sampled_from([1, 1, 2, 9]), min_size=kv_len, max_size=kv_len))
        options["position_ids"] = torch.tensor([steps]).cumsum(1)
    return {
        "shape": shape,
        "config": LongAttnConfig(**slots),
        "options": options | {"scaling": draw(st.none() | st.floats(0.01, 3.0))},
        "interleaved": draw(st.booleans()),
        "blocks": draw(st.sampled_from([1, 100, 1000, 1 << 21])),
    }


@pytest.mark.parametrize("remap", [{"name": "rerope"}, {"name": "self_extend", "group": 3}])
@pytest.mark.parametrize("masked", [False, True])
def test_two_methods_that_split_keys_where_positions_jump(remap: dict[str, Any], masked: bool) -> None:
    """An interval of one method is not to be looked up among the keys that another has left."""
    config = LongAttnConfig(positions=remap | {"window": 5}, visibility={"name": "windowed", "window": 12})
    ids = torch.tensor([[1, 1, 1, 4, 1, 1, 1, 1, 7, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1]]).cumsum(1)
    agree(inputs(), config, position_ids=ids, attention_mask=mask_of(2, 1, 19, 19) if masked else None)


@pytest.mark.slow
@settings(max_examples=270, derandomize=True, deadline=None, database=None)
@given(calls())
def test_random_calls_of_random_methods(call: dict[str, Any]) -> None:
    turn = Rotation(rotation(call["shape"]["d"]).inv_freq, call["interleaved"])
    with small(BLOCK_ELEMENTS=call["blocks"]):
        results = [
            with_gradients(function, inputs(**call["shape"]), call["config"], rotation=turn, **call["options"])
            for function in (hf_longattn.attention, reference_attention)
        ]
    for got, want in zip(*results, strict=True):
        assert got.isfinite().all()
        close(got, want, 1e-8)


# compiled ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    crossed(
        [
            "alibi",
            "logn",
            "infoscale+cosscale",
            "adaptive_saturated",
            "streaming+adaptive",
            "attention_sink_learned",
            "all_slots",
        ],
        3,
    ),
)
@torch.no_grad()
def test_methods_compile(case: str) -> None:
    m, ids = hf_longattn.apply(stock("llama", num_hidden_layers=2), CASES[case]), tokens(length=17)
    torch._dynamo.reset()
    compiled = torch.compile(m, fullgraph=True, backend="eager")
    close(compiled(ids, use_cache=False).logits, m(ids, use_cache=False).logits)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["scale_invariant", "rerope+scale_invariant"])
@torch.no_grad()
def test_a_strength_compiles_nothing_anew(case: str) -> None:
    window = {"window": 7} if case.startswith("rerope") else {}
    config, ids = LongAttnConfig.preset(case, strength=0.25, **window), tokens(length=17)
    m = hf_longattn.apply(stock("llama", num_hidden_layers=1), config)
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(m, fullgraph=True, backend=backend)
    before = []
    for strength in (0.25, 0.5, 1.0, 0.0, 0.75):
        hf_longattn.update(m, strength=strength)
        got, want = (f(ids, use_cache=False).logits for f in (compiled, m))
        close(got, want)
        assert all((got - x).abs().max() > 1e-3 for x in before)
        before.append(got)
    assert len(graphs) == 1


# half precision ---------------------------------------------------------------------------------------------------------

#: By which factor the error may exceed sdpa's where that is more than 2: queries and keys are rounded once more after a
#: fold, and the sharper the logits, the more that counts. `tiled` folds in float32.
SHARP = {"ssmax": 2.5, "cosscale of 16": 2.5, "cosscale of 128": 6.0}
ROUGH = CONFIGS | {f"cosscale of {c}": LongAttnConfig.preset("cosscale", scale=float(c)) for c in (16, 128)}


@pytest.mark.parametrize("backend", crossed(["auto", "tiled"], ["auto"]))
@pytest.mark.parametrize("case", ROUGH)
@torch.no_grad()
def test_bfloat16_error(case: str, backend: str) -> None:
    """Relative to what comes out, at most twice what sdpa loses on plain attention."""
    g = torch.Generator().manual_seed(2)
    rough = [torch.randn(2, HEADS, 192, 64, generator=g).bfloat16() for _ in range(3)]
    exact = [x.double() for x in rough]
    turn = Rotation(rotation(64).inv_freq.float())

    def error(got: Tensor, want: Tensor) -> float:
        return float((got.double() - want).pow(2).mean().sqrt() / want.pow(2).mean().sqrt())

    budget = error(*(scaled_dot_product_attention(*x, is_causal=True) for x in (rough, exact)))
    got = hf_longattn.attention(*rough, ROUGH[case], rotation=turn, backend=backend)
    assert got.dtype == torch.bfloat16
    allowed = 2.0 if backend == "tiled" else SHARP.get(case, 2.0)
    assert error(got, reference_attention(*exact, ROUGH[case], rotation=turn)) <= allowed * budget


# rows -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True])
def test_positions_that_differ_in_the_padding_alone_are_those_of_indices(inside: bool) -> None:
    """A mask that hides the padding which the intervals hide, of one text in two."""
    n, pad = 5, 2
    a, start = torch.arange(n)[None], torch.tensor([[pad], [0]])
    allowed = (a >= start)[:, None, None]
    rows = rows_of(a, 0, start, start, a, allowed)
    query_ids, key_ids = rows.query_positions(), rows.key_positions(n).clone()
    key_ids[0, pad if inside else 0] = 77
    simple = rows.at(query_ids, key_ids).simplified(n)
    assert simple.allowed is None
    assert (simple.key_ids is None) is not inside


@pytest.mark.parametrize("scaling", [0.0, -0.7])
@pytest.mark.parametrize("case", ["logn", "rerope", "attention_sink"])
def test_a_scaling_that_is_not_positive(case: str, scaling: float) -> None:
    """PyTorch's fused kernels scale what causality hides, -inf, too: 0 gives nan, and less than 0 the wrong keys."""
    agree(inputs(), CONFIGS[case], scaling=scaling)
    with pytest.raises(ValueError, match="fused kernels need one above 0"):
        hf_longattn.attention(*inputs(), CONFIGS[case], scaling, backend="fused", rotation=rotation(inputs()[0].shape[-1]))


def test_attention_refuses_what_does_not_fit() -> None:
    query, key, value = inputs()
    heads, d = query.shape[1], query.shape[-1]
    for sinks in (torch.zeros(1), torch.zeros(heads + 1)):
        with pytest.raises(ValueError, match=rf"must be \(heads,\), one for each of {heads} query heads"):
            hf_longattn.attention(query, key, value, CONFIGS["logn"], sink_logits=sinks)
    with pytest.raises(ValueError, match=f"rotation turns features up to {2 * d} of a head_dim of {d}"):
        hf_longattn.attention(query, key, value, CONFIGS["rerope"], rotation=rotation(2 * d))
    for frequencies in (rotation(d).inv_freq[None], torch.ones(d // 2, dtype=torch.int64)):  # one row of them was one pair
        with pytest.raises(ValueError, match=r"inv_freq of a rotation must be of a floating-point dtype, \(pairs,\), got"):
            hf_longattn.attention(query, key, value, CONFIGS["rerope"], rotation=Rotation(frequencies))
    with pytest.raises(TypeError, match=r"rotation takes hf_longattn\.Rotation\(inv_freq\), got Tensor"):
        hf_longattn.attention(query, key, value, CONFIGS["rerope"], rotation=rotation(d).inv_freq)  # type: ignore[arg-type]
    for name in ("query", "attention_mask", "position_ids", "sink_logits"):
        given: dict[str, Any] = {"query": query, "key": key, "value": value, "config": CONFIGS["logn"]}
        with pytest.raises(TypeError, match=f"{name} must be a tensor, got list"):
            hf_longattn.attention(**given | {name: [1]})


def test_positions_in_a_graph() -> None:
    """Read by the graph as it runs."""
    query, key, value = inputs(q=9, k=9)
    ids = torch.arange(9)[None] * 2

    def call(ids: Tensor) -> Tensor:
        return hf_longattn.attention(query, key, value, CONFIGS["scale_invariant"], position_ids=ids)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    close(compiled(ids), call(ids), 1e-10)
    with pytest.raises(RuntimeError, match="position_ids must grow"):
        compiled(ids.flip(1))
