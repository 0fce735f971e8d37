"""Results are found wherever they lie, models are told apart, and what cannot be shown is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report import runs
from trailmark.evaluation.suite import suites
from trailmark.report.collect import Collected, collect, generations
from trailmark.report.notes import notes

HEAD = '{"kind": "trailmark evaluation", "format": 1, "suite": '


def labels(found: Collected) -> list[str]:
    return [model.label for model in found.models]


def test_everything_below_a_folder_is_found(tmp_path: Path) -> None:
    found = collect([runs.everything(tmp_path)])
    counts = {suite: len(found.of(suite)) for suite in suites() if found.of(suite)}
    assert counts == {"needles": 2 * 23 + 8, "perplexity": 8, "summarization": 2, "cost": 6}
    assert len(found.trainings) == 4
    assert [entry.path.name for entry in found.not_shown] == ["needles.json"]
    assert len(found.files) == 1 + 4 + 6 + 1


def test_a_file_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    path = runs.record(tmp_path / "m" / "evaluation", "needles", [runs.needle(1024)])
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "m", target_is_directory=True)
    found = collect([tmp_path, path, path.parent, link / "evaluation" / "needles.json"])
    assert len(found.results) == 1
    assert notes(found) == []


def test_the_order_is_that_of_names(tmp_path: Path) -> None:
    for name in ("c", "a", "b"):
        runs.record(tmp_path / name / "evaluation", "needles", [runs.needle(1024)])
    assert labels(collect([tmp_path])) == ["a", "b", "c"]


def test_a_training_and_its_evaluation_are_of_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever is found first, and wherever the record names its folder from."""
    runs.training(tmp_path / "drt")
    path = runs.record(
        tmp_path / "drt" / "evaluation", "needles", [runs.needle(1024)], runs.identity("drt", "runs/drt")
    )
    for order in ([path, tmp_path], [tmp_path / "drt" / "history.json", path]):
        found = collect(order)
        assert labels(found) == ["drt"]
        assert found.trainings[0].model is found.results[0].model
        assert found.models[0].weights == "a" * 64
    elsewhere = runs.record(
        tmp_path / "out" / "drt", "needles", [runs.needle(1024)], runs.identity("drt", "drt")
    )
    monkeypatch.chdir(tmp_path)
    assert labels(collect([tmp_path / "drt" / "history.json", elsewhere])) == ["drt"]


def test_the_demo_and_its_trainings_are_of_the_same_models(tmp_path: Path) -> None:
    runs.demo(tmp_path)
    found = collect([tmp_path])
    assert labels(found) == ["drt", "window"]
    assert [model.parameters for model in found.models] == [201_664, 176_768]
    assert {run.model.label for run in found.trainings} == {"drt", "window"}
    assert found.results[0].settings["format"] == "marks"
    assert found.results[0].train_length == 1024


def test_other_weights_under_one_name_are_told_apart(tmp_path: Path) -> None:
    for place, weights in (("a", "1"), ("b", "2")):
        folder = tmp_path / place / "drt"
        runs.record(
            folder / "evaluation", "needles", [runs.needle(1024)], runs.identity("drt", folder, weights)
        )
    found = collect([tmp_path])
    assert labels(found) == ["a/drt", "b/drt"]
    (note,) = notes(found)
    assert note.startswith("2 models are called drt and have other weights: a/drt: weights 11111111; b/drt:")


def test_one_folder_at_two_times_is_two_models(tmp_path: Path) -> None:
    for place, weights in (("old", "1"), ("new", "2")):
        runs.record(
            tmp_path / place, "needles", [runs.needle(1024)], runs.identity("drt", "/nowhere/drt", weights)
        )
    assert labels(collect([tmp_path])) == ["drt (weights 22222222)", "drt (weights 11111111)"]


def test_fields_that_were_set_are_part_of_the_name(tmp_path: Path) -> None:
    for place, changes in (("1", {}), ("2", {"num_retrieved_chunks": 4})):
        model = runs.identity("drt", "/nowhere/drt") | {"set": changes}
        runs.record(tmp_path / place, "needles", [runs.needle(1024)], model)
    assert labels(collect([tmp_path])) == ["drt", "drt (num_retrieved_chunks=4)"]


def test_precisions_are_told_apart(tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        model = runs.identity("drt", "/nowhere/drt") | {"dtype": dtype}
        runs.record(tmp_path / dtype, "needles", [runs.needle(1024)], model)
    assert labels(collect([tmp_path])) == ["drt (bfloat16)", "drt (float32)"]


def test_equal_weights_in_a_copied_folder_are_one_model(tmp_path: Path) -> None:
    for place in ("1", "2"):
        model = runs.identity("drt", f"/{place}/drt")
        runs.record(tmp_path / place, "needles", [runs.needle(1024)], model)
    assert labels(collect([tmp_path])) == ["drt"]


def test_rows_of_a_comparison_find_their_models_by_the_names_given_to_them(tmp_path: Path) -> None:
    both = [runs.identity("drt", f"/{place}/drt", place) for place in "ab"]
    runs.record(tmp_path, "cost", [runs.cost(["a/drt", "b/drt"])], both)
    (result,) = collect([tmp_path]).results
    assert [result.named(row["model"]).weights for row in result.values["rows"]] == ["a" * 64, "b" * 64]
    assert result.named("stranger").label == "stranger"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("needles.json", "{", "not readable as JSON"),
        ("needles.json", "[]", "no results that a report knows"),
        ("needles.json", '{"kind": "other"}', "no results that a report knows"),
        ("x.json", '{"kind": "trailmark evaluation", "format": 2}', "format 2, where this version reads 1"),
        ("x.json", HEAD + '"taste", "results": []}', "unknown suite 'taste'"),
        ("x.json", HEAD + '"cost"}', "without a list of results"),
        ("cost.json", HEAD + '"cost", "results": [{}]}', "not say of which model"),
        ("history.json", "{}", "without a list of steps"),
        ("run.yaml", "output: here", "a training that is not finished"),
        ("demo.json", "\x00", "not readable as JSON"),
        ("needles.json", "[" * 100_000, "not readable as JSON"),
    ],
)  # fmt: skip
def test_what_cannot_be_shown_is_named(name: str, content: str, reason: str, tmp_path: Path) -> None:
    runs.record(tmp_path / "good", "needles", [runs.needle(1024)])
    path = runs.write(tmp_path / "bad" / name, content)
    found = collect([tmp_path])
    assert len(found.results) == 1
    (entry,) = found.not_shown
    assert entry.path == path
    assert reason in entry.reason


def test_a_record_without_results_and_a_result_that_is_none(tmp_path: Path) -> None:
    runs.record(tmp_path / "a", "needles", [runs.needle(1024)])
    runs.record(tmp_path / "b", "cost", [])
    path = runs.record(tmp_path / "c", "perplexity", [runs.perplexity(64)])
    path.write_text(path.read_text().replace('"results": [', '"results": [5, '))
    found = collect([tmp_path])
    assert len(found.results) == 2
    assert [e.reason for e in found.not_shown] == [
        "a record without results: the evaluation was stopped before its first",
        "result 0 is no JSON object",
    ]


def test_other_programs_files_are_no_business_of_ours(tmp_path: Path) -> None:
    runs.record(tmp_path, "needles", [runs.needle(1024)])
    for name in ("config.json", "tokenizer.json", ".hidden/needles.json", "checkpoints/1/history.json"):
        runs.write(tmp_path / name, "{")
    assert collect([tmp_path]).not_shown == []


def test_a_file_that_is_named_itself_must_hold_results(tmp_path: Path) -> None:
    good = runs.record(tmp_path, "needles", [runs.needle(1024)])
    other = runs.write(tmp_path / "config.json", '{"hidden_size": 64}')
    assert [e.path for e in collect([good, other]).not_shown] == [other]
    copy = runs.write(tmp_path / "copy.json", good.read_text())  # by its content, not its name
    assert len(collect([copy]).results) == 1


def test_nothing_to_show_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"runs: expected results in .*trailmark evaluate MODEL"):
        collect([tmp_path])
    runs.write(tmp_path / "needles.json", "{")
    with pytest.raises(ValueError, match=r"needles\.json: not readable as JSON"):
        collect([tmp_path])
    with pytest.raises(ValueError, match="is not there"):
        collect([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="at least one path"):
        collect([])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"trailmark": "0.9"}, "2 versions of trailmark. 0.1.0: a needles; 0.9: b needles."),
        ({"torch": "9.9"}, "2 versions of torch. 2.13.0: a needles; 9.9: b needles."),
        ({"transformers": "9"}, "2 versions of transformers."),
        ({"processor": "Another", "gpu": "A card"}, "numbers of threads. A card, Another, 2 cores, 2 threads: b"),
        ({"threads": 1}, "comparable within one machine only"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_noted(changed: dict[str, object], said: str, tmp_path: Path) -> None:
    for name, environment in (("a", {}), ("b", changed)):
        runs.record(tmp_path / name / "evaluation", "needles", [runs.needle(1024)], environment=environment)
    (note,) = notes(collect([tmp_path]))
    assert said in note


def test_another_day_alone_is_worth_no_note(tmp_path: Path) -> None:
    for name, date in (("a", "2026-11-20"), ("b", "2026-11-21")):
        runs.record(
            tmp_path / name / "evaluation", "needles", [runs.needle(1024)], environment={"date": date}
        )
    assert notes(collect([tmp_path])) == []


def test_a_cell_that_was_measured_twice_is_noted(tmp_path: Path) -> None:
    for place in ("1", "2"):
        model = runs.identity("drt", "/nowhere/drt")
        runs.record(tmp_path / place, "needles", [runs.needle(1024), runs.needle(4096)], model)
    (note,) = notes(collect([tmp_path]))
    assert note.startswith("2 cells were measured more than once (")


def test_a_result_without_an_environment_is_noted(tmp_path: Path) -> None:
    for name, value in (("a", None), ("b", 7), ("c", "0"), ("d", -1)):
        runs.record(tmp_path / name, "needles", [runs.needle(1024, environment=value)])
    (note,) = notes(collect([tmp_path]))
    assert note.startswith("Nothing says on what these were measured: ")
    assert note.count("needles.json") == 4


def test_generations_are_those_of_the_result_and_broken_lines_are_passed_over(tmp_path: Path) -> None:
    lines = [{"id": f"needles{n % 2}", "generated": str(n)} for n in range(6)]
    path = runs.record(tmp_path, "needles", [runs.needle(1024), runs.needle(4096)], lines=lines)
    with open(path.with_name("needles.generations.jsonl"), "a") as file:
        file.write('{"id": "needles0", "gener')
    told = [[line["generated"] for line in written] for _, written in generations(collect([path]).results)]
    assert told == [["0", "2", "4"], ["1", "3", "5"]]
    # beside those of another model, which lie under a name of their own
    for kind in ("json", "generations.jsonl"):
        path.with_name(f"needles.{kind}").rename(path.with_name(f"needles-12345678.{kind}"))
    runs.record(tmp_path, "needles", [runs.needle(1024)], lines=[{"id": "needles0", "generated": "other"}])
    told = [
        [line["generated"] for line in written] for _, written in generations(collect([tmp_path]).results)
    ]
    assert sorted(told) == [["0", "2", "4"], ["1", "3", "5"], ["other"]]
