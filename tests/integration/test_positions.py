"""Distances are differences of position_ids.

A text whose position_ids jump equals the longer text whose skipped tokens are masked; what position_ids say and the cache or
the mask cannot bear out is refused. Padding inside a text, second turns and trees are scenarios of test_exactness.py.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cases import CASES, FAMILIES, families
from helpers import close, crossed, fresh, model, stock, tokens
from tiny_configs import families as tiny_families
from tiny_configs import tiny
from torch import Tensor
from torch.distributed.tensor.experimental import context_parallel
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

import hf_longattn
from hf_longattn import LongAttnConfig, Rotation, attention, reference_attention
from hf_longattn.integration.caches import CACHE
from hf_longattn.integration.skip_masks import masks_of_jumps

LENGTH = 22
SKIPS = ({6: 11, 15: 3}, {9: 17})  # per row of the batch: before which token how many positions are skipped


def jumping(first: int = 0) -> Tensor:
    steps = torch.ones(len(SKIPS), LENGTH, dtype=torch.int64)
    for row, skips in zip(steps, SKIPS, strict=True):
        for index, more in skips.items():
            row[index] += more
    return steps.cumsum(-1) - 1 + first


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


@pytest.mark.parametrize("family", crossed(["llama", "qwen3", "gpt2"], ["llama"]))
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_jumps_are_distances(case: str, family: str) -> None:
    if family not in families(case) and family != "qwen3":
        pytest.skip("needs rotary positions")
    ids, positions = tokens(2, LENGTH), jumping()
    want = with_holes(model(family, CASES[case]), ids, positions)
    close(with_skips(model(family, CASES[case]), ids, positions), want)


@pytest.mark.parametrize("case", ["scale_invariant", "sinks", "alibi", "calibrated", "mapped+adaptive"])
@torch.no_grad()
def test_the_reference(case: str) -> None:
    ids, positions = tokens(2, LENGTH), jumping()
    close(
        with_skips(model("llama", CASES[case], "reference"), ids, positions),
        with_holes(model("llama", CASES[case]), ids, positions),
    )


@pytest.mark.parametrize("case", ["scale_invariant", "calibrated", "rerope", "dual_chunk", "streaming+adaptive"])
def test_gradients(case: str) -> None:
    ids, positions = tokens(2, LENGTH), jumping()
    skipping, holes = fresh("llama", CASES[case]), fresh("llama", CASES[case])
    weight = torch.randn(2, LENGTH, 97, generator=torch.Generator().manual_seed(1))
    (with_skips(skipping, ids, positions) * weight).sum().backward()
    (with_holes(holes, ids, positions) * weight).sum().backward()
    # the embedding of the masked filler differs in nothing: it gets no gradient
    for (name, a), b in zip(skipping.named_parameters(), holes.parameters(), strict=True):
        close(a.grad, b.grad, what=name)


@pytest.mark.parametrize("case", ["scale_invariant", "rerope", "streaming"])
@torch.no_grad()
def test_left_padding(case: str) -> None:
    ids, positions = tokens(2, LENGTH), jumping()
    want = with_skips(model("llama", CASES[case]), ids, positions)[1:]
    ids, mask = torch.cat([torch.zeros(2, 4, dtype=torch.int64), ids], 1), torch.ones(2, LENGTH + 4, dtype=torch.int64)
    mask[:, :4] = 0
    positions = torch.cat([torch.ones(2, 4, dtype=torch.int64), positions], 1)
    got = model("llama", CASES[case])(ids, position_ids=positions, attention_mask=mask, use_cache=False).logits
    close(got[1:, 4:], want)


@torch.no_grad()
def test_right_padding() -> None:
    ids, positions = tokens(2, LENGTH), jumping()
    want = with_skips(model("llama", CASES["rerope"]), ids, positions)
    mask = torch.ones(2, LENGTH + 3, dtype=torch.int64)
    mask[:, LENGTH:] = 0
    ids, positions = (torch.cat([x, torch.zeros(2, 3, dtype=torch.int64)], 1) for x in (ids, positions))
    got = model("llama", CASES["rerope"])(ids, position_ids=positions, attention_mask=mask, use_cache=False).logits
    close(got[:, :LENGTH], want)


@pytest.mark.parametrize("case", ["scale_invariant", "leaky_rerope"])
@torch.no_grad()
def test_where_a_text_starts_is_nothing_to_distances(case: str) -> None:
    ids, m = tokens(2, LENGTH), model("llama", CASES[case])
    close(with_skips(m, ids, torch.arange(LENGTH)[None] + 40), m(ids).logits)


@torch.no_grad()
def test_a_text_that_starts_late_is_not_continued_and_told_to_start_at_0() -> None:
    """Its positions do continue where the cache ends, so that alone is not the reason."""
    m, ids, late = model("llama", CASES["rerope"]), tokens(2, LENGTH), torch.arange(40, 40 + LENGTH)[None]
    cache = m(ids[:, :6], position_ids=late[:, :6], use_cache=True)[CACHE]
    with pytest.raises(ValueError, match=r"do not start at 0: .* let a text start at 0, which changes no distance"):
        m(ids[:, 6:], position_ids=late[:, 6:], **{CACHE: cache})


@torch.no_grad()
def test_a_jump_behind_cached_keys() -> None:
    """The cached ones counted as usual: their positions are known."""
    m, ids, positions = model("llama", CASES["rerope"]), tokens(2, LENGTH), jumping()
    cache = m(ids[:, :6], use_cache=True)[CACHE]
    rest = m(ids[:, 6:], position_ids=positions[:, 6:] - positions[:, 6:7] + 6, **{CACHE: cache}).logits
    whole = torch.cat([torch.arange(6).expand(2, -1), positions[:, 6:] - positions[:, 6:7] + 6], 1)
    close(rest, with_skips(m, ids, whole)[:, 6:])


@pytest.mark.parametrize("case", ["scale_invariant", "infoscale"])
def test_a_jump_without_a_mask_is_refused(case: str) -> None:
    """transformers would read it as a new document."""
    with pytest.raises(ValueError, match="start of a new document"):
        model("llama", CASES[case])(tokens(2, LENGTH), position_ids=jumping(), use_cache=False)


PACKED = torch.cat([torch.arange(9), torch.arange(LENGTH - 9)])[None]


@pytest.mark.slow
@torch.no_grad()
def test_a_graph_refuses_a_jump_without_a_mask_too() -> None:
    m, ids = hf_longattn.apply(stock("llama", num_hidden_layers=1), CASES["sinks"]), tokens(1, LENGTH)
    positions = torch.arange(LENGTH)[None] + 7 * (torch.arange(LENGTH) >= 10)
    torch.compiler.reset()
    compiled = torch.compile(m, backend="eager")
    with pytest.raises(RuntimeError, match="position_ids jump, go back"):
        compiled(ids, position_ids=positions, use_cache=False)
    masked = {"position_ids": positions, "attention_mask": torch.ones_like(ids), "use_cache": False}
    close(compiled(ids, **masked).logits, m(ids, **masked).logits)


@pytest.mark.slow
@torch.no_grad()
def test_a_graph_refuses_positions_that_go_back_under_masks_of_pairs_too() -> None:
    m, ids = hf_longattn.apply(stock("llama", num_hidden_layers=1), CASES["sinks"]), tokens(1, LENGTH)
    positions = torch.arange(LENGTH)[None] - 6 * (torch.arange(LENGTH) >= 15)
    tree = torch.ones(LENGTH, LENGTH).tril()[None, None].bool()
    torch.compiler.reset()
    for run, error in ((m, ValueError), (torch.compile(m, backend="eager"), RuntimeError)):
        with pytest.raises(error, match=r"position_ids .*go back"):
            run(ids, attention_mask=tree, position_ids=positions, use_cache=False)
        cache = m(ids[:, :9])[CACHE]
        with pytest.raises(error, match=r"position_ids .*go back"):
            run(ids[:, 9:], attention_mask=torch.ones_like(ids), position_ids=positions[:, 9:], **{CACHE: cache})


@pytest.mark.parametrize("case", ["scale_invariant", "infoscale", "adaptive_temperature"])
@pytest.mark.parametrize("extra", [{}, {"attention_mask": torch.ones(1, LENGTH), "use_cache": False}], ids=["cache", "mask"])
def test_packed_documents_that_would_see_each_other_are_refused(case: str, extra: dict[str, Any]) -> None:
    """The default use_cache=True, or any 2-D mask, keeps transformers from telling them apart."""
    with pytest.raises(ValueError, match=r"packed documents, they see each other.*use_cache=False"):
        model("llama", CASES[case])(tokens(1, LENGTH), position_ids=PACKED, **extra)


def test_packed_documents_that_flash_attention_alone_would_tell_apart_are_refused() -> None:
    m, ids, ends = model("llama", CASES["logn"]), tokens(1, LENGTH), torch.tensor([0, 9, LENGTH], dtype=torch.int32)
    numbers = torch.repeat_interleave(torch.arange(2), ends.diff())[None]
    for told in ({"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 15, "max_length_k": 15}, {"seq_idx": numbers}):
        with pytest.raises(ValueError, match=r"cu_seq_lens or seq_idx tells packed documents apart.*position_ids"):
            m(ids, use_cache=False, **told)
        close(m(ids, position_ids=PACKED, use_cache=False, **told).logits[:, 9:], m(ids[:, 9:]).logits)
    with pytest.raises(RuntimeError, match="tells packed documents apart"):
        torch.compile(m, backend="eager")(ids, use_cache=False, seq_idx=numbers)


def test_what_positions_cannot_mean_is_refused() -> None:
    m, ids = model("llama", CASES["scale_invariant"]), tokens(2, LENGTH)
    back = jumping()
    back[:, 18] = 0
    with pytest.raises(ValueError, match="go back"):
        with_skips(m, ids, back)
    cache = m(ids, use_cache=True)[CACHE]
    with pytest.raises(ValueError, match="positions of cached keys are unknown"):
        m(ids[:, :1], position_ids=torch.tensor([[90]]), **{CACHE: cache})
    cache = with_cache(m, ids, jumping())
    with pytest.raises(ValueError, match="positions of cached keys are unknown"):
        m(ids[:, :1], position_ids=jumping()[:, -1:] + 1, **{CACHE: cache})
    tree = torch.ones(LENGTH, LENGTH).tril()[None, None].bool()  # one path, and positions that say there are two
    with pytest.raises(ValueError, match="go back"):
        m(ids, position_ids=PACKED, attention_mask=tree, use_cache=False)


def with_cache(m: Any, ids: Tensor, positions: Tensor) -> Any:
    return m(ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=True)[CACHE]


def test_a_tree_behind_a_cache_of_another_numbering_is_refused() -> None:
    """Rows that do not agree how many visible keys lie before a cached one say nothing about its position."""
    m, ids = model("llama", CASES["alibi"]), tokens(1, 10)
    mask = torch.ones(1, 1, 2, 10, dtype=torch.bool)
    mask[..., 0, 2] = mask[..., 0, 9] = False
    cache = m(ids[:, :8], use_cache=True)[CACHE]
    with pytest.raises(ValueError, match="positions of cached keys are unknown"):
        m(ids[:, 8:], attention_mask=mask, position_ids=torch.tensor([[7, 7]]), **{CACHE: cache})


@pytest.mark.parametrize("case", ["scale_invariant", "rerope", "windowed", "infoscale"])
def test_a_pad_token_inside_a_prompt_is_generated_through(case: str) -> None:
    """generate() gives positions by cumsum over the mask, and its cache has a hole from then on."""
    m, ids = model("llama", CASES[case]), tokens(1, 12)
    padded, mask = torch.cat([ids[:, :7], ids[:, :2] * 0, ids[:, 7:]], 1), torch.ones(1, 14, dtype=torch.int64)
    mask[:, 7:9] = 0
    for options in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
        options |= {"output_logits": True, "return_dict_in_generate": True, "do_sample": False, "disable_compile": True}
        out = m.generate(padded, attention_mask=mask, max_new_tokens=6, **options)
        want = m.generate(ids, max_new_tokens=6, **options)
        close(torch.stack(out.logits), torch.stack(want.logits))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["scale_invariant", "rerope"])
@torch.no_grad()
def test_compiled(case: str) -> None:
    m, ids = hf_longattn.apply(stock("llama", num_hidden_layers=1), CASES[case]), tokens(2, LENGTH)
    m(ids)  # verifies the rotation
    torch.compiler.reset()
    compiled = torch.compile(m, backend="eager")
    mask = torch.ones_like(ids)
    mask[0, 5:8] = 0
    holed = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0), "use_cache": False}
    keep = torch.arange(LENGTH).ne(torch.tensor([[5], [6], [7]])).all(0)
    got, want = compiled(ids, **holed).logits, m(ids, **holed).logits
    close(got[:, keep], want[:, keep])
    close(got[:1, keep], m(ids[:1, keep], use_cache=False).logits)
    with pytest.raises(RuntimeError, match="position_ids jump, go back"):
        compiled(ids, position_ids=PACKED.expand(2, -1), use_cache=True)


def padded_calls(m: Any) -> dict[str, Any]:
    """Arguments of two calls on one cache of a text behind padding, with positions that skip the padding."""
    pad, ids = 5, tokens(1, LENGTH)
    ids[:, :pad] = 0
    mask = (ids > 0).long()
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


@pytest.mark.parametrize("second", [1, 9])
@pytest.mark.parametrize("case", ["scale_invariant", "rerope", "infoscale"])
@torch.no_grad()
def test_calls_on_one_cache_count_alike(case: str, second: int) -> None:
    m, first = model("llama", CASES[case]), LENGTH - second
    a = padded_calls(m)

    def call(part: slice, cache: Any, counting: str) -> Any:
        given = {"input_ids": a["input_ids"][:, part], "attention_mask": a["attention_mask"][:, : part.stop]}
        if counting == "skips":
            given["position_ids"] = a["position_ids"][:, part]
        elif counting == "late":
            given["position_ids"] = torch.arange(LENGTH)[None, part] + 40
        return m(**given, **{CACHE: cache}, use_cache=True)

    want = m(**a, use_cache=False).logits[:, first:]
    for one, two in itertools.product(("skips", "counts", "late"), ("skips", "counts")):
        for given in (None, StaticCache(config=m.config, max_cache_len=LENGTH + 2)):
            cache = call(slice(0, first), given, one)[CACHE]
            if one == two:
                close(call(slice(first, LENGTH), cache, two).logits, want, what=one)
                continue
            with pytest.raises(ValueError, match="are counted differently from those of the keys"):
                call(slice(first, LENGTH), cache, two)
            if given is not None:
                cache.reset()
                call(slice(0, first), cache, two)
                close(call(slice(first, LENGTH), cache, two).logits, want, what=f"{two}, after a reset")


def test_generate_goes_on_from_a_cache_that_counts_as_it_does() -> None:
    m = model("llama", CASES["rerope"])
    a = padded_calls(m)
    given = {"input_ids": a["input_ids"], "attention_mask": a["attention_mask"], "do_sample": False, "max_new_tokens": 3}
    short = {k: x[:, :-1] for k, x in a.items()}
    want = m.generate(**given)
    assert torch.equal(m.generate(**given, **{CACHE: m(**short)[CACHE]}), want)
    del short["position_ids"]
    with pytest.raises(ValueError, match="are counted differently from those of the keys"):
        m.generate(**given, **{CACHE: m(**short)[CACHE]})


# split sequences -----------------------------------------------------------------------------------------------------


def test_context_parallel_is_refused(tmp_path: Path) -> None:
    """It would split the text and replace sdpa alone."""
    ids, m = tokens(1, LENGTH), model("llama", CASES["scale_invariant"])
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path / 'store'}")
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        with (
            context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1]),
            pytest.raises(NotImplementedError, match="context_parallel"),
        ):
            m(ids, use_cache=False)
        m(ids, use_cache=False)
    finally:
        torch.distributed.destroy_process_group()


def test_a_part_of_a_sequence_is_refused_where_several_processes_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, m = tokens(1, LENGTH), model("llama", CASES["scale_invariant"])
    second_half = {
        "position_ids": torch.arange(LENGTH)[None] + LENGTH,
        "attention_mask": torch.ones_like(ids),
        "use_cache": False,
    }
    m(ids, **second_half)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match=f"start at {LENGTH} although nothing comes before"):
        m(ids, **second_half)
    with_skips(m, tokens(2, LENGTH), jumping())
    m(ids[:, :1], **{CACHE: m(ids)[CACHE]})


# the function --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@torch.no_grad()
def test_a_graph_refuses_to_count_otherwise_on_a_cache() -> None:
    m = hf_longattn.apply(stock("llama", num_hidden_layers=1), CASES["rerope"])
    given = padded_calls(m)
    ids, mask = given["input_ids"], given["attention_mask"]
    step = {"input_ids": ids[:, -1:], "attention_mask": mask, "position_ids": given["position_ids"][:, -1:]}
    torch.compiler.reset()
    compiled = torch.compile(m, backend="eager")
    cache = m(ids[:, :-1], attention_mask=mask[:, :-1])[CACHE]  # counts the padding
    with pytest.raises(RuntimeError, match="do not continue the KV cache"):
        compiled(**step, **{CACHE: cache})
    caches = [m(**{name: x[:, :-1] for name, x in given.items()})[CACHE] for _ in range(2)]
    close(compiled(**step, **{CACHE: caches[0]}).logits, m(**step, **{CACHE: caches[1]}).logits)


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


# masks of the user's own -----------------------------------------------------------------------------------------------


def band(window: int) -> Tensor:
    at = torch.arange(LENGTH)
    return ((at[:, None] >= at) & (at[:, None] - at < window))[None, None].expand(2, 1, -1, -1)


@pytest.mark.parametrize("late", [0, 7])
@pytest.mark.parametrize("case", ["rerope", "self_extend", "dual_chunk", "scale_invariant", "sinks", "infoscale"])
@torch.no_grad()
def test_a_window_does_not_start_a_text(case: str, late: int) -> None:
    """A 4-D band mask is the method `windowed`: positions count from the first token, not from the first visible one."""
    config, ids = CASES[case], tokens(2, LENGTH)
    config = config.replace(train_length=9) if case == "infoscale" else config  # no window beyond it
    windowed = model("llama", config.replace(visibility={"name": "windowed", "window": 9}), "tiled")
    positions = torch.arange(LENGTH)[None] + late
    got = model("llama", config)(ids, attention_mask=band(9), position_ids=positions, use_cache=False).logits
    close(got, windowed(ids, use_cache=False).logits, 2e-5)


@torch.no_grad()
def test_where_a_text_starts_behind_a_window_is_not_guessed() -> None:
    ids = tokens(2, LENGTH)
    for case, new in itertools.product(("self_extend", "sinks", "alibi"), (1, 4)):
        m = model("llama", CASES[case])
        cache = m(ids[:, :-new], attention_mask=band(9)[..., :-new, :-new], use_cache=True)[CACHE]
        last = {"attention_mask": band(9)[..., -new:, :], CACHE: cache}
        if case == "alibi":
            whole = m(ids, attention_mask=band(9), use_cache=False).logits
            close(m(ids[:, -new:], **last).logits, whole[:, -new:])
        else:
            with pytest.raises(ValueError, match="padding or lie before a window"):
                m(ids[:, -new:], **last)


@torch.no_grad()
@pytest.mark.parametrize("case", [None, "rerope"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gemma4"])
def test_a_sliding_window_is_counted_in_positions_across_a_jump(family: str, case: str | None) -> None:
    """As in the long text, where it hides what lies before the gap; with a mask of ones such layers see across."""
    m = stock(family).eval() if case is None else model(family, CASES[case])
    ids, positions, slides = tokens(2, LENGTH), jumping(), family != "llama"
    masks = masks_of_jumps(m, ids, positions)
    assert isinstance(masks, dict) == slides
    found = m(ids, position_ids=positions, attention_mask=masks, use_cache=False).logits
    close(found, with_holes(m, ids, positions))
    assert bool((with_skips(m, ids, positions) - found).abs().amax((1, 2)).gt(1e-3).all()) == slides


# models whose layers do not hand positions on ------------------------------------------------------------------------------

REMAP = LongAttnConfig.preset("rerope", window=7)


def silent(name: str = "persimmon", **changes: Any) -> Any:
    """A model whose attention gets no position_ids, or none that it hands on."""
    torch.manual_seed(0)
    config = tiny(tiny_families()[name])
    for key, value in changes.items():
        setattr(config, key, value)
    return AutoModelForCausalLM.from_config(config).eval()


def several_axes() -> Any:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}
    text = {k: v for k, v in FAMILIES["llama"][1].items() if k != "head_dim"} | {"rope_parameters": rope}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 1}
    special = {"image_token_id": 90, "vision_start_token_id": 91, "vision_end_token_id": 92, "video_token_id": 93}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **special)
    return transformers.Qwen2VLForConditionalGeneration(config).eval()


def skipping_padding(m: Any, ids: Tensor) -> Tensor:
    """Padding inside the text, which positions do not count, as generate() makes them."""
    spread = torch.cat([ids[:, :9], ids.new_zeros(2, 5), ids[:, 9:]], 1)
    mask = torch.ones_like(spread)
    mask[:, 9:14] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return m(spread, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, mask[0].bool()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case"),
    crossed(
        itertools.product(["persimmon", "fuyu", "qwen2_vl"], ["scale_invariant", "rerope", "streaming", "mapped+adaptive"]),
        [("persimmon", "rerope"), ("fuyu", "streaming"), ("qwen2_vl", "rerope"), ("qwen2_vl", "mapped+adaptive")],
    ),
)
@torch.no_grad()
def test_positions_are_those_that_the_model_was_given(name: str, case: str) -> None:
    ids, positions = tokens(2, LENGTH).clamp(max=89), jumping()
    m = hf_longattn.apply(several_axes() if name == "qwen2_vl" else silent(name), CASES[case])
    want = with_holes(m, ids, positions)
    close(with_skips(m, ids, positions), want)
    if name == "qwen2_vl":
        close(with_skips(m, ids, positions[None].expand(3, -1, -1)), want)
        close(with_skips(m, ids, positions[None].expand(4, -1, -1)), want)
    close(skipping_padding(m, ids), m(ids).logits)
    if case == "rerope":
        close(skipping_padding(torch.compile(m, backend="eager"), ids), m(ids).logits, what="compiled")


@pytest.mark.parametrize("axes", [None, 3])
@torch.no_grad()
def test_a_mask_over_a_cache_shows_where_a_text_starts_or_is_refused(axes: int | None) -> None:
    """Where the positions of a row count keys that are hidden from all of it, these may be padding or before a window."""
    m, ids = hf_longattn.apply(several_axes(), CASES["rerope"]), tokens(2, 9).clamp(max=89)
    mask = torch.ones(2, 1, 9, 9).tril()
    mask[..., :3] = 0.0
    for positions, refused in ((torch.tensor([[8], [5]]), True), (torch.tensor([[5], [5]]), False)):
        cache = DynamicCache(config=m.config)
        m(ids[:, :8], attention_mask=torch.ones(2, 8).index_fill(1, torch.arange(3), 0), **{CACHE: cache})
        with pytest.raises(ValueError, match=r"does not show it|counted differently") if refused else contextlib.nullcontext():
            given = positions if axes is None else positions.expand(axes, -1, -1)
            m(ids[:, 8:], attention_mask=mask[:, :, 8:].bool(), position_ids=given, **{CACHE: cache})


@pytest.mark.slow
@torch.no_grad()
def test_a_graph_refuses_a_mask_over_a_cache_that_does_not_show_where_a_text_starts() -> None:
    m, ids = model("llama", CASES["sinks"]), tokens(1, 9)
    cache = m(ids[:, :8], attention_mask=torch.ones(1, 8).index_fill(1, torch.arange(3), 0))[CACHE]
    mask = torch.ones(1, 1, 1, 9, dtype=torch.bool).index_fill(3, torch.arange(3), False)
    with pytest.raises(RuntimeError, match=r"does not show it.*Pass a 2-D mask"):
        torch.compile(m, backend="eager")(ids[:, 8:], attention_mask=mask, **{CACHE: cache})


@pytest.mark.parametrize("own", [(0,), (1,), (0, 1)], ids=["prompt", "token", "both"])
@torch.no_grad()
def test_every_call_on_a_cache_counts_alike_under_own_masks_too(own: tuple[int, ...]) -> None:
    """A prompt skips its padding, and the token behind it, without position_ids, counts it."""
    m, ids, padding = model("llama", CASES["alibi"]), tokens(1, 9), torch.ones(1, 9).long().index_fill(1, torch.arange(3), 0)
    mask = (torch.ones(1, 1, 9, 9).tril() * padding).bool()
    prompt, token = ((mask[:, :, a:b, :b] if n in own else padding[:, :b]) for n, (a, b) in enumerate(((0, 8), (8, 9))))
    positions, cache = (padding.cumsum(-1) - 1).clamp(min=0), DynamicCache(config=m.config)
    m(ids[:, :8], attention_mask=prompt, position_ids=positions[:, :8], **{CACHE: cache})
    with pytest.raises(ValueError, match="counted differently"):
        m(ids[:, 8:], attention_mask=token, **{CACHE: cache})


def test_positions_are_there_when_layers_are_computed_again() -> None:
    """Gradient checkpointing calls layers outside any forward pass."""
    ids, positions, mask = tokens(2, LENGTH), jumping(), torch.ones(1, 1, LENGTH, LENGTH).tril().bool()
    for extra in ({}, {"attention_mask": mask}):
        gradients = []
        for checkpointing in (False, True):
            m = hf_longattn.apply(silent(), REMAP).train()
            if checkpointing:
                getattr(m, "activation_checkpointing_enable", m.gradient_checkpointing_enable)()
            given = {"attention_mask": torch.ones_like(ids)} | extra
            m(ids, position_ids=positions, use_cache=False, **given).logits.square().sum().backward()
            gradients.append([p.grad for p in m.parameters() if p.grad is not None])
        for a, b in zip(*gradients, strict=True):
            close(b, a, 1e-4)


@pytest.mark.slow
@torch.no_grad()
def test_positions_of_layers_that_are_compiled_alone() -> None:
    m, ids = hf_longattn.apply(silent(), REMAP), tokens(2, LENGTH)
    want = m(ids).logits
    for layer in m.model.layers:
        layer.compile(backend="eager")
    close(skipping_padding(m, ids), want)


@torch.no_grad()
def test_positions_are_each_threads_own() -> None:
    m, ids = hf_longattn.apply(silent(), REMAP), tokens(2, LENGTH)
    given = [jumping(), torch.arange(LENGTH)[None].expand(2, -1), jumping(3)]
    want = [with_skips(m, ids, p) for p in given]
    with ThreadPoolExecutor(3) as pool:
        for p, got in zip(given * 10, pool.map(lambda p: with_skips(m, ids, p), given * 10), strict=True):
            close(got, want[next(i for i, x in enumerate(given) if x is p)])


@pytest.mark.parametrize("keep", [1, 3, torch.tensor([4, 9, LENGTH - 1])], ids=["last", "three", "chosen"])
@pytest.mark.parametrize("case", ["scale_invariant", "rerope"])
@torch.no_grad()
def test_positions_of_queries_that_a_model_slices_out(case: str, keep: Any) -> None:
    """Gemma 4's layers with shared keys get the queries of `logits_to_keep` alone, and the positions of all tokens."""
    m = hf_longattn.apply(silent("gemma4_text", sliding_window=64), CASES[case])
    ids, positions = tokens(2, LENGTH), jumping()
    rows = slice(-keep, None) if isinstance(keep, int) else keep
    want = with_skips(m, ids, positions)
    close(with_skips(m, ids, positions, logits_to_keep=keep), want[:, rows])
    mask, counted = torch.ones_like(ids), torch.ones_like(ids)
    mask[:, 5:9] = counted[:, 5:9] = 0
    given = {"attention_mask": mask, "position_ids": (counted.cumsum(-1) - 1).clamp(min=0), "use_cache": False}
    close(m(ids, **given, logits_to_keep=keep).logits, m(ids, **given).logits[:, rows], what="holes")


@torch.no_grad()
def test_behind_a_picture_tokens_are_counted_and_a_remap_asks_for_their_positions() -> None:
    """A picture's tokens take fewer positions than there are of them, and later ones continue from there."""
    m, ids = several_axes(), tokens(1, 12).clamp(max=89)
    text = torch.arange(12)
    picture = torch.where((text >= 3) & (text < 7), 3, torch.where(text >= 7, text - 2, text))[None, None].repeat(3, 1, 1)
    picture[1, 0, 3:7] = torch.tensor([3, 3, 4, 4])
    hf_longattn.apply(m, "scale_invariant", backend="tiled")
    whole = m(ids, position_ids=picture, use_cache=False).logits
    first = m(ids[:, :9], position_ids=picture[..., :9], use_cache=True)
    for axes in (1, 3):  # generate() hands on one
        cache = copy.deepcopy(first[CACHE])
        rest = m(ids[:, 9:], position_ids=picture[:axes, :, 9:], **{CACHE: cache}, attention_mask=torch.ones_like(ids))
        close(rest.logits, whole[:, 9:])
    hf_longattn.apply(m, REMAP)
    want = hf_longattn.update(copy.deepcopy(m), backend="reference")(ids, position_ids=picture, use_cache=False).logits
    close(m(ids, position_ids=picture).logits, want)
    with pytest.raises(ValueError, match=r"do not continue where the KV cache ends"):
        m(ids[:, 9:], position_ids=picture[:1, :, 9:], **{CACHE: first[CACHE]})


@torch.no_grad()
def test_a_cache_that_holds_more_than_the_prompt_is_named_as_such() -> None:
    m, ids = hf_longattn.apply(stock("llama"), REMAP), tokens(1, 20)
    cache = m(ids, use_cache=True)[CACHE]
    with pytest.raises(ValueError, match=r"the cache holds more tokens than the prompt: crop it"):
        m(ids[:, 15:18], position_ids=torch.arange(15, 18)[None], **{CACHE: copy.deepcopy(cache)})  # it is written to
    cache.crop(15 - cache.get_seq_length())  # as the how-to does, in all releases
    close(m(ids[:, 15:], **{CACHE: cache}).logits, m(ids).logits[:, 15:])


@torch.no_grad()
def test_generate_from_prompts_padded_on_the_right_is_refused() -> None:
    """Padding is at position 0, and generate() goes on with position 1: without a method it writes something else."""
    m, ids = hf_longattn.apply(stock("llama"), REMAP), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    with pytest.raises(ValueError, match="counts on from the padding, and needs it on the left"):
        m.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)


@torch.no_grad()
def test_prompt_look_up_behind_a_filled_cache_is_refused() -> None:
    """There generate() reads the whole prompt beside its beginning: without a method it writes something else."""
    m, ids = hf_longattn.apply(stock("llama"), REMAP), tokens(1, 20)
    cache = m(ids[:, :12], use_cache=True)[CACHE]
    with pytest.raises(ValueError, match="reads the whole prompt where it is assisted"):
        m.generate(ids, **{CACHE: cache}, prompt_lookup_num_tokens=2, max_new_tokens=3, do_sample=False)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_a_cache_that_a_refused_call_has_written_to_is_not_continued(kind: str) -> None:
    """The call is refused in the first layer, and the second one does not have its keys."""
    m, ids = hf_longattn.apply(stock("llama"), REMAP), tokens(1, 20)
    want = m(ids).logits
    cache = DynamicCache(config=m.config) if kind == "dynamic" else StaticCache(config=m.config, max_cache_len=32)
    m(ids[:, :12], **{CACHE: cache})
    with pytest.raises(IndexError):
        m(ids[:, 12:15] + 10**6, **{CACHE: cache})  # before any layer: the cache is what it was
    m(ids[:, 12:15], **{CACHE: cache})
    with pytest.raises(ValueError, match="do not continue where the KV cache ends"):
        m(ids[:, 15:17], position_ids=torch.tensor([[70, 71]]), **{CACHE: cache})
    copied = copy.deepcopy(cache)
    for held in (cache, copied):
        for _ in range(2):
            with pytest.raises(ValueError, match="refused, or broke off"):
                m(ids[:, 17:], **{CACHE: held})
            with pytest.raises(ValueError, match="refused, or broke off"):
                torch.compile(m, backend="eager")(ids[:, 17:], **{CACHE: held})
            if kind == "dynamic":
                held.crop(-1)
    cache.reset()
    if int(cache.get_seq_length()) == 0:  # older releases write zeros over a dynamic cache, and it stays as long
        close(m(ids, **{CACHE: cache}).logits, want)
    close(m(ids, **{CACHE: DynamicCache(config=m.config)}).logits, want)
