"""Heads, weights and tokens split over two processes (gloo), against one process: logits and gradients."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from distributed_worker import ALL_SPLIT, RANKS, SPLIT, gradients, made, sequences, step
from helpers import close, tokens

HERE = Path(__file__).parent
SECONDS = 150


def together(job: str, out: Path) -> list[dict[str, Any]]:
    """What a job of the worker returns in each process; all are stopped when one fails or time is up."""
    command = [sys.executable, str(HERE / "distributed_worker.py"), job]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    environment |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    running = []
    for rank in range(RANKS):
        own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        arguments = [*command, str(rank), str(out / f"{job}.store"), str(out)]
        with (out / f"{job}.{rank}.log").open("w") as log:
            running.append(subprocess.Popen(arguments, env=own, stdout=log, stderr=log))
    try:
        for rank, process in enumerate(running):
            assert process.wait(SECONDS) == 0, (out / f"{job}.{rank}.log").read_text()[-4000:]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return [torch.load(out / f"{job}.{rank}") for rank in range(RANKS)]


def test_tensor_parallel(tmp_path: Path) -> None:
    """tp_plan="auto": slopes, calibration and learned factors per head are those of the heads at hand."""
    for case in (*SPLIT, "output_layer_norm"):
        made(case).save_pretrained(tmp_path / case)
    found = together("tensor_parallel", tmp_path)
    for case in SPLIT:
        m = made(case).train()
        logits, _ = step(m, input_ids=tokens())
        expected = gradients(m)
        for rank in range(RANKS):
            got = found[rank][case]
            close(got["logits"], logits, 5e-5, case)
            assert got["gradients"].keys() == expected.keys()
            for name, gradient in expected.items():
                close(got["gradients"][name], gradient, 1e-5, f"{case} {name}")
    assert all("normalises over all heads" in f["refused"] for f in found)


@pytest.mark.parametrize("job", ["split_sequence", "deepspeed"])
def test_a_sequence_split_over_processes(job: str, tmp_path: Path) -> None:
    """Ulysses: logits of each half and gradients, of one text and of packed documents."""
    batch = None
    if job == "deepspeed":
        pytest.importorskip("deepspeed")
        batch = 1
    found = together(job, tmp_path)
    for case in ALL_SPLIT:
        family, _, name = case.rpartition("/")
        for kind, (ids, positions) in sequences().items():
            m = made(name, family or "llama").train()
            logits, _ = step(m, input_ids=ids[:batch], position_ids=positions[:batch])
            expected = gradients(m)
            both = torch.cat([f[f"{case} {kind}"]["logits"] for f in found], 1)
            close(both, logits, 5e-5, f"{case} {kind}")
            for name_, gradient in expected.items():
                close(found[0][f"{case} {kind}"]["gradients"][name_], gradient, 1e-5, f"{case} {kind} {name_}")
    assert all("those of the whole sequence" in f["refused"] for f in found)
