"""A tokenizer for texts in pieces."""

from __future__ import annotations

from typing import Any


class Encoder:
    """A tokenizer for texts that are put together from pieces, each encoded by itself, so that lengths add up."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        bos = tokenizer.bos_token_id
        adds = bos is not None and list(tokenizer("a")["input_ids"])[:1] == [bos]
        #: What a text starts with: the beginning-of-text token, if this tokenizer puts one there.
        self.start: list[int] = [bos] if adds else []

    def __call__(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
