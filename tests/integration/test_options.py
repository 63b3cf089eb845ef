"""Options of generation, caches and training that no other file has, one method of each slot: exact by logits, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cases import CASES, FAMILIES, LAYERS, model_config
from helpers import build, close, crossed, expected, feed, model, rounded_alike, stock, tokens
from tiny_configs import families, tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast, QuantizedCache, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.integration.caches import CACHE

#: A method of each slot.
SLOTS: dict[str, LongAttnConfig] = {
    "positions": LongAttnConfig.preset("rerope", window=7),
    "score": LongAttnConfig.preset("cosscale", scale=5.0),
    "temperature": LongAttnConfig.preset("infoscale", train_length=4),
    "logit_map": LongAttnConfig.preset("scale_invariant", tau=2.0),
    "visibility": LongAttnConfig.preset("streaming", window=7, sinks=2),
    "sink": LongAttnConfig.preset("attention_sink", logit=1.0),
    "output_norm": LongAttnConfig.preset("output_standardise", deviation=0.3),
}
NEW, PAD = 6, 4


# generate() ---------------------------------------------------------------------------------------------------------------


def left_padded(ids: Tensor) -> dict[str, Any]:
    mask = torch.ones_like(ids)
    mask[0, :PAD] = 0
    return {"attention_mask": mask}


def embedded(ids: Tensor) -> dict[str, Any]:
    return {"inputs_embeds": stock("llama").get_input_embeddings()(ids)}


def draft(ids: Tensor) -> dict[str, Any]:
    return {"assistant_model": stock("llama")}


def words(seed: int, size: int) -> PreTrainedTokenizerFast:
    """A word for each token, by another number under each seed."""
    order = torch.randperm(size - 1, generator=torch.Generator().manual_seed(seed))
    inner = Tokenizer(WordLevel({"?": 0} | {f"w{word}": n for n, word in enumerate(order.tolist(), 1)}, unk_token="?"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?", pad_token="?", eos_token="?")


def foreign_draft(ids: Tensor) -> dict[str, Any]:
    """A draft with a vocabulary of its own."""
    tokenizers = {"tokenizer": words(1, 97), "assistant_tokenizer": words(2, 106)}
    return {"assistant_model": stock("llama", vocab_size=106, num_hidden_layers=2), **tokenizers}


def even_or_odd(batch: int, ids: Tensor) -> list[int]:
    return list(range(2, 97, 2)) if int(ids[-1]) % 2 else list(range(1, 97, 2))


class Silent(BaseStreamer):
    def put(self, value: Tensor) -> None: ...
    def end(self) -> None: ...


#: Options of generate(), or what makes them of the prompt; sampling stands for all that looks at the logits afterwards.
OPTIONS: dict[str, dict[str, Any] | Callable[[Tensor], dict[str, Any]]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95},
    "more samples": {"do_sample": True, "num_return_sequences": 2, "epsilon_cutoff": 3e-4, "eta_cutoff": 3e-4, "top_h": 0.9},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 2},
    "words": {
        "bad_words_ids": [[5], [7, 9]],
        "suppress_tokens": [3],
        "begin_suppress_tokens": [4],
        "sequence_bias": {(8,): 2.0},
    },
    "ends": {"forced_eos_token_id": 6, "remove_invalid_values": True},
    "allowed tokens": {"prefix_allowed_tokens_fn": even_or_odd},
    "guidance": {"guidance_scale": 1.5},
    "watermark": {"watermarking_config": transformers.WatermarkingConfig(bias=2.0)},
    "stop": {"max_time": 60.0, "stopping_criteria": StoppingCriteriaList(), "streamer": Silent()},
    "no cache": {"use_cache": False},
    "dynamic": {"cache_implementation": "dynamic"},
    "static": {"cache_implementation": "static"},
    "static in chunks": {"cache_implementation": "static", "prefill_chunk_size": 5},
    "chunks": {"prefill_chunk_size": 5},
    "prompt look-up": {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 2},
    "assisted": draft,
    "assisted by its first layer": {"assistant_early_exit": 1},
    "left padding": left_padded,
    "embeddings": embedded,
    "attentions": {"output_attentions": True, "output_hidden_states": True},
    "assisted in other words": foreign_draft,
    "assisted in other words, sampled": lambda ids: foreign_draft(ids) | {"do_sample": True},
}
ONE_TEXT = {"prompt look-up", "stop", *(option for option in OPTIONS if option.startswith("assisted"))}
PAIRS = [(option, slot) for option in OPTIONS for slot in SLOTS]
DIAGONAL = [(option, [*SLOTS][n % len(SLOTS)]) for n, option in enumerate(OPTIONS)]


@pytest.mark.parametrize(("option", "slot"), crossed(PAIRS, DIAGONAL))
@torch.no_grad()
def test_generate(option: str, slot: str) -> None:
    """Whatever chooses the tokens, the logits behind them are those of one plain pass over what was written."""
    ids = tokens(1 if option in ONE_TEXT else 2, 12)
    given = OPTIONS[option]
    options: dict[str, Any] = given(ids) if callable(given) else dict(given)
    prompt = {} if option == "embeddings" else {"input_ids": ids}
    out = model("llama", SLOTS[slot]).generate(
        **prompt,
        **{"do_sample": False} | options,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        disable_compile=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    written = torch.cat([ids, out.sequences], 1) if option == "embeddings" else out.sequences
    got = torch.stack(out.logits, 1)
    for n, text in enumerate(written):
        start = PAD if option == "left padding" and n == 0 else 0
        close(got[n], expected("llama", SLOTS[slot], text[None, start:])[0, ids.shape[1] - start - 1 : -1])
    if option == "attentions":
        assert [len(step) for step in out.attentions] == [4] * NEW


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 2}, {"cache_implementation": "static"}, {"prefill_chunk_size": 5}], ids=str
)
@pytest.mark.parametrize("slot", ["positions", "temperature", "logit_map"])
@torch.no_grad()
def test_generate_beside_an_empty_prompt(slot: str, options: dict[str, Any]) -> None:
    """A row of padding alone, behind which generate() counts from 1: what it writes is a text by itself."""
    ids, m = tokens(3, 12), model("llama", SLOTS[slot])
    mask = torch.ones_like(ids)
    mask[1], mask[2, :4] = 0, 0
    how = {"max_new_tokens": NEW, "do_sample": False, "disable_compile": True} | options
    out = m.generate(ids, attention_mask=mask, **how, output_logits=True, return_dict_in_generate=True)
    alone = m.generate(ids[:1], **how, output_logits=True, return_dict_in_generate=True)
    assert torch.equal(out.sequences[0], alone.sequences[0])
    if "num_beams" not in options:
        got = torch.stack(out.logits, 1)
        for row, begin in ((0, 0), (1, 12), (2, 4)):
            want = expected("llama", SLOTS[slot], out.sequences[row : row + 1, begin:])[0, :-1]
            close(got[row][-len(want) :][-NEW + 1 :], want[-NEW + 1 :])


MTP = {
    "remap": LongAttnConfig.preset("rerope", window=7),
    "map": LongAttnConfig.preset("scale_invariant"),
    "some layers": LongAttnConfig.preset("logn", train_length=5, layers=[0, 3]),
}


@pytest.mark.parametrize("case", MTP)
@torch.no_grad()
def test_heads_that_predict_several_tokens(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are built on a copy of the model's config, in the midst of generate(), and share its rotation."""
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this transformers has no such heads")

    def untrained(cls: Any, main: Any, **_: Any) -> Any:
        torch.manual_seed(1)
        return cls(main, 1).eval()

    monkeypatch.setattr(layers.MtpModel, "from_pretrained", classmethod(untrained))
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
    m = build("Glm4Moe", FAMILIES["llama"][1] | experts, num_mtp_layers=1, num_nextn_predict_layers=1)
    m.set_attn_implementation("eager")
    hf_longattn.apply(m, MTP[case])
    how = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    want, got = (torch.cat(m.generate(tokens(1), **how, **mtp).logits) for mtp in ({}, {"use_mtp": True}))
    close(got, want)
    assert hf_longattn.remove(m).config._attn_implementation == "eager"


@pytest.mark.parametrize("slot", crossed(SLOTS, ["positions", "output_norm"]))
@torch.no_grad()
def test_beams(slot: str) -> None:
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": NEW, "do_sample": False, "length_penalty": 0.0}
    options |= {"return_dict_in_generate": True, "output_scores": True, "disable_compile": True}
    out = model("llama", SLOTS[slot]).generate(tokens(2, 12), **options)
    log_p = expected("llama", SLOTS[slot], out.sequences)[:, 11:-1].log_softmax(-1)
    close(out.sequences_scores, log_p.gather(-1, out.sequences[:, 12:, None]).sum((1, 2)), NEW * 1e-5)


@pytest.mark.skipif(not hasattr(transformers.cache_utils, "Fp8QuantizedLayer"), reason="the others need packages of their own")
@pytest.mark.parametrize("case", crossed(CASES, ["rerope", "infoscale"]))
@torch.no_grad()
def test_quantised_cache(case: str) -> None:
    """A method sees the keys and values that the cache gives back, as its definition would."""
    ids = tokens(2, 24)
    fast, slow = (model("llama", CASES[case], backend) for backend in ("auto", "reference"))
    got, want = rounded_alike(lambda m=m: feed(m, ids, [10, *[1] * 14], QuantizedCache("fp8", m.config)) for m in (fast, slow))
    close(got, want)
    assert (got - fast(ids).logits).abs().max() > 1e-2  # it rounds


def half_of(cache: Any, inv_freq: Tensor | None = None) -> Any:
    """Every second key thrown away, as compression of caches (kvpress) does; with `inv_freq` the others are rotated to follow
    each other, as its KeyRerotationPress does."""
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, ::2].contiguous(), layer.values[:, :, ::2].contiguous()
        if inv_freq is not None:
            angles = -torch.arange(layer.keys.shape[2])[:, None] * inv_freq  # from position 2 n to n
            cos, sin = (f(torch.cat([angles, angles], -1)) for f in (torch.cos, torch.sin))
            left, right = layer.keys.chunk(2, -1)
            layer.keys = layer.keys * cos + torch.cat([-right, left], -1) * sin
    return cache


@pytest.mark.parametrize("case", crossed(CASES, ["rerope", "infoscale", "scale_invariant", "streaming"]))
@torch.no_grad()
def test_cached_keys_that_were_thrown_away_are_missed(case: str) -> None:
    """Which positions the other keys have, nothing says."""
    m, ids = model("llama", CASES[case]), tokens(2, 24)
    cache = half_of(m(ids[:, :12], use_cache=True)[CACHE])
    with pytest.raises(ValueError, match="the positions of cached keys are unknown"):
        m(ids[:, 12:], position_ids=torch.arange(12, 24)[None], **{CACHE: cache})


@pytest.mark.parametrize("case", crossed(CASES, ["rerope", "infoscale"]))
@torch.no_grad()
def test_cached_keys_that_follow_each_other_again_count_so(case: str) -> None:
    """Thrown away and rotated anew they stand where cache indices say, and the text goes on behind them."""
    ids, logits = tokens(2, 24), []
    for backend in ("auto", "reference"):
        m = model("llama", CASES[case], backend)
        cache = half_of(m(ids[:, :12], use_cache=True)[CACHE], m.model.rotary_emb.inv_freq)
        logits.append(m(ids[:, 12:], position_ids=torch.arange(6, 18)[None], **{CACHE: cache}).logits)
    close(*logits)


# other heads, other readings ----------------------------------------------------------------------------------------------

TASKS = ["SequenceClassification", "TokenClassification", "QuestionAnswering"]


@pytest.mark.parametrize(("task", "slot"), crossed([(t, s) for t in TASKS for s in SLOTS], 5))
@torch.no_grad()
def test_other_heads(task: str, slot: str, tmp_path: Path) -> None:
    """Classifiers and rerankers (one label), beside padding on both sides and saved."""

    def read(m: Any, ids: Tensor, **extra: Tensor) -> Tensor:
        out = m(ids, **extra)
        return torch.stack([out.start_logits, out.end_logits], -1) if task == "QuestionAnswering" else out.logits

    torch.manual_seed(0)
    m = getattr(transformers, f"LlamaFor{task}")(model_config("llama", num_labels=1)).eval()
    ids = tokens(2, 24)
    plain = read(m, ids)
    hf_longattn.apply(m, SLOTS[slot])
    want = read(hf_longattn.apply(copy.deepcopy(m), SLOTS[slot].replace(backend="reference")), ids)
    close(read(m, ids), want)
    assert (plain - want).abs().max() > 1e-2
    mask = torch.ones(2, 24 + PAD, dtype=torch.int64)
    mask[:, :PAD] = 0
    pad = ids.new_zeros(2, PAD)
    left = read(m, torch.cat([pad, ids], 1), attention_mask=mask)
    right = read(m, torch.cat([ids, pad], 1), attention_mask=mask.flip(-1))
    whole = task == "SequenceClassification"
    close(left if whole else left[:, PAD:], want)
    close(right if whole else right[:, :-PAD], want)
    m.save_pretrained(tmp_path)
    close(read(type(m).from_pretrained(tmp_path).eval(), ids), want)


@pytest.mark.parametrize("slot", crossed(SLOTS, ["positions", "visibility"]))
@torch.no_grad()
def test_forward_in_place_of_the_model(slot: str, tmp_path: Path) -> None:
    """sentence-transformers calls `forward`, so that no hook runs."""
    model("llama", SLOTS[slot]).save_pretrained(tmp_path)
    m, ids = AutoModel.from_pretrained(tmp_path).eval(), tokens(2, 24)
    got = m.forward(ids).last_hidden_state
    close(got, model("llama", SLOTS[slot]).model(ids).last_hidden_state)
    close(m(ids).last_hidden_state, got)


@torch.no_grad()
def test_forward_in_place_of_a_model_that_does_not_tell_its_layers_positions() -> None:
    torch.manual_seed(0)
    m = AutoModelForCausalLM.from_config(tiny(families()["persimmon"])).eval()
    hf_longattn.apply(m, "rerope", window=7)
    ids = tokens(2, 24)
    positions = torch.arange(24) + 5 * (torch.arange(24) > 12)
    given = {"attention_mask": torch.ones_like(ids), "position_ids": positions[None], "use_cache": False}
    assert m.base_model(ids, **given).last_hidden_state.isfinite().all()
    with pytest.raises(ValueError, match=r"`forward` was run.*call the model"):
        m.base_model.forward(ids, **given)


@pytest.mark.skipif("hrm_text" not in families(), reason="this release of transformers does not know it")
@pytest.mark.parametrize("slot", crossed(SLOTS, ["positions", "logit_map"]))
@torch.no_grad()
def test_a_prefix_that_sees_itself(slot: str) -> None:
    """HRM reads instructions in both directions: a method counts |t|, and a cache goes on behind them."""
    torch.manual_seed(0)
    m, ids = AutoModelForCausalLM.from_config(tiny(families()["hrm_text"])).eval(), tokens(2, 24)
    prefix = (torch.arange(24) < 16).long().expand(2, -1)
    plain = m(ids, token_type_ids=prefix, use_cache=False).logits
    assert (m(ids, use_cache=False).logits - plain).abs().max() > 1e-2
    hf_longattn.apply(m, SLOTS[slot].replace(backend="reference"))
    want = m(ids, token_type_ids=prefix, use_cache=False).logits
    assert (want - plain).abs().max() > 1e-2
    hf_longattn.update(m, backend="auto")
    close(m(ids, token_type_ids=prefix, use_cache=False).logits, want)
    first = m(ids[:, :16], token_type_ids=prefix[:, :16], use_cache=True)
    then = m(ids[:, 16:], token_type_ids=prefix[:, 16:], **{CACHE: first[CACHE]}).logits
    close(torch.cat([first.logits, then], 1), want)


# training and placement ---------------------------------------------------------------------------------------------------


def gradients(m: Any) -> dict[str, Tensor]:
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[1, 9:12] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    m.train()(ids, labels=ids, use_cache=False, attention_mask=mask, position_ids=positions).loss.backward()
    return {name: p.grad for name, p in m.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("slot", crossed(SLOTS, ["positions", "logit_map"]))
def test_reentrant_gradient_checkpointing(slot: str) -> None:
    want = gradients(copy.deepcopy(model("llama", SLOTS[slot])))
    m = copy.deepcopy(model("llama", SLOTS[slot]))
    getattr(m, "activation_checkpointing_enable", m.gradient_checkpointing_enable)({"use_reentrant": True})
    m.enable_input_require_grads()
    got = gradients(m)
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        close(got[name], gradient, 1e-6, name)


#: The temperature is apart: it says how long the model was trained, and that is too short for the others.
TOGETHER = (("positions", "logit_map", "output_norm"), ("score", "visibility", "sink"), ("temperature",))


@pytest.mark.slow
@pytest.mark.parametrize("slots", crossed(((x,) for x in TOGETHER), 3), ids="+".join)
def test_a_whole_training_step_compiled(slots: tuple[str, ...]) -> None:
    """Forward, backward and optimizer in one function that torch.compile gets; each layer has a method of another slot."""

    def losses(compiled: bool) -> list[float]:
        torch.manual_seed(0)
        m = stock("llama", num_hidden_layers=len(slots)).train()
        hf_longattn.apply(m, [SLOTS[slot].replace(layers=(n,)) for n, slot in enumerate(slots)])
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)

        def step() -> Tensor:
            optimizer.zero_grad()
            loss = m(tokens(), labels=tokens(), use_cache=False).loss
            loss.backward()
            optimizer.step()
            return loss.detach()

        torch._dynamo.reset()
        run = torch.compile(step, backend="aot_eager") if compiled else step
        return [float(run()) for _ in range(3)]

    want = losses(False)
    assert want[2] < want[0] - 0.5
    assert losses(True) == pytest.approx(want, abs=5e-5)


@pytest.mark.parametrize("slot", crossed(SLOTS, ["positions", "score"]))
@torch.no_grad()
def test_spread_over_memory_and_disk(slot: str, bases: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    places: dict[str, Any] = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu", "model.rotary_emb": "cpu"}
    places |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(LAYERS)}
    m = AutoModelForCausalLM.from_pretrained(bases["llama"], device_map=places, offload_folder=tmp_path / "away").eval()
    plain, ids = m(tokens()).logits, tokens()
    want = expected("llama", SLOTS[slot], ids)
    hf_longattn.apply(m, SLOTS[slot])
    close(m(ids).logits, want)
    close(feed(m, ids, [9, 1, 14]), want)
    m.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", device_map=places, offload_folder=tmp_path / "again"
    ).eval()
    close(loaded(ids).logits, want)
    close(hf_longattn.remove(m)(ids).logits, plain, 0.0)
