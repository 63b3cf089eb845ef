"""Hooks that refuse calls which no method computes: beyond a table of positions, or across longrope's border.

longrope turns long calls by other frequencies than short ones, and a remap turns cached keys anew by the present ones. So a
cache that was filled on one side of the border is refused on the other.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache

from ..core.tracing import assert_later, readable
from .caches import cache_in, is_paged, known_of, record_of, values_of
from .internals import input_embeddings
from .layers import View
from .state import AttentionState, method_of
from .trained_length import ORIGINAL, rope_settings

_MIXED = (
    "this call and the KV cache lie on different sides of {border} tokens: longrope turns calls that reach beyond by other "
    "frequencies, cached keys stay turned by the old ones, and a remap of rotary distances knows one kind. Give the whole "
    "text in one call without that cache (Phi-3's generate() does so by itself)"
)


def guard(view: View, state: AttentionState) -> None:
    """Let a model refuse what the method that it runs now cannot compute."""
    for handle in state.guards:
        handle.remove()
    tables = [x.register_forward_pre_hook(_check_embedding, with_kwargs=True) for x in _position_embeddings(view)]
    if not tables and (end := end_of(view.target, lambda: view.model)) is not None:  # GPT-J, CodeGen and CTRL keep a tensor
        tables = [view.inner.register_forward_pre_hook(functools.partial(_check_end, end), with_kwargs=True)]
    state.guards = (*tables, *_border_hooks(view, state))


def end_of(config: Any, build: Callable[[], nn.Module]) -> int | None:
    """The length in tokens of the table, learned or fixed, that a language model takes its positions from; None: they are
    none, computed or biases, and have no end.

    Args:
        build: gives the model, of which shapes are read; it is not asked where the config settles it.
    """
    length = getattr(config, "max_position_embeddings", None)
    if length is None or getattr(config, "rope_parameters", None) or getattr(config, "alibi", False):
        return None
    return length if length in _table_lengths(build()) else None  # of some hybrids no layer knows positions


def _position_embeddings(view: View) -> Iterator[nn.Embedding]:
    """The embeddings in which a model looks up positions."""
    size, embeddings = getattr(view.target, "max_position_embeddings", None), input_embeddings(view.model)
    for module in view.modules:
        if isinstance(module, nn.Embedding) and _entries(module) == size and module is not embeddings:
            yield module


def _table_lengths(model: nn.Module) -> set[int]:
    """The lengths of all in which a model may look up positions: embeddings but that of tokens, and tensors beside weights."""
    found, tokens = set(), input_embeddings(model)
    for module in model.modules():
        if hasattr(module, "make_weights"):  # XGLM's sinusoids: a longer text makes more of them
            continue
        held = [module.weight] if isinstance(module, nn.Embedding) and module is not tokens else []
        held += [x for x in (*module.buffers(recurse=False), *vars(module).values()) if isinstance(x, Tensor) and x.ndim]
        found |= {len(x) - getattr(module, "offset", 0) for x in held}
    return found


def _check_embedding(table: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before an embedding of positions looks them up: refuse those beyond it."""
    if torch.compiler.is_compiling():
        return
    call = inspect.signature(type(table).forward).bind(table, *args, **kwargs).arguments
    positions = call.get("position_ids", call.get("input"))
    if positions is None and "attention_mask" in call:  # OPT and BioGPT count
        positions = call["attention_mask"].cumsum(1) - 1
    if isinstance(positions, Tensor) and not readable(positions):
        return
    if positions is not None:
        last = int(positions.max())
    else:  # others take tokens or their shape (batch, q_len), and how many came before
        last = getattr(args[0], "shape", args[0])[1] + call.get("past_key_values_length", 0) - 1
    _refuse_beyond(last, _entries(table))


def _check_end(end: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a pass: refuse positions beyond a table of that length."""
    if torch.compiler.is_compiling():
        return
    call = _named(module, args, kwargs)
    _, after = _before_and_after(call, cache_in(call.values()))
    if not isinstance(after, Tensor) or readable(after):
        _refuse_beyond(int(after) - 1, end)


def _refuse_beyond(last: int, size: int) -> None:
    if last >= size:
        raise ValueError(
            f"position {last} lies beyond this model's position table of {size} entries. No attention method can extend a "
            "table: shorten the text, or use a model that computes rotary positions"
        )


def _entries(table: Any) -> int:
    """Return the number of positions in a table; Bart's and its like keep a few rows before the first (`offset`)."""
    return int(table.num_embeddings) - getattr(table, "offset", 0)


def _border_hooks(view: View, state: AttentionState) -> list[RemovableHandle]:
    """Make the hooks that refuse a cache across longrope's border; none where no remapped layer has one."""
    remapped = [
        (x, method.rotary) for x in view.layers if (method := method_of(x.module)) is not None and method.rotary is not None
    ]
    settings = [rope_settings(x.config, x.type) for x, _ in remapped]
    borders = {s[ORIGINAL] for s in settings if s.get("rope_type") == "longrope" and s["short_factor"] != s["long_factor"]}
    if not borders:
        return []
    buffers = {source.module: source.buffer for _, source in remapped}
    turns = [
        m.register_forward_hook(functools.partial(_check_frequencies, state, buffer), with_kwargs=True)
        for m, buffer in buffers.items()
    ]
    refuse, note = functools.partial(_refuse_mixed, state, min(borders)), functools.partial(_note_side, min(borders))
    return [
        *turns,
        view.inner.register_forward_pre_hook(refuse, with_kwargs=True),
        view.inner.register_forward_hook(note, with_kwargs=True),
    ]


def _check_frequencies(
    state: AttentionState, buffer: str, rotary: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
) -> None:
    """After a rotary module: refuse cosines that are not those of its buffer, which a remap reads.

    Verification saw a short call alone, and PhiMoE turns long ones by other frequencies.
    """
    compiling = torch.compiler.is_compiling()
    if state.disabled is not None or not (compiling or readable(output[0])):
        return
    position: Tensor = (kwargs["position_ids"] if "position_ids" in kwargs else args[1])[..., :1, -1:].float()
    cos, sin = (x[0, -1].float() for x in output)
    cos = (cos / (cos.square() + sin.square()).sqrt()).sort().values
    want = (position.flatten()[0] * getattr(rotary, buffer).float()).cos()
    want = want.repeat_interleave(len(cos) // len(want)).sort().values  # in whichever order a model has its pairs
    off = (cos - want).abs().max() > (1e-3 if output[0].dtype in (torch.float32, torch.float64) else 0.05)
    message = (
        f"{type(rotary).__name__} does not turn a call of this length by the frequencies that it shows ({buffer}), so a "
        "remap of rotary distances cannot undo them: stay below longrope's original length, or take another method"
    )
    if compiling:
        assert_later(~off, message)
    elif off:
        raise ValueError(message)


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of a model by their names."""
    return inspect.signature(type(module).forward).bind_partial(module, *args, **kwargs).arguments


def _before_and_after(call: dict[str, Any], cache: Cache | None) -> tuple[Any, Any]:
    """How far texts reach before and after a call, as positions say or else the cache."""
    before = 0 if cache is None else cache.get_seq_length()
    if (positions := call.get("position_ids")) is not None:
        return positions[..., 0].max() * (before > 0), positions.max() + 1
    tokens = next((x for x in (call.get("input_ids"), call.get("inputs_embeds")) if x is not None), None)
    return before, before if tokens is None else before + tokens.shape[1]  # without any the model itself says what it needs


def _refuse_mixed(
    state: AttentionState, border: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Before a pass: refuse a call and a cache that lie on different sides of the border."""
    if state.disabled is not None:
        return
    if is_paged(kwargs):
        raise ValueError(
            "continuous batching reads long and short texts in one call, and longrope turns all of them by the frequencies of "
            "the longest: under a remap of rotary distances that is refused; use generate()"
        )
    call = _named(module, args, kwargs)
    if (cache := cache_in(call.values())) is None:
        return
    before, after = _before_and_after(call, cache)
    long = known_of(cache).get("long")  # a cache that was cropped since says another length
    mixed = (before > 0) & (after <= border if long else after > border)
    if long is None:
        mixed = mixed & (before <= border)
    if torch.compiler.is_compiling() and isinstance(mixed, Tensor):
        assert_later(~mixed, _MIXED.format(border=border))
    elif mixed:
        raise ValueError(_MIXED.format(border=border))


def _note_side(border: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """After a pass: note with its cache on which side of the border its keys were turned."""
    if torch.compiler.is_compiling():
        return
    call = _named(module, args, kwargs)
    cache, positions = cache_in((*call.values(), *values_of(output))), call.get("position_ids")
    if cache is not None:
        record_of(cache)["long"] = bool((cache.get_seq_length() if positions is None else positions.max() + 1) > border)
