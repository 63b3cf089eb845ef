"""Checkpoints: their class and dtype, their weights loaded whole or refused, and the files that go with them."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from ..checks import Refused, check_dtype, check_finite, read_text
from ..core.kernels.precision import multiplies_fast
from ..integration.classes import own_class
from ..integration.internals import adapter_classes, classes_for, get_implementation, is_passed_over, load_reports
from ..integration.max_length import announce_beside
from ..integration.names import is_longattn_name, short
from ..integration.saved_method import ADAPTER

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
    return loaded if adapter is None else with_adapter(loaded, adapter)


def _few(keys: Iterable[str]) -> str:
    names = sorted(keys)
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


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


def build(config: Any, **arguments: Any) -> Any:
    """The model of a checkpoint's config, of its own class, on the meta device; ValueError if transformers has none.

    The config is the model's from then on.
    """
    kind = class_of(config)
    with torch.device("meta"), unfit(f"transformers builds no {kind.__name__} of this config"):
        return kind._from_config(config, **arguments)


def with_adapter(model: Any, adapter: str) -> Any:
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


def own_method(model: Any) -> str | None:
    """The method that a checkpoint records in its config, or that a loaded model runs, by name."""
    text = config_from(model).get_text_config()
    return short(name) if is_longattn_name(name := get_implementation(text)) else None


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
