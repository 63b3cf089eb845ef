"""Extension by measurement, behind `hf-longattn extend`: a checkpoint checked, its search made, the winner saved, a report."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from ..checks import Refused
from ..extension import extend, temperature
from ..files import written_aside
from ..integration import describe, update
from ..integration.classes import loaders
from ..integration.layers import View
from ..integration.max_length import announce
from ..integration.model import running
from .checkpoints import Checkpoint, carry, load_tokenizer
from .experiment import digest, fingerprint, sha256_of
from .loading import check_setting, load_setting
from .report import figures
from .report.page import Table
from .rows import SEARCHED, Row, RowFile, versions_line
from .search import LEAST_TRAINED, SEED, YARN, Search, edge_of, plan_copies, tolerated
from .settings import UNMODIFIED, Setting
from .verdict import signed


class MeasuredExtension:
    """A checkpoint that is to read `to` tokens, in the way that a search finds best; nothing of its weights is read.

    Args:
        model: a directory, or a name on the Hub.
        to: tokens.
        purpose, train_length: as of `hf_longattn.extend`.

    Raises:
        ValueError: it is no causal model with a tokenizer.
    """

    def __init__(self, model: str, to: int, purpose: str = "both", train_length: int | None = None) -> None:
        self.checkpoint, self.to, self.purpose, self.train_length = Checkpoint(model), to, purpose, train_length
        self.facts = check_setting(Setting(UNMODIFIED, train_length=train_length), self.checkpoint, head=False)
        self.tokenizer = load_tokenizer(model)

    @property
    def trained(self) -> int:
        """The trained length, in tokens; ValueError where there is none, or it is beyond `to`."""
        trained = self.facts.train_length
        if trained is None or self.to < trained:
            raise ValueError(
                f"the model was trained at {trained} tokens ({self.facts.train_length_source}); nothing to extend"
            )
        return trained

    def own(self) -> str | None:
        """Say what the checkpoint runs already, and how that changes; None if it runs no method."""
        if (own := self.checkpoint.method) is None:
            return None
        reads = "" if own.extended_to is None else f", extended to {own.extended_to:,} tokens"
        return (
            f"{self.checkpoint.name} runs {own.name} already{reads}: unmodified is the model with that, and a candidate "
            "replaces it where both fill one slot. To take it out: hf_longattn.remove(model), then hf_longattn.save(model, "
            "folder)."
        )

    def check_extends(self) -> None:
        """Raise ValueError where `hf_longattn.extend` refuses the model."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the default; what is chosen is told
            try:
                extend(self.checkpoint.build(), self.to, purpose=self.purpose, train_length=self.train_length)
            except NotImplementedError as error:
                raise ValueError(str(error)) from None

    def check_room(self) -> None:
        """Raise ValueError for a trained length in which the passages that are repeated have no room."""
        if edge_of(self.trained, self.to) < LEAST_TRAINED:
            raise ValueError(
                f"it was trained at {self.trained:,} tokens, and to choose by measurement takes {LEAST_TRAINED:,} (twice that "
                "where --to is the trained length): the five passages by which candidates are compared have no room in less. "
                f'hf_longattn.extend(model, "{self.to}") takes the default without measuring'
            )

    def check_copies(self) -> None:
        """Raise ValueError for a `to` up to which these passages have no room."""
        plan_copies(edge_of(self.trained, self.to), self.to)

    def encode(self, text: str, name: str) -> Tensor:
        """The first `to` tokens of a text, (1, to); ValueError if it has fewer."""
        ids: Tensor = self.tokenizer(text, return_tensors="pt", verbose=False).input_ids
        if ids.shape[1] < self.to:
            raise ValueError(f"{name} has {ids.shape[1]} tokens, {self.to} are needed")
        return ids[:, : self.to]

    def rows(self, name: str, text: str, ids: Tensor, dtype: str, out: Path | None) -> RowFile:
        """The rows of a folder (None: of no folder); ValueError: they are of another model, text (or its ids: of another
        tokenizer), length or precision."""
        protocol = {"model": fingerprint(self.checkpoint.model), "to": self.to, "trained": self.trained, "dtype": dtype}
        protocol |= {"text": {name: sha256_of(text)}, "tokens": digest(ids.tolist()), "seed": SEED}
        return RowFile(None if out is None else out / SEARCHED, protocol=protocol)

    def search(
        self, input_ids: Tensor, rows: RowFile, load: Callable[[Setting], Any], tolerance: float, command: str
    ) -> Search:
        """The search over a text of `to` tokens, (1, to); see `Search`. Its rows say which command they are of."""
        return Search(
            input_ids,
            self.trained,
            rows,
            load,
            purpose=self.purpose,
            tolerance=tolerance,
            about={"command": command, "versions": versions_line(), "seed": SEED},
            temperature=temperature(self.facts, self.to, self.purpose),
            plain=self.facts.rope_type == "default",
            heads=self.trained >= 2048 and self.to > self.trained,
            train_length=self.train_length,
        )

    def leave_out(self, search: Search) -> Iterator[str]:
        """Take out candidates that rotate in another way, where the model cannot, and say so of each."""
        for name, setting in [(n, s) for n, s in search.settings.items() if s.rope is not None]:
            try:
                check_setting(setting, self.checkpoint)
            except ValueError as error:
                del search.settings[name]
                yield f"{name} is left out: {error}"

    def by_rule(self, dtype: str, tell: Callable[[str], None]) -> Any:
        """The model that `hf_longattn.extend` makes, of one without a language-model head, whose loss cannot be measured."""
        loaded = load_setting(Setting(UNMODIFIED), self.checkpoint, dtype)
        tell(
            f"{self.checkpoint.name} is a {type(loaded).__name__}, which has no language-model head: there is no loss to "
            "choose by. The text is not read, and the default of hf_longattn.extend is taken. To choose by measurement, "
            "extend the language model that it was made from."
        )
        try:
            return extend(loaded, self.to, purpose=self.purpose, train_length=self.train_length)
        except ValueError as error:
            raise Refused(str(error)) from None

    def save(self, search: Search, choice: str, dtype: str, out: Path, tell: Callable[[str], None]) -> None:
        """Save the model under a choice, with the rows and a picture; in a folder that holds that model already, the rows.

        Raises:
            Refused: the folder holds a model under another choice.
        """
        rows = search.rows
        before = rows.head.get("choice") if (out / "config.json").is_file() else None
        rows.head |= {"choice": choice, "for": search.purpose, "tolerance": search.tolerance, "probed": search.probed()}
        rows.head |= {"edge": search.edge, "copies": [[c.distance, c.position] for c in search.copies]}
        if before == choice:
            tell(f"{out} is finished: it holds {choice} already.")
            return rows.put()
        if before is not None:
            raise Refused(
                f"{out} holds a model under {before}, and {choice} is what is chosen now. Nothing is overwritten: remove that "
                "model (its config.json and *.safetensors) and run the same command, which goes on with the rows of "
                f"{SEARCHED}"
            )
        winner = load_setting(search.settings[choice], self.checkpoint, dtype)
        if search.settings[choice].config is None:
            announce(View(winner), search.to)
        else:
            update(winner, extended_to=search.to)
        self.write(winner, out, tell)
        rows.put()
        plot(search, out / "extend.png")

    def write(self, winner: Any, out: Path | None, tell: Callable[[str], None]) -> None:
        """Save a model in the class of its checkpoint, with what else that had, and tell how it is loaded."""
        tell(str(describe(winner)).splitlines()[0])
        if out is None:
            return
        with written_aside(out, ("*.safetensors", "*.safetensors.index.json")) as aside:
            winner.save_pretrained(aside)
            self.tokenizer.save_pretrained(aside)
            carry(self.checkpoint.model, aside, type(winner))
        way = f"{loaders(type(winner).__name__)[0]}.from_pretrained({str(out)!r})"
        way = way if running(winner) is None else f"import hf_longattn; {way}"
        alone = ". It needs no plugin, and any tool uploads it" * (running(winner) is None)
        tell(f"Saved to {out}; load it with: {way}{alone}")


def format_row(row: Row, new: bool) -> str:
    """A row of a search in a line."""
    if "distance" in row:
        what = f"text {fmean(row['text']):.2f}, copy {fmean(row['copy']):.2f}"
    else:
        copies = fmean(row["copies"])
        what = f"read {row['read']}, prose {row['within']:.3f} within, {row['beyond']:.3f} beyond; copies {copies:.2f}"
    return f"{what} ({row['seconds']:.0f} s)" if new else f"{what} (kept)"


def losses(search: Search) -> Table:
    """The losses of what has read the text."""
    columns = ["", f"prose to {search.edge}", "prose beyond", *(f"copy {c.distance} back" for c in search.copies)]
    rows = [
        [n, *(f"{x:.3f}" for x in (s.within, s.beyond)), *(f"{x:.2f}" for x in s.copies)] for n, s in search.scores().items()
    ]
    return Table(f"Loss in nats per token; trained at {search.trained}, read to {search.to}", columns, rows)


def summary(search: Search, choice: str) -> Iterator[str]:
    """Say what was chosen, by how much, how long it took; and where plain YaRN is as good, that it is."""
    scores, purpose = search.scores(), search.purpose
    spent = [sum(row["seconds"] for row in search.rows if ("distance" in row) is by_probe) for by_probe in (True, False)]
    gain = signed(scores[choice].against(scores[UNMODIFIED], purpose))
    yield (
        f"Best for {'reading and retrieval' if purpose == 'both' else purpose}: {choice}, {gain} nats per token against the "
        f"unmodified model. Probed in {spent[0]:.0f} s, read in {spent[1]:.0f} s."
    )
    lowest = min(tolerated(scores, search.tolerance), key=lambda name: scores[name].total(purpose))
    if choice == YARN != lowest:
        less = signed(scores[lowest].against(scores[YARN], purpose))
        yield f"{lowest} differs from it by {less}, which may be chance, and plain YaRN needs no plugin."


def plot(search: Search, path: Path) -> None:
    """Draw the probes and the readings, as one PNG."""
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
    axes = {"xlabel": "distance (tokens)", "ylabel": figures.NATS}
    left.set(title="Probed: a passage read again", **axes)
    right.set(title="In the text: a passage read again", **axes)
    ends = sorted(c.distance for c in search.copies)
    figures.in_powers_of_two(right, [2**n for n in range(30) if ends[0] <= 2**n <= ends[-1]])
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    path.write_bytes(figures.png(figure))
