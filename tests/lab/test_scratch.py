"""Models from scratch: the paper's sizes and rates, every position method, Muon, and a run that is cut short."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("omegaconf")
pytest.importorskip("accelerate")
from helpers import crossed
from interrupts import at_step
from transformers import NanoChatForCausalLM

import hf_longattn
from lab.scratch import train as scratch
from lab.scratch.optim import Float32Muon, Muon, MuonWithAdam
from lab.scratch.train import POSITIONS, Architecture


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("texts"), random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(50)]
    for name, size in (("train", 1500), ("test", 500)):
        (folder / f"{name}.txt").write_text(" ".join(rng.choices(words, k=size)))
    return folder


def small(texts: Path, output: Path, **changes: Any) -> list[str]:
    """Overrides that make a recipe tiny."""
    given = {
        "architecture.layers": 2,
        "architecture.width": 32,
        "architecture.heads": 2,
        "tokenizer": "bytes",
        "data": texts / "train.txt",
        "heldout": texts / "test.txt",
        "output": output,
        "length": 32,
        "evaluation.tokens": 128,
        "trainer.max_steps": 6,
        "trainer.per_device_train_batch_size": 2,
        "trainer.gradient_accumulation_steps": 1,
        "trainer.logging_steps": 1,
        "trainer.save_steps": 2,
        "trainer.eval_strategy": "no",
        "trainer.use_cpu": True,
        "trainer.disable_tqdm": True,
    } | {k.replace("__", "."): v for k, v in changes.items()}
    return [f"{k}={v}" for k, v in given.items()]


def trained(name: str, overrides: list[str], output: Path, **options: Any) -> dict[str, Any]:
    return scratch.train(name, overrides, output.with_name(f"{output.name}-initial"), **options)


def logged(metrics: dict[str, Any], key: str) -> list[float]:
    return [log[key] for log in metrics["log"] if key in log]


@pytest.mark.parametrize("position", crossed(POSITIONS, ["scale_invariant_prope"]))
def test_every_position_method(texts: Path, tmp_path: Path, position: str) -> None:
    out = tmp_path / "out"
    once = {"trainer__max_steps": 2, "trainer__save_strategy": "no"}
    metrics = trained("pretrain_small", small(texts, out, architecture__position=position, **once), out)
    model = NanoChatForCausalLM.from_pretrained(out).eval()
    setting = Architecture(position=position).setting
    kind, method = (setting.rope or "rope").split(":")[0], setting.method
    rope_type = model.config.rope_parameters["rope_type"]
    assert rope_type == {"rope": "default", "ntk": "dynamic"}.get(kind, "proportional")
    rotates = model.model.rotary_emb.inv_freq
    assert int((rotates > 0).sum()) == {"nope": 0, "prope": 4}.get(kind, 8)  # pairs of a head of 16
    assert (hf_longattn.describe(model).config is None) == (method is None)
    assert set(metrics["measured"]) == {"trained"}
    assert metrics["measured"]["trained"][32]["loss"] < 7


def test_prope_is_as_published(tmp_path: Path) -> None:
    """The lowest of the rotated frequencies is 1/1024 (App. G), unless a base is given."""
    for changes, lowest in (([], 1024), (["architecture.prope_theta=1048576"], 825)):
        own, _ = scratch.load("pretrain_small", ["data=x.txt", *changes], tmp_path)
        config = own.architecture.config(64, 97)
        with torch.device("meta"):
            shape = NanoChatForCausalLM(config)
        rotary = type(shape.model.rotary_emb)(config).inv_freq
        assert float(1 / rotary[rotary > 0].min()) == pytest.approx(lowest, rel=1e-3)


@pytest.mark.parametrize(("name", "size", "steps"), [("pretrain_small", 162e6, 4578), ("pretrain_304m", 304e6, 10900)])
def test_sizes_are_the_papers(tmp_path: Path, name: str, size: float, steps: int) -> None:
    own, recipe = scratch.load(name, ["data=x.txt"], tmp_path)
    with torch.device("meta"):
        model = NanoChatForCausalLM(own.architecture.config(recipe.length, 50304))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(size, rel=5e-3)
    assert (recipe.trainer["max_steps"], recipe.length) == (steps, 4096)


def test_the_304m_model_has_a_cosine(texts: Path, tmp_path: Path) -> None:
    """From the full rate of the matrices to zero; and what is there already is not trained anew, nor built otherwise."""
    out = tmp_path / "out"
    overrides = [*small(texts, out, architecture__layers=1, trainer__save_strategy="no")]
    rates = logged(trained("pretrain_304m", overrides, out), "learning_rate")
    assert rates == pytest.approx([0.015 * (1 + math.cos(math.pi * n / 6)) / 2 for n in range(6)])
    with pytest.raises(ValueError, match="nothing is overwritten"):
        trained("pretrain_304m", overrides, out)
    with pytest.raises(ValueError, match="was built otherwise"):
        trained("pretrain_304m", [*overrides, "architecture.mlp=2"], out)


@pytest.mark.slow
@pytest.mark.parametrize("position", ["prope", "logn_prope"])
def test_a_killed_run_goes_on(texts: Path, tmp_path: Path, position: str) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    expected = logged(trained("pretrain_small", small(texts, whole, architecture__position=position), whole), "loss")
    overrides = small(texts, cut, architecture__position=position)
    with at_step(3), pytest.raises(KeyboardInterrupt):
        trained("pretrain_small", overrides, cut)
    assert logged(trained("pretrain_small", overrides, cut, resume=True), "loss") == expected


def test_the_program(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scratch.main(["pretrain_small", *small(texts, tmp_path / "out", trainer__max_steps=1, trainer__save_strategy="no")])
    said = capsys.readouterr().out
    assert "at 32: loss " in said
    assert f"Written: {tmp_path / 'out'}, and the model before training in {tmp_path / 'out-initial'}; load it with: " in said
    assert json.loads((tmp_path / "out/metrics.json").read_text())["settings"]["model"] == str(tmp_path / "out-initial")


def test_the_program_refuses_in_one_line(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        scratch.main(["pretrain_small", *small(texts, tmp_path / "out", architecture__position="rop")])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("Error: unknown architecture.position 'rop'; did you mean 'rope'?")
    assert said.count("\n") == 1
    assert not (tmp_path / "out-initial").exists()


# optimiser ------------------------------------------------------------------------------------------------------------


def nano() -> NanoChatForCausalLM:
    torch.manual_seed(0)
    return NanoChatForCausalLM(Architecture(layers=2, width=32, heads=2, position="rope").config(64, 259)).eval()


def test_muon_takes_the_matrices_and_adam_the_rest() -> None:
    model = hf_longattn.apply(nano(), "logn", learned=True)
    optimizer = MuonWithAdam(model, Muon())
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [({names[id(p)] for p in group["params"]}, group["lr"]) for group in optimizer.param_groups]
    assert [lr for _, lr in groups] == [0.02, 0.3, 0.002]
    muon, embedding, other = (found for found, _ in groups)
    assert muon == {n for n in names.values() if n.startswith("model.layers") and "longattn" not in n}
    assert embedding == {"model.embed_tokens.weight"}
    assert other == {n for n in names.values() if "longattn" in n} | {"lm_head.weight"}
    assert any("longattn" in n for n in other)


def test_muon_in_float32_is_torchs_up_to_rounding(cpu_bfloat16: Callable[[bool], None]) -> None:
    """On a CPU without units for bfloat16; two steps, with momentum and decay, of matrices of both shapes."""
    cpu_bfloat16(False)
    if not torch.cuda.is_available():
        assert isinstance(MuonWithAdam(nano(), Muon()).parts[0], Float32Muon)
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in ((24, 8), (8, 24), (16, 16))]
    steps = [[torch.randn(x.shape, generator=generator) for x in start] for _ in range(2)]
    ends = []
    for kind in (torch.optim.Muon, Float32Muon):
        weights = [torch.nn.Parameter(x.clone()) for x in start]
        optimizer = kind(weights, lr=0.1, momentum=0.9, weight_decay=0.1)
        for gradients in steps:
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient.clone()
            optimizer.step()
        ends.append(weights)
    for a, b, x in zip(*([w.detach() for w in end] for end in ends), start, strict=True):
        change = float((a - x).norm())
        assert float((a - b).norm()) < 0.03 * change  # 0.9 % measured
    assert all(change.dtype == torch.float32 for change in itertools.chain(*ends))
