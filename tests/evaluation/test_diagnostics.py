"""What capture measures, against attention weights from a dense pass and NumPy; and that it leaves no trace."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import closed_form
import numpy as np
import pytest
import torch
from cases import CASES
from helpers import fresh, model, multimodal, picture, pieces, stock, tokens
from torch import Tensor
from transformers import PreTrainedModel

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.core.call import Call
from hf_longattn.core.geometry import AttentionLayout
from hf_longattn.core.reference import dense_attention
from hf_longattn.evaluation.measures import blocks
from hf_longattn.evaluation.measures.diagnostics import QUANTITIES, WHAT, Diagnostics
from hf_longattn.evaluation.measures.sums import DRAWS, Options, Sums, collect
from hf_longattn.integration.caches import CACHE
from hf_longattn.integration.observer import observe


def same(actual: Tensor, expected: Any, tolerance: float = 2e-5) -> None:
    expected = torch.as_tensor(np.asarray(expected)).double()
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=1e-4, equal_nan=True)


@torch.no_grad()
def weights(model: PreTrainedModel, ids: Tensor, **inputs: Any) -> list[np.ndarray]:
    """By layer: attention weights (batch, heads, n, n) in float64, from the dense path."""
    model = copy.deepcopy(model)  # transformers leaves hooks behind
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")
    out = model(ids, output_attentions=True, use_cache=False, **inputs).attentions
    return [a.double().numpy() for a in out]


def grouped(per_row: np.ndarray, rows: np.ndarray, lengths: tuple[int, ...]) -> np.ndarray:
    """(batch, heads, n) to means (heads, groups) over the rows with lengths[k] <= row + 1 < 2 lengths[k]."""
    n = rows + 1
    with np.errstate(invalid="ignore"):
        return np.stack(
            [np.where((n >= k) & (n < 2 * k), per_row, 0).sum((0, 2)) / count(n, k) / len(per_row) for k in lengths], -1
        )


def count(n: np.ndarray, k: int) -> int:
    return ((n >= k) & (n < 2 * k)).sum()


def oracle(p: np.ndarray, rows: np.ndarray, found: Diagnostics, local: int, sinks: int) -> dict[str, np.ndarray]:
    """What follows from the weights alone, for one layer; p (batch, heads, rows, n)."""
    i, j = rows[:, None], np.arange(p.shape[-1])
    with np.errstate(divide="ignore", invalid="ignore"):
        log = np.where(p > 0, np.log(p), 0)
        out = {
            "entropy": grouped(-(p * log).sum(-1), rows, found.lengths),
            "local_mass": grouped((p * (i - j < local)).sum(-1), rows, found.lengths),
            "sink_mass": grouped((p * (j < sinks)).sum(-1), rows, found.lengths),
            "spread": grouped(np.log(p.max(-1) / np.where(p > 0, p, 2).min(-1)), rows, found.lengths),
        }
        masses, entropies = [], []
        for first, last in found.ranges:
            inside = p * ((i - j >= first) & (i - j < last) & (j >= sinks))
            mass = inside.sum(-1)
            q = inside / mass[..., None]
            h = -np.where(q > 0, q * np.log(q), 0).sum(-1)
            masses.append(grouped(mass, rows, found.lengths))
            reached = mass > 0
            n = rows + 1
            by_length = []
            for k in found.lengths:
                group = reached & ((n >= k) & (n < 2 * k))
                by_length.append(np.where(group, h, 0).sum((0, 2)) / group.sum((0, 2)))
            entropies.append(np.stack(by_length, -1))
        return out | {"range_mass": np.stack(masses, -1), "range_entropy": np.stack(entropies, -1)}


def check(model: PreTrainedModel, ids: Tensor, rows: int | None = None, **inputs: Any) -> Diagnostics:
    dense = weights(model, ids, **inputs)
    with torch.no_grad(), hf_longattn.capture(model, rows=rows, delta=3, local=5, sinks=2) as seen:
        model(ids, use_cache=False, **inputs)
    found = seen.result()
    chosen = Options(rows=rows).choose(ids.shape[1])
    numbers = np.arange(ids.shape[1]) if chosen is None else chosen.numpy()
    for at, layer in enumerate(found.layers):
        for name, want in oracle(dense[layer][:, :, numbers], numbers, found, 5, 2).items():
            same(found[name][at], want)
    assert int(found.rows.sum()) == ids.shape[0] * len(numbers)
    return found


@pytest.fixture(autouse=True)
def small_blocks(sizes: Callable[..., None]) -> None:
    sizes(LOGITS=4000)


# the numbers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gpt2", "qwen3"])
def test_an_unmodified_model_is_measured_exactly(family: str) -> None:
    found = check(stock(family), tokens(length=61))
    types = getattr(stock(family).config, "layer_types", None) or ["full_attention"] * 4
    assert found.layers == tuple(i for i, kind in enumerate(types) if kind == "full_attention")
    assert found.lengths == (1, 2, 4, 8, 16, 32)
    assert re.match(r"Diagnostics of layers .* 122 rows .*entropy \(", repr(found))
    assert len(repr(found)) < 1000
    assert found.ranges == ((0, 1), (1, 3), (3, 9), (9, 27), (27, 81))
    same(found["range_mass"].sum(-1) + found["sink_mass"], torch.ones(found["entropy"].shape))
    same(found["temperature"], torch.ones(found["entropy"].shape))
    same(found["temperature_share"], torch.zeros(found["entropy"].shape))


@pytest.mark.parametrize("case", CASES)
def test_every_method_is_measured_exactly(case: str) -> None:
    check(model("llama", CASES[case]), tokens(length=40))


@pytest.mark.parametrize("case", ["scale_invariant", "adaptive_temperature", "all_slots", "leaky_rerope"])
def test_methods_over_a_softcap(case: str) -> None:
    check(model("gemma2", CASES[case]), tokens(length=40))


def test_sliding_layers_are_seen_where_a_method_changes_them() -> None:
    under = model("gemma3", CASES["logn"].replace(layers="all"))
    found = check(under, tokens(length=40))
    assert found.layers == (0, 1, 2, 3)
    assert found["range_mass"][0, :, :, -2:].max() == 0  # distances beyond the window of 8


def test_layers_that_the_method_leaves_out_are_seen_too() -> None:
    assert check(model("llama", CASES["alibi"].replace(layers=(1, 3))), tokens(length=30)).layers == (0, 1, 2, 3)


@pytest.mark.parametrize("case", [None, "dual_chunk"])
def test_a_sample_of_rows_is_those_rows(case: str | None) -> None:
    found = check(stock("llama") if case is None else model("llama", CASES[case]), tokens(length=90), rows=11)
    assert int(found.rows.sum()) == 22
    picked = Options(rows=11).choose(90)
    assert ((picked >= torch.arange(11) * 90 // 11) & (picked < (torch.arange(11) + 1) * 90 / 11)).all()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_logits_of_an_unmodified_model_are_those_of_measure(family: str) -> None:
    """Which has a dense oracle of its own."""
    ids = tokens(length=50)
    want = hf_longattn.measure(stock(family), [ids])
    with torch.no_grad(), hf_longattn.capture(unmodified := stock(family), what="logits") as seen:
        unmodified(ids)
    found = seen.result()
    same(found["logit_mean"], want.logit_mean[list(found.layers)])
    same(found["logit_variance"], want.logit_variance[list(found.layers)])


def test_logits_under_a_map_are_the_mapped_ones() -> None:
    config, ids = CASES["calibrated"], tokens(length=50)
    under, calls = model("llama", config), {}
    with torch.no_grad(), observe(under, lambda layer, call, output: calls.setdefault(layer.index, call)):
        under(ids)
    with torch.no_grad(), hf_longattn.capture(under, what="logits") as seen:
        under(ids)
    i, j = np.arange(50)[:, None], np.arange(50)
    for layer, call in calls.items():
        key = call.key.repeat_interleave(2, 1).transpose(-1, -2)
        s = (call.scaling * call.query.double() @ key.double()).numpy()
        mapped = closed_form.scale_invariant(config.logit_map.to_dict(), layer, s, i - j, j)
        kept = mapped[:, :, (j <= i) & (j > 0)]
        same(seen.result()["logit_mean"][layer], kept.mean((0, 2)))
        same(seen.result()["logit_variance"][layer], kept.var(-1).mean(0) + kept.mean(-1).var(0))


@pytest.mark.parametrize("case", ["infoscale", "logn", "adaptive_temperature", "adaptive_saturated", "mapped+adaptive"])
def test_temperatures_are_those_of_the_papers(case: str) -> None:
    """In the first layer, which gets the same inputs with and without the temperature."""
    config, ids = CASES[case], tokens(length=40)
    with torch.no_grad(), hf_longattn.capture(under := model("llama", config), [0], "temperature") as seen:
        under(ids)
    parameters = hf_longattn.get_config(under).temperature.to_dict()
    if case in ("infoscale", "logn"):
        factor = getattr(closed_form, case)(parameters, np.arange(1, 41), 8)[None, None].repeat(2, 0).repeat(4, 1)
    else:
        rest = config.replace(temperature=None)
        p = weights(model("llama", rest) if rest.methods else stock("llama"), ids)[0]
        entropy = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(-1)
        factor = closed_form.adaptive_temperature(parameters, entropy)
    found = seen.result()
    same(found["temperature"][0], grouped(factor, np.arange(40), found.lengths))
    same(found["temperature_share"][0], grouped(factor != 1, np.arange(40), found.lengths))
    assert 0 < found.overall("temperature_share").min() < 1


def test_overall_is_the_mean_over_rows() -> None:
    plain, ids = stock("llama"), tokens(length=45)
    p = weights(plain, ids)[2]
    with torch.no_grad(), hf_longattn.capture(plain, [2], delta=4) as seen:
        plain(ids)
    found = seen.result()
    same(found.overall("sink_mass")[0], p[..., 0].mean((0, 2)))
    i, j = np.arange(45)[:, None], np.arange(45)
    far = p * ((i - j >= 16) & (i - j < 64) & (j > 0))
    same(found.overall("range_mass")[0, :, 3], far.sum(-1).mean((0, 2)))
    q = far[:, :, 17:] / far[:, :, 17:].sum(-1, keepdims=True)  # 16 tokens back from the 17th is the first, in no range
    same(found.overall("range_entropy")[0, :, 3], -np.where(q > 0, q * np.log(np.where(q > 0, q, 1)), 0).sum(-1).mean((0, 2)))
    with pytest.raises(ValueError, match="output_slope"):
        found.overall("output_deviation")


# the ways in which a text can arrive ---------------------------------------------------------------------------------------


def measured(model: PreTrainedModel, *calls: dict[str, Any]) -> Diagnostics:
    with torch.no_grad(), hf_longattn.capture(model, local=5) as seen:
        for call in calls:
            model(**call)
    return seen.result()


def assert_equal(a: Diagnostics, b: Diagnostics, leave_out: tuple[str, ...] = ("qq",)) -> None:
    assert (a.layers, a.lengths, a.ranges) == (b.layers, b.lengths, b.ranges)
    assert torch.equal(a.rows, b.rows)
    assert torch.equal(a.range_rows, b.range_rows)
    for name in QUANTITIES:
        if name not in leave_out:
            same(a[name], b[name], 1e-4)


@pytest.mark.parametrize("case", ["unmodified", "scale_invariant", "streaming+adaptive", "dual_chunk", "logn"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(case: str, side: str) -> None:
    under = stock("llama") if case == "unmodified" else model("llama", CASES[case])
    long, short = tokens(1, 37, seed=1), tokens(1, 21, seed=2)
    pad = torch.zeros(1, 16, dtype=torch.int64)
    padded = torch.cat([long, torch.cat([pad, short] if side == "left" else [short, pad], 1)])
    mask = (padded != 0).long()
    together = measured(under, {"input_ids": padded, "attention_mask": mask, "use_cache": False})
    apart = measured(under, *({"input_ids": x, "use_cache": False} for x in (long, short)))
    assert_equal(together, apart)


@pytest.mark.parametrize("case", ["scale_invariant", "dual_chunk"])
def test_packing_changes_nothing(case: str) -> None:
    under, texts = model("llama", CASES[case]), (tokens(1, 19, seed=1), tokens(1, 28, seed=2))
    row = {"input_ids": torch.cat(texts, 1), "position_ids": torch.cat([torch.arange(19), torch.arange(28)])[None]}
    assert_equal(measured(under, row | {"use_cache": False}), measured(under, *({"input_ids": x} for x in texts)))


@pytest.mark.parametrize("case", ["unmodified", "leaky_rerope", "leaky_by_layer", "mapped+adaptive"])
def test_a_cache_changes_nothing(case: str) -> None:
    under = stock("llama") if case == "unmodified" else model("llama", CASES[case])
    ids, cache, begin = tokens(length=26), None, 0
    with torch.no_grad(), hf_longattn.capture(under, local=5) as seen:
        for size in pieces(26):
            cache = under(ids[:, begin : begin + size], **{CACHE: cache}, use_cache=True)[CACHE]
            begin += size
    assert_equal(seen.result(), measured(under, {"input_ids": ids}))


@pytest.mark.parametrize("case", ["mapped+adaptive", "leaky_rerope", "streaming"])
def test_jumping_positions_change_logits_and_not_what_is_counted(case: str) -> None:
    """Ranges and the last keys are told by tokens in between, whatever their positions say."""
    positions = torch.cat([torch.arange(20), 300 + torch.arange(20)])[None].expand(2, -1)
    config, ids = CASES[case], tokens(length=40)
    check(model("llama", config), ids, position_ids=positions, attention_mask=torch.ones_like(ids))


def test_the_first_token_is_in_no_range() -> None:
    """All attention on it leaves nothing to any distance, near or far, in a text of its own or packed behind another."""
    call = gaussian(1, 2, 40, 40)
    call.key[:, :, 0] = 1000.0
    call.query.abs_()
    found = collected(call, what=("ranges", "mass"))
    same(found.overall("sink_mass"), torch.ones(1, 2))
    same(found.overall("range_mass"), torch.zeros(1, 2, len(found.ranges)))
    assert found.range_rows[0].sum(0).tolist() == [39, 38, 35, 23]  # of 40 rows those that see another key there


def test_pictures_are_read() -> None:
    """Keys ahead of a query, inside a picture, are in no range of distances; everything else counts them."""
    found = measured(multimodal(), picture())
    mass = found["range_mass"].sum(-1) + found["sink_mass"]
    assert mass.min() < 0.999
    assert mass.max() < 1 + 1e-5


def test_output_attentions_is_seen_too() -> None:
    under, ids = fresh("llama", CASES["alibi"]), tokens()
    assert_equal(measured(under, {"input_ids": ids, "output_attentions": True}), measured(under, {"input_ids": ids}))


# Gaussian calls --------------------------------------------------------------------------------------------------------------


def gaussian(batch: int, heads: int, n: int, queries: int, uniform: bool = False) -> Call:
    """Independent logits N(0, 1) (or all 0) and values N(0, 1)."""
    generator = torch.Generator().manual_seed(3)
    key, value = (torch.randn(batch, heads, n, width, generator=generator, dtype=torch.float64) for width in (1, 6))
    query = torch.full((batch, heads, queries, 1), 0.0 if uniform else 1.0, dtype=torch.float64)
    rows = AttentionLayout.causal(queries, n, None, 0, torch.device("cpu"))
    return Call(query, key, value, LongAttnConfig(), rows, 1.0)


def output_of(call: Call) -> torch.Tensor:
    return hf_longattn.reference_attention(call.query, call.key, call.value, LongAttnConfig(), scaling=1.0)


def collected(call: Call, **options: Any) -> Diagnostics:
    sums = Sums(Options(**options))
    sums.add(call, output_of(call))
    return collect({0: sums})


def test_qq_of_gaussian_logits_is_the_diagonal() -> None:
    found = collected(gaussian(1, 3, 3000, 400), what=("qq", "logits"))
    z = torch.tensor(found.z, dtype=torch.float64)
    near = z.abs() <= 2
    assert (found["qq"][0] - z)[:, near].abs().max() < 0.2
    same(found["logit_mean"][0], torch.zeros(3), 0.1)
    same(found["logit_variance"][0], torch.ones(3), 0.1)


def test_qq_finds_another_distribution() -> None:
    """Exponential logits: the standardised quantile where a Gaussian has z is -ln(1 - Φ(z)) - 1."""
    call = gaussian(1, 2, 3000, 400)
    call.key[:] = -torch.log1p(-torch.special.ndtr(call.key))
    found = collected(call, what=("qq",))
    z = torch.tensor(found.z, dtype=torch.float64)
    wanted = -torch.log1p(-torch.special.ndtr(z)) - 1
    assert (found["qq"][0] - wanted)[:, z.abs() <= 2].abs().max() < 0.25


def test_logits_drawn_from_calls_count_by_their_pairs() -> None:
    """Of a long call not every row is drawn from, and those that are stand for the others."""
    for n in (800, 100):
        sums = Sums(Options(("qq",), sinks=0))
        call = gaussian(1, 1, n, n)
        sums.add(call, output_of(call))
        pairs = sum(float(weight.sum() / DRAWS) for _, weight in sums.drawn)
        assert pairs == pytest.approx(n * (n + 1) / 2, rel=0.01)


@pytest.mark.slow
def test_outputs_over_independent_tokens_vanish_with_slope_one_half() -> None:
    found = collected(gaussian(40, 2, 600, 600, uniform=True), what=("outputs",))
    assert found["output_slope"][0].tolist() == pytest.approx([-0.5, -0.5], abs=0.03)
    last = found["output_deviation"][0, :, found.lengths.index(256)]
    assert last.tolist() == pytest.approx([256**-0.5 * np.sqrt(np.log(2))] * 2, rel=0.1)  # mean of 1/n over 256..511
    assert found.rows.sum() == 0  # no query row was read


def test_the_output_deviation_is_over_rows() -> None:
    call = gaussian(2, 3, 64, 64)
    found = collected(call, what=("outputs",))
    for k, length in enumerate(found.lengths[:-1]):
        part = output_of(call)[:, :, length - 1 : 2 * length - 1].numpy()
        same(found["output_deviation"][0, :, k], np.sqrt(part.var((0, 2)).mean(-1)))


# leaving no trace ------------------------------------------------------------------------------------------------------------


def state(model: PreTrainedModel, ids: Tensor) -> tuple[Any, ...]:
    with torch.no_grad():
        logits = model(ids).logits
    plans = [m.__dict__.get("_longattn") for m in model.modules()]
    return logits, model.config.to_dict(), model.config._attn_implementation, plans, str(hf_longattn.describe(model))


@pytest.mark.parametrize("case", ["unmodified", "scale_invariant", "adaptive_temperature", "rerope"])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma2"])
def test_capture_leaves_no_trace(family: str, fails: bool, case: str) -> None:
    under = stock(family) if case == "unmodified" else fresh(family, CASES[case])
    if case == "unmodified" and family == "gemma2":
        under.set_attn_implementation("eager")  # transformers 5.17 picks sdpa, which leaves the softcap out
    ids = tokens(length=33)
    before = state(under, ids)
    try:
        with torch.no_grad(), hf_longattn.capture(under):
            during = under(ids).logits
            if fails:
                raise KeyError("inside")
    except KeyError:
        assert fails
    after = state(under, ids)
    assert torch.equal(after[0], before[0])
    assert after[1:] == before[1:]
    if family == "llama" or case != "unmodified":
        assert torch.equal(during, before[0])
    else:  # eager with a softcap, and sliding layers that get a mask: another kernel
        torch.testing.assert_close(during, before[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", ["unmodified", "scale_invariant"])
def test_a_model_is_not_changed_while_it_is_looked_at(case: str) -> None:
    """The end of a capture would give back the attention from before the change, and not its length or learned parts."""
    under, ids = stock("llama") if case == "unmodified" else fresh("llama", CASES[case]), tokens(length=33)
    before = state(under, ids)
    with hf_longattn.capture(under):
        for change in (
            lambda: hf_longattn.extend(under, to=1024),
            lambda: hf_longattn.apply(under, "logn", learned=True),
            lambda: hf_longattn.using(under, "alibi").__enter__(),
            lambda: hf_longattn.capture(under).__enter__(),
            lambda: under.set_attn_implementation("eager"),
        ):
            with pytest.raises(RuntimeError, match="a capture of this LlamaForCausalLM is open"):
                change()
        twin = copy.deepcopy(under)
    after = state(under, ids)
    assert torch.equal(after[0], before[0])
    assert after[1:] == before[1:]
    assert hf_longattn.get_config(hf_longattn.apply(twin, "alibi")).name == "alibi"  # nobody looks at a copy


def test_a_capture_that_outlives_the_method_it_measured_gives_none_back() -> None:
    under, ids = stock("llama"), tokens(length=33)
    before = state(under, ids)
    with contextlib.ExitStack() as looking, hf_longattn.using(under, CASES["alibi"]):
        looking.enter_context(hf_longattn.capture(under))
    after = state(under, ids)
    assert torch.equal(after[0], before[0])
    assert after[1:] == before[1:]


@pytest.mark.parametrize("make", [lambda: stock("llama"), multimodal])
def test_a_plain_model_that_is_saved_meanwhile_is_saved_as_one(make: Any, tmp_path: Path) -> None:
    m = make()
    m.save_pretrained(tmp_path / "before")
    with hf_longattn.capture(m):
        m.save_pretrained(tmp_path / "meanwhile")
    before, meanwhile = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("before", "meanwhile"))
    assert meanwhile == before


def test_only_the_named_layers_and_groups_are_measured() -> None:
    seen_layers: list[int] = []
    plain = stock("llama")
    with torch.no_grad(), hf_longattn.capture(plain, [3, 1], ("mass",), on_layer=seen_layers.append) as seen:
        plain(tokens())
    found = seen.result()
    assert (found.layers, seen_layers) == ((1, 3), [1, 3])
    assert set(found.values) == {"local_mass", "sink_mass"}
    with pytest.raises(KeyError, match=r"entropy was not measured.*what=\(.entropy.,\)"):
        found["entropy"]


def test_to_dict_is_json() -> None:
    found = measured(stock("llama"), {"input_ids": tokens(1, 9)})
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert set(data["values"]) == set(QUANTITIES)
    assert {q.what for q in QUANTITIES.values()} == set(WHAT)
    for name, entry in data["values"].items():
        assert np.shape(entry["values"]) == found[name].shape
        assert len(entry["dimensions"]) == found[name].ndim
    again = Diagnostics.from_dict(data)
    assert again.to_dict() == found.to_dict()
    assert_equal(again, found, ())
    assert data["values"]["output_slope"]["values"][0][0] is None  # too short a text for a slope


def test_wrong_input_is_refused() -> None:
    gemma = stock("gemma3")
    for arguments, message in (
        ({"what": "entrpy"}, r"unknown 'entrpy'; `what` is any of ranges, entropy"),
        ({"what": ()}, "empty"),
        ({"rows": 0}, "rows must be an integer >= 1"),
        ({"delta": 1}, "delta must be an integer >= 2"),
        ({"layers": [1, 7]}, r"7 \(not in this model\)"),
        ({"layers": [0]}, r"0 \(sliding window\)"),
    ):
        with pytest.raises(ValueError, match=message), hf_longattn.capture(gemma, **arguments):
            raise AssertionError("it opened")
    assert gemma.config._attn_implementation == "sdpa"
    with hf_longattn.capture(gemma) as seen, pytest.raises(ValueError, match="nothing was captured"):
        seen.result()


@pytest.mark.parametrize("case", ["scale_invariant", "mapped+adaptive"])
def test_learned_sinks_take_their_share(case: str) -> None:
    """Weights that add up to less than 1, as the dense pass has them."""
    g = torch.Generator().manual_seed(4)
    query, key, value = (torch.randn(1, 4, 19, 8, generator=g, dtype=torch.float64) for _ in range(3))
    rows, sinks = AttentionLayout.causal(19, 19, None, 0, query.device), torch.tensor([-1.0, 0.0, 1.0, 3.0])
    call = Call(query, key, value, CASES[case], rows, 0.7, sink_logits=sinks)
    want = dense_attention(call)[1]
    assert 0 < want.sum(-1).min() < want.sum(-1).max() < 1
    for block in blocks.blocks(call):
        same(block.log_p.exp(), want[:, :, block.which, : block.log_p.shape[-1]])
