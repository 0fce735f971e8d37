"""The benchmark of two hops: equal conditions for all cases, one command that goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.benchmark_scripts import modules
from trailmark.files import read_json, write_json

two_hop = modules("two_hop")


def test_all_four_cases_are_asked_for(two_hop: ModuleType) -> None:
    assert {(c.groups, c.landmarks) for c in two_hop.CASES} == {(1, 1), (1, 2), (2, 1), (2, 2)}
    assert (two_hop.FACTORS, two_hop.DISTRACTORS) == ((1, 16, 256), 16)
    assert two_hop.QUESTIONS >= 200
    assert two_hop.LENGTHS == (2048, 32768, 524288)
    assert two_hop.CASES[0].name == "2 groups, 2 landmarks"
    assert two_hop.Case(1, 1).name == "1 group, 1 landmark"


def test_cases_differ_in_groups_and_landmarks_alone(two_hop: ModuleType, tmp_path: Path) -> None:
    """And what does not depend on landmarks is trained once for both."""

    def shown(case: Any, stage: Any) -> dict[str, Any]:
        found = two_hop.run_config(case, stage, None, tmp_path).to_dict()
        assert found["model"].pop("num_retrieval_groups") == case.groups
        assert found["data"].pop("num_landmarks") == (case.landmarks if stage.chained else 1)
        assert found["training"].pop("seed") == case.seed
        del found["output"]
        return found

    cases, stages = two_hop.CASES, two_hop.STAGES
    for stage in stages:
        assert all(shown(case, stage) == shown(cases[0], stage) for case in cases)
        assert stage.chained == any(level.hops for level in stage.levels)
        folders = {case.folder(stage) for case in cases}
        assert len(folders) == (len(cases) if stage.chained else len({(c.groups, c.seed) for c in cases}))
    config = two_hop.run_config(cases[0], stages[1], stages[0], tmp_path)
    assert config.init_from == two_hop.run_config(cases[0], stages[0], None, tmp_path).output


def small(two_hop: ModuleType, folder: Path, minutes: float = 60.0) -> Any:
    stages = [
        replace(stage, starts=tuple(range(len(stage.levels))), steps=len(stage.levels))
        for stage in two_hop.STAGES
    ]
    return two_hop.Benchmark(
        folder / "runs",
        folder / "two_hop.json",
        two_hop.CASES[:1],
        minutes,
        stages,
        lengths=(1024, 2048),
        questions=6,
    )


@pytest.mark.slow
def test_one_command_that_goes_on(
    two_hop: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped, it goes on where it was; finished, it measures nothing again."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    with pytest.raises(two_hop.Stopped):
        small(two_hop, tmp_path, 0.0).run()
    assert not (tmp_path / "two_hop.json").exists()
    small(two_hop, tmp_path).run()
    found = read_json(tmp_path / "two_hop.json")
    (case,) = found["cases"]
    assert (case["groups"], case["landmarks"], case["seed"]) == (2, 2, 0)
    assert [(r["length"], r["questions"], r["distractors"], r["landmarks"]) for r in case["results"]] == [
        (1024, 6, 16, 2),
        (2048, 6, 16, 2),
    ]
    for result in case["results"]:
        assert result["accuracy_low"] <= result["accuracy"] <= result["accuracy_high"]
        assert len(result["recall_by_hop"]) == 2
    histories = sorted((tmp_path / "runs").glob("*/*/history.json"))
    assert [read_json(path)["level_starts"] for path in histories] == [[*range(5)], [0, 1], [0, 1, 2], [0, 1]]
    assert case["tokens"] == sum(read_json(path)["tokens"] for path in histories)
    before = [path.stat().st_mtime_ns for path in histories]
    small(two_hop, tmp_path).run()
    assert [path.stat().st_mtime_ns for path in histories] == before
    assert read_json(tmp_path / "two_hop.json")["cases"] == [case]


def test_other_cases_are_kept_and_other_settings_are_not(two_hop: ModuleType, tmp_path: Path) -> None:
    """A file holds what was measured under one set of settings."""
    benchmark = small(two_hop, tmp_path)
    first, second = two_hop.CASES[:2]
    model = torch.nn.Linear(2, 3)
    last = {"loss": 1.0, "accuracy": 0.5, "recall": 0.75, "step": 5}
    third = replace(first, seed=3)
    for case in (first, second, third):
        for stage in two_hop.STAGES:
            history = {"steps": [last], "seconds": 2.0, "tokens": 10}
            write_json(tmp_path / "runs" / case.folder(stage) / "history.json", history)
    for case, results in ((second, [{"length": 1}]), (first, [{"length": 2}]), (first, [{"length": 3}])):
        benchmark._keep(case, model, results)
    kept = read_json(tmp_path / "two_hop.json")
    shown = [(two_hop._case(c), c["results"], c["parameters"], c["seconds"]) for c in kept["cases"]]
    assert shown == [(first, [{"length": 3}], 9, 8.0), (second, [{"length": 1}], 9, 8.0)]
    assert kept["cases"][0]["trained"] == {"loss": 1.0, "accuracy": 0.5, "recall": 0.75}
    benchmark.stages = benchmark.stages[:3]
    benchmark._keep(third, model, [])
    assert [c["seed"] for c in read_json(tmp_path / "two_hop.json")["cases"]] == [3]
