"""What the rest of the package asks of a model, each question with the answer of a plain one.

Training, evaluation, traces, reports and cards never ask which class a model is: they ask these questions. A plain
model has layers with a window (or full attention) and carries nothing else of a text. An architecture overrides what
is otherwise with it, in its own file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args

import torch
from torch import Tensor, nn

from trailmark.models.costs import CacheBytes, pairs_in_sight
from trailmark.models.reads import BeforeReading, Reads, SelectedReads, Selection
from trailmark.ops import ChunkSelection

_WITH_NEIGHBOURS = ("encoder", "learned")  # values of ``retriever``


class ConfigAnswers:
    """Questions that need no weights: a configuration answers them."""

    @property
    def keeps_chunks(self) -> bool:
        """Whether the architecture keeps past chunks to read of them again; ``retrieves`` says whether it does so."""
        return hasattr(self, "num_retrieved_chunks")

    @property
    def retrieves(self) -> bool:
        """Whether past chunks are read: else nothing of them is kept, and the window (or cell) is all there is."""
        return getattr(self, "num_retrieved_chunks", 0) > 0

    @property
    def retrieves_in_training(self) -> bool:
        """Whether landmarks select chunks in training, and a call can return what (``output_retrieval``)."""
        return self.retrieves

    @property
    def reads_beside_window(self) -> bool:
        """Whether what is read stands in one softmax with a layer's own window."""
        return False

    @property
    def ranks_all_chunks(self) -> bool:
        """Whether a call can return the scores of all chunks that landmarks may select: ``output_retrieval_scores``."""
        return False

    @property
    def completes_neighbours(self) -> bool:
        """Whether it reads the chunks that a call gives (``neighbours``) and chooses those that are missing itself."""
        return False

    @property
    def needs_neighbours(self) -> bool:
        """Whether the chunks that are read in training come with the text: from a table, or from an embedder."""
        return getattr(self, "retriever", None) in _WITH_NEIGHBOURS

    @classmethod
    def retrievers_with_neighbours(cls) -> tuple[str, ...]:
        """The values of ``retriever`` with which :attr:`needs_neighbours` is so: none of most architectures."""
        field = getattr(cls, "__dataclass_fields__", {}).get("retriever")
        known = () if field is None else get_args(field.type)
        return tuple(value for value in _WITH_NEIGHBOURS if value in known)

    @property
    def needs_scores(self) -> bool:
        """Whether those chunks come with scores: to learn them, or to weigh with them."""
        learned = getattr(self, "retriever", None) == "learned"
        return learned or getattr(self, "encoder_weights", "learned") == "encoder"

    @property
    def least_retrieved_in_training(self) -> int:
        """The fewest chunks that a training may retrieve so that every weight gets a gradient."""
        return 1

    def expect_trainable(self) -> None:
        """Check that a training would train every weight.

        Raises:
            ValueError: retrieval is off, or its scores would get no gradient.
        """
        least, retrieved = self.least_retrieved_in_training, getattr(self, "num_retrieved_chunks", 0)
        if self.keeps_chunks and not self.retrieves:
            raise ValueError(
                f"num_retrieved_chunks: expected at least {least} in training, got 0: with "
                "retrieval off, what encodes, finds and reads chunks would get no gradient. Train with chunks, or "
                "choose a model with a window alone; to read with retrieval off, call eval()."
            )
        if 0 < retrieved < least:
            raise ValueError(
                f"num_retrieved_chunks: expected at least {least} in training, got {retrieved}: the weight of a single "
                "chunk is always 1, so its score gets no gradient and the retriever learns nothing. Retrieve more."
            )

    @property
    def begins_texts_inside_chunks(self) -> bool:
        """Whether training draws where in a chunk a text begins: no task can say then where chunks begin."""
        return False

    def longest_training_text(self, early_landmarks: int = 0) -> int | None:
        """The most tokens that a training text with so many early landmarks may have; None: any number."""
        return None

    def training_positions(self, length: int, early_landmarks: int = 0) -> int:
        """The fewest ``max_position_embeddings`` with which :meth:`longest_training_text` is ``length`` or more."""
        return length

    def with_fewer_layers(self, count: int) -> Self:
        """A configuration of the same model with at most ``count`` layers of each kind that is alike.

        The training estimate runs that one, and adds for each layer that is missing what the last but one took. The
        default is the whole model, which is as exact and takes longer.
        """
        return self


class CardFacts(NamedTuple):
    """What a model card says of an architecture."""

    title: str
    sentence: str = ""
    papers: tuple[tuple[str, str], ...] = ()  # name, arXiv number


Part = Literal["retriever", "additions", "upper", "rest"]


@dataclass(frozen=True)
class LayerKind:
    """Layers that are alike: each keeps and computes as much as the others."""

    layers: Sequence[nn.Module]
    attends: Literal["window", "chunks", "nothing"] = "window"
    """What its attention is over, if a kernel computes it: positions of the text, or rows of one chunk."""
    opens_group: bool = False
    """They stand between other layers: what one takes is what a group takes more than its layers of the kind before."""


class FittedMemory(NamedTuple):
    """The parts of a model that are set from a teacher's keys and values (:mod:`trailmark.training.fit`)."""

    encoder: nn.Module  # called with positions and their grid, gives the memory's entries
    projection: nn.Linear  # states [B, C, S, E] -> the keys of each set, then the values
    layers: list[int]  # of each set, the layer of the teacher that has such keys and values
    closing: list[nn.Linear]  # of what each layer reads; all 0 in a model that does not read yet
    summaries: Any  # a projection, first called in landmark_vectors, with what sums chunks up [B, C, E]
    landmark_vectors: Callable[[Tensor], Tensor]  # of what sums chunks up
    retrievers: list[Any]  # of each group, called with landmarks [B, C, E], gives queries: last by its q_proj
    score_scale: float
    recency: float

    @property
    def reads(self) -> bool:
        """Whether some layer takes in what it reads."""
        return any(bool(layer.weight.any()) for layer in self.closing)


class ModelAnswers:
    """Questions that a model answers; :class:`trailmark.models.TrailmarkForCausalLM` inherits them."""

    # transformers evaluates these annotations: no name that is imported for types alone
    config: Any
    dtype: torch.dtype
    _no_split_modules: Any

    # --- how far it sees, and what a memory of it depends on ------------------------------------------------------

    def reach(self) -> int | None:
        """Positions before a token that can change its prediction other than through the memory; None: all."""
        seen = 0
        for window in self.config.windows:
            if window is None:
                return None
            seen += window - 1
        return seen

    def encoding_reach(self) -> int:
        """Chunks after a chunk whose memory entries its tokens take part in."""
        return 0

    def chunks_in_sight(self, chunk_size: int) -> int:
        """Last chunks of a text that what follows may see other than through the memory: no needle is planted there.

        Raises:
            ValueError: a model without a window, which sees everything.
        """
        reach = self.reach()
        if reach is None:
            raise ValueError(
                "sliding_window: expected a number for every layer, got None: full attention sees every needle "
                "directly, and none can be planted in what it has read."
            )
        positions = chunk_size + (self.config.keeps_chunks and self.config.counts_landmarks)
        return -(-reach // positions) + self.encoding_reach()

    @property
    def can_be_planted(self) -> bool:
        """Whether one reading serves many texts with the same first tokens.

        The memory of a chunk depends on it, the few before it and the text's sinks alone; where tokens select for
        themselves, on all that was read before it.
        """
        return self.selects_by_chunk and self.reach() is not None

    @property
    def reads_as_it_predicts(self) -> bool:
        """Whether a text that is read leaves the memory that it leaves where it is predicted."""
        return True

    @property
    def can_keep_tokens(self) -> bool:
        """Whether a memory may keep tokens alone (tier "tokens"), of which chunks are encoded again."""
        return self.can_be_planted

    @property
    def waits(self) -> bool:
        """Whether layers that read the memory wait until logits are wanted, and keep what they found."""
        return True

    @property
    def focuses(self) -> bool:
        """Whether ``focus`` says where a question looks: it is then called before the question."""
        return False

    # --- what was read of the memory ------------------------------------------------------------------------------

    @property
    def selects_by_chunk(self) -> bool:
        """Whether a chunk's positions and heads all read the same selection, one of each group.

        Else they select for themselves, in every layer, and ``retrieval`` is of tokens and heads.
        """
        return True

    def chunks_read(
        self, retrieval: Sequence[ChunkSelection], row: int, landmarks: Sequence[tuple[int, int]]
    ) -> list[list[Selection]]:
        """What was selected at landmarks of one row of a call that returned ``retrieval``.

        Of a model whose tokens select: what each layer and head read at the token before a landmark and at the next.

        Args:
            landmarks: for each, which of the chunks that the row closed it closes, and the column of the token before
                it.
        """
        if not self.selects_by_chunk:
            return [
                [
                    Selection.of(number, *pair)
                    for number, layer in enumerate(retrieval)
                    for pair in zip(
                        *(x[row, column : column + 2].flatten(0, 1) for x in (layer.indices, layer.weights)),
                        strict=True,
                    )
                ]
                for _, column in landmarks
            ]
        return [
            [Selection.of(g, x.indices[row, n], x.weights[row, n]) for g, x in enumerate(retrieval)]
            for n, _ in landmarks
        ]

    def follow_reads(self) -> Reads:
        """What follows, call by call, what the chunks of a text read."""
        return SelectedReads(getattr(self.config, "num_retrieval_groups", 1))

    def before_reading(self) -> BeforeReading:
        """What comes before the first token that can read anything of its past (:mod:`trailmark.models.candidates`)."""
        config: Any = self.config
        S, visible = config.chunk_size, getattr(config, "first_visible", None)
        count = 2
        if visible is not None:
            count = max(2, (int(not config.hides_landmarks) - visible) // (S + config.counts_landmarks) + 1)
        words = f"two chunks of {S} tokens"
        if count > 2:
            words = f"{count:,} chunks of {S} tokens (exclude_visible_chunks: none that its window shows)"
        return BeforeReading(count * S, words)

    # --- what it costs --------------------------------------------------------------------------------------------

    def cache_bytes(
        self, prompt: int, generated: int, memory_dtype: torch.dtype | None = None
    ) -> CacheBytes | None:
        """Bytes of a cache that has read ``prompt`` tokens, whose end is closed, and ``generated`` more, one by one.

        Exact but for two things that a cache counts in whole: buffers without a window (full attention) grow by halves
        and are up to half as large again as the positions in use, which are counted here; and with
        ``max_memory_chunks`` a store holds, beside the chunks that count, those that one call wrote.

        Args:
            memory_dtype: of keys and values in memory; None: the model's.

        Returns:
            The bytes by part; None: there is no formula for this architecture.
        """
        return None

    def paper_bytes(self, length: int) -> int | None:
        """Device memory after ``length`` tokens as arXiv 2410.01651, Sec. 3.2 counts it, with the memory offloaded.

        L d / S + N / 2 K S d + N W d, with keys and values counted apart (2 J D for d) and the vectors of landmarks as
        E. N W d of a window alone, N L d of full attention; None for models that the section does not count.
        """
        return None

    def attention_multiply_adds(self, length: int) -> dict[str, int]:
        """Multiply-adds of all queries with keys and weights with values, of one forward over a whole text, by part.

        arXiv 2410.01651, Sec. 3.2: "selection" is G L^2 / S^2, "retrieved" N / 2 L K S, "window" N L W there; here each
        is the exact sum: the first chunks find less, the first positions see less. Projections, the MLP and what
        encodes chunks are linear in the length and not counted.

        Raises:
            ValueError: a model that lacks its embedder.
        """
        found: dict[str, int] = {}
        for window in self.config.windows:
            part, sinks = ("all", 0) if window is None else ("window", self.config.num_sinks)
            pairs = pairs_in_sight(length, window, sinks)
            found[part] = found.get(part, 0) + 2 * self.config.attention_width * pairs
        return found

    # --- training -------------------------------------------------------------------------------------------------

    shares_texts: ClassVar[bool] = False
    """Whether several processes may share a text (:mod:`trailmark.models.context_parallel`)."""
    additions: ClassVar[tuple[str, ...]] = ()
    """Patterns of the names of parameters that a plain language model, the base of a conversion, does not have."""
    scoring: ClassVar[tuple[str, ...]] = ()
    """Patterns of the names of those additions that score past chunks."""
    upper: ClassVar[tuple[str, ...]] = ()
    """Patterns of the names of those that no memory depends on; none where layers are not divided."""

    @classmethod
    def part_of(cls, name: str) -> Part:
        """Which part of the model a parameter is, by its name: the first that names it."""
        parts: dict[Part, tuple[str, ...]] = {
            "retriever": cls.scoring, "additions": cls.additions, "upper": cls.upper,
        }  # fmt: skip
        return next(
            (part for part, those in parts.items() if any(fnmatchcase(name, p) for p in those)), "rest"
        )

    def training_progress(self, share: float) -> None:
        """Take in how far training is, from 0 to 1; a trainer says it before each step."""

    def split_layers(self: Any) -> list[nn.Module]:
        """The layers that checkpointing computes again and FSDP2 gathers one by one: those of ``_no_split_modules``."""
        names = set(self._no_split_modules or ())
        return [module for module in self.modules() if type(module).__name__ in names]

    def layer_kinds(self: Any) -> list[LayerKind]:
        """The layers in the order of the forward, those that are alike together.

        The default takes layers of one class in one list of modules as alike, and lets a layer class say with an
        attribute ``attends`` what its attention is over.
        """
        lists: dict[tuple[str, type], list[nn.Module]] = {}
        names = set(self._no_split_modules or ())
        for name, module in self.named_modules():
            if type(module).__name__ in names:
                lists.setdefault((name.rpartition(".")[0], type(module)), []).append(module)
        return [LayerKind(layers, getattr(kind, "attends", "window")) for (_, kind), layers in lists.items()]

    def made_for_layers(self) -> tuple[nn.Module, int] | None:
        """A projection outside the layers that makes something for some of them each, and for how many; None: none."""
        return None

    def fitted_memory(self) -> FittedMemory | None:
        """What of its memory can be fitted to a teacher's layers before it is trained; None: nothing."""
        return None

    def read_as_attended(self) -> None:
        """Project what each layer reads of a fitted memory as it projects the output of its window."""
        raise NotImplementedError

    # --- its card -------------------------------------------------------------------------------------------------

    @classmethod
    def card_facts(cls, config: Mapping[str, Any]) -> CardFacts:
        """What the model card says of the architecture; ``config`` as in config.json."""
        return CardFacts(str(config.get("model_type")))
