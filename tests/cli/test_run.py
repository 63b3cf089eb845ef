"""Tools that never import this package, started by `hf-longattn run`: the method is there in each of their processes."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_longattn
from hf_longattn.cli.run import found
from hf_longattn.integration.caches import PAGES

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "model"
    model = AutoModelForCausalLM.from_pretrained(tiny.save(path), attn_implementation="logn", longattn={"train_length": 8})
    model.save_pretrained(path)
    return path


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a command prints under `hf-longattn run`, in an environment in which only that finds the package."""
    return subprocess.run(
        [sys.executable, "-m", "hf_longattn.cli", "run", "--", *map(str, command)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


SCRIPT = """
import multiprocessing, sys, torch, transformers
def logits(path):
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert model.config._attn_implementation == "hf_longattn.logn"
    return model(torch.arange(2, 30)[None]).logits[0, -1].tolist()
if __name__ == "__main__":
    assert "hf_longattn.config" in sys.modules
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(logits, sys.argv[1:])[0])
"""


@pytest.mark.slow
@torch.no_grad()
def test_run_reaches_the_processes_that_a_command_starts(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import sys; print('theirs', file=sys.stderr)")
    path = os.pathsep.join([str(ROOT), str(tmp_path / "site")])
    launch = [BIN / "accelerate", "launch", "--cpu", "--num_processes=1", "--num_machines=1", "--mixed_precision=no"]
    done = run(*launch, "--dynamo_backend=no", tmp_path / "script.py", checkpoint, cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    expected = AutoModelForCausalLM.from_pretrained(checkpoint)(torch.arange(2, 30)[None]).logits[0, -1]
    torch.testing.assert_close(torch.tensor(json.loads(done.stdout.splitlines()[-1])), expected, atol=1e-6, rtol=0)
    assert "theirs" in done.stderr  # the user's own sitecustomize runs, too


@pytest.mark.slow
def test_run_gives_back_the_status_and_names_what_is_missing(tmp_path: Path) -> None:
    assert run(sys.executable, "-c", "raise SystemExit(7)", cwd=tmp_path).returncode == 7
    for command in ([], ["no-such-command"]):
        done = run(*command, cwd=tmp_path)
        assert done.returncode == 2
        assert "run -- trl sft" in done.stderr if not command else "no-such-command" in done.stderr


def test_run_finds_what_lies_beside_it_in_an_environment_that_is_not_activated(tmp_path: Path, monkeypatch: Any) -> None:
    """Before a command of that name in PATH, which may be of a Python without this package."""
    for folder, names in (("env", ("transformers",)), ("path", ("transformers", "other"))):
        for name in names:
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / name).write_text("#!/bin/sh\n")
            (tmp_path / folder / name).chmod(0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "env"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert found("transformers") == str(tmp_path / "env" / "transformers")
    assert found("other") == str(tmp_path / "path" / "other")
    assert found(str(tmp_path / "path" / "transformers")) == str(tmp_path / "path" / "transformers")
    assert found("none") is None


@pytest.mark.slow
def test_an_environment_that_is_not_activated_runs_its_own_commands(tmp_path: Path) -> None:
    done = run("python", "-c", "import sys; print(sys.prefix)", cwd=tmp_path, PATH="/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == sys.prefix


def test_a_python_without_this_package_says_so(tmp_path: Path) -> None:
    bootstrap = ROOT / "hf_longattn" / "cli" / "bootstrap"
    code = "import json\ntry:\n    import transformers\nexcept ImportError as error:\n    print(error)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(bootstrap)!r}); import sitecustomize\n{code}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        timeout=60,
    )
    assert "started by `hf-longattn run`, but" in done.stdout, done.stderr
    assert "has no hf_longattn" in done.stdout


@pytest.mark.slow
def test_transformers_serve_answers_as_generate_does(
    checkpoint: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Continuous batching behind HTTP: two requests at once, one of them streamed."""
    openai = pytest.importorskip("openai")
    pytest.importorskip("uvicorn")
    pytest.importorskip("fastapi")
    if not PAGES:
        pytest.skip("this release of transformers has another paged cache")
    tokenizer, model = AutoTokenizer.from_pretrained(checkpoint), AutoModelForCausalLM.from_pretrained(checkpoint)
    checkpoint = hf_longattn.save(model, tmp_path / "strict", tokenizer=tokenizer, strict=True)  # it looks classes up by name
    texts = [tiny.text(tmp_path / "text", n, seed=n).read_text() for n in (50, 20)]
    expected = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        expected.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    serve = [
        sys.executable,
        "-m",
        "transformers.cli.transformers",
        "serve",
        str(checkpoint),
        "--continuous-batching",
        "--port",
        str(port),
        "--device",
        "cpu",
    ]
    serve += ["--cb-num-blocks", "64", "--cb-max-batch-tokens", "32"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hf_longattn.cli", "run", "--", *serve]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, env=environment, stdout=log, stderr=log) as server:
        try:
            client = openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0, timeout=60)
            ask = functools.partial(client.completions.create, model=str(checkpoint), max_tokens=12, temperature=0)
            for _ in range(240):
                if server.poll() is not None:
                    break
                try:
                    whole = ask(prompt=texts[0]).choices[0].text
                    break
                except openai.APIConnectionError:
                    time.sleep(0.25)
            assert server.poll() is None, (tmp_path / "log").read_text()
            streamed = "".join(part.choices[0].text for part in ask(prompt=texts[1], stream=True) if part.choices)
        finally:
            server.terminate()
    assert [whole, streamed] == expected
    record_property("transformers serve", "logn")


@pytest.mark.slow
@torch.no_grad()
def test_the_page_answers_many_prompts_as_generate_does(checkpoint: Path) -> None:
    if not PAGES:
        pytest.skip("this release of transformers has another paged cache")
    page = (ROOT / "docs" / "how-to" / "serve.md").read_text(encoding="utf-8")
    (block,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "generate_batch" in code]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint).eval(), AutoTokenizer.from_pretrained(checkpoint)
    given: dict[str, Any] = {"model": model, "tokenizer": tokenizer}
    exec(block.replace("num_blocks=64", "num_blocks=64, page_size=4, max_batch_tokens=16"), given)
    assert len(given["answers"]) == len(given["prompts"]) == 2
    for prompt, answer in zip(given["prompts"], given["answers"].values(), strict=True):
        assert answer.prompt_ids == prompt
        logits = model(torch.tensor([prompt + answer.generated_tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer.generated_tokens)[:, None])[:, 0]
        torch.testing.assert_close(chosen, logits.max(1).values, atol=1e-4, rtol=0)  # greedy, but for ties


@pytest.mark.slow
def test_trl_trains_and_saves_under_the_method_of_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    rows = [{"text": tiny.text(tmp_path / "text", 200, seed=n).read_text()} for n in range(4)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {"model_name_or_path": checkpoint, "dataset_name": tmp_path / "data", "output_dir": tmp_path / "out"}
    options |= {"max_steps": 1, "use_cpu": "true", "report_to": "none", "max_length": 64, "bf16": "false", "dtype": "float32"}
    done = run(BIN / "trl", "sft", *(f"--{k}={v}" for k, v in options.items()), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["attn_implementation"] == "hf_longattn.logn"
    assert saved["longattn"]["temperature"]["train_length"] == 8
    assert hf_longattn.get_config(AutoModelForCausalLM.from_pretrained(tmp_path / "out")).name == "logn"


@pytest.mark.slow
@torch.no_grad()
def test_the_autoload_package_registers_by_itself(checkpoint: Path, tmp_path: Path) -> None:
    """As pip would install it: its module and its entry points beside the package, which nothing imports."""
    project = tomllib.loads((ROOT / "autoload" / "pyproject.toml").read_text())["project"]
    info = tmp_path / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    points = [f"[{g}]\n" + "\n".join(f"{k} = {v}" for k, v in p.items()) for g, p in project["entry-points"].items()]
    (info / "entry_points.txt").write_text("\n".join(points))
    shutil.copy(ROOT / "autoload" / "hf_longattn_autoload.py", tmp_path)
    code = (
        "import torch, transformers\n"
        f"model = transformers.AutoModelForCausalLM.from_pretrained({str(checkpoint)!r})\n"
        "print(model(torch.arange(2, 30)[None]).logits[0, -1].tolist())"
    )
    expected = AutoModelForCausalLM.from_pretrained(checkpoint)(torch.arange(2, 30)[None]).logits[0, -1]
    for first in (
        "import sys, torch\nassert 'hf_longattn' not in sys.modules\n",
        "from transformers import LlamaForCausalLM\n",
    ):
        done = subprocess.run(
            [sys.executable, "-c", first + code],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])},
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        torch.testing.assert_close(torch.tensor(json.loads(done.stdout.splitlines()[-1])), expected, atol=1e-6, rtol=0)
