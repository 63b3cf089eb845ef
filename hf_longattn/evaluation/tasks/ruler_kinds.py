"""The kinds of question of RULER (Hsieh et al. 2024), a function each, with its numbers; and two of others.

GraphWalks (OpenAI 2025) and key-value lookup (Liu et al. 2024, "Lost in the middle") are the others. RULER takes needles' keys
and lists of words from word lists, its essays from one author, and questions from SQuAD and HotpotQA: `ruler_data`. Here all
of them come from the user's own text.
"""

from __future__ import annotations

import functools
import math
import random
import re
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from . import ruler_prompts as prompts
from .sample import largest
from .text import words as made_up

#: Needles stand at some of these places in an essay, in percent.
DEPTHS = [round(100 * i / 39) for i in range(40)]
#: Words in a document of the questions about passages, at least; words shown on either side of a gap.
PASSAGE_WORDS, SHOWN = 100, 8


@dataclass(frozen=True)
class Question:
    """One question: the text to read, the given beginning of the answer, and the words that the answer must hold."""

    text: str
    begins: str
    answers: tuple[str, ...]


class Asked(NamedTuple):
    """A question about documents.

    Args:
        query: the question.
        answers: each is right.
        documents: those that may be shown.
        holders: the ones that answer it, by number.
        near: the ones that are shown before others are.
    """

    query: str
    answers: Sequence[str]
    documents: Sequence[str]
    holders: Sequence[int]
    near: Sequence[int] = ()


class Source:
    """The material of questions: a user's own text.

    Args:
        text: the user's.
        count: from a text to how many tokens it has.
    """

    def __init__(self, text: str, count: Callable[[str], int]) -> None:
        self.text, self.count = text.split(), count

    @functools.cached_property
    def words(self) -> list[str]:
        """Different words, in lower case."""
        return sorted({w.lower() for w in self.text if w.isascii() and w.isalpha() and 3 <= len(w) <= 10})

    @property
    def identity(self) -> str:
        """A text that says which material it is; questions of equal material are equal."""
        return " ".join(self.text)

    def pair(self, rng: random.Random) -> str:
        """Two words, a needle's key."""
        return "-".join(self.different(rng, 2))

    def different(self, rng: random.Random, count: int) -> list[str]:
        """Words in random order, made-up ones among them where the text has too few."""
        return rng.sample(self.words if count <= len(self.words) else [*self.words, *made_up(rng, count)], count)

    def essay(self, size: int) -> list[str]:
        """The first `size` words, as sentences; a text that is too short begins anew."""
        if not self.text:
            raise ValueError("needles are hidden in a text: give one")
        repeated = self.text * math.ceil(size / len(self.text))
        return re.split(r"(?<=[.!?])\s+|(?<=[.!?][\"'”’])\s+", " ".join(repeated[:size]))

    @functools.cached_property
    def passages(self) -> list[list[str]]:
        """Documents: the text cut behind sentences, each a list of words."""
        cut: list[list[str]] = [[]]
        for word in self.text:
            cut[-1].append(word)
            if len(cut[-1]) >= PASSAGE_WORDS and word.rstrip("\"'”’")[-1:] in (".", "!", "?"):
                cut.append([])
        return [passage for passage in cut if passage]

    @functools.cached_property
    def documents(self) -> list[str]:
        """The texts that questions about documents show."""
        return [" ".join(passage) for passage in self.passages]

    def asked_of_one(self, rng: random.Random) -> Asked:
        """Ask for a word that is left out of a piece of one document."""
        if not self.gaps:
            raise ValueError("the text gives no questions: give a longer one, of sentences")
        document, place = rng.choice(self.gaps)
        return Asked(self._gap(prompts.GAP, document, place), [self.passages[document][place]], self.documents, [document])

    def asked_of_two(self, rng: random.Random) -> Asked:
        """Ask for a word that is left out of a piece of one document, and for the word that follows it in another."""
        if not self.bridges:
            raise ValueError("the text has no two documents that share a word with no other: give a longer one, of sentences")
        (document, place), (other, there) = rng.sample(rng.choice(self.bridges), 2)
        answer = self.passages[other][there + 1]
        return Asked(self._gap(prompts.GAP_AND_NEXT, document, place), [answer], self.documents, [document, other])

    def _gap(self, prompt: str, document: int, place: int) -> str:
        words = self.passages[document]
        return prompt.format(
            before=" ".join(words[place - SHOWN : place]), after=" ".join(words[place + 1 : place + 1 + SHOWN])
        )

    @functools.cached_property
    def bridges(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Words that stand in two documents, once in each, and nowhere else: (document, place) of both."""
        places: dict[str, list[tuple[int, int]]] = {}
        for document, passage in enumerate(self.passages):
            for place, word in enumerate(passage):
                places.setdefault(re.sub(r"\W", "", word).lower(), []).append((document, place))
        inside = [p for p in places.values() if all(SHOWN <= i < len(self.passages[d]) - SHOWN for d, i in p)]
        return [(a, b) for a, b in (p for p in inside if len(p) == 2) if a[0] != b[0] and self._asks(*a) and self._asks(*b)]

    def _asks(self, document: int, place: int) -> bool:
        """Tell whether a word and the one after it are fit for an answer."""
        return all(w.isalpha() and len(w) >= 4 for w in self.passages[document][place : place + 2])

    @functools.cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """Words that can be left out: document and place."""
        inside = [(d, i) for d, p in enumerate(self.passages) for i in range(SHOWN, len(p) - SHOWN)]
        return [at for at in inside if self._asks(*at)]

    @functools.cached_property
    def example_lines(self) -> int:
        """Lines of noise in the example of `vt`: as many as 500 tokens hold."""

        def built(lines: int) -> tuple[int, str]:
            return lines, _solved(prompts.VT, *_tracking(random.Random(0), lines, letters=3))

        found = largest(built, lambda it: self.count(it[1]), 5, 500)
        return found[0] if found else 5


#: (rng, parts, tokens of question and answer, source) -> Question.
Maker = Callable[[random.Random, int, int, Source], Question]


def pair_of_words(rng: random.Random, source: Source) -> str:
    return source.pair(rng)


def number(rng: random.Random, source: Source) -> str:
    return str(rng.randrange(1_000_000, 10_000_000))


def uuid4(rng: random.Random, source: Source | None = None) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def niah(
    rng: random.Random,
    size: int,
    length: int,
    source: Source,
    hay: str = "essay",
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
    key: Callable[[random.Random, Source], str] = pair_of_words,
    value: Callable[[random.Random, Source], str] = number,
) -> Question:
    """Needles, each a key with a value, in `size` words of the text, in as many lines of noise, or among other needles."""
    kind = value.__name__.removesuffix("4")
    held: dict[str, list[str]] = {}
    while len(held) < keys:
        held[key(rng, source)] = [value(rng, source) for _ in range(values)]
    needles = [prompts.NEEDLE.format(values=f"{kind}s", key=k, value=v) for k, vs in held.items() for v in vs]
    rng.shuffle(needles)
    if hay == "essay":
        lines, joint = source.essay(size), " "
        places = [len(lines) * depth // 100 for depth in rng.sample(DEPTHS, len(needles))]
    elif hay == "noise":
        lines, joint, places = [prompts.NOISE] * size, "\n", rng.sample(range(size), len(needles))
    else:
        others = [(key(rng, source), value(rng, source)) for _ in range(size)]
        lines = [prompts.NEEDLE.format(values=f"{kind}s", key=k, value=v) for k, v in others if k not in held]
        joint, places = "\n", rng.sample(range(len(lines)), len(needles))
    for place, needle in zip(sorted(places, reverse=True), needles, strict=True):
        lines.insert(place, needle)
    asked = rng.sample(list(held), queries)
    query = ", ".join(asked[:-1]) + f", and {asked[-1]}" if queries > 1 else asked[0]
    prompt = prompts.NIAH_ONE if queries * values == 1 else prompts.NIAH
    return _asked(prompt, [v for k in asked for v in held[k]], context=joint.join(lines), query=query, value=kind)


def vt(rng: random.Random, size: int, length: int, source: Source) -> Question:
    """Variable tracking: a value that four variables take over one from another, in lines of noise. One example before."""
    example = _solved(prompts.VT, *_tracking(rng, source.example_lines, letters=3))
    names, filled = _tracking(rng, size, letters=5)
    question = _asked(prompts.VT, names, **filled)
    return Question(f"{example}\n\n{question.text}", question.begins, question.answers)


def _tracking(rng: random.Random, lines: int, letters: int) -> tuple[list[str], dict[str, str]]:
    """Five variables, and what fills the prompt."""
    names: dict[str, None] = {}
    while len(names) < 5:
        names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
    value = str(rng.randrange(10_000, 99_999))
    chain = [f"VAR {next(iter(names))} = {value}", *(f"VAR {b} = VAR {a} " for a, b in pairwise(names))]
    text = [prompts.NOISE] * lines
    for n, place in enumerate(sorted(rng.sample(range(lines), len(chain)))):
        text.insert(place + n, chain[n])
    return list(names), {"context": "\n".join(text), "query": value, "count": str(len(names))}


def cwe(rng: random.Random, size: int, length: int, source: Source) -> Question:
    """Common words: ten words thirty times, others three times each, numbered; fewer in short texts. One example before."""
    often, seldom, example = (30, 3, (40, 10, 3)) if length >= 4096 else (6, 1, (20, 3, 1))
    shown, common = _counted(rng, source, *example)
    listed, answers = _counted(rng, source, size, often, seldom)
    solved = _solved(prompts.CWE, [f"{n}. {word}" for n, word in enumerate(common, 1)], {"context": shown})
    question = _asked(prompts.CWE, answers, context=listed)
    return Question(f"{solved}\n{question.text}", question.begins, question.answers)


def _counted(rng: random.Random, source: Source, size: int, often: int, seldom: int) -> tuple[str, list[str]]:
    """`size` different words in a numbered list, and the ten that are there often."""
    different = source.different(rng, size)
    listed = different[:10] * often + different[10:] * seldom
    rng.shuffle(listed)
    return " ".join(f"{n}. {word}" for n, word in enumerate(listed, 1)), different[:10]


def fwe(rng: random.Random, size: int, length: int, source: Source) -> Question:
    """Frequent words: made-up ones, the k-th of them size / (zeta(2) k^2) times. The first is dots; the next three are asked
    for."""
    coded: dict[str, None] = {"...": None}
    while len(coded) < length // 50 - 1:  # of the tokens before the answer, which has 50
        coded["".join(rng.choices(string.ascii_lowercase, k=6))] = None
    counts = [int(size / (k * k * math.pi**2 / 6)) for k in range(1, len(coded) + 1)]
    text = [word for word, count in zip(coded, counts, strict=True) for _ in range(count)]
    rng.shuffle(text)
    return _asked(prompts.FWE, list(coded)[1:4], context=" ".join(text))


def qa_1(rng: random.Random, size: int, length: int, source: Source) -> Question:
    """One of `size` documents answers."""
    return _documents(rng, size, source.asked_of_one(rng))


def qa_2(rng: random.Random, size: int, length: int, source: Source) -> Question:
    """Several of `size` documents answer together."""
    return _documents(rng, size, source.asked_of_two(rng))


def _documents(rng: random.Random, size: int, asked: Asked) -> Question:
    """A question over `size` documents, those that answer it among them, in random order."""
    count, known = max(size - len(asked.holders), 0), {*asked.holders, *asked.near}
    if size > len(asked.documents):
        raise ValueError(f"the text gives {len(asked.documents)} documents, too few for this length: give a longer one")
    chosen = list(asked.near) if count > len(asked.near) else rng.sample(asked.near, count)
    others = [d for d in range(len(asked.documents)) if d not in known]
    chosen += [*asked.holders, *rng.sample(others, count - len(chosen))]
    rng.shuffle(chosen)
    context = "\n\n".join(f"Document {n}:\n{asked.documents[d]}" for n, d in enumerate(chosen, 1))
    return _asked(prompts.QA, asked.answers, context=context, query=asked.query)


def key_value(rng: random.Random, size: int, length: int, source: Source) -> Question:
    """A JSON object of random UUIDs; one key is looked up."""
    held = {uuid4(rng): uuid4(rng) for _ in range(size)}
    asked = rng.choice(list(held))
    context = "{" + ",\n ".join(f'"{k}": "{v}"' for k, v in held.items()) + "}"
    return _asked(prompts.KEY_VALUE, [held[asked]], context=context, query=asked)


#: From the node of a question of `graphwalks` to those that it asks for.
STEPS = 2


def graphwalks(rng: random.Random, size: int, length: int, source: Source) -> Question:
    """A graph of `size` nodes with two edges from each; the nodes at exactly two steps from one are asked for."""
    nodes = [f"{n:06x}" for n in rng.sample(range(16**6), size)]
    edges = {a: rng.sample([b for b in rng.sample(nodes, 3) if b != a], 2) for a in nodes}
    start = rng.choice(nodes)
    seen, found = {start}, {start}
    for _ in range(STEPS):
        found = {b for a in found for b in edges[a]} - seen
        seen |= found
    lines = [f"{a} -> {b}" for a, bs in edges.items() for b in bs]
    rng.shuffle(lines)
    return _asked(prompts.GRAPHWALKS, sorted(found), context="\n".join(lines), query=start, depth=str(STEPS))


def _asked(prompt: tuple[str, str], answers: Sequence[str], **fields: str) -> Question:
    return Question(prompt[0].format(**fields), prompt[1].format(**fields), tuple(answers))


def _solved(prompt: tuple[str, str], answers: Sequence[str], fields: dict[str, str]) -> str:
    """An example: question and answer."""
    question = _asked(prompt, answers, **fields)
    return f"{question.text}{question.begins} {' '.join(answers)}"


# scores -------------------------------------------------------------------------------------------------------------------


def match_all(written: str, answers: Sequence[str]) -> float:
    """The share of the answers that stand in what was written, in any case of letters."""
    return sum(a.lower() in cleaned(written).lower() for a in answers) / len(answers)


def match_any(written: str, answers: Sequence[str]) -> float:
    """1.0 if one of the answers stands in what was written."""
    return float(match_all(written, answers) > 0)


def f1_of_nodes(written: str, answers: Sequence[str]) -> float:
    """The harmonic mean of precision and recall of the nodes before the list's end; two empty lists agree."""
    found, right = set(re.findall(r"\w+", cleaned(written).partition("]")[0])), set(answers)
    return 2 * len(found & right) / (len(found) + len(right)) if found or right else 1.0


def cleaned(written: str) -> str:
    """Return an answer as it is scored: control characters become ends of lines, blanks around it go."""
    return re.sub(r"[\x00-\x1f]", "\n", written.strip()).strip()


@dataclass(frozen=True)
class Kind:
    """A kind of question.

    Args:
        make: writes one.
        new_tokens: that an answer may have.
        least: parts that it must have.
        score: from what was written and the answers to [0, 1].
        until: an answer ends there; None where one that is right stays right, whatever follows.
    """

    make: Maker
    new_tokens: int = 128
    least: int = 5
    score: Callable[[str, Sequence[str]], float] = match_all
    until: str | None = None

    def done(self, written: str, answers: Sequence[str]) -> bool:
        """Tell whether further tokens cannot change the score."""
        return self.score(written, answers) == 1 if self.until is None else self.until in written


#: The thirteen of RULER.
RULER = {
    "niah_single_1": Kind(partial(niah, hay="noise")),
    "niah_single_2": Kind(niah, least=50),
    "niah_single_3": Kind(partial(niah, value=uuid4), least=50),
    "niah_multikey_1": Kind(partial(niah, keys=4), least=50),
    "niah_multikey_2": Kind(partial(niah, hay="needles")),
    "niah_multikey_3": Kind(partial(niah, hay="needles", key=uuid4, value=uuid4)),
    "niah_multivalue": Kind(partial(niah, values=4), least=50),
    "niah_multiquery": Kind(partial(niah, keys=4, queries=4), least=50),
    "vt": Kind(vt, new_tokens=30),
    "cwe": Kind(cwe, new_tokens=120, least=20),
    "fwe": Kind(fwe, new_tokens=50, least=100),
    "qa_1": Kind(qa_1, new_tokens=32, least=2, score=match_any),
    "qa_2": Kind(qa_2, new_tokens=32, least=2, score=match_any),
}
KINDS = RULER | {
    "key_value": Kind(key_value, new_tokens=100, least=2),
    "graphwalks": Kind(graphwalks, least=8, score=f1_of_nodes, until="]"),
}
