"""The engines of the transformers stack that call a model in their own way, against one plain forward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CASES, DEFAULT, FAMILIES, WINDOW
from helpers import TOLERANCE, crossed, fresh, stock, tokens
from tiny_configs import families, tiny
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

import hf_longattn
from hf_longattn.integration.caches import PAGES

# continuous batching -------------------------------------------------------------------------------------------------

batching = pytest.mark.skipif(not PAGES, reason="this release of transformers has another paged cache")
#: The inner loop's: a map, a remap, what depends on a whole row.
INNER = ("scale_invariant", "rerope", "mapped+adaptive")
GREEDY = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}


def recorded(m: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[str, int, Tensor]], Any]:
    """Fills with what every later forward of continuous batching computes: request, first position, hidden states; and the
    hook that does so.
    """
    from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs

    out: list[tuple[str, int, Tensor]] = []
    original, calls = ContinuousBatchingIOs.get_model_kwargs, []

    def get_model_kwargs(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = original(self, *args, **kwargs)
        calls.append(([r.state.request_id for r in self.requests_in_batch], arguments))
        return arguments

    def hook(_: Any, __: Any, result: Any) -> None:
        requests, arguments = calls[-1]
        bounds = arguments["cu_seq_lens_q"].tolist()
        for request, first, last in zip(requests, bounds[:-1], bounds[1:], strict=False):
            position = int(arguments["position_ids"][0, first])
            out.append((request, position, result.last_hidden_state[0, first:last].clone()))

    monkeypatch.setattr(ContinuousBatchingIOs, "get_model_kwargs", get_model_kwargs)
    return out, m.base_model.register_forward_hook(hook)


@torch.no_grad()
def check_batching(
    m: PreTrainedModel,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    new: int = 5,
    kept: bool = False,
    **config: Any,
) -> Counter[str]:
    """Generate by continuous batching; every hidden state must be that of one plain forward pass. Counts what happened."""
    from transformers import ContinuousBatchingConfig

    seen, hook = recorded(m, monkeypatch)
    settings = {"page_size": 4, "num_blocks": 64, "max_batch_tokens": 16} | config
    generation = GenerationConfig(max_new_tokens=new, **GREEDY)
    answers = m.generate_batch(
        prompts,
        generation_config=generation,
        continuous_batching_config=ContinuousBatchingConfig(**settings),
        progress_bar=False,
        persistent_manager=kept,
    )
    hook.remove()
    assert len(answers) == len(prompts)
    texts = {}
    for name, answer in answers.items():
        assert answer.error is None, answer.error
        assert len(answer.generated_tokens) == new
        whole = torch.tensor([answer.prompt_ids + answer.generated_tokens])
        texts[name] = m.base_model(whole, use_cache=False).last_hidden_state[0]
    counts: Counter[str] = Counter()
    for name, first, states in seen:
        torch.testing.assert_close(states, texts[name][first : first + len(states)], atol=5 * TOLERANCE, rtol=0)
        counts["tokens"] += len(states)
        counts["chunks"] += 0 < first < len(answers[name].prompt_ids)
        counts["several"] += len(states) > 1
    return counts


def prompts(*lengths: int) -> list[list[int]]:
    return [tokens(1, n, seed=n)[0].tolist() for n in lengths]


@pytest.mark.slow
@batching
@pytest.mark.parametrize("case", crossed(CASES, INNER))
def test_continuous_batching(
    case: str, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """Prompts longer than a step in chunks, others beside them, and decoding of several at once."""
    counts = check_batching(fresh("llama", CASES[case]), prompts(5, 21, 5, 2), monkeypatch, new=3)
    assert counts["chunks"] >= 1
    record_property("continuous batching", case)


@batching
@pytest.mark.slow
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("llama", "gemma4")])
def test_continuous_batching_of_families(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Softcaps, sliding layers beside full ones, learned positions."""
    counts = check_batching(fresh(family, CASES[DEFAULT]), prompts(5, 3 * WINDOW, 2), monkeypatch, new=WINDOW + 2)
    assert counts["tokens"] >= 3 * WINDOW + 3 * WINDOW


@pytest.mark.slow
@batching
@pytest.mark.parametrize("sharing", [True, False])
def test_batched_requests_share_a_prefix(sharing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second half of the prompts finds its first blocks in the cache, so fewer tokens go through the model."""
    shared = tokens(1, 16, seed=3)[0].tolist()
    texts = [shared + p for p in prompts(3, 6, 9, 12)]
    m = fresh("llama", CASES["rerope+infoscale+cosscale"])
    counts = check_batching(m, texts, monkeypatch, max_batch_tokens=20, allow_block_sharing=sharing)
    whole = sum(len(t) + 4 for t in texts)
    assert counts["tokens"] < whole - 16 if sharing else counts["tokens"] == whole


@pytest.mark.slow
@batching
@pytest.mark.parametrize(("first", "then"), [(None, "rerope"), ("rerope", None), ("rerope", "alibi")])
def test_a_kept_manager_computes_under_the_method_of_now(
    first: str | None, then: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps pages, in which the same prompts would be found again, and decided once whether it makes masks."""
    m = stock("llama") if first is None else fresh("llama", CASES[first])
    check_batching(m, prompts(5, 18, 20), monkeypatch, kept=True)
    hf_longattn.remove(m) if then is None else hf_longattn.apply(m, CASES[then])
    counts = check_batching(m, prompts(5, 18, 20), monkeypatch, kept=True)
    assert counts["tokens"] == 5 + 18 + 20 + 3 * 4
    m.destroy_cached_continuous_batching_manager()


@batching
def test_a_change_while_requests_are_batched_is_refused() -> None:
    from transformers import ContinuousBatchingConfig

    m = fresh("llama", CASES["rerope"])
    generation = GenerationConfig(max_new_tokens=2, **GREEDY)
    config = ContinuousBatchingConfig(page_size=4, num_blocks=16, max_batch_tokens=16)
    with m.continuous_batching_context_manager(generation_config=generation, continuous_batching_config=config):
        for change in (hf_longattn.remove, lambda m: hf_longattn.apply(m, "alibi")):
            with pytest.raises(RuntimeError, match=r"continuous batching of this LlamaForCausalLM runs.*stop its manager"):
                change(m)
        assert hf_longattn.get_config(m).name == "rerope"
    hf_longattn.remove(m)


@pytest.mark.slow
@batching
def test_batched_requests_are_evicted_and_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache too small for all answers: requests are thrown out and computed anew, so that more tokens go through."""
    texts = prompts(11, 13, 12, 9)
    m = fresh("llama", CASES["alibi"])
    counts = check_batching(m, texts, monkeypatch, new=16, num_blocks=14, allow_block_sharing=False)
    assert counts["tokens"] > sum(len(t) + 15 for t in texts)


@pytest.mark.slow
@batching
def test_batched_requests_with_learned_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    m = fresh("gemma3", CASES["logn_learned"].replace(layers="all"))
    for layer in m.model.layers:
        layer.self_attn.longattn.temperature.weight.data.uniform_(0.5, 2.0)
    check_batching(m, prompts(5, 3 * WINDOW, 2), monkeypatch, new=WINDOW)


@pytest.mark.slow
@batching
@pytest.mark.parametrize("case", ["scale_invariant", "rerope"])
def test_batched_requests_of_a_model_that_hands_no_positions_on(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    m = AutoModelForCausalLM.from_config(tiny(families()["persimmon"])).eval()
    check_batching(hf_longattn.apply(m, CASES[case]), prompts(5, 21, 2), monkeypatch, new=3)
