"""How long a text vLLM serves a model for that was extended: what it was extended to, whatever its rotation is.

.venv-vllm/bin/python tests/vllm_engine/lengths.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "kit")]

import tiny  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402
from vllm.config import ModelConfig  # noqa: E402
from vllm.plugins import load_general_plugins  # noqa: E402

import hf_longattn  # noqa: E402

TRAINED, TO = 512, 2048
ORIGINAL = {"original_max_position_embeddings": 128}
LISTS = {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "attention_factor": 1.0}
#: Rotations of models trained at TRAINED tokens, and what else their configs say.
ROTATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "linear": ({"factor": 4.0}, {}),
    "linear, Vicuna 16k": ({"factor": 4.0}, {"max_position_embeddings": 128, "max_sequence_length": TRAINED}),
    "default, Command R": ({}, {"max_position_embeddings": 128, "model_max_length": TRAINED}),
    "llama3": (ORIGINAL | {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, {}),
    "yarn": (ORIGINAL | {"factor": 4.0}, {}),
    "longrope": (ORIGINAL | {"factor": 4.0} | LISTS, {}),
}


def main() -> None:
    load_general_plugins()
    for name, (rope, says) in ROTATIONS.items():
        settings = {"rope_type": name.partition(",")[0], "rope_theta": 1e4} | rope
        sizes = {"vocab_size": len(tiny.CHARACTERS), "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
        sizes |= {"num_hidden_layers": 1, "max_position_embeddings": TRAINED} | says
        model, tokenizer = LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=settings)), tiny.tokenizer()
        tokenizer.model_max_length = TRAINED
        with tempfile.TemporaryDirectory() as folder:
            hf_longattn.save(hf_longattn.extend(model, TO, method="rerope"), folder, tokenizer=tokenizer)
            for asked in (None, TO):
                served = ModelConfig(model=folder, max_model_len=asked).max_model_len
                assert served == TO, f"{name}: vLLM serves {served} tokens where {asked} are asked for"
        print(f"{name}: {TO} tokens")


if __name__ == "__main__":
    main()
