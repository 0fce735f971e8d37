"""What a model read where a text refers back, and what that was worth: one row for each reference of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from case_study.baselines import Rules, best_rank, chance
from case_study.references import Layout, Reference, references
from trailmark.trace.lines import TracedChunk

Row = dict[str, Any]


def rows_of(chunks: Sequence[TracedChunk], limits: Sequence[int], rules: Rules) -> list[Row]:
    """Of each reference to a label in a chunk that the reading chunk may read: of ``limits`` [C], so many of the first.

    ``now`` tells of the chunk in which the name begins; ``early`` of the one before it, None where that may not read
    the label yet: of each of these ``candidates``, ``sizes`` of what each group read and last of all together, whether
    each ``label`` (its chunk is read), ``name`` (a chunk that names it, as label or reference) and ``near`` (the
    label's chunk or a neighbour of it) is among them, ``weights`` of the label's chunk in each group, and ``ranks``
    of every other rule for ``label`` and ``name``.
    """
    found = [
        reference
        for reference in references(Layout.of(chunks))
        if reference.label_chunk < limits[reference.chunk]
    ]
    losses = np.concatenate([chunk.losses for chunk in chunks])
    without = np.concatenate([chunk.losses_without for chunk in chunks])
    rows: list[Row] = []
    for reference in found:
        first, stop = reference.tokens
        own: Row = {
            "name": reference.name,
            "macro": reference.macro,
            "chunk": reference.chunk,
            "token": first,
            "tokens": stop - first,
            "label_chunk": reference.label_chunk,
            "distance": reference.distance,
            "loss": float(losses[first:stop].sum()),
            "loss_without": float(without[first:stop].sum()),
            "now": _reads(chunks[reference.chunk], reference, limits[reference.chunk]),
            "early": None,
        }
        before = reference.chunk - 1
        if reference.label_chunk < limits[before]:
            own["early"] = _reads(chunks[before], reference, limits[before])
        rows.append(own)
    _rank(rules, found, rows)
    return rows


def _wanted(reference: Reference, limit: int) -> dict[str, list[int]]:
    """The chunks that count, among the first ``limit``."""
    near = [reference.label_chunk + step for step in (-1, 0, 1)]
    return {
        "label": [reference.label_chunk],
        "name": [chunk for chunk in reference.mentions if chunk < limit],
        "near": [chunk for chunk in near if 0 <= chunk < limit],
    }


def _reads(chunk: TracedChunk, reference: Reference, limit: int) -> Row:
    """What the groups of a chunk that reads found."""
    groups = [set(read.chunks.tolist()) for read in chunk.reads]
    read_by_any = set().union(*groups)
    if any(m >= limit for m in read_by_any):  # else the rules below would choose among others
        raise AssertionError(f"chunk {chunk.number} read {max(read_by_any)}, of {limit} candidates")
    groups.append(read_by_any)
    wanted = _wanted(reference, limit)
    weights = [
        float(read.weights[read.chunks == reference.label_chunk].sum())
        if reference.label_chunk in own
        else None
        for read, own in zip(chunk.reads, groups, strict=False)
    ]
    return {
        "candidates": limit,
        "sizes": [len(group) for group in groups],
        **{kind: [not group.isdisjoint(those) for group in groups] for kind, those in wanted.items()},
        "wanted": {kind: len(those) for kind, those in wanted.items()},
        "weights": weights,
        "ranks": {kind: {} for kind in wanted},
    }


def _rank(rules: Rules, found: Sequence[Reference], rows: Sequence[Row]) -> None:
    """Fill in the ranks of the other rules, each chunk's scores once."""
    asked: dict[int, list[tuple[Reference, Row]]] = {}
    for reference, row in zip(found, rows, strict=True):
        asked.setdefault(reference.chunk, []).append((reference, row["now"]))
        if row["early"] is not None:
            asked.setdefault(reference.chunk - 1, []).append((reference, row["early"]))
    for rule, chunk, scores in rules.each(np.array(sorted(asked), np.int64)):
        for reference, reads in asked[chunk]:
            for kind, those in _wanted(reference, reads["candidates"]).items():
                reads["ranks"][kind][rule] = best_rank(scores, reads["candidates"], those)


def hit(reads: Row, kind: str, rule: str, group: int) -> float:
    """Whether ``rule`` finds one of the chunks that count, with as many chunks as group ``group`` read; -1: all groups.

    1 or 0; of "random" the chance. ``rule`` "model" is the model itself.
    """
    if rule == "model":
        return float(reads[kind][group])
    size = reads["sizes"][group]
    if rule == "random":
        return chance(reads["candidates"], reads["wanted"][kind], size)
    rank = reads["ranks"][kind][rule]
    return float(rank is not None and rank < size)
