"""Bugs of the published HiLS code that must not come back, named after the bug; what other tests find is not repeated.

They are listed in the notes of this project's reference report; the code is Tencent-Hunyuan/HiLS-Attention at
a483571. The sixth, that files are missing or broken, has no counterpart here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.hils.test_model import ALTERNATING, LENGTH
from tests.models.tiny import assert_same, hils, logits_of, split, tokens


@pytest.mark.parametrize(("place", "candidates"), [(10, 1), (14, 2), (18, 3)])
def test_padding_slots_overwrite_the_gradient_of_the_first_chunk(place: int, candidates: int) -> None:
    """Slots without a chunk change no gradient: those of K = 9 are those of as many as there are candidates."""
    gradients: list[list[Tensor]] = []
    for retrieved in (candidates, 9):
        model = hils(num_hidden_layers=1, num_retrieved_chunks=retrieved, calibration_rank=2).train()
        states = model.embed_tokens(tokens(20)).detach().requires_grad_()
        model.embed_tokens.register_forward_hook(lambda *_, states=states: states)
        out = model(tokens(20), output_retrieval=True)
        assert (out.retrieval[0].indices[0, place] >= 0).sum(-1).tolist() == [candidates] * 2
        wanted = [states, *(p for name, p in model.named_parameters() if not name.startswith("embed"))]
        gradients.append(list(torch.autograd.grad(out.logits[0, place].square().sum(), wanted)))
    for ours, exact in zip(*reversed(gradients), strict=True):
        assert_same(ours, exact)
    assert (gradients[1][0][0, :4].abs().sum(-1) > 0).all()


def test_scores_and_the_windows_mass_are_rounded_to_bfloat16() -> None:
    """Shares are exact to float32: a model in bfloat16 weighs its own scores as one in float64 weighs them."""
    model, ids = hils(num_hidden_layers=1, num_key_value_heads=4).bfloat16(), tokens(LENGTH)
    chosen = model(ids, output_retrieval=True).retrieval[0]
    assert chosen.scores.dtype == chosen.weights.dtype == torch.float32
    known = chosen.scores[chosen.indices >= 0]
    assert not torch.equal(known, known.bfloat16().float())
    weights = chosen.scores.double().softmax(-1)[chosen.indices[..., 0] >= 0]
    assert (chosen.weights[chosen.indices[..., 0] >= 0] - weights).abs().max() <= torch.finfo(
        torch.float32
    ).eps


def test_layers_with_a_window_alone_never_drop_old_keys() -> None:
    """However long the text, a window holds as many bytes, and a closed chunk adds to the memory alone."""
    model, held, memory = hils(layer_types=ALTERNATING), [], []
    for length in (40, 80, 120):
        cache = model.read(tokens(length))
        assert [layer.keys.shape[2] for layer in cache.layers] == [7, 10, 10]
        held.append(cache.window_bytes())
        memory.append(cache.memory_bytes())
    assert len(set(held)) == 1
    assert memory[2] - memory[1] == memory[1] - memory[0]


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@torch.no_grad()
@pytest.mark.sampled(3)
def test_each_call_copies_the_whole_memory_to_the_device(tier: str) -> None:
    """What is fetched is what was chosen, each chunk of a layer once, however long the text."""
    model = hils(chunk_size=8, num_sinks=2)
    for length in (64, 160):  # no chunk closes in the calls, whose landmark would choose too
        cache = model.read(tokens(length), model.new_cache(memory_tier=tier))
        for new in (1, 1, 5):
            before = cache.memory.fetched
            found = model(
                tokens(new, seed=length + new), past_key_values=cache, output_retrieval=True
            ).retrieval
            each = [layer.indices[0].unique() for layer in found]
            assert cache.memory.fetched - before == sum(int((x >= 0).sum()) for x in each)


def test_two_requests_at_a_time_corrupt_each_other() -> None:
    model, texts = hils(num_sinks=2), tokens(LENGTH, batch=2)
    caches: Any = [model.new_cache(), model.new_cache()]
    outs: list[list[Tensor]] = [[], []]
    for piece in split(texts, [9, 5, 1]):
        for row in (0, 1):
            outs[row].append(logits_of(model, piece[row : row + 1], past_key_values=caches[row]))
    for row in (0, 1):
        assert_same(torch.cat(outs[row], 1), logits_of(model, texts[row : row + 1]))


@pytest.mark.parametrize(
    "options",
    [
        {"calibration_rank": 2},
        {"summary_query": "tokens"},
        {"chunk_score": "mean"},
        {"chunk_score": "mass", "chunk_weights": "keys"},
    ],
    ids=str,
)
def test_a_continued_cache_forgets_what_sums_its_chunks_up(options: dict[str, Any], tmp_path: Path) -> None:
    """Read, saved in the middle of a chunk, loaded and read on: as if it had been one text."""
    model, ids = hils(**options), tokens(LENGTH)
    cache = model.read(ids[:, :30])
    outs = []
    for piece in ids[:, 30:].split([12, 1, 18], 1):
        cache.save(tmp_path / "memory")
        cache = model.load_cache(tmp_path / "memory")
        outs.append(logits_of(model, piece, past_key_values=cache))
    assert_same(torch.cat(outs, 1), logits_of(model, ids)[:, 30:])
