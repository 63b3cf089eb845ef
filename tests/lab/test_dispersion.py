"""The papers' dispersion in pretrained models, measured on a tiny one; committed rows are not measured again."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModel, AutoTokenizer, Qwen3Config, Qwen3Model

from lab.pretrained import dispersion
from lab.pretrained.runner import RESULTS


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[argparse.Namespace, list[dict[str, Any]]]:
    """What the command measures on a tiny model."""
    folder = tmp_path_factory.mktemp("dispersion")
    model, text, rows = tiny.save(folder / "model"), folder / "text.txt", folder / "rows.json"
    text.write_text("".join(f"The {i}th of them went home. " for i in range(300)), encoding="utf-8")
    words = ["--model", str(model), "--text", str(text), "--code", str(text), "--texts", "12", "--longest", "32"]
    words += ["--questions", "2", "--code-tokens", "200", "--sizes", "2", "8", "--result", str(rows)]
    dispersion.main(words)
    before = rows.read_text(encoding="utf-8")
    dispersion.main(words)
    assert rows.read_text(encoding="utf-8") == before
    return argparse.Namespace(model=model, text=text, texts=12, longest=32, seed=0), json.loads(before)["rows"]


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
    own, same = (r for r in rows if r.get("way") == way)
    assert own["lengths"] == [8, 16, 32]
    assert own["deviation"][1] == pytest.approx(expected.tolist(), rel=1e-3)
    assert same["deviation"] != own["deviation"]


def test_entropies_and_spreads_keep_their_bounds(found: Any) -> None:
    _, rows = found
    (row,) = (r for r in rows if r["task"] == "entropy")
    assert (row["sizes"], row["layer"]) == ([2, 8], 0)
    for length, by_head in zip(row["lengths"], row["entropy"], strict=True):
        assert all(0 < h < math.log(length) for h in by_head)
    spreads = [r for r in rows if r["task"] == "spread"]
    assert [r["layer"] for r in spreads] == [0, 1]
    assert all(0 < delta <= bound for r in spreads for delta, bound in zip(r["spread"], r["bound"], strict=True))


def test_a_norm_of_queries_and_keys_bounds_the_spread_by_its_gains() -> None:
    config = Qwen3Config(
        hidden_size=16, head_dim=8, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1, vocab_size=9
    )
    attention = Qwen3Model(config).layers[0].self_attn
    with torch.no_grad():
        attention.q_norm.weight.copy_(torch.linspace(-3, 1, 8))
        attention.k_norm.weight.fill_(0.5)
        (bound, again) = dispersion.bounds(attention, torch.ones(4), config)
        q = attention.q_norm(torch.randn(500, 8)) @ attention.k_norm(torch.randn(500, 8)).mT * attention.scaling
    assert bound == again == pytest.approx(2 * 8 * 3 * 0.5 * 8**-0.5)
    assert float((q.amax(-1) - q.amin(-1)).max()) < bound


def test_committed_rows_are_those_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = json.loads((RESULTS / "dispersion.json").read_text(encoding="utf-8"))["rows"]
    layers = {"SmolLM2-135M-Instruct": list(range(30)), "gemma-3-270m": [5, 11, 17]}
    monkeypatch.setattr(dispersion, "full_layers", lambda path: layers[path.name])
    keys = [tuple(row.get(column) for column in dispersion.COLUMNS) for row in rows]
    for name in layers:
        args = argparse.Namespace(model=Path(name), text=Path("book.txt"), code=Path("code.py"))
        listed = [tuple(cell.key.values()) for cell in dispersion.cells(args)]
        assert set(listed) >= {key for key in keys if key[1] == name}
