"""Defects that a review of the Landmark model found: each once, so that it stays mended."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models.tiny import assert_same, landmark, landmark_config, tokens
from trailmark.memory import ChunkMemory, FaissSearch
from trailmark.models import LandmarkForCausalLM
from trailmark.models import grid as layouts
from trailmark.models.landmark.model import _products

WAYS = ("token_and_head", "token", "head", "cell")


@pytest.mark.parametrize("other", [{"rope_theta": 10.0}, {"num_attention_heads": 2}])
def test_a_model_keeps_its_own_positions_beside_another(other: dict[str, Any]) -> None:
    ids = tokens(23)
    alone = landmark(**other)(ids).logits
    layouts._small.cache_clear()
    layouts._large.cache_clear()
    landmark()(ids)  # lays out the same text
    assert torch.equal(landmark(**other)(ids).logits, alone)


def test_a_text_seen_in_inference_mode_can_be_trained_on() -> None:
    model, ids = landmark(landmark_phase="fixed"), tokens(29)
    with torch.inference_mode():
        model(ids)
    loss = model.train()(ids, labels=ids).loss
    assert loss is not None
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("per", WAYS)
def test_reads_and_decodes_under_autocast(per: str) -> None:
    """Scores are float32 or wider whatever autocast says (guarantee 8), and keys keep the model's dtype."""
    model = landmark(retrieve_per=per, gate_probability=0.5, gate_cutoff=0.1).float()
    cache, ids = model.new_cache(), tokens(60)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.read(ids[:, :50], cache)
        logits = [model(ids[:, [t]], past_key_values=cache).logits for t in range(50, 59)]
    assert cache.state is not None
    assert {layer.keys.dtype for layer in cache.state.layers if layer.keys is not None} == {torch.float32}
    logits.append(model(ids[:, 59:], past_key_values=cache).logits)
    found = torch.cat([x.float() for x in logits if x is not None], 1)
    assert torch.isfinite(found).all()


def test_gates_are_not_rounded_by_autocast() -> None:
    x, y = torch.randn(3, 8), torch.randn(8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = _products(x, y)
    assert torch.equal(under, _products(x, y))


@pytest.mark.parametrize("position", ["stingy", "true"])
@pytest.mark.parametrize("per", WAYS)
@pytest.mark.sampled(4)
def test_a_search_is_exact_in_a_small_memory(per: str, position: str) -> None:
    pytest.importorskip("faiss")
    model, ids = landmark(retrieve_per=per, memory_position=position), tokens(90)
    exact = model(ids, past_key_values=model.new_cache()).logits
    found = model(ids, past_key_values=model.new_cache(search=FaissSearch(min_chunks=10**6))).logits
    assert torch.equal(exact, found)


def test_a_search_leaves_the_latest_chunks_to_their_own_distances() -> None:
    """They are scored apart; a search for the k best of all chunks would find some of them, and miss others."""
    pytest.importorskip("faiss")
    model, ids = landmark(), tokens(200)
    search = FaissSearch(min_chunks=1, num_lists=1, num_probes=1)  # one list: nothing is missed
    exact = model(ids, past_key_values=model.new_cache(), output_retrieval=True)
    found = model(ids, past_key_values=model.new_cache(search=search), output_retrieval=True)
    for ours, theirs in zip(found.retrieval, exact.retrieval, strict=True):
        assert torch.equal(ours.indices, theirs.indices)
    assert_same(found.logits, exact.logits)


def test_a_first_call_that_was_stopped_leaves_room_for_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = landmark(max_memory_chunks=4), tokens(40, batch=3)
    cache, write, calls = model.new_cache(), ChunkMemory.write, 0

    def stopped(self: ChunkMemory, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        size = write(self, *arguments)
        if calls == 2:
            raise KeyboardInterrupt
        return size

    monkeypatch.setattr(ChunkMemory, "write", stopped)
    with pytest.raises(KeyboardInterrupt):
        model(ids, past_key_values=cache)
    monkeypatch.undo()
    assert cache.state is None
    after = model(ids[:2], past_key_values=cache).logits
    expected = model(ids[:2], past_key_values=model.new_cache()).logits
    assert_same(after, expected)


@pytest.mark.parametrize("cutoff", [0.0, 0.3])
def test_a_gate_always_counts_what_is_asked_for(cutoff: float) -> None:
    model = landmark(gate_probability=0.5, gate_cutoff=cutoff)
    cache = model.new_cache()
    model(tokens(60), past_key_values=cache)
    assert cache.state is not None
    assert cache.state.cell is not None
    asked, skipped = cache.state.cell.retrievals
    assert asked > 0
    assert (skipped > 0) == (cutoff > 0)


@pytest.mark.slow
def test_compiled_it_computes_the_same() -> None:
    model, ids = landmark(landmark_phase="fixed"), tokens(23)
    compiled: Any = torch.compile(model, backend="eager")
    logits = compiled(ids).logits
    assert_same(logits, model(ids).logits)


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"causal_retrieval": False}, "causal_retrieval"),
        ({"rope_theta": -1.0}, "rope_theta"),
    ],
)
def test_options_that_contradict_each_other_are_refused(changes: dict[str, Any], argument: str) -> None:
    with pytest.raises(ValueError, match=f"^{argument}: expected"):
        LandmarkForCausalLM(landmark_config(**changes))
