"""What vLLM's plugin does without a vLLM; tests/vllm_engine has the rest."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from hf_longattn.integration.engines.vllm import register


def test_a_vllm_without_what_the_plugin_needs_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """In silence it would serve every checkpoint that is not strict without its method."""
    other = ModuleType("vllm")
    other.__version__ = "0.99.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", other)
    with pytest.raises(ImportError, match=r'^hf_longattn .* in vLLM 0\.99\.0 .*\'vllm\.config\'.*install "vllm==[\d.]+\*"'):
        register()
