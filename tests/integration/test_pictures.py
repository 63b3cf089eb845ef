"""Texts with pictures in models with M-RoPE, whose tokens are at several positions each, under a remap."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cases import FAMILIES
from helpers import close, crossed, rounded_alike, tokens
from tiny_configs import class_of, families, multimodal, tiny
from torch import Tensor
from transformers import DynamicCache, QuantizedCache, StaticCache

import hf_longattn
from hf_longattn.integration.caches import CACHE
from hf_longattn.integration.changes import disable, enable
from hf_longattn.integration.state import method_of

SECTIONS = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}
TEXT = {k: v for k, v in FAMILIES["llama"][1].items() if k != "head_dim"}
SPECIAL = {"image_token_id": 90, "vision_start_token_id": 91, "vision_end_token_id": 92, "video_token_id": 93}
TOWER = {"depth": 1, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 1}
MIXED = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
WIDER = TOWER | {"intermediate_size": 16, "out_hidden_size": 32}
#: By the name of the class: changes of the text's config, and the tower's.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2VL": ({"rope_parameters": SECTIONS}, TOWER | {"embed_dim": 16}),
    "Qwen2_5_VL": ({"rope_parameters": SECTIONS}, WIDER),
    "Qwen3VL": (
        {"head_dim": 12, "rope_parameters": SECTIONS | {"mrope_section": [2, 2, 2]}},
        WIDER | {"deepstack_visual_indexes": [0], "num_position_embeddings": 64},
    ),
    "Qwen3_5": (
        MIXED
        | {"num_hidden_layers": 4, "head_dim": 16}
        | {"rope_parameters": SECTIONS | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
        WIDER | {"deepstack_visual_indexes": [], "num_position_embeddings": 64},
    ),
}
#: By which axis they turn each pair.
TURNS = {
    "Qwen2VL": (0, 1, 2, 2),
    "Qwen2_5_VL": (0, 1, 2, 2),
    "Qwen3VL": (0, 1, 2, 0, 1, 2),
    "Qwen3_5": (0, 1, 2, 0),
}
METHODS = ["rerope", "leaky_rerope", "self_extend", "string_remap", "streaming", "rerope+infoscale", "scale_invariant+rerope"]
#: Recurrent layers compute chunks of a text otherwise than single tokens.
TOLERANCES = {"Qwen3_5": 1e-4}
#: What is as long as the text.
LENGTHY = ("input_ids", "attention_mask", "mm_token_type_ids")
NEAR = 9  # the first picture lies at the positions 6 to 9
ALL = crossed(KINDS, ["Qwen2VL", "Qwen3_5"])


def several_positions(kind: str) -> tuple[Any, dict[str, Any]]:
    """A model with M-RoPE, and a text with a picture of 4 x 4 tokens, which are at the positions 6 to 9 in three axes."""
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip(f"this transformers has no {kind}")
    changes, tower = KINDS[kind]
    config = getattr(transformers, f"{kind}Config")(text_config=TEXT | changes, vision_config=tower, **SPECIAL)
    torch.manual_seed(0)
    m = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    return m, given(m, tokens(1, 19).clamp(max=89), (5,))


def given(m: Any, words: Tensor, at: tuple[int, ...], pad: int = 0) -> dict[str, Any]:
    """A text with pictures of 4 x 4 tokens before words, as a processor would hand it over, padded on the left."""
    picture = torch.tensor([[91, *[90] * 16, 92]])
    pieces, last = [words.new_zeros(1, pad)], 0
    for place in at:
        pieces += [words[:, last:place], picture]
        last = place
    ids = torch.cat([*pieces, words[:, last:]], 1)
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randn(64 * len(at), 48, generator=generator)
    grid = {"image_grid_thw": torch.tensor([[1, 8, 8]] * len(at)), "mm_token_type_ids": (ids == 90).int()}
    mask = torch.ones_like(ids)
    mask[:, :pad] = 0
    return {"input_ids": ids, "pixel_values": pixels, "attention_mask": mask, **grid}


def batch(m: Any) -> dict[str, Any]:
    """Two texts, one of them with two pictures and one with a single one, shorter and so padded on the left."""
    both = given(m, tokens(1, 22, seed=4).clamp(max=89), (3, 9)), given(m, tokens(1, 22).clamp(max=89), (6,), pad=18)
    return {k: torch.cat([x[k] for x in both]) for k in both[0]}


def plan(m: Any) -> Any:
    return next(p for x in m.modules() if (p := method_of(x)) is not None and p.rotary is not None)


def by_definition(m: Any, **inputs: Any) -> Tensor:
    """What the reference says to inputs without a cache."""
    return hf_longattn.update(copy.deepcopy(m), backend="reference")(**inputs, use_cache=False).logits


def continued(m: Any, inputs: dict[str, Any], more: Tensor, cache: Any = None, step: int = 1) -> Tensor:
    """Logits of more tokens behind inputs, that many at a time, behind a cache."""
    mask, out = inputs["attention_mask"], []
    first = m(**inputs, use_cache=True, **({} if cache is None else {CACHE: cache}))
    cache = first[CACHE] if cache is None else cache
    for piece in more.split(step, 1):
        mask = torch.cat([mask, torch.ones_like(piece)], 1)
        out.append(m(piece, **behind(m, mask, piece.shape[1]), **{CACHE: cache}).logits)
    return torch.cat([first.logits, *out], 1)


def behind(m: Any, mask: Tensor, n: int) -> dict[str, Tensor]:
    """Mask and positions of the last n tokens, which the model itself gets wrong where it is given a mask alone."""
    positions = (mask.cumsum(-1) - 1 + m.model.rope_deltas)[:, -n:]
    return {"attention_mask": mask, "position_ids": positions.expand(3, -1, -1)}


def with_more(inputs: dict[str, Any], more: Tensor) -> dict[str, Any]:
    """The same in one call."""
    longer = {
        k: torch.nn.functional.pad(inputs[k], (0, more.shape[1]), value=v)
        for k, v in (("mm_token_type_ids", 0), ("attention_mask", 1))
    }
    return inputs | longer | {"input_ids": torch.cat([inputs["input_ids"], more], 1)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
@torch.no_grad()
def test_pairs_turn_by_the_axis_that_the_model_turns_them_by(kind: str) -> None:
    """Found by what its layers compute; and of a rotation that pictures do not show in, nothing is guessed."""
    m, inputs = several_positions(kind)
    hf_longattn.apply(m, "rerope", window=NEAR)
    assert plan(m).rotary.axis is None
    m(**inputs)
    assert plan(m).rotary.axis == TURNS[kind]
    half = hf_longattn.apply(several_positions(kind)[0].to(torch.bfloat16), "rerope", window=NEAR)
    half(**inputs)
    assert plan(half).rotary.axis == TURNS[kind]


@pytest.mark.slow
@pytest.mark.parametrize("method", crossed(METHODS, ["rerope", "self_extend", "streaming"]))
@pytest.mark.parametrize("kind", ALL)
@torch.no_grad()
def test_pictures_beyond_the_window_are_read_as_defined(kind: str, method: str) -> None:
    """In one call, token by token behind a cache, and in pieces of it."""
    m, inputs = several_positions(kind)
    plain, more = m(**inputs).logits, tokens(1, 12, seed=2).clamp(max=89)
    parameters = {"shift": NEAR, "window": 4} if method == "string_remap" else {"window": NEAR}
    hf_longattn.apply(m, method, **parameters, **({"group": 2} if method == "self_extend" else {}))
    want = by_definition(m, **with_more(inputs, more))
    assert (want[:, : plain.shape[1]] - plain).abs().max() > 1e-2
    tolerance = TOLERANCES.get(kind, 1e-5)
    close(m(**with_more(inputs, more)).logits, want, tolerance)
    close(hf_longattn.update(copy.deepcopy(m), backend="tiled")(**with_more(inputs, more)).logits, want, tolerance)
    close(m(**inputs, output_attentions=True).logits, want[:, : plain.shape[1]], tolerance)
    for step in (1, 5):
        close(continued(m, inputs, more, step=step), want, tolerance, f"{step} at a time")


@pytest.mark.parametrize("kind", ALL)
@torch.no_grad()
def test_two_pictures_and_padding_on_the_left(kind: str) -> None:
    m, _ = several_positions(kind)
    hf_longattn.apply(m, "leaky_rerope", window=NEAR)
    both, more = batch(m), tokens(2, 6, seed=2).clamp(max=89)
    words = tokens(1, 22, seed=4).clamp(max=89)
    want = [by_definition(m, **with_more(given(m, words, (3, 9)), more[:1]))]
    short = given(m, tokens(1, 22).clamp(max=89), (6,))
    pixels = both["pixel_values"][128:]
    want.append(by_definition(m, **with_more(short | {"pixel_values": pixels}, more[1:])))
    for got in (m(**with_more(both, more)).logits, continued(m, both, more)):
        close(got[:1], want[0], TOLERANCES.get(kind, 1e-5))
        close(got[1:, 18:], want[1], TOLERANCES.get(kind, 1e-5))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
@torch.no_grad()
def test_beams_and_other_rows_of_a_cache_take_their_positions_along(kind: str) -> None:
    m, _ = several_positions(kind)
    hf_longattn.apply(m, "rerope", window=NEAR)
    both, more = batch(m), tokens(2, 1, seed=2).clamp(max=89)
    asked = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    found = m.generate(**both, **asked)
    slow = hf_longattn.update(copy.deepcopy(m), backend="reference").generate(**both, **asked, use_cache=False)
    assert torch.equal(found.sequences, slow.sequences)
    close(found.sequences_scores, slow.sequences_scores, 1e-4)
    want = m(**with_more(both, more)).logits[:, -1]
    for change, order in (
        (lambda c: c.reorder_cache(torch.tensor([1, 0])), [1, 0]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1]),
    ):
        if kind == "Qwen3_5" and len(order) == 4:
            continue  # the recurrent layers' caches cannot
        first = m(**both, use_cache=True)
        cache = copy.deepcopy(first[CACHE])
        change(cache)
        deltas, m.model.rope_deltas = m.model.rope_deltas, m.model.rope_deltas[order]
        mask = torch.nn.functional.pad(both["attention_mask"][order], (0, 1), value=1)
        got = m(more[order], **behind(m, mask, 1), **{CACHE: cache}).logits[:, -1]
        close(got, want[order], TOLERANCES.get(kind, 1e-5))
        m.model.rope_deltas = deltas


@pytest.mark.slow
@torch.no_grad()
def test_a_cache_knows_its_positions_however_it_was_filled() -> None:
    """Cropped; a picture behind text; copied; static; with a hole; and refused where some are not known."""
    m, inputs = several_positions("Qwen2VL")
    hf_longattn.apply(m, "rerope", window=NEAR)
    more, n = tokens(1, 8, seed=2).clamp(max=89), inputs["input_ids"].shape[1]
    want = by_definition(m, **with_more(inputs, more))
    close(continued(m, inputs, more, StaticCache(config=m.config.get_text_config(), max_cache_len=64)), want, what="static")
    cache = DynamicCache()
    continued(m, inputs, more.flip(1), cache)
    cache.crop(-more.shape[1])
    close(m(more, **{CACHE: cache}).logits, want[:, n:], what="cropped")
    positions = m.model.get_rope_index(inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"])[0]
    for first in (3, 12):  # before the picture, inside of it
        embedded = m.model.get_input_embeddings()(inputs["input_ids"])
        pictures = m.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
        embedded[inputs["input_ids"] == 90] = torch.cat(tuple(pictures))
        text, cache, got = m.model.language_model, DynamicCache(), []
        for piece in (slice(0, first), slice(first, n)):
            call = {"inputs_embeds": embedded[:, piece], "position_ids": positions[..., piece], CACHE: cache}
            got.append(m.lm_head(text(**call, use_cache=True)[0]))
        close(torch.cat(got, 1), want[:, :n], what=f"in pieces from {first}")
    if hasattr(transformers.cache_utils, "Fp8QuantizedLayer"):
        slow = hf_longattn.update(copy.deepcopy(m), backend="reference")
        config = m.config.get_text_config()
        fp8 = rounded_alike(lambda x=x: continued(x, inputs, more, QuantizedCache("fp8", config)) for x in (m, slow))
        close(*fp8, what="quantised")
        assert (fp8[0] - want).abs().max() > 1e-3  # it rounds
    unread = DynamicCache()
    hf_longattn.remove(plain := copy.deepcopy(m))
    continued(plain, inputs, more, unread)
    with pytest.raises(ValueError, match=r"the positions of cached keys are unknown|do not continue"):
        m.model.language_model(input_ids=more, position_ids=torch.arange(40, 48).expand(3, 1, -1), **{CACHE: unread})
    cache = m(**inputs, use_cache=True)[CACHE]
    plain(more, **{CACHE: cache})
    with pytest.raises(ValueError, match=r"needs those of all 45 keys in the KV cache, of which 37 were read under it"):
        m(more, **{CACHE: cache})
    with pytest.raises(ValueError, match=r"has no position_ids: pass them"):
        m.model.language_model(input_ids=more, **{CACHE: m(**inputs, use_cache=True)[CACHE]})


@pytest.mark.parametrize("kind", ALL)
@torch.no_grad()
def test_text_alone_is_what_it_was(kind: str) -> None:
    """To the bit, before and after a picture."""
    m, inputs = several_positions(kind)
    hf_longattn.apply(m, "leaky_rerope", window=NEAR)
    ids = tokens(2, 24).clamp(max=89)
    before = m(ids).logits
    m(**inputs)
    m.model.rope_deltas = None
    close(m(ids).logits, before, 0.0)
    close(before, by_definition(m, input_ids=ids), TOLERANCES.get(kind, 1e-5))


@pytest.mark.parametrize("kind", ALL)
def test_gradients_are_those_of_the_definition(kind: str) -> None:
    m, inputs = several_positions(kind)
    hf_longattn.apply(m, "leaky_rerope", window=NEAR)
    gradients = []
    for backend in ("reference", "auto", "checkpointed"):
        model = hf_longattn.update(copy.deepcopy(m), backend=backend.replace("checkpointed", "auto")).train()
        if backend == "checkpointed":
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": True})
        model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for got in gradients[1:]:
        for a, b in zip(got, gradients[0], strict=True):
            close(a, b, TOLERANCES.get(kind, 1e-5))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
@torch.no_grad()
def test_what_is_not_defined_or_not_known_is_refused(kind: str, tmp_path: Path) -> None:
    m, inputs = several_positions(kind)
    m.save_pretrained(tmp_path)
    plain, ids = m(**inputs).logits, tokens(2, 24).clamp(max=89)
    loaded = type(m).from_pretrained(tmp_path, attn_implementation="rerope", longattn={"window": NEAR}).eval()
    hf_longattn.apply(m, "rerope", window=NEAR)
    want = by_definition(m, **inputs)
    for x in (m, loaded, copy.deepcopy(m)):
        close(x(**inputs).logits, want, TOLERANCES.get(kind, 1e-5))
    disable(m)
    close(m(**inputs).logits, plain, 0.0)
    enable(m)
    hf_longattn.apply(m, "dual_chunk", chunk=NEAR, local=4)
    with pytest.raises(ValueError, match=r"dual_chunk is not defined for them: it counts from 0 in each chunk.*take rerope"):
        m(**inputs)
    m.model.rope_deltas = None
    close(m(ids).logits, by_definition(m, input_ids=ids), TOLERANCES.get(kind, 1e-5))
    hf_longattn.apply(m, "dual_chunk", chunk=200, local=4)
    close(m(**inputs).logits, plain, 0.0)
    hf_longattn.apply(m, "rerope", window=NEAR)
    m.model.language_model.embed_tokens.weight.data.zero_()
    for layer in m.model.language_model.layers:
        if hasattr(layer, "self_attn"):
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                for p in projection.parameters():
                    p.zero_()
    plan(m).rotary.axis = None
    with pytest.raises(ValueError, match=r"they are too small to show it"):
        m(**inputs)


def test_a_scale_of_distances_counts_tokens() -> None:
    """Without a remap nothing changes: pictures are as many tokens as they have patches."""
    m, inputs = several_positions("Qwen2VL")
    with torch.no_grad():
        plain = m(**inputs).logits
        hf_longattn.apply(m, "scale_invariant")
        full = m(**inputs).logits
        assert (full - plain).abs().max() > 1e-2
        close(full, by_definition(m, **inputs))
        far = hf_longattn.apply(copy.deepcopy(m), "scale_invariant+rerope", window=60)
        close(far(**inputs).logits, full)
        hf_longattn.update(m, strength=0.0)
        close(m(**inputs).logits, plain)


@pytest.mark.parametrize("kind", ALL)
@torch.no_grad()
def test_pictures_are_read_as_before_where_a_remap_changes_nothing(kind: str) -> None:
    """The picture and what stands around it lie below the window, which a long text behind them does not."""
    m, inputs = several_positions(kind)
    ids, kinds = inputs["input_ids"], inputs["mm_token_type_ids"]
    last = int(m.model.get_rope_index(ids, kinds, inputs["image_grid_thw"])[0].max())
    n, near, text = ids.shape[1], last + 5, tokens(1, 40).clamp(max=89)
    assert near < n  # 16 tokens at four positions
    longer = with_more(inputs, text[:, :4])
    greedy = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    plain, want = m(**inputs).logits, m(**longer).logits
    generated = torch.stack(m.generate(**inputs, **greedy).logits)
    eager = copy.deepcopy(m)
    eager.set_attn_implementation("eager")
    weights = eager(**inputs, output_attentions=True).attentions[0]
    hf_longattn.apply(m, "rerope", window=near)
    read = m(**inputs, use_cache=True)
    close(read.logits, plain, 0.0)
    close(m(**longer).logits, want, 0.0)
    close(torch.stack(m.generate(**inputs, **greedy).logits), generated, TOLERANCES.get(kind, 1e-5))
    close(m(**inputs, output_attentions=True).attentions[0], weights, 1e-5)
    m(**inputs)  # its outer model counts on from here
    close(m(text[:, :4], **{CACHE: copy.deepcopy(read[CACHE])}).logits, want[:, -4:], TOLERANCES.get(kind, 1e-5))
    close(
        m(text, **{CACHE: read[CACHE]}).logits, by_definition(m, **with_more(inputs, text))[:, n:], TOLERANCES.get(kind, 1e-5)
    )
    few = hf_longattn.apply(copy.deepcopy(m), "rerope+infoscale", window=near, train_length=n - 1)
    assert (few(**inputs).logits - plain).abs().max() > 1e-4
    close(hf_longattn.apply(m, "rerope+infoscale", window=near, train_length=n)(**inputs).logits, plain, 0.0)


@pytest.mark.slow
@torch.no_grad()
def test_keys_behind_many_pictures_are_turned_once() -> None:
    """As those of text are, where it is worth it; and again where other tokens take their place."""
    m, _ = several_positions("Qwen2VL")
    hf_longattn.apply(m, "leaky_rerope", window=NEAR)
    words, more = tokens(1, 30, seed=6).clamp(max=89), tokens(1, 6, seed=2).clamp(max=89)
    inputs = given(m, words, tuple(sorted(k % 29 for k in range(1, 90))))
    want = m(**with_more(inputs, more)).logits
    cache = DynamicCache()
    close(continued(m, inputs, more.flip(1), cache)[:, -1], m(**with_more(inputs, more.flip(1))).logits[:, -1])
    kept = plan(m).state.rotated_keys[cache]
    assert all(layer.turned.nbytes for layer in kept.values())
    cache.crop(-more.shape[1])
    mask = inputs["attention_mask"]
    for n in range(more.shape[1]):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        got = m(more[:, n, None], **behind(m, mask, 1), **{CACHE: cache}).logits[:, -1]
        close(got, want[:, inputs["input_ids"].shape[1] + n])


@pytest.mark.slow
@torch.no_grad()
def test_an_extended_model_keeps_its_tower_and_reads_pictures_on_both_sides_of_the_window(tmp_path: Path) -> None:
    m, inputs = several_positions("Qwen2VL")
    plain, n = m(**inputs).logits, m.config.get_text_config().max_position_embeddings
    tower = {k: v.clone() for k, v in m.state_dict().items() if "visual" in k}
    hf_longattn.extend(m, to=2 * n).save_pretrained(tmp_path)
    loaded = type(m).from_pretrained(tmp_path).eval()
    assert tower
    assert all(torch.equal(loaded.state_dict()[k], v) for k, v in tower.items())
    close(loaded(**inputs).logits, plain, 0.0)
    words = tokens(1, n + 20, seed=5).clamp(max=89)
    long = given(m, words, (5, n // 2 - 2, n + 3))
    close(loaded(**long).logits, by_definition(loaded, **long))


def beside_text(n: int, first: int, side: int) -> Tensor:
    """Positions (3, 1, n) of a text with one square picture in it."""
    at = torch.arange(n).expand(3, 1, -1).clone()
    patches = torch.arange(side * side)
    at[:, 0, first : first + side * side] = first + torch.stack([0 * patches, patches // side, patches % side])
    at[:, 0, first + side * side :] -= side * side - side
    return at


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axis"), [("glm4v", (0, 0, 1, 2)), ("ernie4_5_vl_moe", (1, 2, 0, 0))])
@torch.no_grad()
def test_models_that_turn_neighbours_or_begin_with_rows(name: str, axis: tuple[int, ...]) -> None:
    kinds = families() | multimodal()
    if name not in kinds:
        pytest.skip(f"this transformers has no {name}")
    torch.manual_seed(0)
    config = tiny(kinds[name])
    m = hf_longattn.apply(class_of(config)._from_config(config).eval(), "self_extend", window=NEAR, group=2)
    ids, at = tokens(1, 40).clamp(max=89), beside_text(40, 6, 4)
    got = m(ids, position_ids=at, use_cache=False).logits
    assert plan(m).rotary.axis == axis
    close(got, by_definition(m, input_ids=ids, position_ids=at))
    first = m(ids[:, :30], position_ids=at[..., :30], use_cache=True)
    rest = m(ids[:, 30:], position_ids=at[..., 30:], **{CACHE: first[CACHE]})
    close(torch.cat([first.logits, rest.logits], 1), got)


@torch.no_grad()
def test_masks_of_the_users_own_and_compiled_calls() -> None:
    m, _ = several_positions("Qwen2VL")
    text, ids, at = m.model.language_model, tokens(1, 40).clamp(max=89), beside_text(40, 6, 4)
    plain = text(input_ids=ids, position_ids=at)[0]
    hf_longattn.apply(m, "rerope", window=NEAR)
    want = text(input_ids=ids, position_ids=at)[0]
    assert (want - plain).abs().max() > 1e-2
    mask = torch.ones(1, 1, 40, 40).tril().bool()
    close(text(input_ids=ids, position_ids=at, attention_mask=mask, use_cache=False)[0], want)
    cache = text(input_ids=ids[:, :30], position_ids=at[..., :30], use_cache=True)[CACHE]
    with pytest.raises(ValueError, match=r"a 4-D mask over a KV cache does not show where a text starts.*2-D mask"):
        text(input_ids=ids[:, 30:], position_ids=at[..., 30:], attention_mask=mask[:, :, 30:], **{CACHE: cache})
    with pytest.raises(Exception, match=r"several positions each.*call without torch.compile"):
        torch.compile(text, backend="eager")(input_ids=ids, position_ids=at, use_cache=False)
    row = torch.arange(40).expand(3, 1, -1).clone()
    row[:2, :, 6:10] = 6  # a picture of one row, behind which positions go on as cache indices do
    cache = text(input_ids=ids[:, :30], position_ids=row[..., :30], use_cache=True)[CACHE]
    with pytest.raises(NotImplementedError, match=r"several positions each.*call without torch.compile"):
        torch.compile(text, backend="eager")(input_ids=ids[:, 30:31], position_ids=row[..., 30:31], **{CACHE: cache})
    text.layers[0].compile(backend="eager")
    with pytest.raises(NotImplementedError, match=r"several positions each.*call without torch.compile"):
        text(input_ids=ids, position_ids=at)


@torch.no_grad()
def test_a_picture_before_the_start_of_its_text_is_refused() -> None:
    m, _ = several_positions("Qwen2VL")
    hf_longattn.apply(m, "rerope", window=NEAR)
    at = beside_text(40, 6, 4) + 3
    at[1, 0, 6:10] = 1
    with pytest.raises(ValueError, match=r"in a picture lie before those of the token with which its text starts"):
        m.model.language_model(input_ids=tokens(1, 40).clamp(max=89), position_ids=at)


@pytest.mark.parametrize("method", ["rerope", "leaky_rerope", "scale_invariant+rerope"])
@torch.no_grad()
def test_holes_padding_on_the_right_and_packed_texts(method: str) -> None:
    m, inputs = several_positions("Qwen2VL")
    hf_longattn.apply(m, method, window=NEAR)
    want, ids = m(**inputs).logits, inputs["input_ids"]
    for place in (3, 25, ids.shape[1]):
        around = {k: torch.cat([inputs[k][:, :place], inputs[k].new_zeros(1, 4), inputs[k][:, place:]], 1) for k in LENGTHY}
        got = m(**inputs | around, use_cache=False).logits
        if "scale" not in method or place == ids.shape[1]:  # which counts what is hidden
            close(got[:, around["attention_mask"][0].bool()], want, what=f"a hole at {place}")
        close(got, by_definition(m, **inputs | around), what=f"a hole at {place}")
    text, one, other = m.model.language_model, beside_text(30, 6, 4), beside_text(26, 3, 3)
    first, second = tokens(1, 30).clamp(max=89), tokens(1, 26, seed=1).clamp(max=89)
    counted = torch.cat([torch.arange(30), torch.arange(26)])[None, None]
    packed = torch.cat([counted, torch.cat([one, other], -1)])
    got = text(input_ids=torch.cat([first, second], 1), position_ids=packed, use_cache=False)[0]
    close(got[:, :30], text(input_ids=first, position_ids=one, use_cache=False)[0])
    close(got[:, 30:], text(input_ids=second, position_ids=other, use_cache=False)[0])
