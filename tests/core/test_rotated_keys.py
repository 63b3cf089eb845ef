"""What is made of a cache's keys once: buffers that grow, are cut and begin anew; and the fused kernel that reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import close
from torch import Tensor

from hf_longattn import LongAttnConfig, Rotation
from hf_longattn.core.call import Call
from hf_longattn.core.geometry import AttentionLayout
from hf_longattn.core.kernels import few_cpu
from hf_longattn.core.lower import lower
from hf_longattn.core.plan import ReadyPlan
from hf_longattn.core.reference import dense_attention
from hf_longattn.core.rotated_keys import RotatedKeys

preset = LongAttnConfig.preset
FUSED = ("rerope", "string_remap", "rerope+infoscale", "rerope+attention_sink", "cosscale", "rerope+cosscale")


def test_each_column_is_made_once(sizes: Callable[..., None]) -> None:
    sizes(ROOM=3, AHEAD=2, STEP=4)
    source, made = torch.arange(60.0).view(1, 1, 60, 1).expand(2, 3, -1, 5), []

    def make(columns: slice) -> Tensor:
        made.extend(range(columns.start, columns.stop))
        return source[:, :, columns]

    kept = RotatedKeys()
    for columns, until in (((0, 9), 12), ((0, 10), 13), ((2, 30), 30), ((7, 31), 40)):
        got = kept.get("a", slice(*columns), until, make)
        assert torch.equal(got, source[:, :, slice(*columns)])
    assert made == list(range(33))
    kept.crop(20)
    assert torch.equal(kept.get("a", slice(0, 22), 40, make), source[:, :, :22])
    assert made[33:] == list(range(20, 24))
    del made[:]
    for columns in ((40, 44), (3, 9)):  # a gap, and what lies before
        assert torch.equal(kept.get("a", slice(*columns), 60, make), source[:, :, slice(*columns)])
    assert made == [*range(40, 46), *range(3, 11)]
    assert torch.equal(kept.get("b", slice(3, 5), 5, lambda c: -source[:, :, c]), -source[:, :, 3:5])
    assert kept.nbytes > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", ["one", "several", "padded"])
@pytest.mark.parametrize("name", FUSED)
def test_half_precision_reads_turned_keys_by_the_fused_kernel(
    name: str, rows: str, dtype: torch.dtype, sizes: Callable[..., None]
) -> None:
    """As near to the definition in float64 as the rounding of one more number for each query and key allows."""
    sizes(WORTH=2)
    own = {"string_remap": {"shift": 9, "window": 4}, "rerope+infoscale": {"window": 9, "train_length": 20}}
    parameters = own.get(name, {"window": 9} if "rerope" in name else {}) | ({"scale": 4.0} if "cosscale" in name else {})
    config, generator = preset(name, **parameters), torch.Generator().manual_seed(0)
    q_len = 1 if rows == "one" else 5
    shapes = ((4, q_len), (2, 60), (2, 60))
    query, key, value = (torch.randn(2, heads, n, 16, generator=generator).to(dtype) for heads, n in shapes)
    seen = AttentionLayout.causal(q_len, 60, None, 0, torch.device("cpu"))
    if rows == "padded":  # in the second entry the first of these tokens sees nothing
        index = seen.index.repeat(2, 1, 1)
        index[1, :, 2:4] = 56
        seen = AttentionLayout(index)
    model: dict[str, Any] = {"rotation": Rotation(100.0 ** (-torch.arange(0, 16, 2).float() / 16)), "method_id": name}
    plan = lower(Call(query, key, value, config, seen, 0.25, **model))
    compute = few_cpu.FewOnCPU(plan)
    assert isinstance(compute.way, few_cpu.Streamed)
    kept = RotatedKeys()
    got = ReadyPlan(plan, "few", compute).run(query, key, value, keep=lambda by, k: kept)
    assert bool(kept.nbytes) == (name != "string_remap")
    wide = (x.double() for x in (query, key, value))
    want, _ = dense_attention(Call(*wide, config, seen, 0.25, **model))
    close(got.double(), want, 0.02)
    if name != "string_remap":
        assert (
            few_cpu.FewOnCPU(lower(Call(query, key, value, config, seen, 0.25, backend="tiled", **model))).kept_under is None
        )
