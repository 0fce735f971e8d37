"""The examples do what they say."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import trailmark
from tests.data.corpora import prose
from tests.models.conversion.bases import made, save
from trailmark.data.corpus import standard_library_texts

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_ops_in_your_module(capsys: pytest.CaptureFixture[str]) -> None:
    names = runpy.run_path(str(EXAMPLES / "ops_in_your_module.py"))
    assert "gradient of the retriever: " in capsys.readouterr().out
    module, S = names["module"], names["module"].S
    text = torch.randn(2, 5 * S, 64, generator=torch.Generator().manual_seed(1))
    changed = text.clone()
    changed[:, 3 * S] += 1
    with torch.no_grad():
        before, after = module(text), module(changed)
    assert torch.equal(before[:, : 3 * S], after[:, : 3 * S])  # no chunk reads what comes later
    assert torch.equal(before[:, : 2 * S], text[:, : 2 * S])  # the first two read nothing
    assert not torch.equal(before[:, 2 * S : 3 * S], text[:, 2 * S : 3 * S])


@pytest.mark.usefixtures("one_thread")
def test_ask_a_book(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model is made of a base, the book is read once, and three questions are answered from what it says."""
    llama = made("llama").float()
    llama.config.max_position_embeddings = 4096  # enough to see which layers look far
    base = save(llama, tmp_path / "base")
    book = tmp_path / "book.txt"
    book.write_bytes(prose(1, 120).encode("ascii", "ignore"))
    model, fields = (
        tmp_path / "models" / "long",
        ["sliding_window=24", "chunk_size=6", "num_retrieved_chunks=3"],
    )
    words = ["ask_a_book.py", model, book, "--base", base, "--tokens", 8, "--far-layers", 2, "--set", *fields]
    monkeypatch.setattr(sys, "argv", list(map(str, words)))

    def said() -> str:
        runpy.run_path(str(EXAMPLES / "ask_a_book.py"), run_name="__main__")
        return capsys.readouterr().out

    first = said()
    text = book.read_text()
    tokens = len(text)
    config = json.loads((model / "config.json").read_text())
    assert (config["model_type"], config["reading"]) == ("trailmark_hils", "windows")
    assert config["layer_types"].count("full_attention") == 2
    assert f"{tokens:,} tokens, " in first
    for passage in (put := re.findall(r"\n  before the question: (.*)", first)):
        assert ast.literal_eval(passage) in text
    assert put
    found = re.findall(r"\n  chunk (\d+), weight (\d\.\d{3}): (.*)", first)
    assert 3 <= len(found) <= 9
    for chunk, weight, words_there in found:
        if int(chunk) < tokens // 6:  # of the book: a token is a byte
            assert words_there == repr(text[6 * int(chunk) :][:6])
        assert 0 < float(weight) <= 1
    again = said()  # nothing is read or converted a second time
    assert "tokens/s" not in again
    assert again.strip() == first[first.index("\n\n") :].strip()


@pytest.mark.usefixtures("one_thread")
def test_read_a_book(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    book = tmp_path / "book.txt"
    book.write_text("\n".join(standard_library_texts("haystack"))[:50_000])
    model = str(Path(trailmark.__file__).parent / "demo_model")
    monkeypatch.setattr(sys, "argv", ["read_a_book.py", model, str(book)])
    runpy.run_path(str(EXAMPLES / "read_a_book.py"))
    said = capsys.readouterr().out
    assert "answer: =48213;" in said
    assert re.search(r"chunk      [01]  weight (1|0\.[5-9])", said)


@pytest.mark.slow
def test_your_own_model() -> None:
    # a process of its own: the model would stay registered in this one
    command = [sys.executable, str(EXAMPLES / "your_own_model.py")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (gradient,) = re.findall(r"gradient of the gate (.*)", said)
    assert float(gradient) > 0
    (chunks, difference), *_ = re.findall(r"(\d+) chunks in memory, largest difference (.*)", said)
    assert int(chunks) == 400 // 8
    assert float(difference) < 1e-5
