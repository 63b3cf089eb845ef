"""What a quantised KV cache costs a model that `extend` has made longer: the loss on a text, beside that with a plain cache.

python lab/pretrained/quantised_cache.py --model models/SmolLM2-135M-Instruct --text pride-and-prejudice.txt
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, QuantizedCache

from hf_longattn.evaluation.rows import Row, RowFile
from hf_longattn.evaluation.settings import Setting
from hf_longattn.integration.caches import CACHE
from lab.markdown import Contents
from lab.pretrained.paired import interval
from lab.pretrained.runner import RESULTS, Choice, Program, Text, described

RESULT = RESULTS / "quantised-cache.json"
#: Tokens of a call, and tokens whose losses are averaged, for intervals.
CHUNK, STEP = 1024, 256
PROTOCOL = (
    "The first `length` tokens of a text, read through a cache, 1,024 at a time, twice: through a DynamicCache (plain) and "
    'through QuantizedCache("fp8"), whose one scale a layer is set by the first call. Mean loss in nats of each 256 tokens.'
)


@torch.inference_mode()
def losses(model: Any, ids: Tensor, cache: Any) -> list[float]:
    """The mean loss of each STEP tokens of a text (1, tokens); the first token of all has none."""
    found, last = [], None
    for part in ids.split(CHUNK, 1):
        logits = model(part, **{CACHE: cache}, use_cache=True).logits
        logits, last = (logits[:, :-1] if last is None else torch.cat([last, logits[:, :-1]], 1)), logits[:, -1:]
        target = part[0, 1:] if not found else part[0]
        found.append(torch.nn.functional.cross_entropy(logits[0].float(), target, reduction="none"))
    return [round(float(step.mean()), 5) for step in torch.cat(found).split(STEP)]


def settings(text: Text) -> list[Choice]:
    window = text.trained // 2  # what extend takes for this model
    return [Choice(Setting.parse(f"rerope:window={window}", f"rerope(window {window})"))]


def measure(model: Any, text: Text, choice: Choice, args: argparse.Namespace) -> Row:
    plain = losses(model, text.ids, DynamicCache(config=model.config))
    quantised = losses(model, text.ids, QuantizedCache("fp8", model.config))
    return {"plain": plain, "quantised": quantised} | described(choice, text.trained)


QUANTISED = Program("quantised_cache", RESULT, PROTOCOL, settings, measure, lengths=(10240,), spare=0)


def cost(what: str) -> str:
    """What the quantised cache adds to the loss, nats with a 95 % interval: "within" the trained length or "beyond"."""
    (row,) = RowFile(RESULT)
    edge = row["trained"] // STEP
    chosen = slice(edge) if what == "within" else slice(edge, None)
    return interval([q - p for p, q in zip(row["plain"][chosen], row["quantised"][chosen], strict=True)])


def contents() -> Contents:
    return {"quantised": cost}


if __name__ == "__main__":
    QUANTISED.main(__doc__ or "")
