"""The command `hf-longattn`: one module per command."""

import typer

from .env import env
from .eval import evaluate
from .extend import extend
from .inspect import inspect
from .lm_eval import lm_eval
from .push import push
from .train import train

app = typer.Typer(no_args_is_help=True, help="Long-context attention for Transformers models.", add_completion=False)


@app.callback()
def main() -> None:
    """Long-context attention for Transformers models."""


for command in (extend, train, inspect, push, env):
    app.command()(command)
app.command("eval")(evaluate)
app.command("lm-eval", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(lm_eval)
