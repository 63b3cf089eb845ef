"""Several processes, started by torchrun or `accelerate launch`, that share the work of one command."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


@contextmanager
def together() -> Iterator[int]:
    """While open, the processes that a launcher started know each other; this one's rank, 0 without a launcher."""
    started = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    if started:
        dist.init_process_group("gloo", timeout=datetime.timedelta(days=7))  # a turn ends with its longest text
    try:
        yield place()[0]
    finally:
        if started:
            dist.destroy_process_group()


def place() -> tuple[int, int]:
    """This process's rank and the number of processes."""
    known = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if known else (0, 1)


def gathered(own: Any) -> list[Any]:
    """Gather the objects of all processes, in every process."""
    if (world := place()[1]) == 1:
        return [own]
    out = [None] * world
    dist.all_gather_object(out, own)
    return out


def own_device(device: str) -> str:
    """The GPU that a launcher means for this process, where `device` names none in particular."""
    return f"{device}:{os.environ['LOCAL_RANK']}" if device == "cuda" and "LOCAL_RANK" in os.environ else device
