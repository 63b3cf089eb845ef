"""Tokens at several positions each (M-RoPE): every remap by its formula on each axis, against reference and kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import close
from torch import Tensor

from hf_longattn import LongAttnConfig, Rotation
from hf_longattn.core.attend import attend
from hf_longattn.core.call import Call
from hf_longattn.core.geometry import AttentionLayout
from hf_longattn.core.rotary import RotationDelta

AXIS = (0, 1, 2, 0, 1, 2, 2, 0)
FREQUENCIES = 10 ** -(torch.arange(8) / 4)
W, HEADS, KV_HEADS, WIDTH = 12, 4, 2, 20
#: From a position to where a far query and a far key are shown; keys are far from a temporal distance of W on.
FORMULAS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "rerope": ({"window": W}, lambda p: 0 * p + W, lambda p: 0 * p),
    "leaky_rerope": ({"window": W, "stretch": 4.0}, lambda p: (p - W) / 4 + W, lambda p: p / 4),
    "self_extend": ({"window": W, "group": 3}, lambda p: p // 3 + W - W // 3, lambda p: p // 3),
    "string_remap": ({"shift": W, "window": 5}, lambda p: p - W + 5, lambda p: p),
    "streaming": ({"window": W, "sinks": 3}, lambda p: p.clamp(max=3 + W - 1), lambda p: p),
    "lm_infinite": ({"window": W, "sinks": 3}, lambda p: 0 * p + W, lambda p: 0 * p),
}


def places(falls: bool = False) -> Tensor:
    """(3, 1, n): text, a picture of 3 x 4, text, one of 5 x 2, text.

    falls: in its place a film of 2 x 2 whose frames reach beyond the text that follows.
    """
    parts, at = [], 0
    for text, frames, rows, columns in (
        (6, 1, 3, 4),
        (7, 12 if falls else 1, 2 if falls else 5, 2),
        (11 if not falls else 5, 0, 0, 0),
    ):
        parts.append((at + torch.arange(text)).expand(3, -1))
        at += text
        grid = torch.meshgrid(torch.arange(frames), torch.arange(rows), torch.arange(columns), indexing="ij")
        parts.append(at + torch.stack(grid).flatten(1))
        at += max(rows, columns)
    return torch.cat(parts, 1)[:, None]


def rotated(x: Tensor, p: Tensor, frequencies: Tensor = FREQUENCIES) -> Tensor:
    """x (..., WIDTH), its pairs (f, f + 8) turned by the position of their axis, p (3, ...)."""
    angle = p[list(AXIS)].movedim(0, -1).double() * frequencies.double()
    a, b, rest = x[..., :8], x[..., 8:16], x[..., 16:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest], -1)


def by_formula(name: str, query: Tensor, key: Tensor, value: Tensor, p: Tensor, kept: slice) -> Tensor:
    """The definition, pair of tokens by pair, from queries and keys that are not rotated."""
    parameters, f, g = FORMULAS[name]
    sinks, p = parameters.get("sinks"), p[:, 0]
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value))
    n, out = p.shape[1], []
    for i in range(n)[kept]:
        far = p[0, i] - p[0] >= W
        near = rotated(query[:, :, i, None], p[:, i, None]) * rotated(key, p)
        shown = rotated(query[:, :, i, None], f(p[:, i, None])) * rotated(key, g(p))
        logits = torch.where(far, shown.sum(-1), near.sum(-1)) * WIDTH**-0.5
        seen = torch.arange(n) <= i
        seen &= ~far | (p[0] < sinks) if sinks is not None else True
        out.append(torch.softmax(logits.masked_fill(~seen, -math.inf), -1)[..., None, :] @ value)
    return torch.cat(out, 2)


def tensors(n: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, heads, n, WIDTH, generator=generator).double() for heads in (HEADS, KV_HEADS, KV_HEADS)]


def call_of(config: LongAttnConfig, query: Tensor, key: Tensor, value: Tensor, p: Tensor, kept: slice, backend: str) -> Call:
    rows = (
        AttentionLayout.causal(p.shape[2], p.shape[2], None, 0, p.device)
        .take(torch.arange(p.shape[2])[kept])
        .by_axis(p[..., kept], p)
    )
    rotation = Rotation(FREQUENCIES, axis=AXIS)
    turned = rotated(query, p[:, 0])[:, :, kept], rotated(key, p[:, 0])
    return Call(*turned, value, config, rows, WIDTH**-0.5, rotation=rotation, backend=backend)


@pytest.mark.parametrize("kept", [slice(None), slice(-1, None), slice(-5, None)], ids=["all", "one", "few"])
@pytest.mark.parametrize("falls", [False, True], ids=["", "falls"])
@pytest.mark.parametrize("name", FORMULAS)
def test_every_remap_shows_each_axis_by_its_own_formula(name: str, falls: bool, kept: slice) -> None:
    p = places(falls)
    assert bool((p[0].diff() < 0).any()) == falls
    query, key, value = tensors(p.shape[2])
    config = LongAttnConfig.preset(name, **FORMULAS[name][0])
    want = by_formula(name, query, key, value, p, kept)
    for backend in ("reference", "tiled", "auto"):
        close(attend(call_of(config, query, key, value, p, kept, backend)), want, 2e-6, backend)


def test_heads_of_their_own_and_another_spectrum_by_axis() -> None:
    p = places()
    query, key, value = tensors(p.shape[2])
    configs = (
        LongAttnConfig.preset("leaky_rerope", window=W, stretch=(2.0, math.inf)),
        LongAttnConfig.preset("yarn_beyond", factor=4.0, train_length=W, beta_fast=1.0, beta_slow=0.1),
    )
    for config, kept in ((c, kept) for c in configs for kept in (slice(None), slice(-1, None))):
        want = attend(call_of(config, query, key, value, p, kept, "reference"))
        close(attend(call_of(config, query, key, value, p, kept, "auto")), want, 2e-6, config.name)
    leaky = configs[0]
    for head, stretch in enumerate((2.0, 1e12)):
        alone = LongAttnConfig.preset("leaky_rerope", window=W, stretch=stretch)
        own = slice(2 * head, 2 * head + 2)
        every = slice(None)
        whole = attend(call_of(leaky, query, key, value, p, every, "reference"))[:, own]
        close(whole, attend(call_of(alone, query, key, value, p, every, "reference"))[:, own], 1e-9)
    late = attend(call_of(configs[1], query, key, value, p, slice(-1, None), "reference"))
    shown, factor = configs[1].positions.spectrum(FREQUENCIES.double())  # type: ignore[union-attr]
    scale = torch.tensor([factor] * 16 + [1.0] * 4)  # of what is rotated
    turned = scale * rotated(query, p[:, 0], shown)[:, :, -1:], scale * rotated(key, p[:, 0], shown)
    logits = turned[0] @ turned[1].repeat_interleave(2, 1).mT * WIDTH**-0.5
    close(late, torch.softmax(logits, -1) @ value.repeat_interleave(2, 1), 1e-7)


def test_gradients_flow_through_every_axis() -> None:
    p = places()
    given = [x.requires_grad_() for x in tensors(p.shape[2])]
    config = LongAttnConfig.preset("leaky_rerope", window=W)
    found = []
    for backend in ("reference", "tiled"):
        out = attend(call_of(config, *given, p, slice(None), backend))
        found.append(torch.autograd.grad(out.square().sum(), given))
    for got, want in zip(*found, strict=True):
        close(got, want, 1e-5)


def test_text_is_the_special_case_of_equal_axes() -> None:
    """And a rotation that does not know its axes takes text alone."""
    n = 40
    p = torch.arange(n).expand(3, 1, -1)
    query, key, value = tensors(n)
    config = LongAttnConfig.preset("self_extend", window=W)
    by_axis = call_of(config, query, key, value, p, slice(None), "tiled")
    rows = AttentionLayout.causal(n, n, None, 0, p.device)
    text = Call(by_axis.query, by_axis.key, value, config, rows, WIDTH**-0.5, rotation=Rotation(FREQUENCIES), backend="tiled")
    assert torch.equal(attend(by_axis), attend(text))
    bare = Call(by_axis.query, by_axis.key, value, config, by_axis.rows, WIDTH**-0.5, rotation=Rotation(FREQUENCIES))
    with pytest.raises(ValueError, match=r"several positions each need Rotation\(axis=\)"):
        attend(bare)


def test_a_graph_makes_angles_without_sines_in_float64() -> None:
    """It makes them at every token, for all keys of a static cache."""
    inv_freq = 1e4 ** -(torch.arange(32, dtype=torch.float64) / 32)
    delta = RotationDelta(Rotation(inv_freq.float()), lambda at: at.clamp(max=4096))
    position, seen = torch.cat([torch.arange(64), torch.arange(131_000, 131_072)])[None], []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        seen.extend(n.meta["example_value"].dtype for n in graph.graph.nodes if n.target in ("cos", "sin"))
        return graph.forward

    made = torch.compile(delta.angles, backend=backend, fullgraph=True)(position)
    assert seen == [torch.float32] * 2
    for got, want in zip(made, delta.angles(position), strict=True):
        close(got, want, 5e-7)
