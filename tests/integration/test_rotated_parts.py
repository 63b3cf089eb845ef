"""Models that rotate a part of what they attend by: layers without rotary encoding, heads whose last features turn."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import closed_form
import numpy as np
import pytest
import torch
import transformers
from cases import FAMILIES, HEADS, OTHERS
from helpers import SCENARIOS, build, close, crossed, feed, logits, tokens
from torch import Tensor
from transformers import AutoModelForCausalLM

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.integration.layers import View
from hf_longattn.integration.state import method_of

_SMALL = FAMILIES["llama"][1] | {"num_hidden_layers": 2}
_LATENT = OTHERS["deepseek_v3"][1] | {"num_hidden_layers": 2}
#: Latent attention: the rotated features of a head come last, in pairs of neighbours or in halves.
LATENT: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("DeepseekV2", _LATENT),
    "deepseek_v3": ("DeepseekV3", _LATENT),
    "deepseek_v3 in halves": ("DeepseekV3", _LATENT | {"rope_interleave": False}),
    "glm4_moe_lite": ("Glm4MoeLite", _LATENT),
    "minicpm3": ("MiniCPM3", _LATENT),
    "youtu": ("Youtu", _LATENT),
}
METHODS: dict[str, dict[str, Any]] = {
    "rerope": {"window": 7},
    "leaky_rerope": {"window": 7, "stretch": 2.5},
    "self_extend": {"window": 6, "group": 3},
    "dual_chunk": {"chunk": 10, "local": 3},
    "streaming": {"window": 6, "sinks": 2},
    "lm_infinite": {"window": 6, "sinks": 2},
}
#: Of every family with every method, each once.
DIAGONAL = [*zip(LATENT, METHODS, strict=True)]
WIDE = {name: p | ({"chunk": 40} if "chunk" in p else {"window": 30}) for name, p in METHODS.items()}


Shown = Callable[[np.ndarray, np.ndarray], np.ndarray]


def row_by_row(m: Any, ids: Tensor, name: str) -> Tensor:
    """What a model of one layer computes under a method, by its own attention: a row at a time over the keys that it sees,

    fed at the positions that show the row's distances. A single layer's keys know nothing of the tokens before them.
    """
    p, out = METHODS[name], []
    for i in range(ids.shape[1]):
        j = np.arange(i + 1)
        seen = j[(i - j < p["window"]) | (j < p["sinks"])] if "sinks" in p else j
        distance = closed_form.REMAPS[name](p, np.array(i), seen)
        at = torch.from_numpy(i - np.asarray(distance, dtype=float).reshape(1, -1)).float()
        mask = torch.ones(len(seen), len(seen), dtype=torch.bool).tril()[None, None]  # positions tell no documents apart
        out.append(logits(m, ids[:, seen], position_ids=at + 50, attention_mask=mask)[:, -1])  # 50: none below 0
    return torch.stack(out, 1)


# latent attention -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("family", "method"), crossed(itertools.product(LATENT, METHODS), DIAGONAL))
def test_latent_attention_under_a_remap_is_the_models_own_at_other_distances(family: str, method: str) -> None:
    """In full, with caches of every kind, in chunks, padded and packed."""
    m, ids = build(*LATENT[family], num_hidden_layers=1), tokens()
    want, plain = row_by_row(m, ids, method), logits(m, ids)
    assert (want - plain).abs().max() > 1e-2
    hf_longattn.apply(m, method, **METHODS[method])
    for name, run in SCENARIOS.items():
        close(run(m, ids), want, 2e-5, name)


@pytest.mark.parametrize(("family", "method"), crossed(itertools.product(LATENT, METHODS), DIAGONAL))
def test_latent_attention_below_the_window_is_the_plain_models(family: str, method: str) -> None:
    m, ids = build(*LATENT[family]), tokens()
    plain = logits(m, ids)
    hf_longattn.apply(m, method, **WIDE[method])
    close(logits(m, ids), plain)
    with torch.no_grad():
        close(feed(m, ids, [16, *[1] * 8]), plain, what="cached")
    close(logits(hf_longattn.remove(m), ids), plain, 0.0)


def test_deep_latent_attention_is_the_reference_with_gradients() -> None:
    ids, results = tokens(), []
    for backend in ("tiled", "reference"):
        m = build(*LATENT["deepseek_v3"])
        hf_longattn.apply(m, "yarn_beyond", factor=4.0, train_length=9, beta_fast=2.0, beta_slow=0.01, backend=backend)
        out = m(ids, use_cache=False).logits
        out.sin().sum().backward()
        results.append([out.detach(), m.model.layers[0].self_attn.kv_a_proj_with_mqa.weight.grad])
    for got, want in zip(*results, strict=True):
        close(got, want, 1e-4)


# layers without rotary encoding -----------------------------------------------------------------------------------------

_SOME = _SMALL | {"no_rope_layers": [1, 0], "num_hidden_layers": 2, "use_sliding_window": False}
_COHERE = _SMALL | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 40}
#: Sliding layers rotate, full ones do not.
NOT_IN_FULL = {"Cohere2": _COHERE, "Exaone4": _COHERE | {"sliding_window_pattern": 2}}


@torch.no_grad()
def by_closed_form(m: Any, ids: Tensor, config: LongAttnConfig, still: int) -> Tensor:
    """The closed form of a method, without distances in one layer."""
    closed_form.attach(m, config)
    attention = m.model.layers[still].self_attn
    attention.closed_form_frequencies = [0 * f for f in attention.closed_form_frequencies]
    return logits(m, ids)


@pytest.mark.slow
@pytest.mark.parametrize("method", crossed(METHODS, 3))
def test_layers_without_rotation_keep_theirs(method: str) -> None:
    ids, config = tokens(), LongAttnConfig.preset(method, **METHODS[method])
    want = by_closed_form(build("SmolLM3", _SOME), ids, config, still=1)
    m = build("SmolLM3", _SOME)
    plain = logits(m, ids)
    assert (want - plain).abs().max() > 1e-2
    hf_longattn.apply(m, config)
    for name, run in SCENARIOS.items():
        close(run(m, ids), want, 2e-5, name)
    close(logits(hf_longattn.apply(m, method, **WIDE[method]), ids), plain)
    rows = hf_longattn.describe(m).rows
    assert "no rotary encoding" not in rows[0][2]
    assert "no rotary encoding" in rows[1][2]
    assert (rows[1][1] == "unchanged") == (config.visibility is None)
    close(logits(hf_longattn.remove(m), ids), plain, 0.0)


def test_layers_that_do_not_rotate_take_no_rotation_that_others_kept() -> None:
    m = hf_longattn.apply(build("Llama", _SMALL), "rerope", window=7)
    logits(m, tokens())
    source = next(method.rotary for x in View(m).layers if (method := method_of(x.module)) is not None)
    assert [x.rotation(torch.empty(0)).inv_freq.numel() > 0 for x in (source, replace(source, still=True))] == [True, False]


def test_other_slots_act_where_nothing_rotates() -> None:
    ids, method = tokens(), "rerope+infoscale"
    config = LongAttnConfig.preset(method, window=7, train_length=8)
    want = by_closed_form(build("SmolLM3", _SOME), ids, config, still=1)
    m = hf_longattn.apply(build("SmolLM3", _SOME), config)
    close(logits(m, ids), want)
    last = hf_longattn.describe(m).rows[1]
    assert last[1].startswith("infoscale")
    assert last[2] == "backend auto, not remapped: no rotary encoding"
    close(logits(hf_longattn.update(m, epsilon=0.0, clamp=False), ids)[:, :1], want[:, :1], 1.0)
    assert "rerope" not in hf_longattn.describe(m).rows[1][1]  # an update verifies anew


def test_a_loaded_model_finds_them_at_its_first_call(tmp_path: Path) -> None:
    ids, config = tokens(), LongAttnConfig.preset("rerope", window=7)
    m = build("SmolLM3", _SOME)
    m.save_pretrained(tmp_path)
    want = logits(hf_longattn.apply(m, config), ids)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="rerope", longattn={"window": 7})
    assert all(row[2].endswith("rotation verified at the first call") for row in hf_longattn.describe(loaded).rows)
    close(logits(loaded, ids), want)
    assert hf_longattn.describe(loaded).rows[1][1] == "unchanged"
    assert hf_longattn.describe(loaded) == hf_longattn.describe(m)


@pytest.mark.parametrize("name", NOT_IN_FULL)
def test_where_no_far_key_is_rotated_a_remap_says_that_it_changes_nothing(name: str, tmp_path: Path) -> None:
    m, ids = build(name, NOT_IN_FULL[name]), tokens()
    plain = logits(m, ids)
    says = rf"nothing to remap in {name}\w+: the layers \[1\] .* do not rotate.*others have windows"
    with pytest.warns(UserWarning, match=says):
        hf_longattn.apply(m, "rerope", window=7)
    close(logits(m, ids), plain, 0.0)
    assert [row[2] for row in hf_longattn.describe(m).rows][1] == "no rotary encoding, runs sdpa"
    m.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=says):
        close(logits(loaded, ids), plain, 0.0)
    hf_longattn.remove(m)
    with pytest.raises(ValueError, match=r"nothing to remap.*Take a window"):
        hf_longattn.apply(m, "rerope", window=7, layers=[1])
    close(logits(m, ids), plain, 0.0)
    config = LongAttnConfig.preset("streaming", window=6, sinks=2)
    hf_longattn.apply(m, config)
    far = torch.arange(24)[:, None] - torch.arange(24)
    seen = (far >= 0) & ((far < 6) | (torch.arange(24) < 2))
    masks = {"full_attention": seen[None, None], "sliding_attention": (far >= 0)[None, None]}
    stock = build(name, NOT_IN_FULL[name])
    want = logits(stock, ids, attention_mask=masks)
    assert (want - plain).abs().max() > 1e-3
    close(logits(m, ids), want)
    with torch.no_grad():
        close(feed(m, ids, [16, *[1] * 8]), want, what="cached")


def test_keys_that_do_not_rotate_beside_queries_that_do_are_not_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    code = transformers.models.smollm3.modeling_smollm3
    turn = code.apply_rotary_pos_emb
    monkeypatch.setattr(code, "apply_rotary_pos_emb", lambda q, k, *args, **kwargs: (turn(q, k, *args, **kwargs)[0], k))
    with pytest.raises(ValueError, match=r"does not give what model\.layers\.0\.self_attn computes"):
        hf_longattn.apply(build("SmolLM3", _SOME), "rerope", window=7)


def test_rotated_features_that_are_zero_prove_nothing() -> None:
    """Such a head looks as if nothing rotated; training will not leave it so."""
    m = build(*LATENT["deepseek_v3"])
    for layer in m.model.layers:
        a = layer.self_attn
        a.kv_a_proj_with_mqa.weight.data[16:] = 0
        a.q_b_proj.weight.data.view(HEADS, 18, 16)[:, 10:] = 0
    with pytest.raises(ValueError, match="cannot tell how the model rotates"):
        hf_longattn.apply(m, "rerope", window=7)
    assert m.config.longattn is None
