"""Bugs of the published Landmark Attention code that must not come back, by their numbers; and where things stand.

The bugs are B1 to B15 of this project's reference notes, 1.9, the positions 1.6 there and Figure 2 of the paper; the
code is epfml/landmark-attention at d963e50. Those of the op and of selection have tests in tests/ops too.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models.landmark.naive import NaiveReading, NaiveWhole
from tests.models.tiny import (
    EXACT,
    assert_same,
    landmark,
    landmark_config,
    logits_of,
    padded,
    split,
    tokens,
)
from trailmark.models import LandmarkConfig, LandmarkForCausalLM
from trailmark.models.landmark import memory as landmark_memory

S, LOCAL = 4, 11
WAYS = pytest.mark.parametrize("per", ["token_and_head", "token", "head", "cell"])


def whole(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return NaiveWhole(model, ids[0]).logits


# --- B1 to B15 -------------------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("memory_position", ["stingy", "true"])
def test_b1_fewer_chunks_than_k_raise(per: str, memory_position: str) -> None:
    """n = 0, 2, 5 chunks in memory, k = 7."""
    model = landmark(retrieve_per=per, memory_position=memory_position, num_retrieved_chunks=7)
    ids = tokens(3 * LOCAL)
    assert_same(logits_of(model, ids, use_cache=True)[0], whole(model, ids))


@WAYS
def test_b2_as_many_chunks_as_k_stand_on_the_queries(per: str) -> None:
    """n == k: k + 1 slots are kept still, so that reading is one forward."""
    model, ids = landmark(retrieve_per=per, num_retrieved_chunks=2), tokens(2 * LOCAL)
    cache = model.new_cache()
    first = logits_of(model, ids[:, :LOCAL], past_key_values=cache)
    assert cache.num_chunks.tolist() == [2]
    rest = logits_of(model, ids[:, LOCAL:], past_key_values=cache)
    assert_same(torch.cat([first, rest], dim=1)[0], whole(model, ids))


def test_b3_more_than_a_fixed_number_of_chunks_merge_silently() -> None:
    """16 and 64 groups were the limits."""
    model, ids = landmark(chunk_size=1, num_hidden_layers=2, num_retrieved_chunks=69), tokens(70)
    assert_same(logits_of(model, ids, use_cache=True)[0], whole(model, ids))


def test_b4_cells_near_the_training_length_crash_later() -> None:
    """A cell that fills the places of training to the last, in a text ten times as long, at any phase."""
    model, ids = landmark(max_position_embeddings=37), tokens(10 * 37)
    cache = model.new_cache()
    logits = [logits_of(model, part, past_key_values=cache) for part in split(ids, [37, LOCAL, 1])]
    assert torch.cat(logits, dim=1).isfinite().all()
    assert cache.num_tokens.tolist() == [370]
    # nothing is looked up in a table that ends
    assert_same(logits_of(model, ids[:, :100])[0], whole(model, ids[:, :100]))


def test_b5_generation_has_no_memory_and_crops_the_context() -> None:
    """A change of the first token, far before what a cell sees, changes what is said."""
    model, prompt = landmark(), tokens(60)
    changed = prompt.clone()
    changed[0, :S] = (prompt[0, :S] + 1) % 50
    new, other = (
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        for ids in (prompt, changed)
    )
    assert (new.logits[0] != other.logits[0]).any()
    text = new.sequences[0]
    assert text.shape == (72,)
    exact = NaiveReading(model, text[:-1], [t == 59 for t in range(71)])
    assert any(m < 3 for layer in exact.retrieval for t in layer[60:] for head in t for m in head)
    assert torch.equal(exact.logits[59:].argmax(-1), text[60:])


def test_b6_only_the_last_pieces_logits_come_back() -> None:
    model, ids = landmark(), tokens(5 * LOCAL + 3, batch=2)
    out = model(ids, past_key_values=model.new_cache(), labels=ids)
    assert out.logits.shape == (2, 5 * LOCAL + 3, 50)
    for row in range(2):
        assert_same(out.logits[row].detach(), NaiveReading(model, ids[row]).logits)
    expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert_same(out.loss.detach(), expected.detach())


@pytest.mark.parametrize("side", ["left", "right"])
def test_b7_all_rows_of_a_cached_batch_have_the_first_rows_masks(side: str) -> None:
    model, lengths = landmark(), [40, 9, 23]
    ids, mask = padded(lengths, side)
    cache = model.new_cache()
    logits_of(model, ids, attention_mask=mask, past_key_values=cache)
    assert cache.num_chunks.tolist() == [8, 0, 5]
    more = tokens(7, batch=3, seed=5)
    together = logits_of(model, more, past_key_values=cache)
    for b, n in enumerate(lengths):
        text = torch.cat([tokens(n, seed=b)[0], more[b]])
        assert_same(together[b], NaiveReading(model, text).logits[n:])


def test_b9_jumps_are_taken_in_evaluation() -> None:
    jumping, plain, ids = landmark(position_jump=100), landmark(), tokens(46)
    assert torch.equal(logits_of(jumping, ids), logits_of(plain, ids))
    assert torch.equal(logits_of(jumping, ids, use_cache=True), logits_of(plain, ids, use_cache=True))
    seed = torch.tensor([0])
    outs = [model.train()(ids, noise_seed=seed).logits for model in (jumping, plain)]
    assert (outs[0] - outs[1]).abs().max() > EXACT


def records_asked_for(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[list[int], int]:
    """By each layer of one cell of 11 tokens over 22 chunks, with repetitions; and read from the store in all."""
    model = landmark(chunk_size=4, local_length=11, num_retrieved_chunks=3, **options)
    cache, asked = model.read(tokens(8 * LOCAL)), []
    gather, before = type(cache.memory).gather, cache.memory.fetched

    def counted(memory: Any, chunks: Any, planes: Any = None) -> Any:
        asked.append(int((chunks >= 0).sum()))
        return gather(memory, chunks, planes)

    monkeypatch.setattr(type(cache.memory), "gather", counted)
    logits_of(model, tokens(LOCAL, seed=1), past_key_values=cache)
    return asked, cache.memory.fetched - before


def test_b10_restricted_ways_to_select_gather_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """13 positions (11 tokens, 2 landmarks) in 3 chunks, 4 heads, 2 key/value heads, k = 3."""
    cases: list[tuple[dict[str, Any], int]] = [
        ({"retrieve_per": "token_and_head"}, 13 * 4 * 3),
        ({"retrieve_per": "token"}, 13 * 2 * 3),
        ({"retrieve_per": "head"}, 3 * 4 * 3),
        ({"retrieve_per": "cell"}, 3 * 2 * 3),
        ({"retrieve_per": "head", "causal_retrieval": False}, 4 * 3),
        ({"retrieve_per": "cell", "causal_retrieval": False}, 2 * 3),
    ]
    for options, expected in cases:
        with monkeypatch.context() as patch:
            asked, read = records_asked_for(patch, **options)
        assert asked == [expected] * 3, options
        # what many ask for is read once: at most all 22 chunks' records of 3 layers' 2 heads
        assert 3 * 2 * 3 <= read <= min(3 * expected, 22 * 3 * 2), options


def test_b11_gradient_accumulation_forgets_the_number_of_steps() -> None:
    """Two micro-batches of other lengths, divided by the tokens of both, give one batch's gradient."""
    model, lengths = landmark(landmark_phase="fixed").train(), [30, 13]
    ids, mask = padded(lengths, "right")
    labels = ids.masked_fill(mask == 0, -100)
    model(ids, attention_mask=mask, labels=labels).loss.backward()
    together = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for b, n in enumerate(lengths):
        text = tokens(n, seed=b)
        model(text, labels=text, num_items_in_batch=sum(lengths) - 2).loss.backward()
    for ours, p in zip(together, model.parameters(), strict=True):
        assert_same(ours, p.grad)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_b12_the_mask_is_ignored_and_heads_share_no_keys(kv_heads: int) -> None:
    model, text = landmark(num_key_value_heads=kv_heads), tokens(30)
    mask = torch.cat([torch.zeros(1, 5), torch.ones(1, 30)], dim=1)
    for use_cache in (False, True):
        exact = NaiveReading(model, text[0]).logits if use_cache else whole(model, text)
        for filler in (0, 7):
            ids = torch.cat([torch.full((1, 5), filler), text], dim=1)
            logits = logits_of(model, ids, attention_mask=mask, use_cache=use_cache)
            assert_same(logits[0, 5:], exact)


def test_b13_landmarks_stand_wherever_the_stream_of_all_texts_has_them() -> None:
    """Each text has its own: after its own tokens, whatever pads it and whatever its neighbours are."""
    model, lengths = landmark(), [22, 9]
    for side in ("left", "right"):
        ids, mask = padded(lengths, side, extra=3)
        logits = logits_of(model, ids, attention_mask=mask)
        for b, n in enumerate(lengths):
            assert_same(logits[b][mask[b].bool()], whole(model, tokens(n, seed=b)))
    # in training each begins at a phase of its own, and keeps it
    rows = tokens(22).expand(2, -1)
    seeds = torch.tensor([next(n for n in itertools.count() if phase_of(n) == phase) for phase in (3, 1)])
    with torch.no_grad():
        both = model.train()(rows, noise_seed=seeds).logits
        phases = [NaiveWhole(model, rows[0], phase=phase).logits for phase in range(S)]
    found = [[p for p in range(S) if (row - phases[p]).abs().max() <= EXACT] for row in both]
    assert found == [[3], [1]]


@pytest.mark.parametrize("per", ["head", "cell"])
def test_b14_later_tokens_have_a_say_in_what_earlier_ones_read(per: str) -> None:
    """By the paper's way they do, as the docstring says; by the default they do not."""
    text, ids = tokens(6 * LOCAL), tokens(LOCAL, seed=1)
    changed = ids.clone()
    changed[0, 5:] = (ids[0, 5:] + 1) % 50
    for causal in (True, False):
        model = landmark(retrieve_per=per, causal_retrieval=causal)
        assert landmark_config(retrieve_per=per).causal_retrieval
        cache = model.read(text)
        outs = [
            model(x, past_key_values=cache.branch(), output_retrieval=True).retrieval for x in (ids, changed)
        ]
        same = [torch.equal(a.indices[:, :5], b.indices[:, :5]) for a, b in zip(*outs, strict=True)]
        assert all(same) is causal


@pytest.mark.parametrize("phase", range(S))
def test_b15_a_landmark_without_tokens_leaks_weight(phase: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights sum to one at every position of a text that begins inside a chunk: values of one give one."""
    model, ids = landmark(), tokens(30)
    seed = next(n for n in itertools.count() if phase_of(n) == phase)
    seen = []
    for layer in model.layers:
        heads = layer.attention.heads
        monkeypatch.setattr(
            layer.attention, "heads", lambda x, heads=heads: (*heads(x)[:2], torch.ones_like(heads(x)[2]))
        )
        layer.attention.o_proj.register_forward_hook(lambda _, inputs, out: seen.append(inputs[0]))
    with torch.no_grad():
        model.train()(ids, noise_seed=torch.tensor([seed]))
        model.eval()(ids, use_cache=True)
        model(ids, attention_mask=torch.tensor([[0] * 3 + [1] * 27]))
    assert seen
    for attended in seen:
        assert_same(attended, torch.ones_like(attended))


def phase_of(seed: int) -> int:
    from trailmark.models.landmark.model import _PHASE
    from trailmark.ops import fold_seed

    return int(fold_seed(seed, _PHASE)) % S


# --- where chunks stand: Figure 2 ------------------------------------------------------------------------


def one_direction() -> LandmarkForCausalLM:
    """Every query and key is (1, 0) before RoPE, so scores are cos(distance) / sqrt(2): of S = 2, k = 2, D = 2."""
    config = LandmarkConfig(
        vocab_size=50,
        hidden_size=2,
        intermediate_size=2,
        num_attention_heads=1,
        num_hidden_layers=2,
        chunk_size=2,
        num_retrieved_chunks=2,
        local_length=10,
        max_position_embeddings=24,
        norm="layer",
        rms_norm_eps=0,
    )
    model = LandmarkForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embed_tokens.weight.copy_(torch.tensor([1.0, -1.0]))
        model.landmark.copy_(torch.tensor([1.0, -1.0]))
        for layer in model.layers:
            layer.attention_norm.weight.fill_(1)
            layer.mlp_norm.weight.fill_(1)
            layer.attention.qkv_proj.weight[0, 0] = 1
            layer.attention.qkv_proj.weight[2, 0] = 1
    return model


# p, q, their landmark, r, s, theirs
QUERIES = [9, 10, 11, 12, 13, 14]
SLOTS = {  # of the chunks ab, cd, ef, gh, ij that are selected: where their landmarks then stand
    (0, 1): (2, 5),
    (1, 4): (2, 8),
    (3, 4): (5, 8),
    (0, 3): (2, 8),
    (2, 3): (2, 8),
}


def read_five_chunks(model: LandmarkForCausalLM) -> Any:
    cache = model.read(tokens(10))
    assert cache.num_chunks.tolist() == [5]
    return cache


@pytest.mark.parametrize(
    ("memory_position", "landmarks", "first_query"),
    [("stingy", [2, 2, 2, 5, 8], 9), ("true", [2, 5, 8, 11, 14], 15)],
)
def test_figure_2_scores_the_latest_chunks_where_they_are_and_all_others_as_one_before(
    memory_position: str, landmarks: list[int], first_query: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = one_direction()
    model.config.memory_position = memory_position
    scored = []
    select = landmark_memory.select_by_landmarks

    def spied(scores: Tensor, *arguments: Any, **options: Any) -> Any:
        scored.append(scores)
        return select(scores, *arguments, **options)

    cache = read_five_chunks(model)
    monkeypatch.setattr(landmark_memory, "select_by_landmarks", spied)
    logits_of(model, tokens(4, seed=1), past_key_values=cache)
    assert [x.shape for x in scored] == [(1, 6, 1, 5)] * 2  # layers; positions, heads, chunks
    at = torch.tensor(landmarks, dtype=torch.float64)
    queries = first_query + torch.arange(6, dtype=torch.float64)[:, None]
    for scores in scored:
        assert_same(scores[0, :, 0], (queries - at).cos() / math.sqrt(2))


@pytest.mark.parametrize(("chosen", "landmarks"), SLOTS.items(), ids=str)
def test_figure_2_attends_to_old_chunks_at_the_left_and_late_ones_at_the_right(
    chosen: tuple[int, int], landmarks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """gh is scored at 5, and attended to at 8 where it is the latest that was selected."""
    model = one_direction()
    cache = read_five_chunks(model)
    selected = torch.tensor(chosen).expand(1, 6, 1, 2)
    monkeypatch.setattr(landmark_memory.LandmarkMemory, "_select", lambda *_: selected)
    out = model(tokens(4, seed=1), past_key_values=cache, output_retrieval=True)
    at = torch.tensor(landmarks, dtype=torch.float64)
    queries = torch.tensor([q for q in QUERIES if q % 3 != 2], dtype=torch.float64)[:, None]  # of the tokens
    for layer in out.retrieval:
        assert layer.indices[0, :, 0].tolist() == [list(chosen)] * 4
        assert_same(layer.scores[0, :, 0].detach(), (queries - at).cos() / math.sqrt(2))


@pytest.mark.parametrize(("kept", "landmarks"), [(1, (8,)), (2, (5, 8))])
def test_fewer_chunks_than_k_stand_at_the_right(kept: int, landmarks: tuple[int, ...]) -> None:
    """n < k + 1 leave the first slots empty; as if nothing had been before, also if older chunks were evicted."""
    model = one_direction()
    model.config.max_memory_chunks = kept
    out = model(tokens(4, seed=1), past_key_values=read_five_chunks(model), output_retrieval=True)
    at = torch.tensor(landmarks, dtype=torch.float64)
    queries = torch.tensor([9.0, 10.0, 12.0, 13.0], dtype=torch.float64)[:, None]
    for layer in out.retrieval:
        assert layer.indices[0, :, 0, :kept].tolist() == [list(range(5 - kept, 5))] * 4
        assert_same(layer.scores[0, :, 0, :kept].detach(), (queries - at).cos() / math.sqrt(2))


def test_one_retrieved_chunk_tells_the_last_from_the_others() -> None:
    """k = 1: two slots, landmarks at 2 and 5, queries from 6."""
    model = one_direction()
    model.config.num_retrieved_chunks = 1
    out = model(tokens(4, seed=1), past_key_values=read_five_chunks(model), output_retrieval=True)
    queries = np.array([6.0, 7.0, 9.0, 10.0])
    for layer in out.retrieval:
        latest = layer.indices[0, :, 0, 0].numpy() == 4
        expected = np.where(np.cos(queries - 5) > np.cos(queries - 2), 5, 2)
        assert (latest == (expected == 5)).all()
        assert (layer.indices[0, ~torch.from_numpy(latest), 0, 0] == 0).all()  # of equals the earliest
        found = torch.from_numpy(np.cos(queries - expected)) / math.sqrt(2)
        assert_same(layer.scores[0, :, 0, 0].detach(), found)
    assert latest.any()
    assert not latest.all()
