"""Writes hf_longattn/_signatures.pyi, by which editors and type checkers know every method's parameters.

python tests/kit/signatures.py
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import hf_longattn
from hf_longattn.evaluation.options import EvalOptions
from hf_longattn.slots.registry import METHODS, PRESETS, fixed_by, method, method_class, summary_of

FILE = Path(hf_longattn.__file__).with_name("_signatures.pyi")
HEAD = '''"""What editors know of functions that take a method by its name. Made by tests/kit/signatures.py."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from torch import nn

from .config import LongAttnConfig
from .evaluation.results import Results
from .evaluation.settings import Setting

_Model = TypeVar("_Model", bound=nn.Module)
_Method = str | Mapping[str, Any] | LongAttnConfig
'''
LAYERS, BACKEND = 'layers: str | Sequence[int] = "full_attention"', 'backend: str = "auto"'
TRAINED = "train_length: int | str | None = None"
PURPOSE = 'purpose: str = "both"'


def parameters(name: str) -> Iterator[str]:
    """The parameters that a method takes under a name, with their types and defaults."""
    kind, made = method_class(name), method(name)
    for f in fields(kind):
        if f.name not in fixed_by(name):
            annotation = re.sub(r"tuple\[(\w+), \.\.\.\]", r"Sequence[\1]", str(f.type))
            if f.name in kind.lengths:
                annotation = annotation.replace("int", "int | str")
            yield f"{f.name}: {annotation} = {getattr(made, f.name)!r}"


def overloads(function: str, names: list[str], before: str, behind: list[str], returned: str, rest: str) -> Iterator[str]:
    """A function's signature for each method.

    Args:
        before: its parameters up to the method's name; behind: those that may stand by position behind it.
        rest: its parameters for a method that is given otherwise.
    """
    for name in names:
        own = [p for p in parameters(name) if p != TRAINED]
        trained = [] if TRAINED in behind else [TRAINED]
        listed = [before, f'method: Literal["{name}"]', *behind, "*", *own, *trained, LAYERS, BACKEND]
        yield f'@overload\ndef {function}({", ".join(listed)}) -> {returned}:\n    """{name}: {summary_of(name)}."""\n'
    yield f"@overload\ndef {function}({rest}) -> {returned}: ...\n"


def evaluate() -> str:
    """`evaluate` with the options of `EvalOptions`."""
    options = [f for f in fields(EvalOptions) if f.name not in ("model", "texts", "settings")]
    listed = ", ".join(f"{f.name}: {_wider(f)} = {f.default!r}" for f in options)
    first = "model: Any, texts: Mapping[str, str] | Sequence[str] | str, settings: Sequence[str | Setting] = ()"
    return f"def evaluate({first}, out: Path | str | None = None, *, {listed}) -> Results: ...\n"


def _wider(option: Field[Any]) -> str:
    """The type of an option as it may be given: lists as one text with commas, too, lengths as "16k", settings as texts."""
    annotation = str(option.type).replace("Sequence[int]", "Sequence[int | str]")
    text = "Sequence" in annotation or "Setting" in annotation or (isinstance(option.default, str) and annotation != "str")
    return f"str | {annotation}" if text else annotation


def text() -> str:
    """The whole file."""
    names = sorted([*METHODS, *PRESETS])
    longer = [name for name in names if method_class(name).slot == "positions"]
    parts = [HEAD]
    for function, returned in (("apply", "_Model"), ("using", "AbstractContextManager[_Model]")):
        rest = "model: _Model, method: _Method | Sequence[_Method], **parameters: Any"
        parts += overloads(function, names, "model: _Model", [], returned, rest)
    first = "model: _Model, to: int | str"
    rest = f"{first}, method: str | LongAttnConfig | None = None, {PURPOSE}, {TRAINED}, **parameters: Any"
    parts += overloads("extend", longer, first, [PURPOSE, TRAINED], "_Model", rest)
    written = "\n".join([*parts, evaluate()])
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(FILE), "-"]
    return subprocess.run(command, input=written, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
