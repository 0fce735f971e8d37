"""What an answer to a needle's question is worth, what is kept of it, and what comes out of many."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from trailmark.data.needles.tasks import Question, Trial
from trailmark.evaluation.needles.askers import Answer, ReadingCost
from trailmark.models.reads import Selection
from trailmark.statistics import wilson_interval

_SHOWN = 40  # questions whose selected chunks stand with a result, for figures; all stand in the generations


class Verdict(NamedTuple):
    right: bool
    text: str  # the answer as it reads


def judge(
    question: Question, tokens: list[int], tokenizer: Any, ends: Collection[int], given: bool = False
) -> Verdict:
    """Say whether an answer is right, and how it reads.

    Args:
        ends: tokens behind which nothing is said.
        given: each token comes after the true ones before it.
    """
    last = next((n for n, token in enumerate(tokens, 1) if token in ends), None)
    if not question.fixed and last is not None:
        tokens = tokens[:last]
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Verdict((question.given if given else question.right)(tokens, text), text)


def line_of(
    trial: Trial, question: Question, answer: Answer, verdict: Verdict, chunk_size: int, token: int | None
) -> dict[str, Any]:
    """What is kept of one question.

    Args:
        token: of the answer, by which alone a paper's protocol counts it as correct; None: all of it must be right.
    """
    gold = [
        sorted({chunk for n in hop for chunk in trial.needles[n].value_chunks(chunk_size)})
        for hop in question.gold
    ]
    begun = 0 if question.early is None else question.early + 1
    line: dict[str, Any] = {
        "correct": verdict.right,
        "expected": question.text,
        "generated": verdict.text,
        "gold_chunks": gold,
        "needle_chunks": [needle.chunks(chunk_size) for needle in trial.needles],
        # tokens of the chunk that the question's first landmark closes
        "phase": (question.landmarks[0] - begun) % chunk_size + 1,
    }
    if token is not None:
        line |= {"correct": answer.tokens[token] == int(question.answer[token]), "exact": verdict.right}
    if question.free:
        line["first_token"] = answer.tokens[0] == int(question.answer[0])
    if answer.selected is not None:
        line |= _retrieval(answer.selected, gold)
    return line


def _retrieval(selected: list[list[Selection]], gold: list[list[int]]) -> dict[str, Any]:
    """Which gold chunks were selected, with which rank and weight: in the group that gives them most.

    The last hop's chunks must be selected at the last landmark, whose chunks serve the answer; those of the hops
    before at any.
    """
    last, anywhere = selected[-1], [some for landmark in selected for some in landmark]
    at_last = {m for some in last for m in some.chunks}
    at_any = {m for some in anywhere for m in some.chunks}
    by_hop = [set(chunks) <= at_any for chunks in gold[:-1]] + [set(gold[-1]) <= at_last]
    weights, ranks = [], []
    for chunk in gold[-1]:
        holding = [
            (some.weights[some.chunks.index(chunk)], some.weights) for some in last if chunk in some.chunks
        ]
        weights.append(max((own for own, _ in holding), default=0.0))
        ranks.append(min((1 + sum(w > own for w in others) for own, others in holding), default=None))
    shown: dict[str, Any] = {
        "retrieved": by_hop[-1],
        "retrieved_by_hop": by_hop,
        "weight": sum(weights) / len(weights),
        "ranks": ranks,
        "reciprocal_rank": sum(0 if rank is None else 1 / rank for rank in ranks) / len(ranks),
    }
    groups = sorted({some.group for some in last})
    if len(last) > len(groups):  # many heads: what each layer read
        shown["selected"] = [
            [sorted({m for some in at if some.group == n for m in some.chunks}) for n in groups]
            for at in selected
        ]
    else:
        shown["selected"] = [[some.chunks for some in at] for at in selected]
        shown["weights"] = [[[round(w, 4) for w in some.weights] for some in at] for at in selected]
    return shown


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What came out in one cell, of which ``lines`` tell every question."""
    count, correct = len(lines), sum(line["correct"] for line in lines)
    low, high = wilson_interval(correct, count)
    result: dict[str, Any] = {
        "questions": count,
        "correct": correct,
        "accuracy": correct / count,
        "accuracy_low": low,
        "accuracy_high": high,
    }
    if "exact" in lines[0]:
        result["exact_accuracy"] = sum(line["exact"] for line in lines) / count
    if "first_token" in lines[0]:
        result["first_token_accuracy"] = sum(line["first_token"] for line in lines) / count
    result |= dict.fromkeys(("retrieved", "recall", "recall_by_hop", "mean_weight", "mean_reciprocal_rank"))
    if "retrieved" in lines[0]:
        retrieved = sum(line["retrieved"] for line in lines)
        by_hop = zip(*(line["retrieved_by_hop"] for line in lines), strict=True)
        result |= {
            "retrieved": retrieved,
            "recall": retrieved / count,
            "recall_by_hop": [sum(hop) / count for hop in by_hop],
            "mean_weight": math.fsum(line["weight"] for line in lines) / count,
            "mean_reciprocal_rank": math.fsum(line["reciprocal_rank"] for line in lines) / count,
            "asked": [_shown(line) for line in lines[:_SHOWN]],
        }
    return result


def _shown(line: dict[str, Any]) -> dict[str, Any]:
    """What the last landmark's groups selected, and where the (first) value lies."""
    shown = {"needle": line["gold_chunks"][-1][0], "selected": line["selected"][-1]}
    return shown | ({"weights": line["weights"][-1][0]} if "weights" in line else {})


def costs(cost: ReadingCost, haystacks: int, seconds: float, cells: int) -> dict[str, Any]:
    """What a cell cost that was asked for ``seconds`` and shared with others, ``cells`` in all, what was read."""
    return {
        "haystacks": haystacks,
        "tokens_read": cost.tokens,
        "seconds_reading": cost.seconds,
        "cells_read_for": cells,
        "tokens_per_second": cost.tokens / cost.seconds if cost.seconds else None,
        "memory_bytes": cost.memory_bytes,
        "resident_bytes": cost.resident_bytes,
        "seconds_asking": seconds,
        "seconds": seconds + cost.seconds / cells,
    }
