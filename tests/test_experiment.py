"""One experiment, one row: identity, refusal, order, resumption and what a row says of itself."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_longattn.evaluation import Cell, Experiment
from hf_longattn.evaluation.rows import RowFile
from hf_longattn.evaluation.settings import Setting

SETTINGS = [Setting("unmodified"), Setting("mine", "scale_invariant", {"tau": 3.0})]


def experiment(file: Path | None, measures: Any, settings: Any = SETTINGS, **more: Any) -> tuple[Experiment, list[str]]:
    """And the settings that it has loaded so far."""
    loaded: list[str] = []

    def load(setting: Setting) -> Any:
        loaded.append(setting.name)
        return SimpleNamespace(name=setting.name, dtype=torch.float32)

    rows = RowFile(file, {"prefix": None}, protocol=more.pop("protocol", {"model": "m"}))
    return Experiment(settings, ["a", "b"], measures, rows, load, about={"command": "this"}, **more), loaded


def lengths(setting: Setting, texts: Any, calls: list[Any], depends: Any = ()) -> Any:
    for length in (1, 2):
        for text in texts:
            key = {"length": length, "which": text}
            yield Cell(setting, key, partial(measured, calls, setting.name, text, length), depends)


def measured(calls: list[Any], *what: Any) -> dict[str, Any]:
    if len(calls) == 5:
        raise KeyboardInterrupt
    calls.append(what[:-1])
    return {"loss": float(what[-2])}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_an_interrupted_experiment_keeps_its_rows_and_goes_on(tmp_path: Path, name: str) -> None:
    calls: list[Any] = []
    stopped, loaded = experiment(tmp_path / name, [partial(lengths, calls=calls)])
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    assert loaded == ["unmodified", "mine"]
    told: list[tuple[str, bool]] = []
    again, loaded = experiment(tmp_path / name, [partial(lengths, calls=calls[:0])])
    again.done = lambda row, new: told.append((again.name_of(row), new))
    rows = again.run()
    assert loaded == ["mine"]
    assert [new for _, new in told] == [False] * 5 + [True] * 3
    assert [again.name_of(row) for row in rows] == [cell.name for cell in again.cells] == [name for name, _ in told]
    assert rows[5] | {"seconds": 0, "cpu_seconds": 0} == {
        "setting": "mine", "length": 1, "which": "b", "dtype": "float32", "loss": 1.0, "what": SETTINGS[1].to_dict(),
        "digest": again.cells[5].digest, "seconds": 0, "cpu_seconds": 0, "command": "this",
    }  # fmt: skip
    assert experiment(tmp_path / name, [partial(lengths, calls=[])])[0].run() == rows  # nothing is left to measure


def test_an_order_sorts_the_cells() -> None:
    calls: list[Any] = []
    this, loaded = experiment(None, [partial(lengths, calls=calls)], order=lambda cell: cell.key["length"])
    assert [cell.name for cell in this.cells][:3] == ["unmodified | 1 | a", "unmodified | 1 | b", "mine | 1 | a"]
    order: list[str] = []
    this.done = lambda row, new: order.append(row["setting"])
    with pytest.raises(KeyboardInterrupt):
        this.run()
    assert order == ["unmodified", "unmodified", "mine", "mine", "unmodified"]
    assert loaded == ["unmodified", "mine", "unmodified"]


def test_a_row_that_another_is_measured_by_comes_first() -> None:
    def cells(setting: Any, texts: Any) -> Any:
        yield Cell(setting, {"which": "before"}, lambda model: {"loss": 0.0})
        found = Cell(SETTINGS[1], {"which": "a"}, lambda model: {"loss": 2.0})
        read = Cell(setting, {"which": "a"}, lambda model, row: {"loss": row["loss"] + 1.0}, by=found)
        yield found if setting == SETTINGS[1] else read

    this, loaded = experiment(None, [cells])
    assert [row["loss"] for row in this.run()] == [0.0, 3.0, 0.0, 2.0]
    assert loaded == ["mine", "unmodified", "mine"]


def test_another_setting_another_text_and_another_protocol_are_refused_and_rows_of_no_digest_are_not(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    first, _ = experiment(file, [partial(lengths, calls=[], depends=["text"])], SETTINGS[1:])
    first.run()
    other = [Setting("mine", "scale_invariant", {"tau": 4.0})]
    for settings, depends in ((other, ["text"]), (SETTINGS[1:], ["another"])):
        with pytest.raises(ValueError, match=r"holds a row 'mine \| 1 \| a' of another setting, text or model"):
            experiment(file, [partial(lengths, calls=[], depends=depends)], settings)
    assert json.loads((tmp_path / "protocol.json").read_text()) == {"model": "m"}
    for protocol, said in (({"model": "n"}, "model: 'm' there, 'n' now"), ({"prefix": "x"}, "prefix: None there, 'x' now")):
        with pytest.raises(ValueError, match=said):
            experiment(file, [], protocol=protocol)
    more, _ = experiment(file, [], protocol={"near": 4})  # joins, and keeps what is there
    assert more.protocol == {"model": "m", "near": 4}
    older = [{k: v for k, v in json.loads(line).items() if k != "digest"} for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row) + "\n" for row in older))
    assert experiment(file, [partial(lengths, calls=[])], other)[0].run() == older
