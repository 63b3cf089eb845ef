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


def experiment(file: Path | None, cells: Any, settings: Any = SETTINGS, **more: Any) -> tuple[Experiment, list[str]]:
    """Cells of each of the settings, in an experiment; and the settings that it has loaded so far."""
    loaded: list[str] = []

    def load(setting: Setting) -> Any:
        loaded.append(setting.name)
        return SimpleNamespace(name=setting.name, dtype=torch.float32)

    rows = RowFile(file, protocol=more.pop("protocol", {"model": "m"}))
    listed = [cell for setting in settings for cell in cells(setting, ["a", "b"])]
    return Experiment(rows, load, ("setting", "length", "which"), listed, {"command": "this"}, **more), loaded


def lengths(setting: Setting, texts: Any, calls: list[Any], depends: Any = ()) -> Any:
    for length in (1, 2):
        for text in texts:
            key = {"setting": setting.name, "length": length, "which": text}
            yield Cell(setting, key, partial(measured, calls, setting.name, text, length), depends)


def measured(calls: list[Any], *what: Any) -> dict[str, Any]:
    if len(calls) == 5:
        raise KeyboardInterrupt
    calls.append(what[:-1])
    return {"loss": float(what[-2])}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_an_interrupted_experiment_keeps_its_rows_and_goes_on(tmp_path: Path, name: str) -> None:
    calls: list[Any] = []
    stopped, loaded = experiment(tmp_path / name, partial(lengths, calls=calls))
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    assert loaded == ["unmodified", "mine"]
    told: list[tuple[str, bool]] = []
    again, loaded = experiment(tmp_path / name, partial(lengths, calls=calls[:0]))
    rows = again.run(lambda row, new: told.append((again.name_of(row), new)) or "")
    assert loaded == ["mine"]
    assert [new for _, new in told] == [False] * 5 + [True] * 3
    assert [again.name_of(row) for row in rows] == [cell.name for cell in again.cells] == [name for name, _ in told]
    assert rows[5] | {"seconds": 0, "cpu_seconds": 0} == {
        "setting": "mine", "length": 1, "which": "b", "dtype": "float32", "loss": 1.0, "what": SETTINGS[1].to_dict(),
        "digest": again.cells[5].digest, "seconds": 0, "cpu_seconds": 0, "command": "this",
    }  # fmt: skip
    assert experiment(tmp_path / name, partial(lengths, calls=[]))[0].run() == rows  # nothing is left to measure


def test_a_row_that_another_is_measured_by_comes_first() -> None:
    def cells(setting: Any, texts: Any) -> Any:
        found = Cell(SETTINGS[1], {"setting": "mine", "length": 1, "which": "a"}, lambda model: {"loss": 2.0})
        key = {"setting": setting.name, "length": 1, "which": "a"}
        yield found if setting == SETTINGS[1] else Cell(setting, key, lambda model, row: {"loss": row["loss"] + 1.0}, by=found)

    this, loaded = experiment(None, cells, SETTINGS[::-1])
    assert [row["loss"] for row in this.run()] == [2.0, 3.0]
    assert loaded == ["mine", "unmodified"]


def test_what_comes_next_may_depend_on_what_was_found() -> None:
    this, loaded = experiment(None, lambda *_: [])

    def cells() -> Any:
        for n in range(9):
            key = {"setting": "mine", "length": n, "which": "a"}
            yield Cell(SETTINGS[1], key, lambda model, n=n: {"loss": float(n)})
            if this.rows[f"mine | {n} | a"]["loss"] == 2:
                return

    assert [row["loss"] for row in this.run(cells=cells(), total=9)] == [0.0, 1.0, 2.0]
    assert loaded == ["mine"]


def test_one_process_measures_into_a_file(tmp_path: Path) -> None:
    this, _ = experiment(tmp_path / "out" / "rows.jsonl", partial(lengths, calls=[]))
    with this.file.alone(), pytest.raises(ValueError, match=r"another command is measuring into .*out: wait for it"):
        this.run()
    assert not (tmp_path / "out").exists()


def test_what_another_process_measured_meanwhile_is_not_measured_again(tmp_path: Path) -> None:
    calls: list[Any] = []
    of = partial(lengths, calls=calls)
    two = [experiment(tmp_path / "rows.jsonl", of, SETTINGS[1:])[0] for _ in range(2)]  # both have read the file
    first, second = (this.run() for this in two)
    assert first == second
    assert len(calls) == len(first) == len((tmp_path / "rows.jsonl").read_text().splitlines())


def rows_there(file: Path) -> list[Any]:
    return [row["n"] for row in RowFile(file, protocol={"m": 1})]


def test_a_row_is_added_without_those_before_being_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.jsonl"
    rows, other = (RowFile(file, protocol={"m": 1}) for _ in range(2))
    rows.put({"n": 0})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} is read whole"))
        rows.put({"n": 1})
        rows.put({"n": 2}, {"n": 3})
    assert rows_there(file) == [row["n"] for row in rows] == [0, 1, 2, 3]
    other.put({"n": 4})  # it has not seen these
    rows.put({"n": 5})
    rows.put({"n": 6}, instead_of={"n": 0})
    other.put({"n": 7})
    assert rows_there(file) == [row["n"] for row in other] == [1, 2, 3, 4, 5, 6, 7]
    (tmp_path / "protocol.json").write_text('{"m": 2}')
    with pytest.raises(ValueError, match="m: 2 there, 1 now"):
        other.put({"n": 8})


@pytest.mark.parametrize("cut", [1, 5])
def test_a_row_goes_behind_whole_rows(tmp_path: Path, cut: int) -> None:
    """A kill may leave a part of a line, or a line without its end."""
    file = tmp_path / "rows.jsonl"
    RowFile(file, protocol={"m": 1}).put({"n": 0}, {"n": 1})
    file.write_bytes(file.read_bytes()[:-cut])
    rows = RowFile(file, protocol={"m": 1})
    for n in (2, 3):
        rows.put({"n": n})
    assert rows_there(file) == [0, *([1] if cut == 1 else []), 2, 3]


def test_a_row_that_has_no_room_leaves_none_of_it(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    file = tmp_path / "rows.jsonl"
    rows = RowFile(file, protocol={"m": 1})
    rows.put({"n": 0})
    before, limits = file.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 9, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            rows.put({"n": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_bytes() == before
    rows.put({"n": 2})
    assert rows_there(file) == [0, 2]


def test_another_setting_another_text_and_another_protocol_are_refused_and_rows_of_no_digest_are_not(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    first, _ = experiment(file, partial(lengths, calls=[], depends=["text"]), SETTINGS[1:])
    first.run()
    other = [Setting("mine", "scale_invariant", {"tau": 4.0})]
    for settings, depends in ((other, ["text"]), (SETTINGS[1:], ["another"])):
        with pytest.raises(ValueError, match=r"holds a row 'mine \| 1 \| a' of another setting, formula, text or model"):
            experiment(file, partial(lengths, calls=[], depends=depends), settings)
    assert json.loads((tmp_path / "protocol.json").read_text()) == {"model": "m"}
    with pytest.raises(ValueError, match="model: 'm' there, 'n' now"):
        experiment(file, lambda *_: [], protocol={"model": "n"})
    more, _ = experiment(file, lambda *_: [], protocol={"near": 4})  # joins, and keeps what is there
    assert more.protocol == {"model": "m", "near": 4}
    older = [
        {k: v for k, v in json.loads(line).items() if k not in ("digest", "crc32")} for line in file.read_text().splitlines()
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in older))
    assert experiment(file, partial(lengths, calls=[]), other)[0].run() == older
