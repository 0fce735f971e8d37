"""GCA against its oracle: values, gradients, precision, memory layouts, bounded memory, errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.budgets import (
    assert_all_same_in_float64,
    assert_autocast_changes_nothing,
    assert_equals_the_oracle,
    assert_low_precision_within_budget,
    assert_same_bits,
    assert_same_in_float64,
    assert_widest_input_sets_the_precision,
    assert_within_budget,
    values_and_gradients,
)
from tests.ops.memory_use import bytes_saved
from trailmark.ops import ReadAgain, grouped_cross_attention
from trailmark.ops.gca import one_reader, rows, torch_path


@dataclass(frozen=True)
class Case:
    B: int = 2
    N: int = 2
    R: int = 2
    J: int = 2
    g: int = 2  # query heads per key/value head
    D: int = 2
    M: int = 3
    S: int = 2
    K: int = 2
    per_head: bool = False
    per_query_head: bool = False  # weights, where indices are per head
    with_lengths: bool = False
    off_by_one: bool = True
    beside: bool = False
    seed: int = 0

    def make(self) -> tuple[list[Tensor], dict[str, Any]]:
        """([q, k, v, weights, and what is beside], the rest).

        Indices are drawn with -1 and with repetition, lengths with 0.
        """
        random = torch.Generator().manual_seed(self.seed)
        normal = partial(torch.randn, dtype=torch.float64, generator=random)
        q = normal(self.B, self.N, self.R, self.J * self.g, self.D)
        k, v = normal(2, self.B, self.M, self.S, self.J, self.D)
        chosen = (self.B, self.N, self.J, self.K) if self.per_head else (self.B, self.N, self.K)
        indices = torch.randint(-1, self.M, chosen, generator=random)
        weighed = (
            (self.B, self.N, self.J * self.g, self.K) if self.per_head and self.per_query_head else chosen
        )
        weights = torch.rand(weighed, dtype=torch.float64, generator=random)
        lengths = torch.randint(0, self.S + 1, (self.B, self.M), generator=random)
        rest = {
            "indices": indices,
            "lengths": lengths if self.with_lengths else None,
            "softmax_off_by_one": self.off_by_one,
        }
        if not self.beside:
            return [q, k, v, weights], rest
        rest["softmax_off_by_one"] = True
        return [q, k, v, weights, normal(q.shape), normal(q.shape[:4])], rest


def gca(
    q: Tensor, k: Tensor, v: Tensor, weights: Tensor, *beside: Tensor, indices: Tensor, **rest: Any
) -> Tensor:
    given = (beside[0], beside[1]) if beside else None
    return grouped_cross_attention(q, k, v, indices, weights, beside=given, **rest)


def cases(largest: int) -> st.SearchStrategy[Case]:
    size = st.integers(1, largest)
    small = st.integers(1, 2)
    return st.builds(
        Case,
        B=small,
        N=size,
        R=size,
        J=small,
        g=small,
        D=size,
        M=st.integers(0, largest),
        S=size,
        K=st.integers(1, largest + 1),
        per_head=st.booleans(),
        per_query_head=st.booleans(),
        with_lengths=st.booleans(),
        off_by_one=st.booleans(),
        beside=st.booleans(),
        seed=st.integers(0, 999),
    )


@settings(max_examples=20)
@given(cases(2))
@example(Case(with_lengths=True, per_head=True, off_by_one=False))
@example(Case(M=1, S=1, R=1, K=3, with_lengths=True))
@example(Case(with_lengths=True, beside=True))
@example(Case(with_lengths=True, per_head=True, per_query_head=True, off_by_one=False))
@example(Case(with_lengths=True, per_head=True, per_query_head=True, beside=True))
def test_gradcheck(case: Case) -> None:
    inputs, rest = case.make()
    torch.autograd.gradcheck(partial(gca, **rest), [x.requires_grad_() for x in inputs], fast_mode=True)


@settings(max_examples=80)
@given(cases(5))
@example(Case(M=0))
@example(Case(M=0, with_lengths=True, off_by_one=False, per_head=True))
@example(Case(M=1, K=5, S=1, R=1))
@example(Case(N=9, R=65, S=63, K=3, M=7, D=8))
@example(Case(B=1, R=64, K=7, M=8, S=3))
@example(Case(N=9, R=65, S=63, K=3, M=7, D=8, beside=True))
@example(Case(M=0, beside=True))
@example(Case(N=9, R=5, S=7, K=3, M=7, D=8, per_head=True, per_query_head=True, off_by_one=False))
@example(Case(N=1, M=2, K=2, R=3, per_head=True, per_query_head=True, beside=True, with_lengths=True))
@example(Case(N=1, M=2, K=2, beside=True, with_lengths=True))
def test_equals_the_oracle_in_float64(case: Case) -> None:
    inputs, rest = case.make()
    assert_equals_the_oracle(
        *(partial(gca, implementation=name, **rest) for name in (None, "reference")), *inputs
    )


@settings(max_examples=80)
@given(cases(5), st.booleans(), st.booleans())
@example(Case(R=1, K=3, M=5, per_head=True, with_lengths=True, beside=True), True, True)
@example(Case(R=1, K=3, M=3, per_head=True, per_query_head=True, beside=True), True, False)
@example(Case(K=2, M=2, with_lengths=True, off_by_one=False), False, False)
def test_one_chunk_without_gradients_reads_what_exists_as_the_oracle_does(
    case: Case, ordered: bool, small: bool
) -> None:
    """As in decoding: of any table, small or not, or of one of its own from end to end, maybe with gaps."""
    inputs, rest = replace(case, N=1).make()
    q, k, v, weights, *beside = inputs
    if ordered and case.M:
        rest["indices"] = torch.arange(case.M).repeat(*rest["indices"].shape[:-1], 1)
        rest["indices"][:1, :, ..., case.seed % (case.M + 1) :] = -1
        weights = torch.rand(*weights.shape[:-1], case.M, dtype=torch.float64)
        weights[..., 0] = 0
    oracle = gca(q, k, v, weights, *beside, **rest, implementation="reference")
    if case.M:  # nor does it matter what stands where nothing is read
        weights = weights.masked_fill(_of_weights(rest["indices"], weights) < 0, torch.nan)
        read = torch.zeros(case.B, case.M + 1, dtype=torch.bool)
        chosen = rest["indices"].masked_fill(rest["indices"] < 0, case.M)
        read.scatter_(1, chosen.flatten(1), True)
        k, v = (x.masked_fill(~read[:, :-1, None, None, None], torch.nan) for x in (k, v))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_reader, "_GATHERED", one_reader._GATHERED if small else 0)
        assert_same_in_float64(gca(q, k, v, weights, *beside, **rest, implementation="torch"), oracle)


@settings(max_examples=80)
@given(cases(4), st.integers(1, 3))
@example(Case(R=1, K=3, M=3, with_lengths=True), 2)
@example(Case(K=3, M=5, per_head=True, per_query_head=True), 1)
@example(Case(K=3, M=5, per_head=True, with_lengths=True, beside=True), 1)
@example(Case(K=2, M=2, with_lengths=True, off_by_one=False), 1)
@torch.no_grad()
def test_calls_that_share_what_they_read_need_it_once(case: Case, positions: int) -> None:
    (q, k, v, weights, *beside), rest = replace(case, N=1).make()
    again = ReadAgain()
    first = gca(q, k, v, weights, *beside, **rest, again=again)
    assert_same_in_float64(first, gca(q, k, v, weights, *beside, **rest, implementation="reference"))
    more = [torch.randn(len(q), 1, positions, *x.shape[3:], dtype=x.dtype) for x in (q, *beside)]
    oracle = gca(more[0], k, v, weights, *more[1:], **rest, implementation="reference")
    if case.M:  # nothing else is looked at
        weights, rest["indices"] = weights * torch.nan, rest["indices"] + case.M
    assert_same_in_float64(gca(more[0], k, v, weights, *more[1:], **rest, again=again), oracle)


@torch.no_grad()
@pytest.mark.parametrize("beside", [False, True])
def test_what_was_made_ready_serves_such_calls_alone(beside: bool) -> None:
    """Others look at their arguments, and refuse them."""
    (q, k, v, weights, *window), rest = Case(N=1, R=1, K=3, beside=beside).make()
    again = ReadAgain()
    gca(q, k, v, weights, *window, **rest, again=again)

    def serves(q: Tensor, *window: Tensor, implementation: str | None = None) -> bool:
        return again.serves(q, (window[0], window[1]) if window else None, implementation)

    def like(x: Tensor) -> list[Tensor]:
        return [torch.zeros(x.shape), torch.zeros(x.shape[:4])] if beside else []

    assert serves(q, *window)
    assert serves(q, *window, implementation="torch")
    assert not serves(q, *window, implementation="reference")
    assert not serves(q, *([] if beside else [q, q[..., 0]]))
    others = (q.float(), q[:1], q[:, :, :, :2], q[..., :1], q.expand(-1, 2, -1, -1, -1), q[0],
              q.expand(-1, -1, rows.FEW_ROWS, -1, -1))  # fmt: skip
    assert not any(serves(other, *like(other)) for other in others)
    if beside:
        assert not serves(q, window[0][..., :1], window[1])
        assert not serves(q, window[0], window[1][:1])
    with pytest.raises(ValueError, match=r"^k: "):
        gca(q[:1], k, v, weights, *(x[:1] for x in window), **rest, again=again)
    with torch.enable_grad():
        assert not serves(q, *window)
        doubled = q.requires_grad_(), 2 * k, v, weights, *window
        oracle = gca(*doubled, **rest, implementation="reference")
        assert_same_in_float64(gca(*doubled, **rest, again=again), oracle)


def _of_weights(indices: Tensor, weights: Tensor) -> Tensor:
    """Indices as often as weights have heads."""
    if indices.shape == weights.shape:
        return indices
    return indices.repeat_interleave(weights.shape[2] // indices.shape[2], 2)


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_budget_of_one_chunk_without_gradients(dtype: torch.dtype, beside: bool) -> None:
    case = Case(N=1, R=1, D=16, M=10, S=17, K=8, per_head=True, with_lengths=True, beside=beside, seed=3)
    inputs, rest = case.make()
    rounded = [x.to(dtype) for x in inputs]
    fast, oracle, exact = (
        gca(*x, **rest, implementation=name)
        for name, x in (
            ("torch", rounded),
            ("reference", rounded),
            ("reference", [x.double() for x in rounded]),
        )
    )
    assert_within_budget(fast, oracle, exact)


@pytest.mark.parametrize("off_by_one", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("K", "sharpness"), [(1, 1), (8, 1), (8, 4)])
def test_error_budget(dtype: torch.dtype, off_by_one: bool, K: int, sharpness: int) -> None:
    case = Case(N=6, R=9, J=2, g=2, D=16, M=10, S=17, K=K, with_lengths=True, off_by_one=off_by_one, seed=3)
    (q, k, v, weights), rest = case.make()
    rounded = [
        sharpness * q.to(dtype),
        k.to(dtype),
        v.to(dtype),
        weights.float(),
    ]  # select_chunks gives float32 weights
    fast, oracle = (partial(gca, implementation=name, **rest) for name in ("torch", "reference"))
    assert_low_precision_within_budget(fast, oracle, *rounded)


@pytest.mark.parametrize("far", [0, 5, 10, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_budget_beside_a_window(dtype: torch.dtype, far: int) -> None:
    """Also where the window leaves next to nothing for a chunk."""
    case = Case(N=6, R=9, J=2, g=2, D=16, M=10, S=17, K=8, with_lengths=True, beside=True, seed=3)
    (q, k, v, weights, out, lse), rest = case.make()
    rounded = [q.to(dtype), k.to(dtype), v.to(dtype), weights.float(), out.to(dtype), lse.float() + far]
    fast, oracle = (partial(gca, implementation=name, **rest) for name in ("torch", "reference"))
    assert_low_precision_within_budget(fast, oracle, *rounded)


@pytest.mark.parametrize("implementation", ["torch", "reference"])
def test_chunks_beside_a_window_are_in_one_softmax_with_it(implementation: str) -> None:
    """A weight of 2 reads a chunk twice, of 0 not at all."""
    (q, k, v, _), _ = Case(B=1, N=1, J=1, M=3, S=5, K=1).make()
    keys, values = torch.randn(2, 4, 2, dtype=torch.float64)  # what the window holds, [P, D]
    scores = q @ keys.T * 2**-0.5  # [1, 1, R, H, P]
    out, lse = scores.softmax(-1) @ values, scores.logsumexp(-1)
    chosen, weights = torch.tensor([[[2, 0, 1, -1]]]), torch.tensor([[[1.0, 2.0, 0.0, 1.0]]]).double()
    read = grouped_cross_attention(q, k, v, chosen, weights, implementation=implementation, beside=(out, lse))
    found = [x[0, m].view(5, 2) for m in (2, 0, 0) for x in (k, v)]
    keys, values = torch.cat([keys, *found[::2]]), torch.cat([values, *found[1::2]])
    assert_same_in_float64(out + read, (q @ keys.T * 2**-0.5).softmax(-1) @ values)


@pytest.mark.parametrize("implementation", ["torch", "reference"])
def test_beside_nothing_the_virtual_key_has_no_share(implementation: str) -> None:
    (q, k, v, _), rest = Case(S=3, K=1).make()
    nothing = torch.zeros_like(q), torch.full(q.shape[:4], -torch.inf, dtype=torch.float64)
    weights = torch.full((2, 2, 1), 3.0, dtype=torch.float64)  # of the only chunk: it makes no difference
    alone = gca(q, k, v, weights, *nothing, **rest, implementation=implementation)
    assert_same_in_float64(alone, gca(q, k, v, weights / 3, **rest | {"softmax_off_by_one": False}))


@pytest.mark.parametrize("sizes", [{"N": 0}, {"B": 0}], ids=str)
def test_beside_a_window_nothing_may_be_asked(sizes: dict[str, int]) -> None:
    (q, k, v, weights, *beside), rest = Case(M=4, beside=True, **sizes).make()
    assert gca(q, k, v, weights, *beside, **rest).shape == q.shape


@pytest.mark.filterwarnings("error")
def test_weights_that_need_a_gradient_are_checked_without_a_warning() -> None:
    (q, k, v, weights, *beside), rest = Case(M=4, beside=True).make()
    gca(q, k, v, weights.requires_grad_(), *beside, **rest)
    below = (weights.detach() - 9).requires_grad_()
    with pytest.raises(ValueError, match=r"^weights: .*at least 0 with beside"):
        gca(q, k, v, below, *beside, **rest)


@pytest.mark.parametrize("implementation", ["torch", "reference"])
def test_beside_a_window_a_weight_of_zero_is_an_index_of_none(implementation: str) -> None:
    """What it holds may be as large as it likes, and NaN."""
    (q, k, v, weights, *beside), rest = Case(K=3, M=4, beside=True).make()
    rest["indices"] = rest["indices"].clamp(0, 2)
    rest["indices"][..., 1], weights[..., 1] = 3, 0
    k[:, 3], v[:, 3] = torch.nan, torch.nan
    weights.requires_grad_()
    own, none = (
        gca(q, k, v, weights, *beside, **rest | {"indices": chosen}, implementation=implementation)
        for chosen in (rest["indices"], torch.where(weights == 0, -1, rest["indices"]))
    )
    assert torch.equal(own, none)
    assert own.isfinite().all()
    (grad,) = torch.autograd.grad(own.square().sum(), weights)
    assert grad.isfinite().all()
    assert (grad[..., 1] == 0).all()


# What the published kernels get wrong


def test_off_by_one_is_a_key_with_score_and_value_zero() -> None:
    inputs, rest = Case(S=3).make()
    q, k, v, weights = inputs
    with_zero = [torch.cat([x, torch.zeros_like(x[:, :, :1])], dim=2) for x in (k, v)]
    off = gca(*inputs, **rest)
    appended = gca(q, *with_zero, weights, **rest | {"softmax_off_by_one": False})
    assert_same_in_float64(off, appended)
    assert (off - gca(*inputs, **rest | {"softmax_off_by_one": False})).abs().max() > 1e-3


# Reading nothing, and reading only what exists


@pytest.mark.parametrize("off_by_one", [True, False])
@pytest.mark.parametrize("nothing", ["no chunk", "no selection", "no key"])
def test_reading_nothing_gives_zeros_and_zero_gradients(nothing: str, off_by_one: bool) -> None:
    inputs, rest = Case(M=0 if nothing == "no chunk" else 3, off_by_one=off_by_one).make()
    if nothing == "no selection":
        rest["indices"] = torch.full_like(rest["indices"], -1)
    if nothing == "no key":
        rest["lengths"] = torch.zeros(2, 3, dtype=torch.int64)
    leaves = [x.requires_grad_() for x in inputs]
    out = gca(*leaves, **rest)
    out.sum().backward()
    for x in (out, *(leaf.grad for leaf in leaves)):  # zeros, not None: DDP waits for every gradient
        assert torch.equal(x, torch.zeros_like(x))


@pytest.mark.parametrize("sizes", [{"B": 0}, {"N": 0}, {"B": 0, "N": 1, "R": 1}], ids=str)
def test_empty_batches(sizes: dict[str, int]) -> None:
    inputs, rest = Case(**sizes, with_lengths=True).make()
    assert gca(*inputs, **rest).shape == inputs[0].shape
    out, *gradients = values_and_gradients(partial(gca, **rest), *inputs)
    assert out.shape == inputs[0].shape
    assert all(not x.any() for x in gradients)


def test_what_is_not_selected_or_not_there_has_no_effect() -> None:
    (q, k, v, weights), rest = Case(N=2, M=4, S=4, with_lengths=True).make()
    rest["indices"] = torch.tensor([[[0, 2], [2, -1]]]).expand(2, 2, 2)
    rest["lengths"] = torch.tensor([[4, 4, 3, 1]]).expand(2, 4)
    before = values_and_gradients(partial(gca, **rest), q, k, v, weights)
    k, v, weights = k.clone(), v.clone(), weights.clone()
    for x in (k, v):
        x[:, [1, 3]] = 7
        x[:, 2, 3:] = -9
    weights[:, 1, 1] = 5
    after = values_and_gradients(partial(gca, **rest), q, k, v, weights)
    assert_same_bits(before, after)


@pytest.mark.parametrize("implementation", ["torch", "reference"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("off_by_one", [True, False])
def test_not_even_nan_leaks_from_what_is_not_there(
    off_by_one: bool, poison: float, implementation: str
) -> None:
    """Keys beyond the lengths, chunks nobody selected, and chunk 0, whose place a -1 has."""
    (q, k, v, weights), rest = Case(N=3, M=4, S=4, off_by_one=off_by_one).make()
    rest["indices"] = torch.tensor([[[2, 3], [3, -1], [-1, -1]]]).expand(2, 3, 2)
    rest["implementation"] = implementation
    for lengths in (None, torch.tensor([[4, 4, 3, 0]]).expand(2, 4)):
        rest["lengths"] = lengths
        before = values_and_gradients(partial(gca, **rest), q, k, v, weights)
        poisoned = [k.clone(), v.clone()]
        for x in poisoned:
            x[:, :2] = poison
            if lengths is not None:
                x[:, 2, 3:] = x[:, 3] = poison
        after = values_and_gradients(partial(gca, **rest), q, *poisoned, weights)
        assert_same_bits(before, after)


# The same numbers from any memory layout and any slab


def test_shared_memory_equals_a_copy() -> None:
    (q, k, v, weights), rest = Case(B=3, M=4).make()
    k, v = k[:1], v[:1]

    def of_all(copy: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return values_and_gradients(lambda q, k, v, w: gca(q, copy(k), copy(v), w, **rest), q, k, v, weights)

    shared = of_all(lambda x: x.expand(3, -1, -1, -1, -1))
    copied = of_all(lambda x: x.repeat(3, 1, 1, 1, 1))
    assert torch.equal(shared[0], copied[0])
    assert_all_same_in_float64(shared, copied)


def test_slab_size_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, rest = Case(N=7, R=3, M=5, S=4, K=3, with_lengths=True).make()
    whole = values_and_gradients(partial(gca, **rest), *inputs)
    for elements in (1, 300, 1000):
        monkeypatch.setattr(torch_path, "_SLAB_ELEMENTS", elements)
        for ours, theirs in zip(values_and_gradients(partial(gca, **rest), *inputs), whole, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=4e-15)


def test_a_future_slab_or_a_neighbour_changes_no_bit() -> None:
    (q, k, v, weights), rest = Case(N=3).make()
    out = gca(q, k, v, weights, **rest)
    q, k, weights = q.clone(), k.clone(), weights.clone()
    q[:, 2], weights[:, 2] = 9, 9
    q[1], k[1] = 9, 9
    assert torch.equal(gca(q, k, v, weights, **rest)[0, :2], out[0, :2])


def test_one_call_per_head_equals_the_heads_alone() -> None:
    (q, k, v, weights), rest = Case(per_head=True, g=2, K=3).make()
    out = gca(q, k, v, weights, **rest)
    for j in range(2):
        heads = slice(2 * j, 2 * j + 2)
        indices = rest["indices"][:, :, j]
        alone = gca(
            q[..., heads, :], k[..., j : j + 1, :], v[..., j : j + 1, :], weights[:, :, j], indices=indices
        )
        assert_same_in_float64(out[..., heads, :], alone)


# Memory, precision, sizes


def test_nothing_k_fold_is_kept_for_the_backward_pass() -> None:
    inputs, rest = Case(B=1, N=256, R=8, J=2, g=1, D=16, M=32, S=16, K=8).make()
    leaves = [x.float().requires_grad_() for x in inputs]
    fast, slow = (
        bytes_saved(partial(gca, implementation=name, **rest), leaves, rest["indices"])
        for name in ("torch", "reference")
    )
    assert fast <= leaves[0].nbytes, "more than q itself"
    assert 16 * fast < slow


@pytest.mark.parametrize("implementation", ["torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_autocast_leaves_the_precision_alone(dtype: torch.dtype, implementation: str) -> None:
    inputs, rest = Case(R=3, D=8, S=5).make()
    inputs = [x.to(dtype) for x in inputs]
    assert_autocast_changes_nothing(partial(gca, implementation=implementation, **rest), *inputs)


def test_the_widest_input_sets_the_precision() -> None:
    inputs, rest = Case(R=3, D=8, S=5, with_lengths=True).make()
    fast, oracle = (partial(gca, implementation=name, **rest) for name in ("torch", "reference"))
    assert_widest_input_sets_the_precision(fast, oracle, *inputs)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_narrow_indices_do_not_overflow(dtype: torch.dtype) -> None:
    """20,000 chunks of 2 heads have 40,000 rows, more than an int16 counts."""
    (q, k, v, weights), _ = Case(B=1, N=1, M=20_000, S=1, K=1).make()
    indices = torch.tensor([[[19_999]]])
    expected = values_and_gradients(partial(gca, indices=indices), q, k, v, weights)
    narrow = values_and_gradients(partial(gca, indices=indices.to(dtype)), q, k, v, weights)
    assert_same_bits(narrow, expected)


def test_row_numbers_pass_2_to_the_31() -> None:
    B, M, J, S, D = 3, 2**30, 8, 2, 4
    table = rows.Table(torch.empty(B, M, S, J, D, device="meta"))
    indices = torch.tensor([M - 1, 5, -1]).expand(B, 1, J, 3)
    expected = [[[(b * M + m) * J + j for m in (M - 1, 5, 0)] for j in range(J)] for b in range(B)]
    assert table.numbers(indices)[:, 0].tolist() == expected
    assert rows.numbers_of_contiguous(indices, M).tolist() == expected


# Errors

Q, KV = torch.zeros(2, 3, 4, 4, 8), torch.zeros(2, 5, 6, 2, 8)
INDICES = torch.zeros(2, 3, 2, dtype=torch.int64)
WEIGHTS = torch.zeros(2, 3, 2)


@pytest.mark.parametrize(
    ("argument", "wrong", "message"),
    [
        ("q", Q[0], r"^q: .*\[B, N, R, H, D\]"),
        ("q", Q[..., :3, :], "^q: .*3 query heads for 2 key/value heads"),
        ("q", Q[..., :4], "^k: "),
        ("k", KV[0], r"^k: .*\[B, M, S, J, D\]"),
        ("k", KV[:1], "^k: "),
        ("k", KV[..., :4], "^k: "),
        ("v", KV[:, :4], "^v: "),
        ("indices", INDICES[:, :2], "^indices: "),
        ("indices", INDICES[:, :, None], "^indices: "),
        ("indices", INDICES[0], "^indices: "),
        ("indices", INDICES.float(), "^indices: .*int64"),
        ("indices", INDICES.bool(), "^indices: .*int64"),
        ("indices", INDICES + 5, "^indices: .*below M = 5"),
        ("indices", INDICES - 2, "^indices: .*or -1 for none, got -2"),
        ("indices", torch.tensor(0), "^indices: "),
        ("indices", INDICES.to("meta"), "^indices: .*on cpu, as q, got a tensor on meta. Move it there"),
        ("weights", WEIGHTS[..., :1], "^weights: "),
        ("weights", WEIGHTS.long(), "^weights: .*floating"),
        ("q", Q.long(), "^q: .*floating"),
        ("lengths", torch.ones(2, 4), "^lengths: "),
        ("lengths", torch.ones(2, 5), "^lengths: .*int64"),
        ("implementation", "fast", "^implementation: .*'fast'"),
        ("beside", (Q[..., :4], Q[..., 0]), r"^beside\[0\]: .*of q"),
        ("beside", Q, "^beside: .*a pair of tensors"),
        ("beside", (Q, None), "^beside: .*a pair of tensors"),
        ("beside", (Q, Q), r"^beside\[1\]: .*\[B, N, R, H\]"),
        ("beside", (Q, Q[..., 0].long()), r"^beside\[1\]: .*floating"),
        ("softmax_off_by_one", False, "^softmax_off_by_one: .*True with beside"),
    ],
)
def test_errors_name_the_argument(argument: str, wrong: Any, message: str) -> None:
    right: dict[str, Any] = {"q": Q, "k": KV, "v": KV, "indices": INDICES, "weights": WEIGHTS}
    if argument == "softmax_off_by_one":
        right["beside"] = Q, Q[..., 0]
    grouped_cross_attention(**right)
    with pytest.raises(ValueError, match=message):
        grouped_cross_attention(**right | {argument: wrong})


def test_weights_of_query_heads_need_sets_of_heads() -> None:
    (q, k, v, weights), rest = Case(per_head=True, per_query_head=True).make()
    with pytest.raises(ValueError, match=r"^weights: .*\[B, N, H, K\]"):
        gca(q, k, v, weights[:, :, :3], **rest)
