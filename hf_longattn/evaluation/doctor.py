"""Findings about a checkpoint on this machine: trained length, method, weights, and those of `environment`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import cached_file

from ..checks import Refused
from ..config import LongAttnConfig
from ..extension import beyond_shown
from ..files import ADAPTER_FILE
from ..integration import trained_length as known_length
from ..integration.internals import get_implementation
from ..integration.layers import language_config, pretrained
from ..integration.model import no_untrained_warning
from ..integration.names import is_longattn_name
from ..integration.saved_method import method_in
from .checkpoints import Checkpoint
from .environment import LIMIT, NOTE, PROBLEM, Finding, engines, installed_versions, kernels
from .outlook import outlook, taken, trained_line


def examine(model: str, dtype: str = "auto", device: str = "cpu", weights: bool = True) -> Iterator[Finding]:
    """Look at a checkpoint or adapter (a folder or a name on the Hub) and at this environment, a finding at a time.

    Args:
        weights: False looks at configs alone: nothing is loaded.

    Raises:
        OSError: there is no such model.
        ValueError: a file of it, or of the base of an adapter, is damaged.
    """
    yield from installed_versions()
    file = cached_file(model, ADAPTER_FILE, _raise_exceptions_for_missing_entries=False)
    adapter = {} if file is None else PreTrainedConfig.get_config_dict(model, _configuration_file=ADAPTER_FILE)[0]
    base = adapter.get("base_model_name_or_path") or model
    saved = PreTrainedConfig.get_config_dict(base)[0]
    own = method_in(saved)
    method = method_in(adapter) or own
    if adapter and method is None:
        yield Finding("method", "the adapter records no attention: if it was trained under a method, it runs without it", NOTE)
    yield from kernels(method)
    yield from engines(method, saved.get("architectures") or ())
    checkpoint = Checkpoint(base, model if adapter else None)
    try:
        config = checkpoint.config
    except ValueError as error:
        yield Finding("method", f"the config is refused: {error}", PROBLEM)
        return
    yield from length_trained_at(method, config)
    if not weights:
        if method is None or method == own:
            yield from what_runs(method, config)
        elif own is None:
            yield Finding("method", f"{method.name}, which loading the adapter puts in")
        else:
            text = f"the adapter was trained under {method.name}, and its base runs {own.name}: loading refuses it"
            yield Finding("method", text, PROBLEM)
        return
    with warnings.catch_warnings(record=True) as caught, no_untrained_warning():
        warnings.simplefilter("always", UserWarning)
        try:
            loaded = checkpoint.load(dtype=checkpoint.precision(dtype, device))
        except Refused as error:
            yield Finding("weights", str(error), PROBLEM)
            return
        except Exception as error:
            yield Finding("loading", f"it does not load: {type(error).__name__}: {error}", PROBLEM)
            return
    yield from (Finding("loading", str(w.message), NOTE) for w in caught if w.category is UserWarning)
    yield from what_runs(method, pretrained(loaded).config)


def what_runs(method: LongAttnConfig | None, config: Any) -> Iterator[Finding]:
    """Compare the method that a checkpoint records with the one that runs."""
    text = language_config(config)
    runs = get_implementation(text)
    if method is None:
        yield Finding("method", "the checkpoint records none" + (f" and runs {runs}" if runs else ""))
        return
    name = method.name
    section = getattr(text, "longattn", None)
    same = section is not None and LongAttnConfig.parse(dict(section)).name == name
    if not is_longattn_name(runs) or not same:
        lost = f"the checkpoint records {name} and is loaded under {runs}: its attn_implementation was lost or overruled"
        yield Finding("method", f'{lost}. Load it with attn_implementation="longattn", and save it again', PROBLEM)
    else:
        yield Finding("method", f"{name}, as recorded")
    known = known_length.recorded(text, method.to_dict()).length
    announced = max(known_length.named_lengths(text).values(), default=0)
    unscaled = known_length.rope_settings(text).get("rope_type", "default") in known_length.UNSCALED
    if unscaled and known is not None and announced > max(known, method.reach):
        says = f"config.json announces {announced} tokens and keeps {known} as the trained length"
        way_out = f"extend it anew, or set max_position_embeddings to {known}"
        yield Finding("method", f"{says}, and {name} reads no further than that: {way_out}", PROBLEM)


def length_trained_at(method: LongAttnConfig | None, config: Any) -> Iterator[Finding]:
    """The length that the model was trained at, where that is from, and how far `extend` goes from there."""
    text = language_config(config)
    known = known_length.recorded(text, None if method is None else method.to_dict())
    yield Finding("trained", trained_line(known), NOTE if known.assumed or known.length is None else "ok")
    reads = None if method is None else method.extended_to
    if known.length and reads and (doubt := beyond_shown(known.length, reads)):
        yield Finding("beyond", f"the checkpoint is extended so far: {doubt}", NOTE)
    told = None if known.length == known_length.trained(text).length else known.length
    try:
        reaches = outlook(text, told)
    except Exception as error:  # of a model's own code, with sizes that it does not expect
        yield Finding("extend", f"not tried: no tiny model of this config could be built ({error})", NOTE)
        return
    for reach in reaches:
        doubt = None if known.length is None else beyond_shown(known.length, reach.to)
        yield Finding("extend", without_reason(str(reach), known), LIMIT if reach.refused else NOTE if doubt else "ok")
        if doubt and not reach.refused:
            yield Finding("beyond", doubt, NOTE)
    if any(reach.refused for reach in reaches):
        found = what_is_taken(text, told)
        yield Finding(found.topic, without_reason(found.text, known), found.level)


def without_reason(text: str, known: known_length.Trained) -> str:
    """A text without the reason of the trained length, which stands in a line of its own."""
    return text.replace(f" ({known.source})", "").replace(f" ({known_length.GIVEN})", "")


def what_is_taken(config: Any, told: int | None) -> Finding:
    """Name the methods that a model takes though `extend` refuses it; none at all is a problem."""
    kinds = taken(config, told)
    refusals: dict[str, list[str]] = {}
    for kind, why in kinds.items():
        if why is not None:
            refusals.setdefault(why, []).append(kind)
    works = [kind for kind, why in kinds.items() if why is None]
    if not works:
        return Finding("methods", f"none can be put in: {next(iter(refusals))}", PROBLEM)
    refused = "".join(f". Refused: {', '.join(names)}: {why}" for why, names in refusals.items())
    return Finding("methods", f"hf_longattn.apply puts in: {', '.join(works)}{refused}", LIMIT)
