"""What must not change a single bit: tiers, saving and loading, later tokens, and what neighbours say."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.budgets import assert_same_bits
from tests.models.tiny import TIERS, drt, hils, hsa, pad, tokens, window_model
from trailmark.memory import ChunkCache
from trailmark.models import TrailmarkForCausalLM
from trailmark.models.outputs import CausalLMOutput

Make = Callable[[], TrailmarkForCausalLM]
GROUPS = pytest.mark.parametrize("groups", [1, 2, 3])
RETRIEVERS: dict[str, Make] = {
    "drt": lambda: drt(2),
    "hils": lambda: hils(num_hidden_layers=2, sliding_window=22, num_sinks=2, calibration_rank=2),
    "hsa": lambda: hsa(num_memory_heads=2, num_retrieval_heads=2, num_sinks=2),
}
EACH = pytest.mark.parametrize("make", RETRIEVERS.values(), ids=RETRIEVERS)
LENGTHS = (103, 58, 3)  # of a ragged batch
PRECISIONS = [torch.float64, torch.float32, torch.bfloat16]
DTYPES = pytest.mark.parametrize("dtype", PRECISIONS, ids=str)


def ragged(side: str = "left", seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, mask and early landmarks [3, 103]."""
    texts = [tokens(n, seed=seed + b)[0] for b, n in enumerate(LENGTHS)]
    random = torch.Generator().manual_seed(0)
    early = [torch.rand(n, generator=random) < 0.2 for n in LENGTHS]
    return pad(texts, side), pad([torch.ones(n, dtype=torch.int64) for n in LENGTHS], side), pad(early, side)


@torch.no_grad()
def go_on(model: TrailmarkForCausalLM, cache: ChunkCache, rows: int = 1) -> list[Tensor]:
    """A question that ends with a landmark, its answer token by token, more reading, another question."""
    outs = []

    def ask(ids: Tensor, **arguments: Any) -> None:
        out = model(ids, past_key_values=cache, output_retrieval=True, **arguments)
        outs.append(out.logits)
        outs.extend(chosen.indices for chosen in out.retrieval or ())

    ask(tokens(6, rows, 7), close_chunk=True)
    for token in tokens(9, rows, 8).split(1, dim=1):
        ask(token)
    model.read(tokens(30, rows, 9), cache)
    ask(tokens(3, rows, 10))
    return outs


# --- tiers, saving and loading ---------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: drt(1), lambda: drt(3), *RETRIEVERS.values()])
@DTYPES
@pytest.mark.parametrize("memory_dtype", [None, torch.int8], ids=str)
@pytest.mark.sampled(7)
def test_tiers(make: Make, dtype: torch.dtype, memory_dtype: torch.dtype | None) -> None:
    model, ids = make().to(dtype), tokens(103)
    outs = []
    for tier in TIERS:
        cache = model.new_cache(memory_tier=tier, memory_dtype=memory_dtype)
        model.read(ids, cache)
        outs.append(go_on(model, cache))
    assert_same_bits(outs[1], outs[0])
    assert_same_bits(outs[2], outs[0])


@EACH
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.sampled(4)
def test_tiers_of_a_ragged_batch_with_early_landmarks(make: Make, side: str) -> None:
    model, (ids, mask, early) = make(), ragged(side)
    outs = []
    for tier in TIERS:
        cache = model.new_cache(memory_tier=tier)
        with torch.no_grad():
            out = model(ids, attention_mask=mask, close_chunk=early, past_key_values=cache)
        outs.append([out.logits[mask.bool()], *go_on(model, cache, rows=3)])
    assert_same_bits(outs[1], outs[0])
    assert_same_bits(outs[2], outs[0])


@torch.no_grad()
def begin(model: TrailmarkForCausalLM, cache: ChunkCache, how: str) -> None:
    """To where a cache is saved."""
    if how == "ragged":
        ids, mask, early = ragged()
        model(ids, attention_mask=mask, close_chunk=early, past_key_values=cache)
    else:
        model.read(tokens(90), cache)
        if how == "a prompt":  # so that all is there that a cache can hold
            model(tokens(6, seed=1), past_key_values=cache, close_chunk=True)
            model(tokens(2, seed=2), past_key_values=cache)


WAYS = ("reading", "a prompt", "ragged")
SAVINGS = [  # without the slow ones, of which few are sampled: each pair of values of two parameters
    pytest.param(WAYS[w], TIERS[s], TIERS[l], marks=[] if (s + l + 1) % 3 == w else [pytest.mark.slow])
    for w, s, l in itertools.product(range(3), repeat=3)
]


@EACH
@pytest.mark.parametrize(("how", "saved", "loaded"), SAVINGS)
@pytest.mark.parametrize("memory_dtype", [None, torch.int8], ids=str)
@pytest.mark.sampled(25)
def test_saving_and_loading(
    make: Make, how: str, saved: str, loaded: str, memory_dtype: torch.dtype | None, tmp_path: Path
) -> None:
    model, rows = make(), 3 if how == "ragged" else 1
    plain, cache = (model.new_cache(tier, memory_dtype=memory_dtype) for tier in ("device", saved))
    begin(model, plain, how)
    begin(model, cache, how)
    cache.save(tmp_path)
    again = model.load_cache(tmp_path, memory_tier=loaded)
    assert again.num_tokens.tolist() == plain.num_tokens.tolist()
    assert again.memory.store.tier == loaded
    expected = go_on(model, plain, rows=rows)
    assert_same_bits(go_on(model, again, rows=rows), expected)
    if not (saved == loaded == "disk"):  # then both would go on in one file
        assert_same_bits(go_on(model, cache, rows=rows), expected)


@EACH
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.sampled(3)
def test_reading_on_after_loading_and_saving_again(make: Make, tier: str, tmp_path: Path) -> None:
    model, ids = make(), tokens(200)
    plain, cache = model.new_cache(), model.new_cache(memory_tier=tier)
    for number, piece in enumerate(ids.split([46, 1, 73, 80], dim=1)):
        model.read(piece, plain)
        model.read(piece, cache)
        cache.save(tmp_path / f"{number % 2}")
        del cache  # lets go of its files
        cache = model.load_cache(tmp_path / f"{number % 2}", memory_tier=tier)
    assert cache.num_tokens.tolist() == [200]
    assert_same_bits(go_on(model, cache), go_on(model, plain))


@EACH
def test_a_disk_memory_that_is_saved_in_its_own_folder(make: Make, tmp_path: Path) -> None:
    model, ids = make(), tokens(200)
    plain, cache = model.new_cache(), model.new_cache(memory_tier="disk", memory_folder=tmp_path)
    for piece in ids.split([46, 74, 80], dim=1):
        model.read(piece, plain)
        model.read(piece, cache)
        cache.save(tmp_path)
    assert_same_bits(go_on(model, cache), go_on(model, plain))
    del cache  # what it read after the save is not in the manifest
    plain = model.new_cache()
    for piece in ids.split([46, 74, 80], dim=1):
        model.read(piece, plain)
    assert_same_bits(go_on(model, model.load_cache(tmp_path)), go_on(model, plain))


@EACH
def test_a_saved_branch_is_a_memory_of_its_own(make: Make, tmp_path: Path) -> None:
    model, text, more = make(), tokens(90), tokens(21, batch=2, seed=5)
    cache = model.new_cache()
    model.read(text, cache)
    branch = cache.branch(2)
    model.read(more, branch)
    branch.save(tmp_path)
    del cache
    expected = go_on(model, branch, rows=2)
    for tier in ("host", "disk"):
        assert_same_bits(go_on(model, model.load_cache(tmp_path, memory_tier=tier), rows=2), expected)


def test_a_window_models_cache(tmp_path: Path) -> None:
    model, text = window_model(), tokens(90)
    cache = model.new_cache()
    model.read(text, cache)
    cache.save(tmp_path)
    expected = go_on(model, cache)
    for tier in TIERS:
        assert_same_bits(go_on(model, model.load_cache(tmp_path, memory_tier=tier)), expected)


# --- what comes later, and what neighbours say -----------------------------------------------------------


@torch.no_grad()
def all_logits(model: TrailmarkForCausalLM, ids: Tensor, **arguments: Any) -> CausalLMOutput:
    return model(ids, output_retrieval=True, **arguments)


@GROUPS
@pytest.mark.parametrize("place", [0, 1, 3, 4, 17, 28])
@pytest.mark.parametrize("read", [0, 46, 90])
@pytest.mark.sampled(4)
def test_no_token_changes_an_earlier_logit_after_reading(groups: int, place: int, read: int) -> None:
    model, ids = drt(groups), tokens(30, seed=1)
    changed = ids.clone()
    changed[0, place:] = (ids[0, place:] + 1) % 50
    marks = torch.zeros(1, 30, dtype=torch.bool)
    marks[0, [2, 11, 17]] = True
    outs = []
    for text in (ids, changed):
        cache = model.new_cache()
        if read:
            model.read(tokens(read), cache)
        outs.append(all_logits(model, text, past_key_values=cache, close_chunk=marks).logits[0])
    assert torch.equal(outs[0][:place], outs[1][:place])
    assert not torch.equal(outs[0][place], outs[1][place])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_no_token_of_a_padded_row_changes_an_earlier_logit(side: str, use_cache: bool) -> None:
    model, (ids, mask, early) = drt(2), ragged(side)
    changed = ids.clone()
    for b, length in enumerate(LENGTHS):  # each row's last tokens
        last = len(ids[b]) if side == "left" else length
        changed[b, last - 2 : last] = (ids[b, last - 2 : last] + 1) % 50
    arguments: dict[str, Any] = {"attention_mask": mask, "close_chunk": early, "use_cache": use_cache}
    before, after = (all_logits(model, x, **arguments).logits for x in (ids, changed))
    for b, length in enumerate(LENGTHS):
        first = len(ids[b]) - length if side == "left" else 0
        same, moved = slice(first, first + length - 2), first + length - 2
        assert torch.equal(before[b, same], after[b, same])
        assert not torch.equal(before[b, moved], after[b, moved])


@pytest.mark.parametrize(
    ("groups", "dtype", "early_landmarks"),
    [  # each pair of values of two parameters
        pytest.param(groups, dtype, (groups + i) % 2 == 0)
        for groups in (1, 2, 3)
        for i, dtype in enumerate(PRECISIONS)
    ],
)
@pytest.mark.sampled(3)
def test_what_a_neighbour_says_changes_no_bit(groups: int, dtype: torch.dtype, early_landmarks: bool) -> None:
    """Padded rows of the same lengths, then questions and answers: the first row is as it was.

    With early landmarks a neighbour may, or may not, select a short chunk.
    """
    model, (ids, mask, early) = drt(groups).to(dtype), ragged()
    early[0] = torch.arange(103) % 4 == 3  # the first row's own chunks are all full
    outs = []
    for seed in range(4):
        other, cache = ragged(seed=10 * seed)[0], model.new_cache()
        other[0] = ids[0]
        arguments: dict[str, Any] = {"attention_mask": mask, "past_key_values": cache}
        if early_landmarks:
            arguments["close_chunk"] = early
        mine = [all_logits(model, other, **arguments).logits[0]]
        for n in (6, 1, 1, 1, 1, 1, 9, 1, 1):
            more = tokens(n, batch=3, seed=seed * 100 + n)
            more[0] = tokens(n)[0]
            out = all_logits(model, more, past_key_values=cache)
            mine += [out.logits[0], *(chosen.indices[0] for chosen in out.retrieval)]
        outs.append(mine)
    for mine in outs[1:]:
        assert_same_bits(mine, outs[0])
