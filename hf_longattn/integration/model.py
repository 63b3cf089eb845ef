"""Putting a config into a model, taking it out again, and saying what was done."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from ..config import CUSTOM, LongAttnConfig
from ..methods.learned import LearnedParts, learned_parts
from ..methods.method import Method, ModelFacts
from .dispatch import LayerPlan
from .guards import guard_positions, refuse_layers
from .layers import Layer, all_configs, candidates_of, facts_of, layers_of, pretrained
from .masks import Before, base_implementation, before
from .names import is_ours, name_for, short
from .proof import prove_at_first_call, prove_rotations, rotation_of
from .rope import shorten
from .rotation import RotarySource

Model = TypeVar("Model", bound=nn.Module)


class UntrainedWarning(UserWarning):
    """A method that a pretrained model gets worse under, until it is trained, was put on one to run it."""


#: Where a model whose method is switched off for a moment keeps what switches it on again.
SUSPENDED = "longattn_suspended"

#: An attention module, its plan, and the learned parts of its methods by slot.
Assignment = tuple[Any, LayerPlan, dict[str, nn.Module]]


def apply(model: Model, method: str | LongAttnConfig, **parameters: Any) -> Model:
    """Put a method into a model, in place.

    Args:
        model: any transformers model whose attention goes through the attention interface, or a PEFT model around one.
        method: a name ("scale_invariant", "a+b") with its parameters, or a complete `LongAttnConfig`.

    Returns:
        The same model.

    Raises:
        ValueError: unknown method or parameter, or the method would change no layer. The model is then unchanged.
    """
    if isinstance(method, LongAttnConfig):
        config = method.replace(**parameters) if parameters else method
    else:
        config = LongAttnConfig.preset(method, **parameters)
    base = pretrained(model)
    refuse_while_suspended(base)
    running = methods_of(base)
    section, assignments = _plan(base, config)
    warn_of_lost_softcap(base)
    target = candidates_of(base)[0].module.config
    earlier = target._attn_implementation, target.longattn
    replaced = [(module, module.__dict__.get("longattn_plan")) for module, _, _ in assignments]
    if not is_ours(target._attn_implementation):
        remember(base, target, target._attn_implementation)
    target._attn_implementation_internal = name_for(config.name)  # not by the property, which would switch towers too
    target.longattn = section
    for module, plan, _ in assignments:
        module.longattn_plan = plan
    try:
        prove_rotations(base)
    except Exception:
        target._attn_implementation_internal, target.longattn = earlier
        for module, before_it in replaced:
            module.longattn_plan = before_it
        raise
    _commit(assignments)
    _sync_top(base, target)
    guard_positions(base)
    prove_at_first_call(base)
    tell_adapters(base)
    warn_untrained(base, running, stacklevel=3)
    return model


def remove(model: Model) -> Model:
    """Undo `apply` (or `attn_implementation=...`): the attention the model had before; returns the model.

    Raises:
        ValueError: there is nothing to remove.
    """
    base = pretrained(model)
    refuse_while_suspended(base)
    running = without_method(base)
    if not running:
        raise ValueError(f"{type(base).__name__} runs {base.config._attn_implementation!r}; there is nothing to remove")
    for c, implementation in running:
        c._attn_implementation_internal = implementation  # not by the property, which would set the parts of a composite too
        c.longattn = None
    base.config.longattn = None
    shorten(base.config)
    forget(base)
    for layer in layers_of(base):
        _attach(layer.module, {})
    tell_adapters(base)
    return model


def without_method(model: PreTrainedModel) -> list[tuple[Any, str]]:
    """The config objects that run a method, each with the implementation that it ran before."""
    running = [c for c in all_configs(model) if is_ours(c._attn_implementation)]
    return [(c, (before(c) or remember(model, c)).implementation) for c in running]


def remember(model: PreTrainedModel, config: Any, implementation: str | None = None) -> Before:
    """Note on a config what it ran before a method came; None: nothing, so what transformers would pick for it.

    Whatever else ran (FlashAttention, FlexAttention, a kernel from the Hub) reads masks that ours cannot be turned into:
    layers that are left alone run transformers' pick then, and `describe` says so.
    """
    owner = next((m for m in model.modules() if isinstance(m, PreTrainedModel) and m.config is config), model)
    pick = owner.get_correct_attn_implementation(None, is_init_check=True)
    if getattr(config, "attn_logit_softcapping", None):
        pick = "eager"  # older releases pick sdpa, which drops the cap
    found = Before(implementation or pick, "eager" if implementation == "eager" else pick)
    config.__dict__["_longattn_before"] = found
    return found


def warn_of_lost_softcap(model: PreTrainedModel) -> None:
    """Older releases of transformers run Gemma 2 under sdpa, which drops its softcap without a word."""
    for layer in layers_of(model):
        cap, config = getattr(layer.module, "attn_logit_softcapping", None), layer.module.config
        if cap and config._attn_implementation == "sdpa":
            warnings.warn(
                f"{config.model_type} caps its attention scores at {cap:g}, and transformers {transformers.__version__} runs "
                'it under sdpa, which drops the cap: load it with attn_implementation="eager". hf_longattn keeps it',
                stacklevel=3,
            )
            return


def warn_untrained(model: PreTrainedModel, known: tuple[Method, ...] = (), stacklevel: int = 4) -> None:
    """Warn of methods that pretrained weights get worse under, other than those known, where a model is put to use.

    A model in training mode is being trained, one with an adapter was, and one loaded from nowhere has nothing to lose.
    """
    of = model.__dict__
    if model.training or of.get("peft_config") or not of.get("name_or_path") or any(p.is_meta for p in model.parameters()):
        return
    kinds = {type(m) for m in known if m.needs_training}
    if names := [m.name for m in methods_of(model) if m.needs_training and type(m) not in kinds]:
        measured = {"scale_invariant", "output_standardise", "output_layer_norm"} & set(names)
        warnings.warn(
            f"{' and '.join(names)}: these weights were not trained under it, and have higher losses until they are. Train "
            f"them (hf-longattn train){', set it by hf_longattn.calibrate' * bool(measured)}, or take "
            "hf_longattn.extend to read longer texts without training. To silence this: "
            'warnings.filterwarnings("ignore", category=hf_longattn.UntrainedWarning)',
            UntrainedWarning,
            stacklevel=stacklevel,
        )


@contextmanager
def knowing() -> Iterator[None]:
    """For callers that train or measure a method, or put back one that was trained: no `UntrainedWarning`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntrainedWarning)
        yield


def methods_of(model: nn.Module) -> tuple[Method, ...]:
    try:
        return config_of(model).methods
    except ValueError:
        return ()


def tell_adapters(model: PreTrainedModel) -> None:
    """Adapters that record their model's attention (`hf_longattn.adapters`) follow every change of it."""
    adapters = [c for c in (model.__dict__.get("peft_config") or {}).values() if hasattr(c, "longattn")]
    try:
        section = config_of(model).to_dict()
    except ValueError:
        section = None
    for adapter in adapters:
        adapter.longattn = section
    if adapters and any(isinstance(m.__dict__["_modules"].get("longattn"), LearnedParts) for m in model.modules()):
        warnings.warn(
            "the method's learned parameters came after the adapter, which will not save them: apply the method first, "
            "then make the adapter",
            stacklevel=3,
        )


def refuse_while_suspended(model: PreTrainedModel) -> None:
    if SUSPENDED in model.__dict__:
        raise RuntimeError(
            "the model's method is switched off for the moment (disable_adapter): change it after switching it on again"
        )


def update(model: Model, **parameters: Any) -> Model:
    """Change parameters of the method that a model runs, e.g. `update(model, strength=0.5)` during training."""
    return apply(model, config_of(model).replace(**parameters))


def config_of(model: nn.Module) -> LongAttnConfig:
    """The config that a model runs; ValueError if it runs none."""
    base = pretrained(model)
    for layer in candidates_of(base):
        c = layer.module.config
        if is_ours(c._attn_implementation) and c.longattn:
            return LongAttnConfig.from_dict(c.longattn)
    raise ValueError(f"{type(base).__name__} runs {base.config._attn_implementation!r}, not an hf_longattn method")


def bound_config(model: nn.Module, config: LongAttnConfig) -> tuple[LongAttnConfig, ModelFacts]:
    """The config with all defaults that depend on the model filled in, and those facts; the model is not changed."""
    base = pretrained(model)
    layers = candidates_of(base)
    if not layers:
        raise ValueError(_nothing(base, config, []))
    facts = facts_of(base, [x for x in layers if not x.why_not] or layers)
    return config.bind(facts), facts


def prepare(model: PreTrainedModel) -> None:
    """Decide for every attention module what it does; called whenever a model is built or its attention changes.

    Raises:
        ValueError: the model runs one of our names, and nothing in it can; or the config does not fit.
    """
    named = next((c for c in all_configs(model) if is_ours(c._attn_implementation)), None)
    if named is None:
        return
    target = next((x.module.config for x in candidates_of(model)), None)
    if target is None or not is_ours(target._attn_implementation):
        refuse_name(model, named._attn_implementation, named.longattn)
    config = LongAttnConfig.parse(short(target._attn_implementation), target.longattn)
    target.longattn, assignments = _plan(model, config)
    _commit(assignments)
    # Vision towers and other parts under the same name are left alone, by a plan that says so
    for layer in layers_of(model):
        c = layer.module.config
        if is_ours(c._attn_implementation) and (layer.why_never or c is not target):
            layer.module.longattn_plan = LayerPlan(c.longattn, None, layer.why_never or "not the language model")
    _sync_top(model, target)
    guard_positions(model)
    prove_at_first_call(model)


def forget(model: nn.Module) -> None:
    """Drop every plan and guard."""
    for module in model.modules():
        module.__dict__.pop("longattn_plan", None)
        for name in ("longattn_guard", "longattn_proof"):
            if (handle := module.__dict__.pop(name, None)) is not None:
                handle.remove()


@dataclass(frozen=True)
class Description:
    """What each attention module of a model does; `print` it, or read `rows` and `config`."""

    model: str
    config: LongAttnConfig | None
    rows: tuple[tuple[str, str, str], ...]  # module, method and parameters or "unchanged", backend or reason

    def __str__(self) -> str:
        head = f"{self.model}: {self.config.name if self.config else 'no hf_longattn method'}"
        width = [max((len(r[i]) for r in self.rows), default=0) for i in (0, 1)]
        return "\n".join([head, *(f"  {a:<{width[0]}}  {b:<{width[1]}}  {c}" for a, b, c in self.rows)])


def describe(model: nn.Module) -> Description:
    """Per attention module: method, parameters and backend, or why it was left alone."""
    base = pretrained(model)
    rows = []
    for layer in layers_of(base):
        plan: LayerPlan | None = layer.module.__dict__.get("longattn_plan")
        implementation = layer.module.config._attn_implementation
        if plan is None or not is_ours(implementation):
            rows.append((layer.name, "unchanged", f"runs {implementation}"))
        elif plan.config is None:
            rows.append((layer.name, "unchanged", f"{plan.reason}, {_runs(layer.module.config)}"))
        else:
            rows.append((layer.name, ", ".join(map(_shown, plan.config.methods)), f"backend {plan.config.backend}"))
    try:
        config = config_of(base)
    except ValueError:
        config = None
    return Description(type(base).__name__, config, tuple(rows))


def _runs(config: Any) -> str:
    known = before(config)
    if known is None:
        return f"runs {base_implementation(config)}"
    return f"runs {known.base}" + f" in place of {known.implementation}" * (known.base != known.implementation)


def _shown(method: Any) -> str:
    parameters = {k: v for k, v in method.to_dict().items() if k != "name" and v is not None}
    short_lists = {k: f"<{len(v)} values>" if isinstance(v, list) else v for k, v in parameters.items()}
    return f"{method.name}({', '.join(f'{k}={v}' for k, v in short_lists.items())})"


def _plan(model: PreTrainedModel, config: LongAttnConfig) -> tuple[dict[str, Any], list[Assignment]]:
    """The longattn section and the plan of every attention module of the language model."""
    candidates = candidates_of(model)
    if not candidates:
        raise ValueError(_nothing(model, config, []))
    target = candidates[0].module.config
    layers = [x for x in layers_of(model) if x.module.config is target]
    chosen = []
    for layer in candidates:
        by_type = config.layers == "all" or (config.layers == "full_attention" and not layer.why_not)
        if by_type or (not isinstance(config.layers, str) and layer.index in config.layers):
            chosen.append(layer)
    facts = facts_of(model, chosen or candidates)
    bound = config.bind(facts)
    if not isinstance(config.layers, str) and (missing := set(config.layers) - {x.index for x in candidates}):
        raise ValueError(f"layers names {sorted(missing)}, which have no causal softmax attention in this model")
    refuse_layers(model, config, candidates, chosen)
    if not chosen or not config.methods:
        raise ValueError(_nothing(model, config, candidates))
    if config.key_bands and (windowed := [x.index for x in chosen if x.windowed]):
        raise ValueError(
            f"{config.name} restricts or remaps far keys; the sliding-window layers {windowed} have none: leave them out of "
            "`layers`"
        )
    rotary: dict[str | None, RotarySource | None] = {}
    section = bound.to_dict()
    plans = []
    for layer in layers:
        if layer in chosen:
            if config.remap is not None and layer.type not in rotary:
                rotary[layer.type] = rotation_of(model, target, [x for x in chosen if x.type == layer.type])
            source = rotary.get(layer.type)
            plan = LayerPlan(
                section, bound.for_layer(layer.index), windowed=layer.windowed, heads=facts.num_heads, rotary=source
            )
        else:
            reason = layer.why_not or "not in `layers`"
            plan = LayerPlan(section, None, reason, layer.windowed)
        parts = {} if plan.config is None else {m.slot: part for m in plan.config.methods if (part := _learned(m, facts))}
        plans.append((layer.module, plan, parts))
    return section, plans


def _learned(method: Any, facts: ModelFacts) -> nn.Module | None:
    return method.module(facts) if hasattr(method, "module") else None


def _commit(assignments: list[Assignment]) -> None:
    for module, plan, learned in assignments:
        module.longattn_plan = plan
        _attach(module, learned)


def _attach(module: Any, learned: dict[str, nn.Module]) -> None:
    """Give an attention module these learned parts as `module.longattn`, keeping those that it has already.

    Warns if parameters are dropped that training has changed.
    """
    present = learned_parts(module)
    for slot, part in learned.items():
        if slot in present and _shapes(present[slot]) == _shapes(part):
            learned[slot] = present[slot]
        else:
            like = next(module.parameters())
            dtype = like.dtype if like.is_floating_point() else None  # not a quantised one's
            if any(p.device != like.device or p.dtype != (dtype or p.dtype) for p in part.parameters()):
                part.to(device=like.device, dtype=dtype)
    if learned == present:  # then PEFT's wrapper around them stays, too
        return
    dropped = {slot: part for slot, part in present.items() if learned.get(slot) is not part}
    parameters = {f"{slot}.{name}": p for slot, part in dropped.items() for name, p in part.named_parameters()}
    start = {"weight": 1.0, "bias": 0.0}
    if any(bool((p != start[name.rpartition(".")[2]]).any()) for name, p in parameters.items()):
        warnings.warn(
            f"dropping the trained parameters {', '.join(parameters)} of layer {module.layer_idx}: "
            "they belong to the method that is being replaced",
            stacklevel=4,
        )
    if present:
        del module.longattn
    if learned:
        module.longattn = LearnedParts(learned)


def _shapes(part: nn.Module) -> dict[str, torch.Size]:
    return {name: p.shape for name, p in part.named_parameters()}


def _sync_top(model: PreTrainedModel, target: Any) -> None:
    """A composite model's own config shows the section of its language model."""
    if model.config is not target:
        object.__setattr__(model.config, "_longattn", target.longattn)


def refuse_name(model: PreTrainedModel, name: str, section: dict[str, Any] | None = None) -> NoReturn:
    """Raise what `apply` raises for a model that has no layer for a method."""
    raise ValueError(_nothing(model, LongAttnConfig.parse(short(name), section), []))


def _nothing(model: PreTrainedModel, config: LongAttnConfig, candidates: list[Layer]) -> str:
    if not config.methods:
        return (
            f"attn_implementation={CUSTOM!r} takes its method from the longattn section, and that fills no slot: pass "
            'longattn={"preset": ...} or the slots written out'
        )
    if candidates:
        return (
            f"{config.name} applies to 0 layers of {type(model).__name__}: all {len(candidates)} causal attention layers have "
            'a sliding window. Pass longattn={"layers": "all"} to change them anyway, or unset the window in the config'
        )
    why = "it has no causal attention that goes through transformers' attention interface"
    if parts := dict.fromkeys(type(x.module.config).__name__ for x in layers_of(model) if not x.why_never):
        why = (
            f"its causal attention is in several parts ({', '.join(parts)}), of which none is the language model by its config"
        )
    if runs := next((x.module.config._attn_implementation for x in candidates_of(model)), None):
        why = f"transformers left its language model under {runs!r}. Use hf_longattn.apply(model, ...)"
    return f"{config.name} applies to 0 layers of {type(model).__name__}: {why}"
