"""The embedder that a model's configuration names, checked against the one that it was trained with."""

from __future__ import annotations

from typing import Any

from trailmark.data.neighbours.embedders import Embedder, open_embedder


def embedder_of(config: Any, tokenizer: Any) -> Embedder | None:
    """What a model with ``retriever="encoder"`` finds chunks with; None: it has another retriever, names none, or
    retrieves nothing (``num_retrieved_chunks`` 0).

    Args:
        config: of the model: ``retriever``, ``embedder`` and ``embedder_fingerprint``, where it has such fields.
        tokenizer: the model's.

    Raises:
        ValueError: an embedder that is not there, or not the one that the model was trained with.
    """
    if getattr(config, "retriever", None) != "encoder" or config.embedder is None:
        return None
    if not config.num_retrieved_chunks:
        return None
    try:
        embedder = open_embedder(config.embedder, tokenizer, device=None)
    except ValueError as error:
        raise ValueError(f"model.{error}") from error
    trained_with = config.embedder_fingerprint
    if trained_with is not None and embedder.fingerprint != trained_with:
        raise ValueError(
            f"model.embedder: expected the one that the model was trained with, of fingerprint {trained_with}, "
            f"{config.embedder!r} has {embedder.fingerprint} and would find other chunks. Put its files back as they "
            "were, or set embedder to where they lie; embedder_fingerprint null takes any."
        )
    return embedder
