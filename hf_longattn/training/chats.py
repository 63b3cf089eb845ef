"""Conversations as tokens: the tokenizer's chat template, and which tokens the assistant says."""

from __future__ import annotations

import json
import re
import reprlib
from contextlib import suppress
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

Message = dict[str, Any]


class Chat(NamedTuple):
    """A conversation, and the tools that its assistant may call, as JSON schemas."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


def chat_of(messages: Any, tools: Any = None) -> Chat | None:
    """The conversation of a row, without what a table filled in for lack of it; None where the messages are none.

    Args:
        tools: a list of JSON schemas, or that as a JSON text; None and "" for none.

    Raises:
        ValueError: tools are none of these.
    """
    if not isinstance(messages, list) or not messages:
        return None
    if not all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in messages):
        return None
    schemas = tools
    if isinstance(tools, str) and tools:
        with suppress(json.JSONDecodeError):
            schemas = json.loads(tools)
    if schemas and not (isinstance(schemas, list) and all(isinstance(schema, dict) for schema in schemas)):
        raise ValueError(f"its tools are {reprlib.repr(tools)}, no list of JSON schemas")
    return Chat([{"content": m["content"]} | _without_none(m) for m in messages], _without_none(schemas) if schemas else None)


def _without_none(value: Any) -> Any:
    """Drop members that are None: a table gives each row the members of all, in tool calls too."""
    if isinstance(value, dict):
        return {k: _without_none(x) for k, x in value.items() if x is not None}
    return [_without_none(x) for x in value] if isinstance(value, list) else value


def tokens(chat: Chat, tokenizer: Any) -> list[int]:
    """The token ids of a conversation under the tokenizer's chat template.

    Raises:
        ValueError: there is no template, or it takes no such conversation.
    """
    return list(tokenizer(_text(chat, tokenizer), add_special_tokens=False, verbose=False)["input_ids"])


def answers(chat: Chat, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Return the tokens of a conversation, and for each whether the assistant says it, the end of its turn included.

    Raises:
        ValueError: also where the template does not tell the answers apart.
    """
    if not tokenizer.is_fast:
        raise ValueError("hub.answers needs a fast tokenizer, which says where in a text its tokens lie")
    text, spans = _text(chat, tokenizer), []
    template = tokenizer.get_chat_template(tools=chat.tools)  # one of several
    if marked := re.search(r"{%-?\s*generation\s*-?%}", template) is not None:
        # the spans alone: the mask of tokens that 5.17 makes of them may run on to the end
        how = {"chat_template": template, "return_assistant_tokens_mask": True, **tokenizer.special_tokens_map}
        _, (spans,) = render_jinja_template([chat.messages], tools=chat.tools, **how)
    for n, message in enumerate(chat.messages):
        if marked or message["role"] != "assistant":
            continue
        if n == 0:
            raise ValueError(
                "it begins with an answer, and the chat template does not say where that begins: hub.answers needs a template "
                "with {% generation %} around answers, or conversations that begin with what is answered"
            )
        before = _text(chat._replace(messages=chat.messages[:n]), tokenizer, add_generation_prompt=True)
        after = _text(chat._replace(messages=chat.messages[: n + 1]), tokenizer)
        if not (after.startswith(before) and text.startswith(after)):
            raise ValueError(
                "the chat template writes an earlier answer otherwise than a last one, or than it asks for it: hub.answers "
                "needs a template with {% generation %} around answers, or conversations with one answer"
            )
        spans.append((len(before), len(after)))
    given = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts = [start for start, _ in given["offset_mapping"]]
    return list(given["input_ids"]), [any(a <= start < b for a, b in spans) for start in starts]


def _text(chat: Chat, tokenizer: Any, **options: Any) -> str:
    if not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat template: take that of a model that chats (tokenizer=NAME), or write chats as texts"
        )
    try:
        return str(tokenizer.apply_chat_template(chat.messages, tools=chat.tools, tokenize=False, **options))
    except (TemplateError, TypeError, LookupError, AttributeError) as error:  # some take no parts, or no content that is None
        raise ValueError(f"the chat template refuses it: {error}") from None
