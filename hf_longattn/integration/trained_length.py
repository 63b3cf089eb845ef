"""The length that a model was trained at, read off its config: one owner, with the reason beside the number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ORIGINAL = "original_max_position_embeddings"
#: What configs call the longest text that a model reads; engines and harnesses take the least, or the first, of those there.
LENGTHS: tuple[str, ...] = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_length", "max_seq_len")
LENGTHS += ("seq_length", "seq_len", "model_max_length", "n_ctx")
#: Where a config keeps what they said before a method let its model read further (`max_length.announce`).
KEPT = "longattn_lengths"
#: Rope types that leave max_position_embeddings to be what a model was trained at.
UNSCALED = ("default", "proportional", "axial")
#: Rope types that a config has from its training alone.
TRAINED_IN = ("llama3", "longrope")
#: Rope types whose frequencies change with the length of a call.
CHANGING = {"dynamic", "longrope"}
#: All that a scaling put in for inference says, as model cards write it; those who trained with one wrote more.
BARE = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", ORIGINAL}
#: How far max_position_embeddings may be from factor x original and still be meant by it.
ABOUT = 0.1
GIVEN = "given as train_length"


@dataclass(frozen=True)
class Trained:
    """The trained length in a model's config.

    Args:
        length: the longest text that it was trained on, in tokens; None: the config names none.
        reason: where the number is from.
        assumed: what was taken for granted where the settings allow another reading, else None.
        rotation_is_own: the model was trained under the rotation that it has now, so that a remap may act on it; False where
            a scaling was put in afterwards, or where frequencies change with the length of a call.
    """

    length: int | None
    reason: str
    assumed: str | None = None
    rotation_is_own: bool = True

    @property
    def source(self) -> str:
        """The reason, with what was assumed."""
        return self.reason if self.assumed is None else f"{self.reason} ({self.assumed})"

    def __str__(self) -> str:
        known = "trained length unknown" if self.length is None else f"trained at {self.length:,}"
        return f"{known}: {self.reason}"


def rope_settings(config: Any, layer_type: str | None = None) -> Mapping[str, Any]:
    """The rotary settings of layers of a type (default: full attention), {} in models that do not rotate."""
    settings = getattr(config, "rope_parameters", None) or {}
    nested = {kind: x for kind, x in settings.items() if isinstance(x, Mapping)}
    return nested.get(layer_type or "", nested.get("full_attention", next(iter(nested.values()), settings)))


def trained(config: Any, layer_type: str | None = None, train_length: int | None = None) -> Trained:
    """The trained length by a text config, as its layers of a type (default: full attention) tell it; no model is needed.

    Args:
        train_length: the length that the user gives. It stands, and says whether a scaling was trained in.
    """
    rope, (most, name) = rope_settings(config, layer_type), published(config)
    if most < 1:
        return Trained(train_length, GIVEN if train_length else "the config names no max_position_embeddings")
    kind = rope.get("rope_type", "default")
    if kind in ("yarn", "linear"):
        found = _scaled(config, kind, rope, most, train_length)
    elif kind in TRAINED_IN:
        found = Trained(most, f"{name}; rope_type {kind!r} is a training-time setting")
    elif kind == "dynamic" and not rope.get("alpha"):  # with it the frequencies are fixed
        found = Trained(most, f"{name}, beyond which rope_type 'dynamic' scales", rotation_is_own=False)
    elif kind in (*UNSCALED, "dynamic"):
        found = _unscaled(config)
    else:
        taken = f"rope_type {kind!r} is not known here and is taken for a scaling put in for inference"
        found = Trained(most, name, taken, rotation_is_own=False)
    return found if train_length is None else Trained(train_length, GIVEN, None, found.rotation_is_own)


def named_lengths(config: Any) -> dict[str, int]:
    """Return the longest text that a config names now, by its own names for that."""
    names = dict.fromkeys(getattr(config, "attribute_map", {}).get(name, name) for name in LENGTHS)
    values = {name: vars(config).get(name) for name in names}
    return {name: n for name, n in values.items() if isinstance(n, int) and not isinstance(n, bool) and n > 0}


def published(config: Any) -> tuple[int, str]:
    """The longest text by a config as it was published, and what says so; 0 if nothing does.

    What stands under other names than max_position_embeddings counts if the config's class does not fill it in by itself.
    """
    first = getattr(config, "attribute_map", {}).get(LENGTHS[0], LENGTHS[0])
    own = {k: n for k, n in _published_lengths(config).items() if k == first or n != getattr(type(config), k, None)}
    longest = max(own, key=lambda name: own[name], default=first)
    return own.get(longest, 0), LENGTHS[0] if longest == first else longest


def _published_lengths(config: Any) -> dict[str, int]:
    """Return what `named_lengths` gave when the config was published."""
    kept = vars(config).get(KEPT, {})
    return {name: kept.get(name, n) for name, n in named_lengths(config).items()}


def recorded(config: Any, section: Mapping[str, Any] | None) -> Trained:
    """The trained length that a longattn section keeps, with its reason; else what the config tells."""
    if section and section.get("train_length"):
        return Trained(section["train_length"], section.get("train_length_source") or GIVEN)
    return trained(config)


def window_hides(config: Any) -> bool:
    """Tell whether a config's sliding window hides keys within the trained length; a window of unknown size does."""
    window, known = getattr(config, "sliding_window", None), trained(config).length
    return window is None or known is None or window < known


def _unscaled(config: Any) -> Trained:
    most, name = published(config)
    chunks = getattr(config, "dual_chunk_attention_config", None)
    if isinstance(chunks, Mapping) and chunks.get(ORIGINAL):
        return Trained(chunks[ORIGINAL], f"{ORIGINAL} of dual_chunk_attention_config, which reaches further at inference")
    mark = getattr(config, ORIGINAL, None)  # a class may give one to checkpoints that name none (Phi-3's 4,096)
    if mark and mark < most and mark != getattr(type(config), ORIGINAL, None):
        return Trained(mark, f"{ORIGINAL}, beside an unscaled rotation")
    return Trained(most, name)


def _scaled(config: Any, kind: str, rope: Mapping[str, Any], most: int, train_length: int | None) -> Trained:
    """YaRN or linear scaling, each trained in or put in afterwards."""
    by_layer_type = rope is not config.rope_parameters  # settings for each layer type are an architecture's own
    original, factor = rope.get(ORIGINAL) or (most if kind == "yarn" else None), rope.get("factor")
    if original is None:  # linear scaling alone
        found = _unscaled(config)
        # Vicuna 16k: 4,096, 4, and 16,384
        known = by_layer_type or (factor and most in {n * factor for n in _published_lengths(config).values()})
        taken = None if known else f"rope_type {kind!r} is taken for trained in, its length for max_position_embeddings"
        return Trained(
            found.length, f"{found.reason}; rope_type {kind!r} is trained in", taken, not train_length or train_length >= most
        )
    factor = factor or most / original
    reach = factor * original
    if train_length is not None or "finetuned" in rope:  # the latter is how YaRN's authors tell theirs apart
        own = train_length > original if train_length is not None else bool(rope["finetuned"])
        why = f"factor x {ORIGINAL}: the model was trained with its {kind} scaling, as `finetuned` says"
        why = why if own else f"{ORIGINAL}; {kind} scaling was added after training, for inference, as `finetuned` says"
        return Trained(int(reach) if own else original, why, None, own)
    if abs(math.log(most / reach)) > abs(math.log(most / original)) or most == original:
        why = f"max_position_embeddings is {most:,} and not factor x original, {reach:,.0f}"
        why = f"{KEPT} keeps {most:,}" if KEPT in vars(config) else why
        why = f"{ORIGINAL}; {kind} scaling was added after training, for inference, as {why}"
        return Trained(original, why, rotation_is_own=False)
    why = f"max_position_embeddings, factor {factor:g} x {original:,}: {kind} is trained in"
    exact = abs(most / reach - 1) <= ABOUT
    if exact and (by_layer_type or set(rope) - BARE):
        return Trained(most, why)
    return Trained(most, why, f"{kind} is taken for trained in, because max_position_embeddings is {most:,}")
