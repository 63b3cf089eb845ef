"""Length generalisation from scratch: every position method of Anson et al., Table 1, through `lab.scratch`, `pretrain_small`.

A byte-level model in place of their 162M one. Its training length is 256 in place of 4,096 tokens, so RoPE's base and p-RoPE's
are divided by 16 (p-RoPE's θ, the square of the paper's "effective base", by 256): wavelengths about keep their share of the
training length. At that θ p-RoPE's lowest frequency is a step of the spacing above 1 / effective base; variants that end in
`ENDPOINT` reach it, as published. τ stays at 10, and is swept (App. H).

`attention-by-length` looks into these models (Fig. 1, bottom).
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_longattn
from lab.papers import conversion
from lab.papers.experiment import Run, experiment, require
from lab.scratch.train import POSITIONS, train

TAUS = (0.01, 0.1, 1.0, 100.0)  # the default is 10
#: A position method of `pretrain_small` with its parameters, by variant.
VARIANTS: dict[str, str] = {name: name for name in POSITIONS}
#: p-RoPE exactly as published: frequencies from 1 to 1 / effective base, both included.
ENDPOINT = "_endpoint"
VARIANTS |= {f"{name}{ENDPOINT}": name for name in ("prope", "logn_prope", "scale_invariant_prope")}
VARIANTS |= {f"scale_invariant_prope_tau{tau:g}": f"scale_invariant_prope:tau={tau}" for tau in TAUS}


def run_length(run: Run) -> dict[str, Any]:
    settings = run.settings
    overrides = {
        "tokenizer": "bytes",
        "data": f"[{','.join(map(str, run.texts.train))}]",
        "heldout": run.texts.heldout,
        "output": run.folder,
        "length": settings.length,
        "architecture.layers": settings.layers,
        "architecture.width": settings.width,
        "architecture.heads": settings.heads,
        "architecture.position": VARIANTS[run.variant],
        "architecture.rope_theta": settings.rope_theta,
        "architecture.prope_theta": settings.prope_theta,
        "evaluation.final_lengths": list(settings.lengths),
        "evaluation.tokens": settings.measured_tokens,
        **training(settings.steps, settings.batch, run.seed, run.dtype),
    }
    if run.variant.endswith(ENDPOINT):  # at a share of 1/2 θ is the square of the effective base
        overrides |= {"architecture.prope_theta": "null", "architecture.prope_effective_base": settings.prope_theta**0.5}
    with tempfile.TemporaryDirectory() as folder:
        metrics = train("pretrain_small", [f"{k}={v}" for k, v in overrides.items()], Path(folder) / "initial")
    result = metrics["measured"]["trained"]
    return {
        "lengths": list(settings.lengths),
        "loss": [round(result[n]["loss"], 5) for n in settings.lengths],
        "by_position": {str(n): result[n]["by_position"] for n in settings.lengths},
        "train_loss": round(metrics["train_loss"], 5),
        "tokens": metrics["tokens"],
    }


def training(steps: int, batch: int, seed: int, dtype: str) -> dict[str, Any]:
    """Overrides for a run that is measured at its end alone and can only be made as a whole."""
    return {
        "trainer.max_steps": steps,
        "trainer.per_device_train_batch_size": batch,
        "trainer.gradient_accumulation_steps": 1,
        "trainer.seed": seed,
        "trainer.logging_steps": max(steps // 10, 1),
        "trainer.eval_strategy": "no",
        "trainer.save_strategy": "no",
        "trainer.disable_tqdm": True,
        "trainer.use_cpu": not torch.cuda.is_available(),
        "trainer.bf16": dtype == "bfloat16",
    }


LENGTH = experiment("length-generalisation", VARIANTS, run_length)


#: Models of `conversion`, which can copy: from scratch at 128 bytes with QK-norm.
COPYING = tuple(conversion.QK + name for name in ("base", "prope-scratch", "prope+scale_invariant-scratch"))


@torch.inference_mode()
def run_attention(run: Run) -> dict[str, Any]:
    """Means over the layers and heads of a trained model, by the length so far, and by distance in the longest doubling."""
    settings = run.settings
    source = "conversion" if run.variant in COPYING else LENGTH.name
    folder = run.models / source / f"{run.variant}-seed{run.seed}"
    require(folder, f"{source} --only '^{re.escape(run.variant)}$' --seeds {run.seed}")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    text = conversion.read(run.texts.heldout)
    if run.variant in COPYING:
        ids = conversion.encode(text)
    else:
        ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(text, verbose=False)["input_ids"])
    step = (len(ids) - settings.length) // settings.windows
    what = ("entropy", "mass", "ranges")
    with hf_longattn.capture(model, what=what, rows=settings.rows, delta=settings.delta, local=settings.local) as seen:
        for first in range(0, step * settings.windows, step):
            model(ids[None, first : first + settings.length], use_cache=False)
    found = seen.result()
    by_length = {name: found[name].mean((0, 1)).tolist() for name in ("entropy", "local_mass", "sink_mass")}
    last = {name: found[name][:, :, -1].nanmean((0, 1)).tolist() for name in ("range_entropy", "range_mass")}
    rounded = {name: [round(x, 5) for x in values] for name, values in (by_length | last).items()}
    return {"lengths": list(found.lengths), "ranges": [list(r) for r in found.ranges]} | rounded


LOOKED_INTO = (*COPYING, *(v for v in VARIANTS if v.endswith(ENDPOINT)), "rope", "alibi")
ATTENTION = experiment("attention-by-length", LOOKED_INTO, run_attention)
