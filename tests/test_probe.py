"""The probe of far distances: a jump in position_ids in place of a long text."""

import pytest
import torch
from cases import model_config
from helpers import close, tokens
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_longattn
from hf_longattn.measuring.evaluation import token_losses
from hf_longattn.measuring.evaluation.copying import PASSAGE, SKIP
from hf_longattn.measuring.probe import AFTER, BEFORE, distances_to, passages, probe

LEAST = BEFORE + AFTER


def fresh() -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(model_config("llama", max_position_embeddings=4096)).eval()


def text() -> torch.Tensor:
    return tokens(2, LEAST)


def test_without_a_jump_it_is_a_text_read_in_one_pass() -> None:
    model, ids = fresh(), text()
    losses = token_losses(model, torch.cat([ids, ids[:, :PASSAGE]], 1))
    result = probe(model, ids, [LEAST])
    close(result.text[:, 0], losses[:, BEFORE + 1 : LEAST].mean(1), 1e-5)
    close(result.copies[:, 0], losses[:, LEAST + SKIP :].mean(1), 1e-5)
    assert result.trained == 4096


def test_a_cap_on_distances_shows_as_a_constant() -> None:
    model, ids = fresh(), text()
    plain = probe(model, ids, [9000, 20000]).text
    assert (plain[:, 0] - plain[:, 1]).abs().max() > 1e-3
    capped = probe(hf_longattn.apply(model, "rerope", window=600), ids, [9000, 20000])
    close(capped.text[:, 0], capped.text[:, 1], 1e-5)
    close(capped.copies[:, 0], capped.copies[:, 1], 1e-5)
    (first, second) = capped.rows()
    assert first["distance"] == 9000
    assert first["text"][0] == pytest.approx(second["text"][0], abs=1e-5)
    assert first["copy"][0] == pytest.approx(float(capped.copies[:, 0].mean()), abs=1e-5)


def test_distances_and_passages() -> None:
    assert distances_to(8000, 3) == (1280, 4640, 8000)
    ids = torch.arange(6000)[None]
    assert passages(ids, 3)[:, 0].tolist() == [0, 2360, 4720]
    with pytest.raises(ValueError, match="need a text of 7680 tokens, not 6000"):
        passages(ids, 6)
    with pytest.raises(ValueError, match="from 1280 on, not 1000"):
        distances_to(1000)
    with pytest.raises(ValueError, match="from 1280 on"):
        probe(fresh(), text(), [1000])
    with pytest.raises(ValueError, match=r"passages must be \(passages, 1280\)"):
        probe(fresh(), text()[:, :100], [2000])
