"""The arguments of an attention call: those that would be computed wrongly in silence are refused."""

from __future__ import annotations

from typing import Any

import torch

from .engines.paged import ARGUMENTS
from .forward_context import LayerCall
from .internals import passes_on
from .masks import BOTH_WAYS

#: Arguments that reach an attention function and say nothing about which logits it should compute.
HARMLESS = frozenset(
    {
        "position_ids",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "num_items_in_batch",  # this and the next two are for the loss
        "shift_labels",
        "ignore_index",
        "logits_to_keep",
        "cache_position",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "seq_idx",
        "tokenizer",  # of generate(stop_strings=...), which hands it on to the model; `transformers serve` always gives it
        "is_causal",
        "s_aux",  # the model's learned sinks, which we compute
    }
)
HARMLESS_IN_PAGES = HARMLESS | ARGUMENTS


def check_arguments(layer_call: LayerCall, harmless: frozenset[str]) -> None:
    """Raise for anything in a call that we would otherwise compute wrongly in silence."""
    more = layer_call.more
    if not layer_call.traced and _in_context_parallel():
        raise NotImplementedError(
            "torch's context_parallel splits the sequence and replaces scaled_dot_product_attention alone: under "
            "hf_longattn every process would attend to its own part. Leave it off, or "
            'model.set_attn_implementation("sdpa") first'
        )
    if more.get("is_causal") is False and not _says_that_a_mask_is_there(layer_call.module):
        raise ValueError(BOTH_WAYS.format("is_causal=False"))
    if getattr(layer_call.module, "is_causal", True) is False:  # set since: sdpa reads it where it gets no mask
        raise ValueError(BOTH_WAYS.format("is_causal=False on its attention layers"))
    if layer_call.sliding_window is not None and not layer_call.method.windowed:
        raise ValueError("this layer got a sliding window that its config does not announce: please report the model")
    if more.keys() <= harmless:
        return
    unknown = sorted(k for k, v in more.items() if k not in harmless and v is not None)
    if unknown:
        raise ValueError(
            f"attention got {', '.join(unknown)}, which hf_longattn does not know and will not ignore; drop the argument, "
            "or exclude the layer with `layers`"
        )


def _says_that_a_mask_is_there(module: Any) -> bool:
    """Tell whether a causal module itself sets is_causal (Moonshine's decoder does), False where it has a mask for sdpa."""
    return bool(getattr(module, "is_causal", False)) and passes_on(module, "is_causal")


def _in_context_parallel() -> bool:
    """Tell whether torch has put its sharded attention in place of sdpa, as context_parallel does."""
    module = getattr(torch.nn.functional.scaled_dot_product_attention, "__module__", None) or ""
    return module.startswith("torch.distributed.tensor.experimental")
