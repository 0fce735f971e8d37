"""Selecting chunks by landmark scores in four ways, against their definitions in plain Python."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.budgets import assert_same_in_float64, assert_within_budget
from tests.ops.memory_use import Largest
from trailmark.ops.landmark import selection as module
from trailmark.ops.landmark.selection import RetrievePer, Selected, select_by_landmarks, select_for_one

WAYS: tuple[RetrievePer, ...] = ("token_and_head", "token", "head", "cell")
CELL_WAYS: tuple[RetrievePer, ...] = ("head", "cell")


@dataclass(frozen=True)
class Case:
    B: int = 2
    P: int = 7
    H: int = 2
    M: int = 9
    k: int = 3
    ties: bool = False
    ragged: bool = True  # absent positions; candidates that differ between rows
    seed: int = 0

    def make(self) -> tuple[Tensor, dict[str, Any], Tensor]:
        """(scores, the rest, units); NaN and infinities stand wherever nothing may be looked at."""
        random = torch.Generator().manual_seed(self.seed)
        shape = (self.B, self.P, self.H, self.M)
        scores = torch.randn(shape, dtype=torch.float64, generator=random)
        if self.ties:
            # exp gives 1 or 0, so sums are exact in any order, and equal log-probabilities are equal bits
            scores = torch.randint(0, 3, shape, generator=random).double() * 1e4
        first = torch.zeros(self.B, dtype=torch.int64)
        end = torch.full((self.B,), self.M)
        present = torch.ones(self.B, self.P, dtype=torch.bool)
        if self.ragged:
            first = torch.randint(0, self.M // 2 + 1, (self.B,), generator=random)
            end = torch.randint(0, self.M + 1, (self.B,), generator=random)
            present = torch.rand(self.B, self.P, generator=random) < 0.7
        units = torch.zeros(self.B, self.P, dtype=torch.int64)
        for b in range(self.B):
            unit = -1
            for t in range(self.P):
                opens = unit < 0 or bool(torch.rand((), generator=random) < 0.4)
                unit += int(present[b, t]) and int(opens)
                units[b, t] = unit if present[b, t] else -1
        chunk = torch.arange(self.M)
        candidate = (chunk >= first[:, None]) & (chunk < end[:, None])
        nothing = ~(candidate[:, None, None] & present[:, :, None, None]).expand(shape)
        poison = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e300], dtype=torch.float64)
        scores = torch.where(nothing, poison[torch.randint(0, 4, shape, generator=random)], scores)
        rest = {"num_retrieved": self.k, "num_candidates": end, "first_candidate": first, "present": present}
        return scores, rest, units


cases = st.builds(
    Case,
    B=st.integers(1, 3),
    P=st.integers(0, 8),
    H=st.integers(1, 3),
    M=st.integers(0, 9),
    k=st.integers(1, 10),
    ties=st.booleans(),
    ragged=st.booleans(),
    seed=st.integers(0, 999),
)
some_cases = settings(max_examples=60)


class Definition:
    """The definitions, one number at a time."""

    def __init__(self, scores: Tensor, rest: dict[str, Any]) -> None:
        self.scores, self.k = scores.tolist(), rest["num_retrieved"]
        bounds = zip(rest["first_candidate"].tolist(), rest["num_candidates"].tolist(), strict=True)
        self.candidates = [list(range(f, c)) for f, c in bounds]
        chunk = torch.arange(scores.shape[3])
        self.candidate = (chunk >= rest["first_candidate"][:, None]) & (
            chunk < rest["num_candidates"][:, None]
        )
        self.present = rest["present"].tolist()
        self.H = scores.shape[2]

    def log_p(self, b: int, t: int, h: int) -> dict[int, float]:
        row = {m: self.scores[b][t][h][m] for m in self.candidates[b]}
        top = max(row.values(), default=0)
        sum_log = math.log(math.fsum(math.exp(x - top) for x in row.values())) if row else 0
        return {m: x - top - sum_log for m, x in row.items()}

    def best(self, b: int, places: list[tuple[int, int]]) -> list[int]:
        """The k best chunks by the maximum over (position, head)."""
        most = dict.fromkeys(self.candidates[b], -math.inf)
        for t, h in places:
            if self.present[b][t]:
                for m, x in self.log_p(b, t, h).items():
                    most[m] = max(most[m], x)
        found = sorted((m for m, x in most.items() if x > -math.inf), key=lambda m: (-most[m], m))
        return self.padded(found)

    def padded(self, found: list[int]) -> list[int]:
        chosen = sorted(found[: self.k])
        return chosen + [-1] * (self.k - len(chosen))

    def per_position(self, b: int, t: int, per: str) -> list[list[int]]:
        """[Hs, k]; the heads apart by the scores themselves."""
        if not self.present[b][t]:
            return [[-1] * self.k] * (self.H if per == "token_and_head" else 1)
        if per == "token":
            return [self.best(b, [(t, h) for h in range(self.H)])]
        rows = [{m: self.scores[b][t][h][m] for m in self.candidates[b]} for h in range(self.H)]
        return [self.padded(sorted(row, key=lambda m: (-row[m], m))) for row in rows]

    def of_cell(self, b: int, positions: range, per: str) -> list[list[int]]:
        """[Hs, k] by the maximum over these positions."""
        each = [[(t, h) for t in positions] for h in range(self.H)]
        return [self.best(b, x) for x in (each if per == "head" else [[y for x in each for y in x]])]


def by_position(indices: Tensor, units: Tensor) -> Tensor:
    """[B, P, Hs, k] of the choices [B, U, Hs, k]; -1 where absent."""
    B, P = units.shape
    if not indices.shape[1]:
        return torch.full((B, P, *indices.shape[2:]), -1)
    found = indices[torch.arange(B)[:, None], units.clamp(min=0)]
    return found.masked_fill((units < 0)[..., None, None], -1)


def in_calls(
    scores: Tensor, rest: dict[str, Any], units: Tensor, per: RetrievePer, cuts: list[int]
) -> tuple[Tensor, Tensor | None]:
    """Selecting causally in calls that end at the cuts: (the choice at each position, running)."""
    B, P = units.shape
    running = earlier = None
    last = torch.full((B,), -1)  # unit of each row that was read last
    found = []
    for start, end in zip([0, *cuts], [*cuts, P], strict=True):
        own = units[:, start:end]
        some = own >= 0
        first = own.masked_fill(~some, P).amin(1) if own.shape[1] else torch.full((B,), P)
        continues = (first == last) if earlier is not None else None
        out = select_by_landmarks(
            scores[:, start:end],
            **rest | {"present": rest["present"][:, start:end]},
            per=per,
            running=running,
            units=(own - first[:, None]).masked_fill(~some, -1),
            continues=continues,
            earlier=earlier,
        )
        running = out.running
        found.append(by_position(out.indices, (own - first[:, None]).masked_fill(~some, -1)))
        heads = scores.shape[2] if per == "head" else 1
        assert found[-1].shape == (B, end - start, heads, rest["num_retrieved"])
        if earlier is None:
            earlier = torch.full((B, heads, rest["num_retrieved"]), -1)
        for b in range(B):
            for t in range(end - start):
                if some[b, t]:
                    earlier[b], last[b] = found[-1][b, t], own[b, t]
    return torch.cat(found, 1), running


def assert_shapes(out: Selected, case: Case, per: str, N: int) -> None:
    Hs = case.H if per in ("token_and_head", "head") else 1
    assert out.indices.dtype == torch.int64
    assert out.indices.shape == (case.B, N, Hs, case.k)
    if per in CELL_WAYS:
        assert out.running is not None
        assert out.running.shape == (case.B, Hs, case.M)
    else:
        assert out.running is None


@pytest.mark.parametrize("per", ["token_and_head", "token"])
@some_cases
@given(case=cases)
@example(case=Case(M=0))
@example(case=Case(M=130, P=2, ties=True))
def test_each_position_selects_by_its_own_scores(case: Case, per: RetrievePer) -> None:
    scores, rest, _ = case.make()
    out, definition = select_by_landmarks(scores, **rest, per=per), Definition(scores, rest)
    assert_shapes(out, case, per, case.P)
    for b in range(case.B):
        for t in range(case.P):
            assert out.indices[b, t].tolist() == definition.per_position(b, t, per)


@pytest.mark.parametrize("per", CELL_WAYS)
@some_cases
@given(case=cases, cuts=st.lists(st.integers(0, 8), max_size=3))
@example(case=Case(M=0), cuts=[])
@example(case=Case(M=130, P=4, ties=True), cuts=[1, 3])
def test_the_whole_cell_selects_by_all_positions_fed_so_far(
    case: Case, cuts: list[int], per: RetrievePer
) -> None:
    scores, rest, _ = case.make()
    definition, running = Definition(scores, rest), None
    cuts = sorted(min(x, case.P) for x in cuts)
    for start, end in zip([0, *cuts], [*cuts, case.P], strict=True):
        present = rest["present"][:, start:end]
        call = rest | {"present": present, "per": per, "running": running}
        out = select_by_landmarks(scores[:, start:end], **call)
        assert_shapes(out, case, per, 1)
        assert out.running is not None
        running = out.running.masked_fill(~definition.candidate[:, None], torch.nan)
        for b in range(case.B):
            assert out.indices[b, 0].tolist() == definition.of_cell(b, range(end), per)


@pytest.mark.parametrize("per", CELL_WAYS)
@some_cases
@given(case=cases)
@example(case=Case(M=0))
@example(case=Case(M=130, P=5, ties=True))
def test_causal_units_select_by_the_positions_up_to_their_first(case: Case, per: RetrievePer) -> None:
    scores, rest, units = case.make()
    out, definition = select_by_landmarks(scores, **rest, per=per, units=units), Definition(scores, rest)
    assert_shapes(out, case, per, int(units.max()) + 1 if units.numel() else 0)
    for b in range(case.B):
        opened = {u: t for t, u in reversed(list(enumerate(units[b].tolist())))}
        for u in range(out.indices.shape[1]):
            chosen = definition.of_cell(b, range(opened.get(u, -1) + 1), per)
            assert out.indices[b, u].tolist() == chosen
    # all positions of the call count for the next, also those after the last unit began
    assert out.running is not None
    whole = select_by_landmarks(scores, **rest, per=per)
    assert whole.running is not None
    assert torch.equal(out.running, whole.running)


@pytest.mark.parametrize("per", CELL_WAYS)
@settings(max_examples=40)
@given(case=cases, cuts=st.lists(st.integers(0, 8), max_size=4))
@example(case=Case(), cuts=[1, 2, 3, 4, 5, 6])
@example(case=Case(ragged=False), cuts=[2, 2, 4])
@example(case=Case(B=3, P=40, M=100, k=4), cuts=[1, 13, 14, 29])
def test_causal_choices_are_the_same_for_any_split_into_calls(
    case: Case, cuts: list[int], per: RetrievePer
) -> None:
    scores, rest, units = case.make()
    whole = select_by_landmarks(scores, **rest, per=per, units=units)
    found, running = in_calls(scores, rest, units, per, sorted(min(x, case.P) for x in cuts))
    assert torch.equal(found, by_position(whole.indices, units))
    assert whole.running is not None
    assert running is not None
    assert torch.equal(running, whole.running)


def test_b1_fewer_chunks_than_k() -> None:
    """Official code: topk raises."""
    case = Case(M=3, k=5, ragged=False)
    scores, rest, units = case.make()
    rest["num_candidates"] = torch.tensor([2, 0])
    for per in WAYS:
        for given_units in (None, units) if per in CELL_WAYS else (None,):
            indices = select_by_landmarks(scores, **rest, per=per, units=given_units).indices
            for b, expected in enumerate(([0, 1, -1, -1, -1], [-1] * 5)):
                read = indices[b] if given_units is None else indices[b, : int(units[b].max()) + 1]
                assert torch.equal(read, torch.tensor(expected).expand_as(read))


@pytest.mark.parametrize("per", CELL_WAYS)
def test_b14_a_later_position_changes_no_earlier_choice(per: RetrievePer) -> None:
    """Official code: the maximum over a call's positions lets later ones choose for earlier ones."""
    scores, rest, units = Case(P=12, M=100, ragged=False).make()
    before = select_by_landmarks(scores, **rest, per=per, units=units).indices
    whole = select_by_landmarks(scores, **rest, per=per).indices
    never = next(m for m in range(100) if m not in before and m not in whole)
    for t in range(1, 12):
        changed = scores.clone()
        changed[:, t:, :, never] = 100  # later positions are certain of it
        after = select_by_landmarks(changed, **rest, per=per, units=units).indices
        for b in range(2):
            opened = int(units[b, t - 1]) + 1  # units before t, some of which have later positions too
            assert torch.equal(after[b, :opened], before[b, :opened])
            since = after[b, opened : int(units[b, -1]) + 1]
            assert (since == never).any(-1).all()
        # the other way selects it for the earlier positions too: what one choice for the cell costs
        assert (select_by_landmarks(changed, **rest, per=per).indices == never).any(-1).all()


def test_one_position_at_a_time_is_causal() -> None:
    """A decoding model's calls: the whole-cell way selects as units of one position do."""
    scores, rest, _ = Case(ragged=False).make()
    for per in CELL_WAYS:
        causal = select_by_landmarks(scores, **rest, per=per, units=torch.arange(7).expand(2, 7)).indices
        running = None
        for t in range(7):
            call = rest | {"present": None, "running": running}
            out = select_by_landmarks(scores[:, t : t + 1], **call, per=per)
            running = out.running
            assert torch.equal(out.indices[:, 0], causal[:, t])


def test_a_probability_decides_and_not_a_score() -> None:
    """Head 1 scores all chunks higher, and is certain of none."""
    scores = torch.tensor([[9.0, 0, 0, 0], [20, 20, 20, 21]])[None, None]
    for per in ("token", "cell"):
        assert select_by_landmarks(scores, 1, torch.tensor([4]), per=per).indices.item() == 0


def test_a_score_of_minus_infinity_is_no_candidates() -> None:
    scores = torch.tensor([[1.0, -torch.inf, -torch.inf], [2, -torch.inf, 1]])[None, None]
    expected = {
        "token_and_head": [[0, -1], [0, 2]],
        "token": [[0, 2]],
        "head": [[0, -1], [0, 2]],
        "cell": [[0, 2]],
    }
    for per in WAYS:
        assert (
            select_by_landmarks(scores, 2, torch.tensor([3]), per=per).indices[0, 0].tolist() == expected[per]
        )


@pytest.mark.parametrize("slab", [1, 1 << 20])
def test_of_many_equals_the_earliest(slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLAB_ELEMENTS", slab)
    scores = torch.zeros(2, 3, 2, 500)
    scores[1, :, :, [70, 499]] = 1
    expected = [[5, 6, 7, 8], [5, 6, 70, 499]]
    for per in WAYS:
        found = select_by_landmarks(scores, 4, torch.tensor([500, 500]), 5, per).indices
        assert torch.equal(found, torch.tensor(expected)[:, None, None].expand_as(found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("per", WAYS)
def test_padding_slabs_and_neighbours_change_no_bit(
    per: RetrievePer, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores, rest, units = Case(B=3, P=9, H=2, M=700, k=5).make()
    scores = scores.to(dtype)
    rest |= {"num_candidates": torch.tensor([650, 3, 333]), "first_candidate": 1}
    random = torch.Generator().manual_seed(1)
    scores[..., :650] = torch.randn(3, 9, 2, 650, generator=random).to(dtype)
    for own in (None, units) if per in CELL_WAYS else (None,):
        before = select_by_landmarks(scores, **rest, per=per, units=own)

        def assert_same(rows: slice = slice(None), **changed: Any) -> None:
            arguments = {"scores": scores, "per": per, "units": own} | rest | changed  # noqa: B023
            after = select_by_landmarks(**arguments)
            U = after.indices.shape[1]
            assert torch.equal(after.indices, before.indices[rows, :U])  # noqa: B023
            assert (before.indices[rows, U:] == -1).all()  # noqa: B023
            if after.running is not None:
                assert before.running is not None  # noqa: B023
                assert torch.equal(after.running[..., :650], before.running[rows, ..., :650])  # noqa: B023

        for M in (650, 704, 705, 1500):
            padded = torch.full((3, 9, 2, M), torch.nan, dtype=dtype)
            padded[..., : min(M, 700)] = scores[..., :M]
            assert_same(scores=padded)
        for b in range(3):
            rows = slice(b, b + 1)
            changed = {name: rest[name][rows] for name in ("num_candidates", "present")}
            assert_same(rows, scores=scores[rows], units=None if own is None else own[rows], **changed)
        for slab in (1, 10_000):
            with monkeypatch.context() as patch:
                patch.setattr(module, "_SLAB_ELEMENTS", slab)
                assert_same()


def test_running_maxima_are_log_probabilities() -> None:
    scores, rest, _ = Case(P=20, M=150, ragged=False).make()
    exact = scores.log_softmax(-1).amax(1)
    running = select_by_landmarks(scores, **rest, per="head").running
    assert running is not None
    assert_same_in_float64(running, exact)
    low = scores.float()
    running = select_by_landmarks(low, **rest, per="head").running
    assert running is not None
    assert_within_budget(running, low.log_softmax(-1).amax(1), low.double().log_softmax(-1).amax(1))


def test_no_tensor_of_the_size_of_scores_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, rest, _ = Case(P=64, M=100, ragged=False).make()
    slab = 4 * 2 * 2 * 128  # 4 positions
    monkeypatch.setattr(module, "_SLAB_ELEMENTS", slab)

    for per in WAYS:
        every = torch.arange(64).expand(2, 64)
        for units in (None, every, every // 5) if per in CELL_WAYS else (None,):
            with Largest() as largest:
                select_by_landmarks(scores, **rest, per=per, units=units)
            assert largest.elements == slab < scores.numel()


def test_no_gradient_and_no_autocast() -> None:
    scores, rest, _ = Case(P=4, M=80, ragged=False).make()
    scores = scores.float().requires_grad_()
    for per in WAYS:
        before = select_by_landmarks(scores, **rest, per=per)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            after = select_by_landmarks(scores, **rest, per=per)
        assert torch.equal(before.indices, after.indices)
        if before.running is not None:
            assert after.running is not None
            assert not before.running.requires_grad
            assert torch.equal(before.running, after.running)


RIGHT: dict[str, Any] = {
    "scores": torch.zeros(2, 3, 4, 5),
    "num_retrieved": 2,
    "num_candidates": torch.tensor([5, 0]),
    "per": "head",
    "present": torch.ones(2, 3, dtype=torch.bool),
    "running": torch.zeros(2, 4, 5),
    "units": torch.tensor([[-1, 0, 1], [0, -1, 0]]),
    "continues": torch.tensor([True, False]),
    "earlier": torch.zeros(2, 4, 2, dtype=torch.int64),
}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"scores": torch.zeros(2, 3, 5)}, r"^scores: .*\[B, P, H, M\]"),
        ({"scores": torch.zeros(2, 3, 4, 5).bfloat16()}, "^scores: .*float32 or float64.*promote"),
        ({"num_retrieved": 0}, "^num_retrieved: .*at least 1, got 0"),
        ({"num_candidates": torch.tensor([6, 0])}, "^num_candidates: .*at most M = 5"),
        ({"num_candidates": torch.tensor([-1, 0])}, "^num_candidates: .*no negative"),
        ({"num_candidates": torch.tensor([5])}, r"^num_candidates: .*\[B\]"),
        ({"num_candidates": torch.tensor([5.0, 0])}, "^num_candidates: .*integer"),
        ({"first_candidate": -1}, "^first_candidate: .*no negative"),
        ({"first_candidate": torch.zeros(2, 3, dtype=torch.int64)}, r"^first_candidate: .*\[B\]"),
        ({"per": "layer"}, "^per: .*'token_and_head', 'token', 'head', 'cell', got 'layer'"),
        ({"per": "token"}, '^running: .*None.*"head" and "cell"'),
        ({"per": "token_and_head", "running": None}, "^units: .*None"),
        ({"present": torch.ones(2, 3)}, "^present: .*bool"),
        ({"present": torch.ones(2, 4, dtype=torch.bool)}, r"^present: .*\[B, P\]"),
        ({"running": torch.zeros(2, 1, 5)}, r"^running: .*\[B, H or 1, M\] = \(2, 4, 5\)"),
        ({"running": torch.zeros(2, 4, 5).double()}, "^running: .*dtype of scores"),
        ({"units": torch.tensor([[0, 0, 1], [1, 0, 0]])}, "^units: .*steps of 1"),
        ({"units": torch.tensor([[0, 0, 2], [0, 0, 0]])}, "^units: .*steps of 1"),
        ({"units": torch.tensor([[0, 1, 0], [0, 0, 0]])}, "^units: .*steps of 1"),
        ({"units": torch.zeros(2, 3)}, "^units: .*integer"),
        ({"units": None}, "^continues: .*without units"),
        ({"units": None, "continues": None}, "^earlier: .*without units"),
        ({"continues": None}, "^continues: .*or neither"),
        ({"earlier": None}, "^earlier: .*or neither"),
        ({"continues": torch.tensor([1, 0])}, "^continues: .*bool"),
        ({"earlier": torch.zeros(2, 1, 2, dtype=torch.int64)}, r"^earlier: .*\[B, H or 1, k\]"),
        ({"earlier": torch.full((2, 4, 2), 5)}, "^earlier: .*below M = 5"),
    ],
)
def test_errors_name_the_argument(wrong: dict[str, Any], message: str) -> None:
    select_by_landmarks(**RIGHT)
    with pytest.raises(ValueError, match=message):
        select_by_landmarks(**RIGHT | wrong)


@pytest.mark.parametrize("per", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("M", [1, 3, 64, 130])
def test_one_position_may_take_the_short_way(per: Any, dtype: torch.dtype, M: int) -> None:
    """Bit for bit, with ties, from the cell's first position on."""
    random = torch.Generator().manual_seed(M)
    every = torch.full((2,), M)
    long_way: tuple[Tensor | None, Tensor | None] = (None, None)  # running, earlier
    short_way = long_way
    for place in range(4):
        scores = torch.randint(-3, 4, (2, 1, 3, M), generator=random).to(dtype)
        causal = per in ("head", "cell")
        goes_on = causal and place % 2 == 1  # units of two positions
        running, earlier = long_way
        options: dict[str, Any] = {}
        if causal:
            options = {"running": running, "units": torch.zeros(2, 1, dtype=torch.int64)}
            if place:
                options |= {"continues": torch.full((2,), goes_on), "earlier": earlier}
        expected = select_by_landmarks(scores.clone(), 2, every, per=per, **options)
        got = select_for_one(scores, 2, per, short_way[0], short_way[1] if goes_on else None)
        assert torch.equal(got.indices, expected.indices)
        assert (got.running is None) == (expected.running is None)
        if got.running is not None and expected.running is not None:
            assert torch.equal(got.running, expected.running)
        long_way = expected.running, expected.indices[:, 0]
        short_way = got.running, got.indices[:, 0]
