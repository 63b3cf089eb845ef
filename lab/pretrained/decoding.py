"""How decoding with a KV cache rounds: its logits beside those of one pass over the same text, unmodified and under `rerope`.

python lab/pretrained/decoding.py --model models/SmolLM2-135M-Instruct --text pride-and-prejudice.txt --dtype bfloat16
"""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import torch
from torch import Tensor

from hf_longattn.evaluation.report import markdown
from hf_longattn.evaluation.rows import Row, RowFile
from hf_longattn.evaluation.settings import UNMODIFIED, Setting
from hf_longattn.integration.caches import CACHE
from lab.markdown import Contents
from lab.pretrained.runner import RESULTS, Choice, Program, Text, described

RESULT = RESULTS / "decoding.json"
#: Tokens of a piece of the text, and those of them that are read one by one.
PIECE, DECODED = 128, 32
PROTOCOL = (
    "The first `length` tokens of a text in pieces of 128, each read in one pass and again through a cache, its last 32 "
    "tokens one by one. Of the logits of these 32: the root of the mean squared difference, the largest, and how many most "
    "likely tokens differ; `one_pass` is a digest of the logits of all passes, alike where these are the same bit for bit."
)


@torch.inference_mode()
def decoded(model: Any, ids: Tensor) -> Tensor:
    """The logits of the last tokens of a piece (1, tokens), read one by one, (DECODED, vocabulary)."""
    first, *steps = ids.split([PIECE - DECODED] + [1] * DECODED, 1)
    cache, found = getattr(model(first, use_cache=True), CACHE), []
    for step in steps:
        found.append(model(step, **{CACHE: cache}, use_cache=True).logits[0, -1])
    return torch.stack(found).float()


@torch.inference_mode()
def measure(model: Any, text: Text, choice: Choice, args: argparse.Namespace) -> Row:
    pieces, digest = text.ids.split(PIECE, 1), hashlib.sha256()
    squares, largest, others = [], 0.0, 0
    for piece in pieces:
        whole = model(piece, use_cache=False).logits[0].float()
        digest.update(whole.numpy().tobytes())
        mine, whole = decoded(model, piece), whole[-DECODED:]
        squares.append(float((mine - whole).square().mean()))
        largest = max(largest, float((mine - whole).abs().max()))
        others += int((mine.argmax(-1) != whole.argmax(-1)).sum())
    found = {"rms": (sum(squares) / len(squares)) ** 0.5, "largest": largest, "others": others, "one_pass": digest.hexdigest()}
    return found | {"decoded": DECODED * len(pieces)} | described(choice, text.trained)


def settings(text: Text) -> list[Choice]:
    return [Choice(Setting(UNMODIFIED)), Choice(Setting.parse(f"rerope:window={text.trained // 2}"))]


DECODING = Program("decoding", RESULT, PROTOCOL, settings, measure, lengths=(1024,), spare=0)


def table(what: str) -> str:
    """Differences by dtype and setting; "all"."""
    assert what == "all"
    rows = [
        [r["dtype"], f"`{r['name']}`", f"{r['rms']:.2g}", f"{r['largest']:.2g}", f"{r['others']} of {r['decoded']}"]
        for r in RowFile(RESULT)
    ]
    return markdown(["", "", "difference, RMS", "largest", "other most likely token"], rows)


def contents() -> Contents:
    return {"decoding": table}


if __name__ == "__main__":
    DECODING.main(__doc__ or "")
