"""Long sequences over several processes: each holds all tokens of some heads while it computes attention (Ulysses).

Outside attention every process holds its part of the tokens. The exchange is DeepSpeed's, or, experimental and for users of
FSDP2 without DeepSpeed, `split_sequence`. Either way no mask survives, and geometry comes from position_ids of the whole
sequence: a document starts where they do not grow. Padding must be on the right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_to_all_single  # the one with a gradient

from ...core.geometry import AttentionLayout, RowBounds
from ..forward_context import LayerCall
from ..internals import deepspeed_group
from ..state import method_of, state_of

_JUMP = (
    "position_ids jump forward within a sequence that is split over processes: they say where documents start, by counting "
    "from 0 again, and grow by 1 in between"
)
_LOCAL = (
    "position_ids of every process count from 0: with a sequence split over processes they must be those of the whole "
    "sequence, so pass each process its part of them"
)


def split_sequence(model: nn.Module, group: Any) -> None:
    """Let each process of a group hold its part of every sequence, in order and of equal size. Experimental.

    Every call then takes the process's own part of input_ids and of the whole sequence's position_ids, with use_cache=False;
    the loss over all tokens is the sum (or mean) over processes, and so are gradients. The number of processes divides the
    number of query heads, and that of key heads or the other way round. `group=None` ends it.

    Raises:
        ValueError: no layer of the model runs a method.
    """
    if (state := state_of(model)) is None:
        raise ValueError("no layer of this model runs an hf_longattn method: apply one first")
    state.group = group


def check_heads(heads: int, kv_heads: int, world: int) -> None:
    """Raise ValueError unless so many processes can share so many heads."""
    if heads % world or (kv_heads % world and world % kv_heads):
        raise ValueError(f"{heads} query and {kv_heads} key heads cannot be shared evenly by {world} processes")


@contextmanager
def unsplit(model: nn.Module) -> Iterator[None]:
    """While open, every process calls the model on whole sequences of its own."""
    if (state := state_of(model)) is None:
        yield
        return
    group, state.group = state.group, None
    try:
        yield
    finally:
        state.group = group


def group_of(module: nn.Module) -> Any:
    """The group that `split_sequence` gave to an attention module, or None."""
    return None if (method := method_of(module)) is None else method.state.group


def rank_and_world(module: nn.Module) -> tuple[int, int] | None:
    """This process's rank among those that share a sequence, and their number; None where none is split."""
    group = group_of(module)
    group = deepspeed_group() if group is None else group
    return None if group is None else (torch.distributed.get_rank(group), torch.distributed.get_world_size(group))


def is_exchanged(layer_call: LayerCall, query: Tensor, key: Tensor) -> bool:
    """Tell whether DeepSpeed's exchange has happened: this process has few heads of all tokens."""
    here, position_ids = rank_and_world(layer_call.module), layer_call.positions
    heads = getattr(layer_call.module.config, "num_attention_heads", None)
    if here is None or here[1] == 1 or position_ids is None:
        return False
    return here[1] * query.shape[1] == heads and query.shape[2] == key.shape[2] == position_ids.shape[-1]


def whole_sequence(layer_call: LayerCall, query: Tensor, key: Tensor, value: Tensor, compute: Callable[..., Tensor]) -> Tensor:
    """A layer of a sequence that is split over processes: no mask arrives, for layers that are left alone either.

    Args:
        query: (batch, heads, tokens, head_dim), of this process's tokens, or, once exchanged, of all; key and value likewise.
        compute: `layer_call`, then query, key, value of some heads and all tokens, and rows to (batch, length, heads, width).

    Returns:
        (batch, tokens, heads, head_dim).
    """
    group, position_ids, window = layer_call.method.state.group, layer_call.positions, layer_call.sliding_window
    if layer_call.weights or (layer_call.method.windowed and window is None):
        raise NotImplementedError("no attention weights, and no windows of unknown size, of a sequence split over processes")
    here = rank_and_world(layer_call.module)
    assert here is not None
    _, world = here
    if group is None:
        assert position_ids is not None
        return compute(layer_call, query, key, value, rows_of(position_ids, window, world, layer_call.kept))
    if position_ids is None or query.shape[2] != key.shape[2]:
        raise ValueError("a sequence split over processes needs position_ids in every call, and use_cache=False")
    check_heads(query.shape[1], key.shape[1], world)
    if (times := world // key.shape[1]) > 1:
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    parts = [torch.empty_like(position_ids) for _ in range(world)]
    torch.distributed.all_gather(parts, position_ids.contiguous(), group=group)
    query, key, value = (_exchanged(x, group) for x in (query, key, value))
    out = compute(layer_call, query, key, value, rows_of(torch.cat(parts, -1), window, world, layer_call.kept))
    return _exchanged(out, group)


def _exchanged(x: Tensor, group: Any) -> Tensor:
    """x with dimension 1 divided among the processes, and their parts joined along dimension 2."""
    parts = torch.stack(x.chunk(torch.distributed.get_world_size(group), 1))
    return torch.cat(all_to_all_single(torch.empty_like(parts), parts, group=group).unbind(), 2)  # type: ignore[call-arg]


def rows_of(position_ids: Tensor, window: int | None, world: int, kept: dict[Any, Any]) -> AttentionLayout:
    """The rows of whole sequences, one document after the other.

    Args:
        kept: with the forward pass; layers that ask for the same share their rows.

    Raises:
        ValueError: positions jump forward, or are those of parts that know nothing of each other.
    """
    known: tuple[Tensor, AttentionLayout] | None = kept.get(("whole", window))
    if known is not None and torch.equal(known[0], position_ids):  # DeepSpeed gathers position_ids anew in every layer
        return known[1]
    step = position_ids.diff()
    if bool((step > 1).any()):
        raise ValueError(_JUMP)
    part = torch.arange(position_ids.shape[-1] // world, device=position_ids.device)
    if world > 1 and torch.equal(position_ids, part.repeat(world).expand_as(position_ids)):
        raise ValueError(_LOCAL)
    index = torch.arange(position_ids.shape[-1], device=position_ids.device).expand_as(position_ids)
    start = torch.zeros_like(index)
    start[:, 1:] = torch.where(step <= 0, index[:, 1:], 0)
    start = start.cummax(-1).values
    low = start if window is None else torch.maximum(start, index - window + 1)
    rows = AttentionLayout(RowBounds(index, torch.zeros_like(index), start, low, index).stacked())
    kept["whole", window] = position_ids, rows
    return rows
