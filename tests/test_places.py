"""distance="positions": a text whose position_ids jump equals the longer text whose skipped tokens are masked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import CASES, families
from helpers import close, fresh, model, tokens
from torch import Tensor

import hf_longattn
from hf_longattn import LongAttnConfig, Rotation, attention, reference_attention

LENGTH = 22
SKIPS = ({6: 11, 15: 3}, {9: 17})  # per row of the batch: before which token how many positions are skipped


def jumping(first: int = 0) -> Tensor:
    steps = torch.ones(len(SKIPS), LENGTH, dtype=torch.int64)
    for row, skips in zip(steps, SKIPS, strict=True):
        for index, more in skips.items():
            row[index] += more
    return steps.cumsum(-1) - 1 + first


def placed(case: str, family: str, backend: str | None = None) -> Any:
    return model(family, CASES[case].replace(distance="positions"), backend)


def with_skips(model: Any, ids: Tensor, positions: Tensor, **extra: Any) -> Tensor:
    return model(ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False, **extra).logits


def with_holes(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    """The same tokens in the slots that their positions name, all other slots masked."""
    length = int(positions.max()) + 1
    spread, mask = (
        torch.zeros(len(ids), length, dtype=torch.int64).scatter(1, positions, x) for x in (ids, torch.ones_like(ids))
    )
    logits = model(spread, attention_mask=mask, position_ids=torch.arange(length)[None], use_cache=False).logits
    return logits.gather(1, positions[..., None].expand(-1, -1, logits.shape[-1]))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_jumps_are_distances(case: str, family: str) -> None:
    if family not in families(case) and family != "qwen3":
        pytest.skip("needs rotary positions")
    ids, positions = tokens(2, LENGTH), jumping()
    want = with_holes(model(family, CASES[case]), ids, positions)
    close(with_skips(placed(case, family), ids, positions), want)


@pytest.mark.parametrize("backend", ["reference", "flex"])
@pytest.mark.parametrize("case", ["scale_invariant", "sinks", "alibi", "calibrated", "mapped+adaptive"])
@torch.no_grad()
def test_other_backends(case: str, backend: str) -> None:
    if backend == "flex" and case == "mapped+adaptive":
        backend = "tiled"
    ids, positions = tokens(2, LENGTH), jumping()
    close(with_skips(placed(case, "llama", backend), ids, positions), with_holes(model("llama", CASES[case]), ids, positions))


@pytest.mark.parametrize("case", ["scale_invariant", "calibrated", "rerope", "dual_chunk", "streaming+adaptive"])
def test_gradients(case: str) -> None:
    ids, positions = tokens(2, LENGTH), jumping()
    skipping, holes = fresh("llama", CASES[case].replace(distance="positions")), fresh("llama", CASES[case])
    weight = torch.randn(2, LENGTH, 97, generator=torch.Generator().manual_seed(1))
    (with_skips(skipping, ids, positions) * weight).sum().backward()
    (with_holes(holes, ids, positions) * weight).sum().backward()
    # the embedding of the masked filler differs in nothing: it gets no gradient
    for (name, a), b in zip(skipping.named_parameters(), holes.parameters(), strict=True):
        close(a.grad, b.grad, 2e-4, name)


@pytest.mark.parametrize("case", ["scale_invariant", "rerope", "streaming"])
@torch.no_grad()
def test_left_padding(case: str) -> None:
    ids, positions = tokens(2, LENGTH), jumping()
    want = with_skips(placed(case, "llama"), ids, positions)[1:]
    ids, mask = torch.cat([torch.zeros(2, 4, dtype=torch.int64), ids], 1), torch.ones(2, LENGTH + 4, dtype=torch.int64)
    mask[:, :4] = 0
    positions = torch.cat([torch.ones(2, 4, dtype=torch.int64), positions], 1)
    got = placed(case, "llama")(ids, position_ids=positions, attention_mask=mask, use_cache=False).logits
    close(got[1:, 4:], want)


@torch.no_grad()
def test_right_padding() -> None:
    ids, positions = tokens(2, LENGTH), jumping()
    want = with_skips(placed("rerope", "llama"), ids, positions)
    mask = torch.ones(2, LENGTH + 3, dtype=torch.int64)
    mask[:, LENGTH:] = 0
    ids, positions = (torch.cat([x, torch.zeros(2, 3, dtype=torch.int64)], 1) for x in (ids, positions))
    got = placed("rerope", "llama")(ids, position_ids=positions, attention_mask=mask, use_cache=False).logits
    close(got[:, :LENGTH], want)


@pytest.mark.parametrize("case", ["scale_invariant", "leaky_rerope"])
@torch.no_grad()
def test_without_jumps_nothing_changes(case: str) -> None:
    """Generation, caches and packed texts are as under "slots"."""
    ids = tokens(2, LENGTH)
    plain, by_position = model("llama", CASES[case]), placed(case, "llama")
    assert torch.equal(plain(ids).logits, by_position(ids).logits)
    a, b = (
        m.generate(ids, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True)
        for m in (plain, by_position)
    )
    assert torch.equal(torch.stack(a.logits), torch.stack(b.logits))
    packed = torch.cat([torch.arange(9), torch.arange(LENGTH - 9)])[None].expand(2, -1)
    assert torch.equal(*(m(ids, position_ids=packed, use_cache=False).logits for m in (plain, by_position)))
    shifted = torch.arange(LENGTH)[None] + 40
    close(with_skips(by_position, ids, shifted), plain(ids).logits)


def test_a_jump_without_a_mask_is_refused() -> None:
    """transformers would read it as a new document."""
    for case in ("scale_invariant", "infoscale"):
        for distance in ("slots", "positions"):
            with pytest.raises(ValueError, match="start of a new document"):
                model("llama", CASES[case].replace(distance=distance))(
                    tokens(2, LENGTH), position_ids=jumping(), use_cache=False
                )


def test_jumps_under_slots() -> None:
    with pytest.raises(ValueError, match="distance='positions'"):
        with_skips(model("llama", CASES["alibi"]), tokens(2, LENGTH), jumping())
    with torch.no_grad():  # a length temperature has no distance in it
        by_count = with_skips(model("llama", CASES["infoscale"]), tokens(2, LENGTH), jumping())
        close(by_count, with_skips(placed("infoscale", "llama"), tokens(2, LENGTH), jumping()))


def test_what_positions_cannot_mean_is_refused() -> None:
    by_position, ids = placed("scale_invariant", "llama"), tokens(2, LENGTH)
    back = jumping()
    back[:, 18] = 0
    with pytest.raises(ValueError, match="go back"):
        with_skips(by_position, ids, back)
    with pytest.raises(ValueError, match="use_cache=False"):
        by_position(
            ids,
            position_ids=jumping(),
            attention_mask=torch.ones(2, LENGTH + 1),
            past_key_values=by_position(ids[:, :1]).past_key_values,
        )
    cache = by_position(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="counted without jumps"):
        by_position(ids[:, :1], position_ids=torch.tensor([[90]]), past_key_values=cache)


@torch.no_grad()
def test_compiled_calls_fall_back() -> None:
    by_position, ids = placed("scale_invariant", "llama"), tokens(2, LENGTH)
    want = with_skips(by_position, ids, jumping())
    torch.compiler.reset()
    close(with_skips(torch.compile(by_position, backend="eager"), ids, jumping()), want)


def test_config() -> None:
    config = LongAttnConfig.preset("alibi", distance="positions")
    assert LongAttnConfig.from_dict(config.to_dict()) == config
    assert "distance from positions" in str(hf_longattn.describe(placed("alibi", "llama")))
    with pytest.raises(ValueError, match="distance must be one of slots, positions"):
        LongAttnConfig.preset("alibi", distance="tokens")


@pytest.mark.parametrize("function", [attention, reference_attention])
@pytest.mark.parametrize("case", ["scale_invariant", "rerope", "windowed"])
def test_the_function_takes_positions(function: Any, case: str) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, LENGTH, 8, generator=g, dtype=torch.float64) for n in (4, 2, 2))
    positions, rotation = jumping(), Rotation(torch.tensor([1.0, 0.1, 0.01, 0.0], dtype=torch.float64))
    length = int(positions.max()) + 1
    where = positions[:, None, :, None].expand(-1, 4, -1, 8)
    spread = [torch.zeros(2, x.shape[1], length, 8, dtype=x.dtype).scatter(2, where[:, : x.shape[1]], x) for x in (q, k, v)]
    seen = torch.zeros(2, length, dtype=torch.bool).scatter(1, positions, True)[:, None, None]
    want = reference_attention(*spread, CASES[case], attention_mask=seen, rotation=rotation).gather(2, where)
    close(function(q, k, v, CASES[case], rotation=rotation, position_ids=positions), want, 1e-12)
    for wrong in (positions[:, :-1], positions.flip(1), positions[0]):
        with pytest.raises(ValueError, match="position_ids"):
            function(q, k, v, CASES[case], rotation=rotation, position_ids=wrong)
