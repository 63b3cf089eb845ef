"""Small Triton programs around the attention of `triton_kernels`: the scores of few queries, turning vectors, joining outputs.

Sizes are in capitals, as Triton's are. The columns of `Index` are those of `geometry.AttentionLayout.index`, int32.
"""
# fmt: off
# mypy: ignore-errors

import triton
import triton.language as tl

from .triton_kernels import HIGH, KEY_START, LOW, QUERY, START, WIDTH, place


@triton.jit
def _turned(
    x, X, at, there, Cos, Sin, angle, d, FIRST: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):
    """Vectors x (n, features), float32, turned: their features begin at X + at, their pairs' angles at Cos + angle."""
    local = d - FIRST
    rotated = (local >= 0) & (local < 2 * PAIRS)
    if INTERLEAVED:
        second = local % 2 == 1
        pair, other = local // 2, tl.where(second, d - 1, d + 1)
    else:
        second = local >= PAIRS
        pair, other = tl.where(second, local - PAIRS, local), tl.where(second, d - PAIRS, d + PAIRS)
    inside = there[:, None] & rotated[None, :]
    y = tl.load(X + at[:, None] + other[None, :], mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(Cos + angle[:, None] + pair[None, :], mask=inside, other=1.0)
    sin = tl.load(Sin + angle[:, None] + pair[None, :], mask=inside, other=0.0)
    return x * cos + tl.where(second, 1.0, -1.0)[None, :] * (y * sin)

@triton.jit
def scores_kernel(
    Q, K, S, X, Index, Allowed, QIds, KIds, QCos, QSin, KCos, KSin, Gain, Bias,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_ib,
    stride_ab, stride_ah, stride_am, stride_an, stride_qi, stride_ki,
    stride_qcb, stride_qcm, stride_qch, stride_kcb, stride_kcn, stride_kch,
    stride_gain, stride_bias, stride_xb, stride_xh, stride_xm, M, N, width, scaling, softcap, sinks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    FIRST: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, TURN_Q: tl.constexpr, TURN_K: tl.constexpr,
    NORMED: tl.constexpr, CAP: tl.constexpr, MAP: tl.constexpr, HAS_X: tl.constexpr, MASK: tl.constexpr, IDS: tl.constexpr,
    FILL: tl.constexpr, PRECISION: tl.constexpr,
):
    """Finished logits of some queries of a key head with a block of keys, float32; -1e30 for pairs that are hidden.

    A row of logits has room for `width` keys, of which those from N on are none. FILL: hidden pairs are written too; else they
    keep what another segment's keys gave.
    """
    kv_heads: tl.constexpr = HEADS // GROUP
    block, b, h = place(tl.cdiv(width, COLUMNS), kv_heads)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    c = block * COLUMNS + tl.arange(0, COLUMNS)
    d = tl.arange(0, DP)
    exists, within = r < M * GROUP, c < N
    row, head = r % M, tl.where(exists, h * GROUP + r // M, 0)
    at = Index + b * stride_ib + row * WIDTH
    key_start = tl.load(Index + b * stride_ib + KEY_START)
    low = tl.load(at + LOW, mask=exists, other=2147483647)
    high = tl.load(at + HIGH, mask=exists, other=-1)
    key_index = key_start + c
    visible = within[None, :] & (key_index[None, :] >= low[:, None]) & (key_index[None, :] <= high[:, None])
    if MASK:
        hidden = Allowed + b * stride_ab + head[:, None] * stride_ah + row[:, None] * stride_am + c[None, :] * stride_an
        visible = visible & (tl.load(hidden, mask=visible, other=0) != 0)
    some = tl.max(tl.max(visible.to(tl.int32), 1), 0) > 0
    into = S + ((b * HEADS + head) * M + row)[:, None] * width + c[None, :]
    room = exists[:, None] & (c < width)[None, :]
    if some:
        q_at = b * stride_qb + head * stride_qh + row * stride_qm
        q = tl.load(Q + q_at[:, None] + d[None, :], mask=exists[:, None] & (d < D)[None, :], other=0.0)
        k_at = b * stride_kb + h * stride_kh + c * tl.cast(stride_kn, tl.int64)
        k = tl.load(K + k_at[:, None] + d[None, :], mask=within[:, None] & (d < D)[None, :], other=0.0)
        wide, norm, of_query = k.to(tl.float32), 1.0, 1.0
        if NORMED:
            norm = 1.0 / tl.maximum(tl.sqrt(tl.sum(wide * wide, 1)), 1e-30)
            of_query = 1.0 / tl.maximum(tl.sqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1)), 1e-30)
        if TURN_Q:
            angle = b * stride_qcb + row * stride_qcm + h * stride_qch
            q = _turned(q.to(tl.float32), Q, q_at, exists, QCos, QSin, angle, d, FIRST, PAIRS, INTERLEAVED).to(q.dtype)
        if TURN_K:
            angle = b * stride_kcb + c * tl.cast(stride_kcn, tl.int64) + h * stride_kch
            k = _turned(wide, K, k_at, within, KCos, KSin, angle, d, FIRST, PAIRS, INTERLEAVED).to(k.dtype)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scaling
        if NORMED:
            s = s * of_query[:, None] * norm[None, :]
        if CAP:
            s = s / softcap
            e = tl.exp(-2.0 * tl.abs(s))
            s = softcap * tl.where(s < 0, e - 1.0, 1.0 - e) / (1.0 + e)
        if HAS_X:
            x = tl.load(X + b * stride_xb + head * stride_xh + row * stride_xm, mask=exists, other=1.0)
            s = s * x[:, None]
        if MAP:
            start = tl.load(at + START, mask=exists, other=0)
            if IDS:
                own = tl.load(QIds + b * stride_qi + row, mask=exists, other=0)
                ids = tl.load(KIds + b * stride_ki + c, mask=within, other=0)
                t, offset = tl.abs(own[:, None] - ids[None, :]), ids[None, :] + 0 * start[:, None]
            else:
                own = tl.load(at + QUERY, mask=exists, other=0)
                t, offset = tl.abs(own[:, None] - key_index[None, :]), key_index[None, :] - start[:, None]
            gain = tl.load(Gain + head[:, None] * stride_gain + t, mask=visible, other=1.0)
            bias = tl.load(Bias + head[:, None] * stride_bias + t, mask=visible, other=0.0)
            first = (offset >= 0) & (offset < sinks)
            s = tl.where(first, s, gain * s + bias)
        s = tl.where(visible, s, -1e30)
        tl.store(into, s, mask=room if FILL else exists[:, None] & visible)
    elif FILL:
        tl.store(into, tl.full((ROWS, COLUMNS), -1e30, tl.float32), mask=room)

@triton.jit
def _entropy(S, width, BLOCK: tl.constexpr):
    """The entropy of the softmax of a row of logits, in nats."""
    c = tl.arange(0, BLOCK)
    m, total, w = tl.full((BLOCK,), -1e30, tl.float32), tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, BLOCK):
        s = tl.load(S + first + c, mask=first + c < width, other=-1e30)
        top = tl.maximum(m, s)
        shrink, p = tl.exp(m - top), tl.exp(s - top)
        p = tl.where(s > -5e29, p, 0.0)
        w = shrink * (w + (m - top) * total) + tl.where(p > 0, p * (s - top), 0.0)
        total = total * shrink + p
        m = top
    largest = tl.max(m, 0)
    shrink = tl.exp(m - largest)
    w = tl.sum(shrink * (w + tl.where(total > 0, (m - largest) * total, 0.0)), 0)
    total = tl.sum(total * shrink, 0)
    safe = tl.where(total > 0, total, 1.0)
    return tl.where(total > 0, tl.log(safe) - w / safe, 0.0)

@triton.jit
def entropies_kernel(S, Entropy, width, BLOCK: tl.constexpr):
    """The entropies of all rows."""
    row = tl.program_id(0).to(tl.int64)
    tl.store(Entropy + row, _entropy(S + row * width, width, BLOCK))

@triton.jit
def weights_kernel(
    S, P, Factor, Sinks, width, M,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, FACTOR: tl.constexpr, SINKS: tl.constexpr, POLYNOMIAL: tl.constexpr,
):
    """The softmax of a row of logits times a factor, beside a sink; 0 where nothing is visible.

    POLYNOMIAL: the factor is one of the row's entropy; the entropies that others are held at, then its coefficients, the
    highest power first.
    """
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    factor = tl.load(Factor + row) if FACTOR else 1.0
    if len(POLYNOMIAL):
        entropy = _entropy(S + row * width, width, BLOCK)
        entropy = tl.minimum(tl.maximum(entropy, POLYNOMIAL[0]), POLYNOMIAL[1])
        factor = 0.0
        for n in tl.static_range(2, len(POLYNOMIAL)):
            factor = factor * entropy + POLYNOMIAL[n]
    m, total = tl.full((BLOCK,), -1e30, tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, BLOCK):
        s = tl.load(S + row * width + first + c, mask=first + c < width, other=-1e30)
        s = tl.where(s > -5e29, s * factor, -1e30)
        top = tl.maximum(m, s)
        total = total * tl.exp(m - top) + tl.where(s > -5e29, tl.exp(s - top), 0.0)
        m = top
    largest = tl.max(m, 0)
    if SINKS:
        sink = tl.load(Sinks + (row // M) % HEADS)
        largest = tl.maximum(largest, sink)
    total = tl.sum(total * tl.exp(m - largest), 0)
    if SINKS:
        total += tl.exp(sink - largest)
    inverse = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
    for first in range(0, width, BLOCK):
        inside = first + c < width
        s = tl.load(S + row * width + first + c, mask=inside, other=-1e30)
        p = tl.where(s > -5e29, tl.exp(s * factor - largest), 0.0) * inverse
        tl.store(P + row * width + first + c, p.to(P.dtype.element_ty), mask=inside)

@triton.jit
def turn_kernel(
    X, Out, Cos, Sin, stride_xb, stride_xh, stride_xn, stride_ob, stride_oh, stride_on, stride_cb, stride_cn, stride_ch, N,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
    FIRST: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):
    """Vectors turned by their angles, a block of one head at a time."""
    block, b, h = place(tl.cdiv(N, BLOCK), HEADS)
    n, d = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DP)
    there = n < N
    at = b * stride_xb + h * stride_xh + n * tl.cast(stride_xn, tl.int64)
    inside = there[:, None] & (d < D)[None, :]
    x = tl.load(X + at[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    angle = b * stride_cb + n * tl.cast(stride_cn, tl.int64) + h // GROUP * stride_ch
    x = _turned(x, X, at, there, Cos, Sin, angle, d, FIRST, PAIRS, INTERLEAVED)
    into = b * stride_ob + h * stride_oh + n * tl.cast(stride_on, tl.int64)
    tl.store(Out + into[:, None] + d[None, :], x.to(Out.dtype.element_ty), mask=inside)

@triton.jit
def join_kernel(
    Out, Lse, New, NewLse, stride_ob, stride_oh, stride_on, stride_lb, stride_lh, stride_ln,
    stride_nb, stride_nh, stride_nn, stride_mb, stride_mh, stride_mn, N,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):
    """Join output and logsumexp over some keys, in place, with those over others."""
    block, b, h = place(tl.cdiv(N, BLOCK), HEADS)
    n, d = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DP)
    there = n < N
    lse_at = Lse + b * stride_lb + h * stride_lh + n * stride_ln
    old = tl.load(lse_at, mask=there, other=0.0)
    new = tl.load(NewLse + b * stride_mb + h * stride_mh + n * stride_mn, mask=there, other=0.0)
    top = tl.maximum(tl.maximum(old, new), -1e30)
    one, other = tl.exp(old - top), tl.exp(new - top)
    total = one + other
    inside = there[:, None] & (d < D)[None, :]
    out_at = Out + (b * stride_ob + h * stride_oh + n * tl.cast(stride_on, tl.int64))[:, None] + d[None, :]
    new_at = New + (b * stride_nb + h * stride_nh + n * tl.cast(stride_nn, tl.int64))[:, None] + d[None, :]
    x, y = tl.load(out_at, mask=inside, other=0.0).to(tl.float32), tl.load(new_at, mask=inside, other=0.0).to(tl.float32)
    safe = tl.where(total > 0, total, 1.0)
    x = x * (one / safe)[:, None] + y * (other / safe)[:, None]
    tl.store(out_at, x.to(Out.dtype.element_ty), mask=inside)
    tl.store(lse_at, tl.where(total > 0, top + tl.log(safe), float("-inf")), mask=there)
