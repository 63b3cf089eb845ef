"""Compiles the Triton kernels for an H200 without one: each launch as `kernels.triton` makes it, to machine code.

Prints a line of JSON per launch: shared memory, registers, and stack (spilled registers) in bytes a thread. Needs triton with
its ptxas (Linux), and a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from hf_longattn.core.geometry import Rows
from hf_longattn.core.kernels import triton as launcher
from hf_longattn.core.kernels.kernel import KernelCall, LogitSpec, Pages

TARGET = GPUTarget("cuda", 90, 32)


class Driver:
    """What triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """Stands in for a kernel: a launch compiles, reports and computes nothing."""

    def __init__(self, kernel: Any, report: list[dict[str, Any]]) -> None:
        self.kernel, self.report = kernel, report

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            made = self.kernel.warmup(*args, grid=grid, **options)
            self.report.append({"kernel": self.kernel.__name__, "shared": made.metadata.shared} | registers(made.asm["cubin"]))

        return launch


def registers(cubin: bytes) -> dict[str, int]:
    """Registers a thread, and the bytes of its stack: what was spilled."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name.lower(): int(re.search(rf"{name}:(\d+)", said)[1]) for name in ("REG", "STACK")}


def launch(
    dtype: torch.dtype, head_dim: int, mapped: bool, bias_scale: bool, entropy: bool, value: bool, pages: bool, decode: bool
) -> None:
    """One call of the public kernel with gradients, on tensors that are never read."""
    heads, kv_heads, q_len, kv_len = 16, 4, 1 if decode else 4096, 4096
    query = torch.empty(1, heads, q_len, head_dim, dtype=dtype, requires_grad=not decode)
    key, other = (torch.empty(1, kv_heads, kv_len, head_dim, dtype=dtype, requires_grad=not decode) for _ in range(2))
    options: dict[str, Any] = {}
    if mapped:
        options["gain"] = options["bias"] = torch.ones(1, 8192)
    if bias_scale:
        options["bias_scale"] = torch.ones(1, heads, q_len, requires_grad=not decode)
    rows = Rows.causal(q_len, kv_len, None, 0, torch.device("cpu"))
    if pages:
        half, angles = query.detach(), torch.ones(1, kv_len, 1, head_dim)
        table = torch.zeros(1, kv_len // 16, dtype=torch.int32)
        turned = Pages(table) if mapped else Pages(table, half, angles, angles)
        cache = torch.empty(kv_len // 16, kv_heads, 16, 2 * head_dim, dtype=dtype)
        launcher.run(KernelCall(half, *cache.split(head_dim, -1), rows, LogitSpec(0.1, **options), pages=turned))
        return
    asked = {"with_lse": not value, "with_entropy": entropy}
    out, lse, h = launcher.run(KernelCall(query, key, other if value else None, rows, LogitSpec(0.1, **options), **asked))
    if not decode:
        sum(x.float().sum() for x in (out, lse, h) if x.numel()).backward()


#: mapped, bias_scale, entropy, value, pages: plain; scale-invariant; the entropy pass of an adaptive temperature, without a
#: map and with one; and what it then runs; and keys in pages that are re-rotated as they are read.
CALLS = {
    "plain": (False, False, False, True, False),
    "map": (True, False, False, True, False),
    "entropy": (False, False, True, False, False),
    "map, entropy": (True, False, True, False, False),
    "map, row bias": (True, True, False, True, False),
    "pages, remap": (False, False, False, True, True),
    "pages, map": (True, False, False, True, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--head-dims", nargs="*", type=int, default=[64, 80, 96, 128, 256])
    parser.add_argument("--calls", nargs="*", default=list(CALLS))
    args = parser.parse_args()
    triton.runtime.driver.set_active(Driver())
    report: list[dict[str, Any]] = []
    for name in ("forward_kernel", "query_kernel", "key_kernel"):
        setattr(launcher.kernels, name, Compiled(getattr(launcher.kernels, name), report))
    for dtype, head_dim, call, decode in itertools.product(args.dtypes, args.head_dims, args.calls, (False, True)):
        case = {"dtype": dtype, "head_dim": head_dim, "call": call, "decode": decode}
        try:
            launch(getattr(torch, dtype), head_dim, *CALLS[call], decode=decode)
        except Exception as error:
            print(json.dumps(case | {"error": f"{type(error).__name__}: {error}"[:600]}), flush=True)
        for row in report:
            print(json.dumps(case | row), flush=True)
        report.clear()


if __name__ == "__main__":
    main()
