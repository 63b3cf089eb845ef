"""`hf-longattn doctor` on tiny checkpoints, each with one defect; and on sound ones, of which it says nothing bad."""

from __future__ import annotations

import json
import shutil
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import checkpoints
import coverage_models
import pytest
import tiny
import torch
from tiny_configs import families
from tiny_configs import tiny as tiny_config
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from typer.testing import CliRunner

import hf_longattn
from hf_longattn.cli import app
from hf_longattn.evaluation import doctor
from hf_longattn.evaluation.outlook import trained_line
from hf_longattn.integration.trained import trained


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
    assert "default: the 4 frequencies are those that the config asks for" in text
    assert "one passage has the same loss at every position" in text
    assert "ok trained trained at 512: max_position_embeddings" in text
    assert "ok extend to 1,024: rerope(window=256) in every attention layer" in text
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
    assert found == [row["trained"], *row["extend"]]
    page = coverage_models.PAGE.read_text(encoding="utf-8")
    assert all(line in page for line in found[: 2 if row["refused"] else 3])


def test_every_checkpoint_is_on_the_page() -> None:
    rows = {r["name"]: r for r in json.loads(coverage_models.RESULTS.read_text(encoding="utf-8"))["checkpoints"]}
    assert list(rows) == list(checkpoints.CHECKPOINTS), "run: python tests/checkpoints.py"
    for name, checkpoint in checkpoints.CHECKPOINTS.items():
        if checkpoint["model_type"] in CONFIG_MAPPING:
            assert rows[name]["trained"] == trained_line(trained(checkpoints.tiny_config(checkpoint)))
        assert rows[name]["source"], name
    assert len(rows) >= 60


def test_a_config_of_which_no_tiny_model_can_be_built_is_noted(sound: Path, tmp_path: Path) -> None:
    """And nothing else is kept back."""
    code, text = told(edited(sound, tmp_path, model_type="roberta", architectures=None), "--no-weights")
    assert code == 0, text
    assert "note extend" in text


def test_a_sound_checkpoint_of_ours(tmp_path: Path, sound: Path) -> None:
    model = hf_longattn.extend(AutoModelForCausalLM.from_pretrained(sound), to="2k")
    hf_longattn.save(model, tmp_path)
    code, text = told(tmp_path)
    assert code == 0, text
    assert "rerope+infoscale, as recorded" in text
    assert "trained at 512: max_position_embeddings" in text
    assert "ok extend to 4,096: rerope(window=256)+infoscale in every attention layer" in text  # from the trained length on
    assert "at 1,920" in text  # as far as the config announces


SCALED = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "llama3": {
        **{"factor": 4.0, "original_max_position_embeddings": 128},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    "proportional": {"partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("kind", SCALED)
def test_frequencies_are_those_of_transformers_where_nothing_is_wrong(kind: str) -> None:
    """Two sources: our formulas, and transformers' modules."""
    rope = {"rope_type": kind, "rope_theta": 5000.0} | SCALED[kind]
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=512, rope_parameters=rope)
    asked = doctor.frequencies(config.rope_parameters, config, 64)
    assert asked is not None
    torch.testing.assert_close(LlamaRotaryEmbedding(config).inv_freq.double(), asked, rtol=1e-6, atol=1e-12)
    other = doctor.frequencies(rope | {"rope_type": "default"}, config, 64)
    assert kind == "dynamic" or not torch.allclose(asked, other, rtol=1e-3)  # type: ignore[arg-type]


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 128}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LOST = {
    "an old key beside the new": ({"rope_theta": 5e5}, "says rope_theta = 500000.0, and 10000.0 is what runs"),
    "both places": ({"rope_parameters": YARN, "rope_scaling": PLAIN}, "rope_parameters.factor = 4.0, and None is what runs"),
    "a slip": ({"rope_parameters": YARN | {"beta_fats": 16}}, "rope_parameters.beta_fats in config.json is never read"),
    "no type": ({"rope_parameters": PLAIN | {"factor": 4.0}}, "has a factor and no rope_type: nothing is scaled"),
}


@pytest.mark.parametrize("defect", LOST)
@pytest.mark.parametrize("weights", ["--weights", "--no-weights"])
def test_rotary_settings_that_are_lost(defect: str, weights: str, sound: Path, tmp_path: Path) -> None:
    changes, message = LOST[defect]
    code, text = told(edited(sound, tmp_path, **changes), weights)
    assert code == 1, text
    assert message in text


def test_a_scaling_outside_the_text_models_config_is_lost() -> None:
    """As in a composite model whose user writes rope_scaling where that of a plain model stands."""
    config = tiny_config(families()["gemma3"])
    saved = config.to_dict() | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    text = [f.text for f in doctor.lost_rotary_settings(saved, config) if f.level == "problem"]
    assert any("rope_scaling.rope_type = 'yarn', and 'default' is what runs" in t for t in text), text
    assert not [f for f in doctor.lost_rotary_settings(config.to_dict(), config) if f.level == "problem"]


def test_a_trained_length_that_is_not_stated_is_noted(sound: Path, tmp_path: Path) -> None:
    yarn = {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"}
    code, text = told(edited(sound, tmp_path, rope_parameters=yarn), "--no-weights")
    assert code == 0, text
    assert "transformers takes max_position_embeddings, 512, for the trained length" in text


def test_code_that_ignores_the_scaling(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LlamaRotaryEmbedding.__init__

    def deaf(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, AutoConfig.from_pretrained(sound), *args, **kwargs)

    monkeypatch.setattr(LlamaRotaryEmbedding, "__init__", deaf)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(edited(sound, tmp_path, rope_parameters=YARN)))
    (finding,) = doctor.rotary_buffers(model)
    assert finding.level == "problem"
    assert "the model does not rotate as yarn asks" in finding.text


def test_positions_that_lose_precision(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = LlamaRotaryEmbedding.forward

    def rounded(self: Any, x: Any, position_ids: Any) -> Any:
        return exact(self, x, position_ids.to(torch.bfloat16))  # 257 is 256 there

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", rounded)
    code, text = told(sound)
    assert code == 1, text
    assert "one passage changes its loss by" in text
    assert "positions lose precision" in text


def test_learned_positions_are_no_defect(tmp_path: Path) -> None:
    code, text = told(tiny.save_gpt2(tmp_path))
    assert code == 0, text
    assert "no method reads beyond a table" in text


def test_a_checkpoint_of_ours_that_is_loaded_under_another_attention(sound: Path, tmp_path: Path) -> None:
    hf_longattn.apply(AutoModelForCausalLM.from_pretrained(sound), "rerope").save_pretrained(tmp_path / "ours")
    shutil.copy(sound / "tokenizer.json", tmp_path / "ours")
    for weights in ("--weights", "--no-weights"):
        code, text = told(edited(tmp_path / "ours", tmp_path / "lost", attn_implementation=None), weights)
        assert code == 1, text
        assert "the checkpoint records rerope and is loaded under" in text


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
    config = hf_longattn.LongAttnConfig.preset("logn", backend="flash")
    hf_longattn.apply(AutoModelForCausalLM.from_pretrained(sound), config).save_pretrained(tmp_path)
    installed = {"transformers": "4.57.6"}
    monkeypatch.setattr(doctor, "version", lambda name: installed.get(name, "99.0"))
    monkeypatch.setattr(doctor, "find_spec", lambda name: ModuleSpec(name, None) if name in ("vllm", "sglang") else None)
    monkeypatch.setenv("VLLM_PLUGINS", "others")  # which leaves ours out
    code, text = told(tmp_path, "--no-weights")
    assert code == 1, text
    assert "transformers 4.57.6 is installed, and transformers<6,>=5.17 is what is tested" in text
    assert "insists on backend 'flash': flash-attn is not installed" in text
    assert "vLLM and SGLang would silently run this checkpoint without its method" in text
    assert "3 problems found." in text
    (strict,) = doctor.engines(hf_longattn.LongAttnConfig(), ["LongAttnLlamaForCausalLM"])
    assert strict.level == "ok"


def test_what_cannot_be_read(sound: Path, tmp_path: Path) -> None:
    assert told(tmp_path)[0] == 2
    assert told(sound, "--dtype", "float33")[0] == 2
    assert "did you mean" in told(sound, "--dtype", "float33")[1]
    code, text = told(edited(sound, tmp_path / "bad", rope_parameters={"rope_type": "foo", "factor": 2.0}))
    assert code == 1, text
    assert "it does not load" in text


FAMILIES = ("gemma3", "gemma4", "phi", "gpt_neox", "glm", "qwen3", "deepseek_v4", "ministral3", "bloom")


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_said_of_families_as_they_are(family: str, tmp_path: Path) -> None:
    config = tiny_config(families()[family])
    config.save_pretrained(tmp_path)
    saved, config = PreTrainedConfig.get_config_dict(tmp_path)[0], AutoConfig.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config).eval()
    findings = [*doctor.lost_rotary_settings(saved, config), *doctor.rotary_buffers(model), *doctor.positions(model, "none")]
    assert not [f for f in findings if f.level == "problem"]
