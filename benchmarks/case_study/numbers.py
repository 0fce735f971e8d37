"""From rows of references to what the JSON holds: counts by distance, gains with intervals over chapters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from case_study.baselines import RULES, Rules
from case_study.measure import Row, hit
from trailmark.statistics import bootstrap_ratio
from trailmark.trace.lines import TracedChunk

EDGES = (512, 2048, 8192, 32768)  # tokens from the label to the reference
BINS = (
    "all",
    f"below {EDGES[0]:,}",
    *(f"{low:,}-{high - 1:,}" for low, high in pairwise(EDGES)),
    f"from {EDGES[-1]:,} on",
)
ALL_RULES = ("model", *RULES)
Texts = Sequence[Sequence[Row]]  # of each chapter


def bin_of(distance: int) -> int:
    """A place in BINS, where 0 is all."""
    return 1 + int(np.searchsorted(EDGES, distance, side="right"))


def in_bin(number: int) -> Callable[[Row], bool]:
    return lambda row: number == 0 or bin_of(row["distance"]) == number


# --- what was found ----------------------------------------------------------------------------------------


def found(row: Row, when: str, kind: str, rule: str, group: int) -> float | None:
    """Whether (of random: how probably) ``rule`` found what counts; None: it could not be read then.

    ``when``: "now" as in :func:`case_study.measure.rows_of`, "early", or "either" of both.
    """
    asked = [row[at] for at in (("now", "early") if when == "either" else (when,)) if row[at] is not None]
    if not asked:
        return None
    return 1 - float(np.prod([1 - hit(reads, kind, rule, group) for reads in asked]))


def counts(texts: Texts, when: str, kind: str, rule: str, group: int) -> list[list[float]]:
    """[found, of how many] for each of BINS."""
    shares = [
        (bin_of(row["distance"]), share)
        for rows in texts
        for row in rows
        if (share := found(row, when, kind, rule, group)) is not None
    ]
    return [
        [round(sum(own), 6), len(own)]
        for number in range(len(BINS))
        for own in [[share for at, share in shares if number in (0, at)]]
    ]


def hits(texts: Texts, num_groups: int) -> list[dict[str, Any]]:
    """All tables of what was found: group -1 is all groups together, asked for as many different chunks."""
    asked = [("now", "label", group) for group in (-1, *range(num_groups))]
    asked += [("early", "label", -1), ("either", "label", -1), ("now", "name", -1), ("now", "near", -1)]
    return [
        {
            "when": when,
            "kind": kind,
            "group": group,
            "chunks": _mean_size(texts, group),
            "rules": {rule: counts(texts, when, kind, rule, group) for rule in ALL_RULES},
        }
        for when, kind, group in asked
    ]


def labels_found(texts: Texts) -> dict[str, list[float]]:
    """Labels found by the reading chunk, all groups and distances: [found, of how many] by rule."""
    return {rule: counts(texts, "now", "label", rule, -1)[0] for rule in ALL_RULES}


def by_work(texts: Texts, works: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """:func:`labels_found` of each work."""
    return {
        work: labels_found([rows for rows, of in zip(texts, works, strict=True) if of == work])
        for work in dict.fromkeys(works)
    }


CANDIDATES = (130, 520, 2080)  # the first: about the chunks of a training text


def by_candidates(texts: Texts) -> list[dict[str, Any]]:
    """The same by how many chunks there were to choose from: how far the chapter was read."""
    result = []
    for low, high in pairwise((0, *CANDIDATES, None)):
        assert low is not None
        fits = range(low + 1, (high or sys.maxsize) + 1)
        own = [[row for row in rows if row["now"]["candidates"] in fits] for rows in texts]
        result.append({"low": low + 1, "high": high, "rules": labels_found(own), "gain": _gain(own)["gain"]})
    return result


def _mean_size(texts: Texts, group: int) -> float:
    sizes = [row["now"]["sizes"][group] for rows in texts for row in rows]
    return float(np.mean(sizes)) if sizes else 0.0


def differences(texts: Texts) -> dict[str, dict[str, float]]:
    """The model's share of labels found now less each rule's, with an interval over chapters."""
    result = {}
    for rule in RULES:
        apart = [
            [hit(row["now"], "label", "model", -1) - hit(row["now"], "label", rule, -1) for row in rows]
            for rows in texts
        ]
        result[rule] = _ratio([sum(own) for own in apart], [len(own) for own in apart])
    return result


def label_weights(texts: Texts, num_groups: int) -> list[dict[str, float]]:
    """Of each group: how often it read the label's chunk, and the mean weight that chunk then had."""
    result = []
    for group in range(num_groups):
        weights = [row["now"]["weights"][group] for rows in texts for row in rows]
        own = [weight for weight in weights if weight is not None]
        result.append({"read": len(own), "weight": float(np.mean(own)) if own else 0.0})
    return result


# --- what it was worth -------------------------------------------------------------------------------------


def gains(texts: Texts) -> list[dict[str, Any]]:
    """Nats that retrieval took from the loss of the names in references: all, and as their label's chunk was read."""
    parts: dict[str, Callable[[Row], bool]] = {
        "all": lambda row: True,
        "label read": lambda row: row["now"]["label"][-1],
        "name read, label not": lambda row: row["now"]["name"][-1] and not row["now"]["label"][-1],
        "name not read": lambda row: not row["now"]["name"][-1],
    }
    found = []
    for name, part in parts.items():
        for number in range(len(BINS)):
            fits = in_bin(number)
            chosen = [[row for row in rows if part(row) and fits(row)] for rows in texts]
            found.append({"part": name, "bin": BINS[number]} | _gain(chosen))
    return found


def _gain(texts: Texts) -> dict[str, Any]:
    total = {
        key: [float(sum(row[key] for row in rows)) for rows in texts]
        for key in ("tokens", "loss", "loss_without")
    }
    gain = [without - loss for without, loss in zip(total["loss_without"], total["loss"], strict=True)]
    names, tokens = sum(map(len, texts)), int(sum(total["tokens"]))
    return {
        "names": names,
        "tokens": tokens,
        "loss": sum(total["loss"]) / tokens if tokens else None,  # nats per token
        "loss_without": sum(total["loss_without"]) / tokens if tokens else None,
        "gain": _ratio(gain, total["tokens"]),
    }


def _ratio(sums: Sequence[float], of: Sequence[float]) -> dict[str, Any]:
    """Mean and a 95% interval over chapters; None where no or one chapter tells."""
    low, high = bootstrap_ratio(sums, of)
    return {
        "mean": sum(sums) / sum(of) if sum(of) else None,
        "low": None if np.isnan(low) else low,
        "high": None if np.isnan(high) else high,
    }


def losses(chunks: Sequence[TracedChunk]) -> dict[str, Any]:
    """Of a chapter: tokens that bear a loss, and sums of nats, of all and of those in chunks that read something."""
    own = np.concatenate([chunk.losses for chunk in chunks])
    without = np.concatenate([chunk.losses_without for chunk in chunks])
    reads = np.concatenate([np.full(len(c.ids), any(len(r.chunks) for r in c.reads)) for c in chunks])
    bears = np.isfinite(own)
    return {
        "tokens": len(own),
        "chunks": len(chunks),
        "bearing": int(bears.sum()),
        "loss": float(own[bears].sum()),
        "loss_without": float(without[bears].sum()),
        "reading": int((bears & reads).sum()),
        "better": int((without[bears & reads] > own[bears & reads]).sum()),
    }


SEEN = ("in sight", "read only", "in neither")


def seen(chunks: Sequence[TracedChunk]) -> dict[str, list[float]]:
    """Of tokens in chunks that read something, by where the same token stood before: count, and sums of nats.

    ``in sight``: in this chunk before it, or in the chunk before. ``read only``: in a chunk that is read. For each
    [tokens, sum of losses without retrieval, sum of gains].
    """
    sums = {name: np.zeros(3) for name in SEEN}
    for before, chunk in pairwise(chunks):
        read = {m for group in chunk.reads for m in group.chunks.tolist()}
        if not read:
            continue
        there = {token for m in read for token in chunks[m].ids.tolist()}
        sight = set(before.ids.tolist())
        for token, loss, without in zip(
            chunk.ids.tolist(), chunk.losses.tolist(), chunk.losses_without.tolist(), strict=True
        ):
            name = SEEN[0] if token in sight else SEEN[1] if token in there else SEEN[2]
            sums[name] += (1, without, without - loss)
            sight.add(token)
    return {name: own.tolist() for name, own in sums.items()}


def seen_gains(chapters: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Over all chapters: the share of tokens, nats per token without retrieval, the gain and its share of all gain."""
    total = np.sum([[chapter["seen"][name] for name in SEEN] for chapter in chapters], axis=0)
    result = {}
    for n, name in enumerate(SEEN):
        own = [chapter["seen"][name] for chapter in chapters]
        result[name] = {
            "tokens": total[n, 0] / total[:, 0].sum(),
            "loss_without": total[n, 1] / total[n, 0] if total[n, 0] else None,
            "gain": _ratio([part[2] for part in own], [part[0] for part in own]),
            "of_all": total[n, 2] / total[:, 2].sum(),
        }
    return result


def total_gain(chapters: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """On all tokens, per token."""
    return _ratio(
        [chapter["loss_without"] - chapter["loss"] for chapter in chapters],
        [chapter["bearing"] for chapter in chapters],
    )


# --- what is read at all -----------------------------------------------------------------------------------


def habits(chunks: Sequence[TracedChunk], rules: Rules, limits: Sequence[int]) -> dict[str, Any]:
    """Of all chunks of a chapter whose candidates are more than twice what they read: sums to take means of.

    ``shared``: of the chunks that all groups read together, how many each other rule would choose among as many.
    ``distance``: tokens from the start of what is read to the start of the reading chunk. ``agree``: chunks that the
    first group and the last one both read. ``kept``: chunks that the chunk before read too. ``times``: of every chunk
    of the chapter, how many chunks read it.
    """
    sums: dict[str, Any] = {
        "reading": 0,
        "read": 0,
        "agree": 0,
        "kept": 0,
        "distances": [],
        "shared": dict.fromkeys(RULES, 0.0),
    }
    asked = {}
    for chunk, limit in zip(chunks, limits, strict=True):
        groups = [set(read.chunks.tolist()) for read in chunk.reads]
        own = set().union(*groups)
        if not own or limit <= 2 * len(own):
            continue
        asked[chunk.number] = (own, limit)
        sums["reading"] += 1
        sums["read"] += len(own)
        sums["agree"] += len(groups[0] & groups[-1])
        sums["kept"] += len(own.intersection(rules.reads[chunk.number - 1]))
        sums["distances"] += [chunk.first_token - chunks[m].first_token for m in sorted(own)]
        sums["shared"]["random"] += len(own) ** 2 / limit
    sums["times"] = np.bincount([m for own in rules.reads for m in own], minlength=len(chunks)).tolist()
    for rule, number, scores in rules.each(np.array(sorted(asked), np.int64)):
        own, limit = asked[number]
        best = np.argsort(-scores[:limit], kind="stable")[: len(own)]
        sums["shared"][rule] += len(own.intersection(best.tolist()))
    return sums


def habit(chapters: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over all chapters' chunks."""
    parts = [chapter["habits"] for chapter in chapters]
    reading, read, agree, kept = (
        sum(part[name] for part in parts) for name in ("reading", "read", "agree", "kept")
    )
    times = [sorted(part["times"]) for part in parts]
    most = sum(sum(own[-max(1, len(own) // 10) :]) for own in times)  # a tenth of a chapter's chunks
    distances = np.concatenate([part["distances"] for part in parts]) if read else np.zeros(1)
    q25, median, q75 = np.percentile(distances, [25, 50, 75]).tolist()
    return {
        "reading_chunks": reading,
        "chunks_read": read / max(1, reading),
        "agree": agree / max(1, reading),
        "kept": kept / max(1, read),
        "never_read": sum(own.count(0) for own in times) / sum(map(len, times)),
        "most_read": most / max(1, sum(map(sum, times))),
        "distance": {"q25": q25, "median": median, "q75": q75},
        "shared": {rule: sum(part["shared"][rule] for part in parts) / max(1, read) for rule in RULES},
    }
