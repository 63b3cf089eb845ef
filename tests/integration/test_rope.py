"""Position encodings by transformers' own rope types, and methods on models that scale or sharpen already."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from cases import HEAD_DIM, model_config
from helpers import close, tokens
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import hf_longattn
from hf_longattn import rope
from hf_longattn.integration.caches import CACHE

PAIRS, LENGTH = HEAD_DIM // 2, 32


def build(config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def short(**changes: Any) -> Any:
    return model_config("llama", max_position_embeddings=LENGTH, **changes)


def frequencies(theta: float) -> Tensor:
    return theta ** -(torch.arange(PAIRS) / PAIRS)


@pytest.mark.parametrize(("fraction", "kept"), [(1.0, 4), (0.75, 3), (0.5, 2), (0.25, 1), (0.0, 0)])
@pytest.mark.parametrize("theta", [None, 1024.0**2])
def test_prope_rotates_the_highest_frequencies_as_before(fraction: float, kept: int, theta: float | None) -> None:
    built = build(rope.prope(short(), fraction, theta)).model.rotary_emb.inv_freq
    want = frequencies(theta or 10_000.0)
    close(built[:kept], want[:kept], 1e-6)
    assert (built[kept:] == 0).all()


@pytest.mark.parametrize(
    ("head_dim", "theta", "lowest"), [(128, 1024.0**2, 825), (128, 1024 ** (64 / 31), 1024), (32, 4096.0, 38)]
)
def test_the_lowest_frequency_of_prope_is_the_one_on_the_page(head_dim: int, theta: float, lowest: int) -> None:
    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, intermediate_size=8, num_hidden_layers=1, vocab_size=8)
    built = build(rope.prope(config, 0.5, theta)).model.rotary_emb.inv_freq
    assert float(1 / built[built > 0].min()) == pytest.approx(lowest, rel=2e-3)
    name = "reference/rope.md" if head_dim == 128 else "lab/length.md"
    assert f"1/{lowest}" in (Path(__file__).parents[2] / "docs" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("head_dim", [16, 128])
def test_prope_as_published_reaches_its_effective_base(head_dim: int) -> None:
    """modded-nanogpt's frequencies: (1/1024)^linspace(0, 1), both ends included, and as many zeros."""
    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, intermediate_size=8, num_hidden_layers=1, vocab_size=8)
    built = build(rope.prope(config, 0.5, effective_base=1024.0)).model.rotary_emb.inv_freq
    want = (1 / 1024) ** torch.linspace(0, 1, head_dim // 4)
    close(built, torch.cat([want, torch.zeros(head_dim // 4)]), 1e-6)
    with pytest.raises(ValueError, match="exclude each other"):
        rope.prope(short(), theta=100.0, effective_base=10.0)
    with pytest.raises(ValueError, match="needs 2"):
        rope.prope(short(), 0.25, effective_base=10.0)


@torch.no_grad()
def test_nope_knows_no_positions() -> None:
    model, plain, ids = build(rope.nope(short())), build(short()), tokens()
    stretched = {"position_ids": 3 * torch.arange(24)[None], "attention_mask": torch.ones_like(ids)}
    close(model(ids, **stretched).logits, model(ids).logits, 1e-6)
    assert (plain(ids, **stretched).logits - plain(ids).logits).abs().max() > 1e-2
    cos, sin = model.model.rotary_emb(model.model.embed_tokens(ids), torch.arange(24)[None])
    assert (cos == 1).all()
    assert (sin == 0).all()


@torch.no_grad()
def test_linear_divides_the_positions() -> None:
    built = build(rope.linear(short(), 4.0))
    close(built.model.rotary_emb.inv_freq, frequencies(10_000.0) / 4, 1e-7)
    ids = tokens()
    apart = {"position_ids": 4 * torch.arange(24)[None], "attention_mask": torch.ones_like(ids)}
    close(built(ids, **apart).logits, build(short())(ids).logits)


@torch.no_grad()
def test_ntk_raises_the_base_beyond_the_trained_length() -> None:
    built, ids = build(rope.ntk(short(), 2.0)), tokens(length=48)
    close(built(ids[:, :LENGTH]).logits, build(short())(ids[:, :LENGTH]).logits, 1e-6)
    built(ids)
    theta = 10_000.0 * (2 * 48 / LENGTH - 1) ** (HEAD_DIM / (HEAD_DIM - 2))
    close(built.model.rotary_emb.inv_freq, frequencies(theta), 1e-6)


def test_yarn_stretches_the_low_frequencies_and_sharpens() -> None:
    built = build(rope.yarn(short(), 4.0)).model.rotary_emb
    plain = frequencies(10_000.0)
    assert built.inv_freq[0] > 0.25 * plain[0]
    close(built.inv_freq[-1], plain[-1] / 4, 1e-8)
    assert built.attention_scaling == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize(("head_dim", "pairs", "fading"), [(128, None, 20), (64, None, 10), (64, 4, 4), (16, 8, 8)])
def test_cope_fades_out_the_lowest_frequencies(head_dim: int, pairs: int | None, fading: int) -> None:
    sizes = {"intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8, "max_position_embeddings": LENGTH}
    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, **sizes)
    built = build(rope.cope(config, pairs)).model.rotary_emb
    plain = 10_000.0 ** -(torch.arange(head_dim // 2) / (head_dim // 2))
    weights = torch.cat([torch.ones(head_dim // 2 - fading), (1 + torch.linspace(0, math.pi, fading).cos()) / 2])
    close(built.inv_freq, plain * weights, 1e-7)
    assert built.attention_scaling == 1
    frequencies_before = built.inv_freq.clone()
    built(torch.zeros(1, 1), torch.arange(3 * LENGTH)[None])
    assert torch.equal(built.inv_freq, frequencies_before), "nothing changes where a call becomes long"


@torch.no_grad()
def test_methods_on_cope_keep_its_trained_length_and_decode_as_they_read() -> None:
    model, ids = build(rope.cope(short(), 2)), tokens(length=2 * LENGTH)
    plain = model(ids).logits
    hf_longattn.apply(model, "rerope")
    assert hf_longattn.get_config(model).positions.window == LENGTH // 2
    whole = model(ids).logits
    close(whole[:, : LENGTH // 2], plain[:, : LENGTH // 2], 1e-5)
    assert (whole - plain).abs().max() > 1e-4
    first = model(ids[:, : LENGTH - 3], use_cache=True)
    rest = model(ids[:, LENGTH - 3 :], **{CACHE: first[CACHE]})
    close(torch.cat([first.logits, rest.logits], 1), whole, 1e-5)


def test_only_full_attention_layers_are_edited() -> None:
    config = model_config("gemma3")
    before = {kind: dict(settings) for kind, settings in config.rope_parameters.items()}
    rope.prope(config, 0.5, theta=1e6)
    assert config.rope_parameters["sliding_attention"] == before["sliding_attention"]
    assert config.rope_parameters["full_attention"]["rope_type"] == "proportional"
    built = build(config).model.rotary_emb
    assert (built.full_attention_inv_freq[PAIRS // 2 :] == 0).all()
    assert (built.sliding_attention_inv_freq > 0).all()


def test_a_trained_length_in_words() -> None:
    named, counted = (build(rope.yarn(short(), 4.0, train_length=n)).model.rotary_emb.inv_freq for n in ("1k", 1024))
    assert named.equal(counted)
    assert not named.equal(build(rope.yarn(short(), 4.0)).model.rotary_emb.inv_freq)


def test_refusals() -> None:
    with pytest.raises(TypeError, match=r"edits a config, .*, before a model is built with it, got Linear"):
        rope.yarn(torch.nn.Linear(2, 2), 2.0)
    with pytest.raises(ValueError, match="no rotary position encoding"):
        rope.yarn(model_config("gpt2"), 2.0)
    with pytest.raises(ValueError, match="would scale twice"):
        rope.linear(rope.yarn(short(), 2.0), 2.0)
    with pytest.raises(ValueError, match=r"factor must lie in \[1, inf\], got 0.5"):
        rope.ntk(short(), 0.5)
    for factor in (math.inf, None, "2"):
        with pytest.raises(ValueError, match="factor must be a finite number"):
            rope.yarn(short(), factor)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="YaRN has no parameter beta_fest; it has attention_factor, beta_fast"):
        rope.yarn(short(), 4.0, beta_fest=3)
    for train_length in (-1, "8x"):
        with pytest.raises(ValueError, match="is not a length; write 32768, 32k or 1M"):
            rope.yarn(short(), 4.0, train_length=train_length)
    with pytest.raises(
        ValueError, match=f"counts from the config's max_position_embeddings, {LENGTH}, and not from train_length"
    ):
        rope.ntk(short(), 4.0, train_length=LENGTH // 2)
    with pytest.raises(ValueError, match="fraction"):
        rope.prope(short(), 1.5)
    for pairs in (PAIRS + 1, math.nan, math.inf, "2"):
        with pytest.raises(ValueError, match=f"from 2 to the {PAIRS} that the model rotates"):
            rope.cope(short(), pairs)  # type: ignore[arg-type]


def test_a_number_of_numpy_or_torch_is_one(tmp_path: Path) -> None:
    """A config holds plain data, which can be saved."""
    edited = rope.yarn(short(), numpy.float32(2), attention_factor=torch.tensor(1.5))
    edited.save_pretrained(tmp_path)
    assert edited.rope_parameters == rope.yarn(short(), 2.0, attention_factor=1.5).rope_parameters
    assert rope.prope(short(), numpy.float64(0.5)).rope_parameters == rope.prope(short(), 0.5).rope_parameters


@pytest.mark.parametrize("method", ["infoscale", "logn", "cosscale", "softmax_plus", "yarn_temperature", "log_length"])
def test_a_model_that_sharpens_already_is_not_sharpened_twice(method: str) -> None:
    model, ids = build(rope.yarn(short(), 4.0)), tokens(length=40)
    with pytest.raises(ValueError, match=r"yarn's attention factor.*stack=True"):
        hf_longattn.apply(model, method)
    assert model.config._attn_implementation == "sdpa"
    with torch.no_grad():
        plain = model(ids).logits
        hf_longattn.apply(model, method, stack=True)
        assert (model(ids).logits - plain).abs().max() > 1e-4
    silent = build(rope.yarn(short(), 4.0, attention_factor=1.0))
    hf_longattn.apply(silent, method)


def test_the_trained_length_is_the_one_before_scaling() -> None:
    model = build(rope.yarn(short(), 4.0))
    hf_longattn.apply(model, "infoscale", stack=True)
    assert hf_longattn.get_config(model).temperature.train_length == LENGTH
