"""Position encodings through transformers' own rope types: edit a config, then build or load the model with it.

    config = hf_longattn.rope.prope(AutoConfig.from_pretrained(name), fraction=0.5)
    model = AutoModelForCausalLM.from_pretrained(name, config=config, attn_implementation="scale_invariant")

Each function edits the config in place and returns it. Where a model keeps settings per layer type, those of its
full-attention layers are edited. In a built model this has no effect: its rotary tables exist already. train_length is the
length that the model was trained at, in tokens or as "8k", by default read from its config.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..core.tracing import readable
from ..slots.method import freeze, length_of, require_in, require_positive
from .internals import buffers_of, children_of, modules_of
from .trained_length import ORIGINAL, rope_settings, trained

Config = TypeVar("Config")
#: Stands for a frequency of 0: transformers divides by a factor, and 1 / NO_ROTATION is one that leaves no rotation.
NO_ROTATION = 1e-12
#: YaRN's parameters beside its factor, as transformers calls them.
YARN = frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"})


def prope(config: Config, fraction: float = 0.5, theta: float | None = None, effective_base: float | None = None) -> Config:
    """p-RoPE: rotate the highest-frequency `fraction` of the pairs, leave the rest unrotated (rope_type "proportional").

    The lowest rotated frequency is theta^(2/d - fraction), d = head_dim. theta=None keeps the model's own, so that the pairs
    that still rotate do so as before. effective_base=1024 takes the theta for which it is 1/1024, as in the paper's models.

    Raises:
        ValueError: theta and effective_base are both given, or fewer than two pairs rotate from 1 to 1/effective_base.
    """
    fraction, theta, effective_base = map(freeze, (fraction, theta, effective_base))
    require_in("fraction", fraction, 0.0, 1.0)
    require_positive(theta=theta, effective_base=effective_base)
    if effective_base is not None:
        if theta is not None:
            raise ValueError("theta and effective_base exclude each other: each says how fast the pairs rotate")
        theta = theta_of(effective_base, fraction, _head_dim(_text(config)))
    changes: dict[str, Any] = {"rope_type": "proportional", "partial_rotary_factor": fraction}
    return _edit(config, changes if theta is None else changes | {"rope_theta": theta})


def theta_of(effective_base: float, fraction: float, head_dim: int) -> float:
    """The theta at which p-RoPE's rotated pairs go from frequency 1 to 1/effective_base, both included."""
    pairs = int(fraction * head_dim // 2)  # as transformers counts them
    if pairs < 2:
        raise ValueError(
            f"a fraction of {fraction:g} of {head_dim // 2} pairs leaves {pairs} to rotate; effective_base needs 2"
        )
    return float(effective_base ** (head_dim / (2 * (pairs - 1))))


def _head_dim(text: Any) -> int:
    by_type = isinstance(getattr(text, "rope_parameters", {}).get("full_attention"), dict)
    own = getattr(text, "global_head_dim", None) if by_type else None
    return int(own or getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def nope(config: Config) -> Config:
    """No position encoding: p-RoPE with no pair rotated. For models trained so, or under ALiBi."""
    return prope(config, 0.0)


def ntk(config: Config, factor: float, train_length: int | str | None = None) -> Config:
    """Dynamic NTK: beyond the trained length L, θ' = θ (factor n / L - (factor - 1))^{d/(d-2)} (rope_type "dynamic").

    Raises:
        ValueError: train_length is not the config's max_position_embeddings, from which transformers takes L.
    """
    if train_length is not None and length_of(train_length) != (counted := _text(config).max_position_embeddings):
        raise ValueError(
            f"dynamic NTK counts from the config's max_position_embeddings, {counted:,}, and not from train_length="
            f"{train_length!r}: set that in the config, or take yarn or linear"
        )
    return _scaled(config, "dynamic", factor, train_length)


def linear(config: Config, factor: float, train_length: int | str | None = None) -> Config:
    """Position interpolation: all positions divided by `factor` (rope_type "linear")."""
    return _scaled(config, "linear", factor, train_length)


def yarn(config: Config, factor: float, train_length: int | str | None = None, **parameters: Any) -> Config:
    """YaRN for `factor` times the trained length (rope_type "yarn"); it brings a temperature of its own.

    Raises:
        ValueError: a parameter is none of transformers' (attention_factor, beta_fast, beta_slow, mscale, ...).
    """
    if unknown := sorted(parameters.keys() - YARN):
        raise ValueError(f"YaRN has no parameter {', '.join(unknown)}; it has {', '.join(sorted(YARN))}")
    return _scaled(config, "yarn", factor, train_length, **{name: freeze(value) for name, value in parameters.items()})


def cope(config: Config, pairs: int | None = None, train_length: int | str | None = None) -> Config:
    """CoPE (arXiv:2602.05258): the `pairs` of lowest frequency fade out by a raised cosine (rope_type "longrope").

    Of these n pairs, k = 0 .. n-1 by falling frequency, ω_k' = ω_k (1 + cos(π k / (n-1))) / 2: the first keeps its frequency,
    the last is not rotated. Made for continued training.

    Args:
        pairs: n, at least 2; default 20 of 64 as in the paper, to the nearest whole number.

    Raises:
        ValueError: there are not so many pairs.
    """
    text = _text(config)
    known, share = _trained_at(text, train_length), rope_settings(text).get("partial_rotary_factor", 1.0)
    rotated = int(_head_dim(text) * share) // 2
    pairs = round(20 / 64 * rotated) if pairs is None else freeze(pairs)
    if pairs not in range(2, rotated + 1):
        raise ValueError(f"pairs must be a whole number from 2 to the {rotated} that the model rotates, got {pairs!r}")
    fading = [(1 + math.cos(math.pi * k / (pairs - 1))) / 2 for k in range(int(pairs))]
    divide = [1.0] * (rotated - int(pairs)) + [1 / max(weight, NO_ROTATION) for weight in fading]
    unscaled = {"factor": 1.0, "attention_factor": 1.0}
    lists = {"short_factor": divide, "long_factor": divide}  # equal: nothing changes where a call becomes long
    return _edit(config, {"rope_type": "longrope", ORIGINAL: known} | lists | unscaled)


def _scaled(config: Config, rope_type: str, factor: float, train_length: int | str | None, **parameters: Any) -> Config:
    factor = freeze(factor)
    require_in("factor", factor, 1, math.inf)
    known = _trained_at(_text(config), train_length)
    return _edit(config, {"rope_type": rope_type, "factor": factor, ORIGINAL: known} | parameters)


def _trained_at(text: Any, train_length: int | str | None) -> int | None:
    return trained(text, train_length=None if train_length is None else length_of(train_length)).length


def _text(config: Any) -> Any:
    if not hasattr(config, "get_text_config"):
        raise TypeError(
            "hf_longattn.rope edits a config, AutoConfig.from_pretrained(name), before a model is built with it, got "
            f"{type(config).__name__}"
        )
    return config.get_text_config()


def _edit(config: Config, changes: dict[str, Any]) -> Config:
    text = _text(config)
    settings = getattr(text, "rope_parameters", None)
    if not settings:
        raise ValueError(f"{type(text).__name__} has no rope_parameters: the model has no rotary position encoding to change")
    if isinstance(settings.get("full_attention"), dict):
        text.rope_parameters = settings | {"full_attention": _edited(settings["full_attention"], changes)}
    else:
        text.rope_parameters = _edited(settings, changes)
    return config


def _edited(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    if (present := settings.get("rope_type", "default")) not in ("default", changes["rope_type"]):
        raise ValueError(
            f"the model has rope_type {present!r} already; {changes['rope_type']!r} on top of it would scale twice. Reset "
            "config.rope_parameters first if that is what you want"
        )
    return settings | changes


@dataclass
class RotaryTables:
    """Settings of a model's rotary encoding, and the modules that were made from them: (parent, name, module)."""

    settings: dict[str, Any]
    modules: list[tuple[nn.Module, str, nn.Module]]


def settings_of(model: Any) -> dict[str, Any] | None:
    """The rotary settings of a model (of its language model) or of a config; None if it has none."""
    return copy.deepcopy(getattr(_text(getattr(model, "config", model)), "rope_parameters", None)) or None


def build(model: Any, settings: dict[str, Any]) -> RotaryTables:
    """New rotary modules for a built model, made from other settings; `exchange` puts them in."""
    text = copy.copy(_text(model.config))
    text.rope_parameters = copy.deepcopy(settings)
    modules = []
    for parent, name, module in _rotary_modules(model):
        device = next(module.buffers()).device
        with torch.device("cpu"):  # as from_pretrained makes it, whatever the default device is
            fresh = type(module)(text).to(device)  # type: ignore[call-arg]
        fresh.config = module.config  # which has these settings once they are in
        modules.append((parent, name, fresh))
    if not modules:
        raise ValueError(f"{type(model).__name__} has no rotary module to change")
    return RotaryTables(text.rope_parameters, modules)


def exchange(model: Any, tables: RotaryTables) -> RotaryTables:
    """Put rotary modules and their settings into a built model; returns those that it had."""
    before = RotaryTables(_text(model.config).rope_parameters, _rotary_modules(model))
    _text(model.config).rope_parameters = tables.settings
    for parent, name, module in tables.modules:
        setattr(parent, name, module)
    return before


def check_built(model: Any) -> None:
    """Raise ValueError where the rotary settings in a model's config are not those that it was built with and rotates by."""
    settings, modules = settings_of(model), _rotary_modules(model)
    if settings is None or not modules or not all(readable(b) for *_, module in modules for b in module.buffers()):
        return
    for (_, name, now), (*_, fresh) in zip(modules, build(model, settings).modules, strict=True):
        if _turns(now).keys() != _turns(fresh).keys() or not all(_equal(x, _turns(fresh)[k]) for k, x in _turns(now).items()):
            raise ValueError(
                f"config.rope_parameters are {settings}, and the model was built with others: {name} does not rotate by those "
                "that were written later. Load the model with them (from_pretrained(name, config=config)), or put back what "
                "its checkpoint says"
            )


def _turns(rotary: nn.Module) -> dict[str, Any]:
    """Return the tensors that a rotary module was made with: frequencies (in use they may change with the text), scales."""
    held = {**buffers_of(rotary), **vars(rotary)}  # named_buffers() names one tensor once, and two may share it
    now, first = ({k: x for k, x in held.items() if k.endswith(name)} for name in ("inv_freq", "original_inv_freq"))
    return (first or now) | {k: x for k, x in held.items() if k.endswith("attention_scaling")}


def _equal(now: Any, fresh: Any) -> bool:
    """Compare, up to the rounding of a model that is, or once was, in half precision."""
    if not isinstance(now, Tensor):
        return bool(now == fresh)
    return now.shape == fresh.shape and torch.allclose(now.float(), fresh.float(), rtol=1e-2, atol=1e-6)


def _rotary_modules(model: Any) -> list[tuple[nn.Module, str, nn.Module]]:
    """Each rotary module of a model's text, with the module around it and its name there."""
    text = _text(model.config)
    named = [(parent, name, x) for parent in modules_of(model) for name, x in children_of(parent).items() if x is not None]
    own = [x for x in named if vars(x[2]).get("config") is text]
    return [x for x in own if any(b.endswith("inv_freq") for b in buffers_of(x[2]))]
