"""Training recipes: continued training under a method, distillation, needles.

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from ..lazy_imports import names_of

if TYPE_CHECKING:
    from .preflight import Prepared as Prepared
    from .preflight import prepare as prepare
    from .recipe import RECIPES as RECIPES
    from .recipe import Recipe as Recipe
    from .recipe import dump as dump
    from .recipe import load_recipe as load_recipe
    from .run_folder import last_checkpoint as last_checkpoint
    from .run_plan import excess as excess
    from .run_plan import plan as plan
    from .running import run as run

_HOME = {
    "recipe": ("RECIPES", "Recipe", "dump", "load_recipe"),
    "run_plan": ("excess", "plan"),
    "preflight": ("Prepared", "prepare"),
    "run_folder": ("last_checkpoint",),
    "running": ("run",),
}

__all__ = sorted(name for names in _HOME.values() for name in names)
__getattr__ = names_of(__name__, _HOME)


def __dir__() -> list[str]:
    return __all__
