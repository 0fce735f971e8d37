"""What benchmarks/billion_weights.py says of an answer: its weight and margin, and the same memory by another scale.

And what benchmarks/billion.py writes of times that were not measured.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.benchmark_scripts import modules
from trailmark.data.corpus import standard_library_texts, tokenize
from trailmark.evaluation.record import environment
from trailmark.evaluation.subject import load
from trailmark.report.console import Progress

weights = modules("billion_weights")
billion = modules("billion")
LENGTH, NEEDLES, FACTOR = 4096, 40, 2.5


def made(weights: ModuleType, folder: Path, *changes: str) -> Any:
    """A memory of the demo's model, which may have other fields, that has read the same text."""
    subject = load(Path("demo"), changes)
    text = tokenize(list(standard_library_texts("haystack"))[:20], subject.tokenizer)
    grown = weights.Grown(subject, text, argparse.Namespace(folder=folder, landmarks="bfloat16"), Progress())
    grown.read(LENGTH)
    return grown


@torch.no_grad()
def test_another_scale_answers_as_a_model_that_has_it_and_read_the_text(
    weights: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "QUESTIONS", NEEDLES)
    monkeypatch.setattr(weights, "SCALED", NEEDLES)
    grown = made(weights, tmp_path / "own")
    own = grown.subject.model.config.retrieval_scale
    found = weights.asked(grown, grown.copy(), LENGTH, NEEDLES)
    assert grown.subject.model.config.retrieval_scale == own
    other = made(weights, tmp_path / "other", f"retrieval_scale={own * FACTOR}")
    expected = weights.asked(other, other.copy(), LENGTH, NEEDLES)[1.0]
    assert found[FACTOR] == expected
    assert found[1.0] != expected
    for before, after in zip(found[1.0], expected, strict=True):
        assert (after["margin"] > before["margin"]) == (before["margin"] > 0)
        assert before["weight"] + before["needles_weight"] + before["text_weight"] == pytest.approx(1)


def test_questions_are_counted_in_pairs(weights: ModuleType) -> None:
    """Which the other scale makes right, and which wrong."""

    def lines(*right: int) -> list[dict[str, Any]]:
        kept: dict[str, Any] = {"retrieved": True, "retrieved_by_hop": [True], "reciprocal_rank": 1.0}
        kept |= {"ranks": [1], "margin": 1.0, "needles_weight": 0.4, "text_weight": 0.0, "weight": 0.6}
        kept |= {"gold_chunks": [[0]], "selected": [[[0, 1]]]}
        return [kept | {"correct": bool(of)} for of in right]

    row, other = weights.rows_of(64, 4, {1.0: lines(1, 0, 0, 1), 2.0: lines(0, 1, 1, 1)}, 4.0)
    assert (row["scale"], row["won"], row["lost"], row["p"]) == (4.0, 0, 0, 1.0)
    assert (other["scale"], other["won"], other["lost"]) == (8.0, 2, 1)
    assert other["bins"][-1] == [3, 4]
    assert other["weights"]["wrong"] == {"low": 0.6, "median": 0.6, "high": 0.6}


def test_the_sign_test_is_exact(weights: ModuleType) -> None:
    assert weights.sign_test(0, 5) == weights.sign_test(5, 0) == 2 / 32
    assert weights.sign_test(1, 4) == 2 * (1 + 5) / 32
    assert weights.sign_test(3, 3) == weights.sign_test(0, 0) == 1


def test_the_law_of_the_best_of_many_is_found_again(weights: ModuleType) -> None:
    begin, slope, off = weights.falling([(n, 9 - 2 * math.sqrt(2 * math.log(n))) for n in (8, 30, 200, 1000)])
    assert (begin, slope) == pytest.approx((9, 2))
    assert off == pytest.approx(0, abs=1e-9)


def test_the_law_is_said_of_what_was_measured(weights: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all lengths together, also where there is one, or where text has some weight at each."""
    rows = [
        {"length": length, "needles": needles, "scale": 4.0, "questions": 300, "correct": 300 - needles // 10}
        | {
            "margin": {"median": 9 - 2 * math.sqrt(2 * math.log(max(1, needles - 1)))},
            "text_weight": length / 6400,
        }
        for length in (64, 256)
        for needles in (1, 5, 30, 300)
    ]
    rows[4]["margin"] = {"median": 8.0}  # of a single one in the longer text
    found = {"settings": {"scale": 4.0}, "results": rows}
    monkeypatch.setattr(weights, "record", lambda name: found)
    both = weights.law_text()
    assert "from 5 on, is 9.0 - 2.0 √(2 ln (N - 1)), at most 0.00 off, over all these lengths" in both
    assert "the median margin goes, by needles, from 9.00 to 8.00 with 1, " in both
    assert "the weight that text takes from 1% to 4% with 1, " in both
    assert "of 300 questions about 300 needles 270, 270 are answered right" in both
    rows[-1]["margin"] = {"median": 0.0}
    assert "at most 0.00 off" not in weights.law_text()
    found["results"] = rows[:4]
    assert "from 9.00 with 1, " in weights.law_text()
    found["results"] = rows[:1]
    assert "By needles" not in weights.law_text()
    assert "of many needles" not in weights.law_text()


def test_a_goal_that_is_missed_is_said(billion: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, Any]] = [
        {
            "length": length,
            "exact": {"seconds_a_question": {"median": together}, "seconds_a_question_in_batches": 1},
        }
        for length, together in ((1000, 7.0), (2000, 5.0), (3000, 4.24))
    ]
    rows.append({"length": 4000, "exact": {"seconds_a_question": {"median": 1.0}}})
    assert billion.goal_text(rows) == (
        "That a question of a batch is at least 5 times as fast, which was asked, is missed at 3,000 tokens (4.2)."
    )
    assert (
        billion.goal_text(rows[:2])
        == "A question of a batch is at least 5 times as fast at each length, which was asked."
    )
    assert billion.goal_text(rows[3:]) == ""


def test_times_that_nobody_measured_are_not_spoken_of(
    billion: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a block nor a column stands there without a number; both come with it."""
    of = {"median": 2.0, "lowest": 1.0, "highest": 3.0}
    row: dict[str, Any] = {"length": 64, "environment": environment(), "memory_bytes": 8}
    row["exact"] = {"seconds_a_question": of}
    found: dict[str, Any] = {"costs": [row]}
    monkeypatch.setattr(billion, "record", lambda name: found)
    assert billion.batches_text() == ""
    assert "exact" in billion.costs_text()
    assert "batch" not in billion.costs_text()
    row["exact"] |= {"seconds_a_question_in_batches": 0.5}
    assert "4.0" in billion.costs_text()
    batch = {"seconds_one_after_the_other": 70.0, "seconds_batch": of, "times_as_fast": 35.0}
    found["batches"] = [row | {"questions": 9, "exact": batch}]
    assert "--batch --questions 9 " in billion.batches_text()
    assert "35.0" in billion.batches_text()
