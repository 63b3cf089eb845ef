"""Measuring what a plan asks for, row by row."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ..rows import Row
from ..settings import load_setting
from .answers import answer_scores
from .long_ppl import key_tokens, long_loss, short_losses
from .losses import loss_by_position, token_losses
from .plan import BIN, LONG_PPL, LOSS, Item, Plan, row_key
from .store import Store


def run_plan(
    plan: Plan,
    store: Store,
    device: str = "cpu",
    done: Callable[[Item, bool], None] = lambda item, new: None,
    command: str = "",
) -> None:
    """Measure every row that the store does not have; each is kept as soon as it is done.

    Args:
        done: told of every item when it is there, and whether it was measured now.
        command: kept with every row.
    """
    loaded: Any = None
    model: Any = None
    for item in plan.items():
        if item.key in store.rows:
            done(item, False)
            continue
        if loaded != item.setting:
            loaded = model = None  # the old one goes before the new one comes
            model, loaded = load_setting(item.setting, plan.model, plan.dtype, device), item.setting
        start = time.monotonic()
        if item.task == LONG_PPL:
            evaluated = store.rows.get(row_key(plan.evaluator, LONG_PPL, item.length, item.which))
            result = _long_loss(plan, item, model, None if evaluated is None else evaluated["keys"])
        else:
            result = _loss(plan, item, model) if item.task == LOSS else _answers(plan, item, model)
        seconds = round(time.monotonic() - start, 2)
        about = {"setting": item.setting.name, "task": item.task, "length": item.length, "which": item.which}
        about["dtype"] = str(model.dtype).removeprefix("torch.")
        store.add({"key": item.key, "digest": item.digest, **about, **result, "seconds": seconds, "command": command})
        done(item, True)


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


def _long_loss(plan: Plan, item: Item, model: Any, keys: list[int] | None) -> Row:
    """Mean loss on a document's key tokens, by position as the evaluator has found them; None: this is the evaluator."""
    document = next(d for d in plan.documents if d.name == item.which)
    ids = plan.context(document, item.length).to(model.device)
    losses = token_losses(model, ids)
    if keys is not None:
        chosen = torch.zeros_like(losses, dtype=torch.bool)
        chosen[:, keys] = True
        return {"key_loss": _known(long_loss(losses, chosen)), "key_tokens": len(keys)}
    found = key_tokens(losses, short_losses(model, ids, plan.near, max(plan.near // 4, 1)))
    at = found[0].nonzero()[:, 0].tolist()
    return {"key_loss": _known(long_loss(losses, found)), "key_tokens": len(at), "keys": at}


def _known(loss: float) -> float | None:
    return None if loss != loss else round(loss, 5)


def _answers(plan: Plan, item: Item, model: Any) -> Row:
    sample = plan.makers[item.task].sample(int(item.which), item.length)
    scores = answer_scores(model, sample.input_ids[None].to(model.device), sample.spans)
    answers = [
        {"depth": round(depth, 4), "log_likelihood": round(s.log_likelihood, 4), "tokens": s.tokens, "exact": s.exact}
        for depth, s in zip(sample.depths, scores, strict=True)
    ]
    return {"tokens": int(sample.input_ids.shape[0]), "answers": answers}
