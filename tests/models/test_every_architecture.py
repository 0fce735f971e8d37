"""What holds for every architecture with each of its options: calls, causality, gradients, checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import test_documents as documents
from tests.models.block_recurrent.test_model import VARIANTS as BLOCK_RECURRENT
from tests.models.drt.test_ablations import OPTIONS as ABLATIONS
from tests.models.drt.test_ablations import build as ablation
from tests.models.drt.test_model import in_calls, memory_of
from tests.models.hils.test_model import CASES as HILS_CASES
from tests.models.hils.test_model import options_of as hils_options
from tests.models.hsa.test_model import CASES as HSA_CASES
from tests.models.hsa.test_model import options_of as hsa_options
from tests.models.rpt.test_model import VARIANTS as RPTS
from tests.models.rpt.test_model import WHOLE, candidates
from tests.models.test_ragged_training import Batch
from tests.models.test_sinks import HIDDEN
from tests.models.tiny import (
    PRETRAINED,
    assert_same,
    block_recurrent,
    drt,
    early,
    hils,
    hsa,
    landmark,
    logits_of,
    padded,
    rpt,
    split,
    tokens,
    window_model,
)
from tests.models.tiny import VARIANTS as DRTS
from tests.models.tiny import name_of as case_name
from tests.models.window.test_model import VARIANTS as WINDOWS
from trailmark.models import TrailmarkForCausalLM, causal_lm

S = 4
Model = tuple[Callable[..., Any], dict[str, Any]]
RPT_MODES: list[dict[str, Any]] = [{}, {"retriever": "encoder"}, WHOLE]
FITTED = [PRETRAINED | {"groups": 2}]  # a DRT's
SINKS = [{"num_sinks": 3}]
GROUPS = [{"groups": groups} for groups in (1, 2, 3)]
ROPE: dict[str, Any] = {"window_position": "rope"}
GATES = [{"state_gate": gate} for gate in ("fixed", "lstm")]
HILS: list[dict[str, Any]] = [
    {},
    {"summary_query": "tokens", "far_position": "window", "num_sinks": 2, "max_sink_distance": 20},
    {"chunk_score": "mean", "chunk_weights": "keys"},
    PRETRAINED,
]
WINDOWS_READ = {"reading": "windows", "num_focus_chunks": 2}
HSAS: list[dict[str, Any]] = [
    {},
    {"num_memory_heads": 2, "num_retrieval_heads": 2, "num_sinks": 2},
    {"groups": 1, "chunk_weights": "stick_breaking", "recency_decay": False, "chunk_summary": "mean"},
    PRETRAINED,
]
# a HiLS of which the second layer alone chooses, and whose memory depends on windows
SECOND: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "reading": "windows",
    "far_position": "window",
}
QUICK = ("random-2", "encoder", "contriever")  # ablations; the rest of what takes long: with -m slow
pytestmark = pytest.mark.usefixtures("one_thread")


def models(make: Callable[..., Any], several: Iterable[dict[str, Any]]) -> list[Model]:
    return [(make, options) for options in several]


def ablations(names: Iterable[str] = ABLATIONS) -> list[Model]:
    return models(ablation, ({"name": name} for name in names))


def name_of(value: Any) -> str | None:
    if isinstance(value, tuple) and callable(value[0]):
        return "-".join([value[0].__name__, *map(str, value[1].values())])
    return value.__name__ if callable(value) else str(value)


def build(model: Model) -> TrailmarkForCausalLM:
    make, options = model
    made: TrailmarkForCausalLM = make(**options)
    return made


# --- any split into calls ----------------------------------------------------------------------------------

PIECES: list[tuple[list[Model], int, list[list[int]]]] = [
    (models(drt, DRTS), 103, [[1], [S], [3, 5, 8, 1, 26], [S, 8 * S, S - 1], [60, 43], [103]]),
    (models(drt, FITTED), 103, [[1], [3, 5, 8, 1, 26], [60, 43]]),
    (ablations(), 103, [[1, 1, 1, 1, 1, 20], [S, 3, 5, 8, 26]]),
    (models(window_model, WINDOWS), 90, [[1], [3, 5, 8, 1, 26], [60, 30]]),
    (models(block_recurrent, BLOCK_RECURRENT), 53, [[1], [3, 5, 8, 1, 26], [10, 5], [43]]),
    (models(rpt, RPTS), 41, [[3, 5, 8, 1, 26]]),
    (models(rpt, RPTS[:4]), 41, [[1]]),
]


@pytest.mark.parametrize(
    ("model", "length", "pieces"),
    [(model, length, pieces) for some, length, each in PIECES for model in some for pieces in each],
    ids=name_of,
)
@pytest.mark.sampled(15)
def test_any_split_into_calls_is_one_forward(model: Model, length: int, pieces: list[int]) -> None:
    made, ids = build(model), tokens(length, batch=2)
    whole = made(ids, output_retrieval=True)
    logits, calls = in_calls(made, split(ids, pieces))
    assert_same(logits, whole.logits)
    for group, chosen in enumerate(whole.retrieval or ()):
        assert torch.equal(torch.cat([call[group].indices for call in calls], dim=1), chosen.indices)
        assert_same(torch.cat([call[group].weights for call in calls], dim=1), chosen.weights)


def case_of(make: Callable[..., Any], case: dict[str, Any], options: dict[str, Any], marks: Tensor) -> Any:
    return pytest.param((make, options), marks, id=f"{make.__name__}-{case_name(case)}")


@pytest.mark.parametrize(
    ("model", "marks"),
    [case_of(hils, case, *hils_options(case)) for case in HILS_CASES]
    + [case_of(hsa, case, *hsa_options(case)) for case in HSA_CASES],
)
@pytest.mark.parametrize("pieces", [[1], [3, 5, 8, 1, 26], [60, 1]], ids=str)
@pytest.mark.sampled(24)
def test_any_split_chooses_the_same_for_each_token(model: Model, marks: Tensor, pieces: list[int]) -> None:
    length = marks.shape[1]
    made, ids = build(model), tokens(length, batch=2)
    marks = torch.cat([marks, early(length, 1) & bool(marks.any())])
    whole = made(ids, close_chunk=marks, output_retrieval=True)
    cache, outs = made.new_cache(), []
    for part, closes in zip(split(ids, pieces), split(marks, pieces), strict=True):
        outs.append(made(part, past_key_values=cache, close_chunk=closes, output_retrieval=True))
    assert_same(torch.cat([out.logits for out in outs], 1), whole.logits)
    for number, chosen in enumerate(whole.retrieval):
        parts = [out.retrieval[number] for out in outs]
        if made.config.chunk_size > 1:  # chunks of the same token are equals, between which rounding decides
            assert torch.equal(torch.cat([part.indices for part in parts], 1), chosen.indices)
        assert_same(torch.cat([part.scores for part in parts], 1).exp(), chosen.scores.exp())
        assert_same(torch.cat([part.weights for part in parts], 1), chosen.weights)


# models, the text's length, how much is read at a time, and what is read before the rest is passed
READS: list[tuple[list[Model], int, list[int], list[list[int]]]] = [
    (models(drt, DRTS), 103, [1, 20 * S, 4096], [[1], [S], [70], [90, 8], [S - 1, 87, 2], [102]]),
    (ablations(), 103, [1, 20 * S], [[S], [90, 8], [S - 1, 87, 2]]),
    (models(window_model, WINDOWS), 90, [11], [[1], [11], [47], [89]]),
    (models(block_recurrent, BLOCK_RECURRENT), 60, [11], [[1], [11], [40], [47], [59]]),
    (models(rpt, RPT_MODES), 70, [1, 4096], [[1], [S], [37, 20], [S - 1, 57, 2], [69]]),
    (models(hils, HILS), 70, [1, 20 * S], [[1], [S], [37, 20], [69]]),
    (models(hsa, HSAS), 70, [1, 20 * S], [[1], [S], [37, 20], [S - 1, 57, 2], [69]]),
]


@pytest.mark.parametrize(
    ("model", "length", "read_tokens", "reads"),
    [
        pytest.param(
            model,
            length,
            at_once,
            reads,
            marks=[pytest.mark.slow] if model[1].get("name", QUICK[0]) not in QUICK else [],
        )
        for some, length, each, reads in READS
        for model in some
        for at_once in each
    ],
    ids=name_of,
)
@pytest.mark.sampled(12)
def test_reading_then_forward_is_one_forward(
    model: Model, length: int, read_tokens: int, reads: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Landmarks that were only read ask later, when their tokens are gone."""
    monkeypatch.setattr(causal_lm, "_READ_TOKENS", read_tokens)
    made, ids = build(model), tokens(length, batch=2)
    whole = made(ids, output_retrieval=True)
    for pieces in reads:
        cache, first = made.new_cache(num_tokens=length), sum(pieces)
        for piece in ids[:, :first].split(pieces, dim=1):
            made.read(piece, cache)
        rest = made(ids[:, first:], past_key_values=cache, output_retrieval=True)
        assert_same(rest.logits, whole.logits[:, first:])
        read = first // S if made.selects_by_chunk else first
        for ours, exact in zip(rest.retrieval or (), whole.retrieval or (), strict=True):
            assert torch.equal(ours.indices, exact.indices[:, read:])


@pytest.mark.parametrize(
    "model",
    [
        *models(drt, GROUPS[:2] + FITTED + DRTS[7:10]),
        *ablations(),
        *models(rpt, RPT_MODES[:2] + SINKS),
        *models(hsa, HSAS[:3]),
        *models(hils, [SECOND | {"num_sinks": sinks} for sinks in (0, 6)]),
    ],
    ids=name_of,
)
def test_encoding_chunks_alone_is_reading_them(model: Model) -> None:
    """``encode`` with as many chunks before as the lower layers reach: what is planted is found as what was read."""
    made, ids = build(model), tokens(12 * S)
    cache, reach = made.read(ids), made.encoding_reach()
    for first in (0, 1, 5):
        before = ids[:, max(0, first - reach) * S : first * S] if first else None
        with torch.no_grad():
            alone = made.encode(ids[:, first * S :], before, cache, max(0, first - reach))
        for ours, read in zip(alone[:3], memory_of(cache), strict=True):
            assert_same(ours, read[:, first:])
    with pytest.raises(ValueError, match="input_ids: expected whole chunks of 4 tokens, got 6"):
        made.encode(ids[:, :6])
    with pytest.raises(ValueError, match="input_ids: expected tokens from 0 to "):
        made.encode(ids[:, :S], torch.full((1, S), made.config.vocab_size))
    with pytest.raises(ValueError, match="first_chunk: expected a whole number of at least 0, got -1"):
        made.encode(ids[:, :S], ids[:, :S], first_chunk=-1)


# --- causality ---------------------------------------------------------------------------------------------

ARCHITECTURES = [
    models(drt, GROUPS + FITTED),
    models(rpt, RPT_MODES),
    models(landmark, [{}, PRETRAINED]),
    models(hils, HILS),
    models(hsa, HSAS),
]
NEIGHBOURS = [model for several in ARCHITECTURES for model in several]


@pytest.mark.parametrize(
    "model",
    [
        *NEIGHBOURS,
        *models(window_model, WINDOWS),
        *models(block_recurrent, BLOCK_RECURRENT),
        (hils, WINDOWS_READ),
    ],
    ids=name_of,
)
@pytest.mark.sampled(8)
def test_what_is_saved_while_it_reads_is_gone_on_with(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causal_lm, "_READ_TOKENS", 5 * S)
    made, ids = build(model), tokens(103)
    cache = made.new_cache("disk", memory_folder=tmp_path / "memory")

    def save(done: int, total: int) -> None:
        if done < total:
            cache.save(tmp_path / "memory")
            shutil.copytree(tmp_path / "memory", tmp_path / f"{done}")

    made.read(ids[:, :80], cache, progress=save)
    expected = made(ids[:, 80:], past_key_values=cache).logits
    saved = sorted(int(folder.name) for folder in tmp_path.iterdir() if folder.name != "memory")
    assert saved
    for done in saved:
        loaded = made.load_cache(tmp_path / f"{done}")
        assert loaded.get_seq_length() == done
        made.read(ids[:, done:80], loaded)
        assert_same(made(ids[:, 80:], past_key_values=loaded).logits, expected)


@pytest.mark.parametrize(
    "model", [*NEIGHBOURS, *ablations(), *models(block_recurrent, BLOCK_RECURRENT)], ids=name_of
)
@pytest.mark.parametrize("length", [33, 103])
@pytest.mark.sampled(4)
def test_no_token_changes_an_earlier_logit_bit_for_bit(model: Model, length: int) -> None:
    made, ids = build(model), tokens(length)
    before = logits_of(made, ids)
    for place in (0, S - 1, S, 5, 2 * S, 4 * S - 1, 17, 25, 32):
        changed = ids.clone()
        changed[0, place] = (ids[0, place] + 1) % 50
        after = logits_of(made, changed)
        assert torch.equal(before[:, :place], after[:, :place])
        assert (before[:, place] != after[:, place]).any()


@pytest.mark.parametrize(
    ("model", "dtype"),
    [(model, torch.float32) for model in NEIGHBOURS]
    + [(of[0], dtype) for of in ARCHITECTURES for dtype in (torch.float64, torch.bfloat16)],
    ids=name_of,
)
def test_a_neighbours_content_changes_no_bit(model: Model, dtype: torch.dtype) -> None:
    made, ids = build(model).to(dtype), tokens(103, batch=3)
    changed = ids.clone()
    changed[1] = (ids[1] + 1) % 50
    changed[2] = 7  # equal chunks, whose scores tie
    before, after = logits_of(made, ids), logits_of(made, changed)
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


@pytest.mark.parametrize(
    "model",
    [*models(hils, [HILS[0], HILS[2]]), *models(hsa, [{"num_memory_heads": 2}, HSAS[1]])],
    ids=name_of,
)
@torch.no_grad()
def test_a_neighbours_content_changes_no_bit_of_decoding(model: Model) -> None:
    made, ids = build(model).float(), tokens(61, batch=2)
    other = ids.clone()
    other[1] = 7  # equal chunks: few are different
    rows = []
    for batch in (ids, other):
        cache = made.new_cache()
        parts = [made(part, past_key_values=cache).logits[:1] for part in batch.split([45, *[1] * 16], 1)]
        rows.append(torch.cat(parts, 1))
    assert torch.equal(*rows)


@pytest.mark.parametrize("make", [hils, hsa])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_selects_nothing(make: Callable[..., TrailmarkForCausalLM], side: str) -> None:
    ids, mask = padded([60, 9, 41], side)
    for chosen in make()(ids, attention_mask=mask, output_retrieval=True).retrieval:
        absent = mask == 0
        assert (chosen.indices[absent] == -1).all()
        assert (chosen.weights[absent] == 0).all()
        assert (chosen.scores[absent] == -torch.inf).all()


# --- training ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        *models(drt, DRTS + FITTED),
        *ablations(),
        *models(window_model, [{}, PRETRAINED | {"qk_norm": "all"}]),
        *models(hils, [{}, PRETRAINED]),
        *models(hsa, HSAS),
        *models(block_recurrent, GATES),
    ],
    ids=name_of,
)
def test_every_parameter_learns(model: Model) -> None:
    made, ids = build(model).train(), tokens(40 * S, batch=2)
    made(ids, labels=ids, noise_seed=torch.tensor([11, 12])).loss.backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize(
    "model", [*models(drt, GROUPS[1:2]), *ablations(), *models(hsa, HSAS[:3])], ids=name_of
)
@pytest.mark.parametrize("length", [1, S, 2 * S])
def test_what_nothing_was_read_through_gets_zeros_as_gradient(model: Model, length: int) -> None:
    made, ids = build(model).train(), tokens(length, batch=2)
    out = made(ids, labels=ids, noise_seed=torch.tensor([11, 12]))
    (out.loss if length > 1 else out.logits.square().mean()).backward()
    nothing = length - 1 <= made.before_reading().tokens  # the last token bears no loss
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        if nothing and (name.startswith(("encoder", "retrievers")) or ".gca_" in name):
            assert parameter.grad.abs().max() == 0, name
    assert made.embed_tokens.weight.grad.abs().max() > 0


@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize("window", [2, 3, 6, 7, 8, 15])
@pytest.mark.parametrize("size", [2, 4])
def test_before_reading_is_where_the_first_token_reads(size: int, window: int, hidden: bool) -> None:
    fields: dict[str, Any] = {"chunk_size": size, "sliding_window": window, "landmarks_as_keys": not hidden}
    model = drt(1, exclude_visible_chunks=True, **fields)
    nothing = drt(1, num_retrieved_chunks=0, exclude_visible_chunks=True, **fields)
    nothing.load_state_dict(model.state_dict(), strict=False)
    ids = tokens(60)
    differ = (logits_of(model, ids) - logits_of(nothing, ids)).abs().amax(-1)[0] > 1e-9
    assert int(differ.nonzero()[0]) == model.before_reading().tokens


@pytest.mark.parametrize("make", [drt, window_model, landmark, hsa])
def test_a_cache_is_refused_in_training(make: Callable[..., TrailmarkForCausalLM]) -> None:
    model = make().train()
    for call in (model.read, lambda ids, cache: model(ids, past_key_values=cache)):
        with pytest.raises(ValueError, match="past_key_values: expected None in training"):
            call(tokens(30), model.new_cache())


def rows() -> dict[str, Tensor]:
    ids = tokens(103, batch=2)
    return {"input_ids": ids, "labels": ids}


def ranked_rows() -> dict[str, Tensor]:
    """With candidates that a retriever learns to rank."""
    ids = tokens(40, batch=2)
    table, scores = candidates(ids)
    return {"input_ids": ids, "labels": ids, "neighbours": table, "neighbour_scores": scores}


def ragged_rows() -> dict[str, Tensor]:
    return Batch((60, 13, 41)).arguments()


def rows_of_documents() -> dict[str, Tensor]:
    packed = documents.packed(documents.LENGTHS)
    return packed | {"labels": packed["input_ids"]}


WIDE = {"groups": 2, "residual_gca": True, "window_position": "rope"}
DRAWN = {"gate_probability": 0.5, "position_jump": 9, "landmark_loss": "text"}
CHECKPOINTED: list[tuple[list[Model], torch.dtype, Callable[[], dict[str, Tensor]], list[bool]]] = [
    (models(drt, [GROUPS[0], WIDE]), torch.float32, rows, [False, True]),
    (models(drt, [HIDDEN, WIDE, GROUPS[0]]), torch.float64, rows, [False, True]),
    (models(drt, GROUPS[1:2]), torch.float64, ragged_rows, [False, True]),
    (models(window_model, [{}, ROPE]), torch.float32, rows, [False, True]),
    (models(block_recurrent, GATES), torch.float32, rows, [False, True]),
    (models(landmark, [{}, DRAWN, PRETRAINED]), torch.float64, rows, [False, True]),
    (models(drt, FITTED), torch.float32, rows, [False, True]),
    (models(hils, HILS[:2]), torch.float64, rows, [False, True]),
    (models(hsa, HSAS[:3]), torch.float64, rows, [False, True]),
    (models(rpt, [{}, WHOLE]), torch.float64, ranked_rows, [False]),
    (models(rpt, [{"retriever": "encoder"}]), torch.float64, rows, [False]),
    (list(documents.MODELS.values()), torch.float64, rows_of_documents, [False]),
    (
        [documents.MODELS[name] for name in ("drt-2-rope", "landmark-gate-jump")],
        torch.float64,
        rows_of_documents,
        [True],
    ),
]


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("model", "dtype", "batch", "use_reentrant"),
    [
        (model, dtype, batch, reentrant)
        for some, dtype, batch, each in CHECKPOINTED
        for model in some
        for reentrant in each
    ],
    ids=name_of,
)
@pytest.mark.sampled(5)  # both ways to checkpoint
def test_activation_checkpointing_changes_no_bit(
    model: Model, dtype: torch.dtype, batch: Callable[[], dict[str, Tensor]], use_reentrant: bool
) -> None:
    found = []
    for checkpointed in (False, True):
        made, arguments = build(model).to(dtype).train(), batch()
        if checkpointed:
            made.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        loss = made(**arguments, noise_seed=torch.arange(len(arguments["input_ids"]))).loss
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in made.parameters())])
    assert all(map(torch.equal, *found))
