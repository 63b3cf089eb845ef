"""Everything that only a GPU can tell, in one run of under ten minutes: exactness in bfloat16, and timings.

Exactness: every case on every backend that takes it, output and gradients against `reference_attention` in float64, beside
the error of scaled_dot_product_attention in the same dtype. Timings: forward and forward + backward of sdpa and of every
backend at growing lengths, and one decoding step, as ratios to sdpa within a round. Writes results/attention-gpu.json after
every part, so that a run cut short keeps what it has. `--device cpu --quick` runs the same code small, as a check of itself.
"""

import argparse
import json
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import hf_longattn
from hf_longattn import LongAttnConfig, Rotation

RESULT = Path(__file__).parent / "results" / "attention-gpu.json"
preset = LongAttnConfig.preset
CASES = {
    "plain": LongAttnConfig(),
    "scale_invariant": preset("scale_invariant"),
    "scale_invariant, sinks": preset("scale_invariant", sink_tokens=4, tau=3.0),
    "alibi": preset("alibi"),
    "infoscale": preset("infoscale", train_length=256),
    "cosscale": preset("cosscale", scale=16.0),
    "adaptive_temperature": preset("adaptive_temperature"),
    "scale_invariant+adaptive_temperature": preset("scale_invariant+adaptive_temperature"),
    "rerope": preset("rerope", window=300),
    "streaming": preset("streaming", window=300),
}
BACKENDS = ("sdpa", "flash", "flex", "triton", "tiled")


def inputs(length: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: str, grad: bool) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((heads, length), (kv_heads, length), (kv_heads, length))
    return [torch.randn(1, h, n, dim, device=device, dtype=dtype, requires_grad=grad) for h, n in shapes]


def rotation(dim: int, device: str) -> Rotation:
    return Rotation(10_000.0 ** (-torch.arange(0, dim, 2, device=device).float() / dim))


def errors(call: Callable[..., Tensor], tensors: list[Tensor], want: list[Tensor]) -> dict[str, float]:
    """Largest errors of the output and of the three gradients, relative to the largest value of each."""
    fresh = [x.detach().clone().requires_grad_(x.requires_grad) for x in tensors]
    found = [call(*fresh)]
    if fresh[0].requires_grad:
        found[0].backward(torch.ones_like(found[0]))
        found += [x.grad for x in fresh]
    names = ("output", "d_query", "d_key", "d_value")
    return {n: float((a.double() - b).abs().max() / b.abs().max()) for n, a, b in zip(names, found, want, strict=False)}


def exactness(device: str, length: int, dtype: torch.dtype) -> list[dict]:
    rows = []
    for name, config in CASES.items():
        tensors = inputs(length, 8, 2, 64, dtype, device, grad=device == "cuda")
        exact = [x.detach().double().requires_grad_() for x in tensors]
        turn = rotation(64, device)
        out = hf_longattn.reference_attention(*exact, config, rotation=turn)
        out.backward(torch.ones_like(out))
        want = [out.detach(), *(x.grad for x in exact)]
        providers = {
            b: (lambda q, k, v, b=b, c=config, r=turn: hf_longattn.attention(q, k, v, c, backend=b, rotation=r))
            for b in BACKENDS
        }
        if name == "plain":
            providers["torch sdpa"] = lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        for provider, call in providers.items():
            row = {"case": name, "backend": provider, "dtype": str(dtype).removeprefix("torch."), "length": length}
            try:
                rows.append(row | errors(call, tensors, want))
            except Exception as error:
                rows.append(row | {"refused": str(error).splitlines()[0][:200], "type": type(error).__name__})
                if not isinstance(error, (ValueError, NotImplementedError)):
                    traceback.print_exc()
            print(rows[-1], flush=True)
    return rows


def once(call: Callable[[], Tensor], device: str, backward: bool) -> float:
    start = time.perf_counter()
    out = call()
    if backward:
        out.backward(torch.ones_like(out))
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak(call: Callable[[], Tensor], device: str, backward: bool) -> float | None:
    """MiB that a call takes beyond its inputs."""
    if device != "cuda":
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    once(call, device, backward)
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def timing(device: str, length: int, queries: int, backward: bool, dtype: torch.dtype, rounds: int) -> list[dict]:
    q, k, v = inputs(length, 16, 16, 128, dtype, device, grad=backward)
    q = q[:, :, -queries:]
    turn, causal = rotation(128, device), queries > 1
    providers: dict[str, Callable[[], Tensor]] = {
        "torch sdpa": lambda: scaled_dot_product_attention(q, k, v, is_causal=causal)
    }
    for name in ("scale_invariant", "infoscale", "adaptive_temperature", "rerope"):
        config = CASES[name] if name != "rerope" else preset("rerope", window=max(length // 4, 1))
        for backend in ("auto", "flex", "triton"):
            if backend != "flex" or name == "scale_invariant":
                providers[f"{name}, {backend}"] = lambda c=config, b=backend: hf_longattn.attention(
                    q, k, v, c, backend=b, rotation=turn
                )
    mode = "decode" if queries == 1 else "forward+backward" if backward else "forward"
    for name, call in list(providers.items()):
        try:
            once(call, device, backward)
        except Exception as error:
            print(f"{name}: {mode} at {length} does not run: {str(error).splitlines()[0][:200]}", flush=True)
            del providers[name]
    peaks = {name: peak(call, device, backward) for name, call in providers.items()}
    times = [{n: once(c, device, backward) for n, c in providers.items()} for _ in range(rounds)]
    rows = []
    for name in providers:
        ratios = [t[name] / t["torch sdpa"] for t in times]
        p20, *_, p80 = statistics.quantiles(ratios, n=5, method="inclusive")
        row = {"provider": name, "mode": mode, "length": length, "seconds": statistics.median(t[name] for t in times)}
        row["peak_mib"] = peaks[name]
        rows.append(row | {"ratio": statistics.median(ratios), "ratio_p20": p20, "ratio_p80": p80})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="small sizes, and no result file")
    parser.add_argument("--minutes", type=float, default=8.0, help="start no further part after this long")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    start, dtype = time.perf_counter(), torch.bfloat16
    lengths = (256,) if args.quick else (4096, 16384, 65536)
    result: dict = {
        "command": f"python benchmarks/gpu.py {' '.join(sys.argv[1:])}".strip(),
        "date": datetime.now(UTC).date().isoformat(),
        "what": "timings: batch 1, 16 heads, head_dim 128, bfloat16, causal",
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        "versions": {"hf_longattn": hf_longattn.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "exactness": [],
        "timings": [],
    }
    parts: list[tuple[str, Callable[[], list[dict]]]] = [
        ("exactness", lambda: exactness(args.device, 128 if args.quick else 1024, dtype)),
        ("exactness", lambda: exactness(args.device, 128 if args.quick else 1024, torch.float32)),
    ]
    rounds = 2 if args.quick else 15
    for n in lengths:
        parts.append(("timings", lambda n=n: timing(args.device, n, 1, False, dtype, rounds)))
        parts.append(("timings", lambda n=n: timing(args.device, n, n, False, dtype, rounds)))
        if n <= 16384 and args.device == "cuda":
            parts.append(("timings", lambda n=n: timing(args.device, n, n, True, dtype, rounds)))
    for kind, part in parts:
        if time.perf_counter() - start > 60 * args.minutes:
            print("out of time: the rest is left out")
            break
        try:
            result[kind] += part()
        except Exception:
            traceback.print_exc()
        if not args.quick:
            args.out.parent.mkdir(exist_ok=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
