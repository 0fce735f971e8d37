"""The commands with the models that DRT is compared with: tables, target scores, training, reading, generation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.tiny import MODELS, SHARED, prose, run_config
from trailmark import cli
from trailmark.files import read_json
from trailmark.training.config import RunConfig

Command = Callable[..., tuple[int, str, str]]
L, S = 80, 8
RPT = SHARED | {"architecture": "rpt", "chunk_size": S, "num_retrieved_chunks": 2, "num_encoder_layers": 1}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "book.txt").write_text(prose(200))
    cli.main(["prepare", str(folder / "book.txt"), "--output", str(folder / "shards"), "--processes", "1"])
    return folder / "shards"


def config_file(folder: Path, model: dict[str, Any], corpus: Path) -> Path:
    config: RunConfig = run_config(folder / "run", steps=2, logging_steps=1)
    config.model = model
    config.data.paths, config.data.early_landmarks = [str(corpus)], 0.2
    (folder / "config.yaml").write_text(config.to_yaml())
    return folder / "config.yaml"


def told(out: str) -> list[str]:
    """The settings that a table's command says to train with."""
    (line,) = [line for line in out.splitlines() if line.startswith("Next: trailmark train CONFIG ")]
    return line.split()[4:]


def used(folder: Path, command: Command, corpus: Path) -> None:
    """What was trained there is evaluated, reads a book and goes on from what it read."""
    run, book, memory = folder / "run", corpus.parent / "book.txt", folder / "memory"
    code, out, _ = command("evaluate", run, "--text", book, "--lengths", "80,320")
    assert code == 0
    assert "Numbers: " in out
    found = read_json(run / "evaluation" / "perplexity.json")["results"]
    assert [entry["length"] for entry in found] == [80, 320]
    code, out, _ = command("read", run, book, "--memory", memory)
    assert code == 0
    assert f"The memory of {len(book.read_bytes()):,} tokens lies in {memory}/" in out
    asked = ("generate", run, "--memory", memory, "--prompt", "the old ", "--max-new-tokens", "4")
    (code, out, _), again = command(*asked), command(*asked)
    assert code == 0
    assert out == again[1]


TABLES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "rpt": (RPT, []),
    "drt": (
        MODELS["drt"] | {"encoder_weights": "encoder"},
        ["--architecture", "drt", "--scores", "float32", "--window", str(SHARED["sliding_window"])],
    ),
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.sampled(2)
def test_a_table_trains_a_model_that_then_finds_by_itself(
    name: str, corpus: Path, tmp_path: Path, command: Command
) -> None:
    model, options = TABLES[name]
    table = tmp_path / "table"
    sizes = ["--context-length", L, "--chunk-size", S, "--count", 2]
    code, out, _ = command("neighbours", corpus, table, "--embedder", "hash:32", *sizes, *options)
    assert code == 0
    settings = told(out)
    assert command("verify", table)[0] == 0
    assert command("train", config_file(tmp_path, model, corpus), *settings)[0] == 0
    assert read_json(tmp_path / "run" / "config.json")["embedder"] == "hash:32"
    used(tmp_path, command, corpus)
    code, _, err = command("evaluate", tmp_path / "run", "--set", "embedder=hash:33")
    assert code == 1
    assert (
        err.strip()
        .splitlines()[-1]
        .startswith("trailmark: model.embedder: expected the one that the model was")
    )
    # who reads with another one finds other chunks: a memory says whose it is
    config = tmp_path / "run" / "config.json"
    config.write_text(config.read_text().replace("hash:32", "hash:33"))
    assert (
        command("read", tmp_path / "run", corpus.parent / "book.txt", "--memory", tmp_path / "other")[0] == 1
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_a_dry_run_with_a_table(name: str, corpus: Path, tmp_path: Path, command: Command) -> None:
    model, options = TABLES[name]
    sizes = ["--context-length", L, "--chunk-size", S, "--count", 2]
    _, out, _ = command("neighbours", corpus, tmp_path / "table", "--embedder", "hash:32", *sizes, *options)
    code, out, _ = command("train", config_file(tmp_path, model, corpus), *told(out), "--dry-run")
    assert code == 0
    assert "parameters: " in out
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_target_scores_train_a_retriever(corpus: Path, tmp_path: Path, command: Command) -> None:
    """Scored by a model that was trained just before."""
    (tmp_path / "scorer").mkdir()
    config = config_file(tmp_path / "scorer", dict(MODELS["window"]), corpus)
    assert command("train", config)[0] == 0
    scorer, table = tmp_path / "scorer" / "run", tmp_path / "table"
    sizes = ["--context-length", L, "--chunk-size", S, "--count", 3, "--window", SHARED["sliding_window"]]
    code, out, _ = command("targets", corpus, table, "--model", scorer, *sizes)
    assert code == 0
    assert "tokens as they are" in out
    settings = told(out)
    assert command("targets", corpus, table, "--model", scorer, *sizes)[0] == 0  # there already
    assert command("verify", table)[0] == 0
    code, out, _ = command("train", config_file(tmp_path, RPT, corpus), *settings)
    assert code == 0
    assert "ranking " in out  # beside the loss
    assert read_json(tmp_path / "run" / "history.json")["steps"][-1]["ranking"] > 0
    used(tmp_path, command, corpus)
    code, _, err = command("targets", corpus, tmp_path / "none", "--model", tmp_path / "absent", *sizes)
    assert code == 1
    assert err.strip().splitlines()[-1].startswith("trailmark: model: expected a causal language model")


OTHERS: dict[str, dict[str, Any]] = {
    "block_recurrent": SHARED | {"architecture": "block_recurrent", "block_size": 10, "state_gate": "lstm"},
    "rpt, online": RPT | {"retriever": "encoder", "embedder": "hash:32"},
    "drt, random": MODELS["drt"] | {"retriever": "random"},
}


@pytest.mark.parametrize(
    "name",
    ["block_recurrent", *(pytest.param(n, marks=pytest.mark.slow) for n in ("rpt, online", "drt, random"))],
)
def test_without_a_table(name: str, corpus: Path, tmp_path: Path, command: Command) -> None:
    code, out, _ = command("train", config_file(tmp_path, OTHERS[name], corpus))
    assert code == 0
    assert ("trailmark neighbours makes a table once" in out) == ("online" in name)
    used(tmp_path, command, corpus)


NEEDLES: dict[str, dict[str, Any]] = {
    "block_recurrent": SHARED | {"architecture": "block_recurrent", "block_size": 16},
    "rpt": RPT | {"retriever": "encoder", "embedder": "hash:32", "chunk_size": 20},
}


@pytest.mark.parametrize("name", ["block_recurrent", pytest.param("rpt", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_needles(name: str, tmp_path: Path, command: Command) -> None:
    """The demo's task: questions that close their chunks early, evaluated on the way and afterwards."""
    config: RunConfig = run_config(tmp_path / "run", "needles", steps=2, tokens_per_step=1280)
    config.model, config.training.eval_steps = NEEDLES[name], 2 if name == "rpt" else None
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert command("train", tmp_path / "config.yaml")[0] == 0
    last = read_json(tmp_path / "run" / "history.json")["steps"][-1]
    assert ("eval_needles_4x" in last) == (name == "rpt")
    assert ("recall" in last) == (name == "rpt")
    asked = [
        "--suite",
        "needles",
        "--lengths",
        "1280",
        "--questions",
        "4",
        "--kind",
        "multi-key",
        "--needles",
        "2",
    ]
    assert command("evaluate", tmp_path / "run", *asked)[0] == 0
    found = read_json(tmp_path / "run" / "evaluation" / "needles.json")["results"][0]
    assert found["questions"] == 4
    assert (found["recall"] is None) == (name == "block_recurrent")
