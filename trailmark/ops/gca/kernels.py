"""Grouped Cross-Attention in Triton: chunks are read where they lie, by index (docs/kernels.md).

Three kernels: the output; the gradients of queries and weights, chunk by chunk that reads; the gradients of keys
and values, chunk by chunk that is read, through an inverted index. No atomics: the same bits in every run.

Rows: the R positions of a reading chunk and the G = H / J query heads of a key/value head are folded into
R * G rows, row i being position i // G, head i % G. Scores are in base 2 inside, but in float32 (EXACT).
JOINT: all that a row reads stands in one softmax, which something beside shares; else each chunk has its own.
``s_qb`` is the step from one b of q to the next, and so on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trailmark.ops.kernels import PRECISION, add_product, exp

# what changes with the text and its batch: the kernels are compiled once for all of it
VARYING = [
    "N", "M", "R", "parts", "per_part", "chunks", "s_total", "s_op",
    "s_ib", "s_in", "s_ij", "s_wb", "s_wn", "s_wj", "s_lb",
]  # fmt: skip


@triton.jit
def _rows_of(pid, rows, BLOCK: tl.constexpr):
    """(number of the block of rows, which program of the rest) of a flat program number."""
    blocks = tl.cdiv(rows, BLOCK)
    return pid % blocks, pid // blocks


@triton.jit
def _slots_to_walk(chosen, s_ik, K, K_PAD: tl.constexpr):
    """How many of the K slots to walk over: what follows the last chunk that was selected costs nothing."""
    slots = tl.arange(0, K_PAD)
    m = tl.load(chosen + slots.to(tl.int64) * s_ik, mask=slots < K, other=-1)
    return tl.max(tl.where(m >= 0, slots + 1, 0), 0)


@triton.jit
def _keys_in(lengths, b, m, S, s_lb, s_lm, HAS_LENGTHS: tl.constexpr):
    """How many keys chunk m of row b has."""
    present = S
    if HAS_LENGTHS:
        present = tl.minimum(tl.load(lengths + b * s_lb + m * s_lm), S).to(tl.int32)
    return present


@triton.jit
def _weight(at, head, s_wj, chosen, in_block, PER_QUERY_HEAD: tl.constexpr):
    """What a slot weighs, float32: one number, or one for each row where query heads have their own."""
    if PER_QUERY_HEAD:
        weight = tl.load(at + head.to(tl.int64) * s_wj, mask=in_block, other=0.0)
    else:
        weight = tl.load(at)
    return tl.where(chosen, weight.to(tl.float32), 0.0)


@triton.jit
def _largest(weight, PER_QUERY_HEAD: tl.constexpr):
    return tl.max(weight, 0) if PER_QUERY_HEAD else weight


@triton.jit
def _of_read_chunks(scores, weight, PER_QUERY_HEAD: tl.constexpr):
    """Scores [R, S], -inf where the chunk weighs nothing: in a softmax of all chunks it is as if not selected."""
    read = weight[:, None] > 0 if PER_QUERY_HEAD else weight > 0
    return tl.where(read, scores, -float("inf"))


@triton.jit
def _probabilities(scores, kept, s_total, mask, AXIS: tl.constexpr, EXACT: tl.constexpr):
    """The softmax, off by one or not, from what the forward kept of each row.

    exp(s - lse) is off by the rounding of lse, a factor common to the row: too much for float32, where the
    largest score and the sum are kept apart.
    """
    top = tl.load(kept, mask=mask, other=float("inf"))
    exponentials = exp(scores - tl.expand_dims(top, AXIS), EXACT)
    if EXACT:
        total = tl.load(kept + s_total, mask=mask, other=1.0)
        exponentials = exponentials / tl.expand_dims(total, AXIS)
    return exponentials


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    q, k, v, indices, weights, lengths, out, lse,
    s_qb, s_qn, s_qr, s_qh, s_qd,
    s_kb, s_km, s_ks, s_kj, s_kd,
    s_vb, s_vm, s_vs, s_vj, s_vd,
    s_ib, s_in, s_ij, s_ik,
    s_wb, s_wn, s_wj, s_wk,
    s_lb, s_lm,
    s_op, s_ob, s_on, s_or, s_oh,
    s_total, scale, N, R, J, M, K, S, parts, per_part,
    G: tl.constexpr, D: tl.constexpr, K_PAD: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, TILES: tl.constexpr,
    OFF_BY_ONE: tl.constexpr, HAS_LENGTHS: tl.constexpr, PER_QUERY_HEAD: tl.constexpr, JOINT: tl.constexpr,
    KEEP: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One block of rows of one reading chunk, over ``per_part`` of its retrieved chunks.

    JOINT: a softmax of this part alone, with its largest scores and sums: who launches this joins the parts.
    """
    block, rest = _rows_of(tl.program_id(0).to(tl.int64), R * G, BLOCK_R)
    part = rest % parts
    j, rest = (rest // parts) % J, rest // parts // J
    n, b = rest % N, rest // N

    i = block.to(tl.int32) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    s = tl.arange(0, BLOCK_S)
    row, head = i // G, i % G
    if WIDE:
        row, head, d, s = row.to(tl.int64), head.to(tl.int64), d.to(tl.int64), s.to(tl.int64)
    in_rows = (i < R * G)[:, None] & (d < D)[None, :]
    query_at = q + b * s_qb + n * s_qn + j * G * s_qh
    query = tl.load(
        query_at + (row * s_qr + head * s_qh)[:, None] + (d * s_qd)[None, :], mask=in_rows, other=0.0
    )

    chosen = indices + b * s_ib + n * s_in + j * s_ij
    weight_at = weights + b * s_wb + n * s_wn + j * (G if PER_QUERY_HEAD else 1) * s_wj
    count = _slots_to_walk(chosen, s_ik, K, K_PAD)
    first = (part * per_part).to(tl.int32)
    last = tl.minimum(count, first + per_part)

    total_out = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    if JOINT:
        top = tl.zeros([BLOCK_R], tl.float32) - float("inf")
        total = tl.zeros([BLOCK_R], tl.float32)
    for slot in range(first, last):
        at_slot = slot + 0 * b  # 64 bits
        m = tl.load(chosen + at_slot * s_ik).to(tl.int64)
        exists = m >= 0  # else it has no keys and no weight
        m = tl.maximum(m, 0)
        weight = _weight(weight_at + at_slot * s_wk, head, s_wj, exists, i < R * G, PER_QUERY_HEAD)
        present = tl.where(exists, _keys_in(lengths, b, m, S, s_lb, s_lm, HAS_LENGTHS), 0)
        if JOINT:  # what weighs nothing is not read, not even NaN
            present = tl.where(_largest(weight, PER_QUERY_HEAD) > 0, present, 0)
        keys_at = k + b * s_kb + m * s_km + j * s_kj
        values_at = v + b * s_vb + m * s_vm + j * s_vj
        if TILES == 1 and not JOINT:
            keys = tl.load(
                keys_at + (s * s_ks)[None, :] + (d * s_kd)[:, None],
                mask=(s < present)[None, :] & (d < D)[:, None], other=0.0,
            )  # fmt: skip
            scores = tl.dot(query, keys, input_precision=PRECISION) * scale
            scores = tl.where((s < present)[None, :], scores, -float("inf"))
            top = tl.max(scores, 1)
            # off by one: the maximum starts at 0 and the sum at 1 (Eq. 3)
            top = tl.maximum(top, 0.0) if OFF_BY_ONE else tl.where(top == -float("inf"), 0.0, top)
            exponentials = exp(scores - top[:, None], EXACT)
            total = tl.sum(exponentials, 1)
            if OFF_BY_ONE:
                total += exp(-top, EXACT)
            total = tl.where(total == 0, 1.0, total)
            probabilities = exponentials * (weight / total)[:, None]
            values = tl.load(
                values_at + (s * s_vs)[:, None] + (d * s_vd)[None, :],
                mask=(s < present)[:, None] & (d < D)[None, :], other=0.0,
            )  # fmt: skip
            total_out = add_product(total_out, probabilities.to(values.dtype), values, EXACT)
        else:
            if JOINT:
                found = total_out
            else:
                top = tl.zeros([BLOCK_R], tl.float32)
                total = tl.zeros([BLOCK_R], tl.float32)
                if OFF_BY_ONE:
                    total += 1.0
                else:
                    top -= float("inf")
                found = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
            for tile in range(TILES):
                at = tile * BLOCK_S + s
                keys = tl.load(
                    keys_at + (at * s_ks)[None, :] + (d * s_kd)[:, None],
                    mask=(at < present)[None, :] & (d < D)[:, None], other=0.0,
                )  # fmt: skip
                scores = tl.dot(query, keys, input_precision=PRECISION) * scale
                scores = tl.where((at < present)[None, :], scores, -float("inf"))
                if JOINT:
                    scores = _of_read_chunks(scores, weight, PER_QUERY_HEAD)
                higher = tl.maximum(top, tl.max(scores, 1))
                finite = tl.where(higher == -float("inf"), 0.0, higher)
                shrink = exp(top - finite, EXACT)
                exponentials = exp(scores - finite[:, None], EXACT)
                if JOINT:
                    exponentials *= weight[:, None] if PER_QUERY_HEAD else weight
                total = total * shrink + tl.sum(exponentials, 1)
                values = tl.load(
                    values_at + (at * s_vs)[:, None] + (d * s_vd)[None, :],
                    mask=(at < present)[:, None] & (d < D)[None, :], other=0.0,
                )  # fmt: skip
                found = add_product(found * shrink[:, None], exponentials.to(values.dtype), values, EXACT)
                top = higher
            if JOINT:
                total_out = found
            else:
                top = tl.where(top == -float("inf"), 0.0, top)
                total = tl.where(total == 0, 1.0, total)
                total_out += found * (weight / total)[:, None]
        if KEEP:
            place = (((b * N + n) * J + j) * K + slot) * (R * G) + i
            if EXACT:
                tl.store(lse + place, top, mask=i < R * G)
                tl.store(lse + s_total + place, total, mask=i < R * G)
            else:
                tl.store(lse + place, top + tl.log2(total), mask=i < R * G)
    if JOINT:
        place = 2 * (part * s_total + ((b * N + n) * J + j) * (R * G)) + i
        tl.store(lse + place, top, mask=i < R * G)
        tl.store(lse + place + R * G, total, mask=i < R * G)
        total_out /= tl.where(total == 0, 1.0, total)[:, None]

    out_at = out + part * s_op + b * s_ob + n * s_on + j * G * s_oh
    tl.store(
        out_at + (row * s_or + head * s_oh)[:, None] + d[None, :],
        total_out.to(out.dtype.element_ty),
        mask=in_rows,
    )


@triton.jit(do_not_specialize=VARYING)
def queries_kernel(
    grad, q, k, v, indices, weights, lengths, lse, delta, dq, dw, inner,
    s_gb, s_gn, s_gr, s_gh, s_gd,
    s_qb, s_qn, s_qr, s_qh, s_qd,
    s_kb, s_km, s_ks, s_kj, s_kd,
    s_vb, s_vm, s_vs, s_vj, s_vd,
    s_ib, s_in, s_ij, s_ik,
    s_wb, s_wn, s_wj, s_wk,
    s_lb, s_lm,
    s_ob, s_on, s_or, s_oh,
    s_total, scale, scale_e, N, R, J, M, K, S,
    G: tl.constexpr, D: tl.constexpr, K_PAD: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, TILES: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, PER_QUERY_HEAD: tl.constexpr, JOINT: tl.constexpr, WIDE: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """dQ and dw of one block of rows of one reading chunk; also D = rowsum(P * dP) for the keys' kernel.

    The weights' gradients are sums of D; where query heads have weights of their own, who launches this makes them.
    JOINT: D is known before, ``delta``. ``inner`` then holds what each chunk gains by its weight, and after all of
    these the probability that a weight of 1 would give it; ``dw`` what a row's gains add up to, times their weights.
    """
    block, rest = _rows_of(tl.program_id(0).to(tl.int64), R * G, BLOCK_R)
    j, rest = rest % J, rest // J
    n, b = rest % N, rest // N

    i = block.to(tl.int32) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    s = tl.arange(0, BLOCK_S)
    row, head = i // G, i % G
    if WIDE:
        row, head, d, s = row.to(tl.int64), head.to(tl.int64), d.to(tl.int64), s.to(tl.int64)
    exists_row = i < R * G
    in_rows = exists_row[:, None] & (d < D)[None, :]
    query_at = q + b * s_qb + n * s_qn + j * G * s_qh
    query = tl.load(
        query_at + (row * s_qr + head * s_qh)[:, None] + (d * s_qd)[None, :], mask=in_rows, other=0.0
    )
    grad_at = grad + b * s_gb + n * s_gn + j * G * s_gh
    out_grad = tl.load(
        grad_at + (row * s_gr + head * s_gh)[:, None] + (d * s_gd)[None, :], mask=in_rows, other=0.0
    )

    chosen = indices + b * s_ib + n * s_in + j * s_ij
    weight_at = weights + b * s_wb + n * s_wn + j * (G if PER_QUERY_HEAD else 1) * s_wj
    count = _slots_to_walk(chosen, s_ik, K, K_PAD)
    blocks = tl.cdiv(R * G, BLOCK_R)

    query_grad = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    if JOINT:
        of_row = ((b * N + n) * J + j) * (R * G) + i
        rowsum = tl.load(delta + of_row, mask=exists_row, other=0.0)
        gained = tl.zeros([BLOCK_R], tl.float32)
    for slot in range(count):
        at_slot = slot + 0 * b  # 64 bits
        m = tl.load(chosen + at_slot * s_ik).to(tl.int64)
        exists = m >= 0  # else it has no keys and no weight
        m = tl.maximum(m, 0)
        weight = _weight(weight_at + at_slot * s_wk, head, s_wj, exists, i < R * G, PER_QUERY_HEAD)
        present = tl.where(exists, _keys_in(lengths, b, m, S, s_lb, s_lm, HAS_LENGTHS), 0)
        if JOINT:  # what weighs nothing is not read, not even NaN
            present = tl.where(_largest(weight, PER_QUERY_HEAD) > 0, present, 0)
        keys_at = k + b * s_kb + m * s_km + j * s_kj
        values_at = v + b * s_vb + m * s_vm + j * s_vj
        place = ((b * N + n) * J + j) * K + slot
        if JOINT:
            kept = lse + of_row
            of_weight = tl.zeros([BLOCK_R], tl.float32)
            mass = tl.zeros([BLOCK_R], tl.float32)
        else:
            kept = lse + place * (R * G) + i
            rowsum = tl.zeros([BLOCK_R], tl.float32)
        if TILES > 1 and not JOINT:  # D needs all tiles of the chunk before the first dS
            for tile in range(TILES):
                at = tile * BLOCK_S + s
                of_chunk = (at < present)[:, None] & (d < D)[None, :]
                keys = tl.load(keys_at + (at * s_ks)[:, None] + (d * s_kd)[None, :], mask=of_chunk, other=0.0)
                values = tl.load(
                    values_at + (at * s_vs)[:, None] + (d * s_vd)[None, :], mask=of_chunk, other=0.0
                )
                scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale
                scores = tl.where((at < present)[None, :], scores, -float("inf"))
                probabilities = _probabilities(scores, kept, s_total, exists_row, 1, EXACT)
                dp = tl.dot(out_grad, tl.trans(values), input_precision=PRECISION)
                rowsum += tl.sum(probabilities * dp, 1)
        for tile in range(TILES):
            at = tile * BLOCK_S + s
            of_chunk = (at < present)[:, None] & (d < D)[None, :]
            keys = tl.load(keys_at + (at * s_ks)[:, None] + (d * s_kd)[None, :], mask=of_chunk, other=0.0)
            values = tl.load(values_at + (at * s_vs)[:, None] + (d * s_vd)[None, :], mask=of_chunk, other=0.0)
            scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale
            scores = tl.where((at < present)[None, :], scores, -float("inf"))
            if JOINT:
                scores = _of_read_chunks(scores, weight, PER_QUERY_HEAD)
            probabilities = _probabilities(scores, kept, s_total, exists_row, 1, EXACT)
            dp = tl.dot(out_grad, tl.trans(values), input_precision=PRECISION)
            if JOINT:
                of_weight += tl.sum(probabilities * (dp - rowsum[:, None]), 1)
                mass += tl.sum(probabilities, 1)
            elif TILES == 1:
                rowsum = tl.sum(probabilities * dp, 1)
            ds = probabilities * (dp - rowsum[:, None]) * (weight[:, None] if PER_QUERY_HEAD else weight)
            query_grad = add_product(query_grad, ds.to(keys.dtype), keys, EXACT)
        at_row = place * (R * G) + i
        if JOINT:
            tl.store(inner + at_row, of_weight, mask=exists_row)
            tl.store(inner + (s_total + 0 * b) * K + at_row, mass, mask=exists_row)
            gained += of_weight * weight
        else:
            tl.store(inner + at_row, rowsum, mask=exists_row)
            if not PER_QUERY_HEAD:
                tl.store(dw + place * blocks + block, tl.where(exists, tl.sum(rowsum, 0), 0.0))

    if JOINT:
        tl.store(dw + of_row, gained, mask=exists_row)
    dq_at = dq + b * s_ob + n * s_on + j * G * s_oh
    tl.store(
        dq_at + (row * s_or + head * s_oh)[:, None] + d[None, :],
        (query_grad * scale_e).to(dq.dtype.element_ty),
        mask=in_rows,
    )


@triton.jit
def _keys_by_rows(keys, rows, EXACT: tl.constexpr):
    """[S, R] products; of float32 rounded as in the other kernels, whose sums take part in the same differences."""
    if EXACT:
        products = tl.trans(tl.dot(rows, tl.trans(keys), input_precision=PRECISION))
    else:
        products = tl.dot(keys, tl.trans(rows))
    return products


@triton.jit(do_not_specialize=VARYING)
def keys_kernel(
    grad, q, k, v, weights, lengths, lse, inner,
    readers, starts, ends, slots_before, chunk_of, dk, dv, dk_parts, dv_parts,
    s_gb, s_gn, s_gr, s_gh, s_gd,
    s_qb, s_qn, s_qr, s_qh, s_qd,
    s_kb, s_km, s_ks, s_kj, s_kd,
    s_vb, s_vm, s_vs, s_vj, s_vd,
    s_wb, s_wn, s_wj, s_wk,
    s_lb, s_lm,
    s_total, scale, scale_e, N, R, J, M, K, S, chunks, per_part,
    G: tl.constexpr, D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, TILES: tl.constexpr,
    PER_HEAD: tl.constexpr, HAS_LENGTHS: tl.constexpr, PER_QUERY_HEAD: tl.constexpr, JOINT: tl.constexpr,
    WIDE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of one memory chunk, over one part of the rows that read it."""
    pid = tl.program_id(0).to(tl.int64)
    tile = pid % TILES
    pid = pid // TILES
    if PER_HEAD:
        part = pid
    else:
        part = pid // J
    c = tl.load(chunk_of + part)
    if c >= chunks:
        return
    if PER_HEAD:  # c counts [B, M, J]
        j, rest = c % J, c // J
    else:  # c counts [B, M]
        j, rest = pid % J, c
    m, b = rest % M, rest // M

    begin, end = tl.load(starts + c), tl.load(starts + c + 1)
    part_end = tl.load(ends + c)
    part_first = tl.load(ends + c - 1, mask=c > 0, other=0)
    number = part - part_first
    begin = begin + number * per_part
    end = tl.minimum(end, begin + per_part)
    rows = ((end - begin) * (R * G)).to(tl.int32)

    d = tl.arange(0, BLOCK_D)
    s = tile.to(tl.int32) * BLOCK_S + tl.arange(0, BLOCK_S)
    if WIDE:
        d, s = d.to(tl.int64), s.to(tl.int64)
    present = _keys_in(lengths, b, m, S, s_lb, s_lm, HAS_LENGTHS)
    of_chunk = (s < present)[:, None] & (d < D)[None, :]
    keys = tl.load(
        k + b * s_kb + m * s_km + j * s_kj + (s * s_ks)[:, None] + (d * s_kd)[None, :],
        mask=of_chunk,
        other=0.0,
    )
    values = tl.load(
        v + b * s_vb + m * s_vm + j * s_vj + (s * s_vs)[:, None] + (d * s_vd)[None, :],
        mask=of_chunk,
        other=0.0,
    )

    key_grad = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    value_grad = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    for first in range(0, rows, BLOCK_R):
        # rows of several readers stand in one tile: no reader is padded to a tile of its own
        i = first + tl.arange(0, BLOCK_R)
        exists = i < rows
        reader = tl.load(readers + begin + i // (R * G), mask=exists, other=0).to(tl.int64)
        within = i % (R * G)
        slot = reader % K
        n = reader // K // (J if PER_HEAD else 1) % N
        row, head = within // G, within % G
        if WIDE:
            row, head = row.to(tl.int64), head.to(tl.int64)
        in_rows = exists[:, None] & (d < D)[None, :]
        query = tl.load(
            q + b * s_qb + j * G * s_qh + (n * s_qn + row * s_qr + head * s_qh)[:, None] + (d * s_qd)[None, :],
            mask=in_rows, other=0.0,
        )  # fmt: skip
        out_grad = tl.load(
            grad + b * s_gb + j * G * s_gh + (n * s_gn + row * s_gr + head * s_gh)[:, None] + (d * s_gd)[None, :],
            mask=in_rows, other=0.0,
        )  # fmt: skip
        place = (b * N + n) * J + j
        if not JOINT:
            place = place * K + slot
        place = place * (R * G) + within
        rowsum = tl.load(inner + place, mask=exists, other=0.0)
        weighs = j * G + head if PER_QUERY_HEAD else j
        weight = tl.load(weights + b * s_wb + n * s_wn + weighs * s_wj + slot * s_wk, mask=exists, other=0.0)
        scores = _keys_by_rows(keys, query, EXACT) * scale  # [S, R]
        if JOINT:
            scores = tl.where((weight > 0)[None, :], scores, -float("inf"))
        probabilities = _probabilities(scores, lse + place, s_total, exists, 0, EXACT)
        probabilities = tl.where((s < present)[:, None], probabilities, 0.0)
        weighted = probabilities * weight.to(tl.float32)[None, :]
        value_grad = add_product(value_grad, weighted.to(out_grad.dtype), out_grad, EXACT)
        dp = _keys_by_rows(values, out_grad, EXACT)
        if JOINT:
            dp = tl.where((weight > 0)[None, :], dp, 0.0)
        ds = weighted * (dp - rowsum[None, :])
        key_grad = add_product(key_grad, ds.to(query.dtype), query, EXACT)
    key_grad *= scale_e

    in_table = (s < S)[:, None] & (d < D)[None, :]
    offsets = s[:, None].to(tl.int64) * (J * D) + d[None, :]  # of a chunk [S, J, D]
    if part_end - part_first == 1:
        to = ((b * M + m) * S * J + j) * D
        tl.store(dk + to + offsets, key_grad.to(dk.dtype.element_ty), mask=in_table)
        tl.store(dv + to + offsets, value_grad.to(dv.dtype.element_ty), mask=in_table)
    else:
        slot_of_part = tl.load(slots_before + c) + number
        if PER_HEAD:  # parts [slot, S, D]
            offsets = s[:, None].to(tl.int64) * D + d[None, :]
            to = slot_of_part * S * D
        else:  # [slot, S, J, D]
            to = (slot_of_part * S * J + j) * D
        tl.store(dk_parts + to + offsets, key_grad, mask=in_table)
        tl.store(dv_parts + to + offsets, value_grad, mask=in_table)


@triton.jit
def add_parts_kernel(
    ends, slots_before, dk, dv, dk_parts, dv_parts, J, width,
    D: tl.constexpr, BLOCK: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    """The gradients of a chunk with several parts: their sum, first to last."""
    blocks = tl.cdiv(width, BLOCK)
    pid = tl.program_id(0).to(tl.int64)
    c, block = pid // blocks, pid % blocks
    part_first = tl.load(ends + c - 1, mask=c > 0, other=0)
    parts = tl.load(ends + c) - part_first
    if parts == 1:
        return
    at = block * BLOCK + tl.arange(0, BLOCK)  # 64 bits
    inside = at < width
    slot = tl.load(slots_before + c)
    of_keys = tl.zeros([BLOCK], tl.float32)
    of_values = tl.zeros([BLOCK], tl.float32)
    for part in range(parts):
        of_keys += tl.load(dk_parts + (slot + part) * width + at, mask=inside, other=0.0)
        of_values += tl.load(dv_parts + (slot + part) * width + at, mask=inside, other=0.0)
    if PER_HEAD:  # chunk [S, D] of one head into [S, J, D]
        to = (c // J) * J * width + (at // D) * (J * D) + (c % J) * D + at % D
    else:
        to = c * width + at
    tl.store(dk + to, of_keys.to(dk.dtype.element_ty), mask=inside)
    tl.store(dv + to, of_values.to(dv.dtype.element_ty), mask=inside)
