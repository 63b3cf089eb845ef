"""An attention backend of vLLM that runs every method: keys and values by page, requests of a step in batches.

vLLM asks for a builder, which turns block table and lengths into batches once a step and cache group, and for an
implementation, one for each layer, which writes new keys and values to their slots and gathers each request's for `attend`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from ....config import NO_METHOD
from ....core.attend import attend
from ....core.call import Call
from ..paged import Batch, batches_of
from .served import ServedLayer

#: vLLM looks a layer's backend up by name, and has this one for others' backends.
BACKEND = "CUSTOM"


class Metadata:
    """One step of one KV cache group: its requests in batches, each with the slots of its keys, int64 (requests, kv_len)."""

    def __init__(self, step: CommonAttentionMetadata, block_size: int) -> None:
        if step.causal is not True:
            raise NotImplementedError("hf_longattn serves causal attention alone; some of these requests are not causal")
        self.block_size, self.table = block_size, step.block_table_tensor
        self.queries = step.query_start_loc_cpu[: step.num_reqs + 1].long()
        self.total = step.seq_lens[: step.num_reqs].long().cpu()  # on a GPU this waits for it
        self.lengths: list[int] = self.total.tolist()
        self.made: dict[tuple[int | None, bool], list[tuple[Batch, Tensor]]] = {}

    def batches(self, window: int | None, paged: bool) -> list[tuple[Batch, Tensor]]:
        """The batches for layers with this sliding window, made once a step.

        Args:
            paged: with the pages of a request's whole text, int32 (requests, n), in place of the slots of what it sees.
        """
        if (window, paged) not in self.made:
            self.made[window, paged] = list(self._make(window, paged))
        return self.made[window, paged]

    def longest(self, batch: Batch) -> int:
        """The length of a batch's longest text."""
        return max(self.lengths[request] for request in batch.requests)

    def _make(self, window: int | None, paged: bool) -> Iterator[tuple[Batch, Tensor]]:
        device, size = self.table.device, self.block_size
        seen = self.total if window is None or paged else torch.minimum(self.total, self.queries.diff() + window - 1)
        keys = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), seen.cumsum(0)])
        for batch in batches_of(torch.stack([self.queries, keys], -1), self.total, window, device):
            requests = torch.tensor(batch.requests, device="cpu")
            if paged:
                yield batch, self.table[requests.to(device), : -(-batch.keys.shape[1] // size)]
                continue
            first = (self.total - seen - keys[:-1])[requests, None].to(device)  # of a request's text, before its first key
            position = batch.keys + first
            table = self.table[requests.to(device)].long()
            yield batch, table.gather(1, position // size) * size + position % size


class Builder(AttentionMetadataBuilder[Metadata]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Metadata:
        return Metadata(common_attn_metadata, self.kv_cache_spec.block_size)


class Implementation(AttentionImpl[Metadata]):
    """vLLM makes one for each layer; `part` is what the model's class puts in afterwards."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        unknown = {
            "ALiBi slopes of the model's own": alibi_slopes,
            f"{attn_type} attention": attn_type != "decoder",
            f"a KV cache in {kv_cache_dtype}": kv_cache_dtype not in ("auto", "float16", "bfloat16", "float32"),
            "layers that share keys and values": kv_sharing_target_layer_name,
        }
        if named := [name for name, value in unknown.items() if value]:
            raise NotImplementedError(f"hf_longattn cannot serve this model in vLLM: it has {', '.join(named)}")
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads or num_heads
        self.kv_cache_dtype, self.softcap, self.sinks = kv_cache_dtype, logits_soft_cap, sinks
        self.window = sliding_window
        self.part: ServedLayer | None = None

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """key, value: (tokens, kv_heads, head_size); kv_cache: (blocks, kv_heads, block_size, 2 head_size)."""
        n, size = min(len(slot_mapping), len(key)), kv_cache.shape[2]
        slots, real = slot_mapping[:n].long(), slot_mapping[:n] >= 0
        new = torch.cat([key[:n], value[:n]], -1).to(kv_cache.dtype)
        kv_cache[slots[real] // size, :, slots[real] % size] = new[real]

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query: (tokens, heads, head_size), of all requests one after the other; output likewise, written in place."""
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        part = self.part
        assert part is not None
        rotation = None if part.rotary is None else part.rotary.rotation(query)
        model: dict[str, Any] = {"scaling": self.scale, "softcap": self.softcap, "sink_logits": self.sinks}
        model |= {"learned": part.learned, "tables": part.tables}
        for batch, at in attn_metadata.batches(self.window, by_page := self.window is None):
            acts = attn_metadata.longest(batch) > part.config.identity_below
            config, turned = (part.config, rotation) if acts else (NO_METHOD, None)
            gathered = _gathered(kv_cache, at, batch.keys.shape[1], by_page).to(query.dtype)
            key, value = gathered.split(self.head_size, -1)
            own = query[batch.queries].transpose(1, 2)
            out = attend(Call(own, key, value, config, batch.rows, rotation=turned, **model))
            output[batch.queries] = out.transpose(1, 2).to(output.dtype)
        return output


def _gathered(kv_cache: Tensor, at: Tensor, length: int, by_page: bool) -> Tensor:
    """Keys and values of some requests, (requests, kv_heads, length, 2 head_size); at: their pages, or the slots of each."""
    size = kv_cache.shape[2]
    if by_page:
        heads = torch.arange(kv_cache.shape[1], device=kv_cache.device)[:, None]
        rows = at.long()[:, None] * len(heads) + heads  # of the view with one row for each page and head
        pages = kv_cache.flatten(0, 1).index_select(0, rows.flatten())
        return pages.unflatten(0, rows.shape).flatten(2, 3)[:, :, :length]
    return kv_cache[at // size, :, at % size].transpose(1, 2)


class Backend(AttentionBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return BACKEND

    @staticmethod
    def get_impl_cls() -> type[Implementation]:
        return Implementation

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True
