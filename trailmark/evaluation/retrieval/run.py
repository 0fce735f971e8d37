"""What chosen chunks are worth to a model, what the right ones would be worth, and what scores and their gradient say.

Each text is read whole, again and again, with chunks that are told (``neighbours``) in place of those that the model
chooses, weighed by its own scores:

- as many as it reads: none, its own, random ones, the most recent, those that BM25 finds for the chunk that asks, and
  those that BM25 finds for the chunk that reads, which nobody can know before;
- one alone: its own, and each of a sample, so that the best of them is known. This is the ceiling of the reader;
- where a span of the text was written a second time: the chunks that hold its first place, given. A model that does
  not copy what lies before it has nothing to reward a choice with.

Counted are the rows of chunks that could choose among more than they read, and of the sample. Scores stand beside what
each chunk of the sample took off the loss. The gradient is the loss's in the scores of the chunks that are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from trailmark.data.draws import Draws
from trailmark.data.neighbours.bm25 import Bm25, best_chunks
from trailmark.evaluation.documents import Documents
from trailmark.evaluation.record import Record
from trailmark.evaluation.retrieval.suite import CASES, RetrievalSettings
from trailmark.evaluation.subject import Subject
from trailmark.models.without_retrieval import retrieving
from trailmark.ops import ChunkSelection, score_parts
from trailmark.statistics import Floats, bootstrap_ratio

Integers = npt.NDArray[np.int64]
_AT_A_TIME = 1024  # rows of logits whose losses are taken together
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
    columns).

    Raises:
        ValueError: a model that does not choose by scores of its own, or a length that the text does not hold or in
            which nothing can be chosen.
    """
    model = subject.model
    if not (subject.ours and model.config.ranks_all_chunks):
        raise ValueError(
            f"models: expected one that scores all past chunks by itself (a DRT with retriever 'causal' and chunks to "
            f"read), {subject.name!r} does not. Ask another model, or another suite."
        )
    results = []
    for length in settings.lengths or (subject.train_length,):
        starts = _starts(text.tokens, length, settings.texts)
        cell = {
            "suite": "retrieval", "length": length, "texts": len(starts), "sample": settings.sample,
            "text": text.fingerprint, "seed": settings.seed,
        }  # fmt: skip
        found = []
        for number, start in enumerate(starts):
            name = f"retrieval, {length:,} tokens, text {number + 1} of {len(starts)}"
            work = partial(
                _of_text, model, text, start, length, settings, number, partial(_tell, progress, name)
            )
            found.append(record.measure(cell | {"number": number}, work))
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
    length: int,
    settings: RetrievalSettings,
    number: int,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Sums over the rows that count, by case, and what each group's scores say."""
    ids = np.asarray(text.read(start, start + length), np.int64)
    S, K, M = model.config.chunk_size, model.config.num_retrieved_chunks, settings.sample
    tell("its own choice")
    with torch.no_grad():
        out = model(_row(model, ids), output_retrieval=True, output_retrieval_scores=True)
    scores = [own[0].double().cpu().numpy() for own in out.retrieval_scores.scores]  # [C, C] each
    limits = np.isfinite(scores[0]).sum(1)  # [C] candidates
    asks = np.flatnonzero(limits >= max(K + 1, M))
    if not len(asks):
        raise ValueError(
            f"lengths: expected texts in which a chunk may choose among {max(K + 1, M)} or more, got {length:,} tokens "
            f"with {limits.max(initial=0)} candidates at most. Choose longer ones."
        )
    readers = np.arange(length - 1) // S  # the chunk of the row that predicts each token but the first
    counted = np.isin(readers, asks + 1)

    def told(of: Any, chosen: Integers, tokens: Integers = ids) -> Floats:
        return losses_of(of, tokens, chosen)

    none, one = retrieving(model, 0), retrieving(model, 1)
    own = _losses(out.logits, ids)
    del out
    found = {"own": own, "none": losses_of(none, ids)}
    for case, chosen in _choices(ids, S, limits, K, settings.seed, number):
        tell(CASES[case])
        found[case] = told(model, chosen)
    tell(CASES["one, own"])
    found["one, own"] = losses_of(one, ids)
    tried = _sample(limits, asks, M, settings.seed, number)  # [C, M]
    single = []
    for m in range(M):
        tell(f"one chunk alone, {m + 1} of {M}")
        single.append(told(one, tried[:, m : m + 1]))
    by_chunk: Floats = np.stack(
        [np.bincount(readers, weights=own, minlength=len(limits) + 1) for own in single], 1
    )  # [C + 1, M]
    best = by_chunk.argmin(1)[readers]
    found["one, random"] = np.mean(single, 0)
    found["one, best"] = np.take_along_axis(np.stack(single), best[None], 0)[0]
    cases = {
        case: {"tokens": int(counted.sum()), "nats": float(own[counted].sum())} for case, own in found.items()
    }
    tell("spans that come again")
    cases |= _copies(model, none, ids, limits, settings.seed, number)
    tell("the gradient")
    gradients = _gradients(model, ids)
    useful = -by_chunk[asks + 1]  # what each takes off, but for what is the same for all
    groups = []
    for group, own in enumerate(scores):
        groups.append(
            parts_of(own)
            | _agreement(own, limits, asks, tried[asks], useful)
            | _gradient_parts(*gradients[group], int(limits.max()))
        )
    return {"cases": cases, "groups": groups}


def _row(model: Any, ids: Integers) -> Tensor:
    return torch.from_numpy(ids)[None].to(model.device)


@torch.no_grad()
def losses_of(model: Any, ids: Integers, chosen: Integers | None = None) -> Floats:
    """[T - 1] nats of each token but the first of a text that is read whole.

    Args:
        chosen: [C, n] chunks that each chunk is told to choose, ascending, -1 last; None: it chooses.
    """
    told = None if chosen is None else torch.from_numpy(chosen)[None].to(model.device)
    return _losses(model(_row(model, ids), neighbours=told, use_cache=False).logits, ids)


def _losses(logits: Tensor, ids: Integers) -> Floats:
    to = torch.from_numpy(ids[1:]).to(logits.device)
    wide = torch.promote_types(logits.dtype, torch.float32)
    parts = zip(logits[0, :-1].split(_AT_A_TIME), to.split(_AT_A_TIME), strict=True)
    found: Floats = (
        torch.cat([F.cross_entropy(a.to(wide), b, reduction="none") for a, b in parts]).double().cpu().numpy()
    )
    return found


# --- which chunks --------------------------------------------------------------------------------------------------


def _choices(
    ids: Integers, S: int, limits: Integers, K: int, seed: int, number: int
) -> Iterator[tuple[str, Integers]]:
    """Chunks [C, K] by rules that know nothing of the model."""
    C = len(limits)
    drawn = [Draws(seed, _RANDOM, number, c).among(int(limits[c]), min(K, int(limits[c]))) for c in range(C)]
    yield "random", _padded(drawn, K)
    yield "recent", _padded([range(max(0, limit - K), limit) for limit in limits.tolist()], K)
    chunks = ids[: C * S].reshape(C, S)
    lengths = np.full(C, S)
    bm25 = Bm25.of(chunks, lengths)
    similar = bm25.scores(chunks, lengths, chunks, lengths)
    yield "BM25", best_chunks(similar, limits, K)
    # what chunk c chooses is read by the one after it; the last one's is not counted
    yield "BM25, told", best_chunks(np.roll(similar, -1, axis=0), limits, K)


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


def _copies(
    model: Any, none: Any, ids: Integers, limits: Integers, seed: int, number: int
) -> dict[str, dict[str, float]]:
    """Write spans of the first half of the text a second time into its second half, and read it.

    A span begins in the middle of a chunk, which so knows what it has to look for, and lasts to the end of the next
    one, whose rows are counted.
    """
    S, half = model.config.chunk_size, len(limits) // 2
    span, changed = S - S // 2 + S, ids.copy()
    given = np.full((len(limits), 2), -1)
    places: list[int] = []
    wanted: list[tuple[int, list[int]]] = []
    # four chunks each: one before it begins, where it begins, where it ends, and one after
    for turn in range(min(_REPEATS, (len(limits) - half) // 4)):
        asking = len(limits) - 3 - 4 * turn
        room = min(half, int(limits[asking])) * S - span
        if room < 0:
            continue
        source = Draws(seed, _SOURCES, number, turn).below(room + 1)
        begin = asking * S + S // 2
        changed[begin : begin + span] = ids[source : source + span]
        read = source + S - S // 2  # where the tokens of the chunk that reads come from
        given[asking] = (read // S, (read + S - 1) // S) if read % S else (read // S, -1)
        wanted.append((asking, [chunk for chunk in given[asking].tolist() if chunk >= 0]))
        places += range((asking + 1) * S, (asking + 2) * S - 1)
    if not places or model.config.num_retrieved_chunks < 2:
        return {}
    with torch.no_grad():
        out = model(_row(model, changed), output_retrieval=True)
    chosen = [
        set().union(*(own.indices[0, asking].tolist() for own in out.retrieval)) for asking, _ in wanted
    ]
    sources = [chunk in own for own, (_, those) in zip(chosen, wanted, strict=True) for chunk in those]
    found = {
        "copy, none": losses_of(none, changed),
        "copy, own": _losses(out.logits, changed),
        "copy, given": losses_of(model, changed, given),
    }
    cases = {case: {"tokens": len(places), "nats": float(own[places].sum())} for case, own in found.items()}
    cases["copy, own"] |= {"sources": len(sources), "sources_read": sum(sources)}
    return cases


# --- what scores say -----------------------------------------------------------------------------------------------


def parts_of(scores: Floats) -> dict[str, float]:
    """Scores [C, C] of one text: how far they lie apart, what is popular (:func:`trailmark.ops.score_parts`), and their
    "rank", the exponential of the entropy of their squared singular values, of the same pairs."""
    deviation, popular = score_parts(torch.from_numpy(scores))
    half = len(scores) // 2
    known = np.ma.masked_invalid(scores[half:, :half])
    block = np.ma.filled(known - known.mean(1, keepdims=True), 0.0)
    parts = np.linalg.svd(block, compute_uv=False) ** 2 if half else np.zeros(1)
    parts = parts[parts > 0] / parts.sum() if parts.any() else parts[:0]
    rank = float(np.exp(-(parts * np.log(parts)).sum())) if len(parts) else 0.0
    return {"deviation": float(deviation), "popular": float(popular), "rank": rank}


def _agreement(
    scores: Floats, limits: Integers, asks: Integers, tried: Integers, useful: Floats
) -> dict[str, float]:
    """How the scores of the chunks tried [n, M] stand to what each took off the loss [n, M]: means over askers."""
    may = np.arange(len(limits)) < limits[:, None]
    askers = may.sum(0)
    popular = np.where(may, scores, 0).sum(0) / np.maximum(askers, 1)
    own = np.take_along_axis(scores[asks], tried, 1)
    return {
        "agreement": _rank_correlation(own, useful),
        "agreement_of_pair": _rank_correlation(own - popular[tried], useful),
    }


def _rank_correlation(a: Floats, b: Floats) -> float:
    """Spearman's, of each row of [n, M], their mean."""
    a, b = (own.argsort(1).argsort(1) - (own.shape[1] - 1) / 2 for own in (a, b))
    return float(((a * b).sum(1) / (a * a).sum(1)).mean())


# --- what the gradient says ----------------------------------------------------------------------------------------


def _gradients(model: Any, ids: Integers) -> list[tuple[Integers, Floats, Floats]]:
    """Of each group the chunks read [C, K], and the gradient in their scores [C, K] of every other token's loss."""
    with _differentiable(model):
        out = model(_row(model, ids), output_retrieval=True)
        to = torch.from_numpy(ids[1:]).to(out.logits.device)
        logits = out.logits[0, :-1]
        wide = torch.promote_types(logits.dtype, torch.float32)
        each = F.cross_entropy(logits.to(wide), to, reduction="none")
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
def _differentiable(model: Any) -> Iterator[None]:
    """With a gradient in the scores even where the model's parameters are frozen."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    try:
        for p in frozen:
            p.requires_grad_(True)
        with torch.enable_grad():
            yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


def _in_scores(selection: ChunkSelection, gradient: Tensor | None) -> Floats:
    """The gradient in scores, from that in their softmax: w (g - sum w g)."""
    weights = selection.weights[0].detach().double()
    if gradient is None:  # nothing was read
        return weights.new_zeros(weights.shape).cpu().numpy()
    own = gradient[0].double()
    found: Floats = (weights * (own - (weights * own).sum(-1, keepdim=True))).cpu().numpy()
    return found


def _gradient_parts(indices: Integers, even: Floats, odd: Floats, readable: int) -> dict[str, float]:
    """How much of the gradient [C, K] is a past chunk's whoever asks, how far two halves agree, and what was read."""
    there = indices >= 0
    chunks, whole = indices[there], (even + odd)[there]
    if not len(chunks) or not whole.any():
        return {"gradient_popular": 0.0, "gradient_halves": 0.0, "ever_read": 0.0}
    counts = np.bincount(chunks)
    sums = np.bincount(chunks, weights=whole)
    read = counts > 0
    share = float((sums[read] ** 2 / counts[read]).sum() / (whole**2).sum())
    chance = read.sum() / len(chunks)
    a, b = even[there], odd[there]
    halves = float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum())) if a.any() and b.any() else 0.0
    return {
        "gradient_popular": (share - chance) / (1 - chance) if chance < 1 else share,
        "gradient_halves": halves,
        "ever_read": float(read.sum()) / readable,
    }


# --- all texts -----------------------------------------------------------------------------------------------------


def _of_all(texts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "cases": [_case(case, texts) for case in CASES if any(case in own["cases"] for own in texts)],
        "groups": [
            {name: float(np.mean([own[name] for own in each])) for name in each[0]}
            for each in zip(*(own["groups"] for own in texts), strict=True)
        ],
    }


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
