"""The text that a configuration names, as a corpus: shards that trailmark prepare made, files, or Python's sources."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trailmark import untrusted
from trailmark.data.corpus import (
    files_below,
    read_texts,
    standard_library_texts,
    tokenize,
    tokenizer_fingerprint,
)
from trailmark.data.pairs import PAIRS_MANIFEST
from trailmark.data.prepare import PROGRESS
from trailmark.data.shards import MANIFEST, Corpus
from trailmark.data.sources import kind_of
from trailmark.files import expect_outside


def open_text(
    paths: Sequence[str | Path] | None,
    tokenizer: Any,
    vocab_size: int | None = None,
    end_of_text: bool = True,
    *,
    argument: str = "data",
    revision: str | None = None,
    verify: bool = True,
) -> Corpus:
    """The corpus in ``paths``: a folder that trailmark prepare made, or files and folders of text, read whole.

    Args:
        paths: None: the sources of Python's standard library that are for training.
        tokenizer: of transformers; shards of another one are refused.
        vocab_size: the model's; shards of a larger vocabulary are refused.
        end_of_text: end each document that is read here with the tokenizer's end-of-text token, if it has one, as
            prepared ones are.
        argument: by which a user named the paths, for messages.
        revision: of a hub dataset; shards of another one are refused, and text that has none.
        verify: read every byte of a prepared corpus once and compare its hashes: one of several processes is enough.

    Raises:
        ValueError: no text there; rows or pairs instead of text; several prepared folders, or one among others; shards
            that are damaged, or of another tokenizer, vocabulary or revision.
    """
    prepared = [path for path in map(Path, paths or ()) if _is_prepared(path)]
    if not prepared and revision is not None:
        raise ValueError(
            f"data.revision: expected none for text that is read as it is, got {revision!r}. Prepare that revision of "
            "a hub dataset with trailmark prepare and name its folder, or leave the revision out."
        )
    if paths is None:
        return _read(standard_library_texts("train"), tokenizer, end_of_text)
    if not prepared:
        _expect_text(paths, argument)
        return _read(read_texts(paths, argument), tokenizer, end_of_text)
    if len(paths) > 1:
        raise ValueError(
            f"{argument}: expected one prepared folder or files of text, got {str(prepared[0])!r} among {len(paths)} "
            "paths. Prepare all of them into one folder."
        )
    corpus = Corpus.open(prepared[0], tokenizer_fingerprint(tokenizer), vocab_size, revision)
    if verify:
        corpus.verify()
        _ = corpus.document_starts  # hashes that were made of broken ends are right
    return corpus


_OURS = {
    MANIFEST: {"format", "shards"},
    PROGRESS: {"tokenizer", "shards"},
    PAIRS_MANIFEST: {"pairs", "sha256"},
}


def _is_prepared(path: Path) -> bool:
    return _is_ours(path / MANIFEST) or _is_ours(path / PROGRESS)


def _is_ours(file: Path) -> bool:
    """Whether a file is one that trailmark prepare writes, whole or damaged, and no other of that name."""
    if not file.exists():
        return False
    try:
        found = untrusted.read_json(file, "data", links=True)
    except ValueError:
        if any(file.parent.glob("pairs.jsonl" if file.name == PAIRS_MANIFEST else "tokens-*.bin")):
            raise  # it is ours, and damaged
        return False
    return isinstance(found, dict) and _OURS[file.name] <= found.keys()


def expect_outside_text(output: Path, paths: Sequence[str | Path]) -> None:
    """Raise a ValueError where an output lies below text, and would be read as such the next time.

    In a prepared folder it does not: a manifest says what is text.
    """
    expect_outside(output, [path for path in paths if not _is_prepared(Path(path))], "text")


def _expect_text(paths: Sequence[str | Path], argument: str) -> None:
    """Raise a ValueError where rows would be read with the syntax around them."""
    for path in map(Path, paths):
        if path.is_dir():
            files = files_below(path, argument)
            for file in files:
                if file.name not in _OURS or not _is_ours(file):
                    continue
                if file.name == PAIRS_MANIFEST:
                    raise ValueError(
                        f"{argument}: expected text, {str(file.parent)!r} holds pairs for summarization. Set data.task "
                        "to summarization, or make a corpus of the documents: trailmark prepare without --pairs."
                    )
                raise ValueError(
                    f"{argument}: expected text, the prepared folder {str(file.parent)!r} lies in {str(path)!r}. "
                    "Name the prepared folder itself."
                )
        else:
            files = [path]
        for file in files:
            if kind_of(file, named=not path.is_dir()) != "text":
                raise ValueError(
                    f"{argument}: expected plain text, {str(file)!r} holds rows (JSON or Parquet). Make a corpus of "
                    f"their texts first: trailmark prepare {path} --column NAME --output FOLDER, then name FOLDER."
                )


def _read(texts: list[str], tokenizer: Any, end_of_text: bool) -> Corpus:
    end = getattr(tokenizer, "eos_token_id", None) if end_of_text else None
    parts, starts, total = [], [], 0
    for text in texts:
        tokens = tokenize([text], tokenizer)
        if end is not None:
            tokens = np.append(tokens, np.int32(end))
        if len(tokens):
            parts.append(tokens)
            starts.append(total)
            total += len(tokens)
    return Corpus.of_tokens(np.concatenate(parts) if parts else np.zeros(0, np.int32), starts)
