"""Neighbours from outside: chunks that a frozen encoder finds, or a table that it made before."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from trailmark.models.grid import Grid
from trailmark.ops import ChunkSelection
from trailmark.ops.arguments import values_are_checked


class ChunkEmbedder(Protocol):
    """What turns the tokens of chunks into vectors; it is not trained. A model's attribute ``embedder``."""

    size: int
    """d, numbers of a vector."""
    fingerprint: str
    """Of its weights and settings: embedders that differ in it find other chunks."""

    def __call__(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [n, d] and keys [n, d], float32, of chunks ids int64 [n, S] of ``lengths`` [n] tokens, on the CPU.

        A chunk asks with its query; the chunks whose keys have the largest products with it are found. Neither other
        chunks nor what stands past a chunk's length has a say in its vectors.
        """


Vectors = tuple[Tensor, Tensor]
"""An encoder's queries and keys [B, C, d] of chunks."""


class Given(NamedTuple):
    """Chunks that a caller names for each chunk that closes, instead of a search."""

    indices: Tensor
    """int64 [B, C, n] numbers in their row, of earlier chunks; -1: none."""
    scores: Tensor | None
    """[B, C, n] how much each helps to predict the next chunk; None: they are to be read."""

    def to(self, device: torch.device) -> Given:
        """The same on a device."""
        return Given(self.indices.to(device), None if self.scores is None else self.scores.to(device))


def expect_embedder(embedder: ChunkEmbedder | None, fingerprint: str | None) -> ChunkEmbedder:
    """The embedder of a model with ``retriever="encoder"``, whose configuration says ``fingerprint`` (None: any).

    Raises:
        ValueError: there is none, or it is another than the model was trained with.
    """
    if embedder is None:
        raise ValueError(
            "embedder: expected one for a model with retriever='encoder', got none. Set "
            "model.embedder = trailmark.data.neighbours.embedders.open_embedder(spec, tokenizer), or pass "
            "whole texts with neighbours from a table."
        )
    if fingerprint is not None and embedder.fingerprint != fingerprint:
        raise ValueError(
            f"embedder: expected the one that the model was trained with (embedder_fingerprint {fingerprint!r}), got "
            f"{embedder.fingerprint!r}, which finds other chunks. Open that one, or train the model anew with this."
        )
    return embedder


def given_neighbours(
    neighbours: Tensor | None, scores: Tensor | None, has_cache: bool, retrieves: bool
) -> Given | None:
    """What a model that knows neighbours was given; see :meth:`TrailmarkForCausalLM.forward`.

    Raises:
        ValueError: any with retrieval off, scores without neighbours or of another shape, or neighbours together with
            a cache.
    """
    for name, came in (("neighbours", neighbours), ("neighbour_scores", scores)):
        if came is not None and not retrieves:
            raise ValueError(
                f"{name}: expected none with num_retrieved_chunks 0 (retrieval off), got a tensor. Leave it out, or "
                "use a model that retrieves."
            )
    if neighbours is None:
        if scores is not None:
            raise ValueError("neighbour_scores: expected them with neighbours, got no neighbours.")
        return None
    if has_cache:
        raise ValueError(
            "neighbours: expected none with past_key_values or use_cache, got a tensor: with a cache the model finds "
            "them, by its scores or its embedder. Pass the whole text without a cache, or leave them out."
        )
    if neighbours.dim() != 3 or neighbours.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"neighbours: expected int64 of shape [B, C, n], got {neighbours.dtype} of {tuple(neighbours.shape)}."
        )
    if scores is not None and scores.shape != neighbours.shape:
        raise ValueError(
            f"neighbour_scores: expected shape {tuple(neighbours.shape)} as neighbours, got {tuple(scores.shape)}."
        )
    return Given(neighbours.long(), scores)


def expect_selected(given: Given, num_retrieved: int, scored: bool, completed: bool = False) -> None:
    """That what was given can be read as it is: K chunks for each that closes, ascending, -1 last; scores or none.

    Args:
        completed: the model chooses what is missing of K, so fewer will do.

    Raises:
        ValueError: another number of chunks or another order, scores that nothing takes, or none where they weigh.
    """
    indices, scores = given
    if completed and not 1 <= indices.shape[2] <= num_retrieved:
        raise ValueError(
            f"neighbours: expected shape [B, C, n] with n from 1 to {num_retrieved} (num_retrieved_chunks), got "
            f"{tuple(indices.shape)}. The model chooses what is missing; leave neighbours out if all is."
        )
    if not completed and indices.shape[2] != num_retrieved:
        raise ValueError(
            f"neighbours: expected shape [B, C, {num_retrieved}] (num_retrieved_chunks), got {tuple(indices.shape)}. "
            f"Make the table with {num_retrieved} neighbours a chunk."
        )
    if scored and scores is None:
        raise ValueError(
            "neighbour_scores: expected the encoder's scores of the neighbours for encoder_weights='encoder', got "
            "none. Pass them, set model.embedder, or weigh with encoder_weights='learned'."
        )
    if not scored and scores is not None:
        raise ValueError(
            "neighbour_scores: expected none, got a tensor: the model weighs what it reads by scores of its own. "
            "Leave them out; a DRT with encoder_weights='encoder' and an RPT with retriever='learned' take them."
        )
    if not values_are_checked(indices):
        return
    after = torch.where(indices[..., 1:] >= 0, indices[..., 1:], torch.iinfo(torch.int64).max)
    wrong = (indices[..., :-1] >= after) | ((indices[..., :-1] < 0) & (indices[..., 1:] >= 0))
    if bool(wrong.any()):
        b, c, _ = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"neighbours: expected different chunks in ascending order, -1 last, got {indices[b, c].tolist()} for "
            f"chunk {c} of row {b}. Sort them: each chunk is read once."
        )
    if scores is not None and not bool((scores.isfinite() | (indices < 0)).all()):
        raise ValueError("neighbour_scores: expected finite numbers where there is a neighbour, got others.")


def as_selection(given: Given, scale: float, dtype: torch.dtype) -> ChunkSelection:
    """Chunks given, weighed by their scores times ``scale``; without scores evenly. ``dtype`` of both."""
    missing = given.indices < 0
    scores = torch.zeros_like(given.indices) if given.scores is None else given.scores
    scores = (scores.to(dtype) * scale).masked_fill(missing, -torch.inf)
    weights = scores.masked_fill(missing.all(-1, keepdim=True), 0).softmax(-1).masked_fill(missing, 0)
    return ChunkSelection(given.indices, weights, scores)


def expect_earlier(given: Given, grid: Grid, rows: int) -> None:
    """That chunks named for the call's closed chunks are ones before them, in their document.

    Raises:
        ValueError: another number of rows or chunks, or a chunk that is not before the one it is named for: its text
            would be known before it comes.
    """
    shape = rows, grid.num_closed
    if given.indices.shape[:2] != shape:
        raise ValueError(
            f"neighbours: expected shape [{shape[0]}, {shape[1]}, n] for the {shape[1]} chunks of {grid.chunk_size} "
            f"tokens that the call closes, got {tuple(given.indices.shape)}."
        )
    if not values_are_checked(given.indices):
        return
    indices = given.indices
    limits = grid.candidates(None, indices.device)[..., None]  # 0 where a row closes fewer
    first = grid.first_candidates(indices.device)
    first = first[..., None] if isinstance(first, Tensor) else first
    wrong = (indices >= limits) | ((indices < first) & (indices >= 0)) | (indices < -1)
    if bool(wrong.any()):
        b, c, n = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"neighbours: expected chunks before the one that they are named for, in its document, got "
            f"{int(indices[b, c, n])} for chunk {c} of row {b}, which closes {int(grid.closed[b % len(grid.closed)])}. "
            "Put -1 where there is none."
        )


def embed_chunks(embedder: ChunkEmbedder, ids: Tensor, grid: Grid) -> Vectors:
    """Queries and keys [B, C, d] of the chunks that a layout closes, made of their tokens, ids [B, C, S].

    Raises:
        ValueError: the embedder returns other shapes than it should.
    """
    B, C = ids.shape[:2]
    if not C:
        none = torch.zeros(B, 0, embedder.size, device=ids.device)
        return none, none
    lengths = grid.lengths_on(torch.device("cpu")).expand(B, C).flatten()
    # not trained, and float32 whatever the model computes in: a table was made so
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        vectors = embedder(ids.flatten(0, 1).cpu(), lengths)
    shape = B * C, embedder.size
    if any(tuple(x.shape) != shape for x in vectors):
        raise ValueError(
            f"embedder: expected queries and keys of shape [n, size] = {shape}, got "
            f"{' and '.join(str(tuple(x.shape)) for x in vectors)}. Return a row for each chunk."
        )
    queries, keys = (x.to(ids.device).view(B, C, -1) for x in vectors)
    return queries, keys
