"""What an evaluation measures, decided and checked before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from .cells import Cells
from .experiment import Experiment, fingerprint
from .loading import check_lengths, check_setting, load_setting
from .measures.copies import TAIL, far_copies
from .results import COPIES, LONG_PPL, LOSS, ON_DOCUMENTS
from .rows import PROTOCOL, Row, Rows
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
            self._check_long_ppl()
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
            raise ValueError(f"a prefix belongs to the tasks {' and '.join(ON_DOCUMENTS)}; the others read whole texts")
        if LONG_PPL in self.tasks:
            raise ValueError("long_ppl reads whole documents: measure it without a prefix")
        if COPIES in self.tasks and self.targets < TAIL:
            raise ValueError(f"copies take the last {TAIL} tokens: with a prefix give as many targets, not {self.targets}")

    @property
    def near_window(self) -> tuple[int, int]:
        """Tokens that are read at once for a short context, and by how many these windows move."""
        stride = max(self.near // 4, 1)
        return self.near + stride, stride

    def _check_long_ppl(self) -> None:
        if self.near < 2 or self.lengths[-1] <= self.near_window[0]:
            raise ValueError(
                f"long_ppl asks what context beyond {self.near} tokens helps with, and no length exceeds "
                f"{self.near_window[0]}: raise lengths, or lower near"
            )
        if (found := self.found_by).model is not None:
            text = self.texts[0][1][:2000]
            theirs, ours = (AutoTokenizer.from_pretrained(m)(text).input_ids for m in (found.model, self.model))
            if theirs != ours:
                raise ValueError(f"the evaluator {self.evaluator!r} has another tokenizer: its tokens are not the model's")

    @property
    def found_by(self) -> Setting:
        """The evaluator."""
        for setting in self.settings:
            if setting.name == self.evaluator:
                return setting
        names = ", ".join(s.name for s in self.settings)
        raise ValueError(f"the evaluator {self.evaluator!r} is none of the settings: {names}")

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
        rows = Rows(folder and folder / ROWS, {"prefix": None}, protocol=self.protocol)  # texts were then read whole

        def load(setting: Setting) -> Any:
            return load_setting(setting, self.model, self.dtype, device)

        settings, texts = self.settings, self.documents
        out = Experiment(settings, texts, cells.measures, rows, load, about=about, done=done, order=cells.order)
        cells.rows = out.rows
        return out

    def context(self, document: Document, length: int) -> Tensor:
        """The last `length` tokens of a document (with a prefix the first), (1, length), behind the beginning-of-text token
        where there is one.
        """
        start = torch.tensor(self._start, dtype=torch.int64)
        first = 0 if self.prefix else len(document.ids) - (length - len(start))
        return torch.cat([start, document.ids[first : first + length - len(start)]])[None]
