"""Few queries as CUDA computes them, against the definition in float64, under Triton's interpreter."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from cases import CASES
from helpers import close, crossed, spread

import hf_longattn
from hf_longattn import Rotation
from hf_longattn.core import attend as attend_module
from hf_longattn.core.call import Call
from hf_longattn.core.geometry import AttentionLayout
from hf_longattn.core.kernels import few, few_cuda, programs
from hf_longattn.core.kernels.rotate import rotate
from hf_longattn.core.lower import lower
from hf_longattn.core.plan import Operand, ReadyPlan
from hf_longattn.core.reference import dense_attention

pytestmark = pytest.mark.skipif(programs.triton is None, reason="triton is not installed")
#: Every case on one query, and each on some of the other rows.
CALLED = [*((case, "one") for case in CASES), *spread(CASES, ("padded", "blind", "ids", "static"), 4)]
#: How the model rotates: halves, and pairs of neighbours behind features that are not rotated.
ROTATIONS = {False: Rotation(torch.tensor([1.0, 0.3, 0.02])), True: Rotation(torch.tensor([1.0, 0.3, 0.02]), True, 2)}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_tile", lambda *_: (16, 16))


def rows_of(kind: str, q_len: int, kv_len: int) -> AttentionLayout:
    start = kv_len - q_len - 12 if kind == "static" else None  # keys behind the last query are no token's yet
    rows = AttentionLayout.causal(q_len, kv_len, start, 0, torch.device("cpu"))
    if kind == "padded":
        index = rows.index.repeat(2, 1, 1)
        index[1, :, 2:4] = 40
        rows = AttentionLayout(index)
    if kind == "blind":  # under a mask, one row all of it
        g = torch.Generator().manual_seed(1)
        allowed = torch.rand(2, 1, q_len, kv_len, generator=g) > 0.3
        allowed[0, :, 1:2] = False
        rows = rows.masked(allowed)
    if kind == "ids":
        ids = torch.arange(kv_len)[None] * 2
        rows = rows.at(ids[:, -q_len:], ids)
    return rows


@pytest.mark.parametrize(("case", "kind"), crossed(CALLED, CALLED[: len(CASES) : 2]))
def test_few_queries(case: str, kind: str) -> None:
    config, g = CASES[case].for_layer(1), torch.Generator().manual_seed(0)
    batch, q_len, kv_len = (1, 1, 43) if kind == "one" else (2, 5, 43)
    query, key, value = (torch.randn(batch, h, n, 8, generator=g) for h, n in ((4, q_len), (2, kv_len), (2, kv_len)))
    for (_, rotation), softcap in zip(ROTATIONS.items(), (None, 2.0), strict=True):
        options: dict[str, Any] = {"softcap": softcap, "rotation": rotation}
        call = Call(query, key, value, config, rows_of(kind, q_len, kv_len), 0.6, **options)
        plan = lower(call)
        assert few.KERNEL.refuses(plan) is None
        exact = Call(*(x.double() for x in (query, key, value)), config, rows_of(kind, q_len, kv_len), 0.6, **options)
        close(
            ReadyPlan(plan, "few", few_cuda.FewOnCUDA(plan)).run(query, key, value).double(), dense_attention(exact)[0], 1e-5
        )


def test_outputs_are_of_the_dtype_of_queries() -> None:
    query, key, value = torch.randn(1, 2, 1, 8), *(torch.randn(1, 2, 43, 8, dtype=torch.float16) for _ in range(2))
    plan = lower(Call(query, key, value, CASES["infoscale"].for_layer(0), rows_of("one", 1, 43), 0.6))
    for asked in (query, query.half()):
        assert few_cuda.FewOnCUDA(plan)(asked, key, value, None, None, None).dtype == asked.dtype


@pytest.mark.slow
def test_many_queries_of_one_key_head() -> None:
    """More rows than a block holds."""
    g = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(1, 16, 9, 8, generator=g), *(torch.randn(1, 1, 43, 8, generator=g) for _ in range(2))
    rows = AttentionLayout.causal(9, 43, None, 0, torch.device("cpu"))
    config = CASES["calibrated"].for_layer(1).replace(logit_map=CASES["sinks"].logit_map)
    want, _ = dense_attention(Call(query.double(), key.double(), value.double(), config, rows, 0.6))
    plan = lower(Call(query, key, value, config, rows, 0.6))
    close(ReadyPlan(plan, "few", few_cuda.FewOnCUDA(plan)).run(query, key, value).double(), want, 1e-5)


@pytest.mark.parametrize("interleaved", ROTATIONS)
@pytest.mark.parametrize("at", [None, slice(3, 30)])
def test_turned(interleaved: bool, at: slice | None) -> None:
    rotation, g = ROTATIONS[interleaved], torch.Generator().manual_seed(0)
    x, n = torch.randn(2, 4, 37, 8, generator=g), 37 if at is None else at.stop - at.start
    cos, sin = (torch.randn(1, n, 2, 3, generator=g) for _ in range(2))
    close(
        programs.turned(x.transpose(1, 2).contiguous().transpose(1, 2), cos, sin, rotation.features, at),
        rotate(rotation, x, cos, sin, at),
        1e-6,
    )


def test_join() -> None:
    """Also where one side, or none, sees anything."""
    g = torch.Generator().manual_seed(0)
    logits, value = torch.randn(2, 4, 37, 20, generator=g), torch.randn(2, 4, 20, 8, generator=g)
    logits[:, :, 5:9, :12] = logits[:, :, 8:11, 12:] = float("-inf")
    sides = [
        (x.softmax(-1).nan_to_num() @ v, x.logsumexp(-1))
        for x, v in zip(logits.split((12, 8), -1), value.split((12, 8), 2), strict=True)
    ]
    (out, lse), (new, new_lse) = sides
    programs.join(out, lse, new, new_lse)
    close(out, logits.softmax(-1).nan_to_num() @ value, 1e-6)
    assert torch.equal(lse.isneginf(), logits.logsumexp(-1).isneginf())
    seen = ~lse.isneginf()
    close(lse[seen], logits.logsumexp(-1)[seen], 1e-6)


def test_a_failure_of_the_compiler_is_told_once_and_others_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of resource: shared memory")

    class Broken:
        def __getitem__(self, grid: Any) -> Any:
            return fail

    monkeypatch.setattr(programs, "_BROKEN", {})
    monkeypatch.setattr(programs.kernels, "scores_kernel", Broken())
    always = dataclasses.replace(
        few.KERNEL, prepare=few_cuda.FewOnCUDA, why_not=lambda plan: programs.why_not(plan.query), preferred=lambda _: True
    )
    monkeypatch.setattr(
        attend_module,
        "KERNELS",
        {"few": always, **{n: k for n, k in attend_module.KERNELS.items() if n != "few"}},
    )
    query, key, value = (torch.randn(1, 2, n, 8) for n in (1, 20, 20))
    config = CASES["scale_invariant"]
    with pytest.warns(UserWarning, match="Triton failed at scores_kernel: RuntimeError: out of resource") as told:
        got = [hf_longattn.attention(query, key, value, config) for _ in range(2)]
    assert len(told) == 1
    others = Operand(query.shape, query.dtype, torch.device("cuda", 1))
    assert programs.why_not(query) is not None
    assert programs.why_not(others) is None
    for out in got:
        close(out, hf_longattn.reference_attention(query, key, value, config))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Programs that note how they are run, and what stands for their compiled form likewise."""
    seen: list[tuple[Any, ...]] = []

    class Compiled:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments: seen.append(("compiled", grid, arguments))

    class Program:
        def __init__(self, names: list[str]) -> None:
            self.arg_names = names

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def run(*arguments: Any, **constants: Any) -> Compiled:
                seen.append(("bound", grid, (*arguments, *(constants[name] for name in self.arg_names[len(arguments) :]))))
                return Compiled()

            return run

    for name in ("scores_kernel", "weights_kernel"):
        monkeypatch.setattr(programs.kernels, name, Program(getattr(programs.kernels, name).arg_names))
    return seen


def test_layers_run_what_the_first_compiled(runs: list[tuple[Any, ...]]) -> None:
    """With the same arguments but the layer's tensors; Triton binds them again where tensors begin at other addresses."""
    shapes = (1, 4, 1, 16), (1, 2, 40, 16), (1, 2, 40, 16)
    sides, config = [torch.ones(shape) for shape in shapes], CASES["rerope"].for_layer(0)
    compute = few_cuda.FewOnCUDA(lower(Call(*sides, config, rows_of("one", 1, 40), 0.25, rotation=ROTATIONS[False])))

    def beginning_at(element: int) -> list[torch.Tensor]:
        return [torch.zeros(element + math.prod(shape))[element:].view(shape) for shape in shapes]

    layers = [beginning_at(element) for element in (0, 0, 1, 1, 0)]
    for layer in layers:
        compute(*layer, None, None, None)
    count = len(runs) // len(layers)
    assert count == 3  # two segments, and the weights
    by_layer = [runs[count * n : count * (n + 1)] for n in range(len(layers))]
    assert [[how for how, *_ in layer] for layer in by_layer] == [
        ["bound"] * 3,
        ["compiled"] * 3,
        ["bound", "bound", "compiled"],  # weights read logits, which begin where they did
        ["compiled"] * 3,
        ["bound", "bound", "compiled"],
    ]
    for own, layer in zip(layers[1:], by_layer[1:], strict=True):
        for (_, grid, arguments), (_, first_grid, first) in zip(layer, by_layer[0], strict=True):
            assert grid[: len(first_grid)] == first_grid
            assert len(arguments) == len(first)
            tensors = 4
            assert all(x is y for x, y in zip(arguments[tensors:], first[tensors:], strict=True))
        assert all(arguments[0] is own[0] and arguments[1] is own[1] for _, _, arguments in layer[:2])


def test_layers_of_other_dtypes_are_compiled_for_them(runs: list[tuple[Any, ...]]) -> None:
    """Layers of one plan may differ in what their caches give back; a program reads and writes what it was compiled for."""
    shapes = (1, 4, 1, 16), (1, 2, 40, 16), (1, 2, 40, 16)
    sides, config = [torch.ones(shape) for shape in shapes], CASES["scale_invariant"].for_layer(0)
    compute = few_cuda.FewOnCUDA(lower(Call(*sides, config, rows_of("one", 1, 40), 0.25)))
    query, key, value = sides
    ways = [(key, value), (key.half(), value), (key, value.half()), (key.half(), value), (key, value.half())]
    for k, v in ways:
        compute(query, k, v, None, None, None)
    scores, weights = runs[::2], runs[1::2]
    assert [how for how, *_ in scores] == ["bound", "bound", "compiled", "compiled", "compiled"]
    assert [how for how, *_ in weights] == ["bound", "compiled", "bound", "compiled", "compiled"]
    assert [arguments[1].dtype for _, _, arguments in weights] == [v.dtype for _, v in ways]
