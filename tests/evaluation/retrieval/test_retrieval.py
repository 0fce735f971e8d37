"""What retrieval is worth to a model: against forwards chunk by chunk, closed forms, and small changes of a score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.corpora import prose
from tests.models.tiny import drt, tokens, window_model
from trailmark.data.corpus import load_tokenizer
from trailmark.evaluation.documents import Documents
from trailmark.evaluation.record import Record
from trailmark.evaluation.retrieval import run as retrieval
from trailmark.evaluation.retrieval.suite import CASES, SUITE, RetrievalSettings
from trailmark.evaluation.subject import Subject
from trailmark.models.without_retrieval import retrieving

S, K, LENGTH = 4, 3, 103  # 25 chunks and 3 tokens
BYTES = load_tokenizer()
TEXT = Documents.of([prose(1, 60), prose(2, 60)], BYTES)


def asked(model: Any, folder: Path, **settings: Any) -> list[dict[str, Any]]:
    subject = Subject.of(model, BYTES, S)
    record = Record(folder, "retrieval", subject.identity())
    return retrieval.run(subject, RetrievalSettings(**settings), TEXT, record)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"exclude_visible_chunks": True, "sliding_window": 15},
        {
            "landmarks_as_keys": False,
            "window_position": "rope",
            "virtual_key": "window",
            "retrieval_recency": 1.0,
        },
    ],
    ids=str,
)
def test_every_case_is_a_forward_with_these_chunks(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = drt(2, vocab_size=259, **changes)
    (result,) = asked(model, tmp_path, lengths=(LENGTH,), texts=2, sample=5)
    assert (result["settings"]["number"], result["settings"]["texts"]) == (None, 2)
    cases = {case["chunks"]: case for case in result["cases"]}
    assert list(cases) == list(CASES)
    start = TEXT.tokens // 2
    texts = [
        torch.from_numpy(TEXT.read(first, first + LENGTH).astype(np.int64))[None] for first in (0, start)
    ]
    own, none, one, counted = 0.0, 0.0, 0.0, 0
    for ids in texts:
        scores = model(ids, output_retrieval_scores=True).retrieval_scores.scores[0]
        many = (scores[0] > -torch.inf).sum(1) >= 5
        rows = torch.cat([torch.zeros(S, dtype=torch.bool), many.repeat_interleave(S)])[: LENGTH - 1]
        counted += int(rows.sum())
        for name, of in (("own", model), ("none", model.without_retrieval()), ("one", retrieving(model, 1))):
            nats = -of(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[rows, 0].sum().item()
            own, none, one = (
                own + nats * (name == "own"),
                none + nats * (name == "none"),
                one + nats * (name == "one"),
            )
    assert cases["own"]["tokens"] == counted
    assert cases["own"]["nats"] == pytest.approx(own / counted)
    assert cases["none"]["nats"] == pytest.approx(none / counted)
    assert cases["one, own"]["nats"] == pytest.approx(one / counted)
    assert cases["own"]["less"] == pytest.approx((none - own) / counted)
    assert cases["one, best"]["nats"] < cases["one, random"]["nats"]
    assert 0 <= cases["copy, own"]["source_read"] <= 1
    assert [row["what"] for row in SUITE.rows(result)][-2:] == ["scores of group 0", "scores of group 1"]


def test_the_best_of_all_candidates_is_found_by_trying_each(tmp_path: Path) -> None:
    """With as many tried as there are candidates, on the one chunk that has so many."""
    model, length = drt(vocab_size=259), 9 * S
    (result,) = asked(model, tmp_path, lengths=(length,), texts=1, sample=7)
    cases = {case["chunks"]: case for case in result["cases"]}
    ids, one = torch.from_numpy(TEXT.read(0, length).astype(np.int64))[None], retrieving(model, 1)
    tried = []
    for m in range(7):
        table = torch.full((1, 9, 1), -1)
        table[0, 7, 0] = m
        logits = one(ids, neighbours=table).logits[0, :-1].log_softmax(-1)
        tried.append(-logits.gather(1, ids[0, 1:, None])[8 * S :, 0].sum().item())
    assert cases["one, best"]["tokens"] == S - 1
    assert cases["one, best"]["nats"] == pytest.approx(min(tried) / (S - 1))
    assert cases["one, random"]["nats"] == pytest.approx(np.mean(tried) / (S - 1))


def test_texts_that_were_read_are_not_read_again(tmp_path: Path) -> None:
    model, settings = drt(vocab_size=259), {"lengths": (LENGTH,), "texts": 2, "sample": 4}
    (first,) = asked(model, tmp_path, **settings)
    model.forward = None  # nothing is computed
    (again,) = asked(model, tmp_path, **settings)
    assert again == first


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (lambda: window_model(vocab_size=259), {}, "models: expected one that scores all past chunks"),
        (lambda: drt(vocab_size=259, retriever="random"), {}, "models: expected one that scores all"),
        (lambda: drt(vocab_size=259), {"lengths": (10**6,)}, "lengths: expected at most the"),
        (
            lambda: drt(vocab_size=259),
            {"lengths": (20,)},
            "lengths: expected texts in which a chunk may choose among 8",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused(
    tmp_path: Path, model: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match="^" + message):
        asked(model(), tmp_path, **settings)


# --- scores --------------------------------------------------------------------------------------------------------


def test_the_rank_of_scores_is_that_of_their_pairs() -> None:
    generator, C = np.random.default_rng(0), 40
    later = np.where(np.tri(C, k=-1, dtype=bool), 0, -np.inf)  # no candidates
    column, pair, row = (generator.normal(size=shape) for shape in (C, (C, C), (C, 1)))
    assert retrieval.parts_of(column + row + later)["rank"] == pytest.approx(1)
    assert 10 < retrieval.parts_of(pair + later)["rank"] < C // 2
    assert retrieval.parts_of(later) == {"deviation": 0, "popular": 0, "rank": 0}


def test_rank_correlation_is_spearmans() -> None:
    a = np.array([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]])
    assert retrieval._rank_correlation(a, np.array([[5.0, 6.0, 70.0, 800.0], [4.0, 3.0, 2.0, 1.0]])) == 0
    assert retrieval._rank_correlation(a[:1], np.array([[1.0, 2.0, 4.0, 3.0]])) == pytest.approx(0.8)


def test_the_gradient_is_what_a_small_change_of_a_score_does() -> None:
    """A chunk's landmark vector is moved along a query, so that its score for it alone changes, in every group."""
    model = drt(vocab_size=259)
    ids = tokens(LENGTH, vocab=259)[0].numpy()
    ((indices, even, odd),) = retrieval._gradients(model, ids)
    chosen = model(torch.from_numpy(ids)[None], output_retrieval=True).retrieval[0]
    assert np.array_equal(indices, chosen.indices[0].numpy())
    asking, step = 20, 1e-6
    row = torch.from_numpy(ids)[None]
    losses = []
    from trailmark.models.drt.chunks import TextChunks

    original = TextChunks._score
    for sign in (-1, 1):

        def changed(self: Any, query: Any, given: Any, noise: Any, sign: int = sign) -> Any:
            found = original(self, query, given, noise)
            scores = found.scores.clone()
            scores[0, asking, 1] += sign * step
            weights = scores.masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0).softmax(-1)
            weights = weights.masked_fill(found.indices < 0, 0)
            return found._replace(weights=weights, scores=scores)

        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(TextChunks, "_score", changed)
            logits = model(row).logits[0, :-1].log_softmax(-1)
        each = -logits.gather(1, row[0, 1:, None])[:, 0]
        losses.append(torch.stack([each[0::2].sum(), each[1::2].sum()]))
    slope = ((losses[1] - losses[0]) / (2 * step)).numpy()
    np.testing.assert_allclose([even[asking, 1], odd[asking, 1]], slope, rtol=1e-4)


def test_gradients_of_known_parts_are_taken_apart() -> None:
    generator = np.random.default_rng(0)
    indices = np.stack([generator.choice(40, 8, replace=False) for _ in range(500)])
    popular = generator.normal(size=40)[indices]
    pair, noise = generator.normal(size=indices.shape), generator.normal(size=indices.shape)
    found = retrieval._gradient_parts(indices, popular, popular, 40)
    assert found == {
        "gradient_popular": pytest.approx(1),
        "gradient_halves": pytest.approx(1),
        "ever_read": 1.0,
    }
    found = retrieval._gradient_parts(indices, pair, noise, 80)
    assert found["gradient_popular"] == pytest.approx(0, abs=0.02)
    assert found["gradient_halves"] == pytest.approx(0, abs=0.06)
    assert found["ever_read"] == 0.5
