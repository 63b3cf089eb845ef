"""What the examples share: their options, and a model under a method with the config of an adapter for it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_longattn

#: TRL assumes a GPU that multiplies in bfloat16.
DEVICE = {} if torch.cuda.is_available() else {"use_cpu": True, "bf16": False}


def options(doc: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--method", default="scale_invariant", help="any name, and several joined by +")
    parser.add_argument("--data", type=Path, help="a plain text; paragraphs are samples")
    parser.add_argument("--output", default="adapter")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sample")
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args()


def texts(path: Path) -> list[str]:
    return [x for x in path.read_text(encoding="utf-8").split("\n\n") if x.strip()]


def prepared(args: argparse.Namespace) -> tuple[Any, Any, LoraConfig]:
    """The model under its method, its tokenizer, and the config of an adapter; the adapter will record the attention."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(args.model, attn_implementation=args.method, dtype=hf_longattn.auto_dtype())
    return model, tokenizer, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
