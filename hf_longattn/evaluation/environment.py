"""Findings about what is installed on this machine: versions, kernels, engines. It imports torch, and not transformers."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from importlib.util import find_spec

import torch
from packaging.requirements import Requirement

from .._version import __version__
from ..config import TRIPWIRE, LongAttnConfig
from ..core.kernels.precision import auto_dtype

#: Engines that build a model by its architecture's name, from code of their own, and read nothing of a method.
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "llama_cpp": "llama.cpp", "ctranslate2": "CTranslate2", "mlx_lm": "MLX"}

NOTE, LIMIT, PROBLEM = "note", "limit", "problem"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    A problem: results would be wrong, or not those of the method, without a word; or no method can be put in. A limit: the
    model refuses a part of what this package does.
    """

    topic: str
    text: str
    level: str = "ok"


def environment() -> Iterator[Finding]:
    """Look at this environment alone."""
    yield from installed_versions()
    yield from kernels(None)


def installed_versions() -> Iterator[Finding]:
    """List installed versions beside those that this package asks for, as a bug report needs them."""
    stated = [f"hf_longattn {__version__}", f"python {platform.python_version()}", platform.platform()]
    for line in requires("hf_longattn") or ():
        target = Requirement(line)
        try:
            installed = version(target.name)
        except PackageNotFoundError:
            continue
        if target.specifier and not target.specifier.contains(installed, prereleases=True):
            text = f"{target.name} {installed} is installed, and {target.name}{target.specifier} is what is tested"
            yield Finding("versions", text, PROBLEM)
        elif target.marker is None:
            stated.append(f"{target.name} {installed}")
    yield Finding("versions", ", ".join(stated))


def kernels(method: LongAttnConfig | None) -> Iterator[Finding]:
    """Backends that are not here; one that the checkpoint insists on, and cannot have, is a problem."""
    absent = "" if find_spec("triton") else "triton is not installed"
    if absent and method is not None and method.backend == "triton":
        yield Finding("kernels", f"the checkpoint insists on backend {method.backend!r}: {absent}", PROBLEM)
    where = f"no GPU is here; this CPU multiplies {auto_dtype()} fast"
    if torch.cuda.is_available():
        where = f"{torch.cuda.get_device_name()} is here, under CUDA {torch.version.cuda}"
    yield Finding("kernels", "; ".join(filter(None, [where, absent])))


def engines(method: LongAttnConfig | None, architectures: Sequence[str] = ()) -> Iterator[Finding]:
    """Engines that are installed here and would run a checkpoint with a method without it; strict ones they refuse."""
    if method is None:
        return
    if any(name.startswith(TRIPWIRE) for name in architectures):
        yield Finding("engines", "the checkpoint is strict: engines with code of their own refuse it")
    elif result := [name for module, name in ENGINES.items() if find_spec(module) and not (module == "vllm" and _plugged())]:
        text = f"{' and '.join(result)} would silently run this checkpoint without its method"
        yield Finding("engines", f"{text}: save it with strict=True, and generate with transformers", PROBLEM)
    else:
        yield Finding("engines", "no installed engine would drop the method")


def _plugged() -> bool:
    """Tell whether vLLM finds this package's plugin, which runs a method or refuses it by name."""
    chosen = os.environ.get("VLLM_PLUGINS")
    plugins = [e.name for e in entry_points(group="vllm.general_plugins") if e.value.startswith("hf_longattn")]
    return any(chosen is None or name in chosen.split(",") for name in plugins)
