"""The model to evaluate: from its folder, of ours or of transformers, with nothing at random in it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from tests.models.tiny import drt
from trailmark.data.corpus import load_tokenizer
from trailmark.data.needles.curriculum_texts import CURRICULUM
from trailmark.evaluation.subject import Subject, expect_model, load, names_of, task_of

BYTES = load_tokenizer()
SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ours: a DRT; llama: one of transformers, in bfloat16; bert: one that is no causal language model."""
    folder = tmp_path_factory.mktemp("models")
    drt(vocab_size=259).float().save_pretrained(folder / "ours")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=259, **SIZES)).to(torch.bfloat16).save_pretrained(
        folder / "llama"
    )
    BertModel(BertConfig(vocab_size=259, **SIZES)).save_pretrained(folder / "bert")
    for name in ("ours", "llama", "bert"):
        BYTES.save_pretrained(folder / name)
    return folder


@pytest.fixture
def models(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "models"))


def test_a_model_of_ours(models: Path) -> None:
    subject = load(models / "ours")
    assert subject.ours
    assert subject.name == "ours"
    assert not subject.model.training
    assert subject.task is None
    assert subject.run == {}
    again = load(models / "ours", any_model=True)
    assert again.identity() == subject.identity()
    changed = load(models / "ours", ["num_retrieved_chunks=1"])
    assert changed.model.config.num_retrieved_chunks == 1
    assert changed.changed == {"num_retrieved_chunks": 1}
    one, other = subject.identity(), changed.identity()
    assert {name for name in one if one[name] != other[name]} == {"set", "config_sha256"}


def test_a_model_of_transformers_in_its_own_precision(models: Path) -> None:
    subject = load(models / "llama", any_model=True)
    assert not subject.ours
    assert subject.model.dtype == torch.bfloat16
    assert subject.identity()["architecture"] == "LlamaForCausalLM"
    with pytest.raises(ValueError, match=r"expected one of trailmark's .*'llama'"):
        load(models / "llama")
    with pytest.raises(ValueError, match="set: expected a model of trailmark's"):
        load(models / "llama", ["sliding_window=3"], any_model=True)


def test_no_weight_is_drawn_at_random(models: Path) -> None:
    """An encoder has no head that predicts the next token: transformers would make one up."""
    with pytest.raises(ValueError, match=r"expected the weights that config.json describes, .*missing ones"):
        load(models / "bert", any_model=True)
    config = models / "ours" / "config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps(fields | {"num_hidden_layers": fields["num_hidden_layers"] + 1}))
    for any_model in (False, True):
        with pytest.raises(ValueError, match="missing ones"):
            load(models / "ours", any_model=any_model)


def test_the_demos_model_was_trained_for_needles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert task_of(Path("demo")) == load(Path("demo")).task == "needles"
    Path("demo").mkdir()  # a folder of one's own
    assert task_of(Path("demo")) is None


def test_what_it_was_trained_for(models: Path) -> None:
    run = models / "ours" / "run.yaml"
    run.write_text(yaml.safe_dump({"data": {"task": "needles"}, "training": {"context_length": 7}}))
    subject = load(models / "ours")
    assert subject.task == "needles"
    size = subject.model.config.chunk_size
    assert subject.train_length == CURRICULUM[-1].chunks * size
    run.write_text(
        yaml.safe_dump({"data": {"task": "text", "paths": ["a/b"]}, "training": {"context_length": 70}})
    )
    subject = load(models / "ours")
    assert subject.train_length == 70
    assert subject.default_lengths() == [70, 280, 1120]
    assert subject.default_lengths(300) == [70, 280]
    assert subject.default_lengths(69) == [69]
    assert subject.trained_on([Path("a/b/c.txt"), Path("a/other"), Path("a")]) == "a/b/c.txt, a"
    assert subject.trained_on(None) == ""


def test_weights_without_a_tokenizer(models: Path) -> None:
    for path in (models / "llama").glob("*token*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"expected a tokenizer beside the weights, .* Save one there"):
        load(models / "llama", any_model=True)


@pytest.mark.parametrize("content", ["data: [", "just words", "data: 3", "- a"])
def test_a_broken_run_file_is_said(models: Path, content: str) -> None:
    (models / "ours" / "run.yaml").write_text(content)
    with pytest.raises(ValueError, match=r"run\.yaml"):
        load(models / "ours")


def test_what_is_no_model_is_said_before_anything_is_loaded(models: Path) -> None:
    (models / "config.yaml").write_text("model: {}")
    for fine in (models / "ours", models / "llama", models / "config.yaml", Path("gpt2"), Path("owner/name")):
        expect_model(fine)
    (models / "half").mkdir()
    (models / "half" / "run.yaml").write_text("data: {}")
    with pytest.raises(ValueError, match="is not finished"):
        expect_model(models / "half")
    (models / "empty").mkdir()
    for wrong, said in (
        ("empty", r"has no config\.json"),
        ("none", "does not exist"),
        ("ours/config.json", "has no"),
    ):
        for check in (expect_model, load):
            with pytest.raises(ValueError, match=said):
                check(models / wrong)
    with pytest.raises(ValueError, match=r"there is no '.*none\.yaml'"):
        expect_model(models / "none.yaml")


def test_a_name_that_is_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline: neither a folder nor in the hub's cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match=r"There is no folder 'owner/no-such-model': give one, or a name on the hub"
    ):
        load(Path("owner/no-such-model"), any_model=True)


def test_a_model_in_memory_is_told_by_its_weights() -> None:
    one, same, other = (
        Subject(Path("in-memory"), model, BYTES, {}).identity()["weights_sha256"]
        for model in (drt(), drt(), drt(seed=1))
    )
    assert one == same != other


def test_names_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = map(Path, ("x/drt", "y/drt", "configs/window.yaml"))
    assert names_of([a, c]) == ["drt", "window"]
    assert names_of([a, b, c]) == ["x/drt", "y/drt", "window"]
    assert names_of([Path("owner/model-1.7B")]) == ["model-1.7B"]
    assert names_of([a, a]) == ["drt", "drt"]
    for folder in (below := tmp_path / "below", below / "drt", tmp_path / "drt"):
        folder.mkdir()
    (tmp_path / "drt.yaml").touch()
    (tmp_path / "link").symlink_to(tmp_path / "drt")
    monkeypatch.chdir(below)
    assert names_of([Path("../drt"), Path("drt")]) == [f"{tmp_path.name}/drt", "below/drt"]
    assert names_of([Path("../drt"), Path("../drt.yaml")]) == ["../drt", "../drt.yaml"]
    assert names_of([Path("../drt"), Path("../link")]) == ["drt", "drt"]  # the same model
