"""What `make test-newest` runs in its environment, and what it says where a newer release than the pinned one fails."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("transformers", "peft", "accelerate")
FILES = (
    "exactness",
    "persistence",
    "traps",
    "adapters",
    "adapter_kinds",
    "positions",
    "models",
    "trained",
    "seams",
    "engines",
)


def main() -> int:
    pins = dict(x.split("==") for x in (ROOT / "constraints.txt").read_text().split() if "==" in x)
    found = {name: version(name) for name in PACKAGES}
    print("newest releases:", ", ".join(f"{k} {v} (pinned {pins[k]})" for k, v in found.items()), flush=True)
    tests = [str(p) for name in FILES for p in sorted((ROOT / "tests").rglob(f"test_{name}.py"))]
    pytest = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-m", "not slow and not crossed", *tests]
    readme = [sys.executable, "tests/kit/release.py", "--here", "README.md"]
    failed = [c for c in (pytest, readme) if subprocess.run(c, cwd=ROOT, check=False).returncode]
    if newer := [f"{name} {v}" for name, v in found.items() if v != pins[name]]:
        if failed:
            print(
                f"\nThis fails under {', '.join(newer)}, which `pip install hf_longattn` brings: mend it, then move the pins."
            )
        else:
            print(f"\nAll pass under {', '.join(newer)}: the pins in constraints.txt can move.")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
