"""Runs first in every process that `hf-longattn run` starts, and registers methods once transformers is imported.

In a Python that has no hf_longattn, importing transformers fails, since the method would be lost without a word.
"""

import sys
from pathlib import Path

HERE = str(Path(__file__).parent)


class _Missing:
    """Refuses transformers where this package cannot be imported."""

    def __init__(self, error: ImportError) -> None:
        self.error = error

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "transformers":
            raise ImportError(f"started by `hf-longattn run`, but {sys.executable} has no hf_longattn") from self.error


try:
    import hf_longattn  # noqa: F401
except ImportError as error:
    sys.meta_path.insert(0, _Missing(error))  # type: ignore[arg-type]

# The one that this file stands in front of, if there is any
sys.path[:] = [p for p in sys.path if p != HERE]
own = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "sitecustomize":
        raise
finally:
    sys.modules.setdefault("sitecustomize", own)
