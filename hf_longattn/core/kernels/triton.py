"""Exact attention over an interval of keys a row in Triton: forward, backward, entropy, under any logit map.

The plan is FlashAttention-2's: one program for a block of query rows, keys in tiles, an online softmax; the backward pass
recomputes tiles from the logsumexp, once by rows (d_query) and once by columns (d_key, d_value), so that nothing is added
atomically and results repeat exactly. On top comes the map L = x gain_t C(S) + y bias_t. Near the diagonal its tables are
looked up pair by pair. Farther off they are smooth: a polynomial of the distance serves a whole tile. Where which degree
becomes exact enough for the dtype is measured on the tables themselves, once.

For CUDA, where an H100 has run it; tested on the CPU under Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..geometry import AttentionLayout
from ..plan import Operand
from ..tables import made_of
from . import operators, programs, sdpa, tiles
from .by_segment import BySegment
from .kernel import MARGIN, Kernel, KernelCall, KernelFailure, Result, by_token

try:
    import triton

    from . import triton_kernels as kernels
except ImportError:  # it comes with torch's CUDA builds only
    triton = None

LARGEST_HEAD = 512


def why_not_triton(query: Tensor | Operand) -> str | None:
    """The reason why these kernels cannot compute a call exactly, or None."""
    if (reason := programs.why_not_triton(query)) is not None:
        return reason
    if query.shape[-1] > LARGEST_HEAD:
        return f"the Triton kernels hold head_dim up to {LARGEST_HEAD}, got {query.shape[-1]}"
    return None


def run(call: KernelCall) -> Result:
    """Any call; see `why_not_triton`."""
    query, spec, rows = call.query, call.spec, call.rows
    gain, bias = spec.gain, spec.bias
    smooth = rows.key_ids is None and rows.allowed is None
    if gain is not None and bias is not None and smooth and gain.shape[-1] >= call.kv_len + MARGIN:
        fits = _fits if torch.compiler.is_compiling() else _cached_fits
        spec = dataclasses.replace(spec, polynomials=fits(gain, bias, query.dtype != torch.float32))
    seed = torch.randint(1 << 62, (), device=query.device) if call.dropout else None
    rows = AttentionLayout(rows.index, rows.allowed, rows.query_ids, rows.key_ids)
    return _run(call._replace(rows=rows, spec=spec, seed=seed))


# Tables as polynomials -----------------------------------------------------------------------------------------------

#: Polynomials are fitted at every _STEP-th distance, for all within ± _REACH: a tile's of 128 rows and 128 columns.
_STEP, _REACH = 16, 128 + 8
assert MARGIN >= 2 * _REACH - _STEP  # for the last fits
#: By how much a polynomial may miss gain and bias. In float32 below the rounding of a logit; in half precision, where
#: probabilities are rounded to 4e-3 and scores to 1e-2, 1e-3 of a logit.
_MISSES = {False: (2e-6, 2e-6), True: (1e-4, 1e-3)}
#: The degrees that get a loop in the kernels, as bits.
DEGREES = 1 << 1 | 1 << 3


def _fit(degree: int) -> tuple[list[int], list[list[float]]]:
    """Chebyshev points about a centre, and the matrix from a table's values there to the coefficients of a polynomial."""
    nodes = [round(_REACH * math.cos(math.pi * (n + 0.5) / (degree + 1))) for n in range(degree + 1)]
    powers = torch.tensor(nodes, dtype=torch.float64, device="cpu")[:, None] ** torch.arange(degree + 1, device="cpu")
    return [_REACH + n for n in nodes], torch.linalg.inv(powers).T.tolist()


_FITS = {degree: _fit(degree) for degree in (1, 2, 3)}


def _fits(gain: Tensor, bias: Tensor, half: bool) -> Tensor:
    """Both tables as polynomials: float32 (heads or 1, centres + 1, 18), as `triton_kernels` reads it.

    A record holds gain's and bias's coefficients of degree 1, then of 2, then of 3. The first one holds from which centre on
    each degree serves. Nothing is read from the device, so that it can be traced.
    """
    heads = max(gain.shape[0], bias.shape[0])
    columns, starts = [], []
    for degree in (1, 2, 3):
        limits, (nodes, inverse) = [], _FITS[degree]
        wide = gain.new_empty(0, dtype=torch.float64)  # filled there: a copy of the host's would fail in a CUDA graph
        solve = torch.stack([wide.new_full((), x) for row in inverse for x in row]).view(degree + 1, -1)
        for table, miss in zip((gain, bias), _MISSES[half], strict=True):
            parts = (table,) if torch.compiler.is_compiling() else table.split(max(1, _TOGETHER // table.shape[-1]))
            coefficients, limit = zip(*(_fitted(part, nodes, solve, miss) for part in parts), strict=True)
            columns.append(torch.cat(coefficients).expand(heads, -1, -1))
            limits.append(torch.stack(limit).amax())
        starts.append(torch.maximum(*limits))
    records = torch.cat(columns, -1)
    header = torch.nn.functional.pad(torch.stack(starts).float(), (0, records.shape[-1] - 3))
    centres = torch.nn.functional.pad(records.float(), (0, 0, _before, 0))
    return torch.cat([header.expand(heads, 1, -1), centres], 1).contiguous()


_before = -(-_REACH // _STEP)  # the first centre whose distances are all in the table


#: Entries of tables that are fitted at a time: 136 bytes for each, as 2 * _REACH / _STEP float64.
_TOGETHER = 3 << 19


def _fitted(table: Tensor, nodes: list[int], solve: Tensor, miss: float) -> tuple[Tensor, Tensor]:
    """Coefficients by row and centre, from `_before` on, and the centre from which on they miss no row by more than that."""
    windows = table.double()[:, _before * _STEP - _REACH :].unfold(1, 2 * _REACH + 1, _STEP)
    rounding = 4 * torch.finfo(table.dtype).eps * torch.maximum(windows.amax(2), -windows.amin(2))  # the table's own
    coefficients = torch.stack([windows[..., n] for n in nodes], -1) @ solve
    x = torch.arange(-_REACH, _REACH + 1, device=table.device, dtype=torch.float64)
    fit = coefficients[..., -1:] * x + coefficients[..., -2, None]
    for power in reversed(range(len(nodes) - 2)):
        fit = fit.mul_(x).add_(coefficients[..., power, None])
    bad = (fit.sub_(windows).abs_().amax(2) > miss + rounding).any(0)
    number = torch.arange(_before, _before + len(bad), device=table.device)
    return coefficients, torch.where(bad, number + 1, _before).amax()


def _cached_fits(gain: Tensor, bias: Tensor, half: bool) -> Tensor:
    def build() -> Tensor:
        with torch.inference_mode(False), torch.no_grad():  # it must serve training too
            return _fits(gain, bias, half)

    return made_of(gain, ("polynomials", half), build)


# Which tiles ---------------------------------------------------------------------------------------------------------


class TileSizes(NamedTuple):
    """Sizes of one kernel's tiles, at least 16, at most 128, and how it is launched."""

    rows: int
    columns: int
    warps: int = 4
    stages: int = 2

    def least(self, kernel: str, width: int, size: int) -> int:
        """Bytes of shared memory that its vectors take at least."""
        tall, wide = (self.columns, self.rows) if kernel == "key" else (self.rows, self.columns)
        return width * size * (tall * (1 if kernel in ("forward", "entropy") else 2) + 2 * wide * self.stages)


#: Tiles by kernel, half precision or not, and the largest padded head_dim; the fastest first, each kind ends in one that fits
#: 101,376 bytes of shared memory (an RTX 4090's; an A100 has 166,912, an H100 232,448). Tried on an H100 at 16,384 tokens.
CANDIDATES: dict[tuple[str, bool, int], tuple[TileSizes, ...]] = {
    ("forward", True, 64): (TileSizes(64, 64, 4, 3), TileSizes(64, 64, 4, 2)),
    ("forward", True, 128): (
        TileSizes(128, 128, 8, 2),
        TileSizes(64, 64, 4, 3),
        TileSizes(64, 64, 4, 2),
        TileSizes(64, 32, 4, 2),
    ),
    ("forward", True, 256): (
        TileSizes(128, 64, 8, 2),
        TileSizes(128, 32, 8, 2),
        TileSizes(64, 32, 4, 1),
        TileSizes(32, 32, 4, 1),
    ),
    ("forward", True, 512): (TileSizes(64, 32, 8, 2), TileSizes(64, 16, 8, 1), TileSizes(32, 16, 4, 1)),
    ("forward", False, 64): (TileSizes(64, 32, 4, 2), TileSizes(32, 32, 4, 1)),
    ("forward", False, 128): (TileSizes(64, 32, 4, 2), TileSizes(32, 32, 4, 1)),
    ("forward", False, 256): (TileSizes(32, 32, 4, 1), TileSizes(32, 16, 4, 1)),
    ("forward", False, 512): (TileSizes(16, 16, 4, 1),),
    ("entropy", True, 64): (TileSizes(64, 64, 4, 3),),
    ("entropy", True, 128): (TileSizes(64, 64, 4, 3), TileSizes(64, 64, 4, 2)),
    ("query", True, 64): (TileSizes(128, 64, 8, 3), TileSizes(128, 64, 8, 2), TileSizes(64, 64, 4, 2)),
    ("query", True, 128): (TileSizes(128, 64, 8, 2), TileSizes(64, 64, 4, 2), TileSizes(64, 32, 4, 1)),
    ("query", True, 256): (TileSizes(64, 64, 8, 2), TileSizes(64, 32, 8, 1), TileSizes(32, 32, 4, 1)),
    ("query", True, 512): (TileSizes(32, 32, 8, 1), TileSizes(16, 16, 4, 1)),
    ("query", False, 64): (TileSizes(32, 32, 4, 1),),
    ("query", False, 128): (TileSizes(32, 32, 4, 1), TileSizes(16, 16, 4, 1)),
    ("query", False, 256): (TileSizes(16, 16, 4, 1),),
    ("query", False, 512): (TileSizes(16, 16, 4, 1),),
    ("key", True, 64): (TileSizes(32, 128, 8, 3), TileSizes(64, 64, 4, 2)),
    ("key", True, 128): (TileSizes(32, 128, 8, 3), TileSizes(32, 128, 8, 2), TileSizes(32, 64, 4, 2), TileSizes(32, 64, 4, 1)),
    ("key", True, 256): (TileSizes(64, 64, 8, 2), TileSizes(32, 64, 8, 1), TileSizes(32, 32, 4, 1)),
    ("key", True, 512): (TileSizes(32, 32, 8, 1), TileSizes(16, 16, 4, 1)),
    ("key", False, 64): (TileSizes(32, 32, 4, 1),),
    ("key", False, 128): (TileSizes(32, 32, 4, 1), TileSizes(16, 16, 4, 1)),
    ("key", False, 256): (TileSizes(16, 16, 4, 1),),
    ("key", False, 512): (TileSizes(16, 16, 4, 1),),
}


def _candidates(kernel: str, query: Tensor, value: Tensor | None) -> tuple[TileSizes, ...]:
    width = max(query.shape[-1], 0 if value is None else value.shape[-1])
    padded, half = next((w for w in (64, 128, 256) if width <= w), LARGEST_HEAD), query.dtype != torch.float32
    if kernel == "forward" and value is None and ("entropy", half, padded) in CANDIDATES:
        kernel = "entropy"
    found = CANDIDATES[kernel, half, padded]
    if not _has_warp_groups(query.device):
        found = *IN_REGISTERS.get((kernel, half, padded), ()), *small_first(kernel, found)
    return found


def small_first(kernel: str, candidates: Iterable[TileSizes]) -> tuple[TileSizes, ...]:
    """For a GPU that holds products in registers."""
    small = SMALL // 2 if kernel == "key" else SMALL
    return tuple(sorted(candidates, key=lambda tile: tile.rows * tile.columns > small))


@functools.cache
def _has_warp_groups(device: torch.device) -> bool:
    """Tell whether large products stay out of registers, as on an H100 and a B200; elsewhere large tiles spill."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (9, 10)  # AMD's MI300 says 9, too


#: Elements of a tile that any GPU holds in registers.
SMALL = 64 * 64
#: What such a GPU takes first: under a map 200 bytes a thread spill (ptxas for sm_89), of 64 x 64 with 4 warps 1,300.
IN_REGISTERS = {(kernel, True, 128): (TileSizes(128, 32, 8, 2),) for kernel in ("forward", "entropy", "query")}


def _shared_memory(device: torch.device) -> int:
    """Bytes that one program may have."""
    if device.type != "cuda":
        return 1 << 30
    known: Any = torch.cuda.get_device_properties(device)
    most = getattr(known, "shared_memory_per_block_optin", None)  # not of AMD's GPUs
    return int(known.shared_memory_per_block if most is None else most)


# Launching -----------------------------------------------------------------------------------------------------------


#: Launches that failed in this process: what never worked once is not tried again.
_FAILED: dict[Any, str] = {}


def _launch(
    name: str, call: KernelCall, constants: dict[str, Any], launch: Callable[[TileSizes, dict[str, Any]], None]
) -> None:
    """Launch the first of a kernel's candidates that works."""
    query, value = call.query, call.value
    width, limit, why = max(constants["DP"], constants["EP"]), _shared_memory(query.device), "no tiles fit"
    for tile in _candidates(name, query, value):
        sizes = {"ROWS": tile.rows, "COLUMNS": tile.columns, "STAGES": tile.stages}
        own = constants | sizes | {"num_warps": tile.warps, "num_stages": tile.stages}
        key = name, query.device, query.dtype, tile, frozenset(own.items())
        if tile.least(name, width, query.element_size()) > limit:
            continue
        if key in _FAILED:
            why = _FAILED[key]
            continue
        try:
            with torch.cuda.device_of(query):
                return launch(tile, own)
        except Exception as error:
            if programs.INTERPRETED or not programs.before_launch(error):
                raise
            why = _FAILED[key] = f"{type(error).__name__}: {error}"
    raise KernelFailure(f"the {name} kernel for head_dim {query.shape[-1]} in {query.dtype}: {why}")


@functools.cache
def _warn(why: str) -> None:
    warnings.warn(f"Triton cannot compile {why[:500]}; plain PyTorch computes such calls, slowly", stacklevel=2)


def _constants(call: KernelCall, entropy: bool) -> dict[str, Any]:
    query, key, value, rows, spec = call.query, call.key, call.value, call.rows, call.spec
    head_dim, value_dim = query.shape[-1], 16 if value is None else value.shape[-1]
    mapped, checked = spec.gain is not None, rows.allowed is not None
    linear = not (mapped or spec.softcap or spec.row_scale is not None) and spec.scaling > 0
    return {
        "HEADS": query.shape[1],
        "GROUP": query.shape[1] // key.shape[1],
        "MAP": mapped,
        "SOFTCAP": bool(spec.softcap),
        "HAS_X": spec.row_scale is not None,
        "HAS_Y": mapped and spec.bias_scale is not None,
        "IDS": mapped and rows.key_ids is not None,
        "LINEAR": linear,
        "ALLOWED": checked,
        "DROPOUT": call.dropout > 0,
        "VALUE": value is not None,
        "ENTROPY": entropy,
        "DEGREES": 0 if checked or (mapped and spec.polynomials is None) else DEGREES if mapped else 1,
        "D": head_dim,
        "DP": max(16, triton.next_power_of_2(head_dim)),
        "E": value_dim,
        "EP": max(16, triton.next_power_of_2(value_dim)),
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
    }


def _inputs(call: KernelCall, unused: Tensor) -> tuple[list[Any], list[Any]]:
    """The tensors that every kernel reads beside vectors, `unused` for none, and all strides, by batch, head and row."""
    query, key, value, rows, spec = call.query, call.key, call.value, call.rows, call.spec
    ids = (rows.query_ids, rows.key_ids) if spec.gain is not None else (None, None)
    scales = (None if x is None else x.expand(query.shape[:3]).float().contiguous() for x in (spec.row_scale, spec.bias_scale))
    tables = [None if x is None else x.float().contiguous() for x in (spec.gain, spec.bias, spec.polynomials)]
    places = [None if x is None else x.contiguous() for x in ids]
    tensors = [rows.index, *tables, *scales, rows.allowed, *places, call.seed]
    strides = [s for x in (query, key, value) for s in ((0, 0, 0) if x is None else x.stride()[:3])]
    strides += [_strides(x)[0] for x in (rows.index, *tables)] + _strides(rows.allowed) + [_strides(x)[0] for x in places]
    return [unused if x is None else x for x in tensors], strides


def _strides(x: Tensor | None) -> list[int]:
    """0 where it broadcasts."""
    return [0] * 4 if x is None else [s if n > 1 else 0 for s, n in zip(x.stride(), x.shape, strict=True)]


def _factors(call: KernelCall) -> tuple[float, float, float]:
    """Factors from products to logits in units of ln 2, and back for gradients; see `triton_kernels._logits`."""
    scaling, cap = call.spec.scaling, call.spec.softcap
    factor = (math.copysign(cap, scaling) if cap else scaling) * math.log2(math.e)
    bend = 2 * abs(scaling) / cap * math.log2(math.e) if cap else 0.0
    back = scaling if call.spec.gain is None else scaling / factor if cap else math.log(2)
    return factor, bend, back


def _contiguous(call: KernelCall) -> KernelCall:
    """Make the call's vectors, and its index, lie in one piece."""
    vectors = {n: x if x is None or x.stride(-1) == 1 else x.contiguous() for n, x in call._asdict().items() if n in _VECTORS}
    index = call.rows.index
    if index.stride()[1:] != (index.shape[-1], 1):
        vectors["rows"] = dataclasses.replace(call.rows, index=index.contiguous())
    if call.seed is not None:
        vectors["seed"] = call.seed.to(call.query.device)
    return call._replace(**vectors)


_VECTORS = ("query", "key", "value")


def _share(dropout: float) -> float:
    """The factor on pairs that dropout keeps; at 1 all are dropped."""
    return 1 / (1 - dropout) if dropout < 1 else 0.0


def _forward(call: KernelCall) -> tuple[Tensor, Tensor, Tensor]:
    call = _contiguous(call)
    query, key, value = call.query, call.key, call.value
    batch, heads, q_len, _ = query.shape
    out = query.new_empty(0) if value is None else by_token(query, value.shape[-1])
    lse = query.new_empty((batch, heads, q_len), dtype=torch.float32)
    entropy = query.new_empty((batch, heads, q_len) if call.with_entropy else (0,), dtype=torch.float32)
    (tensors, strides), numbers = _inputs(call, lse), _factors(call)

    def launch(tile: TileSizes, constants: dict[str, Any]) -> None:
        kernels.forward_kernel[(triton.cdiv(q_len, tile.rows) * batch * heads,)](
            query, key, key if value is None else value, out, lse, entropy, *tensors, *strides, q_len, key.shape[2],
            *numbers[:2], call.dropout, _share(call.dropout), call.spec.sinks, **constants,
        )  # fmt: skip

    try:
        _launch("forward", call, _constants(call, call.with_entropy), launch)
    except KernelFailure as failed:
        _warn(str(failed))
        return tiles.TiledCall(call._replace(with_lse=True)).attend()
    return out, lse, entropy


def gradients(
    call: KernelCall, d_out: Tensor, d_lse: Tensor | None, d_entropy: Tensor | None, out: Tensor, lse: Tensor, entropy: Tensor
) -> tuple[Tensor, ...]:
    call = _contiguous(call)
    query, key, value, spec = call.query, call.key, call.value, call.spec
    batch, heads, q_len, _ = query.shape
    kv_heads, kv_len = key.shape[1:3]
    d_query, d_key, d_value = (key.new_empty(0) if x is None else by_token(x) for x in (query, key, value))
    d_row_scale, d_bias_scale = (lse.new_empty(0 if x is None else lse.shape) for x in (spec.row_scale, spec.bias_scale))
    if spec.gain is None:
        d_bias_scale.zero_()
    delta = torch.empty_like(lse)
    do = query if value is None else d_out.to(query.dtype)
    do = do if do.stride(-1) == 1 else do.contiguous()
    read = out if value is None else out.transpose(1, 2).contiguous()
    by_row = [lse if x is None else x.float().contiguous() for x in (d_lse, d_entropy)]
    (tensors, strides), numbers = _inputs(call, lse), _factors(call)
    vectors = (query, key, key if value is None else value, do)
    scalars = (*numbers, call.dropout, _share(call.dropout), spec.sinks)
    constants = _constants(call, d_entropy is not None)

    def by_rows(tile: TileSizes, constants: dict[str, Any]) -> None:
        kernels.query_kernel[(triton.cdiv(q_len, tile.rows) * batch * heads,)](
            *vectors, read, d_query, d_row_scale, d_bias_scale, lse, by_row[0], delta, entropy, by_row[1],
            *tensors, *strides, *do.stride()[:3], q_len, kv_len, *scalars, HAS_DLSE=d_lse is not None, **constants,
        )  # fmt: skip

    def by_columns(tile: TileSizes, constants: dict[str, Any]) -> None:
        index, count = tensors[0], triton.cdiv(kv_len, tile.columns)
        ranges = torch.empty((index.shape[0], count, 4), dtype=torch.int32, device=query.device)
        stride, mapped = _strides(index)[0], spec.gain is not None
        kernels.ranges_kernel[(count * len(ranges),)](
            index, ranges, stride, q_len, kv_len, spec.sinks, MAP=mapped, ROWS=tile.rows, COLUMNS=tile.columns, CHUNK=1024
        )
        kernels.key_kernel[(count * batch * kv_heads,)](
            *vectors, d_key, d_value, ranges, lse, delta, entropy, by_row[1], *tensors, *strides, *do.stride()[:3],
            _strides(ranges)[0], q_len, kv_len, *scalars, **constants,
        )  # fmt: skip

    try:
        _launch("query", call, constants, by_rows)
        _launch("key", call, constants, by_columns)
    except KernelFailure as failed:
        if call.dropout:  # it drops other pairs
            raise RuntimeError(f"Triton cannot compile {failed}, and plain PyTorch cannot repeat its dropout") from failed
        _warn(str(failed))
        return tiles.TiledCall(call).gradients(d_out, d_lse, d_entropy, out, lse, entropy, joint=True)
    return d_query, d_key, d_value, d_row_scale, d_bias_scale


_run = operators.attention("triton", _forward, gradients)

KERNEL = Kernel(
    lambda plan: BySegment(plan, lambda call: run(call), product=sdpa.run),
    lacks=frozenset({"tables"}),
    why_not=lambda plan: why_not_triton(plan.query),
    preferred=lambda plan: plan.query.device.type == "cuda",
)
