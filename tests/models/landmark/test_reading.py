"""Landmark Attention read in cells, over a memory: against the model written naively, one text at a time."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.models.landmark.naive import NaiveReading, NaiveWhole
from tests.models.test_exactness import BEHIND, Step, Story, Told, stories
from tests.models.test_generation import generated
from tests.models.tiny import (
    PRETRAINED,
    assert_same,
    early,
    landmark,
    logits_of,
    name_of,
    pad,
    padded,
    place,
    split,
    tokens,
)
from tests.pairwise import pairwise
from trailmark.memory import ChunkCache
from trailmark.models import LandmarkForCausalLM, causal_lm

S, LOCAL, LENGTH = 4, 11, 46
CAUSAL: list[dict[str, Any]] = [{"retrieve_per": per} for per in ("token_and_head", "token", "head", "cell")]
WAYS = [*CAUSAL, *({"retrieve_per": per, "causal_retrieval": False} for per in ("head", "cell"))]


EACH_WAY = pytest.mark.parametrize("way", WAYS, ids=name_of)
EACH_CAUSAL_WAY = pytest.mark.parametrize("way", CAUSAL, ids=name_of)


@torch.no_grad()
def in_calls(
    model: LandmarkForCausalLM, pieces: Any, **options: Any
) -> tuple[Tensor, list[Tensor], ChunkCache]:
    """Logits of a text passed piece by piece, what each layer retrieved [B, T, H, K], and the cache."""
    cache = model.new_cache()
    outs = [model(piece, past_key_values=cache, output_retrieval=True, **options) for piece in pieces]
    layers = zip(*(out.retrieval for out in outs), strict=True)
    found = [torch.cat([call.indices for call in layer], dim=1) for layer in layers]
    return torch.cat([out.logits for out in outs], dim=1), found, cache


def assert_retrieved(found: list[Tensor], row: int, exact: NaiveReading) -> None:
    """Each layer's [B, T, H, K] lists what the row's naive model read."""
    for layer, expected in zip(found, exact.retrieval, strict=True):
        assert [[[m for m in head if m >= 0] for head in t] for t in layer[row].tolist()] == expected


# --- the equations ---------------------------------------------------------------------------------------

# Every pair of values of two options occurs in some case.
CASES = pairwise(
    {
        "way": range(len(WAYS)),
        "memory_position": ["stingy", "true"],
        "max_memory_chunks": [None, 2, 5],
        "num_retrieved_chunks": [1, 3],
        "early": [False, True],
        "gate": [None, 0.0, 0.3],
        "num_key_value_heads": [1, 2, None],
        "model": ["llama", "gpt"],
        "pretrained": [False, True],
    }
)


@pytest.mark.parametrize("case", CASES, ids=name_of)
@pytest.mark.sampled(2)
def test_reading_is_the_equations(case: dict[str, Any]) -> None:
    options = dict(case)
    gate, with_early = options.pop("gate"), options.pop("early")
    if options.pop("model") == "gpt":
        options |= {"norm": "layer", "mlp": "gelu", "landmark_loss": "text"}
    if gate is not None:
        options |= {"gate_probability": 0.5, "gate_cutoff": gate}
    if options.pop("pretrained"):
        options |= PRETRAINED
    model = landmark(**WAYS[options.pop("way")], **options)
    ids, marks = tokens(LENGTH), early(LENGTH) if with_early else torch.zeros(1, LENGTH, dtype=torch.bool)
    exact = NaiveReading(model, ids[0], marks[0].tolist())
    logits, found, cache = in_calls(model, [ids], close_chunk=marks)
    assert_same(logits[0], exact.logits)
    assert_retrieved(found, 0, exact)
    skipped = list(exact.opened.values()).count(False)
    if gate:
        assert cache.state.cell.retrievals.tolist() == [len(exact.opened), skipped]
    else:
        assert skipped == 0


@pytest.mark.parametrize(
    "sizes",
    [
        {"chunk_size": 1, "local_length": 3},
        {"chunk_size": 4, "local_length": 1},
        {"chunk_size": 3, "local_length": 2},
        {"chunk_size": 4, "local_length": 8},
        {"chunk_size": 7, "local_length": 30},
        {"chunk_size": 50, "local_length": 11},
        {"num_hidden_layers": 1},
        {"num_attention_heads": 1, "num_key_value_heads": 1},
        {"rope_theta": 100, "logit_scale": 0.5, "tie_word_embeddings": False},
    ],
    ids=str,
)
@pytest.mark.sampled(3)
def test_any_sizes(sizes: dict[str, Any]) -> None:
    model, ids = landmark(**sizes), tokens(LENGTH)
    exact = NaiveReading(model, ids[0])
    for pieces in ([LENGTH], [5, 1]):
        logits, found, _ = in_calls(model, split(ids, pieces))
        assert_same(logits[0], exact.logits)
        assert_retrieved(found, 0, exact)


@pytest.mark.parametrize("per", ["head", "cell"])
@pytest.mark.parametrize("pieces", [[1], [5, 3], [LOCAL], [14, 2]], ids=str)
@pytest.mark.sampled(4)
def test_what_is_by_the_whole_cell_is_by_what_was_fed_of_it(per: str, pieces: list[int]) -> None:
    model, ids = landmark(retrieve_per=per, causal_retrieval=False), tokens(LENGTH)
    parts = split(ids, pieces)
    ends = np.cumsum([part.shape[1] for part in parts]).tolist()
    exact = NaiveReading(model, ids[0], calls=ends)
    logits, found, _ = in_calls(model, parts)
    assert_same(logits[0], exact.logits)
    assert_retrieved(found, 0, exact)


# --- one result ------------------------------------------------------------------------------------------

MODELS = st.fixed_dictionaries(
    {
        "retrieve_per": st.sampled_from(["token_and_head", "token", "head", "cell"]),
        "memory_position": st.sampled_from(["stingy", "true"]),
        "chunk_size": st.sampled_from([1, 2, 4, 5]),
        "local_length": st.sampled_from([1, 3, 8, 11]),
        "landmark_loss": st.sampled_from(["none", "none", "text"]),
        "norm": st.sampled_from(["rms", "layer"]),
        "mlp": st.sampled_from(["swiglu", "gelu"]),
        "num_hidden_layers": st.just(2),
    }
)
FEW = st.fixed_dictionaries(
    {
        "num_retrieved_chunks": st.sampled_from([1, 2, 3]),
        "max_memory_chunks": st.sampled_from([None, None, 1, 4]),
        "gate_probability": st.sampled_from([0.0, 0.0, 0.5]),
    }
)


def joined(*parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def join(drawn: tuple[dict[str, Any], ...]) -> dict[str, Any]:
        options = {k: v for part in drawn for k, v in part.items()}
        if options["retrieve_per"] not in ("head", "cell"):  # nothing else can look ahead
            options.pop("causal_retrieval", None)
        return options

    return st.tuples(*parts).map(join)


@lru_cache(maxsize=32)
def model_of(options: tuple[tuple[str, Any], ...]) -> LandmarkForCausalLM:
    return landmark(**dict(options))


PLAIN = (("num_hidden_layers", 2),)


def tell_few(story: Story) -> None:
    """Whatever way a text comes in, it is the text alone, also where not all of the memory is read."""
    model = model_of(story.options)
    pairs = zip(story.texts(), story.marks(), strict=True)
    Told(
        replace(story, memory_dtype=None), model, [NaiveReading(model, text, marks) for text, marks in pairs]
    )


def tell_all(story: Story) -> None:
    """With room for all chunks it is the text whole, by any way to select."""
    model = model_of(story.options)
    pairs = zip(story.texts(), story.marks(), strict=True)
    with torch.no_grad():
        exact = [NaiveWhole(model, text, marks) for text, marks in pairs]
    Told(replace(story, memory_dtype=None), model, exact)


FEW_STORIES = stories(joined(MODELS, FEW), longest=40)
ALL_STORIES = stories(
    joined(
        MODELS,
        st.fixed_dictionaries({"num_retrieved_chunks": st.just(50), "causal_retrieval": st.booleans()}),
    ),
    longest=40,
)


@settings(max_examples=12)
@given(FEW_STORIES)
@example(Story(PLAIN, (50, 31), 0.0, BEHIND))
@example(Story((*PLAIN, ("retrieve_per", "head"), ("max_memory_chunks", 4)), (50, 31), 0.3, BEHIND, 8))
@example(Story((*PLAIN, ("retrieve_per", "cell")), (40, 13, 30), 0.0, (Step("read", (30, 12, 29), extra=2),)))
@pytest.mark.slow
def test_any_calls_of_any_batch_are_the_texts_alone(story: Story) -> None:
    tell_few(story)


@settings(max_examples=12)
@given(ALL_STORIES)
@example(Story((*PLAIN, ("num_retrieved_chunks", 50)), (50, 31), 0.2, BEHIND, read_tokens=4))
def test_with_room_for_all_chunks_reading_is_one_forward(story: Story) -> None:
    tell_all(story)


@pytest.mark.slow
@settings(max_examples=300)
@given(FEW_STORIES)
def test_many_calls_of_many_batches_are_the_texts_alone(story: Story) -> None:
    tell_few(story)


@pytest.mark.slow
@settings(max_examples=300)
@given(ALL_STORIES)
def test_with_room_for_all_chunks_many_readings_are_one_forward(story: Story) -> None:
    tell_all(story)


@EACH_CAUSAL_WAY
@pytest.mark.parametrize("pieces", [[1], [3, 5, 8, 1, 26]], ids=str)
@pytest.mark.sampled(4)
def test_any_split_retrieves_the_same(way: dict[str, Any], pieces: list[int]) -> None:
    model, ids = landmark(**way), tokens(LENGTH, batch=2)
    whole, found, _ = in_calls(model, [ids])
    logits, again, _ = in_calls(model, split(ids, pieces))
    assert_same(logits, whole)
    assert all(map(torch.equal, again, found))


@EACH_WAY
def test_calls_that_end_with_cells_are_one_call(way: dict[str, Any]) -> None:
    model, ids = landmark(**way), tokens(LENGTH, batch=2)
    whole, found, _ = in_calls(model, [ids])
    for pieces in ([LOCAL], [2 * LOCAL, LOCAL]):
        logits, again, _ = in_calls(model, split(ids, pieces))
        assert_same(logits, whole)
        assert all(map(torch.equal, again, found))


@EACH_CAUSAL_WAY
@pytest.mark.parametrize("read_tokens", [7, 4096])
@pytest.mark.sampled(4)
def test_reading_then_forward_is_one_call(
    way: dict[str, Any], read_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causal_lm, "_READ_TOKENS", read_tokens)
    model, ids = landmark(**way), tokens(LENGTH, batch=2)
    whole = logits_of(model, ids, use_cache=True)
    for reads in ([29], [LOCAL - 1, 13], [LENGTH - 1]):
        cache, first = model.new_cache(), sum(reads)
        for piece in ids[:, :first].split(reads, dim=1):
            model.read(piece, cache)
        assert_same(logits_of(model, ids[:, first:], past_key_values=cache), whole[:, first:])


def test_reading_runs_no_more_than_the_keys_of_the_last_layer() -> None:
    model, ran = landmark(), []
    for layer in model.layers:
        layer.mlp.register_forward_hook(lambda mlp, *_: ran.append(mlp))
    model.read(tokens(LENGTH))
    assert model.layers[0].mlp in ran
    assert model.layers[-1].mlp not in ran


@pytest.mark.parametrize("side", ["left", "right"])
@EACH_WAY
@pytest.mark.sampled(3)
def test_a_padded_batch_is_its_rows(way: dict[str, Any], side: str) -> None:
    model, lengths = landmark(**way), [LENGTH, 3, 29]
    ids, mask = padded(lengths, side, extra=1)
    marks = [early(n, seed=n)[0] for n in lengths]
    with torch.no_grad():
        out = model(
            ids,
            attention_mask=mask,
            close_chunk=pad(marks, side, extra=1),
            past_key_values=model.new_cache(),
            output_retrieval=True,
        )
    for b, n in enumerate(lengths):
        own = place(n, ids.shape[1], side)
        exact = NaiveReading(model, tokens(n, seed=b)[0], marks[b].tolist())
        assert_same(out.logits[b, own], exact.logits)
        assert_retrieved([x.indices[:, own] for x in out.retrieval], b, exact)
        assert all((x.indices[b, mask[b] == 0] == -1).all() for x in out.retrieval)


def test_without_a_memory_nothing_is_retrieved() -> None:
    _, found, cache = in_calls(landmark(), [tokens(LOCAL)])
    assert cache.num_chunks.tolist() == [LOCAL // S]
    assert all((chosen == -1).all() for chosen in found)


# --- what is retrieved, and what it takes ----------------------------------------------------------------


def test_retrieval_is_reported_by_token_and_head() -> None:
    model, ids = landmark(), tokens(LENGTH, batch=2)
    retrieval = model(ids, past_key_values=model.new_cache(), output_retrieval=True).retrieval
    assert len(retrieval) == 3
    for chosen in retrieval:
        assert chosen.indices.shape == chosen.weights.shape == chosen.scores.shape == (2, LENGTH, 4, 3)
        present = chosen.indices >= 0
        assert torch.equal(present, chosen.weights > 0)
        assert torch.equal(present, chosen.scores.isfinite())
        assert_same(chosen.weights.sum(-1), present.any(-1).double())
        # chunks of 4 before the cell
        known = torch.arange(LENGTH) // LOCAL * LOCAL // S
        assert torch.equal(present.sum(-1), known.clamp(max=3)[None, :, None].expand(2, -1, 4))
        assert (chosen.indices < known[:, None, None]).all()


@pytest.mark.parametrize("most", [1, 5])
def test_no_more_than_the_newest_chunks_are_kept(most: int) -> None:
    model = landmark(max_memory_chunks=most)
    _, found, cache = in_calls(model, split(tokens(200), [9]))
    begun = torch.arange(200) // LOCAL * LOCAL // S
    for chosen in found:
        oldest = torch.where(chosen < 0, begun[:, None, None], chosen).amin((0, 2, 3))
        assert (oldest >= begun - most).all()
    # and in the store no more than these and what one cell hands on, 3 layers of 2 heads each
    assert len(cache.memory.store) <= (most + LOCAL // S + 1) * 6
    assert cache.num_chunks.tolist() == [200 // LOCAL * LOCAL // S]


def test_the_window_is_constant() -> None:
    model = landmark()
    cache, sizes = model.new_cache(), []
    for token in tokens(40).split(1, dim=1):
        logits_of(model, token, past_key_values=cache)
        sizes.append(cache.window_bytes())
    assert len(set(sizes)) == 1
    assert (
        sizes[0] == 3 * 2 * model.config.cell_positions() * 2 * 4 * 8
    )  # layers, k and v, positions, J, D, bytes


def test_a_search_of_all_lists_is_exact() -> None:
    """Of the way that needs no maximum: the others' is over p, whose sum is then over what was found alone."""
    pytest.importorskip("faiss")
    from trailmark.memory import FaissSearch

    model, ids = landmark(memory_position="true"), tokens(90)
    search = FaissSearch(min_chunks=8, batch_chunks=8, num_lists=2, num_probes=2, overfetch=30)
    caches = [model.read(ids[:, :80], model.new_cache(search=x)) for x in (search, None)]
    outs = [logits_of(model, ids[:, 80:], past_key_values=cache) for cache in caches]
    assert len(caches[0].memory.head_searches) == 3 * 2
    assert_same(*outs)
    # a branch goes on with their indexes, another text with none of them
    indexes = [own._index for own in caches[0].memory.head_searches.values()]
    branch = caches[0].branch()
    model(ids[:, :8], past_key_values=branch)
    assert all(index is not None for index in indexes)
    assert [own._index for own in branch.memory.head_searches.values()] == indexes
    caches[0].reset()
    assert not caches[0].memory.head_searches
    assert caches[0].memory.search is not search


# --- generation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("way", "close_chunk"), list(zip(CAUSAL, [True, False] * 2, strict=True)), ids=str)
def test_greedy_is_what_reading_predicts(way: dict[str, Any], close_chunk: bool) -> None:
    model, prompt = landmark(**way), tokens(26, batch=2)
    new = generated(model, prompt, 12, close_chunk=close_chunk)
    text = torch.cat([prompt, new[:, :-1]], dim=1)
    marks = [False] * 37
    marks[25] = close_chunk
    for row in range(2):
        exact = NaiveReading(model, text[row], marks).logits[25:]
        assert torch.equal(exact.argmax(-1), new[row])


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_generates_what_its_rows_do(side: str) -> None:
    model, lengths = landmark(landmark_loss="text"), [26, 1, 12]
    ids, mask = padded(lengths, side)
    together = generated(model, ids, 12, attention_mask=mask)
    for row, length in enumerate(lengths):
        assert torch.equal(together[row : row + 1], generated(model, tokens(length, seed=row), 12))


@pytest.mark.parametrize("way", [{}, {"retrieve_per": "head", "max_memory_chunks": 5}], ids=name_of)
def test_beams_after_reading_go_on_in_branches(way: dict[str, Any]) -> None:
    model, text, prompts = landmark(**way), tokens(41), tokens(5, batch=2, seed=1)
    cache = model.read(text)
    options: dict[str, Any] = {"num_beams": 2, "num_return_sequences": 2}
    whole = generated(model, torch.cat([text.expand(2, -1), prompts], dim=1), 12, **options)
    assert torch.equal(generated(model, prompts, 12, past_key_values=cache, **options), whole)
    assert cache.num_tokens.tolist() == [41]
    exact = NaiveReading(model, torch.cat([text, prompts[:1]], dim=1)[0])
    assert_same(logits_of(model, prompts[:1], past_key_values=cache)[0], exact.logits[41:])


def test_greedy_after_a_saved_memory(tmp_path: Path) -> None:
    model, text, question = landmark(), tokens(103), tokens(6, seed=1)
    model.read(text).save(tmp_path)
    answer = generated(model, torch.cat([text, question], dim=1), 12)
    for tier in ("device", "host", "disk"):
        cache = model.load_cache(tmp_path, memory_tier=tier)
        assert torch.equal(generated(model, question, 12, past_key_values=cache), answer)
