"""What a method does to a model's loss and answers, short and long."""

from .experiment import Cell, Experiment
from .measures.answers import AnswerScore, answer_scores
from .measures.copies import PASSAGE, Copy, copy_losses, far_copies, with_copies
from .measures.heads import copying_heads
from .measures.losses import loss_by_position, prefix_of, token_losses
from .plan import Plan
from .results import Results

__all__ = [
    "PASSAGE",
    "AnswerScore",
    "Cell",
    "Copy",
    "Experiment",
    "Plan",
    "Results",
    "answer_scores",
    "copy_losses",
    "copying_heads",
    "far_copies",
    "loss_by_position",
    "prefix_of",
    "token_losses",
    "with_copies",
]
