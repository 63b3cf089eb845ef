"""The command `hf-longattn`: one module per command."""

import typer

from .env import env
from .extend import extend
from .inspect import inspect

app = typer.Typer(no_args_is_help=True, help="Long-context attention for Transformers models.", add_completion=False)


@app.callback()
def main() -> None:
    """Long-context attention for Transformers models."""


for command in (extend, inspect, env):
    app.command()(command)
