"""A tiny saved model with a tokenizer of characters, and texts for it."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

CHARACTERS = ["<s>", "</s>", *string.printable[:95], "\n"]


def tokenizer(bos: bool = False) -> Any:
    """One token a character; with `bos`, one that puts <s> first, as Llama's and Gemma's do."""
    inner = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token=" "))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


def save(path: Path, trained: int = 512, bos: bool = False, kind: str = "Llama", **changes: Any) -> Path:
    """A random model "trained" at that length, of a class of configs with these changes."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"vocab_size": len(CHARACTERS), "max_position_embeddings": trained, "initializer_range": 0.3}
    config = getattr(transformers, f"{kind}Config")(**sizes | changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer(bos).save_pretrained(path)
    return path


def save_gpt2(path: Path, trained: int = 256) -> Path:
    """A model whose positions are learned."""
    return save(path, trained, kind="GPT2", num_hidden_layers=1, initializer_range=0.02)


def text(path: Path, length: int = 3000, seed: int = 1) -> Path:
    """Random letters, `length` of them."""
    letters = string.ascii_lowercase + " ."
    drawn = torch.randint(0, 28, (length,), generator=torch.Generator().manual_seed(seed))
    path.write_text("".join(letters[i] for i in drawn), encoding="utf-8")
    return path
