"""Training recipes: continued training under a method, distillation, needles, and small models from scratch."""

from .recipe import POSITIONS, RECIPES, Recipe, dump, load_recipe
from .run import Prepared, last_checkpoint, plan, prepare, run

__all__ = ["POSITIONS", "RECIPES", "Prepared", "Recipe", "dump", "last_checkpoint", "load_recipe", "plan", "prepare", "run"]
