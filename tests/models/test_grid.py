"""Where landmarks stand, against loops over single tokens: counts, takes, tails and joined calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from trailmark.models.grid import Grid, join, lay_out, tail
from trailmark.models.takes import Take

PROPERTY = settings(max_examples=150)


class Position(NamedTuple):
    chunk: int  # of the call
    slot: int  # place in its chunk; an early landmark's too
    token: int  # of the call; -1: a landmark
    closes: bool  # its chunk


@dataclass(frozen=True)
class Call:
    """Rows (phase, number of tokens, those that an early landmark follows) of one call."""

    S: int
    T: int
    rows: tuple[tuple[int, int, tuple[int, ...]], ...]
    close: bool | None = None  # None: as the rows say

    def grid(self, landmarks: bool = True) -> Grid:
        phases, counts = (np.array([row[i] for row in self.rows]) for i in (0, 1))
        marks = np.zeros((len(self.rows), self.T), bool)
        for b, row in enumerate(self.rows):
            marks[b, list(row[2])] = True
        close = marks if self.close is None else self.close
        return lay_out(self.T, self.S, phases, counts, close, landmarks=landmarks)

    def by_hand(self, landmarks: bool = True) -> list[list[Position]]:
        return [self._row(*row, landmarks) for row in self.rows]

    def _row(self, phase: int, count: int, marks: tuple[int, ...], landmarks: bool) -> list[Position]:
        chunk, slot, found = 0, phase, []
        for t in range(count):
            early = t in marks if self.close is None else self.close and t == count - 1
            full = slot == self.S - 1 or bool(early)
            found.append(Position(chunk, slot, t, full and not landmarks))
            if full and landmarks:
                found.append(Position(chunk, slot + 1, -1, True))
            chunk, slot = (chunk + 1, 0) if full else (chunk, slot + 1)
        return found


@st.composite
def calls(draw: st.DrawFn, S: int = 0, B: int = 0) -> Call:
    S = S or draw(st.integers(1, 5))
    B = B or draw(st.integers(1, 3))
    T = draw(st.integers(1, 14))

    def row(least: int) -> tuple[int, int, tuple[int, ...]]:
        n = draw(st.integers(least, T))
        marks = draw(st.sets(st.integers(0, n - 1))) if n else ()
        return draw(st.integers(0, S - 1)), n, tuple(marks)

    # some row has tokens, that is what a call is for
    rows = [row(1)] * B if draw(st.booleans()) else [row(b == 0) for b in range(B)]
    rows = draw(st.permutations(rows))
    if draw(st.booleans()):
        rows = [(phase, T, tuple(range(T))) for phase, *_ in rows]
    return Call(S, T, tuple(rows), draw(st.sampled_from([None, None, True, False])))


EVERY = (
    example(call=Call(4, 9, ((0, 9, ()),), False)),  # of one text: rows alike
    example(call=Call(4, 9, ((3, 9, ()),) * 2, True)),
    example(call=Call(1, 3, ((0, 3, ()), (0, 0, ())), True)),
)


def property_of_calls(test: Callable[..., None]) -> Any:
    """With landmarks, and without them."""
    for case in EVERY:
        test = case(test)
    return pytest.mark.parametrize("landmarks", [True, False])(PROPERTY(given(call=calls())(test)))


def numbered(B: int, n: int, first: int = 1) -> Tensor:
    """[B, n, 1]: each place of each row has a number of its own, none is 0."""
    return (torch.arange(first, first + n) + 1000 * torch.arange(B)[:, None])[..., None].double()


def taken(take: Take, x: Tensor) -> list[list[int]]:
    out = take(x)
    assert out.shape == (x.shape[0], take.index.shape[1], *x.shape[2:])
    return [[int(number) % 1000 for number in row] for row in out[..., 0]]


def padded(rows: list[list[int]], width: int, fill: int = 0) -> list[list[int]]:
    return [row + [fill] * (width - len(row)) for row in rows]


def of_rows(table: Any, B: int) -> list[list[int]]:
    """A table [b, n] as the B rows that it stands for."""
    return np.broadcast_to(table, (B, table.shape[1])).astype(int).tolist()


def closings(row: list[Position]) -> list[int]:
    return [place for place, position in enumerate(row) if position.closes]


def chunks_of(row: list[Position]) -> list[list[int]]:
    """Per chunk, the places of its positions."""
    found: list[list[int]] = [[] for _ in range(row[-1].chunk + 1)] if row else []
    for place, position in enumerate(row):
        found[position.chunk].append(place)
    return found


def assert_places(grid: Grid, rows: list[list[Position]], whole: bool = False) -> None:
    """In their chunks, of each row's last positions, or of all."""
    chunk, slots = of_rows(grid.chunk, len(rows)), of_rows(grid.chunk_slots, len(rows))
    for b, row in enumerate(rows):
        own = [slot for slot, number in zip(slots[b], chunk[b], strict=True) if number >= 0]
        assert own == [p.slot for p in row[len(row) - len(own) :]]
        assert len(own) == len(row) or not whole


# --- one call --------------------------------------------------------------------------------------------


@property_of_calls
def test_the_layout(call: Call, landmarks: bool) -> None:
    grid, rows, B = call.grid(landmarks), call.by_hand(landmarks), len(call.rows)
    P = max(map(len, rows)) if landmarks else call.T
    assert grid.num_positions == P
    assert of_rows(grid.chunk, B) == padded([[p.chunk for p in row] for row in rows], P, -1)
    assert of_rows(grid.is_landmark, B) == padded([[p.closes for p in row] for row in rows], P)
    assert of_rows(grid.token, B) == padded([[p.token for p in row] for row in rows], P, -1)
    assert_places(grid, rows, whole=True)
    same = len(set(call.rows)) == 1 and call.close is not None and call.rows[0][1] == call.T
    assert len(grid.chunk) == (1 if same else B)  # rows that are alike are laid out once


@property_of_calls
def test_the_numbers(call: Call, landmarks: bool) -> None:
    grid, rows, B = call.grid(landmarks), call.by_hand(landmarks), len(call.rows)
    ends = [closings(row) for row in rows]
    lengths = [
        [row[place].slot + (not landmarks) for place in mine] for row, mine in zip(rows, ends, strict=True)
    ]
    starts = [[place - row[place].slot for place in mine] for row, mine in zip(rows, ends, strict=True)]
    C = max(map(len, ends))
    assert (grid.counts + np.zeros(B)).tolist() == [len(row) for row in rows]
    assert grid.num_chunks == max((row[-1].chunk + 1 if row else 0) for row in rows)
    assert grid.num_closed == C
    assert (grid.closed + np.zeros(B)).tolist() == [len(mine) for mine in ends]
    assert of_rows(grid.landmark_places, B) == padded(ends, C, -1)
    assert of_rows(grid.lengths, B) == padded(lengths, C)
    found = of_rows(grid.chunk_starts, B)
    assert [row[: len(mine)] for row, mine in zip(found, starts, strict=True)] == starts
    assert grid.has_short_chunks == any(n != call.S for row in lengths for n in row)
    opened = [
        phase if not row else 0 if row[-1].closes else row[-1].slot + 1
        for (phase, *_), row in zip(call.rows, rows, strict=True)
    ]
    assert (grid.open_tokens + np.zeros(B)).tolist() == opened


@property_of_calls
def test_positions_hold_the_tokens_and_the_landmarks(call: Call, landmarks: bool) -> None:
    grid, rows, B = call.grid(landmarks), call.by_hand(landmarks), len(call.rows)
    tokens = numbered(B, call.T)
    positions = grid.insert_landmarks(tokens, torch.tensor([-1.0]).double() if landmarks else None)
    for b, row in enumerate(rows):
        expected = [-1 if p.token < 0 else int(tokens[b, p.token]) for p in row]
        assert positions[b, : len(row), 0].tolist() == expected
        assert not positions[b, len(row) :].any()
    if not landmarks:
        return
    widest = max(count for _, count, _ in call.rows)
    for keep in (None, 1, 2, widest, widest + 2):
        found = grid.last_tokens(keep)(positions)[..., 0]
        for b, (_, count, _) in enumerate(call.rows):
            own = tokens[b, :count, 0].tolist()
            if keep is None:
                assert found[b].tolist() == own + [0] * (widest - count)
            else:
                assert found[b].tolist() == ([0] * keep + own)[len(own) :]


@property_of_calls
def test_landmarks_and_rows_of_chunks(call: Call, landmarks: bool) -> None:
    grid, rows, B = call.grid(landmarks), call.by_hand(landmarks), len(call.rows)
    positions = numbered(B, grid.num_positions)
    marks = [[place + 1 for place in closings(row)] for row in rows]
    assert taken(grid.landmarks, positions) == padded(marks, grid.num_closed)
    R = max(len(chunk) for row in rows for chunk in chunks_of(row))
    assert grid.rows_per_chunk == R
    flat = [[place for chunk in padded(chunks_of(row), R, -1) for place in chunk] for row in rows]
    expected = [[place + 1 for place in row] for row in padded(flat, grid.num_chunks * R, -1)]
    assert taken(grid.rows, positions) == expected
    there = torch.tensor([[place < len(row) for place in range(grid.num_positions)] for row in rows])
    assert torch.equal(grid.positions(grid.rows(positions)), positions * there.view(B, -1, 1))


@property_of_calls
def test_the_encoder_and_the_open_chunk(call: Call, landmarks: bool) -> None:
    """Every landmark in row S; before it the chunk's tokens, also those that were read in earlier calls."""
    grid, rows, B, S = call.grid(landmarks), call.by_hand(landmarks), len(call.rows), call.S
    R = S + landmarks
    positions, earlier = numbered(B, grid.num_positions), numbered(B, S, first=500)
    source = torch.cat([earlier, positions], dim=1) if grid.begins_open else positions
    assert grid.begins_open == any(phase for phase, *_ in call.rows)
    closed, opened = [], []
    for (phase, *_), row in zip(call.rows, rows, strict=True):
        whole: list[int] = []
        chunk = [500 + slot for slot in range(phase)] + [0] * (R - phase)
        for place, p in enumerate(row):
            chunk[S if p.token < 0 else p.slot] = place + 1
            if p.closes:
                whole, chunk = whole + chunk, [0] * R
        closed.append(whole)
        opened.append(chunk[:S])
    assert taken(grid.encoder_rows, source) == padded(closed, grid.num_closed * R)
    assert taken(grid.open_rows, source) == opened


def test_without_chunks_tokens_are_positions() -> None:
    grid = lay_out(5, None, counts=np.array([5, 0, 2]))
    assert grid.token.tolist() == [[0, 1, 2, 3, 4], [-1] * 5, [0, 1, -1, -1, -1]]
    assert grid.chunk.tolist() == [[0] * 5, [-1] * 5, [0, 0, -1, -1, -1]]
    assert grid.num_closed == 0
    assert not grid.open_tokens.any()
    tokens = numbered(3, 5)
    assert torch.equal(lay_out(5, None).insert_landmarks(tokens, None), tokens)


def test_layouts_that_are_asked_for_again_are_made_once() -> None:
    assert lay_out(9, 4, close_chunk=True) is lay_out(9, 4, np.zeros(3, int), close_chunk=True)
    assert lay_out(9, 4, landmarks=False) is lay_out(9, 4, np.zeros(2, int), landmarks=False)
    assert lay_out(9, 4) is not lay_out(9, 4, close_chunk=True)
    assert lay_out(9, 4) is not lay_out(9, 4, landmarks=False)


# --- several calls ---------------------------------------------------------------------------------------


def joined(first: list[Position], second: list[Position]) -> list[Position]:
    shift = first[-1].chunk + first[-1].closes if first else 0
    return [p._replace(token=-1) for p in first] + [p._replace(chunk=p.chunk + shift) for p in second]


def assert_laid_out(grid: Grid, rows: list[list[Position]]) -> None:
    """The rows' first chunks count as 0."""
    B, P = len(rows), max(map(len, rows))
    rows = [[p._replace(chunk=p.chunk - row[0].chunk) for p in row] for row in rows]
    assert of_rows(grid.chunk, B) == padded([[p.chunk for p in row] for row in rows], P, -1)
    assert of_rows(grid.is_landmark, B) == padded([[p.closes for p in row] for row in rows], P)
    assert of_rows(grid.token, B) == padded([[p.token for p in row] for row in rows], P, -1)


@PROPERTY
@given(st.integers(1, 4).flatmap(lambda S: st.tuples(calls(S=S, B=2), calls(S=S, B=2))))
@example((Call(4, 9, ((0, 9, ()),) * 2, False), Call(4, 3, ((1, 3, ()),) * 2, False)))
def test_calls_are_joined(pair: tuple[Call, Call]) -> None:
    """As the upper layers see what earlier calls left to them: tokens are those of the last call."""
    grids, (earlier, later) = [call.grid() for call in pair], (call.by_hand() for call in pair)
    take, grid = join(grids[0], grids[1])
    width = grids[0].num_positions
    both = torch.cat([numbered(2, width), numbered(2, grids[1].num_positions, first=500)], dim=1)
    rows = list(map(joined, earlier, later))
    assert_laid_out(grid, rows)
    expected = [
        [n + 1 for n in range(len(one))] + [500 + n for n in range(len(two))]
        for one, two in zip(earlier, later, strict=True)
    ]
    assert taken(take, both) == padded(expected, max(map(len, rows)))


@PROPERTY
@given(calls(), st.integers(0, 9), st.none() | st.integers(0, 9))
@example(Call(4, 9, ((0, 9, ()),) * 2, False), 3, 1)
@example(Call(4, 9, ((0, 9, ()),) * 2, False), 3, 0)
def test_the_tail(call: Call, reach: int, keep: int | None) -> None:
    """``reach`` positions before the first of the tokens to keep, and all from there on."""
    whole, rows, B = call.grid(), call.by_hand(), len(call.rows)
    take, grid, gone = tail(whole, reach, keep)
    tails, numbers, chunks = [], [], []
    for row in rows:
        own = [place for place, p in enumerate(row) if p.token >= 0]
        own = own if keep is None else own[max(0, len(own) - keep) :]
        start = max(0, (own[0] if own else len(row)) - reach)
        after = row[-1].chunk + row[-1].closes if row else 0
        tails.append(row[start:])
        numbers.append([place + 1 for place in range(start, len(row))])
        chunks.append(row[start].chunk if start < len(row) else after)
    assert_laid_out(grid, tails)
    assert (gone + np.zeros(B)).tolist() == chunks
    found = taken(take, numbered(B, whole.num_positions))
    assert len(found[0]) == max(map(len, tails))
    # beyond a row's tail stands anything
    assert [row[: len(mine)] for row, mine in zip(found, numbers, strict=True)] == numbers


# --- taking ----------------------------------------------------------------------------------------------

TAKES = {
    "all": ([[0, 1, 2, 3]], 4),
    "a range": ([[1, 2]], 4),
    "one order for all rows": ([[3, -1, 0]], 4),
    "an order for each row": ([[3, -1, 0], [-1, -1, -1], [0, 2, 1]], 4),
    "nothing": ([[-1, -1]], 4),
    "no place": ([[]], 4),
    "no place in several rows": ([[], [], []], 4),
    "from nothing": ([[-1, -1]], 0),
    "from nothing in several rows": ([[-1, -1]] * 3, 0),
}


@pytest.mark.parametrize(("index", "size"), TAKES.values(), ids=TAKES)
def test_take_and_its_gradient(index: list[list[int]], size: int) -> None:
    table = np.array(index, int).reshape(len(index), -1)
    take = Take(table, size)
    x = torch.randn(3, size, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = np.broadcast_to(table, (3, table.shape[1]))
    expected = [[x[b, i].tolist() if i >= 0 else [0.0, 0.0] for i in row] for b, row in enumerate(rows)]
    assert take(x).tolist() == expected
    with torch.inference_mode():  # what it keeps for the next call must not be of inference mode
        take(x)
    leaf = x.clone().requires_grad_()
    assert take(leaf).tolist() == expected
    assert torch.autograd.gradcheck(take, leaf)


def test_a_gradient_is_the_same_bits_again_and_again() -> None:
    random = torch.Generator().manual_seed(0)
    order = torch.stack([torch.randperm(4096, generator=random) for _ in range(2)])
    take, x = Take(order.numpy(), 4096), torch.randn(2, 4096, 8, generator=random).requires_grad_()
    weight = torch.randn(2, 4096, 8, generator=random)
    gradients = [torch.autograd.grad((take(x) * weight).sum(), x)[0] for _ in range(3)]
    assert all(torch.equal(g, gradients[0]) for g in gradients)


def test_gradients_reach_tokens_and_landmark() -> None:
    grid = lay_out(7, 4, counts=np.array([7, 5]), close_chunk=True)
    tokens = torch.zeros(2, 7, 3, dtype=torch.float64, requires_grad=True)
    landmark = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    grid.insert_landmarks(tokens, landmark).sum().backward()
    assert tokens.grad[:, :, 0].tolist() == [[1.0] * 7, [1.0] * 5 + [0.0] * 2]
    assert landmark.grad.tolist() == [4.0] * 3  # two landmarks in two rows


# --- without landmarks, and where only the end of a chunk is laid out -----------------------------------------


@PROPERTY
@given(calls(), st.integers(0, 9), st.none() | st.integers(0, 9), st.booleans())
@example(Call(4, 9, ((3, 9, ()), (0, 2, ())), False), 1, 1, False)
@example(Call(4, 6, ((0, 6, ()), (0, 3, ()), (0, 4, ())), False), 0, 0, True)  # an empty tail
@example(Call(4, 6, ((0, 6, ()), (0, 3, ()), (0, 4, ())), False), 0, 0, False)
def test_a_tail_knows_its_places_in_chunks(call: Call, reach: int, keep: int | None, landmarks: bool) -> None:
    """So do positions that follow it: ``begun`` says what of the first chunk is left out."""
    rows = call.by_hand(landmarks)
    _, grid, _ = tail(call.grid(landmarks), reach, keep)
    assert_places(grid, rows)
    # three tokens more in each row
    phases = call.grid(landmarks).open_tokens + np.zeros(len(rows), np.int64)
    later = Call(call.S, 3, tuple((int(n), 3, ()) for n in phases))
    _, joined = join(grid, later.grid(landmarks))
    more = [
        [*row, *(p._replace(chunk=p.chunk + (row[-1].chunk + row[-1].closes if row else 0)) for p in new)]
        for row, new in zip(rows, later.by_hand(landmarks), strict=True)
    ]
    assert_places(joined, more)


def test_documents_without_landmarks() -> None:
    """Of 3, 5 and 1 tokens; each of the first two ends with a chunk that is closed early."""
    numbers = np.array([[0, 0, 0, 1, 1, 1, 1, 1, 2]])
    grid = lay_out(9, 4, documents=numbers, landmarks=False)
    assert grid.chunk.tolist() == [[0, 0, 0, 1, 1, 1, 1, 2, 3]]
    assert grid.is_landmark[0].nonzero()[0].tolist() == [2, 6, 7]
    assert grid.lengths.tolist() == [[3, 4, 1]]
    assert grid.chunk_starts.tolist() == [[0, 3, 7]]
    assert grid.begins_document.tolist() == [[True, True, False, True]]
    assert grid.first_chunks.tolist() == [[0, 1, 1, 3]]
    assert grid.open_tokens.tolist() == [1]
    assert taken(grid.encoder_rows, numbered(1, 9)) == [[1, 2, 3, 0, 4, 5, 6, 7, 8, 0, 0, 0]]
