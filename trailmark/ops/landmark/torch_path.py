"""Landmark Attention in PyTorch: slabs of queries against the tiles of every chunk that they see.

A tile is W slots for a chunk's regular tokens and a last one for its landmark, so that one GEMM scores both; a
chunk of more tokens takes several tiles. What tells own, far and hidden chunks apart happens to one number per
tile and query, a gate: the landmark's score, or the log-sum-exp of what is seen of the own chunk. Around the GEMMs
stand a few passes over scores that lie transposed, [.., slots, queries], in the buffers of the slab before, in
powers of 2 (see gca/torch_path.py). Each row of the batch is computed by itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trailmark.ops.arguments import arithmetic_dtype
from trailmark.ops.landmark.call import LandmarkCall
from trailmark.ops.landmark.layout import TABLES, LandmarkLayout

_SLAB_QUERIES = 128  # more would waste scores among a slab's own chunks, fewer would not keep the GEMMs busy
_WIDEST_TILE = 128  # a wider one would waste scores of what comes later in a long chunk
_FEW = 4  # queries: decoding
_LOG2_E = math.log2(math.e)


def forward(call: LandmarkCall, keep: bool) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exps [B, P, H]. The backward needs neither, but takes queries of any number."""
    q, k, v, layout, _ = call
    T, padded = layout.num_keys, layout.num_chunks * layout.max_length
    if not keep and 0 < layout.num_queries <= _FEW and 0 < padded <= 2 * T:
        return _few_queries(call)
    work = _Work(call)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=work.dtype, device=q.device)
    for row in work.rows:
        keys, values = work.pack(k, row), work.pack(v, row)  # [J, N h, D]
        for slab in row.slabs:
            scores = work.scores(keys, work.fold(q, row, slab), row, slab)  # [J, N, h, g n]
            tops, sums = work.exponentials(scores, row, slab)  # [J, N, g n]
            gates, total = work.gates(scores, tops, sums, row, slab)  # [J, N, g n], [J, 1, g n]
            weights = work.weights(scores, gates, sums, row)  # [J, N h, g n]
            work.unfold(torch.bmm(weights.mT, values[:, slab.slots]), out, row, slab)
            work.unfold(total.mT.mul_(1 / _LOG2_E), lse[..., None], row, slab)
    return out, lse


def backward(
    grad: Tensor,  # [B, P, H, D]
    grad_lse: Tensor | None,  # [B, P, H]
    call: LandmarkCall,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v. Needs neither the output nor its lse: a slab sees all keys of its queries."""
    q, k, v, _, scale = call
    work = _Work(call)
    B, T, J, D = k.shape
    grad = grad.contiguous()  # that of a sum has stride 0, which GEMMs would copy slab by slab
    dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros((B, J, T, D), dtype=x.dtype, device=q.device) for x in (k, v))
    for row in work.rows:
        keys, values = work.pack(k, row), work.pack(v, row)
        of_keys, of_values = (torch.zeros(keys.shape, dtype=work.dtype, device=q.device) for _ in range(2))
        for slab in row.slabs:
            query, out_grad = work.fold(q, row, slab), work.fold(grad, row, slab)  # [J, g n, D]
            scores = work.scores(keys, query, row, slab)
            tops, sums = work.exponentials(scores, row, slab)
            gates, total = work.gates(scores, tops, sums, row, slab)
            nothing = total == -torch.inf  # is attended to: not even a gradient of NaN has an effect
            out_grad = out_grad.masked_fill(nothing.mT, 0)
            weights = work.weights(scores, gates, sums, row)
            of_values[:, slab.slots].baddbmm_(weights, out_grad)
            ds = work.buffer("ds", weights.shape)
            torch.bmm(values[:, slab.slots], out_grad.mT, out=ds)  # of the weights
            of_total = None
            if grad_lse is not None:
                of_total = work.fold(grad_lse[..., None], row, slab).mT.masked_fill(nothing, 0)
            work.through_softmax(ds.view_as(scores), scores, gates, of_total, row, slab)
            of_query = torch.bmm(ds.mT, keys[:, slab.slots])
            work.unfold(of_query.mul_(scale), dq, row, slab)
            of_keys[:, slab.slots].baddbmm_(ds, query, alpha=scale)
        row.unpack(of_keys, dk[row.number])
        row.unpack(of_values, dv[row.number])
    return dq, dk.transpose(1, 2), dv.transpose(1, 2)


def _few_queries(call: LandmarkCall) -> tuple[Tensor, Tensor]:
    """Decoding: as few calls as can be, all rows of the batch at once."""
    q, k, v, layout, scale = call
    (B, P, H, D), (T, J) = q.shape, k.shape[1:3]
    C, S, dtype = layout.num_chunks, layout.max_length, arithmetic_dtype(q, k, v)
    least = torch.finfo(dtype).min
    if "few" not in layout.memo:
        layout.memo["few"] = _Few(layout)
    few: _Few = layout.memo["few"]
    # [B, J, g P, D]
    query = q.to(dtype).unflatten(2, (J, H // J)).permute(0, 2, 3, 1, 4).reshape(B, J, -1, D) * scale
    keys, values = k.to(dtype).transpose(1, 2), v.to(dtype).transpose(1, 2)  # [B, J, T, D]
    if few.vacant is not None:
        values = values.masked_fill(few.vacant, 0)  # not even NaN has an effect
    scores = query.new_empty((B, J, H // J * P, T))
    for b in range(B):
        torch.bmm(query[b], keys[b].mT, out=scores[b])
    scores = scores.view(B, H, P, T)
    slots = few.slots.expand(B, H, P, C * S)
    tokens = scores.gather(3, slots).masked_fill_(few.unseen, -torch.inf).view(B, H, P, C, S)
    tops = tokens.amax(4, keepdim=True).clamp_(min=least)
    sums = tokens.sub_(tops).exp_().sum(4, keepdim=True)
    own = sums.log().add_(tops)[..., 0]  # [B, H, P, C]
    gates = scores.gather(3, few.landmarks.expand(B, H, P, C)).masked_fill_(few.hidden, -torch.inf)
    gates = torch.where(few.standing, own, gates) if layout.own else gates
    top = gates.amax(3, keepdim=True).clamp_(min=least)
    total = gates.sub_(top).exp_().sum(3, keepdim=True)
    gates.div_(total.clamp(min=1))  # 0 where nothing is attended to; else at least 1
    tokens.mul_(gates[..., None].div_(sums.clamp_(min=1)))
    weights = scores.zero_().scatter_add_(3, slots, tokens.flatten(3)).view(B, J, -1, T)
    out = query.new_empty(query.shape)
    for b in range(B):
        torch.bmm(weights[b], values[b], out=out[b])
    out = out.view(B, H, P, D).transpose(1, 2)
    return out.to(q.dtype), total.log_().add_(top)[..., 0].transpose(1, 2)


class _Few:
    """Tables of what each of a few queries sees, chunk by chunk, slot by slot."""

    def __init__(self, layout: LandmarkLayout) -> None:
        B, C, S, T = len(layout.starts), layout.num_chunks, layout.max_length, layout.num_keys
        device = layout.starts.device
        slot, chunk = torch.arange(S, device=device), torch.arange(C, device=device)
        query = torch.arange(layout.num_queries, device=device)[:, None]
        nth = query - layout.query_starts[:, None]  # [B, P, C]
        standing = (nth >= 0) & (nth < layout.query_counts[:, None])
        there = slot < layout.lengths[..., None]  # [B, C, S]
        seen = there[:, None].expand(B, layout.num_queries, C, S)
        if layout.causal:
            last = torch.where(standing, layout.query_slots[:, None] + nth, S)
            seen = seen & (slot <= last[..., None])
        mine = standing.long().argmax(2, keepdim=True)  # [B, P, 1]
        first, end = (
            x[:, None].expand(-1, layout.num_queries, -1).gather(2, mine) for x in (layout.first, layout.end)
        )
        far = (
            (chunk >= first) & (chunk < end) & layout.far[:, None] & ~standing & standing.any(2, keepdim=True)
        )
        # any, with no weight, for empty slots
        places = torch.where(there, layout.starts[..., None] + slot, 0)
        self.slots = places.view(B, 1, 1, C * S)
        self.unseen = ~seen.reshape(B, 1, -1, C * S)
        self.landmarks = layout.landmarks.clamp(min=0)[:, None, None]  # [B, 1, 1, C]
        self.hidden = ~far[:, None]  # [B, 1, P, C]
        self.standing = standing[:, None]
        place = torch.arange(T, device=device)[:, None]
        ends = layout.starts + layout.lengths + (layout.landmarks >= 0).long()
        held = (place >= layout.starts[:, None]) & (place < ends[:, None])  # [B, T, C]
        vacant = ~held.any(2)[:, None, :, None]
        self.vacant = vacant if bool(vacant.any()) else None  # [B, 1, T, 1]


class _Work:
    """The passes over a slab, and the buffers that all slabs share."""

    def __init__(self, call: LandmarkCall) -> None:
        q, k, v, layout, scale = call
        self.heads, self.group = k.shape[2], q.shape[2] // k.shape[2]
        self.dtype = arithmetic_dtype(q, k, v)
        self.least = torch.finfo(self.dtype).min  # in place of -inf where it is subtracted
        self.scale, self.layout = scale, layout
        if "torch" not in layout.memo:
            layout.memo["torch"] = (
                [_Row(layout, b) for b in range(len(layout.starts))] if layout.num_chunks else []
            )
        self.rows: list[_Row] = layout.memo["torch"]
        largest = max((row.largest for row in self.rows), default=0)
        self._size = self.heads * self.group * largest
        self._buffers: dict[str, Tensor] = {}
        self._device = q.device

    def buffer(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The same memory for each slab: fresh pages cost more than what fills them."""
        if name not in self._buffers:
            self._buffers[name] = torch.empty(self._size, dtype=self.dtype, device=self._device)
        return self._buffers[name][: math.prod(shape)].view(shape)

    def pack(self, x: Tensor, row: _Row) -> Tensor:
        """[B, T, J, D] -> [J, N h, D]: the tiles of a row, zeros in slots that hold nothing."""
        if row.begin is not None:  # they are so already
            return (
                x[row.number, row.begin : row.begin + row.count * row.height].to(self.dtype).transpose(0, 1)
            )
        packed = x[row.number].index_select(0, row.places).to(self.dtype)
        return packed.index_fill_(0, row.vacant, 0).transpose(0, 1)

    def fold(self, x: Tensor, row: _Row, slab: _Slab) -> Tensor:
        """[B, P, H, D] -> [J, g n, D]: the g query heads of a key/value head stand below each other."""
        part = x[row.number, slab.queries].to(self.dtype)  # [n, H, D]
        if self.group == 1:
            return part.transpose(0, 1)
        part = part.unflatten(1, (self.heads, self.group)).permute(1, 2, 0, 3)
        return part.flatten(1, 2)

    def unfold(self, x: Tensor, into: Tensor, row: _Row, slab: _Slab) -> None:
        """[J, g n, D] -> these queries of [B, P, H, D]"""
        place = into[row.number, slab.queries].unflatten(1, (self.heads, self.group))
        place.copy_(x.unflatten(1, (self.group, -1)).permute(2, 0, 1, 3))

    def scores(self, keys: Tensor, query: Tensor, row: _Row, slab: _Slab) -> Tensor:
        """[J, N, h, g n] in base 2."""
        keys = keys[:, slab.slots]
        scores = self.buffer("scores", (*keys.shape[:2], query.shape[1]))
        scores.baddbmm_(keys, query.mT, beta=0, alpha=self.scale * _LOG2_E)
        return scores.unflatten(1, (-1, row.height))

    def exponentials(self, scores: Tensor, row: _Row, slab: _Slab) -> tuple[Tensor, Tensor]:
        """Tokens' scores become exponentials; [J, N, g n] each chunk's largest score and sum, told to its tiles."""
        tokens = scores[:, :, : row.width]
        for run in row.ragged:
            first, stop = max(run.start, slab.tiles.start), min(run.stop, slab.tiles.stop)
            if first < stop:
                tokens[:, first - slab.tiles.start : stop - slab.tiles.start].add_(row.padding[first:stop])
        if slab.later is not None:
            tokens[:, slab.late].unflatten(-1, (self.group, -1)).add_(slab.later[:, :, None])
        tops = row.over_chunks(tokens.amax(2), slab, "amax").clamp_(min=self.least)
        tokens.sub_(tops[:, :, None]).exp2_()
        return tops, row.over_chunks(tokens.sum(2), slab, "sum")

    def gates(
        self, scores: Tensor, tops: Tensor, sums: Tensor, row: _Row, slab: _Slab
    ) -> tuple[Tensor, Tensor]:
        """[J, N, g n]: what each chunk's softmax is multiplied by; and [J, 1, g n], their log-sum-exp in base 2."""
        marks = scores[:, :, row.width]
        gates = marks.clone() if row.closed is None else marks + row.closed[slab.tiles]
        if slab.own.stop > slab.own.start:
            hidden = self.of_own(gates, slab).add_(slab.hidden[:, None])
            if self.layout.own:
                own = self.of_own(tops, slab) + self.of_own(sums.log2(), slab)
                hidden.copy_(torch.where(slab.standing[:, None], own, hidden))
        top = gates.amax(1, keepdim=True).clamp_(min=self.least)
        gates.sub_(top).exp2_()
        total = (gates if row.leads is None else gates * row.leads[slab.tiles]).sum(1, keepdim=True)
        # 0 where nothing is attended to; else at least 1
        gates.div_(total.clamp(min=1))
        return gates, total.log2_().add_(top)

    def of_own(self, x: Tensor, slab: _Slab) -> Tensor:
        """[J, N, .., g n] -> [J, tiles of the slab's own chunks, .., g, n], a view"""
        return x[:, slab.own].unflatten(-1, (self.group, -1))

    def weights(self, scores: Tensor, gates: Tensor, sums: Tensor, row: _Row) -> Tensor:
        """[J, N h, g n]: the exponentials become weights; those of landmarks are 0."""
        # where nothing was seen, sums and gates are 0; else sums are at least 1
        scores[:, :, : row.width].mul_((gates / sums.clamp_(min=1))[:, :, None])
        scores[:, :, row.width] = 0
        return scores.flatten(1, 2)

    def through_softmax(
        self, ds: Tensor, weights: Tensor, gates: Tensor, of_total: Tensor | None, row: _Row, slab: _Slab
    ) -> None:
        """``ds`` [J, N, h, g n], gradients of the weights, become those of the scores."""
        tokens, weights = ds[:, :, : row.width], weights[:, :, : row.width]
        inner = tokens.mul_(weights).sum(2)  # [J, N, g n]
        delta = inner.sum(1, keepdim=True)
        if of_total is not None:
            delta.sub_(of_total)
        inner = row.over_chunks(inner, slab, "sum")
        mean = torch.where(gates > 0, inner / gates, 0)  # by a chunk's softmax
        of_marks = inner.addcmul_(gates, delta, value=-1)
        if slab.own.stop > slab.own.start:
            # no landmark stands between a query and its own chunk
            own = self.of_own(mean, slab)
            of_all = delta.unflatten(-1, (self.group, -1)).expand(-1, *own.shape[1:])
            own.copy_(torch.where(slab.standing[:, None], of_all, own))
            self.of_own(of_marks, slab).masked_fill_(slab.standing[:, None], 0)
        if row.leads is not None:  # a landmark stands in every tile of its chunk
            of_marks.mul_(row.leads[slab.tiles])
        tokens.addcmul_(weights, mean[:, :, None], value=-1)
        ds[:, :, row.width] = of_marks


@dataclass(frozen=True)
class _Slab:
    """Queries side by side in q and of one document, and the tiles they see."""

    queries: slice  # in q
    tiles: slice  # of the row's
    slots: slice  # the same in slots
    own: slice  # of these tiles, those of the chunks that the queries stand in, M of them
    # of one row for all M tiles, where the queries stand in one chunk: long ones would keep T^2 numbers
    standing: Tensor  # bool [M, n]: the tile is of the query's own chunk
    hidden: Tensor  # [M, n]: -inf where the query must not look through the tile's gate, else 0
    late: slice  # of these tiles, those of own that may hold such tokens, K of them: none before the first query
    later: Tensor | None  # [K, W, n]: -inf at its own chunk's tokens after the query, else 0


class _Row:
    """One row of the batch, cut into N tiles, and into slabs."""

    def __init__(self, layout: LandmarkLayout, number: int) -> None:
        table = torch.stack([getattr(layout, name)[number] for name in TABLES], 1)
        chunks = [_Chunk(*chunk) for chunk in table.tolist()]
        self.number, self.causal, self.device = number, layout.causal, table.device
        self.width = W = _tile_width([chunk.length for chunk in chunks])
        self.height = h = W + 1
        # (chunk, first slot, tokens held, place of the first, place of the landmark), in order of chunks
        tiles = [
            (c, slot, min(W, chunk.length - slot), chunk.start + slot, chunk.landmark)
            for c, chunk in enumerate(chunks)
            for slot in range(0, chunk.length, W)
        ]
        self.count = len(tiles)
        of_chunk = [c for c, *_ in tiles]
        leading = [slot == 0 for _, slot, *_ in tiles]
        short = {i for i, (_, _, held, *_) in enumerate(tiles) if held < W}
        split = not all(leading)
        begin = tiles[0][3] if tiles else 0
        regular = not short and all(
            (place, landmark) == (begin + i * h, begin + i * h + W)
            for i, (*_, place, landmark) in enumerate(tiles)
        )
        self.begin = begin if regular else None

        self.tiles = torch.tensor(tiles, dtype=torch.int64, device=self.device).view(-1, 5)
        slot = torch.arange(h, device=self.device)
        held, place, landmark = (self.tiles[:, i, None] for i in (2, 3, 4))
        far = layout.far[number, self.tiles[:, 0]]
        self.closed = None if bool(far.all()) else _minus_infinity_where(~far)[:, None]  # [N, 1]
        self.leads = None
        if split:
            leads = torch.tensor(leading, device=self.device)
            self.numbers = leads.cumsum(0) - 1  # [N], of chunks that have tiles
            # [N, 1], where chunks have several tiles: 1 for the first of each, which alone counts as its gate
            self.leads = leads[:, None].float()
        self.padding = _minus_infinity_where(slot[:W] >= held)[..., None]  # [N, W, 1]
        starts = [i for i in sorted(short) if i - 1 not in short]
        stops = [i + 1 for i in sorted(short) if i + 1 not in short]
        runs = [slice(*run) for run in zip(starts, stops, strict=True)]
        # of tiles that are not full; many runs are not worth their calls
        self.ragged = runs if len(runs) <= 3 else [slice(0, self.count)]
        if self.begin is None:
            places = torch.where(slot < held, place + slot, -1)  # [N, h]
            places[:, W] = landmark[:, 0]
            self.vacant = (places.flatten() < 0).nonzero()[:, 0]
            self.places = places.flatten().clamp(min=0)  # of each slot, in k
            if self.leads is not None:
                places[:, W].masked_fill_(self.leads[:, 0] == 0, -1)
            self.kept = (places.flatten() >= 0).nonzero()[:, 0]  # slots, each place once
            self.kept_places = places.flatten()[self.kept]
        self.slabs = list(self._slabs(chunks, of_chunk))
        self.largest = max(
            ((x.slots.stop - x.slots.start) * (x.queries.stop - x.queries.start) for x in self.slabs),
            default=0,
        )

    def _slabs(self, chunks: list[_Chunk], of_chunk: list[int]) -> Iterator[_Slab]:
        counts = Counter(of_chunk)
        first = [0]  # tile of each chunk
        for c in range(len(chunks)):
            first.append(first[-1] + counts[c])
        pieces = [  # (first query, its slot, queries, chunk)
            (chunk.query_start + i, chunk.query_slot + i, min(_SLAB_QUERIES, chunk.queries - i), c)
            for c, chunk in enumerate(chunks)
            for i in range(0, chunk.queries, _SLAB_QUERIES)
        ]
        masks: dict[object, tuple[Tensor, Tensor, Tensor | None]] = {}
        at = 0
        while at < len(pieces):
            begin, entry, size, c = pieces[at]
            taken, at = [pieces[at]], at + 1
            while at < len(pieces):
                query, _, more, other = pieces[at]
                follows = query == begin + size and chunks[other].first == chunks[c].first
                if not follows or size + more > _SLAB_QUERIES:
                    break
                taken, size, at = [*taken, pieces[at]], size + more, at + 1
            (_, slot, many, last), before = taken[-1], first[chunks[c].first]
            own = slice(first[c], first[last + 1])
            stop = first[chunks[c].end]
            if self.causal:  # no tile after the last token that the last query sees
                stop = first[last] - (-min(slot + many, chunks[last].length) // self.width)
                own = slice(own.start, stop)
            if stop == before:
                continue
            late = slice(own.stop, own.stop)
            if self.causal:  # the tiles of the first query's chunk up to its slot hide nothing from anyone
                past = min(first[c] + (entry + 1) // self.width, first[c + 1], own.stop)
                late = slice(past, own.stop)
            count = late.stop - late.start
            if len(taken) == 1:  # in one chunk, it matters where it stands in these tiles, not in the chunk
                key: object = (entry - (late.start - first[c]) * self.width if count else 0, size, count)
            else:
                lengths = [chunk.length for chunk in chunks[c : last + 1]]
                key = (
                    str([(slot, many, x - c) for _, slot, many, x in taken]),
                    str(lengths),
                    own.stop - own.start,
                )
            if key not in masks:
                masks[key] = self._masks(taken, own, late)
            standing, hidden, later = masks[key]
            yield _Slab(
                slice(begin, begin + size),
                slice(before, stop),
                slice(before * self.height, stop * self.height),
                slice(own.start - before, own.stop - before),
                standing,
                hidden,
                slice(late.start - before, late.stop - before),
                later,
            )

    def _masks(
        self, pieces: list[tuple[int, int, int, int]], own: slice, late: slice
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        chunk = torch.tensor([c for _, _, many, c in pieces for _ in range(many)], device=self.device)
        slot = torch.tensor([s + i for _, s, many, _ in pieces for i in range(many)], device=self.device)
        if len(pieces) == 1:  # all is their own chunk
            standing = torch.ones((1, len(slot)), dtype=torch.bool, device=self.device)
            hidden = _minus_infinity_where(standing)
        else:
            of_tile = self.tiles[own, 0, None]
            standing = of_tile == chunk  # [M, n]
            hidden = _minus_infinity_where(of_tile >= chunk if self.causal else standing)
        if late.start == late.stop:
            return standing, hidden, None
        at = self.tiles[late, 1, None] + torch.arange(self.width, device=self.device)  # [K, W]
        later = (self.tiles[late, 0, None] == chunk)[:, None] & (at[..., None] > slot)  # [K, W, n]
        return standing, hidden, _minus_infinity_where(later)

    def over_chunks(self, x: Tensor, slab: _Slab, how: str) -> Tensor:
        """[J, N, g n]: of all tiles of a chunk, told to each of them; as it is where no chunk has several."""
        if self.leads is None:
            return x
        into = self.numbers[slab.tiles] - self.numbers[slab.tiles.start]
        if how == "sum":
            total = torch.zeros_like(x).index_add_(1, into, x)
        else:
            total = torch.full_like(x, -torch.inf).scatter_reduce_(1, into[:, None].expand_as(x), x, how)
        return total.index_select(1, into)

    def unpack(self, packed: Tensor, into: Tensor) -> None:
        """[J, N h, D] -> [J, T, D]"""
        if self.begin is not None:
            into[:, self.begin : self.begin + packed.shape[1]] = packed
        else:
            into.index_copy_(1, self.kept_places, packed.index_select(1, self.kept).to(into.dtype))


@dataclass(frozen=True)
class _Chunk:
    """A line of the tables."""

    start: int
    length: int
    landmark: int
    query_start: int
    queries: int
    query_slot: int
    first: int
    end: int


def _tile_width(lengths: list[int]) -> int:
    """The W that pads chunks of these lengths the least; the longest length, if that is hardly worse."""
    counts = Counter(lengths)
    del counts[0]
    widest = min(max(counts, default=1), _WIDEST_TILE)

    def slots(width: int) -> int:
        return sum(-(-length // width) * (width + 1) * many for length, many in counts.items())

    best = min((w for w in (widest, 64, 32, 16, 8, 4, 2, 1) if w <= widest), key=slots)
    return widest if slots(widest) <= 1.25 * slots(best) else best


def _minus_infinity_where(hidden: Tensor) -> Tensor:
    """Added to scores, -inf where ``hidden``: several times faster than masked_fill_ of them."""
    return torch.zeros_like(hidden, dtype=torch.float32).masked_fill_(hidden, -torch.inf)
