"""Checkpoints: their class and dtype, their weights loaded whole or refused, and the files that go with them."""

from __future__ import annotations

import copy
import functools
import json
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from ..checks import Refused, check_finite, check_model
from ..config import LongAttnConfig
from ..core.kernels.precision import multiplies_fast
from ..files import ADAPTER_FILE, read_text
from ..integration import rope
from ..integration.classes import own_class
from ..integration.guards import end_of
from ..integration.internals import adapter_classes, classes_for, is_passed_over, load_reports
from ..integration.layers import pretrained
from ..integration.max_length import announce_beside
from ..integration.names import parsed_config
from .settings import Setting, parse_rope

#: What a checkpoint may hold beside config, weights and tokenizer: of processors, and of sentence-transformers.
COMPANIONS: tuple[str, ...] = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
COMPANIONS += ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")


class Checkpoint:
    """A model to build, to load or to measure: what its config says, read once, and its weights.

    Args:
        model: a folder, a name on the Hub, or a loaded model, which PEFT may wrap.
        adapter: the folder or the Hub name of one to put on it, made for this class, or with the head of another (a
            classifier from a language model).

    Raises:
        ValueError: there is no model, or no adapter, of that name, or a file of its weights is damaged; or a loaded model has
            prompts of PEFT's.
        TypeError: the model is nothing of these.
    """

    def __init__(self, model: Any, adapter: str | None = None) -> None:
        self.adapter, self.is_loaded = adapter, not isinstance(model, str)
        self.model: Any = pretrained(model) if self.is_loaded else model
        configs = (getattr(model, "peft_config", None) or {}).values()
        if kind := next((str(x.peft_type.value) for x in configs if x.is_prompt_learning), None):
            raise ValueError(
                f"the model reads a text behind the prompts of {kind}, which are not read here: give the base model"
            )
        self.name: str = "the model" if self.is_loaded else model
        if not self.is_loaded:
            check_model(model)
        if adapter is not None:
            check_model(adapter, adapter=True)

    @functools.cached_property
    def config(self) -> Any:
        """The config of a checkpoint, or a copy of a loaded model's.

        ValueError: transformers makes none of what is there, or asks for code beside the checkpoint, which is not run.
        """
        if self.is_loaded:
            return copy.deepcopy(self.model.config)
        with unfit(f"{self.model}: its config.json is damaged, or of a newer transformers"):
            config = AutoConfig.from_pretrained(self.model, trust_remote_code=False)
            if not all(isinstance(name, str) for name in config.architectures or ()):
                raise TypeError(f"architectures is {config.architectures!r}")
        return config

    @property
    def text_config(self) -> Any:
        """The part of the config that is of the language model."""
        return self.config.get_text_config()

    def check_tokens(self, ids: torch.Tensor) -> None:
        """Raise ValueError for tokens, (length,), that the model has no embedding of."""
        known = getattr(self.text_config, "vocab_size", None)
        if known is not None and (ids >= known).any():
            raise ValueError(
                f"the tokenizer gives token {ids.max()}, and the model's vocabulary has {known}: it is another model's. Give "
                "the model's own"
            )

    @property
    def dtype(self) -> str:
        """The dtype that the config names for the weights."""
        return str(self.config.dtype or self.text_config.dtype).removeprefix("torch.")

    @property
    def method(self) -> LongAttnConfig | None:
        """The method that the config records, or that a loaded model runs."""
        return parsed_config(self.text_config)

    @property
    def kind(self) -> Any:
        """The class that it was saved from; ValueError if transformers has none for it."""
        if (kind := own_class(self.config)) is None:
            model_type = self.config.model_type
            if named := " or ".join(self.config.architectures or ()):
                raise ValueError(f"transformers has no {named} for {model_type}, and code beside a checkpoint is not run")
            raise ValueError(f"{model_type} is not a causal language model; methods work in those alone")
        return kind

    @property
    def adapted_kind(self) -> Any:
        """The class that the adapter is made for by its task; None if that is the checkpoint's own, or there is none."""
        if self.adapter is None:
            return None
        if Path(self.adapter).is_dir() and not (Path(self.adapter) / ADAPTER_FILE).is_file():
            raise ValueError(f"{self.adapter} holds no adapter: there is no {ADAPTER_FILE} in it")
        try:
            from peft import auto
        except ImportError:
            raise ImportError('adapters need peft: pip install "hf_longattn[train]"') from None

        task = PreTrainedConfig.get_config_dict(self.adapter, _configuration_file=ADAPTER_FILE)[0].get("task_type")
        if not isinstance(task, str | None):
            raise ValueError(f"{self.adapter}: task_type in its {ADAPTER_FILE} is {task!r}, and names no task")
        own, peft_class = self.kind, auto.MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(task)
        if peft_class is None or (own.can_generate() and task == "CAUSAL_LM"):
            return None
        kinds = [kind for _, target in adapter_classes(peft_class) for kind in classes_for(target, self.config)]
        return None if own in kinds else next(iter(kinds), None)

    @property
    def speaks(self) -> bool:
        """Whether the model predicts the text that it reads, as losses and answers need."""
        return bool(self.kind.can_generate()) and not self.config.is_encoder_decoder

    @property
    def is_half(self) -> bool:
        """Tell whether its weights are in half precision, and not quantised."""
        return self.dtype in ("bfloat16", "float16") and not getattr(self.config, "quantization_config", None)

    def precision(self, dtype: str = "auto", device: str = "cpu") -> str:
        """The precision to run it in: as asked; "auto" is its own, or float32 where that is one that the device multiplies
        slowly. Quantised checkpoints stay "auto".
        """
        return "float32" if dtype == "auto" and self.is_half and not multiplies_fast(self.dtype, device) else dtype

    def check_reads(self, head: bool = True) -> None:
        """Raise ValueError for a model that reads text with an encoder; and for one without a language-model head, if one is
        needed."""
        kind = self.kind.__name__
        if self.config.is_encoder_decoder:
            raise ValueError(
                f"{self.name} is a {kind}, which reads text with an encoder: methods go into causal attention alone, and "
                "would not change how it reads"
            )
        if head and not self.speaks:
            raise ValueError(
                f"{self.name} is a {kind}, which has no language-model head: there is no loss of text to measure, or to train "
                "by. Measure the language model that it was made from, and put the method into this one by hf-longattn extend "
                "or hf_longattn.apply; hf-longattn inspect looks into its attention"
            )

    @functools.cached_property
    def end(self) -> int | None:
        """The length of its table of positions, in tokens; None: it has none."""
        return end_of(self.text_config, self.build)

    def check_lengths(self, lengths: Sequence[int]) -> None:
        """Raise ValueError if a length lies beyond a position table, which no method can extend."""
        if self.end is not None and max(lengths) > self.end:
            raise ValueError(
                f"{self.name} takes its positions from a table, which ends at {self.end} tokens; {max(lengths)} cannot be "
                "read under any method: shorten the lengths, or use a model that computes rotary positions"
            )

    def under(self, setting: Setting) -> Checkpoint:
        """What a setting reads: the checkpoint that it names, or this one, with its adapter and its position encoding.

        ValueError: this is a loaded model, which is read under methods alone; or the setting changes the rotation of a
            checkpoint whose own method remaps it.
        """
        if self.is_loaded and setting.model is None and (setting.rope is not None or setting.adapter is not None):
            raise ValueError(
                f"setting {setting.name!r}: a loaded model is measured under methods alone; give its name or folder"
            )
        found = Checkpoint(setting.model or self.model, setting.adapter)
        if setting.adapter is not None and (Path(setting.adapter) / "config.json").exists():
            found.config = Checkpoint(setting.adapter).config
        elif setting.model is None:
            found.config = copy.deepcopy(self.config)
        if setting.rope is not None:
            remap = None if found.method is None else found.method.remap
            replaced = setting.config is not None and setting.config.remap is not None
            if remap is not None and not remap.stack and not replaced:
                raise ValueError(
                    f"setting {setting.name!r}: the checkpoint runs {remap.name}, which remaps the rotation that it was "
                    f"trained with, and {setting.rope} changes that rotation. Take the method out first, by "
                    "hf_longattn.remove(model) and hf_longattn.save(model, folder), or give the model that it was put into"
                )
            edit_rope(found.config, setting.rope, setting.train_length)
        return found

    def build(self, **arguments: Any) -> Any:
        """The model of the config, of its own class, on the meta device, with the adapter in it."""
        kind = self.kind
        with torch.device("meta"), unfit(f"transformers builds no {kind.__name__} of this config"):
            model = kind._from_config(copy.deepcopy(self.config), **arguments)
        if self.adapter is not None:
            if (other := self.adapted_kind) is not None:
                raise ValueError(f"the adapter {self.adapter} makes a {other.__name__} of a {kind.__name__}")
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # loading says the same
                _with_adapter(model, self.adapter)
        return model

    def load(self, **arguments: Any) -> Any:
        """The model, of the class that it was saved from, with all of its weights and no others, and the adapter on it.

        Raises:
            Refused: weights are missing, left over, of another shape, NaN or infinite.
        """
        other = self.adapted_kind
        kind = other or self.kind
        with load_reports() as report:
            try:
                loaded, info = kind.from_pretrained(
                    self.model, config=self.config, output_loading_info=True, ignore_mismatched_sizes=True, **arguments
                )
            except (UnpicklingError, SafetensorError) as error:
                said = "they hold more than tensors, and nothing else of a pickle is read"
                said = str(error) if isinstance(error, SafetensorError) else said
                raise Refused(f"{self.model}: its weights are not read: {said}") from error
            except RuntimeError as error:
                if not report:
                    raise
                raise Refused(f"{self.model}: {error}\n{report[0]}") from error
        wrong = {
            "are not in the checkpoint, and would be random": info["missing_keys"],
            "are in the checkpoint, and would be dropped": info["unexpected_keys"],
            "have another shape there, and would be random": {key for key, *_ in info["mismatched_keys"]},
        }
        if other is not None:  # the head comes with the adapter
            wrong = {w: {k for k in keys if k.startswith(kind.base_model_prefix + ".")} for w, keys in wrong.items()}
        if found := [f"{len(keys)} weights {what} ({_few(keys)})" for what, keys in wrong.items() if keys]:
            named = ", ".join(self.config.architectures or ["no class"])
            raise Refused(
                f"{self.model} is not a whole {kind.__name__}: {'; '.join(found)}. Its config names {named}: correct that, or "
                "save it again from the class that its weights belong to"
            )
        check_finite(loaded, self.model)
        return loaded if self.adapter is None else _with_adapter(loaded, self.adapter)


def edit_rope(config: Any, encoding: str, train_length: int | None = None) -> Any:
    """A model's config with its position encoding changed, in place: "yarn:2" and the like (see `hf_longattn.rope`)."""
    name, numbers = parse_rope(encoding)
    return getattr(rope, name)(config, *numbers, **({} if name in ("prope", "nope") else {"train_length": train_length}))


@contextmanager
def unfit(what: str) -> Iterator[None]:
    """Turn errors that other libraries raise about unexpected values into `Refused`."""
    try:
        yield
    except (ValueError, OSError, ImportError):
        raise
    except Exception as error:
        raise Refused(f"{what} ({type(error).__name__}: {error})") from error


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


def _with_adapter(model: Any, adapter: str) -> Any:
    from peft import PeftModel

    try:
        with unfit(f"the adapter {adapter} is damaged, or of a newer PEFT"), warnings.catch_warnings():
            warnings.filterwarnings("error", "Found missing adapter keys")  # PEFT goes on with layers that were never trained
            return PeftModel.from_pretrained(model, adapter)
    except (ValueError, OSError) as error:
        other, said = f"the adapter {adapter} was made from another model", str(error)
        if mismatches := [line.strip() for line in said.splitlines() if "size mismatch" in line]:
            first = mismatches[0].removesuffix(")")
            raise Refused(f"{other}: {len(mismatches)} of its weights do not fit, first of them: {first}") from None
        if "missing adapter keys" in said:
            missing = re.findall("'([^']+)'", said)
            raise Refused(f"{other}: {len(missing)} weights of this one are not in it ({_few(missing)})") from None
        raise Refused(said) from error


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
