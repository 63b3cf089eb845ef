"""Verifying on a model itself the rotations that its layers' methods rely on."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..config import NO_METHOD
from ..core.call import Call
from ..core.tracing import readable
from ..user_warnings import warn
from .forward_context import is_probing, probing
from .gate import gate_of
from .internals import foreign_forward, get_implementation, has_hook, input_embeddings, packs_when_evaluated
from .layers import Layer, View
from .names import is_longattn_name
from .rotation import FAR_APART, PROBE, Convention, RotarySource, find_axes, find_convention, find_rotary
from .state import AttentionState, LayerMethod, method_of, set_method
from .trained_length import CHANGING

#: So many tokens are looked at for one whose embedding is more than zeros.
TOKENS = 16

#: Why a layer is not remapped, or left alone where nothing else changes it.
NOT_ROTATED = "no rotary encoding"


def rotary_of(view: View, layers: list[Layer]) -> RotarySource | None:
    """The rotation of layers of one type: that of their methods if all have the same, which may be verified already, else a
    new one to verify.
    """
    source = find_rotary(view.modules, view.target, layers[0].type)
    running = {None if (method := method_of(x.module)) is None else method.rotary for x in layers}
    known = running.pop() if len(running) == 1 else None
    same = (
        source is not None
        and known is not None
        and not known.still
        and (known.module, known.buffer) == (source.module, source.buffer)
    )
    return known if same else source


@torch.no_grad()
def verify_rotations(view: View, methods: Mapping[nn.Module, LayerMethod]) -> dict[nn.Module, LayerMethod]:
    """Check every rotation that methods rely on, by a forward pass of a few tokens; nothing is written to the model.

    Every attention module gets the first token's hidden state at every position, whatever the layers before made of it
    (recurrent ones tell equal tokens apart), so its queries and keys differ by their rotation alone.

    Args:
        methods: of all its attention modules, as they are to be.

    Returns:
        other methods for layers that do not rotate.

    Raises:
        ValueError: a rotation is not understood.
    """
    rotated = [(x, method) for x in view.layers if (method := methods.get(x.module)) is not None and method.rotary is not None]
    sources = {x: method.rotary for x, method in rotated if method.rotary is not None and not method.rotary.verified}
    if not sources or not _computes(view):
        return {}
    computed = _probed(view, methods, list(sources))
    found: list[tuple[RotarySource, Convention | None, list[Layer]]] = []
    for source in dict.fromkeys(sources.values()):
        own = [x for x, other in sources.items() if other is source]
        ran = {x.name: x.index for x in own if x.name in computed}
        # PEFT keeps an attention module beside its copy that is trained, which runs as the same layer
        if missing := [x.name for x in own if x.index not in ran.values()]:
            _refuse_foreign({x.name: x.module for x in own if x.name in missing}, view.inner, methods[own[0].module])
            raise ValueError(f"cannot remap rotary distances here: {missing[0]} takes no part in a forward pass over text")
        convention, still = find_convention(
            source, [(name, _unscaled(computed[name].query), computed[name].key) for name in ran]
        )
        found.append((source, convention, [x for x in own if x.index in {ran[name] for name in still}]))
    _check_some_rotate(view, methods, [x for _, _, alone in found for x in alone])
    changed: dict[nn.Module, LayerMethod] = {}
    for source, convention, alone in found:
        source.convention = convention
        changed |= unrotated(source, {x.module: methods[x.module] for x in alone})
    return changed


def _probed(view: View, methods: Mapping[nn.Module, LayerMethod], layers: list[Layer], **given: Any) -> dict[str, Call]:
    """Return the calls of layers, by name, on one token repeated at PROBE positions.

    The innermost model is called, which reads text alone, where those around it may want pictures, sounds or marks.

    Args:
        given: arguments of the call.

    Raises:
        ValueError: the model reads no tokens.
    """
    recording, computed = _recording({x.name: (x.module, methods[x.module]) for x in layers})
    equal = [x.module.register_forward_pre_hook(_with_equal_tokens, with_kwargs=True) for x in view.layers if not x.why_never]
    try:
        embeddings, inner = input_embeddings(view.model), view.inner
        if embeddings is None:
            raise ValueError(
                f"how {view.name} rotates cannot be verified, which a remap of rotary distances needs: its class names no "
                "embeddings of tokens"
            )
        forward = inner  # with its hooks, which may fetch weights
        if inner is view.model or given:
            forward = functools.partial(type(inner).forward, inner, **given)  # the instance's may be a trainer's
        _read_few_tokens(forward, embeddings, view.model, methods[layers[0].module].state, {**methods, **recording})
    finally:
        for handle in equal:
            handle.remove()
    return computed


def _recording(
    methods: Mapping[str, tuple[nn.Module, LayerMethod]],
) -> tuple[dict[nn.Module, LayerMethod], dict[str, Call]]:
    """Methods that compute plain attention in place of these, and a dict to which each adds its module's call, by name."""
    calls: dict[str, Call] = {}
    recording = {}
    for name, (module, method) in methods.items():

        def observer(call: Call, output: Tensor, name: str = name) -> None:
            calls[name] = call

        recording[module] = replace(method, config=NO_METHOD, rotary=None, observer=observer)
    return recording, calls


def check_reached(state: AttentionState, inner: Any, reached: Collection[nn.Module]) -> None:
    """At the end of a pass: refuse layers that were called and attended by themselves, since their forward was replaced.

    Compiled layers are not seen to come to our attention, and others may have taken no part. So where some are missing, a
    pass over a few tokens, in which nothing is compiled, tells; and again only when a forward is another one.

    Args:
        reached: the layers that came.

    Raises:
        ValueError: a layer computes its attention without its method.
    """
    attention = () if state.arrangement is None else state.arrangement.attention
    if reached and len(reached) >= len(attention):
        return
    expected = [x for x in attention if (method := x.get("_longattn")) is not None and method.config is not None]
    if not reached or len(reached) < len(expected):
        check_by_few_tokens(state, inner)


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def check_by_few_tokens(state: AttentionState, inner: Any) -> None:
    """Refuse layers that are called and attend by themselves: a pass over a few tokens tells, once for the same functions.

    Raises:
        ValueError: a layer computes its attention without its method.
    """
    if state.checked is not None and [x.forward for x in state.checked[0]] == state.checked[1]:
        return
    methods = {name: (x, m) for name, x in inner.named_modules() if (m := method_of(x)) is not None and m.config is not None}
    modules = [inner, *(x for x, _ in methods.values())]
    checked = modules, [x.forward for x in modules]
    embeddings = input_embeddings(inner)
    if not methods or embeddings is None or inner.config.is_encoder_decoder or not all(map(readable, inner.parameters())):
        state.checked = checked  # nothing tells, now or later
        return
    called, (recording, came) = set[str](), _recording(methods)
    hooks = [
        part.register_forward_pre_hook(functools.partial(lambda name, *_: called.add(name), name))
        for name, (x, _) in methods.items()
        for part in (x, *x.children())  # whoever attends in a module's place needs its projections
    ]
    try:
        _read_few_tokens(inner.forward, embeddings, inner, state, recording)
    finally:
        for handle in hooks:
            handle.remove()
    if alone := {name: x for name, (x, _) in methods.items() if name in called - came.keys()}:
        method = next(iter(methods.values()))[1]
        _refuse_foreign(alone, inner, method)
        raise ValueError(f"{_without(method, alone)}: their model does not call transformers' attention interface")
    state.checked = checked


def _refuse_foreign(modules: Mapping[str, nn.Module], inner: Any, method: LayerMethod) -> None:
    """Raise where another package's function runs in place of the forward of one of these modules, or around them."""
    for module in (*modules.values(), inner, *inner.modules()):
        if (function := foreign_forward(module)) is not None:
            raise ValueError(
                f"{_without(method, modules)}: {function} runs in place of {type(module).__name__}.forward, and does not call "
                "transformers' attention interface. Leave out what put it there, or the method: hf_longattn.remove(model)"
            )


def _without(method: LayerMethod, modules: Mapping[str, nn.Module]) -> str:
    others = f" and {len(modules) - 1} more compute" if len(modules) > 1 else " computes"
    return f"{next(iter(modules))}{others} attention without {method.whole_config.name}"


def _read_few_tokens(
    forward: Any, embeddings: Any, model: Any, state: AttentionState, probed: Mapping[nn.Module, LayerMethod]
) -> None:
    """Let a model's forward function read one token at PROBE positions, while its layers run these methods."""
    token, device = _token(embeddings)
    ids = torch.full((1, PROBE), token, dtype=torch.int64, device=device)
    eager = torch.compiler.set_stance("force_eager")  # layers may have been compiled each
    with eager, evaluating(model), probing(state, probed):
        forward(input_ids=ids, use_cache=False)


def _token(embeddings: Any) -> tuple[int, torch.device]:
    """A token that is embedded as more than zeros, which padding is not, and the device on which a call's tokens are to be."""
    weight, padding = embeddings.weight, getattr(embeddings, "padding_idx", None)
    tokens = [n for n in range(1, min(len(weight), TOKENS)) if n != padding] or [0]
    if weight.device.type == "meta":  # offloaded
        return tokens[0], torch.device("cpu")
    return next((n for n in tokens if bool(weight[n].any())), tokens[0]), weight.device


def _unscaled(queries: Tensor) -> Tensor:
    """Queries of one token at several positions, all as long as the first: a model's own temperature is a factor on them."""
    norms = torch.linalg.vector_norm(queries.float(), dim=-1, keepdim=True)
    return (queries * (norms[:, :, :1] / norms.clamp(min=torch.finfo(norms.dtype).tiny))).to(queries.dtype)


def _check_some_rotate(view: View, methods: Mapping[nn.Module, LayerMethod], alone: list[Layer]) -> None:
    """Raise where a remap finds no layer that rotates, or warn if others do, within windows of their own."""
    config = methods[alone[0].module].config if alone else None
    others = [methods.get(x.module) for x in view.layers if not x.why_never and x not in alone]
    if (
        config is None
        or config.positions is None
        or any(method is not None and method.rotary is not None for method in others)
    ):
        return
    nothing = (
        f"{config.positions.name} remaps rotary distances, and there is nothing to remap in {view.name}: the "
        f"layers {[x.index for x in alone]} that it goes into do not rotate their queries and keys"
    )
    if not others or config.layers != "full_attention":
        raise ValueError(f"{nothing}. Take a window (windowed, streaming) or a temperature (infoscale, logn)")
    warn(
        f"{nothing}, and the others have windows: no distance that the model rotates by grows with the text. It runs as it "
        "did; a temperature (infoscale, logn) acts in those layers",
    )


def unrotated(source: RotarySource, methods: Mapping[nn.Module, LayerMethod]) -> dict[nn.Module, LayerMethod]:
    """The methods of layers that do not rotate: no remap; windows and sinks show what they show, at no distances."""
    still, changed = replace(source, still=True), {}
    for module, method in methods.items():
        assert method.config is not None
        config = replace(method.config, positions=None)
        rotary = still if config.remap is not None else None
        own = config if config.methods else None
        changed[module] = replace(method, config=own, reason=NOT_ROTATED, rotary=rotary)
    return changed


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """While open, the model is in evaluation mode; afterwards each of its modules is in the mode that it was in."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    for module, _ in modes:
        if packs_when_evaluated(module):
            module.training = True  # which changes nothing that it computes
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@functools.partial(
    torch.compiler.disable,
    reason="its first call verifies how a model rotates: call the model once before torch.compile(fullgraph=True)",
)
def verify_at_first_call(state: AttentionState, model: Any) -> None:
    """Verify rotations once a model that was built without weights computes."""
    with gate_of(state).lock:
        view = View(model)
        # without one of our names it is disabled; without `unverified`, another thread has done it
        ours = any(is_longattn_name(get_implementation(c)) for c in view.configs)
        if state.unverified and ours and _computes(view):
            methods = {x.module: method for x in view.layers if (method := method_of(x.module)) is not None}
            for module, method in verify_rotations(view, methods).items():
                set_method(module, method)
            state.arrange(view)
            state.unverified = False


@torch.no_grad()
def verify_axes(state: AttentionState, model: Any, axes: int) -> None:
    """Before the first text with pictures is read: find out by which axis of its positions a model turns each pair.

    Args:
        axes: how many it is given: three that turn, behind the text's own where there are four.

    Raises:
        ValueError: that is not understood.
    """
    with gate_of(state).lock:
        view = View(model)
        methods = {x.module: method for x in view.layers if (method := method_of(x.module)) is not None}
        rotary = {
            x: method.rotary
            for x in view.layers
            if (method := methods.get(x.module)) is not None and method.rotary is not None
        }
        new = {x: source for x, source in rotary.items() if not source.still and source.axis is None}
        if not new:
            return
        kinds = {str(getattr(source.module, "rope_type", "")) for source in new.values()}
        if kinds & CHANGING:
            raise ValueError(
                f"this model's frequencies change with the length of a text (rope_type {', '.join(sorted(kinds))}), and of "
                "those a remap of rotary distances reads no pictures (M-RoPE), text alone"
            )
        device = view.model.get_input_embeddings().weight.device
        positions = torch.tensor(FAR_APART, device="cpu" if device.type == "meta" else device)[:, None]
        if axes > len(FAR_APART):
            positions = torch.cat(
                [torch.arange(PROBE, device=positions.device).expand(axes - len(FAR_APART), 1, -1), positions]
            )
        computed = _probed(view, methods, list(new), position_ids=positions)
        found = {}
        for source in dict.fromkeys(new.values()):
            own = {x.name: computed[x.name] for x, other in new.items() if other is source and x.name in computed}
            found[source] = find_axes(source, [(name, _unscaled(call.query), call.key) for name, call in own.items()])
        for source, axis in found.items():
            source.turns_by(axis)


def _with_equal_tokens(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Arguments of an attention module's call, with the first hidden state in place of all; (batch, PROBE, width)."""
    if not is_probing():
        return None  # another thread's

    def equal(states: Tensor) -> Tensor:
        return states[:, :1].expand_as(states).contiguous()

    if args:
        return (equal(args[0]), *args[1:]), kwargs
    name = list(inspect.signature(type(module).forward).parameters)[1]
    return args, kwargs | {name: equal(kwargs[name])}


def _computes(view: View) -> bool:
    """Tell whether a forward pass gives values: weights are there, or accelerate's hooks fetch them."""
    offloaded = any(map(has_hook, view.modules))
    return readable(torch.empty(0, device="cpu")) and (offloaded or all(readable(p) for p in view.model.parameters()))
