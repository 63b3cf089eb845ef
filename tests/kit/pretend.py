"""A device that says cuda:0, or mps:0, and computes on the CPU: what the package does on a GPU, seen on any machine.

A tensor of the host among its own is an error, as on a GPU. What a GPU pays for is counted, with the line of the package that
asked: values that the host waits for, copies to the device, kernels; and the largest tensor is known. Attention operators of
aten and the Triton programs are computed by their definition, and count as what they launch.

    with pretend.device() as device:
        model.to("cuda")
        model(ids.to("cuda"))
    device.reads, device.copies, device.kernels, device.largest

Apple's device refuses what PyTorch has not written for it: float64, and operators by the list that comes with PyTorch.

To PyTorch's own code these tensors are on its device "meta", which computes nothing; to all who ask in Python, on cuda:0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torchgen
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torchgen.gen import get_grouped_native_functions, parse_native_yaml
from torchgen.model import DispatchKey, NativeFunctionsGroup

import hf_longattn
from hf_longattn.core.geometry import AttentionLayout
from hf_longattn.core.kernels import operators, programs, triton
from hf_longattn.core.kernels import sdpa as kernels_of_torch
from hf_longattn.core.kernels.kernel import MASK_VALUE, KernelCall, Result, by_token
from hf_longattn.core.kernels.rotate import rotate
from hf_longattn.core.plan import LogitSpec
from hf_longattn.core.rotary import Rotation

CUDA, MPS = torch.device("cuda", 0), torch.device("mps", 0)
PACKAGE = str(Path(hf_longattn.__file__).parent)
aten = torch.ops.aten
#: Operators for whose result the host waits; so it does for one that is given an index of bools.
READS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten.repeat_interleave.Tensor,
}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
#: Operators that take tensors of the host.
COPYING = {aten._to_copy.default, aten.copy_.default, *INDEXING}
#: Operators that launch nothing, beside views.
FREE = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten._unsafe_view.default,
    aten.lift_fresh.default,
}


class Pretended(Tensor):
    """A tensor of the device; `own` holds its numbers."""

    own: Tensor
    at: torch.device
    device = property(lambda self: self.at)  # type: ignore[assignment]
    is_cuda = property(lambda self: self.at.type == "cuda")  # type: ignore[assignment]
    is_mps = property(lambda self: self.at.type == "mps")  # type: ignore[assignment]
    is_cpu, is_meta = False, False
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: Any, own: Tensor, at: torch.device = CUDA) -> Pretended:
        layout = {"strides": own.stride(), "storage_offset": own.storage_offset(), "dtype": own.dtype}
        made = Tensor._make_wrapper_subclass(cls, own.shape, **layout, device="meta")  # type: ignore[attr-defined]
        made.own, made.at = own, at
        return made

    def __repr__(self, **_: Any) -> str:
        return f"Pretended({self.own!r})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        at = next(x.at for x in tree_leaves((args, kwargs)) if isinstance(x, Pretended))
        return Device(at).__torch_dispatch__(function, types, args, kwargs)  # outside of `device`: nobody counts


def plain(x: Any) -> Any:
    """The same with tensors of the host."""
    return tree_map_only(Pretended, lambda t: t.own, x)


def line() -> str:
    """The innermost line of the package that runs, else in parentheses one of transformers."""
    frame: Any = sys._getframe(2)
    other = "()"
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            return f"{name[len(PACKAGE) + 1 :]}:{frame.f_lineno}"
        if other == "()" and "transformers" in name:
            other = f"({Path(name).name}:{frame.f_lineno})"
        frame = frame.f_back
    return other


class Counts(Counter[str]):
    """How often, by line."""

    @property
    def package(self) -> int:
        return sum(n for at, n in self.items() if not at.startswith("("))


class Device(TorchDispatchMode):
    """What is seen of the device: see `device`.

    Attributes:
        reads, copies: by line.
        kernels: by line and operator.
        largest: elements of the largest tensor that the package made there, and who did.
    """

    def __init__(self, at: torch.device = CUDA) -> None:
        super().__init__()
        self.at = at
        self.clear()

    def clear(self) -> None:
        self.reads, self.copies, self.kernels = Counts(), Counts(), Counts()
        self.largest = 0, ""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        here, onto = any(isinstance(x, Pretended) for x in given), kwargs.get("device")
        stays = here if onto is None else torch.device(onto).type == "meta"
        if not (here or stays):
            return function(*args, **kwargs)
        with self:  # under inference_mode operators arrive whole
            if (out := function.decompose(*args, **kwargs)) is not NotImplemented:
                return out
        if onto is not None:
            kwargs["device"] = "cpu"
        if self.at == MPS and stays and str(function).removeprefix("aten.") not in of_mps():
            raise NotImplementedError(f"The operator '{function}' is not currently implemented for the MPS device: {line()}")
        out = FORMULAS.get(function, function)(*plain(args), **plain(kwargs))
        if self.at == MPS and stays and any(x.dtype == torch.float64 for x in tree_leaves(out) if isinstance(x, Tensor)):
            raise TypeError(f"Cannot convert a MPS Tensor to float64 dtype, which the MPS framework lacks: {line()}")
        of_host = any(not isinstance(x, Pretended) and x.ndim for x in given)
        if not stays or (function is aten.copy_.default and not isinstance(args[0], Pretended)):
            if not stays or args[2:] != (True,):  # else the host does not wait for it
                self.reads[line()] += 1
        elif of_host and function in COPYING:
            self.copies[line()] += 1
        elif not (function.is_view or function in FREE):
            self.launched(str(function).removeprefix("aten."), given if here else [], out)
        indices = tree_leaves(args[1]) if function in INDEXING else []
        if function in READS or any(isinstance(x, Tensor) and x.dtype == torch.bool for x in indices):
            self.reads[line()] += 1
        known = {id(plain(x)): x for x in given}
        kind = all(x.is_inference() for x in given) if function.is_view else torch.is_inference_mode_enabled()
        with torch.inference_mode(kind):  # a view is what it is of
            made = functools.partial(Pretended, at=self.at) if stays else lambda x: x
            return tree_map_only(Tensor, lambda x: known[id(x)] if id(x) in known else made(x), out)

    def launched(self, name: str, given: Any, out: Any, kernels: int = 1) -> None:
        """Count kernels that take what is given to an output."""
        at = f"{line()} {name}"
        tensors = [[x for x in tree_leaves(side) if isinstance(x, Tensor)] for side in (given, out)]
        if any(not isinstance(x, Pretended) and x.ndim for x in tensors[0]):
            raise RuntimeError(f"expected all tensors to be on the same device, but found {self.at} and cpu: {at}")
        self.kernels[at] += kernels
        if not at.startswith("("):
            self.largest = max(self.largest, (max((x.numel() for x in tensors[1]), default=0), at))

    def program(
        self, name: str, function: Callable[..., Any], kernels: Callable[..., int] = lambda *_: 1
    ) -> Callable[..., Any]:
        """A function of the device's tensors, that launches kernels, from one of the host's."""

        def run(*args: Any) -> Any:
            out = function(*plain(args))
            self.launched(name, args, out, kernels(*args))
            return tree_map_only(Tensor, functools.partial(Pretended, at=self.at), out)

        return run


class Calls(TorchFunctionMode):
    """What is asked of PyTorch before it looks for kernels: the device by its name, pinned memory, a kernel of attention."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.device:
            return function(*args, **(kwargs or {}))
        kwargs = {name: _named(x) for name, x in (kwargs or {}).items() if name != "pin_memory"}
        args = tuple(_named(x) for x in args)
        if function is Tensor.pin_memory:
            return args[0]
        if function is Tensor.new_tensor and isinstance(args[0], Pretended):
            return torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype)).to("meta")
        if function is Tensor.cuda:
            function, args = Tensor.to, (args[0], "meta")
        if function in (torch.tensor, torch.as_tensor) and (device := kwargs.pop("device", None)) is not None:
            return function(*args, **kwargs).to(device)
        if function is torch.nn.functional.scaled_dot_product_attention and isinstance(args[0], Pretended):
            return sdpa(*args, **kwargs)
        return function(*args, **kwargs)


def _named(x: Any) -> Any:
    name = str(x) if isinstance(x, (torch.device, str)) else ""
    return "meta" if name.split(":")[0] in ("cuda", "mps") else x


_ENGINE = torch.autograd._engine_run_backward  # type: ignore[attr-defined]


def _backward(*args: Any, **kwargs: Any) -> Any:
    with Calls():  # which PyTorch leaves while it handles autograd.grad itself
        return _ENGINE(*args, **kwargs)


def _refuse(name: str, *_: Any, **__: Any) -> None:
    raise AssertionError(f"{name} would be launched, and nothing stands for it here")


@contextlib.contextmanager
def mps() -> Iterator[Device]:
    """Apple's device, while this is open."""
    backward, event = patch.object(torch.autograd, "_engine_run_backward", _backward), patch.object(torch, "Event", Event)
    with backward, event, patch.object(programs, "INTERPRETED", False), Calls(), Device(MPS) as seen:
        yield seen


@functools.cache
def of_mps() -> frozenset[str]:
    """The operators that PyTorch has for Apple's device: its own for it, and those made of others."""
    folder = Path(torchgen.__file__).parent / "packaged/ATen/native"
    native = parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml"))
    kernels = native.backend_indices[DispatchKey.MPS]
    found = set()
    for group in get_grouped_native_functions(native.native_functions):
        grouped = isinstance(group, NativeFunctionsGroup)
        # a group's members may all be made of the one with out=, which is then asked
        out = grouped and (kernels.has_kernel(group.out) or group.out.has_composite_kernel)
        for f in group.functions() if grouped else (group,):
            composite = f.has_composite_implicit_autograd_kernel or (f.has_composite_kernel and (out or not grouped))
            if kernels.has_kernel(f) or composite or (grouped and group.structured and out):
                found.add(f"{f.func.name.name}.{f.func.name.overload_name or 'default'}")
    return frozenset(found)


class Event:
    """A mark on a stream, which is always reached."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


@contextlib.contextmanager
def device(capability: tuple[int, int] = (9, 0), cudnn: int = 91900) -> Iterator[Device]:
    """The device, while this is open: an H100, unless another GPU's compute capability or cuDNN's version are named."""
    seen = Device()
    forward, backward = seen.program("attention", _attention), seen.program("gradients", _gradients, lambda *_: 3)
    attention = operators.attention_function(
        "triton",
        lambda call: forward(*operators.flatten(call)),
        lambda call, *given: backward(given, *operators.flatten(call)),
    )

    def run(call: KernelCall) -> Result:
        out, lse, entropy = attention(*operators.flatten(call._replace(with_lse=True)))
        return out, lse if call.with_lse else lse.new_empty(0), entropy

    machine = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232448)
    cuda = {
        "device_of": lambda _: contextlib.nullcontext(),
        "Event": Event,
        "get_device_capability": lambda *_: capability,
        "get_device_properties": lambda *_: machine,
        "is_current_stream_capturing": lambda: False,
    }
    pretended = {"scores": seen.program("scores", _scores, lambda *given: len(given[2]))}
    for name, function in (("entropies", _entropies), ("weights", _weights), ("turned", _turned), ("join", _join)):
        pretended[name] = seen.program(name, function)
    gradients = {"run": run, "gradients": lambda call, *given: backward(given, *operators.flatten(call))}
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.cuda, **cuda))
        stack.enter_context(patch.object(torch.backends.cudnn, "version", lambda: cudnn))
        for known in (kernels_of_torch._known_capability, kernels_of_torch._prefers_cudnn):
            known.cache_clear()
            stack.callback(known.cache_clear)
        stack.enter_context(patch.object(torch.autograd, "_engine_run_backward", _backward))
        stack.enter_context(patch.multiple(programs, INTERPRETED=False, _launch=_refuse, **pretended))
        stack.enter_context(patch.multiple(triton, _launch=_refuse, **gradients))
        stack.enter_context(Calls())
        yield stack.enter_context(seen)


# Triton's programs ---------------------------------------------------------------------------------------------------


def _call(flat: Any) -> KernelCall:
    floats = [x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in flat]
    return operators.rebuild(KernelCall, iter(floats))


def _logits_of(call: KernelCall) -> Tensor:
    logits, visible = call.logits(torch.arange(call.query.shape[2]), call.kv_len)
    return logits.masked_fill(~visible, -torch.inf)


def _attention(*flat: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = _call(flat)
    logits = _logits_of(call)
    lse = logits.logsumexp(-1)
    log_p = (logits - lse[..., None]).nan_to_num(-torch.inf, neginf=-torch.inf)
    p = log_p.exp()
    out = None if call.value is None else p @ _by_head(call.value, call.query)
    entropy = -torch.where(p > 0, p * log_p, 0).sum(-1) if call.with_entropy else lse[0, 0, :0]
    return flat[0].new_empty(0) if out is None else by_token(flat[0], out.shape[3]).copy_(out), lse, entropy


def _gradients(given: Any, *flat: Any) -> tuple[Tensor, ...]:
    """By the probabilities exp(logit - lse), whatever else the logsumexp is over."""
    call, (d_out, d_lse, d_entropy, out, lse, entropy) = _call(flat), given
    spec, none = call.spec, lse.new_empty(0)
    tensors = {"query": call.query, "key": call.key, "row_scale": spec.row_scale, "bias_scale": spec.bias_scale}
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items() if x is not None}
    spec = dataclasses.replace(spec, **{name: leaves[name] for name in ("row_scale", "bias_scale") if name in leaves})
    with torch.enable_grad():
        logits = _logits_of(call._replace(query=leaves["query"], key=leaves["key"], spec=spec))
    log_p = (logits.detach() - lse[..., None]).nan_to_num(-torch.inf, neginf=-torch.inf)
    p, d, d_value = log_p.exp(), torch.zeros_like(log_p), none
    if call.value is not None:
        d += d_out.float() @ _by_head(call.value, call.query).mT - (d_out.float() * out.float()).sum(-1, keepdim=True)
        d_value = by_token(flat[2]).copy_((p.mT @ d_out.float()).unflatten(1, (call.key.shape[1], -1)).sum(2))
    if d_lse is not None:
        d += d_lse[..., None]
    if d_entropy is not None:
        d -= d_entropy[..., None] * (log_p.clamp(min=MASK_VALUE) + entropy[..., None])
    found = dict(zip(leaves, torch.autograd.grad(logits, list(leaves.values()), p * d), strict=True))
    d_query, d_key = (by_token(x).copy_(found[name]) for x, name in zip(flat, ("query", "key"), strict=False))
    return d_query, d_key, d_value, *(found.get(name, none) for name in ("row_scale", "bias_scale"))


def _scores(
    query: Tensor,
    key: Tensor,
    intervals: Sequence[programs.DeviceSegment],
    spec: LogitSpec,
    scaling: float,
    row_scale: Tensor | None,
    normed: bool,
    features: programs.Features | None,
    _: Any,
) -> Tensor:
    query, key, (first, pairs, interleaved) = query.float(), key.float(), features or (0, 0, False)
    rotation = Rotation(torch.empty(pairs), interleaved, first)
    query, key = (x / x.norm(dim=-1, keepdim=True) if normed else x for x in (query, key))
    x = None if row_scale is None else row_scale.expand(query.shape[:3])
    spec = dataclasses.replace(spec, gain=plain(spec.gain), bias=plain(spec.bias), scaling=scaling, row_scale=x)
    kv_len = key.shape[2]
    out = query.new_full((*query.shape[:3], programs._room(kv_len)), MASK_VALUE)
    for own in intervals:
        own_query = query if own.query_angles is None else rotate(rotation, query, *own.query_angles)
        own_key = key if own.key_angles is None else rotate(rotation, key, *own.key_angles)
        rows = AttentionLayout(own.bounds.long(), own.allowed, own.query_ids, own.key_ids)
        logits, visible = KernelCall(own_query, own_key, None, rows, spec).logits(torch.arange(query.shape[2]), kv_len)
        out[..., :kv_len] = torch.where(visible, logits, out[..., :kv_len])
    return out


def _entropies(logits: Tensor) -> Tensor:
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1) * (logits.amax(-1) > MASK_VALUE / 2)


def _weights(
    logits: Tensor,
    factor: Tensor | None,
    sinks: Tensor | None,
    dtype: torch.dtype,
    polynomial: Sequence[float] = (),
    _known: Any = None,
) -> Tensor:
    if polynomial:
        low, high, *coefficients = polynomial
        entropy, factor = _entropies(logits).clamp(low, high), torch.zeros(())
        for coefficient in coefficients:
            factor = factor * entropy + coefficient
    seen = logits > MASK_VALUE / 2
    logits = torch.where(seen, logits if factor is None else logits * factor[..., None], MASK_VALUE)
    sink = logits[..., :0] if sinks is None else sinks[:, None, None].expand(*logits.shape[:3], 1)
    return (torch.cat([logits, sink], -1).softmax(-1)[..., : logits.shape[-1]] * seen).to(dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, features: programs.Features, at: slice | None) -> Tensor:
    first, pairs, interleaved = features
    return by_token(x).copy_(rotate(Rotation(torch.empty(pairs), interleaved, first), x, cos, sin, at))


def _join(out: Tensor, lse: Tensor, new: Tensor, new_lse: Tensor) -> None:
    both = torch.logaddexp(lse, new_lse)
    out.copy_(torch.lerp(out.float(), new.float(), (new_lse - both).exp().nan_to_num()[..., None]))
    lse.copy_(both)


# PyTorch's attention -------------------------------------------------------------------------------------------------


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """By the operator that PyTorch chooses on an H100; on Apple's device by its steps."""
    on_cuda, half = query.is_cuda, query.dtype in (torch.float16, torch.bfloat16)
    options, bias = (dropout_p, is_causal), attn_mask
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill(~bias, float("-inf"))
    if on_cuda and half and query.shape[-1] <= 128:
        return aten._scaled_dot_product_cudnn_attention(query, key, value, bias, True, *options, scale=scale)[0]
    if on_cuda and half and bias is None:
        return aten._scaled_dot_product_flash_attention(query, key, value, *options, scale=scale)[0]
    if on_cuda and query.shape[1] == key.shape[1]:
        return aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, *options, scale=scale)[0]
    by_steps = {"scale": scale, "enable_gqa": enable_gqa}
    return aten._scaled_dot_product_attention_math(query, key, value, bias, *options, **by_steps)[0]


def _logits(query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    logits = query.float() @ _by_head(key, query).mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    logits = logits if bias is None else logits + bias.float()
    return logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -torch.inf) if causal else logits


def _by_head(x: Tensor, query: Tensor) -> Tensor:
    return x.float().repeat_interleave(query.shape[1] // x.shape[1], 1)


def _fused(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    logits = _logits(query, key, *others)
    out = query if value.shape[3] == query.shape[3] else by_token(query, value.shape[3])
    p = logits.softmax(-1).nan_to_num()  # 0 where nothing is visible
    return _like(out, p @ _by_head(value, query)), logits.logsumexp(-1)


def _like(given: Tensor, x: Tensor) -> Tensor:
    """x laid out, and rounded, as the kernels lay out what belongs to a tensor that they are given."""
    return torch.empty_like(given).copy_(x)


def _fused_backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    """By the probabilities exp(logit - lse), whatever else the logsumexp is over."""
    scale, d_out = query.shape[-1] ** -0.5 if others[-1] is None else others[-1], d_out.float()
    p = (_logits(query, key, *others) - lse[..., None]).exp().nan_to_num()  # 0 where nothing is visible
    d = scale * p * (d_out @ _by_head(value, query).mT - (d_out * out.float()).sum(-1, keepdim=True))
    by_head = (x.unflatten(1, (key.shape[1], -1)).sum(2) for x in (d.mT @ query.float(), p.mT @ d_out))
    return tuple(map(_like, (query, key, value), (d @ _by_head(key, query), *by_head)))


def _flash(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, _: Any = None, *, scale: Any = None
) -> Any:
    none = q.new_empty(0)
    return *_fused(q, k, v, None, causal, scale), none, none, q.shape[2], k.shape[2], none, none, none


def _flash_backward(
    d: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *more: Any, scale: Any = None
) -> Any:
    return _fused_backward(d, q, k, v, out, lse, None, more[5], scale)


def _cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, _: bool, dropout: float = 0.0, causal: bool = False, *, scale: Any = None
) -> Any:
    (out, lse), none = _fused(q, k, v, bias, causal, scale), q.new_empty(0)
    return out, lse[..., None], none, none, q.shape[2], k.shape[2], none, none, none


def _cudnn_backward(
    d: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *more: Any, scale: Any = None
) -> Any:
    # torch finds cuDNN's graph by the strides of q, k and v: those of others must be what they are in its own calls
    alike = [[s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1] for x in (q, out, d)]
    assert alike[0] == alike[1] == alike[2]
    return _fused_backward(d, q, k, v, out, lse[..., 0], more[2], more[8], scale)


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, _: bool, dropout: float = 0.0, causal: bool = False, *, scale: Any = None
) -> Any:
    (out, lse), none = _fused(q, k, v, bias, causal, scale), q.new_empty(0)
    return out, torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf), none, none


def _efficient_backward(
    d: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, out: Tensor, lse: Tensor, *more: Any, scale: Any = None
) -> Any:
    causal = len(more) > 4 and more[4]
    return *_fused_backward(d, q, k, v, out, lse[..., : q.shape[2]], bias, causal, scale), q.new_empty(0)


FORMULAS = {
    aten._scaled_dot_product_flash_attention.default: _flash,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_cudnn_attention.default: _cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}
