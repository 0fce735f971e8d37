"""Target scores: BM25's candidates, each scored by a causal language model, against one text at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.data.corpora import prose, save_bpe
from tests.evaluation.foreign import sharpened
from tests.models.tiny import EXACT, drt
from trailmark.data.corpus import load_tokenizer, tokenize
from trailmark.data.neighbours.bm25 import candidates
from trailmark.data.neighbours.files import TableProgress
from trailmark.data.neighbours.table import NeighbourTable
from trailmark.data.prepare import prepare
from trailmark.data.recipes import parse_source
from trailmark.evaluation import targets
from trailmark.evaluation.targets import Reference, make_targets, open_reference, window_targets
from trailmark.files import read_json
from trailmark.training.neighbours import rule_for

S = 8
BYTES = load_tokenizer()
TEXT = tokenize([prose(3, 60)], BYTES)
L = 6 * S + 3  # six chunks and the beginning of another
COUNT = 3


def gpt2(vocab_size: int, positions: int = 64, seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=vocab_size, n_embd=16, n_layer=2, n_head=2, n_positions=positions)
    return sharpened(GPT2LMHeadModel(config).eval())


def saved(folder: Path, model: Any, tokenizer: Any) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def log_likelihood(model: Any, before: list[int], following: list[int]) -> float:
    """Of one text at a time, without padding."""
    ids = torch.tensor([before + following])
    logits = model(ids).logits[0].double().log_softmax(-1)
    return sum(float(logits[len(before) - 1 + n, token]) for n, token in enumerate(following))


def directly(model: Any, texts: list[list[int]], c: int, j: int) -> float:
    """score(c, j) of chunks' texts, the last of them what follows the last chunk."""
    continued = texts[j + 1] if j + 1 < c else []
    helped = log_likelihood(model, texts[j] + continued + texts[c], texts[c + 1])
    return helped - log_likelihood(model, texts[c], texts[c + 1])


def test_scores_are_those_of_one_text_at_a_time() -> None:
    """Batches of several lengths with padding, the reference's tokens being the corpus'."""
    model, ids = gpt2(384).double(), TEXT[:L]
    reference = Reference(model, BYTES, BYTES, batch_size=4)
    assert reference.same_tokens
    limits = np.array([0, 1, 2, 2, 3, 5])
    found = window_targets(ids, S, COUNT, limits, reference)
    texts = [ids[n : n + S].tolist() for n in range(0, L, S)]
    assert len(texts[-1]) == 3  # what the last chunk helps to predict
    for c in range(6):
        chosen = [int(j) for j in found.indices[c] if j >= 0]
        assert chosen == sorted(set(chosen))
        assert len(chosen) == min(limits[c], COUNT)
        assert all(0 <= j < limits[c] for j in chosen)
        assert np.isneginf(found.scores[c, len(chosen) :]).all()
        for n, j in enumerate(chosen):
            assert abs(found.scores[c, n] - directly(model, texts, c, j)) < EXACT
    assert np.abs(found.scores[np.isfinite(found.scores)]).max() > 0.1
    # j + 1 = c: the chunk stands there once
    assert found.indices[1].tolist() == [0, -1, -1]


def test_candidates_are_bm25s_for_the_chunk_and_what_follows() -> None:
    ids, reference = TEXT[:L], Reference(gpt2(384), BYTES, BYTES)
    found = window_targets(ids, S, 2, np.arange(6), reference)
    chunks = ids[: 6 * S].reshape(6, S).astype(np.int64)
    for c in range(1, 5):
        query = np.concatenate([chunks[c], chunks[c + 1]])[None]
        (wanted,) = candidates(chunks, 2, np.array([c]), query, np.array([2 * S]))
        assert found.indices[c].tolist() == wanted.tolist()


def test_a_chunk_that_nothing_follows_asks_nothing() -> None:
    reference = Reference(gpt2(384), BYTES, BYTES)
    found = window_targets(TEXT[: 4 * S], S, 2, np.arange(4), reference)
    assert (found.indices[3] == -1).all()
    assert (found.indices[2] >= 0).all()
    padding = TEXT[: 4 * S].copy()
    padding[2 * S : 3 * S] = BYTES.pad_token_id
    other = Reference(gpt2(384), BYTES, BYTES)
    other.same_tokens = False  # as text: special tokens are none
    found = window_targets(padding, S, 2, np.arange(4), other)
    assert (found.indices[1:3] == -1).all()


def test_a_reference_with_a_tokenizer_of_its_own_scores_text(tmp_path: Path) -> None:
    words = load_tokenizer(save_bpe(tmp_path / "bpe"))
    model, ids = gpt2(len(words)).double(), TEXT[:L]
    reference = Reference(model, words, BYTES, batch_size=5)
    assert not reference.same_tokens
    found = window_targets(ids, S, COUNT, np.arange(6), reference)
    decoded = [BYTES.decode(ids[n : n + S], skip_special_tokens=True) for n in range(0, L, S)]
    texts = [words(text, add_special_tokens=False)["input_ids"] for text in decoded]
    assert len({len(text) for text in texts}) > 1
    for c, n in ((2, 0), (3, 1), (5, 2)):
        expected = directly(model, texts, c, int(found.indices[c, n]))
        assert abs(found.scores[c, n] - expected) < EXACT


def test_a_model_of_ours_scores_too(tmp_path: Path) -> None:
    """With landmarks inside, in batches of texts that end anywhere."""
    model = drt(vocab_size=384, seed=1)
    folder = saved(tmp_path / "drt", model, BYTES)
    reference = open_reference(str(folder), BYTES, "cpu")
    assert reference.same_tokens
    assert type(reference.model) is type(model)
    found = window_targets(TEXT[:L], S, COUNT, np.arange(6), reference)
    texts = [TEXT[n : min(n + S, L)].tolist() for n in range(0, L, S)]
    for c, n in ((1, 0), (3, 1), (5, 2)):
        assert abs(found.scores[c, n] - directly(model, texts, c, int(found.indices[c, n]))) < EXACT


# --- a table -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared corpus and a saved reference."""
    folder = tmp_path_factory.mktemp("targets")
    (folder / "text.txt").write_text(prose(5, 60), encoding="utf-8")
    prepare(parse_source([str(folder / "text.txt")]), folder / "corpus", processes=1)
    saved(folder / "model", gpt2(384), BYTES)
    return folder


def table_of(place: Path, output: Path, **changes: Any) -> NeighbourTable:
    settings: dict[str, Any] = {
        "context_length": L,
        "chunk_size": S,
        "count": COUNT,
        "rule": rule_for("rpt", S, 3 * S),
    }
    model = changes.pop("model", str(place / "model"))
    return make_targets([place / "corpus"], output, model, **(settings | changes))


def test_a_table_holds_the_windows_of_the_corpus(place: Path, tmp_path: Path) -> None:
    told: list[str] = []
    table = table_of(place, tmp_path / "table", say=told.append)
    corpus = targets.open_corpus([place / "corpus"], None)[0]
    assert (table.windows, table.chunks, table.count) == (len(corpus) // L, 6, COUNT)
    assert table.windows >= 5
    assert table.manifest["kind"] == "targets"
    reference = open_reference(str(place / "model"), BYTES, "cpu")
    limits = rule_for("rpt", S, 3 * S).num_candidates(6, S)
    assert limits.tolist() == [0, 0, 1, 2, 3, 4]  # not the chunk before, which the window shows
    indices, scores = table.batch(range(table.windows))
    assert scores is not None
    for window in (0, table.windows - 1):
        ids = corpus.read(window * L, (window + 1) * L)
        expected = window_targets(ids, S, COUNT, limits, reference)
        assert indices[window].tolist() == expected.indices.tolist()
        assert torch.equal(scores[window], torch.from_numpy(expected.scores).float())
    assert len(told) == 1
    assert f"{table.windows} windows of {L} tokens" in told[0]
    assert "tokens as they are" in told[0]


class Stopped(Exception):
    pass


def test_the_same_command_goes_on(place: Path, tmp_path: Path) -> None:
    whole = table_of(place, tmp_path / "whole")

    def stop(state: TableProgress) -> None:
        if state.done == 3:
            raise Stopped

    with pytest.raises(Stopped):
        table_of(place, tmp_path / "table", progress=stop)
    seen: list[TableProgress] = []
    table = table_of(place, tmp_path / "table", progress=seen.append)
    assert seen[0].kept == 3
    assert seen[0].done == 4
    for name in ("neighbours.bin", "scores.bin"):
        assert (tmp_path / "table" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert table.fingerprint == whole.fingerprint
    manifest = read_json(tmp_path / "table" / "neighbours.json")
    with pytest.raises(
        ValueError, match=r"^output: .* holds a table with chunk_size 8, this command asks for 7"
    ):
        table_of(place, tmp_path / "table", chunk_size=7)
    saved(tmp_path / "other", gpt2(384, seed=1), BYTES)
    with pytest.raises(ValueError, match=r"^output: .* holds a table with reference"):
        table_of(place, tmp_path / "table", model=str(tmp_path / "other"))
    assert read_json(tmp_path / "table" / "neighbours.json") == manifest


def test_what_cannot_score_is_refused(place: Path, tmp_path: Path) -> None:
    def refused(message: str, **changes: Any) -> None:
        with pytest.raises(ValueError, match=message):
            table_of(place, tmp_path / "table", **changes)
        assert not (tmp_path / "table").exists() or not list((tmp_path / "table").glob("*.json"))

    refused(
        "^model: expected a folder with a causal language model, .* has no config.json", model=str(tmp_path)
    )
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    refused("^model: expected a causal language model with its tokenizer", model=str(tmp_path / "empty"))
    gpt2(384).save_pretrained(tmp_path / "bare")
    refused("^model: expected a causal language model with its tokenizer", model=str(tmp_path / "bare"))
    cut = saved(tmp_path / "cut", gpt2(384), BYTES) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:1000])
    refused("^model: expected a causal language model with its tokenizer", model=str(cut.parent))
    refused("^device: expected one to compute on, cpu or cuda, got 'cud'", device="cud")
    refused("^batch_size: expected at least 1", batch_size=0)
    short = saved(tmp_path / "short", gpt2(384, positions=3 * S), BYTES)
    with pytest.raises(ValueError, match=r"^chunk_size: expected texts of at most 24 tokens.* with 32\."):
        table_of(place, tmp_path / "long", model=str(short))
    small = saved(tmp_path / "small", gpt2(40), BYTES)
    with pytest.raises(ValueError, match=r"^model: expected tokens below the 40 of"):
        table_of(place, tmp_path / "small-table", model=str(small))
