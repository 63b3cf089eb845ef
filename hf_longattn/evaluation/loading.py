"""Models under settings: what is wrong with one found on configs alone, and weights loaded, edited, merged and changed."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ..attention.kernels.precision import fast_dtype
from ..checks import check_dtype, check_finite, check_model
from ..config import LongAttnConfig
from ..integration import apply, config_of, rope
from ..integration.model import knowing, running
from ..integration.names import is_ours, short
from ..integration.planning import bound_config
from ..integration.record import ADAPTER, method_in, saved_in
from ..methods.method import SLOTS, ModelFacts
from ..telling import warn
from .settings import UNMODIFIED, Setting, parse_rope


def precision_of(model: str, dtype: str = "auto", device: str = "cpu") -> str:
    """The precision to run a checkpoint in: as asked; "auto" is its own, or float32 where that is one that a CPU multiplies
    slowly. Quantised checkpoints stay "auto".
    """
    check_dtype(dtype, "auto")
    config, own = AutoConfig.from_pretrained(model), own_precision(model)
    half = own in ("bfloat16", "float16") and not getattr(config, "quantization_config", None)
    slow = half and torch.device(device).type == "cpu" and own != fast_dtype()
    return "float32" if dtype == "auto" and slow else dtype


def own_precision(model: str) -> str:
    """What a checkpoint's config says that its weights are in."""
    config = AutoConfig.from_pretrained(model)
    return str(config.dtype or config.get_text_config().dtype).removeprefix("torch.")


def load_weights(source: str, **arguments: Any) -> Any:
    """AutoModelForCausalLM.from_pretrained of weights that can be computed with; `Refused` of NaN and infinite ones."""
    loaded = AutoModelForCausalLM.from_pretrained(source, **arguments)
    check_finite(loaded, source)
    return loaded


def load_tokenizer(source: str) -> Any:
    """AutoTokenizer.from_pretrained; ValueError names what is missing."""
    folder = Path(source)
    if folder.is_dir() and not any(p.name.startswith(("tokenizer", "vocab", "spiece")) for p in folder.iterdir()):
        raise ValueError(
            f"{source} holds no tokenizer: there is no tokenizer.json in it. Save one there: "
            f"AutoTokenizer.from_pretrained(BASE).save_pretrained({source!r})"
        )
    return AutoTokenizer.from_pretrained(source)


def build(config: Any, **arguments: Any) -> Any:
    """AutoModelForCausalLM.from_config on the meta device; ValueError if the architecture generates no text.

    The config is the model's from then on.
    """
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, **arguments)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise ValueError(f"{config.model_type} is not a causal language model; methods work in those alone") from None


def load_setting(
    setting: Setting,
    model: str,
    dtype: str = "auto",
    device: str = "cpu",
    calibrated: Callable[[Any, LongAttnConfig], LongAttnConfig] | None = None,
) -> Any:
    """A causal language model under a setting, for inference: weights loaded, rope edited, adapter merged, method applied.

    Args:
        dtype: see `precision_of`.
        calibrated: from the loaded model and the setting's method to the one that is applied; None for the method itself.
    """
    source = setting.model or model
    config = _edited_config(setting, source)
    loaded = load_weights(source, config=config, dtype=precision_of(source, dtype, device))
    if setting.adapter is not None:
        loaded = _merged(_with_adapter(loaded, setting.adapter), setting.adapter)
    if setting.config is not None:
        with knowing():
            apply(loaded, beside_own(loaded, calibrated(loaded, setting.config) if calibrated else setting.config))
    return loaded.to(device).eval()


class OneModel:
    """Loads settings of one checkpoint: the same model under method after method, the checkpoint's own beside each. Settings
    of the rotation, or with other weights, get a model of their own.
    """

    def __init__(self, model: str, dtype: str = "auto", device: str = "cpu") -> None:
        self.model, self.dtype, self.device = model, dtype, device
        self.loaded: Any = None
        self.own = LongAttnConfig()

    def __call__(self, setting: Setting) -> Any:
        if setting.rope is not None or setting.adapter is not None or setting.model is not None:
            return load_setting(setting, self.model, self.dtype, self.device)
        if self.loaded is None:
            self.loaded = load_setting(Setting(UNMODIFIED), self.model, self.dtype, self.device)
            self.own = beside_own(self.loaded, LongAttnConfig())
        if setting.config is None:
            return self.loaded
        with knowing():
            return apply(self.loaded, filled(setting.config, self.own))


def check_setting(setting: Setting, model: str) -> ModelFacts:
    """Everything that can be wrong with a setting on a model, found on its config alone, before any weights are read.

    Returns:
        What the methods know about the model; `train_length` among it.

    Raises:
        ValueError: the method does not fit the model, or clashes with its position encoding.

    Warns of an adapter that no word about attention comes with.
    """
    check_model(setting.model or model)
    if setting.adapter is not None:
        check_model(setting.adapter, adapter=True)
    config = _edited_config(setting, setting.model or model)
    try:
        empty = build(config)
        if setting.adapter is not None:
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # loading says the same
                _with_adapter(empty, setting.adapter)
        if (method := setting.config or _adapters_method(setting, config)) is not None:
            apply(empty, beside_own(empty, method))
        known = method or running(empty)
        told = setting.train_length or (None if known is None else known.train_length)
        return bound_config(empty, LongAttnConfig(train_length=told))[1]
    except (ValueError, RuntimeError, KeyError) as error:  # the latter two of PEFT: other shapes, no such kind of adapter
        raise ValueError(f"setting {setting.name!r}: {error}") from None


def beside_own(model: Any, asked: LongAttnConfig) -> LongAttnConfig:
    """What is asked for and, in the slots that this leaves free, what the checkpoint runs itself."""
    try:
        own = config_of(model)
    except ValueError:
        return asked
    return filled(asked, own)


def filled(asked: LongAttnConfig, own: LongAttnConfig) -> LongAttnConfig:
    """What is asked for and, in the slots that this leaves free, another config's methods."""
    free = ("train_length", *SLOTS) if asked.train_length is None else SLOTS
    kept = {key: getattr(own, key) for key in free if getattr(asked, key) is None}
    return dataclasses.replace(asked, **kept, trained=own.trained if "train_length" in kept else asked.trained)


def own_method(model: str) -> str | None:
    """The method that a checkpoint records in its config, by name."""
    text = AutoConfig.from_pretrained(model).get_text_config()
    return short(text._attn_implementation) if is_ours(text._attn_implementation) else None


def _with_adapter(model: Any, adapter: str) -> Any:
    try:
        from peft import PeftModel
    except ImportError:
        raise ImportError('adapters need peft: pip install "hf_longattn[train]"') from None
    if not (Path(adapter) / ADAPTER).is_file():
        raise ValueError(f"{adapter} holds no adapter: there is no {ADAPTER} in it")
    try:
        return PeftModel.from_pretrained(model, adapter)
    except RuntimeError as error:
        if not (mismatches := [line.strip() for line in str(error).splitlines() if "size mismatch" in line]):
            raise
        raise ValueError(
            f"the adapter {adapter} was made from another model: {len(mismatches)} of its weights do not fit, first of them: "
            f"{mismatches[0]}"
        ) from None


def _merged(adapted: Any, adapter: str) -> Any:
    try:
        return adapted.merge_and_unload()
    except (AttributeError, NotImplementedError):  # of prompts, and of kinds that depend on the input
        kind = adapted.active_peft_config.peft_type.value
        raise ValueError(
            f"{adapter} is of a kind that cannot be merged into a model ({kind}): only merged ones are read"
        ) from None


def check_lengths(model: str, lengths: Sequence[int]) -> None:
    """Raise ValueError if a length lies beyond a model's learned position table, which no method can extend."""
    text = AutoConfig.from_pretrained(model).get_text_config()
    size = getattr(text, "max_position_embeddings", None)
    learned = not getattr(text, "rope_parameters", None) and not getattr(text, "alibi", False)
    if learned and size is not None and max(lengths) > size:
        raise ValueError(
            f"{model} learned its positions and ends at {size} tokens; {max(lengths)} cannot be read under any method: "
            "shorten the lengths, or use a model with rotary positions"
        )


def _edited_config(setting: Setting, source: str) -> Any:
    if setting.adapter is not None and (Path(setting.adapter) / "config.json").exists():
        source = setting.adapter
    config = AutoConfig.from_pretrained(source)
    if setting.rope is not None:
        edit_rope(config, setting.rope, setting.train_length)
    return config


def _adapters_method(setting: Setting, config: Any) -> LongAttnConfig | None:
    """The method that an adapter's folder records, if any."""
    if setting.adapter is None:
        return None
    if (method := method_in(saved_in(Path(setting.adapter) / ADAPTER))) is not None:
        return method
    if not is_ours(config.get_text_config()._attn_implementation):
        warn(
            f"setting {setting.name!r}: the adapter in {setting.adapter} records no attention, so it is measured without "
            "a method. If it was trained under one, name that in its entry of a settings file (method: ...)",
        )
    return None


def edit_rope(config: Any, encoding: str, train_length: int | None = None) -> Any:
    """A model's config with its position encoding changed, in place: "yarn:2" and the like (see `hf_longattn.rope`)."""
    name, numbers = parse_rope(encoding)
    return getattr(rope, name)(config, *numbers, **({} if name in ("prope", "nope") else {"train_length": train_length}))
