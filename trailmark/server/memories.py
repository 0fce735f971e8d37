"""Saved memories under their names: opened when asked for, written by one at a time, listed and deleted.

A memory is a folder as ``trailmark read`` makes it, with the texts that clients sent in its folder ``texts``. Requests
go on from what was last saved, mapped; who appends has a cache of its own, so that nothing changes that they read.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import secrets
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any, TypeVar
from weakref import WeakValueDictionary

import torch

from trailmark import untrusted
from trailmark.data.corpus import NotText, decoded
from trailmark.evaluation.reading import Reader
from trailmark.files import (
    BusyError,
    NoSpaceError,
    expect_writable,
    is_no_space,
    lock,
    remove_folder,
    remove_leftover_folders,
    sha256_of,
    sync_file,
    sync_folder,
)
from trailmark.memory import ChunkCache, manifest, saved
from trailmark.server.errors import RequestError, internal
from trailmark.server.schemas import MEMORY_NAME
from trailmark.server.served import Served
from trailmark.trace.passages import Passages
from trailmark.trace.texts import sources_of

logger = logging.getLogger("trailmark.server")

T = TypeVar("T")
_NAME = re.compile(MEMORY_NAME)
_TEXTS, _PART = "texts", ".part-"
_PIECE = 16_384  # tokens between two moments at which a reading may be stopped
_MOST_WAITING = 16  # texts that wait for their turn at one memory
_READERS = 4  # memories that are written at once

Progress = Callable[[str, int], None]
"""It is called with a document and the tokens in memory."""


@dataclass
class Opened:
    """A memory as it was last saved.

    Attributes:
        cache: requests go on from branches of it; None: nothing was read yet.
        stamp: of its manifest, which tells that it was saved again.
    """

    cache: ChunkCache | None
    num_tokens: int
    passages: Passages
    num_bytes: int
    stamp: tuple[int, ...]
    _places: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def look(self, work: Callable[[], T]) -> T:
        """What ``work`` gives, which looks for passages, in a thread: one at a time, though who asked may leave."""
        await self._places.acquire()
        task = asyncio.ensure_future(asyncio.to_thread(work))
        task.add_done_callback(lambda _: self._places.release())
        return await asyncio.shield(task)

    def branch(self) -> ChunkCache | None:
        return None if self.cache is None else self.cache.branch()


class Memories:
    """The memories of one folder.

    Args:
        folder: made if there is none.
        models: those that may have written them, by name.
        most_bytes: of what is open, files that are mapped included. Beyond that those used longest ago are closed;
            one that is larger is open alone.
        dtype: of keys and values of new memories; None: their model's.

    Raises:
        ValueError: the folder cannot be written to.
    """

    def __init__(
        self, folder: Path, models: Mapping[str, Served], most_bytes: int, dtype: torch.dtype | None = None
    ) -> None:
        expect_writable("memories", folder)
        self.folder, self._models, self._most, self._dtype = folder, models, most_bytes, dtype
        remove_leftover_folders(folder, _NAME)
        self._open: OrderedDict[tuple[str, str], Opened] = OrderedDict()
        self._opening = asyncio.Lock()
        self._locks = WeakValueDictionary[str, asyncio.Lock]()  # while somebody writes or deletes
        self._waiting = Counter[str]()
        self._writing: dict[str, dict[str, Any]] = {}
        self._parts: set[str] = set()  # names of texts that come in, or wait
        self._tasks: set[asyncio.Task[Any]] = set()
        # of their own: requests wait for no thread that reads a long text
        self._readers = ThreadPoolExecutor(_READERS, "trailmark-reader")
        self._stopping = False

    # --- what there is -----------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        return sorted(
            path.name
            for path in self.folder.iterdir()
            if _NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        )

    def each(self, look: Callable[[str], T]) -> dict[str, T]:
        """What ``look`` gives for every memory, but for those that are removed meanwhile."""
        found = {}
        for name in self.names():
            with suppress(RequestError):
                found[name] = look(name)
        return found

    def expect(self, name: str) -> Path:
        """The folder of a memory.

        Raises:
            RequestError: 404, there is none of this name.
        """
        folder = self.folder / name
        if not _NAME.fullmatch(name) or folder.is_symlink() or not folder.is_dir():
            raise _no_memory()
        return folder

    def create(self, name: str) -> None:
        """An empty memory; its first text says which model reads it.

        Raises:
            RequestError: 400, a name that is none; 409, there is one.
        """
        if not _NAME.fullmatch(name):
            raise RequestError(400, "name: expected letters, digits, - and _, at most 64.", "name")
        try:
            (self.folder / name).mkdir()
            sync_folder(self.folder)
        except FileExistsError as error:
            raise RequestError(
                409, "name: there is a memory of this name.", "name", "memory_exists"
            ) from error
        except OSError as error:
            raise _told(error) from error

    def describe(self, name: str) -> dict[str, Any]:
        """What is known of a memory without opening it."""
        folder = self.expect(name)
        found: dict[str, Any] = {"id": name, "object": "memory", "model": None, "saved": None}
        sources: list[dict[str, Any]] = []
        try:
            known = self._manifest(folder)
            if known is not None:
                sources = sources_of(known.header.get("notes", {}), folder)
                found["saved"] = int(datetime.fromisoformat(known.date).timestamp())
                found["model"] = next((own.name for own in self._models.values() if _wrote(own, known)), None)
        except ValueError as error:
            logger.warning("The memory %r is damaged: %s", name, error)
            return found | {"damaged": True}
        files = [file for file in (known.chunks, known.state) if file] if known else []
        found |= {
            "tokens": sum(source["tokens"] for source in sources),
            "records": known.chunks.count if known and known.chunks else 0,
            "bytes": sum(file.bytes for file in files),
            "documents": [
                {"document": Path(source["path"]).name} | {key: source[key] for key in ("tokens", "done")}
                for source in sources
            ],
        }
        return found | {"reading": self._writing.get(name)}

    def model_of(self, name: str) -> Served | None:
        """The model that wrote a memory; None: nobody has, or none of these.

        Raises:
            RequestError: 404, there is no such memory.
        """
        try:
            known = self._manifest(self.expect(name))
        except ValueError:
            return None
        if known is None:
            return None
        return next((own for own in self._models.values() if _wrote(own, known)), None)

    @staticmethod
    def _manifest(folder: Path) -> manifest.Manifest | None:
        return manifest.read(folder) if os.path.lexists(folder / manifest.NAME) else None

    def open_bytes(self) -> int:
        return sum(opened.num_bytes for opened in self._open.values())

    def open_count(self) -> int:
        return len(self._open)

    # --- reading -----------------------------------------------------------------------------------------------

    async def open(self, name: str, served: Served) -> Opened:
        """A memory as it is now.

        Raises:
            RequestError: 404, there is none; 400, another model wrote it; 500, it is damaged.
        """
        stamp, key = _stamp(self.expect(name)), (name, served.name)
        if (found := self._open.get(key)) is not None and found.stamp == stamp:
            self._open.move_to_end(key)
            return found
        async with self._opening:  # one at a time: each takes memory
            found = self._open.get(key)
            if found is None or found.stamp != stamp:
                self._open.pop(key, None)
                before = None if found is None else found.passages
                found = self._open[key] = await asyncio.to_thread(self._load, name, served, before)
            self._open.move_to_end(key)
            while self.open_bytes() > self._most and len(self._open) > 1:
                self._open.popitem(last=False)
        return found

    def _load(self, name: str, served: Served, before: Passages | None) -> Opened:
        folder, subject = self.expect(name), served.subject
        size = getattr(subject.model.config, "chunk_size", None) or 1
        stamp = _stamp(folder)
        try:
            known = self._manifest(folder)
            if known is None:
                return Opened(None, 0, Passages([], subject.tokenizer, size), 0, stamp)
            if not _wrote(served, known):
                raise RequestError(
                    400, f"memory: expected one that {served.name!r} wrote, another model did.", "memory"
                )
            cache: ChunkCache = subject.model.load_cache(folder)
            sources = _where_they_are(sources_of(cache.notes, folder), folder)
        except (ValueError, OSError) as error:
            if not (folder / manifest.NAME).exists():  # it is being deleted
                raise _no_memory() from error
            logger.error("The memory %r cannot be opened: %s", name, error)
            raise RequestError(
                500, "memory: it cannot be opened. The server's log says why.", "memory"
            ) from error
        count = cache.get_seq_length()
        full = sum(source["tokens"] for source in sources) == count
        passages = Passages(sources if full else [], subject.tokenizer, size, subject.beginning, before)
        return Opened(cache, count, passages, cache.num_bytes(), stamp)

    # --- writing -----------------------------------------------------------------------------------------------

    async def append(
        self,
        name: str,
        document: str,
        content: AsyncIterator[bytes],
        served: Served,
        progress: Progress = lambda document, tokens: None,
    ) -> asyncio.Task[None]:
        """Take a text and read it into a memory; when the task that this returns is done it outlives a power cut.

        The text is here when this returns: who leaves then stops nothing. What a kill stopped goes on when the same
        text is sent under the same name, or another one to the same memory.

        Raises:
            RequestError: 404, there is no such memory; 400, no text, or a memory of another model; 409, a document of
                this name with another text, or another process that writes; 429, too many that wait; 507, no space.
        """
        self._expect_writer(self.expect(name), served)
        if self._waiting[name] >= _MOST_WAITING:
            raise RequestError(429, "memory: too many texts wait for it. Send this one later.", "memory")
        self._waiting[name] += 1
        try:
            part = await self._received(name, content)
        except BaseException:
            self._waits_no_more(name)
            raise
        task = asyncio.create_task(self._append(name, document, part, served, progress))
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._done(name, task))
        return task

    def _done(self, name: str, task: asyncio.Task[None]) -> None:
        self._waits_no_more(name)
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, where the client that asked for it has left

    def _waits_no_more(self, name: str) -> None:
        self._waiting[name] -= 1
        self._waiting += Counter()  # without names of which none waits

    async def _received(self, name: str, content: AsyncIterator[bytes]) -> IO[bytes]:
        """The text in a file of its own, checked and on the disk itself; it is held until it is closed."""
        folder = self.expect(name) / _TEXTS
        with ExitStack() as stack:
            try:
                folder.mkdir(exist_ok=True)
                if folder.is_symlink():  # nothing is written through one
                    raise OSError(errno.ELOOP, "a link", str(folder))
                await asyncio.to_thread(_remove_parts, folder, self._parts)
                own = f"{_PART}{secrets.token_hex(8)}"
                self._parts.add(own)
                stack.callback(self._parts.discard, own)
                part = stack.enter_context(open(folder / own, "xb"))
                stack.callback(Path(part.name).unlink, missing_ok=True)
                lock(part.fileno())
                async for piece in content:
                    part.write(piece)
                await asyncio.to_thread(sync_file, part)
                await asyncio.to_thread(_expect_text, Path(part.name))
            except OSError as error:
                raise _told(error) from error
            stack.pop_all()
        return part

    async def _append(
        self, name: str, document: str, part: IO[bytes], served: Served, progress: Progress
    ) -> None:
        loop = asyncio.get_running_loop()

        def take(ids: torch.Tensor, cache: ChunkCache, told: Callable[[int, int], None]) -> None:
            done = 0
            for piece in ids.split(_PIECE, dim=1):
                if self._stopping:
                    raise RequestError(503, "The server stops. Send the text again: it goes on from here.")
                tokens = piece[0].tolist()
                asyncio.run_coroutine_threadsafe(served.engine.read(cache, tokens), loop).result()
                self._writing[name] = {"document": document, "tokens": cache.get_seq_length()}
                loop.call_soon_threadsafe(progress, document, cache.get_seq_length())
                done += len(tokens)
                told(done, ids.shape[1])

        def work() -> None:
            folder = self.expect(name)
            self._expect_writer(folder, served)
            with Reader(served.subject, folder, self._dtype, take=take) as reader:
                _where_they_are(reader.sources, folder)
                unfinished = [Path(source["path"]) for source in reader.sources if not source["done"]]
                own = Path(os.path.realpath(folder / _TEXTS / document))  # which comes, perhaps again
                if gone := [text.name for text in unfinished if text != own and not text.is_file()]:
                    raise RequestError(
                        409,
                        f"memory: {gone[0]!r}, which was not read to its end, is gone. Make another memory.",
                        "memory",
                    )
                path = _in_place(Path(part.name), folder / _TEXTS / document)
                for text in dict.fromkeys([*unfinished, Path(os.path.realpath(path))]):
                    reader.read(text)

        turn = self._locks.setdefault(name, asyncio.Lock())
        try:
            async with turn:
                self._writing[name] = {"document": document, "tokens": None}
                await loop.run_in_executor(self._readers, work)
        except (ValueError, OSError) as error:
            raise _told(error) from error
        finally:
            Path(part.name).unlink(missing_ok=True)
            part.close()
            self._parts.discard(Path(part.name).name)
            self._writing.pop(name, None)

    def _expect_writer(self, folder: Path, served: Served) -> None:
        if getattr(served.subject.model.config, "max_memory_chunks", None) is not None:
            raise RequestError(
                400,
                "memory: its model keeps the newest chunks alone and writes over the others, which requests may be "
                "reading. Read texts with trailmark read while nothing is served.",
                "memory",
            )
        try:
            known = self._manifest(folder)
        except ValueError as error:
            raise _told(error) from error
        if known is not None and not _wrote(served, known):
            raise RequestError(
                400, f"memory: expected one that {served.name!r} wrote, another model did.", "memory"
            )

    async def delete(self, name: str) -> None:
        """Remove a memory and its texts; requests that read it end in peace.

        Raises:
            RequestError: 404, there is none; 409, something writes in it.
        """
        folder = self.expect(name)
        turn = self._locks.setdefault(name, asyncio.Lock())
        if turn.locked() or self._waiting[name]:
            raise RequestError(409, "memory: a text is being read into it. Try again later.", "memory")
        async with turn:
            try:
                with saved.hold(folder):
                    removed = await asyncio.to_thread(remove_folder, folder)
                if not removed:
                    raise OSError(errno.EBUSY, "its name cannot be taken away", str(folder))
            except (ValueError, OSError) as error:
                raise _told(error) from error
            for key in [key for key in self._open if key[0] == name]:
                del self._open[key]

    async def close(self) -> None:
        """Stop what is being read, which is saved, and wait for it."""
        self._stopping = True
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._readers.shutdown()
        self._open.clear()


def _no_memory() -> RequestError:
    return RequestError(404, "memory: there is none of this name.", "memory", "memory_not_found")


def _where_they_are(sources: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The notes on texts that lie in a memory's folder, which may have been moved, or come back from a copy."""
    for source in sources:
        path, own = Path(source["path"]), folder / _TEXTS / Path(source["path"]).name
        if path.parent.name != _TEXTS or os.path.realpath(own) == str(path) or not own.is_file():
            continue
        known = source.get("file_sha256")  # a text of trailmark read may lie in another folder of that name
        if sha256_of(own) == known if known is not None else not path.exists():
            source["path"] = os.path.realpath(own)
    return sources


def _stamp(folder: Path) -> tuple[int, ...]:
    try:
        found = os.stat(folder / manifest.NAME)
    except FileNotFoundError:
        return ()
    return (found.st_ino, found.st_mtime_ns, found.st_size)


def _wrote(served: Served, known: manifest.Manifest) -> bool:
    return bool(known.header.get("weights") == served.weights)


def _remove_parts(texts: Path, own: set[str]) -> None:
    """Remove what killed servers left of texts that came in; what another server receives is locked."""
    for path in texts.glob(f"{_PART}*"):
        with suppress(OSError, ValueError):
            untrusted.expect_regular(path, "texts")
            if path.name in own:
                continue
            with open(path, "r+b") as file:  # locks of a network need one that is written
                if lock(file.fileno()):
                    path.unlink()


def _expect_text(path: Path) -> None:
    """Looked at to its end before any of it is read: a memory takes no text back."""
    try:
        for _ in decoded(path):
            pass
    except NotText as error:
        raise RequestError(
            400, "text: expected UTF-8 text with at least one word and no zero byte.", "text", "no_text"
        ) from error


def _in_place(part: Path, path: Path) -> Path:
    """The text under its document's name."""
    if os.path.lexists(path):
        untrusted.expect_regular(path, "document")
        if sha256_of(path) != sha256_of(part):
            raise RequestError(
                409,
                "document: this memory has another text of this name. Choose another name.",
                "document",
                "document_exists",
            )
        return path
    os.replace(part, path)
    sync_folder(path.parent)
    return path


def _told(error: Exception) -> RequestError:
    """What a client hears of what a lower floor says to the user of this machine."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, BusyError):
        return RequestError(409, "memory: another process writes in it. Try again later.", "memory")
    if isinstance(error, NoSpaceError) or (isinstance(error, OSError) and is_no_space(error)):
        logger.error("There is no space for a memory: %s", error)
        return RequestError(507, "memory: the server's disk is full. What was saved before is whole.")
    return internal(error)
