"""Landmark Attention by the kernels beside it: tiles, tables of the layout, launches."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from trailmark.ops.arguments import require
from trailmark.ops.kernels import folded_scale
from trailmark.ops.landmark.call import LandmarkCall
from trailmark.ops.landmark.kernels import forward_kernel, keys_kernel, queries_kernel
from trailmark.ops.landmark.layout import LandmarkLayout

_MAX_TILE = 128  # rows of a tile, at most
_PROGRAMS = 256  # with fewer, the keys' kernel divides the query heads among more; the same on every device


class Tiles(NamedTuple):
    """How a kernel is cut up."""

    queries: int  # BLOCK_Q
    keys: int  # BLOCK_S: columns, of which one is for the landmark
    head: int  # BLOCK_D: D and what pads it
    per_chunk: int  # tiles of the longest chunk
    num_warps: int
    num_stages: int


# (most queries, most keys, warps, stages) of a tile by the bits of the dtype and the padded head size: the largest
# whose registers ptxas hardly spills for sm_90 (docs/kernels.md). Keys: 64, a chunk of 63 and its landmark, wherever
# they fit, because a chunk of several tiles is gone through twice. Float32 is multiplied without tensor cores.
_CUTS = {
    "forward": {
        (16, 64): (128, 128, 8, 3), (16, 128): (128, 64, 8, 3), (16, 256): (64, 64, 8, 2),
        (32, 64): (32, 64, 8, 1), (32, 128): (32, 64, 8, 1), (32, 256): (16, 16, 8, 1),
    },
    "queries": {
        (16, 64): (128, 128, 8, 3), (16, 128): (128, 64, 8, 3), (16, 256): (32, 64, 8, 1),
        (32, 64): (16, 64, 8, 1), (32, 128): (16, 64, 8, 1), (32, 256): (16, 16, 8, 1),
    },
    "keys": {
        (16, 64): (128, 64, 8, 2), (16, 128): (128, 64, 8, 2), (16, 256): (32, 64, 8, 1),
        (32, 64): (16, 64, 8, 1), (32, 128): (16, 64, 8, 1), (32, 256): (16, 16, 8, 1),
    },
}  # fmt: skip


def tiles(P: int, S: int, D: int, dtype: torch.dtype, kernel: str) -> Tiles:
    """For P queries and chunks of up to S tokens; ``kernel`` is "forward", "queries" or "keys".

    A table, not autotuning: the same shapes take the same tiles, so the same sums, everywhere.
    """
    head = max(16, triton.next_power_of_2(D))
    most_queries, most_keys, warps, stages = _CUTS[kernel][8 * dtype.itemsize, max(64, head)]
    queries = min(max(16, triton.next_power_of_2(P)), most_queries)
    keys = min(max(16, triton.next_power_of_2(S + 1)), most_keys)
    per_chunk = -(-(S + 1) // keys)
    if per_chunk > 1:
        keys = min(keys, 64)
        per_chunk = -(-(S + 1) // keys)
    return Tiles(queries, keys, head, per_chunk, warps, stages)


class Tables(NamedTuple):
    """A layout as the kernels read it (kernels.py)."""

    rows: Tensor  # int32 [4, B, P]
    chunks: Tensor  # int64 [B, C, 3]
    far: Tensor  # int64 [B, C, 3]
    ranks: Tensor  # int64 [B, C + 1]
    readers: Tensor  # int64 [B, C, 4]


def tables(layout: LandmarkLayout) -> Tables:
    """Made once for all layers that share the layout, on the device: nothing waits for it."""
    if "triton" not in layout.memo:
        layout.memo["triton"] = _tables(layout)
    remembered: Tables = layout.memo["triton"]
    return remembered


def _tables(layout: LandmarkLayout) -> Tables:
    starts, lengths, far, first, end = layout.starts, layout.lengths, layout.far, layout.first, layout.end
    query_starts, query_counts = layout.query_starts, layout.query_counts
    (B, C), P, device = starts.shape, layout.num_queries, starts.device
    number = torch.arange(C, device=device).repeat(B, 1)
    asking = query_counts > 0

    def marks(places: Tensor) -> Tensor:
        """[B, P]: the number of the chunk whose place it is, from 1; 0: nobody's."""
        at = torch.where(asking, places, P)
        return torch.zeros((B, P + 1), dtype=torch.int64, device=device).scatter_(1, at, number + 1)[:, :P]

    own = (marks(query_starts) - marks(query_starts + query_counts)).cumsum(1) - 1
    stands = own >= 0
    chunk = own.clamp(min=0)
    limit = lengths.gather(1, chunk)
    if layout.causal:
        slot = torch.arange(P, device=device) + (layout.query_slots - query_starts).gather(1, chunk)
        limit = torch.minimum(limit, slot + 1)
    limit = torch.where(stands, limit, 0) if layout.own else torch.zeros_like(limit)
    seen = (torch.where(stands, x.gather(1, chunk), 0) for x in (first, end))
    rows = torch.stack([own, limit, *seen]).int()

    ranks = torch.nn.functional.pad(far.cumsum(1), (1, 0))
    entries = torch.stack([starts, lengths, number], -1)
    at = torch.where(far, ranks[:, :C], C)[..., None].expand(B, C, 3)
    compact = torch.zeros((B, C + 1, 3), dtype=torch.int64, device=device).scatter_(1, at, entries)[:, :C]

    # chunk m is seen by the chunks c with first[c] <= m < end[c], which follow each other, and by itself
    exists = (lengths > 0) | (layout.landmarks >= 0)
    first, end = (torch.where(exists, x, C).contiguous() for x in (first, end))
    low, high = torch.searchsorted(end, number, right=True), torch.searchsorted(first, number, right=True) - 1
    low, high = (torch.where(far, x, number) for x in (low, high))
    begins = torch.where(asking, query_starts, P).flip(1).cummin(1).values.flip(1)
    ends = torch.where(asking, query_starts + query_counts, 0).cummax(1).values
    low, high = begins.gather(1, torch.minimum(low, number)), ends.gather(1, torch.maximum(high, number))
    count = torch.where(low == query_starts, query_counts, 0)
    return Tables(
        rows,
        torch.stack([starts, lengths, far.long()], -1),
        compact.contiguous(),
        ranks,
        torch.stack([low, high, layout.query_slots, count], -1),
    )


def forward(call: LandmarkCall, keep: bool = True, wide: bool | None = None) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of each row and head (base e), float32 [B, P, H].

    ``keep``: a backward follows; what it will refuse is refused here. ``wide``: 64 bits for the offsets inside tiles;
    None: where they need them.
    """
    q, k, v, layout, scale = call
    B, P, H, D = q.shape
    if keep:
        _programs_of_keys(k, layout, tiles(P, layout.max_length, D, q.dtype, "keys"))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((B, P, H), dtype=torch.float32, device=q.device)
    if out.numel() == 0 or layout.num_chunks == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    q, k, v = (_rows_whole(x) for x in (q, k, v))
    made = tables(layout)
    cut = tiles(P, layout.max_length, D, q.dtype, "forward")
    count = -(-P // cut.queries)
    with torch.cuda.device_of(q):
        forward_kernel[(B * H * count,)](
            q, k, v, made.rows, made.chunks, made.far, made.ranks, out, lse,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            folded_scale(scale, q.dtype), B, P, H, layout.num_chunks, count,
            **_constants(q, k, layout, cut, needs_wide_offsets(q, k, v) if wide is None else wide),
        )  # fmt: skip
    return out, lse


def backward(
    grad: Tensor,  # [B, P, H, D]
    lse_grad: Tensor | None,  # [B, P, H]
    call: LandmarkCall,
    out: Tensor,
    lse: Tensor,
    wide: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    q, k, v, layout, scale = call
    (B, P, H, D), (T, J), C = q.shape, k.shape[1:3], layout.num_chunks
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.numel() == 0 or C == 0:
        return dq.zero_(), torch.zeros_like(k), torch.zeros_like(v)
    cut_of_keys = tiles(P, layout.max_length, D, q.dtype, "keys")
    programs = _programs_of_keys(k, layout, cut_of_keys)
    # the kernels multiply these by weights of 0, which keeps NaN
    alone = lse == -torch.inf
    grad = grad.masked_fill(alone[..., None], 0)
    grad, q, k, v = (_rows_whole(x) for x in (grad, q, k, v))
    if lse_grad is not None:
        lse_grad = lse_grad.float().masked_fill(alone, 0).contiguous()
    made = tables(layout)
    cut = tiles(P, layout.max_length, D, q.dtype, "queries")
    count = -(-P // cut.queries)
    stats = torch.empty((2, B, H, P), dtype=torch.float32, device=q.device)
    wide = needs_wide_offsets(grad, q, k, v) if wide is None else wide
    steps = [step for x in (grad, q, k, v) for step in x.stride()[:3]]
    with torch.cuda.device_of(q):
        queries_kernel[(B * H * count,)](
            grad, lse_grad, q, k, v, out.contiguous(), lse, made.rows, made.chunks, made.far, made.ranks, dq, stats,
            *steps, folded_scale(scale, q.dtype), scale, B, P, H, C, count,
            **_constants(q, k, layout, cut, wide), HAS_LSE_GRAD=lse_grad is not None,
        )  # fmt: skip

    cut = cut_of_keys
    per_part = -(-(H // J) // _parts(programs, H // J))
    parts = -(-(H // J) // per_part)
    # what stands in no chunk, and landmarks' values, keep these zeros
    dk, dv = (
        torch.zeros(k.shape, dtype=k.dtype, device=k.device)
        if parts == 1
        else torch.zeros((parts, *k.shape), dtype=torch.float32, device=k.device)
        for _ in range(2)
    )
    with torch.cuda.device_of(q):
        keys_kernel[(programs * parts,)](
            grad, q, k, v, made.rows, made.chunks, made.readers, stats, dk, dv,
            *steps, folded_scale(scale, q.dtype), scale, B, P, T, H, C, cut.per_chunk, parts, per_part,
            **_constants(q, k, layout, cut, wide),
        )  # fmt: skip
    if parts > 1:
        dk, dv = (x.sum(0).to(k.dtype) for x in (dk, dv))
    return dq, dk, dv


def needs_wide_offsets(*tensors: Tensor) -> bool:
    """Whether offsets inside a tile of rows [B, T, H, D] pass 2^31. Those of the tiles are 64 bits wide always."""
    return max(max(abs(x.stride(1)), math.prod(x.shape[2:])) for x in tensors) * _MAX_TILE >= 2**31


def _rows_whole(x: Tensor) -> Tensor:
    """The numbers of a head side by side; anything else may stand anywhere."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _programs_of_keys(k: Tensor, layout: LandmarkLayout, cut: Tiles) -> int:
    """Of the keys' kernel, a part of the query heads each; 2^31 are more than a grid has."""
    B, _, J, _ = k.shape
    programs = B * J * layout.num_chunks * cut.per_chunk
    require(
        programs < 2**31,
        "is_landmark",
        f"{B} x {layout.num_chunks:,} chunks, the longest of {layout.max_length:,} tokens, which with {J} key/value "
        f"heads take {programs:,}",
        "chunks whose gradients take less than 2^31 programs",
        "Take implementation='torch', or break the longest chunk up.",
    )
    return programs


def _parts(programs: int, G: int) -> int:
    """Parts that the G query heads of a key/value head are divided into, so that few chunks fill the device too."""
    return max(1, min(G, _PROGRAMS // programs))


def _constants(q: Tensor, k: Tensor, layout: LandmarkLayout, cut: Tiles, wide: bool) -> dict[str, int | bool]:
    return {
        "G": q.shape[2] // k.shape[2],
        "D": q.shape[3],
        "BLOCK_Q": cut.queries,
        "BLOCK_S": cut.keys,
        "BLOCK_D": cut.head,
        "MANY": cut.per_chunk > 1,
        "CAUSAL": layout.causal,
        "EXACT": q.dtype == torch.float32,
        "WIDE": wide,
        "num_warps": cut.num_warps,
        "num_stages": cut.num_stages,
    }
