"""``trailmark neighbours``: a corpus and the name of an embedder to a neighbour table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trailmark.data.corpus import load_tokenizer
from trailmark.data.neighbours.bm25 import fit_bm25
from trailmark.data.neighbours.embedders import Embedder, device_named, open_embedder
from trailmark.data.neighbours.files import MANIFEST as TABLE
from trailmark.data.neighbours.files import TABLE_PROGRESS, TableProgress, expect_place_of_table
from trailmark.data.neighbours.table import NeighbourTable, Rule, build_neighbours, count_chunks
from trailmark.data.shards import MANIFEST, Corpus
from trailmark.data.texts import open_text
from trailmark.files import read_json
from trailmark.processes import by_first

BM25_FILE = "bm25.json"


def make_table(
    paths: list[Path],
    output: Path,
    embedder: str,
    *,
    context_length: int,
    chunk_size: int,
    count: int,
    rule: Rule,
    tokenizer: str | None = None,
    scores: str | None = None,
    device: str | None = None,
    say: Callable[[str], None] = lambda message: None,
    progress: Callable[[TableProgress], None] | None = None,
    fitting: Callable[[int, int], None] = lambda done, total: None,
) -> NeighbourTable:
    """Open text and embedder and build the table; "bm25" without a file counts the corpus first, into ``output``.

    Args:
        paths: a prepared folder, or files and folders of text that are read as training reads them.
        tokenizer: None: the prepared corpus' own, or "bytes".
        device: where an encoder computes; None: CUDA's if there is one, else the CPU.

    Raises:
        ValueError: as :func:`.open_text`, :func:`.open_embedder` and :func:`.build_neighbours`.
    """
    corpus, loaded = open_corpus(paths, tokenizer)
    chunks = count_chunks(corpus, context_length, chunk_size, count)
    expect_place_of_table(output)
    device_named(device)
    if embedder == "bm25":
        file = output / BM25_FILE
        if by_first(file.exists):
            _expect_statistics_of(corpus, chunk_size, file)
        elif by_first(lambda: any((output / name).exists() for name in (TABLE, TABLE_PROGRESS))):
            raise ValueError(
                f"output: expected a folder without a table, {str(output)!r} holds one of another embedder, or whose "
                f"{BM25_FILE} was removed. Choose another folder or remove this one."
            )
        else:
            say(f"Counting tokens of {len(corpus):,} for BM25 ...")

            def count_tokens() -> None:
                fit_bm25(corpus, chunk_size, loaded, file, progress=fitting)

            by_first(count_tokens)
        embedder = f"bm25:{file}"
    opened: Embedder = open_embedder(embedder, loaded, device)
    windows = len(corpus) // context_length
    left = (
        f"; {rest:,} tokens at the end are in none"
        if (rest := len(corpus) - windows * context_length)
        else ""
    )
    say(
        f"{windows:,} windows of {context_length:,} tokens{left}. Embedding {windows * chunks:,} chunks with "
        f"{opened.spec} ({opened.size} numbers), up to {count} neighbours each, into {output}/"
    )
    return build_neighbours(
        corpus, opened, context_length, chunk_size, count, output, rule=rule, scores=scores, progress=progress
    )


def _expect_statistics_of(corpus: Corpus, chunk_size: int, file: Path) -> None:
    """Raise a ValueError if what an earlier run counted belongs to something else."""
    content = read_json(file)
    counted_for = (
        [content.get(x) for x in ("corpus_fingerprint", "chunk_size")] if isinstance(content, dict) else None
    )
    if counted_for != [corpus.fingerprint, chunk_size]:
        raise ValueError(
            f"output: expected BM25 statistics of this corpus in chunks of {chunk_size} tokens, {str(file)!r} holds "
            "others. Choose another folder, or name the statistics that are meant: --embedder bm25:FILE."
        )


def open_corpus(paths: list[Path], tokenizer: str | None) -> tuple[Corpus, Any]:
    """Open the text and load its tokenizer, which a prepared folder names itself."""
    loaded = load_tokenizer(tokenizer or tokenizer_of(paths))
    return open_text(paths, loaded), loaded


def tokenizer_of(paths: list[Path]) -> str:
    """The name of the tokenizer of a prepared folder; that of other text is "bytes"."""
    manifest = read_json(paths[0] / MANIFEST) if len(paths) == 1 else None
    known = manifest.get("tokenizer") if isinstance(manifest, dict) else None
    return str(known.get("name", "bytes")) if isinstance(known, dict) else "bytes"
