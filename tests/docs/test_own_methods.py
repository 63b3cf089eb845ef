"""docs/how-to/own-methods.md, done as it says, and what is refused of methods of one's own."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tiny
import torch
from helpers import close, stock, tokens
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, LlamaForCausalLM
from typer.testing import CliRunner

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.cli import app
from hf_longattn.core.kernels import triton
from hf_longattn.slots import registry
from hf_longattn.slots.base import KeyInterval, LengthTemperature, LogitMap, OutputNorm, Positions, Visibility, capped
from hf_longattn.slots.learned import HeadScale
from hf_longattn.slots.method import SLOTS, Method

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "own-methods.md"


def my_methods(first: int | None = None) -> str:
    """The file that the page writes, or its first blocks."""
    blocks = re.findall(r"^```python\n(# my_methods\.py.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return "\n\n".join(blocks[:first])


#: By the names of the page's methods, parameters under which they change a text of a few tokens.
EXAMPLES: dict[str, dict[str, Any]] = {
    "root_logn": {"train_length": 5, "scale": 1.3},
    "half_speed": {"window": 6},
    "first_and_last": {"window": 6},
    "unit_keys": {"scale": 2.0},
    "sharpen": {"start": 0.5},
    "log_decay": {"slope": ((0.1, 0.2, 0.3, 0.4), (0.5, 0.6, 0.7, 0.8)) * 2},
    "nothing": {"logit": 0.0},
    "unit_outputs": {},
    "learned_root": {"train_length": 5},
}


@pytest.fixture
def forgotten(own_registry: None) -> Iterator[None]:
    """What a test registers is gone after it."""
    known = [dict(x._global_mapping) for x in (AttentionInterface, AttentionMaskInterface)]
    yield
    for interface, before in zip((AttentionInterface, AttentionMaskInterface), known, strict=True):
        for name in interface._global_mapping.keys() - before.keys():
            del interface._global_mapping[name]


@pytest.fixture
def mine(forgotten: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The page's module, imported from a folder."""
    (tmp_path / "my_methods.py").write_text(my_methods())
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__("my_methods")
    sys.modules.pop("my_methods")


def test_the_page_has_an_example_for_each_slot(mine: Any) -> None:
    there = [kind for kind in registry._loaded.values() if kind.__module__ == "my_methods"]
    assert {kind.name for kind in there} == EXAMPLES.keys()
    assert {kind.slot for kind in there} == set(SLOTS)


@pytest.mark.filterwarnings("ignore::hf_longattn.UntrainedWarning")
@pytest.mark.parametrize("name", EXAMPLES)
@torch.no_grad()
def test_every_example_is_exact_and_saved(name: str, mine: Any, tmp_path: Path) -> None:
    ids, m = tokens(), stock("llama")
    hf_longattn.apply(m, name, **EXAMPLES[name])
    logits = m(ids).logits
    assert (logits - stock("llama")(ids).logits).abs().max() > 1e-3
    m.save_pretrained(tmp_path / "saved")
    close(logits, hf_longattn.update(m, backend="reference")(ids).logits)
    close(LlamaForCausalLM.from_pretrained(tmp_path / "saved")(ids).logits, logits)


@torch.no_grad()
def test_learned_parameters_start_as_their_constructor_says_and_are_saved(mine: Any, tmp_path: Path) -> None:
    stock("llama").save_pretrained(tmp_path / "plain")
    m = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", attn_implementation="learned_root:train_length=5")
    scales = [x for name, x in m.named_parameters() if name.endswith("longattn.temperature.scale")]
    assert len(scales) == m.config.num_hidden_layers
    assert all(torch.equal(x, torch.full_like(x, 1.05)) for x in scales)
    for x in scales:
        x.mul_(1.5)
    logits = m(tokens()).logits
    m.save_pretrained(tmp_path / "saved")
    close(LlamaForCausalLM.from_pretrained(tmp_path / "saved")(tokens()).logits, logits)


@pytest.mark.slow
def test_training_under_a_method_of_ones_own_says_what_to_import(
    forgotten: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_methods.py").write_text(my_methods())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    tiny.save(tmp_path / "model", trained=256)
    tiny.text(tmp_path / "book.txt", 4000)
    quick = "length=64 evaluation.tokens=64 evaluation.far=0 evaluation.compare=false trainer.max_steps=1"
    quick += " trainer.use_cpu=true trainer.eval_strategy=no trainer.disable_tqdm=true method=root_logn:clamp=false"
    words = f"train method_lora model=model data=book.txt output=out {quick} --import my_methods".split()
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (done.output, done.exception)
    assert "load it with: import hf_longattn, my_methods; AutoModelForCausalLM.from_pretrained('out')" in done.output
    card = (tmp_path / "out" / "README.md").read_text()
    assert "On the held-out end of book.txt, by length:" in card
    assert "import my_methods  # registers a method that is no part of hf_longattn\n" in card
    assert "my_methods is a module of the maker of this model: it must be importable" in card
    sys.modules.pop("my_methods")


@torch.no_grad()
def test_a_method_that_lives_outside(forgotten: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own: dict[str, Any] = {}
    (tmp_path / "my_methods.py").write_text(my_methods())
    monkeypatch.syspath_prepend(tmp_path)
    own = vars(__import__("my_methods"))
    ids, m = tokens(), stock("llama")
    assert hf_longattn.register(own["RootLogN"]) is own["RootLogN"]  # twice is once
    hf_longattn.apply(m, "root_logn", train_length=5, scale=1.3)
    n = torch.arange(1, ids.shape[1] + 1, dtype=torch.float64)
    factor = (1.3 * (n.log() / torch.tensor(5.0).log()).sqrt()).clamp(min=1)
    assert torch.allclose(hf_longattn.get_config(m).temperature.factor(n, 8), factor)  # type: ignore[union-attr]
    logits = m(ids).logits
    assert (logits - stock("llama")(ids).logits).abs().max() > 0.1
    close(logits, hf_longattn.update(m, backend="reference")(ids).logits)
    m.save_pretrained(tmp_path / "saved")
    close(LlamaForCausalLM.from_pretrained(tmp_path / "saved")(ids).logits, logits)
    hf_longattn.save(m, tmp_path / "shared", remote_code=True)
    card = (tmp_path / "shared" / "README.md").read_text()
    assert "my_methods is a module of the maker of this model" in card  # which the file of remote code does not import
    assert "it loads without the import of hf_longattn, too" in card
    both = stock("llama")
    both.set_attn_implementation("root_logn")
    assert hf_longattn.get_config(both).name == "root_logn"
    assert hf_longattn.get_config(hf_longattn.apply(both, "rerope+root_logn", window=7)).name == "rerope+root_logn"
    with pytest.raises(ValueError, match="scale must be a number, got 'high'"):
        own["RootLogN"](scale="high")
    sys.modules.pop("my_methods")


def test_a_checkpoint_of_a_method_that_is_not_registered_says_so(forgotten: None, tmp_path: Path) -> None:
    @hf_longattn.register
    @dataclass(frozen=True, kw_only=True)
    class Elsewhere(LengthTemperature):
        name: ClassVar[str] = "elsewhere"
        paper: ClassVar[str] = "none"

        def formula(self, n: torch.Tensor, head_dim: int, train_length: int) -> torch.Tensor:
            return n.log()

    hf_longattn.apply(stock("llama"), "elsewhere").save_pretrained(tmp_path)
    del registry._loaded["elsewhere"]
    for interface in (AttentionInterface, AttentionMaskInterface):
        for name in ("elsewhere", "hf_longattn.elsewhere"):
            interface._global_mapping.pop(name)
    with pytest.raises(ValueError, match=r"'elsewhere' is no method here\. If it is one of your own, import the module"):
        LlamaForCausalLM.from_pretrained(tmp_path)


def test_a_model_is_saved_after_a_cell_ran_twice(mine: Any, tmp_path: Path) -> None:
    """The class that the model runs is then not the one that its name means."""
    m = hf_longattn.apply(stock("llama"), "root_logn", **EXAMPLES["root_logn"])
    exec(compile(my_methods(1), "a cell", "exec", dont_inherit=True), {"__name__": "my_methods"})
    assert type(hf_longattn.get_config(m).temperature) is not registry.method_class("root_logn")
    m.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    close(again(tokens()).logits, m.eval()(tokens()).logits)


def test_what_cannot_be_registered_is_refused(forgotten: None) -> None:
    class Unfinished(LengthTemperature):
        name: ClassVar[str] = "unfinished"

    with pytest.raises(ValueError, match="Unfinished lacks formula"):
        hf_longattn.register(Unfinished)
    with pytest.raises(ValueError, match="is no method"):
        hf_longattn.register(dict)  # type: ignore[type-var]
    joined = type("Joined", (hf_longattn.methods.Alibi,), {"name": "a+b"})
    with pytest.raises(ValueError, match=re.escape("Joined.name is 'a+b'")):
        hf_longattn.register(joined)


def wrong(**changes: Any) -> type:
    """A method with that much wrong."""

    @dataclass(frozen=True, kw_only=True)
    class Wrong(LengthTemperature):
        name: ClassVar[str] = "wrong"
        paper: ClassVar[str] = "none"

        def formula(self, n: torch.Tensor, head_dim: int, train_length: int) -> torch.Tensor:
            return n.log()

    for name, value in changes.items():
        setattr(Wrong, name, value)
    return Wrong


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "a shape": ({"formula": lambda self, n, *_: n[None]}, r"it gives shape \(1, 6\), torch.float64, and not shape \(6,\)"),
    "a dtype": ({"formula": lambda self, n, *_: n.float()}, r"torch.float32, and not shape \(6,\), torch.float64 \(formula\)"),
    "no tensor": ({"formula": lambda *_: 1.0}, "fails on tiny tensors: it gives no tensor, float"),
    "unfinished": (
        {"formula": lambda *_: (_ for _ in ()).throw(NotImplementedError)},
        "fails on tiny tensors: NotImplementedError",
    ),
    "a fault": ({"formula": lambda self, n, *_: n @ n[:2]}, "fails on tiny tensors: inconsistent tensor size"),
    "NaN": ({"formula": lambda self, n, *_: (8 - n).sqrt()}, r"it gives NaN or infinity \(formula\)"),
    "infinity": ({"formula": lambda self, n, *_: 1 / n.log()}, r"it gives NaN or infinity \(formula\)"),
    "all rows at once": ({"formula": lambda self, n, *_: n.max().expand_as(n)}, r"other rows \(formula\), so that caches"),
    "heads that differ": (
        {"module": lambda self, facts: HeadScale(facts.num_heads)},
        "a parameter for each head, and head_dependent is False",
    ),
    "no name": ({"name": None}, "Wrong has no name"),
    "by_head": ({"by_head": ("slope",)}, r"Wrong.by_head is \('slope',\), .*; it has: clamp, stack, train_length"),
    "no slot": ({"slot": "colour"}, "Wrong.slot is 'colour', and a LengthTemperature fills 'temperature': leave slot out"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_method_is_found_as_it_is_registered(forgotten: None, mistake: str) -> None:
    changes, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message) as refused:
        hf_longattn.register(wrong(**changes))
    assert "test_own_methods.wrong.<locals>.Wrong" in str(refused.value)
    assert "wrong" not in registry.list_methods()


def mapped(bias: Any, base: type = LogitMap, **parameters: Any) -> type:
    """A logit map of such a bias by distance, with these parameters."""

    def tables(self: Any, heads: int, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        t = torch.arange(length, dtype=torch.float64, device=device)
        return torch.ones_like(t)[None], bias(self, t).reshape(-1, length)

    hints = dict.fromkeys(parameters, Any)
    made = {"name": "mapped", "paper": "none", "tables": tables, "__annotations__": hints, "__module__": __name__}
    return dataclass(frozen=True, kw_only=True)(type("Mapped", (base,), made | parameters))


def test_a_mistake_in_a_logit_map_is_found_as_it_is_registered(forgotten: None) -> None:
    def linear(self: Any, t: torch.Tensor) -> torch.Tensor:
        return -t

    for wrong_map, message in [
        (mapped(lambda _, t: (100 - t).sqrt()), r"NaN or infinity \(tables, bias\)"),
        (mapped(lambda _, t: torch.outer(torch.arange(4.0).double(), t)), "a row for each head, and head_dependent is False"),
        (mapped(linear, base=Method), "is no method: .* What fits none of them has no slot"),
        (mapped(linear, paper="none"), "paper would be a parameter: annotate it as ClassVar"),
        (mapped(linear, sink="first"), "has a parameter sink, which is a word of every config"),
        (mapped(linear, words=print), "words must be numbers, words or nests of them, got builtin"),
    ]:
        with pytest.raises(ValueError, match=message):
            hf_longattn.register(wrong_map)


def test_parameters_are_tried_as_a_method_comes_into_a_model(forgotten: None) -> None:
    kind = hf_longattn.register(mapped(lambda self, t: torch.as_tensor(self.slope).double().reshape(-1, 1) * t, slope=0.5))
    assert hf_longattn.get_config(hf_longattn.apply(stock("llama"), "mapped", slope=2.0)).name == "mapped"
    message = r"mapped with these parameters fails on tiny tensors: it gives shape \(16, 4096\)"
    with pytest.raises(ValueError, match=message):  # it has no by_head
        hf_longattn.apply(stock("llama"), "mapped", slope=[[1, 2, 3, 4]] * 4)
    with pytest.raises(ValueError, match=r"gives 16 numbers for 4 heads"):
        hf_longattn.attention(*(torch.ones(1, 4, 3, 8),) * 3, LongAttnConfig(logit_map=kind(slope=[[1, 2, 3, 4]] * 4)))


def test_a_remap_reaches_as_far_as_its_distances_do(mine: Any) -> None:
    with pytest.raises(ValueError, match=r"reaches 960 tokens, not 1024: beyond that .* Lower window"):
        hf_longattn.extend(stock("llama"), to=1024, method="half_speed", window=64)
    hf_longattn.extend(stock("llama"), to=960, method="half_speed", window=64)
    assert shifted()().reach(2048) is None
    assert shifted()().reach(1024) == 1024


def test_a_method_that_is_not_registered_is_refused(forgotten: None) -> None:
    config = LongAttnConfig(logit_map=mapped(lambda _, t: -t)())
    with pytest.raises(ValueError, match=r"Mapped is not the method registered as 'mapped', .*register it first"):
        hf_longattn.apply(stock("llama"), config)


@torch.no_grad()
def test_infinite_bias_hides_keys_in_every_kernel(forgotten: None) -> None:
    kind = hf_longattn.register(mapped(lambda _, t: torch.where((t > 60) & (t < 130), -torch.inf, -(0.4 * t).sin())))
    call = [torch.randn(1, 2, 300, 8, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    exact = hf_longattn.attention(*call, LongAttnConfig(logit_map=kind()), backend="reference")
    for backend in ("tiled", *["triton"] * (triton.triton is not None)):
        close(hf_longattn.attention(*call, LongAttnConfig(logit_map=kind()), backend=backend), exact)


@torch.no_grad()
def test_the_reference_gives_a_norm_its_constants(forgotten: None) -> None:
    @hf_longattn.register
    @dataclass(frozen=True, kw_only=True)
    class Scaled(OutputNorm):
        name: ClassVar[str] = "scaled"
        paper: ClassVar[str] = "none"

        def constants(self, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (like.new_full((), 0.5),)

        def normalise(self, output: torch.Tensor, affine: Any, half: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return output * half

    m = hf_longattn.apply(stock("llama"), "scaled")
    logits = m(tokens()).logits
    close(hf_longattn.update(m, backend="reference")(tokens()).logits, logits)


def shifted(first: int = 1, far: float = 0.0, window: int = 1024) -> type:
    """Distances beyond the window are those to it; its intervals begin elsewhere, or show others."""

    @dataclass(frozen=True, kw_only=True)
    class Shifted(Positions):
        name: ClassVar[str] = "shifted"
        paper: ClassVar[str] = "none"

        def distance(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            return (i - j).double().clamp(max=window)

        def intervals(self, i: torch.Tensor) -> list[KeyInterval]:
            beyond = capped(i - window, window)
            return [KeyInterval(first=i - window + first), replace(beyond, key=lambda j: torch.zeros_like(j).double() + far)]

    return Shifted


def hiding(sees: int, window: int = 300) -> type:
    """Sees so many of the last keys, and hides all but `window`."""

    @dataclass(frozen=True, kw_only=True)
    class Hiding(Visibility):
        name: ClassVar[str] = "hiding"
        paper: ClassVar[str] = "none"

        def visible(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            return i - j < window

        def intervals(self, i: torch.Tensor) -> list[KeyInterval]:
            return [KeyInterval(first=i - sees + 1)]

    return Hiding


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (shifted(first=2), "of the query at 1023 and the key at 0 no interval holds the pair, .* leaves a gap"),
        (shifted(first=0), "of the query at 1024 and the key at 0 two intervals hold the pair, .* must be disjoint"),
        (
            shifted(far=0.5),
            r"distance\(\) is 1024, and its interval, intervals\(\)\[1\], shows query\(i\) - key\(j\) = 1023.5",
        ),
        (shifted(far=float("nan")), "shows .* = nan"),
        (hiding(299), "no interval holds the pair"),
        (hiding(301), r"an interval holds the pair, which visible\(\) hides"),
    ],
)
def test_bands_that_contradict_the_method_are_refused(forgotten: None, method: type, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf_longattn.register(method)
    for right in (shifted(), hiding(300)):
        assert hf_longattn.register(right) is right


@pytest.mark.parametrize("name", sorted(registry.METHODS))
def test_the_packages_own_methods_pass_the_trial(name: str) -> None:
    kind = type(registry.method(name))
    assert hf_longattn.register(kind) is kind


def test_parameters_that_would_be_lost_or_cannot_be_saved_are_refused(forgotten: None) -> None:
    class Plain(wrong()):  # type: ignore[misc]
        name: ClassVar[str] = "plain"
        scale: float = 2.0

    with pytest.raises(ValueError, match=r"Plain is no dataclass, so scale would be no parameter: decorate it"):
        hf_longattn.register(Plain)
    bare = dataclass(frozen=True, kw_only=True)(
        type("Bare", (wrong(),), {"__annotations__": {"scale": float}, "__module__": __name__, "name": "bare"})
    )
    with pytest.raises(ValueError, match=r"Bare\(\) cannot be made: .*'scale'"):
        hf_longattn.register(bare)


@pytest.fixture
def installed(forgotten: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that brings methods by entry points: one that is well, one that is not there, one whose name is taken."""
    (tmp_path / "brings_methods.py").write_text(my_methods(1))
    about = tmp_path / "brings_methods-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: brings_methods\nVersion: 1.0\n")
    lines = ["root_logn = brings_methods:RootLogN", "gone = brings_methods:Gone", "rerope = brings_methods:RootLogN"]
    (about / "entry_points.txt").write_text("\n".join([f"[{registry.GROUP}]", *lines]))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_elsewhere", None)
    yield tmp_path
    sys.modules.pop("brings_methods", None)


def test_an_installed_package_brings_methods(installed: Path) -> None:
    with pytest.warns(UserWarning, match="RootLogN is left out: there is a method called 'rerope' already"):
        assert {"root_logn", "gone"} <= set(registry.list_methods())
    assert "brings_methods" not in sys.modules  # until it is asked for
    config = hf_longattn.get_config(hf_longattn.apply(stock("llama"), "rerope+root_logn", train_length=5))
    assert config.name == "rerope+root_logn"
    with pytest.raises(
        ValueError, match=r"'gone', brings_methods:Gone of an installed package, cannot be used: .*no attribute"
    ):
        hf_longattn.apply(stock("llama"), "gone")
