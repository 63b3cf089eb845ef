"""The Triton programs behind `kernels.triton`: what one block computes. Names of sizes are in capitals, as Triton's are.

A tile of rows and columns is computed in one of three ways, each in a loop of its own:

- checked: visibility pair by pair, and tables looked up pair by pair; near the diagonal, at the edges of what is visible.
- whole: every pair is visible, and there is no map.
- far: every pair is visible, and the tables are polynomials of the distance, of the lowest degree that is exact enough.

Rows are those of `AttentionLayout.index`; the programs count everything in columns, from the first key on. Logits are in
units of ln 2, so that exp2 serves. Offsets that grow with batch, head or length are int64. Outputs and gradients are laid out
by token, see `kernel.by_token`.
"""
# fmt: off
# mypy: ignore-errors

import triton
import triton.language as tl

from ..geometry import RowBounds

WIDTH = tl.constexpr(len(RowBounds._fields))
_AT = {name: tl.constexpr(n) for n, name in enumerate(RowBounds._fields)}
QUERY, KEY_START, START, LOW, HIGH = (_AT[name] for name in ("query", "key_start", "start", "low", "high"))
LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
#: Polynomials are known at every STEP-th distance; their records hold the degrees one after the other, see `triton._fits`.
STEP, RECORD = tl.constexpr(16), tl.constexpr(18)


@triton.jit
def place(blocks, HEADS: tl.constexpr):
    """This program's block, batch entry and head; blocks follow each other. All on one axis: others end at 65,535."""
    program = tl.program_id(0)
    head = program // blocks
    return program % blocks, (head // HEADS).to(tl.int64), (head % HEADS).to(tl.int64)


@triton.jit
def _rows(Index, row, there, N):
    """Own column, column where the sequence starts, first and last visible column; rows that are not there see nothing."""
    at = Index + row.to(tl.int64) * WIDTH
    key_start = tl.load(Index + KEY_START)
    query = (tl.load(at + QUERY, mask=there, other=0) - key_start).to(tl.int32)
    start = (tl.load(at + START, mask=there, other=0) - key_start).to(tl.int32)
    low = tl.maximum(tl.load(at + LOW, mask=there, other=1 << 40) - key_start, 0)
    high = tl.maximum(tl.load(at + HIGH, mask=there, other=-1) - key_start, -1)
    return query, start, tl.minimum(low, N).to(tl.int32), tl.minimum(high, N - 1).to(tl.int32)

@triton.jit
def _bounds(query, start, low, high, there, sinks, N, MAP: tl.constexpr, COLUMNS: tl.constexpr):
    """For a block of rows: the first and past the last column seen; tiles from a on and before z are wholly visible."""
    seeing = low <= high
    least, last = tl.min(tl.where(seeing, low, N)), tl.max(tl.where(seeing, high, -1)) + 1
    kept, until = tl.max(tl.where(there, low, 0)), tl.min(tl.where(there, high, N - 1)) + 1
    if MAP:
        kept = tl.maximum(kept, tl.max(tl.where(there, start + sinks, 0)))
    a = tl.maximum(tl.cdiv(kept, COLUMNS), least // COLUMNS) * COLUMNS
    return least, last, a, tl.maximum(until // COLUMNS * COLUMNS, a)

@triton.jit
def _from(Far, DEGREE: tl.constexpr):
    """The distance of centres from which on tiles are polynomials of this degree."""
    return tl.load(Far + DEGREE - 1).to(tl.int32) * STEP - STEP // 2

@triton.jit
def _load(X, first, n, stride, least, last, CHECKED: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Load the vectors first + n; 0 in place of vectors outside of [least, last), where that is checked."""
    d = tl.arange(0, DP)
    at = X + first * tl.cast(stride, tl.int64) + n[:, None] * stride + d[None, :]
    there = (first + n >= least) & (first + n < last)
    if CHECKED and D < DP:
        return tl.load(at, mask=there[:, None] & (d < D)[None, :], other=0.0)
    if CHECKED:
        return tl.load(at, mask=there[:, None], other=0.0)
    if D < DP:
        return tl.load(at, mask=(d < D)[None, :], other=0.0)
    return tl.load(at)

@triton.jit
def _polynomial(record, unit, u, j, DEGREE: tl.constexpr):
    """c_0 + c_1 (u - j) + ... times unit, with the powers of j factored out: two vectors cost less than their difference."""
    c0, c1 = tl.load(record) * unit, tl.load(record + 1) * unit
    if DEGREE == 1:
        return (c0 + c1 * u) - c1 * j
    c2 = tl.load(record + 2) * unit
    if DEGREE == 2:
        return (c0 + u * (c1 + u * c2)) + j * (c2 * j - (c1 + 2 * c2 * u))
    c3 = tl.load(record + 3) * unit
    second = (c2 + 3 * c3 * u) - c3 * j
    return (c0 + u * (c1 + u * (c2 + u * c3))) + j * (j * second - (c1 + u * (2 * c2 + 3 * u * c3)))

@triton.jit
def _visible(row, column, low, high, Allowed, stride_am, stride_an, M, N, ALLOWED: tl.constexpr):
    visible = (column >= low) & (column <= high)
    if ALLOWED:
        at = Allowed + row.to(tl.int64) * stride_am + column.to(tl.int64) * stride_an
        visible = visible & (tl.load(at, mask=visible & (row < M), other=0) != 0)
    return visible

@triton.jit
def _logits(
    s, column, visible, query, start, query_id, key_id, x, y, Gain, Bias, Far, i, j, centre, factor, bend, sinks,
    MAP: tl.constexpr, SOFTCAP: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, IDS: tl.constexpr, LINEAR: tl.constexpr,
    DEGREE: tl.constexpr,
):
    """Make logits of a tile's products s, with their derivative by s over a constant, and by the row factors over LN2.

    LINEAR: the logits are factor s, and s comes back. What goes by row has one shape, what goes by column another, which
    broadcast to that of s. DEGREE: 0 where tables are looked up; else i and j are distances from the tile's centre.
    """
    slope = 1.0
    if SOFTCAP:  # C / c = tanh(S / c)
        t = tl.exp2(-tl.abs(s) * bend)
        t = tl.where(s < 0, t - 1, 1 - t) / (1 + t)
        slope, s = 1 - t * t, t
    by_x, by_y = s, 0.0
    if MAP:
        if DEGREE == 0:
            t = tl.abs(query_id - key_id) if IDS else tl.abs(query - column)
            sink = key_id < sinks if IDS else (column >= start) & (column < start + sinks)
            looked = visible & ~sink
            g, by_y = tl.load(Gain + t, mask=looked, other=1.0), tl.load(Bias + t, mask=looked, other=0.0)
            g, by_y = g * factor, by_y * LOG2E
        else:
            nearest = (centre + STEP // 2) // STEP
            record = Far + (nearest + 1) * RECORD + (DEGREE - 1) * (DEGREE + 2)
            u = i + (centre - nearest * STEP).to(tl.float32)
            g = _polynomial(record, factor, u, j, DEGREE)
            by_y = _polynomial(record + DEGREE + 1, LOG2E, u, j, DEGREE)
        by_x, slope = g * s, g * slope
        added = y * by_y if Y else by_y
        s = (x * by_x if X else by_x) + added
    elif not LINEAR:
        by_x = s * factor
        s = x * by_x if X else by_x
    return s, slope, by_x, by_y

@triton.jit
def _keep(Seed, row, column, head, dropout):
    """Which pairs are not dropped, the same whenever they are asked for."""
    lanes, _, _, _ = tl.philox(tl.load(Seed), column + 0 * row, row + 0 * column, head.to(tl.int32), 0)
    return tl.uint_to_uniform_float(lanes) >= dropout

@triton.jit
def _forward_tiles(
    acc, m, total, w, begin, end, least, last, q, K, V, stride_kn, stride_vn,
    row, query, middle, start, low, high, query_id, KeyIds, x, y, Gain, Bias, Far, Allowed, stride_am, stride_an, Seed, head,
    M, N, factor, bend, dropout, sinks,
    MAP: tl.constexpr, SOFTCAP: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, IDS: tl.constexpr, LINEAR: tl.constexpr,
    ALLOWED: tl.constexpr, DROPOUT: tl.constexpr, VALUE: tl.constexpr, ENTROPY: tl.constexpr,
    CHECKED: tl.constexpr, DEGREE: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):
    n = tl.arange(0, COLUMNS)
    i, j = (query - middle).to(tl.float32), (n - COLUMNS // 2).to(tl.float32)[None, :]
    for c in tl.range(begin, end, COLUMNS, num_stages=STAGES):
        k = _load(K, c, n, stride_kn, least, last, CHECKED, D, DP)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        column = (c + n)[None, :]
        visible = _visible(row, column, low, high, Allowed, stride_am, stride_an, M, N, ALLOWED) if CHECKED else True
        key_id = tl.load(KeyIds + column, mask=column < last, other=0) if IDS and CHECKED else 0
        s, _, _, _ = _logits(
            s, column, visible, query, start, query_id, key_id, x, y, Gain, Bias, Far, i, j, middle - c - COLUMNS // 2,
            factor, bend, sinks, MAP, SOFTCAP, X, Y, IDS, LINEAR, DEGREE,
        )
        if CHECKED:
            s = tl.where(visible, s, float("-inf"))
        if LINEAR:  # one multiply-add a pair: the largest product has the largest logit
            top = tl.maximum(m, tl.max(s, 1) * factor)
            s = s * factor - top[:, None]
        else:
            top = tl.maximum(m, tl.max(s, 1))
            s = s - top[:, None]
        p, shrink = tl.exp2(s), tl.exp2(m - top)
        if ENTROPY:  # sum of 2^(L - m) (L - m), kept up to date as m grows
            w = shrink * (w + (m - top) * total) + tl.sum(tl.where(visible, p * s, 0.0) if CHECKED else p * s, 1)
        total = total * shrink + tl.sum(p, 1)
        if DROPOUT:
            p = tl.where(_keep(Seed, row, column, head, dropout), p, 0.0)
        if VALUE:
            v = _load(V, c, n, stride_vn, least, last, CHECKED, E, EP)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        m = top
    return acc, m, total, w

@triton.jit(do_not_specialize=["M", "N", "sinks"])
def forward_kernel(
    Q, K, V, Out, Lse, Entropy, Index, Gain, Bias, Far, X, Y, Allowed, QueryIds, KeyIds, Seed,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ib, stride_gain, stride_bias, stride_far, stride_ab, stride_ah, stride_am, stride_an, stride_qi, stride_ki,
    M, N, factor, bend, dropout, share, sinks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, MAP: tl.constexpr, SOFTCAP: tl.constexpr, HAS_X: tl.constexpr,
    HAS_Y: tl.constexpr, IDS: tl.constexpr, LINEAR: tl.constexpr, ALLOWED: tl.constexpr, DROPOUT: tl.constexpr,
    VALUE: tl.constexpr, ENTROPY: tl.constexpr, DEGREES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):
    """Output, logsumexp and entropy of one block of rows of a head; the last blocks, which see most, begin first."""
    blocks = tl.cdiv(M, ROWS)
    block, b, h = place(blocks, HEADS)
    block = blocks - 1 - block
    r, e = tl.arange(0, ROWS), tl.arange(0, EP)
    row = block * ROWS + r
    there = row < M
    flat = (b * HEADS + h) * M + row
    query, start, low, high = _rows(Index + b * stride_ib, row, there, N)
    least, last, a, z = _bounds(query, start, low, high, there, sinks, N, MAP, COLUMNS)
    top, bottom = tl.max(tl.where(there, query, -2147483647)), tl.min(tl.where(there, query, 2147483647))
    middle = (top + bottom + 1) // 2
    q = _load(Q + b * stride_qb + h * stride_qh, block * ROWS, r, stride_qm, 0, M, True, D, DP)
    x = tl.load(X + flat, mask=there, other=1.0)[:, None] if HAS_X else 1.0
    y = tl.load(Y + flat, mask=there, other=1.0)[:, None] if HAS_Y else 1.0
    query_id = tl.load(QueryIds + b * stride_qi + row, mask=there, other=0)[:, None] if IDS else 0
    K += b * stride_kb + h // GROUP * stride_kh
    V += b * stride_vb + h // GROUP * stride_vh
    KeyIds += b * stride_ki
    Allowed += b * stride_ab + h * stride_ah
    gain, bias, far = Gain + h * stride_gain, Bias + h * stride_bias, Far + h * stride_far
    acc = tl.zeros((ROWS, EP), tl.float32)
    m = tl.full((ROWS,), -1e30, tl.float32)
    total, w = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    row, query, start, low, high = row[:, None], query[:, None], start[:, None], low[:, None], high[:, None]
    done = a
    for degree in tl.static_range(0, 4):
        if DEGREES & (1 << degree):
            end = z
            if degree:  # where rows lie as far apart as they are numbered
                reach = middle - COLUMNS // 2 - _from(far, degree)
                end = tl.where(top - bottom < ROWS, tl.maximum(reach + COLUMNS, 0) // COLUMNS * COLUMNS, 0)
                end = tl.maximum(tl.minimum(end, z), done)
            acc, m, total, w = _forward_tiles(
                acc, m, total, w, done, end, least, last, q, K, V, stride_kn, stride_vn,
                row, query, middle, start, low, high, query_id, KeyIds, x, y, gain, bias, far, Allowed, stride_am, stride_an,
                Seed, b * HEADS + h, M, N, factor, bend, dropout, sinks,
                MAP, SOFTCAP, HAS_X, HAS_Y, IDS, LINEAR, ALLOWED, DROPOUT, VALUE, ENTROPY,
                False, degree, COLUMNS, D, DP, E, EP, PRECISION, STAGES,
            )
            done = end
    for side in range(2):
        begin = tl.where(side == 0, least // COLUMNS * COLUMNS, done)
        end = tl.where(side == 0, tl.minimum(a, last), last)
        acc, m, total, w = _forward_tiles(
            acc, m, total, w, begin, end, least, last, q, K, V, stride_kn, stride_vn,
            row, query, middle, start, low, high, query_id, KeyIds, x, y, gain, bias, far, Allowed, stride_am, stride_an,
            Seed, b * HEADS + h, M, N, factor, bend, dropout, sinks,
            MAP, SOFTCAP, HAS_X, HAS_Y, IDS, LINEAR, ALLOWED, DROPOUT, VALUE, ENTROPY,
            True, 0, COLUMNS, D, DP, E, EP, PRECISION, 1 if MAP else STAGES,
        )
    visible = total > 0
    safe = tl.where(visible, total, 1.0)
    tl.store(Lse + flat, tl.where(visible, (m + tl.log2(safe)) * LN2, float("-inf")), mask=there)
    if ENTROPY:
        tl.store(Entropy + flat, tl.where(visible, (tl.log2(safe) - w / safe) * LN2, 0.0), mask=there)
    if VALUE:
        out = acc * (share / safe)[:, None] if DROPOUT else acc / safe[:, None]
        at = (b * M + row) * HEADS + h
        tl.store(Out + at * E + e[None, :], out.to(Out.dtype.element_ty), mask=there[:, None] & (e < E)[None, :])

@triton.jit
def _d_logits(
    s, dp, lse, delta, entropy, d_entropy, visible, kept, share, factor,
    LINEAR: tl.constexpr, ENTROPY: tl.constexpr, VALUE: tl.constexpr, CHECKED: tl.constexpr, DROPOUT: tl.constexpr,
):
    """Probabilities, before and after dropout, and the gradient of the logits; a row's numbers have the shape that fits s."""
    log_p = s * factor - lse if LINEAR else s - lse
    if CHECKED:
        log_p = tl.where(visible, log_p, float("-inf"))
    p = tl.exp2(log_p)
    dropped = p
    if DROPOUT:
        dropped = tl.where(kept, p * share, 0.0)
        dp = tl.where(kept, dp * share, 0.0)
    d = p * (dp - delta) if VALUE else p * (0.0 - delta)
    if ENTROPY:  # dH / dL_j = -p_j (ln p_j + H)
        log_p = tl.where(visible, log_p, 0.0) if CHECKED else log_p
        d -= d_entropy * p * (log_p * LN2 + entropy)
    return dropped, d

@triton.jit
def _query_tiles(
    dq, dx, dy, begin, end, least, last, q, do, K, V, stride_kn, stride_vn, lse, delta, entropy, d_entropy,
    row, query, middle, start, low, high, query_id, KeyIds, x, y, Gain, Bias, Far, Allowed, stride_am, stride_an, Seed, head,
    M, N, factor, bend, dropout, share, sinks,
    MAP: tl.constexpr, SOFTCAP: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, IDS: tl.constexpr, LINEAR: tl.constexpr,
    ALLOWED: tl.constexpr, DROPOUT: tl.constexpr, VALUE: tl.constexpr, ENTROPY: tl.constexpr,
    CHECKED: tl.constexpr, DEGREE: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):
    n = tl.arange(0, COLUMNS)
    i, j = (query - middle).to(tl.float32), (n - COLUMNS // 2).to(tl.float32)[None, :]
    for c in tl.range(begin, end, COLUMNS, num_stages=STAGES):
        k = _load(K, c, n, stride_kn, least, last, CHECKED, D, DP)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dp = s
        if VALUE:
            v = _load(V, c, n, stride_vn, least, last, CHECKED, E, EP)
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        column = (c + n)[None, :]
        visible = _visible(row, column, low, high, Allowed, stride_am, stride_an, M, N, ALLOWED) if CHECKED else True
        key_id = tl.load(KeyIds + column, mask=column < last, other=0) if IDS and CHECKED else 0
        s, slope, by_x, by_y = _logits(
            s, column, visible, query, start, query_id, key_id, x, y, Gain, Bias, Far, i, j, middle - c - COLUMNS // 2,
            factor, bend, sinks, MAP, SOFTCAP, X, Y, IDS, LINEAR, DEGREE,
        )
        kept = _keep(Seed, row, column, head, dropout) if DROPOUT else True
        _, ds = _d_logits(
            s, dp, lse, delta, entropy, d_entropy, visible, kept, share, factor, LINEAR, ENTROPY, VALUE, CHECKED, DROPOUT
        )
        if X:
            dx += tl.sum(ds * by_x, 1)
        if Y:
            dy += tl.sum(ds * by_y, 1)
        if MAP or SOFTCAP:
            ds = ds * slope
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq, dx, dy

@triton.jit(do_not_specialize=["M", "N", "sinks"])
def query_kernel(
    Q, K, V, DO, Out, DQ, DX, DY, Lse, DLse, Delta, Entropy, DEntropy,
    Index, Gain, Bias, Far, X, Y, Allowed, QueryIds, KeyIds, Seed,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ib, stride_gain, stride_bias, stride_far, stride_ab, stride_ah, stride_am, stride_an, stride_qi, stride_ki,
    stride_db, stride_dh, stride_dm, M, N, factor, bend, back, dropout, share, sinks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, MAP: tl.constexpr, SOFTCAP: tl.constexpr, HAS_X: tl.constexpr,
    HAS_Y: tl.constexpr, IDS: tl.constexpr, LINEAR: tl.constexpr, ALLOWED: tl.constexpr, DROPOUT: tl.constexpr,
    VALUE: tl.constexpr, ENTROPY: tl.constexpr, HAS_DLSE: tl.constexpr, DEGREES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):
    """The gradients of one block of rows of a head: of queries and row factors; and Delta, for `key_kernel`."""
    blocks = tl.cdiv(M, ROWS)
    block, b, h = place(blocks, HEADS)
    block = blocks - 1 - block
    r, d = tl.arange(0, ROWS), tl.arange(0, DP)
    row = block * ROWS + r
    there = row < M
    flat = (b * HEADS + h) * M + row
    query, start, low, high = _rows(Index + b * stride_ib, row, there, N)
    least, last, a, z = _bounds(query, start, low, high, there, sinks, N, MAP, COLUMNS)
    top, bottom = tl.max(tl.where(there, query, -2147483647)), tl.min(tl.where(there, query, 2147483647))
    middle = (top + bottom + 1) // 2
    q = _load(Q + b * stride_qb + h * stride_qh, block * ROWS, r, stride_qm, 0, M, True, D, DP)
    do, delta = q, tl.zeros((ROWS,), tl.float32)
    if VALUE:  # sum_j P dP, less what the logsumexp passes on
        do = _load(DO + b * stride_db + h * stride_dh, block * ROWS, r, stride_dm, 0, M, True, E, EP)
        out = _load(Out + (b * M * HEADS + h) * E, block * ROWS, r, HEADS * E, 0, M, True, E, EP)
        delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(DLse + flat, mask=there, other=0.0)
    tl.store(Delta + flat, delta, mask=there)
    x = tl.load(X + flat, mask=there, other=1.0)[:, None] if HAS_X else 1.0
    y = tl.load(Y + flat, mask=there, other=1.0)[:, None] if HAS_Y else 1.0
    lse = tl.load(Lse + flat, mask=there, other=0.0)
    lse = tl.where(lse == float("-inf"), 0.0, lse * LOG2E)[:, None]  # fully masked rows must not give NaN on the way
    entropy = tl.load(Entropy + flat, mask=there, other=0.0)[:, None] if ENTROPY else 0.0
    d_entropy = tl.load(DEntropy + flat, mask=there, other=0.0)[:, None] if ENTROPY else 0.0
    query_id = tl.load(QueryIds + b * stride_qi + row, mask=there, other=0)[:, None] if IDS else 0
    K += b * stride_kb + h // GROUP * stride_kh
    V += b * stride_vb + h // GROUP * stride_vh
    KeyIds += b * stride_ki
    Allowed += b * stride_ab + h * stride_ah
    gain, bias, far = Gain + h * stride_gain, Bias + h * stride_bias, Far + h * stride_far
    dq = tl.zeros((ROWS, DP), tl.float32)
    dx, dy = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    row, query, start, low, high = row[:, None], query[:, None], start[:, None], low[:, None], high[:, None]
    delta = delta[:, None]
    done = a
    for degree in tl.static_range(0, 4):
        if DEGREES & (1 << degree):
            end = z
            if degree:
                reach = middle - COLUMNS // 2 - _from(far, degree)
                end = tl.where(top - bottom < ROWS, tl.maximum(reach + COLUMNS, 0) // COLUMNS * COLUMNS, 0)
                end = tl.maximum(tl.minimum(end, z), done)
            dq, dx, dy = _query_tiles(
                dq, dx, dy, done, end, least, last, q, do, K, V, stride_kn, stride_vn, lse, delta, entropy, d_entropy,
                row, query, middle, start, low, high, query_id, KeyIds, x, y, gain, bias, far, Allowed, stride_am, stride_an,
                Seed, b * HEADS + h, M, N, factor, bend, dropout, share, sinks,
                MAP, SOFTCAP, HAS_X, HAS_Y, IDS, LINEAR, ALLOWED, DROPOUT, VALUE, ENTROPY,
                False, degree, COLUMNS, D, DP, E, EP, PRECISION, STAGES,
            )
            done = end
    for side in range(2):
        begin = tl.where(side == 0, least // COLUMNS * COLUMNS, done)
        end = tl.where(side == 0, tl.minimum(a, last), last)
        dq, dx, dy = _query_tiles(
            dq, dx, dy, begin, end, least, last, q, do, K, V, stride_kn, stride_vn, lse, delta, entropy, d_entropy,
            row, query, middle, start, low, high, query_id, KeyIds, x, y, gain, bias, far, Allowed, stride_am, stride_an,
            Seed, b * HEADS + h, M, N, factor, bend, dropout, share, sinks,
            MAP, SOFTCAP, HAS_X, HAS_Y, IDS, LINEAR, ALLOWED, DROPOUT, VALUE, ENTROPY,
            True, 0, COLUMNS, D, DP, E, EP, PRECISION, 1 if MAP else STAGES,
        )
    dq = dq * (x * back)
    at = (b * M + row) * HEADS + h
    tl.store(DQ + at * D + d[None, :], dq.to(DQ.dtype.element_ty), mask=there[:, None] & (d < D)[None, :])
    if HAS_X:
        tl.store(DX + flat, dx * LN2, mask=there)
    if HAS_Y:
        tl.store(DY + flat, dy * LN2, mask=there)

@triton.jit(do_not_specialize=["M", "N", "sinks"])
def ranges_kernel(
    Index, Ranges, stride_ib, M, N, sinks,
    MAP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):
    """Find the rows that see one of a block of columns, from the first to past the last; between a and b they see all.

    Where there is a map, only where the rows lie as far apart as they are numbered.
    """
    blocks = tl.cdiv(N, COLUMNS)
    block, b, _ = place(blocks, 1)
    Index += b * stride_ib
    begin = block * COLUMNS
    end = tl.minimum(begin + COLUMNS, N) - 1
    first, last, least, most = M, 0, 0, M
    own = (tl.load(Index + QUERY) - tl.load(Index + KEY_START)).to(tl.int32)
    for c in range(0, M, CHUNK):
        row = c + tl.arange(0, CHUNK)
        there = row < M
        query, start, low, high = _rows(Index, row, there, N)
        seeing = (low <= high) & (low <= end) & (high >= begin)
        first = tl.minimum(first, tl.min(tl.where(seeing, row, M)))
        last = tl.maximum(last, tl.max(tl.where(seeing, row, -1)) + 1)
        least = tl.maximum(least, tl.max(tl.where(there & (high < end), row, -1)) + 1)
        kept = low
        if MAP:
            kept = tl.maximum(low, start + sinks)
            kept = tl.where(query - row == own, kept, N)
        most = tl.minimum(most, tl.min(tl.where(there & (kept > begin), row, M)))
    first = first // ROWS * ROWS
    a = tl.maximum(tl.cdiv(least, ROWS) * ROWS, first)
    Ranges += (b * blocks + block) * 4
    tl.store(Ranges, first)
    tl.store(Ranges + 1, a)
    tl.store(Ranges + 2, tl.maximum(most // ROWS * ROWS, a))
    tl.store(Ranges + 3, last)

@triton.jit
def _key_tiles(
    dk, dv, begin, end, k, v, Q, DO, stride_qm, stride_dm, Lse, Delta, Entropy, DEntropy, X, Y,
    column, Index, query0, k0, QueryIds, key_id, Gain, Bias, Far, Allowed, stride_am, stride_an, Seed, head,
    M, N, factor, bend, dropout, share, sinks,
    MAP: tl.constexpr, SOFTCAP: tl.constexpr, HAS_X: tl.constexpr, HAS_Y: tl.constexpr, IDS: tl.constexpr,
    LINEAR: tl.constexpr, ALLOWED: tl.constexpr, DROPOUT: tl.constexpr, VALUE: tl.constexpr, ENTROPY: tl.constexpr,
    CHECKED: tl.constexpr, DEGREE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):
    r = tl.arange(0, ROWS)
    i = (r - ROWS // 2).to(tl.float32)[None, :]
    j = (tl.arange(0, COLUMNS) - COLUMNS // 2).to(tl.float32)[:, None]
    for c in tl.range(begin, end, ROWS, num_stages=STAGES):
        row = c + r
        there = row < M
        q = _load(Q, c, r, stride_qm, 0, M, CHECKED, D, DP)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        dp, do = s, q
        if VALUE:
            do = _load(DO, c, r, stride_dm, 0, M, CHECKED, E, EP)
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        lse = tl.load(Lse + row, mask=there, other=0.0)
        lse = tl.where(lse == float("-inf"), 0.0, lse * LOG2E)[None, :]
        delta = tl.load(Delta + row, mask=there, other=0.0)[None, :]
        entropy = tl.load(Entropy + row, mask=there, other=0.0)[None, :] if ENTROPY else 0.0
        d_entropy = tl.load(DEntropy + row, mask=there, other=0.0)[None, :] if ENTROPY else 0.0
        x = tl.load(X + row, mask=there, other=1.0)[None, :] if HAS_X else 1.0
        y = tl.load(Y + row, mask=there, other=1.0)[None, :] if HAS_Y else 1.0
        query, start, query_id, visible = 0, 0, 0, True
        if CHECKED:
            query, start, low, high = _rows(Index, row, there, N)
            query, start, low, high = query[None, :], start[None, :], low[None, :], high[None, :]
            visible = _visible(row[None, :], column, low, high, Allowed, stride_am, stride_an, M, N, ALLOWED)
            query_id = tl.load(QueryIds + row, mask=there, other=0)[None, :] if IDS else 0
        s, slope, _, _ = _logits(
            s, column, visible, query, start, query_id, key_id, x, y, Gain, Bias, Far, i, j,
            query0 + c + ROWS // 2 - k0 - COLUMNS // 2, factor, bend, sinks, MAP, SOFTCAP, HAS_X, HAS_Y, IDS, LINEAR, DEGREE,
        )
        kept = _keep(Seed, row[None, :], column, head, dropout) if DROPOUT else True
        p, ds = _d_logits(
            s, dp, lse, delta, entropy, d_entropy, visible, kept, share, factor, LINEAR, ENTROPY, VALUE, CHECKED, DROPOUT
        )
        if VALUE:
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        if MAP or SOFTCAP:
            ds = ds * slope
        if HAS_X:
            ds = ds * x
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv

@triton.jit(do_not_specialize=["M", "N", "sinks"])
def key_kernel(
    Q, K, V, DO, DK, DV, Ranges, Lse, Delta, Entropy, DEntropy,
    Index, Gain, Bias, Far, X, Y, Allowed, QueryIds, KeyIds, Seed,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ib, stride_gain, stride_bias, stride_far, stride_ab, stride_ah, stride_am, stride_an, stride_qi, stride_ki,
    stride_db, stride_dh, stride_dm, stride_rb, M, N, factor, bend, back, dropout, share, sinks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, MAP: tl.constexpr, SOFTCAP: tl.constexpr, HAS_X: tl.constexpr,
    HAS_Y: tl.constexpr, IDS: tl.constexpr, LINEAR: tl.constexpr, ALLOWED: tl.constexpr, DROPOUT: tl.constexpr,
    VALUE: tl.constexpr, ENTROPY: tl.constexpr, DEGREES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):
    """The gradients of one block of keys and values, summed over the heads that share them."""
    kv_heads: tl.constexpr = HEADS // GROUP
    block, b, kv_head = place(tl.cdiv(N, COLUMNS), kv_heads)
    n, d, e = tl.arange(0, COLUMNS), tl.arange(0, DP), tl.arange(0, EP)
    k0 = block * COLUMNS
    there = k0 + n < N
    column = (k0 + n)[:, None]
    k = _load(K + b * stride_kb + kv_head * stride_kh, k0, n, stride_kn, 0, N, True, D, DP)
    v = k
    if VALUE:
        v = _load(V + b * stride_vb + kv_head * stride_vh, k0, n, stride_vn, 0, N, True, E, EP)
    Index += b * stride_ib
    query0 = (tl.load(Index + QUERY) - tl.load(Index + KEY_START)).to(tl.int32)
    key_id = tl.load(KeyIds + b * stride_ki + column, mask=column < N, other=0) if IDS else 0
    QueryIds += b * stride_qi
    Ranges += b * stride_rb + block * 4
    first, a, z, last = tl.load(Ranges), tl.load(Ranges + 1), tl.load(Ranges + 2), tl.load(Ranges + 3)
    dk, dv = tl.zeros((COLUMNS, DP), tl.float32), tl.zeros((COLUMNS, EP), tl.float32)
    for g in range(GROUP):
        h = kv_head * GROUP + g
        flat = (b * HEADS + h) * M
        q, do = Q + b * stride_qb + h * stride_qh, DO + b * stride_db + h * stride_dh
        gain, bias, far = Gain + h * stride_gain, Bias + h * stride_bias, Far + h * stride_far
        allowed = Allowed + b * stride_ab + h * stride_ah
        done = z  # downwards from the farthest rows
        for degree in tl.static_range(0, 4):
            if DEGREES & (1 << degree):
                begin = a
                if degree:
                    reach = _from(far, degree) - query0 - ROWS // 2 + k0 + COLUMNS // 2
                    begin = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(reach, 0), ROWS) * ROWS, a), done)
                dk, dv = _key_tiles(
                    dk, dv, begin, done, k, v, q, do, stride_qm, stride_dm,
                    Lse + flat, Delta + flat, Entropy + flat, DEntropy + flat, X + flat, Y + flat,
                    column, Index, query0, k0, QueryIds, key_id, gain, bias, far, allowed, stride_am, stride_an,
                    Seed, b * HEADS + h, M, N, factor, bend, dropout, share, sinks,
                    MAP, SOFTCAP, HAS_X, HAS_Y, IDS, LINEAR, ALLOWED, DROPOUT, VALUE, ENTROPY,
                    False, degree, ROWS, COLUMNS, D, DP, E, EP, PRECISION, STAGES,
                )
                done = begin
        for side in range(2):
            begin, end = tl.where(side == 0, first, z), tl.where(side == 0, tl.minimum(done, last), last)
            dk, dv = _key_tiles(
                dk, dv, begin, end, k, v, q, do, stride_qm, stride_dm,
                Lse + flat, Delta + flat, Entropy + flat, DEntropy + flat, X + flat, Y + flat,
                column, Index, query0, k0, QueryIds, key_id, gain, bias, far, allowed, stride_am, stride_an,
                Seed, b * HEADS + h, M, N, factor, bend, dropout, share, sinks,
                MAP, SOFTCAP, HAS_X, HAS_Y, IDS, LINEAR, ALLOWED, DROPOUT, VALUE, ENTROPY,
                True, 0, ROWS, COLUMNS, D, DP, E, EP, PRECISION, 1 if MAP else STAGES,
            )
    flat = (b * N + k0 + n) * kv_heads + kv_head
    tl.store(DK + flat[:, None] * D + d[None, :], (dk * back).to(DK.dtype.element_ty), mask=there[:, None] & (d < D)[None, :])
    if VALUE:
        tl.store(DV + flat[:, None] * E + e[None, :], dv.to(DV.dtype.element_ty), mask=there[:, None] & (e < E)[None, :])
