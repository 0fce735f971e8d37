"""Selecting chunks: the choice, its ties and its noise; weights and scores with their gradients."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.budgets import (
    SHARP,
    assert_autocast_changes_nothing,
    assert_equals_the_oracle,
    assert_low_precision_within_budget,
    assert_same_bits,
    assert_same_in_float64,
    values_and_gradients,
)
from trailmark.ops import fold_seed, gumbel_noise, select_chunks

module = importlib.import_module("trailmark.ops.selection.torch_path")


@dataclass(frozen=True)
class Case:
    B: int = 2
    N: int = 3
    J: int = 2  # 0: one selection for all heads
    E: int = 3
    M: int = 6
    K: int = 2
    noisy: bool = False
    bounds_per_row: bool = True
    recency: float = 0.0
    seed: int = 0

    def make(self) -> tuple[list[Tensor], dict[str, Any]]:
        """([query, landmarks], the rest); some queries have no candidate, some fewer than K."""
        random = torch.Generator().manual_seed(self.seed)
        heads = (self.J,) if self.J else ()
        query = torch.randn(self.B, self.N, *heads, self.E, dtype=torch.float64, generator=random)
        landmarks = torch.randn(self.B, self.M, *heads, self.E, dtype=torch.float64, generator=random)
        bounds = (self.B, self.N) if self.bounds_per_row else (self.N,)
        rest = {
            "num_retrieved": self.K,
            "num_candidates": torch.randint(0, self.M + 1, bounds, generator=random),
            "first_candidate": torch.randint(0, self.M // 2 + 1, bounds, generator=random),
            "noise_seed": torch.arange(self.B) + self.seed if self.noisy else None,
            "recency": self.recency,
        }
        return [query, landmarks], rest


cases = st.builds(
    Case,
    B=st.integers(1, 2),
    N=st.integers(1, 3),
    J=st.integers(0, 2),
    E=st.integers(1, 4),
    M=st.integers(0, 5),
    K=st.integers(1, 6),
    noisy=st.booleans(),
    bounds_per_row=st.booleans(),
    recency=st.sampled_from([0.0, 0.7]),
    seed=st.integers(0, 999),
)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the largest block, with merging as often as there is anything to merge."""

    def of(chunks: int) -> None:
        monkeypatch.setattr(module, "_BLOCK_CHUNKS", chunks)
        monkeypatch.setattr(module, "_UNMERGED", 2)

    return of


def cut(table: Tensor, *at: int) -> list[Tensor]:
    """The table in segments that end at the given chunks and at the last."""
    ends = [*at, table.shape[1]]
    return [table[:, first:last] for first, last in zip([0, *at], ends, strict=True)]


def weights_and_scores(query: Tensor, landmarks: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
    """The differentiable outputs; 0 instead of -inf, whose differences are NaN."""
    selection = select_chunks(query, landmarks, **rest)
    return selection.weights, selection.scores.masked_fill(selection.indices < 0, 0)


def weighed(indices: Tensor, query: Tensor, landmarks: Tensor) -> tuple[Tensor, Tensor]:
    """The same of given chunks [B, N, J, K], by the equations."""
    dtype, missing = torch.promote_types(query.dtype, torch.float32), indices < 0
    scores = torch.einsum("bnje,bmje->bnjm", query.to(dtype), landmarks.to(dtype)) / query.shape[-1] ** 0.5
    scores = scores.gather(-1, indices.clamp(min=0)).masked_fill(missing, -torch.inf)
    weights = scores.masked_fill(missing.all(-1, keepdim=True), 0).softmax(-1).masked_fill(missing, 0)
    return weights, scores.masked_fill(missing, 0)


def choose(scores: Tensor, K: int, **rest: Any) -> Tensor:
    """The selection [N, K] under given scores [N, M]: queries are unit vectors, landmarks score columns."""
    N, M = scores.shape
    rest = {"num_candidates": torch.full((N,), M)} | rest
    queries = torch.eye(N, dtype=scores.dtype)[None]
    return select_chunks(queries, scores.T[None], K, scale=1, **rest).indices[0]


@settings(max_examples=20)
@given(cases)
@example(Case(M=0))
@example(Case(M=1, K=3, J=0))
def test_gradcheck(case: Case) -> None:
    inputs, rest = case.make()
    leaves = [x.requires_grad_() for x in inputs]
    torch.autograd.gradcheck(partial(weights_and_scores, **rest), leaves, fast_mode=True)


@settings(max_examples=80)
@given(cases)
@example(Case(M=0))
@example(Case(M=0, J=0, K=3, noisy=True))
@example(Case(M=200, N=9, K=8, noisy=True))
@example(Case(M=2048, N=9, K=8, J=0))  # the best by groups
@example(Case(M=1 << 15, N=1, K=30, noisy=True))  # two blocks
def test_equals_the_oracle_in_float64(case: Case) -> None:
    inputs, rest = case.make()
    fast, oracle = (select_chunks(*inputs, **rest, implementation=name) for name in (None, "reference"))
    assert fast.indices.dtype == torch.int64
    assert torch.equal(fast.indices, oracle.indices)
    missing = fast.indices < 0
    assert (fast.scores[missing] == -torch.inf).all()
    assert not fast.weights[missing].any()
    ways = (partial(weights_and_scores, implementation=name, **rest) for name in (None, "reference"))
    assert_equals_the_oracle(*ways, *inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_budget(dtype: torch.dtype) -> None:
    (query, landmarks), rest = Case(N=9, E=64, M=40, K=8, seed=1).make()
    for sharpness in (1, SHARP):
        inputs = [sharpness * query.to(dtype), landmarks.to(dtype)]
        # the budget speaks of equal selections
        exact = select_chunks(*(x.double() for x in inputs), **rest)
        assert torch.equal(select_chunks(*inputs, **rest).indices, exact.indices)
        fast = partial(weights_and_scores, implementation="torch", **rest)
        oracle = partial(weighed, exact.indices)
        assert_low_precision_within_budget(fast, oracle, *inputs)


# The choice


@settings(max_examples=80)
@given(
    scores=st.lists(st.integers(0, 2), min_size=1, max_size=12),  # hardly any without ties
    K=st.integers(1, 14),
    first=st.integers(0, 12),
    end=st.integers(0, 12),
)
@example(scores=[1, 2, 0, 2, 1, 1, 1, 2, 1, 1], K=5, first=0, end=10)
def test_the_best_candidates_and_of_equals_the_earlier(
    scores: list[int], K: int, first: int, end: int
) -> None:
    M = len(scores)
    first, end = min(first, M), min(end, M)
    best = sorted(range(first, end), key=lambda m: (-scores[m], m))[:K]
    expected = sorted(best) + [-1] * (K - len(best))
    for implementation in ("torch", "reference"):
        chosen = choose(
            torch.tensor([scores], dtype=torch.float64),
            K,
            num_candidates=torch.tensor([end]),
            first_candidate=torch.tensor([first]),
            implementation=implementation,
        )
        assert chosen.tolist() == [expected]


@pytest.mark.parametrize("size", [2, 16, 512])
def test_of_equals_in_several_blocks_the_earlier(size: int, blocks: Callable[[int], None]) -> None:
    scores = torch.randint(0, 9, (12, 1024), generator=torch.Generator().manual_seed(size)).double()
    scores[:4, 40:] = 0  # the last place is contested by few, by many
    scores[4:6] = 1  # and by all
    blocks(size)
    for K in (1, 5, 60):
        order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :K]
        assert torch.equal(choose(scores, K), order.sort(dim=-1).values)
        ours, theirs = (
            choose(scores, K, num_candidates=torch.arange(12) * 90, first_candidate=70, implementation=name)
            for name in ("torch", "reference")
        )
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("E", [3, 12, 64, 96])
@pytest.mark.parametrize("K", [4, 9])
def test_whole_numbers_that_score_the_same_select_the_earlier(E: int, K: int) -> None:
    """Whatever the scale, which is no whole number: those of equal sums are equal scores."""
    generator = torch.Generator().manual_seed(E)
    landmarks, query = (torch.randint(-2, 3, (1, n, E), generator=generator).float() for n in (1500, 20))
    ours, theirs = (
        select_chunks(query, landmarks, K, torch.full((20,), 1500), implementation=name)
        for name in ("torch", "reference")
    )
    assert torch.equal(ours.indices, theirs.indices)


@pytest.mark.parametrize("M", [9, 1000, 50_000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_many_equal_scores_select_the_earliest(M: int, dtype: torch.dtype) -> None:
    scores = torch.zeros(2, M, dtype=dtype)
    scores[1, [3, M - 1]] = 1  # 2 places are clear, 6 contested
    assert choose(scores, 8).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, M - 1]]


@pytest.mark.parametrize("implementation", ["torch", "reference"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("size", [2, 100])
def test_a_chunk_that_is_no_candidate_is_not_selected_whatever_it_holds(
    noisy: bool, poison: float, implementation: str, size: int, blocks: Callable[[int], None]
) -> None:
    """Chunks to come and chunks before the first; with ties, whose resolution they must not touch either."""
    blocks(size)
    (query, landmarks), rest = Case(B=1, N=4, J=0, M=9, noisy=noisy).make()
    landmarks[:, 3:6] = landmarks[:, 3:4]
    rest |= {"num_candidates": torch.arange(4, 8), "first_candidate": 2, "implementation": implementation}
    before = select_chunks(query, landmarks, **rest)
    landmarks = landmarks.clone()
    landmarks[:, [0, 1, 7, 8]] = poison
    for table in (landmarks, cut(landmarks, 1, 4), cut(landmarks, 2, 7)):
        assert_same_bits(select_chunks(query, table, **rest), before)


def test_what_stands_past_each_rows_own_end_is_never_looked_at() -> None:
    """Buffers [B, capacity] of a batch whose rows hold different numbers of chunks."""
    (query, landmarks), _ = Case(B=3, N=2, J=0, M=40, K=4).make()
    counts = torch.tensor([3, 40, 17])
    rest = {"num_retrieved": 4, "num_candidates": counts[:, None].expand(3, 2)}
    before = select_chunks(query, landmarks, **rest)
    for poison in (torch.nan, torch.inf, -torch.inf):
        beyond = (torch.arange(40) >= counts[:, None])[..., None]
        table = landmarks.masked_fill(beyond, poison)
        assert_same_bits(select_chunks(query, table, **rest), before)
        assert_same_bits(select_chunks(query, cut(table, 16, 20), **rest), before)


@pytest.mark.parametrize("J", [0, 2])
def test_gradients_know_nothing_of_what_is_no_candidate(J: int) -> None:
    """Also where places stay empty, and chunk 0 is one of those."""
    (query, landmarks), rest = Case(B=1, N=2, J=J, M=9, K=4).make()
    rest |= {"num_candidates": torch.tensor([2, 8]), "first_candidate": torch.tensor([2, 6])}
    before, after = (
        values_and_gradients(partial(weights_and_scores, **rest), query, table)
        for table in (landmarks, landmarks.index_fill(1, torch.tensor([0, 5, 8]), torch.nan))
    )
    assert_same_bits(before, after)


@pytest.mark.parametrize("implementation", ["reference", "torch"])
def test_chunks_that_say_the_same_are_weighed_by_their_age(implementation: str) -> None:
    """Counted from the last that may be selected, in its document."""
    select = partial(select_chunks, recency=1.0, implementation=implementation)
    chosen = select(torch.zeros(1, 1, 2), torch.ones(1, 7, 2), 3, torch.tensor([6]), 2)
    assert chosen.indices.tolist() == [[[3, 4, 5]]]
    by_age = torch.tensor([1 / 3, 1 / 2, 1])
    assert float((chosen.weights - by_age / by_age.sum()).abs().max()) < 1e-6


def test_a_number_as_first_candidate() -> None:
    assert choose(torch.tensor([[9.0, 8, 1, 2]]), 2, first_candidate=1).tolist() == [[1, 3]]


def test_given_indices_are_scored_and_weighed() -> None:
    (query, landmarks), _ = Case(B=1, N=1, J=0, E=2).make()
    indices = torch.tensor([[[1, 4, -1]]])
    selection = select_chunks(query, landmarks, 3, torch.tensor([0]), indices=indices)
    scores = (query[0] * landmarks[0, [1, 4]]).sum(-1) / math.sqrt(2)
    assert torch.equal(selection.indices, indices)
    assert_same_in_float64(selection.scores[0, 0, :2], scores)
    assert_same_in_float64(selection.weights[0, 0, :2], scores.softmax(-1))
    assert selection.scores[0, 0, 2] == -torch.inf
    assert selection.weights[0, 0, 2] == 0


@settings(max_examples=20)
@given(cases)
def test_giving_the_found_indices_changes_nothing(case: Case) -> None:
    inputs, rest = case.make()
    found = select_chunks(*inputs, **rest)
    again = select_chunks(*inputs, **rest, indices=found.indices)
    assert_same_bits(found, again)


def test_no_gradient_is_missing_where_nothing_is_selected() -> None:
    for M in (0, 4):
        (query, landmarks), rest = Case(M=M).make()
        rest["num_candidates"] = torch.zeros(3, dtype=torch.int64)
        leaves = [query.requires_grad_(), landmarks.requires_grad_()]
        selection = select_chunks(*leaves, **rest)
        assert (selection.indices == -1).all()
        selection.weights.sum().backward()
        for leaf in leaves:  # zeros, not None: DDP waits for every gradient
            assert leaf.grad is not None, f"M = {M}"
            assert torch.equal(leaf.grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("empty", ["B", "N"])
def test_empty_batches(empty: str) -> None:
    inputs, rest = Case(**{empty: 0}).make()
    selection = select_chunks(*inputs, **rest)
    assert selection.indices.shape == selection.weights.shape == (*inputs[0].shape[:3], 2)


# Noise


def noisy_case() -> tuple[Tensor, Tensor, dict[str, Any]]:
    (query, landmarks), rest = Case(B=4, N=9, M=30, K=4, E=8, noisy=True).make()
    return query, landmarks, rest


def test_noise_enters_the_choice_and_never_the_weights() -> None:
    query, landmarks, rest = noisy_case()
    noisy = select_chunks(query, landmarks, **rest)
    quiet = select_chunks(query, landmarks, **rest | {"noise_seed": None})
    assert not torch.equal(noisy.indices, quiet.indices)
    scores = torch.einsum("bnje,bmje->bnjm", query, landmarks) / math.sqrt(8)
    missing = noisy.indices < 0
    selected = scores.gather(-1, noisy.indices.clamp(min=0)).masked_fill(missing, -torch.inf)
    assert_same_in_float64(noisy.weights, selected.softmax(-1).nan_to_num())
    # equal bits: no noise is added and taken away again
    assert_same_bits(noisy, select_chunks(query, landmarks, **rest, indices=noisy.indices))


def test_a_narrow_seed_draws_the_same_noise() -> None:
    query, landmarks, rest = noisy_case()
    narrow = rest | {"noise_seed": rest["noise_seed"].to(torch.int32)}
    assert_same_bits(select_chunks(query, landmarks, **narrow), select_chunks(query, landmarks, **rest))
    assert torch.equal(fold_seed(torch.tensor([7], dtype=torch.int32), 3), fold_seed(7, torch.tensor([3])))


def test_noise_decides_where_every_place_is_contested(blocks: Callable[[int], None]) -> None:
    """Orthogonal vectors, so long that their scores, all 0, lie within rounding of each other."""
    blocks(7)
    query, landmarks = torch.tensor([1e4, 0]).expand(2, 3, 2), torch.tensor([0, 1e4]).expand(2, 40, 2)
    seeds = torch.tensor([3, 4])
    chosen = select_chunks(query, landmarks, 5, torch.full((3,), 40), noise_seed=seeds).indices
    noise = gumbel_noise(seeds, 0, 3, 1, 40)[:, :, 0]
    assert torch.equal(chosen, noise.topk(5).indices.sort(dim=-1).values)


@pytest.mark.parametrize("implementation", ["torch", "reference"])
def test_the_noise_of_a_stretch_is_that_of_all_queries(implementation: str) -> None:
    query, landmarks, rest = noisy_case()
    rest["implementation"] = implementation
    every = ("num_candidates", "first_candidate")
    whole = select_chunks(query, landmarks, **rest)
    own = rest | {name: rest[name][:, 4:] for name in every}
    stretch = select_chunks(query[:, 4:], landmarks, **own, first_query=4)
    assert torch.equal(stretch.indices, whole.indices[:, 4:])
    assert not torch.equal(select_chunks(query[:, 4:], landmarks, **own).indices, stretch.indices)


def test_noisy_choice_follows_the_softmax() -> None:
    """argmax of scores plus Gumbel noise is a draw from their softmax."""
    N, scores = 20_000, torch.tensor([0.0, 1, -1, 2])
    candidates, seed = torch.full((N,), 4), torch.tensor([3])
    chosen = select_chunks(torch.ones(1, N, 1), scores[None, :, None], 1, candidates, noise_seed=seed).indices
    share, p = chosen.flatten().bincount() / N, scores.softmax(-1)
    assert ((share - p).abs() < 4 * (p * (1 - p) / N).sqrt()).all()


# Precision and sizes


@pytest.mark.parametrize("implementation", ["torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_autocast_leaves_the_precision_alone(dtype: torch.dtype, implementation: str) -> None:
    (query, landmarks), rest = Case(N=40, E=16, M=200, K=8).make()  # in bfloat16 another choice
    op = partial(weights_and_scores, implementation=implementation, **rest)
    assert_autocast_changes_nothing(op, query.to(dtype), landmarks.to(dtype))
    assert select_chunks(query.to(dtype), landmarks.to(dtype), **rest).scores.dtype == torch.float32


@pytest.mark.parametrize("wide", ["query", "landmarks"])
def test_the_widest_input_sets_the_precision(wide: str) -> None:
    (query, landmarks), rest = Case(N=40, E=16, M=200, K=8).make()
    mixed = [x if name == wide else x.bfloat16() for name, x in (("query", query), ("landmarks", landmarks))]
    exact = select_chunks(*(x.double() for x in mixed), **rest)
    assert_same_bits(select_chunks(*mixed, **rest), exact)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_narrow_indices_do_not_overflow(dtype: torch.dtype, shared: bool) -> None:
    (query, landmarks), _ = Case(N=1, M=20_000, J=2).make()
    if shared:
        landmarks = landmarks[:1].expand_as(landmarks)
    indices = torch.full((2, 1, 2, 1), 19_999)
    wide, narrow = (
        select_chunks(query, landmarks, 1, torch.tensor([0]), indices=x) for x in (indices, indices.to(dtype))
    )
    assert torch.equal(narrow.scores, wide.scores)


# torch.compile


@pytest.mark.parametrize(("kind", "J"), [("one", 2), ("shared", 0), ("segments", 0)])
@pytest.mark.sampled(3)
def test_compiled_without_a_graph_break(kind: str, J: int) -> None:
    (query, landmarks), rest = Case(J=J, M=20, noisy=True).make()
    num_candidates = rest.pop("num_candidates")

    def op(q: Tensor, l: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        tables: Any = {"one": l, "shared": l[:1].expand_as(l), "segments": cut(l, 8, 8)}[kind]
        return weights_and_scores(q, tables, num_candidates=ends, **rest)

    torch.compiler.reset()
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    for more in (0, 1):  # candidates are values, not constants of the graph
        ends = (num_candidates + more).clamp(max=20)
        ours, theirs = (values_and_gradients(partial(f, ends=ends), query, landmarks) for f in (compiled, op))
        assert_same_bits(ours, theirs)


@pytest.mark.slow
def test_compiled_for_one_shape_then_for_another() -> None:
    """Sizes that the compiler takes for variables then, beside bounds whose sizes it takes for constants."""
    torch.compiler.reset()
    compiled = torch.compile(select_chunks, fullgraph=True, backend="aot_eager")
    for case in (Case(J=0), Case(J=2), Case(J=2, N=4, M=9)):
        inputs, rest = case.make()
        assert_same_bits(compiled(*inputs, **rest), select_chunks(*inputs, **rest))


def test_the_op_that_compilation_sees() -> None:
    (query, landmarks), rest = Case(M=20, noisy=True).make()
    bounds = rest["first_candidate"], rest["num_candidates"]
    inputs = query, cut(landmarks, 8), 2, *bounds, rest["noise_seed"], 0.5, 1.0, 0, False
    torch.library.opcheck(torch.ops.trailmark.select_chunks_search, inputs)


# Errors

QUERY, LANDMARKS = torch.zeros(2, 3, 4), torch.zeros(2, 5, 4)
CANDIDATES = torch.tensor([0, 1, 5])


@pytest.mark.parametrize(
    ("argument", "wrong", "message"),
    [
        ("query", QUERY[0], r"^query: .*\[B, N, E\]"),
        ("landmarks", LANDMARKS[:, :, None], "^landmarks: "),
        ("landmarks", LANDMARKS[..., :3], "^landmarks: "),
        ("landmarks", LANDMARKS[:1], "^landmarks: "),
        ("landmarks", [LANDMARKS, LANDMARKS[..., :3]], r"^landmarks\[1\]: "),
        ("landmarks", [LANDMARKS, LANDMARKS[0]], r"^landmarks\[1\]: .*dimensions"),
        ("landmarks", [LANDMARKS[:, :2], LANDMARKS[:, 3:]], "^num_candidates: .*at most M = 4"),
        ("num_retrieved", 0, "^num_retrieved: .*at least 1, got 0"),
        ("recency", -1.0, "^recency: .*at least 0, and finite, got -1"),
        ("recency", math.inf, "^recency: .*at least 0, and finite, got inf"),
        ("num_candidates", CANDIDATES[:2], "^num_candidates: "),
        ("num_candidates", CANDIDATES.float(), "^num_candidates: .*integer"),
        ("num_candidates", CANDIDATES + 1, "^num_candidates: .*at most M = 5"),
        ("first_candidate", CANDIDATES[:2], "^first_candidate: "),
        ("first_candidate", 0.5, "^first_candidate: .*integer"),
        ("first_candidate", -1, "^first_candidate: .*no negative"),
        ("indices", torch.zeros(2, 3, 3, dtype=torch.int64), "^indices: "),
        ("indices", torch.full((2, 3, 2), 5), "^indices: .*below M = 5"),
        ("indices", torch.full((2, 3, 2), -2), "^indices: .*or -1 for none, got -2"),
        ("indices", torch.zeros(2, 3, 2), "^indices: .*int64"),
        ("noise_seed", torch.tensor([1]), r"^noise_seed: .*\[B\]"),
        ("noise_seed", torch.zeros(2), "^noise_seed: .*integer"),
        ("implementation", "flash", "^implementation: .*'torch', 'triton', got 'flash'"),
    ],
)
def test_errors_name_the_argument(argument: str, wrong: Any, message: str) -> None:
    right = {"query": QUERY, "landmarks": LANDMARKS, "num_retrieved": 2, "num_candidates": CANDIDATES}
    select_chunks(**right)
    with pytest.raises(ValueError, match=message):
        select_chunks(**right | {argument: wrong})


@settings(max_examples=40)
@given(M=st.integers(2, 70), E=st.integers(1, 70), N=st.integers(1, 5), seed=st.integers(0, 2**16))
def test_equal_chunks_tie_though_a_gemm_rounds_them_differently(M: int, E: int, N: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, N, E, generator=generator)
    landmarks = torch.randn(1, 1, E, generator=generator).repeat(1, M, 1)
    K = 1 + seed % M
    for table in (landmarks, cut(landmarks, M // 3, M // 2)):
        found = select_chunks(query, table, K, torch.tensor([M] * N))
        assert found.indices.tolist() == [[list(range(K))] * N]
