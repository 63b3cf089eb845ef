"""The recipes, from the command line and piece by piece, on a tiny model over bytes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import re
import shlex
import shutil
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pretend
import psutil
import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("peft")
pytest.importorskip("omegaconf")
from accelerate.state import PartialState
from helpers import crossed
from interrupts import at_pass, at_step
from peft import PeftModel
from tiny import save, save_gpt2
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace, WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

import hf_longattn
from hf_longattn.checks import Refused
from hf_longattn.cli import app
from hf_longattn.cli.train import _standing
from hf_longattn.core.kernels import programs
from hf_longattn.evaluation.rows import Row, alone
from hf_longattn.evaluation.tasks import NeedleTask
from hf_longattn.evaluation.tasks.sample import IGNORE
from hf_longattn.files import METRICS_FILE
from hf_longattn.training import RECIPES, Recipe, dump, estimate, load_recipe, plan, prepare, reach, run, running
from hf_longattn.training import data as data_module
from hf_longattn.training.data import (
    Data,
    Finish,
    NeedleWindows,
    StreamedWindows,
    Windows,
    collated,
    documents,
    find,
    pack,
    skipped,
)
from hf_longattn.training.held_out import windows_of
from hf_longattn.training.loss import CHUNK, CausalLoss, trained_by
from hf_longattn.training.models import put_adapter
from hf_longattn.training.preflight import Prepared
from hf_longattn.training.recipe import Distill, Hub, Skip
from hf_longattn.training.run_folder import resumed_from
from hf_longattn.training.trainer import RecipeTrainer, interruptible

ROOT = Path(__file__).parents[2]
FIELDS = {f.name for f in dataclasses.fields(TrainingArguments)}
CHECKPOINTING = (
    "activation_checkpointing" if "activation_checkpointing" in FIELDS else "gradient_checkpointing"
)  # its older name


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama over bytes, two texts and a table."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = ByT5Tokenizer(extra_ids=0)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.3,  # far from uniform, so that methods and encodings differ
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(50)]
    for name, size in (("train", 3000), ("test", 1000), ("short", 800)):
        (folder / f"{name}.txt").write_text(" ".join(rng.choices(words, k=size)))
    rows = [{"text": " ".join(rng.choices(words, k=rng.randint(1, 30)))} for _ in range(200)]
    (folder / "table.jsonl").write_text("\n".join(json.dumps(row | {"number": 0}) for row in rows))
    return folder


def settings(tiny: Path, output: Path, **changes: Any) -> list[str]:
    """Overrides that make any recipe tiny."""
    given = {
        "model": tiny / "model",
        "data": tiny / "train.txt",
        "heldout": tiny / "test.txt",
        "output": output,
        "length": 32,
        "evaluation.tokens": 128,
        "evaluation.samples": 2,
        "evaluation.far": 0,
        "trainer.max_steps": 6,
        "trainer.per_device_train_batch_size": 2,
        "trainer.gradient_accumulation_steps": 1,
        "trainer.logging_steps": 1,
        "trainer.save_steps": 2,
        "trainer.eval_steps": 3,
        "trainer.use_cpu": True,
        "trainer.disable_tqdm": True,
    } | {k.replace("__", "."): v for k, v in changes.items()}
    return [f"{k}={'null' if v is None else v}" for k, v in given.items()]


def save_bloom(folder: Path) -> None:
    """A model whose attention adds ALiBi's biases."""
    BloomForCausalLM(BloomConfig(vocab_size=260, hidden_size=16, n_layer=1, n_head=2)).save_pretrained(folder)
    ByT5Tokenizer(extra_ids=0).save_pretrained(folder)


def command(*words: str) -> Any:
    return CliRunner().invoke(app, ["train", *words])


def trained(name: str, overrides: list[str], **options: Any) -> dict[str, Any]:
    return run(prepare(load_recipe(name, overrides), **options))


def losses(metrics: dict[str, Any]) -> list[dict[str, float]]:
    """What was logged at each step, without timings."""
    return [{k: v for k, v in log.items() if "loss" in k or k == "step"} for log in metrics["log"] if "train_loss" not in log]


# from the command line ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_continue_lora(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    changes = {
        "method": "scale_invariant:tau=5.0",
        "evaluation__lengths": "[32,64]",
        "evaluation__final_lengths": "[512]",
    }
    result = command("continue_lora", *settings(tiny, out, **changes))
    assert result.exit_code == 0, result.output
    assert "scale_invariant:tau=5.0" in result.output
    assert "2 of 2 attention layers" in result.output
    metrics = json.loads((out / "metrics.json").read_text())
    assert set(metrics["measured"]) == {"trained", "base", "base + method", "base + YaRN x2"}  # 512 is twice the model's 256
    assert set(metrics["measured"]["base"]) == {"32", "512"}
    assert metrics["tokens"] == 6 * 2 * 32
    logged = metrics["log"][0]
    assert logged["loss"] == pytest.approx(np.mean([logged[f"loss_{a}_{a + 8}"] for a in (0, 8, 16, 24)]), rel=0.02)
    assert [log["step"] for log in metrics["log"] if "eval_loss_64" in log] == [3, 6]
    assert load_recipe(str(out / "recipe.yaml")) == load_recipe("continue_lora", settings(tiny, out, **changes))

    ids = torch.arange(10, 40)[None]
    again = AutoModelForCausalLM.from_pretrained(out).eval()
    assert hf_longattn.get_config(again).logit_map.tau == 5.0
    with torch.no_grad():
        got = again(ids).logits
        base = LlamaForCausalLM.from_pretrained(tiny / "model").eval()
        method = hf_longattn.apply(base, "scale_invariant", tau=5.0)(ids).logits
    assert (got - method).abs().max() > 1e-3  # the adapter is in it
    stored = metrics["measured"]["trained"]["32"]["loss"]
    prepared = prepare(load_recipe("continue_lora", settings(tiny, tmp_path / "other", **changes)))
    from hf_longattn.training.held_out import held_out_sums
    from hf_longattn.training.held_out import metrics as means

    found = means(held_out_sums(again, prepared.recipe, prepared.data, [32]), needles=False)
    assert found[32]["loss"] == pytest.approx(stored, abs=1e-5)


#: Files of a checkpoint as a full disk or a careless hand leaves them; None: removed.
DAMAGED = (
    ("optimizer.pt", b""),
    ("optimizer.pt", b"garbage"),
    ("scheduler.pt", b"PK\x03\x04"),
    ("rng_state.pth", b"garbage"),
    ("optimizer.pt", None),
    ("adapter_model.safetensors", None),
    ("adapter_model.safetensors", b"short"),
    ("adapter_config.json", b"{}"),
)
#: What a run changes, and how long a text its model says to read: of one that was trained at 256.
READS: dict[str, tuple[dict[str, Any], int]] = {
    "skipped positions": ({}, 1024),
    "to a target": ({"skip__target_length": 640}, 640),
    "no farther than the method": ({"method": "self_extend:group=2:window=64"}, 448),
    "longer windows": ({"positions": "plain", "length": 320}, 320),
    "windows within": ({"positions": "plain"}, 256),
    "a method that extends nothing": ({"method": "infoscale"}, 256),
    "all weights": ({"lora": None, "positions": "plain", "length": 320}, 320),
    "all weights and no method": ({"lora": None, "method": None, "positions": "plain", "length": 320}, 320),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", crossed(READS, ["skipped positions", "longer windows", "all weights and no method"]))
def test_a_trained_model_says_how_long_a_text_it_was_trained_to_read(what: str, tiny: Path, tmp_path: Path) -> None:
    changes, reads = READS[what]
    quick = {"trainer__max_steps": 1, "trainer__eval_strategy": "no", "evaluation__compare": False}
    trained("continue_lora", settings(tiny, tmp_path / "out", **quick | changes))
    m = LlamaForCausalLM.from_pretrained(tiny / "model" if "lora" not in changes else tmp_path / "out")
    if "lora" not in changes:
        m = PeftModel.from_pretrained(m, str(tmp_path / "out")).merge_and_unload()
        m.save_pretrained(tmp_path / "merged")
        m = LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    assert m.config.max_position_embeddings == reads
    if what != "a method that extends nothing" and changes.get("method", "rerope") is not None and reads > 256:
        card = (tmp_path / "out" / "README.md").read_text()
        assert re.search(rf"- length: set to {reads:,} tokens \([^)]+\); the base was trained at 256", card)
        assert hf_longattn.describe(m).trained.length == 256
        assert hf_longattn.remove(m).config.max_position_embeddings == 256


# what a run tells before and after -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("what", ["linear", "rerope"])
def test_a_base_that_takes_no_yarn_is_measured_without(what: str, tiny: Path, tmp_path: Path) -> None:
    """It scales or remaps its rotation already: that is known before the run, and did not end it after its last step."""
    folder = tmp_path / "model"
    if what == "rerope":
        m = AutoModelForCausalLM.from_pretrained(tiny / "model", attn_implementation="rerope", longattn={"window": 64})
        hf_longattn.save(m, folder)
        shutil.copy(tiny / "model" / "tokenizer_config.json", folder)
    else:
        shutil.copytree(tiny / "model", folder)
        config = LlamaConfig.from_pretrained(folder)
        config.rope_parameters |= {"rope_type": "linear", "factor": 2.0}
        config.save_pretrained(folder)
    short = {"trainer__max_steps": 2, "trainer__eval_strategy": "no", "evaluation__final_lengths": "[600]"}
    recipe = settings(tiny, tmp_path / "out", model=folder, method=None, positions="plain", **short)
    prepared = prepare(load_recipe("continue_lora", recipe))
    assert re.search(r"note +base \+ YaRN x[\d.]+ is not compared: .*(rerope, which remaps|'linear' already)", plan(prepared))
    assert run(prepared)["measured"].keys() == {"trained", "base"}


@pytest.mark.slow
def test_a_run_ends_with_how_far_the_model_reads(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the base and of the trained model: a probe, a long text, a picture, a sentence; in the folder and on the card."""
    out = tmp_path / "out"
    changes = {"evaluation__far": 700, "skip__target_length": 2000, "trainer__max_steps": 2}
    changes |= {"trainer__eval_strategy": "steps", "trainer__eval_steps": 2, "trainer__disable_tqdm": False}
    result = command("continue_lora", *settings(tiny, out, **changes))
    assert result.exit_code == 0, result.output
    assert "at the end at [32, 700]; copies from up to 1,872 tokens back" in result.output
    metrics = json.loads((out / "metrics.json").read_text())
    told, probes = metrics["reach"]["text"], metrics["reach"]["probe"]
    models = ["trained", "base", "base + method"]
    assert list(probes) == models
    for rows in probes.values():
        assert [r["distance"] for r in rows] == [1280, 1428, 1576, 1724, 1872]
    assert {name: list(m) for name, m in metrics["measured"].items()} == {n: ["32", "700"] for n in models}
    last = {name: rows[-1]["copy"][0] for name, rows in probes.items()}
    said = re.search(r"copies from 1,872 tokens back at (.*?) \(base: (.*?), with the untrained method: (.*?)\)", told)
    assert said
    assert [x.removesuffix(", no different") for x in said.groups()] == [f"{last[name]:.2f}" for name in models]
    assert "a text at its tokens 350 to 700 at " in told
    assert told in " ".join(result.output.split())
    card = (out / "README.md").read_text()
    assert told in card
    for line in (
        "- recipe: continue_lora",
        "- data: train.txt",
        "- steps: 2 of 2 windows of 32 tokens, 128 in all, positions skipped up to 2,000",
        "- trained: LoRA of rank 16, alpha 32, on the projections of attention",
        f"- held-out loss at 32 tokens: {metrics['measured']['base']['32']['loss']:.3f} of the base, "
        f"{metrics['measured']['trained']['32']['loss']:.3f} after training, in nats per token, "
        f"over {metrics['measured']['trained']['32']['tokens']:,} tokens",
    ):
        assert line in card, line
    assert "![Losses by distance](reach.png)" in card
    assert (out / "reach.png").read_bytes().startswith(b"\x89PNG")
    assert "| tokens | loss | loss before training |" in card
    base = metrics["measured"]["base"]["700"]["loss"]
    assert f"| 700 | {metrics['measured']['trained']['700']['loss']:.4g} | {base:.4g} |" in card
    drawn = capsys.readouterr().err + result.output
    assert "Held-out text: " in drawn  # while the bar of the steps stands still
    assert "Measuring: 100%" in drawn
    # the adapter itself, read again, has what was said of it
    again = AutoModelForCausalLM.from_pretrained(out)
    data = prepare(load_recipe("continue_lora", settings(tiny, tmp_path / "other", **changes))).data
    row = reach.probed(again, data, [1872], lambda tokens: None)[0]
    assert row["copy"][0] == pytest.approx(last["trained"], abs=1e-4)
    # and so has the base under the adapter's method
    untrained = hf_longattn.apply(AutoModelForCausalLM.from_pretrained(tiny / "model"), hf_longattn.get_config(again))
    row = reach.probed(untrained, data, [1872], lambda tokens: None)[0]
    assert row["copy"][0] == pytest.approx(last["base + method"], abs=1e-4) != pytest.approx(last["trained"], abs=1e-3)


@pytest.mark.slow
def test_the_untrained_method_has_none_of_the_learned_parameters(tiny: Path, tmp_path: Path) -> None:
    """Beside LoRA they are trained too; what the base is measured with has them as they start."""
    changes = {"method": "rerope+logn:learned=true:clamp=false", "trainer__max_steps": 2, "trainer__learning_rate": 0.5}
    changes |= {"evaluation__far": 700, "skip__target_length": 2000}
    metrics = trained("continue_lora", settings(tiny, tmp_path / "out", **changes))
    untrained = hf_longattn.apply(AutoModelForCausalLM.from_pretrained(tiny / "model"), "rerope+logn:clamp=false")
    assert "on the projections of attention, and the method's learned parameters\n" in (tmp_path / "out/README.md").read_text()
    data = prepare(load_recipe("continue_lora", settings(tiny, tmp_path / "other", **changes))).data
    row = reach.probed(untrained, data, [1872], lambda tokens: None)[0]
    assert row["copy"][0] == pytest.approx(metrics["reach"]["probe"]["base + method"][-1]["copy"][0], abs=1e-4)


@pytest.mark.slow
def test_a_model_that_no_method_goes_into_is_trained_without_one(tiny: Path, tmp_path: Path) -> None:
    """It is not asked how far it reads: a probe jumps over positions, which this one does not take."""
    save_bloom(tmp_path / "model")
    given = {"model": tmp_path / "model", "evaluation__far": 700, "positions": "plain", "lora": None, "trainer__max_steps": 1}
    metrics = trained("continue_lora", settings(tiny, tmp_path / "out", method=None, **given))
    assert metrics["reach"] == {"text": "", "probe": {}}
    assert list(metrics["measured"]["trained"]) == [32]
    with pytest.raises(ValueError, match="applies to 0 layers"):
        prepare(load_recipe("continue_lora", settings(tiny, tmp_path / "other", method="infoscale", **given)))


@pytest.mark.slow
def test_how_far_goes_no_farther_than_the_method_or_the_text(tiny: Path, tmp_path: Path) -> None:
    def prepared(**changes: Any) -> Any:
        return prepare(load_recipe("continue_lora", settings(tiny, tmp_path / "out", evaluation__far=16384, **changes)))

    near = prepared()
    assert (near.text, near.back) == (1024, ())  # four times the trained length: too near for a probe
    assert "no copies are probed: the model reads 1,024 tokens, 1,408 are needed" in plan(near)
    near = prepared(method="self_extend:group=2:window=64")
    assert near.text == 448
    assert prepared(skip__target_length=9000).text == len(prepared(skip__target_length=9000).data.held_out)
    assert prepared(evaluation__final_lengths="[64]").text is None
    split = prepared(heldout=None, skip__target_length=9000)
    assert split.text == len(split.data.held_out) == pytest.approx((len(split.data.train) * 32 + split.text) / 10, abs=32)
    off = prepare(load_recipe("continue_lora", settings(tiny, tmp_path / "out")))
    assert (off.text, off.back, off.unprobed) == (None, (), "")


@pytest.mark.slow
def test_measuring_at_the_end_takes_no_more_than_a_third_of_the_training(tiny: Path, tmp_path: Path) -> None:
    """Unless the recipe says how far to read."""

    def prepared(steps: int, **changes: Any) -> Any:
        changes = {"evaluation__far": None, "skip__target_length": 9000, "trainer__max_steps": steps} | changes
        return prepare(load_recipe("continue_lora", settings(tiny, tmp_path / "out", **changes)))

    long = prepared(100_000)
    assert (long.text, len(long.back), long.shortened) == (len(long.data.held_out), 5, False)
    middle = prepared(5000)
    assert (middle.text, middle.back, middle.shortened) == (long.text // 2, long.back, True)
    short = prepared(6)
    assert (short.text, short.back, short.shortened) == (None, (long.back[0], long.back[-1]), True)
    assert prepared(6, skip__target_length=1408).back == (1280,)
    told = plan(short)
    assert f"copies from up to {long.back[-1]:,} tokens back" in told
    assert "(shortened to follow the training's time; evaluation.far=16384 measures all, evaluation.far=0 none)" in told
    asked = prepared(6, evaluation__far=16384)
    assert (asked.text, asked.back, asked.shortened) == (long.text, long.back, False)
    assert torch.equal(short.data.held_out, long.data.held_out)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let a test run on a machine of so many GiB."""
    return lambda size: monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=size * 2**30))


@pytest.mark.slow
def test_a_plan_says_what_is_too_much_for_the_machine(tiny: Path, tmp_path: Path, memory: Callable[[float], None]) -> None:
    def prepared(batch: int) -> Prepared:
        changes = {"trainer__per_device_train_batch_size": batch}
        return prepare(load_recipe("continue_lora", settings(tiny, tmp_path / "out", **changes)))

    few = plan(prepared(8))
    assert "more than" not in few
    assert re.search(r"^time +about \d+ s of training and \d+ s of measuring", few, re.MULTILINE)
    assert re.search(r"about (\d\.\d) GiB", few)
    many = prepared(1 << 16)
    needed, less = (x.bytes[0] / 2**30 for x in (many, prepared(1 << 14)))
    assert 4 < needed < 64
    there = 1.5 * less
    memory(there)
    told = plan(many)
    assert f"about {needed:.1f} GiB per process" in told
    way = "trainer.per_device_train_batch_size=16384 trainer.gradient_accumulation_steps=4"
    assert f"more than the {there:.1f} GiB here: {way} makes the same steps in about {less:.1f} GiB" in told
    assert many.args.per_device_train_batch_size == 1 << 16
    memory(2.0**-20)
    assert "activation_checkpointing=true" in plan(many)


@pytest.mark.slow
def test_methods_that_change_no_row_of_training_are_known(tiny: Path, tmp_path: Path) -> None:
    """The model was trained at 256 tokens: rerope acts from 128 on, infoscale on rows that see more than 256 keys."""
    plain = {"positions": "plain"}
    for changes, idle in (
        ({"length": 128} | plain, ["infoscale", "rerope"]),
        ({"length": 160, "method": "rerope"} | plain, []),
        ({"method": "rerope"}, []),  # positions skip
        ({"method": "rerope", "skip__unskipped": 1.0}, ["rerope"]),
        ({"method": "infoscale"}, ["infoscale"]),  # which counts keys: skipped positions add none
        ({}, ["infoscale"]),
        ({"method": "infoscale:clamp=false"}, []),
        ({"method": "infoscale", "length": 300} | plain, []),
        ({"method": "infoscale", "length": 300, "data": tiny / "table.jsonl", "packing": "documents"} | plain, ["infoscale"]),
        ({"method": None} | plain, []),
        ({"method": "scale_invariant"} | plain, []),
        ({"method": "scale_invariant", "strength__start": 0.0, "strength__end": 0.0}, ["scale_invariant"]),
    ):
        prepared = prepare(load_recipe("continue_lora", settings(tiny, tmp_path / "out", **changes)))
        assert sorted(m.name for m in prepared.idle) == idle, changes


@pytest.mark.slow
def test_what_takes_days_or_more_memory_than_there_is_is_asked_about(
    tiny: Path, tmp_path: Path, memory: Callable[[float], None]
) -> None:
    """Before it starts, and by a dry run's exit status."""
    words = settings(tiny, tmp_path / "out", trainer__max_steps=1, trainer__eval_strategy="no", evaluation__compare=False)
    assert command("continue_lora", *words, "--dry-run").exit_code == 0
    long = [*words, "trainer.max_steps=1_000_000_000_000_000"]
    for more in (["--dry-run"], []):
        asked = command("continue_lora", *long, *more)
        assert asked.exit_code == 1, asked.output
        assert re.search(r"This run takes about [\d,]{6,}\.\d h\. If that is meant: --yes", asked.output)
    assert not (tmp_path / "out").exists()
    assert command("continue_lora", *long, "--dry-run", "--yes").exit_code == 0
    memory(2.0**-20)
    asked = command("continue_lora", *long, "--dry-run")
    assert re.search(r"takes about \d\.\d GiB of memory, and 0\.0 GiB are here, and about [\d,]{6,}\.\d h\.", asked.output)
    asked = command("continue_lora", *words)
    assert asked.exit_code == 1, asked.output
    assert re.search(r"takes about \d\.\d GiB of memory, and 0\.0 GiB are here\. If that is meant: --yes", asked.output)
    assert command("continue_lora", *words, "--yes").exit_code == 0
    assert (tmp_path / "out" / "metrics.json").exists()


def test_a_key_that_is_given_as_an_option_is_answered_by_how_it_is_written() -> None:
    for words, key in (
        (["--model", "folder"], "model=folder"),
        (["--data=x.txt"], "data=x.txt"),
        (["--lr", "3"], "trainer.learning_rate=3"),
        (["model=x", "--out", "runs/x"], "output=runs/x"),
        (["--method"], "method=..."),
    ):
        done = command("continue_lora", *words)
        assert done.exit_code == 2
        assert f"is a key of the recipe: write {key}" in " ".join(done.output.replace("│", "").split())
    assert "No such option: --max-step" in command("continue_lora", "--max-step", "3").output


@pytest.mark.slow
def test_a_plan_says_where_a_method_changes_nothing(tiny: Path, tmp_path: Path) -> None:
    told = plan(prepare(load_recipe("continue_lora", settings(tiny, tmp_path / "out", positions="plain", length=128))))
    untouched = "and training shows 128, so that training does not touch it. It still acts in longer texts. To train it: "
    skip = "length=256, or positions=skip, which shows far distances in short windows"
    assert f"rerope does nothing up to 128 tokens, {untouched}{skip}" in told
    unclamped = "length=512, or method=rerope+infoscale:clamp=false, which acts on every row"
    assert f"infoscale does nothing up to 256 tokens, {untouched}{unclamped}" in told
    told = plan(prepare(load_recipe("needle_lora", settings(tiny, tmp_path / "out", length=400, method="rerope"))))
    assert "does nothing" not in told


UNCLAMPED = {
    "rerope+infoscale:window=16@prope:0.5": "method=rerope+infoscale:window=16:clamp=false@prope:0.5",
    "infoscale:clamp=true": "method=infoscale:clamp=false",
    "infoscale:layers=[0, 1]": "'method=infoscale:layers=[0, 1]:clamp=false'",
    "{temperature: {name: infoscale}}": "method.temperature.clamp=false",
}


@pytest.mark.slow
@pytest.mark.parametrize("method", UNCLAMPED)
def test_what_a_plan_says_to_type_trains_the_method(tiny: Path, tmp_path: Path, method: str) -> None:
    overrides = settings(tiny, tmp_path / "out", method=method)
    (note,) = re.findall(
        r"To train it: length=512, or (.+), which acts on every row", plan(prepare(load_recipe("continue_lora", overrides)))
    )
    assert note == UNCLAMPED[method]
    again = prepare(load_recipe("continue_lora", [*overrides, *shlex.split(note)]))
    assert (again.idle, [m.clamp for m in again.methods if m.slot == "temperature"]) == ((), [False])


@pytest.mark.slow
def test_a_plan_names_the_method_for_models_with_qk_norm(tiny: Path, tmp_path: Path) -> None:
    base = save(tmp_path / "qwen3", kind="Qwen3")
    for method, noted in (("rerope+infoscale", True), ("rerope+logn", False), (None, False)):
        told = plan(prepare(load_recipe("continue_lora", settings(tiny, tmp_path / "out", model=base, method=method))))
        assert ("this model has QK-norm, and such models retrieve better under method=rerope+logn" in told) is noted


def test_time_is_estimated_by_what_is_computed(tiny: Path, tmp_path: Path) -> None:
    prepared = prepare(load_recipe("continue_lora", settings(tiny, tmp_path / "out", positions="plain")))
    text = prepared.start.config.get_text_config()

    def operations(recipe: Recipe, windows: int = 1, *read: list[int]) -> tuple[float, float]:
        return estimate.operations(recipe, prepared.args, 10_000, text, windows, *(read or [[32, 32]]))

    training, measuring = operations(prepared.recipe)
    weights = 10_000 - 259 * 16  # those that are multiplied with
    assert measuring == 2 * (2 * weights * 32 + 2 * 2 * 16 * 32**2)
    assert training == 2 * (2 * weights * 32) + 3.5 * (2 * 2 * 16 * 32**2)
    assert operations(prepared.recipe, 3)[0] == 3 * training
    assert operations(dataclasses.replace(prepared.recipe, lora=None))[0] > training
    run = dataclasses.replace(prepared.recipe, lora=None)
    held_out = operations(run, 1, [], [32, 32])[0] - operations(run)[0]
    assert held_out == pytest.approx(measuring)
    one_product = estimate._speed(prepared.args.device, torch.float32, 16, 32)  # measured once in a process
    times = estimate.duration(prepared.recipe, prepared.args, text, (training, measuring))
    assert times == tuple(work / (estimate.EFFICIENCY * one_product) for work in (training, measuring))
    assert [estimate.shown(s) for s in (0.2, 50, 400, 9000)] == ["1 s", "50 s", "7 min", "2.5 h"]
    taught = dataclasses.replace(prepared.recipe, distill=Distill())  # a teacher's logits too
    once, twice = (estimate.memory(r, prepared.args, 10_000, 100, text) for r in (prepared.recipe, taught))
    assert twice - once == 3 * 32 * 2 * 259 * 4
    halfway = (dataclasses.replace(prepared.args, eval_steps=every) for every in (3, 0.5))
    one, same = (dataclasses.replace(prepared, args=args).read_meanwhile for args in halfway)
    assert one == same != []


RESUMED = {
    "lora, strength, dropout": (
        "continue_lora",
        {"method": "scale_invariant", "strength__share": 0.8, "lora__dropout": 0.2},
    ),
    "distillation under p-RoPE": (
        "convert_distill",
        {"method": "scale_invariant:sink_tokens=1@prope:0.5"},
    ),
    "skip": (
        "continue_lora",
        {"positions": "skip", "skip__target_length": 200, "skip__repeat": 0.5},
    ),
    "accumulation, several epochs": (
        "continue_lora",
        {"positions": "plain", "length": 512, "trainer__gradient_accumulation_steps": 2},
    ),
    "stream": ("continue_lora", {"hub__streaming": True}),
    "needle": ("needle_lora", {"length": 400}),
    "frozen": (
        "needle_lora",
        {"length": 300, "lora": "null", "freeze": True, "method": "logn:learned=true"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", crossed(RESUMED, 2))
@pytest.mark.parametrize("killed_at", [3])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(tiny: Path, tmp_path: Path, case: str, killed_at: int) -> None:
    name, changes = RESUMED[case]
    changes = {"evaluation__compare": False} | changes
    if "epochs" in case:
        changes["data"] = tiny / "short.txt"
    if case == "stream":
        changes["data"] = tiny / "table.jsonl"
    whole = trained(name, settings(tiny, tmp_path / "whole", **changes))
    expected = losses(whole)
    overrides = settings(tiny, tmp_path / "cut", **changes)
    with at_step(killed_at), pytest.raises(KeyboardInterrupt):
        trained(name, overrides)
    torch.rand(7)  # whatever happened in between
    metrics = trained(name, overrides, resume=True)
    assert metrics["resumed_from"] == "checkpoint-2"
    assert losses(metrics) == expected
    assert metrics["train_loss"] == pytest.approx(whole["train_loss"], rel=1e-4)  # what is logged is rounded
    assert len(expected) >= 8  # six steps and two evaluations
    with pytest.raises(ValueError, match="finished"):
        prepare(load_recipe(name, overrides), resume=True)


def measuring(out: Path) -> AbstractContextManager[None]:
    """While open, a Ctrl-C comes as the first text is read once the trained weights are saved: what takes long comes then."""
    return at_pass(PreTrainedModel, lambda: (out / "adapter_model.safetensors").exists())


@pytest.mark.slow
@pytest.mark.parametrize("position", crossed(["plain", "skip"], ["skip"]))
def test_a_run_killed_after_its_last_step_trains_no_more(tiny: Path, tmp_path: Path, position: str) -> None:
    quick = {"trainer__max_steps": 2, "trainer__eval_strategy": "no", "evaluation__compare": False, "positions": position}
    whole = trained("continue_lora", settings(tiny, tmp_path / "whole", **quick))
    overrides = settings(tiny, tmp_path / "cut", **quick)
    with measuring(tmp_path / "cut"), pytest.raises(KeyboardInterrupt):
        trained("continue_lora", overrides)
    metrics = trained("continue_lora", overrides, resume=True)
    assert (metrics["steps"], metrics["tokens"]) == (2, whole["tokens"])
    assert metrics["measured"] == whole["measured"]
    assert losses(metrics) == losses(whole)
    assert metrics["train_loss"] == pytest.approx(whole["train_loss"], rel=1e-4)


@pytest.mark.slow
def test_a_resumed_run_may_be_measured_otherwise(tiny: Path, tmp_path: Path) -> None:
    """It trains on the same text, though the new evaluation would hold out more; its recipe is the one it began with."""
    quick = {"trainer__max_steps": 2, "trainer__eval_strategy": "no", "evaluation__compare": False, "heldout": None}
    quick |= {"evaluation__far": 700, "skip__target_length": 9000}
    whole = trained("continue_lora", settings(tiny, tmp_path / "whole", **quick))
    out = tmp_path / "cut"
    with measuring(out), pytest.raises(KeyboardInterrupt):
        trained("continue_lora", settings(tiny, out, **quick))
    began = (out / "recipe.yaml").read_text()
    other = quick | {"evaluation__far": 0, "evaluation__tokens": 2000, "evaluation__final_lengths": "[64]"}
    resumed = prepare(load_recipe("continue_lora", settings(tiny, out, **other)), resume=True)
    kept = len(resumed.data.held_out)
    assert f"what is held out stays as the run began, {kept:,} tokens: evaluation.tokens reads no more" in plan(resumed)
    metrics = run(resumed)
    assert losses(metrics) == losses(whole)
    assert list(metrics["measured"]["trained"]) == [32, 64]
    assert metrics["reach"] == {"text": "", "probe": {}}
    assert metrics["settings"]["evaluation"]["tokens"] == 2000
    assert (out / "recipe.yaml").read_text() == began
    (out / "metrics.json").unlink()
    far = settings(tiny, out, **quick | {"evaluation__final_lengths": "[5000]"})
    with pytest.raises(
        ValueError, match=r"the run began with \d+ tokens held out, and evaluation at length 5000 needs as many"
    ):
        prepare(load_recipe("continue_lora", far), resume=True)


@pytest.mark.slow
def test_a_run_interrupted_in_its_last_step_is_measured_when_it_goes_on(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = {"trainer__max_steps": 2, "trainer__eval_strategy": "no", "evaluation__compare": False}
    whole = trained("continue_lora", settings(tiny, tmp_path / "whole", **quick))
    overrides = settings(tiny, tmp_path / "cut", **quick)
    with at_step(1, lambda: signal.raise_signal(signal.SIGINT)), pytest.raises(KeyboardInterrupt):
        trained("continue_lora", overrides)
    assert "Ctrl-C again stops at once, without saving." in capsys.readouterr().err
    assert not (tmp_path / "cut" / "adapter_model.safetensors").exists()
    metrics = trained("continue_lora", overrides, resume=True)
    assert metrics["resumed_from"] == "checkpoint-2"
    assert metrics["measured"] == whole["measured"]


def test_windows_in_which_nothing_is_predicted_teach_nothing() -> None:
    """A token of the number 0 is one to predict."""
    windows = [torch.tensor(ids) for ids in ([-6, 0], [5, -1], [-6, 7])]
    taught = data_module._teaching((ids, torch.arange(2)) for ids in windows)
    assert [ids.tolist() for ids, _ in taught] == [[-6, 0], [-6, 7]]


def test_processes_take_parts_of_each_window() -> None:
    """With what the last token of each is to predict."""
    rows = [{"input_ids": list(range(n, n + 6)), "labels": list(range(n, n + 6))} for n in (0, 10)]
    first, second = (collated(rank, 2, rows) for rank in range(2))
    assert first["shift_labels"].tolist() == [[1, 2, 3], [11, 12, 13]]
    assert second["shift_labels"].tolist() == [[4, 5, IGNORE], [14, 15, IGNORE]]
    assert second["position_ids"].tolist() == [[3, 4, 5]] * 2


@pytest.mark.slow
def test_the_first_token_of_a_window_is_not_counted(tiny: Path, tmp_path: Path) -> None:
    """Trainer leaves it out of the tokens of a loss by the name of the model's class, and GPT-2's is not one of those."""
    base = save_gpt2(tmp_path / "gpt2")
    quick = {"length": 8, "method": None, "positions": "plain", "trainer__max_steps": 1, "trainer__eval_strategy": "no"}
    log = losses(trained("continue_lora", settings(tiny, tmp_path / "out", model=base, evaluation__compare=False, **quick)))[0]
    parts = [log[f"loss_{n}_{n + 2}"] for n in (0, 2, 4, 6)]
    assert log["loss"] == pytest.approx((2 * sum(parts[:3]) + parts[3]) / 7, rel=1e-4)


def test_several_processes_stop_at_once() -> None:
    """They would stop at different steps."""
    own = signal.getsignal(signal.SIGINT)
    with interruptible(SimpleNamespace(args=SimpleNamespace(world_size=2))):  # type: ignore[arg-type]
        assert signal.getsignal(signal.SIGINT) is own


def test_interrupted_after_all_was_written_a_run_is_finished(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / METRICS_FILE).write_text("{}", encoding="utf-8")
    assert _standing("Interrupted", tmp_path, tmp_path / "checkpoint-2").endswith(f"the run in {tmp_path} is finished.")


@pytest.mark.slow
@pytest.mark.parametrize("kept", crossed([True, False], 2))
def test_interrupted_while_it_measures_a_run_says_that_its_weights_are_there(tiny: Path, tmp_path: Path, kept: bool) -> None:
    quick = {"trainer__max_steps": 2, "trainer__eval_strategy": "no", "trainer__save_strategy": "steps" if kept else "no"}
    with measuring(tmp_path / "out"):
        result = command("continue_lora", *settings(tiny, tmp_path / "out", **quick))
    assert result.exit_code == 130
    said = " ".join(result.output.split())
    assert f"Interrupted after training. The weights are in {tmp_path / 'out'}; only the measurement at the end is" in said
    assert ("To continue: " in said) is kept
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert "Trained on texts of 32 tokens." in card
    assert "## Evaluation" not in card
    push = ["push", str(tmp_path / "out"), "someone/model", "--base-model", "someone/base", "--dry-run"]
    said = " ".join(CliRunner().invoke(app, push).output.split())
    assert f"Note: the training run in {tmp_path / 'out'} was not measured to its end, so that its card has no numbers" in said
    assert ("began it measures it with --resume" in said) is kept


@pytest.mark.slow
def test_convert_distill(tiny: Path, tmp_path: Path) -> None:
    result = command("convert_distill", *settings(tiny, tmp_path / "out", distill__weight=0.25, evaluation__compare=False))
    assert result.exit_code == 0, result.output
    metrics = json.loads((tmp_path / "out/metrics.json").read_text())
    for log in (log for log in metrics["log"] if "divergence" in log):
        assert log["divergence"] > 1e-3  # the method is on: the teacher differs from step one
        assert log["loss"] == pytest.approx(0.25 * log["divergence"] + 0.75 * log["cross_entropy"], rel=1e-4)


@pytest.mark.slow
def test_recipes_for_pretrained_models_ship_what_was_measured_best(tiny: Path, tmp_path: Path) -> None:
    """ReRoPE with InfoScale, at positions that skip to four times what the model was trained at."""
    for name in ("continue_lora", "convert_distill", "needle_lora"):
        recipe = load_recipe(name, settings(tiny, tmp_path / "out", length=400 if name == "needle_lora" else 32))
        assert recipe.method == "rerope+infoscale"
        prepared = prepare(recipe)
        if name == "needle_lora":
            continue
        rows = [prepared.data.train[i] for i in range(300)]
        far = [int(row["position_ids"][-1]) for row in rows if row["position_ids"][-1] > 31]
        skips = {"continue_lora": 0.5, "convert_distill": 0.8}[name]
        assert len(far) / 300 == pytest.approx(skips, abs=0.07)
        assert 900 < max(far) < 4 * 256
    longer = prepare(load_recipe("continue_lora", settings(tiny, tmp_path / "out", length=512)))
    assert 512 < max(int(longer.data.train[i]["position_ids"][-1]) for i in range(20)) < 4 * 512
    assert "positions skip, up to 2,048;" in plan(longer)
    assert "windows of 512 tokens are longer than the 256 that the model was trained at, and so is what" in plan(longer)
    few = prepare(load_recipe("continue_lora", settings(tiny, tmp_path / "out", **{"trainer.max_steps": 100_000})))
    often = round(100_000 * few.args.per_device_train_batch_size * few.args.gradient_accumulation_steps / len(few.data.train))
    assert f"each window is read {often} times: give more text, or fewer steps" in plan(few)
    assert "each window is read" not in plan(prepare(load_recipe("continue_lora", settings(tiny, tmp_path / "out"))))
    save_bloom(tmp_path / "bloom")  # which does not say what it was trained at
    with pytest.raises(ValueError, match=r"give skip\.target_length"):
        prepare(load_recipe("continue_lora", settings(tiny, tmp_path / "out", model=tmp_path / "bloom", method=None)))


AT_EVERY_LENGTH = ["null", "infoscale:clamp=false", "logn:learned=true:clamp=false", "adaptive_temperature", "scale_invariant"]


@pytest.mark.slow
@pytest.mark.parametrize("method", crossed(AT_EVERY_LENGTH, ["logn:learned=true:clamp=false"]))
def test_method_lora_trains_under_what_acts_at_every_length(tiny: Path, tmp_path: Path, method: str) -> None:
    """As its file lists them; SSMax's factors are trained and saved with the adapter."""
    given = {"method": method, "trainer__max_steps": 2, "trainer__eval_strategy": "no", "evaluation__compare": False}
    given |= {"calibrate": 64, "strength__share": 0.5} if method == "scale_invariant" else {}
    overrides = settings(tiny, tmp_path / "out", **given)
    assert "\nnote " not in plan(prepare(load_recipe("method_lora", overrides)))
    metrics = trained("method_lora", overrides)
    assert metrics["settings"]["positions"] == "plain"
    if method == "null":
        assert method_of(tmp_path / "out") is None
        return
    m = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert hf_longattn.get_config(m).name == method.partition(":")[0]
    factors = [p for name, p in m.named_parameters() if ".longattn." in name and "original_module" not in name]
    assert len(factors) == 2 * method.startswith("logn")
    assert all((p != 1).any() for p in factors)


def method_of(adapter: Path) -> Any:
    return json.loads((adapter / "adapter_config.json").read_text()).get("longattn")


@pytest.mark.slow
@pytest.mark.parametrize("name", crossed(RECIPES, ["continue_lora"]))
def test_recipes_take_a_model_with_a_table_of_positions(name: str, tiny: Path, tmp_path: Path) -> None:
    """GPT-2: `method_lora` as it stands, the others with another method and plain positions, which the refusal names."""
    base = save_gpt2(tmp_path / "gpt2")
    ours = settings(tiny, tmp_path / "out", model=base, data=tiny / "train.txt", length=200)
    if name != "method_lora":
        with pytest.raises(
            ValueError, match=r"a table of 256, and rerope .* give method=infoscale:clamp=false .* positions=plain"
        ):
            prepare(load_recipe(name, ours))
        ours += ["method=infoscale:clamp=false", "positions=plain"]
    prepared = prepare(load_recipe(name, [*ours, *(["needle.needles=1"] if name == "needle_lora" else [])]))
    assert "infoscale" in plan(prepared)
    wrapped = put_adapter(prepared.start.build(dtype=prepared.recipe.dtype), prepared.recipe.lora, 0)
    assert wrapped.peft_config["default"].target_modules == {"c_attn", "attn.c_proj"}
    with pytest.raises(ValueError, match="from a table of 256: it cannot read 300 tokens"):
        prepare(load_recipe(name, [*ours, "length=300"]))


def test_a_table_of_rotations_ends_too(tiny: Path, tmp_path: Path) -> None:
    """GPT-J's: it failed at its first step, with an IndexError."""
    base = save(tmp_path / "gptj", 256, kind="GPTJ", rotary_dim=4)
    ours = settings(tiny, tmp_path / "out", model=base, data=tiny / "train.txt", length=300)
    with pytest.raises(ValueError, match="takes its positions from a table of 256: it cannot read 300 tokens"):
        prepare(load_recipe("method_lora", ours))
    assert "infoscale" in plan(prepare(load_recipe("method_lora", [*ours, "length=200"])))


@pytest.mark.slow
def test_targets_are_one_name_or_several(tiny: Path, tmp_path: Path) -> None:
    for given, expected in (("q_proj", ["q_proj"]), ("q_proj,v_proj", ["q_proj", "v_proj"]), ("all-linear", ["all-linear"])):
        recipe = load_recipe("continue_lora", settings(tiny, tmp_path / "out", lora__targets=given))
        assert recipe.lora is not None
        assert recipe.lora.targets == expected
        assert "trained" in plan(prepare(recipe))


def test_every_process_has_needles_of_its_own(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("needle_lora", settings(tiny, tmp_path / "out", length=400))
    alone = data_module._samples(recipe)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert data_module._samples(recipe) == 4 * alone


@pytest.mark.slow
def test_needle_lora(tiny: Path, tmp_path: Path) -> None:
    overrides = settings(tiny, tmp_path / "out", length=300, evaluation__final_lengths="[300,600]", method="infoscale")
    result = command("needle_lora", *overrides)
    assert result.exit_code == 0, result.output
    metrics = json.loads((tmp_path / "out/metrics.json").read_text())
    assert metrics["measured"]["trained"]["600"]["needles"] == 6
    assert "accuracy 0.000" in result.output
    rates = [log["learning_rate"] for log in metrics["log"] if "learning_rate" in log]
    assert rates == pytest.approx([0, 5e-4, 1e-3, 1e-3, 1e-3, 5e-4])  # up, level, down in thirds


@pytest.mark.slow
def test_freeze(tiny: Path, tmp_path: Path) -> None:
    """Nothing but a method's learned parameters moves."""
    learned = {"lora": "null", "freeze": True, "method": "logn:learned=true", "length": 300}
    result = command("needle_lora", *settings(tiny, tmp_path / "out", **learned, trainer__learning_rate=0.02))
    assert result.exit_code == 0, result.output
    assert "parameters, 0.0k trained" in result.output
    base, m = (LlamaForCausalLM.from_pretrained(path).eval() for path in (tiny / "model", tmp_path / "out"))
    factors = {name: p for name, p in m.named_parameters() if ".longattn." in name}
    assert {p.shape for p in factors.values()} == {(4,)}
    assert all((p != 1).any() for p in factors.values())
    assert all(torch.equal(p, m.get_parameter(name)) for name, p in base.named_parameters())
    half = command("needle_lora", *settings(tiny, tmp_path / "half", **learned, dtype="bfloat16", trainer__learning_rate=1e-4))
    assert half.exit_code == 0, half.output
    m = LlamaForCausalLM.from_pretrained(tmp_path / "half", dtype=torch.float32)
    moved = [p for name, p in m.named_parameters() if ".longattn." in name]
    assert all(0 < (p - 1).abs().max() < 2e-3 for p in moved)  # steps that bfloat16 would round away
    for changes, message in (
        ({"method": "infoscale"}, "freeze leaves nothing to train: infoscale has no learned parameters"),
        ({"method": "logn"}, "freeze leaves nothing to train: logn"),
        ({"method": None}, "freeze leaves the method's learned parameters to train"),
        ({"lora": "{r: 4}"}, "give a method, and lora=null"),
    ):
        result = command("needle_lora", *settings(tiny, tmp_path / "never", **learned | changes))
        assert (result.exit_code, (tmp_path / "never").exists()) == (2, False)
        assert message in " ".join(result.output.split())


@pytest.mark.slow
def test_dry_run_loads_no_weights(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("weights were read"))
    result = command("continue_lora", *settings(tiny, tmp_path / "out"), "--dry-run")
    assert result.exit_code == 0, result.output
    for line in ("model ", "attention ", "steps      6, windows per step: 2", "memory ", "0.4k tokens"):
        assert line in result.output
    assert not (tmp_path / "out").exists()


NEEDLES = ["needle.needles=3", "positions=plain", "length=400"]
REFUSED = {
    "did you mean 'method'\\? a recipe has name, ": ["methdo=alibi"],
    "no key lora.alhpa; did you mean 'alpha'": ["lora.alhpa=3"],
    "no key lora.rank; lora has r, alpha, dropout, targets$": ["lora.rank=4"],
    "did you mean 'learning_rate'": ["trainer.learning_rat=1"],
    "lora cannot be False, .*: write lora.r=..., or lora=null for none$": ["lora=no"],
    "lora cannot be 'none'": ["lora=none"],
    "skip cannot be 3, .*: write skip.target_length=...$": ["skip=3"],
    "method cannot be 'none': write method=null": ["method=none"],
    "^Error: 'lora=\\[' is not valid YAML: ": ["lora=["],
    "write trainer.learning_rate": ["learning_rate=1"],
    "not an override": ["steps"],
    "no key lr; did you mean trainer.learning_rate": ["lr=1e-4"],
    "no key trainer.lr; did you mean trainer.learning_rate": ["trainer.lr=1e-4"],
    "no 'q_prj'; did you mean 'q_proj'.*it has down_proj, .*v_proj": ["lora.targets=q_prj"],
    "no 'k_prj'; did you mean 'k_proj'": ["lora.targets=[q_proj,k_prj]"],
    "evaluation.lengths: this must be a list": ["evaluation.lengths=64"],
    "^Error: length: .* could not be converted to Integer": ["length=long"],
    "unknown method 'scale'": ["method=scale"],
    "'yarn'; yarn is a position encoding: .*@yarn in a setting or in a recipe's method": ["method=yarn"],
    "no parameter 'tua'": ["method=scale_invariant:tua=3"],
    "there is no file 'missing.txt'": ["data=missing.txt"],
    "there is no file 'missing.md'": ["data=missing.md"],
    "there is no file 'a/missing.csv'": ["heldout=a/missing.csv"],
    "trained at 256 tokens; windows of 512": ["length=512", "distill.weight=0.5"],
    "data \\([\\d,]{6,} tokens\\) is shorter than one window of 100000 tokens$": ["length=100000"],
    "data \\(0 tokens\\) is shorter than one window of 32 tokens$": ["data=BLANK"],
    "no message of the data has it: the roles are model, user$": [
        "hub.answers=true",
        "data=CHATS",
        "heldout=null",
        "tokenizer=CHATTING",
    ],
    "shorter than one window .*a smaller evaluation.tokens": ["length=100000", "heldout=null"],
    "evaluation at length 50000 .*shorten evaluation.lengths": ["evaluation.lengths=[50000]"],
    "shorten length": ["length=2000", "heldout=SHORT"],
    "needle texts|no room for 3 needles": ["needle.needles=3", "positions=plain"],
    "held-out text .*add text or shorten evaluation": [*NEEDLES, "evaluation.final_lengths=[40000]"],
    "held-out text .* length 2048 .*add text, give another by heldout=FILE, or shorten length": [
        *NEEDLES,
        "length=2k",
        "heldout=null",
    ],
    "needle texts per length, must be at least 1": [*NEEDLES, "evaluation.samples=0"],
    "the haystack has": [*NEEDLES, "length=40000"],
    "target_length must exceed": ["positions=skip", "skip.target_length=32"],
    "it needs lora": ["distill.weight=0.5", "lora=null"],
    "take \\['lm_head'\\] out": ["distill.weight=0.5", "lora.targets=[q_proj,lm_head]"],
    "needs a method with a strength": ["strength.share=0.5", "method=alibi"],
    "may take the weights of a step of less strength": [
        *("strength.share=0.5", "method=scale_invariant"),
        *("trainer.load_best_model_at_end=true", "trainer.eval_strategy=steps", "trainer.eval_steps=2"),
    ],
    "must be a multiple of trainer.logging_steps": ["trainer.logging_steps=4", "trainer.save_steps=6"],
    "exclude each other": ["schedule.warmup=0.1", "trainer.warmup_steps=3"],
    "far is a number of tokens, or 0": ["evaluation.far=-1"],
    "lie in \\[0, 1\\]": ["skip.repeat=2", "positions=skip"],
    "overwrites a part of each text": ["needle.needles=3", "skip.repeat=0.5", "positions=skip"],
    "not a torch dtype": ["dtype=float31"],
    "give a model": ["model=null"],
    "--dry-run|max_steps must": ["trainer.max_steps=0"],
    "a streamed data set has no last part": ["hub.streaming=true", "heldout=null"],
    "sequence_parallel must divide length": ["sequence_parallel=5"],
    "does not divide the number of processes": ["sequence_parallel=2", "positions=plain"],
    "no distill: the teacher": ["sequence_parallel=2", "distill.weight=0.5"],
    "positions: plain": ["sequence_parallel=2", "positions=skip"],
    "label_smoothing_factor does not reach": ["trainer.label_smoothing_factor=0.1"],
    "save_only_model leaves checkpoints that --resume": ["trainer.save_only_model=true"],
    "remove_unused_columns takes the positions": ["trainer.remove_unused_columns=true"],
    "per_device_train_batch_size must lie in": ["trainer.per_device_train_batch_size=0"],
    "needs liger-kernel, which is not installed": ["trainer.use_liger_kernel=true"],
    "trainer.optim=galore_adamw: .*galore": ["trainer.optim=galore_adamw"],
    "fp16 does nothing on a CPU": ["trainer.fp16=true"],
    "persistent_workers keeps workers": ["trainer.dataloader_persistent_workers=true"],
    "row 1: 'number' is 0, neither a text nor a list of messages": ["data=TABLE", "hub.column=number"],
    "no column": ["data=TABLE", "hub.column=body"],
    "hub.answers needs chats": ["hub.answers=true", "data=TABLE"],
    "hub.answers and needle exclude": ["hub.answers=true", "needle.needles=3", "positions=plain"],
    "trainer.report_to=clearml, which is not installed here": ["trainer.report_to=clearml"],
    "tensorbord is not supported, only": ["trainer.report_to=tensorbord"],
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_before_the_model_loads(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("weights were read"))
    files = {"TABLE": tiny / "table.jsonl", "CHATTING": tmp_path / "tokenizer"}
    unanswered = {"messages": [{"role": "user", "content": "a b"}, {"role": "model", "content": "c"}]}
    for name, text in (("SHORT", "a few words"), ("BLANK", " \n"), ("CHATS", json.dumps(unanswered))):
        files[name] = tmp_path / (name + (".jsonl" if name == "CHATS" else ".txt"))
        files[name].write_text(text, encoding="utf-8")
    if "tokenizer=CHATTING" in REFUSED[message]:
        chatting(PLAIN).save_pretrained(files["CHATTING"])
    key_values = (entry.partition("=") for entry in REFUSED[message])
    changes = [f"{key}{equals}{files.get(value, value)}" for key, equals, value in key_values]
    result = command("continue_lora", *settings(tiny, tmp_path / "out"), *changes)
    assert result.exit_code == 2, result.output
    assert re.search(message, result.output), result.output
    assert not (tmp_path / "out").exists()


def test_lengths_of_a_recipe_may_be_written_as_people_say_them() -> None:
    given = ["length=1k", "skip.target_length=32k", "evaluation.far=16k", "evaluation.final_lengths=[1k,4096]", "calibrate=2k"]
    recipe = load_recipe("method_lora", ["model=x", "data=y", *given])
    assert (recipe.length, recipe.skip.target_length, recipe.evaluation.far, recipe.calibrate) == (1024, 32768, 16384, 2048)
    assert recipe.final_lengths == [1024, 4096]


def test_a_wrong_value_of_a_file_is_named_with_it(tmp_path: Path) -> None:
    (file := tmp_path / "own.yaml").write_text("length: long\nlora: {r: x}")
    with pytest.raises(ValueError, match=r"^own\.yaml: length: Value 'long'"):
        load_recipe(str(file), ["model=x", "data=y"])
    with pytest.raises(ValueError, match=r"^lora\.r: Value 'y'"):
        load_recipe(str(file), ["model=x", "data=y", "length=2", "lora.r=y"])


@pytest.mark.slow
def test_nothing_is_overwritten(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    overrides = settings(tiny, tmp_path / "out")
    (tmp_path / "out/thesis.tex").write_text("")
    assert command("continue_lora", *overrides).output.endswith("exists; nothing is overwritten: choose another output\n")
    assert "holds no run to resume" in command("continue_lora", *overrides, "--resume").output
    recipe = load_recipe("continue_lora", overrides)
    (tmp_path / "out/recipe.yaml").write_text(dump(recipe))
    assert re.search(r"note .* holds no whole checkpoint: this run begins at step 0\n", plan(prepare(recipe, resume=True)))
    assert command("continue_lora", *overrides).output.endswith("choose another output, or continue with --resume\n")
    (tmp_path / "out/metrics.json").write_text("{}")
    assert re.search(
        r"the run in .* is finished; nothing is overwritten: .* output$", command("continue_lora", *overrides).output
    )
    (tmp_path / "out/metrics.json").unlink()
    recipe.trainer["learning_rate"] = 1.0
    with pytest.raises(ValueError, match=r"differs from this recipe in trainer\.learning_rate \(0\.001, now 1\.0\): resume"):
        prepare(recipe, resume=True)


def test_a_run_goes_on_wherever_it_lies_and_however_its_files_are_named(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny)
    out, given = tmp_path / "moved", {"model": "model", "data": "train.txt", "heldout": "te*.txt"}
    out.mkdir()
    (out / "recipe.yaml").write_text(dump(load_recipe("continue_lora", settings(tiny, tmp_path / "out", **given))))

    def resumed(**changes: Any) -> str | None:
        return resumed_from(load_recipe("continue_lora", settings(tiny, out, **given | changes)), out, True)[0]

    for change in ({"model": "model/"}, {"data": "./train.txt"}, {"data": "[train.txt]"}, {"heldout": tiny / "te*.txt"}):
        assert resumed(**change) is None
    for change, said in (
        ({"data": "test.txt"}, r"data \(train\.txt, now test\.txt\):"),
        ({"model": "a/b"}, r"model \(model, now a/b\)"),
    ):
        with pytest.raises(Refused, match=f"differs from this recipe in {said}"):
            resumed(**change)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_with_the_way_out(tiny: Path, tmp_path: Path) -> None:
    overrides = settings(tiny, tmp_path / "cut", evaluation__compare=False)
    with at_step(5), pytest.raises(KeyboardInterrupt):
        trained("continue_lora", overrides)
    last = tmp_path / "cut/checkpoint-4"
    shutil.copytree(last, tmp_path / "whole")
    for name, content in DAMAGED:
        if content is None:
            (last / name).unlink()
        else:
            (last / name).write_bytes(content)
        refused = command("continue_lora", *overrides, "--resume")
        assert refused.exit_code == 2, refused.output
        assert re.search(rf"^Error: the checkpoint {last} cannot be loaded \(\w+.*\): remove that", refused.output, re.M), name
        shutil.copytree(tmp_path / "whole", last, dirs_exist_ok=True)
    shutil.rmtree(last)
    earlier = (tmp_path / "cut/checkpoint-2").rename(tmp_path / "cut/earlier")
    (tmp_path / "cut/checkpoint-2").mkdir()
    told = plan(prepare(load_recipe("continue_lora", overrides), resume=True))
    assert "this run begins at step 0, and removes what is left of others" in told
    (tmp_path / "cut/checkpoint-2").rmdir()
    earlier.rename(tmp_path / "cut/checkpoint-2")
    assert trained("continue_lora", overrides, resume=True)["resumed_from"] == "checkpoint-2"


@pytest.mark.slow
def test_two_commands_do_not_train_into_one_folder(tiny: Path, tmp_path: Path) -> None:
    overrides = settings(tiny, tmp_path / "out")
    with alone(tmp_path / "out/training.lock", "training"):
        for more in ([], ["--resume"], ["--dry-run"]):
            refused = command("continue_lora", *overrides, *more)
            assert refused.exit_code == 2
            assert "another command is training into" in refused.output
    late = prepare(load_recipe("continue_lora", overrides))  # both have looked before either writes
    refusals = []

    def meanwhile() -> None:
        with pytest.raises(ValueError, match="another command is training into") as refusal:
            run(late)
        refusals.append(refusal)

    with at_step(0, meanwhile):
        quick = {"trainer__max_steps": 1, "trainer__eval_strategy": "no", "evaluation__compare": False}
        trained("continue_lora", settings(tiny, tmp_path / "out", **quick))
    assert len(refusals) == 1
    with pytest.raises(Refused, match="nothing is overwritten"):
        run(late)
    assert not (tmp_path / "out/training.lock").exists()
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed/training.lock").touch()  # its process is gone
    prepare(load_recipe("continue_lora", settings(tiny, tmp_path / "killed")))


def test_recipes_by_name() -> None:
    with pytest.raises(ValueError, match="did you mean 'continue_lora'"):
        load_recipe("continue_lroa")
    listed = (ROOT / "pyproject.toml").read_text()
    for name in RECIPES:
        assert f'"recipes/{name}.yaml" = "hf_longattn/recipes/{name}.yaml"' in listed  # of the wheel
        recipe = load_recipe(name, ["data=x.txt", "model=x"])
        assert recipe.name == name
        assert recipe.output == f"runs/{name}"


# data -----------------------------------------------------------------------------------------------------------------


def test_packing_drops_nothing_but_the_rest() -> None:
    texts = [list(range(100 * d, 100 * d + n)) for d, n in enumerate((3, 11, 1, 7, 5), 1)]
    rows = list(pack([list(t) for t in texts], 8))
    joined = list(itertools.chain.from_iterable(texts))
    assert torch.cat([ids for ids, _ in rows]).tolist() == joined[:24]
    assert [p.tolist() for _, p in rows] == [
        [0, 1, 2, 0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4, 5, 0, 0],
        [0, 1, 2, 3, 4, 5, 0, 1],
    ]


def test_every_document_and_every_row_starts_as_the_tokenizer_starts_a_text() -> None:
    texts = [[11, 12, 13], [21, 22, 23, 24, 25, 26, 27, 28], [31]]
    rows = list(pack(texts, 5, [1]))
    assert [ids.tolist() for ids, _ in rows] == [[1, 11, 12, 13, 1], [1, 21, 22, 23, 24], [1, 25, 26, 27, 28]]
    assert [p.tolist() for _, p in rows] == [[0, 1, 2, 3, 0], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    held_out = windows_of(torch.arange(100, 120), 5, 10, [1])
    assert held_out.tolist() == [[1, 100, 101, 102, 103], [1, 110, 111, 112, 113]]


def test_a_recipe_puts_the_start_of_a_text_where_the_tokenizer_does(tiny: Path, tmp_path: Path) -> None:
    ids = {"<s>": 0, "a": 1, "b": 2, "</s>": 3, "?": 4}
    starting = Tokenizer(WordLevel(ids, unk_token="?"))
    starting.pre_tokenizer = Whitespace()
    starting.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=starting, bos_token="<s>", eos_token="</s>", unk_token="?")
    (tmp_path / "text.txt").write_text("a b " * 200)
    changes = {"data": tmp_path / "text.txt", "heldout": None, "positions": "plain"}
    data = Data(load_recipe("continue_lora", settings(tiny, tmp_path / "out", **changes)), tokenizer)
    assert data.start == [0]
    assert data.train[3]["input_ids"].tolist()[:4] == [0, 2, 1, 2]  # 31 words a row: an odd number
    assert 0 not in data.train[3]["input_ids"][1:]


def test_packed_documents_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    model = random_model()
    hf_longattn.apply(model, "scale_invariant")
    texts = [torch.randint(3, 200, (n,)).tolist() for n in (9, 5, 10)]
    row = Windows(pack([list(t) for t in texts], 24), Finish(True, None, 0))[0]
    out = CausalLoss(model)(**{k: v[None] for k, v in row.items()})
    alone = torch.zeros(())
    for text in texts:
        ids = torch.tensor([text])
        alone += torch.nn.functional.cross_entropy(model(ids).logits[0, :-1].detach(), ids[0, 1:], reduction="sum").item()
    assert float(out["tokens"].sum()) == 9 + 5 + 10 - 3
    assert out["loss"].item() == pytest.approx(float(alone) / 21, abs=1e-5)


@pytest.mark.slow
def test_packed_documents_of_a_recipe_do_not_see_each_other(tiny: Path, tmp_path: Path) -> None:
    """The first step's loss, before anything is learned, is that of every document alone."""
    changes = {"packing": "documents", "data": tiny / "table.jsonl", "trainer__max_steps": 1, "trainer__save_steps": 1}
    changes |= {"positions": "plain", "method": None, "strength": None, "evaluation__compare": False}
    overrides = settings(tiny, tmp_path / "out", **changes)
    metrics = trained("continue_lora", overrides)
    prepared = prepare(load_recipe("continue_lora", settings(tiny, tmp_path / "again", **changes)))
    model = AutoModelForCausalLM.from_pretrained(tiny / "model")
    trainer = RecipeTrainer(prepared.recipe, prepared.data, model, model, prepared.args, prepared.tokenizer)
    (ids, positions) = (b := next(iter(trainer.get_train_dataloader())))["input_ids"], b["position_ids"]
    total = count = 0.0
    for row, places in zip(ids, positions, strict=True):
        for text in torch.tensor_split(row, (places == 0).nonzero().flatten().tolist()[1:]):
            if len(text) > 1:
                logits = model(text[None]).logits[0, :-1].detach()
                total += torch.nn.functional.cross_entropy(logits, text[1:], reduction="sum").item()
                count += len(text) - 1
    assert (positions == 0).sum() > len(ids)
    assert next(r["loss"] for r in metrics["log"] if "loss" in r) == pytest.approx(total / count, abs=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # where there is one CPU
def test_workers_read_each_streamed_document_once(tmp_path: Path) -> None:
    for word in "abc":  # 40 tokens with </s>: windows of 4 hold no part of another document
        (tmp_path / f"{word}.txt").write_text(f"{word} " * 39)
    (tmp_path / "d.jsonl").write_text("\n".join([json.dumps({"text": "d d d"})] * 5))
    rows = StreamedWindows(find([str(tmp_path / "*")]), Hub(streaming=True), chatting(None), 4, (), Finish(False, None, 0))
    alone, shared = ([r["input_ids"].tolist() for r in DataLoader(rows, batch_size=None, num_workers=n)] for n in (0, 2))
    assert len(alone) == 35
    assert sorted(shared) == sorted(alone)


def test_documents_of_files_and_data_sets(tiny: Path, tmp_path: Path) -> None:
    tokenizer = ByT5Tokenizer(extra_ids=0)
    (tmp_path / "a.txt").write_text("ab")
    (tmp_path / "b.jsonl").write_text('{"body": "c"}\n{"body": "dé"}\n')
    sources = [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]
    for streaming in (False, True):
        found = list(documents(sources, Hub(column="body", streaming=streaming), tokenizer))
        assert [tokenizer.decode(d[:-1]) for d in found] == ["ab", "c", "dé"]
        assert all(d[-1] == tokenizer.eos_token_id for d in found)


PLAIN = "{{ '<s> ' }}{% for m in messages %}<{{ m.role }}> {{ m.content }} </s> {% endfor %}"
PLAIN += "{% if add_generation_prompt %}<assistant> {% endif %}"
MARKED = (
    "{{ '<s> ' }}{% for m in messages %}<{{ m.role }}> {% generation %}{{ m.content }} </s> {% endgeneration %}{% endfor %}"
)
MARKED = MARKED.replace("{% generation %}", "{% if m.role == 'assistant' %}{% generation %}", 1)
MARKED = MARKED.replace("{% endgeneration %}", "{% endgeneration %}{% else %}{{ m.content }} </s> {% endif %}")
LAST = PLAIN.replace("{{ m.content }}", "{% if loop.last %}think {% endif %}{{ m.content }}")


def chatting(template: str | None) -> PreTrainedTokenizerFast:
    """A tokenizer of words that begins texts with <s>, with a chat template."""
    words = ["<s>", "</s>", "?", "<user>", "<assistant>", "a", "b", "c", "d", "e", "think"]
    tokenizer = Tokenizer(WordLevel({w: n for n, w in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="?")
    made.chat_template = template
    return made


TURNS = [("user", "a b"), ("assistant", "c"), ("user", "d"), ("assistant", "e a")]
PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}]}
CHAT = {"messages": [{"role": role, "content": content} for role, content in TURNS], "id": 1}


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_chats_are_read_by_their_template_and_answers_told_apart(tmp_path: Path, template: str) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps(CHAT) + "\n")
    source, tokenizer = [str(tmp_path / "chats.jsonl")], chatting(template)
    whole = ["<user>", "a", "b", "</s>", "<assistant>", "c", "</s>", "<user>", "d", "</s>", "<assistant>", "e", "a", "</s>"]
    ids = tokenizer.convert_tokens_to_ids(whole)
    assert list(documents(source, Hub(), tokenizer)) == [ids]  # `pack` puts the one <s> in front
    marked = list(documents(source, Hub(answers=True), tokenizer))
    rows = Windows(pack([*marked, ids[:4], [data_module.unasked(n) for n in ids]], 15, [0]), Finish(False, None, 0))
    assert rows[0]["input_ids"].tolist() == [0, *ids]
    said = [word if label != IGNORE else "" for word, label in zip(whole, rows[0]["labels"].tolist()[1:], strict=True)]
    assert "".join(said) == "c</s>ea</s>"
    assert data_module.flat(source, Hub(answers=True), tokenizer).tolist() == ids
    far = Finish(False, Skip(target_length=100, unskipped=0.0, repeat=1.0), 0)(0, rows.ids[0], torch.empty(0))
    assert far["input_ids"].min() >= 0
    silent = far["labels"] == IGNORE
    assert silent.any()
    assert torch.equal(far["labels"][~silent], far["input_ids"][~silent])


@pytest.mark.slow
def test_a_recipe_trains_on_answers(tiny: Path, tmp_path: Path) -> None:
    rng = random.Random(0)
    rows = [[("user", " ".join(rng.choices("abcde", k=40))), ("assistant", "c d")] for _ in range(20)]
    chats = [{"messages": [{"role": role, "content": text} for role, text in row]} for row in rows]
    for name in ("chats", "held"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, chats)))
    chatting(PLAIN).save_pretrained(tmp_path / "tokenizer")
    given = {"data": tmp_path / "chats.jsonl", "heldout": tmp_path / "held.jsonl", "tokenizer": tmp_path / "tokenizer"}
    given |= {"trainer__max_steps": 2, "trainer__eval_strategy": "no", "evaluation__compare": False, "hub__answers": True}
    metrics = trained("continue_lora", settings(tiny, tmp_path / "out", **given))
    for log in losses(metrics):
        assert len(log) < 2 + 4  # a part of each window has no answer, and no loss of its own
        assert all(map(math.isfinite, log.values()))
    with pytest.raises(ValueError, match="shorter than one window of 4000 tokens with an answer in it"):
        prepare(load_recipe("continue_lora", settings(tiny, tmp_path / "never", length=4000, **given)))


def test_windows_without_an_answer_are_left_out() -> None:
    silent, asked = [[data_module.unasked(n) for n in range(3, 8)], [3, 4, 5, 6, 7]]
    assert len(Windows(pack([silent, asked, silent], 5), Finish(False, None, 0))) == 1
    model, ids = random_model(), torch.arange(3, 27)[None]
    assert CausalLoss(model)(ids, torch.full_like(ids, IGNORE))["loss"] == 0  # one whose answer a repeat has overwritten


@pytest.mark.parametrize("streaming", [False, True])
def test_the_start_of_a_chat_is_no_answer(tiny: Path, tmp_path: Path, streaming: bool) -> None:
    tokenizer = chatting(PLAIN)
    turns = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "a b"}]
    chats = [{"messages": turns[:1]}] * 40 + [{"messages": turns}] * 20
    for name in ("chats", "held"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, chats)))
    given = {"data": tmp_path / "chats.jsonl", "heldout": tmp_path / "held.jsonl", "positions": "plain"}
    given |= {"hub__answers": True, "hub__streaming": streaming}
    data = Data(load_recipe("continue_lora", settings(tiny, tmp_path / "out", length=32, **given)), tokenizer)
    rows = list(data.train)
    begins = [row["input_ids"] == tokenizer.bos_token_id for row in rows]
    assert any(b[1:].any() for b in begins)
    assert all((row["labels"][b] == IGNORE).all() for row, b in zip(rows, begins, strict=True))
    assert all((row["labels"][1:] != IGNORE).any() for row in rows)


@pytest.mark.parametrize(
    ("row", "template", "said"),
    [
        (CHAT, None, "chat 1: the tokenizer has no chat template"),
        (CHAT, LAST, "chat 1: the chat template writes an earlier answer otherwise"),
        ({"messages": CHAT["messages"][1:]}, PLAIN, "chat 1: it begins with an answer"),
        (CHAT, "{{ raise_exception('roles must alternate') }}", "chat 1: the chat template refuses it: roles must alternate"),
        ({"messages": [PARTS]}, "{{ '<s> ' + messages[0].content }}", "chat 1: the chat template refuses it: can only"),
        (CHAT | {"tools": "[{"}, PLAIN, r"row 1: its tools are '\[\{', no list of JSON schemas"),
        (CHAT | {"tools": ["weather"]}, PLAIN, r"row 1: its tools are \['weather'\], no list of JSON schemas"),
        (
            {"messages": [{"from": "user", "value": "word " * 99}]},
            PLAIN,
            "row 1: 'messages' is .{,60}, neither a text nor a list",
        ),
    ],
)
def test_chats_that_are_refused(tmp_path: Path, row: Any, template: str | None, said: str) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=said):
        list(documents([str(tmp_path / "chats.jsonl")], Hub(answers=True), chatting(template)))


TOOLS = "{% for t in tools or [] %}{{ t.name }} {% endfor %}"


@pytest.mark.parametrize("kept", ["jsonl", "parquet"])
def test_the_tools_of_a_chat_come_with_it_and_nothing_that_a_table_filled_in(tmp_path: Path, kept: str) -> None:
    datasets = pytest.importorskip("datasets")
    rows = []
    for arguments in ({"a": "b"}, {"c": "d", "e": "a"}):  # a table has every argument in every call
        said = {"role": "assistant", "content": "e", "tool_calls": [{"arguments": arguments}]}
        rows.append({"messages": [CHAT["messages"][0], said], "tools": [{"name": "a" if "a" in arguments else "b"}]})
    if kept == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "chats.parquet"))
    else:
        (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = list(data_module.texts([str(tmp_path / f"chats.{kept}")], Hub()))
    assert [chat.messages[1]["tool_calls"][0]["arguments"] for chat in found] == [{"a": "b"}, {"c": "d", "e": "a"}]
    assert [chat.tools for chat in found] == [[{"name": "a"}], [{"name": "b"}]]
    written = list(documents([str(tmp_path / f"chats.{kept}")], Hub(), chatting(TOOLS + PLAIN)))
    tokenizer = chatting({"default": PLAIN, "tool_use": TOOLS + PLAIN})
    assert list(documents([str(tmp_path / f"chats.{kept}")], Hub(), tokenizer)) == written
    asked = list(documents([str(tmp_path / f"chats.{kept}")], Hub(answers=True), tokenizer))
    assert [[n if n >= 0 else -1 - n for n in ids] for ids in asked] == written
    assert [tokenizer.decode(ids[0]) for ids in written] == ["a", "b"]


def test_a_text_is_read_once_and_what_is_held_out_is_not_trained_on(tiny: Path, tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        shutil.copy(tiny / "train.txt", tmp_path / f"{name}.txt")
    (tmp_path / "link.txt").symlink_to(tmp_path / "two.txt")
    found = find([str(tmp_path / "two.txt"), str(tmp_path / "*.txt"), "a/dataset", "a/dataset"])
    assert [Path(x).name for x in found] == ["two.txt", "one.txt", "three.txt", "dataset"]
    (tmp_path / "book [1].md").write_text("a")
    assert find(str(tmp_path / "book [1].md")) == [str(tmp_path / "book [1].md")]
    given = {"data": tmp_path / "*.txt", "heldout": tmp_path / "three.txt", "positions": "plain"}
    data = prepare(load_recipe("continue_lora", settings(tiny, tmp_path / "out", **given))).data
    given["data"] = [str(tmp_path / "one.txt"), str(tmp_path / "two.txt")]
    alone = prepare(load_recipe("continue_lora", settings(tiny, tmp_path / "out", **given))).data
    assert len(data.train) == len(alone.train)
    with pytest.raises(ValueError, match=r"all data is held out \(.*three\.txt\)"):
        prepare(load_recipe("continue_lora", settings(tiny, tmp_path / "out", **given | {"data": tmp_path / "three.txt"})))


def test_a_name_that_is_no_data_set_may_be_meant_for_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def missing(*a: Any, **k: Any) -> None:
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'own/text' doesn't exist\nor is private")

    monkeypatch.setattr(datasets, "load_dataset", missing)
    said = r"^there is no file 'own/text:test', and .* from the Hub failed \(Dataset 'own/text' .*\): give a file by its path$"
    with pytest.raises(ValueError, match=said):
        list(data_module.texts(find("own/text:test"), Hub()))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("line", "said"), [('{"text": "b"', "no JSON"), ("3", "no object"), ('{"text": "\\udcff"}', None)])
def test_a_malformed_line_is_named(tmp_path: Path, line: str, said: str | None, streaming: bool) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a"}}\n\n{line}\n')
    found = data_module.texts([str(tmp_path / "a.jsonl")], Hub(streaming=streaming))
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 3, is {said}" if said else r"a\.jsonl cannot be read: JSON"):
        list(found)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_an_empty_file_is_named(tmp_path: Path, name: str, streaming: bool) -> None:
    """The datasets library stops at one with StopIteration, which a generator may not raise."""
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=rf"{name} cannot be read: it is empty"):
        list(data_module.texts([str(tmp_path / name)], Hub(streaming=streaming)))


def test_the_tokenizer_of_a_larger_model_is_refused(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"vocab_size": 50}))
    with pytest.raises(ValueError, match=r"gives token \d+, and the model's vocabulary has 50: it is another model's"):
        prepare(load_recipe("continue_lora", settings(tiny, tmp_path / "out", model=tmp_path / "model")))


def test_the_held_out_end_is_not_trained_on(tiny: Path, tmp_path: Path) -> None:
    data = prepare(load_recipe("continue_lora", settings(tiny, tmp_path / "out", heldout=None))).data
    whole = next(documents([str(tiny / "train.txt")], Hub(), ByT5Tokenizer(extra_ids=0)))
    assert data.held_out.tolist() == whole[-128:]
    assert len(data.train) == (len(whole) - 128) // 32
    assert data.train[0]["input_ids"].tolist() == whole[:32]


# positions that skip --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [2, 3, 5])
def test_skipped_positions(chunks: int) -> None:
    skip = Skip(target_length=1000, chunks=chunks, unskipped=0.25)
    ids, far, plain = torch.arange(64), [], 0
    for i in range(2000):
        got, positions = skipped(ids, skip, random.Random(i))
        steps = positions.diff()
        assert positions[0] == 0
        assert steps.min() >= 1
        assert positions[-1] < 1000
        assert int((steps > 1).sum()) <= chunks - 1
        borders = [-1, *torch.nonzero(steps > 1)[:, 0].tolist(), 63]
        assert min(b - a for a, b in itertools.pairwise(borders)) >= 64 // (2 * chunks)
        assert torch.equal(got, ids)
        plain += int(positions[-1]) == 63
        far.append(int(positions[-1]))
    assert plain / 2000 == pytest.approx(0.25, abs=0.04)
    # the largest of chunks - 1 uniform jumps over 0..936 has mean 936 (chunks - 1) / chunks
    jumps = [f - 63 for f in far if f > 63]
    assert np.mean(jumps) == pytest.approx(936 * (chunks - 1) / chunks, rel=0.05)
    assert max(far) > 990


def test_a_repeating_window_ends_with_a_piece_of_its_beginning() -> None:
    skip = Skip(target_length=500, unskipped=0.0, repeat=0.5)
    ids, repeats = torch.arange(64), 0
    for i in range(500):
        got, positions = skipped(ids, skip, random.Random(i))
        if torch.equal(got, ids):
            continue
        repeats += 1
        start = int(torch.nonzero(got != ids)[0])
        assert positions[start] - positions[start - 1] >= 1
        size = int((got != ids).sum())
        assert size == min(start, 64 - start)
        source = int(got[start])
        assert got[start : start + size].tolist() == list(range(source, source + size))
        assert source + size <= start
        assert torch.equal(got[start + size :], ids[start + size :])
    assert repeats / 500 == pytest.approx(0.5, abs=0.07)
    assert torch.equal(ids, torch.arange(64))


def test_skipped_windows_are_one_document_to_the_model() -> None:
    """Logits under skipped positions: those of one text whose rotary distances are the positions', nothing hidden."""
    torch.manual_seed(0)
    model = random_model()
    ids = torch.randint(3, 200, (24,))
    row = Finish(False, Skip(target_length=100, unskipped=0.0), seed=1)(0, ids, torch.empty(0))
    positions = row["position_ids"]
    assert positions[-1] > 23
    jump = int(torch.nonzero(positions.diff() > 1)[0]) + 1
    out = CausalLoss(model)(**{k: v[None] for k, v in row.items()})
    # a long text with filler in the gap that nothing may see, by an explicit mask
    long = torch.full((1, int(positions[-1]) + 1), 5)
    long[0, positions] = ids
    seen = torch.zeros(long.shape[1], dtype=torch.bool)
    seen[positions] = True
    mask = (seen[None] & torch.ones(len(seen), len(seen), dtype=torch.bool).tril())[None, None]
    logits = model(long, attention_mask=mask).logits[0, positions]
    expected = torch.nn.functional.cross_entropy(logits[:-1], ids[1:])
    assert jump > 0
    assert out["loss"].item() == pytest.approx(float(expected), abs=1e-5)


def test_needles_under_positions_that_skip() -> None:
    """The text and its answer stay; the positions jump in front of the question, and stay below the target."""
    task = NeedleTask(ByT5Tokenizer(extra_ids=0), "Some prose to hide them in. " * 40)
    plain, rows = (NeedleWindows(task, 400, 20, skip) for skip in (None, Skip(target_length=5000, unskipped=0.25)))
    jumped = 0
    for want, row in zip((plain[i] for i in range(20)), (rows[i] for i in range(20)), strict=True):
        assert torch.equal(row["input_ids"], want["input_ids"])
        assert torch.equal(row["labels"], want["labels"])
        assert row["attention_mask"].all()
        steps = row["position_ids"].diff()
        answer = int((row["labels"] != IGNORE).nonzero()[0])
        assert (steps[answer - 30 :] == 1).all()
        assert row["position_ids"][-1] < 5000
        jumped += int(steps.max() > 1)
    assert 10 <= jumped < 20


# loss -----------------------------------------------------------------------------------------------------------------


def random_model() -> LlamaForCausalLM:
    shape = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=259, max_position_embeddings=64, initializer_range=0.2, **shape)).eval()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_distillation_against_the_formula(tiny: Path, temperature: float) -> None:
    """Of a text that is longer than a chunk."""
    from hf_longattn.training.models import unadapted
    from hf_longattn.training.recipe import Lora

    stock = LlamaForCausalLM.from_pretrained(tiny / "model").eval()
    student = hf_longattn.apply(LlamaForCausalLM.from_pretrained(tiny / "model").eval(), "scale_invariant")
    wrapped = put_adapter(student, Lora(), 0)
    for name, p in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.2)
    ids = torch.randint(3, 200, (2, CHUNK + 30), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :11] = -100
    with torch.no_grad():
        teacher, given = (m(ids).logits.double().numpy()[:, :-1] / temperature for m in (stock, wrapped))
    p, q = log_softmax(teacher), log_softmax(given)
    counts = (labels[:, 1:] != -100).numpy()
    divergence = ((np.exp(p) * (p - q)).sum(-1) * counts).sum() * temperature**2
    entropy = -(np.take_along_axis(log_softmax(given * temperature), ids.numpy()[:, 1:, None], -1)[..., 0] * counts).sum()
    loss = CausalLoss(student, Distill(0.3, temperature), lambda: unadapted(wrapped, stock.config))
    with trained_by(student, loss):
        out = wrapped(input_ids=ids, labels=labels)
    assert float(out["tokens"].sum()) == counts.sum() == 2 * (CHUNK + 29) - 10
    assert float(out["divergence"].sum()) == pytest.approx(divergence, rel=1e-4)
    assert divergence > 1
    assert float(out["cross_entropy"].sum()) == pytest.approx(entropy, rel=1e-5)
    assert out["loss"].item() == pytest.approx((0.3 * divergence + 0.7 * entropy) / counts.sum(), rel=1e-5)


def test_a_teacher_drops_nothing(tiny: Path) -> None:
    from hf_longattn.training.recipe import Lora

    seen: list[torch.Tensor] = []
    model = LlamaForCausalLM.from_pretrained(tiny / "model", attention_dropout=0.5)
    model.model.register_forward_hook(lambda m, given, out: seen.append(out.last_hidden_state))
    wrapped = put_adapter(model, Lora(), 0).train()
    ids = torch.randint(3, 200, (2, 30), generator=torch.Generator().manual_seed(1))
    CausalLoss(model, Distill(0.3, 1.0), wrapped.disable_adapter)(ids, ids)
    assert all(m.training for m in wrapped.modules())
    teacher, student, *_ = seen  # then they are handed to the head
    want = LlamaForCausalLM.from_pretrained(tiny / "model").eval().model(ids).last_hidden_state
    torch.testing.assert_close(teacher, want)
    assert (student - want).abs().max() > 0.01


def test_chunks_change_neither_loss_nor_gradient() -> None:
    ids, model = torch.randint(3, 200, (2, CHUNK + 40), generator=torch.Generator().manual_seed(1)), random_model()
    plain = torch.nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    (chunks := CausalLoss(model)(ids, ids)["loss"]).backward()
    assert chunks.item() == pytest.approx(plain.item(), abs=1e-5)
    want = torch.autograd.grad(plain, list(model.parameters()))
    torch.testing.assert_close([p.grad for p in model.parameters()], list(want), atol=1e-6, rtol=1e-5)


def test_the_teacher_of_skipped_windows_reads_a_plain_text(tiny: Path, tmp_path: Path) -> None:
    model = random_model()
    asked = []
    model.model.register_forward_pre_hook(lambda m, a, k: asked.append(sorted(k)), with_kwargs=True)
    from contextlib import nullcontext

    loss = CausalLoss(model, Distill(), nullcontext, jumps=True)
    row = Finish(False, Skip(target_length=100, unskipped=0.0), 0)(0, torch.arange(3, 27), torch.empty(0))
    loss(**{k: v[None] for k, v in row.items()})
    assert asked[0] == ["input_ids", "use_cache"]
    assert asked[1] == ["attention_mask", "input_ids", "position_ids", "use_cache"]


@pytest.mark.slow
@pytest.mark.parametrize("change", [f"trainer.{CHECKPOINTING}=true", "trainer.bf16=true", "lora=null", "dtype=bfloat16"])
def test_variants_train_alike(tiny: Path, tmp_path: Path, change: str) -> None:
    common = {"trainer__max_steps": 3, "trainer__save_strategy": "no", "evaluation__compare": False}
    name = "continue_lora" if change == "lora=null" else "convert_distill"
    plain = losses(trained(name, settings(tiny, tmp_path / "a", **common)))
    other = losses(trained(name, [*settings(tiny, tmp_path / "b", **common), change]))
    tolerance = 1e-5 if "checkpointing" in change else 0.05
    assert other[0]["loss"] == pytest.approx(plain[0]["loss"], rel=tolerance)
    assert other[2]["loss"] == pytest.approx(plain[2]["loss"], rel=max(tolerance, 1e-4))


@pytest.mark.slow
def test_calibration_and_strength(tiny: Path, tmp_path: Path) -> None:
    changes = {
        "method": "scale_invariant",
        "calibrate": 64,
        "strength__start": 0.5,
        "strength__end": 0.75,
        "evaluation__compare": False,
    }
    trained("continue_lora", settings(tiny, tmp_path / "out", **changes))
    found = hf_longattn.get_config(AutoModelForCausalLM.from_pretrained(tmp_path / "out")).logit_map
    assert found.strength == 0.75
    assert np.shape(found.logit_mean) == (2, 4)


@pytest.mark.slow
def test_a_strength_schedule_beside_a_remap(tiny: Path, tmp_path: Path) -> None:
    changes = {"method": "rerope+scale_invariant:window=16", "strength__start": 0.1}
    trained("continue_lora", settings(tiny, tmp_path / "out", evaluation__compare=False, **changes))
    found = hf_longattn.get_config(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert (found.logit_map.strength, found.positions.window) == (1.0, 16)


def test_recipe_is_plain_data() -> None:
    recipe = Recipe(name="x", model="m", data="a.txt", trainer={"max_steps": 3})
    assert dataclasses.asdict(recipe)["skip"]["chunks"] == 2
    assert "lengths: []" in dump(recipe)
    assert load_recipe(dataclasses.asdict(recipe) | {"output": None}, ["output=here"]).output == "here"


@pytest.mark.slow
def test_plan_counts(tiny: Path, tmp_path: Path) -> None:
    lines = plan(prepare(load_recipe("continue_lora", settings(tiny, tmp_path / "out", method=None))))
    assert "unchanged, in all 2 layers" in lines
    # per layer: q, k, v, o, three of the MLP, two norms; embedding and head; the last norm
    parameters = 2 * (16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 32 + 2 * 16) + 2 * 259 * 16 + 16
    adapter = 2 * 16 * ((16 + 16) * 2 + (16 + 8) * 2)  # r (in + out) of q, o and of k, v
    assert f"{parameters / 1000:.1f}k parameters, {adapter / 1000:.1f}k trained" in lines
    assert "6, windows per step: 2, processes: 1; 0.4k tokens in all" in lines


@pytest.mark.slow
@pytest.mark.parametrize("fast", crossed([False, True], 2))
def test_plan_says_what_is_multiplied_and_whether_slowly(
    tiny: Path, tmp_path: Path, fast: bool, cpu_bfloat16: Callable[[bool], None]
) -> None:
    cpu_bfloat16(fast)
    for n, (change, told) in enumerate(
        [
            ({"dtype": "float32"}, "weights in float32, multiplied in float32"),
            ({"trainer.bf16": "true"}, "weights in float32, multiplied in bfloat16"),
            ({"dtype": "bfloat16"}, "weights in bfloat16, multiplied in bfloat16"),
            ({"dtype": "auto"}, "weights in {0}, multiplied in {0}".format("bfloat16" if fast else "float32")),
        ]
    ):
        overrides = [*settings(tiny, tmp_path / f"{n}"), "trainer.use_cpu=true", *(f"{k}={v}" for k, v in change.items())]
        lines = plan(prepare(load_recipe("continue_lora", overrides)))
        assert told in lines
        assert ("float32 is faster" in lines) is ("in bfloat16" in told and not fast)


def test_a_run_says_what_it_harmed() -> None:
    """As of a small model after three steps: the farthest copy a little better, near ones much worse."""

    def rows(near: float, far: float) -> list[Row]:
        return [{"distance": d, "copy": [c], "text": [2.7]} for d, c in ((1280, near), (8064, far))]

    said = reach.sentence({"trained": rows(1.47, 3.01), "base": rows(0.62, 3.05)}, {}, None)
    assert said == (
        "Reads copies from 8,064 tokens back at 3.01 (base: 3.05), no better than other text there, in nats per token. "
        "Copies from 1,280 tokens back got worse: 1.47 (base: 0.62)."
    )
    assert reach.sentence({"trained": rows(0.6, 0.9), "base": rows(0.6, 3.1)}, {}, None) == (
        "Reads copies from 8,064 tokens back at 0.90 (base: 3.10), in nats per token."
    )
    three = {"trained": rows(0.6, 0.9), "base": rows(0.6, 3.1), "base + method": rows(0.6, 0.9)}
    assert reach.sentence(three, {}, None) == (
        "Reads copies from 8,064 tokens back at 0.90 (base: 3.10, with the untrained method: 0.90, no different), in nats per "
        "token."
    )


# on a GPU -------------------------------------------------------------------------------------------------------------


GPUS: dict[str, Callable[[], AbstractContextManager[Any]]] = {"cuda:0": pretend.device, "mps:0": pretend.mps}
ON_A_GPU: dict[str, tuple[str, dict[str, Any]]] = {
    "remap": ("continue_lora", {"evaluation.far": 700, "skip.target_length": 2000, "trainer.max_steps": 2}),
    "calibrated": ("method_lora", {"method": "scale_invariant", "calibrate": 128}),
    "by entropy": ("method_lora", {"method": "adaptive_temperature"}),
    "needles": ("needle_lora", {"length": 256, "trainer.max_steps": 2}),
    "taught": ("convert_distill", {}),
}


@pytest.mark.slow
@pytest.mark.skipif(programs.triton is None, reason="triton is not installed")
@pytest.mark.parametrize(
    ("case", "device"), crossed(itertools.product(ON_A_GPU, GPUS), [("remap", "cuda:0"), ("calibrated", "mps:0")])
)
def test_a_gpu_trains_as_a_cpu(case: str, device: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and copies; what has no weights yet (on `meta`), and what is loaded, is made before the device is pretended."""
    name, changes = ON_A_GPU[case]
    want = trained(name, settings(tiny, tmp_path / "cpu", **changes))
    for owner, attribute, value in (
        (torch.cuda, "set_device", lambda _: None),
        (PartialState, "default_device", torch.device(device)),
        (estimate, "_speed", lambda *_: 1e9),
    ):
        monkeypatch.setattr(owner, attribute, value)
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", device)
    prepared = prepare(load_recipe(name, settings(tiny, tmp_path / "gpu", **changes | {"trainer.use_cpu": False})))
    loaded = running._model(prepared)
    monkeypatch.setattr(running, "_model", lambda _: loaded)
    with GPUS[device]():
        got = run(prepared)
    for a, b in zip(losses(got), losses(want), strict=True):
        assert a == pytest.approx(b, abs=1e-3)
    for model, rows in want["reach"]["probe"].items():
        for a, b in zip(got["reach"]["probe"][model], rows, strict=True):
            assert a["copy"] == pytest.approx(b["copy"], abs=1e-3)
    assert bool(want["reach"]["probe"]) is (case == "remap")
