"""Levels that begin at given steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from trailmark.data.needles.curriculum_texts import Level
from trailmark.training.curriculum import Curriculum

LEVELS = (Level(8, 1.0, 1.0, 0.0), Level(16, 1.0, 1.0, 0.0), Level(4, 1.0, 1.0, 0.0))
TOKENS, S = 1024, 32  # 4, 2 and 8 samples a step


def test_levels_begin_at_given_steps_whatever_is_answered() -> None:
    curriculum = Curriculum(LEVELS, threshold=0.5)
    curriculum.begin_at((0, 3, 7), TOKENS, S)
    seen: list[int] = []
    samples: list[int] = []
    for step in range(9):
        seen.append(curriculum.level_at(step))
        rows = curriculum.rows(seen[-1], TOKENS, S)
        first = curriculum.first_sample(step, rows)
        samples += range(first, first + rows)
        curriculum.update(step, 1.0 if step % 2 else 0.0, rows)
    assert seen == [0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert samples == list(range(3 * 4 + 4 * 2 + 2 * 8)), "no sample twice, none left out"
    assert curriculum.starts == [0, 3, 7]


@pytest.mark.parametrize("starts", [(0, 3), (0, 3, 7, 9), (1, 3, 7), (0, 3, 3), (0, 7, 3), ()])
def test_starts_that_do_not_fit(starts: Sequence[int]) -> None:
    with pytest.raises(ValueError, match=r"^starts: expected 3 steps, ascending from 0, got \["):
        Curriculum(LEVELS).begin_at(starts, TOKENS, S)
