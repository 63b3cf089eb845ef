"""What the attention of a model looks like: entropy, mass by distance, logits, outputs; streamed, per layer and head."""

from .capture import Capture, capture
from .result import QUANTITIES, WHAT, Diagnostics

__all__ = ["QUANTITIES", "WHAT", "Capture", "Diagnostics", "capture"]
