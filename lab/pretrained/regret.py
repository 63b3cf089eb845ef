"""How far each simple rule for a longer text is behind the best untrained setting that was measured, over all rows.

A case is one model on one text of one length beyond its trained one, measured by one program. A rule's regret is its loss
less the lowest of any setting: on prose beyond the trained length, on copies that stand there, and on the mean of the two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from hf_longattn.evaluation.report import markdown
from hf_longattn.evaluation.rows import Row
from hf_longattn.extension import rerope_with, temperature
from hf_longattn.slots.method import ModelFacts
from lab.markdown import Contents
from lab.pretrained.copies import CHOOSING
from lab.pretrained.runner import STEP, rows_of

MEASURED = ("copies.json", "longer-*.json", "reading-*.json")
#: Models whose queries and keys are normalised.
QK_NORM = {"gemma-3-270m"}
#: The trained length in default windows, of methods whose window grows with it.
WINDOWS = {"rerope": 2, "leaky_rerope": 2, "yarn_far": 2, "self_extend": 8}


class Losses(NamedTuple):
    """On prose beyond the trained length, and on the copies that stand there; of a row, or of a rule less the best there."""

    prose: float
    copies: float
    mean: float


def losses(row: Row) -> Losses:
    edge = 0 if "segment" in row else row["trained"] // STEP
    copies = [x for (_, at), x in zip(row["copies"], row["copying"], strict=True) if at >= row["trained"]]
    prose = row["prose"][edge:]
    p, c = sum(prose) / len(prose), sum(copies) / len(copies)
    return Losses(p, c, (p + c) / 2)


def methods(row: Row) -> str:
    """A row's methods and position encoding by name, where their parameters are those that grow with the length."""
    config, rope, times = row["config"] or {}, row["rope"], row["length"] / row["trained"]
    if "parts" in config:
        return row["name"]
    if rope:
        return f"{rope[0]} × length" if rope[1:] == [max(2.0, times)] else str(rope)
    named = [x for x in config.values() if isinstance(x, dict) and "name" in x]
    if any(isinstance(x, list) for m in named for x in m.values()):
        return row["name"]  # by layer and head
    if any(m.get("train_length") or m.get("exponent", 1.0) != 1.0 for m in named):
        return row["name"]  # a temperature that begins elsewhere or is stronger
    if any(m["name"] == "yarn_far" and searched(m, max(2.0, times)) for m in named):
        return row["name"]
    windows = [m["window"] for m in named if m.get("window") and m["window"] * WINDOWS.get(m["name"], 0) != row["trained"]]
    other = "".join(f" {window}" for window in windows)
    border = " two bands" if any(m.get("border") == m.get("window") and m.get("border") for m in named) else ""
    return ("+".join(m["name"] for m in named) or "unmodified") + other + border


def searched(yarn_far: dict[str, Any], factor: float) -> bool:
    """Whether parameters other than the window and a border there differ from the defaults at that factor."""
    own = {"factor": factor, "stretch": "inf", "attention_factor": 1.0}
    return yarn_far["border"] not in (None, yarn_far["window"]) or any(yarn_far[k] != x for k, x in own.items())


def default(row: Row) -> str:
    """What `extend` takes in that row's case."""
    known = {"train_length": row["trained"], "qk_norm": row["model"] in QK_NORM}
    facts = ModelFacts(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1, value_dim=1, **known)
    return rerope_with(temperature(facts, row["length"]))


RULES: dict[str, Callable[[Row], str]] = {
    "`extend`": default,
    "`rerope`": lambda row: "rerope",
    "`rerope+infoscale`": lambda row: "rerope+infoscale",
    "`rerope+logn`": lambda row: "rerope+logn",
    "`rerope+yarn_temperature`": lambda row: "rerope+yarn_temperature",
    "`yarn_far`": lambda row: "yarn_far",
    "`self_extend`": lambda row: "self_extend",
    "`self_extend+infoscale`": lambda row: "self_extend+infoscale",
    "`self_extend+logn`": lambda row: "self_extend+logn",
    "`leaky_rerope`": lambda row: "leaky_rerope",
    "`yarn_beyond`": lambda row: "yarn_beyond",
    "YaRN × length": lambda row: "yarn × length",
    "CoPE": lambda row: str(["cope"]),
    "`streaming`": lambda row: "streaming 4096",
    "unmodified": lambda row: "unmodified",
}


def cases() -> Iterator[list[Row]]:
    """Rows of one program, model, text (not one that chose settings), length and segment; no adapters, no calibration."""
    for pattern in MEASURED:
        found: dict[Any, list[Row]] = defaultdict(list)
        for row in rows_of(pattern):
            other = row.get("adapter") or row.get("whole") or row.get("calibration") or row["text"] in CHOOSING
            if row["length"] > row["trained"] and not other:
                found[row["model"], row["text"], row["length"], row.get("segment")].append(row)
        yield from (rows for rows in found.values() if len(rows) > 1)


def regrets() -> dict[str, dict[int, Losses]]:
    """The regret of each rule, by the number of the case."""
    result: dict[str, dict[int, Losses]] = {name: {} for name in RULES}
    for case, rows in enumerate(cases()):
        of = {methods(row): losses(row) for row in rows}
        best = Losses(*map(min, zip(*of.values(), strict=True)))
        for name, rule in RULES.items():
            if (taken := rule(rows[0])) in of:
                result[name][case] = Losses(*(x - least for x, least in zip(of[taken], best, strict=True)))
    return result


def apart(one: Mapping[int, Losses], other: Mapping[int, Losses]) -> list[float]:
    """By how much one rule's regret of the mean exceeds another's, of the cases where they take different settings."""
    return [x for case in one if case in other and (x := one[case].mean - other[case].mean)]


def contents() -> Contents:
    """What stands below these marks.

    `<!-- regret: all -->`: every rule; in brackets, in how many cases it is ahead of `extend`.
    `<!-- behind: RULE digits -->`: its mean, a number of a sentence.
    `<!-- ahead: RULE digits -->`: of `extend`, in the mean over the cases where they take different settings.
    `<!-- cases: MODEL -->`: the lengths of its cases, in trained ones.
    """
    regret = regrets()

    def asked(_: str) -> str:
        body = []
        for name, found in regret.items():
            if found:
                means = [sum(column) / len(found) for column in zip(*found.values(), strict=True)]
                less = apart(found, regret["`extend`"])
                beside = f"{sum(less) / len(less):+.3f} ({sum(x < 0 for x in less)} of {len(less)})" if less else "–"
                worst = f"{max(x.mean for x in found.values()):.3f}"
                body.append((means[2], [name, str(len(found)), *(f"{x:.3f}" for x in means), worst, beside]))
        head = ["rule", "cases", "behind the best on prose", "on copies", "on their mean", "worst case of the mean"]
        return markdown([*head, "mean less that of `extend`, cases of both"], [cells for _, cells in sorted(body)])

    def behind(what: str) -> str:
        found, digits = named(what)
        return f"{sum(x.mean for x in found.values()) / len(found):.{digits}f}"

    def ahead(what: str) -> str:
        found, digits = named(what)
        less = apart(found, regret["`extend`"])
        if not (mean := sum(less) / len(less)) < 0:
            raise ValueError(f"a page says that {what} is ahead of extend: {mean:+.3f}")
        return f"{-mean:.{digits}f}"

    def named(what: str) -> tuple[dict[int, Losses], str]:
        rule, _, digits = what.rpartition(" ")
        return regret[rule if rule in regret else f"`{rule}`"], digits

    def multiples(model: str) -> str:
        found = sorted({rows[0]["length"] / rows[0]["trained"] for rows in cases() if rows[0]["model"] == model})
        *most, last = (f"{times:g}" for times in found)
        return f"{', '.join(most)} and {last}"

    return {"regret": asked, "behind": behind, "ahead": ahead, "cases": multiples}


if __name__ == "__main__":
    print(contents()["regret"]("all"))
