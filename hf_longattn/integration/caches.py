"""KV caches in the arguments and outputs of Transformers' models, plain or in pages."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias, TypedDict

from torch import Tensor
from transformers import Cache
from transformers.masking_utils import create_causal_mask

#: The name: "cache", or "past_key_values" before release 5.24.
CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"

#: Whether models read paged caches themselves; in older releases attention functions do, each release otherwise.
PAGES = CACHE == "cache"


#: Which ways of numbering fit the positions of some tokens: by cache index, from the start of the text, by visible tokens.
Numbering: TypeAlias = tuple[bool, bool, bool]


class CallNumbering(NamedTuple):
    """The numbering of the tokens of a call.

    Args:
        first: that of the tokens which come first behind cached keys.
        tokens: that of all tokens.
        sees_cache: whether any token sees cached keys.
    """

    first: Numbering
    tokens: Numbering
    sees_cache: bool


class CacheRecord(TypedDict, total=False):
    """The facts about a KV cache's keys that a cache does not hold: a plain dict kept with it, copied and saved with it.

    Keys:
        numbering: how positions counted, in calls so far.
        ones: the cache index from which on texts count from 1: behind empty prompts, all padding, as generate() numbers them.
        axes: the positions of keys, if some are at several each (M-RoPE): int64 (axes, batch, keys), as the model got them.
        uneven: some layers hold tokens that others do not, since a call broke off.
        long: the keys were turned by longrope's frequencies of long calls.
    """

    numbering: Numbering
    ones: int | None
    axes: Tensor
    uneven: bool
    long: bool


def record_of(cache: Cache) -> CacheRecord:
    """Return the record of a cache, which changes with it."""
    record: CacheRecord = vars(cache).setdefault("_longattn", {})
    return record


def known_of(cache: Cache | None) -> CacheRecord:
    """Return the record of a cache to read it, as a graph may; empty where there is none."""
    return {} if cache is None else cache.__dict__.get("_longattn", {})


def is_paged(arguments: Mapping[str, Any]) -> bool:
    """Tell whether arguments are those of a call under continuous batching."""
    return PAGES and arguments.get("write_index") is not None


def cache_in(values: Iterable[Any]) -> Cache | None:
    """The KV cache among the arguments or outputs of a model, whatever it is called there."""
    for x in values:  # and not by a generator: every pass comes here twice
        if isinstance(x, Cache):
            return x
    return None


def values_of(output: Any) -> Iterable[Any]:
    """Return the values that a model's output holds."""
    return output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ()
