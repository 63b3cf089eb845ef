"""What a layer costs beside its arithmetic: a token decoded by a tiny model of many layers, where nothing else counts.

Every method twice: where it changes nothing (the text within its window or trained length), and where it acts. The row's
"host_us" is what a layer takes beyond one of the same model under sdpa ("layer_us"), in microseconds of this thread's CPU
time: the fastest of many rounds, in each of which every method takes a step, so that what else the machine does is left out.
Writes results/host-cpu.json (see timing.py); `python -m lab.pages` then rewrites docs/speed.md.
"""

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.integration.caches import CACHE
from lab.speed.timing import RESULTS, Call, Parts, Rows, arguments, run_parts

LAYERS, LENGTH, SHORT = 24, 64, 16
TINY = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "vocab_size": 64}
TINY |= {"num_key_value_heads": 2, "max_position_embeddings": 4096}
preset = LongAttnConfig.preset
#: Changing nothing at LENGTH: what `extend` takes, and one of each kind.
WITHIN = {
    "infoscale": preset("infoscale"),
    "rerope": preset("rerope"),
    "rerope+infoscale": preset("rerope+infoscale"),
    "yarn_beyond": preset("yarn_beyond"),
    "streaming": preset("streaming"),
    "scale_invariant, strength 0": preset("scale_invariant", strength=0.0),
}
#: Acting at LENGTH.
ACTING = {
    **{name: preset(name) for name in ("scale_invariant", "alibi", "cosscale", "adaptive_temperature", "attention_sink")},
    **{name: preset(name) for name in ("output_standardise", "output_layer_norm", "log_length")},
    **{name: preset(name, train_length=SHORT) for name in ("infoscale", "logn", "yarn_temperature")},
    **{name: preset(name, window=SHORT) for name in ("rerope", "leaky_rerope", "self_extend", "windowed", "streaming")},
    "lm_infinite": preset("lm_infinite", window=SHORT),
    "dual_chunk": preset("dual_chunk", chunk=SHORT, local=4),
    "string_remap": preset("string_remap", shift=SHORT, window=8),
    "yarn_beyond": preset("yarn_beyond", factor=8.0, train_length=SHORT),
    "rerope+infoscale": preset("rerope+infoscale", window=SHORT, train_length=2 * SHORT),
}


def step(config: LongAttnConfig | None) -> Call:
    """A token after LENGTH of them, by a model under a method, or under sdpa, called as generate() calls it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY), attn_implementation="sdpa").eval()
    if config is not None:
        hf_longattn.apply(model, config)
    cache, ids = DynamicCache(config=model.config), torch.randint(64, (1, LENGTH))
    given = {"attention_mask": torch.ones(1, LENGTH + 1, dtype=torch.int64), "position_ids": torch.tensor([[LENGTH]])}
    with torch.inference_mode():
        model(ids, **{CACHE: cache})

    @torch.inference_mode()
    def run() -> None:
        model(ids[:, :1], **{CACHE: cache}, **given, logits_to_keep=1)
        cache.crop(-1)

    return run


def cpu_seconds(call: Call) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def host_rows(configs: dict[str, LongAttnConfig], mode: str, rounds: int) -> Rows:
    """The time of a layer beyond sdpa's, for each method."""
    calls = {None: step(None)} | {name: step(config) for name, config in configs.items()}
    for call in calls.values():
        cpu_seconds(call)
    times: list[dict[Any, float]] = [{name: cpu_seconds(call) for name, call in calls.items()} for _ in range(rounds)]
    layer = {name: min(t[name] for t in times) / LAYERS * 1e6 for name in calls}
    rows: Rows = []
    for name in configs:
        row = {"method": name, "backend": "auto", "device": "cpu", "dtype": "float32", "mode": mode, "length": LENGTH}
        row |= {"layers": LAYERS, "rounds": rounds, "seed": 0, "layer_us": round(layer[None], 1)}
        rows.append(row | {"host_us": round(layer[name] - layer[None], 1)})
        print(f"{mode:12} {name:28} {rows[-1]['host_us']:8.1f} us a layer over sdpa's {layer[None]:.0f}", flush=True)
    return rows


def parts(rounds: int) -> Parts:
    return {
        "host within": lambda: host_rows(WITHIN, "within", rounds),
        "host acting": lambda: host_rows(ACTING, "acting", rounds),
    }


def main() -> None:
    parser = arguments(__doc__, RESULTS / "host-cpu.json")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    run_parts(parts(args.rounds), args, "python lab/speed/host.py")


if __name__ == "__main__":
    main()
