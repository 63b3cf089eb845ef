"""Conversions: a RoPE model taken beyond the length it was trained at, untrained and after some continued training.

A byte-level Llama that can copy, trained on windows of 128 bytes. Its text is a mixture in which far context pays: pieces of
novels and random strings, each followed by repetitions of what came shortly before. Every way is measured at 1 to 64 times the
window: the loss on prose, and on passages and random strings that repeat what stood three quarters of the text before.
`windowed`, which is blind for these, keeps its loss on prose at every length.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from experiment import Experiment, Run
from loop import fit
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_longattn
from hf_longattn import LongAttnConfig, rope
from hf_longattn.measuring.evaluation import token_losses
from hf_longattn.training.optim import MuonWithAdam
from hf_longattn.training.recipe import Muon, Skip
from hf_longattn.training.skip import skipped

LETTERS = string.ascii_letters + string.digits
#: Bytes of a repeated passage, and its first ones, which do not count: a model must notice the repetition.
PASSAGE, NOTICED = 32, 8
BASE = "base"
#: What is measured: loss on prose, on repeated passages of it, on repeated random strings.
TASKS = ("prose", "passages", "strings")


@dataclass(frozen=True)
class Settings:
    layers: int = 3
    width: int = 128
    heads: int = 2
    length: int = 128
    rope_theta: float = 312.5
    batch: int = 8
    first_steps: int = 400  # on short windows of repeated random strings, from which a model learns to copy
    steps: int = 1000
    matrix_lr: float = 0.02
    learning_rate: float = 1e-3  # of a conversion, AdamW
    calibration_windows: int = 8
    lengths: tuple[int, ...] = (128, 512, 2048, 8192)
    windows: tuple[int, ...] = (64, 16, 8, 2)


QUICK = Settings(1, 16, 1, batch=2, first_steps=3, steps=20, calibration_windows=2, lengths=(128, 512), windows=(4, 2))


@dataclass(frozen=True)
class Way:
    """A method by name with its parameters, a position encoding of `hf_longattn.rope` and its arguments, and whether
    scale-invariant attention is calibrated first and positions skip in training."""

    method: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    rope: tuple[Any, ...] = ()
    calibrated: bool = False
    skip: bool = False


WINDOW, STRETCH = 64, 128  # of the remaps: at this stretch distances of 64 times the length stay below the length
REMAPS: dict[str, dict[str, Any]] = {
    "rerope": {"window": WINDOW},
    "leaky_rerope": {"window": WINDOW, "stretch": STRETCH},
    "self_extend": {"window": WINDOW, "group": STRETCH},
    "dual_chunk": {},
}
MAP = {"sink_tokens": 1}
LEARNED = {"learned": True, "clamp": False}  # LogN as published
UNTRAINED: dict[str, Way] = {"control": Way()}
UNTRAINED |= {"windowed": Way("windowed", {"window": 128}), "streaming": Way("streaming", {"window": 124, "sinks": 4})}
UNTRAINED |= {f"yarn{factor}": Way(rope=("yarn", factor)) for factor in (16, 64)}
UNTRAINED |= {"infoscale": Way("infoscale"), "logn": Way("logn"), "map": Way("scale_invariant", MAP, calibrated=True)}
for name, given in REMAPS.items():
    UNTRAINED[name] = Way(name, given)
    UNTRAINED |= {f"{name}+{t}": Way(f"{name}+{t}", given) for t in ("infoscale", "logn")}
    UNTRAINED[f"{name}+map"] = Way(f"{name}+scale_invariant", given | MAP | {"offset": WINDOW}, calibrated=True)

TRAINED: dict[str, Way] = {
    "control": Way(),
    "yarn16": UNTRAINED["yarn16"],
    "rerope": UNTRAINED["rerope"],
    "rerope+logn": Way("rerope+logn", {"window": WINDOW} | LEARNED),
    "rerope+infoscale": UNTRAINED["rerope+infoscale"],
    "rerope+map": UNTRAINED["rerope+map"],
    "pose+rerope": Way("rerope", {"window": WINDOW}, skip=True),
    "pose+rerope+logn": Way("rerope+logn", {"window": WINDOW}, skip=True),
}
for encoding, arguments in {"prope": ("prope", 0.5), "nope": ("nope",)}.items():
    TRAINED[encoding] = Way(rope=arguments)
    TRAINED[f"{encoding}+logn"] = Way("logn", LEARNED, arguments)
    TRAINED[f"{encoding}+infoscale"] = Way("infoscale", rope=arguments)
    TRAINED[f"{encoding}+scale_invariant"] = Way("scale_invariant", rope=arguments)
    TRAINED[f"{encoding}+map"] = Way("scale_invariant", MAP, arguments, calibrated=True)
TRAINED["alibi"] = Way("alibi", rope=("nope",))
TRAINED["alibi+logn"] = Way("alibi+logn", LEARNED, ("nope",))
TRAINED["alibi+infoscale"] = Way("alibi+infoscale", rope=("nope",))
#: From scratch, with as many steps as the base.
SCRATCH: dict[str, Way] = {"prope+scale_invariant": TRAINED["prope+scale_invariant"], "rerope+logn": TRAINED["rerope+logn"]}
SCRATCH |= {"alibi": TRAINED["alibi"]}
SHARES = (15, 5, 50)
#: What is made of a way, by variant: (way, per cent of the base's steps, whether from scratch).
VARIANTS: dict[str, tuple[Way, int, bool]] = {BASE: (Way(), 100, True)}
VARIANTS |= {f"{name}-untrained": (way, 0, False) for name, way in UNTRAINED.items() if name != "control"}
for share in SHARES:
    VARIANTS |= {f"{name}-{share}%": (way, share, False) for name, way in TRAINED.items()}
VARIANTS |= {f"{name}-scratch": (way, 100, True) for name, way in SCRATCH.items()}


def measure(run: Run) -> dict[str, Any]:
    settings: Settings = run.settings
    way, share, scratch = VARIANTS[run.variant]
    train, heldout = "\n".join(read(p) for p in run.texts.train), read(run.texts.heldout)
    steps = settings.steps * share // 100
    data = mixture(train, settings, run.seed + 1000 * (not scratch))  # a conversion reads what the base has not
    torch.manual_seed(run.seed)
    model = model_of(run, way, scratch, data)
    out: dict[str, Any] = {}
    if scratch:
        optimizer: Any = MuonWithAdam(model, Muon(matrix_lr=settings.matrix_lr))
        first = repeated_letters(settings, run.seed)
        fit(model, lambda: loss(model, next(first)), optimizer, settings.first_steps, 0.05, run.dtype)
        optimizer = MuonWithAdam(model, Muon(matrix_lr=settings.matrix_lr))
    else:
        optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate, weight_decay=0.0)
    if steps:
        skip = random.Random(run.seed) if way.skip else None
        out["train_loss"] = round(fit(model, lambda: loss(model, next(data), skip), optimizer, steps, 0.05, run.dtype), 5)
    if scratch:
        model.save_pretrained(run.folder)
    return out | {"lengths": list(settings.lengths)} | measured(model, heldout, settings)


def model_of(run: Run, way: Way, scratch: bool, data: Iterator[Tensor]) -> Any:
    """The model to train or measure, in float32, under the way."""
    settings: Settings = run.settings
    base = run.models / "conversion" / f"{BASE}-seed{run.seed}"
    if not scratch and not (base / "config.json").is_file():
        raise ValueError(
            f"{base} holds no model to start from; make it with: conversion --only '^{BASE}$' --seeds {run.seed} "
            "(and --again, if its row is there and the model is not)"
        )
    config = llama(settings) if scratch else AutoConfig.from_pretrained(base)
    if way.rope:
        getattr(rope, way.rope[0])(config, *way.rope[1:])
    model = LlamaForCausalLM(config) if scratch else AutoModelForCausalLM.from_pretrained(base, config=config)
    model.eval()
    if way.method is None:
        return model
    method = LongAttnConfig.preset(way.method, **way.parameters)
    if way.calibrated:
        windows = [x for _ in range(settings.calibration_windows // settings.batch) for x in next(data).split(1)]
        found = hf_longattn.calibrate(model, windows, LongAttnConfig(logit_map=method.logit_map))
        method = replace(method, logit_map=found.logit_map)
    return hf_longattn.apply(model, method)


def llama(settings: Settings) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256,
        hidden_size=settings.width,
        intermediate_size=settings.width * 8 // 3,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        max_position_embeddings=settings.length,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def loss(model: Any, ids: Tensor, skip: random.Random | None = None) -> Tensor:
    """Mean loss of (batch, length) bytes; with `skip` at positions that jump (PoSE), to the greatest length measured."""
    places: dict[str, Tensor] = {}
    if skip is not None:
        jumps = Skip(target_length=64 * ids.shape[1], repeat=0.5)
        pairs = [skipped(row, jumps, skip) for row in ids]
        ids = torch.stack([row for row, _ in pairs])
        places = {"position_ids": torch.stack([p for _, p in pairs]), "attention_mask": torch.ones_like(ids)}
    logits = model(ids, use_cache=False, **places).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


# text -----------------------------------------------------------------------------------------------------------------


def read(path: Any) -> str:
    return path.read_text(encoding="utf-8").encode("ascii", "ignore").decode()


def encode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text, "ascii"), dtype=torch.uint8).long()


def letters(rng: random.Random, count: int) -> str:
    return "".join(rng.choices(LETTERS, k=count))


def repeated_letters(settings: Settings, seed: int) -> Iterator[Tensor]:
    """Twice as many windows of half the length, (2 batch, length / 2): a random string over and over, noise between.

    On these a model learns to copy within minutes; on text alone these models do not.
    """
    rng, length = random.Random(f"letters {seed}"), settings.length // 2
    while True:
        rows = []
        for _ in range(2 * settings.batch):
            piece, row = letters(rng, rng.randint(4, length // 3)), ""
            while len(row) < length:
                row += piece + letters(rng, rng.randint(0, 8))
            rows.append(encode(row[:length]))
        yield torch.stack(rows)


def mixture(text: str, settings: Settings, seed: int) -> Iterator[Tensor]:
    """Batches (batch, length) of pieces of text and random strings, and repetitions of pieces from within the length."""
    rng = random.Random(f"mixture {seed}")
    size, at, out = settings.batch * settings.length, rng.randrange(len(text)), ""
    pieces: list[tuple[int, str]] = []
    done = 0

    def put(piece: str) -> None:
        nonlocal out
        pieces.append((done + len(out), piece))
        out += piece

    while True:
        while len(out) < size:
            piece = text[at : at + rng.randint(settings.length // 5, settings.length // 2)]
            at = (at + len(piece)) % len(text)
            put(piece)
            if rng.random() < 0.5:
                put(letters(rng, rng.randint(settings.length // 16, settings.length // 4)))
            for _ in range(2):
                pieces = [p for p in pieces if p[0] >= done + len(out) - settings.length * 3 // 4]
                put(rng.choice(pieces)[1])
        yield encode(out[:size]).view(settings.batch, settings.length)
        done, out = done + size, out[size:]


# measuring ------------------------------------------------------------------------------------------------------------


def measured(model: Any, heldout: str, settings: Settings) -> dict[str, list[float]]:
    """Mean loss in nats a byte by length: on prose, on repeated passages and on repeated random strings."""
    out: dict[str, list[float]] = {task: [] for task in TASKS}
    for length, count in zip(settings.lengths, settings.windows, strict=True):
        sums = {name: [0.0, 0] for name in out}
        for first in range(0, count, batch := max(2048 // length, 1)):
            rows = [window(heldout, length, i, count) for i in range(first, min(first + batch, count))]
            losses = token_losses(model, torch.stack([ids for ids, _ in rows]))
            kinds = torch.stack([kind for _, kind in rows])
            for number, name in enumerate(out):
                found = losses[(kinds == number) & ~losses.isnan()]
                sums[name] = [sums[name][0] + float(found.double().sum()), sums[name][1] + len(found)]
        for name, (total, bytes_) in sums.items():
            out[name].append(round(total / bytes_, 5))
    return out


def window(heldout: str, length: int, number: int, count: int) -> tuple[Tensor, Tensor]:
    """One of `count` windows of held-out text, its last quarter repeating parts of the first, passages and strings in turn.

    Returns:
        bytes and what each counts as, both (length,): 0 prose, 1 repeated passage, 2 repeated string, -1 nothing.
    """
    rng = random.Random(f"window {length} {number}")
    start = number * ((len(heldout) - length) // count)
    ids, kind = encode(heldout[start : start + length]), torch.zeros(length, dtype=torch.long)
    copies = min(max(length // (4 * PASSAGE), 1), 16)
    step = length // 4 // copies
    size = min(PASSAGE, step)
    for i in range(copies):
        source, target = i * step, length * 3 // 4 + i * step
        if (i + number) % 2:
            ids[source : source + size] = encode(letters(rng, size))
            kind[source : source + size] = -1
        ids[target : target + size] = ids[source : source + size]
        kind[target : target + NOTICED] = -1
        kind[target + NOTICED : target + size] = 1 + (i + number) % 2
    return ids, kind


CONVERSION = Experiment(
    name="conversion",
    about="a RoPE model trained at 128 taken to 64 times that, untrained and by continued training, by every method",
    variants=tuple(VARIANTS),
    seeds=(1, 2, 3),
    minutes=0.5,
    settings=Settings(),
    quick=QUICK,
    measure=measure,
    text=True,
    dtype="bfloat16",
)
