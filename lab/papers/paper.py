"""The papers' own numbers, to stand beside ours, from paper.yaml; keys of several parts are tuples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def _keyed(value: Any) -> Any:
    if isinstance(value, dict):
        return {tuple(k.split("|")) if "|" in k else k: _keyed(v) for k, v in value.items()}
    return tuple(value)


_READ: dict[str, Any] = _keyed(yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")))
SIZES, LENGTHS, MASKED_LENGTHS = (_READ[name] for name in ("SIZES", "LENGTHS", "MASKED_LENGTHS"))
MAX_RETRIEVAL, ARGMAX, ARGMAX_GAIN = (_READ[name] for name in ("MAX_RETRIEVAL", "ARGMAX", "ARGMAX_GAIN"))
DICTIONARY, DICTIONARY_GAIN = (_READ[name] for name in ("DICTIONARY", "DICTIONARY_GAIN"))
ARGMAX_256, DICTIONARY_256 = (_READ[name] for name in ("ARGMAX_256", "DICTIONARY_256"))
LENGTH, NEEDLES, MASKED, ENCODED = (_READ[name] for name in ("LENGTH", "NEEDLES", "MASKED", "ENCODED"))
