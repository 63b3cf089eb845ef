"""Recipes of training runs, as plain data: a YAML file, its overrides, and every check that needs nothing loaded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from ..checks import check_dtype
from ..config import listed
from ..evaluation.settings import Setting
from ..files import read_text
from ..slots.method import as_length, require_in
from ..slots.registry import did_you_mean

#: Numbers that an optimiser refuses below zero, long after the start.
NOT_NEGATIVE = {"learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"}
#: What else TrainingArguments knows, and why a recipe cannot take it.
REFUSED = {
    "label_smoothing_factor": "does not reach the recipes' own loss",
    "save_only_model": "leaves checkpoints that --resume cannot continue exactly",
    "remove_unused_columns": "takes the positions out of the windows",
}
#: What people call keys of TrainingArguments.
CALLED = {"lr": "learning_rate", "batch_size": "per_device_train_batch_size", "steps": "max_steps"}
#: Keys that are numbers of tokens, which may be given as "4k".
LENGTHS = (
    *("length", "skip.target_length", "calibrate", "needle.haystack_tokens"),
    *("evaluation.far", "evaluation.tokens", "evaluation.lengths", "evaluation.final_lengths"),
)
#: Keys that no run goes without.
NEEDED = {"output", "model", "data"}
#: Keys that may name files or folders.
PATHS = {"model", "tokenizer", "data", "heldout"}
RECIPES = ("continue_lora", "convert_distill", "method_lora", "needle_lora")


@dataclass
class Hub:
    """Options of reading data sets from the Hub; plain text files need none."""

    config: str | None = None  # the configuration of a Hub data set ("en" of allenai/c4)
    column: str = "text"  # the column that holds the text; without a text a column of messages is read, as chats
    answers: bool = False  # of chats: loss on what the assistant says alone
    streaming: bool = False  # read as training goes, without storing


@dataclass
class Strength:
    """λ of the blend with plain attention: from `start` to `end` over the first `share` of the steps, then constant."""

    start: float = 0.0
    end: float = 1.0
    share: float = 0.5


@dataclass
class Lora:
    r: int = 16
    alpha: int = 32
    dropout: float = 0.0
    targets: list[str] = field(default_factory=lambda: ["attention"])  # linear layers, "attention" for its own, "all-linear"


@dataclass
class Distill:
    """loss = weight · T² KL(teacher ‖ student) + (1 - weight) · cross-entropy, with both distributions at temperature T."""

    weight: float = 0.5
    temperature: float = 1.0


@dataclass
class Skip:
    """PoSE: windows in chunks, with jumps of position between them, so that distances up to target_length are seen."""

    target_length: int | None = None  # none: four times the trained length, or the windows where these are longer
    chunks: int = 2
    unskipped: float = 0.1  # share of the windows that stay as they are
    repeat: float = 0.0  # share of the windows whose last chunk repeats a piece of the first


@dataclass
class Needles:
    needles: int = 3
    haystack_tokens: int = 1_000_000  # how much of a streamed corpus is kept


@dataclass
class Schedule:
    """Learning rate: linear up over the first share of the steps, constant, linear down to zero over the last share."""

    warmup: float = 0.0
    cooldown: float = 0.0


@dataclass
class Evaluation:
    lengths: list[int] = field(default_factory=list)  # during training; none: the training length
    final_lengths: list[int] = field(default_factory=list)  # for the metrics file; none: the same, and a long text (see far)
    tokens: int = 8192  # held-out tokens read per length (at least one window)
    samples: int = 50  # needle texts per length
    # tokens of one long held-out text that is read at the end, beside a probe, up to the method's reach; 0: neither. none:
    # 16384, or less, so that measuring takes at most a third of the training's time
    far: int | None = None
    compare: bool = True  # with the unadapted base, with it under the untrained method, and under YaRN


@dataclass
class Recipe:
    """A training run; `hf-longattn train --help` has the keys that most runs set."""

    name: str = "custom"
    output: str | None = None
    model: str | None = None  # a model on the Hub or a directory
    tokenizer: str | None = None  # default: the model's
    dtype: str = "float32"  # of the weights; "auto": what the device multiplies fast

    data: Any = None  # text files, a Hub data set, or a list of them
    heldout: Any = None  # the same; none: the last part of the data
    hub: Hub = field(default_factory=Hub)
    length: int = 512
    packing: Literal["concat", "documents"] = "concat"
    positions: Literal["plain", "skip"] = "plain"
    skip: Skip = field(default_factory=Skip)
    needle: Needles | None = None

    method: Any = None  # "rerope+infoscale:window=4096", "scale_invariant@prope:0.5", or the slots written out
    strength: Strength | None = None
    calibrate: int = 0  # tokens to measure attention on before training; 0: none
    lora: Lora | None = None
    freeze: bool = False  # train nothing but the method's learned parameters
    distill: Distill | None = None

    schedule: Schedule | None = None
    sequence_parallel: int = 1  # processes that hold a part of each window and attend together (docs/engines.md)
    evaluation: Evaluation = field(default_factory=Evaluation)
    trainer: dict[str, Any] = field(default_factory=dict)  # any of transformers' TrainingArguments

    @property
    def setting(self) -> Setting:
        """Method and position encoding of the model that is trained.

        Raises:
            ValueError: unknown method, parameter or position, or parameters without a method.
        """
        return Setting.entry(self.name, {"method": self.method})

    @property
    def lengths(self) -> list[int]:
        return sorted(set(self.evaluation.lengths or [self.length]))

    @property
    def final_lengths(self) -> list[int]:
        return sorted({self.length, *(self.evaluation.final_lengths or self.lengths)})

    @property
    def longest(self) -> int:
        """The longest text that is trained on or measured, but for the long one at the end."""
        return max(*self.lengths, *self.final_lengths)

    @property
    def seed(self) -> int:
        return int(self.trainer.get("seed", 42))


def recipe_file(source: str) -> Path:
    """A recipe's YAML file: a path, or the bare name of one that comes with the package."""
    if source not in RECIPES:
        if Path(source).is_file():
            return Path(source)
        hint = did_you_mean(source, RECIPES)
        raise ValueError(f"there is no recipe {source!r}; {hint}give a YAML file or one of {', '.join(RECIPES)}")
    package = Path(__file__).parents[1]
    for folder in (package / "recipes", package.parent / "recipes"):  # of a wheel, of a checkout
        if (folder / f"{source}.yaml").is_file():
            return folder / f"{source}.yaml"
    raise ValueError(f"this installation lacks the file of the recipe {source!r}: reinstall hf_longattn")


def load_recipe(source: str | Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from a YAML file, a name or a mapping, and "key=value" overrides, with dots for nested keys; checked.

    Raises:
        ValueError: no such recipe, an unknown key (the close match is named), a value of the wrong type, or a contradiction.
    """
    try:
        import yaml
        from omegaconf import DictConfig, OmegaConf
        from omegaconf.errors import OmegaConfBaseException
    except ImportError:
        raise ImportError('training recipes need omegaconf: pip install "hf_longattn[train]"') from None
    for entry in overrides:
        if "=" not in entry:
            raise ValueError(f"{entry!r} is not an override; write key=value")
        try:
            OmegaConf.from_dotlist([entry])
        except yaml.YAMLError as error:
            raise ValueError(f"{entry!r} is not valid YAML: {getattr(error, 'problem', error)}") from None
    path = recipe_file(source) if isinstance(source, str) else None
    name = "the recipe" if path is None else path.name
    try:
        content: Any = source if path is None else read_text(path)
        file = OmegaConf.create(content)
        if not isinstance(file, DictConfig):
            raise ValueError(f"{path} is not a recipe: a recipe maps keys to values")
        given = OmegaConf.merge(file, OmegaConf.from_dotlist(list(overrides)))
        _check_keys(given)
        _read_lengths(given)
        if isinstance(targets := OmegaConf.select(given, "lora.targets"), str):
            OmegaConf.update(given, "lora.targets", listed(targets))
        recipe: Recipe = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Recipe), given))  # type: ignore[assignment]
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is not valid YAML: {error}") from None
    except (OmegaConfBaseException, TypeError) as error:  # the latter where a list stands for a mapping
        where = getattr(error, "full_key", None)
        said = str(error).splitlines()[0]
        said = f"this must be a list, for example {where}=[...]" if "is not a ListConfig" in said else said
        typed = where and any(f"{where}.".startswith(f"{entry.partition('=')[0].strip()}.") for entry in overrides)
        raise ValueError(": ".join(filter(None, (None if typed else name, where, said)))) from None
    for key, value in recipe.trainer.items():
        if key.endswith("_strategy") and value is False:
            recipe.trainer[key] = "no"  # what YAML makes of no
    if recipe.output is None:
        recipe.output = f"runs/{recipe.name}"
    check(recipe)
    return recipe


def _read_lengths(given: Any) -> None:
    """Put numbers of tokens in the place of "4k" and the like."""
    from omegaconf import ListConfig, OmegaConf

    for key in LENGTHS:
        value = OmegaConf.select(given, key)
        if isinstance(value, str):
            OmegaConf.update(given, key, as_length(value))
        elif isinstance(value, ListConfig):
            OmegaConf.update(given, key, [as_length(n) for n in value])


def dump(recipe: Recipe) -> str:
    """The resolved recipe as YAML; `load_recipe` reads it."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(recipe)))


def differences(before: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """The keys in which a recipe is not the one in a file that `dump` wrote: "trainer.max_steps (6, now 8)". Where a run lies
    is no difference, nor is how the path of a file or folder is written."""
    import yaml

    old, new = (dict(_flat(values)) for values in (before, yaml.safe_load(dump(recipe))))  # which reads 1e-05 as a word
    keys = [key for key in {**old, **new} if key != "output" and _meant(key, old) != _meant(key, new)]
    return [f"{key} ({_said(key, old)}, now {_said(key, new)})" for key in keys]


def _flat(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each value by its dotted key."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + str(key), value


def _meant(key: str, values: Mapping[str, Any]) -> Any:
    """Return the value of a key to compare it by: of files and folders their resolved paths."""
    value = values.get(key)
    if key not in PATHS or value is None:
        return value
    paths = [Path(entry).expanduser() for entry in (value if isinstance(value, list) else [value])]
    return [str(path.resolve() if path.exists() or "*" in str(path) else path) for path in paths]


def _said(key: str, values: Mapping[str, Any]) -> str:
    return "not set" if key not in values else "null" if values[key] is None else str(values[key])


def check(recipe: Recipe) -> None:
    """Raise ValueError for whatever can be seen to be wrong without opening a file."""
    for part in (_check_inputs, _check_method, _check_distill, _check_skip, _check_parallel, _check_trainer):
        part(recipe)


def _check_inputs(recipe: Recipe) -> None:
    if recipe.model is None:
        raise ValueError("give a model to train: model=NAME or a directory")
    check_dtype(recipe.dtype, "auto")
    if recipe.data is None:
        raise ValueError("data is missing: give text files or a data set, data=FILE or data=OWNER/NAME:SPLIT")
    for name, value in (("data", recipe.data), ("heldout", recipe.heldout)):
        entries = value if isinstance(value, list) else [value]
        if value is not None and not all(isinstance(entry, str) and entry for entry in entries):
            raise ValueError(f"{name} must be a file, a data set or a list of them, got {value!r}")
    if min(*recipe.lengths, *recipe.final_lengths) < 2:
        raise ValueError("length and evaluation lengths must be at least 2 tokens")
    if recipe.evaluation.far is not None and recipe.evaluation.far < 0:
        raise ValueError(f"evaluation.far is a number of tokens, or 0, got {recipe.evaluation.far}")
    if recipe.needle is not None and recipe.evaluation.samples < 1:
        raise ValueError(f"evaluation.samples, needle texts per length, must be at least 1, got {recipe.evaluation.samples}")
    if recipe.hub.answers and recipe.needle is not None:
        raise ValueError("hub.answers and needle exclude each other: needles have answers of their own")
    if recipe.hub.streaming and recipe.heldout is None and recipe.needle is None:
        raise ValueError("a streamed data set has no last part to hold out: give heldout")


def _check_method(recipe: Recipe) -> None:
    attention = recipe.setting.config
    if recipe.strength is not None:
        if attention is None or not hasattr(attention.logit_map, "strength"):
            raise ValueError(f"a strength schedule needs a method with a strength (scale_invariant), not {recipe.method}")
        _require_shares("strength", recipe.strength, "start", "end", "share")
        if recipe.trainer.get("load_best_model_at_end"):
            raise ValueError(
                "trainer.load_best_model_at_end may take the weights of a step of less strength, which the model would then "
                "run at strength.end: leave it out, or take strength=null"
            )
    if recipe.calibrate and attention is None:
        raise ValueError("calibrate measures attention for a method, and none is given")
    if recipe.freeze and (attention is None or recipe.lora is not None):
        raise ValueError("freeze leaves the method's learned parameters to train: give a method, and lora=null")


def _check_distill(recipe: Recipe) -> None:
    if recipe.distill is None:
        return
    _require_shares("distill", recipe.distill, "weight")
    if not recipe.distill.temperature > 0:
        raise ValueError("distill.temperature must be > 0")
    if recipe.lora is None:
        raise ValueError("the teacher of a distillation is the model without its adapter: it needs lora")
    if heads := {"lm_head", "embed_tokens", "all-linear"} & set(recipe.lora.targets):
        raise ValueError(f"teacher and student share embeddings and head: take {sorted(heads)} out of lora.targets")
    if recipe.needle is not None:
        raise ValueError("distill and needle exclude each other: the unmodified model does not know the answer")


def _check_skip(recipe: Recipe) -> None:
    if recipe.positions != "skip":
        return
    if recipe.packing == "documents":
        raise ValueError("positions: skip works on plain windows of text, not on packed documents")
    _require_shares("skip", recipe.skip, "unskipped", "repeat")
    if recipe.needle is not None and recipe.skip.repeat:
        raise ValueError("skip.repeat overwrites a part of each text, and needles with it: set it to 0")
    if not 2 <= recipe.skip.chunks <= recipe.length // 2:
        raise ValueError(f"skip.chunks must lie in [2, {recipe.length // 2}], got {recipe.skip.chunks}")
    if (target := recipe.skip.target_length) is not None and target <= recipe.length:
        raise ValueError(f"skip.target_length must exceed length ({recipe.length}), got {target}")


def _check_parallel(recipe: Recipe) -> None:
    count = recipe.sequence_parallel
    if count < 1 or recipe.length % count:
        raise ValueError(f"sequence_parallel must divide length ({recipe.length}), got {count}")
    if count > 1:
        reasons = {
            "a method, whose attention function does it": recipe.setting.config is None,
            "positions: plain (they may not jump)": recipe.positions != "plain",
            "no distill: the teacher is the model without a method": recipe.distill is not None,
            "data that is not streamed": recipe.hub.streaming,
        }
        if missing := [reason for reason, holds in reasons.items() if holds]:
            raise ValueError(f"sequence_parallel > 1 needs {' and '.join(missing)}")


def _check_trainer(recipe: Recipe) -> None:
    if recipe.schedule is not None:
        require_in("schedule.warmup + schedule.cooldown", recipe.schedule.warmup + recipe.schedule.cooldown, 0.0, 1.0)
        if {"lr_scheduler_type", "warmup_steps", "warmup_ratio", "lr_scheduler_kwargs"} & set(recipe.trainer):
            raise ValueError("schedule and trainer.lr_scheduler_type (or trainer.warmup_*) exclude each other: schedule=null")
    for key in NOT_NEGATIVE & recipe.trainer.keys():
        require_in(f"trainer.{key}", recipe.trainer[key], 0.0, math.inf)
    if recipe.trainer.get("max_steps", -1) <= 0:
        raise ValueError("trainer.max_steps must say how many steps to train")
    for key in {"per_device_train_batch_size", "gradient_accumulation_steps"} & recipe.trainer.keys():
        require_in(f"trainer.{key}", recipe.trainer[key], 1, math.inf)
    for key, why in REFUSED.items():
        if recipe.trainer.get(key):
            raise ValueError(f"trainer.{key} {why}: leave it out")
    logs, saves = (recipe.trainer.get(k, 500) for k in ("logging_steps", "save_steps"))
    if recipe.trainer.get("save_strategy", "steps") == "steps" and (saves < 1 or logs < 1 or saves % logs):
        raise ValueError(
            f"trainer.save_steps ({saves}) must be a multiple of trainer.logging_steps ({logs}): a resumed run would log "
            "other means"
        )


def _require_shares(section: str, values: Any, *names: str) -> None:
    for name in names:
        require_in(f"{section}.{name}", getattr(values, name), 0.0, 1.0)


def _check_keys(given: Any) -> None:
    """Raise for keys of TrainingArguments at the top, for unknown ones, and for values of other types in their place."""
    from omegaconf import OmegaConf
    from transformers import TrainingArguments

    hints, own = get_type_hints(TrainingArguments), {f.name: f for f in dataclasses.fields(Recipe)}
    known = {f.name: hints[f.name] for f in dataclasses.fields(TrainingArguments) if f.name != "output_dir"}
    if outside := sorted(key for key in given if key in known and key not in own):
        raise ValueError(f"{outside[0]} belongs under trainer: write trainer.{outside[0]}=...")
    if not isinstance(trainer := given.get("trainer") or {}, Mapping):
        raise ValueError(f"trainer must map keys of transformers' TrainingArguments to values, got {trainer!r}")
    for place, keys in (("", given), ("trainer.", trainer)):
        if other := next((key for key in keys if key in CALLED), None):
            raise ValueError(f"there is no key {place}{other}; did you mean trainer.{CALLED[other]}?")
    if "output_dir" in trainer:
        raise ValueError("trainer.output_dir is the recipe's own output: use output")
    _check_known("", given, own, f"a recipe has {', '.join(own)}")
    _check_known("trainer.", trainer, known, "trainer has the keys of transformers' TrainingArguments")
    for name, kind in get_type_hints(Recipe).items():
        if (value := given.get(name)) is not None:
            _check_value(own[name], value, next(filter(dataclasses.is_dataclass, (kind, *get_args(kind))), None))
    plain = {bool, int, float, str, type(None)}  # what omegaconf knows; other types are left to transformers
    typed = [(key, (kind if plain.issuperset(get_args(kind) or (kind,)) else Any) | None, None) for key, kind in known.items()]
    keys = OmegaConf.structured(dataclasses.make_dataclass("TrainingArguments", typed))
    OmegaConf.merge(OmegaConf.create({"trainer": keys}), {"trainer": trainer})


def _check_known(place: str, given: Any, known: Iterable[str], there: str) -> None:
    if (unknown := next((key for key in given if key not in known), None)) is not None:
        raise ValueError(f"there is no key {place}{unknown}; {did_you_mean(unknown, known)}{there}")


def _check_value(key: dataclasses.Field[Any], value: Any, section: Any) -> None:
    """Raise for a word for "none" that YAML does not know, a value in place of a section, or an unknown key of a section."""
    none = f"{key.name}=null for none"
    if section is None:
        if key.default is None and key.name not in NEEDED and str(value).lower() in {"none", "no", "false"}:
            raise ValueError(f"{key.name} cannot be {value!r}: write {none}")
        return
    names = [f.name for f in dataclasses.fields(section)]
    if not isinstance(value, Mapping):
        other = f", or {none}" if key.default is None else ""
        raise ValueError(f"{key.name} cannot be {value!r}, it has {', '.join(names)}: write {key.name}.{names[0]}=...{other}")
    _check_known(f"{key.name}.", value, names, f"{key.name} has {', '.join(names)}")
