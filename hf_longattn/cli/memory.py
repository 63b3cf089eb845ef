"""`hf-longattn memory`: what a model takes at a length, from its config alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import check, console, refusing, table, tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def memory(
    model: Annotated[str, typer.Argument(help="A model on the Hub or a directory; its config is read, no weights.")],
    to: Annotated[str, typer.Option(help="Tokens of text; 32k is 32,768.")] = "32k",
    batch: Annotated[int, typer.Option(help="Texts at a time.", min=1)] = 1,
    dtype: Annotated[
        str, typer.Option(help="Precision of weights and cache: bfloat16, float16 or float32; auto: the checkpoint's own.")
    ] = "auto",
) -> None:
    """Print the memory that MODEL needs to generate after a text of --to tokens: weights, KV cache, activations.

    Weights and cache are exact, with sliding windows and shared or compressed keys as the config has them. Activations are
    an estimate for reading the text in one pass; generate(prefill_chunk_size=1024) reduces them.
    """
    from ..checks import DTYPES

    length = tokens(to)
    check(model, dtype)

    import torch

    from ..evaluation.checkpoints import Checkpoint
    from ..integration.model_facts import inner_size

    with refusing("MODEL"):
        checkpoint = Checkpoint(model)
        checkpoint.check_reads(head=False)
        if dtype == "auto":  # quantised ones say other things
            dtype = checkpoint.dtype if checkpoint.dtype in DTYPES else "bfloat16"
    built = checkpoint.build(dtype=dtype, attn_implementation="sdpa").eval()
    weights = sum(p.numel() * p.element_size() for p in built.parameters())
    text, width = checkpoint.text_config, getattr(torch, dtype).itemsize
    whole = batch * cache_bytes(built, length)
    rows = {
        "weights": weights,
        "KV cache": whole,
        "KV cache for each 1,000 tokens, on average": whole * 1000 // length,
        "activations of one pass (estimate)": batch * length * (4 * text.hidden_size + 2 * inner_size(text)) * width,
    }
    cells = [[name, _size(number)] for name, number in rows.items()]
    console.print(table(f"{model}: {batch} x {length:,} tokens in {dtype}", ["", "memory"], cells))


def _size(number: int) -> str:
    """Bytes for people: GiB from one on, else MiB."""
    return f"{number / 2**30:,.1f} GiB" if number >= 2**30 else f"{number / 2**20:,.0f} MiB"


def cache_bytes(model: PreTrainedModel, length: int) -> int:
    """Bytes of the cache behind `length` tokens, of a model on the meta device; of one that keeps no cache 0."""
    import torch

    from ..integration.caches import cache_in, values_of
    from ..integration.layers import View

    with torch.no_grad():
        out: Any = View(model).inner(torch.zeros(1, length, dtype=torch.long, device="meta"), use_cache=True)
    layers = getattr(cache_in(values_of(out)), "layers", ())
    held = [x for layer in layers for x in vars(layer).values() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return sum(x.numel() * x.element_size() for x in held)
