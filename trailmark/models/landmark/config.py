"""The configuration of Landmark Attention."""

# No ``from __future__ import annotations`` here: ``strict`` does not check types that are written as strings.

from typing import Any, Literal, Self

from trailmark.models.configuration import Filled, TrailmarkConfig, checked, expect, expect_count, with_fields


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
    no_arithmetic = frozenset({"landmark_phase", "position_jump", "max_position_embeddings"})

    sliding_window: int | None = None
    window_position: Literal["alibi", "rope"] = "rope"
    chunk_size: int = 63
    num_retrieved_chunks: int = 4
    max_position_embeddings: int = 768
    local_length: Filled = None  # type: ignore[assignment]
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
        return max(0, left - (left + 1) // (self.chunk_size + 1))

    def training_positions(self, length: int, early_landmarks: int = 0) -> int:
        return length + length // self.chunk_size + early_landmarks * self.chunk_size

    def with_fewer_layers(self, count: int) -> Self:
        # the first layer makes tables that all share: it is like no other
        return with_fields(self, num_hidden_layers=min(self.num_hidden_layers, count + 1))

    @property
    def selects_for_many(self) -> bool:
        """Whether positions of a cell share what they select: they have a say in each other's."""
        return self.retrieve_per in ("head", "cell")

    def cell_positions(self) -> int:
        """The most positions that a cell's last token sees in it: the chunk that it began in, tokens, landmarks."""
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
            self.num_sinks == 0,
            "num_sinks",
            self.num_sinks,
            "0: local_length says what is local, and there is no window to put sinks beside",
        )
        expect(
            self.landmark_loss != "none_after_eos" or self.eos_token_id is not None,
            "landmark_loss",
            self.landmark_loss,
            "'none' or 'text' without an eos_token_id",
        )
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
