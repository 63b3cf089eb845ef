"""Speed and memory of the tiled kernel beside torch's scaled_dot_product_attention, on the CPU.

Every round times each provider once, one after the other, and the ratio to sdpa is taken within the round: what else the
machine does then hits all alike. Memory is the peak of a fresh process that does nothing else (Linux).
Writes results/attention-cpu.json.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import hf_longattn
from hf_longattn.attention import distance_tables

HEADS, HEAD_DIM, THREADS = 8, 64, 2
CONFIG = hf_longattn.LongAttnConfig.preset("scale_invariant")
CASES = [("forward", 4096), ("forward", 8192), ("forward+backward", 4096), ("forward+backward", 8192)]
MEMORY_LENGTH = 16384
RESULT = Path(__file__).parent / "results" / "attention-cpu.json"
Provider = Callable[[Tensor, Tensor, Tensor], Tensor]


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return hf_longattn.attention(q, k, v, CONFIG, backend="tiled")


def flex(length: int) -> Provider:
    """FlexAttention, compiled, with the same tables."""
    gain, bias = distance_tables(CONFIG.logit_map, HEADS, length, torch.empty(0))
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, length, length, device="cpu")
    compiled = torch.compile(flex_attention)

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        t = (q - kv).abs()
        return gain[0, t] * s + bias[0, t]

    return lambda q, k, v: compiled(q, k, v, score, mask)


def inputs(length: int, grad: bool) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, HEADS, length, HEAD_DIM, requires_grad=grad) for _ in range(3)]


def run_once(provider: Provider, mode: str, tensors: list[Tensor]) -> float:
    start = time.perf_counter()
    out = provider(*tensors)
    if mode == "forward+backward":
        out.backward(torch.ones_like(out))
    return time.perf_counter() - start


def measure(mode: str, length: int, rounds: int) -> list[dict]:
    providers: dict[str, Provider] = {"sdpa": sdpa, "tiled": tiled}
    if mode == "forward":  # FlexAttention has no backward pass on the CPU
        providers["flex"] = flex(length)
    tensors = inputs(length, grad=mode == "forward+backward")
    for name, provider in list(providers.items()):
        try:
            run_once(provider, mode, tensors)  # warm up, compile
        except Exception as error:
            print(f"{name} does not run here: {str(error).splitlines()[0]}")
            del providers[name]
    times = [{name: run_once(p, mode, tensors) for name, p in providers.items()} for _ in range(rounds)]
    rows = []
    for name in providers:
        row = {"provider": name, "mode": mode, "length": length, "rounds": rounds}
        row |= spread("seconds", [t[name] for t in times]) | spread("ratio", [t[name] / t["sdpa"] for t in times])
        rows.append(row)
        print(f"{mode:17} {length:6} {name:6} {row['seconds']:7.3f} s  ratio {row['ratio']:.2f} ({row['ratio_p20']:.2f} to "
              f"{row['ratio_p80']:.2f})", flush=True)  # fmt: skip
    return rows


def spread(name: str, values: list[float]) -> dict[str, float]:
    p20, *_, p80 = statistics.quantiles(values, n=5, method="inclusive")
    found = {name: statistics.median(values), f"{name}_p20": p20, f"{name}_p80": p80}
    return {key: round(value, 4) for key, value in found.items()}


def peak_memory(provider: str, mode: str) -> dict:
    """Peak resident MiB of a fresh process that runs one call at MEMORY_LENGTH."""
    command = [sys.executable, __file__, "--memory", provider, mode]
    mib = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"{mode:17} {MEMORY_LENGTH:6} {provider:6} {mib:5} MiB at the peak", flush=True)
    return {"provider": provider, "mode": mode, "length": MEMORY_LENGTH, "peak_mib": mib}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--memory", nargs=2, metavar=("PROVIDER", "MODE"), help="run one call and print this process's peak MiB"
    )
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    if args.memory:
        name, mode = args.memory
        run_once({"sdpa": sdpa, "tiled": tiled}[name], mode, inputs(MEMORY_LENGTH, grad=mode == "forward+backward"))
        status = Path("/proc/self/status").read_text()  # getrusage would inherit the parent's peak
        print(int(status.split("VmHWM:")[1].split()[0]) // 1024)
        return
    rows = [row for mode, length in CASES for row in measure(mode, length, args.rounds)]
    rows += [peak_memory(name, mode) for mode in ("forward", "forward+backward") for name in ("sdpa", "tiled")]
    result = {
        "command": "make bench" + (f' ARGS="{" ".join(sys.argv[1:])}"' if sys.argv[1:] else ""),
        "date": datetime.now(UTC).date().isoformat(),
        "what": f"scale_invariant, batch 1, {HEADS} heads, head_dim {HEAD_DIM}, float32, causal, {THREADS} threads",
        "versions": {"hf_longattn": hf_longattn.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "cpu": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "rows": rows,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(f"Written: {RESULT}")


if __name__ == "__main__":
    main()
