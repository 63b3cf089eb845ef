"""Speed and memory beside torch's own attention, on the CPU: attention alone, and a whole model's step.

The parts that `make bench` runs take about eight minutes; lengths beyond 8k are in parts called "long", which run where
`--only` names them; "decode turned" is measured with `--threads 1`. Memory is the peak of a fresh process. Writes
results/attention-cpu.json (see timing.py) after every part; `python -m lab.pages` then rewrites docs/speed.md and its
pictures.
"""

import itertools
import subprocess
import sys

import torch
from torch import Tensor

from hf_longattn.core.kernels.sdpa import few_queries
from lab.speed.model_step import model_rows
from lab.speed.timing import (
    DECODED,
    EACH_TIME,
    METHODS,
    OTHERS,
    PEER,
    RESULTS,
    TURNED,
    Call,
    Calls,
    Parts,
    Rows,
    Shape,
    about_call,
    arguments,
    as_transformers,
    attention_calls,
    attention_rows,
    compare,
    peak_of_this_process,
    run_parts,
    seen_by_the_last,
)

DTYPE = torch.float32
MAP, EAGER, FLEX = ("scale_invariant", "auto"), ("none", "eager"), ("scale_invariant", "torch flex")
FAMILY = [
    (name, "auto") for name in METHODS if name not in ("none", "scale_invariant+adaptive_temperature") and "," not in name
]
BANDED = [(name, "auto") for name in METHODS if "window" in name]
REST = [(name, "auto") for name in (*(n for n in TURNED if n not in METHODS), *OTHERS)]
ONCE = [
    (name, backend) for name in TURNED for backend in ("auto", EACH_TIME) if backend == "auto" or "string_remap" not in name
]
#: Query heads, key heads, head_dim of SmolLM2 135M, Llama 3 8B, Gemma 3 270M; bytes of keys and values that no cache holds.
OWN, COLD = ((9, 3, 64), (32, 8, 128), (4, 1, 256)), 150_000_000
#: Lengths by mode of calls in bfloat16, of the first two of these shapes.
HALF = {"forward": (2048, 4096, 8192), "decode": (4096, 16384, 65536)}
WITHOUT = ("none", "tiled")  # what the tiled kernel costs where no method needs it


def shape(length: int, kv_heads: int = 8) -> Shape:
    return Shape(heads=8, kv_heads=kv_heads, length=length, head_dim=64)


def parts() -> Parts:
    result: Parts = {}

    def add(name: str, length: int, chosen: list[tuple[str, str]], rounds: int, kv_heads: int = 8) -> None:
        mode = name.removeprefix("long ").split(",")[0]
        result[f"{name} {length}"] = lambda: attention_rows(shape(length, kv_heads), mode, DTYPE, "cpu", chosen, rounds)

    for length, rounds in ((1024, 15), (2048, 15), (4096, 9)):
        add("forward", length, [*FAMILY, WITHOUT, EAGER, FLEX], rounds)
    add("forward", 8192, [*FAMILY, WITHOUT, *BANDED, FLEX], 5)
    add("forward, the rest", 8192, REST, 5)
    for length, rounds in ((1024, 15), (2048, 9), (4096, 5)):
        add("forward+backward", length, [*FAMILY, EAGER], rounds)
    add("forward+backward", 8192, [MAP, ("rerope, window 4096", "auto")], 3)
    for length in (1024, 4096, 8192, 16384, 65536):
        add("decode", length, [*FAMILY, ("rerope, window 4096", "auto")], 15 if length < 65536 else 5)
        add("decode, grouped", length, [MAP, FAMILY[2]], 15 if length < 65536 else 5, kv_heads=2)
    for mode, dtype, length in itertools.product(DECODED, (torch.float32, torch.bfloat16), (8192, 16384, 65536)):
        name = f"long {mode} turned {str(dtype).removeprefix('torch.')} {length}"
        result[name] = lambda a=(mode, length, dtype): turned_rows(*a)
    for mode, dtype in itertools.product(DECODED, (torch.float32, torch.bfloat16)):
        name = f"long unchanged, {mode} {str(dtype).removeprefix('torch.')}"
        result[name] = lambda a=(mode, dtype): torch.no_grad()(own_rows)(*a)
    for (heads, kv_heads, head_dim), (mode, lengths) in itertools.product(OWN[:2], HALF.items()):
        for length in lengths:
            its = Shape(heads, kv_heads, length, head_dim)
            result[f"long {mode} bfloat16 {heads}/{kv_heads} {length}"] = lambda a=(its, mode): half_rows(*a)
    for name in (PEER, MAP, EAGER):
        for mode in ("forward", "forward+backward"):
            for length in (2048, 4096) if name == EAGER else (4096, 8192, 16384):
                result[f"memory {' '.join(name)} {mode} {length}"] = lambda a=(name, mode, length): memory_row(*a)
    result["model forward 2048"] = lambda: model_rows("forward", 2048, DTYPE, "cpu", 3)
    result["model LoRA step 512"] = lambda: model_rows("LoRA step", 512, DTYPE, "cpu", 3)
    result["model decode 8192"] = lambda: model_rows("decode", 8192, DTYPE, "cpu", 9)
    add("long forward", 16384, [MAP, *FAMILY[2:3], WITHOUT, *BANDED], 3)
    add("long forward", 32768, [MAP, *BANDED[:2]], 2)
    add("long forward", 65536, [MAP, *BANDED[:2]], 1)
    add("long forward+backward", 16384, [MAP], 2)
    add("long forward+backward", 32768, [MAP], 1)
    for mode, length in (("forward", 32768), ("forward", 65536), ("forward+backward", 32768)):
        for name in (PEER, MAP):
            result[f"long memory {' '.join(name)} {mode} {length}"] = lambda a=(name, mode, length): memory_row(*a)
    return result


def turned_rows(mode: str, length: int, dtype: torch.dtype) -> Rows:
    """A decoded token, or eight, in SmolLM2's shape, whose keys were turned once; of one also, turned at each token."""
    its = Shape(heads=9, kv_heads=3, length=length, head_dim=64)
    about = about_call(its, mode, dtype, "cpu")
    about["mode"] += f" turned {about['dtype']}"
    rounds, repeat = (9, 2) if length < 65536 else (5, 1)
    chosen = ONCE if mode == "decode" else [*((name, "auto") for name in TURNED), MAP, ("adaptive_temperature", "auto")]
    return compare(attention_calls(its, mode, dtype, "cpu", [PEER, *chosen]), rounds, about, PEER, repeat)


def half_rows(its: Shape, mode: str) -> Rows:
    """Calls in bfloat16, which CPUs with units for it compute in a fraction of the time."""
    about = about_call(its, mode, torch.bfloat16, "cpu")
    about["mode"] += f" bfloat16 {its.heads}/{its.kv_heads}"
    chosen = [*FAMILY, *([BANDED[0]] if its.length > 4096 else [])]
    return compare(attention_calls(its, mode, torch.bfloat16, "cpu", [PEER, *chosen]), 7, about, PEER)


def own_rows(mode: str, dtype: torch.dtype) -> Rows:
    """An unchanged layer behind a cache, as transformers' sdpa computes it and as ours: by shape, each with cold caches."""
    rows = []
    for (heads, kv_heads, head_dim), length in itertools.product(OWN, (2048, 8192, 32768)):
        its = Shape(heads, kv_heads, length, head_dim)
        layers = 1 + COLD // (2 * kv_heads * length * head_dim * dtype.itemsize)
        query, *_ = its.tensors(mode, dtype, "cpu")
        caches = [its.tensors(mode, dtype, "cpu")[1:] for _ in range(layers)]
        calls: Calls = {
            PEER: lambda q=query, kv=caches: [as_transformers(q, *x) for x in kv],  # type: ignore[misc]
            (f"{heads} / {kv_heads}, {head_dim}", str(dtype).removeprefix("torch.")): own_of(query, caches),
        }
        about = about_call(its, mode, dtype, "cpu")
        about["mode"] = f"unchanged, {mode}"
        rows += compare(calls, 7, about, PEER)
    return rows


def own_of(query: Tensor, caches: list[list[Tensor]]) -> Call:
    """The layers as `few_queries` computes them."""
    key = caches[0][0]
    mask = seen_by_the_last(query.shape[2], key.shape[2], key.device)
    if mask is not None:
        mask = mask.repeat(1, 1, query.shape[1] // key.shape[1], 1)
    return lambda: [few_queries(query, key, value, mask) for key, value in caches]


def memory_row(name: tuple[str, str], mode: str, length: int) -> Rows:
    """Peak MiB beyond the inputs, in a fresh process."""
    command = [sys.executable, __file__, "--memory", *name, mode, str(length)]
    mib = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    print(f"{mode:17} {length:6} {name[0]:24} {name[1]:10} {mib:10.1f} MiB", flush=True)
    return [{"method": name[0], "backend": name[1], **about_call(shape(length), mode, DTYPE, "cpu"), "peak_mib": mib}]


def main() -> None:
    parser = arguments(__doc__, RESULTS / "attention-cpu.json")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory", nargs=4, metavar=("METHOD", "BACKEND", "MODE", "LENGTH"), help="one call's peak MiB")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.memory:
        method, backend, mode, length = args.memory
        for n in (256, int(length)):  # the first call loads libraries
            calls = attention_calls(shape(n), mode, DTYPE, "cpu", [(method, backend)])
            peak = peak_of_this_process(calls[method, backend])
        print(peak)
    else:
        chosen = {n: p for n, p in parts().items() if args.only or not n.startswith("long")}
        run_parts(chosen, args, "python lab/speed/attention.py")


if __name__ == "__main__":
    main()
