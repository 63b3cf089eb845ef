"""The methods: one file each, a frozen dataclass with its formula in plain PyTorch.

A new method is one file here, a subclass of its slot in `slots.base`, and one line in `slots.registry`. Type checkers read
the imports below; when the package runs, a class is imported when it is first used.
"""

from typing import TYPE_CHECKING, Any

from ..slots.registry import METHODS, method_class

if TYPE_CHECKING:
    from .adaptive_temperature import AdaptiveTemperature as AdaptiveTemperature
    from .alibi import Alibi as Alibi
    from .attention_sink import AttentionSink as AttentionSink
    from .cosscale import CosScale as CosScale
    from .dual_chunk import DualChunk as DualChunk
    from .infoscale import InfoScale as InfoScale
    from .logn import LogN as LogN
    from .output_norm import OutputLayerNorm as OutputLayerNorm
    from .output_norm import OutputStandardise as OutputStandardise
    from .rerope import LeakyReRope as LeakyReRope
    from .rerope import ReRope as ReRope
    from .scale_invariant import ScaleInvariant as ScaleInvariant
    from .self_extend import SelfExtend as SelfExtend
    from .string_remap import StringRemap as StringRemap
    from .windows import LmInfinite as LmInfinite
    from .windows import Streaming as Streaming
    from .windows import Windowed as Windowed
    from .yarn_beyond import YarnBeyond as YarnBeyond
    from .yarn_temperature import YarnTemperature as YarnTemperature

_BY_CLASS = {path.partition(".")[2]: name for name, path in METHODS.items()}
__all__ = list(_BY_CLASS)


def __getattr__(name: str) -> Any:
    if name in _BY_CLASS:
        return method_class(_BY_CLASS[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
