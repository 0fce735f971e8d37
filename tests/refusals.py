"""What a refusal is: a ValueError whose one line a terminal can show."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest


def one_line(call: Callable[[], Any], *words: str) -> str:
    """The line with which ``call`` is refused, within ten seconds; ``words`` stand in it."""
    began = time.monotonic()
    with pytest.raises(ValueError, match=r".+") as caught:
        call()
    said = str(caught.value)
    assert time.monotonic() - began < 10
    assert "\n" not in said
    assert len(said) < 1000
    for word in words:
        assert word in said
    return said
