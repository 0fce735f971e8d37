"""The weighted loss of a micro-batch, and what is measured beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trailmark.models import CausalLMOutput, TrailmarkForCausalLM
from trailmark.models.loss import BearingTokens, shift_labels, text_loss
from trailmark.ops import fold_seed
from trailmark.training.distil import Lesson, Told

LAYOUT = ("attention_mask", "close_chunk", "document_ids")
_POSITIONS = 0x9051710  # of the draw of the tokens that bear loss
NEIGHBOURS = ("neighbours", "neighbour_scores")  # of a table


class Called(NamedTuple):
    """What one call of a model on a micro-batch gave."""

    loss: Tensor  # the micro-batch's part of what is differentiated
    out: CausalLMOutput
    labels: Tensor  # [B, T] shifted: at t that of token t + 1
    ranking: Tensor | None  # the part of the loss that a learned ranking adds
    told: Told | None = None  # by a teacher


def bearing_weights(model: TrailmarkForCausalLM, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """At t the label of token t + 1 and the weight of its loss, both [B, T]; -100 and 0 where there is none.

    Labels and weights may be [B, T + 1]: of the first token of the next stretch too, where texts are shared.
    """
    bearing = model.bearing_loss(inputs["labels"], inputs["input_ids"], inputs.get("document_ids"))
    labels = shift_labels(bearing)
    weights = F.pad(inputs["loss_weights"][:, 1:], (0, 1)).masked_fill(labels == -100, 0)
    length = inputs["input_ids"].shape[1]
    return labels[:, :length], weights[:, :length]


def total_weight(model: TrailmarkForCausalLM, batches: list[dict[str, Tensor]]) -> Tensor:
    """float64: what the losses of the micro-batches are divided by together, so that their gradients add up."""
    return torch.stack([bearing_weights(model, batch)[1].double().sum() for batch in batches]).sum()


def drawn_positions(noise_seed: Tensor, length: int, share: float) -> Tensor:
    """int64 [B, n], ascending: tokens of each row that bear loss, each as likely as any other and none twice.

    ``noise_seed`` int64 [B] is of the step and the sample, so that any split of a batch draws the same. Their number n
    is ``share`` of the row's ``length`` tokens, at least 1.
    """
    count = max(1, round(share * length))
    places = torch.arange(length, device=noise_seed.device)
    order = fold_seed(noise_seed[:, None], _POSITIONS, places).argsort(dim=1, stable=True)
    return order[:, :count].sort(dim=1).values


def weighted_loss(
    model: Any,
    inputs: dict[str, Any],
    total: Tensor | None = None,
    rows: int | None = None,
    text_alone: bool = False,
    positions: float = 1.0,
    lesson: Lesson | None = None,
    scores: bool = False,
    slab: int | None = None,
) -> Called:
    """Call the model on a micro-batch, for the model's own loss (:func:`trailmark.models.loss.text_loss`).

    Where landmarks are tokens of the text, what a token's landmark adds weighs as the token does. A ranking that is
    learned adds its own loss: each row's is a mean over its pairs, and the rows of the global batch count alike, so
    that the parts of micro-batches and processes add up.

    Args:
        model: ours, or what DDP or FSDP2 made of it.
        total: what the weighted sum of the tokens' losses is divided by; None: the weights' sum.
        rows: of the global batch; None: these are all.
        text_alone: for a perplexity of the text: landmarks bear no loss, and what was selected is not returned.
        positions: the share of each row's tokens that bear loss, for all of them.
        lesson: what a teacher adds.
        scores: the model, which ranks all chunks, says how.
        slab: tokens whose logits are there at a time; None: of all of them.
    """
    own: TrailmarkForCausalLM = getattr(model, "module", model)
    others: dict[str, Any] = {}
    at = None
    if positions < 1:
        at = others["logits_at"] = drawn_positions(
            inputs["noise_seed"], inputs["input_ids"].shape[1], positions
        )
    labels, weights = bearing_weights(own, inputs)
    if total is None:
        total = weights.double().sum()
    if at is not None:
        labels, weights = labels.gather(1, at), weights.gather(1, at) * (labels.shape[1] / at.shape[1])
    if slab is not None:
        others["bearing"] = BearingTokens(labels, weights, total, slab)
    if scores or (lesson is not None and lesson.ranks_chunks):
        others["output_retrieval_scores"] = True
    out = model(
        input_ids=inputs["input_ids"],
        noise_seed=inputs["noise_seed"],  # whatever a model draws, a run that goes on draws again
        output_retrieval=own.config.retrieves_in_training and not text_alone,
        **{key: inputs[key] for key in (*LAYOUT, *NEIGHBOURS) if key in inputs},
        **others,
    )
    ranking, count = out.ranking_loss, rows or len(labels)
    if slab is None:
        loss = text_loss(
            out.logits,
            labels,
            weights=weights,
            total=total,
            landmark_loss=None if text_alone else out.landmark_loss,
            ranking_loss=ranking,
            rows=count,
        )
    else:
        loss = out.loss if ranking is None else out.loss + ranking.sum() / count
    told = None
    if lesson is not None:
        told = lesson.tell(inputs, out, weights, at, total, count)
        loss = loss + told.weighted
    return Called(loss, out, labels, None if ranking is None else ranking.sum() / count, told)


@dataclass(frozen=True)
class Measured:
    """Of one step, over all processes."""

    loss: float
    tokens: int
    accuracy: float | None = None  # of the answers' tokens (the demo's needles: of first digits)
    recall: float | None = None  # share of questions whose needle was selected by some group
    ranking: float | None = None  # the ranking's loss, which comes on top of ``loss``
    # divergences from a teacher, unweighted: of the next token, of the retrieval's scores
    distil: float | None = None
    distil_retrieval: float | None = None

    @property
    def whole_loss(self) -> float:
        """All that is differentiated; finite if each part is."""
        return self.loss + (self.ranking or 0.0) + (self.distil or 0.0) + (self.distil_retrieval or 0.0)

    def averages(self) -> dict[str, float]:
        names = ("loss", "ranking", "distil", "distil_retrieval", "accuracy", "recall")
        found = {name: getattr(self, name) for name in names}
        return {name: value for name, value in found.items() if value is not None}


class Meter:
    """Sums over the micro-batches of a step, on their device; text waits for none of them before ``vector`` is read."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    @torch.no_grad()
    def add(self, called: Called, inputs: dict[str, Any]) -> None:
        """Take in what a call on a micro-batch gave, and what was passed to it."""
        loss, out, labels, ranking, told = called
        mask = inputs.get("attention_mask")
        ids = inputs["input_ids"]
        device = loss.device
        tokens = torch.full((), ids.numel(), device=device) if mask is None else mask.sum()
        sums = [loss.detach().double(), tokens, *torch.zeros(10, device=device).unbind()]
        if ranking is not None:
            sums[0], sums[6], sums[7] = sums[0] - ranking.double(), ranking, sums[7] + 1
        if told is not None:
            sums[0], sums[8], sums[9] = sums[0] - told.weighted.double(), told.tokens, sums[9] + 1
            if told.chunks is not None:
                sums[10], sums[11] = told.chunks, sums[11] + 1
        questions = inputs.get("first_digits", inputs.get("answers"))
        if questions is not None:
            assert out.logits is not None
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
        """[12] float64, to be added up over processes; the meter begins anew."""
        assert self._sums is not None
        sums, self._sums = self._sums, None
        return sums

    @staticmethod
    def read(sums: list[float]) -> Measured:
        loss, tokens, right, asked, found, needles, ranking, ranked, told, taught, chunks, ranks = sums
        return Measured(
            loss,
            round(tokens),
            right / asked if asked else None,
            found / needles if needles else None,
            ranking if ranked else None,
            told if taught else None,
            chunks if ranks else None,
        )
