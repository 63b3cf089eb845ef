"""The pages of docs/ against the package and the result file."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engines_table
import peft
import pytest
import tiny
import torch
import yaml
from transformers import AutoModelForCausalLM
from transformers.integrations.peft import PeftAdapterMixin

import hf_longattn
from hf_longattn import extension
from hf_longattn.evaluation import copy_losses, prefix_of, token_losses, with_copies
from hf_longattn.evaluation.rows import RowFile
from hf_longattn.evaluation.settings import Setting
from hf_longattn.evaluation.statistics import mean_interval
from hf_longattn.slots.registry import list_methods
from lab import pages
from lab.markdown import filled
from lab.papers import coverage, tables
from lab.papers.length import ENDPOINT
from lab.papers.paper import ARGMAX, MAX_RETRIEVAL
from lab.papers.run import EXPERIMENTS
from lab.pretrained import choice, headline, longer_on_model, paired, reading_far, regret, runner
from lab.speed import gpu_rows, speed

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def prose(path: str) -> str:
    """A page as one line."""
    return " ".join((ROOT / path).read_text(encoding="utf-8").split())


def rows_of(experiment: str) -> dict[tuple[str, int], dict[str, Any]]:
    """What a reproduction measured, by variant and seed."""
    path = ROOT / "lab" / "results" / "reproductions" / f"{experiment}.jsonl"
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(row["variant"], row["seed"]): row["measured"] for row in found}


@pytest.mark.parametrize("name", list_methods())
def test_every_method_has_a_page_and_a_row_in_the_index(name: str) -> None:
    index = (ROOT / "docs" / "reference" / "methods" / "README.md").read_text(encoding="utf-8")
    page = re.search(rf"\[`{name}`\]\((\w+\.md)\)", index)
    assert page, f"docs/reference/methods/README.md has no link for {name}"
    assert f"`{name}`" in (ROOT / "docs" / "reference" / "methods" / page[1]).read_text(encoding="utf-8").splitlines()[0]


def test_the_table_of_methods_has_all_and_every_setting_that_it_names_has_rows() -> None:
    assert set(choice.SETTINGS) == set(list_methods())
    read = {column: {row["name"] for row in rows} for column, rows in choice.measured().items()}
    for name, columns in choice.SETTINGS.items():
        for column, settings in columns.items():
            assert set(settings) <= read[column], (name, column)


@pytest.fixture(scope="module")
def contents() -> Any:
    return pages.contents()


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda p: str(p.relative_to(ROOT)))
def test_tables_are_the_result_files(page: Path, contents: Any) -> None:
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"<!-- ([\w -]+?):", text)) <= set(contents)
    assert filled(text, contents) == text, "run: python -m lab.pages"


def test_a_segment_over_kept_keys_is_read_as_in_one_pass(tmp_path: Path) -> None:
    """By the way that made the keys; and by another over the first one's keys it is read differently."""
    model = AutoModelForCausalLM.from_pretrained(tiny.save(tmp_path)).eval()
    ids = torch.randint(97, (1, 900), generator=torch.Generator().manual_seed(0))
    copies = reading_far.copies_at("tiny", 900, 520)
    assert [c.position for c in copies] == [508, 764]
    sources = sorted(c.position - c.distance for c in copies)  # in the text before, none repeated twice
    assert 0 <= sources[0] <= sources[1] - 128 <= 380 - 256
    ids, taken = with_copies(ids, copies)
    assert int(taken.sum()) == 128 * len(copies)
    hf_longattn.apply(model, "rerope", window=64)
    whole, before = token_losses(model, ids), prefix_of(model, ids[:, :-520], chunk=100)
    read = token_losses(model, ids, last=519, prefix=before)
    assert torch.isnan(read[:, :381]).all()
    torch.testing.assert_close(read[:, 381:], whole[:, 381:], atol=1e-4, rtol=0)
    found = reading_far.measured(read, copies)
    assert found["copying"] == pytest.approx(copy_losses(whole, copies), abs=2e-4)
    assert found["prose"][-1] == pytest.approx(float(whole[:, 636:764].mean()), abs=2e-4)
    hf_longattn.apply(model, "rerope+logn", window=64, train_length=65)
    assert (token_losses(model, ids, last=519, prefix=before) - read)[:, 381:].abs().max() > 1e-2


def test_no_passage_is_repeated_twice_over_kept_keys() -> None:
    """The second repetition of a passage would be found in the first one, near by."""
    for row in runner.rows_of("reading-*.json"):
        sources = sorted(position - distance for distance, position in row["copies"])
        assert min(b - a for a, b in itertools.pairwise(sources)) >= 128, row["command"]


def test_an_adapters_weights_are_read_under_the_way_that_is_asked_for(tmp_path: Path) -> None:
    """Not under the method that it records; its own scale of the adapter stays."""
    base = AutoModelForCausalLM.from_pretrained(tiny.save(tmp_path / "base"))
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    torch.manual_seed(1)
    peft.get_peft_model(hf_longattn.apply(base, "rerope+infoscale", window=64), lora).save_pretrained(tmp_path / "adapter")
    ids = torch.randint(97, (1, 200), generator=torch.Generator().manual_seed(0))
    way = runner.Choice(Setting("rerope", "rerope", {"window": 16}))
    read = reading_far.load(way, tmp_path / "base", "float32", ids, tmp_path / "adapter")
    assert hf_longattn.get_config(read).methods == way.setting.config.methods
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    by_hand = hf_longattn.remove(adapted.merge_and_unload().eval())
    plain = reading_far.load(runner.Choice(Setting("unmodified")), tmp_path / "base", "float32", ids, tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, by_hand(ids).logits, atol=1e-5, rtol=0)
        want = hf_longattn.apply(by_hand, "rerope", window=16)(ids).logits
        torch.testing.assert_close(read(ids).logits, want, atol=1e-5, rtol=0)
        assert (plain(ids).logits - want).abs().max() > 1e-3
        assert (plain(ids).logits - AutoModelForCausalLM.from_pretrained(tmp_path / "base")(ids).logits).abs().max() > 1e-3


def test_memory_grows_linearly_in_the_result_files() -> None:
    measured: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in speed.load_all():
        if row.get("peak_mib") and row["method"] == "scale_invariant" and row["backend"] in ("auto", "triton"):
            measured.setdefault((row["where"], row["mode"], row["backend"]), []).append(row)
    for name, rows in measured.items():
        if len(rows) > 2:
            assert speed.exponent(rows) < 1.15, name


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    listed = {name.split(".")[-1] for name in re.findall(r"^::: hf_longattn\.([\w.]+)$", page, re.MULTILINE)}
    beside = {"EvalOptions", "Results", "Setting", "Task"}  # what `evaluate` takes and gives, of hf_longattn.evaluation
    assert listed == {*hf_longattn.__all__, *beside}


def test_the_page_on_sharing_names_what_waits_for_a_newer_peft() -> None:
    page = prose("docs/how-to/share.md")
    asks = {name for name, f in vars(PeftAdapterMixin).items() if callable(f) and "check_peft_version" in inspect.getsource(f)}
    assert {"add_adapter", "get_adapter_state_dict"} <= asks
    for name in {"save_pretrained", *asks}:
        assert f"`{name}`" in page


def installs_of_what_no_index_has(text: str) -> list[str]:
    """Lines for pip that name the package, which is installed from a checkout until it is released."""
    return re.findall(r"pip install [^`\n#]*\bhf[-_]longattn\b[^`\n]*", text)


@pytest.mark.parametrize(
    "line", ["pip install hf_longattn", "pip install 'hf-longattn[cli]'", 'pip install -U "hf_longattn[train]"']
)
def test_a_wrong_line_for_pip_is_found(line: str) -> None:
    assert installs_of_what_no_index_has(f"First:\n\n    {line}\n")
    assert not installs_of_what_no_index_has('pip install ".[cli,train]"    # hf_longattn, in a checkout\n')


def test_every_page_installs_from_a_checkout_and_every_extra_of_a_user_is_on_one() -> None:
    pages = [*PAGES, ROOT / "README.md", *(ROOT / "examples").glob("*.md"), *(ROOT / "examples").glob("*.ipynb")]
    texts = {page: page.read_text(encoding="utf-8").replace('\\"', '"') for page in pages}
    assert {page: found for page, text in texts.items() if (found := installs_of_what_no_index_has(text))} == {}
    lines = " ".join(x for text in texts.values() for x in re.findall(r'pip install "\.\[[\w,-]+\]"', text))
    for extra in ("cli", "train", "lm-eval", "quant"):
        assert re.search(rf"[\[,]{extra}[\],]", lines), extra


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in PAGES:
        assert re.search(rf"[ :]{re.escape(str(page.relative_to(ROOT / 'docs')))}$", site, re.MULTILINE), page


def test_the_navigation_lists_a_page_once_and_the_build_is_strict() -> None:
    listed = re.findall(r"(\S+\.(?:md|html))$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(listed) == len(set(listed))
    reports = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("index.html")}
    assert reports <= set(listed)
    build = next(x for x in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines() if "mkdocs build" in x)
    assert "--quiet" not in build.split("#")[0]  # under which mkdocs counts no warnings, strict or not


@pytest.mark.parametrize(
    ("area", "asked"),
    [
        ("positions", "tests/integration/test_positions.py"),
        ("tests/evaluation/test_needle.py", "tests/evaluation/test_needle.py"),
        ("core", "tests/core"),
        ("beam", '-k "beam"'),
    ],
)
def test_make_takes_one_area(area: str, asked: str) -> None:
    for target in ("check", "test"):
        command = ["make", "--dry-run", "--no-print-directory", "--old-file=.venv/.dev", target, f"T={area}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert "ruff" not in done.stdout, target
        assert done.stdout.rstrip().endswith(asked)


def test_what_a_public_host_reads_is_yaml_and_names_this_version() -> None:
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / "CITATION.cff"]
    read = {f.name: yaml.safe_load(f.read_text(encoding="utf-8")) for f in files}
    assert read["CITATION.cff"]["version"] == hf_longattn.__version__


def test_the_committed_reports_are_their_rows_and_what_the_page_says() -> None:
    page = (ROOT / "docs" / "lab" / "report.md").read_text(encoding="utf-8")
    shown = re.findall(r"<!-- report: (\S+) -->\n(.*?)\n<!-- end -->", page, re.DOTALL)
    assert shown
    for name, table in shown:
        folder = ROOT / "docs" / name
        rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
        losses: dict[tuple[str, int], list[float]] = {}
        for row in rows:
            if row["task"] == "loss":
                losses.setdefault((row["setting"], row["length"]), []).append(row["loss"])
        documents = max(map(len, losses.values()))
        for (setting, length), found in losses.items():
            line = next((x for x in table.splitlines() if x.startswith(f"| {setting} |")), None)
            assert (line is not None) == (len(found) == documents)  # every setting on the same documents
            if line is None:
                continue
            column = table.splitlines()[0].split("|").index(f" {length:,} ")
            assert float(line.split("|")[column]) == pytest.approx(sum(found) / len(found), abs=6e-4)


def test_the_order_said_of_length_generalisation_is_that_of_its_rows() -> None:
    """p-RoPE as published, its end point included."""
    losses = {key: measured["loss"] for key, measured in rows_of("length-generalisation").items()}
    seeds = {v: [s for w, s in losses if w == v] for v, _ in losses}
    prope, logn, ours = (f"{name}{ENDPOINT}" for name in ("prope", "logn_prope", "scale_invariant_prope"))
    page = prose("docs/lab/length.md")

    def at(variant: str, column: int = 2, of: Sequence[int] = ()) -> float:
        return mean_interval([losses[variant, s][column] for s in of or seeds[variant]])[0]

    def everywhere(better: str, worse: str, *columns: int) -> bool:
        return all(losses[better, s][c] < losses[worse, s][c] for s in seeds[worse] for c in columns)

    # groups as in the paper, in the mean
    third = sorted(at(v) for v in ("logn_rope", logn, "logn_ntk"))
    plain = [at(v) for v in (prope, "rope", "rope_ntk")]
    assert max(at(ours), at("alibi")) < third[0]
    assert third[-1] < min(plain)
    assert max(plain) < at("nope")
    assert f"LogN {third[0]:.2f} to {third[-1]:.2f}, RoPE and p-RoPE " in page
    # within the first group: ALiBi behind up to four times; at 16 times ahead in two seeds and behind in one
    *ahead, behind = sorted(losses["alibi", s][2] - losses[ours, s][2] for s in seeds[ours])
    assert max(ahead) < 0 < behind
    assert f"ahead of it by {-max(ahead):.3f} and {-min(ahead):.3f} in two seeds and {behind:.3f} behind in the third" in page
    both = [mean_interval([losses[v, s][2] for s in seeds[v]]) for v in (ours, "alibi")]
    assert "({:.3f} ± {:.3f} and {:.3f} ± {:.3f})".format(*both[0], *both[1]) in page
    assert all(losses[ours, s][c] < losses["alibi", s][c] for s in seeds[ours] for c in (0, 1))
    assert everywhere("logn_rope", logn, 1, 2)
    behind_rope = [[losses["rope", s][c] < losses[prope, s][c] for c in (1, 2)] for s in seeds[prope]]
    assert sorted(behind_rope) == [[False, False], [True, True], [True, True]]
    # the end point left out
    assert everywhere("prope", "rope", 1, 2)
    gaps = [losses["alibi", s][2] - losses["scale_invariant_prope", s][2] for s in seeds["alibi"]]
    (less,), more = [x for x in gaps if x < 0], sorted((x for x in gaps if x > 0), reverse=True)
    assert f"it is {more[0]:.3f} and {more[1]:.3f} behind in two seeds and {-less:.3f} ahead in one" in page
    without = [losses["scale_invariant_prope", s][2] for s in seeds["scale_invariant_prope"]]
    assert f"({min(without):.3f} to {max(without):.3f})" in page
    sweep = [losses[f"scale_invariant_prope_tau{tau}", 0][2] for tau in ("0.1", "1")]
    assert 0.01 < min(sweep) - losses["scale_invariant_prope", 0][2] < max(without) - min(without)


def test_the_answers_counted_on_the_page_of_algorithms_are_those_of_its_rows() -> None:
    found, page = rows_of("algorithms"), prose("docs/lab/algorithms.md")
    sizes = found["plain", 0]["sizes"]

    def gained(task: str, seed: int, size: int) -> int:
        both = [found[v, seed]["as trained"][task]["exact"][sizes.index(size)] for v in ("plain", "adaptive_temperature")]
        return round(128 * (both[1] - both[0]))

    sorting = [[gained("insertion_sort", s, n) for n in (12, 14, 16)] for s in (0, 1)]
    assert "insertion sort by {}, {} and {} answers of 128 at 12, 14 and 16".format(*sorting[0]) in page
    assert (
        f"and costs {-gained('insertion_sort', 0, 10)} at 10. In the other seed it is {sorting[1][0]}, {sorting[1][1]} and"
        in page
    )
    assert f"and {sorting[1][2]}, not measurable" in page
    assert "in both, {} and {} answers of 128 at 20".format(*(-gained("binary_search", s, 20) for s in (0, 1))) in page
    assert "gains {} at 24 in one seed and loses {}".format(gained("minimum", 0, 24), -gained("minimum", 1, 24)) in page
    moved = [
        abs(a - b) * 128
        for s in (0, 1)
        for task, plain in found["plain", s]["as trained"].items()
        for a, b in zip(plain["exact"], found["plain", s]["adaptive at inference"][task]["exact"], strict=True)
    ]
    assert f"no cell of either seed by more than {round(max(moved))} answers of 128" in page


@pytest.mark.parametrize(
    "claim",
    [
        "conversion | rerope+cosscale32+infoscale-15% strings | rerope-15% strings | 2048 lower",
        "conversion | rerope+cosscale32+infoscale-15% strings | rerope-15% strings | 8192 lower",
        "conversion | rerope+logn-untrained strings | rerope-untrained strings | 2048 lower",
        "conversion | rerope+logn-distilled-15% prose | rerope+logn-15% prose | 2048 lower",
        "conversion | pose+rerope+logn-distilled-15% prose | pose+rerope+logn-15% prose | 2048 lower",
        "dictionary-lookup | baseline plain accuracy | layer_norm plain accuracy | all higher",
    ],
)
def test_what_pages_say_without_a_number_is_in_the_rows(claim: str) -> None:
    data = tables.load()
    assert tables.number(data, claim)
    false = claim.replace("lower", "higher") if "lower" in claim else claim.replace("higher", "lower")
    with pytest.raises(ValueError, match=r"a page says that .* is (lower|higher) than"):
        tables.number(data, false)


def test_the_demo_takes_what_the_readme_says() -> None:
    minutes = re.search(r"([\d.]+) minutes of CPU time, .*?; seed \d+, [12] threads", prose("docs/demo/summary.md"))
    assert minutes
    assert float(minutes[1]) < 5
    assert "make demo # SmolLM2-135M in five minutes" in prose("README.md")


def test_the_pictures_and_badges_of_the_readme_are_made_of_what_there_is() -> None:
    assert {f.name: f.read_text(encoding="utf-8") for f in pages.BADGES.iterdir()} == pages.badges()
    shown = [[float(x) for x in line.split("|")[2:5]] for line in headline.SMOLLM2.perplexities("").splitlines()[2:]]
    unmodified, yarn, extend = shown
    assert unmodified[1] > 4 * max(yarn[1], extend[1])  # README: unmodified, it breaks behind its trained length
    assert abs(extend[0] - unmodified[0]) < yarn[0] - unmodified[0]


def test_reports_name_files_that_are_there_and_lead_back() -> None:
    for folder in (ROOT / "docs" / "reports").iterdir():
        page = (folder / "index.html").read_text(encoding="utf-8")
        named = re.findall(r"--settings (\S+)", page)
        assert named
        assert all((ROOT / file).is_file() for file in named)
        assert page.count("<body>") == 1
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("mkdocs_hooks", ROOT / "docs" / "mkdocs_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    assert '<body>\n<p><a href="../../index.html">' in hooks.led_back(page)


def test_the_quickstart_is_short_and_shows_what_it_prints() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(re.sub(r"<!--.*?-->", "", text).split()) <= 1000
    assert re.search(r"```python\n.*?```\n\ntakes [^\n]+ and prints\n\n```text\n\d+ tokens, unmodified:\n", text, re.DOTALL)


def test_what_is_said_of_gemma_is_in_the_rows() -> None:
    rows: dict[str, dict[str, Any]] = {}
    for row in RowFile(ROOT / "lab" / "results" / "reading-gemma.json"):
        if (row["length"], row["segment"]) == (131072, reading_far.SEGMENT) and "adapter" not in row:
            rows.setdefault(row["text"], {})[row["name"]] = row
    assert len(rows) == 3
    pairs = [(r["rerope(window 16384) + logn"], r["rerope(window 16384)"]) for r in rows.values()]
    for tempered, plain in pairs:  # every copy gains
        assert all(a < b for a, b in zip(tempered["copying"], plain["copying"], strict=True))
    logn, rerope = ([mean_interval(paired.losses(pair[n], "far"))[0] for pair in pairs] for n in (0, 1))
    prices = [mean_interval([a - b for a, b in zip(t["prose"], p["prose"], strict=True)])[0] for t, p in pairs]
    told = "cost {:.2f} to {:.2f} nats in the three texts (`rerope`: {:.2f} to {:.2f}) and prose is {:.2f} to {:.2f} worse"
    bounds = [bound for values in (logn, rerope, prices) for bound in (min(values), max(values))]
    assert told.format(*bounds) in prose("docs/lab/longer.md")


def test_what_is_said_of_far_copies_several_lengths_out_is_in_the_rows() -> None:
    """Of SmolLM2, untrained: what extend's warning says of `rerope`, and what the negative results say of all remaps."""
    costs: dict[tuple[str, bool], list[float]] = {}  # by method, and whether beyond four times the trained length
    for row in (r for files in regret.MEASURED for r in runner.rows_of(files)):
        if row["model"].startswith("SmolLM2") and row["length"] >= 4 * row["trained"] and "adapter" not in row:
            beyond = row["length"] > 4 * row["trained"]
            costs.setdefault((regret.methods(row), beyond), []).append(mean_interval(paired.losses(row, "far"))[0])

    def bounds(remaps: Sequence[str], temperatures: Sequence[str], beyond: bool) -> list[str]:
        found = [x for m in remaps for t in temperatures for x in costs.get((m + t, beyond), [])]
        return [f"{min(found):.1f}", f"{max(found):.1f}"]

    four, far = (bounds(["rerope"], ["", "+infoscale"], beyond) for beyond in (False, True))
    told = extension.beyond_shown(8192, 65536)
    assert told is not None
    assert "{} to {} nats per token at 4 times under rerope, and {} to {} at 8 and 16 times".format(*four, *far) in told
    at_both = "far copies cost {} to {} nats at eight and sixteen times, {} to {} at four".format(*far, *four)
    assert at_both in prose("docs/lab/longer.md")
    of_all = bounds(["rerope", "leaky_rerope", "self_extend"], ["", "+infoscale", "+logn"], beyond=True)
    assert "far copies cost {} to {} nats".format(*of_all) in prose("docs/lab/negative.md")


def test_the_regret_of_extend_is_the_least_of_all_rules_but_those_that_are_named() -> None:
    found = regret.regrets()
    named = ("`self_extend+logn`", "`self_extend+infoscale`", "`rerope+yarn_temperature`")
    for rule, rows in found.items():
        apart = regret.apart(rows, found["`extend`"])
        assert not apart or (sum(apart) < 0) == (rule in named), rule


def test_what_is_said_of_conversions_is_in_the_rows() -> None:
    """By strings, which cost 4.13 nats to guess, at 16 and 64 times the window."""
    strings = {key: measured["strings"][2:] for key, measured in rows_of("conversion").items()}
    trained = {key: far for key, far in strings.items() if re.search(r"-\d+%$", key[0]) and "cosscale" not in key[0]}
    for (variant, seed), far in trained.items():
        if re.search(r"alibi|nope|scale_invariant", variant):
            assert min(far) > 4.1, variant
        elif variant.startswith("prope+map"):
            assert trained["prope-15%", seed][0] < far[0] < 3.1, variant  # behind p-RoPE alone, and far from guessing
    assert "retrieve nothing from 16 times the window on; p-RoPE, and the calibrated map on it, a part" in prose(
        "docs/lab/conversion.md"
    )


def test_what_adaptive_temperature_does_to_algorithms_is_in_the_rows() -> None:
    """Accuracy by size, trained under it less trained without, a mean of both seeds and of the tasks that are learned."""
    rows = rows_of("algorithms")
    learned, sizes = ("minimum", "insertion_sort", "binary_search"), rows["plain", 0]["sizes"]
    right = {key: [measured["as trained"][task]["exact"] for task in learned] for key, measured in rows.items()}
    less = [
        sum(
            100 * (a[n] - b[n])
            for seed in (0, 1)
            for a, b in zip(right["adaptive_temperature", seed], right["plain", seed], strict=True)
        )
        / 6
        for n in range(len(sizes))
    ]
    most, least = (f"{abs(bound(less)):.0f} points (at {sizes[less.index(bound(less))]})" for bound in (max, min))
    least = least.replace(" points", "")
    assert f"over these three tasks is between +{most} and −{least};" in prose("docs/lab/algorithms.md")


def test_tables_whose_programs_are_gone_are_their_rows() -> None:
    read = pages.read
    page = (ROOT / "docs" / "lab" / "calibration.md").read_text(encoding="utf-8")
    for row in read(pages.RESULTS / "logit-gaps-smollm2.json")["rows"]:
        (low, middle, high), layers = row["growth"], row["growth by layer"]
        growth = f"{middle:.2f} ({low:.2f} to {high:.2f}) | {1 - middle:.2f} | {min(layers):.2f} to {max(layers):.2f} |"
        assert f"| {row['text']} | {row['length']:,} | {growth}" in page
    page = (ROOT / "docs" / "lab" / "training.md").read_text(encoding="utf-8")
    for name in ("longce", "longce-control"):
        run = read(pages.RESULTS / f"recipes-{name}.json")
        losses = " | ".join(f"{run['measured']['trained'][length]['loss']:.3f}" for length in ("512", "4096"))
        assert f"recipes-{name}.json)) | {losses} | {run['cpu_seconds'] / 60:.1f} |" in page


def test_the_factors_of_stronger_temperatures_are_those_of_the_formulas() -> None:
    page = (ROOT / "docs" / "lab" / "copies.md").read_text()
    for times, name, exponents in (
        (1.5, "one and a half times its length", (1, 2, 3, 4, 6)),
        (2, "twice", (1, 2, 3, 4)),
        (4, "four times", (1, 2, 3, 4)),
    ):
        n = torch.tensor(int(times * 32768))
        found = [float(hf_longattn.methods.LogN(exponent=float(p)).formula(n, 256, 32768)) for p in exponents]
        yarn = float(hf_longattn.methods.YarnTemperature().formula(n, 256, 32768))
        cells = [f" {x:.2f} " for x in found] + [" "] * (5 - len(found)) + [f" {yarn:.2f} "]
        assert f"| {name} |{'|'.join(cells)}|" in page


def test_what_is_said_of_max_retrieval_in_100k_steps_is_in_the_rows() -> None:
    rows = {variant: m for (variant, _), m in rows_of("argmax-retrieval-100k").items()}
    baseline, normed = (rows[name]["plain"]["accuracy"] for name in ("baseline", "layer_norm"))
    sizes = rows["baseline"]["sizes"]
    ours = {n: 100 * x for n, x in zip(sizes, baseline, strict=True)}
    above = {n: ours[n] - x for n, x in zip(sizes, MAX_RETRIEVAL["baseline"], strict=True)}
    page = prose("docs/lab/max_retrieval.md")
    assert f"the baseline is {above[512]:.0f} points above the paper's at 512 items and {above[1024]:.0f} at 1k" in page
    theirs = {norm: ARGMAX[norm, "plain"] for norm in ("baseline", "layer_norm")}
    assert all(abs(ours[n] - x) < 1.2 for n, x in zip(sizes[:8], theirs["baseline"], strict=False))
    for with_norm, without, paper, plain in zip(normed, baseline, theirs["layer_norm"], theirs["baseline"], strict=True):
        assert 100 * (with_norm - without) > paper - plain  # an output norm gains more than there


@pytest.mark.parametrize(
    ("paper", "tables", "figures", "statements"),
    [
        ("Scale-invariant", 2, 9, "Definition 3.1, Definition 3.2, Definition 3.3, Definition 3.4"),
        ("Entropy Invariance", 10, 7, "Theorem 3.4, Theorem 3.5, Assumption 3.1, Assumption 3.3"),
        ("not Enough", 1, 9, "Lemma 2.1, Theorem 2.2, Proposition 3.1, Proposition 3.2, Corollary B.1, Remark C.1"),
        ("Vanishing", 6, 4, "Proposition 1"),
    ],
)
def test_every_table_figure_and_statement_of_a_paper_is_listed(paper: str, tables: int, figures: int, statements: str) -> None:
    (listed,) = (p["items"] for p in coverage.PAPERS if paper in p["paper"])
    named = set()
    for part in (part for item in listed for part in re.split(r", (?=[A-Z][a-z])", item["item"])):
        numbers = re.findall(r"(?:[B-C]\.)?\d+(?:\.\d+)?", part)
        named |= {f"{part.split()[0].removesuffix('s')} {number}" for number in numbers}
    wanted = {f"Table {n + 1}" for n in range(tables)} | {f"Fig. {n + 1}" for n in range(figures)}
    assert (wanted | set(statements.split(", "))) - named == set()
    for item in listed:
        assert item.keys() & {"rows", "claims", "other", "cost"}, item
        assert set(item.get("rows", ())) <= set(EXPERIMENTS), item
        assert "found" in item or "not run" in coverage.run(item), item


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "reference" / "methods").glob("*.md")), ids=lambda p: p.stem)
def test_a_methods_page_names_reproduction_recipe_and_contrary_results(page: Path) -> None:
    if page.stem in ("README", "combinations"):
        return
    text = page.read_text(encoding="utf-8")
    part = text[text.index("## Reproduction") : text.index("## Paper")]
    assert [line for line in ("- **Reproduced:**", "- **Recipe:**", "- **Against ") if line not in part] == []
    assert "](../../lab/" in part or "not run" in part


def test_what_twelve_minutes_of_training_buy_is_in_the_rows() -> None:
    """At half strength ahead of every untrained row and the earlier adapter in every column; the control is ahead on prose."""
    rows = {r["label"]: r for r in longer_on_model.load_all() if (r["length"], r["text"]) == (16384, "pride-and-prejudice")}
    rows = {label: r for label, r in rows.items() if r["model"].startswith("SmolLM2")}
    ours = "rerope(window 4096) + infoscale, rerope-infoscale-pose"
    best, full, page = rows.pop(f"{ours}-half"), rows.pop(ours), prose("docs/lab/longer.md")
    control = rows.pop("rerope(window 4096) + infoscale, control")
    rows = {label: r for label, r in rows.items() if "control" not in label}  # mixtures with it
    assert len(rows) >= 20
    for row in rows.values():
        assert all(a < b for a, b in zip(longer_on_model.summary(best), longer_on_model.summary(row), strict=True))
    for name in ("rerope(window 4096)", "rerope(window 4096) + infoscale", "rerope(window 4096), pose-rerope-half"):
        for group in longer_on_model.GROUPS:
            mean, half = mean_interval(paired.differences([(rows[name], best)], group))
            assert mean > half, name
    assert "beats every untrained setting in every column" in page
    assert "each difference is measurable" in page
    behind = [a - b for a, b in zip(longer_on_model.summary(best), longer_on_model.summary(control), strict=True)]
    assert min(behind[:2]) > 0 > max(behind[2:])  # the control is ahead on prose, and finds less
    price = longer_on_model.summary(full)[1] - longer_on_model.summary(control)[1]
    recipe = prose("recipes/continue_lora.yaml").replace("# ", "")
    last = {name: longer_on_model.summary(row)[-1] for name, row in rows.items()}
    far, plain = longer_on_model.summary(full)[-1], longer_on_model.summary(control)[-1]
    untrained = last["rerope(window 4096) + infoscale"]
    assert f"from {untrained:.2f} to {far:.2f} nats; plain leaves them at {plain:.2f} and is {price:.2f} better" in recipe
    assert f"from {last['unmodified']:.2f} to {last['rerope(window 4096)']:.2f} nats" in recipe


def test_pages_name_the_gpu_that_rows_are_from() -> None:
    runs, rows = gpu_rows.read()
    assert {row["run"] for row in rows} == set(runs)
    for run in runs.values():
        assert run["gpu"] in prose("docs/speed.md")
        assert all(run[key] in prose("docs/speed.md") for key in ("torch", "transformers", "triton", "date", "commit"))
    assert "an H100" in prose("README.md")


def test_lines_of_a_log_become_rows_under_one_set_of_names(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        'ON {"gpu": "b"}\nROW {"part": "att", "method": "none", "n": 8, "D": 4}\nROW {"part": "whole", "seconds": 3}\n'
    )
    (row,) = gpu_rows.rows_of(log)
    assert row == {"part": "attention", "method": "unmodified", "length": 8, "head_dim": 4}
    gpu_rows.write({"a": gpu_rows.machine_of([log, log])}, [{"run": "a"} | row], tmp_path / "file")
    assert gpu_rows.read(tmp_path / "file") == ({"a": {"gpu": "b"}}, [{"run": "a"} | row])


def test_the_table_of_engines_has_every_method_and_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    rows = engines_table.rows_of(page)
    assert set(rows) == set(list_methods())
    assert engines_table.with_served(page) == page
    cells = {cell for row in rows.values() for cell in row}
    messages = re.findall(r"^(\d+)\. \.\.\. ", page, re.MULTILINE)
    assert cells <= {"exact", *(f"refused ({n})" for n in messages)}
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for name in set(re.findall(r"`(test_\w+)`", page)):
        assert f"def {name}(" in sources, name
