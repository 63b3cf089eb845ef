"""What a method does to a model's loss and answers, short and long."""

from .measures.answers import AnswerScore, answer_scores
from .measures.copies import PASSAGE, Copy, copy_losses, far_copies, with_copies
from .measures.heads import copying_heads
from .measures.losses import loss_by_position, prefix_of, token_losses
from .plan import Plan
from .results import Results
from .run import run_plan
from .store import Store

__all__ = [
    "PASSAGE",
    "AnswerScore",
    "Copy",
    "Plan",
    "Results",
    "Store",
    "answer_scores",
    "copy_losses",
    "copying_heads",
    "far_copies",
    "loss_by_position",
    "prefix_of",
    "run_plan",
    "token_losses",
    "with_copies",
]
