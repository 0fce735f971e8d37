"""The lines of a trace: what is written is read back, and what is no trace is refused."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trace.whole import totals
from trailmark.trace.lines import (
    Read,
    TracedChunk,
    TraceHeader,
    TraceSource,
    _numbers,
    decode,
    encode,
    read_trace,
    write_lines,
)

FLOATS = (np.float32, np.float64)
HEADER = TraceHeader({"name": "m"}, 3, 2, 3, settings={"memory_dtype": "float32"})


def chunk(
    number: int = 0, text: str = "ab", values: Any = (np.nan, 0.5), dtype: Any = np.float32
) -> TracedChunk:
    numbers = np.array(values, dtype)
    reads = (
        Read(np.array([1, 4]), numbers, numbers),
        Read(np.array([2, 3]), numbers, None, 0.25),
        Read(np.zeros(0, np.int64), np.zeros(0), np.zeros(0)),
    )
    ids, starts = np.array([7, 8]), np.array([0, 1])
    return TracedChunk(number, 2 * number, True, ids, text, starts, reads, numbers, numbers)


def assert_same(one: Any, other: TracedChunk) -> None:
    """But for the types of numbers: those of a file are float64."""

    def numbers(items: list[tuple[str, Any]]) -> dict[str, Any]:
        dtype = other.losses.dtype
        floats = [(name, np.asarray(x, dtype)) for name, x in items if getattr(x, "dtype", None) in FLOATS]
        return dict(items) | dict(floats)

    np.testing.assert_equal(asdict(one, dict_factory=numbers), asdict(other, dict_factory=numbers))


@given(
    st.text(st.characters(), max_size=6),
    st.lists(st.floats(width=32, allow_infinity=False), min_size=2, max_size=2),
    st.sampled_from([np.float32, np.float64]),
)
@settings(max_examples=100)
def test_a_line_is_read_back(text: str, values: list[float], dtype: Any) -> None:
    """Whatever the text holds: ends of lines, halves of characters; every float to the bit."""
    own = chunk(0, text, values, dtype)
    line = encode(own)
    assert line.count("\n") == 1
    assert line.endswith("\n")
    assert_same(decode(line.encode().decode()), own)


def test_numbers_of_float32_are_short() -> None:
    assert '"losses":[0.1,null]' in encode(chunk(values=(0.1, np.nan)))
    assert '"losses":[0.1,null]' in encode(chunk(values=(0.1, np.nan), dtype=np.float64))
    with pytest.raises(ValueError, match="expected finite numbers"):
        encode(chunk(values=(0.1, np.inf)))


def test_ctrl_c_is_heard_while_numbers_are_written() -> None:
    """numpy's astype(str) lost one of four."""
    values, heard = np.random.default_rng(0).random(2000, np.float32), []

    def stop(*_: object) -> None:
        heard.append(True)
        raise KeyboardInterrupt

    def until_stopped() -> None:
        heard.clear()
        signal.setitimer(signal.ITIMER_REAL, 0.002)
        while not heard:
            _numbers(values)

    before = signal.signal(signal.SIGALRM, stop)
    try:
        for _ in range(60):
            with pytest.raises(KeyboardInterrupt):
                until_stopped()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_file_is_read_line_by_line(tmp_path: Path) -> None:
    path, own = tmp_path / "trace", [chunk(0), chunk(1)]
    write_lines(path, [HEADER, TraceSource("a", 0, "/a"), *own])
    header, found = read_trace(path)
    assert header == HEADER
    source, *rest = found
    assert source == TraceSource("a", 0, "/a")
    chunks = [x for x in rest if isinstance(x, TracedChunk)]
    assert len(rest) == len(chunks) == 2
    for one, other in zip(chunks, own, strict=True):
        assert_same(one, other)
    assert totals(chunks) == (2, 1.0, 1.0)
    assert totals([]) == (0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["{}"], "expected a line of a trace"),
        ([encode(chunk())], "to begin with a trace's header"),
        ([encode(HEADER).replace('"format":1', '"format":2')], "expected format 1, got 2"),
        ([encode(HEADER), encode(chunk(1))], r"expected chunk 0 at token 0, got chunk 1 .*line 2 of"),
        ([encode(HEADER), encode(HEADER)], r"expected one header"),
        ([encode(HEADER), encode(chunk())[:-9]], r"expected a line of a trace, got .*line 2 of"),
        (
            [encode(HEADER), json.dumps(json.loads(encode(chunk())) | {"starts": [0]})],
            "another number of starts",
        ),
        ([encode(HEADER), encode(chunk()).replace("[1,4]", "[1]")], "another number of weights"),
        (
            [encode(HEADER).replace('"num_groups":3', '"num_groups":2'), encode(chunk())],
            "2 groups read.*line 2",
        ),
        (
            [encode(HEADER), encode(chunk()), encode(chunk(1))[:40]],
            "line 3 .* ends within this line.*once more",
        ),
        (["", encode(chunk())[:40]], "line 1 .* ends within this line"),
        ([], "expected a line of a trace, got ''"),
    ],
)
def test_what_is_no_trace_is_refused(lines: list[str], words: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("".join(lines))
    with pytest.raises(ValueError, match=words):
        list(read_trace(path)[1])
    path.write_bytes(encode(HEADER).encode() + b"\xff\n")
    with pytest.raises(ValueError, match=r"^trace: expected UTF-8, .*line 2 of .*trace"):
        list(read_trace(path)[1])
    with pytest.raises(ValueError, match=r"cannot read .*none'.*Write one with: trailmark read"):
        read_trace(tmp_path / "none")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_groups", "2"), ("num_groups", 0), ("model", None), ("chunk_size", 1e99), ("window", [1])),
        *(("ids", ["a"]), ("ids", None), ("starts", [[0]]), ("starts", [2**70]), ("text", 3), ("chunk", "0")),
        *(("reads", [3]), ("reads", {}), ("losses", ["nan"]), ("closed", 1), ("first_token", True)),
    ],
)  # fmt: skip
def test_fields_have_their_types(name: str, value: Any, tmp_path: Path) -> None:
    header, line = json.loads(encode(HEADER)), json.loads(encode(chunk()))
    (header if name in header else line)[name] = value
    (tmp_path / "trace").write_text(json.dumps(header) + "\n" + json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=f"{name}.*" if name in header else rf"{name}.*\(line 2 of "):
        list(read_trace(tmp_path / "trace")[1])
