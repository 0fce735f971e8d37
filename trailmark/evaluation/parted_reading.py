"""Reading texts with several processes: ``torchrun -m trailmark read``. The memory is that of one process, bit for bit.

The texts are one sequence of pieces, cut where one process would cut them. All count its tokens together, and each
takes a run of those stretches that are missing. It tokenizes all of the text and begins its run a few pieces early
(:mod:`trailmark.models.stretches`). It writes chunks where they belong in the memory's own file, and says in a folder
beside the memory when a stretch is whole, so that the same command goes on; with the last one it keeps what one process
carries on from the text's end. All then sign what was written, and the first process saves the memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from trailmark import __version__
from trailmark.data.corpus import Tokens, text_pieces, text_tokens, tokenizer_fingerprint
from trailmark.evaluation.subject import Subject
from trailmark.files import HeldFolder, remove_folder
from trailmark.memory import CacheState, ChunkCache, manifest, saved
from trailmark.memory.chunks import ChunkMemory, MemorySize
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
    carried_on,
    expect_partable,
    keep_from_here,
    tokens_before_chunks,
    tokens_before_end,
    tokens_of_windows,
)
from trailmark.processes import (
    SHARED,
    Count,
    LauncherError,
    by_main,
    connected,
    expect_agreed,
    expect_shared,
    gathered,
    rank,
    share_out,
    told_by,
    wait_for_all,
)
from trailmark.trace.texts import file_tokens
from trailmark.untrusted import brief

Result = TypeVar("Result")
_TIERS = ("disk", "tokens")
_PART = re.compile(r"part-([0-9]{6,18})")
_FORMAT = 1  # of parts: another one where a version writes other bytes for the same text, so that these are not mixed
STRETCH = 1 << 17  # tokens: a kill loses at most so many of each process
_TELL_SECONDS = 0.25  # between looks at how far the others are


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
    reader: int | None = None
    """The process that is to read it; None: it was read before."""
    digest: Any = field(default_factory=hashlib.sha256)


class PartedReader:
    """The part of one process in reading files into a new memory.

    Args:
        files: read one after the other, as one text.
        folder: of the memory, and beside it that of the parts; on a file system that all processes share.
        rank, world: which of how many processes this is.
        memory_tier, memory_dtype: as for :class:`trailmark.evaluation.reading.Reader`.
        counted: called now and then with the tokens that this process has counted.
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
        counted: Callable[[int], None] = lambda tokens: None,
        stretch: int = STRETCH,
    ) -> None:
        expect_partable(subject.model)
        self.folder = folder = Path(os.path.abspath(folder))
        self.expect_new()
        if memory_tier not in _TIERS:
            raise ValueError(
                f"memory_tier: expected {' or '.join(map(repr, _TIERS))} for several processes, which write into one "
                f"file, got {memory_tier!r}. Read with one process."
            )
        self.subject, self.rank, self.world = subject, rank, world
        self.files = list(dict.fromkeys(os.path.realpath(path) for path in files))
        self.parts = parts_of(folder)
        self._tier, self._dtype, self._counted, self._stretch = memory_tier, memory_dtype, counted, stretch
        self.sources: list[dict[str, Any]] = []
        self.stretches: list[Stretch] = []
        """All of the text, once they were dealt out."""
        self.missing_tokens = 0
        """Of those that nobody has read before."""
        self.read_tokens, self.read_twice, self.seconds = 0, 0, 0.0  # by this process; twice: before its runs
        self._counts: list[int] = []  # tokens of each piece of the texts
        model = subject.model
        self._early, self._late = tokens_before_chunks(model), tokens_before_end(model)
        self._filling = tokens_of_windows(model)
        self._recent: deque[Piece] = deque()  # the pieces that a reading may begin with
        self._beginning: ChunkCache | None = None

    @cached_property
    def agreed(self) -> dict[str, Any]:
        """What all processes must have in common, and parts that are put together."""
        return {
            "format": _FORMAT,
            "model": self._empty(None).identity(),
            "tokenizer": tokenizer_fingerprint(self.subject.tokenizer),
            "memory_tier": self._tier,
            "memory_dtype": str(self._dtype),
            "stretch": self._stretch,
        }

    # --- before anyone writes ----------------------------------------------------------------------------------

    def expect_new(self) -> None:
        """Raise a ValueError where the memory is there: others may save it until its folder is held."""
        if os.path.lexists(self.folder / manifest.NAME):
            raise ValueError(
                f"memory: expected a new one for several processes, there is one in {str(self.folder)!r}. Read on with "
                "one process, or choose another --memory."
            )

    def whole(self) -> set[int]:
        """The stretches of this process's share that were read before.

        Raises:
            ValueError: one that was damaged.
        """
        found = ((path, _PART.fullmatch(path.name)) for path in self.parts.glob("part-*"))
        mine = (
            (path, int(name[1])) for path, name in found if name and int(name[1]) % self.world == self.rank
        )
        return {number for path, number in mine if lies_there(path, self.folder)}

    def count(self) -> dict[int, int]:
        """The tokens of those pieces of the texts that are this process's share, by number.

        Raises:
            ValueError: no text.
        """
        counts: dict[int, int] = {}
        counted = 0
        texts = (text for name in self.files for text in text_pieces(Path(name)))
        for number, text in enumerate(texts):
            if number % self.world == self.rank:
                counts[number] = len(text_tokens(text, self.subject.tokenizer))
                counted += counts[number]
                self._counted(counted)
        if 0 in counts:
            counts[0] += len(self.subject.beginning)
        return counts

    def deal(self, found: Sequence[set[int]], counted: Sequence[dict[int, int]]) -> None:
        """Cut the text into stretches, and give each process a run of those that are missing.

        Args:
            found, counted: by each process, see :meth:`whole` and :meth:`count`.
        """
        counts = {number: count for one in counted for number, count in one.items()}
        self._counts = [counts[number] for number in range(len(counts))]
        first = 0
        for count in self._counts:
            for size in self._sizes(first, count):
                begins = first % self._chunk_size == 0
                if not self.stretches or (begins and first - self.stretches[-1].first >= self._stretch):
                    self.stretches.append(Stretch(len(self.stretches), first))
                first += size
                self.stretches[-1].end = first
        whole = {number for one in found for number in one}
        missing = [stretch for stretch in self.stretches if stretch.number not in whole]
        self.missing_tokens, before = sum(stretch.end - stretch.first for stretch in missing), 0
        for stretch in missing:  # by its middle, among all that is missing
            size = stretch.end - stretch.first
            stretch.reader = ((2 * before + size) * self.world - 1) // (2 * self.missing_tokens)
            before += size

    # --- each process ------------------------------------------------------------------------------------------

    def read(self, passed: Callable[[int], None] = lambda tokens: None) -> None:
        """Read the stretches of this process.

        Args:
            passed: called after each piece with the tokens that were read of it: 0 of those that others read.

        Raises:
            ValueError: no text, or one that changed meanwhile; a part that another run left; no space.
        """
        with contextlib.ExitStack() as stack:
            self._read(passed, stack)

    def _read(self, passed: Callable[[int], None], stack: contextlib.ExitStack) -> None:
        """``stack`` closes the memory of a stretch."""
        left, stretch, cache = iter(self.stretches), Stretch(-1, 0), None
        for piece in self._pieces():
            if piece.first == stretch.end:
                stretch = next(left)
                with stack.pop_all():  # a run has another memory for each of its stretches
                    cache = self._begin(stretch, cache)
                if cache is not None:
                    stack.callback(_close, cache.memory)
            stretch.digest.update(piece.tokens.tobytes())
            if cache is not None:
                self._take(piece, cache)
            self._see_sinks(piece)
            self._recent.append(piece)
            self._forget()
            if piece.end == stretch.end:
                self._end(stretch, cache)
            passed(0 if cache is None else len(piece.tokens))

    @property
    def _chunk_size(self) -> int:
        size: int = self.subject.model.config.chunk_size
        return size

    def _sizes(self, first: int, count: int) -> Iterator[int]:
        """Of the pieces in which one process reads so many tokens that begin there."""
        model = self.subject.model
        while count:
            begun = max(first, model.config.num_sinks)  # sinks are read by themselves
            size = min(count, begun - first + model.reading_piece() - begun % self._chunk_size)
            yield size
            first, count = first + size, count - size

    def _pieces(self) -> Iterator[Piece]:
        """The text, in the pieces in which one process reads it."""
        first, counts = 0, iter(self._counts)
        for number, name in enumerate(self.files):
            digest, of_bytes, count = hashlib.sha256(), hashlib.sha256(), 0
            begin = () if number else self.subject.beginning
            for tokens in file_tokens(Path(name), self.subject.tokenizer, begin, of_bytes.update):
                if len(tokens) != next(counts, None):
                    raise _changed(name)
                digest.update(tokens.tobytes())
                count += len(tokens)
                for size in self._sizes(first, len(tokens)):
                    yield Piece(first, tokens[:size])
                    first, tokens = first + size, tokens[size:]
            told = {"sha256": digest.hexdigest(), "file_sha256": of_bytes.hexdigest()}
            self.sources.append({"path": name, "tokens": count, "done": True} | told)
        if next(counts, None) is not None:
            raise _changed(self.files[-1])

    def _see_sinks(self, piece: Piece) -> None:
        model = self.subject.model
        if piece.first < model.config.num_sinks:
            self._beginning = model.read(_as_ids(piece.tokens, model), self._beginning)

    def _forget(self) -> None:
        """Let go of pieces with which no reading begins any more."""
        _, begin = self._place_to_begin(self._recent[-1].end, self._late)
        while self._recent[0].end <= begin:
            self._recent.popleft()

    def _place_to_begin(self, end: int, tokens: int) -> tuple[int, int]:
        """With which of the recent pieces a reading begins that has its shapes ``tokens`` before ``end``.

        And the token from which on windows are filled before that, away from the sinks. Both begin with a chunk; where
        no piece does so, the reading begins with the text.
        """
        places, sinks = list(self._recent), self.subject.model.config.num_sinks
        for n in range(len(places) - 1, -1, -1):
            first = places[n].first
            least = max(places[0].first, 2 * sinks) + self._filling
            if least <= first <= end - tokens and first % self._chunk_size == 0:
                return n, first - self._filling
        return 0, 0

    def _begun_before(self, end: int, tokens: int) -> ChunkCache:
        """A cache that has read the text up to ``end``, as if it had read all of it from ``tokens`` before on."""
        places, (n, begin) = list(self._recent), self._place_to_begin(end, tokens)
        model = self.subject.model
        # what it reads of chunks is not kept
        cache: ChunkCache = model.new_cache(self._tier if tier_named(self._tier).keeps_tokens else "device")
        begin_at(cache, begin, model.config, self._beginning)
        filling = [piece.tokens[max(0, begin - piece.first) :] for piece in places[:n] if piece.end > begin]
        for tokens_read in ([np.concatenate(filling)] if filling else []) + [x.tokens for x in places[n:]]:
            model.read(_as_ids(tokens_read, model), cache)
            self.read_twice += len(tokens_read)
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

    def _begin(self, stretch: Stretch, cache: ChunkCache | None) -> ChunkCache | None:
        """A cache for a stretch that is to be read by this process; ``cache`` has read the one before it."""
        if stretch.reader != self.rank:
            return None
        if cache is None:
            own = [other for other in self.stretches[stretch.number :] if other.reader == self.rank]
            tokens = self._early
            if own[-1] is self.stretches[-1]:  # whose end is to be kept
                tokens = max(tokens, stretch.first - own[-1].end + self._late)
            cache = self._begun_before(stretch.first, tokens)
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
            end: CacheState | None = None
            if stretch is self.stretches[-1]:
                chunks = np.array([stretch.end // self._chunk_size])
                end = carried_on(cache.begun(1), MemorySize(chunks, 0))
            size = cache.begun(1).memory
            save_part(cache.memory, size, self._folder(stretch), self._header(stretch), end)
        elif stretch.reader is None and stretch.number % self.world == self.rank:
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
                f"parts: expected {wrong[0]} {brief(expected[wrong[0]])} in {str(folder)!r}, which "
                f"{_who(stretch)} read, got {brief(found.get(wrong[0]))}: another text, model or "
                f"version, or other options. Remove {str(self.parts)!r} and read again, or choose another --memory."
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
                    f"parts: expected {str(self._folder(stretch))!r}, which {_who(stretch)} read, it is not "
                    "there. Do all processes write to one file system? The same command goes on."
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
        size, end = put_together(
            cache.memory, self.folder, parts, sha256, model.device, expected, self._empty(None).begun
        )
        cache.state = replace(end, memory=size)
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


def read_with_all(
    reader: PartedReader, progress: Callable[[int, float], None] = lambda tokens, seconds: None
) -> ChunkCache | None:
    """Read the texts with all processes, which know each other; the memory in the first of them, None in the others.

    Args:
        progress: called now and then with the tokens that all have read together, and in how many seconds since
            nobody had read any.

    Raises:
        ValueError: as :class:`PartedReader`, of whichever process, in all of them and with its number; processes of
            other weights, versions or options, or that do not share the folder.
    """
    expect_agreed(reader.agreed | {"version": __version__})
    with contextlib.ExitStack() as stack:
        held: list[HeldFolder] = []

        def hold() -> None:
            made = [folder for folder in (reader.parts, reader.folder) if not folder.exists()]
            held.append(stack.enter_context(saved.hold(reader.folder)))
            stack.callback(_remove_empty, made)
            reader.expect_new()

        by_main(hold)  # before what may take long: until then another start may save a memory there
        expect_shared("memory", reader.parts)
        found = _all_or_none(reader.whole)
        reader.deal(found, _all_or_none(reader.count))
        together = _Together(progress)
        _all_or_none(lambda: together.watch(reader.read), together.wait)
        by_main(reader.expect_parts)
        sha256: dict[int, str] = {}
        share_out(range(reader.world), lambda numbers: (reader.sign(n) for n in numbers), sha256.update)
        joined: list[ChunkCache] = []
        by_main(lambda: joined.append(reader.join(held[0], sha256)))
    return joined[0] if joined else None


def _all_or_none(
    action: Callable[[], Result], meanwhile: Callable[[], object] = lambda: None
) -> list[Result]:
    """What ``action`` returns in each process; where it fails in one, all fail with what that one says.

    ``meanwhile`` is called now and then by who waits for the others.
    """
    made: Result | None = None
    failed: Exception | None = None
    try:
        made = action()
    except Exception as error:  # the others wait for an answer
        failed = error
    told = None if failed is None or isinstance(failed, _Stopped) else told_by(rank(), failed)
    wait_for_all(meanwhile, _TELL_SECONDS)
    every = gathered((made, told))
    if failed is not None and not (connected() and isinstance(failed, ValueError | _Stopped)):
        raise failed
    if (wrong := next((told for _, told in every if told is not None), None)) is not None:
        raise ValueError(wrong) from failed
    return [one for one, _ in every]


class _Stopped(Exception):
    """Another process has failed."""


class _Together:
    """How far all processes are, and whether one has failed: then nobody goes on for nothing."""

    def __init__(self, progress: Callable[[int, float], None]) -> None:
        self._progress, self._began = progress, time.monotonic()
        self._read, self._failures = Count(), Count()
        self._untold, self._told_at = 0, 0.0

    def watch(self, action: Callable[[Callable[[int], None]], None]) -> None:
        """``action`` is given what it is to call with the tokens that it has read since its last call."""
        try:
            action(self._tell)
        except _Stopped:
            raise
        except Exception:
            with contextlib.suppress(LauncherError):  # the others find that out themselves
                self._failures.add(1)
            raise

    def wait(self) -> None:
        """Called now and then by a process that is done."""
        with contextlib.suppress(LauncherError):  # whoever still reads tells it
            self._show()

    def _show(self) -> None:
        read, now = self._read.add(self._untold), time.monotonic()
        self._untold = 0
        if not read:  # before the first token a process may pass over many that were read before
            self._began = now
        self._progress(read, now - self._began)

    def _tell(self, tokens: int) -> None:
        self._untold += tokens
        if (now := time.monotonic()) - self._told_at < _TELL_SECONDS:
            return
        self._told_at = now
        self._show()
        if self._failures.add(0):
            raise _Stopped


def _who(stretch: Stretch) -> str:
    return "an earlier start" if stretch.reader is None else f"process {stretch.reader}"


def _changed(name: str) -> ValueError:
    return ValueError(
        f"file: expected {name!r} to stay as it is while it is read, it has changed. Leave it alone, and run the same "
        "command again."
    )


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # something lies in it, or it is gone
            folder.rmdir()


def _close(memory: ChunkMemory) -> None:
    if memory.store is not None:
        memory.store.close()


def _as_ids(tokens: Tokens, model: Any) -> torch.Tensor:
    return torch.from_numpy(tokens).long()[None].to(model.device)
