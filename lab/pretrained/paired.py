"""Tables of settings less another, passage by passage: rows of one model and length, of every text that both have read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hf_longattn.evaluation.rows import Row
from hf_longattn.evaluation.statistics import mean_interval
from lab.pretrained.runner import STEP, lines


def pairs(rows: Iterable[Row], one: str, other: str) -> list[tuple[float, int, int]]:
    """Of every copy that both have read: the loss under `one` less that under `other`, its distance, the trained length."""
    by_name = {(r["name"], r["text"]): r for r in rows}
    found = []
    for (name, text), row in by_name.items():
        if name == one and (base := by_name.get((other, text))) is not None:
            losses = zip(row["copying"], base["copying"], row["copies"], strict=True)
            found += [(a - b, distance, row["trained"]) for a, b, (distance, _) in losses]
    return found


def shown(differences: Sequence[float]) -> str:
    if not differences:
        return "–"
    mean, half = mean_interval(differences)
    return f"{mean:+.3f} ± {half:.3f} ({sum(d < 0 for d in differences)} of {len(differences)})"


def less(rows: list[Row], other: str, prose: Callable[[list[tuple[Row, ...]]], str], head: str) -> str:
    """Every setting less another: all copies, those from up to the trained length back, those from farther, and prose."""
    body = {}
    for name in dict.fromkeys(r["name"] for r in rows if r["name"] != other):
        if found := pairs(rows, name, other):
            near = [d for d, distance, trained in found if distance <= trained]
            far = [d for d, distance, trained in found if distance > trained]
            body[name] = [shown([d for d, *_ in found]), shown(near), shown(far), prose(by_text(rows, name, other))]
    return lines([f"less {other}", "all copies", "up to the trained length back", "from farther back", head], body)


def by_text(rows: list[Row], *names: str) -> list[tuple[Row, ...]]:
    """The rows of these settings, of every text that all of them have read."""
    read = [{r["text"]: r for r in rows if r["name"] == name} for name in names]
    return [tuple(r[text] for r in read) for text in sorted(set.intersection(*map(set, read)))]


def prose_less(one: Row, other: Row) -> list[float]:
    """The difference of mean prose losses within the trained length, and beyond it."""
    at = one["trained"] // STEP
    halves = [(r["prose"][:at], r["prose"][at:]) for r in (one, other)]
    return [sum(x) / len(x) - sum(y) / len(y) for x, y in zip(*halves, strict=True)]


def halves(texts: list[tuple[Row, ...]]) -> str:
    return ", ".join(" / ".join(f"{x:+.3f}" for x in prose_less(*pair)) for pair in texts)


def pieces(texts: list[tuple[Row, ...]]) -> str:
    return shown([a - b for one, other in texts for a, b in zip(one["prose"], other["prose"], strict=True)])


def told(rows: list[Row], one: str, other: str, what: str, sign: int) -> str:
    """A number of a sentence: how much better (sign -1) or worse (1) `one` is than `other`, which the rows must bear out.

    Args:
        what: "all", "near" or "far" copies (from up to the trained length back, from farther) or "prose": mean and interval;
            behind it "mean" for the mean alone, and a number of digits other than two. Or "count": how many copies are better.
    """
    which, *form = what.split()
    if which == "prose":
        found = [a - b for x, y in by_text(rows, one, other) for a, b in zip(x["prose"], y["prose"], strict=True)]
    else:
        found = [
            d for d, at, trained in pairs(rows, one, other) if which in ("all", "count") or (at > trained) == (which == "far")
        ]
    mean, half = mean_interval(found)
    if not mean * sign > 0:
        raise ValueError(f"a page says that {one} is {'worse' if sign > 0 else 'better'} than {other} ({what}): {mean:+.3f}")
    if which == "count":
        return f"{sum(d < 0 for d in found)} of {len(found)}"
    digits = next((int(x) for x in form if x.isdigit()), 2)
    return f"{abs(mean):.{digits}f}" + ("" if "mean" in form else f" ± {half:.{digits}f}")
