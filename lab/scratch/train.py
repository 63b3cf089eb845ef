"""A GPT-2-like model from scratch, with any position method of the scale-invariant-attention paper (Table 1, Apps. G, I.3).

    python -m lab.scratch.train pretrain_small data=CORPUS tokenizer=gpt2 architecture.position=scale_invariant_prope \
        output=runs/scratch

A recipe here is one of `hf-longattn train` with `architecture` and `optimizer` beside it (`tokenizer=bytes` needs no files).
The model of random weights goes to OUTPUT-initial; all of its weights are then trained as the package trains, with Muon.
--resume goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, NanoChatConfig, set_seed

from hf_longattn import training
from hf_longattn.evaluation.checkpoints import edit_rope
from hf_longattn.evaluation.rows import write_whole
from hf_longattn.evaluation.settings import UNMODIFIED, Setting
from hf_longattn.files import read_text
from hf_longattn.integration.rope import theta_of
from hf_longattn.slots.registry import did_you_mean
from lab.scratch.optim import Muon, MuonWithAdam

_LOGN, _PROPE = "logn:learned=true:clamp=false", "@prope:{prope_fraction}:{prope_theta}"  # LogN as published
#: Every position method of the paper, as a setting. NTK at a factor of 1 is θ (n / L)^{d/(d-2)} beyond the training length L,
#: plain RoPE within.
POSITIONS: dict[str, str] = {
    "rope": UNMODIFIED,
    "prope": _PROPE,
    "nope": "@nope",
    "rope_ntk": "@ntk:1",
    "logn_rope": _LOGN,
    "logn_prope": _LOGN + _PROPE,
    "logn_ntk": _LOGN + "@ntk:1",
    "alibi": "alibi@nope",
    "scale_invariant_prope": "scale_invariant" + _PROPE,
    "scale_invariant_rope": "scale_invariant",
    "scale_invariant_nope": "scale_invariant@nope",
}


@dataclass
class Architecture:
    """modded-nanogpt's shape through transformers' NanoChat: RMSNorm without weights (also on the embedding), squared ReLU,
    QK-norm, untied head, no biases, no softcap."""

    layers: int = 12
    width: int = 768
    heads: int = 6
    mlp: int = 4  # hidden width of the feed-forward blocks, in widths
    position: str = "scale_invariant_prope"  # one of POSITIONS, with parameters of its method behind it (":tau=100")
    rope_theta: float = 10_000.0  # RoPE's base
    prope_fraction: float = 0.5
    prope_effective_base: float = 1024.0  # p-RoPE's lowest frequency is 1 over it
    prope_theta: float | None = None  # or p-RoPE's base itself

    @property
    def setting(self) -> Setting:
        """Of `position`; ValueError if there is none of that name."""
        name, colon, parameters = self.position.partition(":")
        if name not in POSITIONS:
            hint = did_you_mean(name, POSITIONS)
            raise ValueError(f"unknown architecture.position {name!r}; {hint}choose one of {', '.join(POSITIONS)}")
        method, at, rope = POSITIONS[name].partition("@")
        theta = self.prope_theta
        if theta is None and "prope_theta" in rope:
            theta = theta_of(self.prope_effective_base, self.prope_fraction, self.width // self.heads)
        return Setting.parse(method + colon + parameters + at + rope.format(**vars(self) | {"prope_theta": theta}))

    def config(self, length: int, vocabulary: int) -> NanoChatConfig:
        """Of a model that is trained at a length, in tokens."""
        if self.width % self.heads:
            raise ValueError(f"width {self.width} does not divide into {self.heads} heads")
        config = NanoChatConfig(
            vocab_size=vocabulary,
            hidden_size=self.width,
            intermediate_size=self.mlp * self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            max_position_embeddings=length,
            final_logit_softcapping=None,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            bos_token_id=None,
            pad_token_id=None,
        )
        return config if (encoding := self.setting.rope) is None else edit_rope(config, encoding)


@dataclass
class Scratch:
    """What a recipe here has beside those of the package."""

    tokenizer: str = "bytes"
    architecture: Architecture = field(default_factory=Architecture)
    optimizer: Muon = field(default_factory=Muon)


def load(source: str, overrides: Sequence[str], initial: Path) -> tuple[Scratch, training.Recipe]:
    """A YAML file, by its path or its name here, with overrides: our part, and the recipe that trains what is in `initial`."""
    from omegaconf import OmegaConf

    path = Path(source) if source.endswith(".yaml") else Path(__file__).with_name(f"{source}.yaml")
    given: Any = OmegaConf.merge(OmegaConf.create(read_text(path)), OmegaConf.from_dotlist(list(overrides)))
    own = {f.name: given.pop(f.name) for f in dataclasses.fields(Scratch) if f.name in given}
    scratch: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Scratch), own))
    method = dataclasses.replace(scratch.architecture.setting, rope=None)  # the model has its encoding already
    slots = None if method.config is None else method.config.to_dict()
    rest: Any = OmegaConf.to_container(given)
    return scratch, training.load_recipe({"lora": None, **rest, "model": str(initial), "method": slots})


def build(scratch: Scratch, recipe: training.Recipe, initial: Path) -> None:
    """The model of random weights, with its tokenizer; one that is there already must have been built alike."""
    from omegaconf import OmegaConf

    own = {"seed": recipe.seed, "length": recipe.length, "dtype": recipe.dtype, **dataclasses.asdict(scratch)}
    said = OmegaConf.to_yaml(OmegaConf.create(own))
    if (note := initial / "scratch.yaml").exists():
        if read_text(note) != said:
            raise ValueError(f"{note} says that this model was built otherwise: choose another output, or remove {initial}")
        return
    name = scratch.tokenizer
    tokenizer = ByT5Tokenizer(extra_ids=0) if name == "bytes" else AutoTokenizer.from_pretrained(name)
    set_seed(recipe.seed)
    config = scratch.architecture.config(recipe.length, len(tokenizer))
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, recipe.dtype)).save_pretrained(initial)
    tokenizer.save_pretrained(initial)
    write_whole(note, said)


def prepare(
    source: str, overrides: Sequence[str], initial: Path, *, resume: bool = False
) -> tuple[Scratch, training.Prepared]:
    """What a run needs, checked, its model built and its plan printed."""
    from accelerate import PartialState

    scratch, recipe = load(source, overrides, initial)
    with PartialState().main_process_first():
        build(scratch, recipe, initial)
    prepared = training.prepare(recipe, resume=resume)
    print(training.plan(prepared), flush=True)
    return scratch, prepared


def train(source: str, overrides: Sequence[str], initial: Path, *, resume: bool = False) -> dict[str, Any]:
    """The metrics of a run, which are also in its output."""
    scratch, prepared = prepare(source, overrides, initial, resume=resume)
    return training.run(prepared, lambda model: MuonWithAdam(model, scratch.optimizer))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="pretrain_small, pretrain_304m, or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes to the recipe; dots for nested keys")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in the output")
    args = parser.parse_args(arguments)
    output = dict(word.partition("=")[::2] for word in args.overrides).get("output") or f"runs/{Path(args.recipe).stem}"
    initial = Path(f"{output}-initial")
    try:
        scratch, prepared = prepare(args.recipe, args.overrides, initial, resume=args.resume)
    except (ValueError, OSError, ImportError) as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    metrics = training.run(prepared, lambda model: MuonWithAdam(model, scratch.optimizer))
    for length, measured in metrics["measured"]["trained"].items():
        print(f"at {length}: loss {measured['loss']:.3f}")
    way = f"import hf_longattn; AutoModelForCausalLM.from_pretrained({str(prepared.output)!r})"
    print(f"Written: {prepared.output}, and the model before training in {initial}; load it with: {way}")


if __name__ == "__main__":
    main()
