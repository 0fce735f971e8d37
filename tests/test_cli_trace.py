"""``trailmark read --trace``, and the lines of Python in docs/trace.md."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.tiny import drt, hils, window_model
from tests.trace.whole import totals
from trailmark.data.corpus import load_tokenizer
from trailmark.trace.lines import TracedChunk, read_trace

Command = Callable[..., tuple[int, str, str]]
TEXT = "the river 😀 runs below\r\nthe stones; the river 😀 runs.\n"


def saved(model: Any, folder: Path) -> Path:
    model.float().save_pretrained(folder)
    load_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_bytes(TEXT.encode())
    return path


def test_a_book_is_read_and_traced(command: Command, book: Path, tmp_path: Path) -> None:
    model, memory, trace = (
        saved(drt(vocab_size=259), tmp_path / "model"),
        tmp_path / "memory",
        tmp_path / "t.jsonl",
    )
    code, out, err = command("read", model, book, "--memory", memory, "--trace", trace)
    assert code == 0
    count = len(TEXT.encode())
    assert " tokens in memory and traced" in err
    assert f"{book}: {count} tokens read" in out
    assert f"Its trace lies in {trace}; what a reading that goes on needs of it, in {trace}.state/." in out
    chunks = [x for x in read_trace(trace)[1] if isinstance(x, TracedChunk)]
    assert "".join(x.text for x in chunks) == TEXT
    assert totals(chunks)[0] == count - 1
    content = trace.read_bytes()
    code, out, _ = command("read", model, book, "--memory", memory, "--trace", trace)
    assert code == 0
    assert "read already" in out
    assert trace.read_bytes() == content


def test_mistakes_are_one_line(
    refused: Callable[..., str], command: Command, book: Path, tmp_path: Path
) -> None:
    model = saved(drt(vocab_size=259), tmp_path / "model")
    assert command("read", model, book, "--memory", tmp_path / "memory")[0] == 0
    line = refused("read", model, book, "--memory", tmp_path / "memory", "--trace", tmp_path / "t.jsonl")
    assert "was read without" in line
    window = saved(window_model(vocab_size=259), tmp_path / "window")
    line = refused("read", window, book, "--memory", tmp_path / "other", "--trace", tmp_path / "t.jsonl")
    assert "which retrieves nothing" in line
    windows = saved(hils(vocab_size=259, reading="windows"), tmp_path / "windows")
    line = refused("read", windows, book, "--memory", tmp_path / "other", "--trace", tmp_path / "t.jsonl")
    assert "trace: expected a model that chooses chunks while it reads" in line
    assert not (tmp_path / "t.jsonl").exists()


def test_the_lines_of_python_in_the_guide_run(
    command: Command, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = (Path(__file__).parents[1] / "docs" / "trace.md").read_text()
    first, script = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    model = saved(drt(vocab_size=259), tmp_path / "runs" / "drt")
    assert command("read", model, "book.txt", "--memory", "memories/book", "--trace", "book.jsonl")[0] == 0
    said = io.StringIO()
    with contextlib.redirect_stdout(said), torch.no_grad():
        exec(compile(script, "docs/trace.md", "exec"), {})
        names: dict[str, Any] = {}
        exec(compile(first, "docs/trace.md", "exec"), names)
    assert re.search(r"^chunk \d+, read \d+ times: '", said.getvalue())
    assert re.search(r"\nretrieval helps chunk \d+ most, by \d+\.\d\d nats: '", said.getvalue())
    # what the two calls give is what was written
    header, entries = read_trace(tmp_path / "book.jsonl")
    texts = [x.text for x in entries if isinstance(x, TracedChunk)]
    assert [x.text for x in names["entries"] if isinstance(x, TracedChunk)] == texts
    assert names["header"].settings == header.settings
