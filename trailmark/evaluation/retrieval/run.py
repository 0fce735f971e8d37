"""What chosen chunks are worth to a model, what the right ones would be worth, and what scores and their gradient say.

Each text is read whole, again and again, with chunks that the model is told (``neighbours``) in place of those that it
chooses, weighed by its own scores:

- as many as it reads: none, its own, random ones, the most recent, those that BM25 finds for the chunk that asks, and
  those that BM25 finds for the chunk that reads, which nobody can know before;
- one alone: its own, and each of a sample. The best of a sample, for each chunk, is the ceiling of the reader;
- where a span of the text was written a second time: the chunks that hold its first place. A model that does not copy
  what lies before it has nothing to reward a choice with.

Counted are the rows of chunks that were chosen for among more candidates than are read, and at least as many as are
tried. Scores stand beside what each chunk that was tried took off the loss; all chunks of a text are tried at once, so
a chunk's rows also feel, through the window, what the chunk before them was given. The gradient is the loss's in the
scores of the chunks that are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from trailmark.data.draws import Draws
from trailmark.data.neighbours.bm25 import Bm25, best_chunks
from trailmark.evaluation.documents import Documents
from trailmark.evaluation.record import Part, Record
from trailmark.evaluation.retrieval.suite import CASES, RetrievalSettings
from trailmark.evaluation.subject import Subject
from trailmark.models.with_retrieved import with_retrieved
from trailmark.ops import ChunkSelection, score_parts
from trailmark.ops.score_parts import without_recency
from trailmark.statistics import Floats, bootstrap_ratio
from trailmark.trace.losses import nats

Integers = npt.NDArray[np.int64]
_REPEATS = 4  # spans of a text that come again, where it has room for so many
_RANDOM, _SAMPLE, _SOURCES = range(3)  # draws of their own


def run(
    subject: Subject,
    settings: RetrievalSettings,
    text: Documents,
    record: Record,
    progress: Callable[[str], None] = lambda message: None,
) -> list[dict[str, Any]]:
    """Every length, each text of it kept when it was read.

    A result has ``cases`` (``chunks``, one of CASES, with ``tokens``, ``nats``, ``less``, ``less_low`` and
    ``less_high`` than with none; of spans that come again ``source_read``) and ``groups`` (``popular``, ``deviation``,
    ``rank``, ``agreement``, ``agreement_of_pair``, ``gradient_popular``, ``gradient_halves``, ``ever_read``: see the
    columns; the last three once more as ``noisy_...``, if the model is trained with noise).

    Raises:
        ValueError: a model that does not choose by scores of its own, or a length that the text does not hold or in
            which nothing can be chosen.
    """
    model = subject.model
    if not (subject.ours and model.config.ranks_all_chunks and model.config.completes_neighbours):
        raise ValueError(
            "models: expected one that scores all past chunks by itself and reads those that it is given, "
            f"{subject.name!r} does not. Ask a DRT that retrieves, with retriever 'causal', or another suite."
        )
    results = []
    for length in settings.lengths or (subject.train_length,):
        starts = _starts(text.tokens, length, settings.texts)
        cell = {
            "suite": "retrieval", "length": length, "texts": len(starts), "sample": settings.sample,
            "text": text.fingerprint, "seed": settings.seed, "begin": subject.beginning,
        }  # fmt: skip
        parts = []
        for number, start in enumerate(starts):
            name = f"retrieval, {length:,} tokens, text {number + 1} of {len(starts)}"
            work = partial(
                _of_text,
                model,
                text,
                start,
                subject.beginning,
                length,
                settings,
                number,
                partial(_tell, progress, name),
            )
            parts.append(Part(cell | {"number": number}, work))
        found = record.measure_all(parts)
        results.append(record.measure(cell | {"number": None}, partial(_of_all, found)))
    return results


def _tell(progress: Callable[[str], None], name: str, what: str) -> None:
    progress(f"{name}: {what}")


def _starts(tokens: int, length: int, count: int) -> list[int]:
    """Where stretches of the text begin that share nothing, spread over all of it."""
    fit = min(count, tokens // length)
    if not fit:
        raise ValueError(
            f"lengths: expected at most the {tokens:,} tokens of the text, got {length:,}. Choose a shorter one, or "
            "give more text."
        )
    return [n * (tokens // fit) for n in range(fit)]


# --- one text ------------------------------------------------------------------------------------------------------


def _of_text(
    model: Any,
    text: Documents,
    start: int,
    begin: Sequence[int],
    length: int,
    settings: RetrievalSettings,
    number: int,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Sums over the rows that count, by case, and what each group's scores say."""
    ids = np.array([*begin, *text.read(start, start + length - len(begin))], np.int64)
    S, K, M = model.config.chunk_size, model.config.num_retrieved_chunks, settings.sample
    tell("its own choice")
    with torch.no_grad():
        out = model(row_of(model, ids), output_retrieval_scores=True)
    scores = [own[0].cpu() for own in out.retrieval_scores.scores]  # [C, C] each
    limits = scores[0].isfinite().sum(1).numpy()  # [C] candidates
    readers = np.arange(length - 1) // S  # the chunk of the row that predicts each token but the first
    asks = np.flatnonzero((limits >= max(K + 1, M)) & np.isin(np.arange(len(limits)) + 1, readers))
    if not len(asks):
        raise ValueError(
            f"lengths: expected texts in which a chunk is read for that may choose among {max(K + 1, M)} or more, got "
            f"{length:,} tokens with {limits.max(initial=0)} candidates at most. Choose longer ones."
        )
    counted = np.isin(readers, asks + 1)
    none, one = with_retrieved(model, 0), with_retrieved(model, 1)
    found = {"own": _losses(out.logits, ids), "none": losses_of(none, ids)}
    del out
    for case, chosen in choices_of(ids, S, limits, K, settings.seed, number):
        tell(CASES[case])
        found[case] = losses_of(model, ids, chosen)
    tell(CASES["one, own"])
    found["one, own"] = losses_of(one, ids)
    tried = _sample(limits, asks, M, settings.seed, number)  # [C, M]
    single = []
    for m in range(M):
        tell(f"one chunk alone, {m + 1} of {M}")
        single.append(losses_of(one, ids, tried[:, m : m + 1]))
    found["one, random"] = np.mean(single, 0)
    by_chunk: Floats = np.stack(
        [np.bincount(readers, weights=own, minlength=len(limits) + 1) for own in single], 1
    )  # [C + 1, M]
    tell(CASES["one, best"])
    best = np.take_along_axis(tried, by_chunk[1:].argmin(1)[:, None], 1)
    found["one, best"] = losses_of(one, ids, best)
    tokens = int(counted.sum())
    cases = {case: {"tokens": tokens, "nats": float(own[counted].sum())} for case, own in found.items()}
    tell("spans that come again")
    cases |= _copies(model, none, ids, limits, settings.seed, number)
    tell("the gradient")
    gradients = {"": _gradients(model, ids)}
    if model.config.retrieval_noise and K > 1:  # a single chunk's score is not trained
        gradients["noisy_"] = _gradients(model, ids, settings.seed + number)
    useful = -by_chunk[asks + 1]  # what each takes off, but for what is the same for all
    groups = []
    for group, own in enumerate(scores):
        groups.append(
            parts_of(own, model.config)
            | _agreement(own.double().numpy(), limits, asks, tried[asks], useful)
            | {
                f"{prefix}{name}": part
                for prefix, those in gradients.items()
                for name, part in _gradient_parts(*those[group], int(limits.max())).items()
            }
        )
    return {"cases": cases, "groups": groups}


def row_of(model: Any, ids: Integers) -> Tensor:
    """[1, T] where the model computes."""
    return torch.from_numpy(ids)[None].to(model.device)


@torch.no_grad()
def losses_of(model: Any, ids: Integers, chosen: Integers | None = None) -> Floats:
    """[T - 1] nats of each token but the first of a text that is read whole.

    Args:
        chosen: [C, n] chunks that each chunk is told to choose, ascending, -1 last; None: it chooses.
    """
    told = None if chosen is None else torch.from_numpy(chosen)[None].to(model.device)
    return _losses(model(row_of(model, ids), neighbours=told, use_cache=False).logits, ids)


def _losses(logits: Tensor, ids: Integers) -> Floats:
    return nats(logits[:, :-1], _targets(logits, ids))[0].astype(np.float64)


def _targets(logits: Tensor, ids: Integers) -> Tensor:
    return torch.from_numpy(ids[None, 1:]).to(logits.device)


# --- which chunks --------------------------------------------------------------------------------------------------


def choices_of(
    ids: Integers, S: int, limits: Integers, K: int, seed: int, number: int
) -> Iterator[tuple[str, Integers]]:
    """Chunks [C, K] by rules that know nothing of the model."""
    C = len(limits)
    drawn = [Draws(seed, _RANDOM, number, c).among(int(limits[c]), min(K, int(limits[c]))) for c in range(C)]
    yield "random", _padded(drawn, K)
    yield "recent", _padded([range(max(0, limit - K), limit) for limit in limits.tolist()], K)
    lengths = np.append(np.full(C, S), len(ids) - C * S)  # that of the chunk that stays open last
    chunks = np.zeros((C + 1, S), np.int64)
    chunks.reshape(-1)[: len(ids)] = ids
    bm25 = Bm25.of(chunks[:C], lengths[:C])
    similar = bm25.scores(chunks[:C], lengths[:C], chunks, lengths)
    yield "BM25", best_chunks(similar[:C], limits, K)
    # what a chunk chooses is read by the one after it
    yield "BM25, told", best_chunks(similar[1:], limits, K)


def _sample(limits: Integers, asks: Integers, count: int, seed: int, number: int) -> Integers:
    """[C, count] different candidates of each that asks, in any order; -1 of the others."""
    found = np.full((len(limits), count), -1)
    for c in asks.tolist():
        found[c] = Draws(seed, _SAMPLE, number, c).among(int(limits[c]), count)
    return found


def _padded(rows: Sequence[Sequence[int]], width: int) -> Integers:
    found = np.full((len(rows), width), -1)
    for row, chosen in zip(found, rows, strict=True):
        row[: len(chosen)] = sorted(chosen)
    return found


# --- spans that come again -----------------------------------------------------------------------------------------


class Copies(NamedTuple):
    """A text with spans that come again."""

    ids: Integers  # [T]
    given: Integers  # [C, 2] the chunks that hold the first place of what the next chunk repeats; -1 of the others
    places: list[int]  # rows that predict what is repeated


def copies_of(ids: Integers, S: int, limits: Integers, window: int, seed: int, number: int) -> Copies:
    """Write spans of the first half of a text a second time into its second half.

    The first part of a span lies in one chunk, with the beginning of what follows; the second time it ends a chunk,
    which so knows what to look for, and what follows fills the next one, whose rows are counted. The first place lies
    out of sight of the window of the chunk that asks.
    """
    C, asked = len(limits), S - S // 2
    changed, given, places = ids.copy(), np.full((C, 2), -1), list[int]()
    # four chunks each: where it begins, where it ends, and two between it and the next
    for turn in range(min(_REPEATS, (C - C // 2) // 4)):
        asking = C - 2 - 4 * turn
        begin = asking * S + S - asked
        room = min(C // 2, int(limits[asking]), (begin - window) // S) - 1  # two chunks hold the first place
        if room < 1:
            continue
        source = Draws(seed, _SOURCES, number, turn).below(room) * S
        changed[begin : begin + asked + S] = ids[source : source + asked + S]
        first, last = (source + asked) // S, (source + asked + S - 1) // S
        given[asking] = first, last if last > first else -1
        places += range((asking + 1) * S, (asking + 2) * S - 1)
    return Copies(changed, given, places)


def _copies(
    model: Any, none: Any, ids: Integers, limits: Integers, seed: int, number: int
) -> dict[str, dict[str, float]]:
    """What is repeated costs; nothing where the text has no room for it, or a model reads less than two chunks."""
    config = model.config
    changed, given, places = copies_of(ids, config.chunk_size, limits, config.sliding_window, seed, number)
    if not places or config.num_retrieved_chunks < given.shape[1]:
        return {}
    with torch.no_grad():
        out = model(row_of(model, changed), output_retrieval=True)
    asking = np.flatnonzero(given[:, 0] >= 0)
    chosen = np.concatenate([own.indices[0, asking].cpu().numpy() for own in out.retrieval], 1)
    sources = given[asking]
    read = (sources[:, :, None] == chosen[:, None]).any(-1) & (sources >= 0)
    found = {
        "copy, none": losses_of(none, changed),
        "copy, own": _losses(out.logits, changed),
        "copy, given": losses_of(model, changed, given),
    }
    cases = {case: {"tokens": len(places), "nats": float(own[places].sum())} for case, own in found.items()}
    cases["copy, own"] |= {"sources": int((sources >= 0).sum()), "sources_read": int(read.sum())}
    return cases


# --- what scores say -----------------------------------------------------------------------------------------------


def parts_of(scores: Tensor, config: Any) -> dict[str, float]:
    """Scores [C, C] of one text: :func:`trailmark.ops.score_parts`, and of the same pairs the "rank".

    It is the exponential of the entropy of their squared singular values. What the model takes off for a chunk's age is
    given back first.
    """
    recency = getattr(config, "retrieval_recency", 0.0)
    deviation, popular = map(float, score_parts(scores, recency))
    rank = 0.0
    if deviation:
        half = len(scores) // 2
        known = np.ma.masked_invalid(without_recency(scores, recency)[half:, :half].numpy())
        block = np.ma.filled(known - known.mean(1, keepdims=True), 0.0)
        parts = np.linalg.svd(block, compute_uv=False) ** 2
        parts = parts[parts > 0] / parts.sum()
        rank = float(np.exp(-(parts * np.log(parts)).sum()))
    return {"deviation": deviation, "popular": popular, "rank": rank}


def _agreement(
    scores: Floats, limits: Integers, asks: Integers, tried: Integers, useful: Floats
) -> dict[str, float]:
    """How the scores of the chunks tried [n, M] stand to what each took off the loss [n, M]: means over askers.

    Of the pair is what a score is above the mean of its row, less what the others that may read the chunk give it above
    theirs; a row with a chunk that nobody else may read is left out.
    """
    may = np.arange(len(limits)) < limits[:, None]
    known = np.where(may, scores, 0)
    above = np.where(may, known - known.sum(1, keepdims=True) / np.maximum(limits, 1)[:, None], 0)
    others = may.sum(0) - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        pair = above - (above.sum(0) - above) / np.where(others > 0, others, np.nan)
    pair = np.take_along_axis(pair[asks], tried, 1)
    whole = np.isfinite(pair).all(1)
    return {
        "agreement": rank_correlation(np.take_along_axis(scores[asks], tried, 1), useful),
        "agreement_of_pair": rank_correlation(pair[whole], useful[whole]),
    }


def rank_correlation(a: Floats, b: Floats) -> float:
    """Spearman's, of each row of [n, M], their mean: over the rows in which both differ, NaN if there is none."""
    a, b = (np.array([_ranks(row) for row in own]).reshape(own.shape) for own in (a, b))
    a, b = (own - own.mean(1, keepdims=True) for own in (a, b))
    spread = np.sqrt((a * a).sum(1) * (b * b).sum(1))
    differ = spread > 0
    return float(((a * b).sum(1)[differ] / spread[differ]).mean()) if differ.any() else math.nan


def _ranks(values: Floats) -> Floats:
    """Ranks [M]; equal values have the mean of theirs."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Floats = (np.cumsum(counts) - (counts + 1) / 2)[which]
    return ranks


# --- what the gradient says ----------------------------------------------------------------------------------------


def _gradients(
    model: Any, ids: Integers, noise_seed: int | None = None
) -> list[tuple[Integers, Floats, Floats]]:
    """Of each group the chunks read [C, K], and the gradient in their scores [C, K] of every other token's loss.

    ``noise_seed``: chosen with noise, as in training.
    """
    noise = None if noise_seed is None else torch.tensor([noise_seed], device=model.device)
    with _differentiable(model, training=noise is not None):
        out = model(row_of(model, ids), noise_seed=noise, output_retrieval=True)
        wide = out.logits.to(torch.promote_types(out.logits.dtype, torch.float32))
        each = F.cross_entropy(wide[0, :-1], _targets(wide, ids)[0], reduction="none")
        weights = [own.weights for own in out.retrieval]
        halves = [
            torch.autograd.grad(each[part::2].sum(), weights, retain_graph=part == 0, allow_unused=True)
            for part in (0, 1)
        ]
    found = []
    for group, selection in enumerate(out.retrieval):
        own = [_in_scores(selection, half[group]) for half in halves]
        found.append((selection.indices[0].cpu().numpy(), *own))
    return found


@contextmanager
def _differentiable(model: Any, training: bool) -> Iterator[None]:
    """With a gradient in the scores, and no graph of what lies below them; ``training``: with the noise that has."""
    named = [(model.part_of(name) == "retriever", p, p.requires_grad) for name, p in model.named_parameters()]
    was_training = model.training
    try:
        model.train(training)
        for scores, p, _ in named:
            p.requires_grad_(scores)
        with torch.enable_grad():
            yield
    finally:
        model.train(was_training)
        for _, p, before in named:
            p.requires_grad_(before)


def _in_scores(selection: ChunkSelection, gradient: Tensor | None) -> Floats:
    """The gradient in scores, from that in their softmax: w (g - sum w g)."""
    weights = selection.weights[0].detach().double()
    if gradient is None:  # nothing was read
        return weights.new_zeros(weights.shape).cpu().numpy()
    own = gradient[0].double()
    found: Floats = (weights * (own - (weights * own).sum(-1, keepdim=True))).cpu().numpy()
    return found


def _gradient_parts(indices: Integers, even: Floats, odd: Floats, readable: int) -> dict[str, float]:
    """How much of the gradient [C, K] is a past chunk's whoever asks, how far two halves agree, and what was read.

    NaN where there is no gradient.
    """
    there = indices >= 0
    chunks, whole, a, b = indices[there], (even + odd)[there], even[there], odd[there]
    counts, sums = np.bincount(chunks), np.bincount(chunks, weights=whole)
    read = counts > 0
    popular = halves = math.nan
    if whole.any():
        share = float((sums[read] ** 2 / counts[read]).sum() / (whole**2).sum())
        chance = read.sum() / len(chunks)
        popular = (share - chance) / (1 - chance) if chance < 1 else math.nan
    if a.any() and b.any():
        halves = float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))
    return {"gradient_popular": popular, "gradient_halves": halves, "ever_read": float(read.sum()) / readable}


# --- all texts -----------------------------------------------------------------------------------------------------


def _of_all(texts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "cases": [_case(case, texts) for case in CASES if any(case in own["cases"] for own in texts)],
        "groups": [
            # an earlier version may have read some of the texts, and said less of them
            {name: _mean([own[name] for own in each]) for name in each[0] if all(name in own for own in each)}
            for each in zip(*(own["groups"] for own in texts), strict=True)
        ],
    }


def _mean(values: Sequence[float | None]) -> float | None:
    """Of those that were defined: a record has null for the others."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _case(case: str, texts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    those = [own["cases"] for own in texts if case in own["cases"]]
    with_none = "copy, none" if case.startswith("copy") else "none"
    tokens = np.array([own[case]["tokens"] for own in those])
    nats = np.array([own[case]["nats"] for own in those])
    less = np.array([own[with_none]["nats"] for own in those]) - nats
    found: dict[str, Any] = {
        "chunks": case,
        "tokens": int(tokens.sum()),
        "nats": float(nats.sum() / tokens.sum()),
    }
    if case != with_none:
        low, high = bootstrap_ratio(less, tokens)
        found |= {"less": float(less.sum() / tokens.sum()), "less_low": low, "less_high": high}
    if case == "copy, own":
        sources = sum(own[case]["sources"] for own in those)
        found["source_read"] = sum(own[case]["sources_read"] for own in those) / sources
    return found
