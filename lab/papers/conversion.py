"""Conversions: a RoPE model taken beyond the length it was trained at, untrained and after some continued training.

A byte-level Llama that can copy, trained on windows of 128 bytes. Its text is a mixture in which far context pays: pieces of
novels and random strings, each followed by repetitions of what came shortly before. Every way is measured at 1 to 64 times the
window: the loss on prose, and on passages and random strings that repeat what stood three quarters of the text before.
`windowed`, which is blind for these, keeps its loss on prose at every length.
"""

from __future__ import annotations

import itertools
import random
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen3Config

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.evaluation import token_losses
from hf_longattn.evaluation.checkpoints import edit_rope
from hf_longattn.evaluation.settings import Setting
from hf_longattn.training.data import skipped
from hf_longattn.training.recipe import Skip
from lab.papers.experiment import Run, Settings, experiment, require
from lab.papers.loop import fit
from lab.scratch.optim import Muon, MuonWithAdam

LETTERS = string.ascii_letters + string.digits
#: Bytes of a repeated passage, and its first ones, which do not count: a model must notice the repetition.
PASSAGE, NOTICED = 32, 8
BASE, QK = "base", "qk+"
#: What is measured: loss on prose, on repeated passages of it, on repeated random strings.
TASKS = ("prose", "passages", "strings")


@dataclass(frozen=True)
class Way(Setting):
    """A setting, and how a model is trained under it.

    Args:
        calibrated: scale-invariant attention is calibrated first.
        skip: positions skip in training (PoSE).
        strength: the method's strength rises from 0 to 1 over the first half of the steps.
        lora: the rank of an adapter on q, k, v and o that is trained in place of all weights; 0 for none.
        distilled: half of the loss is the divergence from the unmodified base, which reads the same bytes at plain positions.
        rate: in place of the settings' learning rate.
        qk_norm: on a base that normalises queries and keys (Qwen3 in place of Llama).
    """

    name: str = field(default="", kw_only=True)
    calibrated: bool = False
    skip: bool = False
    strength: bool = False
    lora: int = 0
    distilled: bool = False
    rate: float | None = None
    qk_norm: bool = False

    @property
    def base(self) -> str:
        return QK + BASE if self.qk_norm else BASE


_LISTED: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_GROUPS = ("untrained", "trained", "otherwise", "swept")
UNTRAINED, TRAINED, OTHERWISE, SWEPT = ({n: Way.entry("", way) for n, way in _LISTED[group].items()} for group in _GROUPS)
QK_NORMED = {QK + name: replace(TRAINED[name], qk_norm=True) for name in _LISTED["on_qk"]}
UNTRAINED_QK = {QK + n: replace(way, qk_norm=True) for n, way in UNTRAINED.items() if n not in ("control", "rerope+weak_map")}
UNTRAINED_QK[f"{QK}yarn16+logn"] = replace(Way.parse("logn:stack=true@yarn:16"), qk_norm=True)  # beside YaRN's temperature
SCRATCH = {n: TRAINED[n] for n in _LISTED["scratch"]}
SCRATCH |= {QK + n: replace(TRAINED[n], qk_norm=True) for n in _LISTED["scratch_qk"]}
SHARES = (15, 5, 50)
#: What is made of a way, by variant: (way, per cent of the base's steps, whether from scratch).
VARIANTS: dict[str, tuple[Way, int, bool]] = {BASE: (Way(), 100, True), QK + BASE: (Way(qk_norm=True), 100, True)}
VARIANTS |= {f"{name}-untrained": (way, 0, False) for name, way in (UNTRAINED | UNTRAINED_QK).items() if name != "control"}
for share in SHARES:
    VARIANTS |= {f"{name}-{share}%": (way, share, False) for name, way in (TRAINED | OTHERWISE).items()}
VARIANTS |= {f"{name}-{SHARES[0]}%": (way, SHARES[0], False) for name, way in (SWEPT | QK_NORMED).items()}
VARIANTS |= {f"{name}-scratch": (way, 100, True) for name, way in SCRATCH.items()}


def run_conversion(run: Run) -> dict[str, Any]:
    settings = run.settings
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
        model = adapted(model, way) if way.lora else model
        optimizer = torch.optim.AdamW(model.parameters(), way.rate or settings.learning_rate, weight_decay=0.0)
    if steps:
        skip = random.Random(run.seed) if way.skip else None
        teacher = model_of(run, Way(qk_norm=way.qk_norm), False, data) if way.distilled else None
        done = itertools.count()

        def step() -> Tensor:
            if way.strength:
                hf_longattn.update(model, strength=min(next(done) / (steps / 2), 1.0))
            return loss(model, next(data), skip, teacher)

        out["train_loss"] = round(fit(model, step, optimizer, steps, 0.05, run.dtype), 5)
    if way.lora:
        model = model.merge_and_unload()
    if scratch:
        model.save_pretrained(run.folder)
    return out | {"lengths": list(settings.lengths)} | measured(model, heldout, settings)


def model_of(run: Run, way: Way, scratch: bool, data: Iterator[Tensor]) -> Any:
    """The model to train or measure, in float32, under the way."""
    settings = run.settings
    base = run.models / "conversion" / f"{way.base}-seed{run.seed}"
    if not scratch:
        require(base, f"conversion --only '^{re.escape(way.base)}$' --seeds {run.seed}")
    config = small(settings, way.qk_norm) if scratch else AutoConfig.from_pretrained(base)
    if way.rope:
        edit_rope(config, way.rope)
    model = AutoModelForCausalLM.from_config(config) if scratch else AutoModelForCausalLM.from_pretrained(base, config=config)
    model.eval()
    if (method := way.config) is None:
        return model
    if way.calibrated:
        windows = [x for _ in range(settings.calibration_windows // settings.batch) for x in next(data).split(1)]
        measurable = {slot: getattr(method, slot) for slot in ("logit_map", "output_norm")}
        found = hf_longattn.calibrate(model, windows, LongAttnConfig(**measurable))
        method = replace(method, **{slot: getattr(found, slot) for slot in measurable})
    return hf_longattn.apply(model, method)


def small(settings: Settings, qk_norm: bool) -> LlamaConfig | Qwen3Config:
    kind = Qwen3Config if qk_norm else LlamaConfig
    return kind(
        vocab_size=256,
        hidden_size=settings.width,
        intermediate_size=settings.width * 8 // 3,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        head_dim=settings.width // settings.heads,
        max_position_embeddings=settings.length,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def adapted(model: Any, way: Way) -> Any:
    """The model under a LoRA adapter on q, k, v and o, with what a method learns."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return get_peft_model(model, LoraConfig(r=way.lora, lora_alpha=2 * way.lora, target_modules=targets))


def loss(model: Any, ids: Tensor, skip: random.Random | None = None, teacher: Any = None) -> Tensor:
    """Mean loss of (batch, length) bytes; with `skip` at positions that jump (PoSE), to the greatest length measured.

    With a teacher half of it is the divergence from what that says to the same bytes at plain positions.
    """
    places: dict[str, Tensor] = {}
    if skip is not None:
        jumps = Skip(target_length=64 * ids.shape[1], repeat=0.5)
        pairs = [skipped(row, jumps, skip) for row in ids]
        ids = torch.stack([row for row, _ in pairs])
        places = {"position_ids": torch.stack([p for _, p in pairs]), "attention_mask": torch.ones_like(ids)}
    logits = model(ids, use_cache=False, **places).logits[:, :-1].float()
    found = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    if teacher is None:
        return found
    with torch.no_grad():
        wanted = teacher(ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    divergence = torch.nn.functional.kl_div(logits.log_softmax(-1), wanted, reduction="none", log_target=True).sum(-1)
    return (found + divergence.mean()) / 2


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


CONVERSION = experiment("conversion", VARIANTS, run_conversion)
