"""The base class of tasks, and all tasks: our own, and those of the entry point group "hf_longattn.tasks"."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, ClassVar

from ...slots.registry import did_you_mean
from ..corpus import Corpus
from ..encoder import Encoder
from ..experiment import Cell, digest
from ..readings import Readings
from ..report import Section, by_length
from ..rows import Row
from ..statistics import mean_of
from .registry import TASK_NAMES

GROUP = "hf_longattn.tasks"
#: This package's tasks, by the module and the class that measure them.
_HOME = {
    "loss": "loss:Loss",
    "long_ppl": "long_ppl:LongPPL",
    "copies": "copies:Copies",
    **dict.fromkeys(TASK_NAMES, "answers:Answers"),
    **dict.fromkeys(("ruler", "graphwalks", "key_value"), "ruler:Ruler"),
    "questions": "questions:Questions",
    "probe": "probe:ProbeTask",
    "attention": "attention:Attention",
}
#: What texts are made of beside a user's; its tokens tell tokenizers apart.
WORDS = f"What is the special magic number for bafedigo? The pass key is {' '.join(str(n**5) for n in range(30))}.\n"
COLUMNS = ("setting", "task", "length", "which")


class Task:
    """One thing that an evaluation measures: cells of a setting in, sections of a page out.

    A subclass that a package names in the entry point group "hf_longattn.tasks" is a task of every command.

    Args:
        corpus: what is measured: texts as tokens, documents, the tokenizer, and the evaluation's options.
        name: the task's own.

    Raises:
        ValueError: what cannot be measured so; before weights are read.
    """

    #: Whether it measures documents, windows of the longest length that are cut from the texts; whether a prefix may read
    #: their beginnings.
    documents: ClassVar[bool] = False
    prefixed: ClassVar[bool] = False
    #: Whether it needs a language-model head; whether it needs a length within the trained one, to compare with.
    head: ClassVar[bool] = True
    within: ClassVar[bool] = True

    def __init__(self, corpus: Corpus, name: str) -> None:
        self.corpus, self.name, self.options = corpus, name, corpus.options

    @property
    def protocol(self) -> dict[str, Any]:
        """The settings that all of its rows must share."""
        return {}

    def cells(self, setting: Any) -> Iterable[Cell]:
        """Return the cells to measure for a setting."""
        raise NotImplementedError

    def cell(self, setting: Any, length: int, which: str, measure: Any, depends: Sequence[Any] = (), **more: Any) -> Cell:
        """One cell, whose row is found by setting, task, length and `which` document or sample."""
        key = {"setting": setting.name, "task": self.name, "length": length, "which": which}
        return Cell(setting, key, measure, depends, work=length, **more)

    def ids_of_texts(self, text: Sequence[int]) -> str:
        """A digest, for `Cell.ids`, of what a task's texts are made of: the tokens of a text, and of words of its own."""
        return digest([self.corpus.start, Encoder(self.corpus.tokenizer, self.options.bos)(WORDS), text])

    @classmethod
    def counted(cls, rows: Sequence[Row]) -> Sequence[Row]:
        """Of its rows those that a page counts."""
        return rows

    @staticmethod
    def format_row(row: Row) -> str:
        """A row in a line."""
        return ", ".join(f"{k} {v:.3f}" for k, v in _numbers(row).items())

    @classmethod
    def sections(cls, results: Readings, name: str) -> Sequence[Section]:
        """Return the sections of a page for its rows; by default the mean of every number, by setting and length."""
        lengths = results.lengths_of(name)
        numbers = dict.fromkeys(k for r in results.rows if r["task"] == name for k in _numbers(r))

        def mean(number: str, setting: str, length: int) -> float | None:
            return mean_of(r[number] for r in results.of(setting, name, length) if r.get(number) is not None)

        tables = [by_length(x.replace("_", " "), results.settings, lengths, partial(mean, x), brief=True) for x in numbers]
        return [Section(name.replace("_", " ").capitalize(), "", tables, command=results.command(name))]


def _numbers(row: Row) -> dict[str, float]:
    """Return the numbers that a task has put into a row."""
    known = {*COLUMNS, "seconds", "cpu_seconds"}
    return {k: v for k, v in row.items() if k not in known and isinstance(v, (int, float))}


def names() -> list[str]:
    """Return the names of all tasks."""
    return [*_HOME, *(e.name for e in entry_points(group=GROUP))]


def task_of(name: str) -> type[Task]:
    """A task's class.

    Raises:
        ValueError: there is no such task; the message says which is near.
    """
    if (home := _HOME.get(name)) is not None:
        module, _, kind = home.partition(":")
        return getattr(import_module(f".{module}", __package__), kind)
    if (found := next(iter(entry_points(group=GROUP, name=name)), None)) is None:
        raise ValueError(f"unknown task {name!r}; {did_you_mean(name, names())}known tasks: {', '.join(names())}")
    return found.load()
