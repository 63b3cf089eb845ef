"""Distances are differences of position_ids, as the rotary encoding sees them; this is where the two are brought together.

Position_ids of the tokens of a call are known, as the model was given them: not all models hand them on to their layers.
Those of earlier tokens, whose keys come out of the KV cache, are not: they count as cache indices do, from the first index or
from the start of the text, or as the 2-D mask does (generate's cumsum - 1, which skips padding inside a text). The call's own
first token tells which; one that fits none is refused, and so is one that fits otherwise than the calls before it did, of
which the cache keeps a note.

`rows_under` is asked by each layer. It reads the mask (`masks.read_mask`), and `_with_positions` gives its rows the positions:
`_decoding` for one token in few steps, `Numbered` beside cache indices for any call, `_traced` inside graphs,
`token_axes.by_axis` for pictures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ..config import LongAttnConfig
from ..core.geometry import FAR, AttentionLayout, RowBounds
from ..core.kernels.kernel import FEW_QUERIES
from ..core.tracing import assert_later, readable, sent
from .caches import CallNumbering, Numbering, known_of, record_of
from .forward_context import ForwardContext, LayerCall
from .masks import (
    BOTH_WAYS,
    MaskContext,
    ParsedMask,
    context_of,
    existing_context,
    is_layout_mask,
    read_mask,
    read_own_mask,
)
from .numbering import Numbered, own_positions
from .token_axes import UNSEEN, by_axis, one_axis

_NO_MASK = "no attention mask arrived, so what each token sees and where it stands is unknown. "
_PARALLEL = "Context parallelism takes the mask away and sets is_causal; it is not supported"
_ALONE = (
    "A layer that is called by itself needs the mask that transformers' create_causal_mask makes. Where a model was called, "
    "it reads in both directions (is_decoder=False), and every method is one of causal attention; or it runs no method, and "
    "its layers are also those of one that does: give it layers of its own (copy.deepcopy)"
)
_JUMP = (
    "position_ids jump forward, and without a 2-D attention mask or a cache transformers reads that as the start of a new "
    "document. For one document with skipped positions pass attention_mask=torch.ones_like(input_ids) and use_cache=False; "
    "packed documents each count from 0"
)
_RESET = (
    "position_ids go back within a sequence, so that a token sees earlier ones at positions not before its own. If these are "
    "packed documents, they see each other: transformers tells them apart only with use_cache=False and no 2-D attention mask"
    ", and never in models that make their masks without position_ids (gpt-oss): give each document a row of its own there"
)
_OWN_MASK = (
    "a 4-D mask over a KV cache does not show where a text starts, from which positions in and behind pictures are counted: "
    "pass a 2-D mask"
)
_UNKNOWN_START = (
    "{name} counts from the start of a text, and this 4-D mask over a KV cache does not show it: its first keys may be "
    "padding or lie before a window. Pass a 2-D mask, or position_ids that count visible tokens only"
)
_SHARD = (
    "position_ids start at {off} although nothing comes before, and several processes run: this looks like one process's part "
    "of a sequence that context or sequence parallelism has split, and each part would attend to itself alone. hf_longattn "
    "does not support that; if the text is whole, let its position_ids start at 0, which changes no distance"
)
_PACKED = (
    "cu_seq_lens or seq_idx tells packed documents apart, which flash attention reads, and the mask shows them as one text: "
    "each would see those before it. Pass position_ids that count from 0 in each document, as DataCollatorWithFlattening "
    "makes them, no attention mask, and use_cache=False"
)
_LATE = (
    "position_ids of an earlier call did not continue where its KV cache ended, and what was computed since is wrong: the "
    "positions of cached keys were unknown. On a GPU this is noticed a call later, since decoding does not wait for it"
)
_TRACED = (
    "position_ids jump, go back, or do not continue the KV cache, which a compiled call cannot follow: call without compile"
)


def rows_under(mask: Tensor | None, layer_call: LayerCall) -> MaskContext:
    """Return the rows that a layer sees, in the context that it shares with layers called alike.

    Raises:
        NotImplementedError: there is no mask.
        ValueError: the mask or the positions have no meaning, or those of cached keys are unknown.
    """
    positions, method, forward_pass = layer_call.positions, layer_call.method, layer_call.forward_pass
    kv_len = layer_call.kv_len
    if mask is None:
        raise NotImplementedError(_NO_MASK + (_PARALLEL if layer_call.more.get("is_causal") else _ALONE))
    if positions is None and forward_pass is None and method.state.passes and not layer_call.traced:
        raise ValueError(UNSEEN)
    context: MaskContext | None = None if layer_call.traced else existing_context(mask)
    if context is not None and context.rows is not None and context.kv_len == kv_len and context.positions is positions:
        return context
    if context is not None and context.both_ways:
        raise ValueError(BOTH_WAYS.format("is_decoder=False or a like flag: its mask shows later tokens"))
    if not is_layout_mask(mask):
        return MaskContext().keep(_under_own_mask(mask, layer_call), positions, kv_len)
    parsed = read_mask(mask, kv_len)
    if context is None:
        context = MaskContext() if layer_call.traced or not readable(mask) else context_of(mask)
    if forward_pass is not context.forward_pass:
        context.forward_pass, context.alike = forward_pass, {}
    context.q_len = layer_call.q_len
    if parsed.untold:
        parsed = _with_starts(parsed, positions, kv_len)
    known = context.rows if context.positions is positions else None
    rows = _with_positions(parsed, layer_call) if known is None else known
    _refuse_packed(rows, layer_call.more)
    return context.keep(rows, positions, kv_len)


def _with_starts(parsed: ParsedMask, position_ids: Tensor | None, kv_len: int) -> ParsedMask:
    """The rows with the starts of texts, which the mask of chunks in a compiled call does not tell.

    Without an attention mask or a cache, Transformers tells packed documents apart by position_ids, before chunks.
    """
    rows = parsed.rows
    query, key_start, _, low, high = rows.bounds
    if position_ids is not None and position_ids.ndim > 2:  # of four axes the first numbers the text
        position_ids = position_ids[0] if len(position_ids) > 3 else None
    if position_ids is None or rows.allowed is None or position_ids.shape[1] != kv_len:
        return parsed  # one text, from the start of the cache
    again = position_ids.to(query.device).diff(prepend=position_ids[:, :1].to(query.device) - 1) != 1
    number = again.cumsum(-1).expand(len(query), -1)
    own = number.gather(1, query - key_start)
    start = (number[:, None] == own[..., None]).int().argmax(-1) + key_start
    first = rows.allowed[:, 0].int().argmax(-1) + key_start
    assert_later(((first >= start) | ~rows.real_rows(kv_len)).all(), _TRACED)
    bounds = RowBounds(query, key_start, start, low, high)
    return parsed._replace(rows=AttentionLayout(bounds.stacked(), rows.allowed))


def _under_own_mask(mask: Tensor, layer_call: LayerCall) -> AttentionLayout:
    """The rows under a user's own 4-D mask, read in each layer: the user may write to it before the next call."""
    forward_pass, method, kv_len = layer_call.forward_pass, layer_call.method, layer_call.kv_len
    if not layer_call.traced:
        mask.__dict__["_longattn"] = MaskContext(forward_pass=forward_pass)
    parsed = read_own_mask(mask, layer_call.q_len, kv_len)
    if forward_pass is not None and forward_pass.axes is not None:
        if parsed.counted is not None:
            raise ValueError(_OWN_MASK)
        return by_axis(parsed, parsed.rows, forward_pass, kv_len)
    rows = _with_positions(parsed, layer_call, own_mask=True)
    if parsed.counted is not None and method.config is not None:
        refuse_unknown_start(method.config, rows, layer_call.positions, kv_len)
    return rows


def _refuse_packed(rows: AttentionLayout, more: Mapping[str, Any]) -> None:
    """Raise ValueError where the arguments of a call tell documents apart that its mask does not; graphs later."""
    ends, numbers = more.get("cu_seq_lens_q"), more.get("seq_idx")
    if numbers is not None:
        documents = _changes(numbers)
    elif ends is not None:
        documents = (ends.diff() > 0).sum()
    else:
        return
    fits = documents.to(rows.index.device) <= _changes(rows.bounds.start)
    if torch.compiler.is_compiling():
        assert_later(fits, _PACKED)
    elif not fits:
        raise ValueError(_PACKED)


def _changes(numbers: Tensor) -> Tensor:
    """Count the runs of equal numbers in all rows, ()."""
    return (numbers.diff() != 0).sum() + len(numbers)


def _with_positions(parsed: ParsedMask, layer_call: LayerCall, own_mask: bool = False) -> AttentionLayout:
    """The rows with the positions that position_ids say: the same rows where these count as cache indices do.

    The pass takes note of how its tokens are numbered.

    Args:
        own_mask: whether the mask is the user's. Where its tokens fit no numbering, as a drafted tree's, only the first one's
            is noted, since the cache will keep one branch.
    """
    position_ids, kv_len, forward_pass = layer_call.positions, layer_call.kv_len, layer_call.forward_pass
    several = None if forward_pass is None or forward_pass.axes is None else forward_pass
    if several is not None and not several.numbers_text:
        return by_axis(parsed, parsed.rows, several, kv_len)
    if position_ids is None:
        return parsed.rows
    if position_ids.device != parsed.rows.index.device and readable(position_ids):
        position_ids = _on_host(parsed, position_ids, kv_len, forward_pass)
    # a remap cannot count tokens where they are at several positions each, as those of pictures
    remapped = layer_call.method.state.remapped and (forward_pass is None or forward_pass.probed is None)
    position_ids = one_axis(parsed, position_ids, kv_len, remapped)
    if not readable(parsed.rows.index):
        return _traced(parsed, position_ids, kv_len, forward_pass, own_mask)
    rows, numbering = _resolve(parsed, position_ids, kv_len, forward_pass)
    if own_mask and not any(numbering.tokens):
        numbering = numbering._replace(tokens=numbering.first)
    if forward_pass is not None:
        forward_pass.note(numbering)
    return rows if several is None else by_axis(parsed, rows, several, kv_len)


def _on_host(parsed: ParsedMask, position_ids: Tensor, kv_len: int, forward_pass: ForwardContext | None) -> Tensor:
    """position_ids where the rows are: read, but for few tokens behind a cache, which are what continues it.

    That they are, the device confirms while the host goes on.
    """
    kept, rows = {} if forward_pass is None else forward_pass.kept, parsed.rows
    given, known = kept.get("position_ids", (None, None))
    expected = _continued(parsed, position_ids, kv_len, forward_pass)
    if given is position_ids and (expected is None or torch.equal(known, expected)):
        return known
    if expected is None:
        known = position_ids.to(rows.index.device)
    else:
        assert forward_pass is not None
        assert forward_pass.state is not None
        known, first = expected, int(expected[0, 0])
        shared = bool((expected == first).all())
        holds = (position_ids == (first if shared else sent(expected, position_ids.device))).all()
        forward_pass.state.claims.claim(holds, _LATE)
    kept["position_ids"] = position_ids, known
    return known


def _continued(parsed: ParsedMask, position_ids: Tensor, kv_len: int, forward_pass: ForwardContext | None) -> Tensor | None:
    """The position_ids of few tokens that continue a cache as it was numbered, (batch, q_len); None: they may be any."""
    if (
        forward_pass is None
        or forward_pass.state is None
        or forward_pass.cache is None
        or forward_pass.axes is not None
        or _several_processes()
    ):
        return None
    rows, counted = parsed.rows, parsed.counted
    numbering, q_len = record_of(forward_pass.cache).get("numbering"), rows.index.shape[1]
    if not numbering or not any(numbering) or q_len > FEW_QUERIES or position_ids.shape[1:] != (q_len,):
        return None
    if (row := rows.row) is not None:  # the same in numbers, since every token of a GPU comes here
        own = row.query, row.query - row.start, row.query - row.start
        places = {place for place, known in zip(own, numbering, strict=True) if known}
        begins = record_of(forward_pass.cache).get("ones") is not None or row.start >= int(parsed.first)
        if begins or len(places) > 1 or not row.low <= row.query <= row.high:
            return None
        return torch.tensor([list(places)], device="cpu")
    query, key_start, start, _, _ = rows.bounds
    begins = record_of(forward_pass.cache).get("ones") is not None or bool((start >= parsed.first).any())
    if begins or not bool(rows.real_rows(kv_len).all()):
        return None
    at = query - start if counted is None else counted.gather(1, (query - key_start).expand(len(counted), -1))
    ways = [place for place, known in zip((query, query - start, at), numbering, strict=True) if known]
    if bool((at < 0).any()) or any(bool((place != ways[0]).any()) for place in ways):
        return None  # padding, which may be anywhere, or the first token that tells the ways apart
    return ways[0]


def _from_zero(parsed: ParsedMask, position_ids: Tensor, forward_pass: ForwardContext | None) -> Tensor:
    """The position_ids, but those of texts that begin behind an empty prompt, which generate() counts from 1, less 1."""
    held, ones = _held_and_ones(parsed, forward_pass)
    if forward_pass is None or not held:
        return position_ids
    at = parsed.rows.bounds
    if ones is None:
        begins = (at.query == at.start) & (at.start >= held) & (at.low <= at.high) & (own_positions(parsed, position_ids) == 1)
        ones = int(at.start.where(begins, FAR).min())
        if ones == FAR:
            return position_ids
    forward_pass.ones = ones
    return position_ids - (at.start[:, -1:] >= ones).to(position_ids.device, position_ids.dtype)


def _held_and_ones(parsed: ParsedMask, forward_pass: ForwardContext | None) -> tuple[int, int | None]:
    """Return the number of tokens that a pass's cache held as it began, and from which on texts count from 1, if any do."""
    if forward_pass is None or forward_pass.cache is None:
        return 0, None
    # a static cache counts on the device
    held = forward_pass.held if isinstance(forward_pass.held, int) else int(parsed.first.max())
    return held, None if not held else record_of(forward_pass.cache).get("ones")


def _resolve(
    parsed: ParsedMask, position_ids: Tensor, kv_len: int, forward_pass: ForwardContext | None
) -> tuple[AttentionLayout, CallNumbering]:
    """The rows with the call's positions, and the numbering of its tokens.

    Raises:
        ValueError: the positions have no meaning, or those of cached keys are unknown.
    """
    rows = parsed.rows
    one = rows.index.shape[1] == 1 and rows.allowed is None and not _several_processes()
    if one and (numbering := _decoding(parsed, own_positions(parsed, position_ids), forward_pass)) is not None:
        return rows, numbering
    call = Numbered(parsed, _from_zero(parsed, position_ids, forward_pass), kv_len)
    new_document = call.jumps & (rows.allowed is None)
    unsplit = call.sees_cache | call.by_index | call.by_start | call.by_count | call.all_padding | (not _several_processes())
    usual = call.regular.all() & unsplit.all() & ~new_document.any()
    facts = torch.stack([usual, call.sees_cache.any(), *call.numbering_of_first, *call.numbering])
    usual, sees_cache, *found = facts.tolist()  # at once, since this may wait for a device
    if not usual:
        if bool(new_document.any()):
            raise ValueError(_JUMP)
        if not bool(unsplit.all()):
            raise ValueError(_SHARD.format(off=int(call.offset.max())))
        if not bool(call.known.all()):
            raise ValueError(call.why_unknown)
        rows = call.explicit()
        if bool(_goes_back(call, rows, kv_len).any()):
            raise ValueError(_RESET)
    first, tokens = (cast("Numbering", tuple(three)) for three in (found[:3], found[3:]))
    return rows, CallNumbering(first, tokens, sees_cache)


def _decoding(parsed: ParsedMask, p: Tensor, forward_pass: ForwardContext | None) -> CallNumbering | None:
    """Find the numbering of a call of one token in few steps; None: look at the call closer.

    A token counts by its cache index, or from the start of its text; alone, where it sees no other key, it may do either.

    Args:
        p: the positions of the tokens, int64 (batch or 1, 1).
    """
    if (row := parsed.rows.row) is not None:
        read = [(*row, at) for (at,) in p.tolist()]
    else:
        index, batch = parsed.rows.index, max(len(parsed.rows.index), len(p))
        read = torch.cat([index[:, 0].expand(batch, -1), p.expand(batch, -1)], -1).tolist()
    held, ones = _held_and_ones(parsed, forward_pass)
    if held and ones is None:
        ones = next((own for own, _, start, low, _, at in read if at == 1 and own == start == low >= held), None)
    if forward_pass is not None:
        forward_pass.ones = ones
    since = FAR if ones is None else ones
    facts = []
    for own, _, start, low, high, at in read:
        if low <= high:
            is_index, is_count, alone = at == own, at - (start >= since) == own - start, low == own
            if not (is_index or is_count or alone):
                return None
            facts.append((is_index, is_count, alone, is_index or alone, is_count or alone))
    by_index, by_start, alone, behind_index, behind_start = map(all, zip(*facts, strict=True)) if facts else (True,) * 5
    first, tokens = (behind_index, behind_start, behind_start), (by_index, by_start, by_start)
    return CallNumbering(first, tokens, sees_cache=not alone)


def _goes_back(call: Numbered, out: AttentionLayout, kv_len: int) -> Tensor:
    """Mark tokens that see earlier ones at positions not before their own; `out`: the call's rows with positions."""
    rows = call.rows
    if rows.allowed is None:
        return call.goes_back
    if rows.hides_tokens:
        return call.falls
    assert out.query_ids is not None
    assert out.key_ids is not None
    earlier = rows.visible(kv_len).any(1) & (call.keys[:, None] < call.cache_index[..., None]) & call.real[..., None]
    return earlier & (out.key_ids[:, None] >= out.query_ids[..., None])


def _traced(
    parsed: ParsedMask, position_ids: Tensor, kv_len: int, forward_pass: ForwardContext | None, own_mask: bool
) -> AttentionLayout:
    """Place rows where no tensor may be read: explicit positions where the mask has holes, and a check while it runs."""
    rows, call = parsed.rows, Numbered(parsed, position_ids, kv_len)
    if rows.allowed is None:
        placed, fits = rows, call.regular.all()
    else:
        placed = call.explicit()
        fits = call.known.all() & ~_goes_back(call, placed, kv_len).any()
    if not (own_mask or rows.hides_tokens):
        fits = fits & ~call.jumps.any()
    if forward_pass is not None and not all(numbering := known_of(forward_pass.cache).get("numbering", (True,))):
        ways = [fit for fit, known in zip(call.numbering_of_first, numbering, strict=True) if known]
        fits = fits & torch.stack([*ways, ~call.sees_cache.any()]).any()
    assert_later(fits, _TRACED)
    return placed


def refuse_unknown_start(config: LongAttnConfig, rows: AttentionLayout, position_ids: Tensor | None, kv_len: int) -> None:
    """Raise where a 4-D mask over a KV cache leaves open whether its first keys are padding or before a window."""
    if not ((config.logit_map is not None and config.logit_map.sink_tokens > 0) or config.remap is not None):
        return
    cache_index, start = rows.bounds.query, rows.bounds.start
    from_cache = torch.ones_like(start, dtype=torch.bool)
    if position_ids is not None:  # of one axis or several
        from_cache = (position_ids[..., -start.shape[1] :] == cache_index).reshape(-1, *start.shape).all(0)
    late = from_cache & (start > 0) & rows.real_rows(kv_len)
    moves = (start != start[:, -1:]) | (cache_index.shape[1] == 1)  # padding stays where it is, a window goes on
    known, message = ~(late & moves).any(), _UNKNOWN_START.format(name=config.name)
    if torch.compiler.is_compiling():
        assert_later(known, message)
    elif not known:
        raise ValueError(message)


def _several_processes() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
