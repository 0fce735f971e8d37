"""Token shards: a folder of memory-mapped token files and a manifest that says what they are.

    tokens-00000.bin      token numbers, little-endian uint16 or uint32
    documents-00000.bin   where each of the shard's documents ends, counted in tokens from the shard's beginning, uint64
    corpus.json           the manifest, written last: a folder without one is no corpus

A shard holds whole documents; no document is empty. docs/data.md says what the manifest's fields mean.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trailmark.data.corpus import Tokens
from trailmark.files import FileEntry, FolderKind, sync_file, sync_folder
from trailmark.settings import Settings, from_file, setting
from trailmark.untrusted import brief, read_bytes

FORMAT = 1
MANIFEST = "corpus.json"
_KIND = FolderKind("data", MANIFEST, FORMAT, "a prepared corpus", "trailmark prepare")
_END = np.dtype("<u8")
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


def token_dtype(vocab_size: int) -> str:
    """The narrowest of a shard's types that holds the tokens of a vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


@dataclass(frozen=True)
class Shard(Settings):
    """What the manifest says of one shard."""

    file: str
    tokens: int = setting(least=1)
    bytes: int = setting(least=1)
    sha256: str = setting()
    documents_file: str = setting()
    documents: int = setting(least=1)
    documents_sha256: str = setting()

    def __post_init__(self) -> None:
        super().__post_init__()
        if "/" in self.file + self.documents_file:  # nothing outside of the folder
            raise ValueError(f"file: expected names of files in the folder, got {brief(self.file)}")

    def files(self) -> dict[str, FileEntry]:
        """What the manifest says of its two files."""
        return {
            self.file: FileEntry(self.bytes, self.sha256),
            self.documents_file: FileEntry(self.documents * _END.itemsize, self.documents_sha256),
        }


@dataclass(frozen=True)
class TokenizerOf(Settings):
    """What a manifest says of the tokenizer whose tokens are kept."""

    name: str
    fingerprint: str
    vocab_size: int = setting(least=1, most=1 << 31)
    end_of_text: int | None = setting(None, least=0)


@dataclass(frozen=True)
class CorpusManifest(Settings):
    """What ``corpus.json`` must hold to be relied on."""

    dtype: str = setting(choices=tuple(_DTYPES))
    tokens: int = setting(least=0)
    documents: int = setting(least=0)
    fingerprint: str = setting()
    tokenizer: TokenizerOf = setting()
    source: dict[str, Any] = setting()
    shards: tuple[Shard, ...] = setting()
    left_out: int = setting(0, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        shards, itemsize = self.shards, _DTYPES[self.dtype].itemsize
        counted = (
            sum(shard.tokens for shard in shards),
            sum(shard.documents for shard in shards),
            corpus_fingerprint(shards, self.dtype, self.tokenizer.fingerprint),
        )
        if (self.tokens, self.documents, self.fingerprint) != counted or any(
            shard.bytes != shard.tokens * itemsize for shard in shards
        ):
            raise ValueError("its fields contradict each other: it was changed after it was written")


def corpus_fingerprint(shards: Sequence[Shard], dtype: str, tokenizer_fingerprint: str) -> str:
    """The SHA-256 of the shards' hashes, their type and the tokenizer's fingerprint names what a run trains on."""
    hashes = [part for shard in shards for part in (shard.sha256, shard.documents_sha256)]
    return hashlib.sha256("\n".join([dtype, tokenizer_fingerprint, *hashes]).encode()).hexdigest()


class ShardWriter:
    """Writes one shard; until :meth:`close` its files bear names that no reader takes for a shard's."""

    def __init__(self, folder: Path, number: int, dtype: str) -> None:
        self._folder, self._dtype = folder, _DTYPES[dtype]
        self._names = (f"tokens-{number:05d}.bin", f"documents-{number:05d}.bin")
        self._ends, self.tokens, self._hash = array("Q"), 0, hashlib.sha256()
        self._file = open(self._part(self._names[0]), "wb")  # noqa: SIM115 - close and abandon close it

    @property
    def documents(self) -> int:
        return len(self._ends)

    @property
    def itemsize(self) -> int:
        return self._dtype.itemsize

    @property
    def empty_document(self) -> bool:
        """Whether nothing was written since the last document's end."""
        return self.tokens == (self._ends[-1] if self._ends else 0)

    def write(self, tokens: npt.NDArray[Any]) -> None:
        """Add tokens to the present document: [n] unsigned integers of any width that hold them."""
        content = tokens.astype(self._dtype, copy=False).tobytes()
        self._hash.update(content)
        self._file.write(content)
        self.tokens += len(tokens)

    def end_document(self) -> None:
        assert not self.empty_document, "no document is empty"
        self._ends.append(self.tokens)

    def close(self) -> Shard:
        """Put the shard in place, on the disk itself."""
        assert self._ends, "no shard is empty"
        assert self._ends[-1] == self.tokens, "a shard holds whole documents"
        sync_file(self._file)
        self._file.close()
        ends = np.asarray(self._ends, _END).tobytes()
        with open(self._part(self._names[1]), "wb") as file:
            file.write(ends)
            sync_file(file)
        for name in self._names:
            os.replace(self._part(name), self._folder / name)
        sync_folder(self._folder)
        return Shard(
            file=self._names[0],
            tokens=self.tokens,
            bytes=self.tokens * self._dtype.itemsize,
            sha256=self._hash.hexdigest(),
            documents_file=self._names[1],
            documents=len(self._ends),
            documents_sha256=hashlib.sha256(ends).hexdigest(),
        )

    def abandon(self) -> None:
        """Remove what was written; a shard in place is not touched."""
        try:
            self._file.close()
        finally:  # closing writes what is buffered: on a full disk that fails
            for name in self._names:
                self._part(name).unlink(missing_ok=True)

    def _part(self, name: str) -> Path:
        return self._folder / f".{name}.part"


def make_manifest(
    shards: Sequence[Shard],
    dtype: str,
    source: Mapping[str, Any],
    tokenizer: Mapping[str, Any],
    **other: Any,
) -> dict[str, Any]:
    """The content of ``corpus.json``; ``tokenizer`` holds name, fingerprint, vocab_size and end_of_text."""
    return {
        "format": FORMAT,
        "dtype": dtype,
        "tokens": sum(shard.tokens for shard in shards),
        "documents": sum(shard.documents for shard in shards),
        "fingerprint": corpus_fingerprint(shards, dtype, tokenizer["fingerprint"]),
        "tokenizer": dict(tokenizer),
        "source": dict(source),
        **other,
        "shards": [asdict(shard) for shard in shards],
    }


class Corpus:
    """Tokens of many documents, one after another: ``len(corpus)`` tokens, read by ``read(start, stop)``.

    Made by :meth:`open` (shards, memory-mapped: only what is read is loaded) or :meth:`of_tokens` (memory).

    Attributes:
        folder: of the shards; None in memory.
        manifest: the content of ``corpus.json``; empty in memory.
        fingerprint: SHA-256 that names the text: equal for equal shards of one tokenizer.
        document_starts: [documents] int64, ascending: the first token of each document. Held in memory.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        folder: Path | None,
        manifest: dict[str, Any],
        shards: Sequence[Shard],
        maps: list[npt.NDArray[Any] | None],
        starts: npt.NDArray[np.int64] | None,
    ) -> None:
        """For :meth:`open` and :meth:`of_tokens`."""
        self.folder, self.manifest = folder, manifest
        self._shards, self._maps, self._starts = shards, maps, starts
        self._borders = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])  # [shards + 1]
        self._length = int(self._borders[-1])

    @classmethod
    def of_tokens(cls, tokens: Tokens, document_starts: npt.ArrayLike | None = None) -> Corpus:
        """Tokens in memory, [n] int32, as one document or as those that begin at ``document_starts``.

        Raises:
            ValueError: starts that do not begin with 0, do not ascend or reach past the tokens.
        """
        tokens = np.ascontiguousarray(tokens, np.int32)
        given = [0][: len(tokens)] if document_starts is None else document_starts
        starts = np.asarray(given, np.int64)
        borders = np.append(starts, len(tokens))
        if borders[0] != 0 or (np.diff(borders) <= 0).any():
            raise ValueError(
                f"document_starts: expected ascending places from 0 to below {len(tokens)}, got {starts}."
            )
        return cls([len(tokens)], None, {}, [], [tokens], starts)

    @classmethod
    def open(
        cls,
        folder: str | Path,
        tokenizer_fingerprint: str | None = None,
        vocab_size: int | None = None,
        revision: str | None = None,
    ) -> Corpus:
        """A corpus that ``trailmark prepare`` made. Every file's size is checked, no content: see :meth:`verify`.

        Args:
            folder: that of ``corpus.json``.
            tokenizer_fingerprint: refuse shards of another tokenizer (:func:`.corpus.tokenizer_fingerprint`).
            vocab_size: refuse shards of a larger vocabulary than a model of this size has.
            revision: refuse shards of another revision of a hub dataset.

        Raises:
            ValueError: no corpus, a newer format, a broken manifest, missing or truncated shards, shards of another
                tokenizer, vocabulary or revision.
        """
        folder = Path(folder)
        manifest, known = _KIND.read_as(folder, partial(from_file, CorpusManifest))
        shards, tokenizer, source = known.shards, known.tokenizer, known.source
        own, own_size = tokenizer.fingerprint, tokenizer.vocab_size
        if tokenizer_fingerprint is not None and own != tokenizer_fingerprint:
            raise ValueError(
                f"data: expected tokens of the tokenizer with fingerprint {tokenizer_fingerprint}, {str(folder)!r} "
                f"holds tokens of {tokenizer.name!r} with fingerprint {own}. Prepare the corpus with the "
                "tokenizer of the model, or name the corpus' tokenizer."
            )
        if vocab_size is not None and own_size > vocab_size:
            raise ValueError(
                f"data: expected a vocabulary of at most {vocab_size} tokens, {str(folder)!r} has {own_size} "
                f"(tokenizer {tokenizer.name!r} with fingerprint {own}). Set vocab_size to {own_size} or more."
            )
        if revision is not None and source.get("revision") != revision:
            prepared = source.get("revision")
            raise ValueError(
                f"data: expected revision {revision}, {str(folder)!r} was prepared from "
                f"{f'revision {prepared}' if prepared else 'a source without revisions'}. Prepare that revision into "
                "another folder."
            )
        _KIND.expect_lengths(folder, _files_of(shards))
        return cls([s.tokens for s in shards], folder, manifest, shards, [None] * len(shards), None)

    def __len__(self) -> int:
        return self._length

    def read(self, start: int, stop: int) -> Tokens:
        """Tokens start .. stop - 1, [stop - start] int32 of their own memory, across the borders of shards."""
        assert 0 <= start <= stop <= len(self)
        out = np.empty(stop - start, np.int32)
        shard = int(np.searchsorted(self._borders, start, side="right")) - 1
        done = 0
        while done < len(out):
            begin = start + done - int(self._borders[shard])
            part = self._map(shard)[begin : begin + len(out) - done]
            self._expect_tokens(part)
            out[done : done + len(part)] = part
            done += len(part)
            shard += 1
        return out

    def _expect_tokens(self, tokens: npt.NDArray[Any]) -> None:
        """Raise a ValueError for tokens that the vocabulary lacks: hashes that were made of such ones are right."""
        if self.folder is None or not len(tokens):
            return
        size = self.manifest["tokenizer"]["vocab_size"]
        if (most := int(tokens.max())) >= size:
            raise ValueError(
                f"data: expected tokens below the vocabulary's size {size}, {str(self.folder)!r} holds {most}. "
                "It was changed after it was written; remove the folder and prepare the corpus again."
            )

    @property
    def documents(self) -> int:
        return self.manifest["documents"] if self.folder is not None else len(self.document_starts)

    @cached_property
    def fingerprint(self) -> str:
        if self.folder is not None:
            return self.manifest["fingerprint"]
        tokens, starts = self._map(0), self.document_starts
        hasher = hashlib.sha256(np.ascontiguousarray(tokens).data)
        if len(starts) > 1:
            hasher.update(starts.astype("<i8").tobytes())
        return hasher.hexdigest()

    @cached_property
    def document_starts(self) -> npt.NDArray[np.int64]:
        if self._starts is not None:
            return self._starts
        parts = []
        for number, shard in enumerate(self._shards):
            assert self.folder is not None
            file = self.folder / shard.documents_file
            most = shard.documents * _END.itemsize
            content = read_bytes(file, "data", most)
            ends = np.frombuffer(content, _END, len(content) // _END.itemsize).astype(np.int64)
            starts = np.concatenate([[0], ends[:-1]])
            if len(ends) != shard.documents or (ends <= starts).any() or ends[-1] != shard.tokens:
                raise ValueError(
                    f"data: {str(file)!r} does not hold the ends of "
                    f"{shard.documents} documents. It is damaged; remove the folder and prepare the corpus again."
                )
            parts.append(starts + self._borders[number])
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def verify(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Read every byte and compare its file's SHA-256 with the manifest's; ``progress(bytes done, bytes in all)``.

        Several files are read at a time, so that a processor with several cores is as fast as its disk; ``progress`` is
        called by one thread at a time, not always by the caller's.

        Raises:
            ValueError: files that are missing, truncated, unreadable or changed, all of them named.
        """
        if self.folder is not None:
            _KIND.verify(self.folder, _files_of(self._shards), progress)

    def _map(self, shard: int) -> npt.NDArray[Any]:
        mapped = self._maps[shard]
        if mapped is None:
            assert self.folder is not None
            path = self.folder / self._shards[shard].file
            _KIND.expect_lengths(self.folder, self._shards[shard].files())  # gone since the corpus was opened
            mapped = self._maps[shard] = np.memmap(path, _DTYPES[self.manifest["dtype"]], "r").view(
                np.ndarray
            )
        return mapped

    def __getstate__(self) -> dict[str, Any]:
        """Another process maps the shards anew: their content is not sent to it."""
        state = dict(self.__dict__)
        if self.folder is not None:
            state["_maps"] = [None] * len(self._shards)
            state.pop("document_starts", None)
        return state


def _files_of(shards: Sequence[Shard]) -> dict[str, FileEntry]:
    return {name: entry for shard in shards for name, entry in shard.files().items()}
