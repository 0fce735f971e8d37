"""HiLS, MoBA and exact block-sparse attention: against the model written naively, and against full attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.hils.naive import NaiveHiLS, read_in
from tests.models.tiny import (
    PRETRAINED,
    assert_same,
    early,
    hils,
    logits_of,
    name_of,
    padded,
    split,
    tokens,
    window_model,
)
from tests.pairwise import pairwise
from trailmark.memory import ExactSearch
from trailmark.models import causal_lm, layers
from trailmark.models.with_retrieved import with_retrieved

LENGTH = 61
WINDOWS = ["sliding_attention", "sliding_attention"]
ALTERNATING = ["sliding_attention", "full_attention", "full_attention"]


MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pretrained": PRETRAINED,
    "in range": {
        "qk_norm": "all",
        "rope_theta": 40.0,  # the faster of two pairs turns twice in 20 positions, the other does not
        "rope_scaling": {"rope_type": "in_range", "turns": 2, "original_max_position_embeddings": 20},
    },
}


# Every pair of values of two options occurs in some case.
CASES = pairwise(
    {
        "chunk_score": ["expansion", "mean", "mass"],
        "chunk_weights": ["score", "keys"],
        "summary_query": ["landmark", "tokens"],
        "summary_tokens": [None, 1, 2],
        "far_position": ["true", "window", 11],  # a number: as "window", so far back
        "num_sinks": [0, 3, 6],
        "max_sink_distance": [None, 20],
        "num_retrieved_chunks": [0, 1, 3],
        "early": [False, True],
        "alternating": [False, True],
        "model": ["plain", "pretrained", "in range"],
        "calibration_rank": [0, 2],
        "sizes": [(4, 7), (4, 8), (1, 5), (5, 3)],  # S, W
    }
)


def options_of(case: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """Fields of the configuration, and where early landmarks stand [1, T]."""
    options = dict(case)
    options["chunk_size"], options["sliding_window"] = options.pop("sizes")
    marks = early(LENGTH) if options.pop("early") else torch.zeros(1, LENGTH, dtype=torch.bool)
    if isinstance(options["far_position"], int):
        options |= {"far_position": "window", "far_distance": options["far_position"]}
    options["layer_types"] = ALTERNATING if options.pop("alternating") else None
    if options["chunk_score"] != "expansion":
        options["summary_query"] = "landmark"
    if options["chunk_score"] == "mass":
        options |= {"chunk_weights": "keys", "summary_tokens": None}
    options |= MODELS[options.pop("model")]
    if options["chunk_weights"] == "keys":
        options["calibration_rank"] = 0
    if options["chunk_size"] == 1:
        options["summary_tokens"] = None
    if not options["num_sinks"]:
        options["max_sink_distance"] = None
    return options, marks


@pytest.mark.parametrize("case", CASES, ids=name_of)
@pytest.mark.sampled(15)
def test_it_is_the_equations(case: dict[str, Any]) -> None:
    options, marks = options_of(case)
    model, ids = hils(**options), tokens(LENGTH)
    exact = NaiveHiLS(model, ids[0], marks[0].tolist())
    whole = model(ids, close_chunk=marks, output_retrieval=True)
    assert_same(whole.logits[0], exact.logits)
    if options["chunk_size"] > 1:  # chunks of the same token are equals, between which rounding decides
        assert read_in(whole.retrieval, 0) == exact.retrieval


@pytest.mark.parametrize("case", CASES, ids=name_of)
@pytest.mark.parametrize("pieces", [[23], [2, 9, 1, 28]], ids=str)
@pytest.mark.sampled(4)
def test_what_was_read_alone_is_what_a_forward_keeps(case: dict[str, Any], pieces: list[int]) -> None:
    """Where the last layer alone chooses, reading leaves out what it gives."""
    options, _ = options_of(case | {"early": False, "alternating": False})
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    model, ids = hils(**options | {"layer_types": kinds}), tokens(LENGTH, batch=2)
    whole, cache = model(ids), model.new_cache()
    for part in split(ids[:, : sum(pieces)], pieces):
        model.read(part, cache)
    assert_same(
        logits_of(model, ids[:, sum(pieces) :], past_key_values=cache), whole.logits[:, sum(pieces) :]
    )


@pytest.mark.parametrize("case", CASES, ids=name_of)
@pytest.mark.parametrize("pieces", [[23], [2, 9, 1, 28]], ids=str)
@pytest.mark.sampled(36)
def test_a_text_is_read_with_windows_and_a_question_chooses(case: dict[str, Any], pieces: list[int]) -> None:
    options, _ = options_of(case | {"early": False})
    model, ids, read = hils(**options, reading="windows"), tokens(LENGTH), sum(pieces)
    exact, cache = NaiveHiLS(model, ids[0], read=read), model.new_cache()
    for part in split(ids[:, :read], pieces):
        model.read(part, cache)
    asked = model(ids[:, read:], past_key_values=cache.branch(), output_retrieval=True)
    assert_same(asked.logits[0], exact.logits[read:])
    if options["chunk_size"] > 1:  # chunks of the same token are equals, between which rounding decides
        assert read_in(asked.retrieval, 0) == [layer[read:] for layer in exact.retrieval]
    for question in (ids[:, read:-3], ids[:, read:-1]):  # in two calls, the first of which wants no logits
        branch, rest = cache.branch(), ids[:, read + question.shape[1] :]
        model.read(question, branch, prompt=True)
        assert_same(logits_of(model, rest, past_key_values=branch)[0], exact.logits[-rest.shape[1] :])


@pytest.mark.parametrize(
    ("options", "chunk_size"),
    [({"reading": "windows"}, 4), ({"layer_types": [*WINDOWS, "full_attention"]}, 1)],
)
def test_a_memory_of_windows_is_asked_with_any_number_of_chunks(
    options: dict[str, Any], chunk_size: int, tmp_path: Path
) -> None:
    model, ids = hils(num_retrieved_chunks=3, chunk_size=chunk_size, **options), tokens(LENGTH)
    text, question = ids[:, :-9], ids[:, -9:]
    model.read(text).save(tmp_path)
    answers = []
    for count in (1, 2, 5):
        other = with_retrieved(model, count)
        asked = logits_of(other, question, past_key_values=other.load_cache(tmp_path))
        assert torch.equal(asked, logits_of(other, question, past_key_values=other.read(text)))
        answers.append(asked)
    assert not any(torch.equal(answers[0], later) for later in answers[1:])
    with pytest.raises(ValueError, match="another num_retrieved_chunks"):
        model.without_retrieval().load_cache(tmp_path)
    model.without_retrieval().read(text).save(tmp_path / "none")
    with pytest.raises(ValueError, match="expected a whole memory"):
        model.load_cache(tmp_path / "none")
    chooses = hils(num_retrieved_chunks=3)
    with pytest.raises(ValueError, match="num_retrieved_chunks"):  # here a text is read through the chunks
        logits_of(with_retrieved(chooses, 2), question, past_key_values=chooses.read(text))


@pytest.mark.parametrize("keep", [1, 40])
def test_a_prompt_is_no_text_that_is_read(keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little of it is wanted, and in whatever pieces it comes."""
    monkeypatch.setattr(causal_lm, "_READ_TOKENS", 8)
    model = hils(reading="windows", num_sinks=3, sliding_window=9)
    ids, mask = padded([60, 9, 51], "left")
    whole = model(ids, attention_mask=mask).logits
    last = model(ids, attention_mask=mask, past_key_values=model.new_cache(), logits_to_keep=keep).logits
    for row, count in enumerate([60, 9, 51]):
        kept = min(keep, count)
        assert_same(last[row, keep - kept :], whole[row, -kept:])
    cache = model.read(ids, attention_mask=mask)
    other = model(ids[:, :1], past_key_values=cache).logits
    cache = model.read(ids, attention_mask=mask, prompt=True)
    alone = model(torch.cat([ids, ids[:, :1]], 1), attention_mask=torch.cat([mask, mask[:, -1:]], 1)).logits
    chosen = model(ids[:, :1], past_key_values=cache).logits
    assert_same(chosen, alone[:, -1:])
    assert (other - chosen)[0].abs().max() > 1e-3


@pytest.mark.parametrize(
    ("chunk_score", "num_sinks"),
    [("expansion", 0), ("expansion", 6), ("mean", 3), ("mass", 0), ("mass", 3)],
)
def test_where_every_chunk_is_chosen_it_is_full_attention(chunk_score: str, num_sinks: int) -> None:
    """Forward and gradients; the window and the chunks beyond it are the past, each token once."""
    full = window_model(sliding_window=None, window_position="rope")
    model = hils(num_retrieved_chunks=99, chunk_score=chunk_score, chunk_weights="keys", num_sinks=num_sinks)
    model.load_state_dict(full.state_dict(), strict=False)
    ids, marks = tokens(LENGTH, batch=2), early(LENGTH).expand(2, -1)
    for closes in (False, marks):
        assert_same(logits_of(model, ids, close_chunk=closes), logits_of(full, ids))
    gradients = []
    for made in (full, model):
        made.train()(ids, labels=ids).loss.backward()
        gradients.append({name: p.grad for name, p in made.named_parameters() if name != "landmark"})
    for name, gradient in gradients[0].items():
        assert_same(gradients[1][name], gradient)


def test_a_graph_is_refused_and_other_lengths_are_right_all_the_same() -> None:
    torch._dynamo.reset()
    model = hils().float()
    compiled = torch.compile(model, backend="eager")
    for length in (90, 50, 51, 90, 30):
        assert torch.equal(compiled(tokens(length)).logits, model(tokens(length)).logits)


def test_a_call_on_a_cache_has_gradients_of_what_it_scores_with() -> None:
    model, ids = hils(calibration_rank=2, num_hidden_layers=1), tokens(LENGTH)
    cache = model.read(ids[:, :-4])
    model(ids[:, -4:], past_key_values=cache).logits.square().sum().backward()
    gradient = model.layers[0].calibration.up_proj.weight.grad
    assert gradient is not None
    assert gradient.abs().max() > 0


def test_a_memory_that_was_read_otherwise_is_refused_by_that_field(tmp_path: Path) -> None:
    """Not by one that a memory read with windows leaves out."""
    fields: dict[str, Any] = {"num_retrieved_chunks": 3, "chunk_size": 4}
    hils(**fields, reading="windows").read(tokens(LENGTH)).save(tmp_path)
    with pytest.raises(ValueError, match="another reading"):
        hils(**fields).load_cache(tmp_path)


def test_tokens_of_a_closed_chunk_are_not_taken_back() -> None:
    model, ids = hils(sliding_window=12), tokens(8)
    cache = model.new_cache()
    model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match=r"^tokens_to_remove: .*closed chunks"):
        cache.crop(1)
    assert_same(
        logits_of(model, ids[:, :4], past_key_values=cache),
        logits_of(model, torch.cat([ids, ids[:, :4]], 1))[:, 8:],
    )


def test_taking_back_tokens_with_retrieval_off_leaves_a_memory_that_loads(tmp_path: Path) -> None:
    model, ids = hils(num_retrieved_chunks=0), tokens(9)
    cache = model.new_cache()
    model(ids[:, :3], past_key_values=cache)
    cache.crop(2)
    cache.save(tmp_path / "memory")
    loaded = model.load_cache(tmp_path / "memory")
    assert_same(logits_of(model, ids[:, 1:5], past_key_values=loaded), logits_of(model, ids[:, :5])[:, 1:])


def test_exact_masses_need_no_landmark_vectors_in_memory() -> None:
    model = hils(chunk_score="mass", chunk_weights="keys")
    cache = model.read(tokens(LENGTH))
    assert sum(x.numel() for x in cache.memory.blocks(LENGTH // 4, 1)) == 0
    assert model.cache_bytes(LENGTH, 0).landmarks == 0


def test_a_search_that_would_not_be_asked_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"search: expected None with a HiLSForCausalLM, .* got a ExactSearch"
    ):
        hils().new_cache(search=ExactSearch())


def test_chunks_cannot_be_encoded_with_retrieval_off() -> None:
    model = hils(layer_types=[*WINDOWS, "full_attention"], far_position="window")
    assert model.encode(tokens(8)).k.shape[1] == 2
    with pytest.raises(NotImplementedError, match="keeps no chunks"):
        model.without_retrieval().encode(tokens(8))


def test_with_no_chunk_it_is_the_window() -> None:
    window, model = (
        window_model(window_position="rope", num_sinks=2),
        hils(num_retrieved_chunks=0, num_sinks=2),
    )
    model.load_state_dict(window.state_dict(), strict=False)
    assert_same(logits_of(model, tokens(LENGTH)), logits_of(window, tokens(LENGTH)))


@torch.no_grad()
def test_what_a_chunk_says_reaches_a_token_far_beyond_the_windows() -> None:
    """One layer of one window reads nothing else of the past than the chunk that it chooses."""
    model, ids = hils(num_hidden_layers=1, num_retrieved_chunks=1), tokens(LENGTH)
    chosen = model(ids, output_retrieval=True).retrieval[0].indices[0, -1].unique().tolist()
    before = logits_of(model, ids)[0, -1]
    for chunk in range(10):
        changed = ids.clone()
        changed[0, 4 * chunk : 4 * chunk + 4] = (ids[0, 4 * chunk : 4 * chunk + 4] + 1) % 50
        after = model(changed, output_retrieval=True)
        same = after.retrieval[0].indices[0, -1].unique().tolist() == chosen and chunk not in chosen
        assert same == torch.equal(after.logits[0, -1], before), chunk


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("length", [1, 9, 41])
def test_multiply_adds_are_counted(length: int, sinks: int) -> None:
    W, S, K, width, layers = 7, 4, 3, 16, 3
    window = retrieved = selection = 0
    landmarks = range(S, length + 1, S)
    for number, own in [*((t, 1) for t in range(length)), *((t, 0) for t in landmarks)]:
        start = max(0, number - W + 1) // S * S
        window += number + own - start + min(sinks, start)
        retrieved += S * min(K, start // S)
        selection += start // S
    expected = {"window": 2 * window, "retrieved": 2 * retrieved, "selection": selection}
    found = hils(num_sinks=sinks).attention_multiply_adds(length)
    assert found == {part: width * layers * number for part, number in expected.items()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sliding_window": None}, "sliding_window: expected at least 3"),
        ({"sliding_window": 2}, "sliding_window: expected at least 3"),
        ({"summary_query": "tokens", "chunk_score": "mean"}, "summary_query: expected 'landmark'"),
        (
            {"summary_tokens": 2, "chunk_score": "mass", "chunk_weights": "keys"},
            "summary_tokens: expected None with chunk_score 'mass'",
        ),
        ({"window_position": "alibi"}, "window_position: expected 'rope'"),
        ({"chunk_size": 0}, "chunk_size: expected at least 1"),
        ({"num_retrieved_chunks": -1}, "num_retrieved_chunks: expected 0"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types: expected 'full_attention' for some layer"),
        ({"chunk_score": "sum"}, "chunk_score"),
        ({"summary_tokens": 5}, "summary_tokens: expected None or 1 to chunk_size"),
        (
            {"calibration_rank": 2, "chunk_weights": "keys"},
            "calibration_rank: expected 0 with chunk_weights 'keys'",
        ),
        ({"chunk_score": "mass"}, "chunk_weights: expected 'keys' with chunk_score 'mass'"),
        ({"far_distance": 12}, "far_distance: expected None, or with far_position 'window' at least sliding"),
        ({"far_distance": 6, "far_position": "window", "sliding_window": 7}, "far_distance: expected None"),
    ],
)
def test_fields_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hils(**options)


@pytest.mark.parametrize("summary_query", ["landmark", "tokens"])
def test_a_landmark_looks_only_where_its_query_is_used(
    summary_query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked = hils(summary_query=summary_query), list[int]()
    plain = layers.sliding_window_attention

    def attention(q: Tensor, *rest: Any, **more: Any) -> Any:
        asked.append(q.shape[1])
        return plain(q, *rest, **more)

    monkeypatch.setattr(layers, "sliding_window_attention", attention)
    model(tokens(40))
    assert (1 in asked) == (summary_query == "landmark")
