"""Deciding what every attention module of a model does: its method, and what is refused."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from ..config import CUSTOM, NO_METHOD, LongAttnConfig
from ..slots.method import ModelFacts
from ..user_warnings import warn
from .changes import remember
from .config_records import raw_section
from .guards import guard
from .internals import attends_in_place, foreign_forward, get_implementation, set_implementation
from .layers import Layer, View
from .masks import refuse_both_ways
from .model_facts import facts_of, num_heads
from .names import is_longattn_name, name_for, parsed_config, refuse_taken, short
from .parameters import attach_learned_parts
from .passes import hook_passes
from .saved_method import differs_by_layer, refuse_kind
from .shared import outermost, refuse_shared, track_model
from .state import AttentionState, LayerMethod, is_settled, method_of, set_method
from .verify import rotary_of, verify_rotations


def prepare(view: View, verify: bool = False) -> None:
    """Put into a model what its configs name and describe; one without our names stays as it is.

    Args:
        verify: verify rotations now; else at the first call, since a model that is being built has no weights.

    Raises:
        ValueError: nothing in the model can run the method, or the config does not fit.
    """
    named = [(c, name) for c in view.configs if is_longattn_name(name := get_implementation(c))]
    if not named:
        return
    if view.target is None or (config := parsed_config(view.target)) is None:
        refuse_name(view, named[0][1], raw_section(named[0][0]))
    put(view, config, str(get_implementation(view.target)), verify=verify)


def put(view: View, config: LongAttnConfig, name: str, longer: int | None = None, verify: bool = True) -> LongAttnConfig:
    """Put a config into a model under a name: plan, check, and then write.

    Args:
        longer: the length that the model was extended to, which stays if the config reaches so far.

    Returns:
        what the model runs now.

    Raises:
        ValueError: the config does not fit. Only what ran before has been noted then, which a transaction takes back.
        RuntimeError: another package has an attention of that name.
    """
    if (target := view.target) is None:
        raise ValueError(no_layer(view, config))
    refuse_taken(name)
    state = view.state or AttentionState()
    left_alone = {  # vision towers, and other parts under the same name
        x.module: LayerMethod(state, raw_section(c), None, x.why_never or "not the language model")
        for x in view.layers
        if (c := x.config) is not target and is_longattn_name(get_implementation(c))
    }
    for c in view.method_configs:
        if not is_longattn_name(get_implementation(c)):
            remember(view, c, get_implementation(c))
    for adapter in view.adapters:
        refuse_kind(adapter, config)
    bound, methods, facts = _layer_methods(view, config, state, longer)
    methods |= left_alone
    for c in view.method_configs:
        set_implementation(c, name)  # not by the property, which would switch towers too
    if verify:
        methods |= verify_rotations(view, methods)
    state.set_running(view, bound)
    for layer in view.layers:
        set_method(layer.module, methods.get(layer.module))
    state.unverified = any(method.rotary is not None and not method.rotary.verified for method in methods.values())
    track_model(view.model)
    attach_learned_parts(view, facts)
    guard(view, state)
    hook_passes(view, state, renew)
    return bound


def settle(view: View) -> None:
    """Plan a model anew if its layers or configs have changed since its method came (see `is_settled`).

    The method then goes into all of them.

    Raises:
        ValueError: the config differs by layer, and layers have changed their numbers; they are also those of another model;
            or the model runs no method, and some of its layers do.
    """
    if (config := view.running) is None:
        _refuse_strangers(view)
        return
    if is_settled(view):
        return
    refuse_shared(view)
    known = set() if view.state is None else {*view.state.layers}
    methods = [(x, method) for x in view.candidates if (method := method_of(x.module)) is not None]
    moved = known != {x.index for x in view.candidates} or any(method.index != x.index for x, method in methods)
    if moved and differs_by_layer(config):
        raise ValueError(
            f"{config.name} is not the same in all layers of {view.name}, and some of these were copied, moved, dropped or "
            "renumbered since it was put in: which of them is to run what is not known. Say it for the layers as they are "
            f"now, hf_longattn.apply(model, {config.name!r}, layers=[...], ...), or hf_longattn.remove(model)"
        )
    put(view, config, name_for(config.name))


def renew(state: AttentionState, model: nn.Module) -> None:
    """`settle` for a pass, which knows the innermost model alone."""
    view = View(outermost(state, model))
    settle(view)
    state.arrange(view)


def _refuse_numbers(view: View, config: LongAttnConfig) -> None:
    """Raise where a config goes by the layers' numbers, and a layer's number is not its place, as it is once loaded."""
    odd = [x for x in view.candidates if len(x.places) == 1 and x.index != x.places[0]]
    if odd and differs_by_layer(config):
        says = ", ".join(f"{x.name} says {x.index}" for x in odd[:3])
        raise ValueError(
            f"{config.name} is not the same in all layers of {view.name}, whose numbers (layer_idx) are not their places: "
            f"{says}. Saved and loaded they would be. Number them first, layer_idx = 0, 1, ..., and "
            "hf_longattn.apply(model, ...) by these numbers"
        )


def _refuse_strangers(view: View) -> None:
    """Raise for a model without a method of which some layers run one, or a config names one."""
    if view.state is not None and view.state.disabled is not None:
        return
    names = (get_implementation(c) for c in view.method_configs)
    if (name := next(filter(is_longattn_name, names), None)) is not None:
        strange = [x.index for x in view.candidates if is_longattn_name(get_implementation(x.module.config))]
        which = f"its layers {strange} came from a model" if strange else "its config is that of a model"
        raise ValueError(
            f"{view.name} runs {get_implementation(view.target)!r}, and {which} under {short(name)}: put a method "
            "into all of it, hf_longattn.apply(model, ...), or take that one out, hf_longattn.remove(model)"
        )


def _layer_methods(
    view: View, config: LongAttnConfig, state: AttentionState, longer: int | None
) -> tuple[LongAttnConfig, dict[nn.Module, LayerMethod], ModelFacts]:
    """The config bound to a model, the methods of its language model's attention modules, and the facts they are bound to."""
    candidates, name = view.candidates, view.name
    by_part = [(part, [x for x in candidates if config.of_layer(x.index) is part and _takes(part, x)]) for part in config.each]
    chosen = [x for _, layers in by_part for x in layers]
    _refuse_layers(view, config, chosen)
    _refuse_numbers(view, config)
    bound, facts = _bound(view, config, chosen or candidates, longer)
    for part, layers in by_part:
        _refuse_part(name, part, candidates, layers)
    remapped = [x for part, layers in by_part if part.remap is not None for x in layers]
    if remapped and view.model.config.is_encoder_decoder:
        raise ValueError(
            f"{config.name} remaps rotary distances, and how {name} rotates cannot be verified: its decoder does not read a "
            "text alone, but with what an encoder made of another one. Take a temperature (infoscale, logn)"
        )
    types = dict.fromkeys(x.type for x in remapped)
    rotary = {t: rotary_of(view, [x for x in remapped if x.type == t]) for t in types}
    methods: dict[nn.Module, LayerMethod] = {}
    for layer in view.of_target:
        own = bound.for_layer(layer.index) if layer in chosen else None
        heads = num_heads(layer)
        if own:
            _refuse_other_heads(view, own, layer, heads)
        reason = "" if own else layer.why_not or "not in `layers`"
        source = rotary.get(layer.type) if layer in remapped else None
        number = -1 if layer.why_never else layer.index
        methods[layer.module] = LayerMethod(state, bound, own, reason, layer.windowed, heads, source, index=number)
    return bound, methods, facts


def _bound(view: View, config: LongAttnConfig, layers: list[Layer], longer: int | None) -> tuple[LongAttnConfig, ModelFacts]:
    """The config bound to a model, and the facts that it is bound to; `longer`: see `put`."""
    facts = facts_of(view, layers, config.train_length)
    bound = config.bind(facts) if longer is None else config.replace(extended_to=None).bind(facts)
    if longer is not None and longer <= bound.reach:
        bound = bound.replace(extended_to=longer)
    if facts.assumed and config.uses_train_length:
        warn(
            f"{facts.assumed}: {config.name} takes {facts.train_length} for the length that the model was trained at. Pass "
            "train_length= to say so, or another",
        )
    return bound, facts


def _refuse_other_heads(view: View, config: LongAttnConfig, layer: Layer, heads: int) -> None:
    """Raise where a layer's config has numbers for more or fewer heads than the layer has."""
    given = {n: x for m in config.methods for n in m.by_head if isinstance(x := getattr(m, n), tuple)}
    if wrong := [n for n, values in given.items() if len(values) != heads]:
        raise ValueError(
            f"{wrong[0]} has a number for each of {len(given[wrong[0]])} heads, and layer {layer.index} of {view.name} has "
            f"{heads}: give one number for all, or pass layers=[...] that have as many heads"
        )


def _takes(part: LongAttnConfig, layer: Layer) -> bool:
    """Tell whether a part of a config covers a layer."""
    return part.layers != "full_attention" or not layer.why_not


def _refuse_part(name: str, part: LongAttnConfig, candidates: list[Layer], chosen: list[Layer]) -> None:
    """Raise for layers that one part of a config names and that are not there, or cannot run it; and where it has none."""
    if missing := set(() if isinstance(part.layers, str) else part.layers) - {x.index for x in candidates}:
        raise ValueError(f"layers names {sorted(missing)}, which have no causal softmax attention in this model")
    if not part.methods:
        raise ValueError(
            'the config fills no slot: name a method (hf_longattn.apply(model, "rerope")), or beside attn_implementation='
            f'{CUSTOM!r} fill one, longattn={{"positions": {{"name": "rerope", ...}}, ...}}'
        )
    if not chosen:
        anyway = "" if part.key_intervals else 'pass longattn={"layers": "all"} to change them anyway, or '
        raise ValueError(
            f"{part.name} applies to 0 layers of {name}: all {len(candidates)} causal attention layers have a sliding window; "
            f"{anyway}unset the window in the config"
        )
    if part.key_intervals and (windowed := [x.index for x in chosen if x.kind == "window"]):
        raise ValueError(
            f"{part.name} restricts or remaps far keys; the sliding-window layers {windowed} have none: leave them out of "
            "`layers`"
        )


def _refuse_model(view: View, config: LongAttnConfig) -> None:
    """Raise for a model that no method can go into, whatever its layers: they all get one mask."""
    cannot = f"{config.name if config.methods else 'a method'} cannot go into {view.name}: "
    refuse_both_ways(view.target, cannot)
    if around := next((x for x in view.modules if attends_in_place(x)), None):
        raise ValueError(
            f"{cannot}TransformerLens' {type(around).__name__} computes its attention in place of transformers. Load the "
            "model anew and look inside it with nnsight or pyvene, which leave attention to transformers"
        )
    if why := next((why for x in view.candidates if (why := x.why_not_our_mask)), None):
        raise ValueError(f"{cannot}{why}. It could not read the mask that a method puts in that one's place")


def _refuse_layers(view: View, config: LongAttnConfig, chosen: list[Layer]) -> None:
    """Raise for layers whose attention does more than the interface says."""
    _refuse_model(view, config)
    if refused := {x.index: x.refusal for x in chosen or view.candidates if x.refusal}:
        free = [x.index for x in view.candidates if not x.refusal]
        reasons = ", ".join(dict.fromkeys(refused.values()))  # type: ignore[arg-type]
        raise ValueError(
            f"{config.name} cannot go into the layers {list(refused)} of {view.name}: {reasons}, and no"
            f" method computes that. {f'Pass layers={free}, which do not' if free else 'All layers of this model do so'}"
        )


def facts_for(view: View, config: LongAttnConfig = NO_METHOD) -> ModelFacts:
    """The facts that a config is bound to in a model; ValueError where no method can go into any of its layers."""
    if not view.candidates:
        raise ValueError(no_layer(view, config))
    _refuse_model(view, config)
    return facts_of(view, [x for x in view.candidates if not x.why_not] or view.candidates, config.train_length)


def refuse_name(view: View, name: str, section: Any) -> NoReturn:
    """Raise what `apply` raises for a model that has no layer for a method."""
    raise ValueError(no_layer(view, LongAttnConfig.parse(short(name), section)))


def no_layer(view: View, config: LongAttnConfig) -> str:
    """Return the message about a model without a layer that a method may go into."""
    why = "it has no causal attention that goes through transformers' attention interface"
    attention = (x for x in view.modules if hasattr(x, "layer_idx") and hasattr(x, "config"))
    if found := next(((type(x).__name__, function) for x in attention if (function := foreign_forward(x)) is not None), None):
        why += f", since {found[1]} runs in place of {found[0]}.forward: load the model without what put it there"
    if parts := dict.fromkeys(type(x.config).__name__ for x in view.layers if not x.why_never):
        why = (
            f"its causal attention is in several parts ({', '.join(parts)}), of which none is the language model by its config"
        )
    if view.target is not None and (runs := get_implementation(view.target)):
        why = f"transformers left its language model under {runs!r}. Use hf_longattn.apply(model, ...)"
    return f"{config.name if config.methods else 'a method'} applies to 0 layers of {view.name}: {why}"
