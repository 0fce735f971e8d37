"""What every causal language model here shares: arguments, padding, cache, loss, reading and generation.

An architecture implements ``run`` (hidden states of the new tokens) and ``_stages``, and answers what is otherwise with
it than with a plain model (:mod:`trailmark.models.answers`).
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init

from trailmark.memory import CacheState, ChunkCache, ChunkMemory, saved
from trailmark.memory.schema import Expected
from trailmark.memory.tiers.base import expect_dtype, tier_named
from trailmark.models.answers import ModelAnswers
from trailmark.models.arguments import (
    CacheKey,
    Call,
    check_bearing,
    check_cache,
    check_columns,
    check_count,
    check_documents,
    check_noise_seed,
    check_others,
    check_scored,
    check_tensors,
    check_tokens,
    check_vocabulary,
)
from trailmark.models.candidates import last_chunks
from trailmark.models.configuration import TrailmarkConfig
from trailmark.models.context_parallel import ContextParallel, expect_whole
from trailmark.models.embedding import ChunkEmbedder, Given, expect_embedder
from trailmark.models.encoding import EncodingMixin, TokenEncoder
from trailmark.models.folders import FolderMixin
from trailmark.models.generation import ChunkGenerationMixin
from trailmark.models.grid import Grid, Integers, Layouts
from trailmark.models.layers import LayerNorm, RMSNorm
from trailmark.models.loss import BearingTokens, shift_labels, text_loss
from trailmark.models.outputs import CausalLMOutput, Hidden
from trailmark.models.text import RetrievalScores, Text, at_columns, present_tokens
from trailmark.models.with_retrieved import without_retrieval

_LIVE = frozenset({"vocab_size", "num_retrieved_chunks", "retrieval_scale"})
"""Fields that may be set in a model that was made: caches of before are those of another model then."""
# Tokens that ``read`` takes at a time: enough for efficient GEMMs, few enough to keep the memory constant.
_READ_TOKENS = 4096
_MEMORY_DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8


class TrailmarkForCausalLM(ModelAnswers, EncodingMixin, FolderMixin, PreTrainedModel, ChunkGenerationMixin):
    """Base class of the models."""

    config_class: type[TrailmarkConfig] = TrailmarkConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _is_stateful = True  # transformers refuses assisted generation: what is not accepted cannot be taken back
    accepts_loss_kwargs = True  # the Trainer passes num_items_in_batch
    _supports_sdpa = True
    _no_split_modules: list[str] | None = ["WindowLayer", "ChunkEncoderLayer"]
    config: TrailmarkConfig
    compiles: ClassVar[bool] = True
    """Whether ``torch.compile`` makes a graph of a plain call; else it runs uncompiled."""
    context_parallel: ContextParallel | None = None
    """The processes that share each text (:func:`trailmark.models.context_parallel.share_texts`); None: none do."""
    embedder: ChunkEmbedder | None = None
    """What finds chunks for a model with ``retriever="encoder"``; set by who has the text's tokenizer."""

    embed_tokens: nn.Embedding
    lm_head: nn.Linear
    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}

    def __init__(self, config: TrailmarkConfig) -> None:
        super().__init__(config)
        self.layouts = self._layouts()

    def _layouts(self) -> Layouts:
        config = self.config
        return Layouts(getattr(config, "chunk_size", None), config.has_landmarks, not config.hides_landmarks)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "embedder":  # even a module is no part of the model: not trained, moved or saved with it
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    # --- what an architecture provides -------------------------------------------------------------------

    def run(
        self,
        tokens: Tensor,  # [B, T] at the beginning of each row
        grid: Grid,
        cache: ChunkCache | None = None,
        keep: int | None = None,
        noise_seed: Tensor | None = None,
        given: Given | None = None,
    ) -> Hidden:
        """Hidden states of the new tokens. ``keep``: of each row's last so many; 0: only the cache is wanted.

        With a cache and ``keep``, only what these states and later calls depend on is computed. ``given`` comes only
        where the architecture's ``_given`` lets it.
        """
        raise NotImplementedError

    def _stages(self) -> list[int]:
        """Of each layer with a window, in order: layers of one stage always see the same positions."""
        raise NotImplementedError

    def new_cache(
        self,
        memory_tier: str = "device",
        num_tokens: int = 0,
        memory_folder: str | Path | None = None,
        memory_dtype: torch.dtype | None = None,
        search: Any = None,
    ) -> ChunkCache:
        """An empty cache, for one text or a batch of texts.

        Args:
            memory_tier: where keys and values of past chunks live: "device" (the model's), "host" or "disk"; with
                "tokens" nowhere: tokens are kept, and the chunks that are selected are encoded again.
            num_tokens: the length to come, if known: the first allocation is made for it.
            memory_folder: of "disk"; None: a temporary one, removed with the cache. Of "tokens"; None: they are kept
                in RAM. A memory that was saved there stays until this cache is saved there.
            memory_dtype: of keys and values in memory, a float of 16 bits or more, or ``torch.int8`` (with a scale for
                each head's keys and values of a chunk); None: the model's. Landmark vectors keep the model's (of a
                HiLS, and with an embedder, float32 or wider), and beside int8 bfloat16 if they are wider; with
                "tokens", which keeps no keys and values, it is their dtype.
            search: over landmarks; None: exact (:class:`trailmark.memory.ExactSearch`).

        Raises:
            ValueError: an unknown tier, a folder for a tier without files, "tokens" for a model whose chunks cannot be
                encoded by themselves, a type that is not floating, a length that is none.
        """
        check_count("num_tokens", num_tokens, 0, "Leave it out where the length is not known.")
        if memory_dtype is not None and memory_dtype not in _MEMORY_DTYPES:
            raise ValueError(
                f"memory_dtype: expected {', '.join(map(str, _MEMORY_DTYPES))} or None, got {memory_dtype!r}. Pass "
                "torch.bfloat16, or None for the model's."
            )
        if tier_named(memory_tier).keeps_tokens and not self.config.retrieves:
            memory_tier = "disk"  # there are no chunks to keep tokens of
        keeps_tokens = tier_named(memory_tier).keeps_tokens
        if keeps_tokens and not self.can_keep_tokens:
            raise ValueError(
                f"memory_tier: expected 'device', 'host' or 'disk' for {type(self).__name__}, got 'tokens': as it "
                "is set, its chunks cannot be encoded again one by one, of the few tokens before them (docs/scale.md "
                "says which models' can). Tier 'disk' holds most."
            )
        expect_dtype(memory_tier, memory_dtype)
        config = self.config
        capacity = -(-num_tokens // getattr(config, "chunk_size", 1)) if num_tokens else 0
        folder = None if memory_folder is None else Path(memory_folder)
        memory = self._make_memory(memory_tier, capacity, folder, memory_dtype, search)
        if keeps_tokens:
            memory.encoder = TokenEncoder(self)
        stages, groups = self._stages(), getattr(config, "num_retrieval_groups", 0)
        cache = ChunkCache(self._cache_key, config.windows, stages, groups, memory, config.num_sinks)
        cache.identity = self._identity
        return cache

    def _make_memory(
        self, tier: str, capacity: int, folder: Path | None, dtype: torch.dtype | None, search: Any
    ) -> ChunkMemory:
        return ChunkMemory(tier, capacity, folder, dtype, search)

    def load_cache(self, folder: str | Path, memory_tier: str = "disk", search: Any = None) -> ChunkCache:
        """The cache that ``cache.save(folder)`` left there, to ask or to read on with.

        Args:
            memory_tier: "disk": keys and values stay in the folder, mapped; what is read on is added to its file,
                and the saved memory stays as it was until it is saved again (with ``max_memory_chunks``, what is
                read on takes the place of the oldest chunks there: killed before it is saved, that memory is
                lost). "host", "device": they are read, and the folder stays as it is. Of a memory of tokens these
                are what lies there; "tokens" is "disk", of such a memory alone.
            search: as in :meth:`new_cache`.

        Raises:
            ValueError: no memory there, a damaged one, one of a newer format, or one that other weights wrote; tier
                "tokens" for a memory of keys and values.
        """
        path = folder if tier_named(memory_tier).needs_folder else None
        tier = saved.tier_to_load(folder, memory_tier)
        cache = self.new_cache(tier, memory_folder=path, search=search)
        cache.load(folder, self.lm_head.weight.device, self._expected_state())
        return cache

    @property
    def _record_shape(self) -> tuple[int, ...] | None:
        """(2, J, S, D) of a record in memory, which a saved one is checked by; None: it has none, or is not checked."""
        return None

    def _expected_state(self) -> Expected:
        """What a saved memory's state is checked by."""
        config = self.config
        sizes = {"E": config.hidden_size, "J": config.num_key_value_heads, "D": config.head_dim}
        if self.layouts.chunk_size is not None:
            sizes["S"] = self.layouts.chunk_size
        windows = tuple(w if w is None else config.num_sinks + w for w in config.windows)
        unnamed = {name: str(value) for name, value in config.meant_without().items()}
        sizes["V"] = config.vocab_size
        landmarks = int(config.counts_landmarks)
        return Expected(sizes, landmarks, windows, record_shape=self._record_shape, unnamed=unnamed)

    def _identity(self) -> dict[str, Any]:
        """Of the configuration and the weights, for saved memories."""
        fields = {name: str(value) for name, value in self._cache_key}
        return fields | {"weights": fingerprint(self)}

    @property
    def _cache_key(self) -> CacheKey:
        """What a cache must agree in with the model: every field that changes what it computes, and its embedder."""
        if getattr(self.config, "retriever", None) != "encoder" or not self.config.retrieves:
            return self._arithmetic
        expected: str | None = getattr(self.config, "embedder_fingerprint", None)
        return (*self._arithmetic, ("embedder", expect_embedder(self.embedder, expected).fingerprint))

    @property
    def _arithmetic(self) -> CacheKey:
        """What layers took of the fields as they were made, and those that are looked up at each call as they are."""
        config = self.config
        return tuple(
            (name, getattr(config, name) if name in _LIVE else value) for name, value in self._made_with
        )

    @cached_property
    def _made_with(self) -> CacheKey:
        fields = copy.deepcopy(self.config.arithmetic_fields())  # lists may be changed in place
        return (("model_type", self.config.model_type), *fields)

    # --- the interface of transformers --------------------------------------------------------------------

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        assert isinstance(value, nn.Embedding)
        self.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: ChunkCache | None = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        close_chunk: bool | Tensor = False,
        noise_seed: Tensor | None = None,
        output_retrieval: bool = False,
        logits_to_keep: int = 0,
        num_items_in_batch: Tensor | int | None = None,
        prefill_chunk_size: int | None = None,
        return_dict: bool | None = None,
        document_ids: Tensor | None = None,
        neighbours: Tensor | None = None,
        neighbour_scores: Tensor | None = None,
        logits_at: Tensor | None = None,
        output_retrieval_scores: bool = False,
        bearing: BearingTokens | None = None,
        **others: Any,
    ) -> CausalLMOutput | tuple[Any, ...]:
        """Logits of the tokens passed, and the loss.

        Args:
            input_ids: int64 [B, T], T >= 1: tokens only, of any length; landmarks live inside.
            attention_mask: [B, T], 0 where padded (left or right), or over cached and new tokens together.
                What padding predicts bears no loss; its logits mean nothing.
            past_key_values: from :meth:`new_cache`; changed in place, or not at all by a call that is stopped. No
                gradient passes through what it carries.
            use_cache: make a cache if none is given. None: no in training, else only with a cache given.
            labels: int64 [B, T], -100 where no loss; shifted inside, as everywhere in transformers.
            close_chunk: True: put a landmark after each row's last token even if its chunk is not full. bool
                [B, T]: after each token so marked (early landmarks).
            noise_seed: int64 [B] for the selection noise in training (see :func:`trailmark.ops.fold_seed`);
                None draws one from torch's global generator.
            output_retrieval: return what was selected.
            logits_to_keep: compute only the logits of each row's last tokens (padding does not count); 0 is all.
                With a cache, only what these and later calls depend on is then computed.
            prefill_chunk_size: tokens that are read at a time where only the last logits are wanted.
            document_ids: int64 [B, T]: where the number changes within a row, another document begins, and nothing
                crosses from one to another: attention and retrieval stay inside, chunks begin anew, the first token
                bears no loss. Each document stands in one piece; numbers need no order, and those of padding mean
                nothing. None, or one number in every row: each row is one text. Chunks are still counted through
                the row, in what is returned and for noise. Not with a cache.
            neighbours: int64 [B, C, n], for models whose chunks can be found by an encoder or learned from scores: for
                each chunk that closes in the call, the chunks before it that are to be read (n = K, ascending, -1
                last), or with ``neighbour_scores`` its candidates. A row that closes fewer has -1. A model that
                chooses by its own scores (``config.completes_neighbours``) reads them whatever they score, weighed by
                these scores, and completes them to K from what it found (n <= K). Not with a cache, where the model
                finds them. None: found by the model.
            neighbour_scores: [B, C, n] of the candidates: how much reading each helps to predict the next chunk. A
                model that learns to rank them adds its ranking loss in training.
            logits_at: int64 [B, n]: compute the logits [B, n, V] after these tokens alone. Not with labels, a cache or
                ``logits_to_keep``.
            output_retrieval_scores: return the scores of all chunks that each landmark may select, noise left out, of
                a model that scores them (``config.ranks_all_chunks``). Not with a cache.
            bearing: what the tokens predict and weigh (:class:`trailmark.models.loss.BearingTokens`). The loss is
                that of these, without a ranking's, and no logits are returned: those of at most ``slab`` tokens exist
                at a time. Not with labels, nor where landmarks are tokens of the text.
            others: what models of transformers may take and these do not (``inputs_embeds``, ``output_hidden_states``,
                ``position_ids``): None or False, or it is refused.

        ``torch.compile`` makes one graph of a call, for each T (up to ``torch._dynamo.config.recompile_limit``
        lengths, 8). It does not look at values: a token outside the vocabulary is then torch's error. A mask costs
        one break; a HiLS, an HSA, and a call with padding, early landmarks marked by a tensor, documents, neighbours,
        an embedder, a cache or ``logits_to_keep``, run uncompiled.

        Raises:
            ValueError: an argument that is none here, or no tensor; an empty input, a token or label outside the
                vocabulary, padding in the middle, a mask, labels, documents or a cache of other rows, a cache of
                another model or in training, documents in several pieces or together with a cache; neighbours that the
                model does not take, that are not before their chunk in its document, or together with a cache; no
                embedder where one is needed, or another; a ``bearing`` of other tokens, or none that can be.
        """
        check_others(others)
        input_ids = check_tokens(input_ids, self.config.vocab_size)
        check_tensors(attention_mask=attention_mask, labels=labels, document_ids=document_ids)
        check_tensors(neighbours=neighbours, neighbour_scores=neighbour_scores, logits_at=logits_at)
        check_tensors(noise_seed=noise_seed)
        check_count("logits_to_keep", logits_to_keep, 0, "Pass logits_at for the logits after some tokens.")
        if prefill_chunk_size is not None:
            check_count("prefill_chunk_size", prefill_chunk_size, 1, "Leave it out for the default.")
        B, T = input_ids.shape
        if noise_seed is not None:
            check_noise_seed(noise_seed, B)
        cache = past_key_values
        if cache is not None:
            check_cache(cache, input_ids, self.training, lambda: self._cache_key)
        makes_cache = cache is None and bool(use_cache) and not self.training
        has_cache = makes_cache or cache is not None
        if document_ids is not None:
            check_documents(document_ids, input_ids, has_cache)
        if logits_at is not None:
            check_columns(logits_at, input_ids, has_cache or labels is not None or bool(logits_to_keep))
        if bearing is not None:
            check_bearing(
                bearing, labels is not None or num_items_in_batch is not None, self.config.vocab_size
            )
        if output_retrieval_scores:
            check_scored(self.config.ranks_all_chunks, has_cache)
        given = self._given(neighbours, neighbour_scores, has_cache)
        if makes_cache:
            cache = self.new_cache()
        if labels is not None:
            if labels.shape != input_ids.shape:
                raise ValueError(f"labels: expected shape {(B, T)}, got {tuple(labels.shape)}.")
            if logits_to_keep:
                raise ValueError("logits_to_keep: expected 0 together with labels.")
            check_vocabulary("labels", labels.masked_fill(labels == -100, 0), self.config.vocab_size)
        present = None if attention_mask is None else present_tokens(attention_mask, T, B, cache)
        if labels is not None and present is not None:
            labels = labels.masked_fill(~F.pad(present[:, :-1], (1, 0), value=True), -100)
        call = Call(
            input_ids,
            present,
            cache,
            labels,
            close_chunk,
            noise_seed,
            output_retrieval,
            logits_to_keep,
            num_items_in_batch,
            prefill_chunk_size,
            document_ids,
            given,
            logits_at,
            output_retrieval_scores,
            bearing,
        )
        # asked without is_compiling(): where this function is not one graph, the functions that it calls are traced
        plain = self.compiles and call.is_plain() and self.embedder is None
        if self.context_parallel is not None:
            expect_whole(call)
            plain = False
        with _all_or_nothing(cache):  # to the last line
            out = self._answer(call) if plain else self._answer_uncompiled(call)
            return out.to_tuple() if return_dict is False else out

    def _answer(self, call: Call) -> CausalLMOutput:
        B, T = call.input_ids.shape
        cache = call.cache
        text = Text.of(call.input_ids, call.present, call.close_chunk, call.document_ids)
        keep = min(call.logits_to_keep, T) or None
        if keep is not None and cache is not None and not call.output_retrieval:
            text = self._read_pieces(text, cache, keep, call.prefill_chunk_size or _READ_TOKENS, prompt=True)
        noise_seed = call.noise_seed if self.training else None
        if self.training and noise_seed is None:
            if self.context_parallel is not None and self.config.retrieves_in_training:
                raise ValueError(
                    "noise_seed: expected that of each text, the same in all processes that share it, got none."
                )
            noise_seed = torch.randint(2**31, (B,), device=call.input_ids.device)
        grid = self._lay_out(text, cache, noise_seed)
        kept = None if call.output_retrieval else keep
        hidden = self.run(text.ids, grid, cache, kept, noise_seed, call.given)
        assert hidden.states is not None
        states = hidden.states
        if keep is None:
            states = text.in_columns(states)
        elif call.output_retrieval:
            states = text.last(states, keep)
        if self.config.logit_scale != 1.0:
            states = states * self.config.logit_scale
        own = None if hidden.own is None else [text.in_columns(x) for x in hidden.own]
        if call.logits_at is not None:
            states = at_columns(states, call.logits_at)
            own = None if own is None else [at_columns(x, call.logits_at) for x in own]
        loss = logits = extra = None
        if call.bearing is not None:
            if own is not None:
                raise ValueError(
                    "bearing: expected none of a model whose landmarks are tokens of the text: its loss needs all "
                    "logits. Leave it out, or set landmark_loss to another than 'text'."
                )
            if call.bearing.labels.shape != states.shape[:2]:
                raise ValueError(
                    f"bearing: expected labels of the {states.shape[1]} tokens of each row whose logits are asked for, "
                    f"{tuple(states.shape[:2])}, got {tuple(call.bearing.labels.shape)}."
                )
            loss = call.bearing.loss(self.lm_head, states)
        else:
            logits = self.lm_head(states)
            extra = None if own is None else self.landmark_terms(logits, states, *own)
            if call.labels is not None:
                labels = self.bearing_loss(call.labels, call.input_ids, call.document_ids)
                loss = text_loss(
                    logits,
                    shift_labels(labels),
                    total=call.num_items_in_batch,
                    landmark_loss=extra,
                    ranking_loss=hidden.ranking,
                )
        retrieval = hidden.retrieval if call.output_retrieval else None
        if retrieval is not None and hidden.closed is None:
            retrieval = tuple(text.selection_in_columns(chosen) for chosen in retrieval)
        elif retrieval is not None and cache is not None:
            assert hidden.closed is not None
            retrieval = tuple(last_chunks(chosen, hidden.closed, grid.closed) for chosen in retrieval)
        scores = None
        if call.output_retrieval_scores:
            scores = RetrievalScores(hidden.chunks.scores(), text.chunks_in_columns(grid, states.device))
        return CausalLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=cache,
            retrieval=retrieval,
            ranking_loss=hidden.ranking,
            landmark_loss=extra,
            retrieval_scores=scores,
        )

    def bearing_loss(self, labels: Tensor, input_ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Labels [B, T] with -100 where there is no loss: at a document's first token, and by a model's convention.

        All int64 [B, T]. Not yet shifted: the label of token t stands at t.
        """
        if document_ids is None:
            return labels
        begins = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0))
        return labels.masked_fill(begins.to(labels.device), -100)

    def landmark_terms(self, logits: Tensor, states: Tensor, own: Tensor, closes: Tensor) -> Tensor:
        """[B, T]: see :attr:`CausalLMOutput.landmark_loss`."""
        raise NotImplementedError

    def _given(self, neighbours: Tensor | None, scores: Tensor | None, has_cache: bool) -> Given | None:
        """What an architecture's ``run`` takes, of those that know such a thing."""
        for name, came in (("neighbours", neighbours), ("neighbour_scores", scores)):
            if came is not None:
                raise ValueError(
                    f"{name}: expected none for {type(self).__name__}, which finds what it reads by itself. Pass them "
                    "to a DRT with retriever='encoder' or 'causal', or to an RPT."
                )
        return None

    @torch.compiler.disable(reason="padding, early landmarks, documents, neighbours, an embedder or a cache")
    def _answer_uncompiled(self, call: Call) -> CausalLMOutput:
        return self._answer(call)

    def without_retrieval(self) -> Self:
        """The same weights with retrieval off: see :func:`trailmark.models.with_retrieved.without_retrieval`."""
        return without_retrieval(self)

    def read(
        self,
        input_ids: Tensor,
        cache: ChunkCache | None = None,
        attention_mask: Tensor | None = None,
        progress: Callable[[int, int], None] | None = None,
        prompt: bool = False,
    ) -> ChunkCache:
        """Read tokens [B, T] of any length into the cache: constant window, growing memory, no logits.

        Only what later results depend on is computed, exactly: a DRT's memory depends on its lower layers and
        chunk encoder alone; the upper layers wait until logits are wanted, and run on the last positions then
        (docs/reading.md). Reading in pieces costs the same. What was read stays whole if a later piece fails
        or is interrupted.

        Args:
            input_ids: int64 [B, T].
            cache: from :meth:`new_cache` or :meth:`load_cache`; None makes one.
            attention_mask: [B, T], 0 where padded, left or right.
            progress: called after each piece with the tokens (of the longest row) read so far and T.
            prompt: these tokens are part of what is to be answered or gone on with: a model that reads a text
                otherwise than it predicts one (a HiLS with ``reading: windows``) then reads as it predicts.

        Returns:
            The cache.

        Raises:
            ValueError: as :meth:`forward`; no space left for the memory (what was read so far stays valid).
        """
        if self.context_parallel is not None:
            raise ValueError(
                "model: expected one whose texts are not shared, to read: a memory is of a whole text. Set "
                "model.context_parallel = None first."
            )
        input_ids = check_tokens(input_ids, self.config.vocab_size)
        check_tensors(attention_mask=attention_mask)
        cache = self.new_cache(num_tokens=input_ids.shape[1]) if cache is None else cache
        check_cache(cache, input_ids, self.training, lambda: self._cache_key)
        if not prompt and cache.state is not None:  # of a question before this text
            cache.state = replace(cache.state, focus=())
        B, T = input_ids.shape
        present = None if attention_mask is None else present_tokens(attention_mask, T, B, cache)
        with torch.no_grad():
            text = Text.of(input_ids, present, False)
            rest = self._read_pieces(text, cache, 0, _READ_TOKENS, prompt, progress)
            if rest.ids.shape[1]:
                self._read_part(rest, cache, prompt)
        if progress is not None:
            progress(T, T)
        return cache

    def focus(self, input_ids: Tensor, cache: ChunkCache, attention_mask: Tensor | None = None) -> None:
        """Let what is asked next, and its answer, choose among the few chunks at which the question looks sharply.

        To be called before the question itself, with the cache that it is put to: the cache then holds these chunks,
        until the next call of this or of :meth:`read`; they go with it from row to row, and are not saved. All chunks
        that were read are looked at, those too that the window still shows. It does nothing but with a HiLS whose
        ``num_focus_chunks`` says how many, on a cache that has read a chunk.

        Args:
            input_ids: int64 [B, T], the question; of a longer one its last ``sliding_window`` tokens are looked at.
            attention_mask: [B, T], 0 where padded.

        Raises:
            ValueError: as :meth:`forward`, where it looks.
        """

    def _read_pieces(
        self,
        text: Text,
        cache: ChunkCache,
        keep: int,
        piece: int,
        prompt: bool,
        progress: Callable[[int, int], None] | None = None,
    ) -> Text:
        """Read pieces of a long text into the cache; returns the last piece, of at least ``keep`` tokens."""
        piece = self.reading_piece(piece)
        width = text.ids.shape[1]
        text = self._read_beginning(text, cache, keep)
        done = width - text.ids.shape[1]
        width -= done
        opened = int(self._begun(cache.begun(len(text.ids))).max())
        first = 0
        while width - first > max(piece, keep):
            # pieces that end at chunk ends, or at cell ends: few layouts to prepare
            last = min(first + piece - opened, width - keep)
            with torch.no_grad():
                self._read_part(text.columns(first, last), cache, prompt)
            first, opened = last, 0
            if progress is not None:
                progress(done + first, done + width)
        return text.columns(first, width)

    def _read_part(self, text: Text, cache: ChunkCache, prompt: bool) -> None:
        """Read a piece into the cache; ``prompt`` as for :meth:`read`."""
        self.run(text.ids, self._lay_out(text, cache), cache, 0)

    def _read_beginning(self, text: Text, cache: ChunkCache, keep: int) -> Text:
        """Run all layers on the sinks, which every layer must have seen; returns the rest, of at least ``keep`` tokens.

        The layers that wait until a result needs them see no more than a result's reach: without this, not the first
        positions of a text.
        """
        rows = len(text.ids)
        missing = self.config.num_sinks - cache.begun(rows).spans[-1].end
        if not (missing > 0).any():
            return text
        width = text.ids.shape[1]
        counts = np.full(rows, width) if text.counts is None else text.counts
        first = np.minimum(missing.clip(0), (counts - keep).clip(0))
        if not first.any():
            return text
        beginning, rest = text.parted(first)
        self.run(beginning.ids, self._lay_out(beginning, cache), cache)
        return rest

    def reading_piece(self, num_tokens: int | None = None) -> int:
        """At most ``num_tokens``, but at least one whole chunk (or cell): read from its start on, it ends with one.

        None: as many as :meth:`read` takes at a time.
        """
        size, num_tokens = self._piece_size(), _READ_TOKENS if num_tokens is None else num_tokens
        # a single position is written into its layers' rings, which a call that is stopped can take back once
        return max(1 if size > 1 else 2, num_tokens // size) * size

    def _piece_size(self) -> int:
        return getattr(self.config, "chunk_size", 1)

    def _begun(self, state: CacheState) -> Integers:
        """[B] tokens since a place where a piece of whole chunks (or cells) may begin."""
        return state.phases

    def _lay_out(self, text: Text, cache: ChunkCache | None, noise_seed: Tensor | None = None) -> Grid:
        phases = None if cache is None else cache.begun(len(text.ids)).phases
        return self.layouts.lay_out(text.ids.shape[1], phases, text.counts, text.close_chunk, text.documents)

    # --- inside -----------------------------------------------------------------------------------------------

    def _finish(self, norm: nn.Module) -> None:
        """The end of a model's ``__init__``: the last norm, the head, and the initialisation of all weights."""
        self.norm = norm
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        for name, module in self.named_modules():
            if name.endswith(("o_proj", "down_proj")):  # they write into the residual stream
                module.into_residual = True
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        config = self.config
        if isinstance(module, nn.Linear | nn.Embedding):
            std = config.initializer_range
            if config.initialization == "fan_in":
                std = 1.0 if isinstance(module, nn.Embedding) else module.in_features**-0.5
                if getattr(module, "into_residual", False):
                    std /= math.sqrt(2 * config.num_hidden_layers)
            init.normal_(module.weight, std=std)
            if hasattr(module, "block_rows") and module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, RMSNorm | LayerNorm):
            init.ones_(module.weight)


def is_ours(model: Any) -> bool:
    """Whether a model has trailmark's caches, tiers and answers; else it is read as transformers reads it."""
    return isinstance(model, TrailmarkForCausalLM)


def fingerprint(model: nn.Module) -> str:
    """SHA-256 of all weights: names, types and every byte."""
    named = sorted(model.state_dict().items())

    def digest(item: tuple[str, Tensor]) -> bytes:
        name, weight = item
        hashed = hashlib.sha256(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        hashed.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return hashed.digest()

    with ThreadPoolExecutor(4) as threads:  # hashing lets go of Python's lock
        return hashlib.sha256(b"".join(threads.map(digest, named))).hexdigest()


@contextmanager
def _all_or_nothing(cache: ChunkCache | None) -> Iterator[None]:
    """A call that is stopped after it changed the cache (Ctrl-C, no memory for the logits) takes that back."""
    if cache is None:
        yield
        return
    go_back = _way_back(cache)
    try:
        yield
    except BaseException:
        go_back()
        raise


@contextmanager
def taken_back(cache: ChunkCache) -> Iterator[None]:
    """What is read inside leaves the cache as it was."""
    go_back = _way_back(cache)
    try:
        yield
    finally:
        go_back()


def _way_back(cache: ChunkCache) -> Callable[[], None]:
    """What makes a cache again what it is now."""
    state, memory = cache.state, cache.memory.frozen(cache.begun(1).memory)

    def go_back() -> None:
        cache.state = state
        cache.memory.go_back(memory)

    return go_back
