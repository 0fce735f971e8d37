"""Sliding-window attention against its oracle: bands, positions, documents, precision, errors."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from tests.budgets import (
    SHARP,
    assert_all_same_in_float64,
    assert_autocast_changes_nothing,
    assert_equals_the_oracle,
    assert_low_precision_within_budget,
    assert_same_bits,
    assert_same_in_float64,
    assert_widest_input_sets_the_precision,
    values_and_gradients,
)
from trailmark.ops import alibi_slopes, sliding_window_attention

module = importlib.import_module("trailmark.ops.window.torch_path")
blocks_module = importlib.import_module("trailmark.ops.block_attention")


@dataclass(frozen=True)
class Case:
    B: int = 2
    T: int = 3
    carried: int = 0  # P - T
    J: int = 2
    g: int = 2  # query heads per key/value head
    D: int = 2
    window: int | None = 2
    alibi: bool = False
    positions: str = "none"  # "gaps": as a caller drops absent rows; "any": shuffled, repeated, unordered
    documents: str = (
        "none"  # "one": one tensor for queries and keys; "pair"; "pieces": one, each in one piece
    )
    with_lse: bool = False
    sinks: int = 0  # with positions: so many of the first keys
    asking: bool = False  # other queries for the sinks
    each: str = "all"  # "row", "batch": windows of each query, the same in all rows or not
    blocks: tuple[int, int] = (32, 256)  # of queries: small ones put many into a small case
    gemms: bool = True  # small blocks by GEMMs; otherwise all by scaled_dot_product_attention
    seed: int = 0

    def make(self) -> tuple[list[Tensor], dict[str, Any]]:
        """([q, k, v], the rest)."""
        random = torch.Generator().manual_seed(self.seed)
        normal = partial(torch.randn, dtype=torch.float64, generator=random)
        draw = partial(torch.randint, generator=random)
        B, T, P = self.B, self.T, self.T + self.carried
        q = normal(B, T, self.J * self.g, self.D)
        k, v = normal(2, B, P, self.J, self.D)
        rest: dict[str, Any] = {"window": self.window}
        if self.alibi:
            rest["alibi_slopes"] = alibi_slopes(self.J * self.g, torch.float64)
        if self.positions == "gaps":
            there = draw(0, 3, (B, P)) > 0
            keys = torch.where(there, there.cumsum(1), -1)
            rest["positions"] = keys[:, self.carried :], keys
        if (
            self.positions == "cache"
        ):  # sinks, absent keys, and the end of consecutive ones, as a cache has them
            n = min(self.sinks, self.carried)
            first = draw(0, 9, (B, 1))
            place = torch.arange(P - n) + first - (self.carried - n)
            place = torch.where(place >= draw(0, 3, (B, 1)), place, -1)
            ends = torch.arange(P - n) < P - n - draw(0, T, (B, 1))
            place = torch.where(ends, place, -1)
            sinks = torch.arange(n).expand(B, n)
            rest["positions"] = place[:, self.carried - n :], torch.cat([sinks, place], 1)
        if self.positions == "any":
            rest["positions"] = draw(-2, 2 * P + 1, (B, T)), draw(-2, 2 * P + 1, (B, P))
        if self.documents == "one":
            rest["document_ids"] = draw(0, 2, (B, P))
        if self.documents == "pieces":
            rest["document_ids"] = (draw(0, 4, (B, P)) == 0).cumsum(1) % 1000 - 2
        if self.documents == "pair":
            rest["document_ids"] = draw(0, 3, (B, T)), draw(0, 3, (B, P))
        if self.each != "all" and self.window is not None:
            rest["windows"] = draw(1, self.window + 1, (B if self.each == "batch" else 1, T))
        n = min(self.sinks, self.carried) if self.positions == "cache" else min(self.sinks, P)
        if n and self.window is not None:
            rest["num_sinks"] = n
            if self.asking:
                return [q, k, v, normal(q.shape)], rest
        return [q, k, v], rest

    def attend(self, implementation: str | None = None) -> Any:
        """The op on q, k, v; of the log-sum-exp the finite part, since differences of infinities are NaN."""
        _, rest = self.make()

        def op(
            q: Tensor, k: Tensor, v: Tensor, asking: Tensor | None = None
        ) -> Tensor | tuple[Tensor, Tensor]:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "_MIN_BLOCK", self.blocks[0])
                patch.setattr(module, "_MAX_BLOCK", self.blocks[1])
                if not self.gemms:
                    patch.setattr(blocks_module, "_SMALL_BLOCK", 0)
                out = sliding_window_attention(
                    q,
                    k,
                    v,
                    return_lse=self.with_lse,
                    implementation=implementation,
                    sink_queries=asking,
                    **rest,
                )
            if not self.with_lse:
                return out
            return out[0], out[1].masked_fill(out[1] == -torch.inf, 0)

        return op


def cases(longest: int, widest: int) -> st.SearchStrategy[Case]:
    small = st.integers(1, 2)
    return st.builds(
        Case,
        B=small,
        T=st.integers(1, longest),
        carried=st.integers(0, 5),
        J=small,
        g=small,
        D=small,
        window=st.none() | st.integers(1, widest),
        alibi=st.booleans(),
        positions=st.sampled_from(["none", "none", "gaps", "cache", "any"]),
        documents=st.sampled_from(["none", "none", "one", "pair", "pieces"]),
        with_lse=st.booleans(),
        sinks=st.integers(0, 3),
        asking=st.booleans(),
        each=st.sampled_from(["all", "all", "row", "batch"]),
        blocks=st.sampled_from([(32, 256), (1, 2), (2, 3), (5, 5)]),
        gemms=st.booleans(),
        seed=st.integers(0, 999),
    )


@settings(max_examples=20)
@given(cases(4, 4))
@example(Case(T=7, window=3, blocks=(2, 2), alibi=True))
@example(Case(T=7, window=3, blocks=(2, 2), alibi=True, gemms=False))
@example(Case(T=4, carried=1, positions="any", documents="pair", with_lse=True))
@example(Case(T=7, window=3, blocks=(2, 2), alibi=True, documents="pieces"))
@example(Case(T=7, window=None, blocks=(1, 2), documents="pieces", gemms=False))
@example(Case(T=9, window=2, blocks=(2, 2), sinks=2, asking=True))
@example(Case(T=9, window=2, blocks=(2, 2), sinks=1, documents="pieces", asking=True, seed=3))
@example(Case(T=6, carried=5, window=3, blocks=(2, 2), sinks=2, positions="cache", asking=True))
@example(Case(T=9, window=4, blocks=(2, 2), sinks=2, asking=True, each="batch"))
def test_gradcheck(case: Case) -> None:
    inputs, _ = case.make()
    torch.autograd.gradcheck(case.attend(), [x.requires_grad_() for x in inputs], fast_mode=True)


@settings(max_examples=150)
@given(cases(12, 14))
@example(Case(T=0, carried=3))
@example(Case(T=1, carried=600, window=512))
@example(Case(T=600, window=300, g=1, J=1))
@example(Case(T=70, window=1, alibi=True))
@example(Case(T=70, carried=9, window=40, alibi=True))
@example(Case(T=5, window=5))
@example(Case(T=5, window=9))
@example(Case(T=300, carried=7, window=11, positions="gaps", documents="one", with_lse=True))
@example(Case(T=300, window=40, alibi=True, documents="pieces"))
@example(Case(T=90, window=5, blocks=(2, 8), documents="pieces", seed=1))
@example(Case(T=90, window=None, blocks=(2, 8), alibi=True, documents="pieces"))
@example(Case(T=300, window=40, sinks=4))
@example(Case(T=300, window=40, sinks=4, asking=True))
@example(Case(T=300, window=40, sinks=4, alibi=True, carried=3))
@example(Case(T=300, window=5, sinks=3, documents="pieces"))
@example(Case(T=90, window=5, blocks=(4, 8), sinks=3, documents="pieces", asking=True, seed=1))
@example(Case(T=90, window=5, carried=12, blocks=(4, 8), sinks=3, positions="cache", asking=True))
@example(Case(T=90, window=9, carried=9, blocks=(4, 8), sinks=2, positions="cache", alibi=True, seed=2))
@example(Case(T=11, carried=4, J=1, window=1, positions="cache", sinks=2, seed=2))
@example(Case(T=300, carried=9, window=40, sinks=4, asking=True, each="batch", with_lse=True))
@example(Case(T=300, window=40, each="row", alibi=True))
@example(Case(B=1, T=300, window=600, each="batch", sinks=2))
@example(Case(T=90, window=9, carried=9, blocks=(4, 8), sinks=2, positions="cache", each="batch", seed=2))
@example(Case(T=90, window=9, documents="pieces", sinks=2, each="batch", blocks=(4, 8)))
@example(Case(T=1, carried=30, window=9, each="batch", with_lse=True))
def test_equals_the_oracle_in_float64(case: Case) -> None:
    inputs, _ = case.make()
    assert_equals_the_oracle(case.attend(), case.attend("reference"), *inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "case",
    [
        Case(T=70, carried=5, D=16, window=20, alibi=True),
        Case(T=70, carried=5, D=16, window=20, alibi=True, gemms=False),
        Case(T=70, D=16, window=None),
        Case(T=50, D=16, window=20, alibi=True, positions="gaps", documents="one", with_lse=True),
        Case(T=70, D=16, window=9, blocks=(4, 8), alibi=True, documents="pieces"),
        Case(T=70, D=16, window=9, sinks=3, asking=True),
        Case(T=70, D=16, window=9, blocks=(4, 8), sinks=2, documents="pieces"),
        Case(T=1, carried=30, D=16, window=9, sinks=3, positions="cache", asking=True, seed=1),
        Case(T=50, D=16, window=9, sinks=3, documents="one", asking=True, with_lse=True),
        Case(T=70, D=16, window=20, sinks=3, asking=True, with_lse=True, each="batch"),
    ],
)
def test_error_budget(case: Case, dtype: torch.dtype) -> None:
    q, *others = (x.to(dtype) for x in case.make()[0])
    out = case.attend("torch")(q, *others)
    assert (out[0] if case.with_lse else out).dtype == dtype
    for sharpness in (1, SHARP):
        assert_low_precision_within_budget(
            case.attend("torch"), case.attend("reference"), sharpness * q, *others
        )


def test_by_hand() -> None:
    q = torch.ones(1, 3, 1, 1, dtype=torch.float64)
    k = torch.tensor([0.0, 1, 2], dtype=torch.float64).view(1, 3, 1, 1)
    v = torch.tensor([1.0, 10, 100], dtype=torch.float64).view(1, 3, 1, 1)
    slope = torch.tensor([0.5], dtype=torch.float64)
    near, far = torch.ones(()).double(), torch.tensor(-1.5).double().exp()  # score 2 - 0, and 1 - 0.5 * 1
    out = sliding_window_attention(q, k, v, 2, alibi_slopes=slope)
    assert_same_in_float64(out[0, 0, 0, 0], v[0, 0, 0, 0])
    assert_same_in_float64(out[0, 2, 0, 0], (near * 100 + far * 10) / (near + far))


def test_sinks_by_hand() -> None:
    """A window of one and two sinks: the position itself, and the first two by queries of their own."""
    ones = torch.ones(1, 4, 1, 1, dtype=torch.float64)
    k = torch.tensor([0.0, 1, 7, 2], dtype=torch.float64).view(1, 4, 1, 1)
    v = torch.tensor([1.0, 10, 100, 1000], dtype=torch.float64).view(1, 4, 1, 1)
    for asking in (1.0, 0.5):
        out = sliding_window_attention(ones, k, v, 1, num_sinks=2, sink_queries=asking * ones)
        weights = torch.tensor([0.0, asking, 2], dtype=torch.float64).softmax(0)
        assert_same_in_float64(out[0, 3, 0, 0], weights @ v[0, [0, 1, 3], 0, 0])
        assert_same_in_float64(out[0, 0, 0, 0], v[0, 0, 0, 0])


def test_sinks_are_refused_without_a_window() -> None:
    (q, k, v), _ = Case(T=5).make()
    with pytest.raises(ValueError, match=r"^num_sinks: expected 0 without a window"):
        sliding_window_attention(q, k, v, None, num_sinks=1)
    with pytest.raises(ValueError, match=r"^num_sinks: expected at least 1 with sink_queries"):
        sliding_window_attention(q, k, v, 2, sink_queries=q)


@pytest.mark.parametrize("asking", [True, False])
def test_sinks_keep_the_fast_paths(monkeypatch: pytest.MonkeyPatch, asking: bool) -> None:
    """A band of positions, what a cache holds, and documents in one piece: none is compared with every key."""
    monkeypatch.setattr(module, "_by_query_block", None)
    for case in (
        Case(T=90, window=9, sinks=3),
        Case(T=90, window=9, carried=12, sinks=3, positions="cache"),
        Case(T=90, window=9, sinks=3, documents="pieces"),
    ):
        inputs, _ = replace(case, asking=asking).make()
        case.attend()(*inputs)


@pytest.mark.parametrize("asking", [True, False])
@pytest.mark.parametrize(("n", "window"), [(0, 5), (2, 5), (5, 3), (1, 1), (3, 40)])
def test_one_query_that_sees_every_key_needs_no_places(n: int, window: int, asking: bool) -> None:
    """As in a ring: sinks, then keys in any order, all of which the window shows."""
    (q, k, v), _ = Case(T=1, carried=n + window - 1).make()
    newest = n + window + 7
    ring = torch.tensor([newest - (newest - slot) % window for slot in range(window)])
    places = torch.tensor([[newest]] * 2), torch.cat([torch.arange(n), ring]).expand(2, -1)
    rest: dict[str, Any] = {"num_sinks": n, "return_lse": True}
    if asking and n:
        rest["sink_queries"] = torch.randn_like(q)
    told, untold = (sliding_window_attention(q, k, v, window, x, **rest) for x in (places, None))
    assert_all_same_in_float64(untold, told)


def test_alibi_slopes_are_geometric() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert torch.equal(alibi_slopes(3, torch.float64), torch.exp2(-8 * torch.arange(1, 4).double() / 3))


def test_interpolated_slopes_are_those_of_alibis_authors() -> None:
    """12 heads: those of 8, then the first, third, fifth and seventh of 16 (Press et al., 2022)."""
    exponents = [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]
    found = alibi_slopes(12, torch.float64, "interpolated")
    assert_same_in_float64(found, torch.tensor([2.0**-x for x in exponents], dtype=torch.float64))
    assert not torch.equal(found, alibi_slopes(12, torch.float64))
    assert alibi_slopes(3, torch.float64, "interpolated").tolist() == [2.0**-4, 2.0**-8, 2.0**-2]
    for heads in (1, 2, 4, 8, 16, 64):
        assert torch.equal(alibi_slopes(heads, rule="interpolated"), alibi_slopes(heads))
    for heads in range(1, 40):
        slopes = alibi_slopes(heads, torch.float64, "interpolated")
        assert slopes.shape == (heads,)
        assert len(set(slopes.tolist())) == heads
    with pytest.raises(ValueError, match="rule: expected 'geometric' or 'interpolated', got 'steep'"):
        alibi_slopes(4, rule="steep")


# Rows that see nothing


@pytest.mark.parametrize("implementation", ["torch", "reference"])
def test_rows_without_a_key(implementation: str) -> None:
    (q, k, v), _ = Case(T=5).make()
    positions = torch.tensor([[-1, 0, 1, 7, 2], [-1] * 5]), torch.tensor([[-1, 0, 1, -5, 2], [-1] * 5])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = sliding_window_attention(
        *leaves, 3, positions, alibi_slopes=alibi_slopes(4), return_lse=True, implementation=implementation
    )
    empty = torch.tensor([[True, False, False, True, False], [True] * 5])
    assert not out[empty].any()
    assert (lse[empty] == -torch.inf).all()
    assert lse[~empty].isfinite().all()
    (out.sum() + lse[~empty].sum()).backward()
    for leaf in leaves:
        assert leaf.grad.isfinite().all()
        assert not leaf.grad[1].any()
    assert not q.grad[empty].any()


@pytest.mark.parametrize("T", [1, 40])
@pytest.mark.parametrize("positions", ["none", "cache"])
@pytest.mark.parametrize("documents", ["none", "pieces"])
@pytest.mark.parametrize("sinks", [0, 3])
def test_asking_for_the_log_sum_exp_changes_no_bit(
    T: int, positions: str, documents: str, sinks: int
) -> None:
    case = Case(
        T=T, carried=9, window=5, blocks=(4, 8), positions=positions, documents=documents, sinks=sinks
    )
    inputs, _ = case.make()
    with_lse = replace(case, with_lse=True).attend()(*inputs)[0]
    assert_same_bits(with_lse, case.attend()(*inputs))


def test_log_sum_exp() -> None:
    (q, k, v), rest = Case(T=4, g=1, window=None).make()
    _, lse = sliding_window_attention(q, k, v, return_lse=True, **rest)
    scores = torch.einsum("bhd,bphd->bhp", q[:, 3], k) * 2**-0.5
    assert_same_in_float64(lse[:, 3], scores.logsumexp(-1))
    _, lse = sliding_window_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), return_lse=True, **rest)
    assert lse.dtype == torch.float32


@pytest.mark.parametrize("empty", ["B", "T"])
@pytest.mark.parametrize("with_lse", [True, False])
def test_empty_batches(empty: str, with_lse: bool) -> None:
    case = Case(**{empty: 0}, carried=3, with_lse=with_lse)
    inputs, _ = case.make()
    out, *rest = values_and_gradients(case.attend(), *inputs)
    assert out.shape == inputs[0].shape
    assert not any(x.any() for x in rest)


@pytest.mark.parametrize("implementation", ["torch", "reference"])
def test_narrow_positions_do_not_overflow(implementation: str) -> None:
    """5 - 10 is no uint8."""
    (q, k, v), _ = Case(T=3, carried=0).make()
    at = torch.tensor([[10, 5, 200]]).expand(2, 3)
    attend = partial(sliding_window_attention, q, k, v, None, implementation=implementation)
    assert torch.equal(attend((at.to(torch.uint8), at.to(torch.uint8))), attend((at, at)))


@pytest.mark.parametrize("window", [5, None])
@pytest.mark.parametrize("gemms", [True, False])
def test_the_widest_input_sets_the_precision(window: int | None, gemms: bool) -> None:
    case = Case(T=40, D=16, window=window, alibi=True, g=3, J=1, gemms=gemms)  # slopes that no float holds
    assert_widest_input_sets_the_precision(case.attend("torch"), case.attend("reference"), *case.make()[0])


# What a position must not see


@pytest.mark.parametrize(
    "case",
    [
        Case(T=80, carried=3, window=7, alibi=True),
        Case(T=80, carried=3, window=7, gemms=False),
        Case(T=80, window=None),
        Case(T=300, window=20, with_lse=True),
        Case(T=80, window=7, positions="gaps"),
        Case(T=80, window=7, documents="one"),
        Case(T=80, window=7, blocks=(2, 8), documents="pieces"),
        Case(T=80, window=None, blocks=(2, 2), alibi=True, documents="pieces"),
        Case(T=80, window=7, positions="cache", carried=9, sinks=2, asking=True),
        Case(T=80, window=7, blocks=(4, 8), documents="pieces", sinks=2),
    ],
)
def test_the_future_and_what_left_the_window_change_no_bit(case: Case) -> None:
    inputs, _ = case.make()
    inputs = [x.float() for x in inputs]
    T, first = case.T, case.T // 2
    before = case.attend()(*inputs)
    for x in inputs:
        x[:, x.shape[1] - T + first :] = 5  # queries, keys and values from position ``first`` on
    after = case.attend()(*inputs)
    out, changed = (x[0] if case.with_lse else x for x in (before, after))
    assert torch.equal(changed[:, :first], out[:, :first])
    assert not torch.equal(changed[:, first:], out[:, first:])
    if case.window is not None and case.positions == "none":
        for x in inputs[1:]:
            x[:, : case.carried + 10] = -5
        again = case.attend()(*inputs)
        again = again[0] if case.with_lse else again
        seen = 10 + case.window - 1
        assert torch.equal(again[:, seen:], changed[:, seen:])
        assert not torch.equal(again[:, :seen], changed[:, :seen])


@pytest.mark.parametrize("with_documents", [True, False])
def test_a_neighbour_changes_no_bit(with_documents: bool) -> None:
    """Another row of the batch, and another document of the row."""
    (q, k, v), _ = Case(T=20).make()
    ids = torch.tensor([[0] * 12 + [1] * 8] * 2) if with_documents else None
    attend = partial(sliding_window_attention, window=9, document_ids=ids)
    out = attend(q, k, v)
    q, k, v = q.clone(), k.clone(), v.clone()
    for x in (q, k, v):
        x[1] = 7
        if with_documents:
            x[0, :12] = 7
    mine = slice(12, None) if with_documents else slice(None)
    assert torch.equal(attend(q, k, v)[0, mine], out[0, mine])


@dataclass(frozen=True)
class Pieces:
    """Rows of documents of these lengths, all of one sum."""

    rows: list[list[int]]
    window: int
    size: int  # of a block

    def ids(self) -> Tensor:
        return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in self.rows])


def pieces() -> st.SearchStrategy[Pieces]:
    lengths = st.lists(st.integers(1, 30), min_size=1, max_size=7)

    def of_one_sum(rows: list[list[int]]) -> list[list[int]]:
        most = max(map(sum, rows))
        return [[*row, most - sum(row)] if sum(row) < most else row for row in rows]

    rows = st.lists(lengths, min_size=1, max_size=3).map(of_one_sum)
    return st.builds(Pieces, rows, st.integers(1, 40), st.integers(1, 9))


@settings(max_examples=40)
@given(pieces())
@example(Pieces([[8, 8, 16]], 8, 4))
@example(Pieces([[1, 1, 1], [3]], 1, 1))
def test_a_document_attends_as_if_alone(drawn: Pieces) -> None:
    """Values and gradients, in blocks of any size; and no bit, nor any gradient, of another."""
    ids = drawn.ids()
    (q, k, v), _ = Case(B=len(drawn.rows), T=ids.shape[1]).make()
    attend = partial(
        sliding_window_attention, window=drawn.window, alibi_slopes=alibi_slopes(4, torch.float64)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MIN_BLOCK", drawn.size)
        patch.setattr(module, "_MAX_BLOCK", 4 * drawn.size)
        patch.setattr(module, "_by_query_block", None)  # another way would prove nothing
        together = values_and_gradients(partial(attend, document_ids=ids), q, k, v)
        spoilt = [torch.where((ids == 0)[..., None, None], 7.0, x) for x in (q, k, v)]
        others = values_and_gradients(partial(attend, document_ids=ids), *spoilt)
        if (ids > 0).any():
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            attend(*leaves, document_ids=ids)[ids > 0].square().sum().backward()
            for leaf in leaves:
                assert leaf.grad is not None
                assert not leaf.grad[ids == 0].any()
    for x, y in zip(together, others, strict=True):
        assert torch.equal(x[ids > 0], y[ids > 0])
    whole = values_and_gradients(partial(attend, document_ids=ids, implementation="reference"), q, k, v)
    assert_all_same_in_float64(together, whole)


def test_calls_with_carried_keys_equal_one_call() -> None:
    (q, k, v), rest = Case(T=50, window=8, alibi=True).make()
    whole = sliding_window_attention(q, k, v, **rest)
    for cut in (1, 7, 20, 49):
        start = max(0, cut - 7)
        head = sliding_window_attention(q[:, :cut], k[:, :cut], v[:, :cut], **rest)
        tail = sliding_window_attention(q[:, cut:], k[:, start:], v[:, start:], **rest)
        assert_same_in_float64(torch.cat([head, tail], dim=1), whole)


@pytest.mark.parametrize("implementation", ["torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [Case(T=40, D=16, window=5), Case(T=40, D=16, window=None, with_lse=True)])
def test_autocast_leaves_the_precision_alone(case: Case, dtype: torch.dtype, implementation: str) -> None:
    inputs = [x.to(dtype) for x in case.make()[0]]
    assert_autocast_changes_nothing(case.attend(implementation), *inputs)


# Under torch.compile


@pytest.fixture
def dynamo() -> Iterator[None]:
    """Nothing compiled before, nothing left: the limit of graphs per function is 8."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize(
    "case",
    [
        Case(T=80, window=9, alibi=True),  # as the models train
        Case(T=200, window=101, alibi=True, D=4),  # blocks too large for batched GEMMs
        Case(T=80, carried=3, window=None),
        Case(T=80, carried=8, window=9, positions="gaps", alibi=True),
        Case(T=80, carried=8, window=9, documents="one", with_lse=True),
        Case(T=1, carried=20, window=9, positions="gaps"),
        Case(T=1, carried=20, window=9, alibi=True),
        Case(T=80, window=9, sinks=3, asking=True),
    ],
)
@pytest.mark.sampled(8)
def test_compiles_as_one_graph(case: Case) -> None:
    """Forward and backward; values never choose the way, so what is compiled serves all positions."""
    inputs, rest = case.make()
    compiled = torch.compile(sliding_window_attention, backend="aot_eager", fullgraph=True)

    def attend(*leaves: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        asking = leaves[3] if case.asking else None
        out = compiled(*leaves[:3], return_lse=case.with_lse, sink_queries=asking, **rest)
        return (out[0], out[1].masked_fill(out[1] == -torch.inf, 0)) if case.with_lse else out

    graphs = counters["stats"]["unique_graphs"]
    ours, theirs = values_and_gradients(attend, *inputs), values_and_gradients(case.attend(), *inputs)
    assert_all_same_in_float64(ours, theirs)
    if "positions" in rest:
        key = torch.where(rest["positions"][1] > 3, rest["positions"][1], -1)
        rest["positions"] = key[:, case.carried :], key
        expected = sliding_window_attention(*inputs, **rest)
        leaves = [x.requires_grad_() for x in inputs]
        assert_same_in_float64(
            compiled(*leaves, return_lse=False, sink_queries=None, **rest).detach(), expected
        )
    assert counters["stats"]["unique_graphs"] == graphs + 1


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("ATEN_CPU_CAPABILITY") == "default", reason="the compiler's C++ needs vector registers"
)
@pytest.mark.usefixtures("dynamo")
def test_compiled_code_keeps_the_error_budget() -> None:
    """By the default compiler, under autocast, which would lower what it finds in a graph."""
    case = Case(T=32, D=16, window=9, alibi=True)
    inputs, rest = case.make()
    compiled = torch.compile(sliding_window_attention, fullgraph=True)

    def attend(*leaves: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return compiled(*leaves, **rest)

    assert_low_precision_within_budget(attend, case.attend("reference"), *(x.float() for x in inputs))


@pytest.mark.usefixtures("dynamo")
@pytest.mark.slow
def test_compiled_graphs_serve_many_lengths() -> None:
    counter = CompileCounter()
    compiled = torch.compile(sliding_window_attention, backend=counter, fullgraph=True)
    for T in (300, 400, 500, 600):
        q, k, v = (torch.randn(1, T, 2, 4) for _ in range(3))
        compiled(q, k, v, 33, implementation="flex")
    assert counter.frame_count == 2  # of the first length, and of any


# Errors

Q, KV = torch.zeros(2, 3, 4, 8), torch.zeros(2, 5, 2, 8)
AT_Q, AT_K = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("argument", "wrong", "message"),
    [
        ("q", Q[0], r"^q: .*\[B, T, H, D\]"),
        ("q", Q[:, :, :3], "^q: .*3 query heads for 2 key/value heads"),
        ("q", torch.zeros(2, 6, 4, 8), "^k: .*at least as many keys as the 6 queries"),
        ("k", KV[0], r"^k: .*\[B, P, J, D\]"),
        ("k", KV[:1], "^k: "),
        ("k", KV[..., :4], "^k: "),
        ("v", KV[:, :4], "^v: "),
        ("window", 0, "^window: .*at least 1"),
        ("positions", (AT_K, AT_K), r"^positions\[0\]: "),
        ("positions", (AT_Q, AT_Q), r"^positions\[1\]: "),
        ("positions", (AT_Q.float(), AT_K), r"^positions\[0\]: .*int64"),
        ("document_ids", AT_Q, r"^document_ids: .*\[B, P\]"),
        ("document_ids", (AT_K, AT_K), r"^document_ids\[0\]: "),
        ("document_ids", (AT_Q, AT_Q), r"^document_ids\[1\]: "),
        ("alibi_slopes", torch.ones(2), r"^alibi_slopes: .*\[H\]"),
        ("implementation", "flash", "^implementation: .*'flash'"),
        ("windows", torch.full((2, 3), 3), "^windows: expected 1 to window = 2, got 3 to 3"),
        ("windows", torch.zeros(1, 3, dtype=torch.int64), "^windows: expected 1 to window = 2, got 0 to 0"),
        ("windows", AT_K, r"^windows: .*\[B or 1, T\]"),
    ],
)
def test_errors_name_the_argument(argument: str, wrong: Any, message: str) -> None:
    right = {"q": Q, "k": KV, "v": KV, "window": 2}
    sliding_window_attention(**right)
    with pytest.raises(ValueError, match=message):
        sliding_window_attention(**right | {argument: wrong})


def test_windows_need_the_largest_of_them() -> None:
    with pytest.raises(ValueError, match=r"^window: expected at least the largest of windows, got None"):
        sliding_window_attention(Q, KV, KV, None, windows=torch.ones(1, 3, dtype=torch.int64))


def test_slopes_of_no_head() -> None:
    with pytest.raises(ValueError, match=r"^num_heads: "):
        alibi_slopes(0)


def test_slopes_that_would_learn_are_refused() -> None:
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    with pytest.raises(ValueError, match="alibi_slopes: expected some that do not"):
        sliding_window_attention(q, k, v, 4, alibi_slopes=torch.rand(2, requires_grad=True))


def test_a_window_within_a_text_compiles_for_any_length() -> None:
    slopes = torch.rand(2)
    compiled = torch.compile(
        lambda q, k, v: sliding_window_attention(q, k, v, 40, alibi_slopes=slopes),
        fullgraph=True, dynamic=True, backend="eager",
    )  # fmt: skip
    for T in (60, 50):
        q, k, v = (torch.randn(1, T, 2, 8) for _ in range(3))
        assert torch.allclose(
            compiled(q, k, v), sliding_window_attention(q, k, v, 40, alibi_slopes=slopes), atol=1e-6
        )


def test_a_window_far_wider_than_a_text_costs_no_more() -> None:
    """Also where positions and sinks are given, as a cache gives them."""
    T, P = 40, 60
    q, k, v = torch.randn(1, T, 2, 8), torch.randn(1, P, 2, 8), torch.randn(1, P, 2, 8)
    positions = torch.arange(P - T, P)[None], torch.arange(P)[None]
    wide, all_of_it = (
        sliding_window_attention(q, k, v, window, positions, num_sinks=4) for window in (1 << 40, P)
    )
    assert torch.allclose(wide, all_of_it, atol=1e-5)
