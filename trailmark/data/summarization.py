"""Documents and their summaries to fine-tune on (arXiv 2410.01651, Sec. 4.3; XSum, CNN/DailyMail).

A text is ``document|Summary*: summary<end of text>``, where ``*`` is an early landmark: what it retrieves serves
the summary from its cue ``:`` on. A document that is too long loses its own end, never the cue or the summary; a
text that is too short is followed by absent tokens.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import logging
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trailmark.data.batches import mix, permuted
from trailmark.data.corpus import Tokens, padding_id, tokenize, tokenize_parts, tokenizer_fingerprint
from trailmark.data.needles.formats import IGNORED
from trailmark.data.pairs import expect_as_prepared
from trailmark.files import sha256_of
from trailmark.untrusted import first_line, open_regular, parse_json

logger = logging.getLogger(__name__)

DOCUMENT_COLUMNS = ("document", "article")
SUMMARY_COLUMNS = ("summary", "highlights")


class Pair(NamedTuple):
    document: str
    summary: str


class SummarizationTexts:
    """Training texts: a pure function of (pairs, seed, sample number). Each epoch has every pair once.

    Args:
        tokenizer: of transformers, with an end-of-text token.
        pairs: documents and summaries, or the files they are in.
        length: T, tokens of every row. Pairs whose summary and cue do not leave room for a token of the document
            are left out, and named in a warning.
        answer_weight: of the loss on the summary and its end, where all others weigh 1, as in the paper.

    Raises:
        ValueError: a tokenizer that cannot end a text; no pair that fits; files that cannot be read.
    """

    def __init__(
        self,
        tokenizer: Any,
        pairs: Pairs | Sequence[str | Path],
        length: int,
        seed: int = 0,
        *,
        answer_weight: float = 1.0,
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                "tokenizer: expected one with an end-of-text token, which ends a summary, got none. Set eos_token."
            )
        self.pairs = pairs if isinstance(pairs, Pairs) else Pairs(pairs)
        self.tokenizer, self.length, self.seed = tokenizer, length, int(seed)
        self.answer_weight = answer_weight
        self._before, self._after = tokenize_parts(["|Summary", ":"], tokenizer)
        self._absent = padding_id(tokenizer)
        self._numbers = self._that_fit()

    def __len__(self) -> int:
        """Pairs of an epoch."""
        return len(self._numbers)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the files that the pairs are in and the tokenizer's fingerprint."""
        both = f"{self.pairs.fingerprint}\n{tokenizer_fingerprint(self.tokenizer)}"
        return hashlib.sha256(both.encode()).hexdigest()

    def _room(self, summary: Tokens) -> int:
        """Count the tokens of a document that fit beside its summary."""
        return self.length - len(self._before) - len(self._after) - len(summary) - 1

    def _that_fit(self) -> npt.NDArray[np.int64]:
        # A token stands for a byte or more, but for a few that tokenizers put in: to know that they fit, only long
        # summaries need be tokenized
        numbers = np.arange(len(self.pairs))
        fits = 2 * self.pairs.summary_bytes.astype(np.int64) + 8 < self._room(np.zeros(0, np.int32))
        for number in numbers[~fits]:
            fits[number] = self._room(tokenize([self.pairs[number].summary], self.tokenizer)) >= 1
        if not fits.all():
            out = numbers[~fits]
            shown = ", ".join(self.pairs.where(int(n)) for n in out[:5]) + (" ..." if len(out) > 5 else "")
            if not fits.any():
                raise ValueError(
                    f"context_length: expected rows that hold a summary, got {self.length} tokens, too short for each "
                    f"of {len(out)} ({shown}). Choose longer rows."
                )
            logger.warning(
                "Left out %d of %d pairs, whose summaries do not fit into %d tokens: %s",
                len(out),
                len(fits),
                self.length,
                shown,
            )
        return numbers[fits]

    def number_of(self, sample: int) -> int:
        """Which of the pairs sample 0, 1, ... is made of."""
        epoch, place = divmod(sample, len(self._numbers))
        return int(self._numbers[permuted(place, len(self._numbers), mix(self.seed, epoch))])

    def batch(self, first: int, count: int) -> dict[str, Tensor]:
        """Samples first .. first + count - 1, whatever the batch.

        Returns:
            ``input_ids`` int64 [B, T]; ``attention_mask`` bool [B, T], False where a row's text has ended; ``labels``
            int64 [B, T], -100 where no loss; ``loss_weights`` float32 [B, T]; ``close_chunk`` bool [B, T], a landmark
            follows; ``answers`` bool [B, T], the summary's tokens and the end of the text.

        Raises:
            ValueError: a file that has changed since it was opened.
        """
        ids = torch.full((count, self.length), int(self._absent))
        present, close, answers = (torch.zeros(ids.shape, dtype=torch.bool) for _ in range(3))
        for row in range(count):
            text, mark, start = self._text(int(first) + row)
            ids[row, : len(text)] = torch.from_numpy(text)
            present[row, : len(text)] = True
            close[row, mark] = True
            answers[row, start : len(text)] = True
        weights = torch.where(answers, self.answer_weight, 1.0) * present
        weights[:, 0] = 0  # nothing predicts the first token
        return {
            "input_ids": ids,
            "attention_mask": present,
            "labels": ids.masked_fill(weights == 0, IGNORED),
            "loss_weights": weights,
            "close_chunk": close,
            "answers": answers,
        }

    def _text(self, sample: int) -> tuple[npt.NDArray[np.int64], int, int]:
        """Lay out a text: tokens [at most T], the place before the landmark, and that of the summary's first token."""
        number = self.number_of(sample)
        document, summary = (tokenize([text], self.tokenizer) for text in self.pairs[number])
        room = self._room(summary)
        if room < 1:
            raise ValueError(
                f"data: expected a summary of fewer than {len(summary) + room} tokens, got {len(summary)} in "
                f"{self.pairs.where(number)}. Choose longer rows or shorten it."
            )
        document = document[:room]
        end = np.array([self.tokenizer.eos_token_id])
        mark = len(document) + len(self._before) - 1
        text = np.concatenate([document, self._before, self._after, summary, end])
        return text.astype(np.int64), mark, mark + 1 + len(self._after)


class _Source(Protocol):
    """The pairs of one file."""

    summary_bytes: array[int]

    def read(self, number: int) -> Pair: ...

    def where(self, number: int) -> str: ...


class Pairs:
    """Documents and summaries in files, read when they are asked for: in memory are 12 bytes of each.

    All are checked once when they are opened. Pairs without a document or a summary are left out, and named in a
    warning.

    Args:
        paths: ``.jsonl`` or ``.parquet`` files, or folders of such. Lines of JSON are read fastest: from Parquet,
            a pair costs the decoding of its row group.
        document_column: None: "document" or "article".
        summary_column: None: "summary" or "highlights".

    Raises:
        ValueError: no pairs; a file of another kind; a line or row that is no pair, named by file and number; a
            ``pairs.jsonl`` that is not what ``pairs.json`` beside it says.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        document_column: str | None = None,
        summary_column: str | None = None,
    ) -> None:
        documents = DOCUMENT_COLUMNS if document_column is None else (document_column,)
        summaries = SUMMARY_COLUMNS if summary_column is None else (summary_column,)
        files = _files([paths] if isinstance(paths, str | Path) else paths)
        hashes = []
        for file in files:
            with _reading(file):
                hashes.append(sha256_of(file))
            expect_as_prepared(file, hashes[-1])
        self._sources: list[_Source] = [
            (_JsonLines if file.suffix == ".jsonl" else _Parquet)(file, documents, summaries)
            for file in files
        ]
        counts = [len(source.summary_bytes) for source in self._sources]
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        if not len(self):
            raise ValueError(
                f"data: expected pairs of a document and a summary in {', '.join(map(str, files))}, found none."
            )
        self.summary_bytes = np.concatenate([np.array(source.summary_bytes) for source in self._sources])
        self.fingerprint = hashlib.sha256("".join(hashes).encode()).hexdigest()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, number: int) -> Pair:
        source, place = self._place(number)
        return source.read(place)

    def where(self, number: int) -> str:
        """File and line, for people."""
        source, place = self._place(number)
        return source.where(place)

    def _place(self, number: int) -> tuple[_Source, int]:
        if not 0 <= number < len(self):
            raise IndexError(f"number: expected 0 to {len(self) - 1}, got {number}.")
        source = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self._sources[source], int(number - self._starts[source])


class _JsonLines:
    """Where each line begins: a pair is read and parsed when it is asked for."""

    def __init__(self, path: Path, documents: Sequence[str], summaries: Sequence[str]) -> None:
        self.path, self.columns = path, (documents, summaries)
        self.offsets, self.summary_bytes = array("q"), array("i")
        empty, offset = [], 0
        with _reading(path), open_regular(path, "data", links=True) as file:
            for line_number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path}, line {line_number}"
                    pair = self._parse(line, where)
                    if _is_empty(pair):
                        empty.append(where)
                    else:
                        self.offsets.append(offset)
                        self.summary_bytes.append(len(pair.summary.encode()))
                offset += len(line)
        _warn_of_empty(empty)

    def read(self, number: int) -> Pair:
        with _reading(self.path), open_regular(self.path, "data", links=True) as file:
            file.seek(self.offsets[number])
            line = file.readline()
        try:
            return self._parse(line, str(self.path))
        except ValueError:  # it was right when the file was opened
            return self._parse(line, self.where(number))

    def where(self, number: int) -> str:
        # counted when asked, for errors: nothing of it is kept
        left, lines = self.offsets[number], 1
        with _reading(self.path), open_regular(self.path, "data", links=True) as file:
            while left and (block := file.read(min(left, 1 << 20))):
                lines, left = lines + block.count(b"\n"), left - len(block)
        return f"{self.path}, line {lines}"

    def _parse(self, line: bytes, where: str) -> Pair:
        try:
            text = line.removeprefix(codecs.BOM_UTF8).decode("utf-8")
            record = parse_json(text, "it", finite=False)  # only its texts are taken
        except UnicodeDecodeError as error:
            raise ValueError(f"data: expected UTF-8 text in {where}, byte {error.start} is none.") from error
        except ValueError as error:
            raise ValueError(f"data: expected one JSON object in {where} ({error}).") from error
        if not isinstance(record, dict):
            raise ValueError(
                f"data: expected a JSON object with a document and its summary in {where}, got {_short(record)}."
            )
        return _pair([record[_column(record, names, where)] for names in self.columns], where)


class _Parquet:
    """Rows of a Parquet file; the row group read last is kept."""

    def __init__(self, path: Path, documents: Sequence[str], summaries: Sequence[str]) -> None:
        try:
            import pyarrow
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise ValueError(
                f"data: reading {str(path)!r} needs pyarrow. pip install 'trailmark[data]', or convert it to .jsonl."
            ) from error
        self.path, self._errors, self._open = path, pyarrow.ArrowException, parquet.ParquetFile
        self.rows, self.summary_bytes = array("q"), array("i")
        empty, row = [], -1
        with _reading(path, self._errors), self._open(path) as file:
            columns = file.schema_arrow.names
            self.columns = [_column(columns, names, str(path)) for names in (documents, summaries)]
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            self.first_rows = np.cumsum([0, *sizes])  # of each group
            for group in range(file.num_row_groups):
                for values in zip(*self._columns_of(file, group), strict=True):
                    row += 1
                    pair = _pair(values, f"{path}, row {row}")
                    if _is_empty(pair):
                        empty.append(f"{path}, row {row}")
                    else:
                        self.rows.append(row)
                        self.summary_bytes.append(len(pair.summary.encode()))
        _warn_of_empty(empty)
        self._kept: tuple[int, list[list[Any]]] | None = None

    def _columns_of(self, file: Any, group: int) -> list[list[Any]]:
        table = file.read_row_group(group, columns=list(dict.fromkeys(self.columns)))
        return [table.column(name).to_pylist() for name in self.columns]

    def read(self, number: int) -> Pair:
        row = self.rows[number]
        group = int(np.searchsorted(self.first_rows, row, side="right")) - 1
        if self._kept is None or self._kept[0] != group:
            with _reading(self.path, self._errors), self._open(self.path) as file:
                self._kept = group, self._columns_of(file, group)
        place = row - int(self.first_rows[group])
        return _pair([column[place] for column in self._kept[1]], self.where(number))

    def where(self, number: int) -> str:
        return f"{self.path}, row {self.rows[number]}"


def _files(paths: Sequence[str | Path]) -> list[Path]:
    kinds, files = (".jsonl", ".parquet"), []
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"data: expected a file or folder of pairs, {str(path)!r} does not exist.")
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.suffix in kinds and file.is_file())
            if not inside:
                raise ValueError(f"data: expected .jsonl or .parquet files in {str(path)!r}, found none.")
            files += inside
        elif path.suffix in kinds:
            files.append(path)
        else:
            raise ValueError(
                f"data: expected a .jsonl or .parquet file of pairs (document, summary), got {str(path)!r}. Convert or "
                "unpack it first."
            )
    once: dict[Path, Path] = {}
    for path in files:
        once.setdefault(path.resolve(), path)
    if len(once) < len(files):
        logger.warning(
            "%d files of pairs are named more than once: each is taken once.", len(files) - len(once)
        )
    return [*once.values()]


@contextmanager
def _reading(path: Path, errors: type[Exception] = OSError) -> Iterator[None]:
    """Turn what goes wrong with a file into a ValueError that names it."""
    try:
        yield
    except (OSError, errors) as error:
        if isinstance(error, ValueError) and str(error).startswith("data: "):  # pyarrow's are ValueErrors too
            raise
        reason = getattr(error, "strerror", None) or first_line(error)
        raise ValueError(f"data: cannot read {str(path)!r}: {reason}.") from error


def _column(columns: Sequence[str] | dict[str, Any], names: Sequence[str], where: str) -> str:
    """The first of ``names`` that there is."""
    for name in names:
        if name in columns:
            return name
    there = ", ".join(map(repr, columns)) or "none"
    raise ValueError(
        f"data: expected a column {' or '.join(map(repr, names))} in {where}, got {there}. Name the column to read."
    )


def _pair(values: Sequence[Any], where: str) -> Pair:
    for name, value in zip(Pair._fields, values, strict=True):
        if not isinstance(value, str):
            raise ValueError(f"data: expected the text of a {name} in {where}, got {_short(value)}.")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"data: the {name} in {where} is no Unicode text ({error.reason}).") from error
    return Pair(*values)


def _is_empty(pair: Pair) -> bool:
    return not (pair.document.strip() and pair.summary.strip())


def _short(value: Any) -> str:
    shown = json.dumps(value, default=str)
    return shown if len(shown) <= 40 else shown[:40] + "..."


def _warn_of_empty(places: list[str]) -> None:
    if places:
        shown = ", ".join(places[:5]) + (" ..." if len(places) > 5 else "")
        logger.warning("Left out %d pairs without a document or a summary: %s", len(places), shown)
