"""Keys and values in a text of words: whether what a method promises beyond its training length is there (Anson et al.,
Table 2, at the size of a minute). docs/lab/keys.md is the protocol, and has what came of it.

`keys` trains from scratch, every weight, at 64 words. `keys-converted` puts a method into bases of `keys` that were trained
without any, and trains LoRA by the recipe `method_lora`; `null` is the control, in which nothing else differs. The same
questions are asked of every model, and each answer is kept, so that differences are paired.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

import hf_longattn
from hf_longattn.evaluation.calibrate import measure
from hf_longattn.evaluation.checkpoints import edit_rope
from hf_longattn.evaluation.settings import Setting
from hf_longattn.evaluation.tasks.sample import IGNORE
from hf_longattn.integration.rope import theta_of
from hf_longattn.training import load_recipe, prepare
from hf_longattn.training import run as train
from lab.papers.experiment import Run, Settings, experiment, require
from lab.papers.length import training
from lab.papers.loop import fit
from lab.scratch.optim import Muon, MuonWithAdam
from lab.scratch.train import POSITIONS

#: In front of the questions.
ASK = "?"
#: What a text is made of; keys and values are no filler, so that a question has one answer.
WORDS = {"filler": 64, "key": 32, "value": 32}
#: The seed of the texts that all models are asked about.
ASKED = 1_000_000

_NAMES = ("rope", "prope", "logn_prope", "alibi", "scale_invariant_prope", "scale_invariant_rope")
_PROPE = POSITIONS["prope"]
#: A setting by variant. Models have QK-norm; of those that say "unweighted-" it has no weights, as in the paper's model, and
#: those that say "plain-" have none.
SCRATCH: dict[str, str] = {name: POSITIONS[name] for name in _NAMES}
SCRATCH |= {
    f"{method}_prope": method + _PROPE
    for method in ("infoscale:clamp=false", "adaptive_temperature", "output_layer_norm", "output_standardise")
}
SCRATCH |= {f"plain-{name}": SCRATCH[name] for name in ("rope", "prope", "logn_prope", "scale_invariant_prope")}
SCRATCH |= {f"unweighted-{name}": SCRATCH[name] for name in ("prope", "logn_prope", "scale_invariant_prope")}
BASES = ("prope", "rope", "plain-prope", "plain-rope")

#: Overrides of `method_lora` by variant: each method of its header, two of them also as the paper has them, and the control.
METHODS: dict[str, dict[str, Any]] = {
    "null": {"method": "null"},
    "infoscale": {"method": "infoscale:clamp=false"},
    "logn": {"method": "logn:learned=true:clamp=false"},
    "adaptive_temperature": {"method": "adaptive_temperature"},
    "scale_invariant": {"method": "scale_invariant"},
    "scale_invariant-calibrated": {"method": "scale_invariant", "calibrate": 2048, "strength.share": 0.5},
    "output_layer_norm": {"method": "output_layer_norm"},
}
CONVERTED = {f"{base}:{name}": (base, METHODS[name]) for base in BASES for name in METHODS}


# texts ----------------------------------------------------------------------------------------------------------------


@cache
def vocabulary() -> dict[str, int]:
    """Ids of all words."""
    words = [ASK, *(f"{kind}{i}" for kind, count in WORDS.items() for i in range(count))]
    return {word: i for i, word in enumerate(words)}


@dataclass(frozen=True)
class Text:
    """A text with its questions, as words; `answers` are the places of the values in it, one range a question."""

    words: list[str]
    answers: list[range]

    @property
    def ids(self) -> Tensor:
        return torch.tensor([vocabulary()[word] for word in self.words])

    @property
    def labels(self) -> Tensor:
        """The ids where an answer stands, IGNORE elsewhere."""
        asked = torch.zeros(len(self.words), dtype=torch.bool)
        for answer in self.answers:
            asked[list(answer)] = True
        return self.ids.masked_fill(~asked, IGNORE)


def text(length: int, settings: Settings, rng: random.Random) -> Text:
    """Words at random, `needles` pairs of key and value at uniformly random places, and a question for each at the end."""
    size, count = settings.words, settings.needles
    keys = _distinct("key", size, count, rng)
    pairs = [(key, tuple(_word("value", rng) for _ in range(size))) for key in keys]
    room = length - 1 - 2 * count * 2 * size
    out: list[str] = []
    places = sorted(rng.randint(0, room) for _ in pairs)
    for place, before, (key, value) in zip(places, [0, *places], pairs, strict=False):
        out += [_word("filler", rng) for _ in range(place - before)] + [*key, *value]
    out += [_word("filler", rng) for _ in range(room - places[-1])] + [ASK]
    answers = []
    for key, value in rng.sample(pairs, count):
        out += [*key, *value]
        answers.append(range(len(out) - size, len(out)))
    return Text(out, answers)


def repeated(length: int, rng: random.Random) -> Text:
    """8 to 24 words of any kind over and over; what is asked is all but the first time. From these a model learns within
    minutes to find what stood behind a word; on pairs alone it takes several times as long.
    """
    words = [word for word in vocabulary() if word != ASK]
    piece = rng.choices(words, k=rng.randint(8, 24))
    return Text((piece * length)[:length], [range(len(piece), length)])


def _word(kind: str, rng: random.Random) -> str:
    return f"{kind}{rng.randrange(WORDS[kind])}"


def _distinct(kind: str, size: int, count: int, rng: random.Random) -> list[tuple[str, ...]]:
    found: dict[tuple[str, ...], None] = {}
    while len(found) < count:
        found[tuple(_word(kind, rng) for _ in range(size))] = None
    return list(found)


def texts(length: int, settings: Settings, seed: int | str) -> Iterator[Text]:
    rng = random.Random(f"{seed} {length}")
    while True:
        yield text(length, settings, rng)


# models ---------------------------------------------------------------------------------------------------------------


def small(settings: Settings, qk_norm: bool) -> LlamaConfig | Qwen3Config:
    """RoPE's base keeps the share of the training length that wavelengths have in the paper: 10,000 at 4,096 tokens."""
    kind = Qwen3Config if qk_norm else LlamaConfig
    return kind(
        vocab_size=len(vocabulary()),
        hidden_size=settings.width,
        intermediate_size=settings.width * 2,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        head_dim=settings.head_dim,
        max_position_embeddings=settings.length,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000 * settings.length / 4096},
        tie_word_embeddings=False,
        initializer_range=0.05,  # at this width smaller ones learn to bind a value to its key later
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def setting(variant: str, settings: Settings) -> Setting:
    """p-RoPE rotates half of the pairs, at frequencies from 1 to 1 / effective base, which is 1,024 at 4,096 tokens."""
    fraction = 0.5
    theta = theta_of(1024 * settings.length / 4096, fraction, settings.head_dim)
    return Setting.parse(SCRATCH[variant].format(prope_fraction=fraction, prope_theta=theta))


def tokenizer() -> PreTrainedTokenizerFast:
    """Words as tokens; its chat template joins what a text says, and marks the answers."""
    words = Tokenizer(models.WordLevel(vocabulary(), unk_token=ASK))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    told = "{% generation %}{{ m['content'] }}{% endgeneration %}"
    template = "{% for m in messages %}{% if m['role'] == 'assistant' %}" + told
    return PreTrainedTokenizerFast(
        tokenizer_object=words, chat_template=template + "{% else %}{{ m['content'] }}{% endif %}{{ ' ' }}{% endfor %}"
    )


# runs -----------------------------------------------------------------------------------------------------------------


def run_scratch(run: Run) -> dict[str, Any]:
    settings = run.settings
    torch.manual_seed(run.seed)
    config, way = small(settings, not run.variant.startswith("plain-")), setting(run.variant, settings)
    if way.rope:
        edit_rope(config, way.rope)
    model = AutoModelForCausalLM.from_config(config)
    if run.variant.startswith("unweighted-"):
        for name, weight in model.named_parameters():
            weight.requires_grad_(not name.endswith(("q_norm.weight", "k_norm.weight")))  # they stay 1
    if way.config is not None:
        hf_longattn.apply(model, way.config)
    warm = round(settings.repeated * settings.steps) * settings.batch
    rng = random.Random(f"{run.seed} repeated")
    drawn = itertools.chain((repeated(settings.length, rng) for _ in range(warm)), texts(settings.length, settings, run.seed))

    def loss() -> Tensor:
        """Of the answers alone."""
        batch = [next(drawn) for _ in range(settings.batch)]
        ids, labels = torch.stack([t.ids for t in batch]), torch.stack([t.labels for t in batch])
        logits = model(ids, use_cache=False).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)

    muon = Muon(settings.matrix_rate, embedding_lr=settings.embedding_rate, other_lr=settings.rate)
    optimizer = MuonWithAdam(model, muon)
    train_loss = fit(model, loss, optimizer, settings.steps, 0.05, run.dtype)
    hf_longattn.save(model, run.folder) if way.config is not None else model.save_pretrained(run.folder)
    tokenizer().save_pretrained(run.folder)
    found = {"lengths": list(settings.lengths), "train_loss": round(train_loss, 5)} | answered(model, settings)
    return found | {"logits": logits(model, settings)}


def logits(model: Any, settings: Settings) -> dict[str, Any]:
    """Mean and standard deviation of the logits before any method, by layer and head, in texts of the trained length."""
    windows = [next(texts(settings.length, settings, f"logits {i}")).ids[None] for i in range(32)]
    found = measure(model, windows, sink_tokens=0)
    values = {"mean": found.logit_mean, "deviation": found.logit_variance.sqrt()}
    return {name: [[round(x, 3) for x in layer] for layer in value.tolist()] for name, value in values.items()}


def run_converted(run: Run) -> dict[str, Any]:
    """Answers of the base under the method before any training, and after it."""
    settings = run.settings
    name, own = CONVERTED[run.variant]
    base = run.models / "keys" / f"{name}-seed{run.seed}"
    require(base, f"keys --only '^{name}$' --seeds {run.seed}")
    data = run.models / f"keys-{settings.length}-seed{run.seed}.jsonl"
    write(data, settings, settings.steps * settings.batch, f"{run.seed} converted")
    write(heldout := run.models / f"keys-{settings.length}-heldout.jsonl", settings, 64, "heldout")
    overrides = {
        "model": base,
        "data": data,
        "heldout": heldout,
        "hub.answers": True,
        "output": run.folder,
        "length": settings.length,
        "evaluation.compare": False,
        "evaluation.far": 0,
        **training(settings.steps, settings.batch, run.seed, run.dtype),
        **own,
    }
    words = [f"{k}={v}" for k, v in overrides.items()]
    untrained = AutoModelForCausalLM.from_pretrained(base).eval()
    if (method := Setting.entry("method", {"method": None if own["method"] == "null" else own["method"]}).config) is not None:
        if own.get("calibrate"):
            windows = [next(texts(settings.length, settings, f"calibration {i}")).ids[None] for i in range(32)]
            method = hf_longattn.calibrate(untrained, windows, method)
        hf_longattn.apply(untrained, method)
    before = answered(untrained, settings)
    metrics = train(prepare(load_recipe("method_lora", words)))
    out = {"lengths": list(settings.lengths), "train_loss": round(metrics["train_loss"], 5), "untrained": before}
    trained = AutoModelForCausalLM.from_pretrained(run.folder)
    named = [f"{k}={v.name if isinstance(v, Path) else v}" for k, v in overrides.items()]
    return out | answered(trained, settings) | {"recipe": "hf-longattn train method_lora " + " ".join(named)}


def write(path: Path, settings: Settings, count: int, seed: str) -> None:
    """The texts of `keys` under another seed, as chats whose answers the assistant says."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn, lines = texts(settings.length, settings, seed), []
    for _ in range(count):
        one, at, messages = next(drawn), 0, []
        for answer in one.answers:
            messages.append({"role": "user", "content": " ".join(one.words[at : answer.start])})
            messages.append({"role": "assistant", "content": " ".join(one.words[answer.start : answer.stop])})
            at = answer.stop
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@torch.inference_mode()
def answered(model: Any, settings: Settings) -> dict[str, Any]:
    """By length the share of questions that are answered right, and each of them as 0 or 1, text by text."""
    model.eval()
    right: list[str] = []
    for length in settings.lengths:
        drawn, found = texts(length, settings, ASKED), ""
        for _ in range(0, settings.texts, step := max(min(8192 // length, settings.texts), 1)):
            batch = [next(drawn) for _ in range(step)]
            ids = torch.stack([t.ids for t in batch])
            last = length - batch[0].answers[0].start + 1
            said = model(ids, use_cache=False, logits_to_keep=last).logits.argmax(-1)[:, :-1]
            hit = said == ids[:, 1 - last :]
            found += "".join(
                str(int(hit[i, [n - (length - last + 1) for n in a]].all())) for i, t in enumerate(batch) for a in t.answers
            )
        right.append(found)
    return {"accuracy": [round(found.count("1") / len(found), 5) for found in right], "right": right}


KEYS = experiment("keys", SCRATCH, run_scratch)
KEYS_OF_TWO = experiment("keys-of-two", SCRATCH, run_scratch)
KEYS_IN_256 = experiment("keys-in-256", SCRATCH, run_scratch)
KEYS_WIDER = experiment("keys-wider", SCRATCH, run_scratch)
KEYS_CONVERTED = experiment("keys-converted", CONVERTED, run_converted)
