"""What README.md, CONTRIBUTING.md and docs/ tell a reader to type: Python runs, commands exist and their options are read.

Python blocks run on a tiny model. Commands are taken apart as the shell and their own parser do it; those that need only a
model and a text run too, with tiny ones and short lengths in the places of theirs.
"""

from __future__ import annotations

import functools
import itertools
import re
import shlex
import shutil
import tomllib
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
import release
import tiny
import torch
from commands import check_ours, check_script, ours
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

import hf_longattn
from hf_longattn.cli import app
from hf_longattn.evaluation.measures.copies import TAIL
from hf_longattn.slots.method import length_of

pytestmark = pytest.mark.filterwarnings("ignore::hf_longattn.UntrainedWarning")
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
FIRST_WORDS = ("hf-longattn", "make", "python", "pip", "accelerate", "torchrun", "git", ".ci/run")
#: Examples that other tests run: with data, with several processes, with a server.
ELSEWHERE = {"add-a-method.md", "own-methods.md", "share.md", "engines.md", "serve.md", "frameworks.md"}
#: Blocks that go on where the one before them ends.
GO_ON = {"docs/how-to/long-documents.md-1"}


def python_blocks(elsewhere: bool = False) -> dict[str, str]:
    found = {}
    for page in PAGES:
        if (page.name in ELSEWHERE) is elsewhere:
            blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
            for n, code in enumerate(blocks):
                found[f"{page.relative_to(ROOT)}-{n}"] = code
    return found


def command_lines(spans: bool) -> dict[str, list[str]]:
    """Every command of an indented or fenced block, or of the spans of prose, as its words; by page and text."""
    found = {}
    for page in PAGES:
        text = re.sub(r"```(?!bash|sh|console)\w+\n.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        if spans:
            lines = [" ".join(s.split()) for s in re.findall(r"(?<!`)`([^`]+)`(?!`)", text) if " " in s]
        else:
            lines = re.findall(r"```(?:bash|sh|console)?\n(.*?)```", text, re.DOTALL)
            lines.append("\n".join(line[4:] for line in text.splitlines() if line.startswith("    ")))
        for line in "\n".join(lines).replace("\\\n", " ").splitlines():
            words = re.split(r"\s{2,}#", line.strip())[0].strip()
            if words.split(" ")[0] in FIRST_WORDS:
                found[f"{page.relative_to(ROOT)}: {words}"] = shlex.split(words)
    return found


def without_own_methods(words: list[str]) -> list[str]:
    """A command with a method of the package in place of the one that --import brings (test_own_methods.py has that one)."""
    if "--import" not in words:
        return words
    at = words.index("--import")
    return [w.replace("root_logn", "logn") for w in words[:at] + words[at + 2 :]]


PYTHON, COMMANDS, SPANS = python_blocks(), command_lines(spans=False), command_lines(spans=True)


CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of twelve layers "trained" at 8,192 tokens, and one of two layers at 1,024; texts, and a file of settings."""
    path = tmp_path_factory.mktemp("blocks")
    tiny.save(path / "model", trained=1024)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(path / "model")
    config = AutoConfig.from_pretrained(path / "model", num_hidden_layers=12, max_position_embeddings=8192)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path / "deep")
    tiny.tokenizer().save_pretrained(path / "deep")
    for name in ("model", "deep"):
        base = hf_longattn.apply(AutoModelForCausalLM.from_pretrained(path / name), "rerope", window=64)
        get_peft_model(base, LoraConfig(target_modules=["q_proj"])).save_pretrained(path / f"{name}-adapter")
    tiny.text(path / "book.txt", 6000)
    (path / "settings.yaml").write_text("named: {method: 'rerope:window=128'}\n")
    (path / "qa.jsonl").write_text('{"context": "a sea", "question": "who?", "answer": "she"}\n' * 2)
    return path


# Python ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("block", PYTHON)
def test_python(block: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("book", "control"):
        shutil.copytree(home / "deep-adapter", tmp_path / "runs" / name)
    given, code = names(home, tmp_path), code_of(block, home)
    if "peft" in code:
        peft = given["peft"] = pytest.importorskip("peft")
        given["model"] = hf_longattn.apply(given["model"], "rerope")
        given["model"] = peft.get_peft_model(given["model"], peft.LoraConfig(target_modules=["q_proj"]))
    with torch.no_grad():
        exec(compile(code, block, "exec"), given)
        assert given["model"](given["input_ids"][:, :16]).logits.isfinite().all()


def code_of(block: str, home: Path) -> str:
    """A block, behind the one that it goes on with, on a small model."""
    page, _, n = block.rpartition("-")
    code = PYTHON[f"{page}-{int(n) - 1}"] + PYTHON[block] if block in GO_ON else PYTHON[block]
    return release.HUB.sub(repr(str(home / "deep")), release.LONG.sub("300", code))


def names(home: Path, folder: Path) -> dict[str, Any]:
    """What blocks take for granted."""
    name = str(home / "deep")
    ids = torch.randint(2, 90, (1, 1100), generator=torch.Generator().manual_seed(0))
    config, model = AutoConfig.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name).eval()
    given: dict[str, Any] = {"torch": torch, "hf_longattn": hf_longattn, "LongAttnConfig": hf_longattn.LongAttnConfig}
    given |= {"AutoModelForCausalLM": AutoModelForCausalLM, "AutoConfig": AutoConfig}
    given |= {"name": name, "config": config, "model": model, "folder": folder, "rows": [["0", 0.5, 0.25]]}
    given |= {"input_ids": ids, "tokens": ids.repeat(1, 2), "batches": [ids], "labels": ids}
    given |= {"ask": list, "tokenizer": tiny.tokenizer()}
    given["tokenizer"].pad_token = given["tokenizer"].eos_token
    given["tokenizer"].chat_template = CHAT
    given["texts"] = [(home / "book.txt").read_text(encoding="utf-8")]
    given["document"] = given["texts"][0][:1000]
    given["positions"] = torch.cat([torch.arange(1000), torch.arange(7900, 8000)])[None]
    return given


@pytest.mark.slow
def test_questions_of_a_batch_are_answered_as_one_by_one_and_without_a_cache(home: Path, tmp_path: Path) -> None:
    given = names(home, tmp_path)
    hf_longattn.apply(given["model"], "rerope+infoscale", window=256, train_length=512)
    exec(code_of("docs/how-to/long-documents.md-1", home).replace("max_new_tokens=100", "max_new_tokens=12"), given)
    tokenizer, written, ids = (given[name] for name in ("tokenizer", "written", "ids"))
    for row, question in zip(written, given["questions"], strict=True):
        whole = torch.tensor([given["prompt"](question)])
        alone = given["model"].generate(whole, max_new_tokens=12, do_sample=False)[0, whole.shape[1] :]
        answer = tokenizer.decode(alone, skip_special_tokens=True)
        assert answer == given["ask"](question) == tokenizer.decode(row[ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("block", python_blocks(elsewhere=True))
def test_python_that_runs_elsewhere_names_what_there_is(block: str) -> None:
    code = python_blocks(elsewhere=True)[block]
    compile(code, block, "exec")
    exec("\n".join(re.findall(r"^(?:from|import) hf_longattn.*$", code, re.MULTILINE)))
    for path in re.findall(r"\bhf_longattn((?:\.\w+)+)\(", code):
        assert callable(functools.reduce(getattr, path[1:].split("."), hf_longattn)), path


# commands -------------------------------------------------------------------------------------------------------------


def check_make(words: list[str]) -> None:
    for target in (w for w in words if "=" not in w):
        recipe = re.search(rf"^{re.escape(target)}:.*\n((?:\t.*\n)*)", MAKEFILE, re.MULTILINE)
        assert recipe, f"the Makefile has no target {target}"
        for given in (w for w in words if "=" in w):
            variable, value = given.split("=", 1)
            reads = f"$({variable}" in recipe[1] or (variable == "T" and "$(AREA)" in recipe[1])
            assert reads or variable in ("PYTHON", "VENV"), f"{target} does not read {variable}"
            if variable == "ARGS":
                source = re.search(r"(\S+\.py)[^\n]*\$\(ARGS\)", recipe[1])
                assert source
                check_script(source[1], shlex.split(value))


def check_mention(words: list[str]) -> None:
    """A command in prose, which leaves out what does not matter there."""
    name, *rest = words
    known = {o for p in ours(name).params for o in (*p.opts, *p.secondary_opts)} | {"--help", "--"}
    assert {w for w in itertools.takewhile(lambda w: w != "--", rest) if w.startswith("-")} <= known


@pytest.mark.parametrize("line", [*COMMANDS, *SPANS])
def test_command_exists_and_reads_its_options(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *words = COMMANDS.get(line) or SPANS[line]
    if first == "hf-longattn" or "hf_longattn.cli" in words:
        words = words[words.index("hf_longattn.cli") + 1 :] if "hf_longattn.cli" in words else words
        monkeypatch.chdir(tmp_path)
        for folder in ("long-model", "runs/book"):  # what `push` wants to see
            (tmp_path / folder).mkdir(parents=True)
        if not words[0].startswith("--"):
            (check_ours if line in COMMANDS else check_mention)(without_own_methods(words))
    elif first == "make":
        check_make(words)
    elif first == "python" and words[0].endswith(".py"):
        check_script(words[0], words[1:])
    elif first == "python" and words[0] == "-m" and words[1].startswith("lab."):
        assert (ROOT / words[1].replace(".", "/")).with_suffix(".py").is_file()
    elif first == "pip":
        for package, extras in re.findall(r"([\w.-]+)\[([\w,-]+)\]", line.rpartition(": ")[2]):
            has = EXTRAS if package in (".", "hf_longattn") else metadata(package).get_all("Provides-Extra")
            assert set(extras.split(",")) <= set(has)
    elif first == ".ci/run":
        assert (ROOT / first).is_file()


#: What stands in a command of the docs, and what a small machine takes in its place.
SMALL = {
    r"(?<= )(MODEL|NAME|models/SmolLM2-135M-Instruct|HuggingFaceTB/\S+)(?= |$)": "HOME/model",
    r"model=\S+": "model=HOME/model",
    r"(?<= )(?:FILE|[\w-]+\.txt(?:,[\w-]+\.txt)*)(?= |$)": "HOME/book.txt",
    r"data=('[^']*'|\S+)": "data=HOME/book.txt trainer.max_steps=2 trainer.use_cpu=true length=64 evaluation.tokens=64 "
    "evaluation.samples=2 "
    "trainer.save_steps=10 trainer.logging_steps=5 trainer.eval_strategy=no trainer.disable_tqdm=true",
    r"heldout=\S+|dtype=bfloat16|trainer.max_steps=(100|500)": "",
    r"output=\S+": "output=OUT",
    r"(?<=--adapter )\S+": "mine=HOME/model-adapter",
    r"(?<=--windows )\d+": "1",
    r"(?<=--passages )\d+": "2",
    r"(?<=skip.target_length=)\d+": "512",
    r"(?<=window=)\d+": "128",
    r"(?<=--lengths )\S+": "128,512,1k --targets 64",
    r"(?<=--tasks )loss,copies(?= )": "loss",  # copies need longer texts
    r"(?<=--tasks )(loss,)?long_ppl(?= )": r"\g<0> --near 256",
    r"--tasks ruler (--kinds \S+ )?--lengths \S+": "--tasks ruler --kinds fwe --lengths 1k",
    r"(?<=--questions )\S+": "HOME/qa.jsonl",
    r"(?<=--samples )\d+": "1",
    r"(?<=--length )\S+": "128",
    r"(?<=--to )\S+": "4k",
    r"(?<=--settings )\S+": "HOME/settings.yaml",
    r"(?<=--layers )\S+": "0,1",
    r"(?<=--rows )\S+": "16",
    r"(?<=--out )\S+": "OUT",
}
#: Commands that want more than a model and a text: the Hub, or an answer.
NOT_RUN = ("push", "--help", "--version", "env")


def runnable() -> list[str]:
    full = [w for w in COMMANDS if re.search(r": hf-longattn \w+ .*(--out|data=)", w) and "..." not in w]
    return [line for line in full if not any(f" {word}" in line for word in NOT_RUN)]


@pytest.mark.slow
@pytest.mark.parametrize("line", runnable())
def test_command_runs(line: str, home: Path, tmp_path: Path) -> None:
    text = line.rpartition(": hf-longattn ")[2]
    for pattern, small in SMALL.items():
        text = re.sub(pattern, small, text)
    if text.startswith("train") and "output=" not in text:
        text += " output=OUT"
    words = without_own_methods(shlex.split(text.replace("HOME", str(home)).replace("OUT", str(tmp_path / "out"))))
    result = CliRunner().invoke(app, words)
    assert result.exit_code in ((0, 1) if words[0] == "extend" else (0,)), (words, result.output, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "--dry-run" in words or words[0] == "extend" or any((tmp_path / "out").iterdir())


@pytest.mark.parametrize("line", [line for line in runnable() if re.search(r"--tasks \S*copies", line)])
def test_lengths_of_copies_have_room(line: str) -> None:
    """Which `SMALL` hides."""
    lengths = re.search(r"--lengths (\S+)", line)
    assert lengths
    assert min(map(length_of, lengths[1].split(","))) >= 5 * TAIL


def test_there_is_something_to_check() -> None:
    assert len(PYTHON) > 15
    assert len(runnable()) >= 5
    assert {words[0] for words in COMMANDS.values()} >= {"hf-longattn", "make", "python", "pip"}
