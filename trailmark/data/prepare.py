"""``trailmark prepare``: documents to token shards, in parallel, and to be gone on with after any interruption.

The output holds ``progress.json`` from the beginning and ``corpus.json`` at the end. Whole shards are put in place and
then entered in ``progress.json``; what a kill leaves besides is made again. A shard ends with the first document that
fills it, so that the same text gives the same bytes however often a run was interrupted, and by any number of
processes.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import trailmark
from trailmark.data.corpus import load_tokenizer, tokenizer_fingerprint, vocabulary_size
from trailmark.data.encoders import Encoder, Ids, encode_in_order
from trailmark.data.shards import MANIFEST, Corpus, Shard, ShardWriter, make_manifest, token_dtype
from trailmark.data.sources import LocalFiles, Source
from trailmark.files import (
    expect_outside,
    expect_place,
    expect_room,
    expect_same_settings,
    expect_writable,
    find_wrong_lengths,
    made_and_locked,
    read_json,
    remove_unfinished,
    telling_of_a_full_disk,
    write_json,
)
from trailmark.processes import (
    beside_each_other,
    by_first,
    expect_agreed,
    expect_shared,
    share_out,
    sharing,
    world_size,
)
from trailmark.settings import Settings, from_file, setting

logger = logging.getLogger(__name__)

PROGRESS = "progress.json"
SHARD_TOKENS = 1 << 26  # 134 MB as uint16: a minute or so of work is the most that a kill costs
_PIECE = 1 << 17  # characters of a longer document that are tokenised at a time
_SHOW_EVERY = 0.2  # seconds between two calls of progress, at least
_JOB = 1 << 18  # characters that are sent to a process together, at least
_FIRST_LOOK = 1 << 20  # bytes written after which the room that the rest needs is known well enough
_ROADS = ["tokenizer", "name"], ["source", "paths"]  # by which road a thing came does not count


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    documents: int
    tokens: int
    done: int  # of the source: bytes of files, rows of a hub dataset
    total: int | None  # None: nobody knows
    seconds: float  # of this run
    kept: int = 0  # of what is done: by earlier runs


@dataclass(frozen=True)
class _Kept(Settings):
    """A whole shard of ``progress.json``, and how far the source was read with it."""

    shard: Shard
    next_row: int = setting(least=1)
    left_out: int = setting(least=0)
    done: int = setting(least=0)


@dataclass(frozen=True)
class _State(Settings):
    """What ``progress.json`` holds beside the settings, which are compared with the command's."""

    shards: tuple[_Kept, ...]


@dataclass(frozen=True)
class _Mark:
    """What a piece of text is: the document of a row or a piece of it, or nothing where the row was left out."""

    row: int
    last: bool
    left_out: bool
    done: int


def prepare(
    source: Source,
    output: str | Path,
    tokenizer: str = "bytes",
    *,
    processes: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    end_of_text: bool = True,
    progress: Callable[[Progress], None] | None = None,
) -> Corpus:
    """Make a corpus of a source's documents, or go on where an interrupted run stopped, or open the finished one.

    Processes that share a command's work (:func:`trailmark.processes.together`) share the text out, and the first
    writes the corpus.

    Args:
        output: a folder, outside of the source's.
        tokenizer: "bytes", a folder or a hub name.
        processes: that tokenise (of several that share the text, of each); None: one per processor. The result does
            not depend on it.
        shard_tokens: a shard ends with the first document that fills it with so many.
        end_of_text: put the tokenizer's end-of-text token after each document, if it has one.
        progress: called now and then, and once at the end.

    Raises:
        ValueError: nothing to read, an output that is in use, full, or of other settings or another source; and what
            the source raises.
    """
    for name, number in (("processes", processes), ("shard_tokens", shard_tokens)):
        if number is not None and number < 1:
            raise ValueError(f"{name}: expected at least 1, got {number}.")
    folder = Path(output)
    expect_place("output", folder)
    expect_source_outside(source, folder)
    loaded = load_tokenizer(tokenizer)
    settings = {
        "tokenizer": {
            "name": tokenizer,
            "fingerprint": tokenizer_fingerprint(loaded),
            "vocab_size": vocabulary_size(loaded),
            "end_of_text": loaded.eos_token_id if end_of_text else None,
        },
        "source": json.loads(json.dumps(source.description())),
        "shard_tokens": shard_tokens,
    }
    encoder, count = Encoder(loaded), processes or os.cpu_count() or 1
    if sharing():
        expect_agreed({"trailmark": trailmark.__version__} | settings)
        expect_writable("output", folder)
        expect_shared("output", folder)
        count = processes or max(1, count // beside_each_other(world_size()))
    with ExitStack() as held:
        run = _Run(source, folder, settings, progress, held)
        row = by_first(lambda: run.begin(encoder.bytes_alone))
        if row is not None:
            share_out(_jobs(source, row), lambda mine: encode_in_order(mine, encoder, count), run.add)
            by_first(run.finish)
        return Corpus.open(folder)


class _Run:
    """One run: what earlier ones made, and the shard that is being written.

    Args:
        held: closes what is opened, also where the work is stopped.
    """

    def __init__(
        self,
        source: Source,
        folder: Path,
        settings: dict[str, Any],
        progress: Callable[[Progress], None] | None,
        held: ExitStack,
    ) -> None:
        self.source, self.folder, self.settings, self.progress = source, folder, settings, progress
        self.dtype = token_dtype(settings["tokenizer"]["vocab_size"])
        self.began = self.shown = time.monotonic()
        self.state: dict[str, Any] = {}
        self.shards: list[Shard] = []
        self.row, self.left_out, self.done, self.before = 0, 0, 0, 0
        self.written, self.room_known = 0, False
        self.writer: ShardWriter | None = None
        self._held = held

    def begin(self, bytes_alone: bool) -> int | None:
        """The first row of the source that is in no whole shard; None: the corpus is whole."""
        folder, source = self.folder, self.source
        self._held.enter_context(made_and_locked(folder, "trailmark prepare"))
        if (folder / MANIFEST).exists():
            corpus = Corpus.open(folder)
            expect_same_settings(folder, "a corpus", corpus.manifest, self.settings, _ROADS)
            (folder / PROGRESS).unlink(missing_ok=True)
            if self.progress is not None:
                size = source.size()
                self.progress(Progress(corpus.documents, len(corpus), size or 0, size, 0.0))
            return None
        self.state = self._resume()
        self.shards = [kept.shard for kept in from_file(_State, self.state).shards]
        last = self.state["shards"][-1] if self.shards else {"next_row": 0, "left_out": 0, "done": 0}
        self.row, self.left_out, self.done = last["next_row"], last["left_out"], last["done"]
        self.before = self.done
        way_out = "free some space and give the same command to go on."
        self._held.enter_context(telling_of_a_full_disk(folder, lambda: f"{self.kept_text()}; {way_out}"))
        self._held.callback(self._abandon)
        write_json(folder / PROGRESS, self.state, durable=True)  # before any shard: whose they are
        if bytes_alone and self.dtype == "uint16" and (total := _plain_bytes(source)):
            expect_room(folder, 2 * (total - self.done), self.kept_text())  # two bytes for each
        return int(self.row)

    def _resume(self) -> dict[str, Any]:
        """What earlier runs made of the same source with the same settings; leftovers of a kill are removed."""
        path = self.folder / PROGRESS
        remove_unfinished(self.folder, PROGRESS, MANIFEST)
        for leftover in self.folder.glob(".*.part"):
            leftover.unlink()
        if not path.exists():
            if foreign := sorted(self.folder.glob("tokens-*.bin")):
                raise ValueError(
                    f"output: expected a folder without shards of something else, {str(self.folder)!r} holds "
                    f"{foreign[0].name}. Remove them or choose another folder."
                )
            return self.settings | {"shards": []}
        state = read_json(path)
        try:
            known = from_file(_State, state)
        except ValueError as error:
            raise ValueError(
                f"output: {str(path)!r} is broken ({error}). Remove the folder and prepare the corpus again."
            ) from error
        if not known.shards:  # nothing came of it, and the folder is free
            return self.settings | {"shards": []}
        expect_same_settings(self.folder, "a corpus", state, self.settings, _ROADS)
        for number, shard in enumerate(kept.shard for kept in known.shards):
            if find_wrong_lengths(self.folder, shard.files()):
                logger.warning("%s was removed or changed: it and what follows is made again.", shard.file)
                del state["shards"][number:]
                break
        return state

    def add(self, made: tuple[list[_Mark], list[Ids]]) -> None:
        """What was made of a job."""
        for mark, part in zip(*made, strict=True):
            self._add(mark, part)
            self._show()

    def _abandon(self) -> None:
        if self.writer is not None:
            with suppress(OSError):
                self.writer.abandon()

    def _add(self, mark: _Mark, tokens: Ids) -> None:
        self.done = mark.done
        if mark.left_out:
            self.row, self.left_out = mark.row + 1, self.left_out + 1
            return
        vocab_size, end = self.settings["tokenizer"]["vocab_size"], self.settings["tokenizer"]["end_of_text"]
        if len(tokens) and int(tokens.max()) >= vocab_size:
            raise ValueError(
                f"tokenizer: expected tokens below its vocabulary's size {vocab_size}, it made {int(tokens.max())}. "
                "Its vocabulary has holes; number its tokens anew."
            )
        if self.writer is None:
            self._look_for_room()
            self.writer = ShardWriter(self.folder, len(self.shards), self.dtype)
        writer, before = self.writer, self.writer.tokens
        writer.write(tokens)
        if mark.last:
            if end is not None:
                writer.write(np.array([end], np.uint32))
            if writer.empty_document:
                self.left_out += 1
            else:
                writer.end_document()
            self.row = mark.row + 1
        self.written += (writer.tokens - before) * writer.itemsize
        if mark.last and writer.tokens >= self.settings["shard_tokens"]:
            self._close_shard()
        elif not self.room_known and self.written > _FIRST_LOOK:
            self._look_for_room()

    def _close_shard(self) -> None:
        assert self.writer is not None
        if self.writer.documents:
            self.shards.append(self.writer.close())
            entry = {"shard": asdict(self.shards[-1]), "next_row": self.row}
            self.state["shards"].append(entry | {"left_out": self.left_out, "done": self.done})
            write_json(self.folder / PROGRESS, self.state, durable=True)
        else:
            self.writer.abandon()
        self.writer = None

    def finish(self) -> None:
        """Close the last shard, and say what the corpus is."""
        if self.writer is not None:
            self._close_shard()
        if not self.shards:
            raise ValueError(
                f"source: expected at least one document with text, all {self.left_out} rows are empty or left out."
            )
        manifest = make_manifest(
            self.shards,
            self.dtype,
            self.settings["source"],
            self.settings["tokenizer"],
            shard_tokens=self.settings["shard_tokens"],
            left_out=self.left_out,
            trailmark=trailmark.__version__,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        write_json(self.folder / MANIFEST, manifest, durable=True)
        (self.folder / PROGRESS).unlink()
        self._show(finished=True)

    # --- room on the disk, and progress ----------------------------------------------------------------------

    def _look_for_room(self) -> None:
        """Look for room for the rest before each shard, and early on, as far as what was written tells its size."""
        total, self.room_known = self.source.size(), self.written > _FIRST_LOOK
        needed = 0
        if total is not None and self.room_known:
            needed = int(self.written / max(1, self.done - self.before) * (total - self.done))
        expect_room(self.folder, needed, self.kept_text())

    def kept_text(self) -> str:
        return f"{len(self.shards)} whole shards are kept"

    def _show(self, finished: bool = False) -> None:
        now = time.monotonic()
        if self.progress is None or (now - self.shown < _SHOW_EVERY and not finished):
            return
        self.shown, writer = now, self.writer
        documents = sum(shard.documents for shard in self.shards) + (writer.documents if writer else 0)
        tokens = sum(shard.tokens for shard in self.shards) + (writer.tokens if writer else 0)
        total = self.source.size()
        done = total if finished and total is not None else self.done
        self.progress(Progress(documents, tokens, done, total, now - self.began, self.before))


# --- documents to jobs -------------------------------------------------------------------------------------


def pieces(text: str, size: int = _PIECE) -> Iterator[str]:
    """A text in pieces of at most ``size`` characters, cut where tokenizers part words anyway.

    The cut stands before a space between two letters: a word goes with the space before it in every usual tokenizer.
    A text without one is cut between any two characters, which may cost a token more.
    """
    begin = 0
    while len(text) - begin > size:
        cut = begin + size + 1
        while (cut := text.rfind(" ", begin + 1, cut)) >= 0:
            if text[cut - 1].isalpha() and text[cut + 1 : cut + 2].isalpha():
                break
        if cut < 0:
            cut = begin + size
        yield text[begin:cut]
        begin = cut
    yield text[begin:]


def _jobs(source: Source, first: int) -> Iterator[tuple[list[_Mark], list[str]]]:
    """Give pieces of documents, enough for a process to be worth the way, cut by the text alone."""
    marks: list[_Mark] = []
    texts: list[str] = []
    size, before = 0, None if first else 0
    for row in source.documents(first):
        whole, before = row.done - (row.done if before is None else before), row.done
        if row.texts is None:
            marks.append(_Mark(row.number, True, True, row.done))
            texts.append("")
        else:
            (text,) = row.texts
            done = 0
            for piece in pieces(text):
                done += len(piece)
                left = whole * (len(text) - done) // max(1, len(text))
                marks.append(_Mark(row.number, done == len(text), False, row.done - left))
                texts.append(piece)
                size += len(piece)
                if size >= _JOB:
                    yield marks, texts
                    marks, texts, size = [], [], 0
        if len(marks) >= _JOB // 16:  # many small or empty rows
            yield marks, texts
            marks, texts, size = [], [], 0
    if marks:
        yield marks, texts


# --- the output folder -------------------------------------------------------------------------------------


def expect_source_outside(source: Source, folder: Path) -> None:
    """Raise a ValueError where the output lies among what is read."""
    expect_outside(folder, source.paths if isinstance(source, LocalFiles) else [], "source")


def _plain_bytes(source: Source) -> int | None:
    """Bytes of the documents, where every file is plain text."""
    if isinstance(source, LocalFiles) and all(file.kind == "text" for file in source.files):
        return source.size()
    return None
