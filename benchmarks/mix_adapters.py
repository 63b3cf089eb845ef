"""One LoRA adapter of two that were trained alike: the mixtures of docs/lab/longer.md.

    python benchmarks/mix_adapters.py control pose --shares 0.5 0.5 --out mean-control-pose
    python benchmarks/mix_adapters.py control pose --shares 1 0.5 --out control+half-pose
    python benchmarks/mix_adapters.py control pose --second 'layers\\.(1[7-9]|2[0-4])\\.' --out control+pose-17-24
    python benchmarks/mix_adapters.py control pose --second '[qk]_proj' --out control+pose-qk

--shares adds both, each times its share, at twice the rank; --second takes the weights whose name it matches from the second
adapter and all others from the first. The result records no method: reading_far.py and longer_on_model.py put one on it.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapters", type=Path, nargs=2, metavar="ADAPTER", help="the first one without a method of its own")
    parser.add_argument("--out", type=Path, required=True)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--shares", type=float, nargs=2)
    how.add_argument("--second", metavar="REGEX")
    args = parser.parse_args()
    configs = [json.loads((path / CONFIG).read_text(encoding="utf-8")) for path in args.adapters]
    if len({(c["r"], c["lora_alpha"]) for c in configs}) > 1:
        parser.error("the adapters differ in rank or alpha")
    first, second = (load_file(path / WEIGHTS) for path in args.adapters)
    if first.keys() != second.keys():
        parser.error("the adapters differ in what they train")
    if args.second:
        mixed = {name: (second if re.search(args.second, name) else first)[name] for name in first}
    else:
        mixed = {}
        for name in first:
            a, b = args.shares if "lora_B" in name else (1.0, 1.0)
            mixed[name] = torch.cat([first[name] * a, second[name] * b], 1 if "lora_B" in name else 0).contiguous()
        configs[0] |= {key: 2 * configs[0][key] for key in ("r", "lora_alpha")}
    args.out.mkdir(parents=True)  # raises if it is there
    (args.out / CONFIG).write_text(json.dumps(configs[0], indent=2) + "\n", encoding="utf-8")
    save_file(mixed, args.out / WEIGHTS, {"format": "pt"})


if __name__ == "__main__":
    main()
