"""The tests that hold under every supported Python, torch and transformers, by the Python that runs this.

python tests/kit/lane.py             exactness, persistence, adapters, positions, models, trained lengths, private facts,
                                     without slow ones
python tests/kit/lane.py --newest    these, continuous batching and the README, and what to do if a newer release fails;
                                     on a newer torch graphs, kernels, devices and several processes, too; the README alone
                                     where every version is the pinned one, which `make test` tests
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "transformers", "peft", "accelerate")
FILES = ("exactness", "persistence", "silent_errors", "adapters", "adapter_kinds", "positions", "models", "trained_length")
FILES += ("patches", "internals")
#: What leans on torch alone.
OF_TORCH = ("tracing", "kernels", "few", "triton", "device", "default_device", "distributed")


def tests(*files: str) -> list[str]:
    return [str(p) for name in files for p in sorted((ROOT / "tests").rglob(f"test_{name}.py"))]


def main(newest: bool) -> int:
    found = {name: version(name) for name in PACKAGES}
    print(f"Python {platform.python_version()} on {sys.platform}:", *(f"{k} {v}" for k, v in found.items()), flush=True)
    pytest = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-m"]
    readme = [sys.executable, "tests/kit/release.py", "--here", "README.md"]
    pins = dict(x.split("==") for x in (ROOT / "constraints.txt").read_text(encoding="utf-8").split() if "==" in x)
    newer = [f"{name} {v}" for name, v in found.items() if v.split("+")[0] != pins[name]]
    commands = [[*pytest, "not slow and not crossed", *tests(*FILES)]]
    if newest:
        more = tests("engines", *(OF_TORCH if any(x.startswith("torch ") for x in newer) else ()))
        commands = [*commands, [*pytest, "not crossed", *more], readme] if newer else [readme]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    failed = [c for c in commands if subprocess.run(c, cwd=ROOT, check=False, env=alone).returncode]
    if newest and newer:
        told = "All pass", "the pins in constraints.txt can move"
        if failed:
            told = "This fails", "mend it before a user meets it, then move the pins"
        print(f"\n{told[0]} under {', '.join(newer)}: {told[1]}.")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main("--newest" in sys.argv[1:]))
