"""Logits and gradients of every case, saved by one version of the package and compared by another.

    python tests/kit/regression.py save FILE       # before a change
    python tests/kit/regression.py check FILE      # after it: prints the largest differences, fails beyond 1e-6
    python tests/kit/regression.py check FILE --exact    # fails unless all are equal bit for bit

Tiny models of some families, a full pass forward and backward, and one through a cache in chunks; float32, one thread.
And single calls over every geometry of rows, with gradients and without, in float32 and bfloat16, with a model's sinks and
without.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools

import torch
from calls import ROTATION, SINKS, geometries, inputs
from cases import CASES, HEADS, families
from helpers import SCENARIOS, fresh, tokens
from torch import Tensor

from hf_longattn.core.attend import attend
from hf_longattn.core.call import Call

FAMILIES = ("llama", "gemma2", "gpt2")
BACKENDS = ("auto", "tiled", "reference")
TOLERANCE = 1e-6


def results() -> dict[str, Tensor]:
    out = {}
    for case, config in CASES.items():
        for family in (f for f in FAMILIES if f in families(case)):
            for backend in BACKENDS:
                model, name = fresh(family, config.replace(backend=backend)), f"{case} {family} {backend}"
                logits = model(tokens(), use_cache=False).logits
                logits.sin().sum().backward()
                out[f"{name} logits"] = logits.detach()
                out |= {f"{name} gradient {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
                out[f"{name} decoding"] = SCENARIOS["left_padded_dynamic_chunks"](model, tokens())
    return out


def single_calls() -> dict[str, Tensor]:
    out = {}
    ways = (
        (torch.float32, False, None),
        (torch.float32, True, None),
        (torch.float32, False, SINKS),
        (torch.bfloat16, False, None),
    )
    for (case, config), (geometry, (q_len, kv_len, rows)) in itertools.product(CASES.items(), geometries().items()):
        for dtype, grad, sinks in ways:
            name = f"{case} {geometry} {dtype} {'gradients' if grad else ''} {'sinks' if sinks is not None else ''}"
            leaves = [x.requires_grad_(grad) for x in inputs(h=HEADS, q=q_len, k=kv_len, d=6, dtype=dtype)]
            own = dataclasses.replace(rows)  # keeps nothing of the calls before
            result = attend(Call(*leaves, config.for_layer(0), own, 0.7, rotation=ROTATION, sink_logits=sinks))
            out[name] = result.detach()
            if grad:
                gradients = torch.autograd.grad(result.sin().sum(), leaves)
                out |= {f"{name} {n}": g for n, g in zip(("query", "key", "value"), gradients, strict=True)}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["save", "check"])
    parser.add_argument("file")
    parser.add_argument("--exact", action="store_true", help="let no bit differ")
    args = parser.parse_args()
    torch.set_num_threads(1)
    now = results() | single_calls()
    if args.what == "save":
        torch.save(now, args.file)
        return
    before = torch.load(args.file)
    if lost := before.keys() - now.keys():
        raise SystemExit(f"results that are gone: {sorted(lost)[:5]}")
    scale = {name: max(float(x.abs().max()), 1.0) for name, x in before.items()}
    worst = sorted(((float((now[n] - x).abs().max()) / scale[n], n) for n, x in before.items()), reverse=True)
    same = sum(torch.equal(now[n], x) for n, x in before.items())
    print(f"{len(worst)} tensors, {same} equal bit for bit; the largest differences:")
    for difference, name in worst[:8]:
        print(f"  {difference:.1e}  {name}")
    if worst[0][0] > TOLERANCE or (args.exact and same < len(before)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
