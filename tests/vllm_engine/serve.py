"""What vLLM answers, as JSON on a file: `serve.py OUT ENGINE JOBS`, in a process of its own.

JOBS is JSON: by name, a checkpoint and what is passed to vLLM beside the engine's own settings.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
NEW, PAGE = 16, 32
PREEMPT_EVERY = 20
FIXED: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 16}
FIXED |= {"block_size": PAGE, "skip_tokenizer_init": True, "seed": 0}
ENGINES: dict[str, dict[str, Any]] = {
    "whole": {"max_num_batched_tokens": 4096},
    # fewer tokens a step than a prompt has, and fewer pages than the requests need
    "tight": {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 17},
    "tp2": {"tensor_parallel_size": 2},
    "compiled": {"enforce_eager": False},
    # the model runner that GPUs get
    "runner": {"max_num_batched_tokens": 64},
    "adapters": {},
    "asked otherwise": {},
    "quantised": {},
    "refused": {},
}


def prompts(vocabulary: int = 97) -> list[list[int]]:
    """Six of mixed lengths, the last with the beginning of another one."""
    rng = random.Random(0)
    out = [[rng.randrange(1, vocabulary) for _ in range(n)] for n in (5, 17, 40, 100, 150)]
    return [*out, out[3][:70] + out[4][:20]]


def many() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(1, 97) for _ in range(rng.randrange(3, 160))] for _ in range(16)]


def adapted(llm: Any, folder: str) -> list[dict[str, Any]]:
    from vllm.lora.request import LoRARequest

    return ask(llm, prompts(), lora=LoRARequest("adapter", 1, folder))


def ask(llm: Any, texts: list[list[int]], lora: Any = None, **extra: Any) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=NEW, logprobs=1, detokenize=False, ignore_eos=True, **extra)
    outputs = llm.generate([{"prompt_token_ids": p} for p in texts], sampling, use_tqdm=False, lora_request=lora)
    return [record(o.prompt_token_ids, o.prompt_logprobs, [o.outputs[0]], o.num_cached_tokens) for o in outputs]


def streamed(llm: Any, texts: list[list[int]], preempt_every: int = 0) -> list[dict[str, Any]]:
    """Token by token, requests arriving while others are answered.

    Args:
        preempt_every: after so many steps all requests that run are preempted: they lose their keys, and are read again.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        temperature=0, max_tokens=NEW, logprobs=1, detokenize=False, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    engine, parts, left = llm.llm_engine, {str(n): [] for n in range(len(texts))}, list(enumerate(texts))
    for step in itertools.count(1):
        if not left and not engine.has_unfinished_requests():
            break
        if left:
            n, text = left.pop(0)
            engine.add_request(str(n), {"prompt_token_ids": text}, sampling)
        for output in engine.step():
            parts[output.request_id] += output.outputs
        if preempt_every and step % preempt_every == 0:
            engine.reset_prefix_cache(reset_running_requests=True)
    return [record(text, None, parts[str(n)], 0) for n, text in enumerate(texts)]


def record(prompt: list[int], read: Any, parts: Iterable[Any], cached: int | None) -> dict[str, Any]:
    """Tokens with their log probabilities; of the prompt's own too, where they were asked for."""
    new = [(t, d[t].logprob) for part in parts for t, d in zip(part.token_ids, part.logprobs, strict=True)]
    of_prompt = None if read is None else [d[t].logprob if d else None for d, t in zip(read, prompt, strict=True)]
    return {"prompt": prompt, "of_prompt": of_prompt, "new": new, "cached": cached or 0}


def scenarios(llm: Any, engine: str) -> dict[str, list[dict[str, Any]]]:
    if engine in ("whole", "runner"):
        return {
            "whole prefill": ask(llm, prompts(), prompt_logprobs=0),
            "prefix hit": ask(llm, prompts()) and ask(llm, prompts()),
            "16 requests at once": ask(llm, many()),
            "streaming": streamed(llm, many()),
        }
    if engine == "tight":
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        preempt, count = scheduler._preempt_request, []
        scheduler._preempt_request = lambda *args, **kwargs: (count.append(1), preempt(*args, **kwargs))[1]
        chunked, resumed = ask(llm, prompts()), streamed(llm, many(), PREEMPT_EVERY)
        for answer in resumed:
            answer["preemptions"] = len(count)
        return {"chunked prefill": chunked, "preempted": resumed}
    return {engine: ask(llm, prompts())}


def interpret() -> None:
    """Let vLLM take the model runner that it has for GPUs, whose Triton kernels are interpreted here."""
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))


def main() -> None:
    os.environ |= ENVIRONMENT
    out, engine, jobs = sys.argv[1:]
    if engine == "runner":
        interpret()
    if engine != "tp2":
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    answers: dict[str, Any] = {}
    for name, (checkpoint, arguments) in json.loads(jobs).items():
        adapter, llm = arguments.pop("adapter", None), None
        try:
            llm = LLM(checkpoint, **FIXED | ENGINES[engine] | arguments)
            if engine == "runner":
                worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
                assert type(worker.model_runner).__module__ == "vllm.v1.worker.cpu.model_runner", type(worker.model_runner)
            answers[name] = scenarios(llm, engine) if adapter is None else {"adapter": adapted(llm, adapter)}
        except Exception as error:
            answers[name] = f"{type(error).__name__}: {error}"
        llm = None
        Path(out).write_text(json.dumps(answers), encoding="utf-8")
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
