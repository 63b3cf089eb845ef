"""What editors know of functions that take a method by its name. Made by tests/kit/signatures.py."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from torch import nn

from .config import LongAttnConfig
from .evaluation.results import Results
from .evaluation.settings import Setting

_Model = TypeVar("_Model", bound=nn.Module)
_Method = str | Mapping[str, Any] | LongAttnConfig

@overload
def apply(
    model: _Model,
    method: Literal["adaptive_temperature"],
    *,
    coefficients: Sequence[float] = (-0.037, 0.481, -2.3, 4.917, -1.791),
    threshold: float = 0.5,
    beyond: str = "published",
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> _Model:
    """adaptive_temperature: sharpens each row by its entropy; no change beyond 5.95 nats."""

@overload
def apply(
    model: _Model,
    method: Literal["alibi"],
    *,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> _Model:
    """alibi: subtracts a slope per head times the distance."""

@overload
def apply(
    model: _Model,
    method: Literal["attention_sink"],
    *,
    logit: float | Sequence[Any] = 0.0,
    learned: bool = False,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> _Model:
    """attention_sink: a fixed or learned term in the denominator, one per head."""

@overload
def apply(
    model: _Model,
    method: Literal["cosscale"],
    *,
    scale: float = 128.0,
    stack: bool = False,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> _Model:
    """cosscale: c cos(q, k)."""

@overload
def apply(
    model: _Model,
    method: Literal["dual_chunk"],
    *,
    chunk: int | str | None = None,
    local: int | str | None = None,
    stack: bool = False,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> _Model:
    """dual_chunk: distances inside chunks."""

@overload
def apply(
    model: _Model,
    method: Literal["infoscale"],
    *,
    clamp: bool = True,
    stack: bool = False,
    epsilon: float = 0.0,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> _Model:
    """infoscale: slows the growth of entropy beyond the training length."""

@overload
def apply(
    model: _Model,
    method: Literal["leaky_rerope"],
    *,
    window: int | str | None = None,
    stretch: float | Sequence[Any] = 4.0,
    stack: bool = False,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> _Model:
    """leaky_rerope: distances beyond w are divided."""

@overload
def apply(
    model: _Model,
    method: Literal["lm_infinite"],
    *,
    window: int | str | None = None,
    sinks: int = 5,
    stack: bool = False,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> _Model:
    """lm_infinite: the first 5 keys and the last w, no distance beyond w."""

@overload
def apply(
    model: _Model,
    method: Literal["log_length"],
    *,
    clamp: bool = False,
    stack: bool = False,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> _Model:
    """log_length: ln n."""

@overload
def apply(
    model: _Model,
    method: Literal["logn"],
    *,
    clamp: bool = True,
    stack: bool = False,
    scale: float | None = None,
    learned: bool = False,
    exponent: float = 1.0,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> _Model:
    """logn: s ln n."""

@overload
def apply(
    model: _Model,
    method: Literal["output_layer_norm"],
    *,
    per_head: bool = False,
    deviation: float | Sequence[Any] = 1.0,
    mean: float | Sequence[Any] = 0.0,
    epsilon: float = 1e-05,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> _Model:
    """output_layer_norm: mean 0 and variance 1, then a learned weight and bias."""

@overload
def apply(
    model: _Model,
    method: Literal["output_standardise"],
    *,
    per_head: bool = False,
    deviation: float | Sequence[Any] = 1.0,
    mean: float | Sequence[Any] = 0.0,
    epsilon: float = 1e-05,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> _Model:
    """output_standardise: mean 0 and variance 1 before the output projection."""

@overload
def apply(
    model: _Model,
    method: Literal["rerope"],
    *,
    window: int | str | None = None,
    stack: bool = False,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> _Model:
    """rerope: RoPE sees no distance beyond w."""

@overload
def apply(
    model: _Model,
    method: Literal["scale_invariant"],
    *,
    tau: float = 10.0,
    alpha: float | None = None,
    beta: float | None = None,
    logit_mean: float | Sequence[Any] | None = None,
    logit_variance: float | Sequence[Any] | None = None,
    decay: float | None = None,
    sink_tokens: int = 0,
    offset: int = 0,
    strength: float = 1.0,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> _Model:
    """scale_invariant: gain and bias by distance, so that of N(0, 1) scores every range gets the same attention."""

@overload
def apply(
    model: _Model,
    method: Literal["self_extend"],
    *,
    window: int | str | None = None,
    group: int = 4,
    stack: bool = False,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> _Model:
    """self_extend: distances beyond w count in groups of tokens."""

@overload
def apply(
    model: _Model,
    method: Literal["softmax_plus"],
    *,
    clamp: bool = True,
    stack: bool = False,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> _Model:
    """softmax_plus: ln n / ln n_tr."""

@overload
def apply(
    model: _Model,
    method: Literal["ssmax"],
    *,
    clamp: bool = True,
    stack: bool = False,
    scale: float | None = None,
    learned: bool = False,
    exponent: float = 1.0,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> _Model:
    """ssmax: s ln n."""

@overload
def apply(
    model: _Model,
    method: Literal["streaming"],
    *,
    window: int | str | None = None,
    sinks: int = 4,
    stack: bool = False,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> _Model:
    """streaming: the first 4 keys and the last w."""

@overload
def apply(
    model: _Model,
    method: Literal["string_remap"],
    *,
    shift: int | str | None = None,
    window: int | str | None = None,
    stack: bool = False,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> _Model:
    """string_remap: distances beyond S are reduced by S - W."""

@overload
def apply(
    model: _Model,
    method: Literal["windowed"],
    *,
    window: int | str | None = None,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> _Model:
    """windowed: the last w keys."""

@overload
def apply(
    model: _Model,
    method: Literal["yarn_beyond"],
    *,
    factor: float = 2.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    attention_factor: float | None = None,
    truncate: bool = True,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> _Model:
    """yarn_beyond: YaRN only in rows beyond the trained length."""

@overload
def apply(
    model: _Model,
    method: Literal["yarn_temperature"],
    *,
    clamp: bool = True,
    stack: bool = False,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> _Model:
    """yarn_temperature: (0.1 ln(n / n_tr) + 1)²."""

@overload
def apply(model: _Model, method: _Method | Sequence[_Method], **parameters: Any) -> _Model: ...
@overload
def using(
    model: _Model,
    method: Literal["adaptive_temperature"],
    *,
    coefficients: Sequence[float] = (-0.037, 0.481, -2.3, 4.917, -1.791),
    threshold: float = 0.5,
    beyond: str = "published",
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> AbstractContextManager[_Model]:
    """adaptive_temperature: sharpens each row by its entropy; no change beyond 5.95 nats."""

@overload
def using(
    model: _Model,
    method: Literal["alibi"],
    *,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> AbstractContextManager[_Model]:
    """alibi: subtracts a slope per head times the distance."""

@overload
def using(
    model: _Model,
    method: Literal["attention_sink"],
    *,
    logit: float | Sequence[Any] = 0.0,
    learned: bool = False,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> AbstractContextManager[_Model]:
    """attention_sink: a fixed or learned term in the denominator, one per head."""

@overload
def using(
    model: _Model,
    method: Literal["cosscale"],
    *,
    scale: float = 128.0,
    stack: bool = False,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> AbstractContextManager[_Model]:
    """cosscale: c cos(q, k)."""

@overload
def using(
    model: _Model,
    method: Literal["dual_chunk"],
    *,
    chunk: int | str | None = None,
    local: int | str | None = None,
    stack: bool = False,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> AbstractContextManager[_Model]:
    """dual_chunk: distances inside chunks."""

@overload
def using(
    model: _Model,
    method: Literal["infoscale"],
    *,
    clamp: bool = True,
    stack: bool = False,
    epsilon: float = 0.0,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> AbstractContextManager[_Model]:
    """infoscale: slows the growth of entropy beyond the training length."""

@overload
def using(
    model: _Model,
    method: Literal["leaky_rerope"],
    *,
    window: int | str | None = None,
    stretch: float | Sequence[Any] = 4.0,
    stack: bool = False,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> AbstractContextManager[_Model]:
    """leaky_rerope: distances beyond w are divided."""

@overload
def using(
    model: _Model,
    method: Literal["lm_infinite"],
    *,
    window: int | str | None = None,
    sinks: int = 5,
    stack: bool = False,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> AbstractContextManager[_Model]:
    """lm_infinite: the first 5 keys and the last w, no distance beyond w."""

@overload
def using(
    model: _Model,
    method: Literal["log_length"],
    *,
    clamp: bool = False,
    stack: bool = False,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> AbstractContextManager[_Model]:
    """log_length: ln n."""

@overload
def using(
    model: _Model,
    method: Literal["logn"],
    *,
    clamp: bool = True,
    stack: bool = False,
    scale: float | None = None,
    learned: bool = False,
    exponent: float = 1.0,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> AbstractContextManager[_Model]:
    """logn: s ln n."""

@overload
def using(
    model: _Model,
    method: Literal["output_layer_norm"],
    *,
    per_head: bool = False,
    deviation: float | Sequence[Any] = 1.0,
    mean: float | Sequence[Any] = 0.0,
    epsilon: float = 1e-05,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> AbstractContextManager[_Model]:
    """output_layer_norm: mean 0 and variance 1, then a learned weight and bias."""

@overload
def using(
    model: _Model,
    method: Literal["output_standardise"],
    *,
    per_head: bool = False,
    deviation: float | Sequence[Any] = 1.0,
    mean: float | Sequence[Any] = 0.0,
    epsilon: float = 1e-05,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> AbstractContextManager[_Model]:
    """output_standardise: mean 0 and variance 1 before the output projection."""

@overload
def using(
    model: _Model,
    method: Literal["rerope"],
    *,
    window: int | str | None = None,
    stack: bool = False,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> AbstractContextManager[_Model]:
    """rerope: RoPE sees no distance beyond w."""

@overload
def using(
    model: _Model,
    method: Literal["scale_invariant"],
    *,
    tau: float = 10.0,
    alpha: float | None = None,
    beta: float | None = None,
    logit_mean: float | Sequence[Any] | None = None,
    logit_variance: float | Sequence[Any] | None = None,
    decay: float | None = None,
    sink_tokens: int = 0,
    offset: int = 0,
    strength: float = 1.0,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> AbstractContextManager[_Model]:
    """scale_invariant: gain and bias by distance, so that of N(0, 1) scores every range gets the same attention."""

@overload
def using(
    model: _Model,
    method: Literal["self_extend"],
    *,
    window: int | str | None = None,
    group: int = 4,
    stack: bool = False,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> AbstractContextManager[_Model]:
    """self_extend: distances beyond w count in groups of tokens."""

@overload
def using(
    model: _Model,
    method: Literal["softmax_plus"],
    *,
    clamp: bool = True,
    stack: bool = False,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> AbstractContextManager[_Model]:
    """softmax_plus: ln n / ln n_tr."""

@overload
def using(
    model: _Model,
    method: Literal["ssmax"],
    *,
    clamp: bool = True,
    stack: bool = False,
    scale: float | None = None,
    learned: bool = False,
    exponent: float = 1.0,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> AbstractContextManager[_Model]:
    """ssmax: s ln n."""

@overload
def using(
    model: _Model,
    method: Literal["streaming"],
    *,
    window: int | str | None = None,
    sinks: int = 4,
    stack: bool = False,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> AbstractContextManager[_Model]:
    """streaming: the first 4 keys and the last w."""

@overload
def using(
    model: _Model,
    method: Literal["string_remap"],
    *,
    shift: int | str | None = None,
    window: int | str | None = None,
    stack: bool = False,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> AbstractContextManager[_Model]:
    """string_remap: distances beyond S are reduced by S - W."""

@overload
def using(
    model: _Model,
    method: Literal["windowed"],
    *,
    window: int | str | None = None,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> AbstractContextManager[_Model]:
    """windowed: the last w keys."""

@overload
def using(
    model: _Model,
    method: Literal["yarn_beyond"],
    *,
    factor: float = 2.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    attention_factor: float | None = None,
    truncate: bool = True,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> AbstractContextManager[_Model]:
    """yarn_beyond: YaRN only in rows beyond the trained length."""

@overload
def using(
    model: _Model,
    method: Literal["yarn_temperature"],
    *,
    clamp: bool = True,
    stack: bool = False,
    train_length: int | str | None = None,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> AbstractContextManager[_Model]:
    """yarn_temperature: (0.1 ln(n / n_tr) + 1)²."""

@overload
def using(model: _Model, method: _Method | Sequence[_Method], **parameters: Any) -> AbstractContextManager[_Model]: ...
@overload
def extend(
    model: _Model,
    to: int | str,
    method: Literal["dual_chunk"],
    purpose: str = "both",
    train_length: int | str | None = None,
    *,
    chunk: int | str | None = None,
    local: int | str | None = None,
    stack: bool = False,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> _Model:
    """dual_chunk: distances inside chunks."""

@overload
def extend(
    model: _Model,
    to: int | str,
    method: Literal["leaky_rerope"],
    purpose: str = "both",
    train_length: int | str | None = None,
    *,
    window: int | str | None = None,
    stretch: float | Sequence[Any] = 4.0,
    stack: bool = False,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> _Model:
    """leaky_rerope: distances beyond w are divided."""

@overload
def extend(
    model: _Model,
    to: int | str,
    method: Literal["rerope"],
    purpose: str = "both",
    train_length: int | str | None = None,
    *,
    window: int | str | None = None,
    stack: bool = False,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> _Model:
    """rerope: RoPE sees no distance beyond w."""

@overload
def extend(
    model: _Model,
    to: int | str,
    method: Literal["self_extend"],
    purpose: str = "both",
    train_length: int | str | None = None,
    *,
    window: int | str | None = None,
    group: int = 4,
    stack: bool = False,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> _Model:
    """self_extend: distances beyond w count in groups of tokens."""

@overload
def extend(
    model: _Model,
    to: int | str,
    method: Literal["string_remap"],
    purpose: str = "both",
    train_length: int | str | None = None,
    *,
    shift: int | str | None = None,
    window: int | str | None = None,
    stack: bool = False,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> _Model:
    """string_remap: distances beyond S are reduced by S - W."""

@overload
def extend(
    model: _Model,
    to: int | str,
    method: Literal["yarn_beyond"],
    purpose: str = "both",
    train_length: int | str | None = None,
    *,
    factor: float = 2.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    attention_factor: float | None = None,
    truncate: bool = True,
    layers: str | Sequence[int] = "full_attention",
    backend: str = "auto",
) -> _Model:
    """yarn_beyond: YaRN only in rows beyond the trained length."""

@overload
def extend(
    model: _Model,
    to: int | str,
    method: str | LongAttnConfig | None = None,
    purpose: str = "both",
    train_length: int | str | None = None,
    **parameters: Any,
) -> _Model: ...
def evaluate(
    model: Any,
    texts: Mapping[str, str] | Sequence[str] | str,
    settings: Sequence[str | Setting] = (),
    out: Path | str | None = None,
    *,
    tokenizer: Any = None,
    tasks: str | Sequence[str] | None = None,
    lengths: str | Sequence[int | str] = "2k,4k,8k",
    windows: int = 1,
    targets: int = 512,
    bos: str = "auto",
    samples: int = 3,
    kinds: str | Sequence[str] | None = None,
    ruler_data: str | None = None,
    questions: str | str | Path | Sequence[Mapping[str, Any]] | None = None,
    answer_tokens: int = 64,
    chat: bool = False,
    depths: int = 5,
    near: str | int = "4k",
    evaluator: str = "unmodified",
    prefix: str | Setting | None = None,
    distances: str | Sequence[int | str] | None = None,
    passages: int = 4,
    layers: str | Sequence[int | str] | None = None,
    what: str | Sequence[str] | None = None,
    rows: str | int | None = "512",
    delta: int = 4,
    keep: float = 0.85,
    dtype: str = "auto",
    device: str = "auto",
    seed: int = 0,
    shortest_first: bool = False,
) -> Results: ...
