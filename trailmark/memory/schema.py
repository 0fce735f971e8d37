"""What the tensors of a saved memory must be: their shapes, their types, and numbers that fit each other.

A manifest's SHA-256 says that a file is as it was written, not by whom: one who can sign it can write anything. What is
checked here is that nothing of it is followed out of a memory's bounds, and that what is compared is finite.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trailmark.memory.cell import Cell
from trailmark.memory.state import CacheState
from trailmark.memory.tables import Booleans, Integers, as_read
from trailmark.untrusted import brief

# B rows; those of ``Expected`` are the model's, where it has them; every other letter is any size, the same in all
# tensors of one prefix
_SHAPES = {
    r"num_tokens|num_positions|phases|num_chunks|first_chunks": ("int64", "B"),
    r"short_chunks|pending\.\d+\.short": ("bool", ""),
    r"spans\.\d+": ("int64", "2 B"),
    r"layers\.\d+\.(keys|values)": ("float", "B J W D"),
    r"pending\.\d+\.(indices|lengths)": ("int64", "B K"),
    r"pending\.\d+\.weights": ("float", "B K"),
    r"pending\.\d+\.(k|v)": ("float", "B K PS PJ PD"),
    r"open_ids": ("int64", "B S"),
    r"open_states": ("float", "B S OE"),
    r"states": ("float", "B N E"),
    r"state_kv": ("float", "B N OE"),
    r"deferred\.states": ("float", "B P E"),
    r"deferred\.chunk": ("int64", "b P"),
    r"deferred\.is_landmark": ("bool", "b P"),
    r"deferred\.first_chunk": ("int64", "B"),
    r"deferred\.begun": ("int64", "c"),
    r"cell\.(tokens|counts)": ("int64", "B"),
    r"cell\.(chunk|slot)": ("int64", "B P"),
    r"cell\.is_landmark": ("bool", "B P"),
    r"cell\.offset": ("int64", "1"),
    r"cell\.retrievals": ("int64", "2"),
    r"records|starts|lengths": ("int64", "B M"),
}
_TABLES = ("records", "starts", "lengths", "landmarks")
_AT_ONCE = 1 << 16  # chunks
_ROWS = ("b", "c")  # of arrays that have one row where all are alike
_MOST = 2**48  # tokens: what is added to such numbers stays one


class Expected(NamedTuple):
    """What a model's own state is like."""

    sizes: Mapping[str, int] = {}
    """Of a layer's keys J heads of width D; states of width E; S tokens of a chunk, of width OE where the
    open one is kept; N recurrent states; landmark vectors of width LE, LP of them a chunk; CT tokens of a cell;
    what was retrieved has PS keys a chunk of PJ heads of width PD; V tokens of the vocabulary."""
    landmarks: int = 1
    """Positions that a chunk takes besides its tokens."""
    windows: tuple[int | None, ...] = ()
    """Of each layer, the slots that its keys have; None: any number."""
    kept: tuple[str, ...] = ()
    """Tensors that are there once something was read."""
    record_shape: tuple[int, ...] | None = None
    """(2, J, S, D) of a record in memory; None: any."""
    unnamed: Mapping[str, str] = {}
    """What was meant by fields that a memory of before they were new does not name."""


def expect_tensors(tensors: Mapping[str, Tensor], expected: Expected) -> None:
    """Raise a ValueError where a tensor has another type or shape than its name says, or is not finite."""
    rows = tensors["num_tokens"].shape[0] if "num_tokens" in tensors and tensors["num_tokens"].dim() else 1
    known = {**expected.sizes, "B": rows, "1": 1, "2": 2}
    bound = {(f"layers.{n}", "W"): size for n, size in enumerate(expected.windows) if size is not None}
    for name, tensor in tensors.items():
        found = next((shape for pattern, shape in _SHAPES.items() if re.fullmatch(pattern, name)), None)
        if found is None:
            continue
        kind, dims = found
        letters, scope = dims.split(), name.rpartition(".")[0]
        fits = tensor.is_floating_point() if kind == "float" else tensor.dtype == getattr(torch, kind)
        fits = fits and tensor.dim() == len(letters)
        sizes: list[int | str] = []
        for letter, size in zip(letters, tensor.shape, strict=False):
            fits = fits and (letter not in _ROWS or size in (1, rows))
            of_model = known[letter] if letter in known else bound.setdefault((scope, letter), size)
            fits = fits and of_model == size
            sizes.append(of_model)
        came = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        _expect(fits, name, f"{kind} [{', '.join(letters)}] = {sizes}", came)
        _expect(kind != "float" or bool(tensor.isfinite().all()), name, *_NOT_FINITE)
    missing = [name for name in expected.kept if name not in tensors]
    begun = "num_tokens" in tensors and bool(tensors["num_tokens"].any())
    _expect(not (missing and begun), "tensors", f"{', '.join(expected.kept)}", f"no {', '.join(missing)}")


_NOT_FINITE = ("finite numbers", "some that are not (NaN or infinite)")


def expect_numbers(state: CacheState, expected: Expected) -> None:
    """Raise a ValueError where numbers of a state do not fit each other: what has been read, chunks, positions."""
    tokens, positions, chunks = state.num_tokens, state.num_positions, state.memory.chunks
    _within("num_tokens", tokens, 0, _MOST)
    _within("num_positions", positions, tokens, 2 * tokens)
    _within("num_chunks", chunks, 0, tokens)
    size = expected.sizes.get("S")  # None: there are no chunks
    _within("phases", state.phases, 0, 0 if size is None else np.minimum(tokens, size - 1))
    for n, span in enumerate(state.spans):
        _within(f"spans.{n}", span.end, 0, positions)
        _within(f"spans.{n}", span.start, 0, span.end)
    least = min((int(span.end.max()) for span in state.spans), default=0)
    for n, (window, layer) in enumerate(zip(expected.windows, state.layers, strict=False)):
        if window is None and layer.keys is not None:  # all that these layers saw is there
            slots = layer.keys.shape[2]
            _expect(slots >= least, f"layers.{n}.keys", f"keys of {least} positions", f"{slots}")
    for n, got in enumerate(state.pending):
        if got is not None:
            _within(f"pending.{n}.indices", got.indices, -1, chunks[:, None] - 1)
            _within(f"pending.{n}.lengths", got.lengths, 0, got.k.shape[2])
    if (cell := state.cell) is not None:
        _expect_cell(cell, state, expected)
    if (waiting := state.deferred) is not None:
        there, closed = waiting.chunk >= 0, waiting.is_landmark.sum(1)
        _expect_in_order("deferred.chunk", waiting.chunk, waiting.is_landmark, there.sum(1))
        _within("deferred.begun", waiting.begun, 0, positions.max() if size is None else size)
        _within("deferred.first_chunk", waiting.first_chunk, 0, positions)
        if "LE" in expected.sizes or chunks.any():
            _within("deferred.first_chunk", waiting.first_chunk + closed, chunks, chunks)


def _expect_cell(cell: Cell, state: CacheState, expected: Expected) -> None:
    counts, marks, places = cell.counts, cell.is_landmark, np.arange(cell.chunk.shape[1])
    room = min((x.keys.shape[2] for x in state.layers if x.keys is not None), default=0)
    _within("cell.tokens", cell.tokens, 0, expected.sizes.get("CT", 1) - 1)
    _within("cell.counts", counts, 0, min(room, len(places)))
    _expect_in_order("cell.chunk", cell.chunk, marks, counts)
    begins = np.maximum.accumulate(np.where(np.roll(marks, 1, axis=1), places, 0), axis=1)
    slot = np.where(marks, expected.sizes.get("S", 1), places - begins)
    _expect(bool(((cell.slot == slot) | (cell.chunk < 0)).all()), "cell.slot", "places in order", "others")
    _within("cell.slot", cell.slot, 0, expected.sizes.get("S", 1))
    _within("cell.offset", cell.offset, 0, state.num_tokens.max())
    _within("cell.retrievals", cell.retrievals, 0, _MOST)


def _expect_in_order(name: str, chunk: Integers, marks: Booleans, counts: Integers) -> None:
    """As a layout keeps them: present ones first, chunks counted from 0, a new one after each landmark."""
    there = np.arange(chunk.shape[1]) < counts[:, None]
    number = np.where(there, np.cumsum(marks, axis=1) - marks, -1)
    fits = chunk.shape[0] == there.shape[0] and (chunk == number).all() and (marks <= there).all()
    _expect(bool(fits), name, "chunks in order", "others")


def _within(name: str, numbers: Any, least: Any, most: Any) -> None:
    _expect(
        bool(((numbers >= least) & (numbers <= most)).all()),
        name,
        "numbers that fit what was read",
        numbers.tolist(),
    )


def expect_record_shape(shape: tuple[int, ...] | None, expected: Expected, tokens: bool) -> None:
    """Raise a ValueError where records have another shape than the model's; ``tokens``: they hold a chunk's tokens."""
    wanted = expected.record_shape
    if wanted is not None and tokens:
        wanted = (wanted[2],)
    _expect(shape is None or wanted in (None, shape), "record_shape", str(wanted), shape)


def expect_tables(
    tables: Mapping[str, Tensor],
    num_chunks: Tensor,
    records: int,
    rows_of_record: int | None,
    vectors: int | None,
    planes: int,
    width: int | None = None,
) -> None:
    """Raise a ValueError where tables of chunks do not fit the records or each other, or landmarks are not finite.

    Args:
        tables: see :meth:`trailmark.memory.chunks.ChunkMemory.tables`; checked by :func:`expect_tensors`.
        num_chunks: [B] that count.
        records: that were saved.
        rows_of_record: S, keys that a record has room for; None: there is no record.
        vectors: landmark vectors of a chunk; None: one, or one for each of its records.
        planes: records of a chunk.
        width: of the landmarks; None: any.
    """
    unknown = sorted({*tables} - {*_TABLES, "first_chunks"})
    _expect(not unknown, "tensors", "those that a model saves", f"more: {brief(unknown)}")
    if rows_of_record is None or not records:
        _expect(not len({*_TABLES} & {*tables}), "chunks", "records for the chunks of its tables", "none")
        return
    missing = [name for name in _TABLES if name not in tables]
    _expect(not missing, "tables", f"those of {', '.join(_TABLES)}", f"no {', '.join(missing)}")
    first = tables.get("first_chunks", torch.zeros_like(num_chunks))
    low, high = int(first.min()), int(num_chunks.max())
    _expect(low >= 0 and bool((first <= num_chunks).all()), "first_chunks", "chunks that were written", first)
    landmarks, shape = tables["landmarks"], (len(num_chunks), high - low)
    for name in _TABLES[:3]:
        _expect(tuple(tables[name].shape) == shape, name, f"the shape {shape}", tuple(tables[name].shape))
    _expect(
        landmarks.is_floating_point()
        and landmarks.dim() >= 3
        and tuple(landmarks.shape[-3:-1]) == shape
        and (
            tuple(landmarks.shape[:-3]) == (vectors,)
            if vectors is not None
            else landmarks[..., 0].numel() in (shape[0] * shape[1], planes * shape[0] * shape[1])
        )
        and width in (None, landmarks.shape[-1]),
        "landmarks",
        f"numbers of the shape [..., {shape[0]}, {shape[1]}, {width or 'E'}]",
        f"{landmarks.dtype} {list(landmarks.shape)}",
    )
    number = torch.arange(low, high)
    counts = (number >= first[:, None]) & (number < num_chunks[:, None])  # [B, M]
    for name, most in (("records", records - planes), ("starts", None), ("lengths", rows_of_record)):
        held = tables[name][counts]
        fits = held.numel() == 0 or (int(held.min()) >= 0 and (most is None or int(held.max()) <= most))
        _expect(fits, name, "numbers from 0" + ("" if most is None else f" to {most}"), "others")
    vectors_of = as_read(landmarks)
    for at in range(0, counts.shape[1], _AT_ONCE):  # of a mapped file: what is looked at is not held
        some = slice(at, at + _AT_ONCE)
        finite = vectors_of[:, some].isfinite().flatten(2).all(2)
        _expect(bool((finite | ~counts[:, some]).all()), "landmarks", *_NOT_FINITE)


def expect_tokens(state: CacheState, tables: Mapping[str, Tensor], expected: Expected) -> None:
    """Raise a ValueError where a memory of tokens lacks those of the open chunk, or its chunks leave gaps.

    What is encoded again is found by how long the chunks before it are.
    """
    ids, read, most = state.open_ids, state.num_tokens, expected.sizes.get("V", _MOST)
    _expect(ids is not None or not read.any(), "tensors", "open_ids", "none")
    if ids is not None:
        known = ids.cpu().numpy()[np.arange(ids.shape[1]) < state.phases[:, None]]
        fits = bool(((known >= 0) & (known < most)).all())
        _expect(fits, "open_ids", f"tokens of the vocabulary, 0 to {most - 1}", "others")
    if "lengths" not in tables:
        return
    _expect("first_chunks" not in tables, "first_chunks", "none: all chunks are kept", "some")
    lengths, starts = tables["lengths"].numpy(), tables["starts"].numpy()
    there = np.arange(lengths.shape[1]) < state.memory.chunks[:, None]
    _expect(bool((lengths >= 1)[there].all()), "lengths", "at least 1 token of each chunk", "none")
    taken = np.where(there, lengths, 0)
    _expect(bool((taken.sum(1) + state.phases == read).all()), "lengths", f"{read} tokens in all", "others")
    before = np.cumsum(taken + expected.landmarks, axis=1) - taken - expected.landmarks
    _expect(bool((starts == before)[there].all()), "starts", "places that follow each other", "others")


def _expect(fits: bool, name: str, expected: str, came: object) -> None:
    if not fits:
        raise ValueError(f"{name}: expected {expected}, got {came if isinstance(came, str) else brief(came)}")
