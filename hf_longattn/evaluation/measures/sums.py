"""Sums over the calls of one layer, from which all quantities follow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.call import Call
from ...core.kernels.kernel import MASK_VALUE, entropy
from ...core.tracing import wide_device, widened
from ...slots.method import freeze
from .blocks import Block, blocks
from .diagnostics import QUANTITIES, WHAT, Diagnostics

#: Groups of rows by length, [2^k, 2^(k+1)).
GROUPS = 31
#: Standard normal quantiles of a QQ plot; how many keys are drawn from a row for it, and from how many rows of a call.
Z = tuple(i / 4 for i in range(-12, 13))
DRAWS, DRAWN_ROWS = 8, 512
#: The slope of outputs is fitted from this length on, over groups of at least so many rows.
SLOPE_FROM, SLOPE_ROWS = 16, 8
#: Rows of outputs in float64 at a time.
OUTPUT_ROWS = 2048
#: What a factor of 1 may miss it by, as a polynomial computes it.
ROUNDING = 1e-5


@dataclass(frozen=True)
class Options:
    """The measures to take and their resolution: the arguments of `capture`, explained there."""

    what: Collection[str] | str | None = None
    rows: int | None = None
    delta: int = 4
    local: int = 100
    sinks: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if unknown := [w for w in self.groups if w not in WHAT]:
            raise ValueError(f"unknown {', '.join(map(repr, unknown))}; `what` is any of {', '.join(WHAT)}")
        if not self.groups:
            raise ValueError(f"`what` is empty; choose any of {', '.join(WHAT)}")
        for name, least in (("rows", 1), ("delta", 2), ("local", 1), ("sinks", 0)):
            value = freeze(getattr(self, name))
            object.__setattr__(self, name, value)
            if not (name == "rows" and value is None) and (
                isinstance(value, bool) or not isinstance(value, int) or value < least
            ):
                raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of quantities in `what`; all for None."""
        return WHAT if self.what is None else (self.what,) if isinstance(self.what, str) else tuple(self.what)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        powers = (self.delta**k for k in itertools.count())
        return tuple(itertools.pairwise([0, *itertools.takewhile(lambda x: x < 2**GROUPS, powers)]))

    def choose(self, q_len: int) -> Tensor | None:
        """The rows to read of a call, one from each of `rows` equal stretches; None for all."""
        if self.rows is None or q_len <= self.rows:
            return None
        within = torch.rand(self.rows, dtype=torch.float64, generator=torch.Generator().manual_seed(self.seed), device="cpu")
        return ((torch.arange(self.rows, device="cpu") + within) * (q_len / self.rows)).long().clamp(max=q_len - 1)


class Sums:
    """Running sums of one layer: float64, over rows, by head and length."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.total: dict[str, Tensor] = {}
        self.drawn: list[tuple[Tensor, Tensor]] = []
        self.generator = torch.Generator().manual_seed(options.seed)

    @torch.no_grad()
    def add(self, call: Call, output: Tensor) -> None:
        """Count one call.

        Args:
            output: (batch, heads, q_len, head_dim), the call's; read where the options ask for outputs.
        """
        device = call.query.device
        rows = call.rows.on(wide_device(device))
        position = rows.bounds.query - rows.bounds.start + 1
        real = rows.real_rows(call.key.shape[2])
        group = (torch.frexp(position.double()).exponent - 1).clamp(0, GROUPS - 1)
        groups = (group[..., None] == torch.arange(GROUPS, device=group.device)) & real[..., None]
        if "outputs" in self.options.groups:
            for first in range(0, output.shape[2], OUTPUT_ROWS):
                some = slice(first, first + OUTPUT_ROWS)
                self._add_outputs(output[:, :, some], groups[:, some].double(), position[:, some])
        if set(self.options.groups) == {"outputs"}:
            return
        chosen = self.options.choose(call.query.shape[2])
        read = call.query.shape[2] if chosen is None else len(chosen)
        chosen = None if chosen is None else chosen.to(device)
        stride = math.ceil(read / DRAWN_ROWS)
        done = 0
        for block in blocks(call, chosen):
            seen = block.visible.any(-1).any(1).to(groups.device)
            weight = (groups[:, block.which.to(groups.device)] * seen[..., None]).double()
            self._add("rows", weight.sum((0, 1)) * (call.query.shape[0] / weight.shape[0]))
            self._add_rows(block, weight)
            if "qq" in self.options.groups:
                some = slice((-done) % stride, None, stride)
                self._draw(block, some, stride * weight[:, some].sum(-1).cpu())
            done += len(block.which)

    def _add(self, name: str, x: Tensor) -> None:
        x = x.cpu()
        self.total[name] = self.total[name] + x if name in self.total else x

    def _add_by_row(self, name: str, x: Tensor, weight: Tensor) -> None:
        """x (batch, heads, n, ...) summed over rows into (heads, groups, ...)."""
        weight = weight.expand(x.shape[0], -1, -1)
        self._add(name, torch.einsum("bhn...,bnk->hk...", widened(x), weight))

    def _add_rows(self, block: Block, weight: Tensor) -> None:
        what = self.options.groups
        if "entropy" in what:
            self._add_by_row("entropy", entropy(block.log_p), weight)
        if "temperature" in what:
            self._add_by_row("temperature", block.temperature, weight)
            self._add_by_row("temperature_share", (block.temperature - 1).abs() > ROUNDING, weight)
        if "mass" in what:
            sinks = block.rows.sinks(block.logits.shape[-1], self.options.sinks)[:, None]
            self._add_by_row("sink_mass", (block.log_p.exp() * sinks).sum(-1), weight)
            self._add_by_row("local_mass", self._at(block, block.log_p, 0, self.options.local).exp().sum(-1), weight)
        if "logits" in what:
            counted = self._counted(block)
            kept = widened(torch.where(counted, block.logits, 0.0))
            pairs = counted.sum(-1).expand(kept.shape[:-1])
            for name, x in (("logit", kept.sum(-1)), ("square", kept.square().sum(-1)), ("pairs", pairs)):
                self._add_by_row(name, x, weight)
            low = block.logits.masked_fill(~block.visible, -MASK_VALUE).amin(-1)
            spread = torch.where(block.visible.any(-1), block.logits.amax(-1) - low, 0.0)
            self._add_by_row("spread", spread, weight)
        if "ranges" in what:
            self._add_ranges(block, weight)

    def _add_ranges(self, block: Block, weight: Tensor) -> None:
        sinks = block.rows.sinks(block.logits.shape[-1], self.options.sinks)[:, None]  # attention there is for no distance
        without = block.log_p.masked_fill(sinks, MASK_VALUE)
        mass, inside, reached = [], [], []
        for first, last in self.options.ranges:
            if first >= block.logits.shape[-1]:
                break
            log_p = self._at(block, without, first, min(last, block.logits.shape[-1]))
            log_mass = torch.logsumexp(log_p, -1)
            seen = log_p.amax(-1) > MASK_VALUE / 2
            mass.append(torch.where(seen, log_mass.exp(), 0.0))
            inside.append(torch.where(seen, entropy(log_p - log_mass[..., None]), 0.0))
            reached.append(seen)
        missing = len(self.options.ranges) - len(mass)
        for name, parts in (("range_mass", mass), ("range_entropy", inside), ("range_rows", reached)):
            x = torch.nn.functional.pad(widened(torch.stack(parts, -1)), (0, missing))
            self._add_by_row(name, x, weight)

    @staticmethod
    def _at(block: Block, log_p: Tensor, first: int, last: int) -> Tensor:
        """`log_p` of the keys first .. last - 1 tokens back, (batch, heads, n, last - first), MASK_VALUE where none is."""
        back = torch.arange(first, last, device=block.logits.device)
        column = (block.rows.bounds.query - block.rows.bounds.key_start)[..., None] - back
        there = (column >= 0) & (column < block.logits.shape[-1])
        at = column.clamp(0, block.logits.shape[-1] - 1)[:, None].expand(*block.logits.shape[:3], -1)
        return log_p.gather(-1, at).masked_fill_(~there[:, None], MASK_VALUE)

    def _counted(self, block: Block) -> Tensor:
        """The pairs that logit statistics count: visible, and the key is no sink."""
        return block.visible & ~block.rows.sinks(block.logits.shape[-1], self.options.sinks)[:, None]

    def _draw(self, block: Block, some: slice, rows: Tensor) -> None:
        """Draw logits of some rows, each with the number of pairs that it stands for; `rows` is how many a row stands for."""
        batch, heads = block.logits.shape[:2]
        counted = self._counted(block).any(1)[:, some].expand(batch, -1, -1).cpu()
        weight = counted.sum(-1) * rows
        counted = counted.double()
        counted[..., 0] += counted.sum(-1) == 0  # such a row weighs nothing, but something must be drawn
        flat = counted.flatten(0, 1)
        keys = torch.multinomial(flat, DRAWS, replacement=True, generator=self.generator).to(block.logits.device)
        at = keys.view(batch, 1, -1, DRAWS).expand(-1, heads, -1, -1)
        drawn = block.logits[:, :, some].gather(-1, at)
        self.drawn.append((drawn.transpose(0, 1).flatten(1).cpu(), weight[..., None].expand(-1, -1, DRAWS).flatten()))

    def _add_outputs(self, output: Tensor, groups: Tensor, position: Tensor) -> None:
        output = widened(output)
        groups = groups.expand(output.shape[0], -1, -1)
        self._add_by_row("output", output, groups)
        self._add_by_row("output_square", output.square(), groups)
        self._add("output_rows", groups.sum((0, 1)))
        self._add("log_length", (groups * position.expand(groups.shape[:2]).clamp(min=1).log()[..., None]).sum((0, 1)))

    def values(self) -> dict[str, Tensor]:
        """Every quantity of this layer but for its first dimension, with all groups and ranges."""
        total, statistics = self.total, {}
        for name, quantity in QUANTITIES.items():
            if quantity.what not in self.options.groups:
                continue
            if name == "range_entropy":
                statistics[name] = total[name] / total["range_rows"]
            elif name in total:
                statistics[name] = total[name] / total["rows"].view(-1, *[1] * (total[name].ndim - 2))
        if "logits" in self.options.groups:
            pairs = total["pairs"].sum(-1)
            statistics["logit_mean"] = total["logit"].sum(-1) / pairs
            statistics["logit_variance"] = total["square"].sum(-1) / pairs - statistics["logit_mean"] ** 2
        if "qq" in self.options.groups:
            statistics["qq"] = _quantiles(torch.cat([x for x, _ in self.drawn], 1), torch.cat([w for _, w in self.drawn]))
        if "outputs" in self.options.groups:
            count = total["output_rows"]
            mean = total["output"] / count[:, None]
            variance = (total["output_square"] / count[:, None] - mean**2).clamp(min=0)
            deviation = torch.where(count > 1, variance.mean(-1).sqrt(), torch.nan)
            statistics["output_deviation"] = deviation
            statistics["output_slope"] = _slope(total["log_length"] / count, deviation, count)
        return statistics


def collect(sums: dict[int, Sums]) -> Diagnostics:
    """The result of all layers; ValueError if nothing was seen."""
    if not any(s.total for s in sums.values()):
        raise ValueError("nothing was captured: run the model inside `with capture(...)`")
    layers = tuple(sorted(i for i, s in sums.items() if s.total))
    first = sums[layers[0]]
    none = torch.zeros(GROUPS, dtype=torch.float64, device="cpu")
    rows = first.total.get("rows", none)
    used = (rows + first.total.get("output_rows", none)).nonzero()
    groups = slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(0, 1)
    options = first.options
    unread = torch.zeros(1, GROUPS, len(options.ranges), device="cpu")
    range_rows = torch.stack([sums[i].total.get("range_rows", unread)[0] for i in layers])
    reached = range_rows.sum((0, 1)).nonzero()
    kept = slice(0, int(reached[-1]) + 1 if len(reached) else 0)
    values: dict[str, Tensor] = {}
    by_layer = [sums[i].values() for i in layers]
    for name in by_layer[0]:
        value = torch.stack([v[name] for v in by_layer])
        dimensions = QUANTITIES[name].dimensions
        value = value[:, :, groups] if "length" in dimensions else value
        values[name] = value[..., kept] if "range" in dimensions else value
    return Diagnostics(
        layers=layers,
        lengths=tuple(2**k for k in range(GROUPS))[groups],
        ranges=options.ranges[kept],
        z=Z,
        rows=rows[groups].long(),
        range_rows=range_rows[:, groups, kept].long(),
        values=values,
    )


def _quantiles(x: Tensor, weight: Tensor) -> Tensor:
    """Quantiles of weighted samples x (heads, n), standardised, where the standard Gaussian has Z: (heads, len(Z))."""
    x, weight = x[:, weight > 0].double(), weight[weight > 0].double()
    if not x.shape[1]:
        return torch.full((x.shape[0], len(Z)), torch.nan, dtype=torch.float64, device="cpu")
    share = weight / weight.sum()
    mean = (share * x).sum(-1, keepdim=True)
    x = (x - mean) / (share * (x - mean) ** 2).sum(-1, keepdim=True).sqrt()
    x, order = x.sort(-1)
    below = share[order].cumsum(-1) - share[order] / 2
    target = torch.special.ndtr(torch.tensor(Z, dtype=torch.float64, device="cpu")).expand(x.shape[0], -1)
    right = torch.searchsorted(below.contiguous(), target.contiguous()).clamp(max=x.shape[1] - 1)
    left = (right - 1).clamp(min=0)
    a, b = below.gather(-1, left), below.gather(-1, right)
    way = ((target - a) / (b - a).clamp(min=1e-300)).clamp(0, 1)
    return x.gather(-1, left) * (1 - way) + x.gather(-1, right) * way


def _slope(log_length: Tensor, deviation: Tensor, count: Tensor) -> Tensor:
    """The least-squares slope of ln deviation (heads, groups) against log_length (groups,); NaN below three groups."""
    use = (count >= SLOPE_ROWS) & (torch.arange(GROUPS, device="cpu") >= int(math.log2(SLOPE_FROM))) & (deviation > 0).all(0)
    if int(use.sum()) < 3:
        return torch.full(deviation.shape[:1], torch.nan, dtype=torch.float64, device="cpu")
    x, y = log_length[use], deviation[:, use].log()
    x = x - x.mean()
    return (y * x).sum(-1) / x.square().sum()
