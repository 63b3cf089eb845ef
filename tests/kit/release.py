"""What `make release-check` does behind the build: the wheel alone, in an environment and a folder that know no checkout.

python tests/kit/release.py dist/*.whl README.md    installs the wheel into an empty environment
python tests/kit/release.py --say dist [vVERSION]   what is left to do for a release; refuses a tag of another version
python tests/kit/release.py --here README.md        the README's Python, and commands that need no network, in this environment
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
#: What a tiny model stands for without a network, and how many characters of text it reads in a moment.
HUB, LONG = re.compile(r'"HuggingFaceTB/[\w.-]+"'), re.compile(r"\b4[0-9]000\b")


def foreign(names: Iterable[str]) -> list[str]:
    """What is no code, type, template or recipe of the package."""
    return [n for n in names if Path(n).suffix not in (".py", ".pyi", ".yaml", ".jinja", ".css", ".js", ".typed", "")]


def check_contents(wheel: Path) -> None:
    """The package, its metadata and its licence, and nothing that is only ours."""
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    info = next(name for name in top if name.endswith(".dist-info"))
    if top != {"hf_longattn", info}:
        raise SystemExit(f"{wheel} holds more than the package: {sorted(top)}")
    ours = foreign(n for n in names if info not in n)
    needed = {f"{info}/licenses/LICENSE", f"{info}/entry_points.txt", "hf_longattn/py.typed"}
    needed |= {f"hf_longattn/recipes/{file.name}" for file in (ROOT / "recipes").glob("*.yaml")}
    if ours or (missing := needed - set(names)):
        raise SystemExit(f"{wheel} holds {ours}" if ours else f"{wheel} lacks {sorted(missing)}")


def version() -> str:
    text = (ROOT / "hf_longattn" / "_version.py").read_text(encoding="utf-8")
    return re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0]


def pinned(name: str) -> str:
    """A package at the version that the tests run."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    return next(x for x in pins if x.startswith(f"{name}=="))


def say(dist: Path, tag: str | None) -> None:
    """What is left to a person."""
    (wheel,) = dist.glob("*.whl")
    named = wheel.name.split("-")[1]
    log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if tag is not None and tag != f"v{named}":
        raise SystemExit(f"the tag is {tag}, and the version {named}: set __version__, or tag again")
    if f"## [{named}]" not in log:
        raise SystemExit(f"CHANGELOG.md has no section [{named}]")
    print(f"\n{named} is built and checked, in {dist}. Nothing was uploaded. To release it:")
    print(f"    git tag v{named} && git push origin v{named}    # the workflow Release builds, checks and uploads it")


def installed(wheel: Path, readme: Path, torch: str) -> None:
    check_contents(wheel)
    with tempfile.TemporaryDirectory() as folder:
        venv.create(Path(folder) / "venv", with_pip=True)
        python = Path(folder) / "venv" / "bin" / "python"
        pip = [python, "-m", "pip"]
        subprocess.run([*pip, "install", "--quiet", torch], check=True)  # the newest may be a CUDA build of gigabytes
        subprocess.run([*pip, "install", "--quiet", f"{wheel.absolute()}[cli,train]"], check=True)
        subprocess.run([*pip, "check"], check=True)
        here(readme, python)


def here(readme: Path, python: Path) -> None:
    """Run it all in an empty folder, by this Python."""
    with tempfile.TemporaryDirectory() as folder:
        for file in (readme, Path(__file__), HERE / "tiny.py"):
            shutil.copy(file, folder)
        alone = {"PATH": str(python.parent), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}
        subprocess.run([python, "release.py", "--inside", readme.name], cwd=folder, check=True, env=alone)


def inside(readme: Path) -> None:
    import tiny

    tiny.save(Path("model"), trained=1024)
    tiny.text(Path("book.txt"), 5000)
    blocks = re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)
    if not blocks:
        raise SystemExit(f"{readme} holds no Python")
    names: dict[str, object] = {"__name__": "readme"}  # a reader types one block behind the other
    for code in blocks:
        print(f"\n{code}", flush=True)
        exec(HUB.sub('"model"', LONG.sub("3000", code)), names)
    commands = (
        "--version",
        "doctor",
        "doctor model",
        "eval model --text book.txt --out report --method infoscale,rerope --lengths 256,2k --targets 64",
        "extend model --to 4k --text book.txt",
        "inspect model --text book.txt --out inspected --length 256",
        "train continue_lora model=model data=book.txt length=64 evaluation.tokens=64 trainer.max_steps=2",
    )
    for command in commands:
        print(f"\nhf-longattn {command}", flush=True)
        done = subprocess.run(["hf-longattn", *command.split()], check=False).returncode
        if done not in (0, 1) or (done == 1 and command.split()[0] != "extend"):  # no method helps random weights
            raise SystemExit(f"hf-longattn {command}: exit status {done}")
    print("\nThe wheel works by itself.")


if __name__ == "__main__":
    if sys.argv[1] == "--inside":
        inside(Path(sys.argv[2]))
    elif sys.argv[1] == "--say":
        say(Path(sys.argv[2]), next(iter(sys.argv[3:]), None))
    elif sys.argv[1] == "--here":
        here(Path(sys.argv[2]), Path(sys.executable))
    else:
        installed(Path(sys.argv[1]), Path(sys.argv[2]), pinned("torch"))
