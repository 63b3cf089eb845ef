"""What `make bench` measures with: calls timed in rounds, peak memory, and one tidy table.

Every round times each call once, one after the other, and the ratio to the peer is taken within the round: what else the
machine does then hits all alike. A row is one call: method, backend, device, dtype, shape, mode, seconds and ratio (median,
20th and 80th percentile), the MiB that it takes beyond its inputs, versions, command. Rows are kept by the part of the
benchmark that measured them; a part measured again replaces its rows.
"""

import argparse
import functools
import platform
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import repeat_kv

import hf_longattn
from hf_longattn import LongAttnConfig, Rotation
from hf_longattn.core import call as attention_call
from hf_longattn.core import geometry
from hf_longattn.core.attend import attend, plan_of
from hf_longattn.core.lower import distance_tables
from hf_longattn.core.rotated_keys import RotatedKeys
from hf_longattn.evaluation import rows as store
from hf_longattn.evaluation.rows import versions_line

torch._dynamo.config.recompile_limit = 64
torch._dynamo.config.fail_on_recompile_limit_hit = True  # FlexAttention would go on uncompiled
RESULTS = Path(__file__).parents[1] / "results"
Rows = list[dict[str, Any]]
Parts = dict[str, Callable[[], Rows]]
preset = LongAttnConfig.preset
METHODS = {
    "none": LongAttnConfig(),
    "scale_invariant": preset("scale_invariant"),
    "alibi": preset("alibi"),
    "infoscale": preset("infoscale", train_length=1024),
    "cosscale": preset("cosscale"),
    "adaptive_temperature": preset("adaptive_temperature"),
    "scale_invariant+adaptive_temperature": preset("scale_invariant+adaptive_temperature"),
    **{f"{name}, window 4096": preset(name, window=4096) for name in ("rerope", "windowed", "streaming", "lm_infinite")},
}
#: Those under which decoding makes something of keys once, or turns queries alone.
TURNED = {
    "rerope, window 4096": METHODS["rerope, window 4096"],
    "leaky_rerope, window 4096": preset("leaky_rerope", window=4096),
    "self_extend, window 1024": preset("self_extend", window=1024),
    "dual_chunk, chunk 6144": preset("dual_chunk", chunk=6144, local=512),
    "string_remap, shift 2730": preset("string_remap", shift=2730, window=128),
    "cosscale": METHODS["cosscale"],
}
#: The methods that are neither of these, so that a table has all.
OTHERS = {
    "yarn_beyond": preset("yarn_beyond", factor=2, train_length=4096),
    **{name: preset(name, train_length=1024) for name in ("logn", "softmax_plus", "yarn_temperature", "ssmax")},
    **{name: preset(name) for name in ("log_length", "attention_sink", "output_layer_norm", "output_standardise")},
}
ALL = METHODS | TURNED | OTHERS
#: In the place of a backend: "auto" behind a cache beside which nothing is kept.
EACH_TIME = "at each token"
#: Modes in which a cache holds the keys, and how many queries there are.
DECODED = {"decode": 1, "decode of 8": 8}
#: The row that ratios are to.
PEER = ("none", "torch sdpa")
Call = Callable[[], Any]
Calls = dict[tuple[str, str], Call]


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    batch: int = 1

    def tensors(self, mode: str, dtype: torch.dtype, device: str) -> list[Tensor]:
        """Query, key and value; in decoding the last query alone, or the last eight, against a full cache."""
        torch.manual_seed(0)
        sizes = ((self.heads, DECODED.get(mode, self.length)), *[(self.kv_heads, self.length)] * 2)
        grad = mode == "forward+backward"
        return [torch.randn(self.batch, h, n, self.head_dim, device=device, dtype=dtype, requires_grad=grad) for h, n in sizes]


def attention_calls(shape: Shape, mode: str, dtype: torch.dtype, device: str, chosen: list[tuple[str, str]]) -> Calls:
    """One call for each (method, backend): a backend of hf_longattn, or "torch sdpa", "torch flex", "eager" as peers."""
    q, k, v = shape.tensors(mode, dtype, device)
    rotation = Rotation(10_000.0 ** (-torch.arange(0, shape.head_dim, 2, device=device).float() / shape.head_dim))
    group = shape.heads // shape.kv_heads

    def eager() -> Call:
        i, j = (torch.arange(n, device=device) for n in (q.shape[2], k.shape[2]))
        hidden = j > (i + k.shape[2] - q.shape[2])[:, None]

        def run() -> Tensor:
            keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
            logits = (q @ keys.transpose(2, 3) * shape.head_dim**-0.5).masked_fill(hidden, float("-inf"))
            return torch.softmax(logits, -1, dtype=torch.float32).to(dtype) @ values

        return run

    # as in a model: the layers of a forward pass share the rows, and what is prepared for them
    rows = geometry.AttentionLayout.causal(q.shape[2], k.shape[2], None, 0, q.device)
    model: dict[str, Any] = {"scaling": shape.head_dim**-0.5, "rotation": rotation}

    def call(method: str, backend: str) -> Callable[[], Tensor]:
        if backend == "torch sdpa":
            return lambda: as_transformers(q, k, v)
        if backend == "torch flex":
            compiled = torch_flex(METHODS[method], shape, q)
            return lambda: compiled(q, k, v)
        if backend == "eager":
            return eager()
        if mode in DECODED:
            made, config = RotatedKeys(), ALL[method]
            kept: dict[str, Any] = {"keep": lambda by, key: made, "backend": backend}  # as behind a model's cache
            kept = {} if backend == EACH_TIME else kept
            asked = attention_call.Call(q, k, v, config, rows, method_id=(method, backend), **model, **kept)
            if method not in TURNED:
                return lambda: attend(asked)
            plan = plan_of(asked)  # as all layers of a pass but its first find it
            return lambda: plan.run(q, k, v, keep=asked.keep)
        return lambda: hf_longattn.attention(q, k, v, ALL[method], backend=backend, rotation=rotation)

    def step(forward: Callable[[], Tensor]) -> Call:
        if mode != "forward+backward":
            return forward
        return lambda: (out := forward()).backward(torch.ones_like(out))

    return {(method, backend): step(call(method, backend)) for method, backend in chosen}


def as_transformers(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """sdpa as transformers calls it: a mask for a few queries behind a cache, and each key for each head under it."""
    group, mask = query.shape[1] // key.shape[1], seen_by_the_last(query.shape[2], key.shape[2], key.device)
    if mask is not None:
        key, value = repeat_kv(key, group), repeat_kv(value, group)
    causal = query.shape[2] == key.shape[2]
    return scaled_dot_product_attention(query, key, value, mask, 0.0, causal, enable_gqa=mask is None and group > 1)


@functools.cache
def seen_by_the_last(queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Which keys the last few queries of a cache see; None where no mask says so."""
    if not 1 < queries < keys:
        return None
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)[None, None]


def torch_flex(config: LongAttnConfig, shape: Shape, query: Tensor) -> Callable[..., Tensor]:
    """FlexAttention as its users write it: compiled for the shape, with a logit map's two tables in its score_mod."""
    q_len, kv_len, grouped = query.shape[2], shape.length, shape.heads != shape.kv_heads
    assert config.logit_map is not None
    gain, bias = distance_tables(config.logit_map, shape.heads, kv_len, query)
    mask = create_block_mask(
        lambda b, h, q, kv: q + (kv_len - q_len) >= kv, None, None, q_len, kv_len, device=query.device.type
    )
    compiled = torch.compile(flex_attention, dynamic=False)

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        t = (q + (kv_len - q_len) - kv).abs()
        return gain[0, t] * s + bias[0, t]

    return lambda q, k, v: compiled(q, k, v, score, mask, enable_gqa=grouped)


def attention_rows(
    shape: Shape, mode: str, dtype: torch.dtype, device: str, chosen: list[tuple[str, str]], rounds: int
) -> Rows:
    """Times of attention alone, as ratios to sdpa."""
    calls = attention_calls(shape, mode, dtype, device, [PEER, *chosen])
    return compare(calls, rounds, about_call(shape, mode, dtype, device), PEER, repeat=10 if mode in DECODED else 1)


def about_call(shape: Shape, mode: str, dtype: torch.dtype, device: str) -> dict[str, Any]:
    return {"device": device, "dtype": str(dtype).removeprefix("torch."), **vars(shape), "mode": mode}


def seconds(call: Call, device: str, repeat: int = 1) -> float:
    synchronise = torch.cuda.synchronize if device == "cuda" else lambda: None
    # of one thread its own time, which others on the machine take none of
    clock = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    synchronise()
    start = clock()
    for _ in range(repeat):
        call()
    synchronise()
    return (clock() - start) / repeat


def compare(calls: Calls, rounds: int, about: dict[str, Any], peer: tuple[str, str], repeat: int = 1) -> Rows:
    """A row for each call; one that fails on its first try is named and left out."""
    device, peaks = about["device"], {}
    for name, call in list(calls.items()):
        try:
            seconds(call, device)  # warm up, compile
            peaks[name] = peak_on_cuda(call) if device == "cuda" else None
        except Exception as error:
            print(
                f"{about['mode']} {about['length']}: {name} does not run here: {str(error).splitlines()[0][:200]}", flush=True
            )
            del calls[name]
    times = [{name: seconds(call, device, repeat) for name, call in calls.items()} for _ in range(rounds)]
    rows = []
    for name in calls:
        row = {"method": name[0], "backend": name[1], **about, "rounds": rounds, **spread("seconds", [t[name] for t in times])}
        row |= {"peer": " ".join(peer), **spread("ratio", [t[name] / t[peer] for t in times]), "peak_mib": peaks[name]}
        rows.append(row)
        print(
            f"{row['mode']:17} {row['length']:6} {name[0]:24} {name[1]:10} {1000 * row['seconds']:10.2f} ms  "
            f"{row['ratio']:.2f} ({row['ratio_p20']:.2f} to {row['ratio_p80']:.2f})",
            flush=True,
        )
    return rows


def spread(name: str, values: list[float]) -> dict[str, float]:
    p20, *_, p80 = statistics.quantiles(values, n=5, method="inclusive") if len(values) > 1 else values * 2
    row = {name: statistics.median(values), f"{name}_p20": p20, f"{name}_p80": p80}
    return {key: float(f"{value:.4g}") for key, value in row.items()}


def peak_on_cuda(call: Call) -> float:
    """MiB that a call takes beyond its inputs."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def peak_of_this_process(call: Call) -> float:
    """The same on the CPU, in a fresh process that does nothing else (Linux)."""
    status, mark = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    mark.write_text("5")  # the high-water mark falls to what is in use now
    peaks = []
    for run in (lambda: None, call):
        run()
        peaks.append(int(status.read_text().split("VmHWM:")[1].split()[0]) / 1024)
    return round(peaks[1] - peaks[0], 1)


# The table ----------------------------------------------------------------------------------------------------------


def arguments(description: str | None, result: Path) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only parts whose name matches this regular expression; --list names them")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--resume", action="store_true", help="only parts that the result file has no rows of")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no further part after this long")
    parser.add_argument("--result", type=Path, default=result)
    return parser


def run_parts(parts: Parts, args: argparse.Namespace, command: str) -> None:
    """Run the parts, and write the result file after each."""
    start, command = time.perf_counter(), " ".join([command, *sys.argv[1:]])
    stamp = {"versions": machine(), "command": command, "date": datetime.now(UTC).date().isoformat()}
    file = store.RowFile(args.result)
    for name, part in parts.items():
        if not re.search(args.only, name) or (args.resume and file.find(part=name)):
            continue
        if args.list:
            print(name)
            continue
        if time.perf_counter() - start > 60 * args.minutes:
            print("out of time: the rest is left out; --resume goes on with it")
            break
        try:
            measured = part()
        except Exception:  # the other parts are worth having
            traceback.print_exc()
            continue
        file.put(*({"part": name} | row | stamp for row in measured), instead_of={"part": name})
    print(f"{time.perf_counter() - start:.0f} s")


def machine() -> str:
    known = [f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"]
    known += [torch.cuda.get_device_name()] if torch.cuda.is_available() else [f"{torch.get_num_threads()} threads"]
    return ", ".join([versions_line("hf_longattn", "torch", "transformers", "triton"), *known])
