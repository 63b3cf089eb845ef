"""The command `hf-longattn`: one module per command; those that measure share one.

What `--help` needs is imported here and at the top of those modules; torch, transformers and what measures, inside functions,
behind the checks that need none of them.
"""

import functools
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from .._version import __version__
from .common import Commands, help_of, parameter, with_options
from .doctor import doctor
from .eval import evaluate, inspect, probe
from .extend import extend
from .fetch import fetch
from .memory import memory
from .methods import methods
from .push import push
from .run import run
from .train import TrainCommand, train

app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"hf_longattn {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Long-context attention for Transformers models."""
    warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)  # PEFT reads it


def importing(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command --import, which comes before anything that it does."""
    option = typer.Option("--import", metavar="MODULE", help="A Python module that registers methods of your own.")

    @functools.wraps(command)
    def with_modules(*args: Any, modules: list[str] | None = None, **given: Any) -> None:
        if modules and (here := str(Path.cwd())) not in sys.path:
            sys.path.insert(0, here)  # as python itself has it
        for name in modules or ():
            try:
                import_module(name)
            except Exception as error:
                raise typer.BadParameter(f"{name}: {error}", param_hint="--import") from None
        command(*args, **given)

    return with_options(with_modules, [parameter("modules", None, Annotated[list[str] | None, option])])


for command in (fetch, extend, probe, inspect, memory, methods, push, doctor):
    app.command(help=help_of(command))(importing(command))
app.command("train", cls=TrainCommand, help=help_of(train))(importing(train))
app.command("eval", help=help_of(evaluate))(importing(evaluate))
passed_on = {"allow_extra_args": True, "ignore_unknown_options": True}
app.command("run", help=help_of(run), options_metavar="-- COMMAND...", context_settings=passed_on)(run)
