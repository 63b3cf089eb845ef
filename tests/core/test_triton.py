"""The Triton kernels against the dense float64 computation, on the CPU under Triton's interpreter."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from calls import by_options, dense, geometries, inputs, tables, with_gradients
from cases import CASES
from helpers import close, crossed, model, tokens
from torch import Tensor

import hf_longattn
from hf_longattn import LongAttnConfig, Rotation
from hf_longattn.core.attend import attend, why_not_pages
from hf_longattn.core.call import Call
from hf_longattn.core.geometry import Rows
from hf_longattn.core.kernels import triton
from hf_longattn.core.kernels.triton import Blocks, why_not_triton
from hf_longattn.core.prepared import distance_tables
from hf_longattn.integration.engines.paged import batches_of

pytestmark = pytest.mark.skipif(triton.triton is None, reason="triton is not installed")
CPU = torch.device("cpu")
triton_attention = by_options(triton.run)
IN_A_MODEL = ("scale_invariant", "sinks", "calibrated", "alibi", "adaptive_temperature", "mapped+adaptive", "rerope")
IN_A_MODEL += ("streaming+adaptive", "attention_sink_learned")
INTERVALS = {name: g for name, g in geometries().items() if g[2].allowed is None}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tiles in small tensors."""
    monkeypatch.setattr(triton, "_forward_blocks", lambda *_: Blocks(32, 16))
    monkeypatch.setattr(triton, "_backward_blocks", lambda *_: Blocks(16, 32))


def check(query: Tensor, key: Tensor, value: Tensor, rows: Rows, tolerance: float = 2e-5, **options: Any) -> None:
    """Output, logsumexp, entropy and the gradients through all three."""
    names = [n for n in ("gain", "bias", "bias_scale") if n in options]
    wide = options | {n: options[n].double() for n in names}
    exact = [x.double().requires_grad_() for x in (query, key, value)]
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    if "bias_scale" in options:
        wide["bias_scale"], options["bias_scale"] = (o["bias_scale"].requires_grad_() for o in (wide, options))
        exact.append(wide["bias_scale"])
        leaves.append(options["bias_scale"])
    want = dense(*exact[:3], rows, scaling=0.7, **wide)
    got = triton_attention(*leaves[:3], rows, scaling=0.7, with_lse=True, with_entropy=True, **options)
    seen = torch.isfinite(want[1])
    assert torch.equal(seen, torch.isfinite(got[1]))

    def loss(out: Tensor, lse: Tensor, entropy: Tensor) -> Tensor:
        return (1.3 * out.double()).sin().sum() + lse.double()[seen].cos().sum() + (2 * entropy.double()).cos().sum()

    for a, b in zip(got, want, strict=True):
        close(a.double()[seen], b[seen], tolerance)
    for a, b in zip(torch.autograd.grad(loss(*got), leaves), torch.autograd.grad(loss(*want), exact), strict=True):
        close(a.double(), b, 5 * tolerance * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize(
    ("geometry", "options"),
    crossed(itertools.product(INTERVALS, ("plain", "mapped", "everything")), [("packed", "everything")]),
)
def test_geometries(geometry: str, options: str) -> None:
    q_len, kv_len, rows = INTERVALS[geometry]
    gain, bias = tables(4, torch.float32)
    given: dict[str, dict[str, Any]] = {
        "plain": {},
        "mapped": {"gain": gain[:1], "bias": bias},  # one table for all heads, and one a head
        "everything": {"gain": gain, "bias": bias, "bias_scale": torch.rand(2, 4, q_len) + 0.5, "sinks": 2},
    }
    check(*inputs(q=q_len, k=kv_len, dtype=torch.float32), rows, **given[options])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "length", "sinks"), [("alibi", 330, 0), ("scale_invariant", 700, 3)], ids=["alibi", "scale_invariant"]
)
def test_far_tiles(method: str, length: int, sinks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the distance from which a cubic serves; with tau 1,000 that is early."""
    monkeypatch.setattr(triton, "_forward_blocks", lambda *_: Blocks(64, 32))
    config = LongAttnConfig.preset(method, **({"tau": 1000.0} if method == "scale_invariant" else {}))
    assert config.logit_map is not None
    gain, bias = distance_tables(config.logit_map, 2, 2048, torch.zeros(1))
    assert triton._far_from(gain, bias) < length - 100
    rows = Rows.causal(40, length, None, 0, CPU)
    check(*inputs(b=1, h=2, kv=1, q=40, k=length, d=8, dtype=torch.float32), rows, gain=gain, bias=bias, sinks=sinks)
    rows = Rows.causal(3, length, None, 0, CPU)  # decoding: keys are split among programs
    check(*inputs(b=1, h=2, kv=1, q=3, k=length, d=8, dtype=torch.float32), rows, gain=gain, bias=bias, sinks=sinks)


@pytest.mark.parametrize("method", [{"tau": 10.0}, {"tau": 0.1}, {"decay": 0.5, "logit_mean": -5.0, "logit_variance": 9.0}])
def test_where_a_cubic_is_exact(method: dict[str, float]) -> None:
    """From there on a fit through the kernel's four points misses no table value by more than it claims."""
    config = LongAttnConfig.preset("scale_invariant", **method)
    assert config.logit_map is not None
    for table in config.logit_map.tables(1, 1 << 14, CPU):
        far = int(triton._cubic_from(table.float()))
        assert far < 1500
        outer, inner = triton._nodes(triton._SPAN)
        for centre in (far + triton._SPAN, far + 3000, 12000):
            x = torch.arange(-triton._SPAN, triton._SPAN + 1).double()
            nodes = torch.tensor([-outer, -inner, inner, outer]).double()
            powers = torch.linalg.solve(nodes[:, None] ** torch.arange(4), table[0, centre + nodes.long()])
            fit = (x[:, None] ** torch.arange(4)) @ powers
            rounding = 4 * torch.finfo(torch.float32).eps * table.abs().max()
            assert (fit - table[0, centre + x.long()]).abs().max() < 1.1 * (triton.CUBIC_ERROR + rounding)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(head_dim: int) -> None:
    gain, bias = tables(4, torch.float32)
    query, key, value = inputs(b=1, q=21, k=21, d=head_dim, dtype=torch.float32)
    rows = Rows.causal(21, 21, None, 0, CPU)
    check(query / 4, key / 4, value[..., :20], rows, gain=gain, bias=bias)


def test_float16() -> None:
    query, key, value = inputs(b=1, q=40, k=40, d=16, dtype=torch.float16)
    gain, bias = tables(4, torch.float32)
    rows = Rows.causal(40, 40, None, 0, CPU)
    out, lse, _ = triton_attention(query, key, value, rows, scaling=0.25, gain=gain, bias=bias, with_lse=True)
    want = dense(query.double(), key.double(), value.double(), rows, scaling=0.25, gain=gain.double(), bias=bias.double())
    assert out.dtype == torch.float16
    close(out.double(), want[0], 3e-3)
    close(lse.double(), want[1], 1e-5)


@pytest.mark.parametrize("case", crossed(IN_A_MODEL, ["sinks"]))
@torch.no_grad()
def test_in_a_model(case: str) -> None:
    ids = tokens(2, 20)
    close(model("llama", CASES[case], "triton")(ids).logits, model("llama", CASES[case], "reference")(ids).logits)


def test_a_gap_between_keys_and_queries_is_refused() -> None:
    """Distances across it lie beyond the tables."""
    query, key, value = inputs(b=1, q=5, k=6, d=16, dtype=torch.float32)
    with pytest.raises(ValueError, match="positions do not count as cache indices"):
        hf_longattn.attention(query, key, value, CASES["scale_invariant"], query_start=3000, backend="triton")


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
    a, b = (model("llama", config, backend) for backend in ("triton", "reference"))
    grads = [torch.autograd.grad(m(ids, labels=ids).loss, list(m.parameters())) for m in (a, b)]
    for x, y in zip(*grads, strict=True):
        close(x, y)
    query, key, value = inputs(b=1, q=20, k=20, d=16, dtype=torch.float32)

    def run(q: Tensor) -> Tensor:
        return hf_longattn.attention(q, key, value, config, backend="triton")

    torch.compiler.reset()
    close(torch.compile(run, backend="aot_eager", fullgraph=True)(query), run(query))


def test_compiled_calls_know_where_a_cubic_is_exact() -> None:
    config = LongAttnConfig.preset("scale_invariant")
    assert config.logit_map is not None
    gain, bias = distance_tables(config.logit_map, 2, 4096, torch.zeros(1))
    traced = torch.compile(triton._far_from, backend="eager", fullgraph=True)(gain, bias)
    assert int(traced) == int(triton._cached_far_from(gain, bias)) < 1500


PAGED = [
    "calibrated",
    "rerope",
    "dual_chunk",
    "string",
    "yarn_beyond",
    "streaming",
    "attention_sink_learned",
    "mapped+adaptive",
    "leaky_rerope+scale_invariant",
    "sink+rerope+adaptive",
]


def in_pages(lengths: list[int], page: int, heads: int, width: int) -> tuple[Tensor, Tensor]:
    """A cache (pages, heads, page, 2 width) with NaN wherever no request has a key, and each one's pages, in no order."""
    most = -(-max(lengths) // page)
    order = torch.randperm(most * len(lengths) + 3)
    table = order[: most * len(lengths)].view(len(lengths), most).int()
    cache = torch.full((len(order), heads, page, 2 * width), torch.nan)
    for own, length in zip(table, lengths, strict=True):
        at = torch.arange(length)
        cache[own[at // page].long(), :, at % page] = torch.randn(length, heads, 2 * width)
    return cache, table


def check_pages(
    case: str, queries: int, lengths: list[int], window: int | None = None, page: int = 16, sinks: Tensor | None = None
) -> None:
    """Keys read where they lie, beside keys gathered and the dense formula."""
    heads, kv_heads, width = 4, 2, 16
    cache, table = in_pages(lengths, page, kv_heads, width)
    key, value = cache.split(width, -1)
    config, rotation = CASES[case].for_layer(0), Rotation(torch.tensor([1.0, 0.3, 0.1, 0.01]))
    total = torch.tensor(lengths)
    starts = torch.stack([torch.arange(len(lengths) + 1) * queries, torch.cat([torch.zeros(1).long(), total.cumsum(0)])], -1)
    seen = 0
    for batch in batches_of(starts, total, window, CPU):
        own = table[list(batch.requests), : -(-batch.keys.shape[1] // page)]
        query = torch.randn(len(own), heads, queries, width)
        model: dict[str, Any] = {"scaling": 0.3, "rotation": rotation, "sink_logits": sinks}
        with torch.no_grad():
            got = attend(Call(query, key, value, config, batch.rows, pages=own, **model))
            at = torch.minimum(torch.arange(batch.keys.shape[1]), total[list(batch.requests), None] - 1)
            gathered = cache[own.long().gather(1, at // page), :, at % page].transpose(1, 2)
            want = attend(Call(query, *gathered.split(width, -1), config, batch.rows, backend="reference", **model))
        close(got, want, 2e-5)
        seen += len(own)
    assert seen == len(lengths)


@pytest.mark.parametrize(("queries", "lengths"), [(1, [18, 27, 45]), (18, [18, 27])], ids=["one", "chunk"])
@pytest.mark.parametrize("case", crossed(PAGED, ["calibrated", "streaming"]))
def test_pages(case: str, queries: int, lengths: list[int]) -> None:
    """Requests of mixed lengths, as a serving engine has them."""
    check_pages(case, queries, lengths)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["scale_invariant", "rerope"])
def test_pages_of_sliding_layers_and_learned_sinks(case: str) -> None:
    check_pages(case, 7, [7, 30, 41], window=20, page=8, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))
    check_pages(case, 1, [200], window=20, page=32)  # split among programs, most of which see nothing


def test_pages_refuse() -> None:
    cache, table = in_pages([4], 16, 2, 16)
    query, rows = torch.randn(1, 4, 4, 16), Rows.causal(4, 16, 0, 0, CPU)
    for config, of, softcap, reason in (
        (CASES["cosscale"], query, None, "every key's norm"),
        (CASES["rerope"], query.half(), None, "the cache is in torch.float32"),
        (CASES["rerope"], query, 30.0, "no softcap"),
    ):
        assert reason in str(why_not_pages(of, cache, config, softcap))
    with pytest.raises(ValueError, match="attention over pages cannot compute this call: cosscale needs"):
        attend(Call(query, *cache.split(16, -1), CASES["cosscale"], rows, scaling=1.0, pages=table))


def test_refusals() -> None:
    query, key, value = inputs(q=8, k=8, dtype=torch.float32)
    rows = Rows.causal(8, 8, None, 0, CPU)
    assert why_not_triton(query, rows) is None
    for changes, reason in (
        ({"query": query.double()}, "float64"),
        ({"dropout": 0.1}, "dropout"),
        ({"softcap": 3.0}, "softcap"),
        ({"rows": Rows(rows.index, torch.ones(1, 1, 8, 8, dtype=torch.bool))}, "one interval"),
        ({"rows": rows.at(torch.arange(8)[None], torch.arange(8)[None])}, "positions do not count"),
        ({"query": query.repeat(1, 1, 1, 60)}, "head_dim up to 256"),
        ({"query": query.bfloat16()}, "bfloat16"),
    ):
        assert reason in str(why_not_triton(**({"query": query, "rows": rows} | changes)))
    with pytest.raises(ValueError, match="backend 'triton' cannot compute this call"):
        hf_longattn.attention(query.double(), key.double(), value.double(), CASES["sinks"], backend="triton")


@pytest.mark.slow
def test_without_interpreter_the_cpu_is_refused() -> None:
    code = "import torch; from hf_longattn.core.geometry import Rows; "
    code += "from hf_longattn.core.kernels.triton import why_not_triton as w; "
    code += "print(w(torch.zeros(1, 1, 2, 16), Rows.causal(2, 2, None, 0, torch.device('cpu'))))"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert "needs CUDA" in done.stdout
