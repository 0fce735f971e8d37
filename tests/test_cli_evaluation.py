"""The commands that measure and report: what they write where, what they do again and what not, and mistakes."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import trailmark
from tests.disks import largest_file
from tests.interrupted import interrupted
from tests.training.tiny import prose, run_config, write_run
from trailmark import cli
from trailmark.data.corpus import load_tokenizer
from trailmark.files import read_json

Command = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[1]


pytestmark = pytest.mark.usefixtures("no_restart")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, a needle model in run/ and a model with a window alone in window/."""
    folder = tmp_path_factory.mktemp("trained")
    for name, model in (("run", "drt"), ("window", "window")):
        config = write_run(folder, "needles", model, steps=2, tokens_per_step=1280)
        cli.main(["train", str(config), f"output={folder / name}"])
    return folder


def found(folder: Path, suite: str) -> list[dict[str, Any]]:
    return read_json(folder / f"{suite}.json")["results"]


# --- evaluate ----------------------------------------------------------------------------------------------


def test_a_second_start_measures_what_is_missing(trained: Path, tmp_path: Path, command: Command) -> None:
    ask = ("evaluate", trained / "run", "--text", trained / "text.txt", "--questions", "3", "-o", tmp_path)
    code, first_out, _ = command(*ask, "--lengths", "320")
    assert code == 0
    folder = tmp_path / "run"
    assert f"Numbers: {folder}/needles.json, {folder}/perplexity.json" in first_out
    before = {suite: found(folder, suite) for suite in ("needles", "perplexity")}
    code, out, _ = command(*ask, "--lengths", "320,400", "--dtype", "float32", "--device", "cpu")
    assert code == 0
    for suite, results in before.items():
        after = found(folder, suite)
        assert after[:1] == results  # seconds and all
        assert [result["length"] for result in after] == [320, 400]
        assert after[0]["command"] == shlex.join(["trailmark", *map(str, ask), "--lengths", "320"])
        assert after[1]["command"].endswith("--lengths 320,400 --dtype float32 --device cpu")
    assert out.count("| 320 ") == 2
    lines = (folder / "needles.generations.jsonl").read_text().splitlines()
    assert len(lines) == sum(result["questions"] for result in found(folder, "needles"))
    answered = [json.loads(line)["correct"] for line in lines]
    assert sum(answered) == sum(result["correct"] for result in found(folder, "needles"))


def test_several_models_and_one_comparison(trained: Path, tmp_path: Path, command: Command) -> None:
    models = (trained / "run", trained / "window")
    options = ("--suite", "needles", "--suite", "cost", "--lengths", "400", "--questions", "2")
    options += ("--depths", "0,1", "--tiers", "device", "--generate", "4", "--rounds", "2")
    code, out, _ = command("evaluate", *models, *options, "--text", trained / "text.txt", "-o", tmp_path)
    assert code == 0
    for name in ("run", "window"):
        assert [result["depth"] for result in found(tmp_path / name, "needles")] == [0, 1]
    (cell,) = found(tmp_path, "cost")
    assert [(row["model"], row["prompt"]) for row in cell["rows"]] == [("run", 400), ("window", 400)]
    assert cell["base"] == "window"
    assert out.count("cost of run, window") == 1
    assert " 1× |" in out
    # the report holds all of it
    code, out, _ = command("report", tmp_path, "-o", tmp_path / "page.html")
    assert code == 0
    assert f"Report: {tmp_path}/page.html" in out
    page = (tmp_path / "page.html").read_text()
    assert "<title>" in page


def test_sizes_alone_have_a_cost(tmp_path: Path, command: Command) -> None:
    config = run_config(tmp_path / "run")
    (tmp_path / "tiny.yaml").write_text(config.to_yaml())
    options = ("--suite", "cost", "--lengths", "40", "--tiers", "host", "--generate", "2", "--rounds", "1")
    code, _, _ = command("evaluate", tmp_path / "tiny.yaml", *options, "-o", tmp_path / "found")
    assert code == 0
    assert found(tmp_path / "found", "cost")[0]["rows"][0]["formula_bytes"] > 0


def test_each_model_is_asked_what_it_was_trained_for(trained: Path, tmp_path: Path, command: Command) -> None:
    """An option is one of the suites of any of the models; a suite that is named twice is measured once."""
    shutil.copytree(trained / "window", tmp_path / "text", ignore=shutil.ignore_patterns("checkpoints"))
    run = tmp_path / "text" / "run.yaml"
    run.write_text(run.read_text().replace("task: needles", "task: text"))
    options = (
        "--questions",
        "2",
        "--lengths",
        "320",
        "--text",
        trained / "text.txt",
        "-o",
        tmp_path / "found",
    )
    code, out, _ = command("evaluate", trained / "run", tmp_path / "text", *options)
    assert code == 0
    assert {path.parent.name for path in tmp_path.rglob("needles.json")} == {"run"}
    assert len(found(tmp_path / "found" / "text", "perplexity")) == 1
    twice = ("--suite", "perplexity") * 2
    code, out, _ = command("evaluate", trained / "run", trained / "run", *twice, *options[2:])
    assert (code, out.count("perplexity of run")) == (0, 1)


def test_a_checkpoint_is_a_model(
    trained: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its run's tokenizer and task, also while the run goes on; results lie in the run, not among its files."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained / "run" / "checkpoints", tmp_path / "mine" / "checkpoints")
    shutil.copy(trained / "run" / "run.yaml", tmp_path / "mine")
    checkpoint = next((tmp_path / "mine" / "checkpoints").iterdir())
    options = ("--questions", "2", "--lengths", "320", "--max-tokens", "320", "--text", trained / "text.txt")
    code, _, err = command("evaluate", "mine", *options)
    assert code == 1
    assert "is not finished" in err
    assert f"its newest checkpoint is a model: mine/checkpoints/{checkpoint.name}." in err
    assert command("evaluate", checkpoint, *options)[0] == 0
    folder = Path("mine") / "evaluation" / checkpoint.name
    assert len(found(folder, "needles")) == len(found(folder, "perplexity")) == 1
    code, out, _ = command("verify", "mine")
    assert (code, "whole" in out) == (0, True)


def test_nothing_is_written_into_the_package(
    trained: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    package = Path(trailmark.__file__).parent
    before = {path: path.stat().st_mtime_ns for path in (package / "demo_model").rglob("*")}
    options = (
        "--suite",
        "perplexity",
        "--lengths",
        "320",
        "--max-tokens",
        "320",
        "--text",
        trained / "text.txt",
    )
    assert command("evaluate", "demo", *options)[0] == 0
    assert len(found(Path("runs") / "evaluation" / "demo", "perplexity")) == 1
    assert {path: path.stat().st_mtime_ns for path in (package / "demo_model").rglob("*")} == before


def test_the_card_shows_what_was_measured(trained: Path, tmp_path: Path, command: Command) -> None:
    for name in ("run", "window"):
        shutil.copytree(trained / name, tmp_path / name)
    options = ("--suite", "cost", "--lengths", "40", "--tiers", "device", "--generate", "2", "--rounds", "1")
    assert command("evaluate", tmp_path / "run", tmp_path / "window", *options)[0] == 0
    card = (tmp_path / "run" / "README.md").read_text()
    assert "### Cost" in card
    assert all(f"| {name} | 40 | device | " in card for name in ("run", "window"))
    assert str(tmp_path) not in card
    environments = read_json(tmp_path / "run" / "evaluation" / "cost.json")["environments"]
    assert environments[0]["device"] == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_model_of_transformers(tmp_path: Path, command: Command) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=259, max_position_embeddings=512, **sizes)).save_pretrained(
        tmp_path / "llama"
    )
    load_tokenizer("bytes").save_pretrained(tmp_path / "llama")
    (tmp_path / "text.txt").write_text(prose())
    options = ("--suite", "needles", "--suite", "perplexity", "--lengths", "300", "--questions", "2")
    code, out, _ = command("evaluate", tmp_path / "llama", *options, "--text", tmp_path / "text.txt")
    assert code == 0
    assert "needles of llama" in out
    (result,) = found(tmp_path / "llama" / "evaluation", "needles")
    assert (result["format"], result["recall"]) == ("sentences", None)
    assert "expected one of trailmark's" in command("generate", tmp_path / "llama", "--prompt", "a")[2]


def test_default_lengths_are_those_that_the_text_holds(
    trained: Path, tmp_path: Path, command: Command
) -> None:
    text = tmp_path / "other.txt"
    for characters, lengths in ((3000, [640, 2560]), (500, [500])):
        text.write_text((prose() * 3)[:characters])
        options = ("--suite", "perplexity", "--text", text, "-o", tmp_path / str(characters))
        code, out, _ = command("evaluate", trained / "run", *options)
        assert code == 0
        assert [r["length"] for r in found(tmp_path / str(characters) / "run", "perplexity")] == lengths
        assert "Mind:" not in out


@pytest.mark.parametrize("path", ["text.txt", "."])
def test_asking_about_the_training_text_is_said(
    path: str, trained: Path, tmp_path: Path, command: Command
) -> None:
    arguments = ("--text", trained / path, "--suite", "perplexity", "--lengths", "80", "-o", tmp_path)
    if path == ".":
        arguments = (*arguments[:1], trained / "books", *arguments[2:])
        (trained / "books").mkdir(exist_ok=True)
        shutil.copy(trained / "text.txt", trained / "books")
    _, out, _ = command("evaluate", trained / "run", *arguments)
    assert ("Mind: the model was trained on " in out) == (path == "text.txt")


# --- mistakes ----------------------------------------------------------------------------------------------

OPTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "suite": (("--suite", "neddles"), "suite: expected 'needles', 'perplexity', 'retrieval', 'summarization', 'cost'"),
    "lengths": (("--lengths", "1k"), "lengths: expected numbers as 1024,16384, got '1k'"),
    "depths": (("--depths", "half"), "depths: expected numbers as 0,0.5,1, got 'half'"),
    "a depth": (("--suite", "needles", "--depths", "1.5"), "depths: expected 0 to 1, got 1.5"),
    "no lengths": (("--lengths", "0"), "lengths: expected 1 or more, got 0"),
    "short": (("--lengths", "1"), "lengths: expected 2 or more, got 1"),
    "a short haystack": (("--suite", "needles", "--lengths", "40"), "length: expected at least"),
    "tokens": (("--max-tokens", "1"), "--max-tokens': Input should be greater than or equal to 2"),
    "questions": (("--questions", "0"), "--questions': Input should be greater than or equal to 1"),
    "a word": (("--questions", "some"), "--questions': Input should be a valid integer"),
    "needles": (("--kind", "multi-key", "--needles", "99999", "--suite", "needles"), "length: expected at least"),
    "of another suite": (
        ("--suite", "perplexity", "--depths", "0"),
        "depths: expected an option of perplexity, got one of another suite. Leave it out, or add --suite needles.",
    ),
    "no pairs": (("--suite", "summarization"), "pairs: expected files of documents and summaries, got none"),
    "device": (("--device", "abacus"), "device: expected one to compute on, cpu or cuda, got 'abacus'"),
    "meta": (("--device", "meta"), "device: expected one to compute on, cpu or cuda, got 'meta'"),
    "dtype": (("--dtype", "int8"), "dtype: expected one of 'float32', 'bfloat16', 'float16', got 'int8'"),
    "protocol": (("--suite", "perplexity", "--protocol", "table-9"), "protocol: expected"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), OPTIONS.values(), ids=OPTIONS)
def test_an_option_that_cannot_be(
    arguments: tuple[str, ...],
    message: str,
    trained: Path,
    tmp_path: Path,
    refused: Callable[..., str],
) -> None:
    line = refused("evaluate", trained / "run", *arguments, "--text", trained / "text.txt", "-o", tmp_path)
    assert message in line
    assert not list(tmp_path.rglob("*.json"))


def test_random_weights_have_nothing_but_a_cost(
    trained: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    """Also where an embedder brings a tokenizer; said before another model is asked."""
    config = run_config(tmp_path / "run")
    config.model |= {"retriever": "encoder", "embedder": "hash:16"}
    (tmp_path / "tiny.yaml").write_text(config.to_yaml())
    for suites in (("--suite", "needles", "--suite", "cost"), ()):
        line = refused("evaluate", trained / "run", tmp_path / "tiny.yaml", *suites, "-o", tmp_path / "found")
        assert "has random weights" in line
    assert not (tmp_path / "found").exists()


def test_folders_that_are_none(
    trained: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What looks like a name on the hub is not asked for there where its owner is a folder here."""
    monkeypatch.chdir(trained.parent)
    name = trained.name
    assert f"there is no 'nosuch' in '{name}'. If a name on the hub" in refused("evaluate", f"{name}/nosuch")
    assert f"Models lie in {name}/run, {name}/window." in refused("evaluate", name)
    line = refused("evaluate", f"{name}/none.yaml", "--suite", "cost")
    assert "expected a YAML file with a model's sizes, there is no" in line


def test_what_was_found_stays_if_a_later_suite_fails(
    trained: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    options = ("--suite", "needles", "--suite", "perplexity", "--lengths", "400,1600", "--questions", "1")
    (tmp_path / "short.txt").write_text(prose()[:600])
    line = refused("evaluate", trained / "run", "--text", tmp_path / "short.txt", *options, "-o", tmp_path)
    assert "length: expected at most the text's 600 tokens" in line
    assert [result["length"] for result in found(tmp_path / "run", "needles")] == [400, 1600]


def test_a_full_disk_keeps_what_was_found(trained: Path, tmp_path: Path, command: Command) -> None:
    ask = (
        "evaluate",
        trained / "run",
        "--text",
        trained / "text.txt",
        "--suite",
        "perplexity",
        "-o",
        tmp_path,
    )
    assert command(*ask, "--lengths", "80")[0] == 0
    before = (tmp_path / "run" / "perplexity.json").read_bytes()
    with largest_file(300):
        code, _, err = command(*ask, "--lengths", "80,160")
    assert code == 1
    assert "Free some space" in err
    assert (tmp_path / "run" / "perplexity.json").read_bytes() == before
    assert command(*ask, "--lengths", "80,160")[0] == 0
    assert [result["length"] for result in found(tmp_path / "run", "perplexity")] == [80, 160]


def test_results_of_another_program_are_not_touched(
    trained: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    path = tmp_path / "run" / "perplexity.json"
    path.parent.mkdir()
    path.write_text('{"old": 1}')
    options = ("--suite", "perplexity", "--text", trained / "text.txt", "--lengths", "80", "-o", tmp_path)
    assert str(path) in refused("evaluate", trained / "run", *options)
    assert path.read_text() == '{"old": 1}'


@pytest.mark.slow
def test_ctrl_c_and_on(trained: Path, tmp_path: Path, command: Command) -> None:
    """Stopped between two results, the same command goes on, and the first one is not measured again."""
    arguments = ["evaluate", trained / "run", "--text", trained / "text.txt", "--suite", "needles"]
    arguments += ["--lengths", "400,320000", "--questions", "2", "-o", tmp_path]
    code, err = interrupted(arguments, (tmp_path / "run" / "needles.json").exists)
    assert code == 130
    assert err.strip().endswith("The same command goes on from here.")
    (first,) = found(tmp_path / "run", "needles")
    assert command(*arguments)[0] == 0
    assert found(tmp_path / "run", "needles")[0] == first
    assert [result["length"] for result in found(tmp_path / "run", "needles")] == [400, 320000]


# --- report ------------------------------------------------------------------------------------------------


def test_a_report_of_nothing(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "empty").mkdir()
    line = refused("report", tmp_path / "empty", "-o", tmp_path / "page.html")
    assert line.startswith("trailmark: ")
    assert not (tmp_path / "page.html").exists()
    assert "nowhere" in refused("report", tmp_path / "nowhere", "-o", tmp_path / "page.html")
