"""The cache: how far it is, rows that move, branches, taking back, and what it all costs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Cache

from tests.models.tiny import (
    TIERS,
    assert_same,
    block_recurrent,
    drt,
    hils,
    landmark,
    logits_of,
    pad,
    tokens,
    window_model,
)
from trailmark.memory import ChunkCache
from trailmark.models import TrailmarkForCausalLM

S, J, D, E, W = 4, 2, 4, 16, 7  # of the tiny models
EVERY_TIER = pytest.mark.parametrize("tier", TIERS)
MODELS = pytest.mark.parametrize("make", [lambda: drt(2), window_model], ids=["drt", "window"])
LENGTHS = (30, 7, 12)


def texts(seed: int = 0) -> list[Tensor]:
    return [tokens(n, seed=seed + b)[0] for b, n in enumerate(LENGTHS)]


def ragged_cache(model: TrailmarkForCausalLM, how: str = "forward", **options: Any) -> ChunkCache:
    """That has seen three texts of different lengths."""
    cache = model.new_cache(**options)
    mask = pad([torch.ones(n) for n in LENGTHS])
    if how == "read":
        model.read(pad(texts()), cache, mask)
    else:
        logits_of(model, pad(texts()), attention_mask=mask, past_key_values=cache)
    return cache


def carried(cache: ChunkCache) -> list[Tensor]:
    """Copies of all that a cache carries."""
    state = cache.state
    assert state is not None
    found: list[Any] = [state.num_tokens, state.num_positions, state.phases, state.memory.chunks]
    found += [x for span in state.spans for x in span]
    found += [x for layer in state.layers for x in (layer.keys, layer.values)]
    found += [x for got in state.pending if got is not None for x in got if not isinstance(x, dict)]
    found += [state.open_states, *(() if state.deferred is None else state.deferred)]
    if (most := int(state.memory.chunks.max())) > 0:
        here = np.arange(most) + np.zeros((len(state.num_tokens), 1), int)
        records, lengths = cache.memory.gather(np.where(here < state.memory.chunks[:, None], here, -1))
        found += [records, lengths, *cache.memory.blocks(most, len(here))]
    tensors = (torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in found if x is not None)
    return [x.clone() for x in tensors]


def assert_unchanged(cache: ChunkCache, before: list[Tensor]) -> None:
    now = carried(cache)
    assert len(now) == len(before)
    assert all(map(torch.equal, now, before))


# --- how far it is ---------------------------------------------------------------------------------------


@MODELS
def test_it_is_a_cache_of_transformers(make: Any) -> None:
    model = make()
    cache = model.new_cache()
    assert isinstance(cache, Cache)
    assert (cache.get_seq_length(), cache.batch_size, cache.get_max_length()) == (0, None, -1)
    assert (cache.window_bytes(), cache.memory_bytes()) == (0, 0)
    assert not cache.is_initialized
    for number, piece in enumerate(tokens(60, batch=2).split([1, 45, 14], dim=1)):
        if number:
            model.read(piece, cache)
        else:
            logits_of(model, piece, past_key_values=cache)
    assert (cache.get_seq_length(), cache.batch_size, cache.get_max_length()) == (60, 2, -1)
    assert cache.num_tokens.tolist() == [60, 60]
    assert cache.num_chunks.tolist() == ([15, 15] if model.config.model_type == "trailmark_drt" else [0, 0])
    assert len(cache) == len(cache.layers) == model.config.num_hidden_layers
    assert not cache.is_croppable  # as transformers means it: by any number of tokens
    assert not cache.is_compileable


@pytest.mark.parametrize("how", ["read", "forward"])
def test_rows_count_for_themselves(how: str) -> None:
    cache = ragged_cache(drt(2), how)
    assert cache.num_tokens.tolist() == list(LENGTHS)
    assert cache.num_chunks.tolist() == [7, 1, 3]
    assert cache.get_seq_length() == 30
    assert cache.batch_size == 3


@EVERY_TIER
def test_after_a_reset_it_is_as_new(tier: str, tmp_path: Any) -> None:
    model, text = drt(2), tokens(50, batch=2, seed=9)
    folder = {"memory_folder": tmp_path} if tier == "disk" else {}
    cache = ragged_cache(model, memory_tier=tier, **folder)
    for _ in range(2):
        cache.reset()
        assert (cache.get_seq_length(), cache.batch_size, cache.memory_bytes()) == (0, None, 0)
        out = [logits_of(model, piece, past_key_values=cache) for piece in text.split(9, dim=1)]
        fresh = model.new_cache()
        exact = [logits_of(model, piece, past_key_values=fresh) for piece in text.split(9, dim=1)]
        assert all(map(torch.equal, out, exact))
        assert cache.memory.store.tier == tier


def test_layers_are_its_own_matter() -> None:
    with pytest.raises(ValueError, match="layers: expected none"):
        drt().new_cache().layers = [1]


# --- rows ------------------------------------------------------------------------------------------------


@MODELS
@EVERY_TIER
@pytest.mark.parametrize("how", ["read", "forward"])
@pytest.mark.parametrize("rows", [[2, 0, 1], [0, 0, 2, 2, 1], [1]], ids=str)
@pytest.mark.sampled(4)
def test_rows_change_places(make: Any, tier: str, how: str, rows: list[int]) -> None:
    model = make()
    cache = ragged_cache(model, how, memory_tier=tier)
    cache.reorder_cache(torch.tensor(rows))
    assert cache.num_tokens.tolist() == [LENGTHS[b] for b in rows]
    more = tokens(20, batch=len(rows), seed=9)
    outs = [logits_of(model, piece, past_key_values=cache) for piece in more.split([1, 6, 1, 12], dim=1)]
    for b, row in enumerate(rows):
        whole = torch.cat([texts()[row], more[b]])[None]
        assert_same(torch.cat(outs, dim=1)[b], logits_of(model, whole)[0, LENGTHS[row] :])


def test_rows_are_repeated() -> None:
    model = drt(2)
    repeated, selected = ragged_cache(model), ragged_cache(model)
    repeated.batch_repeat_interleave(2)
    selected.batch_select_indices(torch.tensor([0, 0, 1, 1, 2, 2]))
    more = tokens(9, batch=6)
    outs = [logits_of(model, more, past_key_values=cache) for cache in (repeated, selected)]
    assert torch.equal(*outs)
    empty = model.new_cache()
    empty.batch_repeat_interleave(2)
    assert empty.batch_size is None


def test_what_was_read_in_inference_mode_goes_on_outside() -> None:
    """Rings are written to, and gradients of a later call pass by what is kept."""
    model, ids = drt(2), tokens(80)
    with torch.inference_mode():
        cache = model.new_cache()
        model.read(ids[:, :30], cache)
        logits_of(model, ids[:, 30:33], past_key_values=cache, close_chunk=True)
        branch = cache.branch(2)
        branch.reorder_cache(torch.tensor([1, 0]))
        branches = [branch, cache.branch(2), cache]
    outs = []
    for going in branches:
        rest = ids[:, 33:].expand(going.batch_size, -1).split([1, 1, 45], dim=1)
        outs.append(torch.cat([logits_of(model, piece, past_key_values=going)[:1] for piece in rest], dim=1))
        model(tokens(6, batch=len(rest[0])), past_key_values=going).logits.sum().backward()
    assert_same(outs[0], outs[2])
    assert torch.equal(outs[0], outs[1])


@MODELS
def test_what_is_kept_has_no_gradient(make: Any) -> None:
    model, ids = make(), tokens(60, batch=2)
    cache = model.new_cache()
    for piece in ids.split([30, 1, 1, 1, 1, 5, 21], dim=1):
        model(piece, past_key_values=cache).logits.sum().backward()  # each call's own
        assert not any(x.requires_grad for x in carried(cache))


@MODELS
@pytest.mark.parametrize("read", [30, 31, 35])
def test_a_calls_gradients_are_those_of_its_own_states(make: Any, read: int) -> None:
    """Of the last matrix, which nothing carried depends on, those of the whole text's last logits."""
    model, ids = make(), tokens(36)
    gradients = []
    for cached in (True, False):
        cache = model.new_cache()
        if cached:
            logits_of(model, ids[:, :read], past_key_values=cache)
        out = model(ids[:, read:] if cached else ids, past_key_values=cache if cached else None)
        target = model.layers[-1] if hasattr(model, "layers") else model.upper_layers[-1]
        (by_weight,) = torch.autograd.grad(
            out.logits[:, read - 36 :].square().sum(), target.mlp.down_proj.weight
        )
        gradients.append(by_weight)
    assert_same(gradients[0], gradients[1])


# --- branches --------------------------------------------------------------------------------------------


@EVERY_TIER
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("read", [1, 4, 46])
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.sampled(4)
def test_branches_go_on_without_their_parent(groups: int, read: int, tier: str, asked: bool) -> None:
    model, text, tails = drt(groups), tokens(read), tokens(29, batch=3, seed=1)
    cache = model.new_cache(memory_tier=tier)
    if asked:
        logits_of(model, text, past_key_values=cache)
    else:
        model.read(text, cache)
    before = carried(cache)
    branch = cache.branch(3)
    parts = [logits_of(model, piece, past_key_values=branch) for piece in tails.split([1, 2, 9, 17], dim=1)]
    for row in range(3):
        whole = torch.cat([text, tails[row : row + 1]], dim=1)
        assert_same(torch.cat(parts, dim=1)[row], logits_of(model, whole)[0, read:])
    assert branch.num_tokens.tolist() == [read + 29] * 3
    assert_unchanged(cache, before)
    # and the parent goes on, which no branch notices
    at_branch = carried(branch)
    model.read(tokens(40, seed=3), cache)
    assert_unchanged(branch, at_branch)


def test_branches_of_window_models_and_of_nothing() -> None:
    model, text, tails = window_model(), tokens(30), tokens(9, batch=3, seed=1)
    cache = model.new_cache()
    assert cache.branch(2).batch_size is None
    model.read(text, cache)
    out = logits_of(model, tails, past_key_values=cache.branch(3))
    whole = torch.cat([text.expand(3, -1), tails], dim=1)
    assert_same(out, logits_of(model, whole)[:, 30:])


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (hils, {}),
        (landmark, {}),
        (lambda: landmark(max_memory_chunks=3), {}),
        (drt, {"memory_tier": "tokens", "memory_dtype": torch.float32}),
    ],
)
def test_a_branch_of_nothing_has_the_settings_of_its_memory(make: Any, settings: dict[str, Any]) -> None:
    model, text, question = make(), tokens(70), tokens(9, seed=1)
    caches = [model.new_cache(**settings), model.new_cache(**settings).branch()]
    logits = [logits_of(model, question, past_key_values=model.read(text, cache)) for cache in caches]
    assert torch.equal(*logits)
    memories = [cache.memory for cache in caches]
    for name in ("keeps_tokens", "dtype", "max_chunks", "planes"):
        assert getattr(memories[0], name) == getattr(memories[1], name)


@pytest.mark.parametrize("tier", ["device", "disk", "tokens"])
@pytest.mark.parametrize(("rows", "joined"), [(1, False), (2, False), (2, True)])
def test_a_copy_goes_on_by_itself_and_copies_no_model(tier: str, rows: int, joined: bool) -> None:
    """The idiom of transformers for a prompt that many questions share."""
    if tier != "device" and rows == 2 and not joined:
        pytest.skip("these tiers take one text each")
    model, text, question = drt(), tokens(70, batch=rows), tokens(9, batch=rows, seed=1)
    if joined:
        cache = ChunkCache.join([model.read(text[b : b + 1], model.new_cache(tier)) for b in range(rows)])
    else:
        cache = model.read(text, model.new_cache(tier))
    cache.notes["sources"] = ["a text"]
    before, copied = None if joined else carried(cache), copy.deepcopy(cache)
    assert copied.identity.__self__ is model
    memories = getattr(copied.memory, "memories", [copied.memory])
    assert all(memory.encoder is None or memory.encoder._model is model for memory in memories)
    assert copied.notes == cache.notes
    expected = logits_of(model, torch.cat([text, question], 1))[:, 70:]
    assert_same(logits_of(model, question, past_key_values=copied), expected)
    if before is not None:
        assert_unchanged(cache, before)
    assert_same(logits_of(model, question, past_key_values=cache), expected)


def test_what_is_forgotten_leaves_no_notes() -> None:
    model = drt()
    cache = model.read(tokens(30))
    cache.notes["sources"] = ["a text"]
    cache.reset()
    assert not cache.notes


def test_what_is_read_after_the_vocabulary_grew_is_of_the_larger_one(tmp_path: Path) -> None:
    model = drt()
    model.read(tokens(30))
    model.resize_token_embeddings(model.config.vocab_size + 6)
    model.read(tokens(30)).save(tmp_path / "memory")
    model.save_pretrained(tmp_path / "model")
    loaded = type(model).from_pretrained(tmp_path / "model", dtype=model.dtype)
    assert loaded.load_cache(tmp_path / "memory").num_tokens.tolist() == [30]


@EVERY_TIER
def test_a_branch_of_a_branch_and_a_parent_that_is_gone(tier: str) -> None:
    model, text = drt(2), tokens(60)
    cache = model.new_cache(memory_tier=tier)
    model.read(text[:, :22], cache)
    child = cache.branch()
    cache.reset()
    model.read(tokens(30, seed=5), cache)
    model.read(text[:, 22:41], child)
    grandchild = child.branch()
    model.read(tokens(30, seed=6), child)
    assert_same(logits_of(model, text[:, 41:], past_key_values=grandchild), logits_of(model, text)[:, 41:])


def test_a_branch_shares_its_parents_memory() -> None:
    model = drt()
    cache = model.new_cache()
    model.read(tokens(1000 * S), cache)
    written = len(cache.memory.store)
    branch = cache.branch(3)
    logits_of(model, tokens(S + 1, batch=3, seed=1), past_key_values=branch)
    branch.reorder_cache(torch.tensor([2, 0]))  # beam search does it at every token
    assert branch.memory.base == (cache.memory, 1000)
    shared = [block.data_ptr() for block in branch.memory.blocks(1000, 2)]
    assert shared == [block.data_ptr() for block in cache.memory.blocks(1000, 1)]
    assert len(cache.memory.store) == written
    assert branch.memory_bytes() == 3 * 2 * S * J * D * 8 + 2 * (E * 8 + 24)  # records of 3 rows, 2 in use
    assert cache.memory_bytes() == 1000 * ((2 * S * J * D + E) * 8 + 24)


@pytest.mark.parametrize("branches", [2, 3])
def test_a_branch_of_a_batch_is_refused(branches: int) -> None:
    with pytest.raises(ValueError, match="branch: expected a cache of one row, got a batch of 3"):
        ragged_cache(drt()).branch(branches)


# --- taking back -----------------------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> tuple[str, list[tuple[str, int]], int]:
    call = st.tuples(st.sampled_from(["forward", "last", "read"]), st.sampled_from([1, 1, 1, 2, 3, 9, 30]))
    calls = draw(st.lists(call, min_size=1, max_size=6))
    return draw(st.sampled_from(["drt", "window", "wide", "all", "blocks"])), calls, draw(st.integers(1, 8))


@settings(max_examples=30)
@given(histories())
@example(("window", [("read", 50), ("last", 1)], 3))  # the windows begin in the middle of the text
@example(("window", [("read", 50), ("last", 6)], 3))
@example(("drt", [("read", 60), ("last", 3)], 2))
def test_tokens_are_taken_back_exactly_or_not_at_all(
    history: tuple[str, list[tuple[str, int]], int],
) -> None:
    name, calls, n = history
    model = {
        "drt": lambda: drt(2, chunk_size=11, sliding_window=3),
        "window": lambda: window_model(num_hidden_layers=1),
        "wide": lambda: window_model(sliding_window=40),
        "all": lambda: window_model(sliding_window=None),
        "blocks": lambda: block_recurrent(block_size=11, sliding_window=40),
    }[name]()
    ids = tokens(sum(length for _, length in calls))
    cache = model.new_cache()
    for (how, _), piece in zip(calls, ids.split([length for _, length in calls], dim=1), strict=True):
        if how == "read":
            model.read(piece, cache)
        else:
            logits_of(model, piece, past_key_values=cache, logits_to_keep=int(how == "last"))
    before, length = carried(cache), ids.shape[1]
    try:
        cache.crop(n)
    except ValueError:
        assert_unchanged(cache, before)
        return
    left = length - n
    assert cache.get_seq_length() == left
    other = torch.cat([ids[:, :left], tokens(12, seed=3)], dim=1)
    outs = [logits_of(model, piece, past_key_values=cache) for piece in other[:, left:].split(5, dim=1)]
    assert_same(torch.cat(outs, dim=1), logits_of(model, other)[:, left:])


def test_what_can_be_taken_back() -> None:
    model, ids = drt(2), tokens(43)
    cache = model.new_cache()
    logits_of(model, ids[:, :5], past_key_values=cache)
    cache.crop(-1)  # as transformers writes it
    assert cache.get_seq_length() == 4
    cache.crop(0)
    assert cache.get_seq_length() == 4
    short = model.new_cache()
    logits_of(model, ids[:, :3], past_key_values=short)
    short.crop(2)
    assert short.get_seq_length() == 1
    short.crop(1)
    assert short.batch_size is None  # as new
    window = window_model(sliding_window=50)
    cache = window.new_cache()
    logits_of(window, ids, past_key_values=cache)
    cache.crop(40)
    assert_same(logits_of(window, ids[:, 3:], past_key_values=cache), logits_of(window, ids)[:, 3:])


@pytest.mark.parametrize(("length", "n"), [(44, 1), (43, 4), (43, 1), (4, 1), (43, 44), (3, 4)])
def test_what_cannot_be_taken_back_is_refused(length: int, n: int) -> None:
    """A closed chunk, what follows it, what left the window, and more than there is."""
    model = drt(2)
    cache = model.new_cache()
    logits_of(model, tokens(length), past_key_values=cache)
    before = carried(cache)
    with pytest.raises(ValueError, match=rf"tokens_to_remove: .* got {n}: .*Call branch\(\)"):
        cache.crop(n)
    assert_unchanged(cache, before)


def test_a_row_that_had_no_tokens_since_it_was_read_keeps_them() -> None:
    """Its window begins in the middle of its text, and is not even full."""
    model, lengths = window_model(num_hidden_layers=1), [2, 50]
    cache, ids = model.new_cache(), pad([tokens(n, seed=b)[0] for b, n in enumerate(lengths)])
    model.read(ids, cache, pad([torch.ones(n) for n in lengths]))
    only_the_first = torch.tensor([[1], [0]])
    logits_of(model, tokens(1, batch=2), attention_mask=only_the_first, past_key_values=cache)
    with pytest.raises(ValueError, match="tokens_to_remove: "):
        cache.crop(1)


# --- bytes -----------------------------------------------------------------------------------------------


@EVERY_TIER
@pytest.mark.parametrize("memory_dtype", [None, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.sampled(5)
def test_memory_grows_by_the_formula_and_the_window_stays(
    tier: str, dtype: torch.dtype, memory_dtype: torch.dtype | None
) -> None:
    """Per chunk 2 S J D numbers, a landmark of E and 24 bytes; the window of the last positions' keys and values.

    In int8 also a scale of 4 bytes for each head's keys and for its values, and a landmark's numbers have 2.
    """
    model = drt(2).to(dtype)
    cache = model.new_cache(memory_tier=tier, memory_dtype=memory_dtype, num_tokens=10_000)
    chunk = 2 * S * J * D * (memory_dtype or dtype).itemsize + E * dtype.itemsize + 24
    if memory_dtype == torch.int8:
        chunk += 2 * J * 4 - E * (dtype.itemsize - 2)
    model.read(tokens(50 * S), cache)
    window = cache.window_bytes()
    layers = sum(layer.num_bytes() for layer in cache.layers if layer.keys is not None)
    assert layers == 2 * W * J * D * dtype.itemsize  # the lower one; the upper ones have not run
    for chunks in (51, 100):
        model.read(tokens(chunks * S - cache.get_seq_length()), cache)
        assert cache.memory_bytes() == chunks * chunk
        assert cache.window_bytes() == window
    logits_of(model, tokens(2), past_key_values=cache)
    asked = cache.window_bytes()
    assert sum(layer.num_bytes() for layer in cache.layers) == 5 * layers
    for token in tokens(5 * S).split(1, dim=1):
        logits_of(model, token, past_key_values=cache)
        assert cache.window_bytes() == asked
    assert cache.memory_bytes() == 105 * chunk
