"""Names of files; reading them, with an error that names the file, and writing folders whole."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: The config of an adapter; what a training run begins with, and what it ends with.
ADAPTER_FILE, RECIPE_FILE, METRICS_FILE = "adapter_config.json", "recipe.yaml", "metrics.json"


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


def read_plain_text(path: Path) -> str:
    """Read a plain text, as `read_text` does; ValueError for a file of rows."""
    if path.suffix == ".jsonl":
        raise ValueError(f"{path} has rows, whose keys and brackets would be read too: write their texts into a plain file")
    return read_text(path)


def read_json(path: Path) -> dict[str, Any]:
    """A file's JSON mapping; ValueError, which names the file, if it holds anything else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}): save or download it again") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} is damaged (it holds no mapping): save or download it again")
    return data


@contextmanager
def written_aside(folder: Path, stale: Iterable[str] = ()) -> Iterator[Path]:
    """An empty folder beside another, whose files take their places in it once all are written; of a failure nothing stays.

    Args:
        stale: patterns of files of the folder that give way to them.
    """
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", suffix=".partial", dir=folder.absolute().parent))
    try:
        yield aside
        for path in (path for pattern in stale for path in folder.glob(pattern)):
            path.unlink()
        for path in (path for path in aside.rglob("*") if path.is_file()):
            target = folder / path.relative_to(aside)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def disk_full(error: BaseException) -> bool:
    """Tell whether a library failed to write a file for want of space."""
    words = ("No space left on device", "unexpected pos", "failed writing file", "iostream error")  # all but the first torch's
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    return full or (isinstance(error, Exception) and any(word in str(error) for word in words))
