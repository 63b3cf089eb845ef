"""The folder of an evaluation: its rows, and the protocol that all of them obey."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .rows import Row, Rows, refuse_mixing, write_whole

ROWS, PROTOCOL = "rows.jsonl", "protocol.json"
#: Held by the command that measures into the folder.
LOCK = ".lock"
#: What another command that adds to the same report may have left in the folder.
REPORT = {LOCK, "index.html", "report.json", "report-head.json", "sections", "figures"}


def digest(value: Any) -> str:
    """Twelve hexadecimal digits that change with any part of a JSON-ready value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


class Store:
    """The rows of one protocol in a folder.

    A row's `key` says what was measured, its `digest` under what; the same key under another digest is refused.

    Raises:
        ValueError: the folder holds rows of another protocol, or something that is no report.
    """

    def __init__(self, folder: Path, protocol: Mapping[str, Any]) -> None:
        self.folder = folder
        foreign = {p.name for p in folder.iterdir()} - REPORT if folder.exists() else set()
        if foreign and not (folder / PROTOCOL).exists():
            raise ValueError(f"{folder} is not empty and holds no evaluation; nothing is overwritten: choose another folder")
        if (folder / PROTOCOL).exists():
            old = json.loads((folder / PROTOCOL).read_text(encoding="utf-8"))
            without = {"prefix": None}  # texts are then read whole
            refuse_mixing(folder, without | old, without | dict(protocol))
            protocol = old | dict(protocol)
        self.protocol = dict(protocol)
        self._file = Rows(folder / ROWS)
        self.rows = {row["key"]: row for row in self._file}

    def check(self, keys: Iterable[tuple[str, str]]) -> None:
        """Raise ValueError if one of these (key, digest) is there under another digest."""
        for key, expected in keys:
            if key in self.rows and self.rows[key]["digest"] != expected:
                raise ValueError(
                    f"{self.folder} holds a row {key!r} of another setting, text or model; rows are not mixed: choose another "
                    "folder, or another name for the setting"
                )

    def add(self, row: Row) -> None:
        """Keep a finished row."""
        if not (file := self.folder / PROTOCOL).exists() or json.loads(file.read_text(encoding="utf-8")) != self.protocol:
            write_whole(file, json.dumps(self.protocol, indent=1) + "\n")
        self._file.put(row)
        self.rows[row["key"]] = row
