"""The page of a trace, without a browser: its arrays, its head, how it is written, what is refused."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.report.traces import chunks_of, hostile, made_up, of_tokens
from tests.trace.whole import totals
from trailmark.report.explorer.data import collect, pack
from trailmark.report.explorer.page import build, expect_inputs, keeping
from trailmark.trace.lines import Entry, Read, TracedChunk, TraceSource, read_trace, write_lines

SIZES = ({}, {"words": True, "num_groups": 3, "chunk_size": 20}, {"num_tokens": 1001, "num_retrieved": 2})


def of_a_page(page: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The head and the arrays, from the HTML alone."""
    (told,) = re.findall(r'<script type="application/json" id="about">([^<]*)</script>', page)
    (packed,) = re.findall(
        r'<script type="application/octet-stream" id="data">([A-Za-z0-9+/=]*)</script>', page
    )
    about = json.loads(told)
    return about, unpack(about["arrays"], packed)


def utf16(text: str) -> np.ndarray:
    """The units that a script counts in."""
    return np.frombuffer(text.encode("utf-16-le"), "<u2")


def token_texts(arrays: dict[str, np.ndarray]) -> list[str]:
    units = utf16(arrays["text"].tobytes().decode())
    ends = np.cumsum(arrays["token_chars"])
    assert len(units) == ends[-1]
    return [part.tobytes().decode("utf-16-le") for part in np.split(units, ends[:-1])]


def whole(text: str) -> str:
    """Halves of characters replaced."""
    return "".join("\ufffd" if 0xD800 <= ord(c) < 0xE000 else c for c in text)


def unpack(places: list[dict[str, Any]], packed: str) -> dict[str, Any]:
    """What ``pack`` was given, as the page's script takes it apart."""
    content = gzip.decompress(base64.b64decode(packed))
    return {
        own["name"]: np.frombuffer(content, np.dtype(own["type"]), own["length"], own["offset"])
        for own in places
    }


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_page_holds_the_trace(size: dict[str, Any], tmp_path: Path) -> None:
    header, entries = made_up(**({"num_tokens": 2000} | size))
    chunks = chunks_of(entries)
    built = build(header, entries, tmp_path / "page.html")
    about, arrays = of_a_page(built.page.read_text(encoding="utf-8"))
    assert about["tokens"] == len(arrays["losses"]) == sum(len(chunk.ids) for chunk in chunks)
    assert about["chunks"] == len(chunks) == len(arrays["chunk_tokens"]) - 1
    assert [source["first_token"] for source in about["sources"]] == [
        entry.first_token for entry in entries if not isinstance(entry, TracedChunk)
    ]
    texts, starts = token_texts(arrays), arrays["read_starts"]
    for chunk in chunks:
        own = slice(*arrays["chunk_tokens"][[chunk.number, chunk.number + 1]].tolist())
        ends = [*chunk.starts[1:], len(chunk.text)]
        assert texts[own] == [chunk.text[first:last] for first, last in zip(chunk.starts, ends, strict=True)]
        np.testing.assert_array_equal(arrays["losses"][own], chunk.losses)
        np.testing.assert_array_equal(arrays["losses_without"][own], chunk.losses_without)
        for group, read in enumerate(chunk.reads):
            place = chunk.number * header.num_groups + group
            entry = slice(starts[place], starts[place + 1])
            np.testing.assert_array_equal(arrays["read_chunks"][entry], read.chunks)
            np.testing.assert_array_equal(arrays["read_weights"][entry], read.weights)
    assert starts[-1] == len(arrays["read_chunks"]) == len(arrays["read_weights"])
    assert "read_rest" not in arrays


def test_what_a_trace_does_not_list_is_kept(tmp_path: Path) -> None:
    reads = read_of(1, 2)[0], dataclasses.replace(read_of(3)[0], rest=0.5)
    arrays = collect(made_up(64)[0], changed(4, reads=reads)).arrays
    assert len(arrays["read_rest"]) == 2 * 10
    assert np.flatnonzero(arrays["read_rest"] == np.float32(0.5)).tolist() == [2 * 4 + 1]
    assert np.isnan(np.delete(arrays["read_rest"], 9)).all()


def test_the_sums_are_those_of_the_trace(tmp_path: Path) -> None:
    header, entries = made_up(5000)
    chunks = chunks_of(entries)
    # as of a float64 model: the page rounds each loss to float32
    wide = [
        dataclasses.replace(
            c, losses=c.losses * np.float64(1.1), losses_without=c.losses_without / np.float64(0.9)
        )
        for c in chunks
    ]
    bearing, loss, without = totals(wide)
    about = build(header, wide, tmp_path / "page.html").about
    assert about["helped"] == sum(int((c.losses_without > c.losses).sum()) for c in wide)
    assert about["bearing"] == bearing == 4999
    for found, expected in ((about["loss"], loss), (about["loss_without"], without)):
        assert abs(found - expected) <= expected * np.finfo(np.float32).eps / 2


@given(
    st.lists(
        st.lists(st.text(st.characters(codec=None), max_size=3), min_size=1, max_size=4),
        min_size=3,
        max_size=5,
    )
)
@settings(max_examples=25)
def test_any_text_is_kept_but_for_halves_of_characters(texts: list[list[str]]) -> None:
    arrays = collect(*of_tokens(texts, 4)).arrays
    assert token_texts(arrays) == [whole(token) for chunk in texts for token in chunk]


def test_the_longest_token_decides_how_lengths_are_kept() -> None:
    for length, kind in ((0xFFFF, "uint16"), (0x10000, "uint32")):
        arrays = collect(*of_tokens([["a"], ["b"], ["c", "x" * length, "d"]], 4)).arrays
        assert arrays["token_chars"].tolist() == [1, 1, 1, length, 1]
        place = pack(arrays)[0][1]
        assert (place["name"], place["type"], place["length"]) == ("token_chars", kind, 5)


def test_arrays_lie_where_a_script_can_look_at_them() -> None:
    arrays = collect(*made_up(700)).arrays
    places, packed = pack(arrays)
    assert all(place["offset"] % 8 == 0 for place in places)
    assert packed == pack(arrays)[1]  # no time of day in it
    for name, found in unpack(places, packed).items():
        np.testing.assert_array_equal(found, arrays[name])


def test_hostile_text_is_nowhere_in_the_markup(tmp_path: Path) -> None:
    header, entries = hostile()
    built = build(header, entries, tmp_path / "page.html")
    page = built.page.read_text(encoding="utf-8")
    about, arrays = of_a_page(page)
    text = arrays["text"].tobytes().decode()
    assert text == whole("".join(chunk.text for chunk in chunks_of(entries)))
    script = page[page.rindex("<script>") + len("<script>") : page.rindex("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page
    assert page.count("<script") == page.count("</script>") == 3
    outside = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    assert "<b>" not in outside
    assert "&lt;b&gt;bold&lt;/b&gt;" in outside  # the model's name
    assert about["sources"][0]["name"] == "</script><b>\ufffd\ufffd.tex"


@pytest.mark.parametrize("part", ["while it reads", "while it writes"])
def test_a_stop_leaves_the_old_page_and_nothing_half(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, entries = made_up(2000)
    page, trace = tmp_path / "page.html", tmp_path / "trace.jsonl"
    page.write_text(old := "<!doctype html>old")

    def stopped() -> Iterator[Entry]:
        yield from entries[:40]
        raise KeyboardInterrupt

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    if part == "while it writes":
        monkeypatch.setattr("os.replace", stop)
    taken = stopped() if part == "while it reads" else entries
    with pytest.raises(KeyboardInterrupt), keeping(header, taken, trace) as kept:
        build(header, kept, page)
    assert page.read_text() == old
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_trace_is_kept_even_if_the_page_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, entries = made_up(2000)
    trace, again = tmp_path / "trace.jsonl", tmp_path / "again.jsonl"

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trailmark.report.explorer.page.write_text", full)
    with pytest.raises(OSError, match="No space"), keeping(header, entries, trace) as kept:
        build(header, kept, tmp_path / "page.html")
    write_lines(again, [header, *entries])
    assert trace.read_bytes() == again.read_bytes()


def test_a_trace_into_a_pipe_does_not_replace_it(tmp_path: Path) -> None:
    header, entries = made_up(320)
    pipe, again = tmp_path / "pipe", tmp_path / "again.jsonl"
    os.mkfifo(pipe)
    came: list[str] = []
    reader = threading.Thread(target=lambda: came.append(pipe.read_text(encoding="utf-8")), daemon=True)
    reader.start()
    with keeping(header, entries, pipe) as kept:
        build(header, kept, tmp_path / "page.html")
    reader.join(10)
    write_lines(again, [header, *entries])
    assert came == [again.read_text(encoding="utf-8")]
    assert pipe.is_fifo()


def test_a_page_of_a_kept_trace_is_the_same(tmp_path: Path) -> None:
    header, entries = made_up(2000)
    trace = tmp_path / "trace.jsonl"
    with keeping(header, entries, trace) as kept:
        one = build(header, kept, tmp_path / "one.html")
    other = build(*read_trace(trace), tmp_path / "other.html")
    assert one.page.read_bytes() == other.page.read_bytes()


def test_it_tells_what_it_did(tmp_path: Path) -> None:
    header, entries = made_up(2000, num_sources=5)
    said: list[str] = []
    shown: list[str] = []
    built = build(header, entries, tmp_path / "deep" / "page.html", say=said.append, progress=shown.append)
    loss, without = (built.about[name] / 1999 for name in ("loss", "loss_without"))
    assert f"{loss:.4f} nats a token, without {without:.4f}" in said[0]
    assert str(built.page) in said[1]
    assert "2,000 tokens in 63 chunks" in said[1]
    assert any(line.startswith("2,000 tokens") for line in shown)
    assert built.about["title"] == "part-0.tex, part-1.tex and 3 more files, read by made-up"
    long = dataclasses.replace(header, model={"name": "m" * 300})
    title = build(long, [TraceSource("a" * 100 + "b" * 100, 0), *chunks_of(entries)], built.page).about[
        "title"
    ]
    assert title == f"{'a' * 29}…{'b' * 30}, read by {'m' * 29}…{'m' * 30}"
    assert build(header, entries, built.page, title="Mine").about["title"] == "Mine"


def changed(at: int, **fields: Any) -> list[Entry]:
    entries = made_up(320)[1]
    return [
        dataclasses.replace(entry, **fields)
        if isinstance(entry, TracedChunk) and entry.number == at
        else entry
        for entry in entries
    ]


def read_of(*chunks: int) -> tuple[Read, Read]:
    return (Read(np.array(chunks), np.ones(len(chunks))), Read(np.empty(0, np.int64), np.empty(0)))


NO_READS = read_of()


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "text: expected two chunks or more, got 0"),
        (made_up(32)[1], "text: expected two chunks or more, got 1 of 32 tokens.*longer text"),
        (made_up(64)[1], "text: expected a chunk that reads a past one, none of the 2"),
        (changed(4, number=5), "expected chunk 4 at token 128, got chunk 5"),
        (changed(4, first_token=127), "expected chunk 4 at token 128, got chunk 4 at token 127"),
        (changed(4, reads=NO_READS[:1]), "expected what 2 groups read, .* got 1 in chunk 4"),
        (changed(4, reads=read_of(4)), "one that reads itself or a later one"),
        (changed(4, reads=read_of(-1)), "one that reads itself or a later one"),
        (changed(4, reads=read_of(2, 1)), "ascending order"),
        (changed(4, reads=read_of(2, 2)), "ascending order"),
        (changed(4, losses=np.full(32, np.nan)), "a finite loss with and without"),
        (changed(4, losses=np.full(32, np.inf)), "a finite loss with and without"),
        (changed(4, starts=np.arange(1, 33)), "the first at 0, got others in chunk 4"),
        (changed(4, starts=np.arange(32)[::-1]), "begin one after the other"),
        (changed(4, text="short"), "begin one after the other"),
        (changed(4, reads=(Read(np.array([1]), np.array([np.nan])),) * 2), "a finite weight"),
        (changed(4, reads=(Read(np.array([1, 2]), np.ones(1)), Read(np.array([1]), np.ones(2)))), "a finite weight"),
        (changed(4, reads=(Read(np.array([1]), np.ones(1), rest=np.inf),) * 2), "weight of what is not listed"),
        (changed(0, losses_without=np.full(32, np.inf)), "a finite loss with and without"),
        ([TraceSource("b", 40), TraceSource("a", 39), *made_up(320)[1]], "'a' at token 39 before the chunk at token 0"),
    ],
)  # fmt: skip
def test_what_is_no_whole_trace_is_refused(entries: list[Entry], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        build(made_up(64)[0], entries, tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_and_a_place_that_is_none_are_refused(tmp_path: Path) -> None:
    header, entries = made_up(320)
    with pytest.raises(ValueError, match=r"is a folder\. Try .*page\.html"):
        build(header, entries, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="output: expected a folder to write in"):
        build(header, entries, tmp_path / "file" / "page.html")


MODEL, TEXT, PAGE = Path("runs/drt"), Path("book.txt"), Path("page.html")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": None}, "expected one of TEXT, --memory and --trace, got none of them"),
        ({}, "expected one of TEXT, --memory and --trace, got none of them"),
        ({"texts": [TEXT], "memory": Path("m")}, "got TEXT and --memory"),
        ({"trace": Path("t.jsonl")}, "expected no model beside a trace, got 'runs/drt'"),
        ({"model": None, "memory": Path("m")}, "model: expected a folder with a model, got none"),
        ({"memory": Path("m"), "memory_dtype": "bfloat16"}, "memory_dtype: .*--memory, which has its own"),
        ({"model": None, "trace": TEXT, "keep_trace": Path("k")}, "the trace is there already"),
        ({"texts": [TEXT], "output": TEXT}, "output: expected another file than the one that is read"),
        ({"texts": [TEXT], "keep_trace": TEXT}, "keep_trace: expected another file than the one"),
        ({"texts": [TEXT], "keep_trace": PAGE}, "keep_trace: expected another file than the page"),
        ({"texts": [TEXT], "keep_trace": Path("/")}, "keep_trace: expected a file, '/' is a folder"),
    ],
)  # fmt: skip
def test_what_is_asked_for_must_be_clear(given: dict[str, Any], message: str) -> None:
    nothing: dict[str, Any] = dict.fromkeys(("memory", "trace", "memory_dtype", "keep_trace"))
    with pytest.raises(ValueError, match=message):
        expect_inputs(**(nothing | {"model": MODEL, "texts": [], "output": PAGE} | given))
