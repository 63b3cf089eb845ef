"""A tiny saved model with a tokenizer of characters, and texts for it."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS = ["<s>", "</s>", *string.printable[:95], "\n"]


def tokenizer(bos: bool = False) -> Any:
    """One token a character; with `bos`, one that puts <s> first, as Llama's and Gemma's do."""
    inner = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token=" "))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


def save(path: Path, trained: int = 512, bos: bool = False) -> Path:
    """A random Llama "trained" at that length."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(CHARACTERS),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=trained,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer(bos).save_pretrained(path)
    return path


def save_gpt2(path: Path, trained: int = 256) -> Path:
    """A random GPT-2, whose positions are learned."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(CHARACTERS), n_embd=16, n_layer=1, n_head=2, n_positions=trained)
    GPT2LMHeadModel(config).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def text(path: Path, length: int = 3000, seed: int = 1) -> Path:
    """Random letters, `length` of them."""
    letters = string.ascii_lowercase + " ."
    drawn = torch.randint(0, 28, (length,), generator=torch.Generator().manual_seed(seed))
    path.write_text("".join(letters[i] for i in drawn), encoding="utf-8")
    return path
