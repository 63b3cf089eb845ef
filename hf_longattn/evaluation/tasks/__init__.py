"""Tasks, one file each; and texts with a known answer, made from a tokenizer and a seed alone."""

from ..encoder import Encoder
from .base import Task, task_of
from .needle import Needle, NeedleTask
from .registry import TASK_NAMES, make_task
from .sample import Sample, TextTask

__all__ = ["TASK_NAMES", "Encoder", "Needle", "NeedleTask", "Sample", "Task", "TextTask", "make_task", "task_of"]
