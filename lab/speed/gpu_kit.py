"""What the parts of lab/speed/gpu.py share: methods, models with random weights, clocks, and what a call asks of a device."""

from __future__ import annotations

import collections
import json
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import hf_longattn

Row = dict[str, Any]
Call = Callable[[], Any]
UNMODIFIED = "unmodified"


def methods(trained: int) -> dict[str, Row]:
    """What is tried, with its parameters for a model trained at so many tokens."""
    window = trained // 2
    return {
        "infoscale": {"train_length": trained},
        "logn": {"train_length": trained},
        "cosscale": {},
        "scale_invariant": {},
        "alibi": {},
        "adaptive_temperature": {},
        "rerope": {"window": window},
        "leaky_rerope": {"window": window, "stretch": 4},
        "self_extend": {"window": window // 2, "group": 4},
        "dual_chunk": {"chunk": trained * 3 // 4, "local": trained // 16},
        "string_remap": {"shift": trained // 3, "window": max(trained // 64, 1)},
        "rerope+infoscale": {"window": window, "train_length": trained},
        "streaming": {"window": window},
        "attention_sink": {},
        "scale_invariant+adaptive_temperature": {},
    }


def say(**row: Any) -> None:
    print("ROW " + json.dumps(row), flush=True)


def say_machine() -> None:
    """Prints the GPU and the versions that rows are of, once for each log."""
    own = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}  # +cu130, which metadata may leave out
    print("ON " + json.dumps(own | {name: version(name) for name in ("transformers", "triton")}), flush=True)


@contextmanager
def saying(row: Row) -> Iterator[Row]:
    """Prints the row at the end, with its seconds, and the error if there was one."""
    start = time.perf_counter()
    try:
        yield row
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "hf_longattn" in f.filename]
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        row["at"] = [f"{Path(f.filename).name}:{f.lineno}" for f in frames[-3:]]
    say(**row, seconds=round(time.perf_counter() - start, 1))


def model(trained: int, dtype: torch.dtype, device: str, **config: Any) -> Any:
    """A Llama with random weights, made on the device."""
    torch.manual_seed(0)
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    asked = LlamaConfig(**{"vocab_size": 97, "max_position_embeddings": trained} | tokens | config)
    with torch.device(device):
        return LlamaForCausalLM._from_config(asked, dtype=dtype).eval()


def under(built: Any, method: str, trained: int) -> Any:
    return built if method == UNMODIFIED else hf_longattn.apply(built, method, **methods(trained)[method])


def tensors(length: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Query, key and value, (1, heads, length, head_dim), by token in memory, as models make them."""
    torch.manual_seed(0)
    made = (torch.randn(1, length, h, head_dim, device=device, dtype=dtype) for h in (heads, kv_heads, kv_heads))
    return [x.transpose(1, 2) for x in made]


# Clocks ---------------------------------------------------------------------------------------------------------------


def wait(device: str) -> None:
    """Until the device has done all that it was asked."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(call: Call, device: str) -> float:
    wait(device)
    start = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - start


def milliseconds(call: Call, device: str, times: int = 5) -> float:
    """The median of some calls, behind one that is not counted."""
    call()
    return round(1000 * statistics.median(seconds(call, device) for _ in range(times)), 3)


def in_turn(call: Call, peer: Call, device: str, times: int = 5) -> tuple[float, float]:
    """Milliseconds of a call and of its peer, which goes before and after it: a device's clock changes as it goes on."""
    before = milliseconds(peer, device, times)
    own = milliseconds(call, device, times)
    return own, round((before + milliseconds(peer, device, times)) / 2, 3)


def peak_mib(call: Call, device: str) -> int | None:
    """What a call takes beyond what was there before; None on a CPU."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20)


def counts(call: Call, device: str) -> Row:
    """How often the host waits for a value of the device, and where; kernels, copies and the time of both."""
    if device != "cuda":
        return {}
    call()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode(1)
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode(0)
    reads = [f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
    events = on_device(call)
    copies = sum("memcpy" in e.name.lower() for e in events)
    return {
        "step_reads": len(reads),
        "step_where": collections.Counter(reads).most_common(5),
        "step_kernels": len(events) - copies,
        "step_copies": copies,
        "step_kernel_ms": round(sum(e.device_time_total for e in events) / 1000, 2),
    }


def on_device(call: Call) -> list[Any]:
    """What a call has the device do: kernels and copies."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [e for e in profile.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]


def kernel_ms(call: Call, device: str) -> float | None:
    """Milliseconds of the device alone, the host's time between kernels left out; None on a CPU."""
    if device != "cuda":
        return None
    return round(statistics.median(sum(e.device_time_total for e in on_device(call)) / 1000 for _ in range(3)), 3)
