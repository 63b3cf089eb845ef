"""`hf-longattn eval`: its numbers against plain forward passes, its rows, and what it refuses."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import linecache
import math
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import coverage_models
import pytest
import tiny
import torch
from helpers import crossed
from interrupts import at_pass
from matplotlib.figure import Figure
from tokenizers import normalizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
)
from typer.testing import CliRunner

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.cli import app
from hf_longattn.evaluation import (
    EvalOptions,
    Results,
    Runner,
    Task,
    answer_scores,
    copy_losses,
    far_copies,
    prefix_of,
    token_losses,
    with_copies,
)
from hf_longattn.evaluation.checkpoints import Checkpoint, edit_rope
from hf_longattn.evaluation.corpus import reading
from hf_longattn.evaluation.experiment import fingerprint
from hf_longattn.evaluation.loading import OneModel, check_setting, load_setting
from hf_longattn.evaluation.measures.losses import crops
from hf_longattn.evaluation.readings import over
from hf_longattn.evaluation.runner import portable
from hf_longattn.evaluation.settings import Setting, parse_settings, read_settings
from hf_longattn.evaluation.statistics import mean_interval, wilson
from hf_longattn.evaluation.tasks import long_ppl
from hf_longattn.evaluation.verdict import headline, summary
from hf_longattn.training.loss import CausalLoss


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("evaluation")
    tiny.save(path / "model")
    tiny.save(path / "longer", trained=2600)
    tiny.save(path / "with_bos", bos=True)
    tiny.save_gpt2(path / "gpt2")
    tiny.text(path / "a.txt")
    tiny.text(path / "b.txt", seed=2)
    return path


def runner(
    folder: Path, model: str = "model", texts: tuple[str, ...] = ("a.txt", "b.txt"), contents: str = "", **changes: Any
) -> Runner:
    arguments: dict[str, Any] = {
        "model": str(folder / model),
        "settings": parse_settings(["scale_invariant:tau=3", "@yarn:2"]),
        "lengths": [128, 512, 1024],
        "texts": {name: contents or (folder / name).read_text() for name in texts},
        "targets": 64,
    }
    return Runner(EvalOptions(**arguments | changes))


# numbers -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("model", ["model", "with_bos"])
def test_losses_are_those_of_plain_forward_passes_over_the_same_targets(folder: Path, tmp_path: Path, model: str) -> None:
    this = runner(folder, model)
    store = this.open(tmp_path / "out")
    store.run()
    found = this.results(store)
    within = ["setting", "length 128", "length 512", "positions 0–512"]
    assert within in [table.columns for section in found.sections() for table in section.tables]  # as it was trained, at 512

    start = [0] if model == "with_bos" else []
    window = 1024 - len(start)
    plain = AutoModelForCausalLM.from_pretrained(folder / model).eval()
    changed = AutoModelForCausalLM.from_pretrained(
        folder / model, attn_implementation="scale_invariant", longattn={"tau": 3.0}
    ).eval()
    for name, network in (("unmodified", plain), ("scale_invariant:tau=3", changed)):
        for document in ("a.txt", "b.txt"):
            text = [tiny.CHARACTERS.index(c) for c in (folder / document).read_text()[:window]]
            for length in (128, 512, 1024):
                ids = torch.tensor([start + text[window - (length - len(start)) :]])
                assert ids.shape[1] == length
                logits = network(ids).logits[0, :-1].detach().double()
                losses = -logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
                assert found.losses(name, length)[document] == pytest.approx(losses[-64:].mean().item(), abs=2e-5)
            bins = found.bins(name)[document]
            assert bins == pytest.approx([losses[:511].mean().item(), losses[511:].mean().item()], abs=2e-5)
            assert over(bins, 0, 1024) == pytest.approx(losses.mean().item(), abs=2e-5)


def test_the_same_targets_end_every_context(folder: Path) -> None:
    this = runner(folder)
    document = this.corpus.documents[0]
    ends = [this.corpus.context(document, n)[0, -64:].tolist() for n in this.options.lengths]
    assert ends[0] == ends[1] == ends[2] == document.ids[-64:].tolist()


def test_several_windows_do_not_overlap(folder: Path) -> None:
    this = runner(folder, texts=("a.txt",), windows=2)
    assert [d.name for d in this.corpus.documents] == ["a.txt, window 1", "a.txt, window 2"]
    text = (folder / "a.txt").read_text()
    for i, document in enumerate(this.corpus.documents):
        assert "".join(tiny.CHARACTERS[t] for t in document.ids) == text[1024 * i : 1024 * (i + 1)]


def test_losses_of_the_last_tokens_alone(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    ids = torch.randint(0, 90, (2, 40))
    every, last = token_losses(model, ids), token_losses(model, ids, chunk=4, last=7)
    torch.testing.assert_close(last[:, -7:], every[:, -7:], atol=1e-6, rtol=0.0)
    assert last[:, :-7].isnan().all()


@pytest.mark.slow
def test_copies_are_the_loss_on_passages_repeated_from_far_back(folder: Path, tmp_path: Path) -> None:
    this = runner(folder, tasks=("copies",), lengths=[2560, 2816], model="longer", settings=parse_settings(["infoscale"]))
    copies = far_copies(2560)
    assert [(c.distance, c.position) for c in copies] == [(1024, 2048), (1945, 2176), (512, 2304), (1536, 2432)]
    store = this.open(tmp_path / "out")
    store.run()
    row = store.rows["unmodified | copies | 2560 | b.txt"]
    ids, _ = with_copies(this.corpus.context(this.corpus.documents[1], 2560), copies)
    losses = token_losses(AutoModelForCausalLM.from_pretrained(folder / "longer").eval(), ids)
    found = [-a["log_likelihood"] / a["tokens"] for a in row["answers"]]
    assert found == pytest.approx(copy_losses(losses, copies), abs=1e-5)
    assert row["distances"] == [c.distance for c in copies]
    with pytest.raises(ValueError, match="copies need texts of 2560 tokens or more, not 512"):
        runner(folder, tasks=("copies",), lengths=[512, 2560])


@pytest.mark.slow
def test_answers_depend_on_the_text_that_they_stand_in(folder: Path) -> None:
    def of(task: str, text: str) -> list[str]:
        (it,) = runner(folder, tasks=(task,), texts=(text,), lengths=[512]).tasks
        return [cell.digest for cell in it.cells(Setting("unmodified"))]

    assert of("needles", "a.txt") != of("needles", "b.txt")
    assert of("passkey", "a.txt") == of("passkey", "b.txt")


def test_one_model_is_given_methods_and_others_are_loaded(folder: Path) -> None:
    """Of the same weights with another rotation too."""
    one = OneModel(Checkpoint(str(folder / "longer")), "float32")
    plain = one(Setting("unmodified"))
    assert one(Setting("rerope", "rerope")) is plain
    assert hf_longattn.get_config(plain).name == "rerope"
    scaled = one(Setting("scaled", rope="yarn:2"))
    assert (plain.config.rope_parameters["rope_type"], scaled.config.rope_parameters["rope_type"]) == ("default", "yarn")


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked", crossed(["unmodified", "rerope:window=1000", "rerope+logn:window=1000", "scale_invariant:tau=3", "@yarn:2"], 3)
)
def test_a_prefix_is_read_once_and_settings_read_on(folder: Path, tmp_path: Path, asked: str) -> None:
    """The prefix's window is longer than the text here: what reads it by itself gives what one pass does."""
    lengths, prefix = [2560, 2816], "streaming:window=2500"
    this = runner(folder, tasks=("loss", "copies"), lengths=lengths, targets=512, model="longer", prefix=prefix,
                settings=parse_settings([asked]))  # fmt: skip
    store = this.open(tmp_path / "out")
    store.run()
    model = load_setting(Setting.parse(asked), Checkpoint(str(folder / "longer")))
    plain = AutoModelForCausalLM.from_pretrained(folder / "longer").eval()
    for document, length in itertools.product(this.corpus.documents, lengths):
        ids = document.ids[None, :length]
        (copied, _), copies = with_copies(ids, far_copies(length)), far_copies(length)
        whole = [token_losses(model, x) for x in (ids, copied)]
        expected = whole
        if "rerope" in asked:  # over the unmodified model's keys: not what one pass gives
            keys = prefix_of(plain, ids[:, :-513])
            expected = [token_losses(model, x, last=512, prefix=keys) for x in (ids, copied)]
            assert (expected[0] - whole[0])[:, -512:].abs().max() > 1e-3
        loss, copy = (store.rows[f"{asked} | {task} | {length} | {document.name}"] for task in ("loss", "copies"))
        assert loss["loss"] == pytest.approx(float(expected[0][:, -512:].mean()), abs=2e-5)
        found = [-a["log_likelihood"] / a["tokens"] for a in copy["answers"]]
        assert found == pytest.approx(copy_losses(expected[1], copies), abs=1e-4)
        assert "bins" not in loss


def test_a_window_that_no_list_of_layer_types_names_keeps_a_cache_from_giving_tokens_back() -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    told = {window: MistralConfig(sliding_window=window, **sizes) for window in (None, 8)}
    assert {window: crops(SimpleNamespace(config=config)) for window, config in told.items()} == {None: True, 8: False}


@pytest.mark.parametrize("name", ["llama4_text", "mllama", "opt", "gpt2"])
def test_losses_of_models_that_call_their_parts_otherwise(name: str) -> None:
    torch.manual_seed(0)
    m, ids = coverage_models.build(name), torch.randint(1, 90, (1, 24))
    with torch.no_grad():
        logits = m(ids, use_cache=False).logits[0, :-1]
    want = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    for how in ({}, {"prefill": 7}, {"prefix": prefix_of(m, ids[:, :9])}):
        begin = 9 if "prefix" in how else 0
        torch.testing.assert_close(token_losses(m, ids, chunk=8, **how)[0, begin + 1 :], want[begin:], atol=1e-4, rtol=0)
    torch.testing.assert_close(CausalLoss(m)(ids, ids)["loss"], want.mean(), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        *(("gpt2", True), ("opt", True), ("gptj", True), ("codegen", True), ("ctrl", True)),
        *(("xglm", False), ("jamba", False), ("zamba", False)),
    ],
)
def test_texts_end_where_a_table_of_positions_does(name: str, ends: bool) -> None:
    """Some hybrids name a length, and none of their layers knows positions; XGLM makes more of its sinusoids.

    A model's own forward pass says whether it ends.
    """
    model = coverage_models.build(name)
    length = model.config.max_position_embeddings
    assert Checkpoint(model).end == (length if ends else None)
    for n, beyond in ((length, False), (length + 1, ends)):
        with contextlib.nullcontext() if not beyond else pytest.raises(IndexError), torch.inference_mode():
            model(torch.ones(1, n, dtype=torch.long))
    with (
        contextlib.nullcontext()
        if not ends
        else pytest.raises(ValueError, match=f"from a table, which ends at {length} tokens")
    ):
        Checkpoint(model).check_lengths([2 * length])


@pytest.mark.parametrize("name", ["rwkv", "openai-gpt", "jamba"])
def test_models_that_do_not_read_on_from_a_cache_are_refused(name: str) -> None:
    torch.manual_seed(0)
    m, ids = coverage_models.build(name), torch.randint(1, 90, (1, 40))
    for measure in (lambda: token_losses(m, ids, prefill=32), lambda: prefix_of(m, ids[:, :9])):
        with pytest.raises(ValueError, match="does not read on in a text from a KV cache"):
            measure()


@pytest.mark.slow
def test_a_prefix_of_layers_that_slide(folder: Path, tmp_path: Path) -> None:
    """Such a layer holds its window alone, at each length another."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=len(tiny.CHARACTERS), hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, sliding_window=32, max_position_embeddings=320, initializer_range=0.3,
    )  # fmt: skip
    plain = Gemma2ForCausalLM(config).eval()
    plain.save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    this = runner(folder, model=str(tmp_path / "model"), lengths=[256, 300], prefix="streaming:window=300",
                settings=[Setting("unmodified")])  # fmt: skip
    store = this.open(tmp_path / "out")
    store.run()
    for document, length in itertools.product(this.corpus.documents, this.options.lengths):
        expected = token_losses(plain, document.ids[None, :length])
        found = store.rows[f"unmodified | loss | {length} | {document.name}"]["loss"]
        assert found == pytest.approx(float(expected[0, -64:].mean()), abs=2e-5)


def test_what_reads_on_from_one_prefix() -> None:
    def readers(*methods: str) -> int:
        configs = [LongAttnConfig() if m == "unmodified" else LongAttnConfig.preset(m) for m in methods]
        return len({repr(reading(c, Setting.parse("streaming:window=64")).to_dict()) for c in configs})

    assert readers("unmodified", "rerope", "rerope+infoscale", "string_remap", "logn", "streaming") == 1
    assert readers("unmodified", "scale_invariant", "adaptive_temperature", "cosscale", "output_standardise") == 5


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["windowed:window=400", "streaming:window=400"])
def test_a_prefix_that_hides_nothing_changes_nothing(folder: Path, prefix: str) -> None:
    """Whatever methods join in it, of which each may be asked to stack, or none."""
    settings = parse_settings(["cosscale", "@yarn:2", "cosscale:stack=true@yarn:2"])
    options: dict[str, Any] = {"settings": settings, "lengths": [400], "texts": ("a.txt",)}
    losses = [
        {r["setting"]: r["loss"] for r in runner(folder, prefix=way, **options).open(None).run()} for way in (None, prefix)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=2e-5)
    assert len(set(losses[0].values())) == 4


@pytest.mark.slow
def test_settings_that_rotate_otherwise_do_not_share_a_prefix(folder: Path) -> None:
    settings = [Setting(f"trained at {n}", rope="yarn:2", train_length=n) for n in (40, 4000)]

    def losses(*chosen: Setting) -> dict[str, float]:
        options = {"lengths": [256], "prefix": "streaming:window=16", "settings": chosen, "texts": ("a.txt",)}
        rows = runner(folder, **options).open(None).run()
        return {r["setting"]: r["loss"] for r in rows}

    assert losses(*settings) == losses(settings[0]) | losses(settings[1])


@pytest.mark.slow
@pytest.mark.parametrize("task", ["needle", "passkey", "ruler", "questions", "probe", "attention"])
def test_rows_of_another_tokenizer_are_refused_and_those_of_an_equal_one_are_not(tmp_path: Path, task: str) -> None:
    tiny.save(tmp_path / "model", trained=2048)
    options: dict[str, Any] = {"tasks": task, "lengths": [2048], "samples": 1, "out": tmp_path / "out", "rows": 16}
    options |= {"distances": [1280], "passages": 1} | ({"kinds": ["niah_single_1"]} if task == "ruler" else {})
    if task == "questions":
        options |= {"questions": [{"context": "a b", "question": "c?", "answer": "d"}], "answer_tokens": 1}
    drawn = tiny.text(tmp_path / "a.txt", 4000).read_text()

    def measured() -> list[Any]:
        found: list[Any] = json.loads(json.dumps(hf_longattn.evaluate(str(tmp_path / "model"), [drawn], **options).rows))
        return found

    def saved(change: Any = lambda found: None) -> None:
        found = AutoTokenizer.from_pretrained(tmp_path / "model")
        change(found)
        found.save_pretrained(tmp_path / "model")

    rows = measured()
    saved(lambda found: found.add_tokens(["<unused>"]))
    assert measured() == rows
    saved(lambda found: setattr(found.backend_tokenizer, "normalizer", normalizers.Replace("a", "b")))
    with pytest.raises(ValueError, match="of other tokens: the tokenizer has changed since"):
        measured()
    for row in rows:  # those that do not say it go on
        row.pop("ids")
    (tmp_path / "out" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert measured() == rows


@pytest.mark.slow
def test_a_prefix_takes_the_place_of_a_checkpoints_own_remap(folder: Path, tmp_path: Path) -> None:
    """As it takes that of a setting's: one that clashes with it is a prefix all the same."""
    own = hf_longattn.apply(AutoModelForCausalLM.from_pretrained(folder / "model"), "rerope", window=100)
    own.save_pretrained(tmp_path / "own")
    tiny.tokenizer().save_pretrained(tmp_path / "own")
    usual = {"lengths": [256], "prefix": "streaming:window=64", "texts": ("a.txt",)}
    named = runner(folder, settings=parse_settings(["rerope:window=100"]), **usual).open(None).run()
    saved = runner(folder, model=str(tmp_path / "own"), settings=[], **usual).open(None).run()
    assert saved[0]["loss"] == named[1]["loss"] != named[0]["loss"]


@pytest.mark.slow
def test_a_prefix_is_part_of_the_protocol_and_checked(folder: Path, tmp_path: Path) -> None:
    usual = {"settings": parse_settings(["infoscale"]), "lengths": [256, 512]}
    runner(folder, **usual).open(tmp_path / "out").run()
    with pytest.raises(ValueError, match=r"another protocol \(prefix: None there, 'streaming:window=64' now\)"):
        runner(folder, prefix="streaming:window=64", **usual).open(tmp_path / "out")
    named = [Setting("fast", "streaming", {"window": window}) for window in (64, 32)]
    runner(folder, prefix=named[0], **usual).open(tmp_path / "named").run()
    with pytest.raises(ValueError, match="of another setting, formula, text or model"):
        runner(folder, prefix=named[1], **usual).open(tmp_path / "named")
    for prefix, message in (
        ("@yarn:2", "under a method of its own"),
        ("streeming", "did you mean"),
        ("unmodified", "of its own"),
    ):
        with pytest.raises(ValueError, match=message):
            runner(folder, prefix=prefix, **usual)
    with pytest.raises(ValueError, match="with a prefix give as many targets, not 64"):
        runner(folder, prefix="streaming", tasks=("copies",), model="longer", lengths=[2560])
    with pytest.raises(ValueError, match="a prefix belongs to the tasks loss and copies"):
        runner(folder, prefix="streaming", tasks=("passkey",))


def test_answers_are_scored_as_generation_would_give_them(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    prompt = torch.randint(2, 90, (1, 20))
    greedy = model.generate(prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    wrong = greedy.clone()
    wrong[0, 22] = (wrong[0, 22] + 1) % 90
    for ids, exact in ((greedy, True), (wrong, False)):
        (score,) = answer_scores(model, ids, [(20, 24)])
        logs = model(ids).logits[0].detach().double().log_softmax(-1)
        assert score.exact is exact
        assert score.tokens == 4
        assert score.log_likelihood == pytest.approx(sum(logs[i - 1, ids[0, i]].item() for i in range(20, 24)), abs=1e-4)
    for span in ((0, 3), (5, 5), (20, 25)):
        with pytest.raises(ValueError, match="does not lie in a text of 24 tokens"):
            answer_scores(model, greedy, [span])


def test_intervals() -> None:
    mean, half = mean_interval([1.0, 2.0, 3.0])
    assert (mean, half) == (2.0, pytest.approx(4.303 / math.sqrt(3), abs=1e-3))  # t with 2 degrees of freedom
    assert math.isnan(mean_interval([1.0])[1])
    spread = [float(i % 2) for i in range(62)]  # standard deviation 0.5041, t with 61 degrees 1.9996
    assert mean_interval(spread)[1] == pytest.approx(1.9996 * 0.50408 / math.sqrt(62), abs=1e-4)
    assert wilson(0, 5) == (0.0, pytest.approx(0.4345, abs=1e-4))
    assert wilson(8, 10) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))


def test_bins_are_weighted_by_their_tokens() -> None:
    assert over([2.0, 4.0, 6.0], 0, 1024) == pytest.approx((2 * 511 + 4 * 512) / 1023)
    assert over([2.0, 4.0, 6.0], 512, 1124) == pytest.approx((4 * 512 + 6 * 100) / 612)


def test_summary_says_what_helps_and_what_it_costs() -> None:
    loss = {"unmodified": (3.0, 5.0), "good": (3.01, 3.5), "bad": (3.5, 5.5)}
    rows = [
        {"task": "loss", "setting": s, "length": n, "which": d, "loss": x + shift, "seconds": 1}
        for s, values in loss.items()
        for n, x in zip((512, 1024), values, strict=True)
        for d, shift in (("a", 0.0), ("b", 1.0))
    ]
    said = summary(Results(rows, list(loss), 512))
    assert "At 1,024 tokens the lowest loss is that of good, −1.500 ± 0.000" in said
    assert "changes by: good +0.010 ± 0.000 at 512; bad +0.500 ± 0.000 at 512 tokens" in said
    short = summary(Results([r for r in rows if r["setting"] != "good"], ["unmodified", "bad"], 512))
    assert "no setting has a lower loss than the unmodified model" in short
    same = [r | {"setting": "clamped"} for r in rows if r["setting"] == "unmodified"]
    told = summary(Results([*rows, *same], [*loss, "clamped"], 512))
    assert "lowest loss is that of good" in told
    assert "Equal to the unmodified model in every loss, to three digits: clamped." in told
    equal = Results([r for r in rows + same if r["setting"] in ("unmodified", "clamped")], ["unmodified", "clamped"], 512)
    assert "nearest" not in summary(equal)
    assert "Equal to the unmodified model in every loss, to three digits: clamped." in summary(equal)
    partial = [r for r in rows if r["setting"] == "unmodified" or r["length"] == 512]
    told = summary(Results(partial, list(loss), 512))
    assert "Only the unmodified model has been measured at 1,024 tokens yet" in told
    assert "bad +0.500" in told


def test_the_verdict_is_sorted_and_says_what_is_better_than_chance() -> None:
    """Cost within the trained length, gain beyond it, gain in retrieval, each paired by document."""
    measured = {  # loss at 512 and 1,024, loss on copies at 1,024; and what the second of three documents adds to the latter
        "unmodified": (3.0, 5.0, 6.0, 0.0),
        "chance": (3.0, 4.9, 5.9, 0.5),
        "costly": (3.5, 3.0, 1.0, 0.0),
        "good": (3.01, 3.5, 2.0, 0.0),
        "worse": (3.0, 5.5, 6.5, 0.0),
    }
    rows: list[dict[str, Any]] = []
    for s, (within, beyond, copies, more) in measured.items():
        for d, shift in (("a", 0.0), ("b", 1.0), ("c", 2.0)):
            about, extra = {"setting": s, "which": d, "seconds": 1}, more * (d == "b")
            losses = {512: within + shift, 1024: beyond + shift + extra}
            rows += [about | {"task": "loss", "length": n, "loss": x} for n, x in losses.items()]
            answers = [{"log_likelihood": -10 * (copies + extra + y), "tokens": 10, "exact": False} for y in (-1, 1)]
            rows.append(about | {"task": "copies", "length": 1024, "answers": answers, "distances": [500, 900]})
    results = Results(rows, list(measured), 512)
    (table,) = results.sections()[0].tables
    assert table.columns == ["setting", "cost at 512", "gain at 1,024", "copies from far back: gain at 1,024"]
    assert [row[0] for row in table.rows] == ["good", "costly", "unmodified", "chance", "worse"]
    assert table.rows[0][1:] == ["+0.010 ± 0.000", "+1.500 ± 0.000", "+4.000 ± 0.000"]
    assert table.rows[3][2] == "−0.067 ± 0.717"
    assert table.tones == [[0, 0, 1, 1], [0, -1, 1, 1], [0] * 4, [0] * 4, [0, 0, -1, -1]]
    assert headline(results).startswith("Take good. In nats per token, against the unmodified model: cost at 512 +0.010")
    copies_table = results.sections()[-1].tables[0]
    assert copies_table.columns == ["setting", "500 back", "900 back", "all"]
    assert copies_table.rows[3] == ["good", pytest.approx(1.0), pytest.approx(3.0), pytest.approx(2.0)]
    without = [r for r in rows if r["setting"] not in ("good", "costly")]
    assert "no setting has a lower loss" in headline(Results(without, ["unmodified", "worse"], 512))
    unfinished = Results([r for r in rows if r["setting"] != "good" or r["which"] != "c"], list(measured), 512)
    table, fewer = unfinished.sections()[0].tables
    assert [row[0] for row in table.rows] == ["costly", "unmodified", "chance", "worse"]
    assert fewer.title == "All settings, on a and b alone"
    assert fewer.rows[0][:3] == ["good", "+0.010 ± 0.000", "+1.500 ± 0.000"]
    assert [row[0] for row in unfinished.sections()[1].tables[0].rows] == ["unmodified", "chance", "costly", "worse"]
    assert headline(unfinished).startswith("Take costly. ")


@pytest.mark.parametrize("documents", ["abc", "ab", "a"])
def test_the_verdict_recommends_nothing_that_may_be_chance(documents: str) -> None:
    """A gain of 0.001 ± 0.006, as a method shows that changes next to nothing; or of one document."""
    rows: list[dict[str, Any]] = []
    for n, d in enumerate(documents):
        for s, gain in (("unmodified", 0.0), ("scale_invariant", 0.001 + 0.002 * (n - (len(documents) - 1) / 2))):
            about = {"task": "loss", "setting": s, "which": d, "seconds": 1}
            rows += [about | {"length": length, "loss": 3.0 + n - gain} for length in (512, 1024)]
    results = Results(rows, ["unmodified", "scale_invariant"], 512)
    said = headline(results)
    least = "0.02 nats" if len(documents) == 1 else "chance"
    assert said.startswith(
        f"Take the model as it is: no setting differs from it by more than {least}. At 1,024 tokens no setting"
    )
    assert "lower loss than the unmodified model, by more than chance; nearest is scale_invariant, −0.001" in said
    (table,) = results.sections()[0].tables
    assert [row[0] for row in table.rows] == ["unmodified", "scale_invariant"]
    clear = [r | {"loss": r["loss"] - 0.5 * (r["length"] == 1024 and r["setting"] != "unmodified")} for r in rows]
    taken = headline(Results(clear, results.settings, 512))
    assert taken.startswith("Take scale_invariant. ")
    few = {1: "One document cannot tell what is chance", 2: "Two documents hardly tell what is chance"}
    for text in (said, taken):
        assert [n for n, words in few.items() if words in text] == [len(documents)] * (len(documents) in few)


# settings ------------------------------------------------------------------------------------------------------------


def test_the_difference_of_two_settings_is_paired() -> None:
    """As of a method and its control."""
    losses = {"unmodified": (3.0, 5.0), "mine": (2.5, 4.6), "control": (2.6, 4.8)}
    rows = [
        {"task": "loss", "setting": s, "length": 512, "which": d, "loss": x, "seconds": 1}
        for s, found in losses.items()
        for d, x in zip("ab", found, strict=True)
    ]
    results = Results(rows, list(losses), 512)
    mean, half = results.difference("mine", 512, base="control")
    assert mean == pytest.approx(-0.15)
    assert half == pytest.approx(12.706 * 0.05, rel=1e-3)  # Student's t of one degree of freedom
    assert results.difference("mine", 512)[0] == pytest.approx(-0.45)
    assert results.difference("mine", 512, base="another") is None


def test_means_are_over_the_documents_that_all_settings_have_read() -> None:
    """As after an interruption: the second setting has read one of two documents."""
    rows = [
        {"task": "loss", "setting": s, "length": 512, "which": d, "loss": x, "seconds": 1, "bins": [x]}
        for s, d, x in (("unmodified", "a", 3.0), ("unmodified", "b", 5.0), ("logn", "a", 3.5))
    ]
    _, by_length, _, by_position = Results(rows, ["unmodified", "logn"], 512).sections()
    assert by_length.tables[0].rows == [["unmodified", 3.0], ["logn", 3.5]]
    assert "over the documents that all of these have read" in by_length.tables[0].note
    assert by_position.tables[0].rows == [["unmodified", 3.0], ["logn", 3.5]]
    whole = Results([*rows, rows[2] | {"which": "b"}], ["unmodified", "logn"], 512).sections()[1]
    assert whole.tables[0].rows[0] == ["unmodified", 4.0]
    assert not whole.tables[0].note


@pytest.mark.slow
def test_a_checkpoints_own_method_stays_beside_what_is_asked_for(folder: Path, tmp_path: Path) -> None:
    own = hf_longattn.apply(AutoModelForCausalLM.from_pretrained(folder / "model"), "rerope", window=100)
    own.save_pretrained(tmp_path / "own")
    tiny.tokenizer().save_pretrained(tmp_path / "own")
    found = hf_longattn.get_config(load_setting(Setting.parse("infoscale"), Checkpoint(str(tmp_path / "own"))))
    assert found.name == "rerope+infoscale"
    assert found.positions.window == 100
    assert (
        hf_longattn.get_config(load_setting(Setting.parse("self_extend"), Checkpoint(str(tmp_path / "own")))).name
        == "self_extend"
    )
    parts = LongAttnConfig.parse([LongAttnConfig.preset("alibi", layers=[0]), "logn"])
    asked = Setting("by layer", parts.to_dict())  # leaves no slot free
    assert hf_longattn.get_config(load_setting(asked, Checkpoint(str(tmp_path / "own")))).name == "alibi|logn"
    arguments = ["eval", str(tmp_path / "own"), "--text", str(folder / "a.txt"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*arguments, "--lengths", "128", "--targets", "64"])
    assert result.exit_code == 0, result.output
    page = json.loads((tmp_path / "out" / "report.json").read_text())
    assert page["summary"].startswith("The checkpoint itself runs rerope: “unmodified” is the model as it was saved")


def test_settings_are_parsed_and_crossed(tmp_path: Path) -> None:
    names = [s.name for s in parse_settings(["unmodified,infoscale", "logn@ntk:2"], ["plain,yarn:2"])]
    assert names == ["unmodified", "infoscale", "logn@ntk:2", "@yarn:2", "infoscale@yarn:2"]
    assert [s.name for s in parse_settings(["rerope:layers=[0, 2],logn"])][1:] == ["rerope:layers=[0, 2]", "logn"]
    setting = Setting.parse("infoscale+scale_invariant:tau=100:clamp=false@prope:0.5")
    assert setting.parameters == {"tau": 100, "clamp": False}
    assert setting.rope == "prope:0.5"
    rotation = edit_rope(LlamaConfig(), "prope:0.25:1e6").rope_parameters
    assert (rotation["partial_rotary_factor"], rotation["rope_theta"]) == (0.25, 1e6)
    assert setting.config == hf_longattn.LongAttnConfig.preset("infoscale+scale_invariant", tau=100, clamp=False)
    (tmp_path / "adapter").mkdir()
    file = tmp_path / "settings.yaml"
    file.write_text("a: logn:clamp=false\nb: {adapter: adapter, method: '@yarn:2'}\n")
    a, b = read_settings(file)
    assert a.config == hf_longattn.LongAttnConfig.preset("logn", clamp=False)
    assert b.adapter == str(tmp_path / "adapter")


def test_a_settings_file_loses_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("a: rerope\nb: '@yarn:2'\na: infoscale\n")
    with pytest.raises(ValueError, match=r"two settings called 'a'"):
        read_settings(file)
    file.write_text("on: rerope\nyes: logn\n1: infoscale\n")
    assert [setting.name for setting in read_settings(file)] == ["on", "yes", "1"]
    file.write_bytes(b"\xef\xbb\xbfother: {model: trained}\nhub: {model: owner/name}\n")
    (tmp_path / "trained").mkdir()
    monkeypatch.chdir(folder)  # relative paths start at the file
    assert [s.model for s in read_settings(file)] == [str(tmp_path / "trained"), "owner/name"]
    assert parse_settings(["infoscale@plain", "rerope"], ["yarn:2"])[1].to_dict() == {"method": "infoscale"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("infscale", "did you mean 'infoscale'"),
        ("scale_invariant:tua=1", "no parameter 'tua'"),
        ("scale_invariant:tau", "not key=value"),
        ("@yarm:2", "did you mean 'yarn'"),
        ("@yarn", "takes one number"),
        ("@nope:2", "takes no number"),
        ("unmodified:tau=1", "names no method"),
        ("", "names no method"),
    ],
)
def test_wrong_settings_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Setting.parse(text)


def test_settings_are_checked_against_the_model_without_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    assert check_setting(Setting.parse("infoscale@ntk:2"), Checkpoint(str(folder / "model"))).train_length == 512
    with pytest.raises(ValueError, match=r"infoscale@yarn:2.*stack=True"):
        check_setting(Setting.parse("infoscale@yarn:2"), Checkpoint(str(folder / "model")))
    with pytest.raises(ValueError, match="no rotary position encoding"):
        check_setting(Setting.parse("rerope"), Checkpoint(str(folder / "gpt2")))


def test_a_checkpoint_is_as_it_was_under_every_setting(folder: Path) -> None:
    """Its config is read once, and neither a rotation, a method nor a model that is made of it is written into it."""
    checkpoint = Checkpoint(str(folder / "model"))
    before = checkpoint.config.to_dict()
    for text in ("infoscale@ntk:2", "rerope"):
        check_setting(Setting.parse(text), checkpoint)
        load_setting(Setting.parse(text), checkpoint)
    assert checkpoint.config.to_dict() == before
    assert checkpoint.method is None
    assert check_setting(Setting("unmodified"), checkpoint).rope_type == "default"


@pytest.mark.parametrize("kind", ["beside", "inside"])
def test_adapter_settings_bring_their_attention(folder: Path, tmp_path: Path, kind: str) -> None:
    """The attention is named by the config.json beside an adapter, and by the adapter itself."""
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="scale_invariant")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    if kind == "beside":
        model.config.save_pretrained(tmp_path / "adapter")
    (setting,) = [s for s in parse_settings([], adapter=[f"mine={tmp_path / 'adapter'}"]) if s.name == "mine"]
    check_setting(setting, Checkpoint(str(folder / "model")))
    loaded = load_setting(setting, Checkpoint(str(folder / "model")))
    assert hf_longattn.get_config(loaded).logit_map is not None
    ids = torch.randint(2, 90, (1, 30))
    torch.testing.assert_close(loaded(ids).logits, adapted.eval()(ids).logits, atol=1e-5, rtol=0.0)
    other = dataclasses.replace(setting, method="infoscale")
    check_setting(other, Checkpoint(str(folder / "model")))
    assert [m.name for m in hf_longattn.get_config(load_setting(other, Checkpoint(str(folder / "model")))).methods] == [
        "infoscale"
    ]


def test_an_adapter_that_says_nothing_of_attention_is_told(folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"setting 'mine': the adapter in .* records no attention.*measured without"):
        check_setting(Setting("mine", adapter=str(tmp_path)), Checkpoint(str(folder / "model")))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        check_setting(Setting("mine", "scale_invariant", adapter=str(tmp_path)), Checkpoint(str(folder / "model")))
        (tmp_path / "recipe.yaml").write_text("method: null\n")  # a control
        check_setting(Setting("mine", adapter=str(tmp_path)), Checkpoint(str(folder / "model")))
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    saved["longattn"] = LongAttnConfig.preset("infoscale", train_length=4).to_dict()
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=r"setting 'mine'.*stack=True"):  # found before weights are read
        check_setting(Setting("mine", rope="yarn:2", adapter=str(tmp_path)), Checkpoint(str(folder / "model")))


# rows ----------------------------------------------------------------------------------------------------------------


def stopped(out: Path, rows: int) -> AbstractContextManager[None]:
    """While open, a Ctrl-C comes as a text is read, once so many rows are written."""
    file = out / "rows.jsonl"
    return at_pass(LlamaModel, lambda: (file.read_text().count("\n") if file.exists() else 0) >= rows)


@pytest.mark.slow
def test_interrupted_runs_keep_their_rows_and_go_on(folder: Path, tmp_path: Path) -> None:
    this, out = runner(folder), tmp_path / "out"
    with stopped(out, 5), pytest.raises(KeyboardInterrupt):
        this.open(out).run()
    first = (out / "rows.jsonl").read_text()
    assert first.count("\n") == 5
    (out / "rows.jsonl").write_text(first + '{"key": "cut o')
    store = this.open(out)
    assert len(store.rows) == 5
    told: list[bool] = []
    store.run(lambda row, new: told.append(new) or "")
    assert told == [False] * 5 + [True] * 13
    text = (out / "rows.jsonl").read_text()
    assert text.startswith(first)
    assert [store.name_of(json.loads(line)) for line in text.splitlines()] == [cell.name for cell in store.cells]


@pytest.mark.slow
def test_a_folder_that_is_used_again_keeps_its_rows_and_is_judged_by_what_is_asked_for_now(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ["eval", str(folder / "model"), "--text", str(folder / "a.txt"), "--out", str(out)]
    words += ["--lengths", "128,1k", "--targets", "32"]
    told = "Rows of scale_invariant:tau=3 are kept in the folder and not judged here: name them too, to compare with them."
    for given, shown, others in (
        (["--method", "scale_invariant:tau=3"], ["scale_invariant:tau=3"], False),
        (["--method", "infoscale"], ["infoscale"], True),
        (["--method", "infoscale", "--page-only"], ["infoscale", "scale_invariant:tau=3"], False),
        (["--method", "infoscale,scale_invariant:tau=3"], ["infoscale", "scale_invariant:tau=3"], False),
    ):
        result = CliRunner().invoke(app, [*words, *given])
        assert result.exit_code == 0, result.output
        page = json.loads((out / "report.json").read_text())
        verdict = page["sections"][0]["tables"][0]["rows"]
        assert sorted(row[0] for row in verdict) == sorted(["unmodified", *shown])
        assert (told in result.output) is (told in page["summary"]) is others
        assert page["facts"]["Rows"].startswith(f"{2 + 2 * len(shown)} measured")
    assert (out / "rows.jsonl").read_text().count("\n") == 6


def test_checkpoints_that_differ_in_one_weight_have_fingerprints_of_their_own(tmp_path: Path) -> None:
    weights = bytearray(1 << 20)
    (tmp_path / "model.safetensors").write_bytes(weights)
    before = fingerprint(str(tmp_path))
    assert fingerprint(str(tmp_path)) == before
    weights[100_000] = 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert fingerprint(str(tmp_path)) != before
    assert fingerprint("user/name") == "user/name"


def test_shortest_first_gives_the_same_rows_in_another_order(folder: Path) -> None:
    usual, short = (runner(folder, shortest_first=x).open(None).cells for x in (False, True))
    assert {(i.name, i.digest) for i in usual} == {(i.name, i.digest) for i in short}
    assert [i.key["length"] for i in short] == sorted(i.key["length"] for i in usual)
    assert [i.setting.name for i in short[:6]] == ["unmodified"] * 2 + ["scale_invariant:tau=3"] * 2 + ["@yarn:2"] * 2


@pytest.mark.slow
def test_rows_of_another_protocol_are_refused_and_not_mixed(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    this = runner(folder, settings=[Setting("unmodified")], lengths=[128, 512])
    this.open(out).run()
    before = (out / "rows.jsonl").read_text()
    for changes, message in (
        ({"targets": 32}, "targets: 64 there, 32 now"),
        ({"lengths": [128, 1024]}, "longest: 512 there, 1024 now"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"model": str(folder / "with_bos")}, "model"),
        ({"bos": "always"}, "bos: False there, True now"),
        ({"seed": 1}, "seed: 0 there, 1 now"),
        ({"contents": "another text " * 300}, "row 'unmodified | loss | 128 | a.txt'"),
    ):
        with pytest.raises(ValueError, match=message.replace("|", r"\|")):
            runner(folder, **{"settings": [Setting("unmodified")], "lengths": [128, 512]} | changes).open(out)
    more = runner(folder, lengths=[128, 256, 512], tasks=["loss", "dictionary_lookup"], samples=1)  # joins
    assert len(more.open(out).rows) == 4
    assert (out / "rows.jsonl").read_text() == before


PARTS = {"parts": [{"positions": {"name": "rerope"}, "layers": [0]}, {"temperature": {"name": "logn"}}]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [128, 4096]}, "a.txt has 3000 tokens; 1 window of 4096 need 4096"),
        ({"windows": 3}, "3 windows of 1024 need 3072"),
        ({"lengths": [1024, 2048]}, "trained at 512 tokens and all lengths lie beyond"),
        ({"tasks": ["loss", "passky"]}, "unknown task 'passky'; did you mean 'passkey'"),
        ({"tasks": ["los"]}, "did you mean 'loss'"),
        ({"tasks": ["multi_key"], "lengths": [64]}, "task multi_key: 64 tokens have no room"),
        ({"targets": 128}, "128 targets do not fit into 128 tokens"),
        ({"model": "gpt2", "lengths": [128, 512], "settings": parse_settings(["logn"])}, "ends at 256 tokens; 512 cannot"),
        ({"bos": "perhaps"}, "bos must be one of"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"dtype": "bfloat8"}, "did you mean 'bfloat16'"),
        ({"prefix": Setting("mine", "streaming", model="other")}, "under a method of its own, .* not under 'mine'"),
        ({"texts": {}}, "losses need a text"),
        ({"prefix": "streaming", "settings": [Setting("a", PARTS)]}, "one method in all layers, not under rerope.logn"),
        ({"prefix": Setting("a", PARTS), "settings": []}, "one method in all layers, not under rerope.logn"),
        ({"prefix": "yarn_beyond", "settings": parse_settings(["cosscale"])}, "would do nothing; give attention_factor"),
        ({"prefix": "yarn_beyond", "settings": parse_settings(["cosscale"])}, "yarn_beyond', before the targets of"),
        ({"lengths": [], "tasks": ["attention"]}, "no lengths to measure at"),
    ],
)
def test_wrong_input_is_refused_before_weights_are_read(
    folder: Path, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises(ValueError, match=message):
        runner(folder, **changes)


# the command ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_command_measures_and_writes_the_page(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["eval", str(folder / "model"), "--text", f"{folder / 'a.txt'},{folder / 'b.txt'}", "--out", str(out)]
    arguments += ["--method", "infoscale", "--method", "scale_invariant:tau=3", "--lengths", "256,1k", "--targets", "64"]
    arguments += ["--tasks", "loss,needle,passkey", "--samples", "1", "--depths", "3", "--shortest-first"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    page = json.loads((out / "report.json").read_text())
    titles = [s["title"] for s in page["sections"]]
    assert titles[:4] == ["Verdict", "Loss by length", "Within the trained length", "Loss by position"]
    assert titles[4:] == ["Needle by length and depth", "Pass key", "Effective length"]
    assert [len(s["tables"]) for s in page["sections"][4:]] == [1, 1, 1]  # random weights: no table of zeros
    regression = {r[0]: r[1:] for r in page["sections"][2]["tables"][0]["rows"]}
    assert regression["infoscale"][0] == 0.0  # clamped: nothing changes within the trained length
    assert regression["scale_invariant:tau=3"][0] != 0.0
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    mean = sum(r["loss"] for r in rows if r["setting"] == "infoscale" and r["task"] == "loss" and r["length"] == 1024) / 2
    table = {r[0]: r[1:] for r in page["sections"][1]["tables"][0]["rows"]}
    assert table["infoscale"][1] == pytest.approx(mean)
    assert len([r for r in rows if r["task"] == "needle"]) == 3 * 2 * 3
    assert (out / "figures" / "needle-00-log-likelihood.png").stat().st_size > 5000
    assert not (out / "figures" / "needle-00-accuracy.png").exists()  # random weights: a map of zeros
    texts = page["facts"]["Texts"]
    assert re.fullmatch(r"a\.txt \(SHA-256 \w{16}\), b\.txt \(SHA-256 \w{16}\)", texts), texts
    command = page["facts"]["Commands"]
    assert page["sections"][1]["command"] == command
    assert "--method infoscale --method scale_invariant:tau=3 --lengths 256,1k" in command
    assert command.endswith("--depths 3 --shortest-first")
    assert str(folder) not in (out / "index.html").read_text()
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 0, again.output
    assert f"{len(rows)} of {len(rows)} rows" in " ".join(again.output.split())
    assert [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()] == rows


@pytest.mark.slow
@pytest.mark.parametrize(("fast", "read"), [(False, "float32"), (True, "bfloat16")])
def test_auto_is_a_precision_that_the_cpu_multiplies_fast(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool, read: str, cpu_bfloat16: Callable[[bool], None]
) -> None:
    """A checkpoint in bfloat16 is read in float32 where the CPU has no units for it; what is asked for by name is taken."""
    cpu_bfloat16(fast)
    half, out = tmp_path / "half", tmp_path / "out"
    AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16).save_pretrained(half)
    tiny.tokenizer().save_pretrained(half)
    assert load_setting(Setting("unmodified"), Checkpoint(str(half))).dtype == getattr(torch, read)
    for name in ("bfloat16", "float32"):
        assert load_setting(Setting("unmodified"), Checkpoint(str(half)), name).dtype == getattr(torch, name)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not fast)
    assert Checkpoint(str(half)).precision(device="cuda") == ("float32" if fast else "auto")
    assert Checkpoint(str(folder / "model")).precision() == "auto"  # float32
    arguments = [str(half), "--text", str(folder / "a.txt"), "--out"]
    result = CliRunner().invoke(app, ["eval", *arguments, str(out), "--lengths", "128", "--targets", "64"])
    assert result.exit_code == 0, result.output
    assert ("Read in float32: this device is slow" in result.output) is not fast
    (row,) = (json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines())
    assert row["dtype"] == json.loads((out / "report.json").read_text())["facts"]["Precision"] == read
    cpu_bfloat16(not fast)
    again = CliRunner().invoke(app, ["eval", *arguments, str(out), "--lengths", "128", "--targets", "64"])
    assert again.exit_code == 2  # a folder holds rows of one precision
    assert "dtype" in again.output
    result = CliRunner().invoke(app, ["inspect", *arguments, str(tmp_path / "in"), "--length", "128", "--what", "entropy"])
    assert result.exit_code == 0, result.output
    assert f"a.txt in {'float32' if fast else 'bfloat16'}, one" in (tmp_path / "in" / "index.html").read_text()


def test_command_writes_the_page_of_an_interrupted_run(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["eval", str(folder / "model"), "--text", str(folder / "a.txt"), "--out", str(out)]
    arguments += ["--lengths", "256,1k", "--targets", "64"]
    result = CliRunner().invoke(app, [*arguments, "--dry-run"])
    assert (result.exit_code, out.exists()) == (0, False), result.output
    assert "2 of 2 rows would be measured" in result.output
    for extra, code in (([], 130), (["--page-only"], 0)):
        with stopped(out, 1):
            result = CliRunner().invoke(app, [*arguments, *extra])
        assert result.exit_code == code, result.output
        assert ("1 rows are kept, and the same command continues" in " ".join(result.output.split())) is (code == 130)
        facts = json.loads((out / "report.json").read_text())["facts"]
        assert facts["Rows"] == "1 measured; of this command's 2, 1 are open"
    assert "unmodified" in result.output
    kept = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    result = CliRunner().invoke(app, [*arguments, "--method", "infoscale", "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "3 of 4 rows would be measured" in result.output
    assert kept == {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}


@pytest.mark.slow
def test_an_interruption_before_the_first_row_writes_no_page(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["eval", str(folder / "model"), "--text", str(folder / "a.txt"), "--out", str(out), "--lengths", "128"]
    words += ["--targets", "32"]
    with stopped(out, 0):
        result = CliRunner().invoke(app, words)
    assert result.exit_code == 130, result.output
    assert "Interrupted; nothing was measured yet." in result.output
    assert "The report" not in result.output
    assert not (out / "index.html").exists()
    result = CliRunner().invoke(app, [*words, "--page-only"])
    assert result.exit_code == 2
    assert f"no rows are in {out} yet" in result.output
    assert CliRunner().invoke(app, words).exit_code == 0
    page = (out / "index.html").read_text()
    with stopped(out, 0):
        result = CliRunner().invoke(app, [*words[:-4], "--lengths", "64,128", "--targets", "32", "--method", "infoscale"])
    assert result.exit_code == 130, result.output
    assert "Interrupted; 1 rows are kept, and the same command continues." in result.output
    assert page != (out / "index.html").read_text()


# Python --------------------------------------------------------------------------------------------------------------


def test_tables_that_are_called_alike_say_of_which_task_they_are(folder: Path) -> None:
    texts = {"a.txt": (folder / "a.txt").read_text()}
    tasks = ["needle", "passkey", "multi_key"]
    found = hf_longattn.evaluate(folder / "model", texts, ["logn"], lengths=[512], targets=64, samples=1, tasks=tasks)
    titles = [t.title for t in found.tables()]
    assert len(set(titles)) == len(titles)
    assert "Pass key: Log-likelihood of the answer, nats per token (0 is certain)\n\n| setting |" in str(found)


@pytest.mark.slow
def test_a_loaded_model_is_measured_like_its_checkpoint_and_is_afterwards_as_it_was(folder: Path, tmp_path: Path) -> None:
    texts = {name: (folder / name).read_text() for name in ("a.txt", "b.txt")}
    how: dict[str, Any] = {"lengths": [128, 512], "targets": 64}
    model = hf_longattn.apply(AutoModelForCausalLM.from_pretrained(folder / "model").eval(), "infoscale")
    before = model(ids := torch.randint(2, 90, (1, 900))).logits
    found = hf_longattn.evaluate(model, texts, ["rerope:window=100"], tokenizer=tiny.tokenizer(), **how)
    torch.testing.assert_close(model(ids).logits, before, atol=0, rtol=0)
    assert hf_longattn.get_config(model).name == "infoscale"
    model.save_pretrained(tmp_path / "own")
    tiny.tokenizer().save_pretrained(tmp_path / "own")
    named = hf_longattn.evaluate(str(tmp_path / "own"), texts, ["rerope:window=100"], tmp_path / "out", **how)
    assert [r["loss"] for r in found.rows] == [r["loss"] for r in named.rows]
    how |= {"prefix": "streaming:window=64"}
    behind = hf_longattn.evaluate(model, texts, ["rerope:window=100"], tokenizer=tiny.tokenizer(), **how)
    again = hf_longattn.evaluate(str(tmp_path / "own"), texts, ["rerope:window=100"], **how)
    assert [r["loss"] for r in behind.rows] == [r["loss"] for r in again.rows] != [r["loss"] for r in found.rows]
    assert found.settings == ["unmodified", "rerope:window=100"]
    assert "The checkpoint itself runs infoscale" in (tmp_path / "out" / "index.html").read_text()
    assert "Mean loss of the same tokens" in found._repr_html_()
    assert "| unmodified | " in str(found)
    drawn = found.plot()
    assert isinstance(drawn, Figure)
    drawn.savefig(tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert drawn._repr_png_().startswith(b"\x89PNG")  # a notebook shows it
    pandas = pytest.importorskip("pandas")
    assert isinstance(found.to_pandas(), pandas.DataFrame)
    assert len(found.to_pandas()) == 8
    with pytest.raises(ValueError, match="a loaded model is measured under methods alone"):
        hf_longattn.evaluate(model, texts, ["@yarn:2"], tokenizer=tiny.tokenizer(), **how)
    with pytest.raises(ValueError, match="give tokenizer="):
        hf_longattn.evaluate(model, texts, **how)
    with pytest.raises(TypeError, match=r"tokenizer= takes a loaded one, .*, got 'gpt2'"):
        hf_longattn.evaluate(model, texts, tokenizer="gpt2", **how)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    model.resize_token_embeddings(20)
    with pytest.raises(ValueError, match=r"gives token \d+, and the model's vocabulary has 20: it is another model's"):
        hf_longattn.evaluate(model, [(folder / "a.txt").read_text()], lengths=[128], targets=64, tokenizer=tiny.tokenizer())


def test_other_weights_beside_a_loaded_model_are_read_as_asked(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    how: dict[str, Any] = {"lengths": [64], "targets": 32, "tokenizer": tiny.tokenizer(), "device": "cpu"}
    other = Setting("other", model=str(folder / "model"))
    found = hf_longattn.evaluate(model, (folder / "a.txt").read_text(), [other], dtype="bfloat16", **how)
    assert {r["setting"]: r["dtype"] for r in found.rows} == {"unmodified": "float32", "other": "bfloat16"}
    assert EvalOptions("model", "a text", lengths=[8], dtype=torch.bfloat16).dtype == "bfloat16"
    with pytest.raises(ValueError, match="is not a torch dtype"):
        hf_longattn.evaluate(model, "a text", dtype="half", **how)


def test_rows_of_a_loaded_model_that_has_changed_since_are_refused(folder: Path, tmp_path: Path) -> None:
    """It has the name that it had: after training, those of before were given as its own."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    how: dict[str, Any] = {"lengths": [128], "targets": 64, "tokenizer": tiny.tokenizer(), "out": tmp_path / "out"}
    texts = [(folder / "a.txt").read_text()]
    rows = hf_longattn.evaluate(model, texts, **how).rows
    assert hf_longattn.evaluate(AutoModelForCausalLM.from_pretrained(folder / "model"), texts, **how).rows == rows
    with hf_longattn.using(model, "rerope", window=16), pytest.raises(ValueError, match=r"another protocol \(model: "):
        hf_longattn.evaluate(model, texts, **how)
    assert hf_longattn.evaluate(model, texts, **how).rows == rows
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1
    with pytest.raises(ValueError, match=r"another protocol \(model: .*, loaded .* there, .*, loaded .* now\)"):
        hf_longattn.evaluate(model, texts, **how)


def test_a_loaded_model_with_an_adapter_is_measured_as_what_it_computes(folder: Path) -> None:
    peft = pytest.importorskip("peft")
    how: dict[str, Any] = {"lengths": [128], "targets": 64, "tokenizer": tiny.tokenizer()}
    texts, base = [(folder / "a.txt").read_text()], AutoModelForCausalLM.from_pretrained(folder / "model")
    lora = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(base, lora)
    rows = hf_longattn.evaluate(adapted, texts, ["rerope:window=16"], **how).rows
    merged = hf_longattn.evaluate(adapted.merge_and_unload(), texts, ["rerope:window=16"], **how).rows
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in merged], abs=1e-4)
    prompts = peft.get_peft_model(base, peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="behind the prompts of PROMPT_TUNING, which are not read here"):
        hf_longattn.evaluate(prompts, texts, **how)
    with pytest.raises(TypeError, match="takes a loaded model first, got an object of type int"):
        hf_longattn.evaluate(3, texts, **how)


OWN = """
from dataclasses import dataclass
from typing import ClassVar
import hf_longattn
from hf_longattn.slots.base import LengthTemperature

@hf_longattn.register
@dataclass(frozen=True, kw_only=True)
class Edited(LengthTemperature):
    name: ClassVar[str] = "edited"
    by: float = 1.5
    def formula(self, n, head_dim, train_length):
        return self.by * n.double() ** 0.1
"""


@pytest.mark.usefixtures("own_registry")
def test_rows_of_an_own_method_that_was_edited_since_are_refused(folder: Path, tmp_path: Path) -> None:
    """Its name, and the parameters that were written, are those of before."""
    file = tmp_path / "edited.py"
    how: dict[str, Any] = {"lengths": [128], "targets": 64, "tokenizer": tiny.tokenizer(), "out": tmp_path / "out"}

    def measured(source: str) -> Any:
        file.write_text(source)
        linecache.clearcache()
        exec(compile(source, str(file), "exec", dont_inherit=True), {"__name__": "edited"})
        return hf_longattn.evaluate(
            str(folder / "model"), [(folder / "a.txt").read_text()], ["edited:clamp=false"], **how
        ).rows

    rows = measured(OWN)
    assert measured("# moved\n" + OWN) == rows
    for old, new in (("0.1", "0.2"), ("1.5", "1.6")):
        with pytest.raises(ValueError, match=r"'edited:clamp=false.*of another setting, formula, text or model"):
            measured(OWN.replace(old, new))
    assert measured(OWN) == rows


FIRST_LOSS = """
from hf_longattn.evaluation import Task


class FirstLoss(Task):
    documents = True

    def cells(self, setting):
        for document in self.corpus.documents:
            ids = self.corpus.context(document, self.corpus.longest)
            yield self.cell(setting, self.corpus.longest, document.name, lambda m, ids=ids: {"first_loss": 2.0 + len(ids)})
"""


@pytest.mark.slow
def test_a_task_of_another_package_is_one_of_every_command(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "brings_a_task.py").write_text(FIRST_LOSS)
    (about := tmp_path / "brings_a_task-1.0.dist-info").mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: brings_a_task\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[hf_longattn.tasks]\nfirst = brings_a_task:FirstLoss\n")
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ["eval", str(folder / "model"), "--text", str(folder / "a.txt"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*arguments, "--lengths", "128", "--targets", "64", "--tasks", "loss,first"])
    assert result.exit_code == 0, (result.output, result.exception)
    page = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [s["title"] for s in page["sections"]] == [
        "Loss by length",
        "Within the trained length",
        "Loss by position",
        "First",
    ]
    assert page["sections"][-1]["tables"][0]["rows"] == [["unmodified", 3.0]]
    result = CliRunner().invoke(app, [*arguments, "--tasks", "frist"])
    assert "did you mean 'first'" in " ".join(result.output.replace("│", " ").split())


def test_a_number_that_some_rows_lack_is_averaged_over_the_others() -> None:
    rows = [{"setting": "unmodified", "task": "own", "length": 8, "which": f"{n}"} for n in range(4)]
    for row, own in zip(rows, ({"x": 1.0}, {"x": 2.0}, {"x": None}, {}), strict=True):
        row |= own
    assert Task.sections(Results(rows, ["unmodified"]), "own")[0].tables[0].rows == [["unmodified", 1.5]]


# LongPPL and effective lengths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "bos", "start"), [("with_bos", "never", []), ("model", "always", [0])])
def test_every_task_begins_its_texts_as_it_is_asked_to(folder: Path, model: str, bos: str, start: list[int]) -> None:
    for task in runner(folder, model, lengths=[512, 1024], tasks=["multi_key", "needle", "needles"], bos=bos).tasks:
        assert ([0] if task.texts.sample(0, 1024).input_ids[0] == 0 else []) == start


@pytest.mark.slow
@pytest.mark.parametrize("model", ["model", "with_bos"])
def test_long_ppl_is_the_loss_on_the_evaluators_key_tokens(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    # a random model is never sure, and never helped by more than a little
    monkeypatch.setattr(long_ppl, "GAP", 0.02)
    monkeypatch.setattr(long_ppl, "CERTAIN", 4.0)
    this = runner(folder, model, lengths=[128, 512], tasks=["long_ppl"], near=128, evaluator="@yarn:2")
    store = this.open(tmp_path / "out")
    order = []
    store.run(lambda row, new: order.append((row["setting"], row["length"])) or "")
    assert order[:2] == [("@yarn:2", 512)] * 2
    assert len(order) == 6  # three settings, two documents, the one length beyond `near`
    network = load_setting(this.options.settings[-1], Checkpoint(this.options.model))
    plain = AutoModelForCausalLM.from_pretrained(folder / model).eval()
    for document in this.corpus.documents:
        ids = this.corpus.context(document, 512)
        long, short = token_losses(network, ids), long_ppl.short_losses(network, ids, 160, 32, int(model == "with_bos"))
        keys = (short - long > 0.02) & (long < 4.0)
        rows = {r["setting"]: r for r in store.rows.values() if r["which"] == document.name}
        assert rows["@yarn:2"]["keys"] == keys[0].nonzero()[:, 0].tolist()
        assert len(rows["@yarn:2"]["keys"]) > 3
        assert all(k >= 160 for k in rows["@yarn:2"]["keys"])  # the others have nothing far
        for name, run in (("@yarn:2", network), ("unmodified", plain)):
            assert rows[name]["key_loss"] == pytest.approx(float(token_losses(run, ids)[keys].mean()), abs=2e-5)
            assert rows[name]["key_tokens"] == int(keys.sum())
    found = this.results(store)
    (section,) = found.sections()
    pooled = [r for r in store.rows.values() if r["setting"] == "unmodified"]
    mean = sum(r["key_loss"] * r["key_tokens"] for r in pooled) / sum(r["key_tokens"] for r in pooled)
    assert section.tables[0].rows[0] == ["unmodified", pytest.approx(math.exp(mean))]
    assert section.tables[1].rows[0] == ["unmodified", pytest.approx(mean)]
    assert section.tables[3].rows == [["all documents", sum(r["key_tokens"] for r in pooled)]]
    assert "found by “@yarn:2”" in section.protocol


@pytest.mark.slow
def test_long_ppl_without_key_tokens_is_a_dash_and_what_cannot_be_is_refused(folder: Path, tmp_path: Path) -> None:
    this = runner(folder, lengths=[128, 512], tasks=["long_ppl"], near=128, settings=parse_settings([]))
    store = this.open(tmp_path / "out")
    store.run()
    assert {r["key_loss"] for r in store.rows.values()} == {None}
    (section,) = this.results(store).sections()
    assert section.tables[0].rows == [["unmodified", None]]
    with pytest.raises(ValueError, match="no length exceeds 1280"):
        runner(folder, tasks=["long_ppl"], near=1024)
    with pytest.raises(ValueError, match="'bigger' is none of the settings: unmodified"):
        runner(folder, tasks=["long_ppl"], near=128, evaluator="bigger")
    with pytest.raises(ValueError, match="long_ppl reads whole documents: measure it without a prefix"):
        runner(folder, tasks=["loss", "long_ppl"], near=128, prefix="streaming:window=64")
    with pytest.raises(ValueError, match="near: 128 there, 256 now"):
        runner(folder, lengths=[128, 512], tasks=["long_ppl"], near=256).open(tmp_path / "out")


def test_long_ppl_is_reported_without_an_evaluator_that_was_interrupted() -> None:
    def row(setting: str, task: str, which: str = "a", **values: Any) -> dict[str, Any]:
        return {"setting": setting, "task": task, "length": 512, "which": which, **values}

    rows = [row(s, "loss", loss=3.0) for s in ("unmodified", "mine")]
    for s, first, second in (("finder", 0.5, 0.8), ("unmodified", 2.0, 3.0), ("mine", 1.0, 1.4)):
        rows += [row(s, "long_ppl", key_loss=first, key_tokens=3), row(s, "long_ppl", "b", key_loss=second, key_tokens=1)]
        rows += [row(s, "long_ppl", "c", key_loss=None, key_tokens=0)]
    found = Results(rows, ["unmodified", "finder", "mine"], 512, {"near": 128, "evaluator": "finder"})
    (section,) = [section for section in found.sections() if section.title == "LongPPL"]
    assert section.tables[1].rows == [["unmodified", 2.25], ["mine", 1.1]]
    assert section.tables[2].rows == [["mine", "−1.300 ± 3.812"]]
    assert section.tables[3].rows == [["all documents", 4]]


def test_an_evaluator_of_another_tokenizer_is_refused(folder: Path) -> None:
    settings = [*parse_settings([]), Setting("other", model=str(folder / "with_bos"))]
    with pytest.raises(ValueError, match="'other' has another tokenizer"):
        runner(folder, tasks=["long_ppl"], near=128, settings=settings, evaluator="other")
    assert runner(folder, tasks=["long_ppl"], near=128, settings=settings)


def test_effective_length_is_the_longest_up_to_which_a_share_is_kept() -> None:
    likelihood = {
        "unmodified": {512: -0.1, 1024: -0.2, 2048: -2.0, 4096: -0.15},  # good again, but not up to there
        "holds": {512: -0.12, 1024: -0.2, 2048: -0.2, 4096: -0.25},
        "never": {512: -0.9, 1024: -0.1, 2048: -0.1, 4096: -0.1},
    }
    rows = [
        {"task": "passkey", "setting": s, "length": n, "which": "0", "seconds": 1, "command": "c"}
        | {"answers": [{"depth": 0.0, "log_likelihood": 8 * x, "tokens": 8, "exact": False}]}
        for s, values in likelihood.items()
        for n, x in values.items()
    ]
    found = Results(rows, list(likelihood), 1024)
    assert [found.effective_length(s, "passkey") for s in likelihood] == [1024, 4096, 0]
    assert found.score("holds", "passkey", 512) == pytest.approx(math.exp(-0.12))
    strict = Results(rows, list(likelihood), 1024, keep=0.95)
    assert [strict.effective_length(s, "passkey") for s in likelihood] == [512, 512, 0]
    section = found.sections()[-1]
    assert section.title == "Effective length"
    assert section.tables[0].rows == [["unmodified", 1024], ["holds", 4096], ["never", 0]]
    assert "keeps 85%" in section.text
    assert "0.905 at 512" in section.text
    assert Results(rows[4:], list(likelihood), 1024).effective_length("holds", "passkey") is None


@pytest.mark.slow
def test_the_command_measures_long_ppl_and_effective_lengths(folder: Path, tmp_path: Path) -> None:
    line = (
        f"eval {folder / 'model'} --text {folder / 'a.txt'} --lengths 300,512 --targets 64 --tasks long_ppl,passkey --near 128"
    )
    result = CliRunner().invoke(app, [*line.split(), "--method", "rerope", "--samples", "2", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, (result.output, result.exception)
    page = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [s["title"] for s in page["sections"]] == ["Verdict", "LongPPL", "Pass key", "Effective length"]


def test_a_report_names_no_folders_of_this_machine() -> None:
    paths = {
        "/data/run=3/a.txt": "a.txt",
        "mine=/data/adapter": "mine=adapter",
        "near/a.txt": "near/a.txt",
        "x:window=4": "x:window=4",
    }
    assert {path: portable(path) for path in paths} == paths


def test_an_adapter_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gives the adapter no name"):
        parse_settings([], [], None, [f"={tmp_path}"])
