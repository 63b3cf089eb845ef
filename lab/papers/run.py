"""The papers' experiments at the size of a small machine: what there is, what it costs, and running it.

    make reproduce                                         # the list
    make reproduce ARGS="max-retrieval argmax-retrieval"   # run what is missing of these
    make reproduce ARGS="all --text A.txt B.txt --heldout C.txt"
    make reproduce ARGS="--show conversion --seeds 1"      # print one table; the pages have the shorter ones

A run is one training, of one variant under one seed. Finished runs are rows of lab/results/reproductions; what is
there is not run again, so an interrupted command goes on when it is given again.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from hf_longattn.core.kernels.precision import auto_dtype
from hf_longattn.evaluation.rows import Row, RowFile, versions
from lab.papers import tables
from lab.papers.algorithms import ALGORITHMS, ALGORITHMS_PRETRAINED
from lab.papers.conversion import CONVERSION
from lab.papers.encodings import ENCODED
from lab.papers.experiment import Experiment, Run, Texts, refuse_other_settings
from lab.papers.keys import KEYS, KEYS_CONVERTED, KEYS_IN_256, KEYS_OF_TWO, KEYS_WIDER
from lab.papers.length import ATTENTION, LENGTH
from lab.papers.masked import MASKED
from lab.papers.needles import NEEDLES, NEEDLES_BEYOND, PRETRAINED
from lab.papers.sets import SETS

ROOT = Path(__file__).parents[2]
ALL = (
    *SETS,
    *(LENGTH, ATTENTION, NEEDLES, PRETRAINED, MASKED, ENCODED),
    *(ALGORITHMS, ALGORITHMS_PRETRAINED, CONVERSION, NEEDLES_BEYOND),
    *(KEYS, KEYS_CONVERTED, KEYS_OF_TWO, KEYS_IN_256, KEYS_WIDER),
)
EXPERIMENTS = {e.name: e for e in ALL}
RESULTS = tables.RESULTS
MODELS = ROOT / "runs" / "reproduce"
#: Of --quick, which only shows that everything runs.
QUICK = ROOT / "build" / "reproduce"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options()
    args = parser.parse_args(arguments)
    args.models = args.models or (QUICK / "models" if args.quick else MODELS)
    results = args.results or (QUICK if args.quick else RESULTS)
    if args.show or not args.names:
        print(table(args) if args.show else listed(results))
        return 0
    texts = Texts(tuple(args.text), args.heldout)
    try:
        for experiment in chosen(parser, args):
            perform(experiment, args, results, texts if experiment.text else Texts())
    except ValueError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return 0


def table(args: argparse.Namespace) -> str:
    """A table of the rows of these variants and seeds."""
    data = tables.load(args.results or RESULTS)
    for name, rows in data.items():
        data[name] = [r for r in rows if re.search(args.only, r["variant"]) and r["seed"] in (args.seeds or [r["seed"]])]
    return tables.SECTIONS[args.show](data).text


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="EXPERIMENT", help="what to run, or all; nothing: list what there is")
    parser.add_argument("--only", default="", metavar="REGEX", help="only these variants")
    parser.add_argument("--seeds", type=int, nargs="+", help="only these seeds (more than the experiment's own are allowed)")
    parser.add_argument("--again", action="store_true", help="also run what is there, and replace it")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="plain texts to train on")
    parser.add_argument("--heldout", type=Path, help="a plain text to measure on")
    parser.add_argument("--results", type=Path, help="where rows are kept (default lab/results/reproductions)")
    parser.add_argument("--models", type=Path, help="where trained models are kept (default runs/reproduce)")
    fast = "what language models multiply in while they train (default: what this CPU multiplies fast, %(default)s)"
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default=auto_dtype(), help=fast)
    quick = "every run in seconds, into build/: shows that it works, not what it gives"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--show", metavar="TABLE", choices=sorted(tables.SECTIONS), help="run nothing; print one table")
    return parser


def chosen(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[Experiment]:
    """What is asked for; exits with a message where that cannot run."""
    if unknown := [n for n in args.names if n not in (*EXPERIMENTS, "all")]:
        parser.error(f"there is no experiment {unknown[0]!r}; choose from {', '.join(EXPERIMENTS)}, or all")
    found = [e for e in EXPERIMENTS.values() if e.name in args.names or "all" in args.names]
    if missing := [p for p in (*args.text, args.heldout) if p is not None and not p.is_file()]:
        parser.error(f"there is no file {missing[0]}")
    if wanting := [e for e in found if e.text and not (args.text and args.heldout)]:
        parser.error(f"{wanting[0].name} trains on text: give --text FILES and --heldout FILE")
    if not any(re.search(args.only, v) for e in found for v in e.variants):
        parser.error(f"no variant of {', '.join(e.name for e in found)} matches {args.only!r}")
    return found


def perform(experiment: Experiment, args: argparse.Namespace, results: Path, texts: Texts) -> None:
    """Every run that is asked for and not there, a row each.

    Raises:
        ValueError: rows of other settings or texts are there, or a model of another experiment is not.
    """
    rows = RowFile(results / f"{experiment.name}.jsonl")
    settings = experiment.quick if args.quick else experiment.settings
    seeds = experiment.seeds if args.seeds is None else tuple(args.seeds)
    runs = [(v, s) for v, s in dataclasses.replace(experiment, seeds=seeds).runs() if re.search(args.only, v)]
    kept = [r for r in rows if not (args.again and (r["variant"], r["seed"]) in runs)]
    dtype = "float32" if experiment.dtype == "float32" else args.dtype
    refuse_other_settings(kept, settings, texts.named(), rows.path, dtype, experiment.dtype)
    for variant, seed in runs:
        if rows.find(variant=variant, seed=seed) is not None and not args.again:
            print(f"{experiment.name} {variant} seed {seed}: there")
            continue
        folder = args.models / experiment.name / f"{variant}-seed{seed}"
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut short, or is made again
        started, cpu = time.monotonic(), time.process_time()
        measured = experiment.measure(Run(variant, seed, settings, folder, args.models, texts, dtype))
        row: Row = {
            "experiment": experiment.name,
            "variant": variant,
            "seed": seed,
            "settings": vars(settings),
            "texts": texts.named(),
            "dtype": dtype,
            "measured": measured,
            "command": command(experiment, variant, seed, args, texts),
            "cpu_seconds": round(time.process_time() - cpu, 1),
            "seconds": round(time.monotonic() - started, 1),
            "threads": torch.get_num_threads(),
            "versions": versions(),
            "commit": commit(),
        }
        rows.put(row, instead_of={"variant": variant, "seed": seed})
        print(f"{experiment.name} {variant} seed {seed}: {row['cpu_seconds'] / 60:.1f} CPU minutes, {dtype}", flush=True)


def command(experiment: Experiment, variant: str, seed: int, args: argparse.Namespace, texts: Texts) -> str:
    """The command that makes this row alone; files by their names."""
    words = ["python lab/papers/run.py", experiment.name, f"--only '^{re.escape(variant)}$'", f"--seeds {seed}"]
    if experiment.text:
        words += ["--text", *(p.name for p in texts.train), f"--heldout {texts.heldout and texts.heldout.name}"]
    words += [f"--dtype {args.dtype}"] if experiment.dtype != "float32" else []
    return " ".join([*words, *(["--quick"] if args.quick else [])])


def commit() -> str | None:
    """The commit that a checkout is at; with a plus, something in it is not committed."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def listed(results: Path) -> str:
    """Every experiment with its cost: CPU minutes of a run (of the rows that are there, else as noted), done, to do."""
    lines = [("experiment", "a run", "done", "to do", "left", "")]
    for experiment in EXPERIMENTS.values():
        rows = RowFile(results / f"{experiment.name}.jsonl").all
        spent = [row["cpu_seconds"] / 60 for row in rows]
        minutes = sum(spent) / len(spent) if spent else experiment.minutes
        done = {(row["variant"], row["seed"]) for row in rows}
        to_do = [run for run in experiment.runs() if run not in done]
        about = experiment.about + (f"; needs {experiment.needs}" if experiment.needs else "")
        about += "; needs --text and --heldout" if experiment.text else ""
        left = f"{len(to_do) * minutes / 60:.1f} h" if to_do else "–"
        lines.append((experiment.name, f"{minutes:.1f} min", str(len(done)), str(len(to_do)), left, about))
    width = [max(len(line[i]) for line in lines) for i in range(5)]
    shown = ["  ".join([line[0].ljust(width[0]), *(line[i].rjust(width[i]) for i in range(1, 5)), line[5]]) for line in lines]
    return "\n".join([*shown, "", 'Times are CPU time on one thread. make reproduce ARGS="NAME" runs what is to do.'])


if __name__ == "__main__":
    sys.exit(main())
