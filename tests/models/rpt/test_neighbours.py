"""RPT with neighbours from outside, and what does not fit and is refused."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.rpt.test_model import K, candidates
from tests.models.tiny import (
    TokenCounter,
    rpt,
    rpt_config,
    tokens,
)
from trailmark.models import RPTConfig, RPTForCausalLM

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_table_of_what_the_embedder_finds_is_the_embedder() -> None:
    model, ids = rpt(retriever="encoder"), tokens(50, batch=2)
    out = model(ids, output_retrieval=True)
    table = out.retrieval[0].indices
    model.embedder = None
    given = model(ids, neighbours=table, output_retrieval=True)
    assert torch.equal(given.logits, out.logits)
    assert torch.equal(given.retrieval[0].indices, table)


def test_the_embedder_is_part_of_a_memory(tmp_path: Path) -> None:
    model, ids = rpt(retriever="encoder"), tokens(30)
    cache = model.read(ids)
    cache.save(tmp_path / "memory")
    other = copy.deepcopy(model)
    other.embedder = TokenCounter(60)
    with pytest.raises(
        ValueError, match=r"folder: expected a memory written by this model.*another embedder"
    ):
        other.load_cache(tmp_path / "memory")
    with pytest.raises(ValueError, match="past_key_values: expected a cache of this model"):
        other(ids, past_key_values=cache)


def test_what_does_not_fit_is_refused() -> None:
    ids = tokens(12)
    encoder, learned = rpt(retriever="encoder"), rpt()
    table, scores = candidates(ids, K)
    with pytest.raises(ValueError, match="neighbour_scores: expected none"):
        encoder(ids, neighbours=table, neighbour_scores=scores)
    with pytest.raises(ValueError, match="neighbour_scores: expected them with neighbours"):
        learned(ids, neighbours=table)
    with pytest.raises(ValueError, match=r"neighbours: expected shape \[B, C, 2\]"):
        encoder(ids, neighbours=table[..., :1])
    with pytest.raises(ValueError, match=r"neighbours: expected shape \[1, 3, n\]"):
        learned(ids, neighbours=table[:, :2], neighbour_scores=scores[:, :2])
    with pytest.raises(ValueError, match="neighbours: expected chunks before the one"):
        encoder(ids, neighbours=torch.tensor([[[-1, -1], [1, -1], [0, 1]]]))
    with pytest.raises(ValueError, match="neighbours: expected none with past_key_values"):
        encoder(ids, neighbours=table, use_cache=True)
    visible = {"neighbours": torch.tensor([[[-1, -1], [0, -1], [0, -1]]])}
    for mode, more in (("encoder", {}), ("learned", {"neighbour_scores": scores})):
        wide = rpt(retriever=mode, sliding_window=15)
        with pytest.raises(
            ValueError, match="neighbours: expected no chunk that the window still shows whole"
        ):
            wide(ids, **visible, **more)
    # NaN would be the loss's; a chunk that stands there twice would be read twice
    for wrong in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match=r"neighbour_scores: expected finite numbers .* for chunk 2 of"):
            learned(ids, neighbours=table, neighbour_scores=torch.where(table == 1, wrong, scores))
    missing = scores.masked_fill(table < 0, math.nan)
    assert learned(ids, labels=ids, neighbours=table, neighbour_scores=missing).loss.isfinite()
    table[0, 2] = 1
    with pytest.raises(
        ValueError, match=r"neighbours: expected different candidates .* \[1, 1\] for chunk 2"
    ):
        learned(ids, neighbours=table, neighbour_scores=scores)
    encoder.config.embedder_fingerprint = "another"
    with pytest.raises(ValueError, match="embedder: expected the one that the model was trained with"):
        encoder(ids)
    encoder.embedder = None
    with pytest.raises(
        ValueError, match="embedder: expected one for a model with retriever='encoder', got none"
    ):
        encoder(ids)
    with pytest.raises(ValueError, match="embedder: expected one"):
        encoder.read(ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk_size": 0}, "chunk_size: expected at least 1"),
        ({"num_retrieved_chunks": -1}, r"num_retrieved_chunks: expected 0 \(retrieval off\) or more"),
        ({"cross_attention_every": 0}, "cross_attention_every: expected at least 1"),
        ({"num_encoder_layers": -1}, "num_encoder_layers: expected 0 or more"),
        ({"num_lower_layers": 4}, "num_lower_layers: expected 0 to 3"),
        ({"sliding_window": None}, "sliding_window: expected a number of positions"),
        ({"embedder": "hash"}, "embedder: expected None with retriever 'learned'"),
        ({"ranking_threshold": -1.0}, "ranking_threshold: expected 0 or more"),
        ({"gold_probability": 1.5}, "gold_probability: expected 0 to 1"),
        ({"retriever": "causal"}, "retriever: expected 'learned' or 'encoder', got 'causal'"),
        ({"hidden_size": 12}, "num_attention_heads: expected an even head size"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rpt_config(**changes)


def test_the_defaults_are_the_second_papers_sizes() -> None:
    config = RPTConfig()
    assert (config.chunk_size, config.num_retrieved_chunks, config.num_lower_layers) == (64, 8, 6)
    with torch.device("meta"):
        contriever = RPTForCausalLM(RPTConfig(retriever="encoder"))
    count = sum(p.numel() for p in contriever.parameters())
    E, layer = 768, 4 * 768**2 + 3 * 768 * 2048 + 2 * 768
    reads = 4 * E**2 + E + 2 * E  # per upper layer: four matrices, a norm, the null key and value
    assert count == 50257 * E + E + 14 * layer + 6 * reads + 2 * E


@torch.no_grad()
def test_states_of_two_numbers_are_read_from_a_memory() -> None:
    """Halves of one number each: records of such a shape are no view of states."""
    sizes = {"hidden_size": 2, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = rpt(**sizes, chunk_size=2, sliding_window=3, continuation=True)
    ids = tokens(23)
    whole, cache = model(ids).logits, model.new_cache()
    pieces = [model(part, past_key_values=cache).logits for part in ids.split([9, 1, 6, 7], dim=1)]
    assert torch.allclose(torch.cat(pieces, dim=1), whole, rtol=0, atol=1e-10)
