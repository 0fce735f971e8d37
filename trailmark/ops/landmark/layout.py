"""Where chunks and their landmarks stand, as tables: made once for all layers that attend alike."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trailmark.ops.arguments import require, require_shape, values_are_checked, whole_numbers


class LayoutParts(NamedTuple):
    """What a custom op may take of a layout: tensors and numbers, so nothing that it remembers."""

    tables: Tensor  # int64 [8, B, C], in the order of TABLES
    far: Tensor
    own: bool
    causal: bool
    max_length: int
    max_queries: int


# the fields of a layout that are int64 [B, C]
TABLES = ("starts", "lengths", "landmarks", "query_starts", "query_counts", "query_slots", "first", "end")


@dataclass(frozen=True, eq=False)
class LandmarkLayout:
    """Chunks, their landmarks and the queries that stand in them; :meth:`of` makes it.

    A chunk is the regular tokens since the last landmark (or since its document's beginning), closed by its
    landmark; a document's incomplete tail has none. Chunks are numbered in the order of their documents'
    first places, so those of a document follow each other. Tables are int64 [B, C] on the device of k.
    Chunks that do not exist have length 0, no landmark, no query, and nothing to see.
    """

    starts: Tensor  # place in k of the chunk's first regular token; the others and the landmark follow
    lengths: Tensor  # its regular tokens
    landmarks: Tensor  # place in k of its landmark; -1: none
    query_starts: Tensor  # place in q of the first query that stands in this chunk; the others follow at once
    query_counts: Tensor  # how many; its landmark, if a query, is the last
    query_slots: Tensor  # slot in the chunk of the first of them; the landmark's own slot is ``lengths``
    first: Tensor  # queries of chunk c see the far chunks first <= m < end with m != c and far[m]
    end: Tensor
    far: Tensor  # bool [B, C]: other chunks may see it: it has a landmark and a regular token
    own: bool  # whether queries attend to their own chunk
    causal: bool
    num_queries: int  # P
    num_keys: int  # T
    num_chunks: int  # C
    max_length: int  # S: most regular tokens of a chunk
    max_queries: int  # most queries of a chunk
    # Where absent places or other documents interrupt a chunk, tables speak of k and q in these orders, which
    # landmark_attention brings them into: new place -> old place, a permutation of each row. None: as they come.
    key_order: Tensor | None = None  # int64 [B, T]
    query_order: Tensor | None = None  # int64 [B, P]
    # what an implementation makes of the tables, once for all layers; under its name
    memo: dict[str, Any] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(
        is_landmark: Tensor,
        document_ids: Tensor | None = None,
        causal: bool = True,
        query_places: Tensor | None = None,
        num_queries: int | None = None,
    ) -> LandmarkLayout:
        """Read the layout off ``is_landmark``; waits for the device once.

        Args:
            is_landmark: bool [B, T].
            document_ids: int64 [B, T]; negative: absent. Equal ids are one document, wherever they stand.
            causal: whether chunks and tokens after a query are hidden from it.
            query_places: int64 [B, P]: the place in k of each row of q; -1: absent. Within a chunk, no place
                may be left out between two that are asked from, and none be asked from twice.
            num_queries: P, when there are no ``query_places``: q is the last P of T places. None: T.

        Raises:
            ValueError: for shapes and dtypes that do not fit, places that do not exist or leave gaps.
        """
        require(is_landmark.dim() == 2, "is_landmark", tuple(is_landmark.shape), "shape [B, T]")
        require(
            is_landmark.dtype == torch.bool,
            "is_landmark",
            is_landmark.dtype,
            "a bool tensor",
            "Compare input ids with the landmark's id.",
        )
        B, T = is_landmark.shape
        device = is_landmark.device
        if document_ids is not None:
            require_shape("document_ids", document_ids, (B, T), "[B, T]")
            document_ids = whole_numbers("document_ids", document_ids)
            _require_device("document_ids", document_ids, device)
        if query_places is None:
            P = T if num_queries is None else num_queries
            require(0 <= P <= T, "q", f"{P} queries for {T} keys", "at most as many", "Pass query_places.")
        else:
            require(query_places.dim() == 2, "query_places", tuple(query_places.shape), "shape [B, P]")
            P = query_places.shape[1] if num_queries is None else num_queries
            require_shape("query_places", query_places, (B, P), "[B, P]")
            query_places = whole_numbers("query_places", query_places)
            _require_device("query_places", query_places, device)
            if query_places.numel() and values_are_checked(query_places):
                low, high = torch.stack(query_places.aminmax()).tolist()
                require(high < T, "query_places", high, f"places below T = {T}")
                require(low >= -1, "query_places", low, "places from 0, or -1 for an absent query")

        # In ranks: documents one after the other, absent places last
        place = torch.arange(T, device=device).expand(B, T)
        if document_ids is None:
            order, rank, home = place, place, torch.zeros_like(place)
        else:
            home = _first_places(document_ids)  # T: absent
            order = home.argsort(dim=1, stable=True)
            rank = torch.empty_like(order).scatter_(1, order, place).masked_fill_(home == T, T)
            home = home.gather(1, order)
            is_landmark = is_landmark.gather(1, order)
        present = home < T
        is_landmark = is_landmark & present
        opens_document = present & (home != _before(home, -1))
        opens = opens_document | (present & _before(is_landmark, False))
        chunk = (opens.cumsum(1) - 1).masked_fill_(~present, T)

        def of_chunk(which: Tensor, values: Tensor, none: int = 0) -> Tensor:
            """[B, T + 1]: the value at the one place of each chunk where ``which``; the last column is waste."""
            table = torch.full((B, T + 1), none, dtype=torch.int64, device=device)
            return table.scatter_(1, chunk.masked_fill(~which, T), values)

        def count(chunks: Tensor) -> Tensor:
            table = torch.zeros((B, T + 1), dtype=torch.int64, device=device)
            return table.scatter_add_(1, chunks, torch.ones_like(chunks))

        starts = of_chunk(opens, place)
        landmarks = of_chunk(is_landmark, place, -1)
        lengths = count(chunk.masked_fill(is_landmark, T))
        first = of_chunk(opens, torch.where(opens_document, chunk, 0).cummax(1).values if T else chunk)
        if causal:
            end = of_chunk(opens, chunk)
        else:
            closes = present & (_before(home.flip(1), -1).flip(1) != home)
            after = torch.where(closes, chunk + 1, T + 1).flip(1)
            end = of_chunk(opens, after.cummin(1).values.flip(1) if T else after)

        # Queries, in the order of their ranks
        row = torch.arange(P, device=device).expand(B, P)
        absent = rank.new_full((B, 1), T)
        if query_places is None:
            asked = rank[:, T - P :]
        else:
            asked = torch.cat([rank, absent], 1).gather(1, query_places.masked_fill(query_places < 0, T))
        as_it_comes = document_ids is None and query_places is None
        query_order = row if as_it_comes else asked.argsort(dim=1, stable=True)
        asked = asked.gather(1, query_order)
        stands_in = torch.cat([chunk, absent], 1).gather(1, asked)  # T: in none
        opens_queries = (stands_in != _before(stands_in, -1)) & (stands_in < T)
        into = stands_in.masked_fill(~opens_queries, T)
        table = torch.zeros_like(starts)
        query_starts, query_slots = table.scatter(1, into, row), table.scatter_(1, into, asked)
        query_counts = count(stands_in)
        query_slots = torch.where(query_counts > 0, query_slots - starts, 0)

        sizes = [0] * 6
        if B and T:
            follow = (stands_in == _before(stands_in, -1)) & (stands_in < T)
            sizes = torch.stack(
                [
                    opens.sum(1).max(),
                    lengths[:, :T].max(),
                    query_counts[:, :T].max(),
                    (present & ~opens & (order != _before(order, -1) + 1)).any().long(),
                    (follow & (query_order != _before(query_order, -1) + 1)).any().long(),
                    (follow & (asked != _before(asked, -1) + 1)).any().long(),
                ]
            ).tolist()
        C, S, most, keys_move, queries_move, gaps = sizes
        require(
            not gaps,
            "query_places",
            "places with gaps between them inside a chunk, or one twice",
            "each chunk's queries at consecutive places",
            "Pass the rows between them too.",
        )
        starts, lengths, landmarks, first, end, query_starts, query_counts, query_slots = (
            x[:, :C].contiguous()
            for x in (starts, lengths, landmarks, first, end, query_starts, query_counts, query_slots)
        )
        far = (lengths > 0) & (landmarks >= 0)
        if not keys_move and document_ids is not None and C:
            landmarks = torch.where(landmarks < 0, -1, order.gather(1, landmarks.clamp(min=0)))
            starts = order.gather(1, starts)
        if not queries_move and not as_it_comes and C and P:
            query_starts = query_order.gather(1, query_starts)
        return LandmarkLayout(
            starts,
            lengths,
            landmarks,
            query_starts,
            query_counts,
            query_slots,
            first,
            end,
            far,
            True,
            causal,
            P,
            T,
            C,
            S,
            most,
            order if keys_move else None,
            query_order if queries_move else None,
        )

    def seeing(self, far: Tensor, own: bool = True) -> LandmarkLayout:
        """The same, but a chunk is seen from afar only where ``far`` (bool [B, C]) is true as well.

        ``own=False``: queries do not attend to their own chunk either.
        """
        require_shape("far", far, tuple(self.far.shape), "[B, C]")
        require(far.dtype == torch.bool, "far", far.dtype, "a bool tensor")
        _require_device("far", far, self.far.device)
        return replace(self, far=self.far & far, own=self.own and own, memo={})

    def parts(self) -> LayoutParts:
        """Without the orders of keys and queries: :meth:`of_parts` speaks of those that stand in order."""
        tables = torch.stack([getattr(self, name) for name in TABLES])
        return LayoutParts(tables, self.far, self.own, self.causal, self.max_length, self.max_queries)

    @staticmethod
    def of_parts(parts: LayoutParts, num_queries: int, num_keys: int) -> LandmarkLayout:
        """The layout again, of ``num_queries`` queries and ``num_keys`` keys."""
        tables, *rest = parts
        named: dict[str, Any] = dict(zip(TABLES, tables.unbind(), strict=True))
        named |= dict(zip(LayoutParts._fields[1:], rest, strict=True))
        return LandmarkLayout(
            **named, num_queries=num_queries, num_keys=num_keys, num_chunks=parts.far.shape[1]
        )

    def in_places(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For the oracle, dense: is_landmark [B, T], document_ids [B, T], query_places [B, P], seen [B, T].

        ``seen``: landmarks that may be attended to. All in the orders ``key_order`` and ``query_order``.
        """
        has_landmark = (self.landmarks >= 0).long()

        def spread(starts: Tensor, counts: Tensor, size: int, *values: Tensor) -> list[Tensor]:
            """[B, size]: the values of the chunk that a place is in; -1: in none."""
            place = torch.arange(size, device=starts.device)[:, None]
            inside = (place >= starts[:, None]) & (place < (starts + counts)[:, None])  # [B, size, C]
            return [torch.where(inside, x[:, None], 0).sum(2) - 1 + inside.any(2).long() for x in values]

        keys = self.starts, self.lengths + has_landmark, self.num_keys
        document, landmark, far = spread(*keys, self.first, self.landmarks, self.far.long())
        place = torch.arange(self.num_keys, device=landmark.device)
        shift = self.starts + self.query_slots - self.query_starts
        queries = self.query_starts, self.query_counts, self.num_queries
        standing, moved = spread(*queries, torch.zeros_like(shift), shift)
        query_places = moved + torch.arange(self.num_queries, device=landmark.device)
        is_landmark = landmark == place
        return is_landmark, document, query_places.masked_fill(standing < 0, -1), is_landmark & (far > 0)


def _require_device(argument: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        require(False, argument, f"a tensor on {tensor.device}", f"one on {device}", "Move it there.")


def _before(x: Tensor, none: int | bool) -> Tensor:
    """What stands one place before in each row [B, T]; ``none`` before the first."""
    return torch.nn.functional.pad(x[:, :-1], (1, 0), value=none) if x.shape[1] else x


def _first_places(document_ids: Tensor) -> Tensor:
    """[B, T]: the first place of each place's document; T: absent."""
    T = document_ids.shape[1]
    absent = document_ids < 0
    by_id = document_ids.argsort(dim=1, stable=True)
    if not T:
        return by_id
    ids = document_ids.gather(1, by_id)
    new = (ids != _before(ids, -1)).long() * torch.arange(T, device=ids.device)
    leader = by_id.gather(1, new.cummax(1).values)
    return torch.empty_like(by_id).scatter_(1, by_id, leader).masked_fill_(absent, T)
