"""PyTorch's scaled dot product attention, and its fused operators with the logsumexp, and for gradients.

Two operators for each device and dtype. Given the output and the logsumexp over more keys than theirs, those for gradients
compute what their keys contribute, as in ring attention.

Those for CUDA have run on an H100; tests on a CPU call stand-ins for them.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ..plan import Operand
from .kernel import MASK_VALUE, KernelCall, Result
from .precision import halves_are_fast

HALF = (torch.float16, torch.bfloat16)
#: The memory-efficient kernel takes a bias whose rows begin at multiples of so many elements, and logsumexps of so many rows.
BIAS_COLUMNS, LSE_ROWS = 16, 32
#: The first GPUs whose compute capability FlashAttention runs on, and on which kernels take bfloat16.
AMPERE = (8, 0)
#: Where torch itself prefers cuDNN's kernel: GPUs, and the first version that is right at lengths that 128 does not divide.
CUDNN_GPUS, CUDNN_VERSION = ((9, 0), (10, 0), (10, 3)), 91501
#: Features that cuDNN's kernel takes at most.
CUDNN_WIDTH = 128
#: Bytes of keys from which on it pays to cut them for several threads, and how many keys a piece has at least.
CUT_FROM, PIECE = 2 << 20, 512


def run(call: KernelCall) -> Result:
    """softmax(scaling q . k) over the visible keys, without a mask where the rows are a causal triangle, else with one."""
    query, key, value, rows = call.query, call.key, call.value, call.rows
    assert value is not None
    mask, causal, columns = None, False, rows.causal_columns
    if columns is not None:
        key, value = visible(key, columns), visible(value, columns)
        causal = query.shape[2] > 1
    else:
        mask = rows.visible(key.shape[2])
    shared = query.shape[1] != key.shape[1]
    if shared and query.is_cuda and not _has_flash(query):  # there none of the fused kernels shares key heads
        key, value, shared = by_head(key, query), by_head(value, query), False
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, call.dropout, causal, scale=call.spec.scaling, enable_gqa=shared
    )
    return out, out.new_empty(0), out.new_empty(0)


def few_queries(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scaling: float | None = None) -> Tensor:
    """sdpa of few queries: heads that share a key head are so many queries of it, so that a CPU reads a key once for all.

    Args:
        query: (batch, heads, q_len, head_dim).
        key, value: (batch, kv_heads, kv_len, ...).
        mask: as sdpa takes it, (batch or 1, kv_heads or 1, rows or 1, kv_len), the rows those queries of each head in turn
            that share a key head. None: each query sees each key.

    Returns:
        (batch, q_len, heads, value_dim).
    """
    batch, heads, q_len, width = query.shape
    together = query.reshape(batch, key.shape[1], -1, width)
    if mask is None and not torch.is_grad_enabled() and width == value.shape[3] and pieces(key) > 1:
        out, _ = few_queries_with_lse(together, key, value, None, width**-0.5 if scaling is None else scaling)
    else:
        out = torch.nn.functional.scaled_dot_product_attention(together, key, value, mask, scale=scaling)
    if q_len == 1:  # in one step, of which a decoded token takes one in each layer
        return out.reshape(batch, 1, heads, -1)
    return out.reshape(batch, heads, q_len, -1).transpose(1, 2).contiguous()


def visible(x: Tensor, columns: slice) -> Tensor:
    """The keys (or values) in these columns; the tensor itself where they are all."""
    return x if columns == slice(0, x.shape[2]) else x[:, :, columns]


def why_not(query: Tensor | Operand, value: Tensor | Operand) -> str | None:
    """The reason why a device has no fused kernel for such tensors, or None."""
    kind, width = device(query), query.shape[-1]
    if width != value.shape[-1]:
        return f"the fused kernels need values of as many features as keys have: {value.shape[-1]} are not {width}"
    if kind not in ("cpu", "cuda"):
        return f"PyTorch has no fused kernel that gives the logsumexp on {kind!r}"
    if kind == "cuda" and query.dtype == torch.float64:
        return "PyTorch has no fused kernel for float64 on CUDA"
    if kind == "cuda" and query.dtype == torch.bfloat16 and _capability(query.device) < AMPERE:
        return "PyTorch has no fused kernel for bfloat16 on a GPU of compute capability below 8.0; float16 has one"
    if kind == "cuda" and (width % 8 or width > 256):
        return f"the fused kernels on CUDA need a head_dim of at most 256 that 8 divides, got {width}"
    return None


def computed_in(query: Tensor, value: Tensor | None) -> torch.dtype:
    """The dtype that the kernels take: the values' own where halves are fast, else float32 at least."""
    if value is not None and (device(query) == "cuda" or halves_are_fast(value)):
        return value.dtype
    return torch.promote_types(query.dtype, torch.float32)


def forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, hidden: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """softmax(scaling q . k) v, and the logsumexp, (batch, heads, q_len), in float32 at least.

    Args:
        query: (batch, heads, q_len, head_dim).
        key, value: (batch, kv_heads, kv_len, head_dim), kv_heads dividing heads; all of one dtype.
        causal: the first row sees the first key alone, each row one more; there are as many keys as rows.
        hidden: bool (q_len, kv_len), hidden pairs, of `hidden_logit`; not with causal.
    """
    aten, bias = torch.ops.aten, _bias(hidden, query)
    if device(query) == "cpu":
        options = {"attn_mask": bias, "scale": scaling}
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, **options)
    if bias is None and _takes_cudnn(query, key):
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, causal, scale=scaling)
        return out, lse.view(query.shape[:3])
    if bias is None and _takes_flash(query):
        out, lse, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scaling)
        return out, lse
    key, value = (by_head(x, query) for x in (key, value))
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, 0.0, causal, scale=scaling)
    return out, lse[..., : query.shape[2]]


def few_queries_with_lse(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """`forward` of few queries on a CPU, without gradients: keys in as many pieces as its threads can share evenly.

    The kernel gives whole heads to a thread, so that with one key head all other threads would wait.

    Args:
        bias: what is added to logits, broadcast over them, or None.
    """
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    count = 1 if bias is not None else pieces(key)
    if count == 1:
        return operator(query, key, value, attn_mask=bias, scale=scaling)  # type: ignore[no-any-return]
    step = key.shape[2] // count
    rest = key.shape[2] - step * count
    if rest:  # pieces are equally long: each holds so many keys of the next, which alone counts them
        bias = query.new_zeros(count, 1, 1, step + rest)
        bias[:-1, ..., step:] = hidden_logit(query.dtype)
    each = (_cut(x, count, step, step + rest) for x in (key, value))
    outs, lses = operator(query.expand(count, -1, -1, -1), *each, attn_mask=bias, scale=scaling)
    shares = torch.softmax(lses, 0)[..., None]
    return (shares * outs).sum(0, keepdim=True).to(query.dtype), lses.logsumexp(0, keepdim=True)


def pieces(key: Tensor) -> int:
    """The number of pieces of a text's keys that the CPU's threads share evenly; 1: cutting them gains nothing."""
    batch, heads, length, _ = key.shape
    if batch > 1 or key.numel() * key.itemsize < CUT_FROM:
        return 1
    threads = torch.get_num_threads()
    return max(min(threads // math.gcd(heads, threads), length // PIECE), 1)


def _cut(x: Tensor, count: int, step: int, size: int) -> Tensor:
    """Cut (1, heads, length, width) into pieces that may overlap, (count, heads, size, width), without a copy."""
    _, by_head, by_key, by_feature = x.stride()
    shape, strides = (count, x.shape[1], size, x.shape[3]), (step * by_key, by_head, by_key, by_feature)
    return x.as_strided(shape, strides, x.storage_offset())


def backward(
    d_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    hidden: Tensor | None,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value through probabilities P = exp(logit - lse) over these keys.

    Any operator computes them, whichever computed out and lse, which are joint and in nats: a user may switch one off between.

    Args:
        d_out, out: like query; the gradient of a logit is P (d_out . v - d_out . out).
        lse: (batch, heads, q_len), finite.
    """
    aten, bias, sides = torch.ops.aten, _bias(hidden, query), (query, key, value)
    if device(query) == "cpu":
        options = {"attn_mask": bias, "scale": scaling}
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(d_out, *sides, out, lse, 0.0, causal, **options)
    if bias is None and _takes_cudnn(query, key):
        # d_out as it comes, as in torch's own calls: releases of torch find cuDNN's graph, which is made for the strides of
        # all that it is given, by those of query, key and value alone
        seed = query.new_empty((), dtype=torch.int64)  # dropout's, which is not read
        given = d_out, *sides, out, lse[..., None].contiguous(), seed, seed, None, None, None
        ends = query.shape[2], key.shape[2], 0.0, causal
        return aten._scaled_dot_product_cudnn_attention_backward(*given, *ends, scale=scaling)
    state = query.new_empty(2, dtype=torch.uint64), query.new_empty((), dtype=torch.uint64)  # dropout's, which is not read
    if bias is None and _takes_flash(query):
        lengths = None, None, query.shape[2], key.shape[2]
        of_rows = out, lse.contiguous(), *lengths, 0.0, causal, *state
        return aten._scaled_dot_product_flash_attention_backward(d_out, *sides, *of_rows, scale=scaling)
    whole = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % LSE_ROWS), value=float("inf"))
    sides = query, by_head(key, query), by_head(value, query)
    d_query, d_key, d_value, _ = aten._scaled_dot_product_efficient_attention_backward(
        d_out, *sides, bias, out, whole, *state, 0.0, [True, True, True, False], causal, scale=scaling
    )
    return d_query, *(x.unflatten(1, (key.shape[1], -1)).sum(2) for x in (d_key, d_value))


def _takes_cudnn(query: Tensor, key: Tensor) -> bool:
    """Tell whether torch itself would call cuDNN's kernel; what a user may switch at any time is asked each time."""
    takes = query.dtype in HALF and query.shape[-1] <= CUDNN_WIDTH and min(query.shape[2], key.shape[2]) > 1
    allowed = torch.backends.cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()
    return takes and allowed and _prefers_cudnn(query.device)


def _takes_flash(query: Tensor) -> bool:
    """The memory-efficient kernel takes what it does not."""
    return _has_flash(query) and torch.backends.cuda.flash_sdp_enabled()


def _has_flash(query: Tensor) -> bool:
    return query.dtype in HALF and _capability(query.device) >= AMPERE


@functools.cache
def _prefers_cudnn(device: torch.device) -> bool:
    if torch.version.hip is not None or _capability(device) not in CUDNN_GPUS:
        return False
    try:
        return (torch.backends.cudnn.version() or 0) >= CUDNN_VERSION
    except RuntimeError:  # one is loaded that torch was not built with
        return False


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # a graph is made on its GPU
def _capability(device: torch.device) -> tuple[int, int]:
    return _known_capability(device)


@functools.cache
def _known_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def device(x: Tensor | Operand) -> str:
    return x.device.type


def hidden_logit(dtype: torch.dtype) -> float:
    """The logit of a pair that a mask hides."""
    return max(MASK_VALUE, torch.finfo(dtype).min)


def _bias(hidden: Tensor | None, query: Tensor) -> Tensor | None:
    """Make the bias that is added to logits, in the query's dtype."""
    if hidden is None:
        return None
    rows, columns = hidden.shape
    pad = 0 if device(query) == "cpu" else -columns % BIAS_COLUMNS
    bias = query.new_zeros(rows, columns + pad)[:, :columns]
    bias.masked_fill_(hidden, hidden_logit(query.dtype))
    return bias if device(query) == "cpu" else bias.expand(*query.shape[:2], -1, -1)


def by_head(x: Tensor, query: Tensor) -> Tensor:
    """A key head's features once for each query head that shares it: a copy where several are shared."""
    return x[:, :, None].expand(-1, -1, query.shape[1] // x.shape[1], -1, -1).reshape(*query.shape[:2], *x.shape[2:])
