"""Most of what a GPU has to show, in seven minutes at most: `python lab/speed/gpu_all.py LOGS`, or `make gpu-all ARGS=LOGS`.

What is compared and what only has to run goes first, a process for each method, many beside one another, since most of it is
compiling; then what is timed, one process at a time, with the programs that are compiled by then. Every process has one thread
of the host, is stopped at its seconds, and leaves what it has shown. gpu_rows.py takes the logs into results/gpu.json:

    python lab/speed/gpu_rows.py NAME LOGS/*.log --commit ... --date ... --what "all of gpu_all.py"
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lab.speed.gpu_kit import UNMODIFIED, methods

#: Parts whose processes run beside one another, and their methods; none: all.
BESIDE: dict[str, tuple[str, ...]] = {
    "exactness": (),
    "static": ("infoscale", "scale_invariant", "rerope", "adaptive_temperature", "dual_chunk"),
    "short": ("scale_invariant", "rerope", "adaptive_temperature", "infoscale", "dual_chunk", "alibi", "attention_sink"),
}
MOST = ("rerope", "scale_invariant", "infoscale", "adaptive_temperature", "rerope+infoscale")
#: What is timed: a log's name, its seconds, and arguments of gpu.py. What has no rows yet comes first.
TIMED: list[tuple[str, int, list[str]]] = [
    ("step", 60, ["step", "--methods", *MOST[:4], "cosscale", "dual_chunk"]),
    ("whole-8k", 60, ["whole", "--length", "8192", "--methods", *MOST, "cosscale", "dual_chunk", "alibi"]),
    ("whole-32k", 70, ["whole", "--length", "32768", "--methods", *MOST]),
    ("attention-32k", 60, ["attention", "--length", "32768", "--methods", *MOST[:4], "alibi", "leaky_rerope", "dual_chunk"]),
    ("attention-16k", 40, ["attention", "--length", "16384", "--head-dim", "64", "--methods", *MOST[:4], "alibi"]),
]


def run(name: str, seconds: float, words: Sequence[str], args: argparse.Namespace) -> None:
    log = args.logs / f"{name}.log"
    command = [sys.executable, str(Path(__file__).with_name("gpu.py")), *words, "--device", args.device]
    begun, environment = time.perf_counter(), os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("w", encoding="utf-8") as file:
        try:
            done = subprocess.run(command, stdout=file, stderr=file, timeout=seconds, env=environment, check=False)
            ended = str(done.returncode)
        except subprocess.TimeoutExpired:
            ended = "stopped"
    text = log.read_text(encoding="utf-8")
    rows, errors = text.count("ROW "), text.count('"error": ')
    print(f"{name}: {ended}, {rows} rows, {errors} errors, {time.perf_counter() - begun:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, help="a folder")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 16), help="beside one another")
    parser.add_argument("--beside", type=float, default=130.0, help="seconds until only timed ones run")
    parser.add_argument("--methods", nargs="+", help="of what is compared, only these")
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    end = time.perf_counter() + args.beside

    def beside(part: str, method: str) -> None:
        if (left := end - time.perf_counter()) > 1:
            run(f"{part}-{method}", left, [part, "--methods", method], args)

    each = [(part, m) for part, named in BESIDE.items() for m in named or (UNMODIFIED, *methods(64))]
    with ThreadPoolExecutor(args.processes) as pool:
        list(pool.map(lambda x: beside(*x), [x for x in each if not args.methods or x[1] in args.methods]))
    for name, seconds, words in TIMED:
        run(name, seconds, words, args)


if __name__ == "__main__":
    main()
