"""DRT with chunks that an encoder finds, or that come from a table: what is read, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.drt.test_ablations import ENCODERS, LENGTH, BagOfTokens, S, build
from tests.models.drt.test_model import in_calls
from tests.models.drt.test_training import trained
from tests.models.tiny import (
    assert_same,
    drt_config,
    logits_of,
    pad,
    place,
    split,
    tokens,
)
from trailmark.models import DRTForCausalLM, causal_lm
from trailmark.ops import ChunkSelection


def table_of(model: DRTForCausalLM, ids: Tensor, **arguments: Any) -> dict[str, Tensor]:
    """What the embedder finds, as a table would hold it."""
    found: ChunkSelection = model(ids, output_retrieval=True, **arguments).retrieval[0]
    table = {"neighbours": found.indices}
    if not model.config.scores_chunks:
        table["neighbour_scores"] = found.scores.detach() / model.config.retrieval_scale
    return table


@ENCODERS
def test_a_table_is_the_embedder(name: str) -> None:
    model, ids = build(name), tokens(LENGTH, batch=2)
    table, online = table_of(model, ids), logits_of(model, ids)
    model.embedder = None
    assert_same(logits_of(model, ids, **table), online)
    texts = [tokens(n, seed=b)[0] for b, n in enumerate((41, 3, 26))]
    padded, mask = pad(texts), pad([torch.ones_like(text) for text in texts])
    model.embedder = BagOfTokens()
    table = table_of(model, padded, attention_mask=mask)
    online = logits_of(model, padded, attention_mask=mask)
    model.embedder = None
    given = logits_of(model, padded, attention_mask=mask, **table)
    for b, text in enumerate(texts):
        columns = place(len(text), padded.shape[1], "left")
        assert_same(given[b, columns], online[b, columns])


def test_a_table_says_what_is_read() -> None:
    model, ids = build("encoder"), tokens(LENGTH)
    table = torch.full((1, LENGTH // S, 3), -1)
    table[0, 20, :2] = torch.tensor([2, 11])
    out = model(ids, neighbours=table, output_retrieval=True)
    for chosen in out.retrieval:
        assert torch.equal(chosen.indices, table)
        assert_same(chosen.weights.sum(-1), (table >= 0).any(-1).double())
    assert not torch.equal(out.retrieval[0].weights, out.retrieval[1].weights)  # each group's own scores
    assert model.embedder.calls == 0
    nothing = logits_of(model, ids, neighbours=torch.full_like(table, -1))
    assert torch.equal(out.logits[:, : 21 * S], nothing[:, : 21 * S])
    assert not torch.equal(out.logits[:, 21 * S], nothing[:, 21 * S])


@pytest.mark.parametrize("changes", [{}, {"exclude_visible_chunks": True, "sliding_window": 15}], ids=str)
def test_chunks_given_to_a_model_that_scores_are_read_with_the_best_of_the_others(
    changes: dict[str, Any],
) -> None:
    model, ids = build("encoder", retriever="causal", **changes), tokens(LENGTH)
    own = model(ids, output_retrieval=True, output_retrieval_scores=True)
    table = torch.full((1, LENGTH // S, 2), -1)
    table[0, 9, :1], table[0, 20] = 3, torch.tensor([2, 11])
    out = model(ids, neighbours=table, output_retrieval=True, output_retrieval_scores=True)
    assert_same(
        out.logits[:, : 10 * S], own.logits[:, : 10 * S]
    )  # what chunk 9 asked for is read from there on
    assert not torch.equal(out.logits[:, 10 * S], own.logits[:, 10 * S])
    for chosen, scores in zip(out.retrieval, out.retrieval_scores.scores, strict=True):
        for n in range(LENGTH // S):
            given = table[0, n][table[0, n] >= 0].tolist()
            others = [m for m in scores[0, n].argsort(descending=True).tolist() if m not in given]
            others = [m for m in others if scores[0, n, m] > -torch.inf]
            wanted = sorted([*given, *others][:3])
            found = chosen.indices[0, n]
            assert found[found >= 0].tolist() == wanted
            weights = scores[0, n, wanted].softmax(-1)
            assert_same(chosen.weights[0, n, : len(wanted)], weights)


def test_with_all_chunks_given_a_model_that_scores_is_one_with_an_encoder() -> None:
    model, scores = build("encoder"), build("encoder", retriever="causal")
    scores.load_state_dict(model.state_dict())
    ids = tokens(LENGTH, batch=2)
    assert_same(logits_of(scores, ids, **table_of(model, ids)), logits_of(model, ids))


def broken(place: tuple[int, ...], values: list[int]) -> Tensor:
    table = torch.full((1, LENGTH // S, 3), -1)
    table[place] = torch.tensor(values)
    return table


FITTING, EVEN = broken((0, 20), [2, 11, -1]), torch.zeros(1, LENGTH // S, 3)
REFUSED: list[tuple[dict[str, Any], str]] = [  # by the option "encoder"
    ({}, "embedder: expected one for a model with retriever='encoder', got none. Set model.embedder"),
    ({"neighbours": FITTING[:, :-1]}, r"neighbours: expected shape \[1, 25, n\]"),
    ({"neighbours": FITTING.expand(2, -1, -1)}, r"neighbours: expected shape \[1, 25, n\]"),
    ({"neighbours": FITTING[..., :2]}, r"neighbours: expected shape \[B, C, 3\]"),
    ({"neighbours": FITTING.float()}, "neighbours: expected int64"),
    ({"neighbours": broken((0, 20), [2, 20, -1])}, "neighbours: expected chunks before .* got 20"),
    ({"neighbours": broken((0, 20), [2, 2, -1])}, r"neighbours: expected different .*\[2, 2, -1\]"),
    ({"neighbours": broken((0, 20), [-1, 2, 3])}, "neighbours: expected different chunks in asc"),
    ({"neighbours": FITTING, "use_cache": True}, "neighbours: expected none with past_key_values"),
    ({"neighbours": FITTING, "neighbour_scores": EVEN}, "neighbour_scores: expected none, got a t"),
]
REFUSED_BY: list[tuple[str, dict[str, Any], str]] = [
    ("random", {"neighbours": FITTING}, "neighbours: expected none for DRTForCausalLM"),
    (
        "causal",
        {"neighbours": FITTING.repeat(1, 1, 2)},
        r"neighbours: expected shape \[B, C, n\] with n from 1 to 3",
    ),
    (
        "causal",
        {"neighbours": FITTING, "neighbour_scores": EVEN},
        "neighbour_scores: expected none, got a tensor",
    ),
    (
        "encoder-2",
        {"neighbours": broken((0, 20), [2, 19, -1])},
        "neighbours: expected no chunk that the window",
    ),
    ("contriever", {"neighbours": FITTING}, "neighbour_scores: expected the encoder's scores"),
    (
        "contriever",
        {"neighbours": FITTING, "neighbour_scores": torch.full_like(EVEN, torch.nan)},
        "neighbour_scores: expected finite numbers",
    ),
    ("contriever", {"neighbour_scores": EVEN}, "neighbour_scores: expected them with neighbours"),
]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [*(("encoder", *case) for case in REFUSED), *REFUSED_BY],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_cannot_be_read_is_refused(name: str, arguments: dict[str, Any], message: str) -> None:
    model = build("encoder", retriever="causal") if name == "causal" else build(name)
    model.embedder = None
    with pytest.raises(ValueError, match="^" + message):
        model(tokens(LENGTH), **arguments)


def test_another_embedder_than_the_models_is_refused() -> None:
    model = build("encoder", embedder="bag", embedder_fingerprint="bag 5")
    with pytest.raises(ValueError, match=r"^embedder: expected the one .* 'bag 5'.*got 'bag 3'"):
        model(tokens(9))
    with pytest.raises(ValueError, match=r"^embedder: expected the one"):
        model.new_cache()
    model.embedder = None
    with pytest.raises(ValueError, match=r"^embedder: expected one"):
        model.read(tokens(9))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"retriever": "bm25"}, "retriever: expected 'causal' or 'random' or 'encoder', got 'bm25'"),
        ({"encoder_weights": "encoder"}, "encoder_weights: expected 'learned' with retriever 'causal'"),
        (
            {"retriever": "random", "embedder": "hash"},
            "embedder: expected None with retriever 'random', got 'hash'",
        ),
        (
            {"retriever": "encoder", "encoder_weights": "encoder", "retrieval_recency": 1.0},
            "retrieval_recency: expected 0 with encoder_weights 'encoder'",
        ),
        ({"retrieval_recency": -1.0}, "retrieval_recency: expected at least 0, got -1"),
        ({"embedder_fingerprint": "ab"}, "embedder_fingerprint: expected None with retriever 'causal'"),
        ({"alibi_slopes": "steep"}, "alibi_slopes: expected 'geometric' or 'interpolated', got 'steep'"),
        (
            {"alibi_slopes": "interpolated", "window_position": "rope"},
            "alibi_slopes: expected 'geometric' .* with window_position 'rope'",
        ),
    ],
    ids=str,
)
def test_options_of_another_retriever_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        drt_config(**changes)


def test_chunks_given_where_a_row_closes_none_are_refused() -> None:
    model, ids = build("encoder"), tokens(40, batch=2)
    mask = torch.ones_like(ids)
    mask[1, 10:] = 0  # two chunks and two tokens
    table = torch.full((2, 10, 3), -1)
    table[1, 1, 0] = 0
    logits_of(model, ids, attention_mask=mask, neighbours=table)
    table[1, 8, 0] = 1
    with pytest.raises(ValueError, match=r"got 1 for chunk 8 of row 1, which closes 2\. Put -1"):
        model(ids, attention_mask=mask, neighbours=table)


def test_generate_takes_no_table() -> None:
    model, ids = build("encoder"), tokens(40)
    for name in ("neighbours", "neighbour_scores"):
        with pytest.raises(ValueError, match=f"^{name}: expected none in generate"):
            model.generate(ids, max_new_tokens=2, **{name: FITTING[:, :10]})


# --- the embedder ------------------------------------------------------------------------------------------------


def test_tokens_of_32_bits_are_embedded_too() -> None:
    model, ids = build("encoder"), tokens(LENGTH)
    whole = logits_of(model, ids)
    assert_same(logits_of(model, ids.int()), whole)
    assert_same(in_calls(model, split(ids.int(), [7, 1, 1]))[0], whole)


class Dense(torch.nn.Module):
    """Of weights: a module, as encoders are."""

    size, fingerprint = 11, "dense"

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(11, 11, generator=torch.Generator().manual_seed(0)))
        self.dtypes: set[torch.dtype] = set()

    def forward(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        found = BagOfTokens().vectors(ids, lengths) @ self.weight
        self.dtypes.add(found.dtype)
        return found, found


def test_a_module_that_embeds_is_no_part_of_the_model() -> None:
    model, ids = build("encoder"), tokens(LENGTH, batch=2)
    names = list(model.state_dict())
    model.embedder = dense = Dense()
    assert model.embedder is dense
    assert list(model.state_dict()) == names
    trained(model.bfloat16(), ids).loss.backward()
    assert dense.weight.dtype == torch.float32
    assert dense.weight.grad is None


def test_an_embedder_computes_in_float32_under_autocast() -> None:
    """As when its table was made."""
    model, ids = build("encoder").float(), tokens(LENGTH)
    model.embedder = Dense()
    plain = model(ids, output_retrieval=True).retrieval[0].indices
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(ids, output_retrieval=True).retrieval[0].indices, plain)
        in_calls(model, split(ids, [30]))
    assert model.embedder.dtypes == {torch.float32}


def test_vectors_of_another_shape_are_refused() -> None:
    model = build("encoder")
    model.embedder.size = 5
    model.embedder.vectors = lambda ids, lengths: torch.zeros(len(ids), 6)
    with pytest.raises(ValueError, match=r"^embedder: expected queries and keys of shape .* \(25, 5\)"):
        model(tokens(LENGTH))


@pytest.mark.parametrize("name", ["encoder-2", "contriever"])
def test_reading_that_an_embedder_stops_goes_on_where_it_was(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causal_lm, "_READ_TOKENS", 8)
    model, text = build(name), tokens(LENGTH + 9)
    exact, bag = logits_of(model, text)[:, LENGTH:], model.embedder
    for fails in (0, 1, 5):

        class Stopped(BagOfTokens):
            def vectors(self, ids: Tensor, lengths: Tensor, left: int = fails) -> Tensor:
                if self.calls > left:
                    raise KeyboardInterrupt
                return super().vectors(ids, lengths)

        cache, model.embedder = model.new_cache(), Stopped()
        with pytest.raises(KeyboardInterrupt):
            model.read(text[:, :LENGTH], cache)
        done, model.embedder = 0 if cache.state is None else int(cache.num_tokens[0]), bag
        assert done == 8 * fails
        model.read(text[:, done:LENGTH], cache)
        assert_same(logits_of(model, text[:, LENGTH:], past_key_values=cache), exact)


def test_the_open_chunks_tokens_count_as_window() -> None:
    cache = build("encoder").read(tokens(LENGTH, batch=2))
    assert cache.state is not None
    held = cache.window_bytes()
    cache.state = replace(cache.state, open_ids=None)
    assert held - cache.window_bytes() == 2 * S * 8
