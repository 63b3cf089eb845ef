"""What tasks share whose answers a model writes: greedy decoding, and the tables of the answers found."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...integration.caches import CACHE
from ...integration.layers import candidates_of
from ..corpus import Corpus
from ..encoder import Encoder
from ..experiment import sha256_of
from ..measures.losses import Prefix
from ..readings import Readings
from ..report import Table, by_length
from ..rows import Row
from ..settings import UNMODIFIED
from ..statistics import wilson
from ..verdict import signed
from .base import Task

#: What chat templates call their switch: of Qwen3, SmolLM3, GLM; of DeepSeek, Granite. Others read neither.
AT_ONCE = {"enable_thinking": False, "thinking": False}
#: Tokens of a prompt that a model with sliding windows reads at a time, so that no layer computes pairs outside its window.
CHUNK = 1024


class WrittenAnswers(Task):
    """A task whose answers are written greedily, through a KV cache; a row's `score`, in [0, 1], is what was found of them."""

    def __init__(self, corpus: Corpus, name: str) -> None:
        super().__init__(corpus, name)
        if self.options.chat and not corpus.tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template: leave out chat")
        self.encode = Encoder(corpus.tokenizer, self.options.bos)

    def prompt(self, text: str, begins: str = "") -> list[int]:
        """Return the tokens to read; under `chat` the text is a user's turn, the answer's beginning the model's.

        A model that thinks before it answers is asked to answer at once.
        """
        if not self.options.chat:
            return [*self.corpus.start, *self.encode(text + begins)]
        turn = [{"role": "user", "content": text}]
        try:
            asked: str = self.corpus.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True, **AT_ONCE)
        except Exception as error:  # templates raise what they like
            raise ValueError(f"the chat template does not take a user's turn alone ({error}): leave out chat") from error
        if asked.rstrip().endswith("<think>"):  # of a template without a switch
            asked = f"{asked.rstrip()}\n\n</think>\n\n"
        return self.encode(asked + begins.lstrip())

    @property
    def template(self) -> str | None:
        """What texts are asked in, as a row's digest has it; None: without a chat template."""
        return sha256_of(str(self.corpus.tokenizer.chat_template)) if self.options.chat else None

    @torch.inference_mode()  # as the cache was read: some layers write into their state
    def written(
        self, model: Any, prompt: list[int], new_tokens: int, done: Callable[[str], bool], read: Prefix | None = None
    ) -> str:
        """What the model writes, greedily: up to its end-of-text token, `new_tokens`, or a text that is `done`.

        Args:
            read: the KV cache of the prompt without its last token, which goes on growing.
        """

        def text(ids: Tensor) -> str:
            return self.corpus.tokenizer.decode(ids[0, len(prompt) :], skip_special_tokens=True)

        def stop(ids: Tensor, scores: Any, **more: Any) -> Tensor:
            return torch.tensor([done(text(ids))], device=ids.device)

        greedy: dict[str, Any] = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "max_length": None}
        greedy |= {"return_dict_in_generate": False, "max_new_tokens": new_tokens, "stopping_criteria": [stop]}
        if read is not None:  # whatever the model's generation config says of caches
            greedy |= {CACHE: read, "use_cache": True, "cache_implementation": None, "prompt_lookup_num_tokens": None}
        elif any(layer.kind == "window" for layer in candidates_of(model)):
            greedy["prefill_chunk_size"] = CHUNK
        ids = torch.tensor([prompt], device=model.device)
        return text(model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **greedy))

    @staticmethod
    def format_row(row: Row) -> str:
        return f"{100 * row['score']:.0f} %"


def by_question(results: Readings, name: str, setting: str, length: int, column: str = "score") -> dict[str, float]:
    """A column over the questions that all settings were asked at a length: after an interruption some were asked fewer."""
    common = results.common(name, length)
    return {r["which"]: r[column] for r in results.of(setting, name, length) if r["which"] in common}


def share(found: dict[str, float]) -> str | None:
    """Scores as a percentage with its Wilson interval; None of none."""
    if not found:
        return None
    low, high = wilson(sum(found.values()), len(found))
    return f"{100 * sum(found.values()) / len(found):.1f} ({100 * low:.0f}–{100 * high:.0f})"


def differences(
    results: Readings,
    name: str,
    column: str = "score",
    title: str = "Less the unmodified model, points",
    times: float = 100,
    brief: bool = False,
) -> list[Table]:
    """Return the table of a column less the unmodified model's, paired by question; none where nothing else was asked."""

    def less(setting: str, n: int) -> str | None:
        found = results.paired(name, setting, n, partial(by_question, results, name, length=n, column=column))
        return found and signed((times * found[0], times * found[1]))

    others = [s for s in results.settings_of(name) if s != UNMODIFIED]
    table = by_length(f"{title}, paired by question", others, results.lengths_of(name), less, brief=brief)
    return [table] if others else []
