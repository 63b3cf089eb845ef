"""The methods: one file each, a frozen dataclass with its formula in plain PyTorch.

A new method is one file here, a subclass of its slot in `base`, and one name in the call below.
"""

from ..config import register
from .adaptive_temperature import AdaptiveTemperature
from .alibi import Alibi
from .cosscale import CosScale
from .dual_chunk import DualChunk
from .infoscale import InfoScale
from .log_length import LogLength
from .logn import LogN
from .output_norm import OutputLayerNorm, OutputStandardise
from .rerope import LeakyReRope, ReRope
from .scale_invariant import ScaleInvariant
from .self_extend import SelfExtend
from .softmax_plus import SoftmaxPlus
from .windows import LmInfinite, Streaming, Windowed
from .yarn_temperature import YarnTemperature

__all__ = [
    "AdaptiveTemperature",
    "Alibi",
    "CosScale",
    "DualChunk",
    "InfoScale",
    "LeakyReRope",
    "LmInfinite",
    "LogLength",
    "LogN",
    "OutputLayerNorm",
    "OutputStandardise",
    "ReRope",
    "ScaleInvariant",
    "SelfExtend",
    "SoftmaxPlus",
    "Streaming",
    "Windowed",
    "YarnTemperature",
]

register(
    AdaptiveTemperature,
    Alibi,
    CosScale,
    DualChunk,
    InfoScale,
    LeakyReRope,
    LmInfinite,
    LogLength,
    LogN,
    OutputLayerNorm,
    OutputStandardise,
    ReRope,
    ScaleInvariant,
    SelfExtend,
    SoftmaxPlus,
    Streaming,
    Windowed,
    YarnTemperature,
)
