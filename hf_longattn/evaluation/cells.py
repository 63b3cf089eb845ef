"""What a plan measures, as the cells of an experiment: documents and tasks at lengths."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from ..config import LongAttnConfig
from ..integration import apply, config_of
from ..integration.model import knowing, methods_of
from ..methods.base import LengthTemperature
from ..methods.method import SLOTS
from .experiment import Cell, Measure, digest, identity
from .loading import load_setting
from .measures.answers import AnswerScore, answer_scores
from .measures.copies import PASSAGE, SHARES, SKIP, far_copies, with_copies
from .measures.long_ppl import key_tokens, long_loss, short_losses
from .measures.losses import Prefix, loss_by_position, prefix_of, shortened, token_losses
from .results import BIN, COPIES, LONG_PPL, LOSS, ON_DOCUMENTS
from .rows import Row
from .settings import Setting

if TYPE_CHECKING:
    from .plan import Document, Plan


class Cells:
    """The cells of a plan."""

    def __init__(self, plan: Plan, device: str) -> None:
        self.plan, self.prefixes = plan, _Prefixes(plan, device)
        #: The experiment's, by name: LongPPL is read at key tokens that the evaluator has found.
        self.rows: dict[str, Row] = {}

    @property
    def measures(self) -> list[Measure]:
        """Every task at every length, the short ones first."""
        return [partial(self._cells, task, length) for length in self.plan.lengths for task in self.plan.tasks]

    def order(self, cell: Cell) -> Any:
        """The evaluator's first, then settings, so that each is loaded once; or by document with a prefix, or by length."""
        if self.plan.prefix is not None:
            names, which = [d.name for d in self.plan.documents], cell.key["which"]
            return names.index(which) if which in names else len(names)
        return cell.key["length"] if self.plan.shortest_first else not cell.first

    @cached_property
    def _haystack(self) -> str:
        return digest([hashlib.sha256(text.encode()).hexdigest() for _, text in self.plan.texts])

    def _cells(self, task: str, length: int, setting: Setting, documents: Sequence[Document]) -> Iterator[Cell]:
        key = {"task": task, "length": length}
        if task not in ON_DOCUMENTS:
            places = self.plan.depths if task == "needle" else 0
            seen = [places, self._haystack if "needle" in task else ""]
            for index in range(self.plan.samples * max(places, 1)):
                yield Cell(setting, key | {"which": str(index)}, partial(self._answers, task, length, index), seen)
            return
        if task == LONG_PPL and length <= self.plan.near_window[0]:
            return  # such a length has no far context
        first = task == LONG_PPL and setting.name == self.plan.evaluator
        prefix = [] if self.plan.prefix is None else [self.plan.prefix]
        more: dict[str, list[Any]] = {
            LOSS: prefix,
            COPIES: [*prefix, *SHARES],
            LONG_PPL: [identity(self.plan.found_by)] if task == LONG_PPL else [],
        }
        measure = {LOSS: self._loss, COPIES: self._copies, LONG_PPL: self._long_ppl}[task]
        for document in documents:
            depends = [document.numbers, *more[task]]
            yield Cell(setting, key | {"which": document.name}, partial(measure, setting, document, length), depends, first)

    def _loss(self, setting: Setting, document: Document, length: int, model: Any) -> Row:
        """Mean loss on the document's last tokens; in the longest window, if it is read whole, also by position, in bins."""
        plan, ids = self.plan, self.plan.context(document, length).to(model.device)
        longest = plan.prefix is None and length == plan.lengths[-1]
        prefix = self.prefixes.of(setting, document, length, model)
        losses = token_losses(model, ids, last=None if longest else plan.targets, prefix=prefix)
        row: Row = {"loss": round(float(losses[:, -plan.targets :].mean()), 5)}
        if longest:
            bins = loss_by_position(losses, [*range(0, length, BIN), length])
            row["bins"] = [round(b, 5) for b in bins]
        return row

    def _long_ppl(self, setting: Setting, document: Document, length: int, model: Any) -> Row:
        """Mean loss on a document's key tokens, by position as the evaluator has found them."""
        plan, ids = self.plan, self.plan.context(document, length).to(model.device)
        losses = token_losses(model, ids)
        if setting.name == plan.evaluator:
            keys = key_tokens(losses, short_losses(model, ids, *plan.near_window))
            positions = {"keys": keys[0].nonzero()[:, 0].tolist()}
        else:
            keys, positions = torch.zeros_like(losses, dtype=torch.bool), {}
            keys[:, self.rows[f"{plan.evaluator} | {LONG_PPL} | {length} | {document.name}"]["keys"]] = True
        loss = long_loss(losses, keys)
        return {"key_loss": None if loss != loss else round(loss, 5), "key_tokens": int(keys.sum()), **positions}

    def _copies(self, setting: Setting, document: Document, length: int, model: Any) -> Row:
        """The document with passages repeated from far back in its last tokens; each copy is an answer."""
        copies = far_copies(length)
        ids, _ = with_copies(self.plan.context(document, length), copies)
        spans = [(c.position + SKIP, c.position + PASSAGE) for c in copies]
        scores = answer_scores(model, ids.to(model.device), spans, self.prefixes.of(setting, document, length, model))
        answers = _told([1 - share for share in SHARES], scores)
        return {"tokens": length, "answers": answers, "distances": [c.distance for c in copies]}

    def _answers(self, task: str, length: int, index: int, model: Any) -> Row:
        sample = self.plan.makers[task].sample(index, length)
        scores = answer_scores(model, sample.input_ids[None].to(model.device), sample.spans)
        return {"tokens": int(sample.input_ids.shape[0]), "answers": _told(sample.depths, scores)}


class _Prefixes:
    """The KV caches of one document's text before its targets, by what has read it."""

    def __init__(self, plan: Plan, device: str) -> None:
        self.plan, self.device, self.document = plan, device, ""
        self.kept: dict[Any, Prefix] = {}

    def of(self, setting: Setting, document: Document, length: int, model: Any) -> Prefix | None:
        """None where the plan reads whole texts."""
        plan = self.plan
        if plan.prefix is None:
            return None
        if self.document != document.name:
            self.document, self.kept = document.name, {}
        method = reading(config_of(model) if methods_of(model) else LongAttnConfig(), plan.prefix)
        layers = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
        end = self._end(length)
        last = self._end(plan.lengths[-1]) if layers <= {"full_attention"} else end  # others cannot give tokens back
        reader = (setting.rope, setting.adapter, setting.model, repr(method.to_dict()), last)
        if reader not in self.kept:
            own = load_setting(setting, plan.model, plan.dtype, self.device)
            with knowing():
                apply(own, method, stack=setting.rope is not None)
            before = plan.context(document, plan.lengths[-1])[:, :last]
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


def _told(depths: Sequence[float], scores: Sequence[AnswerScore]) -> list[Row]:
    return [
        {"depth": round(depth, 4), "log_likelihood": round(s.log_likelihood, 4), "tokens": s.tokens, "exact": s.exact}
        for depth, s in zip(depths, scores, strict=True)
    ]
