"""What a DRT's scores say: how much of them belongs to a past chunk, whoever asks, and how much to the pair."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trailmark.data.corpus import Tokens
from trailmark.evaluation.retrieval.run import parts_of
from trailmark.models import DRTForCausalLM

# short trainings, each with another way to score or to choose
SHORT = ("training.steps=400", "training.eval_steps=200", "training.save_steps=400")
VARIANTS = {
    "as-configured": (),
    "scale-1": ("model.retrieval_scale=1.0",),
    "scale-1-no-noise": ("model.retrieval_scale=1.0", "model.retrieval_noise=false"),
    "scale-1-two-chunks": ("model.retrieval_scale=1.0", "model.num_retrieved_chunks=2"),
    "not-normalized": ("model.retrieval_scale=1.0", "model.retrieval_normalization=false"),
}
_FEWEST = 8  # chunks of a text whose scores are looked into


def likeness(landmarks: Tensor) -> float:
    """Mean cosine between the landmark vectors [C, E], C >= 2, of two different chunks of a text."""
    unit = torch.nn.functional.normalize(landmarks, dim=-1)
    C = len(unit)
    return float(((unit @ unit.T).sum() - C) / (C * (C - 1)))


def score_parts(model: DRTForCausalLM, texts: Iterable[Tokens]) -> dict[str, Any] | None:
    """What the scores say of texts of tokens [T].

    "groups": of each group the means over texts of what the suite "retrieval" says of scores; "cosine": the mean of
    :func:`likeness`; "texts": how many were long enough. None: no text was.
    """
    of_groups: list[list[dict[str, float]]] = [[] for _ in model.retrievers]
    alike = []
    for text in texts:
        if len(text) < _FEWEST * model.config.chunk_size:
            continue
        ids = torch.from_numpy(text.astype("int64"))[None].to(model.device)
        with torch.no_grad():
            found = model.eval()(ids, output_retrieval_scores=True).retrieval_scores.scores
            whole = ids[:, : len(text) // model.config.chunk_size * model.config.chunk_size]
            alike.append(likeness(model.encode(whole).landmarks[0].float()))
        for own, scores in zip(of_groups, found, strict=True):
            own.append(parts_of(scores[0].cpu(), model.config))
    if not alike:
        return None
    return {
        "groups": [{name: float(np.mean([x[name] for x in own])) for name in own[0]} for own in of_groups],
        "cosine": float(np.mean(alike)),
        "texts": len(alike),
    }
