"""The configuration of hierarchical sparse attention (HSA)."""

# No ``from __future__ import annotations`` here: ``strict`` does not check types that are written as strings.

from typing import Any, Literal

from trailmark.models.configuration import Filled, LayeredConfig, checked, expect


@checked
class HSAConfig(LayeredConfig):
    """Hierarchical sparse attention between layers with a window (HSA, arXiv 2504.16795 and 2511.23319).

    Lower layers have a window alone; an encoder makes of each closed chunk keys, values and a landmark vector, which
    all share. Each group of upper layers begins with a layer that reads: every token selects K chunks and attends to
    them, without positions. No landmark stands in the text: that of a chunk is a row of the encoder.

    Args:
        num_hidden_layers: those with a window, lower and upper. The layers that read, one a group, come on top.
        num_lower_layers: layers before the chunk encoder; None is half.
        chunk_size: S tokens.
        num_retrieved_chunks: K, for each token and group. 1 trains no retriever with softmax weights and is refused in
            training. 0: retrieval is off; what reads has its MLP alone.
        num_retrieval_groups: G; the upper layers divide by it.
        num_encoder_layers: bidirectional layers of the chunk encoder.
        chunk_summary: what a chunk's landmark vector is made of. "landmark": the encoder's row of a vector that stands
            after the tokens, as published. "mean": the mean of its rows of the tokens.
        num_memory_heads: key/value heads of what is read; None: num_key_value_heads. (Published at 345M: 1.)
        num_retrieval_heads: 1: all heads read the same chunks; or as many as num_memory_heads, which choose by
            themselves.
        retrieval_size: numbers of a landmark vector, of all heads that choose; None: hidden_size.
        chunk_weights: "softmax" over the chunks chosen, or "stick_breaking", by which the most recent take their part
            first and a token may read little of anything.
        recency_decay: a learned number a group, added to a score for each chunk chosen that is more recent, so that a
            negative one prefers recent chunks; it begins at 0. None: with "softmax" weights, which alone can have it.
        softmax_off_by_one: a virtual key of score 0 and value 0 in every chunk.
        retrieval_normalization: RMS-normalise both sides of the score after the projections.
        retrieval_scale: factor on the score, besides (retrieval_size / num_retrieval_heads) ** -0.5.
        retrieval_noise: Gumbel noise on the scores when chunks are selected in training.
        residual_gca: add what was read to the residual stream; False: it feeds the MLP only, as published.
    """

    model_type = "trailmark_hsa"
    no_arithmetic = frozenset({"retrieval_noise"})
    why_some_are_upper = "one upper layer must follow what reads"

    window_position: Literal["alibi", "rope"] = "rope"
    chunk_size: int = 64
    num_retrieved_chunks: int = 32
    num_retrieval_groups: int = 2
    num_encoder_layers: int = 1
    chunk_summary: Literal["landmark", "mean"] = "landmark"
    num_memory_heads: Filled = None  # type: ignore[assignment]
    num_retrieval_heads: int = 1
    retrieval_size: Filled = None  # type: ignore[assignment]
    chunk_weights: Literal["softmax", "stick_breaking"] = "softmax"
    recency_decay: bool | None = None
    softmax_off_by_one: bool = False
    retrieval_normalization: bool = False
    retrieval_scale: float | int = 1.0
    retrieval_noise: bool = True
    residual_gca: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_memory_heads is None:
            self.num_memory_heads = self.num_key_value_heads or self.num_attention_heads
        if self.retrieval_size is None:
            self.retrieval_size = self.hidden_size
        if self.recency_decay is None:
            self.recency_decay = self.chunk_weights == "softmax"
        super().__post_init__(**kwargs)

    @property
    def has_landmarks(self) -> bool:
        return False

    @property
    def score_scale(self) -> float:
        """The factor on the product of a query and a landmark vector of one head."""
        return self.retrieval_scale * (self.retrieval_size / self.num_retrieval_heads) ** -0.5

    @property
    def retrieves_in_training(self) -> bool:
        """Tokens select, not landmarks."""
        return False

    @property
    def least_retrieved_in_training(self) -> int:
        return 2 if self.chunk_weights == "softmax" else 1

    def validate_architecture(self) -> None:
        super().validate_architecture()
        for name in ("num_encoder_layers", "num_retrieval_heads"):
            expect(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        memory, heads, size = self.num_memory_heads, self.num_retrieval_heads, self.retrieval_size
        expect(
            memory is None or (memory >= 1 and self.num_attention_heads % memory == 0),
            "num_memory_heads",
            memory,
            f"a divisor of num_attention_heads = {self.num_attention_heads}",
        )
        expect(
            memory is None or heads in (1, memory),
            "num_retrieval_heads",
            heads,
            f"1, or num_memory_heads = {memory}",
        )
        expect(
            size is None or (size >= 1 and size % heads == 0),
            "retrieval_size",
            size,
            f"a multiple of num_retrieval_heads = {heads}",
        )
        expect(
            self.chunk_weights == "softmax" or not self.recency_decay,
            "recency_decay",
            self.recency_decay,
            "false or None with chunk_weights 'stick_breaking', which prefers recent chunks by itself",
        )
