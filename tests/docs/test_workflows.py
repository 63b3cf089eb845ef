"""The workflow files, read as the service reads them: what they run is there, and what they may do is little."""

from __future__ import annotations

import itertools
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import release
import yaml

ROOT = Path(__file__).parents[2]
FILES = {f.stem: f.read_text(encoding="utf-8") for f in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
WORKFLOWS: dict[str, Any] = {name: yaml.load(text, Loader=yaml.BaseLoader) for name, text in FILES.items()}  # `on` is a word
JOBS = {f"{name}/{job}": content for name, flow in WORKFLOWS.items() for job, content in flow["jobs"].items()}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def runs(job: dict[str, Any]) -> Iterator[str]:
    """Its commands, with every value of its matrix."""
    matrix = {k: v for k, v in job.get("strategy", {}).get("matrix", {}).items() if isinstance(v, list) and k != "include"}
    for values in itertools.product(*matrix.values()):
        for step in job["steps"]:
            command = step.get("run", "")
            for key, value in zip(matrix, values, strict=True):
                command = command.replace(f"${{{{ matrix.{key} }}}}", value)
            if command:
                yield command


@pytest.mark.parametrize("job", JOBS)
def test_commands_are_there(job: str) -> None:
    for command in runs(JOBS[job]):
        words = command.split()
        assert "${{" not in command, "a matrix value that is none, or text from outside in a shell"
        if words[0] == "make":
            stamps = [f"--old-file={x}" for x in (".venv/.dev", ".venv/.docs", ".venv/.release", ".venv-oldest/.dev")]
            done = subprocess.run(
                ["make", "--dry-run", *stamps, *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
        elif words[0] == "python" and words[1] != "-m":
            assert (ROOT / words[1]).is_file()
        else:
            assert words[0] in ("python", "cat"), command


@pytest.mark.parametrize("job", JOBS)
def test_a_job_ends_and_may_do_little(job: str) -> None:
    content, flow = JOBS[job], WORKFLOWS[job.split("/")[0]]
    assert flow["permissions"] == {"contents": "read"}
    assert int(content["timeout-minutes"]) <= 60
    more = {"docs/deploy": {"pages": "write", "id-token": "write"}, "release/publish": {"id-token": "write"}}
    assert content.get("permissions", {}) == more.get(job, {})
    if job in more:  # what may write runs nothing of ours, and a person can be asked first
        assert all("uses" in step for step in content["steps"])
        assert content["environment"]["name"]


def test_actions_are_pinned_by_hash_and_moved_by_dependabot() -> None:
    used = re.findall(r"uses: (\S+)(.*)", "\n".join(FILES.values()))
    assert used
    for action, comment in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r"  # v\d+(\.\d+)+", comment), f"{action} says no version"
    assert len({action.split("@")[0] for action, _ in used}) == len(set(used))
    moved = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text(encoding="utf-8"))["updates"]
    assert [x["package-ecosystem"] for x in moved] == ["github-actions"]


def test_every_lane_of_a_merge_is_a_job_behind_lint() -> None:
    jobs = WORKFLOWS["ci"]["jobs"]
    lanes = re.findall(r"^make (\S+)$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    assert {*lanes, "release"} <= set(jobs["lane"]["strategy"]["matrix"]["target"])
    assert list(runs(jobs["lint"])) == ["make lint"]
    assert all(job["needs"] == "lint" for name, job in jobs.items() if name != "lint")


def test_every_python_that_the_package_names_is_tried() -> None:
    matrix = WORKFLOWS["ci"]["jobs"]["python"]["strategy"]["matrix"]
    named = {x.rpartition(" ")[2] for x in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", x)}
    assert named - {"3.11"} <= set(matrix["python"])  # the lanes run 3.11
    assert {x["os"].split("-")[0] for x in matrix["include"]} == {"macos", "windows"}


def test_a_tag_is_what_releases_and_a_night_asks_the_mains() -> None:
    assert WORKFLOWS["release"]["on"] == {"push": {"tags": ["v*"]}}
    assert WORKFLOWS["release"]["jobs"]["publish"]["needs"] == "build"
    assert not re.search(r"password:|secrets\.|api.token", FILES["release"])
    assert "cron" in WORKFLOWS["nightly"]["on"]["schedule"][0]
    assert {"make test-main", "make test-torch"} <= set(runs(WORKFLOWS["nightly"]["jobs"]["lane"]))


def test_hooks_run_what_lint_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)*)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert recipe
    linted = {Path(line.split()[0]).name + "".join(line.split()[1:2]) * ("ruff" in line) for line in recipe[1].splitlines()}
    assert {x["entry"].removeprefix(".venv/bin/").replace(" ", "") for x in hooks} == {
        x.replace("$(BIN)/", "") for x in linted
    }


def test_the_form_for_errors_asks_what_doctor_prints() -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text(encoding="utf-8"))
    asked = [x["attributes"] for x in form["body"] if x["validations"]["required"]]
    assert any("hf-longattn doctor" in x["description"] for x in asked)


def test_a_release_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"hf_longattn-{release.version()}-py3-none-any.whl").touch()
    release.say(tmp_path, f"v{release.version()}")
    with pytest.raises(SystemExit, match=r"the tag is v9\.9"):
        release.say(tmp_path, "v9.9")


def test_a_release_is_tried_with_the_torch_that_the_tests_run() -> None:
    """The newest may be a CUDA build of gigabytes."""
    assert release.pinned("torch") in (ROOT / "constraints.txt").read_text(encoding="utf-8").split()


def test_a_wheel_holds_nothing_that_a_release_refuses() -> None:
    there = subprocess.run(["git", "ls-files", "hf_longattn"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "hf_longattn/py.typed" in there.splitlines()
    assert release.foreign(there.splitlines()) == []
    assert release.foreign(["hf_longattn/notes.md"]) == ["hf_longattn/notes.md"]
