"""The attention function that we register: one call of one layer, from transformers' arguments to a kernel."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..config import LongAttnConfig
from ..core.attend import attend
from ..core.call import Call
from ..core.geometry import AttentionLayout
from ..core.kernels.kernel import FEW_QUERIES, KernelFailure
from ..core.kernels.sdpa import few_queries
from ..core.plan import AttentionPlan, plan_key, plans
from ..core.reference import dense_attention
from ..core.rotated_keys import Keep
from ..slots.learned import learned_parts
from .caches import is_paged
from .engines import ulysses
from .engines.heads import of_these_heads
from .engines.paged import ARGUMENTS, paged_attention
from .masks import BOTH_WAYS, MaskContext, attention_function, base_implementation, is_layout_mask, read_mask
from .passes import LayerCall, find
from .positions import rows_under
from .rotated_key_cache import beside

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

_IN_PAGES = _HARMLESS | ARGUMENTS
#: As it was before torch's context_parallel may have put another in its place.
_SDPA = torch.nn.functional.scaled_dot_product_attention
_IN_PARTS = (
    "tokens at several positions each, as those of pictures are in a model with M-RoPE, are read by a remap of rotary "
    "distances in whole sequences: not in paged caches, and not split over processes"
)
#: What a layer that is left alone computes where no other function knows its rows.
_LEFT_ALONE = LongAttnConfig()


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
    traced = torch.compiler.is_compiling()
    now, plan, positions = find(module, attention_mask, kwargs.get("position_ids"), traced)
    layer_call = LayerCall(module, plan, now, positions, traced, dropout, scaling, softcap, sliding_window, kwargs)
    out: tuple[Tensor, Tensor | None]
    paged = is_paged(kwargs)
    exchanged = attention_mask is None and not paged and ulysses.is_exchanged(layer_call, query, key)
    split = exchanged or plan.state.group is not None
    if now is not None and now.axes is not None and (split or paged):
        raise NotImplementedError(_IN_PARTS)
    if plan.config is not None or split:
        _refuse(layer_call, _IN_PAGES if paged else _HARMLESS)
    if split:
        out = ulysses.whole_sequence(layer_call, query, key, value, _over_rows), None
    elif paged:
        out = paged_attention(layer_call, query, key, value, _over_rows if plan.config is not None else _left_alone), None
    elif plan.config is None:
        out = _base(layer_call, query, key, value, attention_mask)
    elif now is not None and now.axes is not None and now.unchanged(plan):
        out = _before_method(layer_call, query, key, value, attention_mask)
    else:
        out = _over_mask(layer_call, query, key, value, rows_under(attention_mask, layer_call, query.shape[2], key.shape[2]))
    return out


def _before_method(
    layer_call: LayerCall, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Compute a layer as before its method, in a pass with pictures in which the method changes nothing."""
    base = None
    if mask is not None and is_layout_mask(mask):
        base = rows_under(mask, layer_call, query.shape[2], key.shape[2]).base  # the pass notes where its tokens stand
    if base is None or layer_call.weights:
        return _base(layer_call, query, key, value, mask)
    return _run(base.function(layer_call.module), layer_call, query, key, value, base.mask)


def _over_mask(
    layer_call: LayerCall, query: Tensor, key: Tensor, value: Tensor, context: MaskContext
) -> tuple[Tensor, Tensor | None]:
    """A layer's method, or the model's own attention where the method changes nothing in the longest text of the pass."""
    weights, base, rows = layer_call.weights, context.base, context.rows
    assert rows is not None
    several = layer_call.now is not None and layer_call.now.axes is not None
    if base is not None and not weights and not several and context.changes_nothing(layer_call.plan.identity_below):
        return _run(base.function(layer_call.module), layer_call, query, key, value, base.mask)
    if context.prepared is None and not layer_call.traced:
        context.prepared = plans(rows)
    return _attend(layer_call, query, key, value, rows, None if weights else context.prepared, weights)


def _attend(
    layer_call: LayerCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: AttentionLayout,
    made: Mapping[Hashable, AttentionPlan] | None = None,
    with_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """A layer's method over rows of any geometry: output (batch, q_len, heads, head_dim), and weights if asked for.

    Args:
        made: the plans over these rows.
    """
    plan, sinks, traced = layer_call.plan, layer_call.more.get("s_aux"), layer_call.traced
    config, scaling = plan.config or _LEFT_ALONE, query.shape[-1] ** -0.5 if layer_call.scaling is None else layer_call.scaling
    learned = learned_parts(layer_call.module)
    if query.shape[1] != plan.heads and (sinks is not None or any(m.head_dependent for m in config.methods)):
        config, learned, own = of_these_heads(layer_call.module, query.shape[1], plan.heads, config, learned)
        sinks = own(sinks) if sinks is not None and sinks.shape[0] == plan.heads else sinks
    kind = None if traced or config is not plan.config else plan.kind
    if made and kind is not None and not (layer_call.dropout or plan.observer or torch.is_grad_enabled()):
        ready = made.get(plan_key(kind, query, key, value, scaling, layer_call.softcap, learned, sinks))
        if ready is not None:
            try:
                return ready.run(query, key, value, learned, sinks, _keep(layer_call, query)).transpose(
                    1, 2
                ).contiguous(), None
            except KernelFailure:  # which said so: another kernel is chosen
                pass
    call = Call(
        query,
        key,
        value,
        config,
        rows,
        scaling=scaling,
        softcap=layer_call.softcap,
        dropout=layer_call.dropout,
        learned=learned,
        rotation=None if plan.rotary is None else plan.rotary.rotation(query),
        sink_logits=sinks,
        tables=plan.state.tables,
        # a graph reads the strength when it runs; it would be compiled anew for each number
        strength=plan.state.strength if traced and not torch.compiler.is_exporting() else None,
        kind=kind,
        keep=None if kind is None else _keep(layer_call, query),
    )
    out, weights = dense_attention(call) if with_weights else (attend(call), None)
    if plan.observer is not None:
        plan.observer(dataclasses.replace(call, output=out))
    return out.transpose(1, 2).contiguous(), weights


def _keep(layer_call: LayerCall, query: Tensor) -> Keep | None:
    """Return the function that finds a layer's kept keys; None: there is no KV cache."""
    now = layer_call.now
    if query.device.type != "cpu" or now is None or now.cache is None or now.state is None:
        return None
    return functools.partial(beside, now, getattr(layer_call.module, "layer_idx", None), query.shape[2])


def _over_rows(layer_call: LayerCall, query: Tensor, key: Tensor, value: Tensor, rows: AttentionLayout) -> Tensor:
    """A layer whose rows no mask tells of: (batch, q_len, heads, head_dim)."""
    return _attend(layer_call, query, key, value, rows)[0]


def _left_alone(layer_call: LayerCall, query: Tensor, key: Tensor, value: Tensor, rows: AttentionLayout) -> Tensor:
    """Compute a layer that keeps its attention."""
    return _base(layer_call, query, key, value, rows.on(key.device).visible(key.shape[2]))[0]


def _refuse(layer_call: LayerCall, harmless: frozenset[str]) -> None:
    """Raise for anything in a call that we would otherwise compute wrongly in silence."""
    more = layer_call.more
    if torch.nn.functional.scaled_dot_product_attention is not _SDPA and not layer_call.traced and _in_context_parallel():
        raise NotImplementedError(
            "torch's context_parallel splits the sequence and replaces scaled_dot_product_attention alone: under "
            "hf_longattn every process would attend to its own part. Leave it off, or "
            'model.set_attn_implementation("sdpa") first'
        )
    if more.get("is_causal") is False:
        raise ValueError(BOTH_WAYS.format("is_causal=False"))
    if layer_call.sliding_window is not None and not layer_call.plan.windowed:
        raise ValueError("this layer got a sliding window that its config does not announce: please report the model")
    if more.keys() <= harmless:
        return
    unknown = sorted(k for k, v in more.items() if k not in harmless and v is not None)
    if unknown:
        raise ValueError(
            f"attention got {', '.join(unknown)}, which hf_longattn does not know and will not ignore; drop the argument, "
            "or exclude the layer with `layers`"
        )


def _in_context_parallel() -> bool:
    """Tell whether torch has put its sharded attention in place of sdpa, as context_parallel does."""
    module = getattr(torch.nn.functional.scaled_dot_product_attention, "__module__", None) or ""
    return module.startswith("torch.distributed.tensor.experimental")


def _base(
    layer_call: LayerCall, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The unmodified attention, for layers that are left alone."""
    name = base_implementation(layer_call.module.config)
    if mask is not None and is_layout_mask(mask):
        rows = read_mask(mask, key.shape[2]).rows
        mask = rows.once(("visible", key.shape[2], key.device), lambda: rows.on(key.device).visible(key.shape[2]))
    if name == "eager" or layer_call.weights:
        name = "eager"
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
    return _run(attention_function(name, layer_call.module), layer_call, query, key, value, mask)


def _run(
    function: Any, layer_call: LayerCall, query: Tensor, key: Tensor, value: Tensor, mask: Any
) -> tuple[Tensor, Tensor | None]:
    """One of transformers' attention functions, under the mask that it takes."""
    more = layer_call.more
    if function is sdpa_attention_forward and _are_few(layer_call, query, key, mask):
        if mask is not None and mask.shape[2] > 1:
            mask = mask.repeat(1, 1, query.shape[1] // key.shape[1], 1)
        return few_queries(query, key, value, mask, layer_call.scaling), None
    if layer_call.softcap is not None:
        more = more | {"softcap": layer_call.softcap}
    if layer_call.sliding_window is not None:
        more = more | {"sliding_window": layer_call.sliding_window}
    return function(layer_call.module, query, key, value, mask, dropout=layer_call.dropout, scaling=layer_call.scaling, **more)  # type: ignore[no-any-return]


def _are_few(layer_call: LayerCall, query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Tell whether `few_queries` serves in place of Transformers' sdpa: the call asks for nothing beyond it."""
    small = 0 < query.shape[2] <= FEW_QUERIES and query.shape[1] > key.shape[1] and query.device.type == "cpu"
    plain = (
        not layer_call.traced
        and not layer_call.dropout
        and layer_call.softcap is None
        and "position_bias" not in layer_call.more
    )
    return small and plain and (query.shape[2] == 1 if mask is None else mask.shape[1] == 1)
