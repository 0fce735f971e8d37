"""A cache as tensors and back: what a saved memory holds beside its chunk records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trailmark.files import HeldFolder
from trailmark.memory import saved
from trailmark.memory.cell import Cell
from trailmark.memory.chunks import ChunkMemory, MemorySize
from trailmark.memory.schema import (
    Expected,
    expect_numbers,
    expect_record_shape,
    expect_tables,
    expect_tensors,
    expect_tokens,
)
from trailmark.memory.state import STATES, CacheState, Deferred, Retrieved
from trailmark.memory.tiers.base import open_store
from trailmark.memory.tiers.records import RecordLayout
from trailmark.memory.window import Span
from trailmark.untrusted import brief

_CELL = ("tokens", "counts", "chunk", "slot", "is_landmark", "offset", "retrievals")  # its numpy arrays


def save_state(
    state: CacheState,
    memory: ChunkMemory,
    folder: str | Path,
    header: dict[str, Any],
    notes: dict[str, Any],
    held: HeldFolder | None = None,
) -> None:
    """Write a cache's state and memory into ``folder``; see :func:`trailmark.memory.saved.save`."""
    size = state.memory
    if memory.base is not None:  # a branch: its chunks and those that it shares become one memory
        memory.expect_whole()
        memory, size = memory.flattened(size)
    tensors = dict(state_tensors(state)) | memory.tables(size)
    saved.save(folder, tensors, header | {"notes": notes}, memory.store, size.records, held)


def load_state(
    folder: str | Path,
    empty: Callable[[int], CacheState],
    memory: ChunkMemory,
    header: dict[str, Any],
    device: torch.device,
    expected: Expected,
) -> tuple[CacheState, dict[str, Any]]:
    """The state that ``folder`` holds and its notes, and its chunks in ``memory``, which is empty.

    Args:
        empty: the state of so many rows before anything was read.
        memory: of tier "disk", chunks stay in the folder's file, mapped, and reading goes on there; else they
            are read whole.
        header: what the memory must have been written with, of the model that is to go on.
        expected: what that model's state is like.

    Raises:
        ValueError: for anything that is not a memory of this model.
    """
    there = saved.load(folder)
    # first what both name: what one leaves out may differ for the same reason
    for key, value in sorted(header.items(), key=lambda item: item[0] not in there.header):
        wrote = there.header.get(key, expected.unnamed.get(key))
        if wrote != value:
            raise ValueError(
                f"folder: expected a memory written by this model, the one in {str(folder)!r} was written with "
                f"another {key} ({_brief(wrote)}, not {_brief(value)}). Load it with the model that "
                "wrote it, without a change of that field, or read the text again."
            )
    shape, notes = there.record_shape, there.header.get("notes", {})
    try:
        expect_tensors(there.tensors, expected)
        state, tables = read_state(there.tensors, empty, device)
        num_chunks = torch.from_numpy(state.memory.chunks)
        rows_of_record = None if shape is None else memory.keys_of_shape(shape)
        width = expected.sizes.get("LE")
        vectors = expected.sizes.get("LP")
        expect_tables(tables, num_chunks, there.count, rows_of_record, vectors, memory.planes, width)
        expect_numbers(state, expected)
        if memory.keeps_tokens:
            expect_tokens(state, tables, expected)
        expect_record_shape(shape, expected, memory.keeps_tokens)
        if not isinstance(notes, dict):
            raise ValueError(f"notes: expected a section with keys, got {brief(notes)}")
    except (ValueError, RuntimeError, IndexError) as error:
        reason = str(error).rstrip(".")
        raise ValueError(
            f"folder: expected a whole memory in {str(folder)!r}, its state is none ({reason}). Take the memory from a "
            "copy, or read the text again."
        ) from error
    fill(memory, there, tables, device)
    state = replace(state, memory=state.memory._replace(records=there.count))
    return state, notes


def fill(memory: ChunkMemory, there: saved.Saved, tables: dict[str, Tensor], device: torch.device) -> None:
    """Put the chunks that a folder holds into a memory, which is empty; ``tables`` were checked."""
    if there.chunk_file is None or not there.count:
        return
    assert there.record_shape is not None
    assert there.dtype is not None
    layout = RecordLayout(there.record_shape, there.dtype, "cpu" if memory.keeps_tokens else device)
    tier = memory.tier
    if memory.keeps_tokens:  # without a folder of its own it writes nothing there
        tier = "disk" if memory.folder is not None else "host"
    store = open_store(tier, there.chunk_file, layout, there.count)
    store.signed, store.vouched = there.signed, there.count
    memory.fill(store, {name: x.to(device) if name == "landmarks" else x for name, x in tables.items()})


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 16 else text[:12] + "..."


def state_tensors(state: CacheState) -> Iterator[tuple[str, Tensor]]:
    """What is saved of a state, by name; :func:`read_state` makes it one again."""

    def numbers(x: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x))

    for name in ("num_tokens", "num_positions", "phases"):
        yield name, numbers(getattr(state, name))
    yield "num_chunks", numbers(state.memory.chunks)
    yield "short_chunks", torch.tensor(state.memory.short)
    for n, span in enumerate(state.spans):
        yield f"spans.{n}", numbers(np.stack(span))
    for n, layer in enumerate(state.layers):
        if layer.keys is not None:
            assert layer.values is not None
            yield f"layers.{n}.keys", layer.keys
            yield f"layers.{n}.values", layer.values
    for n, got in enumerate(state.pending):
        if got is not None:
            yield f"pending.{n}.indices", numbers(got.indices)
            yield f"pending.{n}.lengths", numbers(got.lengths)
            yield f"pending.{n}.weights", got.weights
            yield f"pending.{n}.k", got.k
            yield f"pending.{n}.v", got.v
            yield f"pending.{n}.short", torch.tensor(got.short is not None)
    for name in STATES:
        if (alone := getattr(state, name)) is not None:
            yield name, alone
    if state.deferred is not None:
        for name, part in state.deferred._asdict().items():
            yield f"deferred.{name}", part if isinstance(part, Tensor) else numbers(part)
    if (cell := state.cell) is not None:
        for name in _CELL:
            yield f"cell.{name}", numbers(getattr(cell, name))
        for name in ("running", "chosen"):
            for n, x in enumerate(getattr(cell, name)):
                if x is not None:
                    yield f"cell.{name}.{n}", x


def read_state(
    tensors: dict[str, Tensor], empty: Callable[[int], CacheState], device: torch.device
) -> tuple[CacheState, dict[str, Tensor]]:
    """A state that was saved, and what else there is among ``tensors``; ``empty``: the state of so many rows.

    Raises:
        ValueError: something of it is missing.
    """
    left = dict(tensors)

    def numbers(name: str) -> Any:
        return left.pop(name).numpy().copy()

    def own(name: str) -> Tensor:
        """A copy: windows are written to, and a map of the file would be kept for them."""
        with torch.inference_mode(False):
            return left.pop(name).to(device, copy=True)

    try:
        num_tokens = numbers("num_tokens")
        state = empty(len(num_tokens))
        layers = list(state.layers)
        for n, layer in enumerate(layers):
            if f"layers.{n}.keys" in left:
                layer.keys, layer.values = own(f"layers.{n}.keys"), own(f"layers.{n}.values")
                layer.is_initialized = True
        pending: list[Retrieved | None] = []
        for n in range(len(state.pending)):
            name = f"pending.{n}."
            if name + "k" not in left:
                pending.append(None)
                continue
            lengths = numbers(name + "lengths")
            weights, k, v = own(name + "weights"), own(name + "k"), own(name + "v")
            short = bool(numbers(name + "short"))
            pending.append(Retrieved.of(numbers(name + "indices"), lengths, weights, k, v, short))
        deferred = None
        if "deferred.states" in left:
            # memories of before models without landmarks, which alone look at it, have none
            left.setdefault("deferred.begun", torch.zeros(1, dtype=torch.int64))
            tables = (numbers(f"deferred.{name}") for name in Deferred._fields[1:])
            deferred = Deferred(own("deferred.states"), *tables)
        cell = None
        if "cell.tokens" in left:
            arrays: dict[str, Any] = {name: numbers(f"cell.{name}") for name in _CELL}
            carried: dict[str, Any] = {
                name: tuple(
                    own(key) if (key := f"cell.{name}.{n}") in left else None for n in range(len(layers))
                )
                for name in ("running", "chosen")
            }
            cell = Cell(**arrays, **carried)
        alone: dict[str, Any] = {name: own(name) for name in STATES if name in left}
        state = CacheState(
            num_tokens=num_tokens,
            num_positions=numbers("num_positions"),
            phases=numbers("phases"),
            memory=MemorySize(numbers("num_chunks"), 0, bool(numbers("short_chunks"))),
            spans=tuple(Span(*numbers(f"spans.{n}")) for n in range(len(state.spans))),
            layers=tuple(layers),
            pending=tuple(pending),
            deferred=deferred,
            cell=cell,
            **alone,
        )
    except KeyError as error:
        raise ValueError(f"{error} is missing in it") from error
    return state, left
