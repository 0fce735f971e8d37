"""The weighted loss of a micro-batch, and what is measured beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trailmark.models import TrailmarkForCausalLM
from trailmark.models.loss import shift_labels

LAYOUT = ("attention_mask", "close_chunk", "document_ids")
NEIGHBOURS = ("neighbours", "neighbour_scores")  # of a table


def bearing_weights(model: TrailmarkForCausalLM, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """At t the label of token t + 1 and the weight of its loss, both [B, T]; -100 and 0 where there is none."""
    bearing = model.bearing_loss(inputs["labels"], inputs["input_ids"], inputs.get("document_ids"))
    labels = shift_labels(bearing)
    weights = F.pad(inputs["loss_weights"][:, 1:], (0, 1)).masked_fill(labels == -100, 0)
    return labels, weights


def total_weight(model: TrailmarkForCausalLM, batches: list[dict[str, Tensor]]) -> Tensor:
    """float64: what the losses of the micro-batches are divided by together, so that their gradients add up."""
    return torch.stack([bearing_weights(model, batch)[1].double().sum() for batch in batches]).sum()


def weighted_loss(
    model: Any,
    retrieves: bool,
    inputs: dict[str, Any],
    total: Tensor | None = None,
    landmarks: bool = True,
    rows: int | None = None,
) -> tuple[Tensor, Any, Tensor]:
    """The weighted sum of the token losses over ``total`` (None: their mean), the output and the shifted labels.

    Where landmarks are tokens of the text, what a token's landmark adds weighs as the token does. A ranking that is
    learned adds its own loss (:func:`ranking_part`).

    Args:
        model: ours, or what DDP or FSDP2 made of it.
        retrieves: ask for what was selected.
        landmarks: whether landmarks that are tokens of the text bear loss; not in a perplexity of the text.
        rows: of the global batch; None: these are all.
    """
    out = model(
        input_ids=inputs["input_ids"],
        noise_seed=inputs["noise_seed"],  # whatever a model draws, a run that goes on draws again
        output_retrieval=retrieves,
        **{key: inputs[key] for key in (*LAYOUT, *NEIGHBOURS) if key in inputs},
    )
    labels, weights = bearing_weights(getattr(model, "module", model), inputs)
    dtype = torch.promote_types(out.logits.dtype, torch.float32)
    losses = F.cross_entropy(
        out.logits.to(dtype).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none"
    )
    if landmarks and out.landmark_loss is not None:
        losses = losses + out.landmark_loss.flatten()
    if total is None:
        total = weights.double().sum()
    loss = (losses * weights.flatten()).sum() / total.to(losses.dtype).clamp(min=1e-9)
    ranking = ranking_part(out, rows)
    return loss if ranking is None else loss + ranking, out, labels


def ranking_part(out: Any, rows: int | None = None) -> Tensor | None:
    """What a micro-batch's learned ranking adds to the loss: a mean over the rows of the global batch; None: nothing.

    Each row's own loss is a mean over its pairs, so that the parts of micro-batches and processes add up.

    Args:
        rows: of the global batch; None: the micro-batch is all of it.
    """
    found = out.ranking_loss
    return None if found is None else found.sum() / (rows or len(found))


@dataclass(frozen=True)
class Measured:
    """Of one step, over all processes."""

    loss: float
    tokens: int
    accuracy: float | None = None  # of the answers' tokens (the demo's needles: of first digits)
    recall: float | None = None  # share of questions whose needle was selected by some group
    ranking: float | None = None  # the ranking's loss, which comes on top of ``loss``

    @property
    def whole_loss(self) -> float:
        """What is differentiated."""
        return self.loss + (self.ranking or 0.0)

    def averages(self) -> dict[str, float]:
        found = {"loss": self.loss, "ranking": self.ranking, "accuracy": self.accuracy, "recall": self.recall}
        return {name: value for name, value in found.items() if value is not None}


class Meter:
    """Sums over the micro-batches of a step, on their device; text waits for none of them before ``vector`` is read."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    @torch.no_grad()
    def add(
        self, loss: Tensor, out: Any, labels: Tensor, inputs: dict[str, Any], rows: int | None = None
    ) -> None:
        """Take in a micro-batch: its part of the loss, the model's output, shifted labels, what was passed.

        ``rows``: of the global batch, as given to :func:`weighted_loss`.
        """
        mask = inputs.get("attention_mask")
        ids = inputs["input_ids"]
        device = loss.device
        tokens = torch.full((), ids.numel(), device=device) if mask is None else mask.sum()
        sums = [loss.detach().double(), tokens, *torch.zeros(6, device=device).unbind()]
        if (ranking := ranking_part(out, rows)) is not None:
            sums[0], sums[6], sums[7] = sums[0] - ranking.double(), ranking, sums[7] + 1
        questions = inputs.get("first_digits", inputs.get("answers"))
        if questions is not None:
            asked = F.pad(questions[:, 1:], (0, 1))
            sums[2] = (out.logits[asked].argmax(-1) == labels[asked]).sum()
            sums[3] = asked.sum()
            if out.retrieval is not None and "needle_chunks" in inputs:
                needles = inputs["needle_chunks"]
                hits = torch.stack([(s.indices == needles[..., None]).any(-1) for s in out.retrieval]).any(0)
                sums[4], sums[5] = (hits & (needles >= 0)).sum(), (needles >= 0).sum()
        vector = torch.stack([part.double() for part in sums])
        self._sums = vector if self._sums is None else self._sums + vector

    def vector(self) -> Tensor:
        """[8] float64, to be added up over processes; the meter begins anew."""
        assert self._sums is not None
        sums, self._sums = self._sums, None
        return sums

    @staticmethod
    def read(sums: list[float]) -> Measured:
        loss, tokens, right, asked, found, needles, ranking, ranked = sums
        return Measured(
            loss,
            round(tokens),
            right / asked if asked else None,
            found / needles if needles else None,
            ranking if ranked else None,
        )
