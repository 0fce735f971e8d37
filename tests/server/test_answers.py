"""The text of an answer up to a stop string, however its tokens part it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trailmark.byte_tokenizer import ByteTokenizer
from trailmark.evaluation.subject import load
from trailmark.server.answers import TextEnd
from trailmark.server.served import Served


@pytest.fixture(scope="module")
def served(models: dict[str, Path]) -> Served:
    engine: Any = None
    return Served("bytes", load(models["bytes"]), engine)


@given(
    text=st.text("ab河\n", max_size=30), stops=st.lists(st.text("ab河", min_size=1, max_size=4), max_size=3)
)
def test_all_up_to_the_first_stop_string_is_shown(served: Served, text: str, stops: list[str]) -> None:
    end, shown = TextEnd(served, stops), ""
    for token in ByteTokenizer(extra_ids=0)(text)["input_ids"]:
        shown += end.add(token)
        if end.stopped:
            break
    shown += end.end()
    expected = text
    for count in range(len(text) + 1):  # written naively: the text that ends first with one of them
        found = [stop for stop in stops if text[:count].endswith(stop)]
        if found:
            expected = text[: count - max(map(len, found))]
            break
    assert shown == expected
    assert end.stopped == (expected != text)
