"""A model card from what is known: what a saved folder says of itself, and what its maker adds."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from safetensors import safe_open
from transformers import AutoConfig

from ..checks import UNFINISHED
from ..config import PREFIX, TRIPWIRE, LongAttnConfig, length_of, listed, written
from ..files import ADAPTER_FILE, read_text
from ..integration.classes import loaders, task
from ..integration.internals import adapter_classes
from ..integration.saved_method import method_in, saved_in, type_of
from ..integration.trained_length import recorded
from ..slots.registry import modules_of

#: The tag of our cards, and the key of their metadata that holds the facts as data.
TAG = "hf_longattn"


def contents(directory: Path) -> tuple[dict[str, Any], LongAttnConfig]:
    """The saved config of a folder with a model or an adapter (which has a peft_type), and the method that it asks for.

    Raises:
        ValueError: there is neither, or it records no attention.
    """
    if not (saved := saved_in(path := directory / ADAPTER_FILE) or saved_in(path := directory / "config.json")):
        if any(directory.glob("checkpoint-*")):
            raise ValueError(UNFINISHED.format(folder=directory))
        raise ValueError(f"{directory} holds neither config.json nor {ADAPTER_FILE}: save a model or an adapter there first")
    if (config := method_in(saved)) is None:
        raise ValueError(
            f"{path} records no hf_longattn method, so that it needs nothing of this package: huggingface_hub uploads it "
            f"(hf upload REPO_ID {directory}). If it was to run a method, apply one, then save the model or the adapter"
        )
    return saved, config


@dataclass(frozen=True)
class Facts:
    """Facts about a model that its maker knows, checked on construction.

    Args:
        training_lengths: the lengths of the texts it was trained on, in tokens.
        training: further facts of its training by name, in words ({"data": "six novels", "steps": "150"}).
        metrics: {metric: {length in tokens: number}}, or a JSON file of that form.
        base_metrics: the same of the model before training, or of its base.
        evaluated_on: the text that the metrics were measured on; required with them.
        reach: how far it reads, in words of Markdown.
        license: as the Hub names it ("apache-2.0").

    Raises:
        ValueError: the metrics have another form, or lack evaluated_on; a length is none; training are no facts by name.
    """

    training_lengths: Sequence[int] = ()
    training: Mapping[str, str] | None = None
    metrics: Mapping[str, Mapping[int, float]] | str | Path | None = None
    base_metrics: Mapping[str, Mapping[int, float]] | str | Path | None = None
    evaluated_on: str | None = None
    reach: str | None = None
    license: str | None = None

    def __post_init__(self) -> None:
        lengths = () if self.training_lengths is None else listed(self.training_lengths)
        object.__setattr__(self, "training_lengths", tuple(map(length_of, lengths)))
        if not isinstance(self.training or {}, Mapping):
            raise ValueError(f'training must be facts by name, like {{"data": "six novels"}}, got {self.training!r}')
        if (self.numbers or self.base_numbers) and not self.evaluated_on:
            raise ValueError("metrics need evaluated_on=...: the text that they were measured on")

    @cached_property
    def numbers(self) -> dict[str, dict[int, float]]:
        """The metrics, sorted by length."""
        return self._sorted(self.metrics)

    @cached_property
    def base_numbers(self) -> dict[str, dict[int, float]]:
        """The numbers of the base."""
        return self._sorted(self.base_metrics)

    @property
    def data(self) -> dict[str, Any]:
        """Those that a card of what is made of the model repeats, as plain data: numbers and words."""
        told: dict[str, Any] = {"training_lengths": list(self.training_lengths)}
        told["training"] = {name: str(fact) for name, fact in (self.training or {}).items()}
        told |= {"metrics": self.numbers, "base_metrics": self.base_numbers}
        told |= {name: str(getattr(self, name) or "") for name in ("evaluated_on", "reach")}
        return {name: fact for name, fact in told.items() if fact}

    @staticmethod
    def _sorted(source: Any) -> dict[str, dict[int, float]]:
        data: Any = source or {}
        if isinstance(source, str | Path):
            try:
                data = json.loads(read_text(Path(source)))
            except json.JSONDecodeError as error:
                raise ValueError(f"{source} is no JSON: {error}") from None
        try:
            out = {str(metric): {int(n): float(x) for n, x in by_length.items()} for metric, by_length in data.items()}
        except (AttributeError, TypeError, ValueError):
            raise ValueError(
                f'metrics must be {{metric: {{length: number}}}}, like {{"loss": {{"4096": 2.9}}}}, got {data!r}'
            ) from None
        return {metric: dict(sorted(x.items())) for metric, x in out.items()}


def hub_id(name: str | None) -> str | None:
    """The name if it can be a repository on the Hub, else None (a path, or nothing)."""
    return name if name and is_repo_name(name) and not Path(name).exists() else None


def is_repo_name(name: str) -> bool:
    """Tell whether a repository on the Hub can have this name."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def model_card(
    directory: Path,
    name: str,
    facts: Facts,
    *,
    base_model: str | None = None,
    remote_code: bool = False,
    trained: int | None = None,
) -> ModelCard:
    """The card of a saved folder.

    Args:
        directory: what `hf_longattn.save`, `save_pretrained` or Trainer wrote.
        name: the repository that the card is for, as it stands in the loading example.
        base_model: the model that this was made from, as the Hub names it, or a folder; an adapter's is known.
        remote_code: the folder holds the file that makes trust_remote_code=True work.
        trained: the length that the base was trained at, in tokens; None: as a whole model's config tells it.

    Raises:
        ValueError: the folder records no method.
    """
    saved, config = contents(directory)
    adapter = type_of(saved) if "peft_type" in saved else None
    loader, by_peft = _loaders(saved, adapter is not None)
    if (adapter, loader) == ("LORA", "AutoModelForCausalLM") and not saved.get("use_dora"):  # it drops DoRA's magnitudes
        by_peft = None  # transformers loads it with its base, as training and the how-to say
    kind, title = task(loader), name.rpartition("/")[2]
    more = [adapter.lower()] if adapter else []
    more += ["sentence-transformers"] * (directory / "modules.json").is_file()
    base_model = base_model or saved.get("base_model_name_or_path")
    data = ModelCardData(
        base_model=hub_id(base_model),
        license=facts.license,
        library_name="peft" if adapter else "transformers",
        pipeline_tag=kind,
        model_name=title,
        tags=[TAG, "long-context", *(m.name for m in config.methods), *more],
        eval_results=_eval_results(facts, kind or "text-generation") or None,
        hf_longattn=facts.data or None,  # under TAG
    )
    install, address = source()
    columns = {}
    for metric, by_length in facts.numbers.items():
        columns[metric] = by_length
        if metric in facts.base_numbers:
            columns[f"{metric} before training"] = facts.base_numbers[metric]
    known: dict[str, Any] = {
        "name": name,
        "title": title,
        "adapter": adapter,
        "base": base_model and _base(base_model, title),
        "config": config,
        "labels": _labels(directory) if adapter else None,
        "served": kind in ("text-generation", "image-text-to-text") and adapter in (None, "LORA"),
    }
    known |= {"facts": facts, "address": address, "install": install, "remote_code": remote_code}
    return ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("card.md.jinja")),
        **known,
        attention=[
            *(f"`{written([m])}` ({m.slot})" for m in config.methods),
            *_rope(saved),
            f"layers: {config.layers}",
            *_length(directory, config, adapter is None, trained, facts),
        ],
        columns=columns,
        lengths=sorted({length for by_length in columns.values() for length in by_length}),
        library="peft" if by_peft else "transformers",  # transformers loads some adapters alone
        loader=by_peft or loader,
        implementation=PREFIX + config.name,
        modules=modules_of(config.methods),
        papers=dict.fromkeys(linked(m.paper) for m in config.methods if m.paper),
    )


def _eval_results(facts: Facts, task_type: str) -> list[EvalResult]:
    """Every number of a card as the Hub reads it."""
    return [
        EvalResult(
            task_type=task_type,
            dataset_type=str(facts.evaluated_on),
            dataset_name=str(facts.evaluated_on),
            metric_type=metric,
            metric_name=f"{metric} at {length} tokens",
            metric_value=value,
        )
        for metric, by_length in facts.numbers.items()
        for length, value in by_length.items()
    ]


def _loaders(saved: Mapping[str, Any], adapter: bool) -> tuple[str, str | None]:
    """Return the class of Transformers that loads a saved model, and the class of PEFT that loads a saved adapter."""
    if not adapter:
        return loaders((saved.get("architectures") or ["AutoModelForCausalLM"])[0].removeprefix(TRIPWIRE))[0], None
    from peft import auto

    task, base = saved.get("task_type"), (saved.get("auto_mapping") or {}).get("base_model_class")
    if found := next(iter(adapter_classes(auto.MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(task))), None):
        return found[1].__name__, found[0]
    return loaders(base or "AutoModelForCausalLM")[0], "AutoPeftModel" if base else None


def _labels(directory: Path) -> int | None:
    """Return how many labels an adapter's own classifier has, where they are not the two that Transformers makes unasked."""
    if not (file := directory / "adapter_model.safetensors").is_file():
        return None
    with safe_open(file, "pt") as weights:
        heads = [key for key in weights.keys() if re.search(r"\.(score|classifier)\.weight$", key)]  # noqa: SIM118  no mapping
        count = next((int(weights.get_slice(key).get_shape()[0]) for key in heads), 2)
    return count if count != 2 else None


def _length(directory: Path, config: LongAttnConfig, whole: bool, trained: int | None, facts: Facts) -> list[str]:
    """The length that it is set to read, whether a number stands behind that, and the one that it was trained at."""
    if trained is None and whole:
        text = AutoConfig.from_pretrained(directory).get_text_config()
        trained = recorded(text, text.longattn).length
    if config.extended_to:
        known = trained or config.train_length or 0
        measured = max((n for by_length in facts.numbers.values() for n in by_length), default=0)
        said = f"measured up to {measured:,}" if measured > known else "see Evaluation" if facts.reach else "not measured"
        return [f"length: set to {config.extended_to:,} tokens ({said}); the base was trained at {known:,}"]
    return [f"length: as trained, {trained:,} tokens"] if trained else []


def _base(name: str, title: str) -> str:
    """A base as a sentence names it: the Hub's as a link, a folder by its name alone; not a model itself, saved again."""
    folder = Path(name).name
    return link(name) if hub_id(name) else f"`{folder}` (a local folder)" * (folder != title)


def link(repository: str) -> str:
    """A repository's name as a link to it."""
    return f"[{repository}](https://huggingface.co/{repository})"


def linked(paper: str) -> str:
    """A paper with its arXiv number as a link."""
    return re.sub(r"arXiv:(\S+)", r"[\g<0>](https://arxiv.org/abs/\1)", paper)


def source() -> tuple[str, str | None]:
    """Return how others install this version: a line for pip, and the address of its repository if known.

    pip notes where it got a package from (PEP 610): a repository and its commit, a folder, or nothing for a package index.
    """
    package = distribution("hf_longattn")
    noted = json.loads(package.read_text("direct_url.json") or "{}")
    stated = dict(url.split(", ", 1) for url in package.metadata.get_all("Project-URL") or ()).get("Repository")
    if (commit := noted.get("vcs_info", {}).get("commit_id")) and not noted["url"].startswith("file:"):
        return f'pip install "hf_longattn @ git+{noted["url"]}@{commit}"', noted["url"].removesuffix(".git")
    if noted and stated:
        return f'pip install "hf_longattn @ git+{stated}"', stated
    if noted:  # a folder of its maker, of no use to others
        return f"pip install .  # in a checkout of hf_longattn {package.version}", stated
    return f"pip install hf_longattn=={package.version}", stated


def _rope(saved: dict[str, Any]) -> list[str]:
    settings = saved.get("rope_parameters") or saved.get("text_config", {}).get("rope_parameters") or {}
    settings = settings.get("full_attention") or settings
    return [] if settings.get("rope_type", "default") == "default" else [f"rotary encoding: {settings}"]
