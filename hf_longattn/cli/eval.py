"""`hf-longattn eval`: what methods do to a model, as a page."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from .common import (
    Adapters,
    Device,
    Dtype,
    Ropes,
    SettingsFile,
    TrainLength,
    alone,
    command_line,
    console,
    portable,
    precision,
    read_texts,
    refusing,
    run_experiment,
    table,
    tokens,
    told,
)

if TYPE_CHECKING:
    from ..evaluation import Experiment, Plan, Results
    from ..evaluation.rows import Row


def evaluate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A model on the Hub or a directory.")],
    text: Annotated[list[str], typer.Option(help="Texts, plain UTF-8; several with commas or by repeating the option.")],
    out: Annotated[Path, typer.Option(help="A folder for the report; an interrupted run continues where it stopped.")],
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="METHOD[:key=value...][@ROPE[:factor]], several with commas: infoscale,scale_invariant:tau=100,@yarn:2. "
            "The unmodified model is always measured."
        ),
    ] = None,
    rope: Ropes = None,
    adapter: Adapters = None,
    settings: SettingsFile = None,
    train_length: TrainLength = None,
    lengths: Annotated[str, typer.Option(help="Tokens, with commas; 16k is 16,384.")] = "2k,4k,8k",
    tasks: Annotated[
        str, typer.Option(help="loss, copies, long_ppl and tasks, with commas: needle, needles, passkey, multi_key, ...")
    ] = "loss",
    windows: Annotated[int, typer.Option(help="Documents of the longest length to take from each text.")] = 1,
    targets: Annotated[int, typer.Option(help="The last tokens of each document, scored at every length.")] = 512,
    bos: Annotated[str, typer.Option(help="A beginning-of-text token: auto (as the tokenizer does), always, never.")] = "auto",
    samples: Annotated[int, typer.Option(help="Texts per task and length; for needle per depth.")] = 3,
    depths: Annotated[int, typer.Option(help="Places of the needle, from first to last.")] = 5,
    near: Annotated[str, typer.Option(help="long_ppl: tokens of the short context.")] = "4k",
    evaluator: Annotated[
        str,
        typer.Option(help="long_ppl: the setting that selects the key tokens; of another model by an entry of --settings."),
    ] = "unmodified",
    keep: Annotated[
        float, typer.Option(help="Effective length: the share of its score at the shortest length that a task must keep.")
    ] = 0.85,
    dtype: Dtype = "auto",
    device: Device = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the tasks' texts.")] = 0,
    shortest_first: Annotated[
        bool, typer.Option("--shortest-first", help="All settings at the shortest length first; loads models more often.")
    ] = False,
    page_only: Annotated[
        bool, typer.Option("--page-only", help="Measure nothing; write the page from the rows so far.")
    ] = False,
    prefix: Annotated[
        str | None,
        typer.Option(
            help="METHOD, as streaming:window=4096: the text before the targets is read under it, once for all settings that "
            "differ only in positions or length temperatures. Much cheaper; ignores their effect on that text."
        ),
    ] = None,
    title: Annotated[str | None, typer.Option(help="The page's title.")] = None,
) -> None:
    """Measure MODEL unmodified and under methods, and write a page that shows what each costs and gains.

    It measures loss by length (the same tokens, with more and more context) and by position, and tasks. Mistakes in the
    command are refused before weights are read. After an interruption the same command continues, and more settings, tasks
    and texts can be added to a folder later. Several processes or GPUs:
    torchrun --nproc-per-node 8 -m hf_longattn.cli eval ...
    """

    from ..checks import check_model, device_of
    from ..evaluation.loading import load_tokenizer
    from ..evaluation.plan import Plan
    from ..evaluation.settings import parse_settings
    from ..evaluation.verdict import summary

    texts = list(read_texts(text).items())
    _check(out, keep)
    with refusing("--device"):
        device = device_of(device)
    with refusing():
        check_model(model)
        plan = Plan(
            model=model,
            settings=parse_settings(method or [], rope or [], settings, adapter or [], told(train_length)),
            lengths=[tokens(n) for n in lengths.split(",")],
            texts=texts,
            tokenizer=load_tokenizer(model),
            tasks=[t.strip() for t in tasks.split(",")],
            windows=windows,
            targets=targets,
            bos=bos,
            samples=samples,
            depths=depths,
            dtype=precision(model, dtype, device),
            seed=seed,
            near=tokens(near),
            evaluator=evaluator,
            shortest_first=shortest_first,
            prefix=prefix,
        )
    experiment = _open(context, plan, out, device)
    interrupted = not page_only and _run(experiment, out)
    results = _write(plan, experiment, out, title, keep)
    console.print(_table(results))
    console.print(summary(results), highlight=False)
    console.print(f"The report: {out / 'index.html'}", highlight=False)
    if interrupted:
        console.print(f"Interrupted; {len(experiment.rows)} rows are kept, and the same command continues.")
        raise typer.Exit(130)


def _check(out: Path, keep: float) -> None:
    """What can be wrong with these options alone."""
    from ..checks import check_output

    with refusing("--out"):
        check_output(out)
    if not 0 < keep <= 1:
        raise typer.BadParameter(f"a share lies in (0, 1], not at {keep:g}", param_hint="--keep")


def _open(context: typer.Context, plan: Plan, out: Path, device: str) -> Experiment:
    """The folder's rows; no other command measures into it meanwhile."""
    from ..evaluation.plan import LOCK
    from ..evaluation.processes import own_device

    with refusing("--out"):
        if os.environ.get("RANK", "0") == "0":
            alone(context, out / LOCK)
        return plan.open(out, own_device(device), {"command": command_line(context)})


def _run(experiment: Experiment, out: Path) -> bool:
    """Whether it was interrupted; only the first of several processes returns."""
    from ..evaluation.processes import together

    with together() as rank:
        console.quiet = rank > 0
        if kept := sum(cell.name in experiment.rows for cell in experiment.cells):
            console.print(f"{kept} of {len(experiment.cells)} rows are in {out} already.", highlight=False)
        interrupted = run_experiment(experiment, _in_a_line)
    if rank > 0:
        raise typer.Exit(130 if interrupted else 0)
    return interrupted


def _in_a_line(row: Row) -> str:
    if "loss" in row:
        return f"{row['loss']:.3f} nats ({row['seconds']:.0f} s)"
    if "key_tokens" in row:
        loss = "none" if row["key_loss"] is None else f"{row['key_loss']:.3f} nats"
        return f"{row['key_tokens']} key tokens, {loss} ({row['seconds']:.0f} s)"
    right = sum(a["exact"] for a in row["answers"])
    return f"{right} of {len(row['answers'])} right ({row['seconds']:.0f} s)"


def _write(plan: Plan, experiment: Experiment, out: Path, title: str | None, keep: float) -> Results:
    from ..evaluation import Results
    from ..evaluation.loading import own_method
    from ..evaluation.report import write_report
    from ..evaluation.report.evaluation import sections
    from ..evaluation.verdict import headline

    names = [s.name for s in plan.settings]
    names += [s for s in dict.fromkeys(r["setting"] for r in experiment.rows.values()) if s not in names]
    results = Results(
        rows=list(experiment.rows.values()),
        settings=names,
        targets=experiment.protocol.get("targets", plan.targets),
        bos=experiment.protocol["bos"],
        train_length=plan.train_length,
        prefix=experiment.protocol.get("prefix"),
        near=experiment.protocol.get("near", plan.near),
        evaluator=experiment.protocol.get("evaluator", plan.evaluator),
        keep=keep,
    )
    summary, facts = headline(results), _facts(plan, experiment, results)
    if own := own_method(plan.model):
        runs = f"The checkpoint itself runs {own}: “unmodified” is the model as it was saved"
        summary = f"{runs}, and other settings keep {own} in the slots that they leave free.\n\n{summary}"
    write_report(out, title or f"{Path(plan.model).name} under attention methods", summary, sections(results), facts)
    return results


def _facts(plan: Plan, experiment: Experiment, results: Results) -> dict[str, str]:
    """What stands at the end of the page."""
    import torch

    from ..evaluation.rows import versions_line

    planned = [cell.name in experiment.rows for cell in experiment.cells]
    source = Path(plan.model) / "SOURCE"
    texts = [f"{name} (SHA-256 {sha256(content.encode()).hexdigest()[:16]})" for name, content in plan.texts]
    return {
        "Model": source.read_text(encoding="utf-8").strip() if source.is_file() else portable(plan.model),
        "Trained length": "not in its config" if plan.train_length is None else f"{plan.train_length:,} tokens",
        "Rows": f"{len(experiment.rows)} measured" + f"; of this command's {len(planned)}, {planned.count(False)} are open",
        "Texts": ", ".join(texts),
        "Precision": ", ".join(dict.fromkeys(r.get("dtype", plan.dtype) for r in experiment.rows.values())) or plan.dtype,
        "Commands": results.command(),
        "Versions": versions_line("hf_longattn", "transformers", "torch"),
        "Threads": str(torch.get_num_threads()),
        "Seconds": f"{sum(r['seconds'] for r in experiment.rows.values()):.0f} for all rows together",
    }


def _table(results: Results) -> Table:
    losses = {(name, n): list(results.losses(name, n).values()) for name in results.settings for n in results.lengths}
    cells = {key: f"{sum(result) / len(result):.3f}" if result else "–" for key, result in losses.items()}
    rows = [[name, *(cells[name, n] for n in results.lengths)] for name in results.settings]
    return table("Loss in nats per token, by context length", ["", *(f"{n:,}" for n in results.lengths)], rows)
