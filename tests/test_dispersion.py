"""The papers' dispersion in pretrained models: the benchmark on tiny models, and the committed rows behind the page."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModel, AutoTokenizer, Qwen3Config, Qwen3Model

from lab.pretrained import dispersion_on_model as dispersion


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[argparse.Namespace, dict[str, list[dict[str, Any]]]]:
    """What the command measures on a tiny model, by what."""
    folder = tmp_path_factory.mktemp("dispersion")
    model = tiny.save(folder / "model")
    text = folder / "text.txt"
    text.write_text("".join(f"The {i}th of them went home. " for i in range(300)), encoding="utf-8")
    words = ["--model", str(model), "--text", str(text), "--code", str(text), "--texts", "12", "--longest", "32"]
    words += ["--questions", "2", "--code-tokens", "200", "--sizes", "2", "8", "--out", str(folder / "rows.json")]
    dispersion.main(["outputs", "entropy", "spread", *words])
    rows = json.loads((folder / "rows.json").read_text(encoding="utf-8"))["rows"]
    by_what = {what: [r for r in rows if r["what"] == what] for what in dispersion.MEASURES}
    return argparse.Namespace(model=model, text=text, texts=12, longest=32, seed=0), by_what


@pytest.mark.parametrize("positions", [True, False])
def test_outputs_deviate_as_in_a_full_pass(found: Any, positions: bool) -> None:
    """The last tokens' outputs of whole texts, read in front of the output projection, without the package."""
    args, rows = found
    ids = dispersion.random_tokens(AutoTokenizer.from_pretrained(args.model), args)[:, :16]
    model = AutoModel.from_pretrained(args.model)
    if not positions:
        model.rotary_emb.inv_freq.zero_()
    seen: list[torch.Tensor] = []
    model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda m, x: seen.append(x[0][:, -1].view(len(ids), 2, 8)))
    with torch.no_grad():
        model(ids)
    expected = seen[0].var(0, correction=0).mean(-1).sqrt()
    way = "random tokens" if positions else "random tokens, no positions"
    row = next(r for r in rows["outputs"] if (r["way"], r["query"]) == (way, "its own"))
    assert row["lengths"] == [8, 16, 32]
    assert row["deviation"][1] == pytest.approx(expected.tolist(), rel=1e-3)
    same = next(r for r in rows["outputs"] if (r["way"], r["query"]) == (way, "the same"))
    assert same["deviation"] != row["deviation"]


def test_entropies_and_spreads_keep_their_bounds(found: Any) -> None:
    _, rows = found
    (row,) = rows["entropy"]
    assert row["sizes"] == [2, 8]
    for length, by_head in zip(row["lengths"], row["entropy"], strict=True):
        assert all(0 < h < math.log(length) for h in by_head)
    assert [r["layer"] for r in rows["spread"]] == [0, 1]
    for row in rows["spread"]:
        assert all(0 < delta <= bound for delta, bound in zip(row["spread"], row["bound"], strict=True))


def test_a_norm_of_queries_and_keys_bounds_the_spread_by_its_gains() -> None:
    config = Qwen3Config(
        hidden_size=16, head_dim=8, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1, vocab_size=9
    )
    attention = Qwen3Model(config).layers[0].self_attn
    with torch.no_grad():
        attention.q_norm.weight.copy_(torch.linspace(-3, 1, 8))
        attention.k_norm.weight.fill_(0.5)
    (bound, again) = dispersion.bounds(attention, torch.ones(4), config)
    assert bound == again == pytest.approx(2 * 8 * 3 * 0.5 * 8**-0.5)
    with torch.no_grad():
        q = attention.q_norm(torch.randn(500, 8)) @ attention.k_norm(torch.randn(500, 8)).mT * attention.scaling
    assert float((q.amax(-1) - q.amin(-1)).max()) < bound


def test_what_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in ((["outputs", "--model", "m"], "outputs needs --text"), (["colour"], "cannot measure 'colour'")):
        with pytest.raises(SystemExit, match="2"):
            dispersion.main(words)
        assert message in capsys.readouterr().err


def test_the_page_says_what_was_measured() -> None:
    page = " ".join(
        (dispersion.RESULTS.parents[1] / "docs" / "lab" / "dispersion.md").read_text(encoding="utf-8").split()
    ).replace("−", "-")
    slopes = {
        (r["way"], r["query"]): dispersion.slope(r["lengths"], dispersion.over_heads(r)) for r in dispersion.rows_of("outputs")
    }
    for way, query, told in (
        ("random tokens, no positions", "the same", "the slope is {} from 64 tokens on"),
        ("random tokens", "the same", "Positions change it little ({})"),
        ("random tokens, no positions", "its own", "for the text's own query: {},"),
        ("random tokens", "its own", "with positions {},"),
        ("sentences", "its own", "for sentences {} ("),
        ("sentences", "the same", "as random tokens do ({})"),
    ):
        assert told.format(f"{slopes[way, query]:.2f}") in page
    spread = dispersion.rows_of("spread")
    assert {row["model"] for row in spread} == {"SmolLM2-135M-Instruct", "gemma-3-270m"}
    assert all(delta < bound for row in spread for delta, bound in zip(row["spread"], row["bound"], strict=True))
