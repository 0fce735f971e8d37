"""Files that trailmark 0.1.0 wrote are read and continued as by itself; fixtures/version-0.1.0/make.py made them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.disks import flip
from trailmark.data.corpus import load_tokenizer
from trailmark.data.neighbours.table import NeighbourTable
from trailmark.data.shards import Corpus

MADE = Path(__file__).parent / "fixtures" / "version-0.1.0"
MODEL = "stopped/checkpoints/step-00000002"
Command = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.usefixtures("no_restart")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of all of them; commands run in it, for paths in them are relative."""
    folder = tmp_path / "files"
    shutil.copytree(MADE, folder, ignore=shutil.ignore_patterns("make.py"))
    monkeypatch.chdir(folder)
    return folder


def read_json(path: str | Path) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["shards", "pairs", "neighbours", "memory", "stopped", MODEL])
def test_every_byte_is_verified(
    name: str, files: Path, command: Command, refused: Callable[..., str]
) -> None:
    assert command("verify", name)[0] == 0
    data = [path for path in Path(name).rglob("*") if path.suffix in (".bin", ".jsonl", ".safetensors")]
    largest = max(data, key=lambda path: path.stat().st_size)
    flip(largest, largest.stat().st_size // 4)
    assert largest.name in refused("verify", name)


def test_a_memory_answers_as_it_did(files: Path) -> None:
    expected = read_json("answer.json")
    model = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    ids = load_tokenizer("bytes")("the old ", add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = model(ids, past_key_values=model.load_cache("memory"), close_chunk=True, output_retrieval=True)
    assert out.retrieval[0].indices.tolist() == expected["retrieved"]
    torch.testing.assert_close(out.logits[0, -1], torch.tensor(expected["logits"]))


def test_a_memory_and_its_trace_are_read_on(files: Path, command: Command) -> None:
    code, _, err = command("read", MODEL, "texts/1.txt", "--memory", "memory", "--trace", "trace.jsonl")
    assert code == 0, err
    (files / "anew").mkdir()
    anew = ("--memory", "anew/memory", "--trace", "anew/trace.jsonl")
    assert command("read", MODEL, "texts/0.txt", "texts/1.txt", *anew)[0] == 0
    lines, expected = (
        [json.loads(line) for line in Path(path).read_text().splitlines()[1:]]
        for path in ("trace.jsonl", "anew/trace.jsonl")
    )
    assert [line.keys() for line in lines] == [line.keys() for line in expected]
    assert command("verify", "memory")[0] == 0
    assert command("explore", "--trace", "trace.jsonl", "-o", "page.html")[0] == 0


def test_a_stopped_training_goes_on_over_its_shards(files: Path, command: Command) -> None:
    code, _, err = command("train", "train.yaml", "output=stopped")
    assert code == 0, err
    history, expected = read_json("stopped/history.json"), read_json("history-of-the-whole-run.json")
    assert history["data"] == expected["data"]
    (last,), (expected_last,) = history["steps"], expected["steps"]
    assert last["step"] == expected_last["step"]
    for name in ("loss", "step_loss", "grad_norm"):
        assert last[name] == pytest.approx(expected_last[name], rel=1e-3)


def test_shards_and_neighbours_are_opened_and_found_finished(files: Path, command: Command) -> None:
    texts = b"".join(b"".join([path.read_bytes(), b"\0"]) for path in sorted(Path("texts").iterdir()))
    corpus = Corpus.open("shards")
    tokens = corpus.read(0, len(corpus))
    ends = np.flatnonzero(tokens == 1)  # ByT5's end of text; a byte's token is its value and 3
    assert bytes(np.where(tokens == 1, 3, tokens).astype(np.uint8) - 3) == texts
    assert corpus.document_starts.tolist() == [0, *(ends[:-1] + 1).tolist()]
    table = NeighbourTable.open("neighbours", corpus=corpus)
    before = (files / "neighbours" / "neighbours.json").read_bytes()
    sizes = ("--context-length", "80", "--chunk-size", "20", "--count", "2")
    assert (
        command("neighbours", "shards", "neighbours", "--embedder", "bm25", *sizes, "--scores", "float32")[0]
        == 0
    )
    assert (files / "neighbours" / "neighbours.json").read_bytes() == before
    assert (
        command("neighbours", "shards", "anew", "--embedder", "bm25", *sizes, "--scores", "float32")[0] == 0
    )
    ours, anew = table.batch(range(14)), NeighbourTable.open("anew").batch(range(14))
    assert torch.equal(ours[0], anew[0])
    torch.testing.assert_close(ours[1], anew[1])


def test_records_of_every_suite_are_continued(files: Path, command: Command) -> None:
    """What they hold is not measured again; what they lack is added."""
    ask = ("evaluate", MODEL, "-o", "evaluation", "--text", "texts", "--suite")
    cost = ("cost", "--tiers", "device", "--generate", "2", "--rounds", "1")
    suites = {
        "step-00000002/needles": (*ask, "needles", "--questions", "2", "--lengths", "200,220"),
        "step-00000002/perplexity": (*ask, "perplexity", "--lengths", "160,200"),
        "cost": (
            *ask,
            *cost,
            "--lengths",
            "100",
        ),  # its settings name the machine: 80 would be measured again
    }
    for name, arguments in suites.items():
        (before,) = read_json(f"evaluation/{name}.json")["results"]
        code, _, err = command(*arguments)
        assert code == 0, err
        results = read_json(f"evaluation/{name}.json")["results"]
        assert results[0] == before, name  # seconds and all
        assert len(results) == 2, name
        assert results[1]["settings"].keys() == before["settings"].keys()
    before = read_json("evaluation/step-00000002/summarization.json")["results"]
    summarize = ("evaluate", MODEL, "-o", "evaluation", "--suite", "summarization", "--pairs", "pairs")
    assert command(*summarize, "--max-new-tokens", "4")[0] == 0
    assert read_json("evaluation/step-00000002/summarization.json")["results"] == before
    assert command("report", "evaluation", "-o", "page.html")[0] == 0
