"""A run's folder from a stranger, who can sign what he changed: what cannot be is one line, and nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.attacks import resign_run
from tests.disks import flip
from tests.training.tiny import TEXT, prose, run_config
from trailmark.training.checkpoints import step_folder
from trailmark.training.config import RunConfig
from trailmark.training.final_model import MODEL_MANIFEST, has_signed_model, verify_model
from trailmark.training.run import Run
from trailmark.training.tensors import load_tensors, save_tensors
from trailmark.training.verification import verify as verify_folder

SAVED = {"steps": 3, "save_steps": 2, "keep_checkpoints": 3}


def die(run: Run) -> None:
    if run.step == 3:
        raise KeyError("killed")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("real") / "run"
    with pytest.raises(KeyError, match="killed"):
        Run(run_config(output, **SAVED), die, TEXT).train()
    return output


def change_json(path: Path, change: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


NESTED = "[" * 100_000
CHANGES: dict[str, dict[str, Any]] = {
    "run.json": {
        "a list": [],
        "nested": NESTED,
        "no step": {"step": None},
        "another step": {"step": 10**12},
        "a text as seconds": {"seconds": "soon"},
        "a number as data": {"data": 7},
        "curriculum": {"curriculum": None},
        "guard": {"guard": {"skipped": "all"}},
        "averages": {"averages": {"loss": "x"}},
        "history": {"history": [[1]]},
        "history without a step": {"history": [{"loss": 1.0}]},
    },
    "trainer_state.json": {
        "a list": [],
        "nested": NESTED,
        "another step": {"global_step": "2"},
        "an unknown key": {"unheard of": 1},
        "no text as a batch size": {"train_batch_size": "nan"},
        "no batch size": {"train_batch_size": None},
        "no text as callbacks": {"stateful_callbacks": "1e999"},
        "nested callbacks": {"stateful_callbacks": {"TrainerControl": {"args": {"should_log": [[]]}}}},
        "a list as a checkpoint": {"best_model_checkpoint": [[]]},
        "a nested log": {"log_history": [{"loss": {"a": 1}}]},
        "a number as a text": {"total_flos": "1.5"},
        "a number of many digits": {"total_flos": 10**400},
    },
}


@pytest.mark.parametrize(("name", "what"), [(name, what) for name in CHANGES for what in CHANGES[name]])
def test_a_state_that_was_changed_and_signed_again_is_one_line(
    killed: Path, tmp_path: Path, name: str, what: str
) -> None:
    output = Path(shutil.copytree(killed, tmp_path / "run"))
    newest = step_folder(output / "checkpoints", 2)
    change = CHANGES[name][what]
    if isinstance(change, dict):
        change_json(newest / name, change)
    else:
        (newest / name).write_text(change if isinstance(change, str) else json.dumps(change))
    resign_run(output)
    with pytest.raises(ValueError, match=r"^(output|data): ") as caught:
        Run(run_config(output, **SAVED), text=TEXT).train()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("what", ["nan", "names", "shape", "optimizer", "optimizer's types", "random"])
@pytest.mark.sampled(3)
def test_tensors_that_were_changed_and_signed_again_are_one_line(
    killed: Path, tmp_path: Path, what: str
) -> None:
    output = Path(shutil.copytree(killed, tmp_path / "run"))
    newest = step_folder(output / "checkpoints", 2)
    weights = safetensors.torch.load_file(newest / "model.safetensors")
    first = min(weights)
    if what == "nan":
        weights[first].view(-1)[0] = float("nan")
    elif what == "names":
        weights["another"] = weights.pop(first)
    elif what == "shape":
        weights[first] = torch.zeros(3, 5, 7)
    safetensors.torch.save_file(weights, newest / "model.safetensors", {"format": "pt"})
    if what == "optimizer":
        save_tensors(newest / "optimizer.safetensors", [1, 2])
    elif what == "optimizer's types":
        tree = load_tensors(newest / "optimizer.safetensors")
        tree["optimizer"]["param_groups"] = {"lr": "fast"}
        save_tensors(newest / "optimizer.safetensors", tree)
    elif what == "random":
        save_tensors(newest / "random.safetensors", [{"python": [1]}])
    resign_run(output)
    with pytest.raises(ValueError, match=r"^output: ") as caught:
        Run(run_config(output, **SAVED), text=TEXT).train()
    assert "\n" not in str(caught.value)


def test_a_final_model_without_its_manifest_is_never_passed_over(tmp_path: Path) -> None:
    output = tmp_path / "run"
    Run(run_config(output, **SAVED), text=TEXT).train()
    (output / MODEL_MANIFEST).unlink()
    with pytest.raises(ValueError, match=r"^checkpoints: damaged: the final model: model\.json: is missing"):
        verify_folder(output)
    history = json.loads((output / "history.json").read_text())
    assert history.pop("model_manifest") == MODEL_MANIFEST
    (output / "history.json").write_text(json.dumps(history))  # as older versions wrote it
    said: list[str] = []
    places = verify_folder(output, say=said.append)
    assert [Path(place).name for place in places] == ["step-00000002", "step-00000003"]
    assert said == [f"{output}: final model: not compared, there is no model.json."]
    (output / "history.json").write_text("[]")
    assert verify_folder(output) == places
    shutil.rmtree(output / "checkpoints")
    with pytest.raises(
        ValueError, match=r"^folder: .* a model without model\.json, which cannot be compared"
    ):
        verify_folder(output)


def of_text(output: Path, *paths: Path, **training: Any) -> RunConfig:
    config = run_config(output, **(SAVED | training))
    return replace(config, data=replace(config.data, paths=[*map(str, paths)]))


def test_a_finished_run_is_not_made_again_of_another_text(tmp_path: Path) -> None:
    """Not even where its checkpoints, which say of which it was, are gone."""
    text, output = tmp_path / "text.txt", tmp_path / "run"
    text.write_text(prose())
    Run(of_text(output, text)).train()
    shutil.rmtree(output / "checkpoints")
    before = (output / "model.safetensors").read_bytes()
    text.write_text(prose()[::-1])
    run = Run(of_text(output, text))
    assert not run.finished
    with pytest.raises(ValueError, match=r"^data: expected the text that the run in"):
        run.train()
    assert (output / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_model_that_no_training_wrote_is_not_written_over(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("of somebody")
    with pytest.raises(
        ValueError, match=f"^output: expected a folder of a run, .* holds {name}, which no training"
    ):
        Run(run_config(tmp_path, **SAVED), text=TEXT).train()
    assert (tmp_path / name).read_text() == "of somebody"


def test_how_text_is_named_and_what_is_measured_may_change(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(prose())
    (tmp_path / "held-out.txt").write_text(prose()[::-1])

    with pytest.raises(KeyError, match="killed"):
        Run(of_text(tmp_path / "run", tmp_path / "texts"), die).train()
    named = of_text(tmp_path / "run", tmp_path / "texts" / ".." / "texts", eval_steps=1, eval_windows=2)
    named.data.validation = [str(tmp_path / "held-out.txt")]
    run = Run(named)
    run.train()
    assert [line["step"] for line in run.history if "eval_loss" in line] == [3]


def test_seeds_are_measured_on_the_same_windows(tmp_path: Path) -> None:
    (tmp_path / "held-out.txt").write_text(prose()[::-1])
    windows = []
    for seed in (0, 1):
        config = run_config(tmp_path / f"run-{seed}", **SAVED, seed=seed, eval_steps=1, eval_windows=4)
        config.data.validation = [str(tmp_path / "held-out.txt")]
        task = Run(config, text=TEXT)._validation
        assert task is not None
        windows.append(task.batch(0, 0, 4)["input_ids"])
    assert torch.equal(*windows)


def test_the_final_model_and_its_manifest(tmp_path: Path) -> None:
    """Every file of the model is in it; what people and later commands write beside it is not."""
    run = Run(run_config(tmp_path / "run", **SAVED), text=TEXT)
    run.train()
    output = tmp_path / "run"
    assert has_signed_model(output)
    verify_model(output)
    files = set(json.loads((output / MODEL_MANIFEST).read_text())["files"])
    assert {"config.json", "model.safetensors", "tokenizer_config.json"} <= files
    assert not files & {"README.md", "history.json", "run.yaml", MODEL_MANIFEST}
    (output / "README.md").write_text("mine")
    verify_model(output)
    weights = output / "model.safetensors"
    content = weights.read_bytes()
    flip(weights, -1)
    with pytest.raises(ValueError, match=r"^model\.safetensors: was changed"):
        verify_model(output)
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"^model\.safetensors: expected a regular file"):
        verify_model(output)
    weights.unlink()
    weights.write_bytes(content)
    for raw in (b"", b"[]", NESTED.encode(), b"{}"):
        (output / MODEL_MANIFEST).write_bytes(raw)
        with pytest.raises(ValueError, match=r"^model\.json: expected the manifest of a trained model"):
            verify_model(output)
    (output / MODEL_MANIFEST).unlink()
    os.mkfifo(output / MODEL_MANIFEST)
    with pytest.raises(ValueError, match=r"^model\.json: expected a regular file"):
        verify_model(output)
