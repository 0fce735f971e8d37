"""The benchmark of training: what it compares is the same training, it goes on where it stopped, and its tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.benchmark_scripts import scripts
from tests.training.tiny import prose, run_config
from trailmark.data.corpus import load_tokenizer, tokenize
from trailmark.files import read_json, write_json


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    with scripts("training", "training_text", "training_tables") as found:
        yield found


@pytest.fixture
def training(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(modules["training"], "WARM_UP", 2)
    return modules["training"]


@pytest.fixture
def text(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["training_text"]


# --- the command ---------------------------------------------------------------------------------------------


def test_every_part_has_its_command(training: ModuleType) -> None:
    for part in ("overhead", "loader", "length"):
        assert training.parse([part]).part == part
    assert training.parse(["overhead", "--configs", "text"]).configs == ["text"]
    with pytest.raises(SystemExit):
        training.parse([])


# --- the record ----------------------------------------------------------------------------------------------


def test_a_part_goes_on_with_its_settings_alone(training: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "out.json"

    def opened(settings: dict[str, Any], again: bool = False) -> tuple[Any, dict[str, Any]]:
        record = training.Record(path)
        return record, record.part("length", settings, again)

    record, part = opened({"rounds": 1})
    part["results"].append({"seconds": [1.0]})
    record.keep()
    assert opened({"rounds": 1})[1]["results"] == [{"seconds": [1.0]}]
    assert opened({"rounds": 2})[1]["results"] == []
    assert opened({"rounds": 1}, again=True)[1]["results"] == []
    content = read_json(path)
    content["length"]["environment"]["threads"] += 1  # another machine's rounds are not comparable
    write_json(path, content)
    assert opened({"rounds": 1})[1]["results"] == []


# --- overhead ------------------------------------------------------------------------------------------------


def measure(training: ModuleType, folder: Path) -> dict[str, Any]:
    config = run_config(folder / "run", steps=training.WARM_UP + 4, save_steps=2)
    found: dict[str, Any] = training.Overhead(config, block=2).measure()
    return found


@pytest.mark.slow
def test_the_bare_loop_is_the_same_training(training: ModuleType, tmp_path: Path) -> None:
    found = measure(training, tmp_path)
    assert found["same_weights"]
    assert len(found["ratios"]) == 2
    own, bare = (found["milliseconds_of_a_step"][who] for who in training.WHO)
    assert {"batch", "forward", "backward", "clipping", "optimizer", "rest"} <= bare.keys() & own.keys()
    assert own["checkpoints"] > 0
    assert "checkpoints" not in bare


@pytest.mark.slow
def test_another_training_is_seen(
    training: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bare loop that leaves out the warm-up."""
    monkeypatch.setattr(training, "schedule", lambda settings, step: 1.0)
    assert not measure(training, tmp_path)["same_weights"]


# --- length --------------------------------------------------------------------------------------------------


def length_part(times: dict[str, dict[int, list[float]]]) -> dict[str, Any]:
    lengths = sorted({n for of in times.values() for n in of})
    results = [{"model": m, "length": n, "seconds": s} for m, of in times.items() for n, s in of.items()]
    return {"settings": {"lengths": lengths, "tokens_per_step": 1000, "rounds": 3}, "results": results}


def test_how_far_from_linear(training: ModuleType) -> None:
    part = length_part({"DRT x1": {1024: [1.0, 1.0, 9.0], 2048: [1.0, 1.1, 1.0], 4096: [0.9, 0.0, 0.9]}})
    assert training.time_per_token(part) == {"DRT x1": {1024: 1e-3, 2048: 1e-3, 4096: 9e-4}}
    assert training.deviations(part)["DRT x1"] == pytest.approx(0.1)


# --- text ----------------------------------------------------------------------------------------------------


def test_stretches_are_disjoint_pieces_of_the_files(text: ModuleType, tmp_path: Path) -> None:
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file, words in zip(files, (40, 60), strict=True):
        file.write_text(prose(words))
    tokenizer = load_tokenizer()
    whole = [tokenize([file.read_text()], tokenizer) for file in files]
    pieces = text.stretches(files, tokenizer, 50)
    assert [len(piece) for piece in pieces] == [50] * sum(len(tokens) // 50 for tokens in whole)
    rebuilt = np.concatenate(pieces)
    kept = np.concatenate([tokens[: len(tokens) // 50 * 50] for tokens in whole])
    assert np.array_equal(rebuilt, kept)


# --- tables --------------------------------------------------------------------------------------------------


def test_the_figure(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    part = length_part({"DRT x1": {1024: [1.0], 2048: [1.1]}})
    modules["training_tables"].length_figure(tmp_path / "length.png", part)
    assert (tmp_path / "length.png").read_bytes().startswith(b"\x89PNG")
