"""What would silently not work with a checkpoint here: versions, rotary settings, method, kernels, engines, positions."""

from __future__ import annotations

import difflib
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from importlib.util import find_spec
from typing import Any

import torch
from packaging.requirements import Requirement
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import cached_file

from ..attention.kernels.precision import fast_dtype
from ..checks import Refused
from ..config import LongAttnConfig
from ..integration import trained
from ..integration.layers import language_config, pretrained
from ..integration.model import knowing
from ..integration.names import is_ours
from ..integration.record import ADAPTER, method_in
from .loading import load_tokenizer, load_weights, precision_of, speaks
from .outlook import outlook, trained_line

#: Engines that build a model by its architecture's name, from code of their own, and read nothing of a method.
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "llama_cpp": "llama.cpp", "ctranslate2": "CTranslate2", "mlx_lm": "MLX"}
#: Names that rope types had before they had those of today.
RENAMED = {"su": "longrope", "mrope": "default"}
#: What rotary settings may hold; a key that is near one of these is a slip.
TRAINED = "original_max_position_embeddings"
KEYS: tuple[str, ...] = ("rope_type", "rope_theta", "factor", "partial_rotary_factor", TRAINED, "max_position_embeddings")
KEYS += ("attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim")  # yarn
KEYS += ("low_freq_factor", "high_freq_factor", "short_factor", "long_factor")  # llama3, longrope
#: The same words at every position; how much their loss may change, in float32 and in half precision.
WORDS = (
    "The harbour was quiet at that hour. Two men carried a heavy chest along the pier and set it down beside the boat, and "
    "the older of the two wiped his face and looked out over the water. There would be rain before noon, he said, and after "
    "the rain a wind from the north, and whoever wanted to be on the island by evening had better leave now. The younger "
    "man said nothing. He looked at the chest, then at the boat, and wondered which of them was the older one."
)
MAY_CHANGE = {torch.float32: 0.01, torch.float64: 0.01}
HALF_MAY_CHANGE = 0.1


NOTE, PROBLEM = "note", "problem"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. A problem: results would be wrong, or not those of the method, without a word."""

    topic: str
    text: str
    level: str = "ok"


def examine(model: str, dtype: str = "auto", device: str = "cpu", weights: bool = True) -> Iterator[Finding]:
    """Look at a checkpoint or adapter (a folder or a name on the Hub) and at this environment, a finding at a time.

    Args:
        weights: False looks at configs alone: nothing is loaded, no rotary buffers are compared, no passage is read.

    Raises:
        OSError: there is no such model.
    """
    yield from installed_versions()
    adapter = PreTrainedConfig.get_config_dict(model, _configuration_file=ADAPTER)[0] if _adapter(model) else {}
    base = adapter.get("base_model_name_or_path") or model
    saved = PreTrainedConfig.get_config_dict(base)[0]
    own = method_in(saved)
    method = method_in(adapter) or own
    if adapter and method is None:
        yield Finding("method", "the adapter records no attention: if it was trained under a method, it runs without it", NOTE)
    yield from kernels(method)
    yield from engines(method, saved.get("architectures") or ())
    try:
        config = AutoConfig.from_pretrained(base)
    except (ValueError, KeyError) as error:
        yield Finding("method", f"the config is refused: {error}", PROBLEM)
        return
    yield from lost_rotary_settings(saved, config)
    yield from trained_length(method, config)
    if not weights:
        if method is None or method == own:
            yield from what_runs(method, config)
        elif own is None:
            yield Finding("method", f"{method.name}, which loading the adapter puts in")
        else:
            text = f"the adapter was trained under {method.name}, and its base runs {own.name}: loading refuses it"
            yield Finding("method", text, PROBLEM)
        return
    with warnings.catch_warnings(record=True) as caught, knowing():
        warnings.simplefilter("always", UserWarning)
        try:
            loaded = load_weights(base, adapter=model if adapter else None, dtype=precision_of(base, dtype, device))
        except Refused as error:
            yield Finding("weights", str(error), PROBLEM)
            return
        except Exception as error:
            yield Finding("loading", f"it does not load: {type(error).__name__}: {error}", PROBLEM)
            return
    yield from (Finding("loading", str(w.message), NOTE) for w in caught if w.category is UserWarning)
    loaded = loaded.to(device).eval()
    yield from what_runs(method, pretrained(loaded).config)
    yield from rotary_buffers(loaded)
    base_model = pretrained(loaded)
    if speaks(base_model.config, type(base_model)):
        yield from positions(loaded, model)
    else:
        yield Finding("positions", f"a {type(base_model).__name__} predicts no text that it reads: no passage is read")


def installed_versions() -> Iterator[Finding]:
    """What is installed, against what this package asks for."""
    stated, extras = [], []
    for line in requires("hf_longattn") or ():
        target = Requirement(line)
        try:
            installed = version(target.name)
        except PackageNotFoundError:
            continue
        if target.specifier and not target.specifier.contains(installed, prereleases=True):
            text = f"{target.name} {installed} is installed, and {target.name}{target.specifier} is what is tested"
            yield Finding("versions", text, PROBLEM)
        elif target.marker is None:
            stated.append(f"{target.name} {installed}")
        elif target.name not in extras:
            extras.append(target.name)
    yield Finding("versions", ", ".join(stated))


def kernels(method: LongAttnConfig | None) -> Iterator[Finding]:
    """Backends that are not here; one that the checkpoint insists on, and cannot have, is a problem."""
    missing = {
        "triton": None if find_spec("triton") else "triton is not installed",
        "flash": None if find_spec("flash_attn") or find_spec("flash_attn_interface") else "flash-attn is not installed",
    }
    insists = "auto" if method is None else method.backend
    if missing.get(insists):
        yield Finding("kernels", f"the checkpoint insists on backend {insists!r}: {missing[insists]}", PROBLEM)
    absent = [reason for reason in missing.values() if reason]
    where = "a GPU is here" if torch.cuda.is_available() else f"no GPU is here; this CPU multiplies {fast_dtype()} fast"
    yield Finding("kernels", "; ".join([where, *absent]))


def engines(method: LongAttnConfig | None, architectures: Sequence[str] = ()) -> Iterator[Finding]:
    """Engines that are installed here and would run a checkpoint with a method without it; strict ones they refuse."""
    if method is None:
        return
    if any(name.startswith("LongAttn") for name in architectures):
        yield Finding("engines", "the checkpoint is strict: engines with code of their own refuse it")
    elif result := [name for module, name in ENGINES.items() if find_spec(module) and not (module == "vllm" and _plugged())]:
        text = f"{' and '.join(result)} would silently run this checkpoint without its method"
        yield Finding("engines", f"{text}: save it with strict=True, and generate with transformers", PROBLEM)
    else:
        yield Finding("engines", "no installed engine would drop the method")


def _plugged() -> bool:
    """Whether vLLM finds this package's plugin, which runs a method or refuses it by name."""
    chosen = os.environ.get("VLLM_PLUGINS")
    plugins = [e.name for e in entry_points(group="vllm.general_plugins") if e.value.startswith("hf_longattn")]
    return any(chosen is None or name in chosen.split(",") for name in plugins)


def what_runs(method: LongAttnConfig | None, config: Any) -> Iterator[Finding]:
    """Whether what a checkpoint records is what runs."""
    text = language_config(config)
    runs = text._attn_implementation
    if method is None:
        yield Finding("method", "the checkpoint records none" + (f" and runs {runs}" if runs else ""))
        return
    name = method.name
    section = getattr(text, "longattn", None)
    same = section is not None and LongAttnConfig.from_dict(dict(section)).name == name
    if not is_ours(runs) or not same:
        lost = f"the checkpoint records {name} and is loaded under {runs}: its attn_implementation was lost or overruled"
        yield Finding("method", f'{lost}. Load it with attn_implementation="longattn", and save it again', PROBLEM)
    else:
        yield Finding("method", f"{name}, as recorded")
    known, announced = trained.recorded(text, method.to_dict()).length, max(trained.said(text).values(), default=0)
    unscaled = trained.rope_settings(text).get("rope_type", "default") in trained.UNSCALED
    if unscaled and known is not None and announced > max(known, method.reach):
        says = f"config.json announces {announced} tokens and keeps {known} as the trained length"
        way_out = f"extend it anew, or set max_position_embeddings to {known}"
        yield Finding("method", f"{says}, and {name} reads no further than that: {way_out}", PROBLEM)


# rotary settings --------------------------------------------------------------------------------------------------------


def trained_length(method: LongAttnConfig | None, config: Any) -> Iterator[Finding]:
    """The length that the model was trained at, where that is from, and how far `extend` goes from there."""
    text = language_config(config)
    known = trained.recorded(text, None if method is None else method.to_dict())
    yield Finding("trained", trained_line(known), NOTE if known.assumed or known.length is None else "ok")
    told = None if known.length == trained.trained(text).length else known.length
    try:
        reaches = outlook(text, told)
    except Exception as error:  # of a model's own code, with sizes that it does not expect
        yield Finding("extend", f"not tried: no tiny model of this config could be built ({error})", NOTE)
        return
    yield from (Finding("extend", str(reach), NOTE if reach.refused else "ok") for reach in reaches)


def lost_rotary_settings(saved: Mapping[str, Any], config: Any) -> Iterator[Finding]:
    """Every rotary setting of the file config.json, against the config that transformers made of it."""
    text = language_config(config)
    loaded = by_layer_type(getattr(text, "rope_parameters", None) or {})
    asked = list(dict.fromkeys(_asked(saved)))
    for where, kind, key, value in asked:
        runs = [s.get(key) for s in ([loaded[kind]] if kind in loaded else loaded.values())]
        if key not in KEYS and (near := difflib.get_close_matches(key, KEYS, 1)):
            yield Finding("rope", f"{where}{key} in config.json is never read: did you mean {near[0]}?", PROBLEM)
        elif value not in (*runs, "default", 1.0) and ("rope" in where or key != TRAINED):
            mismatch = f"config.json says {where}{key} = {value!r}, and {runs[0] if runs else None!r} is what runs"
            way_out = "transformers ignores it: write it into rope_parameters of the text model's config"
            yield Finding("rope", f"{mismatch}; {way_out}", PROBLEM)
    for settings in loaded.values():
        kind = settings.get("rope_type", "default")
        if kind == "default" and (settings.get("factor") or 1.0) != 1.0:
            yield Finding("rope", "rope_parameters has a factor and no rope_type: nothing is scaled", PROBLEM)
        if kind in ("yarn", "llama3", "longrope") and not any(key == TRAINED for _, _, key, _ in asked):
            yield Finding(
                "rope",
                f"{kind} names no {TRAINED}: transformers takes max_position_embeddings, {text.max_position_embeddings}, for "
                "the trained length. Where that is the extended one, the scaling is wrong",
                NOTE,
            )


def by_layer_type(settings: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Rotary settings by layer type, or under "" where all layers share theirs."""
    nested = {kind: x for kind, x in settings.items() if isinstance(x, Mapping)}
    return nested or ({"": settings} if settings else {})


def _asked(saved: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Any]]:
    """(where, layer type, key, value) of the rotary settings in a config.json, those of its text model included."""
    for key in ("rope_theta", "partial_rotary_factor", TRAINED):
        if saved.get(key) is not None:
            yield "", "", key, saved[key]
    for name in ("rope_scaling", "rope_parameters"):
        for kind, settings in by_layer_type(saved.get(name) or {}).items():
            for key, value in settings.items():
                key, value = ("rope_type", RENAMED.get(value, value)) if key in ("type", "rope_type") else (key, value)
                if value is not None and not isinstance(value, (list, dict)):
                    yield f"{name}.{kind}{'.' * bool(kind)}", kind, key, value
    for part in ("text_config", "llm_config", "decoder"):
        if isinstance(saved.get(part), Mapping):
            yield from ((f"{part}.{where}", kind, key, value) for where, kind, key, value in _asked(saved[part]))


def rotary_buffers(model: nn.Module) -> Iterator[Finding]:
    """The frequencies that a built model rotates by, against those that its config asks for."""
    text = language_config(pretrained(model).config)
    loaded = getattr(text, "rope_parameters", None) or {}
    if not loaded:
        yield Finding("rope", "no rotary positions")
        return
    result = {name.rpartition(".")[2]: buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    for kind, settings in by_layer_type(loaded).items():
        buffer = result.get(f"{kind}_inv_freq" if kind else "inv_freq")
        name = settings.get("rope_type", "default") + f" ({kind})" * bool(kind)
        if buffer is None:
            asks = settings.get("rope_type", "default") != "default"
            where = f"the model has no rotary buffer to compare; it asks for {name}"
            yield Finding("rope", where + (", which its code may not know" if asks else ""), PROBLEM if asks else "ok")
            continue
        expected = frequencies(settings, text, 2 * len(buffer))
        if expected is None:
            yield Finding("rope", f"{name}: not compared, its frequencies depend on the text or are not known here")
        elif not torch.allclose(buffer.double().cpu(), expected, rtol=1e-4, atol=0.0):
            worst = int((buffer.double().cpu() / expected).log().abs().nan_to_num(posinf=0.0).argmax())
            yield Finding(
                "rope",
                f"the model does not rotate as {name} asks: pair {worst} turns by {float(buffer[worst]):.4g} a token, and "
                f"{float(expected[worst]):.4g} is asked for. Half precision, or code that ignores the scaling",
                PROBLEM,
            )
        else:
            yield Finding("rope", f"{name}: the {len(buffer)} frequencies are those that the config asks for")


def frequencies(settings: Mapping[str, Any], text: Any, rotated: int) -> Tensor | None:
    """Radians a token by pair, (pairs,) float64, written from the papers; None for rope types that are not known here.

    Args:
        rotated: how many features of a head are rotated.
    """
    kind, theta = settings.get("rope_type", "default"), settings.get("rope_theta", 10000.0)
    factor = settings.get("factor") or 1.0
    trained: Any = settings.get(TRAINED) or getattr(text, "max_position_embeddings", None)
    share = torch.arange(0, rotated, 2, dtype=torch.float64) / rotated
    plain = theta**-share
    if kind in ("default", "dynamic"):  # the latter as long as nothing is longer than the trained length
        return plain
    if kind == "linear":
        return plain / factor
    if kind == "proportional":
        return torch.where(share < settings.get("partial_rotary_factor", 1.0), plain, 0.0) / factor
    if kind == "llama3":
        low, high = settings["low_freq_factor"], settings["high_freq_factor"]
        turns = trained * plain / (2 * math.pi)  # over the trained length
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return plain * (keep + (1 - keep) / factor)
    if kind == "yarn":
        fast, slow = settings.get("beta_fast") or 32, settings.get("beta_slow") or 1

        def pair(turns: float) -> float:  # that turns so often over the trained length
            return rotated * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair(fast), pair(slow)
        if settings.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotated - 1)
        ramp = (torch.arange(rotated // 2, dtype=torch.float64) - low) / max(high - low, 0.001)
        keep = 1 - ramp.clamp(0, 1)
        return plain * (keep + (1 - keep) / factor)
    return None


# positions --------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def positions(model: Any, name: str) -> Iterator[Finding]:
    """One passage read at growing absolute positions: with rotary positions its loss is the same everywhere."""
    text = language_config(pretrained(model).config)
    if not getattr(text, "rope_parameters", None):
        size = getattr(text, "max_position_embeddings", None)
        yield Finding("positions", f"learned or none; the config ends at {size} tokens, and no method reads beyond a table")
        return
    try:
        ids = load_tokenizer(name)(WORDS, return_tensors="pt")["input_ids"][:, :128]
    except (OSError, ValueError) as error:
        yield Finding("tokenizer", f"cannot be loaded, so random tokens were used: {error}", NOTE)
        ids = torch.randint(text.vocab_size, (1, 128), generator=torch.Generator().manual_seed(0))
    announced, n = getattr(text, "max_position_embeddings", None) or 8192, ids.shape[1]
    starts = sorted({max(0, int(announced * share) - n) for share in (0, 0.25, 0.5, 0.75, 1)})
    losses = [_loss(model, ids.to(model.device), start) for start in starts]
    curve = ", ".join(f"{loss:.3f} at {start:,}" for start, loss in zip(starts, losses, strict=True))
    change = max(abs(loss - losses[0]) for loss in losses)
    if change <= MAY_CHANGE.get(model.dtype, HALF_MAY_CHANGE):
        yield Finding("positions", f"one passage has the same loss at every position: {curve}")
    else:
        why = "positions lose precision, or the rope scaling depends on the length of the text"
        text_ = f"one passage changes its loss by {change:.3f} nats with where it stands: {curve}"
        yield Finding("positions", f"{text_}; {why}", PROBLEM)


def _loss(model: Any, ids: Tensor, start: int) -> float:
    where = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
    logits = model(input_ids=ids, position_ids=where, use_cache=False).logits[0, :-1].float()
    return float(nn.functional.cross_entropy(logits, ids[0, 1:]))


def _adapter(model: str) -> bool:
    return cached_file(model, ADAPTER, _raise_exceptions_for_missing_entries=False) is not None
