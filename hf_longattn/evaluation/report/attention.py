"""Pages about a model's attention: what `capture` found, as sections of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..measures.diagnostics import Diagnostics
from .figures import curves, heat_map, tokens_shown
from .section import Figure, Section, Table, Value

#: Quantities of the tables: name, column, decimals.
COLUMNS = {
    "entropy": "entropy (nats)",
    "local_mass": "last 100 keys",
    "sink_mass": "first key",
    "spread": "logit spread",
    "logit_mean": "logit mean",
    "logit_variance": "logit variance",
    "temperature": "temperature",
    "temperature_share": "rows heated",
    "output_slope": "output slope",
}

#: Of those whose column does not say it.
MEANINGS = {
    "spread": "logit spread is a row's largest logit minus its smallest",
    "temperature_share": "rows heated is the share of rows whose temperature is not 1",
    "output_slope": "output slope is that of the outputs' log deviation against ln n, -1/2 for independent tokens",
}

BySetting = Mapping[str, Diagnostics]


def sections(results: BySetting, protocol: str, command: str) -> list[tuple[int, Section]]:
    """(order, section) of a report on what was found under each setting, the first of them being the one to compare with."""
    about = {"protocol": protocol, "command": command}
    first = next(iter(results.values()))
    tables = [_summary(results)] + ([_by_distance(results)] if "range_mass" in first.values else [])
    parts = [(50, Section("Attention", _text(first), tables, _figures(results), **about))]
    by_head = {name: heads for name, heads in results.items() if heads.values.keys() & COLUMNS.keys()}
    tables = [_by_layer(name, result) for name, result in by_head.items()]
    if tables:
        parts.append((51, Section("Attention by layer", "Means over heads.", tables, _heads(first), **about)))
    return parts


def headline(results: BySetting) -> str:
    """What a reader in a hurry takes away."""
    first = next(iter(results.values()))
    for quantity, text, unit in (
        ("entropy", "Mean entropy of attention", " nats"),
        ("sink_mass", "Share of attention on the first keys", ""),
    ):
        if quantity in first.values:
            values = (f"{float(result.overall(quantity).mean()):.2f}{unit} ({name})" for name, result in results.items())
            return f"{text}: {', '.join(values)}."
    return ""


def _text(result: Diagnostics) -> str:
    """What the numbers are."""
    means = f"Means over query rows, heads and {len(result.layers)} layers"
    return f"{'; '.join([means, *(m for q, m in MEANINGS.items() if q in result.values)])}."


def _summary(results: BySetting) -> Table:
    used = _used(results)
    rows: list[list[Value]] = [[COLUMNS[q], *(_mean(result, q) for result in results.values())] for q in used]
    return Table("Means", ["", *results], rows)


def _by_distance(results: BySetting) -> Table:
    first = next(iter(results.values()))
    shares = [dict(_shares(result)) for result in results.values()]
    away = [*map(_range, first.ranges[:-1]), f"{tokens_shown(first.ranges[-1][0])} and farther"]
    rows: list[list[Value]] = [[name, *(s.get(r, 0.0) for s in shares)] for name, r in zip(away, first.ranges, strict=True)]
    note = f"For queries at {_group(first, _typical(first))} tokens"
    if all("sink_mass" in result.values for result in results.values()):
        sinks = [float(result["sink_mass"][:, :, _typical(result)].mean()) for result in results.values()]
        rows.append(["first key", *sinks])
        note += "; each column adds up to one."
    else:
        note += ", without the first key."
    return Table("Share of attention by distance", ["tokens back", *results], rows, note=note, shade=(0.0, 1.0))


def _mean(result: Diagnostics, quantity: str) -> float | None:
    return float(result.overall(quantity).nanmean()) if quantity in result.values else None


def _used(results: BySetting) -> list[str]:
    """The quantities that were measured, but temperatures that are 1 everywhere."""
    measured = [q for q in COLUMNS if any(q in result.values for result in results.values())]
    shares = [result["temperature_share"] for result in results.values() if "temperature_share" in result.values]
    warm = any(float(x.nan_to_num().max()) > 0 for x in shares)
    return measured if warm else [q for q in measured if not q.startswith("temperature")]


def _by_layer(name: str, result: Diagnostics) -> Table:
    used = [q for q in _used({name: result}) if q in result.values]
    columns = ["layer", *(COLUMNS[q] for q in used)]
    by_layer = [result.overall(q).nanmean(1).tolist() for q in used]
    return Table(name, columns, [[n, *values] for n, *values in zip(map(str, result.layers), *by_layer, strict=True)])


def _figures(results: BySetting) -> list[Figure]:
    first = next(iter(results.values()))
    figures = []
    if "entropy" in first.values:
        lines = {name: _by_length(result, result["entropy"]) for name, result in results.items()}
        png = curves(lines, "length of the text so far (tokens)", "entropy (nats)", log_x=True)
        caption = "Entropy of attention. A rising line is attention that spreads as the text grows."
        figures.append(Figure("attention-entropy", png, "Entropy against length under each setting", caption))
    if "range_mass" in first.values:
        lines = {name: [(r[0], x) for r, x in _shares(result) if r[0]] for name, result in results.items()}
        png = curves(lines, "distance, to the next mark (tokens)", "share of attention", log_x=True)
        where = f"for queries at {_group(first, _typical(first))} tokens"
        caption = (
            f"Attention by distance, {where}. Level is scale-invariant. The first token and distance 0 are in the table alone."
        )
        figures.append(Figure("attention-by-distance", png, "Share of attention in each range of distances", caption))
    if any(
        float(heads["temperature_share"].nan_to_num().max()) > 0 for heads in results.values() if "temperature" in heads.values
    ):
        lines = {name: _by_length(result, result["temperature_share"]) for name, result in results.items()}
        png = curves(lines, "length of the text so far (tokens)", "share of rows", log_x=True, limits=(-0.02, 1.02))
        caption = "Share of query rows in which a temperature changes the logits."
        figures.append(Figure("attention-temperature", png, "Share of rows with a temperature against length", caption))
    if "output_deviation" in first.values:
        lines = {name: _by_length(result, result["output_deviation"].log2()) for name, result in results.items()}
        png = curves(lines, "length of the text so far (tokens)", "log2 of the standard deviation", log_x=True)
        caption = (
            "Deviation of attention outputs, mean of its logarithm. Independent tokens would fall by one half per doubling."
        )
        figures.append(Figure("attention-outputs", png, "Deviation of outputs against length", caption))
    if "qq" in first.values:
        lines = {"Gaussian": [(z, z) for z in first.z]} | {
            f"layer {first.layers[n]}": list(zip(first.z, first["qq"][n].mean(0).tolist(), strict=True)) for n in _some(first)
        }
        png = curves(lines, "quantile of a Gaussian", "quantile of the logits", title=next(iter(results)))
        caption = "Standardised logits without the sink, mean over heads. Scale-invariant attention assumes the diagonal."
        figures.append(Figure("attention-qq", png, "Quantiles of logits against those of a Gaussian", caption))
    return figures


def _heads(result: Diagnostics) -> list[Figure]:
    """Layers x heads of the first setting."""
    figures = []
    columns = [str(i) if i % 5 == 0 or len(result.layers) <= 12 else "" for i in result.layers]
    for quantity, title, limits in (("sink_mass", "Attention on the first token", (0.0, 1.0)), ("entropy", "Entropy", None)):
        if quantity in result.values:
            grid = result.overall(quantity).T.tolist()
            ends = limits or (0.0, max(map(max, grid)))
            unit = "share" if limits else "nats"
            png = heat_map(grid, [str(h) for h in range(len(grid))], columns, "layer", "head", title, ends, unit)
            figures.append(Figure(f"heads-{quantity.replace('_', '-')}", png, f"{title}, by layer and head", ""))
    return figures


def _by_length(result: Diagnostics, values: Tensor) -> list[tuple[float, float]]:
    """(length, mean over layers and heads) of each group of rows, at its lower end."""
    means = values.mean((0, 1)).tolist()
    return [(n, x) for n, x in zip(result.lengths, means, strict=True) if x == x and abs(x) != float("inf")]


def _some(result: Diagnostics) -> Sequence[int]:
    last = len(result.layers) - 1
    return sorted({0, last // 3, 2 * last // 3, last})


def _shares(result: Diagnostics) -> list[tuple[tuple[int, int], float]]:
    """Ranges and the share of attention on them in the typical group."""
    return list(zip(result.ranges, result["range_mass"][:, :, _typical(result)].mean((0, 1)).tolist(), strict=True))


def _typical(result: Diagnostics) -> int:
    """The group with the most rows: the last that the text fills."""
    return int(result.rows.argmax())


def _range(r: tuple[int, int]) -> str:
    return str(r[0]) if r[1] == r[0] + 1 else f"{tokens_shown(r[0])}–{tokens_shown(r[1])}"


def _group(result: Diagnostics, k: int) -> str:
    return f"{result.lengths[k]:,} to {2 * result.lengths[k] - 1:,}"
