"""Landmark Attention against its oracle and by hand: values, gradients, precision, layouts, memory, errors."""

from __future__ import annotations

import math
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.budgets import (
    SHARP,
    assert_all_same_in_float64,
    assert_autocast_changes_nothing,
    assert_equals_the_oracle,
    assert_low_precision_within_budget,
    assert_repeats_bit_for_bit,
    assert_same_bits,
    assert_same_in_float64,
    assert_widest_input_sets_the_precision,
    values_and_gradients,
)
from tests.ops.landmark.cases import inputs, op
from tests.ops.memory_use import bytes_saved
from trailmark.ops import LandmarkLayout, landmark_attention, reference
from trailmark.ops.landmark import torch_path

DOUBLE = torch.float64
MARKS = ("regular", "phase", "random", "pairs", "none", "all")
DOCUMENTS = (None, "left", "right", "between", "several", "mixed")
TRITON = pytest.param("triton", marks=pytest.mark.skipif(find_spec("triton") is None, reason="needs triton"))
IMPLEMENTATIONS = ("torch", "reference", TRITON)


def equals_the_oracle(tensors: list[Tensor], rest: dict[str, Any], **options: Any) -> None:
    """The output, the log-sum-exps and the gradients of both, in float64."""
    assert_equals_the_oracle(*(op(rest, name, **options) for name in ("torch", "reference")), *tensors)


def cases(largest: int) -> st.SearchStrategy[dict[str, Any]]:
    small = st.integers(1, 2)
    return st.fixed_dictionaries(
        {
            "B": small,
            "T": st.integers(1, largest),
            "J": small,
            "g": small,
            "D": st.integers(1, 3),
            "S": st.integers(1, 6),
            "marks_kind": st.sampled_from(MARKS),
            "documents_kind": st.sampled_from(DOCUMENTS),
            "places_kind": st.sampled_from([None, None, "left", "right"]),
            "causal": st.booleans(),
            "seed": st.integers(0, 999),
        }
    )


# Equal to the oracle


@settings(max_examples=80)
@given(cases(30))
@example({"B": 2, "T": 150, "P": 70, "S": 40, "marks_kind": "random", "g": 2, "D": 3, "seed": 1})
@example({"B": 2, "T": 200, "S": 180, "marks_kind": "phase", "g": 2, "D": 3, "causal": False})
@example({"B": 1, "T": 300, "S": 9, "marks_kind": "random", "documents_kind": "several", "D": 2})
def test_equals_the_oracle_in_float64(case: dict[str, Any]) -> None:
    equals_the_oracle(*inputs(dtype=DOUBLE, **case))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("marks_kind", ["regular", "phase"])
@pytest.mark.parametrize("S", [1, 15, 64])
def test_any_chunk_size_and_phase(S: int, marks_kind: str, causal: bool) -> None:
    """Whole chunks with a tail or without one; rows that begin inside a chunk, each elsewhere."""
    for T in (3 * (S + 1), 2 * (S + 1) + S // 2 + 1):
        equals_the_oracle(*inputs(T=T, S=S, marks_kind=marks_kind, g=2, D=5, causal=causal, dtype=DOUBLE))


@pytest.mark.parametrize("P", [1, 5, 8, 13])
@pytest.mark.parametrize("documents_kind", [None, "left", "mixed"])
def test_the_last_queries_alone_are_those_of_all(P: int, documents_kind: str | None) -> None:
    (q, k, v), rest = inputs(T=30, S=7, g=2, documents_kind=documents_kind, dtype=DOUBLE)
    every, lse = landmark_attention(q, k, v, **rest, return_lse=True)
    last, its_lse = landmark_attention(q[:, -P:], k, v, **rest, return_lse=True)
    assert_same_in_float64(last, every[:, -P:])
    assert_same_in_float64(its_lse.exp(), lse[:, -P:].exp())
    places = torch.arange(30 - P, 30).expand(2, P).flip(1)  # in any order
    backwards = landmark_attention(q[:, -P:].flip(1), k, v, **rest | {"query_places": places})
    assert_same_in_float64(backwards.flip(1), last)


@settings(max_examples=5)
@given(cases(4))
@example({"B": 1, "T": 8, "S": 2, "D": 1, "g": 2})
@example({"B": 1, "T": 7, "S": 2, "D": 2, "J": 1, "documents_kind": "mixed", "causal": False})
def test_gradcheck(case: dict[str, Any]) -> None:
    tensors, rest = inputs(dtype=DOUBLE, **case)
    torch.autograd.gradcheck(op(rest, "torch"), [x.requires_grad_() for x in tensors], fast_mode=True)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("marks_kind", MARKS)
def test_a_few_queries_without_gradients(
    marks_kind: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding has a path of its own."""
    ways = []
    few = torch_path._few_queries
    monkeypatch.setattr(torch_path, "_few_queries", lambda *x: ways.append(1) or few(*x))
    for seed, documents_kind in enumerate(DOCUMENTS):
        for places_kind, T, P in ((None, 40, 1), (None, 40, 4), ("left", 6, None)):
            kinds = {"marks_kind": marks_kind, "documents_kind": documents_kind, "places_kind": places_kind}
            case = {"T": T, "P": P, "S": 5, "g": 2, "D": 3, "causal": causal, "seed": seed}
            (q, k, v), rest = inputs(dtype=DOUBLE, **kinds, **case)
            if rest["document_ids"] is not None:
                absent = (rest["document_ids"] < 0)[..., None, None]
                k, v = k.masked_fill(absent, torch.nan), v.masked_fill(absent, torch.nan)
            assert_all_same_in_float64(op(rest, "torch")(q, k, v), op(rest, "reference")(q, k, v))
    assert ways or marks_kind == "all"


# The oracle itself


def by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_landmark: Tensor,
    causal: bool,
    scale: float,
    asked: range | None = None,
) -> Tensor:
    """The closed form, query by query; one row, one head: [T, D], or of the places ``asked`` alone."""
    T, rows = len(k), []
    chunk = (is_landmark.long().cumsum(0) - is_landmark.long()).tolist()
    for i in asked or range(T):
        scores, values = [], []
        for c in range(max(chunk) + 1):
            places = [j for j in range(T) if chunk[j] == c and (j <= i or not causal)]
            tokens = [j for j in places if not is_landmark[j]]
            landmark = [j for j in places if is_landmark[j]]
            if not tokens or (c != chunk[i] and not landmark):
                continue
            a = scale * k[tokens] @ q[i]
            if c != chunk[i]:
                a = a + (scale * k[landmark[0]] @ q[i] - a.logsumexp(0))
            scores.append(a)
            values.append(v[tokens])
        rows.append(torch.cat(scores).softmax(0) @ torch.cat(values) if scores else torch.zeros_like(q[i]))
    return torch.stack(rows)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("marks_kind", MARKS)
def test_the_closed_form_by_hand(marks_kind: str, causal: bool) -> None:
    (q, k, v), rest = inputs(T=17, S=3, J=1, D=4, marks_kind=marks_kind, causal=causal, dtype=DOUBLE)
    out = landmark_attention(q, k, v, **rest, scale=0.7, implementation="reference")
    for b in range(2):
        one = (x[b, :, 0] for x in (q, k, v))
        assert_same_in_float64(out[b, :, 0], by_hand(*one, rest["is_landmark"][b], causal, 0.7))


def literally(tensors: list[Tensor], rest: dict[str, Any]) -> Tensor:
    """Eq. 1 to 4 as they stand in the paper, and in the published code."""
    (B, T), D = rest["is_landmark"].shape, tensors[0].shape[-1]
    documents, places = torch.zeros(B, T, dtype=torch.int64), torch.arange(T).expand(B, T)
    return reference.landmark_attention(
        *tensors, rest["is_landmark"], documents, rest["causal"], D**-0.5, places, literal=True
    )[0]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("S", [1, 4, 7])
def test_the_closed_form_is_the_paper_s_equations_where_no_chunk_is_empty(S: int, causal: bool) -> None:
    tensors, rest = inputs(T=30, S=S, causal=causal, dtype=DOUBLE)
    assert_same_in_float64(landmark_attention(*tensors, **rest), literally(tensors, rest))


def test_without_landmarks_it_is_ordinary_attention() -> None:
    (q, k, v), rest = inputs(T=200, marks_kind="none", g=2, dtype=DOUBLE)
    heads = (x.transpose(1, 2) for x in (q, k, v))
    plain = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    assert_same_in_float64(landmark_attention(q, k, v, **rest), plain.transpose(1, 2))


# Bugs of the published code (B3, B12, B15 of its list) that are the op's


@pytest.mark.parametrize("S", [1, 2])
def test_b3_no_limit_to_the_number_of_chunks(S: int) -> None:
    """It merges the chunks beyond 64 (or 16) into one group, silently."""
    tensors, rest = inputs(B=1, T=300, S=S, J=1, D=4, dtype=DOUBLE)
    assert rest["is_landmark"].sum() >= 100
    out = landmark_attention(*tensors, **rest)
    q, k, v = (x[0, :, 0] for x in tensors)
    last = range(290, 300)
    assert_same_in_float64(out[0, last, 0], by_hand(q, k, v, rest["is_landmark"][0], True, 0.5, last))


@pytest.mark.parametrize("side", ["left", "right"])
def test_b12_padding_and_grouped_heads_count(side: str) -> None:
    """Its fast path ignores the attention mask and has no grouped-query attention."""
    (q, k, v), rest = inputs(T=25, S=4, J=2, g=3, documents_kind=side, seed=4, dtype=DOUBLE)
    present = rest["document_ids"] >= 0
    assert not present.all()
    padded = landmark_attention(q, k, v, **rest, implementation="reference")
    assert not padded[~present].any()
    for b in range(2):
        one = [x[b : b + 1, present[b]] for x in (q, *(x.repeat_interleave(3, 2) for x in (k, v)))]
        marks = rest["is_landmark"][b : b + 1, present[b]]
        alone = landmark_attention(*one, marks, implementation="reference")
        assert_same_in_float64(padded[b : b + 1, present[b]], alone)


@pytest.mark.parametrize("marks_kind", MARKS)
@pytest.mark.parametrize("causal", [True, False])
def test_b15_weights_sum_to_one(marks_kind: str, causal: bool) -> None:
    """A landmark that closes no token takes weight that goes nowhere; a query with nothing to see gives 0."""
    (q, k, v), rest = inputs(T=40, S=5, g=2, marks_kind=marks_kind, causal=causal, dtype=DOUBLE)
    v = torch.ones_like(v)
    out, lse = landmark_attention(q, k, v, **rest, return_lse=True, implementation="reference")
    nothing = lse == -torch.inf
    if marks_kind == "all" or (marks_kind == "pairs" and causal):
        assert nothing[:, 0].all()
    assert_same_in_float64(out, (~nothing).to(DOUBLE)[..., None].expand_as(out))
    if marks_kind == "pairs":
        assert literally([q, k, v], rest)[:, 2:].min() < 0.9, "the equations themselves lose weight here"


# Nothing to attend to, and what must have no effect


def test_nothing_to_attend_to_gives_zeros_and_zero_gradients() -> None:
    tensors, rest = inputs(T=6, marks_kind="all")
    leaves = [x.requires_grad_() for x in tensors]
    out, lse = landmark_attention(*leaves, **rest, return_lse=True)
    (out.sum() + lse.exp().sum()).backward()
    assert (lse == -torch.inf).all()
    for x in (out, *(leaf.grad for leaf in leaves)):  # zeros, not None: DDP waits for every gradient
        assert torch.equal(x, torch.zeros_like(x))


@pytest.mark.parametrize(
    ("marks_kind", "documents_kind", "own"),
    [("all", None, True), ("pairs", None, True), ("pairs", "mixed", True), ("random", "several", False)],
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.sampled(3)
def test_no_gradient_of_nothing_leaks(
    implementation: str, marks_kind: str, documents_kind: str | None, own: bool
) -> None:
    """Not even NaN, which logaddexp gives of two -inf."""
    kinds = {"marks_kind": marks_kind, "documents_kind": documents_kind}
    tensors, rest = inputs(B=1, T=12, S=2, J=1, g=2, seed=1, **kinds)
    layout = LandmarkLayout.of(**rest)
    layout = layout.seeing(torch.ones_like(layout.far), own)
    leaves = [x.requires_grad_() for x in tensors]
    out, lse = landmark_attention(*leaves, layout, return_lse=True, implementation=implementation)
    nothing = lse == -torch.inf
    assert nothing.any()
    assert nothing.all() == (marks_kind == "all")
    found = []
    for value in (0.0, torch.nan, torch.inf):
        of_out = torch.ones_like(out).masked_fill(nothing[..., None], value)
        of_lse = torch.ones_like(lse).masked_fill(nothing, value)
        found.append(torch.autograd.grad([out, lse], leaves, [of_out, of_lse], retain_graph=True))
    assert all(bool(x.any()) == (marks_kind != "all") for x in found[0])
    for gradients in found[1:]:
        assert_same_bits(gradients, found[0])


@pytest.mark.parametrize("implementation", ["torch", "reference"])
@pytest.mark.parametrize(("B", "T", "P"), [(0, 5, 5), (2, 0, 0), (2, 5, 0)])
def test_empty_inputs(B: int, T: int, P: int, implementation: str) -> None:
    tensors, rest = inputs(B=B, T=T, P=P, D=2)
    out, lse, *gradients = values_and_gradients(op(rest, implementation), *tensors)
    assert out.shape == (B, P, 2, 2)
    assert lse.shape == (B, P, 2)
    assert [x.shape for x in gradients] == [x.shape for x in tensors]
    assert not any(x.any() for x in gradients)


@pytest.mark.parametrize("implementation", ["torch", "reference"])
@pytest.mark.parametrize("kind", ["left", "right", "between", "several"])
def test_not_even_nan_leaks_from_absent_places(kind: str, implementation: str) -> None:
    (q, k, v), rest = inputs(T=37, S=5, g=2, documents_kind=kind, seed=4)
    absent = rest["document_ids"] < 0
    assert absent.any()
    before = values_and_gradients(op(rest, implementation), q, k, v)
    poisoned = [x.masked_fill(absent[..., None, None], torch.nan) for x in (q, k, v)]
    after = values_and_gradients(op(rest, implementation), *poisoned)
    assert_same_bits(before, after)
    for gradient in after[2:]:
        assert not gradient[absent].any()


def test_absent_queries_have_no_effect() -> None:
    (q, k, v), rest = inputs(T=20, S=4, places_kind="left")
    absent = rest["query_places"] < 0
    assert absent.any()
    before = values_and_gradients(op(rest, "torch"), q, k, v)
    after = values_and_gradients(op(rest, "torch"), q.masked_fill(absent[..., None, None], torch.nan), k, v)
    assert_same_bits(before, after)
    assert not after[0][absent].any()


def test_a_landmark_s_value_never_counts() -> None:
    (q, k, v), rest = inputs(T=40, marks_kind="phase")
    before = values_and_gradients(op(rest, "torch"), q, k, v)
    v = v.masked_fill(rest["is_landmark"][..., None, None], 9)
    after = values_and_gradients(op(rest, "torch"), q, k, v)
    assert_same_bits(before, after)
    assert not after[4][rest["is_landmark"]].any()


@pytest.mark.parametrize("marks_kind", ["regular", "phase"])
def test_a_future_token_or_a_neighbour_changes_no_bit(marks_kind: str) -> None:
    (q, k, v), rest = inputs(T=100, S=15, marks_kind=marks_kind, g=2)
    out, lse = landmark_attention(q, k, v, **rest, return_lse=True)
    for t in (3, 40, 64, 99):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, t:] += 3
            x[1] -= 5
        later, its_lse = landmark_attention(*changed, **rest, return_lse=True)
        assert torch.equal(later[0, :t], out[0, :t])
        assert torch.equal(its_lse[0, :t], lse[0, :t])
        assert not torch.equal(later[0, t:], out[0, t:])


# Ready layouts


@pytest.mark.parametrize("implementation", ["torch", "reference"])
@pytest.mark.parametrize("case", [{}, {"documents_kind": "mixed"}, {"places_kind": "right", "causal": False}])
def test_a_ready_layout_is_the_same(case: dict[str, Any], implementation: str) -> None:
    (q, k, v), rest = inputs(T=40, g=2, marks_kind="phase", dtype=DOUBLE, **case)
    layout = LandmarkLayout.of(num_queries=q.shape[1], **rest)
    expected = values_and_gradients(op(rest, "torch"), q, k, v)
    for _ in range(2):  # again from what it remembers
        ours = values_and_gradients(op({"is_landmark": layout}, implementation), q, k, v)
        assert_all_same_in_float64(ours, expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("documents_kind", [None, "mixed"])
@pytest.mark.parametrize("own", [True, False])
def test_seeing_less(own: bool, documents_kind: str | None, causal: bool) -> None:
    """As the oracle with those landmarks masked; it is the literal one that reads the masks."""
    tensors, rest = inputs(T=70, S=5, g=2, D=3, documents_kind=documents_kind, causal=causal, dtype=DOUBLE)
    layout = LandmarkLayout.of(**rest)
    every = landmark_attention(*tensors, layout)
    far = torch.rand(layout.far.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    seeing = layout.seeing(far, own)
    equals_the_oracle(tensors, {"is_landmark": seeing})
    assert not torch.equal(landmark_attention(*tensors, seeing), every)
    assert torch.equal(landmark_attention(*tensors, layout), every)
    if own:  # a hidden chunk is a chunk whose tokens are not there for others
        nothing = layout.seeing(torch.zeros_like(far))
        alone, lse = landmark_attention(*tensors, nothing, return_lse=True)
        at_landmarks = landmark_attention(*tensors, nothing.seeing(far, own=False))
        assert alone[lse > -torch.inf].any()
        assert not at_landmarks.any()


# The same numbers however the work is cut


def test_slabs_and_tiles_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for queries, width in ((1, 128), (5, 3), (7, 1)):
        monkeypatch.setattr(torch_path, "_SLAB_QUERIES", queries)
        monkeypatch.setattr(torch_path, "_WIDEST_TILE", width)
        for marks_kind in ("phase", "random", "pairs"):
            for causal in (True, False):
                case = {"T": 40, "S": 9, "g": 2, "D": 3, "marks_kind": marks_kind, "causal": causal}
                found.append(inputs(dtype=DOUBLE, **case))
                equals_the_oracle(*found[-1])
    assert len(found) == 18


def test_one_long_chunk_among_short_ones_is_not_padded_to() -> None:
    """Its tiles are as narrow as the others need: not 1000 chunks of 2000 slots each."""
    is_landmark = torch.zeros(1, 4000, dtype=torch.bool)
    is_landmark[:, 2000:] = torch.arange(2000) % 2 == 1
    layout = LandmarkLayout.of(is_landmark)
    q, k, v = (torch.randn(1, 4000, 1, 4) for _ in range(3))
    with torch.no_grad():
        landmark_attention(q, k, v, layout)
    (row,) = layout.memo["torch"]
    assert row.count * row.height <= 2 * 4000


def test_a_compiled_graph_is_whole_with_a_ready_layout() -> None:
    tensors, rest = inputs(T=40, S=5, g=2, documents_kind="mixed")
    run = op({"is_landmark": LandmarkLayout.of(**rest)}, "torch")
    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    eager = values_and_gradients(run, *tensors)
    assert_same_bits(values_and_gradients(compiled, *tensors), eager)
    with torch.no_grad():
        assert_same_bits(compiled(*tensors), eager[:2])


# Precision and memory


@pytest.mark.parametrize("documents_kind", [None, "mixed"])
@pytest.mark.parametrize("marks_kind", ["regular", "random"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_budget(dtype: torch.dtype, marks_kind: str, documents_kind: str | None) -> None:
    case = {"T": 150, "S": 15, "g": 2, "marks_kind": marks_kind, "documents_kind": documents_kind}
    tensors, rest = inputs(dtype=dtype, **case)
    for sharpness in (1, SHARP):
        sharp = [sharpness * tensors[0], *tensors[1:]]
        assert_low_precision_within_budget(op(rest, "torch"), op(rest, "reference"), *sharp)


def test_large_scores_do_not_overflow_nor_vanish() -> None:
    """A chunk's own softmax holds where all its scores are far below those of the row."""
    tensors, rest = inputs(T=60, S=5, D=8)
    equals_in = partial(assert_low_precision_within_budget, op(rest, "torch"), op(rest, "reference"))
    q, k, v = tensors
    k = k + 0
    k[:, 6:12] -= 40 * q[:, -1:].mean(1, keepdim=True)
    k[:, 11] += 80 * q[:, -1]  # the landmark calls for tokens with scores of -100 and less
    equals_in(3 * q, k, v)


@pytest.mark.parametrize("implementation", ["torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_autocast_leaves_the_precision_alone(dtype: torch.dtype, implementation: str) -> None:
    tensors, rest = inputs(T=30, documents_kind="between", dtype=dtype)
    assert_autocast_changes_nothing(op(rest, implementation), *tensors)


def test_the_widest_input_sets_the_precision() -> None:
    tensors, rest = inputs(T=40, S=5, D=4, dtype=DOUBLE)
    assert_widest_input_sets_the_precision(op(rest, "torch"), op(rest, "reference"), *tensors)


def test_nothing_but_the_inputs_is_kept_for_the_backward_pass() -> None:
    def saved(implementation: str, T: int) -> int:
        is_landmark = (torch.arange(T) % 64 == 63)[None]
        leaves = [torch.randn(1, T, 8, 64).requires_grad_() for _ in range(3)]
        attend = partial(landmark_attention, is_landmark=is_landmark, implementation=implementation)
        return bytes_saved(attend, leaves, is_landmark)

    assert saved("torch", 512) == 0
    assert saved("reference", 256) > 256 * 256 * 8 * 4


def test_what_a_regular_layout_remembers_grows_with_the_text_alone() -> None:
    """One table of masks serves all slabs."""
    sizes = []
    for T in (256, 1024):
        layout = LandmarkLayout.of((torch.arange(T) % 16 == 15)[None])
        with torch.no_grad():
            landmark_attention(*(torch.randn(1, T, 1, 2) for _ in range(3)), layout)
        slabs = layout.memo["torch"][0].slabs
        sizes.append(len({slab.later.data_ptr() for slab in slabs}))
        assert len(slabs) == T // 128
    assert sizes == [1, 1]


def remembered(T: int, is_landmark: Tensor, causal: bool) -> int:
    """Bytes of all tensors that the layout remembers, each storage once."""
    layout = LandmarkLayout.of(is_landmark[None], causal=causal)
    landmark_attention(*(torch.randn(1, T, 1, 2).requires_grad_() for _ in range(3)), layout)
    (row,) = layout.memo["torch"]
    kept = [x for part in (row, *row.slabs) for x in vars(part).values() if isinstance(x, Tensor)]
    assert len(kept) > len(row.slabs)
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}.values())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("among_short_ones", [True, False])
def test_what_a_layout_of_long_chunks_remembers_grows_with_the_text_alone(
    among_short_ones: bool, causal: bool
) -> None:
    """No query's mask reaches back over its whole chunk."""

    def is_landmark(T: int) -> Tensor:
        place = torch.arange(T)
        return (place % 3 == 2) & (place // (T // 4) % 2 == 0) & among_short_ones

    small, large = (remembered(T, is_landmark(T), causal) for T in (1000, 4000))
    assert large <= 4 * small


def test_gradients_repeat_bit_for_bit() -> None:
    tensors, rest = inputs(T=130, S=9, g=2, marks_kind="random", documents_kind="mixed")
    assert_repeats_bit_for_bit(op(rest, "torch"), *tensors)


# Errors


Q, K, MARK = torch.randn(2, 5, 4, 3), torch.randn(2, 5, 2, 3), torch.zeros(2, 5, dtype=torch.bool)
READY = LandmarkLayout.of(MARK)
GOOD: dict[str, Any] = {"q": Q, "k": K, "v": K, "is_landmark": MARK}
IDS = torch.zeros(2, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"q: expected shape \[B, P, H, D\], got \(5, 4, 3\)", {"q": Q[0]}),
        (r"k: expected shape \[B, T, J, D\], got \(5, 2, 3\)", {"k": K[0]}),
        (r"k: expected shape \[B, T, J, D\] = \(2, 5, 2, 3\), got \(1, 5, 2, 3\)", {"k": K[:1]}),
        (r"k: .*= \(2, 5, 2, 3\), got \(2, 5, 2, 2\)", {"k": K[..., :2]}),
        (r"v: .*= \(2, 5, 2, 3\), got \(2, 4, 2, 3\)", {"v": K[:, :4]}),
        (r"q: expected a number of query heads .*, got 3 query heads for 2", {"q": Q[:, :, :3]}),
        (r"D: expected at least 1, got 0", {"q": Q[..., :0], "k": K[..., :0], "v": K[..., :0]}),
        (r"v: expected a floating dtype, got torch.int64. Convert it.", {"v": K.long()}),
        (r"k: expected one on cpu, as q, got a tensor on meta. Move", {"k": K.to("meta")}),
        (r"is_landmark: expected shape \[B, T\] = \(2, 5\), got \(2, 4\)", {"is_landmark": MARK[:, :4]}),
        (r"is_landmark: expected one on cpu, as q", {"is_landmark": MARK.to("meta")}),
        (r"is_landmark: expected a bool tensor", {"is_landmark": IDS}),
        (r"q: expected at most as many, got 6 queries for 5 keys. Pass", {"q": torch.randn(2, 6, 4, 3)}),
        (r"is_landmark: expected one of \(2, 4, 5\), .*= \(2, 5, 5\)", {"q": Q[:, 1:], "is_landmark": READY}),
        (r"document_ids: expected None with a ready LandmarkLayout", {"is_landmark": READY, "document_ids": IDS}),
        (r"query_places: expected None with a ready", {"is_landmark": READY, "query_places": IDS}),
        (r"causal: expected True with a ready LandmarkLayout", {"is_landmark": READY, "causal": False}),
        (r"implementation: expected None or one of 'reference', 'torch', 'triton'", {"implementation": "flash"}),
        (r"implementation: .*torch.float64. Convert", {x: Q.double() for x in "qkv"} | {"implementation": "triton"}),
        (r"implementation: .*one dtype", {"k": K.half(), "implementation": "triton"}),
    ],
)  # fmt: skip
def test_errors(message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        landmark_attention(**GOOD | changes)


def test_too_large_heads_are_refused_by_triton_alone() -> None:
    q, k = torch.randn(1, 2, 1, 257), torch.randn(1, 2, 1, 257)
    with pytest.raises(ValueError, match="D is 257, and the kernels have at most 256"):
        landmark_attention(q, k, k, MARK[:1, :2], implementation="triton")
    assert torch.equal(landmark_attention(q, k, k, MARK[:1, :2])[:, 0], k[:, 0])


def test_scale_by_default() -> None:
    (q, k, v), rest = inputs(D=16, dtype=DOUBLE)
    out = landmark_attention(q, k, v, **rest)
    assert torch.equal(out, landmark_attention(q, k, v, **rest, scale=1 / math.sqrt(16)))
    assert not torch.equal(out, landmark_attention(q, k, v, **rest, scale=1.0))
