"""Tiny checkpoints of classes that are no plain causal language model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
import torch
import transformers as t
from safetensors import safe_open
from safetensors.torch import load_file, save_file

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = SIZES | {"vocab_size": len(tiny.CHARACTERS), "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3}
TEXT |= {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TOWER |= {"image_size": 28, "patch_size": 7}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
MIXED = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MIXED |= {"num_hidden_layers": 4, "head_dim": 16, "rope_parameters": ROPE | {"mrope_interleaved": True}}
EYE = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 32, "num_heads": 2}
MARKS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}


def _t5gemma() -> Any:
    part = t.T5GemmaModuleConfig(**TEXT).to_dict()
    decoder = part | {"is_decoder": True, "cross_attention_hidden_size": 32}
    return t.T5GemmaForConditionalGeneration(t.T5GemmaConfig(encoder=part, decoder=decoder, vocab_size=TEXT["vocab_size"]))


def _bart() -> Any:
    sizes = {f"{part}_{name}": 1 for part in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = t.BartConfig(vocab_size=TEXT["vocab_size"], d_model=16, max_position_embeddings=2048, **sizes, **ids)
    return t.BartForConditionalGeneration(config)


#: By what they are for: without a language-model head, with pictures, and with an encoder.
HEADLESS: dict[str, Callable[[], Any]] = {
    "reward": lambda: t.LlamaForSequenceClassification(t.LlamaConfig(**TEXT, num_labels=1)),
    "tokens": lambda: t.Qwen3ForTokenClassification(t.Qwen3Config(**TEXT, num_labels=3)),
    "answers": lambda: t.LlamaForQuestionAnswering(t.LlamaConfig(**TEXT)),
    "embeddings": lambda: t.Qwen3Model(t.Qwen3Config(**TEXT)),
}
PICTURES: dict[str, Callable[[], Any]] = {
    "llava": lambda: t.LlavaForConditionalGeneration(
        t.LlavaConfig(text_config=t.LlamaConfig(**TEXT), vision_config=t.CLIPVisionConfig(**TOWER), image_token_index=90)
    ),
    "qwen3.5": lambda: t.Qwen3_5ForConditionalGeneration(
        t.Qwen3_5Config(text_config=TEXT | MIXED, vision_config=EYE | {"deepstack_visual_indexes": []}, **MARKS)
    ),
}
ENCODERS: dict[str, Callable[[], Any]] = {"bart": _bart, "t5gemma": _t5gemma}
#: What loads each, and what the Hub calls what it does.
LOADED_BY = {
    "reward": ("AutoModelForSequenceClassification", "text-classification"),
    "tokens": ("AutoModelForTokenClassification", "token-classification"),
    "answers": ("AutoModelForQuestionAnswering", "question-answering"),
    "embeddings": ("AutoModel", "feature-extraction"),
    "llava": ("AutoModelForImageTextToText", "image-text-to-text"),
    "qwen3.5": ("AutoModelForImageTextToText", "image-text-to-text"),
}


def save(kind: str, folder: Path) -> Path:
    """A checkpoint of a kind, with a tokenizer of characters that says how long a text may be."""
    torch.manual_seed(0)
    (HEADLESS | PICTURES | ENCODERS)[kind]().save_pretrained(folder)
    tokenizer = tiny.tokenizer()
    tokenizer.model_max_length = 2048
    tokenizer.save_pretrained(folder)
    if kind == "qwen3.5":  # a head that predicts several tokens, which transformers passes over
        held = load_file(folder / "model.safetensors") | {"mtp.fc.weight": torch.rand(4, 4)}
        save_file(held, folder / "model.safetensors", {"format": "pt"})
    if kind in PICTURES:
        (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "CLIPImageProcessor"}))
    if kind == "embeddings":  # as sentence-transformers keeps them
        modules = [{"idx": 1, "name": "1", "path": "1_Dense", "type": "sentence_transformers.models.Dense"}]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 2048}))
        (folder / "1_Dense").mkdir()
        (folder / "1_Dense" / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """What a folder's safetensors hold, those of its subfolders as well."""
    found = {}
    for file in folder.rglob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {f"{file.parent.relative_to(folder)}/{k}": opened.get_tensor(k) for k in opened.keys()}  # noqa: SIM118
    return found
