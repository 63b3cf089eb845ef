"""The mask function that we register: it carries true positions from transformers to the attention call.

transformers builds a mask once per forward, where it knows cache offsets, padding and packing, and hands it to every
layer as an opaque tensor. Ours is int32 (bool and float masks are the user's own, and any other is refused):

    compact  (batch, 1, q_len, 6)            the columns of `AttentionLayout.index`; visibility is that interval; and the
                                             row's number, as models slice rows out (Gemma 4's layers with shared keys)
    padded   (batch, 1, q_len, 7)            without a cache, where row i and key i are one token: the same, then 0 if
                                             that token is hidden from all, else 1 + how many of its text lie before
    dense    (batch, 1, q_len, 6 + kv_len)   the six columns, then that number for each key that the row may see; 7 + kv_len
                                             where position_ids alone tell where texts start: a column without meaning first

The first two need O(q_len) memory and are chosen wherever the mask function is recognised as an interval; padded, where there
are holes in it, or nothing can be read because a graph is traced. Dense is always right. A plain tensor survives slicing,
`.contiguous()`, device moves and graph inputs, where attributes would not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.utils.import_utils import is_tracing

from ..config import LongAttnConfig
from ..core.geometry import FAR, AttentionLayout, RowBounds
from ..core.kernels.kernel import FEW_QUERIES
from ..core.tracing import readable, sent
from .base_attention import BaseAttention, base_implementation, is_masked_by_transformers, own_implementation
from .config_records import Before, ConfigRecord, record_in
from .forward_context import PASS, current_pass
from .internals import MaskInterval, documents_in, interval_of

#: Columns of a compact mask.
INDEX_WIDTH = 6

BOTH_WAYS = "the model reads in both directions ({}), and methods are defined for causal attention only"


def refuse_both_ways(config: Any, name: str = "") -> None:
    """Raise ValueError for a config that lets a model read in both directions."""
    if getattr(config, "is_causal", True) is False:
        raise ValueError(name + BOTH_WAYS.format("is_causal=False"))
    asked = getattr(config, "use_bidirectional_attention", None)
    if asked is True or asked == "all":
        raise ValueError(name + BOTH_WAYS.format(f"use_bidirectional_attention={asked!r}"))


class MaskContext:
    """The state that layers under one mask of a forward pass share, kept with the mask: the first of them reads the rows.

    Args:
        base: the attention that the model had before, with the arguments of the call that made this layout mask; None: the
            mask is the user's own.
        host: the layout mask as the host made it; None: it was made on a GPU.
        forward_pass: the pass in which its layers were called; a backward pass that computes them again finds it here.
    """

    def __init__(self, base: BaseAttention | None = None, forward_pass: Any = None, host: Tensor | None = None) -> None:
        self.base, self.forward_pass, self.host = base, forward_pass, host
        self.both_ways = False  # True: Transformers made the mask for reading in both directions
        self.parsed: ParsedMask | None = None
        self.q_len = self.kv_len = -1  # of the last layer that read it
        self.rows: AttentionLayout | None = None  # those of `parsed`, placed by `positions`
        self.positions: Tensor | None = None  # the position_ids
        self.alike: dict[Any, Any] = {}  # see `alike.note_alike`
        self._fits: dict[float, bool] = {}

    def keep(self, rows: AttentionLayout, positions: Tensor | None, kv_len: int) -> MaskContext:
        """Keep the rows that a layer read, the position_ids by which they are placed, and its number of keys."""
        if rows is not self.rows:
            self.rows, self.alike, self._fits = rows, {}, {}
        self.positions, self.kv_len = positions, kv_len
        return self

    def changes_nothing(self, limit: float) -> bool:
        """Tell whether the model's own attention computes a layer: all texts of the rows have at most `limit` tokens.

        False where that takes a read from a device, or where the model's own would hold all pairs of tokens.
        """
        if limit <= 0 or self.base is None or (self.base.implementation == "eager" and self.q_len > 1):
            return False
        if (fits := self._fits.get(limit)) is None:
            assert self.rows is not None
            offset, length = self.base.arguments["kv_offset"], self.base.arguments["kv_length"]
            short = self.rows.key_ids is None and isinstance(offset, int) and offset + length <= limit
            fits = short or (self.rows.index.device.type == "cpu" and self.rows.extent <= limit)
            self._fits[limit] = fits
        return fits


class MaskRequest(NamedTuple):
    """The arguments that Transformers gives to every mask function, by its names for them.

    Args:
        kv_length: how many keys the cache gives back.
        q_offset, kv_offset: the cache indices of the first query and the first key; of a static cache a tensor.
        mask_function: tells whether a pair is visible, of its batch entry, head, query and key.
        attention_mask: True where a token is no padding, (batch, tokens); None: there is no padding.
    """

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int | Tensor
    kv_offset: int | Tensor
    mask_function: Callable[..., Any]
    attention_mask: Tensor | None
    device: torch.device | str


def layout_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    config: Any = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """A mask in the form above; for layers that are left alone, the base implementation's own mask."""
    asked = MaskRequest(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, device)
    more = kwargs | {"config": config, "local_size": local_size}
    record = ConfigRecord() if config is None else record_in(config)
    section, known = record.section, record.before
    if section:
        refuse_both_ways(config)
    if "allow_is_bidirectional_skip" in kwargs:  # only the bidirectional masks are asked for with it
        mask = _base_mask(known, asked, more)
        if isinstance(mask, Tensor) and readable(mask):
            context_of(mask).both_ways = True
        return mask
    layers = section.layers if isinstance(section, LongAttnConfig) else (section or {}).get("layers")
    only_full = layers in (None, "full_attention")
    if local_size is not None and only_full and (known is None or known.windows):
        return _base_mask(known, asked, more | {"allow_is_causal_skip": False})
    # Never None for a causal layer: Gemma 4 slices queries under any name but "sdpa" and trusts the mask.
    windowed = local_size is not None and local_size == getattr(config, "sliding_window", None)
    on_host, interval = _on_host(asked), recognise(mask_function)
    if interval is not None and _hides_nothing(on_host or asked):  # another mask tells by its padding where texts begin
        asked = asked._replace(attention_mask=None)
        on_host = None if on_host is None else on_host._replace(attention_mask=None)
    layout: Tensor | None
    if (row := _only_row(on_host or asked, interval)) is not None:
        layout = torch.tensor([[[[*row, 0]]]] * batch_size, dtype=torch.int32, device="cpu")
    else:
        layout = _intervals(on_host or asked, interval, sliced=bool(getattr(config, "num_kv_shared_layers", 0)))
    if layout is None:
        if on_host is not None and (
            q_length > FEW_QUERIES or interval is None or interval.sequence_ids is not None
        ):  # a graph's lengths vary
            on_host = None
        given, of_pairs = on_host or asked, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
        visible = of_pairs(**given._asdict(), **kwargs | {"config": config, "allow_is_causal_skip": False})
        layout = _pairs(given, visible, chunked=local_size is not None and not windowed, windowed=windowed)
    made, layout = layout, sent(layout, torch.device(device))
    if readable(layout):
        implementation, arguments = own_implementation(known), asked._asdict() | more
        if not is_masked_by_transformers(implementation):
            arguments["attention_mask"] = attention_mask
        for name in ("q_offset", "kv_offset"):
            if isinstance(offset := arguments[name], Tensor):
                arguments[name] = offset.clone()  # a static cache counts on in its own
        host = made.detach() if made.device.type == "cpu" else None  # what keeps its own mask would outlive it
        context = MaskContext(BaseAttention(implementation, arguments), host=host)
        if row is not None:
            context.parsed = ParsedMask(AttentionLayout.of_row(row), None, torch.tensor([[row.query]], device="cpu"))
        layout = layout if host is None else _numbered(layout, context)
        layout.__dict__["_longattn"] = context
    return layout


def _base_mask(known: Before | None, asked: MaskRequest, more: dict[str, Any]) -> Any:
    """The mask of layers that a method leaves alone."""
    return ALL_MASK_ATTENTION_FUNCTIONS[base_implementation(known)](**asked._asdict(), **more)


def _numbered(mask: Tensor, context: MaskContext) -> Tensor:
    """Give a mask a number in its pass that its copies on other devices have too, and note its state there.

    The number is the stride of the dimension of length 1: PyTorch copies strides, and they decide nothing there.
    """
    forward_pass = PASS.get()
    if forward_pass is None or (number := 1 + len(forward_pass.layouts)) >= INDEX_WIDTH:  # other masks' strides begin there
        return mask
    forward_pass.layouts[mask.shape, number] = mask.device, context
    return mask.as_strided(mask.shape, (mask.stride(0), number, *mask.stride()[2:]))


def _on_host(asked: MaskRequest) -> MaskRequest | None:
    """Bring what is asked for to the host, with at most a read of each tensor; None: it is there, or cannot be read."""
    device, mask = torch.device(asked.device), asked.attention_mask
    if device.type in ("cpu", "meta") or not readable(torch.empty(0, device=device) if mask is None else mask):
        return None
    own = None if mask is None else mask.cpu()
    return asked._replace(q_offset=int(asked.q_offset), kv_offset=int(asked.kv_offset), device="cpu", attention_mask=own)


def _hides_nothing(asked: MaskRequest) -> bool:
    """Tell whether there is no padding where a mask of padding is given, and the call's tokens are the last keys."""
    padding, q_offset, kv_offset = asked.attention_mask, asked.q_offset, asked.kv_offset
    if padding is None or not (isinstance(q_offset, int) and isinstance(kv_offset, int) and readable(padding)):
        return False
    end = kv_offset + asked.kv_length
    return q_offset + asked.q_length == end <= padding.shape[-1] and bool(padding.all())


def _only_row(asked: MaskRequest, interval: MaskInterval | None) -> RowBounds | None:
    """The bounds of a call of one token without padding, which all texts share; None: another call, or a graph is traced."""
    q_offset, kv_offset = asked.q_offset, asked.kv_offset
    if asked.q_length != 1 or asked.attention_mask is not None or torch.compiler.is_compiling():
        return None
    if not (isinstance(q_offset, int) and isinstance(kv_offset, int) and torch.device(asked.device).type == "cpu"):
        return None
    if interval is None or interval.sequence_ids is not None:
        return None
    low = 0 if interval.window is None else max(0, q_offset - interval.window + 1)
    return RowBounds(q_offset, kv_offset, 0, low, q_offset)


def _intervals(asked: MaskRequest, interval: MaskInterval | None, sliced: bool) -> Tensor | None:
    """Make the compact or the padded form of a mask; None: neither can say it.

    Args:
        sliced: whether some layers get a part of the rows.
    """
    if interval is None:
        return None
    batch_size, q_length, _, q_offset, kv_offset, _, attention_mask, device = asked
    row = torch.arange(q_length, device=device)
    position = row + q_offset
    first = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
    high, whole = position.expand(batch_size, -1), True
    if attention_mask is not None:
        padding = attention_mask.to(device=device, dtype=torch.bool)
        some = padding.any(-1, keepdim=True)
        first = padding.int().argmax(-1, keepdim=True)
        last = padding.shape[-1] - 1 - padding.flip(-1).int().argmax(-1, keepdim=True)
        high = torch.where(some, torch.minimum(high, last), -1)
        counted = padding.cumsum(-1)
        whole = not is_tracing(padding) and readable(padding) and bool((counted[:, -1:] == (last - first + 1) * some).all())
        empty_cache = not (isinstance(q_offset, Tensor) or isinstance(kv_offset, Tensor)) and q_offset == kv_offset == 0
        if not whole and not (empty_cache and q_length == asked.kv_length == padding.shape[-1] and not sliced):
            return None
    start = first.expand(-1, q_length)
    if interval.sequence_ids is not None:
        start = _sequence_starts(interval.sequence_ids.to(device)).expand(batch_size, -1)
    key_start = torch.zeros_like(start) + kv_offset
    low = start if interval.window is None else torch.maximum(start, position - interval.window + 1)
    columns = [position.expand_as(start), key_start, start, low, high, row.expand_as(start)]
    return torch.stack(columns if whole else [*columns, padding * counted], dim=-1).int()[:, None]


def _pairs(asked: MaskRequest, visible: Tensor, chunked: bool, windowed: bool) -> Tensor:
    """Make the dense form of a mask.

    Args:
        visible: the pairs that it shows, bool (batch or 1, 1, q_len, kv_len).
        chunked, windowed: whether they are seen in a chunk, or through a sliding window.
    """
    batch_size, q_length, kv_length, q_offset, kv_offset, _, attention_mask, device = asked
    compiling = torch.compiler.is_compiling()  # Dynamo does not show closures
    untold = compiling and chunked and attention_mask is None
    row = torch.arange(q_length, device=device)
    position = row + q_offset
    visible = visible.expand(batch_size, -1, -1, -1)[:, 0]
    cache_index = torch.arange(kv_length, device=device) + kv_offset
    if attention_mask is None:
        key_start = torch.zeros(batch_size, q_length, dtype=torch.int64, device=device) + kv_offset
        ids, known = (None, False) if compiling else documents_in(asked.mask_function)
        if ids is not None:
            start = _sequence_starts(ids.to(device)).expand(batch_size, -1)
        elif known or untold:  # chunks and blocks of pictures are no texts of their own
            start = torch.zeros_like(key_start)
        else:
            start = visible.int().argmax(-1) + key_start
            if windowed or compiling:  # windows over pictures are not announced
                start = _before_windows(start, q_offset)
        counted = cache_index.expand(batch_size, -1)
    else:
        padding = attention_mask.to(device=device, dtype=torch.bool)
        start = padding.int().argmax(-1, keepdim=True).expand(-1, q_length)
        key_start = torch.zeros_like(start) + kv_offset
        counted = (padding.cumsum(-1) - 1)[:, cache_index.clamp(max=padding.shape[-1] - 1)]
    columns = [position.expand_as(start), key_start, start, key_start, key_start + kv_length - 1, row.expand_as(start)]
    index = torch.stack([*columns, start] if untold else columns, dim=-1)
    return torch.cat([index.int(), visible.int() * (1 + counted.int())[:, None]], dim=-1)[:, None]


def is_layout_mask(mask: Tensor) -> bool:
    """Tell whether a mask is a layout mask; bool and float masks are the user's own. TypeError: it is no tensor."""
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"the attention mask is a {type(mask).__name__}, which another attention reads: pass a 2-D mask of padding, or a "
            "4-D one, bool (True: visible) or float"
        )
    return mask.dtype == torch.int32


class ParsedMask(NamedTuple):
    """A mask, read.

    Args:
        rows: what each query sees.
        counted: int64 (batch, kv_len), the positions that keys have if they count visible tokens; None if that is as cache
            indices do.
        first: int64 (batch or 1, 1), the cache index of the call's first token, whose row the mask may have lost.
        untold: whether position_ids alone tell where texts start.
    """

    rows: AttentionLayout
    counted: Tensor | None
    first: Tensor
    untold: bool = False


def read_mask(mask: Tensor, kv_len: int) -> ParsedMask:
    """Read a mask that `layout_mask` made; every layer that gets the mask gets the same object."""
    width = mask.shape[-1]  # compared by ==: in a graph of any length Dynamo finds no number `in` others
    dense = width == INDEX_WIDTH + kv_len or width == INDEX_WIDTH + 1 + kv_len
    if not (width == INDEX_WIDTH or dense or _padded(mask, kv_len)):
        raise ValueError(f"an integer mask of width {width} does not fit {kv_len} keys")
    if torch.compiler.is_compiling():
        return _read(mask, kv_len)
    context = context_of(mask)
    if context.parsed is None:
        context.parsed = _read(mask if context.host is None else context.host, kv_len)
    return context.parsed


def context_of(mask: Tensor) -> MaskContext:
    """Return the state that is kept with a mask."""
    if (context := existing_context(mask)) is None:
        context = mask.__dict__["_longattn"] = MaskContext()
    return context


def existing_context(mask: Tensor) -> MaskContext | None:
    """Return the state that is kept with a mask; None: there is none yet."""
    context: MaskContext | None = mask.__dict__.get("_longattn")
    return _context_of_original(mask) if context is None else context


def _context_of_original(mask: Tensor) -> MaskContext | None:
    """Return the state of the mask of which this is a copy on another device, as accelerate makes one for each layer there."""
    if not is_layout_mask(mask) or mask.ndim != 4 or (forward_pass := current_pass()) is None:
        return None
    device, context = forward_pass.layouts.get((mask.shape, mask.stride(1)), (mask.device, None))
    if device == mask.device:
        return None
    mask.__dict__["_longattn"] = context
    return context


def _padded(mask: Tensor, kv_len: int) -> bool:
    return mask.shape[-1] == INDEX_WIDTH + 1 and mask.shape[-2] == kv_len


def _read(mask: Tensor, kv_len: int) -> ParsedMask:
    index, row = mask[:, 0, :, : INDEX_WIDTH - 1].long(), mask[:, 0, :, INDEX_WIDTH - 1]
    first = index[:, :1, 0] - row[:, :1]
    if mask.shape[-1] == INDEX_WIDTH:
        return ParsedMask(AttentionLayout(index), None, first)
    if _padded(mask, kv_len):
        counted, untold = mask[:, 0, :, INDEX_WIDTH:].transpose(1, 2), False
    else:
        untold = mask.shape[-1] == INDEX_WIDTH + 1 + kv_len
        counted = mask[:, 0, :, INDEX_WIDTH + untold :]
    return ParsedMask(AttentionLayout(index, counted[:, None] > 0), counted.amax(1).long() - 1, first, untold)


def read_own_mask(mask: Tensor, q_len: int, kv_len: int) -> ParsedMask:
    """Read a user's own 4-D mask of a call whose tokens are the last keys; `counted` is None if it is not known.

    Raises:
        ValueError: it is no mask of visible and hidden keys, or its tokens are not the last keys.
    """
    mask = _as_bool(mask)[..., :kv_len]
    visible = mask.any(1)
    # The user's own 4-D mask says nothing about cache indices: the call's tokens must be the last keys.
    sees_itself = visible.diagonal(kv_len - q_len, dim1=1, dim2=2)
    if kv_len > q_len and bool((visible.any(-1) & ~sees_itself).any()):
        raise ValueError(
            "under a 4-D attention mask the tokens of a call must be the last keys, each visible to itself, and they are not: "
            "with a static cache pass a 2-D mask, or use a dynamic cache"
        )
    bounds = AttentionLayout.causal(q_len, kv_len, None, 0, mask.device).bounds
    start = visible.int().argmax(-1)
    if kv_len == q_len:  # the first key that a row sees may see earlier ones: a window does not start a text
        start = torch.where(sees_itself, start, bounds.query)
        for _ in range(q_len.bit_length()):
            start = start.gather(1, start)
    # the mask alone decides how far a row sees: image blocks look ahead
    bounds = bounds._replace(start=start, high=torch.full_like(bounds.high, kv_len - 1))
    counted = _ranks(visible) if kv_len > q_len else None
    return ParsedMask(AttentionLayout(bounds.stacked(), mask), counted, bounds.query[:, :1])


def _as_bool(mask: Tensor) -> Tensor:
    """A user's own 4-D mask as bool, True = visible; ValueError unless it is one of visible and hidden keys."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.dtype.is_floating_point:
        raise ValueError(
            f"a 4-D attention mask must be bool (True: visible) or float (0: visible), got {mask.dtype}: pass mask.bool()"
        )
    visible, hidden = mask == 0, mask <= torch.finfo(mask.dtype).min / 2
    if not bool((visible | hidden).all()):
        raise ValueError("a 4-D float mask must hold 0 (visible) and the dtype's minimum or -inf; biases are not supported")
    return visible


def _ranks(visible: Tensor) -> Tensor:
    """Count the visible keys before each key; -FAR in a batch entry whose rows disagree.

    Args:
        visible: bool (batch, q_len, kv_len).

    Returns:
        int64 (batch, kv_len).
    """
    rank = visible.cumsum(-1, dtype=torch.int32) - 1
    most = rank.masked_fill(~visible, -1).amax(1)
    least = rank.masked_fill(~visible, torch.iinfo(torch.int32).max).amin(1)
    agree = ((most == least) | (most < 0)).all(-1, keepdim=True)
    return torch.where(agree, most.long(), -FAR)


def recognise(mask_function: Callable[..., Any]) -> MaskInterval | None:
    """Return the interval that a mask function shows; None: the function is not known, or a graph is traced through it."""
    if mask_function is not causal_mask_function and is_tracing():
        return None  # Dynamo does not show closures
    return interval_of(mask_function)


def _before_windows(seen: Tensor, q_offset: int | Tensor) -> Tensor:
    """Return the starts of texts by the first key that each row sees, (batch, q_len): a sliding window starts no text.

    What a row's first key sees is before it in the same text; a cached one's text starts with the cache.
    """
    row, cached = (seen - q_offset).clamp(min=0), seen < q_offset
    for _ in range(31 if torch.compiler.is_compiling() else seen.shape[1].bit_length()):  # a graph serves every length
        row, cached = row.gather(1, row), cached | cached.gather(1, row)
    return torch.where(cached, 0, row + q_offset)


def _sequence_starts(ids: Tensor) -> Tensor:
    """The cache index where the document of each token starts, (batch, length), of packed text."""
    cache_index = torch.arange(ids.shape[-1], device=ids.device).expand_as(ids)
    new = torch.ones_like(ids, dtype=torch.bool)
    new[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return torch.where(new, cache_index, 0).cummax(-1)[0]
