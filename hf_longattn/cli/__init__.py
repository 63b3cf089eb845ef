"""The command `hf-longattn`: one module per command.

What `--help` needs is imported here and at the top of those modules; torch, transformers and what measures, inside functions.
"""

from typing import Annotated

import typer

from .. import __version__
from .common import Commands, help_of
from .doctor import doctor
from .eval import evaluate
from .extend import extend
from .inspect import inspect
from .lm_eval import lm_eval
from .memory import memory
from .methods import methods
from .probe import probe
from .push import push
from .run import run
from .train import train

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


for command in (extend, train, probe, inspect, memory, methods, push, doctor):
    app.command(help=help_of(command))(command)
app.command("eval", help=help_of(evaluate))(evaluate)
passed_on = {"allow_extra_args": True, "ignore_unknown_options": True}
app.command("lm-eval", help=help_of(lm_eval), options_metavar="-- OPTIONS OF THE HARNESS...", context_settings=passed_on)(
    lm_eval
)
app.command("run", help=help_of(run), options_metavar="-- COMMAND...", context_settings=passed_on)(run)
