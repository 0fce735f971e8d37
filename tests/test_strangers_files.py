"""Attacks by a stranger's files and settings, each as it was tried once: every one is answered in a line."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import attacks
from tests.report.traces import made_up
from trailmark.trace.lines import write_lines

pytestmark = pytest.mark.usefixtures("no_restart", "one_thread")

Refused = Callable[..., str]
Command = Callable[..., tuple[int, str, str]]
MODEL = {
    "architecture": "drt",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "sliding_window": 9,
    "chunk_size": 20,
    "num_retrieved_chunks": 2,
}
SIZES = ("--context-length", "80", "--chunk-size", "20", "--count", "2")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a text, a corpus of it, and a run's settings; the working folder."""
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    text = " ".join(rng.choice(["the", "old", "river", "sings"]) for _ in range(200))
    (tmp_path / "text.txt").write_text(text)
    settings = {
        "output": "run",
        "model": MODEL,
        "data": {"paths": ["text.txt"]},
        "training": {"steps": 1, "tokens_per_step": 160, "context_length": 80},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(settings))  # which is YAML
    return tmp_path


@pytest.fixture
def corpus(place: Path, command: Command) -> Path:
    code, _, err = command("prepare", "text.txt", "--output", "shards", "--processes", "1")
    assert code == 0, err
    return place / "shards"


# --- settings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["model.hidden_size=1000000000", "model.vocab_size=1000000000000"])
def test_a_model_that_no_memory_holds_is_refused_before_it_is_made(
    place: Path, refused: Refused, command: Command, size: str
) -> None:
    assert refused("train", "run.yaml", size).startswith("trailmark: model")
    assert not (place / "run").exists()
    code, out, err = command("train", "run.yaml", size, "--dry-run")
    assert (
        code == 1 and err.strip().splitlines()[-1].startswith("trailmark: model")
    ) or "was not taken" in out
    settings = json.loads((place / "run.yaml").read_text())
    name, _, value = size.removeprefix("model.").partition("=")
    settings["model"][name] = int(value)
    (place / "large.yaml").write_text(json.dumps(settings))
    line = refused("evaluate", "large.yaml", "--suite", "cost", "--lengths", "40")
    assert line.startswith("trailmark: model")


@pytest.mark.parametrize(
    ("override", "said"),
    {
        "training.learning_rate=1e300": "training.learning_rate: expected 0 to 1000, got 1e+300",
        "training.learning_rate=.nan": "training.learning_rate: expected a number, got '.nan'",
        "training.weight_decay=.inf": "training.weight_decay: expected a number, got '.inf'",
        "training.steps=1000000000000": "training.steps: expected 1 to 1000000000, got",
        "training.micro_batch_size=16": "training.micro_batch_size: expected a divisor of the 2 samples",
        "training.tokens_per_step=17179869120": "training.micro_batch_size: expected at most 16,777,216 tokens",
        "data.paths=[[]]": "data.paths: expected text, got []",
        "model=[&a [*a]]": "model: the value",
    }.items(),
)  # fmt: skip
def test_settings_are_refused_by_name(place: Path, refused: Refused, override: str, said: str) -> None:
    assert said in refused("train", "run.yaml", override, "--dry-run")


def test_a_key_stands_once(place: Path, refused: Refused) -> None:
    (place / "twice.yaml").write_text("output: a\noutput: b\n")
    assert "'output' stands twice" in refused("train", "twice.yaml")


# --- what is no regular file, or leads elsewhere -----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fifo", "link to itself"])
def test_what_is_no_file_is_no_text(place: Path, refused: Refused, kind: str) -> None:
    (place / "text.txt").unlink()
    if kind == "fifo":
        os.mkfifo(place / "text.txt")
    else:
        (place / "text.txt").symlink_to("text.txt")
    for words in (
        ("prepare", "text.txt", "--output", "shards"),
        ("train", "run.yaml"),
        ("explore", "model", "text.txt"),
        ("explore", "--trace", "text.txt"),
        ("report", "text.txt"),
        ("train", "text.txt"),
    ):
        assert "text.txt" in refused(*words) or words[1] == "model", words


def test_a_users_own_text_may_be_a_link(place: Path, command: Command) -> None:
    (place / "link.txt").symlink_to("text.txt")
    assert command("prepare", "link.txt", "--output", "shards", "--processes", "1")[0] == 0


@pytest.mark.parametrize("name", ["tokens-00000.bin", "documents-00000.bin", "corpus.json"])
def test_no_file_of_a_corpus_is_a_link(corpus: Path, refused: Refused, name: str) -> None:
    (corpus / name).rename(corpus.parent / "elsewhere")
    (corpus / name).symlink_to("../elsewhere")
    for words in (("verify", "shards"), ("train", "run.yaml", "data.paths=[shards]")):
        assert "is a link" in refused(*words)


def test_a_fifo_in_a_folder_of_results_is_not_waited_for(place: Path, refused: Refused) -> None:
    (place / "results").mkdir()
    os.mkfifo(place / "results" / "needles.json")
    before = threading.active_count()
    assert "is a FIFO" in refused("report", "results")
    assert threading.active_count() == before


# --- signed again by a stranger ----------------------------------------------------------------------------------


def edit(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_tokens_that_the_vocabulary_lacks_are_refused(corpus: Path, refused: Refused) -> None:
    tokens = np.fromfile(corpus / "tokens-00000.bin", "<u2")
    tokens[100:200] = 60_000
    tokens.tofile(corpus / "tokens-00000.bin")
    attacks.resign_corpus(corpus)
    said = "expected tokens below the vocabulary's size 259, 'shards' holds 60000"
    assert said in refused("train", "run.yaml", "data.paths=[shards]", "training.tokens_per_step=1600")
    assert said in refused("neighbours", "shards", "table", "--embedder", "hash", *SIZES)


def test_a_corpus_manifest_is_checked_whole(corpus: Path, refused: Refused) -> None:
    whole = json.loads((corpus / "corpus.json").read_text())
    for change in ({"tokens": -1}, {"documents": 10**400}, {"shards": "7"}, {"dtype": None}):
        (corpus / "corpus.json").write_text(json.dumps(whole | change))
        line = refused("verify", "shards")
        assert "corpus.json' is broken" in line
        assert len(line) < 1000


def test_neighbours_that_are_none_are_refused(corpus: Path, refused: Refused, command: Command) -> None:
    assert command("neighbours", "shards", "table", "--embedder", "hash:8", *SIZES)[0] == 0
    table = corpus.parent / "table"
    np.full(len((table / "neighbours.bin").read_bytes()) // 2, 60_000, "<u2").tofile(table / "neighbours.bin")
    attacks.resign_files("neighbours.json")(table)
    line = refused(
        *("train", "run.yaml", "data.paths=[shards]", "data.neighbours=table", "data.early_landmarks=0"),
        *("model.architecture=rpt", "model.retriever=encoder", "model.exclude_visible_chunks=false"),
    )
    assert "expected chunks that come earlier" in line
    for name, value in (("windows", 0), ("chunks", 10**30), ("count", -1), ("rule", None), ("files", [])):
        broken = corpus.parent / f"broken-{name}"
        shutil.copytree(table, broken)
        edit(
            broken / "neighbours.json", lambda content, name=name, value=value: content.update({name: value})
        )
        assert "neighbours.json' is broken" in refused("verify", broken.name)


def test_lines_of_a_trace_have_their_types(place: Path, refused: Refused) -> None:
    header, entries = made_up(200)
    write_lines(place / "trace.jsonl", [header, *entries])
    lines = (place / "trace.jsonl").read_text().splitlines()
    number = next(number for number, line in enumerate(lines) if '"chunk"' in line)
    lines[number] = json.dumps(json.loads(lines[number]) | {"starts": [2**70]})
    (place / "trace.jsonl").write_text("\n".join(lines) + "\n")
    line = refused("explore", "--trace", "trace.jsonl")
    assert f"(line {number + 1} of trace.jsonl)" in line
    assert "starts" in line


def test_the_header_of_a_trace_has_its_types(place: Path, refused: Refused) -> None:
    header, entries = made_up(200)
    write_lines(place / "trace.jsonl", [header, *entries])
    first, rest = (place / "trace.jsonl").read_text().split("\n", 1)
    (place / "trace.jsonl").write_text(json.dumps(json.loads(first) | {"num_groups": "2"}) + "\n" + rest)
    assert "num_groups: expected" in refused("explore", "--trace", "trace.jsonl")


# --- nested ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [3_000, 1_000_000])
def test_what_is_nested_deep_is_said_in_a_line(
    place: Path, corpus: Path, refused: Refused, command: Command, depth: int
) -> None:
    nested = "[" * depth
    (place / "deep").write_text(nested)
    for name in ("deep.json", "deep.yaml", "deep.jsonl"):
        shutil.copy(place / "deep", place / name)
    (corpus / "corpus.json").write_text(nested)
    for words in (
        ("verify", "shards"),
        ("train", "run.yaml", "data.paths=[shards]"),
        ("train", "deep.yaml"),
        ("train", "run.yaml", f"model.hidden_size={nested[:100_000]}"),
        ("explore", "--trace", "deep"),
        ("report", "deep.json"),
        ("prepare", "deep.jsonl", "--output", "out", "--processes", "1"),
        ("evaluate", "deep.yaml", "--suite", "cost", "--lengths", "40"),
    ):
        line = refused(*words)
        assert "nested" in line or "expected at most 262,144 bytes" in line, words[:2]
