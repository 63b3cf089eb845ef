"""Positions and visibility: remapped rotary distances, windows and sinks, and verifying that a rotation is understood."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import closed_form
import pytest
import torch
from calls import inputs, with_gradients
from cases import FAMILIES, HEAD_DIM, model_config
from helpers import SCENARIOS, build, close, crossed, logits, model, static, stock, tokens
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from watched import Operators

import hf_longattn
from hf_longattn import LongAttnConfig, Rotation, reference_attention
from hf_longattn.core.attend import attend
from hf_longattn.core.call import Call
from hf_longattn.core.geometry import AttentionLayout
from hf_longattn.core.kernels import few_cpu, tiled
from hf_longattn.core.kernels.by_segment import BySegment
from hf_longattn.core.kernels.rotate import rotate
from hf_longattn.core.lower import lower
from hf_longattn.integration.caches import CACHE
from hf_longattn.integration.state import state_of

METHODS: dict[str, dict[str, Any]] = {
    "rerope": {"window": 7},
    "leaky_rerope": {"window": 7, "stretch": 2.5},
    "self_extend": {"window": 6, "group": 3},
    "string_remap": {"shift": 9, "window": 4},
    "dual_chunk": {"chunk": 10, "local": 3},
    "windowed": {"window": 7},
    "streaming": {"window": 6, "sinks": 2},
    "lm_infinite": {"window": 6, "sinks": 2},
}
CONFIGS = {name: LongAttnConfig.preset(name, **parameters) for name, parameters in METHODS.items()}
#: As a layer with two key heads uses it.
CONFIGS["leaky_by_head"] = LongAttnConfig.preset("leaky_rerope", window=7, stretch=[2.5, "inf"])
#: Wide enough that a text of 24 tokens lies inside.
WIDE: dict[str, dict[str, Any]] = {name: p | {"window": 30} for name, p in METHODS.items()}
WIDE |= {"dual_chunk": {"chunk": 40, "local": 10}, "string_remap": {"shift": 40, "window": 4}}


def rotation(interleaved: bool = False, pairs: int = 3, first: int = 0) -> Rotation:
    return Rotation(torch.tensor([1.0, 0.37, 0.05, 0.004], dtype=torch.float64)[:pairs], interleaved, first)


#: Queries, keys and values before any rotation.
raw = functools.partial(inputs, q=23, k=23, d=8, seed=3)


@pytest.mark.parametrize(
    ("name", "parameter"),
    [("rerope", "window"), ("dual_chunk", "chunk"), ("string_remap", "shift"), ("yarn_beyond", "train_length")],
)
def test_a_length_that_no_model_filled_in_is_named(name: str, parameter: str) -> None:
    query, key, value = raw()
    with pytest.raises(ValueError, match=f"{name} needs {parameter}: give it, or put the method into a model"):
        reference_attention(query, key, value, LongAttnConfig.preset(name), rotation=rotation())


def complex_pairs(x: Tensor, r: Rotation) -> tuple[Tensor, Tensor]:
    """The rotated pairs of features as complex numbers, and the rest."""
    n = len(r.inv_freq)
    before, turned, rest = x.split([r.first, 2 * n, x.shape[-1] - r.first - 2 * n], -1)
    rest = torch.cat([before, rest], -1)
    pairs = turned.unflatten(-1, (n, 2)) if r.interleaved else turned.unflatten(-1, (2, n)).transpose(-1, -2)
    return torch.view_as_complex(pairs.contiguous()), rest


def rotated(x: Tensor, position: Tensor, r: Rotation) -> Tensor:
    """x as a model with this rotation passes it to its attention."""
    z, rest = complex_pairs(x, r)
    z = torch.view_as_real(z * torch.polar(torch.ones(()).double(), position[:, None] * r.inv_freq))
    turned = z.flatten(-2) if r.interleaved else z.transpose(-1, -2).flatten(-2)
    return torch.cat([rest[..., : r.first], turned, rest[..., r.first :]], -1)


def by_distance(query: Tensor, key: Tensor, value: Tensor, config: LongAttnConfig, r: Rotation, position: Tensor) -> Tensor:
    """Attention that was fed the remapped distances directly: queries and keys not rotated, each pair by its own angle."""
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    i, j = position[:, None], torch.arange(key.shape[2])
    method = config.positions or config.visibility
    assert method is not None
    (q, q_rest), (k, k_rest) = complex_pairs(query, r), complex_pairs(key, r)
    distance = method.distance(i, j)
    if distance.ndim == 3:
        distance = distance.movedim(-1, 0).repeat_interleave(query.shape[1] // distance.shape[-1], 0)
    angle = distance[..., None] * r.inv_freq
    pair = q[..., :, None, :] * k[..., None, :, :].conj() * torch.polar(torch.ones(()).double(), angle)
    scores = (pair.real.sum(-1) + q_rest @ k_rest.transpose(-1, -2)) * query.shape[-1] ** -0.5
    seen = j <= i if config.visibility is None else (j <= i) & config.visibility.visible(i, j)
    return torch.softmax(scores.masked_fill(~seen, -torch.inf), -1) @ value


@pytest.mark.parametrize(("pairs", "first"), [(4, 0), (3, 0), (1, 0), (3, 2), (2, 3)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_attention_sees_the_remapped_distances(name: str, interleaved: bool, pairs: int, first: int) -> None:
    r, (query, key, value) = rotation(interleaved, pairs, first), raw()
    position = torch.arange(23)
    want = by_distance(query, key, value, CONFIGS[name], r, position)
    query, key = rotated(query, position, r), rotated(key, position, r)
    for backend in ("tiled", "reference"):
        close(hf_longattn.attention(query, key, value, CONFIGS[name], rotation=r, backend=backend), want, 1e-12, backend)


def masked(*shape: int) -> Tensor:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(7)) < 0.7
    mask[..., 2, :] = False  # a row that sees nothing
    return mask


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "decoding": {"q": 1},
    "chunk": {"q": 5},
    "offsets": {"q": 5, "query_start": 30, "key_start": 11},
    "masked": {"attention_mask": masked(2, 1, 23, 23)},
    "masked_by_head": {"attention_mask": masked(1, 4, 23, 23)},
    "one_key_head": {"kv": 1},
    "scaled": {"scaling": 0.8},
}


@pytest.mark.parametrize("blocks", [1 << 21, 64])
@pytest.mark.parametrize("interleaved", crossed([False, True], [False]))
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", CONFIGS)
def test_attention_is_the_reference(name: str, call: str, interleaved: bool, blocks: int, sizes: Callable[..., None]) -> None:
    """Output and all gradients."""
    sizes(BLOCK_ELEMENTS=blocks)
    options, config = dict(CALLS[call]), CONFIGS[name]
    if name == "leaky_by_head" and options.get("kv") == 1:
        config = config.replace(stretch=[2.5])
    tensors = raw(**{key: options.pop(key) for key in ("q", "kv") if key in options})
    options["rotation"] = rotation(interleaved)
    results = [with_gradients(f, tensors, config, **options) for f in (hf_longattn.attention, reference_attention)]
    for got, want in zip(*results, strict=True):
        close(got, want, 1e-11)
    if call.startswith("masked"):
        assert (results[0][0][:, :, 2] == 0).all()
        assert all(x.isfinite().all() for x in results[0])


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_with_a_key_head_for_each_query_head(
    name: str, interleaved: bool, first: int, sizes: Callable[..., None]
) -> None:
    sizes(KEY_ELEMENTS=128, KEYS=8)
    query, key, value = raw(q=1, k=43, h=2)
    options: dict[str, Any] = {"rotation": rotation(interleaved, first=first)}
    got = hf_longattn.attention(query, key, value, CONFIGS[name], **options)
    close(got, reference_attention(query, key, value, CONFIGS[name], **options), 1e-12)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("name", ["cosscale", "rerope+cosscale", "streaming+infoscale+cosscale"])
def test_decoding_divides_by_the_norms_of_keys(name: str, kv_heads: int, sizes: Callable[..., None]) -> None:
    sizes(KEY_ELEMENTS=128, KEYS=8)
    window = {} if name == "cosscale" else {"window": 9}
    config = LongAttnConfig.preset(name, scale=5.0, **window, **({"train_length": 12} if "info" in name else {}))
    query, key, value = raw(q=2, k=43, h=2)
    key, value = key[:, :kv_heads], value[:, :kv_heads]
    key[:, :, 3] = 0.0
    options: dict[str, Any] = {"rotation": rotation()}
    got = hf_longattn.attention(query, key, value, config, **options)
    close(got, reference_attention(query, key, value, config, **options), 1e-12)


@pytest.mark.parametrize("method", ["", "+adaptive_temperature", "+infoscale", "+scale_invariant"])
@pytest.mark.parametrize("name", METHODS)
def test_rows_that_see_nothing_in_float32(name: str, method: str) -> None:
    """In every part: they give 0, and their gradients are finite and do not reach the others."""
    config = LongAttnConfig.preset(name + method, **METHODS[name], **({"train_length": 4} if "info" in method else {}))
    leaves = [x.float().requires_grad_() for x in raw()]
    mask = masked(2, 1, 23, 23)
    out = hf_longattn.attention(*leaves, config, rotation=rotation(), attention_mask=mask)
    grads = torch.autograd.grad(out.sin().sum(), leaves)
    assert (out[:, :, 2] == 0).all()
    assert (grads[0][:, :, 2] == 0).all()
    assert all(x.isfinite().all() for x in (out, *grads))
    want = reference_attention(*(x.double() for x in leaves), config, rotation=rotation(), attention_mask=mask)
    close(out.double(), want)


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_texts_count_from_their_own_starts(name: str) -> None:
    """Two texts in one row of keys; the rotation of each goes on through the row, as one of position_ids would not."""
    r, (query, key, value), cut = rotation(), raw(b=1), 9
    slot = torch.arange(23)
    start = torch.where(slot < cut, 0, cut)
    index = torch.stack([slot, torch.zeros_like(slot), start, start, slot], -1)[None]
    query, key = (rotated(x, slot - start, r) for x in (query, key))
    got = attend(Call(query, key, value, CONFIGS[name], AttentionLayout(index), 0.5, rotation=r))
    for part in (slice(0, cut), slice(cut, 23)):
        tensors = [x[:, :, part] for x in (query, key, value)]
        close(got[:, :, part], reference_attention(*tensors, CONFIGS[name], scaling=0.5, rotation=r), 1e-12)


@pytest.mark.parametrize("name", ["rerope", "leaky_by_head", "self_extend", "lm_infinite"])
@pytest.mark.parametrize("together", [True, False], ids=["together", "by segment"])
def test_keys_may_arrive_turned(name: str, together: bool) -> None:
    """A segment says how its sides are still to be turned: one query, far keys that were turned where they are kept."""
    (query, key, value), r, rows = raw(q=1, k=43), rotation(), AttentionLayout.causal(1, 43, None, 0, torch.device("cpu"))
    call = Call(query, key, value, CONFIGS[name], rows, 0.5, rotation=r)
    plan, kept = lower(call), key.clone()
    for n, segment in enumerate(plan.segments):
        if segment.key is not None:
            columns, _ = segment.visible_columns(43)
            position = rows.key_positions(43)[:, columns]
            kept[:, :, columns] = rotate(r, key[:, :, columns], *segment.key.angles(position))
            plan.segments[n] = segment._replace(key=None)
    assert (kept != key).any()
    compute = few_cpu.FewOnCPU(plan) if together else BySegment(plan, tiled.run, wide=True)
    close(compute(query, kept, value, None, None, None), attend(call), 1e-12)


# cost -----------------------------------------------------------------------------------------------------------------


def work(n: int, config: LongAttnConfig, backend: str, backward: bool) -> int:
    """Numbers that are multiplied, of queries, keys and values, by tiles or by parts of bands."""
    leaves = [x.float().requires_grad_(backward) for x in raw(q=n, k=n, h=2, b=1)]
    with Operators() as seen:
        out = hf_longattn.attention(*leaves, config, rotation=rotation(), backend=backend)
        if backward:
            out.sum().backward()
    return seen.multiplied


@pytest.mark.parametrize(("backend", "backward"), [("fused", False), ("tiled", False), ("tiled", True)])
@pytest.mark.parametrize("name", ["windowed", "streaming", "lm_infinite"])
def test_windows_touch_visible_pairs_only(name: str, backend: str, backward: bool, sizes: Callable[..., None]) -> None:
    """Twice the length, twice the work; and less than a third of full attention's."""
    sizes(BLOCK_ELEMENTS=1 << 13, SHORT=16)
    config = LongAttnConfig.preset(name, window=32)

    half, whole = (work(n, config, backend, backward) for n in (512, 1024))
    assert 1.8 < whole / half < 2.2
    assert whole < work(1024, LongAttnConfig(), "tiled", backward) / 3


# whole models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3", "nanochat"])
@pytest.mark.parametrize("name", METHODS)
def test_inside_the_window_nothing_changes(name: str, family: str) -> None:
    plain, m = logits(stock(family)), hf_longattn.apply(stock(family), name, **WIDE[name])
    close(logits(m), plain, 2e-6)
    longer = tokens(length=60)
    assert (logits(m, longer) - logits(stock(family), longer)).abs().max() > 1e-2


@pytest.mark.parametrize("name", METHODS)
@torch.no_grad()
def test_keys_ahead_stand_as_far_away_as_by_the_reference(name: str) -> None:
    """A beginning that sees itself whole, as a picture does."""
    at, ids = torch.arange(36), tokens(length=36)
    mask = ((at[:, None] >= at) | (at < 20))[None, None]
    own, by_reference = (model("llama", CONFIGS[name], backend) for backend in ("auto", "reference"))
    close(*(m(ids, attention_mask=mask, use_cache=False).logits for m in (own, by_reference)))


# YaRN by row -----------------------------------------------------------------------------------------------------------


YARN: dict[str, dict[str, Any]] = {
    "plain": {"factor": 4.0},
    "whole pairs not": {"factor": 2.5, "truncate": False, "beta_fast": 4.0, "beta_slow": 0.5},
    "no temperature": {"factor": 8.0, "attention_factor": 1.0, "beta_fast": 1.5, "beta_slow": 0.02},
}


def yarn_pair(family: str, parameters: dict[str, Any]) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedModel]:
    """One layer of random weights, trained at 16 so to say: plain, under transformers' YaRN, under YaRN beyond 16 alone."""
    plain = {"rope_type": "default", "rope_theta": 100.0}
    yarn = plain | {"rope_type": "yarn", "original_max_position_embeddings": 16, **parameters}
    models = []
    for rope in (plain, yarn):
        settings = {"full_attention": rope, "sliding_attention": plain} if family == "gemma3" else rope
        types = {"layer_types": ["full_attention"]} if family in ("gemma2", "gemma3") else {}
        changes = {"num_hidden_layers": 1, "max_position_embeddings": 16, "rope_parameters": settings, **types}
        models.append(stock(family, **changes))
    models[1].load_state_dict(models[0].state_dict())
    return *models, hf_longattn.apply(copy.deepcopy(models[0]), "yarn_beyond", **parameters)  # type: ignore[return-value]


@pytest.mark.parametrize("way", ["without_cache", "with_cache", "static_chunks", "left_padded_dynamic_chunks"])
@pytest.mark.parametrize(
    ("family", "kind"),
    # transformers reads `truncate` beside the settings of layer types, where it never is
    [(f, k) for f in ("llama", "gemma3", "qwen3") for k in YARN if f != "gemma3" or "truncate" not in YARN[k]],
)
@torch.no_grad()
def test_rows_beyond_are_stock_yarn_and_the_others_plain(family: str, kind: str, way: str) -> None:
    """In the one layer whose hidden states are the same; keys of the cache were rotated plainly."""
    plain, yarn, m = yarn_pair(family, YARN[kind])
    ids = tokens(length=40)
    want = torch.cat([plain(ids).logits[:, :16], yarn(ids).logits[:, 16:]], 1)
    close(SCENARIOS[way](m, ids), want, 3e-6)
    assert all((want - x(ids).logits).abs().max() > 1e-3 for x in (plain, yarn))


@pytest.mark.parametrize("blocks", [1 << 21, 1 << 12])
@pytest.mark.parametrize("q_len", [300, 40])
def test_rows_within_are_what_they_were(q_len: int, blocks: int, sizes: Callable[..., None]) -> None:
    """On the same kernel, in a text that goes on beyond and in one that ends before; also of half precision."""
    sizes(BLOCK_ELEMENTS=blocks)
    for dtype in (torch.float32, torch.bfloat16):
        query, key, value = (x.to(dtype) for x in raw(q=q_len, k=300))
        for train_length, same in ((280, 300 - q_len), (1000, 300 - q_len)):
            config = LongAttnConfig.preset("yarn_beyond", train_length=train_length)
            r, kernel = Rotation(rotation().inv_freq.float()), {"backend": "tiled"}
            got = hf_longattn.attention(query, key, value, config, rotation=r, **kernel)
            plain = hf_longattn.attention(query, key, value, LongAttnConfig(), rotation=r, **kernel)
            inside = max(min(train_length, 300) - same, 0)
            close(got[:, :, :inside], plain[:, :, :inside], 1e-6 if dtype == torch.float32 else 1e-2)
            assert train_length > 300 or not torch.equal(got[:, :, inside:], plain[:, :, inside:])


@pytest.mark.parametrize("name", ["rerope", "leaky_rerope", "string_remap", "yarn_beyond"])
def test_a_short_text_pays_nothing(name: str) -> None:
    """Intervals in which no row sees a key are left out: no angle is computed, nothing turned or multiplied."""
    config = LongAttnConfig.preset(name, **WIDE.get(name, {"train_length": 30}))
    aten = torch.ops.aten

    def outputs(n: int) -> tuple[list[Tensor], set[Any]]:
        """Under the method and without it; and what the method computes beside that."""
        got, ran = [], []
        for c in (config, LongAttnConfig()):
            with Operators() as seen:
                got.append(hf_longattn.attention(*raw(q=n, k=n), c, rotation=rotation(), backend="tiled"))
            ran.append(seen.ran)
        return got, {aten.cos, aten.mul, aten.addcmul_, aten.bmm} & (ran[0] - ran[1]).keys()

    short, more = outputs(23)
    assert torch.equal(*short)
    assert not more
    assert outputs(60)[1] == {aten.cos, aten.mul, aten.addcmul_, aten.bmm}


def test_yarn_beyond_refuses_what_it_would_compute_wrongly() -> None:
    yarn, llama3 = ({"rope_type": kind, "rope_theta": 100.0, **SCALED[kind]} for kind in ("yarn", "llama3"))
    for rope, message in ((yarn, "scales its rotary positions already"), (llama3, "the frequencies of plain RoPE")):
        m = AutoModelForCausalLM.from_config(model_config("llama", max_position_embeddings=16, rope_parameters=rope))
        with pytest.raises(ValueError, match=message):
            hf_longattn.apply(m, "yarn_beyond")
    with pytest.raises(ValueError, match="no rotary position encoding"):
        hf_longattn.apply(stock("gpt2"), "yarn_beyond")
    with pytest.raises(ValueError, match=r"yarn_beyond's attention factor.*sharpens twice"):
        hf_longattn.apply(stock("llama"), "yarn_beyond+infoscale")
    hf_longattn.apply(stock("llama"), "yarn_beyond+infoscale", attention_factor=1.0)
    with pytest.raises(ValueError, match=r"cosscale normalises .* yarn_beyond's attention factor would do nothing"):
        LongAttnConfig.preset("yarn_beyond+cosscale")
    LongAttnConfig.preset("yarn_beyond+cosscale", attention_factor=1.0)
    for wrong in ({"factor": 0.5}, {"beta_slow": 40.0}, {"train_length": 0}, {"attention_factor": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            LongAttnConfig.preset("yarn_beyond", **wrong)


SCALED: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0, "original_max_position_embeddings": 16},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {
        "factor": 2.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.5, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 16,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}


def scaled(kind: str) -> PreTrainedModel:
    rope = {"rope_type": kind, "rope_theta": 100.0, **SCALED[kind]}
    torch.manual_seed(0)
    config = model_config("llama", max_position_embeddings=16, rope_parameters=rope)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("length", crossed([12, 24], [24]))
@pytest.mark.parametrize("name", crossed(["rerope", "self_extend", "streaming"], ["rerope"]))
@pytest.mark.parametrize("kind", SCALED)
def test_every_rope_type(kind: str, name: str, length: int) -> None:
    """Within the trained length of 16 and beyond it, where two of them change their frequencies as they run."""
    config, ids = CONFIGS[name].replace(stack=True), tokens(length=length)
    plain = scaled(kind)
    before = logits(plain, ids)  # sets the frequencies for this length, which the closed form then reads
    want = logits(closed_form.attach(plain, config), ids)
    for backend in ("tiled", "reference"):
        close(logits(hf_longattn.apply(scaled(kind), config.replace(backend=backend)), ids), want, what=backend)
    assert (want - before).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_frequencies_in_half_precision(dtype: torch.dtype) -> None:
    """model.half() rounds the buffer, and the model multiplies it with positions in float32 all the same."""
    ids, errors = tokens(1, 300), {}
    for name, m in {"stock": stock("llama"), "rerope": hf_longattn.apply(stock("llama"), "rerope", window=7)}.items():
        exact, rough = m, copy.deepcopy(m).to(dtype)
        assert rough.model.rotary_emb.inv_freq.dtype == dtype
        exact.load_state_dict({k: v.float() for k, v in rough.state_dict().items()})
        exact.model.rotary_emb.inv_freq = rough.model.rotary_emb.inv_freq.float()
        errors[name] = (rough(ids).logits.float() - exact(ids).logits).pow(2).mean().sqrt()
    assert errors["rerope"] < 2 * errors["stock"]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_another_rotary_module_in_place_of_the_models_own(family: str) -> None:
    """As those who change a loaded model's rope put it in: the next pass turns by it, and verifies it."""

    def exchanged(m: Any) -> Any:
        text, settings = m.config.get_text_config(), copy.deepcopy(m.config.get_text_config().rope_parameters)
        for x in settings.values() if "full_attention" in settings else [settings]:
            x["rope_theta"] = 500.0
        text.rope_parameters = settings
        m.model.rotary_emb = type(m.model.rotary_emb)(text)
        return m

    m = hf_longattn.apply(stock(family), "rerope", window=7)
    before = m(tokens()).logits
    want = hf_longattn.apply(exchanged(stock(family)), "rerope", window=7)(tokens()).logits
    assert not torch.allclose(before, want, atol=1e-2)
    for copied in (copy.deepcopy(exchanged(m)), m):
        close(copied(tokens()).logits, want, 3e-6)


@pytest.mark.parametrize("zeros", ["of padding", "of other tokens"])
def test_rotation_is_verified_by_a_token_that_is_more_than_zeros(zeros: str) -> None:
    """Token 1 is padding in Olmo's default config, and so embedded as zeros, also after training."""
    m = stock("llama", pad_token_id=1 if zeros == "of padding" else 0)
    m.get_input_embeddings().weight.data[1 : 2 if zeros == "of padding" else 9] = 0.0
    assert hf_longattn.apply(m, "rerope", window=7)(tokens() % 10 + 10).logits.isfinite().all()
    m = stock("llama")
    m.get_input_embeddings().weight.data.zero_()
    with pytest.raises(ValueError, match="too small to show it"):
        hf_longattn.apply(m, "rerope", window=7)


@pytest.mark.parametrize("family", ["llama", "nanochat"])
def test_frequencies_made_under_inference_mode(family: str) -> None:
    """By the model, or by us where it rotates backwards; what is made then serves training too."""
    want = hf_longattn.apply(stock(family), "rerope", window=7)(tokens()).logits.detach()
    m = hf_longattn.apply(stock(family), "rerope", window=7)
    with torch.inference_mode():
        close(m(tokens()).logits, want, 3e-6)
    m(tokens()).logits.sum().backward()
    with torch.inference_mode():
        rotary = m.model.rotary_emb
        rotary.inv_freq = rotary.inv_freq.clone()
        assert rotary.inv_freq.is_inference()
        close(m(tokens()).logits, want, 3e-6)
        rotary.inv_freq.mul_(0.5)
        slower = m(tokens()).logits
        rotary.inv_freq = rotary.inv_freq.clone()
        close(m(tokens()).logits, slower, 0.0)
        assert not torch.allclose(slower, want, atol=1e-4)


def test_frequencies_that_change_back() -> None:
    """A long text, then a short one: dynamic and longrope return to the frequencies that they began with."""
    for kind in ("dynamic", "longrope"):
        m = hf_longattn.apply(scaled(kind), "rerope", window=7, stack=True)
        short, long = tokens(length=12), tokens(length=24)
        before = logits(m, short)
        logits(m, long)
        close(logits(m, short), before, 1e-6)


@pytest.mark.parametrize("kind", ["dynamic", "yarn"])
@pytest.mark.parametrize("name", [n for n in METHODS if n != "windowed"])
def test_a_model_that_scales_already_is_refused(name: str, kind: str) -> None:
    m = scaled(kind)
    with pytest.raises(ValueError, match=rf"rope_type '{kind}'.*stack=True"):
        hf_longattn.apply(m, name, **METHODS[name])
    assert m.config._attn_implementation == "sdpa"
    hf_longattn.apply(m, "windowed", window=7)  # changes no distance


# verifying the rotation ------------------------------------------------------------------------------------------------

INTERLEAVED = {
    "Cohere": {"logit_scale": 1.0},
    "Glm": {"head_dim": HEAD_DIM, "partial_rotary_factor": 0.5},
}


def interleaved(name: str) -> PreTrainedModel:
    return build(name, {k: v for k, v in FAMILIES["llama"][1].items() if k != "head_dim"}, **INTERLEAVED[name])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("config", INTERLEAVED)
def test_interleaved_rotation_is_found(config: str, name: str) -> None:
    plain = interleaved(config)
    m = hf_longattn.apply(copy.deepcopy(plain), name, **METHODS[name])
    want = logits(hf_longattn.apply(copy.deepcopy(plain), name, **METHODS[name], backend="reference"))
    close(logits(m), want)
    assert (want - logits(plain)).abs().max() > 1e-2
    close(logits(hf_longattn.apply(copy.deepcopy(plain), name, **WIDE[name])), logits(plain), 2e-6)


def break_rotation(m: Any, how: str) -> None:
    inner, layers = m.model.rotary_emb.forward, m.model.layers

    def broken(x: Tensor, position_ids: Tensor, *args: Any) -> Any:
        if how == "other positions":
            return inner(x, 2 * position_ids, *args)
        cos, sin = inner(x, position_ids, *args)
        return (cos.flip(-1), sin.flip(-1)) if how == "other order" else (cos, -sin)

    if how != "one way and the other":
        m.model.rotary_emb.forward = broken
        return
    turned = layers[0].self_attn.forward  # one layer only: each convention is there, and none holds for all
    layers[0].self_attn.forward = lambda *args, position_embeddings, **kwargs: turned(
        *args, position_embeddings=(position_embeddings[0], -position_embeddings[1]), **kwargs
    )


BROKEN = ["other positions", "other order", "one way and the other"]


@pytest.mark.parametrize("how", BROKEN)
def test_a_rotation_that_is_not_understood_is_refused(how: str) -> None:
    m = stock("llama")
    break_rotation(m, how)
    plain = logits(m)
    layer = 1 if how == "one way and the other" else 0
    with pytest.raises(ValueError, match=rf"does not give what model\.layers\.{layer}\.self_attn computes"):
        hf_longattn.apply(m, "rerope", window=7)
    assert m.config._attn_implementation == "sdpa"
    assert m.config.longattn is None
    assert torch.equal(logits(m), plain)
    hf_longattn.apply(m, "scale_invariant")
    before = logits(m)
    with pytest.raises(ValueError, match="does not give what"):
        hf_longattn.apply(m, "streaming", window=7)
    assert hf_longattn.get_config(m).name == "scale_invariant"
    assert torch.equal(logits(m), before)
    logits(hf_longattn.apply(m, "windowed", window=7))  # needs no rotation


def test_vectors_that_show_no_rotation_prove_none() -> None:
    """Zeros fit every convention; training will not leave them so."""
    m = stock("llama")
    for layer in m.model.layers:
        torch.nn.init.zeros_(layer.self_attn.q_proj.weight)
        torch.nn.init.zeros_(layer.self_attn.k_proj.weight)
    with pytest.raises(ValueError, match="cannot tell how the model rotates"):
        hf_longattn.apply(m, "rerope", window=7)
    assert m.config._attn_implementation == "sdpa"


def test_a_layer_that_joins_later_is_proven_too() -> None:
    """Layer 0 turns the other way; verifying the others does not speak for it."""
    m = stock("llama")
    turned = m.model.layers[0].self_attn.forward
    m.model.layers[0].self_attn.forward = lambda *args, position_embeddings, **kwargs: turned(
        *args, position_embeddings=(position_embeddings[0], -position_embeddings[1]), **kwargs
    )
    hf_longattn.apply(m, "rerope", window=7, layers=[1, 2, 3])
    with pytest.raises(ValueError, match=r"does not give what model\.layers\.[01]\.self_attn"):
        hf_longattn.update(m, layers="all")
    assert hf_longattn.get_config(m).layers == (1, 2, 3)


class Refuses(Exception):
    pass


def test_update_keeps_a_proof_and_asks_no_one_elses_forward() -> None:
    """A trainer that puts its loss in the place of forward; verifying calls the class's own, and once."""

    def loss(*args: Any, **kwargs: Any) -> None:
        raise Refuses

    m = stock("llama")
    m.forward = loss
    hf_longattn.apply(m, "rerope+scale_invariant", window=7, strength=0.1)
    inner = type(m.model).forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(m.model), "forward", loss)
        hf_longattn.update(m, strength=0.5)
        hf_longattn.update(m, window=5)
        m.model.rotary_emb = type(m.model.rotary_emb)(m.config)
        with pytest.raises(Refuses):  # another rotation is another question
            hf_longattn.update(m, strength=0.6)
    assert type(m.model).forward is inner
    del m.forward
    want = hf_longattn.apply(stock("llama"), "rerope+scale_invariant", window=5, strength=0.5)
    assert torch.equal(logits(m), logits(want))


def test_another_rotary_module_is_verified_before_it_is_used() -> None:
    """Of a copy of the config; or in the place of one that was never filled, in a model built without weights."""
    want = logits(hf_longattn.apply(stock("llama"), "rerope", window=7))
    m = hf_longattn.apply(stock("llama"), "rerope", window=7)
    m.model.rotary_emb = type(m.model.rotary_emb)(copy.deepcopy(m.config))
    close(logits(m), want)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(m.config, attn_implementation="rerope", longattn={"window": 7})
    empty.load_state_dict(m.state_dict(), assign=True)
    empty.model.rotary_emb = type(m.model.rotary_emb)(empty.config)
    close(logits(empty.eval()), want)


@pytest.mark.slow
def test_a_loaded_model_is_proven_at_its_first_call(base: Path) -> None:
    m = AutoModelForCausalLM.from_pretrained(base, attn_implementation="rerope", longattn={"window": 7})
    want = logits(hf_longattn.apply(stock("llama"), "rerope", window=7))
    state = state_of(m)
    assert state is not None
    assert state.unverified
    assert torch.equal(logits(m), want)
    assert not state.unverified
    assert all(x._forward_pre_hooks == {} for x in m.model.layers.modules())
    m = AutoModelForCausalLM.from_pretrained(base, attn_implementation="rerope", longattn={"window": 7})
    with torch.no_grad():  # without its head first
        close(m.lm_head(m.model(tokens(), use_cache=False).last_hidden_state), want)
    broken = AutoModelForCausalLM.from_pretrained(base, attn_implementation="rerope", longattn={"window": 7})
    break_rotation(broken, "other order")
    for _ in range(2):  # it does not wear off
        with pytest.raises(ValueError, match="does not give what"):
            logits(broken)


@pytest.mark.parametrize("where", [{"": "disk"}, {"model.layers.1": "disk"}])
@pytest.mark.parametrize("applied", [False, True])
def test_weights_on_disk(base: Path, tmp_path: Path, where: dict[str, str], applied: bool) -> None:
    """accelerate's hooks fetch them layer by layer, for verifying too."""
    pytest.importorskip("accelerate")
    parts = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", *(f"model.layers.{i}" for i in range(4))]
    places = where if "" in where else dict.fromkeys(parts, "cpu") | where
    options: dict[str, Any] = {"attn_implementation": "rerope", "longattn": {"window": 7}}
    m = AutoModelForCausalLM.from_pretrained(base, device_map=places, offload_folder=tmp_path, **({} if applied else options))
    if applied:
        hf_longattn.apply(m, "rerope", window=7)
    assert any(p.is_meta for p in m.parameters())
    assert torch.equal(logits(m), logits(hf_longattn.apply(stock("llama"), "rerope", window=7)))


def test_generate_right_after_loading(base: Path) -> None:
    m = AutoModelForCausalLM.from_pretrained(base, attn_implementation="rerope", longattn={"window": 7})
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    want = hf_longattn.apply(stock("llama"), "rerope", window=7).generate(tokens(), **options)
    assert torch.equal(m.generate(tokens(), **options), want)


def test_a_copy_made_before_the_first_call_is_proven_too(base: Path) -> None:
    m = AutoModelForCausalLM.from_pretrained(base, attn_implementation="rerope", longattn={"window": 7})
    assert torch.equal(logits(copy.deepcopy(m)), logits(m))


def test_set_attn_implementation_proves_at_once() -> None:
    m = stock("llama")
    m.config.longattn = {"window": 7}
    m.set_attn_implementation("rerope")
    close(logits(m), logits(hf_longattn.apply(stock("llama"), "rerope", window=7)), 0)
    broken = stock("llama")
    break_rotation(broken, "other order")
    broken.config.longattn = {"window": 7}
    with pytest.raises(ValueError, match="does not give what"):
        broken.set_attn_implementation("rerope")
    assert broken.config._attn_implementation == "sdpa"
    assert logits(broken).isfinite().all()


@pytest.mark.parametrize("how", ["layers", "inner"])
def test_a_remap_goes_into_what_was_compiled(how: str) -> None:
    """The pass that verifies rotations runs as it is: Dynamo fails at parts of it."""
    m = stock("llama", num_hidden_layers=2)
    torch._dynamo.reset()
    if how == "inner":
        m.model = torch.compile(m.model, backend="eager")
    else:
        for layer in m.model.layers:
            layer.compile(backend="eager")
    hf_longattn.apply(m, "rerope", window=7)
    close(logits(m), logits(hf_longattn.apply(stock("llama", num_hidden_layers=2), "rerope", window=7)))


@pytest.mark.slow
def test_compiling_before_any_call_says_what_to_do(base: Path) -> None:
    m = AutoModelForCausalLM.from_pretrained(base, attn_implementation="rerope", longattn={"window": 7})
    torch._dynamo.reset()
    want = logits(copy.deepcopy(m))
    close(logits(torch.compile(copy.deepcopy(m), backend="eager")), want)  # and where it need not be one graph goes on
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"call the model once before torch\.compile"):
        logits(torch.compile(m, fullgraph=True, backend="eager"))
    torch._dynamo.reset()
    want = logits(m)
    close(logits(torch.compile(m, fullgraph=True, backend="eager")), want)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dual_chunk", "streaming"])
def test_compiled_steps_with_a_static_cache(name: str) -> None:
    m, ids = hf_longattn.apply(stock("llama", num_hidden_layers=1), name, **METHODS[name]), tokens(2, 12)
    cache = static(m, ids)
    torch._dynamo.reset()
    step = torch.compile(m, fullgraph=True, backend="eager")
    with torch.no_grad():
        out = [m(ids[:, :8], **{CACHE: cache}).logits]
        out += [step(ids[:, i : i + 1].clone(), **{CACHE: cache}).logits for i in range(8, 12)]
    close(torch.cat(out, 1), logits(m, ids))


@pytest.mark.parametrize("name", [n for n in METHODS if n != "windowed"])
def test_gpt2_has_no_rotation(name: str) -> None:
    with pytest.raises(ValueError, match="no rotary position encoding"):
        hf_longattn.apply(stock("gpt2"), name, **METHODS[name])


# mistakes -------------------------------------------------------------------------------------------------------------

MISTAKES: dict[str, tuple[str, dict[str, Any], str]] = {
    "window of the trained length": ("rerope", {"window": 512}, "must be below the trained length 512"),
    "leaky window": ("leaky_rerope", {"window": 600}, "must be below the trained length 512"),
    "self_extend window": ("self_extend", {"window": 512}, "must be below the trained length 512"),
    "windowed beyond": ("windowed", {"window": 513}, "must be at most the trained length 512"),
    "streaming beyond": ("streaming", {"window": 510, "sinks": 4}, "together exceed the trained length 512"),
    "lm_infinite beyond": ("lm_infinite", {"window": 513}, "must be at most the trained length 512"),
    "chunk of the trained length": ("dual_chunk", {"chunk": 512, "local": 5}, "must be below the trained length 512"),
    "group": ("self_extend", {"group": 0}, "group must be >= 1"),
    "fraction of a group": ("self_extend", {"group": 1.5}, "group must be an integer"),
    "stretch": ("leaky_rerope", {"stretch": 0.5}, "stretch must be >= 1"),
    "stretch for too few layers": ("leaky_rerope", {"stretch": [2.0, 3.0]}, "for each of 4 layers.*got 2"),
    "stretch for too many heads": ("leaky_rerope", {"stretch": [2, 2, 2, [1, 2, 3, 4]]}, r"2 key heads.*some with \[4\]"),
    "stretch of a head": ("leaky_rerope", {"stretch": [2, 2, 2, [1, 0.5]]}, "stretch must be >= 1"),
    "stretch that is no number": ("leaky_rerope", {"stretch": float("nan")}, "stretch must be >= 1"),
    "window of nothing": ("rerope", {"window": 0}, "window must be >= 1"),
    "sinks": ("streaming", {"sinks": -1}, "sinks must be >= 0"),
    "chunk and local": ("dual_chunk", {"chunk": 10, "local": 10}, "chunk must be larger than local"),
    "chunk below the default local": ("dual_chunk", {"chunk": 20, "local": 30}, "chunk must be larger than local"),
    "shift of the trained length": ("string_remap", {"shift": 512}, "must be below the trained length 512"),
    "shift below its window": (
        "string_remap",
        {"shift": 100, "window": 128},
        r"shift must be an integer > window \(128\), got 100",
    ),
    "two remaps": ("rerope+streaming", {}, "rerope and streaming clash"),
    "two positions": ("rerope+self_extend", {}, "clash: both fill the slot 'positions'"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes(what: str) -> None:
    name, parameters, message = MISTAKES[what]
    m = stock("llama")
    with pytest.raises(ValueError, match=message):
        hf_longattn.apply(m, name, **parameters)
    assert m.config._attn_implementation == "sdpa"


def test_an_infinite_stretch_is_a_cap() -> None:
    """Everywhere; and saved as strict JSON, on a config that says how far it reaches."""
    config = LongAttnConfig.preset("leaky_rerope", window=7, stretch=math.inf)
    assert torch.equal(
        logits(hf_longattn.apply(stock("llama"), config)), logits(hf_longattn.apply(stock("llama"), "rerope", window=7))
    )
    by_head = config.replace(stretch=[math.inf, 2.0, (math.inf, 3.0), math.inf])
    for each, reach in ((config, None), (by_head, 7 + 2 * (512 - 7))):
        saved = json.dumps(each.to_dict(), allow_nan=False)
        assert LongAttnConfig.parse(json.loads(saved)) == each
        assert each.positions is not None
        assert each.positions.reach(512) == reach


def test_self_extend_reaches_until_a_row_shows_a_distance_that_training_did_not() -> None:
    for length, window, group in itertools.product((9, 24), (1, 2, 5, 8), range(1, 8)):
        i = torch.arange(length * group + 2)
        shown = closed_form.self_extend({"window": window, "group": group}, i[:, None].numpy(), i.numpy())
        rows = torch.from_numpy(shown).where(i <= i[:, None], 0).amax(1)
        config = LongAttnConfig.preset("self_extend", window=window, group=group)
        assert config.positions is not None
        assert config.positions.reach(length) == int((rows >= length).nonzero()[0])


@pytest.mark.parametrize("name", METHODS)
def test_layers_with_a_window_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="sliding-window layers"):
        hf_longattn.apply(stock("gemma3"), name, layers="all", **METHODS[name])


@pytest.mark.parametrize("name", METHODS)
def test_defaults_fit_the_model(name: str) -> None:
    """Every default is derived from the trained length, down to short ones."""
    for length in (512, 40, 8):
        config = model_config("llama", max_position_embeddings=length)
        m = hf_longattn.apply(AutoModelForCausalLM.from_config(config), name)
        assert logits(m).isfinite().all()


@pytest.mark.parametrize("trained", ["v_proj", "longattn"])
@pytest.mark.parametrize("name", ["rerope", "dual_chunk", "streaming"])
def test_gradients_where_queries_and_keys_have_none(name: str, trained: str) -> None:
    """Of few queries too, whose keys are otherwise re-rotated as they are read, without gradients."""
    config = LongAttnConfig.preset(name + "+logn", **METHODS[name], learned=True, train_length=11)
    results = []
    for backend in ("auto", "reference"):
        m = hf_longattn.apply(stock("llama"), config.replace(backend=backend, layers=[0])).requires_grad_(False)
        weights = [p.requires_grad_() for n, p in m.named_parameters() if trained in n and "layers.0." in n]
        assert weights
        results.append(torch.autograd.grad(m(ids := tokens(2, 16), labels=ids).loss, weights))
    for got, want in zip(*results, strict=True):
        assert want.abs().max() > 1e-5
        close(got, want, 1e-6)


def test_a_remap_needs_the_rotation() -> None:
    for function in (hf_longattn.attention, reference_attention):
        with pytest.raises(ValueError, match="needs rotation="):
            function(*raw(), CONFIGS["rerope"])


@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize("method", ["windowed", "streaming", "lm_infinite"])
@torch.no_grad()
def test_windows_have_two_sides_where_a_mask_looks_ahead(method: str, backend: str) -> None:
    """As plain attention under a band mask; sinks are keys behind."""
    config = LongAttnConfig.preset(method, window=5, **({} if method == "windowed" else {"sinks": 0}))
    ids, n = tokens(2, 20), 20
    at = torch.arange(n)
    both, band = torch.ones(2, 1, n, n, dtype=torch.bool), ((at[:, None] - at).abs() < 5).expand(2, 1, n, n)
    plain = stock("llama")
    plain.set_attn_implementation("sdpa")
    want = plain(ids, attention_mask=band, use_cache=False).logits
    close(model("llama", config, backend)(ids, attention_mask=both, use_cache=False).logits, want)
