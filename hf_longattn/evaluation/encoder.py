"""A tokenizer for texts in pieces."""

from __future__ import annotations

from typing import Any


class Encoder:
    """A tokenizer for texts that are put together from pieces, each encoded by itself, so that lengths add up.

    Args:
        tokenizer: a transformers tokenizer.
        bos: whether a text starts with the beginning-of-text token: "auto" does what the tokenizer does, "always" and
            "never" what they say.

    Raises:
        ValueError: "always", and the tokenizer has no such token.
    """

    def __init__(self, tokenizer: Any, bos: str = "auto") -> None:
        self.tokenizer, token = tokenizer, tokenizer.bos_token_id
        if bos == "always" and token is None:
            raise ValueError("bos='always', but the tokenizer has no beginning-of-text token")
        adds = token is not None and list(tokenizer("a")["input_ids"])[:1] == [token]
        #: What a text starts with: the beginning-of-text token, or nothing.
        self.start: list[int] = [token] if bos == "always" or (bos == "auto" and adds) else []

    def __call__(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
