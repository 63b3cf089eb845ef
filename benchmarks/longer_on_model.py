"""Making a pretrained model longer: every way, in one forward pass over a text into which copies are written.

A row is one choice (a rope scaling, a method, or both) on the first --length tokens of --text, the same copies for all.
Rows that the result file has are not run again; every row is written as it is done. Calibrated choices are measured on the
last --calibration tokens of the text, which no pass reads. --adapter evaluates a trained adapter under the same choices.
--tables writes the tables and pictures of docs/ from the result file.
"""

import argparse
import itertools
import math
import re
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from hf_longattn import calibrate
from hf_longattn.attention.kernels.precision import fast_dtype
from hf_longattn.evaluation import PASSAGE, Copy, copy_losses, loss_by_position, token_losses, with_copies
from hf_longattn.evaluation.loading import load_setting
from hf_longattn.evaluation.report import figures
from hf_longattn.evaluation.report.markdown import Contents, fill_pages, table
from hf_longattn.evaluation.rows import Rows, versions_line
from hf_longattn.evaluation.settings import Setting, parse_rope
from hf_longattn.evaluation.statistics import mean_interval

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "longer-smollm2.json"
PROTOCOL = (
    "One forward pass over the first `length` tokens of a text in which the passages of `copies` ([distance, position], 128 "
    "tokens) are overwritten by a repetition of those `distance` tokens before; no cache. prose: mean loss in nats per "
    "token of each 1024 positions outside copies; copying: mean loss on each copy, its first 16 tokens left out. "
    "Calibrated: on the last `calibration` tokens of the same text, which the pass does not read."
)
STEP = 1024
#: (distance, position); a text takes those that fit.
COPIES = [
    *((2500, 3000), (4200, 5500), (1400, 6200), (6800, 7500), (2500, 9000), (8000, 10000), (5500, 11500), (9000, 13000)),
    *((3000, 13500), (12500, 14000), (7000, 15000), (11000, 15500), (15500, 15800)),
    *((5300, 18000), (11800, 20000), (18800, 22000), (8000, 24000), (23700, 26000), (4500, 28000), (14300, 29500)),
    *((28400, 31000), (31000, 32000), (20000, 32400)),
    *((9000, 34000), (33500, 35000), (20000, 36500), (30000, 38000), (38500, 39500), (4000, 40000)),
]


@dataclass(frozen=True)
class Choice(Setting):
    """A setting, calibrated or not, at some lengths."""

    calibrated: bool = False
    lengths: tuple[int, ...] = (16384,)  # a shorter pass would be the beginning of a longer one, but under dynamic NTK


def remap(name: str, extra: str = "", lengths: tuple[int, ...] = (16384,), **parameters: Any) -> Choice:
    shown = ", ".join(f"{k} {v:g}" for k, v in parameters.items())
    method = f"{name}+{extra}" if extra else name
    return Choice(f"{name}({shown}){' + ' + extra if extra else ''}", method, parameters, lengths=lengths)


#: Key heads (layer, head) of SmolLM2-135M with 0.019 or more in `copying_heads`, on the tokens 20,000 to 24,096 of Emma.
COPYING = [(17, 1), (18, 2), (20, 1), (20, 2), (21, 2), (22, 1), (22, 2), (23, 0), (23, 2), (24, 0), (24, 2)]


def by_head(
    stretch: float,
    capped: list[tuple[int, int]] = COPYING,
    what: str = "copying heads",
    window: int = 4096,
    lengths: tuple[int, ...] = (16384,),
) -> Choice:
    """Leaky ReRoPE with the far keys of some heads capped."""
    each = [[math.inf if (layer, head) in capped else stretch for head in range(3)] for layer in range(30)]
    name = f"leaky_rerope(window {window}, stretch {stretch:g}{f'; {what} capped' if capped else ''})"
    return Choice(name, "leaky_rerope", {"window": window, "stretch": each}, lengths=lengths)


MAP = {"name": "scale_invariant", "tau": 1000.0, "decay": 0.25, "sink_tokens": 1}


def with_map(base: Choice, **changes: Any) -> Choice:
    config = base.config
    slots = config.to_dict() if config else {}
    name = f"{base.name} + calibrated map{''.join(f' {k} {v}' for k, v in changes.items())}"
    return Choice(name, slots | {"logit_map": MAP | changes}, rope=base.rope, calibrated=True)


FOUR, ALL = (32768,), (16384, 32768)
#: Of Gemma 3, trained at 32,768: its three layers with full attention take the remap.
GEMMA = (40960,)
CHOICES = [
    Choice("unmodified", lengths=ALL),
    Choice("YaRN × 2", rope="yarn:2.0"),
    Choice("YaRN × 4", rope="yarn:4.0", lengths=ALL),
    remap("yarn_beyond", factor=2),
    by_head(4),
    by_head(8, lengths=ALL),
    remap("rerope", lengths=ALL, window=4096),
    remap("leaky_rerope", window=4096, stretch=4),
    remap("leaky_rerope", lengths=FOUR, window=4096, stretch=8),
    remap("self_extend", window=1024, group=4),
    remap("self_extend", lengths=(8192,), window=1024, group=2),
    remap("string", lengths=(8192,)),
    remap("self_extend", lengths=(32768,), window=1024, group=8),
    Choice("dynamic NTK × 2", rope="ntk:2.0", lengths=(8192, 16384)),
    Choice("dynamic NTK × 4", rope="ntk:4.0", lengths=FOUR),
    by_head(3),
    by_head(4, window=6144),
    by_head(4, [(layer, head) for layer in range(17, 30) for head in range(3)], "layers 17 to 29"),
    by_head(4, [*COPYING, *((layer, head) for layer in range(8) for head in range(3))], "copying heads and layers 0 to 7"),
    by_head(
        4, [*COPYING, *((layer, head) for layer in range(8, 17) for head in range(3))], "copying heads and layers 8 to 16"
    ),
    with_map(remap("rerope", window=4096), offset=4096),
    with_map(by_head(4, []), offset=4096),
    with_map(by_head(4), offset=4096),
    remap("rerope", "infoscale", window=4096),
    remap("rerope", "logn", window=4096),
    remap("rerope", "cosscale+infoscale", window=4096, scale=32),
    remap("leaky_rerope", "infoscale", window=4096, stretch=4),
    remap("leaky_rerope", window=4096, stretch=16),
    remap("leaky_rerope", window=2048, stretch=4),
    remap("leaky_rerope", window=6144, stretch=8),
    remap("rerope", window=2048),
    remap("dual_chunk"),
    remap("lm_infinite", lengths=(16384, 32768), window=8192),
    remap("streaming", window=4096),
    remap("windowed", window=4096),
    Choice("linear × 2", rope="linear:2.0"),
    Choice("unmodified", lengths=GEMMA),
    Choice("YaRN × 2", rope="yarn:2.0", lengths=GEMMA),
    remap("yarn_beyond", lengths=GEMMA, factor=2),
    remap("rerope", lengths=GEMMA, window=16384),
    remap("leaky_rerope", lengths=GEMMA, window=16384, stretch=4),
    Choice(
        "rerope(window 16384) + yarn_temperature(train_length 16384)",
        "rerope+yarn_temperature",
        {"window": 16384, "train_length": 16384},
        lengths=GEMMA,
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "SmolLM2-135M-Instruct", help="as the demo obtains it")
    parser.add_argument("--adapter", type=Path, help="a PEFT adapter to put into the model first")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="plain text; the file's name names it in the result")
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--calibration", type=int, default=1536)
    parser.add_argument("--only", default="", help="only choices whose name matches this regular expression")
    parser.add_argument("--prefill", type=int, help="read through a cache, this many tokens at a time; default: one pass")
    parser.add_argument("--dtype", default=fast_dtype(), help="default: what this CPU multiplies fast, %(default)s")
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--tables", action="store_true", help="no measurement: tables and pictures in docs/ from the result")
    args = parser.parse_args()
    if args.tables:
        fill_pages(ROOT / "docs", contents())
        picture(load_all(), ROOT / "docs" / "longer.png")
        return

    transformers.set_seed(0)
    transformers.logging.disable_progress_bar()
    source = args.model / "SOURCE"
    about = {
        "source": source.read_text().strip() if source.exists() else args.model.name,
        "versions": f"{versions_line('hf_longattn', 'transformers', 'torch')}, {torch.get_num_threads()} threads",
        "command": f"python benchmarks/longer_on_model.py --text {' '.join(t.name for t in args.text)} --length {args.length}"
        + f" --dtype {args.dtype}"
        + (f" --adapter {args.adapter.name}" if args.adapter else "")
        + (f" --model {args.model.name}" if args.model != parser.get_default("model") else "")
        + (f" --prefill {args.prefill}" if args.prefill else ""),
    }
    copies = [Copy(d, p) for d, p in COPIES if p + PASSAGE <= args.length]
    chosen = [c for c in CHOICES if args.length in c.lengths and re.search(args.only, c.name)]
    file = Rows(args.result, protocol=PROTOCOL)
    for choice, text in itertools.product(chosen, args.text):
        tokens = AutoTokenizer.from_pretrained(args.model)(text.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"]
        if tokens.shape[1] < args.length + args.calibration:
            sys.exit(f"{text.name} has {tokens.shape[1]} tokens; {args.length + args.calibration} are needed")
        key = {"name": choice.name, "text": text.stem, "length": args.length, "model": args.model.name, "dtype": args.dtype}
        key |= {"adapter": args.adapter.name} if args.adapter else {}
        if file.find(**{"adapter": None} | key):
            continue
        start = time.process_time()
        adapted = replace(choice, adapter=args.adapter and str(args.adapter))
        model = load_choice(adapted, args.model, args.dtype, tokens[:, -args.calibration :])
        ids, taken = with_copies(tokens[:, : args.length], copies)
        losses = token_losses(model, ids, prefill=args.prefill)
        measured = {
            "prose": [round(x, 4) for x in loss_by_position(losses, [*range(0, args.length, STEP), args.length], taken)],
            "copying": [round(x, 4) for x in copy_losses(losses, copies)],
            "copies": [[c.distance, c.position] for c in copies],
            "trained": AutoConfig.from_pretrained(args.model).max_position_embeddings,
            "config": choice.config and choice.config.to_dict(),  # numbers that calibration measured left out
            "rope": rope_numbers(choice),
        }
        row = key | measured | ({"calibration": args.calibration} if choice.calibrated else {}) | about
        row["cpu_seconds"] = round(time.process_time() - start, 1)
        file.put(row)
        print(
            text.stem, args.length, choice.name, measured["prose"], measured["copying"], f"{row['cpu_seconds']} s", flush=True
        )
        del model


def load_choice(choice: Choice, model: Path, dtype: str, calibration: Tensor) -> Any:
    """The model under a choice, measured on the calibration text (1, tokens) first if the choice wants it."""
    calibrated = (lambda model, method: calibrate(model, [calibration], method)) if choice.calibrated else None
    return load_setting(choice, str(model), dtype, calibrated=calibrated)


def rope_numbers(choice: Choice) -> list[Any]:
    """A choice's position encoding as rows have it: ["yarn", 2.0]."""
    if choice.rope is None:
        return []
    name, numbers = parse_rope(choice.rope)
    return [name, *numbers]


def load_all() -> list[dict[str, Any]]:
    """Rows of every model, each with its label."""
    files = sorted(RESULT.parent.glob("longer-*.json"))
    return [r | {"label": r["name"] + (f", {r['adapter']}" if "adapter" in r else "")} for f in files for r in Rows(f)]


def groups_of(row: dict[str, Any]) -> list[list[float]]:
    """Losses on each 1,024 positions within and beyond the trained length, and on each copy: within, beyond, from farther."""
    edge, copies = row["trained"] // STEP, list(zip(row["copies"], row["copying"], strict=True))
    return [
        row["prose"][:edge],
        row["prose"][edge:],
        [x for (_, p), x in copies if p + PASSAGE <= row["trained"]],
        [x for (d, p), x in copies if p + PASSAGE > row["trained"] >= d],
        [x for (d, _), x in copies if d > row["trained"]],
    ]


def summary(row: dict[str, Any]) -> list[float]:
    """Prose within and beyond the trained length; copies within it, beyond it from known distances, and from farther back."""
    counts = torch.full((len(row["prose"]), STEP), 1.0)
    counts[0, 0] = 0
    for _, position in row["copies"]:
        counts.view(-1)[position : position + PASSAGE] = 0
    weights, loss = counts.sum(1), torch.tensor(row["prose"])
    edge = row["trained"] // STEP
    prose = [float((loss[part] * weights[part]).sum() / weights[part].sum()) for part in (slice(edge), slice(edge, None))]
    return prose + [sum(g) / len(g) if g else math.nan for g in groups_of(row)[2:]]


HEAD = ["", "prose, within", "prose, beyond", "copies, within", "copies, beyond", "copies, farther back"]


def contents() -> Contents:
    """What stands below `<!-- longer: model text length | label | ... -->` (no label: every row without an adapter) and
    `<!-- longer-less: model text length | label | label | ... -->`: the second and further ones less the first."""
    rows = load_all()

    def asked(what: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
        first, *names = (part.strip() for part in what.split("|"))
        model, text, length = first.split()
        return {r["label"]: r for r in rows if (r["model"], r["text"], r["length"]) == (model, text, int(length))}, names

    def less(what: str) -> str:
        here, (first, *names) = asked(what)
        body = []
        for name in [n for n in names if n in here]:
            pairs = zip(groups_of(here[name]), groups_of(here[first]), strict=True)
            found = [mean_interval([a - b for a, b in zip(*pair, strict=True)]) for pair in pairs]
            body.append([f"`{name}`", *(f"{mean:+.3f} ± {half:.3f}" for mean, half in found)])
        return table(["", *(f"Δ {x}" for x in HEAD[1:])], body)

    def content(what: str) -> str:
        here, names = asked(what)
        return table(
            HEAD,
            [
                [f"`{n}`", *("–" if x != x else f"{x:.{3 if i < 2 else 2}f}" for i, x in enumerate(summary(here[n])))]
                for n in names or [n for n, r in here.items() if "adapter" not in r]
                if n in here
            ],
        )

    return {"longer": content, "longer-less": less}


TRAINED = 8192  # of the model in the picture
#: Name, colour (Okabe and Ito's, told apart by the colour-blind), marker.
SHOWN = [
    "unmodified",
    "YaRN × 2",
    "rerope(window 4096)",
    "leaky_rerope(window 4096, stretch 4)",
    "leaky_rerope(window 4096, stretch 4; copying heads capped)",
    "rerope(window 4096), pose-rerope-half",
]


def picture(rows: list[dict[str, Any]], path: Path, model: str = "SmolLM2-135M-Instruct", length: int = 16384) -> None:
    """Left, prose loss by position less YaRN's; right, copy loss by distance beyond the trained length. A text a row."""
    baseline = "YaRN × 2"
    rows = [r for r in rows if (r["model"], r["length"]) == (model, length)]
    texts = [r["text"] for r in rows if r["label"] == baseline]
    figure, panels = figures.pyplot().subplots(
        len(texts), 2, figsize=(11, 3.8 * len(texts)), squeeze=False, constrained_layout=True
    )
    for text, (left, right) in zip(texts, panels, strict=True):
        here = {r["label"]: r for r in rows if r["text"] == text}
        for name, own in zip(SHOWN, figures.styles(SHOWN), strict=True):
            if name not in here:
                continue
            style = own | {"markersize": 5, "linewidth": 1.5, "label": name}
            prose = [a - b for a, b in zip(here[name]["prose"], here[baseline]["prose"], strict=True)]
            left.plot([STEP * (n + 0.5) for n in range(len(prose))], prose, **style)
            beyond = sorted(
                (d, x) for (d, p), x in zip(here[name]["copies"], here[name]["copying"], strict=True) if p > TRAINED
            )
            right.plot(*zip(*beyond, strict=True), **style)
        for panel in (left, right):
            panel.axvline(TRAINED, color="#999999", linewidth=1, linestyle=":")
        left.set(
            title=f"{text}: prose", xlabel="position (tokens)", ylabel="loss less YaRN's (nats a token)", ylim=(-0.16, 0.12)
        )
        right.set(
            title=f"{text}: a passage read again beyond {TRAINED}",
            xlabel="how far back (tokens)",
            ylabel="loss (nats a token)",
            ylim=(0, 4),
        )
    figure.legend(*panels[0][1].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    path.write_bytes(figures.png(figure))


if __name__ == "__main__":
    main()
