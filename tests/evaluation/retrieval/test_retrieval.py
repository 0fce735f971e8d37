"""What retrieval is worth to a model: against forwards chunk by chunk, closed forms, and small changes of a score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpora import prose
from tests.models.tiny import drt, drt_config, window_model
from trailmark.data.corpus import load_tokenizer
from trailmark.data.neighbours.bm25 import Bm25
from trailmark.evaluation.documents import Documents
from trailmark.evaluation.record import Record
from trailmark.evaluation.retrieval import run as retrieval
from trailmark.evaluation.retrieval.suite import CASES, SUITE, RetrievalSettings
from trailmark.evaluation.subject import Subject
from trailmark.evaluation.tables import card_table
from trailmark.models.drt.chunks import TextChunks
from trailmark.models.with_retrieved import with_retrieved

S, K, LENGTH = 4, 3, 103  # 25 chunks and 3 tokens
BYTES = load_tokenizer()
NAMES = [
    "chunks",
    "what",
    "tokens",
    "nats",
    "less",
    "less_low",
    "less_high",
    "source_read",
    "popular",
    "settings",
    "number",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(NAMES), x, max_size=6),
    max_leaves=10,
)
TEXT = Documents.of([prose(1, 60), prose(2, 60)], BYTES)


def asked(model: Any, folder: Path, **settings: Any) -> list[dict[str, Any]]:
    subject = Subject.of(model, BYTES, S)
    record = Record(folder, "retrieval", subject.identity())
    return retrieval.run(subject, RetrievalSettings(**settings), TEXT, record)


VARIANTS = pytest.mark.parametrize(
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


def stretch(start: int, length: int = LENGTH) -> Any:
    return TEXT.read(start, start + length).astype(np.int64)


def limits_of(model: Any, ids: Any) -> Any:
    scores = model(torch.from_numpy(ids)[None], output_retrieval_scores=True).retrieval_scores.scores[0]
    return (scores[0] > -torch.inf).sum(1).numpy()


def nats_of(model: Any, ids: Any, table: Any = None) -> Any:
    """[T - 1] of one forward."""
    row, told = torch.from_numpy(ids)[None], None if table is None else torch.from_numpy(table)[None]
    with torch.no_grad():
        logits = model(row, neighbours=told).logits[0, :-1].log_softmax(-1)
    return -logits.gather(1, row[0, 1:, None])[:, 0].numpy()


@VARIANTS
@pytest.mark.parametrize("length", [LENGTH, 26 * S, 25 * S + 1])
@pytest.mark.sampled(12)
def test_every_case_is_a_forward_with_these_chunks(
    tmp_path: Path, changes: dict[str, Any], length: int
) -> None:
    model, M = drt(2, vocab_size=259, **changes), 5
    (result,) = asked(model, tmp_path, lengths=(length,), texts=2, sample=M)
    assert (result["settings"]["number"], result["settings"]["texts"]) == (None, 2)
    cases = {case["chunks"]: case for case in result["cases"]}
    assert list(cases) == list(CASES)
    none, one = model.without_retrieval(), with_retrieved(model, 1)
    wanted, counted = dict.fromkeys(CASES, 0.0), 0
    for number, start in enumerate((0, TEXT.tokens // 2)):
        ids = stretch(start, length)
        limits, readers = limits_of(model, ids), np.arange(length - 1) // S
        asks = [c for c in range(len(limits)) if limits[c] > K and limits[c] >= M and c + 1 in readers]
        rows = np.isin(readers, np.array(asks) + 1)
        counted += int(rows.sum())
        wanted["none"] += nats_of(none, ids)[rows].sum()
        wanted["own"] += nats_of(model, ids)[rows].sum()
        wanted["one, own"] += nats_of(one, ids)[rows].sum()
        for case, table in retrieval.choices_of(ids, S, limits, K, 0, number):
            wanted[case] += nats_of(model, ids, table)[rows].sum()
        tried = retrieval._sample(limits, np.array(asks), M, 0, number)
        alone = np.stack([nats_of(one, ids, tried[:, m : m + 1]) for m in range(M)])
        wanted["one, random"] += alone.mean(0)[rows].sum()
        best = np.full((len(limits), 1), -1)
        for c in asks:
            best[c] = tried[c, alone[:, readers == c + 1].sum(1).argmin()]
        wanted["one, best"] += nats_of(one, ids, best)[rows].sum()
    for case in CASES:
        if not case.startswith("copy"):
            assert cases[case]["tokens"] == counted
            assert cases[case]["nats"] == pytest.approx(wanted[case] / counted)
            assert case == "none" or cases[case]["less"] == pytest.approx(
                (wanted["none"] - wanted[case]) / counted
            )
    rows = SUITE.rows(result)
    assert [row["what"] for row in rows][-2:] == ["scores of group 0", "scores of group 1"]
    assert SUITE.rows(result | {"settings": {"number": 0}}) == []


def test_chunks_are_chosen_by_rules_that_know_nothing_of_the_model() -> None:
    ids, limits = stretch(0), np.maximum(np.arange(25) - 2, 0)
    tables = dict(retrieval.choices_of(ids, S, limits, K, 0, 0))
    chunks = [ids[c * S : (c + 1) * S] for c in range(26)]  # the last one has 3 tokens
    bm25 = Bm25.of(np.stack(chunks[:25]), np.full(25, S))

    def best(asking: int, limit: int) -> list[int]:
        query = chunks[asking][None]
        scores = bm25.scores(np.stack(chunks[:25]), np.full(25, S), query, np.array([query.shape[1]]))[
            0, :limit
        ]
        return sorted(np.argsort(-scores, kind="stable")[:K].tolist())

    for c, limit in enumerate(limits.tolist()):
        own = {case: [m for m in table[c].tolist() if m >= 0] for case, table in tables.items()}
        assert own["recent"] == list(range(max(0, limit - K), limit))
        assert own["BM25"] == best(c, limit)
        assert own["BM25, told"] == best(c + 1, limit)
        assert len(set(own["random"])) == min(K, limit)
        assert all(m < limit for m in own["random"])
        assert own["random"] == sorted(own["random"])


@pytest.mark.parametrize("chunk_size", [1, 4, 7])
@pytest.mark.parametrize("chunks_seen", [1, 15])
def test_spans_come_again_out_of_sight(chunk_size: int, chunks_seen: int) -> None:
    window = chunks_seen * chunk_size + chunk_size // 2
    ids, C, asked = stretch(0, 50 * chunk_size + chunk_size // 2), 50, chunk_size - chunk_size // 2
    changed, given, places = retrieval.copies_of(ids, chunk_size, np.arange(C), window, 0, 0)
    asking = np.flatnonzero(given[:, 0] >= 0).tolist()
    assert len(asking) == 4
    assert len(places) == 4 * (chunk_size - 1)
    untouched = np.ones(len(ids), bool)
    for c in asking:
        begin = (c + 1) * chunk_size - asked
        source = int(given[c, 0]) * chunk_size - (asked if chunk_size == 1 else 0)
        assert np.array_equal(
            changed[begin : begin + asked + chunk_size], ids[source : source + asked + chunk_size]
        )
        assert source + asked + chunk_size <= min(
            C // 2 * chunk_size, c * chunk_size, begin - window + chunk_size
        )
        read = {(source + asked + n) // chunk_size for n in range(chunk_size)}
        assert read == set(given[c].tolist()) - {-1}
        assert set(range((c + 1) * chunk_size, (c + 2) * chunk_size - 1)) <= set(places)
        untouched[begin : begin + asked + chunk_size] = False
    assert np.array_equal(changed[untouched], ids[untouched])
    assert untouched[: C // 2 * chunk_size].all()


@VARIANTS
def test_repeated_spans_are_read_with_their_source_in_hand(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = drt(2, vocab_size=259, **changes)
    (result,) = asked(model, tmp_path, lengths=(LENGTH,), texts=1, sample=5)
    cases, ids = {case["chunks"]: case for case in result["cases"]}, stretch(0)
    copies = retrieval.copies_of(ids, S, limits_of(model, ids), model.config.sliding_window, 0, 0)
    assert cases["copy, own"]["tokens"] == len(copies.places) > 0
    for case, of, table in (
        ("copy, none", model.without_retrieval(), None),
        ("copy, own", model, None),
        ("copy, given", model, copies.given),
    ):
        assert cases[case]["nats"] == pytest.approx(nats_of(of, copies.ids, table)[copies.places].mean())
    out = model(torch.from_numpy(copies.ids)[None], output_retrieval=True).retrieval
    sources, read = 0, 0
    for asking, wanted in enumerate(copies.given.tolist()):
        chosen = {m for own in out for m in own.indices[0, asking].tolist()}
        sources += sum(m >= 0 for m in wanted)
        read += sum(m in chosen for m in wanted if m >= 0)
    assert cases["copy, own"]["source_read"] == pytest.approx(read / sources)


def test_a_model_that_reads_one_chunk_has_no_source_in_hand_and_no_gradient(tmp_path: Path) -> None:
    (result,) = asked(drt(vocab_size=259, num_retrieved_chunks=1), tmp_path, lengths=(LENGTH,), texts=1)
    assert not any(case["chunks"].startswith("copy") for case in result["cases"])
    (group,) = result["groups"]
    assert group["gradient_popular"] is None
    assert group["gradient_halves"] is None
    assert group["ever_read"] > 0
    assert "noisy_ever_read" not in group


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
            "lengths: expected texts in which a chunk is read for that",
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
    generator, C, config = torch.Generator().manual_seed(0), 40, drt_config()
    later = torch.full((C, C), -torch.inf).triu()  # no candidates
    column, pair, row = (torch.randn(shape, generator=generator).double() for shape in ((C,), (C, C), (C, 1)))
    assert retrieval.parts_of(column + row + later, config)["rank"] == pytest.approx(1)
    assert 10 < retrieval.parts_of(pair + later, config)["rank"] < C // 2
    assert retrieval.parts_of(later, config) == {"deviation": 0, "popular": 0, "rank": 0}
    age = (torch.arange(C)[:, None] - torch.arange(C)).clamp(min=1).log()
    aged = retrieval.parts_of(pair - 2 * age + later, drt_config(retrieval_recency=2.0))
    assert aged == pytest.approx(retrieval.parts_of(pair + later, config))


def test_rank_correlation_is_spearmans() -> None:
    a = np.array([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]])
    assert retrieval.rank_correlation(a, np.array([[5.0, 6.0, 70.0, 800.0], [4.0, 3.0, 2.0, 1.0]])) == 0
    assert retrieval.rank_correlation(a[:1], np.array([[1.0, 2.0, 4.0, 3.0]])) == pytest.approx(0.8)
    ties = np.array([[1.0, 1.0, 2.0, 2.0], [7.0, 7.0, 7.0, 7.0]])  # the second says nothing
    assert retrieval.rank_correlation(a, ties) == pytest.approx(2 / 5**0.5)
    assert np.isnan(retrieval.rank_correlation(a[1:], ties[1:]))


def test_what_rows_and_columns_add_is_no_agreement_of_the_pair() -> None:
    generator, C, M = np.random.default_rng(0), 60, 8
    limits = np.arange(C)
    asks = np.arange(M, C - 1)
    tried = retrieval._sample(limits, asks, M, 0, 0)[asks]
    pair, row, column = (generator.normal(size=shape) for shape in ((C, C), (C, 1), C))
    later = np.where(np.tri(C, k=-1, dtype=bool), 0, -np.inf)
    useful = np.take_along_axis(pair[asks], tried, 1)
    alone = retrieval._agreement(pair + later, limits, asks, tried, useful)
    assert alone["agreement"] == pytest.approx(1)
    assert alone["agreement_of_pair"] > 0.9
    for added in (5 * row, np.arange(C)[:, None]):
        found = retrieval._agreement(pair + added + later, limits, asks, tried, useful)
        assert found == {name: pytest.approx(value) for name, value in alone.items()}
    popular = retrieval._agreement(pair + 50 * column + later, limits, asks, tried, useful)
    assert popular["agreement"] < 0.2
    assert popular["agreement_of_pair"] > 0.7


def test_the_gradient_is_what_a_small_change_of_a_score_does() -> None:
    """Of two groups, the score of one chunk that one asks for, changed where it is weighed."""
    model = drt(2, vocab_size=259, window_position="rope", virtual_key="window")
    ids, (asking, place), step = stretch(0), (20, 1), 1e-6
    own = retrieval._gradients(model, ids)
    chosen = model(torch.from_numpy(ids)[None], output_retrieval=True).retrieval
    weigh = TextChunks._score
    for group, (indices, even, odd) in enumerate(own):
        assert np.array_equal(indices, chosen[group].indices[0].numpy())
        losses = []
        for sign in (-1, 1):
            calls = iter(range(len(own)))

            def changed(
                self: Any, *given: Any, calls: Any = calls, group: int = group, sign: int = sign
            ) -> Any:
                found = weigh(self, *given)
                if next(calls) != group:
                    return found
                scores = found.scores.clone()
                scores[0, asking, place] += sign * step
                weights = found.weights.clone()
                weights[0, asking] = scores[0, asking].softmax(-1)
                return found._replace(weights=weights, scores=scores)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(TextChunks, "_score", changed)
                each = nats_of(model, ids)
            losses.append(np.array([each[0::2].sum(), each[1::2].sum()]))
        slope = (losses[1] - losses[0]) / (2 * step)
        np.testing.assert_allclose([even[asking, place], odd[asking, place]], slope, rtol=1e-4)


def test_with_noise_the_gradient_is_of_what_training_would_read(tmp_path: Path) -> None:
    model, ids = drt(2, vocab_size=259, retrieval_noise=True), stretch(0)
    found = retrieval._gradients(model, ids, noise_seed=5)
    assert not model.training
    trained = model.train()(
        torch.from_numpy(ids)[None], noise_seed=torch.tensor([5]), output_retrieval=True
    ).retrieval
    for own, of_training, quiet in zip(found, trained, retrieval._gradients(model.eval(), ids), strict=True):
        assert np.array_equal(own[0], of_training.indices[0].numpy())
        assert not np.array_equal(own[0], quiet[0])
    for noise in (True, False):
        of_noise = drt(2, vocab_size=259, retrieval_noise=noise)
        (result,) = asked(of_noise, tmp_path / str(noise), lengths=(LENGTH,), texts=1)
        assert all(("noisy_ever_read" in group) == noise for group in result["groups"])
    with_noise, before = (
        {"cases": {}, "groups": [own]} for own in ({"rank": 2, "noisy_rank": 3}, {"rank": 4})
    )
    for texts in ([with_noise, before], [before, with_noise]):  # an earlier version read one of them
        assert retrieval._of_all(texts)["groups"] == [{"rank": 3}]


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
    found = retrieval._gradient_parts(indices, 0 * pair, 0 * pair, 40)
    assert found == {"gradient_popular": pytest.approx(np.nan, nan_ok=True),
                     "gradient_halves": pytest.approx(np.nan, nan_ok=True), "ever_read": 1.0}  # fmt: skip
    found = retrieval._gradient_parts(indices, pair, noise, 80)
    assert found["gradient_popular"] == pytest.approx(0, abs=0.02)
    assert found["gradient_halves"] == pytest.approx(0, abs=0.06)
    assert found["ever_read"] == 0.5


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from(["cases", "groups", "settings", "length"]), JSON, max_size=4))
def test_any_json_makes_a_table(result: dict[str, Any]) -> None:
    """A record may come from anybody."""
    known = result | {"settings": result["settings"] if isinstance(result.get("settings"), dict) else {}}
    card_table(SUITE, [known])
