"""Training with neighbours from outside: tables of an embedder, target scores, embedders that are asked online."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.killed import begin, watched
from tests.training.test_processes import EXACT, assert_same_history
from tests.training.tiny import MODELS as TINY
from tests.training.tiny import SHARED, prose, run_config
from trailmark.data.corpus import load_tokenizer
from trailmark.data.neighbours.embedders import open_embedder
from trailmark.data.neighbours.table import NeighbourTable, build_neighbours
from trailmark.data.prepare import prepare
from trailmark.data.recipes import parse_source
from trailmark.data.shards import Corpus
from trailmark.evaluation.subject import load
from trailmark.evaluation.targets import make_targets
from trailmark.files import read_json
from trailmark.models import SlidingWindowConfig, SlidingWindowForCausalLM
from trailmark.training.config import RunConfig, load_run_config
from trailmark.training.loss import weighted_loss
from trailmark.training.neighbours import rule_for
from trailmark.training.run import Run

L, S, K = 80, 8, 2  # ten chunks a window
W = SHARED["sliding_window"]
BYTES = load_tokenizer()
RPT: dict[str, Any] = SHARED | {
    "architecture": "rpt",
    "num_lower_layers": 1,
    "num_encoder_layers": 1,
    "chunk_size": S,
    "num_retrieved_chunks": K,
}
DRT: dict[str, Any] = TINY["drt"] | {"chunk_size": S}
MODELS: dict[str, dict[str, Any]] = {
    "rpt": RPT | {"retriever": "encoder"},
    "rpt, learned": RPT | {"retriever": "learned", "gold_probability": 0.3},
    "rpt, all parts": RPT | dict.fromkeys(("continuation", "neighbour_augmentation", "neighbour_gate"), True),
    "drt": DRT | {"retriever": "encoder"},
    "drt, weights": DRT | {"retriever": "encoder", "encoder_weights": "encoder"},
    "drt, random": DRT | {"retriever": "random"},
    "block_recurrent": SHARED | {"architecture": "block_recurrent", "block_size": 10},
    "block_recurrent, lstm": SHARED
    | {"architecture": "block_recurrent", "block_size": 10, "state_gate": "lstm", "truncation_blocks": 2},
}
TABLES = {
    "rpt": "rpt",
    "rpt, learned": "targets",
    "rpt, all parts": "targets",
    "drt": "drt",
    "drt, weights": "drt, scores",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared corpus, tables of it, text to validate on, and a model that scores."""
    folder = tmp_path_factory.mktemp("neighbours")
    for number in range(3):
        (folder / "texts" / f"{number}.txt").parent.mkdir(exist_ok=True)
        (folder / "texts" / f"{number}.txt").write_text(prose(90 + 60 * number))
    corpus = prepare(parse_source([str(folder / "texts")]), folder / "corpus", processes=1)
    embedder = open_embedder("hash:64", BYTES)
    for name, architecture, window, scores in (
        ("rpt", "rpt", W, None),
        ("drt", "drt", None, None),
        ("drt, scores", "drt", None, "float32"),
    ):
        rule = rule_for(architecture, S, window)
        build_neighbours(corpus, embedder, L, S, K, folder / name, rule=rule, scores=scores)
    torch.manual_seed(0)
    sizes = {name: value for name, value in TINY["window"].items() if name != "architecture"}
    scorer = SlidingWindowForCausalLM(SlidingWindowConfig(**sizes))
    scorer.save_pretrained(folder / "scorer")
    BYTES.save_pretrained(folder / "scorer")
    sizes = {"context_length": L, "chunk_size": S, "count": 4, "rule": rule_for("rpt", S, W)}
    make_targets([folder / "corpus"], folder / "targets", str(folder / "scorer"), **sizes)
    return folder


def config_of(place: Path, output: Path, model: str = "rpt", **training: Any) -> RunConfig:
    config = run_config(output, **(EXACT | {"steps": 4} | training))  # of 4 texts
    config.model = dict(MODELS[model])
    config.data.paths, config.data.early_landmarks = [str(place / "corpus")], 0.0
    if model in TABLES:
        config.data.neighbours = str(place / TABLES[model])
    return config


def test_a_batch_holds_the_table_of_its_windows(place: Path, tmp_path: Path) -> None:
    run = Run(config_of(place, tmp_path))
    table, corpus = NeighbourTable.open(place / "rpt"), Corpus.open(place / "corpus")
    windows = {bytes(corpus.read(n * L, (n + 1) * L)): n for n in range(table.windows)}
    seen = []
    for step in range(3):
        batch = run.batch(step)
        for ids, neighbours in zip(batch["input_ids"], batch["neighbours"], strict=True):
            window = windows[bytes(ids.to(torch.int32).numpy())]
            assert torch.equal(neighbours, table.batch([window])[0][0])
            seen.append(window)
        assert "neighbour_scores" not in batch
        for first, count in ((0, 1), (1, 3)):  # as processes and micro-batches divide it
            part = run.task.batch(step, first, count)
            assert torch.equal(part["neighbours"], batch["neighbours"][first : first + count])
    assert len(set(seen)) == min(len(seen), table.windows)
    assert (run.batch(0)["neighbours"] >= 0).any()


def test_target_scores_come_along(place: Path, tmp_path: Path) -> None:
    batch = Run(config_of(place, tmp_path, "rpt, learned")).batch(0)
    assert batch["neighbours"].shape == batch["neighbour_scores"].shape == (4, 10, 4)
    assert torch.equal(batch["neighbours"] >= 0, batch["neighbour_scores"].isfinite())
    batch = Run(config_of(place, tmp_path, "drt, weights")).batch(0)
    assert batch["neighbour_scores"].shape == (4, 10, K)


def test_the_ranking_is_a_part_of_the_loss(place: Path, tmp_path: Path) -> None:
    run = Run(config_of(place, tmp_path, "rpt, learned"))
    model, batch = run.model.train(), run.batch(0)
    loss, out, _, *_ = weighted_loss(model, batch)
    assert out.ranking_loss.shape == (4,)
    assert (out.ranking_loss > 0).all()
    assert len(out.retrieval) == 1
    plain = model(batch["input_ids"], labels=batch["labels"], noise_seed=batch["noise_seed"],
                  neighbours=batch["neighbours"], neighbour_scores=batch["neighbour_scores"])  # fmt: skip
    torch.testing.assert_close(loss, plain.loss, rtol=1e-6, atol=0)  # loss weights are float32
    # of a micro-batch of two, half of the mean
    half = weighted_loss(model, batch, rows=8).ranking
    assert half is not None
    torch.testing.assert_close(half, out.ranking_loss.mean() / 2)
    without = {key: x for key, x in batch.items() if not key.startswith("neighbour")}
    assert weighted_loss(model, without).ranking is None


def test_the_ranking_trains_the_retriever_alone_with_the_rest(place: Path, tmp_path: Path) -> None:
    """Its weight grows with the run: none at the first step."""
    config = config_of(place, tmp_path, "rpt, learned")
    seen: list[tuple[float, float]] = []

    def note(run: Run) -> None:
        model: Any = run.model
        seen.append((model.ranking_progress, run.averages["ranking"]))

    run = Run(config, note)
    run.train()
    assert [progress for progress, _ in seen] == [0.0, 0.25, 0.5, 0.75]
    assert seen[0][1] == 0
    assert seen[-1][1] > 0
    history = read_json(tmp_path / "history.json")["steps"]
    assert [entry["ranking"] for entry in history] == [value for _, value in seen]
    assert all(entry["step_loss"] > 1 for entry in history)


@pytest.mark.parametrize("model", ["rpt, learned", "drt, weights"])
@pytest.mark.sampled(2)
def test_one_by_one_trains_as_all_at_once(model: str, place: Path, tmp_path: Path) -> None:
    runs = []
    for micro in (None, 1):
        run = Run(config_of(place, tmp_path / str(micro), model, micro_batch_size=micro))
        run.train()
        runs.append(run)
    names = {"step_loss", "grad_norm", "loss"} | ({"ranking"} if "learned" in model else set())
    assert_same_history(runs[0], runs[1], names)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("model", MODELS)
def test_two_processes_train_as_one(model: str, parallel: str, place: Path, tmp_path: Path) -> None:
    (one,) = begin(watched, config_of(place, tmp_path / "one", model)).results()
    config = config_of(place, tmp_path / "two", model, parallel=parallel)
    for each in begin(watched, config, processes=2).results():
        assert not each.without_gradient
        assert_same_history(each, one, {"step_loss", "grad_norm", "ranking"} & one.history[0].keys())


@pytest.mark.slow
def test_a_stopped_run_goes_on_exactly(place: Path, tmp_path: Path) -> None:
    def stop(run: Run) -> None:
        if run.step == 2:
            signal.raise_signal(signal.SIGINT)

    whole = Run(config_of(place, tmp_path / "whole", "rpt, learned"))
    whole.train()
    config = config_of(place, tmp_path / "run", "rpt, learned")
    with pytest.raises(KeyboardInterrupt):
        Run(config, stop).train()
    run = Run(config)
    run.train()
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(run.model.state_dict()[name], weight), name


def test_a_run_does_not_go_on_with_another_table(place: Path, tmp_path: Path) -> None:
    def stop(run: Run) -> None:
        signal.raise_signal(signal.SIGINT)

    folder = tmp_path / "table"
    folder.symlink_to(place / "rpt")
    config = config_of(place, tmp_path / "run")
    config.data.neighbours = str(folder)
    with pytest.raises(KeyboardInterrupt):
        Run(config, stop).train()
    folder.unlink()
    corpus, embedder = Corpus.open(place / "corpus"), open_embedder("hash:63", BYTES)
    build_neighbours(corpus, embedder, L, S, K, folder, rule=rule_for("rpt", S, W))
    with pytest.raises(
        ValueError, match=r"^data: expected the text and neighbours that the run in .* began with"
    ):
        Run(config).train()


# --- embedders -----------------------------------------------------------------------------------------------


def test_a_table_spares_the_embedder(place: Path, tmp_path: Path) -> None:
    """Its fingerprint is the table's; who opens the model asks it, and no other."""
    fingerprint = open_embedder("hash:64", BYTES).fingerprint
    run = Run(config_of(place, tmp_path, steps=1))
    run.train()
    assert run.model.embedder is None
    saved = read_json(tmp_path / "config.json")
    assert (saved["embedder"], saved["embedder_fingerprint"]) == ("hash:64", fingerprint)
    subject = load(tmp_path)
    assert subject.model.embedder is not None
    assert subject.model.embedder.fingerprint == fingerprint
    with torch.no_grad():  # online as from the table
        batch = run.batch(0)
        online = subject.model(batch["input_ids"], output_retrieval=True)
        table = subject.model(batch["input_ids"], neighbours=batch["neighbours"], output_retrieval=True)
    assert torch.equal(online.retrieval[0].indices, table.retrieval[0].indices)
    assert torch.equal(online.logits, table.logits)
    with pytest.raises(ValueError, match=r"^model\.embedder: expected the one .* 'hash:32' has "):
        load(tmp_path, ["embedder=hash:32"])
    load(tmp_path, ["embedder=hash:32", "embedder_fingerprint=null"])
    with pytest.raises(ValueError, match=r"^model\.embedder: .*nowhere"):
        load(tmp_path, ["embedder=transformers:/nowhere/at/all"])


@pytest.mark.parametrize("model", ["rpt", "drt"])
@pytest.mark.sampled(2)
def test_validation_asks_the_embedder(model: str, place: Path, tmp_path: Path) -> None:
    config = config_of(place, tmp_path, model, steps=2, eval_steps=2, eval_windows=3)
    config.data.validation = [str(place / "texts" / "1.txt")]
    run = Run(config)
    run.train()
    assert run.model.embedder is not None
    assert run.history[-1]["eval_loss"] > 1


@pytest.mark.parametrize("model", ["rpt", "drt"])
@pytest.mark.sampled(2)
def test_without_a_table_the_embedder_is_asked_at_every_step(model: str, place: Path, tmp_path: Path) -> None:
    config = config_of(place, tmp_path, model, steps=2)
    config.data.neighbours, config.model["embedder"] = None, "hash:64"
    config.data.early_landmarks = 0.3
    told: list[str] = []
    run = Run(config, say=told.append)
    run.train()
    assert sum("trailmark neighbours" in line for line in told) == 1
    assert "neighbours" not in run.batch(0)
    fingerprint = open_embedder("hash:64", BYTES).fingerprint
    assert read_json(tmp_path / "config.json")["embedder_fingerprint"] == fingerprint


@pytest.mark.parametrize("spec", ["transformers:/nowhere/at/all", "bm25:nothing.json", "contriever"])
def test_an_embedder_that_is_not_there_is_named(spec: str, place: Path, tmp_path: Path) -> None:
    config = config_of(place, tmp_path / "run")
    config.data.neighbours, config.model["embedder"] = None, spec
    with pytest.raises(ValueError, match=rf"^model\.embedder: .*'[^']*{spec.partition(':')[2] or spec}'"):
        Run(config)


@pytest.mark.parametrize("model", ["drt, random", "block_recurrent"])
@pytest.mark.sampled(2)
def test_models_that_need_nothing_from_outside(model: str, place: Path, tmp_path: Path) -> None:
    config = config_of(place, tmp_path, model, steps=2)
    config.data.early_landmarks = 0.3
    run = Run(config)
    assert ("close_chunk" in run.batch(0)) == (model != "block_recurrent")
    run.train()
    assert run.history[-1]["step_loss"] > 1
    assert load(tmp_path).model.embedder is None


def test_what_is_retrieved_is_told(place: Path, tmp_path: Path) -> None:
    """Of an RPT too, though it excludes what the window shows: windows of a table have whole chunks."""
    run = Run(config_of(place, tmp_path, steps=2))
    run.train()
    assert 1 < run.history[-1]["retrieval_age"] < 10
    assert 0 <= run.history[-1]["retrieval_never_read"] <= 1


# --- mistakes --------------------------------------------------------------------------------------------------


def changed(place: Path, folder: Path, model: str, overrides: str) -> RunConfig:
    """As a command gives it: a file, and what is said beside it."""
    path = folder / "config.yaml"
    path.write_text(config_of(place, folder / "run", model).to_yaml())
    return load_run_config(path, overrides.split())


@pytest.mark.parametrize(
    ("model", "override", "message"),
    [
        ("rpt", "data.task=niah", r"data\.task: expected text with data\.neighbours, got niah"),
        ("rpt", "data.separate_documents=true", r"data\.separate_documents: expected false with data"),
        ("rpt", "data.early_landmarks=0.1", r"data\.early_landmarks: expected 0 with data\.neighbours"),
        ("rpt", "data.needle_share=0.1", r"data\.needle_share: expected 0 with data\.neighbours"),
        ("rpt", "data.neighbours=null", r"model\.embedder: expected an embedder .* got neither"),
        ("rpt, learned", "data.neighbours=null", r"data\.neighbours: expected a table of target scores"),
        ("drt", "model.retriever=causal", r"data\.neighbours: expected none for drt with .*'causal'"),
        ("drt, random", "data.neighbours=x", r"data\.neighbours: expected none for drt with .*'random'"),
        ("block_recurrent", "data.neighbours=x", r"data\.neighbours: expected none for block_recurrent,"),
        # others may be registered too
        ("drt, random", "data.neighbours=x", r".* 'encoder' \(drt or rpt.*\) or 'learned' \(rpt.*\)\.$"),
    ],
)
def test_a_mistake_in_the_configuration_is_named(
    model: str, override: str, message: str, place: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        changed(place, tmp_path, model, override)


LONGER = "training.context_length=160 training.tokens_per_step=320"


@pytest.mark.parametrize(
    ("model", "overrides", "message"),
    [
        ("rpt", "data.neighbours=nowhere", r".*'nowhere' has no neighbours\.json"),
        ("rpt", "data.paths=null", r"expected a table for corpus"),
        ("rpt", LONGER, r"expected a table for context_length 160, .* for 80"),
        ("rpt", "model.chunk_size=16", r"expected a table for chunk_size 16, .* for 8"),
        ("rpt", "model.num_retrieved_chunks=3", r"expected 3 neighbours .* has 2\. Make .* --count 3"),
        ("rpt", "model.sliding_window=20", r"expected a table for --architecture rpt --window 20 "),
        ("rpt", "model.embedder=hash:65", r"expected a table of the model's embedder 'hash:65'"),
        ("rpt", "model.embedder_fingerprint='0'", r"expected a table of the model's embedder"),
        ("rpt", "model.retriever=learned", r"expected target scores with model\.retriever 'learned'"),
        ("rpt, learned", "model.retriever=encoder", r"expected what an embedder found with"),
        ("drt", "model.encoder_weights=encoder", r"expected a table with scores for"),
        ("drt", "model.exclude_visible_chunks=true", r"expected a table for --architecture drt --window 9 "),
    ],
)
def test_a_table_of_something_else_is_refused(
    model: str, overrides: str, message: str, place: Path, tmp_path: Path
) -> None:
    config = changed(place, tmp_path, model, overrides)
    with pytest.raises(ValueError, match=r"^data\.neighbours: " + message) as caught:
        Run(config)
    assert re.search(r"\. (Make|Leave|Name)", str(caught.value))  # a way out
    assert not (tmp_path / "run" / "config.json").exists()


def test_an_embedder_of_another_name_is_the_same(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "table"
    corpus = Corpus.open(place / "corpus")
    build_neighbours(corpus, open_embedder("hash", BYTES), L, S, K, folder, rule=rule_for("rpt", S, W))
    config = config_of(place, tmp_path / "run")
    config.data.neighbours, config.model["embedder"] = str(folder), "hash"  # the table's is hash:1024
    config.model["embedder_fingerprint"] = open_embedder("hash:1024", BYTES).fingerprint
    assert Run(config).table is not None
    del config.model["embedder_fingerprint"]
    assert Run(config).table is not None
