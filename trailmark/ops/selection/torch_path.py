"""The search of selecting chunks in PyTorch: blocks of landmarks, a running top-K, ties told apart by exact sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trailmark.ops.arguments import arithmetic_dtype
from trailmark.ops.selection.call import SearchCall, less_for_age
from trailmark.ops.selection.noise import gumbel, noise_rows

# Landmarks are walked in blocks, queries in slabs: N x M scores never stand in memory, and what does stays in
# a cache. Sizes come from shapes alone (guarantee 7). The elements of landmarks that are copied (to a
# wider dtype, or for the GEMM), and of scores:
_BLOCK_ELEMENTS = 1 << 20
_SLAB_ELEMENTS = 1 << 20
_BLOCK_CHUNKS = 1 << 14  # the largest block
_UNMERGED = 32  # blocks whose best are merged at once


class Bounds(NamedTuple):
    """Where the candidates of each query start or end."""

    each: Tensor  # [B, N]
    least: list[int]  # N: over the batch; empty where the values are not looked at
    greatest: list[int]


def values_of(bound: Tensor, B: int, N: int) -> tuple[list[int], list[int]]:
    """The least and the greatest over the batch for each query, of a bound [], [N] or [B, N]."""
    if bound.dim() == 2 and B > 1:
        least, greatest = torch.stack(bound.aminmax(dim=0)).tolist()  # one synchronisation
    else:
        least = greatest = bound.expand(B, N)[0].tolist() if B else []
    return least, greatest


def search(call: SearchCall, start: Bounds, end: Bounds) -> Tensor:
    """The chosen chunks [B, N, J, K], in blocks of landmarks and slabs of queries, keeping the K + 1 best."""
    query, K, noise_seed, recency = call.query, call.num_retrieved, call.noise_seed, call.recency
    B, N, J, _ = query.shape
    segments = [segment for segment in call.segments if segment.shape[1]]
    if B == 0 or N == 0 or not segments:
        return torch.full((B, N, J, K), -1, dtype=torch.int64, device=query.device)
    dtype = arithmetic_dtype(query, *segments)
    plain = query.transpose(1, 2).to(dtype)
    asked = plain * call.scale  # [B, J, N, E]
    seeds = None if noise_seed is None else noise_rows(noise_seed, call.first_query, N, J).transpose(1, 2)
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
        table = block[:1] if is_shared(block) else block
        if table.dtype != dtype:
            # one buffer for all: an allocation for each block fragments the heap
            if buffer is None:
                buffer = torch.empty(B, size, *block.shape[2:], dtype=dtype, device=block.device)
            table = buffer[: table.shape[0], : table.shape[1]].copy_(table)
        table = table.permute(0, 2, 3, 1)  # [B or 1, J, E, m]
        for i in asking:
            rows = slabs[i]
            scores = _multiply(asked[:, :, rows], table)  # [B, J, n, m]
            if recency:
                chunk = torch.arange(first, last, device=query.device)
                scores -= less_for_age(recency, end.each[:, None, rows, None], chunk, dtype)
            if seeds is not None:
                scores = scores + gumbel(seeds[:, :, rows], first, last - first)
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
    of_slabs = []
    for rows, parts in zip(slabs, best, strict=True):
        if not parts:
            of_slabs.append(torch.full((B, J, rows.stop - rows.start, K), -1, device=query.device))
            continue
        top = _merge(parts, K + 1)
        chosen = _ascending(top, K)
        if top.values.shape[-1] > K:
            contested, lowest = _contested(asked[:, :, rows], segments, top, K, recency)
            if bool(contested.any()):
                for places in contested.nonzero().split(max(1, _SLAB_ELEMENTS // (size * asked.shape[-1]))):
                    b, j, n = places.unbind(1)
                    at = n + rows.start
                    noise = None if seeds is None else seeds[b, j, at]
                    rest = (size, K, start.each[b, at], end.each[b, at], noise, recency, call.scale)
                    rescore = (
                        _rescore_near if J == 1 and (B == 1 or all(map(is_shared, segments))) else _rescore
                    )
                    chosen[b, j, n] = rescore(plain[b, j, at], b, j, segments, *rest, lowest[b, j, n])
        of_slabs.append(chosen)
    return (of_slabs[0] if len(of_slabs) == 1 else torch.cat(of_slabs, dim=2)).transpose(1, 2)


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


def _contested(
    asked: Tensor, segments: list[Tensor], top: _Best, K: int, recency: float
) -> tuple[Tensor, Tensor]:
    """[B, J, n] bool: where the scores of the last place and of the next lie within rounding; and the least score
    that may be equal to them.

    What rounds are the two scores for that place; another chunk's length, or NaN, has no say in it.
    """
    norm = torch.linalg.vector_norm
    rounding = 8 * torch.finfo(asked.dtype).eps * norm(asked, dim=-1)  # of a score by a landmark of length 1
    pair = top.chunks[..., K - 1 : K + 1].transpose(1, 2)  # [B, n, J, 2]
    longest = norm(gather(segments, pair, asked.dtype), dim=-1).amax(-1).transpose(1, 2)  # [B, J, n]
    last, next_best = top.values[..., K - 1], top.values[..., K]
    within = rounding * longest
    if recency:  # the difference is rounded once more, of two chunks by two ways
        within = within + 2 * torch.finfo(asked.dtype).eps * top.values[..., K - 1 : K + 1].abs().amax(-1)
    contested = (last - next_best <= within) & (next_best > -torch.inf)
    return contested, next_best - within


def _rescore(
    asked: Tensor,  # [P, E]
    row: Tensor,  # [P]: of the batch
    head: Tensor,  # [P]
    segments: list[Tensor],
    size: int,
    K: int,
    start: Tensor,  # [P]
    end: Tensor,  # [P]
    seeds: Tensor | None,  # [P, 1]
    recency: float,
    scale: float,
    lowest: Tensor,  # [P]
) -> Tensor:
    """The chosen chunks [P, K] by a sum per chunk.

    A GEMM rounds equal columns differently; such sums do not, so equal chunks tie (guarantee 9). They are scaled as the
    scores are that are given back.
    """
    least, greatest = int(start.min()), int(end.max())
    best: _Best | None = None
    for first, block in _blocks(segments, size):
        last = first + block.shape[1]
        if greatest <= first or least >= last:
            continue
        exact = (asked[:, None] * block[row, :, head].to(asked.dtype)).sum(-1) * scale  # [P, m]
        chunk = torch.arange(first, last, device=asked.device)
        if recency:
            exact -= less_for_age(recency, end[:, None], chunk, exact.dtype)
        if seeds is not None:
            exact = exact + gumbel(seeds, first, last - first)
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
    seeds: Tensor | None,  # [P, 1]
    recency: float,
    scale: float,
    lowest: Tensor,  # [P] scores below take no part
) -> Tensor:
    """As ``_rescore``, with sums for those chunks alone that a GEMM puts within rounding of the last place."""
    queries, numbers, sums, scaled = [], [], [], asked * scale
    for first, block in _blocks(segments, size):
        last = first + block.shape[1]
        table = block[0, :, 0].to(asked.dtype)
        scores = scaled @ table.T  # [P, m]
        chunk = torch.arange(first, last, device=asked.device)
        if recency:
            scores -= less_for_age(recency, end[:, None], chunk, scores.dtype)
        if seeds is not None:
            scores = scores + gumbel(seeds, first, last - first)
        inside = (chunk >= start[:, None]) & (chunk < end[:, None])
        near, place = (inside & (scores >= lowest[:, None])).nonzero(as_tuple=True)
        exact = (asked[near] * table[place]).sum(-1) * scale
        if recency:
            exact -= less_for_age(recency, end[near], place + first, exact.dtype)
        if seeds is not None:
            exact = exact + gumbel(seeds, first, last - first)[near, place]
        queries.append(near)
        numbers.append(place + first)
        sums.append(exact)
    query, number, score = torch.cat(queries), torch.cat(numbers), torch.cat(sums)
    order = query.argsort(stable=True)  # by query, then by chunk
    counts = torch.bincount(query, minlength=len(asked))
    if bool((counts < (end - start).clamp(0, K)).any()):  # this product put one of the best below rounding
        return _rescore(asked, row, head, segments, size, K, start, end, seeds, recency, scale, lowest)
    of_queries = []
    for own in order.split(counts.tolist()):
        best = score[own].argsort(descending=True, stable=True)[:K]
        of_queries.append(_ascending(_Best(score[own][best], number[own][best]), K))
    return torch.stack(of_queries)


def _ascending(best: _Best, K: int) -> Tensor:
    """The first K of a descending order as ascending chunk numbers, -1 (no candidate) last."""
    last = 1 << 53  # after every chunk; what pad can pass on exactly
    chosen = best.chunks[..., :K].masked_fill(best.values[..., :K] == -torch.inf, last).sort(dim=-1).values
    if chosen.shape[-1] < K:
        chosen = torch.nn.functional.pad(chosen, (0, K - chosen.shape[-1]), value=last)
    return chosen.masked_fill_(chosen == last, -1)


def is_shared(segment: Tensor) -> bool:
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
        tables = 1 if all(map(is_shared, segments)) else B
        longest = min(longest, max(1024, _BLOCK_ELEMENTS // max(1, tables * J * E)))
    return min(longest, _BLOCK_CHUNKS)


def gather(segments: list[Tensor], chunks: Tensor, dtype: torch.dtype) -> Tensor:
    """Landmarks [B, N, J, K, E] of chunks [B, N, J, K] >= 0. Differentiable in the segments."""
    B, _, J, _ = chunks.shape
    E = segments[0].shape[-1]
    if len(segments) == 1 and J == 1 and (B == 1 or is_shared(segments[0])):
        return _rows(segments[0][0, :, 0], chunks).to(dtype)
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
    one = segment.shape[0] == 1 or is_shared(segment)
    table = segment[0] if one else segment
    if not table.is_contiguous() and not (segment.requires_grad and torch.is_grad_enabled()):
        return segment[row, chunk, head]  # slower, but copies no table
    flat = (chunk if one else row * m + chunk) * J + head
    return _rows(table.reshape(-1, E), flat)


def _rows(table: Tensor, numbers: Tensor) -> Tensor:
    """``table[numbers]``: [..., E] of [n, E], with a backward that repeats bit for bit (guarantee 7).

    That of ``table[numbers]`` does not on several CPU threads, that of ``index_select`` adds by atomics on CUDA.
    """
    if table.device.type == "cpu":
        return table.index_select(0, numbers.reshape(-1)).view(*numbers.shape, table.shape[-1])
    return torch.nn.functional.embedding(numbers, table)
