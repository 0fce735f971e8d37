"""Neighbour tables: for each chunk of a corpus the earlier chunks of its window that an embedder finds.

The stream of tokens is cut into windows of ``context_length`` from its first token (what is left at its end is in
none), and each window into chunks of ``chunk_size``; the tokens of a window past its last full chunk close none.
A window may span documents; a table knows none of them. It is a folder:

    neighbours.bin      chunk numbers within the window, ascending, little-endian uint16 [windows, C, K]; 65535: none
    scores.bin          optional, little-endian float32 or float16 [windows, C, K]; -inf where there is none
    neighbours.json     the manifest, written last: a folder without one is no table

Windows of training stand on this grid where ``Windows(..., aligned=True)`` gives them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trailmark.data.neighbours.bm25 import Integers, best_chunks, expect_tokenizer
from trailmark.data.neighbours.files import (
    INDICES,
    KIND,
    MOST_CHUNKS,
    NONE,
    SCORE_DTYPES,
    SCORES,
    TableProgress,
    file_dtypes,
    write_table,
)
from trailmark.data.shards import Corpus
from trailmark.files import FileEntry
from trailmark.settings import Settings, from_file, setting

if TYPE_CHECKING:  # trailmark verify needs no torch
    from torch import Tensor

    from trailmark.data.neighbours.embedders import Embedder

_CHUNKS = 512  # that are embedded at a time, at least
_PRODUCTS = 1 << 24  # of a temporary array

Found = tuple[Integers, npt.NDArray[Any] | None]


@dataclass(frozen=True)
class Rule:
    """Which chunks may be neighbours of chunk c: those before it that the last row which reads does not see whole.

    A chunk takes S positions, and one more where landmarks stand in the text. The rows that read the neighbours of c
    end ``last_reader`` positions after the position that closes c.
    """

    sliding_window: int | None = None  # W, itself included; None: every chunk before c
    last_reader: int = 0
    landmarks: bool = False

    def __post_init__(self) -> None:
        if (self.sliding_window is not None and self.sliding_window < 1) or self.last_reader < 0:
            raise ValueError(
                f"sliding_window, last_reader: expected a window of at least 1 and a reader from 0 on, got "
                f"{self.sliding_window} and {self.last_reader}."
            )

    def __str__(self) -> str:
        if self.sliding_window is None:
            return "every chunk before (no --window)"
        architecture = "drt" if self.landmarks else "rpt"
        return f"--architecture {architecture} --window {self.sliding_window} (last reader {self.last_reader} on)"

    def num_candidates(self, chunks: int, chunk_size: int) -> Integers:
        """[chunks] how many of a window's first chunks each of them may have."""
        before = np.arange(chunks)
        if self.sliding_window is None:
            return before
        visible = visible_from(before, chunk_size, self.sliding_window, self.last_reader, self.landmarks)
        wide = chunk_size + self.landmarks
        return np.clip(-(-visible // wide), 0, before)  # those that begin before it


def visible_from(
    chunk: Integers, chunk_size: int, sliding_window: int, last_reader: int, landmarks: bool
) -> Integers:
    """The first position that the last reader of each chunk's neighbours sees; below 0: it sees the text's beginning.

    Positions are counted from the window's first. A chunk that begins at or past it is wholly visible, for the reader
    comes after it. What ``DRTForCausalLM`` and ``RPTForCausalLM`` exclude with ``exclude_visible_chunks``.
    """
    wide = chunk_size + landmarks
    closes = chunk * wide + wide - 1  # the landmark, or the last token
    return closes + last_reader - (sliding_window - 1)


# --- making a table ----------------------------------------------------------------------------------------


def build_neighbours(
    corpus: Corpus,
    embedder: Embedder,
    context_length: int,
    chunk_size: int,
    num_neighbours: int,
    output: str | Path,
    *,
    rule: Rule | None = None,
    scores: str | None = None,
    progress: Callable[[TableProgress], None] | None = None,
) -> NeighbourTable:
    """Embed each chunk once and keep the chunks with the largest products among those that the rule allows.

    The same command goes on where one was stopped, or opens the finished table. Of equal products the earlier chunk is
    taken. Products of the float32 vectors are made in float64, so that machines agree; a model that searches while it
    reads makes them in float32 and may rank chunks otherwise whose products differ by its rounding alone.

    Args:
        embedder: of :func:`.embedders.open_embedder`, with the tokenizer of the corpus.
        context_length: L, tokens of a window; chunk_size: S; num_neighbours: K.
        output: the table's folder.
        rule: None: all chunks before a chunk.
        scores: "float32" or "float16": keep the products too; None: do not.
        progress: called after each block of windows.

    Raises:
        ValueError: sizes that do not fit each other, a corpus shorter than a window or of another tokenizer, an output
            that is in use, full or another table's; and what the embedder raises.
    """
    rule = rule or Rule()
    chunks = count_chunks(corpus, context_length, chunk_size, num_neighbours)
    expect_tokenizer(corpus, embedder.tokenizer_fingerprint)
    if scores is not None and scores not in SCORE_DTYPES:
        raise ValueError(f"scores: expected {' or '.join(SCORE_DTYPES)}, got {scores!r}.")
    limits = rule.num_candidates(chunks, chunk_size)

    def find(first: int, stop: int) -> Found:
        tokens = corpus.read(first * context_length, stop * context_length)
        ids = tokens.reshape(stop - first, context_length)[:, : chunks * chunk_size].reshape(-1, chunk_size)
        import torch

        lengths = torch.full((len(ids),), chunk_size)
        queries, keys = (
            x.view(stop - first, chunks, -1)
            for x in embedder(torch.from_numpy(ids.astype(np.int64)), lengths)
        )
        nearest = [_nearest(q, k, limits, num_neighbours) for q, k in zip(queries, keys, strict=True)]
        own = np.stack([products for _, products in nearest]) if scores is not None else None
        return np.stack([indices for indices, _ in nearest]), own

    about = {
        "kind": "embedder",
        "embedder": {"spec": embedder.spec, "fingerprint": embedder.fingerprint},
        **table_about(corpus, embedder.tokenizer_fingerprint, context_length, chunk_size, rule),
    }
    shape = len(corpus) // context_length, chunks, num_neighbours
    write_table(output, about, shape, scores, find, max(1, _CHUNKS // chunks), progress)
    return NeighbourTable.open(output, corpus=corpus)


def count_chunks(corpus: Corpus, context_length: int, chunk_size: int, count: int) -> int:
    """C, the chunks that a window closes.

    Raises:
        ValueError: sizes below 1; a window without a chunk or with more than a table can number; a corpus shorter than
            a window.
    """
    sizes = {"context_length": context_length, "chunk_size": chunk_size, "count": count}
    for name, number in sizes.items():
        if number < 1:
            raise ValueError(f"{name}: expected at least 1, got {number}.")
    chunks = context_length // chunk_size
    if not 1 <= chunks <= MOST_CHUNKS:
        raise ValueError(
            f"context_length: expected 1 to {MOST_CHUNKS} chunks of {chunk_size} tokens in a window, {context_length} "
            f"tokens hold {chunks}. Change context_length or chunk_size."
        )
    if len(corpus) < context_length:
        raise ValueError(
            f"data: expected at least context_length = {context_length} tokens, got {len(corpus)}. "
            "Add text or make the table for shorter windows."
        )
    return chunks


def table_about(
    corpus: Corpus, tokenizer_fingerprint: str, context_length: int, chunk_size: int, rule: Rule
) -> dict[str, Any]:
    """What a manifest says of every kind of table: the text it is of, how it is cut, which chunks were looked at."""
    return {
        "corpus": {"fingerprint": corpus.fingerprint, "tokens": len(corpus)},
        "tokenizer_fingerprint": tokenizer_fingerprint,
        "context_length": context_length,
        "chunk_size": chunk_size,
        "rule": asdict(rule),
    }


def _nearest(
    queries: Tensor, keys: Tensor, limits: Integers, count: int
) -> tuple[Integers, npt.NDArray[np.float32]]:
    """Find a window's best chunks [C, K] for queries and keys [C, d], and their products, -inf where there is none."""
    chunks, queries, keys = len(queries), queries.double(), keys.double()
    indices, products = np.empty((chunks, count), np.int64), np.empty((chunks, count), np.float32)
    step = max(1, _PRODUCTS // chunks)
    for first in range(0, chunks, step):
        rows = slice(first, first + step)
        scores = (queries[rows] @ keys.T).numpy()  # [rows, C]
        if not np.isfinite(scores).all():
            raise ValueError(
                "embedder: expected vectors with finite products, got others. Name another embedder."
            )
        best = indices[rows] = best_chunks(scores, limits[rows], count)
        products[rows] = np.where(best >= 0, np.take_along_axis(scores, best.clip(0), 1), -np.inf)
    return indices, products


# --- reading one -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Text(Settings):
    """The corpus that a table is of."""

    fingerprint: str
    tokens: int = setting(least=1)


@dataclass(frozen=True)
class _File(Settings):
    bytes: int = setting(least=0)
    sha256: str = setting()


@dataclass(frozen=True, kw_only=True)
class TableManifest(Settings):
    """What ``neighbours.json`` must hold to be relied on."""

    kind: str = setting(choices=("embedder", "targets"))
    embedder: dict[str, Any] = field(default_factory=dict)
    corpus: _Text
    tokenizer_fingerprint: str
    context_length: int = setting(least=1)
    chunk_size: int = setting(least=1)
    rule: Rule
    windows: int = setting(least=1)
    chunks: int = setting(least=1, most=MOST_CHUNKS)
    count: int = setting(least=1)
    scores: str | None = setting(choices=tuple(SCORE_DTYPES))
    files: dict[str, _File]

    def __post_init__(self) -> None:
        super().__post_init__()
        cells = self.windows * self.chunks * self.count
        needed = {name: cells * dtype.itemsize for name, dtype in file_dtypes(self.scores).items()}
        there = {name: entry.bytes for name, entry in self.files.items()}
        shape = self.corpus.tokens // self.context_length, self.context_length // self.chunk_size
        if there != needed or shape != (self.windows, self.chunks):
            raise ValueError("its sizes contradict each other")


class NeighbourTable:
    """A finished table, memory-mapped: only what is asked for is read.

    Attributes:
        folder, manifest: where it lies and the content of ``neighbours.json``.
        windows, chunks, count: W windows of C chunks with K neighbours each.
        fingerprint: SHA-256 that names its content: equal for equal tables of one text.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], known: TableManifest) -> None:
        """For :meth:`open`."""
        self.folder, self.manifest, self._known = folder, manifest, known
        self.windows, self.chunks, self.count = known.windows, known.chunks, known.count
        self.rule = known.rule
        hashes = {name: entry.sha256 for name, entry in known.files.items()}
        about = {k: v for k, v in manifest.items() if k not in ("files", "trailmark", "created")}
        if isinstance(about.get("embedder"), dict):  # by which road it came is not what it is
            about["embedder"] = about["embedder"].get("fingerprint")
        self.fingerprint = hashlib.sha256(json.dumps([about, hashes], sort_keys=True).encode()).hexdigest()
        self._maps: dict[str, npt.NDArray[Any]] = {}

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        corpus: Corpus | None = None,
        tokenizer_fingerprint: str | None = None,
        context_length: int | None = None,
        chunk_size: int | None = None,
    ) -> NeighbourTable:
        """A table that ``trailmark neighbours`` made. The files' sizes are checked, no content: see :meth:`verify`.

        Args:
            corpus, tokenizer_fingerprint, context_length, chunk_size: refuse a table of another one; None: any.

        Raises:
            ValueError: no table, a newer format, a broken manifest, missing or cut files, a table of something else.
        """
        folder = Path(folder)
        manifest, known = KIND.read_as(folder, partial(from_file, TableManifest))
        table = cls(folder, manifest, known)
        made_for = {  # of each what the table is for, and what is asked for
            "corpus": (known.corpus.fingerprint, None if corpus is None else corpus.fingerprint),
            "tokenizer": (known.tokenizer_fingerprint, tokenizer_fingerprint),
            "context_length": (known.context_length, context_length),
            "chunk_size": (known.chunk_size, chunk_size),
        }
        for name, (own, wanted) in made_for.items():
            if wanted is not None and own != wanted:
                what = " with fingerprint" if name in ("corpus", "tokenizer") else ""
                command = "targets" if known.kind == "targets" else "neighbours"
                raise ValueError(
                    f"neighbours: expected a table for {name}{what} {wanted}, {str(folder)!r} is one for {own}. "
                    f"Make one that fits with trailmark {command}, into another folder."
                )
        KIND.expect_lengths(folder, table._files())
        return table

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self._known.files.values())

    def batch(self, windows: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Read neighbours int64 [B, C, K] of windows 0 .. W - 1, -1 for none, and their scores float32, if kept."""
        if len(windows) and not 0 <= min(windows) <= max(windows) < self.windows:
            raise ValueError(
                f"windows: expected 0 .. {self.windows - 1}, got {min(windows)} .. {max(windows)}."
            )
        import torch

        numbers = np.asarray(windows, np.int64)
        indices = self._map(INDICES)[numbers].astype(np.int64)
        indices[indices == NONE] = -1
        # hashes that were made of such ones are right
        if (indices >= np.arange(self.chunks)[:, None]).any():
            raise ValueError(
                f"neighbours: expected chunks that come earlier, {str(self.folder)!r} names others. It was changed "
                "after it was written; remove the folder and make the table again."
            )
        scores = None
        if SCORES in self._dtypes():
            scores = torch.from_numpy(self._map(SCORES)[numbers].astype(np.float32))
            if (scores.isfinite().numpy() != (indices >= 0)).any():
                raise ValueError(
                    f"neighbours: expected a finite score of each neighbour and none else, {str(self.folder)!r} holds "
                    "others. It was changed after it was written; remove the folder and make the table again."
                )
        return torch.from_numpy(indices), scores

    def verify(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Read every byte and compare its file's SHA-256 with the manifest's; ``progress(bytes done, bytes in all)``.

        Raises:
            ValueError: files that are missing, truncated or changed.
        """
        KIND.verify(self.folder, self._files(), progress)

    def _files(self) -> dict[str, FileEntry]:
        return {name: FileEntry(entry.bytes, entry.sha256) for name, entry in self._known.files.items()}

    def _dtypes(self) -> dict[str, np.dtype[Any]]:
        return file_dtypes(self._known.scores)

    def _map(self, name: str) -> npt.NDArray[Any]:
        if name not in self._maps:
            shape = self.windows, self.chunks, self.count
            self._maps[name] = np.memmap(self.folder / name, self._dtypes()[name], "r", shape=shape).view(
                np.ndarray
            )
        return self._maps[name]

    def __getstate__(self) -> dict[str, Any]:
        """Another process maps the files anew."""
        return self.__dict__ | {"_maps": {}}
