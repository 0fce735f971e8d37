"""Whether the choice can be learned: who ranks the chunk of the label high that a chapter is about to cite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from case_study.baselines import best_rank, chance
from case_study.references import Layout, Reference, references

from trailmark.data.corpus import Tokens
from trailmark.data.neighbours.bm25 import Bm25, fit_bm25
from trailmark.data.shards import Corpus
from trailmark.evaluation.retrieval.run import row_of
from trailmark.models.watching import Seen, watching_attention
from trailmark.ops import attention_mass
from trailmark.statistics import bootstrap_ratio

# the setting of the reference that found it: chunks of 63 outside a window of 256, the best 8, upper layers 15 to 29
LEARNABLE = ("sliding_window=256", "chunk_size=63", "num_retrieved_chunks=8", "num_lower_layers=15")
STRETCH = 3024  # tokens
RULES = {
    "attention, reading": "the base's upper layers under full attention, from the chunk that cites",
    "attention, asking": "the same, from the chunk before it, which asks",
    "trained": "the converted retriever after training",
    "converted": "the converted retriever before it",
    "BM25": "BM25 with the text of the asking chunk",
    "recent": "the most recent",
    "random": "random chunks, expected",
}
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class Chapter(NamedTuple):
    layout: Layout
    ids: Tokens


def chapter(text: str, tokenizer: Any, length: int, chunk_size: int, whole: bool = False) -> Chapter:
    """The first tokens of a text, as many as it has, and where they stand in it; ``whole``: whole chunks of them."""
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    length = min(length, len(found["input_ids"]))
    length -= length % chunk_size if whole else 0
    return _cut(text, found, 0, length, chunk_size)


def stretches(text: str, tokenizer: Any, length: int, chunk_size: int) -> dict[int, Chapter]:
    """All tokens of a text in stretches of so many, each a text of its own, by where it begins; a rest is left out."""
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    firsts = range(0, len(found["input_ids"]) - length + 1, length)
    return {first: _cut(text, found, first, length, chunk_size) for first in firsts}


def _cut(text: str, found: Mapping[str, Any], first: int, length: int, chunk_size: int) -> Chapter:
    """Of what a tokenizer found in a text."""
    own = slice(first, first + length)
    begins = [begin for begin, _ in found["offset_mapping"][own.start : own.stop + 1]]
    if len(begins) == length:
        begins.append(len(text))
    starts, ids = np.array(begins, np.int64), np.array(found["input_ids"][own], np.int32)
    chunks = np.array([*range(0, length, chunk_size), length], np.int64)
    return Chapter(Layout(text[starts[0] : starts[-1]], starts - starts[0], chunks), ids)


def hits(
    chapter: Chapter, scores: Mapping[str, Floats], candidates: Integers, chosen: int
) -> Iterator[tuple[int, dict[str, float]]]:
    """Of each reference whose label's chunk may be selected: 1 if it is among the first ``chosen``, by each rule.

    Before it the number of candidates. Where there are no more of them than are chosen, nothing is asked.

    Args:
        scores: [asking chunk, past chunk] by rule; of "attention, reading" the first is the chunk that reads.
        candidates: [C] of each asking chunk; they come first.
    """
    for found, known in candidates_of(chapter.layout, candidates):
        if known <= chosen:
            continue
        own = {"random": chance(known, 1, chosen)}
        for rule, of_rule in scores.items():
            rank = best_rank(
                of_rule[found.chunk - (rule != "attention, reading")], known, [found.label_chunk]
            )
            assert rank is not None
            own[rule] = float(rank < chosen)
        yield known, own


def candidates_of(layout: Layout, candidates: Integers) -> Iterator[tuple[Reference, int]]:
    """The references whose label's chunk may be selected by the chunk before, and how many candidates that has."""
    for found in references(layout):
        if found.chunk and found.label_chunk < (known := int(candidates[found.chunk - 1])):
            yield found, known


def bm25_scores(bm25: Bm25, ids: Tokens, S: int) -> Floats:
    """[asking chunk, past chunk], the last chunk as long as it is."""
    lengths = np.full(-(-len(ids) // S), S)
    lengths[-1] = len(ids) - S * (len(lengths) - 1)
    chunks = np.pad(ids, (0, -len(ids) % S)).reshape(-1, S).astype(np.int64)
    return bm25.scores(chunks, lengths, chunks, lengths)


class Ranking:
    """What each rule says of the candidates of each reference.

    Args:
        base: with full attention. drts: by rules' names, converted from it in one way. corpus: that they were trained
            on. file: where BM25's counts lie.
    """

    def __init__(self, base: Any, drts: Mapping[str, Any], corpus: Path, tokenizer: Any, file: Path) -> None:
        self.base, self.drts = base, drts
        self.config = next(iter(drts.values())).config
        self.chosen = self.config.num_retrieved_chunks
        self.bm25: Bm25 = fit_bm25(Corpus.open(corpus), self.config.chunk_size, tokenizer, file).bm25

    def hits(self, chapter: Chapter) -> list[dict[str, float]]:
        """:func:`hits` of the rules."""
        scores = self.scores(chapter.ids)
        candidates = (scores[next(iter(self.drts))] > -np.inf).sum(1)
        return [own for _, own in hits(chapter, scores, candidates, self.chosen)]

    def asked(self, chapter: Chapter) -> list[int]:
        """How many candidates each reference of :func:`hits` has; nothing runs for that."""
        drt = next(iter(self.drts.values()))
        grid = drt.layouts.of(len(chapter.ids), False)
        candidates = grid.candidates(self.config.first_visible, torch.device("cpu")).flatten().numpy()
        return [known for _, known in candidates_of(chapter.layout, candidates) if known > self.chosen]

    def choices(self, ids: Tokens) -> dict[str, torch.Tensor]:
        """By rule int64 [C, K], for a model that is told: what it ranks first for the landmark of each closed chunk."""
        scores = self.scores(ids)
        candidate = torch.from_numpy(scores[next(iter(self.drts))] > -np.inf)
        C, found = len(candidate), {}
        for rule, own in scores.items():
            ranks = torch.from_numpy(np.array(own, np.float64))
            if rule == "attention, reading":
                ranks = torch.nn.functional.pad(ranks[1:], (0, 0, 0, 1))
            best = ranks[:C, :C].masked_fill(~candidate, -torch.inf).topk(min(self.chosen, C))
            chosen = best.indices.masked_fill(best.values == -torch.inf, C).sort().values
            found[rule] = chosen.masked_fill(chosen == C, -1)
        return found

    @torch.no_grad()
    def scores(self, ids: Tokens) -> dict[str, Floats]:
        """[asking chunk, past chunk] by rule; of "attention, reading" the first is the chunk that reads."""
        tokens = row_of(self.base, ids.astype(np.int64))
        mass = self._mass(tokens)
        own = {
            name: drt(tokens, output_retrieval_scores=True, logits_to_keep=1).retrieval_scores.scores[0][0]
            for name, drt in self.drts.items()
        }
        chunks = -(-len(ids) // self.config.chunk_size)
        return {
            "attention, reading": mass,
            "attention, asking": mass,
            **{name: scores.double().cpu().numpy() for name, scores in own.items()},
            "BM25": bm25_scores(self.bm25, ids, self.config.chunk_size),
            "recent": np.broadcast_to(np.arange(chunks, dtype=np.float64), (chunks, chunks)),
        }

    def _mass(self, tokens: torch.Tensor) -> Floats:
        """[chunk, chunk], over the layers that read in the DRT, the tokens that it always sees apart."""
        chunks = torch.arange(tokens.shape[1], device=tokens.device)[None] // self.config.chunk_size + 1
        chunks[:, : self.config.num_sinks] = 0
        found: list[torch.Tensor] = []

        def see(seen: Seen) -> None:
            if seen.layer >= self.config.num_lower_layers:
                found.append(attention_mass(seen.q, seen.k, chunks, seen.window))

        with watching_attention(self.base, see):
            self.base(tokens, logits_to_keep=1)
        return np.asarray(torch.stack(found).sum(0)[0, 1:, 1:].double().cpu().numpy())


def share(
    hits: Sequence[Sequence[Mapping[str, float]]], rules: Iterable[str] = RULES
) -> list[dict[str, Any]]:
    """Of each rule its share of all references, with an interval over texts."""
    counts = np.array([len(own) for own in hits], float)
    rows = []
    for rule in rules:
        found = np.array([sum(one[rule] for one in own) for own in hits])
        low, high = np.clip(bootstrap_ratio(found, counts), 0, 1).tolist()  # widened for few texts
        rows.append({"rule": rule, "share": float(found.sum() / counts.sum()), "low": low, "high": high})
    return rows
