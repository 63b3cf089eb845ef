"""Many threads on one model, and two models on one config: nothing computes what was not asked for."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES
from helpers import close, fresh, logits, tokens
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.integration.passes import current_pass
from hf_longattn.integration.state import disable, enable


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def together(threads: int, what: Callable[[int], Any]) -> list[Any]:
    """What every thread returns, all begun at once."""
    start = threading.Barrier(threads)

    def run(number: int) -> Any:
        start.wait()
        return what(number)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(run, range(threads)))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["rerope", "streaming", "dual_chunk"])
def test_first_calls_at_once_all_run_the_method(case: str, tmp_path: Path) -> None:
    fresh("llama", CASES[case]).save_pretrained(tmp_path)
    ids = tokens(1)
    want = logits(AutoModelForCausalLM.from_pretrained(tmp_path), ids)
    plain = logits(AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager"), ids)
    assert (want - plain).abs().max() > 1e-2
    for _ in range(10):
        m = AutoModelForCausalLM.from_pretrained(tmp_path)
        for got in (*together(4, lambda _, m=m: logits(m, ids)), logits(m, ids)):
            close(got, want, 1e-6)


def beside_forwards(model: Any, change: Callable[[int], Any], allowed: list[torch.Tensor], ids: torch.Tensor) -> set[int]:
    """Run forwards in two threads while a third one changes the model; which of the allowed logits were seen."""
    over, passed = threading.Event(), threading.Semaphore(0)

    def run(number: int) -> set[int]:
        if number == 2:
            try:
                for n in range(40):
                    assert passed.acquire(timeout=60)
                    change(n)
            finally:
                over.set()
            return set()
        seen: set[int] = set()
        while not over.is_set():
            got = logits(model, ids)
            passed.release()
            near = [n for n, x in enumerate(allowed) if (got - x).abs().max() < 1e-5]
            assert near, "logits of neither"
            seen |= set(near)
        return seen

    return set.union(*together(3, run))


def test_the_strength_changes_between_forwards() -> None:
    m, ids = fresh("llama", CASES["scale_invariant"]), tokens(1)
    strengths = (1.0, 0.25)
    allowed = [logits(hf_longattn.update(m, strength=s), ids) for s in strengths]
    assert (allowed[0] - allowed[1]).abs().max() > 1e-2
    seen = beside_forwards(m, lambda n: hf_longattn.update(m, strength=strengths[n % 2]), allowed, ids)
    assert seen == {0, 1}


def test_methods_come_and_go_between_forwards() -> None:
    m, ids = fresh("llama", CASES["rerope"]), tokens(1)
    allowed = [logits(m, ids), logits(hf_longattn.apply(copy.deepcopy(m), CASES["alibi"]), ids)]
    beside_forwards(m, lambda n: hf_longattn.apply(m, CASES[("rerope", "alibi")[n % 2]]), allowed, ids)


def test_a_change_inside_a_forward_pass_of_its_own_thread_does_not_wait() -> None:
    m, ids = fresh("llama", CASES["scale_invariant"]), tokens(1)
    handle = m.model.layers[1].register_forward_pre_hook(lambda *_: hf_longattn.update(m, strength=0.5) and None)
    logits(m, ids)
    handle.remove()
    close(logits(m, ids), logits(fresh("llama", CASES["scale_invariant"].replace(strength=0.5)), ids), 1e-6)


def test_a_forward_pass_that_fails_lets_the_next_change_through() -> None:
    m = fresh("llama", CASES["rerope"])
    with pytest.raises(IndexError):
        logits(m, torch.tensor([[1_000_000]]))
    together(2, lambda number: number and hf_longattn.apply(m, CASES["alibi"]))
    assert hf_longattn.get_config(m).name == "alibi"


def interrupt(m: Any) -> None:
    """A forward pass that ends in its second layer."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = m.model.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        logits(m, tokens(1))
    handle.remove()


def test_an_interrupted_forward_pass_lets_the_next_change_through() -> None:
    """Torch calls no hook behind a KeyboardInterrupt, nor behind what ends a thread."""
    m = fresh("llama", CASES["rerope"])
    interrupt(m)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(hf_longattn.apply, m, CASES["alibi"]).result(timeout=60)
    assert hf_longattn.get_config(m).name == "alibi"


LEARNED = LongAttnConfig.preset("logn+output_layer_norm", train_length=8, learned=True)
#: What a model runs, and what another thread does to it in the midst of a pass.
CHANGES: dict[str, tuple[LongAttnConfig, Any]] = {
    "apply": (CASES["rerope"], lambda m: hf_longattn.apply(m, CASES["alibi"])),
    "apply a remap": (CASES["alibi"], lambda m: hf_longattn.apply(m, CASES["rerope"])),
    "update": (CASES["scale_invariant"], lambda m: hf_longattn.update(m, tau=30.0)),
    "update the strength": (CASES["scale_invariant"], lambda m: hf_longattn.update(m, strength=0.25)),
    "remove": (CASES["rerope"], hf_longattn.remove),
    "remove what learns": (LEARNED, hf_longattn.remove),
    "replace what learns": (LEARNED, lambda m: hf_longattn.apply(m, CASES["rerope"])),
    "change what learns": (LEARNED, lambda m: hf_longattn.update(m, output_norm=None)),
    "set sdpa": (CASES["rerope"], lambda m: m.set_attn_implementation("sdpa")),
    "set eager": (CASES["windowed"], lambda m: m.set_attn_implementation("eager")),
    "disable": (CASES["rerope"], disable),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_pass_ends_as_it_began(what: str) -> None:
    """The change does not wait for it, nor it for the change."""
    config, change = CHANGES[what]
    m, ids = fresh("llama", config), tokens(1)
    for name, p in m.named_parameters():
        if ".longattn." in name:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    old = logits(m, ids)

    def once(*_: Any) -> None:
        handle.remove()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(change, m).result(timeout=60)

    handle = m.model.layers[1].register_forward_pre_hook(once)
    close(logits(m, ids), old, 0)
    new = logits(m, ids)
    assert (new - old).abs().max() > 1e-3
    close(new, logits(copy.deepcopy(m), ids), 0)
    assert current_pass() is None


def test_a_pass_ends_without_a_method_as_it_began() -> None:
    m, ids = fresh("llama", CASES["rerope"]), tokens(1)
    method = logits(m, ids)
    disable(m)
    old = logits(m, ids)
    handle = m.model.layers[1].register_forward_pre_hook(lambda *_: together(2, lambda n: n and enable(m)) and None)
    close(logits(m, ids), old, 0)
    handle.remove()
    close(logits(m, ids), method, 0)


def test_a_pass_inside_another_runs_what_that_does() -> None:
    m, ids = fresh("llama", CASES["rerope"]), tokens(1)
    want, nested = logits(copy.deepcopy(m), ids), []

    def again(*_: Any) -> None:
        handle.remove()
        hf_longattn.apply(m, CASES["alibi"])
        nested.append(logits(m, ids))

    handle = m.model.layers[1].register_forward_pre_hook(again)
    close(logits(m, ids), want, 0)
    close(nested[0], want, 0)
    assert (logits(m, ids) - want).abs().max() > 1e-2


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_computed_again_in_a_backward_pass_are_those_of_its_forward_pass(reentrant: bool) -> None:
    m, ids = fresh("llama", CASES["rerope"]).train(), tokens(1)
    enable = getattr(m, "activation_checkpointing_enable", m.gradient_checkpointing_enable)  # its name from 5.24 on
    enable({"use_reentrant": reentrant})
    m(ids, use_cache=False).logits.sin().sum().backward()
    want = [p.grad.clone() for p in m.parameters() if p.grad is not None]
    m.zero_grad()
    loss = m(ids, use_cache=False).logits.sin().sum()
    if not reentrant:  # the other kind hands its layers copies, which know no pass
        hf_longattn.apply(m, CASES["alibi"])
    loss.backward()
    for got, old in zip([p.grad for p in m.parameters() if p.grad is not None], want, strict=True):
        close(got, old, 0)


def test_an_interrupted_pass_is_over() -> None:
    m = fresh("llama", CASES["rerope"])
    interrupt(m)
    hf_longattn.remove(m)
    assert m.config._attn_implementation == "sdpa"
    assert current_pass() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_waits_for_no_thread_of_its_parent() -> None:
    m, ids = fresh("llama", CASES["rerope"]), tokens(1)
    inside, over = threading.Event(), threading.Event()
    m.model.layers[1].register_forward_pre_hook(lambda *_: inside.set() or (over.wait(60) and None))
    with ThreadPoolExecutor(1) as pool:
        passing = pool.submit(logits, m, ids)
        assert inside.wait(60)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
            child = multiprocessing.get_context("fork").Process(target=hf_longattn.apply, args=(m, CASES["alibi"]))
            child.start()
        child.join(60)
        over.set()
        passing.result(timeout=60)
    if child.exitcode is None:
        child.kill()
    assert child.exitcode == 0


def test_copies_and_pickles_of_a_model_change_apart() -> None:
    m, ids = fresh("llama", CASES["rerope"]), tokens(1)
    want = logits(m, ids)
    for twin in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        close(logits(twin, ids), want, 1e-6)
        hf_longattn.remove(twin)
        close(logits(m, ids), want, 1e-6)
    assert not m.model._forward_hooks.keys() & hf_longattn.remove(m).model._forward_hooks.keys()


@pytest.mark.parametrize("change", ["remove", "update", "set_attn_implementation"])
def test_models_built_on_one_config_change_apart(change: str) -> None:
    ids, one = tokens(1), fresh("llama", CASES["rerope"])
    config = one.config
    a, b = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    for m in (a, b):
        m.load_state_dict(one.state_dict())
    want = logits(a, ids)
    close(logits(b, ids), want, 1e-6)
    if change == "remove":
        hf_longattn.remove(b)
    elif change == "update":
        hf_longattn.update(b, window=3)
    else:
        b.set_attn_implementation("sdpa")
    assert (logits(b, ids) - want).abs().max() > 1e-2
    close(logits(a, ids), want, 1e-6)
    assert a.config is config
    assert b.config is not config
    assert all(m.config is b.config for m in b.modules() if hasattr(m, "config"))
