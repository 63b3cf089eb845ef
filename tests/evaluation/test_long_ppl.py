"""LongPPL: the tokens that far context helps with."""

import math

import pytest
import torch
from helpers import close, stock, tokens

from hf_longattn.evaluation import token_losses
from hf_longattn.evaluation.tasks.long_ppl import key_tokens, long_loss, short_losses


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize(("context", "stride", "length"), [(8, 4, 30), (8, 7, 24), (8, 3, 8), (40, 5, 30), (6, 1, 9)])
def test_short_losses_are_those_of_the_windows(context: int, stride: int, length: int, start: int) -> None:
    torch.manual_seed(0)
    model, ids = stock("llama"), tokens(2, length)
    got = short_losses(model, ids, context, stride, start)
    assert got[:, 0].isnan().all()
    for position in range(1, length):
        end = context if position < context else min(context + stride * math.ceil((position + 1 - context) / stride), length)
        first = max(min(end, length) - context, 0)
        assert position - first >= min(position, context - stride)
        before = ids[:, : start if first else 0]
        want = token_losses(model, torch.cat([before, ids[:, first : position + 1]], 1))[:, -1]
        close(got[:, position], want, 1e-5, f"{position}")


def test_key_tokens_are_those_that_far_context_helps_with() -> None:
    long = torch.tensor([[torch.nan, 0.5, 0.5, 1.9, 2.1, 1.0]])
    short = torch.tensor([[torch.nan, 2.6, 2.4, 9.0, 9.0, 0.2]])
    keys = key_tokens(long, short)
    assert keys.tolist() == [[False, True, False, True, False, False]]
    assert long_loss(long, keys) == pytest.approx(1.2)
    assert math.isnan(long_loss(long, torch.zeros_like(keys)))


def test_a_stride_must_fit_its_window() -> None:
    with pytest.raises(ValueError, match=r"stride must lie in \[1, 3\], got 5"):
        short_losses(None, tokens(), 4, 5, 0)
