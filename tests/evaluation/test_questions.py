"""The user's own questions: how they are read, what counts as found, and what a model is asked and writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from helpers import crossed
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import hf_longattn
from hf_longattn.cli import app
from hf_longattn.evaluation import EvalOptions, Runner
from hf_longattn.evaluation.results import Results
from hf_longattn.evaluation.tasks.questions import entries_of, entry_of, f1, holds

RECORDS = [
    {"context": "abc " * 20, "question": "what?", "answer": "abc"},
    {"context": "def " * 60, "input": "which?", "answers": ["x", "def"], "dataset": "other keys are not read"},
    {"prompt": "Say 7:", "answer": 7},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    """With a token a character: lengths are in characters."""
    path = tiny.save(tmp_path_factory.mktemp("questions") / "model", trained=200)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
    tokenizer.save_pretrained(path)
    return path


def asked(model: Path, questions: Any = RECORDS, **options: Any) -> Any:
    options = {"lengths": [150, 400], "answer_tokens": 8} | options
    return hf_longattn.evaluate(str(model), settings=["logn"], questions=questions, **options)


def test_a_record_has_context_question_and_answers_or_a_prompt_of_its_own() -> None:
    entry = entry_of({"context": "C", "question": "Q?", "answer": "A"})
    assert entry == ("C\n\nQuestion: Q?\nAnswer:", "C\n\nQ?", ("A",), "Q?", True)
    # the names of LongBench and InfiniteBench
    assert entry_of({"context": "C", "input": "Q?", "answers": ["A", "B"], "length": 7}).answers == ("A", "B")
    # and SQuAD's
    assert entry_of({"context": "C", "question": "Q?", "answers": {"text": ["A"], "answer_start": [3]}}).answers == ("A",)
    assert entry_of({"question": "Q?", "answer": 7}) == ("Question: Q?\nAnswer:", "Q?", ("7",), "Q?", True)
    assert entry_of({"prompt": "P", "answers": ["A"]}) == ("P", "P", ("A",), "P", False)


@pytest.mark.parametrize(
    ("written", "answers", "found", "overlap"),
    [
        ("velvet OTTER.", ["The Velvet Otter"], True, 1.0),
        ("The answer is A.", ["A"], True, 1 / 2),
        ("It is the fox", ["fox"], True, 1 / 2),
        ("the keeper of a lighthouse", ["keeper of the lighthouse"], True, 1.0),
        ("velvet-otter-42", ["velvet otter"], True, 0.8),
        ("velvet", ["velvet otter"], False, 2 / 3),
        ("I know", ["no"], False, 0.0),
        ("", ["no"], False, 0.0),
        ("no, yes", ["maybe", "yes"], True, 2 / 3),
        ("yes yes", ["yes"], True, 2 / 3),
        ("答案是北京市。", ["北京"], True, 4 / 8),
        ("ｖｅｌｖｅｔ", ["velvet"], True, 1.0),
        ("It cost 1,000 dollars", ["1000"], True, 2 / 5),
        ("1,2", ["12"], False, 0.0),
        ("It costs 3.5.", ["3.5"], True, 1 / 2),
        ("3.5 crowns", ["3"], False, 0.0),
        ("\u22127", ["-7"], True, 1.0),
        ("7", ["-7"], False, 0.0),
        ("STRASSE", ["Straße"], True, 1.0),
        ("का", ["की"], False, 0.0),
        ("उत्तर दिल्ली है।", ["दिल्ली"], True, 1 / 2),
        ("서울입니다", ["서울"], True, 4 / 7),
        ("คำตอบคือเชียงใหม่", ["เชียงใหม่"], True, 2 / 3),
    ],
)
def test_found_and_f1(written: str, answers: list[str], found: bool, overlap: float) -> None:
    assert holds(written, answers) is found
    assert f1(written, answers) == pytest.approx(overlap)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "Q"}', r'qa\.jsonl, line 3: no answer: give "answer", a text, or "answers"'),
        ('{"question": "Q", "answers": []}', "line 3: no answer"),
        ('{"question": "Q", "answer": "?"}', "line 3: the answer '\\?' has no word"),
        ('{"context": "C", "answer": "A"}', 'line 3: give either "question"'),
        ('{"question": "Q", "prompt": "P", "answer": "A"}', 'line 3: give either "question"'),
        ('{"question": "Q", "answers": [["A"]]}', "line 3: no answer"),
        ('{"question": "Q", "answers": [null]}', "line 3: no answer"),
        ('{"context": ["C"], "question": "Q", "answer": "A"}', "line 3: the context is no text, but a list"),
        ('{"question": 7, "answer": "A"}', "line 3: the question is no text, but a int"),
        ('["Q", "A"]', "line 3: not a record with names, but a list"),
        ("{'question': 1}", "line 3: not JSON"),
    ],
)
def test_a_line_that_cannot_be_asked_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "qa.jsonl"
    file.write_text(f'{{"question": "Q", "answer": "A"}}\n\n{line}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        entries_of(file)


def test_a_file_may_have_a_byte_order_mark_other_line_ends_and_nulls(tmp_path: Path) -> None:
    record = {"context": "C\u2028\x85C", "question": "Q?", "input": None, "answers": None, "answer": "A"}
    line = json.dumps(record, ensure_ascii=False)  # these two end a line for str.splitlines, and not in JSON
    (tmp_path / "qa.jsonl").write_text(f"{line}\r\n{line}\r\n", encoding="utf-8-sig", newline="")
    assert entries_of(tmp_path / "qa.jsonl") == [entry_of(record)] * 2


def test_no_questions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "qa.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"qa\.jsonl holds no questions"):
        entries_of(tmp_path / "qa.jsonl")
    with pytest.raises(ValueError, match="the list of questions holds no questions"):
        entries_of([])


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("chat", [False, True])
def test_every_question_is_asked_at_its_own_length(model: Path, tmp_path: Path, chat: bool) -> None:
    file = tmp_path / "qa.jsonl"
    file.write_text("\n".join(map(json.dumps, RECORDS)), encoding="utf-8")
    results = asked(model, file, chat=chat)
    found = {(r["setting"], r["which"]): r for r in results.rows}
    assert {which: r["length"] for (s, which), r in found.items() if s == "logn"} == {"1": 150, "2": 400, "3": 150}
    tokenizer, plain = tiny.tokenizer(), AutoModelForCausalLM.from_pretrained(model).eval()
    for number, entry in enumerate(entries_of(RECORDS), 1):
        row = found["unmodified", str(number)]
        text = f"<user>{entry.chat}<assistant>" if chat else entry.plain
        ids = tokenizer(text, add_special_tokens=chat is False).input_ids
        assert row["tokens"] == len(ids)
        new: list[int] = []
        while len(new) < 8 and (not new or new[-1] != tokenizer.eos_token_id):
            new.append(int(plain(torch.tensor([ids + new])).logits[0, -1].argmax()))
            if entry.line and not chat and "\n" in tokenizer.decode(new).lstrip():
                break
        said = tokenizer.decode(new, skip_special_tokens=True).strip()
        assert row["written"] == (said.partition("\n")[0] if entry.line and not chat else said)
        assert row["score"] == holds(row["written"], entry.answers)
        right = [tokenizer(("" if chat else " ") + x, add_special_tokens=False).input_ids for x in entry.answers]
        losses = [plain(torch.tensor([ids + x])).logits[0, -len(x) - 1 : -1].log_softmax(-1) for x in right]
        nats = [-float(of[range(len(x)), x].mean()) for of, x in zip(losses, right, strict=True)]
        assert row["loss"] == pytest.approx(min(nats), abs=1e-4)
    rows = {(r["setting"], r["which"]): {**r, "seconds": 0, "cpu_seconds": 0} for r in asked(model, chat=chat).rows}
    assert rows == {key: {**r, "seconds": 0, "cpu_seconds": 0} for key, r in found.items()}


CONTEXT = "the quick brown fox jumps over the lazy dog, " * 6
PAIRS = {"who?": "fox", "what? say it": "dog", "w": "jumps"}
SHARED = [{"context": CONTEXT, "question": question, "answer": answer} for question, answer in PAIRS.items()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", crossed(["rerope:window=16", "logn", "windowed:window=64", "self_extend:window=16", "scale_invariant"], 2)
)
@pytest.mark.parametrize("kind", crossed(["Llama", "Gemma3Text"], 2))
def test_a_context_is_read_once_for_all_its_questions(tmp_path: Path, kind: str, method: str) -> None:
    """The rows are those of each question alone. A cache whose layers have windows cannot go back, and is read anew."""
    windows: Any = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32, "head_dim": 8}
    windows = {} if kind == "Llama" else windows | {"num_key_value_heads": 1}
    path = tiny.save(tmp_path / "model", trained=200, kind=kind, **windows)
    options: Any = {"settings": [method], "lengths": [400], "answer_tokens": 8}
    alone = [row for record in SHARED for row in hf_longattn.evaluate(str(path), questions=[record], **options).rows]
    runner = Runner(EvalOptions(str(path), questions=SHARED, **options))
    task: Any = runner.tasks[0]
    for setting in runner.options.settings:
        model, read = runner.load(setting), []

        def seen(module: Any, args: Any, given: Any, read: list[int] = read) -> None:
            if given.get("input_ids") is not None:  # not where a head is given its hidden states
                read.append(given["input_ids"].shape[1])

        model.model.register_forward_pre_hook(seen, with_kwargs=True)
        for number, expected in enumerate([r for r in alone if r["setting"] == setting.name], 1):
            read.clear()
            row = task.measure(number, setting.name, model)
            assert row["loss"] == pytest.approx(expected["loss"], abs=2e-4)
            assert (row["written"], row["tokens"]) == (expected["written"], expected["tokens"])
            whole = number == 1 or kind != "Llama"
            assert (sum(read) > len(CONTEXT)) is whole


def test_tables_and_sentence() -> None:
    right = {("unmodified", 150): 5, ("logn", 150): 5, ("unmodified", 400): 0, ("logn", 400): 8}
    rows = [
        {"setting": s, "task": "questions", "length": n, "which": f"{n} {i}", "written": f"{x} " * 99}
        | {"score": float(i < x), "f1": x / 10, "loss": 9.0 - x, "asked": f"question\n{i}", "expected": ["a", "b"]}
        for (s, n), x in right.items()
        for i in range(10)
    ]
    results = Results(rows, ["unmodified", "logn"], protocol={"answer_tokens": 8})
    (section,) = results.sections()
    found, less, loss, lower, overlap, differ = section.tables
    assert found.columns == ["setting", "up to 150", "up to 400"]
    assert [row[1:] for row in found.rows] == [["50.0 (24–76)", "0.0 (0–28)"], ["50.0 (24–76)", "80.0 (49–94)"]]
    assert less.rows == [["logn", "+0.000 ± 0.000", "+80.000 ± 30.160"]]
    assert loss.rows == [["unmodified", 4.0, 9.0], ["logn", 4.0, 1.0]]
    assert lower.rows == [["logn", "+0.000 ± 0.000", "−8.000 ± 0.000"]]
    assert overlap.rows == [["unmodified", 0.5, 0.0], ["logn", 0.5, 0.8]]
    assert differ.columns == ["question", "right", "unmodified", "logn"]
    assert differ.rows == [[f"question {i}", "a", "0 " * 49 + "0…", "8 " * 49 + "8…"] for i in range(8)]
    assert results.headline() == "Right answers to 20 questions (questions): logn 65%, unmodified 25%; +40 ± 24 points."


def test_one_question_has_no_interval_and_of_equal_settings_the_likelier_is_named() -> None:
    rows = [
        {"setting": s, "task": "questions", "length": 150, "which": "1", "written": s, "score": x, "f1": x, "loss": loss}
        for s, x, loss in (("unmodified", 0.0, 3.0), ("logn", 1.0, 2.0), ("rerope", 1.0, 1.0))
    ]
    results = Results(rows, ["unmodified", "logn", "rerope"], protocol={"answer_tokens": 8})
    assert results.headline() == "Right answers to 1 question (questions): rerope 100%, unmodified 0%; +100 points."
    alike = Results([r | {"written": "", "loss": 3.0} for r in rows], ["unmodified", "logn", "rerope"])
    assert "Equal to the unmodified model in all that they write: logn, rerope. By design" in alike.headline()


HYBRID: Any = {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 1, "block_multiple_of": 8}
STATE: Any = {"num_key_value_heads": 1, "num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4}


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {"use_cache": False}),  # as a checkpoint that was trained with gradient checkpointing may say
        ("Lfm2", HYBRID),  # reads on from a cache, and writes into it in place
        ("Jamba", STATE),  # does not read on
    ],
)
def test_losses_and_words_are_those_of_whole_readings(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    path = tiny.save(tmp_path / "model", trained=400, kind=kind, **changes)
    tokenizer, plain = tiny.tokenizer(), AutoModelForCausalLM.from_pretrained(path).eval()
    records = [
        *SHARED[:2],
        SHARED[1],
        {"prompt": CONTEXT, "answer": "x"},
        {"prompt": "a", "answer": "x"},
    ]  # one twice; a beginning
    rows = asked(path, records, lengths=[400]).rows
    for entry, row in zip(entries_of(records), rows, strict=False):  # the unmodified model's, which come first
        ids, answer = (tokenizer(text).input_ids for text in (entry.plain, f" {entry.answers[0]}"))
        logits = plain(torch.tensor([ids + answer]), use_cache=False).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        assert row["loss"] == pytest.approx(-float(logits[range(len(answer)), answer].mean()), abs=2e-4)
        first = plain(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()
        assert row["written"][:1] == tokenizer.decode(first).strip()[:1]


@pytest.mark.slow
@pytest.mark.parametrize("says", [{"cache_implementation": "static"}, {"return_dict_in_generate": True}])
def test_what_a_generation_config_says_of_caches_does_not_count(model: Path, tmp_path: Path, says: dict[str, Any]) -> None:
    path = Path(shutil.copytree(model, tmp_path / "model"))
    config = path / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | says))
    written = [r["written"] for r in asked(path, RECORDS[:1]).rows]
    assert written == [r["written"] for r in asked(model, RECORDS[:1]).rows]


@pytest.mark.slow
def test_a_shorter_length_counts_no_question_twice(model: Path, tmp_path: Path) -> None:
    asked(model, out=tmp_path / "report", lengths=[400])
    for lengths in ([150, 400], [400]):
        results = asked(model, out=tmp_path / "report", lengths=lengths)
        assert {(r["which"], r["length"]) for r in results.rows} == {("1", 150), ("2", 400), ("3", 150)}
        assert len(results.rows) == 2 * len(RECORDS)


def test_a_cache_that_no_later_question_shares_is_not_kept(model: Path) -> None:
    runner = Runner(EvalOptions(str(model), questions=SHARED[:2], lengths=[400], answer_tokens=2))
    task: Any = runner.tasks[0]
    loaded = runner.load(runner.options.settings[0])
    task.measure(1, "unmodified", loaded)
    assert task.last is not None
    task.measure(2, "unmodified", loaded)
    assert task.last is None


def test_questions_beyond_the_longest_length_are_left_out_with_a_warning(model: Path) -> None:
    with pytest.warns(UserWarning, match="1 of 3 questions are left out. They take more than the longest length, 150 tokens"):
        results = asked(model, lengths=[150])
    assert {r["which"] for r in results.rows} == {"1", "3"}


def test_rows_of_another_question_are_refused(model: Path, tmp_path: Path) -> None:
    asked(model, RECORDS[:1], out=tmp_path / "report")
    with pytest.raises(ValueError, match="questions"):
        asked(model, [RECORDS[0] | {"answer": "other"}], out=tmp_path / "report")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": "loss"}, "questions is for the task questions, which is not among the tasks"),
        ({"tasks": "questions", "questions": None}, "the task questions asks your own: give them"),
        (
            {"lengths": [20], "questions": RECORDS[:2]},
            r"every question .* take more than the longest length, 20 tokens: give one of \d+ to ask",
        ),
        ({"answer_tokens": 0}, "answer_tokens must be at least 1"),
        ({"questions": [{"prompt": "", "answer": "A"}]}, "question 1 is empty: its prompt has no tokens"),
    ],
)
def test_what_cannot_be_asked_is_refused(model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        asked(model, **options)


def test_a_chat_template_that_raises_is_named(model: Path) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{{ raise_exception('a system turn comes first') }}"
    with pytest.raises(ValueError, match=r"user's turn alone \(a system turn comes first\): leave out chat"):
        asked(model, tokenizer=tokenizer, chat=True)


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("{{ messages[0]['content'] }}{% if enable_thinking is false %}<think></think>{% endif %}", "7:<think></think>"),
        ("{{ messages[0]['content'] }}{{ '</think>' if thinking is false else '<think>' }}", "7:</think>"),
        ("{{ messages[0]['content'] }}<think>\n", "7:<think>\n\n</think>\n\n"),
    ],
)
def test_a_model_that_thinks_is_asked_to_answer_at_once(model: Path, template: str, ends: str) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    options = EvalOptions(str(model), questions=RECORDS[2:], lengths=[400], chat=True, tokenizer=tokenizer)
    task: Any = Runner(options).tasks[0]
    assert task.asked[1][1] == tokenizer(f"Say {ends}", add_special_tokens=False).input_ids


def test_rows_asked_in_another_chat_template_are_refused(model: Path, tmp_path: Path) -> None:
    asked(model, RECORDS[2:], out=tmp_path / "report", chat=True)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(ValueError, match="questions"):
        asked(model, RECORDS[2:], out=tmp_path / "report", chat=True, tokenizer=tokenizer)


@pytest.mark.slow
def test_the_command_asks_a_file(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "qa.jsonl"
    file.write_text("\n".join(map(json.dumps, RECORDS)), encoding="utf-8")
    words = ["eval", str(model), "--questions", str(file), "--method", "logn", "--lengths", "150,400", "--answer-tokens", "4"]
    ran = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "report")])
    assert ran.exit_code == 0, ran.output
    assert "Answers found, percent" in ran.output
    assert "Your questions" in (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
