"""Learned parameters: there before the weights load, no-ops at first, saved, trained, wrapped by PEFT, and given back."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import accelerate
import pytest
import torch
from cases import HEAD_DIM, HEADS, LAYERS, model_config
from helpers import close, crossed, disturbed, logits, stock, tokens
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.integration.dispatch import attention_forward
from hf_longattn.integration.masks import layout_mask
from hf_longattn.integration.offload import held
from hf_longattn.methods.cosscale import CosScale
from hf_longattn.slots.base import LengthTemperature
from hf_longattn.slots.learned import make_parts, tensors_of
from hf_longattn.slots.method import ModelFacts
from hf_longattn.slots.registry import TRIAL

FAMILIES = ("llama", "gemma3", "gpt2")
LEARNED: dict[str, tuple[str, dict[str, Any]]] = {
    "logn": ("logn", {"train_length": 5, "learned": True}),
    "norm": ("output_layer_norm", {"deviation": 0.4}),
    "sink": ("attention_sink", {"logit": 1.5, "learned": True}),
    "both": ("logn+output_layer_norm", {"train_length": 5, "learned": True, "deviation": 0.4}),
}
NAMES = {
    "logn": {"temperature.weight": HEADS},
    "sink": {"sink.bias": HEADS},
    "norm": {"output_norm.weight": HEADS * HEAD_DIM, "output_norm.bias": HEADS * HEAD_DIM},
}
NAMES["both"] = NAMES["logn"] | NAMES["norm"]
#: Where accelerate keeps the weights of a tiny Llama or Gemma.
PLACES: dict[str, Any] = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu", "model.rotary_emb": "cpu"}
PLACES |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(LAYERS)}
EVERY = [(family, case) for family in FAMILIES for case in LEARNED]


def learned(m: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in m.named_parameters() if ".longattn." in name}


def names(m: Any, case: str) -> dict[str, tuple[int, ...]]:
    """What the state dict must hold: the parts of every full-attention layer."""
    types = getattr(m.config, "layer_types", None) or ["full_attention"] * LAYERS
    stem = "transformer.h.{}.attn" if m.config.model_type == "gpt2" else "model.layers.{}.self_attn"
    full = [stem.format(i) for i, kind in enumerate(types) if kind == "full_attention"]
    return {f"{layer}.longattn.{name}": (size,) for layer in full for name, size in NAMES[case].items()}


def check(m: Any, case: str, dtype: torch.dtype = torch.float32) -> None:
    """The right parameters, with the values that they start at."""
    found = learned(m)
    assert {n: tuple(p.shape) for n, p in found.items()} == names(m, case)
    for name, p in found.items():
        assert p.dtype == dtype
        assert p.device.type == "cpu"
        assert p.requires_grad
        assert (p == (0.0 if name.endswith("bias") else 1.0)).all()


# before the weights load ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", crossed(["float32", "bfloat16", "device_map", "slots_written_out"], ["float32"]))
@pytest.mark.parametrize(("family", "case"), EVERY)
def test_loading_a_base(family: str, case: str, how: str, bases: dict[str, Path]) -> None:
    name, parameters = LEARNED[case]
    options: dict[str, Any] = {"attn_implementation": name, "longattn": parameters}
    if how == "slots_written_out":
        options["longattn"] = LongAttnConfig.preset(name, **parameters).to_dict()
    if how == "bfloat16":
        options["dtype"] = torch.bfloat16
    if how == "device_map":
        options["device_map"] = "cpu"
    m, info = AutoModelForCausalLM.from_pretrained(bases[family], output_loading_info=True, **options)
    check(m, case, options.get("dtype", torch.float32))
    assert set(info["missing_keys"]) == set(names(m, case))
    assert not info["unexpected_keys"]
    if how != "bfloat16":
        close(logits(m), logits(hf_longattn.apply(stock(family), name, **parameters)), 1e-6)


@pytest.mark.parametrize(("family", "case"), EVERY)
def test_building(family: str, case: str) -> None:
    name, parameters = LEARNED[case]
    config = model_config(family)
    config.longattn = LongAttnConfig.preset(name, **parameters)
    check(AutoModelForCausalLM.from_config(config, attn_implementation="longattn"), case)
    config._attn_implementation = "longattn"
    check(type(stock(family))(config), case)
    check(hf_longattn.apply(stock(family).bfloat16(), name, **parameters), case, torch.bfloat16)
    check(hf_longattn.apply(stock(family), name, **parameters), case)


# at first ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_learned_logn_starts_as_the_unlearned(family: str, bases: dict[str, Path]) -> None:
    m = AutoModelForCausalLM.from_pretrained(
        bases[family], attn_implementation="logn", longattn={"train_length": 5, "learned": True}
    )
    want = logits(hf_longattn.apply(stock(family), "logn", train_length=5))
    assert torch.equal(logits(m), want)
    assert (logits(disturbed(m, only=".longattn.")) - want).abs().max() > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_output_layer_norm_starts_as_standardise(family: str) -> None:
    m = hf_longattn.apply(stock(family), "output_layer_norm", deviation=0.4)
    want = logits(hf_longattn.apply(stock(family), "output_standardise", deviation=0.4))
    assert torch.equal(logits(m), want)
    assert (logits(disturbed(m, only=".longattn.")) - want).abs().max() > 1e-2


# saved and trained ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "case"), EVERY)
def test_save_and_reload(family: str, case: str, tmp_path: Path) -> None:
    name, parameters = LEARNED[case]
    m = disturbed(hf_longattn.apply(stock(family), name, **parameters), only=".longattn.")
    m.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert torch.equal(logits(loaded), logits(m))
    assert learned(loaded).keys() == names(m, case).keys()


@pytest.mark.parametrize(("family", "case"), EVERY)
def test_every_learned_parameter_gets_its_gradient(family: str, case: str) -> None:
    """And it is the right one, by finite differences (wide ones: the models' own norms round to float32)."""
    name, parameters = LEARNED[case]
    m, ids = disturbed(hf_longattn.apply(stock(family).double(), name, **parameters), only=".longattn."), tokens()
    m(ids).logits.sin().mean().backward()
    for what, p in learned(m).items():
        assert p.grad is not None, what
        assert ((p.grad != 0) & p.grad.isfinite()).all(), what
        step, (before, slope) = 1e-2, (p.data.clone(), p.grad.flatten()[1])
        losses = []
        for sign in (1, -1):
            p.data.flatten()[1] += sign * step
            with torch.no_grad():
                losses.append(m(ids).logits.sin().mean())
            p.data.copy_(before)
        torch.testing.assert_close((losses[0] - losses[1]) / (2 * step), slope, rtol=0.01, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["output_layer_norm", "logn:learned=true", "attention_sink:learned=true"])
def test_they_train_though_the_method_came_under_inference_mode(method: str) -> None:
    m = stock("llama")
    with torch.inference_mode():
        hf_longattn.apply(m, method, train_length=4)
    assert not any(p.is_inference() for p in m.parameters())
    m(tokens()).logits.sin().sum().backward()
    torch.optim.SGD([p for n, p in m.named_parameters() if "longattn" in n], 0.1).step()


def test_they_train_when_compiled() -> None:
    name, parameters = LEARNED["both"]
    m, ids = disturbed(hf_longattn.apply(stock("llama"), name, **parameters), only=".longattn."), tokens()
    m(ids, use_cache=False).logits.sin().mean().backward()
    want = {n: p.grad.clone() for n, p in learned(m).items() if p.grad is not None}
    m.zero_grad()
    torch._dynamo.reset()
    torch.compile(m, fullgraph=True, backend="aot_eager")(ids, use_cache=False).logits.sin().mean().backward()
    assert want.keys() == names(m, "both").keys()
    for n, p in learned(m).items():
        close(p.grad, want[n], 1e-6)


def test_quantised_weights_lend_no_dtype() -> None:
    m = stock("llama")
    for layer in m.model.layers:
        layer.self_attn.q_proj.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    check(hf_longattn.apply(m, "logn", train_length=5, learned=True), "logn")


def test_clamped_learned_logn_has_a_gradient_below_the_trained_length() -> None:
    """With clamp it is the length that is held, not the factor: a text shorter than train_length trains the parameter."""
    m, ids = hf_longattn.apply(stock("llama"), "logn", train_length=500, learned=True), tokens()
    m(ids, labels=ids).loss.backward()
    assert all((p.grad != 0).all() for p in learned(m).values())


# PEFT -------------------------------------------------------------------------------------------------------------------


def adapter(m: Any) -> Any:
    peft = pytest.importorskip("peft")
    target = "c_attn" if m.config.model_type == "gpt2" else "q_proj"
    config = peft.LoraConfig(
        target_modules=[target], modules_to_save=["longattn"], init_lora_weights=False, fan_in_fan_out=target == "c_attn"
    )
    return peft.get_peft_model(m, config)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_lora_saves_them(family: str, bases: dict[str, Path], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    name, parameters = LEARNED["both"]
    adapted, ids = adapter(hf_longattn.apply(stock(family), name, **parameters)), tokens()
    trained = {n: p for n, p in learned(adapted).items() if p.requires_grad}
    assert trained
    assert all("modules_to_save" in n for n in trained)
    optimizer = torch.optim.SGD(trained.values(), lr=0.5)
    adapted(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert all(bool((p != p.detach().round()).any()) for p in trained.values())  # none is where it started
    want = logits(adapted)
    with adapted.disable_adapter():
        close(logits(adapted), logits(stock(family)), 1e-6)
    assert (want - logits(hf_longattn.apply(stock(family), name, **parameters))).abs().max() > 1e-2

    assert hf_longattn.apply(adapted, name, **parameters) is adapted  # again: nothing changes
    assert torch.equal(logits(adapted), want)

    adapted.save_pretrained(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(bases[family], attn_implementation=name, longattn=parameters)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    close(logits(loaded), want, 1e-6)
    close(logits(copy.deepcopy(loaded).merge_and_unload()), want)


# removed, applied again -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_remove_warns_only_if_something_was_trained(family: str) -> None:
    name, parameters = LEARNED["both"]
    plain, m = logits(stock(family)), stock(family)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_longattn.remove(hf_longattn.apply(m, name, **parameters))
    assert not learned(m)
    disturbed(hf_longattn.apply(m, name, **parameters), only=".longattn.")
    with pytest.warns(UserWarning, match="dropping the trained parameters"):
        hf_longattn.remove(m)
    assert not learned(m)
    assert torch.equal(logits(m), plain)


def test_apply_again_keeps_what_was_trained() -> None:
    m = disturbed(hf_longattn.apply(stock("llama"), "logn", train_length=5, learned=True), only=".longattn.")
    before = {n: p.detach().clone() for n, p in learned(m).items()}
    hf_longattn.apply(m, "logn+output_layer_norm", train_length=7, learned=True)
    after = learned(m)
    assert all(torch.equal(after[n], p) for n, p in before.items())
    assert {n: tuple(p.shape) for n, p in after.items()} == names(m, "both")
    hf_longattn.update(m, train_length=6)
    assert all(torch.equal(learned(m)[n], p) for n, p in before.items())
    with pytest.warns(UserWarning, match=r"dropping .*temperature\.weight"):
        hf_longattn.apply(m, "output_layer_norm")
    assert {n: tuple(p.shape) for n, p in learned(m).items()} == names(m, "norm")


def test_set_attn_implementation_adds_them() -> None:
    m = stock("llama")
    m.config.longattn = {"train_length": 5, "learned": True}
    m.set_attn_implementation("logn")
    check(m, "logn")


# heads on other devices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        *LEARNED.values(),
        ("alibi", {}),
        ("output_standardise", {}),
        ("scale_invariant", {"logit_mean": [[0.1] * HEADS] * LAYERS}),
    ],
)
def test_heads_cannot_be_split(name: str, parameters: dict[str, Any]) -> None:
    """As tensor parallelism would: the registered function gets half of the heads."""
    m = hf_longattn.apply(stock("llama"), name, **parameters)
    half = [torch.randn(1, h, 6, HEAD_DIM) for h in (HEADS // 2, 1, 1)]
    mask = layout_mask(1, 6, 6, config=m.config)
    with pytest.raises(NotImplementedError, match="tensor parallelism"):
        attention_forward(m.model.layers[0].self_attn, *half, mask, position_ids=torch.arange(6)[None])


def test_learned_sinks_of_heads_that_nobody_tells_are_refused() -> None:
    m = hf_longattn.apply(stock("llama"), "infoscale", train_length=4)
    half, mask = [torch.randn(1, h, 6, HEAD_DIM) for h in (HEADS // 2, 1, 1)], layout_mask(1, 6, 6, config=m.config)
    with pytest.raises(NotImplementedError, match="tensor parallelism"):
        attention_forward(
            m.model.layers[0].self_attn, *half, mask, position_ids=torch.arange(6)[None], s_aux=torch.zeros(HEADS)
        )


@pytest.mark.parametrize("method", ["infoscale+scale_invariant:train_length=4", "rerope:window=2"])
def test_other_methods_can_be_split(method: str) -> None:
    """And a layer may be called outside of any pass."""
    m = hf_longattn.apply(stock("llama"), method)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, h, 6, HEAD_DIM) for h in (HEADS, 2, 2))
    mask, module = layout_mask(1, 6, 6, config=m.config), m.model.layers[0].self_attn
    parts = [(query, key, value), *((query[:, 2 * i : 2 * i + 2], key[:, i : i + 1], value[:, i : i + 1]) for i in (0, 1))]
    whole, *halves = (attention_forward(module, *part, mask, position_ids=torch.arange(6)[None])[0] for part in parts)
    close(torch.cat(halves, 2), whole, 1e-6)


# parameters of one's own -------------------------------------------------------------------------------------------------


class Curve(nn.Module):
    """A learned factor by a little network, with values of its own at the start, in parameters of any name, and buffers."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.inner = nn.Linear(heads, heads)  # a model would give its weight another start
        nn.init.normal_(self.inner.weight, 0.5, 0.1, generator=torch.Generator().manual_seed(3))
        self.slope = nn.Parameter(torch.linspace(0.1, 0.4, heads))
        self.register_buffer("shift", torch.linspace(1.0, 2.0, heads))
        self.register_buffer("unsaved", torch.linspace(0.0, 0.5, heads), persistent=False)
        self.norm = nn.LayerNorm(heads)
        nn.init.constant_(self.norm.weight, 0.3)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.inner.bias, 0.25)

    def forward(self, factor: Tensor, own: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
        by_head = self.norm(self.inner(self.slope)) * self.slope + self.shift + self.unsaved
        return factor * own(by_head).to(factor.dtype)[:, None]


@pytest.fixture
def bent(own_registry: None) -> type[Any]:

    @dataclass(frozen=True, kw_only=True)
    class Bent(LengthTemperature):
        name: ClassVar[str] = "bent"
        paper: ClassVar[str] = "of our own"

        def formula(self, n: Tensor, head_dim: int, train_length: int) -> Tensor:
            return torch.log1p(n)

        @property
        def head_dependent(self) -> bool:
            return True

        def module(self, facts: ModelFacts) -> nn.Module:
            return Curve(facts.num_heads)

    return hf_longattn.register(Bent)


def values(m: nn.Module) -> dict[str, Tensor]:
    return {f"{n}.{k}": x for n, part in m.named_modules() if isinstance(part, Curve) for k, x in tensors_of(part)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::hf_longattn.UntrainedWarning")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_parameters_of_one_s_own_start_as_their_constructor_says(family: str, bent: type[Any], tmp_path: Path) -> None:
    """Whichever way the model is built and loaded; and saved they are loaded again."""
    stock(family).save_pretrained(tmp_path / "base")
    want = {k: x.detach() for k, x in tensors_of(Curve(HEADS))}
    load = functools.partial(AutoModelForCausalLM.from_pretrained, tmp_path / "base", attn_implementation="bent")
    made = {
        "applied": hf_longattn.apply(stock(family), "bent"),
        "loaded": load(),
        "in half": load(dtype=torch.bfloat16),
        "from a config": AutoModelForCausalLM.from_config(model_config(family), attn_implementation="bent"),
        "offloaded after": hf_longattn.apply(accelerate.cpu_offload(stock(family), "cpu"), "bent"),
        "offloaded before": accelerate.cpu_offload(hf_longattn.apply(stock(family), "bent"), "cpu"),
        "on disk": load(device_map=PLACES, offload_folder=str(tmp_path / "offload")),
    }
    for way, m in made.items():
        found = values(m)
        assert len(found) >= len(want)
        for name, x in found.items():
            own = name.partition("temperature.")[2]
            content = held(m, name) if x.is_meta else x
            assert content is not None, (way, name)
            close(content.float(), want[own], 0.01 if way == "in half" else 0.0, f"{way}, {name}")
    for way in ("loaded", "offloaded after", "on disk"):
        close(logits(made[way]), logits(made["applied"]), 1e-6, way)
    m = disturbed(made["loaded"], only=".longattn.")
    m.save_pretrained(tmp_path / "trained")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "trained")), logits(m))
    with pytest.warns(UserWarning, match="dropping the trained parameters temperature.slope, temperature.inner.weight"):
        hf_longattn.remove(m)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_longattn.remove(made["applied"])


@pytest.mark.filterwarnings("ignore::hf_longattn.UntrainedWarning")
def test_parameters_of_a_class_that_is_defined_anew(bent: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a cell of a notebook that runs twice: the values stay, what is made of them is new."""
    m = disturbed(hf_longattn.apply(stock("llama"), "bent"), only=".longattn.")
    before = {k: x.clone() for k, x in values(m).items()}
    plain = logits(stock("llama"))
    anew = type("Curve", (Curve,), {"forward": lambda self, factor, own=None: 0 * factor + 1, "__module__": Curve.__module__})
    monkeypatch.setitem(globals(), "Curve", anew)
    hf_longattn.apply(m, "bent")
    assert before.keys() == values(m).keys()
    assert all(torch.equal(x, before[k]) for k, x in values(m).items() if "unsaved" not in k)
    assert type(m.model.layers[0].self_attn.longattn.temperature) is anew
    close(logits(m), plain)  # a factor of 1


@pytest.mark.filterwarnings("ignore::hf_longattn.UntrainedWarning")
def test_parameters_of_one_s_own_in_adapters(bent: type[Any], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    m = disturbed(peft.get_peft_model(hf_longattn.apply(stock("llama"), "bent"), config))
    m.save_pretrained(tmp_path)
    close(logits(peft.PeftModel.from_pretrained(stock("llama"), tmp_path)), logits(m), 1e-6)


class Shapeless(nn.Module):
    """From what it is given to one number."""

    def forward(self, x: Tensor, own: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
        return x.sum()


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "no module": (lambda: torch.ones(3), "must be a torch.nn.Module, got Tensor"),
    "raises": (lambda: nn.Linear(3), "cannot be made for a tiny model"),
    "another shape": (
        Shapeless,
        r"it gives shape \(\), torch.float64, and not shape \(1, 4, 6\), torch.float64 \(its module\)",
    ),
    "without own": (nn.Identity, "unexpected keyword argument 'own'"),
    "no shape": (lambda: nn.LazyLinear(3), "whose shape is not known"),
    "PEFT's names": (lambda: nn.ParameterDict({"lora_scale": torch.ones(3)}), "'lora_scale', and transformers or PEFT read"),
    "weight norm": (lambda: torch.nn.utils.weight_norm(nn.Linear(2, 2)), "read 'weight_g' in a name as something else"),
    "whole numbers": (
        lambda: nn.ParameterList([nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)]),
        "cannot be learned",
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_modules_that_would_not_work_are_refused(mistake: str, bent: type[Any]) -> None:
    make, message = MISTAKES[mistake]
    wrong = type("Wrong", (bent,), {"name": "wrong", "module": lambda self, facts: make()})
    with pytest.raises(ValueError, match=message):
        hf_longattn.register(dataclass(frozen=True, kw_only=True)(wrong))


def test_a_module_that_its_slot_never_calls_is_refused(own_registry: None) -> None:
    """It would be trained and saved, and stay what it was."""

    class Learned(CosScale):
        name: ClassVar[str] = "never_called"

        def module(self, facts: ModelFacts) -> nn.Module:
            return nn.Linear(2, 2)

    method = dataclass(frozen=True, kw_only=True)(Learned)
    with pytest.raises(ValueError, match=r"Learned\.module\(\) would never be called, and learn nothing"):
        hf_longattn.register(method)
    with pytest.raises(ValueError, match="never_called: its module would never be called"):
        make_parts([method(scale=2.0)], TRIAL)


class Packed(nn.Module):
    """A linear map that keeps its weights in buffers, as GPTQ's and AWQ's do."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("qweight", linear.weight.detach().view(torch.int32))
        self.register_buffer("scales", torch.ones(1, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.qweight.view(torch.float32).T.to(x.dtype) * self.scales


@pytest.mark.parametrize("case", LEARNED)
def test_beside_weights_that_are_buffers(case: str) -> None:
    name, parameters = LEARNED[case]
    m = stock("llama")
    for layer in m.model.layers:
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, part, Packed(getattr(layer.self_attn, part), torch.float32))
    half = copy.deepcopy(m).to(torch.bfloat16)
    check(hf_longattn.apply(m, name, **parameters), case)
    close(logits(m), logits(hf_longattn.apply(stock("llama"), name, **parameters)))
    check(hf_longattn.apply(half, name, **parameters), case, torch.bfloat16)
    assert all(torch.equal(x, m.get_buffer(key)) for key, x in half.named_buffers() if "qweight" in key)


# on a model that accelerate has offloaded ---------------------------------------------------------------------------------

#: How weights get away: all or some of them, hooks on the modules that have parameters or on those around.
AWAY: dict[str, Callable[[Any, Path], Any]] = {
    "cpu": lambda m, folder: accelerate.cpu_offload(m, "cpu"),
    "cpu, buffers too": lambda m, folder: accelerate.cpu_offload(m, "cpu", offload_buffers=True),
    "cpu, attention whole": lambda m, folder: accelerate.cpu_offload(m, "cpu", preload_module_classes=["LlamaAttention"]),
    "cpu, layers whole": lambda m, folder: accelerate.cpu_offload(m, "cpu", preload_module_classes=["LlamaDecoderLayer"]),
    "disk": lambda m, folder: accelerate.disk_offload(m, folder, "cpu"),
    "some on disk": lambda m, folder: accelerate.dispatch_model(m, PLACES, offload_dir=folder),
}
EVERYWHERE = crossed([(way, case) for way in AWAY for case in LEARNED], [(way, "both") for way in AWAY])


@pytest.mark.parametrize(("way", "case"), EVERYWHERE)
def test_a_model_that_was_offloaded_takes_learned_parts(way: str, case: str, tmp_path: Path) -> None:
    name, parameters = LEARNED[case]
    m = AWAY[way](stock("llama").eval(), tmp_path)
    plain = logits(m)
    hf_longattn.apply(m, name, **parameters)
    trained = disturbed(hf_longattn.apply(stock("llama"), name, **parameters), only=".longattn.")
    close(logits(m), logits(hf_longattn.apply(stock("llama"), name, **parameters)), 1e-6)
    for path, p in learned(trained).items():  # as if it had been trained there
        with torch.no_grad():
            held(m, path).copy_(p)
    close(logits(m), logits(trained), 1e-6)
    hf_longattn.apply(m, name, **parameters)  # keeps them
    close(logits(m), logits(trained), 1e-6)
    back = copy.deepcopy(m)
    accelerate.hooks.remove_hook_from_submodules(back)
    assert not any(p.is_meta for p in back.parameters())
    close(logits(back), logits(trained), 1e-6)
    with pytest.warns(UserWarning, match="dropping the trained parameters"):
        hf_longattn.remove(m)
    close(logits(m), plain, 0.0)


@pytest.mark.parametrize(("way", "case"), EVERYWHERE)
def test_learned_parts_are_offloaded_with_their_model(way: str, case: str, tmp_path: Path) -> None:
    name, parameters = LEARNED[case]
    m = disturbed(hf_longattn.apply(stock("llama"), name, **parameters), only=".longattn.")
    want = logits(m)
    close(logits(AWAY[way](m, tmp_path)), want, 1e-6)
    with pytest.warns(UserWarning, match="dropping the trained parameters"):
        hf_longattn.remove(m)
    close(logits(m), logits(stock("llama")), 0.0)


@pytest.mark.parametrize("case", LEARNED)
@pytest.mark.parametrize("how", ["with the method", "a checkpoint of ours", "the method afterwards"])
def test_loading_offloaded(how: str, case: str, bases: dict[str, Path], tmp_path: Path) -> None:
    """What no checkpoint holds starts as ever, also where its layer lies on disk; and all of it can be saved."""
    name, parameters = LEARNED[case]
    m = hf_longattn.apply(stock("llama"), name, **parameters)
    away: dict[str, Any] = {"device_map": PLACES, "offload_folder": tmp_path / "away"}
    if how == "a checkpoint of ours":
        disturbed(m, only=".longattn.").save_pretrained(tmp_path / "ours")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", **away)
    elif how == "with the method":
        away |= {"attn_implementation": name, "longattn": parameters}
        again = AutoModelForCausalLM.from_pretrained(bases["llama"], **away)
    else:
        again = hf_longattn.apply(AutoModelForCausalLM.from_pretrained(bases["llama"], **away), name, **parameters)
    close(logits(again), logits(m), 1e-6)
    again.save_pretrained(tmp_path / "saved")
    close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), logits(m), 1e-6)
    hf_longattn.save(again, tmp_path / "with a card")
    close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "with a card")), logits(m), 1e-6)


def test_an_offloaded_model_is_calibrated_warned_of_and_not_saved_in_pieces(bases: dict[str, Path], tmp_path: Path) -> None:
    def run(m: Any) -> Tensor:
        hf_longattn.apply(m, hf_longattn.calibrate(m, [tokens()], "scale_invariant").replace(strength=0.5))
        return logits(hf_longattn.update(m, strength=0.75))

    m = accelerate.cpu_offload(AutoModelForCausalLM.from_pretrained(bases["llama"]), "cpu")
    close(run(m), run(stock("llama")), 1e-6)
    with pytest.raises(ValueError, match="remove_hook_from_submodules"):
        hf_longattn.save(m, tmp_path / "out")
    with pytest.raises(ValueError, match="remove_hook_from_submodules"):
        m.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.warns(hf_longattn.UntrainedWarning):
        hf_longattn.apply(m, "cosscale")
