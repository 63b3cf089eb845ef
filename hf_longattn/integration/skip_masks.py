"""Masks of rows whose positions jump: a jump stands for text left out, before which a sliding window would not reach.

transformers counts the keys in a sliding window by their place in the row, so that such layers would see across the jump.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_masks_for_generate, create_sliding_window_causal_mask

from .caches import CACHE
from .config_records import before
from .trained_length import window_hides

SLIDING = "sliding_attention"


def masks_of_jumps(model: Any, input_ids: Tensor, position_ids: Tensor) -> Any:
    """Return the attention_mask for rows of one text each, without a cache, whose positions jump forward.

    Args:
        input_ids: (batch, length).
        position_ids: int64 (batch, length).

    Returns:
        masks by layer type, in which a sliding window is counted in positions. For a model without such layers, or with one as
        wide as its trained length, ones (batch, length), without which a jump would start a new text.
    """
    config, ones = model.config.get_text_config(), torch.ones_like(input_ids)
    known, slides = before(config), SLIDING in (getattr(config, "layer_types", None) or ())
    if not slides or not (window_hides(config) if known is None else known.windows):
        return ones

    def near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return position_ids[batch, query] - position_ids[batch, key] < config.sliding_window

    # of the embeddings, shape, type and device are read
    embedded = torch.empty(*input_ids.shape, 0, dtype=model.dtype, device=input_ids.device)
    given = {"config": config, "inputs_embeds": embedded, "attention_mask": ones, "position_ids": position_ids, CACHE: None}
    masks = create_masks_for_generate(**given)
    if not isinstance(masks, dict):  # of a layer type that transformers makes no mask for
        return ones
    return masks | {SLIDING: create_sliding_window_causal_mask(**given, and_mask_function=near)}
