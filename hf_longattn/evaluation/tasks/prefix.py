"""The text before the targets, read once for all settings that read on over the same KV cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from ...config import LongAttnConfig
from ...integration import apply
from ...integration.model import no_untrained_warning, running
from ...slots.base import LengthTemperature
from ...slots.method import SLOTS
from ..experiment import Cell
from ..measures.losses import Prefix, prefix_of, shortened
from ..rows import Row
from ..settings import Setting
from .base import Task

if TYPE_CHECKING:
    from ..plan import Document, Plan


class OnDocuments(Task):
    """A task that scores the last `targets` tokens of every document, behind a prefix if there is one."""

    documents: ClassVar[bool] = True
    prefixed: ClassVar[bool] = True
    #: What its numbers depend on beside the document.
    depends: ClassVar[Sequence[Any]] = ()

    @property
    def protocol(self) -> dict[str, Any]:
        return {"targets": self.options.targets, "prefix": self.options.prefix}

    def cells(self, setting: Setting) -> Iterator[Cell]:
        behind = [] if self.options.prefix is None else [self.options.prefix]
        for length, document in itertools.product(self.options.lengths, self.plan.documents):
            measure = partial(self.measure, setting, document, length)
            yield self.cell(setting, length, document.name, measure, [document.numbers, *behind, *self.depends])

    def measure(self, setting: Setting, document: Document, length: int, model: Any) -> Row:
        """Measure the row of a document at a length."""
        raise NotImplementedError


class Prefixes:
    """The KV caches of one document's text before its targets, by what has read it."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.document = plan, ""
        self.kept: dict[Any, Prefix] = {}

    def of(self, setting: Setting, document: Document, length: int, model: Any) -> Prefix | None:
        """None where the plan reads whole texts."""
        plan, prefix = self.plan, self.plan.options.prefix
        if prefix is None:
            return None
        if self.document != document.name:
            self.document, self.kept = document.name, {}
        method = reading(running(model) or LongAttnConfig(), prefix)
        layers = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
        end = self._end(length)
        last = self._end(plan.longest) if layers <= {"full_attention"} else end  # others cannot give tokens back
        reader = (setting.rope, setting.adapter, setting.model, repr(method.to_dict()), last)
        if reader not in self.kept:
            own = plan.load(setting)
            with no_untrained_warning():
                apply(own, method, stack=setting.rope is not None)
            before = plan.context(document, plan.longest)[:, :last]
            self.kept[reader] = prefix_of(own, before.to(own.device))
            if own is model:  # one that was loaded before: under its setting again
                plan.load(setting)
        return shortened(self.kept[reader], end)

    def _end(self, length: int) -> int:
        return length - self.plan.options.targets - 1  # the token before the targets predicts the first of them


def reading(own: LongAttnConfig, prefix: str) -> LongAttnConfig:
    """Return the method that reads the text before the targets, without the slots that do nothing in the prefix's window."""
    method = Setting.parse(prefix).config
    assert method is not None
    own = own.replace(positions=None, visibility=None)
    if isinstance(own.temperature, LengthTemperature):
        own = own.replace(temperature=None)
    return own.replace(**{slot: value for slot in SLOTS if (value := getattr(method, slot)) is not None})
