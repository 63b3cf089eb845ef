"""The user's own questions, asked of documents of any length: what a model writes, compared with the right answers."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...files import read_text
from ...user_warnings import warn
from ..corpus import Corpus
from ..experiment import Cell, digest, sha256_of
from ..measures.answers import answer_scores
from ..measures.losses import Prefix, crops, prefix_of
from ..readings import Readings
from ..report import Section, Table
from ..rows import Row
from ..settings import Setting
from ..statistics import mean_of
from .written import WrittenAnswers, by_question, differences, share

#: Scripts that put no space between a word and what follows it: Thai, Lao, Burmese, Khmer, Japanese, Chinese, Korean.
_JOINED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3"
#: Vowel signs and accents that are characters of their own; `re` takes them for punctuation.
_MARKS = "".join(c for c in map(chr, range(0x300, 0x1000)) if unicodedata.category(c).startswith("M"))
#: A word: letters, their marks and digits, a number with its sign and decimals; each sign by itself in scripts without spaces.
_WORD = re.compile(rf"[{_JOINED}]|(?:(?<![\w{_MARKS}])-(?=\d))?(?:\d+\.(?=\d))*[^\W_{_JOINED}](?:[^\W_{_JOINED}]|[{_MARKS}])*")
#: Questions of a page's table, and characters of its cells.
SHOWN, CHARACTERS = 20, 100
_ARTICLES = {"a", "an", "the"}
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


class Entry(NamedTuple):
    """A question: the prompt without a chat template, that within one, and answers, each of which is right.

    Args:
        asks: the question alone, of a prompt its last line.
        line: whether the answer ends with its line, as after the prompt that is made of a context and a question.
    """

    plain: str
    chat: str
    answers: tuple[str, ...]
    asks: str
    line: bool


def entry_of(record: Mapping[str, Any]) -> Entry:
    """Read a record: a context, a question (or input), and an answer, a list of answers or SQuAD's; other keys are not read.

    The prompt is the context, "Question: ..." and "Answer:"; in a chat template the context and the question. A record with a
    `prompt` in place of context and question is asked in its own words.

    Raises:
        ValueError: a part is missing or no text, or there are both a prompt and a question, or an answer holds no word.
    """
    given = {key: value for key, value in record.items() if value is not None}
    question, prompt, context = given.get("question", given.get("input")), given.get("prompt"), given.get("context", "")
    answers = given.get("answers", given.get("answer"))
    answers = answers.get("text") if isinstance(answers, Mapping) else answers  # SQuAD's, with where each begins
    answers = [answers] if isinstance(answers, str | int | float) else answers
    if not isinstance(answers, Sequence) or not answers or not all(isinstance(x, str | int | float) for x in answers):
        raise ValueError('no answer: give "answer", a text, or "answers", a list of texts')
    for name, text in (("context", context), ("question", question), ("prompt", prompt)):
        if not isinstance(text, str | None):
            raise ValueError(f"the {name} is no text, but a {type(text).__name__}")
    if blank := [x for x in answers if not _words(str(x))]:
        raise ValueError(f"the answer {blank[0]!r} has no word that could be found")
    if (prompt is None) == (question is None):
        raise ValueError('give either "question" (or "input") with its "context", or the whole "prompt"')
    found = tuple(map(str, answers))
    if prompt is not None:
        return Entry(prompt, prompt, found, prompt.strip().rpartition("\n")[2], line=False)
    plain = "\n\n".join(filter(None, [context, f"Question: {question}\nAnswer:"]))
    return Entry(plain, "\n\n".join(filter(None, [context, question])), found, str(question), line=True)


def entries_of(questions: str | Path | Sequence[Mapping[str, Any]]) -> list[Entry]:
    """Read the records of a JSONL file, or of a list.

    Raises:
        ValueError: there are none, or one cannot be asked; the message names its line.
    """
    lines: list[tuple[str, Any]]
    if isinstance(questions, str | Path):
        text = read_text(Path(questions))
        lines = [(f"{questions}, line {n}", line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    else:
        lines = [(f"question {n}", record) for n, record in enumerate(questions, 1)]
    out = []
    for name, line in lines:
        try:
            record = json.loads(line) if isinstance(line, str) else line
        except json.JSONDecodeError as error:
            raise ValueError(f"{name}: not JSON ({error}): a line holds one record") from None
        if not isinstance(record, Mapping):
            raise ValueError(f"{name}: not a record with names, but a {type(record).__name__}")
        try:
            out.append(entry_of(record))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    if not out:
        raise ValueError(f"{questions or 'the list of questions'} holds no questions")
    return out


def _words(text: str) -> list[str]:
    """Words without regard to case, and without punctuation."""
    return _WORD.findall(_THOUSANDS.sub("", unicodedata.normalize("NFKC", text).casefold().replace("\u2212", "-")))


def _both(written: str, answer: str) -> tuple[list[str], list[str]]:
    """The words of a text and of an answer without articles, but for those that are the answer."""
    wanted = _words(answer)
    wanted = [word for word in wanted if word not in _ARTICLES] or wanted
    return [word for word in _words(written) if word not in _ARTICLES or word in wanted], wanted


def holds(written: str, answers: Sequence[str]) -> bool:
    """Tell whether one of the answers stands in a text, word by word."""
    both = (_both(written, answer) for answer in answers)
    return any(f" {' '.join(wanted)} " in f" {' '.join(own)} " for own, wanted in both)


def f1(written: str, answers: Sequence[str]) -> float:
    """The best F1 of a text's words with those of an answer (Rajpurkar et al. 2016, SQuAD)."""
    both = (_both(written, answer) for answer in answers)
    return max(2 * (Counter(own) & Counter(wanted)).total() / (len(own) + len(wanted)) for own, wanted in both)


class Questions(WrittenAnswers):
    """The user's own questions, each at its own length."""

    within: ClassVar[bool] = False

    def __init__(self, corpus: Corpus, name: str) -> None:
        super().__init__(corpus, name)
        if self.options.questions is None:
            raise ValueError(
                "the task questions asks your own: give them (--questions FILE, a JSONL file whose lines have context, "
                "question and answer)"
            )
        #: What was read last: the setting's name, the tokens, and their KV cache.
        self.last: tuple[str, list[int], Prefix] | None = None
        #: By number, from 1: the question, its tokens, and the shortest of the lengths that holds it and its answer.
        self.asked: dict[int, tuple[Entry, list[int], int]] = {}
        beyond = []
        for number, entry in enumerate(entries_of(self.options.questions), 1):
            ids = self.prompt(entry.chat if self.options.chat else entry.plain)
            if not ids:
                raise ValueError(f"question {number} is empty: its prompt has no tokens")
            needed = len(ids) + self.options.answer_tokens
            if (length := next((n for n in self.options.lengths if n >= needed), None)) is None:
                beyond.append(needed)
            else:
                self.asked[number] = entry, ids, length
        longest = f"the longest length, {corpus.longest:,} tokens: give one of {max(beyond, default=0):,} to ask all"
        if not self.asked:
            raise ValueError(f"every question and its answer take more than {longest}")
        if beyond:
            warn(f"{len(beyond)} of {len(self.asked) + len(beyond)} questions are left out. They take more than {longest}.")

    @property
    def protocol(self) -> dict[str, Any]:
        return {"answer_tokens": self.options.answer_tokens}

    def cells(self, setting: Setting) -> Iterator[Cell]:
        for number, (entry, ids, length) in self.asked.items():
            depends = [self.template, sha256_of(entry.plain), list(entry.answers)]
            measure, read = partial(self.measure, number, setting.name), digest(ids)
            yield self.cell(setting, length, str(number), measure, depends, ids=read)

    def measure(self, number: int, setting: str, model: Any) -> Row:
        entry, ids, _ = self.asked[number]
        one_line = entry.line and not self.options.chat
        prompt = torch.tensor([ids], device=model.device)
        read = self._read(model, prompt, number, setting)  # once, for the answers and for what is written
        loss = min(self._loss(model, prompt, answer, read) for answer in entry.answers)
        text = self.written(
            model, ids, self.options.answer_tokens, lambda text: one_line and "\n" in text.lstrip(), read
        ).strip()
        text = text.partition("\n")[0] if one_line else text
        row = {"tokens": len(ids), "score": float(holds(text, entry.answers)), "f1": round(f1(text, entry.answers), 4)}
        return row | {"loss": round(loss, 4), "asked": entry.asks, "written": text, "expected": list(entry.answers)}

    def _read(self, model: Any, prompt: Tensor, number: int, setting: str) -> Prefix | None:
        """The KV cache of a prompt without its last token, from where it differs from the prompt before under the setting;
        None where the model does not read on from one.
        """
        ids, last, self.last = prompt[0, :-1].tolist(), self.last, None
        read: Prefix | None = None
        if last is not None and last[0] == setting and crops(model):
            _, before, read = last
            common = next((n for n, (a, b) in enumerate(zip(ids, before, strict=False)) if a != b), min(len(ids), len(before)))
            read.crop(common - read.get_seq_length())
        try:
            read = prefix_of(model, prompt[:, :-1], read=read)
        except ValueError:  # some hybrid models: each answer is then measured by a reading of its own
            return None
        if self._shared(number):
            self.last = setting, ids, read
        return read

    def _shared(self, number: int) -> bool:
        """Tell whether the first half of a prompt begins one that is asked later: else its cache would only take memory."""
        _, ids, length = self.asked[number]
        half = ids[: len(ids) // 2]
        return any((n, other) > (length, number) and x[: len(half)] == half for other, (_, x, n) in self.asked.items())

    def _loss(self, model: Any, prompt: Tensor, answer: str, read: Prefix | None) -> float:
        """The loss of a right answer behind the prompt, in nats a token."""
        ids = self.encode(answer if self.options.chat else f" {answer}")
        whole = torch.cat([prompt, prompt.new_tensor([ids])], 1)
        (score,) = answer_scores(model, whole, [(prompt.shape[1], whole.shape[1])], read)
        return -score.log_likelihood / score.tokens

    @classmethod
    def counted(cls, rows: Sequence[Row]) -> list[Row]:
        """Each question once, under the shortest length that it was asked at: a shorter one may have been added later."""
        shortest: dict[str, int] = {}
        for r in rows:
            shortest[r["which"]] = min(r["length"], shortest.get(r["which"], r["length"]))
        return list({(r["setting"], r["which"]): r | {"length": shortest[r["which"]]} for r in rows}.values())

    @classmethod
    def sections(cls, results: Readings, name: str) -> list[Section]:
        lengths, settings = results.lengths_of(name), results.settings_of(name)
        scores = {(s, n): by_question(results, name, s, n) for s in settings for n in lengths}
        counts = {n: max(len(scores[s, n]) for s in settings) for n in lengths}
        columns = ["setting", *(f"up to {n:,}" for n in lengths)]
        found = [[s, *(share(scores[s, n]) for n in lengths)] for s in settings]
        means = {
            column: [[s, *(mean_of(by_question(results, name, s, n, column).values()) for n in lengths)] for s in settings]
            for column in ("f1", "loss")
        }
        note = f"In brackets a 95 % Wilson interval. Questions: {', '.join(f'{c} up to {n:,}' for n, c in counts.items())}."
        tables = [
            Table("Answers found, percent", columns, found, note=note, brief=True),
            *differences(results, name),
            Table("Loss of the right answer, nats a token", columns, means["loss"], brief=True),
            *differences(results, name, "loss", "Loss of the right answer, less the unmodified model's", times=1, brief=True),
            Table("F1 of words", columns, means["f1"], digits=2),
            *_where_settings_differ(results, name, settings),
        ]
        text = (
            "An answer is found if one of the right ones stands in what the model writes, in any case and punctuation. The "
            "loss is that of the likeliest right answer behind the question; it still moves where a small model finds none. "
            "F1 compares all that is written with the nearest right answer."
        )
        protocol = (
            f"Each question once per setting, at its own length; a column has those between the length before and its own, so "
            f"that columns differ in their questions. Written greedily, up to {results.protocol['answer_tokens']} tokens."
        )
        return [Section("Your questions", text, tables, (), protocol, results.command(name))]


def _where_settings_differ(results: Readings, name: str, settings: Sequence[str]) -> list[Table]:
    """The first questions that some settings answered right and some did not, with what they wrote."""
    written = {s: {r["which"]: r for r in results.of(s, name)} for s in settings}
    common = set.intersection(*map(set, written.values()))
    differ = [q for q in written[settings[0]] if q in common and len({written[s][q]["score"] for s in settings}) > 1]
    rows = []
    for q in differ[:SHOWN]:
        first = written[settings[0]][q]
        rows.append(
            [_short(first["asked"]), _short(first["expected"][0]), *(_short(written[s][q]["written"]) for s in settings)]
        )
    note = f"The first {SHOWN} of {len(differ)}; all stand in rows.jsonl." if len(differ) > SHOWN else ""
    return [Table("Where settings differ", ["question", "right", *settings], rows, note=note)] if rows else []


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= CHARACTERS else f"{text[: CHARACTERS - 1]}…"
