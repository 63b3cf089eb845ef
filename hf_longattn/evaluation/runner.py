"""`evaluate`, and the runner behind it and the commands: it checks options, measures tasks row by row, and reports."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from ..checks import check_folder, device_of
from ..integration import apply
from ..integration.model import no_untrained_warning
from ..slots.registry import did_you_mean
from .checkpoints import Checkpoint
from .corpus import Corpus, reading_under
from .experiment import Cell, Experiment, fingerprint, sha256_of
from .loading import OneModel, check_setting, empty_under, load_setting
from .options import EvalOptions
from .report.page import DATA, FIGURES, PAGE
from .results import Results
from .rows import PROTOCOL, Row, RowFile, versions_line
from .settings import Setting
from .tasks import task_of
from .tasks.base import COLUMNS
from .tasks.registry import ALIASES

ROWS = "rows.jsonl"


def evaluate(
    model: Any,
    texts: Mapping[str, str] | Sequence[str] | str = (),
    settings: Sequence[str | Setting] = (),
    out: Path | str | None = None,
    **options: Any,
) -> Results:
    """Measure what methods do to a model's losses and answers, short and long, beside the model as it is.

        results = hf_longattn.evaluate(model, [book], ["logn", "rerope"], lengths=[2048, 8192], tokenizer=tokenizer)
        results.to_pandas()

    Args:
        model: a directory, a name on the Hub, or a loaded model, which is as it was afterwards.
        texts: contents by name, several contents, or one; none where a task needs none.
        settings: methods by name, "scale_invariant:tau=100@yarn:2" and the like, or `Setting`s.
        out: a folder for rows and report; an interrupted evaluation goes on from there. None keeps them in memory.
        options: see `hf_longattn.evaluation.EvalOptions`: tasks, lengths, targets, ...; `tokenizer` of a loaded model.

    Returns:
        Rows and tables of all that was asked for; a notebook shows them.

    Raises:
        ValueError: anything that would go wrong later, named, before weights are read.
        TypeError: an option that there is not.
    """
    known = {f.name for f in fields(EvalOptions)} - {"model", "texts", "settings"}
    if unknown := sorted(options.keys() - known):
        hint = did_you_mean(unknown[0], known)
        raise TypeError(f"evaluate has no option {unknown[0]!r}; {hint}it has: {', '.join(sorted({*known, 'out'}))}")
    runner = Runner(EvalOptions(model, texts, settings, **options))  # type: ignore[arg-type]  # it takes a list of texts, too
    experiment = runner.open(None if out is None else Path(out))
    try:
        experiment.run()
    finally:
        runner.put_back()
    results = runner.results(experiment)
    if out is not None:
        results.write(Path(out), runner.title)
    return results


def _with_options() -> inspect.Signature:
    """The signature of `evaluate` with the options of `EvalOptions` in place of `**options`."""
    own, options = (list(inspect.signature(x).parameters.values()) for x in (evaluate, EvalOptions))
    named = {p.name for p in own}
    further = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in options if p.name not in named]
    return inspect.Signature([*own[:-1], *further], return_annotation="Results")


evaluate.__signature__ = _with_options()  # type: ignore[attr-defined]  # for `help`, and for what a notebook completes


class Runner:
    """Runs an evaluation's tasks under its settings. All are checked against the model's config and tokenizer first.

    Args:
        options: `device` and `dtype` become those that "auto" means here.

    Raises:
        ValueError: anything that would go wrong later, named.
    """

    def __init__(self, options: EvalOptions) -> None:
        self.options = options
        options.device = device_of(options.device)
        self.checkpoint = checkpoint = Checkpoint(options.model)
        if not checkpoint.is_loaded:
            options.dtype = checkpoint.precision(options.dtype, options.device)
        self._given = OneModel(checkpoint, options.dtype, options.device) if checkpoint.is_loaded else None
        kinds = {name: task_of(name) for name in (ALIASES.get(t, t) for t in options.tasks or ())}
        head, within = any(kind.head for kind in kinds.values()), any(kind.within for kind in kinds.values())
        prefixed, cut = any(kind.prefixed for kind in kinds.values()), any(kind.documents for kind in kinds.values())
        if options.lengths:
            checkpoint.check_lengths(options.lengths)
        elif within:
            raise ValueError("no lengths to measure at: give some")
        unmodified, *_ = [check_setting(setting, checkpoint, head) for setting in options.settings]
        trained = unmodified.train_length
        if within and trained is not None and options.lengths[0] > trained:
            raise ValueError(
                f"the model was trained at {trained} tokens and all lengths lie beyond: add one within, so that what a method "
                "costs there is part of the result"
            )
        if options.prefix is not None:
            if not prefixed:
                raise ValueError("a prefix belongs to the tasks loss and copies; the others read whole texts")
            for setting in options.settings:
                _check_prefix(options.prefix, setting, checkpoint)
        self.corpus = Corpus(options, checkpoint, trained, self.load, cut)
        self.tasks = [kind(self.corpus, name) for name, kind in kinds.items()]

    @property
    def title(self) -> str:
        model = self.options.model
        name = model if isinstance(model, str) else model.name_or_path or type(model).__name__
        return f"{Path(name).name} under attention methods"

    def load(self, setting: Setting) -> Any:
        """A model under a setting."""
        options = self.options
        return self._given(setting) if self._given else load_setting(setting, self.checkpoint, options.dtype, options.device)

    def put_back(self) -> None:
        """Let a loaded model run what it ran before."""
        if self._given is not None:
            self._given.put_back()

    @property
    def protocol(self) -> dict[str, Any]:
        """Return what all rows of a folder must share; settings, tasks, texts and shorter lengths may join later."""
        options = self.options
        out = {"model": fingerprint(self.checkpoint.model), "trained": self.corpus.train_length}
        out |= {"dtype": options.dtype, "seed": options.seed, "bos": bool(self.corpus.start)}
        if self.corpus.documents:
            out["longest"] = self.corpus.longest
        for task in self.tasks:
            out |= task.protocol
        return out

    def cells(self) -> list[Cell]:
        """Return the cells in order: first those that others need, then setting by setting, so that each is loaded once, and
        in each the shortest length first.

        With `shortest_first` lengths come before settings, with a prefix documents do.
        """
        cells = [cell for setting in self.options.settings for task in self.tasks for cell in task.cells(setting)]
        needed = {cell.by.name for cell in cells if cell.by is not None}
        settings = {setting.name: n for n, setting in enumerate(self.options.settings)}
        documents = {document.name: n for n, document in enumerate(self.corpus.documents)}

        def place(cell: Cell) -> tuple[Any, ...]:
            key, length = cell.key, cell.key["length"]
            first = length if self.options.shortest_first else 0
            if self.options.prefix is not None:
                first = documents.get(key["which"], len(documents))
            return cell.name not in needed, first, settings[key["setting"]], length

        return sorted(cells, key=place)

    def open(self, folder: Path | None, about: Mapping[str, Any] | None = None) -> Experiment:
        """The experiment, with the rows of a folder (None: of no folder), checked against these options.

        Raises:
            ValueError: the folder holds rows of another protocol, setting, text or model, or something that is no report.
        """
        if folder is not None:
            check_folder(folder, {ROWS, f"{ROWS}.lock", PAGE, DATA, FIGURES}, PROTOCOL)
        file = RowFile(folder and folder / ROWS, protocol=self.protocol)
        return Experiment(file, self.load, COLUMNS, self.cells(), about)

    def format_row(self, row: Row, new: bool) -> str:
        """A row that was measured now, in a line."""
        return f"{task_of(row['task']).format_row(row)} ({row['seconds']:.0f} s)" if new else ""

    def results(self, experiment: Experiment, everything: bool = False) -> Results:
        """Return the results measured so far: of the settings asked for, or of all that the experiment's file holds."""
        rows, names = list(experiment.rows.values()), [s.name for s in self.options.settings]
        others = list(dict.fromkeys(r["setting"] for r in rows if r["setting"] not in names))
        if everything:
            names, others = names + others, []
        tasks = dict.fromkeys(r["task"] for r in rows)
        rows = [r for t in tasks for r in task_of(t).counted([r for r in rows if r["setting"] in names and r["task"] == t])]
        facts, own = self._facts(experiment, rows), self.checkpoint.method
        trained, keep, name = self.corpus.train_length, self.options.keep, None if own is None else own.name
        return Results(rows, names, trained, experiment.protocol, keep, facts, name, others)

    def _facts(self, experiment: Experiment, rows: Sequence[Row]) -> dict[str, str]:
        """Return the facts at the end of the page of these rows."""
        options, trained = self.options, self.corpus.train_length
        planned = [cell.name in experiment.rows for cell in experiment.cells]
        model = options.model if isinstance(options.model, str) else experiment.protocol["model"]
        source = Path(model) / "SOURCE"
        texts = [f"{name} (SHA-256 {sha256_of(content)})" for name, content in options.texts.items()]
        return {
            "Model": source.read_text(encoding="utf-8").strip() if source.is_file() else portable(model),
            "Trained length": "not in its config" if trained is None else f"{trained:,} tokens",
            "Rows": f"{len(rows)} measured; of this command's {len(planned)}, {planned.count(False)} are open",
            "Texts": ", ".join(texts) or "none",
            "Precision": ", ".join(dict.fromkeys(r.get("dtype", options.dtype) for r in rows)) or options.dtype,
            "Commands": "\n".join(dict.fromkeys(r.get("command", "") for r in rows)).strip(),
            "Versions": versions_line("hf_longattn", "transformers", "torch"),
            "Threads": str(torch.get_num_threads()),
            "Seconds": f"{sum(r['seconds'] for r in rows):.0f} for all rows together",
        }


def _check_prefix(prefix: Setting, setting: Setting, checkpoint: Checkpoint) -> None:
    """Raise ValueError for a prefix that cannot read the text before a setting's targets; no weights are read."""
    empty = empty_under(setting, checkpoint)
    try:
        with no_untrained_warning():
            apply(empty, reading_under(empty, setting, prefix))
    except ValueError as error:
        raise ValueError(f"the prefix {prefix.name!r}, before the targets of {setting.name!r}: {error}") from None


def portable(path: str) -> str:
    """A path, or NAME=path, as it may stand in a report: an absolute one is shortened to its last part."""
    name, equals, where = path.partition("=") if not Path(path).is_absolute() else ("", "", path)
    return f"{name}{equals}{Path(where).name}" if Path(where).is_absolute() else path
