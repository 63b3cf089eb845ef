"""Options of an evaluation: those of the commands, and the arguments of `evaluate`. They are read and checked here, once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..checks import check_dtype
from ..config import length_of, listed
from ..slots.method import freeze
from .settings import Setting, setting_of, settings_of

BOS = ("auto", "always", "never")
#: What an option that is one number or flag may be, by its annotation; and in words.
_KINDS: dict[Any, tuple[Any, str]] = {
    "bool": (bool, "True or False"),
    "int": (int, "an integer"),
    "float": ((int, float), "a number"),
}
#: Endings of files that hold texts.
SUFFIXES = (".txt", ".md", ".text", ".jsonl", ".json", ".parquet", ".csv")
#: What the commands say of the options that they take.
HELP = {
    "tasks": "loss, copies, long_ppl, probe, attention, ruler, questions and tasks, with commas: needle, passkey, ... "
    "Default: loss, or questions if --questions names a file.",
    "lengths": "Tokens, with commas; 16k is 16,384.",
    "windows": "Documents of the longest length to take from each text.",
    "targets": "The last tokens of each document, scored at every length.",
    "bos": "A beginning-of-text token: auto (as the tokenizer does), always, never.",
    "samples": "Texts per task and length; for needle per depth, for ruler per kind.",
    "kinds": "ruler (RULER's questions over your text): niah_single_1, vt, ... with commas; default its thirteen.",
    "questions": "questions: your own, a JSONL file; a line has context, question and answer.",
    "answer_tokens": "questions: tokens that an answer may have.",
    "ruler_data": "ruler: a folder with RULER's own essays and questions, in place of your text.",
    "chat": "ruler, graphwalks, key_value, questions: ask in the model's chat template.",
    "depths": "Places of the needle, from first to last.",
    "near": "long_ppl: tokens of the short context.",
    "evaluator": "long_ppl: the setting that selects the key tokens; of another model by an entry of --settings.",
    "prefix": "METHOD, as streaming:window=4096: the text before the targets is read under it, once for all settings that "
    "differ only in positions or length temperatures. Much cheaper; ignores their effect on that text.",
    "distances": "probe: tokens back, with commas; 16k is 16,384. Default: eight up to twice the trained length.",
    "passages": "probe: passages to take from each text.",
    "layers": "attention: layers, e.g. 0,5,10-12; default all with full attention.",
    "what": "attention: any of these, with commas: ranges, entropy, mass, logits, temperature, qq, outputs; default all.",
    "rows": "attention: query rows to read, spread evenly over the text, or all. Keys are all read.",
    "delta": "attention: ranges of distances grow by this factor.",
    "keep": "Effective length: the share of its score at the shortest length that a task must keep.",
    "dtype": "Precision to load the model in; auto: its own, or float32 if the device is slow in that.",
    "device": "Where to run: cpu, cuda, ...; auto: a GPU if there is one.",
    "seed": "Seed of the tasks' texts and of the passages' places.",
    "shortest_first": "All settings at the shortest length first; loads models more often.",
}


@dataclass
class EvalOptions:
    """The settings of a model to measure, the texts, and the tasks. Lists may be one string with commas; 16k is 16,384.

    Args:
        model: a directory, a name on the Hub, or a loaded model with its `tokenizer`.
        texts: contents by name, several contents, or one.
        settings: `Setting`s or their strings ("scale_invariant:tau=100@yarn:2"); the unmodified model always comes first.
        tokenizer: that of the model, if not the one that comes with it.
        tasks: "loss", "copies", "long_ppl", "probe", "attention", "ruler", "questions", the texts with a known answer
            ("passkey", "needle", ...), and what other packages add to the entry point group "hf_longattn.tasks". None:
            "questions" where these are given, "loss" elsewhere.
        lengths: tokens, beginning-of-text token included.
        windows: documents of the longest length that each text gives, one after another from its beginning.
        targets: the last tokens of every document, scored at every length.
        bos: "auto" does what the tokenizer does, "always" and "never" what they say.
        samples: texts per task and length (`needle`: per depth; `ruler`: per kind).
        kinds: of question of `ruler`, from `ruler_kinds.KINDS`; None for RULER's thirteen.
        ruler_data: a folder with RULER's own files (PaulGrahamEssays.json, squad.json, hotpotqa.json); None: `ruler` asks
            about the texts.
        questions: of the task `questions`: a JSONL file, or a list of its records. A record has a context, a question and
            an answer; see `tasks.questions.entry_of`.
        answer_tokens: tokens that an answer to one of `questions` may have.
        chat: whether `ruler` and its like, and `questions`, ask in the model's chat template.
        depths: places of the `needle` task.
        near: the context that `long_ppl` takes for short: its key tokens are those that more of it helps with.
        evaluator: the setting that finds the key tokens, the same for all.
        prefix: a method, as a setting or its string ("streaming:window=4096"). It reads the text before the targets, once for
            all lengths and for all settings that differ in positions and length temperatures alone, which do nothing in its
            window; each setting then reads the targets over those keys. Contexts begin where the document does, and rows come
            document by document.
        distances: of `probe`, in tokens; None for eight up to twice the trained length.
        passages: of `probe`, from each text.
        layers, what, rows, delta: of `attention`; see `hf_longattn.capture`.
        keep: for effective lengths, the share of its score at the shortest length that a task may not fall below.
        dtype: "auto" is the checkpoint's own, or float32 where the device is slow in that; torch's dtypes serve too.
        shortest_first: all settings at the shortest length first, and so on: what can be compared is there early, and the
            model is loaded anew for every setting and length.

    Raises:
        ValueError: an option that cannot be, named.
    """

    model: Any
    texts: Mapping[str, str] = field(default_factory=dict)
    settings: Sequence[Setting] = ()
    tokenizer: Any = None
    tasks: Sequence[str] | None = None
    lengths: Sequence[int] = "2k,4k,8k"  # type: ignore[assignment]
    windows: int = 1
    targets: int = 512
    bos: str = "auto"
    samples: int = 3
    kinds: Sequence[str] | None = None
    ruler_data: str | None = None
    questions: str | Path | Sequence[Mapping[str, Any]] | None = None
    answer_tokens: int = 64
    chat: bool = False
    depths: int = 5
    near: int = "4k"  # type: ignore[assignment]
    evaluator: str = "unmodified"
    prefix: Setting | None = None
    distances: Sequence[int] | None = None
    passages: int = 4
    layers: Sequence[int] | None = None
    what: Sequence[str] | None = None
    rows: int | None = "512"  # type: ignore[assignment]
    delta: int = 4
    keep: float = 0.85
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    shortest_first: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.model, (list, tuple, Mapping)):
            raise TypeError(f"the model comes first, then the texts: the first argument is a {type(self.model).__name__}")
        self.model = str(self.model) if isinstance(self.model, Path) else self.model
        texts: Any = self.texts if isinstance(self.texts, Iterable) and not isinstance(self.texts, str) else [self.texts]
        self.texts = dict(texts if isinstance(texts, Mapping) else {f"text {n}": t for n, t in enumerate(texts, 1)})
        if paths := [name for name, text in self.texts.items() if _is_path(text)]:
            raise ValueError(
                f"{paths[0]} is {str(self.texts[paths[0]])!r}, which looks like a file: texts are contents, as "
                "Path(...).read_text() gives them"
            )
        if wrong := [name for name, text in self.texts.items() if not isinstance(text, str)]:
            raise TypeError(f"{wrong[0]} is of type {type(self.texts[wrong[0]]).__name__}: texts are contents, each a string")
        if isinstance(self.settings, Mapping):
            raise ValueError(
                'settings are a list of texts ("rerope:window=512") or of hf_longattn.evaluation.Setting(name, method=...), '
                "not a mapping"
            )
        self.settings = settings_of(listed(self.settings))
        self.near = length_of(self.near)
        for f in fields(self):
            if f.type in _KINDS:
                setattr(self, f.name, _checked(f.name, getattr(self, f.name), str(f.type)))
        default = "loss" if self.questions is None else "questions"
        self.tasks = list(dict.fromkeys(listed(default if self.tasks is None else self.tasks)))
        if not self.tasks:
            raise ValueError(f"no tasks to measure: name some, or leave tasks out for {default}")
        self.lengths = sorted({length_of(n) for n in listed(self.lengths)})
        self.distances = self.distances and sorted({length_of(d) for d in listed(self.distances)})
        self.layers = _numbers(self.layers) if isinstance(self.layers, str) else self.layers
        self.what = self.what and listed(self.what)
        self.kinds = self.kinds and listed(self.kinds)
        self.rows = _rows(self.rows)
        if self.prefix is not None:
            self.prefix = setting_of(self.prefix)
            said = self.prefix.to_dict().keys()
            if "method" not in said or said & {"rope", "adapter", "model"}:
                raise ValueError(
                    f"the prefix is read under a method of its own, as streaming:window=4096, not under {self.prefix.name!r}"
                )
        self.dtype = str(self.dtype).removeprefix("torch.")  # torch.bfloat16 as well as its name
        check_dtype(self.dtype, "auto")
        for name in ("windows", "targets", "samples", "answer_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.bos not in BOS:
            raise ValueError(f"bos must be one of {', '.join(BOS)}, got {self.bos!r}")
        for name, task in (("kinds", "ruler"), ("ruler_data", "ruler"), ("questions", "questions")):
            if getattr(self, name) is not None and task not in self.tasks:
                raise ValueError(f"{name} is for the task {task}, which is not among the tasks: add it, or leave out {name}")
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep: a share lies in (0, 1], not at {self.keep:g}")


def _is_path(text: Any) -> bool:
    """Tell whether a text that was given is the name of a file."""
    if isinstance(text, Path):
        return True
    return isinstance(text, str) and len(text) < 256 and not text.split()[1:] and Path(text).suffix in SUFFIXES


def _numbers(text: str) -> list[int]:
    """Layers: 0,5,10-12."""
    layers: list[int] = []
    for part in listed(text):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"{text!r} is not a list of layers; write 0,5,10-12")
        if dash and int(last) < int(first):
            raise ValueError(f"{part!r} is not a range of layers; write {last}-{first}")
        layers += range(int(first), int(last if dash else first) + 1)
    return layers


def _rows(value: Any) -> int | None:
    if not isinstance(value, str):
        return None if value is None else int(_checked("rows", value, "int"))
    if value != "all" and not value.isdigit():
        raise ValueError(f"{value!r} is neither a number of rows nor all")
    return None if value == "all" else int(value)


def _checked(name: str, value: Any, kind: str) -> Any:
    """A value of an option as plain data; ValueError, which names the option, where it is of another kind."""
    value, (types, words) = freeze(value), _KINDS[kind]
    if not isinstance(value, types) or isinstance(value, bool) is not (kind == "bool"):
        raise ValueError(f"{name} must be {words}, got {value!r}")
    return value
