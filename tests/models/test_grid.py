"""Where landmarks stand: tokens to positions and chunks, and back."""

from __future__ import annotations

import pytest
import torch

from trailmark.models.grid import Grid

S = 4
LENGTHS = pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11, 12])
CLOSE = pytest.mark.parametrize("close", [False, True])


def layout(length: int, close: bool) -> list[int]:
    """The positions by hand: token numbers, -1 for a landmark."""
    found: list[int] = []
    for token in range(length):
        found.append(token)
        if token % S == S - 1 or (close and token == length - 1):
            found.append(-1)
    return found


@LENGTHS
@CLOSE
def test_counts(length: int, close: bool) -> None:
    grid, by_hand = Grid(length, S, close), layout(length, close)
    assert grid.num_positions == len(by_hand)
    assert grid.num_closed == by_hand.count(-1)
    assert grid.num_chunks == -(-length // S)
    assert grid.num_open_tokens == (0 if by_hand[-1] == -1 else length % S)
    assert grid.num_early_tokens == (length % S if close else 0)


@LENGTHS
@CLOSE
def test_positions_hold_the_tokens_and_the_landmarks(length: int, close: bool) -> None:
    grid, by_hand = Grid(length, S, close), layout(length, close)
    tokens = torch.arange(2.0 * length).view(2, length, 1) + torch.zeros(3)  # [B, T, E]
    positions = grid.insert_landmarks(tokens, torch.full((3,), -1.0))
    assert positions.shape == (2, len(by_hand), 3)
    assert positions[0, :, 0].tolist() == by_hand
    assert positions[1, :, 2].tolist() == [p if p < 0 else p + length for p in by_hand]
    assert torch.equal(grid.tokens(positions), tokens)
    assert torch.equal(grid.landmarks(positions), torch.full((2, grid.num_closed, 3), -1.0))


@LENGTHS
@CLOSE
def test_rows_and_back(length: int, close: bool) -> None:
    grid = Grid(length, S, close)
    positions = torch.arange(1.0, grid.num_positions + 1).view(1, -1, 1)
    rows = grid.rows(positions)
    assert rows.shape == (1, grid.num_chunks, S + 1, 1)
    flat = rows.flatten().tolist()
    assert flat[: grid.num_positions] == positions.flatten().tolist()
    assert not any(flat[grid.num_positions :])
    assert torch.equal(grid.positions(rows), positions)


@LENGTHS
@CLOSE
def test_the_encoder_finds_every_landmark_in_row_s(length: int, close: bool) -> None:
    grid = Grid(length, S, close)
    tokens = torch.arange(1.0, length + 1).view(1, length, 1)
    rows = grid.encoder_rows(grid.insert_landmarks(tokens, torch.full((1,), -1.0)))[0, :, :, 0]
    assert rows.shape == (grid.num_closed, S + 1)
    for n, row in enumerate(rows.tolist()):
        own = tokens.flatten()[n * S : (n + 1) * S].tolist()
        assert row == own + [0.0] * (S - len(own)) + [-1.0]


def test_gradients_reach_tokens_and_landmark() -> None:
    grid = Grid(7, S, True)
    tokens = torch.zeros(2, 7, 3, dtype=torch.float64, requires_grad=True)
    landmark = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    grid.insert_landmarks(tokens, landmark).sum().backward()
    assert torch.equal(tokens.grad, torch.ones_like(tokens))
    assert landmark.grad.tolist() == [4.0] * 3  # two landmarks in two rows
