"""The tables of what a GPU has shown, from lab/results/gpu.json: `<!-- gpu: WHAT -->`."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from hf_longattn.evaluation.report import markdown
from lab.markdown import Contents
from lab.speed.gpu_rows import Row, read

#: The first run was of earlier kernels; now is the latest of the others that has a number.
BEFORE, NOW, UNMODIFIED, NONE = "first", "now", "unmodified", "–"
#: The columns of whole models.
LENGTHS = (8192, 32768)


def rows_of(part: str, run: str | None = None, **fields: Any) -> list[Row]:
    """The rows of a part, those of the latest run last."""
    wanted = {"part": part} | fields | ({} if run in (None, NOW) else {"run": run})
    found = [row for row in read()[1] if wanted.items() <= row.items()]
    return [row for row in found if row["run"] != BEFORE] if run == NOW else found


def number(value: Any, digits: int | None = None) -> str:
    if value is None:
        return NONE
    if isinstance(value, list):
        return " to ".join(number(x, digits) for x in value)
    return f"{value:,.{digits}f}" if digits is not None else f"{value:,g}"


def named(method: str) -> str:
    return method if method == UNMODIFIED else f"`{method}`"


def methods_of(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in rows))


def over(run: str, length: int, method: str, field: str) -> Any:
    """A number of a whole model; of the unmodified one, which goes between the others, the median."""
    found = [row for row in rows_of("whole", run, length=length, method=method) if field in row]
    found = [row for row in found if row["run"] == found[-1]["run"]]
    if field == "step_reads":  # the first count of a process has one of the counter's own
        return min((row[field] for row in rows_of("whole", run, method=method) if field in row), default=None)
    if method == UNMODIFIED and len(found) > 1:
        return statistics.median(row[field] for row in found)
    return found[-1][field] if found else None


def prefill_ratio(run: str, length: int, method: str) -> float | None:
    given = over(run, length, method, "prefill_ratio")
    own = [row for row in rows_of("whole", run, length=length, method=method) if "prefill_ms" in row]
    return (
        given
        if given is not None or not own
        else own[-1]["prefill_ms"] / over(own[-1]["run"], length, UNMODIFIED, "prefill_ms")
    )


def newest(cell: Callable[..., str], *what: Any) -> str:
    """A cell of the later runs, else of the first one, which says so."""
    now, first = (cell(run, *what) for run in (NOW, BEFORE))
    return f"{first} (first run)" if now == NONE and first not in (NONE, "failed") else now


def reading(run: str, length: int, method: str) -> str:
    """Milliseconds of the unmodified model, of the others their ratio to them."""
    if method == UNMODIFIED:
        return f"{number(over(run, length, method, 'prefill_ms'), 0)} ms"
    return number(prefill_ratio(run, length, method), 2)


def memory(run: str, method: str) -> str:
    return number(over(run, 32768, method, "prefill_mib"))


def prefill() -> str:
    """Time of reading a prompt; peak memory at 32k."""
    lines = []
    for method in sorted(methods_of(rows_of("whole")), key=lambda name: name != UNMODIFIED):
        lines.append([named(method), *(newest(reading, n, method) for n in LENGTHS), newest(memory, method)])
    return markdown(["", *(f"{n:,}" for n in LENGTHS), "MiB at 32,768"], lines)


def step() -> str:
    """A decoded token: its kernels' time as a ratio to the unmodified model's, and by the clock, in turn with that."""
    lines = []
    for method in sorted(methods_of(rows_of("whole", NOW)), key=lambda name: name != UNMODIFIED):
        clock = [row["ratio"] for row in rows_of("step", "third", method=method) if row["length"] == LENGTHS[0]]
        lines.append([named(method), *(kernels(n, method) for n in LENGTHS), number(clock[-1] if clock else None, 2)])
    return markdown(["", *(f"kernels, behind {n:,}" for n in LENGTHS), f"by the clock, behind {LENGTHS[0]:,}"], lines)


def kernels(length: int, method: str) -> str:
    """Milliseconds of a token's kernels of the unmodified model, of the others their ratio to them."""
    own, base = (over(NOW, length, name, "step_kernel_ms") for name in (method, UNMODIFIED))
    if own is None or base is None:
        return NONE
    return f"{base:.2f} ms" if method == UNMODIFIED else f"{own / base:.2f}"


def attention() -> str:
    """Forward by the device's own time, and by the clock, and forward and backward in brackets, as ratios to sdpa."""
    rows = [r for r in rows_of("attention") if r["run"] != BEFORE]
    shapes = sorted({(r["head_dim"], r["length"]) for r in rows})
    lines = []
    for method in methods_of(rows):
        own = {(r["head_dim"], r["length"]): r for r in rows if r["method"] == method}
        lines.append([named(method), *(ratios(own.get(shape)) for shape in shapes)])
    return markdown(["", *(f"{length:,}, head_dim {dim}" for dim, length in shapes)], lines)


def ratios(row: Row | None) -> str:
    if row is None or "forward" not in row:
        return NONE
    alone = row["kernels_ms"] / row["sdpa_kernels_ms"] if "kernels_ms" in row else None
    return f"{number(alone, 2)} / {row['forward']:.2f} ({number(row.get('both'), 2)})"


def static() -> str:
    """Milliseconds a token of a model of two layers, and the largest difference of its logits from plain generate's."""
    lines = []
    for method in methods_of(rows_of("static")):
        cells = [newest(method_cell, method, what) for what in ("dynamic", "static compiled")]
        errors = [r["err"] for r in rows_of("static", NOW, method=method) if "err" in r]
        lines.append([named(method), *cells, f"{max(errors):.0e}" if errors else NONE])
    return markdown(["", "own cache", "static cache", "largest difference"], lines)


def method_cell(run: str, method: str, what: str) -> str:
    found = rows_of("static", run, method=method, what=what)
    return "failed" if any("error" in r for r in found) else number(found[-1].get("ms_a_token") if found else None)


def exactness() -> str:
    """The largest error in float32 over all ways to run, and those in bfloat16; of the latest run that had the method."""
    rows = [r for r in rows_of("exactness") if r["run"] != BEFORE and "err" in r]
    lines = []
    for method in sorted(methods_of(rows), key=lambda name: name != UNMODIFIED):
        last = [r for r in rows if r["method"] == method][-1]["run"]
        own = {r["what"]: r["err"] for r in rows if r["method"] == method and r["run"] == last}
        whole = {k: v for k, v in own.items() if not k.startswith("bfloat16") and k != "generate padded"}
        halves = [f"{own[k]:.0e}" if k in own else NONE for k in ("bfloat16", "bfloat16 decode")]
        lines.append([named(method), str(len(whole)), f"{max(whole.values()):.0e}", *halves])
    return markdown(["", "ways", "largest error, float32", "bfloat16, one pass", "bfloat16, decoding"], lines)


TABLES: dict[str, Callable[[], str]] = {
    **{"prefill": prefill, "step": step, "attention": attention},
    **{"static": static, "exactness": exactness},
}


def contents() -> Contents:
    """What stands below `<!-- gpu: TABLE -->`, and within `<!-- gpu: prefill RUN LENGTH METHOD -->`."""

    def made(what: str) -> str:
        if what in TABLES:
            return TABLES[what]()
        _, run, length, method = what.split()
        return number(prefill_ratio(run, int(length), method), 2)

    return {"gpu": made}
