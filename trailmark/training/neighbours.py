"""The neighbour table of a run: that of its corpus, and of what its model may read."""

from __future__ import annotations

from typing import Any

from trailmark.data.corpus import tokenizer_fingerprint
from trailmark.data.neighbours.table import NeighbourTable, Rule
from trailmark.data.neighbours.trained_embedders import embedder_of
from trailmark.data.shards import Corpus
from trailmark.models import TrailmarkConfig, architectures
from trailmark.training.config import RunConfig

TARGETS = "targets"  # the kind of tables that trailmark targets makes


def open_table(
    config: RunConfig, model: TrailmarkConfig, corpus: Corpus, tokenizer: Any, verify: bool = True
) -> NeighbourTable | None:
    """``data.neighbours`` of a configuration that was checked; None: it names none.

    An embedder's table says in ``model`` which embedder the model is trained with.

    Args:
        verify: read every byte of it once: one of several processes is enough.

    Raises:
        ValueError: no table; one of another corpus, tokenizer, context length, chunk size, number of neighbours,
            rule of what may be read, or embedder; targets where an embedder's is wanted, or the other way round.
    """
    folder = config.data.neighbours
    if folder is None:
        return None
    model_: Any = model
    commands = ["trailmark neighbours", "trailmark targets"]
    table = _opened(folder)
    learned = model_.retriever == "learned"
    if (table.manifest["kind"] == TARGETS) != learned:
        kinds = ["what an embedder found", "target scores"]
        raise ValueError(
            f"data.neighbours: expected {kinds[learned]} with model.retriever {model_.retriever!r}, {folder!r} holds "
            f"{kinds[not learned]}. Make a table with {commands[learned]}."
        )
    table = _opened(
        folder,
        corpus=corpus,
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        context_length=config.training.context_length,
        chunk_size=model_.chunk_size,
    )
    if table.rule != (rule := rule_of(model)):
        raise ValueError(
            f"data.neighbours: expected a table for {rule}, as the model may read, {folder!r} is one for {table.rule}. "
            f"Make one with {commands[learned]}, or change model.sliding_window or model.exclude_visible_chunks."
        )
    if model.needs_scores and table.manifest["scores"] is None:
        raise ValueError(
            f"data.neighbours: expected a table with scores for model.encoder_weights 'encoder', {folder!r} has none. "
            "Make one with trailmark neighbours --scores float32."
        )
    if not learned:
        _take_embedder(table, model_, tokenizer)
    if verify:
        table.verify()
    return table


def _opened(folder: str, **expected: Any) -> NeighbourTable:
    """:meth:`NeighbourTable.open`, whose errors name the setting."""
    try:
        return NeighbourTable.open(folder, **expected)
    except ValueError as error:
        raise ValueError(f"data.{error}") from error


def rule_of(model: TrailmarkConfig) -> Rule:
    """Which chunks a model with neighbours may read."""
    own: Any = model
    if own.first_visible is None:
        return Rule()
    return Rule(own.sliding_window, own.first_visible + own.sliding_window - 1, own.has_landmarks)


def rule_for(architecture: str, chunk_size: int, sliding_window: int | None) -> Rule:
    """That of an architecture's models; ``sliding_window`` None: they do not exclude what their window shows."""
    if sliding_window is None:
        return Rule()
    fields = {"chunk_size": chunk_size, "sliding_window": sliding_window, "exclude_visible_chunks": True}
    return rule_of(architectures()[architecture].config_class(**fields))


def _take_embedder(table: NeighbourTable, model: Any, tokenizer: Any) -> None:
    """What the table was made with becomes the model's; a ValueError where the model has another."""
    if table.count != model.num_retrieved_chunks:
        raise ValueError(
            f"data.neighbours: expected {model.num_retrieved_chunks} neighbours for each chunk "
            f"(model.num_retrieved_chunks), {str(table.folder)!r} has {table.count}. Make a table with --count "
            f"{model.num_retrieved_chunks}, or set model.num_retrieved_chunks={table.count}."
        )
    made_with = table.manifest["embedder"]
    own = model.embedder_fingerprint
    if own is None and model.embedder not in (None, made_with["spec"]):
        # another name of the same perhaps, or a folder that moved
        found = embedder_of(model, tokenizer)
        assert found is not None
        own = found.fingerprint
    if own not in (None, made_with["fingerprint"]):
        raise ValueError(
            f"data.neighbours: expected a table of the model's embedder {model.embedder!r} with fingerprint {own}, "
            f"{str(table.folder)!r} is one of {made_with['spec']!r} with {made_with['fingerprint']}. Leave "
            "model.embedder and model.embedder_fingerprint out, or make a table with that embedder."
        )
    model.embedder = model.embedder or made_with["spec"]
    model.embedder_fingerprint = made_with["fingerprint"]
