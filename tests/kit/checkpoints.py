"""Published checkpoints: the settings of `checkpoints.json` in tiny configs, and what `extend` makes of each of them.

    python tests/kit/checkpoints.py          rewrites their part of docs/models.json and docs/models.md

An entry holds what its config.json says of lengths, windows and rotation, `trained` as its makers tell it, `assumed` where its
settings allow two readings, `may_refuse` where `extend` may raise, and `source`, where the settings are quoted.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import transformers

from hf_longattn.evaluation.outlook import outlook, trained_line
from hf_longattn.integration.trained_length import trained

CHECKPOINTS = {c["name"]: c for c in json.loads((Path(__file__).parent / "checkpoints.json").read_text(encoding="utf-8"))}
#: What makes any of them tiny; a config takes what it knows of this.
TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "n_routed_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
}


def tiny_config(checkpoint: dict[str, Any]) -> Any:
    """Its own settings of lengths, windows and rotation, and little else."""
    kind = transformers.CONFIG_MAPPING[checkpoint["model_type"]]
    known, own = kind().to_dict().keys(), kind.attribute_map
    rope = copy.deepcopy(checkpoint["rope_parameters"])
    share = rope.get("partial_rotary_factor", checkpoint["config"].get("partial_rotary_factor", 1.0))
    for key in ("short_factor", "long_factor"):
        if isinstance(rope.get(key), str):
            rope[key] = [{"ones": 1.0, "fours": 4.0}[rope[key]]] * int(share * TINY["head_dim"] / 2)
    if "mrope_section" in rope:
        rope["mrope_section"] = [2, 1, 1]
    heads = {"num_key_value_heads": 4} if "kv_lora_rank" in known else {}
    settings = {own.get(k, k): v for k, v in TINY.items() if own.get(k, k) in known} | heads | checkpoint["config"]
    lengths = {"max_position_embeddings": checkpoint["max_position_embeddings"], "rope_parameters": rope}
    return kind(**settings, **{k: v for k, v in lengths.items() if v})


def rows() -> list[dict[str, Any]]:
    """What `hf-longattn doctor` says of every checkpoint, line by line."""
    return [row(checkpoint) for checkpoint in CHECKPOINTS.values()]


def row(checkpoint: dict[str, Any]) -> dict[str, Any]:
    config = tiny_config(checkpoint)
    reaches = outlook(config)
    told = {"trained": trained_line(trained(config)), "extend": [str(x) for x in reaches]}
    about = {key: checkpoint.get(key, "") for key in ("name", "model_type", "note", "source")}
    return about | told | {"refused": all(x.refused for x in reaches)}


def line(row: dict[str, Any]) -> str:
    """A checkpoint's line on the page: its trained length, with the reason where it is not the usual one; and what `extend`
    does, without the lengths, which the head gives, or why it refuses.
    """
    name = row["name"] + f" ({row['note']})" * bool(row["note"])
    trained = row["trained"].removeprefix("trained at ").replace(": max_position_embeddings", "", 1)
    if row["refused"]:
        return f"| {name} | {trained} | {row['extend'][0]} |"
    twice, more = (text.partition(": ")[2].removesuffix(" in every attention layer") for text in row["extend"])
    cells = [twice, "the same" if more == twice else more]
    return f"| {name} | {trained} | {' | '.join(cells)} |".replace(" attention layers", " layers")


def section(rows: list[dict[str, Any]]) -> list[str]:
    """Their part of docs/models.md."""
    rows = sorted(rows, key=lambda r: r["name"].lower())
    head = ["| checkpoint | trained length | `extend` to 2 × | to 8 × |", "|---|---|---|---|"]
    table, refused = ([line(r) for r in rows if r["refused"] is which] for which in (False, True))
    return [
        "## Published checkpoints",
        "",
        f"What [`extend`](how-to/extend.md) chooses for {len(rows)} checkpoints, tried on tiny random models with the "
        "lengths, windows and rotary settings of their configs. `hf-longattn doctor MODEL` prints the same for any "
        "config. What it gains was [measured](lab/longer.md) on few models, and above four times the trained length "
        "none was [shown to read well](lab/negative.md). If nothing else is said, the trained length is "
        "`max_position_embeddings`, and the method is in every attention layer. Layers are counted among all of the "
        "config, or among 4 if its source does not give their number. *(text)* is the language model of one that "
        "reads pictures, which are read [axis by axis](reference/methods/position_remaps.md#pictures-m-rope). "
        "[models.json](models.json) names the source of each config; `python tests/kit/checkpoints.py` rewrites this "
        "part alone.",
        "",
        *head,
        *table,
        "",
        "Refused by `extend` (which other methods they take: see the lists by model type below):",
        "",
        "| checkpoint | trained length | reason |",
        "|---|---|---|",
        *refused,
        "",
    ]


if __name__ == "__main__":
    import coverage_models

    coverage_models.rewrite(checkpoints=rows())
