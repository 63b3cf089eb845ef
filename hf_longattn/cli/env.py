"""`hf-longattn env`."""

from __future__ import annotations

import platform

from .. import __version__
from .common import console


def env() -> None:
    """Print the versions that a bug report needs."""
    import torch
    import transformers

    for name, version in (
        ("hf_longattn", __version__),
        ("transformers", transformers.__version__),
        ("torch", torch.__version__),
        ("python", platform.python_version()),
        ("platform", platform.platform()),
        ("cuda", torch.version.cuda if torch.cuda.is_available() else "not available"),
    ):
        console.print(f"{name}: {version}", highlight=False)
