"""transformers' own model and training tests on our families; `run.py` runs this file and compares.

The release's source distribution holds the mixins of its suites and not the test of each model, nor the generation mixin:
testers are made here from the tiny configs of tests/kit/cases.py, and `generation.py` stands in for what is missing.
Environment: CONFORMANCE_FAMILY, and CONFORMANCE_ATTENTION, the name that models take where none is asked for.
"""

from __future__ import annotations

import os
import signal
import unittest
from typing import Any

import torch
import transformers
from cases import HEADS, LAYERS, VOCAB, model_config
from generation import GenerationTesterMixin
from tests.test_modeling_common import ModelTesterMixin
from tests.test_training_mixin import TrainingTesterMixin
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

import hf_longattn  # noqa: F401  registers our names

#: A test that takes more of the processor's time fails, under sdpa and under our names alike.
SECONDS = 120
ATTENTION = os.environ["CONFORMANCE_ATTENTION"]
HEAD_MAPPINGS = ("MODEL", "MODEL_FOR_CAUSAL_LM", "MODEL_FOR_SEQUENCE_CLASSIFICATION", "MODEL_FOR_TOKEN_CLASSIFICATION")

torch.set_num_threads(1)
_checked = PreTrainedModel._check_and_adjust_attn_implementation


def _default(self: Any, requested: str | None, *args: Any, **kwargs: Any) -> str:
    return _checked(self, ATTENTION if requested is None and ATTENTION != "sdpa" else requested, *args, **kwargs)


PreTrainedModel._check_and_adjust_attn_implementation = _default


class Tester:
    """What the mixins ask of a model tester."""

    batch_size, seq_length, is_training, num_hidden_layers, num_attention_heads = 5, 7, True, LAYERS, HEADS

    __test__ = False

    def __init__(self, family: str) -> None:
        self.family = family
        self.config_class = type(model_config(family))
        self.hidden_size = self.get_config().hidden_size

    def get_config(self) -> Any:
        return model_config(self.family, bos_token_id=1, eos_token_id=2, pad_token_id=0)

    @property
    def classes(self) -> tuple[type, ...]:
        mappings = (getattr(modeling_auto, f"{name}_MAPPING") for name in HEAD_MAPPINGS)
        return tuple(m[self.config_class] for m in mappings if self.config_class in m)

    @property
    def causal_lm_class(self) -> type:
        return modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING[self.config_class]

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        ids = torch.randint(3, VOCAB, (self.batch_size, self.seq_length), generator=torch.Generator().manual_seed(0))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class Timed(unittest.TestCase):
    def setUp(self) -> None:
        self.model_tester = Tester(self.family)
        transformers.set_seed(0)
        signal.signal(signal.SIGPROF, self._too_slow)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)

    def test_the_name_is_the_default(self) -> None:
        if ATTENTION != "sdpa":  # which becomes eager where a model forbids it
            model = self.model_tester.causal_lm_class(self.model_tester.get_config())
            assert model.config._attn_implementation == ATTENTION

    def tearDown(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _too_slow(self, *_: Any) -> None:
        raise TimeoutError(f"took more than {SECONDS} s")


class TestFamily(ModelTesterMixin, TrainingTesterMixin, GenerationTesterMixin, Timed):
    family = os.environ["CONFORMANCE_FAMILY"]
    all_model_classes = Tester(family).classes


del ModelTesterMixin, TrainingTesterMixin, GenerationTesterMixin, Timed  # which would be collected too
