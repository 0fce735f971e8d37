"""Perplexity read in pieces is the mean loss of one full forward."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.models.tiny import drt, landmark, tokens, window_model
from trailmark.evaluation import perplexity
from trailmark.evaluation.perplexity import evaluate_perplexity
from trailmark.models import TrailmarkForCausalLM

TEXT = tokens(200)[0].numpy().astype(np.int32)


def loss_of(model: TrailmarkForCausalLM, first: int, length: int) -> float:
    ids = torch.from_numpy(TEXT[first : first + length]).long()[None]
    with torch.no_grad():
        return float(model(ids, labels=ids).loss)


def reads_all() -> TrailmarkForCausalLM:
    """As many chunks as a window has: cell by cell is the whole text at once."""
    return landmark(num_retrieved_chunks=12)


@pytest.mark.parametrize("make", [lambda: drt(2), window_model, reads_all], ids=["drt", "window", "landmark"])
@pytest.mark.parametrize("piece", [1, 7, 8, 45, 46, 4096])
@pytest.mark.parametrize("length", [2, 8, 46])
def test_pieces_change_nothing(
    make: Callable[[], TrailmarkForCausalLM], piece: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perplexity, "_PIECE", piece)
    model = make()
    found = evaluate_perplexity(model, TEXT, length, max_tokens=length)
    assert (found.windows, found.tokens) == (1, length - 1)
    assert found.loss == pytest.approx(loss_of(model, 0, length), abs=1e-10)
    assert found.perplexity == math.exp(found.loss)
    assert found.summary()["perplexity"] == found.perplexity


@pytest.mark.parametrize(("max_tokens", "windows"), [(1, 1), (91, 1), (92, 2), (10_000, 4)])
def test_windows_are_disjoint_and_read_cold(max_tokens: int, windows: int) -> None:
    model = drt()
    found = evaluate_perplexity(model, TEXT, 46, max_tokens)
    assert (found.windows, found.tokens) == (windows, windows * 45)
    each = [loss_of(model, 46 * number, 46) for number in range(windows)]
    assert found.loss == pytest.approx(sum(each) / windows, abs=1e-10)


def test_the_share_of_retrievals_that_the_gate_skips() -> None:
    model = landmark(gate_probability=0.5)
    shares, losses = [], []
    for cutoff in (0.0, 0.2, 0.5, 0.8, 1.0):
        model.config.gate_cutoff = cutoff
        found = evaluate_perplexity(model, TEXT, 46, 92)
        if cutoff == 0:
            assert (found.retrievals, found.skipped) == (None, None)
            assert "skipped_share" not in found.summary()
        else:
            assert found.skipped is not None
            assert found.retrievals is not None
            shares.append(found.summary()["skipped_share"])
            assert shares[-1] == found.skipped / found.retrievals
            # in 2 windows, 3 layers and 4 heads: every position of the four cells after the first
            assert found.retrievals == 2 * 3 * 4 * (46 - 11 + (46 // 4 - 11 // 4))
        losses.append(found.loss)
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] == 1
    assert len(set(losses)) > 2


def test_a_model_that_knows_nothing_has_a_perplexity_of_its_vocabulary() -> None:
    model = window_model(tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert evaluate_perplexity(model, TEXT, 46).perplexity == pytest.approx(50)


@pytest.mark.parametrize("length", [0, 1, 201])
def test_windows_that_do_not_fit_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"length: expected .*got {length}"):
        evaluate_perplexity(drt(), TEXT, length)
