"""The trace beside a memory that is read: written as the text is read, and gone on with where the memory does.

``FILE`` holds the lines, ``FILE.state`` what a reading that goes on needs: of the newest save ``state-<n>.safetensors``
and the cache of the forward without retrieval, ``without-<n>``. The memory's notes say which of these belong to it, and
how much of FILE: they are replaced in one step with the memory, last, so a reading that is killed at any moment goes on
from the last save with a trace that fits.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from trailmark.files import expect_writable, lock, read_json, sha256_of, sync_file, sync_folder, write_json
from trailmark.memory import ChunkCache
from trailmark.settings import Settings, from_file, setting
from trailmark.trace.lines import Entry, Read, TracedChunk, TraceSource, encode
from trailmark.trace.texts import trace_header
from trailmark.trace.token_texts import TextState
from trailmark.trace.tracer import Moment, Subject, Tracer, expect_choice, expect_retrieval
from trailmark.untrusted import brief, read_bytes

_OURS = re.compile(r"state-([0-9]+)\.safetensors|without-([0-9]+)")
_MARK = "trace.json"  # in FILE.state: which memory FILE belongs to, and whether that was ever saved
_MOST_STATE = 4 << 30  # bytes: it holds what two chunks read, and two rows of logits
_ANEW = "Read the text anew, with another --memory and another --trace."


@dataclass(frozen=True)
class _Known(Settings):
    """What a memory's notes say of its trace."""

    path: str
    bytes: int = setting(least=0)
    sha256: str = setting()
    chunks: int = setting(least=0)
    source: int = setting(least=-1)
    tokens: int = setting(least=0)
    state: int = setting(least=1)
    state_sha256: str = setting()


@dataclass(frozen=True)
class _Written:
    """How much of the file counts. Replaced as one; what lies behind it is written over."""

    size: int  # bytes
    digest: Any  # their SHA-256
    chunks: int = 0  # in them
    source: int = -1  # first token of the last file named in them

    def misses(self, entry: Entry) -> bool:
        if isinstance(entry, TracedChunk):
            return entry.number >= self.chunks
        return entry.first_token > self.source

    def after(self, entries: list[Entry], lines: bytes) -> _Written:
        digest = self.digest.copy()
        digest.update(lines)
        chunks = max((e.number + 1 for e in entries if isinstance(e, TracedChunk)), default=self.chunks)
        source = max((e.first_token for e in entries if isinstance(e, TraceSource)), default=self.source)
        return _Written(self.size + len(lines), digest, chunks, source)


class TraceFile:
    """The trace of what is read into one memory.

    Args:
        cache: of the memory, loaded or new.
        memory: its folder.
        memory_dtype: of a new memory's keys and values; None: the model's.

    Raises:
        ValueError: a model that retrieves nothing; a memory that was read, or read on, without a trace; another trace
            than this memory's, one that is gone or was changed, or that another process writes; a file that is there
            already.
    """

    def __init__(
        self,
        path: Path,
        subject: Subject,
        cache: ChunkCache,
        memory: Path,
        memory_dtype: torch.dtype | None = None,
    ) -> None:
        expect_retrieval(subject)
        expect_choice(subject)
        if path.is_dir():  # "." too, which has no name
            raise ValueError(f"trace: expected a file, {str(path)!r} is a folder. Name a file in it.")
        self.path, self.folder = path, path.with_name(path.name + ".state")
        self._written: _Written
        self._cache, self._memory, self._open = cache, memory, ExitStack()
        known = cache.notes.get("trace")
        try:
            if known is None:
                self.tracer = self._begin(subject, memory_dtype)
            else:
                self.tracer = self._go_on(subject, known)
                self._mend()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let others write in the file."""
        self._open.close()

    # --- as the text is read ---------------------------------------------------------------------------------

    def write(self) -> None:
        """Add what the tracer finished."""
        entries = [entry for entry in self.tracer.moment.entries if self._written.misses(entry)]
        lines = "".join(map(encode, entries)).encode()
        self._put(lines)
        self._written = self._written.after(entries, lines)
        self.tracer.take()

    def save(self) -> None:
        """Have on the disk what goes with the memory as it is now, and name it in its notes; the memory comes next.

        Behind the lines that are finished stand those of the chunks that are not: so the trace is whole.
        """
        self.write()
        self._put(self._rest())
        sync_file(self._file)
        number = max(self._generations(), default=0) + 1
        state = self.folder / f"state-{number}.safetensors"
        with open(state, "wb") as file:
            file.write(safetensors.torch.save(_tensors(self.tracer.moment)))
            sync_file(file)
        self.tracer.cache_without.save(self.folder / f"without-{number}")
        sync_folder(self.folder)
        self._cache.notes["trace"] = {
            "path": str(self.path.resolve()),
            "bytes": self._written.size,
            "sha256": self._written.digest.hexdigest(),
            "chunks": self._written.chunks,
            "source": self._written.source,
            "tokens": self.tracer.moment.tokens,
            "state": number,
            "state_sha256": sha256_of(state),
        }

    def saved(self) -> None:
        """The memory was saved: what it named before is needed no more."""
        number = self._cache.notes["trace"]["state"]
        self._mark(saved=True)
        for own, path in self._generations().items():
            if own != number:
                for part in path:
                    shutil.rmtree(part) if part.is_dir() else part.unlink()

    def _put(self, lines: bytes) -> None:
        """Behind what counts, in place of what lies there."""
        try:
            self._file.seek(self._written.size)
            self._file.truncate()
            self._file.write(lines)
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def _opened(self, flags: int = 0) -> BinaryIO:
        """The file, until this is closed; nobody else writes in it until then."""
        file = self._open.enter_context(os.fdopen(os.open(self.path, os.O_RDWR | flags, 0o666), "r+b"))
        if not lock(file.fileno()):
            raise ValueError(
                f"trace: another trailmark read is writing {str(self.path)!r}. Wait for it, or choose another --memory "
                "and another --trace."
            )
        return file

    def _rest(self) -> bytes:
        return "".join(map(encode, self.tracer.rest())).encode()

    def _generations(self) -> dict[int, list[Path]]:
        found: dict[int, list[Path]] = {}
        for path in self.folder.iterdir():
            if match := _OURS.fullmatch(path.name):
                found.setdefault(int(match[1] or match[2]), []).append(path)
        return found

    def _mark(self, saved: bool) -> None:
        write_json(self.folder / _MARK, {"memory": str(self._memory.resolve()), "saved": saved}, durable=True)

    # --- beginning and going on ----------------------------------------------------------------------------------

    def _begin(self, subject: Subject, memory_dtype: torch.dtype | None) -> Tracer:
        if self._cache.get_seq_length():
            raise ValueError(
                f"trace: expected a new memory, or one that was read with a trace from its beginning; "
                f"{str(self._memory)!r} was read without. {_ANEW} Or look at its text, which is then read again: "
                f"trailmark explore MODEL --memory {self._memory}"
            )
        mark = read_json(self.folder / _MARK)
        mark = mark if isinstance(mark, dict) else {}
        killed = mark.get("memory") == str(self._memory.resolve()) and mark.get("saved") is False
        # the mark comes before the file: a reading that was killed earlier left no more than an empty folder
        fresh = not mark and not self.path.exists() and not (self.folder.exists() and self._generations())
        if not (fresh or killed):
            raise ValueError(
                f"trace: expected a file that is not there yet, or that of the memory {str(self._memory)!r}, which "
                f"holds nothing; {str(self.path)!r} is there. Choose another one, or remove it and {self.folder.name}."
            )
        expect_writable("trace", self.folder)
        self._mark(saved=False)
        self._file = self._opened(os.O_CREAT)
        self._written = _Written(0, hashlib.sha256())
        header = encode(trace_header(subject, memory_dtype)).encode()
        self._put(header)
        self._written = self._written.after([], header)
        return Tracer(subject, self._cache)

    def _go_on(self, subject: Subject, notes: Any) -> Tracer:
        try:
            known = from_file(_Known, notes)
        except ValueError as error:
            raise ValueError(
                f"trace: the memory {str(self._memory)!r} does not say what belongs to its trace ({error}). {_ANEW}"
            ) from error
        if known.tokens != self._cache.get_seq_length():
            raise ValueError(
                f"trace: expected a memory that was traced to its end, {str(self._memory)!r} was read on without "
                f"--trace after {known.tokens:,} tokens. {_ANEW}"
            )
        digest = hashlib.sha256()
        try:
            self._file = self._opened()
            left = known.bytes
            while left and (block := self._file.read(min(left, 1 << 20))):
                digest.update(block)
                left -= len(block)
        except OSError as error:
            raise ValueError(
                f"trace: cannot go on with {str(self.path)!r}: {error.strerror}. The memory {str(self._memory)!r} was "
                f"read with the trace {known.path!r}: name it. {_ANEW}"
            ) from error
        if left or digest.hexdigest() != known.sha256:
            raise ValueError(
                f"trace: expected {str(self.path)!r} as it was when the memory {str(self._memory)!r} was saved, it is "
                f"another one or was changed (the trace was written to {known.path!r}). {_ANEW}"
            )
        self._written = _Written(known.bytes, digest, known.chunks, known.source)
        state = self.folder / f"state-{known.state}.safetensors"
        try:
            content = read_bytes(state, "trace", _MOST_STATE)
        except OSError as error:
            raise ValueError(
                f"trace: expected {str(state)!r}, which a reading goes on from, cannot read it: {error.strerror}. "
                f"Keep {self.folder.name} beside the trace. {_ANEW}"
            ) from error
        if hashlib.sha256(content).hexdigest() != known.state_sha256:
            raise ValueError(f"trace: {str(state)!r} is damaged. {_ANEW}")
        tracer = Tracer(subject, self._cache)
        try:
            tracer.cache_without = tracer.without.load_cache(self.folder / f"without-{known.state}", "host")
        except ValueError as error:
            raise ValueError(
                f"trace: cannot go on with the forward without retrieval: {error} Keep {self.folder.name} beside the "
                f"trace, as it was. {_ANEW}"
            ) from error
        try:
            tracer.moment = _moment(safetensors.torch.load(content), subject.model.device)
        except (
            KeyError,
            TypeError,
            ValueError,
            IndexError,
            OverflowError,
            safetensors.SafetensorError,
        ) as error:
            raise ValueError(
                f"trace: {str(state)!r} holds something else ({brief(error)}). {_ANEW}"
            ) from error
        return tracer

    def _mend(self) -> None:
        """Behind what counts may be lines of a reading that was killed: then the file is made as it was saved."""
        rest = self._rest()
        self._file.seek(self._written.size)
        if self._file.read(len(rest) + 1) != rest:
            self._put(rest)


# --- a moment as tensors and back -------------------------------------------------------------------------------


def _tensors(moment: Moment) -> dict[str, Tensor]:
    """A moment without entries."""
    assert not moment.entries, "written"
    arrays: dict[str, Any] = {
        name: np.array(getattr(moment, name)) for name in ("tokens", "number", "ids", "widths")
    }
    arrays |= {"losses": moment.losses, "losses_without": moment.losses_without}
    arrays["text"] = np.frombuffer(moment.text.encode(), np.uint8)
    arrays |= {"texts.ids": moment.texts.ids, "texts.skip": np.array(moment.texts.skip)}
    for c, groups in enumerate(moment.reads):
        for g, read in enumerate(groups):
            assert read.rest is None, "not finished"
            for part in ("chunks", "weights", "scores"):
                if (values := getattr(read, part)) is not None:
                    arrays[f"reads.{c}.{g}.{part}"] = values
    found = {name: torch.from_numpy(np.array(values)) for name, values in arrays.items()}
    for name in ("last", "last_without"):
        if (logits := getattr(moment, name)) is not None:
            found[name] = logits.cpu().contiguous()
    return found


def _moment(tensors: dict[str, Tensor], device: torch.device) -> Moment:
    def numbers(name: str) -> Any:
        return tensors[name].numpy()

    reads: dict[int, dict[int, Read]] = {}
    for name in tensors:
        if name.startswith("reads.") and name.endswith(".chunks"):
            own = name.removesuffix(".chunks")
            c, g = map(int, own.split(".")[1:])
            scores = numbers(own + ".scores") if own + ".scores" in tensors else None
            reads.setdefault(c, {})[g] = Read(numbers(name), numbers(own + ".weights"), scores)
    last, last_without = (
        tensors[name].to(device) if name in tensors else None for name in ("last", "last_without")
    )
    return Moment(
        int(numbers("tokens")),
        int(numbers("number")),
        numbers("ids"),
        numbers("losses"),
        numbers("losses_without"),
        numbers("text").tobytes().decode(),
        numbers("widths"),
        TextState(numbers("texts.ids"), int(numbers("texts.skip"))),
        tuple(tuple(reads[c][g] for g in sorted(reads[c])) for c in sorted(reads)),
        last,
        last_without,
    )
