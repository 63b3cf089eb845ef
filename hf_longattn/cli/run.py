"""`hf-longattn run`: other tools with this package in them."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import typer

from .common import refusing

BOOTSTRAP = Path(__file__).with_name("bootstrap")


def run(context: typer.Context) -> None:
    """Run a command with every method registered, in it and in all Python processes that it starts.

    hf-longattn run -- trl sft --model_name_or_path MODEL ...

    Tools that never import hf_longattn (trl, lm_eval, transformers serve, accelerate launch, torchrun) can then load and train
    checkpoints that record a method. A tool of the environment that hf-longattn is in is found whether or not that is
    activated. The command replaces this process, with a folder in PYTHONPATH whose sitecustomize.py imports the package; that
    costs a few milliseconds per process. `python -I` and `python -E` ignore it.
    """
    command = [*context.args]
    command = command[1:] if command[:1] == ["--"] else command
    with refusing():
        if not command:
            raise ValueError("name a command: hf-longattn run -- trl sft ...")
        if (program := found(command[0])) is None:
            raise ValueError(f"there is no command {command[0]!r} here")
        path = os.pathsep.join(filter(None, (str(BOOTSTRAP), os.environ.get("PYTHONPATH"))))
        os.execve(program, [program, *command[1:]], os.environ | {"PYTHONPATH": path})


def found(command: str) -> str | None:
    """Find a command: beside this one, since only that environment is known to have the package, else in PATH."""
    return shutil.which(command, path=sysconfig.get_path("scripts")) or shutil.which(command)
