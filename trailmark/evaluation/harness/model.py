"""A model of ours as lm-eval asks it: prompts of any length are read in a constant window, never cut or padded away."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils_hf import stop_sequences_criteria
from torch import Tensor

from trailmark.evaluation.subject import Subject
from trailmark.memory import ChunkCache

ENDLESS = 2**40  # tokens: lm-eval cuts a prompt to 2,048 where nothing says how long it may be
Request = tuple[tuple[str, str], list[int], list[int]]  # the texts, their tokens, and those of what is wanted


class Reads(HFLM):
    """lm-eval's model of transformers, with what is said of ours.

    A prompt ends with an early landmark, as ``generate``'s does, so that a model retrieves for what comes after it;
    for a model without landmarks, log-likelihoods are those of one forward.
    """

    def __init__(self, subject: Subject, batch_size: int = 1) -> None:
        self._ours = subject.ours
        super().__init__(
            pretrained=subject.model,
            tokenizer=subject.tokenizer,
            backend="causal",
            max_length=ENDLESS if subject.ours else subject.longest_text,
            batch_size=batch_size,
            add_bos_token=bool(subject.beginning),
        )

    # --- log-likelihoods ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        if not self._ours:
            found: list[tuple[float, bool]] = super()._loglikelihood_tokens(
                requests, disable_tqdm, override_bs
            )
            return found
        results: list[tuple[float, bool]] = []
        # answers to one question follow each other
        for context, alike in groupby(requests, key=lambda request: request[1]):
            whole = torch.tensor([context], device=self.device)  # [1, T]
            cache = (
                self.model.read(whole[:, :-1], prompt=True) if len(context) > 1 else self.model.new_cache()
            )
            # the last token's logits say what comes next
            out = self.model(whole[:, -1:], past_key_values=cache, close_chunk=len(context) > 1)
            first = out.logits[:, -1:]
            for texts, _, wanted in alike:
                results.append(self._score(first, wanted, cache.branch()))
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, results[-1])
        return results

    def _score(self, first: Tensor, wanted: Sequence[int], cache: ChunkCache) -> tuple[float, bool]:
        """The log-likelihood of tokens behind what a cache has read, and whether each is the likeliest.

        Args:
            first: [1, 1, V] the logits of the first of them.
        """
        total, likeliest = 0.0, True
        for logits, tokens in self._predicted(first, wanted, cache):
            logp = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)  # [n, V]
            total += float(logp.gather(1, tokens[:, None]).sum())
            likeliest = likeliest and bool((logp.argmax(-1) == tokens).all())
        return total, likeliest

    def _predicted(
        self, first: Tensor, wanted: Sequence[int], cache: ChunkCache
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits [n, V] and the tokens [n] that they should name, piece by piece."""
        tokens = torch.tensor(wanted, device=self.device)
        yield first[0], tokens[:1]
        size = self.model.reading_piece(len(wanted))
        for start in range(0, len(wanted) - 1, size):
            read = tokens[start : min(start + size, len(wanted) - 1)]
            yield (
                self.model(read[None], past_key_values=cache).logits[0],
                tokens[start + 1 : start + 1 + len(read)],
            )

    # --- continuations -----------------------------------------------------------------------------------------

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> Tensor:
        mask = generation_kwargs.pop("attention_mask")
        if not self._ours:
            found: Tensor = super()._model_generate(
                context, max_length, stop, attention_mask=mask, **generation_kwargs
            )
            return found
        cache = self.model.new_cache()
        if context.shape[1] > 1:
            self.model.read(context[:, :-1], cache, mask[:, :-1], prompt=True)
        last = context[:, -1:]
        if not (generation_kwargs.get("do_sample") or generation_kwargs.get("temperature")):
            generation_kwargs |= {"do_sample": False}
            generation_kwargs.pop("temperature", None)
        with torch.no_grad():
            out = self.model.generate(
                last,
                attention_mask=torch.ones_like(last),
                past_key_values=cache,
                max_new_tokens=max_length - context.shape[1],
                stopping_criteria=stop_sequences_criteria(self.tokenizer, stop, 1, len(last)),
                pad_token_id=self.tokenizer.pad_token_id,
                **generation_kwargs,
            )
        return torch.cat([context, out[:, 1:]], 1)
