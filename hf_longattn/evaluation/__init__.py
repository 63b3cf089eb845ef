"""Measurements of a method: a model's loss and answers, short and long. Names are imported when they are first used."""

from typing import TYPE_CHECKING

from ..lazy_imports import names_of

if TYPE_CHECKING:
    from .experiment import Cell as Cell
    from .experiment import Experiment as Experiment
    from .measures.answers import AnswerScore as AnswerScore
    from .measures.answers import answer_scores as answer_scores
    from .measures.copies import PASSAGE as PASSAGE
    from .measures.copies import Copy as Copy
    from .measures.copies import copy_losses as copy_losses
    from .measures.copies import far_copies as far_copies
    from .measures.copies import with_copies as with_copies
    from .measures.heads import copying_heads as copying_heads
    from .measures.losses import loss_by_position as loss_by_position
    from .measures.losses import prefix_of as prefix_of
    from .measures.losses import token_losses as token_losses
    from .options import EvalOptions as EvalOptions
    from .results import Results as Results
    from .runner import Runner as Runner
    from .runner import evaluate as evaluate
    from .settings import Setting as Setting
    from .tasks.base import Task as Task

_HOME = {
    "experiment": ("Cell", "Experiment"),
    "measures.answers": ("AnswerScore", "answer_scores"),
    "measures.copies": ("PASSAGE", "Copy", "copy_losses", "far_copies", "with_copies"),
    "measures.heads": ("copying_heads",),
    "measures.losses": ("loss_by_position", "prefix_of", "token_losses"),
    "options": ("EvalOptions",),
    "results": ("Results",),
    "runner": ("Runner", "evaluate"),
    "settings": ("Setting",),
    "tasks.base": ("Task",),
}

__all__ = sorted(name for names in _HOME.values() for name in names)
__getattr__ = names_of(__name__, _HOME)


def __dir__() -> list[str]:
    return __all__
