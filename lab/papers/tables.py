"""The tables and pictures of docs/lab, from the rows, with the papers' numbers beside ours."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hf_longattn.evaluation.report import markdown
from hf_longattn.evaluation.report.figures import curves, png
from hf_longattn.evaluation.rows import Row, RowFile
from hf_longattn.evaluation.statistics import mean_interval
from lab.markdown import Contents
from lab.papers import paper
from lab.papers.algorithms import TASKS
from lab.papers.conversion import QK
from lab.papers.conversion import TASKS as COPIES
from lab.papers.encodings import BASE as PLAIN
from lab.papers.encodings import SCORES
from lab.papers.experiment import LISTED
from lab.papers.keys import BASES, SCRATCH
from lab.papers.keys import METHODS as CONVERSIONS
from lab.papers.length import ATTENTION, ENDPOINT, LENGTH, TAUS
from lab.papers.masked import SCORED, TEMPERATURES, WARM
from lab.papers.needles import METHODS
from lab.scratch.train import POSITIONS

#: Of one variant: its values by seed, one for each column.
Series = dict[int, list[float]]
Data = dict[str, list[Row]]
RESULTS = Path(__file__).parents[1] / "results" / "reproductions"
LISTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Picture:
    """A picture that a text links to; `drawn`: arguments of `hf_longattn.evaluation.report.figures.curves`."""

    file: str
    about: str
    drawn: dict[str, Any]


Parts = Iterator[str | Picture]


@dataclass(frozen=True)
class Shown:
    """Markdown, and the pictures it links to: arguments of `curves` by file name."""

    text: str
    pictures: Mapping[str, dict[str, Any]]


class NotRun(Exception):
    """The rows that a table needs are not there."""


def load(results: Path = RESULTS) -> Data:
    return {path.stem: RowFile(path).all for path in sorted(results.glob("*.jsonl"))}


def contents() -> Contents:
    data = load()

    def reproduction(what: str) -> str:
        name, *columns = (part.strip() for part in what.split("|"))
        return narrow(SECTIONS[name](data).text, columns) if columns else SECTIONS[name](data).text

    return {"reproduction": reproduction, "number": lambda what: number(data, what)}


def narrow(text: str, columns: Sequence[str]) -> str:
    """The first column of each table, and these."""
    told: list[str] = []
    kept: list[int] = []
    for line in text.splitlines():
        cells = line.removeprefix("| ").removesuffix(" |").split(" | ") if line.startswith("|") else []
        if cells and not kept:
            kept = [0, *(cells.index(column) for column in columns)]
        kept = kept if cells else []
        told.append(f"| {' | '.join(cells[n] for n in kept)} |" if cells else line)
    return "\n".join(told)


def pictures() -> dict[str, bytes]:
    data = load()
    found = [section(data).pictures for section in SECTIONS.values()]
    return {f"lab/{name}": png(curves(**drawn)) for drawn_by_name in found for name, drawn in drawn_by_name.items()}


#: What stands below `<!-- reproduction: NAME -->`.
SECTIONS: dict[str, Callable[[Data], Shown]] = {}


def section(name: str, *experiments: str, only: str = "") -> Callable[[Callable[..., Parts]], Callable[[Data], Shown]]:
    """Register a table under its name: a function of the rows of each experiment (the first one's are there) to its parts.

    Without rows, or where it raises NotRun, the table is the command that makes them, with `only` where that is enough.
    """

    def register(parts: Callable[..., Parts]) -> Callable[[Data], Shown]:
        @functools.wraps(parts)
        def shown(data: Data) -> Shown:
            found = [data.get(e, []) for e in experiments]
            try:
                if not any(found):
                    raise NotRun
                blocks = list(parts(*found))
            except NotRun:
                texts = " --text FILES --heldout FILE" if any("text" in LISTED[e] for e in experiments) else ""
                return Shown(f'Not run yet: `make reproduce ARGS="{" ".join(experiments)}{only}{texts}"`.', {})
            told = [b if isinstance(b, str) else f"![{b.about}]({b.file})" for b in blocks]
            text = "\n\n".join(told).replace(")\n\n![", ")\n![")  # pictures stand together
            return Shown(text, {p.file: p.drawn for p in blocks if isinstance(p, Picture)})

        SECTIONS[name] = shown
        return shown

    return register


# pieces ---------------------------------------------------------------------------------------------------------------


def series(rows: Sequence[Row], variant: str, *path: str) -> Series:
    """What the rows of a variant hold under `path`, by seed."""
    out: Series = {}
    for row in rows:
        value: Any = row["measured"]
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if row["variant"] == variant and value is not None:
            out[row["seed"]] = value
    return out


def means(values: Series, seeds: set[int] | None = None) -> list[float]:
    return [
        mean_interval(column)[0] for column in zip(*(v for s, v in values.items() if seeds is None or s in seeds), strict=True)
    ]


def gains(values: Series, base: Series) -> list[tuple[float, float]]:
    """Mean difference and half-width of its 95 % paired t interval, over the seeds that both have; none: empty."""
    both = sorted(values.keys() & base.keys())
    differences = [[a - b for a, b in zip(values[s], base[s], strict=True)] for s in both]
    return [mean_interval(column) for column in zip(*differences, strict=True)]


def number(data: Data, what: str) -> str:
    """A number of a sentence, a mean over seeds: "EXPERIMENT | VARIANT KEY ... | VARIANT KEY ... | FORM".

    The first is what a variant measured, or with the second how much more that is, over the seeds of both. FORM begins with a
    size or length, or with "all" for the least to the greatest of all; behind it "%", "±" for the interval, a number of digits
    other than two, and "lower" or "higher", which the rows must bear out. "seeds" behind a length: what each seed measured.
    """
    experiment, first, *others, form = (part.strip() for part in what.split("|"))
    rows, (at, *words) = data[experiment], form.split()
    one, *bases = (series(rows, *path.split()) for path in (first, *others))
    found = gains(one, bases[0]) if bases else [mean_interval(column) for column in zip(*one.values(), strict=True)]
    if at != "all":
        measured = rows[0]["measured"]
        index = measured.get("sizes", measured.get("lengths")).index(int(at))
        if "seeds" in words:
            *most, last = (f"{one[seed][index]:.2f}" for seed in sorted(one))
            return f"{', '.join(most)} and {last}" if most else last
        found = [found[index]]
    sign = {"lower": -1, "higher": 1}.get(words[-1] if words else "", 0)
    if sign and not all(sign * mean > 0 for mean, _ in found):
        raise ValueError(f"a page says that {first} is {words[-1]} than {others[0]} at {at} ({experiment}): {found}")
    digits = next((int(x) for x in words if x.isdigit()), 2)
    numbers = [(abs(mean) if sign else mean, half) for mean, half in found]
    numbers = sorted([(100 * mean, 100 * half) for mean, half in numbers] if "%" in words else numbers)
    told = [f"{mean:.{digits}f}" + (f" ± {half:.{digits}f}" if "±" in words else "") for mean, half in numbers]
    return " to ".join(told[:: max(len(told) - 1, 1)])


def there(rows: Sequence[Row], variants: Sequence[str] | Mapping[str, Any]) -> list[str]:
    """The variants that were run; NotRun if none was."""
    if not (found := [v for v in variants if any(r["variant"] == v for r in rows)]):
        raise NotRun
    return found


def of_all(found: Sequence[Series]) -> set[int]:
    """The seeds of all: the same for every line."""
    return set.intersection(*(set(values) for values in found))


def over_seeds(rows: Sequence[Row], variant: str, value: Callable[[Any], float]) -> float:
    return mean_interval([value(r["measured"]) for r in rows if r["variant"] == variant])[0]


def about(rows: Sequence[Row]) -> str:
    """Seeds and files behind a table, in one line; what a run costs is in the list of `make reproduce`."""
    counts = sorted({sum(r["variant"] == v for r in rows) for v in {r["variant"] for r in rows}})
    told = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    files = sorted({r["experiment"] for r in rows})
    links = ", ".join(f"[{f}](../../lab/results/reproductions/{f}.jsonl)" for f in files)
    return f"Ours: seeds {told} ({links})."


def fixed(values: Sequence[float], digits: int, sign: str = "", times: float = 1) -> list[str]:
    return [f"{times * v:{sign}.{digits}f}" for v in values]


def percent(values: Sequence[float]) -> list[str]:
    return fixed(values, 1, times=100)


def spans(values: Sequence[tuple[float, float]], digits: int, sign: str = "+", times: float = 1) -> list[str]:
    """Means, with their intervals where there is more than one seed."""
    return [f"{times * m:{sign}.{digits}f}" + (f" ± {times * h:.{digits}f}" if h == h else "") for m, h in values]


def ranges(rows: Sequence[Row], variant: str, *path: str) -> list[str]:
    """Accuracies by length: the mean of the seeds, and in brackets the least and the greatest, where they differ."""
    found = []
    for column in zip(*series(rows, variant, *path).values(), strict=True):
        mean, least, greatest = fixed([sum(column) / len(column), min(column), max(column)], 2)
        found.append(mean if least == greatest else f"{mean} ({least}–{greatest})")
    return found


def points(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    return list(zip(xs, ys, strict=True))


def size(n: int) -> str:
    return f"{n // 1024}k" if n >= 1024 else str(n)


def lengths_of(rows: Sequence[Row]) -> list[int]:
    return list(rows[0]["measured"]["lengths"])


# all of an experiment -------------------------------------------------------------------------------------------------


def everything(name: str) -> None:
    """Register: all that every variant measured at every length or size, a mean over its seeds with the interval."""

    @section(name, name)
    def shown(rows: list[Row]) -> Parts:
        (at,) = (key for key in ("lengths", "sizes") if key in rows[0]["measured"])
        lengths, body = rows[0]["measured"][at], []
        for variant in dict.fromkeys(r["variant"] for r in rows):
            measured = next(r["measured"] for r in rows if r["variant"] == variant)
            for path in lists(measured, len(lengths)):
                if path != (at,):
                    values = series(rows, variant, *path)
                    intervals = [mean_interval(column) for column in zip(*values.values(), strict=True)]
                    body.append([named(variant), " ".join(path), *spans(intervals, 3, ""), str(len(values))])
        yield markdown(["", "", *(f"at {size(n)}" for n in lengths), "seeds"], body)
        yield about(rows)


def lists(measured: Mapping[str, Any], length: int, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where numbers of this length stand."""
    for key, value in measured.items():
        if isinstance(value, dict):
            yield from lists(value, length, (*above, key))
        elif isinstance(value, list) and len(value) == length and not isinstance(value[0], (list, str)):
            yield (*above, key)


def named(way: str) -> str:
    return way if way in ("control", "plain") else f"`{way}`"


for listed in ("argmax-retrieval-l2", "argmax-retrieval-l2-100k", "conversion", "needles-beyond"):
    everything(listed)


# sets -----------------------------------------------------------------------------------------------------------------

TEMPERED = {"plain": "", "adaptive": " + adaptive θ"}
NORMED = {"baseline": "baseline", "layer_norm": "LayerNorm", "standardise": "standardise"}
ITEMS = ["accuracy (%) at items", *map(size, paper.SIZES)]
BY_ITEMS = {"xlabel": "items", "log_x": True}


@section("max-retrieval", "max-retrieval")
def max_retrieval(rows: list[Row]) -> Parts:
    ours = {kind: series(rows, "baseline", kind, "accuracy") for kind in ("plain", "adaptive", "refit")}
    plain, adaptive, refit = ours.values()
    theirs = paper.MAX_RETRIEVAL
    body = [
        ["baseline, paper", *fixed(theirs["baseline"], 1)],
        ["baseline, ours", *percent(means(plain))],
        ["adaptive θ, paper", *fixed(theirs["adaptive"], 1)],
        ["adaptive θ, ours", *percent(means(adaptive))],
        ["adaptive θ refitted, ours", *percent(means(refit))],
        ["gain, paper", *(f"{a - b:+.1f}" for a, b in zip(theirs["adaptive"], theirs["baseline"], strict=True))],
        ["gain, ours", *spans(gains(adaptive, plain), 1, times=100)],
        ["gain refitted, ours", *spans(gains(refit, plain), 1, times=100)],
        ["the largest item holds the largest logit", *percent(means(series(rows, "baseline", "attention", "largest")))],
        ["entropy of attention (nats)", *fixed(means(series(rows, "baseline", "attention", "entropy")), 2)],
    ]
    lines = {f"paper, {name}": points(paper.SIZES, values) for name, values in theirs.items()}
    for name, values in zip(("baseline", "adaptive", "adaptive refitted"), ours.values(), strict=True):
        lines[f"ours, {name}"] = points(paper.SIZES, [100 * x for x in means(values)])
    yield markdown(ITEMS, body)
    yield about(rows)
    drawn = {"lines": lines, "ylabel": "accuracy (%)", "limits": (0, 100)} | BY_ITEMS
    yield Picture("max_retrieval.png", "Accuracy by size", drawn)


Published = Mapping[tuple[str, str], Sequence[float]]


def normed(
    name: str,
    experiments: Sequence[str],
    published: Published,
    gained: Mapping[str, Sequence[float]] | None = None,
    file: str | None = None,
) -> None:
    """Register: accuracy of every norm with and without adaptive temperature, gains over the baseline (the paper's: `gained`,
    else from its accuracies), and, where there is a `file` for pictures, how outputs spread."""

    @section(name, *experiments)
    def shown(*found: list[Row]) -> Parts:
        rows = [row for part in found for row in part]
        norms = there(rows, NORMED)
        if len(norms) < 2 or "baseline" not in norms:
            raise NotRun
        compared = {r["seed"] for r in rows if r["variant"] in norms[1:]}  # a baseline alone says nothing of a norm
        rows = [r for r in rows if r["seed"] in compared]
        body, lines = accuracies(rows, norms, published)
        yield markdown(
            ITEMS, [*body, *norm_gains(rows, norms, published, gained or {}), *largest(rows, {n: NORMED[n] for n in norms})]
        )
        if file:
            deviation = {
                f"{NORMED[v]}, {what}": means(series(rows, v, "plain", key))
                for v in norms
                for key, what in (("deviation", "across sets"), ("spread", "across features"))
            }
            spread = [[label, *fixed(values, 3)] for label, values in deviation.items()]
            yield markdown(["standard deviation of outputs at items", *ITEMS[1:]], spread)
        yield about(rows)
        if file:
            yield Picture(
                f"{file}.png", "Accuracy by size", {"lines": lines, "ylabel": "accuracy (%)", "limits": (0, 100)} | BY_ITEMS
            )
            outputs = {label: points(paper.SIZES, values) for label, values in deviation.items()}
            drawn = {"lines": outputs, "ylabel": "standard deviation of outputs"} | BY_ITEMS
            yield Picture(f"{file}_outputs.png", "Deviation of outputs by size", drawn)


def accuracies(rows: list[Row], norms: list[str], published: Published) -> tuple[list[list[str]], dict[str, Any]]:
    """Lines of the table, the paper's above ours, and those of the picture."""
    body, lines = [], {}
    for kind, suffix in (TEMPERED | {"refit": " + adaptive θ refitted"}).items():
        for variant in norms:
            label = NORMED[variant] + suffix
            if (variant, kind) in published:
                body.append([f"{label}, paper", *fixed(published[variant, kind], 1)])
            if found := means(series(rows, variant, kind, "accuracy")):
                body.append([f"{label}, ours", *percent(found)])
                lines[label] = points(paper.SIZES, [100 * x for x in found])
    return body, lines


def norm_gains(
    rows: list[Row], norms: list[str], published: Published, theirs: Mapping[str, Sequence[float]]
) -> Iterator[list[str]]:
    base = series(rows, "baseline", "plain", "accuracy")
    for variant in norms[1:]:
        if variant in theirs:
            yield [f"gain of {NORMED[variant]}, paper", *fixed(theirs[variant], 2, "+")]
        elif found := published.get((variant, "plain")):
            differences = [a - b for a, b in zip(found, published["baseline", "plain"], strict=True)]
            yield [f"gain of {NORMED[variant]}, paper", *fixed(differences, 1, "+")]
        if gained := gains(series(rows, variant, "plain", "accuracy"), base):
            yield [f"gain of {NORMED[variant]}, ours", *spans(gained, 1, times=100)]


def largest(rows: list[Row], variants: Mapping[str, str]) -> Iterator[list[str]]:
    for variant, label in variants.items():
        if found := series(rows, variant, "attention", "largest"):
            yield [f"the largest item holds the largest logit, {label}", *percent(means(found))]


normed("argmax-retrieval", ("max-retrieval", "argmax-retrieval"), paper.ARGMAX, paper.ARGMAX_GAIN, "argmax_retrieval")
normed("argmax-retrieval-100k", ["argmax-retrieval-100k"], paper.ARGMAX, paper.ARGMAX_GAIN)
normed("argmax-retrieval-256", ["argmax-retrieval-256"], paper.ARGMAX_256)
normed("dictionary-lookup", ["dictionary-lookup"], paper.DICTIONARY, paper.DICTIONARY_GAIN, "dictionary_lookup")
normed("dictionary-lookup-10k", ["dictionary-lookup-10k"], paper.DICTIONARY, paper.DICTIONARY_GAIN)
normed("dictionary-lookup-256", ["dictionary-lookup-256"], paper.DICTIONARY_256)


@section("sharpening", "argmax-retrieval-l2")
def sharpening(rows: list[Row]) -> Parts:
    """The spread of logits by steps and Proposition 3.1's bound on it: means over seeds."""
    steps = [int(s) for s, _, _ in rows[0]["measured"]["spread"]]
    body = []
    for variant in there(rows, LISTS["decayed"]):
        norm = f"{over_seeds(rows, variant, lambda m: m['weight_norm']):.0f}"
        for what, label, last in ((1, "δ", norm), (2, "bound", "")):
            values = [over_seeds(rows, variant, lambda m, n=n, w=what: m["spread"][n][w]) for n in range(len(steps))]
            body.append([f"{LISTS['decayed'][variant]}, {label}", *fixed(values, 1), last])
    yield markdown(["after steps", *map(str, steps), "norm of all weights"], body)


# lengths and needles --------------------------------------------------------------------------------------------------


def labelled_end(variant: str) -> str:
    """p-RoPE as published by its name alone."""
    without = f"{variant}{ENDPOINT}" in LENGTH.variants
    return f"`{variant.removesuffix(ENDPOINT)}`" + (", end point left out" if without else "")


def by_length(
    rows: list[Row], key: str, published: Mapping[str, Sequence[float]], digits: int, ylabel: str, file: str
) -> Parts:
    """The position methods, the paper's three lengths beside ours."""
    variants = there(rows, [v for p in POSITIONS for v in (f"{p}{ENDPOINT}", p)])
    rows = [r for r in rows if r["variant"] in variants]
    lengths = lengths_of(rows)
    body, lines = [], {}
    for variant in variants:
        theirs = fixed(published.get(variant.removesuffix(ENDPOINT), ()), 3) or ["–"] * len(paper.LENGTHS)
        values = series(rows, variant, key)
        intervals = [mean_interval(column) for column in zip(*values.values(), strict=True)]
        body.append([labelled_end(variant), *theirs, *spans(intervals, digits, "")])
        lines[labelled_end(variant).replace("`", "")] = points(lengths, means(values))
    yield markdown(["", *(f"paper, {n}" for n in paper.LENGTHS), *(f"ours, {n:,}" for n in lengths)], body)
    yield about(rows)
    yield Picture(file, f"{ylabel} by length", {"lines": lines, "xlabel": "length (bytes)", "ylabel": ylabel, "log_x": True})


@section("length", "length-generalisation")
def length(rows: list[Row]) -> Parts:
    yield from by_length(rows, "loss", paper.LENGTH, 3, "loss (nats a byte)", "length.png")


@section("taus", "length-generalisation", only=" --only tau")
def taus(rows: list[Row]) -> Parts:
    variants = {tau: f"scale_invariant_prope_tau{tau:g}" for tau in TAUS} | {10.0: "scale_invariant_prope"}
    found = {tau: values for tau, variant in sorted(variants.items()) if (values := series(rows, variant, "loss"))}
    if len(found) < 2:
        raise NotRun
    seeds = of_all(list(found.values()))
    body = [[f"{tau:g}", *fixed(means(v, seeds), 3)] for tau, v in found.items()]
    yield markdown(["τ", *(f"loss at {n:,}" for n in lengths_of(rows))], body)


@section("needles", "needles")
def needles(rows: list[Row]) -> Parts:
    yield from by_length(rows, "accuracy", paper.NEEDLES, 2, "accuracy", "needles.png")
    body = [[f"`{v}`", *fixed(means(series(rows, v, "loss")), 3)] for v in there(rows, POSITIONS)]
    yield markdown(["loss of the answer (nats a byte) at", *(f"{n:,}" for n in lengths_of(rows))], body)


@section("needles-normed", "needles-beyond")
def needles_normed(rows: list[Row]) -> Parts:
    """Models with QK-norm, trained at the window and then at four times it: accuracies, with the range of the seeds."""
    trained, (window, *_) = {"window": "trained at 1 ×", "beyond": "then at 4 ×"}, lengths_of(rows)
    head = ["", *(f"{told}: at {n // window} ×" for told in trained.values() for n in lengths_of(rows))]
    found = {v: [ranges(rows, v, stage, "accuracy") for stage in trained] for v in there(rows, LISTS["normed"])}
    yield markdown(head, [[f"`{v}`", *first, *then] for v, (first, then) in found.items()])


@section("needles-pretrained", "needles-pretrained")
def needles_pretrained(rows: list[Row]) -> Parts:
    body = []
    for variant in there(rows, METHODS):
        accuracy, loss = (means(series(rows, variant, key)) for key in ("accuracy", "loss"))
        body.append([f"`{variant}`" if METHODS[variant] != "null" else variant, *fixed(accuracy, 2), *fixed(loss, 3)])
    lengths = [f"{n:,}" for n in lengths_of(rows)]
    yield markdown(["", *(f"accuracy at {n}" for n in lengths), *(f"loss of the answer at {n}" for n in lengths)], body)
    yield about(rows)


@section("attention-by-length", "attention-by-length")
def attention(rows: list[Row]) -> Parts:
    """Entropy and local attention of trained models by the length so far; by distance in the longest doubling."""
    one = rows[0]["measured"]
    first = one["lengths"].index(min(LENGTH.settings.length // 2, one["lengths"][-2]))
    variants = there(rows, ATTENTION.variants)

    def body(what: Mapping[str, str], start: int) -> list[list[str]]:
        pairs = [(key, label, v) for key, label in what.items() for v in variants]
        return [[f"{label}, {labelled_end(v)}", *fixed(means(series(rows, v, key))[start:], 2)] for key, label, v in pairs]

    groups = [f"{a}–{2 * a - 1}" for a in one["lengths"][first:]]
    yield markdown(["at length", *groups], body({"entropy": "entropy", "local_mass": "local attention"}, first))
    ranges = [f"{a}–{b - 1}" if b - a > 1 else str(a) for a, b in one["ranges"]]
    yield markdown(["bytes back", *ranges], body({"range_entropy": "entropy within", "range_mass": "attention"}, 0))
    yield about(rows)
    for file, link, key, drawn in (
        ("attention_entropy.png", "Entropy by length", "entropy", {"ylabel": "entropy (nats)"}),
        (
            "attention_local.png",
            "Local attention by length",
            "local_mass",
            {"ylabel": "attention on the last 100 bytes", "limits": (0, 1)},
        ),
    ):
        lines = {v: points(one["lengths"], means(series(rows, v, key))) for v in variants}
        yield Picture(file, link, {"xlabel": "length so far (bytes)", "log_x": True, "lines": lines} | drawn)


# InfoScale and CosScale -----------------------------------------------------------------------------------------------

#: The paper's scale, and those that ours learn with.
MASKED_SHOWN = ("dot_product", "cosscale8", "cosscale16", "cosscale128", f"cosscale128{WARM}")


def labelled(variant: str, temperature: str = "none") -> str:
    return variant.replace(WARM, " after plain training") + ("" if temperature == "none" else f" + {temperature}")


def both(rows: list[Row], *path: str) -> list[str]:
    """Perplexity and accuracy, as the paper writes them; empty if not measured."""
    loss, right = (means(series(rows, *path, key)) for key in ("perplexity", "accuracy"))
    return [f"{p:.2f}/{a:.2f}".replace("/0.", "/.") for p, a in zip(loss, right, strict=True)]


def published(theirs: Sequence[str], lengths: Sequence[int]) -> list[str]:
    by_length = dict(zip(paper.MASKED_LENGTHS, theirs, strict=True))
    return [by_length.get(n, "–") for n in lengths]


@section("infoscale-cosscale", "infoscale-cosscale")
def masked(rows: list[Row]) -> Parts:
    lengths, body, lines = lengths_of(rows), [], {}
    for variant in MASKED_SHOWN:
        for kind in (t or "none" for t in TEMPERATURES):
            label = labelled(variant, kind)
            if theirs := paper.MASKED.get((variant, kind)):
                body.append([f"{label}, paper", *published(theirs, lengths)])
            if cells := both(rows, variant, kind):
                body.append([f"{label}, ours", *cells])
                if kind == "none" or "128" not in variant:  # at c = 128 no temperature shows
                    lines[label] = points(lengths, means(series(rows, variant, kind, "accuracy")))
    yield markdown(["perplexity/accuracy at", *map(size, lengths)], body)
    yield about(rows)
    drawn = {"lines": lines, "xlabel": "length", "ylabel": "accuracy on masked bytes", "log_x": True}
    yield Picture("infoscale_cosscale.png", "Accuracy by length", drawn | {"mark": {"trained": lengths[0]}})


@section("encodings", "infoscale-cosscale-encodings")
def encodings(rows: list[Row]) -> Parts:
    """Every encoding with neither, InfoScale, CosScale and both, the paper's row below each."""
    lengths, body = lengths_of(rows), []

    def add(label: str, *path: str, theirs: Sequence[str] = ()) -> None:
        if cells := both(rows, *path):
            body.append([label, *cells])
            body.extend([["paper", *published(theirs, lengths)]] if theirs else [])

    add("RoPE, half of the steps", PLAIN, "rope", "none")
    scored = {f"{score}{how}": LISTS["scores"][score] for score, how in SCORES}
    for encoding, name in LISTS["encodings"].items():
        for variant, added in scored.items():
            for kind, temperature in (("none", ""), ("infoscale", "InfoScale")):
                label = " + ".join(filter(None, (name, added, temperature)))
                add(label, variant, encoding, kind, theirs=paper.ENCODED.get((encoding, added, temperature), ()))
    for kind, label in LISTS["scaled"].items():
        for variant, added in scored.items():
            add(" + ".join(filter(None, ("RoPE", added, label))), variant, "rope", kind)
    yield markdown(["perplexity/accuracy at", *map(size, lengths)], body)
    yield about(rows)


@section("by-distance", "infoscale-cosscale-encodings")
def by_distance(rows: list[Row]) -> Parts:
    body = []
    for variant in dict.fromkeys(r["variant"] for r in rows):
        share, near = (over_seeds(rows, variant, lambda m, k=key: m["by_distance"][k]) for key in ("share", "near"))
        body.append(
            [labelled(variant), f"{share:.3f}", f"{near:.2f}", f"{over_seeds(rows, variant, lambda m: m['entropy']):.2f}"]
        )
    yield markdown(["", "variance of scores by distance", "attention at most 4 bytes away", "entropy (nats)"], body)


def scale_of(variant: str) -> str:
    return labelled(variant).removeprefix("cosscale")


@section("scales", "infoscale-cosscale", only=" --only cosscale")
def scales(rows: list[Row]) -> Parts:
    found = {v: means(series(rows, v, "none", "accuracy")) for v in there(rows, SCORED)}
    body = [[scale_of(v), *fixed([*x, sum(x) / len(x)], 3)] for v, x in found.items()]
    yield markdown(["accuracy by c, at", *map(size, lengths_of(rows)), "mean"], body)


@section("peaks", "infoscale-cosscale", only=" --only cosscale")
def peaks(rows: list[Row]) -> Parts:
    keys = ("expected", "weighted", "plain", "mean", "deviation")
    body = [
        [scale_of(v), *fixed([over_seeds(rows, v, lambda m, k=k: m["peak"][k]) for k in keys], 3)] for v in there(rows, SCORED)
    ]
    yield markdown(["c", "η*, Theorem 3.4", "peak, weighted by exp(c cos)", "peak", "mean of cos", "deviation of cos"], body)


# algorithms -----------------------------------------------------------------------------------------------------------

KINDS = {
    "plain": ("plain", "as trained"),
    "adaptive θ in training": ("adaptive_temperature", "as trained"),
    "adaptive θ at inference alone": ("plain", "adaptive at inference"),
}


def algorithms(name: str) -> None:
    """Register: answers right by size, of each task and in the mean."""

    @section(name, name)
    def shown(rows: list[Row]) -> Parts:
        sizes, every = rows[0]["measured"]["sizes"], rows[0]["settings"].get("tasks", TASKS)
        body, lines = [], {}
        for task in (*every, "mean"):
            for label, path in KINDS.items():
                found = [series(rows, *path, t, "exact") for t in (every if task == "mean" else (task,))]
                if found[0]:
                    by_size = [sum(column) / len(column) for column in zip(*map(means, found), strict=True)]
                    body.append([f"{task}, {label}", *percent(by_size)])
                    lines |= {label: points(sizes, by_size)} if task == "mean" else {}
        yield markdown(["answers right (%) at size", *map(str, sizes)], body)
        yield about(rows)
        drawn = {"lines": lines, "xlabel": "size", "ylabel": "answers right, mean of the tasks", "limits": (0, 1)}
        drawn |= {"mark": {"largest trained": max(rows[0]["measured"]["trained"])}}
        yield Picture(f"{name.replace('-', '_')}.png", "Answers right by size", drawn)


algorithms("algorithms")
algorithms("algorithms-pretrained")


# conversion -----------------------------------------------------------------------------------------------------------


@section("conversion-recipes", "conversion")
def conversion_recipes(rows: list[Row]) -> Parts:
    """LoRA as the recipes have it, at 16 and 64 times the window: losses over the seeds that all variants have."""
    found = {label: [series(rows, v, task) for task in COPIES] for label, v in LISTS["recipes"].items()}
    if not (found := {label: values for label, values in found.items() if values[0]}):
        raise NotRun
    seeds = of_all([values[0] for values in found.values()])
    body = [[label, *fixed([x for v in values for x in means(v, seeds)[-2:]], 2)] for label, values in found.items()]
    yield markdown(["", *(f"{task} at {size(n)}" for task in COPIES for n in lengths_of(rows)[-2:])], body)
    yield f"Seeds {', '.join(map(str, sorted(seeds)))}. {about(rows)}"


def orders(name: str, normed: bool) -> None:
    """Register: paired differences at the two greatest lengths, on the base with QK-norm or on the other."""

    @section(name, "conversion")
    def shown(rows: list[Row]) -> Parts:
        body = []
        for first, second in LISTS["orders"]:
            pairs = [(series(rows, first, task), series(rows, second, task)) for task in COPIES]
            if first.startswith(QK) is normed and gains(*pairs[0]):
                cells = [cell for a, b in pairs for cell in spans(gains(a, b)[-2:], 2)]
                label = f"`{first}` less `{second}`".replace(f"`{QK}", "`")
                body.append([label, *cells])
        yield markdown(["", *(f"{task} at {size(n)}" for task in COPIES for n in lengths_of(rows)[-2:])], body)


orders("conversion-orders", normed=False)
orders("conversion-orders-normed", normed=True)


# keys and values ------------------------------------------------------------------------------------------------------


#: How a variant begins whose model has QK-norm without weights, or none.
OTHER_NORMS = ("unweighted-", "plain-")


def right(rows: Sequence[Row], variant: str) -> dict[int, list[str]]:
    """By seed and length, each question as 0 or 1, text by text."""
    return {row["seed"]: row["measured"]["right"] for row in rows if row["variant"] == variant}


def differences(rows: Sequence[Row], variant: str, control: str, length: int) -> list[list[float]]:
    """By seed that both have, how many more questions of each text are right than under the control, as a share."""
    at, asked = lengths_of(rows).index(length), rows[0]["settings"]["needles"]
    ours, theirs = (right(rows, v) for v in (variant, control))
    return [
        [
            (ours[seed][at].count("1", i, i + asked) - theirs[seed][at].count("1", i, i + asked)) / asked
            for i in range(0, len(ours[seed][at]), asked)
        ]
        for seed in sorted(ours.keys() & theirs.keys())
    ]


def against(rows: Sequence[Row], variant: str, control: str, length: int) -> str:
    """Mean difference over the texts of all seeds, and in how many seeds it shows by the protocol: the interval of that
    seed lies above 0, and at the trained length the accuracy is not lower by more than 0.02.
    """
    found = differences(rows, variant, control, length)
    if not found:
        return "–"
    mean, half = mean_interval([x for seed in found for x in seed])
    near = differences(rows, variant, control, rows[0]["settings"]["length"])
    shown = 0
    for far, trained in zip(found, near, strict=True):
        middle, width = mean_interval(far)
        shown += middle > width and mean_interval(trained)[0] >= -0.02
    return f"{mean:+.2f} ± {half:.2f}, {shown} of {len(found)}"


def learned(rows: Sequence[Row], variant: str) -> str:
    """The variant's name, with a word if it does not learn the task at its trained length in every seed."""
    return named(variant) + ("" if learns(rows, variant) else ", not learned")


def learns(rows: Sequence[Row], variant: str) -> bool:
    """Tell whether a variant learns the task at its trained length in every seed."""
    at = lengths_of(rows).index(rows[0]["settings"]["length"])
    return all(values[at] >= 0.9 for values in series(rows, variant, "accuracy").values())


def from_scratch(rows: Sequence[Row]) -> list[str]:
    """The variants of which there are rows, each kind of model together."""
    return sorted(
        {r["variant"] for r in rows}, key=lambda v: (*(v.startswith(kind) for kind in OTHER_NORMS), [*SCRATCH].index(v))
    )


def keys(name: str) -> None:
    """Register: from scratch, each variant's accuracy, and beside p-RoPE's of the same kind of model."""

    @section(name, name)
    def shown(rows: list[Row]) -> Parts:
        lengths = lengths_of(rows)
        far = [n for n in lengths if n >= 16 * rows[0]["settings"]["length"]]
        body = []
        for variant in from_scratch(rows):
            control = "".join(kind for kind in OTHER_NORMS if variant.startswith(kind)) + "prope"
            less = [against(rows, variant, control, n) if variant != control else "" for n in far]
            less = less if learns(rows, control) else [""] * len(far)
            body.append([learned(rows, variant), *ranges(rows, variant, "accuracy"), *less])
        yield markdown(["", *(f"at {n:,}" for n in lengths), *(f"minus `prope`, {n:,}" for n in far)], body)
        yield about(rows)


@section("keys-logits", "keys")
def keys_logits(rows: list[Row]) -> Parts:
    """Mean and standard deviation of each head's logits before the method, at the trained length."""
    body = []
    for variant in from_scratch(rows):
        heads = {name: flat(series(rows, variant, "logits", name).values()) for name in ("mean", "deviation")}
        if heads["mean"]:
            body.append([named(variant), *(f"{sum(x) / len(x):.2f} ({min(x):.2f}–{max(x):.2f})" for x in heads.values())])
    if not body:
        raise NotRun
    yield markdown(["logits of a head", "mean", "deviation"], body)


def flat(seeds: Iterable[Sequence[Sequence[float]]]) -> list[float]:
    return [x for layers in seeds for layer in layers for x in layer]


@section("keys-converted", "keys-converted")
def keys_converted(rows: list[Row]) -> Parts:
    """By base: before and after training by the recipe, and beside the control."""
    lengths, length = lengths_of(rows), rows[0]["settings"]["length"]
    columns = [n for n in lengths if n == length or n >= 16 * length]
    head = ["", *(f"untrained, {n:,}" for n in columns), *(f"trained, {n:,}" for n in columns)]
    head += [f"minus `null`, {n:,}" for n in columns[1:]]
    body = []
    for base in BASES:
        for variant in (f"{base}:{name}" for name in CONVERSIONS):
            if not any(r["variant"] == variant for r in rows):
                continue
            cells = [ranges(rows, variant, *path) for path in (("untrained", "accuracy"), ("accuracy",))]
            less = [against(rows, variant, f"{base}:null", n) for n in columns[1:]]
            less = [""] * len(less) if variant.endswith(":null") else less
            body.append([learned(rows, variant), *(c[lengths.index(n)] for c in cells for n in columns), *less])
    yield markdown(head, body)
    yield about(rows)


for experiment_of_keys in ("keys", "keys-of-two", "keys-in-256", "keys-wider"):
    keys(experiment_of_keys)
