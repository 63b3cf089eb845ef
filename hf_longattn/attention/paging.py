"""Attention over a cache in pages, by a kernel that reads keys and values where they lie: nothing of the cache is copied."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from ..config import LongAttnConfig
from ..slots.base import EntropyTemperature
from .attend import merge_entropies, merge_outputs
from .call import Call
from .kernels.lowered import KVSegment, LoweredAttention
from .kernels.spec import Result
from .kernels.triton import Pages, triton_attention, why_not_triton
from .lowering import lower
from .stages import finish
from .tracing import readable


def why_not_pages(query: Tensor, key: Tensor, config: LongAttnConfig, softcap: float | None = None) -> str | None:
    """The reason why `attend_pages` cannot compute a call exactly, or None."""
    if config.score is not None:
        return f"{config.score.name} needs every key's norm, which the kernel does not take as it reads"
    if key.dtype != query.dtype:
        return f"the cache is in {key.dtype} and the queries are in {query.dtype}"
    return why_not_triton(query, None, softcap) if readable(query) else "the call is traced"


def attend_pages(call: Call, table: Tensor) -> Tensor:
    """`attend` where keys and values lie in pages; a remap turns keys as they are read.

    Args:
        call: its key and value are (pages, kv_heads, page, head_dim), the whole cache; its rows are intervals with key_start
            0, and keys beyond every row's are not read.
        table: int32 (batch, n), in which pages a request's keys lie: key j in page table[:, j // page].

    Raises:
        ValueError: see `why_not_pages`.
    """
    query, key = call.query, call.key
    if (reason := why_not_pages(query, key, call.config, call.softcap)) is not None:
        raise ValueError(f"attention over pages cannot compute this call: {reason}")
    shape = len(query), key.shape[1], table.shape[1] * key.shape[2], key.shape[3]
    shown = query.new_empty(1).expand(shape)  # for its shape alone
    lowered = lower(dataclasses.replace(call, key=shown), rotate_reading=True)
    if isinstance(call.config.temperature, EntropyTemperature):
        first = dataclasses.replace(lowered, of_entropy=True)
        entropies = merge_entropies([_run(first, segment, key, table) for segment in first.segments])
        lowered = lowered.scaled(call.config.temperature.factor(entropies))
    results = [_run(lowered, segment, key, table) for segment in lowered.segments]
    return finish(call.config, merge_outputs(results, lowered.sink_logits), call.learned).to(query.dtype)


def _run(lowered: LoweredAttention, segment: KVSegment, key: Tensor, table: Tensor) -> Result:
    pages = Pages(table)
    if segment.angles is not None and segment.rotation is not None:
        half = segment.rotation.rotate_half(segment.query).to(key.dtype)
        pages = Pages(table, half, *(x.float() for x in segment.angles))
    asked = {"with_lse": lowered.with_lse, "with_entropy": lowered.of_entropy}
    return triton_attention(segment.query.to(key.dtype), key, lowered.value, segment.rows, lowered.spec, **asked, pages=pages)
