"""Configs as data: names, round trips, and every mistake answered by what is wrong and what to do."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from cases import CASES, HEAD_DIM, HEADS, KV_HEADS, LAYERS, MEAN, VARIANCE

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.config import BACKENDS, written
from hf_longattn.methods import CosScale, ScaleInvariant
from hf_longattn.slots.method import SLOTS, Method, ModelFacts
from hf_longattn.slots.registry import list_methods, method_class, register

FACTS = ModelFacts(
    num_layers=LAYERS,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    value_dim=HEAD_DIM,
    train_length=512,
    rope_type="default",
)
preset = LongAttnConfig.preset


@pytest.mark.parametrize("case", CASES)
def test_round_trip_through_json(case: str) -> None:
    config = CASES[case]
    data = json.loads(json.dumps(config.to_dict()))
    assert data["version"] == 1
    back = LongAttnConfig.parse(data)
    assert back == config
    assert hash(back) == hash(config)
    assert back.to_dict() == config.to_dict()


@pytest.mark.parametrize("name", list_methods())
def test_every_method_has_a_preset(name: str) -> None:
    config = preset(name, layers=[2, 0, 2], backend="reference")
    (method,) = config.methods
    assert type(method) is method_class(name)
    assert method.slot in SLOTS
    assert method.paper
    assert (config.layers, config.backend, config.name) == ((0, 2), "reference", method.name)
    assert LongAttnConfig.parse(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("name", sorted({method_class(n).name for n in list_methods()}))
def test_every_method_binds_and_binding_is_idempotent(name: str) -> None:
    bound = preset(name).bind(FACTS)
    assert bound.bind(FACTS) == bound
    assert LongAttnConfig.parse(bound.to_dict()) == bound


def test_defaults_are_the_papers() -> None:
    assert preset("scale_invariant") == LongAttnConfig(logit_map=ScaleInvariant(tau=10.0))
    assert preset("scale_invariant").layers == "full_attention"
    assert preset("scale_invariant").backend == "auto"


def test_methods_join_by_plus() -> None:
    config = preset("cosscale+scale_invariant", tau=3.0)
    assert config.name == "cosscale+scale_invariant"
    assert config.logit_map == ScaleInvariant(tau=3.0)
    assert preset("scale_invariant+cosscale", tau=3.0) == config
    for name in ("softmax_plus", "log_length"):  # names that set logn's scale: a scale is the other's
        assert preset(f"cosscale+{name}", scale=16.0) == dataclasses.replace(preset(name), score=CosScale(scale=16.0))


def test_a_slot_may_be_given_as_dict() -> None:
    config = LongAttnConfig(logit_map={"name": "scale_invariant", "tau": 4.0})  # type: ignore[arg-type]
    assert config.logit_map == ScaleInvariant(tau=4.0)


def test_integers_and_lists_are_fine_where_numbers_and_tuples_are_meant() -> None:
    config = preset("scale_invariant", tau=10, logit_mean=MEAN, logit_variance=VARIANCE)
    assert config.logit_map is not None
    assert config.logit_map.logit_mean == tuple(map(tuple, MEAN))  # type: ignore[attr-defined]


PARSED: dict[str, tuple[str, Any, LongAttnConfig]] = {
    "nothing": ("scale_invariant", None, preset("scale_invariant")),
    "empty": ("scale_invariant", {}, preset("scale_invariant")),
    "parameters": ("scale_invariant", {"tau": 20.0, "layers": "all"}, preset("scale_invariant", tau=20.0, layers="all")),
    "text": ("scale_invariant+logn:tau=2.0:learned=true", None, preset("scale_invariant+logn", tau=2.0, learned=True)),
    "both": ("scale_invariant:tau=2.0", {"decay": 0.5}, preset("scale_invariant", tau=2.0, decay=0.5)),
    "dict": (CASES["calibrated"].to_dict(), None, CASES["calibrated"]),
    "dict and parameters": (CASES["calibrated"].to_dict(), {"tau": 5.0}, CASES["calibrated"].replace(tau=5.0)),
    "saved": ("scale_invariant", CASES["calibrated"].to_dict(), CASES["calibrated"]),
    "slots": ("longattn", {"logit_map": {"name": "scale_invariant"}}, preset("scale_invariant")),
    "config": ("longattn", CASES["sinks"], CASES["sinks"]),
}


@pytest.mark.parametrize("how", PARSED)
def test_parse(how: str) -> None:
    name, section, want = PARSED[how]
    assert LongAttnConfig.parse(name, section) == want


def test_replace_finds_the_owner() -> None:
    config = CASES["calibrated"].replace(tau=5.0, backend="tiled")
    assert config.logit_map.tau == 5.0  # type: ignore[union-attr]
    assert config.backend == "tiled"
    assert config.replace(tau=2.0, backend="auto") == CASES["calibrated"]
    assert CASES["calibrated"].replace() == CASES["calibrated"]


def test_replace_takes_parameters_that_hold_together_only() -> None:
    """A method is checked once, with all of its new parameters."""
    assert preset("scale_invariant").replace(alpha=1.0, beta=2.0) == preset("scale_invariant", alpha=1.0, beta=2.0)
    calibrated = preset("scale_invariant", alpha=1.0, beta=2.0).replace(alpha=None, beta=None, decay=0.5, backend="tiled")
    assert calibrated == preset("scale_invariant", decay=0.5, backend="tiled")
    for changes in ({"chunk": 32, "local": 16}, {"local": 16, "chunk": 32}):
        assert preset("dual_chunk", chunk=8, local=2).replace(**changes) == preset("dual_chunk", chunk=32, local=16)
    two = preset("dual_chunk+scale_invariant", chunk=8, local=2).replace(tau=3.0, local=16, chunk=32)
    assert two == preset("dual_chunk+scale_invariant", chunk=32, local=16, tau=3.0)
    with pytest.raises(ValueError, match="both alpha and beta"):
        preset("scale_invariant").replace(alpha=1.0)


def test_for_layer_reduces_parameters() -> None:
    layered = CASES["calibrated"].bind(FACTS).for_layer(2).logit_map
    assert isinstance(layered, ScaleInvariant)
    assert layered.logit_mean == tuple(MEAN[2])
    assert layered.logit_variance == tuple(VARIANCE[2])
    assert CASES["scale_invariant"].for_layer(3) == CASES["scale_invariant"]


def give_to_two() -> None:
    """Give a parameter to two methods that both have it."""
    preset("+".join(m.name for m in twins()), **{shared_parameter(): 1})


def twins() -> tuple[type[Method], type[Method]]:
    """The first two methods of different slots that share a parameter."""
    every = [method_class(n) for n in list_methods()]
    return next((a, b) for a in every for b in every if a.slot != b.slot and parameters(a) & parameters(b))


def parameters(method: type[Method]) -> set[str]:
    return {f.name for f in dataclasses.fields(method)}


def shared_parameter() -> str:
    a, b = twins()
    return min(parameters(a) & parameters(b))


FOUR = [[1.0] * HEADS] * LAYERS
#: What goes wrong -> the call, and words that the message must hold: the thing and the way out.
MISTAKES: dict[str, tuple[Any, list[str]]] = {
    "unknown name": (lambda: preset("scale_variant"), ["scale_variant", "known methods", "scale_invariant"]),
    "unknown parameter": (lambda: preset("scale_invariant", tua=3.0), ["tua", "it has", "tau"]),
    "unknown parameter of a section": (
        lambda: LongAttnConfig.parse("scale_invariant", {"tua": 3.0}),
        ["tua", "it has", "tau"],
    ),
    "unknown parameter of a slot": (
        lambda: LongAttnConfig.parse({"logit_map": {"name": "scale_invariant", "tua": 3.0}}),
        ["tua", "it has", "tau"],
    ),
    "unknown key": (lambda: LongAttnConfig.parse({"version": 1, "logit": None}), ["logit", "known", "logit_map"]),
    "slot without name": (lambda: LongAttnConfig.parse({"logit_map": {"tau": 3.0}}), ["logit_map", "name"]),
    "slot of another": (lambda: LongAttnConfig(score=ScaleInvariant()), ["scale_invariant", "logit_map", "score"]),  # type: ignore[arg-type]
    "slot with a string": (lambda: LongAttnConfig(score="cosscale"), ["score", "cosscale", "dict form"]),  # type: ignore[arg-type]
    "two for one slot": (lambda: preset("scale_invariant+alibi"), ["scale_invariant", "alibi", "logit_map"]),
    "shared parameter": (give_to_two, ["is a parameter of", "write the slots out"]),
    "tau zero": (lambda: preset("scale_invariant", tau=0), ["tau", "> 0", "0"]),
    "tau negative": (lambda: preset("scale_invariant", tau=-1.0), ["tau", "> 0", "-1"]),
    "tau nan": (lambda: preset("scale_invariant", tau=math.nan), ["tau", "finite"]),
    "tau infinite": (lambda: preset("scale_invariant", tau=math.inf), ["tau", "finite"]),
    "tau a string": (lambda: preset("scale_invariant", tau="10"), ["tau", "'10'"]),
    "tau true": (lambda: preset("scale_invariant", tau=True), ["tau", "True"]),
    "tau none": (lambda: preset("scale_invariant", tau=None), ["tau", "None"]),
    "alpha alone": (lambda: preset("scale_invariant", alpha=1.0), ["alpha", "beta", "both"]),
    "beta too small": (lambda: preset("scale_invariant", alpha=3.0, beta=3.0), ["beta", "alpha ln(alpha)", "3.29"]),
    "mixed forms": (lambda: preset("scale_invariant", alpha=1.0, beta=2.0, decay=0.5), ["alpha", "decay", "one group"]),
    "negative decay": (lambda: preset("scale_invariant", decay=-0.1), ["decay", "-0.1"]),
    "nan decay": (lambda: preset("scale_invariant", decay=math.nan), ["decay"]),
    "infinite decay": (lambda: preset("scale_invariant", decay=math.inf), ["decay"]),
    "variance zero": (lambda: preset("scale_invariant", logit_variance=0.0), ["logit_variance", "> 0"]),
    "variance zero somewhere": (lambda: preset("scale_invariant", logit_variance=[[1.0, 0.0]]), ["logit_variance", "> 0"]),
    "mean nan": (lambda: preset("scale_invariant", logit_mean=math.nan), ["logit_mean", "finite"]),
    "mean a string": (lambda: preset("scale_invariant", logit_mean="0"), ["logit_mean"]),
    "output mean nan": (lambda: preset("output_standardise", mean=[[0.0, math.nan]]), ["mean", "finite", "nan"]),
    "output mean a string": (lambda: preset("output_layer_norm", mean="0"), ["mean", "finite", "'0'"]),
    "strength above one": (lambda: preset("scale_invariant", strength=1.5), ["strength", "[0, 1]", "1.5"]),
    "sinks negative": (lambda: preset("scale_invariant", sink_tokens=-1), ["sink_tokens", ">= 0"]),
    "sinks fractional": (lambda: preset("scale_invariant", sink_tokens=1.5), ["sink_tokens", "integer"]),
    "shape per layer": (
        lambda: preset("scale_invariant", logit_mean=FOUR[0]).bind(FACTS),
        ["logit_mean", f"({LAYERS}, {HEADS})"],
    ),
    "layers missing": (
        lambda: preset("scale_invariant", logit_variance=FOUR[1:]).bind(FACTS),
        ["logit_variance", f"({LAYERS}, {HEADS})", str(LAYERS - 1)],
    ),
    "heads missing": (
        lambda: preset("scale_invariant", logit_variance=[row[1:] for row in FOUR]).bind(FACTS),
        ["logit_variance", f"({LAYERS}, {HEADS})", str(HEADS - 1)],
    ),
    "ragged": (lambda: preset("scale_invariant", logit_mean=[*FOUR[1:], [1.0]]).bind(FACTS), ["logit_mean", "(4, 4)"]),
    "layer that does not exist": (lambda: preset("scale_invariant", layers=[0, 4]).bind(FACTS), ["layer 4", "0 to 3"]),
    "negative layer": (lambda: preset("scale_invariant", layers=[-1]), ["layers", "-1"]),
    "no layer": (lambda: preset("scale_invariant", layers=[]), ["layers", "non-empty"]),
    "layers by a wrong word": (lambda: preset("scale_invariant", layers="full"), ["layers", "full_attention", "all"]),
    "layers a number": (lambda: preset("scale_invariant", layers=3), ["layers", "list of indices"]),
    "backend": (lambda: preset("scale_invariant", backend="warp"), ["warp", *BACKENDS]),
    "newer format": (lambda: LongAttnConfig.parse({"version": 2}), ["version 2", "install"]),
    "section of a wrong type": (lambda: LongAttnConfig.parse("scale_invariant", "tau=3"), ["longattn", "dict", "tau=3"]),  # type: ignore[arg-type]
    "name and section disagree": (
        lambda: LongAttnConfig.parse("cosscale", preset("scale_invariant").to_dict()),
        ["cosscale", "scale_invariant", "apply"],
    ),
    "a preset's name and a section of other parameters": (
        lambda: LongAttnConfig.parse("log_length", preset("logn").to_dict()),
        ["log_length", "logn", "apply"],
    ),
    "replace nothing": (lambda: preset("scale_invariant").replace(tua=1.0), ["tua", "scale_invariant"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_answered(mistake: str) -> None:
    call, words = MISTAKES[mistake]
    with pytest.raises(ValueError) as error:  # noqa: PT011
        call()
    for word in words:
        assert word in str(error.value)


def test_a_name_can_be_registered_once() -> None:
    class Impostor(ScaleInvariant):
        pass

    with pytest.raises(ValueError, match="two methods are called 'scale_invariant'"):
        register(Impostor)

    class Homeless(ScaleInvariant):
        slot = "nowhere"

    with pytest.raises(ValueError, match="a LogitMap fills 'logit_map'"):
        register(Homeless)


def test_lengths_are_numbers_or_read_as_people_say_them() -> None:
    assert LongAttnConfig.preset("rerope", window="4k") == LongAttnConfig.preset("rerope", window=4096)
    assert LongAttnConfig.parse("dual_chunk:chunk=6k:local=1k").positions == hf_longattn.methods.DualChunk(
        chunk=6144, local=1024
    )
    assert LongAttnConfig(train_length="32k", extended_to="1M").to_dict()["extended_to"] == 1048576
    assert LongAttnConfig.preset("logn", train_length="8k").temperature.train_length == 8192
    for wrong in ("far", "0", "-1k"):
        with pytest.raises(ValueError, match="window must be an integer or None, got"):
            LongAttnConfig.preset("rerope", window=wrong)
    for name in ("train_length", "extended_to"):
        for wrong in (0, -5, True, 2.5):
            with pytest.raises((TypeError, ValueError), match=f"{name} must be an integer"):
                LongAttnConfig(**{name: wrong})


def test_methods_are_listed_by_name() -> None:
    assert {"alibi", "rerope", "scale_invariant"} < set(hf_longattn.list_methods())
    assert hf_longattn.list_methods("score") == ["cosscale"]
    assert set(hf_longattn.list_methods("positions")) >= {"rerope", "self_extend", "yarn_beyond"}
    with pytest.raises(ValueError, match="there is no slot 'sore'; did you mean 'score'"):
        hf_longattn.list_methods("sore")


def test_parameters_and_names_out_of_place_are_answered() -> None:
    with pytest.raises(ValueError, match=r"parameters stand behind all names: rerope\+infoscale:window=64 in place of"):
        LongAttnConfig.parse("rerope:window=64+infoscale")
    with pytest.raises(ValueError, match=r"a name is missing beside '\+' in 'rerope\+'"):
        LongAttnConfig.parse("rerope+")


def test_parameters_are_read_as_python_prints_them() -> None:
    read = LongAttnConfig.parse("infoscale+rerope:clamp=False:window=None")
    assert (read.temperature.clamp, read.positions.window) == (False, None)  # type: ignore[union-attr]


@pytest.mark.parametrize("names", [*sorted({method_class(n).name for n in list_methods()}), "rerope+infoscale"])
def test_what_is_written_of_methods_is_read_again(names: str) -> None:
    bound = preset(names).bind(FACTS)
    assert preset(written(bound.methods)).methods == bound.methods
    several = preset("rerope+infoscale", window=9)
    assert written(several.methods, ["window"]) == "rerope+infoscale:window=9"
    apart = preset("cosscale+logn").bind(FACTS)  # a scale each: a number, and None
    assert preset(written(apart.methods)).methods == apart.methods
    stacked = several.replace(temperature={"name": "infoscale", "stack": True}).methods
    assert written(stacked, ["window", "stack"]) == "rerope:window=9:stack=false, infoscale:stack=true"
    assert (
        written(preset("scale_invariant", logit_mean=MEAN).methods, ["logit_mean"])
        == f"scale_invariant:logit_mean=<{LAYERS} values>"
    )
