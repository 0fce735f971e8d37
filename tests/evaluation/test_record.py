"""Records: every result is kept, once, with what it takes to find it again; nothing of another model is lost."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from tests.models.tiny import drt
from trailmark.evaluation import record as module
from trailmark.evaluation.record import Part, Record, environment, identity, read_record, settings_id
from trailmark.files import read_json, write_json

MODEL = {
    "name": "m",
    "folder": "runs/m",
    "architecture": "X",
    "set": {},
    "config_sha256": "c",
    "weights_sha256": "w",
}
OTHER = MODEL | {"weights_sha256": "other"}


def must_not_run() -> dict[str, Any]:
    raise AssertionError("measured again")


def record(folder: Path, model: Any = MODEL, **arguments: Any) -> Record:
    return Record(folder, "needles", model, **arguments)


def test_a_result_is_kept_at_once_and_not_measured_again(tmp_path: Path) -> None:
    first = record(tmp_path, command="trailmark evaluate runs/m")
    found = first.measure(
        {"length": 8, "seed": 0}, lambda: {"accuracy": 0.5}, lambda: [{"text": "a"}, {"text": "b"}]
    )
    assert found["settings"] == {"length": 8, "seed": 0}
    assert found["accuracy"] == 0.5
    assert found["command"] == "trailmark evaluate runs/m"
    assert found["seconds"] >= 0
    kept = read_record(tmp_path / "needles.json")
    assert kept["results"] == [found]
    assert kept["environments"][found["environment"]] == environment()
    assert kept["model"] == MODEL
    again = record(tmp_path)
    assert again.measure({"seed": 0, "length": 8}, must_not_run, must_not_run) == found
    assert [line["text"] for line in again.generations(found)] == ["a", "b"]
    again.measure({"length": 9, "seed": 0}, lambda: {"accuracy": 1.0}, lambda: [{"text": "c"}])
    assert [line["text"] for line in again.generations(found)] == ["a", "b"]
    assert len(read_record(tmp_path / "needles.json")["environments"]) == 1


def test_parts_are_kept_one_by_one_and_those_that_are_there_are_not_measured_again(tmp_path: Path) -> None:
    def stop() -> dict[str, Any]:
        raise KeyboardInterrupt

    parts = [Part({"n": n}, lambda n=n: {"x": n}, lambda n=n: [{"text": str(n)}]) for n in range(3)]  # type: ignore[misc]
    with pytest.raises(KeyboardInterrupt):
        record(tmp_path).measure_all([parts[0], parts[1], Part({"n": 2}, stop)])
    known = [Part(part.settings, must_not_run) for part in parts[:2]]
    again = record(tmp_path)
    found = again.measure_all([parts[2], *known, parts[2]])
    assert [result["x"] for result in found] == [2, 0, 1, 2]
    assert [again.generations(result)[0]["text"] for result in found] == ["2", "0", "1", "2"]
    assert [result["x"] for result in read_record(tmp_path / "needles.json")["results"]] == [0, 1, 2]


def test_another_environment_is_told_apart(tmp_path: Path) -> None:
    record(tmp_path).measure({"n": 1}, dict)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        record(tmp_path).measure({"n": 2}, dict)
    finally:
        torch.set_num_threads(threads)
    kept = read_record(tmp_path / "needles.json")
    assert [result["environment"] for result in kept["results"]] == [0, 1]
    assert [e["threads"] for e in kept["environments"]] == [threads, threads + 1]


def test_what_is_stopped_while_measuring_leaves_what_was_there(tmp_path: Path) -> None:
    one = record(tmp_path)
    one.measure({"n": 1}, lambda: {"x": 1}, lambda: [{"text": "kept"}])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def stop() -> dict[str, Any]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        one.measure({"n": 2}, stop)
    with pytest.raises(KeyboardInterrupt):
        one.measure({"n": 2}, dict, stop)  # type: ignore[arg-type]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert one.measure({"n": 2}, lambda: {"x": 2})["x"] == 2


def test_a_kill_between_the_files_leaves_no_line_without_its_result(tmp_path: Path) -> None:
    one = record(tmp_path, {"weights_sha256": "w"})
    kept = one.measure({"n": 1}, dict, lambda: [{"text": "kept"}])
    if (child := os.fork()) == 0:
        vars(module)["write_json"] = lambda *_: os._exit(9)  # killed between the generations and the results
        record(tmp_path, {"weights_sha256": "w"}).measure(
            {"n": 2}, dict, lambda: [{"text": "unfinished"}] * 3
        )
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    lines = tmp_path / "needles.generations.jsonl"
    assert lines.read_text().count("unfinished") == 3
    lines.write_bytes(lines.read_bytes()[:-5])  # and the last line is not whole
    after = record(tmp_path, {"weights_sha256": "w"})
    assert after.find({"n": 2}) is None
    assert "unfinished" not in lines.read_text()
    after.measure({"n": 2}, dict, lambda: [{"text": "new"}])
    assert [line["text"] for line in after.generations(kept)] == ["kept"]
    assert [line["text"] for line in after.generations(after.results[1])] == ["new"]


@settings(max_examples=25)
@given(st.lists(st.text(st.characters(), max_size=20), min_size=1, max_size=4))
def test_any_text_comes_back(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    """What Python takes for ends of lines, and halves of characters too."""
    folder = tmp_path_factory.mktemp("record")
    texts = [*texts, "a\u2028b\x85c\x0bd\x1ce\r\nf", "\ud800"]
    found = record(folder).measure({"n": 1}, dict, lambda: [{"text": text} for text in texts])
    record(folder).measure({"n": 2}, dict, lambda: [{"text": "x"}])
    assert [line["text"] for line in record(folder).generations(found)] == texts


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    found = record(tmp_path).measure(
        {"n": 1}, lambda: {"loss": float("nan"), "by": [{"x": float("inf")}, 1.5]}
    )
    assert (found["loss"], found["by"]) == (None, [{"x": None}, 1.5])

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    json.loads((tmp_path / "needles.json").read_text(), parse_constant=refuse)


# --- other models ----------------------------------------------------------------------------------------------


def test_a_gpu_that_stood_idle_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    assert environment("cuda")["gpu"] == environment()["gpu"] == "a GPU"
    assert "gpu" not in environment("cpu")
    assert environment("cpu")["device"] == "cpu"


def test_a_moved_model_keeps_its_results(tmp_path: Path) -> None:
    found = record(tmp_path / "a").measure({"n": 1}, dict)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    moved = record(tmp_path / "b", MODEL | {"name": "b", "folder": "elsewhere/b"})
    assert moved.measure({"n": 1}, must_not_run) == found
    moved.measure({"n": 2}, dict)
    assert read_json(tmp_path / "b" / "needles.json")["model"]["folder"] == "elsewhere/b"


def test_results_of_another_model_make_room_and_come_back(tmp_path: Path) -> None:
    told: list[str] = []
    found = record(tmp_path).measure({"n": 1}, lambda: {"x": 1}, lambda: [{"text": "first"}])
    other = record(tmp_path, OTHER, say=told.append)
    assert other.results == []
    (aside,) = tmp_path.glob("needles-????????.json")
    assert told == [f"The 1 results of another model in {tmp_path / 'needles.json'} are in {aside} now."]
    assert read_record(aside)["results"] == [found]
    assert "first" in aside.with_suffix(".generations.jsonl").read_text()
    other.measure({"n": 1}, lambda: {"x": 2}, lambda: [{"text": "second"}])
    back = record(tmp_path)
    assert back.measure({"n": 1}, must_not_run) == found
    assert [line["text"] for line in back.generations(found)] == ["first"]
    assert record(tmp_path, OTHER).measure({"n": 1}, must_not_run)["x"] == 2
    assert len(list(tmp_path.glob("needles*.json"))) == 2


def test_a_copy_that_has_the_name_is_not_overwritten(tmp_path: Path) -> None:
    record(tmp_path).measure({"n": 1}, dict)
    record(tmp_path, OTHER)
    (aside,) = tmp_path.glob("needles-*.json")
    shutil.copy(aside, tmp_path / "needles.json")
    record(tmp_path, OTHER)
    assert len(list(tmp_path.glob("needles-*.json"))) == 2


def test_two_processes_lose_nothing_of_each_other(tmp_path: Path) -> None:
    one, two = record(tmp_path), record(tmp_path)
    one.measure({"n": 1}, lambda: {"x": 1}, lambda: [{"text": "a"}])
    two.measure({"n": 2}, lambda: {"x": 2}, lambda: [{"text": "b"}])
    one.measure({"n": 3}, lambda: {"x": 3})
    assert two.measure({"n": 3}, lambda: {"x": 4})["x"] == 3  # found meanwhile
    kept = record(tmp_path)
    assert [result["x"] for result in kept.results] == [1, 2, 3]
    assert [line["text"] for result in kept.results for line in kept.generations(result)] == ["a", "b"]


# --- what cannot be --------------------------------------------------------------------------------------------


def filled(**changes: Any) -> str:
    fields = {"kind": "trailmark evaluation", "format": 1, "suite": "needles", "model": {}}
    return json.dumps(fields | {"environments": [], "results": []} | changes)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read"),
        ("[1]", "something else"),
        ('{"kind": "other"}', "something else"),
        ('{"kind": "trailmark evaluation", "format": 2}', "in format 1, got 2"),
        (
            '{"kind": "trailmark evaluation", "format": 1, "suite": "needles"}',
            r"it was changed .*\(model: expected a value",
        ),
        (filled(suite="cost"), "'cost'"),
        (filled(results=[{}]), r"it was changed .*\(id: expected a value"),
        (filled(results=3), r"it was changed .*\(results: expected a list"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_record_stays_and_is_said(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "needles.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=said):
        record(tmp_path)
    assert path.read_text() == content


def test_a_full_disk_is_said_and_what_was_saved_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = record(tmp_path)
    one.measure({"n": 1}, dict)
    before = (tmp_path / "needles.json").read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(
        ValueError, match=r"output: cannot save .*No space left on device.* what was saved before"
    ):
        one.measure({"n": 2}, dict)
    monkeypatch.undo()
    assert (tmp_path / "needles.json").read_bytes() == before
    assert one.measure({"n": 2}, lambda: {"x": 2})["x"] == 2


def test_a_suite_may_not_write_the_records_own_fields(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        record(tmp_path).measure({"n": 1}, lambda: {"settings": {}})
    with pytest.raises(AssertionError):
        record(tmp_path).measure({"n": 1}, dict, lambda: [{"id": 3}])
    assert not (tmp_path / "needles.json").exists()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="output: expected a folder"):
        record(tmp_path / "file")


# --- names -----------------------------------------------------------------------------------------------------


def test_settings_are_the_same_in_any_order() -> None:
    assert settings_id({"a": 1, "b": {"c": 2, "d": [3]}}) == settings_id({"b": {"d": [3], "c": 2}, "a": 1})
    different = [{"a": 1}, {"a": "1"}, {"a": None}, {"b": 1}, {"a": [1]}, {"a": 1, "b": 1}, {"a": 2}]
    assert len({settings_id(one) for one in different}) == len(different)


def test_a_models_identity(tmp_path: Path) -> None:
    model = drt()
    model.save_pretrained(tmp_path / "a")
    model.save_pretrained(tmp_path / "b")
    write_json(tmp_path / "b" / "other.json", {})
    (tmp_path / "b" / "optimizer.safetensors").write_bytes(b"of a checkpoint")
    one, same = identity(model, tmp_path / "a"), identity(model, tmp_path / "b")
    assert {name for name in one if one[name] != same[name]} == {"name", "folder"}
    assert one["name"] == "a"
    assert one["dtype"] == "float64"
    assert one["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    with torch.no_grad():
        model.embed_tokens.weight[0, 0] += 1
    model.save_pretrained(tmp_path / "a")
    assert identity(model, tmp_path / "a")["weights_sha256"] != one["weights_sha256"]
    model.config.rms_norm_eps = 1e-5
    assert identity(model, tmp_path / "b")["config_sha256"] != one["config_sha256"]
    json.dumps(one)


def test_a_model_without_files_is_told_by_its_weights() -> None:
    """As one of the hub: two of one name may be two revisions."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))
    one = identity(model, "owner/name")
    assert one["name"] == "name"
    assert len(one["weights_sha256"]) == 64
    assert identity(model, "owner/name") == one
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    assert identity(model, "owner/name")["weights_sha256"] != one["weights_sha256"]


@pytest.mark.parametrize("first", ["other", "same"])
def test_a_kill_as_one_models_results_make_room_loses_no_line(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = ({"name": name, "folder": name, "weights_sha256": name * 8} for name in "ab")
    Record(tmp_path, "needles", one).measure({"x": 1}, lambda: {"v": 1}, lambda: [{"generated": "of one"}])
    replaced = os.replace

    def killed(*paths: Any) -> None:
        replaced(*paths)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            Record(tmp_path, "needles", other)
    if first == "same":  # it goes on before the other comes again
        Record(tmp_path, "needles", one).measure({"x": 2}, lambda: {"v": 2}, lambda: [{"generated": "more"}])
    Record(tmp_path, "needles", other).measure(
        {"x": 1}, lambda: {"v": 1}, lambda: [{"generated": "of other"}]
    )
    record = Record(tmp_path, "needles", one)
    told = [line["generated"] for result in record.results for line in record.generations(result)]
    assert told == ["of one", "more"][: len(record.results)]
    assert len(record.results) == 1 + (first == "same")
