"""The headline on forty texts, which a GPU read: each text's mean counts once. Their protocol is headline_many.yaml."""

from __future__ import annotations

from statistics import fmean

from hf_longattn.evaluation.report import markdown
from hf_longattn.evaluation.rows import Row, RowFile
from hf_longattn.evaluation.statistics import mean_interval
from lab.markdown import Contents
from lab.pretrained import paired
from lab.pretrained.runner import RESULTS, parts

RESULT = RESULTS / "headline-many.json"
#: One of these texts, read on a CPU in float32.
ELSEWHERE = RESULTS / "headline-many-cpu.json"
#: Columns of the table: what `paired.losses` calls it, and its head.
COLUMNS = {"all": "all copies", "near": "near", "far": "far", "within": "text within", "beyond": "text beyond"}


def differences(rows: list[Row], one: str, other: str, what: str) -> list[float]:
    """By text, the mean loss under one setting less that under another."""
    pairs = paired.by_text(rows, one, other)
    return [fmean(paired.losses(a, what)) - fmean(paired.losses(b, what)) for a, b in pairs]


def shown(found: list[float]) -> str:
    return f"{paired.interval(found)} ({sum(d < 0 for d in found)} of {len(found)})"


def contents() -> Contents:
    """What stands below these marks. KIND is all, or a kind of text.

    `<!-- many less: KIND | other -->`: every setting less another, over texts; of `| label | ...` behind it, these.
    `<!-- many better: KIND | one | other | what -->`: a number of a sentence, of `COLUMNS`, by how much one is better; with
    "count" behind, on how many texts.
    `<!-- many elsewhere: -->`: the largest difference of a mean loss from that of the same reading on a CPU.
    """

    def read(kind: str) -> list[Row]:
        return [row for row in RowFile(RESULT) if kind in ("all", row["text"].partition("-")[0])]

    def less(what: str) -> str:
        (kind,), (other, *only) = parts(what)
        rows = read(kind)
        names = only or [name for name in dict.fromkeys(row["name"] for row in rows) if name != other]
        body = [[f"`{name}`", *(shown(differences(rows, name, other, which)) for which in COLUMNS)] for name in names]
        return markdown([f"less {other}", *COLUMNS.values()], body)

    def better(what: str) -> str:
        (kind,), (one, other, asked) = parts(what)
        which, *count = asked.split()
        found = differences(read(kind), one, other, which)
        if count:
            return f"{sum(d < 0 for d in found)} of {len(found)}"
        value, half = mean_interval(found)
        if not value < 0:
            raise ValueError(f"a page says that {one} is better than {other} ({what}): {value:+.3f}")
        return f"{-value:.3f} ± {half:.3f}"

    def elsewhere(_: str) -> str:
        here = {(row["text"], row["name"]): row for row in read("all")}
        pairs = [(row, here[row["text"], row["name"]]) for row in RowFile(ELSEWHERE)]
        apart = [abs(fmean(paired.losses(a, w)) - fmean(paired.losses(b, w))) for a, b in pairs for w in ("all", "prose")]
        return f"{max(apart):.3f}"

    return {"many less": less, "many better": better, "many elsewhere": elsewhere}
