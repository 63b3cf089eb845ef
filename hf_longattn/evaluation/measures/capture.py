"""Looking into the attention of a model while it runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from ...core.call import Call
from ...integration.layers import Layer
from ...integration.observer import observe
from .diagnostics import Diagnostics
from .sums import Options, Sums, collect


class Capture:
    """The calls that an open or closed capture has seen."""

    def __init__(self) -> None:
        self.layers = 0  # how many are looked at
        self.sums: dict[int, Sums] = {}

    def result(self) -> Diagnostics:
        """Everything measured so far, over all forward passes; ValueError if there was none."""
        return collect(self.sums)


@contextmanager
def capture(
    model: nn.Module,
    layers: Iterable[int] | None = None,
    what: Collection[str] | str | None = None,
    *,
    rows: int | None = None,
    delta: int = 4,
    local: int = 100,
    sinks: int = 1,
    seed: int = 0,
    on_layer: Callable[[int], None] | None = None,
) -> Iterator[Capture]:
    """Measure attention, per layer and head, in every forward pass inside the `with`.

        with hf_longattn.capture(model, what=("entropy", "ranges"), rows=512) as seen:
            model(input_ids)
        seen.result()["entropy"]        # (layer, head, length)

    Works with a method in the model, which is then measured as it acts, and without one. The model computes what it always
    does (without a method: see below), and is as it was afterwards, whatever happens inside. Meanwhile its method cannot be
    changed.

    Args:
        layers: numbers of the layers, default all whose attention is not limited to a sliding window. Sliding-window layers
            are seen only under a method that changes them (`layers="all"`).
        what: groups of quantities, default all: see `hf_longattn.evaluation.measures.diagnostics.QUANTITIES`.
        rows: read at most so many query rows of a call, spread evenly over it, instead of all. Keys are never sampled.
        delta: Δ >= 2; ranges of distances are [0, 1), [1, Δ), [Δ, Δ²), ...
        local: how many of the last keys `local_mass` counts, the token itself included.
        sinks: how many of the first keys are the sink: their mass is measured, and ranges and logits leave them out.
        seed: of the rows, and of the logits drawn for "qq".
        on_layer: called with a layer's number after each of its calls, for a progress bar.

    Raises:
        ValueError: `what` or `layers` names something that is not there, or there is no layer to look at.
        RuntimeError: a capture of the model is open.

    A model without a method gives bit for bit the same logits where it runs sdpa without padding; elsewhere (eager, padding)
    another exact kernel runs while the capture is open, and logits agree to rounding. Memory beyond the model's own: a few
    times 32 MB of logits, or one query row over all heads where that is more.
    """
    options = Options(what, rows, delta, local, sinks, seed)
    seen = Capture()

    def look(layer: Layer, call: Call, output: Tensor) -> None:
        seen.sums.setdefault(layer.index, Sums(options)).add(call, output)
        if on_layer is not None:
            on_layer(layer.index)

    with observe(model, look, layers) as observed:
        seen.layers = len(observed)
        yield seen
