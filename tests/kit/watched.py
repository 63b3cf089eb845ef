"""What PyTorch is asked for while something runs: by that, how it was computed shows on any machine."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
FUSED = aten._scaled_dot_product_flash_attention_for_cpu


class Operators(TorchDispatchMode):
    """While open, counts operators.

    `ran`: how often each did. `multiplied`: numbers that products multiply, those of fused attention too, whether hidden or
    not. `denormal`: how many of these are denormal numbers of float32. `largest`: the elements of the largest tensor that any
    operator returns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.multiplied = self.denormal = 0
        self.ran: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket
        self.ran[name] += 1
        out = func(*args, **(kwargs or {}))
        if name is FUSED:
            query, key, *_ = args
            self.multiplied += 2 * query.numel() * key.shape[2]
        elif name in (aten.bmm, aten.baddbmm_):
            left, right = args[-2:]
            self.multiplied += left.numel() * right.shape[2]
            tiny = torch.finfo(torch.float32).tiny
            self.denormal += sum(int(((x != 0) & (x.abs() < tiny)).sum()) for x in (left, right))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes() // max(x.element_size(), 1))
        return out
