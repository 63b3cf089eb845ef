"""The trained length of published checkpoints, by their settings in tiny models; remaps of rotations that are trained in."""

from __future__ import annotations

import copy
import itertools
import json
import math
import warnings
from pathlib import Path
from typing import Any

import closed_form
import pytest
import tiny as tiny_model
import torch
import transformers
from cases import model_config
from checkpoints import CHECKPOINTS, tiny_config
from helpers import SCENARIOS, close, crossed, feed, tokens
from transformers import AutoModelForCausalLM, DynamicCache
from typer.testing import CliRunner

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.cli import app
from hf_longattn.evaluation import settings as setting_grammar
from hf_longattn.evaluation.checkpoints import Checkpoint, edit_rope
from hf_longattn.evaluation.loading import check_setting, load_setting
from hf_longattn.evaluation.miniature import miniature
from hf_longattn.evaluation.settings import Setting, parse_settings
from hf_longattn.integration.caches import CACHE, PAGES
from hf_longattn.integration.trained_length import ORIGINAL, trained

LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
CHUNKS = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0]}
OLD = {"name": "infoscale", "train_length": 32}


def yarn(factor: float, original: int, **more: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": original, **more}


def tiny(checkpoint: dict[str, Any]) -> Any:
    """A random model, or a skipped test."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(_config(checkpoint)).eval()


def _config(checkpoint: dict[str, Any]) -> Any:
    if checkpoint["model_type"] not in transformers.CONFIG_MAPPING:
        pytest.skip("this release of transformers lacks the model")
    return tiny_config(checkpoint)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_trained_length_of_published_checkpoints(name: str) -> None:
    known = trained(_config(CHECKPOINTS[name]))
    assert known.length == CHECKPOINTS[name]["trained"]
    assert (known.assumed is not None) == CHECKPOINTS[name].get("assumed", False)


@pytest.mark.parametrize("name", crossed(CHECKPOINTS, 8))
def test_extend_takes_half_the_trained_length(name: str) -> None:
    """Or says why it cannot; the model is then what it was."""
    model, length = miniature(_config(CHECKPOINTS[name])), CHECKPOINTS[name]["trained"] or 1024
    before = model.config._attn_implementation
    try:
        hf_longattn.extend(model, to=2 * length)
    except ValueError:
        assert CHECKPOINTS[name]["may_refuse"]
        assert model.config._attn_implementation == before
    else:
        config = hf_longattn.get_config(model)
        assert config.positions.window == length // 2
        assert (config.train_length, config.train_length_source) == (length, trained(_config(CHECKPOINTS[name])).reason)


def settings(most: int, **rope: Any) -> Any:
    extra = rope.pop("config", {})
    rope = {"rope_theta": 10000.0} | rope
    return model_config("llama", max_position_embeddings=most, rope_parameters=rope or None, **extra)


#: max_position_embeddings, what else the config says, and what is made of it: the length, whether the rotation is the model's
#: own, and whether a reader could take it otherwise. As published, where a name is given.
READINGS: dict[str, tuple[int, dict[str, Any], tuple[int, bool, bool]]] = {
    "Llama 3.1": (131072, LLAMA3 | {"factor": 8.0}, (131072, True, False)),
    "llama3 without an original length": (8192, LLAMA3 | {"original_max_position_embeddings": 8192}, (8192, True, False)),
    "MiniCPM3": (32768, LONGROPE | {"original_max_position_embeddings": 32768}, (32768, True, False)),
    "Qwen 2.5 with the card's YaRN": (32768, yarn(4, 32768), (32768, False, False)),
    "Qwen 3 (2507) with the card's YaRN": (262144, yarn(4, 262144), (262144, False, False)),
    "YaRN and a raised maximum": (131072, yarn(4, 32768), (131072, True, True)),
    "Kimi K2": (131072, yarn(32, 4096, beta_fast=1.0), (131072, True, False)),
    "AFM 4.5B, whose maximum is less": (65536, yarn(20, 4096, beta_fast=32.0), (65536, True, True)),
    "Yarn-Llama-2-70b-32k": (8192, yarn(8, 4096, finetuned=True), (32768, True, False)),
    "YaRN that says that it was not": (131072, yarn(32, 4096, finetuned=False), (4096, False, False)),
    "LongChat": (32768, {"rope_type": "linear", "factor": 8.0}, (32768, True, True)),
    "Vicuna 16k": (
        4096,
        {"rope_type": "linear", "factor": 4.0, "config": {"max_sequence_length": 16384}},
        (16384, True, False),
    ),
    "Command R": (8192, {"config": {"model_max_length": 131072}}, (131072, True, False)),
    "another name that says less": (4096, {"config": {"max_sequence_length": 2048}}, (4096, True, False)),
    "dynamic NTK": (4096, {"rope_type": "dynamic", "factor": 2.0}, (4096, False, False)),
    "Hunyuan, whose base is fixed": (32768, {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0}, (32768, True, False)),
    "Qwen2.5-7B-Instruct-1M": (1010000, {"config": {"dual_chunk_attention_config": CHUNKS}}, (262144, True, False)),
    "partial": (8192, {"rope_type": "proportional", "partial_rotary_factor": 0.25}, (8192, True, False)),
    "made longer": (32768, {"config": {"original_max_position_embeddings": 8192}}, (8192, True, False)),
}


@pytest.mark.parametrize("name", READINGS)
def test_how_settings_are_read(name: str) -> None:
    most, rope, want = READINGS[name]
    known = trained(settings(most, **rope))
    assert (known.length, known.rotation_is_own, known.assumed is not None) == want
    assert trained(settings(most, **rope), train_length=2048).length == 2048


def test_an_original_length_that_is_no_shorter_says_nothing() -> None:
    for original, said in ((32, ORIGINAL), (64, "max_position_embeddings")):
        config = transformers.LlamaConfig(max_position_embeddings=64, **{ORIGINAL: original})
        assert (trained(config).length, trained(config).reason.partition(",")[0]) == (original, said)


def test_phi_3_fills_in_a_length_that_says_nothing() -> None:
    """Its class has an original_max_position_embeddings of 4,096 for checkpoints that name none."""
    assert trained(transformers.Phi3Config(max_position_embeddings=16384)).length == 16384
    for original in (4096, 16384):
        own = {"original_max_position_embeddings": original, "sliding_window": None}
        model = tiny(CHECKPOINTS["Phi-4"] | {"config": own, "max_position_embeddings": 16384})
        hf_longattn.extend(model, to=65536)
        assert trained(model.config).length == 16384
        assert hf_longattn.remove(model).config.max_position_embeddings == 16384
    assert trained(transformers.GPT2Config(n_positions=96)).length == 96
    assert trained(transformers.CodeGenConfig(n_positions=96)).length == 96  # whose n_ctx is 2,048 by itself
    assert trained(transformers.PreTrainedConfig()).length is None


@pytest.mark.parametrize(
    ("rope", "told", "own"),
    [
        (yarn(4, 32), 128, True),  # max_position_embeddings is 128: trained in, by assumption
        (yarn(4, 32), 32, False),
        (yarn(4, 128), 128, False),  # put in for inference, by its settings
        (yarn(4, 128), 512, True),
        ({"rope_type": "linear", "factor": 4.0}, 64, False),
        ({"rope_type": "linear", "factor": 4.0}, 512, True),
    ],
)
def test_train_length_settles_what_the_settings_leave_open(rope: dict[str, Any], told: int, own: bool) -> None:
    """It is the length of every method, and says whether a scaling was trained in; without it one warning tells."""
    model = AutoModelForCausalLM.from_config(settings(128, **rope))
    if not own:
        with pytest.raises(ValueError, match=r"scales its rotary positions already.*given as train_length.*stack=True"):
            hf_longattn.apply(model, "rerope", train_length=told)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            config = hf_longattn.get_config(hf_longattn.extend(model, to=4 * told, train_length=told))
        assert (config.positions.window, config.train_length, config.train_length_source) == (
            told // 2,
            told,
            "given as train_length",
        )
    if trained(settings(128, **rope)).assumed:
        with pytest.warns(UserWarning, match=r"taken for trained in.*rerope takes 128.*train_length="):
            hf_longattn.apply(AutoModelForCausalLM.from_config(settings(128, **rope)), "rerope")


def test_a_formula_without_the_trained_length_neither_asks_for_it_nor_keeps_it() -> None:
    model = AutoModelForCausalLM.from_config(settings(128, rope_type="linear", factor=4.0))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="taken for trained in")
        warnings.filterwarnings("ignore", message="log_length|logn")
        hf_longattn.apply(model, "log_length")
    assert hf_longattn.get_config(model).train_length is None


@pytest.mark.slow
def test_train_length_is_for_every_method_and_every_way(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(settings(512)).save_pretrained(tmp_path / "plain")
    load = AutoModelForCausalLM.from_pretrained
    for name, read in (("rerope", lambda c: c.positions.window * 2), ("string_remap", lambda c: c.positions.shift * 3)):
        by_name = load(tmp_path / "plain", attn_implementation=name, longattn={"train_length": 96})
        by_apply = hf_longattn.apply(load(tmp_path / "plain"), name, train_length=96)
        assert [read(hf_longattn.get_config(m)) for m in (by_name, by_apply)] == [96, 96]
    setting = Setting.parse("rerope:train_length=96")
    assert check_setting(setting, Checkpoint(str(tmp_path / "plain"))).train_length == 96
    assert hf_longattn.get_config(load_setting(setting, Checkpoint(str(tmp_path / "plain")))).positions.window == 48
    model = hf_longattn.apply(load(tmp_path / "plain"), "rerope+infoscale", train_length=96)
    config = hf_longattn.get_config(model)
    assert (config.positions.window, config.temperature.train_length, config.train_length) == (48, 96, 96)
    assert hf_longattn.get_config(hf_longattn.update(model, train_length=128)).temperature.train_length == 128
    hf_longattn.extend(model, to=1024, method="rerope+infoscale", train_length="64")
    model.save_pretrained(tmp_path / "longer")
    again = load(tmp_path / "longer")
    assert hf_longattn.get_config(again) == hf_longattn.get_config(model)
    assert "rerope+infoscale, trained at 64: given as train_length" in str(hf_longattn.describe(again))
    assert hf_longattn.get_config(hf_longattn.extend(again, to=2048, method="rerope")).positions.window == 32
    for wrong in (0, True, "many", 2.5):
        with pytest.raises(ValueError, match="train_length"):
            hf_longattn.apply(load(tmp_path / "plain"), "rerope", train_length=wrong)


def test_a_section_saved_before_this_keeps_its_numbers(tmp_path: Path) -> None:
    """Bound to Llama 3's original length then, which is not the trained one."""
    model = AutoModelForCausalLM.from_config(settings(128, **LLAMA3 | {"original_max_position_embeddings": 32}))
    hf_longattn.apply(model, LongAttnConfig(positions={"name": "rerope", "window": 16}, temperature=OLD)).save_pretrained(
        tmp_path
    )
    saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    del saved["longattn"]["train_length"], saved["longattn"]["train_length_source"]
    (tmp_path / "config.json").write_text(json.dumps(saved), encoding="utf-8")
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    config = hf_longattn.get_config(again)
    assert (config.positions.window, config.temperature.train_length, config.train_length) == (16, 32, 128)
    ids = tokens(1, 60)
    close(again(ids).logits, model(ids).logits, 1e-6)


def test_a_model_made_longer_keeps_its_trained_length() -> None:
    """Also under linear scaling that was put in, whose maximum then tells nothing of the scaling."""
    for rope in ({}, {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 64}):
        model = AutoModelForCausalLM.from_config(settings(64, **rope))
        before = trained(model.config)
        hf_longattn.extend(model, to=128, method="rerope", stack=True)
        assert model.config.max_position_embeddings == 128
        assert (trained(model.config).length, trained(model.config).rotation_is_own) == (64, before.rotation_is_own)
        hf_longattn.remove(model)
        assert (model.config.max_position_embeddings, trained(model.config)) == (64, before)


# rotations that are trained in -----------------------------------------------------------------------------------------

FOURFOLD = {"factor": 4.0, "original_max_position_embeddings": 48, "rope_theta": 100.0}
#: Published checkpoints that were trained at 192 tokens, so to say: what changes of their rotary settings.
TRAINED_IN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("Llama-3.2-1B", FOURFOLD),
    "yarn": ("DeepSeek-R1-Distill-Qwen-7B", FOURFOLD | {"rope_type": "yarn", "beta_fast": 4.0}),
    "longrope": ("Phi-3-mini-128k", FOURFOLD | LONGROPE),
    "linear, full layers": ("Gemma-3-4b (text)", {"rope_theta": 100.0}),
    "yarn, full layers": ("Olmo-3-7B", FOURFOLD),
    "yarn, sinks": ("gpt-oss-20b", FOURFOLD),
    "yarn, queries scaled by position": (
        "Ministral-3-8B",
        FOURFOLD | {"original_max_position_embeddings": 12, "factor": 16.0},
    ),
}
WAYS = ["without_cache", "with_cache", "dynamic_chunks", "static_chunks", "left_padded", "left_padded_dynamic_chunks"]
REROPE = LongAttnConfig.preset("rerope", window=7)


def trained_in(kind: str, **changes: Any) -> Any:
    name, own = TRAINED_IN[kind]
    checkpoint = copy.deepcopy(CHECKPOINTS[name]) | {"max_position_embeddings": 192}
    settings = checkpoint["rope_parameters"]
    settings.get("full_attention", settings).update(own | changes)
    if "num_hidden_layers" in checkpoint["config"]:
        checkpoint["config"]["num_hidden_layers"] = 6
    if (checkpoint["config"].get("sliding_window") or math.inf) < CHECKPOINTS[name]["trained"]:
        checkpoint["config"]["sliding_window"] = 9
    if name == "Phi-3-mini-128k":
        checkpoint["config"]["original_max_position_embeddings"] = settings["original_max_position_embeddings"]
    return tiny(checkpoint)


@pytest.mark.parametrize(("kind", "way"), crossed(itertools.product(TRAINED_IN, WAYS), 5))
def test_a_remap_acts_on_a_rotation_that_is_trained_in(kind: str, way: str) -> None:
    """Exact by the closed form, which turns vectors by the model's frequencies; no `stack` is asked for."""
    ids, plain = tokens(), trained_in(kind)
    with torch.no_grad():
        before = plain(ids).logits
        want = closed_form.attach(plain, REROPE)(ids, use_cache=False).logits
    m = hf_longattn.apply(trained_in(kind), REROPE)
    assert (hf_longattn.get_config(m).train_length, hf_longattn.get_config(m).name) == (192, "rerope")
    close(SCENARIOS[way](m, ids), want)
    assert (want - before).abs().max() > 1e-2


@pytest.mark.parametrize("kind", TRAINED_IN)
@torch.no_grad()
def test_below_the_window_the_model_is_what_it_was(kind: str) -> None:
    """Its own temperature included: YaRN's and longrope's attention factor, and queries scaled by position."""
    ids, plain = tokens(1, 90), trained_in(kind)
    m = hf_longattn.extend(trained_in(kind), to=384)
    assert hf_longattn.get_config(m).positions.window == 96
    close(m(ids).logits, plain(ids).logits, 2e-6)


@pytest.mark.parametrize("kind", ["yarn", "longrope", "yarn, queries scaled by position"])
def test_a_temperature_of_the_models_own_is_not_applied_twice(kind: str) -> None:
    with pytest.raises(ValueError, match=r"has a temperature of its own.*stack=True"):
        hf_longattn.apply(trained_in(kind), "rerope+infoscale")
    assert hf_longattn.get_config(hf_longattn.extend(trained_in(kind), to=4096)).name == "rerope"


def test_longrope_that_stretches_nothing_brings_no_temperature() -> None:
    """MiniCPM3: its original length is the whole one."""
    plain = AutoModelForCausalLM.from_config(settings(32, **LONGROPE | {"original_max_position_embeddings": 32}))
    assert plain.model.rotary_emb.attention_scaling == 1.0
    assert hf_longattn.get_config(hf_longattn.extend(plain, to=256)).name == "rerope+infoscale"


@torch.no_grad()
def test_longrope_beyond_its_border() -> None:
    """One pass and a cache that began beyond are exact; one that was filled below is refused, and one cut back to there."""
    m, ids, plain = (
        trained_in("longrope", original_max_position_embeddings=16),
        tokens(),
        trained_in("longrope", original_max_position_embeddings=16),
    )
    plain(ids)  # sets the frequencies for this length
    want = closed_form.attach(plain, REROPE)(ids, use_cache=False).logits
    hf_longattn.apply(m, REROPE)
    close(m(ids, use_cache=False).logits, want)
    close(feed(m, ids, [17, 3, 1, 3]), want)
    for chunks in ([16, 8], [9, 9, 6], [1] * 24):
        with pytest.raises(ValueError, match="different sides of 16 tokens"):
            feed(m, ids, chunks)
    close(feed(m, ids[:, :16], [10, 5, 1]), m(ids[:, :16]).logits)  # the last token lies on the side of the others
    cut = m(ids)[CACHE]
    cut.crop(-14)
    with pytest.raises(ValueError, match="different sides of 16 tokens"):
        m(ids[:, 10:13], **{CACHE: cut})
    with pytest.raises(ValueError, match="different sides of 16 tokens"):
        torch.compile(m, backend="eager")(ids[:, 10:13], **{CACHE: cut})
    close(m(ids[:, 10:], **{CACHE: cut}).logits, want[:, 10:])  # its keys are those of long calls still
    if PAGES:
        with pytest.raises(ValueError, match="continuous batching"):
            m.model(ids, write_index=[])
    feed(hf_longattn.remove(m), ids, [16, 8])  # transformers' own, which mixes
    unknown = DynamicCache(config=m.config)
    m(ids[:, :16], **{CACHE: unknown})
    with pytest.raises(ValueError, match="different sides of 16 tokens"):
        hf_longattn.apply(m, REROPE)(ids[:, 16:], **{CACHE: unknown})


@torch.no_grad()
def test_a_model_that_turns_long_calls_by_other_frequencies_than_it_shows_is_refused() -> None:
    """PhiMoE: the buffer follows the length of a call, and the rotation does not."""
    rotary = FOURFOLD | LONGROPE | {"original_max_position_embeddings": 16, "short_mscale": 1.2, "long_mscale": 1.2}
    checkpoint = {"model_type": "phimoe", "max_position_embeddings": 64, "rope_parameters": rotary, "config": {}}
    ids, plain, m = tokens(), tiny(checkpoint), hf_longattn.apply(tiny(checkpoint), REROPE)
    want = closed_form.attach(plain, REROPE)(ids[:, :15], use_cache=False).logits
    close(m(ids[:, :15], use_cache=False).logits, want)
    with pytest.raises(ValueError, match="does not turn a call of this length by the frequencies that it shows"):
        m(ids, use_cache=False)
    compiled = torch.compile(m, backend="eager")
    close(compiled(ids[:, :15], use_cache=False).logits, want)
    with pytest.raises(RuntimeError, match="does not turn a call of this length by the frequencies that it shows"):
        compiled(ids, use_cache=False)


@torch.no_grad()
def test_generating_across_the_border_of_longrope() -> None:
    """Phi-3's generate() reads the text anew there; each token is that of one full pass."""
    m, ids = trained_in("longrope", original_max_position_embeddings=16), tokens(1, 14)
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "pad_token_id": 0,
        "output_logits": True,
        "return_dict_in_generate": True,
    }

    def off() -> float:
        out = m.generate(ids, **options)
        passes = [m(out.sequences[:, : 14 + step], use_cache=False).logits[:, -1] for step in range(6)]
        return float((torch.stack(out.logits) - torch.stack(passes)).abs().max())

    if off() > 1:
        pytest.skip("this release reads it anew by the frequencies of short texts, without a method too")
    hf_longattn.apply(m, REROPE)
    assert off() < 1e-5


# windows that hide nothing ---------------------------------------------------------------------------------------------


def wide(window: int | None) -> Any:
    own = {"original_max_position_embeddings": 48, "sliding_window": window}
    return tiny(CHECKPOINTS["Phi-3-mini-4k"] | {"config": own, "max_position_embeddings": 48})


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_a_window_as_wide_as_the_trained_length_is_none(way: str) -> None:
    """Phi-3-128k and Phi-4-mini name one of 262,144: a remap goes in, and hides what the model itself hides."""
    for window in (None, 48):
        ids, plain = tokens(), wide(window)
        want = closed_form.attach(plain, REROPE)(ids, use_cache=False).logits
        m = hf_longattn.apply(wide(window), REROPE)
        close(SCENARIOS[way](m, ids), want)
        assert "(4 modules)" in str(hf_longattn.describe(m))


@torch.no_grad()
def test_beyond_such_a_window_its_keys_stay_hidden() -> None:
    ids, m = tokens(2, 90), hf_longattn.apply(wide(50), REROPE)
    want = closed_form.attach(wide(50), REROPE)(ids, use_cache=False).logits
    close(m(ids, use_cache=False).logits, want)
    close(feed(m, ids, [60, 20, 1, 1, 8]), want)
    assert (want - closed_form.attach(wide(None), REROPE)(ids, use_cache=False).logits).abs().max() > 1e-3
    with pytest.raises(ValueError, match="all 4 causal attention layers have a sliding window"):
        hf_longattn.apply(wide(47), REROPE)


def test_extend_warns_of_what_such_a_window_hides() -> None:
    with pytest.warns(UserWarning, match="sliding window of its own, 60 tokens: what lies farther back stays unseen"):
        hf_longattn.extend(wide(60), to=96)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_longattn.extend(wide(96), to=96)


def test_extend_says_why_a_model_takes_no_method() -> None:
    """Its attention, not a section that nobody wrote."""
    bloom = miniature(transformers.BloomConfig(n_layer=1))
    with pytest.raises(ValueError, match="has no causal attention that goes through transformers' attention interface"):
        hf_longattn.extend(bloom, to=4096)


# told on the command line ----------------------------------------------------------------------------------------------


def test_settings_take_the_trained_length_that_a_command_is_told(tmp_path: Path) -> None:
    """Methods, position encodings and what is known of the unmodified model; what a setting says itself stands."""
    AutoModelForCausalLM.from_config(settings(512)).save_pretrained(tmp_path)
    plain, *others = parse_settings(["rerope,string_remap:train_length=48,infoscale:stack=true@yarn:2"], train_length=96)
    assert check_setting(plain, Checkpoint(str(tmp_path))).train_length == 96
    rerope, string_remap, tempered = [load_setting(s, Checkpoint(str(tmp_path)), dtype="float32") for s in others[:2]] + [
        others[2]
    ]
    assert hf_longattn.get_config(rerope).positions.window == 48
    assert hf_longattn.get_config(string_remap).positions.shift == 16
    assert edit_rope(settings(512), tempered.rope, tempered.train_length).rope_parameters[ORIGINAL] == 96
    assert plain.to_dict() == {}
    assert rerope.config.longattn["train_length"] == 96
    with pytest.raises(ValueError, match="train_length must be an integer"):
        Setting("mine", "rerope", train_length=0)


@pytest.mark.parametrize("command", ["eval", "probe", "inspect"])
def test_commands_that_bind_a_method_take_the_trained_length(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`extend` in its own tests."""
    asked: list[Any] = []

    def parsed(*arguments: Any, **named: Any) -> Any:
        asked.extend(parse_settings(*arguments, **named))
        raise ValueError("enough")

    monkeypatch.setattr(setting_grammar, "parse_settings", parsed)
    model, text = tiny_model.save(tmp_path / "model"), tiny_model.text(tmp_path / "text.txt")
    line = [command, str(model), "--text", str(text), "--method", "rerope", "--train-length", "2k"]
    result = CliRunner().invoke(app, [*line, *["--out", str(tmp_path / "out")] * (command == "eval")])
    assert (result.exit_code, "enough" in result.output) == (2, True), result.output
    assert [(s.name, s.train_length) for s in asked] == [("unmodified", 2048), ("rerope", 2048)]
    result = CliRunner().invoke(app, [*line[:-1], "long", *["--out", str(tmp_path / "out")] * (command == "eval")])
    assert "'long' is not a length" in result.output
