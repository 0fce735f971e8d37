"""Reading files into a memory that is kept: ``trailmark read``, which goes on where it was stopped."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from trailmark import untrusted
from trailmark.data.corpus import Tokens
from trailmark.evaluation.subject import Subject
from trailmark.files import sha256_of
from trailmark.memory import ChunkCache, saved
from trailmark.trace.file import TraceFile
from trailmark.trace.texts import source_of, sources_of, tokens_after

_SAVE_SECONDS = 300.0  # between savings of a long reading


class Reader:
    """Reads files one after the other into the memory of one folder.

    The memory's notes say which files it holds and how far the last one was read, so that the same command
    goes on, and another file is added. Nothing else can write in the folder until :meth:`close`; it is a context too.

    Args:
        subject: the model and its tokenizer.
        folder: of the memory; one that is there is read on.
        memory_dtype: of keys and values of a new memory, or of landmark vectors where it keeps tokens; None: the
            model's.
        progress: called now and then with the reader.
        take: reads tokens [1, T] into the memory, and tells now and then how many and T; None: the model does. A
            server's takes turns with its answers.
        trace: a file for what each chunk read and what each token cost (docs/trace.md), from the memory's first token
            on; it takes both forwards in full, where a memory alone takes the lower layers.
        memory_tier: of a new memory: "disk" (keys and values), or "tokens".

    Attributes:
        seconds, tokens_read: of reading, by this process.
        tokens_left: of the file that is being read, about: as many tokens a byte as it has had.
        tokens_saved: of all files, in the folder.

    Raises:
        ValueError: a memory of another model, a damaged one, or one that another process reads into; as
            :class:`trailmark.trace.file.TraceFile`.
    """

    def __init__(
        self,
        subject: Subject,
        folder: Path,
        memory_dtype: torch.dtype | None = None,
        progress: Callable[[Reader], None] = lambda reader: None,
        trace: Path | None = None,
        take: Callable[[torch.Tensor, ChunkCache, Callable[[int, int], None]], object] | None = None,
        memory_tier: str = "disk",
    ) -> None:
        self.subject, self.folder, self.progress = subject, folder, progress
        model = subject.model
        self._take = take
        self._new = not folder.exists()
        self._held = saved.hold(folder)
        self.trace: TraceFile | None = None
        try:
            if (folder / saved.MANIFEST).exists():
                self.cache: ChunkCache = model.load_cache(folder, memory_tier)
                if memory_dtype is not None and self.cache.memory.store is None:  # no chunk was kept yet
                    self.cache.memory.dtype = memory_dtype
            else:
                self.cache = model.new_cache(memory_tier, memory_folder=folder, memory_dtype=memory_dtype)
            sources_of(self.cache.notes, folder)
            if trace is not None:
                self.trace = TraceFile(trace, subject, self.cache, folder, memory_dtype)
        except BaseException:
            self.close()
            raise
        self.path = Path()
        self.seconds, self.tokens_read, self.tokens_left = 0.0, 0, 0
        self.tokens_saved = self.num_tokens
        self._saved_at = time.monotonic()

    def close(self) -> None:
        """Let others write in the folder; one that was made, and in which nothing was written, is removed."""
        try:
            if self.trace is not None:
                self.trace.close()
        finally:
            with contextlib.suppress(OSError):  # there is something in it
                if self._new:
                    self.folder.rmdir()
            self._held.__exit__()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def sources(self) -> list[dict[str, Any]]:
        """Of each file what :class:`trailmark.trace.texts.Source` says."""
        found: list[dict[str, Any]] = self.cache.notes.setdefault("sources", [])
        return found

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_read / max(self.seconds, 1e-9)

    @property
    def num_tokens(self) -> int:
        """In memory, of all files."""
        return self.cache.get_seq_length()

    def read(self, path: Path) -> bool:
        """Read a file, or the rest of it; False: it was read before. What was read is saved whatever happens.

        Raises:
            ValueError: the file has changed since it was read; another one was not read to its end; no text.
        """
        self.path = path
        name = os.path.realpath(path)  # unlike resolve() it bears a link to itself
        source = next((s for s in self.sources if s["path"] == name), None) or self._moved(path, name)
        if source is not None and source["done"]:
            self._expect_unchanged(path, source)
            return False
        if source is None:
            unfinished = [s["path"] for s in self.sources if not s["done"]]
            if unfinished:
                raise ValueError(
                    f"file: expected {unfinished[0]!r}, which this memory holds in part, got {name!r}. Read that to "
                    "its end first, or choose another --memory."
                )
            source = {"path": name, "tokens": 0, "sha256": hashlib.sha256().hexdigest(), "done": False}
        began = self.num_tokens
        try:
            for tokens in self._pieces(path, source):
                counted = _Counted(self, source, tokens)
                try:
                    self._take_in(tokens, path, source, counted)
                finally:  # also of a piece that was read in part
                    counted.add()
                self._tell()
            source |= {"done": True, "file_sha256": self._bytes_digest.hexdigest()}
        finally:
            if self.num_tokens > began or source["done"]:
                self.save()
        return True

    def _tell(self) -> None:
        self.progress(self)
        if time.monotonic() - self._saved_at > _SAVE_SECONDS:
            self.save()

    def _moved(self, path: Path, name: str) -> dict[str, Any] | None:
        """What was read of this file while it lay where nothing lies now; from here on it is known as ``name``."""
        gone = [source for source in self.sources if not os.path.lexists(source["path"])]
        if not gone or not path.is_file():  # what is no file is told by who reads it
            return None
        untrusted.expect_regular(path, "file", links=True)
        sha256 = sha256_of(path)
        for source in gone:
            if self._was_read(path, source, sha256):
                source["path"] = name
                self.save()
                return source
        return None

    def _was_read(self, path: Path, source: dict[str, Any], sha256: str) -> bool:
        """Whether a file with that hash is what ``source`` says of one, as far as that was read."""
        if source["done"] and (known := source.get("file_sha256")) is not None:
            return bool(sha256 == known)
        try:
            more = next(self._tokens(path, source), None)
        except ValueError:
            return False
        return more is None or not source["done"]  # of an older memory's no more is left

    def _expect_unchanged(self, path: Path, source: dict[str, Any]) -> None:
        """Compare a file with what was read of it; the memory of one that is gone is all that there is."""
        with contextlib.suppress(FileNotFoundError):
            untrusted.expect_regular(path, "file", links=True)
            if not self._was_read(path, source, sha256_of(path)):
                raise ValueError(
                    f"file: {str(path)!r} has changed since it was read: this memory holds what it was then. Read it "
                    "anew into another --memory; to add it to this one as another text, give it another name."
                )

    def _tokens(self, path: Path, source: dict[str, Any]) -> Iterator[Tokens]:
        """What was not read yet of a file."""
        self._digest, self._bytes_digest, self._looked = hashlib.sha256(), hashlib.sha256(), 0
        way_out = "Read it into another --memory."

        def look(block: bytes) -> None:
            self._bytes_digest.update(block)
            self._looked += len(block)

        first = not self.sources or source["path"] == self.sources[0]["path"]
        begin = self.subject.beginning if first else ()  # a text's beginning: the memory's
        return tokens_after(path, self.subject.tokenizer, source, self._digest, "file", way_out, look, begin)

    def _pieces(self, path: Path, source: dict[str, Any]) -> Iterator[Tokens]:
        given = source["tokens"]
        size = path.stat().st_size if path.is_file() else 0  # once: a file may be replaced while it is read
        for tokens in self._tokens(path, source):
            given += len(tokens)
            self.tokens_left = given * max(size, self._looked) // max(1, self._looked) - source["tokens"]
            if self.trace is None:
                yield tokens
            else:
                yield from self.trace.tracer.pieces(tokens)

    def _take_in(self, tokens: Tokens, path: Path, source: dict[str, Any], counted: _Counted) -> None:
        if self.trace is None:
            ids = torch.from_numpy(tokens).long()[None].to(self.subject.model.device)

            def told(done: int, total: int) -> None:  # a piece of a file may take a large model an hour
                counted.add()
                if done < total:
                    self._tell()
                    counted.leave_out()

            if self._take is None:
                self.subject.model.read(ids, self.cache, progress=told)
            else:
                self._take(ids, self.cache, told)
            return
        begins = None if source["tokens"] else source_of(path, self.num_tokens)
        self.trace.tracer.feed(tokens, begins)
        self.trace.write()

    def save(self) -> None:
        if self.trace is not None:
            self.trace.save()
        self.cache.save(self.folder, self._held)
        if self.trace is not None:
            self.trace.saved()
        self.tokens_saved = self.num_tokens
        self._saved_at = time.monotonic()


class _Counted:
    """What a memory's notes know of a piece of a file, while it is read."""

    def __init__(self, reader: Reader, source: dict[str, Any], tokens: Tokens) -> None:
        self._reader, self._source, self._tokens = reader, source, tokens
        self._first, self._before = reader.num_tokens, source["tokens"]
        self._since = time.perf_counter()

    def add(self) -> None:
        """What the cache holds by now. Stopped anywhere, it can be called again."""
        reader, source = self._reader, self._source
        known, held = source["tokens"] - self._before, reader.num_tokens - self._first
        more = self._tokens[known:held]
        if len(more):
            digest = reader._digest.copy()
            digest.update(more.tobytes())
            source.update(tokens=self._before + held, sha256=digest.hexdigest())  # in one step
            reader._digest = digest
            reader.tokens_left -= len(more)
            reader.tokens_read += len(more)
        if source["tokens"] and source not in reader.sources:
            reader.sources.append(source)
        now = time.perf_counter()
        reader.seconds += now - self._since
        self._since = now

    def leave_out(self) -> None:
        """What was done since :meth:`add` was no reading."""
        self._since = time.perf_counter()


def expect_dtype(cache: ChunkCache, dtype: torch.dtype | None, folder: Path) -> None:
    """Raise a ValueError where a memory that is read on holds its chunks in another dtype than is asked for."""
    kept = cache.memory.dtype
    if dtype is not None and kept is not None and dtype != kept:
        asked, there = (str(one).removeprefix("torch.") for one in (dtype, kept))
        raise ValueError(
            f"memory_dtype: expected {there}, in which {str(folder)!r} holds its chunks, got {asked}. Leave it out, or "
            "read into another --memory."
        )


def parse_dtype(name: str | None) -> torch.dtype | None:
    """Of settings, which have checked it: "bfloat16" and the like; None stays None."""
    found: torch.dtype | None = None if name is None else getattr(torch, name)
    return found


def resident_bytes() -> int:
    """Of this process, now."""
    return int(psutil.Process().memory_info().rss)
