"""A whole model's step with and without a method: forward, LoRA training step, decoding, on SmolLM2-135M.

Where its weights are not at hand a model of the same shape serves: time does not depend on what the weights are.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, logging

import hf_longattn
from hf_longattn.integration.caches import CACHE
from lab.speed.timing import Calls, Rows, compare

logging.disable_progress_bar()
WEIGHTS = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct"
SHAPE = {
    **{"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9},
    **{"num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True},
}
UNMODIFIED = ("sdpa", "eager")
METHODS = ("scale_invariant", "infoscale", "rerope")
PEER = ("none", "sdpa")


def model(name: str, dtype: torch.dtype, device: str, length: int, lora: bool) -> Any:
    base = {"attn_implementation": name if name in UNMODIFIED else "sdpa", "dtype": dtype}
    torch.manual_seed(0)
    if WEIGHTS.exists():
        made = AutoModelForCausalLM.from_pretrained(WEIGHTS, **base)
    else:
        made = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE), **base)
    made = made.to(device).eval()
    if name not in UNMODIFIED:
        # windows and training lengths below the text's, so that the method has something to do
        parameters = {"rerope": {"window": length // 2}, "infoscale": {"train_length": length // 2}}.get(name, {})
        hf_longattn.apply(made, name, **parameters)
    if lora:
        from peft import LoraConfig, get_peft_model

        return get_peft_model(made, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    return made


def model_rows(mode: str, length: int, dtype: torch.dtype, device: str, rounds: int) -> Rows:
    """mode: "forward", "LoRA step" or "decode" (one token after `length` of them), batch 1."""
    calls: Calls = {}
    with torch.device(device):
        ids = torch.randint(1000, 40000, (1, length if mode != "decode" else 1))
    names = UNMODIFIED if length <= 4096 else UNMODIFIED[:1]  # eager holds all pairs
    for name in (*names, *METHODS):
        key = ("none", name) if name in UNMODIFIED else (name, "auto")
        try:
            made = model(name, dtype, device, length, mode == "LoRA step")
        except ImportError as error:
            print(f"{mode}: {error}", flush=True)
            return []
        calls[key] = {"forward": forward, "LoRA step": lora_step, "decode": decode}[mode](made, ids, length)
    config = made.config
    shape = {"batch": 1, "heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads, "length": length}
    shape |= {"head_dim": config.hidden_size // config.num_attention_heads}
    about = {"device": device, "dtype": str(dtype).removeprefix("torch."), **shape, "mode": f"SmolLM2-135M {mode}"}
    return compare(calls, rounds, about, PEER)


def forward(made: Any, ids: torch.Tensor, length: int) -> Any:
    @torch.no_grad()
    def run() -> None:
        made(ids, use_cache=False, logits_to_keep=1)

    return run


def lora_step(made: Any, ids: torch.Tensor, length: int) -> Any:
    trained = [p for p in made.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-4)

    def run() -> None:
        made(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    return run


def decode(made: Any, ids: torch.Tensor, length: int) -> Any:
    """One token against a cache of `length`, which is filled with random keys and values and cut back after each step."""
    config, cache = made.config, DynamicCache()
    size = (1, config.num_key_value_heads, length, config.hidden_size // config.num_attention_heads)
    for layer in range(config.num_hidden_layers):
        cache.update(*(torch.randn(size, dtype=made.dtype, device=ids.device) for _ in range(2)), layer)

    @torch.no_grad()
    def run() -> None:
        made(ids, **{CACHE: cache})
        cache.crop(-1)

    return run
