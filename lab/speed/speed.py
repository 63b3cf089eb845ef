"""The tables of docs/speed.md and its pictures from the result files of `make bench`; those of a GPU are in gpu_tables.py."""

import itertools
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_longattn.evaluation import rows as store
from hf_longattn.evaluation.report import figures, markdown
from lab.markdown import Contents

ROOT = Path(__file__).parents[2]
FILES = {"cpu": "attention-cpu.json"}
HOST, GENERATION = "host-cpu.json", "generation-cpu.json"
Rows = list[dict[str, Any]]
SDPA = ("none", "torch sdpa")


def load_all() -> Rows:
    """The rows of all files, each with "where"."""
    result: Rows = []
    for where, name in FILES.items():
        rows = store.RowFile(ROOT / "lab" / "results" / name)
        result += [r | {"where": where} for r in rows]
    return result


def name_of(row: dict[str, Any]) -> str:
    """Method, and the backend where it is not the one that users get."""
    method = "" if row["method"] == "none" else f"`{row['method'].split(',')[0]}`{row['method'].partition(',')[2]}"
    return ", ".join(x for x in (method, "" if row["backend"] == "auto" else row["backend"]) if x)


def chosen(rows: Rows, where: str, mode: str, has: str) -> Rows:
    rows = [r for r in rows if r["where"] == where and r["mode"] == mode and r.get(has) is not None]
    return [r for r in rows if mode not in MODES or r["heads"] == r["kv_heads"]]


MODES = ("forward", "forward+backward", "decode")


def by_length(rows: Rows, cell: Callable[[dict[str, Any]], str], extra: Callable[[Rows], str] | None = None) -> str:
    """A line for each method and backend, a column for each length."""
    lengths = sorted({r["length"] for r in rows})
    head, lines = ["", *(f"{n:,}" for n in lengths), *(["exponent"] if extra else [])], []
    for key in dict.fromkeys((r["method"], r["backend"]) for r in rows):
        own = [r for r in rows if (r["method"], r["backend"]) == key]
        cells = {r["length"]: cell(r) for r in own}
        lines.append([name_of(own[0]), *(cells.get(n, "–") for n in lengths), *([extra(own)] if extra else [])])
    return markdown(head, lines)


def ratio(row: dict[str, Any]) -> str:
    if row["ratio_p20"] == row["ratio_p80"]:
        return f"{row['ratio']:.2f}"
    return f"{row['ratio']:.2f} ({row['ratio_p20']:.2f}–{row['ratio_p80']:.2f})"


def median(row: dict[str, Any]) -> str:
    """The ratio of a table, with its percentiles where one of them is more than a tenth off."""
    off = max(row["ratio_p80"] / row["ratio"], row["ratio"] / row["ratio_p20"])
    return ratio(row) if off > 1.1 else f"{row['ratio']:.2f}"


def exponent(rows: Rows) -> float:
    """The slope of log memory against log length, by least squares."""
    lengths, peaks = ([math.log(r[key]) for r in rows] for key in ("length", "peak_mib"))
    return statistics.linear_regression(lengths, peaks).slope


def table(rows: Rows, words: list[str]) -> str:
    """`WHERE MODE ...` (ratios), `WHERE memory MODE ...`, `WHERE whole MODEL`."""
    where, *rest = words
    if rest[0] == "whole":
        return whole(rows, where, rest[1])
    mode = " ".join(w for w in rest if w != "memory")
    has = "peak_mib" if "memory" in rest else "ratio"
    rows = chosen(rows, where, mode, has)
    if not rows:
        return "Not measured yet."
    if has == "peak_mib":
        return by_length(rows, lambda r: f"{r['peak_mib']:,.0f}", lambda own: f"{exponent(own):.2f}" if len(own) > 2 else "–")
    return by_length([r for r in rows if (r["method"], r["backend"]) != SDPA], median)


def whole(rows: Rows, where: str, model: str) -> str:
    """Seconds of a whole model by what it does, with their ratio."""
    own = [r for r in rows if r["where"] == where and r["mode"].startswith(model) and "seconds" in r]
    modes = {r["mode"]: f"{r['mode'].removeprefix(model).strip()}, {r['length']:,}" for r in own}
    cells = {(r["method"], r["backend"], r["mode"]): f"{1000 * r['seconds']:,.0f} ms, {median(r)}" for r in own}
    names = {(r["method"], r["backend"]): name_of(r) for r in own}
    return markdown(
        ["", *modes.values()], [[name, *(cells.get((*key, m), "–") for m in modes)] for key, name in names.items()]
    )


def host() -> str:
    """Microseconds of a layer over sdpa's by method, where it changes nothing and where it acts."""
    rows = list(store.RowFile(ROOT / "lab" / "results" / HOST))
    by_mode = {mode: {r["method"]: r["host_us"] for r in rows if r["mode"] == mode} for mode in ("within", "acting")}
    lines = [
        [f"`{name}`", *(f"{by_mode[mode][name]:.0f}" if name in by_mode[mode] else "–" for mode in by_mode)]
        for name in dict.fromkeys(r["method"] for r in rows)
    ]
    layer = max(r["layer_us"] for r in rows)
    return markdown(["", "changes nothing", "acts"], [*lines, ["a layer under sdpa", f"{layer:.0f}", f"{layer:.0f}"]])


def generation() -> str:
    """Tokens per second by sequences and context, with the ratio of times to the unmodified model's."""
    rows = list(store.RowFile(ROOT / "lab" / "results" / GENERATION))
    names = {(r["method"], r["backend"]): r["method"] for r in rows}
    lines = []
    for (mode, batch, length), own in itertools.groupby(rows, lambda r: (r["mode"], r["batch"], r["length"])):
        by_name = {(r["method"], r["backend"]): r for r in own}
        what = f"{batch} × {length:,}" if mode == "generate" else f"{batch} × mixed, {mode}"
        cells = [f"{r['tokens_per_second']:g} ({median(r)})" for r in (by_name[name] for name in names)]
        lines.append([what, *cells])
    return markdown(["sequences × context", *names.values()], lines)


def generate(batch: str, length: str) -> str:
    """The time of `generate` by an extended model, as a ratio to the unmodified one's."""
    rows = store.RowFile(ROOT / "lab" / "results" / GENERATION)
    (row,) = (r for r in rows if (r["part"], r["backend"]) == (f"generate {batch} x {length}", "auto"))
    return ratio(row)


def between(rows: Rows, where: str, mode: str, method: str) -> str:
    """The least and the greatest ratio to sdpa of a method, over the lengths that were measured; one where they are equal."""
    found = [
        r["ratio"]
        for r in chosen(rows, where, mode, "ratio")
        if r["backend"] == "auto" and r["method"].split(",")[0] == method
    ]
    least, greatest = f"{min(found):.2f}", f"{max(found):.2f}"
    return least if least == greatest else f"{least} to {greatest}"


def contents() -> Contents:
    """What stands below `<!-- speed: WHERE WHAT ... -->` (see `table`), and within a sentence `<!-- speed: generate BATCH
    LENGTH -->` and `<!-- speed: between WHERE MODE METHOD -->`.
    """
    rows, apart = load_all(), {"host": host, "generation": generation}

    def made(what: str) -> str:
        first, *rest = what.split()
        if first == "generate":
            return generate(*rest)
        if first == "between":
            where, *mode, method = rest
            return between(rows, where, " ".join(mode), method)
        return apart[what]() if what in apart else table(rows, [first, *rest])

    return {"speed": made}


def picture(rows: Rows, where: str) -> bytes:
    """Ratio to sdpa against length, for each mode, and memory against length; of methods with several lengths."""
    figure, panels = figures.pyplot().subplots(2, 2, figsize=(11, 8), constrained_layout=True)
    shown = [(r["method"], r["backend"]) for r in rows if r["where"] == where and r["mode"] in MODES]
    names = [name for name in dict.fromkeys(shown) if shown.count(name) > 1]
    for panel, mode, what in zip(panels.flat, (*MODES, "forward"), ("ratio",) * 3 + ("peak_mib",), strict=True):
        here = chosen(rows, where, mode, what)
        for number, name in enumerate(names):
            own = sorted((r for r in here if (r["method"], r["backend"]) == name), key=lambda r: r["length"])
            if own:
                style: dict[str, Any] = {
                    "color": figures.COLOURS[number % 8],
                    "marker": figures.MARKERS[number // 8],
                    "label": ", ".join(name),
                }
                panel.plot([r["length"] for r in own], [r[what] for r in own], linewidth=1.5, markersize=5, **style)
                if what == "ratio":
                    panel.fill_between(
                        [r["length"] for r in own],
                        *([r[f"ratio_{p}"] for r in own] for p in ("p20", "p80")),
                        color=style["color"],
                        alpha=0.15,
                        linewidth=0,
                    )
        panel.set_xscale("log", base=2)
        panel.set(xlabel="length (tokens)", title=mode, ylabel="time, as a ratio to sdpa")
        if what == "peak_mib":
            panel.set_yscale("log", base=2)
            panel.set(title="memory, forward", ylabel="MiB beyond the inputs")
        else:
            panel.set_ylim(bottom=0)
    labels: dict[str, Any] = {}
    for panel in panels.flat:
        labels |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=3, fontsize=9)
    return figures.png(figure)


def pictures() -> dict[str, bytes]:
    rows = load_all()
    return {f"speed-{where}.png": picture(rows, where) for where in FILES if any(r["where"] == where for r in rows)}
