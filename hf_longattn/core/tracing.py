"""Tells whether a tensor's values may be read, and whether a result computed from them may be kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor
from torch._dynamo.eval_frame import skip_code
from torch._subclasses.fake_tensor import is_fake

#: Bytes that the driver copies to a device from any memory without waiting for what runs there.
STAGED = 1 << 16
#: Kinds of devices that have float64.
DOUBLES = ("cpu", "cuda", "meta")

F = TypeVar("F", bound=Callable[..., bool])


def _in_its_caller(function: F) -> F:
    """Keep Dynamo from compiling the function by itself: its "is compiling" would then reach callers that are not compiled."""
    skip_code(function.__code__)  # type: ignore[attr-defined]
    return function


@_in_its_caller
def readable(x: Tensor) -> bool:
    """Tell whether the host may wait for x's values: not while a graph is traced or captured, nor of fake tensors."""
    return _is_eager(x) and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


@_in_its_caller
def _is_eager(x: Tensor) -> bool:
    return not (torch.compiler.is_compiling() or torch._C._is_tracing() or x.is_meta or _is_fake(x))


def _is_fake(x: Tensor) -> bool:
    """Tell as is_fake does, which takes ten times as long, whether x is fake: nearly all tensors are plain."""
    plain = type(x) in (Tensor, torch.nn.Parameter) and torch._C._functorch.peek_interpreter_stack() is None
    return not (plain and not torch._is_functional_tensor(x)) and is_fake(x)


@_in_its_caller
def only_a_shape(x: Tensor) -> bool:
    """Tell whether x has no values and never will, as when shapes alone pass through a model."""
    tracing = torch.compiler.is_compiling() or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    return not tracing and (x.is_meta or is_fake(x))


@_in_its_caller
def keepable(x: Tensor) -> bool:
    """Tell whether results beside x may serve later calls: x is readable, and no transform of torch.func is at work."""
    return readable(x) and torch._C._functorch.peek_interpreter_stack() is None


@_in_its_caller
def shareable(x: Tensor) -> bool:
    """Tell whether layers of one pass may share results beside x: as `keepable`, and while a CUDA graph is captured."""
    return _is_eager(x) and torch._C._functorch.peek_interpreter_stack() is None


def wide_device(device: torch.device) -> torch.device:
    """The device itself, or the host where a device may have no float64, as Apple's GPUs and some of Intel's."""
    return device if device.type in DOUBLES else torch.device("cpu")


def widened(x: Tensor) -> Tensor:
    """x in float64, on its `wide_device`."""
    return x.to(wide_device(x.device), torch.float64)


def sent(x: Tensor, device: torch.device) -> Tensor:
    """Copy x, which the host made, to a device, without waiting for the copy; float64 as float32 where it has none."""
    if x.device == device:
        return x
    if x.dtype == torch.float64 and wide_device(device) != device:
        x = x.float()
    large = device.type == "cuda" and x.numel() * x.itemsize > STAGED
    return (x.pin_memory() if large else x).to(device, non_blocking=True)


def version(x: Tensor) -> Hashable:
    """A mark that changes when x is written to: PyTorch's count of writes; of inference tensors, without one, the values."""
    return tuple(x.tolist()) if x.is_inference() else x._version


def assert_later(condition: Tensor, message: str) -> None:
    """Check a condition where a graph may be traced: the graph checks it as it runs, and a device when it gets there.

    Args:
        condition: bool, ().
    """
    torch._assert_async(condition, message)
