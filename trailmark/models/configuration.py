"""Configurations. Fields that several models share bear one name; sizes that do not fit are refused here."""

# No ``from __future__ import annotations`` here: ``strict`` does not check types that are written as strings.

from typing import Any, Literal, Self

from trailmark.models.base_configuration import (
    ConfigurationError,
    TrailmarkConfig,
    checked,
    expect,
    expect_count,
    with_fields,
)

__all__ = [
    "BlockRecurrentConfig",
    "ConfigurationError",
    "DRTConfig",
    "LandmarkConfig",
    "RPTConfig",
    "SlidingWindowConfig",
    "TrailmarkConfig",
    "checked",
]


@checked
class SlidingWindowConfig(TrailmarkConfig):
    """The model with a window alone: Llama-like layers, sliding window, ALiBi."""

    model_type = "trailmark_sliding_window"

    def with_fewer_layers(self, count: int) -> Self:
        return with_fields(self, num_hidden_layers=min(self.num_hidden_layers, count))


@checked
class DRTConfig(TrailmarkConfig):
    """Differentiable Retrieval Transformer (arXiv 2410.01651).

    Args:
        num_lower_layers: layers before the chunk encoder; None is half.
        chunk_size: S tokens; a chunk has S + 1 rows with its landmark. (Papers' configurations: 64.)
        num_retrieved_chunks: K. 1 trains no retriever and is refused in training, unless the retriever is not
            learned: the chunk's weight is then 1. 0: retrieval is off. Every chunk reads what the first two read,
            nothing; no chunk is encoded or kept, no embedder asked. Refused in training.
        num_retrieval_groups: G; the upper layers divide by it.
        num_encoder_layers: bidirectional layers of the chunk encoder.
        softmax_off_by_one: a virtual key of score 0 and value 0 in every chunk (Eq. 3).
        retrieval_projections: W_h per group and W_l (Eq. 1); False: none, as in the published code.
        retrieval_normalization: RMS-normalise both sides of the score after the projections.
        retrieval_scale: factor on the score, besides E ** -0.5.
        retrieval_noise: Gumbel noise on the scores when chunks are selected in training.
        exclude_visible_chunks: do not select chunks that the window shows whole to the last row that reads.
        residual_gca: add what was read to the residual stream; False: it feeds the MLP only, as published.
        retriever: what selects. "causal": the learned scores. The ablations: "random": K chunks, drawn evenly from
            the candidates. "encoder": those that a frozen encoder finds nearest, online (the model's attribute
            ``embedder``) or beforehand (``neighbours``, from a table), the same for every group.
        encoder_weights: with retriever "encoder", what weighs the selected chunks. "learned": the scores of W_h and
            W_l. "encoder": its own, times retrieval_scale; the model then has no W_h and W_l, and a table must have
            scores (the paper's "w/ contriever" replaces the scores).
        embedder: spec of that encoder, such as "hash" or "transformers:FOLDER", for who opens the model.
        embedder_fingerprint: of the encoder that the model was trained with; another is refused. None: any.
    """

    model_type = "trailmark_drt"

    num_lower_layers: int | None = None
    chunk_size: int = 63
    num_retrieved_chunks: int = 8
    num_retrieval_groups: int = 1
    num_encoder_layers: int = 2
    softmax_off_by_one: bool = True
    retrieval_projections: bool = True
    retrieval_normalization: bool = False
    retrieval_scale: float | int = 1.0
    retrieval_noise: bool = True
    exclude_visible_chunks: bool = False
    residual_gca: bool = False
    retriever: Literal["causal", "random", "encoder"] = "causal"
    encoder_weights: Literal["learned", "encoder"] = "learned"
    embedder: str | None = None
    embedder_fingerprint: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_lower_layers is None:
            self.num_lower_layers = self.num_hidden_layers // 2
        super().__post_init__(**kwargs)

    @property
    def first_visible(self) -> int | None:
        """``visible`` of :mod:`trailmark.models.candidates`: the last row that reads is S + 1 after it."""
        if not self.exclude_visible_chunks:
            return None
        assert self.sliding_window is not None
        return self.chunk_size + 1 - (self.sliding_window - 1)

    @property
    def num_upper_layers(self) -> int:
        assert self.num_lower_layers is not None
        return self.num_hidden_layers - self.num_lower_layers

    @property
    def scores_chunks(self) -> bool:
        """Whether the model weighs chunks by scores of its own; else it has no W_h and W_l."""
        return self.encoder_weights == "learned"

    def expect_trainable(self) -> None:
        super().expect_trainable()
        if self.num_retrieved_chunks == 1 and self.retriever == "causal":
            raise ValueError(
                "num_retrieved_chunks: expected at least 2 in training, got 1: the weight of a single chunk is "
                "always 1, so its score gets no gradient and the retriever learns nothing."
            )

    def with_fewer_layers(self, count: int) -> Self:
        assert self.num_lower_layers is not None
        groups = min(self.num_retrieval_groups, 2)
        lower = min(self.num_lower_layers, count)
        upper = groups * min(self.num_upper_layers // self.num_retrieval_groups, count)
        return with_fields(
            self,
            num_hidden_layers=lower + upper,
            num_lower_layers=lower,
            num_retrieval_groups=groups,
            num_encoder_layers=min(self.num_encoder_layers, count),
        )

    def validate_architecture(self) -> None:
        super().validate_architecture()
        if self.retriever != "encoder":
            for name, without in (
                ("encoder_weights", "learned"), ("embedder", None), ("embedder_fingerprint", None)
            ):  # fmt: skip
                came = getattr(self, name)
                expect(came == without, name, came, f"{without!r} with retriever {self.retriever!r}")
        for name in ("chunk_size", "num_retrieval_groups", "num_encoder_layers"):
            expect(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        expect_count(self.num_retrieved_chunks)
        lower = self.num_lower_layers
        expect(
            lower is None or 0 <= lower < self.num_hidden_layers,
            "num_lower_layers",
            lower,
            f"0 to {self.num_hidden_layers - 1} (num_hidden_layers - 1: one upper layer must read)",
        )
        if lower is not None:
            upper = self.num_hidden_layers - lower
            expect(
                upper % self.num_retrieval_groups == 0,
                "num_retrieval_groups",
                self.num_retrieval_groups,
                f"a divisor of the {upper} upper layers",
            )
        expect(self.sliding_window is not None, "sliding_window", None, "a number of positions")
        self.expect_rotary_heads()


@checked
class LandmarkConfig(TrailmarkConfig):
    """Landmark Attention (arXiv 2305.16300). The defaults are the Llama-like 128M model of arXiv 2410.01651.

    Positions count a chunk as S + 1, its landmark on the last: a chunk that is closed early leaves a gap.

    Args:
        chunk_size: S tokens before a landmark. (The first paper: 50.)
        num_retrieved_chunks: k, of the memory, per token and head or as ``retrieve_per`` says. 0: retrieval is off;
            with a cache a token sees its cell alone and no chunk is kept. Without a cache, as in training, a text is
            attended to whole, whatever k is: 0 changes nothing there.
        max_position_embeddings: positions of a training text, landmarks included. With stingy positions what is
            read at once must fit: (k + 1) (S + 1) places for the memory and the positions of a cell.
        local_length: tokens of a cell. A text is cut in cells from its start; chunks completed in the present
            cell are local, earlier ones are memory. None: the most whole chunks that fit.
        retrieve_per: what selects k chunks for itself. "token_and_head": each token in each head, "token": by
            the maximum over heads, "head": by the maximum over a cell's tokens, "cell": by both.
        causal_retrieval: of "head" and "cell": a token's choice depends on tokens before it only, and is the same
            however the text is fed (:func:`trailmark.ops.select_by_landmarks`). False, the paper's way: the
            maximum is over all of the cell that is fed so far, tokens after it included.
        memory_position: "stingy": the k latest chunks at their distances, all others as if k + 1 chunks back
            (Sec. 3.2.1). "true": at their distances, for models trained with ``position_jump`` (App. E).
        max_memory_chunks: the newest so many are kept; None: all.
        landmark_phase: of training texts: "random": a text may begin inside a chunk; "fixed": at a chunk's start.
        position_jump: in training, after each landmark positions go on by 1 to this many; 0 and 1: always 1.
        landmark_loss: "none": landmarks bear no loss and the token before one predicts the token after it.
            "none_after_eos": nor does what follows an end-of-text token. "text": a landmark is a token of the text,
            predicted like the others and predicting the next. (docs/landmark.md: who trained how.)
        gate_probability: share of landmarks, in training, that only the retrieval gate token opens (App. D); 0:
            no such token. gate_cutoff: in reading, what the gate would weigh less is not retrieved.
        mlp: "swiglu" or "gelu". norm: "rms", or "layer" (no biases).
    """

    model_type = "trailmark_landmark"

    sliding_window: int | None = None
    window_position: Literal["alibi", "rope"] = "rope"
    chunk_size: int = 63
    num_retrieved_chunks: int = 4
    max_position_embeddings: int = 768
    local_length: int | None = None
    retrieve_per: Literal["token_and_head", "token", "head", "cell"] = "token_and_head"
    causal_retrieval: bool = True
    memory_position: Literal["stingy", "true"] = "stingy"
    max_memory_chunks: int | None = None
    landmark_phase: Literal["random", "fixed"] = "random"
    position_jump: int = 0
    landmark_loss: Literal["none", "none_after_eos", "text"] = "none"
    gate_probability: float | int = 0.0
    gate_cutoff: float | int = 0.0
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    norm: Literal["rms", "layer"] = "rms"

    def __post_init__(self, **kwargs: Any) -> None:
        if self.local_length is None and self.chunk_size >= 1:
            left = self.max_position_embeddings - (self.num_retrieved_chunks + 1) * (self.chunk_size + 1)
            self.local_length = max(1, left // (self.chunk_size + 1)) * self.chunk_size
        super().__post_init__(**kwargs)

    @property
    def retrieves_in_training(self) -> bool:
        """A training text is attended to whole: chunks are retrieved in reading alone."""
        return False

    @property
    def begins_texts_inside_chunks(self) -> bool:
        return self.landmark_phase != "fixed"

    def longest_training_text(self, early_landmarks: int = 0) -> int:
        # a landmark before its chunk is full leaves a gap of up to S positions
        left = self.max_position_embeddings - early_landmarks * self.chunk_size
        return max(0, left - left // (self.chunk_size + 1))

    def with_fewer_layers(self, count: int) -> Self:
        # the first layer makes tables that all share: it is like no other
        return with_fields(self, num_hidden_layers=min(self.num_hidden_layers, count + 1))

    @property
    def selects_for_many(self) -> bool:
        """Whether positions of a cell share what they select: they have a say in each other's."""
        return self.retrieve_per in ("head", "cell")

    def cell_positions(self) -> int:
        """The most positions that a cell's last token sees in it: the chunk that it began in, tokens, landmarks."""
        assert self.local_length is not None
        S = self.chunk_size
        tokens = self.local_length + (0 if self.local_length % S == 0 else S - 1)
        return tokens + tokens // S

    def validate_architecture(self) -> None:
        super().validate_architecture()
        for name in ("chunk_size", "max_position_embeddings"):
            expect(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        expect_count(self.num_retrieved_chunks)
        for name in ("local_length", "max_memory_chunks"):
            number = getattr(self, name)
            expect(number is None or number >= 1, name, number, "None or at least 1")
        expect(self.position_jump >= 0, "position_jump", self.position_jump, "at least 0")
        for name in ("gate_probability", "gate_cutoff"):
            expect(0 <= getattr(self, name) <= 1, name, getattr(self, name), "0 to 1")
        expect(
            self.causal_retrieval or self.selects_for_many,
            "causal_retrieval",
            self.causal_retrieval,
            f"True with retrieve_per {self.retrieve_per!r}, which is causal: only 'head' and 'cell' can look ahead",
        )
        expect(
            self.gate_cutoff == 0 or self.gate_probability > 0,
            "gate_cutoff",
            self.gate_cutoff,
            "0 for a model without a retrieval gate (gate_probability 0)",
        )
        expect(
            self.sliding_window is None and self.window_position == "rope",
            "sliding_window, window_position",
            (self.sliding_window, self.window_position),
            "None and 'rope': local_length says what is local",
        )
        expect(
            self.landmark_loss != "none_after_eos" or self.eos_token_id is not None,
            "landmark_loss",
            self.landmark_loss,
            "'none' or 'text' without an eos_token_id",
        )
        self.expect_rotary_heads()
        memory = (self.num_retrieved_chunks + 1) * (self.chunk_size + 1)
        if self.local_length is not None and self.memory_position == "stingy":
            expect(
                memory + self.cell_positions() <= self.max_position_embeddings,
                "max_position_embeddings",
                self.max_position_embeddings,
                f"at least {memory} for {self.num_retrieved_chunks} + 1 chunks and {self.cell_positions()} for a "
                f"cell of {self.local_length} tokens. Lower num_retrieved_chunks, chunk_size or local_length, or "
                "train on longer texts",
            )


@checked
class BlockRecurrentConfig(TrailmarkConfig):
    """Block-Recurrent Transformer (arXiv 2203.07852), its "skip" configuration. Defaults: 128M, as arXiv 2410.01651.

    With ``sliding_window`` W = ``block_size`` a token sees at most the block before its own and what of its own came
    before it. (The port that arXiv 2410.01651 ran shows all of the block before: 768 positions in the mean with blocks
    of 512. Its row is ``sliding_window=768, block_size=512, recurrent_layer=4`` here.)

    Args:
        block_size: S tokens, counted from the beginning of a document, after which the states are written. None: W.
        num_states: M vectors of width E. None: S.
        recurrent_layer: which layer, from 1, reads and writes the states. None is half. (The first paper: the third
            from the end, 10 of 12.)
        state_gate: "fixed": a learned mixture, the same for all texts. "lstm": forget and input gates.
        truncation_blocks: in training, no gradient passes through the states from a document's block n, 2n, ... to
            those before it. None: through all of a call.
    """

    model_type = "trailmark_block_recurrent"

    block_size: int | None = None
    num_states: int | None = None
    recurrent_layer: int | None = None
    state_gate: Literal["fixed", "lstm"] = "fixed"
    truncation_blocks: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.block_size is None:
            self.block_size = self.sliding_window
        if self.num_states is None:
            self.num_states = self.block_size
        if self.recurrent_layer is None:
            self.recurrent_layer = max(1, self.num_hidden_layers // 2)
        super().__post_init__(**kwargs)

    @property
    def has_landmarks(self) -> bool:
        return False

    def with_fewer_layers(self, count: int) -> Self:
        assert self.recurrent_layer is not None
        below = min(self.recurrent_layer - 1, count)
        above = min(self.num_hidden_layers - self.recurrent_layer, count)
        return with_fields(self, num_hidden_layers=below + 1 + above, recurrent_layer=below + 1)

    def validate_architecture(self) -> None:
        super().validate_architecture()
        expect(self.sliding_window is not None, "sliding_window", None, "a number of positions")
        for name in ("block_size", "num_states"):
            number = getattr(self, name)
            expect(number is None or number >= 1, name, number, "None or at least 1")
        layer = self.recurrent_layer
        expect(
            layer is None or 1 <= layer <= self.num_hidden_layers,
            "recurrent_layer",
            layer,
            f"1 to {self.num_hidden_layers} (num_hidden_layers), or None",
        )
        blocks = self.truncation_blocks
        expect(
            blocks is None or blocks >= 2,
            "truncation_blocks",
            blocks,
            "None or at least 2 (with 1 nothing that writes the states would learn)",
        )


@checked
class RPTConfig(TrailmarkConfig):
    """Retrieval-Pretrained Transformer (Rubin and Berant, 2024), and RPT-Contriever as arXiv 2410.01651 runs it.

    The defaults are the second paper's sizes with the retriever of the first. RPT-Contriever is
    ``retriever="encoder"``; the first paper's RPT has ``continuation``, ``neighbour_augmentation`` and
    ``neighbour_gate`` and reads 2 chunks.

    Args:
        num_lower_layers: layers before the retriever; None is half.
        chunk_size: S tokens.
        num_retrieved_chunks: K. 0: retrieval is off. Every token reads what a text's first tokens read, the null key
            alone; no chunk is encoded or kept, no embedder asked. Refused in training.
        num_encoder_layers: bidirectional layers over a chunk's lower states, once per chunk.
        cross_attention_every: of the upper layers, the first and every so manieth after it reads. 1: all.
        continuation: read each selected chunk together with the chunk after it, 2 S tokens.
        neighbour_augmentation: what was selected attends to itself and to the chunk that asks, before it is read.
        neighbour_gate: scale each selected chunk by a learned number from 0.1 to 1 before it is read.
        retriever: "learned": queries and keys of lower states, trained by the ranking loss alone, from
            ``neighbours`` with ``neighbour_scores``. "encoder": a frozen encoder's, online (the model's attribute
            ``embedder``) or beforehand (``neighbours``, from a table).
        exclude_visible_chunks: do not select chunks that the window shows whole to the last token that reads.
        embedder: spec of that encoder, such as "hash" or "transformers:FOLDER", for who opens the model.
        embedder_fingerprint: of the encoder that the model was trained with; another is refused. None: any.
        ranking_weight: of the ranking loss. ranking_margin: of its hinge, in scores.
        ranking_threshold: only chunks with target scores above it are ranked above others; 0 or more.
        gold_probability: share of training texts that read the chunks with the best target scores instead of those
            that the retriever selects, at the end of training. first_gold_probability: at its beginning.
    """

    model_type = "trailmark_rpt"

    num_lower_layers: int | None = None
    chunk_size: int = 64
    num_retrieved_chunks: int = 8
    num_encoder_layers: int = 2
    cross_attention_every: int = 1
    continuation: bool = False
    neighbour_augmentation: bool = False
    neighbour_gate: bool = False
    retriever: Literal["learned", "encoder"] = "learned"
    exclude_visible_chunks: bool = True
    embedder: str | None = None
    embedder_fingerprint: str | None = None
    ranking_weight: float | int = 1.0
    ranking_margin: float | int = 1.0
    ranking_threshold: float | int = 0.0
    first_gold_probability: float | int = 1.0
    gold_probability: float | int = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_lower_layers is None:
            self.num_lower_layers = self.num_hidden_layers // 2
        super().__post_init__(**kwargs)

    @property
    def has_landmarks(self) -> bool:
        return False

    @property
    def first_visible(self) -> int | None:
        """``visible`` of :mod:`trailmark.models.candidates`: the last token that reads is S - 1 after it."""
        if not self.exclude_visible_chunks:
            return None
        assert self.sliding_window is not None
        return self.chunk_size - 1 - (self.sliding_window - 1)

    @property
    def num_upper_layers(self) -> int:
        assert self.num_lower_layers is not None
        return self.num_hidden_layers - self.num_lower_layers

    @property
    def num_retrieval_groups(self) -> int:
        """All upper layers that read share one retrieval."""
        return 1

    @property
    def num_reading_layers(self) -> int:
        """Upper layers that read chunks."""
        return -(-self.num_upper_layers // self.cross_attention_every)

    def with_fewer_layers(self, count: int) -> Self:
        assert self.num_lower_layers is not None
        lower = min(self.num_lower_layers, count)
        upper = min(self.num_upper_layers, count * self.cross_attention_every)
        return with_fields(
            self,
            num_hidden_layers=lower + upper,
            num_lower_layers=lower,
            num_encoder_layers=min(self.num_encoder_layers, count),
        )

    def validate_architecture(self) -> None:
        super().validate_architecture()
        for name in ("chunk_size", "cross_attention_every"):
            expect(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        expect_count(self.num_retrieved_chunks)
        for name in ("num_encoder_layers", "ranking_weight", "ranking_margin", "ranking_threshold"):
            expect(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        for name in ("first_gold_probability", "gold_probability"):
            expect(0 <= getattr(self, name) <= 1, name, getattr(self, name), "0 to 1")
        if self.retriever != "encoder":
            for name in ("embedder", "embedder_fingerprint"):
                came = getattr(self, name)
                expect(came is None, name, came, f"None with retriever {self.retriever!r}")
        lower = self.num_lower_layers
        expect(
            lower is None or 0 <= lower < self.num_hidden_layers,
            "num_lower_layers",
            lower,
            f"0 to {self.num_hidden_layers - 1} (num_hidden_layers - 1: one upper layer must read)",
        )
        expect(self.sliding_window is not None, "sliding_window", None, "a number of positions")
        self.expect_rotary_heads()
