"""The configuration of the Differentiable Retrieval Transformer."""

# No ``from __future__ import annotations`` here: ``strict`` does not check types that are written as strings.

from typing import Literal

from trailmark.models.configuration import LayeredConfig, TrailmarkConfig, checked, expect


@checked
class DRTConfig(LayeredConfig):
    """Differentiable Retrieval Transformer (arXiv 2410.01651).

    Args:
        num_lower_layers: layers before the chunk encoder; None is half.
        chunk_size: S tokens; a chunk has S + 1 rows with its landmark. (Papers' configurations: 64.)
        landmarks_as_keys: False: no position attends to a landmark, and positions count tokens alone, so landmarks
            change nothing in the layers' windows; a landmark still asks, from where the next token will stand. The
            window then needs at least 2 positions.
        num_retrieved_chunks: K. 1 trains no retriever and is refused in training, unless the retriever is not
            learned: the chunk's weight is then 1. 0: retrieval is off. Every chunk reads what the first two read,
            nothing; no chunk is encoded or kept, no embedder asked. Refused in training.
        num_retrieval_groups: G; the upper layers divide by it.
        num_encoder_layers: bidirectional layers of the chunk encoder.
        chunk_summary: what a chunk's landmark vector is made of. "landmark": the encoder's row of the landmark, as
            published. "mean": the mean of its rows of the tokens, which says what they say before anything is trained.
        memory_kv: who reads the same keys and values of a chunk. "shared": all upper layers, as published. "group": the
            layers of a group. "layer": each its own, so a memory is as many times larger. One depth's keys and values
            fit no other depth of a pretrained base.
        memory_values: what a key's value is of. "same": the key's own token, as published. "next" (ours, after kNN-LM,
            arXiv 1911.00172): the token after it in its chunk, so that what a key is like is answered by what came
            next; the last one's value is 0, so a chunk of one token says nothing. Chunks then have 2 tokens at least.
        gca_start: what GCA does before training. "drawn": nothing in particular, as published. "lookup" (ours): queries
            begin as the keys' projection, and what is read goes out by the transpose of the values': a token finds what
            is like itself in a chunk. With ``memory_values`` "next", ``residual_gca`` and ``initialization`` "fan_in"
            what came next is likelier before any training. Both need ``virtual_key`` "zero".
        softmax_off_by_one: a virtual key of score 0 and value 0 in every chunk (Eq. 3).
        virtual_key: what that key is. "zero": as published. "window" (with RoPE): what the layer's own window gave,
            scored by its log-sum-exp, so that the keys of all chunks that are read stand in one softmax with the
            window's, asked by the same queries as if they stood where the window ends. What is both in the window and
            in a chunk that is read counts twice: see ``exclude_visible_chunks``.
        retrieval_projections: W_h per group and W_l (Eq. 1); False: none, as in the published code.
        retrieval_query: what a group asks with. "landmark": what its layers know at the landmark (W_h), as published.
            "chunk" (ours): the chunk's own landmark vector too (W_c, beginning as the identity, where W_h begins as 0),
            so that before training, and among more chunks than it saw in training, a chunk finds what is like itself.
        retrieval_normalization: RMS-normalise both sides of the score after the projections.
        retrieval_scale: factor on the score, besides E ** -0.5.
        retrieval_recency: at least 0; what a score loses with the logarithm of a chunk's age, 1 for the last chunk that
            may be selected. 0: as published. 1: chunks that say the same are read in proportion to 1 / age. It has no
            part in what an encoder finds.
        retrieval_noise: Gumbel noise on the scores when chunks are selected in training.
        exclude_visible_chunks: do not select chunks that the window shows whole to the last row that reads.
        gca_implementation: of grouped cross-attention alone: "reference" (the paper's "w/o Triton") or "torch"; None:
            as ``implementation`` says for all ops.
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
    # the embedder itself counts: TrailmarkForCausalLM._cache_key
    no_arithmetic = frozenset({
        "gca_implementation", "gca_start", "retrieval_noise", "embedder", "embedder_fingerprint",
    })  # fmt: skip
    newer = TrailmarkConfig.newer | {
        "chunk_summary", "gca_implementation", "gca_start", "landmarks_as_keys", "memory_kv", "memory_values",
        "retrieval_query", "retrieval_recency", "virtual_key",
    }  # fmt: skip

    chunk_size: int = 63
    landmarks_as_keys: bool = True
    num_retrieved_chunks: int = 8
    num_retrieval_groups: int = 1
    num_encoder_layers: int = 2
    chunk_summary: Literal["landmark", "mean"] = "landmark"
    memory_kv: Literal["shared", "group", "layer"] = "shared"
    memory_values: Literal["same", "next"] = "same"
    gca_start: Literal["drawn", "lookup"] = "drawn"
    softmax_off_by_one: bool = True
    virtual_key: Literal["zero", "window"] = "zero"
    retrieval_projections: bool = True
    retrieval_query: Literal["landmark", "chunk"] = "landmark"
    retrieval_normalization: bool = False
    retrieval_scale: float | int = 1.0
    retrieval_recency: float | int = 0.0
    retrieval_noise: bool = True
    exclude_visible_chunks: bool = False
    gca_implementation: Literal["reference", "torch"] | None = None
    residual_gca: bool = False
    retriever: Literal["causal", "random", "encoder"] = "causal"
    encoder_weights: Literal["learned", "encoder"] = "learned"
    embedder: str | None = None
    embedder_fingerprint: str | None = None

    @property
    def first_visible(self) -> int | None:
        """``visible`` of :mod:`trailmark.models.candidates`: the last row that reads is S + 1 after it, or S tokens."""
        if not self.exclude_visible_chunks:
            return None
        assert self.sliding_window is not None
        return self.chunk_size + self.landmarks_as_keys - (self.sliding_window - 1)

    @property
    def kv_per_group(self) -> int:
        """Sets of keys and values of a chunk that a group reads."""
        return self.layers_per_group if self.memory_kv == "layer" else 1

    @property
    def kv_per_chunk(self) -> int:
        """Sets of keys and values that a memory keeps of a chunk."""
        return 1 if self.memory_kv == "shared" else self.num_retrieval_groups * self.kv_per_group

    def kv_set_of_layer(self, upper: int) -> int:
        """Which of a chunk's sets of keys and values an upper layer reads."""
        return {"shared": 0, "group": upper // self.layers_per_group, "layer": upper}[self.memory_kv]

    @property
    def first_readers(self) -> list[int]:
        """Of each set of keys and values of a chunk, the first layer that reads it."""
        sets = [self.kv_set_of_layer(upper) for upper in range(self.num_upper_layers)]
        return [self.num_lower_layers + sets.index(own) for own in range(self.kv_per_chunk)]

    @property
    def reads_beside_window(self) -> bool:
        return self.retrieves and self.virtual_key == "window"

    @property
    def scores_chunks(self) -> bool:
        """Whether the model weighs chunks by scores of its own; else it has no W_h and W_l."""
        return self.encoder_weights == "learned"

    @property
    def ranks_all_chunks(self) -> bool:
        return self.retrieves and self.retriever == "causal"

    @property
    def completes_neighbours(self) -> bool:
        return self.ranks_all_chunks

    @property
    def least_retrieved_in_training(self) -> int:
        return 2 if self.retriever == "causal" else 1

    def validate_architecture(self) -> None:
        super().validate_architecture()
        if self.retriever != "encoder":
            for name, without in (
                ("encoder_weights", "learned"), ("embedder", None), ("embedder_fingerprint", None)
            ):  # fmt: skip
                came = getattr(self, name)
                expect(came == without, name, came, f"{without!r} with retriever {self.retriever!r}")
        expect(self.num_encoder_layers >= 1, "num_encoder_layers", self.num_encoder_layers, "at least 1")
        recency = self.retrieval_recency
        expect(recency >= 0, "retrieval_recency", recency, "at least 0")
        expect(
            self.scores_chunks or not recency,
            "retrieval_recency",
            recency,
            "0 with encoder_weights 'encoder', whose scores are the encoder's",
        )
        expect(
            self.retrieval_query == "landmark" or (self.scores_chunks and self.retrieval_projections),
            "retrieval_query",
            self.retrieval_query,
            "'landmark' with encoder_weights 'encoder' or retrieval_projections false, which have no projections",
        )
        expect(
            self.softmax_off_by_one or self.virtual_key == "zero",
            "softmax_off_by_one",
            False,
            "true with virtual_key 'window', or virtual_key 'zero'",
        )
        expect(
            self.window_position == "rope" or self.virtual_key == "zero",
            "window_position",
            self.window_position,
            "'rope' with virtual_key 'window', or virtual_key 'zero'",
        )
        for name, without, why in (
            ("gca_start", "drawn", "which has no queries of its own"),
            ("memory_values", "same", "whose values are those of the window's layers"),
        ):
            came = getattr(self, name)
            expect(
                came == without or self.virtual_key == "zero",
                name,
                came,
                f"{without!r} with virtual_key 'window', {why}, or virtual_key 'zero'",
            )
        expect(
            self.memory_values == "same" or self.chunk_size > 1,
            "chunk_size",
            self.chunk_size,
            "at least 2 with memory_values 'next', where a chunk's last value is 0",
        )
        expect(
            self.landmarks_as_keys or self.sliding_window != 1,
            "sliding_window",
            self.sliding_window,
            "at least 2 with landmarks_as_keys false: a landmark sees the tokens before it, not itself",
        )
