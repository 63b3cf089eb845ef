"""Keys that decoding turns once and keeps beside the cache: whoever else touches the cache, logits are those without it."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import model_config
from helpers import close, crossed, stock, tokens
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.core import rotated_keys
from hf_longattn.integration import rotated_key_cache as keeping
from hf_longattn.integration.caches import CACHE
from hf_longattn.integration.layers import View
from hf_longattn.integration.state import method_of

preset = LongAttnConfig.preset
METHODS = {
    "rerope": preset("rerope", window=6),
    "leaky_rerope": preset("leaky_rerope", window=6),
    "leaky by head": preset("leaky_rerope", window=6, stretch=[[2.0, 3.0], [4.0, 1.5]] * 2),
    "self_extend": preset("self_extend", window=6),
    "dual_chunk": preset("dual_chunk", chunk=6, local=2),
    "yarn_beyond": preset("yarn_beyond", train_length=8),
    "string_remap": preset("string_remap", shift=6, window=2),
    "cosscale": preset("cosscale", scale=4.0),
    "lm_infinite": preset("lm_infinite", window=6),
    "rerope+windowed": LongAttnConfig(
        positions={"name": "rerope", "window": 4}, visibility={"name": "windowed", "window": 12}
    ),
    "rerope+cosscale": preset("rerope+cosscale", window=6, scale=4.0),
    "rerope+infoscale": preset("rerope+infoscale", window=6, train_length=7),
    "rerope+scale_invariant": preset("rerope+scale_invariant", window=6),
    "rerope+adaptive_temperature": preset("rerope+adaptive_temperature", window=6),
}
PREFIX = 9
Step = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def short_texts(sizes: Callable[..., None]) -> None:
    """What is worth it for a thousand keys is done for two, and buffers grow, and are filled, by a few."""
    sizes(WORTH=2, AHEAD=2, ROOM=3, STEP=4)


@pytest.fixture
def turned() -> list[int]:
    """The columns of keys that are turned to be kept, as they are."""
    return []


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, turned: list[int]) -> list[int]:
    """How many keys were read as they were kept, call by call."""
    calls: list[int] = []
    get = rotated_keys.RotatedKeys.get

    def counting(self: Any, name: Any, columns: slice, until: int, make: Any) -> Tensor:
        def making(missing: slice) -> Tensor:
            out: Tensor = make(missing)
            turned.extend(range(missing.start, missing.stop) if out.shape[3] > 1 else ())  # not norms
            return out

        calls.append(columns.stop - columns.start)
        return get(self, name, columns, until, making)

    monkeypatch.setattr(rotated_keys.RotatedKeys, "get", counting)
    return calls


@contextlib.contextmanager
def room(size: int) -> Iterator[None]:
    """While open, what is kept beside all caches of a model may take so many bytes; -1: nothing is kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeping, "ROTATED_KEY_BYTES", size)
        yield


def model_of(config: LongAttnConfig, family: str = "llama") -> Any:
    return hf_longattn.apply(stock(family), config)


@torch.no_grad()
def said(model: Any, ids: Tensor, cache: Any, **more: Any) -> Tensor:
    return model(ids, **{CACHE: cache}, **more).logits


def steps(model: Any, ids: Tensor, cache: Any, **more: Any) -> Tensor:
    """Token by token."""
    return torch.cat([said(model, token, cache, **more) for token in ids.split(1, 1)], 1)


def as_without(run: Callable[[], Tensor], served: list[int], tolerance: float = 1e-5) -> None:
    """What a program gives is what it gives where nothing is kept; and something was."""
    served.clear()
    got = run()
    assert served
    with room(-1):
        served.clear()
        want = run()
        assert not served
    close(got, want, tolerance)


@pytest.mark.parametrize("name", METHODS)
def test_each_token_is_as_in_one_pass(name: str, served: list[int]) -> None:
    model, ids = model_of(METHODS[name]), tokens(2, 40, seed=1)
    cache = DynamicCache(config=model.config)
    got = torch.cat([said(model, ids[:, :PREFIX], cache), steps(model, ids[:, PREFIX:], cache)], 1)
    with torch.no_grad():
        close(got, model(ids).logits)
    assert bool(served) == (name != "string_remap")


@pytest.mark.parametrize("name", ["rerope", "dual_chunk", "rerope+cosscale"])
def test_a_key_is_turned_once(name: str, served: list[int], turned: list[int]) -> None:
    model = hf_longattn.apply(
        AutoModelForCausalLM.from_config(model_config("llama", num_hidden_layers=1)).eval(), METHODS[name]
    )
    ids, cache = tokens(1, 40, seed=1), DynamicCache()
    said(model, ids[:, :PREFIX], cache)
    steps(model, ids[:, PREFIX:], cache)
    assert turned
    assert len(set(turned)) == len(turned)


@pytest.mark.parametrize("name", ["rerope", "self_extend", "dual_chunk", "cosscale"])
def test_a_draft_is_rolled_back(name: str, served: list[int]) -> None:
    """Several tokens at once, some of them taken back, as assisted decoding does; and the kept keys stay in use."""
    model, ids = model_of(METHODS[name]), tokens(1, 40, seed=1)

    def run() -> Tensor:
        cache, out = DynamicCache(), []
        said(model, ids[:, :PREFIX], cache)
        out.append(steps(model, ids[:, PREFIX : PREFIX + 4], cache))
        for at, good in ((13, 2), (15, 5), (20, 1), (21, 3)):
            draft = torch.cat([ids[:, at : at + good], tokens(1, 5 - good, seed=at)], 1)
            out.append(said(model, draft, cache)[:, :good])
            cache.crop(good - 5)
        return torch.cat([*out, steps(model, ids[:, 24:], cache)], 1)

    as_without(run, served)
    with torch.no_grad():
        close(run(), model(ids).logits[:, PREFIX:])
    served.clear()
    run()
    assert len(served) > 2 * 20


def swapped(cache: Any) -> Any:
    cache.reorder_cache(torch.tensor([1, 0]))
    return cache


def selected(cache: Any) -> Any:
    cache.batch_select_indices(torch.tensor([1, 1]))
    return cache


def repeated(cache: Any) -> Any:
    cache.batch_select_indices(torch.tensor([0]))
    cache.batch_repeat_interleave(2)
    return cache


def cropped(cache: Any) -> Any:
    cache.crop(-5)
    return cache


def written(cache: Any) -> Any:
    for layer in cache.layers:
        layer.keys.mul_(1.5)
    return cache


def written_through_a_view(cache: Any) -> Any:
    cache.crop(-2)
    for layer in cache.layers:
        layer.keys[:, :, 1].zero_()
    return cache


def replaced(cache: Any) -> Any:
    for layer in cache.layers:
        layer.keys = layer.keys.flip(0).contiguous()
    return cache


def shifted(cache: Any) -> Any:
    """The first keys dropped, as those do who evict."""
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, 3:], layer.values[:, :, 3:]
    return cache


def exchanged(cache: Any) -> Any:
    first, second, *_ = cache.layers
    first.keys, second.keys = second.keys, first.keys
    return cache


def saved(cache: Any) -> Any:
    file = io.BytesIO()
    torch.save(cache, file)
    assert b"hf_longattn" not in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=False)


READERS = (swapped, selected, repeated, cropped, written, written_through_a_view, replaced, shifted, exchanged, saved)


@pytest.mark.parametrize("name", crossed(["rerope", "rerope+cosscale"], 2))
@pytest.mark.parametrize("change", [*READERS, copy.deepcopy, pickle.dumps], ids=lambda f: f.__name__)
def test_what_others_do_to_the_cache(change: Any, name: str, served: list[int]) -> None:
    model, ids = model_of(METHODS[name]), tokens(2, 40, seed=1)

    def run() -> Tensor:
        cache = DynamicCache()
        said(model, ids[:, :PREFIX], cache)
        out = [steps(model, ids[:, PREFIX:20], cache)]
        changed = change(cache)
        changed = pickle.loads(changed) if isinstance(changed, bytes) else changed
        out.append(steps(model, ids[:, 20:30], changed))
        out.append(steps(model, ids[:, 30:34], cache))
        return torch.cat(out, 1)

    as_without(run, served)


@pytest.mark.slow
def test_a_prefix_that_requests_share(served: list[int]) -> None:
    """By copies, and by one cache that is cut back after each."""
    model, prefix, others = model_of(METHODS["rerope"]), tokens(1, 20, seed=1), tokens(3, 12, seed=2)

    def run() -> Tensor:
        cache, out = DynamicCache(), []
        said(model, prefix, cache)
        for own in others.split(1):
            out.append(steps(model, own, copy.deepcopy(cache)))
        for own in others.split(1):
            out.append(steps(model, own, cache))
            cache.crop(-12)
        return torch.cat(out, 1)

    as_without(run, served)
    with torch.no_grad():
        want = model(torch.cat([prefix.expand(3, -1), others], 1)).logits[:, 20:].reshape(1, 36, -1)
    close(run(), torch.cat([want, want], 1))


@pytest.mark.slow
def test_another_method_and_none(served: list[int]) -> None:
    ids = tokens(1, 60, seed=1)

    def run() -> Tensor:
        model, cache, out = model_of(METHODS["rerope"]), DynamicCache(), []
        said(model, ids[:, :PREFIX], cache)
        for n, name in enumerate(("", "self_extend", "rerope", "cosscale", "leaky_rerope")):
            if name:
                hf_longattn.apply(model, METHODS[name])
            out.append(steps(model, ids[:, 10 + 8 * n : 18 + 8 * n], cache))
        hf_longattn.remove(model)
        out.append(steps(model, ids[:, 50:55], cache))
        hf_longattn.apply(model, METHODS["rerope"])
        return torch.cat([*out, steps(model, ids[:, 55:], cache)], 1)

    as_without(run, served)


def test_another_model_between(served: list[int]) -> None:
    one, other, ids = model_of(METHODS["rerope"]), model_of(METHODS["rerope"]), tokens(1, 40, seed=1)
    other.get_input_embeddings().weight.data.mul_(1.1)

    def run() -> Tensor:
        cache = DynamicCache()
        said(one, ids[:, :PREFIX], cache)
        turns = [(one, 9, 16), (other, 16, 20), (one, 20, 26), (other, 26, 40)]
        return torch.cat([steps(model, ids[:, a:b], cache) for model, a, b in turns], 1)

    as_without(run, served)


@pytest.mark.parametrize("name", ["rerope", "leaky by head", "self_extend", "cosscale"])
def test_left_padding_and_chunks(name: str, served: list[int]) -> None:
    """Rows of different lengths; a chunk that is too long for the dense kernel; and each row as it is alone."""
    model, ids = model_of(METHODS[name]), tokens(2, 60, seed=1)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0

    def run() -> Tensor:
        cache, out = DynamicCache(), []
        for a, b, size in ((0, 12, 12), (12, 20, 1), (20, 42, 22), (42, 50, 1), (50, 56, 3), (56, 60, 1)):
            for start in range(a, b, size):
                out.append(said(model, ids[:, start : start + size], cache, attention_mask=mask[:, : start + size]))
        return torch.cat(out, 1)

    as_without(run, served)
    with torch.no_grad():
        close(run()[:1, 5:], model(ids[:1, 5:]).logits)


def test_padding_that_comes_later(served: list[int]) -> None:
    """Positions count from another start: what was turned by the first is no longer right."""
    model, ids = model_of(METHODS["self_extend"]), tokens(1, 40, seed=1)

    def run() -> Tensor:
        cache = DynamicCache()
        said(model, ids[:, :12], cache)
        out = [steps(model, ids[:, 12:20], cache)]
        for at in range(20, 30):
            mask = torch.ones(1, at + 1, dtype=torch.long)
            mask[:, :3] = 0
            out.append(said(model, ids[:, at : at + 1], cache, attention_mask=mask, position_ids=torch.tensor([[at]])))
        return torch.cat(out, 1)

    as_without(run, served)


class Rounding(DynamicLayer):
    """A cache layer that keeps other keys than the model wrote, as quantised ones do."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.keys = (16 * keys).round() / 16
        return keys, values


class Own(DynamicCache):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rerope", "self_extend", "cosscale"])
def test_inference_mode_keeps_as_much_and_notices_writes(name: str, served: list[int]) -> None:
    """Its tensors count no writes: the cache holds the same memory as tensors that do."""
    ids = tokens(2, 40, seed=1)

    def run(mode: Any) -> list[Tensor]:
        model = model_of(METHODS[name])
        cache, out = DynamicCache(config=model.config), []
        with mode():
            said(model, ids[:, :PREFIX], cache)
            out.append(steps(model, ids[:, PREFIX:30], cache))
            cache.layers[0].keys[:, :, 1:4].mul_(1.5)
            out.append(steps(model, ids[:, 30:], cache))
        return [x.clone() for x in out]

    counted = run(torch.no_grad)
    kept = len(served)
    as_without(lambda: torch.cat(run(torch.inference_mode), 1), served)
    close(torch.cat(run(torch.inference_mode), 1), torch.cat(counted, 1))
    served.clear()
    run(torch.inference_mode)
    assert len(served) == kept > 0


@pytest.mark.parametrize("name", ["rerope", "cosscale"])
def test_a_cache_of_inference_mode_is_continued_outside_of_it(name: str, served: list[int]) -> None:
    ids, out = tokens(2, 40, seed=1), []
    for first in (torch.no_grad, torch.inference_mode):
        model = model_of(METHODS[name])
        cache = DynamicCache(config=model.config)
        with first():
            said(model, ids[:, :PREFIX], cache)
            steps(model, ids[:, PREFIX:30], cache)
        with torch.no_grad():
            out.append(steps(model, ids[:, 30:], cache))
    assert served
    close(out[1], out[0], 0.0)


@pytest.mark.parametrize("kind", ["static", "rounding", "own"])
def test_other_caches_go_without(kind: str, served: list[int]) -> None:
    model, ids = model_of(METHODS["rerope"]), tokens(1, 30, seed=1)
    cache: Any = Own() if kind == "own" else DynamicCache()
    if kind == "static":
        cache = StaticCache(config=model.config, max_cache_len=40)
    if kind == "rounding":
        cache.layer_class_to_replicate = Rounding
    said(model, ids[:, :PREFIX], cache)
    got = steps(model, ids[:, PREFIX:], cache)
    assert not served
    if kind != "rounding":
        with torch.no_grad():
            close(got, model(ids).logits[:, PREFIX:])


@pytest.mark.parametrize("how", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"do_sample": False}], ids=str)
def test_generate(how: dict[str, Any]) -> None:
    model, ids = model_of(METHODS["rerope"]), tokens(1, 12, seed=1)
    ask = {"max_new_tokens": 20, "min_new_tokens": 20, "return_dict_in_generate": True, "output_scores": True} | how

    def run() -> Tensor:
        scores = torch.cat(model.generate(ids, **ask).scores)
        return scores.where(scores.isfinite(), 0.0)

    got = run()
    with room(-1):
        close(got, run())


def test_beams_never_pay(served: list[int]) -> None:
    model = model_of(METHODS["rerope"])
    model.generate(tokens(1, 12, seed=1), max_new_tokens=20, min_new_tokens=20, num_beams=3, do_sample=False)
    assert len(served) <= 4  # before beams part


def test_the_bound_holds_for_all_caches_together(served: list[int]) -> None:
    model, ids = model_of(METHODS["rerope"]), tokens(1, 30, seed=1)
    caches = [DynamicCache(), DynamicCache()]
    for cache in caches:
        said(model, ids[:, :PREFIX], cache)
    steps(model, ids[:, PREFIX:12], caches[0])
    kept = keeping.nbytes_of(next(iter(state_of(model).rotated_keys.values())))
    served.clear()
    with room(kept + 1):
        steps(model, ids[:, PREFIX:12], caches[1])
    assert not served


def state_of(model: Any) -> Any:
    return next(method.state for layer in View(model).layers if (method := method_of(layer.module)) is not None)


@pytest.mark.parametrize("name", METHODS)
def test_describe_says_so(name: str) -> None:
    shown = str(hf_longattn.describe(model_of(METHODS[name])))
    assert ("keys in a DynamicCache turned once" in shown) == (name not in ("string_remap", "lm_infinite"))


@pytest.mark.slow
def test_it_goes_with_the_cache_and_with_no_copy() -> None:
    model, ids = model_of(METHODS["rerope"]), tokens(1, 30, seed=1)
    cache = DynamicCache()
    said(model, ids[:, :PREFIX], cache)
    steps(model, ids[:, PREFIX:], cache)
    kept = state_of(model).rotated_keys
    assert list(kept) == [cache]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not state_of(twin).rotated_keys
        close(steps(twin, ids[:, :1], copy.deepcopy(cache)), steps(model, ids[:, :1], copy.deepcopy(cache)))
    gc.collect()
    assert list(kept) == [cache]
    del cache
    gc.collect()
    assert not kept


@pytest.mark.slow
def test_in_half_precision_keys_are_rounded_once_more(served: list[int]) -> None:
    """By as much as they are rounded in the cache: logits are as far from float32's as those of keys turned at each token."""
    model, ids = model_of(METHODS["rerope"]), tokens(1, 60, seed=1)
    with torch.no_grad():
        exact = model(ids).logits[:, PREFIX:]
    half = copy.deepcopy(model).bfloat16()

    def error() -> float:
        cache = DynamicCache()
        said(half, ids[:, :PREFIX], cache)
        return float((steps(half, ids[:, PREFIX:], cache).float() - exact).square().mean().sqrt())

    got = error()
    assert served
    with room(-1):
        assert got <= 1.2 * error()
