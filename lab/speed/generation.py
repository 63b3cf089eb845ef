"""Tokens per second of `generate` by a whole model: what `extend` takes, beside the unmodified model and YaRN.

A model of SmolLM2-135M's shape with random weights: time does not depend on what they are. The cache holds random keys and
values of the context, and is cut back after each round, in which every setting generates NEW tokens. The part "continuous"
answers REQUESTS prompts of mixed lengths by transformers' continuous batching, and counts what padding requests to about
equal lengths adds: "padding" is the number of keys computed over that of keys there are.
Writes results/generation-cpu.json (see timing.py); `python -m lab.pages` then rewrites docs/speed.md.
"""

import math
import random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, logging

import hf_longattn
from hf_longattn.integration.caches import CACHE
from hf_longattn.integration.engines import paged
from lab.speed.model_step import SHAPE
from lab.speed.timing import RESULTS, Call, Calls, Parts, Rows, arguments, compare, run_parts

logging.disable_progress_bar()
TRAINED = SHAPE["max_position_embeddings"]
NEW, REQUESTS, SHORTEST, LONGEST = 32, 12, 32, 1024
NEW_EACH = 8  # of continuous batching
SIZES = [
    (batch, context) for context in (128, 2048, 16384, 65536) for batch in (1, 8) if batch * context <= 1 << 16
]  # 3 GiB of cache
PEER = ("unmodified", "sdpa")


def models() -> dict[tuple[str, str], Any]:
    """The unmodified model, YaRN to twice the trained length, and what `extend` takes for that."""
    torch.manual_seed(0)
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 100_000.0, "original_max_position_embeddings": TRAINED}
    made = {
        PEER: AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)),
        ("YaRN × 2", "sdpa"): AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, rope_parameters=yarn)),
        (f"rerope, window {TRAINED // 2}", "auto"): AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)),
    }
    hf_longattn.apply(list(made.values())[-1], "rerope", window=TRAINED // 2)
    return {name: model.eval() for name, model in made.items()}


def about(batch: int, context: int, mode: str) -> dict[str, Any]:
    heads, kv_heads = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]
    shape = {
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "length": context,
        "head_dim": SHAPE["hidden_size"] // heads,
    }
    return {"device": "cpu", "dtype": "float32", **shape, "mode": mode, "seed": 0}


def generate_rows(batch: int, context: int, rounds: int) -> Rows:
    """NEW tokens for each of `batch` sequences behind `context` tokens."""
    cache, ids = DynamicCache(), torch.randint(1000, 40000, (batch, context + 1))
    for layer in range(SHAPE["num_hidden_layers"]):
        size = (batch, SHAPE["num_key_value_heads"], context, SHAPE["hidden_size"] // SHAPE["num_attention_heads"])
        cache.update(torch.randn(size), torch.randn(size), layer)

    def generates(model: Any) -> Call:
        def run() -> None:
            new = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
            model.generate(ids, attention_mask=torch.ones_like(ids), **{CACHE: cache}, pad_token_id=0, **new)
            cache.crop(context - cache.get_seq_length())

        return run

    calls: Calls = {name: generates(model) for name, model in models().items()}
    rows = compare(calls, rounds, about(batch, context, "generate"), PEER)
    return [row | {"tokens_per_second": float(f"{batch * NEW / row['seconds']:.3g}")} for row in rows]


def continuous_rows(rounds: int) -> Rows:
    """Prompts of lengths drawn evenly on a logarithmic scale, NEW_EACH tokens each."""
    rng = random.Random(0)
    lengths = [round(math.exp(rng.uniform(math.log(SHORTEST), math.log(LONGEST)))) for _ in range(REQUESTS)]
    prompts = [[rng.randrange(1000, 40000) for _ in range(n)] for n in lengths]
    keys = {"computed": 0, "needed": 0}
    batches_of = paged.batches_of

    def counting(starts: Any, *others: Any) -> list[paged.Batch]:
        batches = batches_of(starts, *others)
        keys["needed"] += int(starts[-1, 1])
        keys["computed"] += sum(batch.keys.numel() for batch in batches)
        return batches

    def answers(model: Any) -> Call:
        from transformers import GenerationConfig

        wanted = GenerationConfig(max_new_tokens=NEW_EACH, do_sample=False, eos_token_id=-1, pad_token_id=0)
        return lambda: model.generate_batch(prompts, generation_config=wanted, progress_bar=False)

    calls: Calls = {name: answers(model) for name, model in models().items()}
    paged.batches_of = counting
    try:
        rows = compare(calls, rounds, about(REQUESTS, LONGEST, "continuous batching"), PEER)
    finally:
        paged.batches_of = batches_of
    padding = round(keys["computed"] / keys["needed"], 3)
    rates = [{"tokens_per_second": float(f"{REQUESTS * NEW_EACH / row['seconds']:.3g}")} for row in rows]
    return [
        row | rate | ({"padding": padding} if row["backend"] == "auto" else {}) for row, rate in zip(rows, rates, strict=True)
    ]


def parts(rounds: int) -> Parts:
    found: Parts = {f"generate {b} x {n}": lambda b=b, n=n: generate_rows(b, n, rounds) for b, n in SIZES}  # type: ignore[misc]
    return found | {"continuous": lambda: continuous_rows(rounds)}


def main() -> None:
    parser = arguments(__doc__, RESULTS / "generation-cpu.json")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    run_parts(parts(args.rounds), args, "python lab/speed/generation.py")


if __name__ == "__main__":
    main()
