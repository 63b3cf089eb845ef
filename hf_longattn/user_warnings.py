"""Warnings that point at the line which a user wrote, whatever lies between it and the place that warns."""

from __future__ import annotations

import inspect
import warnings

#: Packages that call us on a user's behalf.
_BETWEEN = frozenset({"hf_longattn", "transformers", "peft", "accelerate", "torch", "contextlib", "functools"})


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """As `warnings.warn`, at the innermost call that comes from outside of this package and those that call it.

    Python 3.12 has an argument for that, `skip_file_prefixes`; 3.11 counts frames.
    """
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
