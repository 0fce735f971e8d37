"""Search over landmarks: exact against brute force, and the index of faiss against exact search."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.budgets import assert_same_bits
from tests.ops.selection.test_api import cut
from trailmark.memory.search import ExactSearch, FaissSearch
from trailmark.ops import ChunkSelection, select_chunks

E, K = 64, 8


@settings(max_examples=40)
@given(
    B=st.integers(1, 3),
    n=st.integers(1, 3),
    M=st.integers(0, 60),
    at=st.lists(st.integers(0, 60), max_size=3),
    shared=st.booleans(),
    seed=st.integers(0, 99),
)
def test_exact_search_is_brute_force(B: int, n: int, M: int, at: list[int], shared: bool, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    query = torch.randn(B, n, 5, dtype=torch.float64, generator=random)
    landmarks = torch.randn(1 if shared else B, M, 5, dtype=torch.float64, generator=random).expand(B, M, 5)
    ends = torch.randint(0, M + 1, (B, n), generator=random)
    blocks = cut(landmarks, *sorted(min(x, M) for x in at))
    found = ExactSearch().select(query, blocks, 3, ends, 0.5).indices
    scores = 0.5 * torch.einsum("bne,bme->bnm", query, landmarks)
    for b in range(B):
        for i in range(n):
            end = int(ends[b, i])
            best = sorted(range(end), key=lambda m: -scores[b, i, m])[:3]
            assert found[b, i].tolist() == sorted(best) + [-1] * (3 - len(best))


# The index


@settings(max_examples=40)
@given(
    M=st.integers(0, 60),
    at=st.lists(st.integers(0, 60), max_size=3),
    age=st.booleans(),
    seed=st.integers(0, 99),
)
def test_what_is_new_is_searched_as_among_all(M: int, at: list[int], age: bool, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    query, landmarks = (torch.randn(2, n, 5, dtype=torch.float64, generator=random) for n in (3, M))
    ends, first = (torch.randint(0, M + 1, (2, 3), generator=random) for _ in range(2))
    blocks = cut(landmarks, *sorted(min(x, M) for x in at))
    found = FaissSearch._late(query, blocks, 3, ends, first, 0.5, 0.1 * age)
    wanted = select_chunks(query, blocks, 3, ends, first, scale=0.5, recency=0.1 * age).indices
    assert torch.equal(found, wanted)


@pytest.fixture(scope="module")
def faiss() -> Any:
    return pytest.importorskip("faiss")


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True) * E**0.5


def clustered(M: int, num_queries: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(landmarks [1, M, E], queries [1, n, E]) around random directions, 128 landmarks to each."""
    random = torch.Generator().manual_seed(seed)
    centres = torch.randn(max(8, M // 128), E, generator=random)

    def draw(n: int) -> Tensor:
        which = torch.randint(0, len(centres), (n,), generator=random)
        return unit(centres[which] + 0.7 * torch.randn(n, E, generator=random))[None]

    return draw(M), draw(num_queries)


def recall(found: ChunkSelection, exact: ChunkSelection) -> float:
    """The share of what exact search selects that was found."""
    return float((found.indices[..., None] == exact.indices[..., None, :]).any(-1).float().mean())


def both(
    search: FaissSearch, query: Tensor, blocks: list[Tensor], ends: Tensor | None = None
) -> tuple[ChunkSelection, ChunkSelection]:
    """What the index and exact search select."""
    M = sum(block.shape[1] for block in blocks)
    ends = torch.full((query.shape[1],), M) if ends is None else ends
    found, exact = (one.select(query, blocks, K, ends, 0.1) for one in (search, ExactSearch()))
    # whatever was found is scored and weighed exactly, and exists for its query
    assert_same_bits(found, select_chunks(query, blocks, K, ends, indices=found.indices, scale=0.1))
    assert (found.indices < ends[..., None]).all()
    assert (found.indices.diff(dim=-1) > 0)[found.indices[..., 1:] >= 0].all()
    return found, exact


@pytest.mark.usefixtures("faiss")
def test_the_newest_are_found_for_their_age() -> None:
    """Which the index does not know: chosen are some that are neither among the nearest nor among the last."""
    landmarks, query = clustered(8192, 20)
    ends = torch.cat(
        [torch.arange(5000, 5019), torch.tensor([8192])]
    )  # the last has the index hold nearly all
    search = FaissSearch(min_chunks=1, batch_chunks=64)
    found, exact = (
        one.select(query, [landmarks], K, ends, 0.08, recency=1.0) for one in (search, ExactSearch())
    )
    assert_same_bits(found, exact)
    nearest = ExactSearch().select(query, [landmarks], 4 * K, ends, 0.08).indices
    near = (exact.indices[..., None] == nearest[..., None, :]).any(-1)
    last = exact.indices >= ends[:, None] - 4 * K
    assert not (near | last).all()


@pytest.mark.usefixtures("faiss")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recall_is_what_the_docstring_says(dtype: torch.dtype) -> None:
    landmarks, query = clustered(32_768, 128)
    found, exact = both(search := FaissSearch(), query.to(dtype), [landmarks.to(dtype)])
    assert search.num_indexed == 32_768
    assert recall(found, exact) >= 0.99


@pytest.mark.slow
@pytest.mark.usefixtures("faiss")
@pytest.mark.parametrize(("kind", "expected"), [("clustered", 0.99), ("random", 0.5), ("needle", 0.98)])
def test_recall_over_262_144_landmarks(kind: str, expected: float) -> None:
    landmarks, query = clustered(262_144, 256)
    random = torch.Generator().manual_seed(1)
    if kind != "clustered":
        landmarks, query = (unit(torch.randn(x.shape, generator=random)) for x in (landmarks, query))
    if kind == "needle":
        needles = torch.randint(0, 262_144, (256,), generator=random)
        query = unit(landmarks[:, needles] + 0.5 * query)
        found, _ = both(FaissSearch(), query, [landmarks])
        assert (found.indices[0] == needles[:, None]).any(-1).float().mean() >= expected
    else:
        assert recall(*both(FaissSearch(), query, [landmarks])) >= expected


SMALL = {"min_chunks": 1024, "batch_chunks": 512, "num_probes": 32}


@pytest.mark.usefixtures("faiss")
def test_a_memory_that_grows_is_found_as_well_as_one_that_is_whole() -> None:
    landmarks, query = clustered(16_384, 128)
    whole = recall(*both(FaissSearch(**SMALL), query, [landmarks]))
    search = FaissSearch(**SMALL)
    for M in range(100, 16_384, 1234):
        assert recall(*both(search, query[:, :1], cut(landmarks[:, :M], M // 2))) > 0
        assert M - search.num_indexed < SMALL["min_chunks"]
        assert search.num_indexed % 64 == 0
    # trained first on 1,334 chunks, then on the first 4 times as many
    assert search._index.nlist == round(2 * math.sqrt(100 + 5 * 1234))
    grown = recall(*both(search, query, cut(landmarks, 1000, 9000)))
    assert 1 - grown <= 2 * (1 - whole) + 1 / 128
    # the last chunks are not in the index, and found all the same
    tail = landmarks[:, search.num_indexed :]
    assert tail.shape[1] > 0
    found, _ = both(search, tail, [landmarks])
    last = torch.arange(search.num_indexed, 16_384)
    assert (found.indices[0] == last[:, None]).any(-1).all()


@pytest.mark.usefixtures("faiss")
def test_nothing_depends_on_chunks_to_come() -> None:
    # without structure: the index misses much, and exact search can be told from it
    random = torch.Generator().manual_seed(0)
    landmarks, query = (unit(torch.randn(1, n, E, generator=random)) for n in (6000, 40))
    ends = torch.linspace(0, 5000, 40).long()
    (before, exact), poisoned = both(FaissSearch(**SMALL), query, [landmarks], ends), landmarks.clone()
    assert 0 < recall(before, exact) < 1
    few = ends < SMALL["min_chunks"]
    assert torch.equal(before.indices[:, few], exact.indices[:, few])
    poisoned[:, 5000:] = torch.nan
    after, _ = both(FaissSearch(**SMALL), query, [poisoned], ends)
    assert_same_bits(after, before)


@pytest.mark.usefixtures("faiss")
def test_a_small_memory_is_searched_exactly() -> None:
    landmarks, query = clustered(1024, 50)
    search = FaissSearch(**SMALL)
    for M in (0, 5, 1023):
        assert_same_bits(*both(search, query, cut(landmarks[:, :M], M // 3)))
        assert search.num_indexed == 0
    both(search, query, [landmarks])
    assert search.num_indexed == 1024
    # fewer chunks than lists were asked for
    both(small := FaissSearch(min_chunks=64, num_lists=4096), query, [landmarks[:, :100]])
    assert small.num_indexed == 64


@pytest.mark.usefixtures("faiss")
def test_a_query_whose_lists_hold_too_little_is_searched_exactly() -> None:
    random = torch.Generator().manual_seed(0)
    landmarks, query = (unit(torch.randn(1, n, E, generator=random)) for n in (1088, 50))
    search = FaissSearch(min_chunks=1024, num_lists=1024, num_probes=1)  # a chunk a list
    found, exact = both(search, query, [landmarks])
    assert search.num_indexed == 1088
    assert_same_bits(found, exact)


@pytest.mark.usefixtures("faiss")
def test_equal_landmarks_select_the_earlier() -> None:
    landmarks, query = clustered(4096, 30)
    landmarks[:, 2000:2020] = landmarks[:, 2000:2001]
    found, _ = both(FaissSearch(**SMALL), unit(landmarks[:, 2000:2001] + 0.1 * query), [landmarks])
    assert (found.indices == torch.arange(2000, 2000 + K)).all()


@pytest.mark.usefixtures("faiss")
def test_a_memory_that_was_cut_or_written_again_is_noticed() -> None:
    one, query = clustered(8192, 64)
    other, _ = clustered(8192, 1, seed=7)
    text = one.clone()
    search = FaissSearch(**SMALL)

    def check(M: int) -> None:
        # the landmarks themselves ask: a chunk that is not as the index has it is not found
        own = text[:, :M:37]
        found, _ = both(search, own, cut(text[:, :M], M // 3))
        assert (found.indices[0] == torch.arange(0, M, 37)[:, None]).any(-1).float().mean() >= 0.99

    check(8192)
    check(5000)  # cut
    check(8192)  # and come back
    assert search.num_indexed == 8192
    text[:, 5000:5100] = other[:, 5000:5100]  # cut, and another text goes on
    check(5100)
    assert 4800 <= search.num_indexed <= 5000
    text[:, 5100:] = other[:, 5100:]
    check(8192)
    text[:, 3000:] = one[:, 3000:]  # both at once
    check(8192)
    text[:] = other  # another text
    check(8192)
    # the same search for a memory of another size
    ours, theirs = (both(x, query[..., :8], [text[..., :8]])[0] for x in (search, FaissSearch(**SMALL)))
    assert_same_bits(ours, theirs)
    text[:, 100:200] = one[:, 100:200]  # in its midst
    search.forget()
    check(8192)


@pytest.mark.usefixtures("faiss")
def test_branches_share_an_index_and_have_chunks_of_their_own() -> None:
    landmarks, query = clustered(4096, 3 * 5)
    query = query.view(3, 5, E)
    own, _ = clustered(30, 1, seed=3)
    own = own.view(3, 10, E)
    search = FaissSearch(**SMALL)
    blocks = [*cut(landmarks.expand(3, -1, -1), 1500), own]
    found, exact = both(search, query, blocks)
    assert recall(found, exact) >= 0.99
    assert search.num_indexed == 4096
    found, _ = both(search, own, blocks)
    assert (found.indices == torch.arange(4096, 4106)[:, None]).any(-1).all()
    # each branch alone
    for b in range(3):
        alone, _ = both(search, query[b : b + 1], [landmarks, own[b : b + 1]])
        assert_same_bits(alone, ChunkSelection(*(x[b : b + 1] for x in both(search, query, blocks)[0])))


@pytest.mark.usefixtures("faiss")
def test_rows_with_texts_of_their_own_are_refused() -> None:
    landmarks, query = clustered(4, 4)
    landmarks, query = (x.view(2, 2, E) for x in (landmarks, query))
    with pytest.raises(ValueError, match=r"^blocks: expected one text .*, got a batch of 2"):
        FaissSearch().select(query, [landmarks], K, torch.tensor([2, 2]))


@pytest.mark.usefixtures("faiss")
@pytest.mark.parametrize("name", ["min_chunks", "batch_chunks", "num_lists", "num_probes", "overfetch"])
def test_numbers_below_1_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected at least 1, got 0"):
        FaissSearch(**{name: 0})


def test_without_faiss_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ValueError, match=r'^search: .*pip install "trailmark\[faiss\]"'):
        FaissSearch()
