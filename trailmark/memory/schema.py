"""What the tensors of a saved memory must be: their shapes, their types, and numbers that fit each other.

A manifest's SHA-256 says that a file is as it was written, not by whom: one who can sign it can write anything. What is
checked here is that nothing of it is followed out of a memory's bounds, and that what is compared is finite.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from trailmark.memory.tables import as_read
from trailmark.untrusted import brief

# B rows; other letters any size
_SHAPES = {
    r"num_tokens|num_positions|phases|num_chunks|first_chunks": ("int64", "B"),
    r"short_chunks|pending\.\d+\.short": ("bool", ""),
    r"spans\.\d+": ("int64", "2 B"),
    r"layers\.\d+\.(keys|values)": ("float", "B J W D"),
    r"pending\.\d+\.(indices|lengths)": ("int64", "B K"),
    r"pending\.\d+\.weights": ("float", "B K"),
    r"pending\.\d+\.(k|v)": ("float", "B K S J D"),
    r"open_ids": ("int64", "B S"),
    r"(open_)?states|state_kv|deferred\.states": ("float", "B P E"),
    r"deferred\.chunk": ("int64", "b P"),
    r"deferred\.is_landmark": ("bool", "b P"),
    r"deferred\.first_chunk": ("int64", "B"),
    r"deferred\.begun": ("int64", "b"),
    r"cell\.(tokens|counts)": ("int64", "B"),
    r"cell\.(chunk|slot)": ("int64", "B P"),
    r"cell\.is_landmark": ("bool", "B P"),
    r"cell\.(offset|retrievals)": ("int64", "N"),
    r"records|starts|lengths": ("int64", "B M"),
}
_TABLES = ("records", "starts", "lengths", "landmarks")


def expect_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Raise a ValueError where a tensor has another type or number of dimensions than its name says, or other rows."""
    rows = tensors["num_tokens"].shape[:1] if "num_tokens" in tensors else ()
    for name, tensor in tensors.items():
        for pattern, (kind, dims) in _SHAPES.items():
            if re.fullmatch(pattern, name):
                letters = dims.split()
                sizes = {"B": rows[0] if rows else None, "2": 2}
                fits = tensor.is_floating_point() if kind == "float" else tensor.dtype == getattr(torch, kind)
                fits = fits and tensor.dim() == len(letters)
                fits = fits and all(
                    sizes.get(letter, size) == size
                    for letter, size in zip(letters, tensor.shape, strict=True)
                )
                _expect(
                    fits,
                    name,
                    f"{kind} [{', '.join(letters)}] of {sizes['B']} rows B",
                    f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}",
                )


def expect_tables(
    tables: Mapping[str, Tensor],
    num_chunks: Tensor,
    records: int,
    rows_of_record: int | None,
    planes: int,
) -> None:
    """Raise a ValueError where tables of chunks do not fit the records or each other, or landmarks are not finite.

    Args:
        tables: see :meth:`trailmark.memory.chunks.ChunkMemory.tables`; checked by :func:`expect_tensors`.
        num_chunks: [B] that count.
        records: that were saved.
        rows_of_record: S, keys that a record has room for; None: there is no record.
        planes: records of a chunk.
    """
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
        landmarks.is_floating_point() and landmarks.dim() >= 3 and tuple(landmarks.shape[-3:-1]) == shape,
        "landmarks",
        f"numbers of the shape [..., {shape[0]}, {shape[1]}, E]",
        f"{landmarks.dtype} {list(landmarks.shape)}",
    )
    number = torch.arange(low, high)
    counts = (number >= first[:, None]) & (number < num_chunks[:, None])  # [B, M]
    for name, most in (("records", records - planes), ("starts", None), ("lengths", rows_of_record)):
        held = tables[name][counts]
        fits = held.numel() == 0 or (int(held.min()) >= 0 and (most is None or int(held.max()) <= most))
        _expect(fits, name, "numbers from 0" + ("" if most is None else f" to {most}"), "others")
    finite = as_read(landmarks).isfinite().flatten(2).all(2)
    _expect(
        bool((finite | ~counts).all()), "landmarks", "finite numbers", "some that are not (NaN or infinite)"
    )


def _expect(fits: bool, name: str, expected: str, came: object) -> None:
    if not fits:
        raise ValueError(f"{name}: expected {expected}, got {came if isinstance(came, str) else brief(came)}")
