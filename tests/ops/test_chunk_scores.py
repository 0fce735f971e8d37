"""What tokens score chunks by, and which they select: against the oracles, and the bound that the expansion is."""

from __future__ import annotations

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
    Op,
    assert_autocast_changes_nothing,
    assert_chooses_the_best,
    assert_equals_the_oracle,
    assert_low_precision_within_budget,
    assert_same_bits,
    assert_same_in_float64,
    assert_widest_input_sets_the_precision,
    values_and_gradients,
)
from trailmark.ops import (
    chunk_log_mass,
    chunk_scores,
    reference,
    score_for_tokens,
    select_for_tokens,
    summarize_chunks,
)

LOW = [torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Case:
    B: int = 2
    T: int = 5
    M: int = 4
    S: int = 3
    J: int = 2
    g: int = 2
    D: int = 4
    K: int = 2
    n: int = 1  # summaries of a chunk
    per_query_head: bool = True  # or a summary for each key/value head
    ragged: bool = True  # lengths, and candidates that differ between rows
    seed: int = 0

    def make(self) -> dict[str, Tensor]:
        """Some chunks have no key; some tokens no candidate, some fewer than K; lists of selected end in -1."""
        random = torch.Generator().manual_seed(self.seed)
        normal = partial(torch.randn, dtype=torch.float64, generator=random)
        integers = partial(torch.randint, generator=random)
        (B, T, M, S, J, D), H = (self.B, self.T, self.M, self.S, self.J, self.D), self.J * self.g
        chosen = torch.rand(B, T, J, M + self.K, generator=random).argsort(-1)[..., : self.K].sort(-1).values
        per_row = B if self.ragged else 1
        return {
            "q": 2 * normal(B, T, H, D),
            "k": 2 * normal(B, M, S, J, D),
            "mu": 2 * normal(B, M, H, D),
            "landmarks": normal(B, M, self.n, H if self.per_query_head else J, D + 1),
            "beside": normal(B, T, H),
            "lengths": integers(0, S + 1, (B, M)) if self.ragged else torch.full((B, M), S),
            "indices": chosen.masked_fill(chosen >= M, -1),
            "ends": integers(0, M + 1, (per_row, T)),
            "first": integers(0, M // 2 + 1, (per_row, T)),
        }


cases = st.builds(
    Case,
    B=st.integers(1, 2),
    T=st.integers(0, 4),
    M=st.integers(0, 5),
    S=st.integers(1, 4),
    J=st.integers(1, 2),
    g=st.integers(1, 3),
    D=st.integers(1, 4),
    K=st.integers(1, 6),
    n=st.integers(1, 3),
    per_query_head=st.booleans(),
    ragged=st.booleans(),
    seed=st.integers(0, 999),
)


def ops_of(case: Case, made: dict[str, Tensor]) -> dict[str, tuple[Op, Op, list[Tensor]]]:
    """Each op with gradients, its oracle, and what they are functions of; outputs are 0 where there is nothing."""
    D, lengths, indices = case.D, made["lengths"], made["indices"]
    given, empty = lengths if case.ragged else None, (lengths == 0)[..., None]
    scale = D**-0.5

    def parts(table: Tensor) -> tuple[Tensor, Tensor]:
        assert (table[..., D].masked_select(empty) == chunk_scores.EMPTY).all()
        return table[..., :D], table[..., D].masked_fill(empty, 0)

    def finite(scores: Tensor) -> Tensor:
        return scores.masked_fill(scores == -torch.inf, 0)

    return {
        "a query's summary": (
            lambda k, mu: parts(summarize_chunks(k, mu, given)),
            lambda k, mu: parts(reference.summarize_chunks(k, mu, lengths, scale)),
            [made["k"], made["mu"]],
        ),
        "mean": (
            lambda k: parts(summarize_chunks(k, None, given)),
            lambda k: parts(reference.summarize_chunks(k, None, lengths, scale)),
            [made["k"]],
        ),
        "mass": (
            lambda q, k: finite(chunk_log_mass(q, k, given)),
            lambda q, k: finite(reference.chunk_log_mass(q, k, lengths, scale)),
            [made["q"], made["k"]],
        ),
        "scores": (
            lambda q, table: finite(score_for_tokens(q, table, indices)),
            lambda q, table: finite(reference.score_for_tokens(q, table, indices, scale)),
            [made["q"], made["landmarks"]],
        ),
    }


OPS = pytest.mark.parametrize("name", ops_of(Case(), Case().make()))


@OPS
@settings(max_examples=60)
@given(cases)
@example(Case(M=0))
@example(Case(T=70, M=30, K=8, n=2))
def test_equals_the_oracle_in_float64(name: str, case: Case) -> None:
    fast, oracle, inputs = ops_of(case, case.make())[name]
    assert_equals_the_oracle(fast, oracle, *inputs)


@OPS
@settings(max_examples=10)
@given(cases.filter(lambda case: case.T > 0 and case.M > 0))
def test_gradcheck(name: str, case: Case) -> None:
    fast, _, inputs = ops_of(case, case.make())[name]
    torch.autograd.gradcheck(fast, [x.requires_grad_() for x in inputs], fast_mode=True)


@OPS
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("sharpness", [1, SHARP])
def test_error_budget(name: str, dtype: torch.dtype, sharpness: int) -> None:
    case = Case(T=9, M=12, S=16, D=64, K=5, n=2)
    made = case.make()
    made |= {part: made[part] * (sharpness / 2) for part in ("q", "mu")}
    fast, oracle, inputs = ops_of(case, made)[name]
    rounded = [x.to(dtype) for x in inputs]
    assert_low_precision_within_budget(fast, oracle, *rounded)
    assert_autocast_changes_nothing(fast, *rounded)


@OPS
def test_the_widest_input_sets_the_precision(name: str) -> None:
    fast, oracle, inputs = ops_of(Case(), Case().make())[name]
    assert_widest_input_sets_the_precision(fast, oracle, *inputs)


@OPS
def test_keys_that_do_not_exist_have_no_effect(name: str) -> None:
    case = Case()
    made = case.make()
    absent = torch.arange(case.S) >= made["lengths"][..., None]
    outs = []
    for value in (0.0, torch.nan):
        given = made | {"k": made["k"].masked_fill(absent[..., None, None], value)}
        fast, _, inputs = ops_of(case, given)[name]
        outs.append(values_and_gradients(fast, *inputs))
    assert_same_bits(*outs)


# --- what is selected ------------------------------------------------------------------------------------------------


def selected(case: Case, made: dict[str, Tensor], kind: str) -> tuple[Any, Tensor]:
    """By summaries, as a memory that grew keeps them, or by the keys themselves."""
    lengths = made["lengths"] if case.ragged else None
    by: dict[str, Any] = {"keys": (made["k"], lengths)}
    if kind != "mass":
        table = made["landmarks"]
        by = {"landmarks": [table[:, :1], table[:, 1:]]}
    return select_for_tokens(
        made["q"], made["beside"], case.K, made["ends"], case.J, first_candidate=made["first"], **by
    )


def oracle_scores(case: Case, made: dict[str, Tensor], kind: str) -> Tensor:
    """Of all chunks [B, T, H, M]."""
    scale = case.D**-0.5
    if kind == "mass":
        return reference.chunk_log_mass(made["q"], made["k"], made["lengths"], scale)
    every = torch.arange(case.M).expand(case.B, case.T, case.J, case.M)
    found = reference.score_for_tokens(made["q"], made["landmarks"], every, scale)
    return found.masked_fill(found <= chunk_scores.EMPTY / 2, -torch.inf)


def with_an_empty_chunk(made: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a chunk without keys is summed up as is selected by nobody."""
    table = made["landmarks"].clone()
    table[:, 1:2] = 0
    table[:, 1:2, ..., -1] = chunk_scores.EMPTY
    return made | {"landmarks": table}


@pytest.mark.parametrize("kind", ["summaries", "mass"])
@settings(max_examples=60)
@given(cases)
@example(Case(M=0))
@example(Case(T=9, M=70, K=30, J=1))
def test_the_chunks_that_the_equations_select(kind: str, case: Case) -> None:
    made = with_an_empty_chunk(case.make())
    chosen, of_heads = selected(case, made, kind)
    each = oracle_scores(case, made, kind)
    indices, shares = reference.select_for_tokens(
        each, made["beside"], case.K, made["ends"], made["first"], case.J
    )
    assert_chooses_the_best(chosen.indices, shares, shares, shares > -torch.inf)
    missing = chosen.indices < 0

    def of(scores: Tensor, which: Tensor) -> Tensor:
        """0 where nothing is selected, where ours have to be -inf."""
        padded = torch.nn.functional.pad(scores, (0, 1))
        return padded.gather(-1, which.masked_fill(which < 0, case.M))

    assert (chosen.scores[missing] == -torch.inf).all()
    found = chosen.scores.masked_fill(missing, 0)
    assert_same_in_float64(found, of(shares, chosen.indices))
    # whichever of equals it was
    assert_same_in_float64(found.sort(-1).values, of(shares, indices).sort(-1).values)
    weights = chosen.scores.masked_fill(missing.all(-1, keepdim=True), 0).softmax(-1).masked_fill(missing, 0)
    assert_same_in_float64(chosen.weights, weights)
    per_head = chosen.indices.repeat_interleave(case.g, 2)
    assert (of_heads[per_head < 0] == -torch.inf).all()
    assert_same_in_float64(of_heads.masked_fill(per_head < 0, 0), of(each, per_head))


@pytest.mark.parametrize("kind", ["summaries", "mass"])
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("sharpness", [1, SHARP])
def test_chunks_selected_in_low_precision(kind: str, dtype: torch.dtype, sharpness: int) -> None:
    case = Case(T=20, M=60, S=16, D=64, K=8)
    made = {name: x.to(dtype) if x.is_floating_point() else x for name, x in case.make().items()}
    made["q"] = made["q"] * (sharpness / 2)
    chosen, _ = selected(case, made, kind)
    assert chosen.scores.dtype == torch.float32
    shares = []
    for wide in (torch.float64, torch.float32):
        given = {name: x.to(wide) if x.is_floating_point() else x for name, x in made.items()}
        each = oracle_scores(case, given, kind)
        rest = given["beside"], case.K, given["ends"], given["first"], case.J
        shares.append(reference.select_for_tokens(each, *rest)[1])
    assert_chooses_the_best(chosen.indices, *shares, shares[0] > -torch.inf)


@settings(max_examples=30)
@given(st.integers(0, 999))
def test_the_expansion_is_below_the_mass_and_meets_it_at_its_query(seed: int) -> None:
    case = Case(seed=seed)
    made = case.make()
    q, k, mu, lengths = (made[name] for name in ("q", "k", "mu", "lengths"))
    lengths = lengths.clamp(min=1)
    mass = chunk_log_mass(q, k, lengths)
    every = torch.arange(case.M).expand(case.B, 1, case.J, -1)
    for query in (mu, None):
        scores = score_for_tokens(
            q, summarize_chunks(k, query, lengths)[:, :, None], every.expand(-1, case.T, -1, -1)
        )
        assert_same_in_float64(torch.maximum(scores, mass), mass)
    own = score_for_tokens(mu, summarize_chunks(k, mu, lengths)[:, :, None], every.expand(-1, case.M, -1, -1))
    at_its_own = chunk_log_mass(mu, k, lengths)
    assert_same_in_float64(own.diagonal(dim1=1, dim2=3), at_its_own.diagonal(dim1=1, dim2=3))


def test_one_summary_for_each_key_adds_up_to_the_mass() -> None:
    case = Case(ragged=False)
    made = case.make()
    keys = made["k"].view(case.B, case.M * case.S, 1, case.J, case.D)
    table = summarize_chunks(keys).view(case.B, case.M, case.S, case.J, case.D + 1)
    by_keys, masses = selected(case, made, "mass")
    by_summaries, scores = selected(case, made | {"landmarks": table}, "summaries")
    assert torch.equal(by_keys.indices, by_summaries.indices)
    missing = masses == -torch.inf
    assert_same_in_float64(scores.masked_fill(missing, 0), masses.masked_fill(missing, 0))


def test_slabs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case()
    made = case.make()
    (whole, of_heads), op = selected(case, made, "summaries"), ops_of(case, made)["scores"]
    monkeypatch.setattr(chunk_scores, "_SLAB_SCORES", 1)
    again, of_heads_again = selected(case, made, "summaries")
    assert torch.equal(whole.indices, again.indices)
    for x, y in ((whole.scores, again.scores), (of_heads, of_heads_again)):
        assert torch.equal(x == -torch.inf, y == -torch.inf)
        assert_same_in_float64(x.nan_to_num(neginf=0), y.nan_to_num(neginf=0))
    assert_equals_the_oracle(*op[:2], *op[2])


@pytest.mark.parametrize("block", [1, 1 << 18])
@pytest.mark.parametrize("per_query_head", [True, False])
@pytest.mark.parametrize("cuts", [[], [1, 20], [8, 9, 10, 64]], ids=str)
def test_the_parts_of_a_memory_change_no_bit(
    block: int, per_query_head: bool, cuts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it grew, as it was loaded, as branches share it; in blocks of 16 chunks, or all at once."""
    monkeypatch.setattr(chunk_scores, "_BLOCK_ELEMENTS", block)
    case = Case(M=70, D=64, K=8, n=2, per_query_head=per_query_head)
    made = {name: x.float() if x.is_floating_point() else x for name, x in case.make().items()}
    table, rest = made["landmarks"], (made["q"], made["beside"], case.K, made["ends"], case.J)
    exact, of_heads = select_for_tokens(*rest, [table])
    parts = list(table.tensor_split(cuts, 1))
    parts[-1] = (
        parts[-1].movedim((0, 1), (-3, -2)).contiguous().movedim((-3, -2), (0, 1))
    )  # a memory's strides
    found, found_of_heads = select_for_tokens(*rest, parts)
    assert_same_bits([*found, found_of_heads], [*exact, of_heads])


@pytest.mark.parametrize("block", [1, 1 << 18])
@pytest.mark.parametrize("cuts", [[], [1, 20], [8, 9, 10, 64]], ids=str)
def test_among_some_chunks_the_choice_is_that_without_the_others(
    block: int, cuts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row has chunks of its own, and places for more."""
    monkeypatch.setattr(chunk_scores, "_BLOCK_ELEMENTS", block)
    case = Case(M=70, D=4, K=8, n=2)
    made = case.make()
    none = 1 << 60
    among = torch.tensor([[0, *range(9, 66, 3), none, none], [*range(20, 40), 69, none]])
    ends = torch.where(made["ends"] == case.M, none, made["ends"])  # as if there were more
    given = made["q"], made["beside"], case.K, ends, case.J, made["landmarks"].tensor_split(cuts, 1)
    found, of_heads = select_for_tokens(*given, first_candidate=made["first"], among=among)
    kept = torch.zeros(case.B, case.M + 1, dtype=torch.bool).scatter_(1, among.clamp(max=case.M), True)[
        :, :-1
    ]
    left_out = made["landmarks"].masked_fill(~kept[:, :, None, None, None], 0)
    left_out[..., -1].masked_fill_(~kept[:, :, None, None], chunk_scores.EMPTY)
    wanted, wanted_of_heads = selected(case, made | {"landmarks": left_out}, "summaries")
    assert torch.equal(found.indices, wanted.indices)
    assert (found.indices >= 0).any()
    for x, y in ((found.scores, wanted.scores), (found.weights, wanted.weights), (of_heads, wanted_of_heads)):
        assert torch.equal(x == -torch.inf, y == -torch.inf)
        assert_same_in_float64(x.nan_to_num(neginf=0), y.nan_to_num(neginf=0))


def test_equal_chunks_select_the_earlier_one() -> None:
    case = Case(S=1, ragged=False)
    # Sums of whole numbers are exact in any order, and processors sum the columns of one product in different orders.
    made = {name: value.round() for name, value in case.make().items()}
    made |= {name: made[name][:, :1].expand_as(made[name]) for name in ("k", "landmarks")}
    made |= {"ends": torch.full((1, case.T), case.M), "first": torch.ones(1, case.T, dtype=torch.int64)}
    for kind in ("summaries", "mass"):
        assert (selected(case, made, kind)[0].indices == torch.tensor([1, 2])).all()


B, T, M, J = Case.B, Case.T, Case.M, Case.J
AMONG, KEYS = torch.zeros(B, 2, dtype=torch.int64), (torch.zeros(B, M, Case.S, J, Case.D), None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beside": torch.zeros(B, T, 1)}, r"^beside: "),
        ({"num_retrieved": 0}, r"^num_retrieved: expected at least 1"),
        ({"landmarks": None}, r"^landmarks, keys: expected one of them"),
        ({"num_key_value_heads": 3}, r"4 query heads for 3 key/value heads"),
        ({"among": torch.zeros(B + 1, 2, dtype=torch.int64)}, r"^among: expected shape \[B, n\]"),
        ({"among": torch.zeros(B, 2)}, r"^among: "),
        (
            {"first_candidate": torch.zeros(T, dtype=torch.int64)},
            r"^first_candidate: expected shape \[B or 1, T\]",
        ),
        ({"among": torch.zeros(B, dtype=torch.int64)}, r"^among: expected shape \[B, n\]"),
        ({"among": torch.tensor([[0, 2], [2, 1]])}, r"^among: expected each row's chunks in ascending order"),
        ({"among": torch.tensor([[0, 2], [-1, 1]])}, r"^among: expected each row's chunks in .* from 0 on"),
        ({"among": AMONG, "landmarks": None, "keys": KEYS}, r"^among: expected None with keys"),
    ],
)
def test_errors_name_the_argument(changes: dict[str, Any], message: str) -> None:
    made = Case().make()
    right = {
        "query": made["q"],
        "beside": made["beside"],
        "num_retrieved": 2,
        "num_candidates": torch.full((1, T), M),
        "num_key_value_heads": J,
        "landmarks": [made["landmarks"]],
    }
    select_for_tokens(**right)
    with pytest.raises(ValueError, match=message):
        select_for_tokens(**(right | changes))
