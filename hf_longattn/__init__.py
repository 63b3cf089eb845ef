"""Long-context attention for Hugging Face Transformers, by changing what happens inside the softmax.

Importing this package registers every method as an attention implementation:

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="scale_invariant")
"""

import contextlib
import importlib.util
from typing import TYPE_CHECKING, Any

from . import methods
from .attention import attention
from .calibration import Measurements, calibrate, measure
from .config import LongAttnConfig
from .diagnostics import Diagnostics, capture
from .extension import extend
from .hub import push, save
from .integration import Description, apply, config_of, describe, remove, rope, update
from .methods.adaptive_temperature import fit_adaptive_temperature
from .reference import reference_attention
from .rotary import Rotation

if TYPE_CHECKING:
    from .adapters import LongAttnLoraConfig

__all__ = [
    "Description",
    "Diagnostics",
    "LongAttnConfig",
    "LongAttnLoraConfig",
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
    "push",
    "reference_attention",
    "remove",
    "rope",
    "save",
    "update",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "LongAttnLoraConfig":  # PEFT is optional; without it this raises, and names the extra
        from .adapters import LongAttnLoraConfig

        return LongAttnLoraConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if importlib.util.find_spec("peft") is not None:
    with contextlib.suppress(ImportError):  # a PEFT that is too old is told at LongAttnLoraConfig
        from . import adapters  # noqa: F401  PEFT must know our adapters before it loads one
