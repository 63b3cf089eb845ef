"""What tasks share that score the ends of documents."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

from ..corpus import Document
from ..experiment import Cell
from ..rows import Row
from ..settings import Setting
from .base import Task


class OnDocuments(Task):
    """A task that scores the last `targets` tokens of every document, behind a prefix if there is one."""

    documents: ClassVar[bool] = True
    prefixed: ClassVar[bool] = True
    #: What its numbers depend on beside the document.
    depends: ClassVar[Sequence[Any]] = ()

    @property
    def protocol(self) -> dict[str, Any]:
        prefix = self.options.prefix
        return {"targets": self.options.targets, "prefix": prefix and prefix.name}

    def cells(self, setting: Setting) -> Iterator[Cell]:
        behind = [] if self.options.prefix is None else [_said(self.options.prefix)]
        for length, document in itertools.product(self.options.lengths, self.corpus.documents):
            measure = partial(self.measure, setting, document, length)
            yield self.cell(setting, length, document.name, measure, [document.numbers, *behind, *self.depends])

    def measure(self, setting: Setting, document: Document, length: int, model: Any) -> Row:
        """Measure the row of a document at a length."""
        raise NotImplementedError


def _said(prefix: Setting) -> Any:
    """What a prefix does: the text that is its name, or where it has another name what it is made of."""
    with suppress(ValueError):  # the name is no text of a setting
        if Setting.parse(prefix.name).to_dict() == prefix.to_dict():
            return prefix.name
    return prefix.to_dict()
