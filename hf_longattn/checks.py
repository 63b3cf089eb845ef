"""What can be wrong outside a model: texts, devices, precisions, weights, folders. Cheap, and ValueError says which."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from .methods.registry import did_you_mean

DTYPES = ("float32", "bfloat16", "float16", "float64")


def read_text(path: Path) -> str:
    """A file's UTF-8 text, without the byte order mark that some editors put first."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 (byte {error.start}): convert it, for example by iconv -f latin1 -t utf-8"
        ) from None


def device_of(name: str) -> str:
    """The device that a name means here; "auto" is a GPU where there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type != "meta":
            torch.empty(0, device=device)
            return name
    except (RuntimeError, AssertionError, NotImplementedError):  # no such name; a build without it; no such card
        pass
    raise ValueError(f"there is no device {name!r} here; use auto, or cpu")


def check_dtype(name: str, *more: str) -> None:
    """Raise ValueError unless `name` is a floating point dtype, or one of `more`."""
    known = (*more, *DTYPES)
    if name not in known:
        hint = did_you_mean(name, known)
        raise ValueError(f"{name!r} is no torch dtype that a model can run in; {hint}known: {', '.join(known)}")


def check_model(model: str | Path) -> None:
    """Raise ValueError if a folder is no model or adapter, or a file of its weights is damaged; Hub names pass."""
    folder = Path(model)
    if not folder.is_dir():
        return
    names = ("config.json", "adapter_config.json")
    configs = [folder / name for name in names if (folder / name).is_file()]
    if not configs:
        raise ValueError(f"{folder} holds no model: there is no {' and no '.join(names)} in it")
    for file in configs:
        try:
            json.loads(read_text(file))
        except json.JSONDecodeError as error:
            raise ValueError(f"{file} is damaged ({error}): save or download it again") from None
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):  # reads the header, and compares it with the file's size
                pass
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged ({error}): save or download it again") from None


def check_output(folder: Path) -> None:
    """Raise ValueError if a folder cannot be made or written; leaves nothing behind."""
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not there.is_dir():
        raise ValueError(f"{there} is a file, not a folder to write to")
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise ValueError(f"{there} cannot be written to ({error.strerror}): choose another folder") from None
