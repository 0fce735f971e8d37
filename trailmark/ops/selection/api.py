"""Selecting past chunks by score: the retrieval of DRT (arXiv 2410.01651, Sec. 3.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from trailmark.ops import reference
from trailmark.ops.arguments import (
    KERNEL_DTYPES,
    arithmetic_dtype,
    choose_implementation,
    require,
    require_chunk_numbers,
    require_implementation,
    require_shape,
    triton_problem,
    values_are_checked,
    whole_numbers,
    without_autocast,
)
from trailmark.ops.calls import spelled_out
from trailmark.ops.selection.call import SearchCall, less_for_age
from trailmark.ops.selection.noise import gumbel_noise
from trailmark.ops.selection.row_scores import SLAB_ELEMENTS, row_scores
from trailmark.ops.selection.torch_path import Bounds, gather, is_shared, search, values_of

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
    recency: float = 0.0,
    implementation: str | None = None,
    first_query: int = 0,
) -> ChunkSelection:
    r"""Select for each query the ``num_retrieved`` chunks whose landmarks score best.

    .. math::
        r_{nm} = \mathrm{scale} \cdot q_n^\top l_m - \mathrm{recency} \cdot \ln(c_n - m), \qquad
        I_n = \mathrm{topK}_{m}(r_{nm} + \gamma_{nm}), \qquad
        w_{nk} = \frac{\exp r_{n, I_{nk}}}{\sum_{k'} \exp r_{n, I_{nk'}}}

    with :math:`f_n \le m < c_n` (first and number of candidates) and Gumbel noise :math:`\gamma` that takes
    part in the choice only. Equal scores select the earlier chunk. Source: arXiv 2410.01651, Sec. 3.1, where
    recency is 0.

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
            M, and that no chunk number given is wrong, is checked on a CPU and not while compiling; elsewhere it would
            wait for the device, so only with the environment variable TRAILMARK_CHECK_VALUES=1.
        first_candidate: an int or int64 of the same shapes: and m >= first_candidate[n].
        indices: int64 [B, N, (J,) K], ascending with -1 last: no search; these chunks are scored and weighed.
        noise_seed: int64 [B]: the noise is an integer hash of (seed, head, n, m). None: no noise.
        scale: None is E ** -0.5.
        recency: at least 0: what a score loses with the logarithm of a chunk's age, counted among the candidates: 1 for
            the last of them. ``num_candidates`` then has a say for given ``indices`` too.
        implementation: "reference" (holds all scores), "torch" or "triton" (float32, bfloat16 or float16; K <= 256).
            None: "triton" on CUDA where it supports the input, else "torch".
        first_query: what number the noise knows query 0 by: of a stretch of queries it is drawn as of them all.

    Raises:
        ValueError: for shapes that do not fit together, chunks that do not exist, or an implementation that
            cannot take the input.
    """
    require_implementation(implementation, ("reference", "torch", "triton"))
    per_head = query.dim() == 4
    require(query.dim() in (3, 4), "query", tuple(query.shape), "shape [B, N, E] or [B, N, J, E]")
    require(num_retrieved >= 1, "num_retrieved", num_retrieved, "at least 1")
    require(0 <= recency < math.inf, "recency", recency, "at least 0, and finite")
    whole = isinstance(first_query, int) and not isinstance(first_query, bool)
    require(whole and 0 <= first_query < 2**31, "first_query", first_query, "a whole number, at least 0")
    segments = _segments(landmarks, query)
    if not per_head:
        query, segments = query[:, :, None], [segment[:, :, None] for segment in segments]
    B, N, J, E = query.shape
    M = sum(segment.shape[1] for segment in segments)
    scale = E**-0.5 if scale is None else scale
    refuses = partial(triton_refuses, query, segments, num_retrieved)
    name = choose_implementation(implementation, query.is_cuda, refuses)

    if indices is not None:
        wanted = (B, N, J, num_retrieved) if per_head else (B, N, num_retrieved)
        require_shape("indices", indices, wanted, "[B, N, (J,) K]")
        chosen = whole_numbers("indices", indices if per_head else indices[:, :, None])
        require_chunk_numbers("indices", chosen, M)
    else:
        wanted_values = name == "torch" and not torch.compiler.is_compiling()
        end = bounds_of("num_candidates", num_candidates, B, N, query.device, wanted_values)
        start = bounds_of("first_candidate", first_candidate, B, N, query.device, wanted_values)
        most, least = max(end.greatest, default=0), min(start.least, default=0)
        if most > M:  # a message made in vain would make M a constant under torch.compile
            require(False, "num_candidates", most, f"at most M = {M} chunks")
        require(least >= 0, "first_candidate", least, "no negative chunk")
        if noise_seed is not None:
            require_shape("noise_seed", noise_seed, (B,), "[B]")
            noise_seed = _moved(whole_numbers("noise_seed", noise_seed), query.device)
        if name == "reference":
            noise = None if noise_seed is None else gumbel_noise(noise_seed, first_query, N, J, M)
            dtype = arithmetic_dtype(query, *segments)
            table = torch.cat([query.new_empty(B, 0, J, E, dtype=dtype), *(x.to(dtype) for x in segments)], 1)
            out = reference.select_chunks(
                query, table, num_retrieved, end.each, start.each, noise, scale, recency
            )
            return ChunkSelection(*(x if per_head else x[:, :, 0] for x in out))
        table_parts = [segment.detach() for segment in segments]
        bounds = start.each, end.each
        call = SearchCall(
            query.detach(), table_parts, num_retrieved, *bounds, noise_seed, scale, recency, first_query
        )
        if torch.compiler.is_compiling():
            chosen = _searched(*call, name == "triton")
        elif name == "triton":
            chosen = _search_in_kernels(call)
        else:
            chosen = search(call, start, end)

    if recency:
        given = bounds_of("num_candidates", num_candidates, B, N, query.device, False)
        out = _score_and_weigh(query, segments, chosen, scale, recency, given.each)
    else:
        out = _score_and_weigh(query, segments, chosen, scale)
    return ChunkSelection(*(x if per_head else x[:, :, 0] for x in out))


def triton_refuses(query: Tensor, segments: Sequence[Tensor], num_retrieved: int) -> str | None:
    """Why the kernels do not take these inputs; None if they do."""
    if problem := triton_problem(query.device):
        return problem
    for name, tensor in (("query is", query), *(("landmarks are", segment) for segment in segments)):
        if tensor.dtype not in KERNEL_DTYPES:
            return f"{name} {tensor.dtype}. Convert to float32, bfloat16 or float16, or use 'torch'"
    if num_retrieved > _MOST_RETRIEVED:
        return (
            f"num_retrieved is {num_retrieved}, and the kernels keep at most {_MOST_RETRIEVED}. Use 'torch'"
        )
    M = sum(segment.shape[1] for segment in segments)
    if M >= 2**31:
        return f"there are M = {M} landmarks, and the kernels number fewer than 2^31 chunks. Use 'torch'"
    return None


def bounds_of(
    argument: str, bound: Tensor | int, B: int, N: int, device: torch.device, wanted: bool
) -> Bounds:
    """The bounds; their values where ``wanted`` or checked, for which a GPU is waited for."""
    if isinstance(bound, int):
        values = [bound] * N if wanted else [bound]  # N values would make N a constant under torch.compile
        return Bounds(torch.full((1, 1), bound, device=device).expand(B, N), values, values)
    bound = torch.as_tensor(bound)
    if bound.dim() > 2 or (bound.dim() and tuple(bound.shape) != (B, N)[-bound.dim() :]):
        require(False, argument, tuple(bound.shape), f"shape [N] = ({N},) or [B, N]")
    bound = whole_numbers(argument, bound)
    each = _moved(bound, device).expand(B, N)
    return Bounds(each, *(values_of(bound, B, N) if wanted or values_are_checked(bound) else ([], [])))


def _moved(numbers: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for it (but for pinned memory, which may change before it is read)."""
    if numbers.device == device:
        return numbers
    return numbers.to(device, non_blocking=numbers.device.type == "cpu" and not numbers.is_pinned())


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


def _search_in_kernels(call: SearchCall) -> Tensor:
    from trailmark.ops.selection import triton_path

    return triton_path.search(call)


# Under torch.compile the search is an op that it does not look into, so that its graph stays whole.


@torch.library.custom_op("trailmark::select_chunks_search", mutates_args=())
@spelled_out
def _searched(call: SearchCall, in_kernels: bool) -> Tensor:
    call = call._replace(segments=list(call.segments))
    if in_kernels:
        return _search_in_kernels(call)
    B, N = call.start.shape
    start, end = (Bounds(x, *values_of(x, B, N)) for x in (call.start, call.end))
    return search(call, start, end).contiguous()


@_searched.register_fake
@spelled_out
def _(call: SearchCall, in_kernels: bool) -> Tensor:
    return call.query.new_empty((*call.query.shape[:3], call.num_retrieved), dtype=torch.int64)


def _in_slabs(query: Tensor, segments: list[Tensor], chosen: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """What ``row_scores`` takes, on a CPU where the landmarks gathered would be more than a slab of it."""
    B, _, J, K = chosen.shape
    many = chosen.numel() * query.shape[-1] > SLAB_ELEMENTS and query.device.type == "cpu"
    if not many or len(segments) != 1 or not segments[0].shape[1] or torch.compiler.is_compiling():
        return None
    one = B == 1 or is_shared(segments[0])
    table = segments[0][0] if one else segments[0]
    if not table.is_contiguous() and not table.requires_grad:
        return None  # a copy of the table may be larger than what is gathered
    rows = chosen * J + torch.arange(J)[:, None]
    if not one:
        rows = rows + torch.arange(B)[:, None, None, None] * (segments[0].shape[1] * J)
    rows = rows.masked_fill_(chosen < 0, -1).view(-1, K)
    return query.flatten(0, 2), table.flatten(0, -2), rows


def _score_and_weigh(
    query: Tensor,
    segments: list[Tensor],
    chosen: Tensor,
    scale: float,
    recency: float = 0,
    end: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(chosen, weights, scores) [B, N, J, K]; differentiable in query and landmarks."""
    dtype = arithmetic_dtype(query, *segments)
    missing = chosen < 0
    if in_slabs := _in_slabs(query, segments, chosen):
        scores = row_scores(*in_slabs).view(chosen.shape) * scale
    elif any(segment.shape[1] for segment in segments):
        picked = gather(segments, chosen.clamp(min=0), dtype)
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
    if end is not None:
        scores = scores - less_for_age(recency, end[..., None, None], chosen, dtype)
    scores = scores.masked_fill(missing, -torch.inf)
    # rows that selected nothing get zeros and zero gradients
    weights = scores.masked_fill(missing.all(-1, keepdim=True), 0).softmax(-1).masked_fill(missing, 0)
    return chosen, weights, scores
