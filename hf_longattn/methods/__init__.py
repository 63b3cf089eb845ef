"""The methods: one file each, a frozen dataclass with its formula in plain PyTorch.

A new method is one file here, a subclass of its slot in `base`, and one name in the call below.
"""

from ..config import register
from .adaptive_temperature import AdaptiveTemperature
from .alibi import Alibi
from .cosscale import CosScale
from .infoscale import InfoScale
from .log_length import LogLength
from .logn import LogN
from .output_norm import OutputLayerNorm, OutputStandardise
from .scale_invariant import ScaleInvariant
from .softmax_plus import SoftmaxPlus
from .yarn_temperature import YarnTemperature

__all__ = [
    "AdaptiveTemperature",
    "Alibi",
    "CosScale",
    "InfoScale",
    "LogLength",
    "LogN",
    "OutputLayerNorm",
    "OutputStandardise",
    "ScaleInvariant",
    "SoftmaxPlus",
    "YarnTemperature",
]

register(
    AdaptiveTemperature,
    Alibi,
    CosScale,
    InfoScale,
    LogLength,
    LogN,
    OutputLayerNorm,
    OutputStandardise,
    ScaleInvariant,
    SoftmaxPlus,
    YarnTemperature,
)
