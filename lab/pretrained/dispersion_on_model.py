"""Dispersion in pretrained models, as two papers show it, through hf_longattn.capture.

outputs: Li et al. (vanishing variance), Fig. 1 and Proposition 1: how far outputs of the first layer's attention deviate over
--texts texts of n tokens, at the last token. Random tokens without and with positions, and sentences of --text.
entropy: Veličković et al. (softmax is not enough), Fig. 3: entropy of the heads of the first layer without a window, at the
last token of a question about the largest of n numbers, over --questions questions.
spread: the same paper's δ of a row's logits over --code, and Proposition 3.1's bound on it.

    python lab/pretrained/dispersion_on_model.py outputs entropy spread --model MODEL --text BOOK --code FILE

Rows go to results/dispersion.json; those that are there are replaced.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, DynamicCache

import hf_longattn
from hf_longattn.evaluation.report.figures import COLOURS, MARKERS, png, pyplot
from hf_longattn.evaluation.rows import Row, RowFile, versions
from hf_longattn.evaluation.statistics import mean_interval
from lab.markdown import Contents, table
from lab.pretrained.runner import RESULTS

RESULT = RESULTS / "dispersion.json"
PROMPT = "What is the maximum in the following sequence: {seq}? The maximum is:"
#: The paper's three ways of drawing texts, and whether positions are encoded.
WAYS = {
    "random tokens, no positions": False,
    "random tokens": True,
    "sentences": True,
}
#: Slopes are fitted from this length on; texts a batch.
FROM, BATCH = 64, 10
SIZES = tuple(2**k for k in range(1, 10))
#: Query rows of the code that are read, spread over it.
SPREAD_ROWS = 512
#: The group of `capture` that a quantity comes with.
GROUP = {"output_deviation": "outputs", "entropy": "entropy"}


class Nothing(nn.Module):
    """In place of an MLP behind which nothing is read."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def first_layer(path: Path, positions: bool) -> Any:
    """The model's embedding and first attention."""
    config = AutoConfig.from_pretrained(path, num_hidden_layers=1)
    if not positions:
        config = hf_longattn.rope.nope(config)
    model = AutoModel.from_pretrained(path, config=config, dtype=torch.float32).eval()
    model.layers[0].mlp = Nothing()
    return model


@torch.no_grad()
def at_the_last(model: Any, layer: int, what: str, texts: Sequence[Tensor], caches: Sequence[Any]) -> Tensor:
    """A quantity of `layer` over the last tokens alone of all texts (each (batch, 1)), whose other tokens are in the caches,
    which have it too afterwards. By head.
    """
    with hf_longattn.capture(model, layers=[layer], what=GROUP[what]) as seen:
        for ids, cache in zip(texts, caches, strict=True):
            model(ids, past_key_values=cache)
    found = seen.result()[what][0]  # all rows have one length, so that one group has any
    return found[:, ~found.isnan().any(0)][:, 0]


@torch.no_grad()
def outputs(args: argparse.Namespace) -> Iterator[Row]:
    """Deviation over texts at every power of two up to --longest: of the token that comes there, and of one same query."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    lengths = [2**k for k in range(3, int(math.log2(args.longest)) + 1)]
    for way, positions in WAYS.items():
        ids = sentences(tokenizer, args) if way == "sentences" else random_tokens(tokenizer, args)
        same = random_tokens(tokenizer, args)[0, 0]
        model = first_layer(args.model, positions)
        parts = ids.split(BATCH)
        caches = [DynamicCache(config=model.config) for _ in parts]
        deviation: dict[str, list[list[float]]] = {"its own": [], "the same": []}
        done = 0
        for n in lengths:
            for part, cache in zip(parts, caches, strict=True):
                model(part[:, done : n - 1], past_key_values=cache)
            done = n - 1
            for name, queries in (
                ("its own", [p[:, n - 1 : n] for p in parts]),
                ("the same", [same.expand(len(p), 1) for p in parts]),
            ):
                by_head = at_the_last(model, 0, "output_deviation", queries, caches)
                for cache in caches:
                    cache.crop(-1)
                deviation[name].append([round(float(x), 6) for x in by_head])
        for name, by_head in deviation.items():
            yield {"what": "outputs", "way": way, "query": name, "lengths": lengths, "deviation": by_head}


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
def entropy(args: argparse.Namespace) -> Iterator[Row]:
    """Entropy at the last token of the paper's question by the number of elements, of every head of one layer."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    layer = first_full_layer(args.model)
    config = AutoConfig.from_pretrained(args.model)
    config.num_hidden_layers = layer + 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: layer + 1]
    model = AutoModel.from_pretrained(args.model, config=config, dtype=torch.float32).eval()
    drawn, by_size, tokens = random.Random(args.seed), [], []
    for size in args.sizes:
        texts, caches = [], []
        for _ in range(args.questions):
            question = PROMPT.format(seq=", ".join(str(drawn.randrange(1000)) for _ in range(size)))
            ids = tokenizer(question, return_tensors="pt")["input_ids"]
            caches.append(DynamicCache(config=model.config))
            model(ids[:, :-1], past_key_values=caches[-1])
            texts.append(ids[:, -1:])
            tokens += [ids.shape[1]]
        each = [at_the_last(model, layer, "entropy", [t], [c]) for t, c in zip(texts, caches, strict=True)]
        by_size.append([round(float(x), 4) for x in torch.stack(each).mean(0)])
    lengths = [round(sum(part) / len(part)) for part in zip(*[iter(tokens)] * args.questions, strict=True)]
    yield {"what": "entropy", "layer": layer, "sizes": list(args.sizes), "lengths": lengths, "entropy": by_size}


def first_full_layer(path: Path) -> int:
    kinds = getattr(AutoConfig.from_pretrained(path), "layer_types", None) or ["full_attention"]
    return kinds.index("full_attention")


@torch.no_grad()
def spread(args: argparse.Namespace) -> Iterator[Row]:
    """δ of every head, a mean over rows, and the bound 2 σ(Q) σ(K) mean |y| max |x| scale of the same rows.

    x and y are what the projections of keys and queries read. A model that normalises queries and keys by head bounds them
    by their gains instead, whatever Q and K are: 2 d max |g_q| max |g_k| scale.
    """
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = tokenizer(args.code.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"][:, : args.code_tokens]
    model = AutoModel.from_pretrained(args.model, dtype=torch.float32).eval()
    inputs: dict[int, Tensor] = {}
    attentions = {layer.self_attn.layer_idx: layer.self_attn for layer in model.layers}
    hooks = [
        a.q_proj.register_forward_pre_hook(lambda m, x, i=i: inputs.__setitem__(i, x[0][0].norm(dim=-1)))
        for i, a in attentions.items()
    ]
    try:
        with hf_longattn.capture(model, what="logits", rows=SPREAD_ROWS) as seen:
            model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    found = seen.result()
    for layer, deltas in zip(found.layers, found.overall("spread").tolist(), strict=True):
        yield {"what": "spread", "layer": layer, "tokens": ids.shape[1]} | {
            "spread": [round(x, 4) for x in deltas],
            "bound": [round(x, 4) for x in bounds(attentions[layer], inputs[layer], model.config)],
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


# tables ---------------------------------------------------------------------------------------------------------------


def rows_of(what: str) -> list[Row]:
    return [row for row in RowFile(RESULT) if row["what"] == what]


def slope(lengths: Sequence[int], values: Sequence[float]) -> float:
    """Of ln value against ln n, from `FROM` on."""
    x, y = (torch.tensor([math.log(v) for n, v in zip(lengths, part, strict=True) if n >= FROM]) for part in (lengths, values))
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def over_heads(row: Row) -> list[float]:
    """Root mean square over heads, by length."""
    return [math.sqrt(sum(x * x for x in by_head) / len(by_head)) for by_head in row["deviation"]]


def label(row: Row) -> str:
    return row["way"] if row["query"] == "its own" else f"{row['way']}, the same last token"


def outputs_table(_: str) -> str:
    body = []
    for row in rows_of("outputs"):
        found = over_heads(row)
        by_head = [slope(row["lengths"], column) for column in zip(*row["deviation"], strict=True)]
        cells = [f"{1000 * v:.1f}" for v in found]
        body.append([label(row), *cells, f"{slope(row['lengths'], found):.2f}", f"{min(by_head):.2f} to {max(by_head):.2f}"])
    return table(
        ["deviation, thousandths", *(f"n = {n:,}" for n in row["lengths"]), f"slope from {FROM}", "of the heads"], body
    )


def entropy_table(_: str) -> str:
    body = []
    for row in rows_of("entropy"):
        means = [mean_interval(column)[0] for column in row["entropy"]]
        body.append([f"{row['model']}, layer {row['layer']}: tokens", *(f"{n:,}" for n in row["lengths"])])
        body.append(["mean over heads", *(f"{m:.2f}" for m in means)])
        body.append(["lowest and highest head", *(f"{min(c):.2f} – {max(c):.2f}" for c in row["entropy"])])
    return table(["entropy (nats) at elements", *map(str, row["sizes"])], body)


def spread_table(_: str) -> str:
    body = []
    for model in dict.fromkeys(row["model"] for row in rows_of("spread")):
        rows = [row for row in rows_of("spread") if row["model"] == model]
        deltas = torch.tensor([x for row in rows for x in row["spread"]])
        ratio = torch.tensor([b / x for row in rows for x, b in zip(row["spread"], row["bound"], strict=True)])
        cells = [
            f"{len(rows)}, {len(deltas)}",
            f"{deltas.min():.2f}",
            f"{deltas.max():.2f}",
            f"{deltas.mean():.2f} ± {deltas.std():.2f}",
        ]
        body.append([f"{model}, {rows[0]['tokens']:,} tokens", *cells, f"{ratio.min():.1f}", f"{ratio.median():.0f}"])
    head = ["", "layers, heads", "least δ", "largest δ", "mean ± deviation", "least bound/δ", "median bound/δ"]
    return table(head, body)


def contents() -> Contents:
    """What stands below `<!-- dispersion outputs: WHAT -->` and its like."""
    return {"dispersion outputs": outputs_table, "dispersion entropy": entropy_table, "dispersion spread": spread_table}


def pictures() -> dict[str, bytes]:
    questions = rows_of("entropy")
    figure, panels = pyplot().subplots(1, 1 + len(questions), figsize=(5 * (1 + len(questions)), 4.2), layout="constrained")
    for i, row in enumerate(rows_of("outputs")):
        style = {"color": COLOURS[i // 2], "marker": MARKERS[i // 2], "linestyle": "-" if row["query"] == "its own" else "--"}
        panels[0].plot(row["lengths"], over_heads(row), label=label(row), markersize=4, **style)
    panels[0].set(xlabel="tokens", ylabel="standard deviation of outputs", xscale="log", yscale="log", title="First layer")
    panels[0].legend(fontsize=7)
    for axes, row in zip(panels[1:], questions, strict=True):
        for by_head in zip(*row["entropy"], strict=True):
            axes.plot(row["sizes"], by_head, color=COLOURS[1], linewidth=1)
        axes.plot(row["sizes"], [sum(c) / len(c) for c in row["entropy"]], color=COLOURS[0], marker=MARKERS[0], label="mean")
        axes.plot(
            row["sizes"], [math.log(n) for n in row["lengths"]], color="#666666", linestyle=":", label="ln of all tokens"
        )
        axes.set(xlabel="elements", ylabel="entropy (nats)", xscale="log", title=f"{row['model']}, layer {row['layer']}")
        axes.legend(fontsize=7)
    for axes in panels:
        axes.grid(alpha=0.3)
    return {"lab/dispersion.png": png(figure)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="WHAT", help=", ".join(MEASURES))
    parser.add_argument("--model", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--code", type=Path)
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers in a question")
    parser.add_argument("--code-tokens", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args(arguments)
    if unknown := [w for w in args.what if w not in MEASURES]:
        parser.error(f"cannot measure {unknown[0]!r}; choose from {', '.join(MEASURES)}")
    needed = {"model": args.what, "text": "outputs" in args.what, "code": "spread" in args.what}
    if missing := [name for name, needs in needed.items() if needs and getattr(args, name) is None]:
        parser.error(f"{' '.join(args.what)} needs --{missing[0]}")
    rows = RowFile(args.out)
    for what in args.what:
        started = time.process_time()
        found = list(MEASURES[what](args))
        read = args.text if what == "outputs" else args.code if what == "spread" else None
        words = ["python lab/pretrained/dispersion_on_model.py", what, f"--model {args.model.name}"]
        words += [f"--{'text' if what == 'outputs' else 'code'} {read.name}"] if read else []
        told = {"model": args.model.name, "command": " ".join(words), "seed": args.seed, "versions": versions()}
        told |= {"cpu_seconds": round(time.process_time() - started, 1)}
        rows.put(*({**row, **told} for row in found), instead_of={"what": what, "model": args.model.name})
        print(f"{what} of {args.model.name}: {told['cpu_seconds'] / 60:.1f} CPU minutes", flush=True)


MEASURES = {"outputs": outputs, "entropy": entropy, "spread": spread}

if __name__ == "__main__":
    main()
