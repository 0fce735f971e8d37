"""Neighbour tables: against plain loops, the models' own search and rules, after kills, and what is refused."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpora import contents, prose, save_bpe, write_folder
from tests.disks import flip, largest_file
from trailmark.data.batches import Windows
from trailmark.data.corpus import load_tokenizer, tokenize
from trailmark.data.neighbours.bm25 import fit_bm25
from trailmark.data.neighbours.embedders import open_embedder
from trailmark.data.neighbours.files import TableProgress, write_table
from trailmark.data.neighbours.table import NeighbourTable, Rule, build_neighbours
from trailmark.data.prepare import prepare
from trailmark.data.recipes import parse_source
from trailmark.data.shards import Corpus
from trailmark.files import locked, read_json
from trailmark.models import DRTConfig, DRTForCausalLM, RPTConfig, RPTForCausalLM
from trailmark.models.grid import lay_out
from trailmark.training.neighbours import rule_for

L, S, K = 330, 16, 4  # 20 chunks and 10 tokens in a window
BYTES = load_tokenizer()
TEXT = tokenize([prose(11, 900)], BYTES)
CORPUS = Corpus.of_tokens(TEXT)
WINDOWS = len(TEXT) // L
HASH = open_embedder("hash:256", BYTES)
RULE = rule_for("rpt", S, 48)


def build(output: Path, corpus: Corpus = CORPUS, **changes: Any) -> NeighbourTable:
    arguments: dict[str, Any] = {"context_length": L, "chunk_size": S, "num_neighbours": K, "rule": RULE}
    return build_neighbours(corpus, output=output, **{"embedder": HASH} | arguments | changes)


def table_contents(folder: Path) -> dict[str, Any]:
    return contents(folder, "neighbours.json")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed table with products."""
    folder = tmp_path_factory.mktemp("whole")
    build(folder, scores="float32")
    return folder


# --- which chunks may be neighbours ------------------------------------------------------------------------


@settings(max_examples=100)
@given(
    chunks=st.integers(0, 12), size=st.integers(1, 9), window=st.integers(1, 90), reader=st.integers(0, 20)
)
@pytest.mark.parametrize("landmarks", [False, True])
def test_a_rule_position_by_position(
    landmarks: bool, chunks: int, size: int, window: int, reader: int
) -> None:
    positions = [c for c in range(chunks) for _ in range(size + landmarks)]
    found = Rule(window, reader, landmarks).num_candidates(chunks, size)
    assert found.shape == (chunks,)
    for c in range(chunks):
        last = (len(positions) - 1 - positions[::-1].index(c)) + reader
        sees = range(last - window + 1, last + 1)
        allowed = [
            j for j in range(c) if not all(place in sees for place, own in enumerate(positions) if own == j)
        ]
        assert allowed == list(range(int(found[c])))


@settings(max_examples=60)
@given(chunks=st.integers(1, 12), size=st.integers(2, 9), window=st.integers(1, 90))
def test_the_models_rules(chunks: int, size: int, window: int) -> None:
    cpu = torch.device("cpu")
    # what DRTConfig.first_visible and RPTConfig.first_visible add to the closing position
    drt = lay_out(chunks * size, size).candidates(1 + size - (window - 1), cpu)
    assert rule_for("drt", size, window).num_candidates(chunks, size).tolist() == drt.tolist()
    rpt = lay_out(chunks * size, size, landmarks=False).candidates(size - window, cpu)
    assert rule_for("rpt", size, window).num_candidates(chunks, size).tolist() == rpt.tolist()
    every = lay_out(chunks * size, size).candidates(None, cpu)
    for architecture in ("drt", "rpt"):
        assert rule_for(architecture, size, None).num_candidates(chunks, size).tolist() == every.tolist()


SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_encoder_layers": 1,
    "chunk_size": S,
    "sliding_window": 48,
    "num_retrieved_chunks": K,
    "retriever": "encoder",
}


@pytest.mark.parametrize("exclude", [False, True])
@pytest.mark.parametrize("architecture", ["drt", "rpt"])
def test_a_table_holds_what_a_model_finds_itself(architecture: str, exclude: bool, tmp_path: Path) -> None:
    model: Any
    if architecture == "drt":
        model = DRTForCausalLM(DRTConfig(**SIZES, exclude_visible_chunks=exclude))
    else:
        model = RPTForCausalLM(RPTConfig(**SIZES, exclude_visible_chunks=exclude))
    model.eval().embedder = HASH
    table = build(tmp_path, rule=rule_for(architecture, S, 48 if exclude else None))
    ids = torch.from_numpy(TEXT[: 3 * L].reshape(3, L).astype(np.int64))
    with torch.no_grad():
        found = model(ids, output_retrieval=True)
    given, own = table.batch([0, 1, 2])[0], found.retrieval[0].indices
    assert torch.equal(given < 0, own < 0)
    vectors = (
        HASH(ids[:, : L // S * S].reshape(-1, S), torch.full((3 * (L // S),), S))[0]
        .double()
        .view(3, L // S, -1)
    )
    products = vectors @ vectors.transpose(1, 2)
    best, chosen = (
        products.gather(2, x.clamp(min=0)).masked_fill(x < 0, 0).sort(2).values for x in (given, own)
    )
    # unit vectors with at most S places that are not 0, in float32: other chunks only where that cannot tell them apart
    assert (best - chosen).abs().max() <= 2 * S * torch.finfo(torch.float32).eps
    assert (given == own).all(2).double().mean() > 0.9
    model.embedder = None
    with torch.no_grad():
        found = model(ids, neighbours=own)  # the same chunks: the same model
        given = model(ids, neighbours=given, output_retrieval=True)
    assert torch.equal(given.retrieval[0].indices, table.batch([0, 1, 2])[0])
    model.embedder = HASH
    with torch.no_grad():
        given = model(ids)
    assert (given.logits - found.logits).abs().max() <= 8 * torch.finfo(
        torch.float32
    ).eps * found.logits.abs().max()


# --- what a table holds ------------------------------------------------------------------------------------


def plain_table(embedder: Any, rule: Rule) -> tuple[list[Any], list[Any]]:
    """Chunk by chunk, each embedded alone; products in float64."""
    every, products = [], []
    for w in range(WINDOWS):
        chunks = torch.from_numpy(TEXT[w * L : w * L + L // S * S].astype(np.int64)).view(-1, 1, S)
        q, k = zip(*(embedder(chunk, torch.tensor([S])) for chunk in chunks), strict=True)
        own = (torch.cat(q).double() @ torch.cat(k).double().T).tolist()
        products.append(own)
        rows = []
        for c, limit in enumerate(rule.num_candidates(len(chunks), S).tolist()):
            best = sorted(sorted(range(limit), key=lambda j: (-own[c][j], j))[:K])
            rows.append(best + [-1] * (K - len(best)))
        every.append(rows)
    return every, products


@pytest.mark.parametrize("kind", ["hash", "bm25"])
@pytest.mark.parametrize("rule", [RULE, Rule()])
def test_a_table_is_what_a_loop_finds(kind: str, rule: Rule, tmp_path: Path) -> None:
    embedder = HASH
    if kind == "bm25":
        fit_bm25(CORPUS, S, BYTES, tmp_path / "bm25.json")
        embedder = open_embedder(f"bm25:{tmp_path / 'bm25.json'}", BYTES)
    table = build(tmp_path / "table", rule=rule, embedder=embedder, scores="float32")
    expected, products = plain_table(embedder, rule)
    found, scores = table.batch(range(WINDOWS))
    assert found.tolist() == expected
    assert (found.dtype, found.shape) == (torch.int64, (WINDOWS, L // S, K))
    assert scores is not None
    assert torch.equal(scores.isneginf(), found < 0)
    exact = torch.tensor(products, dtype=torch.float64).gather(2, found.clamp(min=0))
    # at most S parts for BM25 and each product of a bag; float32
    budget = (2 * S + 3) * torch.finfo(torch.float32).eps * exact.abs().max()
    assert ((scores - exact).abs()[found >= 0] <= budget).all()
    picked = [4, 0, WINDOWS - 1, 4]
    assert torch.equal(table.batch(picked)[0], found[picked])
    assert table.batch([])[0].shape == (0, L // S, K)
    assert len(found[found >= 0].unique()) > 8


def test_of_equal_chunks_the_earlier(tmp_path: Path) -> None:
    tokens = np.tile(TEXT[:S], 9)
    table = build(tmp_path, Corpus.of_tokens(tokens), context_length=9 * S, rule=Rule())
    expected = [[*range(min(c, K)), *[-1] * (K - c)] for c in range(9)]
    assert table.batch([0])[0][0].tolist() == expected


def test_half_precision_scores(whole: Path, tmp_path: Path) -> None:
    half, full = build(tmp_path, scores="float16"), NeighbourTable.open(whole)
    (a, b), (c, d) = half.batch([0, 2]), full.batch([0, 2])
    assert torch.equal(a, c)
    assert b is not None
    assert d is not None
    assert torch.equal(b, d.half().float())
    assert build(tmp_path / "none").batch([0])[1] is None


def test_windows_of_training_stand_on_the_tables_grid(whole: Path) -> None:
    table, windows = NeighbourTable.open(whole), Windows(CORPUS, L, 5, aligned=True)
    assert windows.per_epoch == table.windows == WINDOWS
    for epoch in range(3):
        samples = range(epoch * WINDOWS, (epoch + 1) * WINDOWS)
        numbers = [windows.window(sample) for sample in samples]
        assert sorted(numbers) == list(range(WINDOWS)), "not each once"
        batch = windows.batch(samples[0], WINDOWS)
        for number, row in zip(numbers, batch.numpy(), strict=True):
            assert (row == TEXT[number * L : (number + 1) * L]).all()
    orders = {tuple(windows.window(n + epoch * WINDOWS) for n in range(WINDOWS)) for epoch in range(3)}
    assert len(orders) == 3
    other = Windows(CORPUS, L, 5)
    assert any(other.start(n) % L for n in range(WINDOWS)), "free windows start anywhere"


# --- interrupted, and gone on with -------------------------------------------------------------------------


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trailmark.data.neighbours.table._CHUNKS", 1)  # a window at a time


@pytest.mark.parametrize("spoil", ["nothing", "more", "less", "none"])
def test_stopped_and_gone_on(
    whole: Path, tmp_path: Path, spoil: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch)

    def stop(state: TableProgress) -> None:
        if state.done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path, scores="float32", progress=stop)
    with pytest.raises(ValueError, match=r"the same command finishes one that was interrupted"):
        NeighbourTable.open(tmp_path)
    kept, path = 5, tmp_path / "scores.bin"
    if spoil == "more":  # a block that was written and not entered
        path.write_bytes(path.read_bytes() + b"x" * 33)
    elif spoil == "less":
        path.write_bytes(path.read_bytes()[:-1])
        kept = 4
    elif spoil == "none":
        path.unlink()
        kept = 0
    seen: list[TableProgress] = []
    build(tmp_path, scores="float32", progress=seen.append)
    assert (seen[0].kept, seen[0].done, seen[-1].done) == (kept, kept + 1, WINDOWS)
    assert table_contents(tmp_path) == table_contents(whole)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    seen.clear()
    build(tmp_path, scores="float32", progress=seen.append)
    assert [(state.done, state.kept) for state in seen] == [(WINDOWS, WINDOWS)]
    assert before == {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}


def _build_and_die(output: Path, moment: int) -> None:
    def die(state: TableProgress) -> None:
        if state.done >= moment:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)  # a fork would wait for ever for its parent's other threads
    build(output, scores="float32", progress=die)


def test_killed_and_gone_on(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    monkeypatch.setattr("trailmark.data.neighbours.files._SECONDS", 0.0)  # what is made is kept at once
    kept = []
    for moment in (2, 7, WINDOWS):
        process: Any = multiprocessing.get_context("fork").Process(
            target=_build_and_die, args=(tmp_path, moment)
        )
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        kept.append((read_json(tmp_path / "neighbours.progress.json") or {}).get("done"))
    assert kept[:2] == [2, 7]
    build(tmp_path, scores="float32")
    assert table_contents(tmp_path) == table_contents(whole)


def test_a_full_disk(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    monkeypatch.setattr("trailmark.data.neighbours.files._SECONDS", 0.0)
    row = 4 * K * (L // S)  # bytes of a window's scores
    with largest_file(4 * row + 7), pytest.raises(ValueError, match=r"^output: the disk of "):
        build(tmp_path, scores="float32")
    seen: list[TableProgress] = []
    build(tmp_path, scores="float32", progress=seen.append)
    assert seen[0].kept == 4
    assert table_contents(tmp_path) == table_contents(whole)


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match=r"^output: expected about [\d,]+ bytes free .* there are 1,048,576"):
        build(tmp_path)


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_neighbours": 3}, "with count 4, this command asks for 3"),
        ({"chunk_size": 8}, "with chunk_size 16, this command asks for 8"),
        ({"rule": Rule()}, "with rule"),
        ({"scores": None}, "with scores 'float32', this command asks for None"),
        (
            {"embedder": open_embedder("hash:255", BYTES)},
            "with embedder spec 'hash:256', this command asks for 'hash:255'",
        ),
        ({"corpus": Corpus.of_tokens(TEXT[::-1])}, "with corpus"),
    ],
)
def test_a_folder_of_another_table(whole: Path, changes: Any, message: str) -> None:
    before = table_contents(whole)
    with pytest.raises(ValueError, match=rf"^output: .* holds a table {message}"):
        build(whole, **{"scores": "float32"} | changes)
    assert table_contents(whole) == before


def test_folders_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "neighbours.bin").write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"^output: expected a folder without files of something else"):
        build(tmp_path)
    assert (tmp_path / "neighbours.bin").read_bytes() == b"mine"
    (tmp_path / "neighbours.progress.json").write_text("{")
    with pytest.raises(ValueError, match=r"^output: .* is broken"):
        build(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    with (
        locked(other, "x"),
        pytest.raises(ValueError, match=r"^output: another trailmark neighbours is writing"),
    ):
        build(other)
    with pytest.raises(ValueError, match=r"^output: expected a folder to write in"):
        build(tmp_path / "neighbours.bin")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_length": S - 1}, r"^context_length: expected 1 to 65535 chunks .* hold 0"),
        ({"context_length": 0}, r"^context_length: expected at least 1, got 0"),
        ({"chunk_size": 0}, r"^chunk_size: expected at least 1"),
        ({"num_neighbours": 0}, r"^count: expected at least 1"),
        ({"context_length": len(TEXT) + 1}, r"^data: expected at least context_length"),
        ({"scores": "bfloat16"}, r"^scores: expected float32 or float16, got 'bfloat16'"),
    ],
)
def test_what_cannot_be_built(changes: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        build(tmp_path / "table", **changes)
    assert not (tmp_path / "table").exists()
    with pytest.raises(ValueError, match=r"^context_length: .* hold 70000"):
        build(
            tmp_path / "table",
            Corpus.of_tokens(np.zeros(70000, np.int32)),
            context_length=70000,
            chunk_size=1,
        )


def test_rules_that_cannot_be() -> None:
    for window, reader in ((0, 0), (5, -1)):
        with pytest.raises(ValueError, match=r"^sliding_window, last_reader: "):
            Rule(window, reader)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"corpus": Corpus.of_tokens(TEXT[1:])}, "expected a table for corpus with fingerprint"),
        ({"tokenizer_fingerprint": "0" * 64}, "expected a table for tokenizer with fingerprint 0000"),
        ({"context_length": 512}, f"for context_length 512, .* is one for {L}"),
        ({"chunk_size": 64}, f"for chunk_size 64, .* is one for {S}"),
    ],
)
def test_a_table_of_something_else(whole: Path, wanted: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^neighbours: .*{message}"):
        NeighbourTable.open(whole, **wanted)
    table = NeighbourTable.open(
        whole,
        corpus=Corpus.of_tokens(TEXT),
        tokenizer_fingerprint=HASH.tokenizer_fingerprint,
        context_length=L,
        chunk_size=S,
    )
    assert table.manifest["embedder"]["spec"] == "hash:256"
    assert str(table.rule) == "--architecture rpt --window 48 (last reader 15 on)"


def test_damaged_tables(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "table"

    def refused(change: Callable[[], Any], message: str, verify: bool = False) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        change()
        with pytest.raises(ValueError, match=rf"^neighbours: .*{message}"):
            NeighbourTable.open(folder).verify() if verify else NeighbourTable.open(folder)

    def write(**changes: Any) -> None:
        path = folder / "neighbours.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    NeighbourTable.open(whole).verify()
    refused(lambda: flip(folder / "scores.bin", 77), "scores.bin was changed", verify=True)
    refused(lambda: (folder / "scores.bin").unlink(), "scores.bin is missing")
    refused(lambda: os.truncate(folder / "neighbours.bin", 9), "neighbours.bin has 9 bytes")
    refused(lambda: (folder / "neighbours.json").unlink(), "has no neighbours.json")
    refused(lambda: (folder / "neighbours.json").write_text("[]"), "is broken")
    refused(lambda: write(format=2), "expected format 1 or older, .* has format 2. Update trailmark")
    refused(lambda: write(windows=7), "is broken")
    refused(lambda: write(files={}), "is broken")
    refused(lambda: write(scores="float64"), "is broken")
    refused(lambda: write(rule={"x": 1}), "is broken")
    with pytest.raises(ValueError, match=rf"^windows: expected 0 .. {WINDOWS - 1}, got -1 .. 0"):
        NeighbourTable.open(whole).batch([0, -1])


def test_fingerprints_of_tables(whole: Path, tmp_path: Path) -> None:
    table = NeighbourTable.open(whole)
    shutil.copytree(whole, tmp_path / "copy")
    assert NeighbourTable.open(tmp_path / "copy").fingerprint == table.fingerprint
    others = [build(tmp_path / "a"), build(tmp_path / "b", rule=Rule())]
    others.append(build(tmp_path / "c", embedder=open_embedder("hash:255", BYTES)))
    others.append(build(tmp_path / "d", Corpus.of_tokens(TEXT[: WINDOWS * L]), scores="float32"))
    assert len({table.fingerprint, *(other.fingerprint for other in others)}) == 5


def test_another_process_maps_it_anew(whole: Path) -> None:
    table = NeighbourTable.open(whole)
    before = table.batch([1])
    sent = pickle.dumps(table)
    assert len(sent) < 5000
    after = pickle.loads(sent).batch([1])
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_a_table_of_scores_by_hand(tmp_path: Path) -> None:
    """The way of other commands: any numbers, of any kind."""
    indices = np.array([[[-1, -1], [0, -1]], [[-1, -1], [0, -1]], [[-1, -1], [0, -1]]])
    scores = np.where(indices < 0, -np.inf, 0.25 + np.arange(3)[:, None, None])
    about = {
        "kind": "targets",
        "corpus": {"fingerprint": "c", "tokens": 6},
        "tokenizer_fingerprint": "t",
        "context_length": 2,
        "chunk_size": 1,
        "rule": {"sliding_window": None, "last_reader": 0, "landmarks": False},
    }
    calls = []

    def make(first: int, stop: int) -> tuple[Any, Any]:
        calls.append((first, stop))
        return indices[first:stop], scores[first:stop]

    write_table(tmp_path, about, (3, 2, 2), "float32", make, 2, command="trailmark targets")
    assert calls == [(0, 2), (2, 3)]
    table = NeighbourTable.open(tmp_path, tokenizer_fingerprint="t")
    assert (table.manifest["kind"], table.rule) == ("targets", Rule())
    found, own = table.batch([2, 0])
    assert own is not None
    assert (found.tolist(), own.tolist()) == (indices[[2, 0]].tolist(), scores[[2, 0]].tolist())


# --- the command -------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    bpe = save_bpe(tmp_path / "bpe")
    corpus = prepare(
        parse_source([str(write_folder(tmp_path / "text", 5))]),
        tmp_path / "corpus",
        bpe,
        processes=1,
        shard_tokens=900,
    )
    asked = ["--context-length", 200, "--chunk-size", 16, "--count", 3, "--window", 40]
    for embedder in ("bm25", "hash"):
        folder = tmp_path / embedder
        code, out, _ = command("neighbours", tmp_path / "corpus", folder, "--embedder", embedder, *asked)
        assert code == 0
        windows = len(corpus) // 200
        assert f"{windows:,} windows of 200 tokens; {len(corpus) - 200 * windows:,} tokens at the end" in out
        assert (
            f"The neighbours of {windows * 12:,} chunks lie in {folder}/ ({windows * 12 * 3 * 2 / 1024:.1f} KiB)"
            in out
        )
        assert f"data.paths={tmp_path / 'corpus'} data.tokenizer={bpe} data.neighbours={folder}" in out
        table = NeighbourTable.open(folder, corpus=corpus)
        assert (table.manifest["kind"], table.rule) == ("embedder", rule_for("rpt", 16, 40))
        assert table.manifest["embedder"]["spec"] == (
            f"bm25:{folder / 'bm25.json'}" if embedder == "bm25" else "hash:1024"
        )
        before = table_contents(folder)
        assert command("neighbours", tmp_path / "corpus", folder, "--embedder", embedder, *asked)[0] == 0
        assert table_contents(folder) == before
        code, out, _ = command("verify", folder)
        assert (code, "whole, every byte" in out) == (0, True)
    # neither a table's folder nor a corpus' is given something else
    before = table_contents(folder)
    code, _, err = command("neighbours", tmp_path / "corpus", folder, "--embedder", "bm25", *asked)
    assert (code, "expected a folder without a table" in err) == (1, True)
    assert table_contents(folder) == before
    there = {path.name for path in (tmp_path / "corpus").iterdir()}
    for embedder in ("bm25", "hash"):
        code, _, err = command(
            "neighbours", tmp_path / "corpus", tmp_path / "corpus", "--embedder", embedder, *asked
        )
        assert (code, "is a prepared corpus. Choose another one." in err) == (1, True)
    assert {path.name for path in (tmp_path / "corpus").iterdir()} == there
    flip(folder / "neighbours.bin", 9)
    code, _, err = command("verify", folder)
    assert code == 1
    assert "neighbours.bin was changed: " in err
    for wrong, message in (
        (["--embedder", "contriever"], "embedder: expected hash"),
        (["--embedder", "hash", "--tokenizer", "bytes"], "data: expected tokens of the tokenizer"),
        (["--embedder", "bm25", "--device", "cud"], "device: expected one to compute on"),
        (["--embedder", "hash", "--architecture", "x"], "architecture: expected one of 'drt', 'rpt'"),
        (["--embedder", "hash", "--context-length", "9"], "context_length: expected 1 to"),
    ):
        code, _, err = command("neighbours", tmp_path / "corpus", tmp_path / "no", *asked, *wrong)
        assert code == 1
        assert err.splitlines()[-1].startswith(f"trailmark: {message}")
    code, _, err = command("neighbours", tmp_path / "text", tmp_path / "bm25", *asked, "--embedder", "bm25")
    assert (code, "holds others. Choose another folder" in err) == (1, True)
