"""The class that a checkpoint was saved from, and what loads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modelcard import TASK_MAPPING
from transformers.models.auto import auto_factory, modeling_auto

from .names import TRIPWIRE

#: Auto classes that come first where several load a class, since their name says most of it.
FIRST = ("AutoModelForImageTextToText", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
#: Tasks that transformers' model cards have no word for, and its pipelines do.
TASKS = {"AutoModel": "feature-extraction", "AutoModelForMultimodalLM": "any-to-any"}


def own_class(config: Any) -> type[PreTrainedModel] | None:
    """The class that a checkpoint's config names, by its `architectures`; else the causal language model of its type.

    None: there is neither.
    """
    names = [name.removeprefix(TRIPWIRE) for name in config.architectures or ()]
    known = [kind for auto in _autos() for kind in kinds_of(auto, config)]
    known += [kind for name in names if isinstance(kind := getattr(transformers, name, None), type)]
    own = (kind for name in names for kind in known if kind.__name__ == name and _reads(kind, config))
    return next(own, next(iter(kinds_of(AutoModelForCausalLM, config)), None))


def loaders(architecture: str) -> list[str]:
    """What of transformers loads a class: the names of auto classes, the one that says most of it first; else its own."""
    autos = [auto.__name__ for auto in _autos() if architecture in _names(auto)]
    return [*(name for name in FIRST if name in autos), *(name for name in autos if name not in FIRST)] or [architecture]


def task(loader: str) -> str | None:
    """What the Hub calls that which the models of an auto class do; None if transformers has no word for it."""
    mappings = [auto._model_mapping._model_mapping for auto in _autos() if auto.__name__ == loader]
    by_mapping = (name for name, names in TASK_MAPPING.items() if any(names is mapping for mapping in mappings))
    return next(by_mapping, TASKS.get(loader))


def _autos() -> Iterator[Any]:
    """The auto classes of transformers that have models, but for the one that has all kinds."""
    base: Any = auto_factory._BaseAutoModelClass
    kinds: list[Any] = [x for x in vars(modeling_auto).values() if isinstance(x, type) and issubclass(x, base)]
    yield from (x for x in kinds if x._model_mapping is not None and x is not modeling_auto.AutoModelForPreTraining)


def _names(auto: Any) -> set[str]:
    names = auto._model_mapping._model_mapping.values()
    return {x for name in names for x in (name if isinstance(name, (tuple, list)) else (name,))}


def kinds_of(auto: Any, config: Any) -> tuple[type[PreTrainedModel], ...]:
    """The classes that an auto class has for a config."""
    if type(config) not in auto._model_mapping:
        return ()
    found = auto._model_mapping[type(config)]
    return found if isinstance(found, tuple) else (found,)


def _reads(kind: Any, config: Any) -> bool:
    return issubclass(kind, PreTrainedModel) and kind.config_class in (None, type(config))
