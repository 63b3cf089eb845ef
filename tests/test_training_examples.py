"""The examples of docs/how-to/share.md, run as they stand there (with fewer steps)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import VOCAB
from helpers import close, stock, tokens
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import hf_longattn

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing.* is deprecated:FutureWarning")  # TRL uses it

PAGE = (Path(__file__).parent.parent / "docs" / "how-to" / "share.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SETUP = BLOCKS[0]
EXAMPLES = {name: next(b for b in BLOCKS if f'"adapter-{name}"' in b) for name in ("trl", "trainer", "accelerate")}


@torch.no_grad()
def logits(m: Any) -> Tensor:
    return m.eval()(input_ids=tokens()).logits


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
    return code.replace("max_steps=20", quiet).replace("max_length=512", "max_length=32").replace("lr=1e-4", "lr=1e-2")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, names: dict[str, Any], base: Path) -> None:
    if name == "trl":
        pytest.importorskip("trl")
    code = EXAMPLES[name].strip().splitlines()
    assert len(code) <= 16, "the examples stay short"
    exec(SETUP, names)
    start = logits(names["model"])
    exec(short(EXAMPLES[name]), names)
    trained = names["trainer"].model if name == "trl" else names["model"]
    want = logits(trained)
    assert (want - start).abs().max() > 1e-6
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(f"adapter-{name}")
    close(logits(loaded), want, 1e-6)
    assert hf_longattn.config_of(loaded).logit_map.tau == 20.0
    with loaded.disable_adapter():
        assert torch.equal(logits(loaded), logits(AutoModelForCausalLM.from_pretrained(base)))


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
