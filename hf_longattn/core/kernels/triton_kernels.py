"""The Triton programs behind `kernels.triton`: what one block computes. Names of sizes are in capitals, as Triton's are.

Rows of `Index` are the columns of `geometry.Rows.index`, int32. `Ranges` holds four bounds for each block: tiles in
[first, a) and [z, last) are checked pair by pair, in one loop that skips those in [a, z), which are wholly visible and far
from the diagonal and get a loop of their own. Where there is a map the first loop takes half tiles and is not pipelined:
looking tables up costs registers for two tiles of addresses and, pipelined, two tiles of float32 in shared memory a stage,
which for 128 x 64 is more than an H100 has. Offsets that grow with batch, head or length are int64.
"""
# fmt: off
# mypy: ignore-errors

import triton
import triton.language as tl

from ..geometry import Columns

WIDTH = tl.constexpr(len(Columns._fields))
_AT = {name: tl.constexpr(n) for n, name in enumerate(Columns._fields)}
QUERY, KEY_START, START, LOW, HIGH = (_AT[name] for name in ("query", "key_start", "start", "low", "high"))


@triton.jit
def _rows(Index, row, there):
    """Cache index, sequence start, first and last visible cache index of some rows; rows that are not there see nothing."""
    at = Index + row * WIDTH
    return (
        tl.load(at + QUERY, mask=there, other=0), tl.load(at + START, mask=there, other=0),
        tl.load(at + LOW, mask=there, other=2147483647), tl.load(at + HIGH, mask=there, other=-1),
    )

@triton.jit
def _vectors(X, c, n, stride, Table, stride_page, there, PAGE: tl.constexpr):
    """Where the vectors of keys c + n begin: one after the other, or by Table in pages of PAGE keys."""
    if PAGE:
        page = tl.load(Table + (c + n) // PAGE, mask=there, other=0).to(tl.int64)
        return X + page * stride_page + (c + n) % PAGE * stride
    return X + c * tl.cast(stride, tl.int64) + n * stride

@triton.jit
def _cubic(table, centre, OUTER: tl.constexpr, INNER: tl.constexpr):
    f1, g1 = tl.load(table + centre + OUTER), tl.load(table + centre - OUTER)
    f2, g2 = tl.load(table + centre + INNER), tl.load(table + centre - INNER)
    e1, e2 = 0.5 * (f1 + g1), 0.5 * (f2 + g2)
    d1, d2 = (f1 - g1) / (2 * OUTER), (f2 - g2) / (2 * INNER)
    square = (e1 - e2) / (OUTER * OUTER - INNER * INNER)
    odd = (d1 - d2) / (OUTER * OUTER - INNER * INNER)
    return e2 - square * INNER * INNER, d2 - odd * INNER * INNER, square, odd

@triton.jit
def _logits(
    s, query_index, key_index, low, high, start, gain, bias, y, q0, k0, sinks,
    MAP: tl.constexpr, Y: tl.constexpr, FAR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    OUTER: tl.constexpr, INNER: tl.constexpr,
):
    """Logits of a tile, d logit / d s and d logit / d y.

    query_index, low, high, start and y are (rows, 1), key_index is (1, columns); or all of them, and s, transposed.
    """
    g, b = 1.0, 0.0
    if MAP:
        if FAR:
            centre = q0 - k0 + (ROWS - COLUMNS) // 2
            x = (query_index - key_index - centre).to(tl.float32)
            c0, c1, c2, c3 = _cubic(gain, centre, OUTER, INNER)
            g = c0 + x * (c1 + x * (c2 + x * c3))
            c0, c1, c2, c3 = _cubic(bias, centre, OUTER, INNER)
            b = c0 + x * (c1 + x * (c2 + x * c3))
        else:
            t = tl.abs(query_index - key_index)
            visible = (key_index >= low) & (key_index <= high)
            g, b = tl.load(gain + t, mask=visible, other=1.0), tl.load(bias + t, mask=visible, other=0.0)
            sink = (key_index >= start) & (key_index < start + sinks)
            g, b = tl.where(sink, 1.0, g), tl.where(sink, 0.0, b)
        s = s * g + (y * b if Y else b)
    if not FAR:
        s = tl.where((key_index >= low) & (key_index <= high), s, -1e30)
    return s, g, b

@triton.jit
def _forward_tiles(
    acc, m, total, w, q, half, K, V, stride_kn, stride_vn, begin, end, a, skip, least, N, scaling,
    query_index, low, high, start, gain, bias, y, q0, key_start, sinks,
    Table, stride_kp, stride_vp, Cos, Sin, stride_cn,
    MAP: tl.constexpr, Y: tl.constexpr, VALUE: tl.constexpr, ENTROPY: tl.constexpr, FAR: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, PAGE: tl.constexpr, TURN: tl.constexpr,
):
    d, e, n = tl.arange(0, DP), tl.arange(0, EP), tl.arange(0, COLUMNS)
    for visited in tl.range(begin, end, COLUMNS, num_stages=1 if MAP and not FAR else STAGES):
        c = visited + tl.where(visited >= a, skip, 0)
        column = c + n
        there = column < N
        if PAGE:  # other requests' keys and values are not read: a NaN among them would spread
            there = there & (column >= least)
        inside = there[None, :] & (d < D)[:, None]
        k = tl.load(
            _vectors(K, c, n, stride_kn, Table, stride_kp, there, PAGE)[None, :] + d[:, None], mask=inside, other=0.0
        )
        if TURN:
            angle = c * tl.cast(stride_cn, tl.int64) + n[None, :] * stride_cn + d[:, None]
            cos, sin = tl.load(Cos + angle, mask=inside, other=0.0), tl.load(Sin + angle, mask=inside, other=0.0)
            s = tl.dot(half, (k * sin).to(k.dtype), input_precision=PRECISION)
            s = tl.dot(q, (k * cos).to(k.dtype), s, input_precision=PRECISION) * scaling
        else:
            s = tl.dot(q, k, input_precision=PRECISION) * scaling
        key_index = (key_start + column)[None, :]
        s, _, _ = _logits(
            s, query_index, key_index, low, high, start, gain, bias, y, q0, key_start + c, sinks,
            MAP, Y, FAR, SPAN, COLUMNS, OUTER, INNER,
        )
        top = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - top[:, None])
        if not FAR:
            p = tl.where((key_index >= low) & (key_index <= high), p, 0.0)
        shrink = tl.exp(m - top)
        if ENTROPY:  # Σ e^(L - m) (L - m), kept up to date as m grows
            w = shrink * (w + (m - top) * total) + tl.sum(p * (s - top[:, None]), 1)
        total = total * shrink + tl.sum(p, 1)
        if VALUE:
            v = tl.load(
                _vectors(V, c, n, stride_vn, Table, stride_vp, there, PAGE)[:, None] + e[None, :],
                mask=there[:, None] & (e < E)[None, :], other=0.0,
            )
            acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        m = top
    return acc, m, total, w

@triton.jit
def forward_kernel(
    Q, K, V, Out, Lse, Entropy, Index, Ranges, Gain, Bias, Y,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ib, stride_rb, stride_gain, stride_bias, M, N, scaling, sinks, chunk,
    Table, Half, Cos, Sin, stride_tb, stride_cb, stride_cn, stride_ch,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr, SPLITS: tl.constexpr,
    MAP: tl.constexpr, HAS_Y: tl.constexpr, VALUE: tl.constexpr, ENTROPY: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, PAGE: tl.constexpr, TURN: tl.constexpr,
):
    """One block of query rows against one of SPLITS parts of the keys; PACKED: the rows of all heads that share a key head.

    PAGE: keys and values lie in pages of so many, and the strides of K and V by batch are those of pages. TURN: keys are
    re-rotated as they are read, q . (cos k) + half . (sin k).
    """
    block, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    n_heads = HEADS // GROUP if PACKED else HEADS
    b, h = (tl.program_id(1) // n_heads).to(tl.int64), (tl.program_id(1) % n_heads).to(tl.int64)
    r = block * ROWS + tl.arange(0, ROWS)
    if PACKED:
        head, row, there, kv_head = h * GROUP + r // M, r % M, r < M * GROUP, h
        head = tl.where(there, head, 0)
    else:
        head, row, there, kv_head = h + 0 * r, r, r < M, h // GROUP
    d, e = tl.arange(0, DP), tl.arange(0, EP)
    Index += b * stride_ib
    key_start = tl.load(Index + KEY_START)
    query_index, start, low, high = _rows(Index, row, there)
    query_index, start, low = query_index[:, None], start[:, None], low[:, None]
    high = tl.minimum(high, key_start + N - 1)[:, None]
    q0 = tl.load(Index + (0 if PACKED else block * ROWS) * WIDTH + QUERY)
    at = b * stride_qb + head[:, None] * stride_qh + row[:, None] * stride_qm + d[None, :]
    inside = there[:, None] & (d < D)[None, :]
    q = tl.load(Q + at, mask=inside, other=0.0)
    half = tl.load(Half + at, mask=inside, other=0.0) if TURN else q
    flat = (b * HEADS + head) * M + row
    y = tl.load(Y + flat, mask=there, other=1.0)[:, None] if HAS_Y else 1.0
    least = 0
    if PAGE:
        Table += b * stride_tb
        least, N = tl.min(low) - key_start, tl.max(high) + 1 - key_start
    else:
        K += b * stride_kb
        V += b * stride_vb
    K += kv_head * stride_kh
    V += kv_head * stride_vh
    Cos += b * stride_cb + kv_head * stride_ch
    Sin += b * stride_cb + kv_head * stride_ch
    owner = head[:, None] if PACKED else h
    gain, bias = Gain + owner * stride_gain, Bias + owner * stride_bias
    ranges = Ranges + b * stride_rb + block * 4
    first, a, z, last = tl.load(ranges), tl.load(ranges + 1), tl.load(ranges + 2), tl.load(ranges + 3)
    if SPLITS > 1:
        c0, c1 = split * chunk, (split + 1) * chunk
        first, a = tl.minimum(tl.maximum(first, c0), c1), tl.minimum(tl.maximum(a, c0), c1)
        z, last = tl.minimum(tl.maximum(z, c0), c1), tl.minimum(tl.maximum(last, c0), c1)
    acc = tl.zeros((ROWS, EP), tl.float32)
    m = tl.full((ROWS,), -1e30, tl.float32)
    total, w = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    for far in tl.static_range(2):
        begin, end, skip = (a, z, 0) if far == 1 else (first, last - (z - a), z - a)
        acc, m, total, w = _forward_tiles(
            acc, m, total, w, q, half, K, V, stride_kn, stride_vn, begin, end, a, skip, least, N, scaling,
            query_index, low, high, start, gain, bias, y, q0, key_start, sinks,
            Table, stride_kb, stride_vb, Cos, Sin, stride_cn,
            MAP, HAS_Y, VALUE, ENTROPY, far == 1, ROWS, COLUMNS // 2 if MAP and far == 0 else COLUMNS,
            SPAN, D, DP, E, EP, OUTER, INNER, PRECISION, STAGES, PAGE, TURN,
        )
    visible = total > 0
    safe = tl.where(visible, total, 1.0)
    out_row = flat * SPLITS + split
    lse = tl.where(visible, m + tl.log(safe), float("-inf"))
    tl.store(Lse + out_row, lse, mask=there)
    if ENTROPY:
        tl.store(Entropy + out_row, tl.where(visible, tl.log(safe) - w / safe, 0.0), mask=there)
    if VALUE:
        out = acc / safe[:, None]
        tl.store(
            Out + out_row[:, None] * E + e[None, :], out.to(Out.dtype.element_ty), mask=there[:, None] & (e < E)[None, :]
        )

@triton.jit
def _d_logits(
    s, dp, lse, delta, entropy, d_entropy, visible, ENTROPY: tl.constexpr, VALUE: tl.constexpr, FAR: tl.constexpr
):
    """Probabilities and the gradient of the logits; the row's numbers come in the shape that fits s."""
    p = tl.exp(s - lse)
    if not FAR:
        p = tl.where(visible, p, 0.0)
    d = p * (dp - delta) if VALUE else p * (0.0 - delta)
    if ENTROPY:  # dH / dL_j = -p_j (L_j - mean L), and mean L = lse - H
        d -= d_entropy * p * (s - lse + entropy)
    return p, d

@triton.jit
def _query_tiles(
    dq, dy, q, do, K, V, stride_kn, stride_vn, begin, end, a, skip, N, scaling, lse, delta, entropy, d_entropy,
    query_index, low, high, start, gain, bias, y, q0, key_start, sinks,
    MAP: tl.constexpr, HAS_Y: tl.constexpr, VALUE: tl.constexpr, ENTROPY: tl.constexpr, FAR: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    OUTER: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):
    d, e, n = tl.arange(0, DP), tl.arange(0, EP), tl.arange(0, COLUMNS)
    for visited in tl.range(begin, end, COLUMNS, num_stages=1 if MAP and not FAR else STAGES):
        c = visited + tl.where(visited >= a, skip, 0)
        column = c + n
        k = tl.load(
            K + c * tl.cast(stride_kn, tl.int64) + n[:, None] * stride_kn + d[None, :],
            mask=(column < N)[:, None] & (d < D)[None, :], other=0.0,
        )
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scaling
        key_index = (key_start + column)[None, :]
        s, g, b = _logits(
            s, query_index, key_index, low, high, start, gain, bias, y, q0, key_start + c, sinks,
            MAP, HAS_Y, FAR, ROWS, COLUMNS, OUTER, INNER,
        )
        dp = s
        if VALUE:
            v = tl.load(
                V + c * tl.cast(stride_vn, tl.int64) + n[:, None] * stride_vn + e[None, :],
                mask=(column < N)[:, None] & (e < E)[None, :], other=0.0,
            )
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        visible = (key_index >= low) & (key_index <= high)
        _, ds = _d_logits(s, dp, lse, delta, entropy, d_entropy, visible, ENTROPY, VALUE, FAR)
        if HAS_Y:
            dy += tl.sum(ds * b, 1)
        if MAP:
            ds = ds * g
        dq += tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
    return dq, dy

@triton.jit
def query_kernel(
    Q, K, V, DO, DQ, DY, Lse, Delta, Entropy, DEntropy, Index, Ranges, Gain, Bias, Y,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ib, stride_rb, stride_gain, stride_bias, M, N, scaling, sinks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, MAP: tl.constexpr, HAS_Y: tl.constexpr, VALUE: tl.constexpr,
    ENTROPY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """d_query and d_bias_scale of one block of rows."""
    block = tl.program_id(0)
    b, h = (tl.program_id(1) // HEADS).to(tl.int64), (tl.program_id(1) % HEADS).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    there, d, e = row < M, tl.arange(0, DP), tl.arange(0, EP)
    Index += b * stride_ib
    key_start = tl.load(Index + KEY_START)
    query_index, start, low, high = _rows(Index, row, there)
    query_index, start, low = query_index[:, None], start[:, None], low[:, None]
    high = tl.minimum(high, key_start + N - 1)[:, None]
    q0 = tl.load(Index + block * ROWS * WIDTH + QUERY)
    inside = there[:, None] & (d < D)[None, :]
    q = tl.load(Q + b * stride_qb + h * stride_qh + row[:, None] * stride_qm + d[None, :], mask=inside, other=0.0)
    flat = (b * HEADS + h) * M + row
    do = q
    if VALUE:
        do = tl.load(DO + flat[:, None] * E + e[None, :], mask=there[:, None] & (e < E)[None, :], other=0.0)
    y = tl.load(Y + flat, mask=there, other=1.0)[:, None] if HAS_Y else 1.0
    lse, delta = tl.load(Lse + flat, mask=there, other=0.0)[:, None], tl.load(Delta + flat, mask=there, other=0.0)[:, None]
    entropy = tl.load(Entropy + flat, mask=there, other=0.0)[:, None] if ENTROPY else 0.0
    d_entropy = tl.load(DEntropy + flat, mask=there, other=0.0)[:, None] if ENTROPY else 0.0
    K += b * stride_kb + h // GROUP * stride_kh
    V += b * stride_vb + h // GROUP * stride_vh
    gain, bias = Gain + h * stride_gain, Bias + h * stride_bias
    ranges = Ranges + b * stride_rb + block * 4
    first, a, z, last = tl.load(ranges), tl.load(ranges + 1), tl.load(ranges + 2), tl.load(ranges + 3)
    dq, dy = tl.zeros((ROWS, DP), tl.float32), tl.zeros((ROWS,), tl.float32)
    for far in tl.static_range(2):
        begin, end, skip = (a, z, 0) if far == 1 else (first, last - (z - a), z - a)
        dq, dy = _query_tiles(
            dq, dy, q, do, K, V, stride_kn, stride_vn, begin, end, a, skip, N, scaling, lse, delta, entropy, d_entropy,
            query_index, low, high, start, gain, bias, y, q0, key_start, sinks,
            MAP, HAS_Y, VALUE, ENTROPY, far == 1, ROWS, COLUMNS // 2 if MAP and far == 0 else COLUMNS,
            D, DP, E, EP, OUTER, INNER, PRECISION, STAGES,
        )
    tl.store(DQ + flat[:, None] * D + d[None, :], (dq * scaling).to(DQ.dtype.element_ty), mask=inside)
    if HAS_Y:
        tl.store(DY + flat, dy, mask=there)

@triton.jit
def _key_tiles(
    dk, dv, k, v, Q, DO, Lse, Delta, Entropy, DEntropy, Y, Index, stride_qm, begin, end, a, skip, M, flat0, scaling,
    key_index, gain, bias, k0, sinks,
    MAP: tl.constexpr, HAS_Y: tl.constexpr, VALUE: tl.constexpr, ENTROPY: tl.constexpr, FAR: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    OUTER: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):
    d, e, r = tl.arange(0, DP), tl.arange(0, EP), tl.arange(0, ROWS)
    for visited in tl.range(begin, end, ROWS, num_stages=1 if MAP and not FAR else STAGES):
        c = visited + tl.where(visited >= a, skip, 0)
        row = c + r
        there, flat = row < M, flat0 + row
        q = tl.load(
            Q + c * tl.cast(stride_qm, tl.int64) + r[:, None] * stride_qm + d[None, :],
            mask=there[:, None] & (d < D)[None, :], other=0.0,
        )
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scaling
        query_index, start, low, high = _rows(Index, row, there)
        query_index, start, low, high = query_index[None, :], start[None, :], low[None, :], high[None, :]
        y = tl.load(Y + flat, mask=there, other=1.0)[None, :] if HAS_Y else 1.0
        s, g, _ = _logits(
            s, query_index, key_index, low, high, start, gain, bias, y, tl.load(Index + c * WIDTH + QUERY), k0, sinks,
            MAP, HAS_Y, FAR, ROWS, COLUMNS, OUTER, INNER,
        )
        lse = tl.load(Lse + flat, mask=there, other=0.0)[None, :]
        delta = tl.load(Delta + flat, mask=there, other=0.0)[None, :]
        entropy = tl.load(Entropy + flat, mask=there, other=0.0)[None, :] if ENTROPY else 0.0
        d_entropy = tl.load(DEntropy + flat, mask=there, other=0.0)[None, :] if ENTROPY else 0.0
        dp, do = s, q
        if VALUE:
            do = tl.load(DO + flat[:, None] * E + e[None, :], mask=there[:, None] & (e < E)[None, :], other=0.0)
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        visible = (key_index >= low) & (key_index <= high)
        p, ds = _d_logits(s, dp, lse, delta, entropy, d_entropy, visible, ENTROPY, VALUE, FAR)
        if VALUE:
            dv += tl.dot(p.to(do.dtype), do, input_precision=PRECISION)
        if MAP:
            ds = ds * g
        dk += tl.dot(ds.to(q.dtype), q, input_precision=PRECISION)
    return dk, dv

@triton.jit
def key_kernel(
    Q, K, V, DO, DK, DV, Lse, Delta, Entropy, DEntropy, Index, Ranges, Gain, Bias, Y,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ib, stride_rb, stride_gain, stride_bias, M, N, scaling, sinks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, MAP: tl.constexpr, HAS_Y: tl.constexpr, VALUE: tl.constexpr,
    ENTROPY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """d_key and d_value of one block of keys, summed over the heads that share them."""
    block, kv_heads = tl.program_id(0), HEADS // GROUP
    b, kv_head = (tl.program_id(1) // kv_heads).to(tl.int64), (tl.program_id(1) % kv_heads).to(tl.int64)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    there, d, e = column < N, tl.arange(0, DP), tl.arange(0, EP)
    inside = there[:, None] & (d < D)[None, :]
    k = tl.load(K + b * stride_kb + kv_head * stride_kh + column[:, None] * stride_kn + d[None, :], mask=inside, other=0.0)
    v = k
    if VALUE:
        v = tl.load(
            V + b * stride_vb + kv_head * stride_vh + column[:, None] * stride_vn + e[None, :],
            mask=there[:, None] & (e < E)[None, :], other=0.0,
        )
    Index += b * stride_ib
    k0 = tl.load(Index + KEY_START) + block * COLUMNS
    key_index = (k0 + tl.arange(0, COLUMNS))[:, None]
    ranges = Ranges + b * stride_rb + block * 4
    first, a, z, last = tl.load(ranges), tl.load(ranges + 1), tl.load(ranges + 2), tl.load(ranges + 3)
    dk, dv = tl.zeros((COLUMNS, DP), tl.float32), tl.zeros((COLUMNS, EP), tl.float32)
    for g in range(GROUP):
        h = kv_head * GROUP + g
        for far in tl.static_range(2):
            begin, end, skip = (a, z, 0) if far == 1 else (first, last - (z - a), z - a)
            dk, dv = _key_tiles(
                dk, dv, k, v, Q + b * stride_qb + h * stride_qh, DO, Lse, Delta, Entropy, DEntropy, Y, Index,
                stride_qm, begin, end, a, skip, M, (b * HEADS + h) * M, scaling,
                key_index, Gain + h * stride_gain, Bias + h * stride_bias, k0, sinks,
                MAP, HAS_Y, VALUE, ENTROPY, far == 1, ROWS // 2 if MAP and far == 0 else ROWS, COLUMNS,
                D, DP, E, EP, OUTER, INNER, PRECISION, STAGES,
            )
    flat = (b * kv_heads + kv_head) * N + column
    tl.store(DK + flat[:, None] * D + d[None, :], (dk * scaling).to(DK.dtype.element_ty), mask=inside)
    if VALUE:
        tl.store(DV + flat[:, None] * E + e[None, :], dv.to(DV.dtype.element_ty), mask=there[:, None] & (e < E)[None, :])
