"""The commands around training: prepare, train --dry-run, evaluation on the way, init_from, verify."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.disks import flip
from tests.training.tiny import prose, write_run
from trailmark.files import read_json

ROOT = Path(__file__).parents[1]
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(3):
        (folder / f"{number}.txt").write_text(prose(80 * (number + 1)))
    return folder


def last_line(err: str) -> str:
    return err.strip().splitlines()[-1]


def test_documents_are_counted_truly(tmp_path: Path, command: Command) -> None:
    """Rows that are no documents are said: nothing is left out silently."""
    (tmp_path / "one.txt").write_text("a text")
    rows = [
        {"text": "a", "kind": "x"},
        {"text": " ", "kind": "x"},
        {"text": "b", "kind": "x"},
        {"text": "c", "kind": "y"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, out, _ = command("prepare", tmp_path / "one.txt", "--output", tmp_path / "one", "--processes", 1)
    assert "7 tokens of 1 document lie in" in out
    assert "left out" not in out
    words = (
        "prepare",
        tmp_path / "rows.jsonl",
        "--output",
        tmp_path / "rows",
        "--processes",
        1,
        "--where",
        "kind=x",
    )
    for _ in range(2):  # anew, and found finished
        _, out, err = command(*words)
        assert "4 tokens of 2 documents lie in" in out
        assert "2 rows without text, or that --where leaves out, are not in it." in out
        assert "2 documents  4 tokens" in err


def test_prepare_train_verify(texts: Path, tmp_path: Path, command: Command) -> None:
    shards, config = tmp_path / "shards", write_run(tmp_path, steps=4, logging_steps=1)
    code, out, _ = command("prepare", texts, "--output", shards, "--processes", "1")
    assert code == 0
    corpus = read_json(shards / "corpus.json")
    assert f"{corpus['tokens']:,} tokens of 3 documents lie in {shards}/" in out
    assert corpus["tokens"] == sum(
        len(path.read_bytes()) + 1 for path in texts.iterdir()
    )  # and ends of texts
    assert command("prepare", texts, "--output", shards)[0] == 0  # there already

    overrides = [f"data.paths={shards}", f"data.validation={texts}", "training.eval_steps=2"]
    assert command("train", config, *overrides)[0] == 0
    history = read_json(tmp_path / "run" / "history.json")["steps"]
    assert [entry["step"] for entry in history] == [1, 2, 3, 4]
    assert "eval_loss" not in history[0]
    assert "eval_loss" not in history[2]  # what was measured before is not told again
    assert history[3]["eval_loss"] < history[1]["eval_loss"]
    assert history[0]["retrieval_age"] >= 1
    assert 0 <= history[0]["retrieval_never_read"] < 1
    assert history[0]["retrieval_popular"] <= 1

    for folder in (shards, tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-00000004"):
        code, out, _ = command("verify", folder)
        assert (code, "whole, every byte is as it was written." in out) == (0, True)
    weights = tmp_path / "run" / "checkpoints" / "step-00000004" / "model.safetensors"
    flip(weights, -1)
    code, _, err = command("verify", tmp_path / "run")
    assert code == 1
    assert last_line(err).startswith("trailmark: checkpoints: damaged: step-00000004: model.safetensors: ")
    flip(weights, -1)
    assert command("verify", tmp_path / "run")[0] == 0
    for name in ("model.safetensors", "config.json", "tokenizer_config.json", "model.json"):
        flip(tmp_path / "run" / name, -9)
        code, _, err = command("verify", tmp_path / "run")
        assert code == 1
        assert f"damaged: the final model: {name}: " in last_line(err)
        flip(tmp_path / "run" / name, -9)
    (tmp_path / "run" / "model-00002.safetensors").write_bytes(b"")
    assert "model-00002.safetensors: is not in model.json" in command("verify", tmp_path / "run")[2]
    (tmp_path / "run" / "model-00002.safetensors").unlink()
    (tmp_path / "run" / "model.json").unlink()
    assert "the final model: model.json: is missing" in command("verify", tmp_path / "run")[2]
    history = json.loads((tmp_path / "run" / "history.json").read_text())
    del history["model_manifest"]  # as an older trailmark left it
    (tmp_path / "run" / "history.json").write_text(json.dumps(history))
    code, out, err = command("verify", tmp_path / "run")
    assert code == 0
    assert "final model: not compared, there is no model.json." in out + err


def test_verify_of_a_folder_with_nothing_of_ours(texts: Path, command: Command) -> None:
    code, _, err = command("verify", texts)
    assert code == 1
    assert "none of these" in last_line(err)


def test_a_dry_run_writes_nothing(texts: Path, tmp_path: Path, command: Command) -> None:
    config = write_run(tmp_path)
    code, out, _ = command("train", config, f"data.paths={texts}", "--dry-run")
    assert code == 0
    for word in ("parameters: ", "FLOPs per token: ", "memory: ", "A step took "):
        assert word in out
    assert not (tmp_path / "run").exists()


def test_shards_of_another_tokenizer(texts: Path, tmp_path: Path, command: Command) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>").save_pretrained(tmp_path / "words")
    assert command("prepare", texts, "--output", tmp_path / "shards")[0] == 0
    config = write_run(tmp_path)
    code, _, err = command(
        "train", config, f"data.paths={tmp_path / 'shards'}", f"data.tokenizer={tmp_path / 'words'}"
    )
    assert code == 1
    own = read_json(tmp_path / "shards" / "corpus.json")["tokenizer"]["fingerprint"]
    assert own in last_line(err)
    assert last_line(err).count("fingerprint") == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_beginning_with_the_weights_of_another_run(texts: Path, tmp_path: Path, command: Command) -> None:
    config = write_run(tmp_path, steps=3)
    assert command("train", config, f"data.paths={texts}")[0] == 0
    first = load_file(tmp_path / "run" / "model.safetensors")
    # without steps that change anything, the weights are those
    fine = [f"output={tmp_path / 'fine'}", f"init_from={tmp_path / 'run'}", f"data.paths={texts}"]
    still = ["training.steps=1", "training.learning_rate=0", "training.matrix_learning_rate=0"]
    assert command("train", config, *fine, *still)[0] == 0
    after = load_file(tmp_path / "fine" / "model.safetensors")
    assert first.keys() == after.keys()
    assert all(torch.equal(first[name], after[name]) for name in first)
    assert read_json(tmp_path / "fine" / "history.json")["steps"][-1]["step"] == 1

    for changes, message in (
        (["model.hidden_size=32"], "mismatched ones"),
        (["model.retrieval_projections=false"], "unexpected ones"),
        ([f"init_from={texts}"], "has no config.json"),
    ):
        code, _, err = command("train", config, *fine, f"output={tmp_path / 'other'}", *changes)
        assert code == 1
        assert last_line(err).startswith("trailmark: init_from: ")
        assert message in last_line(err)
        assert not (tmp_path / "other").exists()


def test_training_on_needles_in_a_haystack(texts: Path, tmp_path: Path, command: Command) -> None:
    config = write_run(tmp_path, steps=2, context_length=160, tokens_per_step=320)
    needles = ["data.task=niah", "data.hops=2", "data.num_landmarks=2"]
    lengths = ["training.context_length=400", "training.tokens_per_step=800", "training.logging_steps=1"]
    assert command("train", config, f"data.paths={texts}", *needles, *lengths)[0] == 0
    history = read_json(tmp_path / "run" / "history.json")["steps"]
    assert 0 <= history[-1]["accuracy"] <= 1


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (("--pairs", "--tokenizer", "gpt2"), "tokenizer"),
        (("--pairs", "--processes", "3"), "processes"),
        (("--pairs", "--no-end-of-text"), "end_of_text"),
        (("--summary-column", "summary"), "summary_column"),
    ],
)
def test_options_that_would_be_passed_over_are_refused(
    options: tuple[str, ...], name: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a", "summary": "b"}')
    said = refused("prepare", tmp_path / "rows.jsonl", "--output", tmp_path / "out", *options)
    assert f"{name}: expected none with" in said
    assert not (tmp_path / "out").exists()


def test_training_on_pairs(tmp_path: Path, command: Command) -> None:
    rows = "".join(f'{{"document": "{prose(30 + n).strip()}", "summary": "a boat {n}"}}\n' for n in range(6))
    (tmp_path / "pairs.jsonl").write_text(rows)
    config = write_run(tmp_path, steps=2)
    task = ["data.task=summarization", f"data.paths={tmp_path / 'pairs.jsonl'}"]
    assert command("train", config, *task)[0] == 0
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.slow
def test_train_on_a_folder(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "held-out.txt").write_text(prose(1000))
    big = tmp_path / "text"
    big.mkdir()
    (big / "a.txt").write_text(prose(1200))
    arguments = ["train_on_a_folder.py", big, tmp_path / "held-out.txt", tmp_path / "run", "--steps", "1"]
    monkeypatch.setattr(sys, "argv", list(map(str, arguments)))
    runpy.run_path(str(ROOT / "examples" / "train_on_a_folder.py"), run_name="__main__")
    assert "perplexity on " in capsys.readouterr().out
