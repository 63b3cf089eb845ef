"""Every language model that transformers knows, tiny and random, under our methods: exact, refused, or a bug.

    python tests/kit/coverage_models.py                    all of them; rewrites docs/models.json and docs/models.md
    python tests/kit/coverage_models.py --shard 1/2        every second one; the rows of the others stay as they are
    python tests/kit/coverage_models.py --only llama mpt   prints those rows; the others stay as they are

Models that read images are given text alone. A model is *exact* if all of this holds: a method of strength 0 gives the
model's own logits in every way of feeding it; a method gives the same logits with a cache, in chunks, with padding on the
left, on the right and inside a text, and packed (where the model itself does); so do methods of the other slots and a
remap, under which jumps of positions that lie beyond its window must make no difference; loading with the method equals
applying it; and removing the method restores the logits. A model is *refused* if `apply` raises an error with the reason.
Anything else fails the run (exit status 1), except models that could not be built, whose own error is recorded.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import multiprocessing
import re
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import checkpoints
import torch
import transformers
from tiny_configs import VOCAB, class_of, families, multimodal, tiny
from torch import Tensor
from transformers import StaticCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.integration.caches import CACHE
from hf_longattn.integration.skip_masks import masks_of_jumps

DOCS = Path(__file__).parents[2] / "docs"
RESULTS, PAGE = DOCS / "models.json", DOCS / "models.md"
LENGTH, PAD, LARGEST, SECONDS = 24, 5, 50_000_000, 180
#: Largest difference of logits in float32, relative to the largest logit. Rounding alone reaches 5.5e-5, without AVX.
TOLERANCE = 1e-4
METHOD = LongAttnConfig.preset("scale_invariant", tau=2.0)
OTHER_SLOTS = LongAttnConfig.preset(
    "infoscale+cosscale+output_standardise+attention_sink", train_length=4, scale=5.0, deviation=0.3
)
SHOWN = LongAttnConfig.preset("streaming", window=7, sinks=2)
REMAP = LongAttnConfig.preset("rerope", window=7)
#: Of models whose rotating layers all have windows.
NOTHING = "nothing to remap"

Way = Callable[[Any, Tensor], Tensor]
Row = dict[str, Any]


class Wrong(Exception):
    """A model that is neither exact nor refused."""


# Ways to feed a model --------------------------------------------------------------------------------------------------


def whole(model: Any, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits


def chunks(model: Any, ids: Tensor, sizes: tuple[int, ...] = (9, 1, 1, 5, 8), cache: Any = None) -> Tensor:
    out = []
    for part in ids.split(sizes, 1):
        step = model(part, **{CACHE: cache}, use_cache=True)
        cache = step.get(CACHE)
        out.append(step.logits)
    return torch.cat(out, 1)


def token_by_token(model: Any, ids: Tensor, cache: Any = None) -> Tensor:
    return chunks(model, ids, (LENGTH - 4, 1, 1, 1, 1), cache)


def static_cache(model: Any, ids: Tensor) -> Tensor:
    return token_by_token(model, ids, StaticCache(config=model.config, max_cache_len=LENGTH + 9))


def left_padded(model: Any, ids: Tensor) -> Tensor:
    """The first tokens of row 0 behind padding, then zeros; row 1 as it is."""
    padded, mask = _padded(ids)
    logits = _positioned(model, padded, mask, use_cache=False).logits
    return torch.stack([torch.nn.functional.pad(logits[0, PAD:], (0, 0, 0, PAD)), logits[1]])


def generated(model: Any, ids: Tensor) -> Tensor:
    """The logits of four greedy tokens of a left-padded batch."""
    padded, mask = _padded(ids)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "num_beams": 1}
    out = model.generate(padded, attention_mask=mask, **options, output_logits=True, return_dict_in_generate=True)
    return torch.stack(out.logits, 1)


def right_padded(model: Any, ids: Tensor) -> Tensor:
    """Row 0 in front of padding, row 1 behind as much."""
    pad, one = ids.new_zeros(1, PAD), torch.ones(1, LENGTH, dtype=ids.dtype)
    padded = torch.cat([torch.cat([ids[:1], pad], 1), torch.cat([pad, ids[1:]], 1)])
    mask = torch.cat([torch.cat([one, pad], 1), torch.cat([pad, one], 1)])
    logits = _positioned(model, padded, mask, use_cache=False).logits
    return torch.stack([logits[0, :LENGTH], logits[1, PAD:]])


def padded_inside(model: Any, ids: Tensor) -> Tensor:
    """Padding inside a text as generate() reads it: its last tokens one by one behind a cache."""
    whole = torch.cat([ids[:, :10], ids.new_zeros(2, PAD), ids[:, 10:]], 1)
    mask = torch.ones_like(whole)
    mask[:, 10 : 10 + PAD] = 0
    out, cache, end = [], None, 0
    for size in (LENGTH + PAD - 3, 1, 1, 1):
        begin, end = end, end + size
        step = _positioned(model, whole[:, begin:end], mask[:, :end], use_cache=True, **{CACHE: cache})
        cache = step.get(CACHE)
        out.append(step.logits)
    return torch.cat(out, 1)[:, mask[0].bool()]


def packed(model: Any, ids: Tensor) -> Tensor:
    """Both rows in one, told apart by their positions."""
    positions = torch.arange(LENGTH).repeat(2)[None]
    return model(ids.reshape(1, -1), position_ids=positions, use_cache=False).logits.reshape(2, LENGTH, -1)


def jumping(model: Any, ids: Tensor, jump: int) -> Tensor:
    """A text whose second half lies `jump` positions further."""
    positions = torch.arange(LENGTH)[None]
    positions = torch.where(positions >= LENGTH // 2, positions + jump, positions)
    masks = masks_of_jumps(model, ids, positions.expand_as(ids))
    return model(ids, position_ids=positions, attention_mask=masks, use_cache=False).logits


def _positioned(model: Any, ids: Tensor, mask: Tensor, **arguments: Any) -> Any:
    """A call with the positions that generate() makes, or without where a model takes none."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    try:
        return model(ids, attention_mask=mask, position_ids=positions, **arguments)
    except TypeError as error:
        if "position_ids" not in str(error):
            raise
    return model(ids, attention_mask=mask, **arguments)


def _padded(ids: Tensor) -> tuple[Tensor, Tensor]:
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[0, PAD:] = ids[0, :-PAD]
    padded[0, :PAD] = mask[0, :PAD] = 0
    return padded, mask


_ALL = (whole, chunks, token_by_token, static_cache, left_padded, right_padded, padded_inside, packed, generated)
WAYS: dict[str, Way] = {f.__name__: f for f in _ALL}


def expected(full: Tensor, way: str) -> Tensor:
    """What a way must give, from the logits of one plain pass."""
    if way == "left_padded":
        full = full.clone()
        full[0, -PAD:] = 0
    return full


# One model -------------------------------------------------------------------------------------------------------------


def build(name: str) -> Any:
    """The tiny model; its weights follow from torch's seed."""
    config = tiny((families() | multimodal())[name])
    cls = class_of(config)
    # a composite config of which the language model takes a part
    config = next((v for v in vars(config).values() if isinstance(v, cls.config_class)), config)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls._from_config(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise MemoryError(f"{size / 1e6:.0f} million parameters: tiny_configs.py does not know how to shrink it")
    return cls._from_config(config).eval()


@torch.no_grad()
def examine(name: str) -> Row:
    """One row of the table."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    began = time.perf_counter()
    signal.signal(signal.SIGALRM, _too_slow)
    signal.alarm(SECONDS)
    torch.manual_seed(0)
    row: Row = {"model_type": name, "status": "not built"}
    try:
        model = build(name)
        ids = torch.randint(3, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))
        own = {"whole": whole(model, ids)}
    except Exception as error:
        return row | {"reason": one_line(error)}
    finally:
        signal.alarm(0)
    signal.alarm(SECONDS)
    row |= {"model": type(model).__name__, "status": "exact"}
    before = _implementations(model)
    try:
        for way in list(WAYS)[1:]:
            try:
                own[way] = WAYS[way](model, ids)
            except Exception as error:
                row.setdefault("own_errors", {})[way] = one_line(error)
        row |= _compared(model, ids, own)
        if _implementations(model) != before or off(whole(model, ids), own["whole"]) > 0:
            raise Wrong(f"not undone: runs {Counter(_implementations(model))}, ran {Counter(before)}")
    except Wrong as error:
        row |= {"status": "failed", "reason": str(error)}
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        row |= {"status": "failed", "reason": f"{one_line(error)} ({Path(where.filename).name}, line {where.lineno})"}
    finally:
        signal.alarm(0)
    return row | {"seconds": round(time.perf_counter() - began, 1)}


def _compared(model: Any, ids: Tensor, own: dict[str, Tensor]) -> Row:
    """What was found; Wrong if anything is neither exact nor refused."""
    same = [w for w in own if w != "generated" and off(own[w], expected(own["whole"], w)) <= TOLERANCE]
    row: Row = {"own_differ": [w for w in own if w not in (*same, "generated")], "largest": 0.0}
    for layers in ("full_attention", "all"):  # the latter is what a refusal for windows advises
        method = METHOD.replace(layers=layers)
        # a backend by name computes what "auto" leaves to the model's own attention
        reason = _refusal(model, method.replace(strength=0.0, backend="tiled"))
        loaded = _loaded(model, method)
        if isinstance(loaded, str) != bool(reason):
            raise Wrong(f"apply: {reason or 'works'}; load: {loaded if isinstance(loaded, str) else 'works'}")
        if reason:
            row.setdefault("reason", reason)
            continue
        # towers for pictures and sound, which keep their own implementation, are no part of it
        plans = [r for r in hf_longattn.describe(model).rows if not r[2].startswith("runs ")]
        row["left_alone"] = dict(Counter(r[2].partition(", runs ")[0] for r in plans if r[1] == "unchanged"))
        row |= {"layers": layers, "changed": len(plans) - sum(row["left_alone"].values())}
        what = f'layers="{layers}"'
        worst = [_identical(model, ids, f"{what}, strength 0", own, row["own_differ"])]
        hf_longattn.update(model, strength=1.0, backend="auto")
        _close(f"{what}, loaded", whole(loaded, ids), whole(model, ids))
        worst.append(_consistent(model, ids, what, same, own))
        hf_longattn.remove(model)
        for name, config in (("other_slots", OTHER_SLOTS), ("shown", SHOWN)):
            if not (reason := _refusal(model, config.replace(layers=layers))):
                worst.append(_consistent(model, ids, f"{what}, {config.name}", same, own))
                hf_longattn.remove(model)
            row[name] = reason or "exact"
        row["largest"] = max(row["largest"], *worst)
        if "sliding window" not in row["left_alone"]:
            break
    if "layers" not in row:
        return {"status": "refused", "reason": row["reason"]}
    row["remap"] = _refusal(model, REMAP) or "exact"
    if row["remap"] == "exact":
        if any(REMAP.name in what for _, what, _ in hf_longattn.describe(model).rows):
            worst = [_consistent(model, ids, "rerope", same, own), _jumps(model, ids)]
        else:  # as the warning says; so it must be the model as it was
            row["remap"], worst = NOTHING, [_identical(model, ids, "rerope", own, row["own_differ"])]
        hf_longattn.update(model, window=100)
        worst.append(_identical(model, ids, "rerope beyond the text", own, row["own_differ"]))
        hf_longattn.remove(model)
        row["largest"] = max(row["largest"], *worst)
    return row | {"largest": float(f"{row['largest']:.1e}")}


def _identical(model: Any, ids: Tensor, what: str, own: dict[str, Tensor], differ: list[str]) -> float:
    worst = 0.0
    for way, logits in own.items():
        try:
            worst = max(worst, _run(f"{what}, {way}", way, model, ids, logits))
        except Wrong as error:
            # a model that counts positions wrongly by itself may be refused
            if way not in differ or not isinstance(error.__cause__, (ValueError, NotImplementedError)):
                raise
    return worst


def _consistent(model: Any, ids: Tensor, what: str, ways: list[str], own: dict[str, Tensor]) -> float:
    full = whole(model, ids)
    if not full.isfinite().all():
        raise Wrong(f"{what}: logits are not finite")
    if off(full, own["whole"]) < 5 * TOLERANCE:
        raise Wrong(f"{what}: changes nothing")
    if "generated" in own:
        WAYS["generated"](model, ids)
    return max(_run(f"{what}, {way}", way, model, ids, expected(full, way)) for way in ways)


def _jumps(model: Any, ids: Tensor) -> float:
    """Under a remap both halves of a text see each other at the window's distance, however far the second one lies."""
    near, far = (jumping(model, ids, jump) for jump in (20, 60))
    return _close("rerope, jumping positions", near, far)


def _run(what: str, way: str, model: Any, ids: Tensor, wanted: Tensor) -> float:
    try:
        logits = WAYS[way](model, ids)
    except Exception as error:
        raise Wrong(f"{what}: {one_line(error)}") from error
    return _close(what, logits, wanted)


def _close(what: str, logits: Tensor, wanted: Tensor) -> float:
    difference = off(logits, wanted)
    if not difference <= TOLERANCE:
        raise Wrong(f"{what}: off by {difference:.1e} of the largest logit")
    return difference


def off(a: Tensor, b: Tensor) -> float:
    return float("inf") if a.shape != b.shape else float((a - b).abs().max() / b.abs().max())


def _refusal(model: Any, config: LongAttnConfig) -> str:
    """Why a model does not take a config, or nothing; a TypeError and its like are no refusal."""
    try:
        hf_longattn.apply(model, config)
    except (ValueError, NotImplementedError) as error:
        return one_line(error)
    return ""


def _loaded(model: Any, method: LongAttnConfig) -> Any:
    """The same weights in a model that was built under the method, or why it refuses."""
    config = copy.deepcopy(model.config)
    config.longattn = method
    try:
        loaded = type(model)._from_config(config, attn_implementation=method.name).eval()
    except (ValueError, NotImplementedError) as error:
        return one_line(error)
    loaded.load_state_dict(model.state_dict())
    return loaded


def _implementations(model: Any) -> list[str]:
    return [str(m.config._attn_implementation) for m in model.modules() if hasattr(m, "config")]


def one_line(error: Exception) -> str:
    kind = "" if isinstance(error, (ValueError, NotImplementedError)) else f"{type(error).__name__}: "
    text = " ".join(str(error).split())
    return kind + re.sub(r"^\S+ applies to 0 layers of \w+: ", "", text)


def _too_slow(*_: Any) -> None:
    raise TimeoutError(f"took more than {SECONDS} s")


NOTES = """\
### Sinks, biases and packed documents of a model's own

- Learned sinks (`s_aux`: gpt-oss, granite_swa, granitemoe_swa, flint, mimo_v2_flash) remain under every method;
  [attention_sink](reference/methods/attention_sink.md) adds another term.
- A `position_bias` (inkling, inkling2) is refused: it is a tensor of heads x queries x keys, which no kernel here supports.
- Packed documents are refused in models that build their masks without position_ids (gpt-oss, afmoe, granitemoehybrid, opt,
  Bart and similar ones): in transformers itself documents see each other there. Give each document a row of its own.
""".splitlines()


# The page --------------------------------------------------------------------------------------------------------------


def page(results: dict[str, Any]) -> str:
    """docs/models.md from the content of docs/models.json."""
    rows = {s: [r for r in results["rows"] if r["status"] == s] for s in ("exact", "refused", "not built", "failed")}
    lines = [
        "# Models",
        "",
        *checkpoints.section(results["checkpoints"]),
        "## Every language model of transformers",
        "",
        *__doc__.split("\n\n")[-1].strip().split("\n"),
        "",
        f"`make coverage-models` wrote this page from [models.json](models.json): {results['versions']}, {results['date']}, "
        f"{results['minutes']} minutes. Of {len(results['rows'])} model types "
        f"{len(rows['exact'])} are exact, {len(rows['refused'])} refused, {len(rows['not built'])} not built"
        + (f", **{len(rows['failed'])} fail{'s' * (len(rows['failed']) == 1)}**" if rows["failed"] else "")
        + ".",
        "",
    ]
    if rows["failed"]:
        lines += ["### Fail", "", "| model type | what happens |", "|---|---|"]
        lines += [f"| {r['model_type']} | {r['reason']} |" for r in rows["failed"]] + [""]
    lines += [
        "### Exact",
        "",
        '*Changed* counts the attention layers of the tiny model that a method changes, under `layers="all"` where it '
        "has sliding windows. *Remaps* are rerope and similar methods; where only sliding-window layers rotate there "
        "is nothing to remap, and a remap warns and changes nothing. *Differs by itself* names ways of feeding the "
        "model that change its logits without a method, too; there only strength 0 was compared.",
        "",
        "| model type | changed | left alone | remaps | differs by itself |",
        "|---|---|---|---|---|",
    ]
    for row in rows["exact"]:
        own = ", ".join(row["own_differ"]).replace("_", " ")
        remap = row["remap"] if row["remap"] in ("exact", NOTHING) else "refused"
        lines.append(f"| {row['model_type']} | {row['changed']} | {', '.join(row['left_alone'])} | {remap} | {own} |")
    lines += ["", "Where remaps are refused:", ""]
    lines += _by_reason((r["model_type"], r["remap"]) for r in rows["exact"] if r["remap"] not in ("exact", NOTHING))
    lines += ["", *NOTES]
    for status, title in (("refused", "Refused"), ("not built", "Not built")):
        lines += ["", f"### {title}", "", *_by_reason((r["model_type"], r["reason"]) for r in rows[status])]
    for names, what in (
        (results["unexamined"], "read images and text, and were not examined yet"),
        (results["others"], "have neither a causal language model nor one that reads images and text among its auto classes"),
    ):
        if names:
            lines += [
                "",
                f"### {len(names)} others",
                "",
                f"Model types of transformers that {what}: they are named in [models.json](models.json).",
            ]
    return "\n".join([*lines, ""])


def _by_reason(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """A table: one row for every reason, with the model types that it holds for."""
    found: dict[str, list[str]] = {}
    for name, reason in pairs:
        reason = re.sub(r"\b(model|transformer|gpt_neox)\.\S+", "a layer", reason)
        reason = re.sub(r"^\S+ (cannot go into) (the layers .* of )?\w+: ", r"\1 it: ", reason)
        found.setdefault(reason, []).append(name)
    rows = (f"| {', '.join(names)} | {reason} |" for reason, names in found.items())
    return ["| model types | reason |", "|---|---|", *rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", default="1/1")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    which, of = map(int, args.shard.split("/"))
    names = args.only or sorted(families() | multimodal())[which - 1 :: of]
    began, rows = time.perf_counter(), []
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn"), _one_thread) as pool:
        for row in pool.map(examine, names):
            rows.append(row)
            print(
                json.dumps(row) if args.only else f"{row['status']:9} {row['model_type']}: {row.get('reason', '')}", flush=True
            )
    print(dict(Counter(r["status"] for r in rows)))
    done = {r["model_type"] for r in rows}
    old = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if args.only or of > 1 else []
    about = {
        "command": "make coverage-models",
        "versions": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "date": datetime.date.today().isoformat(),
        "minutes": round((time.perf_counter() - began) / 60, 1),
    }
    kept = [*rows, *(r for r in old if r["model_type"] not in done)]
    rewrite(**({} if args.only else about), rows=sorted(kept, key=lambda r: r["model_type"]), checkpoints=checkpoints.rows())
    return int(any(r["status"] == "failed" for r in rows))


def rewrite(**changes: Any) -> None:
    """Both files, with changed parts of the results."""
    results = json.loads(RESULTS.read_text(encoding="utf-8")) | changes
    results["unexamined"] = sorted(multimodal().keys() - {r["model_type"] for r in results["rows"]})
    results["others"] = sorted(CONFIG_MAPPING_NAMES.keys() - families().keys() - multimodal().keys())
    lists = {key: ",\n".join(json.dumps(r) for r in results.pop(key)) for key in ("checkpoints", "rows")}
    text = json.dumps(results)[:-1] + "".join(f', "{key}": [\n{lines}\n]' for key, lines in lists.items()) + "}\n"
    RESULTS.write_text(text, encoding="utf-8")
    PAGE.write_text(page(json.loads(text)), encoding="utf-8")


def _one_thread() -> None:
    torch.set_num_threads(1)


if __name__ == "__main__":
    sys.exit(main())
