"""Everything that only a GPU can tell, in one run of under ten minutes: exactness in bfloat16 and float32, and timings.

Exactness: every case on every backend that takes it, output and gradients against `reference_attention` in float64, beside
the error of scaled_dot_product_attention in the same dtype. Timings: the table of timing.py, attention alone and a whole
model's step; "tiles" tries other sizes of the Triton kernels' tiles. Writes results/attention-gpu.json after every part, the
most important first; a run cut short keeps what it has and `--resume` goes on. `--device cpu --quick` runs the same code
small, as a check of itself.
"""

import contextlib
import itertools
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import hf_longattn
from hf_longattn import LongAttnConfig, Rotation
from hf_longattn.core.kernels import triton as triton_launcher
from hf_longattn.core.kernels.triton import Blocks
from lab.speed.model_step import model_rows
from lab.speed.timing import RESULTS, Parts, Rows, Shape, arguments, attention_rows, run_parts

preset = LongAttnConfig.preset
CASES = {
    "scale_invariant": preset("scale_invariant"),
    "plain": LongAttnConfig(),
    "adaptive_temperature": preset("adaptive_temperature"),
    "scale_invariant, sinks": preset("scale_invariant", sink_tokens=4, tau=3.0),
    "alibi": preset("alibi"),
    "infoscale": preset("infoscale", train_length=256),
    "cosscale": preset("cosscale", scale=16.0),
    "scale_invariant+adaptive_temperature": preset("scale_invariant+adaptive_temperature"),
    "rerope": preset("rerope", window=300),
    "streaming": preset("streaming", window=300),
}
BACKENDS = ("sdpa", "flash", "triton", "bands", "tiled")


def errors(call: Callable[..., Tensor], tensors: list[Tensor], want: list[Tensor]) -> dict[str, float]:
    """Largest errors of the output and of the three gradients, relative to the largest value of each."""
    fresh = [x.detach().clone().requires_grad_(x.requires_grad) for x in tensors]
    outputs = [call(*fresh)]
    if fresh[0].requires_grad:
        outputs[0].backward(torch.ones_like(outputs[0]))
        outputs += [x.grad for x in fresh]
    names = ("output", "d_query", "d_key", "d_value")
    return {n: float((a.double() - b).abs().max() / b.abs().max()) for n, a, b in zip(names, outputs, want, strict=False)}


def exactness(name: str, shape: Shape, dtype: torch.dtype, device: str, backends: tuple[str, ...]) -> Rows:
    config, rows = CASES[name], []
    tensors = shape.tensors("forward+backward" if device == "cuda" else "forward", dtype, device)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    turn = Rotation(10_000.0 ** (-torch.arange(0, shape.head_dim, 2, device=device).float() / shape.head_dim))
    out = hf_longattn.reference_attention(*exact, config, rotation=turn)
    out.backward(torch.ones_like(out))
    want = [out.detach(), *(x.grad for x in exact)]
    providers = {b: (lambda q, k, v, b=b: hf_longattn.attention(q, k, v, config, backend=b, rotation=turn)) for b in backends}
    if name == "plain" and "sdpa" in backends:
        providers["torch sdpa"] = lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    for backend, call in providers.items():
        row = {"method": name, "backend": backend, "device": device, "dtype": str(dtype).removeprefix("torch."), **vars(shape)}
        try:
            rows.append(row | {"mode": "exactness"} | errors(call, tensors, want))
        except Exception as error:
            rows.append(row | {"mode": "exactness", "refused": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"})
            if not isinstance(error, (ValueError, NotImplementedError)):
                traceback.print_exc()
        print(rows[-1], flush=True)
    return rows


@contextlib.contextmanager
def tiles(which: str, blocks: Blocks) -> Iterator[None]:
    before = getattr(triton_launcher, which)
    setattr(triton_launcher, which, lambda *_: blocks)
    try:
        yield
    finally:
        setattr(triton_launcher, which, before)


def tile_rows(mode: str, shape: Shape, dtype: torch.dtype, device: str, rounds: int) -> Rows:
    """scale_invariant on the Triton kernels with tiles of other sizes; the backend's name says which."""
    which = "_backward_blocks" if mode == "forward+backward" else "_forward_blocks"
    sizes = (
        ((128, 64), (64, 64), (128, 32), (64, 128), (128, 128))
        if which == "_forward_blocks"
        else ((64, 64), (64, 32), (32, 64))
    )
    rows: Rows = []
    for (m, n), warps, stages in itertools.product(sizes, (4, 8), (2, 3) if which == "_forward_blocks" else (1, 2)):
        with tiles(which, Blocks(m, n, warps, stages)):
            measured = attention_rows(shape, mode, dtype, device, [("scale_invariant", "triton")], rounds)
        rows += [
            r | {"backend": f"triton {m} x {n}, {warps} warps, {stages} stages"} for r in measured if r["method"] != "none"
        ]
    return rows


def parts(device: str, quick: bool) -> Parts:
    rounds, heads, dim = (2, 4, 32) if quick else (15, 16, 128)
    parts: Parts = {}

    def exact(dtype: torch.dtype, backends: tuple[str, ...] = BACKENDS, what: str = "exactness") -> None:
        shape = Shape(8, 2, 128 if quick else 1024, 64)
        for name in CASES:
            parts[f"{what} {dtype} {name}".replace("torch.", "")] = lambda n=name: exactness(n, shape, dtype, device, backends)

    def attention(mode: str, length: int, chosen: list[tuple[str, str]], kv_heads: int = heads) -> None:
        shape = Shape(heads, kv_heads, 256 if quick else length, dim)
        name = f"{mode} {length}" + (", grouped" if kv_heads != heads else "")
        parts[name] = lambda: attention_rows(shape, mode, torch.bfloat16, device, chosen, rounds)

    def model(mode: str, length: int) -> None:
        parts[f"model {mode} {length}"] = lambda: model_rows(mode, 64 if quick else length, torch.bfloat16, device, rounds)

    methods = ("scale_invariant", "infoscale", "cosscale", "adaptive_temperature", "rerope, window 4096")
    family = [(name, backend) for name in methods for backend in ("auto", "triton")]
    family.append((methods[-1], "bands"))
    short, flex = [(methods[0], "auto"), (methods[0], "triton")], [(methods[0], "torch flex")]
    exact(torch.bfloat16)
    attention("forward", 16384, [*family, *flex, ("none", "triton")])
    attention("forward+backward", 16384, [*family, *flex, ("none", "triton")])
    attention("decode", 65536, [*family, *flex])
    for length in (65536, 131072):
        attention("forward", length, short)
    attention("forward+backward", 65536, short)
    attention("decode", 65536, short, kv_heads=max(heads // 4, 1))
    exact(torch.float32)
    for mode, length in (("forward", 8192), ("LoRA step", 2048), ("decode", 8192)):
        model(mode, length)
    for length in (1024, 4096):
        attention("forward", length, [*family, ("none", "eager")])
        attention("forward+backward", length, [*family, ("none", "eager")])
        attention("decode", length, short)
    attention("decode", 16384, family)
    attention("decode", 131072, short)
    exact(torch.bfloat16, ("flex",), "exactness of flex")  # it compiles anew for every method: slow
    for mode in ("forward", "forward+backward"):
        shape = Shape(heads, heads, 256 if quick else 16384, dim)
        parts[f"tiles {mode}"] = lambda m=mode, s=shape: tile_rows(m, s, torch.bfloat16, device, 5)
    return parts


def main() -> None:
    parser = arguments(__doc__, RESULTS / "attention-gpu.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="small sizes, and another result file")
    parser.set_defaults(minutes=8.5)
    args = parser.parse_args()
    if args.quick:
        args.result = Path(tempfile.gettempdir()) / "attention-gpu.json"
    run_parts(parts(args.device, args.quick), args, "python lab/speed/gpu.py")


if __name__ == "__main__":
    main()
