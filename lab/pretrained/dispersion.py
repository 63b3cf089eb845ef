"""Dispersion in pretrained models, as two papers show it, through hf_longattn.capture.

outputs: Li et al. (vanishing variance), Fig. 1 and Proposition 1: how far outputs of the first layer's attention deviate over
--texts texts of n tokens, at the last token. Random tokens without and with positions, and sentences of --text.
entropy: Veličković et al. (softmax is not enough), Fig. 3: entropy of the heads of the first layer without a window, at the
last token of a question about the largest of n numbers, over --questions questions.
spread: the same paper's δ of a row's logits over --code, and Proposition 3.1's bound on it.

    python lab/pretrained/dispersion.py --model MODEL --text BOOK --code FILE

Rows go to results/dispersion.json; those that are there are not measured again.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, DynamicCache

import hf_longattn
from hf_longattn.evaluation import Cell, Experiment
from hf_longattn.evaluation.report import markdown
from hf_longattn.evaluation.rows import Row, RowFile, versions
from hf_longattn.evaluation.settings import Setting
from hf_longattn.integration.caches import CACHE
from lab.markdown import Contents
from lab.pretrained.runner import RESULTS

COLUMNS = ("task", "model", "way", "query", "layer")
PROMPT = "What is the maximum in the following sequence: {seq}? The maximum is:"
#: The paper's three ways of drawing texts, and whether positions are encoded; whose output is read at the last token.
WAYS = {"random tokens, no positions": False, "random tokens": True, "sentences": True}
QUERIES = ("its own", "the same")
BATCH = 10
SIZES = tuple(2**k for k in range(1, 10))
#: Query rows of the code that are read, spread over it.
SPREAD_ROWS = 512


class Nothing(nn.Module):
    """In place of an MLP behind which nothing is read."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def cut(path: Path, layers: int, positions: bool = True) -> Any:
    """The first layers of a model."""
    config = AutoConfig.from_pretrained(path, num_hidden_layers=layers)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    if not positions:
        config = hf_longattn.rope.nope(config)
    return AutoModel.from_pretrained(path, config=config, dtype=torch.float32).eval()


def full_layers(path: Path) -> list[int]:
    """The layers without a window."""
    config = AutoConfig.from_pretrained(path)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [n for n, kind in enumerate(kinds) if kind == "full_attention"]


@torch.no_grad()
def at_the_last(model: Any, layer: int, what: str, group: str, texts: Sequence[Tensor], caches: Sequence[Any]) -> Tensor:
    """A quantity of `layer` over the last tokens alone of all texts (each (batch, 1)), whose other tokens are in the caches,
    which have it too afterwards. By head."""
    with hf_longattn.capture(model, layers=[layer], what=group) as seen:
        for ids, cache in zip(texts, caches, strict=True):
            model(ids, **{CACHE: cache})
    found = seen.result()[what][0]  # all rows have one length, so that one group has any
    return found[:, ~found.isnan().any(0)][:, 0]


@torch.no_grad()
def outputs(way: str, args: argparse.Namespace) -> dict[str, Row]:
    """Deviation over texts at every power of two up to --longest: of the token that comes there, and of one same query."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    lengths = [2**k for k in range(3, int(math.log2(args.longest)) + 1)]
    drawn = random_tokens(tokenizer, args)
    parts = (sentences(tokenizer, args) if way == "sentences" else drawn).split(BATCH)
    model = cut(args.model, 1, WAYS[way])
    model.layers[0].mlp = Nothing()
    caches = [DynamicCache(config=model.config) for _ in parts]
    deviation: dict[str, list[list[float]]] = {query: [] for query in QUERIES}
    done = 0
    for n in lengths:
        for part, cache in zip(parts, caches, strict=True):
            model(part[:, done : n - 1], **{CACHE: cache})
        done = n - 1
        asked = [[p[:, n - 1 : n] for p in parts], [drawn[0, 0].expand(len(p), 1) for p in parts]]
        for query, queries in zip(QUERIES, asked, strict=True):
            by_head = at_the_last(model, 0, "output_deviation", "outputs", queries, caches)
            for cache in caches:
                cache.crop(-1)
            deviation[query].append([round(float(x), 6) for x in by_head])
    return {query: {"lengths": lengths, "deviation": found} for query, found in deviation.items()}


def random_tokens(tokenizer: Any, args: argparse.Namespace) -> Tensor:
    """(texts, longest), independent and uniform over the vocabulary."""
    return torch.randint(len(tokenizer), (args.texts, args.longest), generator=torch.Generator().manual_seed(args.seed))


def sentences(tokenizer: Any, args: argparse.Namespace) -> Tensor:
    """(texts, longest) from as many random sentences of the text on, beginnings all different."""
    text = args.text.read_text(encoding="utf-8")
    starts = [m.end() for m in re.finditer(r"[.!?]\s+", text) if m.end() < len(text) - 8 * args.longest]
    chosen = random.Random(args.seed).sample(starts, args.texts)
    found = [tokenizer(text[s : s + 8 * args.longest], add_special_tokens=False)["input_ids"][: args.longest] for s in chosen]
    return torch.tensor(found)


@torch.no_grad()
def entropy(layer: int, args: argparse.Namespace) -> Row:
    """Entropy at the last token of the paper's question by the number of elements, of every head of one layer."""
    tokenizer, model = AutoTokenizer.from_pretrained(args.model), cut(args.model, layer + 1)
    drawn = random.Random(args.seed)
    row: Row = {"sizes": list(args.sizes), "lengths": [], "entropy": []}
    for size in args.sizes:
        each, tokens = [], []
        for _ in range(args.questions):
            question = PROMPT.format(seq=", ".join(str(drawn.randrange(1000)) for _ in range(size)))
            ids, cache = tokenizer(question, return_tensors="pt")["input_ids"], DynamicCache(config=model.config)
            model(ids[:, :-1], **{CACHE: cache})
            each.append(at_the_last(model, layer, "entropy", "entropy", [ids[:, -1:]], [cache]))
            tokens.append(ids.shape[1])
        row["lengths"].append(round(sum(tokens) / len(tokens)))
        row["entropy"].append([round(float(x), 4) for x in torch.stack(each).mean(0)])
    return row


@torch.no_grad()
def spread(args: argparse.Namespace) -> dict[int, Row]:
    """δ of every head by layer, a mean over rows, and the bound 2 σ(Q) σ(K) mean |y| max |x| scale of the same rows.

    x and y are what the projections of keys and queries read. A model that normalises queries and keys by head bounds them
    by their gains instead, whatever Q and K are: 2 d max |g_q| max |g_k| scale.
    """
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = tokenizer(args.code.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"][:, : args.code_tokens]
    model = AutoModel.from_pretrained(args.model, dtype=torch.float32).eval()
    read: dict[int, Tensor] = {}
    attentions = {layer.self_attn.layer_idx: layer.self_attn for layer in model.layers}
    for i, a in attentions.items():
        a.q_proj.register_forward_pre_hook(lambda m, x, i=i: read.__setitem__(i, x[0][0].norm(dim=-1)))
    with hf_longattn.capture(model, what="logits", rows=SPREAD_ROWS) as seen:
        model(ids)
    found = seen.result()
    return {
        layer: {
            "tokens": ids.shape[1],
            "spread": [round(x, 4) for x in deltas],
            "bound": [round(x, 4) for x in bounds(attentions[layer], read[layer], model.config)],
        }
        for layer, deltas in zip(found.layers, found.overall("spread").tolist(), strict=True)
    }


@torch.no_grad()
def bounds(attention: Any, length: Tensor, config: Any) -> list[float]:
    """Of every head. `length`: norms of what the projections read, (tokens,)."""
    heads, d, scale = config.num_attention_heads, attention.head_dim, attention.scaling
    if hasattr(attention, "q_norm"):
        gains = [float(norm(torch.ones(d)).abs().max()) for norm in (attention.q_norm, attention.k_norm)]
        return [2 * d * gains[0] * gains[1] * scale] * heads
    q, k = (p.weight.view(-1, d, p.weight.shape[1]) for p in (attention.q_proj, attention.k_proj))
    largest = [torch.linalg.matrix_norm(w, 2) for w in (q, k)]
    keys = largest[1].repeat_interleave(heads // len(k))
    return (2 * largest[0] * keys * length.mean() * length.max() * scale).tolist()


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    """What --text and --code allow. Rows that one reading gives share it."""

    def cell(task: str, measure: Callable[[Any], Row], **key: Any) -> Cell:
        named = dict.fromkeys(COLUMNS) | {"task": task, "model": args.model.name} | key
        return Cell(Setting("unmodified"), named, measure)

    @functools.cache
    def once(measure: Callable[..., Any], *what: Any) -> Any:
        return measure(*what, args)

    full = full_layers(args.model)
    for way in (w for w in WAYS if args.text or w != "sentences"):
        for query in QUERIES:
            yield cell("outputs", lambda _, way=way, query=query: once(outputs, way)[query], way=way, query=query)
    yield cell("entropy", lambda _: once(entropy, full[0]), layer=full[0])
    for layer in full if args.code else ():
        yield cell("spread", lambda _, layer=layer: once(spread)[layer], layer=layer)


# tables ---------------------------------------------------------------------------------------------------------------

#: Of outputs, the lengths of the table and the first of the slope; of entropies, the numbers of elements.
SHOWN, FROM, ELEMENTS = (8, 64, 512, 4096), 64, (2, 8, 32, 128, 512)


def slope(lengths: Sequence[int], deviations: Sequence[float]) -> float:
    """Of the logarithm by the logarithm of the length, by least squares."""
    return statistics.linear_regression([math.log(n) for n in lengths], [math.log(d) for d in deviations]).slope


def contents() -> Contents:
    """What stands below `<!-- dispersion: TASK -->`: the rows of a task as a table."""
    rows = RowFile(RESULTS / "dispersion.json").all

    def of(task: str) -> list[Row]:
        return [row for row in rows if row["task"] == task]

    def outputs_table() -> str:
        body = []
        for row in of("outputs"):
            root_mean_square = [math.sqrt(fmean(x * x for x in by_head)) for by_head in row["deviation"]]
            by_length, first = dict(zip(row["lengths"], root_mean_square, strict=True)), row["lengths"].index(FROM)
            heads = [slope(row["lengths"][first:], head[first:]) for head in zip(*row["deviation"], strict=True)]
            whole = slope(row["lengths"][first:], root_mean_square[first:])
            name = row["way"] + ", the same last token" * (row["query"] == "the same")
            told = [f"{1000 * by_length[n]:.1f}" for n in SHOWN]
            body.append([name, *told, f"{whole:.2f}", f"{min(heads):.2f} to {max(heads):.2f}"])
        head = ["deviation, thousandths, at n =", *(f"{n:,}" for n in SHOWN), f"slope from {FROM}", "of the heads"]
        return markdown(head, body)

    def entropy_table() -> str:
        body = []
        for row in of("entropy"):
            at = [row["sizes"].index(n) for n in ELEMENTS]
            found = [row["entropy"][n] for n in at]
            body.append([f"{row['model']}, layer {row['layer']}: tokens", *(f"{row['lengths'][n]:,}" for n in at)])
            body.append(["mean over heads", *(f"{fmean(x):.2f}" for x in found)])
            body.append(["lowest and highest head", *(f"{min(x):.2f} – {max(x):.2f}" for x in found)])
        return markdown(["entropy (nats) at elements", *map(str, ELEMENTS)], body)

    def spread_table() -> str:
        body = []
        for model in dict.fromkeys(row["model"] for row in of("spread")):
            here = [row for row in of("spread") if row["model"] == model]
            deltas = [x for r in here for x in r["spread"]]
            ratios = [b / x for r in here for b, x in zip(r["bound"], r["spread"], strict=True)]
            told = [f"{x:.2f}" for x in (min(deltas), max(deltas))]
            told += [
                f"{fmean(deltas):.2f} ± {statistics.stdev(deltas):.2f}",
                f"{min(ratios):.1f}",
                f"{statistics.median(ratios):.0f}",
            ]
            body.append([f"{model}, {here[0]['tokens']:,} tokens", f"{len(here)}, {len(deltas)}", *told])
        head = ["", "layers, heads", "least δ", "largest δ", "mean ± deviation", "least bound/δ", "median bound/δ"]
        return markdown(head, body)

    tables = {"outputs": outputs_table, "entropy": entropy_table, "spread": spread_table}
    return {"dispersion": lambda task: tables[task]()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--code", type=Path)
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers in a question")
    parser.add_argument("--code-tokens", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path, default=RESULTS / "dispersion.json")
    args = parser.parse_args(arguments)
    read = [f"--{name} {path.name}" for name in ("model", "text", "code") if (path := getattr(args, name))]
    about = {"command": " ".join(["python lab/pretrained/dispersion.py", *read]), "seed": args.seed, "versions": versions()}
    Experiment(RowFile(args.result), lambda setting: None, COLUMNS, cells(args), about).run(
        lambda row, new: "there" * (not new)
    )


if __name__ == "__main__":
    main()
