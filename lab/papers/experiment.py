"""What the front knows of an experiment, and what tells its runs apart."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from hf_longattn.evaluation.rows import Row


@dataclass(frozen=True)
class Texts:
    """The text that an experiment trains on, and the one that it is measured on."""

    train: tuple[Path, ...] = ()
    heldout: Path | None = None

    def named(self) -> dict[str, str]:
        """The name of every file with the first digits of its SHA-256."""
        files = [*self.train, *([self.heldout] if self.heldout else [])]
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in files}


class Settings(SimpleNamespace):
    """Everything that decides a run's numbers, as experiments.yaml has it."""

    def but(self, **changes: Any) -> Settings:
        return Settings(**vars(self) | changes)


@dataclass(frozen=True)
class Run:
    """One training: a variant under a seed. A model that later experiments start from goes to `folder`, in `models`.

    Args:
        dtype: what training multiplies in.
    """

    variant: str
    seed: int
    settings: Settings
    folder: Path
    models: Path
    texts: Texts = Texts()
    dtype: str = "float32"


@dataclass(frozen=True)
class Experiment:
    """
    Args:
        quick: settings that take seconds, for tests.
        measure: trains and measures; returns what goes into the row's "measured".
        minutes: CPU minutes of one run on one thread, measured; the list uses it until rows say it themselves.
        needs: the experiment whose models this one starts from.
        dtype: "bfloat16": what training multiplies in where the CPU does so fast; else float32, always.
    """

    name: str
    variants: tuple[str, ...]
    settings: Settings
    quick: Settings
    measure: Callable[[Run], dict[str, Any]]
    about: str
    seeds: tuple[int, ...]
    minutes: float
    text: bool = False
    needs: str | None = None
    dtype: str = "float32"

    def runs(self) -> list[tuple[str, int]]:
        """Every variant of one seed before the next seed, so that what is there after an interruption compares."""
        return [(variant, seed) for seed in self.seeds for variant in self.variants]


LISTED: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("experiments.yaml").read_text(encoding="utf-8"))


def experiment(name: str, variants: Iterable[str], measure: Callable[[Run], dict[str, Any]]) -> Experiment:
    """An experiment of experiments.yaml, which says the rest."""
    listed = LISTED[name]
    settings = Settings(**listed["settings"])
    read = {"settings": settings, "quick": settings.but(**listed["quick"]), "seeds": tuple(listed["seeds"])}
    return Experiment(name, tuple(variants), measure=measure, **listed | read)


def require(model: Path, command: str, file: str = "config.json") -> None:
    """Raise ValueError, with the command that makes it, if a model that an experiment starts from is not there."""
    if not (model / file).is_file():
        raise ValueError(
            f"{model} holds no model to start from; make it with: {command} "
            "(and --again, if its row is there and the model is not)"
        )


def refuse_other_settings(
    rows: Sequence[Row], settings: Settings, texts: dict[str, str], path: Path, dtype: str = "float32", before: str = "float32"
) -> None:
    """Raise ValueError if a row was made with other settings, texts or precision than a run would have now: they would not
    compare. `before`: the precision of rows that do not say theirs.
    """
    now = vars(settings) | {"texts": texts, "dtype": dtype}
    for row in rows:
        then = row["settings"] | {"texts": row["texts"], "dtype": row.get("dtype", before)}
        if changed := {k: v for k, v in now.items() if then.get(k) != v}:
            changes = ", ".join(f"{k}: {then.get(k)!r} there, {v!r} now" for k, v in changed.items())
            raise ValueError(
                f"{path} holds a run of {row['variant']!r}, seed {row['seed']}, with other settings ({changes}): they would "
                "not compare. Choose another folder with --results, or run them anew with --again"
                + (f"; or --dtype {then['dtype']}, however slow" if "dtype" in changed else "")
            )
