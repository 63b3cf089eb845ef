"""Parts that the commands share: the console, lengths, loading a model."""

from __future__ import annotations

import inspect
import shlex
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from ..config import length_of
from ..evaluation.options import HELP, EvalOptions

if TYPE_CHECKING:
    from ..evaluation import Experiment, Results
    from ..evaluation.experiment import Cell
    from ..evaluation.rows import Row

console = Console()


def say(text: str) -> None:
    """A line as it is, which the terminal alone breaks."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


Model = Annotated[str, typer.Argument(help="A model on the Hub or a directory.")]
Texts = Annotated[list[str], typer.Option(help="Texts, plain UTF-8; several with commas or by repeating the option.")]
TrainLength = Annotated[
    str | None, typer.Option("--train-length", help="The length that MODEL was trained at; by default read from its config.")
]
#: What chooses settings: the parameters of `parse_settings`.
SETTINGS: dict[str, Any] = {
    "method": Annotated[
        list[str] | None,
        typer.Option(
            help="METHOD[:key=value...][@ROPE[:factor]], several with commas: infoscale,scale_invariant:tau=100,@yarn:2. "
            "The unmodified model is always measured."
        ),
    ],
    "rope": Annotated[
        list[str] | None,
        typer.Option(help="Position encodings to combine with every method that has no @: plain,yarn:2,ntk:2."),
    ],
    "adapter": Annotated[
        list[str] | None,
        typer.Option(help="DIRECTORY, or NAME=DIRECTORY, of a LoRA adapter, with the attention that it records."),
    ],
    "settings": Annotated[Path | None, typer.Option(help="More settings, in YAML: adapters, other checkpoints, lists.")],
    "train_length": TrainLength,
}
#: Of EvalOptions' fields, by name.
DEFAULTS = {f.name: f.default for f in fields(EvalOptions)}
Dtype = Annotated[str, typer.Option(help=HELP["dtype"])]
Device = Annotated[str, typer.Option(help=HELP["device"])]


def measuring(*options: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, in place of its `**given`, the options SETTINGS and these fields of EvalOptions."""

    def of(name: str) -> inspect.Parameter:
        default = DEFAULTS[name]
        kind: Any = str | None if default is None else type(default)
        names = [f"--{name.replace('_', '-')}"] * (kind is bool)  # and none to say no
        return parameter(name, default, Annotated[kind, typer.Option(*names, help=HELP[name])])

    added = [*(parameter(name, None, kind) for name, kind in SETTINGS.items()), *map(of, options)]
    return lambda command: with_options(command, added)


def parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def with_options(command: Callable[..., None], added: list[inspect.Parameter]) -> Callable[..., None]:
    """A command, or what wraps it, that takes these parameters too, in place of a `**given`."""
    own = inspect.signature(command, eval_str=True)
    before = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    command.__signature__ = own.replace(parameters=[*before, *added])  # type: ignore[attr-defined]
    return command


def check(model: str | None, dtype: str, adapter: bool = False) -> None:
    """Refuse an unknown precision, and a MODEL that is no model, nor an adapter where that will do as well."""
    from ..checks import check_dtype, check_model

    with refusing("--dtype"):
        check_dtype(dtype, "auto")
    with refusing("MODEL"):
        if model is not None:
            check_model(model, adapter)


def device_here(name: str) -> str:
    """The device that a name means here. It imports torch, and so comes after the checks that need none."""
    from ..checks import device_of

    with refusing("--device"):
        return device_of(name)


def measure(
    context: typer.Context,
    model: str,
    text: list[str],
    out: Path | None,
    given: dict[str, Any],
    title: str | None = None,
    page_only: bool = False,
    dry_run: bool = False,
) -> None:
    """Run a measuring command: check, measure what is missing, write the page, and show the tables that say most.

    Args:
        given: the values of SETTINGS, and of fields of EvalOptions.
    """
    from ..checks import check_output
    from ..evaluation.settings import parse_settings

    with refusing("--out"):
        if out is not None:
            check_output(out)
    texts = read_texts(text)
    named = {name: given.pop(name) for name in SETTINGS}
    named["train_length"] = trained_at(named["train_length"])
    check(model, given["dtype"])
    with refusing():
        options = EvalOptions(model, texts, parse_settings(**named), **given)
    device = device_here(options.device)

    from ..evaluation.processes import own_device
    from ..evaluation.runner import Runner

    options.device = own_device(device)
    with refusing():
        runner = Runner(options)
    say_precision(given["dtype"], options.dtype)
    with refusing("--out"):
        experiment = runner.open(out, {"command": command_line(context)})
    if dry_run:
        show_cells(experiment)
        return
    interrupted = not page_only and run(experiment, out, runner.format_row)
    results = runner.results(experiment, everything=page_only)
    if interrupted and not results.rows:
        stop(experiment, out)  # without a page of nothing
    if page_only and not results.rows:
        raise typer.BadParameter(f"no rows are in {out} yet: measure some first, without it", param_hint="--page-only")
    if out is not None:
        results.write(out, title or runner.title)
    show(results)
    if left_out := results.left_out():
        say(left_out)
    if out is not None:
        say(f"The report: {out / 'index.html'}")
    if interrupted:
        stop(experiment, out)


def help_of(command: Callable[..., None]) -> str:
    """A command's docstring, its paragraphs in one line each: the terminal breaks them where it ends."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in (inspect.getdoc(command) or "").split("\n\n"))


@contextmanager
def refusing(option: str | None = None) -> Iterator[None]:
    """Turn errors of a check into one message that names the option, with exit status 2."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


class Commands(TyperGroup):
    """All commands. An error is one line in one form, which the terminal alone breaks, so that it copies."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _errors_in_one_line():
            return list(super().parse_args(ctx, args))

    def invoke(self, ctx: Any) -> Any:
        with _errors_in_one_line(), warnings_in_one_line():
            return super().invoke(ctx)


@contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Print a warning that points at no line of a user's, but at what calls commands, as `Warning: ...`."""
    before = warnings.formatwarning

    def written(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
        if Path(filename).parent == Path(typer.__file__).parent:
            return f"Warning: {message}\n"
        return before(message, category, filename, lineno, line)

    warnings.formatwarning = written
    try:
        yield
    finally:
        warnings.formatwarning = before


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """Print a mistake in what was typed, a model that is unfit or a full disk as `Error: ...`, and exit."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        from ..files import disk_full

        if said := _message_of(error):
            typer.echo(f"Error: {said}", err=True)
            raise typer.Exit(2) from None
        if not disk_full(error):
            raise
        say(f"The disk is full: {error}. What was finished before is kept: make room, and the same command continues.")
        raise typer.Exit(1) from None


def _message_of(error: Exception) -> str | None:
    """Return what an error in what was typed says, and the way to the help where the words themselves are wrong."""
    from ..checks import Refused

    if isinstance(error, Refused):
        return str(error)
    if type(error) is typer.BadParameter:
        return error.format_message() if error.param_hint or error.param else error.message
    context = getattr(error, "ctx", None)  # of a click.UsageError, which typer has under a private name
    if context is None or type(error).__name__ == "NoArgsIsHelpError":
        return None
    return f"{error.format_message()}\nFor help: {context.command_path} --help"  # type: ignore[attr-defined]


def run(experiment: Experiment, out: Path | None, tell: Callable[[Row, bool], str], **how: Any) -> bool:
    """Measure, and tell whether it was interrupted. Of several processes only the first one returns."""
    from ..evaluation.processes import together

    with together() as rank:
        console.quiet = rank > 0
        if kept := sum(cell.name in experiment.rows for cell in experiment.cells):
            say(f"{kept} of {len(experiment.cells)} rows are in {out} already.")
        try:
            experiment.run(tell, **how)
            interrupted = False
        except KeyboardInterrupt:
            interrupted = True
    if rank > 0:
        raise typer.Exit(130 if interrupted else 0)
    return interrupted


def show_cells(experiment: Experiment) -> None:
    """The rows that would be measured, by setting and task; no weights are read, and nothing is written."""
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in experiment.cells:
        found.setdefault((cell.key["setting"], cell.key["task"]), []).append(cell)
    rows = []
    for (setting, task), cells in found.items():
        lengths = ", ".join(f"{n:,}" for n in sorted({cell.key["length"] for cell in cells if cell.key["length"]}))
        there = sum(cell.name in experiment.rows for cell in cells)
        rows.append([setting, task, lengths, str(len(cells)), str(there)])
    console.print(table("Rows to measure", ("setting", "task", "tokens", "rows", "there already"), rows))
    there = sum(int(row[-1]) for row in rows)
    say(f"{len(experiment.cells) - there} of {len(experiment.cells)} rows would be measured. Nothing was measured or written.")


def stop(experiment: Experiment, out: Path | None) -> NoReturn:
    """End after an interruption, and say what is kept."""
    kept = "nothing is kept without --out"
    if out is not None:
        kept = f"{len(experiment.rows)} rows are kept, and the same command continues"
    if not experiment.rows:
        kept = "nothing was measured yet"
    say(f"Interrupted; {kept}.")
    raise typer.Exit(130)


def show(results: Results) -> None:
    """The tables that say most, and what they come to."""
    from ..evaluation.verdict import headline, summary

    for t in results.tables():
        console.print(table(t.title, t.columns, t.shown()))
        if t.note:
            say(t.note)
    first, rest = headline(results), summary(results)
    for text in filter(None, [first] + [rest] * (rest not in first)):
        say(text)


def tokens(text: str) -> int:
    """A number of tokens; "32k" is 32 * 1024."""
    with refusing():
        return length_of(text)


def trained_at(length: str | None) -> int | None:
    """Read --train-length."""
    with refusing("--train-length"):
        return None if length is None else length_of(length)


def say_precision(asked: str, chosen: str) -> None:
    """Say where a model is read in another precision than was asked for."""
    if chosen != asked:
        say(f"Read in {chosen}: this device is slow in the checkpoint's own precision. --dtype overrides this.")


def read_texts(given: list[str]) -> dict[str, str]:
    """By file name, what --text names: files with commas, or by repeating the option."""
    from ..files import read_plain_text

    with refusing("--text"):
        files = [Path(t) for part in given for t in part.split(",") if t]
        texts = {file.name: read_plain_text(file) for file in files}
        if len(texts) < len(files):
            raise ValueError(f"two texts share a file name: {', '.join(map(str, files))}")
    return texts


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """For the console: names to the left, numbers to the right."""
    listed = [list(row) for row in rows]
    out = Table(title=title)
    for n, column in enumerate(columns):  # a narrow window folds names, and breaks headings between words
        widest = max(map(len, (*(row[n] for row in listed), *column.split(), "")))
        out.add_column(column, justify="right" if n else "left", max_width=widest if n else None, overflow="fold")
    for row in listed:
        out.add_row(*map(escape, row))
    return out


def command_line(context: typer.Context) -> str:
    """The running command with every option that differs from its default; paths as `portable`."""
    from ..evaluation.runner import portable

    words = ["hf-longattn", str(context.info_name)]  # not as it was started, which may be python -m
    for option in context.command.params:
        value = context.params.get(option.name or "")
        if value in (None, [], ()) or value == option.get_default(context):
            continue
        if value is True:
            words.append(option.opts[0])
            continue
        listed = value if isinstance(value, (list, tuple)) else [value]
        for text in (",".join(map(portable, str(v).split(","))) for v in listed):
            words += [text] if option.param_type_name == "argument" else [option.opts[0], text]
    return shlex.join(words)
