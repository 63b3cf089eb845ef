"""Texts as tokens, for all tasks of an evaluation; and what has read their beginnings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..checks import check_tokenizer
from ..config import NO_METHOD, LongAttnConfig
from ..integration import apply
from ..integration.model import no_untrained_warning, running
from ..slots.base import LengthTemperature
from ..slots.method import SLOTS
from .checkpoints import Checkpoint, load_tokenizer
from .encoder import Encoder
from .measures.losses import Prefix, crops, prefix_of, shortened
from .options import EvalOptions
from .settings import Setting


@dataclass(frozen=True)
class Document:
    """The tokens of one window of a text, of the longest length (one fewer behind a beginning-of-text token)."""

    name: str
    ids: Tensor

    @cached_property
    def numbers(self) -> list[int]:
        """The tokens, for digests."""
        return self.ids.tolist()


class Corpus:
    """The texts of an evaluation as tokens of its model.

    Args:
        options: with the texts and the lengths.
        checkpoint: that of the options.
        train_length: the length that the model was trained at, in tokens; None: its config names none.
        load: from a setting to its model.
        cut: whether windows of the longest length are cut from the texts.

    Raises:
        TypeError: the tokenizer is a name.
        ValueError: there is no tokenizer, or another model's, no text to cut, or a text is too short.
    """

    def __init__(
        self,
        options: EvalOptions,
        checkpoint: Checkpoint,
        train_length: int | None,
        load: Callable[[Setting], Any],
        cut: bool,
    ) -> None:
        self.options, self.checkpoint, self.train_length, self.load = options, checkpoint, train_length, load
        if options.tokenizer is None and checkpoint.is_loaded:
            raise ValueError("a loaded model is measured with its tokenizer: give tokenizer=")
        if options.tokenizer is not None:
            check_tokenizer(options.tokenizer)
        self.tokenizer = options.tokenizer or load_tokenizer(checkpoint.model)
        #: What every document begins with: the beginning-of-text token, or nothing.
        self.start = Encoder(self.tokenizer, options.bos).start
        self.encoded = {name: self._encode(text) for name, text in options.texts.items()}
        self.documents = self._cut() if cut else []
        self.haystack = torch.cat(list(self.encoded.values())) if self.encoded else None
        self.prefixes = Prefixes(self)

    @property
    def longest(self) -> int:
        if not self.options.lengths:
            raise ValueError("no lengths to measure at: give some")
        return self.options.lengths[-1]

    def _encode(self, text: str) -> Tensor:
        ids: Tensor = self.tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids[0]
        self.checkpoint.check_tokens(ids)
        return ids

    def whole(self, text: str) -> Tensor:
        """The tokens of a text, (1, length), behind the beginning-of-text token where there is one."""
        return self._begun(self.encoded[text])

    def _begun(self, ids: Tensor) -> Tensor:
        return torch.cat([torch.tensor(self.start, dtype=torch.int64, device="cpu"), ids])[None]

    def _cut(self) -> list[Document]:
        windows, window = self.options.windows, self.longest - len(self.start)
        if not self.encoded:
            raise ValueError("losses need a text, and so do copies")
        out = []
        for name, ids in self.encoded.items():
            if len(ids) < windows * window:
                raise ValueError(
                    f"{name} has {len(ids)} tokens; {windows} window{'s' * (windows > 1)} of {self.longest} need "
                    f"{windows * window}: give a longer text, or shorter lengths"
                )
            for i in range(windows):
                label = name if windows == 1 else f"{name}, window {i + 1}"
                out.append(Document(label, ids[i * window : (i + 1) * window]))
        return out

    def context(self, document: Document, length: int) -> Tensor:
        """The last `length` tokens of a document (with a prefix the first), (1, length), behind the beginning-of-text token
        where there is one.
        """
        own = length - len(self.start)
        return self._begun(document.ids[:own] if self.options.prefix else document.ids[len(document.ids) - own :])


class Prefixes:
    """KV caches of the text before one document's targets: settings that read it alike share one."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus, self.document = corpus, ""
        self.kept: dict[Any, Prefix] = {}

    def of(self, setting: Setting, document: Document, length: int, model: Any) -> Prefix | None:
        """The KV cache that a setting reads the last tokens over; None without a prefix, where it reads the whole text."""
        corpus, prefix = self.corpus, self.corpus.options.prefix
        if prefix is None:
            return None
        if self.document != document.name:
            self.document, self.kept = document.name, {}
        method = reading_under(model, setting, prefix)
        end = self._end(length)
        last = self._end(corpus.longest) if crops(model) else end
        reader = (setting.rope, setting.train_length, setting.adapter, setting.model, repr(method.to_dict()), last)
        if reader not in self.kept:
            own = corpus.load(setting)
            with no_untrained_warning():
                apply(own, method)
            before = corpus.context(document, corpus.longest)[:, :last]
            self.kept[reader] = prefix_of(own, before.to(own.device))
            if own is model:  # one that was loaded before: under its setting again
                corpus.load(setting)
        return shortened(self.kept[reader], end)

    def _end(self, length: int) -> int:
        return length - self.corpus.options.targets - 1  # the token before the targets predicts the first of them


def reading_under(model: Any, setting: Setting, prefix: Setting) -> LongAttnConfig:
    """What a setting's model gets to read the text before the targets; see `reading`."""
    method = reading(running(model) or NO_METHOD, prefix)
    if setting.rope is None:
        return method
    beside = [m for m in method.methods if "stack" in {f.name for f in dataclasses.fields(m)}]  # a rotation that it scales
    return method.replace(**{m.slot: dataclasses.replace(m, stack=True) for m in beside})  # type: ignore[call-arg]


def reading(own: LongAttnConfig, prefix: Setting) -> LongAttnConfig:
    """The method that reads the text before the targets: the prefix's, beside those slots of a setting's own that act within
    the prefix's window. ValueError: these do not go together, or one of them differs by layer.
    """
    method = prefix.config
    assert method is not None
    if parts := [x.name for x in (own, method) if x.parts]:
        raise ValueError(
            f"a prefix is read under one method in all layers, not under {parts[0]}: measure that without a prefix"
        )
    own = own.replace(positions=None, visibility=None)
    if isinstance(own.temperature, LengthTemperature):
        own = own.replace(temperature=None)
    return own.replace(**{slot: value for slot in SLOTS if (value := getattr(method, slot)) is not None})
