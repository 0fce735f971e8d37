"""transformers' ``generate`` on a cache of chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList

from trailmark.memory import ChunkCache
from trailmark.models.arguments import check_tensors

_COLDEST, _HOTTEST = 1e-4, 1e4


def expect_temperature(temperature: Any) -> None:
    """Raise a ValueError for a temperature that logits cannot be divided by: float32 ends at 1e38.

    0 is none: where nothing is sampled it means the most likely token.
    """
    if not isinstance(temperature, int | float) or not _COLDEST <= temperature <= _HOTTEST:
        raise ValueError(
            f"temperature: expected {_COLDEST} to {_HOTTEST:.0f}, or 0 for always the most likely token, got "
            f"{temperature}."
        )


class _Finite(LogitsProcessor):
    """Stops a generation whose logits are no numbers: the most likely of them would be any token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # [B], [B, V]
        # of a masked token -Infinity; NaN and Infinity are what a maximum shows
        if not bool(torch.isfinite(scores.max())):
            raise ValueError(
                "model: expected finite logits, got NaN or Infinity. Its weights or its memory are damaged: trailmark "
                "verify finds what was changed since it was written."
            )
        return scores


_TOKENS = "which returns tokens. Call the model itself"
_CHUNKS = "which goes on with a cache: there the model finds chunks by itself, or with its embedder (model.embedder)"
_NOT_GENERATED = {
    "document_ids": "which continues one text per row. Pass each document as a row, padded with attention_mask",
    "neighbours": _CHUNKS,
    "neighbour_scores": _CHUNKS,
    "output_retrieval": f"{_TOKENS}: model(ids, past_key_values=cache, output_retrieval=True)",
    **dict.fromkeys(
        ("labels", "logits_at", "logits_to_keep", "noise_seed", "output_retrieval_scores", "bearing"), _TOKENS
    ),
}
"""Arguments that ``generate`` would pass over, and what to do without them."""


class ChunkGenerationMixin(GenerationMixin):  # transformers knows what can generate by the end of this name
    """Generation that always goes on with a cache from ``new_cache``; for a PreTrainedModel."""

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: Any = None,
        logits_processor: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """transformers' ``generate``, always with a cache.

        ``close_chunk=True`` (the default) ends the prompt with a landmark, so that a question retrieves for
        its own answer. With ``past_key_values`` (a cache that has read something) the prompt is what follows;
        several prompts or continuations (``num_beams``, ``num_return_sequences``) after one text go on in
        branches, and the cache given stays as it is.
        """
        given = {} if inputs is None else {"input_ids": inputs}
        given |= {name: kwargs[name] for name in ("input_ids", "attention_mask") if name in kwargs}
        check_tensors(**given)
        for name, ids in given.items():
            if ids is not None and ids.dim() != 2:
                one = f" Pass {name}[None] for one text." if ids.dim() == 1 else ""
                raise ValueError(f"{name}: expected shape [B, T], got {tuple(ids.shape)}.{one}")
        if kwargs.get("use_cache") is False:
            raise ValueError(
                "use_cache: expected True, got False. Generation here re-reads the open chunk only."
            )
        for name, why in _NOT_GENERATED.items():
            if (came := kwargs.get(name)) is not None and came is not False:
                raise ValueError(f"{name}: expected none in generate, {why}.")
        if isinstance(kwargs.get("close_chunk"), Tensor):
            raise ValueError(
                "close_chunk: expected True or False in generate, got a tensor. Read the text with its landmarks by "
                "the model itself first (close_chunk, use_cache=True), and pass its cache."
            )
        kwargs["use_cache"] = True
        processors = LogitsProcessorList([_Finite(), *(logits_processor or ())])
        return super().generate(inputs, generation_config, processors, *args, **kwargs)

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        # transformers would end every piece as it ends the prompt; ours are read inside forward
        model_kwargs["prefill_chunk_size"] = generation_config.prefill_chunk_size
        generation_config.prefill_chunk_size = None
        for name in ("cache_implementation", "output_attentions", "output_hidden_states"):
            if came := getattr(generation_config, name):
                raise ValueError(
                    f"{name}: expected none, got {came!r}: the models here have nothing of the kind."
                )
        if generation_config.do_sample and generation_config.temperature is not None:
            if generation_config.temperature == 0:
                raise ValueError(
                    "temperature: expected more than 0 with do_sample=True, got 0. Pass do_sample=False for always the "
                    "most likely token."
                )
            expect_temperature(generation_config.temperature)
        rows = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
        cache = model_kwargs.get("past_key_values")
        if cache is None:
            model_kwargs["past_key_values"] = self.new_cache()
        elif rows > 1 and isinstance(cache, ChunkCache) and cache.batch_size == 1:
            model_kwargs["past_key_values"] = cache.branch(rows)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: ChunkCache | None = None,
        attention_mask: Tensor | None = None,
        is_first_iteration: bool | None = False,
        close_chunk: bool = True,
        prefill_chunk_size: int | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        if not is_first_iteration:
            input_ids = input_ids[:, -1:]
            attention_mask = None if attention_mask is None else attention_mask[:, -1:]
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "past_key_values": past_key_values,
            "use_cache": True,
            "close_chunk": bool(close_chunk and is_first_iteration),
            "logits_to_keep": 1,
            "prefill_chunk_size": prefill_chunk_size,
        }
