"""What `test_distributed.py` runs in each of two processes: `python distributed_worker.py JOB RANK STORE OUT`."""

from __future__ import annotations

import datetime
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from cases import CASES
from helpers import fresh, tokens
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_longattn

RANKS = 2
#: One of each kind: nothing per head, slopes, calibrated and learned factors per head, per key head, windows, constants.
SPLIT = ("infoscale+cosscale", "mapped+adaptive", "alibi", "calibrated", "logn_learned", "leaky_by_layer", "streaming")
SPLIT += ("output_standardise",)


def made(case: str) -> PreTrainedModel:
    """The tiny Llama under a case, with learned factors that differ."""
    m = fresh("llama", CASES[case])
    for name, parameter in m.named_parameters():
        if ".longattn." in name:
            parameter.data.copy_(torch.linspace(0.5, 1.5, parameter.numel()))
    return m


def step(m: Any, **inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and the loss after its backward pass."""
    logits = m(use_cache=False, **inputs).logits
    logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    loss = logits.float().log_softmax(-1)[..., 3].mean()
    loss.backward()
    return logits.detach(), loss.detach()


def gradients(m: torch.nn.Module) -> dict[str, Tensor]:
    out = {}
    for name, parameter in m.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            out[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
    return out


def tensor_parallel(out: Path) -> dict[str, Any]:
    results = {}
    for case in SPLIT:
        m = AutoModelForCausalLM.from_pretrained(out / case, tp_plan="auto").train()
        logits, _ = step(m, input_ids=tokens())
        results[case] = {"logits": logits, "gradients": gradients(m)}
    try:
        m = AutoModelForCausalLM.from_pretrained(out / "output_layer_norm", tp_plan="auto")
        m(tokens())
    except NotImplementedError as error:
        results["refused"] = str(error)
    return results


JOBS = {f.__name__: f for f in (tensor_parallel,)}


if __name__ == "__main__":
    job, rank, store, out = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", hf_longattn.UntrainedWarning)
    torch.distributed.init_process_group(
        "gloo", f"file://{store}", rank=int(rank), world_size=RANKS, timeout=datetime.timedelta(seconds=60)
    )
    found = JOBS[job](Path(out))
    torch.save(found, Path(out) / f"{job}.{rank}")
    torch.distributed.destroy_process_group()
