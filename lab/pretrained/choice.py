"""The table of docs/reference/methods/README.md: every method, with what rows of this folder and of lab/speed say of it."""

from __future__ import annotations

import functools
from pathlib import Path

import yaml

from hf_longattn import LongAttnConfig
from hf_longattn.evaluation.report import markdown
from hf_longattn.evaluation.rows import Row, RowFile
from hf_longattn.evaluation.statistics import mean_interval
from hf_longattn.slots.method import ModelFacts
from hf_longattn.slots.registry import method
from lab.markdown import Contents
from lab.pretrained import many, paired
from lab.pretrained.copies import CHOOSING
from lab.pretrained.reading_far import SEGMENT
from lab.pretrained.runner import RESULTS, rows_of
from lab.speed import speed

#: By method, and for each column the setting that rows have and what it is compared with.
SETTINGS: dict[str, dict[str, list[str]]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
SMOLLM2, GEMMA, NOVEL = "SmolLM2-135M-Instruct", "gemma-3-270m", "pride-and-prejudice"
#: Of SmolLM2: its trained length, and what a method is bound to.
TRAINED = 8192
FACTS = ModelFacts(
    num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, value_dim=64, train_length=TRAINED, rope_type="default"
)
#: By model and length the column that its rows are for.
FAR = {(SMOLLM2, 32768): "four times", (GEMMA, 65536): "gemma twice", (GEMMA, 131072): "gemma four times"}
#: How many times the trained length a column reads.
TIMES = {"twice": 2, "four times": 4}
#: Tokens of the short text that costs are read on, and where those lie that count.
TEXT, COUNTED = 4096, "1024–4096"
NOT_MEASURED = "–"


@functools.cache
def measured() -> dict[str, list[Row]]:
    """Rows by the columns of `SETTINGS`: of a novel and of forty texts read whole, and of longer ones of which the end is."""
    novel = [r for r in rows_of("longer-smollm2.json") if (r["text"], r["length"], "adapter" in r) == (NOVEL, 16384, False)]
    rows = [r for r in rows_of("reading-*.json") if r["segment"] != SEGMENT and "adapter" not in r]
    far = paired.by_words(rows, ("model", "length"), CHOOSING)
    return {"twice": novel, "forty texts": list(RowFile(many.RESULT))} | {
        column: far([model, str(length)]) for (model, length), column in FAR.items()
    }


def gained(name: str, times: str) -> str:
    """By how much less it loses on copies from farther back than the trained length, in SmolLM2 and in Gemma 3."""
    cells, columns = [], [(times, ""), (f"gemma {times}", "Gemma 3: ")]
    if times == "twice" and (read := SETTINGS[name].get("forty texts")):
        setting, *others = read
        found = many.differences(measured()["forty texts"], setting, *(others or ["unmodified"]), "far")
        mean, half = mean_interval(found)
        cells.append(f"{-mean:+.3f} ± {half:.3f}" + (" on `rerope`" if others else "") + ", forty texts")
        del columns[0]
    for column, model in columns:
        setting, *others = SETTINGS[name].get(column, [""])
        pairs = paired.by_text(measured()[column], setting, *(others or ["unmodified"]))
        if found := paired.differences(pairs, "far"):
            mean, half = mean_interval(found)
            cells.append(f"{model}{-mean:+.2f} ± {half:.2f}" + (" on `rerope`" if others else ""))
    reach = LongAttnConfig.parse(name).bind(FACTS).reach
    if not cells and 0 < reach < TIMES[times] * TRAINED:
        return f"reaches {reach:,.0f} tokens"
    return "; ".join(cells) or NOT_MEASURED


def cost(name: str) -> str:
    """Nats that it adds, untrained, to the tokens that count of a short text."""
    if method(name).bind(FACTS).identity_below >= TEXT:
        return "0, unchanged"
    read = (NOVEL, TEXT, "float32")
    rows = [r for r in RowFile(RESULTS / "methods-smollm2.json") if (r["book"], r["length"], r["dtype"]) == read]
    loss = {r["name"]: r["loss"][COUNTED] for r in rows}
    ways = {"": f"{name}()", "calibrated ": f"{name}(), calibrated"}
    told = [f"{way}{loss[key] - loss['unmodified']:+.2f}" for way, key in ways.items() if key in loss]
    if not told and (pairs := paired.by_text(measured()["twice"], *SETTINGS[name].get("twice", [""]), "unmodified")):
        within, _ = paired.prose_less(*pairs[0])
        told = [f"{within:+.3f} up to 8k"]
    return ", ".join(told) or NOT_MEASURED


def ratio(name: str) -> str:
    """Time of reading a prompt on a CPU, as ratios to sdpa's."""
    try:
        return speed.between(speed.load_all(), "cpu", "forward", name)
    except ValueError:
        return NOT_MEASURED


def table(_: str) -> str:
    head = ["", "copies at 2 ×", "copies at 4 ×", "cost on short text", "needs training", "time on a CPU"]
    body = [
        [
            f"`{name}`",
            gained(name, "twice"),
            gained(name, "four times"),
            cost(name),
            "yes" if method(name).bind(FACTS).needs_training else "no",
            ratio(name),
        ]
        for name in SETTINGS
    ]
    return markdown(head, body)


def contents() -> Contents:
    """What stands below `<!-- choice: all -->`."""
    return {"choice": table}
