"""The headline on forty texts, copies and answers: each text's mean counts once. Their protocol is headline_many.yaml."""

from __future__ import annotations

from statistics import fmean

from hf_longattn.evaluation.report import markdown
from hf_longattn.evaluation.rows import Row, RowFile
from hf_longattn.evaluation.statistics import mean_interval
from lab.markdown import Contents
from lab.pretrained import paired
from lab.pretrained.answers import by_half, count, read_by_all
from lab.pretrained.runner import RESULTS, parts, rows_of

RESULT = RESULTS / "headline-many.json"
#: One of these texts, read on a CPU in float32.
ELSEWHERE = RESULTS / "headline-many-cpu.json"
#: Facts hidden in the same texts, which answers.py asks for.
ANSWERS = "answers-many.json"
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
    `<!-- many answers: LENGTH | other -->`: the right answers of every setting on texts that all have read, of the first half
    of a text and of the second, and, less another's over texts, the share of right answers and the loss; of
    `| label | ...` behind it, these.
    `<!-- many right: LENGTH | label -->`: a number of a sentence, as "12 of 60".
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

    def asked(length: str) -> dict[str, dict[str, Row]]:
        return read_by_all(row for row in rows_of(ANSWERS) if row["length"] == int(length))

    def answers(what: str) -> str:
        (length,), (other, *only) = parts(what)
        here, body = asked(length), []
        for name in only or here:
            both = list(zip(here[name].values(), here[other].values(), strict=True))
            share, loss = ([fmean(a[column]) - fmean(b[column]) for a, b in both] for column in ("found", "loss"))
            counts = f"({sum(d > 0 for d in share)} more, {sum(d < 0 for d in share)} fewer of {len(share)})"
            less = ["", ""] if name == other else [f"{paired.interval(share)} {counts}", shown(loss)]
            body.append([f"`{name}`", count(here[name]), *by_half(here[name]), *less])
        head = ["", "right", "of the first half", "of the second", f"share less {other}'s", f"loss less {other}'s"]
        return markdown(head, body)

    def right(what: str) -> str:
        (length,), (label,) = parts(what)
        return count(asked(length)[label])

    def elsewhere(_: str) -> str:
        here = {(row["text"], row["name"]): row for row in read("all")}
        pairs = [(row, here[row["text"], row["name"]]) for row in RowFile(ELSEWHERE)]
        apart = [abs(fmean(paired.losses(a, w)) - fmean(paired.losses(b, w))) for a, b in pairs for w in ("all", "prose")]
        return f"{max(apart):.3f}"

    answered = {"many answers": answers, "many right": right}
    return {"many less": less, "many better": better, "many elsewhere": elsewhere} | answered
