"""What benchmarks/learning.py says of scores, on tiny models."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch

from tests import benchmark_scripts
from tests.models.tiny import drt
from trailmark.data.neighbours.bm25 import best_chunks
from trailmark.ops import score_chunks

learning = benchmark_scripts.modules("learning")
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
