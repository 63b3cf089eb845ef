"""The one loop of all that is measured: cells in, rows out, each kept as soon as it is there. An interrupted one goes on."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers.utils import logging

from ..config import PREFIX
from ..files import ADAPTER_FILE
from ..integration import rope
from ..integration.model import running
from ..slots.registry import METHODS
from .processes import gathered, place
from .rows import Row, RowFile


@dataclass(frozen=True)
class Cell:
    """One row to measure.

    Args:
        setting: what is loaded for it: a `Setting`, or anything with to_dict().
        key: what its row is found by, the setting's name among it; None stands for a column that the row lacks.
        measure: from the loaded model (and the row of `by`) to what goes into the row, JSON-ready.
        depends: what the numbers depend on beside the setting, JSON-ready: part of the row's digest.
        by: another cell of the experiment, which comes before and whose row `measure` needs.
        work: its share of the progress bar.
        ids: a digest of the tokens that are read, where `depends` has their text alone; None: it has the tokens.
    """

    setting: Any
    key: Mapping[str, Any]
    measure: Callable[..., Row]
    depends: Sequence[Any] = ()
    by: Cell | None = None
    work: int = 1
    ids: str | None = None

    @property
    def name(self) -> str:
        return _name(self.key.values())

    @functools.cached_property
    def digest(self) -> str:
        """Equal ones measure the same, whatever the setting is called."""
        what = identity(self.setting)
        return digest([what, *self.depends] if self.depends else what)


class Latest:
    """Loads what a setting says, and keeps the last one; it goes before the next one comes."""

    def __init__(self, load: Callable[[Any], Any]) -> None:
        self.load, self.setting, self.model = load, None, None

    def __call__(self, setting: Any) -> Any:
        if self.model is None or self.setting != setting:
            self.setting = self.model = None
            self.model, self.setting = self.load(setting), setting
        return self.model


class Experiment:
    """Cells, and the rows that are there of them; `run` measures the others.

    Args:
        file: where rows are kept; what all of them share is its protocol.
        load: from a setting to its model.
        columns: the keys of every cell.
        cells: what is to be measured; default settings outermost, so that each is loaded once.
        about: put into every row: the command, versions.

    Raises:
        ValueError: a row of the same key was measured of another setting, text or model.
    """

    def __init__(
        self,
        file: RowFile,
        load: Callable[[Any], Any],
        columns: Sequence[str],
        cells: Iterable[Cell] = (),
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.file, self.load, self.columns, self.cells = file, Latest(load), columns, list(cells)
        self.about = dict(about or {})
        #: By the names of their cells.
        self.rows = self._named()
        for cell in self.cells:
            self._has(cell)

    @property
    def protocol(self) -> dict[str, Any]:
        """The settings that all rows share."""
        return self.file.head["protocol"]

    def name_of(self, row: Row) -> str:
        """That of a row's cell."""
        return _name(row.get(column) for column in self.columns)

    def _named(self) -> dict[str, Row]:
        return {self.name_of(row): row for row in self.file}

    def run(
        self,
        tell: Callable[[Row, bool], str] = lambda row, new: "",
        cells: Iterable[Cell] | None = None,
        total: int | None = None,
    ) -> list[Row]:
        """The rows of all cells, under one progress bar. What is missing is measured, and kept as soon as it is there.

        Several processes (see `processes.together`) take the next cells in turn, and the first keeps what all have found.

        Args:
            tell: from a row, and whether it was measured now, to a line that is printed; "" for none.
            cells: in place of the experiment's own. They may come from what was found before: each is asked for when the
                row of the one before is there.
            total: the work of all of them, where that is not known from a list.
        """
        cells = self.cells if cells is None else cells
        rank, processes = place()
        done: list[Cell] = []
        turn: list[Cell] = []
        with contextlib.ExitStack() as held:
            if rank == 0:
                held.enter_context(self.file.alone())
            self.rows = gathered(self._named())[0]  # as the first process has just read them: others may have ended since
            held.enter_context(_own_bar_alone())
            total = sum(cell.work for cell in self.cells) if total is None else total
            seen = rank == 0 and (sys.stderr.isatty() or "ipykernel" in sys.modules)
            bar = held.enter_context(tqdm(total=total, disable=not seen, bar_format=BAR))

            def told(cell: Cell, new: bool) -> None:
                done.append(cell)
                bar.update(cell.work)
                if rank == 0 and (line := tell(self.rows[cell.name], new)):
                    bar.write(f"{cell.name}: {line}")

            def measured() -> None:
                row = self._measured(turn[rank]) if rank < len(turn) else None
                for cell, found in zip(turn, gathered(row), strict=False):
                    self.rows[cell.name] = found
                    if rank == 0:
                        self.file.put(found)
                    told(cell, True)
                turn.clear()

            for cell in cells:
                if self._has(cell):
                    told(cell, False)
                    continue
                if turn and cell.by is not None and not self._has(cell.by):
                    measured()
                bar.set_description_str(cell.name)
                turn.append(cell)
                if len(turn) == processes:
                    measured()
            if turn:
                measured()
        return [self.rows[cell.name] for cell in done]

    def _has(self, cell: Cell) -> bool:
        """Tell whether a cell's row is there; ValueError: the row belongs to another cell, or to another tokenizer."""
        row = self.rows.get(cell.name)
        if row is not None and "digest" in row and row["digest"] != cell.digest:
            raise ValueError(
                f"{self.file.path} holds a row {cell.name!r} of another setting, formula, text or model; rows are not "
                "mixed: choose another folder, or another name for the setting"
            )
        if row is not None and cell.ids and row.get("ids", cell.ids) != cell.ids:  # a row may have none
            raise ValueError(
                f"{self.file.path} holds a row {cell.name!r} of other tokens: the tokenizer has changed since, and rows are "
                "not mixed: choose another folder, or measure with the tokenizer of before"
            )
        return row is not None

    def _measured(self, cell: Cell) -> Row:
        model = self.load(cell.setting)
        wall, cpu = time.monotonic(), time.process_time()
        dtype = {"dtype": str(model.dtype).removeprefix("torch.")} if hasattr(model, "dtype") else {}
        by = [self.rows[cell.by.name]] if cell.by else []
        row = {**cell.key, **dtype, **cell.measure(model, *by)}
        row |= {"what": cell.setting.to_dict(), "digest": cell.digest} | ({} if cell.ids is None else {"ids": cell.ids})
        row |= {"seconds": round(time.monotonic() - wall, 2), "cpu_seconds": round(time.process_time() - cpu, 2)}
        return {k: v for k, v in (row | self.about).items() if v is not None or k not in cell.key}


def _name(values: Iterable[Any]) -> str:
    return " | ".join(str(value) for value in values if value is not None)


BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"


@contextlib.contextmanager
def _own_bar_alone() -> Iterator[None]:
    """While open, transformers shows no bars of its own."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def digest(value: Any) -> str:
    """Twelve hexadecimal digits that change with any part of a JSON-ready value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def sha256_of(content: str, digits: int = 16) -> str:
    """The first digits of a text's SHA-256."""
    return hashlib.sha256(content.encode()).hexdigest()[:digits]


def identity(setting: Any) -> Any:
    """Return what tells settings apart, whatever their names: equal identities measure the same."""
    folders = (getattr(setting, "adapter", None), getattr(setting, "model", None))
    known = setting.to_dict() | {"weights": [fingerprint(path) for path in folders if path is not None]}
    own = [x for x in getattr(getattr(setting, "config", None), "methods", ()) if x.name not in METHODS]
    return known | ({"own": [[x.to_dict(), formula_of(type(x))] for x in own]} if own else {})


def formula_of(method: type) -> str:
    """Return the source of the functions of a method of one's own, by which an edited one is known; "" where there is none."""
    found = []
    for kind in method.__mro__:
        functions = [getattr(x, "fget", x) for x in vars(kind).values()] if not kind.__module__.startswith(PREFIX) else []
        for function in filter(inspect.isfunction, functions):
            with contextlib.suppress(OSError):  # a dataclass's own, or typed in where nothing keeps the lines
                found.append(inspect.getsource(function))
    return "".join(found)


def fingerprint(model: Any) -> str:
    """Return what tells checkpoints apart: a Hub name, a digest of a directory, or a loaded model's name and a digest."""
    if not isinstance(model, str):
        return f"{model.name_or_path or type(model).__name__}, loaded {digest(_in_memory(model))}"
    folder = Path(model)
    if not folder.is_dir():
        return model
    files = [
        (file, file.stat())
        for file in sorted(folder.resolve().iterdir())
        if file.suffix in (".safetensors", ".bin") or file.name in ("config.json", ADAPTER_FILE)
    ]
    facts = [[file.name, _sha256(file, stat.st_size, stat.st_mtime_ns)] for file, stat in files]
    return f"{folder.resolve().name} {digest(facts)}"


#: Integers of as many bytes.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _in_memory(model: Any) -> list[Any]:
    """What a loaded model computes by, as training or `apply` may have changed it: method, rotation and weights.

    Of weights that can be read (neither on disk alone, nor split or quantised) the sums of their bits: exact in any order, and
    made where they lie.
    """
    method, sums = running(model), {}
    for name, x in model.state_dict().items():
        if type(x) in (torch.Tensor, torch.nn.Parameter) and not x.is_meta and x.is_floating_point():
            sums[name] = int(x.detach().reshape(-1).view(INTEGERS[x.dtype.itemsize]).sum(dtype=torch.int64))
    return [method and method.to_dict(), rope.settings_of(model), sums]


@functools.lru_cache(maxsize=1024)
def _sha256(file: Path, size: int, changed: int) -> str:
    """Hash a file's content, once per process while its size and time of change stay: about three seconds a gigabyte."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
