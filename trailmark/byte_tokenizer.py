"""The tokenizer "bytes": ByT5's, which needs no files, without the end of text that ByT5 puts after every text.

What a language model goes on from has no end. transformers' ``pipeline`` would put one after each prompt.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedConfig


class ByteTokenizer(ByT5Tokenizer):
    """A byte's token is its value plus 3; 0 pads, 1 ends a text where a program puts it, 2 is unknown."""

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        return [*token_ids_0, *(token_ids_1 or ())]

    def get_special_tokens_mask(
        self,
        token_ids_0: list[int],
        token_ids_1: list[int] | None = None,
        already_has_special_tokens: bool = False,
    ) -> list[int]:
        if already_has_special_tokens:
            mask: list[int] = super().get_special_tokens_mask(token_ids_0, token_ids_1, True)
            return mask
        return [0] * (len(token_ids_0) + len(token_ids_1 or ()))

    def create_token_type_ids_from_sequences(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        return [0] * (len(token_ids_0) + len(token_ids_1 or ()))


class _OfBytes(PreTrainedConfig):
    """No model has it: a tokenizer is registered with a configuration."""

    model_type = "trailmark_bytes"


_auto: Any = AutoTokenizer
_auto.register(_OfBytes, tokenizer_class=ByteTokenizer, exist_ok=True)
