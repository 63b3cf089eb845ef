"""On whole models: every way to feed a text gives the logits of one plain forward pass, and those are the formula's."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import closed_form
import pytest
import torch
from cases import CASES, DEFAULT, FAMILIES, SUBSET, families
from helpers import (
    NO_WINDOWS,
    SCENARIOS,
    TOLERANCE,
    close,
    crossed,
    expected,
    fresh,
    holds_for,
    model,
    static,
    stock,
    tokens,
)
from tiny import tokenizer
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import hf_longattn
from hf_longattn.core.geometry import AttentionLayout
from hf_longattn.integration import masks
from hf_longattn.integration.caches import CACHE

OTHERS = [case for case in CASES if case != DEFAULT]
#: Of each case the family that it runs on in the inner loop, another one from case to case.
FIRST = {case: families(case)[n % len(families(case))] for n, case in enumerate(OTHERS)}
INNER = [*((family, DEFAULT) for family in FAMILIES), *((family, case) for case, family in FIRST.items())]
#: The cases beyond the default, each on a few families.
FEW = [(family, case) for case in OTHERS for family in families(case)]
#: A third of them.
SOME = [*INNER, *(pair for n, pair in enumerate(FEW) if n % 3 == 0 and pair not in INNER)]
EVERY = crossed([*INNER[: len(FAMILIES)], *FEW], INNER)
BACKENDS = [pytest.param(backend, *p.values, marks=p.marks) for backend in ("tiled", "reference") for p in EVERY]


def margin(case: str) -> float:
    """Seven stages on one another round by up to 1.5e-5, on processors without AVX-512."""
    return 2 * TOLERANCE if case == "all_slots" else TOLERANCE


@pytest.mark.parametrize(("backend", "family", "case"), BACKENDS)
@torch.no_grad()
def test_forward_is_the_closed_form(backend: str, family: str, case: str) -> None:
    config, ids = CASES[case], tokens()
    close(model(family, config, backend)(ids, use_cache=False).logits, expected(family, config, ids), margin(case))


@pytest.mark.parametrize(("family", "case"), EVERY)
@torch.no_grad()
def test_method_changes_the_logits(family: str, case: str) -> None:
    """Or all the other tests here would hold for an attention that does nothing."""
    ids = tokens()
    assert (expected(family, CASES[case], ids) - stock(family)(ids).logits).abs().max() > 0.1


@pytest.mark.parametrize("family", crossed(FAMILIES, SUBSET))
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, family: str) -> None:
    if not holds_for(name, family):
        pytest.skip("learned positions are absolute, and sliding windows count cache indices")
    config, ids = CASES[DEFAULT], tokens()
    close(SCENARIOS[name](model(family, config), ids), expected(family, config, ids))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "case"), crossed(FEW, INNER[len(FAMILIES) :: 3]))
def test_all_scenarios(family: str, case: str) -> None:
    """Every one on the case's first family, a third of them on each of the others."""
    config, ids = CASES[case], tokens()
    want = expected(family, config, ids)
    whole = family == FIRST[case]
    for n, (name, run) in enumerate(SCENARIOS.items(), families(case).index(family)):
        if holds_for(name, family) and (whole or n % 3 == 0):
            close(run(model(family, config), ids), want, margin(case), name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "case"), crossed([*((f, DEFAULT) for f in FAMILIES), *FEW], [("gemma3", DEFAULT), ("llama", "rerope")])
)
def test_all_scenarios_as_a_graph_computes_them(family: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told that it is compiled, everything takes the way that reads no tensor; nothing is, which would take minutes."""
    config, ids = CASES[case], tokens()
    want, m = expected(family, config, ids), model(family, config)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for name, run in SCENARIOS.items():
        if holds_for(name, family):
            close(run(m, ids), want, margin(case), name)


# generate() ---------------------------------------------------------------------------------------------------------

NEW = 9
GENERATE: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "no_cache": {"use_cache": False},
    "static": {"cache_implementation": "static"},
    "chunked_prefill": {"prefill_chunk_size": 4},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
}


def generate(model: Any, ids: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Greedy continuation: token ids and the logits that chose them."""
    out = model.generate(
        ids,
        max_new_tokens=NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        disable_compile=True,
        **options,
    )
    assert out.sequences.shape[1] == ids.shape[1] + NEW
    return out.sequences, torch.stack(out.logits, 1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", GENERATE)
def test_generate(name: str, family: str) -> None:
    config, batch = CASES[DEFAULT], 1 if name == "prompt_lookup" else 2
    ids = tokens(batch, 12)
    if name == "prompt_lookup":
        ids = torch.cat([ids, ids], 1)  # something to look up
    sequences, logits = generate(model(family, config), ids, **GENERATE[name])
    close(logits, expected(family, config, sequences)[:, ids.shape[1] - 1 : -1])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["dynamic", "static", "chunked_prefill"])
def test_generate_left_padded(name: str, family: str) -> None:
    config, ids, pad = CASES[DEFAULT], tokens(2, 16), 6
    mask = torch.ones_like(ids)
    mask[0, :pad] = 0
    sequences, logits = generate(model(family, config), ids, attention_mask=mask, **GENERATE[name])
    close(logits[:1], expected(family, config, sequences[:1, pad:])[:, 15 - pad : -1])
    close(logits[1:], expected(family, config, sequences[1:])[:, 15:-1])


@pytest.mark.parametrize("family", SUBSET)
def test_assisted_generation(family: str) -> None:
    config, ids = CASES[DEFAULT], tokens(1, 12)
    sequences, logits = generate(model(family, config), ids, assistant_model=stock(family))
    close(logits, expected(family, config, sequences)[:, 11:-1])


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}])
def test_generate_takes_a_tokenizer(options: dict[str, Any]) -> None:
    """transformers hands it on to the model, for `transformers serve` in every call."""
    m, ids = model("llama", CASES[DEFAULT]), tokens(1, 12)
    want, got = (
        m.generate(ids, max_new_tokens=NEW, do_sample=False, **options, **x) for x in ({}, {"tokenizer": tokenizer()})
    )
    assert torch.equal(want, got)


@pytest.mark.parametrize("family", SUBSET)
def test_beams(family: str) -> None:
    config, ids = CASES[DEFAULT], tokens(2, 12)
    options = {"num_beams": 3, "max_new_tokens": NEW, "do_sample": False, "disable_compile": True}
    options |= {"return_dict_in_generate": True, "output_scores": True, "length_penalty": 0.0}
    runs = [model(family, config).generate(ids, cache_implementation=kind, **options) for kind in (None, "static")]
    for run in runs:  # the score of a beam is its log-probability
        log_p = expected(family, config, run.sequences)[:, 11:-1].log_softmax(-1)
        close(run.sequences_scores, log_p.gather(-1, run.sequences[:, 12:, None]).sum((1, 2)), NEW * 1e-5)
    assert torch.equal(runs[0].sequences, runs[1].sequences)


@pytest.mark.parametrize("case", [c for c in CASES if c != DEFAULT])
def test_generate_every_case(case: str) -> None:
    config, ids, pad = CASES[case], tokens(2, 16), 6
    mask = torch.ones_like(ids)
    mask[0, :pad] = 0
    sequences, logits = generate(model("gemma3", config), ids, attention_mask=mask, cache_implementation="static")
    close(logits[:1], expected("gemma3", config, sequences[:1, pad:])[:, 15 - pad : -1])
    close(logits[1:], expected("gemma3", config, sequences[1:])[:, 15:-1])


# training -----------------------------------------------------------------------------------------------------------


def gradients(model: Any, ids: Tensor, **extra: Tensor) -> dict[str, Tensor]:
    model.train()
    model(ids, labels=ids, use_cache=False, **extra).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("family", "case"), crossed(SOME, INNER))
def test_gradients_are_those_of_the_reference(family: str, case: str) -> None:
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    config = CASES[case]
    want = gradients(fresh(family, config.replace(backend="reference")), ids, attention_mask=mask)
    got = gradients(fresh(family, config), ids, attention_mask=mask)
    assert got.keys() == want.keys()
    for name in want:
        close(got[name], want[name], margin(case), name)


def checkpointing(model: Any) -> Any:
    """The model, computing activations anew in the backward pass; transformers 5.23 has a new word for it."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing(family: str) -> None:
    config, ids = CASES[DEFAULT], tokens()
    want = gradients(fresh(family, config), ids)
    got = gradients(checkpointing(fresh(family, config)), ids)
    for name in want:
        close(got[name], want[name])


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_dropout_under_gradient_checkpointing(family: str) -> None:
    """The recomputed forward pass must drop the same pairs: then the gradient is that of the loss."""
    runs = []
    for checkpoint in (False, True):
        m = fresh(family, CASES[DEFAULT])
        for module in m.modules():
            for name in ("attention_dropout", "attn_dropout"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.4)
                elif hasattr(module, name):
                    getattr(module, name).p = 0.4
        if checkpoint:
            checkpointing(m)
        torch.manual_seed(3)
        runs.append(gradients(m, tokens()))
    plain = gradients(fresh(family, CASES[DEFAULT]), tokens())
    for name in plain:
        close(runs[0][name], runs[1][name])
    assert max((plain[n] - runs[0][n]).abs().max() for n in plain) > 1e-2


# compiled and reduced precision -------------------------------------------------------------------------------------


def shallow(family: str = "llama") -> Any:
    """A model with one layer of each kind: compiling takes seconds a layer."""
    types = {"layer_types": ["sliding_attention", "full_attention"]} if "layer_types" in FAMILIES[family][1] else {}
    return stock(family, num_hidden_layers=1 + len(types), **types)


@pytest.mark.slow
@pytest.mark.parametrize("family", crossed(["llama", "gemma4", "gpt2"], ["llama", "gpt2"]))
def test_compiled_forward(family: str) -> None:
    config, ids, pad = CASES[DEFAULT], tokens(), 5
    layers = {"llama": {"num_hidden_layers": 1}, "gpt2": {"n_layer": 1}}.get(family, {})
    base = stock(family, **layers)
    exact = closed_form.attach(copy.deepcopy(base), config)
    torch._dynamo.reset()
    compiled = torch.compile(hf_longattn.apply(base, config), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        close(compiled(ids, use_cache=False).logits, exact(ids, use_cache=False).logits)
        mask = torch.ones_like(ids)
        mask[0, :pad] = 0
        extra = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        out = compiled(ids, use_cache=False, **extra).logits
        close(out[:1, pad:], exact(ids[:1, pad:], use_cache=False).logits)
        close(out[1:], exact(ids[1:], use_cache=False).logits)


@pytest.mark.slow
def test_compiled_training_step() -> None:
    m, ids = hf_longattn.apply(shallow(), CASES[DEFAULT]), tokens()
    want = gradients(copy.deepcopy(m), ids)
    torch._dynamo.reset()
    got = gradients(torch.compile(m, fullgraph=True, backend="aot_eager"), ids)
    for name in want:
        close(got["_orig_mod." + name], want[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "holes"),
    crossed(
        itertools.product([DEFAULT, "streaming+adaptive", "leaky_rerope+scale_invariant", "logn_learned"], [False, True]),
        [(DEFAULT, False), ("leaky_rerope+scale_invariant", True), ("logn_learned", False)],
    ),
)
def test_compiled_training_step_with_padding(case: str, holes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be read while a graph is traced, and still no mask of q_len x kv_len is made."""
    m, ids = hf_longattn.apply(shallow(), CASES[case]), tokens()
    m(ids)  # verifies the rotation
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[1, -4:] = 0
    mask[:, 11:13] = 1 - int(holes)
    extra = {"attention_mask": mask} | ({"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if holes else {})
    want = gradients(copy.deepcopy(m), ids, **extra)
    torch._dynamo.reset()
    seen = layout_masks(monkeypatch)
    monkeypatch.setattr(AttentionLayout, "visible", None)
    got = gradients(torch.compile(m, fullgraph=True, backend="aot_eager"), ids, **extra)
    assert set(seen) == {"padded"}
    for name in want:
        close(got["_orig_mod." + name], want[name], what=name)


@torch.no_grad()
def decode_compiled(m: Any, ids: Tensor) -> tuple[Tensor, int]:
    """The logits of ids: six at once, then one by one through a compiled step; and the number of graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    step, cache = torch.compile(m, fullgraph=True, backend=counter), static(m, ids)
    out = [m(ids[:, :6], **{CACHE: cache}, use_cache=True).logits]
    out += [step(ids[:, i : i + 1].clone(), **{CACHE: cache}, use_cache=True).logits for i in range(6, ids.shape[1])]
    return torch.cat(out, 1), counter.frame_count


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_compiled_static_decode(family: str) -> None:
    """No graph more than stock sdpa needs: one, and others while the sliding window of Gemma 3 fills."""
    config, ids = CASES[DEFAULT], tokens(2, 9)
    logits, graphs = decode_compiled(hf_longattn.apply(shallow(family), config), ids)
    with torch.no_grad():
        close(logits, closed_form.attach(shallow(family), config)(ids, use_cache=False).logits)
    assert graphs <= decode_compiled(shallow(family), ids)[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_half_precision(family: str, dtype: torch.dtype) -> None:
    """No further from float32 than the model itself is under its own attention in that precision."""
    config, ids = CASES[DEFAULT], tokens()
    plain = stock(family)
    exact, rough = plain(ids).logits, plain.to(dtype)(ids).logits.float()
    ours = fresh(family, config).to(dtype)(ids, use_cache=False).logits.float()
    error = (ours - expected(family, config, ids)).pow(2).mean().sqrt()
    assert error < 2 * (rough - exact).pow(2).mean().sqrt()


@pytest.mark.parametrize("case", crossed(CASES, [DEFAULT, "attention_sink", "streaming", "rerope", "cosscale"]))
@torch.no_grad()
def test_decoding_under_autocast(case: str) -> None:
    """Projections give half precision there, and rotation makes float32 of queries and keys, not of values."""
    config, ids = CASES[case], tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, rough = (SCENARIOS["dynamic_chunks"](m, ids).float() for m in (model("llama", config), stock("llama")))
    exact = stock("llama")(ids).logits
    error = (ours - expected("llama", config, ids)).pow(2).mean().sqrt()
    assert error < 8 * (rough - exact).pow(2).mean().sqrt()


# the layout mask --------------------------------------------------------------------------------------------------------


def layout_masks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of the masks that attention reads from now on."""
    seen: list[str] = []
    read = masks.read_mask

    def spy(mask: Tensor, kv_len: int) -> Any:
        kinds = {masks.INDEX_WIDTH: "compact", masks.INDEX_WIDTH + 1: "padded", masks.INDEX_WIDTH + kv_len: "dense"}
        seen.append(kinds[mask.shape[-1]])  # of one key both are the same
        return read(mask, kv_len)

    monkeypatch.setattr("hf_longattn.integration.positions.read_mask", spy)
    return seen


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gemma3n", "gemma4", "gpt2"])
@pytest.mark.parametrize("name", [n for n in SCENARIOS if n not in NO_WINDOWS | {"hole_in_the_padding"}])
def test_compact_carrier_is_taken(name: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The private closures of transformers' mask functions are still recognised: else masks cost q_len x kv_len."""
    for layers in ("full_attention", "all"):
        m = model(family, CASES[DEFAULT].replace(layers=layers))
        seen = layout_masks(monkeypatch)
        SCENARIOS[name](m, tokens())
        assert set(seen) == {"compact"}


def test_dense_carrier_is_taken_only_where_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holes, under a cache that holds keys of earlier calls."""
    seen = layout_masks(monkeypatch)
    SCENARIOS["hole_in_the_padding"](model("llama", CASES[DEFAULT]), tokens())
    assert set(seen) == {"padded"}
    SCENARIOS["second_turn"](model("llama", CASES[DEFAULT]), tokens())
    assert seen[-1] == "dense"


@pytest.mark.slow
@pytest.mark.parametrize("family", crossed(FAMILIES, SUBSET))
def test_dense_carrier_is_exact(family: str, unknown_masks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config, ids = CASES["sinks"], tokens()
    seen = layout_masks(monkeypatch)
    for name, run in SCENARIOS.items():
        if holds_for(name, family):
            close(run(model(family, config), ids), expected(family, config, ids))
    assert set(seen) == {"dense"}


@pytest.mark.slow
@pytest.mark.parametrize("family", crossed(["gemma2", "gemma3", "gemma3n", "gemma4"], ["gemma3"]))
def test_method_inside_sliding_windows(family: str) -> None:
    """layers="all": the windowed layers take the method too, and every scenario agrees, compact and dense."""
    config, ids = CASES["sinks"].replace(layers="all"), tokens()
    with torch.no_grad():
        want = model(family, config, "reference")(ids, use_cache=False).logits
    assert (want - expected(family, CASES["sinks"], ids)).abs().max() > 1e-2
    for name, run in SCENARIOS.items():
        if holds_for(name, family):
            close(run(model(family, config), ids), want)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_sliding_window_and_method_by_layer_index(family: str) -> None:
    """Layers 0 and 3 (one windowed, one full) under the method, the others untouched."""
    config, ids = CASES[DEFAULT].replace(layers=(0, 3)), tokens()
    m = model(family, config)
    assert [row[1].startswith("scale_invariant") for row in hf_longattn.describe(m).rows] == [True, False, False, True]
    with torch.no_grad():
        want = model(family, config, "reference")(ids, use_cache=False).logits
    for name, run in SCENARIOS.items():
        if holds_for(name, family):
            close(run(m, ids), want)
