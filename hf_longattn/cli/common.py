"""What the commands share: the console, lengths, loading a model."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer.core import TyperGroup

from ..config import length_of

if TYPE_CHECKING:
    import torch

    from ..evaluation import Experiment
    from ..evaluation.rows import Row

console = Console()

Dtype = Annotated[
    str, typer.Option(help="Precision to load the model in; auto: its own, or float32 if the CPU is slow in that.")
]
Ropes = Annotated[
    list[str] | None,
    typer.Option(help="Position encodings to combine with every method that has no @: plain,yarn:2,ntk:2."),
]
Adapters = Annotated[
    list[str] | None, typer.Option(help="NAME=DIRECTORY of a LoRA adapter, with the attention that it records.")
]
TrainLength = Annotated[
    str | None, typer.Option("--train-length", help="The length that MODEL was trained at; by default read from its config.")
]
SettingsFile = Annotated[Path | None, typer.Option(help="More settings, in YAML: adapters, other checkpoints, lists.")]
Device = Annotated[str, typer.Option(help="Where to run: cpu, cuda, ...; auto: a GPU if there is one.")]


@contextmanager
def refusing(option: str | None = None) -> Iterator[None]:
    """What a check raises is an error in what was typed: one message with the option that it came by, exit status 2."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


class Commands(TyperGroup):
    """What a command finds out late ends in one message as well: weights that are unfit, a disk that is full."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.Exit:
            raise
        except Exception as error:
            from ..checks import Refused, disk_full

            if isinstance(error, Refused):
                raise typer.BadParameter(str(error)) from None
            if not disk_full(error):
                raise
            console.print(
                f"The disk is full: {error}. What was finished before is kept: make room, and the same command continues.",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
            raise typer.Exit(1) from None


def alone(context: typer.Context, file: Path) -> None:
    """Hold a lock until the command ends; ValueError if another process does. Without it both would measure every row."""
    from filelock import FileLock, Timeout  # torch and huggingface_hub need it too

    @contextmanager
    def held() -> Iterator[None]:
        with FileLock(file, timeout=0):
            try:
                yield
            finally:
                file.unlink(missing_ok=True)
                if not any(file.parent.iterdir()):  # nothing was measured
                    file.parent.rmdir()

    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        context.with_resource(held())
    except Timeout:
        raise ValueError(f"another command is measuring into {file.parent}: wait for it, or choose another folder") from None


def run_experiment(experiment: Experiment, tell: Callable[[Row], str] | None = None) -> bool:
    """Measure with a progress bar; returns whether it was interrupted.

    Args:
        tell: what to print of a row that was measured now.
    """
    import itertools

    from transformers.utils import logging

    logging.disable_progress_bar()  # ours is enough
    names = [cell.name for cell in experiment.cells]
    following = dict(itertools.pairwise(names))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("Loading", total=len(names))

        def done(row: Row, new: bool) -> None:
            name = experiment.name_of(row)
            progress.update(bar, advance=1, description=escape(following.get(name, "Done")))
            if new and tell is not None:
                console.print(f"{escape(name)}: {tell(row)}", highlight=False)

        experiment.done = done
        try:
            experiment.run()
        except KeyboardInterrupt:
            return True
    return False


def tokens(text: str) -> int:
    """A number of tokens; "32k" is 32 * 1024."""
    with refusing():
        return length_of(text)


def told(train_length: str | None) -> int | None:
    """What --train-length says."""
    with refusing("--train-length"):
        return None if train_length is None else length_of(train_length)


def precision(model: str, dtype: str, device: str) -> str:
    """`loading.precision_of`, told where it is not what was asked for."""
    from ..evaluation.loading import precision_of

    with refusing("--dtype"):
        chosen = precision_of(model, dtype, device)
    if chosen != dtype:
        console.print(f"Read in {chosen}: this device is slow in the checkpoint's own precision. --dtype overrides this.")
    return chosen


def read_texts(given: list[str]) -> dict[str, str]:
    """By file name, what --text names: files with commas, or by repeating the option."""
    from ..checks import read_text

    with refusing("--text"):
        files = [Path(t) for part in given for t in part.split(",") if t]
        texts = {file.name: read_text(file) for file in files}
        if len(texts) < len(files):
            raise ValueError(f"two texts share a file name: {', '.join(map(str, files))}")
    return texts


def read_tokens(text: Path, tokenizer: Any, length: int) -> torch.Tensor:
    """The first `length` tokens of a text, (1, length); ValueError if it has fewer."""
    from ..checks import read_text

    ids: torch.Tensor = tokenizer(read_text(text), return_tensors="pt", verbose=False).input_ids
    if ids.shape[1] < length:
        raise ValueError(f"{text} has {ids.shape[1]} tokens, {length} are needed")
    return ids[:, :length]


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


def portable(path: str) -> str:
    """A path as it may stand in a report: an absolute one is shortened to its last part."""
    return Path(path).name if Path(path).is_absolute() else path


def command_line(context: typer.Context) -> str:
    """The running command with every option that differs from its default; paths as `portable`."""
    words = ["hf-longattn", str(context.info_name)]  # not as it was started, which may be python -m
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if value in (None, [], ()) or value == parameter.get_default(context):
            continue
        if value is True:
            words.append(parameter.opts[0])
            continue
        listed = value if isinstance(value, (list, tuple)) else [value]
        for text in (",".join(map(portable, str(v).split(","))) for v in listed):
            words += [text] if parameter.param_type_name == "argument" else [parameter.opts[0], text]
    return shlex.join(words)
