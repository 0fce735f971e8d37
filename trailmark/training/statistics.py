"""What a model retrieves while it trains: how old, how evenly weighted, and what is never read.

Row n of a selection is what chunk n's landmark selected, among the chunks before n. All is summed on the device,
over micro-batches and processes; nothing waits before :meth:`RetrievalStatistics.means`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trailmark.ops import ChunkSelection, score_parts
from trailmark.processes import all_reduced

# rows of the sums, each [G + 1]: groups, then all together
_ASKERS, _AGES, _ENTROPIES, _CHOOSERS, _EVENNESS, _READABLE, _UNREAD, _TEXTS, _POPULAR = range(9)


class RetrievalStatistics:
    """Sums over batches of what was selected; begins empty.

    - ``age``: asking chunk minus selected chunk, in chunks, weighted by the weights; mean over askers (chunks that
      selected something).
    - ``entropy``: of the weights, in nats; mean over askers.
    - ``evenness``: entropy over its largest value, the logarithm of how many were selected; mean over askers that
      selected at least two. 1: all weigh the same.
    - ``never_read``: share of the chunks that some asker of their sample could have selected and none did. Over all
      groups: that none did in any group.
    - ``popular``: share of the scores' variance that is a past chunk's own, whoever asks (:func:`score_parts`); mean
      over the texts that have scores which differ, and over groups.
    """

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    @torch.no_grad()
    def add(
        self,
        retrieval: Sequence[ChunkSelection],
        num_candidates: Tensor | None = None,
    ) -> None:
        """Take in a batch that began without a memory. Does not wait for the device.

        Args:
            retrieval: of each group, [B, N, K], or [B, N, J, K] where heads select for themselves (their means).
            num_candidates: [N] or [B, N] how many of the first chunks each could select, where these are not all before
                it (chunks inside the window). None: the chunks before it.
        """
        if not retrieval:
            return
        indices = retrieval[0].indices
        before = torch.arange(indices.shape[1], device=indices.device)
        end = (before if num_candidates is None else num_candidates.to(indices.device)).expand(
            indices.shape[:2]
        )
        columns, read = [], []
        reachable = torch.zeros_like(end, dtype=torch.bool)
        for selection in retrieval:
            column, readable, was_read = _sums_of(selection, end)
            columns.append(column)
            read.append(was_read)
            reachable |= readable
        overall = torch.stack(columns).sum(0)
        overall[_READABLE] = reachable.sum()
        overall[_UNREAD] = (reachable & ~torch.stack(read).any(0)).sum()
        self._add_up(torch.stack([*columns, overall], dim=1))

    @torch.no_grad()
    def add_scores(self, scores: Sequence[Tensor], recency: float = 0.0) -> None:
        """Take in how the chunks of a batch score each other: of each group [B, N, N], see :func:`score_parts`."""
        rows = []
        for own in scores:
            deviation, popular = score_parts(own, recency)
            rows.append(torch.stack([(deviation > 0).sum(), popular.sum()]))
        sums = torch.stack([*rows, torch.stack(rows).sum(0)], dim=1)  # [2, G + 1]
        self._add_up(torch.cat([sums.new_zeros(_TEXTS, sums.shape[1]), sums]))

    def _add_up(self, sums: Tensor) -> None:
        self._sums = sums if self._sums is None else self._sums + sums

    def means(self) -> dict[str, float]:
        """The statistics of all processes so far, as numbers, and begin anew. Waits for the device.

        Returns:
            ``age entropy evenness never_read popular`` over all groups, and with more than one, ``group_0/age`` ... of
            each. What is a mean of nothing is left out: no asker, none that had a choice, no chunk to be read, no
            score.
        """
        if self._sums is None:
            return {}
        sums, self._sums = self._sums, None
        rows = all_reduced(sums).tolist()
        groups = len(rows[0]) - 1
        found: dict[str, float] = {}
        for column in (groups, *(range(groups) if groups > 1 else ())):
            prefix = "" if column == groups else f"group_{column}/"
            for name, value, count in (
                ("age", _AGES, _ASKERS),
                ("entropy", _ENTROPIES, _ASKERS),
                ("evenness", _EVENNESS, _CHOOSERS),
                ("never_read", _UNREAD, _READABLE),
                ("popular", _POPULAR, _TEXTS),
            ):
                if rows[count][column]:
                    found[prefix + name] = rows[value][column] / rows[count][column]
        return found


def _sums_of(selection: ChunkSelection, end: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of one group: the sums [9] float64, of scores 0, which chunks could have been read and which were, bool [B, N].

    Args:
        end: int64 [B, N]: chunk n could select those before ``end[b, n]``.
    """
    indices, weights = selection.indices, selection.weights.detach().double()
    B, N = indices.shape[:2]
    chosen = indices >= 0
    asks = torch.arange(N, device=indices.device).view(N, *[1] * (indices.dim() - 2))  # n of every selection
    ages = torch.where(chosen, (asks - indices) * weights, 0.0).sum(-1)  # [B, N, (J)]
    entropies = torch.special.entr(weights).sum(-1)  # 0 where a weight is 0
    counts = chosen.sum(-1)
    evenness = torch.where(counts > 1, entropies / counts.clamp(min=2).double().log(), 0.0)
    sums = [(counts > 0).sum(), ages.sum(), entropies.sum(), (counts > 1).sum(), evenness.sum()]

    slots = torch.where(chosen, indices, N).flatten(1)  # one more slot for what is none
    was_read = torch.zeros(B, N + 1, dtype=torch.bool, device=indices.device)
    was_read.scatter_(1, slots, torch.ones_like(slots, dtype=torch.bool))
    # an asker at n opens 0 ... end - 1: what the askers that open most open is readable
    opened = torch.where(chosen.flatten(2).any(-1), end, 0)
    most = opened.amax(1, keepdim=True) if N else opened
    readable = torch.arange(N, device=indices.device) < most
    unread = readable & ~was_read[:, :N]
    nothing = torch.zeros((), device=indices.device)
    sums += [readable.sum(), unread.sum(), nothing, nothing]
    return torch.stack([value.double() for value in sums]), readable, was_read[:, :N]
