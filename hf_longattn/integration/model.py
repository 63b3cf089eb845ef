"""Putting a config into a model, taking it out again, and saying what was done."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import transformers
from torch import nn

from ..config import NO_METHOD, LongAttnConfig, written
from ..slots.learned import LearnedParts, container_of
from ..user_warnings import warn
from .base_attention import base_implementation
from .changes import refuse_while_batching, release, transaction, without_method
from .config_records import NameOf, before, raw_section
from .internals import get_implementation, set_implementation
from .layer_methods import put, settle
from .layers import Layer, View, language_config, pretrained
from .max_length import announce_running
from .model_facts import own_temperature
from .names import is_longattn_name, name_for
from .offload import is_empty
from .parameters import attach
from .saved_method import copy_learned, mark_unsaved, method_in, record_in_adapters
from .state import LayerMethod, is_settled, method_of, set_method
from .trained_length import GIVEN, Trained, published, recorded

Model = TypeVar("Model", bound=nn.Module)
#: What `LongAttnConfig.parse` takes.
MethodLike = str | Mapping[str, Any] | LongAttnConfig


class UntrainedWarning(UserWarning):
    """A pretrained model is run under a method that makes it worse until it is trained with it."""


def apply(model: Model, method: MethodLike | list[MethodLike] | tuple[MethodLike, ...], **parameters: Any) -> Model:
    """Put a method into a model, in place; or several, into different layers.

    Args:
        model: any transformers model whose attention goes through the attention interface, or a PEFT model around one.
        method: a name ("scale_invariant", "a+b", "a:key=value") with its parameters, a complete `LongAttnConfig`, or the dict
            of one; or a list of these, each with its `layers`, of which one without takes all others.

    Returns:
        The same model.

    Raises:
        ValueError: unknown method or parameter; the method would change no layer; or the model runs another method in
            layers that this one leaves out. The model is then unchanged.
    """
    if isinstance(method, nn.Module):
        raise TypeError(f"the model comes first, then the method, and the method given is a {type(method).__name__}")
    config = LongAttnConfig.parse(meant_by(method, model), parameters)
    with change(model) as view:
        _put(view, config, _changed(view) if is_settled(view) and not isinstance(config.layers, str) else set())
    return model


def meant_by(method: Any, model: nn.Module) -> Any:
    """The method that a running model's name (`config._attn_implementation`) stands for; the name alone where that method
    would not fit this model; anything else as it is.
    """
    if not isinstance(method, NameOf):
        return method
    return method.method if fits(method.method, language_config(pretrained(model).config)) else str(method)


def fits(method: LongAttnConfig, config: Any) -> bool:
    """Tell whether another model's method may run as it is: its trained length was given, is this one's, or it has none."""
    return method.train_length_source == GIVEN or method.train_length in (None, recorded(config, config.longattn).length)


def _changed(view: View) -> set[int]:
    """The layers that a method changes."""
    if view.running is None:
        return set()
    return {x.index for x in view.layers if (method := method_of(x.module)) is not None and method.config is not None}


def _put(view: View, config: LongAttnConfig, keep: Set[int] = frozenset()) -> None:
    """Put a config into a model. An extended one stays extended where the config reaches as far; else a warning says so.

    Raises:
        ValueError: the config leaves alone one of the layers `keep`.
    """
    known = view.running
    longer = None if known is None or config.extended_to not in (None, known.extended_to) else known.extended_to
    warn_of_lost_softcap(view.candidates)
    now = put(view, config, name_for(config.name), longer)
    if known and (taken := sorted(keep - _changed(view))):
        raise ValueError(
            f"layers={list(config.layers)} for {config.name} would take {known.name} out of the layers {taken}, which run "
            "it. To have both: hf_longattn.apply(model, [config, config]), each with its `layers`. To change one method's "
            "layers: hf_longattn.update(model, layers=...). To start anew: hf_longattn.remove(model)"
        )
    if known and longer and now.extended_to is None:
        _warn_of_less(known, now, published(view.target)[0])


def _warn_of_less(known: LongAttnConfig, now: LongAttnConfig, says: int) -> None:
    """Say that a model reads no longer as far as `known` was to take it, and how long a text it says to read again."""
    again = f"max_position_embeddings is {says} again"
    if now.key_intervals:
        warn(
            f"{now.name} with these parameters reaches {now.reach:.0f} tokens, and the model was extended to "
            f"{known.extended_to}: {again}. hf_longattn.extend takes it as far as it goes"
        )
        return
    lost = "+".join(m.name for m in known.key_intervals)
    warn(
        f"{now.name} replaces {lost}, with which the model read {known.extended_to} tokens, beyond those that it was trained "
        f'at: {again}. To keep both: "{lost}+{now.name}"',
    )


def _plain_parts(view: View) -> set[LearnedParts]:
    """The learned parts of a model of which no adapter has copies."""
    return {part for x in view.layers if isinstance(part := container_of(x.module), LearnedParts)}


@contextmanager
def change(model: nn.Module, waits: bool = False) -> Iterator[View]:
    """A transaction, after which adapters know what the model runs, and the user what harms untrained weights."""
    with transaction(model, waits) as view:
        known, had = view.running, _plain_parts(view)
        yield view
        if view.running != known:
            refuse_while_batching(view.model)
        announce_running(view)
        record_in_adapters(view, view.running)
        copy_learned(view)
        if mark_unsaved(view, came_now=bool(_plain_parts(view) - had)):
            warn(
                "the method's learned parameters came after the adapter, whose kind cannot save them then: apply the method "
                "first, then make the adapter, or take LoRA or IA3",
            )
        warn_untrained(view, view.running, known)
        release(view)


def update(model: Model, **parameters: Any) -> Model:
    """Change parameters of the method that a model runs.

    Changing `strength`, for schedules, costs nothing: no forward pass, and no recompilation once it has been other than 1.
    """
    with change(model) as view:
        settle(view)
        config = _running(view).replace(**parameters)
        methods = {x.module: method for x in view.of_target if (method := method_of(x.module)) is not None}
        held, modules = raw_section(view.target), set(view.modules)
        unchanged = methods and all(
            p.whole_config is held and (p.rotary is None or p.rotary.module in modules) for p in methods.values()
        )
        if not unchanged or parameters.keys() != {"strength"} or config.logit_map is None or not config.logit_map.blends:
            _put(view, config)
            return model
        view.state.set_running(view, config)
        for module, method in methods.items():
            own = method.config and method.config.replace(**parameters)
            set_method(module, dataclasses.replace(method, whole_config=config, config=own))
    return model


def remove(model: Model) -> Model:
    """Undo `apply` (or `attn_implementation=...`): the attention the model had before; returns the model.

    Raises:
        ValueError: there is nothing to remove.
    """
    with change(model) as view:
        if not take_out(view):
            runs = get_implementation(view.model.config)
            raise ValueError(f"{view.name} runs {runs!r}; there is nothing to remove")
    return model


#: What else in a config decides how a model attends.
_ATTENDS = ("rope_parameters", "layer_types", "sliding_window")


def say_what_runs(model: nn.Module) -> LongAttnConfig | None:
    """Before a model is saved: let its config say what its layers run, and return that.

    ValueError: what they run is not known (see `settle`), or the config cannot say it.
    """
    view = View(model)
    if view.running is None or is_settled(view):
        settle(view)
    else:
        with change(model) as view:
            settle(view)
    if (runs := view.running) is None or runs == NO_METHOD:  # that looks on alone
        return None
    says = language_config(view.model.config)
    alike = _ATTENDS if type(says) is type(view.target) else ()
    differ = [key for key in alike if getattr(says, key, None) != getattr(view.target, key, None)]
    said = method_in(view.model.config.to_dict())
    # a method of one's own may have been registered again since: its class is another then, and what is saved the same
    if differ or (said != runs and (said is None or said.to_dict() != runs.to_dict())):
        what = f"has another {', '.join(differ)} than" if differ else f"cannot say that {runs.name} runs in"
        raise ValueError(
            f"{view.name} cannot be saved: its config, {type(view.model.config).__name__}, {what} the "
            f"{type(view.target).__name__} of its attention layers, which were put into it. Save the model that these are "
            "from, or build this one with their config"
        )
    return runs


def take_out(view: View) -> bool:
    """Let a model run what it ran before any method; whether there was one."""
    configs = without_method(view)
    for c, implementation in configs:
        set_implementation(c, implementation)  # not by the property, which would set the towers' too
        c.longattn = None
    if configs:
        view.model.config.longattn = None
        for layer in view.layers:
            attach(view.model, layer, ())
    return bool(configs)


def warn_of_lost_softcap(layers: Iterable[Layer]) -> None:
    """Older releases of transformers run Gemma 2 under sdpa, which drops its softcap without a word."""
    for layer in layers:
        cap, config = getattr(layer.module, "attn_logit_softcapping", None), layer.module.config
        if cap and get_implementation(config) == "sdpa":
            warn(
                f"{config.model_type} caps its attention scores at {cap:g}, and transformers {transformers.__version__} runs "
                'it under sdpa, which drops the cap: load it with attn_implementation="eager". hf_longattn keeps it',
            )
            return


def warn_untrained(view: View, runs: LongAttnConfig | None, known: LongAttnConfig | None = None) -> None:
    """Warn of methods that pretrained weights get worse under, other than those of `known`, where a model is put to use.

    A model in training mode is being trained, one with an adapter was, and one loaded from nowhere has nothing to lose.
    """
    model, of = view.model, vars(view.model)
    if model.training or of.get("peft_config") or not of.get("name_or_path") or is_empty(model):
        return
    untrained = [[m for m in (c.methods if c else ()) if m.needs_training] for c in (known, runs)]
    kinds = set(map(type, untrained[0]))
    if names := [m.name for m in untrained[1] if type(m) not in kinds]:
        measured = {"scale_invariant", "output_standardise", "output_layer_norm"}.intersection(names)
        calibrate = ", set it by hf_longattn.calibrate" if measured else ""
        warn(
            f"{' and '.join(names)}: these weights were not trained under it, and have higher losses until they are. Train "
            f"them (hf-longattn train){calibrate}, or take "
            "hf_longattn.extend to read longer texts without training. To silence this: "
            'warnings.filterwarnings("ignore", category=hf_longattn.UntrainedWarning)',
            UntrainedWarning,
        )


@contextmanager
def no_untrained_warning() -> Iterator[None]:
    """While open, give no `UntrainedWarning`: for callers that train or measure a method, or put back a trained one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntrainedWarning)
        yield


def get_config(model: nn.Module) -> LongAttnConfig:
    """The config that a model runs; ValueError if it runs none."""
    return _running(View(model))


def _running(view: View) -> LongAttnConfig:
    if (config := view.running) is None:
        runs = get_implementation(view.model.config)
        raise ValueError(f"{view.name} runs {runs!r}, not an hf_longattn method: put one in by hf_longattn.apply(model, name)")
    return config


def running(model: nn.Module) -> LongAttnConfig | None:
    """The config that a model runs, if it runs one."""
    return View(model).running


@dataclass(frozen=True)
class Description:
    """Each attention module of a model, described; `print` it (equal modules in one line), or read `rows` and `config`."""

    model: str
    config: LongAttnConfig | None
    rows: tuple[tuple[str, str, str], ...]  # module, method and parameters or "unchanged", backend or reason
    trained: Trained | None = None  # the length that it was trained at, and where that number is from
    own_temperature: str | None = None  # what the model by itself multiplies scores with

    def __str__(self) -> str:
        head = f"{self.model}: {self.config.name if self.config else 'no hf_longattn method'}"
        if self.trained is not None:
            head += f", {self.trained}"
        if self.own_temperature is not None:
            head += f"; the model's own temperature: {self.own_temperature}"
        rows = []
        for what, alike in itertools.groupby(self.rows, key=lambda row: row[1:]):
            names = [name for name, *_ in alike]
            rows.append((names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} modules)", *what))
        width = [max((len(r[i]) for r in rows), default=0) for i in (0, 1)]
        return "\n".join([head, *(f"  {a:<{width[0]}}  {b:<{width[1]}}  {c}" for a, b, c in rows)])


def describe(model: nn.Module) -> Description:
    """Per attention module: method, parameters and backend, or why it was left alone; the trained length, and why; and the
    temperature that the model brings itself.
    """
    view, rows = View(model), []
    for layer in view.layers:
        method = method_of(layer.module)
        implementation = get_implementation(layer.module.config)
        if method is None or not is_longattn_name(implementation):
            rows.append((layer.name, "unchanged", f"runs {implementation}"))
        elif method.config is None:
            rows.append((layer.name, "unchanged", f"{method.reason}, {_runs(layer.module.config)}"))
        else:
            rows.append((layer.name, written(method.config.methods), _how(method, method.config)))
    known = None if view.target is None else recorded(view.target, view.target.longattn)
    own = own_temperature(view, [x for x in view.candidates if not x.why_not] or view.candidates) if view.candidates else None
    return Description(view.name, view.running, tuple(rows), known, own)


def _how(method: LayerMethod, config: LongAttnConfig) -> str:
    parts = [f"backend {config.backend}"]
    if method.reason:
        parts.append(f"not remapped: {method.reason}")
    elif method.rotary is not None and not method.rotary.verified:
        parts.append("rotation verified at the first call")
    elif config.backend in ("auto", "fused", "tiled") and _turns_keys(config):
        parts.append("keys in a DynamicCache turned once on a CPU")
    return ", ".join(parts)


def _turns_keys(config: LongAttnConfig) -> bool:
    """Tell whether decoding keeps keys, rotated or normalised, beside a cache."""
    if config.positions is None:
        return config.score is not None
    intervals = config.positions.intervals(torch.zeros(1, 1, dtype=torch.int64, device="cpu"))
    return config.score is not None or any(interval.key is not None for interval in intervals)


def _runs(config: Any) -> str:
    known = before(config)
    if known is None or known.base == known.implementation:
        return f"runs {base_implementation(known)}"
    return f"runs {known.base} in place of {known.implementation}"
