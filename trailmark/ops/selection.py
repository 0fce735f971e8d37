"""Selecting past chunks by score: the retrieval of DRT (arXiv 2410.01651, Sec. 3.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trailmark.ops import reference
from trailmark.ops.arguments import (
    arithmetic_dtype,
    require,
    require_chunk_numbers,
    require_implementation,
    require_shape,
    triton_problem,
    values_are_checked,
    whole_numbers,
    without_autocast,
)
from trailmark.ops.row_scores import SLAB_ELEMENTS, row_scores

# Landmarks are walked in blocks, queries in slabs: N x M scores never stand in memory, and what does stays in
# a cache. Sizes come from shapes alone (design, semantics 7). The elements of landmarks that are copied (to a
# wider dtype, or for the GEMM), and of scores:
_BLOCK_ELEMENTS = 1 << 20
_SLAB_ELEMENTS = 1 << 20
_BLOCK_CHUNKS = 1 << 14  # the largest block
_UNMERGED = 32  # blocks whose best are merged at once

_MOST_RETRIEVED = 256  # by a kernel: it keeps the best in registers


class ChunkSelection(NamedTuple):
    """What a chunk retrieves: K columns always, ascending chunk numbers, the missing ones last."""

    indices: Tensor
    """[B, N, (J,) K] int64; -1 where nothing was left to select."""
    weights: Tensor
    """Same shape; softmax over the selected noise-free scores, 0 where -1; differentiable."""
    scores: Tensor
    """Same shape; the selected noise-free scores, -inf where -1; differentiable."""


@without_autocast
def select_chunks(
    query: Tensor,
    landmarks: Tensor | Sequence[Tensor],
    num_retrieved: int,
    num_candidates: Tensor,
    first_candidate: Tensor | int = 0,
    indices: Tensor | None = None,
    noise_seed: Tensor | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> ChunkSelection:
    r"""Select for each query the ``num_retrieved`` chunks whose landmarks score best.

    .. math::
        r_{nm} = \mathrm{scale} \cdot q_n^\top l_m, \qquad
        I_n = \mathrm{topK}_{m}(r_{nm} + \gamma_{nm}), \qquad
        w_{nk} = \frac{\exp r_{n, I_{nk}}}{\sum_{k'} \exp r_{n, I_{nk'}}}

    with :math:`f_n \le m < c_n` (first and number of candidates) and Gumbel noise :math:`\gamma` that takes
    part in the choice only. Equal scores select the earlier chunk. Source: arXiv 2410.01651, Sec. 3.1.

    The search holds scores and converted landmarks of a block of chunks at a time, whatever M is; "triton" holds
    them in registers and never waits for the device.

    Args:
        query: [B, N, E], or [B, N, J, E] to select per key/value head.
        landmarks: [B, M, E] or [B, M, J, E]. A batch of stride 0 (``expand``) is shared, not copied. A
            sequence of such tensors is one table of M = sum of m_i chunks in that order: the segments of a
            memory that grows. They may differ in dtype (the widest computes) and in being shared. What stands
            where no query has a candidate is never looked at: it may be uninitialised.
        num_retrieved: K >= 1.
        num_candidates: int64 [N] or [B, N]: query n may select chunks m < num_candidates[n]. That it is at most
            M, and that no chunk number given is wrong, is checked on a CPU; for "triton" on CUDA it would wait
            for the device, so only with the environment variable TRAILMARK_CHECK_VALUES=1.
        first_candidate: an int or int64 of the same shapes: and m >= first_candidate[n].
        indices: int64 [B, N, (J,) K], ascending with -1 last: no search; these chunks are scored and weighed.
        noise_seed: int64 [B]: the noise is an integer hash of (seed, head, n, m). None: no noise.
        scale: None is E ** -0.5.
        implementation: "reference" (holds all scores), "torch" or "triton" (float32, bfloat16 or float16; K <= 256).
            None: "triton" on CUDA where it supports the input, else "torch".

    Raises:
        ValueError: for shapes that do not fit together, chunks that do not exist, or an implementation that
            cannot take the input.
    """
    require_implementation(implementation, ("reference", "torch", "triton"))
    per_head = query.dim() == 4
    require(query.dim() in (3, 4), "query", tuple(query.shape), "shape [B, N, E] or [B, N, J, E]")
    require(num_retrieved >= 1, "num_retrieved", num_retrieved, "at least 1")
    segments = _segments(landmarks, query)
    if not per_head:
        query, segments = query[:, :, None], [segment[:, :, None] for segment in segments]
    B, N, J, E = query.shape
    M = sum(segment.shape[1] for segment in segments)
    scale = E**-0.5 if scale is None else scale
    name = _choose(implementation, query, segments, num_retrieved)

    if indices is not None:
        wanted = (B, N, J, num_retrieved) if per_head else (B, N, num_retrieved)
        require_shape("indices", indices, wanted, "[B, N, (J,) K]")
        chosen = whole_numbers("indices", indices if per_head else indices[:, :, None])
        require_chunk_numbers("indices", chosen, M)
    else:
        wanted_values = name == "torch" and not torch.compiler.is_compiling()
        end = _bounds("num_candidates", num_candidates, B, N, query.device, wanted_values)
        start = _bounds("first_candidate", first_candidate, B, N, query.device, wanted_values)
        most, least = max(end.greatest, default=0), min(start.least, default=0)
        if most > M:  # a message made in vain would make M a constant under torch.compile
            require(False, "num_candidates", most, f"at most M = {M} chunks")
        require(least >= 0, "first_candidate", least, "no negative chunk")
        if noise_seed is not None:
            require_shape("noise_seed", noise_seed, (B,), "[B]")
            noise_seed = _moved(whole_numbers("noise_seed", noise_seed), query.device)
        if name == "reference":
            noise = None if noise_seed is None else gumbel_noise(noise_seed, 0, N, J, M)
            dtype = arithmetic_dtype(query, *segments)
            table = torch.cat([query.new_empty(B, 0, J, E, dtype=dtype), *(x.to(dtype) for x in segments)], 1)
            out = reference.select_chunks(query, table, num_retrieved, end.each, start.each, noise, scale)
            return ChunkSelection(*(x if per_head else x[:, :, 0] for x in out))
        asked, table_parts = query.detach(), [segment.detach() for segment in segments]
        if torch.compiler.is_compiling():
            chosen = _searched(
                asked, table_parts, num_retrieved, start.each, end.each, noise_seed, scale, name == "triton"
            )
        elif name == "triton":
            chosen = _search_in_kernels(
                asked, table_parts, num_retrieved, start.each, end.each, noise_seed, scale
            )
        else:
            chosen = _search(asked, table_parts, num_retrieved, start, end, noise_seed, scale)

    out = _score_and_weigh(query, segments, chosen, scale)
    return ChunkSelection(*(x if per_head else x[:, :, 0] for x in out))


def fold_seed(seed: Tensor | int, *numbers: Tensor | int) -> Tensor:
    """Mix integers into one non-negative int64 seed by a 32-bit integer hash (design, semantics 3).

    ``fold_seed(seed, step, sample, group)`` is the seed of one sample's noise in one group. Any argument may
    be a tensor; they broadcast. Only 32-bit multiplications, xors and shifts, so a kernel draws the same bits.
    """
    mixed = _mix(whole_numbers("seed", torch.as_tensor(seed)))
    for number in numbers:
        other = whole_numbers("numbers", torch.as_tensor(number))
        # what has no dimension goes where the other is
        device = mixed.device if mixed.dim() else other.device
        mixed = _mix(mixed.to(device) * 0x9E3779B1 + other.to(device) + 0x7F4A7C15)
    return mixed


def gumbel_noise(
    noise_seed: Tensor,
    first_query: int,
    num_queries: int,
    num_heads: int,
    num_chunks: int,
    first_chunk: int = 0,
) -> Tensor:
    """Standard Gumbel noise [B, N, J, M] of queries ``first_query ...`` and chunks ``first_chunk ...``.

    A hash of (seed, head, n, m): any part of it has the same bits as in the whole.
    """
    return _gumbel(_noise_rows(noise_seed, first_query, num_queries, num_heads), first_chunk, num_chunks)


def _noise_rows(noise_seed: Tensor, first_query: int, num_queries: int, num_heads: int) -> Tensor:
    """One seed [B, N, J, 1] for each query and head."""
    n = torch.arange(first_query, first_query + num_queries, device=noise_seed.device)[:, None, None]
    head = torch.arange(num_heads, device=noise_seed.device)[:, None]
    return fold_seed(noise_seed[:, None, None, None], head, n)


def _gumbel(rows: Tensor, first_chunk: int, num_chunks: int) -> Tensor:
    """Noise [..., m] of the chunks ``first_chunk ...`` for seeds [..., 1]."""
    m = torch.arange(first_chunk, first_chunk + num_chunks, device=rows.device)
    bits = _mix(rows * 0x9E3779B1 + m)
    uniform = bits.to(torch.float64).add_(0.5).mul_(2.0**-32)  # inside (0, 1): both logarithms are finite
    return uniform.log_().neg_().log_().neg_().to(torch.float32)


def _mix(x: Tensor) -> Tensor:
    # The finaliser of MurmurHash3 (public domain) on the low 32 bits; int64 products wrap harmlessly.
    mask = 0xFFFFFFFF
    x = (x ^ (x >> 32)).bitwise_and_(mask)  # a new tensor: the rest is in place
    x.bitwise_xor_(x >> 16).mul_(0x85EBCA6B).bitwise_and_(mask)
    x.bitwise_xor_(x >> 13).mul_(0xC2B2AE35).bitwise_and_(mask)
    return x.bitwise_xor_(x >> 16)


def triton_refuses(query: Tensor, segments: Sequence[Tensor], num_retrieved: int) -> str | None:
    """Why the kernels do not take these inputs; None if they do."""
    if problem := triton_problem(query.device):
        return problem
    for name, tensor in (("query is", query), *(("landmarks are", segment) for segment in segments)):
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"{name} {tensor.dtype}. Convert to float32, bfloat16 or float16, or use 'torch'"
    if num_retrieved > _MOST_RETRIEVED:
        return (
            f"num_retrieved is {num_retrieved}, and the kernels keep at most {_MOST_RETRIEVED}. Use 'torch'"
        )
    M = sum(segment.shape[1] for segment in segments)
    if M >= 2**31:
        return f"there are M = {M} landmarks, and the kernels number fewer than 2^31 chunks. Use 'torch'"
    return None


def _choose(implementation: str | None, query: Tensor, segments: list[Tensor], num_retrieved: int) -> str:
    if implementation is None:
        fits = query.is_cuda and triton_refuses(query, segments, num_retrieved) is None
        return "triton" if fits else "torch"
    if implementation == "triton":
        problem = triton_refuses(query, segments, num_retrieved)
        require(problem is None, "implementation", "'triton'", "what can take these inputs", f"{problem}.")
    return implementation


class _Bounds(NamedTuple):
    """Where the candidates of each query start or end."""

    each: Tensor  # [B, N]
    least: list[int]  # N: over the batch; empty where the values are not looked at
    greatest: list[int]


def _bounds(
    argument: str, bound: Tensor | int, B: int, N: int, device: torch.device, wanted: bool
) -> _Bounds:
    """The bounds; their values where ``wanted`` or checked, for which a GPU is waited for."""
    if isinstance(bound, int):
        values = [bound] * N if wanted else [bound]  # N values would make N a constant under torch.compile
        return _Bounds(torch.full((1, 1), bound, device=device).expand(B, N), values, values)
    bound = torch.as_tensor(bound)
    if bound.dim() > 2 or (bound.dim() and tuple(bound.shape) != (B, N)[-bound.dim() :]):
        require(False, argument, tuple(bound.shape), f"shape [N] = ({N},) or [B, N]")
    bound = whole_numbers(argument, bound)
    each = _moved(bound, device).expand(B, N)
    return _Bounds(each, *(_range(bound, B, N) if wanted or values_are_checked(bound) else ([], [])))


def _moved(numbers: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for it (but for pinned memory, which may change before it is read)."""
    if numbers.device == device:
        return numbers
    return numbers.to(device, non_blocking=numbers.device.type == "cpu" and not numbers.is_pinned())


def _range(bound: Tensor, B: int, N: int) -> tuple[list[int], list[int]]:
    """The least and the greatest over the batch for each query, of a bound [], [N] or [B, N]."""
    if bound.dim() == 2 and B > 1:
        least, greatest = torch.stack(bound.aminmax(dim=0)).tolist()  # one synchronisation
    else:
        least = greatest = bound.expand(B, N)[0].tolist() if B else []
    return least, greatest


def _segments(landmarks: Tensor | Sequence[Tensor], query: Tensor) -> list[Tensor]:
    """The landmarks as a list of tensors [B, m, (J,) E] that fit the query."""
    single = isinstance(landmarks, Tensor)
    segments = [landmarks] if isinstance(landmarks, Tensor) else list(landmarks)
    for i, segment in enumerate(segments):
        argument = "landmarks" if single else f"landmarks[{i}]"
        require(
            segment.dim() == query.dim(), argument, tuple(segment.shape), "as many dimensions as query has"
        )
        wanted = (query.shape[0], segment.shape[1], *query.shape[2:])
        require_shape(argument, segment, wanted, "[B, M, (J,) E]")
    return segments


def _is_shared(segment: Tensor) -> bool:
    return segment.shape[0] > 1 and segment.stride(0) == 0


def _blocks(segments: Sequence[Tensor], size: int) -> Iterator[tuple[int, Tensor]]:
    """The segments in blocks [B, m <= size, J, E], each with the number of its first chunk."""
    first = 0
    for segment in segments:
        for at in range(0, segment.shape[1], size):
            yield first + at, segment[:, at : at + size]
        first += segment.shape[1]


def _block_size(segments: Sequence[Tensor], N: int, dtype: torch.dtype) -> int:
    """Chunks of a block, from shapes and dtypes alone."""
    B, _, J, E = segments[0].shape
    longest = max(segment.shape[1] for segment in segments)
    # a GEMM over both batch and heads copies them apart; with many queries it reads landmarks repeatedly
    if N > 8 or any(x.dtype != dtype or (J > 1 and B > 1) for x in segments):
        tables = 1 if all(map(_is_shared, segments)) else B
        longest = min(longest, max(1024, _BLOCK_ELEMENTS // max(1, tables * J * E)))
    return min(longest, _BLOCK_CHUNKS)


def _search_in_kernels(
    query: Tensor,
    segments: list[Tensor],
    K: int,
    start: Tensor,
    end: Tensor,
    noise_seed: Tensor | None,
    scale: float,
) -> Tensor:
    from trailmark.ops import selection_triton as kernels

    return kernels.search(query, segments, K, start, end, noise_seed, scale)


# Under torch.compile the search is an op that it does not look into, so that its graph stays whole.


@torch.library.custom_op("trailmark::select_chunks_search", mutates_args=())
def _searched(
    query: Tensor,
    segments: Sequence[Tensor],
    num_retrieved: int,
    start: Tensor,
    end: Tensor,
    noise_seed: Tensor | None,
    scale: float,
    in_kernels: bool,
) -> Tensor:
    rest = list(segments), num_retrieved
    if in_kernels:
        return _search_in_kernels(query, *rest, start, end, noise_seed, scale)
    B, N = start.shape
    first, last = (_Bounds(x, *_range(x, B, N)) for x in (start, end))
    return _search(query, *rest, first, last, noise_seed, scale).contiguous()


@_searched.register_fake
def _(
    query: Tensor,
    segments: Sequence[Tensor],
    num_retrieved: int,
    start: Tensor,
    end: Tensor,
    noise_seed: Tensor | None,
    scale: float,
    in_kernels: bool,
) -> Tensor:
    return query.new_empty((*query.shape[:3], num_retrieved), dtype=torch.int64)


def _search(
    query: Tensor,  # [B, N, J, E]
    segments: list[Tensor],  # [B, m, J, E] each
    K: int,
    start: _Bounds,
    end: _Bounds,
    noise_seed: Tensor | None,
    scale: float,
) -> Tensor:
    """The chosen chunks [B, N, J, K], in blocks of landmarks and slabs of queries, keeping the K + 1 best."""
    B, N, J, _ = query.shape
    segments = [segment for segment in segments if segment.shape[1]]
    if B == 0 or N == 0 or not segments:
        return torch.full((B, N, J, K), -1, dtype=torch.int64, device=query.device)
    dtype = arithmetic_dtype(query, *segments)
    asked = query.transpose(1, 2).to(dtype) * scale  # [B, J, N, E]
    noise_rows = None if noise_seed is None else _noise_rows(noise_seed, 0, N, J).transpose(1, 2)
    size = _block_size(segments, N, dtype)
    step = max(1, _SLAB_ELEMENTS // (B * J * size))
    slabs = [slice(n, min(n + step, N)) for n in range(0, N, step)]
    best: list[list[_Best]] = [[] for _ in slabs]
    buffer: Tensor | None = None
    for first, block in _blocks(segments, size):
        last = first + block.shape[1]
        # a block without candidates is left out; the arithmetic of the others stays the same
        asking = [
            i
            for i, rows in enumerate(slabs)
            if max(end.greatest[rows]) > first and min(start.least[rows]) < last
        ]
        if not asking:
            continue
        table = block[:1] if _is_shared(block) else block
        if table.dtype != dtype:
            # one buffer for all: an allocation for each block fragments the heap
            if buffer is None:
                buffer = torch.empty(B, size, *block.shape[2:], dtype=dtype, device=block.device)
            table = buffer[: table.shape[0], : table.shape[1]].copy_(table)
        table = table.permute(0, 2, 3, 1)  # [B or 1, J, E, m]
        for i in asking:
            rows = slabs[i]
            scores = _multiply(asked[:, :, rows], table)  # [B, J, n, m]
            if noise_rows is not None:
                scores = scores + _gumbel(noise_rows[:, :, rows], first, last - first)
            # filled, not added to: NaN - inf is NaN, which topk takes for the largest
            if min(end.least[rows]) < last:
                chunk = torch.arange(first, last, device=query.device)
                scores.masked_fill_((chunk >= end.each[:, rows, None])[:, None], -torch.inf)
            if max(start.greatest[rows]) > first:
                chunk = torch.arange(first, last, device=query.device)
                scores.masked_fill_((chunk < start.each[:, rows, None])[:, None], -torch.inf)
            best[i].append(_top(scores, K + 1, first))
            if len(best[i]) == _UNMERGED:
                best[i] = [_merge(best[i], K + 1)]
    found = []
    for rows, parts in zip(slabs, best, strict=True):
        if not parts:
            found.append(torch.full((B, J, rows.stop - rows.start, K), -1, device=query.device))
            continue
        top = _merge(parts, K + 1)
        chosen = _ascending(top, K)
        if top.values.shape[-1] > K:
            contested, lowest = _contested(asked[:, :, rows], segments, top, K)
            if bool(contested.any()):
                for places in contested.nonzero().split(max(1, _SLAB_ELEMENTS // (size * asked.shape[-1]))):
                    b, j, n = places.unbind(1)
                    at = n + rows.start
                    noise = None if noise_rows is None else noise_rows[b, j, at]
                    rest = (size, K, start.each[b, at], end.each[b, at], noise)
                    rescore = (
                        _rescore_near if J == 1 and (B == 1 or all(map(_is_shared, segments))) else _rescore
                    )
                    chosen[b, j, n] = rescore(asked[b, j, at], b, j, segments, *rest, lowest[b, j, n])
        found.append(chosen)
    return (found[0] if len(found) == 1 else torch.cat(found, dim=2)).transpose(1, 2)


class _Best(NamedTuple):
    """The best so far: scores in descending order, and whose they are."""

    values: Tensor
    chunks: Tensor  # int64


def _multiply(asked: Tensor, table: Tensor) -> Tensor:
    """Scores [B, J, n, m] of [B, J, n, E] by [B, J, E, m], or by [1, J, E, m] as one product per head."""
    B, J, n, _ = asked.shape
    if table.shape[0] == B:
        return asked @ table
    flat = asked.transpose(0, 1).reshape(1, J, B * n, -1)
    return (flat @ table).view(J, B, n, -1).transpose(0, 1)


def _top(scores: Tensor, kept: int, first_chunk: int) -> _Best:
    """The ``kept`` best of the last dimension in descending order; which of equals is left open."""
    m, group = scores.shape[-1], 16
    if m % group or m < 4 * group * kept:
        values, places = scores.topk(min(kept, m), dim=-1)
    else:
        # the best k stand in the k groups with the best maxima; the largest of a group takes no sorting
        grouped = scores.unflatten(-1, (group, -1))  # [B, J, n, 16, m / 16]
        columns = grouped.amax(-2).topk(kept, dim=-1).indices  # [B, J, n, k]
        members = grouped.gather(-1, columns[..., None, :].expand(*grouped.shape[:-1], kept)).flatten(-2)
        values, places = members.topk(kept, dim=-1)
        places = columns.gather(-1, places % kept) + (places // kept) * grouped.shape[-1]
    return _Best(values, places + first_chunk if first_chunk else places)


def _merge(parts: list[_Best], kept: int) -> _Best:
    if len(parts) == 1:
        return parts[0]
    values, chunks = (torch.cat(tensors, dim=-1) for tensors in zip(*parts, strict=True))
    values, order = values.topk(min(kept, values.shape[-1]), dim=-1)
    return _Best(values, chunks.gather(-1, order))


def _contested(asked: Tensor, segments: list[Tensor], top: _Best, K: int) -> tuple[Tensor, Tensor]:
    """[B, J, n] bool: where the scores of the last place and of the next lie within rounding; and the least score
    that may be equal to them.

    What rounds are the two scores for that place; another chunk's length, or NaN, has no say in it.
    """
    norm = torch.linalg.vector_norm
    rounding = 8 * torch.finfo(asked.dtype).eps * norm(asked, dim=-1)  # of a score by a landmark of length 1
    pair = top.chunks[..., K - 1 : K + 1].transpose(1, 2)  # [B, n, J, 2]
    longest = norm(_gather(segments, pair, asked.dtype), dim=-1).amax(-1).transpose(1, 2)  # [B, J, n]
    last, next_best = top.values[..., K - 1], top.values[..., K]
    contested = (last - next_best <= rounding * longest) & (next_best > -torch.inf)
    return contested, next_best - rounding * longest


def _rescore(
    asked: Tensor,  # [P, E]
    row: Tensor,  # [P]: of the batch
    head: Tensor,  # [P]
    segments: list[Tensor],
    size: int,
    K: int,
    start: Tensor,  # [P]
    end: Tensor,  # [P]
    noise_rows: Tensor | None,  # [P, 1]
    lowest: Tensor,  # [P]
) -> Tensor:
    """The chosen chunks [P, K] by a sum per chunk.

    A GEMM rounds equal columns differently; such sums do not, so equal chunks tie (semantics 9).
    """
    least, greatest = int(start.min()), int(end.max())
    best: _Best | None = None
    for first, block in _blocks(segments, size):
        last = first + block.shape[1]
        if greatest <= first or least >= last:
            continue
        exact = (asked[:, None] * block[row, :, head].to(asked.dtype)).sum(-1)  # [P, m]
        if noise_rows is not None:
            exact = exact + _gumbel(noise_rows, first, last - first)
        chunk = torch.arange(first, last, device=asked.device)
        exact = exact.masked_fill((chunk < start[:, None]) | (chunk >= end[:, None]), -torch.inf)
        chunks = chunk.expand_as(exact)
        if best is not None:
            if best.values.shape[-1] == K and bool((exact.amax(-1) <= best.values[:, -1]).all()):
                continue  # the earlier of equals is there already
            exact, chunks = torch.cat((best.values, exact), -1), torch.cat((best.chunks, chunks), -1)
        values, order = exact.sort(dim=-1, descending=True, stable=True)
        best = _Best(values[:, :K].clone(), chunks.gather(-1, order[:, :K]))
    assert best is not None
    return _ascending(best, K)


def _rescore_near(
    asked: Tensor,  # [P, E]
    row: Tensor,
    head: Tensor,
    segments: list[Tensor],  # one table for all rows, one head
    size: int,
    K: int,
    start: Tensor,  # [P]
    end: Tensor,  # [P]
    noise_rows: Tensor | None,  # [P, 1]
    lowest: Tensor,  # [P] scores below take no part
) -> Tensor:
    """As ``_rescore``, with sums for those chunks alone that a GEMM puts within rounding of the last place."""
    queries, numbers, sums = [], [], []
    for first, block in _blocks(segments, size):
        last = first + block.shape[1]
        table = block[0, :, 0].to(asked.dtype)
        scores = asked @ table.T  # [P, m]
        if noise_rows is not None:
            scores = scores + _gumbel(noise_rows, first, last - first)
        chunk = torch.arange(first, last, device=asked.device)
        inside = (chunk >= start[:, None]) & (chunk < end[:, None])
        near, place = (inside & (scores >= lowest[:, None])).nonzero(as_tuple=True)
        exact = (asked[near] * table[place]).sum(-1)
        if noise_rows is not None:
            exact = exact + _gumbel(noise_rows, first, last - first)[near, place]
        queries.append(near)
        numbers.append(place + first)
        sums.append(exact)
    query, number, score = torch.cat(queries), torch.cat(numbers), torch.cat(sums)
    order = query.argsort(stable=True)  # by query, then by chunk
    counts = torch.bincount(query, minlength=len(asked))
    found = []
    for own in order.split(counts.tolist()):
        best = score[own].argsort(descending=True, stable=True)[:K]
        found.append(_ascending(_Best(score[own][best], number[own][best]), K))
    return torch.stack(found)


def _ascending(best: _Best, K: int) -> Tensor:
    """The first K of a descending order as ascending chunk numbers, -1 (no candidate) last."""
    last = 1 << 53  # after every chunk; what pad can pass on exactly
    chosen = best.chunks[..., :K].masked_fill(best.values[..., :K] == -torch.inf, last).sort(dim=-1).values
    if chosen.shape[-1] < K:
        chosen = torch.nn.functional.pad(chosen, (0, K - chosen.shape[-1]), value=last)
    return chosen.masked_fill_(chosen == last, -1)


def _gather(segments: list[Tensor], chunks: Tensor, dtype: torch.dtype) -> Tensor:
    """Landmarks [B, N, J, K, E] of chunks [B, N, J, K] >= 0. Differentiable in the segments."""
    B, _, J, _ = chunks.shape
    E = segments[0].shape[-1]
    if len(segments) == 1 and J == 1 and (B == 1 or _is_shared(segments[0])):
        return segments[0][0, :, 0].index_select(0, chunks.reshape(-1)).view(*chunks.shape, E).to(dtype)
    row = torch.arange(B, device=chunks.device)[:, None, None, None]
    head = torch.arange(J, device=chunks.device)[:, None]
    if len(segments) == 1:
        return _take(segments[0], row, chunks, head).to(dtype)
    flat, row, head = (x.expand_as(chunks).reshape(-1) for x in (chunks, row, head))
    picked = torch.zeros(flat.shape[0], E, dtype=dtype, device=chunks.device)
    first = 0
    # how many chunks of a segment were chosen is known on a CPU; elsewhere it would wait for the device
    counted = chunks.device.type == "cpu" and not torch.compiler.is_compiling()
    for segment in segments:
        last = first + segment.shape[1]
        if not counted:
            if segment.shape[1]:
                taken = _take(segment, row, (flat - first).clamp(0, segment.shape[1] - 1), head)
                picked = torch.where(((flat >= first) & (flat < last))[:, None], taken.to(dtype), picked)
            elif segment.requires_grad:
                picked = picked + segment.sum().to(dtype)  # 0, with a gradient
            first = last
            continue
        here = ((flat >= first) & (flat < last)).nonzero()[:, 0]
        # a segment that nothing was chosen from has a zero gradient, not None (DDP)
        if len(here) or segment.requires_grad:
            taken = _take(segment, row[here], flat[here] - first, head[here])
            picked = picked.index_copy(0, here, taken.to(dtype))
        first = last
    return picked.view(*chunks.shape, E)


def _take(segment: Tensor, row: Tensor, chunk: Tensor, head: Tensor) -> Tensor:
    """``segment[row, chunk, head]``: [..., E] of [B, m, J, E]."""
    _, m, J, E = segment.shape
    one = segment.shape[0] == 1 or _is_shared(segment)
    table = segment[0] if one else segment
    if not table.is_contiguous() and not (segment.requires_grad and torch.is_grad_enabled()):
        return segment[row, chunk, head]  # slower, but copies no table
    # index_select, not table[flat]: its backward repeats bit for bit on several threads (semantics 7)
    flat = (chunk if one else row * m + chunk) * J + head
    return table.reshape(-1, E).index_select(0, flat.reshape(-1)).view(*flat.shape, E)


def _in_slabs(query: Tensor, segments: list[Tensor], chosen: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """What ``row_scores`` takes, on a CPU where the landmarks gathered would be more than a slab of it."""
    B, _, J, K = chosen.shape
    many = chosen.numel() * query.shape[-1] > SLAB_ELEMENTS and query.device.type == "cpu"
    if not many or len(segments) != 1 or not segments[0].shape[1] or torch.compiler.is_compiling():
        return None
    one = B == 1 or _is_shared(segments[0])
    table = segments[0][0] if one else segments[0]
    if not table.is_contiguous() and not table.requires_grad:
        return None  # a copy of the table may be larger than what is gathered
    rows = chosen * J + torch.arange(J)[:, None]
    if not one:
        rows = rows + torch.arange(B)[:, None, None, None] * (segments[0].shape[1] * J)
    rows = rows.masked_fill_(chosen < 0, -1).view(-1, K)
    return query.flatten(0, 2), table.flatten(0, -2), rows


def _score_and_weigh(
    query: Tensor, segments: list[Tensor], chosen: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(chosen, weights, scores) [B, N, J, K]; differentiable in query and landmarks."""
    dtype = arithmetic_dtype(query, *segments)
    missing = chosen < 0
    if found := _in_slabs(query, segments, chosen):
        scores = row_scores(*found).view(chosen.shape) * scale
    elif any(segment.shape[1] for segment in segments):
        picked = _gather(segments, chosen.clamp(min=0), dtype)
        if query.requires_grad and torch.is_grad_enabled():
            # what stands for nothing is chunk 0, which may hold NaN; 0 times that is NaN
            picked = picked.masked_fill(missing[..., None], 0)
        scores = (query[..., None, :].to(dtype) * picked).sum(-1) * scale
    else:
        # keeps the graph: a zero gradient, not None (DDP)
        scores = query.sum(-1, keepdim=True).to(dtype) * 0
        for segment in segments:
            scores = scores + segment.sum().to(dtype) * 0
        scores = scores.expand(chosen.shape)
    scores = scores.masked_fill(missing, -torch.inf)
    # rows that selected nothing get zeros and zero gradients
    weights = scores.masked_fill(missing.all(-1, keepdim=True), 0).softmax(-1).masked_fill(missing, 0)
    return chosen, weights, scores
