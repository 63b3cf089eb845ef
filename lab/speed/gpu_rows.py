"""The file of what a GPU has shown, lab/results/gpu.json: rows that `lab/speed/gpu.py` printed, and where they are from.

    python lab/speed/gpu_rows.py third --commit dcd7df7 --date 2026-11-26 --what "all parts" LOG ...

takes the lines `ROW {json}` of logs as the rows of the run `third`, in the place of those that it had, and from their lines
`ON {json}` the GPU and the versions. Rows of other runs stay as they are.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]
FILE = Path(__file__).parents[1] / "results" / "gpu.json"
#: What parts were called in earlier logs, and what a row without a part is.
PARTS = {"tune": "tiles", "bwd": "gradients", "att": "attention", None: "exactness"}


def read(file: Path = FILE) -> tuple[dict[str, Row], list[Row]]:
    """The runs by name, and all rows, each with its "run"."""
    if not file.exists():
        return {}, []
    result = json.loads(file.read_text(encoding="utf-8"))
    return result["runs"], result["rows"]


def write(runs: dict[str, Row], rows: list[Row], file: Path = FILE) -> None:
    """One line for each run and each row."""
    named = ",\n".join(f"{json.dumps(name)}: {json.dumps(run)}" for name, run in runs.items())
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    file.write_text(f'{{"runs": {{\n{named}\n}},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8")


def rows_of(log: Path) -> list[Row]:
    """The rows in a log, under one set of names."""
    lines = log.read_text(encoding="utf-8").splitlines()
    found = [json.loads(line.removeprefix("ROW ")) for line in lines if line.startswith("ROW ")]
    return [tidy(row) for row in found if row.keys() - {"part", "seconds"}]


def machine_of(logs: list[Path]) -> Row:
    """The GPU and the versions that all logs name alike, or nothing where none does; else a ValueError."""
    lines = {line for log in logs for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("ON ")}
    if len(lines) > 1:
        raise ValueError(f"the logs are of several machines, a run of one: {', '.join(sorted(lines))}")
    named: Row = json.loads(lines.pop().removeprefix("ON ")) if lines else {}
    return named


def tidy(row: Row) -> Row:
    part = row.get("part")
    result = {"part": PARTS.get(part, part)} | {key: value for key, value in row.items() if key != "part"}
    if result.get("method") == "none":
        result["method"] = "unmodified"
    for old, new in (("n", "length"), ("D", "head_dim")):
        if old in result:
            result[new] = result.pop(old)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="its name in the file")
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--commit", required=True, help="of the project")
    parser.add_argument("--date", required=True)
    parser.add_argument("--what", required=True, help="what was run")
    args = parser.parse_args()
    machine = machine_of(args.logs)
    if not machine:
        parser.error("no line begins with ON: gpu.py prints it on a GPU")
    origin = machine | {name: getattr(args, name) for name in ("date", "commit", "what")}
    runs, rows = read()
    own = [{"run": args.run} | row for log in args.logs for row in rows_of(log)]
    if not own:
        parser.error("no line begins with ROW")
    write(runs | {args.run: origin}, [row for row in rows if row["run"] != args.run] + own)
    print(f"{FILE}: {len(own)} rows of {args.run}")


if __name__ == "__main__":
    main()
