"""transformers' own tests with our names as the default attention, beside sdpa's result, test by test.

    python tests/conformance/run.py                                  all families and names; rewrites docs/conformance.*
    python tests/conformance/run.py --families llama                 these; the rows of the others stay as they are
    python tests/conformance/run.py --families llama --names rerope  prints the differences, writes nothing
    python tests/conformance/run.py --resume                         goes on after a run that was stopped

The tests come from the source distribution of the installed release (see suite.py). A test that passes under sdpa and not
under one of our names must stand in inherent.json with its reason, or the exit status is 1. Only pip needs a network, nothing
needs a GPU: such tests are skipped under both.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
WORK = ROOT / ".conformance" / transformers.__version__
RESULTS, PAGE = ROOT / "docs" / "conformance.json", ROOT / "docs" / "conformance.md"
FAMILIES = (
    "llama",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gpt2",
    "qwen3",
    "smollm3",
    "gpt_oss",
    "deepseek_v3",
    "phi3",
)
NAMES = ("scale_invariant", "infoscale+cosscale", "rerope")
NOT_RUN = [("gpt2", "rerope")]  # it has no RoPE
#: What the distribution's tests import and it does not hold.
MISSING = {
    "__init__.py": "",
    "exporters/test_export.py": "class ExportTesterMixin: ...\n",
    "generation/test_utils.py": "from generation import GenerationTesterMixin\n",
}
#: Tests that name their attention, and a slow one that does not care for it.
LEFT_OUT = ("test_eager_matches_sdpa_inference", "test_bc_torch_dtype")
#: One family under one name; what has not run by then counts as failed.
MINUTES = 15

Outcomes = dict[str, tuple[str, str]]  # test -> passed, failed or skipped, and the last line of what it says


def fetch() -> Path:
    """The folder that holds the `tests` of the installed release's source distribution."""
    if not (WORK / "tests").exists():
        name = f"transformers=={transformers.__version__}"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
        subprocess.run([*pip, "--dest", str(WORK), name], check=True)
        with tarfile.open(next(WORK.glob("*.tar.gz"))) as archive:
            for member in archive.getmembers():
                _, _, member.name = member.name.partition("/")
                if member.name.startswith("tests/"):
                    archive.extract(member, WORK, filter="data")
        for module, text in MISSING.items():
            (WORK / "tests" / module).parent.mkdir(exist_ok=True)
            (WORK / "tests" / module).write_text(text, encoding="utf-8")
    return WORK


def report_of(family: str, name: str) -> Path:
    return WORK / f"{family}-{name}.xml"


def outcomes(family: str, name: str) -> Outcomes:
    """Run one family's tests in a process of their own, unless a run that was stopped has its report."""
    report = report_of(family, name)
    if report.exists():
        return read(report)
    environment = os.environ | {
        "CONFORMANCE_FAMILY": family,
        "CONFORMANCE_ATTENTION": name,
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*map(str, (WORK, HERE, HERE.parent / "kit", ROOT)), os.environ.get("PYTHONPATH", "")]),
    }
    pytest = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider", "--disable-warnings"]
    try:
        log = subprocess.run(
            [
                *pytest,
                "--confcutdir",
                str(HERE),
                "--junitxml",
                str(report),
                "-k",
                f"not {' and not '.join(LEFT_OUT)}",
                str(HERE / "suite.py"),
            ],
            cwd=WORK,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60 * MINUTES,
        ).stdout
    except subprocess.TimeoutExpired:
        return {"all": ("failed", f"took more than {MINUTES} minutes")}
    if not report.exists():
        return {"all": ("failed", log[-2000:])}
    return read(report)


def read(report: Path) -> Outcomes:
    found: Outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        test = case.get("name", "").partition(" ")[0]
        kinds = {child.tag: child for child in case}
        failure = kinds.get("failure", kinds.get("error"))
        if failure is not None:
            message = failure.get("message", "").partition("\n")[0]
            if message == "collection failure":  # its text says which, at its end
                message = (failure.text or message).rstrip().rpartition("\n")[2]
            found[test] = "failed", message[:300]
        elif found.get(test, ("", ""))[0] != "failed":
            found[test] = ("skipped" if "skipped" in kinds else "passed"), ""
    return found


def compare(family: str, name: str, ours: Outcomes, sdpa: Outcomes, inherent: list[dict[str, str]]) -> list[dict[str, str]]:
    """The tests that pass under sdpa and not under a name, each with its reason if inherent.json has one."""
    out = []
    for test in sorted(sdpa):
        outcome, message = ours.get(test, ("failed", ours.get("all", ("", "did not run"))[1]))
        if sdpa[test][0] != "passed" or outcome == "passed":
            continue
        row = {"family": family, "name": name, "test": test, "outcome": outcome, "message": message}
        reasons = [
            r["reason"] for r in inherent if all(re.fullmatch(r.get(k, ".*"), row[k]) for k in ("test", "name", "family"))
        ]
        out.append(row | {"reason": reasons[0] if reasons else ""})
    return out


def page(results: dict[str, Any]) -> str:
    """docs/conformance.md from the content of docs/conformance.json."""
    lines = [
        "# Transformers' own tests under our methods",
        "",
        "Transformers' model and training tests, from the release's source distribution, and generation tests of ours where "
        "the distribution has none, run under sdpa and with one of our methods as the default attention. Cells count tests.",
        "",
        f"`make conformance` wrote this page from [conformance.json](conformance.json): {results['versions']}, "
        f"{results['date']}; the clocks of all tests add up to {results['minutes']} minutes.",
        "",
        "| family | pass under sdpa | are skipped | fail | " + " | ".join(f"`{n}`: as sdpa" for n in results["names"]) + " |",
        "|---|" + "---|" * (3 + len(results["names"])),
    ]
    for family, sdpa in results["sdpa"].items():
        lost = Counter(d["name"] for d in results["differences"] if d["family"] == family)
        cells = ["" if [family, n] in results["not_run"] else str(sdpa["passed"] - lost[n]) for n in results["names"]]
        lines.append(f"| {family} | {sdpa['passed']} | {sdpa['skipped']} | {sdpa['failed']} | {' | '.join(cells)} |")
    lines += ["", "Differences:", "", "| test | reason | where |", "|---|---|---|"]
    where: dict[tuple[str, str], dict[str, list[str]]] = {}
    for d in results["differences"]:
        reason = d["reason"] or f"**not explained**: {d['message']}"
        where.setdefault((d["test"], reason), {}).setdefault(d["name"], []).append(d["family"])
    for (test, reason), names in where.items():
        lines.append(f"| `{test}` | {reason} | {'; '.join(n + ': ' + ', '.join(f) for n, f in names.items())} |")
    return "\n".join([*lines, ""])


def write(sdpa: dict[str, Counter[str]], differences: list[dict[str, str]], minutes: int) -> None:
    """Both files of docs/ from what was found; rows of families that did not run stay as they are."""
    old = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    kept = {f: counts for f, counts in old.get("sdpa", {}).items() if f not in sdpa}
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    if kept and old["versions"] != versions:
        raise SystemExit(f"nothing written: the rows of {', '.join(kept)} are of {old['versions']}; run all families")
    counts = kept | {f: {k: c[k] for k in ("passed", "skipped", "failed")} for f, c in sdpa.items()}
    results = {
        "command": "make conformance",
        "versions": versions,
        "date": datetime.date.today().isoformat(),
        "minutes": minutes + (old["minutes"] if kept else 0),
        "names": NAMES,
        "not_run": NOT_RUN,
        "sdpa": {f: counts[f] for f in FAMILIES if f in counts},
    }
    differences = [*differences, *(d for d in old.get("differences", ()) if d["family"] in kept)]
    lines = ",\n".join(json.dumps(d) for d in sorted(differences, key=lambda d: FAMILIES.index(d["family"])))
    RESULTS.write_text(json.dumps(results)[:-1] + f', "differences": [\n{lines}\n]}}\n', encoding="utf-8")
    PAGE.write_text(page(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--names", nargs="*", default=NAMES)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="keep what a run that was stopped has finished")
    args = parser.parse_args()
    fetch()
    inherent = json.loads((HERE / "inherent.json").read_text(encoding="utf-8"))
    runs = [(f, n) for f in args.families for n in ("sdpa", *args.names) if (f, n) not in NOT_RUN]
    for run in runs if not args.resume else ():
        report_of(*run).unlink(missing_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        found = dict(zip(runs, pool.map(lambda run: outcomes(*run), runs), strict=True))
    differences = []
    for (family, name), ours in found.items():
        print(family, name, dict(Counter(outcome for outcome, _ in ours.values())), flush=True)
        if not any(outcome == "passed" for outcome, _ in ours.values()):
            raise SystemExit(f"nothing passed: {ours}")
        if name != "sdpa":
            differences += compare(family, name, ours, found[family, "sdpa"], inherent)
    unexplained = [d for d in differences if not d["reason"]]
    for d in unexplained if args.names == NAMES else differences:
        print("{family} {name}: {test} {outcome}: {message}".format(**d))
    if args.names == NAMES:
        sdpa = {f: Counter(outcome for outcome, _ in found[f, "sdpa"].values()) for f in args.families}
        suites = [suite for run in runs for suite in ElementTree.parse(report_of(*run)).iter("testsuite")]
        write(sdpa, differences, round(sum(float(suite.get("time", 0)) for suite in suites) / 60))
    return int(bool(unexplained))


if __name__ == "__main__":
    sys.exit(main())
