"""`hf-longattn extend`: make a model longer without training, and show that it is."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..evaluation.statistics import TOLERANCE
from .common import (
    Device,
    Dtype,
    Model,
    TrainLength,
    check,
    command_line,
    console,
    device_here,
    precision,
    read_tokens,
    refusing,
    run,
    say,
    stop,
    table,
    tokens,
    told,
)

if TYPE_CHECKING:
    from ..evaluation.rows import Row, RowFile
    from ..evaluation.search import Search
    from ..evaluation.settings import Setting
    from ..slots.method import ModelFacts

RESULT = "extend.json"


def extend(
    context: typer.Context,
    model: Model,
    to: Annotated[
        str,
        typer.Option(
            help="Length to reach, in tokens (32k is 32,768, 1M 1,048,576); the trained length improves retrieval within it."
        ),
    ],
    text: Annotated[Path, typer.Option(help="A text of at least that many tokens, of the kind you care about.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Where to save the best model, rows and plot; an interrupted run continues where it stopped."),
    ] = None,
    purpose: Annotated[
        str, typer.Option("--for", help="What to minimise: loss on prose (reading), on far copies (retrieval), or both.")
    ] = "both",
    tolerance: Annotated[
        float,
        typer.Option(help="Acceptable cost within the trained length, in nats per token; 0.02 is 2 % of perplexity."),
    ] = TOLERANCE,
    train_length: TrainLength = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Make MODEL longer without training: probe a list of methods, read your text with the best of them, keep the best.

    Candidates are first probed at far positions, in seconds. The best kinds then read the text in one forward pass each, with
    some passages repeated from far back; loss is reported on prose, within and beyond the trained length, and on these
    copies. Exit status 1 if nothing stays within the tolerance, or nothing is better than the unmodified model by more than
    chance.
    """
    from ..checks import read_text

    length, given = tokens(to), told(train_length)
    _check(out, tolerance)
    check(model, dtype)
    with refusing("--text"):
        read_text(text)
    device = device_here(device)

    from ..evaluation.checkpoints import config_from, load_tokenizer, own_precision, speaks
    from ..evaluation.loading import OneModel
    from ..evaluation.preflight import check_setting
    from ..evaluation.rows import versions_line
    from ..evaluation.search import SEED, Search, by_head
    from ..evaluation.settings import UNMODIFIED, Setting
    from ..extension import beyond_shown, check_purpose, temperature

    with refusing("--for"):
        check_purpose(purpose)
    with refusing("MODEL"):
        facts = check_setting(Setting(UNMODIFIED, train_length=given), model, head=False)
        tokenizer = load_tokenizer(model)
        config = config_from(model)
    trained = _trained(facts, length)
    _tell_of_own(config, model)
    with refusing("MODEL"):
        _check_takes(config, length, purpose, given)
    chosen = precision(model, dtype, device)
    saved_in = dtype if chosen == dtype else own_precision(model)  # what was read in float32 is saved as it came
    if not speaks(config):
        return _unmeasured(model, length, purpose, given, saved_in, tokenizer, out)
    if doubt := beyond_shown(trained, length):
        say(f"Warning: {doubt}.")
    _check_room(trained, length)
    with refusing("--text"):
        ids = read_tokens(text, tokenizer, length)
    rows, load = _rows(model, text, length, trained, chosen, out), OneModel(model, chosen, device)

    def heads(unmodified: Any) -> Setting:
        leaky = next(s for name, s in search.settings.items() if name.startswith("leaky"))
        found = by_head(unmodified, search.input_ids.to(unmodified.device), leaky, search.trained)
        return dataclasses.replace(found, train_length=given)

    about = {"command": command_line(context), "versions": versions_line(), "seed": SEED}
    pays, plain = temperature(facts, length, purpose), facts.rope_type == "default"
    measured = heads if trained >= 2048 and length > trained else None
    search = Search(ids, trained, rows, load, purpose, tolerance, about, pays, plain, measured)
    search.settings = {name: dataclasses.replace(s, train_length=given) for name, s in search.settings.items()}
    _leave_out(search, model)
    choice = _run(search, out)
    _conclude(search, choice)
    if out is not None:
        _save(search, choice, model, saved_in, tokenizer, out)


def _check(out: Path | None, tolerance: float) -> None:
    """Check these options by themselves."""
    from ..checks import check_folder, check_output

    if not tolerance >= 0:
        raise typer.BadParameter(f"a cost in nats is 0 or more, not {tolerance:g}", param_hint="--tolerance")
    if out is not None:
        with refusing("--out"):
            check_output(out)
            check_folder(out, set(), RESULT, f"{RESULT}.lock")


def _check_room(trained: int, length: int) -> None:
    """Raise for lengths between which the passages that are repeated have no room."""
    from ..evaluation.search import LEAST_TRAINED, plan_copies

    edge = trained if length > trained else trained // 2
    if edge < LEAST_TRAINED:
        raise typer.BadParameter(
            f"it was trained at {trained:,} tokens, and to choose by measurement takes {LEAST_TRAINED:,} (twice that where "
            "--to is the trained length): the five passages by which candidates are compared have no room in less. "
            f'hf_longattn.extend(model, "{length}") takes the default without measuring',
            param_hint="MODEL",
        )
    with refusing("--to"):
        plan_copies(edge, length)


def _trained(facts: ModelFacts, length: int) -> int:
    """The trained length, from which there is something to extend."""
    trained = facts.train_length
    if trained is None or length < trained:
        message = f"the model was trained at {trained} tokens ({facts.trained}); nothing to extend"
        raise typer.BadParameter(message, param_hint="--to")
    say(f"Trained at {trained:,} tokens: {facts.trained}.")
    return trained


def _check_takes(config: Any, length: int, purpose: str, given: int | None) -> None:
    """Raise ValueError where hf_longattn.extend refuses the model, before any weights are read."""
    from ..evaluation.checkpoints import build
    from ..extension import extend

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the default; what is chosen is told
        try:
            extend(build(config), length, purpose=purpose, train_length=given)
        except NotImplementedError as error:
            raise ValueError(str(error)) from None


def _tell_of_own(config: Any, model: str) -> None:
    """Say what a checkpoint runs already, and how that changes."""
    from ..integration.names import parsed_config

    own = parsed_config(config.get_text_config())
    if own is None:
        return
    reads = "" if own.extended_to is None else f", extended to {own.extended_to:,} tokens"
    say(
        f"{model} runs {own.name} already{reads}: unmodified is the model with that, and a candidate replaces it where both "
        "fill one slot. To take it out: hf_longattn.remove(model), then hf_longattn.save(model, folder)."
    )


def _unmeasured(
    model: str, length: int, purpose: str, given: int | None, dtype: str, tokenizer: Any, out: Path | None
) -> None:
    """Choose by rule, as in Python, for a model without a language-model head, whose loss cannot be measured."""
    from ..evaluation.loading import load_setting
    from ..evaluation.settings import UNMODIFIED, Setting
    from ..extension import extend

    loaded = load_setting(Setting(UNMODIFIED), model, dtype)
    kind = type(loaded).__name__
    say(
        f"{model} is a {kind}, which has no language-model head: there is no loss to choose by. The text is not read, and the "
        "default of hf_longattn.extend is taken. To choose by measurement, extend the language model that it was made from."
    )
    with refusing("--to"):
        extend(loaded, length, purpose=purpose, train_length=given)
    _write(loaded, model, tokenizer, out)


def _rows(model: str, text: Path, length: int, trained: int, dtype: str, out: Path | None) -> RowFile:
    from ..checks import read_text
    from ..evaluation.experiment import fingerprint, of_text
    from ..evaluation.rows import RowFile
    from ..evaluation.search import SEED

    protocol = {
        "model": fingerprint(model),
        "to": length,
        "trained": trained,
        "dtype": dtype,
        "text": {text.name: of_text(read_text(text))},
        "seed": SEED,
    }
    with refusing("--out"):
        return RowFile(None if out is None else out / RESULT, protocol=protocol)


def _leave_out(search: Search, model: str) -> None:
    """Candidates that rotate in another way, where the model cannot."""
    from ..evaluation.preflight import check_setting

    for name, setting in [(n, s) for n, s in search.settings.items() if s.rope is not None]:
        try:
            check_setting(setting, model)
        except ValueError as error:
            del search.settings[name]
            say(f"{name} is left out: {error}")


def _run(search: Search, out: Path | None) -> str:
    """The best setting's name."""
    from ..evaluation.search import tempered

    probes = sum(not tempered(name) for name in search.settings)
    say(f"Probing {probes} candidates, then reading {search.to} tokens with the best.")
    if run(search.experiment, out, _told, cells=search.cells(), total=search.work):
        stop(search.experiment, out)
    try:
        return search.choice()
    except ValueError as error:
        _show(search)
        say(f"{str(error)[0].upper()}{str(error)[1:]}.")
        raise typer.Exit(1) from None


def _conclude(search: Search, choice: str) -> None:
    from ..evaluation.search import YARN, tolerated
    from ..evaluation.settings import UNMODIFIED
    from ..evaluation.verdict import signed

    _show(search)
    scores, purpose = search.scores(), search.purpose
    spent = [sum(row["seconds"] for row in search.rows if ("distance" in row) is by_probe) for by_probe in (True, False)]
    gain = signed(scores[choice].against(scores[UNMODIFIED], purpose))
    say(
        f"Best for {_said(purpose)}: {choice}, {gain} nats per token against the unmodified model. "
        f"Probed in {spent[0]:.0f} s, read in {spent[1]:.0f} s."
    )
    lowest = min(tolerated(scores, search.tolerance), key=lambda name: scores[name].total(purpose))
    if choice == YARN != lowest:
        less = signed(scores[lowest].against(scores[YARN], purpose))
        say(f"{lowest} differs from it by {less}, which may be chance, and plain YaRN needs no plugin.")


def _save(search: Search, choice: str, model: str, dtype: str, tokenizer: Any, out: Path) -> None:
    """The winner, the rows and a picture."""
    from ..evaluation.loading import load_setting
    from ..integration import update
    from ..integration.layers import View
    from ..integration.max_length import announce

    rows = search.rows
    before = rows.head.get("choice") if (out / "config.json").is_file() else None
    rows.head |= {"choice": choice, "for": search.purpose, "tolerance": search.tolerance, "probed": search.probed()}
    rows.head |= {"edge": search.edge, "copies": [[c.distance, c.position] for c in search.copies]}
    if before == choice:
        say(f"{out} is finished: it holds {choice} already.")
        return rows.put()
    if before is not None:
        raise typer.BadParameter(
            f"{out} holds a model under {before}, and {choice} is what is chosen now. Nothing is overwritten: remove that "
            f"model (its config.json and *.safetensors) and run the same command, which goes on with the rows of {RESULT}",
            param_hint="--out",
        )
    winner = load_setting(search.settings[choice], model, dtype)
    if search.settings[choice].config is None:
        announce(View(winner), search.to)
    else:
        update(winner, extended_to=search.to)
    _write(winner, model, tokenizer, out)
    rows.put()
    plot(search, out / "extend.png")


def _write(winner: Any, model: str, tokenizer: Any, out: Path | None) -> None:
    """A model in the class of its checkpoint, with what else that had, and how to load it."""
    from ..checks import written_aside
    from ..evaluation.checkpoints import carry
    from ..integration import describe
    from ..integration.classes import loaders
    from ..integration.model import running

    say(str(describe(winner)).splitlines()[0])
    if out is None:
        return
    with written_aside(out, ("*.safetensors", "*.safetensors.index.json")) as aside:
        winner.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        carry(model, aside, type(winner))
    way = f"{loaders(type(winner).__name__)[0]}.from_pretrained({str(out)!r})"
    way = way if running(winner) is None else f"import hf_longattn; {way}"
    alone = ". It needs no plugin, and any tool uploads it" * (running(winner) is None)
    say(f"Saved to {out}; load it with: {way}{alone}")


def _told(row: Row, new: bool) -> str:
    """One line of a row."""
    if "distance" in row:
        text, copying = (sum(row[k]) / len(row[k]) for k in ("text", "copy"))
        what = f"text {text:.2f}, copy {copying:.2f}"
    else:
        copies = sum(row["copies"]) / len(row["copies"])
        what = f"read {row['read']}, prose {row['within']:.3f} within, {row['beyond']:.3f} beyond; copies {copies:.2f}"
    return f"{what} ({row['seconds']:.0f} s)" if new else f"{what} (kept)"


def _said(purpose: str) -> str:
    return "reading and retrieval" if purpose == "both" else purpose


def _show(search: Search) -> None:
    columns = ["", f"prose to {search.edge}", "prose beyond", *(f"copy {c.distance} back" for c in search.copies)]
    body = [
        [n, *(f"{x:.3f}" for x in (s.within, s.beyond)), *(f"{x:.2f}" for x in s.copies)] for n, s in search.scores().items()
    ]
    console.print(table(f"Loss in nats per token; trained at {search.trained}, read to {search.to}", columns, body))


def plot(search: Search, path: Path) -> None:
    """Draw the probes and the readings, as one PNG."""
    from ..evaluation.report import figures

    scores, probed = search.scores(), search.probed()
    names = list(probed | scores)  # a temperature is read and not probed
    own = dict(zip(names, figures.styles(names), strict=True))
    figure, (left, right) = figures.pyplot().subplots(1, 2, figsize=(10, 4.6), constrained_layout=True)
    for name in probed:
        points = []
        for row in (search.rows.find(setting=name, distance=d) for d in search.distances):
            assert row is not None
            points.append((row["distance"], sum(row["copy"]) / len(row["copy"])))
        left.plot(*zip(*points, strict=True), label=name, **own[name])
    for name, s in scores.items():
        pairs = sorted((c.distance, x) for c, x in zip(search.copies, s.copies, strict=True))
        right.plot(*zip(*pairs, strict=True), label=None if name in probed else name, **own[name])
    axes = {"xlabel": "distance (tokens)", "ylabel": "loss (nats per token)"}
    left.set(title="Probed: a passage read again", **axes)
    right.set(title="In the text: a passage read again", **axes)
    ends = sorted(c.distance for c in search.copies)
    figures.in_powers_of_two(right, [2**n for n in range(30) if ends[0] <= 2**n <= ends[-1]])
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    path.write_bytes(figures.png(figure))
