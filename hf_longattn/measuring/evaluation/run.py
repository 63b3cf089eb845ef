"""Measuring what a plan asks for, row by row."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..processes import gathered, place
from ..rows import Row
from ..settings import load_setting
from .answers import answer_scores
from .losses import loss_by_position, token_losses
from .plan import BIN, LOSS, Item, Plan
from .store import Store


def run_plan(
    plan: Plan,
    store: Store,
    device: str = "cpu",
    done: Callable[[Item, bool], None] = lambda item, new: None,
    command: str = "",
) -> None:
    """Measure every row that the store does not have; each is kept as soon as it is done.

    Several processes (see `processes.together`) take the next rows in turn, and the first keeps what all have found.

    Args:
        done: in the first process, told of every item when it is there, and whether it was measured now.
        command: kept with every row.
    """
    loaded: Any = None
    model: Any = None
    rank, processes = place()
    missing = [item for item in plan.items() if item.key not in store.rows]
    for item in plan.items():
        if item.key in store.rows:
            done(item, False)
    for first in range(0, len(missing), processes):
        turn, row = missing[first : first + processes], None
        if rank < len(turn):
            item = turn[rank]
            if loaded != item.setting:
                loaded = model = None  # the old one goes before the new one comes
                model, loaded = load_setting(item.setting, plan.model, plan.dtype, device), item.setting
            row = {"key": item.key, "digest": item.digest, **_row(plan, item, model), "command": command}
        for item, found in zip(turn, gathered(row), strict=False):
            if rank == 0:
                store.add(found)
                done(item, True)


def _row(plan: Plan, item: Item, model: Any) -> Row:
    start = time.monotonic()
    result = _loss(plan, item, model) if item.task == LOSS else _answers(plan, item, model)
    about = {"setting": item.setting.name, "task": item.task, "length": item.length, "which": item.which}
    about["dtype"] = str(model.dtype).removeprefix("torch.")
    return {**about, **result, "seconds": round(time.monotonic() - start, 2)}


def _loss(plan: Plan, item: Item, model: Any) -> Row:
    """Mean loss on the document's last tokens; in the longest window also by position, in bins."""
    document = next(d for d in plan.documents if d.name == item.which)
    ids = plan.context(document, item.length).to(model.device)
    longest = item.length == plan.lengths[-1]
    losses = token_losses(model, ids, last=None if longest else plan.targets)
    row: Row = {"loss": round(float(losses[:, -plan.targets :].mean()), 5)}
    if longest:
        bins = loss_by_position(losses, [*range(0, item.length, BIN), item.length])
        row["bins"] = [round(b, 5) for b in bins]
    return row


def _answers(plan: Plan, item: Item, model: Any) -> Row:
    sample = plan.makers[item.task].sample(int(item.which), item.length)
    scores = answer_scores(model, sample.input_ids[None].to(model.device), sample.spans)
    answers = [
        {"depth": round(depth, 4), "log_likelihood": round(s.log_likelihood, 4), "tokens": s.tokens, "exact": s.exact}
        for depth, s in zip(sample.depths, scores, strict=True)
    ]
    return {"tokens": int(sample.input_ids.shape[0]), "answers": answers}
