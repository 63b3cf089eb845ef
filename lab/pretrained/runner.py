"""A pretrained model under a list of settings, on texts, a row each: what the programs beside this file share.

A program says which settings (settings/NAME.yaml), what is measured of one text under one of them, and what its rows mean.
Rows that the result file has are not measured again; every row is kept as it is done.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from hf_longattn import calibrate
from hf_longattn.core.kernels.precision import auto_dtype
from hf_longattn.evaluation import PASSAGE, experiment
from hf_longattn.evaluation.checkpoints import Checkpoint
from hf_longattn.evaluation.loading import load_setting
from hf_longattn.evaluation.report import markdown
from hf_longattn.evaluation.rows import Row, RowFile, versions_line
from hf_longattn.evaluation.settings import UNMODIFIED, Setting, parse_rope

ROOT = Path(__file__).parents[2]
RESULTS, SETTINGS = ROOT / "lab" / "results", Path(__file__).parent / "settings"
#: Tokens at the end of a text that no pass reads, on which settings are calibrated.
CALIBRATION = 1536
STEP = 1024
MAP = {"name": "scale_invariant", "tau": 1000.0, "decay": 0.25, "sink_tokens": 1}
#: Key heads (layer, head) of SmolLM2-135M with 0.019 or more in `copying_heads`, on the tokens 20,000 to 24,096 of Emma.
COPYING = [(17, 1), (18, 2), (20, 1), (20, 2), (21, 2), (22, 1), (22, 2), (23, 0), (23, 2), (24, 0), (24, 2)]
LAYERS, HEADS = 30, 3


@dataclass(frozen=True)
class Choice:
    """A setting, calibrated or not, at some lengths (none named: at any)."""

    setting: Setting
    calibrated: bool = False
    lengths: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return self.setting.name

    @property
    def adapter(self) -> str | None:
        return self.setting.adapter

    def to_dict(self) -> dict[str, Any]:
        return self.setting.to_dict() | ({"calibrated": CALIBRATION} if self.calibrated else {})


def choices(name: str, **symbols: float) -> list[Choice]:
    """The settings of settings/NAME.yaml: texts, or mappings of `method`, `calibrated`, `lengths`, `map` and `capped`.

    Args:
        symbols: numbers that stand in braces in names and texts, and that `map` names.
    """
    read = yaml.safe_load((SETTINGS / f"{name}.yaml").read_text(encoding="utf-8"))
    return [choice(key.format(**symbols), entry, symbols) for key, entry in read.items()]


def choice(name: str, entry: str | Mapping[str, Any], symbols: Mapping[str, float]) -> Choice:
    entry = {"method": entry} if isinstance(entry, str) else entry
    setting = Setting.parse(entry.get("method", UNMODIFIED).format(**symbols), name)
    if heads := entry.get("capped"):
        stretch = capped(setting.parameters["stretch"], heads)
        setting = replace(setting, parameters={**setting.parameters, "stretch": stretch})
    if added := {k: symbols.get(v, v) for k, v in entry.get("map", {}).items()}:
        setting = Setting(
            name, (setting.config.to_dict() if setting.config else {}) | {"logit_map": MAP | added}, {}, setting.rope
        )
    return Choice(setting, bool(added) or entry.get("calibrated", False), tuple(entry.get("lengths", ())))


def capped(stretch: float, which: Sequence[str]) -> list[list[float]]:
    """By layer and key head of SmolLM2-135M: the far keys of some heads are capped, of the others stretched."""
    heads = set(COPYING) if "copying" in which else set()
    for first, last in (map(int, layers.split("-")) for layers in which if layers != "copying"):
        heads |= {(layer, head) for layer in range(first, last + 1) for head in range(HEADS)}
    return [[math.inf if (layer, head) in heads else stretch for head in range(HEADS)] for layer in range(LAYERS)]


def load(choice: Choice, model: Path, dtype: str, calibration: Tensor, device: str = "cpu") -> Any:
    """The model under a choice, measured on the calibration text (1, tokens) first if the choice wants it."""
    calibrated = (lambda model, method: calibrate(model, [calibration], method)) if choice.calibrated else None
    return load_setting(choice.setting, Checkpoint(str(model)), dtype, device, calibrated=calibrated)


@dataclass(frozen=True)
class Text:
    """A text as tokens (1, tokens) of its first `length`, and those that calibration reads."""

    path: Path
    tokens: Tensor
    length: int
    trained: int

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def ids(self) -> Tensor:
        return self.tokens[:, : self.length]

    @property
    def calibration(self) -> Tensor:
        return self.tokens[:, -CALIBRATION:]


def key(text: Text, args: argparse.Namespace) -> dict[str, Any]:
    return {"model": args.model.name, "text": text.name, "length": text.length, "dtype": args.dtype}


@dataclass(frozen=True)
class Program:
    """
    Args:
        file: of the program; its name stands in rows' commands.
        protocol: what a row means, in words, above the rows.
        settings: from a text to what is measured on it; a choice that names other lengths is left out.
        measure: from a loaded model, a text, a choice and the arguments to what goes into the row.
        key: what tells rows apart beside the setting's name.
        load: see `load`.
        options: adds the program's own to the command line.
        spare: tokens behind the length that a text must have.
        gpu: whether it runs on a GPU too, by --device; rows then name that.
    """

    file: str
    result: Path
    protocol: str
    settings: Callable[[Text], Sequence[Choice]]
    measure: Callable[[Any, Text, Choice, argparse.Namespace], Row]
    key: Callable[[Text, argparse.Namespace], dict[str, Any]] = key
    load: Callable[[Choice, Text, argparse.Namespace], Any] | None = None
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    lengths: tuple[int, ...] = (16384,)
    dtype: str | None = None
    spare: int = CALIBRATION
    gpu: bool = False

    def main(self, doc: str, arguments: Sequence[str] | None = None) -> None:
        parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        default, dtype = ROOT / "models" / "SmolLM2-135M-Instruct", self.dtype or auto_dtype()
        parser.add_argument("--model", type=Path, default=default, help="as the demo obtains it")
        parser.add_argument("--text", type=Path, nargs="+", required=True, help="plain texts; a file's name names it in rows")
        parser.add_argument("--length", type=int, nargs="+", default=list(self.lengths))
        parser.add_argument("--only", default="", help="only settings whose name matches this regular expression")
        parser.add_argument("--dtype", default=dtype, help="default: %(default)s")
        if self.gpu:
            parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="default: %(default)s")
        parser.set_defaults(device="cpu")
        parser.add_argument("--result", type=Path, default=self.result)
        self.options(parser)
        args = parser.parse_args(arguments)
        transformers.set_seed(0)
        for text in self.texts(args):
            self.experiment(text, args).run(told)

    def texts(self, args: argparse.Namespace) -> Iterator[Text]:
        """Every length of every text, the shorter lengths first."""
        encode, config = AutoTokenizer.from_pretrained(args.model), AutoConfig.from_pretrained(args.model).get_text_config()
        read = {p: encode(p.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"] for p in args.text}
        for path, tokens in read.items():
            if tokens.shape[1] < (needed := max(args.length) + self.spare):
                sys.exit(f"{path.name} has {tokens.shape[1]} tokens; {needed} are needed")
        for length in args.length:
            yield from (Text(p, tokens, length, config.max_position_embeddings) for p, tokens in read.items())

    def experiment(self, text: Text, args: argparse.Namespace) -> experiment.Experiment:
        """The settings on one text, which calibrated ones are measured on."""
        settings = [c for c in self.settings(text) if not c.lengths or text.length in c.lengths]
        rows = RowFile(args.result, protocol=self.protocol)
        loaded = self.load or (lambda c, t, a: load(c, a.model, a.dtype, t.calibration, a.device))
        source = args.model / "SOURCE"
        about = {
            "source": source.read_text().strip() if source.exists() else args.model.name,
            "versions": f"{versions_line('hf_longattn', 'transformers', 'torch')}, {torch.get_num_threads()} threads",
            **({"gpu": torch.cuda.get_device_name()} if args.device == "cuda" else {}),
        }

        key, model = self.key(text, args), [experiment.fingerprint(str(args.model))]
        cells = [
            experiment.Cell(c, {"name": c.name, **key}, functools.partial(self.row, c, text, args), model, work=text.length)
            for c in settings
            if re.search(args.only, c.name)
        ]
        return experiment.Experiment(rows, lambda c: loaded(c, text, args), ("name", *key), cells, about)

    def row(self, choice: Choice, text: Text, args: argparse.Namespace, model: Any) -> Row:
        own = {"calibration": CALIBRATION} if choice.calibrated else {}
        return self.measure(model, text, choice, args) | own | {"command": self.command(choice, text, args)}

    def command(self, choice: Choice, text: Text, args: argparse.Namespace) -> str:
        """What makes this row alone; files by their names."""
        names = {
            "model": args.model.name,
            "text": text.path.name,
            "length": text.length,
            "only": f"'^{re.escape(choice.name)}$'",
        }
        said = {k: v for k, v in (vars(args) | names).items() if k != "result" and v not in (None, False, "cpu")}
        words = [f"--{k}" if v is True else f"--{k} {_named(v)}" for k, v in said.items()]
        return " ".join([f"python lab/pretrained/{self.file}.py", *words])


def _named(value: Any) -> str:
    """For a command; files by their names."""
    if isinstance(value, list):
        return " ".join(map(_named, value))
    return value.name if isinstance(value, Path) else str(value)


def told(row: Row, new: bool) -> str:
    return ", ".join(f"{k} {row[k]}" for k in ("prose", "copying", "loss", "cpu_seconds") if k in row) if new else ""


def described(choice: Choice, trained: int) -> Row:
    """What rows say of their setting: its config (numbers that calibration measured left out) and rope, as ["yarn", 2.0]."""
    config, rope = choice.setting.config, parse_rope(choice.setting.rope) if choice.setting.rope else ()
    return {
        "trained": trained,
        "config": config and config.to_dict(),
        "rope": [rope[0], *rope[1]] if rope else [],
    }


def drawn(rng: random.Random, count: int, length: int) -> list[int]:
    """A place for a passage in each of `count` equal parts of a text; none meets another."""
    part = length // count
    if part < PASSAGE + 1:
        raise SystemExit(f"{count} passages do not fit in {length} tokens")
    return [n * part + rng.randrange(part - PASSAGE) for n in range(count)]


def adapter_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--adapter", type=Path, help="a PEFT adapter to put into the model first")


def with_adapter(choice: Choice, adapter: Path | None) -> Choice:
    return replace(choice, setting=replace(choice.setting, adapter=adapter and str(adapter)))


# tables ---------------------------------------------------------------------------------------------------------------


def rows_of(pattern: str) -> list[Row]:
    """Rows of the result files of that pattern, each with its label: its setting, and its adapter."""
    rows = [row for file in sorted(RESULTS.glob(pattern)) for row in RowFile(file)]
    return [row | {"label": row["name"] + (f", {row['adapter']}" if "adapter" in row else "")} for row in rows]


def parts(what: str) -> tuple[list[str], list[str]]:
    """What a mark asks for: "WORD WORD ... | label | label ..."."""
    first, *labels = (part.strip() for part in what.split("|"))
    return first.split(), labels


def having(rows: Iterable[Row], values: Sequence[str], columns: Sequence[str]) -> list[Row]:
    """The rows that say so in these columns."""
    return [r for r in rows if [str(r[column]) for column in columns] == list(values)]


def lines(head: Sequence[str], body: Mapping[str, Sequence[str]]) -> str:
    return markdown(head, [[f"`{label}`", *cells] for label, cells in body.items()])
