"""RULER's kinds of question: solved again from their texts, beside lm-evaluation-harness, and asked of a model."""

from __future__ import annotations

import importlib
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from helpers import crossed
from transformers import AutoModelForCausalLM

import hf_longattn
from hf_longattn.evaluation import EvalOptions, Runner
from hf_longattn.evaluation.results import Results
from hf_longattn.evaluation.tasks import ruler_prompts as prompts
from hf_longattn.evaluation.tasks.ruler import THRESHOLD
from hf_longattn.evaluation.tasks.ruler_data import FILES, RulerData
from hf_longattn.evaluation.tasks.ruler_kinds import (
    DEPTHS,
    KINDS,
    RULER,
    Source,
    f1_of_nodes,
    match_all,
    match_any,
)
from hf_longattn.evaluation.tasks.text import words
from hf_longattn.evaluation.tasks.written import CHUNK


def prose(count: int = 6000, seed: int = 0) -> str:
    """Sentences of made-up words."""
    rng = random.Random(seed)
    known = words(rng, 900)
    written = [rng.choice(known) for _ in range(count)]
    return " ".join(w + "." * (n % 9 == 8) for n, w in enumerate(written))


SOURCE = Source(prose(), lambda text: len(text.split()))


# solved from their texts --------------------------------------------------------------------------------------------------


def solve_niah(text: str) -> list[str]:
    asked = re.search(r"special magic \w+ for (.*) mentioned in the provided text\?$", text)[1]  # type: ignore[index]
    keys = re.split(r", and |, ", asked)
    held = re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.(?:\s|$)", text)
    return [value for key in keys for k, value in held if k == key]


def solve_vt(text: str) -> list[str]:
    asked = re.findall(r"assigned the value (\d+) in the text above", text)[-1]
    *_, own = text.split("Memorize and track")
    (found,) = re.findall(rf"VAR (\w+) = {asked}\b", own)
    chain = [found]
    for b, a in re.findall(r"VAR (\w+) = VAR (\w+)", own):
        chain += [b] * (a == chain[-1])
    return chain


def solve_cwe(text: str) -> list[str]:
    *_, own = text.split("Below is a numbered list")
    counts = Counter(re.findall(r"\d+\. (\S+)", own.split("\nQuestion:")[0]))
    assert len(set(counts.values())) == 2
    return [word for word, n in counts.items() if n == max(counts.values())]


def solve_fwe(text: str) -> list[str]:
    coded = text.removeprefix(prompts.FWE[0].split("{")[0]).split("\nQuestion:")[0].split()
    (dots, _), *three = Counter(coded).most_common(4)
    assert dots == "..."
    return [word for word, _ in three]


def solve_qa(text: str) -> list[str]:
    documents = [d.split("\n", 1)[1].split("\n\n")[0] for d in text.split("Document ")[1:]]
    before, after = re.search(r'gap in "(.*) ____ (.*)"\?', text).groups()  # type: ignore[union-attr]
    found = [m[1] for d in documents for m in [re.search(rf"{re.escape(before)} (\w+) {re.escape(after)}", d)] if m]
    if "comes right after" not in text:
        return found
    (word,) = found
    others = [d for d in documents if before not in d and re.search(rf"\b{word}\b", d)]
    return [m[1] for d in others for m in [re.search(rf"\b{word} (\w+)", d)] if m]


def solve_key_value(text: str) -> list[str]:
    held = json.loads(re.search(r"\{.*\}", text, re.DOTALL)[0])  # type: ignore[index]
    return [held[re.search(r'Key: "(.*)"', text)[1]]]  # type: ignore[index]


def solve_graphwalks(text: str) -> list[str]:
    edges = re.findall(r"(\w+) -> (\w+)", text)
    start = re.search(r"from the node (\w+) find", text)[1]  # type: ignore[index]
    away, last = {start: 0}, [start]
    while last:
        last = list(dict.fromkeys(b for a, b in edges if a in last and b not in away))
        away |= {b: max(away.values()) + 1 for b in last}
    return [node for node, steps in away.items() if steps == 2]


def solver(kind: str) -> Callable[[str], list[str]]:
    return globals()["solve_" + re.sub(r"^(niah|qa)_.*", r"\1", kind)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_answers_are_what_the_text_says(kind: str) -> None:
    for seed, length in ((0, 3000), (1, 3000), (2, 5000)):
        size = {"cwe": 60, "fwe": 600}.get(kind, KINDS[kind].least + 8)
        asked = KINDS[kind].make(random.Random(seed), size, length, SOURCE)
        assert sorted(solver(kind)(asked.text)) == sorted(asked.answers)
        assert asked == KINDS[kind].make(random.Random(seed), size, length, SOURCE)
        assert all(answer not in asked.begins for answer in asked.answers)
    assert len(asked.answers) == {"vt": 5, "cwe": 10, "fwe": 3, "niah_multivalue": 4, "niah_multiquery": 4}.get(
        kind, len(asked.answers) if kind == "graphwalks" else 1
    )


# beside the harness -------------------------------------------------------------------------------------------------------


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """The harness's modules of RULER; lists of words and a splitter of sentences, which it fetches, are made up."""
    nltk = pytest.importorskip("nltk", reason='NO HARNESS: pip install "hf_longattn[lm-eval]"')
    pytest.importorskip("lm_eval", reason='NO HARNESS: pip install "hf_longattn[lm-eval]"')
    known = words(random.Random(5), 3000)
    lists = {"nouns": known[:50], "adjectives": known[50:90], "verbs": []}
    lists |= {"noun": known[:1500], "adjective": known[1500:2500], "verb": known[2500:]}
    stub = ModuleType("wonderwords")
    stub.RandomWord = lambda: SimpleNamespace(_categories=lists)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wonderwords", stub)
    monkeypatch.setattr(nltk.data, "find", lambda *_: None)
    random.seed(0)

    def module(name: str) -> Any:
        name = f"lm_eval.tasks.ruler.{name}"
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    yield module
    for name in [n for n in sys.modules if n.startswith("lm_eval.tasks.ruler.")]:
        del sys.modules[name]


def by_words(text: str) -> Any:
    return SimpleNamespace(input_ids=text.split())


#: What the harness is told of its needles, by kind.
NEEDLES: dict[str, dict[str, Any]] = {
    "niah_single_1": {"type_haystack": "repeat"},
    "niah_single_2": {"type_haystack": "essay"},
    "niah_single_3": {"type_haystack": "essay", "type_needle_v": "uuids"},
    "niah_multikey_1": {"type_haystack": "essay", "num_needle_k": 4},
    "niah_multikey_2": {"type_haystack": "needle"},
    "niah_multikey_3": {"type_haystack": "needle", "type_needle_k": "uuids", "type_needle_v": "uuids"},
    "niah_multivalue": {"type_haystack": "essay", "num_needle_v": 4},
    "niah_multiquery": {"type_haystack": "essay", "num_needle_q": 4},
}


def of_the_harness(kind: str, harness: Callable[[str], Any]) -> tuple[str, str, list[str]]:
    """A sample of its own: question, what the answer begins with, answers."""
    if kind in NEEDLES:
        made = harness("prepare_niah")
        made.cached_sent_tokenize = lambda text: re.split(r"(?<=\.)\s+", text)
        template = harness("niah_utils").TEMPLATE
        hay = SOURCE.text if NEEDLES[kind]["type_haystack"] == "essay" else made.get_haystack(NEEDLES[kind]["type_haystack"])
        given = {"type_needle_k": "words", "type_needle_v": "numbers"} | NEEDLES[kind]
        (doc,) = made.generate_samples(hay, by_words, max_seq_length=3000, template=template, num_samples=1, **given)
    elif kind == "vt":
        made = harness("vt_utils").sys_vartrack_w_noise_random
        (example,) = made(by_words, 1, 500, incremental=5)
        (doc,) = made(by_words, 1, 3000, icl_example=example)
    elif kind == "cwe":
        (doc,) = harness("cwe_utils").sys_word_pair_random(1, 5000, tokenizer=by_words)
    else:
        (doc,) = harness("fwe_utils").sys_kwext(by_words, 3000, num_samples=1)
    begins = doc["gen_prefix"].replace("assgined", "assigned")  # a misspelling that RULER has mended since
    return doc["input"].replace("assgined", "assigned"), begins, doc["outputs"]


@pytest.mark.parametrize("kind", [kind for kind in RULER if not kind.startswith("qa")])
def test_questions_are_those_of_the_harness(kind: str, harness: Callable[[str], Any]) -> None:
    """Its samples have our wording, our number of answers, and answers that are found in the same way."""
    text, begins, answers = of_the_harness(kind, harness)
    assert sorted(solver(kind)(text)) == sorted(answers)
    ours = KINDS[kind].make(random.Random(0), 500, 4096 if kind == "cwe" else 3000, SOURCE)
    assert len(ours.answers) == len(answers)
    template = {"vt": prompts.VT, "cwe": prompts.CWE, "fwe": prompts.FWE}.get(
        kind, prompts.NIAH if kind in ("niah_multivalue", "niah_multiquery") else prompts.NIAH_ONE
    )
    for question, beginning in ((text, begins), (ours.text, ours.begins)):
        last = question[question.rindex(template[0].split("{")[0][:40]) :]
        pattern = re.sub(r"\\\{\w+\\\}", "(.*)", re.escape(template[0].strip()))
        assert re.fullmatch(pattern, last.strip(), re.DOTALL)
        assert re.fullmatch(re.sub(r"\\\{\w+\\\}", "(.*)", re.escape(template[1].strip())), beginning.strip())
    if kind == "cwe":
        counts = [Counter(Counter(re.findall(r"\d+\. (\S+)", t.split("Below is")[-1])).values()) for t in (text, ours.text)]
        assert [sorted(c) for c in counts] == [[3, 30]] * 2
        assert [c[30] for c in counts] == [10] * 2


def test_the_questions_about_documents_are_worded_as_the_harness_has_them(harness: Callable[[str], Any]) -> None:
    made = harness("qa_utils")
    assert (made.TEMPLATE, made.CONFIG["answer_prefix"]) == (prompts.QA[0], prompts.QA[1].strip())
    asked = KINDS["qa_1"].make(random.Random(0), 4, 3000, SOURCE)
    documents = re.findall(r"Document \d+:\n(.*?)\n\n", asked.text)
    query = asked.text.rpartition("Question: ")[2]
    made.random = SimpleNamespace(Random=lambda seed: SimpleNamespace(shuffle=lambda x: None), sample=random.sample)
    theirs, answers = made.generate_input_output(
        0, 4, [{"query": query, "outputs": list(asked.answers), "context": [0, 1, 2, 3]}], documents
    )
    assert (theirs, tuple(answers)) == (asked.text, asked.answers)


def test_depths_are_those_of_the_harness(harness: Callable[[str], Any]) -> None:
    assert harness("prepare_niah").DEPTHS == DEPTHS


WRITTEN = ["", "  \x00\n", "7421", "it is 7421 and\x0b ABC, def", "Xabcx 742", "DEF 7421 abc", "abc\ndef\t7421"]


def test_scores_are_those_of_the_harness(harness: Callable[[str], Any]) -> None:
    made = harness("common_utils")
    for written in WRITTEN:
        for answers in (["7421"], ["7421", "abc", "DEF"], ["nothing"], ["a b", "742"]):
            theirs = made.process_results({"max_length": 4096, "outputs": answers}, [written])["4096"]
            assert match_all(written, answers) == pytest.approx(theirs, abs=1e-12)
        theirs = made.process_results_part({"max_length": 4096, "outputs": ["7421"]}, [written])["4096"]
        assert match_any(written, ["7421"]) == theirs
    # of several answers RULER takes any, where the harness has their share
    assert match_any("7421", ["7421", "abc"]) == 1


def test_lists_of_nodes_are_scored_by_their_overlap() -> None:
    assert f1_of_nodes(" aa, bb]. cc", ["aa", "bb"]) == 1
    assert f1_of_nodes("[aa, cc", ["aa", "bb"]) == 0.5
    assert f1_of_nodes("aa, aa]", ["aa", "bb"]) == pytest.approx(2 / 3)
    assert (f1_of_nodes("]", []), f1_of_nodes("aa]", []), f1_of_nodes("]", ["aa"])) == (1, 0, 0)


# asked of a model ---------------------------------------------------------------------------------------------------------

CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    """With a token a character: lengths are in characters."""
    path = tiny.save(tmp_path_factory.mktemp("ruler") / "model", trained=4096)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(path)
    return path


GRAPH: dict[str, Any] = {"tasks": "graphwalks", "lengths": [1200], "samples": 1}


def evaluated(model: Path, **options: Any) -> Any:
    return hf_longattn.evaluate(str(model), prose(), ["logn"], **{"lengths": [2000, 3000], "samples": 2, **options})


@pytest.mark.slow
@pytest.mark.parametrize("chat", [False, True])
def test_questions_and_answers_fill_their_length(model: Path, chat: bool) -> None:
    kinds = ["niah_single_1", "niah_multivalue", "vt"]
    results = evaluated(model, tasks="ruler", kinds=kinds, chat=chat)
    assert len(results.rows) == 2 * 2 * 2 * 3
    for row in results.rows:
        new = KINDS[row["kind"]].new_tokens
        assert row["length"] - 200 <= row["tokens"] + new <= row["length"]
        assert row["score"] == KINDS[row["kind"]].score(row["written"], row["expected"])
        # the same for every setting
        (other,) = [r for r in results.rows if (r["length"], r["which"]) == (row["length"], row["which"]) and r is not row]
        assert (other["tokens"], other["expected"]) == (row["tokens"], row["expected"])
    section = next(s for s in results.sections() if s.title == "RULER's questions over your text")
    assert [t.title for t in section.tables][:2] == [
        "Answers found, percent",
        "Less the unmodified model, points, paired by question",
    ]
    assert section.tables[2].columns == ["setting", *kinds]


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("windows", crossed([False, True], 2))
def test_what_is_written_is_what_the_model_says(windows: bool, model: Path, tmp_path: Path) -> None:
    """Greedily, from whole texts; with sliding windows, where questions are read in pieces, too."""
    if windows:
        types = ["sliding_attention", "full_attention"]
        sizes = {"layer_types": types, "sliding_window": 64, "head_dim": 8, "num_key_value_heads": 1}
        model = tiny.save(tmp_path / "model", trained=4096, kind="Gemma3Text", **sizes)
    (row,) = (r for r in evaluated(model, **GRAPH).rows if r["setting"] == "unmodified")
    runner = Runner(EvalOptions(str(model), prose(), **GRAPH))  # type: ignore[arg-type]  # it takes one text, too
    question, ids = runner.tasks[0].question("graphwalks", 1200, 0)  # type: ignore[attr-defined]
    assert len(ids) == row["tokens"] > CHUNK
    loaded, new = AutoModelForCausalLM.from_pretrained(model).eval(), [0]
    while len(new) <= KINDS["graphwalks"].new_tokens and tiny.CHARACTERS[new[-1]] not in ("</s>", "]"):
        new.append(int(loaded(torch.tensor([ids + new[1:]])).logits[0, -1].argmax()))
    assert row["written"] == runner.corpus.tokenizer.decode(new, skip_special_tokens=True)
    assert row["expected"] == question.answers


def test_an_answer_that_is_right_ends(model: Path) -> None:
    for name, kind in KINDS.items():
        right = ["abcdef", "fedcba"] if name == "graphwalks" else ["abc", "def"]
        assert kind.done(f"x {' '.join(right)}]", right)
        assert not kind.done("nothing", right)


def test_effective_lengths() -> None:
    scores = {("unmodified", 1): 0.9, ("unmodified", 2): 0.8, ("unmodified", 3): 0.0}
    scores |= {("logn", 1): 0.7, ("logn", 2): 0.9, ("logn", 3): 0.78}
    rows = [
        {"setting": s, "task": "ruler", "length": n, "which": f"vt {i}", "kind": "vt", "score": x, "seconds": 1.0}
        for (s, n), x in scores.items()
        for i in range(2)
    ]
    assert THRESHOLD == 85.6
    (section,) = [s for s in Results(rows, ["unmodified", "logn"]).sections() if s.title == "RULER's questions over your text"]
    assert [row[-2:] for row in section.tables[0].rows] == [[1, 2], [2, 0]]
    assert [row[0] for row in section.tables[1].rows] == ["logn"]


@pytest.fixture
def rulers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as RULER's own files are, of made-up contents, and its word lists."""
    essay = {"text": prose(3000)}
    articles = [
        [
            {
                "context": f"Article {a} paragraph {p} says place{a}x{p}. " + prose(30, seed=10 * a + p),
                "qas": [
                    {"question": f"Where is {a} {p}?", "answers": [{"text": f"place{a}x{p}"}], "is_impossible": False},
                    {"question": "No answer?", "answers": [], "is_impossible": True},
                ],
            }
            for p in range(5)
        ]
        for a in range(30)
    ]
    squad = {"data": [{"paragraphs": article} for article in articles]}
    hotpotqa = [
        {
            "question": f"Both {n}?",
            "answer": f"only{n}",
            "context": [[f"T{n} {i}", [f"only{n}. "] * (i < 2)] for i in range(10)],
        }
        for n in range(40)
    ]
    for name, content in zip(FILES, (essay, squad, hotpotqa), strict=True):
        (tmp_path / name).write_text(json.dumps(content))
    assets = tmp_path / "wonderwords" / "assets"
    assets.mkdir(parents=True)
    for kind in ("noun", "adjective", "verb"):
        (assets / f"{kind}list.txt").write_text("\n".join(f"{kind}{n}" for n in range(500)))
        (assets / "__init__.py").touch()
    (assets.parent / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("wonderwords", "wonderwords.assets"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_questions_of_rulers_own_data(rulers: Path) -> None:
    """Keys are an adjective and a noun, essays its own; SQuAD's other paragraphs come first, then others; HotpotQA's ten are
    all there."""
    source = RulerData(rulers, lambda text: len(text.split()))

    def made(kind: str, size: int) -> Any:
        return KINDS[kind].make(random.Random(5), size, 4096, source)

    needle = made("niah_single_2", 500)
    assert re.search(r"number for adjective\d+-noun\d+ mentioned", needle.text)
    assert solve_niah(needle.text) == [*needle.answers]
    assert " ".join(source.essay(50)) in needle.text[:2000]
    for size in (3, 5, 20):
        asked = made("qa_1", size)
        number, paragraph = re.search(r"Where is (\d+) (\d+)\?$", asked.text).groups()  # type: ignore[union-attr]
        shown = re.findall(r"Article (\d+) paragraph (\d+) ", asked.text)
        assert len(shown) == size
        assert asked.answers == (f"place{number}x{paragraph}",)
        assert (number, paragraph) in shown
        assert len([a for a, _ in shown if a == number]) == min(size, 5)
    both = made("qa_2", 12)
    which = re.search(r"Both (\d+)\?$", both.text)[1]  # type: ignore[index]
    titles = re.findall(r"\nT(\d+) \d\n", both.text)
    assert both.answers == (f"only{which}",)
    assert titles.count(which) == 10
    assert len(titles) == 12
    assert set(re.findall(r"\d+\. ([a-z]+)\d+", made("cwe", 60).text)) == {"noun", "adjective", "verb"}
    assert made("qa_1", 5) == made("qa_1", 5)


@pytest.mark.slow
def test_rulers_own_data_is_measured_without_a_text(model: Path, rulers: Path) -> None:
    options = {"tasks": "ruler", "kinds": "niah_single_1,qa_2", "lengths": [2048], "samples": 1, "ruler_data": str(rulers)}
    results = hf_longattn.evaluate(str(model), {}, **options)
    (section,) = [s for s in results.sections() if s.tables]
    assert section.title == "RULER, its own data"
    assert "your text" not in section.text
    (rulers / FILES[1]).unlink()
    with pytest.raises(ValueError, match=r"holds no squad\.json: give the folder of RULER's files"):
        hf_longattn.evaluate(str(model), {}, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": "loss", "ruler_data": "there"}, "ruler_data is for the task ruler, which is not among the tasks"),
        ({"tasks": "loss", "kinds": "vt"}, "kinds is for the task ruler, which is not among the tasks"),
        ({"tasks": "ruler", "kinds": "niah_singel_1"}, "unknown kind 'niah_singel_1'; did you mean 'niah_single_1'"),
        ({"tasks": "key_value", "lengths": [200]}, "task key_value, key_value at 200 tokens: no room for a question"),
        ({"tasks": "ruler", "kinds": "qa_1", "lengths": [4096, 90_000]}, "qa_1 at 90000 tokens: the text gives .* too few"),
    ],
)
def test_what_cannot_be_asked_is_refused(model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluated(model, **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_harness_runs_without_a_network_and_scores_alike(
    model: Path, tmp_path: Path, harness: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its frequent words, which need neither text nor list."""
    from lm_eval.__main__ import cli_evaluate

    own = f"pretrained={model},attn_implementation=logn,max_length=4200"
    arguments = ["lm_eval", "run", "--model", "hf", "--model_args", own, "--tasks", "ruler_fwe", "--device", "cpu"]
    arguments += ["--metadata", '{"max_seq_lengths": [4096]}', "--limit", "2", "--log_samples", "--output_path", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    cli_evaluate()
    (samples,) = tmp_path.rglob("samples_ruler_fwe*.jsonl")
    rows = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert row["4096"] == match_all(row["filtered_resps"][0], row["doc"]["outputs"])
