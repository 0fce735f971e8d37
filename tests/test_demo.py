"""The demo at tiny sizes: what it writes, and that it goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.disks import snapshot
from tests.training.tiny import MODELS, prose
from trailmark import demo
from trailmark.files import read_json, sha256_of
from trailmark.training.config import TrainingConfig

FIGURES = ("needles-1-length.png", "training.png", "chunks-1.png")


@pytest.fixture(scope="module", autouse=True)
def tiny() -> Any:
    """Everything smaller; the story is the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "CHUNK_SIZE", 20)
        patch.setattr(demo, "TRAIN_LENGTH", 640)
        patch.setattr(demo, "LENGTHS", (400, 800))
        patch.setattr(demo, "MANY_NEEDLES", ((800, 3),))
        patch.setattr(demo, "STEPS", {"drt": 24, "window": 20})
        patch.setattr(demo, "MODELS", MODELS)
        patch.setattr(demo, "TrainingConfig", partial(TrainingConfig, tokens_per_step=160))
        patch.setattr(demo, "standard_library_texts", lambda split: [prose(), split])
        yield


def start(output: Path, at: str = "", **settings: Any) -> list[str]:
    """Runs the demo and gives what it says; Ctrl-C is pressed when it says ``at``."""
    said: list[str] = []

    def say(message: str) -> None:
        said.append(message)
        if at and at in message:
            raise KeyboardInterrupt

    made = partial(demo.Demo, output, questions=6, say=say)
    made(**settings).run()
    return said


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    """The record but for what the clock says."""
    clocks = ("seconds", "seconds_reading", "seconds_asking", "tokens_per_second", "resident_bytes")
    text = json.dumps({k: v for k, v in record.items() if k != "measured_seconds_per_step"})
    return json.loads(text, object_hook=lambda d: {k: v for k, v in d.items() if k not in clocks})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("demo")
    return folder, start(folder)


def test_the_record_holds_every_number(finished: tuple[Path, list[str]]) -> None:
    record = read_json(finished[0] / "demo.json")
    assert record["settings"] == {"seed": 0, "minutes": None, "questions": 6}
    assert record["steps"] == {"drt": 24, "window": 20}
    assert record["models"] == MODELS
    assert record["environment"]["torch"] == torch.__version__
    assert record["phases"] == "any"  # questions end anywhere in a chunk
    assert {r["phases"] for r in record["results"]} == {"any"}
    asked = [(r["model"], r["length"], r["needles"], r["questions"]) for r in record["results"]]
    each = [(400, 1, 6), (800, 1, 6), (800, 3, 6)]
    assert sorted(asked) == sorted((name, *task) for name in ("drt", "window") for task in each)
    for name in ("drt", "window"):
        training = record["training"][name]
        assert training["steps"] == record["steps"][name]
        assert training["parameters"] > 1000
        assert training["seconds"] > 0
        assert 0 < training["loss"] < 10
    assert all((r["recall"] is None) == (r["model"] == "window") for r in record["results"])


def test_table_and_figures(finished: tuple[Path, list[str]]) -> None:
    folder, said = finished
    table = (folder / "table.md").read_text()
    assert sum(line.startswith("|") for line in table.splitlines()) == 2 + 6
    assert "*x train*: tokens, as a multiple of the longest text trained on." in table
    assert table.count("| DRT ") == table.count("| window only ") == 3
    assert any(table.strip() in message for message in said[-5:])
    assert f"Report: {folder}/report.html" in "".join(said)
    assert "Needles" in (folder / "report.html").read_text()
    plt = pytest.importorskip("matplotlib.pyplot")
    for name in FIGURES:
        image = plt.imread(folder / "report-figures" / name)
        assert (image[..., :3] < 0.9).any(-1).sum() > 1000, name


def test_the_models_are_there_to_be_used(finished: tuple[Path, list[str]]) -> None:
    from trailmark.evaluation.subject import load

    for name in ("drt", "window"):
        subject = load(finished[0] / name)
        assert subject.task == "needles"
        assert (subject.chunk_size, subject.train_length) == (20, 640)


def test_a_second_start_trains_and_asks_nothing_again(finished: tuple[Path, list[str]]) -> None:
    folder, first = finished
    before = snapshot(folder)
    (folder / "table.md").unlink()
    said = start(folder)
    assert sum("trained already" in line for line in said) == 2
    assert not any(line.startswith("\nTraining") for line in said)
    assert said[-1] == first[-1]
    after = snapshot(folder)
    assert after.keys() == before.keys()
    assert all(after[path] == before[path] for path in before if path.suffix != ".png")


STOPS = ("Training window", "Training DRT", "Asking DRT", "800 tokens,  1 needle", "Asking window")


@pytest.mark.slow
def test_a_stopped_demo_goes_on(finished: tuple[Path, list[str]], tmp_path: Path) -> None:
    for stop in STOPS:
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path, at=stop)
    start(tmp_path)
    ours, whole = (read_json(folder / "demo.json") for folder in (tmp_path, finished[0]))
    assert without_times(ours) == without_times(whole)
    for name in ("drt", "window"):
        weights, expected = (
            load_file(folder / name / "model.safetensors") for folder in (tmp_path, finished[0])
        )
        assert all(torch.equal(weights[key], expected[key]) for key in expected)


@pytest.mark.slow
def test_a_stop_right_after_a_training_loses_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, at="on training texts")
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, at="Asking DRT")
    assert set(read_json(tmp_path / "demo.json")["training"]) == {"drt", "window"}


@pytest.mark.parametrize("settings", [{"seed": 1}, {"minutes": 3.0}, {"questions": 7}])
def test_other_settings_in_the_same_folder_are_refused(
    settings: dict[str, Any], finished: tuple[Path, list[str]]
) -> None:
    folder, _ = finished
    before = snapshot(folder)
    with pytest.raises(ValueError, match=r"^output: .* holds a demo with other settings .*--output"):
        start(folder, **settings)
    assert snapshot(folder) == before


def fixed_steps(
    folder: Path, monkeypatch: pytest.MonkeyPatch, recipe: dict[str, int], minutes: float | None
) -> tuple[dict[str, int], list[str]]:
    """How many steps of so many a demo decides on, and what it says until then."""
    monkeypatch.setattr(demo, "STEPS", recipe)
    said: list[str] = []

    def say(message: str) -> None:
        said.append(message)
        if message.startswith("\nTraining"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.Demo(folder, minutes=minutes, say=say).run()
    return read_json(folder / "demo.json")["steps"], said


def test_a_slow_machine_takes_longer_and_says_how_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = {"drt": 10**9, "window": 10**9}
    steps, said = fixed_steps(tmp_path, monkeypatch, recipe, None)
    assert steps == recipe
    assert any("The recipe's steps take about" in line for line in said)
    assert not any("--minutes" in line for line in said)


def test_given_minutes_cap_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, said = fixed_steps(tmp_path / "few", monkeypatch, {"drt": 24 * 10**6, "window": 20 * 10**6}, 0.5)
    seconds = read_json(tmp_path / "few" / "demo.json")["measured_seconds_per_step"]
    assert steps["drt"] / steps["window"] == pytest.approx(24 / 20, rel=0.05)
    assert sum(steps[name] * seconds[name] for name in seconds) == pytest.approx(30, rel=0.1)
    assert any("--minutes" in line for line in said)
    recipe = {"drt": 24, "window": 20}
    steps, said = fixed_steps(tmp_path / "all", monkeypatch, recipe, 10**6)
    assert steps == recipe
    assert not any("--minutes" in line for line in said)


def test_an_unwritable_folder_is_named_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"^output: expected a folder to write in"):
        start(tmp_path / "file")


# What it trained comes with the package


@pytest.mark.usefixtures("no_restart")
def test_the_shipped_model_finds_a_fact(tmp_path: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    """As the README has it, and far behind it."""
    for filler in (1, 1000):
        text = tmp_path / "notes.txt"
        text.write_text(
            "some notes ... $ABCD=48213; ... " + "more notes, of the kind that one writes\n" * filler
        )
        code, out, _ = command(
            "generate", "demo", "--file", text, "--prompt", "~ABCD", "--max-new-tokens", "7"
        )
        assert code == 0
        assert "=48213;" in out


def test_the_shipped_model_is_small_and_as_it_was_trained() -> None:
    folder = Path(demo.__file__).parent / "demo_model"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1e6
    for name, known in read_json(folder / "model.json")["files"].items():
        assert sha256_of(folder / name) == known["sha256"]
    assert (folder / "README.md").is_file()
