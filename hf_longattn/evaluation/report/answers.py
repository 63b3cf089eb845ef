"""Tasks with an answer, as sections of a report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..measures.copies import PASSAGE, SKIP
from ..results import COPIES, Results
from ..settings import UNMODIFIED
from ..statistics import mean_of, wilson
from ..verdict import title_of
from .figures import NATS, curves, heat_map, pair, tokens_shown
from .section import Figure, Section, Table

AS_ABOVE = "As under “Loss by length”."


def task(results: Results, name: str) -> Section:
    lengths = sorted({r["length"] for r in results.rows if r["task"] == name})
    columns = ["setting", *(f"{n:,}" for n in lengths)]
    accuracy, intervals, likelihood = [], [], []
    for s in results.settings:
        cells = [[a for r in results.of(s, name, n) for a in r["answers"]] for n in lengths]
        accuracy.append([s, *(mean_of([float(a["exact"]) for a in c]) for c in cells)])
        intervals.append([s, *(_share([a["exact"] for a in c]) for c in cells)])
        likelihood.append([s, *(mean_of([a["log_likelihood"] / a["tokens"] for a in c]) for c in cells)])
    counts = sorted({len({r["which"] for r in results.of(s, name, n)}) for s in results.settings for n in lengths} - {0})
    tables = [
        Table("Accuracy", columns, accuracy, digits=2, shade=(0.0, 1.0)),
        Table("Accuracy with its 95 % Wilson interval", columns, intervals),
        Table("Log-likelihood of the answer, nats per token (0 is certain)", columns, likelihood),
    ]
    if name == COPIES:
        return _copies(results, lengths)
    if not any(a["exact"] for r in results.rows if r["task"] == name for a in r["answers"]):
        tables = [Table(t.title, t.columns, t.rows, note="No answer is right under any setting.") for t in tables[2:]]
    return Section(
        title_of(name),
        "An answer is right if every token of it is the most likely one, given the true tokens before it. The log-"
        "likelihood still moves where a small model is never right.",
        tables,
        _maps(results, name, lengths) if name in ("needle", "needles") else (),
        f"Task {name} of hf_longattn.tasks at each length, {' or '.join(map(str, counts))} texts per setting and length, "
        "the same texts for every setting; one forward pass over text and answer.",
        results.command(name),
    )


def _copies(results: Results, lengths: Sequence[int]) -> Section:
    tables = []
    for n in lengths:
        distances: list[int] = next((r["distances"] for r in results.rows if r["task"] == COPIES and r["length"] == n), [])
        order = sorted(range(len(distances)), key=lambda i: distances[i])
        rows: list[list[str | float | None]] = []
        for s in results.settings:
            found = [r["answers"] for r in results.of(s, COPIES, n) if r["which"] in results.common(COPIES, n)]
            losses = [mean_of([-f[i]["log_likelihood"] / f[i]["tokens"] for f in found]) for i in order]
            rows.append([s, *losses, mean_of([x for x in losses if x is not None])])
        columns = ["setting", *(f"{distances[i]:,} back" for i in order), "all"]
        tables.append(Table(f"Loss on copies at {n:,} tokens, nats", columns, rows, digits=2))
        lines = {
            str(s): [(distances[i], x) for i, x in zip(order, losses, strict=True) if isinstance(x, float)]
            for s, *losses, _ in rows
        }
    figures = pair(
        lambda limits: curves(lines, "how far back (tokens)", NATS, tables[-1].title.removesuffix(", nats"), limits=limits),
        [y for points in lines.values() for _, y in points],
        "copies-by-distance",
        "Mean loss on copies against how far back their first reading is, one line a setting",
    )
    return Section(
        title_of(COPIES),
        f"The last tokens of a text repeat passages of {PASSAGE} tokens from far back. A model that reaches the first "
        f"reading predicts the second nearly free; the first {SKIP} tokens of each do not count.",
        tables,
        figures,
        AS_ABOVE,
        results.command(COPIES),
    )


def effective(results: Results) -> Section:
    rows: list[list[Any]] = []
    for s in results.settings:
        found = [results.effective_length(s, task) for task in results.tasks]
        known = [n for n in found if n is not None]
        rows.append([s, *found, *([min(known) if len(known) == len(found) else None] if len(found) > 1 else [])])
    measured = {task: sorted({r["length"] for r in results.rows if r["task"] == task}) for task in results.tasks}
    near = ", ".join(
        f"{title_of(task)} {x:.3f} at {measured[task][0]:,}"
        for task in results.tasks
        if (x := results.score(UNMODIFIED, task, measured[task][0])) is not None
    )
    text = (
        f"The longest measured length up to which a setting keeps {results.keep:.0%} of the unmodified model's score at the "
        f"shortest length. The score is the probability of an answer's token (geometric mean over the answers): {near}. "
        "0: not even at the shortest. The longest length that was measured means that or more."
    )
    columns = ["setting", *(title_of(task) for task in results.tasks), *(["all of them"] if len(results.tasks) > 1 else [])]
    lengths = "; ".join(f"{title_of(t)}: {', '.join(f'{n:,}' for n in ns)}" for t, ns in measured.items())
    table = Table("Effective length, tokens", columns, rows, note=f"Measured at {lengths}.")
    return Section("Effective length", text, [table], (), "As under each task.", results.command(*results.tasks))


def _maps(results: Results, name: str, lengths: Sequence[int]) -> list[Figure]:
    """Of each setting accuracy and log-likelihood by length and depth."""
    bands = [f"{20 * i}–{20 * i + 20} %" for i in range(5)] if name == "needles" else None
    depths = sorted({round(a["depth"], 2) for r in results.rows if r["task"] == name for a in r["answers"]})
    labels = bands or [f"{100 * d:.0f} %" for d in depths]

    def row_of(depth: float) -> int:
        return min(int(depth * 5), 4) if bands else depths.index(round(depth, 2))

    grids = _grids(results, name, lengths, row_of)
    figures = []
    worst = min((a["log_likelihood"] / a["tokens"] for g in grids.values() for c in g.values() for a in c), default=-1.0)
    scale = math.floor(worst) if worst < 0 else -1.0
    right = any(a["exact"] for g in grids.values() for c in g.values() for a in c)
    for i, (s, cells) in enumerate(grids.items()):
        shapes = (range(len(labels)), range(len(lengths)))
        for kind, value, limits, unit in (
            ("accuracy", lambda a: float(a["exact"]), (0.0, 1.0), "share of answers right"),
            ("log-likelihood", lambda a: a["log_likelihood"] / a["tokens"], (float(scale), 0.0), "nats per answer token"),
        ):
            if kind == "accuracy" and not right:
                continue  # a map of zeros says no more than the table
            grid = [[mean_of([value(a) for a in cells.get((y, x), [])]) for x in shapes[1]] for y in shapes[0]]
            png = heat_map(
                grid,
                labels,
                [tokens_shown(n) for n in lengths],
                "length (tokens)",
                "depth of the needle",
                f"{s}: {kind}",
                limits,
                unit,
            )
            alt = f"Heat map of {kind} by length and depth of the needle under {s}"
            figures.append(Figure(f"{name}-{i:02d}-{kind}", png, alt, f"{s}: {kind}; all maps of a kind share one scale."))
    return figures


#: Answers by (row, column) of a map.
Grid = dict[tuple[int, int], list[Mapping[str, float]]]


def _grids(results: Results, name: str, lengths: Sequence[int], row_of: Callable[[float], int]) -> dict[str, Grid]:
    """By setting, of those that have answers."""
    grids: dict[str, Grid] = {s: {} for s in results.settings}
    for s, cells in grids.items():
        for r in results.of(s, name):
            for a in r["answers"]:
                cells.setdefault((row_of(a["depth"]), lengths.index(r["length"])), []).append(a)
    return {s: cells for s, cells in grids.items() if cells}


def _share(hits: Sequence[bool]) -> str | None:
    if not hits:
        return None
    low, high = wilson(sum(hits), len(hits))
    return f"{sum(hits)}/{len(hits)} ({low:.2f}–{high:.2f})"
