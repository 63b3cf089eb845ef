"""Long-context attention for Hugging Face Transformers, by changing what happens inside the softmax.

Importing this package registers every method as an attention implementation:

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="scale_invariant")
"""

from . import methods
from .attention import attention
from .calibration import Measurements, calibrate, measure
from .config import LongAttnConfig
from .diagnostics import Diagnostics, capture
from .extension import extend
from .integration import Description, apply, config_of, describe, remove, rope, update
from .methods.adaptive_temperature import fit_adaptive_temperature
from .reference import reference_attention
from .rotary import Rotation

__all__ = [
    "Description",
    "Diagnostics",
    "LongAttnConfig",
    "Measurements",
    "Rotation",
    "apply",
    "attention",
    "calibrate",
    "capture",
    "config_of",
    "describe",
    "extend",
    "fit_adaptive_temperature",
    "measure",
    "methods",
    "reference_attention",
    "remove",
    "rope",
    "update",
]
__version__ = "0.1.0"
