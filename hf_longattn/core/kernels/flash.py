"""FlashAttention 2 and 3, for methods that only touch query and key."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from ..plan import AttentionPlan
from .by_segment import BySegment
from .fused import HALF
from .kernel import Kernel, KernelCall, Result
from .sdpa import BEYOND_PRODUCTS, visible


def run(call: KernelCall) -> Result:
    """softmax(scaling q . k) over the visible keys, for plain rows in float16 or bfloat16 (see `why_not`)."""
    assert call.value is not None
    plain = call.rows.plain
    assert plain is not None
    key, value = visible(call.key, plain), visible(call.value, plain)
    options: dict[str, Any] = {"softmax_scale": call.spec.scaling, "causal": True}
    if call.dropout:
        options["dropout_p"] = call.dropout
    out = _flash()(*(x.transpose(1, 2) for x in (call.query, key, value)), **options)
    out = (out[0] if isinstance(out, tuple) else out).transpose(1, 2)
    return out, out.new_empty(0), out.new_empty(0)


def why_not(plan: AttentionPlan) -> str | None:
    """The reason why FlashAttention cannot compute a plan, or None."""
    if plan.rows.plain is None:
        return "the rows are padded, packed or masked, which only the other backends compute"
    try:
        _flash()
    except ImportError as error:
        return str(error)
    return None


@functools.cache
def _flash() -> Callable[..., Any]:
    """flash_attn_func of FlashAttention 3, else 2."""
    for package in ("flash_attn_interface", "flash_attn"):
        try:
            function: Callable[..., Any] = importlib.import_module(package).flash_attn_func
            return function
        except ImportError:
            continue
    raise ImportError("neither flash_attn_interface (FlashAttention 3) nor flash_attn is installed: pip install flash-attn")


KERNEL = Kernel("flash", functools.partial(BySegment, run=run), lacks=BEYOND_PRODUCTS, dtypes=HALF, why_not=why_not)
