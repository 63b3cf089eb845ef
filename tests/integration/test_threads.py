"""Many threads on one model, and two models on one config: nothing computes what was not asked for."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES
from helpers import close, fresh, logits, stock, tokens
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.integration.caches import CACHE
from hf_longattn.integration.changes import changing, disable
from hf_longattn.integration.forward_context import current_pass
from hf_longattn.integration.gate import gate_of
from hf_longattn.integration.observer import observe
from hf_longattn.integration.state import state_of


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


def in_a_pass(m: Any, what: Callable[[], Any]) -> torch.Tensor:
    """The logits of a pass in whose second layer another thread does something, to its end."""

    def once(*_: Any) -> None:
        handle.remove()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(what).result(timeout=60)

    handle = m.model.layers[1].register_forward_pre_hook(once)
    return logits(m, tokens(1))


LEARNED = LongAttnConfig.preset("logn+output_layer_norm", train_length=8, learned=True)
#: What a model runs, and what another thread does to it in the midst of a pass.
CHANGES: dict[str, tuple[LongAttnConfig, Any]] = {
    "apply": (CASES["rerope"], lambda m: hf_longattn.apply(m, CASES["alibi"])),
    "update": (CASES["scale_invariant"], lambda m: hf_longattn.update(m, strength=0.25)),
    "remove": (CASES["rerope"], hf_longattn.remove),
    "remove what learns": (LEARNED, hf_longattn.remove),
    "set sdpa": (CASES["rerope"], lambda m: m.set_attn_implementation("sdpa")),
    "disable": (CASES["rerope"], disable),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_during_a_pass_is_refused(what: str) -> None:
    config, change = CHANGES[what]
    m, ids = fresh("llama", config), tokens(1)
    old = logits(m, ids)
    with pytest.raises(RuntimeError, match="LlamaForCausalLM is changed while a forward pass of it runs"):
        in_a_pass(m, lambda: change(m))
    close(logits(m, ids), old, 0)
    change(m)
    assert (logits(m, ids) - old).abs().max() > 1e-3


def test_a_change_in_a_hook_of_its_own_pass_is_refused() -> None:
    m, ids = fresh("llama", CASES["scale_invariant"]), tokens(1)
    handle = m.model.layers[1].register_forward_pre_hook(lambda *_: hf_longattn.update(m, strength=0.5) and None)
    with pytest.raises(RuntimeError, match="or in a hook"):
        logits(m, ids)
    handle.remove()
    close(logits(m, ids), logits(fresh("llama", CASES["scale_invariant"]), ids), 1e-6)


def test_what_was_is_given_back_once_a_pass_has_ended() -> None:
    m, ids = fresh("llama", CASES["rerope"]), tokens(1)
    want, inside, over = logits(m, ids), threading.Event(), threading.Event()
    for_a_while = hf_longattn.using(m, CASES["alibi"])
    for_a_while.__enter__()
    under = logits(m, ids)
    handle = m.model.layers[1].register_forward_pre_hook(lambda *_: inside.set() or (over.wait(60) and None))
    with ThreadPoolExecutor(2) as pool:
        passing = pool.submit(logits, m, ids)
        assert inside.wait(60)
        giving = pool.submit(for_a_while.__exit__, None, None, None)
        with pytest.raises(TimeoutError):
            giving.result(timeout=0.1)
        over.set()
        close(passing.result(timeout=60), under, 0)
        giving.result(timeout=60)
    handle.remove()
    close(logits(m, ids), want, 1e-6)


def test_what_was_is_not_given_back_in_a_hook_of_a_pass() -> None:
    m = fresh("llama", CASES["rerope"])
    for_a_while = hf_longattn.using(m, CASES["alibi"])
    for_a_while.__enter__()
    handle = m.model.layers[1].register_forward_pre_hook(lambda *_: for_a_while.__exit__(None, None, None) and None)
    with pytest.raises(RuntimeError, match="or in a hook"):
        logits(m, tokens(1))
    handle.remove()


def test_a_pass_that_begins_beside_a_change_waits_for_it() -> None:
    m, ids = fresh("llama", CASES["rerope"]), tokens(1)
    want = logits(hf_longattn.apply(copy.deepcopy(m), CASES["alibi"]), ids)
    with ThreadPoolExecutor(1) as pool:
        with changing(m):
            passing = pool.submit(logits, m, ids)
            hf_longattn.apply(m, CASES["alibi"])
        close(passing.result(timeout=60), want, 1e-6)


def waiting(m: Any, what: Callable[[], Any], before: Callable[[], Any]) -> Any:
    """What another thread returns that reaches the gate of a model before that is changed."""
    gate = gate_of(state_of(m) or m)
    asked = threading.Event()

    class Lock:
        def __enter__(self) -> None:
            asked.set()
            held.acquire()

        def __exit__(self, *_: Any) -> None:
            held.release()

    held = gate.lock
    with ThreadPoolExecutor(1) as pool, changing(m):
        gate.lock = Lock()  # type: ignore[assignment]
        other = pool.submit(what)
        assert asked.wait(60)
        gate.lock = held
        before()
    return other.result(timeout=60)


def anew(m: Any) -> None:
    hf_longattn.apply(hf_longattn.remove(m), CASES["alibi"])


def test_a_pass_that_waited_while_a_method_was_taken_out_runs_what_is_there() -> None:
    m, ids = fresh("llama", CASES["rerope"]), tokens(1)
    logits(m, ids)  # its layers are known to lie as they do
    want = logits(hf_longattn.apply(copy.deepcopy(m), CASES["alibi"]), ids)
    close(waiting(m, lambda: logits(m, ids), lambda: anew(m)), want, 1e-6)
    plain = logits(hf_longattn.remove(copy.deepcopy(m)), ids)
    close(waiting(m, lambda: logits(m, ids), lambda: hf_longattn.remove(m)), plain, 1e-6)
    assert current_pass() is None


@pytest.mark.parametrize("first", [hf_longattn.remove, lambda m: hf_longattn.apply(m, CASES["alibi"]), anew])
def test_a_change_that_waited_for_one_that_put_another_state_there_keeps_passes_out(first: Any) -> None:
    m = fresh("llama", CASES["rerope"]) if first in (anew, hf_longattn.remove) else stock("llama")

    def second() -> bool:
        with changing(m), ThreadPoolExecutor(1) as pool:
            gate = gate_of(state_of(m) or m)
            return not pool.submit(gate.lock.acquire, False).result(timeout=60)

    assert waiting(m, second, lambda: first(m))


def test_another_model_changes_beside_a_pass() -> None:
    m, other, ids = fresh("llama", CASES["rerope"]), fresh("llama", CASES["rerope"]), tokens(1)
    want = logits(m, ids)
    close(in_a_pass(m, lambda: hf_longattn.remove(other)), want, 0)


def test_one_stops_looking_on_beside_a_pass() -> None:
    m, ids, seen = fresh("llama", CASES["rerope"]), tokens(1), list[int]()
    want = logits(m, ids)
    looking = observe(m, lambda layer, call, output: seen.append(layer.index))
    looking.__enter__()
    close(in_a_pass(m, lambda: looking.__exit__(None, None, None)), want, 0)
    close(logits(m, ids), want, 0)
    assert seen == [0]


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


def test_a_pass_inside_another_runs_what_that_does() -> None:
    m, ids = fresh("llama", CASES["rerope"]), tokens(1)
    want, nested = logits(m, ids), []

    def again(*_: Any) -> None:
        handle.remove()
        nested.append(logits(m, ids))

    handle = m.model.layers[1].register_forward_pre_hook(again)
    close(logits(m, ids), want, 0)
    close(nested[0], want, 0)
    assert current_pass() is None


def test_layers_computed_again_in_a_backward_pass_run_the_method_of_their_forward_pass() -> None:
    m, ids = fresh("llama", CASES["rerope"]).train(), tokens(1)
    enable = getattr(m, "activation_checkpointing_enable", m.gradient_checkpointing_enable)  # its name from 5.24 on
    enable({"use_reentrant": False})  # the other kind hands its layers copies, which know no pass
    loss = m(ids, use_cache=False).logits.sin().sum()
    hf_longattn.apply(m, CASES["alibi"])
    with pytest.raises(RuntimeError, match="changed since their forward pass: change it after backward"):
        loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_method_that_was_given_back_before_the_backward_pass_is_no_other(reentrant: bool) -> None:
    m, ids = fresh("llama", CASES["rerope"]).train(), tokens(1)
    enable = getattr(m, "activation_checkpointing_enable", m.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    found = []
    for between in (None, CASES["alibi"]):
        m.zero_grad()
        loss = m(ids, use_cache=False).logits.sin().sum()
        if between is not None:
            with hf_longattn.using(m, between), torch.no_grad():
                m(ids, use_cache=False)
        loss.backward()
        found.append(m.model.layers[0].self_attn.q_proj.weight.grad.clone())
    close(found[1], found[0], 0)


def test_an_interrupted_pass_is_over() -> None:
    m = fresh("llama", CASES["rerope"])
    interrupt(m)
    hf_longattn.remove(m)
    assert m.config._attn_implementation == "sdpa"
    assert current_pass() is None


@pytest.mark.slow
def test_a_pass_that_died_with_its_thread_keeps_no_cache() -> None:
    m, caches = fresh("llama", CASES["rerope"]), []

    def die(*_: Any) -> None:
        raise SystemExit

    def run() -> None:
        cache = DynamicCache(config=m.config)
        caches.append(weakref.ref(cache))
        with pytest.raises(SystemExit):
            m(tokens(1), **{CACHE: cache})

    m.model.layers[1].register_forward_pre_hook(die)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    gc.collect()
    assert [cache() for cache in caches] == [None]


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


@pytest.mark.parametrize("change", ["apply", "set_attn_implementation", "from_config"])
def test_a_plain_model_on_the_config_of_one_that_gets_a_method_stays_plain(change: str, tmp_path: Path) -> None:
    ids, config = tokens(1), stock("llama").config
    plain = LlamaForCausalLM(config).eval()
    want = logits(plain, ids)
    if change == "from_config":
        AutoModelForCausalLM.from_config(config, attn_implementation="alibi")
    elif change == "apply":
        hf_longattn.apply(LlamaForCausalLM(config), "alibi")
    else:
        LlamaForCausalLM(config).set_attn_implementation("alibi")
    plain.save_pretrained(tmp_path)  # saving puts in what the config says
    close(logits(plain, ids), want, 0)
    assert plain.config is config
    assert "longattn" not in (tmp_path / "config.json").read_text()


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
    close(logits(one, ids), want, 1e-6)
    assert len({id(m.config) for m in (one, a, b)}) == 3
    assert all(m.config is b.config for m in b.modules() if hasattr(m, "config"))
