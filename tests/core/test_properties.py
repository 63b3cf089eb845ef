"""Texts laid out at random - padded anywhere, packed, in branches, numbered in several ways, fed in pieces through caches -

have the logits of each text alone, or the call raises; and the ways that generate() and training go never raise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import CASES, VOCAB
from helpers import close, crossed, model
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import StaticCache

from hf_longattn.integration.caches import CACHE

METHODS = [
    "scale_invariant",
    "sinks",
    "alibi",
    "infoscale",
    "mapped+adaptive",
    "rerope",
    "self_extend",
    "windowed",
    "streaming",
]
PAD = -1
quick = settings(max_examples=25, deadline=None, derandomize=True)


def alone(m: Any, ids: Tensor, positions: Tensor) -> Tensor:
    """One text whole, at its positions; (length, vocabulary)."""
    inputs = {"position_ids": (positions - positions[:1])[None], "attention_mask": torch.ones(1, len(ids)), "use_cache": False}
    return m(ids[None], **inputs).logits[0]


def text(length: int, seed: int) -> Tensor:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def compare(m: Any, run: Any, texts: list[tuple[Tensor, Tensor, Tensor]], benign: bool) -> None:
    """run() against every text alone, given as its ids, its positions and where (row, columns) its logits are."""
    try:
        logits = run()
    except ValueError as error:
        if benign:
            raise
        event(str(error)[:40])
        return
    event("computed")
    for ids, positions, (row, *columns) in texts:
        close(logits[row, columns], alone(m, ids, positions), 2e-5)


@dataclass
class Padded:
    """A batch with padding anywhere: where tokens are (bool, batch x width), how they are numbered, how they are fed."""

    real: Tensor
    numbering: str
    chunks: list[int]
    cache: str


@st.composite
def padded(draw: Any) -> Padded:
    width = draw(st.integers(4, 20))
    rows = draw(st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=1, max_size=2))
    real = torch.tensor(rows)
    real[:, draw(st.integers(0, width - 1))] = True
    cuts = sorted(draw(st.sets(st.integers(1, width - 1), max_size=3)))
    chunks = [b - a for a, b in zip([0, *cuts], [*cuts, width], strict=True)]
    cache = draw(st.sampled_from(["dynamic", "static"] if cuts else ["none", "dynamic", "static"]))
    return Padded(real, draw(st.sampled_from(["counted", "index", "default"])), chunks, cache)


@pytest.mark.parametrize("case", crossed(METHODS, 3))
@quick
@given(layout=padded())
@torch.no_grad()
def test_padding_anywhere(case: str, layout: Padded) -> None:
    m, real = model("llama", CASES[case]), layout.real
    batch, width = real.shape
    ids = torch.where(real, torch.stack([text(width, seed) for seed in range(batch)]), 0)
    positions = torch.arange(width).expand(batch, -1)
    if layout.numbering == "counted":
        positions = (real.long().cumsum(-1) - 1).clamp(min=0)

    def run() -> Tensor:
        cache, out, begin = None, [], 0
        if layout.cache == "static":
            cache = StaticCache(config=m.config, max_cache_len=width + 3)
        for size in layout.chunks:
            end = begin + size
            inputs = {} if layout.numbering == "default" else {"position_ids": positions[:, begin:end]}
            mask = real[:, :end].long()
            step = m(ids[:, begin:end], attention_mask=mask, **{CACHE: cache}, use_cache=layout.cache != "none", **inputs)
            cache, begin = step.get(CACHE), end
            out.append(step.logits)
        return torch.cat(out, 1)

    where = [r.nonzero()[:, 0] for r in real]
    texts = [(ids[b, at], positions[b, at], (b, *at.tolist())) for b, at in enumerate(where)]
    compare(m, run, texts, benign=True)


@pytest.mark.parametrize("case", crossed(METHODS, 3))
@quick
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    form=st.sampled_from(["packed", "cached", "2-D mask", "4-D mask"]),
    skip=st.tuples(st.integers(0, 8), st.integers(0, 5)),
)
@torch.no_grad()
def test_packing_and_skipping(case: str, lengths: list[int], form: str, skip: tuple[int, int]) -> None:
    """Documents in one row, one of which may skip some positions before one of its tokens."""
    m, at, more = model("llama", CASES[case]), *skip
    ids = [text(n, seed) for seed, n in enumerate(lengths)]
    positions = [torch.arange(n) for n in lengths]
    positions[0] = positions[0] + more * (positions[0] >= at)
    inputs: dict[str, Any] = {"position_ids": torch.cat(positions)[None], "use_cache": form == "cached"}
    numbers = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    if form == "2-D mask":
        inputs["attention_mask"] = torch.ones(1, len(numbers))
    if form == "4-D mask":
        inputs["attention_mask"] = ((numbers[:, None] == numbers) & torch.ones(len(numbers), len(numbers)).tril().bool())[
            None, None
        ]
    jumps = more > 0 and 0 < at < lengths[0]
    together = len(lengths) > 1 and form in ("cached", "2-D mask")
    texts, begin = [], 0
    for x, p in zip(ids, positions, strict=True):
        texts.append((x, p, (0, *range(begin, begin + len(x)))))
        begin += len(x)
    benign = not together and not (jumps and form == "packed")
    if together:
        with pytest.raises(ValueError, match="go back"):
            m(torch.cat(ids)[None], **inputs)
    else:
        compare(m, lambda: m(torch.cat(ids)[None], **inputs).logits, texts, benign)


@pytest.mark.slow
@pytest.mark.parametrize("case", crossed(METHODS, ["scale_invariant", "rerope", "infoscale"]))
@quick
@given(parents=st.lists(st.integers(0, 99), min_size=1, max_size=9), prefix=st.integers(1, 6), split=st.booleans())
@torch.no_grad()
def test_trees(case: str, parents: list[int], prefix: int, split: bool) -> None:
    """A chain, then a tree of drafts: every node continues a random earlier one; each path is a text of its own."""
    m, n = model("llama", CASES[case]), prefix + len(parents)
    ids, visible, depth = text(n, 0), torch.zeros(n, n, dtype=torch.bool), torch.arange(n)
    parent = [*range(-1, prefix - 1), *(prefix - 1 + p % (i + 1) for i, p in enumerate(parents))]
    for node, above in enumerate(parent):
        if above >= 0:
            visible[node], depth[node] = visible[above], depth[above] + 1
        visible[node, node] = True

    def run() -> Tensor:
        cache, out = None, []
        for begin, end in ((0, prefix), (prefix, n)) if split else ((0, n),):
            mask = visible[None, None, begin:end, :end]
            step = m(
                ids[None, begin:end],
                attention_mask=mask,
                position_ids=depth[None, begin:end],
                **{CACHE: cache},
                use_cache=split,
            )
            cache = step.get(CACHE)
            out.append(step.logits)
        return torch.cat(out, 1)

    paths = [v.nonzero()[:, 0] for v in visible]
    logits = run()
    for path in paths:
        close(logits[0, path[-1]], alone(m, ids[path], depth[path])[-1], 2e-5)
