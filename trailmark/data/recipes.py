"""What a user types to name text: files, folders, ``hub:owner/name``, or a recipe that knows a corpus' particulars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trailmark.data.hub import HubDataset, HubFiles
from trailmark.data.sources import LocalFiles, Source, Where

_HUB = "hub:"
_PROOF_PILE = {
    "train": "train/proofpile_train_*.jsonl.gz",
    "validation": "dev/proofpile_dev.jsonl.gz",
    "test": "test/proofpile_test.jsonl.gz",
}
ARXIV_MATH = "arxiv-math"  # the arXiv part of proof-pile
# The corpora of the papers: where each lies on the hub, and how its rows become documents (and pairs)
RECIPES: dict[str, dict[str, Any]] = {
    # a copy in Parquet: the original, deepmind/pg19, is loaded by a script of its own, which datasets no longer runs
    "pg19": {"name": "emozilla/pg19", "column": "text"},
    ARXIV_MATH: {"name": "hoskinson-center/proof-pile", "column": "text", "where": ("meta.config", "arxiv")},
    "xsum": {"name": "EdinburghNLP/xsum", "column": "document", "summary_column": "summary"},
    "cnn-dailymail": {
        "name": "abisee/cnn_dailymail",
        "config": "3.0.0",
        "column": "article",
        "summary_column": "highlights",
    },
}


def _of_recipe(recipe: str, split: str, revision: str | None, streaming: bool) -> Source:
    if recipe != ARXIV_MATH:
        return HubDataset(**RECIPES[recipe], split=split, revision=revision, streaming=streaming)
    if streaming:
        raise ValueError(
            "streaming: expected False for arxiv-math, whose files must be downloaded, got True. Leave it out."
        )
    if split not in _PROOF_PILE:
        raise ValueError(f"split: expected one of {', '.join(_PROOF_PILE)}, got {split!r}.")
    return HubFiles(patterns=[_PROOF_PILE[split]], revision=revision, **RECIPES[recipe])


def parse_source(
    names: Sequence[str],
    *,
    column: str | None = None,
    summary_column: str | None = None,
    config: str | None = None,
    split: str | None = None,
    revision: str | None = None,
    streaming: bool = False,
    where: str | None = None,
) -> Source:
    """The source that a user's words name.

    Args:
        names: files and folders; or one recipe (a key of ``RECIPES``); or one ``hub:owner/name``.
        column: of the text; None: "text", or the recipe's.
        summary_column: of the summaries, where pairs are wanted.
        config, split, revision, streaming: of hub datasets; split None: "train".
        where: "column=value" or "column.field=value": only rows with that value. Not for recipes.

    Raises:
        ValueError: options that do not go with the source, and whatever the source raises.
    """
    if len(names) > 1 and (odd := [name for name in names if _remote(name)]):
        raise ValueError(
            f"source: expected {odd[0]!r} alone, got {len(names)} sources. Prepare each by itself."
        )
    condition = _condition(where)
    if names and names[0].startswith(_HUB):
        name = names[0].removeprefix(_HUB)
        if not name:
            raise ValueError("source: expected hub:owner/name, got 'hub:'.")
        return HubDataset(
            name, column or "text", config, split or "train", revision, streaming, summary_column, condition
        )
    if names and _remote(names[0]):
        _refuse(names[0], column=column, summary_column=summary_column, config=config, where=where)
        return _of_recipe(names[0], split or "train", revision, streaming)
    hint = f" To load a hub dataset write {_HUB}owner/name."
    _refuse(
        "files and folders", hint, config=config, split=split, revision=revision, streaming=streaming or None
    )
    for name in names:
        if not Path(name).exists():
            raise ValueError(
                f"source: expected a file, a folder, {_HUB}owner/name or one of {', '.join(RECIPES)}, got {name!r}."
            )
    return LocalFiles(names, column or "text", summary_column, condition)


def _remote(name: str) -> bool:
    """Whether the name is no path; a file or folder that bears a recipe's name is meant itself."""
    return name.startswith(_HUB) or (name in RECIPES and not Path(name).exists())


def _condition(where: str | None) -> Where | None:
    if where is None:
        return None
    column, equals, value = where.partition("=")
    if not column or not equals:
        raise ValueError(f"where: expected column=value or column.field=value, got {where!r}.")
    return column, value


def _refuse(what: str, hint: str = "", **options: object) -> None:
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name}: expected none for {what}, got {value!r}. Leave it out.{hint}")
