"""A retriever that is set from texts alone: each chunk asks for chunks that are like what comes next.

Most of a pretrained model's state is what all its states have in common, and a projection that is drawn at random or
learned from there says mostly that: whatever it scores, it scores for all that ask. So the mean's direction is taken
out, what is left of landmark vectors is whitened, and a query is the linear prediction of the next chunk's vector, by
least squares. No teacher has a part in it. What is learned from there is free to bring any of it back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trailmark.processes import all_reduced

# of the mean square of all directions: one that holds much less stays small
_SHRINKING = 1.0


class NextChunk:
    """Sums over texts that the projections of a retriever are solved from, one process's share.

    Args:
        landmark: states that sum a chunk up -> its landmark vector. queries: of each group, a landmark's -> its query.
    """

    def __init__(self, landmark: nn.Linear, queries: Sequence[nn.Linear]) -> None:
        self.landmark, self.queries = landmark, queries
        E, G = landmark.in_features, len(queries)
        # of summaries s, of asking states h of each group, and of next summaries s': sums and products; and how many
        self.summaries, self.asking, self.summary_products, self.asking_products, self.both, self.counts = (
            torch.zeros(size, dtype=torch.float64, device=landmark.weight.device)
            for size in ((E,), (G, E), (E, E), (G, E, E), (G, E, E), (2,))
        )

    def add(self, summaries: Tensor, asking: Sequence[Tensor], there: Tensor, follows: Tensor) -> None:
        """Chunks of one batch.

        Args:
            summaries: [B, C, E]. asking: of each group [B, C, E]. there: bool [B, C] chunks that hold tokens.
            follows: bool [B, C] whether a chunk goes on with the document of the one before it.
        """
        pairs = there[:, :-1] & there[:, 1:] & follows[:, 1:]
        own, after = summaries[there].double(), summaries[:, 1:][pairs].double()
        self.summaries += own.sum(0)
        self.summary_products += own.mT @ own
        for group, states in enumerate(asking):
            h = states[:, :-1][pairs].double()
            self.asking[group] += h.sum(0)
            self.asking_products[group] += h.mT @ h
            self.both[group] += h.mT @ after
        self.counts += torch.tensor([len(own), len(after)]).to(self.counts)

    @torch.no_grad()
    def solve(self) -> None:
        """Set the projections, each as large as it was.

        Raises:
            ValueError: the texts have no two chunks in a row.
        """
        for sums in (
            self.summaries, self.summary_products, self.asking, self.asking_products, self.both, self.counts,
        ):  # fmt: skip
            all_reduced(sums)
        chunks, pairs = self.counts.tolist()
        if not pairs:
            raise ValueError(
                "distil.fit_retriever: expected texts with two chunks in a row to set the retriever from, got none. "
                "Set training.context_length higher."
            )
        without_mean = _without(self.summaries)
        values, vectors = torch.linalg.eigh(without_mean @ (self.summary_products / chunks) @ without_mean)
        values = values.clamp(min=0)
        scales = (values + _SHRINKING * values.mean()).rsqrt()
        to_landmark = without_mean @ (vectors * scales) @ vectors.mT  # [E, E] s -> vector
        _set(self.landmark, to_landmark)
        for group, projection in enumerate(self.queries):
            without_mean = _without(self.asking[group])
            squares = without_mean @ (self.asking_products[group] / pairs) @ without_mean
            ridge = _SHRINKING * squares.diagonal().mean() * torch.eye(len(squares)).to(squares)
            wanted = without_mean @ (self.both[group] / pairs) @ to_landmark
            _set(projection, without_mean @ torch.linalg.solve(squares + ridge, wanted))


def _without(direction: Tensor) -> Tensor:
    """The projection [E, E] that takes a direction [E] out."""
    unit = direction / direction.norm().clamp(min=torch.finfo(direction.dtype).tiny)
    return torch.eye(len(unit)).to(unit) - torch.outer(unit, unit)


def _set(projection: nn.Linear, found: Tensor) -> None:
    """The weight, of a matrix [in, out] of any scale; as large as before, so that a learning rate means the same."""
    size = projection.weight.double().square().mean().sqrt() / found.square().mean().sqrt()
    projection.weight.copy_(found.mT * size)
