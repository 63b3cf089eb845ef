"""Fixed seeds for every test, and nothing from the network."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: threads only cost; torch reads it when it is imported
os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton kernels run on the CPU; it must be set before triton is imported

import pytest
import torch
from helpers import stock
from sizes import small
from transformers import masking_utils

from hf_longattn.slots import registry

logging.getLogger("torch.__trace").propagate = False  # pytest would capture, and torch format, megabytes of traces


def pytest_collection_finish() -> None:
    """Keep what imports made out of garbage collections: each would walk it all, and every `Trainer.train` asks for one."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else Triton's bindings report leaks at exit


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


class Checkpoints(dict[str, Path]):
    """Folders of the families' models without a method, saved when they are asked for; nothing may be written there."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        super().__init__()
        self.factory = factory

    def __missing__(self, family: str) -> Path:
        self[family] = self.factory.mktemp(family)
        stock(family).save_pretrained(self[family])
        return self[family]


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory)


@pytest.fixture(scope="session")
def base(bases: Checkpoints) -> Path:
    return bases["llama"]


@pytest.fixture
def every_candidate_improves(monkeypatch: pytest.MonkeyPatch) -> None:
    """For `hf-longattn extend`, where none does with random weights."""
    monkeypatch.setattr("hf_longattn.evaluation.search.Scores.beats", lambda *_: True)


@pytest.fixture
def cpu_bfloat16(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Let a test run as on a CPU that multiplies bfloat16 fast, or on one that does not."""
    return lambda fast: monkeypatch.setattr("hf_longattn.core.kernels.precision.cpu_multiplies_bfloat16", lambda: fast)


@pytest.fixture
def sizes() -> Iterator[Callable[..., None]]:
    """Let kernels work in small pieces for the rest of a test: see `sizes.small`."""
    with contextlib.ExitStack() as stack:
        yield lambda **named: stack.enter_context(small(**named))


@pytest.fixture
def unknown_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers make its causal masks by a function that nobody knows."""
    monkeypatch.setattr(masking_utils, "causal_mask_function", lambda batch, head, query, key: key <= query)


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget after the test what it registers."""
    monkeypatch.setattr("hf_longattn.slots.registry._loaded", dict(registry._loaded))
