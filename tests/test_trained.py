"""The length that a training's files tell, and nothing where they do not."""

from __future__ import annotations

from typing import Any

import pytest

from trailmark.trained import trained_length

NEEDLES = {"data": {"task": "needles", "chunk_size": 32}, "training": {"context_length": 4096}}
LEVELS = {"levels": [{"chunks": 16}, {"chunks": 32}, {"chunks": "many"}]}


@pytest.mark.parametrize(
    ("model", "run", "history", "expected"),
    [
        ({"chunk_size": 64}, NEEDLES, LEVELS, 2048),
        ({}, NEEDLES, LEVELS, 1024),
        (None, NEEDLES, {"levels": "none"}, None),
        (None, {"data": {"task": "text"}, "training": {"context_length": 4096}}, LEVELS, 4096),
        (None, {"training": {"context_length": "long"}}, None, None),
        ({"chunk_size": 64}, {"data": 5, "training": []}, LEVELS, None),
        (None, None, None, None),
    ],
)
def test_the_longest_training_text(model: Any, run: Any, history: Any, expected: int | None) -> None:
    assert trained_length(model, run, history) == expected
