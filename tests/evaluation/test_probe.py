"""The probe of far distances: a jump in position_ids in place of a long text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from helpers import close, stock, tokens
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from typer.testing import CliRunner

import hf_longattn
from hf_longattn.cli import app
from hf_longattn.evaluation import token_losses
from hf_longattn.evaluation.measures.copies import PASSAGE, SKIP
from hf_longattn.evaluation.measures.probe import AFTER, BEFORE, distances_to, passages, probe
from hf_longattn.evaluation.statistics import mean_interval

LEAST = BEFORE + AFTER


def fresh() -> PreTrainedModel:
    return stock("llama", max_position_embeddings=4096)


def text() -> torch.Tensor:
    return tokens(2, LEAST)


def test_without_a_jump_it_is_a_text_read_in_one_pass() -> None:
    model, ids = fresh(), text()
    losses = token_losses(model, torch.cat([ids, ids[:, :PASSAGE]], 1))
    result = probe(model, ids, [LEAST])
    close(result.text[:, 0], losses[:, BEFORE + 1 : LEAST].mean(1), 1e-5)
    close(result.copies[:, 0], losses[:, LEAST + SKIP :].mean(1), 1e-5)


@pytest.mark.slow
def test_a_cap_on_distances_shows_as_a_constant() -> None:
    model, ids = fresh(), text()
    plain = probe(model, ids, [9000, 20000]).text
    assert (plain[:, 0] - plain[:, 1]).abs().max() > 1e-3
    capped = probe(hf_longattn.apply(model, "rerope", window=600), ids, [9000, 20000])
    close(capped.text[:, 0], capped.text[:, 1], 1e-5)
    close(capped.copies[:, 0], capped.copies[:, 1], 1e-5)
    (first, second) = capped.rows()
    assert first["distance"] == 9000
    assert first["text"][0] == pytest.approx(second["text"][0], abs=1e-5)
    assert first["copy"][0] == pytest.approx(float(capped.copies[:, 0].mean()), abs=1e-5)


def test_distances_and_passages() -> None:
    assert distances_to(8000, 3) == (1280, 4640, 8000)
    ids = torch.arange(6000)[None]
    assert passages(ids, 3)[:, 0].tolist() == [0, 2360, 4720]
    starts = passages(ids, 3, seed=0)[:, 0].tolist()
    assert all(2000 * n <= start <= 2000 * (n + 1) - LEAST for n, start in enumerate(starts))
    assert passages(ids, 3, seed=0)[:, 0].tolist() == starts != passages(ids, 3, seed=1)[:, 0].tolist()
    assert torch.equal(passages(ids, 3, seed=0)[1], torch.arange(starts[1], starts[1] + LEAST))
    with pytest.raises(ValueError, match="need a text of 7680 tokens, not 6000"):
        passages(ids, 6)
    with pytest.raises(ValueError, match="from 1280 on, not 1000"):
        distances_to(1000)
    with pytest.raises(ValueError, match="from 1280 on"):
        probe(fresh(), text(), [1000])
    with pytest.raises(ValueError, match=r"passages must be \(passages, 1280\)"):
        probe(fresh(), text()[:, :100], [2000])


# the command ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("probe")
    tiny.save(path / "model", trained=2048)
    for n, name in enumerate(("a", "b")):
        tiny.text(path / f"{name}.txt", 4000, seed=n)
    return path


def run(folder: Path, *more: str) -> Any:
    line = ["probe", str(folder / "model"), "--text", f"{folder / 'a.txt'},{folder / 'b.txt'}", "--passages", "2", *more]
    return CliRunner().invoke(app, line)


def inputs(folder: Path) -> torch.Tensor:
    """The passages that the command takes."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    texts = ((folder / f"{n}.txt").read_text() for n in ("a", "b"))
    return torch.cat([passages(tokenizer(text, return_tensors="pt").input_ids, 2, seed=0) for text in texts])


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_command_probes_every_setting_and_keeps_its_rows(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(folder, "--method", "rerope:window=600,@yarn:2", "--distances", "1280,3000,4k", "--out", str(out))
    assert result.exit_code == 0, (result.output, result.exception)
    assert "does not measure dilution" in " ".join(result.output.split())
    rows = {(r["setting"], r["length"]): r for r in rows_of(out)}
    assert set(rows) == {(s, d) for s in ("unmodified", "rerope:window=600", "@yarn:2") for d in (1280, 3000, 4096)}
    assert json.loads((out / "protocol.json").read_text())["trained"] == 2048
    ids = inputs(folder)
    model = hf_longattn.apply(AutoModelForCausalLM.from_pretrained(folder / "model"), "rerope", window=600)
    want = probe(model, ids, [3000])
    assert rows["rerope:window=600", 3000]["copy"] == pytest.approx(want.copies[:, 0].tolist(), abs=1e-4)
    assert rows["rerope:window=600", 3000]["text"] == pytest.approx(want.text[:, 0].tolist(), abs=1e-4)
    mean, half = want.rows()[0]["copy"]
    assert f"{mean:.2f} ± {half:.2f}" in " ".join(result.output.split())
    assert rows["unmodified", 4096]["copy"] != rows["rerope:window=600", 4096]["copy"]
    for row in rows.values():
        assert row["command"].startswith("hf-longattn probe model --text a.txt,b.txt")
        assert {"seconds", "cpu_seconds"} <= row.keys()
        assert row["dtype"] == "float32"
    assert all((out / "figures" / name).stat().st_size > 5_000 for name in ("probe-copy.png", "probe-text.png"))
    tables = [t for s in json.loads((out / "report.json").read_text())["sections"] for t in s["tables"]]
    assert [t["rows"][0][0] for t in tables] == ["unmodified", "rerope:window=600"] * 2


@pytest.mark.slow
def test_a_probe_compares_settings_by_passage(folder: Path) -> None:
    result = run(folder, "--method", "rerope:window=600", "--distances", "1280,3000")
    said = " ".join(result.output.split()).replace("−", "-")
    base = probe(AutoModelForCausalLM.from_pretrained(folder / "model"), inputs(folder), [3000])
    remapped = hf_longattn.apply(AutoModelForCausalLM.from_pretrained(folder / "model"), "rerope", window=600)
    found = probe(remapped, inputs(folder), [3000])
    mean, half = mean_interval((found.copies - base.copies)[:, 0].tolist())
    assert "difference from the unmodified model, paired by passage" in said
    number = r"([-+][.\d]+) ± ([.\d]+)"
    told = re.search(rf"From 3,000 tokens back, .*, against the unmodified model: rerope:window=600 {number}, other", said)
    assert told
    assert [float(x) for x in told.groups()] == pytest.approx([mean, half], abs=2e-3)
    assert said.count(f"{told[1]} ± {told[2]}") == 2  # in the table, too


@pytest.mark.slow
def test_passages_of_several_choices_of_texts_are_not_pooled(folder: Path, tmp_path: Path) -> None:
    """More texts may join a folder: those passages that were read before are among the new ones."""
    texts = {name: (folder / f"{name}.txt").read_text() for name in ("a", "b")}

    def probed(setting: str, *names: str, out: Path | None = tmp_path / "out") -> Any:
        options: dict[str, Any] = {"tasks": "probe", "lengths": (), "distances": [1280], "passages": 2}
        results = hf_longattn.evaluate(str(folder / "model"), {n: texts[n] for n in names}, [setting], out, **options)
        assert f"{2 * len(names)} passages" in results.sections()[-1].protocol
        return results.probe_difference(setting, "copy", 1280)

    alone, both = (probed("rerope:window=600", *names, out=None) for names in ("a", "ab"))
    assert probed("rerope:window=600", "a") == alone
    probed("@yarn:2", "a", "b")
    assert probed("rerope:window=600", "a", "b") == both
    assert probed("rerope:window=600", "a", "b") == both != alone


@pytest.mark.slow
def test_a_page_of_all_rows_names_what_was_probed_on_other_texts(folder: Path, tmp_path: Path) -> None:
    texts = [(folder / f"{name}.txt").read_text() for name in ("a", "b")]
    options: dict[str, Any] = {"tasks": "probe", "lengths": (), "distances": [1280], "passages": 1, "out": tmp_path / "out"}
    hf_longattn.evaluate(str(folder / "model"), texts[:1], ["rerope:window=600"], **options)
    hf_longattn.evaluate(str(folder / "model"), texts, ["@yarn:2"], **options)
    line = ["eval", str(folder / "model"), "--tasks", "probe", "--lengths", "2k", "--distances", "1280", "--passages", "1"]
    line += ["--text", str(folder / "a.txt"), "--out", str(tmp_path / "out"), "--page-only"]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, (result.output, result.exception)
    said = "Not probed on these passages: rerope:window=600."
    assert said in result.output
    assert said in (tmp_path / "out" / "index.html").read_text()


def test_two_texts_of_one_name_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text((folder / "b.txt").read_text())
    result = run(folder, "--distances", "1280", "--text", str(tmp_path / "a.txt"))
    assert result.exit_code == 2
    assert "two texts share a file name" in " ".join(result.output.replace("│", " ").split())


@pytest.mark.slow
def test_the_default_distances_are_those_to_twice_the_trained_length(folder: Path) -> None:
    result = run(folder)
    assert result.exit_code == 0, result.output
    assert f"{distances_to(4096)[3]:,}" in result.output
