"""`hf-longattn doctor` on tiny checkpoints, each with one defect; and on sound ones, of which it says nothing bad."""

from __future__ import annotations

import json
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import checkpoints
import coverage_models
import pytest
import tiny
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from typer.testing import CliRunner

import hf_longattn
from hf_longattn.cli import app
from hf_longattn.evaluation import doctor, environment
from hf_longattn.evaluation.outlook import trained_line
from hf_longattn.integration.trained_length import trained


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("doctor") / "model", trained=512)


def edited(sound: Path, path: Path, **changes: Any) -> Path:
    """A copy with another config.json; None takes a key out."""
    shutil.copytree(sound, path, dirs_exist_ok=True)
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return path


def told(model: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", str(model), "--device", "cpu", *options])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def test_a_sound_checkpoint(sound: Path) -> None:
    code, text = told(sound)
    assert code == 0, text
    assert "ok trained trained at 512: max_position_embeddings" in text
    assert "ok extend to 1,024: rerope:window=256 in every attention layer" in text
    assert "note extend to 4,096: rerope+infoscale:window=256 in every attention layer" in text
    assert "note beyond 4,096 tokens are 8 times the trained length of 512, and more than 4 times (2,048) was never" in text
    assert "No problem found." in text


def test_a_trained_length_that_the_settings_leave_open(tmp_path: Path, sound: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    code, text = told(edited(sound, tmp_path, rope_parameters=yarn), "--no-weights")
    assert code == 0, text
    assert "note trained trained at 512: max_position_embeddings, factor 4 x 128" in text
    assert "yarn is taken for trained in, because max_position_embeddings is 512: pass train_length= if that is not so" in text


#: Of docs/models.md: each kind of line that it has.
ON_THE_PAGE = (
    "Llama-3.2-1B",
    "Qwen3-8B with the card's YaRN",
    "Gemma-3-1b",
    "Phi-4-mini",
    "SmolLM3-3B",
    "c4ai-command-r7b",
    "DeepSeek-V2-Lite",
    "starcoder2-3b",
    "Zamba2-2.7B",
    "bloom",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_THE_PAGE)
def test_doctor_prints_the_lines_of_the_page_of_models(name: str, tmp_path: Path) -> None:
    checkpoints.tiny_config(checkpoints.CHECKPOINTS[name]).save_pretrained(tmp_path)
    found = [f.text for f in doctor.examine(str(tmp_path), weights=False) if f.topic in ("trained", "extend")]
    row = next(r for r in json.loads(coverage_models.RESULTS.read_text(encoding="utf-8"))["checkpoints"] if r["name"] == name)
    known, lines = trained(checkpoints.tiny_config(checkpoints.CHECKPOINTS[name])), [row["trained"], *row["extend"]]
    assert found == [doctor.without_reason(line, known) for line in lines]
    assert checkpoints.line(row) in coverage_models.PAGE.read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
def test_every_checkpoint_is_on_the_page() -> None:
    rows = {r["name"]: r for r in json.loads(coverage_models.RESULTS.read_text(encoding="utf-8"))["checkpoints"]}
    assert list(rows) == list(checkpoints.CHECKPOINTS), "run: python tests/kit/checkpoints.py"
    for name, checkpoint in checkpoints.CHECKPOINTS.items():
        if checkpoint["model_type"] in CONFIG_MAPPING:
            assert rows[name]["trained"] == trained_line(trained(checkpoints.tiny_config(checkpoint)))
        assert rows[name]["source"], name
    assert len(rows) >= 60


def test_a_config_of_which_no_tiny_model_can_be_built_is_noted(sound: Path, tmp_path: Path) -> None:
    """And nothing else is kept back."""
    code, text = told(edited(sound, tmp_path, hidden_act="unheard_of"), "--no-weights")
    assert code == 0, text
    assert "note extend not tried: no tiny model of this config could be built" in text


@pytest.mark.slow
def test_a_model_that_cannot_be_extended_is_told_what_it_takes(tmp_path: Path) -> None:
    code, text = told(tiny.save_gpt2(tmp_path))
    assert code == 0, text
    assert "limit extend to 512: refused: the model takes its positions from a table" in text
    assert "limit methods hf_longattn.apply puts in: windows (windowed), temperatures (infoscale), logit maps" in text
    assert "Refused: position remaps (rerope): rerope remaps rotary distances, and this model shows no rotary" in text
    assert "No problem found" not in text
    assert "Nothing is broken, but this model cannot do everything" in text


def test_a_model_that_takes_no_method_is_a_problem(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    config.save_pretrained(tmp_path)
    code, text = told(tmp_path, "--no-weights")
    assert code == 1, text
    assert "problem methods none can be put in: rerope applies to 0 layers of BertLMHeadModel" in text
    assert text.endswith("1 problem found.")


def test_a_checkpoint_that_was_extended_too_far_is_noted(tmp_path: Path, sound: Path) -> None:
    with pytest.warns(UserWarning, match="never shown to read well"):
        hf_longattn.extend(AutoModelForCausalLM.from_pretrained(sound), to="8k").save_pretrained(tmp_path)
    code, text = told(tmp_path, "--no-weights")
    assert code == 0, text
    assert "note beyond the checkpoint is extended so far: 8,192 tokens are 16 times the trained length of 512" in text


def test_a_sound_checkpoint_of_ours(tmp_path: Path, sound: Path) -> None:
    model = hf_longattn.extend(AutoModelForCausalLM.from_pretrained(sound), to="2k")
    hf_longattn.save(model, tmp_path)
    code, text = told(tmp_path)
    assert code == 0, text
    assert "rerope+infoscale, as recorded" in text
    assert "trained at 512: max_position_embeddings" in text
    assert "note extend to 4,096: rerope+infoscale:window=256 in every attention layer" in text  # from the trained length on


@pytest.mark.slow
def test_a_checkpoint_of_ours_that_is_loaded_under_another_attention(sound: Path, tmp_path: Path) -> None:
    hf_longattn.apply(AutoModelForCausalLM.from_pretrained(sound), "rerope").save_pretrained(tmp_path / "ours")
    shutil.copy(sound / "tokenizer.json", tmp_path / "ours")
    for weights in ("--weights", "--no-weights"):
        code, text = told(edited(tmp_path / "ours", tmp_path / "lost", attn_implementation=None), weights)
        assert code == 1, text
        assert "the checkpoint records rerope and is loaded under" in text


@pytest.mark.slow
def test_an_adapter(sound: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = hf_longattn.apply(AutoModelForCausalLM.from_pretrained(sound), "rerope")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "ours")
    code, text = told(tmp_path / "ours")
    assert code == 0, text
    assert "rerope, as recorded" in text
    code, text = told(tmp_path / "ours", "--no-weights")
    assert code == 0, text
    assert "rerope, which loading the adapter puts in" in text
    hf_longattn.apply(AutoModelForCausalLM.from_pretrained(sound), "logn").save_pretrained(tmp_path / "other")
    saved = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    shutil.copytree(tmp_path / "ours", tmp_path / "moved")
    (tmp_path / "moved" / "adapter_config.json").write_text(
        json.dumps(saved | {"base_model_name_or_path": str(tmp_path / "other")})
    )
    code, text = told(tmp_path / "moved", "--no-weights")
    assert code == 1, text
    assert "trained under rerope, and its base runs logn: loading refuses it" in text
    plain = AutoModelForCausalLM.from_pretrained(sound)
    peft.get_peft_model(plain, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "plain")
    assert "the adapter records no attention" in told(tmp_path / "plain")[1]


def test_versions_kernels_and_engines(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = hf_longattn.LongAttnConfig.preset("logn", backend="triton")
    hf_longattn.apply(AutoModelForCausalLM.from_pretrained(sound), config).save_pretrained(tmp_path)
    (about := tmp_path / "here" / "transformers-4.57.6.dist-info").mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.57.6\n")
    for name in {"triton", *environment.ENGINES}:
        monkeypatch.setitem(sys.modules, name, None)  # not to be found
    for name in ("vllm", "sglang"):
        (tmp_path / "here" / f"{name}.py").touch()
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path / "here")
    monkeypatch.setenv("VLLM_PLUGINS", "others")  # which leaves ours out
    code, text = told(tmp_path, "--no-weights")
    assert code == 1, text
    assert "transformers 4.57.6 is installed, and transformers<6,>=5.17 is what is tested" in text
    assert "insists on backend 'triton': triton is not installed" in text
    assert "vLLM and SGLang would silently run this checkpoint without its method" in text
    assert "3 problems found." in text
    (strict,) = environment.engines(hf_longattn.LongAttnConfig(), ["LongAttnLlamaForCausalLM"])
    assert strict.level == "ok"


def test_without_a_model_it_says_what_is_installed() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    for name, number in (("hf_longattn", hf_longattn.__version__), ("transformers", transformers.__version__)):
        assert f"{name} {number}" in said
    assert f"python {platform.python_version()}" in said
    assert "no GPU is here" in said or "under CUDA" in said


def test_what_cannot_be_read(sound: Path, tmp_path: Path) -> None:
    assert told(tmp_path)[0] == 2
    assert told(sound, "--dtype", "float33")[0] == 2
    assert "did you mean" in told(sound, "--dtype", "float33")[1]
    code, text = told(edited(sound, tmp_path / "bad", rope_parameters={"rope_type": "foo", "factor": 2.0}))
    assert code == 1, text
    assert "it does not load" in text
