"""Finding a model's attention: its modules, what kind each is, and their configs."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..config import LongAttnConfig
from .config_records import raw_section
from .internals import get_implementation, has_local, modules_of, passes_on, uses_interface
from .names import is_longattn_name, parsed_config
from .trained_length import window_hides

#: What the types in a config's layer_types say: all keys before the query are seen, or a window of them.
_KINDS = {
    "full_attention": "full",
    "hybrid": "full",  # beside a recurrent mixer in the same layer
    "sliding_attention": "window",
    "chunked_attention": "window",
    "hybrid_sliding": "window",
    "window_attention": "window",
}
#: What parts of attention modules make of a mask, by their names.
_READERS = {
    "compressor": (
        "its queries see keys that stand for several tokens each (compressed attention), which have no distances to change "
        "and no number to count, and for which it lengthens transformers' mask"
    ),
    "indexer": (
        "its queries see the keys that an indexer picks from transformers' mask (sparse attention): what it picks, by scores "
        "and distances of its own, no method changes"
    ),
    "prepare_dynamic_mask": "its attention makes a mask of its own from transformers' mask",
}


@dataclass(frozen=True)
class Layer:
    """One attention module of a model, as transformers calls it.

    Args:
        config: that of the model around it, of the module's type. Usually it is the module's own object; a layer that was
            copied, or comes from another model, has an object of its own, which may say something else.
    """

    name: str
    module: Any
    config: Any = field(compare=False)

    @property
    def index(self) -> int:
        """The layer's number; of modules that do not know theirs (Zamba, Zamba 2) the one in the name."""
        own = self.module.layer_idx
        return own if own is not None and own >= 0 else next(iter(self.places))

    @property
    def places(self) -> list[int]:
        """The numbers in the module's name."""
        return [int(part) for part in self.name.split(".") if part.isdigit()]

    @property
    def why_never(self) -> str | None:
        """Why no method can apply here, or None."""
        if getattr(self.module, "is_cross_attention", False) or has_local(self.module, "cross_attention_states"):
            return "cross-attention"
        if not hasattr(self.module, "layer_idx"):
            return "not causal"  # no KV cache: towers whose is_causal says nothing
        return None if getattr(self.module, "is_causal", True) else "not causal"

    @property
    def why_not_our_mask(self) -> str | None:
        """Why the module cannot run under our mask: what it does to Transformers' own before attention. None: nothing."""
        return next((why for name, why in _READERS.items() if getattr(self.module, name, None) is not None), None)

    @property
    def refusal(self) -> str | None:
        """The operation in its softmax that no method computes, or None."""
        if passes_on(self.module, "position_bias"):
            return "a learned bias (position_bias) joins their logits"
        if self.kind not in ("full", "window"):
            return f"the config calls their attention {self.kind!r}, which is not known to see all keys or a window of them"
        return None

    @property
    def type(self) -> str | None:
        """The entry in the config's layer_types, if it has them."""
        types = getattr(self.config, "layer_types", None)
        return None if types is None or self.why_never else types[self.index]

    @property
    def kind(self) -> str:
        """What the layer sees: "full", "window", or a type that stands for neither; a window that hides nothing is none."""
        if self.windowed:
            return "window" if window_hides(self.config) else "full"
        return "full" if self.type is None else _KINDS.get(self.type, self.type)

    @property
    def windowed(self) -> bool:
        """True: it has a window, which its calls announce."""
        if self.type is not None:
            return _KINDS.get(self.type) == "window"
        return getattr(self.config, "sliding_window", None) is not None

    @property
    def why_not(self) -> str | None:
        """Why `layers="full_attention"` leaves it alone, or None."""
        return self.why_never or {"full": None, "window": "sliding window"}.get(self.kind, self.kind)


def pretrained(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside PEFT, DDP or compile wrappers."""
    if not isinstance(model, nn.Module):
        got = repr(model) if isinstance(model, str) else f"an object of type {type(model).__name__}"
        raise TypeError(f"this takes a loaded model first, got {got}")
    if (found := pretrained_in(model)) is None:
        raise ValueError(f"{type(model).__name__} holds no transformers model")
    return found


def pretrained_in(model: nn.Module) -> PreTrainedModel | None:
    """The transformers model inside a module, the outermost; None: there is none."""
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)


class View:
    """A model, looked at once: all of it that a method has to do with.

    Args:
        model: a transformers model, or what wraps one.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = pretrained(model)
        self.modules = modules_of(self.model)
        self.layers = layers_of(self.model)
        causal, text = [x for x in self.layers if not x.why_never], language_config(self.model.config)
        one = len({id(x.config) for x in causal}) == 1
        #: The layers that a method may go into: the causal self-attention of the language model, which all have one config.
        #: Other causal parts (speech codecs, talkers) are left alone. Empty where none of several parts is it.
        self.candidates = [x for x in causal if x.config is text] or (causal if one else [])
        #: The config of these; None: there are none.
        self.target: Any = self.candidates[0].config if self.candidates else None
        #: All layers with that config.
        self.of_target = [x for x in self.layers if x.config is self.target]
        #: The config objects into which a method is written: the target; those of the modules of its layers, which may be
        #: copies; and those of the models around them, by which masks are made and models are saved.
        self.method_configs: list[Any] = distinct([self.target, *self._around(), *(x.module.config for x in self.of_target)])
        found = [m.config for m in self.modules if isinstance(m, PreTrainedModel)] + [x.module.config for x in self.layers]
        #: The distinct config objects, of submodels and of attention modules; another module may hold that of another model.
        self.configs: list[Any] = distinct([c for c in found if isinstance(c, PreTrainedConfig)] + self.method_configs)

    def _around(self) -> list[Any]:
        """Return the text configs of the models around the language model's attention that are of its type."""
        attention = {x.module for x in self.candidates}
        models = [m for m in self.modules if isinstance(m, PreTrainedModel) and not attention.isdisjoint(modules_of(m))]
        return [c for c in (language_config(m.config) for m in models) if type(c) is type(self.target)]

    @property
    def name(self) -> str:
        return type(self.model).__name__

    @property
    def layer_methods(self) -> list[Any]:
        """The `LayerMethod` of each layer that has one."""
        return [method for x in self.layers if (method := vars(x.module).get("_longattn")) is not None]

    @property
    def state(self) -> Any:
        """The model's `AttentionState`; None before any method came."""
        own = vars(self.inner).get("_longattn")
        return next((method.state for method in self.layer_methods), None) if own is None and self.target is None else own

    @property
    def running(self) -> LongAttnConfig | None:
        """The config that it runs, if it runs one. ValueError: its section describes no method."""
        if self.target is None:
            return None
        own = distinct([x.module.config for x in self.candidates])
        says = self.target if len(own) > 1 or is_longattn_name(get_implementation(self.target)) else own[0]
        held = raw_section(says)
        if not held or not is_longattn_name(get_implementation(says)):
            return None
        if isinstance(held, LongAttnConfig):
            return held
        try:
            return parsed_config(says)
        except ValueError as error:
            if self.state is None:  # of a checkpoint
                raise
            raise ValueError(
                f"config.longattn was changed after the method was put into the model, and describes none: {error}. Set it to "
                "None, then hf_longattn.apply or remove"
            ) from error

    @property
    def adapters(self) -> list[Any]:
        """The configs of its adapters, which record its attention (see `saved_method`)."""
        of = vars(self.model)
        return [*(of.get("peft_config") or {}).values(), *of.get("longattn_adapters", ())]

    @functools.cached_property
    def inner(self) -> PreTrainedModel:
        """The innermost model around the language model's attention: without heads and towers, it is given all positions."""
        attention = {x.module for x in self.candidates}
        return [m for m in self.modules if isinstance(m, PreTrainedModel) and attention <= set(modules_of(m))][-1]


def layers_of(model: nn.Module) -> list[Layer]:
    """All attention modules of a model."""
    named = dict(model.named_modules())
    models = {f"{name}.".lstrip("."): m for name, m in reversed(named.items()) if isinstance(m, PreTrainedModel)}
    found = [(name, module) for name, module in named.items() if uses_interface(module)]
    return [Layer(n, x, _config_of(x, [m for around, m in models.items() if n.startswith(around)])) for n, x in found]


def _config_of(attention: Any, models: list[PreTrainedModel]) -> Any:
    """`Layer.config`: of the configs of the models around an attention module, from the innermost out, its own object, or else
    the first of its type; the module's own where there is neither.
    """
    known = distinct([c for m in models for c in with_parts(m.config)])
    own = attention.config
    return next((c for c in known if c is own), next((c for c in known if type(c) is type(own)), own))


def with_parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A config, and those in it."""
    yield config
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig):
            yield from with_parts(part)


def distinct(configs: Iterable[Any]) -> list[Any]:
    """Each of these objects once, without None."""
    return list({id(c): c for c in configs if c is not None}.values())


def candidates_of(model: nn.Module) -> list[Layer]:
    """Return the layers that a method may go into."""
    return View(model).candidates


def bodies_of(model: nn.Module) -> list[PreTrainedModel]:
    """The models inside a model that hold all of its attention, from the outermost in: its head reads the output of one."""
    attention = {module for module in model.modules() if uses_interface(module)}
    inside = (m for m in model.modules() if m is not model and isinstance(m, PreTrainedModel))
    return [m for m in inside if attention <= set(modules_of(m))]


def language_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a composite model's language model; of any other model its own."""
    if not config.sub_configs:
        return config
    try:
        return config.get_text_config()
    except ValueError:  # a text encoder beside a decoder (MusicGen): only the decoder is causal
        return getattr(config, "decoder", config)
