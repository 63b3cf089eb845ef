"""Few queries against many keys, as in decoding: the logits of all segments, and one softmax."""

from __future__ import annotations

import torch

from ..plan import AttentionPlan, Computation
from . import programs
from .few_cpu import few_on_cpu
from .few_cuda import FewOnCUDA
from .kernel import FEW_QUERIES, Kernel


def prepare(plan: AttentionPlan) -> Computation:
    """The way of the plan's device."""
    return few_on_cpu(plan) if plan.query.device.type == "cpu" else FewOnCUDA(plan)


def _why_not(plan: AttentionPlan) -> str | None:
    if plan.query.device.type != "cpu":
        return "an exported graph serves every length" if torch.compiler.is_exporting() else programs.why_not(plan.query)
    return None if plan.keepable else "on a CPU it runs in no graph, and under no transform of torch.func"


def _preferred(plan: AttentionPlan) -> bool:
    """Prefer it on a CPU; on CUDA unless sdpa computes the plan as it is: a product over a causal triangle, without a score of
    a method's own, which would write every key anew at every token.
    """
    return plan.query.device.type == "cpu" or not (plan.is_causal_product and plan.fold is None)


KERNEL = Kernel(
    prepare,
    lacks=frozenset({"dropout", "gradients"}),
    queries=FEW_QUERIES,
    why_not=_why_not,
    preferred=_preferred,
)
