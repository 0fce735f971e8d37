"""The configuration of HiLS, and of MoBA and exact block-sparse attention, which are choices of it."""

# No ``from __future__ import annotations`` here: ``strict`` does not check types that are written as strings.

from typing import Literal, Self

from trailmark.models.configuration import TrailmarkConfig, checked, expect, expect_count, with_fields


@checked
class HiLSConfig(TrailmarkConfig):
    """Hierarchical landmark sparse attention (HiLS, arXiv 2607.02980), and its relatives.

    Every token sees a window, and in every layer and key/value head the K chunks beyond it that would get the
    largest share of its attention; all stands in one softmax. Nobody attends to a landmark, and positions count
    tokens alone.

    Args:
        sliding_window: W. The window goes on to the beginning of the chunk in which its last position lies, so that it
            and the chunks beyond it are the whole past, and nothing is seen twice.
        layer_types: of each layer "full_attention", which sees the past through the chunks that it chooses, or
            "sliding_attention", with the window alone. None: all see the past.
        chunk_size: S tokens.
        num_retrieved_chunks: K, for each token, layer and key/value head. 0: the window is all there is.
        chunk_score: what tells how much attention a chunk would get. "expansion": HiLS' bound of the log mass, exact at
            the query that sums the chunk up (``summary_query``). "mean": MoBA's, by the mean key. "mass": the
            log mass itself, over all keys, as exact block-sparse attention has it: to compare with.
        chunk_weights: what weighs a chunk against the others and the window. "score": its score stands for its log
            mass, as published, so that what chooses is learned. "keys": the keys themselves, in one softmax with the
            window's, as MoBA has it; what chooses then has no gradient.
        summary_tokens: tokens that one summary stands for: a chunk of more has several, whose scores are added up as
            masses. None: one a chunk, as published.
        summary_query: whose query the expansion is made at: of the chunk's "landmark", as published, or the mean of
            those of its "tokens", which needs no training.
        calibration_rank: r, a query of its own scores chunks, (W_q + B A) x with A of r rows; 0: the query itself does.
        far_position: where the keys of chunks stand. "true": where they are. "window": all equally far back, whatever
            the length of the text, so that no distance is one that a base never saw.
        far_distance: with "window" how far, in tokens; at least W. None: W.
        reading: how a text passes through the layers on its way into a memory (``model.read``). "chooses": as one that
            is predicted, so that nothing depends on where a text is cut. "windows": with windows alone, at one
            speed whatever was read before, and in as many places at once as there are processes; what is predicted,
            prompts and questions among it, chooses of the memory that this leaves, whatever ``num_retrieved_chunks``
            (above 0) it was read with; tokens that were predicted on a cache stay as they chose then.
        num_focus_chunks: of a question that is put to a memory (``model.focus``): at most so many chunks, those with
            the largest squared shares of its attention, summed over its tokens, layers and heads; none with less than a
            third of the best one's. It and its answer choose among these, those right before and after them, and what
            comes later. So a long text's other chunks, of which some look a little like those that are asked for, take
            no attention from them, and an answer's tokens look over as many chunks as in a short text. None: among all.
    """

    model_type = "trailmark_hils"
    newer = TrailmarkConfig.newer | {"far_distance", "reading", "num_focus_chunks"}

    window_position: Literal["alibi", "rope"] = "rope"
    chunk_size: int = 63
    num_retrieved_chunks: int = 32
    chunk_score: Literal["expansion", "mean", "mass"] = "expansion"
    chunk_weights: Literal["score", "keys"] = "score"
    summary_query: Literal["landmark", "tokens"] = "landmark"
    summary_tokens: int | None = None
    calibration_rank: int = 0
    far_position: Literal["true", "window"] = "true"
    far_distance: int | None = None
    reading: Literal["chooses", "windows"] = "chooses"
    num_focus_chunks: int | None = None

    @property
    def hides_landmarks(self) -> bool:
        return True

    @property
    def mixes_windows(self) -> bool:
        return True

    @property
    def retrieving_layers(self) -> list[int]:
        """The layers that choose chunks."""
        kinds = self.layer_types or ["full_attention"] * self.num_hidden_layers
        return [number for number, kind in enumerate(kinds) if kind == "full_attention"]

    @property
    def chooses_last(self) -> bool:
        """Whether the last layer alone chooses: what is kept of a text then depends on the windows below it."""
        return self.retrieving_layers == [self.num_hidden_layers - 1]

    @property
    def remembers_windows(self) -> bool:
        """Whether what is kept of a text that is read depends on windows alone."""
        return self.chooses_last or self.reading == "windows"

    @property
    def windows(self) -> list[int | None]:
        """The most that each layer sees in its window: where chunks are chosen it goes on to a chunk's beginning."""
        chooses = set(self.retrieving_layers) if self.retrieves else ()
        far, near = self.longest_window, self.sliding_window
        return [far if n in chooses else near for n in range(self.num_hidden_layers)]

    @property
    def longest_window(self) -> int:
        """What a layer that chooses chunks sees in its window at most."""
        assert self.sliding_window is not None
        return self.sliding_window + self.chunk_size - 1

    @property
    def asks_landmarks(self) -> bool:
        """Whether a landmark's query sums its chunk up."""
        return self.chunk_score == "expansion" and self.summary_query == "landmark"

    @property
    def retrieves_in_training(self) -> bool:
        """Tokens select, not landmarks."""
        return False

    @property
    def state_width(self) -> int:
        """Numbers of a token of the open chunk, of all layers that choose: keys, values and what sums a chunk up."""
        heads = 2 * self.num_key_value_heads
        heads += self.num_attention_heads if self.chunk_score == "expansion" else 0
        return len(self.retrieving_layers) * heads * self.head_dim

    @property
    def summary_shape(self) -> tuple[int, int, int]:
        """Of a chunk's landmark vectors in one layer: summaries, heads that have one each, and numbers."""
        heads = self.num_attention_heads if self.chunk_score == "expansion" else self.num_key_value_heads
        if self.chunk_score == "mass":  # nobody asks for one
            return 0, heads, self.head_dim + 1
        return -(-self.chunk_size // (self.summary_tokens or self.chunk_size)), heads, self.head_dim + 1

    def arithmetic_fields(self) -> list[tuple[str, object]]:
        """As elsewhere, but for how many chunks are read or looked at, where no memory depends on it."""
        free = {"num_focus_chunks"}
        if self.remembers_windows and self.retrieves:
            free.add("num_retrieved_chunks")
        return [(name, x) for name, x in super().arithmetic_fields() if name not in free]

    def with_fewer_layers(self, count: int) -> Self:
        if self.layer_types is not None:
            return self  # layers of both kinds stand between each other
        return with_fields(self, num_hidden_layers=min(self.num_hidden_layers, count))

    def validate_architecture(self) -> None:
        super().validate_architecture()
        expect(self.chunk_size >= 1, "chunk_size", self.chunk_size, "at least 1")
        expect_count(self.num_retrieved_chunks)
        expect(self.calibration_rank >= 0, "calibration_rank", self.calibration_rank, "0 or more")
        expect(
            self.calibration_rank == 0 or self.chunk_weights == "score",
            "calibration_rank",
            self.calibration_rank,
            "0 with chunk_weights 'keys', through which it would get no gradient",
        )
        part = self.summary_tokens
        expect(
            part is None or 1 <= part <= self.chunk_size, "summary_tokens", part, "None or 1 to chunk_size"
        )
        expect(
            part is None or self.chunk_score != "mass",
            "summary_tokens",
            part,
            "None with chunk_score 'mass', which sums nothing up",
        )
        expect(
            self.summary_query == "landmark" or self.chunk_score == "expansion",
            "summary_query",
            self.summary_query,
            f"'landmark' (the default) with chunk_score {self.chunk_score!r}, which has no such query",
        )
        far = self.far_distance
        expect(
            far is None or (self.far_position == "window" and far >= (self.sliding_window or 0)),
            "far_distance",
            far,
            f"None, or with far_position 'window' at least sliding_window ({self.sliding_window})",
        )
        expect(
            self.sliding_window is not None and self.sliding_window >= 3,
            "sliding_window",
            self.sliding_window,
            "at least 3: a text is read in pieces shorter than it, of more than a token",
        )
        focus = self.num_focus_chunks
        expect(focus is None or focus >= 1, "num_focus_chunks", focus, "None or at least 1")
        expect(
            focus is None or self.chunk_score != "mass",
            "num_focus_chunks",
            focus,
            "None with chunk_score 'mass', which looks at every key",
        )
        expect(self.window_position == "rope", "window_position", self.window_position, "'rope' with a HiLS")
        expect(
            self.layer_types is None or "full_attention" in self.layer_types,
            "layer_types",
            self.layer_types,
            "'full_attention' for some layer, which chooses chunks",
        )
        expect(
            self.chunk_score != "mass" or self.chunk_weights == "keys",
            "chunk_weights",
            self.chunk_weights,
            "'keys' with chunk_score 'mass', which weighs by the keys anyway",
        )
