"""What a user can type wrong: refused in one message before weights are read, with exit status 2, and no folder is left."""

from __future__ import annotations

import functools
import json
import re
import shutil
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import parts
import pytest
import tiny
import torch
import transformers
from helpers import crossed, stock
from huggingface_hub import ModelCard
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupts import at_step
from peft import AutoPeftModel, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedModel,
)
from typer.testing import CliRunner

import hf_longattn
from hf_longattn.checks import Refused
from hf_longattn.cli import app
from hf_longattn.cli.memory import cache_bytes
from hf_longattn.evaluation.checkpoints import Checkpoint
from hf_longattn.evaluation.measures.copies import with_copies
from hf_longattn.evaluation.search import plan_copies
from hf_longattn.evaluation.settings import Setting, read_settings
from hf_longattn.integration.caches import CACHE
from hf_longattn.sharing import hub
from hf_longattn.sharing.card import Facts
from hf_longattn.training import Recipe, load_recipe
from hf_longattn.training.recipe import check


@pytest.fixture(scope="module")
def files(tmp_path_factory: Any) -> Path:
    """A model, adapters, texts; and each of them in ways that are wrong."""
    path = tmp_path_factory.mktemp("cli")
    tiny.save(path / "model", trained=1024)
    tiny.text(path / "book.txt", 5000)
    (path / "latin.txt").write_bytes("é".encode("latin-1") * 5000)
    (path / "chats.jsonl").write_text('{"messages": []}')
    (path / "nomodel").mkdir()
    shutil.copytree(path / "model", path / "cut")
    weights = (path / "cut" / "model.safetensors").read_bytes()
    (path / "cut" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    wide = LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    adapted = get_peft_model(AutoModelForCausalLM.from_config(wide), LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(path / "wide")
    shallow = AutoConfig.from_pretrained(path / "model", num_hidden_layers=1)
    adapted = get_peft_model(AutoModelForCausalLM.from_config(shallow), LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(path / "shallow")
    (path / "broken.yaml").write_text("mine: {method: [")
    (path / "typo.yaml").write_text("mine: {methdo: logn}")
    (path / "type.yaml").write_text("mine: {method: 3}")
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
    EXTEND.replace("4k", "1100"): "takes 1792 tokens or more, not 1100",
    EXTEND.replace("4k", "-5"): "is not a length",
    EXTEND.replace("4k", "512"): "nothing to extend",
    EXTEND.replace("4k", "64k"): "65536 are needed",
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
    EVAL + " --adapter foo=F/shallow": "was made from another model: 2 weights of this one are not in it",
    EVAL + " --settings F/broken.yaml": "broken.yaml is not valid YAML",
    EVAL + " --settings F/typo.yaml": "'mine' has no 'methdo'; did you mean 'method'?",
    EVAL + " --settings F/type.yaml": "method cannot be 3",
    EVAL + " --settings F/list.yaml": "must map names to settings",
    EVAL + " --settings F/none.yaml": "none.yaml is not a file",
    EVAL + " --settings rerope:window=64": "a method goes behind --method",
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
    EVAL + " --method logn:train_length=8,clamp=false": "parameters follow it by colons",
    EVAL + " --method infscale": "did you mean 'infoscale'?",
    EVAL + " --adapter mine": "the adapter 'mine' is not a directory",
    EVAL + " --adapter F/wide --adapter wide=F/nomodel": "are called 'wide': give the adapter another name, as NAME=",
    EVAL + " --keep 85": "a share lies in (0, 1], not at 85",
    EVAL.replace("book", "none"): "none.txt is not a file",
    EVAL.replace("OUT", "F/model"): "holds something else (config.json); nothing is overwritten",
    EVAL.replace("book", "latin"): "latin.txt is not UTF-8",
    EVAL.replace("book.txt", "chats.jsonl"): "chats.jsonl has rows",
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
    TRAIN + " trainer.learning_rate=abc": "trainer.learning_rate: Value 'abc' of type 'str' could not be converted to Float",
    TRAIN + " trainer.learning_rate=-1": "trainer.learning_rate must lie in [0, inf], got -1",
    TRAIN + " trainer.bf16=maybe": "trainer.bf16: Value 'maybe' is not a valid bool",
    TRAIN + " trainer.per_device_train_batch_size=2.5": "could not be converted to Integer",
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
}


@pytest.mark.parametrize("line", REFUSED)
def test_refused(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", lambda *a, **k: pytest.fail("weights were read"))
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


@pytest.mark.slow
def test_training_under_a_method_warns_of_nothing(files: Path, tmp_path: Path) -> None:
    """`UntrainedWarning` is for those who run what was not trained."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", hf_longattn.UntrainedWarning)
        result = CliRunner().invoke(app, ["train", *small(files, tmp_path / "out")])
    assert result.exit_code == 0, (result.output, result.exception)


@pytest.mark.slow
def test_an_interrupted_run_is_resumed_as_if_it_had_not_been(files: Path, tmp_path: Path) -> None:
    """By a Ctrl-C in the middle of a step."""
    before = signal.getsignal(signal.SIGINT)
    whole = CliRunner().invoke(app, ["train", *small(files, tmp_path / "whole")])
    assert whole.exit_code == 0, whole.output
    with at_step(1, lambda: signal.raise_signal(signal.SIGINT)):
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


@pytest.mark.slow
def test_a_run_that_fails_before_its_first_checkpoint_is_not_in_the_way(files: Path, tmp_path: Path) -> None:
    def fails() -> None:
        raise RuntimeError("out of memory")

    with at_step(0, fails):
        result = CliRunner().invoke(app, ["train", *small(files, tmp_path / "out")])
    assert (result.exit_code, str(result.exception)) == (1, "out of memory")
    assert not (tmp_path / "out").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("kept")  # came while it ran, say
    assert CliRunner().invoke(app, ["train", *small(files, tmp_path / "mine")]).exit_code == 2
    assert (tmp_path / "mine" / "notes").read_text() == "kept"


@pytest.mark.slow
@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_stopped_within_its_first_checkpoint_a_run_says_what_goes_on(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """An unfinished checkpoint without weights goes; one with weights stays, and is in nothing's way."""

    def cut(self: Any, folder: str, **kwargs: Any) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / file).write_text("{}")
        raise KeyboardInterrupt

    words = ["train", *small(files, tmp_path / "out")]
    with monkeypatch.context() as patch:
        patch.setattr(PeftModel, "save_pretrained", cut)
        stopped = CliRunner().invoke(app, words)
    assert stopped.exit_code == 130, (stopped.output, stopped.exception)
    weights = file.endswith("safetensors")
    said = "while it saved the first checkpoint, which is unfinished" if weights else "nothing is kept; the same command"
    assert said in stopped.output
    assert "is kept" not in stopped.output.replace("nothing is kept", "")
    assert (tmp_path / "out").exists() is weights or not any((tmp_path / "out").iterdir())
    again = CliRunner().invoke(app, [*words, *["--resume"] * weights, "--dry-run"])
    assert again.exit_code == 0, again.output


# checks under anything ------------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 9), st.floats(), st.text("abc-+@:=,.[]{}10", max_size=8), st.just("logn")
)
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text("ab", max_size=3), v, max_size=2))
CHECKED = settings(max_examples=150, derandomize=True, deadline=None, database=None)


@pytest.mark.slow
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


@pytest.mark.slow
@CHECKED
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "method": st.builds(
                "{}{}{}".format,
                st.sampled_from(["logn", "scale_invariant", "rerope", "output_standardise", "streaming", ""]),
                st.sampled_from(["", ":tau=3", ":s", ":train_length=-1", ":window=[1]", ":layers=all", ":clamp=x"]),
                st.sampled_from(["", "@yarn:2", "@yarn:nan", "@ntk:-1", "@"]),
            )
            | st.dictionaries(st.sampled_from(["parts", "sink", "version", "layers"]), VALUES, max_size=2)
            | VALUES,
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


RECIPE_KEYS = ["method", "method.score", "method.logit_map.name", "length", "lora", "lora.r", "distill.weight", "positions"]
RECIPE_KEYS += ["trainer", "trainer.learning_rate", "trainer.max_steps", "trainer.save_steps", "trainer.warmup_steps"]
RECIPE_KEYS += ["evaluation.lengths", "needle.needles", "strength.share", "schedule.warmup", "calibrate", "data", "hub"]
RECIPE_KEYS += ["architecture.width", "optimizer.betas", "output", "tokenizer", "dtype", "heldout", "model", "skip.chunks"]


@pytest.mark.slow
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


def test_memory_prints_weights_and_cache(files: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["memory", str(files / "model"), "--to", "32k", "--dtype", "float32", "--batch", "2"])
    assert result.exit_code == 0, result.output
    told = re.findall(r"KV cache\s+│\s+([\d,]+) MiB", result.output)
    assert told == ["16"]  # 2 texts x 32,768 tokens x 2 layers x keys and values of 16 features x 4 bytes
    line = ["memory", str(files / "model"), "--to", "3200k", "--dtype", "float32", "--batch", "2"]
    assert re.findall(r"KV cache\s+│\s+([\d,.]+ \w+)", CliRunner().invoke(app, line).output) == ["1.6 GiB"]
    stock("gemma3n").save_pretrained(tmp_path)  # a feed-forward size for each layer
    result = CliRunner().invoke(app, ["memory", str(tmp_path), "--to", "32k", "--dtype", "float32"])
    assert "activations" in result.output, (result.output, result.exception)
    wrong = CliRunner().invoke(app, ["memory", str(files / "model"), "--dtype", "float13"])
    assert wrong.exit_code == 2
    assert "--dtype" in wrong.output


# models that are no plain causal language model ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: Any) -> Any:
    """Folders of such checkpoints, saved when they are asked for."""
    root = tmp_path_factory.mktemp("kinds")
    return functools.cache(lambda kind: parts.save(kind, root / kind))


def command(line: str, **words: Any) -> tuple[int, str]:
    """Exit status and output of a command; words in capitals stand for paths."""
    result = CliRunner().invoke(
        app, [functools.reduce(lambda w, k: w.replace(k, str(words[k])), words, w) for w in line.split()]
    )
    assert result.exception is None or isinstance(result.exception, SystemExit), (line, result.exception)
    return result.exit_code, "".join(result.output.replace("│", "").split())


def same_weights(one: Path, other: Path) -> None:
    want, have = parts.weights(one), parts.weights(other)
    assert have.keys() == want.keys()
    assert all(torch.equal(have[name], want[name]) for name in want)


EXTENDED = [*parts.HEADLESS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in parts.PICTURES)]


@pytest.mark.usefixtures("every_candidate_improves")
@pytest.mark.parametrize("kind", EXTENDED)
def test_extend_keeps_class_weights_and_all_that_belongs_to_a_model(
    kind: str, kinds: Any, files: Path, tmp_path: Path
) -> None:
    model, out, (loader, task) = kinds(kind), tmp_path / "out", parts.LOADED_BY[kind]
    line = "extend MODEL --to 4096 --text BOOK --out OUT --tolerance 10"
    code, said = command(line, MODEL=model, BOOK=files / "book.txt", OUT=out)
    assert code == 0, said
    assert f"{loader}.from_pretrained(" in said
    assert ("hasnolanguage-modelhead" in said) == (kind in parts.HEADLESS)
    same_weights(model, out)
    again, info = getattr(transformers, loader).from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    assert type(again).__name__ == json.loads((model / "config.json").read_text())["architectures"][0]
    if (longer := hf_longattn.integration.model.running(again)) is not None:  # else YaRN has won
        assert longer.extended_to == 4096
        assert AutoTokenizer.from_pretrained(out).model_max_length == 4096
        assert again.config.get_text_config().max_position_embeddings == 4096
    for file in ("preprocessor_config.json", "modules.json"):
        assert (out / file).exists() == (model / file).exists()
    if kind == "embeddings":
        assert json.loads((out / "sentence_bert_config.json").read_text())["max_seq_length"] == 4096
    card = ModelCard(str(hub.files(hf_longattn.save(again, tmp_path / "saved"), "some/one", Facts())["README.md"].decode()))
    assert card.data.pipeline_tag == task
    assert f'{loader}.from_pretrained("some/one")' in card.text
    same_weights(hf_longattn.save(again, tmp_path / "once more"), tmp_path / "saved")


MEASURED = {
    "eval": "eval MODEL --text BOOK --out OUT --lengths 256 --targets 64",
    "probe": "probe MODEL --text BOOK --out OUT --passages 2",
    "train": "train continue_lora model=MODEL data=BOOK output=OUT length=64 trainer.max_steps=1 trainer.use_cpu=true "
    "evaluation.tokens=64 evaluation.compare=false trainer.eval_strategy=no",
}


@pytest.mark.parametrize("line", MEASURED)
@pytest.mark.parametrize("kind", [*parts.HEADLESS, *parts.ENCODERS])
def test_what_takes_a_head_is_refused_before_weights_are_read(
    kind: str, line: str, kinds: Any, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = kinds(kind)
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", lambda *a, **k: pytest.fail("weights were read"))
    code, said = command(MEASURED[line], MODEL=model, BOOK=files / "book.txt", OUT=tmp_path / "out")
    assert code == 2, said
    assert ("readstextwithanencoder" if kind in parts.ENCODERS else "hasnolanguage-modelhead") in said
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("kind", parts.ENCODERS)
@pytest.mark.parametrize("line", ["extend MODEL --to 4k --text BOOK", "inspect MODEL --text BOOK --length 64", "memory MODEL"])
def test_encoders_are_refused(kind: str, line: str, kinds: Any, files: Path) -> None:
    code, said = command(line, MODEL=kinds(kind), BOOK=files / "book.txt")
    assert (code, "readstextwithanencoder" in said) == (2, True), said


@pytest.mark.slow
@pytest.mark.parametrize("kind", crossed([*parts.HEADLESS, *parts.PICTURES, *parts.ENCODERS], ["reward", "llava", "bart"]))
def test_what_takes_no_head_knows_every_class(kind: str, kinds: Any, files: Path) -> None:
    model = kinds(kind)
    code, said = command("doctor MODEL", MODEL=model)
    ends = "Nothingisbroken" if kind == "bart" else "Noproblemfound"  # its positions are learned
    assert (code, ends in said) == (0, True), said
    if kind not in parts.ENCODERS:
        assert command("inspect MODEL --text BOOK --length 64 --method rerope", MODEL=model, BOOK=files / "book.txt")[0] == 0
        assert command("memory MODEL --to 1k", MODEL=model)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", parts.PICTURES)
def test_a_model_with_pictures_is_measured_and_trained_as_a_whole(kind: str, kinds: Any, files: Path, tmp_path: Path) -> None:
    model, paths = kinds(kind), {"BOOK": files / "book.txt", "OUT": tmp_path / "out"}
    assert command("probe MODEL --text BOOK --passages 1 --distances 2560", MODEL=model, **paths)[0] == 0
    assert (
        command(
            "eval MODEL --text BOOK --out OUT --lengths 256 --targets 64",
            MODEL=model,
            BOOK=paths["BOOK"],
            OUT=tmp_path / "eval",
        )[0]
        == 0
    )
    for lora, out in (("", tmp_path / "adapter"), (" lora=null", tmp_path / "whole")):
        code, said = command(MEASURED["train"] + lora, MODEL=model, BOOK=paths["BOOK"], OUT=out)
        assert (code, f"{parts.LOADED_BY[kind][0]}.from_pretrained(" in said) == (0, True), said
    shutil.rmtree(tmp_path / "whole" / "checkpoint-1")
    assert parts.weights(tmp_path / "whole").keys() == parts.weights(model).keys()
    assert (tmp_path / "whole" / "preprocessor_config.json").exists()
    adapted = AutoPeftModel.from_pretrained(tmp_path / "adapter").get_base_model()
    assert type(adapted).__name__ == json.loads((model / "config.json").read_text())["architectures"][0]
    assert adapted.config.get_text_config().max_position_embeddings == 8192  # four times as far
    card = ModelCard.load(tmp_path / "adapter" / "README.md")
    assert card.data.pipeline_tag == parts.LOADED_BY[kind][1]
    assert "from peft import AutoPeftModel\n" in card.text


def spoilt(kind: str, folder: Path) -> tuple[Path, str]:
    """A checkpoint that is not whole, and the weight that is named."""
    m = transformers.LlamaForCausalLM(LlamaConfig(**parts.TEXT))
    if kind == "a value head":
        m.v_head = torch.nn.Linear(32, 1)
    if kind == "another class":
        m = transformers.LlamaForSequenceClassification(LlamaConfig(**parts.TEXT))
    m.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    changes = {"more layers": {"num_hidden_layers": 3}, "fewer layers": {"num_hidden_layers": 1}}
    changes |= {"wider": {"intermediate_size": 64}, "another class": {"architectures": ["LlamaForCausalLM"]}}
    changes["a class of its own"] = {"architectures": ["LlamaForRewards"], "num_hidden_layers": 3}
    config = json.loads((folder / "config.json").read_text()) | changes.get(kind, {})
    (folder / "config.json").write_text(json.dumps(config))
    names = {"a value head": "v_head.weight", "another class": "score.weight", "wider": "model.layers.0.mlp.down_proj.weight"}
    return folder, names.get(kind, "model.layers.2." if kind != "fewer layers" else "model.layers.1.")


WRONG = ["a value head", "another class", "more layers", "fewer layers", "wider", "a class of its own"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", crossed(WRONG, 3))
def test_weights_that_do_not_fit_are_an_error_that_names_them(
    kind: str, files: Path, tmp_path: Path, capsys: Any, caplog: Any
) -> None:
    model, name = spoilt(kind, tmp_path / "model")
    out = tmp_path / "out"
    for line in ("extend MODEL --to 4k --text BOOK --out OUT", MEASURED["eval"], MEASURED["probe"], MEASURED["train"]):
        code, said = command(line, MODEL=model, BOOK=files / "book.txt", OUT=out)
        assert code == 2, said
        assert name in said, said
        assert "isnotawholeLlamaForCausalLM" in said
        assert "LOADREPORT" not in said
        assert not parts.weights(out)
        shutil.rmtree(out, ignore_errors=True)
    code, said = command("doctor MODEL", MODEL=model)
    assert (code, name in said) == (1, True)
    assert "LOAD REPORT" not in caplog.text + "".join(capsys.readouterr())


@pytest.mark.parametrize("saved", ["tied", "tied and saved twice", "old buffers"])
def test_weights_that_may_be_missing_or_left_over(saved: str, tmp_path: Path) -> None:
    """Those that transformers itself passes over."""
    m = transformers.LlamaForCausalLM(LlamaConfig(**parts.TEXT | {"tie_word_embeddings": saved.startswith("tied")}))
    held = dict(m.state_dict())
    if saved == "tied":
        del held["lm_head.weight"]
    if saved == "old buffers":
        held |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}
    m.save_pretrained(tmp_path)
    save_file({k: v.clone() for k, v in held.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    assert torch.equal(Checkpoint(str(tmp_path)).load().lm_head.weight, m.lm_head.weight)
    held |= {name: torch.ones(1) for name in "abc"}
    save_file({k: v.clone() for k, v in held.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(Refused, match=r"3 weights are in the checkpoint, and would be dropped \(a, b, c\)\."):
        Checkpoint(str(tmp_path)).load()


def test_an_adapter_with_the_head_of_another_class(files: Path, tmp_path: Path) -> None:
    """A classifier made of a language model: looked at as what it is, and not measured as what it is not."""
    m = AutoModelForSequenceClassification.from_pretrained(files / "model", pad_token_id=0)
    get_peft_model(m, LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"], r=2)).save_pretrained(tmp_path / "adapter")
    code, said = command("doctor ADAPTER", ADAPTER=tmp_path / "adapter")
    assert (code, "Noproblemfound" in said) == (0, True), said
    line = f"{MEASURED['eval']} --adapter mine=ADAPTER"
    code, said = command(
        line, MODEL=files / "model", BOOK=files / "book.txt", OUT=tmp_path / "out", ADAPTER=tmp_path / "adapter"
    )
    assert (code, "makesaLlamaForSequenceClassificationofaLlamaForCausalLM" in said) == (2, True), said


@pytest.mark.parametrize("fast", [(), ("cpu:0",), ("cpu:0", "cpu")])
def test_what_extend_saves_is_in_the_checkpoints_own_precision(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: tuple[str, ...]
) -> None:
    """Whichever devices are fast in it: the one that reads it, and the CPU that it is saved from."""
    half = AutoModelForSequenceClassification.from_pretrained(files / "model", dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    tiny.tokenizer().save_pretrained(tmp_path / "half")
    monkeypatch.setattr("hf_longattn.evaluation.checkpoints.multiplies_fast", lambda dtype, device: device in fast)
    line = "extend MODEL --to 4k --text BOOK --out OUT --device cpu:0"
    code, said = command(line, MODEL=tmp_path / "half", BOOK=files / "book.txt", OUT=tmp_path / "out")
    assert code == 0, said
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


# methods of a user's own ----------------------------------------------------------------------------------------------

OWN = """
from dataclasses import dataclass
from typing import ClassVar

import hf_longattn
from hf_longattn.slots.base import LengthTemperature


@hf_longattn.register
@dataclass(frozen=True, kw_only=True)
class Own(LengthTemperature):
    name: ClassVar[str] = "own_of_a_file"
    summary: ClassVar[str] = "a root"
    paper: ClassVar[str] = "none"

    def formula(self, n, head_dim, train_length):
        return n.SHAPE
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_registry: None) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    for name, shape in (("own_methods", "sqrt()"), ("wrong_methods", "sqrt()[None]")):
        (tmp_path / f"{name}.py").write_text(OWN.replace("SHAPE", shape))
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.slow
def test_commands_take_methods_of_a_module(own: Path) -> None:
    result = CliRunner().invoke(app, ["methods", "--import", "own_methods"])
    assert result.exit_code == 0, result.output
    assert re.search(r"own_of_a_file +temperature +- +a root", result.output)
    model, text = tiny.save(own / "model"), tiny.text(own / "book.txt")
    line = ["probe", str(model), "--text", str(text), "--method", "own_of_a_file", "--distances", "2k", "--passages", "1"]
    result = CliRunner().invoke(app, [*line, "--import", "own_methods", "--out", str(own / "out")])
    assert result.exit_code == 0, result.output
    rows = [json.loads(row) for row in (own / "out" / "rows.jsonl").read_text().splitlines()]
    assert [row["setting"] for row in rows] == ["unmodified", "own_of_a_file"]
    assert "--import own_methods" in rows[0]["command"]


def test_a_module_without_methods_that_work_is_refused_by_name(own: Path) -> None:
    for module, message in (("wrong_methods", "wrong_methods.Own fails on tiny tensors"), ("no_methods", "No module named")):
        result = CliRunner().invoke(app, ["methods", "--import", module])
        assert result.exit_code == 2
        assert message in " ".join(result.output.replace("│", " ").split())
