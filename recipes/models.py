"""Where the models of the demo and the reports are kept, and a tiny random one in their place."""

from pathlib import Path

from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

from hf_longattn.sharing.samples import GEMMA as GEMMA
from hf_longattn.sharing.samples import SMOLLM2 as SMOLLM2
from hf_longattn.sharing.samples import Sample, fetch

#: Where models that were fetched are kept.
DOWNLOADED = Path(__file__).parents[1] / "models"


def obtain(source: Sample, cache: Path) -> Path:
    """A folder with the model as safetensors, fetched once; its file SOURCE says from where."""
    return fetch(source, cache / source.hub.split("/")[1])


def random_model(cache: Path) -> Path:
    """A folder with a tiny random Llama over bytes: the whole demo in seconds, its numbers without meaning."""
    folder = cache / "random"
    tokenizer = ByT5Tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "SOURCE").write_text("a tiny random Llama (--quick): its numbers mean nothing")
    return folder
