"""The attention function that we register: one call of one layer, from transformers' arguments to a kernel."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..attention.attend import attend
from ..attention.call import Call
from ..attention.geometry import Rows
from ..attention.prepared import named, prepared
from ..attention.reference import dense_attention
from ..config import LongAttnConfig
from ..slots.learned import learned_parts
from .caches import is_paged
from .engines import ulysses
from .engines.heads import of_these_heads
from .engines.paged import ARGUMENTS, paged_attention
from .masks import BOTH_WAYS, Stock, base_implementation, is_carrier, read_mask, seen_through, stock_of
from .positions import positions_of_call, refuse_unknown_start, with_positions
from .state import LayerPlan, plan_of

#: Arguments that reach an attention function and say nothing about which logits it should compute.
_HARMLESS = frozenset(
    {
        "position_ids",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "num_items_in_batch",  # this and the next two are for the loss
        "shift_labels",
        "ignore_index",
        "logits_to_keep",
        "cache_position",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "seq_idx",
        "tokenizer",  # of generate(stop_strings=...), which hands it on to the model; `transformers serve` always gives it
        "is_causal",
        "s_aux",  # the model's learned sinks, which we compute
    }
)


#: What a layer that is left alone computes where no other function knows its rows.
_LEFT_ALONE = LongAttnConfig()


class _Asked(NamedTuple):
    """What transformers asks of a layer beside its tensors."""

    module: Any
    plan: LayerPlan
    dropout: float
    scaling: float | None
    softcap: float | None
    sliding_window: int | None
    positions: Tensor | None  # the call's position_ids
    more: dict[str, Any]


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention interface: query (batch, heads, q_len, head_dim), key and value not repeated.

    Returns:
        output (batch, q_len, heads, head_dim), and attention weights if output_attentions asks for them.
    """
    found, plan, positions = _found(attention_mask), plan_of(module), kwargs.get("position_ids")
    if plan is not None:
        positions = positions_of_call(plan.state, positions, attention_mask)
    asked = _Asked(module, plan, dropout, scaling, softcap, sliding_window, positions, kwargs)  # type: ignore[arg-type]
    if found is not None and (out := found.computed(asked, query, key, value)) is not None:
        return out
    plan = current_plan(module)
    if is_paged(kwargs):
        return _paged(asked, query, key, value), None
    split = ulysses.group_of(module)
    if split is not None or (attention_mask is None and ulysses.is_exchanged(module, query, key, positions)):
        return _whole_sequence(asked, query, key, value, split), None
    if plan.config is None:
        return _base(asked, query, key, value, attention_mask)
    _refuse(plan, sliding_window, kwargs)
    if attention_mask is None:
        raise NotImplementedError(
            "no attention mask arrived, so what each token sees and where it stands is unknown. "
            + (
                "Context parallelism takes the mask away and sets is_causal; it is not supported"
                if kwargs.get("is_causal")
                else "A layer that is called by itself needs the mask that transformers' create_causal_mask makes"
            )
        )
    carried = is_carrier(attention_mask)
    seen = read_mask(attention_mask, key.shape[2]) if carried else seen_through(attention_mask, query.shape[2], key.shape[2])
    rows = with_positions(seen, attention_mask, positions, key.shape[2], plan.state.remapped)
    if seen.counted is not None and not carried:
        refuse_unknown_start(plan.config, rows, positions)
    weights = bool(kwargs.get("output_attentions"))
    if (stock := stock_of(attention_mask)) is not None:
        found = attention_mask.__dict__["longattn_found"] = _Found(plan, positions, query, key, rows, stock)
        if found.changes_nothing(plan) and not weights:
            return found.by_stock(asked, query, key, value)
    return _attend(asked, query, key, value, rows, with_weights=weights)


class _Found:
    """What the first layer of a forward pass found out, for all layers that are called alike; kept with the pass's mask."""

    def __init__(
        self, plan: LayerPlan, positions: Tensor | None, query: Tensor, key: Tensor, rows: Rows, stock: Stock
    ) -> None:
        self.section, self.positions, self.kv_len = plan.section, positions, key.shape[2]
        self.rows, self.stock, self.prepared = rows, stock, prepared(rows)
        self.all_pairs = stock.implementation == "eager" and query.shape[2] > 1  # it would hold them
        self._fits: dict[float, bool] = {}
        self._functions: dict[type, Any] = {}

    def computed(self, asked: _Asked, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """The output of a layer that was called as an earlier one of the pass; None where it has to be worked out anew."""
        plan, more = asked.plan, asked.more
        if plan is None or plan.section is not self.section or plan.config is None or plan.observer is not None:
            return None
        if asked.positions is not self.positions or key.shape[2] != self.kv_len or not more.keys() <= _HARMLESS:
            return None
        if more.get("output_attentions") or (asked.sliding_window is not None and not plan.windowed):
            return None
        if self.changes_nothing(plan):
            return self.by_stock(asked, query, key, value)
        if asked.dropout or torch.is_grad_enabled() or query.shape[1] != plan.heads:
            return None
        learned, sinks = learned_parts(asked.module), more.get("s_aux")
        scaling = query.shape[-1] ** -0.5 if asked.scaling is None else asked.scaling
        own = self.prepared.get(named("dense", plan.kind, query, key, scaling, asked.softcap, learned, sinks))
        if own is None:
            return None
        return own(query, key, value, learned, sinks).transpose(1, 2).contiguous(), None

    def changes_nothing(self, plan: LayerPlan) -> bool:
        """Whether the model's own attention computes a layer, by the longest text of the pass."""
        if (limit := plan.identity_below) <= 0 or self.all_pairs:
            return False
        if (fits := self._fits.get(limit)) is None:
            fits = self._fits[limit] = self.stock.fits(self.rows, limit)
        return fits

    def by_stock(self, asked: _Asked, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        """A layer by the model's own attention."""
        kind = type(asked.module)
        if (function := self._functions.get(kind)) is None:
            function = self._functions[kind] = _function(self.stock.implementation, asked.module)
        return _run(function, asked, query, key, value, self.stock.mask)


def _found(mask: Tensor | None) -> _Found | None:
    """What a layer before this one found out in this forward pass."""
    return None if mask is None or torch.compiler.is_compiling() else mask.__dict__.get("longattn_found")


def _attend(
    asked: _Asked, query: Tensor, key: Tensor, value: Tensor, rows: Rows, with_weights: bool = False
) -> tuple[Tensor, Tensor | None]:
    """A layer's method over rows of any geometry: output (batch, q_len, heads, head_dim), and weights if asked for."""
    plan, sinks = asked.plan, asked.more.get("s_aux")
    config, learned = plan.config or _LEFT_ALONE, learned_parts(asked.module)
    if query.shape[1] != plan.heads and (sinks is not None or any(m.head_dependent for m in config.methods)):
        config, learned, own = of_these_heads(asked.module, query.shape[1], plan.heads, config, learned)
        sinks = own(sinks) if sinks is not None and sinks.shape[0] == plan.heads else sinks
    call = Call(
        query,
        key,
        value,
        config,
        rows,
        scaling=query.shape[-1] ** -0.5 if asked.scaling is None else asked.scaling,
        softcap=asked.softcap,
        dropout=asked.dropout,
        learned=learned,
        rotation=None if plan.rotary is None else plan.rotary.rotation(query),
        sink_logits=sinks,
        tables=plan.state.tables,
        # a graph reads the strength when it runs; it would be compiled anew for each number
        strength=plan.state.strength if torch.compiler.is_compiling() and not torch.compiler.is_exporting() else None,
        kind=None if torch.compiler.is_compiling() or config is not plan.config else plan.kind,
    )
    out, weights = dense_attention(call) if with_weights else (attend(call), None)
    if plan.observer is not None:
        plan.observer(dataclasses.replace(call, output=out))
    return out.transpose(1, 2).contiguous(), weights


def _whole_sequence(asked: _Asked, query: Tensor, key: Tensor, value: Tensor, split: Any) -> Tensor:
    """A layer of a sequence that is split over processes: no mask arrives, for layers that are left alone either."""
    window, positions = asked.sliding_window, asked.positions
    _refuse(asked.plan, window, asked.more)
    if asked.more.get("output_attentions") or (asked.plan.windowed and window is None):
        raise NotImplementedError("no attention weights, and no windows of unknown size, of a sequence split over processes")
    here = ulysses.place(asked.module)
    assert here is not None

    def compute(query: Tensor, key: Tensor, value: Tensor, position_ids: Tensor) -> Tensor:
        return _attend(asked, query, key, value, ulysses.rows_of(position_ids, window, here[1]))[0]

    if split is None:
        assert positions is not None
        return compute(query, key, value, positions)
    return ulysses.exchanged(split, query, key, value, positions, compute)


def _paged(asked: _Asked, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A layer under continuous batching, with the method or left alone."""
    plan, window = asked.plan, asked.module.config.sliding_window if asked.plan.windowed else None
    if plan.config is not None:
        _refuse(plan, asked.sliding_window, {k: v for k, v in asked.more.items() if k not in ARGUMENTS})

    def compute(query: Tensor, key: Tensor, value: Tensor, rows: Rows) -> Tensor:
        if plan.config is not None:
            return _attend(asked, query, key, value, rows)[0]
        return _base(asked, query, key, value, rows.visible(key.shape[2]))[0]

    return paged_attention(query, key, value, window, asked.positions, asked.more, compute)


def current_plan(module: Any) -> LayerPlan:
    """The module's plan; ValueError if it has none, or if config.longattn was replaced behind its back."""
    plan = plan_of(module)
    if plan is None:
        name = module.config._attn_implementation
        raise ValueError(
            f"attention {name!r} applies to 0 layers here: {type(module).__name__} was never prepared for it. Put it "
            "into the model with hf_longattn.apply(model, ...), or with attn_implementation= on a causal language model"
        )
    if plan.section is not module.config.longattn:
        raise ValueError(
            "config.longattn was changed after the method was put into the model; use hf_longattn.apply(model, ...) "
            "or hf_longattn.update(model, ...)"
        )
    return plan


def _refuse(plan: LayerPlan, sliding_window: int | None, kwargs: dict[str, Any]) -> None:
    """Raise for anything in a call that we would otherwise compute wrongly in silence."""
    if not torch.compiler.is_compiling() and _in_context_parallel():
        raise NotImplementedError(
            "torch's context_parallel splits the sequence and replaces scaled_dot_product_attention alone: under "
            "hf_longattn every process would attend to its own part. Leave it off, or "
            'model.set_attn_implementation("sdpa") first'
        )
    if kwargs.get("is_causal") is False:
        raise ValueError(BOTH_WAYS)
    if sliding_window is not None and not plan.windowed:
        raise ValueError("this layer got a sliding window that its config does not announce: please report the model")
    if kwargs.keys() <= _HARMLESS:
        return
    unknown = sorted(k for k, v in kwargs.items() if k not in _HARMLESS and v is not None)
    if unknown:
        raise ValueError(
            f"attention got {', '.join(unknown)}, which hf_longattn does not know and will not ignore; drop the argument, "
            "or exclude the layer with `layers`"
        )


def _in_context_parallel() -> bool:
    """Whether torch has put its sharded attention in place of sdpa, which is how context_parallel works."""
    module = getattr(torch.nn.functional.scaled_dot_product_attention, "__module__", None) or ""
    return module.startswith("torch.distributed.tensor.experimental")


def _base(asked: _Asked, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The unmodified attention, for layers that are left alone."""
    name = base_implementation(asked.module.config)
    if mask is not None and is_carrier(mask):
        rows = read_mask(mask, key.shape[2]).rows
        mask = rows.once(("visible", key.shape[2]), lambda: rows.visible(key.shape[2]))
    if name == "eager" or asked.more.get("output_attentions"):
        name = "eager"
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
    return _run(_function(name, asked.module), asked, query, key, value, mask)


def _run(function: Any, asked: _Asked, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[Tensor, Tensor | None]:
    """One of transformers' attention functions, under the mask that it takes."""
    more = asked.more
    if asked.softcap is not None:
        more = more | {"softcap": asked.softcap}
    if asked.sliding_window is not None:
        more = more | {"sliding_window": asked.sliding_window}
    return function(asked.module, query, key, value, mask, dropout=asked.dropout, scaling=asked.scaling, **more)  # type: ignore[no-any-return]


def _function(name: str, module: Any) -> Any:
    """One of transformers' attention functions by its name; "eager" is the model's own."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
