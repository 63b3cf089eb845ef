"""Compiles the Triton kernels for a GPU without one: each launch as `kernels.triton` and `kernels.programs` make it.

Prints a line of JSON per launch: shared memory, registers, and stack (spilled registers) in bytes a thread, and ends with an
error if a call has no tiles that fit. Needs triton with its ptxas (Linux), and a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from hf_longattn.core.geometry import AttentionLayout
from hf_longattn.core.kernels import programs
from hf_longattn.core.kernels import triton as launcher
from hf_longattn.core.kernels.kernel import KernelCall
from hf_longattn.core.plan import LogitSpec

#: Shared memory that a program may have, by target: an H100's, an A100's, an RTX 4090's, an RTX 5090's.
SHARED = {90: 232448, 80: 166912, 89: 101376, 120: 101376}


class Driver:
    """What triton asks of a driver before it compiles."""

    def __init__(self, target: int) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.target, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """Stands in for a kernel: a launch compiles, reports and computes nothing; as on a device, too much memory is an error."""

    def __init__(self, kernel: Any, target: int, report: list[dict[str, Any]]) -> None:
        self.kernel, self.limit, self.report = kernel, SHARED[target], report

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            made = self.kernel.warmup(*args, grid=grid, **options)
            row = {"kernel": self.kernel.__name__, "shared": made.metadata.shared} | registers(made.asm["cubin"])
            row |= {name.lower(): options[name] for name in ("ROWS", "COLUMNS", "num_warps", "num_stages") if name in options}
            self.report.append(row | {"wgmma": made.asm["ptx"].count("wgmma.mma_async")})
            if made.metadata.shared > self.limit:
                raise triton.runtime.errors.OutOfResources(made.metadata.shared, self.limit, "shared memory")

        return launch


def registers(cubin: bytes) -> dict[str, int]:
    """Registers a thread, and the bytes of its stack: what was spilled."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name.lower(): int(re.search(rf"{name}:(\d+)", said)[1]) for name in ("REG", "STACK")}


def attention(dtype: torch.dtype, head_dim: int, options: dict[str, Any]) -> None:
    """One call of the Triton kernels with gradients, on tensors that are never read."""
    heads, kv_heads, n, own = 16, 4, 4096, dict(options)
    query, key, value = (torch.empty(1, h, n, head_dim, dtype=dtype, requires_grad=True) for h in (heads, kv_heads, kv_heads))
    entropy, dropout, masked = (own.pop(name, None) for name in ("entropy", "dropout", "masked"))
    if own.pop("map", None):
        own["gain"] = own["bias"] = torch.ones(1, 16384)  # long enough for polynomials
    for name in ("row_scale", "bias_scale"):
        if own.pop(name, None):
            own[name] = torch.ones(1, heads, n, requires_grad=True)
    rows = AttentionLayout.causal(n, n, None, 0, torch.device("cpu"))
    if masked:
        rows = rows.masked(torch.ones(1, 1, 1, n, dtype=torch.bool))
    asked: dict[str, Any] = {"with_lse": True, "with_entropy": bool(entropy), "dropout": dropout or 0.0}
    call = KernelCall(query, key, None if entropy else value, rows, LogitSpec(0.1, **own), **asked)
    out, lse, h = launcher.run(call)
    sum(x.float().sum() for x in (out, lse, h) if x.numel()).backward()


def decoding(dtype: torch.dtype, head_dim: int, options: dict[str, Any]) -> None:
    """The logits of few queries, and what turns and joins."""
    n, rows = 4096, options.get("queries", 1)
    query, key = torch.empty(1, 32, rows, head_dim, dtype=dtype), torch.empty(1, 8, n, head_dim, dtype=dtype)
    cos = [torch.ones(1, length, 1, head_dim // 2) for length in (rows, n)]
    turns = [(x, x) if options.get("turn") else None for x in cos]
    mask = torch.ones(1, 1, 1, n, dtype=torch.bool) if options.get("masked") else None
    interval = programs.DeviceSegment(torch.zeros(1, rows, 5, dtype=torch.int32), mask, None, None, *turns)
    table = torch.ones(1, 8192) if options.get("map") else None
    spec, layout = LogitSpec(0.1, options.get("softcap"), table, table), (0, head_dim // 2, False)
    logits = programs.scores(query, key, [interval], spec, 0.1, None, options.get("normed", False), layout)
    programs.entropies(logits)
    programs.weights(logits, logits.new_ones(logits.shape[:3]), logits.new_ones(32), dtype)
    programs.weights(logits, None, None, dtype, (0.5, math.inf, -1.0, 2.0, 1.0))
    programs.turned(key, cos[1], cos[1], layout, None)
    programs.join(key, torch.ones(1, 8, n), key, torch.ones(1, 8, n))


CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (attention, {}),
    "map": (attention, {"map": True}),
    "entropy": (attention, {"entropy": True}),
    "map, entropy": (attention, {"map": True, "entropy": True}),
    "map, row bias": (attention, {"map": True, "bias_scale": True}),
    "softcap, row factor": (attention, {"softcap": 30.0, "row_scale": True}),
    "map, masked": (attention, {"map": True, "masked": True}),
    "dropout": (attention, {"dropout": 0.1}),
    "few": (decoding, {}),
    "few, map, softcap, masked": (decoding, {"map": True, "softcap": 30.0, "masked": True}),
    "few, turned": (decoding, {"turn": True}),
    "few, norms": (decoding, {"normed": True}),
    "16, turned": (decoding, {"turn": True, "queries": 16}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="*", type=int, default=[90], choices=list(SHARED))
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--head-dims", nargs="*", type=int, default=[64, 80, 96, 128, 256])
    parser.add_argument("--calls", nargs="*", default=list(CALLS))
    parser.add_argument("--case", nargs=4, action="append", default=[], metavar=("TARGET", "DTYPE", "HEAD_DIM", "CALL"))
    args = parser.parse_args()
    cases = [(int(target), dtype, int(head_dim), call) for target, dtype, head_dim, call in args.case]
    cases = cases or list(itertools.product(args.targets, args.dtypes, args.head_dims, args.calls))
    warnings.filterwarnings("error", message="Triton (cannot|failed)")  # ours; it has warnings of its own
    failed, report = 0, list[dict[str, Any]]()
    compiled = [(launcher.kernels, f"{name}_kernel") for name in ("forward", "query", "key", "ranges")]
    compiled += [(programs.kernels, f"{name}_kernel") for name in ("scores", "entropies", "weights", "turn", "join")]
    own = {name: getattr(module, name) for module, name in compiled}

    for target, group in itertools.groupby(cases, key=lambda case: case[0]):
        triton.runtime.driver.set_active(Driver(target))
        launcher._shared_memory = lambda device, limit=SHARED[target]: limit
        launcher._has_warp_groups = lambda device, major=target // 10: major in (9, 10)
        for module, name in compiled:
            setattr(module, name, Compiled(own[name], target, report))
        for _, dtype, head_dim, call in group:
            case = {"target": target, "dtype": dtype, "head_dim": head_dim, "call": call}
            launcher._FAILED.clear()
            try:
                run, options = CALLS[call]
                run(getattr(torch, dtype), head_dim, options)
            except Exception as error:
                failed += 1
                print(json.dumps(case | {"error": f"{type(error).__name__}: {error}"[:600]}), flush=True)
            for row in report:
                print(json.dumps(case | row), flush=True)
            report.clear()
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
