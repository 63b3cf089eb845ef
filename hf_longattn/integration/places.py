"""Position_ids that jump: refused where distances are counted in slots, carried on where they are differences of positions.

transformers reads a jump as the start of a new document when it gets neither a 2-D mask nor a cache. Skip-wise training
means one document, so such a call is refused, whatever the method.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import LongAttnConfig
from ..geometry import HIGH, LOW, POSITION, START, Rows
from ..tracing import readable

_WAY_OUT = "pass attention_mask=torch.ones_like(input_ids) and use_cache=False"


def place(rows: Rows, mask: Tensor, position_ids: Tensor | None, kv_len: int, config: LongAttnConfig) -> Rows:
    """Rows whose distances are what `config.distance` says, checked against position_ids.

    Args:
        mask: the attention mask that the rows were read from; it carries the answer from layer to layer.
        position_ids: (batch or 1, at least q_len), as attention gets them.

    Raises:
        ValueError: positions jump where that has no meaning, or was read as something else.
    """
    tracing = not readable(mask)
    if tracing and config.distance == "positions":
        raise NotImplementedError(
            "distance='positions' cannot be traced in one graph, it reads position_ids: leave fullgraph off, or count in slots"
        )
    if position_ids is None or position_ids.ndim != 2 or tracing:
        return rows
    if rows.index.shape[1] == 1 and config.distance == "slots":
        return rows
    by_distance = config.logit_map is not None or config.positions is not None or config.visibility is not None
    key = (config.distance, by_distance)
    known: dict[tuple[str, bool], tuple[Tensor, Rows]] = mask.__dict__.setdefault("longattn_places", {})
    if key not in known or known[key][0] is not position_ids:
        known[key] = position_ids, _place(rows, position_ids, kv_len, config.distance, by_distance)
    return known[key][1]


def _place(rows: Rows, position_ids: Tensor, kv_len: int, distance: str, by_distance: bool) -> Rows:
    index, positions = rows.index, position_ids[:, -rows.index.shape[1] :].to(rows.index.device)
    slot, start = index[..., POSITION], index[..., START]
    inside = (slot >= start) & (slot <= index[..., HIGH])
    step, pair = positions.diff(), inside[:, 1:] & inside[:, :-1]
    jumps, same = (step > 1) & pair, start[:, 1:] == start[:, :-1]
    if bool((jumps & ~same).any()):
        raise ValueError(
            "position_ids jump forward, and without a 2-D attention mask or a cache transformers reads that as the start of a "
            f"new document. For one document with skipped positions {_WAY_OUT}; packed documents each count from 0"
        )
    jump = bool(jumps.any())
    if distance == "slots":
        if jump and by_distance:
            raise ValueError(
                "position_ids jump forward within a sequence, but this method counts distances in slots: set "
                "distance='positions' (hf_longattn.update(model, distance='positions')) to use the difference of positions"
            )
        return rows
    off = positions[:, :1] - slot[:, :1]
    earlier = bool((index[:, 0, LOW] < slot[:, 0]).any())  # keys of earlier calls, whose positions are not known here
    if earlier and bool(((off != 0) & (off != -start[:, :1]) & inside[:, :1]).any()):
        raise ValueError(
            "under distance='positions' cached tokens must have been counted without jumps: pass all tokens in one call "
            "(use_cache=False), or count in slots (hf_longattn.update(model, distance='slots'))"
        )
    if not jump:
        return rows
    if earlier or kv_len != index.shape[1]:
        raise ValueError("under distance='positions' a call whose position_ids jump must hold all its tokens: use_cache=False")
    if bool(((step <= 0) & pair & same).any()):
        raise ValueError("position_ids go back within one sequence: distances between its tokens have no meaning")
    return rows.placed(positions)
