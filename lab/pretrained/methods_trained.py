"""Methods that a pretrained model must learn, before and after short training under them, beside a control without a method.

    python lab/pretrained/methods_trained.py --model models/SmolLM2-135M-Instruct --train emma.txt sense-and-sensibility.txt \
        --text python-reference.txt perl-functions.txt --keep models/adapters

The protocol was fixed before anything was run: seed 42, the steps of the recipe `method_lora`, novels to train on, held-out
texts of other kinds, the same for all. An adapter that is not in --keep is trained first, as `trained.py` trains (its runs
`method-...`, about ten minutes each on one thread). With --only, and a --result of its own, parts can run side by side.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_longattn.evaluation import PASSAGE, Copy
from hf_longattn.evaluation.measures.probe import LEAST, passages, probe
from hf_longattn.evaluation.rows import Row
from hf_longattn.evaluation.settings import UNMODIFIED, Setting
from lab.markdown import Contents
from lab.pretrained import paired, runner
from lab.pretrained.longer_on_model import measured
from lab.pretrained.runner import RESULTS, Choice, Program, Text, described, drawn
from lab.pretrained.trained import RUNS, train

LENGTH, COPIES, PROBES, TRAINED = 8192, 24, 2, ", trained"
PROTOCOL = (
    "One forward pass over the first `length` tokens of a text in whose second half the passages of `copies` ([distance, "
    "position], 128 tokens, places drawn by the text's name) are overwritten by a repetition of those `distance` tokens "
    "before; no cache. prose: mean loss in nats per token of each 1024 positions outside copies; copying: mean loss on each "
    "copy, its first 16 tokens left out. probe: by distance, beyond the trained length too, the mean loss on other text and "
    f"on a copy behind a jump of positions, of {PROBES} passages. Trained: 48 steps of one window of 1,024 tokens of the "
    "novels, LoRA of rank 16, learning rate 1e-3 falling to 0, seed 42; the control likewise without a method."
)
#: Runs of trained.yaml, by the method that they train under.
METHODS = {
    next(word for word in run["train"] if word.startswith("method=")).removeprefix("method="): name
    for name, run in RUNS.items()
    if name.startswith("method-")
}
CONTROL = f"control{TRAINED}"


def settings(text: Text) -> list[Choice]:
    """Every method untrained and trained; the model as it is, and the control."""
    found = [Choice(Setting(UNMODIFIED)), Choice(Setting(CONTROL))]
    for method, run in METHODS.items():
        if method != "null":
            calibrated = any(word.startswith("calibrate=") for word in RUNS[run]["train"])
            found += [Choice(Setting.parse(method), calibrated), Choice(Setting(method + TRAINED))]
    return found


def load(choice: Choice, text: Text, args: argparse.Namespace) -> Any:
    if choice.name.endswith(TRAINED):
        run = METHODS["null" if choice.name == CONTROL else choice.name.removesuffix(TRAINED)]
        if not (adapter := args.keep / run).exists():
            given = f"[{','.join(map(str, args.train))}]"
            more = [f"trainer.max_steps={args.steps}"] * bool(args.steps)
            train(run, adapter, str(args.model), given, str(args.text[0]), args.dtype, *more)
        choice = replace(choice, setting=replace(choice.setting, adapter=str(adapter)))
    return runner.load(choice, args.model, args.dtype, text.calibration)


def measure(model: Any, text: Text, choice: Choice, args: argparse.Namespace) -> Row:
    rng, half = random.Random(text.name), text.length // 2
    positions = [half + place for place in drawn(rng, COPIES, half)]
    places = [Copy(p - rng.randrange(half - PASSAGE), p) for p in positions]  # from where nothing is overwritten
    copies = measured(model, text.ids, places, None)
    found = probe(model, passages(text.ids, PROBES, seed=0), [max(LEAST, text.trained // 2), 2 * text.trained])
    return copies | {"probe": found.rows()} | described(choice, text.trained)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--train", type=Path, nargs="+", required=True, help="plain texts to train on")
    parser.add_argument("--keep", type=Path, required=True, help="a folder for the adapters, each in one of its run's name")
    parser.add_argument("--steps", type=int, help="of training, to try the program; default: the recipe's")


PROGRAM = Program(
    "methods_trained",
    RESULTS / "methods-trained.json",
    PROTOCOL,
    settings,
    measure,
    load=load,
    options=options,
    lengths=(LENGTH,),
    dtype="float32",
)


def contents() -> Contents:
    """See `paired.marks`: all settings less another, over all texts that both have read, or over the one that is named."""

    def rows(words: list[str]) -> list[Row]:
        return [r for r in runner.rows_of("methods-trained*.json") if not words or r["text"] in words]

    return paired.marks("trained methods", rows)


if __name__ == "__main__":
    PROGRAM.main(__doc__)
