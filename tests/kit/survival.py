"""What a damaged file, a kill, a full disk, a second process or a stranger's checkpoint does: everything is done and
looked at.

python tests/kit/survival.py                         all of it: prints what came of each kind, fails if anything went wrong
python tests/kit/survival.py files --count 200       one part, shorter
python tests/kit/survival.py --rows FILE             a row for every case; the same command again goes on with it
python tests/kit/survival.py --rows FILE --page      what the rows say, into docs/survival.json and docs/explain/survival.md
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import io
import json
import os
import pickle
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SUMMARY, PAGE = ROOT / "docs" / "survival.json", ROOT / "docs" / "explain" / "survival.md"
MEMORY, SECONDS = 6 << 30, 600  # of one attempt; the clock, on a machine that does other things too

# an attempt ---------------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """How an attempt in a process of its own ended.

    Args:
        code: the exit status; 70 for an error that nobody caught, None for a process that was killed.
    """

    code: int | None
    said: str
    seconds: float

    @property
    def refused(self) -> bool:
        """One message, and no traceback."""
        return self.code in (1, 2) and "Traceback" not in self.said and bool(self.said.strip())


def attempt(function: Callable[[], Any], kill_after: float | None = None, enter: Callable[[], Any] = lambda: None) -> Outcome:
    """A function in a fork, which has the libraries imported already; and, if asked for, killed at once after some seconds."""
    with tempfile.TemporaryFile() as file:
        start = time.monotonic()
        if (child := os.fork()) == 0:
            code = 70
            try:
                for stream in (1, 2):
                    os.dup2(file.fileno(), stream)
                sys.stdout = sys.stderr = io.TextIOWrapper(os.fdopen(1, "wb", 0), write_through=True)
                resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(SECONDS)
                enter()
                code = int(function() or 0)
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else int(error.code is not None)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        if kill_after is not None:
            while (left := start + kill_after - time.monotonic()) > 0 and os.waitpid(child, os.WNOHANG)[0] == 0:
                time.sleep(min(left, 0.01))
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            status = os.waitpid(child, 0)[1]
        if "status" not in locals():  # it had ended before the kill came
            status = 0
        file.seek(0)
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        return Outcome(code, file.read().decode(errors="replace"), time.monotonic() - start)


def command(*words: Any) -> Callable[[], None]:
    """`hf-longattn` with these words."""

    def run() -> None:
        from hf_longattn.cli import app

        sys.argv = ["hf-longattn", *map(str, words)]
        app(sys.argv[1:])

    return run


# what is there to damage --------------------------------------------------------------------------------------------------


class Home:
    """A folder with a model, an adapter of it, a text, and rows that were measured of them."""

    def __init__(self, path: Path) -> None:
        import peft
        import tiny

        import hf_longattn

        self.path, self.model, self.adapter, self.text = path, path / "model", path / "adapter", path / "text.txt"
        tiny.save(self.model, trained=64)
        tiny.save(path / "longer", trained=1024)  # what `extend` chooses by has no room in less
        tiny.text(self.text, 600)
        tiny.text(path / "longer.txt", 2200)
        from transformers import AutoModelForCausalLM

        plain = AutoModelForCausalLM.from_pretrained(self.model)
        method = hf_longattn.apply(plain, "logn")
        adapted = peft.get_peft_model(method, peft.LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM"))
        adapted.save_pretrained(self.adapter)
        self.rows = path / "rows"
        self.plan().open(self.rows).run()

    def plan(self) -> Any:
        from hf_longattn.evaluation.options import EvalOptions
        from hf_longattn.evaluation.runner import Runner

        texts = {"text.txt": self.text.read_text(encoding="utf-8")}
        return Runner(EvalOptions(str(self.model), texts, ["logn"], lengths="32,64", targets=16, dtype="float32"))


# files --------------------------------------------------------------------------------------------------------------------

#: What lies where a file should be, of another kind.
FOREIGN: dict[str, bytes] = {
    "nothing": b"",
    "spaces": b"  \n",
    "a page of a server": b"<!DOCTYPE html><html><body>504 Gateway Time-out</body></html>",
    "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n",
    "a picture": b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
    "a list": b"[1, 2, 3]\n",
    "a number": b"17",
    "null": b"null",
    "a pickle": pickle.dumps({"weight": [1.0, 2.0]}),
    "Latin-1": '{"größe": "naïve"}'.encode("latin-1"),
    "an empty mapping": b"{}",
}
VALUES: tuple[Any, ...] = (
    None,
    -1,
    0,
    1,
    3,
    10**9,
    0.5,
    float("nan"),
    "",
    "llama",
    "../../etc/passwd",
    [],
    [1],
    {},
    {"a": 1},
    True,
)


def flipped(data: bytes, rng: random.Random) -> bytes:
    out, first = bytearray(data), rng.random() < 0.5
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(min(len(out), 2048) if first else len(out))
        out[at] ^= 1 << rng.randrange(8)
    return bytes(out)


def changed(data: bytes, rng: random.Random) -> bytes:
    """Of JSON, or of its lines, a value exchanged or left out; of other files, a stretch of zeros."""
    lines = data.split(b"\n")
    which = rng.randrange(len(lines)) if len(lines) > 3 and all(x[:1] == b"{" for x in lines if x) else None
    try:
        tree = json.loads(data if which is None else lines[which])
    except (ValueError, UnicodeDecodeError):
        at = rng.randrange(len(data))
        return data[:at] + bytes(min(64, len(data) - at)) + data[at + 64 :]
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            places.append((node, key))
            if isinstance(value, (dict, list)):
                walk(value)

    if isinstance(tree, (dict, list)):
        walk(tree)
    if places:
        node, key = rng.choice(places)
        if rng.random() < 0.3:
            del node[key]
        else:
            node[key] = rng.choice(VALUES)
    text = json.dumps(tree).encode()
    if which is None:
        return text
    lines[which] = text
    return b"\n".join(lines)


def damaged(data: bytes, others: Sequence[bytes], rng: random.Random) -> tuple[str, bytes]:
    """How a file was damaged, and what it is then."""
    how = rng.choice(("cut off", "cut off", "bits flipped", "bits flipped", "changed", "changed", "changed", "foreign"))
    if how == "cut off":
        return how, data[: rng.randrange(len(data))]
    if how == "bits flipped":
        return how, flipped(data, rng)
    if how == "changed":
        return how, changed(data, rng)
    return how, rng.choice([*FOREIGN.values(), *others])


@dataclass
class Kind:
    """A kind of file, and how it is read as the commands read it.

    Args:
        file: below the home.
        check: what comes before weights are read, where a ValueError, OSError or ImportError is told in one message.
        read: what comes after it, where `Refused` alone is.
    """

    file: str
    check: Callable[[Home], Any]
    read: Callable[[Home], Any] = lambda home: None


def check_weights(home: Home) -> None:
    from hf_longattn.checks import check_model
    from hf_longattn.evaluation.checkpoints import Checkpoint
    from hf_longattn.evaluation.loading import check_setting
    from hf_longattn.evaluation.settings import Setting

    check_model(str(home.model))
    checkpoint = Checkpoint(str(home.model))
    checkpoint.precision()
    check_setting(Setting("unmodified"), checkpoint)


def read_weights(home: Home) -> None:
    import torch

    from hf_longattn.evaluation.checkpoints import Checkpoint
    from hf_longattn.evaluation.loading import load_setting
    from hf_longattn.evaluation.settings import Setting

    loaded = load_setting(Setting("unmodified"), Checkpoint(str(home.model)), "float32")
    with torch.no_grad():
        loaded(torch.ones(1, 4, dtype=torch.long))


def _adapted(home: Home) -> Any:
    from hf_longattn.evaluation.settings import Setting

    return Setting("adapted", adapter=str(home.adapter))


def check_adapter(home: Home) -> None:
    from hf_longattn.evaluation.checkpoints import Checkpoint
    from hf_longattn.evaluation.loading import check_setting

    check_setting(_adapted(home), Checkpoint(str(home.model)))


def read_adapter(home: Home) -> None:
    from hf_longattn.evaluation.checkpoints import Checkpoint
    from hf_longattn.evaluation.loading import load_setting

    load_setting(_adapted(home), Checkpoint(str(home.model)), "float32")


def check_rows(home: Home) -> None:
    plan = home.plan()
    experiment = plan.open(home.rows)
    str(plan.results(experiment))


KINDS = {
    "weights": Kind("model/model.safetensors", check_weights, read_weights),
    "config": Kind("model/config.json", check_weights, read_weights),
    "adapter's weights": Kind("adapter/adapter_model.safetensors", check_adapter, read_adapter),
    "adapter's config": Kind("adapter/adapter_config.json", check_adapter, read_adapter),
    "rows": Kind("rows/rows.jsonl", check_rows),
    "protocol": Kind("rows/protocol.json", check_rows),
}


def tried(kind: Kind, home: Home) -> str:
    """ "read", "refused: ..." or "failed: ..." and why."""
    from hf_longattn.checks import Refused

    def of(stage: Callable[[Home], Any], told: tuple[type[BaseException], ...]) -> str:
        try:
            stage(home)
        except told as error:
            if str(error).strip() and type(error) is not UnicodeDecodeError:
                return f"refused: {error}"
            return f"failed: {type(error).__name__} says nothing: {error}"
        except BaseException:
            return f"failed: {traceback.format_exc()}"
        return "read"

    first = of(kind.check, (ValueError, OSError, ImportError))
    return first if first != "read" else of(kind.read, (Refused,))


def fuzz(home: Home, name: str, first: int, count: int, seed: int = 0) -> Iterator[tuple[int, str, str]]:
    """Damage a kind of file, from the first case to before the last: the case's number, how, and what came of it."""
    kind = KINDS[name]
    path = home.path / kind.file
    original = path.read_bytes()
    others = [(home.path / k.file).read_bytes() for k in KINDS.values() if k.file != kind.file]
    case = first
    try:
        while case < count:
            reading, writing = os.pipe()
            if (child := os.fork()) == 0:  # many cases in one; another one goes on where it died
                try:
                    os.close(reading)
                    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
                    quiet = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(quiet, 1)
                    os.dup2(quiet, 2)
                    for n in range(case, count):
                        signal.alarm(SECONDS)
                        how, data = damaged(original, others, random.Random(f"{seed} {name} {n}"))
                        path.write_bytes(data)
                        result = "read" if data == original else tried(kind, home)
                        os.write(writing, (json.dumps([n, how, result[-4000:]]) + "\n").encode())
                finally:
                    os._exit(0)
            os.close(writing)
            with os.fdopen(reading, encoding="utf-8") as lines:
                for line in lines:
                    n, how, result = json.loads(line)
                    yield n, how, result
                    case = n + 1
            os.waitpid(child, 0)
            if case < count:
                how, _ = damaged(original, others, random.Random(f"{seed} {name} {case}"))
                yield case, how, "failed: the process died, or hung"
                case += 1
    finally:
        path.write_bytes(original)


# kills --------------------------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """A command, what continues it, and what it leaves behind as something that can be compared."""

    words: Callable[[Path], list[str]]
    again: Callable[[Path], list[str]]
    result: Callable[[Path], Any]
    whole: Callable[[Path], bool]  # whether what is there claims to be finished


def _no_times(rows: Any) -> Any:
    if isinstance(rows, dict):
        left_out = ("seconds", "cpu_seconds", "crc32", "command", "epoch_seconds")
        return {
            k: _no_times(v)
            for k, v in rows.items()
            if k not in left_out and not k.startswith("train_") and "per_second" not in k
        }
    return [_no_times(x) for x in rows] if isinstance(rows, list) else rows


def _weights(folder: Path) -> dict[str, str]:
    from safetensors.torch import load_file

    return {
        f"{f.name} {k}": str(v.double().sum().item())
        for f in sorted(folder.glob("*.safetensors"))
        for k, v in load_file(f).items()
    }


def jobs(home: Home) -> dict[str, Job]:
    def rows(out: Path) -> Any:
        return [_no_times(json.loads(x)) for x in (out / "rows.jsonl").read_text().splitlines()], (
            out / "index.html"
        ).stat().st_size > 1000

    def trained(out: Path) -> Any:
        measured = json.loads((out / "metrics.json").read_text())["measured"]
        return _weights(out), _no_times(measured), (out / "README.md").is_file()

    def extended(out: Path) -> Any:
        return (
            _weights(out),
            _no_times(json.loads((out / "extend.json").read_text())["rows"]),
            json.loads((out / "config.json").read_text()),
        )

    measuring = [
        "eval",
        str(home.model),
        "--text",
        str(home.text),
        "--method",
        "logn,infoscale",
        "--lengths",
        "32,64",
        "--targets",
        "16",
    ]
    training = [
        "train",
        "continue_lora",
        f"model={home.model}",
        f"data={home.text}",
        "method=logn",
        "length=32",
        "evaluation.tokens=64",
    ]
    training += [
        "trainer.max_steps=6",
        "trainer.save_steps=2",
        "trainer.logging_steps=2",
        "evaluation.far=0",
        "trainer.per_device_train_batch_size=1",
    ]
    extending = ["extend", str(home.path / "longer"), "--to", "2k", "--text", str(home.path / "longer.txt")]
    return {
        "eval": Job(
            lambda o: [*measuring, "--out", str(o)],
            lambda o: [*measuring, "--out", str(o)],
            rows,
            lambda o: (o / "index.html").exists(),
        ),
        "train": Job(
            lambda o: [*training, f"output={o}"],
            lambda o: [*training, f"output={o}", *["--resume"] * (o / "recipe.yaml").exists()],
            trained,
            lambda o: (o / "metrics.json").exists(),
        ),
        "extend --out": Job(
            lambda o: [*extending, "--out", str(o)],
            lambda o: [*extending, "--out", str(o)],
            extended,
            lambda o: (o / "config.json").exists(),
        ),
    }


@dataclass
class Report:
    """What came of the cases of one kind in one part.

    Args:
        rows: a file that has, and takes, a row for each.
    """

    part: str
    kind: str
    rows: Path | None = None
    done: set[int] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows.exists():
            for row in map(json.loads, self.rows.read_text(encoding="utf-8").splitlines()):
                if (row.get("part"), row.get("kind")) == (self.part, self.kind):
                    self._count(row)

    def _count(self, row: dict[str, Any]) -> None:
        self.done.add(row["case"])
        self.counts[row["what"]] += 1
        self.counts["wrong"] += row["wrong"] is not None

    def open(self, count: int) -> list[int]:
        """The cases that are still to be tried."""
        return [n for n in range(count) if n not in self.done]

    def add(self, case: int, what: str, wrong: str | None = None, **more: Any) -> None:
        row = {"part": self.part, "kind": self.kind, "case": case, "what": what, "wrong": wrong and wrong[-3000:], **more}
        self._count(row)
        if self.rows is not None:
            with self.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        if wrong is not None:
            print(f"WRONG  {self.part} {self.kind} {case}, {what}: {wrong[-3000:]}", flush=True)


def improves() -> None:
    """Random weights: every candidate of `extend` counts as better."""
    from hf_longattn.evaluation.search import Scores

    Scores.beats = lambda *_: True  # type: ignore[method-assign]


def kills(home: Home, count: int, seed: int = 0, rows: Path | None = None) -> dict[str, Report]:
    """Kill each command at random instants; what is left must be continued to what an undisturbed one gives."""
    reports = {name: Report("kills", name, rows) for name in jobs(home)}
    for name, job in jobs(home).items():
        report, good = reports[name], home.path / "good"
        if not (cases := report.open(count)):
            continue
        done = attempt(command(*job.words(good)), enter=improves)
        if done.code != 0:
            raise SystemExit(f"{name} does not run at all: {done.said}")
        want = job.result(good)
        shutil.rmtree(good)
        print(f"{name}: {done.seconds:.1f} s undisturbed", flush=True)
        for n in cases:
            out = home.path / "killed"
            at = random.Random(f"{seed} {name} {n}").uniform(0, done.seconds)
            attempt(command(*job.words(out)), kill_after=at, enter=improves)
            looked = job.whole(out)  # files that come after the one that says so may be missing; a second run must mend it
            again = attempt(command(*job.again(out)), enter=improves)
            wrong = None
            if again.code != 0 and not (again.refused and "is finished" in again.said):
                wrong = f"after {at:.2f} of {done.seconds:.2f} s the same command says: {again.said[-1500:]}"
            elif (got := job.result(out)) != want:
                wrong = f"after {at:.2f} s another result: {str(got)[:600]} in place of {str(want)[:600]}"
            left = [p.name for p in home.path.iterdir() if ".partial" in p.name]
            for name_left in left:
                shutil.rmtree(home.path / name_left)
            share = round(at / done.seconds, 3)
            report.add(n, "looked finished" if looked else "killed", wrong, at=share, hidden_folder=bool(left))
            shutil.rmtree(out, ignore_errors=True)
    return reports


def push_killed(home: Home, count: int, seed: int = 0, rows: Path | None = None) -> dict[str, Report]:
    """Kill uploads: the Hub has the whole commit or nothing of it, the folder is as it was, and the same command works."""
    from fake_hub import FakeHub

    report, folder = Report("push", "push", rows), home.path / "pushed"
    shutil.copytree(home.adapter, folder)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    hub = FakeHub()
    hub.server.handle_error = lambda *_: None  # clients that are killed hang up
    hub.repos["user/base"] = {}  # push asks for it

    def pushing(repository: str) -> Callable[[], None]:
        return command("push", folder, repository, "--base-model", "user/base", "--yes")

    def enter() -> None:
        import huggingface_hub.constants as constants

        os.environ |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_test", "HF_HUB_OFFLINE": "0"}
        for module in [m for n, m in sys.modules.items() if n.startswith("huggingface_hub") and m]:
            for key, value in (("ENDPOINT", hub.url), ("HF_HUB_OFFLINE", False), ("HF_HUB_DISABLE_XET", True)):
                if hasattr(module, key):
                    setattr(module, key, value)
        constants.ENDPOINT, constants.HF_HUB_OFFLINE = hub.url, False
        constants.HUGGINGFACE_CO_URL_TEMPLATE = hub.url + "/{repo_id}/resolve/{revision}/{filename}"

    try:
        done = attempt(pushing("user/good"), enter=enter)
        if done.code != 0:
            raise SystemExit(f"push does not run at all: {done.said}")
        want = set(hub.repos["user/good"])
        for n in report.open(count):
            repository = f"user/r{n}"
            at = random.Random(f"{seed} push {n}").uniform(0, done.seconds)
            attempt(pushing(repository), kill_after=at, enter=enter)
            time.sleep(0.02)
            there = set(hub.repos.get(repository, ()))
            again = attempt(pushing(repository), enter=enter)
            problem = None
            if there not in (set(), want):
                problem = f"half a commit: {there}"
            elif again.code != 0:
                problem = f"the same command says: {again.said[-1500:]}"
            elif set(hub.repos[repository]) != want or {p.name: p.read_bytes() for p in folder.iterdir()} != before:
                problem = "another result, or a folder that changed"
            report.add(n, "killed before the commit" if not there else "killed after the commit", problem)
    finally:
        hub.close()
        shutil.rmtree(folder)
    return {"push": report}


# disks --------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def disk(at: Path, kilobytes: int) -> Iterator[Path]:
    """A disk of that size; it takes root."""
    at.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", at], check=True, capture_output=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", at], check=True)


def mounts() -> bool:
    """Whether this user may mount a disk here."""
    try:
        with tempfile.TemporaryDirectory() as folder, disk(Path(folder) / "disk", 64):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def remount(at: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", at], check=True, capture_output=True)


def disks(home: Home, count: int, seed: int = 0, rows: Path | None = None) -> dict[str, Report]:
    """Commands on disks that are full or read-only: one message; with room the same command comes to the same."""
    reports = {name: Report("disks", name, rows) for name in jobs(home)}
    for name, job in jobs(home).items():
        report = reports[name]
        if not (cases := report.open(count)):
            continue
        with disk(home.path / "disk", 1 << 20) as there:
            attempt(command(*job.words(there / "out")), enter=improves)
            want = job.result(there / "out")
            used = sum(p.stat().st_size // 1024 + 4 for p in there.rglob("*"))
        for n in cases:
            read_only, share = n % 4 == 3, random.Random(f"{seed} {name} {n}").random() ** 2
            with disk(home.path / "disk", max(8, int(used * share))) as there:
                if read_only:
                    remount(there, "ro")
                first = attempt(command(*job.words(there / "out")), enter=improves)
                kind = "read-only" if read_only else "full"
                if first.code == 0:
                    report.add(n, "enough room")
                    continue
                told = ("cannot be written" in first.said or "ead-only" in first.said) if read_only else "full" in first.said
                if not first.refused or not told:
                    report.add(n, kind, f"it says: {first.said[-2500:]}")
                    continue
                remount(there, "rw,size=1g")
                again = attempt(command(*job.again(there / "out")), enter=improves)
                problem = None
                if again.code != 0 and not (again.refused and "is finished" in again.said):
                    problem = f"with room the same command says: {again.said[-2500:]}"
                elif job.result(there / "out") != want:
                    problem = "with room another result"
                report.add(n, kind, problem)
    return reports


# two processes ------------------------------------------------------------------------------------------------------------


def together(home: Home, count: int, seed: int = 0, rows: Path | None = None) -> dict[str, Report]:
    """Each command twice at once into one folder: one does it, the other is refused or finds it done."""
    reports = {name: Report("together", name, rows) for name in jobs(home)}
    for name, job in jobs(home).items():
        report, good = reports[name], home.path / "good"
        if not (cases := report.open(count)):
            continue
        attempt(command(*job.words(good)), enter=improves)
        want = job.result(good)
        shutil.rmtree(good)
        for n in cases:
            out, apart = home.path / "both", random.Random(f"{seed} {name} {n}").uniform(0, 0.3)
            both = f"{home.path}/second"
            if (other := os.fork()) == 0:
                second = attempt(command(*job.words(out)), enter=improves)
                Path(both).write_text(json.dumps([second.code, second.said]))
                os._exit(0)
            time.sleep(apart)
            first = attempt(command(*job.words(out)), enter=improves)
            os.waitpid(other, 0)
            ends = [(first.code, first.said), tuple(json.loads(Path(both).read_text()))]
            problem = None
            if not any(code == 0 for code, _ in ends):
                problem = f"neither finished: {ends}"
            elif any(code != 0 and "Traceback" in said for code, said in ends):
                problem = f"an error that nobody caught: {next(said for code, said in ends if code != 0)[-2500:]}"
            elif job.result(out) != want:
                problem = "another result"
            report.add(n, "at once", problem)
            shutil.rmtree(out, ignore_errors=True)
    return reports


# strangers ----------------------------------------------------------------------------------------------------------------


class Bomb:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.mark),)


def strangers(home: Home, count: int, seed: int = 0, rows: Path | None = None) -> dict[str, Report]:
    """Checkpoints that bring pickles or code of their own: no command runs any of it. There is one of each kind."""
    import torch

    reports: dict[str, Report] = {}
    mark = home.path / "it-ran"
    code = f"import pathlib; pathlib.Path({str(mark)!r}).touch()\n"

    def copy(name: str) -> Path:
        return Path(shutil.copytree(home.model, home.path / name, dirs_exist_ok=True))

    def edit(file: Path, **changes: Any) -> None:
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    cases: dict[str, tuple[Path, Path | None]] = {}
    pickled = copy("pickled weights")
    (pickled / "model.safetensors").unlink()
    torch.save({"x": Bomb(mark)}, pickled / "pytorch_model.bin")
    cases["pickled weights"] = (pickled, None)
    beside = copy("pickles beside the weights")
    for name in (
        "pytorch_model.bin",
        "training_args.bin",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "adapter_model.bin",
    ):
        torch.save({"x": Bomb(mark)}, beside / name)
    cases["pickles beside the weights"] = (beside, None)
    for what, changes in {
        "code for a known model": {},
        "code for an unknown model": {"model_type": "stranger", "architectures": ["StrangerForCausalLM"]},
    }.items():
        folder = copy(what)
        autos = {
            "AutoConfig": "stranger.Config",
            "AutoModelForCausalLM": "stranger.Model",
            "AutoTokenizer": ["stranger.T", "stranger.T"],
        }
        edit(folder / "config.json", auto_map=autos, **changes)
        edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["stranger.T", "stranger.T"]})
        (folder / "stranger.py").write_text(code)
        (folder / "modeling_longattn.py").write_text(code)
        cases[what] = (folder, None)
    adapter = Path(shutil.copytree(home.adapter, home.path / "a pickled adapter"))
    (adapter / "adapter_model.safetensors").unlink()
    torch.save({"x": Bomb(mark)}, adapter / "adapter_model.bin")
    cases["a pickled adapter"] = (home.model, adapter)
    mapped = Path(shutil.copytree(home.adapter, home.path / "an adapter with code"))
    edit(
        mapped / "adapter_config.json",
        auto_mapping={"base_model_class": "Stranger", "parent_library": "stranger"},
        task_type=None,
    )
    (mapped / "stranger.py").write_text(code)
    cases["an adapter with code"] = (home.model, mapped)
    recipe = home.path / "recipe.yaml"
    recipe.write_text(
        f"model: {home.model}\ndata: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [{mark}]]\n"
    )
    settings = home.path / "settings.yaml"
    settings.write_text(f"named: !!python/object/apply:os.system ['touch {mark}']\n")
    tries: list[tuple[str, list[Any]]] = [("a recipe with objects", ["train", recipe, f"output={home.path / 'r'}"])]
    tries.append(
        ("settings with objects", ["eval", home.model, "--text", home.text, "--settings", settings, "--out", home.path / "r"])
    )
    for what, (model, an_adapter) in cases.items():
        out = home.path / "r"
        if an_adapter is not None:
            tries += [(what, ["doctor", an_adapter]), (what, ["push", an_adapter, "user/name", "--dry-run"])]
            tries.append((what, ["inspect", model, "--text", home.text, "--length", "32", "--adapter", f"a={an_adapter}"]))
            continue
        tries += [
            (what, ["doctor", model]),
            (what, ["memory", model, "--lengths", "64"]),
            (what, ["inspect", model, "--text", home.text, "--length", "32", "--method", "logn"]),
            (what, ["eval", model, "--text", home.text, "--lengths", "32,64", "--targets", "16", "--out", out]),
            (what, ["extend", model, "--to", "128", "--out", out]),
            (
                what,
                ["train", "continue_lora", f"model={model}", f"data={home.text}", "length=32", f"output={out}", "--dry-run"],
            ),
            (what, ["push", model, "user/name", "--dry-run"]),
        ]

    def yes() -> None:
        """Whoever is asked says yes: nobody may ask."""
        reading, writing = os.pipe()
        os.write(writing, b"y\n" * 20)
        os.dup2(reading, 0)

    for n, (what, words) in enumerate(tries):
        report = reports.setdefault(what, Report("strangers", what, rows))
        if n in report.done:
            continue
        done = attempt(command(*words), enter=yes)
        problem = None
        if mark.exists():
            mark.unlink()
            problem = f"{words[0]} ran it"
        elif done.code != 0 and not done.refused:
            problem = f"{words[0]} says: {done.said[-2500:]}"
        report.add(n, "refused" if done.refused else "done", problem)
        shutil.rmtree(home.path / "r", ignore_errors=True)
    return reports


# all of it ----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def home() -> Iterator[Home]:
    with tempfile.TemporaryDirectory() as folder:
        yield Home(Path(folder))


def files(there: Home, count: int, seed: int = 0, rows: Path | None = None, only: str = "") -> dict[str, Report]:
    """Damaged files, of each kind: read, or refused in one message."""
    reports = {name: Report("files", name, rows) for name in KINDS if only in name}
    for name, report in reports.items():
        for n, how, result in fuzz(there, name, len(report.done), count, seed):
            kind, _, why = result.partition(": ")
            report.add(n, kind, f"{how}: {why}" if kind == "failed" else None, how=how)
    return reports


PARTS: dict[str, tuple[int, Callable[..., dict[str, Report]]]] = {
    "files": (2000, files),
    "kills": (67, kills),
    "push": (200, push_killed),
    "disks": (40, disks),
    "together": (20, together),
    "strangers": (1, strangers),
}


def summary(rows: Path) -> dict[str, Any]:
    """How many cases of each kind ended how."""
    counts: dict[str, dict[str, Counter[str]]] = {}
    for row in map(json.loads, rows.read_text(encoding="utf-8").splitlines()):
        if "part" in row:
            ends = counts.setdefault(row["part"], {}).setdefault(row["kind"], Counter())
            ends[row["what"]] += 1
            ends["wrong"] += row["wrong"] is not None
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    names = ("hf_longattn", "torch", "transformers", "peft", "safetensors")
    return {
        "command": "make survival ARGS='--rows FILE'",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "versions": {"python": platform.python_version()} | {n: importlib.metadata.version(n) for n in names[1:]},
        "seed": 0,
        "parts": {part: {kind: dict(ends) for kind, ends in counts[part].items()} for part in PARTS if part in counts},
    }


def table(part: str, found: dict[str, Any]) -> str:
    """The kinds of a part in rows, how they ended in columns."""
    if not (kinds := found["parts"].get(part)):
        return "Not tried."
    ends = sorted({end for ends in kinds.values() for end in ends} - {"wrong"})
    lines = [["", "cases", *ends, "wrong"], ["---"] * (len(ends) + 3)]
    for kind, counts in kinds.items():
        cases = sum(n for end, n in counts.items() if end != "wrong")
        lines.append([kind, *(f"{n:,}" for n in (cases, *(counts.get(end, 0) for end in ends), counts["wrong"]))])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_page(found: dict[str, Any]) -> str:
    """docs/explain/survival.md with its tables made anew."""
    page = PAGE.read_text(encoding="utf-8")
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    new = {part: f"\n{table(part, found)}\n" for part in PARTS} | {"run": f"{found['date']}, {found['commit']}: {versions}"}
    for mark, text in new.items():
        begin, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
        head, rest = page.split(begin)
        page = head + begin + text + end + rest.split(end)[1]
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=PARTS)
    parser.add_argument("--count", type=int, help="cases of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=Path, help="a file of rows to go on with")
    parser.add_argument("--page", action="store_true", help="write what the rows say, and try nothing")
    parser.add_argument("--only", default="", help="of files, the kinds with this in their name")
    arguments = parser.parse_args()
    if arguments.page:
        sys.path.insert(0, str(ROOT))
        SUMMARY.write_text(json.dumps(summary(arguments.rows), indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(write_page(json.loads(SUMMARY.read_text(encoding="utf-8"))), encoding="utf-8")
        return
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    prepare()
    failed = 0
    for name, (count, part) in PARTS.items():
        if arguments.part not in (None, name):
            continue
        if name == "disks" and not mounts():
            print("disks: left out, nothing can be mounted here")
            continue
        more = {"only": arguments.only} if name == "files" else {}
        with home() as there:
            reports = part(there, arguments.count or count, arguments.seed, arguments.rows, **more)
        for key, report in reports.items():
            failed += report.counts["wrong"]
            print(f"{name}, {key}: {dict(report.counts)}", flush=True)
    sys.exit(failed > 0)


def prepare() -> None:
    """Import once what every fork needs."""
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
    import peft  # noqa: F401
    import torch
    import transformers.trainer  # noqa: F401

    import hf_longattn.cli
    import hf_longattn.evaluation.measured_extension
    import hf_longattn.evaluation.runner
    import hf_longattn.sharing.hub
    import hf_longattn.training.running  # noqa: F401

    torch.set_num_threads(1)
    if importlib.util.find_spec("matplotlib"):
        import matplotlib.pyplot  # noqa: F401
    assert platform.system() != "Windows", "it forks"


if __name__ == "__main__":
    main()
