"""transformers' ``generate`` on a cache of chunks."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import GenerationMixin

from trailmark.memory import ChunkCache


class ChunkGenerationMixin(GenerationMixin):  # transformers knows what can generate by the end of this name
    """Generation that always goes on with a cache from ``new_cache``; for a PreTrainedModel."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' ``generate``, always with a cache.

        ``close_chunk=True`` (the default) ends the prompt with a landmark, so that a question retrieves for
        its own answer. With ``past_key_values`` (a cache that has read something) the prompt is what follows;
        several prompts or continuations (``num_beams``, ``num_return_sequences``) after one text go on in
        branches, and the cache given stays as it is.
        """
        if kwargs.get("use_cache") is False:
            raise ValueError(
                "use_cache: expected True, got False. Generation here re-reads the open chunk only."
            )
        if kwargs.get("output_retrieval"):
            raise ValueError(
                "output_retrieval: expected False in generate, which returns tokens. "
                "Call the model itself: model(ids, past_key_values=cache, output_retrieval=True)."
            )
        if kwargs.get("document_ids") is not None:
            raise ValueError(
                "document_ids: expected none in generate: what is generated continues one text per row. "
                "Pass each document as a row, padded with attention_mask."
            )
        for name in ("neighbours", "neighbour_scores"):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{name}: expected none in generate, which goes on with a cache: there the model finds chunks by "
                    "itself, or with its embedder (model.embedder)."
                )
        kwargs["use_cache"] = True
        return super().generate(*args, **kwargs)

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
