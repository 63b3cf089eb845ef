"""What transformers calls a KV cache in the arguments and outputs of its models, and when it is one in pages."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import Cache
from transformers.masking_utils import create_causal_mask

#: The name: "cache", or "past_key_values" before release 5.24.
CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"

#: Whether models read paged caches themselves; in older releases attention functions do, each release otherwise.
PAGES = CACHE == "cache"


def is_paged(arguments: Mapping[str, Any]) -> bool:
    """Whether these are the arguments of a call under continuous batching."""
    return PAGES and arguments.get("write_index") is not None


def cache_in(values: Iterable[Any]) -> Cache | None:
    """The KV cache among the arguments or outputs of a model, whatever it is called there."""
    return next((x for x in values if isinstance(x, Cache)), None)


def values_of(output: Any) -> Iterable[Any]:
    """What a model's output holds."""
    return output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ()
