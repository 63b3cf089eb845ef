"""Tasks with a known answer: text and a tokenizer in, token ids and labels out. No model, no training."""

from .needle import Needle, NeedleTask
from .registry import TASK_NAMES, canonical, make_task
from .sample import Encoder, Sample, Task

__all__ = ["TASK_NAMES", "Encoder", "Needle", "NeedleTask", "Sample", "Task", "canonical", "make_task"]
