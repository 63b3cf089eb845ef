"""The front of the papers' experiments, each of them end to end in seconds, and the tables from the rows."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.markdown import filled
from lab.papers import algorithms, conversion, encodings, masked, needles, paper, sets, tables
from lab.papers import run as front

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder, rng = tmp_path_factory.mktemp("texts"), random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(50)]
    for name in ("train.txt", "test.txt"):
        (folder / name).write_text(" ".join(rng.choices(words, k=1500)))
    return ["--text", str(folder / "train.txt"), "--heldout", str(folder / "test.txt")]


def quick(folder: Path, *words: str) -> int:
    return front.main([*words, "--quick", "--results", str(folder), "--models", str(folder / "models")])


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@torch.no_grad()
def computed(model: Any) -> torch.Tensor:
    """The last hidden states of a copy with weights that are set, (1, 320, width): of a model, how it attends is left.

    Trained weights tell methods apart too, but in seconds of training by no more than what a CPU rounds away.
    """
    model, generator = copy.deepcopy(model).eval(), torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.zero_()
        elif p.ndim == 2:
            p.normal_(std=2 * p.shape[1] ** -0.5 if "proj" in name else 1.0, generator=generator)
        else:
            p.fill_(1.0)
    ids = torch.randint(min(model.config.vocab_size, 250), (1, 320), generator=generator)
    everything = torch.ones(1, 1, 320, 320, dtype=torch.bool)
    body = model.get_base_model().model if hasattr(model, "get_base_model") else model.model
    return body(ids, attention_mask=everything, use_cache=False).last_hidden_state


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def least_apart(found: list[torch.Tensor]) -> float:
    """How far the two are apart that are nearest to each other."""
    return min(apart(a, b) for a, b in itertools.combinations(found, 2))


Noted = Callable[..., list[torch.Tensor]]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """A list of what there is to say about each model that a function of a module is called with."""

    def noting(module: Any, name: str, what: Callable[[Any], torch.Tensor] = computed) -> list[torch.Tensor]:
        function, seen = getattr(module, name), []

        def wrapped(model: Any, *rest: Any, **more: Any) -> Any:
            seen.append(what(model))
            return function(model, *rest, **more)

        monkeypatch.setattr(module, name, wrapped)
        return seen

    return noting


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


# every experiment, end to end -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_max_retrieval_learns(tmp_path: Path) -> None:
    assert quick(tmp_path, "max-retrieval", "argmax-retrieval", "--only", "baseline|standardise", "--seeds", "0") == 0
    (row,) = rows(tmp_path, "max-retrieval")
    measured = row["measured"]
    assert measured["sizes"] == [16, 64]
    assert measured["plain"]["accuracy"][0] > 0.6  # chance is 0.1
    assert measured["plain"]["accuracy"][1] < measured["plain"]["accuracy"][0]
    assert measured["adaptive"]["accuracy"][1] > measured["plain"]["accuracy"][1]  # sharper, on sets that disperse
    assert measured["attention"]["entropy"][0] < math.log(16)
    assert len(measured["coefficients"]) == 5
    assert row["settings"] == vars(sets.MAX_RETRIEVAL.quick)
    assert (row["seed"], row["threads"]) == (0, torch.get_num_threads())
    assert row["cpu_seconds"] > 0
    assert row["versions"]["torch"] == torch.__version__
    assert row["command"] == "python lab/papers/run.py max-retrieval --only '^baseline$' --seeds 0 --quick"
    (row,) = rows(tmp_path, "argmax-retrieval")
    assert row["measured"]["plain"]["spread"] == pytest.approx([1, 1], abs=1e-2)  # what the norm is for
    assert row["measured"]["plain"]["accuracy"][0] > 0.6


@pytest.mark.slow
def test_max_retrieval_with_the_l2_term(tmp_path: Path) -> None:
    """The term shrinks what it reaches, from torch's small start everything; the spread of logits stays below its bound."""
    assert quick(tmp_path, "argmax-retrieval-l2", "--only", "^baseline(-torch_start)?$", "--seeds", "0") == 0
    found = {r["variant"]: r["measured"] for r in rows(tmp_path, "argmax-retrieval-l2")}
    with_term, small = found["baseline"], found["baseline-torch_start"]
    assert with_term["plain"]["accuracy"][0] > 0.6
    assert small["plain"]["accuracy"][0] < 0.2  # chance is 0.1
    assert small["weight_norm"] < with_term["weight_norm"]
    for measured in found.values():
        assert [step for step, _, _ in measured["spread"]] == [0, 100]
        assert all(0 <= spread <= bound for _, spread, bound in measured["spread"])
    assert with_term["spread"][-1][1] > 10 * with_term["spread"][0][1]
    data = tables.load(tmp_path)
    lines = {x[0]: x[1:] for x in cells(tables.sharpening(data).text)}
    assert lines["baseline, δ"] == [*(f"{s:.1f}" for _, s, _ in with_term["spread"]), f"{with_term['weight_norm']:.0f}"]


def test_sets_grow_to_the_last_step() -> None:
    growing, fixed = sets.LARGER.settings, sets.ARGMAX.settings
    assert [sets.largest_at(growing, step) for step in (0, 2500, 4999)] == [16, 136, 256]
    assert {sets.largest_at(fixed, step) for step in range(fixed.steps)} == {16}
    drawn: list[int] = []
    settings = growing.but(steps=40, batch=2, smallest=3, first=4, largest=64)
    model, draw = sets.argmax_model("layer_norm", settings)

    def watched(items: int, *rest: Any) -> Any:
        drawn.append(items)
        return draw(items, *rest)

    sets.train(model, watched, settings, seed=0)
    assert all(3 <= n <= sets.largest_at(settings, step) for step, n in enumerate(drawn))
    assert max(drawn[:10]) < 20
    assert max(drawn) > 40


def test_the_spread_and_its_bound_are_those_of_the_proposition() -> None:
    torch.manual_seed(0)
    model, draw = sets.argmax_model("baseline", sets.ARGMAX.settings)
    sets.start_as_flax(model)
    deviation = torch.stack([m.weight.std() * m.in_features**0.5 for m in model.modules() if hasattr(m, "in_features")])
    assert float(deviation.detach().mean()) == pytest.approx(1, abs=0.05)
    with torch.no_grad():
        model.query.bias.normal_(generator=torch.Generator().manual_seed(1))
        features, query, _ = draw(16, 32, torch.Generator().manual_seed(0))
        spread, bound = sets.spread_and_bound(model, features, query)
        x, y = model.item(features), model.ask(query)
        logits = torch.einsum("bd,bnd->bn", model.query(y), model.key(x)) / math.sqrt(128)
        assert spread == pytest.approx(float((logits.amax(1) - logits.amin(1)).max()), rel=1e-5)
        q = torch.linalg.svdvals(torch.cat([model.query.weight, model.query.bias[:, None]], 1))[0]
        y = torch.cat([y, torch.ones(32, 1)], 1)
        by_row = 2 * q * torch.linalg.svdvals(model.key.weight)[0] * y.norm(dim=1) * x.norm(dim=2).amax(1) / math.sqrt(128)
    assert bound == pytest.approx(float(by_row.max()), rel=1e-5)


def test_dictionary_lookup(tmp_path: Path) -> None:
    assert quick(tmp_path, "dictionary-lookup", "--only", "layer_norm", "--seeds", "0") == 0
    (row,) = rows(tmp_path, "dictionary-lookup")
    assert set(row["measured"]["attention"]) == {"entropy"}
    assert row["measured"]["loss"] < math.log(64) + 0.1


@pytest.mark.slow
def test_from_scratch_and_needles(tmp_path: Path, texts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("omegaconf")
    pytest.importorskip("accelerate")
    only = ["--only", "^logn_prope$", "--seeds", "0", *texts]
    assert quick(tmp_path, "needles", *only) == 2
    assert "length-generalisation --only '^logn_prope$' --seeds 0" in capsys.readouterr().err
    variants = ["logn_prope", "scale_invariant_prope", "scale_invariant_prope_endpoint", "scale_invariant_prope_tau0.1"]
    assert quick(tmp_path, "length-generalisation", "--only", f"^({'|'.join(variants)})$", *only[2:]) == 0
    found = rows(tmp_path, "length-generalisation")
    assert [r["variant"] for r in found] == variants
    assert all(len(r["measured"]["loss"]) == 2 for r in found)
    assert set(found[0]["texts"]) == {"train.txt", "test.txt"}
    config = json.loads((tmp_path / "models/length-generalisation/scale_invariant_prope_tau0.1-seed0/config.json").read_text())
    assert config["longattn"]["logit_map"]["tau"] == 0.1
    thetas = [
        json.loads((tmp_path / f"models/length-generalisation/{v}-seed0/config.json").read_text())["rope_parameters"][
            "rope_theta"
        ]
        for v in variants
    ]
    lowest = [theta ** (-2 * 3 / 16) for theta in thetas]  # of 4 rotated pairs of 8
    assert lowest == pytest.approx([4096 ** (-6 / 16)] * 2 + [1 / 64] + [4096 ** (-6 / 16)])
    assert quick(tmp_path, "needles", *only) == 0
    (row,) = rows(tmp_path, "needles")
    assert row["measured"]["lengths"] == [160, 320]
    assert all(0 <= a <= 1 for a in row["measured"]["accuracy"])
    kept = json.loads((tmp_path / "models/needles/logn_prope-seed0/config.json").read_text())
    assert kept["longattn"]["temperature"]["learned"] is True  # the method came along with the model
    data = tables.load(tmp_path)
    line = next(x for x in cells(tables.length(data).text) if x[0] == "`logn_prope`, end point left out")
    assert line[1:] == ["3.256", "3.262", "3.317", *(f"{x:.3f}" for x in found[0]["measured"]["loss"])]
    line = next(x for x in cells(tables.needles(data).text) if x[0].startswith("`logn_prope`"))
    assert line[4:] == [f"{x:.2f}" for x in row["measured"]["accuracy"]]
    assert [x[0] for x in cells(tables.taus(data).text)[2:]] == ["0.1", "10"]
    assert any(x[:2] == ["`scale_invariant_prope`", "3.244"] for x in cells(tables.length(data).text))


@pytest.mark.slow
def test_attention_by_length(tmp_path: Path, texts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("omegaconf")
    pytest.importorskip("accelerate")
    only = ["--only", r"^(prope_endpoint|qk\+base)$", "--seeds", "1", *texts]
    assert quick(tmp_path, "attention-by-length", *only) == 2
    assert r"conversion --only '^qk\+base$' --seeds 1" in capsys.readouterr().err
    assert quick(tmp_path, "conversion", "length-generalisation", *only) == 0
    assert quick(tmp_path, "attention-by-length", *only) == 0
    copying, row = rows(tmp_path, "attention-by-length")
    assert copying["measured"]["lengths"] == row["measured"]["lengths"]
    assert copying["measured"]["entropy"] != row["measured"]["entropy"]
    found = row["measured"]
    assert found["lengths"] == [1, 2, 4, 8, 16, 32, 64]
    assert found["ranges"] == [[0, 1], [1, 10], [10, 100], [100, 1000]]
    assert found["entropy"][0] == 0  # one byte
    assert 0 < found["entropy"][-1] < math.log(128)
    assert sum(found["range_mass"]) + found["sink_mass"][-1] == pytest.approx(1, abs=1e-3)
    assert found["local_mass"][:3] == pytest.approx([1, 1, 1])  # all of it while there are no more than 10
    assert found["local_mass"][-1] == pytest.approx(found["range_mass"][0] + found["range_mass"][1], abs=1e-3)
    lines = {x[0]: x[1:] for x in cells(tables.attention(tables.load(tmp_path)).text)}
    assert lines["entropy, `prope`"] == [f"{x:.2f}" for x in found["entropy"][-2:]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's own
def test_needles_beyond(
    tmp_path: Path,
    texts: list[str],
    capsys: pytest.CaptureFixture[str],
    noted: Noted,
) -> None:
    pytest.importorskip("peft")
    trained = noted(needles, "fit")
    scratch = "qk+prope+scale_invariant-scratch"
    variants = ["plain", "rerope", "rerope+logn", "prope+map", scratch]
    only = ["--only", f"^({'|'.join(map(re.escape, variants))})$", "--seeds", "1", *texts]
    assert quick(tmp_path, "needles-beyond", *only) == 2
    assert "conversion --only '^base$' --seeds 1" in capsys.readouterr().err
    bases = f"^(base|{re.escape(scratch)})$"
    assert quick(tmp_path, "conversion", "--only", bases, *only[2:]) == 0
    assert quick(tmp_path, "needles-beyond", *only) == 0
    found = {r["variant"]: r["measured"] for r in rows(tmp_path, "needles-beyond")}
    assert list(found) == variants
    assert len(trained) == 2 * len(variants)
    for stage in (0, 1):
        assert least_apart(trained[stage::2]) > 0.5
    assert all(0 <= a <= 1 for m in found.values() for stage in ("window", "beyond") for a in m[stage]["accuracy"])
    assert all(m["window"]["loss"] != m["beyond"]["loss"] for m in found.values())
    lines = {tuple(x[:2]): x[2:] for x in cells(tables.SECTIONS["needles-beyond"](tables.load(tmp_path)).text)}
    assert lines["`rerope`", "beyond loss"] == [*(f"{x:.3f}" for x in found["rerope"]["beyond"]["loss"]), "1"]


@pytest.mark.slow
def test_needles_from_a_pretrained_model(tmp_path: Path, texts: list[str]) -> None:
    pytest.importorskip("omegaconf")
    pytest.importorskip("peft")
    assert quick(tmp_path, "needles-pretrained", *texts) == 0
    found = {r["variant"]: r["measured"] for r in rows(tmp_path, "needles-pretrained")}
    assert list(found) == ["plain", "logn", "scale_invariant"]
    plain, logn, scale_invariant = (
        json.loads((tmp_path / f"models/needles-pretrained/{name}-seed0/adapter_config.json").read_text()).get("longattn")
        for name in found
    )
    assert logn["temperature"] | {"train_length": 256, "clamp": False} == logn["temperature"]
    assert scale_invariant["logit_map"]["tau"] == 10.0
    assert plain is None
    lines = {x[0]: x[1:] for x in cells(tables.needles_pretrained(tables.load(tmp_path)).text)[2:]}
    assert lines["`logn`"][2:] == [f"{x:.3f}" for x in found["logn"]["loss"]]
    assert list(lines) == ["plain", "`logn`", "`scale_invariant`"]


def test_masked(tmp_path: Path, texts: list[str]) -> None:
    assert quick(tmp_path, "infoscale-cosscale", "--only", "^(dot_product|cosscale32)$", "--seeds", "0", *texts) == 0
    plain, cosine = (r["measured"] for r in rows(tmp_path, "infoscale-cosscale"))
    for measured in (plain, cosine):
        assert measured["infoscale"]["loss"][0] == pytest.approx(measured["none"]["loss"][0], abs=2e-5)  # the identity there
        assert measured["none"]["perplexity"][0] == pytest.approx(math.exp(measured["none"]["loss"][0]), rel=1e-3)
        assert measured["none"]["loss"][0] < math.log(259)
    assert "peak" not in plain
    assert cosine["peak"]["expected"] == pytest.approx(masked.expected_peak(32, 16), abs=1e-4)
    data = tables.load(tmp_path)
    lines = {x[0]: x[1:] for x in cells(tables.masked(data).text)}
    perplexity, accuracy = (plain["infoscale"][key][1] for key in ("perplexity", "accuracy"))
    assert lines["dot_product + infoscale, ours"][1] == f"{perplexity:.2f}/{accuracy:.2f}".replace("/0.", "/.")
    assert cells(tables.scales(data).text)[2][-1] == f"{sum(cosine['none']['accuracy']) / 2:.3f}"
    assert cells(tables.peaks(data).text)[2][:2] == ["32", f"{masked.expected_peak(32, 16):.3f}"]


@pytest.mark.slow
def test_masked_in_other_encodings(
    tmp_path: Path,
    texts: list[str],
    capsys: pytest.CaptureFixture[str],
    noted: Noted,
) -> None:
    name, measured = "infoscale-cosscale-encodings", noted(encodings, "losses_by_length")
    assert quick(tmp_path, name, "--only", "cosscale128", "--seeds", "0", *texts) == 2
    assert f"{name} --only '^dot_product$' --seeds 0" in capsys.readouterr().err
    assert quick(tmp_path, name, "--only", "^(dot_product|cosscale128_warm)$", "--seeds", "0", *texts) == 0
    plain, cosine = (r["measured"] for r in rows(tmp_path, name))
    assert cosine["train_loss"] < plain["train_loss"]  # goes on from it
    assert set(cosine) - set(plain) == set(encodings.ENCODINGS) - {"rope"}
    for kind in ("infoscale", "infoscale, ε"):
        assert cosine["rope"][kind]["loss"][0] == pytest.approx(cosine["rope"]["none"]["loss"][0], abs=2e-5)
    of_plain, of_cosine = measured[:2], measured[2:]  # without a temperature and with one
    assert len(of_cosine) == sum(len(cosine[e]) for e in encodings.ENCODINGS)
    assert least_apart([*of_plain, *of_cosine]) > 0.01
    lines = {x[0]: x[1:] for x in cells(tables.encodings(tables.load(tmp_path)).text)}
    last = cosine["yarn16"]["infoscale"]
    assert lines["YaRN × 16 + CosScale + InfoScale"][-1].startswith(f"{last['perplexity'][-1]:.2f}/")


def test_distance_explains_what_it_decides() -> None:
    """Of scores that position alone decides everything, of those of random vectors next to nothing."""
    settings = masked.MASKED.quick.but(layers=1, width=32)
    torch.manual_seed(0)
    model = masked.encoder(settings).eval()
    ids = torch.randint(3, 259, (20, 16), generator=torch.Generator().manual_seed(1))
    projections = [model.model.layers[0].self_attn.q_proj, model.model.layers[0].self_attn.k_proj]
    random_vectors = encodings.by_distance(model, ids, None)
    hooks = [p.register_forward_hook(lambda m, x, out: torch.ones_like(out)) for p in projections]
    of_position = encodings.by_distance(model, ids, 128)
    for hook in hooks:
        hook.remove()
    assert of_position["share"] == pytest.approx(1, abs=1e-4)
    assert random_vectors["share"] < 0.2
    assert random_vectors["near"] == pytest.approx(124 / 256, abs=0.01)  # of 16 x 16 pairs, all alike
    assert of_position["near"] > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["algorithms", "algorithms-pretrained"])
def test_algorithms(tmp_path: Path, noted: Noted, name: str) -> None:
    trained = noted(algorithms, "fit")
    assert quick(tmp_path, name, "--seeds", "0") == 0
    plain, adaptive = (r["measured"] for r in rows(tmp_path, name))
    tasks = algorithms.TASKS if name == "algorithms" else algorithms.ALGORITHMS_PRETRAINED.settings.tasks
    assert set(plain["as trained"]) == set(tasks)
    assert "adaptive at inference" in plain
    assert "adaptive at inference" not in adaptive
    assert len(trained) == 2
    assert least_apart(trained) > 0.2
    labels = [x[0] for x in cells(tables.SECTIONS[name](tables.load(tmp_path)).text)]
    assert len(labels) == 2 + 3 * (len(tasks) + 1)
    assert labels[-3:] == [f"mean, {x}" for x in ("plain", "adaptive θ in training", "adaptive θ at inference alone")]


@pytest.mark.slow
@pytest.mark.parametrize(("fast", "dtype"), [(False, "float32"), (True, "bfloat16")])
def test_training_multiplies_what_the_cpu_multiplies_fast(
    tmp_path: Path,
    texts: list[str],
    capsys: pytest.CaptureFixture[str],
    fast: bool,
    dtype: str,
    cpu_bfloat16: Callable[[bool], None],
) -> None:
    """Autocast, the Trainer and frozen weights; the row says which, and rows of the other precision are refused."""
    cpu_bfloat16(fast)
    seen: set[str] = set()

    def note(module: Any, inputs: Any, output: Any) -> None:
        if isinstance(module, torch.nn.Linear) and module.training:
            seen.add(str(output.dtype).removeprefix("torch."))

    hook = torch.nn.modules.module.register_module_forward_hook(note)
    names = ["algorithms", "infoscale-cosscale", "length-generalisation", "needles-pretrained", "conversion"]
    variants = ["--only", "^(plain|dot_product|prope|base)$", "--seeds", "0", *texts]
    try:
        for name in names:
            seen.clear()
            assert quick(tmp_path, name, *variants) == 0
            assert dtype in seen, name
            assert ("bfloat16" in seen) is fast, name
    finally:
        hook.remove()
    assert f"CPU minutes, {dtype}" in capsys.readouterr().out
    for name in names:
        (row,) = rows(tmp_path, name)
        assert row["dtype"] == dtype
        assert f"--dtype {dtype}" in row["command"]
    cpu_bfloat16(not fast)
    assert quick(tmp_path, "algorithms", "--seeds", "1") == 2
    assert f"or --dtype {dtype}" in capsys.readouterr().err


# the front ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Max retrieval and its norms as one experiment that trains nothing and says what it was asked for."""
    asked: list[tuple[str, int]] = []

    def measure(run: Any) -> dict[str, Any]:
        asked.append((run.variant, run.seed))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return {"number": len(asked)}

    stub = dataclasses.replace(sets.ARGMAX, seeds=(0, 1), measure=measure)
    monkeypatch.setitem(front.EXPERIMENTS, stub.name, stub)
    return asked


def test_an_interrupted_command_goes_on(tmp_path: Path, counted: list[tuple[str, int]]) -> None:
    with pytest.raises(KeyboardInterrupt):
        quick(tmp_path, "argmax-retrieval")
    assert counted == [("layer_norm", 0), ("standardise", 0), ("layer_norm", 1)]
    path = tmp_path / "argmax-retrieval.jsonl"
    path.write_text(path.read_text() + '{"experiment": "argm')  # as if writing had been cut off
    assert quick(tmp_path, "argmax-retrieval") == 0
    assert counted[3:] == [("layer_norm", 1), ("standardise", 1)]
    found = {(r["variant"], r["seed"]): r["measured"]["number"] for r in rows(tmp_path, "argmax-retrieval")}
    assert found == {("layer_norm", 0): 1, ("standardise", 0): 2, ("layer_norm", 1): 4, ("standardise", 1): 5}

    assert quick(tmp_path, "argmax-retrieval") == 0
    assert len(counted) == 5  # nothing is run twice
    assert quick(tmp_path, "argmax-retrieval", "--only", "norm", "--seeds", "1", "--again") == 0
    assert counted[5:] == [("layer_norm", 1)]
    again = {(r["variant"], r["seed"]): r["measured"]["number"] for r in rows(tmp_path, "argmax-retrieval")}
    assert again == found | {("layer_norm", 1): 6}
    listed = next(line for line in front.listed(tmp_path).splitlines() if line.startswith("argmax-retrieval "))
    assert " 0.0 min" in listed  # the rows' own time


def test_rows_of_other_settings_are_refused(
    tmp_path: Path,
    counted: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert quick(tmp_path, "argmax-retrieval", "--seeds", "0") == 0
    changed = sets.ARGMAX.quick.but(steps=7)
    stub = dataclasses.replace(front.EXPERIMENTS["argmax-retrieval"], quick=changed)
    monkeypatch.setitem(front.EXPERIMENTS, stub.name, stub)
    before = (tmp_path / "argmax-retrieval.jsonl").read_text()
    assert quick(tmp_path, "argmax-retrieval", "--seeds", "5") == 2
    assert "steps: 150 there, 7 now" in capsys.readouterr().err
    assert (tmp_path / "argmax-retrieval.jsonl").read_text() == before
    assert len(counted) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["max-retrival"], "there is no experiment 'max-retrival'"),
        (["needles"], "give --text FILES and --heldout FILE"),
        (["needles", "--text", "missing.txt"], "there is no file missing.txt"),
        (["max-retrieval", "--only", "ropey"], "no variant of max-retrieval matches 'ropey'"),
    ],
)
def test_what_cannot_work_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        quick(tmp_path, *words)
    assert message in capsys.readouterr().err


def test_the_list_names_every_experiment_with_its_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert front.main(["--results", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for experiment, line in zip(front.EXPERIMENTS.values(), lines[1:], strict=False):
        name, minutes, unit, done, to_do, *_ = line.split()
        assert (name, float(minutes), unit) == (experiment.name, experiment.minutes, "min")
        assert (int(done), int(to_do)) == (0, len(experiment.variants) * len(experiment.seeds))


@pytest.mark.slow
def test_conversion(tmp_path: Path, texts: list[str], capsys: pytest.CaptureFixture[str], noted: Noted) -> None:
    states = noted(conversion, "measured")
    weights = noted(conversion, "measured", lambda model: model.model.layers[0].self_attn.q_proj.weight.detach().clone())
    variants = ["windowed-untrained", "infoscale-untrained", "rerope+map-untrained", "qk+yarn16+logn-untrained"]
    variants += ["rerope+logn-15%", "pose+rerope-15%"]
    variants += ["rerope+logn-lora-15%", "control-lora-15%", "pose+yarn64-distilled-15%", "pose+yarn64-15%"]
    variants += ["prope+scale_invariant-strength-15%", "prope+scale_invariant-15%", "qk+prope+map-15%"]
    bases = ["base", "qk+base", "prope+scale_invariant-scratch"]
    only = [f"^({'|'.join(map(re.escape, names))})$" for names in (variants, bases)]
    assert quick(tmp_path, "conversion", "--only", only[0], "--seeds", "1", *texts) == 2
    assert "conversion --only '^base$' --seeds 1" in capsys.readouterr().err
    for names in reversed(only):
        assert quick(tmp_path, "conversion", "--only", names, "--seeds", "1", *texts) == 0
    found = {r["variant"]: r["measured"] for r in rows(tmp_path, "conversion")}
    assert set(found) == {*bases, *variants}
    base = found["base"]
    assert all(base[task][0] < math.log(256) for task in conversion.TASKS)
    for name in ("windowed-untrained", "infoscale-untrained"):  # the identity within the window
        assert [found[name][task][0] for task in conversion.TASKS] == pytest.approx(
            [base[task][0] for task in conversion.TASKS], abs=2e-5
        )
    scratch = "prope+scale_invariant-scratch"
    alike = [{"base", "control-lora-15%"}, {"rerope+logn-15%", "rerope+logn-lora-15%"}, {scratch, *variants[-3:-1]}]
    alike += [{"pose+yarn64-15%", "pose+yarn64-distilled-15%"}]  # one way to attend, trained otherwise
    for (a, x, v), (b, y, w) in itertools.combinations(zip(found, states, weights, strict=True), 2):
        if any({a, b} <= names for names in alike):
            assert apart(x, y) < 1e-4, (a, b)
            assert apart(v, w) > 1e-5, (a, b)
        else:
            assert apart(x, y) > 0.2, (a, b)
    assert {name for name, m in found.items() if "train_loss" not in m} == set(variants[:4])
    assert front.main(["--show", "conversion", "--results", str(tmp_path), "--only", "^rerope", "--seeds", "1"]) == 0
    shown = [x for x in cells(capsys.readouterr().out) if x[0].startswith("`")]
    assert {x[0] for x in shown} == {"`rerope+map-untrained`", "`rerope+logn-15%`", "`rerope+logn-lora-15%`"}
    values = {x[1]: x[2:] for x in shown if x[0] == "`rerope+logn-15%`"}
    assert values == {task: [*(f"{x:.3f}" for x in found["rerope+logn-15%"][task]), "1"] for task in conversion.TASKS}


# the pieces -----------------------------------------------------------------------------------------------------------


def test_conversions_are_measured_on_what_stood_far_back() -> None:
    heldout = "".join(random.Random(0).choices("abcdefgh ", k=5000))
    for length in (128, 512, 2048):
        kinds = set()
        for number in (0, 1):
            ids, kind = conversion.window(heldout, length, number, 2)
            start = number * ((5000 - length) // 2)
            prose = conversion.encode(heldout[start : start + length])
            torch.testing.assert_close(ids[kind == 0], prose[kind == 0])
            (far,) = torch.where(kind > 0)
            torch.testing.assert_close(ids[far], ids[far - length * 3 // 4])
            strings = bytes(ids[kind == 2].tolist()).decode()
            assert sum(c in "abcdefgh" for c in strings) < len(strings) / 2 or not strings
            kinds |= set(kind.tolist())
        assert kinds == {-1, 0, 1, 2}


def test_the_mixture_repeats_what_came_shortly_before() -> None:
    text = "".join(random.Random(1).choices(conversion.LETTERS, k=100_000))
    settings = conversion.CONVERSION.settings
    batches = [next(conversion.mixture(text, settings, seed)) for seed in (1, 1, 2)]
    assert batches[0].shape == (settings.batch, settings.length)
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])
    stream = bytes(batches[0].flatten().tolist()).decode()
    known = sum(stream[i : i + 6] in stream[max(i - 128, 0) : i + 5] for i in range(128, len(stream) - 6))
    assert 0.3 < known / (len(stream) - 134) < 0.7


def test_the_temperature_is_the_published_one() -> None:
    """β from the row's entropy by the published polynomial, and attention by it, in a few lines without the package."""
    model, draw = sets.argmax_model("baseline", sets.ARGMAX.settings)
    features, query, _ = draw(64, 8, torch.Generator().manual_seed(0))
    with torch.no_grad():
        q, k, v = model.project(features, query)
        q = q * torch.linspace(1, 60, 8)[:, None, None, None]  # from flat rows to sharp ones
        logits = (q @ k.transpose(-1, -2))[:, 0, 0] / math.sqrt(128)
        p = logits.softmax(-1)
        entropy = torch.special.entr(p).sum(-1)
        polynomial = sum(a * entropy**n for n, a in enumerate((-1.791, 4.917, -2.3, 0.481, -0.037)))
        beta = torch.where(entropy > 0.5, polynomial.clamp(min=1), 1.0)
        expected = torch.softmax(beta[:, None] * logits, -1)[:, None] @ v[:, 0]
        actual = model.attend(q, k, v, sets.AdaptiveTemperature())
        plain = model.attend(q, k, v)
    assert beta.max() > 1.2
    torch.testing.assert_close(actual, expected[:, 0], atol=1e-5, rtol=0)
    torch.testing.assert_close(plain, (p[:, None] @ v[:, 0])[:, 0], atol=1e-5, rtol=0)


def test_the_encoder_sees_both_ways_and_the_whole_length() -> None:
    settings = masked.MASKED.quick.but(layers=2)
    torch.manual_seed(0)
    model = masked.encoder(settings).eval()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.mul_(30)  # attention far from uniform
    ids = torch.randint(3, 259, (1, 40), generator=torch.Generator().manual_seed(1))
    everywhere = torch.ones_like(ids, dtype=torch.bool)

    def logits(ids: torch.Tensor) -> torch.Tensor:
        everything = torch.ones(1, 1, 40, 40, dtype=torch.bool)
        with torch.no_grad():
            return model(ids, attention_mask=everything, use_cache=False).logits[0]

    plain = logits(ids)
    other = ids.clone()
    other[0, -1] = 3 if ids[0, -1] != 3 else 4
    assert (logits(other)[0] - plain[0]).abs().max() > 1e-4  # the first token sees the last one
    masked.put(model, None, "infoscale")
    scaled = logits(ids)
    masked.put(model, None, "")
    d, trained = settings.width, settings.length
    factor = math.sqrt((1 - 40 ** (-2 / d)) / (1 - trained ** (-2 / d)))  # n is the whole length in every row
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.mul_(factor)
    torch.testing.assert_close(scaled, logits(ids), atol=2e-5, rtol=0)
    assert (scaled - plain).abs().max() > 1e-3
    with torch.no_grad():
        assert masked.predictions(model, ids, everywhere).shape == (40, 259)


@pytest.mark.parametrize(("scale", "head_dim"), [(8, 128), (128, 128), (16, 32)])
def test_the_theorems_peak_is_where_its_integrand_is_largest(scale: int, head_dim: int) -> None:
    eta = torch.linspace(-1, 1, 200_001, dtype=torch.float64)[1:-1]
    integrand = scale * eta + (head_dim - 3) / 2 * torch.log1p(-(eta**2))
    assert masked.expected_peak(scale, head_dim) == pytest.approx(float(eta[integrand.argmax()]), abs=2e-5)


def test_algorithms_are_right() -> None:
    rng = random.Random(3)
    for _ in range(20):
        prompt, answer = algorithms.insertion_sort(rng, 9)
        keys = [int(x) for x in prompt.split("[")[1].split("]")[0].split()]
        assert [int(x) for x in answer.strip("[ ]").split()] == sorted(keys)
        prompt, answer = algorithms.binary_search(rng, 7)
        keys = [int(x) for x in prompt.split("[")[1].split("]")[0].split()]
        target = int(prompt.split("target ")[1][:2])
        assert int(answer) == min(k for k in keys if k >= target)
        prompt, answer = algorithms.task_scheduling(rng, 6)
        due, weights = ([int(x) for x in part.split("]")[0].split()] for part in prompt.split("[")[1:])
        chosen = [i for i, x in enumerate(answer.strip("[ ]").split()) if x == "1"]

        def in_time(tasks: Any, due: list[int] = due) -> bool:
            return all(place < d for place, d in enumerate(sorted(due[t] for t in tasks)))

        subsets = itertools.chain.from_iterable(itertools.combinations(range(6), n) for n in range(7))
        best = max(sum(weights[t] for t in tasks) for tasks in subsets if in_time(tasks))
        assert in_time(chosen)
        assert sum(weights[t] for t in chosen) == best
        prompt, answer = algorithms.bfs(rng, 8)
        edges = [tuple(map(int, e.split())) for e in prompt.split("[")[1].split("]")[0].split(",")]
        source, order = int(prompt.split(" s ")[1][:2]), [int(x) for x in answer.strip("[ ]").split()]
        depth = {source: 0}
        for _ in range(8):
            for a, b in edges:
                for x, y in ((a, b), (b, a)):
                    if x in depth:
                        depth[y] = min(depth.get(y, 9), depth[x] + 1)
        assert order[0] == source
        assert [depth[n] for n in order] == sorted(depth.values())
        assert sorted(order) == list(range(8))
    for task in algorithms.TASKS:
        ids, first = algorithms.batch(task, 5, 4, rng)
        assert ids.shape[0] == 4
        assert 0 < first < ids.shape[1]
        assert all(ids[:, -1] == algorithms.VOCABULARY["end"])


# tables and pages -----------------------------------------------------------------------------------------------------


def fake(variant: str, seed: int, accuracy: float) -> dict[str, Any]:
    sizes = len(paper.SIZES)
    what = {"accuracy": [accuracy] * sizes, "deviation": [0.5] * sizes, "spread": [0.25] * sizes, "mean": [0.0] * sizes}
    better = what | {"accuracy": [accuracy + 0.1 + 0.01 * seed] * sizes}
    measured = {"plain": what, "adaptive": better, "refit": better}
    measured |= {"attention": {"entropy": [1.0] * sizes, "largest": [0.5] * sizes}}
    name = "max-retrieval" if variant == "baseline" else "argmax-retrieval"
    return {"experiment": name, "variant": variant, "seed": seed, "cpu_seconds": 60.0, "measured": measured}


def test_tables_hold_means_and_paired_gains() -> None:
    data = {"max-retrieval": [fake("baseline", s, 0.5 + 0.1 * s) for s in (0, 1)]}
    data["argmax-retrieval"] = [fake("layer_norm", 0, 0.7), fake("layer_norm", 1, 0.9)]
    first = {row[0]: row[1] for row in cells(tables.max_retrieval(data).text)}
    assert first["baseline, ours"] == "55.0"
    assert first["baseline, paper"] == "98.6"
    assert first["gain, ours"] == "+10.5 ± 6.4"  # t(1) · 0.5 points
    text = tables.SECTIONS["argmax-retrieval"](data).text
    first = {row[0]: row[1] for row in cells(text)}
    assert first["LayerNorm, ours"] == "80.0"
    assert first["gain of LayerNorm, ours"] == "+25.0 ± 63.5"
    assert first["gain of LayerNorm, paper"] == "+0.01"
    assert "seeds 2 ([" in text


def test_differences_are_of_the_same_texts_and_counted_by_seed() -> None:
    """Two questions a text: in the first seed each of four texts gains one, in the second it is so but for a worse start."""
    settings = {"length": 64, "needles": 2}

    def row(variant: str, seed: int, near: str, far: str) -> dict[str, Any]:
        accuracy = [near.count("1") / 8, far.count("1") / 8]
        measured = {"lengths": [64, 1024], "accuracy": accuracy, "right": [near, far]}
        return {"experiment": "keys", "variant": variant, "seed": seed, "settings": settings, "measured": measured}

    rows = [row("prope", seed, "1" * 8, "10000010") for seed in (0, 1, 2)]
    rows += [row("logn_prope", 0, "1" * 8, "11010111"), row("logn_prope", 1, "1" * 7 + "0", "11010111")]
    assert tables.differences(rows, "logn_prope", "prope", 1024) == [[0.5] * 4] * 2
    (told,) = (row for row in cells(tables.SECTIONS["keys"]({"keys": rows}).text) if "logn" in row[0])
    assert told == ["`logn_prope`, not learned", "0.94 (0.88–1.00)", "0.75", "+0.50 ± 0.00, 1 of 2"]


def test_a_page_may_show_a_part_of_the_columns() -> None:
    text = "| a | 1 | 2 |\n| --- | --- | --- |\n| x, y | 0.5 |  |\n\nOurs."
    assert tables.narrow(text, ["2"]) == "| a | 2 |\n| --- | --- |\n| x, y |  |\n\nOurs."
    with pytest.raises(ValueError, match="3"):
        tables.narrow(text, ["3"])


def test_pictures_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    rows = front.RowFile(tmp_path / "max-retrieval.jsonl")
    rows.put(fake("baseline", 0, 0.5))
    monkeypatch.setattr(tables, "load", functools.partial(tables.load, tmp_path))
    page = filled("<!-- reproduction: max-retrieval -->\n<!-- end -->\n", tables.contents())
    assert "![Accuracy by size](max_retrieval.png)" in page
    assert tables.pictures()["lab/max_retrieval.png"].startswith(b"\x89PNG")


def test_the_weight_decay_of_sets_is_as_small_as_the_page_says() -> None:
    settings = sets.MAX_RETRIEVAL.settings
    taken = 1 - (1 - settings.learning_rate * settings.weight_decay) ** settings.steps
    page = (ROOT / "docs" / "lab" / "max_retrieval.md").read_text(encoding="utf-8")
    assert f"takes {100 * taken:.1f} % off a weight in all {settings.steps:,} steps" in page


def test_what_is_not_run_says_so() -> None:
    for name, section in tables.SECTIONS.items():
        assert section({}).text.startswith("Not run yet: `make reproduce ARGS="), name


def test_the_pages_are_the_rows() -> None:
    data = tables.load(front.RESULTS)
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    printed = set(re.findall(r"--show ([\w-]+)", pages)) - {"NAME"}
    shown = printed | set(re.findall(r"<!-- reproduction: ([\w-]+)", pages))
    named = {name for found in re.findall(r"reproductions/([\w-]+)\.jsonl|`([\w-]+)`", pages) for name in found}
    assert shown <= set(tables.SECTIONS) <= shown | named  # a longer table is printed from its rows
    for name, found in data.items():
        settings = vars(front.EXPERIMENTS[name].settings)
        for row in found:
            assert row["settings"] == settings
            assert row["variant"] in front.EXPERIMENTS[name].variants
            assert "quick" not in row["command"]
