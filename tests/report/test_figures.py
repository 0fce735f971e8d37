"""Figures are drawn, into files, with what they are about."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trailmark.report.figures import COLOURS, accuracy_by_length, chunks_read, loss_curves

plt = pytest.importorskip("matplotlib.pyplot")


def pixels(path: Path, colour: str) -> int:
    """How many pixels have about this colour."""
    wanted = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return int((np.abs(plt.imread(path)[..., :3] - wanted).max(-1) < 0.03).sum())


def bluish(path: Path) -> int:
    """How many pixels have the first colour, also where it is translucent."""
    image = plt.imread(path)
    return int((image[..., 2] - image[..., 0] > 0.2).sum())


def results(accuracies: list[float]) -> list[dict[str, Any]]:
    return [
        {"length": 1024 * 4**n, "accuracy": a, "accuracy_low": a - 0.05, "accuracy_high": a + 0.05}
        for n, a in enumerate(accuracies)
    ]


def history(with_needles: bool) -> dict[str, Any]:
    steps: list[dict[str, float]] = [{"step": 10 * n, "loss": 5 / n} for n in range(1, 9)]
    if with_needles:
        steps = [s | {"accuracy": s["step"] / 100, "recall": s["step"] / 160} for s in steps]
    return {"steps": steps, "level_starts": [0, 30, 50]}


def asked(needle: int, selected: list[int]) -> dict[str, Any]:
    return {"needle": needle, "selected": [selected], "weights": [0.7, 0.2, 0.1, 0.0]}


def test_accuracy_by_length(tmp_path: Path) -> None:
    path = tmp_path / "new" / "accuracy.png"
    accuracy_by_length(path, {"DRT": results([1, 0.9, 0.8])}, 1024, 1e-4)
    assert pixels(path, COLOURS[0]) > 500
    assert pixels(path, COLOURS[1]) == 0
    accuracy_by_length(path, {"DRT": results([1, 0.9, 0.8]), "window": results([0, 0, 0])}, 1024, 1e-4)
    assert all(pixels(path, colour) > 500 for colour in COLOURS[:2])
    assert plt.imread(path).shape[:2] == (480, 840)


def test_no_series_is_left_out(tmp_path: Path) -> None:
    """There are more series than colours."""
    path = tmp_path / "accuracy.png"
    some = {f"model {n}": results([0.2 * n]) for n in range(len(COLOURS))}
    accuracy_by_length(path, some, 1024, 1e-4)
    before = pixels(path, COLOURS[0])
    accuracy_by_length(path, some | {"one more": results([0.9])}, 1024, 1e-4)
    assert pixels(path, COLOURS[0]) > before


@pytest.mark.filterwarnings("error")
def test_loss_curves(tmp_path: Path) -> None:
    path = tmp_path / "training.png"
    loss_curves(path, {"DRT": history(True), "window": history(False)}, 4096)
    assert all(pixels(path, colour) > 500 for colour in COLOURS[:2])
    below = tmp_path / "loss-alone.png"
    loss_curves(below, {"DRT": history(False)}, 4096)  # a text task
    assert pixels(path, COLOURS[0]) > pixels(below, COLOURS[0]) > 200


@pytest.mark.filterwarnings("error")
def test_a_run_of_a_few_steps_has_nothing_to_draw_yet(tmp_path: Path) -> None:
    path = tmp_path / "training.png"
    loss_curves(path, {"DRT": {"steps": []}}, 4096)
    assert path.stat().st_size > 1000


def test_chunks_read(tmp_path: Path) -> None:
    path = tmp_path / "chunks.png"
    chunks_read(path, [asked(30, [3, 7, 30, 90]), asked(5, [5, 6, 7])], 100)
    assert bluish(path) > 100
    orange = pixels(path, COLOURS[1])
    chunks_read(path, [asked(30, []), asked(5, [])], 100)  # nothing was there to select
    assert bluish(path) == 0
    assert pixels(path, COLOURS[1]) >= orange > 10


def test_every_needle_is_marked_but_not_more_than_shown(tmp_path: Path) -> None:
    path = tmp_path / "chunks.png"
    counts = []
    for shown in (1, 5, 10):
        chunks_read(path, [asked(10 * n, []) for n in range(10)], 100, shown)
        counts.append(pixels(path, COLOURS[1]))
    assert 0 < 2 * counts[0] < counts[1] < counts[2]


def test_figures_are_closed(tmp_path: Path) -> None:
    before = plt.get_fignums()
    accuracy_by_length(tmp_path / "a.png", {"DRT": results([1])}, 1024, 1e-4)
    loss_curves(tmp_path / "b.png", {"DRT": history(True)}, 4096)
    chunks_read(tmp_path / "c.png", [asked(1, [1])], 10)
    assert plt.get_fignums() == before


def test_the_same_numbers_give_the_same_file(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        accuracy_by_length(tmp_path / name, {"DRT": results([1, 0.5])}, 1024, 1e-4)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_without_matplotlib_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ValueError, match=r"pip install matplotlib"):
        chunks_read(tmp_path / "a.png", [asked(1, [1])], 10)
