"""What every causal language model here shares: arguments, padding, cache, loss, reading and generation.

An architecture implements ``run`` (hidden states of the new tokens) and ``new_cache``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.utils import ModelOutput

from trailmark.memory import ChunkCache
from trailmark.models.configuration import TrailmarkConfig
from trailmark.models.layers import RMSNorm
from trailmark.ops import ChunkSelection

# Tokens that ``read`` takes at a time: enough for efficient GEMMs, few enough to keep the memory constant.
_READ_TOKENS = 4096


@dataclass
class CausalLMOutput(ModelOutput):
    """``logits`` [B, T, V] of the tokens passed (or the last ``logits_to_keep``); landmarks never show."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: ChunkCache | None = None
    retrieval: tuple[ChunkSelection, ...] | None = None
    """Per group, what the landmarks closed in this call selected [B, N, K], by absolute chunk number.

    A padded row may close fewer chunks than N; what follows them is -1.
    """


@dataclass
class Hidden:
    """What an architecture's ``run`` returns."""

    states: Tensor | None  # [B, T, E] after the last norm; None when only reading
    retrieval: tuple[ChunkSelection, ...] | None = None


class TrailmarkForCausalLM(PreTrainedModel, GenerationMixin):
    """Base class of the models."""

    config_class: type[TrailmarkConfig] = TrailmarkConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # the Trainer passes num_items_in_batch
    _supports_sdpa = True
    _no_split_modules: list[str] | None = ["WindowLayer", "ChunkEncoderLayer"]
    config: TrailmarkConfig

    embed_tokens: nn.Embedding
    lm_head: nn.Linear
    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}

    # --- what an architecture provides -------------------------------------------------------------------

    def new_cache(self, memory_tier: str = "device", num_tokens: int = 0) -> ChunkCache:
        """An empty cache for one text or a batch of texts of equal length.

        Args:
            memory_tier: "device".
            num_tokens: the length to come, if known: the memory is then allocated once.
        """
        raise NotImplementedError

    def run(
        self,
        input_ids: Tensor,  # [B, T]
        cache: ChunkCache | None,
        close_chunk: bool,
        noise_seed: Tensor | None,
        reading: bool,
        output_retrieval: bool,
    ) -> Hidden:
        """Hidden states of the new tokens; ``reading``: only what the cache needs is computed."""
        raise NotImplementedError

    def reading_tail(self, chunk_size: int) -> int:
        """The last chunks of a text, outside of which the window carries nothing to what follows."""
        raise NotImplementedError

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
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: ChunkCache | None = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        close_chunk: bool = False,
        noise_seed: Tensor | None = None,
        output_retrieval: bool = False,
        logits_to_keep: int = 0,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutput | tuple[Any, ...]:
        """Logits of the tokens passed, and the loss.

        Args:
            input_ids: int64 [B, T], T >= 1: tokens only, of any length; landmarks live inside.
            attention_mask: [B, T], 0 where padded (left or right), or over cached and new tokens together.
                What padding predicts bears no loss.
            past_key_values: from :meth:`new_cache`; changed in place. No gradient passes through what it carries.
            use_cache: make a cache if none is given. None: no in training, else only with a cache given.
            labels: int64 [B, T], -100 where no loss; shifted inside, as everywhere in transformers.
            close_chunk: put a landmark after the last token even if its chunk is not full.
            noise_seed: int64 [B] for the selection noise in training (see :func:`trailmark.ops.fold_seed`);
                None draws one from torch's global generator.
            output_retrieval: return what was selected.
            logits_to_keep: compute only the last logits; 0 is all.

        Raises:
            ValueError: an empty input, a token or label outside the vocabulary, padding in the middle, a mask,
                labels or a cache of other rows, a cache of another model or in training.
        """
        self._check_tokens(input_ids)
        B, T = input_ids.shape
        cache = past_key_values
        self._check_cache(input_ids, cache)
        if cache is None and use_cache and not self.training:
            cache = self.new_cache()
        if labels is not None:
            if labels.shape != input_ids.shape:
                raise ValueError(f"labels: expected shape {(B, T)}, got {tuple(labels.shape)}.")
            self._check_vocabulary("labels", labels.masked_fill(labels == -100, 0))
        present = None if attention_mask is None else _present(attention_mask, T, B, cache)
        if labels is not None and present is not None:
            labels = labels.masked_fill(~F.pad(present[:, :-1], (1, 0), value=True), -100)
        if cache is not None and (present is not None or cache.rows is not None):
            hidden = self._run_rows(input_ids, present, cache, close_chunk, output_retrieval)
        else:
            order = None if present is None else torch.sort(~present, dim=1, stable=True).indices
            ids = input_ids if order is None else input_ids.gather(1, order)  # padded right
            if order is not None and close_chunk:
                raise ValueError("close_chunk: expected a cache for a padded batch. Pass use_cache=True.")
            if self.training and noise_seed is None:
                noise_seed = torch.randint(2**31, (B,), device=input_ids.device)
            hidden = self.run(
                ids, cache, close_chunk, noise_seed if self.training else None, False, output_retrieval
            )
            if order is not None and hidden.states is not None:
                back = order.argsort(dim=1)[..., None].expand_as(hidden.states)
                hidden.states = hidden.states.gather(1, back)
            if present is not None and hidden.retrieval is not None:
                closed = present.sum(1) // getattr(self.config, "chunk_size", 1)
                hidden.retrieval = tuple(_first_chunks(chosen, closed) for chosen in hidden.retrieval)
        assert hidden.states is not None
        states = hidden.states[:, -logits_to_keep:] if logits_to_keep else hidden.states
        if self.config.logit_scale != 1.0:
            states = states * self.config.logit_scale
        logits = self.lm_head(states)
        loss = None
        if labels is not None:
            if logits_to_keep:
                raise ValueError("logits_to_keep: expected 0 together with labels.")
            loss = causal_loss(logits, labels, num_items_in_batch)
        out = CausalLMOutput(loss=loss, logits=logits, past_key_values=cache, retrieval=hidden.retrieval)
        return out.to_tuple() if return_dict is False else out

    def read(self, input_ids: Tensor, cache: ChunkCache) -> None:
        """Read tokens [B, T] of any length into the cache: constant window, growing memory, no logits.

        Only what the cache needs is computed, exactly: a DRT's memory depends on its lower layers and chunk
        encoder alone, so the upper layers run on the last positions of each piece (docs/math.md, Reading).
        """
        self._check_tokens(input_ids)
        self._check_cache(input_ids, cache)
        if cache.rows is not None:
            raise ValueError(
                "cache: expected rows of equal length, got a padded batch. Read one text a time."
            )
        with torch.no_grad():
            for piece in self._pieces(input_ids, cache):
                self.run(piece, cache, False, None, True, False)

    def _pieces(self, input_ids: Tensor, cache: ChunkCache) -> Iterator[Tensor]:
        """Pieces that end at chunk ends, so that little is read twice."""
        size = getattr(self.config, "chunk_size", 1)
        step = max(1, _READ_TOKENS // size) * size
        opened = 0 if cache.open_tokens is None else cache.open_tokens.shape[1]
        first, T = 0, input_ids.shape[1]
        while first < T:
            last = min(T, first + step - opened)
            yield input_ids[:, first:last]
            first, opened = last, 0

    # --- generation -----------------------------------------------------------------------------------------

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
        if generation_config.prefill_chunk_size is not None:
            raise ValueError(
                f"prefill_chunk_size: expected None, got {generation_config.prefill_chunk_size}: a prompt ends with "
                "one landmark, its pieces with none. For constant memory, read(ids, cache) all but the question "
                "and pass past_key_values=cache."
            )
        for name in ("cache_implementation", "output_attentions", "output_hidden_states"):
            if came := getattr(generation_config, name):
                raise ValueError(
                    f"{name}: expected none, got {came!r}: the models here have nothing of the kind."
                )
        rows = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
        cache = model_kwargs.get("past_key_values")
        if cache is None:
            model_kwargs["past_key_values"] = self.new_cache()
        elif rows > 1 and cache.batch_size == 1:
            model_kwargs["past_key_values"] = cache.branch(rows)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: ChunkCache | None = None,
        attention_mask: Tensor | None = None,
        is_first_iteration: bool | None = False,
        close_chunk: bool = True,
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
        }

    # --- inside -----------------------------------------------------------------------------------------------

    def _init_weights(self, module: nn.Module) -> None:
        config = self.config
        if isinstance(module, nn.Linear | nn.Embedding):
            std = config.initializer_range
            if config.initialization == "fan_in":
                std = 1.0 if isinstance(module, nn.Embedding) else module.in_features**-0.5
                if getattr(module, "into_residual", False):
                    std /= math.sqrt(2 * config.num_hidden_layers)
            init.normal_(module.weight, std=std)
        elif isinstance(module, RMSNorm):
            init.ones_(module.weight)

    def _check_tokens(self, input_ids: Tensor) -> None:
        if input_ids.dim() != 2 or 0 in input_ids.shape:
            raise ValueError(
                f"input_ids: expected shape [B, T] with T >= 1, got {tuple(input_ids.shape)}. "
                "There is nothing to predict from an empty text: pass at least one token."
            )
        self._check_vocabulary("input_ids", input_ids)

    def _check_vocabulary(self, argument: str, ids: Tensor) -> None:
        if ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{argument}: expected int64, got {ids.dtype}. Pass {argument}.long().")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(
                f"{argument}: expected tokens from 0 to {self.config.vocab_size - 1} (vocab_size - 1), "
                f"got {low if low < 0 else high}. Use the tokenizer that the model was trained with."
            )

    def _check_cache(self, input_ids: Tensor, cache: ChunkCache | None) -> None:
        if cache is None:
            return
        if self.training:
            raise ValueError(
                "past_key_values: expected None in training: what a cache carries has no gradient. "
                "Call eval() first, or pass the whole text at once."
            )
        if not isinstance(cache, ChunkCache):
            raise ValueError(
                f"past_key_values: expected a cache from new_cache(), got {type(cache).__name__}. "
                "Pass past_key_values=model.new_cache(), or none."
            )
        own = self.new_cache()
        if (len(cache.window), len(cache.pending)) != (len(own.window), len(own.pending)):
            raise ValueError(
                f"past_key_values: expected a cache of this model ({len(own.window)} layers, "
                f"{len(own.pending)} groups), got one of {len(cache.window)} layers and {len(cache.pending)} groups."
            )
        if cache.batch_size not in (None, input_ids.shape[0]):
            raise ValueError(
                f"input_ids: expected the {cache.batch_size} rows that the cache has read, got "
                f"{input_ids.shape[0]}. Pass all of them; after one text, cache.branch(B) goes on in B rows."
            )

    def _run_rows(
        self,
        input_ids: Tensor,
        present: Tensor | None,
        cache: ChunkCache,
        close_chunk: bool,
        output_retrieval: bool,
    ) -> Hidden:
        """A padded batch with a cache: row by row, each on a cache of its own. Exact, and not fast."""
        B, T = input_ids.shape
        if cache.rows is None:
            if cache.num_tokens:
                raise ValueError(
                    "attention_mask: expected no padding after a cache that was read unpadded. "
                    "Pass the rows one at a time, each with a cache of its own."
                )
            cache.rows = [self.new_cache() for _ in range(B)]
        if present is None:
            present = torch.ones(B, T, dtype=torch.bool, device=input_ids.device)
        rows = [
            self.run(
                input_ids[b : b + 1, present[b]], cache.rows[b], close_chunk, None, False, output_retrieval
            )
            for b in range(B)
        ]
        assert rows[0].states is not None
        states = rows[0].states.new_zeros(B, T, rows[0].states.shape[-1])
        for b, row in enumerate(rows):
            assert row.states is not None
            states[b, present[b]] = row.states[0]
        if any(row.retrieval is None for row in rows):
            return Hidden(states)
        groups = zip(*(row.retrieval or () for row in rows), strict=True)
        return Hidden(states, tuple(_join_rows(group) for group in groups))


def mark_residual_projections(model: nn.Module) -> None:
    """Name the matrices that write into the residual stream, for the fan-in initialisation."""
    for name, module in model.named_modules():
        if name.endswith(("o_proj", "down_proj")):
            module.into_residual = True


def causal_loss(logits: Tensor, labels: Tensor, num_items: Tensor | int | None = None) -> Tensor:
    """Cross entropy of token t + 1 at token t in float32 or wider: mean, or sum / ``num_items``."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    # the labels are shifted, not the logits: a slice of those would be copied back and forth
    flat, targets = logits.to(dtype).flatten(0, 1), shift_labels(labels).flatten().long()
    if num_items is None:
        count = (targets != -100).sum()
    else:
        count = torch.as_tensor(num_items, device=logits.device)
    count = count.clamp(min=1)  # no token, no loss
    return F.cross_entropy(flat, targets, ignore_index=-100, reduction="sum") / count


def shift_labels(labels: Tensor, fill: int = -100) -> Tensor:
    """[B, T]: at t the label of t + 1; ``fill`` at the end."""
    return F.pad(labels[:, 1:], (0, 1), value=fill)


def _present(mask: Tensor, num_tokens: int, batch_size: int, cache: ChunkCache | None) -> Tensor | None:
    """The mask as bool [B, T] of the new tokens; None: none is padding. Padding inside a text is refused."""
    seen = 0 if cache is None else cache.get_seq_length()
    # a padded cache counts tokens, not the padding that came with them
    padded = cache is not None and cache.rows is not None
    rows, width = mask.shape if mask.dim() == 2 else (0, 0)
    fits = width in (num_tokens, seen + num_tokens) or (padded and width > seen + num_tokens)
    if rows != batch_size or not fits:
        whole = f", or with the {seen} cached tokens before" if seen else ""
        raise ValueError(
            f"attention_mask: expected shape [{batch_size}, {num_tokens}] as input_ids{whole}, got "
            f"{list(mask.shape)}. Pass the tokenizer's own mask, or none if nothing is padded."
        )
    present = mask[:, -num_tokens:].bool()
    if bool(present.all()):
        return None
    if bool(((present[:, 1:] != present[:, :-1]).sum(1) > 1).any() or not present.any(1).all()):
        raise ValueError(
            "attention_mask: expected each row to be tokens with padding at one end, got padding inside or "
            "a row without tokens."
        )
    return present


_NOTHING = (-1, 0.0, -math.inf)  # index, weight and score where nothing was selected


def _first_chunks(chosen: ChunkSelection, count: Tensor) -> ChunkSelection:
    """[B, N, K] of which row b closed ``count[b]`` chunks; the rest selected nothing."""
    rest = torch.arange(chosen.indices.shape[1], device=count.device) >= count[:, None]  # [B, N]
    parts = zip(chosen, _NOTHING, strict=True)
    return ChunkSelection(*(x.masked_fill(rest[..., None], nothing) for x, nothing in parts))


def _join_rows(rows: Sequence[ChunkSelection]) -> ChunkSelection:
    """[1, n, K] of each row -> [B, the most, K]."""
    most = max(row.indices.shape[1] for row in rows)
    joined = []
    for each, nothing in zip(zip(*rows, strict=True), _NOTHING, strict=True):
        joined.append(torch.cat([F.pad(x, (0, 0, 0, most - x.shape[1]), value=nothing) for x in each]))
    return ChunkSelection(*joined)
