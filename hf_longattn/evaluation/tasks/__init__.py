"""Tasks with a known answer: text and a tokenizer in, token ids and labels out. No model, no training."""

from .needle import Needle, NeedleSample, NeedleTask
from .registry import TASK_NAMES, canonical, make_task
from .sample import Encoder, Sample, Task, TextSample

__all__ = [
    "TASK_NAMES",
    "Encoder",
    "Needle",
    "NeedleSample",
    "NeedleTask",
    "Sample",
    "Task",
    "TextSample",
    "canonical",
    "make_task",
]
