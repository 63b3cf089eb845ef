"""One forward pass, and one layer's call in it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import Cache

from ..config import LongAttnConfig
from .caches import CallNumbering, Numbering, record_of
from .internals import frame_above, is_running
from .state import AttentionState, LayerMethod

_OTHERWISE = (
    "position_ids are counted differently from those of the keys in the KV cache: some calls skip padding, as generate() does "
    "(attention_mask.cumsum(-1) - 1), others count it, as calls without position_ids do, or start elsewhere. Every call on "
    "one cache must count in the same way: pass position_ids to all of them"
)

_ANY: Numbering = (True, True, True)


@dataclass(eq=False)
class TokenAxes:
    """The positions of tokens that have several each (M-RoPE), in a pass under a remap.

    Args:
        tokens: those of the call's tokens, int64 (axes, batch or 1, q_len).
        keys: those of the cached keys, (axes, batch, keys), and from the first layer on of all keys; None: the cached keys are
            those of a text without pictures, or there are none.
        last: the largest position on the first axis.
        count: the number of tokens, cached ones too.
    """

    tokens: Tensor
    keys: Tensor | None
    last: int
    count: int


@dataclass(eq=False)
class ForwardContext:
    """One forward pass.

    Args:
        outer: the pass that this one runs in.
        state: of the model; None while a graph is traced.
        positions: the position_ids of the innermost model: int64 (batch or 1, q_len), or (axes, batch, q_len).
        weights: the innermost model was asked for attention weights.
        cache: the model's KV cache.
        held: the number of tokens in the cache when the pass began.
        frame: the Python frame that runs the pass; None after its end.
        whole_config: what the model ran as the pass began.
        probed: methods that modules run in place of their own, where rotations are verified.
        axes: under a remap, the positions of tokens if these or cached keys have several each; None: one each.
    """

    outer: ForwardContext | None
    state: AttentionState | None
    positions: Tensor | None = None
    weights: bool = False
    cache: Cache | None = None
    held: int | Tensor = 0
    frame: FrameType | None = None
    whole_config: LongAttnConfig | None = None
    probed: Mapping[nn.Module, LayerMethod] | None = None
    axes: TokenAxes | None = None
    ones: int | None = None  # see `CacheRecord`
    after: Numbering | None = None  # the numbering of the keys in the cache after the pass
    kept: dict[Any, Any] = field(default_factory=dict)  # facts that `engines` keep for all layers
    layouts: dict[Any, Any] = field(default_factory=dict)  # device and `MaskContext` of its layout masks by shape and number
    thread: int = 0  # the identifier of the one that runs it
    reached: set[nn.Module] = field(default_factory=set)  # those of its layers with a method that came here

    @property
    def runs(self) -> bool:
        """True while the pass goes on: torch calls no hook behind an interrupt, nor one that was removed meanwhile."""
        return self.frame is not None and is_running(self.frame)

    @property
    def numbers_text(self) -> bool:
        """True: its position_ids have an axis of the text's own, before those that turn."""
        return self.positions is not None and self.positions.ndim > 2 and len(self.positions) > 3

    def unchanged(self, method: LayerMethod) -> bool:
        """Tell whether, in a pass with `axes`, a layer computes the same as without its method."""
        assert self.axes is not None
        near, few = method.limits
        return self.axes.last < near and self.axes.count <= few

    def note(self, call: CallNumbering) -> None:
        """Take note of how the tokens under one of the pass's masks are numbered.

        Raises:
            ValueError: the cached keys were numbered otherwise.
        """
        known = record_of(self.cache).get("numbering", _ANY) if call.sees_cache and self.cache is not None else _ANY
        if call.sees_cache and not any(_both(known, call.first)):
            raise ValueError(_OTHERWISE)
        after = _both(known, call.tokens)
        self.after = after if self.after is None else _both(after, self.after)


def _both(one: Numbering, other: Numbering) -> Numbering:
    return one[0] and other[0], one[1] and other[1], one[2] and other[2]


PASS: ContextVar[ForwardContext | None] = ContextVar("longattn_pass", default=None)


def current_pass() -> ForwardContext | None:
    """The forward pass that runs in this thread; None where layers are called by themselves, or again in a backward pass."""
    forward_pass = begun = PASS.get()
    while forward_pass is not None and not forward_pass.runs:
        forward_pass = forward_pass.outer
    if forward_pass is not begun:
        PASS.set(forward_pass)
    return forward_pass


class LayerCall(NamedTuple):
    """One layer's call of the attention function, but for its tensors.

    `more` holds the keyword arguments that `attention_forward` does not name.
    """

    module: Any
    method: LayerMethod
    forward_pass: ForwardContext | None
    positions: Tensor | None  # the call's position_ids
    q_len: int
    kv_len: int
    traced: bool
    weights: bool  # attention weights are asked for, of the layer or of the model, which may not tell its layers
    dropout: float
    scaling: float | None
    softcap: float | None
    sliding_window: int | None
    more: dict[str, Any]
    alike: Hashable = None  # see `alike.name_of_call`

    @property
    def kept(self) -> dict[Any, Any]:
        """A dict that layers of its pass share."""
        return {} if self.forward_pass is None else self.forward_pass.kept


@contextmanager
def probing(state: AttentionState, methods: Mapping[nn.Module, LayerMethod]) -> Iterator[None]:
    """While open, this thread's calls of a model's layers run methods that the layers do not have."""
    forward_pass = ForwardContext(current_pass(), state, frame=frame_above(2), probed=methods)  # of the `with`
    token = PASS.set(forward_pass)
    try:
        yield
    finally:
        PASS.reset(token)


def is_probing() -> bool:
    """Tell whether this thread's pass is one of `probing`."""
    return (forward_pass := PASS.get()) is not None and forward_pass.probed is not None
