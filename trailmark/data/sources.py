"""Documents out of text files, folders, JSON lines and Parquet files, one at a time and in a fixed order.

A source is a sequence of rows, numbered from 0; a row gives the texts of some columns, or nothing if a condition
leaves it out. Reading may begin at any row, so that an interrupted run goes on without making again what it made.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from trailmark.data.corpus import NotText, decoded, each_text, read_text
from trailmark.files import sha256_of
from trailmark.untrusted import MOST_BYTES, expect_regular, first_line, open_regular, parse_json

_LINES = (".jsonl", ".ndjson")
_PARQUET = ".parquet"
_ROWS_AT_ONCE = 64  # of Parquet: a row may be a book
Where = tuple[str, str]  # a column, or a field of one by "column.field", and the value that keeps a row


@dataclass(frozen=True)
class Row:
    number: int
    # one of each column asked for; None: a condition or an empty value leaves it out
    texts: tuple[str, ...] | None
    done: int  # of the source's size: what was read up to this row's end


class Source(ABC):
    """Where documents come from.

    Attributes:
        column: that of the documents.
        summary_column: that of their summaries; None: there are none.
    """

    column: str
    summary_column: str | None = None

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """What the manifest says: equal descriptions name equal text."""

    @abstractmethod
    def size(self) -> int | None:
        """Bytes or rows in all; None if nobody knows."""

    @abstractmethod
    def rows(self, columns: Sequence[str], first: int = 0) -> Iterator[Row]:
        """The rows from number ``first`` on.

        Raises:
            ValueError: what cannot be read, and where; a column that does not exist, and those that do.
        """

    def documents(self, first: int = 0) -> Iterator[Row]:
        """Rows of one text each."""
        return self.rows([self.column], first)

    def pairs(self) -> Iterator[Row]:
        """Rows of a document and its summary.

        Raises:
            ValueError: no column of summaries is named.
        """
        if self.summary_column is None:
            raise ValueError(
                "summary_column: expected the column that holds the summaries, got none. Name it, or use a recipe "
                "with pairs: xsum, cnn-dailymail."
            )
        return self.rows([self.column, self.summary_column])


@dataclass(frozen=True)
class SourceFile:
    """A file of a local source as it was when the source was looked over."""

    path: Path
    name: str  # as the manifest names it
    kind: str  # "text", "lines" or "parquet"
    bytes: int
    modified: int  # nanoseconds
    sha256: str


_COLUMN = "text"  # that of JSON lines and Parquet, where none is named


class LocalFiles(Source):
    """Files and folders: plain text (a file is a document), JSON lines and Parquet (a row is one).

    A named file is JSON lines if its name ends in .jsonl, .ndjson or .json, Parquet if in .parquet, else plain text.
    Below a folder .json files are plain text too, unless packed; files that are not text are left out and named in
    a warning, hidden ones without one; links are followed, and what cannot be read is an error. JSON lines
    may be packed (``.gz``, ``.zst`` with Python 3.14 or newer).

    Args:
        paths: in the order in which they are read; a folder's files by name.
        column: of JSON lines and Parquet: that of the text.
        summary_column: of summaries, for pairs.
        where: keep only rows with this value in this column (or "column.field").

    Raises:
        ValueError: no path, or one that does not exist.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        column: str = _COLUMN,
        summary_column: str | None = None,
        where: Where | None = None,
    ) -> None:
        if not paths:
            raise ValueError("source: expected at least one file or folder, got none.")
        self.paths = list(map(Path, paths))
        self.column, self.summary_column, self.where = column, summary_column, where
        for path in self.paths:
            if not path.exists():
                raise ValueError(f"source: expected a file or folder, {str(path)!r} does not exist.")

    @cached_property
    def files(self) -> list[SourceFile]:
        """All files that will be read. Finding them reads every byte once, for the hashes and to tell text from other.

        Raises:
            ValueError: a named file that is empty or not text, or no file at all.
        """
        files = each_text(self.paths, "source", _look_over)
        if not files:
            raise ValueError(
                f"source: expected at least one file with text in {', '.join(map(str, self.paths))}, found none."
            )
        if self.column != _COLUMN and all(file.kind == "text" for file in files):
            raise ValueError(
                f"column: expected none for plain text, which has no columns, got {self.column!r}. Leave it out."
            )
        return files

    def description(self) -> dict[str, Any]:
        files = [{"name": file.name, "bytes": file.bytes, "sha256": file.sha256} for file in self.files]
        paths = [str(path) for path in self.paths]
        return {
            "kind": "files",
            "paths": paths,
            "column": self.column,
            "where": condition_text(self.where),
            "files": files,
        }

    def size(self) -> int:
        return sum(file.bytes for file in self.files)

    def rows(self, columns: Sequence[str], first: int = 0) -> Iterator[Row]:
        number = before = 0
        for file in self.files:
            status = file.path.stat() if file.path.exists() else None
            if status is None or (status.st_size, status.st_mtime_ns) != (file.bytes, file.modified):
                raise ValueError(
                    f"source: {str(file.path)!r} was changed or removed after the source had been looked over. "
                    "Start again when the files stand still."
                )
            reader = {"text": _read_document, "lines": _read_lines, "parquet": _read_parquet}[file.kind]
            for values, done in reader(file, columns, self.where, max(0, first - number)):
                if number >= first:
                    yield Row(number, values, before + done)
                number += 1
            before += file.bytes


# --- one file ----------------------------------------------------------------------------------------------


def kind_of(path: Path, named: bool) -> str:
    """ "text", "lines" or "parquet", by the file's name; ``named``: by the user, not found in a folder."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = bool(suffixes) and suffixes[-1] in (".gz", ".zst")
    last = suffixes[-1 - packed] if len(suffixes) > packed else ""
    if last == _PARQUET and not packed:
        return "parquet"
    if last in _LINES or (last == ".json" and (named or packed)):
        return "lines"
    return "text"


def _look_over(path: Path, folder: Path | None) -> SourceFile:
    """Hash a file that was named, or found below a folder; expect text in one of kind "text"."""
    name = path.name if folder is None else f"{folder.resolve().name}/{path.relative_to(folder).as_posix()}"
    kind, hasher = kind_of(path, named=folder is None), hashlib.sha256()
    try:
        status = path.stat()
        if kind == "text":
            for _ in decoded(path, "source", look=hasher.update):
                pass
            digest = hasher.hexdigest()
        else:
            expect_regular(path, "source", links=True)
            digest = sha256_of(path)
    except OSError as error:
        raise ValueError(f"source: cannot read {str(path)!r}: {error.strerror}.") from error
    if not status.st_size:
        raise NotText(f"source: expected text, {str(path)!r} is empty.")
    return SourceFile(path, name, kind, status.st_size, status.st_mtime_ns, digest)


_Rows = Iterator[tuple[tuple[str, ...] | None, int]]  # texts, and bytes of the file read up to there


def _read_document(file: SourceFile, columns: Sequence[str], where: Where | None, skip: int) -> _Rows:
    if len(columns) > 1 or where is not None:
        raise ValueError(
            f"source: expected rows with columns ({', '.join(columns)}), {str(file.path)!r} is plain text. "
            "Use JSON lines or Parquet."
        )
    yield None if skip else (read_text(file.path, "source"),), file.bytes


def _read_lines(file: SourceFile, columns: Sequence[str], where: Where | None, skip: int) -> _Rows:
    """Read rows of JSON lines; a blank line is no row."""
    number = 0
    try:
        with open_regular(file.path, "source", links=True) as raw, _unpacked(raw, file.path) as lines:
            while line := lines.readline(MOST_BYTES + 1):
                number += 1
                if len(line) > MOST_BYTES:  # of a packed file that is none of text
                    raise ValueError(
                        f"source: {file.path}, line {number}: it is longer than {MOST_BYTES:,} bytes."
                    )
                content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if not content.strip():
                    continue
                done = raw.tell()  # packed: of the packed bytes; else a little ahead, by what is buffered
                if skip > 0:
                    skip -= 1
                    yield None, done
                    continue
                place = f"{file.path}, line {number}"
                record = parse_json(content, f"source: {place}: it", finite=False)  # only its texts are taken
                if not isinstance(record, dict):
                    raise ValueError(
                        f"source: {place}: expected an object with columns, got {type(record).__name__}. "
                        'Write one object a line, such as {"text": "..."}.'
                    )
                expect_columns(needed_columns(columns, where), record, place)
                yield row_texts(record, columns, where, place), done
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"source: cannot read {file.path} after line {number} ({first_line(error)})."
        ) from error


def _read_parquet(file: SourceFile, columns: Sequence[str], where: Where | None, skip: int) -> _Rows:
    parquet = import_extra("pyarrow.parquet")
    errors = import_extra("pyarrow").ArrowException
    try:
        with parquet.ParquetFile(file.path) as table:
            needed = needed_columns(columns, where)
            expect_columns(needed, table.schema_arrow.names, str(file.path))
            number, total = 0, table.metadata.num_rows
            for group in range(table.num_row_groups):
                size = table.metadata.row_group(group).num_rows
                if number + size <= skip:  # not a byte of it is read
                    for _ in range(size):
                        number += 1
                        yield None, file.bytes * number // total
                    continue
                for batch in table.iter_batches(_ROWS_AT_ONCE, [group], needed):
                    for record in batch.to_pylist():
                        number += 1
                        place = f"{file.path}, row {number - 1}"
                        texts = row_texts(record, columns, where, place) if number > skip else None
                        yield texts, file.bytes * number // total
    except (OSError, errors) as error:
        raise ValueError(f"source: cannot read {file.path} as Parquet ({first_line(error)}).") from error


def _unpacked(raw: IO[bytes], path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return gzip.open(raw)
    if suffix == ".zst":
        try:
            zstd = importlib.import_module("compression.zstd")
        except ModuleNotFoundError as error:
            raise ValueError(
                f"source: {path}: .zst needs Python 3.14 or newer. Unpack it first: zstd -d {path.name}"
            ) from error
        return zstd.open(raw)
    return raw


# --- one row -----------------------------------------------------------------------------------------------


def needed_columns(columns: Sequence[str], where: Where | None) -> list[str]:
    """The columns that are read, each once: those asked for, and that of a condition."""
    return list(dict.fromkeys([*columns, *([where[0].partition(".")[0]] if where else [])]))


def expect_columns(needed: Sequence[str], present: Any, place: str) -> None:
    """Raise a ValueError if a column is missing, and name those that there are."""
    if missing := [name for name in needed if name not in present]:
        raise ValueError(
            f"column: expected {missing[0]!r}, {place} has {', '.join(map(repr, present)) or 'none'}. "
            "Name one of those."
        )


def row_texts(
    record: Mapping[str, Any], columns: Sequence[str], where: Where | None, place: str
) -> tuple[str, ...] | None:
    """The row's texts; None if the condition or an empty value leaves it out."""
    if where is not None and not _holds(record, where):
        return None
    values = [record[name] for name in columns]
    for name, value in zip(columns, values, strict=True):
        if value is not None and not isinstance(value, str):
            raise ValueError(
                f"source: {place}: expected text in column {name!r}, got {type(value).__name__}. Name another column."
            )
    if not all(value and value.strip() for value in values):
        return None
    try:
        "".join(values).encode()
    except UnicodeEncodeError as error:  # JSON can write half a surrogate pair, which is no character
        raise ValueError(
            f"source: {place}: holds half a surrogate pair, which is no text. Mend the row."
        ) from error
    return tuple(values)


def _holds(record: Mapping[str, Any], where: Where) -> bool:
    column, _, field = where[0].partition(".")
    value = record[column]
    if field:
        if isinstance(value, str):  # JSON in a column of text, as proof-pile's tables have it
            try:
                value = parse_json(value, "it", finite=False)
            except ValueError:
                return False
        value = value.get(field) if isinstance(value, Mapping) else None
    return value is not None and str(value) == where[1]


def condition_text(where: Where | None) -> str | None:
    """A condition as the manifest shows it."""
    return None if where is None else "=".join(where)


def import_extra(module: str) -> Any:
    """A module of an optional package; a ValueError says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"source: the package {module.split('.')[0]!r} is missing. Install it: pip install 'trailmark[data]'"
        ) from error
