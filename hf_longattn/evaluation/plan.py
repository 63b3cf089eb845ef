"""What an evaluation measures, decided and checked before a model is loaded; and how, as the cells of an experiment."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import LongAttnConfig
from ..integration import apply
from ..integration.model import knowing, running
from ..slots.base import LengthTemperature
from ..slots.method import SLOTS
from .experiment import Cell, Experiment, Measure, digest, fingerprint
from .loading import check_lengths, check_setting, load_setting
from .measures.answers import AnswerScore, answer_scores
from .measures.copies import PASSAGE, SHARES, SKIP, TAIL, far_copies, with_copies
from .measures.long_ppl import KeyTokens
from .measures.losses import Prefix, loss_by_position, prefix_of, shortened, token_losses
from .results import BIN, COPIES, LONG_PPL, LOSS, ON_DOCUMENTS
from .rows import PROTOCOL, Row, RowFile
from .settings import UNMODIFIED, Setting
from .tasks import Encoder, Task, canonical, make_task

ROWS = "rows.jsonl"
#: Held by the command that measures into the folder.
LOCK = ".lock"
#: What else a folder of rows may hold: what another command that adds to the same report may have left there.
REPORT = {LOCK, "index.html", "report.json", "report-head.json", "sections", "figures"}
BOS = ("auto", "always", "never")


@dataclass(frozen=True)
class Document:
    """The tokens of one window of a text, `longest` of them (fewer by one if a beginning-of-text token goes before)."""

    name: str
    ids: Tensor

    @cached_property
    def numbers(self) -> list[int]:
        """The tokens, for digests."""
        return self.ids.tolist()


@dataclass
class Plan:
    """Settings, texts, tasks and lengths of an evaluation, and the protocol that every row obeys.

    Args:
        model: a directory or a name on the Hub.
        settings: the unmodified model first.
        lengths: tokens, beginning-of-text token included.
        texts: name and content; each gives `windows` documents of the longest length, one after another from its beginning.
        tasks: "loss", "copies", "long_ppl" and names from `hf_longattn.tasks`.
        targets: the last tokens of every document, scored at every length.
        bos: "auto" does what the tokenizer does, "always" and "never" what they say.
        samples: texts per task and length (`needle`: per depth).
        depths: places of the `needle` task.
        near: the context that `long_ppl` takes for short: its key tokens are those that more of it helps with.
        evaluator: the setting that finds the key tokens, the same for all.
        shortest_first: all settings at the shortest length first, and so on: what can be compared is there early, and the
            model is loaded anew for every setting and length.
        prefix: a method, as a setting's string ("streaming:window=4096"): the text before the targets is read under it, once
            for all lengths and for all settings that differ in positions and length temperatures alone, which do nothing in
            its window; each then reads the targets over those keys. Contexts begin where the document does, and rows come
            document by document.

    Raises:
        ValueError: anything that would go wrong later, named.
    """

    model: str
    settings: Sequence[Setting]
    lengths: Sequence[int]
    texts: Sequence[tuple[str, str]]
    tokenizer: Any
    tasks: Sequence[str] = (LOSS,)
    windows: int = 1
    targets: int = 512
    bos: str = "auto"
    samples: int = 3
    depths: int = 5
    dtype: str = "auto"
    seed: int = 0
    near: int = 4096
    evaluator: str = UNMODIFIED
    shortest_first: bool = False
    prefix: str | None = None
    documents: list[Document] = field(init=False, default_factory=list)
    makers: dict[str, Task] = field(init=False, default_factory=dict)
    train_length: int | None = field(init=False, default=None)
    key_tokens: KeyTokens | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.lengths = sorted(set(self.lengths))
        self.tasks = list(dict.fromkeys(canonical(t, ON_DOCUMENTS) for t in self.tasks))
        for name in ("windows", "targets", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.bos not in BOS:
            raise ValueError(f"bos must be one of {', '.join(BOS)}, got {self.bos!r}")
        if not self.settings or self.settings[0].name != UNMODIFIED:
            raise ValueError("the first setting must be the unmodified model, which everything is compared with")
        if LOSS in self.tasks and self.targets >= self.lengths[0]:
            raise ValueError(
                f"{self.targets} targets do not fit into {self.lengths[0]} tokens: lower targets or raise lengths"
            )
        if COPIES in self.tasks:
            far_copies(self.lengths[0])
        if self.prefix is not None:
            self._check_prefix(self.prefix)
        self._check_settings()
        self._start = self._starting()
        encoded = [(n, self._encode(n, t)) for n, t in self.texts]
        if self._documents:
            self._cut(encoded)
        if LONG_PPL in self.tasks:
            self.key_tokens = KeyTokens(self.near, self.evaluator, self.settings)
            self.key_tokens.check(self.lengths[-1], self.model, self.texts[0][1])
        self._make_tasks(torch.cat([ids for _, ids in encoded]) if encoded else None)

    def _check_settings(self) -> None:
        check_lengths(self.model, self.lengths)
        for setting in self.settings:
            facts = check_setting(setting, self.model)
            if setting.unmodified:
                self.train_length = facts.train_length
        if self.train_length is not None and self.lengths[0] > self.train_length:
            raise ValueError(
                f"the model was trained at {self.train_length} tokens and all lengths lie beyond: add one within, so that "
                "what a method costs there is part of the result"
            )

    def _make_tasks(self, haystack: Tensor | None) -> None:
        for name in (t for t in self.tasks if t not in ON_DOCUMENTS):
            self.makers[name] = make_task(name, self.tokenizer, haystack, self.depths, self.seed)
            for length in self.lengths:
                try:
                    self.makers[name].check(length)
                except ValueError as error:
                    raise ValueError(f"task {name}: {error}") from None

    def _check_prefix(self, prefix: str) -> None:
        setting = Setting.parse(prefix)
        if setting.method is None or setting.rope is not None:
            raise ValueError(f"the prefix is read under a method of its own, as streaming:window=4096, not under {prefix!r}")
        check_setting(setting, self.model)
        if not self._documents:
            raise ValueError(f"a prefix belongs to the tasks {LOSS} and {COPIES}; the others read whole texts")
        if LONG_PPL in self.tasks:
            raise ValueError("long_ppl reads whole documents: measure it without a prefix")
        if COPIES in self.tasks and self.targets < TAIL:
            raise ValueError(f"copies take the last {TAIL} tokens: with a prefix give as many targets, not {self.targets}")

    def _starting(self) -> list[int]:
        bos = self.tokenizer.bos_token_id
        if self.bos == "always" and bos is None:
            raise ValueError("bos='always', but the tokenizer has no beginning-of-text token")
        return {"auto": Encoder(self.tokenizer).start, "always": [bos], "never": []}[self.bos]

    def _encode(self, name: str, text: str) -> Tensor:
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids[0]
        if self._documents and len(ids) < self.windows * self.window:
            raise ValueError(
                f"{name} has {len(ids)} tokens; {self.windows} window{'s' * (self.windows > 1)} of {self.lengths[-1]} need "
                f"{self.windows * self.window}: give a longer text, or shorter lengths"
            )
        return ids

    @property
    def _documents(self) -> bool:
        return any(t in ON_DOCUMENTS for t in self.tasks)

    @property
    def window(self) -> int:
        """Tokens of text in a document."""
        return self.lengths[-1] - len(self._start)

    def _cut(self, encoded: Sequence[tuple[str, Tensor]]) -> None:
        if not encoded:
            raise ValueError("losses need a text, and so do copies")
        if len({name for name, _ in encoded}) < len(encoded):
            raise ValueError(f"two texts share a file name: {', '.join(n for n, _ in encoded)}")
        for name, ids in encoded:
            for i in range(self.windows):
                label = name if self.windows == 1 else f"{name}, window {i + 1}"
                self.documents.append(Document(label, ids[i * self.window : (i + 1) * self.window]))

    @property
    def protocol(self) -> dict[str, Any]:
        """What must be the same for all rows of a folder; settings, tasks, texts and shorter lengths may join later."""
        out = {"model": fingerprint(self.model), "dtype": self.dtype, "seed": self.seed, "bos": bool(self._start)}
        if self._documents:
            out |= {"longest": self.lengths[-1], "targets": self.targets}
        if LONG_PPL in self.tasks:
            out |= {"near": self.near, "evaluator": self.evaluator}
        return out | ({} if self.prefix is None else {"prefix": self.prefix})

    def open(
        self,
        folder: Path | None,
        device: str = "cpu",
        about: Mapping[str, Any] | None = None,
        done: Callable[[Row, bool], None] = lambda row, new: None,
    ) -> Experiment:
        """The plan's experiment, with the rows of a folder (None: of no folder), checked against this plan.

        Raises:
            ValueError: the folder holds rows of another protocol, setting, text or model, or something that is no report.
        """
        there = {p.name for p in folder.iterdir()} if folder is not None and folder.exists() else set()
        if there - REPORT and PROTOCOL not in there:
            raise ValueError(f"{folder} is not empty and holds no evaluation; nothing is overwritten: choose another folder")
        cells = Cells(self, device)
        rows = RowFile(folder and folder / ROWS, {"prefix": None}, protocol=self.protocol)  # texts were then read whole

        def load(setting: Setting) -> Any:
            return load_setting(setting, self.model, self.dtype, device)

        measures, order = cells.measures, cells.order
        return Experiment(self.settings, self.documents, measures, rows, load, about=about, done=done, order=order)

    def context(self, document: Document, length: int) -> Tensor:
        """The last `length` tokens of a document (with a prefix the first), (1, length), behind the beginning-of-text token
        where there is one.
        """
        start = torch.tensor(self._start, dtype=torch.int64)
        first = 0 if self.prefix else len(document.ids) - (length - len(start))
        return torch.cat([start, document.ids[first : first + length - len(start)]])[None]


class Cells:
    """Every task at every length, on documents and texts of the tasks' own."""

    def __init__(self, plan: Plan, device: str) -> None:
        self.plan, self.prefixes = plan, _Prefixes(plan, device)

    @property
    def measures(self) -> list[Measure]:
        """The short lengths first."""
        return [partial(self._cells, task, length) for length in self.plan.lengths for task in self.plan.tasks]

    @property
    def order(self) -> Callable[[Cell], Any] | None:
        """By document with a prefix, or by length; None: settings outermost, so that each is loaded once."""
        if self.plan.prefix is not None:
            at = {document.name: n for n, document in enumerate(self.plan.documents)}
            return lambda cell: at.get(cell.key["which"], len(at))
        return (lambda cell: cell.key["length"]) if self.plan.shortest_first else None

    @cached_property
    def _haystack(self) -> str:
        return digest([hashlib.sha256(text.encode()).hexdigest() for _, text in self.plan.texts])

    def _cells(self, task: str, length: int, setting: Setting, documents: Sequence[Document]) -> Iterator[Cell]:
        key = {"task": task, "length": length}
        if task == LONG_PPL and (keys := self.plan.key_tokens):
            for document in documents if length > keys.window else ():
                text = partial(self.plan.context, document, length)
                yield keys.cell(setting, key | {"which": document.name}, text, [document.numbers])
            return
        if task in ON_DOCUMENTS:
            measure, more = {LOSS: (self._loss, ()), COPIES: (self._copies, SHARES)}[task]
            prefix = [] if self.plan.prefix is None else [self.plan.prefix]
            for document in documents:
                depends = [document.numbers, *prefix, *more]
                yield Cell(setting, key | {"which": document.name}, partial(measure, setting, document, length), depends)
            return
        places = self.plan.depths if task == "needle" else 0
        depends = [places, self._haystack if "needle" in task else ""]
        for index in range(self.plan.samples * max(places, 1)):
            yield Cell(setting, key | {"which": str(index)}, partial(self._answers, task, length, index), depends)

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

    def _copies(self, setting: Setting, document: Document, length: int, model: Any) -> Row:
        """The document with passages repeated from far back in its last tokens; each copy is an answer."""
        copies = far_copies(length)
        ids, _ = with_copies(self.plan.context(document, length), copies)
        spans = [(c.position + SKIP, c.position + PASSAGE) for c in copies]
        scores = answer_scores(model, ids.to(model.device), spans, self.prefixes.of(setting, document, length, model))
        answers = _as_rows([1 - share for share in SHARES], scores)
        return {"tokens": length, "answers": answers, "distances": [c.distance for c in copies]}

    def _answers(self, task: str, length: int, index: int, model: Any) -> Row:
        sample = self.plan.makers[task].sample(index, length)
        scores = answer_scores(model, sample.input_ids[None].to(model.device), sample.spans)
        return {"tokens": int(sample.input_ids.shape[0]), "answers": _as_rows(sample.depths, scores)}


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
        method = reading(running(model) or LongAttnConfig(), plan.prefix)
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


def _as_rows(depths: Sequence[float], scores: Sequence[AnswerScore]) -> list[Row]:
    return [
        {"depth": round(depth, 4), "log_likelihood": round(s.log_likelihood, 4), "tokens": s.tokens, "exact": s.exact}
        for depth, s in zip(depths, scores, strict=True)
    ]
