"""Long-context attention for Hugging Face Transformers, by changing what happens inside the softmax.

Importing this package registers every method as an attention implementation:

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="scale_invariant")

Registration waits until transformers is imported (see `lazy_imports`), and everything below is imported when it is first used.
"""

import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__
from .lazy_imports import when_imported

if TYPE_CHECKING:
    from . import methods as methods
    from ._signatures import apply as apply
    from ._signatures import evaluate as evaluate
    from ._signatures import extend as extend
    from ._signatures import using as using
    from .config import LongAttnConfig as LongAttnConfig
    from .core.attend import attention as attention
    from .core.attend import reference_attention as reference_attention
    from .core.kernels.precision import auto_dtype as auto_dtype
    from .core.rotary import Rotation as Rotation
    from .evaluation.calibrate import Measurements as Measurements
    from .evaluation.calibrate import calibrate as calibrate
    from .evaluation.calibrate import measure as measure
    from .evaluation.measures.capture import capture as capture
    from .evaluation.measures.diagnostics import Diagnostics as Diagnostics
    from .integration import Description as Description
    from .integration import UntrainedWarning as UntrainedWarning
    from .integration import describe as describe
    from .integration import get_config as get_config
    from .integration import remove as remove
    from .integration import rope as rope
    from .integration import update as update
    from .integration.engines.ulysses import split_sequence as split_sequence
    from .integration.skip_masks import masks_of_jumps as masks_of_jumps
    from .methods.adaptive_temperature import fit_adaptive_temperature as fit_adaptive_temperature
    from .sharing.hub import merge as merge
    from .sharing.hub import push as push
    from .sharing.hub import save as save
    from .slots.registry import list_methods as list_methods
    from .slots.registry import register as register

#: Public names by the module that holds them.
_NAMES = {
    "core.attend": ("attention", "reference_attention"),
    "core.kernels.precision": ("auto_dtype",),
    "evaluation.calibrate": ("Measurements", "calibrate", "measure"),
    "config": ("LongAttnConfig",),
    "evaluation.measures.capture": ("capture",),
    "evaluation.measures.diagnostics": ("Diagnostics",),
    "evaluation.runner": ("evaluate",),
    "extension": ("extend",),
    "sharing.hub": ("merge", "push", "save"),
    "integration": ("Description", "UntrainedWarning", "apply", "get_config", "describe", "remove", "rope", "update"),
    "integration.engines.ulysses": ("split_sequence",),
    "integration.skip_masks": ("masks_of_jumps",),
    "methods.adaptive_temperature": ("fit_adaptive_temperature",),
    "slots.registry": ("list_methods", "register"),
    "core.rotary": ("Rotation",),
    "scoped_method": ("using",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted([*_HOME, "methods"])


def __getattr__(name: str) -> Any:
    if name in _HOME:
        globals()[name] = value = getattr(import_module(f".{_HOME[name]}", __name__), name)
        return value
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:  # hf_longattn.training
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "evaluation", "training", "__version__"])


def _know_adapters() -> None:
    try:
        import_module(".sharing.adapters", __name__)
    except ImportError as error:  # an older PEFT
        warnings.warn(f"{error}. Until then adapters do not record their model's method, and load without it", stacklevel=2)


when_imported("transformers", lambda: import_module(".integration", __name__))
when_imported("peft", _know_adapters)
