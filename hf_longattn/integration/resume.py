"""Trainer goes on from a checkpoint's weights alone: what attention they were trained under must be the model's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from ..config import LongAttnConfig
from ..files import ADAPTER_FILE
from . import rope
from .layers import pretrained_in
from .model import running
from .saved_method import computed, method_in, saved_in


def train(original: Callable[..., Any], self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Wraps `transformers.Trainer.train`: looks at the folder that it resumes from first."""
    from transformers.trainer_utils import get_last_checkpoint  # as costly as Trainer, which is imported by now

    if folder := get_last_checkpoint(self.args.output_dir) if resume_from_checkpoint is True else resume_from_checkpoint:
        scheduled = {name for callback in self.callback_handler.callbacks for name in getattr(callback, "schedules", ())}
        refuse_other_attention(self.model, Path(folder), scheduled)
    return original(self, resume_from_checkpoint, *args, **kwargs)


def refuse_other_attention(model: nn.Module, folder: Path, scheduled: Collection[str] = ()) -> None:
    """Raise ValueError if a checkpoint's weights were trained under another attention than the model runs.

    Args:
        scheduled: parameters of methods that the run sets before each step, and which may therefore differ.
    """
    if (base := pretrained_in(model)) is None:
        return
    now, settings = running(base), rope.settings_of(base)
    for file, then, saved_settings in _saved(folder):
        same = computed(now, scheduled) == computed(then, scheduled)
        if same and (now is None or saved_settings in (None, settings)):
            continue
        name = "no method of hf_longattn" if then is None else repr(then.name)
        differs = f"{name}, with {_section(then)}, and the model runs {_section(now)}"
        if same:
            differs = f"rope_parameters {saved_settings}, and the model has {settings}"
        way = "hf_longattn.remove(model)" if then is None else f"AutoModelForCausalLM.from_pretrained({str(folder)!r})"
        raise ValueError(
            f"{file} says that this checkpoint was trained under {differs}: Trainer would continue with its weights under the "
            f"model's attention. Resume with a model made as then ({way}), or start a new run from the checkpoint's weights"
        )


def _saved(folder: Path) -> Iterator[tuple[Path, LongAttnConfig | None, dict[str, Any] | None]]:
    """The configs in a checkpoint, each with its method and rotary settings; None where it does not say."""
    for file in sorted((*folder.glob("config.json"), *folder.glob(ADAPTER_FILE), *folder.glob(f"*/{ADAPTER_FILE}"))):
        saved = saved_in(file)
        yield file, method_in(saved), saved.get("text_config", saved).get("rope_parameters")


def _section(config: LongAttnConfig | None) -> str:
    return "no method" if config is None else str({k: v for k, v in config.to_dict().items() if v is not None})
