"""Deciding what every attention module of a model does: its plan, its learned parts, and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..config import CUSTOM, LongAttnConfig
from ..core.tracing import readable
from ..slots.learned import LearnedParts, learned_parts
from ..slots.method import ModelFacts
from ..telling import warn
from .layers import Layer, View
from .longrope import border_hooks
from .masks import refuse_both_ways
from .names import described, describes, is_ours, short
from .offload import device_of, held, keep
from .passes import watch
from .record import refuse_copies
from .rope import check_built
from .rotation import find_rotary
from .state import AttentionState, LayerPlan, enrol, plan_of, set_plan
from .trained import ORIGINAL, Trained, rope_settings, trained
from .verify import rotation_of, verify_at_first_call, verify_axes, verify_rotations

#: What models call the norm of their queries, inside an attention module.
QUERY_NORMS = ("q_norm", "q_layernorm", "q_layer_norm", "query_layernorm", "qk_norm")


def prepare(view: View, verify: bool = False) -> None:
    """Put into a model what its configs name and describe; one without our names stays as it is.

    Rotations are verified now, or where the model is being built and has no weights, at its first call. ValueError: nothing
    in the model can run the method, or the config does not fit.
    """
    if (named := next((c for c in view.configs if is_ours(c._attn_implementation_internal)), None)) is None:
        return
    if view.target is None or (config := describes(view.target)) is None:
        refuse_name(view, named._attn_implementation_internal, described(named))
    put(view, config, view.target._attn_implementation_internal, verify=verify)


def put(view: View, config: LongAttnConfig, name: str, longer: int | None = None, verify: bool = True) -> LongAttnConfig:
    """Put a config into a model under a name: plan, check, and then write.

    Args:
        longer: how long a text the model reads now, and is to read on if the config reaches so far.

    Returns:
        what the model runs now.

    Raises:
        ValueError: the config does not fit; nothing is written.
    """
    target, state = view.target, view.state or AttentionState()
    for adapter in view.adapters:
        refuse_copies(adapter, config)
    bound, plans, facts = _plan(view, config, state, longer)
    for layer in view.layers:
        c = layer.module.config
        if layer.module not in plans and is_ours(c._attn_implementation_internal):
            # vision towers and other parts under the same name are left alone, by a plan that says so
            plans[layer.module] = LayerPlan(state, described(c), None, layer.why_never or "not the language model")
    if verify:
        plans |= verify_rotations(view, plans, {id(target): name})
    target._attn_implementation_internal = name  # not by the property, which would switch towers too
    show(view, bound)
    state.set_strength(bound)
    for layer in view.layers:
        set_plan(layer.module, plan := plans.get(layer.module))
        if plan is not None and plan.whole is bound:
            own = plan.config.methods if plan.config is not None else ()
            made = {m.slot: part for m in own if (part := m.module(facts)) is not None}
            attach(view.model, layer, made)
    keep_parts(view)
    _guard_positions(view, state)
    _guard_cached_turns(view, state)
    unverified = any(plan.rotary is not None and not plan.rotary.verified for plan in plans.values())
    state.unverified, state.by_axis = verify_at_first_call if unverified else None, verify_axes
    watch(view, state)
    enrol(view.model)
    return bound


def show(view: View, config: LongAttnConfig | None) -> None:
    """Let the language model's config hold what it runs, and a composite model's own the same."""
    for c in (view.target, view.model.config):
        vars(c)["_longattn"] = config


def _plan(
    view: View, config: LongAttnConfig, state: AttentionState, longer: int | None
) -> tuple[LongAttnConfig, dict[nn.Module, LayerPlan], ModelFacts]:
    """The config bound to a model, the plans of its language model's attention modules, and the facts they are bound to."""
    candidates, name = view.candidates, view.name
    by_part = [(part, [x for x in candidates if config.of_layer(x.index) is part and _takes(part, x)]) for part in config.each]
    chosen = [x for _, layers in by_part for x in layers]
    _refuse_layers(view, config, chosen)
    facts = facts_of(view, chosen or candidates, config.train_length)
    bound = config.bind(facts) if longer is None else config.replace(extended_to=None).bind(facts)
    if longer is not None and longer <= bound.reach:
        bound = bound.replace(extended_to=longer)
    _warn_of_assumption(config, chosen or candidates)
    for part, layers in by_part:
        _refuse_part(name, part, candidates, layers)
    remapped = [x for part, layers in by_part if part.remap is not None for x in layers]
    types = dict.fromkeys(x.type for x in remapped)
    rotary = {t: rotation_of(view, [x for x in remapped if x.type == t]) for t in types}
    plans: dict[nn.Module, LayerPlan] = {}
    for layer in view.of_target:
        own = bound.for_layer(layer.index) if layer in chosen else None
        reason = "" if own else layer.why_not or "not in `layers`"
        source = rotary.get(layer.type) if layer in remapped else None
        plans[layer.module] = LayerPlan(state, bound, own, reason, layer.windowed, facts.num_heads, source)
    return bound, plans, facts


def _takes(part: LongAttnConfig, layer: Layer) -> bool:
    """Whether the word for its layers leaves a layer to a part of a config."""
    return part.layers != "full_attention" or not layer.why_not


def _refuse_part(name: str, part: LongAttnConfig, candidates: list[Layer], chosen: list[Layer]) -> None:
    """Raise for layers that one part of a config names and that are not there, or cannot run it; and where it has none."""
    if missing := set(() if isinstance(part.layers, str) else part.layers) - {x.index for x in candidates}:
        raise ValueError(f"layers names {sorted(missing)}, which have no causal softmax attention in this model")
    if not part.methods:
        raise ValueError(
            f"attn_implementation={CUSTOM!r} takes its method from the longattn section, and that fills no slot: pass "
            'longattn={"positions": {"name": "rerope", ...}, ...}, or name it'
        )
    if not chosen:
        raise ValueError(
            f"{part.name} applies to 0 layers of {name}: all {len(candidates)} causal attention layers have "
            'a sliding window. Pass longattn={"layers": "all"} to change them anyway, or unset the window in the config'
        )
    if part.key_bands and (windowed := [x.index for x in chosen if x.kind == "window"]):
        raise ValueError(
            f"{part.name} restricts or remaps far keys; the sliding-window layers {windowed} have none: leave them out of "
            "`layers`"
        )


def _refuse_model(view: View, config: LongAttnConfig) -> None:
    """Raise for a model that no method can go into, whatever its layers: they all get one mask."""
    cannot = f"{config.name if config.methods else 'a method'} cannot go into {view.name}: "
    refuse_both_ways(view.target, cannot)
    if why := next((why for x in view.candidates if (why := x.own_mask)), None):
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


def bound_config(model: nn.Module, config: LongAttnConfig) -> tuple[LongAttnConfig, ModelFacts]:
    """The config with all defaults that depend on the model filled in, and those facts; the model is not changed."""
    return bound_in(View(model), config)


def bound_in(view: View, config: LongAttnConfig) -> tuple[LongAttnConfig, ModelFacts]:
    """The same of a model that was looked at."""
    if not view.candidates:
        raise ValueError(no_layer(view, config))
    _refuse_model(view, config)
    facts = facts_of(view, [x for x in view.candidates if not x.why_not] or view.candidates, config.train_length)
    return config.bind(facts), facts


def facts_of(view: View, layers: list[Layer], told: int | None = None) -> ModelFacts:
    """What a method may ask about a model, of these layers of it; told: its trained length as the user knows it.

    ValueError: its config has rotary settings that it does not rotate by.
    """
    check_built(view.model)
    config = layers[0].module.config
    kind, known = _trained(layers, told)
    rope = rope_settings(config, kind)
    head_dim = _head_dim(layers[0].module)
    return ModelFacts(
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim,
        value_dim=getattr(config, "v_head_dim", None) or head_dim,
        train_length=known.length,
        trained=known.reason if known.assumed is None else f"{known.reason} ({known.assumed})",
        rotation_is_own=known.rotation_is_own,
        own_temperature=own_temperature(view, layers),
        rope_type=rope.get("rope_type", "default") if find_rotary(view.modules, config, kind) else None,
        qk_norm=any(_normalises(layer.module) for layer in layers),
    )


def _trained(layers: list[Layer], told: int | None) -> tuple[str | None, Trained]:
    """A layer type and what it tells of the trained length: of several the one under which remaps are refused, or the full."""
    read = {kind: trained(layers[0].module.config, kind, told) for kind in dict.fromkeys(x.type for x in layers)}
    kind = min(read, key=lambda k: (read[k].rotation_is_own, k != "full_attention"))
    return kind, read[kind]


def _warn_of_assumption(config: LongAttnConfig, layers: list[Layer]) -> None:
    """Say what is taken for granted where a method depends on a trained length that the settings leave open."""
    known = _trained(layers, config.train_length)[1]
    if known.assumed and config.uses_train_length:
        warn(
            f"{known.assumed}: {config.name} takes {known.length} for the length that the model was trained at. Pass "
            "train_length= to say so, or another",
        )


def _normalises(attention: nn.Module) -> bool:
    """Whether an attention module has a norm over its queries (and keys), by the names that models give it."""
    return any(
        isinstance(part, nn.Module) and not isinstance(part, nn.Identity)
        for part in (getattr(attention, name, None) for name in QUERY_NORMS)
    )


def own_temperature(view: View, layers: list[Layer]) -> str | None:
    """What a model already multiplies the scores of these layers with, in words, or None.

    It is in their queries and keys when attention gets them, so it goes by true positions p under every remap.
    """
    config, found = layers[0].module.config, list[str]()
    for layer in {x.type: x for x in layers}.values():
        rope, rotary, module = rope_settings(config, layer.type), find_rotary(view.modules, config, layer.type), layer.module
        turned = 1.0 if rotary is None else getattr(rotary.module, rotary.buffer.replace("inv_freq", "attention_scaling"), 1.0)
        # DeepSeek's models have it in their scaling
        plain = not rope.get("mscale_all_dim") or module.scaling == getattr(module, "qk_head_dim", _head_dim(module)) ** -0.5
        if turned != 1 or not plain:
            found.append(f"{rope['rope_type']}'s attention factor")
        if beta := rope.get("llama_4_scaling_beta"):
            found.append(f"1 + {beta:g} ln(1 + floor(p / {rope[ORIGINAL]:,}))")
    if getattr(config, "attn_temperature_tuning", False):
        factor = f"1 + {config.attn_scale:g} ln(1 + floor((p + 1) / {config.floor_scale:,.0f}))"
        found.append(f"{factor} in layers that do not rotate")
    if floor := getattr(config, "log_scaling_n_floor", None):
        found.append(f"1 + {config.log_scaling_alpha:g} ln(max((p + 1) / {floor:,}, 1))")
    if any(hasattr(x.module, "softmax_scaling") for x in layers):
        found.append("s ln(p + 1) + b, learned for each head")
    return " and ".join(dict.fromkeys(found)) or None


def _head_dim(attention: Any) -> int:
    own, config = getattr(attention, "head_dim", None), attention.config
    return int(own or config.hidden_size // config.num_attention_heads)


#: What a learned parameter starts at, by its name.
START = {"weight": 1.0, "bias": 0.0}


def attach(model: nn.Module, layer: Layer, learned: dict[str, nn.Module]) -> None:
    """Give an attention module these learned parts as `module.longattn`, keeping those that it has already.

    Warns if parameters are dropped that training has changed.
    """
    module = layer.module
    present = learned_parts(module)
    for slot, part in learned.items():
        if slot in present and _shapes(present[slot]) == _shapes(part):
            learned[slot] = present[slot]
        else:
            like, device = next(module.parameters()), device_of(module)
            dtype = like.dtype if like.is_floating_point() else None  # not a quantised one's
            if any(p.device != device or p.dtype != (dtype or p.dtype) for p in part.parameters()):
                part.to(device=device, dtype=dtype)
    if learned == present:  # then PEFT's wrapper around them stays, too
        return
    dropped = {slot: part for slot, part in present.items() if learned.get(slot) is not part}
    names = [f"{slot}.{name}" for slot, part in dropped.items() for name, _ in part.named_parameters()]
    values = (held(model, f"{layer.name}.longattn.{name}") for name in names)
    if any(p is not None and bool((p != START[n.rpartition(".")[2]]).any()) for n, p in zip(names, values, strict=True)):
        warn(
            f"dropping the trained parameters {', '.join(names)} of layer {module.layer_idx}: "
            "they belong to the method that is being replaced",
        )
    if present:
        if (plan := plan_of(module)) is not None and plan.state.plans is not None:
            plan.state.plans.parts.setdefault(module, present)
        del module.longattn
    if learned:
        module.longattn = LearnedParts(learned)


def keep_parts(view: View) -> None:
    """Let accelerate know learned parts, which came after it offloaded the model or which no checkpoint holds."""
    for layer in view.layers:
        if (parts := layer.module._modules.get("longattn")) is not None:
            for name, _ in parts.named_parameters():
                keep(view.model, f"{layer.name}.longattn.{name}", START[name.rpartition(".")[2]])


def _shapes(part: nn.Module) -> dict[str, torch.Size]:
    return {name: p.shape for name, p in part.named_parameters()}


def refuse_name(view: View, name: str, section: Any = None) -> NoReturn:
    """Raise what `apply` raises for a model that has no layer for a method."""
    raise ValueError(no_layer(view, LongAttnConfig.parse(short(name), section)))


def no_layer(view: View, config: LongAttnConfig) -> str:
    """What to say of a model without a layer that a method may go into."""
    why = "it has no causal attention that goes through transformers' attention interface"
    if parts := dict.fromkeys(type(x.module.config).__name__ for x in view.layers if not x.why_never):
        why = (
            f"its causal attention is in several parts ({', '.join(parts)}), of which none is the language model by its config"
        )
    if view.target is not None and (runs := view.target._attn_implementation_internal):
        why = f"transformers left its language model under {runs!r}. Use hf_longattn.apply(model, ...)"
    return f"{config.name if config.methods else 'a method'} applies to 0 layers of {view.name}: {why}"


def position_tables(view: View) -> Iterator[nn.Embedding]:
    """The learned position tables of a model, which no method can extend."""
    size = getattr(view.target, "max_position_embeddings", None)
    for module in view.modules:
        if isinstance(module, nn.Embedding) and _entries(module) == size and module is not view.model.get_input_embeddings():
            yield module


def _guard_positions(view: View, state: AttentionState) -> None:
    """Refuse positions beyond a learned position table, with the reason instead of an index error."""
    for table in () if state.guards else position_tables(view):
        state.guards += (table.register_forward_pre_hook(_check_learned_positions, with_kwargs=True),)


def _guard_cached_turns(view: View, state: AttentionState) -> None:
    """Refuse keys that were cached under other frequencies than those a remap would turn them by."""
    for handle in state.remaps:
        handle.remove()
    remapped = [(x, plan.rotary) for x in view.layers if (plan := plan_of(x.module)) is not None and plan.rotary is not None]
    state.remaps = tuple(border_hooks(view.inner, remapped, state))


def _check_learned_positions(table: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        return
    call = inspect.signature(type(table).forward).bind(table, *args, **kwargs).arguments
    positions = call.get("position_ids", call.get("input"))
    if positions is None and "attention_mask" in call:  # OPT and BioGPT count
        positions = call["attention_mask"].cumsum(1) - 1
    if isinstance(positions, Tensor) and not readable(positions):
        return
    if positions is not None:
        last = int(positions.max())
    else:  # others take tokens or their shape (batch, q_len), and how many came before
        last = getattr(args[0], "shape", args[0])[1] + call.get("past_key_values_length", 0) - 1
    size = _entries(table)
    if last >= size:
        raise ValueError(
            f"position {last} lies beyond this model's position table of {size} entries. No attention method can extend a "
            "table: shorten the text, or use a model with rotary positions"
        )


def _entries(table: Any) -> int:
    """How many positions a table has; Bart's and its like keep a few rows before the first (`offset`)."""
    return int(table.num_embeddings) - getattr(table, "offset", 0)
