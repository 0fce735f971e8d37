"""Write a neighbour table block by block, so that the same command goes on after any interruption.

:mod:`.table` reads it. Until the manifest is there ``neighbours.progress.json`` says what the folder is to hold
and how many windows of it are on the disk; what a kill leaves besides is made again.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

import trailmark
from trailmark.data.prepare import PROGRESS
from trailmark.data.shards import MANIFEST as CORPUS_MANIFEST
from trailmark.files import (
    FolderKind,
    expect_room,
    expect_same_settings,
    expect_writable,
    locked,
    read_json,
    sha256_of,
    sync_file,
    sync_folder,
    telling_of_a_full_disk,
    write_json,
)
from trailmark.processes import by_first, expect_agreed, expect_shared, share_out, sharing
from trailmark.settings import Settings, from_file, setting
from trailmark.untrusted import expect_regular

FORMAT = 1
MANIFEST, TABLE_PROGRESS = "neighbours.json", "neighbours.progress.json"
KIND = FolderKind("neighbours", MANIFEST, FORMAT, "a neighbour table", "trailmark neighbours")
INDICES, SCORES = "neighbours.bin", "scores.bin"
NONE = (1 << 16) - 1
MOST_CHUNKS = NONE  # numbers 0 .. 65534
SCORE_DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2")}
Parts = tuple[npt.NDArray[np.int64], npt.NDArray[Any] | None]
"""Of some windows, neighbours and their scores [n, C, K]."""
_SECONDS = 2.0  # of work that a kill costs, besides the block in work


@dataclass(frozen=True)
class _Done(Settings):
    """What ``neighbours.progress.json`` holds beside the settings, which are compared with the command's."""

    done: int = setting(least=0)


@dataclass(frozen=True)
class TableProgress:
    """How far the making of a table is, in windows."""

    done: int
    total: int
    kept: int  # of these, made by earlier runs
    chunks: int  # of a window
    seconds: float  # of this run


def write_table(
    output: str | Path,
    about: Mapping[str, Any],
    shape: tuple[int, int, int],
    scores: str | None,
    make: Callable[[int, int], Parts],
    block: int,
    progress: Callable[[TableProgress], None] | None = None,
    command: str = "trailmark neighbours",
) -> None:
    """Make a table, go on where an interrupted run stopped, or find the finished one.

    Processes that share a command's work (:func:`trailmark.processes.together`) share its blocks out, and the first
    writes them.

    Args:
        about: what the table is of, as JSON holds it; a folder with something else is refused.
        shape: windows, C chunks of each, K neighbours of each.
        scores: "float32" or "float16"; None: ``make`` gives none.
        make: windows first .. stop - 1 -> numbers [stop - first, C, K], -1 last, and scores alike, -inf where -1.
        block: windows that are made at a time.
        command: for messages.

    Raises:
        ValueError: an output that is no folder to write in, in use, full, or another table's; and what ``make`` raises.
    """
    windows, chunks, count = shape
    folder = Path(output)
    expect_place_of_table(folder)
    sizes = {"windows": windows, "chunks": chunks, "count": count}
    settings = json.loads(json.dumps(about)) | sizes | {"scores": scores}
    if sharing():
        expect_agreed({"trailmark": trailmark.__version__} | settings)
    began = time.monotonic()

    with ExitStack() as held:
        table = _Table(folder, settings, held)
        begun = by_first(lambda: table.begin(command))
        kept = windows if begun is None else begun

        def show(done: int) -> None:
            if progress is not None:
                progress(TableProgress(done, windows, kept, chunks, time.monotonic() - began))

        def take(made: tuple[int, Parts]) -> None:
            table.write(*made)
            show(table.done)

        if begun is not None:
            blocks = ((first, min(first + block, windows)) for first in range(begun, windows, block))
            share_out(blocks, lambda mine: ((stop, make(first, stop)) for first, stop in mine), take)
            by_first(table.finish)
    show(windows)


class _Table:
    """The files of a table that is made.

    Args:
        settings: what it is of. held: closes what is opened, also where the work is stopped.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], held: ExitStack) -> None:
        self.folder, self.settings, self._held = folder, settings, held
        self.dtypes = file_dtypes(settings["scores"])
        shape = settings["chunks"], settings["count"]
        self.row = {name: math.prod(shape) * dtype.itemsize for name, dtype in self.dtypes.items()}  # bytes
        self.done, self._saved, self._signed = 0, time.monotonic(), False
        self._files: dict[str, IO[bytes]] = {}

    def begin(self, command: str) -> int | None:
        """How many windows earlier runs of the same command have made; None: the table is finished."""
        folder, settings, windows = self.folder, self.settings, self.settings["windows"]
        self._held.enter_context(locked(folder, command))
        if (folder / MANIFEST).exists():
            _expect_same(folder, read_json(folder / MANIFEST), settings)
            (folder / TABLE_PROGRESS).unlink(missing_ok=True)
            return None
        self.done = done = _resume(folder, settings, self.row)
        write_json(folder / TABLE_PROGRESS, settings | {"done": done}, durable=True)  # whose the files are
        expect_room(folder, sum(self.row.values()) * (windows - done), f"{done} windows are kept")
        kept_text = "What was made is kept; free some space and give the same command to go on."
        self._held.enter_context(telling_of_a_full_disk(folder, lambda: kept_text))
        for name, size in self.row.items():
            file = self._held.enter_context((folder / name).open("ab"))
            self._files[name] = file
            file.truncate(done * size)
        self._held.callback(self._save)  # Ctrl-C too: what is made is kept
        return done

    def write(self, stop: int, parts: Parts) -> None:
        """What was made of the next windows, up to ``stop``."""
        shape = stop - self.done, self.settings["chunks"], self.settings["count"]
        for name, part in zip(self.row, parts, strict=False):
            assert part is not None
            assert part.shape == shape
            if name == INDICES:
                part = np.where(part < 0, NONE, part)
            kept = part.astype(self.dtypes[name])
            if (np.isfinite(part) & ~np.isfinite(kept)).any():
                raise ValueError(
                    f"scores: expected {kept.dtype} to hold every score, there are larger ones. Make the table with "
                    "--scores float32."
                )
            self._files[name].write(kept.tobytes())
        self.done = stop
        if time.monotonic() - self._saved > _SECONDS:
            self._save()

    def finish(self) -> None:
        """Sign the files: from now on the folder is a table."""
        self._save()
        windows = self.settings["windows"]
        entries = {
            name: {"bytes": windows * size, "sha256": sha256_of(self.folder / name)}
            for name, size in self.row.items()
        }
        manifest = {"format": FORMAT} | self.settings | {"files": entries, "trailmark": trailmark.__version__}
        manifest["created"] = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(self.folder / MANIFEST, manifest, durable=True)
        (self.folder / TABLE_PROGRESS).unlink()
        self._signed = True

    def _save(self) -> None:
        if self._signed:
            return
        for file in self._files.values():
            sync_file(file)
        sync_folder(self.folder)
        write_json(self.folder / TABLE_PROGRESS, self.settings | {"done": self.done}, durable=True)
        self._saved = time.monotonic()


def file_dtypes(scores: str | None) -> dict[str, np.dtype[Any]]:
    """The files of a table and what they hold, with these scores or none."""
    return {INDICES: np.dtype("<u2")} | ({} if scores is None else {SCORES: SCORE_DTYPES[scores]})


def _resume(folder: Path, settings: dict[str, Any], row: Mapping[str, int]) -> int:
    """Count the windows that an earlier run of the same command put on the disk."""
    path = folder / TABLE_PROGRESS
    if not path.exists():
        if foreign := [name for name in (INDICES, SCORES) if (folder / name).exists()]:
            raise ValueError(
                f"output: expected a folder without files of something else, {str(folder)!r} holds {foreign[0]}. "
                "Remove it or choose another folder."
            )
        return 0
    state = read_json(path)
    try:
        state_done = from_file(_Done, state).done
    except ValueError as error:
        raise ValueError(
            f"output: {str(path)!r} is broken ({error}). Remove the folder and make the table again."
        ) from error
    _expect_same(folder, state, settings)
    files = [(folder / name, size) for name, size in row.items()]
    for file, _ in files:  # what is added to, and nobody else's
        with suppress(FileNotFoundError):
            expect_regular(file, "output")
    there = [path.stat().st_size // size if path.exists() else 0 for path, size in files]
    return min(state_done, settings["windows"], *there)  # a file that was cut since is gone on with


def _expect_same(folder: Path, old: Any, new: Mapping[str, Any]) -> None:
    """Raise a ValueError if the folder holds another table; an equal embedder may have come by another road."""
    old = old if isinstance(old, dict) else {}
    same = [
        [name, "spec"]
        for name, value in new.items()
        if isinstance(value, dict)
        and "spec" in value
        and isinstance(was := old.get(name), dict)
        and was.get("fingerprint") == value.get("fingerprint")
    ]
    expect_same_settings(folder, "a table", old, new, same)


def expect_place_of_table(folder: Path) -> None:
    """Make the folder; raise a ValueError if it cannot be written in, is not shared, or holds a corpus' own files."""
    expect_writable("output", folder)
    if sharing():
        expect_shared("output", folder)
    if any((folder / name).exists() for name in (CORPUS_MANIFEST, PROGRESS)):
        raise ValueError(
            f"output: expected a folder for a table, {str(folder)!r} is a prepared corpus. Choose another one."
        )
