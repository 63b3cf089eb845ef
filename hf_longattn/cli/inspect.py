"""`hf-longattn inspect`: look into a model's attention, with and without methods."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .. import __version__
from .common import Device, Dtype, TrainLength, command_line, console, precision, read_tokens, refusing, table, tokens, told

if TYPE_CHECKING:
    import torch

    from ..evaluation.measures.diagnostics import Diagnostics
    from ..evaluation.measures.sums import Options
    from ..evaluation.settings import Setting

RESULT = "inspect.json"


def inspect(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A model on the Hub or a directory.")],
    text: Annotated[Path, typer.Option(help="A text of at least --length tokens.")],
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Method to compare with the unmodified model, e.g. infoscale or scale_invariant:tau=100; repeatable."
        ),
    ] = None,
    rope: Annotated[list[str] | None, typer.Option(help="Position encoding for every method: plain, yarn:2, ...")] = None,
    train_length: TrainLength = None,
    length: Annotated[str, typer.Option(help="Tokens to read; 16k is 16,384.")] = "4k",
    layers: Annotated[str | None, typer.Option(help="Layers, e.g. 0,5,10-12; default all with full attention.")] = None,
    what: Annotated[
        str | None,
        typer.Option(help="Any of these, with commas: ranges, entropy, mass, logits, temperature, qq, outputs; default all."),
    ] = None,
    rows: Annotated[
        str, typer.Option(help="Query rows to read, spread evenly over the text, or all. Keys are all read.")
    ] = "512",
    delta: Annotated[int, typer.Option(help="Ranges of distances grow by this factor.")] = 4,
    out: Annotated[
        Path | None, typer.Option(help="Folder for page, JSON and pictures; a report's folder gets sections.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Look into MODEL's attention on your text: entropy, attention by distance, logits, outputs, per layer and head.

    One forward pass per setting over the first --length tokens; memory grows linearly with it. With --method the
    unmodified model is measured too, for comparison. --out gets inspect.json (every number by layer, head and length),
    figures/*.png and index.html, a self-contained page.
    """
    from transformers.utils import logging

    from ..checks import check_model, check_output, device_of
    from ..evaluation.loading import check_lengths, check_setting, load_tokenizer
    from ..evaluation.measures.sums import Options
    from ..evaluation.settings import parse_settings

    if (n := tokens(length)) < 2:
        raise typer.BadParameter("one token attends to itself alone: give 2 or more", param_hint="--length")
    logging.disable_progress_bar()  # ours is enough
    with refusing("--method"):
        settings = parse_settings(method or [], rope or [], train_length=told(train_length))
    if rows != "all" and not rows.isdigit():
        raise typer.BadParameter(f"{rows!r} is neither a number of rows nor all", param_hint="--rows")
    with refusing("--what, --rows or --delta"):
        options = Options(what.split(",") if what else None, None if rows == "all" else int(rows), delta)
    if out is not None:
        with refusing("--out"):
            check_output(out)
        _check_out(out)
    with refusing("--device"):
        device = device_of(device)
    with refusing("MODEL"):
        check_model(model)
    with refusing("--text"):
        ids = read_tokens(text, load_tokenizer(model), n)
    with refusing("--method"):
        check_lengths(model, [n])
        for setting in settings:
            check_setting(setting, model, head=False)
    with refusing("--layers"):
        numbers = None if layers is None else _numbers(layers)
        observed = _observed(model, numbers)
    results, read_in = _results(settings, model, precision(model, dtype, device), device, ids, numbers, options, observed)
    read = "all query rows" if options.choose(n) is None else f"{rows} query rows spread evenly, all keys"
    protocol = f"The first {n:,} tokens of {text.name} in {read_in}, one forward pass per setting; {read}."
    about = {"model": model, "text": text.name, "length": n, "rows": rows, "command": command_line(context)}
    _show(results, protocol, about, out)


def _results(
    settings: Sequence[Setting],
    model: str,
    dtype: str,
    device: str,
    ids: torch.Tensor,
    layers: list[int] | None,
    options: Options,
    observed: int,
) -> tuple[dict[str, Diagnostics], str]:
    """By setting, and the precision that they were read in."""
    from ..evaluation.loading import load_setting

    results, read_in = {}, dtype
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("layers"), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        for setting in settings:
            task = progress.add_task(f"{escape(setting.name)}: {ids.shape[1]} tokens", total=observed)
            loaded = load_setting(setting, model, dtype, device)
            read_in = str(loaded.dtype).removeprefix("torch.")
            results[setting.name] = _look(loaded, ids, layers, options, partial(progress.advance, task))
            del loaded
    return results, read_in


def _show(results: dict[str, Diagnostics], protocol: str, about: dict[str, Any], out: Path | None) -> None:
    """The means on the console; with a folder, every number and a page."""
    import torch
    import transformers

    from ..evaluation.report import add_section, write_report
    from ..evaluation.report.attention import headline, sections
    from ..evaluation.report.folder import HEAD

    parts = sections(results, protocol, about["command"])
    means = parts[0][1].tables[0]
    cells = [[str(name), *("–" if v is None else f"{v:.3f}" for v in values)] for name, *values in means.rows]
    console.print(table(means.title, means.columns, cells))
    if out is None:
        return
    installed = f"hf_longattn {__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    record = about | {"versions": installed, "settings": {name: heads.to_dict() for name, heads in results.items()}}
    out.mkdir(parents=True, exist_ok=True)
    (out / RESULT).write_text(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    if (out / HEAD).exists():
        for order, part in parts:
            page = add_section(out, part, order)
    else:
        facts = {"model": about["model"], "command": about["command"], "versions": installed}
        page = write_report(out, f"Attention of {Path(about['model']).name}", headline(results), parts, facts)
    console.print(f"Written: {page}", highlight=False)


class _Enough(Exception):
    """The last layer asked for has been seen; those above it need not run."""


def _look(
    model: Any, ids: torch.Tensor, layers: list[int] | None, options: Options, advance: Callable[[], None]
) -> Diagnostics:
    """One forward pass up to the last layer asked for."""
    import torch

    from ..evaluation.measures.capture import capture

    done: set[int] = set()

    def on_layer(layer: int) -> None:
        advance()
        done.add(layer)
        if len(done) == seen.layers:
            raise _Enough

    looking = capture(model, layers, options.what, rows=options.rows, delta=options.delta, on_layer=on_layer)
    with torch.inference_mode(), suppress(_Enough), looking as seen:
        model.base_model(input_ids=ids.to(model.device), use_cache=False)
    return seen.result()


def _check_out(out: Path) -> None:
    from ..evaluation.report.folder import HEAD

    if (out / RESULT).exists():
        raise typer.BadParameter(f"{out} holds an {RESULT} already; nothing is overwritten", param_hint="--out")
    if out.exists() and any(out.iterdir()) and not (out / HEAD).exists():
        raise typer.BadParameter(f"{out} is neither empty nor a report; nothing is overwritten", param_hint="--out")


def _numbers(text: str) -> list[int]:
    layers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"{text!r} is not a list of layers; write 0,5,10-12")
        if dash and int(last) < int(first):
            raise ValueError(f"{part.strip()!r} is not a range of layers; write {last}-{first}")
        layers += range(int(first), int(last if dash else first) + 1)
    return layers


def _observed(model: str, layers: list[int] | None) -> int:
    """How many layers will be looked at; ValueError if one that is named cannot be. Reads no weights."""
    from transformers import AutoConfig

    from ..evaluation.loading import build
    from ..evaluation.measures.capture import capture

    with capture(build(AutoConfig.from_pretrained(model)), layers) as seen:
        return seen.layers
