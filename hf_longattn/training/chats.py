"""Conversations as tokens: the tokenizer's chat template, and which tokens the assistant says."""

from __future__ import annotations

import re
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

Message = dict[str, Any]


def messages_of(value: Any) -> list[Message] | None:
    """The messages of a conversation, without what a table filled in for lack of it; None where the value is none."""
    if not isinstance(value, list) or not value:
        return None
    if not all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in value):
        return None
    return [{k: x for k, x in m.items() if x is not None or k == "content"} for m in value]


def tokens(messages: list[Message], tokenizer: Any) -> list[int]:
    """The token ids of a conversation under the tokenizer's chat template.

    Raises:
        ValueError: there is no template, or it takes no such conversation.
    """
    return list(tokenizer(_text(messages, tokenizer), add_special_tokens=False, verbose=False)["input_ids"])


def answers(messages: list[Message], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Return the tokens of a conversation, and for each whether the assistant says it, the end of its turn included.

    Raises:
        ValueError: also where the template does not tell the answers apart.
    """
    if not tokenizer.is_fast:
        raise ValueError("hub.answers needs a fast tokenizer, which says where in a text its tokens lie")
    text, spans = _text(messages, tokenizer), []
    if marked := re.search(r"{%-?\s*generation\s*-?%}", tokenizer.chat_template) is not None:
        # the spans alone: the mask of tokens that 5.17 makes of them may run on to the end
        how = {"chat_template": tokenizer.chat_template, "return_assistant_tokens_mask": True, **tokenizer.special_tokens_map}
        _, (spans,) = render_jinja_template([messages], **how)
    for n, message in enumerate(messages):
        if marked or message["role"] != "assistant":
            continue
        if n == 0:
            raise ValueError(
                "it begins with an answer, and the chat template does not say where that begins: hub.answers needs a template "
                "with {% generation %} around answers, or conversations that begin with what is answered"
            )
        before, after = _text(messages[:n], tokenizer, add_generation_prompt=True), _text(messages[: n + 1], tokenizer)
        if not (after.startswith(before) and text.startswith(after)):
            raise ValueError(
                "the chat template writes an earlier answer otherwise than a last one, or than it asks for it: hub.answers "
                "needs a template with {% generation %} around answers, or conversations with one answer"
            )
        spans.append((len(before), len(after)))
    given = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts = [start for start, _ in given["offset_mapping"]]
    return list(given["input_ids"]), [any(a <= start < b for a, b in spans) for start in starts]


def _text(messages: list[Message], tokenizer: Any, **options: Any) -> str:
    if not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat template: take that of a model that chats (tokenizer=NAME), or write chats as texts"
        )
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except TemplateError as error:
        raise ValueError(f"the chat template refuses it: {error}") from None
