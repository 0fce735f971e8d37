"""The tables of Landmark Attention against the definition, place by place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.landmark.cases import inputs
from trailmark.ops import LandmarkLayout

Seen = tuple[set[int], list[tuple[int, set[int]]]]  # own tokens; (landmark, tokens) of each far chunk


def of_case(case: dict[str, Any]) -> tuple[dict[str, Any], int]:
    (q, _, _), rest = inputs(D=1, **case)
    return rest, q.shape[1]


def by_definition(rest: dict[str, Any], P: int) -> list[list[Seen]]:
    """What each query of each row attends to, in places of k."""
    found = []
    B, T = rest["is_landmark"].shape
    for b in range(B):
        marks = rest["is_landmark"][b].tolist()
        ids = [0] * T if rest["document_ids"] is None else rest["document_ids"][b].tolist()
        asked = range(T - P, T) if rest["query_places"] is None else rest["query_places"][b].tolist()
        chunks: dict[int, list[list[int]]] = {}  # of a document: places, a landmark last
        for t in range(T):
            if ids[t] < 0:
                continue
            of_document = chunks.setdefault(ids[t], [[]])
            of_document[-1].append(t)
            if marks[t]:
                of_document.append([])
        row: list[Seen] = []
        for i in asked:
            own, far = set(), []
            if i >= 0 and ids[i] >= 0:
                mine = next(n for n, chunk in enumerate(chunks[ids[i]]) if i in chunk)
                for n, chunk in enumerate(chunks[ids[i]]):
                    tokens = {t for t in chunk if not marks[t] and (not rest["causal"] or t <= i)}
                    if n == mine:
                        own = tokens
                    elif tokens and marks[chunk[-1]] and (n < mine or not rest["causal"]):
                        far.append((chunk[-1], tokens))
            row.append((own, far))
        found.append(row)
    return found


def by_tables(layout: LandmarkLayout) -> list[list[Seen]]:
    """The same, read off the tables as their docstring says."""
    found = []
    for b in range(len(layout.starts)):
        at = range(layout.num_keys) if layout.key_order is None else layout.key_order[b].tolist()
        back = range(layout.num_queries) if layout.query_order is None else layout.query_order[b].tolist()
        row: list[Seen] = [(set(), [])] * layout.num_queries

        def tokens(c: int, b: int = b, at: Any = at) -> list[int]:
            start = int(layout.starts[b, c])
            return [at[start + i] for i in range(int(layout.lengths[b, c]))]

        for c in range(layout.num_chunks):
            far = [
                (at[int(layout.landmarks[b, m])], set(tokens(m)))
                for m in range(int(layout.first[b, c]), int(layout.end[b, c]))
                if m != c and layout.far[b, m]
            ]
            for i in range(int(layout.query_counts[b, c])):
                own = tokens(c)
                if layout.causal:
                    own = own[: int(layout.query_slots[b, c]) + i + 1]
                row[back[int(layout.query_starts[b, c]) + i]] = (set(own) if layout.own else set(), far)
        found.append(row)
    return found


CASES = st.fixed_dictionaries(
    {
        "B": st.integers(1, 3),
        "T": st.integers(1, 24),
        "S": st.integers(1, 6),
        "marks_kind": st.sampled_from(["regular", "phase", "random", "pairs", "none", "all"]),
        "documents_kind": st.sampled_from([None, "left", "right", "between", "several", "mixed"]),
        "places_kind": st.sampled_from([None, "left", "right"]),
        "causal": st.booleans(),
        "seed": st.integers(0, 999),
    }
)


@settings(max_examples=80)
@given(CASES)
@example({"T": 24, "S": 3, "P": 5, "marks_kind": "phase"})
@example({"T": 24, "S": 3, "P": 9, "marks_kind": "phase", "documents_kind": "between"})
def test_tables_say_what_the_definition_says(case: dict[str, Any]) -> None:
    rest, P = of_case(case)
    layout = LandmarkLayout.of(num_queries=P, **rest)
    assert by_tables(layout) == by_definition(rest, P)
    assert layout.num_chunks == layout.starts.shape[1]
    assert layout.max_length == max(layout.lengths.flatten().tolist(), default=0)
    assert layout.max_queries == max(layout.query_counts.flatten().tolist(), default=0)
    none = (layout.lengths == 0) & (layout.landmarks < 0)
    for table in (layout.query_counts, layout.far, layout.end - layout.first):
        assert not table[none].any(), "a chunk that does not exist"


@settings(max_examples=30)
@given(CASES)
def test_tables_spread_over_places_give_the_same_tables(case: dict[str, Any]) -> None:
    rest, P = of_case(case)
    layout = LandmarkLayout.of(num_queries=P, **rest)
    is_landmark, document_ids, query_places, seen = layout.in_places()
    again = LandmarkLayout.of(is_landmark, document_ids, rest["causal"], query_places)
    for name in (
        "starts",
        "lengths",
        "landmarks",
        "query_starts",
        "query_counts",
        "query_slots",
        "first",
        "far",
    ):
        assert torch.equal(getattr(again, name), getattr(layout, name)), name
    assert again.key_order is None
    assert again.query_order is None
    assert torch.equal(seen.sum(1), layout.far.sum(1))


def test_a_table_by_hand() -> None:
    """Window begins inside a chunk; two landmarks in a row; an incomplete tail."""
    is_landmark = torch.tensor([[0, 0, 1, 0, 0, 0, 1, 1, 0]]).bool()
    layout = LandmarkLayout.of(is_landmark)
    assert layout.starts.tolist() == [[0, 3, 7, 8]]
    assert layout.lengths.tolist() == [[2, 3, 0, 1]]
    assert layout.landmarks.tolist() == [[2, 6, 7, -1]]
    assert layout.query_starts.tolist() == [[0, 3, 7, 8]]
    assert layout.query_counts.tolist() == [[3, 4, 1, 1]]
    assert layout.query_slots.tolist() == [[0, 0, 0, 0]]
    assert layout.first.tolist() == [[0, 0, 0, 0]]
    assert layout.end.tolist() == [[0, 1, 2, 3]]
    assert layout.far.tolist() == [[True, True, False, False]]
    assert (layout.num_chunks, layout.max_length, layout.max_queries) == (4, 3, 4)
    last = LandmarkLayout.of(is_landmark, num_queries=4)  # places 5 to 8
    assert last.query_starts.tolist() == [[0, 0, 2, 3]]
    assert last.query_counts.tolist() == [[0, 2, 1, 1]]
    assert last.query_slots.tolist() == [[0, 2, 0, 0]]


@pytest.mark.parametrize("kind", [None, "left", "right", "several"])
def test_keys_and_queries_stay_where_they_are_unless_a_chunk_is_interrupted(kind: str | None) -> None:
    rest, _ = of_case({"B": 3, "T": 30, "marks_kind": "phase", "documents_kind": kind})
    layout = LandmarkLayout.of(**rest)
    assert layout.key_order is None
    assert layout.query_order is None
    rest["document_ids"] = torch.zeros(3, 30, dtype=torch.int64)
    rest["document_ids"][1, 7] = -1
    assert LandmarkLayout.of(**rest).key_order is not None


def test_seeing_hides_chunks_from_afar() -> None:
    rest, P = of_case({"T": 30, "S": 4})
    layout = LandmarkLayout.of(**rest)
    far = torch.ones_like(layout.far)
    far[0, 1] = far[1, 0] = False
    expected = by_tables(layout)
    for b, hidden in ((0, 9), (1, 4)):  # places of their landmarks
        expected[b] = [(own, [x for x in seen if x[0] != hidden]) for own, seen in expected[b]]
    assert by_tables(layout.seeing(far)) == expected
    assert by_tables(layout.seeing(far).seeing(torch.ones_like(far))) == expected
    nothing_near = layout.seeing(far, own=False)
    assert not nothing_near.seeing(far).own, "what is hidden stays hidden"
    assert by_tables(nothing_near) == [[(set(), seen) for _, seen in row] for row in expected]
    assert by_tables(layout) == by_definition(rest, P), "the first one is as it was"


@pytest.mark.parametrize(("B", "T", "P"), [(0, 5, 5), (2, 0, 0), (2, 5, 0)])
def test_empty(B: int, T: int, P: int) -> None:
    layout = LandmarkLayout.of(torch.zeros(B, T, dtype=torch.bool), num_queries=P)
    assert layout.starts.shape == (B, layout.num_chunks)
    assert not layout.query_counts.any() or P


def test_no_place_at_all_with_queries_that_are_absent() -> None:
    layout = LandmarkLayout.of(
        torch.zeros(2, 0, dtype=torch.bool), query_places=torch.full((2, 3), -1), num_queries=3
    )
    assert (layout.num_queries, layout.num_keys, layout.num_chunks) == (3, 0, 0)


ONES = torch.ones(2, 6, dtype=torch.bool)


def whole(*shape: int, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=torch.int64, device=device)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        (r"is_landmark: expected shape \[B, T\], got \(6,\)", {"is_landmark": ONES[0]}),
        (r"is_landmark: expected a bool tensor, got torch.int64. Compare", {"is_landmark": ONES.long()}),
        (r"document_ids: .*\[B, T\] = \(2, 6\)", {"document_ids": whole(2, 5)}),
        (r"document_ids: expected an integer tensor.*float32", {"document_ids": torch.zeros(2, 6)}),
        (r"document_ids: expected one on cpu, got .*meta", {"document_ids": whole(2, 6, device="meta")}),
        (r"q: expected at most as many, got 7 queries for 6 keys. Pass query_places.", {"num_queries": 7}),
        (r"query_places: expected shape \[B, P\], got \(6,\)", {"query_places": whole(6)}),
        (r"query_places: .*\[B, P\] = \(2, 3\)", {"query_places": whole(2, 2), "num_queries": 3}),
        (r"query_places: expected an integer tensor", {"query_places": torch.zeros(2, 2)}),
        (r"query_places: expected one on cpu", {"query_places": whole(2, 2, device="meta")}),
        (r"query_places: expected places below T = 6, got 6", {"query_places": whole(2, 1) + 6}),
        (r"query_places: expected places from 0, or -1 .*, got -2", {"query_places": whole(2, 1) - 2}),
        (
            r"query_places: expected each chunk's queries at consecutive places.*Pass the rows between them",
            {"is_landmark": ~ONES, "query_places": torch.tensor([[0, 1], [3, 5]])},
        ),
        (
            r"query_places: expected each chunk's queries at consecutive places.*or one twice",
            {"is_landmark": ~ONES, "query_places": torch.tensor([[0, 1], [3, 3]])},
        ),
    ],
)
def test_errors(message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        LandmarkLayout.of(**{"is_landmark": ONES} | arguments)


@pytest.mark.parametrize(
    ("message", "far"),
    [
        (r"far: expected shape \[B, C\] = \(2, 6\), got \(2, 5\)", ONES[:, :5]),
        (r"far: expected a bool tensor, got torch.int64", ONES.long()),
        (r"far: expected one on cpu, got a tensor on meta", ONES.to("meta")),
    ],
)
def test_errors_of_seeing(message: str, far: Tensor) -> None:
    with pytest.raises(ValueError, match=message):
        LandmarkLayout.of(ONES).seeing(far)
