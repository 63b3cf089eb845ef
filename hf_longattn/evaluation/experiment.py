"""An experiment: settings of a model, measured on texts, kept as rows that say how. An interrupted one goes on."""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .processes import gathered, place
from .rows import Row, RowFile


@dataclass(frozen=True)
class Cell:
    """One row to measure.

    Args:
        setting: what is loaded for it: a `Setting`, or anything with a name and to_dict().
        key: what its row is found by, beside the setting's name; None stands for a column that the row lacks.
        measure: from the loaded model (and the row of `by`) to what goes into the row, JSON-ready.
        depends: what the numbers depend on beside the setting, JSON-ready: part of the row's digest.
        column: what the setting's name stands under in the row.
        by: another cell of the experiment, whose row `measure` needs: it is measured before.
    """

    setting: Any
    key: Mapping[str, Any]
    measure: Callable[..., Row]
    depends: Sequence[Any] = ()
    column: str = "setting"
    by: Cell | None = None

    @property
    def columns(self) -> dict[str, Any]:
        """What tells its row from all others."""
        return {self.column: self.setting.name, **self.key}

    @property
    def name(self) -> str:
        return " | ".join(map(str, self.columns.values()))

    @functools.cached_property
    def digest(self) -> str:
        """Equal ones measure the same, whatever the setting is called."""
        what = identity(self.setting)
        return digest([what, *self.depends] if self.depends else what)


#: From a setting and the experiment's texts to the rows that are measured of them.
Measure = Callable[[Any, Sequence[Any]], Iterable[Cell]]


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
    """Every setting under every measure of the texts; `run` measures the rows that are not there.

    Args:
        settings: see `Cell`.
        texts: as the measures want them.
        measures: see `Measure`.
        rows: where rows are kept; what all of them share is its protocol.
        load: from a setting to its model.
        about: put into every row: the command, versions.
        done: told of every row when it is there, and whether it was measured now.
        order: of the cells; default settings outermost, so that each is loaded once.

    Raises:
        ValueError: a row of the same key was measured of another setting, text or model.
    """

    def __init__(
        self,
        settings: Iterable[Any],
        texts: Sequence[Any],
        measures: Sequence[Measure],
        rows: RowFile,
        load: Callable[[Any], Any],
        *,
        about: Mapping[str, Any] | None = None,
        done: Callable[[Row, bool], None] = lambda row, new: None,
        order: Callable[[Cell], Any] | None = None,
    ) -> None:
        self.file, self.about, self.done = rows, dict(about or {}), done
        self.load = load if isinstance(load, Latest) else Latest(load)
        cells = [cell for setting in settings for measure in measures for cell in measure(setting, texts)]
        self.cells = cells if order is None else sorted(cells, key=order)
        self.columns = list(dict.fromkeys(column for cell in cells for column in cell.columns))
        #: By the names of their cells.
        self.rows = {self.name_of(row): row for row in rows}
        for cell in self.cells:
            kept = self.rows.get(cell.name, {})
            if "digest" in kept and kept["digest"] != cell.digest:
                raise ValueError(
                    f"{rows.path} holds a row {cell.name!r} of another setting, text or model; rows are not mixed: choose "
                    "another folder, or another name for the setting"
                )

    @property
    def protocol(self) -> dict[str, Any]:
        """What all rows share."""
        return self.file.head["protocol"]

    def name_of(self, row: Row) -> str:
        """That of a row's cell."""
        return " | ".join(str(row.get(column)) for column in self.columns)

    def run(self) -> list[Row]:
        """The rows of all cells. What is missing is measured, and each is kept as soon as it is there.

        Several processes (see `processes.together`) take the next ones in turn, and the first keeps what all have found.
        """
        rank, processes = place()
        missing = [cell for cell in self.cells if cell.name not in self.rows]
        for cell in self.cells:
            if rank == 0 and cell.name in self.rows:
                self.done(self.rows[cell.name], False)
        needed = {cell.by.name for cell in self.cells if cell.by}
        for part in ([c for c in missing if c.name in needed], [c for c in missing if c.name not in needed]):
            for n in range(0, len(part), processes):
                turn = part[n : n + processes]
                row = self._measured(turn[rank]) if rank < len(turn) else None
                for cell, found in zip(turn, gathered(row), strict=False):
                    self.rows[cell.name] = found
                    if rank == 0:
                        self.file.put(found)
                        self.done(found, True)
        return [self.rows[cell.name] for cell in self.cells]

    def _measured(self, cell: Cell) -> Row:
        model = self.load(cell.setting)
        wall, cpu = time.monotonic(), time.process_time()
        dtype = {"dtype": str(model.dtype).removeprefix("torch.")} if hasattr(model, "dtype") else {}
        by = [self.rows[cell.by.name]] if cell.by else []
        row = {**cell.columns, **dtype, **cell.measure(model, *by)}
        row |= {"what": cell.setting.to_dict(), "digest": cell.digest}
        row |= {"seconds": round(time.monotonic() - wall, 2), "cpu_seconds": round(time.process_time() - cpu, 2)}
        return {k: v for k, v in (row | self.about).items() if v is not None or k not in cell.key}


def digest(value: Any) -> str:
    """Twelve hexadecimal digits that change with any part of a JSON-ready value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def identity(setting: Any) -> Any:
    """What tells settings apart whatever their names: equal ones measure the same."""
    folders = (getattr(setting, "adapter", None), getattr(setting, "model", None))
    return setting.to_dict() | {"weights": [fingerprint(path) for path in folders if path is not None]}


def fingerprint(model: str) -> str:
    """What tells checkpoints apart: a Hub name as it is; of a directory a digest of its config and weights, read whole."""
    folder = Path(model)
    if not folder.is_dir():
        return model
    files = [
        (file, file.stat())
        for file in sorted(folder.resolve().iterdir())
        if file.suffix in (".safetensors", ".bin") or file.name in ("config.json", "adapter_config.json")
    ]
    facts = [[file.name, _sha256(file, stat.st_size, stat.st_mtime_ns)] for file, stat in files]
    return f"{folder.resolve().name} {digest(facts)}"


@functools.lru_cache(maxsize=1024)
def _sha256(file: Path, size: int, changed: int) -> str:
    """Of a file's content, once per process while size and time of change stay: some three seconds a gigabyte."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
