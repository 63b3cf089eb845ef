"""Long-context attention for Hugging Face Transformers, by changing what happens inside the softmax.

Importing this package registers every method as an attention implementation:

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="scale_invariant")
"""

from . import methods
from .attention import attention
from .config import LongAttnConfig
from .integration import Description, apply, config_of, describe, remove, update
from .reference import reference_attention

__all__ = [
    "Description",
    "LongAttnConfig",
    "apply",
    "attention",
    "config_of",
    "describe",
    "methods",
    "reference_attention",
    "remove",
    "update",
]
__version__ = "0.1.0"
