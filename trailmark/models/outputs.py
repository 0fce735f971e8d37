"""What a call of a model returns, and what its layers give for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.utils import ModelOutput

from trailmark.memory import ChunkCache
from trailmark.models.grid import Integers
from trailmark.models.text import RetrievalScores
from trailmark.ops import ChunkSelection


@dataclass
class CausalLMOutput(ModelOutput):
    """``logits`` [B, T, V] of the tokens passed (or the last ``logits_to_keep``); landmarks never show."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: ChunkCache | None = None
    retrieval: tuple[ChunkSelection, ...] | None = None
    """Per group, what the landmarks closed in this call selected [B, N, K], by absolute chunk number.

    A padded row may close fewer chunks than N; what follows them is -1. Landmark Attention: per layer, what each
    token read of the memory in each head [B, T, H, K]; its weights are those among the K. None without a cache,
    where a text is attended to whole. HiLS: per layer that chooses, what each token reads in each key/value head
    [B, T, J, K]; its weights are their shares among the K. HSA: per group, what each token reads in each head that
    chooses [B, T, J, K], with the weights that it reads with.
    """
    ranking_loss: Tensor | None = None
    """[B] what a row's ranking adds to the loss of each of its tokens (in ``loss``): see RPTForCausalLM."""
    landmark_loss: Tensor | None = None
    """[B, T] what each token's landmark, if it is a token of the text, adds to the token's loss (in ``loss``)."""
    retrieval_scores: RetrievalScores | None = None


@dataclass
class Hidden:
    """What an architecture's ``run`` returns."""

    states: Tensor | None  # [B, T, E] after the last norm, or of the last tokens; None when only reading
    retrieval: tuple[ChunkSelection, ...] | None = None  # of each group, [B, C, K]
    closed: Integers | None = None  # [b] how many of these each row has: landmarks deferred before come first
    # states [B, T, E] of the tokens themselves, where ``states`` has those of the landmarks that close their
    # chunks, and bool [B, T] which these are: landmarks are tokens of the text
    own: tuple[Tensor, Tensor] | None = None
    ranking: Tensor | None = None  # [B] what a learned ranking adds to the loss of each row
    chunks: Any = None  # what selected (trailmark.models.layered.Chunks), to be asked for all scores
