"""Attention itself: entropy, attention by distance, logits and outputs, by layer, head and length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..corpus import Corpus
from ..experiment import Cell, digest, sha256_of
from ..measures.capture import capture
from ..measures.diagnostics import Diagnostics
from ..readings import Readings
from ..report import Figure, Section, Table
from ..report.figures import curves, heat_map, tokens_shown
from ..report.page import Value
from ..rows import Row
from ..settings import Setting
from .base import Task

#: Quantities of the tables, and what their columns are called.
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


class Attention(Task):
    """One forward pass over the beginning of every text, at the longest length, up to the last layer that is looked at."""

    head: ClassVar[bool] = False
    within: ClassVar[bool] = False

    def __init__(self, corpus: Corpus, name: str) -> None:
        super().__init__(corpus, name)
        options, self.length = corpus.options, corpus.longest
        if self.length < 2:
            raise ValueError("one token attends to itself alone: give 2 or more")
        self.how: dict[str, Any] = {"what": options.what, "rows": options.rows, "delta": options.delta}
        for text in corpus.encoded:
            if (there := corpus.whole(text).shape[1]) < self.length:
                raise ValueError(f"{text} has {there} tokens, {self.length} are needed")
        if not corpus.encoded:
            raise ValueError("attention is looked at while a text is read: give one")
        with capture(corpus.checkpoint.build(), options.layers, **self.how):  # no weights; refuses what cannot be looked at
            pass

    def cells(self, setting: Setting) -> Iterator[Cell]:
        how = [self.options.layers, *self.how.values()]
        for text, content in self.options.texts.items():
            depends, read = [sha256_of(content), *how], digest(self.corpus.whole(text)[:, : self.length].tolist())
            yield self.cell(setting, self.length, text, partial(self.measure, text), depends, ids=read)

    def measure(self, text: str, model: Any) -> Row:
        read = self.corpus.whole(text)[:, : self.length].to(model.device)
        seen_layers: set[int] = set()

        def on_layer(layer: int) -> None:
            seen_layers.add(layer)
            if len(seen_layers) == seen.layers:
                raise _Enough

        looking = capture(model, self.options.layers, on_layer=on_layer, **self.how)
        with torch.inference_mode(), suppress(_Enough), looking as seen:
            model.base_model(input_ids=read, use_cache=False)
        rows = self.options.rows
        return {"query_rows": rows if rows and rows < self.length else None, "attention": seen.result().to_dict()}

    @staticmethod
    def format_row(row: Row) -> str:
        return f"{len(row['attention']['layers'])} layers"

    @classmethod
    def sections(cls, results: Readings, name: str) -> list[Section]:
        """Sections for every text and length; the first setting is the one to compare with."""
        found: dict[tuple[str, int], dict[str, Row]] = {}
        for s in results.settings:
            for row in results.of(s, name):
                found.setdefault((row["which"], row["length"]), {})[s] = row
        return [
            part
            for n, ((text, length), rows) in enumerate(found.items())
            for part in _told(
                rows, text, length, results.command(name), "" if len(found) == 1 else f" in {text}, {length:,}", n
            )
        ]


class _Enough(Exception):
    """The last layer asked for has been seen; those above it need not run."""


def _told(rows: Mapping[str, Row], text: str, length: int, command: str, beside: str, number: int) -> list[Section]:
    first_row = next(iter(rows.values()))
    results = {name: Diagnostics.from_dict(row["attention"]) for name, row in rows.items()}
    count = first_row["query_rows"]
    read = "all query rows" if count is None else f"{count} query rows spread evenly, all keys"
    protocol = f"The first {length:,} tokens of {text} in {first_row['dtype']}, one forward pass per setting; {read}."
    about = {"protocol": protocol, "command": command}
    first, file = next(iter(results.values())), f"-{number + 1}" if number else ""
    tables = [_summary(results)] + ([_by_distance(results)] if "range_mass" in first.values else [])
    means = f"Means over query rows, heads and {len(first.layers)} layers"
    said = "; ".join([means, *(m for q, m in MEANINGS.items() if q in first.values)])
    parts = [Section(f"Attention{beside}", f"{said}.", tables, _figures(results, file), **about)]
    by_head = {name: heads for name, heads in results.items() if heads.values.keys() & COLUMNS.keys()}
    tables = [_by_layer(name, result) for name, result in by_head.items()]
    if tables:
        parts.append(Section(f"Attention by layer{beside}", "Means over heads.", tables, _heads(first, file), **about))
    return parts


def _summary(results: BySetting) -> Table:
    used = _used(results)
    rows: list[list[Value]] = [[COLUMNS[q], *(_mean(result, q) for result in results.values())] for q in used]
    return Table("Means", ["", *results], rows, brief=True)


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


def _figures(results: BySetting, file: str) -> list[Figure]:
    first = next(iter(results.values()))
    figures = []
    if "entropy" in first.values:
        lines = {name: _by_length(result, result["entropy"]) for name, result in results.items()}
        drawn = curves(lines, "length of the text so far (tokens)", "entropy (nats)", log_x=True)
        caption = "Entropy of attention. A rising line is attention that spreads as the text grows."
        figures.append(Figure(f"attention-entropy{file}", drawn, "Entropy against length under each setting", caption))
    if "range_mass" in first.values:
        lines = {name: [(r[0], x) for r, x in _shares(result) if r[0]] for name, result in results.items()}
        drawn = curves(lines, "distance, to the next mark (tokens)", "share of attention", log_x=True)
        where = f"for queries at {_group(first, _typical(first))} tokens"
        caption = (
            f"Attention by distance, {where}. Level is scale-invariant. The first token and distance 0 are in the table alone."
        )
        figures.append(Figure(f"attention-by-distance{file}", drawn, "Share of attention in each range of distances", caption))
    if "temperature_share" in _used(results):
        lines = {name: _by_length(result, result["temperature_share"]) for name, result in results.items()}
        drawn = curves(lines, "length of the text so far (tokens)", "share of rows", log_x=True, limits=(-0.02, 1.02))
        caption = "Share of query rows in which a temperature changes the logits."
        figures.append(
            Figure(f"attention-temperature{file}", drawn, "Share of rows with a temperature against length", caption)
        )
    if "output_deviation" in first.values:
        lines = {name: _by_length(result, result["output_deviation"].log2()) for name, result in results.items()}
        drawn = curves(lines, "length of the text so far (tokens)", "log2 of the standard deviation", log_x=True)
        caption = (
            "Deviation of attention outputs, mean of its logarithm. Independent tokens would fall by one half per doubling."
        )
        figures.append(Figure(f"attention-outputs{file}", drawn, "Deviation of outputs against length", caption))
    if "qq" in first.values:
        last = len(first.layers) - 1
        lines = {"Gaussian": [(z, z) for z in first.z]}
        for n in sorted({0, last // 3, 2 * last // 3, last}):
            lines[f"layer {first.layers[n]}"] = list(zip(first.z, first["qq"][n].mean(0).tolist(), strict=True))
        drawn = curves(lines, "quantile of a Gaussian", "quantile of the logits", title=next(iter(results)))
        caption = "Standardised logits without the sink, mean over heads. Scale-invariant attention assumes the diagonal."
        figures.append(Figure(f"attention-qq{file}", drawn, "Quantiles of logits against those of a Gaussian", caption))
    return figures


def _heads(result: Diagnostics, file: str) -> list[Figure]:
    """Layers x heads of the first setting."""
    figures = []
    columns = [str(i) if i % 5 == 0 or len(result.layers) <= 12 else "" for i in result.layers]
    for quantity, title, limits in (("sink_mass", "Attention on the first token", (0.0, 1.0)), ("entropy", "Entropy", None)):
        if quantity in result.values:
            grid = result.overall(quantity).T.tolist()
            ends = limits or (0.0, max(map(max, grid)))
            unit = "share" if limits else "nats"
            drawn = heat_map(grid, [str(h) for h in range(len(grid))], columns, "layer", "head", title, ends, unit)
            figures.append(Figure(f"heads-{quantity.replace('_', '-')}{file}", drawn, f"{title}, by layer and head", ""))
    return figures


def _by_length(result: Diagnostics, values: Tensor) -> list[tuple[float, float]]:
    """(length, mean over layers and heads) of each group of rows, at its lower end."""
    means = values.mean((0, 1)).tolist()
    return [(n, x) for n, x in zip(result.lengths, means, strict=True) if x == x and abs(x) != float("inf")]


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
