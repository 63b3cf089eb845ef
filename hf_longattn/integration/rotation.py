"""Finding out how a model rotates its queries and keys, and verifying it on the model itself."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..attention.attend import Call
from ..attention.rotary import Rotation
from ..attention.tracing import keepable, only_a_shape, readable
from ..config import LongAttnConfig
from .layers import Layer, all_configs, layers_of
from .names import is_ours
from .state import CALLS, AttentionState, Snapshot, plan_of, set_plan, state_of

#: Tokens in the verification: enough to tell one frequency from another.
PROBE = 8


@dataclass(eq=False)
class RotarySource:
    """The rotation of some layers: their model's rotary module and the buffer that holds their frequencies.

    Which features form a pair, and which way they turn, are conventions of its code: see `verify_rotations`.
    """

    module: nn.Module
    buffer: str
    interleaved: bool = False
    backwards: bool = False  # turned by -p inv_freq (NanoChat)
    verified: bool = False
    _seen: tuple[Tensor, int, Rotation] | None = None

    def rotation(self, query: Tensor) -> Rotation:
        """The rotation now; models with dynamic frequencies change the buffer as they go.

        Raises:
            RuntimeError: it is not verified, and `query` is more than a shape.
        """
        if not self.verified and not only_a_shape(query):
            raise RuntimeError(
                "how this model rotates queries and keys was not checked yet, and cannot be while a graph is traced: call the "
                "model once before torch.compile or torch.export, or use hf_longattn.apply(model, ...)"
            )
        inv_freq: Tensor = getattr(self.module, self.buffer)
        seen = None if torch.compiler.is_compiling() else self._seen
        if seen is None or seen[0] is not inv_freq or seen[1] != inv_freq._version:
            rotation = self.under(self.interleaved, self.backwards)
            if keepable(rotation.inv_freq):
                self._seen = inv_freq, inv_freq._version, rotation
            return rotation
        return seen[2]

    def under(self, interleaved: bool, backwards: bool) -> Rotation:
        """The rotation that a convention makes of the frequencies."""
        inv_freq: Tensor = getattr(self.module, self.buffer).detach()
        return Rotation(-inv_freq if backwards else inv_freq, interleaved)


def find_rotary(model: nn.Module, config: Any, layer_type: str | None) -> RotarySource | None:
    """The rotary module that belongs to `config`, with the buffer for a layer type; None if there is none."""
    for module in model.modules():
        if getattr(module, "config", None) is not config or not hasattr(module, "named_buffers"):
            continue
        names = {name for name, _ in module.named_buffers(recurse=False)}
        for name in (f"{layer_type}_inv_freq", "inv_freq"):
            if name in names:
                return RotarySource(module, name)
    return None


def rotation_of(model: nn.Module, config: Any, layers: list[Layer]) -> RotarySource | None:
    """The rotation of layers of one type: the one that all of them run, which may be verified, else one to verify."""
    source = find_rotary(model, config, layers[0].type)
    running = {_source(layer) for layer in layers}
    known = running.pop() if len(running) == 1 else None
    same = source is not None and known is not None and (known.module, known.buffer) == (source.module, source.buffer)
    return known if same else source


@torch.no_grad()
def verify_rotations(model: PreTrainedModel) -> None:
    """Check every rotation that a plan relies on, by a forward pass of a few tokens.

    Every attention module gets the first token's hidden state at every position, whatever the layers before made of it
    (recurrent ones tell equal tokens apart), so its queries and keys differ by their rotation alone.

    Raises:
        ValueError: a rotation is not understood.
    """
    layers = _unverified(model)
    if not layers or not _computes(model):
        return
    sources = {layer.name: _source(layer) for layer in layers}
    computed: dict[str, Call] = {}
    before = Snapshot(model)
    for layer in layers:
        plan = plan_of(layer.module)
        assert plan is not None
        observer = functools.partial(computed.__setitem__, layer.name)
        set_plan(layer.module, dataclasses.replace(plan, config=LongAttnConfig(), rotary=None, observer=observer))
    equal = [
        x.module.register_forward_pre_hook(_with_equal_tokens, with_kwargs=True) for x in layers_of(model) if not x.why_never
    ]
    training = [m for m in model.modules() if m.training]
    try:
        model.eval()
        device = model.get_input_embeddings().weight.device
        ids = torch.ones(1, PROBE, dtype=torch.int64, device="cpu" if device.type == "meta" else device)
        type(model).forward(model, input_ids=ids, use_cache=False)  # the instance's may be a trainer's
    finally:
        for module in training:
            module.training = True
        for handle in equal:
            handle.remove()
        before.restore(CALLS)
    for source in dict.fromkeys(sources.values()):
        assert source is not None
        names = [name for name, x in sources.items() if x is source]
        if missing := [name for name in names if name not in computed]:
            raise ValueError(f"cannot remap rotary distances here: {missing[0]} takes no part in a forward pass over text")
        _settle(source, [(name, vectors) for name in names for vectors in (computed[name].query, computed[name].key)])


def verify_at_first_call(model: PreTrainedModel, state: AttentionState) -> None:
    """While a model is built it has no weights to verify anything with; its first forward pass has."""
    modules = {x.module for x in _unverified(model)}
    if state.verification is not None and not modules:
        state.verification.remove()
        state.verification = None
    elif state.verification is None and modules:
        # the innermost model around them: it may be called without the others (their heads)
        inner = [m for m in model.modules() if isinstance(m, PreTrainedModel) and modules <= set(m.modules())][-1]
        state.verification = inner.register_forward_pre_hook(_first_call)


def _first_call(model: Any, args: Any) -> None:
    # without one of our names it is disabled; without unverified ones, a verification that goes on
    if _computes(model) and any(is_ours(c._attn_implementation) for c in all_configs(model)) and _unverified(model):
        verify_rotations(model)
        if (state := state_of(model)) is not None:
            verify_at_first_call(model, state)


def _with_equal_tokens(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Arguments of an attention module's call, with the first hidden state in place of all; (batch, PROBE, width)."""

    def equal(states: Tensor) -> Tensor:
        return states[:, :1].expand_as(states).contiguous()

    if args:
        return (equal(args[0]), *args[1:]), kwargs
    name = list(inspect.signature(type(module).forward).parameters)[1]
    return args, kwargs | {name: equal(kwargs[name])}


def _computes(model: nn.Module) -> bool:
    """Whether a forward pass gives values. Weights on the meta device do not hinder it where accelerate's hooks fetch them."""
    offloaded = any("_hf_hook" in m.__dict__ for m in model.modules())
    return readable(torch.empty(0)) and (offloaded or all(readable(p) for p in model.parameters()))


def _source(layer: Layer) -> RotarySource | None:
    return None if (plan := plan_of(layer.module)) is None else plan.rotary


def _unverified(model: nn.Module) -> list[Layer]:
    return [x for x in layers_of(model) if (source := _source(x)) is not None and not source.verified]


def _settle(source: RotarySource, computed: Iterable[tuple[str, Tensor]]) -> None:
    """Settle a source's conventions by what its layers really computed.

    Args:
        computed: layers by name, each with rotated queries or keys of one and the same token at positions 0, 1, ...:
            (1, heads, PROBE, head_dim).

    Raises:
        ValueError: under no convention does turning the first by each distance give all the others; or under several.
    """
    left = list(itertools.product((False, True), repeat=2))
    for name, vectors in computed:
        left = [convention for convention in left if _gives(source.under(*convention), vectors)]
        if not left and _gives(Rotation(torch.zeros(1, device=vectors.device)), vectors):
            raise ValueError(f"cannot remap rotary distances here: {name} does not rotate its queries and keys at all")
        if not left:
            raise ValueError(
                f"cannot remap rotary distances here: turning vectors by {source.buffer} does not give what {name} computes, "
                "neither in halves nor interleaved, neither forwards nor backwards. hf_longattn does not understand this "
                "rotation; leave the positions and visibility slots empty"
            )
    if any(_differ(source.under(*left[0]), source.under(*other)) for other in left[1:]):
        raise ValueError(
            "cannot tell how the model rotates its queries and keys, so it cannot be remapped: they are too small to show it "
            "(all zeros?). Apply the method to a model with weights"
        )
    (source.interleaved, source.backwards), source.verified = left[0], True


def _gives(rotation: Rotation, vectors: Tensor) -> bool:
    """Whether turning the first vector by each distance gives the others."""
    n = vectors.shape[2]
    if 2 * rotation.inv_freq.shape[0] > vectors.shape[-1]:
        return False
    zeros = torch.zeros(1, n, dtype=torch.int64, device=vectors.device)
    cos, sin = rotation.angles(zeros, lambda p: torch.arange(n, device=p.device).expand_as(p))
    turned = rotation.rotate(vectors[:, :, :1].expand(-1, -1, n, -1), cos, sin)
    tolerance = 1e-3 if vectors.dtype in (torch.float32, torch.float64) else 0.05
    return bool((turned - vectors).abs().max() <= tolerance * vectors.abs().max())


def _differ(one: Rotation, other: Rotation) -> bool:
    pairing = one.interleaved != other.interleaved and one.inv_freq.shape[0] > 1
    return bool(one.inv_freq.any()) and (pairing or not torch.equal(one.inv_freq, other.inv_freq))
