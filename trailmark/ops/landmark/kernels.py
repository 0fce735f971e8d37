"""Landmark Attention in Triton: softmax with a gate on every far chunk, tile by tile (docs/kernels.md).

Three kernels: the output; the gradient of queries, by tiles of queries; the gradients of keys and values, by chunks,
each over the queries that see it. No atomics: the same bits in every run.

A tile of keys is (a part of) one chunk: its regular tokens at columns 0 .. length - 1, its landmark at column
``length``, so that any chunk size works by masks and the landmark takes part in every product. A tile of queries is
any run of places of q and may span chunks. What the kernels know of the layout are tables (triton_path.py):

    rows     int32 [4, B, P]  of each query: its chunk (-1: absent), how many of its own chunk's tokens it sees,
                              and the numbers ``first <= m < end`` among which its far chunks lie
    chunks   int64 [B, C, 3]  start, length, far (0 or 1) of every chunk
    far      int64 [B, C, 3]  start, length, number of the far ones, in order
    ranks    int64 [B, C + 1] how many far ones come before each chunk
    readers  int64 [B, C, 4]  of each chunk: the places ``low <= i < high`` of q that may see it, the slot of the
                              first query that stands in it, how many do

``s_qb`` is the step from one b of q to the next, and so on; inside a tile it is taken in 32 bits, or 64 (WIDE).
Scores are in base 2 inside, but in float32 (EXACT).
"""

from __future__ import annotations

import triton
import triton.language as tl

from trailmark.ops.kernels import PRECISION, add_product, exp

# a masked score: finite, so that no difference of two is NaN
HIDDEN = tl.constexpr(-1.0e30)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# what changes with the text and its batch: the kernels are compiled once for all of it
VARYING = ["B", "P", "T", "H", "C", "tiles", "parts", "per_part"]


@triton.jit
def _count(BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """0 .. BLOCK - 1, as wide as offsets inside a tile must be."""
    n = tl.arange(0, BLOCK)
    return n.to(tl.int64) if WIDE else n


@triton.jit
def _load_rows(at, n, step, exists, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[rows, BLOCK_D]: the rows n of a head that begin at ``at``; 0 where a row does not exist."""
    d = tl.arange(0, BLOCK_D)
    pointers = at + (n * step)[:, None] + d[None, :]
    if D == BLOCK_D:
        loaded = tl.load(pointers, mask=exists[:, None], other=0.0)
    else:
        loaded = tl.load(pointers, mask=exists[:, None] & (d < D)[None, :], other=0.0)
    return loaded


@triton.jit
def _load_queries(rows, b, B, P, start, n, CAUSAL: tl.constexpr):
    """Of the queries at places start + n: chunk, own tokens seen, first and end of the far chunks."""
    at, exists = rows + b * P + start + n, n < P - start
    plane = B.to(tl.int64) * P
    own = tl.load(at, mask=exists, other=-1)
    limit = tl.load(at + plane, mask=exists, other=0)
    first = tl.load(at + 2 * plane, mask=exists, other=0)
    if CAUSAL:
        end = own
    else:
        end = tl.load(at + 3 * plane, mask=exists, other=0)
    return own, limit, first, end


@triton.jit
def _chunk(entry, tile, BLOCK_S: tl.constexpr, OWN: tl.constexpr):
    """Of a tile of a chunk: place of its first column, which is the landmark's, how many are keys, how many values.

    ``entry`` is of ``chunks`` (OWN) or of ``far``. A landmark that nobody may see is not loaded; its value never is.
    """
    length = tl.load(entry + 1).to(tl.int32) - tile * BLOCK_S
    if OWN:
        keys = length + tl.load(entry + 2).to(tl.int32)
    else:
        keys = length + 1
    return tl.load(entry) + tile * BLOCK_S, length, keys, length


@triton.jit
def _who_sees(entry, number, own, limit, first, end, OWN: tl.constexpr):
    """Of each query: whether the chunk is its own, whether it sees it, how many of its tokens."""
    length = tl.load(entry + 1).to(tl.int32)
    if OWN:
        is_own = own == number
        from_afar = tl.where(tl.load(entry + 2) > 0, number, -1)
        seen = tl.where(is_own, limit > 0, (first <= from_afar) & (from_afar < end))
    else:
        is_own = own < -1
        seen = (first <= number) & (number < end)
    return is_own, seen, tl.where(is_own, limit, length)


@triton.jit
def _far_chunks(ranks, own, first, end, C, CAUSAL: tl.constexpr):
    """For a tile of queries: (first own chunk, how many, first far chunk before them, how many, after, how many)."""
    present = own >= 0
    low, high = tl.min(tl.where(present, own, C), 0), tl.max(own, 0)
    first, end = tl.min(tl.where(present, first, C), 0), tl.maximum(tl.max(end, 0), 0)
    before = tl.load(ranks + first)
    count_before = tl.load(ranks + tl.minimum(low, end)) - before
    after = before
    count_after = count_before * 0
    if not CAUSAL:
        after = tl.load(ranks + tl.maximum(high + 1, tl.minimum(first, C)))
        count_after = tl.load(ranks + end) - after
    return low, high + 1 - low, before, count_before.to(tl.int32), after, count_after.to(tl.int32)


@triton.jit
def _products(rows, keys):
    """[queries, columns]"""
    return tl.dot(rows, tl.trans(keys), input_precision=PRECISION)


@triton.jit
def _forward_chunk(
    query, k_at, v_at, s_kt, s_vt, entry, number, own, limit, first, end, scale, top, total, found,
    D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, MANY: tl.constexpr, OWN: tl.constexpr,
    EXACT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One chunk into the online softmax (top, total, found)."""
    is_own, seen, shown = _who_sees(entry, number, own, limit, first, end, OWN)
    s = _count(BLOCK_S, WIDE)
    if MANY:  # once for the softmax within the chunk, once more for the values
        columns = tl.where(seen, tl.where(is_own, shown, shown + 1), 0)
        tiles = tl.cdiv(tl.max(columns, 0), BLOCK_S)
        inner_top = tl.full(own.shape, HIDDEN, tl.float32)
        inner_total = tl.zeros(own.shape, tl.float32)
        gate = tl.zeros(own.shape, tl.float32)
        for tile in range(tiles):
            start, landmark, of_keys, _ = _chunk(entry, tile, BLOCK_S, OWN)
            keys = _load_rows(k_at + start * s_kt, s, s_kt, s < of_keys, D, BLOCK_D)
            scores = _products(query, keys) * scale
            gate += tl.sum(tl.where((s == landmark)[None, :], scores, 0.0), 1)
            scores = tl.where(s[None, :] < (shown - tile * BLOCK_S)[:, None], scores, HIDDEN)
            higher = tl.maximum(inner_top, tl.max(scores, 1))
            inner_total = inner_total * exp(inner_top - higher, EXACT)
            inner_total += tl.sum(exp(scores - higher[:, None], EXACT), 1)
            inner_top = higher
        inner_total = tl.where(inner_total > 0, inner_total, 1.0)
        top, total, shrink, factor = _into_softmax(
            is_own, seen, inner_top, inner_total, gate, top, total, EXACT
        )
        found *= shrink[:, None]
        for tile in range(tiles):
            start, _, of_keys, of_values = _chunk(entry, tile, BLOCK_S, OWN)
            keys = _load_rows(k_at + start * s_kt, s, s_kt, s < of_keys, D, BLOCK_D)
            scores = _products(query, keys) * scale
            scores = tl.where(s[None, :] < (shown - tile * BLOCK_S)[:, None], scores, HIDDEN)
            values = _load_rows(v_at + start * s_vt, s, s_vt, s < of_values, D, BLOCK_D)
            probabilities = exp(scores - inner_top[:, None], EXACT) * factor[:, None]
            found = add_product(found, probabilities.to(values.dtype), values, EXACT)
    else:
        start, landmark, of_keys, of_values = _chunk(entry, 0, BLOCK_S, OWN)
        keys = _load_rows(k_at + start * s_kt, s, s_kt, s < of_keys, D, BLOCK_D)
        scores = _products(query, keys) * scale
        gate = tl.sum(tl.where((s == landmark)[None, :], scores, 0.0), 1)
        if OWN:
            scores = tl.where(s[None, :] < shown[:, None], scores, HIDDEN)
        else:
            scores = tl.where((s < landmark)[None, :], scores, HIDDEN)
        inner_top = tl.max(scores, 1)
        exponentials = exp(scores - inner_top[:, None], EXACT)
        inner_total = tl.sum(exponentials, 1)
        top, total, shrink, factor = _into_softmax(
            is_own, seen, inner_top, inner_total, gate, top, total, EXACT
        )
        values = _load_rows(v_at + start * s_vt, s, s_vt, s < of_values, D, BLOCK_D)
        probabilities = (exponentials * factor[:, None]).to(values.dtype)
        found = add_product(found * shrink[:, None], probabilities, values, EXACT)
    return top, total, found


@triton.jit
def _into_softmax(is_own, seen, inner_top, inner_total, gate, top, total, EXACT: tl.constexpr):
    """(top, total, what found shrinks by, what e^(score - inner_top) is multiplied by) after one more chunk.

    The own chunk's tokens stand in the softmax themselves; for a far chunk its landmark does.
    """
    level = tl.where(is_own, inner_top, gate)
    higher = tl.maximum(top, tl.where(seen, level, HIDDEN))
    weight = exp(tl.where(seen, level - higher, HIDDEN), EXACT)
    shrink = exp(top - higher, EXACT)
    total = total * shrink + tl.where(is_own, weight * inner_total, weight)
    return higher, total, shrink, tl.where(is_own, weight, weight / inner_total)


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    q, k, v, rows, chunks, far, ranks, out, lse,
    s_qb, s_qp, s_qh, s_kb, s_kt, s_kj, s_vb, s_vt, s_vj,
    scale, B, P, H, C, tiles,
    G: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    MANY: tl.constexpr, CAUSAL: tl.constexpr, EXACT: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head: far chunks before it, the chunks that it spans, far chunks after it."""
    pid = tl.program_id(0).to(tl.int64)
    h, rest = pid % H, pid // H
    b, tile = rest % B, tiles - 1 - rest // B  # the last queries see most: they begin first
    j = h // G
    i = tile * BLOCK_Q
    n = _count(BLOCK_Q, WIDE)
    own, limit, first, end = _load_queries(rows, b, B, P, i, n, CAUSAL)
    query = _load_rows(q + b * s_qb + i * s_qp + h * s_qh, n, s_qp, own >= 0, D, BLOCK_D)
    k_at, v_at = k + b * s_kb + j * s_kj, v + b * s_vb + j * s_vj
    low, spanned, before, count_before, after, count_after = _far_chunks(
        ranks + b * (C + 1), own, first, end, C, CAUSAL
    )

    top = tl.full([BLOCK_Q], HIDDEN, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    found = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for step in range(count_before):
        entry = far + (b * C + before + step) * 3
        number = tl.load(entry + 2).to(tl.int32)
        top, total, found = _forward_chunk(
            query, k_at, v_at, s_kt, s_vt, entry, number, own, limit, first, end, scale, top, total, found,
            D, BLOCK_S, BLOCK_D, MANY, False, EXACT, WIDE,
        )  # fmt: skip
    for step in range(spanned):
        entry = chunks + (b * C + low + step) * 3
        top, total, found = _forward_chunk(
            query, k_at, v_at, s_kt, s_vt, entry, low + step, own, limit, first, end, scale, top, total, found,
            D, BLOCK_S, BLOCK_D, MANY, True, EXACT, WIDE,
        )  # fmt: skip
    if not CAUSAL:
        for step in range(count_after):
            entry = far + (b * C + after + step) * 3
            number = tl.load(entry + 2).to(tl.int32)
            top, total, found = _forward_chunk(
                query, k_at, v_at, s_kt, s_vt, entry, number, own, limit, first, end, scale, top, total, found,
                D, BLOCK_S, BLOCK_D, MANY, False, EXACT, WIDE,
            )  # fmt: skip

    some = total > 0
    total = tl.where(some, total, 1.0)
    kept = top + tl.log(total) if EXACT else (top + tl.log2(total)) * LN_2
    place = (b * P + i) * H + h
    tl.store(lse + place + n * H, tl.where(some, kept, -float("inf")), mask=n < P - i)
    d = tl.arange(0, BLOCK_D)
    tl.store(
        out + place * D + (n * (H * D))[:, None] + d[None, :],
        (found / total[:, None]).to(out.dtype.element_ty),
        mask=(n < P - i)[:, None] & (d < D)[None, :],
    )


@triton.jit
def _inner_sums(
    query, out_grad, k_at, v_at, s_kt, s_vt, entry, is_own, seen, lse, scale,
    D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, OWN: tl.constexpr, EXACT: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Of a chunk of several tiles, for the queries that see it from afar: its softmax (maximum, sum), the gate's
    score, and rowsum(r * dP). Where no query does, nothing is computed."""
    s = _count(BLOCK_S, WIDE)
    columns = tl.where(seen & (is_own == 0), tl.load(entry + 1).to(tl.int32) + 1, 0)
    top = tl.full(lse.shape, HIDDEN, tl.float32)
    total = tl.zeros(lse.shape, tl.float32)
    gate = tl.zeros(lse.shape, tl.float32)
    inner = tl.zeros(lse.shape, tl.float32)
    for tile in range(tl.cdiv(tl.max(columns, 0), BLOCK_S)):
        start, landmark, of_keys, of_values = _chunk(entry, tile, BLOCK_S, OWN)
        keys = _load_rows(k_at + start * s_kt, s, s_kt, s < of_keys, D, BLOCK_D)
        values = _load_rows(v_at + start * s_vt, s, s_vt, s < of_values, D, BLOCK_D)
        scores, dp = _products(query, keys) * scale, _products(out_grad, values)
        gate += tl.sum(tl.where((s == landmark)[None, :], scores, 0.0), 1)
        scores = tl.where((s < landmark)[None, :], scores, HIDDEN)
        higher = tl.maximum(top, tl.max(scores, 1))
        exponentials = exp(scores - higher[:, None], EXACT)
        shrink = exp(top - higher, EXACT)
        total = total * shrink + tl.sum(exponentials, 1)
        inner = inner * shrink + tl.sum(exponentials * dp, 1)
        top = higher
    total = tl.where(total > 0, total, 1.0)
    return top, total, gate, inner / total


@triton.jit
def _gradients_of_scores(
    scores, dp, s, landmark, is_own, seen, shown, lse, delta, top, total, gate, inner,
    MANY: tl.constexpr, OWN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """(P, dS), the landmark's column of dS included. MANY: with what :func:`_inner_sums` found."""
    at_landmark = (s == landmark)[None, :]
    if not MANY:
        gate = tl.sum(tl.where(at_landmark, scores, 0.0), 1)
    if OWN:
        hidden = s[None, :] >= shown[:, None]
    else:
        hidden = (s >= landmark)[None, :]
    scores = tl.where(hidden, HIDDEN, scores)
    if not MANY:
        top = tl.max(scores, 1)
    else:  # what nobody sees from afar was not summed: e^(x - top) is 0, not infinite
        top = tl.where(seen, top, -HIDDEN)
    if OWN:  # the own chunk's tokens stand in the softmax themselves
        top = tl.where(is_own & seen, lse, top)
    exponentials = exp(scores - top[:, None], EXACT)
    if not MANY:
        total = tl.sum(exponentials, 1)
        total = tl.where(total > 0, total, 1.0)
        inner = tl.sum(exponentials * dp, 1) / total
    if OWN:
        weight = exp(tl.where(seen & (is_own == 0), gate - lse, HIDDEN), EXACT)
        factor = tl.where(is_own & seen, 1.0, weight / total)
    else:
        weight = exp(tl.where(seen, gate - lse, HIDDEN), EXACT)
        factor = weight / total
    landmark_grad = weight * (inner - delta)
    if OWN:
        inner = tl.where(is_own, delta, inner)
    probabilities = exponentials * factor[:, None]
    ds = probabilities * (dp - inner[:, None])
    return probabilities, tl.where(at_landmark, landmark_grad[:, None], ds)


@triton.jit
def _queries_chunk(
    query, out_grad, k_at, v_at, s_kt, s_vt, entry, number, own, limit, first, end, lse, delta, scale, query_grad,
    D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, MANY: tl.constexpr, OWN: tl.constexpr,
    EXACT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dQ of one chunk, without the scale."""
    is_own, seen, shown = _who_sees(entry, number, own, limit, first, end, OWN)
    s = _count(BLOCK_S, WIDE)
    if MANY:
        top, total, gate, inner = _inner_sums(
            query, out_grad, k_at, v_at, s_kt, s_vt, entry, is_own, seen, lse, scale,
            D, BLOCK_S, BLOCK_D, OWN, EXACT, WIDE,
        )  # fmt: skip
        columns = tl.where(seen, tl.where(is_own, shown, shown + 1), 0)
        for tile in range(tl.cdiv(tl.max(columns, 0), BLOCK_S)):
            start, landmark, of_keys, of_values = _chunk(entry, tile, BLOCK_S, OWN)
            keys = _load_rows(k_at + start * s_kt, s, s_kt, s < of_keys, D, BLOCK_D)
            values = _load_rows(v_at + start * s_vt, s, s_vt, s < of_values, D, BLOCK_D)
            scores, dp = _products(query, keys) * scale, _products(out_grad, values)
            _, ds = _gradients_of_scores(
                scores, dp, s, landmark, is_own, seen, shown - tile * BLOCK_S, lse, delta, top, total, gate, inner,
                True, OWN, EXACT,
            )  # fmt: skip
            query_grad = add_product(query_grad, ds.to(keys.dtype), keys, EXACT)
    else:
        start, landmark, of_keys, of_values = _chunk(entry, 0, BLOCK_S, OWN)
        keys = _load_rows(k_at + start * s_kt, s, s_kt, s < of_keys, D, BLOCK_D)
        values = _load_rows(v_at + start * s_vt, s, s_vt, s < of_values, D, BLOCK_D)
        scores, dp = _products(query, keys) * scale, _products(out_grad, values)
        _, ds = _gradients_of_scores(
            scores, dp, s, landmark, is_own, seen, shown, lse, delta, lse, lse, lse, lse, False, OWN, EXACT
        )
        query_grad = add_product(query_grad, ds.to(keys.dtype), keys, EXACT)
    return query_grad


@triton.jit(do_not_specialize=VARYING)
def queries_kernel(
    grad, lse_grad, q, k, v, out, lse, rows, chunks, far, ranks, dq, stats,
    s_gb, s_gp, s_gh, s_qb, s_qp, s_qh, s_kb, s_kt, s_kj, s_vb, s_vt, s_vj,
    scale, scale_e, B, P, H, C, tiles,
    G: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    MANY: tl.constexpr, CAUSAL: tl.constexpr, HAS_LSE_GRAD: tl.constexpr, EXACT: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries; for the keys' kernel also rowsum(dO * O) - dlse and the log-sum-exp, head by head."""
    pid = tl.program_id(0).to(tl.int64)
    h, rest = pid % H, pid // H
    b, tile = rest % B, tiles - 1 - rest // B
    j = h // G
    i = tile * BLOCK_Q
    n = _count(BLOCK_Q, WIDE)
    own, limit, first, end = _load_queries(rows, b, B, P, i, n, CAUSAL)
    present = own >= 0
    query = _load_rows(q + b * s_qb + i * s_qp + h * s_qh, n, s_qp, present, D, BLOCK_D)
    out_grad = _load_rows(grad + b * s_gb + i * s_gp + h * s_gh, n, s_gp, present, D, BLOCK_D)
    place = (b * P + i) * H + h
    output = _load_rows(out + place * D, n, H * D, present, D, BLOCK_D)
    delta = tl.sum(output.to(tl.float32) * out_grad.to(tl.float32), 1)
    if HAS_LSE_GRAD:
        delta -= tl.load(lse_grad + place + n * H, mask=present, other=0.0)
    row_lse = tl.load(lse + place + n * H, mask=present, other=0.0)
    if not EXACT:
        row_lse *= LOG2_E
    stats_at = stats + (b * H + h) * P + i + n
    tl.store(stats_at, delta, mask=n < P - i)
    tl.store(stats_at + B.to(tl.int64) * H * P, row_lse, mask=n < P - i)

    k_at, v_at = k + b * s_kb + j * s_kj, v + b * s_vb + j * s_vj
    low, spanned, before, count_before, after, count_after = _far_chunks(
        ranks + b * (C + 1), own, first, end, C, CAUSAL
    )
    query_grad = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for step in range(count_before):
        entry = far + (b * C + before + step) * 3
        number = tl.load(entry + 2).to(tl.int32)
        query_grad = _queries_chunk(
            query, out_grad, k_at, v_at, s_kt, s_vt, entry, number, own, limit, first, end, row_lse, delta,
            scale, query_grad, D, BLOCK_S, BLOCK_D, MANY, False, EXACT, WIDE,
        )  # fmt: skip
    for step in range(spanned):
        entry = chunks + (b * C + low + step) * 3
        query_grad = _queries_chunk(
            query, out_grad, k_at, v_at, s_kt, s_vt, entry, low + step, own, limit, first, end, row_lse, delta,
            scale, query_grad, D, BLOCK_S, BLOCK_D, MANY, True, EXACT, WIDE,
        )  # fmt: skip
    if not CAUSAL:
        for step in range(count_after):
            entry = far + (b * C + after + step) * 3
            number = tl.load(entry + 2).to(tl.int32)
            query_grad = _queries_chunk(
                query, out_grad, k_at, v_at, s_kt, s_vt, entry, number, own, limit, first, end, row_lse, delta,
                scale, query_grad, D, BLOCK_S, BLOCK_D, MANY, False, EXACT, WIDE,
            )  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    tl.store(
        dq + place * D + (n * (H * D))[:, None] + d[None, :],
        (query_grad * scale_e).to(dq.dtype.element_ty),
        mask=(n < P - i)[:, None] & (d < D)[None, :],
    )


@triton.jit(do_not_specialize=VARYING)
def keys_kernel(
    grad, q, k, v, rows, chunks, readers, stats, dk, dv,
    s_gb, s_gp, s_gh, s_qb, s_qp, s_qh, s_kb, s_kt, s_kj, s_vb, s_vt, s_vj,
    scale, scale_e, B, P, T, H, C, tiles, parts, per_part,
    G: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    MANY: tl.constexpr, CAUSAL: tl.constexpr, EXACT: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of one chunk, over ``per_part`` of the query heads of its head."""
    pid = tl.program_id(0).to(tl.int64)
    J = H // G
    j, rest = pid % J, pid // J
    part, rest = rest % parts, rest // parts
    b, rest = rest % B, rest // B  # the first chunks are seen by most: they begin first
    tile, c = (rest % tiles).to(tl.int32), rest // tiles
    number = c.to(tl.int32)
    heads = tl.minimum(per_part, G - part * per_part).to(tl.int32)
    first_head = j * G + part * per_part

    s = _count(BLOCK_S, WIDE)
    entry = chunks + (b * C + c) * 3
    start, landmark, of_keys, of_values = _chunk(entry, tile, BLOCK_S, True)
    k_at, v_at = k + b * s_kb + j * s_kj, v + b * s_vb + j * s_vj
    keys = tl.trans(_load_rows(k_at + start * s_kt, s, s_kt, s < of_keys, D, BLOCK_D))
    values = tl.trans(_load_rows(v_at + start * s_vt, s, s_vt, s < of_values, D, BLOCK_D))

    readers_at = readers + (b * C + c) * 4
    low, high = tl.load(readers_at), tl.load(readers_at + 1)
    if MANY:
        if CAUSAL:  # the first queries of the chunk itself stand before this tile
            skipped = tl.minimum(tile * BLOCK_S - tl.load(readers_at + 2), tl.load(readers_at + 3))
            low += tl.maximum(skipped, 0)
        high = tl.where(of_keys > 0, high, low)
    steps = tl.maximum(tl.cdiv(high - low, BLOCK_Q), 0).to(tl.int32)

    n = _count(BLOCK_Q, WIDE)
    # transposed, [BLOCK_D, BLOCK_S]: what the multiplier takes from registers would have to be turned around
    key_grad = tl.zeros([BLOCK_D, BLOCK_S], tl.float32)
    value_grad = tl.zeros([BLOCK_D, BLOCK_S], tl.float32)
    for step in range(heads * steps):
        if G == 1:
            h, i = j, low + step * BLOCK_Q
        else:
            h, i = first_head + step // steps, low + (step % steps) * BLOCK_Q
        own, limit, first, end = _load_queries(rows, b, B, P, i, n, CAUSAL)
        is_own, seen, shown = _who_sees(entry, number, own, limit, first, end, True)
        seen &= n < high - i
        present = own >= 0
        query = _load_rows(q + b * s_qb + i * s_qp + h * s_qh, n, s_qp, present, D, BLOCK_D)
        out_grad = _load_rows(grad + b * s_gb + i * s_gp + h * s_gh, n, s_gp, present, D, BLOCK_D)
        stats_at = stats + (b * H + h) * P + i + n
        delta = tl.load(stats_at, mask=present, other=0.0)
        lse = tl.load(stats_at + B.to(tl.int64) * H * P, mask=present, other=0.0)
        if MANY:
            top, total, gate, inner = _inner_sums(
                query, out_grad, k_at, v_at, s_kt, s_vt, entry, is_own, seen, lse, scale,
                D, BLOCK_S, BLOCK_D, True, EXACT, WIDE,
            )  # fmt: skip
        else:
            top, total, gate, inner = lse, lse, lse, lse
        scores = tl.dot(query, keys, input_precision=PRECISION) * scale
        dp = tl.dot(out_grad, values, input_precision=PRECISION)
        probabilities, ds = _gradients_of_scores(
            scores, dp, s, landmark, is_own, seen, shown - tile * BLOCK_S, lse, delta, top, total, gate, inner,
            MANY, True, EXACT,
        )  # fmt: skip
        value_grad = add_product(value_grad, tl.trans(out_grad), probabilities.to(out_grad.dtype), EXACT)
        key_grad = add_product(key_grad, tl.trans(query), ds.to(query.dtype), EXACT)

    # [part, B, T, J, D]; what is in no chunk keeps the zeros that stand there
    to = (((part * B + b) * T + start) * J + j) * D
    d = tl.arange(0, BLOCK_D)
    offsets = (s * (J * D).to(tl.int32))[:, None] + d[None, :]
    in_head = (d < D)[None, :]
    key_grad, value_grad = tl.trans(key_grad * scale_e), tl.trans(value_grad)
    tl.store(dk + to + offsets, key_grad.to(dk.dtype.element_ty), mask=(s < of_keys)[:, None] & in_head)
    tl.store(dv + to + offsets, value_grad.to(dv.dtype.element_ty), mask=(s < of_values)[:, None] & in_head)
