"""The measurements of a capture, as tensors by layer, head and length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor


class Quantity(NamedTuple):
    """One thing that is measured: the group (`what`) it comes with, its dimensions, and what it means."""

    what: str
    dimensions: tuple[str, ...]
    meaning: str


_ROW = ("layer", "head", "length")
QUANTITIES: dict[str, Quantity] = {
    "range_mass": Quantity("ranges", (*_ROW, "range"), "attention on the keys at the distances of a range, without sink keys"),
    "range_entropy": Quantity(
        "ranges", (*_ROW, "range"), "entropy of attention within a range, nats, without sink keys, over rows that reach it"
    ),
    "entropy": Quantity("entropy", _ROW, "entropy of attention over all keys, nats"),
    "local_mass": Quantity("mass", _ROW, "attention on the last keys (100 unless told), the token itself included"),
    "sink_mass": Quantity("mass", _ROW, "attention on the first key of the sequence (or the first few)"),
    "logit_mean": Quantity("logits", ("layer", "head"), "mean of the logits that the softmax sees, without sink keys"),
    "logit_variance": Quantity("logits", ("layer", "head"), "their variance"),
    "spread": Quantity("logits", _ROW, "largest minus smallest logit of a row, sink keys included"),
    "temperature": Quantity("temperature", _ROW, "factor on the logits by length or by entropy; 1 without one"),
    "temperature_share": Quantity("temperature", _ROW, "share of rows in which that factor is not 1"),
    "qq": Quantity("qq", ("layer", "head", "z"), "quantiles of the standardised logits (no sinks) where a Gaussian has z"),
    "output_deviation": Quantity(
        "outputs", _ROW, "standard deviation of attention outputs over rows, root mean square over features"
    ),
    "output_slope": Quantity("outputs", ("layer", "head"), "slope of ln output_deviation against ln length"),
}
WHAT = tuple(dict.fromkeys(q.what for q in QUANTITIES.values()))


@dataclass(frozen=True, eq=False)
class Diagnostics:
    """Measured means over query rows, float64 on the CPU; NaN where no row was read.

    Rows are grouped by their length n, the number of tokens of their text up to and with themselves.

    Args:
        layers: the layers' numbers, along the dimension "layer".
        lengths: along "length"; group k holds the rows with lengths[k] <= n < 2 lengths[k].
        ranges: along "range": the distances t with first <= t < last, in tokens even where position_ids jump.
        z: along "z": quantiles of the standard Gaussian.
        rows: int64 (length,), the rows read; outputs are taken from every row, read or not.
        range_rows: int64 (layer, length, range), those of them that see a key in the range, sinks apart.
        values: by name of `QUANTITIES`, with the dimensions said there.
    """

    layers: tuple[int, ...]
    lengths: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    z: tuple[float, ...]
    rows: Tensor
    range_rows: Tensor
    values: dict[str, Tensor]

    def __repr__(self) -> str:
        measured = ", ".join(f"{name} {tuple(value.shape)}" for name, value in self.values.items())
        return f"Diagnostics of layers {self.layers}, {int(self.rows.sum())} rows of lengths from {self.lengths}: {measured}"

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.values:
            known = QUANTITIES.get(name)
            hint = f'captured with what=("{known.what}",)' if known else f"one of {', '.join(QUANTITIES)}"
            raise KeyError(f"{name} was not measured; it is {hint}")
        return self.values[name]

    def overall(self, name: str) -> Tensor:
        """The mean over all rows read: (layer, head), or (layer, head, range)."""
        value = self[name]
        dimensions = QUANTITIES[name].dimensions
        if "length" not in dimensions:
            return value
        if name == "output_deviation":
            raise ValueError("output_deviation has no mean over lengths; look at output_slope")
        rows = self.rows[None, :].expand(len(self.layers), -1)
        weight = self.range_rows if name == "range_entropy" else rows[..., None] if "range" in dimensions else rows
        weight = weight.double()[:, None]
        return torch.where(weight > 0, value * weight, 0.0).sum(2) / weight.sum(2)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, ready for JSON; None where nothing was measured."""
        return {
            "layers": list(self.layers),
            "lengths": list(self.lengths),
            "ranges": [list(r) for r in self.ranges],
            "z": list(self.z),
            "rows": self.rows.tolist(),
            "range_rows": self.range_rows.tolist(),
            "values": {
                name: {"dimensions": list(QUANTITIES[name].dimensions), "values": _plain(value.tolist())}
                for name, value in self.values.items()
            },
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Diagnostics:
        """The inverse of `to_dict`, to the digits that it keeps."""
        return cls(
            layers=tuple(data["layers"]),
            lengths=tuple(data["lengths"]),
            ranges=tuple((first, last) for first, last in data["ranges"]),
            z=tuple(data["z"]),
            rows=torch.tensor(data["rows"], device="cpu"),
            range_rows=torch.tensor(data["range_rows"], device="cpu"),
            values={
                name: torch.from_numpy(numpy.array(entry["values"], dtype=numpy.float64))
                for name, entry in data["values"].items()
            },
        )


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(x) for x in value]
    return None if value != value else float(f"{value:.5g}")
