"""What a run's configuration names, opened: the text, its neighbours, what embeds chunks, the task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trailmark.data.corpus import Tokens
from trailmark.data.needles.niah import NiahTexts
from trailmark.data.neighbours.embedders import Embedder
from trailmark.data.neighbours.table import NeighbourTable
from trailmark.data.neighbours.trained_embedders import embedder_of
from trailmark.data.shards import Corpus
from trailmark.data.summarization import SummarizationTexts
from trailmark.data.texts import open_text
from trailmark.models import TrailmarkConfig
from trailmark.training.config import RunConfig
from trailmark.training.curriculum import Curriculum
from trailmark.training.processes import is_main
from trailmark.training.tasks import MOST_FILLER, NeedleTask, SampleTask, Task, TextTask

Say = Callable[[str], None]


def open_corpus(config: RunConfig, text: Tokens | None, tokenizer: Any, vocab_size: int) -> Corpus | None:
    """The text of ``data.paths``, or ``text``; None where samples are read one by one.

    Raises:
        ValueError: for paths that are missing or hold no text, or tokens outside the vocabulary.
    """
    data = config.data
    if data.task == "summarization":
        return None
    if text is not None:
        return Corpus.of_tokens(text)
    # needles are hidden in pure text
    return open_text(
        data.paths,
        tokenizer,
        vocab_size,
        end_of_text=data.task == "text",
        revision=data.revision,
        verify=is_main(),
    )


def open_validation(config: RunConfig, tokenizer: Any, vocab_size: int) -> TextTask | None:
    """Windows of ``data.validation``; None: nothing is measured on them. Errors as of :func:`open_corpus`."""
    paths = config.data.validation
    if paths is None or config.training.eval_steps is None:
        return None
    corpus = open_text(paths, tokenizer, vocab_size, verify=is_main())
    # as the text is, without early landmarks
    data = replace(config.data, early_landmarks=0.0, neighbours=None)
    return TextTask(replace(config, data=data), corpus, 1)


def open_embedder(model_config: Any, tokenizer: Any, everywhere: bool, say: Say) -> Embedder | None:
    """What finds chunks where no table does; the model's configuration says then which it is trained with.

    Args:
        everywhere: no table holds what the chunks of the training text retrieve.
        say: told what that costs.
    """
    found = embedder_of(model_config, tokenizer)
    if found is not None and everywhere:
        model_config.embedder_fingerprint = found.fingerprint
        say(
            f"{found.spec} embeds the chunks of every batch anew. For text that trailmark prepare made, trailmark "
            "neighbours makes a table once: data.neighbours=FOLDER."
        )
    return found


def make_task(
    config: RunConfig,
    model_config: TrailmarkConfig,
    corpus: Corpus | None,
    table: NeighbourTable | None,
    tokenizer: Any,
    curriculum: Curriculum,
    say: Say,
) -> Task:
    """The batches that the configuration asks for; ``say`` is told where not all of a text is used.

    Raises:
        ValueError: for pairs that are none, or texts that do not fit a sample.
    """
    data, settings = config.data, config.training
    if data.task == "summarization":
        assert data.paths is not None
        pairs = SummarizationTexts(tokenizer, data.paths, settings.context_length, settings.seed)
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
            any_phase=data.early_landmarks > 0,
        )
        return SampleTask(config, texts)
    # a chunk of one token is always full
    return TextTask(config, corpus, chunk_size or 1, table, model_config.needs_scores)
