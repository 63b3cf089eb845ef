"""Models under settings: what is wrong with one found on configs alone, and weights loaded, edited, merged and changed."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from ..checks import Refused, check_dtype, check_finite, check_model, read_text
from ..config import LongAttnConfig, PerLayerConfig
from ..core.kernels.precision import multiplies_fast
from ..integration import apply, get_config, rope
from ..integration.classes import own_class
from ..integration.internals import adapter_classes, classes_for, get_implementation, is_passed_over, load_reports
from ..integration.max_length import announce_beside
from ..integration.model import no_untrained_warning, running
from ..integration.names import is_longattn_name, parsed_config, short
from ..integration.planning import bound_config
from ..integration.saved_method import ADAPTER, method_in, saved_in
from ..scoped_method import AsItWas
from ..slots.method import SLOTS, ModelFacts
from ..user_warnings import warn
from .settings import UNMODIFIED, Setting, parse_rope

#: What a checkpoint may hold beside config, weights and tokenizer: of processors, and of sentence-transformers.
COMPANIONS: tuple[str, ...] = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
COMPANIONS += ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")


def config_from(model: Any) -> Any:
    """The config of a checkpoint, or a copy of a loaded model's.

    ValueError: transformers makes none of what is there, or asks for code beside the checkpoint, which is not run.
    """
    if not isinstance(model, str):
        return copy.deepcopy(model.config)
    with unfit(f"{model}: its config.json is damaged, or of a newer transformers"):
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        if not all(isinstance(name, str) for name in config.architectures or ()):
            raise TypeError(f"architectures is {config.architectures!r}")
    return config


@contextmanager
def unfit(what: str) -> Iterator[None]:
    """Turn errors that other libraries raise about unexpected values into `Refused`."""
    try:
        yield
    except (ValueError, OSError, ImportError):
        raise
    except Exception as error:
        raise Refused(f"{what} ({type(error).__name__}: {error})") from error


def precision_of(model: str, dtype: str = "auto", device: str = "cpu") -> str:
    """The precision to run a checkpoint in: as asked; "auto" is its own, or float32 where that is one that the device
    multiplies slowly. Quantised checkpoints stay "auto".
    """
    check_dtype(dtype, "auto")
    config, own = config_from(model), own_precision(model)
    half = own in ("bfloat16", "float16") and not getattr(config, "quantization_config", None)
    return "float32" if dtype == "auto" and half and not multiplies_fast(own, device) else dtype


def own_precision(model: str) -> str:
    """Return the dtype that a checkpoint's config names for its weights."""
    config = config_from(model)
    return str(config.dtype or config.get_text_config().dtype).removeprefix("torch.")


def load_weights(source: str, config: Any = None, adapter: str | None = None, **arguments: Any) -> Any:
    """A checkpoint's model, of the class that it was saved from, with all of its weights and no others.

    Args:
        adapter: one to put on it, made for this class, or with the head of another (a classifier from a language model).

    Raises:
        Refused: weights are missing, left over, of another shape, NaN or infinite.
    """
    config = config_from(source) if config is None else config
    other = None if adapter is None else class_for(adapter, config)
    kind = other or class_of(config)
    with load_reports() as report:
        try:
            loaded, info = kind.from_pretrained(
                source, config=config, output_loading_info=True, ignore_mismatched_sizes=True, **arguments
            )
        except (UnpicklingError, SafetensorError) as error:
            said = "they hold more than tensors, and nothing else of a pickle is read"
            said = str(error) if isinstance(error, SafetensorError) else said
            raise Refused(f"{source}: its weights are not read: {said}") from error
        except RuntimeError as error:
            if not report:
                raise
            raise Refused(f"{source}: {error}\n{report[0]}") from error
    wrong = {
        "are not in the checkpoint, and would be random": info["missing_keys"],
        "are in the checkpoint, and would be dropped": info["unexpected_keys"],
        "have another shape there, and would be random": {key for key, *_ in info["mismatched_keys"]},
    }
    if other is not None:  # the head comes with the adapter
        wrong = {what: {k for k in keys if k.startswith(kind.base_model_prefix + ".")} for what, keys in wrong.items()}
    if found := [f"{len(keys)} weights {what} ({_few(keys)})" for what, keys in wrong.items() if keys]:
        named = ", ".join(config.architectures or ["no class"])
        raise Refused(
            f"{source} is not a whole {kind.__name__}: {'; '.join(found)}. Its config names {named}: correct that, or save it "
            "again from the class that its weights belong to"
        )
    check_finite(loaded, source)
    return loaded if adapter is None else _with_adapter(loaded, adapter)


def class_for(adapter: str, config: Any) -> Any:
    """The class that an adapter is made for by its task; None if that is the checkpoint's own."""
    if Path(adapter).is_dir() and not (Path(adapter) / ADAPTER).is_file():
        raise ValueError(f"{adapter} holds no adapter: there is no {ADAPTER} in it")
    try:
        from peft import auto
    except ImportError:
        raise ImportError('adapters need peft: pip install "hf_longattn[train]"') from None

    task = PreTrainedConfig.get_config_dict(adapter, _configuration_file=ADAPTER)[0].get("task_type")
    if not isinstance(task, str | None):
        raise ValueError(f"{adapter}: task_type in its {ADAPTER} is {task!r}, and names no task")
    own, peft_class = class_of(config), auto.MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(task)
    if peft_class is None or (own.can_generate() and task == "CAUSAL_LM"):
        return None
    kinds = [kind for _, target in adapter_classes(peft_class) for kind in classes_for(target, config)]
    return None if own in kinds else next(iter(kinds), None)


def class_of(config: Any) -> Any:
    """The class that a checkpoint was saved from; ValueError if transformers has none for it."""
    if (kind := own_class(config)) is None:
        if named := " or ".join(config.architectures or ()):
            raise ValueError(f"transformers has no {named} for {config.model_type}, and code beside a checkpoint is not run")
        raise ValueError(f"{config.model_type} is not a causal language model; methods work in those alone")
    return kind


def speaks(config: Any) -> bool:
    """Tell whether a checkpoint's model predicts the text that it reads, as losses and answers need."""
    return bool(class_of(config).can_generate()) and not config.is_encoder_decoder


def check_reads(config: Any, source: str, head: bool = True) -> None:
    """Raise ValueError for a model that reads text with an encoder; and for one without a language-model head, if one is
    needed."""
    kind = class_of(config).__name__
    if config.is_encoder_decoder:
        raise ValueError(
            f"{source} is a {kind}, which reads text with an encoder: methods go into causal attention alone, and would not "
            "change how it reads"
        )
    if head and not speaks(config):
        raise ValueError(
            f"{source} is a {kind}, which has no language-model head: there is no loss of text to measure, or to train by. "
            "Measure the language model that it was made from, and put the method into this one by hf-longattn extend or "
            "hf_longattn.apply; hf-longattn inspect looks into its attention"
        )


def _few(keys: Iterable[str]) -> str:
    names = sorted(keys)
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


def load_tokenizer(source: str) -> Any:
    """AutoTokenizer.from_pretrained; ValueError names what is missing."""
    folder = Path(source)
    if folder.is_dir() and not any(p.name.startswith(("tokenizer", "vocab", "spiece")) for p in folder.iterdir()):
        raise ValueError(
            f"{source} holds no tokenizer: there is no tokenizer.json in it. Save one there: "
            f"AutoTokenizer.from_pretrained(BASE).save_pretrained({source!r})"
        )
    with unfit(f"the tokenizer of {source} is damaged, or of a newer transformers"):
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)


def carry(source: str, folder: Path, kind: Any) -> None:
    """Put into a saved model's folder what else belongs to the checkpoint that it is made from: processors, the modules behind
    an embedder, and weights that transformers passes over (heads that predict several tokens).

    Args:
        kind: the model's class.
    """
    there = Path(source)
    if there.is_file():
        return
    try:
        if not there.is_dir():
            there = Path(snapshot_download(source, allow_patterns=[*COMPANIONS]))
        modules = there / "modules.json"
        paths = [m["path"] for m in json.loads(read_text(modules)) if m.get("path")] if modules.is_file() else []
        if paths and there != Path(source):
            snapshot_download(source, allow_patterns=[f"{path}/*" for path in paths])
    except OSError as error:
        raise Refused(f"what belongs to {source} beside its weights could not be read: {error}") from None
    for file in (f for part in (*COMPANIONS, *(f"{path}/**/*" for path in paths)) for f in there.glob(part) if f.is_file()):
        target = folder / file.relative_to(there)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    announce_beside(folder)
    _carry_weights(there, folder, kind)


def _carry_weights(there: Path, folder: Path, kind: Any) -> None:
    """Copy the weights that a checkpoint's class ignores into a file of their own beside the others."""
    left = {key: file for key, file in _tensors(there).items() if is_passed_over(kind, key)}
    if not left:
        return
    name, index = "model-passed-over.safetensors", folder / "model.safetensors.index.json"
    held = {key: file.name for key, file in _tensors(folder).items()} | dict.fromkeys(left, name)
    save_file({key: _tensor(file, key) for key, file in left.items()}, folder / name, {"format": "pt"})
    old = json.loads(read_text(index)) if index.is_file() else {"metadata": {}}
    index.write_text(json.dumps(old | {"weight_map": held}, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _tensors(folder: Path) -> dict[str, Path]:
    """The weights in a folder's safetensors, by name, and the file that each is in."""
    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= dict.fromkeys(opened.keys(), file)
    return found


def _tensor(file: Path, key: str) -> torch.Tensor:
    with safe_open(file, "pt") as opened:
        tensor: torch.Tensor = opened.get_tensor(key)
    return tensor


def build(config: Any, **arguments: Any) -> Any:
    """The model of a checkpoint's config, of its own class, on the meta device; ValueError if transformers has none.

    The config is the model's from then on.
    """
    kind = class_of(config)
    with torch.device("meta"), unfit(f"transformers builds no {kind.__name__} of this config"):
        return kind._from_config(config, **arguments)


def load_setting(
    setting: Setting,
    model: str,
    dtype: str = "auto",
    device: str = "cpu",
    calibrated: Callable[[Any, LongAttnConfig], LongAttnConfig] | None = None,
) -> Any:
    """A model under a setting, for inference: weights loaded, rope edited, adapter merged, method applied.

    Args:
        dtype: see `precision_of`.
        calibrated: from the loaded model and the setting's method to the one that is applied; None for the method itself.
    """
    source = setting.model or model
    config = _edited_config(setting, source)
    loaded = load_weights(source, config, setting.adapter, dtype=precision_of(source, dtype, device))
    if setting.adapter is not None:
        loaded = _merged(loaded, setting.adapter)
    if setting.config is not None:
        with no_untrained_warning():
            apply(loaded, beside_own(loaded, calibrated(loaded, setting.config) if calibrated else setting.config))
    return loaded.to(device).eval()


class OneModel:
    """Loads settings of one checkpoint: the same model under method after method, the checkpoint's own beside each. Settings
    of the rotation, or with other weights, get a model of their own.

    Args:
        model: a checkpoint; or a loaded model, which `put_back` leaves as it was, and which is asked for methods alone.
    """

    def __init__(self, model: Any, dtype: str = "auto", device: str = "cpu") -> None:
        self.model, self.dtype, self.device = model, dtype, device
        self.loaded: Any = None
        if not isinstance(model, str):
            self._take(model)

    def __call__(self, setting: Setting) -> Any:
        if setting.rope is not None or setting.adapter is not None or setting.model is not None:
            return load_setting(setting, self.model, self.dtype, self.device)
        if self.loaded is None:
            self._take(load_setting(Setting(UNMODIFIED), self.model, self.dtype, self.device))
        self.put_back()
        if setting.config is not None:
            with no_untrained_warning():
                self.was.put(filled(setting.config, self.own))
        return self.loaded

    def _take(self, model: Any) -> None:
        self.loaded = model
        self.was, self.own = AsItWas(model), beside_own(model, LongAttnConfig())

    def put_back(self) -> None:
        """Let the model run what it ran."""
        if self.loaded is not None:
            self.was.give_back()


def check_setting(setting: Setting, model: Any, head: bool = True) -> ModelFacts:
    """Everything that can be wrong with a setting on a model, found on its config alone, before any weights are read.

    Args:
        model: a checkpoint, or a loaded model.
        head: whether losses or answers will be measured, which takes a language-model head.

    Returns:
        What the methods know about the model; `train_length` among it.

    Raises:
        ValueError: the method does not fit the model, or clashes with its position encoding.

    Warns of an adapter that no word about attention comes with.
    """
    source = setting.model or model
    if isinstance(source, str):
        check_model(source)
    elif setting.rope is not None or setting.adapter is not None:
        raise ValueError(f"setting {setting.name!r}: a loaded model is measured under methods alone; give its name or folder")
    if setting.adapter is not None:
        check_model(setting.adapter, adapter=True)
    config = _edited_config(setting, source)
    _check_remapped(setting, config)
    check_reads(config, source if isinstance(source, str) else "the model", head)
    try:
        empty = build(config)
        if setting.adapter is not None:
            if (other := class_for(setting.adapter, config)) is not None:
                raise ValueError(f"the adapter {setting.adapter} makes a {other.__name__} of a {type(empty).__name__}")
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # loading says the same
                _with_adapter(empty, setting.adapter)
        if (method := setting.config or _adapters_method(setting, config)) is not None:
            apply(empty, beside_own(empty, method))
        known = method or running(empty)
        told = setting.train_length or (None if known is None else known.train_length)
        facts = bound_config(empty, LongAttnConfig(train_length=told))[1]
        if told is None or setting.train_length or known is None or not known.trained:
            return facts
        return dataclasses.replace(facts, trained=known.trained)  # as it was told or read when that method came
    except (ValueError, RuntimeError, KeyError) as error:  # the latter two of PEFT: other shapes, no such kind of adapter
        raise ValueError(f"setting {setting.name!r}: {error}") from None


def _check_remapped(setting: Setting, config: Any) -> None:
    """Raise ValueError if a setting changes the rotation of a checkpoint whose own method goes on remapping it."""
    own, asked = parsed_config(config.get_text_config()), setting.config
    remap = None if own is None or (asked is not None and asked.remap is not None) else own.remap
    if setting.rope is not None and remap is not None and not remap.stack:
        raise ValueError(
            f"setting {setting.name!r}: the checkpoint runs {remap.name}, which remaps the rotation that it was trained with, "
            f"and {setting.rope} changes that rotation. Take the method out first, by hf_longattn.remove(model) and "
            "hf_longattn.save(model, folder), or give the model that it was put into"
        )


def beside_own(model: Any, asked: LongAttnConfig) -> LongAttnConfig:
    """Join the requested method with the checkpoint's own methods in the slots that the request leaves free."""
    try:
        own = get_config(model)
    except ValueError:
        return asked
    return filled(asked, own)


def filled(asked: LongAttnConfig, own: LongAttnConfig) -> LongAttnConfig:
    """Join a config with another's methods in the slots that it leaves free; a `PerLayerConfig` leaves none free."""
    if isinstance(asked, PerLayerConfig):
        return asked if asked.train_length or not own.train_length else asked.replace(train_length=own.train_length)
    free = ("train_length", *SLOTS) if asked.train_length is None else SLOTS
    kept = {key: getattr(own, key) for key in free if getattr(asked, key) is None}
    return dataclasses.replace(asked, **kept, trained=own.trained if "train_length" in kept else asked.trained)


def own_method(model: Any) -> str | None:
    """The method that a checkpoint records in its config, or that a loaded model runs, by name."""
    text = config_from(model).get_text_config()
    return short(name) if is_longattn_name(name := get_implementation(text)) else None


def _with_adapter(model: Any, adapter: str) -> Any:
    from peft import PeftModel

    try:
        with unfit(f"the adapter {adapter} is damaged, or of a newer PEFT"):
            return PeftModel.from_pretrained(model, adapter)
    except (ValueError, OSError) as error:
        if not (mismatches := [line.strip() for line in str(error).splitlines() if "size mismatch" in line]):
            raise Refused(str(error)) from error
        raise Refused(
            f"the adapter {adapter} was made from another model: {len(mismatches)} of its weights do not fit, first of them: "
            f"{mismatches[0].removesuffix(')')}"
        ) from None


def _merged(adapted: Any, adapter: str) -> Any:
    try:
        return adapted.merge_and_unload()
    except (AttributeError, NotImplementedError):  # of prompts, and of kinds that depend on the input
        kind = adapted.active_peft_config.peft_type.value
        raise ValueError(
            f"{adapter} is of a kind that cannot be merged into a model ({kind}): only merged ones are read"
        ) from None


def check_lengths(model: Any, lengths: Sequence[int]) -> None:
    """Raise ValueError if a length lies beyond a model's learned position table, which no method can extend."""
    text = config_from(model).get_text_config()
    size = getattr(text, "max_position_embeddings", None)
    learned = not getattr(text, "rope_parameters", None) and not getattr(text, "alibi", False)
    if learned and size is not None and max(lengths) > size:
        named = model if isinstance(model, str) else "the model"
        raise ValueError(
            f"{named} learned its positions and ends at {size} tokens; {max(lengths)} cannot be read under any method: "
            "shorten the lengths, or use a model with rotary positions"
        )


def _edited_config(setting: Setting, source: Any) -> Any:
    if setting.adapter is not None and (Path(setting.adapter) / "config.json").exists():
        source = setting.adapter
    config = config_from(source)
    if setting.rope is not None:
        edit_rope(config, setting.rope, setting.train_length)
    return config


def _adapters_method(setting: Setting, config: Any) -> LongAttnConfig | None:
    """The method that an adapter's folder records, if any."""
    if setting.adapter is None:
        return None
    if (method := method_in(saved_in(Path(setting.adapter) / ADAPTER))) is not None:
        return method
    if not is_longattn_name(get_implementation(config.get_text_config())):
        warn(
            f"setting {setting.name!r}: the adapter in {setting.adapter} records no attention, so it is measured without "
            "a method. If it was trained under one, name that in its entry of a settings file (method: ...)",
        )
    return None


def edit_rope(config: Any, encoding: str, train_length: int | None = None) -> Any:
    """A model's config with its position encoding changed, in place: "yarn:2" and the like (see `hf_longattn.rope`)."""
    name, numbers = parse_rope(encoding)
    return getattr(rope, name)(config, *numbers, **({} if name in ("prope", "nope") else {"train_length": train_length}))
