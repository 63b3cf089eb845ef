"""What a decoded token costs beside its arithmetic, counted: Python calls and tensor operations of a layer beyond sdpa's."""

from __future__ import annotations

import functools
import gc
import sys
from typing import Any

import pytest
import torch
from helpers import stock, tokens
from transformers import DynamicCache
from watched import Operators

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.integration.caches import CACHE

preset = LongAttnConfig.preset
#: Tensor operations that a layer may take beyond sdpa's, where the method acts on one query.
ACTING = {
    "infoscale": (preset("infoscale", train_length=4), 2),
    "scale_invariant": (preset("scale_invariant"), 9),
    "alibi": (preset("alibi"), 9),
    "cosscale": (preset("cosscale"), 18),
    "adaptive_temperature": (preset("adaptive_temperature"), 27),
    "attention_sink": (preset("attention_sink"), 11),
    "windowed": (preset("windowed", window=6), 5),
    "streaming": (preset("streaming", window=6), 21),
    "rerope": (preset("rerope", window=6), 19),
    "dual_chunk": (preset("dual_chunk", chunk=6, local=2), 25),
    "rerope+infoscale": (preset("rerope+infoscale", window=6, train_length=7), 20),
}
WITHIN = {name: preset(name) for name in ("infoscale", "rerope", "rerope+infoscale", "streaming", "yarn_beyond")}


@torch.no_grad()
def step_of(config: LongAttnConfig | None, layers: int) -> tuple[int, int]:
    """Tensor operations and Python calls of one decoded token."""
    m = stock("llama", num_hidden_layers=layers)
    if config is not None:
        hf_longattn.apply(m, config)
    cache = DynamicCache(config=m.config)
    m(tokens(1), **{CACHE: cache})
    token = tokens(1, 1, seed=3)
    m(token, **{CACHE: cache})  # builds tables
    with Operators() as operations:
        m(token, **{CACHE: cache})
    calls = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    gc.disable()  # what it finds calls back
    sys.setprofile(profile)
    try:
        m(token, **{CACHE: cache})
    finally:
        sys.setprofile(before)
        gc.enable()
    return operations.ran.total(), calls


@functools.cache
def of_a_layer(config: LongAttnConfig | None) -> tuple[float, float]:
    """The same of one layer, without what a forward pass takes once."""
    two, four = step_of(config, 2), step_of(config, 4)
    return (four[0] - two[0]) / 2, (four[1] - two[1]) / 2


def over_sdpa(config: LongAttnConfig) -> tuple[float, float]:
    operations, calls = (a - b for a, b in zip(of_a_layer(config), of_a_layer(None), strict=True))
    return operations, calls


@pytest.mark.parametrize("case", WITHIN)
def test_nothing_is_paid_while_nothing_changes(case: str) -> None:
    operations, calls = over_sdpa(WITHIN[case])
    assert operations == 0
    assert calls <= 8


@pytest.mark.parametrize("case", ACTING)
def test_a_layer_repeats_nothing_that_the_forward_pass_knows(case: str) -> None:
    config, most = ACTING[case]
    operations, calls = over_sdpa(config)
    assert operations <= most
    assert calls <= 24


@pytest.mark.parametrize(("case", "most"), [("within", (6, 180)), ("scale_invariant", (30, 360)), ("rerope", (100, 440))])
def test_what_a_pass_takes_once(case: str, most: tuple[int, int]) -> None:
    """Tensor operations and Python calls beyond sdpa's, of which a pass alone makes 266."""
    config = WITHIN["infoscale"] if case == "within" else ACTING[case][0]
    ours, sdpa = ([2 * a - b for a, b in zip(step_of(c, 2), step_of(c, 4), strict=True)] for c in (config, None))
    assert all(a - b <= m for a, b, m in zip(ours, sdpa, most, strict=True))
