"""Making a model longer: the losses it is judged by, `extend`, and the command."""

from __future__ import annotations

import copy
import json
import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import transformers
from cases import FAMILIES, model_config
from helpers import close, multimodal, stock, tokens
from interrupts import at_pass
from tokenizers import normalizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedTokenizerFast,
)
from typer.testing import CliRunner
from undrawn import undrawn

import hf_longattn
from hf_longattn.cli import app
from hf_longattn.evaluation import Copy, answer_scores, copy_losses, loss_by_position, token_losses, with_copies
from hf_longattn.evaluation import search as extension
from hf_longattn.evaluation.measures import probe as probing
from hf_longattn.evaluation.rows import RowFile
from hf_longattn.evaluation.search import Scores, best, candidates, plan_copies, score
from hf_longattn.evaluation.settings import UNMODIFIED, Setting
from hf_longattn.evaluation.statistics import mean_interval
from hf_longattn.extension import PURPOSES
from hf_longattn.integration import changes, trained_length
from hf_longattn.integration.layer_methods import facts_for
from hf_longattn.integration.layers import View, language_config
from hf_longattn.integration.model import running
from hf_longattn.training.loss import CausalLoss, trained_by

#: A checkpoint that was trained at 24 tokens and brings YaRN, with its temperature.
YARNED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "rope_theta": 10000.0}


@pytest.mark.parametrize("prefill", [None, 6])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_token_losses_are_the_models_own(family: str, prefill: int | None) -> None:
    model, ids = stock(family), tokens(2, 23)
    losses = token_losses(model, ids, chunk=5, prefill=prefill)
    assert losses[:, 0].isnan().all()
    logits = model(ids).logits[:, :-1].detach()
    want = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    close(losses[:, 1:], want)
    assert loss_by_position(losses, [1, 23])[0] == pytest.approx(want.mean().item(), abs=1e-5)


HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "logits divided": ("GraniteConfig", {"logits_scaling": 6.0}),
    "logits multiplied": ("CohereConfig", {"logit_scale": 0.25}),
    "multiplied as others divide": ("HyperCLOVAXConfig", {"logits_scaling": 3.0}),
    "a head of several layers": ("ModernBertDecoderConfig", {"bos_token_id": 1, "eos_token_id": 2}),
    "an unnamed decoder": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 16}),
}


@pytest.mark.parametrize("head", HEADS)
def test_losses_go_through_the_models_own_head(head: str) -> None:
    name, changes = HEADS[head]
    arguments = {k: v for k, v in FAMILIES["llama"][1].items() if k not in ("head_dim", "tie_word_embeddings")}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**arguments | changes)).eval()
    ids = tokens(2, 23)
    with torch.no_grad():
        logits = model(ids).logits[:, :-1].float()
    want = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    close(token_losses(model, ids, chunk=5)[:, 1:], want)
    scored = answer_scores(model, ids[:1], [(9, 13)])[0].log_likelihood
    assert scored == pytest.approx(-want[0, 8:12].sum().item(), abs=1e-4)
    loss = CausalLoss(model)
    with trained_by(model, loss):
        trained = model(input_ids=ids, labels=ids)["loss"]
    assert trained.item() == pytest.approx(want.mean().item(), abs=1e-5)
    own = torch.autograd.grad(model(ids, labels=ids).loss, model.get_input_embeddings().weight)[0]
    close(torch.autograd.grad(trained, model.get_input_embeddings().weight)[0], own)


def test_loss_by_position_leaves_out_what_it_is_told() -> None:
    losses = torch.tensor([[torch.nan, 1.0, 2.0, 3.0, 9.0, 5.0]])
    taken = torch.tensor([False, False, False, False, True, False])
    assert loss_by_position(losses, [0, 3, 6], taken) == [1.5, 4.0]


def test_copies_repeat_the_text() -> None:
    ids = torch.arange(1000)[None]
    copies = [Copy(300, 400), Copy(500, 700)]
    changed, taken = with_copies(ids, copies)
    assert torch.equal(changed[0, 400:528], ids[0, 100:228])
    assert torch.equal(changed[0, 700:828], ids[0, 200:328])
    assert int(taken.sum()) == 256
    assert torch.equal(changed[0, ~taken], ids[0, ~taken])
    losses = torch.arange(1000.0)[None]
    assert copy_losses(losses, copies) == [(416 + 527) / 2, (716 + 827) / 2]


@pytest.mark.parametrize(
    "copies",
    [[Copy(300, 900)], [Copy(200, 400), Copy(150, 500)], [Copy(200, 400), Copy(300, 750)], [Copy(400, 600), Copy(128, 200)]],
)
def test_copies_that_do_not_fit_are_refused(copies: list[Copy]) -> None:
    with pytest.raises(ValueError, match="does not fit the text or meets another"):
        with_copies(torch.arange(1000)[None], copies)


def test_copy_needs_room() -> None:
    with pytest.raises(ValueError, match="128 <= distance <= position"):
        Copy(100, 400)


@pytest.mark.parametrize(("trained", "to"), [(2048, 4096), (8192, 16384), (8192, 32768)])
def test_planned_copies_fit(trained: int, to: int) -> None:
    copies = plan_copies(trained, to)
    with_copies(torch.zeros(1, to, dtype=torch.int64), copies)
    assert all(c.position > trained for c in copies[1:])
    assert copies[-1].distance > trained


def test_extend_keeps_short_texts_and_changes_long_ones() -> None:
    model, ids = stock("llama", max_position_embeddings=24), tokens(1, 40)
    before = model(ids).logits
    assert hf_longattn.extend(model, to=100) is model
    after = model(ids).logits
    assert hf_longattn.get_config(model).positions == hf_longattn.methods.ReRope(window=12)
    close(after[:, :12], before[:, :12])
    assert (after - before)[:, 24:].abs().max() > 1e-3


@pytest.mark.slow
def test_extend_to_the_trained_length_shows_the_farthest_tokens_nearer() -> None:
    model, ids = stock("llama", max_position_embeddings=30), tokens(1, 30)
    before = model(ids).logits
    assert hf_longattn.extend(model, to=30).config.max_position_embeddings == 30
    assert hf_longattn.get_config(model).positions == hf_longattn.methods.ReRope(window=15)
    after = model(ids).logits
    close(after[:, :15], before[:, :15])
    assert (after - before)[:, 16:].abs().max() > 1e-3
    model = stock("llama", max_position_embeddings=30)
    with pytest.raises(ValueError, match=r"reaches 35 tokens, not 36: .*Raise shift or lower window, or use rerope"):
        hf_longattn.extend(model, to=36, method="string_remap", window=5)
    hf_longattn.extend(model, to=30, method="string_remap")
    assert hf_longattn.get_config(model).positions == hf_longattn.methods.StringRemap(shift=10, window=5)
    close(model(ids).logits[:, :10], before[:, :10])


@pytest.mark.slow
def test_extend_puts_a_temperature_beside_where_one_pays() -> None:
    def chosen(family: str, to: int, **how: Any) -> str:
        return hf_longattn.get_config(hf_longattn.extend(stock(family, max_position_embeddings=24), to=to, **how)).name

    assert [chosen("qwen3", to) for to in (35, 36, 400)] == ["rerope", "rerope+logn", "rerope+logn"]
    assert [chosen("llama", to) for to in (95, 96)] == ["rerope", "rerope+infoscale"]
    assert [chosen("qwen3", to, purpose="retrieval") for to in (35, 36)] == ["rerope", "rerope+yarn_temperature"]
    assert chosen("llama", 96, purpose="retrieval") == "rerope+infoscale"
    assert chosen("qwen3", 200, purpose="reading") == "leaky_rerope"
    assert chosen("qwen3", 200, method="rerope") == "rerope"
    model, ids = stock("qwen3", max_position_embeddings=24), tokens(1, 40)
    before = model(ids).logits
    close(hf_longattn.extend(model, to=96)(ids).logits[:, :12], before[:, :12])
    with_own = stock("qwen3", max_position_embeddings=96, rope_parameters=YARNED)
    assert hf_longattn.get_config(hf_longattn.extend(with_own, to=200, stack=True)).name == "rerope"


def test_at_the_trained_length_extend_says_what_a_remap_is_for() -> None:
    """Unless a purpose or a method says that it is meant."""
    with pytest.warns(UserWarning, match="reads 32 tokens as it is: rerope serves retrieval from more than 16 tokens back"):
        hf_longattn.extend(stock("llama", max_position_embeddings=32), to=32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for how in ({"purpose": "retrieval"}, {"method": "rerope"}):
            hf_longattn.extend(stock("llama", max_position_embeddings=32), to=32, **how)


def test_extend_refuses_what_makes_no_sense() -> None:
    model = stock("llama", max_position_embeddings=32)
    for arguments, message in (
        ({"to": 31}, "nothing to extend"),
        ({"to": 32, "method": "yarn_beyond"}, "nothing to extend"),
        ({"to": 32, "method": "streaming", "window": 8}, "nothing to extend"),
        ({"to": 200, "method": "self_extend", "window": 8, "group": 2}, "reaches 56 tokens, not 200"),
        ({"to": 200, "method": "leaky_rerope", "window": 40}, "must be below the trained length 32"),
    ):
        with pytest.raises(ValueError, match=message):
            hf_longattn.extend(model, **arguments)
        assert model.config._attn_implementation == "sdpa"
    hf_longattn.extend(model, to=200, method="self_extend", window=8, group=8)
    with pytest.raises(ValueError, match="the model takes its positions from a table of"):
        hf_longattn.extend(stock("gpt2"), to=200)


@pytest.mark.parametrize(("trained", "to"), [(8192, 16384), (8192, 65536), (512, 1024), (3000, 27648)])
def test_candidates_reach(trained: int, to: int) -> None:
    for config in (setting.config for setting in candidates(trained, to) if setting.method):
        assert config is not None
        assert config.positions is not None
        reach = config.positions.reach(trained)
        assert reach is None or reach >= to
        if config.name == "self_extend":
            i, j = torch.arange(trained, to)[:, None], torch.tensor([0])  # nothing is shown farther than the first key
            assert config.positions.distance(i, j).max() < trained


def test_a_temperature_is_a_candidate_where_it_pays() -> None:
    names = [s.name for s in candidates(8192, 65536)]
    beside = [f"rerope+infoscale:window={window}" for window in (4096, 2048)]
    beside += [f"self_extend+infoscale:window={shape}" for shape in ("1024:group=10", "2048:group=11")]
    assert [s.name for s in candidates(8192, 65536, "infoscale")] == [*names, *beside]
    assert not any(map(extension.tempered, names))


@pytest.mark.parametrize(("family", "normed"), [("llama", False), ("gpt2", False), ("qwen3", True), ("gemma3", True)])
def test_qk_norm_is_seen(family: str, normed: bool) -> None:
    assert facts_for(View(stock(family))).qk_norm is normed


def scored(within: float, beyond: float, copies: tuple[float, ...], spread: float = 0.0) -> Scores:
    """Scores whose parts differ from their means by no more than that, in a pattern of their own."""
    parts = [spread * (n % 3 - 1) for n in range(6)]
    return Scores(within, beyond, copies, tuple(beyond + x for x in parts), tuple(tuple(c + x for x in parts) for c in copies))


def test_best_weighs_long_and_short() -> None:
    scores = {
        "unmodified": scored(3.0, 5.0, (1.0, 6.0)),
        "costly": scored(3.1, 3.0, (0.5, 0.5)),
        "good": scored(3.01, 3.2, (0.6, 0.8)),
        "worse": scored(3.0, 3.1, (0.6, 3.0)),
    }
    assert best(scores, 0.02) == "good"
    assert best(scores, 0.5) == "costly"
    with pytest.raises(ValueError, match="costs more than"):
        best({n: scores[n] for n in ("unmodified", "costly")}, 0.02)


@pytest.mark.parametrize("purpose", PURPOSES)
def test_of_equals_the_one_that_needs_no_plugin_is_taken(purpose: str) -> None:
    plain, ours = scored(3.0, 3.2, (0.9, 0.8)), scored(3.0, 3.19, (0.89, 0.79))
    scores = {"unmodified": scored(3.0, 5.0, (1.0, 6.0)), "YaRN": plain, "rerope:window=4": ours}
    assert best(scores, 0.02, purpose) == "rerope:window=4"  # by 0.01, and no part tells another story
    scores["rerope:window=4"] = scored(3.0, 3.19, (0.89, 0.79), spread=0.1)
    mean, half = scores["rerope:window=4"].against(plain, purpose)
    assert (round(mean, 6), half > 0.01) == (-0.01, True)
    assert best(scores, 0.02, purpose) == "YaRN"


@pytest.mark.parametrize("purpose", PURPOSES)
def test_nothing_is_best_where_nothing_improves(purpose: str) -> None:
    scores = {"unmodified": scored(3.0, 3.2, (0.9, 0.8)), "YaRN": scored(3.0, 3.19, (0.89, 0.79), spread=0.1)}
    with pytest.raises(ValueError, match="better than the model as it is, by more than chance"):
        best(scores, 0.02, purpose)
    scores = {"unmodified": Scores(3.0, 3.2, (0.9,)), "YaRN": Scores(3.0, 2.0, (0.1,))}  # no interval is known
    with pytest.raises(ValueError, match="better than the model as it is, by more than chance"):
        best(scores, 0.02, purpose)


def test_losses_are_compared_in_pairs() -> None:
    """The interval is that of mean differences: prose by stretches, and the mean of copies, each by its blocks."""
    one = Scores(3.0, 2.0, (1.0, 3.0), (1.9, 2.1), ((0.5, 1.5), (2.5, 3.5)))
    other = Scores(3.0, 2.5, (1.0, 3.5), (2.5, 2.5), ((0.6, 1.4), (3.0, 4.0)))
    prose, copying = mean_interval([-0.6, -0.4])[1], mean_interval([-0.1, 0.1])[1] / 2
    assert one.against(other, "reading") == pytest.approx((-0.5, prose))
    assert one.against(other, "retrieval") == pytest.approx((-0.25, copying))
    assert one.against(other) == pytest.approx((-0.375, math.hypot(prose, copying) / 2))
    assert not one.beats(other)


def test_a_score_has_its_parts() -> None:
    model, copies = stock("llama", max_position_embeddings=1024), plan_copies(1024, 2048)
    ids = tokens(1, 2048)
    found = score(model, ids, 1024, copies)
    assert [len(blocks) for blocks in found.blocks] == [7] * 5
    for copy_, blocks in zip(found.copies, found.blocks, strict=True):
        assert sum(blocks) / 7 == pytest.approx(copy_, abs=1e-5)
    assert 4 <= len(found.prose) <= 16
    assert min(found.prose) < found.beyond < max(found.prose)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> tuple[Path, Path]:
    """A tiny model trained at "2048", and a text for it."""
    path = tiny.save(tmp_path_factory.mktemp("model"), trained=2048, num_hidden_layers=1, initializer_range=0.2)
    return path, tiny.text(path / "text.txt", 5000)


@pytest.mark.slow
@pytest.mark.usefixtures("every_candidate_improves")
def test_command_tries_saves_and_reloads(saved: tuple[Path, Path], tmp_path: Path) -> None:
    model, text = saved
    out = tmp_path / "out"
    arguments = ["extend", str(model), "--to", "4k", "--text", str(text), "--out", str(out), "--tolerance", "10"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    record = json.loads((out / "extend.json").read_text())
    probed = {row["setting"] for row in record["rows"] if "distance" in row}
    assert probed == {s.name for s in candidates(2048, 4096)} | {"leaky_rerope by head"} == set(record["probed"])
    read = {row["setting"]: row for row in record["rows"] if "read" in row}
    assert {"unmodified", record["choice"]} <= read.keys()
    assert len(read) == 4  # beside the unmodified model the best kind with both its windows, and the next
    assert {row["read"] for row in read.values()} == {4096}
    assert "against the unmodified model" in result.output
    assert (out / "extend.png").stat().st_size > 10_000
    reloaded = AutoModelForCausalLM.from_pretrained(out).eval()
    assert (record["choice"] == "YaRN") == (reloaded.config._attn_implementation == "sdpa")
    assert reloaded.config.max_position_embeddings == 4096
    ids = PreTrainedTokenizerFast.from_pretrained(out)(text.read_text(), return_tensors="pt").input_ids[:, :4096]
    again = score(reloaded, ids, 2048, plan_copies(2048, 4096))
    assert again.beyond == pytest.approx(read[record["choice"]]["beyond"], abs=1e-4)
    written = (out / "model.safetensors").stat().st_mtime_ns
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert f"is finished: it holds {record['choice']} already" in " ".join(result.output.split())
    assert (out / "model.safetensors").stat().st_mtime_ns == written


@pytest.mark.usefixtures("every_candidate_improves")
@pytest.mark.slow
@pytest.mark.parametrize("fast", [False, True])
def test_command_reads_fast_and_saves_the_checkpoints_own_precision(
    saved: tuple[Path, Path], tmp_path: Path, fast: bool, cpu_bfloat16: Callable[[bool], None]
) -> None:
    cpu_bfloat16(fast)
    (model, text), half, out = saved, tmp_path / "half", tmp_path / "out"
    own = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    own.save_pretrained(half)
    PreTrainedTokenizerFast.from_pretrained(model).save_pretrained(half)
    arguments = ["extend", str(half), "--to", "4k", "--text", str(text), "--out", str(out), "--tolerance", "10"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    record = json.loads((out / "extend.json").read_text())
    assert {row["dtype"] for row in record["rows"] if "read" in row} == {"bfloat16" if fast else "float32"}
    reloaded = AutoModelForCausalLM.from_pretrained(out)
    assert reloaded.dtype == torch.bfloat16
    for name, weight in own.state_dict().items():
        assert torch.equal(reloaded.state_dict()[name], weight), name


@pytest.fixture
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Let a search try the candidates that a function makes, to take less time; returns what it is asked with."""

    def take(make: Callable[..., list[Setting]]) -> list[Any]:
        asked: list[Any] = []
        monkeypatch.setattr(extension, "candidates", lambda *told: asked.append(told) or make(*told))
        return asked

    return take


@pytest.mark.usefixtures("every_candidate_improves")
@pytest.mark.slow
def test_the_command_takes_the_trained_length_that_it_is_told(
    saved: tuple[Path, Path], tmp_path: Path, few_candidates: Callable[..., list[Any]]
) -> None:
    """Of a model whose YaRN was trained in, though its maximum was left: no scaling is a candidate on top of that."""
    (model, text), own, out = saved, tmp_path / "own", tmp_path / "out"
    config = AutoConfig.from_pretrained(model)
    config.rope_parameters = YARNED | {"original_max_position_embeddings": 1024, "factor": 2.0}
    config.max_position_embeddings = 1024
    AutoModelForCausalLM.from_pretrained(model, config=config).save_pretrained(own)
    AutoTokenizer.from_pretrained(model).save_pretrained(own)
    asked = few_candidates(lambda *told: [s for s in candidates(*told) if s.name.startswith((UNMODIFIED, "rerope", "leaky"))])
    arguments = ["extend", str(own), "--to", "4k", "--text", str(text), "--out", str(out), "--tolerance", "10"]
    result = CliRunner().invoke(app, [*arguments, "--train-length", "2k"])
    assert result.exit_code == 0, result.output
    assert "Trained at 2,048 tokens: given as train_length." in result.output
    assert asked == [(2048, 4096, None, False)]
    again = CliRunner().invoke(app, [*arguments, "--train-length", "2k"])
    assert "is finished: it holds" in " ".join(again.output.split()), again.exception
    winner = hf_longattn.get_config(AutoModelForCausalLM.from_pretrained(out))
    assert (winner.name in ("rerope", "leaky_rerope"), winner.train_length) == (True, 2048)
    names = [s.name for s in candidates(2048, 4096, plain=False)]
    assert not [name for name in names if "yarn" in name.lower()]
    refused = CliRunner().invoke(app, [*arguments[:-4], "--tolerance", "10"])
    assert "added after training, for inference" in " ".join(refused.output.replace("│", " ").split())


@pytest.mark.usefixtures("every_candidate_improves")
@pytest.mark.slow
def test_the_command_saves_what_it_measured_of_a_checkpoint_with_a_method(
    saved: tuple[Path, Path], tmp_path: Path, few_candidates: Callable[..., list[Any]]
) -> None:
    model, text = saved
    own, out = tmp_path / "own", tmp_path / "out"
    AutoModelForCausalLM.from_pretrained(model, attn_implementation="alibi").save_pretrained(own)
    AutoTokenizer.from_pretrained(model).save_pretrained(own)
    few = [Setting(UNMODIFIED), Setting.parse("rerope:window=1024"), Setting.parse("leaky_rerope:window=1024:stretch=3.0")]
    few_candidates(lambda *_: few)
    arguments = ["extend", str(own), "--to", "4k", "--text", str(text), "--out", str(out), "--tolerance", "10"]
    arguments += ["--dtype", "float32"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    record = json.loads((out / "extend.json").read_text())
    winner = AutoModelForCausalLM.from_pretrained(out).eval()
    assert {m.name for m in running(winner).methods} in ({"rerope", "alibi"}, {"leaky_rerope", "alibi"})
    ids = AutoTokenizer.from_pretrained(own)(text.read_text(), return_tensors="pt").input_ids[:, :4096]
    again = score(winner, ids, 2048, [Copy(*pair) for pair in record["copies"]])
    kept = next(row for row in record["rows"] if row["setting"] == record["choice"] and "read" in row)
    assert again.within == pytest.approx(kept["within"], abs=1e-5)
    assert again.beyond == pytest.approx(kept["beyond"], abs=1e-5)


@pytest.mark.usefixtures("every_candidate_improves")
@pytest.mark.slow
def test_an_interrupted_command_goes_on_to_the_same_result(saved: tuple[Path, Path], tmp_path: Path) -> None:
    model, text = saved

    def run(out: Path, *more: str, model: Path = model) -> Any:
        line = ["extend", str(model), "--to", "4k", "--text", str(text), "--tolerance", "10", "--out", str(out), *more]
        return CliRunner().invoke(app, line)

    def kept() -> list[dict[str, Any]]:
        file = tmp_path / "out" / "extend.json"
        return json.loads(file.read_text())["rows"] if file.exists() else []

    assert run(tmp_path / "whole").exit_code == 0
    with at_pass(LlamaModel, lambda: len(kept()) == 22):
        stopped = run(tmp_path / "out")
    assert stopped.exit_code == 130, stopped.output
    assert "22 rows are kept, and the same command continues" in " ".join(stopped.output.split())  # 10 x 2 probed, 2 read
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["extend.json"]
    before = (tmp_path / "out" / "extend.json").read_text()
    (tmp_path / "other.txt").write_text(text.read_text()[::-1])
    for more, message in ((("--to", "4500"), "to: 4096 there, 4500 now"), (("--text", str(tmp_path / "other.txt")), "text: ")):
        refused = run(tmp_path / "out", *more)
        assert refused.exit_code == 2
        assert f"rows of another protocol ({message}" in " ".join(refused.output.replace("│", " ").split())
    moved = shutil.copytree(model, tmp_path / "moved" / model.name)
    tokenizer = AutoTokenizer.from_pretrained(moved)
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("a", "b")
    tokenizer.save_pretrained(moved)
    refused = run(tmp_path / "out", model=moved)
    assert "rows of another protocol (tokens: " in " ".join(refused.output.replace("│", " ").split())
    assert (tmp_path / "out" / "extend.json").read_text() == before
    assert run(tmp_path / "out").exit_code == 0
    assert kept()[:22] == json.loads(before)["rows"]  # with the seconds that they took
    assert len(kept()) == 24
    whole, out = (json.loads((tmp_path / n / "extend.json").read_text()) for n in ("whole", "out"))
    assert {k: v for k, v in whole.items() if k != "rows"} == {k: v for k, v in out.items() if k != "rows"}
    unlike = {"seconds", "cpu_seconds", "command"}
    assert [r.keys() - unlike for r in whole["rows"]] == [r.keys() - unlike for r in out["rows"]]
    for first, second in zip(whole["rows"], out["rows"], strict=True):
        assert {k: v for k, v in first.items() if k not in unlike} == {k: v for k, v in second.items() if k not in unlike}


def test_a_purpose_weighs_what_is_measured(saved: tuple[Path, Path]) -> None:
    rows = RowFile(None, protocol={})
    search = extension.Search(torch.zeros(1, 4096, dtype=torch.int64), 2048, rows, lambda setting: None)
    assert search.distances == [3072, 3968]
    losses = {"unmodified": (9, 9), "YaRN": (3.5, 0.9), "rerope:window=1024": (3.6, 0.5), "rerope:window=512": (3.4, 0.8)}
    losses |= {"leaky_rerope:window=1024:stretch=3.0": (3.3, 2.0), "self_extend:window=256:group=3": (3.45, 0.6)}
    for name, (text, copying) in losses.items():
        for distance in search.distances:
            rows.put({"setting": name, "distance": distance, "text": [text, text], "copy": [copying - 0.1, copying + 0.1]})
    want = {
        "both": ["self_extend:window=256:group=3", "rerope:window=1024", "YaRN", "leaky_rerope:window=1024:stretch=3.0"],
        "reading": ["leaky_rerope:window=1024:stretch=3.0", "rerope:window=512", "self_extend:window=256:group=3", "YaRN"],
        "retrieval": ["rerope:window=1024", "self_extend:window=256:group=3", "YaRN", "leaky_rerope:window=1024:stretch=3.0"],
    }
    for purpose, order in want.items():
        search.purpose = purpose
        assert [settings[0] for settings in search.ranked()] == order
    assert ["rerope:window=1024", "rerope:window=512"] in search.ranked()
    assert search.probed()["rerope:window=512"] == pytest.approx(0.8)
    scores = {
        "unmodified": scored(3.0, 5.0, (6.0,)),
        "fluent": scored(3.0, 3.0, (2.0,)),
        "finds": scored(3.0, 3.4, (0.5,)),
        "even": scored(3.0, 3.1, (0.7,)),
    }
    found = {purpose: best(scores, 0.02, purpose) for purpose in PURPOSES}
    assert found == {"both": "even", "reading": "fluent", "retrieval": "finds"}


def searched(
    monkeypatch: pytest.MonkeyPatch,
    within: dict[str, float],
    losses: dict[str, float],
    copies: dict[str, float],
    **about: Any,
) -> tuple[str, list[tuple[str, int, int]]]:
    """What a search that measures these takes, and what read the text: each setting, how much of it, how many copies."""
    rows, read = RowFile(None, protocol={}), []

    def as_told(model: Any, ids: torch.Tensor, edge: int, planned: Any) -> Scores:
        read.append((model.name, ids.shape[1], len(planned)))
        copying = copies.get(model.name, 5.0 if model.name == UNMODIFIED else 1.0)
        return scored(within.get(model.name, 3.0), 3.0, (copying,) * len(planned))

    def probed(model: Any, ids: torch.Tensor, distances: Any) -> probing.Probe:
        copies = torch.full((1, 1), losses.get(model.name, 4.0), dtype=torch.float64)
        return probing.Probe(distances, torch.full((1, 1), 4.0), copies)

    def load(setting: Any) -> Any:
        return SimpleNamespace(name=setting.name, device="cpu", dtype=torch.float32)

    monkeypatch.setattr(extension, "score", as_told)
    monkeypatch.setattr(probing, "probe", probed)
    search = extension.Search(torch.zeros(1, 4096, dtype=torch.int64), 2048, rows, load, **about)
    search.experiment.run(cells=search.cells(), total=search.work)
    choice = search.choice()
    assert plotted(search) == set(search.probed() | search.scores())
    return choice, read


def plotted(search: extension.Search) -> set[str]:
    """What the legend of the command's picture names."""
    pytest.importorskip("matplotlib")
    from hf_longattn.evaluation.measured_extension import plot

    with undrawn() as drawn:
        plot(search, Path("/dev/null"))
    return {text.get_text() for legend in drawn[0].legends for text in legend.get_texts()}


def test_the_next_candidate_reads_where_the_first_cost_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    within = {"YaRN": 3.1, "rerope:window=1024": 3.2}
    losses = {"YaRN": 0.5, "rerope:window=1024": 0.6, "self_extend:window=256:group=3": 0.7}
    choice, read = searched(monkeypatch, within, losses, {})
    assert choice == "self_extend:window=256:group=3"
    assert read == [
        ("unmodified", 4096, 5),
        ("YaRN", 4096, 5),
        ("rerope:window=1024", 4096, 5),
        ("self_extend:window=256:group=3", 4096, 5),
    ]


def test_the_best_kind_reads_with_both_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {"rerope:window=512": 0.3, "rerope:window=1024": 0.5, "YaRN": 0.9}
    choice, read = searched(monkeypatch, {}, losses, {"rerope:window=512": 1.6, "rerope:window=1024": 0.9})
    assert choice == "rerope:window=1024"
    assert [name for name, *_ in read] == ["unmodified", "rerope:window=512", "rerope:window=1024", "YaRN"]


def test_a_temperature_is_not_probed_and_reads_beside_the_better_window(monkeypatch: pytest.MonkeyPatch) -> None:
    name, losses = "rerope+logn:window=1024", {"rerope:window=1024": 0.5, "rerope:window=512": 0.6, "YaRN": 0.7}
    choice, read = searched(monkeypatch, {}, losses | {name: 0.0}, {name: 0.5}, temperature="logn")
    assert choice == name
    assert [n for n, *_ in read] == ["unmodified", "rerope:window=1024", "rerope:window=512", name, "YaRN"]
    _, read = searched(monkeypatch, {}, losses, {})
    assert [n for n, *_ in read] == ["unmodified", "rerope:window=1024", "rerope:window=512", "YaRN"]
    _, read = searched(monkeypatch, {}, losses, {"rerope:window=512": 0.9}, temperature="logn")
    assert "rerope+logn:window=512" in [n for n, *_ in read]
    assert name not in [n for n, *_ in read]
    _, read = searched(monkeypatch, {}, losses | {"YaRN": 0.1}, {}, temperature="logn")
    assert [n for n, *_ in read] == ["unmodified", "YaRN", "rerope:window=1024"]


@pytest.mark.slow
def test_the_command_says_so_where_nothing_improves(saved: tuple[Path, Path], tmp_path: Path) -> None:
    """Random weights: within the trained length too, where other candidates are tried."""
    model, text = saved
    line = ["extend", str(model), "--to", "2k", "--text", str(text), "--tolerance", "10", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 1, (result.output, result.exception)
    assert "Nothing reads better than the model as it is, by more than chance." in " ".join(result.output.split())
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["extend.json"]
    record = json.loads((tmp_path / "out" / "extend.json").read_text())
    assert "string_remap:shift=682" in {row["setting"] for row in record["rows"]}
    assert not any(row["setting"] == "YaRN" for row in record["rows"])
    (read,) = (row for row in record["rows"] if "read" in row and row["setting"] == "unmodified")
    assert read["read"] == 2048
    assert read["beyond"] > 0


def test_where_a_scaling_may_depend_on_the_length_the_baseline_is_a_short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    _, read = searched(monkeypatch, {}, {}, {}, plain=False)
    assert read[:2] == [("unmodified", 4096, 5), ("unmodified", 2048, 1)]


@pytest.mark.parametrize(("to", "warned"), [("4k", False), (4097, True), ("10M", True)])
def test_extend_warns_above_what_was_shown_to_work(to: str | int, warned: bool) -> None:
    model = stock("llama", max_position_embeddings=1024)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hf_longattn.extend(model, to)
    found = [str(w.message) for w in caught if "shown to read well" in str(w.message)]
    assert len(found) == warned
    if to == "10M":
        assert "10,485,760 tokens are 1.02e+04 times the trained length of 1,024" in found[0]
        assert "2.0 to 2.9 at 8 and 16 times" in found[0]


def test_the_command_warns_above_what_was_shown_to_work(saved: tuple[Path, Path]) -> None:
    model, text = saved
    result = CliRunner().invoke(app, ["extend", str(model), "--to", "1M", "--text", str(text), "--device", "cpu"])
    assert "was never shown to read well without training" in result.output
    assert "1048576 are needed" in " ".join(result.output.replace("│", " ").split())


def test_extend_takes_a_purpose() -> None:
    model = stock("llama", max_position_embeddings=24)
    hf_longattn.extend(model, to=100, purpose="reading")
    assert hf_longattn.get_config(model).positions == hf_longattn.methods.LeakyReRope(window=12, stretch=8.0)
    for purpose in ("retrieval", "both"):
        model = hf_longattn.extend(stock("llama", max_position_embeddings=24), to=100, purpose=purpose)
        assert hf_longattn.get_config(model).positions == hf_longattn.methods.ReRope(window=12)
    with pytest.raises(ValueError, match="did you mean 'reading'"):
        hf_longattn.extend(model, to=100, purpose="readng")
    with pytest.raises(ValueError, match="purpose chooses a method and 'rerope' is one"):
        hf_longattn.extend(model, to=100, method="rerope", purpose="reading")


# what says how long a model reads -------------------------------------------------------------------------------------

LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 10000.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
#: Configs of models trained at 64, and what each says of that, under which names.
SAYS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "plain": ({}, {"max_position_embeddings": 64}),
    "llama3": ({"rope_parameters": LLAMA3}, {"max_position_embeddings": 64}),
    "yarn that was trained in": (
        {"rope_parameters": YARNED | {"original_max_position_embeddings": 16}},
        {"max_position_embeddings": 64},
    ),
    "Vicuna 16k": (
        {"rope_parameters": LINEAR, "max_position_embeddings": 16, "max_sequence_length": 64},
        {"max_position_embeddings": 16, "max_sequence_length": 64},
    ),
    "Command R": (
        {"max_position_embeddings": 16, "model_max_length": 64},
        {"max_position_embeddings": 16, "model_max_length": 64},
    ),
    "two names": ({"seq_length": 32}, {"max_position_embeddings": 64, "seq_length": 32}),
}


def says(m: Any) -> dict[str, int]:
    """What a model's configs say of the longest text."""
    return trained_length.named_lengths(language_config(m.config)) | {"generation": m.generation_config.max_length or 0}


def longer(name: str, folder: Path, **how: Any) -> Any:
    """A saved model that was trained at 64, loaded and extended to 256."""
    torch.manual_seed(0)
    m = AutoModelForCausalLM.from_config(model_config("llama", **{"max_position_embeddings": 64} | SAYS[name][0]))
    m.generation_config.max_length = how.pop("ends", m.config.max_position_embeddings)
    m.save_pretrained(folder)
    m = AutoModelForCausalLM.from_pretrained(folder).eval()
    return hf_longattn.extend(m, 256, **{"method": "rerope"} | how)


SHORTEN: dict[str, Any] = {
    "remove": hf_longattn.remove,
    "sdpa": lambda m: m.set_attn_implementation("sdpa"),
    "eager": lambda m: m.set_attn_implementation("eager"),
    "a dict": lambda m: m.set_attn_implementation({"": "eager"}),
    "a method that extends nothing": lambda m: hf_longattn.apply(m, "infoscale"),
    "a method that reaches less": lambda m: hf_longattn.apply(m, "self_extend", group=2, window=32),
    "extend to less": lambda m: hf_longattn.extend(m, 65, method="string_remap", shift=32).set_attn_implementation("sdpa"),
    "disable": lambda m: changes.disable(m),
}


@pytest.mark.parametrize("how", SHORTEN)
@pytest.mark.parametrize("name", ["plain", "Vicuna 16k"])
@pytest.mark.filterwarnings("ignore")
def test_every_length_comes_back_with_the_attention(name: str, how: str, tmp_path: Path) -> None:
    m, own = longer(name, tmp_path / "base"), SAYS[name][1]
    assert says(m) == dict.fromkeys([*own, "generation"], 256)
    SHORTEN[how](m)
    assert says(m) == own | {"generation": own["max_position_embeddings"]}
    changes.enable(m)
    m.save_pretrained(tmp_path / "saved")
    again = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert {k: again[k] for k in own} == (dict.fromkeys(own, 256) if how == "disable" else own)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAYS)
def test_every_name_for_a_length_moves_and_none_that_a_rotation_depends_on(name: str, tmp_path: Path) -> None:
    m, own, ids = longer(name, tmp_path / "base"), SAYS[name][1], tokens(1, 100)
    assert hf_longattn.describe(m).trained.length == 64
    assert says(m) == dict.fromkeys([*own, "generation"], 256)
    m.save_pretrained(tmp_path / "longer")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "longer")
    assert says(again) == says(m)
    assert hf_longattn.describe(again).trained.length == 64
    with torch.no_grad():
        close(again(ids).logits, m(ids).logits, 0.0)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        close(
            AutoModelForCausalLM.from_pretrained(tmp_path / "longer", attn_implementation="sdpa")(ids).logits,
            plain(ids).logits,
        )
    hf_longattn.extend(again, 512)
    assert says(again) == dict.fromkeys([*own, "generation"], 512)
    assert says(hf_longattn.remove(again)) == own | {"generation": own["max_position_embeddings"]}


@pytest.mark.parametrize("how", ["from_pretrained", "from_config", "the class itself"])
def test_a_longer_checkpoint_without_its_method_says_what_it_reads(how: str, tmp_path: Path) -> None:
    longer("plain", tmp_path / "base").save_pretrained(tmp_path / "longer")
    config = AutoConfig.from_pretrained(tmp_path / "longer")
    config._attn_implementation = "sdpa"
    make = {
        "from_pretrained": lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "longer", attn_implementation="sdpa"),
        "from_config": lambda: AutoModelForCausalLM.from_config(config),
        "the class itself": lambda: LlamaForCausalLM(config),
    }[how]
    with pytest.warns(UserWarning, match="without the method"):
        m = make()
    assert how != "from_pretrained" or m.generation_config.max_length == 64
    assert m.config.max_position_embeddings == 64
    m.set_attn_implementation("longattn")
    assert m.config.max_position_embeddings == 256


def test_a_method_that_reaches_as_far_keeps_the_length(tmp_path: Path) -> None:
    m = longer("plain", tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_longattn.apply(m, "rerope+infoscale")
        hf_longattn.update(m, window=16)
    assert says(m) == {"max_position_embeddings": 256, "generation": 256}
    with pytest.warns(
        UserWarning, match="reaches 96 tokens, and the model was extended to 256: max_position_embeddings is 64"
    ):
        hf_longattn.apply(m, "self_extend", group=2, window=32)
    with pytest.raises(ValueError, match=r"reaches 96 tokens, not 128: .*Raise group or lower window, or use rerope"):
        hf_longattn.update(m, extended_to=128)
    with pytest.raises(ValueError, match="reaches 96 tokens, not 256"):
        hf_longattn.extend(longer("plain", tmp_path), to=256, method="self_extend", group=2, window=32)
    with pytest.raises(ValueError, match="infoscale extends nothing"):
        hf_longattn.apply(m, "infoscale", extended_to=128)
    assert says(hf_longattn.update(m, extended_to=90)) == {"max_position_embeddings": 90, "generation": 90}


@pytest.mark.parametrize("ends", [64, 20, 100])
def test_generation_ends_where_it_did(ends: int, tmp_path: Path) -> None:
    """At what a config says, whichever of its names it is that says so; another length is the user's own."""
    m = longer("Vicuna 16k", tmp_path / "base", ends=ends)
    assert m.generation_config.max_length == (256 if ends == 64 else ends)
    m.save_pretrained(tmp_path / "longer")
    for again in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "longer", attn_implementation="sdpa"),
        hf_longattn.remove(AutoModelForCausalLM.from_pretrained(tmp_path / "longer")),
        hf_longattn.remove(m),
    ):
        assert says(again) == SAYS["Vicuna 16k"][1] | {"generation": ends}


def test_a_change_that_fails_changes_no_length(tmp_path: Path) -> None:
    m = longer("plain", tmp_path)
    before = copy.deepcopy((vars(m.config), vars(m.generation_config)))
    for wrong in (
        lambda: hf_longattn.apply(m, "infoscale", layers=(7,)),
        lambda: hf_longattn.extend(m, 8192, method="self_extend", group=2),
        lambda: m.set_attn_implementation("no such thing"),
    ):
        with pytest.raises(ValueError, match=r"."):
            wrong()
        assert (vars(m.config), vars(m.generation_config)) == before


def test_a_length_that_was_told_comes_back_as_it_was(tmp_path: Path) -> None:
    m = longer("plain", tmp_path, train_length=16)
    assert (says(m)["max_position_embeddings"], hf_longattn.describe(m).trained.length) == (256, 16)
    assert says(hf_longattn.remove(m))["max_position_embeddings"] == 64


def test_a_config_says_it_where_the_model_is_loaded(tmp_path: Path) -> None:
    longer("plain", tmp_path)
    asked = {"attn_implementation": "rerope", "longattn": {"window": 8, "extended_to": 128}}
    assert AutoModelForCausalLM.from_pretrained(tmp_path, **asked).config.max_position_embeddings == 128


def test_a_multimodal_model_says_it_in_its_text_config(tmp_path: Path) -> None:
    m = multimodal()
    own = m.config.text_config.max_position_embeddings
    object.__setattr__(m.config, "max_position_embeddings", own)  # as some do beside it
    hf_longattn.extend(m, 4 * own)
    m.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (saved["max_position_embeddings"], saved["text_config"]["max_position_embeddings"]) == (4 * own, 4 * own)
    again = type(m).from_pretrained(tmp_path)
    again.set_attn_implementation("sdpa")
    assert (again.config.max_position_embeddings, again.config.text_config.max_position_embeddings) == (own, own)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["model first", "tokenizer first", "hf_longattn.save"])
def test_a_tokenizer_says_what_its_model_reads(order: str, tmp_path: Path) -> None:
    m, folder, tokenizer = longer("plain", tmp_path / "base"), tmp_path / "longer", tiny.tokenizer()
    tokenizer.model_max_length = 64
    if order == "hf_longattn.save":
        hf_longattn.save(m, folder, tokenizer=tokenizer)
    else:
        for x in (m, tokenizer) if order == "model first" else (tokenizer, m):
            x.save_pretrained(folder)
    assert tokenizer.model_max_length == 64
    again = AutoTokenizer.from_pretrained(folder)
    assert again.model_max_length == 256
    hf_longattn.remove(m).save_pretrained(folder)
    again.save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).model_max_length == 64
    assert "longattn" not in (folder / "tokenizer_config.json").read_text()
    unlimited = tiny.tokenizer()
    longer("plain", tmp_path / "base").save_pretrained(folder)
    unlimited.save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).model_max_length == unlimited.model_max_length


@pytest.mark.slow
@pytest.mark.parametrize("way", ["merged", "unloaded", "loaded", "peft", "a base with the method"])
def test_adapters_bring_the_length_that_they_were_made_for(way: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    m = longer("plain", tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(m, config).save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert base.config.max_position_embeddings == 64
    if way == "a base with the method":
        hf_longattn.apply(base, hf_longattn.get_config(m).replace(extended_to=None))
        assert_says(base, 64)
        peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
        return assert_says(base, 256)
    if way == "loaded":
        return assert_says(AutoModelForCausalLM.from_pretrained(tmp_path / "adapter"), 256)
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    assert_says(base, 256)
    if way == "peft":
        with adapted.disable_adapter():
            assert_says(base, 64)
        return assert_says(base, 256)
    merged = adapted.merge_and_unload() if way == "merged" else adapted.unload()
    merged.save_pretrained(tmp_path / "merged")
    return assert_says(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), 256)


@pytest.mark.parametrize("order", ["adapter first", "tokenizer first"])
def test_a_tokenizer_says_what_an_adapter_reads(order: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    m, tokenizer = peft.get_peft_model(longer("plain", tmp_path / "base"), config), tiny.tokenizer()
    tokenizer.model_max_length = 64
    for x in (m, tokenizer) if order == "adapter first" else (tokenizer, m):
        x.save_pretrained(tmp_path / "adapter")
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter").model_max_length == 256
    hf_longattn.remove(m)
    m.save_pretrained(tmp_path / "adapter")
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter").model_max_length == 64


def assert_says(m: Any, length: int) -> None:
    assert (m.config.max_position_embeddings, m.generation_config.max_length) == (length, length)


# rotary settings that came too late ------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", ["never", "now", "once"])
@pytest.mark.parametrize("written", ["yarn", "default", "a base", "a factor", "the model's own"])
def test_rotary_settings_that_the_model_was_not_built_with(written: str, half: str) -> None:
    """They would be saved, and nothing rotates by them now: neither a scaling that is not there, nor that one is gone."""
    built = YARNED if written in ("default", "a factor") else {"rope_type": "default", "rope_theta": 10000.0}
    model = stock("llama", max_position_embeddings=96, rope_parameters=dict(built))
    model = model if half == "never" else model.bfloat16()
    model = model.float() if half == "once" else model
    late = {"yarn": YARNED, "default": {"rope_type": "default", "rope_theta": 10000.0}, "a factor": YARNED | {"factor": 2.0}}
    late |= {"a base": {"rope_type": "default", "rope_theta": 20000.0}, "the model's own": dict(built)}
    model.config.rope_parameters = late[written]
    if written == "the model's own":
        hf_longattn.extend(model, 200)
        return
    for ask in (lambda: hf_longattn.extend(model, 200), lambda: hf_longattn.apply(model, "attention_sink")):
        with pytest.raises(ValueError, match="the model was built with others"):
            ask()
    assert not model.config.longattn
    model.config.rope_parameters = built
    hf_longattn.apply(model, "attention_sink")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_a_text_has_changed_are_the_models_own(kind: str) -> None:
    scaled = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 24}
    scaled |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]} if kind == "longrope" else {}
    model, ids = stock("llama", max_position_embeddings=96, rope_parameters=scaled), tokens(1, 120)
    with torch.no_grad():
        model(ids)
    hf_longattn.apply(model, "attention_sink")


@pytest.mark.parametrize("method", ["windowed", "streaming", "rerope"])
def test_a_learned_position_table_is_not_extended(method: str) -> None:
    opt = transformers.OPTConfig(**FAMILIES["llama"][1] | {"ffn_dim": 16})
    for m in (stock("gpt2"), AutoModelForCausalLM.from_config(opt)):
        before = m.config.max_position_embeddings
        with pytest.raises(ValueError, match=r"a table of|shows no rotary"):
            hf_longattn.extend(m, 4 * before, method=method)
        assert m.config.max_position_embeddings == before
