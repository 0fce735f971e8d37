"""The cache: memory that grows, branches, marks, and what they cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.tiny import assert_same, drt, logits_of, tokens, window_model
from trailmark.memory import ChunkCache, ChunkMemory, MemoryEntries

S, J, D, E = 4, 2, 4, 16


def entries(count: int, batch: int = 1, seed: int = 0, dtype: torch.dtype = torch.float64) -> MemoryEntries:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, batch, count, S, J, D, generator=generator, dtype=torch.float64).to(dtype)
    landmarks = torch.randn(batch, count, E, generator=generator, dtype=torch.float64).to(dtype)
    return MemoryEntries(k, v, landmarks, torch.randint(1, S + 1, (batch, count), generator=generator))


def joined(*parts: MemoryEntries) -> MemoryEntries:
    return MemoryEntries(*(torch.cat(each, dim=1) for each in zip(*parts, strict=True)))


def assert_holds(memory: ChunkMemory, expected: MemoryEntries) -> None:
    assert len(memory) == expected.landmarks.shape[1]
    for ours, exact in zip(memory.tables(), expected, strict=True):
        assert torch.equal(ours, exact)


def state(cache: ChunkCache) -> list[Tensor]:
    """Copies of all that a cache carries."""
    parts = [x for kept in cache.window if kept is not None for x in kept]
    parts += [x for chosen in cache.pending if chosen is not None for x in chosen]
    parts += [] if cache.open_tokens is None else [cache.open_tokens]
    parts += list(cache.memory.tables()) if len(cache.memory) else []
    return [x.clone() for x in [*parts, torch.tensor(cache.num_tokens)]]


def assert_unchanged(cache: ChunkCache, before: list[Tensor]) -> None:
    now = state(cache)
    assert len(now) == len(before)
    assert all(torch.equal(a, b) for a, b in zip(now, before, strict=True))


# --- memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0, 1, 5, 1000])
@pytest.mark.parametrize("counts", [[1] * 40, [3, 0, 20, 1, 17], [100, 1]], ids=["1", "mixed", "many"])
def test_memory_grows_beyond_its_capacity(capacity: int, counts: list[int]) -> None:
    memory, parts = ChunkMemory(capacity), []
    for number, count in enumerate(counts):
        parts.append(entries(count, batch=2, seed=number))
        memory.append(parts[-1], all_full=False)
        assert len(memory) == sum(counts[: number + 1])
        if number % 3 == 0:
            assert_holds(memory, joined(*parts))
    assert_holds(memory, joined(*parts))


def test_growth_copies_seldom() -> None:
    memory, places = ChunkMemory(), set()
    for number in range(1000):
        memory.append(entries(1, seed=number), all_full=True)
        places.add(memory.tables().k.data_ptr())
    assert len(places) < 15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bytes_of_a_thousand_chunks(dtype: torch.dtype) -> None:
    """Keys, values and landmark vectors, and one int64 a chunk; spare capacity does not count."""
    memory = ChunkMemory(capacity=5000)
    memory.append(entries(1000, dtype=dtype), all_full=True)
    assert memory.num_bytes() == 1000 * ((2 * S * J * D + E) * dtype.itemsize + 8)
    model = drt(2).to(dtype)
    cache = model.new_cache()
    model.read(tokens(1000 * S), cache)
    assert cache.memory.num_bytes() == memory.num_bytes()
    assert cache.window_bytes() == 5 * 2 * 6 * J * D * dtype.itemsize  # 5 layers, W - 1 positions


def test_replaced_chunks_come_back() -> None:
    memory, old, new = ChunkMemory(), entries(9, seed=1), entries(3, seed=2)
    memory.append(old, all_full=True)
    parts = (MemoryEntries(*(x[:, :4] for x in old)), new, MemoryEntries(*(x[:, 7:] for x in old)))
    taken = memory.replace(4, new)
    assert_holds(memory, joined(*parts))
    memory.replace(4, taken)
    assert_holds(memory, old)


def test_shorter_chunks_put_in_place_of_full_ones_are_known_to_be_short() -> None:
    memory, new = ChunkMemory(), entries(3, seed=2)
    full = entries(9, seed=1)._replace(lengths=torch.full((1, 9), S))
    memory.append(full, all_full=True)
    memory.replace(4, full._replace(**{n: getattr(full, n)[:, :3] for n in full._fields}))
    assert not memory.has_short_chunks
    memory.replace(4, new._replace(lengths=torch.tensor([[S, S - 1, S]])))
    assert memory.has_short_chunks


@pytest.mark.parametrize("first", [-1, 7, 9])
def test_replacing_chunks_that_are_not_there_is_refused(first: int) -> None:
    memory = ChunkMemory()
    memory.append(entries(9), all_full=True)
    with pytest.raises(ValueError, match=f"first: expected 3 chunks inside the 9 .*got {first}"):
        memory.replace(first, entries(3))


def test_a_branch_cannot_replace_its_parents_chunks() -> None:
    memory = ChunkMemory()
    memory.append(entries(9), all_full=True)
    with pytest.raises(ValueError, match="first: expected 1 chunks inside the 9 that this memory owns"):
        memory.branch(1).replace(0, entries(1))


def test_rewinding_memory_forgets_what_came_after() -> None:
    memory, first, other = ChunkMemory(), entries(5), entries(3, seed=1)
    memory.append(first, all_full=True)
    mark = memory.mark()
    memory.append(entries(30, seed=2), all_full=False)
    assert memory.has_short_chunks
    memory.rewind(mark)
    assert not memory.has_short_chunks
    assert_holds(memory, first)
    memory.append(other, all_full=True)
    assert_holds(memory, joined(first, other))


@pytest.mark.parametrize("written_before", [False, True])
@pytest.mark.parametrize("written_after", [False, True])
def test_a_mark_of_chunks_not_yet_written(written_before: bool, written_after: bool) -> None:
    memory, first, other = ChunkMemory(), entries(5), entries(3, seed=1)
    memory.append(first, all_full=True)
    if written_before:
        memory.tables()
    memory.append(other, all_full=True)
    mark = memory.mark()
    memory.append(entries(30, seed=2), all_full=True)
    if written_after:
        memory.branch(2)
    memory.rewind(mark)
    memory.rewind(mark)
    assert_holds(memory, joined(first, other))


def test_rows_change_places() -> None:
    memory, three = ChunkMemory(), entries(5, batch=3)
    memory.append(three, all_full=True)
    rows = torch.tensor([2, 2, 0])
    memory.reorder(rows)
    assert_holds(memory, MemoryEntries(*(x[rows] for x in three)))


def test_what_is_kept_has_no_gradient() -> None:
    model = drt(2)
    cache = model.new_cache()
    model(tokens(30), past_key_values=cache)
    kept = [*cache.memory.tables(), *(x for pair in cache.window for x in pair)]
    kept += [x for chosen in cache.pending for x in chosen]
    assert not any(x.requires_grad for x in kept)


# --- branches --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("read", [1, 3, 4, 8, 46, 48])
def test_branches_go_on_for_chunks_without_their_parent(groups: int, read: int) -> None:
    model, text, tails = drt(groups), tokens(read), tokens(29, batch=3, seed=1)
    cache = model.new_cache()
    model.read(text, cache)
    before = state(cache)
    branch = cache.branch(3)
    parts = [logits_of(model, piece, past_key_values=branch) for piece in tails.split([1, 2, 9, 17], dim=1)]
    for row in range(3):
        whole = torch.cat([text, tails[row : row + 1]], dim=1)
        assert_same(torch.cat(parts, dim=1)[row], logits_of(model, whole)[0, read:])
    assert branch.num_tokens == read + 29
    assert_unchanged(cache, before)
    after = logits_of(model, tails[:1], past_key_values=cache)  # and the parent goes on
    assert_same(after, logits_of(model, torch.cat([text, tails[:1]], dim=1))[:, read:])


def test_a_window_models_branches() -> None:
    model, text, tails = window_model(), tokens(30), tokens(9, batch=3, seed=1)
    cache = model.new_cache()
    model.read(text, cache)
    out = logits_of(model, tails, past_key_values=cache.branch(3))
    whole = torch.cat([text.expand(3, -1), tails], dim=1)
    assert_same(out, logits_of(model, whole)[:, 30:])


def test_a_branch_of_an_empty_cache() -> None:
    model, ids = drt(), tokens(20, batch=2)
    assert_same(logits_of(model, ids, past_key_values=model.new_cache().branch(2)), logits_of(model, ids))


def test_a_branch_of_a_branch() -> None:
    model, text = drt(), tokens(60)
    cache = model.new_cache()
    model.read(text[:, :22], cache)
    child = cache.branch()
    model.read(text[:, 22:41], child)
    grandchild = child.branch()
    assert_same(logits_of(model, text[:, 41:], past_key_values=grandchild), logits_of(model, text)[:, 41:])


def test_a_branch_that_closes_one_chunk_copies_no_memory() -> None:
    model = drt()
    cache = model.new_cache()
    model.read(tokens(1000 * S), cache)
    branch = cache.branch(3)
    logits_of(model, tokens(S + 1, batch=3, seed=1), past_key_values=branch)
    branch.mark()
    assert [b.data_ptr() for b in branch.memory._buffers] == [b.data_ptr() for b in cache.memory._buffers]


def test_branch_and_parent_read_on_apart() -> None:
    model, text, other = drt(), tokens(60), tokens(20, seed=1)
    cache = model.new_cache(num_tokens=200)
    model.read(text[:, :40], cache)
    branch = cache.branch()
    model.read(other, cache)
    assert_same(logits_of(model, text[:, 40:], past_key_values=branch), logits_of(model, text)[:, 40:])


def test_a_branch_outlives_what_its_parent_forgets() -> None:
    model, text, other = drt(), tokens(60), tokens(20, seed=1)
    cache = model.new_cache(num_tokens=200)
    model.read(text[:, :20], cache)
    mark = cache.mark()
    model.read(text[:, 20:40], cache)
    branch = cache.branch()
    cache.rewind(mark)
    model.read(other, cache)
    assert_same(logits_of(model, text[:, 40:], past_key_values=branch), logits_of(model, text)[:, 40:])


@pytest.mark.parametrize("read", [2, 8, 9])
@pytest.mark.parametrize("branches", [2, 3])
def test_a_branch_of_a_batch_is_refused(read: int, branches: int) -> None:
    model = drt()
    cache = model.new_cache()
    model.read(tokens(read, batch=2), cache)
    with pytest.raises(ValueError, match="branch: expected a cache of one row, got a batch of 2"):
        cache.branch(branches)


# --- marks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [drt, lambda: drt(2, window_position="rope"), window_model])
@pytest.mark.parametrize("read", [0, 3, 8, 46])
@pytest.mark.parametrize("after", [1, 5, 90])
def test_rewinding_restores_every_bit(make: Any, read: int, after: int) -> None:
    model = make()
    cache = model.new_cache()
    if read:
        model.read(tokens(read), cache)
    before, mark = state(cache), cache.mark()
    question = tokens(9, seed=2)
    first = logits_of(model, question, past_key_values=cache, close_chunk=True)
    for _ in range(2):
        cache.rewind(mark)
        assert_unchanged(cache, before)
        model.read(tokens(after, seed=1), cache)
        cache.rewind(mark)
        assert torch.equal(logits_of(model, question, past_key_values=cache, close_chunk=True), first)


def test_marks_nest() -> None:
    model, text = drt(), tokens(60)
    cache = model.new_cache()
    model.read(text[:, :10], cache)
    outer, at_outer = cache.mark(), state(cache)
    model.read(text[:, 10:33], cache)
    inner, at_inner = cache.mark(), state(cache)
    model.read(text[:, 33:], cache)
    cache.rewind(inner)
    assert_unchanged(cache, at_inner)
    cache.rewind(outer)
    assert_unchanged(cache, at_outer)


def test_a_branch_can_be_marked() -> None:
    model, text, tails = drt(), tokens(22), tokens(20, batch=2, seed=1)
    cache = model.new_cache()
    model.read(text, cache)
    branch = cache.branch(2)
    mark = branch.mark()
    first = logits_of(model, tails, past_key_values=branch)
    branch.rewind(mark)
    assert torch.equal(logits_of(model, tails, past_key_values=branch), first)


def test_a_padded_batch_is_not_marked() -> None:
    model = drt()
    cache = model.new_cache()
    logits_of(
        model, tokens(3, batch=2), attention_mask=torch.tensor([[1, 1, 1], [0, 1, 1]]), past_key_values=cache
    )
    for use, argument in ((cache.mark, "mark"), (cache.branch, "branch")):
        with pytest.raises(ValueError, match=argument + ": expected"):
            use()


# --- rows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [3, 8, 46])
def test_a_reordered_cache_is_that_of_the_reordered_texts(read: int) -> None:
    model, text, tails = drt(2), tokens(read, batch=3), tokens(20, batch=3, seed=1)
    cache, rows = model.new_cache(), torch.tensor([2, 0, 0])
    model.read(text, cache)
    cache.reorder_cache(rows)
    out = logits_of(model, tails, past_key_values=cache)
    assert_same(out, logits_of(model, torch.cat([text[rows], tails], dim=1))[:, read:])


def test_reordering_a_branch_copies_no_memory() -> None:
    """Beam search does it at every token; the branches of one text have the same memory."""
    model = drt()
    cache = model.new_cache()
    model.read(tokens(100 * S), cache)
    branch, tails, rows = cache.branch(3), tokens(2 * S + 1, batch=3, seed=1), torch.tensor([2, 0])
    branch.reorder_cache(rows)
    assert [b.data_ptr() for b in branch.memory._buffers] == [b.data_ptr() for b in cache.memory._buffers]
    out = logits_of(model, tails[rows], past_key_values=branch)
    assert_same(out, logits_of(model, tails, past_key_values=cache.branch(3))[rows])


@pytest.mark.parametrize("read", [3, 33, 46])
def test_what_was_read_in_inference_mode_goes_on_outside(read: int) -> None:
    model, ids = drt(2), tokens(80)
    cache = model.new_cache()
    with torch.inference_mode():
        model.read(ids[:, :read], cache)
    parts = [logits_of(model, piece, past_key_values=cache) for piece in ids[:, read:].split(13, dim=1)]
    assert_same(torch.cat(parts, dim=1), logits_of(model, ids)[:, read:])


def test_a_reordered_branch_does_not_touch_its_parent() -> None:
    model = drt()
    cache = model.new_cache()
    model.read(tokens(22), cache)
    before, branch = state(cache), cache.branch(3)
    model.read(tokens(9, batch=3, seed=1), branch)
    branch.reorder_cache(torch.tensor([1, 1, 2]))
    model.read(tokens(9, batch=3, seed=2), branch)
    assert_unchanged(cache, before)
