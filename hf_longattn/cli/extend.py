"""`hf-longattn extend`: make a model longer without training, and show that it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import track

from .common import Device, Dtype, console, precision, read_tokens, refusing, table, tokens

if TYPE_CHECKING:
    from ..measuring.extension import Scores


def extend(
    model: Annotated[str, typer.Argument(help="A model on the Hub or a directory.")],
    to: Annotated[str, typer.Option(help="The length to reach, in tokens; 32k is 32,768.")],
    text: Annotated[Path, typer.Option(help="A text of at least that many tokens, of the kind you care about.")],
    out: Annotated[Path | None, typer.Option(help="Where to save the best model, the table and the plot.")] = None,
    tolerance: Annotated[
        float, typer.Option(help="What a choice may cost within the trained length, in nats a token.")
    ] = 0.02,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Make MODEL longer without training: try a short list of methods on your text, show what each does, keep the best.

    Every row is one forward pass over the same text, into which passages are copied from far back: prose loss within and
    beyond the trained length leaves them out, copy loss is theirs alone. Exit status 1 if nothing stays within the tolerance.
    """
    from transformers import AutoTokenizer

    from ..checks import check_output, device_of
    from ..integration import apply, describe, rope
    from ..measuring.extension import YARN, best, by_head, candidates, plan_copies, score
    from ..measuring.settings import UNMODIFIED, Setting, check_setting, load_setting, own_precision

    length = tokens(to)
    if out is not None:
        with refusing("--out"):
            check_output(out)
        if out.exists() and any(out.iterdir()):
            raise typer.BadParameter(f"{out} is not empty; nothing is overwritten", param_hint="--out")
    with refusing("--device"):
        device = device_of(device)
    with refusing("MODEL"):
        trained = check_setting(Setting(UNMODIFIED), model).train_length
        tokenizer = AutoTokenizer.from_pretrained(model)
    if trained is None or length <= trained:
        raise typer.BadParameter(f"the model was trained at {trained} tokens; nothing to extend", param_hint="--to")
    with refusing("--to"):
        copies = plan_copies(trained, length)
    with refusing("--text"):
        ids = read_tokens(text, tokenizer, length)
    chosen = precision(model, dtype, device)
    loaded = load_setting(Setting(UNMODIFIED), model, chosen, device)

    tried = {s.name: s for s in candidates(trained, length)}
    if trained >= 2048:
        capped = by_head(loaded, ids.to(loaded.device), tried["leaky_rerope"], trained)
        tried[capped.name] = capped
    scores = {}
    for name, setting in track(tried.items(), description=f"Reading {length} tokens", console=console, total=len(tried)):
        this = loaded if setting.rope is None else load_setting(setting, model, chosen, device)
        if setting.config is not None:
            apply(this, setting.config)
        scores[name] = s = score(this, ids.to(this.device), trained, copies)
        console.print(f"{name}: prose {s.within:.3f} within, {s.beyond:.3f} beyond; copies {s.copying:.2f}", highlight=False)
    columns = ["", f"prose to {trained}", "prose beyond", *(f"copy {c.distance} back" for c in copies)]
    body = [[n, f"{s.within:.3f}", f"{s.beyond:.3f}", *(f"{x:.2f}" for x in s.copies)] for n, s in scores.items()]
    console.print(table(f"Loss in nats per token; trained at {trained}, read to {length}", columns, body))

    try:
        choice = best(scores, UNMODIFIED, tolerance)
    except ValueError as error:
        console.print(str(error))
        raise typer.Exit(1) from None
    console.print(f"Best: {choice}.")
    if choice != YARN and scores[YARN].total <= scores[choice].total + tolerance:
        console.print("Plain YaRN is as good on this text, and needs no plugin.")
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    read_in = str(loaded.dtype).removeprefix("torch.")
    del loaded, this
    # what was read in float32 is saved in the precision it came in
    winner = load_setting(tried[choice], model, dtype if chosen == dtype else own_precision(model), "cpu")
    if tried[choice].config is not None:
        rope.lengthen(winner.config, trained, length)
        console.print(str(describe(winner)).splitlines()[0])
    winner.save_pretrained(out)
    tokenizer.save_pretrained(out)
    record = {name: vars(s) | {"copying": s.copying} for name, s in scores.items()}
    summary = {
        "model": model,
        "dtype": read_in,
        "to": length,
        "trained": trained,
        "text": text.name,
        "choice": choice,
    }
    summary |= {"copies": [[c.distance, c.position] for c in copies], "scores": record}
    (out / "extend.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    plot(scores, [c.distance for c in copies], out / "extend.png")
    console.print(f"Saved to {out}; load it with: import hf_longattn; AutoModelForCausalLM.from_pretrained({str(out)!r})")


def plot(scores: dict[str, Scores], distances: list[int], path: Path) -> None:
    from ..measuring.report import figures

    figure, (left, right) = figures.pyplot().subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for (name, s), style in zip(scores.items(), figures.styles(list(scores)), strict=True):
        left.plot(["within", "beyond"], [s.within, s.beyond], label=name, **style)
        pairs = sorted(zip(distances, s.copies, strict=True))
        right.plot([d for d, _ in pairs], [x for _, x in pairs], label=name, **style)
    left.set(title="Prose, by the trained length", ylabel="loss (nats per token)")
    right.set(
        title="A passage repeated from far back", xlabel="distance (tokens)", ylabel="loss (nats per token)", xscale="log"
    )
    right.legend()
    path.write_bytes(figures.png(figure))
