"""Causal self-attention over a sliding window of positions, in blocks, with ALiBi."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trailmark.ops import reference
from trailmark.ops.arguments import (
    arithmetic_dtype,
    require,
    require_grouped_heads,
    require_implementation,
    require_shape,
    whole_numbers,
    without_autocast,
)
from trailmark.ops.block_attention import block_attention

# Queries of one block. Each block attends to itself and the window - 1 keys before it, so a block much
# smaller than the window repeats keys, and a much larger one computes scores that the mask throws away.
_MIN_BLOCK, _MAX_BLOCK = 32, 256


@without_autocast
def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    positions: tuple[Tensor, Tensor] | None = None,
    document_ids: tuple[Tensor, Tensor] | Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Each position attends to itself and to the ``window - 1`` positions before it.

    .. math::
        O_i = \sum_{j = \max(0, i - W + 1)}^{i}
              \mathrm{softmax}_j\!\left(\mathrm{scale} \cdot q_i^\top k_j - a_h (i - j)\right) v_j

    with ALiBi slopes :math:`a_h` (Press et al., 2022) where given. The ``"torch"`` path cuts the positions
    into blocks over ``scaled_dot_product_attention``: time and extra memory O(T W), never O(T P).

    Args:
        q: [B, T, H, D].
        k, v: [B, P, J, D], P >= T; query head h uses key/value head h // (H // J).
        window: W >= 1, the position itself included. None: all positions before.
        positions: int64 ([B, T], [B, P]), negative = absent (such a query gives zeros). None: the queries are
            the last T of P consecutive positions. Given, keys that are consecutive but for absent ones at a
            row's ends, with the queries the last T, cost the same; any other order and gaps are exact too,
            with time O(T P) and memory O(P).
        document_ids: int64 ([B, T], [B, P]), or one [B, P] for both: no attention across documents.
        alibi_slopes: [H]; see :func:`alibi_slopes`.
        scale: None is D ** -0.5.
        return_lse: also return the log-sum-exp of the scores, [B, T, H], float32 or wider, -inf where empty.
        implementation: None, "reference" or "torch".

    Returns:
        [B, T, H, D] in the dtype of q, zeros where no key is visible; with ``return_lse`` the pair.

    Raises:
        ValueError: for shapes that do not fit together.
    """
    require_implementation(implementation, ("reference", "torch"))
    require(q.dim() == 4, "q", tuple(q.shape), "shape [B, T, H, D]")
    require(k.dim() == 4, "k", tuple(k.shape), "shape [B, P, J, D]")
    B, T, H, D = q.shape
    P, J = k.shape[1:3]
    require_shape("k", k, (B, P, J, D), "[B, P, J, D]")
    require_shape("v", v, (B, P, J, D), "[B, P, J, D]")
    require(P >= T, "k", f"{P} keys", f"at least as many keys as the {T} queries")
    require_grouped_heads(H, J)
    require(window is None or window >= 1, "window", window, "None or at least 1 (the position itself)")
    if positions is not None:
        require_shape("positions[0]", positions[0], (B, T), "[B, T]")
        require_shape("positions[1]", positions[1], (B, P), "[B, P]")
        positions = whole_numbers("positions[0]", positions[0]), whole_numbers("positions[1]", positions[1])
    if isinstance(document_ids, Tensor):
        require_shape("document_ids", document_ids, (B, P), "[B, P]")
        document_ids = document_ids[:, P - T :], document_ids
    if document_ids is not None:
        require_shape("document_ids[0]", document_ids[0], (B, T), "[B, T]")
        require_shape("document_ids[1]", document_ids[1], (B, P), "[B, P]")
    if alibi_slopes is not None:
        require_shape("alibi_slopes", alibi_slopes, (H,), "[H]")
    scale = D**-0.5 if scale is None else scale

    if implementation == "reference":
        out, lse = reference.sliding_window_attention(
            q, k, v, window, positions, document_ids, alibi_slopes, scale
        )
        return (out, lse) if return_lse else out
    if T == 1 and document_ids is None and not return_lse:
        return _one_query(q, k, v, window, positions, alibi_slopes, scale)
    if window is not None and window < P and document_ids is None and not return_lse and T > 0:
        if positions is None:
            return _banded(q, k, v, window, alibi_slopes, scale)
        if (leading := _leading_absent(*positions)) is not None:
            out = _banded(q, k, v, window, alibi_slopes, scale, leading)
            return out.masked_fill((positions[0] < 0)[..., None, None], 0)
    return _by_query_block(q, k, v, window, positions, document_ids, alibi_slopes, scale, return_lse)


def alibi_slopes(num_heads: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The geometric slopes 2 ** (-8 (h + 1) / H), shape [H], for any H, as DRT's published code has them."""
    require(num_heads >= 1, "num_heads", num_heads, "at least 1")
    return torch.exp2(-8 * torch.arange(1, num_heads + 1, dtype=torch.float64) / num_heads).to(dtype)


def _one_query(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    positions: tuple[Tensor, Tensor] | None,
    slopes: Tensor | None,
    scale: float,
) -> Tensor:
    """Decoding: one position against keys in any order."""
    H, P, dtype = q.shape[2], k.shape[1], arithmetic_dtype(q, k, v)
    mask = empty = None
    if positions is None and window is not None and window < P:
        k, v, P = k[:, P - window :], v[:, P - window :], window
    if positions is not None or slopes is not None:
        if positions is None:
            distance = torch.arange(P - 1, -1, -1, device=q.device)[None]
            visible = distance >= 0
        else:
            query, key = positions
            distance = query - key  # [B, P]
            visible = (key >= 0) & (distance >= 0) & (query >= 0)
            if window is not None:
                visible &= distance < window
            if not bool(visible.all()):
                empty = ~visible.any(1)
                visible = visible | empty[:, None]  # such a row is set to zero: no NaN either way
        of_heads = None if slopes is None else slopes[:, None, None]
        mask = _additive_mask(visible[:, None, None], distance[:, None, None], of_heads, dtype)
        mask = mask.expand(-1, H, 1, P)
    queries, keys, values = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        queries, keys, values, mask, scale=scale, enable_gqa=k.shape[2] != H
    ).transpose(1, 2)
    return (out if empty is None else out.masked_fill(empty[:, None, None, None], 0)).to(q.dtype)


def _leading_absent(query: Tensor, key: Tensor) -> Tensor | None:
    """[B] absent keys before each row's first, if the others are consecutive and the queries are the last."""
    T, P = query.shape[1], key.shape[1]
    present = key >= 0
    first = present.int().argmax(1)
    place = torch.arange(P, device=key.device)
    shift = key.gather(1, first[:, None]) - first[:, None]
    end = (first + present.sum(1))[:, None]
    inside = (place >= first[:, None]) & (place < end)
    consecutive = torch.where(inside, key == place + shift, ~present).all()
    return (
        first
        if bool(consecutive) and torch.equal(query.clamp(min=-1), key[:, P - T :].clamp(min=-1))
        else None
    )


def _banded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    slopes: Tensor | None,
    scale: float,
    leading: Tensor | None = None,
) -> Tensor:
    """Consecutive positions: block i of C queries sees the C + window - 1 keys that end with its own.

    ``leading`` [B]: so many of each row's keys are absent at its beginning.
    """
    B, T, H, D = q.shape
    P, J = k.shape[1:3]
    C = min(max(window - 1, _MIN_BLOCK), _MAX_BLOCK, T)
    blocks = -(-T // C)
    back = -(-(window - 1) // C)  # blocks of keys before a block's own
    after = blocks * C - T
    far = max(0, P - T - back * C)  # keys that no query sees
    k, v = k[:, far:], v[:, far:]
    absent = back * C - (k.shape[1] - T)  # keys before the first that exists
    missing = None if leading is None else absent + (leading - far).clamp(min=0)
    most = absent if missing is None or not B else int(missing.max())

    def key_blocks(x: Tensor) -> Tensor:  # [B, P', J, D] -> [B, blocks, (back + 1) * C, J, D]
        if absent or after:
            x = F.pad(x, (0, 0, 0, 0, absent, after))
        x = x.reshape(B, back + blocks, C, J, D)
        return torch.cat([x[:, i : i + blocks] for i in range(back + 1)], dim=2)

    q = F.pad(q, (0, 0, 0, 0, 0, after)) if after else q
    queries = q.reshape(B, blocks, C, H, D)
    keys, values = key_blocks(k), key_blocks(v)
    key = torch.arange((back + 1) * C, device=q.device)
    distance = torch.arange(C, device=q.device)[:, None] + back * C - key
    dtype = arithmetic_dtype(q, k, v)
    mask = _additive_mask((distance >= 0) & (distance < window), distance, slopes, dtype)
    # only the blocks whose reach goes before the first key need a mask of their own
    early = min(-(-most // C), blocks)
    parts = []
    for block in range(early):
        if missing is None:
            own = mask.masked_fill(key < absent - block * C, -torch.inf)
        else:  # [B, H or 1, C, keys]; a query that is absent itself sees itself, so that nothing is NaN
            unseen = (key < missing[:, None] - block * C)[:, None, None] & (distance != 0)
            own = mask.view(-1, *mask.shape[-2:]).masked_fill(unseen, -torch.inf)
        parts.append(
            block_attention(queries[:, block], keys[:, block], values[:, block], own, scale)[:, None]
        )
    if blocks > early:
        rest = [x[:, early:].flatten(0, 1) if early else x.flatten(0, 1) for x in (queries, keys, values)]
        out = block_attention(rest[0], rest[1], rest[2], mask, scale)
        parts.append(out.view(B, blocks - early, C, H, D))
    out = (torch.cat(parts, dim=1) if early else parts[0]).reshape(B, blocks * C, H, D)
    return out[:, :T] if after else out


def _by_query_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    positions: tuple[Tensor, Tensor] | None,
    document_ids: tuple[Tensor, Tensor] | None,
    slopes: Tensor | None,
    scale: float,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Any positions and documents: a block of queries against every key it could see."""
    T, P, dtype = q.shape[1], k.shape[1], arithmetic_dtype(q, k, v)
    # consecutive positions are those of every row: one mask [1, ...] serves the batch
    key_position = torch.arange(P, device=q.device)[None] if positions is None else positions[1]
    query_position = key_position[:, P - T :] if positions is None else positions[0]
    outs, lses = [], []
    for first in range(0, T, _MAX_BLOCK):
        rows = slice(first, min(first + _MAX_BLOCK, T))
        start, stop = 0, P
        if positions is None:  # consecutive: keys outside the band cannot be visible
            start = 0 if window is None else max(0, P - T + rows.start - window + 1)
            stop = P - T + rows.stop
        distance = query_position[:, rows, None] - key_position[:, None, start:stop]  # [B or 1, c, p]
        visible = (distance >= 0) & (key_position[:, None, start:stop] >= 0)
        visible &= query_position[:, rows, None] >= 0
        if window is not None:
            visible &= distance < window
        if document_ids is not None:
            visible = visible & (document_ids[0][:, rows, None] == document_ids[1][:, None, start:stop])
        empty = ~visible.any(-1)[:, None, :, None]  # [B or 1, 1, c, 1]
        # a row that sees nothing is let see everything and then set to zero: no NaN either way
        shown = visible[:, None] | empty
        of_heads = None if slopes is None else slopes[:, None, None]
        mask = _additive_mask(shown, distance[:, None], of_heads, dtype)
        queries, keys = q[:, rows], k[:, start:stop]
        out = block_attention(queries, keys, v[:, start:stop], mask, scale)
        outs.append(out.masked_fill(empty.transpose(1, 2), 0))
        if return_lse:
            keys = keys.to(dtype).repeat_interleave(q.shape[2] // k.shape[2], dim=2).transpose(1, 2)
            scores = queries.to(dtype).transpose(1, 2) @ keys.transpose(2, 3) * scale + mask
            lse = scores.logsumexp(-1, keepdim=True).masked_fill(empty, -torch.inf)
            lses.append(lse[..., 0].transpose(1, 2))
    out = torch.cat(outs, dim=1) if outs else torch.zeros_like(q)
    if not return_lse:
        return out
    return out, torch.cat(lses, dim=1) if lses else q.new_zeros(q.shape[:3], dtype=dtype)


def _additive_mask(visible: Tensor, distance: Tensor, slopes: Tensor | None, dtype: torch.dtype) -> Tensor:
    """0 or the ALiBi term where visible, -inf elsewhere; [(B,) (H,) c, p] of ``dtype``."""
    if slopes is None:
        bias = torch.zeros((), dtype=dtype, device=visible.device)
    else:
        slopes = slopes.to(device=visible.device, dtype=dtype)
        bias = -(slopes.view(-1, 1, 1) * distance.to(dtype))
    return torch.where(visible, bias, -torch.inf)
