"""The programs of lab/pretrained: the shared runner end to end on a tiny model, and committed rows that are not run again."""

from __future__ import annotations

import json
import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_longattn import LongAttnConfig
from hf_longattn.training import load_recipe
from lab.pretrained import answers, methods_trained, needles_on_model, reading_far, regret, trained
from lab.pretrained.answers import ANSWERS
from lab.pretrained.copies import COPIES
from lab.pretrained.longer_on_model import LONGER
from lab.pretrained.methods_on_model import METHODS
from lab.pretrained.needles_on_model import NEEDLES_ON_MODEL
from lab.pretrained.reading_far import READING
from lab.pretrained.runner import RESULTS, Program, Text, choices
from recipes.models import random_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = random_model(tmp_path_factory.mktemp("model"))
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for layer in loaded.model.layers:
        layer.self_attn.q_proj.weight.data.mul_(1000)  # attention far from uniform
    loaded.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "novel.txt"
    file.write_text("".join(random.Random(0).choices("abcdefgh ", k=9800)))
    return file


def run(program: Program, result: Path, model: Path, text: Path, *words: str) -> list[dict[str, Any]]:
    common = ["--model", str(model), "--text", str(text), "--result", str(result), "--dtype", "float32", *words]
    program.main("", common)
    return json.loads(result.read_text(encoding="utf-8"))["rows"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "length", "only", "names"),
    [
        (METHODS, 1536, r"^unmod|^scale_invariant\(\), cal", ["unmodified", "scale_invariant(), calibrated"]),
        (COPIES, 4096, "^unmod|^rerope.*1024.$", ["rerope(window 1024)", "unmodified"]),
        (READING, 4096, "^rerope.*1024.$|YaRN × 2", ["rerope(window 1024)", "YaRN × 2"]),
        (NEEDLES_ON_MODEL, 4096, "^rerope.*1024.$|YaRN × 2", ["YaRN × 2", "rerope(window 1024)"]),
        (ANSWERS, 4096, "^unmod|^rerope.*1024.$", ["unmodified", "rerope(window 1024)"]),
    ],
    ids=("methods", "copies", "reading", "needles", "answers"),
)
def test_a_program_measures_what_is_missing(
    program: Program,
    length: int,
    only: str,
    names: list[str],
    tmp_path: Path,
    model: Path,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading_far, "PREFILL", LongAttnConfig.preset("streaming", window=1024))  # the model knows 2,048
    result, words = tmp_path / "rows.json", ["--length", str(length), "--only", only]
    words += ["--copies", "4"] if program is COPIES else []
    rows = run(program, result, model, text, *words)
    assert [row["name"] for row in rows] == names
    assert all(row["dtype"] == "float32" and row["length"] == length and row["digest"] for row in rows)
    assert all(row["command"].startswith(f"python lab/pretrained/{program.file}.py --model random") for row in rows)
    assert ["calibration" in row for row in rows] == ["calibrated" in name for name in names]
    measured = [row.get("copying") or row.get("list", {}).get("loss") or row["loss"] for row in rows]
    assert measured[0] != measured[1]
    before = result.read_text(encoding="utf-8")
    assert run(program, result, model, text, *words) == rows
    assert result.read_text(encoding="utf-8") == before  # nothing is measured twice


@pytest.mark.parametrize("program", [LONGER, METHODS, COPIES, READING], ids=lambda p: p.file)
def test_committed_rows_are_not_measured_again(program: Program, tmp_path: Path) -> None:
    """Every row of a setting that is still listed is found by its cell, under the arguments that made it."""
    whole_file = json.loads(program.result.read_text(encoding="utf-8"))
    rows = [r for r in whole_file["rows"] if "yarn_far" not in r["name"]]  # a method that was removed
    kept = whole_file["rows"] = [{k: v for k, v in r.items() if k != "digest"} for r in rows]  # of the weights
    result = tmp_path / "rows.json"
    result.write_text(json.dumps(whole_file), encoding="utf-8")
    found = 0
    for length, name, dtype, adapter, whole, segment in {
        (r["length"], r.get("text") or r["book"], r["dtype"], r.get("adapter"), r.get("whole"), r.get("segment")) for r in kept
    }:
        args = Namespace(model=Path("SmolLM2-135M-Instruct"), result=result, only="", dtype=dtype, device="cpu")
        args.adapter, args.whole, args.segment, args.length = adapter and Path(adapter), whole, segment, [length]
        experiment = program.experiment(Text(Path(f"{name}.txt"), torch.zeros(1, 0), length, 8192), args)
        found += sum(cell.name in experiment.rows for cell in experiment.cells)
    assert found >= len(kept) - NOT_LISTED[program.file]


#: Rows of `longer_on_model` at lengths, and of `reading_far` under windows, that their lists have no more.
NOT_LISTED = {"longer_on_model": 3, "methods_on_model": 1, "copies": 0, "reading_far": 3}


def test_needles_stand_where_the_row_says(text: Path, model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = tokenizer(text.read_text(), return_tensors="pt")["input_ids"]
    hay = needles_on_model.haystack(Text(text, tokens, 6000, 2048), tokenizer)
    assert hay.ids.shape == (1, 6000)
    written = tokenizer.decode(hay.ids[0])
    assert len({n.city for n in hay.needles}) == needles_on_model.NEEDLES
    for needle, depth in zip(hay.needles, hay.depths, strict=True):
        assert written.index(needle.sentence) / 6000 == pytest.approx(depth, abs=0.02)
    for number, chain in hay.chains:
        places = [
            written.index(f" VAR {a} = {b}.") for a, b in zip(chain, [number, *(f"VAR {n}" for n in chain)], strict=False)
        ]
        assert places == sorted(places)


def test_facts_stand_where_the_row_says(text: Path, model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = tokenizer(text.read_text(), return_tensors="pt")["input_ids"]
    made = answers.asked(Text(text, tokens, 6000, 2048), tokenizer)
    assert made.ids.shape == (1, 6000)
    written = tokenizer.decode(made.ids[0])
    assert len(set(made.questions)) == len(set(made.values)) == answers.FACTS
    for question, value, depth in zip(made.questions, made.values, made.depths, strict=True):
        assert written.count(question) == 1
        assert written.index(f" {question} {value}.") / 6000 == pytest.approx(depth, abs=0.12)


def test_regret_is_what_a_rule_is_behind_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(rope: list[Any], config: dict[str, Any] | None, prose: float, copying: float, **more: Any) -> dict[str, Any]:
        case = {"model": "m", "text": "t", "length": 2048, "trained": 1024, "copies": [[9, 5], [9, 1500]]}
        return case | {"rope": rope, "config": config, "prose": [9.0, prose], "copying": [9.0, copying]} | more

    remap = {"positions": {"name": "rerope", "window": 512}}
    rows = [row(["yarn", 2.0], None, 3.0, 2.0), row([], remap, 3.2, 1.0), row([], remap, 0.0, 0.0, adapter="a")]
    monkeypatch.setattr(regret, "MEASURED", ("one",))
    monkeypatch.setattr(regret, "rows_of", lambda pattern: rows)
    found = regret.regrets()
    assert found["YaRN × length"] == {0: pytest.approx((0.0, 1.0, 0.4))}
    assert found["`extend`"] == found["`rerope`"] == {0: pytest.approx((0.2, 0.0, 0.0))}
    assert regret.apart(found["YaRN × length"], found["`extend`"]) == [pytest.approx(0.4)]
    assert not found["unmodified"]
    windows = [("self_extend", 128), ("self_extend", 512), ("rerope", 256), ("streaming", 512)]
    named = [regret.methods(row([], {"positions": {"name": name, "window": w}}, 0.0, 0.0)) for name, w in windows]
    assert named == ["self_extend", "self_extend 512", "rerope 256", "streaming 512"]
    stronger = {"positions": {"name": "rerope", "window": 512}, "temperature": {"name": "logn", "exponent": 2.0}}
    assert regret.methods(row([], stronger, 0.0, 0.0, name="logn squared")) == "logn squared"


def test_every_list_of_settings_can_be_read() -> None:
    symbols = dict.fromkeys(
        ("half", "quarter", "eighth", "trained", "three_quarters", "factor", "halved", "double", "group"), 4
    )
    for file in sorted((RESULTS.parent / "pretrained" / "settings").glob("*.yaml")):
        if not file.stem.startswith(("report", "trained")):
            assert [c.name for c in choices(file.stem, **symbols)]


def test_every_method_that_is_trained_has_a_run_and_all_of_them_a_control(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = list(methods_trained.METHODS)
    assert methods[0] == "null"
    names = [c.name for c in methods_trained.settings(None)]  # type: ignore[arg-type]
    assert names[:2] == ["unmodified", "control, trained"]
    assert names[2:] == [name for method in methods[1:] for name in (method, f"{method}, trained")]
    for run in methods_trained.METHODS.values():
        recipe, *overrides = trained.RUNS[run]["train"]
        assert load_recipe(recipe, [*overrides, "model=x", "data=x"]).seed == 42
    table = methods_trained.contents()["trained methods less"]
    monkeypatch.setattr("lab.pretrained.runner.rows_of", lambda pattern: [])
    assert table("| control, trained") == "*Not run yet.*"
    row = {"text": "t", "trained": 64, "copies": [[9, 50], [8, 60]]}
    rows = [
        row | {"name": "control, trained", "copying": [1.0, 1.0], "prose": [2.0, 2.0]},
        row | {"name": "logn, trained", "copying": [0.5, 0.75], "prose": [2.5, 2.25]},
    ]
    monkeypatch.setattr("lab.pretrained.runner.rows_of", lambda pattern: rows)
    assert "| `logn, trained` | -0.375 ± " in table("| control, trained")


@pytest.mark.slow
def test_methods_are_trained_where_they_are_not_yet_and_measured(model: Path, text: Path, tmp_path: Path) -> None:
    novel = tmp_path / "novel.txt"
    novel.write_text(text.read_text())
    own = ["--train", str(novel), "--keep", str(tmp_path / "kept"), "--steps", "1", "--only", "^infoscale|^control"]
    rows = run(methods_trained.PROGRAM, tmp_path / "rows.json", model, text, *own)
    assert [r["name"] for r in rows] == ["control, trained", "infoscale:clamp=false", "infoscale:clamp=false, trained"]
    assert [len(r["copying"]) for r in rows] == [24] * 3
    assert {p.name for p in (tmp_path / "kept").iterdir()} == {"method-control", "method-infoscale"}
    for row in rows:
        assert "--train novel.txt --keep kept" in row["command"]
        assert str(tmp_path) not in row["command"]
