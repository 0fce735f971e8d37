"""Reading texts with several processes: ``torchrun -m trailmark read``. The memory is that of one process, bit for bit.

The texts are one sequence of pieces, cut where one process would cut them, and stretches of it are dealt out. Each
process tokenizes all of it and reads its own stretches, each a few pieces early (:mod:`trailmark.models.stretches`).
It writes their chunks where they belong in the memory's own file, and says in a folder beside the memory when a stretch
is whole, so that the same command goes on. All then sign what was written, and the first process saves the memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trailmark import __version__
from trailmark.data.corpus import Tokens, tokenizer_fingerprint
from trailmark.evaluation.subject import Subject
from trailmark.files import HeldFolder, remove_folder
from trailmark.memory import ChunkCache, manifest, saved
from trailmark.memory.parts import (
    Part,
    begin_part,
    expect_quiet,
    header_of,
    lies_there,
    put_together,
    records_of,
    save_part,
    sign,
)
from trailmark.memory.tiers.base import tier_named
from trailmark.models.stretches import (
    begin_at,
    carry_on,
    expect_partable,
    keep_from_here,
    tokens_before_chunks,
    tokens_before_end,
    tokens_of_windows,
)
from trailmark.processes import SHARED, by_main, expect_agreed, expect_shared, gathered, share_out
from trailmark.trace.texts import file_tokens
from trailmark.untrusted import brief

_TIERS = ("disk", "tokens")
_PART = re.compile(r"part-([0-9]{6,18})")
STRETCH = (
    1 << 17
)  # tokens: a kill loses at most so many of each process; those read before them are few beside them


class Piece(NamedTuple):
    """Tokens that are read at a time."""

    first: int  # its place in the text
    tokens: Tokens

    @property
    def end(self) -> int:
        return self.first + len(self.tokens)


@dataclass
class Stretch:
    """Pieces that one process reads."""

    number: int
    first: int
    end: int = 0
    digest: Any = field(default_factory=hashlib.sha256)


class PartedReader:
    """The part of one process in reading files into a new memory.

    Args:
        files: read one after the other, as one text.
        folder: of the memory, and beside it that of the parts; on a file system that all processes share.
        rank, world: which of how many processes this is.
        memory_tier, memory_dtype: as for :class:`trailmark.evaluation.reading.Reader`.
        progress: called now and then with the tokens of the text that were passed, by whomever.
        stretch: tokens of a stretch, at least.

    Raises:
        ValueError: a model whose memory depends on more than windows, or a memory that is there already.
    """

    def __init__(
        self,
        subject: Subject,
        files: Sequence[Path],
        folder: Path,
        rank: int,
        world: int,
        *,
        memory_tier: str = "disk",
        memory_dtype: torch.dtype | None = None,
        progress: Callable[[int], None] = lambda tokens: None,
        stretch: int = STRETCH,
    ) -> None:
        expect_partable(subject.model)
        if os.path.lexists(folder / manifest.NAME):
            raise ValueError(
                f"memory: expected a new one for several processes, there is one in {str(folder)!r}. Read on with one "
                "process, or choose another --memory."
            )
        if memory_tier not in _TIERS:
            raise ValueError(
                f"memory_tier: expected {' or '.join(map(repr, _TIERS))} for several processes, which write into one "
                f"file, got {memory_tier!r}. Read with one process."
            )
        self.subject, self.rank, self.world = subject, rank, world
        self.folder = folder = Path(os.path.abspath(folder))
        self.files = list(dict.fromkeys(os.path.realpath(path) for path in files))
        self.parts = parts_of(folder)
        self._tier, self._dtype, self._progress, self._stretch = memory_tier, memory_dtype, progress, stretch
        self.sources: list[dict[str, Any]] = []
        self.stretches: list[Stretch] = []
        """All of the text, once it was passed."""
        self.read_tokens, self.seconds = 0, 0.0  # by this process
        model = subject.model
        self._early, self._late = tokens_before_chunks(model), tokens_before_end(model)
        self._filling = tokens_of_windows(model)
        self._recent: deque[Piece] = deque()  # the pieces that a reading may begin with
        self._beginning: ChunkCache | None = None

    @cached_property
    def agreed(self) -> dict[str, Any]:
        """What all processes must have in common, and parts that are put together."""
        return {
            "trailmark": __version__,
            "model": self._empty(None).identity(),
            "tokenizer": tokenizer_fingerprint(self.subject.tokenizer),
            "memory_tier": self._tier,
            "memory_dtype": str(self._dtype),
            "stretch": self._stretch,
        }

    # --- each process ------------------------------------------------------------------------------------------

    @cached_property
    def whole(self) -> set[Path]:
        """The folders of what this process has read before; to be asked before anyone writes.

        Raises:
            ValueError: one that was damaged.
        """
        found = ((path, _PART.fullmatch(path.name)) for path in self.parts.glob("part-*"))
        own = (path for path, name in found if name and int(name[1]) % self.world == self.rank)
        return {path for path in own if lies_there(path, self.folder)}

    def read(self) -> None:
        """Read the stretches of this process, but those that it read before.

        Raises:
            ValueError: no text; a part that another run left, or that was damaged; no space.
        """
        with contextlib.ExitStack() as stack:
            self._read(stack)

    def _read(self, stack: contextlib.ExitStack) -> None:
        """``stack`` closes the memory of a stretch."""
        stretch, cache = None, None
        for piece in self._pieces():
            begins = piece.first % self._chunk_size == 0
            if stretch is None or (begins and piece.first - stretch.first >= self._stretch):
                if stretch is not None:
                    self._end(stretch, cache)
                    stack.close()
                stretch = Stretch(len(self.stretches), piece.first)
                self.stretches.append(stretch)
                if (cache := self._begin(stretch)) is not None:
                    stack.callback(_close, cache)
            stretch.end = piece.end
            stretch.digest.update(piece.tokens.tobytes())
            if cache is not None:
                self._take(piece, cache)
            self._see_sinks(piece)
            self._recent.append(piece)
            self._forget()
            self._progress(piece.end)
        assert stretch is not None
        self._end(stretch, cache)

    @property
    def _chunk_size(self) -> int:
        size: int = self.subject.model.config.chunk_size
        return size

    def _pieces(self) -> Iterator[Piece]:
        """The text, in the pieces in which one process reads it."""
        model, S, first = self.subject.model, self._chunk_size, 0
        for number, name in enumerate(self.files):
            digest, of_bytes, count = hashlib.sha256(), hashlib.sha256(), 0
            begin = () if number else self.subject.beginning
            for tokens in file_tokens(Path(name), self.subject.tokenizer, begin, of_bytes.update):
                digest.update(tokens.tobytes())
                count += len(tokens)
                while len(tokens):
                    begun = max(first, model.config.num_sinks)  # sinks are read by themselves
                    size = begun - first + model.reading_piece() - begun % S
                    yield Piece(first, tokens[:size])
                    first, tokens = first + len(tokens[:size]), tokens[size:]
            told = {"sha256": digest.hexdigest(), "file_sha256": of_bytes.hexdigest()}
            self.sources.append({"path": name, "tokens": count, "done": True} | told)

    def _see_sinks(self, piece: Piece) -> None:
        model = self.subject.model
        if piece.first < model.config.num_sinks:
            self._beginning = model.read(_as_ids(piece.tokens, model), self._beginning)

    def _forget(self) -> None:
        """Let go of pieces with which no reading begins any more."""
        for _ in range(self._place_to_begin(self._recent[-1].end, self._late)):
            self._recent.popleft()

    def _place_to_begin(self, end: int, tokens: int) -> int:
        """With which of the recent pieces a reading begins that has full windows ``tokens`` before ``end``.

        It is a piece that begins with a chunk, away from the sinks; where none does, the first.
        """
        sinks, full, places = self.subject.model.config.num_sinks, False, list(self._recent)
        latest = end - tokens  # where some piece must begin with full windows
        for n in range(len(places) - 1, -1, -1):
            first = places[n].first
            if (
                full
                and first <= latest - self._filling
                and first % self._chunk_size == 0
                and first >= 2 * sinks
            ):
                return n
            if not full and first <= latest:
                full, latest = True, first
        return 0

    def _begun_before(self, end: int, tokens: int) -> ChunkCache:
        """A cache that has read the text up to ``end``, as if it had read all of it from ``tokens`` before on."""
        pieces = list(self._recent)[self._place_to_begin(end, tokens) :]
        model = self.subject.model
        # what it reads of chunks is not kept
        cache: ChunkCache = model.new_cache(self._tier if tier_named(self._tier).keeps_tokens else "device")
        begin_at(cache, pieces[0].first if pieces else 0, model.config, self._beginning)
        for piece in pieces:
            model.read(_as_ids(piece.tokens, model), cache)
        return cache

    def _folder(self, stretch: Stretch) -> Path:
        return self.parts / f"part-{stretch.number:06}"

    @cached_property
    def _planes(self) -> int:
        planes: int = self._empty(None).memory.planes
        return planes

    def _part(self, stretch: Stretch) -> Part:
        first, end = stretch.first // self._chunk_size, stretch.end // self._chunk_size
        return Part(self._folder(stretch), first, end - first)

    def _begin(self, stretch: Stretch) -> ChunkCache | None:
        """A cache for a stretch that is to be read by this process."""
        if stretch.number % self.world != self.rank:
            return None
        if self._folder(stretch) in self.whole:
            return None
        cache = self._begun_before(stretch.first, self._early)
        empty = self._empty(self.folder)
        begin_part(empty.memory, stretch.first // self._chunk_size)
        keep_from_here(cache, empty)
        return cache

    def _empty(self, folder: Path | None) -> ChunkCache:
        cache: ChunkCache = self.subject.model.new_cache(
            self._tier, memory_folder=folder, memory_dtype=self._dtype
        )
        return cache

    def _take(self, piece: Piece, cache: ChunkCache) -> None:
        began = time.perf_counter()
        self.subject.model.read(_as_ids(piece.tokens, self.subject.model), cache)
        self.read_tokens += len(piece.tokens)
        self.seconds += time.perf_counter() - began

    def _end(self, stretch: Stretch, cache: ChunkCache | None) -> None:
        """Keep what was read of a stretch; or see that what was kept before is of this text."""
        if cache is not None:
            save_part(cache.memory, cache.begun(1).memory, self._folder(stretch), self._header(stretch))
        elif stretch.number % self.world == self.rank:
            self._expect_of_this_text(stretch)

    def _header(self, stretch: Stretch) -> dict[str, Any]:
        return self.agreed | {
            "first": stretch.first,
            "end": stretch.end,
            "sha256": stretch.digest.hexdigest(),
        }

    def _expect_of_this_text(self, stretch: Stretch) -> None:
        folder, expected = self._folder(stretch), self._header(stretch)
        found = header_of(folder)
        wrong = [name for name in expected if found.get(name) != expected[name]]
        if wrong:
            raise ValueError(
                f"parts: expected {wrong[0]} {brief(expected[wrong[0]])} in {str(folder)!r}, which process "
                f"{stretch.number % self.world} read, got {brief(found.get(wrong[0]))}: another text or model, or "
                f"other options. Remove {str(self.parts)!r} and read again, or choose another --memory."
            )
        records_of(found, self._part(stretch), self._planes)

    # --- once all have read --------------------------------------------------------------------------------------

    def expect_parts(self) -> None:
        """Raise a ValueError where a part is missing or of another text, named by the process whose it is.

        Or where a process of an earlier start still writes.
        """
        expect_quiet(self.folder)
        for stretch in self.stretches:
            if not os.path.lexists(self._folder(stretch) / manifest.NAME):
                raise ValueError(
                    f"parts: expected {str(self._folder(stretch))!r}, which process {stretch.number % self.world} "
                    "read, it is not there. Do all processes write to one file system? The same command goes on."
                )
            self._expect_of_this_text(stretch)

    def sign(self, number: int) -> dict[int, str]:
        """Compare every ``world``-th block of all chunks, from ``number`` on, with what was written: its SHA-256.

        Raises:
            ValueError: chunks that were damaged, named by their part.
        """
        return sign(self.folder, [*map(self._part, self.stretches)], self._planes, number, self.world)

    def join(self, held: HeldFolder, sha256: Mapping[int, str]) -> ChunkCache:
        """In the first process: save the memory in its folder, which is ``held``, and remove the parts.

        Args:
            sha256: what all have signed.

        Raises:
            ValueError: chunks that are no whole ones of this model; no space.
        """
        model, cache = self.subject.model, self._empty(self.folder)
        parts, expected = [*map(self._part, self.stretches)], model._expected_state()
        size = put_together(cache.memory, self.folder, parts, sha256, model.device, expected)
        end = self._recent[-1].end
        carry_on(cache, self._begun_before(end, self._late), size)
        cache.notes["sources"] = self.sources
        cache.save(self.folder, held)
        remove_parts(self.folder)
        return cache


def parts_of(folder: Path) -> Path:
    """Where processes that read a text into ``folder`` say which stretches of it are whole."""
    folder = Path(os.path.abspath(folder))
    return folder.with_name(folder.name + ".parts")


def remove_parts(folder: Path) -> None:
    """Remove what said which stretches of the memory in ``folder`` are whole; a folder with anything else stays."""
    parts = parts_of(folder)
    if parts.is_dir() and all(
        _PART.fullmatch(path.name) or path.name.startswith(SHARED) for path in parts.iterdir()
    ):
        remove_folder(parts)


def read_with_all(reader: PartedReader) -> ChunkCache | None:
    """Read the texts with all processes, which know each other; the memory in the first of them, None in the others.

    Raises:
        ValueError: as :class:`PartedReader`; processes of other weights, versions or options, or that do not share the
            folder.
    """
    expect_agreed(reader.agreed)
    if wrong := next(filter(None, gathered(_find_whole(reader))), None):
        raise ValueError(wrong)
    with contextlib.ExitStack() as stack:
        expect_shared("memory", reader.parts)
        held: list[HeldFolder] = []
        # before anyone writes there
        by_main(lambda: held.append(stack.enter_context(saved.hold(reader.folder))))
        reader.read()
        gathered(None)  # all have read
        by_main(reader.expect_parts)
        sha256: dict[int, str] = {}
        share_out(range(reader.world), lambda numbers: (reader.sign(n) for n in numbers), sha256.update)
        joined: list[ChunkCache] = []
        by_main(lambda: joined.append(reader.join(held[0], sha256)))
    return joined[0] if joined else None


def _find_whole(reader: PartedReader) -> str | None:
    """What is wrong with what the process has read before."""
    try:
        _ = reader.whole
    except ValueError as error:
        return str(error)
    return None


def _close(cache: ChunkCache) -> None:
    if (store := cache.memory.store) is not None:
        store.close()


def _as_ids(tokens: Tokens, model: Any) -> torch.Tensor:
    return torch.from_numpy(tokens).long()[None].to(model.device)
