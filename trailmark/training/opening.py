"""What a run's configuration names, opened: its text, that which it is measured on, and what finds chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trailmark.data.batches import expect_window
from trailmark.data.corpus import Tokens
from trailmark.data.neighbours.embedders import Embedder
from trailmark.data.neighbours.trained_embedders import embedder_of
from trailmark.data.shards import Corpus
from trailmark.data.texts import open_text
from trailmark.processes import is_main
from trailmark.training.config import RunConfig
from trailmark.training.tasks import TextTask


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
    corpus = open_text(paths, tokenizer, vocab_size, argument="data.validation", verify=is_main())
    expect_window(corpus, config.training.context_length, "data.validation")
    # as the text is, without early landmarks; the same windows whatever the run's seed
    data = replace(config.data, early_landmarks=0.0, neighbours=None)
    # a window a row: how many a step of the training has is no matter here
    training = replace(config.training, seed=0, tokens_per_step=config.training.context_length)
    return TextTask(replace(config, data=data, training=training), corpus, 1)


def open_embedder(
    model_config: Any, tokenizer: Any, everywhere: bool, say: Callable[[str], None]
) -> Embedder | None:
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
