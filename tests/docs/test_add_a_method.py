"""docs/how-to/add-a-method.md, done as it says: in code of one's own, and in a copy of the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from helpers import close, stock, tokens
from transformers import AttentionInterface, AttentionMaskInterface, LlamaForCausalLM

import hf_longattn
from hf_longattn.slots import registry
from hf_longattn.slots.base import LengthTemperature

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "add-a-method.md"


def steps() -> dict[str, str]:
    """The page's blocks of code by their first lines, which say where each goes."""
    blocks = re.findall(r"^( *)```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    texts = [textwrap.dedent(code) for _, code in blocks]
    return {where.removeprefix("# "): code for where, _, code in (text.partition("\n") for text in texts)}


@pytest.mark.slow
def test_the_steps_in_a_copy_of_the_tree(tmp_path: Path) -> None:
    for folder in ("hf_longattn", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.json"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for where, code in steps().items():
        file, _, into = where.partition(", in ")
        path = tmp_path / file
        if into:
            text = path.read_text(encoding="utf-8")
            head = re.search(rf"^{into}\b.*\n", text, re.MULTILINE)
            assert head, where
            path.write_text(text[: head.end()] + textwrap.indent(code, "    ") + text[head.end() :], encoding="utf-8")
        elif path.parent.is_dir() and path.name != "my_methods.py":
            path.write_text((path.read_text(encoding="utf-8") if path.exists() else "") + code, encoding="utf-8")
    check = "integration/test_exactness.py::test_forward_is_the_closed_form[tiled-llama-root_logn]"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "tests" / check)]
    own = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))
    known = [dict(x._global_mapping) for x in (AttentionInterface, AttentionMaskInterface)]
    yield
    for interface, before in zip((AttentionInterface, AttentionMaskInterface), known, strict=True):
        for name in interface._global_mapping.keys() - before.keys():
            del interface._global_mapping[name]


@torch.no_grad()
def test_a_method_that_lives_outside(forgotten: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own: dict[str, Any] = {}
    (tmp_path / "my_methods.py").write_text(steps()["my_methods.py"])
    monkeypatch.syspath_prepend(tmp_path)
    own = vars(__import__("my_methods"))
    ids, m = tokens(), stock("llama")
    assert hf_longattn.register(own["RootLogN"]) is own["RootLogN"]  # twice is once
    hf_longattn.apply(m, "root_logn", train_length=5, scale=1.3)
    n = torch.arange(1, ids.shape[1] + 1, dtype=torch.float64)
    factor = (1.3 * (n.log() / torch.tensor(5.0).log()).sqrt()).clamp(min=1)
    assert torch.allclose(hf_longattn.config_of(m).temperature.factor(n, 8), factor)  # type: ignore[union-attr]
    logits = m(ids).logits
    assert (logits - stock("llama")(ids).logits).abs().max() > 0.1
    close(logits, hf_longattn.update(m, backend="reference")(ids).logits)
    m.save_pretrained(tmp_path / "saved")
    close(LlamaForCausalLM.from_pretrained(tmp_path / "saved")(ids).logits, logits)
    both = stock("llama")
    both.set_attn_implementation("root_logn")
    assert hf_longattn.config_of(both).name == "root_logn"
    assert hf_longattn.config_of(hf_longattn.apply(both, "rerope+root_logn", window=7)).name == "rerope+root_logn"
    with pytest.raises(ValueError, match="scale must be a number, got 'high'"):
        own["RootLogN"](scale="high")
    sys.modules.pop("my_methods")


def test_a_checkpoint_of_a_method_that_is_not_registered_says_so(forgotten: None, tmp_path: Path) -> None:
    @hf_longattn.register
    @dataclass(frozen=True, kw_only=True)
    class Elsewhere(LengthTemperature):
        name: ClassVar[str] = "elsewhere"
        paper: ClassVar[str] = "none"

        def formula(self, n: torch.Tensor, head_dim: int, train_length: int) -> torch.Tensor:
            return n.log()

    hf_longattn.apply(stock("llama"), "elsewhere").save_pretrained(tmp_path)
    del registry._loaded["elsewhere"]
    for interface in (AttentionInterface, AttentionMaskInterface):
        for name in ("elsewhere", "hf_longattn.elsewhere"):
            interface._global_mapping.pop(name)
    with pytest.raises(ValueError, match=r"'elsewhere' is no method here\. If it is one of your own, import the module"):
        LlamaForCausalLM.from_pretrained(tmp_path)


def test_what_cannot_be_registered_is_refused(forgotten: None) -> None:
    class Unfinished(LengthTemperature):
        name: ClassVar[str] = "unfinished"

    with pytest.raises(ValueError, match="Unfinished lacks formula"):
        hf_longattn.register(Unfinished)
    with pytest.raises(ValueError, match="is no method"):
        hf_longattn.register(dict)  # type: ignore[type-var]
    joined = type("Joined", (hf_longattn.methods.Alibi,), {"name": "a+b"})
    with pytest.raises(ValueError, match=re.escape("Joined.name is 'a+b'")):
        hf_longattn.register(joined)


def wrong(**changes: Any) -> type:
    """A method with that much wrong."""

    @dataclass(frozen=True, kw_only=True)
    class Wrong(LengthTemperature):
        name: ClassVar[str] = "wrong"
        paper: ClassVar[str] = "none"

        def formula(self, n: torch.Tensor, head_dim: int, train_length: int) -> torch.Tensor:
            return n.log()

    for name, value in changes.items():
        setattr(Wrong, name, value)
    return Wrong


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "a shape": ({"formula": lambda self, n, *_: n[None]}, r"it gives shape \(1, 6\), torch.float64, and not shape \(6,\)"),
    "a dtype": ({"formula": lambda self, n, *_: n.float()}, r"torch.float32, and not shape \(6,\), torch.float64 \(formula\)"),
    "no tensor": ({"formula": lambda *_: 1.0}, "fails on tiny tensors: .float. object has no attribute"),
    "a fault": ({"formula": lambda self, n, *_: n @ n[:2]}, "fails on tiny tensors: inconsistent tensor size"),
    "no name": ({"name": None}, "Wrong has no name"),
    "no slot": ({"slot": "colour"}, "Wrong.slot is 'colour'; the slots are positions,"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_method_is_found_as_it_is_registered(forgotten: None, mistake: str) -> None:
    changes, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message) as refused:
        hf_longattn.register(wrong(**changes))
    assert "test_add_a_method.wrong.<locals>.Wrong" in str(refused.value)
    assert "wrong" not in registry.list_methods()


def test_parameters_that_would_be_lost_or_cannot_be_saved_are_refused(forgotten: None) -> None:
    class Plain(wrong()):  # type: ignore[misc]
        name: ClassVar[str] = "plain"
        scale: float = 2.0

    with pytest.raises(ValueError, match=r"Plain is no dataclass, so scale would be no parameter: decorate it"):
        hf_longattn.register(Plain)
    bare = dataclass(frozen=True, kw_only=True)(
        type("Bare", (wrong(),), {"__annotations__": {"scale": float}, "__module__": __name__, "name": "bare"})
    )
    with pytest.raises(ValueError, match=r"Bare\(\) cannot be made: .*'scale'"):
        hf_longattn.register(bare)


@pytest.fixture
def installed(forgotten: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that brings methods by entry points: one that is well, one that is not there, one whose name is taken."""
    (tmp_path / "brings_methods.py").write_text(steps()["my_methods.py"])
    about = tmp_path / "brings_methods-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: brings_methods\nVersion: 1.0\n")
    lines = ["root_logn = brings_methods:RootLogN", "gone = brings_methods:Gone", "rerope = brings_methods:RootLogN"]
    (about / "entry_points.txt").write_text("\n".join([f"[{registry.GROUP}]", *lines]))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_elsewhere", None)
    yield tmp_path
    sys.modules.pop("brings_methods", None)


def test_an_installed_package_brings_methods(installed: Path) -> None:
    with pytest.warns(UserWarning, match="RootLogN is left out: there is a method called 'rerope' already"):
        assert {"root_logn", "gone"} <= set(registry.list_methods())
    assert "brings_methods" not in sys.modules  # until it is asked for
    config = hf_longattn.config_of(hf_longattn.apply(stock("llama"), "rerope+root_logn", train_length=5))
    assert config.name == "rerope+root_logn"
    with pytest.raises(
        ValueError, match=r"'gone', brings_methods:Gone of an installed package, cannot be used: .*no attribute"
    ):
        hf_longattn.apply(stock("llama"), "gone")
