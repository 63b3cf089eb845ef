"""What the front knows of an experiment, and the file in which its finished runs are kept."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Texts:
    """The text that an experiment trains on, and the one that it is measured on."""

    train: tuple[Path, ...] = ()
    heldout: Path | None = None

    def named(self) -> dict[str, str]:
        """The name of every file with the first digits of its SHA-256."""
        files = [*self.train, *([self.heldout] if self.heldout else [])]
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in files}


@dataclass(frozen=True)
class Run:
    """One training: a variant under a seed. A model that later experiments start from goes to `folder`, in `models`.

    Args:
        dtype: what training multiplies in.
    """

    variant: str
    seed: int
    settings: Any
    folder: Path
    models: Path
    texts: Texts = Texts()
    dtype: str = "float32"


@dataclass(frozen=True)
class Experiment:
    """
    Args:
        minutes: CPU minutes of one run on one thread, measured; the list uses it until rows say it themselves.
        settings, quick: dataclasses; everything that decides a run's numbers, and the same in seconds, for tests.
        measure: trains and measures; returns what goes into the row's "measured".
        needs: the experiment whose models this one starts from.
        dtype: "bfloat16": what training multiplies in where the CPU does so fast; else float32, always.
    """

    name: str
    about: str
    variants: tuple[str, ...]
    seeds: tuple[int, ...]
    minutes: float
    settings: Any
    quick: Any
    measure: Callable[[Run], dict[str, Any]]
    text: bool = False
    needs: str | None = None
    dtype: str = "float32"

    def runs(self) -> list[tuple[str, int]]:
        """Every variant of one seed before the next seed, so that what is there after an interruption compares."""
        return [(variant, seed) for seed in self.seeds for variant in self.variants]


class Rows:
    """The rows of one experiment: JSON lines, one for each finished run.

    Raises:
        ValueError: the file holds a line that is no row.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.jsonl"
        self.all = self._read()

    def _read(self) -> list[Row]:
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8").split("\n")[:-1]  # what follows the last line end was cut off
        try:
            return [json.loads(line) for line in lines]
        except json.JSONDecodeError:
            raise ValueError(f"{self.path} holds a line that is no row: remove it") from None

    def find(self, variant: str, seed: int) -> Row | None:
        return next((row for row in self.all if (row["variant"], row["seed"]) == (variant, seed)), None)

    def put(self, row: Row) -> None:
        """Add a row, in place of the one of the same variant and seed; all or nothing."""
        self.all = [r for r in self._read() if (r["variant"], r["seed"]) != (row["variant"], row["seed"])] + [row]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text("".join(json.dumps(r) + "\n" for r in self.all), encoding="utf-8")
        os.replace(partial, self.path)


def refuse_other_settings(
    rows: Sequence[Row], settings: Any, texts: dict[str, str], path: Path, dtype: str = "float32", before: str = "float32"
) -> None:
    """Raise ValueError if a row was made with other settings, texts or precision than a run would have now: they would not
    compare. `before`: the precision of rows that do not say theirs.
    """
    now = json.loads(json.dumps(asdict(settings))) | {"texts": texts, "dtype": dtype}
    for row in rows:
        then = row["settings"] | {"texts": row["texts"], "dtype": row.get("dtype", before)}
        if changed := {k: v for k, v in now.items() if then.get(k) != v}:
            told = ", ".join(f"{k}: {then.get(k)!r} there, {v!r} now" for k, v in changed.items())
            raise ValueError(
                f"{path} holds a run of {row['variant']!r}, seed {row['seed']}, with other settings ({told}): they would not "
                "compare. Choose another folder with --results, or run them anew with --again"
                + (f"; or --dtype {then['dtype']}, however slow" if "dtype" in changed else "")
            )
