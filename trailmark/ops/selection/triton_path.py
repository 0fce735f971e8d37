"""Selecting chunks in fused kernels: scores of a tile at a time, and of each query the best so far.

A score and its chunk are one int64 key: the score in the upper half, as an integer of the same order, and in the
lower half a number that falls as the chunk's rises. The largest key is the best score and of equals the
earlier chunk (guarantee 9); no two keys are equal, so the best K do not depend on how the landmarks are
split, and a column of a tile is one sum in one order, so equal chunks have equal scores.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from functools import reduce

import torch
import triton
import triton.language as tl
from torch import Tensor

from trailmark.ops.selection.call import SearchCall

# Programs that a search is split into where it has few queries; from shapes alone (guarantee 7).
_PROGRAMS = 512
# Keys that the best of a program's queries may take; in registers.
_BEST = 2048
_MERGED = 1024  # keys that are merged at once
_TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

_ABSENT = tl.constexpr(-(1 << 63))  # below every key
_LEAST = tl.constexpr(-(1 << 63) + (1 << 32))  # at most every key, for no score has the least int32
_TAKEN = tl.constexpr((1 << 63) - 1)  # above every key: a place that holds nothing and is never given away
_LAST_CHUNK = tl.constexpr(0x7FFFFFFF)
_NONE = tl.constexpr(1 << 53)  # after every chunk


def search(call: SearchCall) -> Tensor:
    """The chosen chunks int64 [B, N, J, K], ascending with -1 last. Nothing waits for the device.

    Query and segments are float32, bfloat16 or float16 with any strides, and the widest dtype computes; K is at most
    256. What lies outside 0 .. M is no chunk.
    """
    query, segments, K, start, end, noise_seed, scale, recency, first_query = call
    B, N, J, E = query.shape
    chosen = torch.empty(B, N, J, K, dtype=torch.int64, device=query.device)
    if not chosen.numel():
        return chosen
    segments = [segment for segment in segments if segment.shape[1]]
    dtype = reduce(torch.promote_types, [segment.dtype for segment in segments], query.dtype)
    # what all rows share is one table, that the queries of the batch ask together
    tables = 1 if all(segment.stride(0) == 0 for segment in segments) else B
    rows = B // tables * N
    BQ, BM, BE = _tile(rows, E, K, dtype)
    row_blocks = triton.cdiv(rows, BQ)
    cuts = [_cut(segment.shape[1], BM, tables * J * row_blocks) for segment in segments]
    parts = sum(splits for _, splits in cuts)
    keys = torch.empty(B * N, J, max(parts, 1), K, dtype=torch.int64, device=query.device)
    if not parts:
        keys.fill_(_ABSENT.value)
    padded = triton.next_power_of_2(K)
    seeds = start if noise_seed is None else noise_seed
    first = part = 0
    with torch.cuda.device_of(query):
        for segment, (span, splits) in zip(segments, cuts, strict=True):
            _search_segment[(tables * J * splits * row_blocks,)](
                query, segment, start, end, seeds, keys,
                *query.stride(), *segment.stride(), *start.stride(), *end.stride(), seeds.stride(0),
                N, rows, segment.shape[1], first, span, splits, row_blocks, part, parts, first_query,
                float(scale), float(recency),
                J=J, E=E, K=K, PADDED=padded, BQ=BQ, BM=BM, BE=BE, DTYPE=_TL[dtype],
                NOISE=noise_seed is not None, RECENCY=recency > 0, num_warps=8 if BQ == 64 else 4, num_stages=3,
            )  # fmt: skip
            first += segment.shape[1]
            part += splits
        tile = min(_MERGED, triton.next_power_of_2(keys.shape[2] * K))
        together = max(1, min(16, _MERGED // max(tile, padded)))
        _merge[(triton.cdiv(B * N * J, together),)](
            keys, chosen, B * N * J, keys.shape[2] * K,
            K=K, PADDED=padded, ROWS=together, TILE=tile, SINGLE=parts <= 1, num_warps=4,
        )  # fmt: skip
    return chosen


def _tile(rows: int, E: int, K: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Queries, chunks and elements of a tile, from shapes and dtypes alone."""
    single = dtype == torch.float32  # no tensor cores: rows that are not asked would cost arithmetic
    least = 4 if single else 16
    BQ = min(64, max(least, triton.next_power_of_2(rows)))
    while least < BQ and BQ * triton.next_power_of_2(K) > _BEST:
        BQ //= 2
    return BQ, 64, min(32 if single else 64, max(16, triton.next_power_of_2(E)))


def _cut(m: int, BM: int, programs: int) -> tuple[int, int]:
    """(chunks of a split, splits) of a segment that takes so many programs unsplit."""
    blocks = triton.cdiv(m, BM)
    each = triton.cdiv(blocks, triton.cdiv(_PROGRAMS, programs))
    return each * BM, triton.cdiv(blocks, each)


# Numbers that change from call to call: one kernel for all of their values.
_VARYING = ["N", "rows", "chunks", "first", "span", "splits", "row_blocks", "part", "parts", "first_query"]


@triton.jit(do_not_specialize=_VARYING)
def _search_segment(
    query,  # [B, N, J, E]
    landmarks,  # [B, m, J, E]
    start,  # [B, N]
    end,  # [B, N]
    seeds,  # [B]
    keys,  # [B * N, J, parts, K]
    query_b, query_n, query_j, query_e,
    landmarks_b, landmarks_m, landmarks_j, landmarks_e,
    start_b, start_n, end_b, end_n, seeds_b,
    N, rows, chunks, first, span, splits, row_blocks, part, parts, first_query, scale, recency,
    J: tl.constexpr, E: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr,
    BQ: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr,
    DTYPE: tl.constexpr, NOISE: tl.constexpr, RECENCY: tl.constexpr,
):  # fmt: skip
    """The K best keys of BQ queries in one split of a segment, whose first chunk is number ``first``.

    One program per table, head, split and block of the ``rows`` queries that ask a table.
    """
    program = tl.program_id(0).to(tl.int64)
    block, program = program % row_blocks, program // row_blocks
    split, program = program % splits, program // splits
    j, table = program % J, program // J
    within = block * BQ + tl.arange(0, BQ)
    asks = within < rows
    row = table * rows + within  # of B * N
    b, n = row // N, row % N

    # candidates in this split, as places in the segment; none for rows past the last
    low = tl.load(start + b * start_b + n * start_n, mask=asks, other=0) - first
    high = tl.load(end + b * end_b + n * end_n, mask=asks, other=-1) - first
    last = high
    low = tl.maximum(low, split * span)
    high = tl.minimum(high, tl.minimum(split * span + span, chunks))
    asks = asks & (low < high)
    begin = tl.min(tl.where(asks, low, _NONE), 0) // BM * BM
    stop = tl.max(tl.where(asks, high, 0), 0)

    place = tl.arange(0, PADDED).to(tl.int64)
    best = tl.where(place < K, _ABSENT + place, _TAKEN)[None, :] + tl.zeros([BQ, 1], tl.int64)
    if NOISE:
        noise_row = _fold(_fold(_mix(tl.load(seeds + b * seeds_b, mask=asks, other=0)), j), n + first_query)
    asked = query + b * query_b + n * query_n + j * query_j
    landmarks += table * landmarks_b + j * landmarks_j
    for at in range(begin, stop, BM):
        m = at + tl.arange(0, BM).to(tl.int64)
        there = m < stop
        scores = tl.zeros([BQ, BM], tl.float32)
        for e in range(0, E, BE):
            element = e + tl.arange(0, BE).to(tl.int64)
            q = tl.load(
                asked[:, None] + element[None, :] * query_e,
                mask=asks[:, None] & (element < E)[None, :],
                other=0.0,
            )
            l = tl.load(
                landmarks + m[:, None] * landmarks_m + element[None, :] * landmarks_e,
                mask=there[:, None] & (element < E)[None, :],
                other=0.0,
            )
            scores = tl.dot(q.to(DTYPE), tl.trans(l.to(DTYPE)), scores, input_precision="ieee")
        scores = scores * scale
        if RECENCY:
            age = tl.maximum(last[:, None] - m[None, :], 1).to(tl.float64)
            scores -= (tl.log(age) * recency).to(tl.float32)
        if NOISE:
            scores += _gumbel(noise_row[:, None], (first + m)[None, :])
        # filled, not added to: what is no candidate may hold NaN
        candidate = (m[None, :] >= low[:, None]) & (m[None, :] < high[:, None]) & asks[:, None]
        scores = tl.where(candidate, scores, float("-inf"))
        best = _insert(best, _key(scores, (first + m)[None, :]))
    out = keys + ((row * J + j) * parts + part + split)[:, None] * K + place[None, :]
    written = (within < rows)[:, None] & (place < K)[None, :]
    tl.store(out, tl.where(best < _LEAST, _ABSENT, best), mask=written)


@triton.jit(do_not_specialize=["rows", "count"])
def _merge(
    keys,  # [rows, count]
    chosen,  # [rows, K]
    rows, count,
    K: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """The chunks of a row's K best keys in ascending order, -1 last. SINGLE: it has no more than K."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    keys += row[:, None] * count
    place = tl.arange(0, PADDED)[None, :].to(tl.int64)
    if SINGLE:
        best = tl.load(keys + place, mask=there[:, None] & (place < K), other=_ABSENT)
    else:
        best = tl.where(place < K, _ABSENT + place, _TAKEN) + tl.zeros([ROWS, 1], tl.int64)
        for at in range(0, count, TILE):
            i = at + tl.arange(0, TILE)[None, :].to(tl.int64)
            best = _insert(best, tl.load(keys + i, mask=there[:, None] & (i < count), other=_ABSENT))
    chunk = tl.where((best >= _LEAST) & (place < K), _LAST_CHUNK - (best & 0xFFFFFFFF), _NONE)
    for k in range(K):
        earliest = tl.min(chunk, 1)
        tl.store(chosen + row * K + k, tl.where(earliest == _NONE, -1, earliest), mask=there)
        chunk = tl.where(chunk == earliest[:, None], _NONE, chunk)


@triton.jit
def _insert(best, keys):
    """The best of [n, PADDED] kept keys and [n, m] others: as long as one beats the worst kept, it takes its place.

    The more has been seen, the fewer rounds; mostly none.
    """
    worst, top = tl.min(best, 1), tl.max(keys, 1)
    more = tl.max((top > worst).to(tl.int32), 0)
    while more > 0:
        leaves = (best == worst[:, None]) & (top > worst)[:, None]
        best = tl.where(leaves, top[:, None], best)
        keys = tl.where(keys == top[:, None], _ABSENT, keys)
        worst, top = tl.min(best, 1), tl.max(keys, 1)
        more = tl.max((top > worst).to(tl.int32), 0)
    return best


@triton.jit
def _key(scores, chunk):
    """int64 keys; as in the torch path, 0 and -0 are equal, NaN is the largest and -inf is no candidate."""
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ordered = tl.where(scores != scores, 0x7FFFFFFF, ordered)
    key = (ordered.to(tl.int64) << 32) | (_LAST_CHUNK - chunk)
    return tl.where(scores == float("-inf"), _ABSENT, key)


# The noise of selection.py, bit for bit. There numbers are int64; after the first step 32 bits are all that counts.


@triton.jit
def _gumbel(row, chunk):
    bits = _mix(row.to(tl.int64) * 0x9E3779B1 + chunk)
    uniform = (bits.to(tl.float64) + 0.5) * (2.0**-32)
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def _fold(mixed, number):
    return _mix(mixed.to(tl.int64) * 0x9E3779B1 + number + 0x7F4A7C15)


@triton.jit
def _mix(x):
    """uint32 of int64; the products wrap."""
    h = (x ^ (x >> 32)).to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)
