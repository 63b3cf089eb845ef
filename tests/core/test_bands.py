"""Bands by PyTorch's fused kernels: outputs and gradients against dense float64, on a CPU; CUDA's operators by stand-ins."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from calls import GEOMETRIES, ROTATION, SINKS, arguments, by_options, check, dense, inputs, mask_of, with_gradients
from cases import CASES
from helpers import close, crossed
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import hf_longattn
from hf_longattn import LongAttnConfig, reference_attention
from hf_longattn.core.attend import attend, plan_of
from hf_longattn.core.call import Call
from hf_longattn.core.geometry import AttentionLayout
from hf_longattn.core.kernels import bands, by_segment, fused, operators, sdpa
from hf_longattn.core.kernels.kernel import KernelCall
from hf_longattn.core.plan import LogitSpec
from hf_longattn.methods.cosscale import CosScale

preset = LongAttnConfig.preset
bands_attention = by_options(fused.run)
BANDS = {"backend": "fused"}
INTERVALS = [name for name, (_, _, rows) in GEOMETRIES.items() if rows.allowed is None]
METHODS = {
    "infoscale": preset("infoscale", train_length=16),
    "rerope": preset("rerope", window=70),
    "leaky_rerope+infoscale": preset("leaky_rerope+infoscale", window=70, train_length=100),
    "self_extend": preset("self_extend", window=90),
    "windowed": preset("windowed", window=80),
    "narrow": preset("windowed", window=5),
    "lm_infinite": preset("lm_infinite", window=66),
    "dual_chunk": preset("dual_chunk", chunk=80, local=20),
    "cosscale": preset("cosscale"),
    "rerope+adaptive_temperature": preset("rerope+adaptive_temperature", window=70),
    "attention_sink": preset("attention_sink"),
}


def causal(length: int) -> AttentionLayout:
    return AttentionLayout.causal(length, length, None, 0, torch.device("cpu"))


def long_rows(name: str) -> AttentionLayout:
    """Rows of 200 tokens, a batch of two: as they are, padded at the left, packed, and with one row that sees nothing."""
    rows = causal(200)
    query, first, start, low, high = (x.expand(2, -1).clone() for x in rows.bounds)
    if name == "left padding":
        start[1], low[1] = 77, 77
    elif name == "packed":
        start[:, 130:], low[:, 130:] = 130, 130
    elif name == "a blind row":
        high[:, 100] = -1
    return rows if name == "causal" else AttentionLayout(torch.stack([query, first, start, low, high], -1))


@pytest.mark.parametrize("at_once", [(256, 64), (5, 2), (1, 1)])
@pytest.mark.parametrize("geometry", INTERVALS)
def test_one_segment(geometry: str, at_once: tuple[int, int], sizes: Callable[..., None]) -> None:
    """Triangles, rectangles and masks, in blocks of every size; the gradients of the logsumexp and of the entropy too."""
    sizes(MASKED_ROWS=at_once[0], SHORT=at_once[1])
    check(lambda **kw: bands_attention(**kw, with_lse=True), geometry, "plain", 2)
    check(bands_attention, geometry, "plain", 1)

    q_len, kv_len, rows = GEOMETRIES[geometry]
    query, key, _ = inputs(q=q_len, k=kv_len)
    weights = torch.rand(2, *query.shape[:3], generator=torch.Generator().manual_seed(5), dtype=query.dtype)

    def summed(results: tuple[Tensor, ...], which: list[int]) -> Tensor:
        seen = [torch.where(x.isfinite(), x, 0.0) for x in results[1:]]
        return sum((w * seen[n]).sum() for n, w in enumerate(weights) if n in which)  # type: ignore[return-value]

    for which in ([0, 1], [1]):
        results = []
        for own, value in ((bands_attention, None), (dense, key)):
            leaves = [x.clone().requires_grad_() for x in (query, key)]
            asked = {"with_lse": True, "with_entropy": True} if value is None else {}
            out = own(*leaves, value, rows=rows, scaling=0.7, **asked)
            results.append([*out[1:], *torch.autograd.grad(summed(out, which), leaves)])
        for got, want in zip(*results, strict=True):
            close(got, want, 1e-11)


@pytest.mark.parametrize("rows", ["causal", "left padding", "packed", "a blind row"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_methods(name: str, sinks: bool, rows: str) -> None:
    """Output and all gradients, those of a model's sinks too."""
    results = []
    for backend in ("fused", "reference"):
        leaves = [x.requires_grad_() for x in (*inputs(q=200, k=200, d=8), SINKS.clone())]
        own = {"sink_logits": leaves[3]} if sinks else {}
        call = Call(*leaves[:3], METHODS[name], long_rows(rows), 0.5, rotation=ROTATION, backend=backend, **own)
        out = attend(call)
        results.append([out, *torch.autograd.grad(out.sin().sum(), leaves[: 3 + sinks])])
    for got, want in zip(*results, strict=True):
        close(got, want, 1e-9)


def test_a_sink_of_no_weight_and_a_row_that_sees_nothing() -> None:
    query, key, value = (x.requires_grad_() for x in inputs(q=200, k=200))
    sinks = torch.full((4,), -torch.inf, dtype=torch.float64, requires_grad=True)
    call = Call(query, key, value, LongAttnConfig(), long_rows("a blind row"), 0.5, backend="fused", sink_logits=sinks)
    out = attend(call)
    assert not out[:, :, 100].any()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.square().sum(), (query, key, value, sinks)))


@pytest.mark.parametrize("parts", [1, 3])
def test_plain_rows_take_few_parts(parts: int) -> None:
    """One triangle for causal attention; a window's rows beyond it one more, read backwards."""
    rows = causal(256) if parts == 1 else causal(256).narrowed((torch.arange(256) - 200).clamp(min=0)[None], None)
    query, key, value = inputs(q=256, k=256)
    own = bands.parts(KernelCall(query, key, value, rows, LogitSpec(1.0)))
    assert own is bands.parts(KernelCall(query, key, value, rows, LogitSpec(1.0)))
    kinds = {1: ["causal"], 3: ["causal", "falling", "all", "causal"]}[parts]
    assert sorted(p.shape for p in own) == sorted(kinds)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "window", "packed"])
def test_gradcheck(name: str) -> None:
    """By finite differences, for every differentiable input and output at once."""
    query, key, value = inputs(b=2, h=2, kv=1, q=19, k=19, d=3)
    fixed = {"rows": GEOMETRIES[name][2], "scaling": 0.7, "with_lse": True}

    def f(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return bands_attention(q, k, v, **fixed)[:2]

    assert torch.autograd.gradcheck(f, tuple(x.requires_grad_() for x in (query, key, value)))


def test_an_output_of_any_product() -> None:
    """Where the output's gradient is 0 or next to it, too."""
    d_out = torch.randn(6, 1, 1, 8) * torch.tensor([1.0, 1e-3, 1e-25, 1e-38, 0.0, 0.0])[:, None, None, None]
    delta = torch.tensor([2.0, -1e4, 3.0, 5.0, -0.7, 0.0])[:, None, None]
    shifted, out = fused._with_product(d_out, delta)
    assert out.isfinite().all()
    assert shifted.isfinite().all()
    torch.testing.assert_close((shifted * out).sum(-1), delta, rtol=1e-6, atol=0.0)
    assert ((shifted - d_out).abs() <= 1e-18 * delta.abs()[..., None]).all()


@pytest.mark.parametrize("head_dim", [1, 3, 16, 80, 256])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2), (9, 3)])
def test_head_dims_and_grouped_heads(heads: tuple[int, int], head_dim: int) -> None:
    leaves = inputs(h=heads[0], kv=heads[1], q=70, k=70, d=head_dim)
    config = preset("windowed", window=66)
    results = [with_gradients(f, leaves, config, **o) for f, o in ((hf_longattn.attention, BANDS), (reference_attention, {}))]
    for got, want in zip(*results, strict=True):
        close(got, want, 1e-11)


def test_non_contiguous_inputs() -> None:
    """As models pass them: (batch, length, heads, head_dim) transposed, expanded over the batch, and an expanded gradient."""
    query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs(q=70, k=70))
    results = []
    for f, options in ((hf_longattn.attention, BANDS), (reference_attention, {})):
        some = value[:1].expand(2, -1, -1, -1)[..., ::2].repeat_interleave(2, -1)[..., :5]
        out = f(query, key, some, METHODS["narrow"], **options)
        results.append([out, *torch.autograd.grad(out.sum(), (query, key, value))])
    for got, want in zip(*results, strict=True):
        close(got, want, 1e-11)


@pytest.mark.parametrize("fast", [True, False], ids=["in half", "in float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["rerope", "leaky_rerope+infoscale", "windowed"])
def test_half_precision_error_budget(name: str, dtype: torch.dtype, fast: bool, cpu_bfloat16: Callable[[bool], None]) -> None:
    """Against float64, output and gradients: at most twice the error of sdpa in the same precision."""
    cpu_bfloat16(fast)
    rough = [x.to(dtype) for x in inputs(h=4, kv=4, q=200, k=200, d=64)]

    def errors(function: Callable[..., Tensor], exact: Callable[..., Tensor]) -> list[float]:
        runs = [with_gradients(f, x) for f, x in ((function, rough), (exact, [y.double() for y in rough]))]
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(*runs, strict=True)]

    def ours(f: Any, **options: Any) -> Callable[..., Tensor]:
        return lambda q, k, v: f(q, k, v, METHODS[name], rotation=ROTATION, **options)

    def stock(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    budget = errors(stock, stock)
    found = errors(ours(hf_longattn.attention, backend="fused"), ours(reference_attention))
    assert all(error <= 2 * most for error, most in zip(found, budget, strict=True)), (found, budget)


# how it is reached ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ["rerope", "windowed", "attention_sink", "rerope+adaptive_temperature"])
def test_auto_takes_it_on_a_cpu(name: str, grad: bool) -> None:
    query, key, value = (x.requires_grad_(grad) for x in inputs(q=200, k=200))
    assert plan_of(Call(query, key, value, METHODS[name], causal(200), 1.0, rotation=ROTATION)).kernel == "fused"


def test_auto_keeps_float32_for_a_score_of_its_own(cpu_bfloat16: Callable[[bool], None]) -> None:
    """Its factor multiplies what rounding queries and keys costs."""
    cpu_bfloat16(True)
    tensors = inputs(q=200, k=200, dtype=torch.bfloat16)
    for name, taken in (("cosscale", "tiled"), ("rerope", "fused")):
        rows = long_rows("left padding")
        assert plan_of(Call(*tensors, METHODS[name], rows, 1.0, rotation=ROTATION)).kernel == taken


def test_halves_are_computed_in_where_they_are_fast(cpu_bfloat16: Callable[[bool], None]) -> None:
    query, _, value = inputs(q=2, k=2, dtype=torch.bfloat16)
    for fast, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        cpu_bfloat16(fast)
        assert sdpa.computed_in(query, value) == dtype
        assert sdpa.computed_in(query, None) == torch.float32


def test_gradients_under_autocast_are_those_without() -> None:
    leaves = [x.requires_grad_() for x in inputs(q=40, k=40, dtype=torch.float32)]
    out = hf_longattn.attention(*leaves, METHODS["rerope"], backend="fused", rotation=ROTATION).square().sum()
    want = torch.autograd.grad(out, leaves, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(map(torch.equal, torch.autograd.grad(out, leaves), want))


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (CASES["scale_invariant"], {}, "scale_invariant changes logits by distance"),
        (METHODS["rerope"], {"softcap": 2.0}, "the model caps its scores"),
        (METHODS["rerope"], {"dropout": 0.1}, "it has no dropout"),
        (METHODS["rerope"], {"rows": causal(200).masked(mask_of(1, 1, 200, 200))}, "the rows are masked"),
        (METHODS["rerope"], {"value": torch.randn(2, 2, 200, 3).double()}, "values of as many features .* 3 are not 5"),
    ],
)
def test_refused_with_a_reason(config: LongAttnConfig, options: dict[str, Any], message: str) -> None:
    query, key, value = inputs(q=200, k=200)
    arguments = {"query": query, "key": key, "value": value, "rows": causal(200), "scaling": 1.0, "rotation": ROTATION}
    call = Call(config=config, backend="fused", **arguments | options)
    with pytest.raises(ValueError, match=f"backend 'fused' cannot compute this call: .*{message}.*use backend='auto'"):
        attend(call)


def test_dropout_is_never_left_out() -> None:
    """sdpa drops pairs, under a mask too, where parts would not."""
    query, key, value = (x.float() for x in inputs(q=40, k=40))
    for rows in (causal(40), causal(40).narrowed(torch.full((1, 40), 3), None)):
        call = Call(query, key, value, CASES["infoscale"].for_layer(0), rows, 1.0, backend="fused", dropout=0.99)
        assert plan_of(call).kernel == "fused"
        torch.manual_seed(0)
        assert (attend(call) == 0).all(-1).float().mean() > 0.3


def test_an_output_that_no_gradient_comes_to_has_gradients_of_zero() -> None:
    """As behind quantised layers whose backward pass gives none."""

    class Stops(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *d: Tensor) -> None:
            return None

    query, key, value = (torch.randn(1, 2, 150, 8, requires_grad=True) for _ in range(3))
    out = hf_longattn.attention(query, key, value, METHODS["rerope"], rotation=hf_longattn.Rotation(torch.ones(4)), **BANDS)
    (Stops.apply(out).sum() + query.sum()).backward()  # type: ignore[no-untyped-call]
    assert query.grad is not None
    assert bool((query.grad == 1).all())


def test_gradient_checkpointing() -> None:
    leaves = inputs(q=200, k=200)

    def again(*tensors: Tensor) -> Tensor:
        return checkpoint(hf_longattn.attention, *tensors, METHODS["rerope"], rotation=ROTATION, use_reentrant=False, **BANDS)

    results = [
        with_gradients(again, leaves),
        with_gradients(reference_attention, leaves, METHODS["rerope"], rotation=ROTATION),
    ]
    for got, want in zip(*results, strict=True):
        close(got, want, 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rerope", "attention_sink", "rerope+adaptive_temperature"])
def test_compiled_fullgraph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(hf_longattn.attention, fullgraph=True, backend="aot_eager")
    leaves = inputs(q=200, k=200)
    options = {"rotation": ROTATION, **BANDS}
    results = [with_gradients(compiled, leaves, METHODS[name], **options)]
    results += [with_gradients(reference_attention, leaves, METHODS[name], rotation=ROTATION)]
    for got, want in zip(*results, strict=True):
        close(got, want, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("geometry", ["packed", "nothing visible", "mask (b, 1, q, k)"])
def test_the_operator(geometry: str) -> None:
    """PyTorch's own checks; a mask that a graph could not read is computed by the tile loop."""
    q_len, kv_len, rows = GEOMETRIES[geometry]
    query, key, value = (x.requires_grad_() for x in inputs(q=q_len, k=kv_len))
    for own, outputs in ((value, (True, False)), (None, (True, True))):
        call = KernelCall(query, key, own, rows, LogitSpec(0.7), 0.0, None, *outputs)
        torch.library.opcheck(torch.ops.hf_longattn.fused.default, tuple(operators.flatten(call)))
    out, lse, _ = torch.ops.hf_longattn.fused(*operators.flatten(call._replace(value=value, with_entropy=False)))
    want = dense(query, key, value, rows, **arguments({}, query))
    close(out, want[0], 1e-11)
    close(lse, want[1], 1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unit_vectors_are_those_of_the_fold(dtype: torch.dtype) -> None:
    """Bit for bit, without gradients as with them; a zero vector gives zero."""
    leaves = inputs(q=70, k=70, d=16, dtype=dtype)
    leaves[0][0, 1, 3], leaves[1][1, 0, 5] = 0, 0
    got = hf_longattn.attention(*leaves, METHODS["cosscale"], **BANDS)
    assert bool(got.isfinite().all())
    assert torch.equal(got, with_gradients(hf_longattn.attention, leaves, METHODS["cosscale"], **BANDS)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_folded_into_queries_has_the_gradients_of_its_formula(dtype: torch.dtype) -> None:
    """No further from those in float64 than autograd's, of a factor by head too; a zero vector has a finite one."""
    x, (factor, *_) = inputs(q=70, d=16, dtype=dtype)[0], inputs(b=1, q=70, d=1, dtype=torch.float32)
    x[0, 1, 3], factor = 0, factor[..., 0].abs()

    def scaled(x: Tensor, factor: Tensor) -> Tensor:
        return (x * factor[..., None]).to(x.dtype)

    def unit(x: Tensor) -> Tensor:
        return CosScale().fold(x, x)[0]

    for ours, formula, leaves in ((by_segment._scaled, scaled, [x, factor]), (by_segment._Unit.apply, unit, [x])):
        exact = with_gradients(formula, [y.double() for y in leaves])
        found, autograd = with_gradients(ours, leaves), with_gradients(formula, leaves)
        assert torch.equal(found[0], autograd[0])
        for got, theirs, want in zip(found, autograd, exact, strict=True):
            assert got.dtype == theirs.dtype
            assert (got.double() - want).norm() <= 1.1 * (theirs.double() - want).norm() + 1e-6 * want.norm()


# CUDA -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The operators for CUDA on CPU tensors, by their schemas, with arguments as their kernels want them: which were asked."""
    asked: list[str] = []
    aten = torch.ops.aten
    forward, backward = (getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{x}") for x in ("", "_backward"))

    def flash(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, *, scale: float) -> Any:
        assert q.dtype in sdpa.HALF
        assert not causal or q.shape[2] == k.shape[2]  # it aligns at the last key
        asked.append("flash")
        state = q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64)
        empty = q.new_empty(0)
        return *forward(q, k, v, 0.0, causal, scale=scale), empty, empty, q.shape[2], k.shape[2], *state, empty

    def flash_backward(
        d: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *others: Any, scale: float
    ) -> Any:
        _, _, q_len, k_len, dropout, causal, seed, _ = others
        assert (q_len, k_len, dropout, seed.shape) == (q.shape[2], k.shape[2], 0.0, (2,))
        asked.append("flash backward")
        return backward(d, q, k, v, out, lse, 0.0, causal, scale=scale)

    def cudnn(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, _: bool, __: float = 0.0, causal: bool = False, *, scale: float
    ) -> Any:
        assert bias is None
        asked.append("cudnn")
        out, lse, *state = flash(q, k, v, 0.0, causal, scale=scale)
        asked.remove("flash")
        return out, lse[..., None], *state

    def cudnn_backward(
        d: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *others: Any, scale: float
    ) -> Any:
        _, _, bias, _, _, q_len, k_len, dropout, causal = others
        assert (bias, q_len, k_len, dropout, lse.shape[-1]) == (None, q.shape[2], k.shape[2], 0.0, 1)
        asked.append("cudnn backward")
        return backward(d, q, k, v, out, lse[..., 0], 0.0, causal, scale=scale)

    def efficient(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, _: bool, __: float = 0.0, causal: bool = False, *, scale: float
    ) -> Any:
        assert q.shape[1] == k.shape[1] == v.shape[1]
        assert bias is None or (bias.shape == (*q.shape[:3], k.shape[2]) and bias.stride(2) % 16 == 0)
        asked.append("efficient")
        out, lse = forward(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
        lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.nan)
        return out, lse, *(q.new_empty((), dtype=torch.int64) for _ in range(2))

    def efficient_backward(
        d: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, *others: Any, scale: float
    ) -> Any:
        _, _, _, wanted, causal = (*others, False)[:5]
        assert lse.shape[2] % 32 == 0
        assert list(wanted) == [True, True, True, False]
        asked.append("efficient backward")
        own = lse[..., : q.shape[2]].contiguous()
        return *backward(d, q, k, v, out, own, 0.0, causal, attn_mask=bias, scale=scale), q.new_empty(0)

    library = torch.library.Library("aten", "IMPL")
    for name, function in (("flash", flash), ("cudnn", cudnn), ("efficient", efficient)):
        library.impl(f"_scaled_dot_product_{name}_attention", function, "CPU")
    for name, function in (("flash", flash_backward), ("cudnn", cudnn_backward), ("efficient", efficient_backward)):
        library.impl(f"_scaled_dot_product_{name}_attention_backward", function, "CPU")
    monkeypatch.setattr(sdpa, "device", lambda x: "cuda")
    a_gpu(monkeypatch)
    yield asked
    for known in (sdpa._known_capability, sdpa._prefers_cudnn):
        known.cache_clear()
    library._destroy()


def a_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0), cudnn: int | None = 91900) -> None:
    """The GPU that is there, an H100 unless another is named, and cuDNN's version."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    for known in (sdpa._known_capability, sdpa._prefers_cudnn):
        known.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    crossed(
        itertools.product(
            ["rerope", "narrow", "attention_sink", "rerope+adaptive_temperature"], ["efficient", "cudnn", "flash", "triton"]
        ),
        [
            *(("rerope", kind) for kind in ("efficient", "cudnn", "flash", "triton")),
            *(("rerope+adaptive_temperature", kind) for kind in ("efficient", "cudnn", "flash")),
        ],
    ),
)
def test_cuda_is_asked_as_its_operators_want(name: str, kind: str, cuda: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Here they are stand-ins: only a GPU shows what the real ones compute. Triton takes what is no triangle where it runs."""
    half = kind in ("cudnn", "flash")
    dtype = torch.bfloat16 if half else torch.float32
    if kind != "triton":
        monkeypatch.setattr(fused.triton, "why_not_triton", lambda query: "not here")
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: kind == "cudnn")
    leaves = [x.to(dtype) for x in inputs(q=200, k=200, d=16)]
    got = with_gradients(hf_longattn.attention, leaves, METHODS[name], rotation=ROTATION, **BANDS)
    want = with_gradients(reference_attention, [x.double() for x in leaves], METHODS[name], rotation=ROTATION)
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b).norm() <= (0.02 if half else 1e-5) * b.norm()
    whole = {kind, f"{kind} backward"} if half else {"efficient", "efficient backward"}
    masked = {"efficient", "efficient backward"} if half and name in ("narrow", "rerope+adaptive_temperature") else set()
    assert set(cuda) == (set() if kind == "triton" and name == "narrow" else whole | masked)


def test_what_cuda_has_no_kernel_for(cuda: list[str]) -> None:
    for dtype, width, message in (
        (torch.float64, 16, "no fused kernel for float64 on CUDA"),
        (torch.float32, 12, "a head_dim of at most 256 that 8 divides, got 12"),
    ):
        tensors = inputs(q=200, k=200, d=width, dtype=dtype)
        with pytest.raises(ValueError, match=message):
            hf_longattn.attention(*tensors, METHODS["rerope"], rotation=ROTATION, **BANDS)
    assert not cuda


@pytest.mark.parametrize(
    ("capability", "cudnn", "dtype", "asked"),
    [
        ((7, 5), 91900, torch.float16, "efficient"),  # a T4
        ((8, 0), 91900, torch.float16, "flash"),
        ((8, 9), 91900, torch.bfloat16, "flash"),
        ((9, 0), 91500, torch.bfloat16, "flash"),
        ((9, 0), None, torch.bfloat16, "flash"),
        ((9, 0), 91501, torch.bfloat16, "cudnn"),
        ((10, 0), 91900, torch.float16, "cudnn"),
        ((10, 3), 91900, torch.float16, "cudnn"),
        ((12, 0), 91900, torch.float16, "flash"),  # an RTX 5090
        ((9, 0), 91900, torch.float32, "efficient"),
    ],
)
def test_the_operator_of_a_gpu(
    capability: tuple[int, int], cudnn: int, dtype: torch.dtype, asked: str, cuda: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a_gpu(monkeypatch, capability, cudnn)
    for query, key in ((9, 9), (1, 9), (9, 1)):
        cuda.clear()
        sides, how = inputs(q=query, k=key, d=16, dtype=dtype), (query == key, None, 0.25)
        out, lse = sdpa.forward(*sides, *how)
        sdpa.backward(out, *sides, out, lse, *how)
        kind = "flash" if asked == "cudnn" and query != key else asked  # cuDNN's takes no single key
        assert cuda == [kind, f"{kind} backward"]


def test_a_gpu_without_bfloat16(cuda: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A T4; a graph asks for what it is as it is traced."""
    a_gpu(monkeypatch, (7, 5))
    x = torch.ones(1, 2, 3, 16, dtype=torch.bfloat16)
    for why_not in (sdpa.why_not, torch.compile(sdpa.why_not, fullgraph=True, backend="eager")):
        assert "bfloat16 on a GPU of compute capability below 8.0" in str(why_not(x, x))
        assert why_not(x.half(), x.half()) is None


def test_operators_that_are_switched_off(cuda: list[str]) -> None:
    """As plain sdpa leaves them out; also between forward and backward."""
    leaves = [x.bfloat16().requires_grad_() for x in inputs(q=200, k=200, d=16)]
    reference = with_gradients(
        reference_attention, [x.detach().double() for x in leaves], METHODS["rerope"], rotation=ROTATION
    )
    kinds = ("cudnn", "flash", "efficient")
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    for n, last in ((0, 0), (1, 1), (2, 2), (0, 1), (1, 0), (0, 2)):
        cuda.clear()
        with sdpa_kernel(backends[n:]):
            out = hf_longattn.attention(*leaves, METHODS["rerope"], rotation=ROTATION, **BANDS)
        with sdpa_kernel(backends[last:]):
            gradients = torch.autograd.grad(out.double().sin().sum(), leaves)
        assert set(cuda) == {kinds[n], f"{kinds[last]} backward"}
        for a, b in zip((out, *gradients), reference, strict=True):
            assert (a.double() - b).norm() <= 0.02 * b.norm()
    cuda.clear()
    torch.use_deterministic_algorithms(True)
    try:
        hf_longattn.attention(*leaves, METHODS["rerope"], rotation=ROTATION, **BANDS)
    finally:
        torch.use_deterministic_algorithms(False)
    assert set(cuda) == {"flash"}
