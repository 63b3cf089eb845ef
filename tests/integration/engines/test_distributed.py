"""Heads, weights and tokens split over two processes (gloo), against one process: logits and gradients."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import tiny
import torch
from distributed_worker import (
    ALL_SPLIT,
    OWN,
    PARALLEL,
    RANKS,
    RECIPES,
    RESUMED,
    SAVED,
    SHARDED,
    SPLIT,
    evaluate,
    gradients,
    made,
    measured,
    overrides,
    sequences,
    step,
    trainer,
)
from helpers import close, crossed, tokens
from own_methods import METHODS
from transformers import AutoModelForCausalLM

import hf_longattn
from hf_longattn.slots import registry

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
KIT = ROOT / "tests" / "kit"
SECONDS = 400
Record = Callable[[str, object], None]


def together(out: Path, jobs: Sequence[str], cases: Sequence[str]) -> Path:
    """Runs jobs of the worker, one after the other, in two processes; both are stopped when one fails or time is up."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(KIT)])}
    environment |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    running = []
    for rank in range(RANKS):
        command = [
            sys.executable,
            str(KIT / "distributed_worker.py"),
            ",".join(jobs),
            str(rank),
            str(out / "store"),
            str(out),
            *cases,
        ]
        own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (out / f"{rank}.log").open("w") as log:
            running.append(subprocess.Popen(command, env=own, stdout=log, stderr=log))

    def logs() -> str:
        return "\n".join((out / f"{rank}.log").read_text()[-3000:] for rank in range(RANKS))

    end = time.monotonic() + SECONDS
    try:
        codes: list[int | None] = [None]
        while None in codes:
            time.sleep(0.05)
            codes = [process.poll() for process in running]
            assert not any(codes), logs()  # one that fails leaves the other waiting
            assert time.monotonic() < end, logs()
    finally:
        for process in running:
            process.kill()
            process.wait()
    return out


#: DeepSpeed's jobs come last: its engine leaves settings behind.
JOBS = ("tensor_parallel", "split_sequence", "recipes", "train", "measured", "evaluate", "fully_sharded")
DEEPSPEED = ("zero3", "deepspeed", "accelerated") if importlib.util.find_spec("deepspeed") else ()
OTHERS = tuple(case for case in SPLIT if case not in SHARDED)
needs_deepspeed = pytest.mark.skipif(not DEEPSPEED, reason="deepspeed is not installed")


@pytest.fixture(scope="module")
def own_methods() -> Iterator[None]:
    with patch.dict(registry._loaded):
        for kind in METHODS:
            hf_longattn.register(kind)
        yield


@pytest.fixture(scope="module")
def out(own_methods: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of every job, from one start of both processes; and the models they begin with."""
    path = tmp_path_factory.mktemp("distributed")
    for case in (*SPLIT, *OWN):
        made(case).save_pretrained(path / case)
    tiny.save(path / "model")
    tiny.text(path / "text.txt", 500)
    texts = [tiny.text(path / "one.txt", length, length).read_text() for length in range(5, 45)]
    (path / "table.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return together(path, [*JOBS, *DEEPSPEED], SHARDED)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of weights that are sharded under the methods that `out` leaves out."""
    path = tmp_path_factory.mktemp("others")
    for case in OTHERS:
        made(case).save_pretrained(path / case)
    return together(path, ["fully_sharded", *DEEPSPEED[:1]], OTHERS)


by_cases = pytest.mark.parametrize(("cases", "folder"), crossed([(SHARDED, "out"), (OTHERS, "others")], 2))


def of(out: Path, job: str) -> list[dict[str, Any]]:
    """What a job returned in each process."""
    return [torch.load(out / f"{job}.{rank}") for rank in range(RANKS)]


def test_tensor_parallel(out: Path, record_property: Record) -> None:
    """tp_plan="auto": slopes, calibration and learned factors per head are those of the heads at hand; shared ones get the
    gradients of all heads.
    """
    found = of(out, "tensor_parallel")
    for case in (*SPLIT, *OWN):
        m = made(case).train()
        logits, _ = step(m, input_ids=tokens())
        expected = gradients(m)
        for rank in range(RANKS):
            got = found[rank][case]
            close(got["logits"], logits, 5e-5, case)
            assert got["gradients"].keys() == expected.keys()
            for name, gradient in expected.items():
                close(got["gradients"][name], gradient, 1e-5, f"{case} {name}")
        if case in SPLIT:
            record_property("tensor parallel", case)


@by_cases
def test_fully_sharded_weights(
    cases: tuple[str, ...], folder: str, request: pytest.FixtureRequest, record_property: Record
) -> None:
    """FSDP2: gradients and two steps, saving whole and sharded, and going on from a checkpoint."""
    out = request.getfixturevalue(folder)
    found = of(out, "fully_sharded")
    for case in cases:
        m = AutoModelForCausalLM.from_pretrained(out / case).train()
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.01)
        halves = tokens().chunk(RANKS)
        losses = [[step(m, input_ids=half)[1] for half in halves]]
        for name, gradient in gradients(m).items():
            close(found[0][case]["gradients"][name], gradient / RANKS, 1e-5, f"{case} {name}")
        record_property("FSDP2", case)
        if case not in SAVED:
            continue
        for parameter in m.parameters():
            parameter.grad /= RANKS
        optimizer.step()
        with torch.no_grad():
            saved = AutoModelForCausalLM.from_pretrained(out / f"{case}.saved")
            close(saved(tokens()).logits, m(tokens()).logits, 5e-4, case)
            losses += [[m(half, use_cache=False).logits.log_softmax(-1)[..., 3].mean() for half in halves]] * 2
        for rank in range(RANKS):
            got = torch.stack(found[rank][case]["losses"])
            close(got, torch.stack([row[rank] for row in losses]), 5e-4, case)
            assert got[1] == got[2]  # resumed
    if "logn_learned" in cases:
        plain = hf_longattn.remove(AutoModelForCausalLM.from_pretrained(out / "logn_learned"))
        for each in found:
            assert "apply the method first, then fully_shard" in each["late"]
            close(each["removed"], plain(tokens()).logits, 5e-5, "removed")


def check_sequences(found: list[dict[str, Any]], record_property: Record, engine: str, batch: int | None = None) -> None:
    for case in ALL_SPLIT:
        family, _, name = case.rpartition("/")
        for kind, (ids, positions) in sequences(case).items():
            m = made(name, family or "llama").train()
            logits, _ = step(m, input_ids=ids[:batch], position_ids=positions[:batch])
            got = [f[f"{case} {kind}"] for f in found]
            close(torch.cat([g["logits"] for g in got], 1), logits, 5e-5, f"{case} {kind}")
            for parameter, gradient in gradients(m).items():
                close(got[0]["gradients"][parameter], gradient, 1e-5, f"{case} {kind} {parameter}")
        record_property(engine, name)
    assert all("those of the whole sequence" in f["local"] for f in found)


def test_a_sequence_split_over_processes(out: Path, record_property: Record) -> None:
    """The exchange of `split_sequence`: logits of each half and gradients, of one text and of packed documents."""
    check_sequences(of(out, "split_sequence"), record_property, "split_sequence")


LOGGED = ("loss", "loss_0_6", "loss_6_12", "loss_12_18", "loss_18_24", "eval_loss_24", "eval_loss_48", "grad_norm")


def logged(entries: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: entry[k] for k in LOGGED if k in entry} for entry in entries if "train_runtime" not in entry]


@pytest.mark.parametrize("kind", PARALLEL)
def test_a_recipe_over_processes(kind: str, out: Path) -> None:
    """Windows in parts, or each process its own: what is logged and saved is what one process logs and saves."""
    pytest.importorskip("omegaconf")
    from hf_longattn.training import load_recipe, prepare, run

    found = of(out, "recipes")
    alone = run(prepare(load_recipe(RECIPES[kind], overrides(out, kind, 1))))
    want = logged(alone["log"])
    assert len(want) == 6
    for log in (f[which] for f in found for which in (kind, f"{kind}, resumed") if which in f):
        for got, expected in zip(logged(log), want, strict=True):
            assert got == pytest.approx(expected, abs=2e-5)
    metrics = json.loads((out / f"{kind}.2" / "metrics.json").read_text())
    assert (metrics["processes"], metrics["tokens"]) == (RANKS, alone["tokens"])
    for name, by_length in alone["measured"].items():
        for length, values in by_length.items():
            assert metrics["measured"][name][str(length)]["loss"] == pytest.approx(values["loss"], abs=2e-5)
    load = AutoModelForCausalLM if kind == "windows" else pytest.importorskip("peft").AutoPeftModelForCausalLM
    one, two = (load.from_pretrained(out / f"{kind}.{n}").eval() for n in (1, 2))
    with torch.no_grad():
        close(two(tokens()).logits, one(tokens()).logits, 1e-4, kind)
        if kind in RESUMED:
            whole = load.from_pretrained(out / f"{kind}.2.whole").eval()
            close(two(tokens()).logits, whole(tokens()).logits, 0, "resumed")


def test_a_command_over_processes_says_once_what_is_written(out: Path) -> None:
    found = of(out, "train")
    assert [f["status"] for f in found] == [0, 0], found
    assert [f["output"].count("Written:") for f in found] == [1, 0]
    written, run = (json.loads((out / folder / "metrics.json").read_text()) for folder in ("trained", "distillation.2"))
    assert written["log"][0]["loss"] == run["log"][0]["loss"]


def test_held_out_losses_of_sharded_weights(out: Path) -> None:
    pytest.importorskip("omegaconf")
    for found in of(out, "measured"):
        for length, values in measured(out, 1).items():
            assert found[length]["loss"] == pytest.approx(values["loss"], abs=2e-5)


#: What differs between two runs of one evaluation.
TIMES = ("seconds", "cpu_seconds", "command", "crc32")


def test_an_evaluation_in_turns(out: Path) -> None:
    """The rows are those of one process, in the same order; the first process alone writes and prints."""
    found = of(out, "evaluate")
    assert [f["status"] for f in found] == [0, 0], found
    assert "Mean loss of the same tokens" in found[0]["output"]
    assert found[1]["output"] == ""
    assert evaluate(out, 1)["status"] == 0
    rows = [(out / f"report.{n}" / "rows.jsonl").read_text().splitlines() for n in (1, RANKS)]
    assert len(rows[0]) == 2 * 2 * (1 + 2)
    for one, two in zip(*rows, strict=True):
        a, b = ({k: v for k, v in json.loads(row).items() if k not in TIMES} for row in (one, two))
        assert a == b
    assert (out / "report.2" / "index.html").exists()


@needs_deepspeed
def test_a_sequence_split_by_deepspeed(out: Path, record_property: Record) -> None:
    """The same by DeepSpeed's Ulysses."""
    check_sequences(of(out, "deepspeed"), record_property, "Ulysses (DeepSpeed)", batch=1)


@needs_deepspeed
@by_cases
def test_weights_sharded_by_deepspeed(
    cases: tuple[str, ...], folder: str, request: pytest.FixtureRequest, record_property: Record
) -> None:
    """Its engine under ZeRO-3: logits, gradients and the weights after a step."""
    found = of(request.getfixturevalue(folder), "zero3")
    for case in cases:
        m = made(case).train()
        optimizer = torch.optim.SGD(m.parameters(), lr=1.0)
        logits, _ = step(m, input_ids=tokens())
        expected = gradients(m)
        optimizer.step()
        close(torch.cat([f[case]["logits"] for f in found]), logits, 5e-5, case)
        for name, parameter in m.named_parameters():
            close(found[0][case]["gradients"][name], expected[name], 1e-5, f"{case} {name}")
            close(found[0][case]["stepped"][name], parameter.detach(), 1e-5, f"{case} {name}")
        record_property("ZeRO-3 (DeepSpeed)", case)


@needs_deepspeed
def test_trainer_splits_sequences_by_accelerate(out: Path, tmp_path: Path) -> None:
    """Loss and gradient norm of each step, learned factors among the parameters."""
    want = trainer(tmp_path, use_cpu=True)
    for found in of(out, "accelerated"):
        for got, expected in zip(found, want, strict=True):
            assert got == pytest.approx(expected, rel=1e-4)
