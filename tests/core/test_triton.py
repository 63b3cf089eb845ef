"""The Triton kernels against the dense float64 computation, on the CPU under Triton's interpreter."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calls import GEOMETRIES, OPTIONS, arguments, by_options, dense, inputs, tables, with_gradients
from cases import CASES, LAYERS
from helpers import close, crossed, spread, stock, tokens
from torch import Tensor
from transformers import PreTrainedModel
from watched import Operators

import hf_longattn
from hf_longattn import LongAttnConfig, Rotation
from hf_longattn.core.attend import attend
from hf_longattn.core.call import Call
from hf_longattn.core.geometry import AttentionLayout
from hf_longattn.core.kernels import programs, triton
from hf_longattn.core.kernels.kernel import KernelCall
from hf_longattn.core.kernels.triton import TileSizes, why_not_triton
from hf_longattn.core.lower import distance_tables, table_length
from hf_longattn.core.plan import LogitSpec
from hf_longattn.core.tables import TableCache

pytestmark = pytest.mark.skipif(triton.triton is None, reason="triton is not installed")
CPU = torch.device("cpu")
triton_attention = by_options(triton.run)
candidates = triton._candidates
IN_A_MODEL = ("scale_invariant", "sinks", "calibrated", "alibi", "adaptive_temperature", "mapped+adaptive", "rerope")
IN_A_MODEL += ("streaming+adaptive", "attention_sink_learned", "softmax_plus")


def tiles(monkeypatch: pytest.MonkeyPatch, rows: int, columns: int) -> None:
    monkeypatch.setattr(triton, "_candidates", lambda *_: (TileSizes(rows, columns, 4, 1),))


def by_backend(config: LongAttnConfig, layers: int = 1) -> list[PreTrainedModel]:
    """Return a model by Triton, and by the reference. The interpreter is slow: layers of one kind would only cost."""
    m = stock("llama", num_hidden_layers=layers)
    return [hf_longattn.apply(copy.deepcopy(m), config.replace(backend=backend)) for backend in ("triton", "reference")]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tiles in small tensors."""
    tiles(monkeypatch, 16, 16)


def check(query: Tensor, key: Tensor, value: Tensor, rows: AttentionLayout, tolerance: float = 2e-5, **options: Any) -> None:
    """Output, logsumexp, entropy and the gradients through all three."""
    factors = [n for n in ("row_scale", "bias_scale") if n in options]
    wide = {n: x.double() if isinstance(x, Tensor) else x for n, x in options.items() if n not in factors}
    exact = [x.detach().double().requires_grad_() for x in (query, key, value, *(options[n] for n in factors))]
    leaves = [x.detach().clone().requires_grad_() for x in (query, key, value, *(options.pop(n) for n in factors))]
    want = dense(*exact[:3], rows, **wide, **dict(zip(factors, exact[3:], strict=True)))
    own = options | dict(zip(factors, leaves[3:], strict=True))
    got = triton_attention(*leaves[:3], rows, with_lse=True, with_entropy=True, **own)
    seen = torch.isfinite(want[1])
    assert torch.equal(seen, torch.isfinite(got[1]))

    def loss(out: Tensor, lse: Tensor, entropy: Tensor) -> Tensor:
        return (1.3 * out.double()).sin().sum() + lse.double()[seen].cos().sum() + (2 * entropy.double()).cos().sum()

    for a, b in zip(got, want, strict=True):
        close(a.double()[seen], b[seen], tolerance)
    for a, b in zip(torch.autograd.grad(loss(*got), leaves), torch.autograd.grad(loss(*want), exact), strict=True):
        close(a.double(), b, 5 * tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("geometry", "options"),
    crossed(spread(GEOMETRIES, OPTIONS, 4), [("window", "everything"), ("mask (b, 1, q, k)", "everything")]),
)
def test_geometries(geometry: str, options: str) -> None:
    q_len, kv_len, rows = GEOMETRIES[geometry]
    tensors = inputs(q=q_len, k=kv_len, dtype=torch.float32)
    check(*tensors, rows, **arguments(OPTIONS[options], tensors[0]))


def test_layouts() -> None:
    """Outputs and gradients lie by token, as models want them; an output that does not gives the same gradients."""
    leaves = [x.requires_grad_() for x in inputs(q=19, k=19, dtype=torch.float32)]
    call = KernelCall(*leaves, AttentionLayout.causal(19, 19, None, 0, CPU), LogitSpec(0.7), with_lse=True)
    out, lse, _ = triton.run(call)
    d_out = out.detach().cos()
    gradients = torch.autograd.grad(out, leaves, d_out)
    assert all(x.transpose(1, 2).is_contiguous() for x in (out, *gradients))
    call = call._replace(**{n: x.detach() for n, x in zip(("query", "key", "value"), leaves, strict=True)})
    for laid in (out.contiguous(), out.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)):
        again = triton.gradients(call, d_out, None, None, laid.detach(), lse.detach(), lse.new_empty(0))
        assert all(torch.equal(a, b) for a, b in zip(again[:3], gradients, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_explicit_positions(masked: bool) -> None:
    """As the same tokens with holes between them."""
    query, key, value = inputs(q=19, k=19, dtype=torch.float32)
    ids = torch.stack([torch.arange(19) * 2, torch.arange(19).pow(2) // 10])
    rows = AttentionLayout.causal(19, 19, None, 0, CPU).at(ids, ids)
    if masked:
        rows = rows.masked(torch.rand(2, 1, 1, 19, generator=torch.Generator().manual_seed(0)) > 0.2)
    config = CASES["sinks"]
    leaves = query, key, value

    def run(query: Tensor, key: Tensor, value: Tensor, backend: str) -> Tensor:
        return attend(Call(query, key, value, config, rows, 0.7, backend=backend))

    for got, want in zip(*(with_gradients(run, leaves, backend) for backend in ("triton", "reference")), strict=True):
        close(got, want, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_far_tiles(degree: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the distance from which polynomials serve: tables that are some themselves, so that each coefficient counts."""
    tiles(monkeypatch, 64, 32)
    monkeypatch.setattr(triton, "DEGREES", 1 << degree)
    t, length = torch.arange(2048)[None] / 330, 330
    gain, bias = 1 + 0.4 * t**degree - 0.2 * t, torch.cat([-2 * t**degree, t**degree - t])
    first = starts(gain, bias, half=False)
    assert first[degree - 1] < length - 150
    assert all(n > length for n in first[: degree - 1])
    for q_len in (40, length) if degree == 3 else (40,):
        tensors = inputs(b=1, h=2, kv=1, q=q_len, k=length, d=8, dtype=torch.float32)
        rows = AttentionLayout.causal(q_len, length, None, 0, CPU)
        check(*tensors, rows, gain=gain, bias=bias, sinks=3 * (degree == 2), scaling=0.7)


def starts(gain: Tensor, bias: Tensor, half: bool) -> list[int]:
    """From which distance of a tile's centre on polynomials of degree 1, 2 and 3 serve."""
    return [int(n) * triton._STEP for n in triton._fits(gain, bias, half)[0, 0, :3]]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("method", [{"tau": 10.0}, {"tau": 0.1}, {"decay": 0.5, "logit_mean": -5.0, "logit_variance": 9.0}])
def test_polynomials_miss_no_more_than_they_may(method: dict[str, float], half: bool) -> None:
    """From the distance on that the table itself names, for each degree, pair by pair of a tile."""
    config = LongAttnConfig.preset("scale_invariant", **method)
    assert config.logit_map is not None
    exact = config.logit_map.tables(1, 1 << 14, CPU)
    fits = triton._fits(*(x.float() for x in exact), half)[0].double()
    misses = triton._MISSES[half]
    x = torch.arange(-triton._REACH, triton._REACH + 1).double()
    served = [int(n) for n in fits[0, :3]]
    assert served == sorted(served, reverse=True)
    assert served[2] * triton._STEP < 1500
    for degree, first in zip((1, 2, 3), served, strict=True):
        for centre in (first, first + 7, (first + 900) // 2):
            if not first <= centre < 1000:
                continue
            record = fits[centre + 1, (degree - 1) * (degree + 2) :]
            for table, miss, own in zip(exact, misses, (record, record[degree + 1 :]), strict=True):
                fit = (x[:, None] ** torch.arange(degree + 1)) @ own[: degree + 1]
                rounding = 6 * torch.finfo(torch.float32).eps * table.abs().max()
                assert (fit - table[0, centre * triton._STEP + x.long()]).abs().max() < 1.1 * miss + rounding


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", crossed([64, 80, 96, 128, 256, 512], [64, 80]))
def test_head_dims(head_dim: int) -> None:
    gain, bias = tables(4, torch.float32)
    query, key, value = inputs(b=1, q=21, k=21, d=head_dim, dtype=torch.float32)
    rows = AttentionLayout.causal(21, 21, None, 0, CPU)
    check(query / 4, key / 4, value[..., :20], rows, gain=gain, bias=bias, scaling=0.7)


@pytest.mark.slow
def test_float16() -> None:
    query, key, value = inputs(b=1, q=40, k=40, d=16, dtype=torch.float16)
    gain, bias = tables(4, torch.float32)
    rows = AttentionLayout.causal(40, 40, None, 0, CPU)
    out, lse, _ = triton_attention(query, key, value, rows, scaling=0.25, gain=gain, bias=bias, with_lse=True)
    want = dense(query.double(), key.double(), value.double(), rows, scaling=0.25, gain=gain.double(), bias=bias.double())
    assert out.dtype == torch.float16
    close(out.double(), want[0], 3e-3)
    close(lse.double(), want[1], 1e-5)


@pytest.mark.slow
def test_dropout_is_the_same_forward_and_backward() -> None:
    """Values that name their keys show which pairs were dropped; the gradients are those of these."""
    n, share = 32, 0.25
    query, key, _ = inputs(b=1, h=2, kv=1, q=n, k=n, d=16, dtype=torch.float32)
    value = torch.eye(n)[None, None]
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    rows = AttentionLayout.causal(n, n, None, 0, CPU)
    out, _, _ = triton_attention(*leaves, rows, scaling=0.3, dropout=share)
    p = dense(query.double(), key.double(), value.double(), rows, scaling=0.3)[0]
    kept = (out > 0).double() / (1 - share)
    close(out.double(), p * kept, 1e-5)
    dropped = float(((out == 0) & (p > 0)).sum() / (p > 0).sum())
    assert abs(dropped - share) < 0.07  # of 1,056 pairs: five standard deviations
    exact = [x.double().requires_grad_() for x in (query, key, value)]
    want = dense(*exact, rows, scaling=0.3, keep=kept)[0]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    for a, b in zip(
        torch.autograd.grad((out * weights).sum(), leaves), torch.autograd.grad((want * weights).sum(), exact), strict=True
    ):
        close(a.double(), b, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", crossed(IN_A_MODEL, ["sinks"]))
@torch.no_grad()
def test_in_a_model(case: str) -> None:
    got, want = by_backend(CASES[case], layers=LAYERS if case == "calibrated" else 1)  # means of its own for each layer
    ids = tokens(2, 20)
    close(got(ids).logits, want(ids).logits)


@pytest.mark.slow
def test_learned_sinks() -> None:
    """Rows of a window and its far keys, forward and backward."""
    config, turn = CASES["streaming"], {"rotation": Rotation(torch.tensor([1.0, 0.1]))}
    leaves = (*inputs(b=1, q=20, k=20, d=16, dtype=torch.float32), torch.arange(4.0) - 1)

    def run(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, backend: str) -> Tensor:
        return hf_longattn.attention(query, key, value, config, backend=backend, sink_logits=sinks, **turn)

    results = [with_gradients(run, leaves, backend) for backend in ("triton", "reference")]
    for got, want in zip(*results, strict=True):
        close(got, want, 2e-5)


@pytest.mark.slow
def test_training_and_compile() -> None:
    ids, config = tokens(1, 20), CASES["scale_invariant"]
    a, b = by_backend(config)
    grads = [torch.autograd.grad(m(ids, labels=ids).loss, list(m.parameters())) for m in (a, b)]
    for x, y in zip(*grads, strict=True):
        close(x, y)
    query, key, value = inputs(b=1, q=20, k=20, d=16, dtype=torch.float32)

    def run(q: Tensor) -> Tensor:
        return hf_longattn.attention(q, key, value, config, backend="triton")

    torch.compiler.reset()
    close(torch.compile(run, backend="aot_eager", fullgraph=True)(query), run(query))


@pytest.mark.slow
def test_compiled_calls_know_where_polynomials_serve() -> None:
    config = LongAttnConfig.preset("scale_invariant")
    assert config.logit_map is not None
    gain, bias = distance_tables(config.logit_map, 2, 4096, torch.zeros(1))
    traced = torch.compile(triton._fits, backend="eager", fullgraph=True)(gain, bias, False)
    close(traced, triton._cached_fits(gain, bias, False), 1e-6)


def test_polynomials_serve_prompts_of_every_length_and_count_among_a_models_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table by table_length is long enough for them; fitting many heads launches no more than fitting one."""
    config, cache, taken = LongAttnConfig.preset("scale_invariant"), TableCache(), []
    monkeypatch.setattr(triton, "_run", lambda call: taken.append(call.spec.polynomials))
    assert config.logit_map is not None
    query, key, value = inputs(b=1, h=2, q=1024, k=1024, d=16, dtype=torch.float32)
    rows = AttentionLayout.causal(1024, 1024, None, 0, CPU)
    gain, bias = distance_tables(config.logit_map, 2, table_length(rows, 1024), query, cache)
    triton.run(KernelCall(query, key, value, rows, LogitSpec(0.7, gain=gain, bias=bias)))
    (records,) = taken
    assert gain.shape[1] < 1400
    assert records.shape[1] * triton._STEP > 1024 + triton._REACH
    assert cache.nbytes == sum(x.numel() * 4 for x in (gain, bias, records))
    launched = []
    for heads in (1, 8):
        with Operators() as seen:
            triton._fits(gain.repeat(heads, 1), bias.repeat(heads, 1), False)
        launched.append(seen.ran.total())
    assert launched[1] <= launched[0]


def test_a_gap_between_keys_and_queries() -> None:
    """Distances across it lie beyond what lengths bound: positions are explicit."""
    leaves = inputs(b=1, q=5, k=6, d=16, dtype=torch.float32)
    options: dict[str, Any] = {"query_start": 3000}
    config = CASES["scale_invariant"]
    want = hf_longattn.reference_attention(*leaves, config, **options)
    close(hf_longattn.attention(*leaves, config, backend="triton", **options), want, 2e-5)


def test_what_does_not_compile_is_computed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*_: Any, **__: Any) -> None:
                raise RuntimeError("out of resource: shared memory")

            return launch

    monkeypatch.setattr(triton, "_FAILED", {})
    monkeypatch.setattr(programs, "INTERPRETED", False)
    for name in ("forward_kernel", "query_kernel"):
        monkeypatch.setattr(triton.kernels, name, Broken())
    triton._warn.cache_clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        tensors = inputs(q=19, k=19, dtype=torch.float32)
        for _ in range(2):
            check(*tensors, GEOMETRIES["packed"][2], **arguments(OPTIONS["everything"], tensors[0]))
    assert sorted(str(w.message).split(" kernel")[0] for w in told) == [
        "Triton cannot compile the forward",
        "Triton cannot compile the query",
    ]
    triton._warn.cache_clear()


@pytest.mark.slow
def test_gradients_of_a_part_that_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the logsumexp over these keys and others, as the program takes it."""
    query, key, value = inputs(q=19, k=19, dtype=torch.float32)
    call = KernelCall(query, key, value, AttentionLayout.causal(19, 19, None, 0, CPU), LogitSpec(0.7), with_lse=True)
    out, lse, entropy = triton.run(call)
    given = torch.ones_like(out), None, None, 0.5 * out, lse + 0.7, entropy
    want = triton.gradients(call, *given)

    def fail(*_: Any) -> None:
        raise triton.KernelFailure("nothing")

    monkeypatch.setattr(triton, "_launch", fail)
    monkeypatch.setattr(triton, "_warn", lambda _: None)
    for got, exact in zip(triton.gradients(call, *given)[:3], want[:3], strict=True):
        close(got, exact, 2e-5)


@pytest.mark.parametrize(
    ("capability", "whole"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)]
)
def test_tiles_where_products_are_held_in_registers(
    capability: tuple[int, int], whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 x 64 with 4 warps would spill 1,300 bytes a thread there (an A100, an RTX 4090, an RTX 5090)."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    triton._has_warp_groups.cache_clear()
    query: Any = SimpleNamespace(shape=(1, 2, 64, 128), dtype=torch.bfloat16, device=torch.device("cuda", 0))
    for kernel, value in (("forward", query), ("forward", None), ("query", query)):
        found = candidates(kernel, query, value)
        assert (found[0] == TileSizes(128, 32, 8, 2)) != whole
        assert any(tile.least(kernel, 128, 2) <= 101376 for tile in found)
    triton._has_warp_groups.cache_clear()


def test_an_amd_gpu_is_asked_what_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm's torch does not name the opt-in, and its MI300's capability begins with 9, as an H100's does."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 4))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(shared_memory_per_block=65536))
    triton._has_warp_groups.cache_clear()
    device = torch.device("cuda", 0)
    assert triton._shared_memory(device) == 65536
    assert not triton._has_warp_groups(device)
    triton._has_warp_groups.cache_clear()


def test_grids_of_large_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's grids end at 65,535 but on their first axis."""
    grids: dict[str, tuple[int, ...]] = {}

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids[self.name] = grid
            return lambda *_, **__: None

    for module, names in ((triton, ("forward", "query", "ranges", "key")), (programs, ("scores", "turn", "join"))):
        for name in names:
            monkeypatch.setattr(module.kernels, f"{name}_kernel", Kernel(name))
    batch, heads = 1 << 16, 2
    x = torch.empty(1, 1, 3, 16).expand(batch, heads, -1, -1)
    rows = AttentionLayout(AttentionLayout.causal(3, 3, None, 0, CPU).index.expand(batch, -1, -1))
    call = KernelCall(x, x, x, rows, LogitSpec(0.7), with_lse=True)
    out, lse, entropy = triton._forward(call)
    triton.gradients(call, out, None, None, out, lse, entropy)
    segment = programs.DeviceSegment(rows.int32_index(CPU), *[None] * 5)
    programs.scores(x[:, :, :1], x, [segment], call.spec, 0.7, None, False, None)
    programs.turned(x, *[torch.empty(1, 3, 1, 8)] * 2, (0, 8, False), None)
    programs.join(out, lse, out, lse)
    assert len(grids) == 7
    assert all(math.prod(grid) == batch * (1 if name == "ranges" else heads) for name, grid in grids.items())
    assert all(max(grid[1:], default=1) <= 65535 for grid in grids.values())


@pytest.mark.parametrize("limit", [232448, 166912, 101376])
def test_every_device_has_tiles_that_fit(limit: int) -> None:
    """An H100, an A100, an RTX 4090: by what vectors take; `make compile-cuda` asks the compiler."""
    for (kernel, half, width), candidates in triton.CANDIDATES.items():
        if (half, width) == (False, 512) and limit < 166912:
            continue  # plain PyTorch computes them
        assert any(blocks.least(kernel, width, 2 if half else 4) <= limit for blocks in candidates), (kernel, half, width)


def test_refusals() -> None:
    query, key, value = inputs(q=8, k=8, dtype=torch.float32)
    assert why_not_triton(query) is None
    for changed, reason in (
        (query.double(), "float64"),
        (query.repeat(1, 1, 1, 120), "head_dim up to 512"),
        (query.bfloat16(), "bfloat16"),
    ):
        assert reason in str(why_not_triton(changed))
    with pytest.raises(ValueError, match="backend 'triton' cannot compute this call"):
        hf_longattn.attention(query.double(), key.double(), value.double(), CASES["sinks"], backend="triton")


@pytest.mark.slow
def test_without_interpreter_the_cpu_is_refused() -> None:
    code = "import torch; from hf_longattn.core.kernels.triton import why_not_triton as w; "
    code += "print(w(torch.zeros(1, 1, 2, 16)))"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert "needs CUDA" in done.stdout
