"""The configuration of the Retrieval-Pretrained Transformer."""

# No ``from __future__ import annotations`` here: ``strict`` does not check types that are written as strings.

from typing import Literal, Self

from trailmark.models.configuration import LayeredConfig, checked, expect, with_fields


@checked
class RPTConfig(LayeredConfig):
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
    # the embedder itself counts: TrailmarkForCausalLM._cache_key
    no_arithmetic = frozenset(
        {
            "embedder",
            "embedder_fingerprint",
            "ranking_weight",
            "ranking_margin",
            "ranking_threshold",
            "first_gold_probability",
            "gold_probability",
        }
    )

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
    def num_retrieval_groups(self) -> int:
        """All upper layers that read share one retrieval."""
        return 1

    @property
    def num_reading_layers(self) -> int:
        """Upper layers that read chunks."""
        return -(-self.num_upper_layers // self.cross_attention_every)

    def with_fewer_layers(self, count: int) -> Self:
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
        self.expect_own_attention()
        every = self.cross_attention_every
        expect(every >= 1, "cross_attention_every", every, "at least 1")
        for name in ("num_encoder_layers", "ranking_weight", "ranking_margin", "ranking_threshold"):
            expect(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        for name in ("first_gold_probability", "gold_probability"):
            expect(0 <= getattr(self, name) <= 1, name, getattr(self, name), "0 to 1")
        if self.retriever != "encoder":
            for name in ("embedder", "embedder_fingerprint"):
                came = getattr(self, name)
                expect(came is None, name, came, f"None with retriever {self.retriever!r}")
