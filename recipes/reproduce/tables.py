"""The tables and pictures of docs/lab, from the rows, with the papers' numbers beside ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_longattn.evaluation.report.figures import curves
from hf_longattn.evaluation.report.markdown import Contents, fill_pages, table
from hf_longattn.evaluation.rows import Row, Rows
from hf_longattn.evaluation.statistics import mean_interval
from hf_longattn.training import POSITIONS
from recipes.reproduce import paper
from recipes.reproduce.algorithms import TASKS
from recipes.reproduce.conversion import (
    BASE,
    LORA_RATE,
    OTHERWISE,
    QK,
    QK_NORMED,
    SCRATCH,
    SHARES,
    SWEEP,
    TRAINED,
    UNTRAINED,
    UNTRAINED_QK,
)
from recipes.reproduce.conversion import TASKS as COPIES
from recipes.reproduce.encodings import BASE as PLAIN
from recipes.reproduce.encodings import ENCODINGS
from recipes.reproduce.length import ATTENTION, ENDPOINT, LENGTH, TAUS
from recipes.reproduce.masked import SCORED, TEMPERATURES, WARM
from recipes.reproduce.needles import BEYOND, METHODS

#: Of one variant: its values by seed, one for each column.
Series = dict[int, list[float]]
Data = dict[str, list[Row]]


@dataclass(frozen=True)
class Shown:
    """Markdown, and the pictures it links to: arguments of `hf_longattn.evaluation.report.figures.curves` by file name."""

    text: str
    pictures: Mapping[str, dict[str, Any]]


def write(results: Path, docs: Path) -> None:
    """Fill in every page, and draw the pictures."""
    data = load(results)
    fill_pages(docs, contents(data))
    for section in SECTIONS.values():
        for name, arguments in section(data).pictures.items():
            (docs / name).write_bytes(curves(**arguments))


def load(results: Path) -> Data:
    return {path.stem: Rows(path).all for path in sorted(results.glob("*.jsonl"))}


def contents(data: Data) -> Contents:
    """What stands below `<!-- reproduction: NAME -->`: one of `SECTIONS`."""
    return {"reproduction": lambda name: SECTIONS[name](data).text}


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


def means(values: Series) -> list[float]:
    return [mean_interval(column)[0] for column in zip(*values.values(), strict=True)]


def gains(values: Series, base: Series) -> list[tuple[float, float]]:
    """Mean difference and half-width of its 95 % paired t interval, over the seeds that both have; none: empty."""
    both = sorted(values.keys() & base.keys())
    differences = [[a - b for a, b in zip(values[s], base[s], strict=True)] for s in both]
    return [mean_interval(column) for column in zip(*differences, strict=True)]


def missing(name: str) -> Shown:
    return Shown(f'Not run yet: `make reproduce ARGS="{name}"`.', {})


def about(rows: Sequence[Row]) -> str:
    """Seeds, time and files behind a table, in one line."""
    seeds = {v: sum(r["variant"] == v for r in rows) for v in dict.fromkeys(r["variant"] for r in rows)}
    counts = sorted(set(seeds.values()))
    told = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    minutes = sum(r["cpu_seconds"] for r in rows) / 60 / len(rows)
    files = sorted({r["experiment"] for r in rows})
    links = ", ".join(f"[{f}](../../benchmarks/results/reproductions/{f}.jsonl)" for f in files)
    return f"Ours: seeds {told}, {minutes:.1f} CPU minutes a run ({links})."


def percent(values: Sequence[float]) -> list[str]:
    return [f"{100 * v:.1f}" for v in values]


def signed(values: Sequence[tuple[float, float]]) -> list[str]:
    """Gains in percentage points; without an interval where there is one seed."""
    return [f"{100 * m:+.1f}" + (f" ± {100 * h:.1f}" if h == h else "") for m, h in values]


def told(values: Sequence[float]) -> list[str]:
    return [f"{v:.1f}" for v in values]


def size(n: int) -> str:
    return f"{n // 1024}k" if n >= 1024 else str(n)


# the sections ---------------------------------------------------------------------------------------------------------

TEMPERED = {"plain": "", "adaptive": " + adaptive θ"}
NORMED = {"baseline": "baseline", "layer_norm": "LayerNorm", "standardise": "standardise"}


def max_retrieval(data: Data) -> Shown:
    if not (rows := data.get("max-retrieval", [])):
        return missing("max-retrieval")
    plain, adaptive, refit = (series(rows, "baseline", kind, "accuracy") for kind in ("plain", "adaptive", "refit"))
    body = [
        ["baseline, paper", *told(paper.MAX_RETRIEVAL["baseline"])],
        ["baseline, ours", *percent(means(plain))],
        ["adaptive θ, paper", *told(paper.MAX_RETRIEVAL["adaptive"])],
        ["adaptive θ, ours", *percent(means(adaptive))],
        ["adaptive θ refitted, ours", *percent(means(refit))],
        ["gain, paper", *(f"{a - b:+.1f}" for a, b in zip(*reversed(paper.MAX_RETRIEVAL.values()), strict=True))],
        ["gain, ours", *signed(gains(adaptive, plain))],
        ["gain refitted, ours", *signed(gains(refit, plain))],
        ["the largest item holds the largest logit", *percent(means(series(rows, "baseline", "attention", "largest")))],
        ["entropy of attention (nats)", *(f"{x:.2f}" for x in means(series(rows, "baseline", "attention", "entropy")))],
    ]
    lines = {
        "paper, baseline": list(zip(paper.SIZES, paper.MAX_RETRIEVAL["baseline"], strict=True)),
        "paper, adaptive": list(zip(paper.SIZES, paper.MAX_RETRIEVAL["adaptive"], strict=True)),
    } | {
        f"ours, {name}": list(zip(paper.SIZES, [100 * x for x in means(values)], strict=True))
        for name, values in (("baseline", plain), ("adaptive", adaptive), ("adaptive refitted", refit))
    }
    picture = {"lines": lines, "xlabel": "items", "ylabel": "accuracy (%)", "log_x": True, "limits": (0, 100)}
    text = table(["accuracy (%) at items", *map(size, paper.SIZES)], body)
    return Shown(f"{text}\n\n{about(rows)}\n\n![Accuracy by size](max_retrieval.png)", {"max_retrieval.png": picture})


Published = Mapping[tuple[str, str], Sequence[float]]


def normed(data: Data, names: Sequence[str], published: Published, file: str | None = None) -> Shown:
    """Accuracy of every norm with and without adaptive temperature, gains over the baseline, and, where there is a `file`
    for pictures, how outputs spread."""
    rows = [row for name in names for row in data.get(name, [])]
    there = [v for v in NORMED if any(r["variant"] == v for r in rows)]
    if len(there) < 2 or "baseline" not in there:
        return missing(" ".join(names))
    body, lines = [], {}
    for kind, suffix in (TEMPERED | {"refit": " + adaptive θ refitted"}).items():
        for variant in there:
            label = NORMED[variant] + suffix
            if (variant, kind) in published:
                body.append([f"{label}, paper", *told(published[variant, kind])])
            if not (found := means(series(rows, variant, kind, "accuracy"))):
                continue
            body.append([f"{label}, ours", *percent(found)])
            lines[label] = list(zip(paper.SIZES, [100 * x for x in found], strict=True))
    base = series(rows, "baseline", "plain", "accuracy")
    for variant in there[1:]:
        if published is paper.ARGMAX:
            body.append([f"gain of {NORMED[variant]}, paper", *(f"{x:+.2f}" for x in paper.ARGMAX_GAIN[variant])])
        elif theirs := published.get((variant, "plain")):
            differences = (a - b for a, b in zip(theirs, published["baseline", "plain"], strict=True))
            body.append([f"gain of {NORMED[variant]}, paper", *(f"{x:+.1f}" for x in differences)])
        if gained := gains(series(rows, variant, "plain", "accuracy"), base):
            body.append([f"gain of {NORMED[variant]}, ours", *signed(gained)])
    for variant in there:
        if largest := series(rows, variant, "attention", "largest"):
            body.append([f"the largest item holds the largest logit, {NORMED[variant]}", *percent(means(largest))])
    text = table(["accuracy (%) at items", *map(size, paper.SIZES)], body)
    if file is None:
        return Shown(f"{text}\n\n{about(rows)}", {})
    deviation = {
        f"{NORMED[v]}, {what}": means(series(rows, v, "plain", key))
        for v in there
        for key, what in (("deviation", "across sets"), ("spread", "across features"))
    }
    spread = [[label, *(f"{x:.3f}" for x in found)] for label, found in deviation.items()]
    text += "\n\n" + table(["standard deviation of outputs at items", *map(size, paper.SIZES)], spread)
    outputs = {label: list(zip(paper.SIZES, found, strict=True)) for label, found in deviation.items()}
    common = {"xlabel": "items", "log_x": True}
    pictures = {
        f"{file}.png": {"lines": lines, "ylabel": "accuracy (%)", "limits": (0, 100)} | common,
        f"{file}_outputs.png": {"lines": outputs, "ylabel": "standard deviation of outputs"} | common,
    }
    links = f"![Accuracy by size]({file}.png)\n![Deviation of outputs by size]({file}_outputs.png)"
    return Shown(f"{text}\n\n{about(rows)}\n\n{links}", pictures)


def argmax(data: Data) -> Shown:
    return normed(data, ("max-retrieval", "argmax-retrieval"), paper.ARGMAX, "argmax_retrieval")


def argmax_100k(data: Data) -> Shown:
    return normed(data, ("argmax-retrieval-100k",), paper.ARGMAX)


def argmax_256(data: Data) -> Shown:
    return normed(data, ("argmax-retrieval-256",), paper.ARGMAX_256)


#: Of the models with the L2 term, in the order of the table.
DECAYED = {
    "baseline": "baseline",
    "baseline-no_l2": "baseline, no L2",
    "baseline-torch_start": "baseline, torch's start",
    "layer_norm": "LayerNorm",
    "standardise": "standardise",
}


def decayed(data: Data) -> Shown:
    """Accuracy with the L2 term and the start of the paper's code, over the seeds of each; gains over the same seeds."""
    rows = data.get("argmax-retrieval-l2", [])
    there = [v for v in DECAYED if any(r["variant"] == v for r in rows)]
    if not there:
        return missing("argmax-retrieval-l2")
    body = []
    plain = {v: series(rows, v, "plain", "accuracy") for v in there}
    for variant in there:
        for kind, suffix in TEMPERED.items():
            values = series(rows, variant, kind, "accuracy")
            body.append([f"{DECAYED[variant]}{suffix}", *percent(means(values)), str(len(values))])
    base = series(data.get("max-retrieval", []), "baseline", "plain", "accuracy")
    for label, first, second in (
        ("baseline less that of the table above", plain.get("baseline", {}), base),
        ("baseline less baseline, no L2", plain.get("baseline", {}), plain.get("baseline-no_l2", {})),
        ("gain of LayerNorm", plain.get("layer_norm", {}), plain.get("baseline", {})),
        ("gain of standardise", plain.get("standardise", {}), plain.get("baseline", {})),
        ("gain of adaptive θ", series(rows, "baseline", "adaptive", "accuracy"), plain.get("baseline", {})),
    ):
        if gained := gains(first, second):
            body.append([label, *signed(gained), str(len(first.keys() & second.keys()))])
    for variant in there:
        largest = series(rows, variant, "attention", "largest")
        body.append(
            [f"the largest item holds the largest logit, {DECAYED[variant]}", *percent(means(largest)), str(len(largest))]
        )
    text = table(["accuracy (%) at items", *map(size, paper.SIZES), "seeds"], body)
    return Shown(f"{text}\n\n{about(rows)}", {})


def sharpening(data: Data) -> Shown:
    """The spread of logits by steps and Proposition 3.1's bound on it: means over seeds."""
    rows = data.get("argmax-retrieval-l2", [])
    there = [v for v in DECAYED if any(r["variant"] == v for r in rows)]
    if not there:
        return missing("argmax-retrieval-l2")
    steps = [int(s) for s, _, _ in rows[0]["measured"]["spread"]]
    body = []
    for variant in there:
        found = [r["measured"] for r in rows if r["variant"] == variant]
        for what, label in ((1, "δ"), (2, "bound")):
            values = [mean_interval([m["spread"][n][what] for m in found])[0] for n in range(len(steps))]
            norm = [f"{mean_interval([m['weight_norm'] for m in found])[0]:.0f}"] if what == 1 else [""]
            body.append([f"{DECAYED[variant]}, {label}", *(f"{v:.1f}" for v in values), *norm])
    return Shown(table(["after steps", *map(str, steps), "norm of all weights"], body), {})


def dictionary(data: Data) -> Shown:
    return normed(data, ("dictionary-lookup",), paper.DICTIONARY, "dictionary_lookup")


def dictionary_10k(data: Data) -> Shown:
    return normed(data, ("dictionary-lookup-10k",), paper.DICTIONARY)


def dictionary_256(data: Data) -> Shown:
    return normed(data, ("dictionary-lookup-256",), paper.DICTIONARY_256)


def labelled_end(variant: str) -> str:
    return f"`{variant.removesuffix(ENDPOINT)}`" + (", end point included" if variant.endswith(ENDPOINT) else "")


def by_length(
    data: Data, name: str, key: str, published: Mapping[str, Sequence[float]], digits: int, ylabel: str, file: str
) -> Shown:
    """The position methods, the paper's three lengths beside ours."""
    variants = [v for p in POSITIONS for v in (p, f"{p}{ENDPOINT}")]
    if not (rows := [r for r in data.get(name, []) if r["variant"] in variants]):
        return missing(f"{name} --text FILES --heldout FILE")
    lengths = rows[0]["measured"]["lengths"]
    body, lines = [], {}
    for variant in variants:
        theirs = [f"{x:.3f}" for x in published.get(variant.removesuffix(ENDPOINT), ())] or ["–"] * len(paper.LENGTHS)
        if not (values := series(rows, variant, key)):
            continue
        intervals = [mean_interval(column) for column in zip(*values.values(), strict=True)]
        ours = [f"{m:.{digits}f}" + (f" ± {h:.{digits}f}" if h == h else "") for m, h in intervals]
        body.append([labelled_end(variant), *theirs, *ours])
        lines[variant] = list(zip(lengths, means(values), strict=True))
    head = ["", *(f"paper, {n}" for n in paper.LENGTHS), *(f"ours, {n:,}" for n in lengths)]
    picture = {"lines": lines, "xlabel": "length (bytes)", "ylabel": ylabel, "log_x": True}
    return Shown(f"{table(head, body)}\n\n{about(rows)}\n\n![{ylabel} by length]({file})", {file: picture})


def length(data: Data) -> Shown:
    return by_length(data, "length-generalisation", "loss", paper.LENGTH, 3, "loss (nats a byte)", "length.png")


def needles(data: Data) -> Shown:
    shown = by_length(data, "needles", "accuracy", paper.NEEDLES, 2, "accuracy", "needles.png")
    rows = data.get("needles", [])
    losses = {v: series(rows, v, "loss") for v in POSITIONS}
    body = [[f"`{v}`", *(f"{x:.3f}" for x in means(values))] for v, values in losses.items() if values]
    if not body:
        return shown
    head = ["loss of the answer (nats a byte) at", *(f"{n:,}" for n in rows[0]["measured"]["lengths"])]
    return Shown(f"{shown.text}\n\n{table(head, body)}", shown.pictures)


def needles_pretrained(data: Data) -> Shown:
    if not (rows := data.get("needles-pretrained", [])):
        return missing("needles-pretrained --text FILES --heldout FILE")
    body = []
    for variant in METHODS:
        if accuracy := series(rows, variant, "accuracy"):
            body.append([f"`{variant}`" if METHODS[variant][0] else variant, *(f"{x:.2f}" for x in means(accuracy))])
            body[-1] += [f"{x:.3f}" for x in means(series(rows, variant, "loss"))]
    lengths = [f"{n:,}" for n in rows[0]["measured"]["lengths"]]
    head = ["", *(f"accuracy at {n}" for n in lengths), *(f"loss of the answer at {n}" for n in lengths)]
    return Shown(f"{table(head, body)}\n\n{about(rows)}", {})


STAGES = {"window": "at the window", "beyond": "then at 4 times the window"}
#: Of `needles-beyond`: differences of the answer's loss that are shown with their interval.
BEYOND_ORDERS = [("yarn16", "plain"), ("rerope", "yarn16")]
BEYOND_ORDERS += [(name, "rerope") for name in BEYOND if name.startswith("rerope+")] + [("prope+map", "rerope")]
BEYOND_ORDERS += [(QK + a, QK + b) for a, b in (("rerope", "plain"), ("rerope+logn", "rerope"), ("prope+map", "rerope"))]
SCRATCH_ORDERS = [("prope+scale_invariant", "prope"), ("prope+logn", "prope"), ("prope+scale_invariant", "prope+logn")]
BEYOND_ORDERS += [(f"{QK}{a}-scratch", f"{QK}{b}-scratch") for a, b in SCRATCH_ORDERS]


def needles_beyond(data: Data) -> Shown:
    """Accuracy and loss after each stage, over the seeds that all variants have; paired differences of the loss."""
    if not (rows := data.get("needles-beyond", [])):
        return missing("needles-beyond --text FILES --heldout FILE")
    lengths, text = rows[0]["measured"]["lengths"], ""
    there = [v for v in BEYOND if series(rows, v, "window", "loss")]
    seeds = set.intersection(*(set(series(rows, v, "window", "loss")) for v in there))
    for stage, when in STAGES.items():
        body = []
        for variant in there:
            right, loss = (series(rows, variant, stage, key) for key in ("accuracy", "loss"))
            cells = [*means({s: right[s] for s in seeds}), *means({s: loss[s] for s in seeds})]
            body.append([named(variant), *(f"{x:.2f}" for x in cells)])
        head = [f"trained {when}", *(f"accuracy at {size(n)}" for n in lengths), *(f"loss at {size(n)}" for n in lengths)]
        text += table(head, body) + "\n\n"
    text += f"Seeds {', '.join(map(str, sorted(seeds)))}. {about(rows)}\n\n"
    body = []
    for stage, when in STAGES.items():
        for first, second in BEYOND_ORDERS:
            a, b = (series(rows, variant, stage, "loss") for variant in (first, second))
            if found := gains(a, b):
                cells = [f"{m:+.2f}" + (f" ± {h:.2f}" if h == h else "") for m, h in found]
                body.append([f"{named(first)} less {named(second)}, {when}", *cells, str(len(a.keys() & b.keys()))])
    return Shown(text + table(["difference of loss", *(f"at {size(n)}" for n in lengths), "seeds"], body), {})


def attention(data: Data) -> Shown:
    """Entropy and local attention of trained models by the length so far; by distance in the longest doubling."""
    if not (rows := data.get(ATTENTION.name, [])):
        return missing(f"{ATTENTION.name} --text FILES --heldout FILE")
    one = rows[0]["measured"]
    first = one["lengths"].index(min(LENGTH.settings.length // 2, one["lengths"][-2]))
    labels = {v: labelled_end(v) for v in ATTENTION.variants if series(rows, v, "entropy")}
    groups = [f"{a}–{2 * a - 1}" for a in one["lengths"][first:]]
    body = []
    for key, what in (("entropy", "entropy"), ("local_mass", "local attention")):
        for variant, label in labels.items():
            body.append([f"{what}, {label}", *(f"{x:.2f}" for x in means(series(rows, variant, key))[first:])])
    text = table(["at length", *groups], body) + "\n\n"
    body = []
    for key, what in (("range_entropy", "entropy within"), ("range_mass", "attention")):
        for variant, label in labels.items():
            body.append([f"{what}, {label}", *(f"{x:.2f}" for x in means(series(rows, variant, key)))])
    text += table(["bytes back", *(f"{a}–{b - 1}" if b - a > 1 else str(a) for a, b in one["ranges"])], body)
    lines = {v: list(zip(one["lengths"], means(series(rows, v, "entropy")), strict=True)) for v in labels}
    local = {v: list(zip(one["lengths"], means(series(rows, v, "local_mass")), strict=True)) for v in labels}
    common = {"xlabel": "length so far (bytes)", "log_x": True}
    pictures = {
        "attention_entropy.png": common | {"lines": lines, "ylabel": "entropy (nats)"},
        "attention_local.png": common | {"lines": local, "ylabel": "attention on the last 100 bytes", "limits": (0, 1)},
    }
    links = "![Entropy by length](attention_entropy.png)\n![Local attention by length](attention_local.png)"
    return Shown(f"{text}\n\n{about(rows)}\n\n{links}", pictures)


def taus(data: Data) -> Shown:
    rows = data.get("length-generalisation", [])
    variants = {tau: f"scale_invariant_prope_tau{tau:g}" for tau in TAUS} | {10.0: "scale_invariant_prope"}
    found = {tau: values for tau, variant in sorted(variants.items()) if (values := series(rows, variant, "loss"))}
    if len(found) < 2:
        return missing("length-generalisation --only tau --text FILES --heldout FILE")
    seeds = set.intersection(*(set(values) for values in found.values()))  # the seeds of all: the same for every line
    body = [[f"{tau:g}", *(f"{x:.3f}" for x in means({s: v[s] for s in seeds}))] for tau, v in found.items()]
    return Shown(table(["τ", *(f"loss at {n:,}" for n in rows[0]["measured"]["lengths"])], body), {})


#: The paper's scale, and those that ours learn with.
MASKED_SHOWN = ("dot_product", "cosscale8", "cosscale16", "cosscale128", f"cosscale128{WARM}")


def labelled(variant: str, temperature: str = "none") -> str:
    return variant.replace(WARM, " after plain training") + ("" if temperature == "none" else f" + {temperature}")


def masked(data: Data) -> Shown:
    if not (rows := data.get("infoscale-cosscale", [])):
        return missing("infoscale-cosscale --text FILES --heldout FILE")
    lengths, body = rows[0]["measured"]["lengths"], []
    for variant in MASKED_SHOWN:
        for kind in (t or "none" for t in TEMPERATURES):
            label = labelled(variant, kind)
            if theirs := dict(zip(paper.MASKED_LENGTHS, paper.MASKED.get((variant, kind), ()), strict=False)):
                body.append([f"{label}, paper", *(theirs.get(n, "–") for n in lengths)])
            loss, right = (series(rows, variant, kind, key) for key in ("perplexity", "accuracy"))
            if loss:
                cells = zip(means(loss), means(right), strict=True)
                body.append([f"{label}, ours", *(f"{p:.2f}/{a:.2f}".replace("/0.", "/.") for p, a in cells)])
    lines = {  # at c = 128 no temperature shows
        labelled(variant, kind): list(zip(lengths, means(values), strict=True))
        for variant in MASKED_SHOWN
        for kind in (t or "none" for t in TEMPERATURES)
        if (kind == "none" or "128" not in variant) and (values := series(rows, variant, kind, "accuracy"))
    }
    picture = {"lines": lines, "xlabel": "length", "ylabel": "accuracy on masked bytes", "log_x": True}
    picture |= {"mark": {"trained": lengths[0]}}
    text = table(["perplexity/accuracy at", *map(size, lengths)], body)
    return Shown(
        f"{text}\n\n{about(rows)}\n\n![Accuracy by length](infoscale_cosscale.png)", {"infoscale_cosscale.png": picture}
    )


#: Rows of the paper's Table 1 by encoding and what is put into it, at its lengths.
NAMED = {
    "rope": "RoPE",
    "yarn16": "YaRN × 16",
    "windowed": "windowed",
    "streaming": "streaming",
    "lm_infinite": "LM-Infinite",
}


OTHERWISE_SCALED = {"infoscale, ε": "InfoScale, ε the entropy at 64", "softmax_plus 512": "softmax plus, base 512"}


def encodings(data: Data) -> Shown:
    """Every encoding with neither, InfoScale, CosScale and both, the paper's row below each."""
    if not (rows := data.get("infoscale-cosscale-encodings", [])):
        return missing("infoscale-cosscale-encodings --text FILES --heldout FILE")
    lengths, body = rows[0]["measured"]["lengths"], []

    def add(variant: str, encoding: str, kind: str, label: str, theirs: Sequence[str] = ()) -> None:
        loss, right = (series(rows, variant, encoding, kind, key) for key in ("perplexity", "accuracy"))
        if loss:
            cells = zip(means(loss), means(right), strict=True)
            body.append([label, *(f"{p:.2f}/{a:.2f}".replace("/0.", "/.") for p, a in cells)])
            if theirs:
                published = dict(zip(paper.MASKED_LENGTHS, theirs, strict=True))
                body.append(["paper", *(published.get(n, "–") for n in lengths)])

    add(PLAIN, "rope", "none", "RoPE, half of the steps")
    plain, cosine = f"{PLAIN}{WARM}", f"cosscale128{WARM}"
    for encoding in ENCODINGS:
        name = NAMED[encoding]
        for variant, added in ((plain, ""), (cosine, "CosScale")):
            for kind, temperature in (("none", ""), ("infoscale", "InfoScale")):
                label = " + ".join(filter(None, (name, added, temperature)))
                add(variant, encoding, kind, label, paper.ENCODED.get((encoding, added, temperature), ()))
    for kind in OTHERWISE_SCALED:
        for variant, added in ((plain, ""), (cosine, " + CosScale")):
            add(variant, "rope", kind, f"RoPE{added} + {OTHERWISE_SCALED[kind]}")
    return Shown(f"{table(['perplexity/accuracy at', *map(size, lengths)], body)}\n\n{about(rows)}", {})


def by_distance(data: Data) -> Shown:
    rows = data.get("infoscale-cosscale-encodings", [])
    body = []
    for variant in dict.fromkeys(r["variant"] for r in rows):
        found = [r["measured"] for r in rows if r["variant"] == variant]
        cells = [mean_interval([m["by_distance"][key] for m in found])[0] for key in ("share", "near")]
        entropy = mean_interval([m["entropy"] for m in found])[0]
        body.append([labelled(variant), f"{cells[0]:.3f}", f"{cells[1]:.2f}", f"{entropy:.2f}"])
    if not body:
        return missing("infoscale-cosscale-encodings --text FILES --heldout FILE")
    head = ["", "variance of scores by distance", "attention at most 4 bytes away", "entropy (nats)"]
    return Shown(table(head, body), {})


def scale_of(variant: str) -> str:
    return labelled(variant).removeprefix("cosscale")


def scales(data: Data) -> Shown:
    rows, body = data.get("infoscale-cosscale", []), []
    for variant in SCORED:
        if values := series(rows, variant, "none", "accuracy"):
            found = means(values)
            body.append([scale_of(variant), *(f"{x:.3f}" for x in found), f"{sum(found) / len(found):.3f}"])
    if not body:
        return missing("infoscale-cosscale --only cosscale --text FILES --heldout FILE")
    lengths = rows[0]["measured"]["lengths"]
    return Shown(table(["c", *(f"accuracy at {size(n)}" for n in lengths), "mean"], body), {})


def peaks(data: Data) -> Shown:
    rows, body = data.get("infoscale-cosscale", []), []
    for variant in SCORED:
        found = [r["measured"]["peak"] for r in rows if r["variant"] == variant]
        if found:
            keys = ("expected", "weighted", "plain", "mean", "deviation")
            body.append([scale_of(variant), *(f"{mean_interval([p[k] for p in found])[0]:.3f}" for k in keys)])
    if not body:
        return missing("infoscale-cosscale --only cosscale --text FILES --heldout FILE")
    head = ["c", "η*, Theorem 3.4", "peak, weighted by exp(c cos)", "peak", "mean of cos", "deviation of cos"]
    return Shown(table(head, body), {})


def algorithms(data: Data, name: str = "algorithms") -> Shown:
    if not (rows := data.get(name, [])):
        return missing(name)
    sizes, kinds = rows[0]["measured"]["sizes"], {}
    kinds["plain"] = ("plain", "as trained")
    kinds["adaptive θ in training"] = ("adaptive_temperature", "as trained")
    kinds["adaptive θ at inference alone"] = ("plain", "adaptive at inference")
    body, lines = [], {}
    every = rows[0]["settings"].get("tasks", TASKS)
    for task in (*every, "mean"):
        for label, (variant, kind) in kinds.items():
            tasks = every if task == "mean" else (task,)
            found = [series(rows, variant, kind, t, "exact") for t in tasks]
            if not found[0]:
                continue
            by_size = [sum(column) / len(column) for column in zip(*map(means, found), strict=True)]
            body.append([f"{task}, {label}", *percent(by_size)])
            if task == "mean":
                lines[label] = list(zip(sizes, by_size, strict=True))
    picture = {"lines": lines, "xlabel": "size", "ylabel": "answers right, mean of the tasks", "limits": (0, 1)}
    picture |= {"mark": {"largest trained": max(rows[0]["measured"]["trained"])}}
    text = table(["answers right (%) at size", *map(str, sizes)], body)
    file = f"{name.replace('-', '_')}.png"
    return Shown(f"{text}\n\n{about(rows)}\n\n![Answers right by size]({file})", {file: picture})


def algorithms_pretrained(data: Data) -> Shown:
    return algorithms(data, "algorithms-pretrained")


def ways(data: Data, variants: Mapping[str, str], last: int = 0) -> Shown:
    """Loss on prose, passages and strings at every length, of variants by label, over the seeds that all of them have.

    Args:
        last: only so many of the lengths, the greatest; 0 for all.
    """
    rows = data.get("conversion", [])
    found = {label: [series(rows, variant, task) for task in COPIES] for label, variant in variants.items()}
    if not (found := {label: values for label, values in found.items() if values[0]}):
        return missing("conversion --text FILES --heldout FILE")
    seeds = set.intersection(*(set(values[0]) for values in found.values()))
    body = [
        [label, *(f"{x:.2f}" for value in values for x in means({s: value[s] for s in seeds})[-last:])]
        for label, values in found.items()
    ]
    head = [f"{task} at {size(n)}" for task in COPIES for n in rows[0]["measured"]["lengths"][-last:]]
    return Shown(f"{table(['', *head], body)}\n\nSeeds {', '.join(map(str, sorted(seeds)))}. {about(rows)}", {})


def named(way: str) -> str:
    return way if way in ("control", "plain") else f"`{way}`"


def conversion_untrained(data: Data) -> Shown:
    return ways(data, {"unmodified": BASE} | {named(w): f"{w}-untrained" for w in UNTRAINED})


def conversion(data: Data) -> Shown:
    """After the first share of the steps, between what needs no training and what is trained under the method."""
    variants = {"unmodified": BASE, "`windowed`, untrained": "windowed-untrained"}
    variants |= {named(way): f"{way}-{SHARES[0]}%" for way in TRAINED}
    return ways(data, variants | {f"{named(way)}, from scratch": f"{way}-scratch" for way in SCRATCH if QK not in way})


def conversion_otherwise(data: Data) -> Shown:
    """The same ways trained by an adapter, under a teacher or with a rising strength, each below the way itself."""
    variants: dict[str, str] = {}
    there = {row["variant"] for row in data.get("conversion", [])}
    for way in TRAINED:
        others = [n for n in OTHERWISE if n.rpartition("-")[0] == way and f"{n}-{SHARES[0]}%" in there]
        labels = {way: named(way)} | {name: f"{named(way)}, {told_apart(name.rpartition('-')[2])}" for name in others}
        variants |= {label: f"{name}-{SHARES[0]}%" for name, label in labels.items()} if others else {}
    return ways(data, variants)


def told_apart(how: str) -> str:
    rate = how.removeprefix("lora") if how != "lora" else f"{LORA_RATE:g}"
    return f"LoRA, rate {float(rate):g}" if how.startswith("lora") else {"strength": "strength rising"}.get(how, how)


#: What the recipes for pretrained models train, by the changes to `continue_lora` that give it.
RECIPE_ROWS = {
    "unmodified": BASE,
    "`rerope`, untrained": "rerope-untrained",
    "`rerope+infoscale`, untrained": "rerope+infoscale-untrained",
    "`method=null positions=plain`: the control": "control-lora-15%",
    "`continue_lora`": "pose+rerope+infoscale-lora-15%",
    "`convert_distill`": "pose+rerope+infoscale-lora-distilled-15%",
    "`method=rerope+cosscale+infoscale parameters.scale=32`": "pose+rerope+cosscale32+infoscale-lora-15%",
    "`method=rerope+adaptive_temperature`": "pose+rerope+adaptive_temperature-lora-15%",
    "`method=rerope+output_layer_norm calibrate=1024`": "pose+rerope+output_layer_norm-lora-15%",
    "`method=rerope+logn`": "pose+rerope+logn-lora-15%",
    "`method=rerope+logn parameters.learned=true parameters.clamp=false positions=plain`": "rerope+logn-lora-15%",
    "`method=scale_invariant rope.kind=prope calibrate=1024 positions=plain`": "prope+map-lora-15%",
}


def conversion_recipes(data: Data) -> Shown:
    """LoRA as the recipes have it, at 16 and 64 times the window."""
    return ways(data, RECIPE_ROWS, 2)


def conversion_taus(data: Data) -> Shown:
    """Scale-invariant p-RoPE by τ, uncalibrated and calibrated."""
    variants = {"p-RoPE alone": f"prope-{SHARES[0]}%"}
    for way, kind in {"prope+scale_invariant": "uncalibrated", "prope+map": "calibrated"}.items():
        for tau in SWEEP:
            variants[f"{kind}, τ {tau:g}"] = f"{way}{'' if tau == 10 else f'-tau{tau:g}'}-{SHARES[0]}%"
    return ways(data, variants)


def conversion_normed(data: Data) -> Shown:
    """On a base with QK-norm: untrained, converted and from scratch."""
    if not any(row["variant"].startswith(QK) for row in data.get("conversion", [])):
        return missing("conversion --only '^qk' --seeds 1 --text FILES --heldout FILE")
    label = {way: named(way.removeprefix(QK)) for way in UNTRAINED_QK | QK_NORMED}
    variants = {"unmodified": f"{QK}{BASE}"} | {f"{label[way]}, untrained": f"{way}-untrained" for way in UNTRAINED_QK}
    variants |= {label[way]: f"{way}-{SHARES[0]}%" for way in QK_NORMED}
    return ways(
        data, variants | {f"{named(way.removeprefix(QK))}, from scratch": f"{way}-scratch" for way in SCRATCH if QK in way}
    )


def conversion_steps(data: Data) -> Shown:
    """The ways of which more than one share was run, by share."""
    rows, variants = data.get("conversion", []), {}
    for way in TRAINED:
        shares = {0: BASE if way == "control" else f"{way}-untrained"} | {s: f"{way}-{s}%" for s in sorted(SHARES)}
        there = {s: variant for s, variant in shares.items() if any(r["variant"] == variant for r in rows)}
        if len(there.keys() - {0}) > 1:
            variants |= {f"{named(way)}, {s} %": variant for s, variant in there.items()}
    return ways(data, variants)


#: Differences that are shown with their interval: the first of each pair less the second.
ORDERS = (
    ("windowed-untrained", "rerope-untrained"),
    ("yarn16-untrained", "rerope-untrained"),
    ("leaky_rerope-untrained", "rerope-untrained"),
    ("dual_chunk-untrained", "rerope-untrained"),
    ("rerope+infoscale-untrained", "rerope-untrained"),
    ("rerope+logn-untrained", "rerope-untrained"),
    ("rerope+map-untrained", "rerope-untrained"),
    ("rerope-15%", "rerope-untrained"),
    ("rerope+logn-15%", "rerope+logn-untrained"),
    ("rerope+logn-15%", "rerope-15%"),
    ("pose+rerope+logn-15%", "rerope+logn-15%"),
    ("prope-15%", "rerope-15%"),
    ("prope+logn-15%", "prope-15%"),
    ("prope+map-15%", "prope-15%"),
    ("yarn16-15%", "rerope-15%"),
    ("pose+yarn64-15%", "rerope-15%"),
    ("rerope+infoscale-15%", "rerope-15%"),
    ("rerope+cosscale64-15%", "rerope-15%"),
    ("rerope+cosscale32+infoscale-15%", "rerope-15%"),
    ("rerope+cosscale32+infoscale-15%", "rerope+logn-15%"),
    ("rerope+cosscale64+infoscale-15%", "rerope+cosscale64-15%"),
    ("rerope+cosscale64+infoscale-15%", "rerope+logn-15%"),
    ("rerope+logn-lora-15%", "rerope+logn-15%"),
    ("rerope+logn-distilled-15%", "rerope+logn-15%"),
    ("pose+rerope+logn-distilled-15%", "pose+rerope+logn-15%"),
    ("rerope+logn-50%", "rerope+logn-15%"),
    ("qk+rerope+infoscale-untrained", "qk+rerope-untrained"),
    ("qk+rerope+logn-untrained", "qk+rerope-untrained"),
    ("qk+rerope+infoscale-15%", "qk+rerope-15%"),
    ("qk+rerope+logn-15%", "qk+rerope-15%"),
    ("qk+prope+map-15%", "qk+rerope+logn-15%"),
    ("qk+leaky_rerope+logn-untrained", "qk+leaky_rerope-untrained"),
    ("qk+self_extend+logn-untrained", "qk+self_extend-untrained"),
    ("qk+dual_chunk+logn-untrained", "qk+dual_chunk-untrained"),
    ("qk+yarn16+logn-untrained", "qk+yarn16-untrained"),
    ("qk+rerope+logn-untrained", "qk+yarn16-untrained"),
    ("qk+pose+rerope+logn-15%", "qk+rerope+logn-15%"),
    ("qk+rerope+cosscale32+infoscale-15%", "qk+rerope+logn-15%"),
    ("qk+rerope+logn-15%", "qk+control-15%"),
    ("qk+prope+logn-scratch", "qk+prope-scratch"),
    ("qk+prope+scale_invariant-scratch", "qk+prope+logn-scratch"),
)


def conversion_orders(data: Data) -> Shown:
    """Paired differences at the two greatest lengths."""
    rows, body = data.get("conversion", []), []
    for first, second in ORDERS:
        found = [gains(series(rows, first, task), series(rows, second, task))[-2:] for task in COPIES]
        if found[0]:
            cells = [f"{m:+.2f}" + (f" ± {h:.2f}" if h == h else "") for values in found for m, h in values]
            seeds = len(
                {r["seed"] for r in rows if r["variant"] == first} & {r["seed"] for r in rows if r["variant"] == second}
            )
            body.append([f"`{first}` less `{second}`", *cells, str(seeds)])
    if not body:
        return missing("conversion --text FILES --heldout FILE")
    head = [f"{task} at {size(n)}" for task in COPIES for n in rows[0]["measured"]["lengths"][-2:]]
    return Shown(table(["", *head, "seeds"], body), {})


SECTIONS: dict[str, Callable[[Data], Shown]] = {
    "max-retrieval": max_retrieval,
    "argmax-retrieval": argmax,
    "argmax-retrieval-100k": argmax_100k,
    "argmax-retrieval-256": argmax_256,
    "decayed": decayed,
    "sharpening": sharpening,
    "dictionary-lookup": dictionary,
    "dictionary-lookup-10k": dictionary_10k,
    "dictionary-lookup-256": dictionary_256,
    "length": length,
    "taus": taus,
    "needles": needles,
    "needles-pretrained": needles_pretrained,
    "needles-beyond": needles_beyond,
    "attention-by-length": attention,
    "infoscale-cosscale": masked,
    "scales": scales,
    "peaks": peaks,
    "encodings": encodings,
    "by-distance": by_distance,
    "algorithms": algorithms,
    "algorithms-pretrained": algorithms_pretrained,
    "conversion": conversion,
    "conversion-untrained": conversion_untrained,
    "conversion-orders": conversion_orders,
    "conversion-steps": conversion_steps,
    "conversion-otherwise": conversion_otherwise,
    "conversion-taus": conversion_taus,
    "conversion-normed": conversion_normed,
    "conversion-recipes": conversion_recipes,
}
