"""Saving with a card, and uploading with the real client to a server on the loopback interface."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, VOCAB
from fake_hub import FakeHub
from helpers import close, logits, python, stock, tokens
from huggingface_hub import ModelCard, constants
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from typer.testing import CliRunner

import hf_longattn
from hf_longattn.cli import app
from hf_longattn.sharing import hub
from hf_longattn.sharing.card import Facts

peft = pytest.importorskip("peft")

CONFIG = CASES["sinks"]
METRICS = {"loss": {4096: 2.5, 512: 2.75}, "accuracy": {512: 0.9}}
FACTS: dict[str, Any] = {
    "training_lengths": [512, 4096],
    "metrics": METRICS,
    "evaluated_on": "six novels",
    "license": "apache-2.0",
}
REPO = "someone/long-llama"


def changed() -> Any:
    return hf_longattn.apply(stock("llama"), CONFIG)


def adapted(base: Path | None = None) -> Any:
    model = stock("llama") if base is None else AutoModelForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(hf_longattn.apply(model, CONFIG), config)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    fake = FakeHub()
    fake.repos["someone/llama"] = {}  # what adapters and cards name as the base
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # its chunk store is another protocol
    monkeypatch.setattr(constants, "ENDPOINT", fake.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", fake.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # Trainer's, which keeps an endpoint
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield fake
    fake.close()


def download(server: FakeHub, repo: str, to: Path) -> Path:
    for name, content in server.repos[repo].items():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_bytes(content)
    return to


# saving -----------------------------------------------------------------------------------------------------------------


def test_a_saved_model_and_its_card(tmp_path: Path) -> None:
    m = changed()
    assert hf_longattn.save(m, tmp_path / "long-llama", base_model="someone/llama", **FACTS) == tmp_path / "long-llama"
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "long-llama")), logits(m))
    card = ModelCard.load(tmp_path / "long-llama" / "README.md")
    assert card.data.base_model == "someone/llama"
    assert card.data.library_name == "transformers"
    assert card.data.license == "apache-2.0"
    assert card.data.tags == ["hf_longattn", "long-context", "scale_invariant"]
    results = {(r.metric_type, r.metric_name, r.metric_value, r.dataset_name) for r in card.data.eval_results}
    assert results == {
        ("loss", "loss at 512 tokens", 2.75, "six novels"),
        ("loss", "loss at 4096 tokens", 2.5, "six novels"),
        ("accuracy", "accuracy at 512 tokens", 0.9, "six novels"),
    }
    for line in (
        "- `scale_invariant:tau=3.0:",
        "| 512 | 2.75 | 0.9 |",
        "| 4,096 | 2.5 |  |",
        "Trained on texts of 512, 4,096 tokens.",
        "- length: as trained, 512 tokens",
        "Transformers and vLLM run it with that package installed.",
        'Without the import it fails: ``Specified `attn_implementation="hf_longattn.scale_invariant"` is not supported``',
        "`trust_remote_code` does not take the place of the import.",
        "import hf_longattn",
        "- Anson, Wang & Aitchison 2025, Scale-invariant attention, [arXiv:2505.17083](https://arxiv.org/abs/2505.17083)",
    ):
        assert line in card.text, line


@pytest.mark.parametrize("name", ["C:\\new\\model", 'a "quoted" name', "."])
def test_the_line_that_loads_a_model_is_python(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path(name)
    hf_longattn.save(changed(), folder)
    card = (folder / "README.md").read_text(encoding="utf-8")
    (line,) = [line for line in card.splitlines() if ".from_pretrained(" in line]
    (argument,) = ast.parse(line).body[0].value.args  # type: ignore[attr-defined]
    assert argument.value == (tmp_path.name if name == "." else name)
    assert f"# {argument.value}" in card.splitlines()


@pytest.mark.slow
def test_a_card_has_the_base_beside_the_model_and_how_far_it_reads(tmp_path: Path) -> None:
    base = {"loss": {512: 2.875, 8192: 3.5}}
    facts = FACTS | {
        "base_metrics": base,
        "reach": "Reads copies from 12,000 tokens back at 0.90 (base: 3.10), in nats per token.",
    }
    hf_longattn.save(hf_longattn.extend(stock("llama"), 2048), tmp_path / "m", **facts)
    card = ModelCard.load(tmp_path / "m" / "README.md").text
    for line in (
        "| tokens | loss | loss before training | accuracy |",
        "| 512 | 2.75 | 2.875 | 0.9 |",
        "| 4,096 | 2.5 |  |  |",
        "| 8,192 |  | 3.5 |  |",
        "- length: set to 2,048 tokens (measured up to 4,096); the base was trained at 512",
        facts["reach"],
    ):
        assert line in card, line
    assert "\n\n\n" not in card
    with pytest.raises(ValueError, match="evaluated_on"):
        hf_longattn.save(changed(), tmp_path / "none", base_metrics=base)
    for told, said in (({}, "not measured"), ({"reach": facts["reach"]}, "see Evaluation")):
        hf_longattn.save(hf_longattn.extend(stock("llama"), 2048), tmp_path / said, **told)  # type: ignore[arg-type]
        text = ModelCard.load(tmp_path / said / "README.md").text
        assert f"- length: set to 2,048 tokens ({said}); the base was trained at 512" in text
    training = {"data": "six novels", "steps": "150"}
    hf_longattn.save(changed(), tmp_path / "trained", training=training, training_lengths=[512])
    text = ModelCard.load(tmp_path / "trained" / "README.md").text
    assert "## Training\n\nTrained on texts of 512 tokens.\n\n- data: six novels\n- steps: 150\n\n## Loading" in text
    hf_longattn.save(changed(), tmp_path / "bare")
    bare = ModelCard.load(tmp_path / "bare" / "README.md").text
    assert "## Evaluation" not in bare
    assert "## Training" not in bare
    assert "\n\n\n" not in bare


@pytest.mark.slow
def test_what_a_card_says_of_loading_without_the_package_is_so(tmp_path: Path) -> None:
    hf_longattn.save(changed(), tmp_path / "m")
    code = "import sys, transformers; transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])"
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path / "m")], capture_output=True, text=True, check=False)
    said = (tmp_path / "m" / "README.md").read_text().partition("it fails: ``")[2].partition("``")[0]
    assert said in result.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["sinks", "logn"])
def test_an_adapter_is_merged_and_saved(base: Path, tmp_path: Path, case: str) -> None:
    """Learned parameters too; the model needs no PEFT, and answers as model and adapter do."""
    model = AutoModelForCausalLM.from_pretrained(base)
    method = CONFIG if case == "sinks" else {"temperature": {"name": "logn", "learned": True, "clamp": False}}
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    m = peft.get_peft_model(hf_longattn.apply(model, hf_longattn.LongAttnConfig.parse(method)), config)
    for name, p in m.named_parameters():
        if ".longattn." in name:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    told = {"training_lengths": [512, 1024], "training": {"data": "six novels: old\nones", "steps": "1,200"}}
    hf_longattn.save(m, tmp_path / "adapter", tokenizer=letters(), **told)
    assert hf_longattn.merge(tmp_path / "adapter", tmp_path / "whole", **FACTS) == tmp_path / "whole"
    whole = LlamaForCausalLM.from_pretrained(tmp_path / "whole")
    close(logits(whole), logits(m), 1e-5)
    assert not (tmp_path / "whole" / "adapter_config.json").exists()
    assert (tmp_path / "whole" / "tokenizer.json").exists()
    cards = [(tmp_path / kind / "README.md").read_text() for kind in ("adapter", "whole")]
    assert "| 512 | 2.75 | 0.9 |" in cards[1]
    for card, what in zip(cards, ("An adapter (LORA)", "A model"), strict=True):
        assert f"{what} of `{base.name}` (a local folder) whose attention" in card
    hf_longattn.merge(tmp_path / "adapter", tmp_path / "told")
    for card in (cards[0], (tmp_path / "told" / "README.md").read_text()):
        assert "Trained on texts of 512, 1,024 tokens.\n\n- data: six novels: old ones\n- steps: 1,200\n\n## Loading" in card
        assert "## Evaluation" not in card
    with pytest.raises(FileExistsError, match="is not empty"):
        hf_longattn.merge(tmp_path / "adapter", tmp_path / "whole")
    with pytest.raises(ValueError, match="holds the adapter, which the merged model would replace"):
        hf_longattn.merge(tmp_path / "adapter", tmp_path / "whole" / ".." / "adapter", overwrite=True)
    hf_longattn.remove(AutoModelForCausalLM.from_pretrained(tmp_path / "whole")).save_pretrained(tmp_path / "plain")
    for whole in ("whole", "plain"):
        with pytest.raises(ValueError, match="holds a whole model: there is nothing to merge"):
            hf_longattn.merge(tmp_path / whole, tmp_path / "again")
    with pytest.raises(ValueError, match=r"neither config\.json nor"):
        hf_longattn.merge(tmp_path, tmp_path / "again")
    with pytest.raises(TypeError, match=r"takes the folder of a saved adapter, got a loaded PeftModel.*: hf_longattn\.save"):
        hf_longattn.merge(adapted(), tmp_path / "again")


@pytest.mark.parametrize("given", [512, "512", ["512"], torch.tensor([512]), None])
def test_training_lengths_of_a_card(given: Any, tmp_path: Path) -> None:
    hf_longattn.save(changed(), tmp_path / "m", training_lengths=given)
    assert ("Trained on texts of 512 tokens." in (tmp_path / "m" / "README.md").read_text()) is (given is not None)


def test_an_adapter_that_names_no_base_is_not_merged(tmp_path: Path) -> None:
    """A model that was built, not loaded, has no name; the Hub was asked for one called None."""
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(hf_longattn.apply(stock("llama"), CONFIG), config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"names no model .* \(base_model_name_or_path is None\): write .*merge_and_unload"):
        hf_longattn.merge(tmp_path / "adapter", tmp_path / "whole")


@pytest.mark.parametrize("measured", ["reach", "metrics", "both"])
def test_the_card_of_a_merged_model_says_how_the_adapter_was_measured(measured: str, base: Path, tmp_path: Path) -> None:
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    m = peft.get_peft_model(hf_longattn.apply(AutoModelForCausalLM.from_pretrained(base), CONFIG), config)
    numbers = {"loss": METRICS["loss"], "exact_match|strict": METRICS["accuracy"]}
    table = {"metrics": numbers, "base_metrics": {"loss": {512: 2.875, 8192: 3.5}}, "evaluated_on": "six novels, old ones"}
    said = "Reads copies from 12,000 tokens back at 0.90, in nats per token."
    told: dict[str, Any] = ({} if measured == "metrics" else {"reach": f"{said}\n\n![Losses](reach.png)"}) | (
        {} if measured == "reach" else table
    )
    hf_longattn.save(m, tmp_path / "adapter", tokenizer=letters(), **told)
    hf_longattn.merge(tmp_path / "adapter", tmp_path / "whole")
    before, after = (ModelCard.load(tmp_path / kind / "README.md") for kind in ("adapter", "whole"))
    of_table = [line for line in before.text.splitlines() if line.startswith("|")]
    assert len({len(re.split(r"(?<!\\)\|", line)) for line in of_table}) <= 1
    assert of_table == [line for line in after.text.splitlines() if line.startswith("|")]
    assert (said in after.text, bool(of_table)) == (measured != "metrics", measured != "reach")
    assert ("On six novels, old ones, with the adapter before it was merged, by length:" in after.text) == bool(of_table)
    assert "reach.png" not in after.text
    assert "\n\n\n" not in after.text
    results = [[(x.metric_name, x.metric_value) for x in card.data.eval_results or ()] for card in (before, after)]
    assert results[0] == results[1]
    hf_longattn.merge(tmp_path / "adapter", tmp_path / "anew", metrics={"loss": {512: 1.0}}, evaluated_on="a play")
    assert "| tokens | loss |\n|---|---|\n| 512 | 1 |\n" in (text := ModelCard.load(tmp_path / "anew" / "README.md").text)
    assert said not in text


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("hf_longattn: {author: me}", "there is no argument 'author'"),
        ("hf_longattn: true", "'bool' object is not iterable"),
        ("hf_longattn: {training: [novels]}", "training must be facts by name"),
        ("hf_longattn: {metrics: {loss: {512: 2.5}}}", "metrics need evaluated_on"),
        ("hf_longattn: {training_lengths: [long]}", "'long' is not a length"),
        ("hf_longattn: {", "while parsing"),
    ],
)
def test_metadata_of_an_adapters_card_that_somebody_has_written_in(line: str, reason: str, base: Path, tmp_path: Path) -> None:
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    m = peft.get_peft_model(hf_longattn.apply(AutoModelForCausalLM.from_pretrained(base), CONFIG), config)
    hf_longattn.save(m, tmp_path / "adapter", tokenizer=letters())
    readme = tmp_path / "adapter" / "README.md"
    card = readme.read_text()
    readme.write_text(card.replace("\ntags:\n", f"\n{line}\ntags:\n", 1))
    with pytest.raises(ValueError, match=rf"README\.md cannot be read \((?s:.*){reason}(?s:.*)take hf_longattn: out of it"):
        hf_longattn.merge(tmp_path / "adapter", tmp_path / "whole")
    if reason == "while parsing":
        with pytest.raises(ValueError, match=r"README\.md cannot be read \((?s:.*)while parsing"):
            hf_longattn.push(tmp_path / "adapter", "you/adapter", base_model="you/base")
    said = "hf_longattn: {reach: 2, evaluated_on: 2024, training: null}"
    readme.write_text(card.replace("\ntags:\n", f"\n{said}\ntags:\n", 1))
    hf_longattn.merge(tmp_path / "adapter", tmp_path / "whole")
    assert ModelCard.load(tmp_path / "whole" / "README.md").data["hf_longattn"]["reach"] == "2"


CHECKOUT = f"pip install .  # in a checkout of hf_longattn {hf_longattn.__version__}"


@pytest.mark.parametrize(
    ("noted", "line", "link"),
    [
        ({"vcs_info": {"commit_id": "abc"}}, 'pip install "hf_longattn @ git+https://host/x.git@abc"', "https://host/x"),
        ({"vcs_info": {"commit_id": "abc"}, "url": "file:///home/x"}, CHECKOUT, None),
        ({"dir_info": {}, "url": "file:///home/x"}, CHECKOUT, None),
        (None, f"pip install hf_longattn=={hf_longattn.__version__}", None),
    ],
    ids=["repository", "local repository", "folder", "index"],
)
def test_a_card_says_how_its_maker_got_the_package(
    noted: Any, line: str, link: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`noted` is what pip keeps of it; a path on the maker's machine is of no use to others."""
    folder = tmp_path / "site" / "hf_longattn-0.1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: hf_longattn\nVersion: {hf_longattn.__version__}\n")
    if noted is not None:
        (folder / "direct_url.json").write_text(json.dumps({"url": "https://host/x.git"} | noted))
    monkeypatch.syspath_prepend(tmp_path / "site")
    hf_longattn.save(changed(), tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    assert f"```bash\n{line}" in card
    assert (f"[`hf_longattn`]({link})" in card) is (link is not None)
    assert "/home/x" not in card


@pytest.mark.slow
def test_a_saved_adapter_and_its_card(base: Path, tmp_path: Path) -> None:
    m = adapted(base)
    hf_longattn.save(m, tmp_path)
    assert not (tmp_path / "config.json").exists()  # transformers would look for the base model's weights beside it
    close(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(m), 1e-6)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == "peft"
    assert card.data.base_model is None  # it is a local folder
    assert "from transformers import AutoModelForCausalLM\n" in card.text  # as training and the how-to say
    assert "lora" in card.data.tags
    assert "More Information Needed" not in card.text
    prope = hf_longattn.rope.prope(stock("llama").config, 0.5)
    turned = hf_longattn.apply(type(stock("llama"))(prope), CONFIG)
    hf_longattn.save(turned, tmp_path / "turned")
    assert "- rotary encoding: {" in (tmp_path / "turned" / "README.md").read_text()


@pytest.mark.slow
def test_saving_does_not_overwrite(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        hf_longattn.save(changed(), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes"]
    hf_longattn.save(adapted(), tmp_path, overwrite=True)
    m = changed()
    hf_longattn.save(m, tmp_path, overwrite=True)  # no adapter of the last save may remain
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(m))
    assert (tmp_path / "notes").read_text() == "mine"


@pytest.mark.slow
def test_saving_keeps_a_readme_of_ones_own(tmp_path: Path) -> None:
    hf_longattn.save(changed(), tmp_path, name="first")
    hf_longattn.save(changed(), tmp_path, name="second", overwrite=True)  # a card of ours is written anew
    assert "# second" in (tmp_path / "README.md").read_text()
    for model in (adapted(), changed()):  # PEFT puts a header of its own into a README
        (tmp_path / "README.md").write_text("What I found out.\n")
        with pytest.warns(UserWarning, match=r"README\.md was not written by hf_longattn and is kept"):
            hf_longattn.save(model, tmp_path, overwrite=True)
        assert (tmp_path / "README.md").read_text() == "What I found out.\n"


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    target = tmp_path / "none"
    with pytest.raises(ValueError, match=r"not an hf_longattn method: put one in by hf_longattn\.apply"):
        hf_longattn.save(stock("llama"), target)
    with pytest.raises(TypeError, match=r"tokenizer= takes a loaded one, .*, got 'gpt2'"):
        hf_longattn.save(adapted(), target, tokenizer="gpt2")
    assert not target.exists()
    with pytest.raises(ValueError, match="whole models only"):
        hf_longattn.save(adapted(), target, remote_code=True)
    for metrics, message in (({"loss": 3.0}, "{metric: {length"), ({"loss": {"long": 1.0}}, "{metric: {length")):
        with pytest.raises(ValueError, match=message):
            hf_longattn.save(changed(), target, metrics=metrics, evaluated_on="x")
    with pytest.raises(ValueError, match="evaluated_on"):
        hf_longattn.save(changed(), target, metrics=METRICS)
    assert not target.exists()


def test_strict_checkpoints_are_for_this_package_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that choose their code by `architectures` find none; here the name is the model's own again."""
    m = changed()
    hf_longattn.save(m, tmp_path / "strict", strict=True)
    (name,) = json.loads((tmp_path / "strict" / "config.json").read_text())["architectures"]
    assert name == "LongAttnLlamaForCausalLM"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "strict")
    assert torch.equal(logits(loaded), logits(m))
    assert loaded.config.architectures == ["LlamaForCausalLM"]  # `transformers serve` looks its class up by it
    monkeypatch.setitem(sys.modules, "sglang", sys)
    assert AutoConfig.from_pretrained(tmp_path / "strict").architectures == [name]
    hf_longattn.save(m, tmp_path / "plain")
    assert json.loads((tmp_path / "plain" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.slow
def test_remote_code(tmp_path: Path) -> None:
    """In another process that does not import the package; and where the package is missing."""
    m = changed()
    hf_longattn.save(m, tmp_path / "m", remote_code=True)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "m")), logits(m))
    code = """
        import sys, os
        os.environ["HF_MODULES_CACHE"] = sys.argv[2]
        if sys.argv[3] == "missing":
            sys.modules["hf_longattn"] = None
        import torch
        from transformers import AutoModelForCausalLM
        try:
            m = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
        except ImportError as error:
            print(error)
        else:
            torch.save(m(torch.load(sys.argv[4])).logits, sys.argv[4])
        """
    torch.save(tokens(), tmp_path / "x")
    for package in ("missing", "installed"):
        result = python(code, tmp_path / "m", tmp_path / "cache", package, tmp_path / "x")
        if package == "missing":
            assert "this model needs the package hf_longattn: pip install" in result.stdout, result.stderr
    close(torch.load(tmp_path / "x"), logits(m), 1e-6)


# uploading --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_push_a_model(server: FakeHub, tmp_path: Path) -> None:
    m = changed()
    url = hf_longattn.push(m, REPO, private=True, base_model="someone/llama", **FACTS)
    assert url == f"{server.url}/{REPO}/commit/{'1' * 40}"
    assert server.private[REPO] in (True, "private")
    assert server.tokens == {"Bearer hf_test"}
    assert "PUT blob" in server.log
    assert {"README.md", "config.json", "model.safetensors"} <= server.repos[REPO].keys()
    got = download(server, REPO, tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(got)), logits(m))
    assert json.loads(server.repos[REPO]["config.json"])["architectures"] == ["LongAttnLlamaForCausalLM"]
    assert f'from_pretrained("{REPO}")' in server.repos[REPO]["README.md"].decode()
    hf_longattn.save(m, tmp_path / "folder")
    hf_longattn.push(tmp_path / "folder", REPO, exist_ok=True)
    assert f'from_pretrained("{REPO}")' in server.repos[REPO]["README.md"].decode()
    assert 'from_pretrained("folder")' in (tmp_path / "folder" / "README.md").read_text()
    assert json.loads(server.repos[REPO]["config.json"])["architectures"] == ["LongAttnLlamaForCausalLM"]


@pytest.mark.slow
def test_push_an_adapter(server: FakeHub, base: Path, tmp_path: Path) -> None:
    m = adapted(base)
    with pytest.raises(ValueError, match=r"base model is .* which nobody else has"):
        hf_longattn.push(m, REPO)
    assert server.log == []
    m.add_adapter("second", peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    hf_longattn.push(m, REPO, base_model="someone/llama")
    m.save_pretrained(tmp_path / "folder")
    hf_longattn.push(tmp_path / "folder", REPO + "-folder", base_model="someone/llama")
    for repo in (REPO, REPO + "-folder"):
        for name in ("adapter_config.json", "second/adapter_config.json"):
            assert json.loads(server.repos[repo][name])["base_model_name_or_path"] == "someone/llama"
    got = download(server, REPO, tmp_path)
    close(logits(peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), got)), logits(m), 1e-6)


@pytest.mark.slow
def test_trainer_pushes_an_adapter(server: FakeHub, base: Path, tmp_path: Path) -> None:
    """As it is at the end and in every checkpoint: each brings the method and what it learned to a plain base."""
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    m = peft.get_peft_model(hf_longattn.apply(AutoModelForCausalLM.from_pretrained(base), "logn:learned=true"), config)
    how = {"max_steps": 2, "save_steps": 1, "learning_rate": 0.05, "use_cpu": True, "report_to": [], "disable_tqdm": True}
    how |= {"push_to_hub": True, "hub_model_id": REPO, "hub_strategy": "all_checkpoints", "hub_always_push": True}
    text = [{"input_ids": x, "labels": x} for x in tokens(4)]
    trainer = Trainer(m, TrainingArguments(str(tmp_path / "run"), **how), train_dataset=text)
    trainer.train()
    trainer.push_to_hub()
    got = download(server, REPO, tmp_path / "got")
    for folder in (got, got / "checkpoint-2"):
        close(logits(peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)), logits(m), 1e-6)
    assert (logits(m) - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 1e-2


@pytest.mark.slow
def test_a_name_that_is_taken(server: FakeHub) -> None:
    hf_longattn.push(changed(), REPO)
    before = dict(server.repos[REPO])
    with pytest.raises(FileExistsError, match="exist_ok=True"):
        hf_longattn.push(hf_longattn.update(changed(), tau=9.0), REPO)
    assert server.repos[REPO] == before
    hf_longattn.push(hf_longattn.update(changed(), tau=9.0), REPO, exist_ok=True)
    assert json.loads(server.repos[REPO]["config.json"])["longattn"]["logit_map"]["tau"] == 9.0
    assert b"tau=9" in server.repos[REPO]["README.md"]


@pytest.mark.slow
def test_a_card_that_somebody_wrote_on_the_hub_stays(server: FakeHub, tmp_path: Path) -> None:
    server.repos[REPO] = {"README.md": b"# Mine"}
    with pytest.warns(UserWarning, match="did not write: it stays"):
        hf_longattn.push(changed(), REPO, exist_ok=True)
    assert server.repos[REPO]["README.md"] == b"# Mine"
    assert "model.safetensors" in server.repos[REPO]
    hf_longattn.save(changed(), tmp_path / "m")
    (tmp_path / "m" / "README.md").write_text("# Newer")
    hf_longattn.push(tmp_path / "m", REPO, exist_ok=True)
    assert server.repos[REPO]["README.md"] == b"# Newer"


@pytest.mark.slow
def test_push_a_folder(server: FakeHub, base: Path, tmp_path: Path) -> None:
    """One that Trainer might have left: PEFT's template as a card, pickles, checkpoints and logs."""
    adapted(base).save_pretrained(tmp_path)
    assert "[More Information Needed]" in (tmp_path / "README.md").read_text()
    for name in (
        "optimizer.pt",
        "training_args.bin",
        "trainer_state.json",
        "metrics.json",
        "checkpoint-1/adapter_model.safetensors",
        "runs/x.json",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    hf_longattn.push(tmp_path, REPO, base_model="someone/llama", **FACTS)
    assert set(server.repos[REPO]) == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert "| 512 | 2.75 | 0.9 |" in server.repos[REPO]["README.md"].decode()
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    (tmp_path / "README.md").write_text("my own card")
    hf_longattn.push(tmp_path, REPO, base_model="someone/llama", exist_ok=True)
    assert server.repos[REPO]["README.md"] == b"my own card"
    with pytest.raises(ValueError, match="is kept as it is; write evaluated_on, license, metrics, training_lengths into it"):
        hf_longattn.push(tmp_path, REPO, base_model="someone/llama", exist_ok=True, **FACTS)


@pytest.mark.slow
def test_a_card_of_ours_is_filled_in(server: FakeHub, base: Path, tmp_path: Path) -> None:
    hf_longattn.save(adapted(base), tmp_path / "m", **{k: v for k, v in FACTS.items() if k != "license"})
    before = (tmp_path / "m/README.md").read_text()
    assert "license" not in before
    words = ["push", str(tmp_path / "m"), REPO, "--license", "mit", "--base-model", "someone/llama"]
    shown = CliRunner().invoke(app, [*words, "--dry-run"])
    assert shown.exit_code == 0, shown.output
    assert server.log == []
    for line in ("adapter_model.safetensors", "license: mit", f'from_pretrained("{REPO}")', "Nothing was uploaded."):
        assert line in shown.output
    assert CliRunner().invoke(app, words).exit_code == 0
    sent = server.repos[REPO]["README.md"].decode()
    card = ModelCard(sent)
    assert (card.data.license, card.data.base_model) == ("mit", "someone/llama")
    assert card.data.eval_results == ModelCard(before).data.eval_results
    title = REPO.rpartition("/")[2]
    assert card.data.model_name == title  # as its repository
    shown = before.partition("\n# ")[2].replace('"m"', f'"{REPO}"')
    assert f" of `{base.name}` (a local folder) whose" in shown
    shown = shown.replace(f"`{base.name}` (a local folder)", "[someone/llama](https://huggingface.co/someone/llama)", 1)
    assert sent.partition("\n# ")[2] == shown.replace("m\n", f"{title}\n", 1)
    assert (tmp_path / "m/README.md").read_text() == before
    wrong = CliRunner().invoke(app, [*words, "--training-length", "4k", "--yes"])
    assert wrong.exit_code == 2
    assert "write training_lengths into it" in " ".join(wrong.output.replace("│", "").split())


@pytest.mark.slow
def test_a_base_that_is_not_on_the_hub_is_not_named(
    server: FakeHub, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder's name may look like one on the Hub, where the folder is not seen from."""
    hf_longattn.save(changed(), tmp_path / "whole", base_model="models/base", license="mit")
    adapted(base).save_pretrained(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "models/base"}))
    for folder in ("whole", "adapter"):
        with pytest.raises(ValueError, match="named 'models/base', and the Hub has none of that name"):
            hf_longattn.push(tmp_path / folder, REPO)
        refused = CliRunner().invoke(app, ["push", str(tmp_path / folder), REPO])
        assert refused.exit_code == 2
        assert "--base-model user/name" in refused.output
        assert REPO not in server.repos
    hf_longattn.push(tmp_path / "whole", REPO, base_model="someone/llama")
    card = server.repos[REPO]["README.md"].decode()
    assert "models/base" not in card
    assert "A model of [someone/llama](https://huggingface.co/someone/llama) whose attention" in card
    assert ModelCard(card).data.base_model == "someone/llama"
    for wrong in ("/home/me/base", "models/of/mine", "../base"):
        with pytest.raises(ValueError, match="cannot be a name on the Hub"):
            hf_longattn.save(changed(), tmp_path / "none", base_model=wrong)
        with pytest.raises(ValueError, match="cannot be a name on the Hub"):
            hf_longattn.push(tmp_path / "whole", REPO, base_model=wrong)
    monkeypatch.chdir(tmp_path)
    hf_longattn.save(hf_longattn.apply(AutoModelForCausalLM.from_pretrained(base), CONFIG), "of_folder")
    assert "base" not in (tmp_path / "of_folder" / "README.md").read_text().partition("## Attention")[0]


def test_folders_that_cannot_be_pushed(server: FakeHub, base: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither config\.json nor"):
        hf_longattn.push(tmp_path, REPO)
    with pytest.raises(ValueError, match="records no hf_longattn method, so that it needs nothing of this package: hugg"):
        hf_longattn.push(base, REPO)
    changed().config.save_pretrained(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no safetensors"):
        hf_longattn.push(tmp_path, REPO)
    with pytest.raises(ValueError, match="belong to a model"):
        hf_longattn.push(tmp_path, REPO, remote_code=True)
    assert server.log == []


@pytest.mark.slow
def test_command(server: FakeHub, tmp_path: Path) -> None:
    hf_longattn.save(changed(), tmp_path / "m")
    (tmp_path / "m" / "README.md").unlink()
    (tmp_path / "metrics.json").write_text(json.dumps(METRICS))
    options = ["--metrics", str(tmp_path / "metrics.json"), "--evaluated-on", "six novels", "--training-length", "4k"]
    first = CliRunner().invoke(app, ["push", str(tmp_path / "m"), REPO, *options])
    assert first.exit_code == 0, first.output
    assert f"{server.url}/{REPO}/commit/" in first.output.replace("\n", "")
    assert "Trained on texts of 4,096 tokens." in server.repos[REPO]["README.md"].decode()
    server.repos[REPO] = {}
    no = CliRunner().invoke(app, ["push", str(tmp_path / "m"), REPO], input="n\n")
    assert no.exit_code == 1
    assert "exists already. Add a commit to it?" in no.output
    assert server.repos[REPO] == {}
    for answer in (["--yes"], []):
        server.repos[REPO] = {}
        yes = CliRunner().invoke(app, ["push", str(tmp_path / "m"), REPO, *answer], input="y\n")
        assert yes.exit_code == 0, yes.output
        assert "model.safetensors" in server.repos[REPO]
    wrong = CliRunner().invoke(app, ["push", str(tmp_path / "m"), REPO, *options[:2]])
    assert wrong.exit_code == 2
    assert "evaluated_on" in wrong.output


def letters() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words)


def test_a_tokenizer_goes_along(tmp_path: Path) -> None:
    hf_longattn.save(changed(), tmp_path, tokenizer=letters())
    assert "tokenizer.json" in hub.files(tmp_path, REPO, Facts())


@pytest.mark.parametrize(
    ("task", "by_peft", "tag"),
    [
        ("SEQ_CLS", "AutoPeftModelForSequenceClassification", "text-classification"),
        ("FEATURE_EXTRACTION", "AutoPeftModelForFeatureExtraction", "feature-extraction"),
        (None, "AutoPeftModel", "text-classification"),
    ],
)
def test_the_card_of_an_adapter_that_makes_no_text(task: Any, by_peft: str, tag: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    m = AutoModel if task == "FEATURE_EXTRACTION" else AutoModelForSequenceClassification
    m = hf_longattn.extend(m.from_config(stock("llama").config), 2048)
    config = peft.LoraConfig(target_modules=["q_proj"], task_type=task)
    hf_longattn.save(peft.get_peft_model(m, config), tmp_path, name="some/adapter")
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.pipeline_tag, card.data.library_name) == (tag, "peft")
    assert f'from peft import {by_peft}\n\nmodel = {by_peft}.from_pretrained("some/adapter")' in card.text
    assert "- length: set to 2,048 tokens (not measured); the base was trained at 512" in card.text


@pytest.mark.slow
def test_remote_code_and_strict_checkpoints_of_another_class(tmp_path: Path) -> None:
    torch.manual_seed(0)
    m = hf_longattn.apply(AutoModelForSequenceClassification.from_config(stock("llama").config), CONFIG).eval()
    for how in ("strict", "remote_code"):
        hf_longattn.save(m, tmp_path / how, **{how: True})
        again = AutoModelForSequenceClassification.from_pretrained(tmp_path / how, trust_remote_code=True).eval()
        assert type(again).__name__ == "LlamaForSequenceClassification"
        ids = tokens(1)
        with torch.no_grad():
            close(again(ids).logits, m(ids).logits, 0.0)
    with pytest.raises(ValueError, match="that an auto class of transformers loads"):
        hf_longattn.save(hf_longattn.apply(Unknown(stock("llama").config), CONFIG), tmp_path / "unknown", remote_code=True)


class Unknown(LlamaForCausalLM):
    """No auto class knows it."""
