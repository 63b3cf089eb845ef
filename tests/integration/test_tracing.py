"""Where there are no values, or not yet: shapes alone, graphs for any length, transforms of functions. As under sdpa."""

from __future__ import annotations

import copy
import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import inputs
from cases import CASES, model_config
from helpers import close, crossed, logits, model, python, stock, tokens
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, CompileConfig, StaticCache

import hf_longattn
from hf_longattn import LongAttnConfig, Rotation, attention, reference_attention
from hf_longattn.core.tables import SHARED
from hf_longattn.core.tracing import keepable, readable
from hf_longattn.integration.caches import CACHE

WITHOUT_VALUES = {"meta": lambda: torch.device("meta"), "fake": FakeTensorMode}
#: One of each way in which a method depends on lengths and values.
KINDS = ("sinks", "alibi", "infoscale", "mapped+adaptive", "adaptive_saturated", "leaky_by_layer", "streaming", "all_slots")
#: Compiled in the inner loop.
INNER = ("sinks", "rerope", "adaptive_temperature")

#: Their parameters are those of four layers.
BY_LAYER = ("calibrated", "attention_sink", "output_standardise", "leaky_by_layer")


def built(family: str, case: str, **changes: Any) -> Any:
    return hf_longattn.apply(AutoModelForCausalLM.from_config(model_config(family, **changes)), CASES[case])


# shapes alone ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("where", crossed(WITHOUT_VALUES, ["meta"]))
@pytest.mark.parametrize(
    ("family", "case"),
    crossed([*(("llama", c) for c in (*KINDS, "logn_learned", "rerope", "dual_chunk")), ("gemma2", "sinks")], 3),
)
def test_shapes_pass_through(family: str, case: str, where: str) -> None:
    """Forward, backward, a cached step, weights and all."""
    with WITHOUT_VALUES[where]():
        m, ids = built(family, case), torch.ones(2, 24, dtype=torch.int64)
        out = m(ids)
        assert out.logits.shape == (2, 24, m.config.vocab_size)
        out.logits.sum().backward()
        assert all(p.grad.shape == p.shape for p in m.parameters())
        with torch.no_grad():
            cache = m(ids)[CACHE]
            assert m(ids[:, :1], **{CACHE: cache}).logits.shape == (2, 1, m.config.vocab_size)
            assert m(ids, output_attentions=True).attentions[-1].shape == (2, 4, 24, 24)


@pytest.mark.parametrize("case", ["sinks", "rerope"])
def test_shapes_leave_nothing_behind(case: str, tmp_path: Path) -> None:
    """The same model, with its tables and its verification, then computes as if nothing had been."""
    SHARED._kept.clear()
    stock("llama").save_pretrained(tmp_path)
    section = CASES[case].to_dict()
    m = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=CASES[case].name, longattn=section)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert isinstance(logits(m, mode.from_tensor(tokens())), torch._subclasses.FakeTensor)
    want = logits(hf_longattn.apply(stock("llama"), CASES[case]), tokens())
    assert torch.equal(logits(m, tokens()), want)


def test_weights_that_come_later_are_proven_then(tmp_path: Path) -> None:
    source = stock("llama")
    with torch.device("meta"):
        m = built("llama", "rerope")
        m(torch.ones(1, 9, dtype=torch.int64))
    m.to_empty(device="cpu")
    m.load_state_dict(source.state_dict())
    m.model.rotary_emb.inv_freq.copy_(source.model.rotary_emb.inv_freq)
    assert torch.equal(logits(m, tokens()), logits(hf_longattn.apply(source, CASES["rerope"]), tokens()))


# torch.func -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*KINDS, "rerope", "output_layer_norm"])
def test_gradients_of_functions(case: str) -> None:
    """torch.func.grad of a model as a function of its parameters; what is kept from within must serve calls outside."""
    SHARED._kept.clear()
    m, ids = hf_longattn.apply(stock("llama"), CASES[case]).double(), tokens()
    parameters = {name: p.detach() for name, p in m.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(m, parameters, (ids,), {"use_cache": False}).logits.sin().sum()

    got = torch.func.grad(loss)(parameters)
    kept = copy.deepcopy(m)
    m(ids, use_cache=False).logits.sin().sum().backward()
    for name, p in m.named_parameters():
        assert p.grad is not None
        close(got[name], p.grad, 1e-9, name)
    close(logits(kept, ids), logits(hf_longattn.apply(stock("llama"), CASES[case]).double(), ids), 0)


def test_gradients_of_the_function() -> None:
    query, key, value = inputs(q=9, k=9, d=8, seed=3)
    SHARED._kept.clear()
    for config in (CASES["sinks"], CASES["rerope"]):
        rotation = Rotation(torch.tensor([1.0, 0.1], dtype=torch.float64))
        got, want = (
            torch.func.grad(lambda k, f=f, c=config, r=rotation: f(query, k, value, c, rotation=r).sin().sum())(key)
            for f in (attention, reference_attention)
        )
        close(got, want, 1e-12)
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(x) for kept in SHARED._kept.values() for x in kept)


def test_second_derivatives_are_refused_by_the_kernel_and_given_by_the_reference() -> None:
    query, key, value = inputs(q=9, k=9, d=8, seed=3)

    def second(backend: str, transform: bool, case: str = "sinks") -> Tensor:
        def loss(k: Tensor) -> Tensor:
            return attention(query, k, value, CASES[case], backend=backend).sin().sum()

        if transform:
            return torch.func.grad(lambda k: torch.func.grad(loss)(k).square().sum())(key)
        leaf = key.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        return torch.autograd.grad(first.square().sum(), leaf)[0]

    for transform in (False, True):
        with pytest.raises(NotImplementedError, match="no second derivatives: use backend='reference'"):
            second("tiled", transform)
        with pytest.raises(NotImplementedError, match="the fused kernel has no second derivatives"):
            second("fused", transform, "windowed")
    close(second("reference", True), second("reference", False), 1e-12)


@pytest.mark.parametrize("case", ["cosscale", "infoscale", "infoscale+cosscale", "output_standardise"])
def test_second_derivatives_where_sdpa_has_them(case: str) -> None:
    """A backward pass without derivatives of its own would be left out of the second in silence."""

    def second(backend: str) -> Tensor:
        m = hf_longattn.apply(stock("llama"), CASES[case].replace(backend=backend)).double()
        leaf = m.get_input_embeddings()(tokens()).detach().requires_grad_()
        loss = m(inputs_embeds=leaf, use_cache=False).logits.sin().sum()
        (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
        return torch.autograd.grad(first.square().sum(), leaf)[0]

    with sdpa_kernel([SDPBackend.MATH]):
        close(second("auto"), second("reference"), 1e-9)


def test_vmap_is_refused_by_the_kernel_and_goes_through_the_reference() -> None:
    query, key, value = inputs(q=9, k=9, d=8, seed=3)

    def each(backend: str, case: str = "sinks") -> Tensor:
        return torch.func.vmap(lambda *x: attention(*(y[None] for y in x), CASES[case], backend=backend)[0])(query, key, value)

    with pytest.raises(NotImplementedError, match=r"does not go through vmap: .* use backend='reference'"):
        each("tiled")
    with pytest.raises(NotImplementedError, match="the fused kernel does not go through vmap"):
        each("fused", "windowed")
    close(each("reference"), attention(query, key, value, CASES["sinks"]), 1e-12)


def test_forward_mode_is_refused_by_the_kernel_and_goes_through_the_reference() -> None:
    query, key, value = inputs(q=9, k=9, d=8, seed=3)
    tangent = torch.randn(query.shape, generator=torch.Generator().manual_seed(4), dtype=query.dtype)

    def run(backend: str, case: str, x: Tensor) -> Tensor:
        return attention(x, key, value, CASES[case], backend=backend)

    for backend, case in (("tiled", "sinks"), ("fused", "windowed")):
        with pytest.raises(NotImplementedError, match=f"the {backend} kernel .* forward mode.* use backend='reference'"):
            torch.func.jvp(functools.partial(run, backend, case), (query,), (tangent,))
        with pytest.raises(
            NotImplementedError, match=f"the {backend} kernel does not go through vmap.* use backend='reference'"
        ):
            torch.func.jacrev(functools.partial(run, backend, case))(query)  # the gradients of all outputs at once
        step = functools.partial(run, "reference", case)
        _, along = torch.func.jvp(step, (query,), (tangent,))
        slope = (step(query + 1e-6 * tangent) - step(query - 1e-6 * tangent)) / 2e-6
        close(along, slope, 1e-7)


def test_forward_mode_is_refused_where_keys_are_turned() -> None:
    m, ids = hf_longattn.apply(stock("llama"), "rerope", window=7), tokens()
    x = m.get_input_embeddings()(ids).detach()
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="the fused kernel has no forward mode"),
    ):
        m(inputs_embeds=torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)), use_cache=False)


# graphs for any length --------------------------------------------------------------------------------------------------


class Logits(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.model(input_ids, attention_mask=attention_mask, use_cache=False).logits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "case", "padded"),
    crossed(
        [
            *(("llama", case, False) for case in ("all_slots", "adaptive_saturated", "streaming+adaptive", "infoscale")),
            *(("llama", case, True) for case in ("leaky_rerope+scale_invariant", "sinks")),
            ("nanochat", "rerope", False),
        ],
        2,
    ),
)
def test_one_exported_graph_serves_every_length_and_batch(family: str, case: str, padded: bool) -> None:
    m = built(family, case, num_hidden_layers=1)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("n", min=2, max=512)}

    def inputs(length: int, batch: int) -> tuple[Tensor, ...]:
        ids = tokens(batch, length, seed=length)
        mask = torch.ones_like(ids)
        mask[0, : length // 3] = 0
        return (ids, mask) if padded else (ids,)

    shapes = (sizes, sizes) if padded else (sizes,)
    with torch.no_grad():
        graph = torch.export.export(Logits(m), inputs(24, 2), dynamic_shapes=shapes, strict=False).module()
        for length, batch in ((24, 2), (3, 5), (61, 1)):
            got, want = graph(*inputs(length, batch)), Logits(m).eval()(*inputs(length, batch))
            first = length // 3 if padded else 0
            close(got[1:], want[1:])
            close(got[0, first:], want[0, first:])


@pytest.mark.filterwarnings("ignore")  # of torch, that it is deprecated, and of each property of the model that is
@pytest.mark.parametrize("case", ["sinks", "rerope"])
def test_one_traced_graph_serves_every_length(case: str) -> None:
    m = built("llama", case, num_hidden_layers=1)
    with torch.no_grad():
        graph = torch.jit.trace(Logits(m), tokens(2, 24), check_trace=False)
        for length in (24, 3, 61):
            close(graph(tokens(2, length)), logits(m, tokens(2, length)))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["leaky_rerope+scale_invariant", "adaptive_temperature"])
def test_one_compiled_graph_serves_every_length(case: str) -> None:
    m, counter = built("llama", case, num_hidden_layers=1), CompileCounter()
    torch._dynamo.reset()
    step = torch.compile(m, backend=counter, dynamic=True, fullgraph=True)
    for length in (24, 33, 61):
        close(logits(step, tokens(2, length)), logits(m, tokens(2, length)))
    assert counter.frame_count == 1


@pytest.mark.slow
@torch.no_grad()
def test_one_compiled_step_serves_a_cache_that_grows_and_one_with_room() -> None:
    """Once caches have grown, Dynamo takes the number of keys for any, and padding makes a mask of as many columns."""
    m, ids = built("llama", "infoscale", num_hidden_layers=1), tokens(2, 24)
    mask = torch.ones_like(ids)
    mask[:, :5] = 0
    torch._dynamo.reset()
    step = torch.compile(m, backend="eager", fullgraph=True)
    for given in ({}, {"attention_mask": mask}):
        cache = m(ids[:, :20])[CACHE] if not given else StaticCache(config=m.config, max_cache_len=40)
        for n in range(20, 24):
            if given and n == 20:
                m(ids[:, :20], attention_mask=mask[:, :20], **{CACHE: cache})
            seen = {name: x[:, : n + 1] for name, x in given.items()}
            got = step(ids[:, n : n + 1], **seen, **{CACHE: cache}).logits
            close(got, m(ids[:, : n + 1], **seen, use_cache=False).logits[:, -1:])


ONE_LAYER = {"gpt2": {"n_layer": 1}, "llama": {"num_hidden_layers": 1}}


@pytest.mark.slow
@pytest.mark.parametrize("family", ONE_LAYER)
def test_one_graph_serves_padded_batches_of_every_size(family: str) -> None:
    m, counter = hf_longattn.apply(stock(family, **ONE_LAYER[family]), CASES["infoscale"]), CompileCounter()
    torch._dynamo.reset()
    step = torch.compile(m, backend=counter, dynamic=True, fullgraph=True)
    frames = set()
    for batch, length, pad in ((2, 24, 5), (3, 17, 2), (5, 31, 9)):
        ids = tokens(batch, length)
        mask = torch.ones_like(ids)
        mask[0, :pad] = 0
        given = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0), "use_cache": False}
        with torch.no_grad():
            got, whole = step(ids, **given).logits, m(ids, use_cache=False).logits
            close(got[0, pad:], m(ids[:1, pad:], use_cache=False).logits[0])
        close(got[1:], whole[1:])
        frames.add(counter.frame_count)
    assert len(frames) == 1


#: A case of each slot, and of each way in which intervals of keys move; apart those that say how long the model was trained.
TOGETHER = (
    INNER,
    ("cosscale", "attention_sink_learned", "output_layer_norm", "self_extend", "dual_chunk", "streaming+adaptive"),
    ("logn_learned",),
    ("yarn_beyond",),
    ("all_slots",),
)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("cases", crossed(((c,) for c in TOGETHER), [(INNER,)]), ids=lambda c: c[0])
def test_generate_compiles_one_step(cases: tuple[str, ...]) -> None:
    """One graph from the first new token to beyond every window, which nothing breaks; the logits are those without it.

    Each case in a layer of its own: most of the time goes into what a graph costs that is not the method's.
    """
    m = AutoModelForCausalLM.from_config(model_config("llama", num_hidden_layers=len(cases)))
    m, graphs = hf_longattn.apply(m, [CASES[case].replace(layers=(n,)) for n, case in enumerate(cases)]), list[Any]()
    torch._dynamo.reset()
    step = CompileConfig(backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True, mode=None)
    step._compile_all_devices = True
    options = {"max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    want = m.generate(tokens(2, 4), **options)
    got = m.generate(tokens(2, 4), cache_implementation="static", compile_config=step, **options)
    close(torch.stack(got.logits), torch.stack(want.logits))
    assert len(graphs) == 1


def test_what_runs_beside_a_graph_may_read() -> None:
    """Dynamo must not compile the predicates by themselves, for a caller that it left alone."""

    @torch.compiler.disable(recursive=False)
    def beside(x: Tensor) -> tuple[bool, bool]:
        return readable(x), keepable(x)

    torch._dynamo.reset()
    known, _ = torch.compile(lambda x: (beside(x + 1), x * 2), backend="eager")(torch.ones(3))
    assert known == (True, True)


@pytest.mark.slow
def test_what_a_graph_cannot_hold_is_refused(tmp_path: Path) -> None:
    stock("llama").save_pretrained(tmp_path)
    m = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="rerope", longattn={"window": 7})
    with pytest.raises(RuntimeError, match=r"call the model once before torch\.compile or torch\.export"):
        torch.export.export(Logits(m), (tokens(),), strict=False)


#: A method in every slot, in one graph: an export takes seconds to begin.
IN_ONNX = (
    LongAttnConfig.preset("rerope+logn+output_layer_norm", window=7, train_length=8, learned=True),
    LongAttnConfig.preset("cosscale+scale_invariant+adaptive_temperature+windowed", scale=5.0, tau=2.0, window=9),
)


@pytest.mark.slow
@torch.no_grad()
def test_onnx_runs_at_any_length_and_batch(tmp_path: Path) -> None:
    """By the dynamo exporter, with the reference in place of the tiled operator."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")

    class All(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            base = AutoModelForCausalLM.from_config(model_config("llama", num_hidden_layers=1))
            self.models = torch.nn.ModuleList(hf_longattn.apply(copy.deepcopy(base), config) for config in IN_ONNX)

        def forward(self, ids: Tensor) -> list[Tensor]:
            return [model(ids, use_cache=False).logits for model in self.models]

    m, sizes = All().eval(), {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2, max=512)}
    m(tokens())  # verifies the rotation
    torch.onnx.export(m, (tokens(),), tmp_path / "m.onnx", dynamo=True, dynamic_shapes={"ids": sizes}, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    for n, batch in ((24, 2), (40, 3), (9, 1)):
        ids = tokens(batch, n, seed=n)
        for config, got, want in zip(IN_ONNX, session.run(None, {"ids": ids.numpy()}), m(ids), strict=True):
            close(torch.from_numpy(got), want, 1e-5, f"{config.name} {n}")


@torch.no_grad()
def test_exporters_see_no_record_on_a_cache() -> None:
    """What a cache is, to transformers' exporters, are all of its attributes: a step would take none but the example's."""
    exporter = pytest.importorskip("transformers.exporters.exporter_dynamo")
    cache = model("llama", CASES["rerope"])(tokens(), use_cache=True)[CACHE]
    bare = copy.deepcopy(cache)
    del vars(bare)["_longattn"]
    (tensors, seen), (_, want) = exporter._pytree_flatten(cache), exporter._pytree_flatten(bare)
    assert seen == want
    assert [id(x) for x in tensors] == [id(x) for layer in cache.layers for x in (layer.keys, layer.values)]
    assert "numbering" in vars(cache)["_longattn"]


EXPORTED = """
    import hf_longattn, torch, transformers
    from cases import CASES, model_config
    from hf_longattn.integration.caches import CACHE
    from transformers.exporters import DynamoConfig, DynamoExporter
    from transformers.exporters.utils import decompose_for_generation

    m = transformers.AutoModelForCausalLM.from_config(model_config("llama", num_hidden_layers=1)).eval()
    hf_longattn.apply(m, CASES["infoscale"])
    ids, inputs = torch.arange(1, 20)[None], lambda: {"input_ids": torch.arange(1, 19)[None]}
    programs = DynamoExporter().export_for_generation(m, inputs(), DynamoConfig()).components
    with torch.no_grad():
        want = m(ids, use_cache=False).logits[:, -1]
        empty = decompose_for_generation(m, inputs())["prefill"][1][CACHE]
        prompt = {"input_ids": ids[:, :18], "position_ids": torch.arange(18)[None], CACHE: empty}
        cache = programs["prefill"].program.module()(**prompt)[CACHE]
        step = {"input_ids": ids[:, 18:], "position_ids": torch.arange(18, 19)[None], CACHE: cache}
        got = programs["decode"].program.module()(**step).logits[:, -1]
    print("differ by at most 1e-5:", bool((got - want).abs().max() < 1e-5))
"""


@pytest.mark.slow  # exports, and marks caches for torch in the whole process
def test_an_exported_step_goes_on_from_an_exported_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", minversion="5.24")  # older exporters export in another way
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "kit"), prepend=os.pathsep)
    done = python(EXPORTED)
    assert "differ by at most 1e-5: True" in done.stdout, done.stderr


TO_ONNX = """
    import hf_longattn, torch, transformers
    from cases import CASES, model_config
    from transformers.exporters import OnnxConfig, OnnxExporter

    m = transformers.AutoModelForCausalLM.from_config(model_config("llama", num_hidden_layers=1)).eval()
    hf_longattn.apply(m, CASES["rerope"], backend="reference")
    ids = torch.arange(1, 25)[None]
    mask = torch.ones_like(ids)
    exported = OnnxExporter().export(m, {"input_ids": ids, "attention_mask": mask, "use_cache": False}, OnnxConfig())
    got, want = exported(input_ids=ids, attention_mask=mask).logits, m(ids, use_cache=False).logits
    print("differ by at most 1e-5:", bool((got - want).abs().max() < 1e-5))
"""


@pytest.mark.slow
def test_the_reference_goes_through_transformers_exporter_to_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    """It puts functions of its own in place of some of torch's, which give plain tuples."""
    pytest.importorskip("transformers", minversion="5.24")
    for package in ("onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "kit"), prepend=os.pathsep)
    done = python(TO_ONNX)
    assert "differ by at most 1e-5: True" in done.stdout, done.stderr
