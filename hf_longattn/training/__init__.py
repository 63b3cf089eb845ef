"""Training recipes: continued training under a method, distillation, needles."""

from .recipe import RECIPES, Recipe, dump, load_recipe
from .run import Prepared, last_checkpoint, plan, prepare, run

__all__ = ["RECIPES", "Prepared", "Recipe", "dump", "last_checkpoint", "load_recipe", "plan", "prepare", "run"]
