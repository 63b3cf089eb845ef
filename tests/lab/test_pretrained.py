"""A real pretrained model, where the demo has put one into models/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import close, logits
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_longattn

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
TOKENS = 512
WIDE: dict[str, dict[str, Any]] = {
    **{
        name: {"window": 1024}
        for name in ("rerope", "leaky_rerope", "self_extend", "windowed", "streaming", "lm_infinite", "rerope+infoscale")
    },
    "dual_chunk": {"chunk": 1024, "local": 64},
    "leaky_rerope+scale_invariant": {"window": 1024, "offset": 1024},
}

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not MODEL.exists(), reason="`make demo` fetches the model")]


@pytest.fixture(scope="module")
def ids() -> Tensor:
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/explain/design.md"))
    found: Tensor = AutoTokenizer.from_pretrained(MODEL)(text, return_tensors="pt").input_ids[:, :TOKENS]
    assert found.shape[1] == TOKENS
    return found


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def plain(model: Any, ids: Tensor) -> Tensor:
    return logits(model, ids)


@pytest.mark.parametrize("name", WIDE)
def test_a_text_within_the_window_is_read_as_before(name: str, model: Any, plain: Tensor, ids: Tensor) -> None:
    """The same logits, of up to 41, but for rounding; and others under a window that the text exceeds."""
    hf_longattn.apply(model, name, **WIDE[name])
    close(logits(model, ids), plain, 2e-4)
    hf_longattn.apply(model, name, **{k: v // 4 for k, v in WIDE[name].items()})
    assert (logits(model, ids) - plain).abs().max() > 1
