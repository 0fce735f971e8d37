"""The comparison of models: every row trains on as much, is asked the same, and the tables say what was found."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.benchmark_scripts import modules
from tests.training.tiny import prose
from trailmark.data.corpus import load_tokenizer, tokenize
from trailmark.files import read_json, write_json
from trailmark.models import architectures
from trailmark.training.run import Run

compare = modules("compare")
measure = modules("compare_measure")
rows = modules("compare_rows")
tables = modules("compare_tables")


# --- rows ----------------------------------------------------------------------------------------------------


def parameters(config: Any, vocabulary: int) -> int:
    with torch.device("meta"):
        model = architectures()[config.model["architecture"]](config.model_config(vocabulary))
    return sum(p.numel() for p in model.parameters())


def test_all_rows_train_on_as_many_tokens(rows: ModuleType) -> None:
    for name in rows.ROWS:
        if rows.measured("cost", name):
            training = rows.text_config(name, 0, []).training
            assert training.tokens_per_step % training.context_length == 0
            assert training.tokens_per_step == pytest.approx(rows.TOKENS_PER_STEP, rel=0.01)
            assert name == "Landmark" or training.context_length == rows.CONTEXT_LENGTH
        if rows.measured("needles", name):
            training = rows.needle_config(name, 0, []).training
            assert training.tokens_per_step == rows.TOKENS_PER_STEP


def test_the_twin_with_more_layers_alone_has_the_parameters_of_a_drt(rows: ModuleType) -> None:
    for config, tokens in ((rows.needle_config, 259), (rows.text_config, rows.VOCABULARY)):
        count = {
            name: parameters(config(name, 0, []), tokens)
            for name in ("Base", "Base, more layers", "DRT x1", "DRT x2")
        }
        for name in ("DRT x1", "DRT x2"):
            assert count["Base, more layers"] == pytest.approx(count[name], rel=0.05)
            assert count["Base"] < 0.95 * count[name]


def test_an_ablation_is_one_change_of_drt_x1(rows: ModuleType) -> None:
    for config in (rows.text_config, rows.needle_config):
        drt = config("DRT x1", 0, [])
        for name, row in rows.ROWS.items():
            if not name.startswith("DRT x1, ") or (config is rows.needle_config and row.needles is None):
                continue
            other = config(name, 0, [])
            changed = {key for key in other.model if other.model[key] != drt.model.get(key)}
            assert len(changed - {"embedder"}) == 1, name
            assert (other.data, other.training) == (drt.data, drt.training)


def test_the_order_of_rows(rows: ModuleType) -> None:
    """Every row once before any second seed; what was named gets all seeds."""
    found = rows.jobs("text", None, (0, 1, 2))
    assert len(found) == len(set(found))
    once = [name for name in rows.ROWS if rows.measured("text", name)]
    assert sorted(name for name, _ in found[: len(once)]) == sorted(once)
    assert found[0] == ("Base", 0)
    assert {name for name, seed in found if seed} == set(rows.SEEDED)
    assert rows.jobs("text", ["full attention"], (0, 1)) == [("full attention", 0), ("full attention", 1)]
    assert ("DRT x1, implementation reference", 0) not in found  # the same weights as DRT x1
    assert ("Landmark, twice the steps", 0) in rows.jobs("needles", None, (0,))


def test_levels_come_by_the_step(rows: ModuleType, tmp_path: Path) -> None:
    """Whatever a model answers, all rows see the same texts, each sample once."""
    config = rows.needle_config("Base", 3, [f"output={tmp_path}", "training.steps=10"])
    run = Run(config, text=tokenize([prose(9000)], load_tokenizer("bytes")))
    rows.fix_levels(run)
    for step in range(10):
        run.curriculum.update(step, 1.0, run.task.rows(step))
    assert [run.curriculum.level_at(step) for step in range(10)] == [0] * 4 + [1] * 6
    ends = [run.task.first_sample(step) + run.task.rows(step) for step in range(10)]
    assert [run.task.first_sample(step) for step in range(10)] == [0, *ends[:-1]]
    assert run.batch(3)["input_ids"].shape[1] == 8 * 32
    assert run.batch(4)["input_ids"].shape[1] == 32 * 32


def test_a_level_recorded_before_it_had_all_fields_is_the_same_level(
    measure: ModuleType,
) -> None:
    now = measure.asked()["levels"]
    first = ("chunks", "blank", "dense", "near", "quiet", "mixed", "decoys", "early")
    before = [[share, {name: level[name] for name in first}] for share, level in now]
    assert measure.recorded_levels(before) == now
    before[0][1]["chunks"] += 1
    assert measure.recorded_levels(before) != now


# --- numbers -------------------------------------------------------------------------------------------------


def result(row: str, losses: list[float], seed: int = 0, factor: int = 1) -> dict[str, Any]:
    found = {"factor": factor, "losses": losses, "tokens": [100] * len(losses)}
    return {"row": row, "seed": seed, "parameters": 1000, "results": [found]}


def test_differences_are_paired_by_book_and_seed(tables: ModuleType) -> None:
    base = [result("Base", [2.0, 5.0, 3.0]), result("Base", [3.0, 6.0, 4.0], seed=1)]
    assert tables.less([result("DRT x1", [1.5, 4.5, 2.5])], base, 1) == (-0.5, 0.0)
    both = [result("DRT x1", [2.0, 4.0, 3.5]), result("DRT x1", [2.0, 6.0, 3.5], seed=1)]
    books = np.array([[0.0, -1.0], [-1.0, 0.0], [0.5, -0.5]]).mean(1)  # [books, seeds]
    mean, error = tables.less(both, base, 1)
    assert mean == pytest.approx(books.mean())
    assert error == pytest.approx(books.std(ddof=1) / np.sqrt(3))
    assert tables.less(both, base, 4) is None
    assert tables.less([result("DRT x1", [1.0], seed=7)], base, 1) is None
    assert tables.less([result("DRT x1", [1.0])], [result("Base", [2.0])], 1) == (-1.0, math.inf)


def test_the_order_is_compared_with_the_papers(tables: ModuleType) -> None:
    """The paper: DRT x2 before DRT x1 before Base before Block-Recurrent."""
    part = {
        "results": [
            result("Base", [3.0, 4.0]),
            result("DRT x1", [2.5, 3.6]),
            result("DRT x2", [2.0, 4.2]),  # better in one book, worse in the other
            result("Block-Recurrent", [2.9, 3.9]),
            result("full attention", [1.0, 1.0]),  # not in the table
        ]
    }
    found = tables.ordering(part)
    assert found["alike"] == [("DRT x1", "Base"), ("DRT x1", "Block-Recurrent")]
    assert found["reversed"] == [("Base", "Block-Recurrent")]
    assert ("DRT x2", "DRT x1") in found["open"]
    assert sum(map(len, found.values())) == 6


def test_rows_that_differ_less_than_seeds_do_are_not_told_apart(tables: ModuleType) -> None:
    rows = [result("Base", [3.0, 4.0], seed) for seed in (0, 1)]
    rows += [result("DRT x2", [2.5 + shift, 3.5 + shift], seed) for seed, shift in ((0, 0.0), (1, 0.02))]
    rows += [result("DRT x1", [2.49, 3.49]), result("Block-Recurrent", [2.4, 3.4])]
    spread = tables.spread_of_seeds(tables.by_row({"results": rows}), 1)
    assert spread == pytest.approx(np.std([-0.5, -0.48], ddof=1))
    found = tables.ordering({"results": rows})
    assert found["open"] == [("DRT x2", "DRT x1")]  # 0.01, with a spread of 0.014
    assert ("DRT x1", "Block-Recurrent") in found["reversed"]  # 0.09
    assert tables.spread_of_seeds(tables.by_row({"results": rows[1:]}), 1) is None


def sample(tables: ModuleType) -> dict[str, Any]:
    text = [result(row, losses) for row, losses in (("Base", [3.0, 4.0]), ("DRT x1", [2.5, 3.6]))]
    text += [result("DRT x1", [2.4, 3.6], seed) for seed in (1, 2)]
    asked = {"factor": 4, "correct": 9, "questions": 10}
    paid = {"row": "DRT x1", "parameters": 1000, "microseconds_per_token": 12.0, "step_bytes": 1 << 20}
    paid |= {"ratio": 1.5, "ratio_lowest": 1.4, "ratio_highest": 1.75}
    settings = {"steps": 1, "tokens_per_step": 8, "context_length": 4, "corpus_tokens": 9, "vocabulary": 7}
    level = [1.0, {"chunks": 8}]
    return {
        "text": {"settings": settings, "results": text},
        "needles": {
            "settings": settings | {"length": 1024, "questions": [10, 5], "levels": [level]},
            "results": [{"row": "DRT x1", "seed": 0, "parameters": 900, "results": [asked]}],
        },
        "cost": {"settings": {"rounds": 7}, "results": [paid]},
    }


def test_tables(tables: ModuleType) -> None:
    record = sample(tables)
    shown = tables.text(record)
    assert f"{np.exp(3.5):.2f}" in shown  # Base
    seeds = [np.exp(np.mean(losses)) for losses in ([2.5, 3.6], [2.4, 3.6], [2.4, 3.6])]
    assert f"{np.mean(seeds):.2f} ± {np.std(seeds, ddof=1):.2f}" in shown
    assert "-0.4500 ± 0.0500" in shown  # seed 0 alone: Base has no other
    assert "0.90 (0.60-0.98)" in shown  # Wilson's interval of 9 of 10
    assert "10 questions of each seed in a cell; 5 where" in shown
    assert "1.50x (1.40-1.75)" in shown
    assert "1 of 1 pairs are ordered as in the paper" in shown
    assert tables.text({}) == ""


# --- all of it -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_from_end_to_end(
    compare: ModuleType, measure: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainings in processes of their own, on books made on the spot; a second start finds all done."""
    for split, words in (("train", 3000), ("test", 2000)):
        (tmp_path / "data" / "books" / split).mkdir(parents=True)
        for name, more in (("a", 0), ("b", 1000)):
            (tmp_path / "data" / "books" / split / f"{name}.txt").write_text(prose(words + more)[more:])
    monkeypatch.setenv("TRAILMARK_DATA", str(tmp_path / "data"))
    command = ["--rows", "Base", "Landmark", "DRT x1", "--seeds", "0", "--steps", "2", "--vocabulary", "270"]
    command += ["--rounds", "1", "--folder", str(tmp_path / "run"), "--output", str(tmp_path / "out.json")]
    command += [
        "--set",
        "training.context_length=32",
        "training.tokens_per_step=64",
        "training.warmup_steps=1",
    ]
    cost = compare.parse(["cost", *command])
    with monkeypatch.context() as fewer:
        fewer.setattr(compare, "ROWS", {name: compare.ROWS[name] for name in ("Base", "RPT, hash encoder")})
        compare.compare(cost)  # first of all: no text was prepared
    base, other = read_json(tmp_path / "out.json")["cost"]["results"]
    assert (base["row"], base["ratio"], other["row"]) == ("Base", 1.0, "RPT, hash encoder")
    assert min(base["step_bytes"], other["step_bytes"], other["ratio"]) > 0
    compare.compare(compare.parse(["text", *command]))
    first = read_json(tmp_path / "out.json")
    assert [r["row"] for r in first["text"]["results"]] == ["Base", "DRT x1", "Landmark"]
    for factor in measure.FACTORS:  # all on the same tokens of the same books
        asked = [r for row in first["text"]["results"] for r in row["results"] if r["factor"] == factor]
        assert len({str(r["tokens"]) for r in asked}) == 1
        assert len(asked[0]["tokens"]) == 2
    trained = tmp_path / "run" / "text" / "base-0" / "model.safetensors"
    when = trained.stat().st_mtime_ns
    first["text"]["results"].pop(0)  # as if it had been stopped before
    write_json(tmp_path / "out.json", first)
    compare.compare(compare.parse(["text", *command]))
    assert len(read_json(tmp_path / "out.json")["text"]["results"]) == 3
    assert trained.stat().st_mtime_ns == when
    with pytest.raises(SystemExit, match="other settings"):
        compare.compare(compare.parse(["text", *command, "training.warmup_steps=2"]))
    job = json.dumps(compare.Comparison(compare.parse(command)).job("text", "Base", 0, 3))
    with pytest.raises(SystemExit, match="measured with other settings"):
        measure.measure_row(json.loads(job))
