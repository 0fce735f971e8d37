"""What each step trains on: rows of its global batch, each a pure function of the seed, the step and its number.

Any split of a step's rows among processes and micro-batches is the same batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from trailmark.data.batches import Windows
from trailmark.data.needles.curriculum_texts import NeedleTexts
from trailmark.data.needles.formats import Marks
from trailmark.data.needles.mixed import MixedNeedles
from trailmark.data.needles.niah import NiahTexts
from trailmark.data.neighbours.table import NeighbourTable
from trailmark.data.shards import Corpus
from trailmark.data.summarization import SummarizationTexts
from trailmark.models import TrailmarkConfig
from trailmark.ops import fold_seed
from trailmark.training.config import RunConfig
from trailmark.training.curriculum import Curriculum

Batch = dict[str, Tensor]
MOST_FILLER = 1 << 26  # tokens of a large corpus that the needle task keeps in memory


class Task(Protocol):
    """The batches of a run."""

    def rows(self, step: int) -> int:
        """Samples of the global batch of ``step``."""

    def row_counts(self) -> list[int]:
        """All numbers of rows that a step may have."""

    def first_sample(self, step: int) -> int:
        """The number in the run of the first sample of ``step``."""

    def batch(self, step: int, first: int, count: int) -> Batch:
        """Rows ``first .. first + count - 1`` of the global batch of ``step``.

        input_ids, labels int64 [count, T], loss_weights [count, T], noise_seed [count], and what the task has besides:
        attention_mask, close_chunk bool [count, T], document_ids int64 [count, T]; of a table neighbours int64
        [count, C, n], and neighbour_scores float32 [count, C, n] where the model takes them.
        """


class _EvenTask:
    """Every step has as many rows, each of ``context_length`` tokens."""

    def __init__(self, config: RunConfig) -> None:
        self.seed, self._rows = config.training.seed, config.rows_per_step()

    def rows(self, step: int) -> int:
        return self._rows

    def row_counts(self) -> list[int]:
        return [self._rows]

    def first_sample(self, step: int) -> int:
        return step * self._rows

    def _noise(self, step: int, start: int, count: int) -> Tensor:
        return fold_seed(self.seed, step, torch.arange(start, start + count))


class TextTask(_EvenTask):
    """Windows of a corpus, loss on every token; with a table, the neighbours of their chunks."""

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        chunk_size: int,
        table: NeighbourTable | None = None,
        scored: bool = False,
        needles: MixedNeedles | None = None,
    ) -> None:
        """``scored``: the model takes the scores of the table too. ``needles``: of some samples, in place of text."""
        super().__init__(config)
        self.table, self.scored, self.needles = table, scored, needles
        self.share, self.chunk_size = config.data.early_landmarks, chunk_size
        self.answer_weight = config.data.answer_weight
        self.separate = config.data.separate_documents
        length = config.training.context_length
        self.windows = Windows(corpus, length, self.seed, aligned=table is not None)

    def batch(self, step: int, first: int, count: int) -> Batch:
        start = self.first_sample(step) + first
        ids = self.windows.batch(start, count)
        batch = {"input_ids": ids, "labels": ids, "loss_weights": torch.ones(ids.shape)}
        batch["noise_seed"] = self._noise(step, start, count)
        documents = self.windows.document_ids(start, count) if self.separate else None
        marks: list[tuple[int, list[int]]] = []  # tokens of a row that a question's landmark follows
        for row in range(count) if self.needles is not None else ():
            assert self.needles is not None
            if self.needles.holds(start + row):
                places, answers = self.needles.write(ids[row], start + row)
                marks.append((row, places))
                for begin, end in answers:
                    batch["loss_weights"][row, begin:end] = self.answer_weight
                if documents is not None:
                    documents[row] = 0  # a fact and its question are of one document
        if documents is not None:
            batch["document_ids"] = documents
        if self.share > 0 and self.chunk_size > 1:
            batch["close_chunk"] = self.windows.close_chunk(
                start, count, self.chunk_size, self.share, documents
            )
        if marks and self.chunk_size > 1:
            close = batch.setdefault("close_chunk", torch.zeros(ids.shape, dtype=torch.bool))
            for row, places in marks:
                close[row, places] = True
        if self.table is not None:
            windows = [self.windows.window(sample) for sample in range(start, start + count)]
            batch["neighbours"], scores = self.table.batch(windows)
            if self.scored:
                assert scores is not None
                batch["neighbour_scores"] = scores
        return without_trivial_layout(batch)


class NeedleTask:
    """The demo's needles, at the level of the curriculum."""

    def __init__(self, config: RunConfig, corpus: Corpus, tokenizer: Any, curriculum: Curriculum) -> None:
        data = config.data
        self.seed, self.chunk_size, self.curriculum = config.training.seed, data.chunk_size, curriculum
        self.tokens_per_step = config.training.tokens_per_step
        filler = np.asarray(corpus.read(0, min(len(corpus), MOST_FILLER)), np.int32)
        self.texts = NeedleTexts(
            Marks(tokenizer),
            filler,
            data.chunk_size,
            self.seed,
            data.filler_weight,
            data.first_digit_weight,
            landmarks=data.num_landmarks,
        )

    def rows(self, step: int) -> int:
        return self._rows_of(self.curriculum.level_at(step))

    def row_counts(self) -> list[int]:
        return [self._rows_of(level) for level in range(len(self.curriculum.levels))]

    def _rows_of(self, level: int) -> int:
        return self.curriculum.rows(level, self.tokens_per_step, self.chunk_size)

    def first_sample(self, step: int) -> int:
        return self.curriculum.first_sample(step, self.rows(step))

    def batch(self, step: int, first: int, count: int) -> Batch:
        level = self.curriculum.levels[self.curriculum.level_at(step)]
        batch = dict(vars(self.texts.batch(self.first_sample(step) + first, count, level)))
        batch["noise_seed"] = fold_seed(self.seed, step, batch.pop("sample_numbers"))
        return without_trivial_layout(batch)


class SampleTask(_EvenTask):
    """Samples of ``context_length`` tokens made one by one: needles in a haystack, summarization."""

    def __init__(self, config: RunConfig, texts: NiahTexts | SummarizationTexts) -> None:
        super().__init__(config)
        self.texts = texts

    def batch(self, step: int, first: int, count: int) -> Batch:
        start = self.first_sample(step) + first
        batch = dict(self.texts.batch(start, count))
        batch["noise_seed"] = self._noise(step, start, count)
        return without_trivial_layout(batch)


def make_task(
    config: RunConfig,
    model_config: TrailmarkConfig,
    corpus: Corpus | None,
    table: NeighbourTable | None,
    tokenizer: Any,
    curriculum: Curriculum,
    say: Callable[[str], None],
) -> Task:
    """The batches that the configuration asks for; ``say`` is told where not all of a text is used.

    Raises:
        ValueError: for pairs that are none, or texts that do not fit a sample.
    """
    data, settings = config.data, config.training
    if data.task == "summarization":
        assert data.paths is not None
        pairs = SummarizationTexts(
            tokenizer, data.paths, settings.context_length, settings.seed, answer_weight=data.answer_weight
        )
        return SampleTask(config, pairs)
    assert corpus is not None
    if data.task == "needles":
        if len(corpus) > MOST_FILLER:
            say(f"Needles are hidden in the first {MOST_FILLER:,} of {len(corpus):,} tokens.")
        return NeedleTask(config, corpus, tokenizer, curriculum)
    chunk_size: int | None = getattr(model_config, "chunk_size", None)
    if data.task == "niah":
        texts = NiahTexts(
            tokenizer,
            corpus,
            settings.context_length,
            chunk_size or data.chunk_size,  # of a model without chunks: those of one to compare it with
            settings.seed,
            hops=data.hops,
            chains=data.chains,
            distractors=data.distractors,
            num_landmarks=data.num_landmarks,
            answer_weight=data.answer_weight,
            any_phase=data.early_landmarks > 0,
        )
        return SampleTask(config, texts)
    # a chunk of one token is always full
    needles = None
    if data.needle_share > 0:
        needles = MixedNeedles(tokenizer, settings.context_length, settings.seed, data.needle_share)
    return TextTask(config, corpus, chunk_size or 1, table, model_config.needs_scores, needles)


def without_trivial_layout(batch: Batch) -> Batch:
    """Without a mask or marks that change nothing: the model keeps its layouts of uniform batches."""
    trivial = {"attention_mask": True, "close_chunk": False, "document_ids": 0}
    return {key: x for key, x in batch.items() if key not in trivial or bool((x != trivial[key]).any())}


def micro_batches(rows: int, processes: int, micro_batch_size: int | None, sharing: int = 1) -> int:
    """Micro-batches of each process for a global batch of ``rows``; ``sharing`` processes have the same rows.

    Raises:
        ValueError: a batch that does not divide among the processes, or not into whole micro-batches.
    """
    if rows % (groups := processes // sharing):
        fit = [n * sharing for n in range(1, rows + 1) if rows % n == 0]
        raise ValueError(
            f"training.tokens_per_step: expected a global batch that divides among {processes} processes, got {rows} "
            f"samples. Start {' or '.join(map(str, fit[-4:]))} processes, or change tokens_per_step."
        )
    own = rows // groups
    if micro_batch_size is None or own <= micro_batch_size <= rows:  # several processes have less of it each
        return 1
    if own % micro_batch_size:
        raise ValueError(
            f"training.micro_batch_size: expected a divisor of the {own} samples of each process, got "
            f"{micro_batch_size}."
        )
    return own // micro_batch_size


def share_of(rows: int, processes: int, rank: int, micro: int, number: int) -> tuple[int, int]:
    """First row and count of micro-batch ``number`` of ``micro`` of process ``rank``."""
    count = rows // (processes * micro)
    return (number * processes + rank) * count, count
