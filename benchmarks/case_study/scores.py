"""What a DRT's scores say: how much of them belongs to a past chunk, whoever asks, and how much to the pair."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trailmark.data.corpus import Tokens
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


@torch.no_grad()
def scores_of(model: DRTForCausalLM, ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """Of each group the scores [C, C] of the chunks of ``ids`` [1, T] for each other; the landmark vectors [C, E].

    C is the number of whole chunks; all is float32. Row t, column c: what c scores where chunk t asks, without noise;
    those with c >= t mean nothing. The model is in eval mode then.
    """
    config = model.config
    kept: dict[str, Any] = {}
    modules = {"landmarks": model.encoder} | {str(g): part for g, part in enumerate(model.retrievers)}
    hooks = [
        part.register_forward_hook(lambda module, came, out, name=name: kept.__setitem__(name, out))
        for name, part in modules.items()
    ]
    try:
        asked = model.eval()(ids, output_retrieval=True).retrieval
    finally:
        for hook in hooks:
            hook.remove()
    landmarks = kept["landmarks"].landmarks[0].float()
    scale = config.retrieval_scale * config.hidden_size**-0.5
    found = [scale * kept[str(g)][0].float() @ landmarks.T for g in range(len(model.retrievers))]
    for scores, own in zip(found, asked, strict=True):
        indices, there = own.indices[0], own.indices[0] >= 0
        ours = scores.gather(1, indices.clamp(min=0))[there]
        torch.testing.assert_close(ours, own.scores[0].float()[there], rtol=1e-3, atol=1e-3)
    return found, landmarks


def parts(scores: Tensor) -> dict[str, float]:
    """Scores [C, C] of one text: how far those of one asking chunk lie apart, and why.

    The later half asks, the earlier half is scored: every pair may be read, but for a few in the middle with
    ``exclude_visible_chunks``. What a row adds to all its scores changes no choice and no weight, so its mean is taken
    off. "deviation" is the root of the variance that is left. "popular" is the share of it that belongs to the columns,
    to chunks that score high whoever asks. (Where nothing is popular and rows are independent, the means of columns
    of R scores still have 1/R of the variance; that is taken off. Rows that follow each other are alike, which adds to
    the share: it is an upper bound.) Scores that are all alike: 0 and 0.
    """
    half, rows = len(scores) // 2, (len(scores) + 1) // 2
    block = scores[half:, :half].double().cpu().numpy()
    block = block - block.mean(1, keepdims=True)
    variance = float((block**2).mean())
    share = float((block.mean(0) ** 2).mean()) / variance if variance else 1 / rows
    return {"deviation": variance**0.5, "popular": (share - 1 / rows) / (1 - 1 / rows)}


def likeness(landmarks: Tensor) -> float:
    """Mean cosine between the landmark vectors [C, E], C >= 2, of two different chunks of a text."""
    unit = torch.nn.functional.normalize(landmarks, dim=-1)
    C = len(unit)
    return float(((unit @ unit.T).sum() - C) / (C * (C - 1)))


def score_parts(model: DRTForCausalLM, texts: Iterable[Tokens]) -> dict[str, Any] | None:
    """What the scores say of texts of tokens [T].

    "groups": of each group the means of :func:`parts` over texts; "cosine": the mean of :func:`likeness`; "texts": how
    many were long enough. None: no text was.
    """
    of_groups: list[list[dict[str, float]]] = [[] for _ in model.retrievers]
    alike = []
    for text in texts:
        if len(text) < _FEWEST * model.config.chunk_size:
            continue
        found, landmarks = scores_of(model, torch.from_numpy(text.astype("int64"))[None].to(model.device))
        alike.append(likeness(landmarks))
        for own, scores in zip(of_groups, found, strict=True):
            own.append(parts(scores))
    if not alike:
        return None
    return {
        "groups": [{name: float(np.mean([x[name] for x in own])) for name in own[0]} for own in of_groups],
        "cosine": float(np.mean(alike)),
        "texts": len(alike),
    }
