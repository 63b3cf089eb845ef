"""From text files and data sets to windows of tokens. Window `i` of a seed is always the same: that makes resuming exact."""

from __future__ import annotations

import glob
import itertools
import json
import os
import random
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from transformers import default_data_collator

from ..evaluation.tasks import Encoder, NeedleTask
from ..evaluation.tasks.sample import IGNORE
from ..files import read_text
from . import chats
from .recipe import Hub, Recipe, Skip

#: Kinds of local files, by ending, that the datasets library reads.
BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}

Example = dict[str, Tensor]


def find(sources: Any) -> list[str]:
    """Every source with file patterns expanded, each once; what names neither a file nor a folder is taken for a data set on
    the Hub.

    Raises:
        ValueError: a source looks like a file and is not there.
    """
    result: list[str] = []
    for source in sources if isinstance(sources, list) else [sources]:
        path = Path(source).expanduser()
        files = [str(path)] if path.is_file() else sorted(glob.glob(str(path), recursive=True))  # brackets may be in a name
        if not files and _looks_like_a_file(source):
            parts = [part.strip() for part in source.split(",")]
            listed = f": several are written as a list, data=[{','.join(parts)}]" if len(parts) > 1 else ""
            raise ValueError(f"there is no file {source!r}{listed}")
        result += files or [source]
    each: dict[str, str] = {}
    for source in result:
        each.setdefault(_identity(source), source)
    return list(each.values())


def _looks_like_a_file(source: str) -> bool:
    """Tell whether a source names a file, and no data set on the Hub: by its place, its ending, or a pattern in it."""
    ending = Path(source).suffix
    ends = ending in {".txt", *BUILDERS} or ("/" not in source and re.fullmatch(r"\.[A-Za-z0-9]{1,5}", ending))
    return bool(ends or source.startswith((".", "/", "~")) or "*" in source)


def _identity(source: str) -> str:
    """What two names of one file have in common."""
    return str(Path(source).resolve()) if Path(source).is_file() else source


def texts(sources: list[str], hub: Hub) -> Iterator[str | chats.Chat]:
    """The documents of all sources, in order: a text file is one document, a data set's row is one, a text or a chat.

    In the worker processes of a DataLoader each is read by one of them.
    """
    worker = get_worker_info()
    for place, source in enumerate(sources):
        path = Path(source)
        if path.is_file() and path.suffix not in BUILDERS:
            if worker is None or place % worker.num_workers == worker.id:  # the datasets library shares out its rows itself
                yield read_text(path)
            continue
        for number, row in enumerate(_rows(source, hub), 1):
            column = "messages" if hub.column == "text" and "text" not in row and "messages" in row else hub.column
            if column not in row:
                raise ValueError(f"{source} has no column {column!r}; it has {', '.join(row)}: set hub.column")
            value = row[column]
            text = isinstance(value, str) and column != "messages"
            try:
                document = value if text else chats.chat_of(value, row.get("tools"))
            except ValueError as error:
                raise ValueError(f"{source}, row {number}: {error}") from None
            if document is None:
                raise ValueError(
                    f"{source}, row {number}: {column!r} is {reprlib.repr(value)}, neither a text nor a list of messages with "
                    "role and content: leave such rows out"
                )
            yield document


def _rows(source: str, hub: Hub) -> Iterator[dict[str, Any]]:
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetGenerationError
    except ImportError:
        raise ImportError('data sets need the datasets library: pip install "hf_longattn[train]"') from None
    path = Path(source)
    if not path.is_file():
        name, _, split = source.partition(":")
        try:
            rows = load_dataset(name, hub.config, split=split or "train", streaming=hub.streaming)
        except (FileNotFoundError, ConnectionError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"there is no file {source!r}, and reading a data set of that name from the Hub failed ({reason}): give a "
                "file by its path"
            ) from None
        yield from rows
        return
    try:
        yield from load_dataset(BUILDERS[path.suffix], data_files=str(path), split="train", streaming=hub.streaming)
    except (ValueError, DatasetGenerationError, StopIteration) as error:  # an empty file stops the datasets library
        if path.suffix == ".jsonl":
            _check_lines(path)
        raise ValueError(f"{path} cannot be read: {error.__cause__ or str(error) or 'it is empty'}") from None


def _check_lines(path: Path) -> None:
    """Raise ValueError, with its number, for the first line that is no JSON object; the datasets library names none."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                wrong = None if isinstance(json.loads(line), dict) else "no object with columns, {...}"
            except ValueError as error:
                wrong = f"no JSON ({error})"
            if wrong:
                raise ValueError(f"{path}, line {number}, is {wrong}: mend or remove it")


def documents(sources: list[str], hub: Hub, tokenizer: Any) -> Iterator[list[int]]:
    """The token ids of every document, ended by the tokenizer's end-of-text token if it has one; a chat ends as its template
    says. Under hub.answers those that the assistant does not say are `unasked`.

    Raises:
        ValueError: a chat that has no place in the template, or under hub.answers a text.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    start = Encoder(tokenizer).start
    for number, text in enumerate(texts(sources, hub), 1):
        if isinstance(text, str):
            if hub.answers:
                raise ValueError(f"hub.answers needs chats, a column of messages; document {number} is a text")
            yield list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) + end
            continue
        try:
            ids, said = chats.answers(text, tokenizer) if hub.answers else (chats.tokens(text, tokenizer), None)
        except ValueError as error:
            raise ValueError(f"chat {number}: {error}") from None
        first = len(start) if start and ids[: len(start)] == list(start) else 0  # `pack` puts it in front of each document
        yield [n if said is None or said[i] else unasked(n) for i, n in enumerate(ids)][first:]


def unasked(token: int) -> int:
    """A token's id where nothing is to predict it, on its way to `asked`: negative."""
    return -1 - token


def asked(marked: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids and labels, of ids of which some are `unasked`."""
    return torch.where(marked < 0, -1 - marked, marked), marked.masked_fill(marked < 0, IGNORE)


def _teaching(rows: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows in which something is to be predicted."""
    return ((ids, positions) for ids, positions in rows if (ids[1:] >= 0).any())


def pack(documents: Iterable[list[int]], length: int, start: Sequence[int] = ()) -> Iterator[tuple[Tensor, Tensor]]:
    """Documents one after another, cut into rows of `length`; the rest that fills no row is dropped.

    Args:
        start: at most one token, with which every document and every row begins: models whose tokenizer puts one in front of
            each text (Gemma) read badly without it.

    Yields:
        int64 (length,) token ids, and positions that start at 0 with every document and every row.
    """
    ids: list[int] = []
    positions: list[int] = []
    for document in documents:
        used = 0
        while used < len(document):
            piece = [*start, *document[used : used + length]][: length - len(ids)]
            used += len(piece) - len(start)
            ids += piece
            positions += range(len(piece))
            if len(ids) == length:
                yield torch.tensor(ids, device="cpu"), torch.tensor(positions, device="cpu")
                ids, positions = [], []


class Finish:
    """From a packed row to what a model is given."""

    def __init__(self, by_document: bool, skip: Skip | None, seed: int) -> None:
        self.by_document, self.skip, self.seed = by_document, skip, seed

    def __call__(self, index: int, ids: Tensor, positions: Tensor) -> Example:
        ids = ids.long()
        if self.skip is not None:
            row = _jumping(ids, self.skip, self.seed, index)
            ids, labels = asked(row["input_ids"])
            return row | {"input_ids": ids, "labels": labels}
        ids, labels = asked(ids)
        if not self.by_document:
            return {"input_ids": ids, "labels": labels}
        labels = labels.masked_fill(positions == 0, IGNORE)  # nothing predicts a document's first token
        return {"input_ids": ids, "labels": labels, "position_ids": positions.long()}


def skipped(input_ids: Tensor, skip: Skip, rng: random.Random) -> tuple[Tensor, Tensor]:
    """One window, (length,), with its position_ids, both int64: it shows the distances of a long text.

    Zhu et al., "PoSE: Efficient Context Window Extension of LLMs via Positional Skip-wise Training" (2024).

    Chunks have random borders, each at least length / (2 chunks) tokens. Positions rise by one inside a chunk and jump by a
    random amount between chunks, so that the last is below target_length. A repeating window's last chunk is overwritten by a
    random piece of the first, as far as that goes.
    """
    assert skip.target_length is not None  # `preflight.prepare` saw to it
    length = len(input_ids)
    positions = torch.arange(length, device="cpu")
    if rng.random() < skip.unskipped:
        return input_ids, positions
    least = length // (2 * skip.chunks)
    free = length - least * skip.chunks
    cuts = sorted(rng.randint(0, free) for _ in range(skip.chunks - 1))
    starts = [0, *(cut + least * (i + 1) for i, cut in enumerate(cuts))]
    jumps = sorted(rng.randint(0, skip.target_length - length) for _ in starts[1:])
    for start, jump in zip(starts[1:], jumps, strict=True):
        positions[start:] = torch.arange(start, length, device="cpu") + jump
    if rng.random() < skip.repeat:
        first, last = starts[1], length - starts[-1]
        size = min(first, last)
        source = rng.randint(0, first - size)
        input_ids = input_ids.clone()
        input_ids[starts[-1] : starts[-1] + size] = input_ids[source : source + size]
    return input_ids, positions


def _jumping(ids: Tensor, skip: Skip, seed: int, index: int) -> Example:
    """A window whose positions jump; without a mask transformers would read the jumps as borders between documents."""
    ids, positions = skipped(ids, skip, random.Random(f"{seed}:{index}"))
    return {"input_ids": ids, "position_ids": positions, "attention_mask": torch.ones_like(ids)}


def collated(rank: int, parts: int, rows: list[Example]) -> Example:
    """One process's part of each window of a batch, with what its tokens are to predict."""
    batch: Example = default_data_collator(rows)
    batch["labels"][:, 0] = IGNORE  # nothing predicts it, and Trainer would count it by the name of the model's class
    if parts == 1:
        return batch
    if "position_ids" not in batch:
        ids = batch["input_ids"]
        batch["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    batch["shift_labels"] = torch.nn.functional.pad(batch["labels"], (0, 1), value=IGNORE)[:, 1:]
    return {name: x.chunk(parts, 1)[rank] for name, x in batch.items()}


class Windows(Dataset[Example]):
    """Windows in memory."""

    def __init__(self, rows: Iterable[tuple[Tensor, Tensor]], finish: Finish) -> None:
        pairs = [(ids.int(), positions.int()) for ids, positions in _teaching(rows)]
        self.ids = torch.stack([ids for ids, _ in pairs]) if pairs else torch.empty(0, 0, dtype=torch.int32, device="cpu")
        self.positions = torch.stack([p for _, p in pairs]) if pairs and finish.by_document else None
        self.finish = finish

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Example:
        positions = torch.empty(0, device="cpu") if self.positions is None else self.positions[index]
        return self.finish(index, self.ids[index], positions)


class StreamedWindows(IterableDataset[Example]):
    """Windows made as training goes; every pass gives the same."""

    def __init__(
        self, sources: list[str], hub: Hub, tokenizer: Any, length: int, start: Sequence[int], finish: Finish
    ) -> None:
        self.sources, self.hub, self.tokenizer = sources, hub, tokenizer
        self.length, self.start, self.finish = length, start, finish

    def __iter__(self) -> Iterator[Example]:
        rows = pack(documents(self.sources, self.hub, self.tokenizer), self.length, self.start)
        for index, (ids, positions) in enumerate(_teaching(rows)):
            yield self.finish(index, ids, positions)


class NeedleWindows(Dataset[Example]):
    """Texts with needles; under `skip` their positions jump, in front of the question."""

    def __init__(self, task: NeedleTask, length: int, count: int, skip: Skip | None = None) -> None:
        self.task, self.length, self.count, self.skip = task, length, count, skip

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Example:
        sample = self.task.sample(index, self.length)
        row = {"input_ids": sample.input_ids, "labels": sample.labels}
        return row if self.skip is None else row | _jumping(sample.input_ids, self.skip, self.task.seed, index)


def flat(sources: list[str], hub: Hub, tokenizer: Any, limit: int | None = None) -> Tensor:
    """All documents as one int64 tensor (tokens,), the first `limit` tokens if given."""
    chained = itertools.chain.from_iterable(documents(sources, hub, tokenizer))
    return asked(torch.tensor(list(itertools.islice(chained, limit)), dtype=torch.int64, device="cpu"))[0]


class Data:
    """All data of a run: `train` for the Trainer, `held_out` tokens (1-D), the token that a text starts with (`start`, none or
    one), and for needles the task that makes texts of what is held out (`test_task`).

    Args:
        skip: how positions jump; None: they do not.
        began: the recipe as it was when the run began: its evaluation says how much text is held out; None: it begins now.
        far: a longer text to hold out, in tokens, as far as there is one; of the data that is trained on at most a tenth.

    Raises:
        ValueError: a file is missing, or a text is too short for the lengths asked for.
    """

    def __init__(
        self, recipe: Recipe, tokenizer: Any, skip: Skip | None = None, began: Recipe | None = None, far: int = 0
    ) -> None:
        sources, began = find(recipe.data), began or recipe
        kept_out = None if recipe.heldout is None else find(recipe.heldout)
        if kept_out is not None:
            unseen = set(map(_identity, kept_out))
            if not (sources := [source for source in sources if _identity(source) not in unseen]):
                raise ValueError(f"nothing is left to train on: all data is held out ({', '.join(kept_out)})")
        limit = recipe.needle.haystack_tokens if recipe.needle is not None and recipe.hub.streaming else None
        kept = max(began.longest, began.evaluation.tokens)
        self.held_out = torch.empty(0, dtype=torch.int64, device="cpu")
        self.start = Encoder(tokenizer).start
        self.test_task: NeedleTask | None = None
        self.train: Dataset[Example]
        if kept_out is not None:
            self.held_out = flat(kept_out, recipe.hub, tokenizer, limit or max(kept, far))
        if recipe.needle is not None:
            haystack = flat(sources, recipe.hub, tokenizer, limit)
            if kept_out is None:
                cut = max(len(haystack) * 9 // 10, 1)
                haystack, self.held_out = haystack[:cut], haystack[cut:]
            task = NeedleTask(tokenizer, haystack, recipe.needle.needles, recipe.seed)
            self.test_task = NeedleTask(tokenizer, self.held_out, recipe.needle.needles, recipe.seed + 1)
            task.check(recipe.length)
            self._check_held_out(recipe, began)
            for length in {*recipe.lengths, *recipe.final_lengths}:
                self.test_task.check(length)
            self.train = NeedleWindows(task, recipe.length, _samples(recipe), skip)
            return
        finish = Finish(recipe.packing == "documents", skip, recipe.seed)
        start = [unasked(n) for n in self.start] if recipe.hub.answers else self.start
        if recipe.hub.streaming:
            self.train = StreamedWindows(sources, recipe.hub, tokenizer, recipe.length, start, finish)
        elif kept_out is not None:
            self.train = Windows(pack(documents(sources, recipe.hub, tokenizer), recipe.length, start), finish)
        else:
            tokens = list(documents(sources, recipe.hub, tokenizer))
            kept = max(kept, min(far, sum(map(len, tokens)) // 10))
            tokens, self.held_out = _split(tokens, kept)
            self.train = Windows(pack(tokens, recipe.length, start), finish)
        if not recipe.hub.streaming and len(self.train) == 0:  # type: ignore[arg-type]
            raise ValueError(_too_short(recipe, sources, tokenizer, kept))
        self._check_held_out(recipe, began)

    def _check_held_out(self, recipe: Recipe, began: Recipe) -> None:
        """Raise ValueError if the held-out text is shorter than what is to be read of it."""
        there, longest = len(self.held_out), recipe.longest
        if there >= longest:
            return
        if longest > began.longest:
            raise ValueError(
                f"the run began with {there} tokens held out, and evaluation at length {longest} needs as many: shorten "
                "evaluation.lengths and evaluation.final_lengths"
            )
        own = recipe.evaluation.lengths or recipe.evaluation.final_lengths
        names = "evaluation.lengths and evaluation.final_lengths" if own else "length"
        other = ", give another by heldout=FILE," if recipe.heldout is None else ""
        raise ValueError(
            f"the held-out text has {there} tokens, evaluation at length {longest} needs as many: add text{other} or shorten "
            f"{names}"
        )

    def first_windows(self, count: int) -> list[Tensor]:
        """The token ids of the first windows that are trained on, each (1, length)."""
        train: Any = self.train
        rows = iter(train) if isinstance(train, IterableDataset) else (train[i] for i in range(len(train)))
        return [row["input_ids"][None] for row in itertools.islice(rows, count)]


def _samples(recipe: Recipe) -> int:
    """Needle texts of a whole run, so that none is seen twice."""
    t = recipe.trainer
    batch = t.get("per_device_train_batch_size", 8) * t.get("gradient_accumulation_steps", 1)
    processes = max(torch.cuda.device_count(), int(os.environ.get("WORLD_SIZE", "1")))
    return int(t["max_steps"] * batch * processes * 2)


def _split(tokens: list[list[int]], kept: int) -> tuple[list[list[int]], Tensor]:
    """The last `kept` tokens held out, the documents before them to train on."""
    flat_tokens = torch.tensor(list(itertools.chain.from_iterable(tokens)), dtype=torch.int64, device="cpu")
    room = len(flat_tokens) - kept
    train = []
    for document in tokens:
        if room <= 0:
            break
        train.append(document[:room])
        room -= len(document)
    return train, asked(flat_tokens[-kept:])[0]


def _too_short(recipe: Recipe, sources: list[str], tokenizer: Any, kept: int) -> str:
    """Say why data of which the last `kept` tokens are held out makes no window."""
    found = list(texts(sources, recipe.hub))
    roles = {message["role"] for chat in found if isinstance(chat, chats.Chat) for message in chat.messages}
    if recipe.hub.answers and roles and "assistant" not in roles:
        there = ", ".join(sorted(roles))
        return f"hub.answers trains on what the role assistant says, and no message of the data has it: the roles are {there}"
    blank = all(isinstance(text, str) and not text.strip() for text in found)
    count = 0 if blank else sum(map(len, documents(sources, recipe.hub, tokenizer)))
    answered = " with an answer in it" if recipe.hub.answers else ""
    said = f"the data ({count:,} tokens) is shorter than one window of {recipe.length} tokens{answered}"
    if recipe.heldout is not None:
        return said
    ways_out = "more text, a smaller length, a smaller evaluation.tokens, or heldout"
    return f"{said}, after its last {kept} tokens are held out: give {ways_out}"
