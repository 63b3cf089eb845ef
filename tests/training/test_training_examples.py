"""The scripts of examples/, and the blocks of docs/how-to/share.md, run as they stand there (with fewer steps)."""

from __future__ import annotations

import math
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import VOCAB
from helpers import close, logits, stock, tokens
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import hf_longattn

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing.* is deprecated:FutureWarning")  # TRL uses it

ROOT = Path(__file__).parents[2]
EXAMPLES = [p.name for p in sorted((ROOT / "examples").glob("*.py")) if p.name != "common.py"]
PAGE = (ROOT / "docs" / "how-to" / "share.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SETUP = BLOCKS[0]
TRL = next(b for b in BLOCKS if "SFTTrainer" in b)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    stock("llama").save_pretrained(path)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1").save_pretrained(path)
    return path


@pytest.fixture
def names(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    texts = [" ".join(map(str, row.tolist())) for row in tokens(12, 40)]
    return {"base": str(base), "texts": texts}


def short(code: str) -> str:
    """A few steps, on the CPU, and without the output that a test does not need."""
    quiet = 'max_steps=3, use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=50, bf16=False'
    return code.replace("max_steps=20", quiet).replace("max_length=512", "max_length=32").replace("1e-4", "1e-2")


def check(base: Path, trained: Any, start: Tensor, folder: str, tau: float) -> None:
    want = logits(trained)
    assert (want - start).abs().max() > 1e-6
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(folder)
    close(logits(loaded), want, 1e-6)
    assert hf_longattn.get_config(loaded).logit_map.tau == tau
    with loaded.disable_adapter():
        assert torch.equal(logits(loaded), logits(AutoModelForCausalLM.from_pretrained(base)))


@pytest.mark.slow
def test_the_block_of_trl(names: dict[str, Any], base: Path) -> None:
    pytest.importorskip("trl")
    exec(SETUP, names)
    start = logits(names["model"])
    exec(short(TRL), names)
    check(base, names["trainer"].model, start, "adapter-trl", 20.0)


@pytest.mark.slow
def test_a_reference_model_of_trl_runs_the_method_of_the_policy(names: dict[str, Any]) -> None:
    """Before the first step the two agree, and DPO's loss is ln 2."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    exec(SETUP, names)
    hf_longattn.update(names["model"], tau=0.5)
    quiet = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True}
    arguments = trl.DPOConfig("dpo", max_steps=1, logging_steps=1, **quiet)
    first, second = names["texts"][:6], names["texts"][6:]
    data = datasets.Dataset.from_dict({"prompt": ["3 4 5 "] * 6, "chosen": first, "rejected": second})
    trainer = trl.DPOTrainer(names["model"], args=arguments, train_dataset=data, processing_class=names["tokenizer"])
    assert hf_longattn.get_config(trainer.ref_model) == hf_longattn.get_config(names["model"])
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)


@pytest.mark.slow
def test_log_probabilities_of_a_reference_are_those_of_its_method(names: dict[str, Any]) -> None:
    """TRL keeps them on disk by data and weights, which several methods share."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    exec(SETUP, names)
    quiet = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True}
    arguments = trl.DPOConfig("dpo", precompute_ref_log_probs=True, **quiet)
    data = datasets.Dataset.from_dict({"prompt": ["3 4 5 "], "chosen": names["texts"][:1], "rejected": names["texts"][1:2]})

    def trainer() -> Any:
        return trl.DPOTrainer(names["model"], args=arguments, train_dataset=data, processing_class=names["tokenizer"])

    first, again = (trainer().train_dataset["ref_chosen_logps"][0] for _ in range(2))
    hf_longattn.update(names["model"], tau=0.5)
    assert first == again
    assert abs(trainer().train_dataset["ref_chosen_logps"][0] - first) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_script(
    name: str,
    names: dict[str, Any],
    base: Path,
    tmp_path: Path,
    cpu_bfloat16: Callable[[bool], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a user starts it, on the CPU, for three steps."""
    if name.startswith("trl"):
        pytest.importorskip("trl")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    cpu_bfloat16(False)  # float32 is loaded
    monkeypatch.syspath_prepend(ROOT / "examples")
    (tmp_path / "book.txt").write_text("\n\n".join(names["texts"]), encoding="utf-8")
    words = f"{name} --model {base} --data book.txt --output adapter --length 32 --steps 3"
    monkeypatch.setattr(sys, "argv", words.split())
    start = logits(AutoModelForCausalLM.from_pretrained(base, attn_implementation="scale_invariant"))
    source = (ROOT / "examples" / name).read_text(encoding="utf-8")
    (tmp_path / name).write_text(source.replace("1e-4", "1e-2"), encoding="utf-8")
    ran = runpy.run_path(str(tmp_path / name), run_name="__main__")
    check(base, ran["trainer"].model if "trainer" in ran else ran["model"], start, "adapter", 10.0)


@pytest.mark.slow
def test_loading_and_saving_examples(names: dict[str, Any]) -> None:
    exec(SETUP, names)
    m = peft.get_peft_model(names["model"], names["config"])
    m.save_pretrained("adapter")
    lines = next(b for b in BLOCKS if "\nPeftModel.from_pretrained" in b).splitlines()
    exec("\n".join(line for line in lines if "import" in line), names)
    for line in (line for line in lines if line.endswith('"adapter")')):
        close(logits(eval(line, names)), logits(m), 1e-6)
    save = next(b for b in BLOCKS if "hf_longattn.save(" in b)
    exec(save, names | {"model": m})
    close(
        logits(peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(names["base"]), "long-model")),
        logits(m),
        1e-6,
    )
