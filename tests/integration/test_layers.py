"""Models that are cut, copied and joined: which of their modules attend, as which layer, and what is saved of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import model_config
from helpers import SCENARIOS, close, crossed, disturbed, logits, multimodal, stock, tokens
from tiny_configs import class_of, tiny
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaModel,
    MoonshineForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutput

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.core.attend import attend
from hf_longattn.integration import dispatch
from hf_longattn.integration.model import running
from hf_longattn.integration.state import state_of

pytestmark = pytest.mark.filterwarnings("ignore::hf_longattn.UntrainedWarning")
preset = LongAttnConfig.preset
REMAP, MAP = preset("rerope", window=7), preset("scale_invariant", tau=3.0)
LEARNED = preset("logn", train_length=5, learned=True)
BY_LAYER = preset("rerope", window=7, layers=[1, 3])


def of(m: Any) -> list[Any]:
    """The decoder layers of a tiny model."""
    return list(m.model.layers)


def laid(m: Any, layers: list[Any], renumbered: bool = True) -> Any:
    """A model with these layers."""
    m.model.layers = nn.ModuleList(layers)
    m.config.num_hidden_layers = m.model.config.num_hidden_layers = len(layers)
    if getattr(m.config, "layer_types", None):
        m.config.layer_types = ["full_attention"] * len(layers)
    for number, layer in enumerate(layers if renumbered else ()):
        layer.self_attn.layer_idx = number
    return m


def deeper(m: Any) -> Any:
    """One layer twice, as depth up-scaling does it."""
    layers = of(m)
    return laid(m, [*layers[:2], copy.deepcopy(layers[1]), *layers[2:]])


def deeper_at_the_front(m: Any) -> Any:
    return laid(m, [copy.deepcopy(of(m)[0]), *of(m)])


def in_place(m: Any) -> Any:
    """The same without another list."""
    m.model.layers.insert(1, copy.deepcopy(of(m)[0]))
    return laid(m, of(m))


def dropped(m: Any) -> Any:
    return laid(m, [x for i, x in enumerate(of(m)) if i != 1])


def without_the_last(m: Any) -> Any:
    return laid(m, of(m)[:-1])


def dropped_only(m: Any) -> Any:
    """The numbers stay."""
    return laid(m, [x for i, x in enumerate(of(m)) if i != 1], renumbered=False)


def swapped(m: Any) -> Any:
    first, *others, last = of(m)
    return laid(m, [last, *others, first])


def with_one_of_another(m: Any) -> Any:
    """A layer that ran another method."""
    other = disturbed(hf_longattn.apply(stock("llama"), "alibi"))
    return laid(m, [*of(m)[:1], of(other)[1], *of(m)[1:]])


def with_a_plain_one(m: Any) -> Any:
    return laid(m, [*of(m)[:1], of(disturbed(stock("llama")))[1], *of(m)[1:]])


CUTS: dict[str, Callable[[Any], Any]] = {
    f.__name__: f
    for f in (
        deeper,
        deeper_at_the_front,
        in_place,
        dropped,
        without_the_last,
        dropped_only,
        swapped,
        with_one_of_another,
        with_a_plain_one,
    )
}
CHANGES: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda m: m,
    "called": lambda m: [logits(m), m][1],
    "updated": lambda m: hf_longattn.update(m, window=5) if hf_longattn.get_config(m).positions else m,
    "another": lambda m: hf_longattn.apply(m, "scale_invariant", tau=2.0),
    "removed": hf_longattn.remove,
    "copied": copy.deepcopy,
}


def reloaded(m: Any, folder: Path) -> Any:
    m.save_pretrained(folder)
    return type(m).from_pretrained(folder).eval()


def same(one: Any, other: Any) -> None:
    ids = tokens()
    assert running(one) == running(other)
    close(logits(one), logits(other))
    with torch.no_grad():
        for name in ("dynamic_chunks", "left_padded_dynamic_chunks"):
            close(SCENARIOS[name](one, ids), SCENARIOS[name](other, ids))


@pytest.mark.parametrize(
    ("config", "cut", "change"), crossed([(c, x, y) for c in (REMAP, LEARNED) for x in CUTS for y in CHANGES], 11)
)
def test_a_cut_model_runs_what_it_saves(config: LongAttnConfig, cut: str, change: str, tmp_path: Path) -> None:
    m = CUTS[cut](disturbed(hf_longattn.apply(stock("llama"), config), only="longattn"))
    m = CHANGES[change](m)
    if cut == "dropped_only":  # of such numbers transformers' own cache knows nothing
        close(logits(m), logits(reloaded(m, tmp_path)))
    else:
        same(m, reloaded(m, tmp_path))


@pytest.mark.parametrize("cut", CUTS)
def test_a_cut_model_gets_a_method_in_all_its_layers(cut: str, tmp_path: Path) -> None:
    m = hf_longattn.apply(CUTS[cut](stock("llama")), REMAP)
    close(logits(m), logits(reloaded(m, tmp_path)))
    assert len({what for _, what, _ in hf_longattn.describe(m).rows}) == 1
    close(logits(hf_longattn.remove(m)), logits(reloaded(m, tmp_path)))
    assert all("longattn" not in key for x in m.modules() for key in vars(x))


def test_layers_that_stay_as_they_were_are_planned_once() -> None:
    m = hf_longattn.apply(stock("llama"), REMAP)
    logits(m)
    planned = state_of(m).arrangement
    logits(m)
    assert state_of(m).arrangement is planned
    deeper(m)
    logits(m)
    assert state_of(m).arrangement is not planned


def test_layers_of_one_method_share_what_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    m, prepared = hf_longattn.apply(stock("llama"), REMAP), []
    monkeypatch.setattr(dispatch, "attend", lambda call: prepared.append(call) or attend(call))
    logits(m)
    assert (len(prepared), len(of(m))) == (1, 4)


@pytest.mark.parametrize("cut", list(CUTS)[:-2])
def test_what_layers_do_by_number_is_not_guessed(cut: str, tmp_path: Path) -> None:
    """Neither run nor saved, until somebody says which layers."""
    m = CUTS[cut](hf_longattn.apply(stock("llama"), BY_LAYER))
    ways: list[Callable[[], Any]] = [
        lambda: logits(m),
        lambda: m.save_pretrained(tmp_path),
        lambda: hf_longattn.update(m, window=5),
    ]
    for way in ways:
        with pytest.raises(ValueError, match=r"rerope .* not the same in all layers.*hf_longattn\.apply\(model"):
            way()
    if cut in ("dropped_only",):
        with pytest.raises(ValueError, match="number"):
            hf_longattn.apply(m, BY_LAYER.replace(layers=[0, 2]))
    else:
        hf_longattn.apply(m, BY_LAYER.replace(layers=[0, 2]))
        same(m, reloaded(m, tmp_path))
    hf_longattn.remove(m)
    assert running(m) is None


def test_layers_of_another_model_that_lives_are_not_changed_with_it() -> None:
    main = hf_longattn.apply(stock("llama"), REMAP)
    want, draft = logits(main), laid(stock("llama"), of(main)[:2], renumbered=False)
    for way in (lambda: hf_longattn.apply(draft, MAP), lambda: hf_longattn.remove(draft), lambda: draft.save_pretrained("")):
        with pytest.raises(ValueError, match=r"layers .* are also those of .*LlamaForCausalLM.*deepcopy"):
            way()
    assert hf_longattn.get_config(draft) == hf_longattn.get_config(main)
    assert torch.equal(logits(main), want)


def test_a_draft_with_a_config_that_names_the_method() -> None:
    main = hf_longattn.apply(stock("llama"), REMAP)
    config = copy.deepcopy(main.config)
    config.num_hidden_layers = 2
    draft = AutoModelForCausalLM.from_config(config)
    want, own = logits(main), of(draft)
    laid(draft, of(main)[:2], renumbered=False)
    with pytest.raises(ValueError, match=r"layers .* are also those of .*deepcopy"):
        logits(draft)
    assert torch.equal(logits(main), want)
    laid(draft, copy.deepcopy(of(main)[:2]))
    close(logits(draft), logits(laid(draft, own[:0] + of(draft))))


@pytest.mark.slow
@pytest.mark.parametrize("take", [copy.deepcopy, lambda layer: layer], ids=["copied", "moved"])
def test_a_layer_with_a_method_in_a_model_without_one(take: Callable[[Any], Any], tmp_path: Path) -> None:
    other, m = hf_longattn.apply(stock("llama"), REMAP), stock("llama")
    want = logits(laid(stock("llama"), [*of(m)[:1], of(stock("llama"))[1], *of(m)[1:]]))
    laid(m, [*of(m)[:1], take(of(other)[1]), *of(m)[1:]])
    laid(other, of(other)[2:])
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, :4] = 0
    for padding in (None, mask):  # transformers' sdpa gets no mask, or one that could be a user's own
        with pytest.raises(ValueError, match="out of a model under rerope, by a model that runs no method"):
            logits(m, attention_mask=padding)
    with pytest.raises(ValueError, match=r"its layers \[1\] came from a model under rerope"):
        m.save_pretrained(tmp_path)
    close(logits(hf_longattn.remove(copy.deepcopy(m))), want)
    same(hf_longattn.apply(m, MAP), reloaded(m, tmp_path))


def head(config: Any, body: Any) -> Any:
    """A classifier made of a config, with somebody's body in the place of its own."""
    config = copy.deepcopy(config)
    config.num_labels = 2
    m = LlamaForSequenceClassification(config).eval()
    m.model = body
    return m


def remapped() -> Any:
    return hf_longattn.apply(stock("llama"), REMAP)


HEADS: dict[str, Callable[[], Any]] = {
    "body alone": lambda: head(stock("llama").config, remapped().model),
    "learned": lambda: head(
        stock("llama").config, disturbed(hf_longattn.apply(stock("llama"), LEARNED), only="longattn").model
    ),
    "extended": lambda: head(stock("llama").config, hf_longattn.extend(stock("llama"), to=2048).model),
    "both, differently": lambda: head(hf_longattn.apply(stock("llama"), "alibi").config, remapped().model),
    "the whole": lambda: hf_longattn.apply(head(stock("llama").config, stock("llama").model), MAP),
    "the whole anew": lambda: hf_longattn.apply(head(remapped().config, remapped().model), MAP),
    "by name": lambda: named(head(stock("llama").config, remapped().model), "alibi"),
    "taken out": lambda: hf_longattn.remove(head(stock("llama").config, hf_longattn.extend(stock("llama"), to=2048).model)),
    "switched": lambda: named(head(stock("llama").config, remapped().model), "sdpa"),
    "cut too": lambda: deeper(head(stock("llama").config, remapped().model)),
}


def named(m: Any, name: str) -> Any:
    m.set_attn_implementation(name)
    return m


@pytest.mark.parametrize("way", HEADS)
def test_a_body_put_under_another_head_is_saved_with_what_it_runs(way: str, tmp_path: Path) -> None:
    m = HEADS[way]()
    want, length = logits(m), m.model.config.max_position_embeddings
    again = reloaded(m, tmp_path)
    close(logits(again), want)
    assert running(again) == running(m)
    assert again.config.max_position_embeddings == length
    assert torch.equal(logits(m), want)


def test_a_head_s_config_that_says_what_its_body_does_not_do_is_not_saved(tmp_path: Path) -> None:
    m = head(remapped().config, stock("llama").model)
    with pytest.raises(ValueError, match=r"runs 'sdpa', and its config is that of a model under rerope.*remove\(model\)"):
        m.save_pretrained(tmp_path)
    want = logits(m)
    assert torch.equal(logits(reloaded(hf_longattn.remove(m), tmp_path)), want)
    turned = hf_longattn.apply(stock("llama", rope_parameters={"rope_type": "default", "rope_theta": 77.0}), REMAP)
    with pytest.raises(ValueError, match="cannot be saved: its config, LlamaConfig, has another rope_parameters"):
        head(stock("llama").config, turned.model).save_pretrained(tmp_path)


@pytest.mark.slow
def test_a_language_model_put_into_one_with_pictures(tmp_path: Path) -> None:
    m: Any = multimodal()
    text = type(m.model.language_model)(copy.deepcopy(m.config.text_config)).eval()
    m.model.language_model = hf_longattn.apply(text, REMAP)
    close(logits(reloaded(m, tmp_path)), logits(m))
    close(logits(reloaded(hf_longattn.apply(m, MAP), tmp_path)), logits(m))
    assert running(reloaded(hf_longattn.remove(m), tmp_path)) is None


class Scored(PreTrainedModel):
    """A user's own: a value head, by a config of the body's type, whose body has a copy of it."""

    config_class: Any = LlamaConfig
    base_model_prefix = "backbone"
    _supports_sdpa = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.backbone = LlamaModel(copy.deepcopy(config))
        self.value = nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(self, input_ids: Any, **more: Any) -> Any:
        return CausalLMOutput(logits=self.value(self.backbone(input_ids, **more)[0]))


class OfItsOwn(PreTrainedConfig):
    model_type = "of_its_own"

    def __init__(self, body: dict[str, Any] | None = None, **more: Any) -> None:
        super().__init__(**more)
        self.body = body or {}


class Odd(Scored):
    """A user's own, whose config has no place for a method."""

    config_class = OfItsOwn

    def __init__(self, config: Any) -> None:
        super(Scored, self).__init__(config)
        self.backbone = LlamaModel(LlamaConfig(**config.body))
        self.value = nn.Linear(self.backbone.config.hidden_size, 1)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.embed_tokens


@pytest.mark.slow
def test_value_heads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    m = hf_longattn.apply(Scored(stock("llama").config), REMAP)
    close(logits(reloaded(m, tmp_path)), logits(m))
    m = Scored(stock("llama").config)
    m.backbone = remapped().model
    close(logits(reloaded(m, tmp_path)), logits(m))
    odd = hf_longattn.apply(Odd(OfItsOwn(body=stock("llama").config.to_dict())), REMAP)
    with pytest.raises(ValueError, match="its config, OfItsOwn, cannot say that rerope runs in the LlamaConfig"):
        odd.save_pretrained(tmp_path)


@torch.no_grad()
def test_a_text_under_a_head_that_wants_more_than_text() -> None:
    """How it rotates is verified on the innermost model, which reads text alone; InstructBLIP's head wants a picture too."""
    config = tiny(CONFIG_MAPPING["instructblip"])
    config.text_config = model_config("llama")
    config.use_decoder_only_language_model = True
    torch.manual_seed(0)
    m = class_of(config)._from_config(config).eval()
    text = copy.deepcopy(m.language_model)
    assert hf_longattn.describe(hf_longattn.apply(m, REMAP)).config is not None
    close(logits(m.language_model), logits(hf_longattn.apply(text, REMAP)), 0)


def test_a_model_that_reads_no_tokens() -> None:
    """Its class names no embeddings: a temperature goes in, and how it rotates cannot be seen."""
    m = pytest.importorskip("transformers.models.timesfm2_5").TimesFm2_5ModelForPrediction
    m = m._from_config(tiny(CONFIG_MAPPING["timesfm2_5"])).eval()
    with pytest.raises(ValueError, match=r"cannot be verified, .* its class names no embeddings of tokens"):
        hf_longattn.apply(m, REMAP)
    assert running(hf_longattn.apply(m, LEARNED.replace(learned=False))) is not None


@torch.no_grad()
def test_a_module_that_says_is_causal_false_where_it_has_a_mask() -> None:
    """Moonshine's decoder: for sdpa, which takes one of the two."""
    torch.manual_seed(0)
    m = MoonshineForConditionalGeneration._from_config(tiny(CONFIG_MAPPING["moonshine"])).eval()
    given = {"input_values": torch.randn(1, 3000), "decoder_input_ids": tokens(1, 9)}
    plain = m(**given).logits
    close(hf_longattn.apply(m, "logn", train_length=9)(**given).logits, plain)
    fast = hf_longattn.apply(m, "logn", train_length=4, clamp=False)(**given).logits
    assert (fast - plain).abs().max() > 1e-4
    close(hf_longattn.update(m, backend="reference")(**given).logits, fast)


@torch.no_grad()
def test_attention_without_a_number_that_is_not_causal_is_left_alone() -> None:
    """What maps pictures to text in Kosmos 2.5."""
    m = hf_longattn.apply(stock("llama"), "rerope")
    other = stock("llama")
    other.model.mapper = copy.deepcopy(other.model.layers[0].self_attn)
    other.model.mapper.is_causal, other.model.mapper.layer_idx = False, None
    assert torch.equal(hf_longattn.apply(other, "rerope")(tokens()).logits, m(tokens()).logits)


def test_advice_that_helps() -> None:
    """A method of far keys has nothing to do in windows: to put it there is refused, and so not advised."""
    m = stock("mistral", sliding_window=8)
    with pytest.raises(ValueError, match="have a sliding window; unset the window"):
        hf_longattn.apply(m, REMAP)
    with pytest.raises(ValueError, match=r"have a sliding window; pass longattn=\{.layers.: .all.\}"):
        hf_longattn.apply(m, "logn")
    hf_longattn.apply(m, "logn", layers="all")
