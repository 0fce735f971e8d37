"""Checks of what a model is called with: each a ValueError that names the argument and the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from trailmark.memory import ChunkCache
from trailmark.models.embedding import Given

CacheKey = tuple[tuple[str, object], ...]


class Call(NamedTuple):
    """One call of a model's ``forward``, after its checks; see there what the fields mean."""

    input_ids: Tensor
    present: Tensor | None  # bool [B, T] tokens that are no padding; None: all
    cache: ChunkCache | None
    labels: Tensor | None  # -100 where padding would be predicted, or predicts
    close_chunk: bool | Tensor
    noise_seed: Tensor | None
    output_retrieval: bool
    logits_to_keep: int
    num_items_in_batch: Tensor | int | None
    prefill_chunk_size: int | None
    document_ids: Tensor | None
    given: Given | None

    def is_plain(self) -> bool:
        """Whether the layout of its positions follows from the length alone."""
        marked = (
            self.present is not None
            or self.document_ids is not None
            or not isinstance(self.close_chunk, bool)
        )
        return not marked and self.cache is None and self.given is None and not self.logits_to_keep


def check_tokens(input_ids: Tensor, vocab_size: int) -> None:
    """That there are tokens, of the vocabulary."""
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ValueError(
            f"input_ids: expected shape [B, T] with T >= 1, got {tuple(input_ids.shape)}. "
            "There is nothing to predict from an empty text: pass at least one token."
        )
    check_vocabulary("input_ids", input_ids, vocab_size)


def check_vocabulary(argument: str, ids: Tensor, vocab_size: int) -> None:
    """That ids are tokens."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{argument}: expected int64, got {ids.dtype}. Pass {argument}.long().")
    if torch.compiler.is_compiling():  # the embedding and the loss refuse them, if in other words
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{argument}: expected tokens from 0 to {vocab_size - 1} (vocab_size - 1), "
            f"got {low if low < 0 else high}. Use the tokenizer that the model was trained with."
        )


def check_cache(cache: ChunkCache, input_ids: Tensor, training: bool, key: Callable[[], CacheKey]) -> None:
    """That a call on tokens [B, T] can go on with a cache; ``key`` gives that of the model's caches."""
    if training:
        raise ValueError(
            "past_key_values: expected None in training: what a cache carries has no gradient. "
            "Call eval() first, or pass the whole text at once."
        )
    if not isinstance(cache, ChunkCache):
        raise ValueError(
            f"past_key_values: expected a cache from new_cache(), got {type(cache).__name__}. "
            "Pass past_key_values=model.new_cache(), or none."
        )
    if cache.model != (own := key()):
        name, wanted = next((x for x in own if x not in cache.model), ("model", None))
        raise ValueError(
            f"past_key_values: expected a cache of this model ({name} {wanted}), got one of another. "
            "Pass past_key_values=model.new_cache()."
        )
    if cache.batch_size not in (None, input_ids.shape[0]):
        raise ValueError(
            f"input_ids: expected the {cache.batch_size} rows that the cache has read, got "
            f"{input_ids.shape[0]}. Pass all of them; after one text, cache.branch(B) goes on in B rows."
        )


def check_documents(document_ids: Tensor, input_ids: Tensor, has_cache: bool) -> None:
    """That document ids go with the tokens, and that there is no cache."""
    if document_ids.shape != input_ids.shape or document_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"document_ids: expected int64 of shape {tuple(input_ids.shape)} as input_ids, got {document_ids.dtype} "
            f"of {tuple(document_ids.shape)}."
        )
    if has_cache:
        raise ValueError(
            "document_ids: expected none with past_key_values or use_cache, got a tensor: a cache holds one text per "
            "row. Pass each document as a row, padded with attention_mask, or no cache."
        )
