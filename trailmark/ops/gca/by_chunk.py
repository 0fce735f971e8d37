"""Grouped Cross-Attention of tokens that retrieve, chunk by chunk: on a CPU, where each chunk has many readers.

A token has as many rows as query heads share a key/value head, too few for a product to pay for fetching K chunks. So
a chunk is fetched for a *tile* of tokens that chose it, and what all of a token's tiles found for it is put together
afterwards: K times the size of its query, which stands in memory for a slab of tokens at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from trailmark.ops.gca.call import CrossAttentionCall
from trailmark.ops.gca.rows import FEW_ROWS, LOG2_E, Rows, Table, numbers_of_contiguous, unless_unread
from trailmark.ops.slabs import in_slabs

_FEW_TOKENS = 64  # fewer share too few chunks
_SMALL_CHUNK = 4  # keys of one that is smaller are no matrix to BLAS
# A token is to get the same bits in whatever place of a tile it stands, and in whose company. In BLAS' kernels it does
# where no row is left over by their blocks, of which each is a divisor of this.
_TILE_ROWS = 48
_GROUP_ELEMENTS = 1 << 19  # of the tiles that are computed at once, in a core's caches
_SLAB_ELEMENTS = 1 << 22  # of what a slab's tiles found


def pays(call: CrossAttentionCall) -> bool:
    """Whether a call is one for this module: by shapes that no neighbour's content decides, as M may be."""
    (_, N, R, H, _), (S, J) = call.q.shape, call.k.shape[2:4]
    if call.q.device.type != "cpu" or not call.k.numel():
        return False
    width = H // J * R
    return width <= FEW_ROWS and _TILE_ROWS % width == 0 and N >= _FEW_TOKENS and S >= _SMALL_CHUNK


def forward(call: CrossAttentionCall, keep: bool) -> tuple[Tensor, Tensor]:
    """As :func:`trailmark.ops.gca.torch_path.forward`."""
    reads = _Reads(call)
    out = torch.empty(reads.query_shape, dtype=call.q.dtype)
    lse = torch.empty(reads.lse_shape if keep else (0,), dtype=reads.lse_dtype)
    beside = None if call.beside is None else call.beside.reshape(reads.query_shape)
    null_key = call.off_by_one and beside is None  # in each chunk's softmax
    for rows in reads.slabs():
        tiles, query = reads.tiles(rows), reads.fold(reads.q, rows)
        found, tops, totals = tiles.found(reads.D), tiles.found(1, -torch.inf), tiles.found(1)
        for group in tiles:
            scores = tiles.scores(tiles.of_tokens(query, group), tiles.keys(group), group)
            top = torch.amax(scores, -1, keepdim=True, out=tops[group])
            if null_key:
                top.clamp_(min=0)
            total = torch.sum(scores.sub_(_finite(top)).exp2_(), -1, keepdim=True, out=totals[group])
            if null_key:
                total.add_(top.neg().exp2_())
            torch.bmm(scores, tiles.values(group), out=found[group])
        top, total, share = tiles.by_chunk(tops), tiles.by_chunk(totals), reads.share_of(rows)
        null = reads.null(rows)
        if beside is None or null is None:
            total.masked_fill_(total == 0, 1)
            if keep:
                torch.add(_finite(top), total.log2(), out=lse[rows])
            out[rows] = reads.unfold(tiles.summed(found, share / total))
            continue
        # one softmax over all
        highest = top.masked_fill(share == 0, -torch.inf).amax(2, keepdim=True)
        share = top.sub_(unless_unread(highest, share)).exp2_().mul_(share)
        mass = (share * total).sum(2, keepdim=True)
        all_mass = torch.logaddexp2(highest + mass.double().log2(), null.view(mass.shape))
        of_highest = (highest - all_mass).exp2_().to(share.dtype)
        if keep:
            torch.cat([highest.double(), all_mass], 2, out=lse[rows])
        read = tiles.summed(found, share.mul_(of_highest))
        own = mass.mul_(of_highest).view(*read.shape[:2], 1)
        out[rows] = reads.unfold(read.addcmul_(own, reads.fold(beside, rows), value=-1))
    return out.view(call.q.shape), lse


def backward(
    grad: Tensor, call: CrossAttentionCall, lse: Tensor, of_memory: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As :func:`trailmark.ops.gca.torch_path.backward`."""
    reads, q, k, v, weights = _Reads(call), call.q, call.k, call.v, call.weights
    (B, M, S, J, D), dtype = k.shape, reads.dtype
    grad = grad.reshape(reads.query_shape)
    beside = None if call.beside is None else call.beside.reshape(reads.query_shape)
    dq = torch.empty(reads.query_shape, dtype=q.dtype)
    dk, dv = (torch.zeros(B * M * J if of_memory else 0, S * D, dtype=dtype) for _ in range(2))
    dw = torch.empty_like(reads.weights)
    d_beside = torch.empty(reads.query_shape, dtype=q.dtype if beside is None else beside.dtype)
    d_lse = torch.empty((*reads.query_shape[:-1], 1), dtype=dtype)
    with torch.autocast("cpu", enabled=False):  # the backward runs outside the op
        for rows in reads.slabs():
            tiles, query, out_grad = reads.tiles(rows), reads.fold(reads.q, rows), reads.fold(grad, rows)
            shift, share = lse[rows], reads.share_of(rows)
            if beside is not None:
                top, total = lse[rows, :, :1], lse[rows, :, 1:]
                shift = unless_unread(top.to(dtype), share)
                share = share * (top - total).exp2_().to(dtype)
                own = (out_grad * reads.fold(beside, rows)).sum(-1, keepdim=True)  # values count from it
            shift, share = tiles.of_pairs(shift, torch.inf), tiles.of_pairs(share)
            probabilities, ds = tiles.found(S), tiles.found(S)
            inner, sums = tiles.found(1), tiles.found(1)  # of dP P, and of P
            for group in tiles:
                scores = tiles.scores(tiles.of_tokens(query, group), tiles.keys(group), group)
                p = torch.exp2(scores.sub_(shift[group]), out=probabilities[group])
                # dP without the weight: dO V^T; its row sums with P give both D and the weights' gradient
                dp = torch.bmm(
                    tiles.of_tokens(out_grad, group), tiles.values(group).transpose(1, 2), out=ds[group]
                )
                if beside is not None:
                    p.mul_(share[group])
                    dp.sub_(tiles.of_tokens(own, group))
                    torch.sum(p, -1, keepdim=True, out=sums[group])
                torch.sum(dp * p, -1, keepdim=True, out=inner[group])
            of_chunks = tiles.by_chunk(inner)
            null = reads.null(rows)
            if beside is None or null is None:
                dw[rows] = reads.of_weights(of_chunks)
                probabilities[:-1].mul_(share)
                ds.sub_(inner)
            else:
                of_rows = of_chunks.sum(2).view(-1, reads.width, 1)
                of_null = (null.view(of_rows.shape) - total.view(of_rows.shape)).exp2_().to(dtype)
                d_lse[rows] = reads.unfold(of_null.mul_(of_rows).neg_())
                read = (
                    tiles.by_chunk(sums).sum(2).view(of_rows.shape)
                )  # not 1 - that of the virtual key: it may be tiny
                d_beside[rows] = reads.unfold(out_grad * read).neg_()
                ds[:-1].sub_(tiles.of_tokens(of_rows, slice(None)))
            ds.mul_(probabilities)
            if beside is not None:
                by_weight = reads.of_weights(tiles.by_chunk(ds.sum(-1, keepdim=True)))
                dw[rows] = (by_weight / reads.weights[rows]).masked_fill_(reads.weights[rows] == 0, 0)
            of_queries = tiles.found(D)
            for group in tiles:
                torch.bmm(ds[group], tiles.keys(group), out=of_queries[group])
                if of_memory:
                    by_key = torch.bmm(ds[group].transpose(1, 2), tiles.of_tokens(query, group))
                    dk.index_add_(0, tiles.into[group], by_key.view(-1, S * D), alpha=reads.scale)
                    by_value = torch.bmm(
                        probabilities[group].transpose(1, 2), tiles.of_tokens(out_grad, group)
                    )
                    dv.index_add_(0, tiles.into[group], by_value.view(-1, S * D))
            dq[rows] = reads.unfold(tiles.summed(of_queries).mul_(reads.scale))
    unread = (call.indices < 0).repeat_interleave(weights.shape[2] // J, dim=2)
    dw = dw.permute(0, 1, 3, 2).reshape(weights.shape).masked_fill_(unread, 0).to(weights.dtype)
    more = q.new_empty(0), q.new_empty(0)
    if call.beside_lse is not None:
        more = d_beside.view(q.shape), d_lse.view(q.shape[:-1]).to(call.beside_lse.dtype)
    if not of_memory:
        return dq.view(q.shape), k.new_empty(0), v.new_empty(0), dw, *more
    dk, dv = (x.view(B, M, J, S, D).transpose(2, 3) for x in (dk, dv))
    return dq.view(q.shape), dk.to(k.dtype), dv.to(v.dtype), dw, *more


def _finite(top: Tensor) -> Tensor:
    """What is taken from scores: their largest, or 0 where there is none."""
    return top.masked_fill(top == -torch.inf, 0)


class _Reads(Rows):
    """A call as rows, and its chunks as tables of heads."""

    def __init__(self, call: CrossAttentionCall) -> None:
        super().__init__(call)
        self.k_table, self.v_table = Table(call.k), Table(call.v)
        self.k_numbers = self.k_table.numbers(call.indices).flatten(0, 1)  # [B N, J, K]
        self.v_numbers = self.v_table.numbers(call.indices).flatten(0, 1)
        self.into = numbers_of_contiguous(call.indices, self.M)
        self.lengths = None if call.lengths is None else call.lengths.flatten()

    def slabs(self) -> Iterator[slice]:
        """Tokens whose tiles stand in memory together."""
        count, each = self.query_shape[0], self.J * self.K * self.width * self.D
        return in_slabs(count, max(1, _SLAB_ELEMENTS // each), self.q)

    def tiles(self, rows: slice) -> _Tiles:
        return _Tiles(self, rows)

    def share_of(self, rows: slice) -> Tensor:
        """The weights of each row, [n, J, K, g R]."""
        own = self.weight(rows)
        return own.view(-1, self.J, self.K, own.shape[-1]).expand(-1, -1, -1, self.width)


class _Tiles:
    """Pairs of a token (and key/value head) and a chunk, those of one chunk beside each other, ``size`` in a tile.

    A pair has ``width`` rows, and a tile ``_TILE_ROWS``. What is left of a chunk's last tile repeats its last pair, and
    has no place of its own. There is one place more than the tiles have, for pairs that read nothing.
    """

    def __init__(self, reads: _Reads, rows: slice) -> None:
        self.reads = reads
        flat, nothing = reads.into[rows].flatten(), reads.nothing.where[rows].flatten()
        ordered, order = flat.masked_fill(nothing, reads.into.numel() + len(flat)).sort(stable=True)
        there = len(flat) - int(nothing.sum())
        chunk, counts = ordered[:there].unique_consecutive(return_counts=True)
        self.size = _TILE_ROWS // reads.width
        tiles = (counts + self.size - 1) // self.size
        of = torch.arange(len(chunk)).repeat_interleave(tiles)
        ends = counts.cumsum(0)
        number = torch.arange(len(of)) - (tiles.cumsum(0) - tiles)[of]
        at = ((ends - counts)[of] + number * self.size)[:, None] + torch.arange(self.size)
        last = (ends[of] - 1)[:, None]
        self.left_over = at > last  # [tiles, size]
        self.pairs = order[at.minimum(last)]  # [tiles, size]
        self.tokens = self.pairs // reads.K  # and heads
        self.into = chunk[of]  # [tiles]
        own = ~self.left_over.flatten()
        self.place = torch.full((len(flat),), len(own))  # of each pair, among those of all tiles
        self.place[self.pairs.flatten()[own]] = torch.arange(len(own))[own]
        first = self.pairs[:, 0]
        self.k_rows, self.v_rows = (x[rows].flatten()[first] for x in (reads.k_numbers, reads.v_numbers))
        self.absent: Tensor | None = None  # [tiles, S] keys that do not exist
        self.short = list[bool]()  # tiles that have some
        if reads.lengths is not None:
            lengths = reads.lengths[self.into // reads.J]
            self.absent, self.short = torch.arange(reads.S) >= lengths[:, None], (lengths < reads.S).tolist()

    def __iter__(self) -> Iterator[slice]:
        """Tiles that are computed at once."""
        S, D = self.reads.S, self.reads.D
        step = max(1, _GROUP_ELEMENTS // (2 * S * D + _TILE_ROWS * (2 * D + S)))
        return in_slabs(len(self.into), step, self.reads.q)

    def keys(self, group: slice) -> Tensor:
        """[c, S, D]; zeros where there is none, which may be NaN."""
        return self._taken(self.reads.k_table, self.k_rows[group], group)

    def values(self, group: slice) -> Tensor:
        return self._taken(self.reads.v_table, self.v_rows[group], group)

    def _taken(self, table: Table, rows: Tensor, group: slice) -> Tensor:
        taken = table.rows.index_select(0, rows).view(-1, self.reads.S, self.reads.D).to(self.reads.dtype)
        absent = self._absent(group)
        return taken if absent is None else taken.masked_fill_(absent[..., None], 0)

    def _absent(self, group: slice) -> Tensor | None:
        return self.absent[group] if self.absent is not None and True in self.short[group] else None

    def scores(self, query: Tensor, keys: Tensor, group: slice) -> Tensor:
        """[c, rows, S] in base 2, -inf at keys that do not exist."""
        scores = torch.bmm(query, keys.transpose(1, 2)).mul_(self.reads.scale * LOG2_E)
        absent = self._absent(group)
        return scores if absent is None else scores.masked_fill_(absent[:, None], -torch.inf)

    def of_tokens(self, x: Tensor, group: slice) -> Tensor:
        """x [n * J, width, X] of the tokens of a group's tiles: [c, rows, X]."""
        taken = x.flatten(1).index_select(0, self.tokens[group].flatten())
        return taken.view(-1, _TILE_ROWS, x.shape[-1])

    def of_pairs(self, x: Tensor, left_over: float = 0) -> Tensor:
        """x [n, J, K, width] of the pairs of all tiles: [tiles, rows, 1]."""
        own = x.reshape(-1, self.reads.width)[self.pairs].masked_fill(self.left_over[..., None], left_over)
        return own.view(len(self.into), _TILE_ROWS, 1)

    def found(self, X: int, nothing: float = 0) -> Tensor:
        """[tiles + 1, rows, X], to be filled for all tiles; the last is of pairs that read nothing."""
        x = torch.empty(len(self.into) + 1, _TILE_ROWS, X, dtype=self.reads.dtype)
        x[-1] = nothing
        return x

    def by_chunk(self, found: Tensor) -> Tensor:
        """What was found [tiles + 1, rows, 1] for each token's chunks: [n, J, K, width]."""
        own = found.view(-1, self.reads.width).index_select(0, self.place)
        return own.view(-1, self.reads.J, self.reads.K, self.reads.width)

    def summed(self, found: Tensor, share: Tensor | None = None) -> Tensor:
        """What was found [tiles + 1, rows, X], over each token's chunks: [n * J, width, X].

        Weighed by ``share`` [n, J, K, width].
        """
        K, width = self.reads.K, self.reads.width
        row = (self.place.view(-1, 1, K) * width + torch.arange(width)[:, None]).flatten(0, 1)
        if share is not None:
            share = share.transpose(2, 3).reshape(row.shape)
        X = found.shape[-1]
        total = F.embedding_bag(row, found.view(-1, X), per_sample_weights=share, mode="sum")
        return total.view(-1, width, X)
