"""Adaptive temperature in training, on algorithms written as text: Veličković et al., Section 4.2.

Five tasks after CLRS-Text, made from a seed; ours are final answers without a trace. All texts of a task and a size have the
same length and need no padding. `algorithms` trains a small Llama from scratch on small sizes with Muon, a word or a number a
token. `algorithms-pretrained` adapts SmolLM2-135M by LoRA to three of the tasks. Both take the loss on the answers alone, with
plain attention or under the method.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_longattn
from lab.papers.conversion import Way, adapted
from lab.papers.experiment import Run, Settings, experiment
from lab.papers.loop import fit, small_llama
from lab.scratch.optim import Muon, MuonWithAdam
from recipes.models import DOWNLOADED, SMOLLM2, obtain, random_model


def _numbers(values: list[int]) -> str:
    return " ".join(["[", *(f"{v:02d}" for v in values), "]"])


def minimum(rng: random.Random, size: int) -> tuple[str, str]:
    """Keys -> the smallest."""
    keys = rng.sample(range(100), size)
    return f"minimum key {_numbers(keys)} min", f"{min(keys):02d}"


def insertion_sort(rng: random.Random, size: int) -> tuple[str, str]:
    """Keys -> in order."""
    keys = rng.sample(range(100), size)
    return f"insertion_sort key {_numbers(keys)} pred", _numbers(sorted(keys))


def binary_search(rng: random.Random, size: int) -> tuple[str, str]:
    """Keys in order and a target -> the first key that is not below it."""
    keys = sorted(rng.sample(range(100), size))
    target = rng.randint(0, keys[-1])
    result = next(k for k in keys if k >= target)
    return f"binary_search key {_numbers(keys)} target {target:02d} return", f"{result:02d}"


def bfs(rng: random.Random, size: int) -> tuple[str, str]:
    """Edges of a connected graph and a source -> its nodes in the order of breadth-first search, lower numbers first."""
    order = rng.sample(range(size), size)
    edges = {tuple(sorted((order[i], order[rng.randrange(i)]))) for i in range(1, size)}
    while len(edges) < size + size // 4:
        edges.add(tuple(sorted(rng.sample(range(size), 2))))
    near: dict[int, list[int]] = {node: [] for node in range(size)}
    for a, b in edges:
        near[a].append(b)
        near[b].append(a)
    source = rng.randrange(size)
    reached = [source]
    for node in reached:
        reached += [n for n in sorted(near[node]) if n not in reached]
    shuffled = rng.sample(sorted(edges), len(edges))
    listed = " , ".join(f"{a:02d} {b:02d}" for a, b in shuffled)
    return f"bfs edges [ {listed} ] s {source:02d} order", _numbers(reached)


def task_scheduling(rng: random.Random, size: int) -> tuple[str, str]:
    """Deadlines and weights of unit tasks -> 1 for each that a schedule of the largest weight does in time."""
    deadlines = [rng.randint(1, size) for _ in range(size)]
    weights = rng.sample(range(100), size)
    chosen: list[int] = []
    for task in sorted(range(size), key=lambda t: -weights[t]):
        tried = sorted(deadlines[t] for t in [*chosen, task])
        if all(place < deadline for place, deadline in enumerate(tried)):
            chosen.append(task)
    answer = " ".join("1" if t in chosen else "0" for t in range(size))
    return f"task_scheduling d {_numbers(deadlines)} w {_numbers(weights)} selected", f"[ {answer} ]"


TASKS: dict[str, Callable[[random.Random, int], tuple[str, str]]] = {
    f.__name__: f for f in (minimum, insertion_sort, binary_search, bfs, task_scheduling)
}
_SIGNS = ("[", "]", ",", "0", "1", "end")
_NAMES = (*TASKS, "key", "min", "pred", "target", "return", "edges", "s", "order", "d", "w", "selected")
VOCABULARY = {word: i for i, word in enumerate((*_SIGNS, *_NAMES, *(f"{v:02d}" for v in range(100))))}


#: Prompt and answer -> their token ids, the answer's with an end.
Encode = Callable[[str, str], tuple[list[int], list[int]]]


def words(prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """A word or a number a token."""
    return [VOCABULARY[w] for w in prompt.split()], [VOCABULARY[w] for w in f"{answer} end".split()]


def batch(task: str, size: int, count: int, rng: random.Random, encode: Encode = words) -> tuple[Tensor, int]:
    """Token ids (count, length), and where the answers begin."""
    texts = [encode(*TASKS[task](rng, size)) for _ in range(count)]
    return torch.tensor([prompt + answer for prompt, answer in texts]), len(texts[0][0])


def model_for(variant: str, settings: Settings) -> Any:
    model = small_llama(len(VOCABULARY), settings.layers, settings.width, settings.heads, positions=1024)
    return model if variant == "plain" else hf_longattn.apply(model, variant)


def answered(model: Any, ids: Tensor, first: int) -> Tensor:
    """Logits of the answers' tokens (count, length - first, vocabulary)."""
    return model(input_ids=ids, use_cache=False, logits_to_keep=ids.shape[1] - first + 1).logits[:, :-1]


def answer_loss(model: Any, ids: Tensor, first: int) -> Tensor:
    return nn.functional.cross_entropy(answered(model, ids, first).float().flatten(0, 1), ids[:, first:].flatten())


@torch.no_grad()
def accuracies(
    model: Any, settings: Settings, seed: int, tasks: Iterable[str] = TASKS, encode: Encode = words
) -> dict[str, dict[str, list[float]]]:
    """Of each task, by size: the share of answers that greedy decoding gives exactly, and of tokens given those before."""
    out: dict[str, dict[str, list[float]]] = {}
    for task in tasks:
        out[task] = {"exact": [], "tokens": []}
        for size in settings.sizes:
            rng = random.Random(f"test:{seed}:{task}:{size}")
            ids, first = batch(task, size, settings.samples, rng, encode)
            # true tokens before each one: the first wrong token is the same as in decoding
            right = torch.cat([answered(model, part, first).argmax(-1) == part[:, first:] for part in ids.split(64)])
            out[task]["exact"].append(round(float(right.all(-1).float().mean()), 5))
            out[task]["tokens"].append(round(float(right.float().mean()), 5))
    return out


def run_algorithms(run: Run) -> dict[str, Any]:
    settings = run.settings
    torch.manual_seed(run.seed)
    model, rng = model_for(run.variant, settings), random.Random(f"train:{run.seed}")

    def loss() -> Tensor:
        return answer_loss(model, *batch(rng.choice(list(TASKS)), rng.choice(settings.trained), settings.batch, rng))

    optimizer = MuonWithAdam(model, Muon(matrix_lr=settings.matrix_lr))
    result: dict[str, Any] = {"train_loss": round(fit(model, loss, optimizer, settings.steps, 0.05, run.dtype), 5)}
    result |= {"sizes": list(settings.sizes), "trained": list(settings.trained)}
    result["as trained"] = accuracies(model, settings, run.seed)
    if run.variant == "plain":
        result["adaptive at inference"] = accuracies(hf_longattn.apply(model, "adaptive_temperature"), settings, run.seed)
    return result


def run_pretrained(run: Run) -> dict[str, Any]:
    settings = run.settings
    torch.manual_seed(run.seed)
    source = obtain(SMOLLM2, DOWNLOADED) if settings.pretrained else random_model(run.models)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=run.dtype)

    def encode(prompt: str, answer: str) -> tuple[list[int], list[int]]:
        asked, given = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, f" {answer}"))
        return asked, [*given, tokenizer.eos_token_id]

    result: dict[str, Any] = {"sizes": list(settings.sizes), "trained": list(settings.trained)}
    method, rng = None if run.variant == "plain" else run.variant, random.Random(f"train:{run.seed}")
    model = adapted(hf_longattn.apply(model, method) if method else model, Way(method, lora=settings.rank))

    def loss() -> Tensor:
        drawn = rng.choice(settings.tasks), rng.choice(settings.trained), settings.batch
        return answer_loss(model, *batch(*drawn, rng, encode))

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=settings.rate, weight_decay=0.0)
    result["train_loss"] = round(fit(model, loss, optimizer, settings.steps, 0.05, run.dtype), 5)
    result["as trained"] = accuracies(model, settings, run.seed, settings.tasks, encode)
    if run.variant == "plain":
        hf_longattn.apply(model, "adaptive_temperature")
        result["adaptive at inference"] = accuracies(model, settings, run.seed, settings.tasks, encode)
    return result


VARIANTS = ("plain", "adaptive_temperature")
ALGORITHMS = experiment("algorithms", VARIANTS, run_algorithms)
ALGORITHMS_PRETRAINED = experiment("algorithms-pretrained", VARIANTS, run_pretrained)
