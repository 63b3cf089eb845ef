"""Finished rows in a file, so that an interrupted run keeps what it has and goes on; writing all or nothing."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import zlib
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..files import read_json

Row = dict[str, Any]
#: In a line of a file with a protocol, the checksum of the row before it.
CHECK = "crc32"
#: Of JSON lines, what all rows share.
PROTOCOL = "protocol.json"
#: The rows of a search, in the folder of the model that it chose.
SEARCHED = "extend.json"


def write_whole(path: Path, text: str | bytes) -> None:
    """Write a file, all or nothing; its folder is made if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(text.encode() if isinstance(text, str) else text)
    os.replace(partial, path)


def append_whole(path: Path, text: str) -> None:
    """Write at a file's end, all or nothing but for a kill, which leaves a last line that is cut off."""
    size, data = path.stat().st_size, text.encode()
    with path.open("ab", buffering=0) as file:
        try:
            while data:
                data = data[file.write(data) :]
        except BaseException:
            file.truncate(size)
            raise


@contextlib.contextmanager
def alone(lock: Path, doing: str) -> Iterator[None]:
    """While open, no other process holds the lock, a file in the folder that is written to; Refused if one does.

    Args:
        doing: what its holder does, for the message.
    """
    from filelock import FileLock, Timeout  # torch and huggingface_hub need it too

    from ..checks import Refused

    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(lock, timeout=0):
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
                if not any(lock.parent.iterdir()):  # nothing was written
                    lock.parent.rmdir()
    except Timeout:
        raise Refused(f"another command is {doing} into {lock.parent}: wait for it, or choose another folder") from None


class RowFile:
    """The rows of a file, one a line: JSON lines, or in a .json file the list "rows" behind what `head` says of all.

    Args:
        path: None keeps them in memory alone.
        head: what a .json file says beside is added, where it is not said here. A mapping `protocol` among it must be the
            file's, whose further keys it gets; that of JSON lines is kept beside them, in protocol.json.

    Raises:
        ValueError: the file holds no rows, rows of another protocol, or a line that is no row. A last line that was cut off
            is left out, to be measured again.
    """

    def __init__(self, path: Path | None, **head: Any) -> None:
        self.path, self.head = path, head
        self.all: list[Row] = []
        #: What the file of `all` looks like if it is JSON lines, the last of them whole; else None.
        self._known: tuple[int, ...] | None = None
        self.all = self._read()

    def __iter__(self) -> Iterator[Row]:
        return iter(self.all)

    def find(self, **values: Any) -> Row | None:
        """The first row with these values; None stands for a key that it lacks."""
        return next((row for row in self.all if _has(row, values)), None)

    def put(self, *rows: Row, instead_of: Mapping[str, Any] | None = None) -> None:
        """Add rows, in place of those with the values `instead_of`; what others have added to the file meanwhile stays."""
        if self.path is not None and not instead_of and self._known is not None and self._known == _looks(self.path):
            self._put_protocol()
            append_whole(self.path, "".join(map(self._line, rows)))  # the whole file for each row would be quadratic
            self.all += rows
            self._known = _looks(self.path)
            return
        self.all = [row for row in self._read() if not (instead_of and _has(row, instead_of))] + list(rows)
        if self.path is None:
            return
        if self.path.suffix == ".jsonl":
            text = "".join(map(self._line, self.all))
            self._put_protocol()
        else:
            lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in self.all)
            text = "".join(f"{json.dumps(k)}: {json.dumps(v)},\n" for k, v in self.head.items()) + f'"rows": [\n{lines}\n]'
            text = f"{{{text}}}\n"
        write_whole(self.path, text)
        self._known = _looks(self.path) if self.path.suffix == ".jsonl" else None

    def _put_protocol(self) -> None:
        """Write the protocol beside JSON lines, if it says more than is there."""
        assert self.path is not None
        if "protocol" in self.head:
            self._agree(there := self._protocol())
            if there != self.head["protocol"]:
                write_whole(self.path.with_name(PROTOCOL), json.dumps(self.head["protocol"], indent=1) + "\n")

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While open, no other process measures into the file, whose rows are read again; Refused if one does."""
        if self.path is None:
            yield
            return
        with alone(self.path.with_name(self.path.name + ".lock"), "measuring"):
            self.all = self._read()  # a process that has just ended may have measured them
            yield

    def _protocol(self) -> dict[str, Any]:
        """That beside JSON lines."""
        file = self.path and self.path.with_name(PROTOCOL)
        return read_json(file) if file and file.exists() else {}

    def _line(self, row: Row) -> str:
        """A row as JSON, with its checksum where rows of one protocol are kept to be gone on with."""
        text = json.dumps(row)
        return text + "\n" if "protocol" not in self.head else f'{text[:-1]}, "{CHECK}": "{_checksum(text)}"}}\n'

    def _agree(self, there: Mapping[str, Any]) -> None:
        """Refuse rows of another protocol, naming what differs, and take over what theirs says beside."""
        if self.path is None or not there or not isinstance(now := self.head.get("protocol"), Mapping):
            return
        if changed := sorted(k for k in there.keys() & now.keys() if there[k] != now[k]):
            message = "; ".join(f"{k}: {there[k]!r} there, {now[k]!r} now" for k in changed)
            raise ValueError(
                f"{self.path} holds rows of another protocol ({message}); rows are not mixed: choose another folder"
            )
        self.head["protocol"] = {**there, **now}

    def _read(self) -> list[Row]:
        self._known = None
        if self.path is None or not self.path.exists():
            return self.all if self.path is None else []
        if self.path.suffix != ".jsonl":
            data = read_json(self.path)
            if not isinstance(data.get("rows"), list) or not all(isinstance(row, dict) for row in data["rows"]):
                raise ValueError(f"{self.path} holds no rows; nothing is overwritten: choose another folder")
            self._agree(data.get("protocol", {}))
            self.head = {k: v for k, v in data.items() if k not in ("rows", "protocol")} | self.head
            return list(data["rows"])
        self._agree(self._protocol())
        looks, lines, rows = _looks(self.path), self.path.read_bytes().split(b"\n"), []
        for number, line in enumerate(lines, 1):
            try:
                rows += [_row(line)] if line else []
            except ValueError as error:
                if number < len(lines):
                    way = "remove the line, which is measured again, or choose another folder"
                    raise ValueError(f"{self.path}, line {number}, is not a row ({error}): {way}") from None
        self._known = None if lines[-1] else looks
        return rows


def _looks(path: Path) -> tuple[int, ...] | None:
    """What changes with a file, whoever writes to it; None: there is none."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _row(line: bytes) -> Row:
    """A line's row; ValueError if it holds none, or has changed since it was written."""
    row = json.loads(line.decode())
    if not isinstance(row, dict) or not row:
        raise ValueError("it holds no mapping")
    check = row.pop(CHECK, None)
    if check is not None and check != _checksum(json.dumps(row)):
        raise ValueError("it is not what was measured: its checksum differs")
    return row


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def _has(row: Row, values: Mapping[str, Any]) -> bool:
    return all(row.get(k) == v for k, v in values.items())


def versions(*packages: str) -> dict[str, str]:
    """Python's, and of these packages those that are installed."""
    result = {"python": platform.python_version()}
    for name in packages or ("hf_longattn", "transformers", "torch", "peft", "accelerate"):
        with contextlib.suppress(PackageNotFoundError):
            result[name] = version(name)
    return result


def versions_line(*packages: str) -> str:
    return ", ".join(f"{name} {result}" for name, result in versions(*packages).items())
