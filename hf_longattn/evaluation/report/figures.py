"""Curves and heat maps, small enough to be read on a phone, in colours that colour-blind readers can tell apart."""

from __future__ import annotations

import functools
import itertools
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .page import Figure
from .page import png as png

#: The axis of most pictures.
NATS = "loss (nats per token)"
#: Okabe and Ito's palette, black first; markers differ too, so that no line is told by colour alone.
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
MARKERS = "osD^vPX*"
LINES = ("-", "--", "-.", ":")
#: Letters that fit into the width of a picture's legend, and inches that each of its lines takes.
WIDE, HIGH = 66, 0.165
#: Methods that keep their colour in every picture, by the beginning of a setting's name.
OWN_COLOUR = ("unmodified", "rerope", "yarn", "leaky_rerope", "self_extend", "scale", "infoscale", "logn")


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ImportError('figures need matplotlib: pip install "hf_longattn[cli]"') from None
    return matplotlib


def pyplot() -> Any:
    """matplotlib's pyplot, drawing into files alone."""
    _matplotlib().use("Agg")
    from matplotlib import pyplot

    return pyplot


def canvas(height: float) -> tuple[Any, Any]:
    """An empty matplotlib figure, so many inches high, and its axes; a notebook shows the figure, and no window opens."""
    figure = _notebook_figure()(figsize=(4.8, height), layout="constrained")
    return figure, figure.subplots()


@functools.cache
def _notebook_figure() -> type:
    """matplotlib's Figure, as a notebook shows it whether or not pyplot was imported there."""
    _matplotlib()
    from matplotlib.figure import Figure as Drawn

    return type("Figure", (Drawn,), {"_repr_png_": png, "__doc__": Drawn.__doc__})


def styles(names: Sequence[str]) -> list[dict[str, Any]]:
    """Colour, marker and line of each name: the colour of its method where that has one, in another line for the next."""
    own = [next((i for i, x in enumerate(OWN_COLOUR) if name.lower().lstrip("@").startswith(x)), None) for name in names]
    free = (i for i in itertools.count() if i not in own)
    drawn, out = Counter[int](), []
    for wish in own:
        i = next(free) if wish is None else wish
        turn = drawn[i] + i // len(COLOURS)
        drawn[i] += 1
        marker = MARKERS[(i + turn) % len(MARKERS)]
        out.append({"color": COLOURS[i % len(COLOURS)], "linestyle": LINES[turn % len(LINES)], "marker": marker})
    return out


def curves(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    xlabel: str,
    ylabel: str,
    title: str = "",
    mark: Mapping[str, float] | None = None,
    log_x: bool = False,
    limits: tuple[float, float] | None = None,
    errors: Mapping[str, Sequence[float]] | None = None,
) -> Any:
    """A matplotlib figure of named lines through (x, y) points.

    Args:
        mark: vertical dotted lines at these x, by their label (the trained length, say).
        limits: of the y axis; from the data if None.
        errors: half-widths of intervals around each line's points; NaN for none.
    """
    figure, axes = canvas(4.2)
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for i, ((name, points), own) in enumerate(zip(lines.items(), styles(list(lines)), strict=True)):
        if not points:
            continue  # a setting that is not measured yet keeps its colour
        xs, ys = [p[0] for p in points], [p[1] for p in points]
        style = own | {
            "markersize": 4,
            "linewidth": 1.5 if i else 3.5,  # what all are compared with stays visible behind a line that covers it
            "markevery": max(1, len(xs) // 8),
        }
        axes.plot(xs, ys, label=as_written(name), **style)
        if errors and name in errors:
            low, high = ([y + s * e for y, e in zip(ys, errors[name], strict=True)] for s in (-1, 1))
            axes.fill_between(xs, low, high, color=style["color"], alpha=0.15, linewidth=0)
    _mark(axes, mark or {})
    axes.set(xlabel=xlabel, ylabel=ylabel)
    points = [point for line in lines.values() for point in line]
    if log_x:
        in_powers_of_two(axes, sorted({x for x, _ in points}))
    elif max((x for x, _ in points), default=0) > 4096:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 4, 8]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        axes.tick_params(axis="x", labelsize=8)
    if limits:
        axes.set_ylim(*limits)
    if title:
        axes.set_title(as_written(title), fontsize=10)
    axes.grid(alpha=0.3)
    if len(lines) > 1:
        names, half = [as_written(name).split("\n") for name in lines], (len(lines) + 1) // 2
        left, right = (max(len(line) for name in part for line in name) for part in (names[:half], names[half:]))
        if left + right > WIDE:  # in one column, which takes no height from the axes
            figure.set_figheight(figure.get_figheight() + HIGH * (sum(map(len, names)) - half))
        figure.legend(loc="outside lower center", ncols=1 if left + right > WIDE else 2, fontsize=8)
    return figure


def as_written(name: str) -> str:
    """A name for matplotlib, in lines that fit a picture; what begins with an underscore is not shown there, and what stands
    between dollars is a formula."""
    lines = [" " * line.startswith("_") + line.replace("$", r"\$") for line in textwrap.wrap(name, WIDE - 2)]
    return "\n".join(lines)


def _mark(axes: Any, mark: Mapping[str, float]) -> None:
    """Vertical dotted lines."""
    upright = {"fontsize": 8, "ha": "right", "va": "top", "rotation": 90, "color": "#444444"}
    for label, x in mark.items():
        axes.axvline(x, color="#666666", linestyle=":", linewidth=1)
        axes.annotate(label, (x, 0.99), xycoords=("data", "axes fraction"), **upright)


def in_powers_of_two(axes: Any, ticks: Sequence[float]) -> None:
    """Tokens along x, on a logarithmic scale, with ticks as people say them."""
    from matplotlib.ticker import NullFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [tokens_shown(x) for x in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())


def heat_map(
    values: Sequence[Sequence[float | None]],
    rows: Sequence[str],
    columns: Sequence[str],
    xlabel: str,
    ylabel: str,
    title: str,
    limits: tuple[float, float],
    unit: str,
) -> Any:
    """A matplotlib figure of a grid whose cells carry their numbers.

    Args:
        limits: the ends of the colour scale; unit: its label.
    """
    grid = [[float("nan") if v is None else v for v in row] for row in values]
    figure, axes = canvas(1.6 + 0.36 * len(rows))
    image = axes.imshow(grid, cmap="cividis", vmin=limits[0], vmax=limits[1], aspect="auto")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_title(as_written(title), fontsize=10)
    middle = sum(limits) / 2
    if len(columns) <= 12:
        for y, row in enumerate(grid):
            for x, value in enumerate(row):
                if value == value:
                    ink = "black" if value > middle else "white"
                    axes.text(x, y, f"{value:.2f}", ha="center", va="center", color=ink, fontsize=8)
    figure.colorbar(image, label=unit, fraction=0.05)
    return figure


def tokens_shown(n: float) -> str:
    """A length as people say it: 16k for 16,384, 300 for 300."""
    return f"{int(n) // 1024}k" if n >= 1024 and n % 1024 == 0 else f"{int(n)}"


def trained_mark(length: int | None) -> dict[str, float]:
    """The `mark` of curves at the trained length, if that is known."""
    return {f"trained: {tokens_shown(length)}": length} if length else {}


def pair(draw: Callable[[tuple[float, float] | None], Any], values: Sequence[float], name: str, alt: str) -> list[Figure]:
    """A figure with all values, and one without those far above the rest where they would flatten it."""
    if not values:
        return []
    axis = "The loss axis does not start at zero."
    figures = [Figure(name, draw(None), alt, f"{alt}. {axis}")]
    ordered = sorted(values)
    low, middle, high = ordered[0], ordered[len(ordered) // 2], ordered[-1]
    if high - low > 2.5 * max(middle - low, 0.05):
        top = middle + 1.5 * max(middle - low, 0.05)
        caption = f"The same, cut at {top:.2f} nats to tell close lines apart: what rises above is off the picture. {axis}"
        figures.append(Figure(f"{name}-closer", draw((low - 0.05, top)), f"{alt}, cut at {top:.2f} nats", caption))
    return figures
