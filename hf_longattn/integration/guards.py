"""What is refused: layers whose attention does more than the interface says, and positions beyond a learned table."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..attention.tracing import readable
from ..config import LongAttnConfig
from .layers import Layer, candidates_of


def refuse_layers(model: nn.Module, config: LongAttnConfig, candidates: list[Layer], chosen: list[Layer]) -> None:
    """Raise for layers whose attention does more than the interface says."""
    name = type(model).__name__
    if any(x.own_mask for x in candidates):  # also where they are left alone: all layers get one mask
        raise ValueError(
            f"{config.name} cannot go into {name}: its attention makes a mask of its own from transformers' mask, and could "
            "not read the one that we put in its place"
        )
    if refused := {x.index: x.refusal for x in chosen or candidates if x.refusal}:
        free = [x.index for x in candidates if not x.refusal]
        reasons = ", ".join(dict.fromkeys(refused.values()))  # type: ignore[arg-type]
        raise ValueError(
            f"{config.name} cannot go into the layers {list(refused)} of {name}: {reasons}, and no"
            f" method computes that. {f'Pass layers={free}, which do not' if free else 'All layers of this model do so'}"
        )


def guard_positions(model: PreTrainedModel) -> None:
    """Refuse positions beyond a learned position table, with the reason instead of an index error."""
    size = getattr(candidates_of(model)[0].module.config, "max_position_embeddings", None)
    for module in model.modules():
        if (
            isinstance(module, nn.Embedding)
            and _entries(module) == size
            and module is not model.get_input_embeddings()
            and "longattn_guard" not in module.__dict__
        ):
            module.longattn_guard = module.register_forward_pre_hook(  # type: ignore[assignment]
                _check_learned_positions, with_kwargs=True
            )


def _check_learned_positions(table: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        return
    call = inspect.signature(type(table).forward).bind(table, *args, **kwargs).arguments
    positions = call.get("position_ids", call.get("input"))
    if positions is None and "attention_mask" in call:  # OPT and BioGPT count
        positions = call["attention_mask"].cumsum(1) - 1
    if isinstance(positions, Tensor) and not readable(positions):
        return
    if positions is not None:
        last = int(positions.max())
    else:  # others take tokens or their shape (batch, q_len), and how many came before
        last = getattr(args[0], "shape", args[0])[1] + call.get("past_key_values_length", 0) - 1
    size = _entries(table)
    if last >= size:
        raise ValueError(
            f"position {last} lies beyond this model's position table of {size} entries. No attention method can extend a "
            "table: shorten the text, or use a model with rotary positions"
        )


def _entries(table: Any) -> int:
    """How many positions a table has; Bart's and its like keep a few rows before the first (`offset`)."""
    return int(table.num_embeddings) - getattr(table, "offset", 0)
