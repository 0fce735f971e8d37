"""Attention to a window in PyTorch: blocks of queries over ``scaled_dot_product_attention``, each with its own keys.

Consecutive positions are a band, which every block reads without a copy of its keys; documents of one piece each are
blocks of equal shape; a single query, and positions in any order, have a way of their own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from trailmark.ops.arguments import arithmetic_dtype
from trailmark.ops.block_attention import attention_dtype, block_attention, block_lse
from trailmark.ops.window.documents import DocumentBlocks, KeysOfBlocks
from trailmark.ops.window.sinks import Sinks, apart, beside, visible_pairs

# Queries of one block. Each block attends to itself and the window - 1 keys before it, so a block much
# smaller than the window repeats keys, and a much larger one computes scores that the mask throws away.
_MIN_BLOCK, _MAX_BLOCK = 32, 256

Attended = Tensor | tuple[Tensor, Tensor]
"""What was attended [B, T, H, D]; with ``return_lse`` also the log-sum-exp of the scores [B, T, H]."""


class Call(NamedTuple):
    """The arguments of a call, once they are checked."""

    q: Tensor
    k: Tensor
    v: Tensor
    window: int | None
    positions: tuple[Tensor, Tensor] | None
    document_ids: tuple[Tensor, Tensor] | None
    documents: Tensor | None  # of queries and keys alike
    slopes: Tensor | None
    scale: float
    return_lse: bool
    num_sinks: int = 0  # the first so many keys; positions are given then
    windows: Tensor | None = None


def attend(call: Call) -> Attended:
    """By the fastest way for what is asked."""
    q, k, _, window, positions, document_ids, documents, *_, num_sinks, windows = call
    (B, T), P = q.shape[:2], k.shape[1]
    if T == 1 and document_ids is None:
        return _one_query(call)
    if window is not None and (window < P or windows is not None) and document_ids is None and T > 0:
        if positions is None:
            return _banded(call)
        if not num_sinks and _values_at_hand(q) and (leading := _leading_absent(*positions)) is not None:
            return _without(positions[0] < 0, _banded(call, leading))
    whole = positions is None and T == P > 0 and B > 0
    # (to see all positions before, each block would need a copy of them: memory O(T * T))
    if documents is not None and whole and window is not None and windows is None and _values_at_hand(q):
        blocks = DocumentBlocks.of(documents, window, _MIN_BLOCK, _MAX_BLOCK)
        if blocks is not None:
            return _in_documents(call, blocks)
    return _by_query_block(call)


def attend_with_sinks(call: Call, num_sinks: int, sink_queries: Tensor | None) -> Attended | None:
    """One query, or consecutive positions, or documents in one piece each; None: something else."""
    q, k, v, _, positions, document_ids, documents, *_ = call
    (B, T), P = q.shape[:2], k.shape[1]
    if T == 1 and document_ids is None and (sink_queries is None or q.device.type == "cpu"):
        return _one_query(call._replace(num_sinks=num_sinks), sink_queries)
    assert call.window is not None
    if B * T == 0:
        return None
    if document_ids is None and positions is None:
        begins = torch.full((1,), P - T, device=q.device)
        sinks = Sinks(k[:, :num_sinks], v[:, :num_sinks], sink_queries, begins, P - T)
        return _banded(call, sinks=sinks)
    if not _values_at_hand(q):
        return None
    if document_ids is None and positions is not None and T > 1 and P - num_sinks >= T:
        query, key = positions
        ordered = bool((key[:, :num_sinks] == torch.arange(num_sinks)).all())
        leading = _leading_absent(query, key[:, num_sinks:]) if ordered else None
        if leading is None:
            return None
        # where the first query would stand: it may be absent itself
        first = (query >= 0).int().argmax(1)
        begins = query.gather(1, first[:, None])[:, 0] - first
        begins = torch.where((query >= 0).any(1), begins, query.max())
        sinks = Sinks(k[:, :num_sinks], v[:, :num_sinks], sink_queries, begins, int(begins.min()))
        others = call._replace(k=k[:, num_sinks:], v=v[:, num_sinks:])
        return _without(query < 0, _banded(others, leading, sinks))
    whole = positions is None and T == P
    if documents is not None and whole and call.slopes is None and call.windows is None:
        blocks = DocumentBlocks.of(documents, call.window, _MIN_BLOCK, _MAX_BLOCK, num_sinks)
        if blocks is not None:
            return _in_documents(call, blocks, num_sinks, sink_queries)
    return None


def _one_query(call: Call, sink_queries: Tensor | None = None) -> Attended:
    """Decoding: one position against keys in any order; ``sink_queries`` on a CPU alone."""
    q, k, v, window, positions, _, _, slopes, scale, return_lse, num_sinks, windows = call
    if num_sinks and positions is None and (windows is not None or slopes is not None):
        k, v, positions, _, num_sinks = apart(k, v, 1, num_sinks, None)
    if positions is None and window is not None and window < (P := k.shape[1]):
        num_sinks = min(num_sinks, P - window)  # those outside the window
        if num_sinks + window < P:
            k, v = (_first_and_last(x, num_sinks, window) for x in (k, v))
    H, P, dtype = q.shape[2], k.shape[1], attention_dtype(q, k, v, biased=slopes is not None)
    mask = empty = None
    if positions is not None or slopes is not None or windows is not None:
        if positions is None:
            distance = torch.arange(P - 1, -1, -1, device=q.device)[None]
            visible = distance >= 0 if windows is None else distance < windows
        else:
            query, key = positions
            distance = query - key  # [B, P]
            visible = visible_pairs(distance, key, window if windows is None else windows, num_sinks)
            visible = visible & (query >= 0)
            if not _values_at_hand(visible) or not bool(visible.all()):
                empty = ~visible.any(1)
                visible = visible | empty[:, None]  # such a row is set to zero: no NaN either way
        if positions is None or slopes is not None or empty is not None:  # else every key is seen
            of_heads = None if slopes is None else slopes[:, None, None]
            mask = _mask(visible[:, None, None], distance[:, None, None], of_heads, dtype)
    lse = None
    if sink_queries is not None:
        out, lse = _with_sink_queries(q, k, v, mask, scale, return_lse, num_sinks, sink_queries)
    else:
        mask = None if mask is None else mask.expand(-1, H, 1, P)
        queries, keys, values = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            queries, keys, values, mask, scale=scale, enable_gqa=k.shape[2] != H
        ).transpose(1, 2)
        if return_lse:
            lse = block_lse(q, k, mask, scale)
    attended = out.to(q.dtype) if lse is None else (out.to(q.dtype), lse)
    return attended if empty is None else _without(empty[:, None], attended)


def _first_and_last(x: Tensor, first: int, last: int) -> Tensor:
    """Of [B, P, ...] so many of the first and of the last."""
    near = x[:, x.shape[1] - last :]
    return torch.cat([x[:, :first], near], dim=1) if first else near


def _with_sink_queries(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    return_lse: bool,
    num_sinks: int,
    sink_queries: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Two products, with the scores in memory between them: the sinks, the first keys, have queries of their own."""
    (B, _, H, D), J, dtype = q.shape, k.shape[2], arithmetic_dtype(q, k, v)
    keys = k.to(dtype).permute(0, 2, 3, 1)  # [B, J, D, P]
    of_sinks = (_of_one(sink_queries, J, dtype) * scale) @ keys[..., :num_sinks]
    scores = (_of_one(q, J, dtype) * scale) @ keys
    scores = torch.cat([of_sinks, scores[..., num_sinks:]], dim=-1).flatten(1, 2)  # [B, H, P]
    if mask is not None:
        scores = scores + mask[:, :, 0]
    shares = scores.softmax(-1).view(B, J, H // J, -1)
    out = (shares @ v.to(dtype).transpose(1, 2)).view(B, 1, H, D)
    return out, scores.logsumexp(-1)[:, None] if return_lse else None


def _of_one(q: Tensor, J: int, dtype: torch.dtype) -> Tensor:
    """[B, 1, H, D] -> [B, J, H / J, D]."""
    return q.to(dtype).reshape(len(q), J, -1, q.shape[-1])


def _banded(call: Call, leading: Tensor | None = None, sinks: Sinks | None = None) -> Attended:
    """Consecutive positions: a block of C queries sees the C + window - 1 keys that end with its own, and the sinks.

    ``leading`` [B]: so many of each row's keys are absent at its beginning.
    """
    q, k, v, window, *_, slopes, scale, return_lse, _, windows = call
    assert window is not None
    B, T, H, D = q.shape
    carried, given = k.shape[1] - T, q.dtype
    old = window - 1
    if not torch.compiler.is_compiling():  # where sizes may be symbols
        old = min(old, k.shape[1])  # there are no more keys to be seen
    dtype = attention_dtype(q, k, v, biased=slopes is not None)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)  # once, not per block that a key is seen from
    C = min(max(old, _MIN_BLOCK), _MAX_BLOCK, T)
    whole = T // C
    # only the blocks whose reach goes before the first key need a mask of their own
    gone = 0 if leading is None or not B else int(leading.max())
    most = old - carried + gone
    if sinks is not None:  # in the others all sinks are outside the window, as far as it matters
        most = T if slopes is not None else max(most, old + sinks.k.shape[1] - sinks.least)
    early = min(-(-max(0, most) // C), whole)
    # (first query, queries of a block, blocks) computed at once; a last block may be shorter
    pieces = [(block * C, C, 1) for block in range(early)]
    pieces += [(early * C, C, whole - early)] if early < whole else []
    pieces += [(whole * C, T - whole * C, 1)] if T % C else []
    # (first key, keys of a block, step, blocks)
    spans = tuple(
        (max(0, carried + first - old), min(old, carried + first) + c, c, n) for first, c, n in pieces
    )
    queries = q.split([c * n for _, c, n in pieces], dim=1)
    asking = None
    own_windows = None if windows is None else windows.split([c * n for _, c, n in pieces], dim=1)
    if sinks is not None and sinks.q is not None:
        asking = sinks.q.to(dtype).split([c * n for _, c, n in pieces], dim=1)
    keys, values = _Spans.apply(k, spans), _Spans.apply(v, spans)
    distance = torch.arange(C, device=q.device)[:, None] + old - torch.arange(C + old, device=q.device)
    parts, lses = [], []
    for i, ((_, c, n), (start, width, _, _)) in enumerate(zip(pieces, spans, strict=True)):
        far = distance[:c, c + old - width : c + old]
        reach: Any = window
        if own_windows is not None:  # [b, c, 1], or [b n, 1, c, 1] where blocks or rows differ
            reach = own_windows[i].unflatten(1, (n, c))[..., None]
            reach = reach.expand(B, -1, -1, -1).flatten(0, 1)[:, None] if B * n > 1 else reach[0]
        visible = (far >= 0) & (far < reach)
        if leading is not None and start < gone:
            # [B, 1, c, keys]; a query that is absent itself sees itself, so that nothing is NaN
            key = torch.arange(start, start + width, device=q.device)
            visible = visible & ((key >= leading[:, None])[:, None, None] | (far == 0))
        block = queries[i].reshape(B * n, c, H, D), keys[i].flatten(0, 1), values[i].flatten(0, 1)
        if sinks is not None:
            beyond = sinks.distance(pieces[i][0], c)
            if n > 1:  # all of them are seen from all blocks
                beyond = torch.full_like(beyond.view(-1, *beyond.shape[-2:])[0], window)
            visible, far = _side_by_side(beyond >= reach, visible), _side_by_side(beyond, far)
            own = None if asking is None else asking[i].reshape(B * n, c, H, D)
            k_sinks, v_sinks = (
                x.to(dtype)[:, None].expand(-1, n, -1, -1, -1).flatten(0, 1) for x in (sinks.k, sinks.v)
            )
            block = beside(*block, k_sinks, v_sinks, own)
        mask = _mask(visible, far, slopes, dtype)
        out = block_attention(*block, mask, scale)[..., :D]
        parts.append(out.reshape(B, n * c, H, D).to(given))
        if return_lse:
            lses.append(block_lse(block[0], block[1], mask, scale).reshape(B, n * c, H))
    return _joined(parts, lses, return_lse)


def _side_by_side(first: Tensor, second: Tensor) -> Tensor:
    """[..., c, n] and [..., c, p] -> [..., c, n + p]."""
    rows = torch.broadcast_shapes(first.shape[:-1], second.shape[:-1])
    return torch.cat([x.expand(*rows, x.shape[-1]) for x in (first, second)], dim=-1)


class _Spans(torch.autograd.Function):
    """x [B, P, J, D] -> per (start, width, step, n) its n stretches [B, n, width, J, D]: overlapping views.

    What reads them copies no key; autograd's own slices would fill a zero gradient of full size for each.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, spans: tuple[tuple[int, int, int, int], ...]) -> tuple[Tensor, ...]:
        ctx.spans, ctx.size = spans, x.shape
        return tuple(_stretches(x, *span) for span in spans)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].new_zeros(ctx.size)
        for grad, (start, width, step, n) in zip(grads, ctx.spans, strict=True):
            for at in range(0, width, step):  # what lies within one step overlaps nothing
                part = min(step, width - at)
                _stretches(total, start + at, part, step, n).add_(grad[:, :, at : at + part])
        return total, None


def _stretches(x: Tensor, start: int, width: int, step: int, n: int) -> Tensor:
    """[B, P, J, D] -> [B, n, width, J, D], a view: stretch i begins at ``start + i * step``."""
    x = x[:, start : start + (n - 1) * step + width]
    return x.unfold(1, width, step).permute(0, 1, 4, 2, 3)


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


def _in_documents(
    call: Call, blocks: DocumentBlocks, num_sinks: int = 0, sink_queries: Tensor | None = None
) -> Attended:
    """Consecutive positions, each document in one piece: one mask serves all blocks, and is cut for early ones."""
    q, k, v, window, *_, slopes, scale, return_lse, _, _ = call
    assert window is not None
    B, T, given, D = *q.shape[:2], q.dtype, q.shape[-1]
    dtype = attention_dtype(q, k, v, biased=slopes is not None)
    q, k, v = (x.to(dtype).flatten(0, 1) for x in (q, k, v))  # [B * T, heads, D]
    C, most = blocks.size, max(kind.before for kind in blocks.kinds)
    counts = [kind.blocks for kind in blocks.kinds]
    queries = blocks.queries.into(q).unflatten(0, (-1, C)).split(counts)
    asking = None
    if sink_queries is not None:
        asking = blocks.queries.into(sink_queries.to(dtype).flatten(0, 1)).unflatten(0, (-1, C)).split(counts)
    keys, values = (KeysOfBlocks.apply(blocks.keys.into(x), blocks) for x in (k, v))
    row, key = torch.arange(C) + most * C, torch.arange((most + 1) * C)
    distance = row[:, None] - key
    visible = (distance >= 0) & (distance < window)
    mask = _mask(visible, distance, slopes, dtype)  # [(H,) C, (most + 1) * C]
    parts, lses = [], []
    for i, kind in enumerate(blocks.kinds):
        seen = mask[..., (most - kind.before) * C :].contiguous()
        block = queries[i], keys[i], values[i]
        if num_sinks:  # they stand before the keys of the window, as the keys of these blocks have them
            beyond = kind.number * C + torch.arange(C)[:, None] - torch.arange(num_sinks)
            of_sinks = _mask(beyond >= window, beyond, slopes, dtype)
            seen = _side_by_side(of_sinks, seen).contiguous()
            own, n = None if asking is None else asking[i], num_sinks
            block = beside(block[0], keys[i][:, n:], values[i][:, n:], keys[i][:, :n], values[i][:, :n], own)
        parts.append(block_attention(*block, seen, scale)[..., :D].flatten(0, 1))
        if return_lse:
            lses.append(block_lse(block[0], block[1], seen, scale).flatten(0, 1))
    out = blocks.queries.out_of(torch.cat(parts)).unflatten(0, (B, T)).to(given)
    if not return_lse:
        return out
    return out, blocks.queries.out_of(torch.cat(lses)).unflatten(0, (B, T))


def _by_query_block(call: Call) -> Attended:
    """Any positions and documents: a block of queries against every key it could see."""
    q, k, v, window, positions, document_ids, _, slopes, scale, return_lse, num_sinks, windows = call
    T, P, dtype = q.shape[1], k.shape[1], arithmetic_dtype(q, k, v)
    mask_dtype = attention_dtype(q, k, v, biased=slopes is not None)
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
        reach = window if windows is None else windows[:, rows, None]
        visible = visible_pairs(distance, key_position[:, None, start:stop], reach, num_sinks)
        visible &= query_position[:, rows, None] >= 0
        if document_ids is not None:
            visible = visible & (document_ids[0][:, rows, None] == document_ids[1][:, None, start:stop])
        empty = ~visible.any(-1)[:, None, :, None]  # [B or 1, 1, c, 1]
        # a row that sees nothing is let see everything and then set to zero: no NaN either way
        shown = visible[:, None] | empty
        of_heads = None if slopes is None else slopes[:, None, None]
        mask = _mask(shown, distance[:, None], of_heads, mask_dtype)
        queries, keys = q[:, rows], k[:, start:stop]
        out = block_attention(queries, keys, v[:, start:stop], mask, scale)
        outs.append(out.masked_fill(empty.transpose(1, 2), 0))
        if return_lse:
            # as for sdpa, whose mask may be of low precision
            wide = _mask(shown, distance[:, None], of_heads, dtype)
            lse = block_lse(queries, keys, wide.expand(-1, q.shape[2], -1, -1), scale)
            lses.append(lse.masked_fill(empty[:, 0], -torch.inf))
    out = torch.cat(outs, dim=1) if outs else torch.zeros_like(q)
    if not return_lse:
        return out
    return out, torch.cat(lses, dim=1) if lses else q.new_zeros(q.shape[:3], dtype=dtype)


def _mask(visible: Tensor, distance: Tensor, slopes: Tensor | None, dtype: torch.dtype) -> Tensor:
    """0 or the ALiBi term where visible, -inf elsewhere; [(B,) (H,) c, p] of ``dtype``.

    Without a bias in low precision it stays bool.
    """
    if slopes is None:
        if dtype.itemsize < 4:
            return visible
        bias = torch.zeros((), dtype=dtype, device=visible.device)
    else:
        slopes = slopes.to(device=visible.device, dtype=dtype)
        bias = -(slopes.view(-1, 1, 1) * distance.to(dtype))
    return torch.where(visible, bias, -torch.inf)


def _without(absent: Tensor, attended: Attended) -> Attended:
    """Zeros, and -inf, for queries that are absent [B, T]."""
    if isinstance(attended, Tensor):
        return attended.masked_fill(absent[..., None, None], 0)
    out, lse = attended
    return out.masked_fill(absent[..., None, None], 0), lse.masked_fill(absent[..., None], -torch.inf)


def _joined(outs: list[Tensor], lses: list[Tensor], return_lse: bool) -> Attended:
    """Rows [B, t, ...] of several blocks, one after another."""
    out = torch.cat(outs, dim=1) if len(outs) > 1 else outs[0]
    if not return_lse:
        return out
    return out, torch.cat(lses, dim=1) if len(lses) > 1 else lses[0]


def _values_at_hand(tensor: Tensor) -> bool:
    """Whether a choice may depend on values: on CUDA it would wait for the device, and a compiler cannot."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()
