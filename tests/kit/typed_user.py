"""A user's program with every public call, which type checkers read and nobody runs: `make lint` checks it under --strict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hf_longattn
from hf_longattn import (
    Description,
    Diagnostics,
    LongAttnConfig,
    Measurements,
    Rotation,
    UntrainedWarning,
    evaluation,
    training,
)


def put_in(model: nn.Module) -> None:
    method: LongAttnConfig = LongAttnConfig.parse("rerope+infoscale:window=4096")
    same: LongAttnConfig = LongAttnConfig.parse(method.to_dict())
    preset: LongAttnConfig = LongAttnConfig.preset("scale_invariant", tau=10.0).replace(train_length=2048)
    by_class = LongAttnConfig(temperature=hf_longattn.methods.LogN(), positions=hf_longattn.methods.ReRope(window=64))
    for what in ("rerope", method, same, preset, by_class):
        hf_longattn.apply(model, what)
    hf_longattn.apply(model, [preset, by_class])
    hf_longattn.update(model, strength=0.5)
    runs: LongAttnConfig = hf_longattn.get_config(model)
    said: Description = hf_longattn.describe(model)
    print(runs.name, said, said.rows, hf_longattn.auto_dtype(), hf_longattn.list_methods(), UntrainedWarning.__name__)
    with hf_longattn.using(model, "logn"):
        pass
    hf_longattn.extend(model, to="32k", purpose="retrieval")
    hf_longattn.remove(model)


def compute(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    rotation = Rotation(torch.ones(4))
    config = LongAttnConfig.parse("logn")
    exact: Tensor = hf_longattn.reference_attention(query, key, value, config, rotation=rotation)
    fast: Tensor = hf_longattn.attention(query, key, value, config, rotation=rotation)
    return exact - fast


def measured(model: Any, ids: Tensor, book: str) -> None:
    found: Measurements = hf_longattn.measure(model, [ids])
    fitted: LongAttnConfig = hf_longattn.calibrate(model, [ids], LongAttnConfig.parse("scale_invariant"))
    coefficients = hf_longattn.fit_adaptive_temperature(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))
    with hf_longattn.capture(model) as seen:
        model(ids)
    results: evaluation.Results = hf_longattn.evaluate(
        model, {"book": book}, ["logn"], lengths=[2048, 8192], tokenizer=object()
    )
    print(found, fitted, coefficients, seen, Diagnostics, results.tables(), results.write(Path("report")))
    masks = hf_longattn.masks_of_jumps(model, ids, torch.arange(8)[None])
    print(masks, hf_longattn.rope.yarn(model.config, 2.0))
    hf_longattn.split_sequence(model, None)


def shared(model: nn.Module) -> None:
    folder: Path = hf_longattn.save(model, "folder", tokenizer=None, license="apache-2.0", overwrite=True)
    merged: Path = hf_longattn.merge(folder, "merged")
    url: str = hf_longattn.push(merged, "user/name", private=True)
    print(url)


def trained() -> dict[str, Any]:
    recipe: training.Recipe = training.load_recipe("continue_lora", ["model=m", "data=book.txt"])
    prepared: training.Prepared = training.prepare(recipe)
    print(training.plan(prepared), training.dump(recipe), training.last_checkpoint(Path("runs")), hf_longattn.register)
    return training.run(prepared)
