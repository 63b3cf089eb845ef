"""Attention over a cache in pages, by a kernel that reads keys and values where they lie: nothing of the cache is copied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..config import LongAttnConfig
from ..methods.base import EntropyTemperature
from .attend import Result, merge_entropies, merge_outputs
from .geometry import Rows
from .kernels.triton import Pages, triton_attention, why_not_triton
from .lowering import KVSegment, lower
from .rotary import Rotation
from .tables import TableCache
from .tracing import readable


def why_not_pages(query: Tensor, key: Tensor, config: LongAttnConfig, softcap: float | None = None) -> str | None:
    """The reason why `attend_pages` cannot compute a call exactly, or None."""
    if config.score is not None:
        return f"{config.score.name} needs every key's norm, which the kernel does not take as it reads"
    if key.dtype != query.dtype:
        return f"the cache is in {key.dtype} and the queries are in {query.dtype}"
    return why_not_triton(query, None, softcap) if readable(query) else "the call is traced"


def attend_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    config: LongAttnConfig,
    rows: Rows,
    *,
    scaling: float,
    learned: Mapping[str, nn.Module] | None = None,
    rotation: Rotation | None = None,
    sink_logits: Tensor | None = None,
    tables: TableCache | None = None,
) -> Tensor:
    """`attend` where keys and values lie in pages; a remap turns keys as they are read.

    Args:
        query: (batch, heads, q_len, head_dim).
        key, value: (pages, kv_heads, page, head_dim), the whole cache.
        table: int32 (batch, n), in which pages a request's keys lie: key j in page table[:, j // page].
        rows: intervals, key_start 0; keys beyond every row's are not read.

    Raises:
        ValueError: see `why_not_pages`.
    """
    if (reason := why_not_pages(query, key, config)) is not None:
        raise ValueError(f"attention over pages cannot compute this call: {reason}")
    kv_len = table.shape[1] * key.shape[2]
    shown = query.new_empty(1).expand(len(query), key.shape[1], kv_len, key.shape[3])  # for its shape alone
    model: dict[str, Any] = {"learned": learned, "rotation": rotation, "sink_logits": sink_logits, "tables": tables}
    call = lower(config, query, shown, rows, scaling=scaling, rotate_reading=True, **model)

    def run(segment: KVSegment, entropy: bool = False) -> Result:
        several = len(call.segments) > 1 or (call.sink_logits is not None and not entropy)
        q, pages = segment.query.to(key.dtype), _pages(table, segment, key)
        asked: dict[str, Any] = {"with_lse": several, "with_entropy": entropy, "pages": pages}
        return triton_attention(q, key, None if entropy else value, segment.rows, call.spec, **asked)

    if isinstance(config.temperature, EntropyTemperature):
        entropies = merge_entropies([run(segment, entropy=True) for segment in call.segments])
        call = call.scaled(config.temperature.factor(entropies))
    out = merge_outputs([run(segment) for segment in call.segments], call.sink_logits)
    return call.finish(out).to(query.dtype)


def _pages(table: Tensor, segment: KVSegment, key: Tensor) -> Pages:
    if segment.angles is None or segment.rotation is None:
        return Pages(table)
    return Pages(table, segment.rotation.rotate_half(segment.query).to(key.dtype), *(x.float() for x in segment.angles))
