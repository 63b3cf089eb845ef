"""The blocks of docs/how-to/frameworks.md, with a stand-in for the framework."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import tiny
from transformers import AutoModelForCausalLM

import hf_longattn

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "frameworks.md").read_text(encoding="utf-8")
CHECKPOINT, PLUGIN = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_a_checkpoint_for_frameworks_and_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = str(tiny.save(tmp_path / "base"))
    monkeypatch.chdir(tmp_path)
    exec(CHECKPOINT, {"base": base})
    saved = AutoModelForCausalLM.from_pretrained("base-rerope")
    stand_in: Any = types.ModuleType("axolotl.integrations.base")
    stand_in.BasePlugin = object
    monkeypatch.setitem(sys.modules, "axolotl.integrations.base", stand_in)
    made: dict[str, Any] = {"__name__": "my_longattn"}
    exec(PLUGIN, made)
    model = AutoModelForCausalLM.from_pretrained(base)
    made["LongAttn"]().post_model_load({}, model)
    assert hf_longattn.get_config(model) == hf_longattn.get_config(saved)
