"""Tiny models, and the ways in which one text can reach them."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
import textwrap
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import closed_form
import pytest
import torch
import transformers
from cases import FAMILIES, VOCAB, WINDOW, model_config
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
    StaticCache,
)
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils import check_peft_version

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.integration.caches import CACHE

TOLERANCE = 1e-5  # of float32: 84 roundings, where every layer adds a few


def crossed(values: Iterable[Any], inner: Container[Any] | int) -> list[Any]:
    """Parameters of a test: those not in `inner` show what the others show; they run at night and for the area of a change.

    Args:
        inner: a number n for every n-th of them.
    """
    listed = list(values)
    chosen = listed[::inner] if isinstance(inner, int) else inner
    each = ((v if isinstance(v, tuple) else (v,), [] if v in chosen else [pytest.mark.crossed]) for v in listed)
    return [pytest.param(*parameters, marks=marks) for parameters, marks in each]


def spread(first: Iterable[Any], second: Iterable[Any], every: int) -> list[tuple[Any, Any]]:
    """Of all pairs each `every`-th along the diagonals: each value of one meets several of the other."""
    others = list(second)
    return [(a, b) for i, a in enumerate(first) for j, b in enumerate(others) if (i + j) % every == 0]


def close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE, what: str = "") -> None:
    """Compare within a share of the largest expected value, or of 1: what adds up is rounded by the size of its terms.

    `make margins` says how near every comparison comes, under each instruction set of a CPU.
    """
    values = expected.detach()[expected.isfinite()].double().abs()
    size = max(1.0, float(values.max())) if len(values) else 1.0
    torch.testing.assert_close(actual, expected, atol=tolerance * size, rtol=0.0, msg=lambda m: f"{what} {m}")


@torch.no_grad()
def logits(m: Any, ids: Tensor | None = None, **inputs: Any) -> Tensor:
    """What a model in eval mode says to `tokens()`, to other ids, or to inputs that hold theirs; without a cache."""
    text = {} if "input_ids" in inputs else {"input_ids": tokens() if ids is None else ids}
    return m.eval()(**text, use_cache=False, **inputs).logits


def disturbed(m: Any, seed: int = 5, only: str = "") -> Any:
    """A model after some training, so to say: noise on what is trained and has `only` in its name."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in m.named_parameters():
            if p.requires_grad and only in name:
                p += 0.3 * torch.randn(p.shape, generator=generator).to(p.dtype)
    return m


def python(code: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own, with what it printed."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def by_transformers(adapter: Path, auto: Any = AutoModelForCausalLM, **arguments: Any) -> Any:
    """An adapter's folder given to transformers; None where that release cannot load learned parameters, and says so."""
    try:
        return auto.from_pretrained(adapter, **arguments)
    except NotImplementedError as error:
        if transformers.__version__ >= "5.23" or "does not load the learned parameters of an adapter" not in str(error):
            raise
        return None


def needs_adapters_of_transformers() -> None:
    """Skip where transformers' own interface to adapters asks for a PEFT that is not here."""
    try:
        check_peft_version(min_version=MIN_PEFT_VERSION)
    except ValueError as error:
        pytest.skip(f"transformers {transformers.__version__}: {error}")


def build(name: str, arguments: Mapping[str, Any] | None = None, **changes: Any) -> Any:
    """A causal language model of a class of configs, with random weights; skips where transformers has none of that name."""
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"this transformers has no {name}")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**{**(arguments or {}), **changes})).eval()


def _random(family: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config(family, **changes)).eval()
    for module in model.modules():
        if getattr(module, "scaling", None) == 1.0 and hasattr(module, "q_norm"):
            module.q_norm.weight.data.mul_(0.35)  # logits of order one here too: Gemma 3n and 4 leave that to training
    return model


_base = functools.cache(_random)


def stock(family: str, **changes: Any) -> PreTrainedModel:
    """A fresh copy of the family's one random model, or one of a changed config, under transformers' own attention."""
    return _random(family, **changes) if changes else copy.deepcopy(_base(family))


@functools.lru_cache(32)  # each living model makes applying a method to another one a little slower
def model(family: str, config: LongAttnConfig, backend: str | None = None) -> PreTrainedModel:
    """The same weights under a method. Shared between tests: leave it as it is, or take `fresh`."""
    return hf_longattn.apply(stock(family), config.replace(backend=backend or config.backend))


def fresh(family: str, config: LongAttnConfig) -> PreTrainedModel:
    return copy.deepcopy(model(family, config))


SINKS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW, "num_local_experts": 2}


def with_sinks(name: str, **changes: Any) -> Any:
    """A tiny model of transformers whose softmax has learned sinks: in all layers (GptOss), in the sliding ones (MiMo)."""
    m = build(name, FAMILIES["llama"][1] | SINKS, **changes)
    for module in m.modules():
        if getattr(module, "sinks", None) is not None:
            torch.nn.init.constant_(module.sinks, 2.0)
    return m


def tokens(batch: int = 2, length: int = 24, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


@functools.cache
def _closed(family: str, config: LongAttnConfig) -> PreTrainedModel:
    return closed_form.attach(stock(family), config)


@torch.no_grad()
def expected(family: str, config: LongAttnConfig, ids: Tensor) -> Tensor:
    """The logits of one plain forward pass: by the closed form where there is one, else by the reference."""
    if closed_form.covers(config):
        return _closed(family, config)(ids, use_cache=False).logits
    return model(family, config, "reference")(ids, use_cache=False).logits


def write_gguf(m: PreTrainedModel, path: Path, quantised: bool = False) -> None:
    """The weights of a Llama or an LFM2 as llama.cpp keeps them, the matrices of its layers in 8 bit if asked for."""
    import gguf

    c, kind = m.config, m.config.model_type
    w, arch = gguf.GGUFWriter(path, kind), gguf.MODEL_ARCH[kind.upper()]
    w.add_block_count(c.num_hidden_layers)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_rope_freq_base(c.rope_parameters["rope_theta"])
    w.add_vocab_size(c.vocab_size)
    if kind == "llama":
        w.add_head_count_kv(c.num_key_value_heads)
        w.add_layer_norm_rms_eps(c.rms_norm_eps)
        w.add_rope_dimension_count(c.head_dim)
    else:
        w.add_head_count_kv([c.num_key_value_heads * (t == "full_attention") for t in c.layer_types])
        w.add_layer_norm_rms_eps(c.norm_eps)
        w.add_shortconv_l_cache(c.conv_L_cache)
        w.add_token_list([str(n) for n in range(c.vocab_size)])
    names = gguf.get_tensor_name_map(arch, c.num_hidden_layers)
    for name, x in m.state_dict().items():
        for part, heads in (("q_proj", c.num_attention_heads), ("k_proj", c.num_key_value_heads)):
            if part in name and kind == "llama":  # llama.cpp interleaves the halves of a rotation
                x = x.view(heads, 2, -1, x.shape[1]).transpose(1, 2).reshape(x.shape)
        if name == "lm_head.weight":
            continue
        array, packed = (
            (x.flatten(1) if x.dim() == 3 else x).contiguous().numpy(),
            None,
        )  # a convolution's kernel, of one channel
        if quantised and "_proj" in name:
            packed = gguf.GGMLQuantizationType.Q8_0
            array = gguf.quants.quantize(array, packed)
        w.add_tensor(names.get_name(name, try_suffixes=(".weight",)), array, raw_dtype=packed)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def rounded_alike(runs: Iterable[Callable[[], Tensor]]) -> list[Tensor]:
    """What runs give that write to fp8 caches: the first rounds, the others are given what came back from that.

    What is 1e-7 apart may be rounded 0.06 apart; so what goes into the rounding is compared here, and what comes of its
    results by the caller.
    """
    layer = transformers.cache_utils.Fp8QuantizedLayer
    update, rounded, out = layer.update, [], []  # type: ignore[var-annotated]

    def note(self: Any, *given: Tensor, **more: Any) -> Any:
        rounded.append((given, update(self, *given, **more)))
        return rounded[-1][1]

    for run in runs:
        with pytest.MonkeyPatch.context() as patch:
            before = iter(rounded)

            def repeat(self: Any, *given: Tensor, before: Any = before, **more: Any) -> Any:
                update(self, *given, **more)
                wanted, back = next(before)
                for a, b in zip(given, wanted, strict=True):
                    close(a, b, what="before it is rounded")
                return back

            patch.setattr(layer, "update", repeat if out else note)
            out.append(run())
    return out


Scenario = Callable[[PreTrainedModel, Tensor], Tensor]
#: Ways to compute the logits of a batch of equally long texts that must all agree with one plain forward pass.
SCENARIOS: dict[str, Scenario] = {}
#: Those that renumber nothing, so that they hold for learned positions too; the rest rely on relative positions.
RELATIVE_ONLY = {"left_padded_slots"}
#: Those in which cache indices differ from positions: transformers' own sliding windows count the former.
NO_WINDOWS = {"padded_inside", "interleaved", "interleaved_cached"}
NO_WINDOWS |= {"second_turn", "second_turn_static", "second_turn_token_by_token"}


def holds_for(name: str, family: str) -> bool:
    """Tell whether a scenario gives a family's logits of one plain pass."""
    sliding = "layer_types" in FAMILIES[family][1]
    return not (name in RELATIVE_ONLY and family == "gpt2") and not (name in NO_WINDOWS and sliding)


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = torch.no_grad()(function)
    return function


def feed(model: PreTrainedModel, ids: Tensor, chunks: list[int], cache: Any = None, **extra: Tensor) -> Tensor:
    """The logits of ids, fed in chunks through a cache; a 2-D mask and position_ids are cut as generate() does."""
    out, begin = [], 0
    for size in chunks:
        end = begin + size
        cut = {}
        if "attention_mask" in extra:
            cut["attention_mask"] = extra["attention_mask"][:, :end]
        if "position_ids" in extra:
            cut["position_ids"] = extra["position_ids"][:, begin:end]
        step = model(ids[:, begin:end], **{CACHE: cache}, use_cache=True, **cut)
        cache, begin = step.get(CACHE), end
        out.append(step.logits)
    assert begin == ids.shape[1]
    return torch.cat(out, 1)


def pieces(length: int) -> list[int]:
    """Irregular chunk sizes with sum length."""
    out, sizes = [], [5, 1, 9, 2, 4, 1, 3]
    while length:
        out.append(min(sizes[len(out) % len(sizes)], length))
        length -= out[-1]
    return out


def static(model: PreTrainedModel, ids: Tensor) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=ids.shape[1] + 13)


@scenario
def without_cache(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits


@scenario
def with_cache(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(ids, attention_mask=torch.ones_like(ids)).logits


@scenario
def dynamic_token_by_token(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return feed(model, ids, [1] * ids.shape[1])


@scenario
def dynamic_chunks(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return feed(model, ids, pieces(ids.shape[1]))


@scenario
def static_token_by_token(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return feed(model, ids, [1] * ids.shape[1], static(model, ids))


@scenario
def static_chunks(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return feed(model, ids, pieces(ids.shape[1]), static(model, ids))


def _left_padded(
    model: PreTrainedModel, ids: Tensor, positions: bool, how: Callable[[PreTrainedModel, Tensor, dict], Tensor]
) -> Tensor:
    """Row 0 as it is, behind 7 padding tokens, and row 1 unpadded in front of another text: a batch of two lengths."""
    pad, n = 7, ids.shape[1]
    filler = tokens(1, pad, seed=9)
    padded = torch.cat([torch.cat([filler, ids[:1]], 1), torch.cat([ids[1:2], filler], 1)])
    mask = torch.ones_like(padded)
    mask[0, :pad] = 0
    extra = {"attention_mask": mask}
    if positions:
        extra["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    out = how(model, padded, extra)
    return torch.stack([out[0, pad:], out[1, :n]])


@scenario
def left_padded(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return _left_padded(model, ids, True, lambda m, x, extra: m(x, use_cache=False, **extra).logits)


@scenario
def left_padded_slots(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return _left_padded(model, ids, False, lambda m, x, extra: m(x, **extra).logits)


@scenario
def left_padded_dynamic_chunks(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return _left_padded(model, ids, True, lambda m, x, extra: feed(m, x, pieces(x.shape[1]), **extra))


@scenario
def left_padded_static_chunks(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return _left_padded(model, ids, True, lambda m, x, extra: feed(m, x, pieces(x.shape[1]), static(m, x), **extra))


@scenario
def right_padded(model: PreTrainedModel, ids: Tensor) -> Tensor:
    padded = torch.cat([ids, tokens(ids.shape[0], 5, seed=9)], 1)
    mask = torch.ones_like(padded)
    mask[:, ids.shape[1] :] = 0
    return model(padded, attention_mask=mask).logits[:, : ids.shape[1]]


@scenario
def packed(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Both texts in one row, after and between others; positions start anew, and no cache may be in use."""
    n, between = ids.shape[1], tokens(1, 6, seed=9)
    row = torch.cat([between, ids[:1], between, ids[1:2]], 1)
    positions = torch.cat([torch.arange(k) for k in (6, n, 6, n)])[None]
    out = model(row, position_ids=positions, use_cache=False).logits[0]
    return torch.stack([out[6 : 6 + n], out[12 + n :]])


@scenario
def hole_in_the_padding(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """A 2-D mask of all ones but for a later, hidden token: no interval, so the dense carrier must serve."""
    padded = torch.cat([ids, tokens(ids.shape[0], 3, seed=9)], 1)
    mask = torch.ones_like(padded)
    mask[:, -2] = 0
    return model(padded, attention_mask=mask).logits[:, : ids.shape[1]]


def _holed(ids: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Two texts of which the first has 5 padding tokens inside and the second behind; and where their tokens are."""
    pad, n, filler = 5, ids.shape[1], tokens(1, 5, seed=9)
    padded = torch.cat([torch.cat([ids[:1, :11], filler, ids[:1, 11:]], 1), torch.cat([ids[1:2], filler], 1)])
    mask = torch.ones_like(padded)
    mask[0, 11 : 11 + pad] = mask[1, n:] = 0
    where = mask.nonzero()[:, 1].view(2, n)
    return padded, {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}, where


def _second_turn(model: PreTrainedModel, ids: Tensor, chunks: list[int], cache: Any = None) -> Tensor:
    """A chat whose first row ended its turn early, so that its part of the cache ends in padding."""
    padded, extra, where = _holed(ids)
    out = feed(model, padded, chunks, cache, **extra)
    return out.gather(1, where[..., None].expand(-1, -1, out.shape[-1]))


@scenario
def padded_inside(model: PreTrainedModel, ids: Tensor) -> Tensor:
    padded, extra, where = _holed(ids)
    out = model(padded, use_cache=False, **extra).logits
    return out.gather(1, where[..., None].expand(-1, -1, out.shape[-1]))


@scenario
def second_turn(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return _second_turn(model, ids, [16, ids.shape[1] - 11])


@scenario
def second_turn_static(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return _second_turn(model, ids, [16, ids.shape[1] - 11], StaticCache(config=model.config, max_cache_len=ids.shape[1] + 13))


@scenario
def second_turn_token_by_token(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return _second_turn(model, ids, [16, *[1] * (ids.shape[1] - 11)])


def _interleaved(model: PreTrainedModel, ids: Tensor, first: int) -> Tensor:
    """Both texts in one row, token by token in turn, told apart by a 4-D mask: positions go back, as in a tree of drafts."""
    row, length = ids[:2].T.reshape(1, -1), 2 * ids.shape[1]
    at = torch.arange(length)
    mask = ((at[:, None] >= at) & ((at[:, None] - at) % 2 == 0))[None, None]
    cache, out = None, []
    for begin, end in ((0, first), (first, length)):
        part = {"attention_mask": mask[:, :, begin:end, :end], "position_ids": (at // 2)[None, begin:end]}
        if begin < end:
            step = model(row[:, begin:end], **{CACHE: cache}, use_cache=first < length, **part)
            cache = step.get(CACHE)
            out.append(step.logits[0])
    return torch.cat(out).unflatten(0, (-1, 2)).transpose(0, 1)


@scenario
def interleaved(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return _interleaved(model, ids, 2 * ids.shape[1])


@scenario
def interleaved_cached(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return _interleaved(model, ids, 17)


# a model that sees pictures ------------------------------------------------------------------------------------------

IMAGE_TOKEN, TOKENS_PER_IMAGE = 90, 4


@functools.cache
def _multimodal() -> PreTrainedModel:
    """Gemma 3 with a SigLIP tower of one layer: a composite config, and image blocks that see themselves whole."""
    torch.manual_seed(0)
    text = model_config("gemma3").to_dict() | {"vocab_size": VOCAB}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 7, "vision_use_head": False}
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=TOKENS_PER_IMAGE,
        image_token_index=IMAGE_TOKEN,
        boi_token_index=91,
        eoi_token_index=92,
    )
    return Gemma3ForConditionalGeneration(config).eval()


def multimodal() -> PreTrainedModel:
    return copy.deepcopy(_multimodal())


def picture() -> dict[str, Tensor]:
    """A text with one picture in it, as the processor would hand it over."""
    image = torch.full((1, TOKENS_PER_IMAGE), IMAGE_TOKEN)
    text = tokens(1, 20).clamp(max=IMAGE_TOKEN - 1)
    ids = torch.cat([text[:, :6], image, text[:, 6:]], 1)
    pixels = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(4))
    return {"input_ids": ids, "token_type_ids": (ids == IMAGE_TOKEN).long(), "pixel_values": pixels}
