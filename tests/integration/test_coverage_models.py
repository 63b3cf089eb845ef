"""A few of the models that `make coverage-models` examines, and the pages against their result files."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import coverage_models
import pytest
import torch
import transformers
from tiny_configs import families, multimodal

RESULTS = json.loads(coverage_models.RESULTS.read_text(encoding="utf-8"))
#: Beside the families of kit/cases.py: latent attention, layers without RoPE, linear attention, mixtures of experts and of
#: layers, learned positions, no attention at all, sinks, an attention of its own, one shared by several layers, an indexer,
#: windows beside images.
NAMES = (
    "deepseek_v3",
    "cohere2",
    "qwen3_next",
    "granitemoehybrid",
    "bart",
    "mamba",
    "gpt_oss",
    "bloom",
    "zamba",
    "zamba2",
    "deepseek_v32",
    "gemma4_unified",
)
#: Of which the page says what fails: loading by name where `apply` works.
OPEN = {"deepseek_vl_hybrid"}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_models_are_what_the_page_says(name: str) -> None:
    row = coverage_models.examine(name)
    recorded = next(r for r in RESULTS["rows"] if r["model_type"] == name)
    assert row["status"] == recorded["status"], row
    assert row["status"] in ("exact", "refused"), row


def test_every_model_is_in_the_results() -> None:
    if f"transformers {transformers.__version__}," not in RESULTS["versions"]:
        pytest.skip(f"the results are of {RESULTS['versions']}")
    assert {r["model_type"] for r in RESULTS["rows"]} | {*RESULTS["unexamined"]} == families().keys() | multimodal().keys()
    assert not families().keys() & {*RESULTS["unexamined"]}
    assert {r["model_type"] for r in RESULTS["rows"] if r["status"] == "failed"} == OPEN


def test_a_method_that_computes_something_else_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The survey can fail: a mask read one key too far shows at strength 0."""
    from hf_longattn.integration import positions

    read = positions.read_mask

    def shifted(mask: torch.Tensor, kv_len: int) -> Any:
        return read(torch.cat([mask[..., :4], mask[..., 4:] - 1], -1).clamp(min=0), kv_len)

    monkeypatch.setattr(positions, "read_mask", shifted)
    row = coverage_models.examine("llama")
    assert row["status"] == "failed"
    assert "strength 0, whole: off by" in row["reason"]


def _script(name: str) -> Any:
    path = Path(__file__).parents[1] / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("script", ["kit/coverage_models.py", "conformance/run.py"])
def test_pages_are_their_result_files(script: str) -> None:
    module = _script(script)
    results = json.loads(module.RESULTS.read_text(encoding="utf-8"))
    assert module.PAGE.read_text(encoding="utf-8") == module.page(results), f"run: python tests/{script}"


def test_conformance_says_which_package_is_missing(tmp_path: Path) -> None:
    report = tmp_path / "llama-sdpa.xml"
    said = "ImportError\nE   ModuleNotFoundError: No module named parameterized"
    report.write_text(f'<suite><testcase name="suite"><error message="collection failure">{said}</error></testcase></suite>')
    assert _script("conformance/run.py").read(report)["suite"] == ("failed", said.splitlines()[-1])
