"""`hf-longattn push`: put a saved model or adapter on the Hub."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from .common import refusing, say, tokens


def push(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A model or an adapter, as saved.", exists=True, file_okay=False)
    ],
    repo_id: Annotated[str, typer.Argument(help='The repository, "user/name".')],
    base_model: Annotated[str | None, typer.Option(help="The Hub name of the model that this was made from.")] = None,
    training_length: Annotated[list[str] | None, typer.Option(help="A length it was trained on; 32k is 32,768.")] = None,
    metrics: Annotated[Path | None, typer.Option(help='JSON: {"loss": {"4096": 2.9, ...}, ...}, by length.')] = None,
    evaluated_on: Annotated[str | None, typer.Option(help="The text that the metrics were measured on.")] = None,
    license: Annotated[str | None, typer.Option(help="As the Hub names it, for example apache-2.0.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print what would be uploaded and the card, and stop.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Add a commit to a repository that exists without asking.")] = False,
) -> None:
    """Upload DIR to the Hub as REPO_ID, with a model card written from the folder and these options.

    Safetensors and text are uploaded; optimizer states, checkpoints and logs are not. A README.md of your own is kept.
    Log in first, with `hf auth login` or HF_TOKEN. Exit status 1 if you answer no to a question.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    from ..checks import hub_errors

    card: dict[str, Any] = {
        "training_lengths": [tokens(n) for n in training_length or ()],
        "metrics": metrics,
        "evaluated_on": evaluated_on,
        "license": license,
    }
    with refusing("REPO_ID"):
        validate_repo_id(repo_id)

    from ..sharing import hub
    from ..sharing.card import Facts

    with refusing():
        result = hub.files(directory, repo_id, Facts(**card), base_model)
    for name, content in result.items():
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        say(f"{size:>14,}  {name}")
    if missing := hub.unfinished(directory):
        say(f"Note: {missing}.")
    if dry_run:
        card_text = content.decode() if isinstance(content := result["README.md"], bytes) else content.read_text("utf-8")
        say(f"\n{card_text}\nNothing was uploaded.")
        return
    try:
        exists = HfApi().repo_exists(repo_id)
        if exists and not yes:
            typer.confirm(f"{repo_id} exists already. Add a commit to it?", abort=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the training run in")  # it is said above
            url = hub.push(directory, repo_id, base_model=base_model, private=private or None, exist_ok=exists, **card)
    except hub_errors() as error:
        say(f"Nothing was uploaded. The Hub cannot be reached, or refused: {error}")
        raise typer.Exit(1) from None
    say(url)
