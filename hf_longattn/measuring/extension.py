"""Making a pretrained model longer without training."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..config import LongAttnConfig, length_of
from ..integration import apply, rope
from ..integration.model import methods_of
from ..integration.planning import bound_config
from ..methods.string import String
from .calibration import calibrate
from .evaluation import PASSAGE, Copy, copy_losses, loss_by_position, token_losses, with_copies
from .settings import UNMODIFIED, Setting

Model = TypeVar("Model", bound=nn.Module)
YARN = "YaRN"


def extend(model: Model, to: int | str, method: str | LongAttnConfig | None = None, **parameters: Any) -> Model:
    """Make a model read texts of `to` tokens (32768 or "32k"), in place and without training; returns the model.

    The default keeps every distance below half the trained length exact and caps all others there (ReRoPE): short texts give
    the logits they always gave, and far tokens stay within reach. `to` its trained length, a model reads better inside it:
    the farthest distances, which it met rarely, are shown nearer (STRING). Other methods and parameters as in `apply`.
    The config's max_position_embeddings becomes `to`, so that harnesses and servers do not cut texts, and
    original_max_position_embeddings keeps the trained length.

    Raises:
        ValueError: `to` is no length, below the trained length or beyond the method's reach, or the method extends nothing.
            The model is then unchanged.

    Warns where a method is replaced.
    """
    length = length_of(to)
    trained = bound_config(model, LongAttnConfig())[1].train_length
    method = method or ("string" if length == trained else "rerope")
    config = (
        method.replace(**parameters) if isinstance(method, LongAttnConfig) else LongAttnConfig.preset(method, **parameters)
    )
    if not config.key_bands:
        raise ValueError(
            f"{config.name} extends nothing: beyond the trained length a model meets distances that it does not know, "
            'and only position remaps ("rerope", the default, "leaky_rerope", "self_extend", "dual_chunk", "yarn_beyond") and '
            "windows change those. Use hf_longattn.apply, beside hf_longattn.rope, if that is what you want"
        )
    bound, facts = bound_config(model, config)
    if facts.train_length is None:
        raise ValueError("the model's config names no maximum length to extend: use hf_longattn.apply with a window")
    if length < facts.train_length + (not isinstance(config.positions, String)):
        raise ValueError(
            f"the model was trained at {facts.train_length} tokens and reads {length} as it is: nothing to extend"
        )
    reach = None if bound.remap is None else bound.remap.reach(facts.train_length)
    if reach is not None and length > reach:
        raise ValueError(
            f"{bound.name} with these parameters reaches {reach} tokens, not {length}: beyond that it shows distances that "
            "the model does not know. Raise stretch, group or factor, lower window, or use rerope, which has no limit"
        )
    replaced = "+".join(m.name for m in methods_of(model))
    apply(model, config)
    if replaced not in ("", config.name):
        warnings.warn(f"{config.name} takes the place of {replaced}, which the model ran", stacklevel=2)
    rope.lengthen(model.config, facts.train_length, length)
    return model


def candidates(train_length: int, to: int) -> list[Setting]:
    """The short list that `hf-longattn extend` tries: YaRN, and one of each kind of remap with just enough reach for `to`."""

    def needed(window: int) -> int:
        return max(2, math.ceil((to - window) / (train_length - window)))

    half, eighth = train_length // 2, max(train_length // 8, 1)
    return [
        Setting(UNMODIFIED),
        Setting(YARN, rope=f"yarn:{to / train_length}"),
        Setting("yarn_beyond", "yarn_beyond", {"factor": to / train_length}),
        Setting("rerope", "rerope", {"window": half}),
        Setting("leaky_rerope", "leaky_rerope", {"window": half, "stretch": float(needed(half))}),
        Setting("self_extend", "self_extend", {"window": eighth, "group": needed(eighth)}),
    ]


def by_head(model: nn.Module, input_ids: Tensor, leaky: Setting, train_length: int) -> Setting:
    """A leaky_rerope that caps the far keys of heads that copy, as measured at the beginning of a text (1, length)."""
    assert leaky.config is not None
    method = calibrate(model, [input_ids[:, : min(train_length // 2, 4096)]], leaky.config)
    return Setting(f"{leaky.name} by head", method.to_dict())


@dataclass(frozen=True)
class Scores:
    """Losses in nats per token: on prose within and beyond the trained length, and on each copy."""

    within: float
    beyond: float
    copies: tuple[float, ...]

    @property
    def copying(self) -> float:
        return sum(self.copies) / len(self.copies)

    @property
    def total(self) -> float:
        """What is minimised: prose beyond the trained length and far copying, with equal weight."""
        return (self.beyond + self.copying) / 2


def plan_copies(train_length: int, to: int) -> list[Copy]:
    """Five copies: one that the unmodified model reaches, then four beyond the trained length from ever farther back.

    Raises:
        ValueError: they do not fit between the two lengths.
    """
    least = train_length + 4 * max(PASSAGE, math.ceil(2 * PASSAGE - 0.1 * train_length))
    if train_length < 7 * PASSAGE:
        raise ValueError(f"five passages of {PASSAGE} tokens have no room in a trained length of {train_length} tokens")
    if to < least:
        raise ValueError(
            f"four passages of {PASSAGE} tokens are repeated beyond the trained length of {train_length}, which takes {least} "
            f"tokens or more, not {to}"
        )
    ends = [train_length + (to - train_length) * n // 4 for n in (1, 2, 3, 4)]
    sources = [int(share * train_length) for share in (0.9, 0.75, 0.65, 0.05)]
    far = [Copy(end - PASSAGE - source, end - PASSAGE) for source, end in zip(sources, ends, strict=True)]
    return [Copy(train_length // 4, train_length // 2), *far]


@torch.inference_mode()
def score(model: nn.Module, input_ids: Tensor, train_length: int, copies: Sequence[Copy]) -> Scores:
    """One forward pass over a text (1, length) with `copies` written into it; prose loss leaves them out."""
    ids, taken = with_copies(input_ids, copies)
    losses = token_losses(model, ids)
    within, beyond = loss_by_position(losses, [1, train_length, ids.shape[1]], taken)
    return Scores(within, beyond, tuple(copy_losses(losses, copies)))


def best(scores: dict[str, Scores], unmodified: str, tolerance: float) -> str:
    """The name with the lowest total among those that cost at most `tolerance` nats within the trained length.

    Raises:
        ValueError: nothing but the unmodified model stays within the tolerance.
    """
    allowed = {n: s for n, s in scores.items() if s.within <= scores[unmodified].within + tolerance}
    if set(allowed) <= {unmodified}:
        raise ValueError(
            f"every candidate costs more than {tolerance} nats per token within the trained length; raise the tolerance if "
            "that is acceptable"
        )
    return min((n for n in allowed if n != unmodified), key=lambda n: allowed[n].total)
