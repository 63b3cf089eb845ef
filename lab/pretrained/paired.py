"""Losses of rows by where they stand, and settings less another, passage by passage, on every text that both have read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

from hf_longattn.evaluation import PASSAGE
from hf_longattn.evaluation.rows import Row
from hf_longattn.evaluation.statistics import mean_interval
from lab.markdown import Contents
from lab.pretrained.runner import STEP, having, lines, parts

Pair = tuple[Row, Row]
#: Begins the names of settings whose method was removed; a table shows them where it names them.
REMOVED = ("yarn_far",)

#: Copies by distance, end and the trained length; those from up to that length back stand within it ("known") or beyond it.
COPIES: dict[str, Callable[[int, int, int], bool]] = {
    "all": lambda distance, end, trained: True,
    "near": lambda distance, end, trained: distance <= trained,
    "known": lambda distance, end, trained: end <= trained,
    "new": lambda distance, end, trained: distance <= trained < end,
    "far": lambda distance, end, trained: distance > trained,
}


def losses(row: Row, which: str) -> list[float]:
    """On each copy of a kind, or on each piece of "prose", and of that "within" the trained length or "beyond" it."""
    trained = row["trained"]
    if chosen := COPIES.get(which):
        return [x for (d, p), x in zip(row["copies"], row["copying"], strict=True) if chosen(d, p + PASSAGE, trained)]
    edge = trained // STEP
    return row["prose"][{"prose": slice(None), "within": slice(edge), "beyond": slice(edge, None)}[which]]


def by_text(rows: Iterable[Row], one: str, other: str) -> list[Pair]:
    """The rows of two settings, of every text that both have read."""
    read = [{r["text"]: r for r in rows if r["name"] == name} for name in (one, other)]
    return [(read[0][text], read[1][text]) for text in sorted(read[0].keys() & read[1].keys())]


def differences(pairs: Iterable[Pair], which: str) -> list[float]:
    """The first of each pair less the second, of every piece."""
    return [a - b for one, other in pairs for a, b in zip(losses(one, which), losses(other, which), strict=True)]


def interval(values: Sequence[float]) -> str:
    return "{:+.3f} ± {:.3f}".format(*mean_interval(values))


def shown(values: Sequence[float]) -> str:
    return interval(values) if values else "–"


def less(rows: list[Row], other: str, prose: Callable[[list[Pair]], str], head: str) -> str:
    """Every setting less another: all copies, with how many are better, near and far ones if any is far, and prose."""
    kinds = ["near", "far"] if any(losses(row, "far") for row in rows) else []
    body = {}
    for name in dict.fromkeys(r["name"] for r in rows if r["name"] != other):
        if pairs := by_text(rows, name, other):
            every = differences(pairs, "all")
            better = f"{shown(every)} ({sum(d < 0 for d in every)} of {len(every)})"
            body[name] = [better, *(shown(differences(pairs, kind)) for kind in kinds), prose(pairs)]
    return lines([f"less {other}", "all copies", *kinds, head], body)


def prose_less(one: Row, other: Row) -> list[float]:
    """The difference of mean prose losses within the trained length, and beyond it."""
    halves = [(losses(one, half), losses(other, half)) for half in ("within", "beyond")]
    return [sum(x) / len(x) - sum(y) / len(y) for x, y in halves]


def halves(pairs: list[Pair]) -> str:
    return ", ".join(" / ".join(f"{x:+.3f}" for x in prose_less(*pair)) for pair in pairs)


def pieces(pairs: list[Pair]) -> str:
    return shown(differences(pairs, "prose"))


def told(rows: list[Row], one: str, other: str, what: str, sign: int) -> str:
    """A number of a sentence: how much better (sign -1) or worse (1) `one` is than `other`, which the rows must bear out.

    Args:
        what: "all", "near" or "far" copies (from up to the trained length back, from farther) or "prose": mean and interval;
            behind it "mean" for the mean alone, and a number of digits other than two. Or "count": how many copies are better.
    """
    which, *form = what.split()
    found = differences(by_text(rows, one, other), "all" if which == "count" else which)
    mean, half = mean_interval(found)
    if not mean * sign > 0:
        raise ValueError(f"a page says that {one} is {'worse' if sign > 0 else 'better'} than {other} ({what}): {mean:+.3f}")
    if which == "count":
        return f"{sum(d < 0 for d in found)} of {len(found)}"
    digits = next((int(x) for x in form if x.isdigit()), 2)
    return f"{abs(mean):.{digits}f}" + ("" if "mean" in form else f" ± {half:.{digits}f}")


def marks(
    name: str,
    select: Callable[[list[str]], list[Row]],
    prose: Callable[[list[Pair]], str] = pieces,
    head: str = "prose",
) -> Contents:
    """What stands below marks of rows that words select.

    `<!-- NAME less: WORDS | other -->`: every setting less another, without adapters and removed methods;
    of `| label | ...` behind it, these.
    `<!-- NAME better: WORDS | one | other | what -->`, `NAME worse`: a number of a sentence, see `told`.
    """

    def table(what: str) -> str:
        words, (other, *only) = parts(what)
        kept = [r for r in select(words) if "adapter" not in r and not r["name"].startswith(REMOVED)]
        rows = [r for r in select(words) if r["name"] in (other, *only)] if only else kept
        return less(rows, other, prose, head) if rows else "*Not run yet.*"

    def number(what: str, sign: int) -> str:
        words, (one, other, asked) = parts(what)
        return told(select(words), one, other, asked, sign)

    signs = {"better": -1, "worse": 1}
    return {f"{name} less": table} | {f"{name} {word}": functools.partial(number, sign=sign) for word, sign in signs.items()}


def by_words(rows: Iterable[Row], columns: Sequence[str], choosing: Sequence[str]) -> Callable[[list[str]], list[Row]]:
    """From words, one of each column, to rows: of texts that chose nothing, or with "choosing" behind of those that did."""

    def select(words: list[str]) -> list[Row]:
        chose = words[-1] == "choosing"
        found = having(rows, words[:-1] if chose else words, columns)
        return [r for r in found if (r["text"] in choosing) == chose]

    return select
