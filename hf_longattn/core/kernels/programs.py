"""The small Triton programs as functions of tensors; what they compute shows in `triton_programs`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..plan import LogitSpec, Operand
from ..tracing import readable
from .kernel import KernelFailure, by_token

try:
    import triton

    from . import triton_programs as kernels
except ImportError:  # it comes with torch's CUDA builds for Linux
    triton = None

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def why_not(x: Tensor | Operand) -> str | None:
    """The reason why these programs cannot compute with such tensors, or None."""
    return next((why for (_, device), why in _BROKEN.items() if device == x.device), None) or why_not_triton(x)


def why_not_triton(x: Tensor | Operand) -> str | None:
    """The reason why no Triton program computes with such tensors, or None."""
    if triton is None:
        return "triton is not installed"
    if x.device.type != "cuda" and not INTERPRETED:
        return f"Triton needs CUDA, the tensors are on {x.device.type}"
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the Triton kernels compute float32, float16 and bfloat16, got {x.dtype}"
    if INTERPRETED and x.dtype == torch.bfloat16:
        return "Triton's interpreter has no bfloat16"
    return None


#: The compiler's message for each program and device that it failed at, which is not tried again.
_BROKEN: dict[tuple[str, torch.device], str] = {}


def _launch(name: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> Any:
    """Run a program, and return what Triton compiled of it; its interpreter returns None.

    Raises:
        KernelFailure: it cannot be compiled or loaded; the first time with a warning.
    """
    kernel, device = getattr(kernels, name)[grid], arguments[0].device
    if (why := _BROKEN.get((name, device))) is not None:
        raise KernelFailure(why)
    try:
        if _is_current(device):
            return kernel(*arguments, **constants)
        with torch.cuda.device(device):
            return kernel(*arguments, **constants)
    except Exception as error:
        if not before_launch(error):
            raise
        why = _BROKEN[name, device] = f"Triton failed at {name}: {type(error).__name__}: {str(error)[:500]}"
        warnings.warn(f"{why}; slower kernels take its place on {device} in this process", stacklevel=2)
        raise KernelFailure(why) from error


def _is_current(device: torch.device) -> bool:
    return device.type != "cuda" or device.index == torch.cuda.current_device()


class Launch:
    """A run of a program that layers repeat, each with tensors of its own, of the same shapes, strides and dtypes.

    Triton binds some forty arguments before each run, which takes longer than a small model's product. So runs after the first
    call what that compiled, as long as the tensors begin at such addresses as it was compiled for.

    Args:
        others: the arguments behind the layer's tensors.
        constants: those that are compiled in, and options.
    """

    def __init__(self, name: str, grid: tuple[int, ...], others: Sequence[Any], **constants: Any) -> None:
        self.name, self.grid, self.others, self.constants = name, grid, others, constants
        self._run: Callable[..., None] | None = None
        self._rest: list[Any] = []
        self._aligned: list[bool] = []

    def __call__(self, *tensors: Tensor) -> None:
        aligned = [x.data_ptr() % POINTERS == 0 for x in tensors]
        if self._run is not None and aligned == self._aligned and _is_current(tensors[0].device):
            self._run(*tensors, *self._rest)
            return
        compiled = _launch(self.name, self.grid, *tensors, *self.others, **self.constants)
        if compiled is not None and torch.version.hip is None:  # there a program is compiled for the sizes of storages, too
            names = getattr(kernels, self.name).arg_names[len(tensors) + len(self.others) :]
            self._rest = [*self.others, *(self.constants[name] for name in names)]
            self._run, self._aligned = compiled[(*self.grid, 1, 1)[:3]], aligned


def before_launch(error: Exception) -> bool:
    """Tell whether a program failed before it ran: it does not compile, or does not fit the device."""
    if isinstance(error, (Warning, torch.OutOfMemoryError, torch.AcceleratorError)):
        return False
    return isinstance(error, triton.runtime.errors.OutOfResources) or "[CUDA]" not in str(error)  # as the driver's begin


def _tile(width: int, dtype: torch.dtype) -> tuple[int, int]:
    """Rows and keys of a head that are multiplied at a time at most: what registers hold."""
    if dtype == torch.float32:
        return 16, 32 if width <= 128 else 16
    return (64 if width <= 64 else 32), 64 if width <= 128 else 32


#: Which features are rotated together: `Rotation.features`.
Features: TypeAlias = tuple[int, int, bool]


class DeviceSegment(NamedTuple):
    """A segment's rows on the device, and the angles by which its queries and keys are turned; as `scores` takes them."""

    bounds: Tensor
    allowed: Tensor | None
    query_ids: Tensor | None
    key_ids: Tensor | None
    query_angles: tuple[Tensor, Tensor] | None
    key_angles: tuple[Tensor, Tensor] | None


#: Triton compiles a program for tensors that begin at multiples of so many bytes, or for others.
POINTERS = 16
#: Logits of a row lie in room for a multiple of so many keys, which products are fast for.
ALIGNED = 16


def scores(
    query: Tensor,
    key: Tensor,
    segments: Sequence[DeviceSegment],
    spec: LogitSpec,
    scaling: float,
    row_scale: Tensor | None,
    normed: bool,
    features: Features | None,
    known: dict[Hashable, Any] | None = None,
) -> Tensor:
    """The finished logits of few queries with all keys, float32 (batch, heads, q_len, kv_len rounded up to ALIGNED).

    MASK_VALUE for hidden pairs, and behind the last key.

    Args:
        segments: each pair of a query and a key is in one at most.
        row_scale: float32, broadcastable to (batch, heads, q_len); None is 1.
        normed: products are divided by the norms of both.
        known: where launches are kept for calls that differ in these tensors alone.
    """
    name = query.stride(), key.stride(), key.dtype, None if row_scale is None else row_scale.stride()
    if known is not None and (launches := known.get(name)) is not None:
        return _scored(query, key, row_scale, launches)
    angles = [x for i in segments for pair in (i.query_angles, i.key_angles) for x in (pair or (None, None))]
    each = [[getattr(i, field) for i in segments] for field in ("bounds", "allowed", "query_ids", "key_ids")]
    numbers = scaling, spec.softcap, spec.sinks, normed, *(features or (0, 0, False))
    arguments: tuple[Any, ...] = query, key, row_scale, *each, angles, spec.gain, spec.bias, *numbers
    if not readable(query):
        return torch.ops.hf_longattn.scores(*arguments)
    launches = _launches(*arguments)
    if known is not None:
        known[name] = launches
    return _scored(query, key, row_scale, launches)


def _scores(query: Tensor, key: Tensor, row_scale: Tensor | None, *others: Any) -> Tensor:
    return _scored(query, key, row_scale, _launches(query, key, row_scale, *others))


def _scored(query: Tensor, key: Tensor, row_scale: Tensor | None, launches: list[Launch]) -> Tensor:
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
    batch, heads, q_len, _ = query.shape
    out = query.new_empty(batch, heads, q_len, _room(key.shape[2]), dtype=torch.float32)
    for launch in launches:
        launch(query, key, out, out if row_scale is None else row_scale)
    return out


def _room(kv_len: int) -> int:
    return -(-kv_len // ALIGNED) * ALIGNED


def _launches(
    query: Tensor,
    key: Tensor,
    row_scale: Tensor | None,
    bounds: list[Tensor],
    allowed: list[Tensor | None],
    query_ids: list[Tensor | None],
    key_ids: list[Tensor | None],
    angles: list[Tensor | None],
    gain: Tensor | None,
    bias: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: int,
    normed: bool,
    first: int,
    pairs: int,
    interleaved: bool,
) -> list[Launch]:
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
    batch, heads, q_len, width = query.shape
    kv_heads, kv_len = key.shape[1:3]
    group, room = heads // kv_heads, _room(kv_len)
    most, columns = _tile(width, query.dtype)
    rows = min(max(16, 1 << (q_len * group - 1).bit_length()), most)
    grid = -(-room // columns) * batch * kv_heads, -(-q_len * group // rows)
    x = None if row_scale is None else row_scale.expand(batch, heads, q_len)
    constants = {
        **{"HEADS": heads, "GROUP": group, "ROWS": rows, "COLUMNS": columns, "D": width},
        **{"DP": max(16, 1 << (width - 1).bit_length()), "FIRST": first, "PAIRS": pairs, "INTERLEAVED": interleaved},
        **{"NORMED": normed, "CAP": bool(softcap), "MAP": gain is not None, "HAS_X": x is not None},
        **{"PRECISION": "ieee" if query.dtype == torch.float32 else "tf32", "num_warps": 4, "num_stages": 1},
    }
    launches: list[Launch] = []
    for n, own in enumerate(bounds):
        turns, mask, q_ids, k_ids = angles[4 * n : 4 * n + 4], allowed[n], query_ids[n], key_ids[n]
        optional = mask, q_ids, k_ids, *turns, gain, bias
        strides = [*query.stride()[:3], *key.stride()[:3], _stride(own, 0)]
        strides += [0] * 4 if mask is None else [_stride(mask, d) for d in range(4)]
        strides += [0 if ids is None else _stride(ids, 0) for ids in (q_ids, k_ids)]
        strides += [0 if cos is None else _stride(cos, d) for cos in turns[::2] for d in range(3)]
        strides += [0 if table is None else _stride(table, 0) for table in (gain, bias)]
        strides += [0] * 3 if x is None else list(x.stride())
        tail = [own, *(own if y is None else y for y in optional), *strides]
        tail += [q_len, kv_len, room, scaling, softcap or 1.0, sinks]
        has = {"TURN_Q": turns[0] is not None, "TURN_K": turns[2] is not None, "MASK": mask is not None, "FILL": n == 0}
        has["IDS"] = q_ids is not None and k_ids is not None
        launches.append(Launch("scores_kernel", grid, tail, **constants, **has))
    return launches


def entropies(logits: Tensor) -> Tensor:
    """The entropy of the softmax of each row in nats, float32 (batch, heads, q_len); of `scores`' logits."""
    return _entropies(logits) if readable(logits) else torch.ops.hf_longattn.entropies(logits)


def _entropies(logits: Tensor) -> Tensor:
    out = logits.new_empty(logits.shape[:3])
    _launch("entropies_kernel", (out.numel(),), logits, out, logits.shape[3], BLOCK=BLOCK, num_warps=4)
    return out


def weights(
    logits: Tensor,
    factor: Tensor | None,
    sinks: Tensor | None,
    dtype: torch.dtype,
    polynomial: Sequence[float] = (),
    known: dict[Hashable, Any] | None = None,
) -> Tensor:
    """The softmax of each row of `scores`' logits times its factor, beside a sink; 0 where nothing is visible.

    Args:
        factor: float32 (batch, heads, q_len); None is 1.
        sinks: float32 (heads,), the logarithm of what joins the denominators.
        polynomial: gives the factor by the row's entropy, see `AttentionPlan`; empty: `factor` is it.
        known: where launches are kept for calls that differ in logits, factor, sinks and dtype alone.
    """
    if not readable(logits):
        return torch.ops.hf_longattn.weights(logits, factor, sinks, dtype, list(polynomial))
    return _weights(logits, factor, sinks, dtype, polynomial, known)


def _weights(
    logits: Tensor,
    factor: Tensor | None,
    sinks: Tensor | None,
    dtype: torch.dtype,
    polynomial: Sequence[float],
    known: dict[Hashable, Any] | None = None,
) -> Tensor:
    out = torch.empty_like(logits, dtype=dtype)
    factor, sinks = (None if x is None else x.float().contiguous() for x in (factor, sinks))
    name, known = ("weights", dtype, factor is None, sinks is None), {} if known is None else known
    if (launch := known.get(name)) is None:
        _, heads, q_len, room = logits.shape
        has = {"FACTOR": factor is not None, "SINKS": sinks is not None, "POLYNOMIAL": tuple(polynomial)}
        constants = {"HEADS": heads, "BLOCK": BLOCK, "num_warps": 4}
        launch = known[name] = Launch("weights_kernel", (out.numel() // room,), (room, q_len), **constants, **has)
    launch(logits, out, logits if factor is None else factor, logits if sinks is None else sinks)
    return out


#: Logits of a row that are read at a time.
BLOCK = 2048


def _operator(name: str, function: Callable[..., Tensor], schema: str, fake: Callable[..., Tensor]) -> None:
    """A function as an operator that graphs know."""
    torch.library.custom_op(f"hf_longattn::{name}", function, mutates_args=(), schema=schema).register_fake(fake)


_operator(
    "scores",
    _scores,
    "(Tensor query, Tensor key, Tensor? row_scale, Tensor[] bounds, Tensor?[] allowed, Tensor?[] query_ids, "
    "Tensor?[] key_ids, Tensor?[] angles, Tensor? gain, Tensor? bias, float scaling, float? softcap, int sinks, bool normed, "
    "int first, int pairs, bool interleaved) -> Tensor",
    lambda query, key, *_: query.new_empty(*query.shape[:3], _room(key.shape[2]), dtype=torch.float32),
)
_operator("entropies", _entropies, "(Tensor logits) -> Tensor", lambda logits: logits.new_empty(logits.shape[:3]))
_operator(
    "weights",
    _weights,
    "(Tensor logits, Tensor? factor, Tensor? sinks, ScalarType dtype, float[] polynomial) -> Tensor",
    lambda logits, factor, sinks, dtype, polynomial: torch.empty_like(logits, dtype=dtype),
)


def turned(x: Tensor, cos: Tensor, sin: Tensor, features: Features, at: slice | None) -> Tensor:
    """`rotate.rotate` in the dtype of x, without gradients."""
    own = x if at is None else x[:, :, at]
    own = own if own.stride(-1) == 1 else own.contiguous()
    (first, pairs, interleaved), (batch, heads, length, width) = features, own.shape
    out = by_token(x)
    into, block = (out if at is None else out[:, :, at]), 32
    if at is not None:
        out[:, :, : at.start], out[:, :, at.stop :] = 0.0, 0.0
    strides = *own.stride()[:3], *into.stride()[:3], *(_stride(cos, d) for d in range(3))
    _launch(
        "turn_kernel", (-(-length // block) * batch * heads,), own, into, cos, sin, *strides, length,
        HEADS=heads, GROUP=heads // cos.shape[2], D=width, DP=max(16, 1 << (width - 1).bit_length()), BLOCK=block,
        FIRST=first, PAIRS=pairs, INTERLEAVED=interleaved, num_warps=4,
    )  # fmt: skip
    return out


def join(out: Tensor, lse: Tensor, new: Tensor, new_lse: Tensor) -> None:
    """Join output (batch, heads, n, width) and logsumexp (batch, heads, n), in place, with those over other keys."""
    new = new if new.stride(-1) == 1 else new.contiguous()
    (batch, heads, length, width), block = out.shape, 32
    strides = [*out.stride()[:3], *lse.stride(), *new.stride()[:3], *new_lse.stride()]
    _launch(
        "join_kernel", (-(-length // block) * batch * heads,), out, lse, new, new_lse, *strides, length,
        HEADS=heads, D=width, DP=max(16, 1 << (width - 1).bit_length()), BLOCK=block, num_warps=4,
    )  # fmt: skip


def _stride(x: Tensor, dimension: int) -> int:
    """A dimension's stride; 0 where one stands for all."""
    return x.stride(dimension) if x.shape[dimension] > 1 else 0
