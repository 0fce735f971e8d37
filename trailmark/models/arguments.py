"""Checks of what a model is called with: each a ValueError that names the argument and the way out."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trailmark.memory import ChunkCache
from trailmark.models.embedding import Given
from trailmark.models.loss import BearingTokens
from trailmark.ops.arguments import values_are_checked
from trailmark.untrusted import brief

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
    logits_at: Tensor | None = None
    output_retrieval_scores: bool = False
    bearing: BearingTokens | None = None

    def is_plain(self) -> bool:
        """Whether the layout of its positions follows from the length alone."""
        marked = (
            self.present is not None
            or self.document_ids is not None
            or not isinstance(self.close_chunk, bool)
        )
        asks = bool(self.logits_to_keep) or self.logits_at is not None or self.output_retrieval_scores
        asks = asks or self.bearing is not None
        return not marked and self.cache is None and self.given is None and not asks


_WAYS_OUT = {
    "inputs_embeds": "Pass input_ids: landmarks are put between tokens.",
    "output_hidden_states": "A forward hook on the layer that is wanted sees them.",
    "output_attentions": "output_retrieval=True returns which chunks were read.",
    "position_ids": "Positions count landmarks too: pass attention_mask where rows are padded.",
    "token_type_ids": "Pass return_token_type_ids=False to the tokenizer.",
}


def check_others(others: dict[str, Any]) -> None:
    """That nothing was asked for by an argument that other models know."""
    for name, came in others.items():
        if came is not None and came is not False:
            shown = brief(came) if isinstance(came, bool | int | str) else type(came).__name__
            way_out = _WAYS_OUT.get(name, "Leave it out.")
            raise ValueError(
                f"{name}: expected none, got {shown}: the models here have nothing of the kind. {way_out}"
            )


def check_tensors(**arguments: Tensor | None) -> None:
    """That what is given is tensors."""
    for name, came in arguments.items():
        if came is not None and not isinstance(came, Tensor):
            raise ValueError(
                f"{name}: expected a tensor, got {type(came).__name__}. Pass torch.tensor({name})."
            )


def check_noise_seed(noise_seed: Tensor, rows: int) -> None:
    """That each row has a seed of its own, which is a number."""
    dtype, shape = noise_seed.dtype, tuple(noise_seed.shape)
    if shape != (rows,) or dtype.is_floating_point or dtype == torch.bool:
        raise ValueError(f"noise_seed: expected int64 of shape [B] = ({rows},), got {dtype} of {shape}.")


def check_columns(logits_at: Tensor, input_ids: Tensor, with_others: bool) -> None:
    """That the tokens whose logits are wanted are some of the call, which wants nothing of others."""
    B, T = input_ids.shape
    if logits_at.dim() != 2 or len(logits_at) != B or logits_at.dtype != torch.int64:
        raise ValueError(
            f"logits_at: expected int64 of shape [{B}, n], got {logits_at.dtype} of {tuple(logits_at.shape)}."
        )
    if values_are_checked(logits_at) and bool(((logits_at < 0) | (logits_at >= T)).any()):
        raise ValueError(f"logits_at: expected columns 0 to {T - 1} of the call's tokens, got others.")
    if with_others:
        raise ValueError(
            "logits_at: expected none together with labels, logits_to_keep or a cache: compute the loss of those "
            "logits outside."
        )


def check_bearing(bearing: BearingTokens, with_labels: bool, vocab_size: int) -> None:
    """What tokens are to predict, for a loss without all logits; its rows are checked where the states are known."""
    if with_labels:
        raise ValueError(
            "bearing: expected none together with labels or num_items_in_batch. Leave one of them out."
        )
    if not isinstance(bearing.slab, int) or isinstance(bearing.slab, bool) or bearing.slab < 1:
        raise ValueError(f"bearing: expected a slab of at least 1 token, got {bearing.slab!r}.")
    if bearing.weights.shape != bearing.labels.shape:
        raise ValueError(
            f"bearing: expected a weight of each label, {tuple(bearing.labels.shape)}, got "
            f"{tuple(bearing.weights.shape)}."
        )
    check_vocabulary("bearing", bearing.labels.masked_fill(bearing.labels == -100, 0), vocab_size)


def check_scored(scores: bool, has_cache: bool) -> None:
    """That a model has scores of all chunks, in a call on a whole text."""
    if not scores:
        raise ValueError(
            "output_retrieval_scores: expected False for a model that does not score all chunks by itself, got True. A "
            "DRT with retriever 'causal' and num_retrieved_chunks above 0 does."
        )
    if has_cache:
        raise ValueError(
            "output_retrieval_scores: expected False with a cache, got True: pass the whole text at once."
        )


def check_tokens(input_ids: Tensor | None, vocab_size: int) -> Tensor:
    """That there are tokens, of the vocabulary."""
    if not isinstance(input_ids, Tensor):
        came = "none" if input_ids is None else type(input_ids).__name__
        raise ValueError(
            f"input_ids: expected a tensor of token numbers, int64 [B, T], got {came}. Pass torch.tensor([ids]) for "
            "the list of one text's tokens; a tokenizer gives tensors with return_tensors='pt'."
        )
    if input_ids.dim() != 2:
        one = " Pass input_ids[None] for one text." if input_ids.dim() == 1 else ""
        raise ValueError(f"input_ids: expected shape [B, T], got {tuple(input_ids.shape)}.{one}")
    if 0 in input_ids.shape:
        raise ValueError(
            f"input_ids: expected shape [B, T] with T >= 1, got {tuple(input_ids.shape)}. "
            "There is nothing to predict from an empty text: pass at least one token."
        )
    check_vocabulary("input_ids", input_ids, vocab_size)
    return input_ids


def check_vocabulary(argument: str, ids: Tensor, vocab_size: int) -> None:
    """That ids are tokens."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{argument}: expected int64, got {ids.dtype}. Pass {argument}.long().")
    if torch.compiler.is_compiling():  # the embedding and the loss refuse them, if in other words
        return
    if not ids.numel():
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{argument}: expected tokens from 0 to {vocab_size - 1} (vocab_size - 1), "
            f"got {low if low < 0 else high}. Use the tokenizer that the model was trained with."
        )


def check_count(argument: str, number: Any, least: int, way_out: str) -> None:
    """That an argument is a whole number."""
    if isinstance(number, bool) or not isinstance(number, Integral) or number < least:
        came = f"a tensor {tuple(number.shape)}" if isinstance(number, Tensor) else repr(number)
        raise ValueError(f"{argument}: expected a whole number of at least {least}, got {came}. {way_out}")


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
