"""What a method does to a model's loss, short and long."""

from .copying import PASSAGE, Copy, copy_losses, with_copies
from .heads import copying_heads
from .losses import loss_by_position, token_losses

__all__ = ["PASSAGE", "Copy", "copy_losses", "copying_heads", "loss_by_position", "token_losses", "with_copies"]
