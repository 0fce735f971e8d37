"""What benchmarks/learning.py says of scores, and what learning_lengths.py reads, on tiny models."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from tests import benchmark_scripts
from tests.models.tiny import drt, logits_of, window_model
from trailmark.data.neighbours.bm25 import best_chunks
from trailmark.evaluation.retrieval.run import choices_of, losses_of
from trailmark.ops import score_chunks

learning = benchmark_scripts.modules("learning")
lengths = benchmark_scripts.modules("learning_lengths")
SIZES = {"num_retrieval_groups": 1, "retrieval_recency": 1.0, "exclude_visible_chunks": True}


def test_scores_need_nothing_above_the_retriever(learning: ModuleType) -> None:
    models = {"before": drt(**SIZES), "learned": drt(**SIZES)}
    torch.nn.init.normal_(models["learned"].retrievers[0].q_proj.weight)
    torch.nn.init.normal_(models["learned"].encoder.landmark_proj.weight)
    ids = np.random.default_rng(0).integers(0, models["before"].config.vocab_size, 90)
    found = learning._scores(models, ids)
    for name, model in models.items():
        with torch.no_grad():
            out = model(torch.from_numpy(ids)[None], output_retrieval_scores=True)
        np.testing.assert_allclose(found[name], out.retrieval_scores.scores[0][0], rtol=1e-5, atol=1e-6)
    finite = np.isfinite(found["before"])
    assert not np.allclose(found["before"][finite], found["learned"][finite])


def test_scores_that_are_the_same_for_all_stay_as_they_are(learning: ModuleType) -> None:
    """But for what a row adds to all of its own, and whatever a drift: the same chunks are chosen."""
    model, generator = drt(**SIZES), torch.Generator().manual_seed(0)
    C = 40
    of_row, of_chunk = (torch.randn(1, C, 1, generator=generator, dtype=torch.float64) for _ in range(2))
    of_chunk += torch.arange(C)[:, None] / 10
    one = torch.ones_like(of_row)
    query, keys = torch.cat([of_row, one], -1), torch.cat([one, of_chunk], -1)
    limits = (torch.arange(C) - 3).clamp(min=0)
    (scores,) = score_chunks(query, keys, limits, 0, 1.0, 1.0)
    popular = learning._popular(scores, model.config)
    assert torch.equal(popular.isfinite(), scores.isfinite())
    choices = [
        best_chunks(x.numpy(), limits.numpy(), model.config.num_retrieved_chunks) for x in (scores, popular)
    ]
    np.testing.assert_array_equal(*choices)


def test_chunks_are_told_in_a_memory_as_in_a_whole_text(
    lengths: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = drt(**SIZES)
    for layer in model.upper_layers:
        torch.nn.init.normal_(layer.gca_o_proj.weight)
    S, K = model.config.chunk_size, model.config.num_retrieved_chunks
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, 30 * S + 2)
    monkeypatch.setattr(lengths, "COUNTED", counted := 4 * S + 1)
    found = lengths._last([lengths.Text("", ids)], ("random", "BM25"), model, 0)
    limits = model.layouts.of(len(ids), False).candidates(model.config.first_visible, torch.device("cpu"))
    told = dict(choices_of(ids, S, limits.flatten().numpy(), K, 0, 0))
    whole = np.stack([losses_of(model, ids, told.get(rule)) for rule in ("own", "random", "BM25")])
    np.testing.assert_allclose(found, whole[:, -counted:], rtol=1e-5, atol=1e-6)
    assert not np.allclose(found[0], found[1])


def test_layers_that_are_added_change_nothing_yet(lengths: ModuleType) -> None:
    base = window_model()
    model = lengths.with_layers(base, (1, 3))
    assert model.config.num_hidden_layers == base.config.num_hidden_layers + 2
    ids = torch.arange(40)[None]
    assert torch.equal(logits_of(model, ids), logits_of(base, ids))
    for number in (1, 3):
        added, before = model.layers[number], model.layers[number - 1]
        assert torch.equal(added.mlp.gate_up_proj.weight, before.mlp.gate_up_proj.weight)
        assert not added.attention.o_proj.weight.any()


def test_each_model_has_the_seeds_that_were_trained(lengths: ModuleType, tmp_path: Path) -> None:
    compared = lengths.Compared(lengths.deepened)
    with pytest.raises(SystemExit, match="deepened-0: expected a model that was trained"):
        compared.trained(tmp_path, (0, 1, 2))
    for seed in (0, 1, 2):  # that of seed 1 was stopped
        (tmp_path / f"deepened-{seed}").mkdir()
        if seed != 1:
            (tmp_path / f"deepened-{seed}" / "model.safetensors").touch()
    assert compared.trained(tmp_path, (0, 1, 2)) == {tmp_path / "deepened-0": 0, tmp_path / "deepened-2": 2}
    alike = lengths.Compared(lambda folder, seed: folder / "deepened-0")
    assert alike.trained(tmp_path, (2, 0)) == {tmp_path / "deepened-0": 2}
