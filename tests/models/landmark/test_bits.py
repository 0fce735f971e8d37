"""Landmark Attention: what must not change a bit, and what a call that fails leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.budgets import assert_same_bits
from tests.models.test_bits import go_on
from tests.models.tiny import TIERS, early, landmark, logits_of, padded, tokens
from trailmark.memory import ChunkCache
from trailmark.models import LandmarkForCausalLM

WAYS: list[dict[str, Any]] = [
    {"retrieve_per": "token_and_head"},
    {"retrieve_per": "token", "memory_position": "true"},
    {"retrieve_per": "head", "max_memory_chunks": 5},
    {"retrieve_per": "cell"},
    {"retrieve_per": "head", "causal_retrieval": False},
]
EACH_WAY = pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
EACH_CAUSAL_WAY = pytest.mark.parametrize("way", WAYS[:4], ids=lambda way: "-".join(map(str, way.values())))
LENGTHS = (61, 40, 3)
MARKS = early(61, batch=3)


@pytest.mark.parametrize("how", ["branched", "loaded"])
def test_where_a_text_repeats_itself_the_same_chunk_is_chosen(how: str, tmp_path: Path) -> None:
    """Equal chunks score the same, and which of them is chosen must not depend on what was branched or loaded."""
    model = landmark(seed=1, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    # products of unequal sizes choose differently here
    text, question = tokens(80, seed=1), tokens(9, seed=9)
    whole = model.read(text)
    if how == "branched":
        other = whole.branch()
    else:
        whole.save(tmp_path)
        other = model.load_cache(tmp_path, "host")
    for cache in (whole, other):
        model.read(text, cache)
        model.read(text, cache)
    found = [
        model(question, past_key_values=cache.branch(), output_retrieval=True).retrieval
        for cache in (whole, other)
    ]
    for one, another in zip(*found, strict=True):
        assert torch.equal(one.indices, another.indices)


@torch.no_grad()
def begin(model: LandmarkForCausalLM, cache: ChunkCache, how: str) -> None:
    """To the middle of a cell, and of a chunk of its; "ragged": three rows that differ in that."""
    if how == "ragged":
        ids, mask = padded(LENGTHS)
        model(ids, attention_mask=mask, close_chunk=MARKS, past_key_values=cache)
    else:
        model.read(tokens(58), cache)
        model(tokens(3, seed=2), past_key_values=cache)


# --- tiers, saving and loading ---------------------------------------------------------------------------


@EACH_WAY
@pytest.mark.parametrize("how", ["one text", "ragged"])
@pytest.mark.sampled(5)
def test_tiers_and_what_was_saved(way: dict[str, Any], how: str, tmp_path: Path) -> None:
    """Each way's running maxima and the open unit's choice are saved too."""
    model, rows = landmark(**way), 3 if how == "ragged" else 1
    plain = model.new_cache()
    begin(model, plain, how)
    assert plain.state.cell.open_units().any()
    merged = way["retrieve_per"] in ("head", "cell")
    assert all((x is not None) is merged for x in plain.state.cell.running)
    expected = None
    for saved, loaded in zip(TIERS, ("disk", "device", "host"), strict=True):
        cache = model.new_cache(memory_tier=saved)
        begin(model, cache, how)
        cache.save(tmp_path / saved)
        if saved == "disk":  # else both would go on in one file
            del cache
        else:
            expected = go_on(model, plain, rows=rows) if expected is None else expected
            assert_same_bits(go_on(model, cache, rows=rows), expected)
        again = model.load_cache(tmp_path / saved, memory_tier=loaded)
        assert again.memory.store.tier == loaded
        assert_same_bits(go_on(model, again, rows=rows), expected)


def test_tiers_of_a_lower_precision() -> None:
    model, outs = landmark().bfloat16(), []
    for tier in TIERS:
        cache = model.new_cache(memory_tier=tier)
        begin(model, cache, "one text")
        outs.append(go_on(model, cache))
        prompt = tokens(5)
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=cache,
            max_new_tokens=5,
            do_sample=False,
            pad_token_id=0,
        )
        outs[-1].append(out)
    assert_same_bits(outs[1], outs[0])
    assert_same_bits(outs[2], outs[0])


@EACH_WAY
@pytest.mark.sampled(5)
def test_a_branch_goes_on_like_its_source_and_leaves_it(way: dict[str, Any], tmp_path: Path) -> None:
    model = landmark(**way)
    caches = [model.new_cache() for _ in range(2)]
    for cache in caches:
        begin(model, cache, "one text")
    expected = go_on(model, caches[0])
    one, branch = caches[1].branch(), caches[1].branch(2)
    assert_same_bits(go_on(model, one), expected)
    one.save(tmp_path)
    assert_same_bits(go_on(model, model.load_cache(tmp_path)), go_on(model, one))
    with torch.no_grad():
        model(tokens(30, batch=2, seed=5), past_key_values=branch)
    assert_same_bits(go_on(model, caches[1]), expected)


# --- what comes later, and what neighbours say -----------------------------------------------------------


@EACH_CAUSAL_WAY
@pytest.mark.parametrize("at", [0, 17])
@pytest.mark.parametrize("read", [0, 46])
@pytest.mark.sampled(4)
def test_no_token_changes_an_earlier_logit(way: dict[str, Any], at: int, read: int) -> None:
    model, ids, marks = landmark(**way), tokens(30, seed=1), MARKS[:1, :30]
    changed = ids.clone()
    changed[0, at:] = (ids[0, at:] + 1) % 50
    outs = []
    for text in (ids, changed):
        cache = model.read(tokens(read)) if read else model.new_cache()
        outs.append(logits_of(model, text, past_key_values=cache, close_chunk=marks)[0])
    assert torch.equal(outs[0][:at], outs[1][:at])
    assert not torch.equal(outs[0][at], outs[1][at])


@EACH_WAY
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.sampled(5)
def test_what_a_neighbour_says_changes_no_bit(way: dict[str, Any], dtype: torch.dtype) -> None:
    """Padded rows of the same lengths, then questions and answers: the first row is as it was."""
    model, outs = landmark(**way).to(dtype), []
    ids, mask = padded(LENGTHS)
    for seed in range(2):
        other, cache = (ids + 3 * seed) % 50, model.new_cache()
        other[0] = ids[0]
        marks = MARKS.clone()
        marks[0] = torch.arange(61) % 4 == 3
        with torch.no_grad():
            out = model(other, attention_mask=mask, close_chunk=marks, past_key_values=cache)
        mine = [out.logits[0]]
        for n in (6, 1, 1, 9):
            more = tokens(n, batch=3, seed=seed * 100 + n)
            more[0] = tokens(n)[0]
            mine.append(logits_of(model, more, past_key_values=cache)[0])
        outs.append(mine)
    assert_same_bits(outs[1], outs[0])


# --- a call that fails ------------------------------------------------------------------------------------


def test_an_error_after_some_cells_takes_back_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory was written to, the logits found no room."""
    model = landmark(max_memory_chunks=4)
    caches = [model.read(tokens(43)) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(model.lm_head, "forward", lambda _: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(MemoryError):
            model(tokens(40, seed=3), past_key_values=caches[0])
    assert caches[0].num_tokens.tolist() == [43]
    assert_same_bits(*(go_on(model, cache) for cache in caches))
