"""`hf-longattn probe`: what settings do to far distances, in seconds a distance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import (
    Adapters,
    Device,
    Dtype,
    Ropes,
    SettingsFile,
    TrainLength,
    command_line,
    console,
    precision,
    read_texts,
    refusing,
    run_experiment,
    table,
    tokens,
    told,
)

if TYPE_CHECKING:
    import torch

    from ..evaluation.rows import RowFile

RESULT = "probe.json"
SAYS_NOT = (
    "A probe reads 1,408 tokens whose positions jump. It does not measure dilution by the many keys that a long text has "
    "in between: `hf-longattn eval` and `extend` read whole texts."
)


def probe(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A model on the Hub or a directory.")],
    text: Annotated[list[str], typer.Option(help="Texts, plain UTF-8; several with commas or by repeating the option.")],
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="METHOD[:key=value...][@ROPE[:factor]], several with commas: rerope,string,@yarn:2. "
            "The unmodified model is always probed."
        ),
    ] = None,
    rope: Ropes = None,
    adapter: Adapters = None,
    settings: SettingsFile = None,
    train_length: TrainLength = None,
    distances: Annotated[
        str | None,
        typer.Option(help="Tokens back, with commas; 16k is 16,384. Default: eight up to twice the trained length."),
    ] = None,
    passages: Annotated[int, typer.Option(help="Passages to take from each text.")] = 4,
    out: Annotated[
        Path | None, typer.Option(help="A folder for rows and curves; an interrupted run continues where it stopped.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the passages' places.")] = 0,
) -> None:
    """Probe how far back MODEL reads, unmodified and under methods, without reading long texts.

    The model reads a passage, then, after a jump in positions, other text and the passage again. The loss on the other text
    shows whether the model works at that position, the loss on the copy whether it retrieves from that distance. Intervals
    are over passages. In a long text many keys in between compete for attention; a probe does not measure that.
    """
    import torch

    from ..checks import check_model, device_of
    from ..evaluation.experiment import Experiment
    from ..evaluation.loading import check_setting, load_setting, load_tokenizer
    from ..evaluation.measures.probe import probing
    from ..evaluation.rows import RowFile, versions_line
    from ..evaluation.settings import parse_settings

    texts = read_texts(text)
    if out is not None:
        _check_out(out)
    with refusing("--device"):
        device = device_of(device)
    with refusing():
        check_model(model)
        chosen = parse_settings(method or [], rope or [], settings, adapter or [], told(train_length))
        trained, *_ = [check_setting(setting, model).train_length for setting in chosen]
        tokenizer = load_tokenizer(model)
    far = _distances(distances, trained, model)
    ids = _passages(texts.values(), tokenizer, passages, seed)
    read_in = precision(model, dtype, device)
    protocol = _protocol(model, trained, read_in, texts, passages, seed)
    with refusing("--out"):
        rows = RowFile(None if out is None else out / RESULT, protocol=protocol)
        about = {"command": command_line(context), "seed": seed}
        about["versions"] = f"{versions_line()}, {torch.get_num_threads()} threads"
        load = partial(load_setting, model=model, dtype=read_in, device=device)
        experiment = Experiment(chosen, [ids], [probing(ids, far)], rows, load, about=about)
    interrupted = run_experiment(experiment)
    _conclude(rows, [s.name for s in chosen], far, trained, len(ids), out)
    if interrupted:
        kept = "." if out is None else f"; {len(rows.all)} rows are kept, and the same command continues."
        console.print(f"Interrupted{kept}")
        raise typer.Exit(130)


def _passages(texts: Iterable[str], tokenizer: Any, count: int, seed: int) -> torch.Tensor:
    import torch

    from ..evaluation.measures.probe import passages

    with refusing("--passages"):
        encoded = [tokenizer(t, return_tensors="pt", verbose=False).input_ids for t in texts]
        return torch.cat([passages(ids, count, seed) for ids in encoded])


def _protocol(
    model: str, trained: int | None, dtype: str, texts: Mapping[str, str], passages: int, seed: int
) -> dict[str, Any]:
    """What must be the same for all rows of a file."""
    from ..evaluation.experiment import fingerprint
    from ..evaluation.measures.copies import PASSAGE, SKIP
    from ..evaluation.measures.probe import AFTER, BEFORE

    return {
        "model": fingerprint(model),
        "trained": trained,
        "dtype": dtype,
        "texts": {name: sha256(content.encode()).hexdigest()[:16] for name, content in texts.items()},
        "passages": passages,
        "seed": seed,
        "tokens": {"before": BEFORE, "after": AFTER, "copy": PASSAGE, "of which not counted": SKIP},
    }


def _check_out(out: Path) -> None:
    from ..checks import check_output

    with refusing("--out"):
        check_output(out)
        if foreign := sorted({p.name for p in out.iterdir()} - {RESULT, *PICTURES} if out.exists() else ()):
            raise ValueError(f"{out} holds something else ({foreign[0]}); nothing is overwritten: choose another folder")


def _distances(given: str | None, trained: int | None, model: str) -> list[int]:
    from ..evaluation.loading import check_lengths
    from ..evaluation.measures.copies import PASSAGE
    from ..evaluation.measures.probe import distances_to

    with refusing("--distances"):
        if given is not None:
            far = sorted({tokens(d) for d in given.split(",")})
        elif trained is not None:
            far = list(distances_to(2 * trained))
        else:
            raise ValueError("the model's config names no trained length: say which distances to probe")
        distances_to(far[0])
        check_lengths(model, [far[-1] + PASSAGE])
    return far


def _conclude(rows: RowFile, names: list[str], far: list[int], trained: int | None, passages: int, out: Path | None) -> None:
    """What was found, on the console and as curves."""
    names = [name for name in names if rows.find(setting=name)]
    for what, title in (("text", "Loss on text after the jump"), ("copy", "Loss on a passage read again")):
        body = [[n, *(_cell(rows, n, d, what) for d in far)] for n in names]
        head = f"{title}, nats a token, ± 95 % over {passages} passages; trained at {trained}"
        console.print(table(head, ["tokens back", *(f"{d:,}" for d in far)], body))
    console.print(SAYS_NOT, highlight=False)
    if out is not None and names:
        for name, png in pictures(rows, names, trained).items():
            (out / name).write_bytes(png)
        console.print(f"Rows and curves: {out}", highlight=False)


def _cell(rows: RowFile, name: str, distance: int, what: str) -> str:
    from ..evaluation.statistics import mean_interval

    if (row := rows.find(setting=name, distance=distance)) is None:
        return "–"
    mean, half = mean_interval(row[what])
    return f"{mean:.2f}" if half != half else f"{mean:.2f} ± {half:.2f}"


#: A file, what its curves show, and how it is titled.
PICTURES = {
    "probe-copy.png": ("copy", "A passage read again, by how far back"),
    "probe-text.png": ("text", "Text after a jump, by how far"),
}


def pictures(rows: RowFile, names: list[str], trained: int | None) -> dict[str, Any]:
    """A PNG of each of PICTURES: a curve a setting, the trained length marked."""
    from ..evaluation.report.figures import curves, tokens_shown
    from ..evaluation.statistics import mean_interval

    out = {}
    for file, (what, title) in PICTURES.items():
        lines, errors = {}, {}
        for name in names:
            found = sorted((r for r in rows if r["setting"] == name), key=lambda r: r["distance"])
            means = [mean_interval(r[what]) for r in found]
            lines[name] = [(r["distance"], mean) for r, (mean, _) in zip(found, means, strict=True)]
            errors[name] = [half for _, half in means]
        mark = {f"trained: {tokens_shown(trained)}": trained} if trained else {}
        out[file] = curves(lines, "tokens back", "loss (nats per token)", title, mark, errors=errors)
    return out
