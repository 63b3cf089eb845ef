"""Every kernel against a dense float64 computation written here: outputs, all gradients, memory."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
import platform
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from calls import (
    BLOCKS,
    GEOMETRIES,
    OPTIONS,
    ROTATION,
    SINKS,
    arguments,
    by_options,
    check,
    dense,
    inputs,
    mask_of,
    tables,
    with_gradients,
)
from cases import CASES, HEADS
from helpers import close, crossed, fresh, tokens
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from watched import FUSED, Operators

import hf_longattn
from hf_longattn import reference_attention
from hf_longattn.checks import DTYPES
from hf_longattn.core import attend as attend_module
from hf_longattn.core.attend import attend
from hf_longattn.core.call import Call
from hf_longattn.core.geometry import AttentionLayout
from hf_longattn.core.kernels import by_segment, operators, precision, sdpa, tiled
from hf_longattn.core.kernels import kernel as kernels
from hf_longattn.core.kernels.by_segment import merge_entropies
from hf_longattn.core.kernels.kernel import MARGIN, KernelCall, Result
from hf_longattn.core.kernels.sdpa import few_queries
from hf_longattn.core.lower import table_length
from hf_longattn.core.plan import AttentionPlan, LogitSpec, plans
from hf_longattn.core.rotary import Rotation
from hf_longattn.core.tables import SHARED, TableCache
from hf_longattn.slots.base import Score

tiled_attention = by_options(tiled.run)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_tiled(geometry: str, options: str, blocks: int, sizes: Callable[..., None]) -> None:
    sizes(BLOCK_ELEMENTS=blocks)
    everything = {"with_lse": True, "with_entropy": True}
    check(lambda **kw: tiled_attention(**kw, **everything), geometry, options, 3)
    check(tiled_attention, geometry, options, 1)


LEARNED_TABLES = ("tables", "sinks", "row factors", "everything")


@pytest.mark.parametrize("columns", [3, 19])
@pytest.mark.parametrize("options", LEARNED_TABLES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_gradients_of_tables(geometry: str, options: str, columns: int, sizes: Callable[..., None]) -> None:
    """In one block, and in tiles of few columns."""
    sizes(**({"BLOCK_ELEMENTS": 8, "TILE_COLUMNS": 3, "WHOLE_COLUMNS": 2} if columns == 3 else {}))
    learned = functools.partial(tiled_attention, learns=True)
    check(lambda **kw: learned(**kw, with_lse=True, with_entropy=True), geometry, options, 3, tables=("gain", "bias"))
    check(learned, geometry, options, 1, tables=("gain", "bias"))


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_blocks_are_cut_where_rows_are_long(geometry: str, sizes: Callable[..., None]) -> None:
    q_len, kv_len, rows = GEOMETRIES[geometry]
    query, key, value = inputs(q=q_len, k=kv_len)
    products = []
    for columns in (kv_len, 3):
        sizes(BLOCK_ELEMENTS=8, TILE_COLUMNS=columns, WHOLE_COLUMNS=2)
        with Operators() as seen:
            tiled_attention(query, key, value, rows, scaling=0.7)
        products.append(seen.ran[torch.ops.aten.bmm])
    whole, cut = products
    assert cut > whole or geometry == "keys ahead of queries"  # of whose rows one sees one key


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_tiles_of_columns(geometry: str, options: str, sizes: Callable[..., None]) -> None:
    """What texts beyond WHOLE_COLUMNS take, forward and backward."""
    sizes(BLOCK_ELEMENTS=8, TILE_COLUMNS=3, WHOLE_COLUMNS=2)
    check(lambda **kw: tiled_attention(**kw, with_lse=True, with_entropy=True), geometry, options, 3)
    check(tiled_attention, geometry, options, 1)


def test_tiled_without_value_gives_lse_and_entropy() -> None:
    query, key, value = (x.requires_grad_() for x in inputs())
    rows, fixed = GEOMETRIES["packed"][2], arguments(OPTIONS["everything"], query)
    out, *got = tiled_attention(query, key, None, rows, **fixed, with_lse=True, with_entropy=True)
    assert out.numel() == 0
    want = dense(query, key, value, rows, **fixed)[1:]
    for a, b in zip(got, want, strict=True):
        close(a, b, 1e-11)
    grads = [torch.autograd.grad((x[0] * 2 - x[1]).sum(), (query, key)) for x in (got, want)]
    for a, b in zip(*grads, strict=True):
        close(a, b, 1e-11)


@pytest.mark.slow
def test_gradcheck(sizes: Callable[..., None]) -> None:
    """By finite differences, for every differentiable input and output at once."""
    sizes(BLOCK_ELEMENTS=40)
    query, key, value = inputs(b=1, h=2, kv=1, q=6, k=8, d=3)
    fixed = arguments(OPTIONS["everything"] | {"tables": 2}, query)
    row_scale, bias_scale = fixed.pop("row_scale"), fixed.pop("bias_scale")
    rows = AttentionLayout.causal(6, 8, None, 0, query.device)

    def f(q: Tensor, k: Tensor, v: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return tiled_attention(q, k, v, rows, **fixed, row_scale=x, bias_scale=y, with_lse=True, with_entropy=True)

    assert torch.autograd.gradcheck(f, tuple(x.requires_grad_() for x in (query, key, value, row_scale, bias_scale)))


@pytest.mark.parametrize(("blocks", "whole"), [(1 << 21, 1 << 13), (64, 1 << 13), (8, 2)])
def test_dropout(blocks: int, whole: int, sizes: Callable[..., None]) -> None:
    """The mask is read off with the identity as values; with it, output and gradients are the dense ones."""
    sizes(BLOCK_ELEMENTS=blocks, WHOLE_COLUMNS=whole, TILE_COLUMNS=3)
    query, key, value = inputs(kv=4)
    rows, fixed = GEOMETRIES["left padding"][2], arguments(OPTIONS["sinks"], query)

    def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(11)
        return tiled_attention(q, k, v, rows, **fixed, dropout=0.4)[0]

    eye = torch.eye(19, dtype=query.dtype).expand(2, 4, -1, -1)
    p = dense(query, key, eye, rows, **fixed)[0]
    with torch.enable_grad():
        keep = dropped(query, key.requires_grad_(), eye).detach() / torch.where(p > 0, p, 1.0)
    kept = keep[p > 0]
    assert set(kept.mul(0.6).round().int().tolist()) == {0, 1}
    assert abs(kept.mean() - 1) < 0.15
    grads = []
    for f in (dropped, lambda q, k, v: dense(q, k, v, rows, **fixed, keep=keep)[0]):
        leaves = [x.detach().clone().requires_grad_() for x in (query, key, value)]
        out = f(*leaves)
        grads.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for a, b in zip(*grads, strict=True):
        close(a, b, 1e-10)


def test_dropout_depends_on_the_seed() -> None:
    query, key, value = inputs()
    rows = GEOMETRIES["causal"][2]
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(tiled_attention(query, key, value, rows, scaling=1.0, dropout=0.5)[0])
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


# the public function ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["tiled", "auto"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layer", [0, 3])
def test_attention_is_the_reference(case: str, layer: int, backend: str) -> None:
    config = CASES[case].for_layer(layer)
    query, key, value = inputs(h=HEADS, q=13, k=29)
    mask = mask_of(2, 1, 13, 29)
    for extra in ({}, {"query_start": 4, "key_start": 2}, {"attention_mask": mask}, {"scaling": 0.3}):
        close(
            hf_longattn.attention(query, key, value, config, backend=backend, rotation=ROTATION, **extra),
            reference_attention(query, key, value, config, rotation=ROTATION, **extra),
            1e-12,
        )


@pytest.mark.parametrize(
    "shape", [(13, 29), (1, 13, 29), (2, 1, 13, 29), (2, 4, 13, 29), (2, 2, 13, 29), (2, 4, 13, 1), (1, 29)]
)
@pytest.mark.parametrize("backend", ["tiled"])
def test_mask_shapes(shape: tuple[int, ...], backend: str) -> None:
    heads = 2 if shape[1:2] == (2,) else 4
    query, key, value = (x[:, : x.shape[1] * heads // 4] for x in inputs(q=13, k=29))
    config, mask = CASES["sinks"], mask_of(*shape)
    got = hf_longattn.attention(query, key, value, config, attention_mask=mask, backend=backend)
    full = mask.expand(2, heads, 13, 29)
    close(got, reference_attention(query, key, value, config, attention_mask=full), 1e-12)


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_rows_that_see_nothing_are_zero(backend: str) -> None:
    query, key, value = inputs()
    mask = torch.ones(19, 19, dtype=torch.bool)
    mask[5] = False
    out = hf_longattn.attention(query, key, value, CASES["scale_invariant"], attention_mask=mask, backend=backend)
    assert torch.equal(out[:, :, 5], torch.zeros_like(out[:, :, 5]))
    assert out[:, :, 6].abs().min() > 0


@pytest.mark.parametrize("backend", ["tiled"])
@pytest.mark.parametrize(("window", "start"), [(1, 1), (3, 2), (5, 40)])
def test_windows_that_reach_past_the_keys(window: int, start: int, backend: str) -> None:
    """They show, and count, the keys that are there; beyond them a row is fully masked."""
    query, key, value = inputs(q=5, k=6)
    config = hf_longattn.LongAttnConfig.preset("windowed+infoscale", window=window, train_length=2, clamp=False)
    got, want = (
        f(query, key, value, config, query_start=start, **o)
        for f, o in ((hf_longattn.attention, {"backend": backend}), (reference_attention, {}))
    )
    close(got, want, 1e-12)
    assert (want[:, :, 4] == 0).all() == (start + 4 - window >= 5)


@pytest.mark.parametrize("backend", ["tiled"])
@pytest.mark.parametrize("start", [3000, -3000])
def test_queries_far_from_the_keys(start: int, backend: str) -> None:
    """Distances across the gap are longer than the lengths: none is looked up beyond a table."""
    query, key, value = inputs(q=5, k=6)
    config = hf_longattn.LongAttnConfig.preset("scale_invariant+infoscale", train_length=4, sink_tokens=2)
    for options in ({}, {"attention_mask": mask_of(2, 1, 5, 6)}):
        got = hf_longattn.attention(query, key, value, config, query_start=start, backend=backend, **options)
        close(got, reference_attention(query, key, value, config, query_start=start, **options), 1e-12)
        assert (got == 0).all() == (start < 0)


@pytest.mark.parametrize(
    ("mean", "count"), [([1.0] * 8, 8), ([[1.0] * 4] * 2, 8), ([1.0, 2.0], 2)], ids=["heads", "layers", "too few"]
)
@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_parameters_of_other_heads_are_refused(mean: list[Any], count: int, backend: str) -> None:
    """Those of several layers are not read as the first one's."""
    config = hf_longattn.LongAttnConfig.preset("scale_invariant", logit_mean=mean, backend=backend)
    with pytest.raises(ValueError, match=f"{count} numbers for 4 heads"):
        hf_longattn.attention(*inputs(), config)


@pytest.mark.parametrize("head_dim", [1, 3, 16, 80, 256])
@pytest.mark.parametrize("backend", ["tiled"])
def test_head_dims(head_dim: int, backend: str) -> None:
    query, key, value = inputs(d=head_dim)
    config = CASES["sinks"]
    close(
        hf_longattn.attention(query, key, value, config, backend=backend),
        reference_attention(query, key, value, config),
        1e-12,
    )


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2), (5, 5), (1, 1)])
def test_grouped_heads(heads: tuple[int, int], sizes: Callable[..., None]) -> None:
    sizes(BLOCK_ELEMENTS=500)
    query, key, value = inputs(h=heads[0], kv=heads[1])
    config = CASES["sinks"]
    close(hf_longattn.attention(query, key, value, config), reference_attention(query, key, value, config), 1e-12)


@pytest.mark.parametrize("backend", ["tiled"])
def test_non_contiguous_inputs(backend: str) -> None:
    """As models pass them: (batch, length, heads, head_dim) transposed, and expanded over the batch."""
    query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs())
    key, value = key[:1].expand(2, -1, -1, -1), value[..., ::2].repeat_interleave(2, -1)[..., :5]
    config = CASES["sinks"]
    want = reference_attention(query, key, value, config)
    close(hf_longattn.attention(query, key, value, config, backend=backend), want, 1e-12)
    if backend == "tiled":
        got, want = (with_gradients(f, [query], key, value, config) for f in (hf_longattn.attention, reference_attention))
        close(got[1], want[1], 1e-12)


@pytest.mark.parametrize("fast", [True, False], ids=["products in half", "products in float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backward", [False, True])
def test_half_precision_error_budget(
    dtype: torch.dtype, backward: bool, fast: bool, cpu_bfloat16: Callable[[bool], None]
) -> None:
    """Against float64, at most twice the error that sdpa makes in the same precision on unmodified attention."""
    cpu_bfloat16(fast)
    exact = inputs(h=4, kv=4, q=128, k=128, d=64)
    rough = [x.to(dtype) for x in exact]
    exact = [x.double() for x in rough]

    def error(function: Callable[..., Tensor]) -> float:
        results = []
        for tensors in (rough, exact):
            leaves = [x.clone().requires_grad_(backward) for x in tensors]
            out = function(*leaves)
            results.append(torch.autograd.grad(out.float().sin().sum(), leaves)[0] if backward else out)
        return float((results[0].detach().double() - results[1].detach().double()).pow(2).mean().sqrt())

    budget = error(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True))
    config = CASES["scale_invariant"]

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hf_longattn.attention(q, k, v, config, backend="tiled")

    assert ours(*rough).dtype == dtype
    assert error(ours) <= 2 * budget


@pytest.mark.parametrize("q_len", [1, 700])
def test_a_steep_bias_makes_no_denormal_numbers(q_len: int) -> None:
    """Far keys' probabilities, and in the backward pass their products with gradients, which many CPUs multiply slowly."""
    tensors = [x.float().requires_grad_(q_len > 1) for x in inputs(b=1, h=4, kv=2, q=q_len, k=700)]
    with Operators() as watched:
        out = hf_longattn.attention(*tensors, CASES["alibi"])
        if q_len > 1:
            out.square().mean().backward()
    assert watched.multiplied
    assert not watched.denormal
    close(out.double(), reference_attention(*(x.double() for x in tensors), CASES["alibi"]), 1e-5)


@pytest.mark.parametrize("case", ["alibi", "scale_invariant", "adaptive_temperature"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decoding_widens_halves_in_pieces(case: str, dtype: torch.dtype, sizes: Callable[..., None]) -> None:
    """Keys and values of a cache in half precision: never all at once in float32."""
    sizes(KEY_ELEMENTS=256, KEYS=8)
    tensors = [x.to(dtype) for x in inputs(b=2, h=4, kv=2, q=1, k=300, d=6)]
    with Operators() as watched:
        out = hf_longattn.attention(*tensors, CASES[case], rotation=ROTATION)
    want = reference_attention(*(x.double() for x in tensors), CASES[case], rotation=ROTATION)
    close(out.double(), want, 2.0 * torch.finfo(dtype).eps * float(want.abs().max()))
    assert watched.ran[torch.ops.aten.baddbmm_] == math.ceil(300 / max(256 // (4 * 6), 8))


@pytest.mark.parametrize(
    ("machine", "mkldnn", "units", "fast"),
    [
        ("x86_64", True, True, True),
        ("x86_64", True, False, False),  # AVX512 without bfloat16: oneDNN takes it, more slowly than float32
        ("AMD64", True, False, False),
        ("x86_64", False, False, False),  # AVX2
        ("aarch64", True, False, True),  # Arm: oneDNN's answer is that of the units
        ("aarch64", False, False, False),
    ],
)
def test_which_cpu_multiplies_bfloat16(
    machine: str, mkldnn: bool, units: bool, fast: bool, monkeypatch: pytest.MonkeyPatch, cpu_bfloat16: Callable[[bool], None]
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: mkldnn)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: units)
    assert precision.cpu_multiplies_bfloat16.__wrapped__() is fast
    cpu_bfloat16(fast)
    assert precision.auto_dtype() == ("bfloat16" if fast else "float32")


def test_this_cpu_is_asked_without_an_error() -> None:
    assert hf_longattn.auto_dtype() in ("bfloat16", "float32")


@pytest.mark.parametrize("units", [False, True])
def test_what_a_device_multiplies_fast(
    units: bool, monkeypatch: pytest.MonkeyPatch, cpu_bfloat16: Callable[[bool], None]
) -> None:
    cpu_bfloat16(units)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: units and not including_emulation)
    fast = {"float32"} | ({"bfloat16"} if units else set())
    for device, more in (("cpu", set()), (torch.device("cuda", 1), {"float16"}), ("mps", {"float16", "bfloat16"})):
        found = {name for name in DTYPES if precision.multiplies_fast(name, device)}
        assert found == fast | more, device
        assert hf_longattn.auto_dtype(device) == ("bfloat16" if "bfloat16" in found else "float32")


def test_inference_mode_tables_serve_training() -> None:
    """A table that was cached under inference_mode must not break a later backward pass."""
    config = CASES["scale_invariant"].replace(tau=7.25)
    query, key, value = inputs(dtype=torch.float32)
    with torch.inference_mode():
        hf_longattn.attention(query, key, value, config)
    query.requires_grad_()
    hf_longattn.attention(query, key, value, config).sum().backward()
    assert query.grad is not None


@pytest.mark.parametrize(("case", "rows"), [("scale_invariant", 0), ("mapped+adaptive", 3), ("cosscale", 3), ("alibi", 3)])
def test_autocast_does_not_reach_the_logits(case: str, rows: int) -> None:
    """Of a whole text, and of the few queries of decoding."""
    query, key, value = inputs(dtype=torch.float32)
    query, config = query[:, :, -rows:], CASES[case]
    want = hf_longattn.attention(query, key, value, config)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(hf_longattn.attention(query, key, value, config), want)
        defined = hf_longattn.reference_attention(query, key, value, config)
    assert torch.equal(defined, hf_longattn.reference_attention(query, key, value, config))


# memory -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", crossed(CASES, 6))
def test_no_tensor_of_all_pairs(case: str, sizes: Callable[..., None]) -> None:
    """2048 tokens and 4 heads make 16.8 million pairs; no tensor comes near, forward or backward."""
    sizes(BLOCK_ELEMENTS=1 << 17)
    n = 2048
    leaves = [x.requires_grad_() for x in inputs(b=1, h=HEADS, q=n, k=n, d=8, dtype=torch.float32)]
    config = CASES[case].for_layer(0)
    with Operators() as seen:
        hf_longattn.attention(*leaves, config, backend="tiled", rotation=ROTATION).sum().backward()
    assert seen.largest <= 1 << 18


# torch.compile and errors -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_compiled_fullgraph() -> None:
    torch._dynamo.reset()
    config = CASES["sinks"]
    compiled = torch.compile(hf_longattn.attention, fullgraph=True, backend="aot_eager")
    leaves = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(dtype=torch.float32)]
    results = [with_gradients(function, leaves, config) for function in (compiled, hf_longattn.attention)]
    for got, want in zip(*results, strict=True):
        close(got, want, 1e-6)


@pytest.mark.slow
def test_opcheck() -> None:
    """PyTorch's own checks of a custom operator: schema, fake tensors, autograd registration, aot dispatch."""
    query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs())
    fixed = arguments(OPTIONS["everything"], query)
    row_scale, bias_scale = (fixed[name].requires_grad_() for name in ("row_scale", "bias_scale"))
    ids = torch.arange(query.shape[2])[None] * 2, torch.arange(key.shape[2])[None] * 2
    for outputs, places in (((True, True), (None, None)), ((False, False), ids)):
        rows = AttentionLayout(GEOMETRIES["packed"][2].index, None, *places)
        tables = (fixed[name].requires_grad_() for name in ("gain", "bias"))
        spec = LogitSpec(0.7, 1.1, *tables, row_scale, bias_scale, 2, learns=True)
        call = KernelCall(query, key, value, rows, spec, 0.0, None, *outputs)
        torch.library.opcheck(torch.ops.hf_longattn.tiled.default, tuple(operators.flatten(call)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": (2, 2, 19, 4)}, "do not fit together"),
        ({"key": (2, 3, 19, 5), "value": (2, 3, 19, 5)}, "4 query heads cannot share 3"),
        ({"query": (4, 19, 5)}, r"must be \(batch, heads, length, head_dim\)"),
    ],
)
@pytest.mark.parametrize("function", [hf_longattn.attention, reference_attention])
def test_shapes_that_do_not_fit(function: Any, change: dict[str, Any], message: str) -> None:
    shapes = {"query": (2, 4, 19, 5), "key": (2, 2, 19, 5), "value": (2, 2, 19, 5)} | change
    with pytest.raises(ValueError, match=message):
        function(**{name: torch.zeros(shape) for name, shape in shapes.items()}, config=CASES["sinks"])


@pytest.mark.parametrize("function", [hf_longattn.attention, reference_attention])
def test_arguments_that_make_no_sense(function: Any) -> None:
    query, key, value = inputs()
    config = CASES["sinks"]
    with pytest.raises(ValueError, match="must be bool"):
        function(query, key, value, config, attention_mask=torch.zeros(19, 19))
    with pytest.raises(ValueError, match="does not broadcast"):
        function(query, key, value, config, attention_mask=torch.ones(3, 19, dtype=torch.bool))
    with pytest.raises(ValueError, match="differ in dtype"):
        function(query, key.float(), value, config)
    for dtype in (torch.int32, torch.float32):
        with pytest.raises(ValueError, match=f"position_ids must be int64, got {dtype}"):
            function(query, key, value, config, position_ids=torch.arange(19, dtype=dtype)[None])
    with pytest.raises(ValueError, match="backend"):
        function(query, key, value, config, backend="warp")


def test_a_backend_that_cannot_is_refused() -> None:
    with pytest.raises(ValueError, match="'fused' cannot compute this call: scale_invariant changes logits by distance"):
        hf_longattn.attention(*inputs(), CASES["scale_invariant"], backend="fused")


def test_tables_that_are_too_short() -> None:
    query, key, value = inputs()
    gain, bias = tables(1, length=18)
    with pytest.raises(ValueError, match="beyond the tables"):
        tiled_attention(query, key, value, GEOMETRIES["causal"][2], scaling=1.0, gain=gain, bias=bias)


# learned sinks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("case", ["none", "scale_invariant"])
def test_a_sink_is_a_term_in_the_denominator(case: str, backend: str) -> None:
    """Written out in NumPy, pair by pair, with rows that see no key."""
    query, key, value = inputs()
    mask = mask_of(2, 1, 19, 19)
    mask[:, :, [0, 7, 18]] = False
    config = hf_longattn.LongAttnConfig() if case == "none" else hf_longattn.LongAttnConfig.preset(case, tau=3.0)
    got = hf_longattn.attention(query, key, value, config, 0.7, mask, backend=backend, sink_logits=SINKS)
    q, k, v, s = (x.numpy() for x in (query, key, value, SINKS))
    want = numpy.zeros(q.shape)
    for b, h, i in numpy.ndindex(q.shape[:3]):
        seen = [j for j in range(i + 1) if mask[b, 0, i, j]]
        logits = numpy.array([0.7 * q[b, h, i] @ k[b, h // 2, j] for j in seen])
        if case == "scale_invariant":
            a2 = numpy.array([1 + 2 * numpy.log(1 + (i - j) / 3.0) for j in seen])
            logits = numpy.sqrt(a2) * logits + 1 - a2
        if seen:
            weights = numpy.exp(logits) / (numpy.exp(logits).sum() + numpy.exp(s[h]))
            want[b, h, i] = sum(w * v[b, h // 2, j] for w, j in zip(weights, seen, strict=True))
    close(got, torch.from_numpy(want), 1e-12)
    if backend == "tiled":
        sinks = SINKS.clone().requires_grad_()
        leaves = [sinks, *(x.requires_grad_() for x in (query, key, value))]
        out = hf_longattn.attention(query, key, value, config, 0.7, mask, backend=backend, sink_logits=sinks)
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.square().sum(), leaves))


@pytest.mark.parametrize("q_len", [13, 1])
@pytest.mark.parametrize("case", CASES)
def test_sinks_under_every_method(case: str, q_len: int) -> None:
    """Output and all gradients, the sink's own too; and decoding, which has none."""
    config = CASES[case].for_layer(0)
    results = []
    for function in (hf_longattn.attention, reference_attention):
        leaves = [x.requires_grad_(q_len > 1) for x in (*inputs(h=HEADS, q=q_len, k=29), SINKS.clone())]
        out = function(*leaves[:3], config, rotation=ROTATION, sink_logits=leaves[3])
        results.append([out, *(torch.autograd.grad(out.sin().sum(), leaves) if q_len > 1 else ())])
    for got, want in zip(*results, strict=True):
        close(got, want, 1e-10)
    without = reference_attention(*inputs(h=HEADS, q=q_len, k=29), config, rotation=ROTATION)
    assert config.output_norm is not None or (results[0][0] - without).abs().max() > 0.01
    close(hf_longattn.attention(*inputs(h=HEADS, q=q_len, k=29), config, rotation=ROTATION, sink_logits=SINKS - 99), without)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_a_method_s_sink_joins_the_model_s(backend: str) -> None:
    """e^s + e^s', exactly; and far below every logit nothing at all."""
    own, q_len = SINKS.flip(0) - 0.5, 13
    config = hf_longattn.LongAttnConfig.preset("attention_sink", logit=own.tolist())
    tensors = inputs(q=q_len, k=29)
    both = hf_longattn.attention(*tensors, config, backend=backend, sink_logits=SINKS)
    plain = hf_longattn.LongAttnConfig()
    close(both, reference_attention(*tensors, plain, sink_logits=(own.exp() + SINKS.exp()).log()), 1e-12)
    nothing = config.replace(logit=-300.0)
    close(hf_longattn.attention(*tensors, nothing, backend=backend), reference_attention(*tensors, plain), 1e-12)


def test_entropy_over_segments() -> None:
    query, key, value = inputs()
    rows = GEOMETRIES["nothing visible"][2]
    segments = [rows.narrowed(None, torch.tensor([[6]])), rows.narrowed(torch.tensor([[7]]), None)]
    options = {"scaling": 0.7, "with_lse": True, "with_entropy": True}
    results = [tiled_attention(query, key, value, r, **options) for r in segments]
    logits = 0.7 * query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT
    logits, some = logits.masked_fill(~rows.visible(19), -math.inf), rows.visible(19).any(-1)
    p = numpy.exp(logits.numpy())
    p = p / numpy.maximum(p.sum(-1, keepdims=True), 1e-300)
    want = torch.from_numpy(-(p * numpy.log(numpy.where(p > 0, p, 1.0))).sum(-1))
    close(merge_entropies(results), want.masked_fill(~some, 0.0), 1e-12)


def test_sinks_in_half_precision() -> None:
    query, key, value = inputs(dtype=torch.bfloat16)
    plain = hf_longattn.LongAttnConfig()
    out = hf_longattn.attention(query, key, value, plain, sink_logits=SINKS)
    assert out.dtype == torch.bfloat16
    close(out.double(), reference_attention(*(x.double() for x in (query, key, value)), plain, sink_logits=SINKS), 2e-2)


# tables that calls share ---------------------------------------------------------------------------------------------


def test_tables_stay_within_their_bytes() -> None:
    """The table used longest ago goes first; one that is too large goes by without taking the others along."""
    cache, built = TableCache(max_bytes=8 * 100), []

    def table(name: str, length: int) -> Tensor:
        return cache.get(name, lambda: (built.append(name), torch.zeros(length, dtype=torch.float64))[1:])[0]  # type: ignore[func-returns-value]

    for name, length in (("a", 40), ("b", 40), ("a", 40), ("c", 40), ("large", 101), ("a", 40), ("c", 40)):
        assert table(name, length).numel() == length
    assert built == ["a", "b", "c", "large"]
    assert cache.nbytes == 8 * 80
    table("b", 40)
    assert built[4:] == ["b"]
    assert copy.deepcopy(cache).nbytes == 0
    assert copy.deepcopy(cache).max_bytes == cache.max_bytes


@pytest.mark.parametrize("case", ["rerope", "self_extend", "streaming"])
def test_positions_that_jump_far_make_no_table_of_all_between(case: str) -> None:
    query, key, value = inputs()
    positions = torch.arange(19)[None] + 300_000 * (torch.arange(19) > 8)
    arguments = {"rotation": ROTATION, "position_ids": positions}
    with Operators() as seen:
        out = hf_longattn.attention(query, key, value, CASES[case], **arguments)
    close(out, reference_attention(query, key, value, CASES[case], **arguments), 1e-7)
    assert seen.largest < 1 << 16


@pytest.mark.parametrize("case", ["scale_invariant", "rerope"])
def test_tables_belong_to_whom_the_call_names(case: str) -> None:
    """A call's tables are kept where it says, nowhere else, and freed with that."""
    x, rotation = torch.randn(1, 2, 8, 8), Rotation(torch.tensor([1.0, 0.1]))
    rows, cache = AttentionLayout.causal(8, 8, None, 0, x.device), TableCache()
    SHARED._kept.clear()
    call = Call(x, x, x, CASES[case], rows, 1.0, rotation=rotation, tables=cache)
    first = attend(call)
    assert (SHARED.nbytes, cache.nbytes > 0) == (0, True)
    kept = [weakref.ref(t) for tables in cache._kept.values() for t in tables]
    assert torch.equal(attend(call), first)
    assert {id(t()) for t in kept} == {id(t) for tables in cache._kept.values() for t in tables}
    assert torch.equal(attend(dataclasses.replace(call, tables=TableCache(0))), first)
    del cache, rows, call  # what a forward pass prepares goes with its rows
    assert all(t() is None for t in kept)


@pytest.mark.parametrize("q_len", [1, 29])
@pytest.mark.parametrize("case", ["infoscale", "mapped+adaptive", "rerope+infoscale+cosscale", "attention_sink_learned"])
def test_layers_share_what_is_prepared_and_it_holds_nothing_of_theirs(case: str, q_len: int) -> None:
    rows, config = AttentionLayout.causal(q_len, 29, None, 2, torch.device("cpu")), CASES[case].for_layer(0)
    for seed in range(2):
        layer = inputs(h=HEADS, q=q_len, k=29, seed=seed)
        close(
            attend(Call(*layer, config, rows, 0.7, rotation=ROTATION)),
            attend(Call(*layer, config, rows, 0.7, rotation=ROTATION, backend="reference")),
            1e-10,
        )
        kept = [weakref.ref(x) for x in layer]
        del layer
        assert all(x() is None for x in kept)
    (plan,) = plans(rows).values()
    assert q_len > 1 or plan.kernel == "few"


def test_a_call_under_another_config_takes_no_plan_of_its_own() -> None:
    rows = AttentionLayout.causal(5, 29, None, 0, torch.device("cpu"))
    call = Call(*inputs(h=HEADS, q=5, k=29), CASES["infoscale"].for_layer(0), rows, 0.7, method_id="infoscale")
    under, plain = attend(call), hf_longattn.LongAttnConfig()
    close(attend(call.under(plain)), attend(dataclasses.replace(call.under(plain), backend="reference")), 1e-10)
    assert not torch.equal(under, attend(call.under(plain)))


class _ByKeys(Score):
    """scaling = 1 / (1 + mean |k|), which is another one in each layer."""

    name = "by_keys"

    def fold(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        return query, key, float(1 / (1 + key.detach().abs().mean()))


@pytest.mark.parametrize("backend", ["tiled", "fused"])
def test_a_score_whose_scaling_goes_by_the_keys_is_each_layer_s_own(backend: str) -> None:
    config = dataclasses.replace(CASES["logn"].for_layer(0), score=_ByKeys())
    rows = AttentionLayout.causal(1, 29, None, 0, torch.device("cpu"))
    for seed in range(2):
        query, key, value = inputs(h=HEADS, q=1, k=29, seed=seed)
        call = Call(query.requires_grad_(), (1 + 4 * seed) * key, value, config, rows, 0.7)
        close(*(attend(dataclasses.replace(call, backend=name)) for name in (backend, "reference")), 1e-10)


class _ByDirection(Score):
    """Queries times a factor that depends on where they point."""

    name = "by_direction"

    def fold(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        return query * (1 + query[..., :1].sigmoid()), key, 0.7


@pytest.mark.parametrize("q_len", [1, 29])
@pytest.mark.parametrize("backend", ["auto", "tiled", "fused"])
def test_a_score_sees_queries_before_a_remap_turns_them(backend: str, q_len: int) -> None:
    config = dataclasses.replace(CASES["rerope"].for_layer(0), score=_ByDirection())
    rows, layer = AttentionLayout.causal(q_len, 29, None, 0, torch.device("cpu")), inputs(h=HEADS, q=q_len, k=29)
    call = Call(*layer, config, rows, 1.0, rotation=ROTATION, backend=backend)
    close(attend(call), attend(dataclasses.replace(call, backend="reference")), 1e-10)


def test_rows_lie_in_one_piece_where_they_are_moved() -> None:
    """A kernel would copy them in each layer."""
    rows = AttentionLayout.causal(5, 29, None, 0, torch.device("cpu"))
    assert rows.on(torch.device("meta")).index.is_contiguous()


def test_tables_are_longer_than_every_distance() -> None:
    for kv_len in (5, 990, 1000, 1010, 1023, 1024, 2040):
        rows = AttentionLayout.causal(2, kv_len, None, 0, torch.device("cpu"))
        assert table_length(rows, kv_len) >= kv_len + MARGIN


def test_tables_are_no_longer_than_calls_share() -> None:
    """At most twice the largest distance, on the host's rows: a prompt's is one less than its length."""
    for kv_len in (1024, 8192, 32768):
        for q_len in (1, kv_len):
            rows = AttentionLayout.causal(q_len, kv_len, None, 0, torch.device("cpu"))
            assert table_length(rows, kv_len) == kv_len + MARGIN
    beyond = AttentionLayout.causal(2, 1024, 1024, 0, torch.device("cpu"))  # queries behind the keys
    assert table_length(beyond, 1024) == 2048 + MARGIN


def test_a_kernel_is_a_file_and_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked in its turn, picked where it can, refused by name with its reason, and handed each segment."""
    seen: list[tuple[bool, bool]] = []

    def run(call: KernelCall) -> Result:
        seen.append((call.with_lse, call.with_entropy))
        return tiled.run(call)

    def why_not(plan: AttentionPlan) -> str | None:
        return "it wants 8 queries" if plan.query.shape[2] != 8 else None

    prepare = functools.partial(by_segment.BySegment, run=run)
    mine = kernels.Kernel(prepare, why_not=why_not, preferred=lambda plan: plan.temper is not None)
    monkeypatch.setattr(attend_module, "KERNELS", {"mine": mine, **attend_module.KERNELS})
    monkeypatch.setattr(attend_module, "BACKENDS", (*attend_module.BACKENDS, "mine"))
    x = torch.randn(1, 2, 8, 8, requires_grad=True)
    plain, entropic = CASES["alibi"], CASES["mapped+adaptive"]
    close(hf_longattn.attention(x, x, x, entropic), reference_attention(x, x, x, entropic), 1e-5)
    assert seen == [(False, True), (False, False)]
    hf_longattn.attention(x, x, x, plain)
    assert len(seen) == 2
    close(hf_longattn.attention(x, x, x, plain, backend="mine"), reference_attention(x, x, x, plain), 1e-5)
    assert len(seen) == 3
    short = x[:, :, :7]
    with pytest.raises(ValueError, match="backend 'mine' cannot compute this call: it wants 8 queries"):
        hf_longattn.attention(short, short, short, plain, backend="mine")


EMPTY = ((0, 5, 5), (0, 1, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0))


@pytest.mark.parametrize("backend", ["auto", "tiled", "reference"])
@pytest.mark.parametrize(
    "case", ["infoscale", "scale_invariant", "rerope", "adaptive_temperature", "attention_sink", "windowed"]
)
def test_no_queries_no_keys_and_an_empty_batch(case: str, backend: str) -> None:
    for batch, q_len, kv_len in EMPTY:
        query, key, value = (
            torch.randn(batch, heads, n, 8, requires_grad=True) for heads, n in ((4, q_len), (2, kv_len), (2, kv_len))
        )
        config, rotation = CASES[case].for_layer(0), hf_longattn.Rotation(torch.tensor([1.0, 0.3, 0.05, 0.004]))
        out = hf_longattn.attention(query, key, value, config, rotation=rotation, backend=backend, query_start=0)
        assert out.shape == query.shape
        out.sum().backward()
        assert not out.any()
        assert all(x.grad is not None and not x.grad.any() for x in (query, key, value))


def test_dropout_of_everything_gives_nothing() -> None:
    m = fresh("llama", CASES["scale_invariant"]).train()
    for module in m.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 1.0
    logits = m(tokens(2, 9), use_cache=False).logits
    assert logits.isfinite().all()
    logits.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in m.parameters())


def test_what_is_no_attention_is_refused() -> None:
    x = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match=r"floating-point dtype, got torch\.int64"):
        hf_longattn.attention(x.long(), x.long(), x.long(), CASES["alibi"])
    with pytest.raises(TypeError, match=r"takes a LongAttnConfig, got 'rerope'.*LongAttnConfig\.preset"):
        hf_longattn.attention(x, x, x, "rerope")  # type: ignore[arg-type]


@torch.no_grad()
@pytest.mark.parametrize("backend", ["auto", "tiled"])
@pytest.mark.parametrize("case", ["adaptive_temperature", "mapped+adaptive"])
def test_a_temperature_by_entropy_over_many_rows(case: str, backend: str, sizes: Callable[..., None]) -> None:
    """By two fused passes where logits are products over plain rows, else by whole rows in blocks."""
    sizes(ROW_ELEMENTS=1 << 12)
    q, k, v = torch.randn(1, 4, 300, 16), torch.randn(1, 2, 300, 16), torch.randn(1, 2, 300, 16)
    want = reference_attention(q.double(), k.double(), v.double(), CASES[case])
    with Operators() as seen:
        close(hf_longattn.attention(q, k, v, CASES[case], backend=backend), want.float(), 2e-5)
    by_blocks = (0, 2 * 20)  # q . k and p . v, of 32 rows of each key head at a time
    passes = (2, 0) if (case, backend) == ("adaptive_temperature", "auto") else by_blocks
    assert (seen.ran[FUSED], seen.ran[torch.ops.aten.bmm]) == passes


@pytest.mark.parametrize("heads", [(4, 1), (6, 3), (6, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2, 5])
@torch.no_grad()
def test_keys_are_cut_for_threads(
    heads: tuple[int, int], dtype: torch.dtype, threads: int, sizes: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One query and three, whatever is left over: output and logsumexp of all keys, from a slice of a cache too."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    sizes(CUT_FROM=0, PIECE=8)
    torch.manual_seed(0)
    (own, shared), tolerance = heads, 2e-2 if dtype == torch.bfloat16 else 16 * torch.finfo(dtype).eps
    cut = set()
    for length, new in itertools.product((1, 15, 40, 43), (1, 3)):
        query = torch.randn(1, own, new, 16, dtype=dtype)
        key, value = (torch.randn(1, shared, length + 5, 16, dtype=dtype)[:, :, 2:-3] for _ in range(2))
        cut.add(sdpa.pieces(key))
        every = [x.double().repeat_interleave(own // shared, 1) for x in (key, value)]
        logits = query.double() @ every[0].mT * 0.3
        want = torch.softmax(logits, -1) @ every[1]
        close(few_queries(query, key, value, scaling=0.3).transpose(1, 2).double(), want, tolerance)
        out, lse = sdpa.few_queries_with_lse(query.reshape(1, shared, -1, 16), key, value, None, 0.3)
        assert out.dtype == dtype
        close(out.reshape(query.shape).double(), want, tolerance)
        close(lse.reshape(logits.shape[:3]).double(), logits.logsumexp(-1), tolerance)
    assert (max(cut) > 1) == (threads // math.gcd(shared, threads) > 1)
