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
#: Other methods, as users get them (backend "auto"), beside sdpa, or beside the tiled kernel without a method.
preset = hf_longattn.LongAttnConfig.preset
FAMILY = {
    "scale_invariant": CONFIG,
    "infoscale": preset("infoscale", train_length=1024),
    "cosscale": preset("cosscale"),
    "adaptive_temperature": preset("adaptive_temperature"),
    "alibi": preset("alibi"),
}
REMAPS = {
    "rerope 4k": preset("rerope", window=4096),
    "windowed 4k": preset("windowed", window=4096),
    "streaming 4k": preset("streaming", window=4096),
    "lm_infinite 4k": preset("lm_infinite", window=4096),
}
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


def method(config: hf_longattn.LongAttnConfig, backend: str = "auto") -> Provider:
    rotation = hf_longattn.Rotation(10_000.0 ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM))
    return lambda q, k, v: hf_longattn.attention(q, k, v, config, backend=backend, rotation=rotation)


def family(mode: str, length: int, rounds: int) -> list[dict]:
    """Every method beside sdpa; in mode "decode" the last query alone against a full cache."""
    fused: Provider = sdpa if mode != "decode" else scaled_dot_product_attention
    return compare(mode, length, rounds, {"sdpa": fused} | {name: method(config) for name, config in FAMILY.items()})


def remaps(mode: str, length: int, rounds: int) -> list[dict]:
    """Position remaps and windows beside the tiled kernel without any of them (and, in decoding, beside sdpa)."""
    plain = scaled_dot_product_attention if mode == "decode" else method(hf_longattn.LongAttnConfig(), "tiled")
    chosen = {n: c for n, c in REMAPS.items() if n == "rerope 4k" or mode == "forward"}
    base = "sdpa" if mode == "decode" else "tiled, no method"
    return compare(mode, length, rounds, {base: plain} | {name: method(config) for name, config in chosen.items()})


def measure(mode: str, length: int, rounds: int) -> list[dict]:
    providers: dict[str, Provider] = {"sdpa": sdpa, "tiled": tiled}
    if mode == "forward":  # FlexAttention has no backward pass on the CPU
        providers["flex"] = flex(length)
    return compare(mode, length, rounds, providers)


def compare(mode: str, length: int, rounds: int, providers: dict[str, Provider]) -> list[dict]:
    """Times by provider, and ratios to the first."""
    tensors = inputs(length, grad=mode == "forward+backward")
    if mode == "decode":
        tensors[0] = tensors[0][:, :, -1:]
    first = next(iter(providers))
    for name, provider in list(providers.items()):
        try:
            run_once(provider, mode, tensors)  # warm up, compile
        except Exception as error:
            print(f"{name} does not run here: {str(error).splitlines()[0]}")
            del providers[name]
    times = [{name: run_once(p, mode, tensors) for name, p in providers.items()} for _ in range(rounds)]
    rows = []
    for name in providers:
        row = {"provider": name, "mode": mode, "length": length, "rounds": rounds, "ratio_to": first}
        row |= spread("seconds", [t[name] for t in times]) | spread("ratio", [t[name] / t[first] for t in times])
        rows.append(row)
        print(
            f"{mode:17} {length:6} {name:22} {1000 * row['seconds']:9.2f} ms  ratio to {first} {row['ratio']:.2f} "
            f"({row['ratio_p20']:.2f} to {row['ratio_p80']:.2f})",
            flush=True,
        )
    return rows


def spread(name: str, values: list[float]) -> dict[str, float]:
    p20, *_, p80 = statistics.quantiles(values, n=5, method="inclusive")
    found = {name: statistics.median(values), f"{name}_p20": p20, f"{name}_p80": p80}
    return {key: round(value, 5) for key, value in found.items()}


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
    for what, mode, length in (
        (family, "forward", 4096),
        (family, "forward+backward", 4096),
        (family, "decode", 8192),
        (remaps, "forward", 8192),
        (remaps, "forward", 16384),
        (remaps, "forward+backward", 8192),
        (remaps, "decode", 16384),
    ):
        rows += what(mode, length, 5 * args.rounds if mode == "decode" else max(args.rounds // 3, 3))
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
