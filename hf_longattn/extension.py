"""Making a pretrained model longer without training: a method is chosen, put in, and reported."""

from __future__ import annotations

import dataclasses
import difflib
import math
from typing import Any, TypeVar

from torch import nn

from .config import LongAttnConfig, length_of
from .integration import apply, get_config
from .integration.guards import end_of
from .integration.layer_methods import facts_for
from .integration.layers import View
from .integration.model import meant_by
from .methods.yarn_beyond import YarnBeyond
from .slots.method import ModelFacts
from .user_warnings import warn

Model = TypeVar("Model", bound=nn.Module)
#: What a longer model can be for; the first is the default.
PURPOSES = ("both", "reading", "retrieval")
#: The most times its trained length that a model was shown to read well, untrained (docs/lab/longer.md, docs/lab/negative.md).
SHOWN = 4
#: From how many times the trained length on a temperature beside ReRoPE pays.
PAYS = {"logn": 1.5, "yarn_temperature": 1.5, "infoscale": 4}


def extend(
    model: Model,
    to: int | str,
    method: str | LongAttnConfig | None = None,
    purpose: str = "both",
    train_length: int | str | None = None,
    **parameters: Any,
) -> Model:
    """Make a model read texts of `to` tokens (32768 or "32k"), in place and without training; returns the model.

    The default keeps every distance below half the trained length exact and shows larger ones as that (ReRoPE): short texts
    give the same logits as before, and far tokens stay visible. With `to` equal to the trained length and
    purpose="retrieval", it improves retrieval within that length. Where many keys would dilute attention a temperature is
    added: LogN from one and a half times the trained length on in models with QK-norm, InfoScale from four times on in
    others. Other methods and parameters as in `apply`.
    A RoPE scaling that the model was trained with (Llama 3's, longrope, YaRN, linear) stays, and the remap works on top of
    it; one that was added for inference is refused. The model's configs, generation config and saved tokenizer then announce
    `to`, so that harnesses and servers do not cut texts; `remove` puts the old numbers back. A config whose rotation depends
    on that number (dynamic NTK, longrope without a factor) keeps it.
    Layers without rotation, and those with a sliding window shorter than the trained length, do not change. If no layer is
    left, a warning says so.

    Args:
        train_length: the length that the model was trained at, by default read from its config. `describe` shows it, with the
            reason.
        purpose: what the default is for. "retrieval" (of what lies far back) and "both" take ReRoPE; with QK-norm "both" adds
            LogN and "retrieval" YaRN's temperature. "reading", to predict long texts well, takes Leaky ReRoPE, which keeps
            order among far tokens, and no temperature.

    Raises:
        ValueError: `to` is not a length, below the trained length, or beyond the method's reach; the method does not extend;
            `purpose` is unknown, or given together with a method. The model is then unchanged.

    Warns if a method is replaced, the trained length is ambiguous, there is nothing to remap, the model has a sliding window
    that is shorter than `to`, `to` is the trained length and nothing says why, or `to` is more than four times that length,
    at which nothing was shown to read well.
    """
    check_purpose(purpose)
    if method is not None and purpose != PURPOSES[0]:
        raise ValueError(f"purpose chooses a method and {method!r} is one: leave out purpose={purpose!r}, or the method")
    view = View(model)
    if view.model.config.is_encoder_decoder:
        first = next((f"{why}, which no method computes; and " for x in view.candidates if (why := x.refusal)), "")
        raise ValueError(
            f"{view.name} cannot be extended: {first}it reads its text with an encoder, and methods go into causal attention "
            "alone"
        )
    length, replaced, known = length_of(to), view.running, ""
    if train_length is not None:
        parameters["train_length"] = length_of(train_length)
    elif replaced is not None and replaced.train_length is not None:  # as it was told or read when that method came
        parameters["train_length"], known = replaced.train_length, replaced.train_length_source
    asked = None if method is None else LongAttnConfig.parse(meant_by(method, model), parameters)
    told = parameters.get("train_length") if asked is None else asked.train_length
    facts = facts_for(view, LongAttnConfig(train_length=told))
    config = _default(facts, length, purpose, parameters) if asked is None else asked
    if known and told == parameters.get("train_length"):
        facts = dataclasses.replace(facts, train_length_source=known)
        config = dataclasses.replace(config, train_length_source=known)
    _check(view, config, facts, length)
    longer = dataclasses.replace(config, extended_to=length)
    if replaced is not None:
        longer.bind(facts)  # where the model reads so far already, `apply` would only warn that this one does not
    apply(model, longer)
    _report(view, config, replaced, length)
    if asked is None and purpose == PURPOSES[0] and length == facts.train_length:
        warn(_as_it_is(get_config(model), length))
    if facts.train_length is not None and (doubt := beyond_shown(facts.train_length, length)):
        warn(doubt)
    return model


def _default(facts: ModelFacts, to: int, purpose: str, given: dict[str, Any]) -> LongAttnConfig:
    """Return the method that serves a purpose at a length."""
    trained = facts.train_length
    if purpose != "reading":
        pays = None if "stack" in given else temperature(facts, to, purpose)  # which could mean either
        return LongAttnConfig.parse(rerope_with(pays), given)
    if trained is not None:
        given = {"stretch": max(4.0, float(needed(trained // 2, trained, to)))} | given
    return LongAttnConfig.parse("leaky_rerope", given)


def _check(view: View, config: LongAttnConfig, facts: ModelFacts, length: int) -> None:
    """Raise ValueError where a config does not take a model to a length; how far it reaches `bind` checks."""
    if not config.key_intervals:
        raise ValueError(
            f"{config.name} extends nothing: beyond the trained length a model meets distances that it does not know, "
            'and only position remaps ("rerope", the default, "leaky_rerope", "self_extend", "dual_chunk", '
            '"yarn_beyond") and windows change those. Use hf_longattn.apply, beside hf_longattn.rope, if that is what you want'
        )
    if facts.train_length is None:
        raise ValueError("the model's config names no maximum length to extend: use hf_longattn.apply with a window")
    if (end := end_of(view.target, lambda: view.model)) is not None:
        raise ValueError(
            f"the model takes its positions from a table of {end} entries, which no method can extend: use "
            "hf_longattn.apply for a window within it, or a model that computes rotary positions"
        )
    changed = config.positions is not None and not isinstance(config.positions, YarnBeyond)  # within the trained length
    shortest = facts.train_length if changed else facts.train_length + 1
    if length < shortest:
        raise ValueError(
            f"the model was trained at {facts.train_length} tokens ({facts.train_length_source}) and reads {length} as it is: "
            "nothing to extend. Pass train_length= if it was trained at another length"
        )


def _report(view: View, config: LongAttnConfig, replaced: LongAttnConfig | None, length: int) -> None:
    """Warn of a method that gave way, and of what stays unseen."""
    if replaced is not None and replaced.name != config.name:
        warn(f"{config.name} replaces {replaced.name}, which the model ran")
    if (window := own_window(view)) is not None and window < length:
        warn(
            f"the model has a sliding window of its own, {window:,} tokens: what lies farther back stays unseen. To lift it, "
            "build the model with sliding_window=None in its config"
        )


def _as_it_is(config: LongAttnConfig, trained: int) -> str:
    """Say what a remap is for in a model that reads a length without it."""
    far = f"{config.identity_below:,.0f} tokens"
    return (
        f"the model reads {trained:,} tokens as it is: {config.name} serves retrieval from more than {far} back, and changes "
        f'texts longer than that. purpose="retrieval" says that this is meant; hf_longattn.remove(model) takes it out'
    )


def beyond_shown(train_length: int, to: int) -> str | None:
    """Say what was measured where a length is beyond all that a model was shown to read well; else None."""
    if to <= SHOWN * train_length:
        return None
    return (
        f"{to:,} tokens are {to / train_length:.3g} times the trained length of {train_length:,}, and more than {SHOWN} times "
        f"({SHOWN * train_length:,}) was never shown to read well without training: of SmolLM2-135M, passages repeated from "
        "far back cost 1.0 to 1.9 nats per token at 4 times under rerope, and 2.0 to 2.9 at 8 and 16 times"
    )


def own_window(view: View) -> int | None:
    """The sliding window of layers that take a method all the same, because it is as wide as the trained length."""
    layers = [x for x in view.candidates if x.windowed and x.kind == "full"]
    return int(layers[0].config.sliding_window) if layers else None


def check_purpose(purpose: str) -> None:
    """Raise ValueError if there is none of that name."""
    if purpose not in PURPOSES:
        near = difflib.get_close_matches(str(purpose), PURPOSES, 1, 0.7)  # "rag" is not nearly "reading"
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"unknown purpose {purpose!r}; {hint}known: {', '.join(PURPOSES)}")


def needed(window: int, train_length: int, to: int) -> int:
    """The stretch with which a remap of that window reaches `to`, at least 2."""
    return max(2, math.ceil((to - window) / (train_length - window)))


def temperature(facts: ModelFacts, to: int, purpose: str = "both") -> str | None:
    """The temperature that pays beside ReRoPE at that length, if one does: with QK-norm, which bounds how sharp a row of
    attention can be, LogN, or for retrieval YaRN's, which copies better and costs more on prose; else InfoScale. None for
    models that have a temperature of their own.
    """
    sharp = "yarn_temperature" if purpose == "retrieval" else "logn"
    name = sharp if facts.qk_norm else "infoscale"
    if facts.own_temperature is not None or facts.train_length is None or to < PAYS[name] * facts.train_length:
        return None
    return name


def rerope_with(temperature: str | None) -> str:
    return "rerope" if temperature is None else f"rerope+{temperature}"
