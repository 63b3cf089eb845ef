"""`hf-longattn inspect`: what it writes, and what it refuses before any weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from typer.testing import CliRunner

import hf_longattn
from hf_longattn.cli import app


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> tuple[str, str]:
    """A tiny model with a sliding layer below two full ones, and a text of 300 characters."""
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    sizes = {"num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 8, "layer_types": kinds}
    path = tiny.save(tmp_path_factory.mktemp("model"), kind="Gemma3Text", initializer_range=0.2, **sizes)
    return str(path), str(tiny.text(path / "text.txt", 300))


def found(out: Path) -> dict[str, Any]:
    """What was seen under each setting."""
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    return {row["setting"]: row["attention"] for row in rows if row["task"] == "attention"}


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["inspect", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return " ".join(result.output.replace("│", " ").split())


@pytest.mark.slow
def test_it_compares_and_writes(saved: tuple[str, str], tmp_path: Path) -> None:
    model, text = saved
    out = tmp_path / "out"
    output = run(
        model, "--text", text, "--length", "256", "--method", "scale_invariant:tau=5,adaptive_temperature", "--rows", "all",
        "--out", str(out),
    )  # fmt: skip
    assert "unmodified" in output
    assert "scale_invariant:tau=5" in output
    record = found(out)
    assert list(record) == ["unmodified", "scale_invariant:tau=5", "adaptive_temperature"]

    tokenizer, loaded = PreTrainedTokenizerFast.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model).eval()
    ids = tokenizer(Path(text).read_text(), return_tensors="pt").input_ids[:, :256]
    for name, method in (("unmodified", None), ("adaptive_temperature", "adaptive_temperature")):
        if method:
            hf_longattn.apply(loaded, method)
        with torch.no_grad(), hf_longattn.capture(loaded) as seen:
            loaded(ids)
        assert record[name] == json.loads(json.dumps(seen.result().to_dict()))
    assert record["unmodified"]["layers"] == [1, 2]

    page = (out / "index.html").read_text(encoding="utf-8")
    for wanted in ("Attention by layer", "data:image/png;base64", "The first 256 tokens of text.txt", "hf-longattn"):
        assert wanted in page
    assert "http" not in page.replace("http://www.w3.org", "")
    pictures = {p.stem for p in (out / "figures").glob("*.png")}
    assert pictures == {
        "attention-entropy", "attention-by-distance", "attention-temperature", "attention-outputs", "attention-qq",
        "heads-sink-mass", "heads-entropy",
    }  # fmt: skip
    summary, by_distance = json.loads((out / "report.json").read_text())["sections"][0]["tables"]
    values = next(row for row in summary["rows"] if row[0] == "temperature")
    temperature = dict(zip(summary["columns"], values, strict=True))
    assert temperature["unmodified"] == 1
    assert temperature["adaptive_temperature"] > 1
    for column in zip(*by_distance["rows"], strict=True):
        assert isinstance(column[0], str) or sum(column) == pytest.approx(1, abs=2e-5)  # rows keep five digits
    assert [row[0] for row in by_distance["rows"][-2:]] == ["64 and farther", "first key"]  # no text here is 256 long
    before = (out / "rows.jsonl").read_text()
    run(model, "--text", text, "--length", "256", "--rows", "all", "--out", str(out))  # nothing is looked at twice
    assert (out / "rows.jsonl").read_text() == before
    again = run(model, "--text", text, "--length", "256", "--rows", "9", "--out", str(out), code=2)
    assert "another setting, formula, text or model" in again


@pytest.mark.slow
def test_a_part_of_it_joins_a_report(saved: tuple[str, str], tmp_path: Path) -> None:
    model, text = saved
    words = [model, "--text", text, "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["eval", *words, "--lengths", "64,128", "--targets", "32"])
    assert result.exit_code == 0, result.output
    run(*words, "--length", "64", "--layers", "2", "--what", "mass")
    record = found(tmp_path)["unmodified"]
    assert (record["layers"], set(record["values"])) == ([2], {"local_mass", "sink_mass"})
    assert sum(record["rows"]) == 64
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "Loss by length" in page
    assert "Attention by layer" in page


def test_layers_above_the_last_one_do_not_run(saved: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = saved
    calls: list[int] = []
    attend = hf_longattn.integration.dispatch.attention_forward

    def counted(module: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(module.layer_idx)
        return attend(module, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "longattn", counted)
    run(model, "--text", text, "--length", "64", "--layers", "1")
    assert calls == [0, 1]


@pytest.mark.slow
def test_rows_are_sampled(saved: tuple[str, str], tmp_path: Path) -> None:
    model, text = saved
    run(model, "--text", text, "--length", "200", "--rows", "20", "--what", "entropy", "--out", str(tmp_path / "new"))
    assert sum(found(tmp_path / "new")["unmodified"]["rows"]) == 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--length", "1k"], "has 300 tokens, 1024 are needed"),
        (["--length", "many"], "is not a length"),
        (["--text", "nowhere.txt"], "nowhere.txt is not a file"),
        (["--method", "infoscal"], "infoscale"),
        (["--method", "infoscale:wrong=1"], "wrong"),
        (["--what", "entropy,spread"], "unknown 'spread'; `what` is any of ranges"),
        (["--layers", "1,7"], "7 (not in this model)"),
        (["--layers", "0"], "0 (sliding window)"),
        (["--layers", "a"], "is not a list of layers"),
        (["--layers", "3-1"], "'3-1' is not a range of layers; write 1-3"),
        (["--length", "1"], "give 2 or more"),
        (["--rows", "0"], "rows must be an integer >= 1"),
        (["--rows", "few"], "neither a number of rows nor all"),
        (["--delta", "1"], "delta must be an integer >= 2"),
    ],
)
def test_wrong_input_is_refused_before_weights_are_read(
    saved: tuple[str, str], arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", never)
    model, text = saved
    assert message in run(model, "--text", text, *([] if "--length" in arguments else ["--length", "64"]), *arguments, code=2)
