"""`hf-longattn lm-eval`: the harness's own command, with models under a setting."""

from __future__ import annotations

import sys
from unittest import mock

import typer

from .common import refusing


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness on a model under a method; everything after -- goes to the harness.

    hf-longattn lm-eval -- --model_args pretrained=MODEL,setting=infoscale@ntk:2,max_length=16384 --tasks niah_single_1

    `setting` is as in `hf-longattn eval --method`, or a name in a YAML file given as `settings`. The harness truncates texts
    at the config's maximum length unless `max_length` says otherwise. Its tasks come from the Hub, or from `--include_path`.
    """
    from ..evaluation import harness

    with refusing():
        harness.register()
        from lm_eval.__main__ import cli_evaluate
    arguments = [a for a in context.args if a != "--"]
    if arguments[:1] not in (["ls"], ["validate"]):
        arguments = ["run", *(arguments[1:] if arguments[:1] == ["run"] else arguments)]
        if not any(a == "--model" or a.startswith("--model=") for a in arguments):
            arguments += ["--model", harness.NAME]
    with mock.patch.object(sys, "argv", ["lm-eval", *arguments]), refusing():  # its errors and ours in what was typed
        cli_evaluate()
