"""The tiled kernel's attention in Triton: forward, backward, entropy, and few queries against many keys.

The plan is FlashAttention-2's: one program for a block of query rows, keys in tiles, an online softmax; the backward pass
recomputes tiles from the logsumexp, once by rows (d_query) and once by columns (d_key, d_value), so that nothing is added
atomically and results repeat exactly. What is ours is the map L = gain_t S + y bias_t. Near the diagonal its tables are
looked up pair by pair. Farther off they are smooth: a cubic through four of their values serves a whole tile, which costs
four scalar loads and a few multiply-adds; where that becomes exact enough is measured on the tables themselves.

For CUDA, where it has not run yet; tested on the CPU under Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..geometry import Rows
from ..tracing import readable
from . import operators
from .kernel import FEW_QUERIES, MARGIN, Kernel, KernelCall, Result

if TYPE_CHECKING:
    from ..call import Call

try:
    import triton

    from . import triton_kernels as kernels
except ImportError:  # it comes with torch's CUDA builds only
    triton = None

#: By how much a cubic may miss a table's value: below the rounding of float32 logits.
CUBIC_ERROR = 2e-6
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def why_not_triton(query: Tensor, rows: Rows | None, softcap: float | None = None, dropout: float = 0.0) -> str | None:
    """The reason why these kernels cannot compute a call exactly, or None; rows: None for intervals of cache indices."""
    if triton is None:
        return "triton is not installed"
    if query.device.type != "cuda" and not INTERPRETED:
        return f"Triton needs CUDA, the tensors are on {query.device.type}"
    if query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the Triton kernels compute float32, float16 and bfloat16, got {query.dtype}"
    if INTERPRETED and query.dtype == torch.bfloat16:
        return "Triton's interpreter cannot multiply bfloat16"
    if query.shape[-1] > 256:
        return f"the Triton kernels hold head_dim up to 256, got {query.shape[-1]}"
    if dropout:
        return "the Triton kernels have no dropout"
    if softcap:
        return "the Triton kernels have no softcap"
    if rows is not None and rows.allowed is not None:
        return "the mask is more than one interval of keys per row"
    if rows is not None and rows.key_ids is not None:
        return "positions do not count as cache indices do, and the Triton kernels know only these"
    return None


class Blocks(NamedTuple):
    """Sizes of one kernel's tiles, 32 at least (Triton multiplies 16 and more, halves are in use), and how it is launched."""

    rows: int
    columns: int
    warps: int = 4
    stages: int = 2


def _forward_blocks(head_dim: int, dtype: torch.dtype) -> Blocks:
    return Blocks(64, 32, 4) if head_dim > 128 or dtype == torch.float32 else Blocks(128, 64, 8, 3)


def _backward_blocks(head_dim: int, dtype: torch.dtype) -> Blocks:
    if head_dim > 128 or dtype == torch.float32:
        return Blocks(32, 32, 4, 1)
    return Blocks(64, 64, 4, 2) if head_dim <= 64 else Blocks(64, 64, 8, 2)


def run(call: KernelCall) -> Result:
    """Without row scales and dropout (see `why_not_triton`)."""
    query, spec, pages = call.query, call.spec, call.pages
    gain, bias = spec.gain, spec.bias
    if gain is not None and bias is not None and gain.shape[-1] >= call.kv_len + query.shape[2] + MARGIN:
        far = _far_from(gain, bias) if torch.compiler.is_compiling() else _cached_far_from(gain, bias)
        spec = dataclasses.replace(spec, far=far)
    grad = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (query, call.key, call.value, spec.bias_scale)
    )
    if grad and any(x is not None for x in pages):
        raise ValueError("keys in pages have no gradients")
    own = call._replace(rows=Rows(call.rows.index.to(torch.int32)), spec=spec, with_lse=call.with_lse or grad)
    out, lse, entropy = _triton(*operators.flatten(own)) if grad or not readable(query) else _forward(own)
    return out, lse if call.with_lse else lse.new_empty(0), entropy


# Where a cubic is exact enough ---------------------------------------------------------------------------------------


def _nodes(span: int) -> tuple[int, int]:
    """Four Chebyshev points of a tile whose distances spread by `span` about its centre: ± each of these."""
    return max(round(span * math.cos(math.pi / 8)), 2), max(round(span * math.cos(3 * math.pi / 8)), 1)


_SPAN = 128  # distances in the largest tile (128 rows, 64 columns) lie within ± this of its centre
assert MARGIN >= 2 * _SPAN  # for the cubic's points and the last block's empty rows


def _far_from(gain: Tensor, bias: Tensor) -> Tensor:
    """The smallest distance from which on a cubic serves any tile within CUBIC_ERROR, on both tables: int64, no dimension.

    Nothing is read from the device, so that it can be traced.
    """
    return torch.maximum(_cubic_from(gain), _cubic_from(bias)).clamp(min=_SPAN)


_FAR_OF: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()  # a gain's, and so its bias's; gone with it


def _cached_far_from(gain: Tensor, bias: Tensor) -> Tensor:
    if gain not in _FAR_OF:
        with torch.inference_mode(False), torch.no_grad():  # it must serve training too
            _FAR_OF[gain] = _far_from(gain, bias)
    return _FAR_OF[gain]


def _cubic_from(table: Tensor) -> Tensor:
    outer, inner = _nodes(_SPAN)
    x = torch.arange(-_SPAN, _SPAN + 1, device=table.device, dtype=torch.float64)
    starts = torch.arange(0, table.shape[-1] - 2 * _SPAN, _SPAN // 2, device=table.device)
    rounding = 4 * torch.finfo(table.dtype).eps * table.abs().amax()  # the tables' own
    last = []
    for row in table.double():
        f = row.unfold(0, 2 * _SPAN + 1, _SPAN // 2)
        e1, e2 = ((f[:, _SPAN + o] + f[:, _SPAN - o]) / 2 for o in (outer, inner))
        d1, d2 = ((f[:, _SPAN + o] - f[:, _SPAN - o]) / (2 * o) for o in (outer, inner))
        square, odd = ((a - b) / (outer**2 - inner**2) for a, b in ((e1, e2), (d1, d2)))
        c = [(e2 - square * inner**2), (d2 - odd * inner**2), square, odd]
        fit = c[0][:, None] + x * (c[1][:, None] + x * (c[2][:, None] + x * c[3][:, None]))
        bad = (fit - f).abs().amax(1) > CUBIC_ERROR + rounding
        last.append(torch.where(bad, starts + _SPAN, 0).amax())
    return torch.stack(last).amax()


# Which tiles a block visits ------------------------------------------------------------------------------------------


def _column_ranges(call: KernelCall, blocks: Blocks) -> Tensor:
    """For each block of rows: columns first, a, b, last; tiles in [a, b) are far and wholly visible.

    int32 (batch or 1, row blocks, 4), multiples of `blocks.columns`.
    """
    n, kv_len, sinks, columns = blocks.columns, call.kv_len, call.spec.sinks, call.rows.columns
    key_start, far = columns.key_start[:, :1], _tiles_from(call)
    position, _, start, low, high = (_blocked(column, blocks.rows) for column in columns)
    kept = low.amax(-1) if not sinks else torch.maximum(low.amax(-1), start.amax(-1) + sinks)
    first = (low.amin(-1) - key_start).clamp(min=0) // n
    last = ((high.amax(-1) - key_start + 1).clamp(0, kv_len) + n - 1) // n
    a = ((kept - key_start).clamp(min=0) + n - 1) // n
    b = (torch.minimum(high.amin(-1), position.amin(-1) - far) - key_start + 1).clamp(0, kv_len) // n
    return _ordered(first, a, b, last) * n


def _row_ranges(call: KernelCall, blocks: Blocks) -> Tensor:
    """The same with the sides exchanged: for each block of columns the rows that see it, and among them the far ones."""
    m, n, (q_len, kv_len), sinks = blocks.rows, blocks.columns, (call.query.shape[2], call.key.shape[2]), call.spec.sinks
    rows, far = call.rows.columns, _tiles_from(call)
    key_start = rows.key_start[:, :1]
    begin = key_start + torch.arange(0, kv_len, n, device=key_start.device, dtype=key_start.dtype)
    end = torch.minimum(begin + n - 1, key_start + kv_len - 1)
    high = rows.high.cummax(1).values.contiguous()  # of rows in order both grow; these bounds hold in any order
    low = rows.low.flip(1).cummin(1).values.flip(1).contiguous()
    first = torch.searchsorted(high, begin.contiguous(), out_int32=True) // m
    last = (torch.searchsorted(low, end.contiguous(), right=True, out_int32=True) + m - 1) // m
    sure = rows.low if not sinks else torch.maximum(rows.low, rows.start + sinks)
    sure_low = sure.cummax(1).values.contiguous()
    sure_high = torch.minimum(rows.high, rows.query - far).flip(1).cummin(1).values.flip(1).contiguous()
    a = (torch.searchsorted(sure_high, end.contiguous(), out_int32=True) + m - 1) // m
    b = torch.searchsorted(sure_low, begin.contiguous(), right=True, out_int32=True) // m
    return _ordered(first, a, torch.minimum(b, b.new_tensor(q_len // m)), last) * m


def _tiles_from(call: KernelCall) -> Tensor | int:
    """From which distance on tiles need no table lookups: all without a map, none where no cubic is known."""
    return call.spec.far if call.spec.far is not None else 0 if call.spec.gain is None else 1 << 30


def _ordered(first: Tensor, a: Tensor, b: Tensor, last: Tensor) -> Tensor:
    last = torch.maximum(last, first)
    a = torch.minimum(torch.maximum(a, first), last)
    return torch.stack([first, a, torch.minimum(torch.maximum(b, a), last), last], -1).to(torch.int32).contiguous()


def _blocked(column: Tensor, size: int) -> Tensor:
    """(batch, q_len) as (batch, blocks, size), the last row repeated."""
    short = -column.shape[1] % size
    return torch.cat([column, column[:, -1:].expand(-1, short)], 1).unflatten(1, (-1, size))


# Launching -----------------------------------------------------------------------------------------------------------


def _shared(call: KernelCall, ranges: Tensor, blocks: Blocks, unused: Tensor) -> tuple[list[Any], dict[str, Any]]:
    """What every kernel is given after its inputs and outputs, and its constants; `unused` is where it reads nothing."""
    query, key, value, index, spec = call.query, call.key, call.value, call.rows.index, call.spec
    tables = (spec.gain, spec.bias, None if spec.bias_scale is None else spec.bias_scale.float().contiguous())
    strides = [s for x in (query, key, value) for s in ((0, 0, 0) if x is None else x.stride()[:3])]
    strides += [x.stride(0) if x is not None and x.shape[0] > 1 else 0 for x in (index, ranges, spec.gain, spec.bias)]
    head_dim, value_dim = query.shape[-1], 16 if value is None else value.shape[-1]
    outer, inner = _nodes(_SPAN)
    constants = {
        "HEADS": query.shape[1],
        "GROUP": query.shape[1] // key.shape[1],
        "MAP": spec.gain is not None,
        "HAS_Y": spec.bias_scale is not None and spec.gain is not None,
        "VALUE": value is not None,
        "ROWS": blocks.rows,
        "COLUMNS": blocks.columns,
        "D": head_dim,
        "DP": max(16, triton.next_power_of_2(head_dim)),
        "E": value_dim,
        "EP": max(16, triton.next_power_of_2(value_dim)),
        "OUTER": outer,
        "INNER": inner,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "STAGES": blocks.stages,
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
    }
    pointers = [unused if x is None else x for x in tables]
    return [index, ranges, *pointers, *strides, query.shape[2], call.kv_len], constants


def _of_pages(call: KernelCall, unused: Tensor) -> tuple[list[Any], dict[str, Any]]:
    """What the forward kernel is given beside that, and its constants."""
    table, half, cos, sin = call.pages
    strides = [0 if table is None else table.stride(0)]
    strides += [0, 0, 0] if cos is None else [cos.stride(n) if cos.shape[n] > 1 else 0 for n in range(3)]
    pointers = [unused if x is None else x for x in (table, half, cos, sin)]
    return [*pointers, *strides], {"PAGE": 0 if table is None else call.key.shape[2], "TURN": cos is not None}


def _dense(call: KernelCall) -> KernelCall:
    """The same call with vectors that lie in one piece, and so the index."""
    query, key, value = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (call.query, call.key, call.value))
    assert query is not None
    assert key is not None
    pages = call.pages
    if pages.half is not None:  # it is read as the query is
        query, pages = query.contiguous(), pages._replace(half=pages.half.contiguous())
    return call._replace(query=query, key=key, value=value, rows=Rows(call.rows.index.contiguous()), pages=pages)


def _forward(call: KernelCall) -> tuple[Tensor, Tensor, Tensor]:
    call = _dense(call)
    query, key, value, spec, with_entropy = call.query, call.key, call.value, call.spec, call.with_entropy
    batch, heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1], call.kv_len
    group = heads // kv_heads
    packed = q_len <= FEW_QUERIES and q_len * group <= 128
    blocks = _forward_blocks(max(head_dim, 0 if value is None else value.shape[-1]), query.dtype)
    splits = 1
    if packed:
        blocks = blocks._replace(rows=max(16, triton.next_power_of_2(q_len * group)))
        splits = _splits(batch * kv_heads, kv_len, blocks.columns, query.device)
    ranges = _column_ranges(call, blocks._replace(rows=q_len) if packed else blocks)
    dtype = torch.float32 if splits > 1 else query.dtype
    out = query.new_empty((0,) if value is None else (batch, heads, q_len, splits, value.shape[-1]), dtype=dtype)
    lse = query.new_empty((batch, heads, q_len, splits), dtype=torch.float32)
    entropy = query.new_empty((batch, heads, q_len, splits) if with_entropy else (0,), dtype=torch.float32)
    chunk = triton.cdiv(triton.cdiv(kv_len, splits), blocks.columns) * blocks.columns
    programs = (1 if packed else triton.cdiv(q_len, blocks.rows)) * splits, batch * (kv_heads if packed else heads)
    (shared, constants), (paged, own) = _shared(call, ranges, blocks, unused=lse), _of_pages(call, unused=lse)
    with torch.cuda.device_of(query):
        kernels.forward_kernel[programs](
            query, key, key if value is None else value, out, lse, entropy, *shared, spec.scaling, spec.sinks, chunk, *paged,
            PACKED=packed, SPLITS=splits, ENTROPY=with_entropy, SPAN=q_len if packed else blocks.rows, **constants, **own,
        )  # fmt: skip
    if splits == 1:
        return (out if value is None else out[..., 0, :]), lse[..., 0], entropy[..., 0] if with_entropy else entropy
    whole = torch.logsumexp(lse, -1)
    share = torch.where(lse.isneginf(), 0.0, (lse - whole[..., None]).exp())
    if with_entropy:
        entropy = (share * (entropy + torch.where(share > 0, whole[..., None] - lse, 0.0))).sum(-1)
    return (out if value is None else (share[..., None] * out).sum(-2).to(query.dtype)), whole, entropy


def _splits(programs: int, kv_len: int, columns: int, device: torch.device) -> int:
    """Into how many ranges the keys of a decoding call are split, so that every multiprocessor has work."""
    target = 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return max(1, min(triton.cdiv(target, programs), triton.cdiv(kv_len, 4 * columns), 128))


def _gradients(
    call: KernelCall, d_out: Tensor, d_lse: Tensor | None, d_entropy: Tensor | None, out: Tensor, lse: Tensor, entropy: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = _dense(call)
    query, key, value, spec = call.query, call.key, call.value, call.spec
    batch, heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    blocks = _backward_blocks(max(head_dim, 0 if value is None else value.shape[-1]), query.dtype)
    # sum_j P dP, less what the logsumexp passes on
    delta = torch.zeros_like(lse)
    if value is not None:
        d_out = d_out.to(query.dtype).contiguous()
        delta += (d_out.float() * out.float()).sum(-1)
    if d_lse is not None:
        delta -= d_lse
    lse = lse.masked_fill(lse.isneginf(), 0.0)  # fully masked rows must not give NaN on the way
    d_query, d_key = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key))
    d_value = key.new_empty(0) if value is None else torch.empty(value.shape, dtype=value.dtype, device=key.device)
    d_bias_scale = lse.new_empty(0 if spec.bias_scale is None else lse.shape)
    of_rows = (lse, delta, entropy, lse if d_entropy is None else d_entropy.float().contiguous())
    inputs = (query, key, key if value is None else value, query if value is None else d_out)
    for kernel, outputs, ranges_of, programs in (
        (kernels.query_kernel, (d_query, d_bias_scale), _column_ranges, (triton.cdiv(q_len, blocks.rows), batch * heads)),
        (kernels.key_kernel, (d_key, d_value), _row_ranges, (triton.cdiv(kv_len, blocks.columns), batch * kv_heads)),
    ):
        shared, constants = _shared(call, ranges_of(call, blocks), blocks, unused=lse)
        with torch.cuda.device_of(query):
            kernel[programs](
                *inputs, *outputs, *of_rows, *shared, spec.scaling, spec.sinks, ENTROPY=d_entropy is not None, **constants
            )
    return d_query, d_key, d_value, lse.new_empty(0), d_bias_scale


_triton = operators.attention_operator("triton", KernelCall, _forward, _gradients)


def _why_not(call: Call) -> str | None:
    return why_not_triton(call.query, call.rows, call.softcap, call.dropout)


KERNEL = Kernel("triton", _why_not, run, entropies=True)
