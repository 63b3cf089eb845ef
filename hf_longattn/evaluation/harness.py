"""lm-evaluation-harness on models under a setting: a model type `hf_longattn` of its own.

    --model hf_longattn --model_args pretrained=MODEL,setting=scale_invariant:tau=100@yarn:2,max_length=16384

The harness cuts texts at `max_length`, which it takes from the model's config: give it when a setting reaches farther.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .loading import check_setting, load_setting
from .settings import UNMODIFIED, Setting, read_settings

NAME = "hf_longattn"


def register() -> Any:
    """Register the model type with the harness, once; returns its class.

    Raises:
        ImportError: the harness is not installed.
    """
    try:
        from lm_eval.api.registry import model_registry, register_model
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise ImportError(f'lm-eval needs the harness: pip install "hf_longattn[lm-eval]" ({error})') from None

    class LongAttnLM(HFLM):
        """`pretrained`: a directory or Hub name. `setting`: a string, or a name in the YAML file `settings`."""

        def __init__(
            self,
            pretrained: str,
            setting: str = UNMODIFIED,
            settings: str | None = None,
            dtype: str = "auto",
            device: str | None = None,
            tokenizer: Any = None,
            **arguments: Any,
        ) -> None:
            chosen = _chosen(setting, settings)
            check_setting(chosen, pretrained)
            where = device or ("cuda" if torch.cuda.is_available() else "cpu")
            model = load_setting(chosen, pretrained, dtype, where)
            super().__init__(pretrained=model, tokenizer=tokenizer or pretrained, **arguments)

    if NAME not in model_registry:
        register_model(NAME)(LongAttnLM)
    return LongAttnLM


def _chosen(setting: str, file: str | None) -> Setting:
    if file is None:
        return Setting.parse(setting)
    result = {s.name: s for s in read_settings(Path(file))}
    if setting not in result:
        raise ValueError(f"{file} has no setting {setting!r}; it has: {', '.join(result)}")
    return result[setting]
