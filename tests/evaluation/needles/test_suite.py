"""The suite: its records, what fits, tiers, and what it tells."""

from __future__ import annotations

import json
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.evaluation.needles.subjects import (
    BYTES,
    TEXT,
    S,
    measured,
    record_of,
    subject_of,
    task_of,
)
from trailmark.data.shards import Corpus
from trailmark.evaluation import room
from trailmark.evaluation.needles import askers as asking
from trailmark.evaluation.needles.ask import measure, run
from trailmark.evaluation.needles.suite import NeedleSettings
from trailmark.evaluation.subject import Subject
from trailmark.memory.tiers import records

# --- records, tiers, sizes -------------------------------------------------------------------------------------


FAST = [("drt", "device"), ("drt", "disk"), ("full", "host")]


class Stopped(Exception):
    pass


def without_times(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    timed = ("seconds", "seconds_reading", "seconds_asking", "tokens_per_second")
    own = ("resident_bytes", "environment", "cells_read_for", *timed)
    return [{name: value for name, value in r.items() if name not in own} for r in results]


def test_a_second_run_measures_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of("drt")
    settings = NeedleSettings(lengths=(200, 220), format="marks", depths=(0.0, 1.0), questions=1)
    plain = run(subject, settings, TEXT, record_of(tmp_path / "plain", subject))
    assert [(r["length"], r["depth"]) for r in plain] == [(200, 0.0), (200, 1.0), (220, 0.0), (220, 1.0)]
    record, kept = record_of(tmp_path / "stopped", subject), []
    keep = record.measure

    def stop(*args: Any, **kwargs: Any) -> Any:
        if len(kept) == 3:
            raise Stopped
        kept.append(keep(*args, **kwargs))
        return kept[-1]

    monkeypatch.setattr(record, "measure", stop)
    with pytest.raises(Stopped):
        run(subject, settings, TEXT, record)
    again, read = record_of(tmp_path / "stopped", subject), []
    assert len(again.results) == 3
    plain_read = subject.model.read
    monkeypatch.setattr(
        subject.model, "read", lambda ids, cache: (read.append(ids.shape[1]), plain_read(ids, cache))[1]
    )
    results = run(subject, settings, TEXT, again)
    assert without_times(results) == without_times(plain)
    whole = task_of(settings).chunks(220, S) * S
    assert read[1:] == [whole]  # after the probe: the haystack of the longer texts
    assert again.generations(results[3]) == record_of(tmp_path / "plain", subject).generations(plain[3])
    read.clear()
    monkeypatch.setattr(records.psutil, "virtual_memory", lambda: namedtuple("memory", "available")(0))
    assert run(subject, settings, TEXT, record_of(tmp_path / "stopped", subject)) == results
    assert not read  # and no room is needed for what is known


@pytest.mark.parametrize("tier", [pytest.param("host", marks=pytest.mark.slow), "disk"])
def test_answers_do_not_depend_on_the_tier(tier: str, tmp_path: Path) -> None:
    subject = subject_of("drt")
    folder = tmp_path / "memory" if tier == "disk" else None
    _, lines = measured(tmp_path / "a", subject)
    result, others = measured(tmp_path / "b", subject, memory_tier=tier, memory_folder=folder)
    assert [line | {"id": 0} for line in others] == [line | {"id": 0} for line in lines]
    assert (result["memory_tier"], result["memory_dtype"]) == (tier, None)
    assert folder is None or not list(folder.iterdir())


def test_questions_are_asked_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, changes = subject_of("drt"), {"kind": "multi-key", "needles": 3, "questions": 3}
    _, lines = measured(tmp_path / "a", subject, **changes)
    sizes, forward = [], subject.model.forward
    monkeypatch.setattr(asking, "_TOGETHER", 2)
    monkeypatch.setattr(
        subject.model, "forward", lambda ids, **more: (sizes.append(len(ids)), forward(ids, **more))[1]
    )
    _, others = measured(tmp_path / "b", subject, **changes)
    assert [line["generated"] for line in others] == [line["generated"] for line in lines]
    assert [line["selected"] for line in others] == [line["selected"] for line in lines]
    assert len(lines) == 3
    assert set(sizes) == {1, 2}


def test_a_memory_in_another_precision(tmp_path: Path) -> None:
    subject = subject_of("drt")
    whole, half = (
        measured(tmp_path / str(dtype), subject, memory_dtype=dtype, questions=1)[0]
        for dtype in (None, "bfloat16")
    )
    chunks = whole["tokens_read"] // whole["haystacks"] // S
    assert whole["memory_bytes"] - half["memory_bytes"] == chunks * 2 * S * 2 * 4 * (8 - 2)
    assert half["memory_dtype"] == "bfloat16"


def test_nothing_need_be_kept(tmp_path: Path) -> None:
    """A model that is still in training, or a script's, is asked the same."""
    subject = subject_of("drt", "needles")
    settings = NeedleSettings(lengths=(200, 220), format="marks", depths=(0.0, 1.0), questions=2)
    kept = run(subject, settings, TEXT, record_of(tmp_path, subject))
    own = ("id", "settings", "command")
    kept = [{name: value for name, value in result.items() if name not in own} for result in kept]
    anew = measure(Subject.of(subject.model, BYTES, S), settings, TEXT)
    assert json.loads(json.dumps(without_times(anew))) == without_times(kept)


def test_a_stream_is_a_text(tmp_path: Path) -> None:
    subject = subject_of("window")
    settings = NeedleSettings(lengths=(300,), format="marks", questions=2)
    results = [
        run(subject, settings, text, record_of(tmp_path / str(n), subject))
        for n, text in enumerate((TEXT, Corpus.of_tokens(TEXT)))
    ]
    assert without_times(results[0]) == without_times(results[1])


@pytest.mark.parametrize(
    ("name", "tier"),
    [
        pytest.param(name, tier, marks=[] if (name, tier) in FAST else pytest.mark.slow)
        for name in ("drt", "landmark", "full")
        for tier in ("device", "host", "disk")
    ],
)
def test_a_length_that_the_memory_cannot_hold(
    name: str, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is needed is what reading takes; one byte less that is free is refused before anything is read."""
    subject = subject_of(name)
    model, length = subject.model, 400
    task = task_of(NeedleSettings(lengths=(length,), format="marks"))
    count = task.chunks(length, S) * S
    ids = torch.from_numpy(TEXT[:count]).long()[None]
    need = room.memory_need(model, ids, count, tier, None)
    cached = model.new_cache(num_tokens=count)
    model.read(ids, cached)
    if name == "drt":
        assert need.total() == cached.memory_bytes()
    else:  # Landmark Attention keeps its last cell elsewhere; full attention all in its windows
        assert need.total() >= cached.memory_bytes()
        assert need.total() > 0
    disk, host = need["disk"], need["device"] + need["host"]
    memory = namedtuple("memory", "available")
    usage = namedtuple("usage", "free")
    if name == "full" and tier == "disk":
        assert disk == 0
    monkeypatch.setattr(records.shutil, "disk_usage", lambda place: usage(disk))
    monkeypatch.setattr(records.psutil, "virtual_memory", lambda: memory(host))
    room.expect_room(model, need, length, None)
    monkeypatch.setattr(records.psutil, "virtual_memory", lambda: memory(host - 1))
    settings = NeedleSettings(lengths=(150, length), format="marks", memory_tier=tier, questions=1)
    record = record_of(tmp_path, subject)
    with pytest.raises(ValueError, match=rf"length: expected a text whose memory fits, got {length} tokens"):
        run(subject, settings, TEXT, record)
    if disk:
        monkeypatch.setattr(records.psutil, "virtual_memory", lambda: memory(host))
        monkeypatch.setattr(records.shutil, "disk_usage", lambda place: usage(disk - 1))
        with pytest.raises(ValueError, match="disk space at"):
            run(subject, settings, TEXT, record)
    assert record.results == []


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("drt", {"lengths": (60,)}, r"length: expected at least \d+ tokens for 1 needles out of .*, got 60"),
        ("drt", {"kind": "multi-key", "needles": 30}, r"length: expected at least \d+ tokens for 30 needles"),
        ("llama", {"lengths": (300, 401)}, "length: expected at most the 400 tokens that 'llama' takes"),
        ("drt", {"values": "words"}, "values: expected 'numbers' in the format 'marks', got 'words'"),
        (
            "drt",
            {"format": "sentences", "values": "tokens"},
            "values: expected 'numbers' or 'words' in the format",
        ),
    ],
)
def test_evaluations_that_cannot_be(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        measured(tmp_path, subject_of(name), **changes)


def test_the_shortest_text(tmp_path: Path) -> None:
    subject = subject_of("drt")
    task = task_of(NeedleSettings(format="marks"))
    least = (task.least_chunks(S) + subject.model.chunks_in_sight(S) + 1) * S + task.sizes[1]
    _, lines = measured(tmp_path, subject, lengths=(least,))
    assert {chunk for line in lines for chunk in line["gold_chunks"][0]} == {0}
    with pytest.raises(ValueError, match=f"length: expected at least {least} tokens .*, got {least - 1}"):
        measured(tmp_path, subject, lengths=(least - 1,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "many"}, "kind: expected one of 'single', .*, got 'many'"),
        (
            {"format": "json"},
            "format: expected one of 'marks', 'sentences', 'paraphrases', 'paper', got 'json'",
        ),
        ({"landmarks": 3}, "landmarks: expected 1 to 2, got 3"),
        ({"phases": "some"}, "phases: expected one of 'any', 'end', got 'some'"),
        ({"protocol": "paper"}, "protocol: expected one of 'paper-table-2', got 'paper'"),
        ({"memory_tier": "cloud"}, "memory_tier: expected one of"),
        ({"memory_dtype": "int4"}, "memory_dtype: expected one of"),
        (
            {"memory_dtype": "int8", "memory_tier": "tokens"},
            "memory_dtype: expected float32, bfloat16 or float16 with",
        ),
        ({"needles": 0, "kind": "hops"}, "needles: expected 1 or more, got 0"),
        ({"needles": 2}, "needles: expected 1 for kind 'single', got 2"),
        ({"distractors": -1}, "distractors: expected 0 or more"),
        ({"questions": 0}, "questions: expected 1 or more"),
        ({"lengths": (0,)}, "lengths: expected 1 or more, got 0"),
        ({"lengths": (1.5,)}, "lengths: expected a whole number, got 1.5"),
        ({"depths": (0.5, 1.5)}, "depths: expected 0 to 1, got 1.5"),
        ({"depths": ()}, "depths: expected at least one"),
        ({"memory_folder": Path("x")}, "memory_folder: expected none for memory_tier 'device'"),
        ({"protocol": "paper-table-2", "distractors": 4}, "distractors: expected 0 for protocol"),
        ({"protocol": "paper-table-2", "kind": "hops", "hops": 3}, "hops: expected 2 for protocol"),
        ({"protocol": "paper-table-2", "landmarks": 2}, "landmarks: expected 1 for protocol"),
        ({"protocol": "paper-table-2", "format": "marks"}, "format: expected 'paper' for protocol"),
        ({"protocol": "paper-table-2", "phases": "any"}, "phases: expected 'end' for protocol"),
        ({"protocol": "paper-table-2", "straddle": False}, "straddle: expected True for protocol"),
        (
            {"protocol": "paper-table-2", "kind": "multi-key"},
            "kind: expected 'single' or 'hops' for protocol",
        ),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NeedleSettings(**changes)


@pytest.mark.parametrize(
    ("task", "protocol", "expected"),
    [
        ("needles", None, "marks"),
        ("niah", None, "paper"),
        ("text", None, "sentences"),
        (None, None, "sentences"),
        ("needles", "paper-table-2", "paper"),
    ],
)
def test_formats_that_models_know(
    task: str | None, protocol: str | None, expected: str, tmp_path: Path
) -> None:
    subject = subject_of("window", task)
    settings = NeedleSettings(lengths=(700,), questions=1, protocol=protocol)
    (result,) = run(subject, settings, TEXT, record_of(tmp_path, subject))
    assert result["format"] == expected
    cell = result["settings"]
    assert json.loads(json.dumps(cell)) == cell
    assert cell["text"] == Corpus.of_tokens(TEXT).fingerprint
    assert (cell["chunk_size"], cell["depth"], cell["straddle"]) == (S, None, expected != "marks")


def test_progress_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_PIECES", 1)
    subject, lines = subject_of("drt"), []
    settings = NeedleSettings(lengths=(9000,), format="marks", questions=1)
    run(subject, settings, TEXT, record_of(tmp_path, subject), lines.append)
    assert lines[0] == "9,000 tokens: haystack 1 of 1"
    shares = [line.split(": ")[-1] for line in lines if line.endswith("% read")]
    assert shares[:3] == ["46% read", "91% read", "100% read"]
    assert lines[1] == "9,000 tokens: haystack 1 of 1: trial 1 of 1"
