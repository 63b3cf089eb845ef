"""What a user can type wrong: refused in one message before weights are read, with exit status 2, and no folder is left."""

from __future__ import annotations

import json
import re
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from helpers import stock
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

import hf_longattn
from hf_longattn.cli import app
from hf_longattn.cli.memory import cache_bytes
from hf_longattn.evaluation.extend import plan_copies
from hf_longattn.evaluation.measures.copies import with_copies
from hf_longattn.evaluation.settings import Setting, read_settings
from hf_longattn.integration.caches import CACHE
from hf_longattn.training import Recipe, load_recipe
from hf_longattn.training.recipe import check


@pytest.fixture(scope="module")
def files(tmp_path_factory: Any) -> Path:
    """A model, adapters, texts; and each of them in ways that are wrong."""
    path = tmp_path_factory.mktemp("cli")
    tiny.save(path / "model", trained=1024)
    tiny.text(path / "book.txt", 5000)
    (path / "latin.txt").write_bytes("é".encode("latin-1") * 5000)
    (path / "nomodel").mkdir()
    shutil.copytree(path / "model", path / "cut")
    weights = (path / "cut" / "model.safetensors").read_bytes()
    (path / "cut" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    wide = LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    adapted = get_peft_model(AutoModelForCausalLM.from_config(wide), LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(path / "wide")
    (path / "broken.yaml").write_text("mine: {method: [")
    (path / "typo.yaml").write_text("mine: {methdo: logn}")
    (path / "type.yaml").write_text("mine: {method: logn, parameters: 3}")
    (path / "list.yaml").write_text("- logn")
    (path / "file").write_text("")
    return path


EVAL = "eval F/model --text F/book.txt --out OUT --lengths 256 --targets 64"
EXTEND = "extend F/model --to 4k --text F/book.txt --out OUT"
INSPECT = "inspect F/model --text F/book.txt --out OUT --length 256"
PROBE = "probe F/model --text F/book.txt --out OUT --passages 2"
TRAIN = "train continue_lora model=F/model data=F/book.txt output=OUT length=64 trainer.max_steps=2 trainer.use_cpu=true"

#: Command line, and what its one message says.
REFUSED = {
    EXTEND.replace("4k", "1100"): "takes 1640 tokens or more, not 1100",
    EXTEND.replace("4k", "-5"): "is not a length",
    EXTEND.replace("4k", "512"): "nothing to extend",
    EXTEND.replace("book", "latin"): "latin.txt is not UTF-8 (byte 0)",
    EXTEND.replace("book", "none"): "none.txt is not a file",
    EXTEND.replace("F/model", "F/nomodel"): "nomodel holds no model",
    EXTEND.replace("F/model", "F/cut"): "cut/model.safetensors is damaged",
    EXTEND.replace("OUT", "F/file/out"): "file is a file, not a folder",
    EXTEND + " --for readng": "did you mean 'reading'?",
    EXTEND + " --dtype float33": "did you mean 'float32'?",
    EXTEND + " --device cuda:9": "no device 'cuda:9' here",
    EVAL + " --adapter foo=F/nomodel": "nomodel holds no model",
    EVAL + " --adapter foo=F/model": "holds no adapter",
    EVAL + " --adapter foo=F/missing": "is not a directory",
    EVAL + " --adapter foo=F/wide": "was made from another model:",
    EVAL + " --settings F/broken.yaml": "broken.yaml is not valid YAML",
    EVAL + " --settings F/typo.yaml": "must be a mapping with keys among",
    EVAL + " --settings F/type.yaml": "parameters cannot be 3",
    EVAL + " --settings F/list.yaml": "must map names to settings",
    EVAL + " --settings F/none.yaml": "none.yaml is not a file",
    EVAL + " --settings F/latin.txt": "latin.txt is not UTF-8",
    EVAL + " --dtype float33": "did you mean 'float32'?",
    EVAL + " --dtype int8": "is not a torch dtype that a model can run in",
    EVAL + " --device cuda": "no device 'cuda' here",
    EVAL + " --device gpu": "no device 'gpu' here",
    EVAL + " --tasks long_ppl": "what context beyond 4096 tokens helps with, and no length exceeds 5120",
    EVAL + " --tasks long_ppl --near 64 --evaluator rerope": "'rerope' is none of the settings",
    EVAL + " --tasks nedle": "did you mean 'needle'?",
    EVAL + " --method logn:train_length=many": "train_length must be an integer or None, got 'many'",
    EVAL + " --lengths 0": "is not a length",
    EVAL.replace("book", "latin"): "latin.txt is not UTF-8",
    EVAL.replace("F/model", "F/nomodel"): "nomodel holds no model",
    EVAL.replace("F/model", "F/cut"): "model.safetensors is damaged",
    EVAL.replace("OUT", "/proc/out"): "/proc cannot be written to",
    INSPECT + " --dtype float33": "did you mean 'float32'?",
    INSPECT + " --device cuda": "no device 'cuda' here",
    INSPECT + " --what entropie": "unknown 'entropie'",
    INSPECT.replace("book", "latin"): "latin.txt is not UTF-8",
    INSPECT.replace("F/model", "F/nomodel"): "nomodel holds no model",
    INSPECT.replace("F/model", "F/cut"): "model.safetensors is damaged",
    INSPECT.replace("OUT", "F/file"): "file is a file",
    PROBE + " --distances 1000": "shows distances from 1280 on, not 1000",
    PROBE + " --distances far": "is not a length",
    PROBE + " --passages 9": "9 passages of 1280 tokens need a text of 11520 tokens, not 5000",
    PROBE + " --method infscale": "did you mean 'infoscale'?",
    PROBE + " --dtype float33": "did you mean 'float32'?",
    PROBE + " --device cuda": "no device 'cuda' here",
    PROBE.replace("book", "latin"): "latin.txt is not UTF-8",
    PROBE.replace("F/model", "F/cut"): "model.safetensors is damaged",
    PROBE.replace("OUT", "F/model"): "holds something else (config.json); nothing is overwritten",
    TRAIN + " trainer.learning_rate=abc": "trainer.learning_rate cannot be 'abc': it is float",
    TRAIN + " trainer.learning_rate=-1": "must be a finite number >= 0",
    TRAIN + " trainer.bf16=maybe": "trainer.bf16 cannot be 'maybe'",
    TRAIN + " trainer.per_device_train_batch_size=2.5": "cannot be 2.5: it is int",
    TRAIN + " trainer=3": "trainer must map keys",
    TRAIN + " lora=[": "not valid YAML",
    TRAIN.replace("book", "latin"): "latin.txt is not UTF-8",
    TRAIN.replace("F/model", "F/nomodel"): "nomodel holds no model",
    TRAIN.replace("F/model", "F/cut"): "model.safetensors is damaged",
    TRAIN.replace("OUT", "F/file/out"): "file is a file, not a folder",
    TRAIN.replace("continue_lora", "F/list.yaml"): "is not a recipe",
    TRAIN.replace("continue_lora", "F/broken.yaml"): "not valid YAML",
    "push F/model not/a/name": "Repo id must be",
    "push F/nomodel someone/model": "nomodel holds neither config.json nor",
    "lm-eval -- --tasks no_such_task --model_args pretrained=F/model": "no_such_task",
    "lm-eval -- --tasks arc_easy --model_args pretrained=F/model,setting=infscale": "did you mean 'infoscale'?",
}


@pytest.mark.parametrize("line", REFUSED)
def test_refused(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("weights were read"))
    words = line.replace("F/", f"{files}/").replace("OUT", str(tmp_path / "runs" / "out")).split()
    before = sorted(files.rglob("*"))
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    said = "".join(result.output.replace("│", "").split())  # boxes break lines anywhere
    assert "".join(REFUSED[line].split()) in said, result.output
    assert sorted(files.rglob("*")) == before
    assert not any(tmp_path.iterdir())


def test_push_offline_fails_in_one_line(files: Path, tmp_path: Path) -> None:
    hf_longattn.save(hf_longattn.apply(AutoModelForCausalLM.from_pretrained(files / "model"), "logn"), tmp_path)
    result = CliRunner().invoke(app, ["push", str(tmp_path), "someone/model"])
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit)
    assert "Nothing was uploaded" in result.output


# training that stops -------------------------------------------------------------------------------------------------


def small(files: Path, out: Path, **more: Any) -> list[str]:
    given = {"model": files / "model", "data": files / "book.txt", "output": out, "length": 64, "evaluation.tokens": 64}
    given |= {"trainer.max_steps": 4, "trainer.use_cpu": True, "trainer.per_device_train_batch_size": 1}
    given |= {"trainer.logging_steps": 1, "trainer.save_steps": 4, "trainer.disable_tqdm": True, "evaluation.compare": False}
    given |= {"trainer.eval_strategy": "no"}
    return ["continue_lora", *(f"{k}={v}" for k, v in (given | more).items())]


def test_training_under_a_method_warns_of_nothing(files: Path, tmp_path: Path) -> None:
    """`UntrainedWarning` is for those who run what was not trained."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", hf_longattn.UntrainedWarning)
        result = CliRunner().invoke(app, ["train", *small(files, tmp_path / "out")])
    assert result.exit_code == 0, (result.output, result.exception)


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """A Ctrl-C in the middle of a step, once."""
    from hf_longattn.training.trainer import RecipeTrainer

    real = RecipeTrainer.compute_loss

    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == step:
            signal.raise_signal(signal.SIGINT)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(RecipeTrainer, "compute_loss", compute_loss)


@pytest.mark.slow
def test_an_interrupted_run_is_resumed_as_if_it_had_not_been(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGINT)
    whole = CliRunner().invoke(app, ["train", *small(files, tmp_path / "whole")])
    assert whole.exit_code == 0, whole.output
    with monkeypatch.context() as patch:
        interrupt_at(patch, 1)
        stopped = CliRunner().invoke(app, ["train", *small(files, tmp_path / "out")])
    assert stopped.exit_code == 130, (stopped.output, stopped.exception)
    assert f"{tmp_path / 'out' / 'checkpoint-2'} is kept" in stopped.output
    assert "--resume" in stopped.output
    assert signal.getsignal(signal.SIGINT) is before
    again = CliRunner().invoke(app, ["train", *small(files, tmp_path / "out"), "--resume"])
    assert again.exit_code == 0, again.output
    first, second = (json.loads((tmp_path / n / "metrics.json").read_text()) for n in ("whole", "out"))
    assert [r["loss"] for r in first["log"] if "loss" in r] == [r["loss"] for r in second["log"] if "loss" in r]
    assert first["measured"] == second["measured"]


def test_a_run_that_fails_before_its_first_checkpoint_is_not_in_the_way(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_longattn.training.trainer import RecipeTrainer

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(RecipeTrainer, "compute_loss", fails)
    result = CliRunner().invoke(app, ["train", *small(files, tmp_path / "out")])
    assert result.exit_code == 1
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(RecipeTrainer, "compute_loss", lambda *a, **k: signal.raise_signal(signal.SIGINT) or fails())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("kept")  # came while it ran, say
    assert CliRunner().invoke(app, ["train", *small(files, tmp_path / "mine")]).exit_code == 2
    assert (tmp_path / "mine" / "notes").read_text() == "kept"


# checks under anything ------------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 9), st.floats(), st.text("abc-+@:=,.[]{}10", max_size=8), st.just("logn")
)
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text("ab", max_size=3), v, max_size=2))
CHECKED = settings(max_examples=150, derandomize=True, deadline=None, database=None)


@CHECKED
@given(
    st.text("abcdefilnoqrsty_=:@.,+-0123456789[]{}\"' ", max_size=30)
    | st.builds("logn:{}={}".format, st.text("abps"), SCALARS)
)
def test_any_text_is_a_setting_or_refused(text: str) -> None:
    try:
        setting = Setting.parse(text)
    except ValueError:
        return
    assert setting.name


@CHECKED
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "method": st.sampled_from(["logn", "scale_invariant", "rerope", "output_standardise", "streaming"]) | VALUES,
            "parameters": st.dictionaries(
                st.sampled_from(["tau", "s", "train_length", "window", "layers", "strength", "clamp", "sinks"]),
                VALUES,
                max_size=2,
            )
            | VALUES,
            "rope": st.sampled_from(["yarn:2", "yarn:nan", "ntk:-1"]) | VALUES,
            "adapter": VALUES,
            "model": VALUES,
        },
    )
    | VALUES
)
def test_any_settings_file_is_read_or_refused(tmp_path_factory: Any, entry: Any) -> None:
    file = tmp_path_factory.getbasetemp() / "settings.yaml"
    file.write_text(json.dumps({"mine": entry}), encoding="utf-8")
    try:
        (setting,) = read_settings(file)
    except ValueError:
        return
    assert setting.name == "mine"


RECIPE_KEYS = ["method", "parameters", "parameters.tau", "length", "lora", "lora.r", "distill.weight", "positions"]
RECIPE_KEYS += ["trainer", "trainer.learning_rate", "trainer.max_steps", "trainer.save_steps", "trainer.warmup_steps", "rope"]
RECIPE_KEYS += ["evaluation.lengths", "needle.needles", "strength.share", "schedule.warmup", "calibrate", "data", "hub"]
RECIPE_KEYS += ["architecture.width", "optimizer.betas", "output", "tokenizer", "dtype", "heldout", "model", "skip.chunks"]


@CHECKED
@given(st.lists(st.tuples(st.sampled_from(RECIPE_KEYS), VALUES), max_size=3))
def test_any_recipe_is_read_or_refused(changes: list[tuple[str, Any]]) -> None:
    overrides = ["model=m", "data=d.txt", *(f"{key}={json.dumps(value)}" for key, value in changes)]
    try:
        recipe = load_recipe("continue_lora", overrides)
    except ValueError:
        return
    assert isinstance(recipe, Recipe)
    check(recipe)


@CHECKED
@given(st.integers(1, 9000), st.integers(-10, 40000))
def test_copies_fit_or_are_refused(trained: int, to: int) -> None:
    import torch

    try:
        copies = plan_copies(trained, to)
    except ValueError:
        return
    with_copies(torch.zeros(1, to, dtype=torch.int64), copies)


# memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_cache_that_memory_counts_is_the_one_that_generation_keeps(name: str) -> None:
    model = stock(name).eval()
    with torch.no_grad():
        kept = model(torch.zeros(1, 96, dtype=torch.long), use_cache=True)[CACHE]
    held = sum(x.numel() * x.element_size() for layer in kept.layers for x in (layer.keys, layer.values))
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config).eval()
    assert cache_bytes(empty, 96) == held


def test_memory_prints_weights_and_cache(files: Path) -> None:
    result = CliRunner().invoke(app, ["memory", str(files / "model"), "--to", "32k", "--dtype", "float32", "--batch", "2"])
    assert result.exit_code == 0, result.output
    told = re.findall(r"KV cache\s+│\s+([\d,]+) MiB", result.output)
    assert told == ["16"]  # 2 texts x 32,768 tokens x 2 layers x keys and values of 16 features x 4 bytes
    wrong = CliRunner().invoke(app, ["memory", str(files / "model"), "--dtype", "float13"])
    assert wrong.exit_code == 2
    assert "--dtype" in wrong.output
