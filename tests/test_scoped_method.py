"""A method for a while: what a model ran before is there again, whatever it was and whatever happens meanwhile."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import close, stock, tokens

import hf_longattn
from hf_longattn.evaluation.checkpoints import Checkpoint
from hf_longattn.evaluation.loading import OneModel
from hf_longattn.evaluation.settings import Setting
from hf_longattn.integration.model import running


def trained() -> Any:
    """With learned parts that are not as they began."""
    model = hf_longattn.apply(stock("llama"), "logn", train_length=5, learned=True)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "longattn" in name:
                p.mul_(1.3)
    return model


def eager() -> Any:
    model = stock("llama")
    model.set_attn_implementation("eager")
    return model


#: What a model may run before.
BEFORE: dict[str, Callable[[], Any]] = {
    "its own attention": lambda: stock("llama"),
    "eager": lambda: eager(),
    "a method": lambda: hf_longattn.apply(stock("llama"), "rerope+cosscale", window=3),
    "a longer model": lambda: hf_longattn.extend(stock("llama"), 1024),
    "learned parts": trained,
}
MEANWHILE: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda m: None,
    "another": lambda m: hf_longattn.apply(m, "alibi"),
    "removed": hf_longattn.remove,
    "longer": lambda m: hf_longattn.extend(m, 1500, method="rerope"),
    "its own": lambda m: m.set_attn_implementation("sdpa"),
}


def as_saved(model: Any) -> tuple[Any, ...]:
    """All that a checkpoint would hold."""
    generation = copy.deepcopy(model.generation_config.to_dict())
    return copy.deepcopy(model.config.to_dict()), generation, running(model), [*model.state_dict()]


@pytest.mark.parametrize("meanwhile", MEANWHILE)
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.filterwarnings("ignore")
def test_what_ran_before_is_given_back(before: str, meanwhile: str) -> None:
    model, ids = BEFORE[before](), tokens(1, 40)
    kept, parts = as_saved(model), {name: p for name, p in model.named_parameters() if "longattn" in name}
    with torch.no_grad():
        logits = model(ids).logits
        with hf_longattn.using(model, "self_extend", window=4, group=2) as inside:
            assert inside is model
            assert hf_longattn.get_config(model).positions == hf_longattn.methods.SelfExtend(window=4, group=2)
            MEANWHILE[meanwhile](model)
            assert not parts or not any("longattn" in name for name, _ in model.named_parameters())
        assert as_saved(model) == kept
        assert all(dict(model.named_parameters())[name] is p for name, p in parts.items())
        close(model(ids).logits, logits, 0.0)


def test_after_an_exception_too_and_nested() -> None:
    model, ids, seen = stock("llama"), tokens(1, 40), []

    def look() -> None:
        config = running(model)
        seen.append((config and config.name, model(ids).logits))

    def inner() -> None:
        with hf_longattn.using(model, "rerope+cosscale", window=3):
            look()
            raise KeyError

    def outer() -> None:
        with hf_longattn.using(model, "rerope", window=3):
            look()
            with pytest.raises(KeyError):
                inner()
            look()
            raise ZeroDivisionError

    with torch.no_grad():
        look()
        with pytest.raises(ZeroDivisionError):
            outer()
        look()
    assert [name for name, _ in seen] == [None, "rerope", "rerope+cosscale", "rerope", None]
    plain, remapped, _, remapped_again, plain_again = (logits for _, logits in seen)
    close(remapped_again, remapped, 0.0)
    close(plain_again, plain, 0.0)
    assert (remapped - plain).abs().max() > 1e-4


def test_what_cannot_be_applied_changes_nothing() -> None:
    model, ran = stock("llama"), []
    with pytest.raises(ValueError, match="did you mean 'rerope'"), hf_longattn.using(model, "rerop"):
        ran.append(1)
    assert not ran
    assert running(model) is None


def test_nothing_is_said_to_be_dropped_that_comes_back() -> None:
    model = trained()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with hf_longattn.using(model, "rerope"):
            pass


def test_a_measured_model_keeps_what_it_learned() -> None:
    model, ids = trained(), tokens(1, 40)
    with torch.no_grad():
        before = model(ids).logits
        one = OneModel(Checkpoint(model))
        for text in ("infoscale", "unmodified", "logn:learned=true:train_length=5", "cosscale"):
            found = one(Setting.parse(text))(ids).logits
            if text.startswith(("unmodified", "logn")):
                close(found, before, 0.0)
        one.put_back()
        close(model(ids).logits, before, 0.0)
