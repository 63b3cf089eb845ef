"""Generation and caches, in place of transformers' generation mixin: each way must give what a plain forward pass gives."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from hf_longattn.integration.caches import CACHE

TOLERANCE = 1e-4


class GenerationTesterMixin:
    """Tests for a TestCase with `model_tester` and `all_model_classes`; no method is named."""

    model_tester: Any

    def _model(self) -> tuple[Any, Tensor]:
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        model = self.model_tester.causal_lm_class(config).eval().double()  # cosscale magnifies float32's rounding
        model.generation_config.eos_token_id = None
        return model, inputs["input_ids"]

    def _generate(self, model: Any, ids: Tensor, new: int = 6, **options: Any) -> tuple[Tensor, Tensor]:
        options = {"do_sample": False, "max_new_tokens": new, "pad_token_id": 0} | options
        out = model.generate(ids, output_logits=True, return_dict_in_generate=True, **options)
        return out.sequences, torch.stack(out.logits, 1)

    def _check(self, model: Any, ids: Tensor, **options: Any) -> None:
        """Greedy tokens' logits are those of one forward pass over the whole text."""
        with torch.no_grad():
            sequences, logits = self._generate(model, ids, **options)
            full = model(sequences, use_cache=False).logits[:, ids.shape[1] - 1 : -1]
        torch.testing.assert_close(logits, full.to(logits.dtype), atol=TOLERANCE, rtol=0)

    def test_greedy_generate(self) -> None:
        self._check(*self._model())

    def test_greedy_generate_without_cache(self) -> None:
        self._check(*self._model(), use_cache=False)

    def test_greedy_generate_static_cache(self) -> None:
        self._check(*self._model(), cache_implementation="static")

    def test_greedy_generate_prefill_chunks(self) -> None:
        self._check(*self._model(), prefill_chunk_size=3)

    def test_sample_generate(self) -> None:
        model, ids = self._model()
        torch.manual_seed(0)
        sequences = model.generate(ids, do_sample=True, top_k=5, max_new_tokens=4, pad_token_id=0)
        torch.manual_seed(0)
        again = model.generate(ids, do_sample=True, top_k=5, max_new_tokens=4, pad_token_id=0, use_cache=False)
        torch.testing.assert_close(sequences, again)

    def test_beam_search_generate(self) -> None:
        model, ids = self._model()
        options = {"num_beams": 3, "do_sample": False, "max_new_tokens": 5, "pad_token_id": 0}
        torch.testing.assert_close(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))

    def test_prompt_lookup_generate(self) -> None:
        model, ids = self._model()
        ids = ids[:1].repeat(1, 2)
        plain, _ = self._generate(model, ids)
        looked_up, _ = self._generate(model, ids, prompt_lookup_num_tokens=2)
        torch.testing.assert_close(looked_up, plain)

    def test_assisted_generate(self) -> None:
        model, ids = self._model()
        plain, _ = self._generate(model, ids[:1])
        assisted, _ = self._generate(model, ids[:1], assistant_model=copy.deepcopy(model))
        torch.testing.assert_close(assisted, plain)

    def test_left_padding_compatibility(self) -> None:
        model, ids = self._model()
        mask = torch.cat([torch.zeros(ids.shape[0], 4, dtype=ids.dtype), torch.ones_like(ids)], 1)
        _, plain = self._generate(model, ids)
        _, padded = self._generate(model, torch.nn.functional.pad(ids, (4, 0)), attention_mask=mask)
        torch.testing.assert_close(padded, plain, atol=TOLERANCE, rtol=0)

    def test_inputs_embeds_generate(self) -> None:
        model, ids = self._model()
        _, plain = self._generate(model, ids)
        options = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
        out = model.generate(
            inputs_embeds=model.get_input_embeddings()(ids), output_logits=True, return_dict_in_generate=True, **options
        )
        torch.testing.assert_close(torch.stack(out.logits, 1), plain, atol=TOLERANCE, rtol=0)

    def test_generate_continues_from_past_key_values(self) -> None:
        model, ids = self._model()
        options = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
        whole = model.generate(ids, max_new_tokens=6, **options)
        first = model.generate(ids, max_new_tokens=3, **options)
        rest = model.generate(first.sequences, **{CACHE: first[CACHE]}, max_new_tokens=3, **options)
        torch.testing.assert_close(torch.stack(rest.logits, 1), torch.stack(whole.logits[3:], 1), atol=TOLERANCE, rtol=0)

    @torch.no_grad()
    def test_static_cache_in_chunks(self) -> None:
        model, ids = self._model()
        cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + 5)
        parts = [model(part, **{CACHE: cache}, use_cache=True).logits for part in ids.split(3, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(ids, use_cache=False).logits, atol=TOLERANCE, rtol=0)

    @torch.no_grad()
    def test_logits_to_keep(self) -> None:
        model, ids = self._model()
        torch.testing.assert_close(model(ids, logits_to_keep=2).logits, model(ids).logits[:, -2:], atol=TOLERANCE, rtol=0)

    @torch.no_grad()
    def test_right_padding(self) -> None:
        model, ids = self._model()
        mask = torch.cat([torch.ones_like(ids), torch.zeros(ids.shape[0], 3, dtype=ids.dtype)], 1)
        padded = model(torch.nn.functional.pad(ids, (0, 3)), attention_mask=mask).logits[:, : ids.shape[1]]
        torch.testing.assert_close(padded, model(ids).logits, atol=TOLERANCE, rtol=0)

    @torch.no_grad()
    def test_packed_documents(self) -> None:
        model, ids = self._model()
        positions = torch.arange(ids.shape[1]).repeat(2)[None]
        packed = model(ids[:2].reshape(1, -1), position_ids=positions, use_cache=False).logits.reshape(2, ids.shape[1], -1)
        torch.testing.assert_close(packed, model(ids[:2]).logits, atol=TOLERANCE, rtol=0)
