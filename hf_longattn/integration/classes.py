"""The class that a checkpoint was saved from, and what loads it."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..config import TRIPWIRE
from .internals import auto_classes, classes_for, names_by_type

#: Auto classes that come first where several load a class, since their name says most of it.
FIRST = ("AutoModelForImageTextToText", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
#: Tasks that transformers' model cards have no word for, and its pipelines do.
TASKS = {"AutoModel": "feature-extraction", "AutoModelForMultimodalLM": "any-to-any"}


def own_class(config: Any) -> type[PreTrainedModel] | None:
    """The class that a checkpoint's config names, by its `architectures`; else the causal language model of its type.

    None: there is neither.
    """
    names = [name.removeprefix(TRIPWIRE) for name in config.architectures or ()]
    known = [kind for auto in auto_classes() for kind in classes_for(auto, config)]
    known += [kind for name in names if isinstance(kind := getattr(transformers, name, None), type)]
    own = (kind for name in names for kind in known if kind.__name__ == name and _reads(kind, config))
    return next(own, next(iter(classes_for(AutoModelForCausalLM, config)), None))


def loaders(architecture: str) -> list[str]:
    """Return the names of the auto classes that load a class, the most specific first; its own name, if none does."""
    autos = [auto.__name__ for auto in auto_classes() if architecture in _names(auto)]
    return [*(name for name in FIRST if name in autos), *(name for name in autos if name not in FIRST)] or [architecture]


def task(loader: str) -> str | None:
    """Return the Hub's name for the task of an auto class's models; None: Transformers has no name for it."""
    from transformers.modelcard import TASK_MAPPING  # with it come Trainer's arguments and PEFT

    mappings = [names_by_type(auto) for auto in auto_classes() if auto.__name__ == loader]
    by_mapping = (name for name, names in TASK_MAPPING.items() if any(names is mapping for mapping in mappings))
    return next(by_mapping, TASKS.get(loader))


def _names(auto: Any) -> set[str]:
    names = names_by_type(auto).values()
    return {x for name in names for x in (name if isinstance(name, (tuple, list)) else (name,))}


def _reads(kind: Any, config: Any) -> bool:
    return issubclass(kind, PreTrainedModel) and kind.config_class in (None, type(config))
