"""Grouped Cross-Attention by the kernels beside it: tiles, the inverted index, launches."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from trailmark.ops.gca.call import CrossAttentionCall
from trailmark.ops.gca.kernels import (
    add_parts_kernel,
    forward_kernel,
    keys_kernel,
    queries_kernel,
)
from trailmark.ops.kernels import folded_scale

# A memory chunk's readers are taken in parts of about this many rows; a part is one program. Popular chunks then
# do not keep the rest of the device waiting, and few parts have to be added up.
_ROWS_OF_A_PART = 4096
_PROGRAMS = 256  # with fewer, the forward divides the retrieved chunks among more; the same on every device
_MAX_TILE = 128  # rows or keys of a tile, at most; a chunk of more keys is walked in tiles


class Tiles(NamedTuple):
    """How a kernel is cut up."""

    rows: int  # BLOCK_R
    keys: int  # BLOCK_S
    head: int  # BLOCK_D: D and what pads it
    per_chunk: int  # TILES: of keys
    num_warps: int
    num_stages: int


# (most rows, most keys, warps, stages) of a tile by the bits of the dtype and the padded head size: the largest
# whose registers ptxas hardly spills for sm_90 (docs/kernels.md). Float32 is multiplied without tensor cores.
_CUTS = {
    "forward": {
        (16, 64): (128, 128, 4, 2), (16, 128): (128, 64, 4, 2), (16, 256): (32, 64, 8, 1),
        (32, 64): (16, 32, 4, 1), (32, 128): (16, 16, 4, 1), (32, 256): (16, 16, 8, 1),
    },
    "queries": {
        (16, 64): (128, 128, 4, 2), (16, 128): (128, 64, 8, 2), (16, 256): (32, 64, 8, 1),
        (32, 64): (32, 64, 8, 1), (32, 128): (32, 64, 8, 1), (32, 256): (16, 32, 8, 1),
    },
    "keys": {
        (16, 64): (64, 64, 8, 2), (16, 128): (32, 64, 8, 2), (16, 256): (64, 32, 8, 1),
        (32, 64): (16, 32, 4, 1), (32, 128): (16, 16, 4, 1), (32, 256): (16, 16, 8, 1),
    },
}  # fmt: skip


def tiles(rows: int, S: int, D: int, dtype: torch.dtype, kernel: str) -> Tiles:
    """For ``rows`` = R * G folded rows; ``kernel`` is "forward", "queries" or "keys".

    A table, not autotuning: the same shapes take the same tiles, so the same sums, everywhere.
    """
    head = max(16, triton.next_power_of_2(D))
    most_rows, most_keys, warps, stages = _CUTS[kernel][8 * dtype.itemsize, max(64, head)]
    # the keys' kernel fills its tiles with rows of several readers
    block = most_rows if kernel == "keys" else min(max(16, triton.next_power_of_2(rows)), most_rows)
    keys = min(max(16, triton.next_power_of_2(S)), most_keys)
    if keys < S:
        keys = min(keys, 64)
    if block * keys > 64 * 64:
        warps = 8
    return Tiles(block, keys, head, -(-S // keys), warps, stages)


def needs_wide_offsets(q: Tensor, k: Tensor, v: Tensor, *like_q: Tensor) -> bool:
    """Whether offsets inside one reading or memory chunk pass 2^31. Those of the chunks are 64 bits wide always."""

    def reach(x: Tensor) -> int:  # of the last three dimensions
        return sum((size - 1) * abs(step) for size, step in zip(x.shape[2:], x.stride()[2:], strict=True))

    # tiles are read whole, masked: the offsets of what does not exist are computed too
    slack = sum(_MAX_TILE * abs(step) for x in (q, k, v, *like_q) for step in x.stride()[2:])
    return max(reach(x) for x in (q, k, v, *like_q)) + slack >= 2**31


def forward(call: CrossAttentionCall, keep: bool, wide: bool | None = None) -> tuple[Tensor, Tensor]:
    """The output, and with ``keep`` what the backward needs of each row and chunk; else an empty tensor.

    That is [1, B, N, J, K, R * G], the log-sum-exp (base 2); of float32 [2, ...], the largest score and the sum. With
    something beside K is 1, for all that is read, the shares of what is read and of what is beside follow, and the
    output is float32: the backward needs it unrounded.

    ``wide``: 64 bits for the offsets inside tiles; None: where they need them.
    """
    q, k, v, indices, weights, lengths, beside, _, off_by_one, scale = call
    (B, N, R, H, D), (M, S, J), K = q.shape, k.shape[1:4], indices.shape[3]
    G, joint = H // J, beside is not None
    out = torch.empty(q.shape, dtype=out_dtype(call), device=q.device)
    lse = q.new_empty(kept_shape(call) if keep else (0,), dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    if M == 0:
        return out.zero_(), lse
    cut = tiles(R * G, S, D, q.dtype, "forward")
    programs = B * N * J * -(-R * G // cut.rows)
    per_part = -(-K // _parts(programs, K))
    parts = -(-K // per_part)
    # weighted sums over chunks are simply added; each softmax over some of them is joined with the others
    into = out if parts == 1 and not joint else q.new_empty((parts, *q.shape), dtype=torch.float32)
    of_parts = q.new_empty((parts, B, N, J, 2, R * G), dtype=torch.float32) if joint else lse
    with torch.cuda.device_of(q):
        forward_kernel[(programs * parts,)](
            q, k, v, indices, weights, lengths, into, of_parts,
            *q.stride(), *k.stride(), *v.stride(), *indices.stride(), *weights.stride(), *_steps(lengths),
            out.numel(), *out.stride()[:4],
            B * N * J * R * G if joint else lse[0].numel() if keep else 0, folded_scale(scale, q.dtype),
            N, R, J, M, K, S, parts, per_part,
            **_constants(q, k, v, K, cut, wide, out), **_flags(call), OFF_BY_ONE=off_by_one and not joint,
            KEEP=keep and not joint,
        )  # fmt: skip
    if joint:
        return _joined(call, into, of_parts, lse)
    return (out if parts == 1 else into.sum(0).to(q.dtype)), lse


def out_dtype(call: CrossAttentionCall) -> torch.dtype:
    """Of what the forward returns."""
    return call.q.dtype if call.beside is None else torch.float32


def kept_shape(call: CrossAttentionCall) -> tuple[int, ...]:
    """Of what the backward needs, in float32; see :func:`forward`."""
    (B, N, R, H, _), (_, _, J, K) = call.q.shape, call.indices.shape
    numbers = 2 if call.q.dtype == torch.float32 else 1
    if call.beside is not None:
        numbers, K = numbers + 2, 1
    return numbers, B, N, J, K, H // J * R


def _joined(call: CrossAttentionCall, outs: Tensor, of_parts: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """One softmax of what each part read and of what is beside; ``kept`` is filled, if it is not empty.

    In float64: what is beside may stand far above the scores, and there float32 would round what is left of them.

    Args:
        outs: [P, B, N, R, H, D]. of_parts: [P, B, N, J, 2, R * G], the largest score and the sum of exponentials.
    """
    q, beside, beside_lse = call.q, call.beside, call.beside_lse
    assert beside is not None
    assert beside_lse is not None
    exact = q.dtype == torch.float32
    top, total = of_parts.double().unbind(-2)
    base = 1.0 if exact else math.log2(math.e)
    read = top * (1 / base) + total.log()  # natural: -inf where nothing was read
    null = _fold_rows(beside_lse.double(), top.shape[3])
    everything = torch.logaddexp(read.logsumexp(0), null)
    shares = (read - everything).exp().float()  # [P, B, N, J, R * G]
    share = shares.sum(0)
    of_rows = _unfold_rows(shares, q)[..., None]
    out = (outs * of_rows).sum(0).addcmul_(_unfold_rows(share, q)[..., None], beside.float(), value=-1)
    if kept.numel():
        largest = top.amax(0)
        # where nothing was read no score counts
        numbers = [everything * base]
        if exact:
            unread = largest == -torch.inf
            numbers = [
                largest.masked_fill(unread, torch.inf),
                (everything - largest).exp().masked_fill(unread, 1),
            ]
        torch.stack([x.float() for x in (*numbers, share, (null - everything).exp())], out=kept[..., 0, :])
    return out, kept


def _fold_rows(x: Tensor, J: int) -> Tensor:
    """[B, N, R, H] -> [B, N, J, R * G]."""
    return x.unflatten(-1, (J, -1)).transpose(2, 3).flatten(3)


def _unfold_rows(x: Tensor, q: Tensor) -> Tensor:
    """[.., J, R * G] -> [.., R, H]."""
    return x.unflatten(-1, (q.shape[2], -1)).transpose(-3, -2).flatten(-2)


def backward(
    grad: Tensor,  # [B, N, R, H, D]
    call: CrossAttentionCall,
    lse: Tensor,
    out: Tensor | None = None,
    of_memory: bool = True,
    wide: bool | None = None,
    readers_of_a_part: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, weights, beside and its log-sum-exp; without ``of_memory`` those of k and v are empty.

    ``out``: what the forward returned, needed with something beside.
    """
    q, k, v, indices, weights, lengths, beside, beside_lse, _, scale = call
    (B, N, R, H, D), (M, S, J), K = q.shape, k.shape[1:4], indices.shape[3]
    G, joint = H // J, beside is not None
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.empty(x.shape if of_memory else (0,), dtype=x.dtype, device=q.device) for x in (k, v))
    of_beside, of_lse = (q.new_zeros(0) if x is None else torch.zeros_like(x) for x in (beside, beside_lse))
    if q.numel() == 0 or M == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), torch.zeros_like(weights), of_beside, of_lse
    delta = gained_beside = lse  # unused
    if beside is not None and beside_lse is not None:
        assert out is not None
        gained = (grad * out).sum(-1)  # [B, N, R, H]
        gained_beside = _fold_rows((grad * beside).sum(-1), J)
        delta = (_fold_rows(gained, J) + gained_beside).contiguous()
        share, own = (_unfold_rows(x, q) for x in lse[-2:, ..., 0, :])
        of_beside = (grad * share[..., None]).neg_().to(beside.dtype)
        grad = grad.to(q.dtype)
        of_lse = (own * gained).neg_().to(beside_lse.dtype)
    cut = tiles(R * G, S, D, q.dtype, "queries")
    blocks = -(-R * G // cut.rows)
    flags = _flags(call)
    own_weights = flags["PER_QUERY_HEAD"]
    of_dw = (B, N, J, R * G) if joint else (0,) if own_weights else (B, N, J, K, blocks)
    dw = q.new_zeros(of_dw, dtype=torch.float32)
    inner = q.new_empty((2 if joint else 1, B, N, J, K, R * G), dtype=torch.float32)
    with torch.cuda.device_of(q):
        queries_kernel[(B * N * J * blocks,)](
            grad, q, k, v, indices, weights, lengths, lse, delta, dq, dw, inner,
            *grad.stride(), *q.stride(), *k.stride(), *v.stride(), *indices.stride(), *weights.stride(),
            *_steps(lengths), *dq.stride()[:4],
            lse[0].numel(), folded_scale(scale, q.dtype), scale, N, R, J, M, K, S,
            **_constants(q, k, v, K, cut, wide, grad, dq), **flags,
        )  # fmt: skip

    gains = inner[0]  # [B, N, J, K, R * G]; nothing was written where nothing is selected
    if joint:
        # D was taken from the output, which was multiplied in the dtype of q. Were it exact, the gains would add up to
        # the share of what is beside, times D - gained_beside: it is off by as much as they do not.
        off = dw - lse[-1, ..., 0, :] * (delta - gained_beside)
        gains.addcmul_(inner[1], off[:, :, :, None], value=-1)
    if own_weights:
        of_heads = gains.view(B, N, J, K, R, G).sum(4).transpose(3, 4)  # [B, N, J, G, K]
        dw = of_heads.masked_fill((indices < 0)[:, :, :, None], 0).flatten(2, 3)
    elif joint:
        dw = gains.sum(-1).masked_fill(indices < 0, 0)
    else:
        dw = dw.sum(-1)
    dw = dw.to(weights.dtype)
    if not of_memory:
        return dq, dk, dv, dw, of_beside, of_lse
    per_head = _per_head(indices)
    selections = B * N * K * (J if per_head else 1)
    if readers_of_a_part is None:
        readers_of_a_part = _readers_of_a_part(q, k, selections, per_head, _ROWS_OF_A_PART)
    table = invert(indices, M, readers_of_a_part)
    cut = tiles(R * G, S, D, q.dtype, "keys")
    heads = 1 if per_head else J
    parts = (2 * selections // table.per_part, S, heads, D)
    dk_parts, dv_parts = (torch.empty(parts, dtype=torch.float32, device=q.device) for _ in range(2))
    constants = _constants(q, k, v, K, cut, wide, grad)
    del constants["K_PAD"]
    with torch.cuda.device_of(q):
        keys_kernel[(table.chunk_of.numel() * heads * cut.per_chunk,)](
            grad, q, k, v, weights, lengths, lse, delta if joint else inner,
            table.readers, table.starts, table.ends, table.slots_before, table.chunk_of, dk, dv, dk_parts, dv_parts,
            *grad.stride(), *q.stride(), *k.stride(), *v.stride(), *weights.stride(), *_steps(lengths),
            lse[0].numel(), folded_scale(scale, q.dtype), scale, N, R, J, M, K, S, table.ends.numel(), table.per_part,
            **constants, **flags, PER_HEAD=per_head,
        )  # fmt: skip
    if dk_parts.numel():
        width, block = math.prod(parts[1:]), 4096
        with torch.cuda.device_of(q):
            add_parts_kernel[(table.ends.numel() * -(-width // block),)](
                table.ends, table.slots_before, dk, dv, dk_parts, dv_parts, J, width,
                D=D, BLOCK=block, PER_HEAD=per_head,
            )  # fmt: skip
    return dq, dk, dv, dw, of_beside, of_lse


class Readers(NamedTuple):
    """The inverted index: which reading chunks (and slots) use each memory chunk, in ascending order.

    Memory chunks are counted c = b * M + m, or (b * M + m) * J + j where heads select for themselves; readers
    are numbers of elements of ``indices`` [B, N, (J,) K]. All on the device: nothing waits for it.
    """

    readers: Tensor  # [E] sorted by memory chunk; -1 selections come last and belong to none
    starts: Tensor  # [C + 1] where each memory chunk's readers begin
    ends: (
        Tensor  # [C] parts of the chunks up to this one; a chunk without readers has one, which writes zeros
    )
    slots_before: Tensor  # [C] parts, of chunks with several, before this chunk
    chunk_of: Tensor  # [P] the chunk of each part; C: of none
    per_part: int  # readers of a part, at most


def _per_head(indices: Tensor) -> bool:
    """Whether key/value heads select for themselves; what one selection for all was expanded from has stride 0."""
    return indices.shape[2] > 1 and indices.stride(2) != 0


def invert(indices: Tensor, M: int, per_part: int) -> Readers:
    """For indices [B, N, J, K]; of stride 0 over J they are those of all heads."""
    B, _, J, _ = indices.shape
    per_head = _per_head(indices)
    own = indices if per_head else indices[:, :, :1]
    chunk = torch.arange(B, device=indices.device)[:, None, None, None] * M + own
    C = B * M
    if per_head:
        chunk, C = chunk * J + torch.arange(J, device=indices.device)[:, None], C * J
    chunk = torch.where(own < 0, C, chunk).flatten()
    chunk, readers = chunk.sort(stable=True)
    starts = torch.searchsorted(chunk, torch.arange(C + 1, device=indices.device))
    counts = starts.diff()
    parts = ((counts + per_part - 1) // per_part).clamp(min=1)
    ends = parts.cumsum(0)
    several = torch.where(parts > 1, parts, 0)
    most = C + readers.numel() // per_part
    chunk_of = torch.searchsorted(ends, torch.arange(most, device=indices.device), right=True)
    return Readers(readers, starts, ends, several.cumsum(0) - several, chunk_of, per_part)


def _parts(programs: int, K: int) -> int:
    """Parts that the retrieved chunks are divided into, so that few queries (decoding) fill the device too."""
    return max(1, min(K, _PROGRAMS // programs))


def _readers_of_a_part(q: Tensor, k: Tensor, selections: int, per_head: bool, rows: int) -> int:
    """So many that the sums of parts, of chunks with several, take at most half of what k or q takes in bfloat16."""
    (B, M, S, J, D), (R, H) = k.shape, q.shape[2:4]
    heads, chunks = (1, B * M * J) if per_head else (J, B * M)
    most = max(1, chunks // 4, q.numel() // (4 * S * heads * D))  # parts
    return max(1, rows // (R * (H // J)), -(-2 * selections // most))


def _steps(lengths: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if lengths is None else lengths.stride()


def _flags(call: CrossAttentionCall) -> dict[str, bool]:
    """What is there: lengths, weights of query heads, something beside."""
    return {
        "HAS_LENGTHS": call.lengths is not None,
        "PER_QUERY_HEAD": call.weights.shape[2] != call.k.shape[3],
        "JOINT": call.beside is not None,
    }


def _constants(
    q: Tensor, k: Tensor, v: Tensor, K: int, cut: Tiles, wide: bool | None, *like_q: Tensor
) -> dict[str, int | bool]:
    return {
        "G": q.shape[3] // k.shape[3],
        "D": q.shape[4],
        "K_PAD": triton.next_power_of_2(K),
        "BLOCK_R": cut.rows,
        "BLOCK_S": cut.keys,
        "BLOCK_D": cut.head,
        "TILES": cut.per_chunk,
        "EXACT": q.dtype == torch.float32,
        "WIDE": needs_wide_offsets(q, k, v, *like_q) if wide is None else wide,
        "num_warps": cut.num_warps,
        "num_stages": cut.num_stages,
    }
