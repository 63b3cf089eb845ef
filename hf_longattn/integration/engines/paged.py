"""Continuous batching: tokens of many requests in one row, and a KV cache in pages.

No mask arrives, and keys and values come gathered out of the pages, those of one request after those of another.
`cu_seq_lens_q` and `cu_seq_lens_k` say which queries and keys belong to a request, position_ids how long it is: a request's
queries are its last tokens, and its keys those before them that the layer still needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from ...core.geometry import AttentionLayout, RowBounds
from ..caches import PAGES
from ..changes import note_batching
from ..forward_context import LayerCall
from ..internals import get_implementation
from ..model import running
from ..names import is_longattn_name
from ..patch import Patch

#: What arrives in place of a mask, and in no other call.
ARGUMENTS = frozenset({"read_index", "write_index", "block_table", "logits_indices", "logits_processor_args"})


@dataclass(frozen=True, eq=False)
class Batch:
    """Requests with equally many queries and about as many keys, computed as one batch.

    Args:
        queries: int64 (requests, q_len), the columns of the packed row that hold their queries.
        keys: int64 (requests, kv_len), those that hold their keys; beyond a request's own, any.
        rows: what each query sees of them.
        requests: their numbers.
    """

    queries: Tensor
    keys: Tensor
    rows: AttentionLayout
    requests: tuple[int, ...]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def paged_attention(
    layer_call: LayerCall, query: Tensor, key: Tensor, value: Tensor, compute: Callable[..., Tensor]
) -> Tensor:
    """Compute every request of a call over its own keys.

    Args:
        query: (1, heads, tokens, head_dim), of all requests one after the other; key and value likewise.
        compute: `layer_call`, then query, key, value (requests, heads, length, head_dim) and rows to (requests, q_len, heads,
            head_dim).

    Returns:
        (1, tokens, heads, head_dim); 0 for tokens of no request.
    """
    arguments, position_ids, kept = layer_call.more, layer_call.positions, layer_call.kept
    window = layer_call.module.config.sliding_window if layer_call.method.windowed else None
    if arguments.get("block_table") is not None:
        raise NotImplementedError("continuous batching hands a block table to FlashAttention only: max_blocks_per_request=0")
    cu_k = arguments["cu_seq_lens_k"]
    if isinstance(cu_k, dict):  # a layer that reads the keys of another one does not update the cache, which picks them
        cu_k = cu_k["full_attention" if window is None else "sliding_attention"]
    assert position_ids is not None
    position_ids = position_ids if position_ids.ndim == 2 else position_ids[0]
    out = None
    if (batches := kept.get(cu_k)) is None:
        batches = kept[cu_k] = _batches(arguments["cu_seq_lens_q"], cu_k, position_ids, window)
    for batch in batches:
        q, k, v = (_take(x, at) for x, at in ((query, batch.queries), (key, batch.keys), (value, batch.keys)))
        result = compute(layer_call, q, k, v, batch.rows)
        if out is None:
            out = result.new_zeros(1, query.shape[2], *result.shape[2:])
        out[0, batch.queries] = result
    assert out is not None
    return out


def _take(x: Tensor, columns: Tensor) -> Tensor:
    """Columns (requests, n) of x (1, heads, tokens, head_dim): (requests, heads, n, head_dim)."""
    return x[0][:, columns].transpose(0, 1)


def _batches(cu_q: Tensor, cu_k: Tensor, position_ids: Tensor, window: int | None) -> list[Batch]:
    starts = torch.stack([cu_q, cu_k], -1).long().cpu()
    total = position_ids[0].long().cpu()[(starts[1:, 0] - 1).clamp(min=0)] + 1
    return batches_of(starts, total, window, position_ids.device)


def batches_of(starts: Tensor, total: Tensor, window: int | None, device: torch.device) -> list[Batch]:
    """The requests of one call, those with equally many queries and about as many keys together.

    Args:
        starts: int64 (requests + 1, 2), on the CPU: where each request's queries and keys begin, last where all end.
        total: int64 (requests,), on the CPU: how long each request's text is; its queries and keys are the last of it.
        window: of a layer with sliding windows.
    """
    lengths = starts.diff(dim=0)
    alike: dict[tuple[int, int], list[int]] = {}  # padding for at most as many keys again
    for request, (q_len, kv_len) in enumerate(lengths.tolist()):
        if q_len:
            alike.setdefault((q_len, kv_len.bit_length()), []).append(request)
    batches = []
    for (q_len, _), requests in alike.items():
        (first_q, first_k), kv_len = starts[requests].T[..., None], lengths[requests, 1:]
        # counted from each request's first key: all rows share key_start
        own = kv_len - q_len + torch.arange(q_len, device="cpu")
        zero = torch.zeros_like(own)
        low = zero if window is None else (own - window + 1).clamp(min=0)
        index = RowBounds(own, zero, zero + kv_len - total[requests, None], low, own).stacked()
        columns = torch.arange(int(kv_len.max()), device="cpu")
        keys = first_k + torch.minimum(columns, kv_len - 1)
        queries = first_q + torch.arange(q_len, device="cpu")
        batches.append(Batch(queries.to(device), keys.to(device), AttentionLayout(index), tuple(requests)))
    return batches


def _batching_manager(
    original: Callable[..., None],
    self: Any,
    model: Any,
    generation_config: Any,
    continuous_batching_config: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    if is_longattn_name(get_implementation(model.config)):
        if not PAGES:
            raise NotImplementedError(
                f"continuous batching of transformers {transformers.__version__} would replace the method by flash attention: "
                "update transformers to 5.24 or newer, or use generate()"
            )
        graphs = continuous_batching_config.use_cuda_graph
        if graphs is not None and any((graphs,) if isinstance(graphs, bool) else graphs):
            raise NotImplementedError(
                "hf_longattn reads the lengths of requests, which CUDA graphs forbid: use_cuda_graph=False"
            )
        continuous_batching_config = dataclasses.replace(continuous_batching_config, use_cuda_graph=False)
    note_batching(model, self)
    original(self, model, generation_config, continuous_batching_config, *args, **kwargs)


def _switch_to_cb_friendly_attn(original: Callable[..., None], self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Called as a manager is made, and as one that was kept is used again."""
    runs = running(model)
    if vars(self).setdefault("longattn", runs) != runs:  # its pages and its masks are those of another attention
        self.batch_processor, self.warmed_up, self.longattn = None, False, runs
    if not is_longattn_name(get_implementation(model.config)):
        original(self, model, *args, **kwargs)


PATCHES = (
    Patch(
        ContinuousBatchingManager,
        "__init__",
        _batching_manager,
        "older releases would replace the method by flash attention with a log line; CUDA graphs would be captured; a change "
        "while it runs would go unnoticed",
    ),
    Patch(
        ContinuousBatchingManager,
        "switch_to_cb_friendly_attn",
        _switch_to_cb_friendly_attn,
        "it would replace the method by flash attention with a log line; a kept manager would go on with the pages and masks "
        "of another method",
    ),
)
