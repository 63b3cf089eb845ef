"""Every method on pretended GPUs (`pretend`): logits and gradients as on a CPU, by which kernels, and what it asks for."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pretend
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from cases import CASES
from helpers import SCENARIOS as TEXTS
from helpers import close, crossed, expected, fresh, holds_for, spread, stock, tokens
from torch import Tensor
from transformers import DynamicCache

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.core.kernels import programs
from hf_longattn.evaluation.measures.heads import copying_heads
from hf_longattn.integration.caches import CACHE

pytestmark = pytest.mark.skipif(programs.triton is None, reason="triton is not installed")
TOLERANCE = 1e-4
#: Methods that show what the others show.
INNER = ("calibrated", "alibi", "infoscale", "cosscale", "adaptive_temperature", "attention_sink_learned", "rerope")
INNER += ("dual_chunk", "streaming", "rerope+infoscale+cosscale", "mapped+adaptive")
LENGTH, PAD = 24, 5


def prefill(m: Any, ids: Tensor, length: int = LENGTH) -> list[Tensor]:
    return [m(ids[:, :length], use_cache=False).logits]


def padded(m: Any, ids: Tensor) -> list[Tensor]:
    mask, positions = mask_of(ids[:, :LENGTH])
    return [m(ids[:, :LENGTH], attention_mask=mask, position_ids=positions, use_cache=False).logits[:, PAD:]]


def mask_of(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Padding at the left of the first text, and in the second one's midst."""
    mask = torch.ones(ids.shape, dtype=torch.int64)
    mask[0, :PAD], mask[1, 9:11] = 0, 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return mask.to(ids.device), positions.to(ids.device)


def packed(m: Any, ids: Tensor) -> list[Tensor]:
    positions = torch.cat([torch.arange(n) for n in (9, 1, LENGTH - 10)])[None]
    return [m(ids[:1, :LENGTH], position_ids=positions.to(ids.device), use_cache=False).logits]


def chunks(m: Any, ids: Tensor, sizes: tuple[int, ...] = (20, 2, 15, 16, 17, 40)) -> list[Tensor]:
    cache = DynamicCache(config=m.config)
    return [m(x, **{CACHE: cache}).logits for x in ids[:, : sum(sizes)].split(sizes, 1)]


def decoding(m: Any, ids: Tensor) -> list[Tensor]:
    return chunks(m, ids, (20, 1, 1, 1))


def generate(m: Any, ids: Tensor, **options: Any) -> list[Tensor]:
    options |= {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return list(m.generate(ids[:, :LENGTH], **options).logits)


def generate_padded(m: Any, ids: Tensor) -> list[Tensor]:
    return generate(m, ids, attention_mask=mask_of(ids[:, :LENGTH])[0])


def static_cache(m: Any, ids: Tensor) -> list[Tensor]:
    return generate(m, ids, cache_implementation="static", disable_compile=True)


def training(m: Any, ids: Tensor) -> list[Tensor]:
    with torch.enable_grad():
        m.train()
        out = m(ids[:, :LENGTH], labels=ids[:, :LENGTH], use_cache=False)
        parameters = [p for p in m.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(out.loss, parameters, allow_unused=True)
        m.eval()
    return [out.logits.detach(), *(g for g in gradients if g is not None)]


WAYS = (prefill, padded, packed, chunks, decoding, generate, generate_padded, static_cache, training)
SCENARIOS: dict[str, Callable[..., list[Tensor]]] = {way.__name__: way for way in WAYS}


DEVICES = {"cuda": pretend.device, "mps": pretend.mps}


@functools.cache
def moved(case: str, device: str = "cuda") -> Any:
    """A model on a device."""
    with DEVICES[device]():
        m = fresh("llama", CASES[case]).to(device)
        m.tie_weights()
        return m


@functools.cache
def by_cpu(case: str, scenario: str) -> list[Tensor]:
    with torch.no_grad():
        return SCENARIOS[scenario](fresh("llama", CASES[case]), tokens(2, 110))


#: What every method is tried in; INNER ones in all.
MOST = ("chunks", "generate_padded", "training")
TRIED = [(case, scenario) for case in CASES for scenario in SCENARIOS if case in INNER or scenario in MOST]


@pytest.mark.parametrize(("case", "scenario"), crossed(TRIED, spread(INNER, SCENARIOS, 6)))
def test_as_on_a_cpu(case: str, scenario: str) -> None:
    """In either mode; no layer waits for the device."""
    for mode in (torch.no_grad, torch.inference_mode)[: 1 + (scenario in ("prefill", "padded", "decoding", "static_cache"))]:
        with pretend.device() as device, mode():
            got = SCENARIOS[scenario](moved(case), tokens(2, 110).to("cuda"))
        assert all(x.device == pretend.CUDA for x in got)
        for n, (a, b) in enumerate(zip(got, by_cpu(case, scenario), strict=True)):
            close(a.cpu(), b, TOLERANCE, str(n))
        assert not of_layers(device.reads)


@pytest.mark.parametrize(
    ("case", "scenario"), crossed(itertools.product(CASES, SCENARIOS), spread(CASES, SCENARIOS, len(SCENARIOS)))
)
def test_on_apples_device(case: str, scenario: str) -> None:
    """It has no float64, and no fused kernel that gives a logsumexp."""
    with pretend.mps(), torch.no_grad():
        got = SCENARIOS[scenario](moved(case, "mps"), tokens(2, 110).to("mps"))
    assert all(x.device == pretend.MPS for x in got)
    for n, (a, b) in enumerate(zip(got, by_cpu(case, scenario), strict=True)):
        close(a.cpu(), b, TOLERANCE, str(n))


class Sent:
    """A model on a device, to callers on the host: what it is given is sent there, and its logits come back."""

    def __init__(self, m: Any, device: str) -> None:
        self.model, self.device, self.config = m, device, m.config

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self.model(*map(self._sent, args), **{name: self._sent(x) for name, x in kwargs.items()})
        out.logits = out.logits.cpu()
        return out

    def _sent(self, x: Any) -> Any:
        return x.to(self.device) if isinstance(x, Tensor) else x


#: The first token behind padding in a text's midst was refused: which way positions count shows in it alone.
SECOND_TURN = ("cuda", "llama", "second_turn_token_by_token")
#: A method for each family.
OF_FAMILY = {
    "llama": "rerope",
    "gpt2": "adaptive_temperature",
    "gemma3": "cosscale",
    "mistral": "calibrated",
    "qwen3": "alibi",
}
EACH = [(*pair, text) for pair in itertools.product(DEVICES, OF_FAMILY) for text in TEXTS if holds_for(text, pair[1])]


@pytest.mark.parametrize(("device", "family", "text"), crossed(EACH, [SECOND_TURN, *EACH[::17]]))
def test_texts_as_on_a_cpu(device: str, family: str, text: str) -> None:
    """Whole, in chunks, padded, packed, in turns of a chat: in all ways in which one text can reach a model."""
    config, ids = CASES[OF_FAMILY[family]], tokens()
    with DEVICES[device]():
        m = fresh(family, config).to(device)
        m.tie_weights()
        got = TEXTS[text](Sent(m, device), ids)  # type: ignore[arg-type]
    close(got, expected(family, config, ids), TOLERANCE)


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_what_is_measured(device: str) -> None:
    """Entropies, logits and outputs, padded and not; heads that copy; calibrated maps; attention weights."""
    m, ids, (mask, positions) = stock("llama", max_position_embeddings=2048), tokens(2, LENGTH), mask_of(tokens(2, LENGTH))

    def measured(device: str) -> list[Tensor]:
        m.to(device).tie_weights()
        out = [copying_heads(m, tokens(1, 1100).to(device))]
        calibrated = hf_longattn.calibrate(m, ids.to(device), "scale_invariant")
        for method in (calibrated, "rerope+adaptive_temperature:window=6", "infoscale:train_length=4"):
            hf_longattn.apply(m, method)
            with hf_longattn.capture(m) as seen:
                m(ids.to(device), attention_mask=mask.to(device), position_ids=positions.to(device))
            out += seen.result().values.values()
            out.append(m(ids.to(device), output_attentions=True).attentions[0].cpu())
        hf_longattn.remove(m)
        return out

    want = measured("cpu")
    with DEVICES[device]():
        got = measured(device)
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        close(a.float().nan_to_num(-1), b.float().nan_to_num(-1), 1e-3, str(n))


def of_layers(reads: dict[str, int]) -> dict[str, int]:
    """Those that any layer asks for again."""
    return {at: n for at, n in reads.items() if at.startswith("core/") and n}


preset = LongAttnConfig.preset
#: Kernels that a layer may launch for a decoded token beyond those of the unmodified model.
KERNELS = {
    "infoscale": (preset("infoscale", train_length=4), 4),
    "logn": (preset("logn", train_length=4), 4),
    "cosscale": (preset("cosscale"), 4),
    "scale_invariant": (preset("scale_invariant"), 8),
    "alibi": (preset("alibi"), 8),
    "adaptive_temperature": (preset("adaptive_temperature"), 4),
    "attention_sink": (preset("attention_sink"), 8),
    "windowed": (preset("windowed", window=6), 8),
    "streaming": (preset("streaming", window=6), 14),
    "rerope": (preset("rerope", window=6), 14),
    "leaky_rerope": (preset("leaky_rerope", window=6, stretch=2.0), 14),
    "self_extend": (preset("self_extend", window=6, group=2), 14),
    "dual_chunk": (preset("dual_chunk", chunk=6, local=2), 14),
    "rerope+infoscale": (preset("rerope+infoscale", window=6, train_length=7), 14),
    "scale_invariant+adaptive": (preset("scale_invariant+adaptive_temperature"), 4),
    "output_layer_norm": (preset("output_layer_norm"), 2),
}


#: Those of them that show what the others show.
FEW = ("infoscale", "cosscale", "scale_invariant", "adaptive_temperature", "streaming", "rerope+infoscale")


def of_a_token(config: LongAttnConfig | None, layers: int, holes: bool | None = None) -> tuple[int, int, int]:
    """Kernels of a decoded token in bfloat16, and what the package reads and copies for it.

    Args:
        holes: whether texts have padding in their midst; None: there is no mask.
    """
    m = stock("llama", num_hidden_layers=layers)
    if config is not None:
        hf_longattn.apply(m, config)
    ids, mask = tokens(2, 40), torch.ones(2, 40, dtype=torch.int64)
    mask[0, :PAD], mask[1, 9:11] = 0, 0 if holes else 1
    with pretend.device() as device, torch.no_grad():
        m.to("cuda", torch.bfloat16)
        cache = DynamicCache(config=m.config)
        for n, x in enumerate(ids.to("cuda").split((36, 1, 1, 1, 1), 1)):
            device.clear()
            own = mask[:, : 36 + n]
            positions = (own.cumsum(-1) - 1).clamp(min=0)[:, -x.shape[1] :].to("cuda")
            padding = {} if holes is None else {"attention_mask": own.to("cuda"), "position_ids": positions}
            m(x, **{CACHE: cache}, **padding)
    return device.kernels.total(), device.reads.package, device.copies.package


@functools.cache
def of_a_layer(config: LongAttnConfig | None) -> tuple[float, ...]:
    return tuple((b - a) / 2 for a, b in zip(of_a_token(config, 2), of_a_token(config, 4), strict=True))


@pytest.mark.parametrize("case", crossed(KERNELS, FEW[::3]))
def test_a_decoded_token(case: str) -> None:
    """No value is waited for without a mask, one with a mask."""
    config, _ = KERNELS[case]
    _, reads, copies = of_a_layer(config)
    assert reads == copies == 0
    assert of_a_token(config, 2)[1] == 0
    assert of_a_token(config, 2, holes=False)[1] <= 1
    assert of_a_token(config, 2, holes=True)[1] <= 1


@pytest.mark.parametrize(("method", "numbers"), [("attention_sink", ["logit"]), ("output_standardise", ["deviation", "mean"])])
def test_numbers_by_layer_and_head_are_sent_once(method: str, numbers: list[str]) -> None:
    """Not at every token, in each layer: the host would wait for the device."""

    def copies(layers: int) -> int:
        heads = stock("llama").config.num_attention_heads
        nest = tuple(tuple(1 + 0.1 * layer + 0.01 * head for head in range(heads)) for layer in range(layers))
        return of_a_token(preset(method, **dict.fromkeys(numbers, nest)), layers)[2]

    assert copies(1) == copies(3)


@pytest.mark.parametrize("case", ["alibi", "calibrated", "attention_sink", "normed"])
def test_a_captured_graph_copies_nothing_from_the_host(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the same call has run: a copy that the host waits for ends the capture."""
    m = stock("llama", num_hidden_layers=1)
    heads = m.config.num_attention_heads
    nest = (tuple(1 + 0.1 * head for head in range(heads)),)
    norm = preset("output_standardise", deviation=nest)
    config = {"calibrated": preset("scale_invariant", logit_variance=nest), "normed": norm}.get(case) or preset(case)
    with pretend.device() as device, torch.no_grad():
        hf_longattn.apply(m, config).to("cuda", torch.bfloat16)
        ids = tokens(1, 40).to("cuda")
        m(ids, use_cache=False)
        device.clear()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        m(ids, use_cache=False)
    assert not of_layers(device.reads)
    assert not [at for at in device.copies if at.startswith(("core/", "methods/"))]


def on_two(m: Any) -> Any:
    """A model whose layers behind the first one lie on the device, with accelerate's hooks that move what they get."""
    for layer in m.model.layers[1:]:
        hook = AlignDevicesHook(pretend.CUDA, io_same_device=True, skip_keys=m._skip_keys_device_placement)
        add_hook_to_module(layer.to("cuda"), hook)
    return m


#: Windows that all layers have, that some have, whose masks are as large as the others', and that some run without a method.
SPLIT = {
    "llama": KERNELS["rerope+infoscale"][0],
    "gemma3": preset("logn", train_length=30, layers="all"),
    "gemma2": preset("scale_invariant", layers="all"),
    "qwen2": preset("infoscale", train_length=30, layers=(0, 3)),
}


@pytest.mark.parametrize("family", SPLIT)
@torch.no_grad()
def test_layers_on_two_devices_share_their_masks(family: str) -> None:
    """Each layer elsewhere gets copies of its own of the masks: it reads none."""
    ids, positions, got = tokens(2, 40), torch.arange(40).expand(2, -1), []
    m = fresh(family, SPLIT[family])
    for here in (contextlib.nullcontext(pretend.Device()), pretend.device()):
        with here as device:
            cache = DynamicCache(config=m.config)
            m = on_two(m) if got else m
            parts = zip(ids.split((24, 14, 1, 1), 1), positions.split((24, 14, 1, 1), 1), strict=True)
            got.append([m(x, position_ids=p, **{CACHE: cache}).logits for x, p in parts])
    for a, b in zip(*got, strict=True):
        close(b, a, TOLERANCE)
    assert not device.reads.package


@pytest.mark.parametrize("family", ["llama", "nanochat"])
def test_frequencies_of_inference_mode(family: str) -> None:
    """A model that was moved in that mode: no pass reads their values, and writes to them are noticed all the same."""
    m, ids, cache = fresh(family, KERNELS["rerope"][0]), tokens(2, 30), DynamicCache()
    rotary = m.model.rotary_emb
    with pretend.device() as device, torch.inference_mode():
        m.to("cuda")
        rotary.inv_freq = rotary.inv_freq.clone()
        m(ids[:, :28].to("cuda"), **{CACHE: cache})
        device.clear()
        m(ids[:, 28:29].to("cuda"), **{CACHE: cache})
        assert not device.reads.package
        rotary.inv_freq.mul_(0.5)
        got = m(ids.to("cuda"), use_cache=False).logits.cpu()
    other = fresh(family, KERNELS["rerope"][0])
    other.model.rotary_emb.inv_freq.mul_(0.5)
    with torch.no_grad():
        close(got, other(ids, use_cache=False).logits, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["infoscale", "rerope"])
def test_a_static_cache(case: str) -> None:
    """It counts on the device: one read a pass."""
    with pretend.device() as device, torch.no_grad():
        m = hf_longattn.apply(stock("llama"), KERNELS[case][0]).to("cuda")
        device.clear()
        passes = len(static_cache(m, tokens(2, LENGTH).to("cuda")))
    assert device.reads.package <= passes


@pytest.mark.slow
@pytest.mark.parametrize("case", crossed(KERNELS, FEW))
def test_kernels_of_a_decoded_token(case: str) -> None:
    config, most = KERNELS[case]
    assert of_a_layer(config)[0] - of_a_layer(None)[0] <= most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "prompt", "training"),
    [
        ("infoscale", 1, 2),
        ("alibi", 0, 4),
        ("cosscale", 6, 24),
        ("attention_sink", 5, 8),
        ("output_layer_norm", 1, 2),
        ("long windows", 0, 5),
        ("long rerope", 4, 24),
        ("rerope+adaptive", 26, 100),
    ],
)
def test_kernels_of_a_layer(case: str, prompt: int, training: int) -> None:
    """Beyond those of the unmodified model: no output is copied, and no gradient that is all there is."""
    long = {"long windows": preset("windowed", window=80), "long rerope": preset("rerope", window=80)}
    long["rerope+adaptive"] = preset("rerope+adaptive_temperature", window=80)
    kernels = []
    for config in (None, long[case] if case in long else KERNELS[case][0]):
        for layers in (1, 2):
            m = stock("llama", num_hidden_layers=layers)
            m = m if config is None else hf_longattn.apply(m, config)
            with pretend.device() as device:
                m.to("cuda", torch.bfloat16)
                m.tie_weights()
                ids = tokens(1, 200).to("cuda")
                with torch.no_grad():
                    m(ids, use_cache=False)
                    device.clear()
                    m(ids, use_cache=False)
                kernels.append([device.kernels.total()])
                device.clear()
                m(ids, use_cache=False).logits.sum().backward()
                kernels[-1].append(device.kernels.total())
    for n, most in enumerate((prompt, training)):
        assert kernels[3][n] - kernels[2][n] - (kernels[1][n] - kernels[0][n]) <= most


@pytest.mark.parametrize("case", crossed(KERNELS, FEW[::3]))
def test_a_prompt(case: str) -> None:
    """Its positions are read at most; the largest tensor grows as the prompt does."""
    largest = []
    for length in (512, 1024, 2048):
        m = hf_longattn.apply(stock("llama", num_hidden_layers=1, max_position_embeddings=4096), KERNELS[case][0])
        with pretend.device() as device, torch.no_grad():
            m.to("cuda")
            device.clear()
            prefill(m, tokens(1, length).to("cuda"), length)
        assert device.reads.package <= 1
        largest.append(device.largest[0])
    assert 1.1 * largest[0] >= largest[1] / 2 >= largest[2] / 4 / 1.1


@pytest.mark.parametrize("case", crossed(KERNELS, FEW))
@pytest.mark.parametrize("holes", [False, True])
def test_a_prompt_under_a_mask(case: str, holes: bool) -> None:
    m, (mask, positions) = hf_longattn.apply(stock("llama"), KERNELS[case][0]), mask_of(tokens(2, LENGTH))
    mask[1] = mask[1] if holes else 1
    with pretend.device() as device, torch.no_grad():
        m.to("cuda")
        mask, positions = mask.to("cuda"), (mask.cumsum(-1) - 1).clamp(min=0).to("cuda")
        device.clear()
        m(tokens(2, LENGTH).to("cuda"), attention_mask=mask, position_ids=positions, use_cache=False)
    assert device.reads.package <= 2


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    crossed(
        [(64, torch.bfloat16), (256, torch.float32), (128, torch.bfloat16), (256, torch.bfloat16)],
        [(64, torch.bfloat16), (256, torch.float32)],
    ),
)
@pytest.mark.parametrize("case", crossed(KERNELS, FEW[::3]))
def test_kernels_are_a_gpus(case: str, head_dim: int, dtype: torch.dtype) -> None:
    """No step of a CPU's kernels is launched there."""
    m = hf_longattn.apply(stock("llama", num_hidden_layers=1, head_dim=head_dim), KERNELS[case][0])
    with pretend.device() as device, torch.no_grad():
        m.to("cuda", dtype)
        m.tie_weights()
        for scenario in (prefill, padded, packed, chunks, decoding, training):
            got = scenario(m, tokens(2, 110).to("cuda"))
            assert all(x.isfinite().all() for x in got)
    of_a_cpu = tuple(f"core/kernels/{name}" for name in ("til", "few_cpu", "visible_keys"))
    assert not [at for at in device.kernels if at.startswith(of_a_cpu)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_gpu_before_ampere(dtype: torch.dtype) -> None:
    """A T4 has no FlashAttention, no fused kernel for bfloat16, and none that shares key heads."""
    called = []
    for case in ("attention_sink", "infoscale"):
        m = hf_longattn.apply(stock("llama", num_hidden_layers=1), KERNELS[case][0])
        with pretend.device(capability=(7, 5)) as device, torch.no_grad():
            m.to("cuda", dtype)
            m.tie_weights()
            prefill(m, tokens(1, LENGTH).to("cuda"))
        called.append({at.split()[1].split(".")[0] for at in device.kernels if at.startswith("core/kernels/sdpa.py")})
    by_parts = {"clone", "_scaled_dot_product_efficient_attention"} if dtype == torch.float16 else set()
    assert called[0] == by_parts
    assert "clone" in called[1]  # which is sdpa itself


@pytest.mark.slow
@torch.no_grad()
def test_wrong_positions_are_told_a_call_later() -> None:
    """A decoded token is taken to continue its cache; what the device finds is read when it is there."""
    with pretend.device():
        m, ids, cache = moved("infoscale"), tokens(2, 30).to("cuda"), DynamicCache()
        m(ids[:, :20], **{CACHE: cache})
        for n, right in ((20, True), (21, True), (22, False)):
            positions = torch.full((2, 1), n if right else 3).to("cuda")
            m(ids[:, n : n + 1], position_ids=positions, **{CACHE: cache})
        with pytest.raises(ValueError, match="an earlier call did not continue where its KV cache ended"):
            m(ids[:, 23:24], **{CACHE: cache})
        m(ids[:, :20], use_cache=False)  # told once
