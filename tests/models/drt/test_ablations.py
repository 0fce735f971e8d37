"""The DRT's ablations: chunks at random, chunks that a frozen encoder finds, and each option that is switched."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.drt.test_model import in_calls, selected
from tests.models.drt.test_training import SEEDS, trained
from tests.models.naive import NaiveDRT
from tests.models.test_documents import assert_each_as_alone
from tests.models.tiny import EXACT, assert_same, drt, drt_config, logits_of, pad, place, split, tokens
from tests.ops.selection.test_random_selection import floyd
from trailmark.memory import ChunkCache, MemoryEntries
from trailmark.models import DRTForCausalLM
from trailmark.models.drt.chunks import TextChunks
from trailmark.models.grid import lay_out
from trailmark.ops import fold_seed
from trailmark.training.statistics import RetrievalStatistics

S, LENGTH = 4, 103  # 25 chunks and 3 tokens


class BagOfTokens:
    """Counts of tokens in buckets, of length 1; a chunk asks for the tokens that follow its own in the vocabulary."""

    size = 11

    def __init__(self, factor: int = 3) -> None:
        self.factor, self.fingerprint, self.calls = factor, f"bag {factor}", 0

    def __call__(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        assert ids.dtype == lengths.dtype == torch.int64
        self.calls += 1
        return self.vectors(ids + 1, lengths), self.vectors(ids, lengths)

    def vectors(self, ids: Tensor, lengths: Tensor) -> Tensor:
        present = torch.arange(ids.shape[1]) < lengths[:, None]
        counts = (
            (F.one_hot(ids * self.factor % 47 % self.size, self.size) * present[..., None]).sum(1).float()
        )
        return counts / counts.square().sum(-1, keepdim=True).sqrt().clamp(min=1)


OPTIONS: dict[str, dict[str, Any]] = {
    "random": {"retriever": "random"},
    "random-2": {
        "retriever": "random", "groups": 2, "exclude_visible_chunks": True, "sliding_window": 15,
        "window_position": "rope", "residual_gca": True,
    },
    "encoder": {"retriever": "encoder", "groups": 2, "retrieval_normalization": True},
    "encoder-2": {
        "retriever": "encoder", "groups": 2, "exclude_visible_chunks": True, "sliding_window": 15,
        "retrieval_projections": False,
    },
    "contriever": {"retriever": "encoder", "encoder_weights": "encoder", "retrieval_scale": 5.0},
    "contriever-2": {
        "retriever": "encoder", "encoder_weights": "encoder", "groups": 2, "exclude_visible_chunks": True,
        "sliding_window": 15,
    },
}  # fmt: skip
EVERY = pytest.mark.parametrize("name", OPTIONS)
FEW = pytest.mark.parametrize(  # the rest of what takes long: with -m slow
    "name",
    [
        pytest.param(x, marks=() if x in ("random-2", "encoder", "contriever") else pytest.mark.slow)
        for x in OPTIONS
    ],
)
ENCODERS = pytest.mark.parametrize("name", [name for name in OPTIONS if not name.startswith("random")])


def build(name: str, **changes: Any) -> DRTForCausalLM:
    model = drt(**OPTIONS[name] | changes)
    model.embedder = BagOfTokens() if model.config.retriever == "encoder" else None
    return model


class Naive(NaiveDRT):
    """Who chooses and who weighs, chunk by chunk."""

    def __init__(
        self, model: DRTForCausalLM, ids: Tensor, lengths: list[int] | None = None, **rest: Any
    ) -> None:
        if isinstance(bag := model.embedder, BagOfTokens):
            lengths = lengths or [min(S, len(ids) - first) for first in range(0, len(ids), S)]
            chunks = pad(list(ids.split(lengths)), "right")
            queries, keys = (x.double() for x in bag(chunks, torch.tensor(lengths)))
            self.near = [[(query * key).sum().item() for key in keys] for query in queries]
        super().__init__(model, ids, lengths, **rest)

    def score(
        self, model: DRTForCausalLM, group: int, h: Tensor, memory: list[Any], n: int, candidates: list[int]
    ) -> dict[int, float]:
        if self.config.encoder_weights == "learned":
            return super().score(model, group, h, memory, n, candidates)
        return {m: self.near[n][m] * self.config.retrieval_scale for m in candidates}

    def choose(self, group: int, n: int, score: dict[int, float]) -> list[int]:
        if self.config.retriever == "encoder":
            return sorted(score, key=lambda m: -self.near[n][m])
        seed = fold_seed(0, group)
        return floyd(self.config.num_retrieved_chunks, 0, len(score), n, int(seed))


# --- the equations, and any split of a text ------------------------------------------------------------------


@EVERY
def test_one_forward_is_the_equations(name: str) -> None:
    model, ids = build(name), tokens(LENGTH)
    assert bool(model.retrievers) is not name.startswith("contriever")
    out, naive = model(ids, output_retrieval=True), Naive(model, ids[0])
    for group, chunks in enumerate(naive.retrieval):
        assert selected(out.retrieval, group) == [best for best, _ in chunks]
        for n, (_, weights) in enumerate(chunks):
            found = out.retrieval[group].weights[0, n, : len(weights)].tolist()
            assert found == pytest.approx(weights, abs=EXACT)
    assert_same(out.logits[0], naive.logits)


@FEW
def test_early_landmarks_are_the_equations(name: str) -> None:
    model, ids = build(name), tokens(46)
    pieces, lengths = split(ids, [6, 3, 1, 9, 4, 2, 15]), []
    cache = model.new_cache()
    logits = [logits_of(model, piece, past_key_values=cache, close_chunk=True) for piece in pieces]
    for piece in pieces:
        lengths += [part.shape[1] for part in piece.split(S, dim=1)]
    assert_same(torch.cat(logits, 1)[0], Naive(model, ids[0], lengths, close=True).logits)


@EVERY
@pytest.mark.parametrize("side", ["left", "right"])
def test_ragged_rows_are_as_they_are_alone(name: str, side: str) -> None:
    model = build(name)
    texts = [tokens(n, seed=b)[0] for b, n in enumerate((41, 3, 26, 8))]
    ids, mask = pad(texts, side, 2), pad([torch.ones_like(text) for text in texts], side, 2)
    rest, cache = tokens(9, batch=4, seed=7), model.new_cache()
    whole = logits_of(model, ids, attention_mask=mask)
    kept = logits_of(model, ids, attention_mask=mask, past_key_values=cache)
    after = logits_of(model, rest, past_key_values=cache)
    for b, text in enumerate(texts):
        columns = place(len(text), ids.shape[1], side)
        alone = logits_of(model, torch.cat([text, rest[b]])[None])[0]
        assert_same(whole[b, columns], alone[: len(text)])
        assert_same(kept[b, columns], alone[: len(text)])
        assert_same(after[b], alone[len(text) :])


@EVERY
def test_a_document_in_a_row_is_as_it_is_alone(name: str) -> None:
    assert_each_as_alone(build(name), [(9, 1, 4, 26, 8, 30, 2)])


@pytest.mark.parametrize("name", ["random", "encoder", "contriever"])
def test_lower_precisions_select_the_same_however_they_are_fed(name: str) -> None:
    model, ids = build(name, groups=1).bfloat16(), tokens(LENGTH, batch=2)
    whole = model(ids, output_retrieval=True).retrieval
    for pieces in ([7], [60, 43]):
        _, calls = in_calls(model, split(ids, pieces))
        assert torch.equal(torch.cat([call[0].indices for call in calls], dim=1), whole[0].indices)


# --- the memory ----------------------------------------------------------------------------------------------


def ask(model: DRTForCausalLM, cache: ChunkCache) -> Tensor:
    return logits_of(model, tokens(9, seed=5), past_key_values=cache.branch())


@FEW
def test_tiers_branches_and_saved_memories_are_bit_equal(name: str, tmp_path: Path) -> None:
    model, ids = build(name), tokens(LENGTH)
    answers = []
    for tier in ("device", "host", "disk"):
        cache = model.new_cache(memory_tier=tier)
        logits_of(model, ids[:, :30], past_key_values=cache)
        model.read(ids[:, 30:], cache)  # ends in the middle of a chunk
        answers.append(ask(model, cache))
    whole = logits_of(model, torch.cat([ids, tokens(9, seed=5)], 1))[:, LENGTH:]
    assert_same(answers[0], whole)
    cache.branch().save(tmp_path / "branch")
    cache.save(tmp_path / "memory")
    answers += [ask(model, model.load_cache(tmp_path / folder)) for folder in ("branch", "memory")]
    answers.append(logits_of(model, tokens(9, seed=5), past_key_values=cache))
    assert all(torch.equal(answers[0], other) for other in answers[1:])
    rows = model.load_cache(tmp_path / "memory").branch(3)
    logits_of(model, tokens(3, batch=3), past_key_values=rows)
    rows.reorder_cache(torch.tensor([2, 0, 0]))
    after = logits_of(model, tokens(9, seed=5).expand(3, -1), past_key_values=rows)
    for row, source in enumerate((2, 0, 0)):
        alone = torch.cat([ids, tokens(3, batch=3)[source : source + 1], tokens(9, seed=5)], 1)
        assert_same(after[row : row + 1], logits_of(model, alone)[:, LENGTH + 3 :])


def test_another_embedders_memory_is_refused(tmp_path: Path) -> None:
    model, other = build("encoder"), build("encoder")
    other.embedder = BagOfTokens(factor=5)
    cache = model.read(tokens(LENGTH))
    assert not torch.equal(*(logits_of(x, tokens(LENGTH)) for x in (model, other)))
    with pytest.raises(
        ValueError, match=r"past_key_values: expected a cache of this model \(embedder bag 5\)"
    ):
        other(tokens(3), past_key_values=cache)
    cache.save(tmp_path / "memory")
    with pytest.raises(ValueError, match=r"written with another embedder \(bag 3, not bag 5\)"):
        other.load_cache(tmp_path / "memory")
    assert int(model.load_cache(tmp_path / "memory").num_tokens[0]) == LENGTH


def test_memories_of_before_these_options_are_those_of_their_defaults(tmp_path: Path) -> None:
    """A memory that names no retriever was written by a model that had no other."""
    model, ids = drt(), tokens(LENGTH)
    cache, now = model.read(ids), model._identity()
    later = {name: now.pop(name) for name in ("alibi_slopes", "retriever", "encoder_weights")}
    assert later == {"alibi_slopes": "geometric", "retriever": "causal", "encoder_weights": "learned"}
    cache.identity = lambda: now
    cache.save(tmp_path / "memory")
    assert_same(ask(model, model.load_cache(tmp_path / "memory")), ask(model, model.read(ids)))
    for changes in ({"retriever": "random"}, {"alibi_slopes": "interpolated"}):
        with pytest.raises(ValueError, match=f"another {next(iter(changes))}"):
            drt(**changes).load_cache(tmp_path / "memory")


# --- training ------------------------------------------------------------------------------------------------


def test_one_chunk_at_random_can_be_trained_with() -> None:
    """Its weight is 1: only what scores learns nothing, and that selects nothing here."""
    for name in ("random", "encoder", "contriever"):
        model, ids = build(name, num_retrieved_chunks=1), tokens(40 * S, batch=2)
        out = trained(model, ids)
        out.loss.backward()
        assert out.retrieval[0].weights[:, 1:].detach().eq(1).all()
        for parameter_name, parameter in model.named_parameters():
            scores = "retrievers" in parameter_name or "landmark_proj" in parameter_name
            assert parameter.grad is not None
            assert bool(parameter.grad.abs().max() > 0) is not scores, parameter_name


def test_what_is_drawn_in_training_is_a_function_of_its_seed() -> None:
    model, ids = build("random-2"), tokens(40 * S).expand(2, -1)
    first, again = trained(model, ids), trained(model, ids)
    other = trained(model, ids, SEEDS + 1)
    assert torch.equal(first.logits, again.logits)
    one, two = (chosen.indices for chosen in first.retrieval)
    assert not torch.equal(one, two)  # groups
    assert not torch.equal(one[0], one[1])  # samples
    assert not torch.equal(one, other.retrieval[0].indices)
    assert len(set(map(tuple, one[0, 20:].tolist()))) > 15  # chunks
    for row in range(2):
        apart = trained(model, ids[row : row + 1], SEEDS[row : row + 1])
        assert_same(apart.logits.detach(), first.logits[row : row + 1].detach())


def test_seeds_may_lie_on_another_device_than_the_text() -> None:
    """As for Gumbel noise: the batch's numbers are made on the CPU."""
    config, grid = drt_config(retriever="random"), lay_out(40 * S, S)
    landmarks = torch.empty(2, 40, config.hidden_size, device="meta")
    chunks = TextChunks(config, grid, MemoryEntries(landmarks, landmarks, landmarks, landmarks), None)
    assert chunks._draw(0, SEEDS, 2).device.type == "meta"


def test_outside_training_every_call_and_row_draws_the_same() -> None:
    model, ids = build("random-2"), tokens(40 * S).expand(2, -1)
    calm = model(ids, output_retrieval=True).retrieval
    seeded = model(ids, output_retrieval=True, noise_seed=SEEDS).retrieval
    for ours, theirs in zip(calm, seeded, strict=True):
        assert torch.equal(ours.indices, theirs.indices)
        assert torch.equal(ours.indices[0], ours.indices[1])
    assert not torch.equal(calm[0].indices, calm[1].indices)


@ENCODERS
def test_noise_has_no_part_in_what_an_encoder_finds(name: str) -> None:
    model, ids = build(name), tokens(LENGTH, batch=2)
    assert torch.equal(logits_of(model, ids), trained(model, ids).logits)


def test_statistics_of_what_was_drawn() -> None:
    """Even odds over the chunks before: a mean age near half the way back, little that is never read."""
    model, ids = build("random"), tokens(60 * S, batch=2)
    with torch.no_grad():
        model.retrievers[0].q_proj.weight.zero_()
    statistics = RetrievalStatistics()
    for seed in range(6):
        statistics.add(trained(model, ids, SEEDS + 2 * seed).retrieval)
    means = statistics.means()
    expected = sum((n + 1) / 2 for n in range(1, 60)) / 59
    assert means["age"] == pytest.approx(expected, abs=4 * 17 / (6 * 2 * 59 * 3) ** 0.5)  # 4 standard errors
    assert means["evenness"] == pytest.approx(1)
    assert 0 < means["never_read"] < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["random", "random-2"])
def test_a_random_draw_is_part_of_one_graph(name: str) -> None:
    torch._dynamo.reset()
    model, ids = build(name).float(), tokens(46, batch=2)
    compiled = torch.compile(copy.deepcopy(model).train(), fullgraph=True, backend="eager")
    ours = compiled(ids, labels=ids, noise_seed=SEEDS, output_retrieval=True)
    exact = trained(model, ids)
    for a, b in zip(ours.retrieval, exact.retrieval, strict=True):
        assert torch.equal(a.indices, b.indices)


# --- each option by itself -------------------------------------------------------------------------------------

SWITCHED: dict[str, dict[str, Any]] = {
    "no noise": {"retrieval_noise": False},
    "reference": {"implementation": "reference"},
    "torch": {"implementation": "torch"},
    "naive GCA": {"gca_implementation": "reference"},
    "residual": {"residual_gca": True},
    "no projections": {"retrieval_projections": False},
    "excluded": {"exclude_visible_chunks": True, "sliding_window": 15},
    "random": {"retriever": "random"},
    "encoder": {"retriever": "encoder"},
    "contriever": {"retriever": "encoder", "encoder_weights": "encoder"},
    "interpolated": {"alibi_slopes": "interpolated", "num_attention_heads": 6, "hidden_size": 24},
}


@pytest.mark.parametrize("name", SWITCHED)
def test_a_switched_option_changes_what_it_says_and_nothing_else(name: str) -> None:
    base = {key: SWITCHED[name][key] for key in ("sliding_window", "num_attention_heads", "hidden_size")
            if key in SWITCHED[name]}  # fmt: skip
    published, model, ids = drt(**base), drt(**SWITCHED[name]), tokens(LENGTH, batch=2)
    own = dict(published.named_parameters())
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(own[parameter_name])
    if model.config.retriever == "encoder":
        model.embedder = BagOfTokens()
    ours, theirs = logits_of(model, ids), logits_of(published, ids)
    assert torch.equal(ours[:, :S], theirs[:, :S]) is (name != "interpolated")  # nothing is read yet
    if name in ("no noise", "torch"):
        assert torch.equal(ours, theirs)
    elif name in ("reference", "naive GCA"):
        assert_same(ours, theirs)
    else:
        assert (ours - theirs).abs().max() > 1e-3
    noisy, seeded = (trained(x, ids).logits.detach() for x in (model, published))
    drawn = name == "random" or model.config.retriever == "causal"
    assert torch.equal(noisy, ours) is (name == "no noise" or not drawn)
    assert torch.equal(noisy, seeded) is (name == "torch")
