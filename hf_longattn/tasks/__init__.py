"""Tasks with a known answer: text and a tokenizer in, token ids and labels out. No model, no training."""

from .needle import Needle, NeedleSample, NeedleTask, hits, hits_in_text

__all__ = ["Needle", "NeedleSample", "NeedleTask", "hits", "hits_in_text"]
