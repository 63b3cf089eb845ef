"""Measuring what a plan asks for, row by row."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..config import LongAttnConfig
from ..integration import apply, config_of
from ..integration.model import knowing, methods_of
from ..methods.base import LengthTemperature
from ..methods.method import SLOTS
from .measures.answers import AnswerScore, answer_scores
from .measures.copies import PASSAGE, SHARES, SKIP, far_copies, with_copies
from .measures.long_ppl import key_tokens, long_loss, short_losses
from .measures.losses import Prefix, loss_by_position, prefix_of, shortened, token_losses
from .plan import BIN, COPIES, LONG_PPL, LOSS, Item, Plan, row_key
from .processes import gathered, place
from .rows import Row
from .settings import Setting, load_setting
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
    prefixes = _Prefixes(plan, device)
    rank, processes = place()
    missing = [item for item in plan.items() if item.key not in store.rows]
    for item in plan.items():
        if item.key in store.rows:
            done(item, False)
    found_first = [item for item in missing if (item.task, item.setting.name) == (LONG_PPL, plan.evaluator)]
    others = [item for item in missing if item not in found_first]  # are scored on the key tokens of those
    turns = [part[n : n + processes] for part in (found_first, others) for n in range(0, len(part), processes)]
    for turn in turns:
        row = None
        if rank < len(turn):
            item = turn[rank]
            if loaded != item.setting:
                loaded = model = None  # the old one goes before the new one comes
                model, loaded = load_setting(item.setting, plan.model, plan.dtype, device), item.setting
            row = {"key": item.key, "digest": item.digest, **_row(plan, item, model, prefixes, store), "command": command}
        for item, found in zip(turn, gathered(row), strict=False):
            if rank == 0:
                store.add(found)
                done(item, True)
            else:
                store.rows[found["key"]] = found


def _row(plan: Plan, item: Item, model: Any, prefixes: _Prefixes, store: Store) -> Row:
    start = time.monotonic()
    if item.task == LONG_PPL:
        result = _long_ppl(plan, item, model, store)
    else:
        measures = {LOSS: _loss, COPIES: _copies}
        result = measures.get(item.task, _answers)(plan, item, model, prefixes)
    about = {"setting": item.setting.name, "task": item.task, "length": item.length, "which": item.which}
    about["dtype"] = str(model.dtype).removeprefix("torch.")
    return {**about, **result, "seconds": round(time.monotonic() - start, 2)}


class _Prefixes:
    """The KV caches of one document's text before its targets, by what has read it."""

    def __init__(self, plan: Plan, device: str) -> None:
        self.plan, self.device, self.document = plan, device, ""
        self.kept: dict[Any, Prefix] = {}

    def of(self, item: Item, model: Any) -> Prefix | None:
        """None where the plan reads whole texts."""
        plan, setting = self.plan, item.setting
        if plan.prefix is None:
            return None
        if self.document != item.which:
            self.document, self.kept = item.which, {}
        method = reading(config_of(model) if methods_of(model) else LongAttnConfig(), plan.prefix)
        layers = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
        end = self._end(item.length)
        last = self._end(plan.lengths[-1]) if layers <= {"full_attention"} else end  # others cannot give tokens back
        reader = (setting.rope, setting.adapter, setting.model, repr(method.to_dict()), last)
        if reader not in self.kept:
            own = load_setting(setting, plan.model, plan.dtype, self.device)
            with knowing():
                apply(own, method, stack=setting.rope is not None)
            before = _ids(plan, item, plan.lengths[-1])[:, :last]
            self.kept[reader] = prefix_of(own, before.to(self.device))
        return shortened(self.kept[reader], end)

    def _end(self, length: int) -> int:
        return length - self.plan.targets - 1  # the token before the targets predicts the first of them


def reading(own: LongAttnConfig, prefix: str) -> LongAttnConfig:
    """What reads the text before the targets: a model's own method but for what does nothing in the prefix's window."""
    method = Setting.parse(prefix).config
    assert method is not None
    own = own.replace(positions=None, visibility=None)
    if isinstance(own.temperature, LengthTemperature):
        own = own.replace(temperature=None)
    return own.replace(**{slot: value for slot in SLOTS if (value := getattr(method, slot)) is not None})


def _ids(plan: Plan, item: Item, length: int | None = None) -> torch.Tensor:
    return plan.context(next(d for d in plan.documents if d.name == item.which), length or item.length)


def _loss(plan: Plan, item: Item, model: Any, prefixes: _Prefixes) -> Row:
    """Mean loss on the document's last tokens; in the longest window, if it is read whole, also by position, in bins."""
    ids = _ids(plan, item).to(model.device)
    longest = plan.prefix is None and item.length == plan.lengths[-1]
    losses = token_losses(model, ids, last=None if longest else plan.targets, prefix=prefixes.of(item, model))
    row: Row = {"loss": round(float(losses[:, -plan.targets :].mean()), 5)}
    if longest:
        bins = loss_by_position(losses, [*range(0, item.length, BIN), item.length])
        row["bins"] = [round(b, 5) for b in bins]
    return row


def _long_ppl(plan: Plan, item: Item, model: Any, store: Store) -> Row:
    """Mean loss on a document's key tokens, by position as the evaluator has found them."""
    ids = _ids(plan, item).to(model.device)
    losses = token_losses(model, ids)
    if item.setting.name == plan.evaluator:
        keys = key_tokens(losses, short_losses(model, ids, *plan.near_window))
        positions = {"keys": keys[0].nonzero()[:, 0].tolist()}
    else:
        keys, positions = torch.zeros_like(losses, dtype=torch.bool), {}
        keys[:, store.rows[row_key(plan.evaluator, LONG_PPL, item.length, item.which)]["keys"]] = True
    loss = long_loss(losses, keys)
    return {"key_loss": None if loss != loss else round(loss, 5), "key_tokens": int(keys.sum()), **positions}


def _copies(plan: Plan, item: Item, model: Any, prefixes: _Prefixes) -> Row:
    """The document with passages repeated from far back in its last tokens; each copy is an answer."""
    copies = far_copies(item.length)
    ids, _ = with_copies(_ids(plan, item), copies)
    spans = [(c.position + SKIP, c.position + PASSAGE) for c in copies]
    scores = answer_scores(model, ids.to(model.device), spans, prefixes.of(item, model))
    return {
        "tokens": item.length,
        "answers": _told([1 - share for share in SHARES], scores),
        "distances": [c.distance for c in copies],
    }


def _answers(plan: Plan, item: Item, model: Any, prefixes: _Prefixes) -> Row:
    sample = plan.makers[item.task].sample(int(item.which), item.length)
    scores = answer_scores(model, sample.input_ids[None].to(model.device), sample.spans)
    return {"tokens": int(sample.input_ids.shape[0]), "answers": _told(sample.depths, scores)}


def _told(depths: Sequence[float], scores: Sequence[AnswerScore]) -> list[Row]:
    return [
        {"depth": round(depth, 4), "log_likelihood": round(s.log_likelihood, 4), "tokens": s.tokens, "exact": s.exact}
        for depth, s in zip(depths, scores, strict=True)
    ]
