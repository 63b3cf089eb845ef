"""What newcomers tripped over: each ends in one message that names the thing and the way out, and no work is lost."""

from __future__ import annotations

import dataclasses
import errno
import io
import itertools
import json
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy
import pytest
import tiny
import torch
import typer
from filelock import FileLock
from helpers import stock, tokens
from interrupts import at_pass
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from typer.testing import CliRunner
from undrawn import undrawn

import hf_longattn
from hf_longattn import LongAttnConfig, apply
from hf_longattn.checks import Refused, check_folder
from hf_longattn.cli import app
from hf_longattn.cli.common import table, warnings_in_one_line
from hf_longattn.evaluation import Copy, doctor, measured_extension
from hf_longattn.evaluation.rows import SEARCHED, RowFile
from hf_longattn.evaluation.settings import Setting
from hf_longattn.slots import registry
from hf_longattn.slots.base import LengthTemperature

T5 = T5Config(vocab_size=97, d_model=16, num_layers=1, num_heads=2, d_kv=8, d_ff=16)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stumbles")
    tiny.save(path / "model", trained=1024)
    tiny.text(path / "book.txt", 6000)
    shutil.copytree(path / "model", path / "nan")
    weights = load_file(path / "nan" / "model.safetensors")
    weights["model.layers.1.self_attn.q_proj.weight"][0, 0] = torch.nan
    save_file(weights, path / "nan" / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(path / "model", path / "mute", ignore=shutil.ignore_patterns("tokenizer*"))
    shutil.copytree(path / "model", path / "t5")
    T5.save_pretrained(path / "t5")
    (path / "chats.jsonl").write_text('{"messages": "hello"}\n')
    (path / "training" / "checkpoint-2").mkdir(parents=True)
    peft = pytest.importorskip("peft")
    adapted = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    base = hf_longattn.apply(AutoModelForCausalLM.from_pretrained(path / "model").train(), "logn")
    peft.get_peft_model(base, adapted).save_pretrained(path / "adapter")
    (path / "adapter" / "config.json").unlink(missing_ok=True)
    return path


def run(line: str, files: Path, out: Path) -> tuple[int, str]:
    """The exit code and what was said, without the boxes that break lines anywhere."""
    result = CliRunner().invoke(app, line.replace("F/", f"{files}/").replace("OUT", str(out)).split())
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    return result.exit_code, "".join(result.output.replace("│", "").split())


EVAL = "eval F/model --text F/book.txt --out OUT --lengths 256 --targets 64"
EXTEND = "extend F/model --to 4k --text F/book.txt --out OUT --tolerance 10"
PROBE = "probe F/model --text F/book.txt --passages 2 --distances 2k"
INSPECT = "inspect F/model --text F/book.txt --length 256"
TRAIN = "train continue_lora model=F/model data=F/book.txt output=OUT length=64 trainer.max_steps=2 trainer.use_cpu=true"
TRAIN += " trainer.save_steps=1 trainer.logging_steps=1 trainer.eval_strategy=no"
TRAIN += " evaluation.compare=false trainer.disable_tqdm=true evaluation.tokens=64"


@pytest.mark.parametrize("line", [EVAL, EVAL + " --method rerope", EXTEND, PROBE, INSPECT, TRAIN])
def test_weights_that_are_no_numbers_are_named(files: Path, tmp_path: Path, line: str) -> None:
    code, said = run(line.replace("F/model", "F/nan"), files, tmp_path / "out")
    assert code == 2, said
    assert "1of256numbersinmodel.layers.1.self_attn.q_proj.weightareNaNorinfinite" in said
    assert not (tmp_path / "out").exists() or not line.startswith("eval")


def test_doctor_finds_weights_that_are_no_numbers(files: Path, tmp_path: Path) -> None:
    code, said = run("doctor F/nan --device cpu", files, tmp_path)
    assert code == 1
    assert "problemweights" in said
    assert "self_attn.q_proj.weightareNaN" in said


@pytest.mark.parametrize(
    ("line", "says"),
    {
        EVAL.replace("F/model", "F/mute"): "holds no tokenizer: there is no tokenizer.json in it",
        EVAL.replace("F/model", "F/missing"): "there is no folder",
        EVAL.replace("F/model", "F/t5"): "t5 is not a causal language model",
        EVAL.replace("F/model", "F/adapter"): "holds an adapter, not a model: give the model that it was made from",
        TRAIN.replace("F/model", "F/mute"): "holds no tokenizer",
        "doctor F/model/config.json": "config.json is a file: give its folder",
        TRAIN.replace("data=F/book.txt", "data=F/a.txt,F/b.jsonl"): "several are written as a list, data=[",
        TRAIN.replace("book.txt", "chats.jsonl"): "row 1: 'messages' is 'hello', neither a text nor a list of messages",
        "push F/training someone/model --dry-run": "is unfinished: it holds checkpoints",
        "inspect F/training --text F/book.txt": "Finish it by the same command with --resume, or give one of the checkpoints",
        EXTEND + " --tolerance -1": "a cost in nats is 0 or more, not -1",
        EVAL + " --method rerope+rerope": "rerope and rerope clash",
    }.items(),
)
def test_messages_name_the_thing_and_the_way_out(files: Path, tmp_path: Path, line: str, says: str) -> None:
    code, said = run(line, files, tmp_path / "out")
    assert code == 2, said
    assert "".join(says.split()) in said
    assert not list(tmp_path.iterdir())


def test_a_name_is_asked_for_once(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def model_info(self: Any, name: str, **_: Any) -> None:
        asked.append(name)
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    code, said = run(EVAL.replace("F/model", "no-one/has-this"), files, tmp_path / "out")
    assert (code, asked) == (2, ["no-one/has-this"])
    assert "thecachehasnomodelofthatname,andaskingtheHubforonefailed:noroute" in said


# a full disk --------------------------------------------------------------------------------------------------------------


def full(self: Any, directory: Any, *args: Any, **kwargs: Any) -> None:
    (Path(directory) / "half").write_text("written")
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.slow
@pytest.mark.usefixtures("every_candidate_improves")
def test_extend_keeps_its_rows_when_the_disk_is_full(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "save_pretrained", full)
        code, said = run(EXTEND, files, tmp_path / "out")
    assert code == 1
    assert "Thediskisfull" in said
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["extend.json"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    code, said = run(EXTEND, files, tmp_path / "out")
    assert code == 0, said
    assert said.count("(kept)") >= 10
    assert said.count("unmodified|2048:") <= 1  # each row is told once
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.slow
def test_train_says_what_is_kept_when_the_disk_is_full(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    saved = peft.PeftModel.save_pretrained

    def fuller(self: Any, directory: Any, *args: Any, **kwargs: Any) -> None:
        (saved if "checkpoint" in Path(directory).name else full)(self, directory, *args, **kwargs)

    monkeypatch.setattr(peft.PeftModel, "save_pretrained", fuller)
    code, said = run(TRAIN, files, tmp_path / "out")
    assert code == 1
    assert "Thediskisfull" in said
    assert "checkpoint-2iskept.Tocontinue:" in said


def test_save_replaces_nothing_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_longattn.apply(stock("llama"), "logn")
    hf_longattn.save(model, tmp_path / "model")
    before = {p.name: p.read_bytes() for p in (tmp_path / "model").iterdir()}
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        hf_longattn.save(model, tmp_path / "model", overwrite=True)
    assert {p.name: p.read_bytes() for p in (tmp_path / "model").iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_save_into_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "emma.txt").write_text("Emma")
    with pytest.raises(FileExistsError, match=r"emma\.txt is a file"):
        hf_longattn.save(hf_longattn.apply(stock("llama"), "logn"), tmp_path / "emma.txt")


@pytest.mark.slow
def test_two_evaluations_of_one_folder_do_not_measure_twice(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with FileLock(out / "rows.jsonl.lock"):
        code, said = run(EVAL, files, out)
    assert code == 2
    assert "anothercommandismeasuringinto" in said
    assert run(EVAL, files, out)[0] == 0
    assert run(EVAL, files, out)[0] == 0
    assert not (out / "rows.jsonl.lock").exists()


def test_names_in_a_table_are_not_squeezed_by_its_numbers() -> None:
    names = ["leaky_rerope:window=512:stretch=7.0", "unmodified"]
    columns = ["", "prose to 1024", "prose beyond", *(f"copy {n} back" for n in range(1000, 1005))]
    shown = table("", columns, [[name, *["5.001"] * 7] for name in names])
    narrow = Console(width=80, file=io.StringIO())
    narrow.print(shown)
    lines = narrow.file.getvalue()
    assert all(part in lines for part in ("unmodified", "leaky_rerope:windo", "5.001 │ 5.001"))
    wide = Console(width=80, file=io.StringIO())
    wide.print(table("", ["", "memory"], [["weights", "1,664 MiB"]]))
    assert "1,664 MiB" in wide.file.getvalue()


# longer and longer --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("every_candidate_improves")
def test_extend_takes_a_folder_that_extend_made(files: Path, tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    model = hf_longattn.extend(AutoModelForCausalLM.from_pretrained(files / "model"), 2048, "self_extend", group=4, window=256)
    hf_longattn.save(model, tmp_path / "longer", tokenizer=tokenizer)
    code, said = run(EXTEND.replace("F/model", str(tmp_path / "longer")), files, tmp_path / "out")
    assert code == 0, said
    assert "YaRNisleftout" in said
    record = json.loads((tmp_path / "out" / "extend.json").read_text())
    assert record["choice"] in record["probed"]


def test_extend_says_what_a_model_runs_already(files: Path, tmp_path: Path) -> None:
    """And that YaRN, which is not the model's, does not go with it."""
    model = hf_longattn.extend(AutoModelForCausalLM.from_pretrained(files / "model"), "2k", "rerope")
    hf_longattn.save(model, tmp_path)
    shutil.copy(files / "model" / "tokenizer.json", tmp_path)
    line = ["extend", str(tmp_path), "--to", "4k", "--text", str(files / "book.txt"), "--device", "cpu"]
    with at_pass(LlamaModel):  # all of that is said before a text is read
        said = " ".join(CliRunner().invoke(app, line).output.split())
    assert f"{tmp_path} runs rerope already, extended to 2,048 tokens" in said
    assert "the checkpoint runs rerope, which remaps the rotation that it was trained with, and yarn:" in said
    assert "hf_longattn.remove(model)" in said
    assert "scales its rotary positions already" not in said


def test_extend_refuses_learned_positions_in_one_message(files: Path, tmp_path: Path) -> None:
    model = tiny.save_gpt2(tmp_path, trained=1024)
    line = ["extend", str(model), "--to", "4k", "--text", str(files / "book.txt"), "--device", "cpu"]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 2, result.output
    said = " ".join(result.output.replace("│", " ").split())
    assert "the model takes its positions from a table of 1024 entries, which no method can extend" in said
    assert "MODEL" in said


def test_a_method_in_place_of_the_one_that_reads_far_puts_the_length_back(tmp_path: Path) -> None:
    model = hf_longattn.extend(stock("llama"), 4 * stock("llama").config.max_position_embeddings)
    trained = stock("llama").config.max_position_embeddings
    with pytest.warns(UserWarning, match=f"infoscale replaces rerope.*max_position_embeddings is {trained} again"):
        hf_longattn.apply(model, "infoscale")
    assert model.config.max_position_embeddings == trained
    hf_longattn.save(model, tmp_path / "saved")
    assert AutoConfig.from_pretrained(tmp_path / "saved").max_position_embeddings == trained


def test_doctor_finds_an_announced_length_that_nothing_reaches(files: Path, tmp_path: Path) -> None:
    model = hf_longattn.apply(AutoModelForCausalLM.from_pretrained(files / "model"), "infoscale")
    hf_longattn.save(model, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    changed = config | {"max_position_embeddings": 8192, "original_max_position_embeddings": 1024}
    (tmp_path / "model" / "config.json").write_text(json.dumps(changed))
    found = [f for f in doctor.examine(str(tmp_path / "model"), weights=False) if f.level == doctor.PROBLEM]
    assert any("announces 8192 tokens and keeps 1024" in f.text for f in found)


# a second time ------------------------------------------------------------------------------------------------------------


def test_yarn_makes_a_longer_model_that_needs_no_plugin(files: Path, tmp_path: Path) -> None:
    """And saving again says that it is finished, or puts another choice in its place."""
    out, plan = tmp_path / "out", measured_extension.MeasuredExtension(str(files / "model"), 4096)
    settings = {"YaRN": Setting("YaRN", rope="yarn:4.0"), "rerope": Setting.parse("rerope:window=512")}

    def save(choice: str, purpose: str) -> str:
        """What is said; the folder is taken for one of the command's own."""
        check_folder(out, set(), SEARCHED)
        rows = RowFile(out / "extend.json", protocol={"to": 4096})
        found = {"to": 4096, "purpose": purpose, "tolerance": 0.02, "edge": 1024, "probed": dict}
        found |= {"scores": dict, "copies": [Copy(1024, 2048)]}
        search = SimpleNamespace(settings=settings, rows=rows, **found)
        told: list[str] = []
        with undrawn():
            plan.save(search, choice, "float32", out, told.append)
        return "".join("".join(told).split())

    assert "importhf_longattn" not in save("YaRN", "both")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert (model.config.max_position_embeddings, model.config.rope_parameters["factor"]) == (4096, 4)
    known = hf_longattn.describe(model).trained
    assert known is not None
    assert (known.length, known.assumed, known.rotation_is_own) == (1024, None, False)
    assert hf_longattn.apply(model, "attention_sink").config.max_position_embeddings == 4096
    assert hf_longattn.remove(model).config.max_position_embeddings == 4096
    with pytest.raises(ValueError, match="needs nothing of this package: huggingface_hub uploads it"):
        hf_longattn.push(out, "someone/longer")
    written = (out / "model.safetensors").stat().st_mtime_ns
    assert "isfinished:itholdsYaRNalready" in save("YaRN", "reading")
    assert (out / "model.safetensors").stat().st_mtime_ns == written
    assert json.loads((out / "extend.json").read_text())["for"] == "reading"
    with pytest.raises(Refused, match="holds a model under YaRN, and rerope is what is chosen now"):
        save("rerope", "both")
    assert (out / "model.safetensors").stat().st_mtime_ns == written
    for path in (out / "config.json", out / "model.safetensors"):
        path.unlink()
    save("rerope", "both")
    assert hf_longattn.get_config(AutoModelForCausalLM.from_pretrained(out)).name == "rerope"
    assert json.loads((out / "extend.json").read_text())["choice"] == "rerope"


def test_extend_needs_room_in_the_trained_length(files: Path, tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "short", trained=256)
    code, said = run(f"extend {model} --to 4k --text F/book.txt", files, tmp_path)
    assert code == 2
    assert "itwastrainedat256tokens,andtochoosebymeasurementtakes896" in said
    assert 'hf_longattn.extend(model,"4096")' in said


def test_the_reason_of_a_trained_length_stays() -> None:
    model = hf_longattn.extend(hf_longattn.extend(stock("llama"), "1k"), "2k")
    assert str(hf_longattn.describe(model).trained).endswith(": max_position_embeddings")
    with pytest.raises(ValueError, match=r"trained at \d+ tokens \(max_position_embeddings\)"):
        hf_longattn.extend(model, 8)


def test_a_cell_that_defines_a_method_runs_twice() -> None:
    def cell() -> type[LengthTemperature]:
        @hf_longattn.register
        @dataclasses.dataclass(frozen=True, kw_only=True)
        class Twice(LengthTemperature):
            name: ClassVar[str] = "defined_twice"
            paper: ClassVar[str] = "none"

            def formula(self, n: torch.Tensor, head_dim: int, train_length: int) -> torch.Tensor:
                return n.log()

        return Twice

    try:
        first = cell()
        model = hf_longattn.apply(stock("llama"), "defined_twice")
        second = cell()
        hf_longattn.update(model, clamp=False)  # the model goes on
        assert type(hf_longattn.get_config(model).temperature) is first
        assert type(hf_longattn.get_config(hf_longattn.apply(model, "defined_twice")).temperature) is second
    finally:
        registry._loaded.pop("defined_twice")


@pytest.mark.parametrize("name", ["sdpa", "eager", "flash_attention_2", "longattn", "unmodified"])
def test_a_name_that_means_something_else_is_no_methods(name: str) -> None:
    stock_function = AttentionInterface().get(name)
    named = type("Mine", (hf_longattn.methods.LogN,), {"name": name})
    with pytest.raises(ValueError, match=f"Mine is called '{name}', which names .*: choose another name"):
        hf_longattn.register(named)
    assert AttentionInterface().get(name) is stock_function
    AttentionInterface.register("attention_of_others", lambda *_, **__: None)
    with pytest.raises(ValueError, match="an attention that transformers has already"):
        hf_longattn.register(type("Mine", (hf_longattn.methods.LogN,), {"name": "attention_of_others"}))
    with pytest.raises(ValueError, match="has no name: give the class one"):
        hf_longattn.register(type("Mine", (LengthTemperature,), {}))


# the interface ------------------------------------------------------------------------------------------------------------


def test_measure_takes_one_batch_as_well_as_several() -> None:
    ids = tokens(2, 24)
    several = hf_longattn.measure(stock("llama"), [ids])
    for one in (ids, {"input_ids": ids}):
        assert torch.equal(hf_longattn.measure(stock("llama"), one).entropy, several.entropy)


@pytest.mark.parametrize("data", [[1], 3, None])
def test_a_config_is_made_of_a_name_or_a_mapping(data: Any) -> None:
    kind = (ValueError, "each part is a config") if isinstance(data, list) else (TypeError, "a method is given by its name")
    with pytest.raises(kind[0], match=kind[1]):
        LongAttnConfig.parse(data)
    with pytest.raises(ValueError, match="each part is a config with a method"):
        LongAttnConfig.parse({"parts": [data]})


def test_describe_says_what_is_alike_once() -> None:
    described = hf_longattn.describe(hf_longattn.apply(stock("llama"), "rerope"))
    assert len(described.rows) > 1
    lines = str(described).splitlines()
    assert len(lines) == 2
    assert f"({len(described.rows)} modules)" in lines[1]


ADDRESSED: dict[str, Any] = {
    "hf_longattn.remove(model) takes a method out, and a recipe has method=null": lambda m: apply(m, "unmodified"),
    "hf_longattn.remove(model) takes a method out, and model.set_attn_implementation('sdpa')": lambda m: apply(m, "sdpa"),
    "hf_longattn.remove(model) takes a method out": lambda m: apply(m, None),
    "did you mean 'rerope'?": lambda m: apply(m, "ReRoPE"),
    "the method yarn_beyond": lambda m: apply(m, "yarn"),
    "'rerope+infoscale' for all of them": lambda m: apply(m, ["rerope", "infoscale"]),
    "window is given twice: 3 in 'rerope:window=3' and 4 beside it": lambda m: apply(m, "rerope:window=3", window=4),
    "the method given is a LlamaForCausalLM": lambda m: apply("rerope", m),
    "a loaded model first, got '32k'": lambda m: hf_longattn.extend("32k", m),  # type: ignore[type-var]
    "'root_logn' is no method here. If it is one of your own, import the module that registers it first": (
        lambda m: LongAttnConfig.parse({"temperature": {"name": "root_logn"}})
    ),
    "evaluate has no option 'length'; did you mean 'lengths'?": lambda m: hf_longattn.evaluate(m, ["a b"], length=[8]),
    "settings are a list": lambda m: hf_longattn.evaluate(m, ["a b"], settings={"a": "rerope"}),  # type: ignore[arg-type]
    "text 1 is 'e40.txt', which looks like a file": lambda m: hf_longattn.evaluate(m, ["e40.txt"]),
    "the model comes first, then the texts": lambda m: hf_longattn.evaluate(["a b"], m),
    "a loaded model first, got an object of type NoneType": lambda m: hf_longattn.evaluate(None, ["a b"]),
    "text 1 is of type NoneType: texts are contents": lambda m: hf_longattn.evaluate(m, [None]),  # type: ignore[list-item]
    "hf_longattn.evaluation.Setting(name, method=...), got LongAttnConfig": (
        lambda m: hf_longattn.evaluate(m, ["a b"], [LongAttnConfig.preset("logn")])  # type: ignore[list-item]
    ),
    "no tasks to measure: name some, or leave tasks out for loss": lambda m: hf_longattn.evaluate(m, ["a b"], tasks=[]),
    "depths must be an integer, got 2.5": lambda m: hf_longattn.evaluate(m, ["a b"], depths=2.5),
    "targets must be an integer, got '4k'": lambda m: hf_longattn.evaluate(m, ["a b"], targets="4k"),
    "keep must be a number, got None": lambda m: hf_longattn.evaluate(m, ["a b"], keep=None),
    "chat must be True or False, got 'no'": lambda m: hf_longattn.evaluate(m, ["a b"], chat="no"),
    "rows must be an integer, got (64,)": lambda m: hf_longattn.evaluate(m, ["a b"], tasks="attention", rows=[64]),
    "there is no device None here": lambda m: hf_longattn.evaluate(m, ["a b"], device=None),
    "layers must be a non-empty list of layer indices >= 0, got 0": lambda m: hf_longattn.capture(m, 0).__enter__(),
    "layers must be 'full_attention', 'all' or a list of indices, got 0": lambda m: apply(m, "logn", layers=torch.tensor(0)),
    "unknown purpose None; known: both, reading, retrieval": lambda m: hf_longattn.extend(m, "4k", purpose=None),
    "a batch is token ids, (batch, length), or what a tokenizer gives, not a str": (
        lambda m: hf_longattn.calibrate(m, ["text"])  # type: ignore[list-item]
    ),
    "token ids, (batch, length), got torch.int64, (9,)": lambda m: hf_longattn.measure(m, torch.arange(9)),
    "what a tokenizer gives, not a list": lambda m: hf_longattn.measure(m, {"input_ids": [1, 2, 3]}),
    "target -1 is the index of none of 4 logits": (
        lambda m: hf_longattn.fit_adaptive_temperature(torch.randn(8, 4), [-1] * 8)
    ),
    "logits are a 1-D tensor for each sample, got list": lambda m: hf_longattn.fit_adaptive_temperature([[0.0, 1.0]], [0]),  # type: ignore[list-item]
    "degree must be an integer >= 0, got 1.5": (
        lambda m: hf_longattn.fit_adaptive_temperature(torch.randn(8, 4), [0] * 8, degree=1.5)  # type: ignore[arg-type]
    ),
    "there is no argument 'tokeniser'; did you mean 'tokenizer'?": lambda m: hf_longattn.save(
        apply(m, "logn"), "x", tokeniser=1
    ),
    "there is no argument 'overwrit'; did you mean 'overwrite'?": lambda m: hf_longattn.save(
        apply(m, "logn"), "x", overwrit=True
    ),
    "training must be facts by name": lambda m: hf_longattn.save(apply(m, "logn"), "x", training="six novels"),
    "1.5 is not a length": lambda m: hf_longattn.save(apply(m, "logn"), "x", training_lengths=[1.5]),
    'the name of a repository, "user/name", got None': lambda m: hf_longattn.push(m, None),  # type: ignore[arg-type]
    "there is no argument 'exists_ok'; did you mean 'exist_ok'?": lambda m: hf_longattn.push("x", "a/b", exists_ok=True),
    "rerope has no parameter 'layer'; did you mean 'layers'?": lambda m: apply(m, "rerope", layer=[0]),
    "no method in rerope; did you mean 'backend'?": lambda m: hf_longattn.update(apply(m, "rerope"), backnd="tiled"),
    "did you mean 'train_length'?": lambda m: hf_longattn.extend(m, "4k", train_lenght="1k"),
    "a learned bias (position_bias) joins their logits": lambda m: hf_longattn.extend(T5ForConditionalGeneration(T5), "4k"),
}


@pytest.mark.parametrize("says", ADDRESSED)
def test_a_mistaken_call_is_told_what_was_meant(says: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        ADDRESSED[says](stock("llama"))
    assert says in str(error.value)


def test_what_a_method_is_given_by_name_and_beside_it_must_agree(files: Path) -> None:
    def load(**how: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(files / "model", **how)

    with pytest.raises(ValueError, match="window is given twice"):
        load(attn_implementation="rerope:window=3", longattn={"window": 4})
    with pytest.raises(ValueError, match=r"attn_implementation='rerope'$"):
        load(longattn={"window": 5, "name": "rerope"})
    for given in (LongAttnConfig.preset("rerope"), ["rerope"]):
        with pytest.raises(TypeError, match=rf"takes a name, got a {type(given).__name__}: .* longattn=config beside"):
            load(attn_implementation=given)
        with pytest.raises(TypeError, match="attn_implementation takes a name"):
            stock("llama").set_attn_implementation(given)  # type: ignore[arg-type]
    for window in (numpy.int64(5), torch.tensor(5)):
        model = load(attn_implementation="longattn", longattn={"positions": {"name": "rerope", "window": window}})
        assert hf_longattn.get_config(model).positions == hf_longattn.methods.ReRope(window=5)
        assert '"window": 5' in str(model.config)
    model = load(attn_implementation="rerope + infoscale", longattn={"window": 5})
    assert hf_longattn.get_config(model).positions == hf_longattn.methods.ReRope(window=5)


def test_an_adapter_says_that_it_runs_its_method(files: Path) -> None:
    with pytest.warns(UserWarning, match=r"the adapter was trained under logn, and runs under it: attn_implementation='sdpa'"):
        AutoModelForCausalLM.from_pretrained(files / "adapter", attn_implementation="sdpa")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AutoModelForCausalLM.from_pretrained(files / "adapter")


def test_methods_lists_the_parameters_of_one(files: Path, tmp_path: Path) -> None:
    code, said = run("methods self_extend", files, tmp_path)
    assert code == 0, said
    assert all(name in said for name in ("window", "group", "default", "Paper:"))
    assert run("methods rerop", files, tmp_path)[0] == 2


def test_help_names_every_recipe_and_how_to_run_a_command() -> None:
    from hf_longattn.training.recipe import RECIPES

    said = "".join(CliRunner().invoke(app, ["train", "--help"]).output.replace("│", "").split())
    assert all(name in said for name in RECIPES)
    assert "1iftheplanneedsovertwodaysortoomuchmemoryandyoudidnotconfirm(--yes)" in said
    assert "--COMMAND" in "".join(CliRunner().invoke(app, ["run", "--help"]).output.partition("\n")[2].split("\n")[0].split())


@pytest.mark.parametrize("command", ["extend", "train", "probe", "inspect", "memory", "push", "doctor", "eval", "run"])
def test_help_is_broken_where_the_terminal_ends_alone(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is followed by another of its paragraph has no room for the first word of that."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = CliRunner().invoke(app, [command, "--help"], terminal_width=80).output.splitlines()
    about = [line.strip() for line in lines[: next(n for n, line in enumerate(lines) if line.startswith("╭"))]]
    for line, following in itertools.pairwise(about[3:]):
        assert not line or not following or len(line) + 1 + len(following.split()[0]) > 78, (line, following)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["evla"], "Error: No such command 'evla'. Did you mean 'eval'?\nFor help: "),
        (["--frob"], "Error: No such option: --frob\nFor help: "),
        (["probe", "--zzzz"], "Error: No such option: --zzzz\nFor help: "),
        (
            ["methods", "rerop"],
            "Error: Invalid value for NAME: unknown method 'rerop'; did you mean 'rerope'? known methods: ",
        ),
        (["train", "a_recipe_that_has_a_long_name"], "Error: there is no recipe 'a_recipe_that_has_a_long_name'; give a YAML"),
        (["train", "method_lora", "--model", "x"], "Error: --model is a key of the recipe: write model=x\n"),
    ],
)
def test_an_error_is_a_line_that_copies(line: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    result = CliRunner().invoke(app, line)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(said)
    assert not set(result.stderr) & set("│╭╰")


def test_a_purpose_that_is_none_is_answered_by_the_three_and_no_guess(tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny.save(tmp_path))
    with pytest.raises(ValueError, match=r"^unknown purpose 'rag'; known: both, reading, retrieval$"):
        hf_longattn.extend(model, to=2048, purpose="rag")


def test_no_command_passes_on_a_warning_about_a_name_that_peft_reads(files: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(files / "model")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert not model.is_gradient_checkpointing
        renamed = len([w for w in told if w.category is FutureWarning])  # by Transformers 5.24
        assert CliRunner().invoke(app, ["methods", "rerope"]).exit_code == 0
        assert not model.is_gradient_checkpointing
    assert len([w for w in told if w.category is FutureWarning]) == renamed


def test_a_warning_of_a_command_names_no_file_of_what_called_it() -> None:
    plain = warnings.formatwarning
    with warnings_in_one_line():
        assert warnings.formatwarning("few words", UserWarning, typer.main.__file__, 1) == "Warning: few words\n"
        assert warnings.formatwarning("few words", UserWarning, __file__, 1) == plain("few words", UserWarning, __file__, 1)
    assert warnings.formatwarning is plain
