"""Custom operators take tensors and numbers alone: the objects of a call are laid flat before one, and rebuilt behind it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar, get_type_hints

import torch
from torch import Tensor

from ..geometry import AttentionLayout
from ..plan import LogitSpec
from ..tracing import keepable, readable
from .kernel import KernelCall, Result, by_token

T = TypeVar("T")
#: The arguments of a call that have gradients.
DIFFERENTIABLE = ("query", "key", "value", "row_scale", "bias_scale", "gain", "bias")
#: Of these tables, which have gradients where `LogitSpec.learns`; other kernels refuse such a plan and leave them out.
TABLES = ("gain", "bias")
#: Messages of kernels for transforms that they do not go through.
NO_SECOND = "the {} kernel has no second derivatives: use backend='reference', as in hf_longattn.update(model, backend=...)"
NO_VMAP = "the {} kernel does not go through vmap: give it the batch dimension itself, or use backend='reference'"
NO_FORWARD = "the {} kernel has no forward mode (jvp): take gradients backward, or use backend='reference'"
_TYPES: dict[Any, str] = {
    **{Tensor: "Tensor", Tensor | None: "Tensor?", int: "int", float: "float", float | None: "float?", bool: "bool"}
}
#: What is laid flat: the annotations of each kind's fields; those that begin with _ stay behind. A dict, which Dynamo reads.
_FIELDS: dict[type, dict[str, Any]] = {
    kind: {n: t for n, t in get_type_hints(kind).items() if not n.startswith("_")}
    for kind in (KernelCall, AttentionLayout, LogitSpec)
}


def schema(kind: type) -> str:
    """An operator's arguments that stand for an object."""
    return ", ".join(f"{_TYPES[t]} {name}" if t in _TYPES else schema(t) for name, t in _FIELDS[kind].items())


@functools.cache
def names(kind: type) -> list[str]:
    """The arguments' names."""
    return [name for field, t in _FIELDS[kind].items() for name in ([field] if t in _TYPES else names(t))]


def flatten(x: Any) -> list[Any]:
    """The arguments that stand for an object."""
    out = []
    for name, t in _FIELDS[type(x)].items():
        out += [getattr(x, name)] if t in _TYPES else flatten(getattr(x, name))
    return out


def rebuild(kind: type[T], flat: Iterator[Any]) -> T:
    """The inverse of `flatten`."""
    return kind(**{name: next(flat) if t in _TYPES else rebuild(t, flat) for name, t in _FIELDS[kind].items()})


class Function(torch.autograd.Function):
    """Any computation outside of graphs, with its gradients, as autograd and torch.func know it.

    Args of `apply`:
        name: of the kernel, for messages.
        compute: from the arguments to a tuple of tensors, the results.
        gradients: from the gradients of the results, the results and the arguments to the gradient of each argument, or None.
        arguments: tensors or not.
    """

    @staticmethod
    def forward(name, compute, gradients, *arguments):  # type: ignore[no-untyped-def]
        return compute(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        ctx.name, _, ctx.gradients, *arguments = inputs
        save(ctx, arguments, output)

    @staticmethod
    def backward(ctx, *d):  # type: ignore[no-untyped-def]
        second = functools.partial(_no_second, ctx.name)
        return None, None, None, *Function.apply(ctx.name, ctx.gradients, second, *d, *kept(ctx))  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info, in_dims, name, *arguments):  # type: ignore[no-untyped-def]
        raise NotImplementedError(NO_VMAP.format(name))

    @staticmethod
    def jvp(ctx, *tangents):  # type: ignore[no-untyped-def]
        raise NotImplementedError(NO_FORWARD.format(ctx.name))


def _no_second(name: str, *arguments: Any) -> Any:
    raise NotImplementedError(NO_SECOND.format(name))


#: From a call to output, logsumexp and entropy (empty unless asked for).
Forward: TypeAlias = Callable[[KernelCall], Result]
#: From a call, the gradients of those three (None for an entropy not asked for) and the three themselves to the gradients of
#: DIFFERENTIABLE, empty where the call has none.
Gradients: TypeAlias = Callable[..., tuple[Tensor, ...]]


def attention(name: str, forward: Forward, gradients: Gradients) -> Callable[..., Result]:
    """A kernel in graphs and outside: a function of a call, and of another `Forward` for calls without gradients.

    Computes in the dtypes that it is given, under autocast too.
    """

    def compute(call: KernelCall, untaped: Forward = forward) -> Result:
        with torch.no_grad(), torch.autocast(call.query.device.type, enabled=False):
            return untaped(call)

    def differentiate(call: KernelCall, *given: Any) -> tuple[Tensor, ...]:
        with torch.no_grad(), torch.autocast(call.query.device.type, enabled=False):
            found = gradients(call, *given)
            return *found, *(call.query.new_empty(0) for _ in DIFFERENTIABLE[len(found) :])

    operator, function = attention_operator(name, compute, differentiate), attention_function(name, compute, differentiate)

    def run(call: KernelCall, untaped: Forward = forward) -> Result:
        if not readable(call.query):
            out, lse, entropy = operator(*flatten(call))
        else:
            out, lse, entropy = function(*flatten(call)) if taped(call) else compute(call, untaped)
        return out, lse if call.with_lse else lse.new_zeros(0), entropy

    return run


def attention_operator(name: str, forward: Forward, gradients: Gradients) -> Callable[..., Result]:
    """A kernel as an operator that graphs and autograd know."""
    arguments, results = schema(KernelCall), "(Tensor, Tensor, Tensor)"
    operator = torch.library.custom_op(
        f"hf_longattn::{name}",
        lambda *flat: _as_told(forward(rebuild(KernelCall, iter(flat)))),
        mutates_args=(),
        schema=f"({arguments}) -> {results}",
    )

    @operator.register_fake
    def _(*flat):  # type: ignore[no-untyped-def]
        call = rebuild(KernelCall, iter(flat))
        query, value, shape = call.query, call.value, call.query.shape[:-1]
        out = query.new_empty(0) if value is None else by_token(query, value.shape[-1])
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        return out, *(query.new_empty(shape if asked else (0,), dtype=dtype) for asked in (True, call.with_entropy))

    @torch.library.custom_op(
        f"hf_longattn::{name}_backward",
        mutates_args=(),
        schema="(Tensor d_out, Tensor? d_lse, Tensor? d_entropy, Tensor out, Tensor lse, Tensor entropy, "
        f"{arguments}) -> ({', '.join('Tensor' for _ in DIFFERENTIABLE)})",
    )
    def backward(d_out, d_lse, d_entropy, out, lse, entropy, *flat):  # type: ignore[no-untyped-def]
        return _as_told(gradients(rebuild(KernelCall, iter(flat)), d_out, d_lse, d_entropy, out, lse, entropy))

    @backward.register_fake
    def _(d_out, d_lse, d_entropy, out, lse, entropy, *flat):  # type: ignore[no-untyped-def]
        call = rebuild(KernelCall, iter(flat))
        d_query, d_key, d_value = (
            call.key.new_empty(0) if x is None else by_token(x) for x in (call.query, call.key, call.value)
        )
        scales = (call.spec.row_scale, call.spec.bias_scale)
        by_row = (lse.new_empty(0 if x is None else lse.shape) for x in scales)
        tables = (lse.new_empty(0 if x is None or not call.spec.learns else x.shape) for x in (call.spec.gain, call.spec.bias))
        return d_query, d_key, d_value, *by_row, *tables

    def differentiate(ctx: Any, *d: Any) -> tuple[Tensor | None, ...]:
        out, lse, entropy, *flat = kept(ctx)
        return by_argument(flat, backward(*_asked(flat, *d, out, lse, entropy), *flat))

    operator.register_autograd(differentiate, setup_context=save)
    return operator


def _as_told(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Lay out results as graphs are told that they are."""
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) if x.ndim == 4 else x.contiguous() for x in results)


def attention_function(name: str, forward: Forward, gradients: Gradients) -> Callable[..., Result]:
    """`attention_operator` outside of graphs, where torch.func takes gradients of a Function, but not of an operator."""

    def compute(*flat: Any) -> Result:
        return forward(rebuild(KernelCall, iter(flat)))

    def backward(*arguments: Any) -> tuple[Tensor | None, ...]:
        given, flat = arguments[:6], arguments[6:]
        return by_argument(flat, gradients(rebuild(KernelCall, iter(flat)), *_asked(flat, *given)))

    return functools.partial(Function.apply, name, compute, backward)


def taped(call: KernelCall) -> bool:
    """Tell whether autograd or a transform of torch.func is to see the computation of a call."""
    spec = call.spec
    tensors = (call.query, call.key, call.value, spec.row_scale, spec.bias_scale, spec.gain, spec.bias)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return needs_grad or not keepable(call.query)


def save(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, ...]) -> None:
    """Keep the results and the arguments of a computation."""
    ctx.numbers = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.save_for_backward(*output, *(x if isinstance(x, Tensor) else None for x in inputs))


def kept(ctx: Any) -> list[Any]:
    """The results and the arguments, in this order."""
    tensors = ctx.saved_tensors  # once: gradient checkpointing gives them out once
    first = len(tensors) - len(ctx.numbers)
    arguments = (number if x is None else x for x, number in zip(tensors[first:], ctx.numbers, strict=True))
    return [*tensors[:first], *arguments]


def _asked(flat: Sequence[Any], *given: Any) -> tuple[Any, ...]:
    """Drop the gradient of an entropy that a call did not ask for; given: gradients of the results, and the results."""
    asked = flat[names(KernelCall).index("with_entropy")]
    return (*given[:2], given[2] if asked else None, *given[3:])


def by_argument(flat: Sequence[Any], results: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradient of every argument from those of DIFFERENTIABLE, None where there is none."""
    call = dict(zip(names(KernelCall), flat, strict=True))
    gradients = {
        name: d.to(call[name].dtype)
        for name, d in zip(DIFFERENTIABLE, results, strict=False)
        if call[name] is not None and (name not in TABLES or call["learns"])
    }
    return tuple(gradients.get(name) for name in call)
