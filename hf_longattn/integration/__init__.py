"""The way into transformers' models: names, masks, dispatch, models, and what is wrapped."""

from . import rope
from .dispatch import attention_forward
from .engines import paged
from .masks import layout_mask
from .model import Description, UntrainedWarning, apply, describe, get_config, remove, update
from .names import register_names
from .patch import install
from .patches import PATCHES

register_names(attention_forward, layout_mask)
install(*PATCHES, *paged.PATCHES)

__all__ = ["Description", "UntrainedWarning", "apply", "describe", "get_config", "remove", "rope", "update"]


def __dir__() -> list[str]:
    return __all__
