"""RPT: its equations, RETRO's shift, any split into calls, learning to rank, what it refuses."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.budgets import assert_within_budget
from tests.models.rpt.naive import NaiveRPT
from tests.models.test_exactness import BEHIND, Step, Story, Told, stories
from tests.models.tiny import (
    TokenCounter,
    assert_same,
    chunk_lengths,
    logits_of,
    padded,
    place,
    rpt,
    rpt_config,
    split,
    tokens,
)
from trailmark.models import RPTForCausalLM
from trailmark.models.grid import lay_out
from trailmark.models.rpt.neighbours import Readers
from trailmark.ops import ranking_loss
from trailmark.training.optimizer import MuonAdamW

S, K = 4, 2
WHOLE: dict[str, Any] = {"continuation": True, "neighbour_augmentation": True, "neighbour_gate": True}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"retriever": "encoder", "num_key_value_heads": None},
    {"retriever": "encoder", "continuation": True, "window_position": "rope"},
    {**WHOLE, "cross_attention_every": 2},
    {"neighbour_augmentation": True, "sliding_window": 15, "implementation": "reference"},
    {
        "neighbour_gate": True,
        "sliding_window": 15,
        "exclude_visible_chunks": False,
        "num_retrieved_chunks": 3,
    },
    {"num_sinks": 3, "max_sink_distance": 12, "window_position": "rope"},
    {"num_lower_layers": 0, "num_encoder_layers": 0, "sliding_window": 1, "chunk_size": 2},
    {
        "logit_scale": 0.25,
        "tie_word_embeddings": False,
        "cross_attention_every": 3,
        "num_retrieved_chunks": 1,
    },
]
OPTIONS = pytest.mark.parametrize("options", VARIANTS, ids=str)
MODES = pytest.mark.parametrize("mode", [{}, {"retriever": "encoder"}, WHOLE], ids=str)
pytestmark = pytest.mark.usefixtures("one_thread")


def naive(model: RPTForCausalLM, ids: Tensor, *arguments: Any, **more: Any) -> NaiveRPT:
    """One text [T] through the equations."""
    if model.config.retriever == "encoder" and "neighbours" not in more:
        assert isinstance(model.embedder, TokenCounter)
        more["vector"] = model.embedder.vectors
    return NaiveRPT(model, ids, *arguments, **more)


def found(indices: Tensor) -> list[list[int]]:
    """[C, K] without the missing ones."""
    return [[m for m in chunk if m >= 0] for chunk in indices.tolist()]


# --- the equations -----------------------------------------------------------------------------------------


@OPTIONS
@pytest.mark.sampled(3)
def test_one_forward_is_the_equations(options: dict[str, Any]) -> None:
    model, ids = rpt(**options), tokens(30)
    out, exact = model(ids, output_retrieval=True), naive(model, ids[0])
    assert_same(out.logits[0], exact.logits)
    assert found(out.retrieval[0].indices[0]) == exact.retrieval
    assert any(exact.retrieval)
    for row, chunks, scores in zip(out.retrieval[0].scores[0], exact.retrieval, exact.scores, strict=True):
        ours = row[: len(chunks)].tolist()
        assert ours == pytest.approx([scores[m] for m in chunks], rel=0, abs=1e-10)


@MODES
@pytest.mark.parametrize("length", [1, S - 1, S, S + 1, 3 * S])
def test_any_length(mode: dict[str, Any], length: int) -> None:
    model, ids = rpt(**mode), tokens(length)
    assert_same(logits_of(model, ids)[0], naive(model, ids[0]).logits)


@MODES
def test_ragged_rows_with_early_ends_are_the_equations(mode: dict[str, Any]) -> None:
    model, lengths = rpt(**mode), [17, 1, 25, 9]
    ids, mask = padded(lengths, "left", extra=1)
    marks = torch.rand(ids.shape, generator=torch.Generator().manual_seed(3)) < 0.2
    logits = logits_of(model, ids, attention_mask=mask, close_chunk=marks)
    for b, length in enumerate(lengths):
        own = place(length, ids.shape[1], "left")
        chunks, closed = chunk_lengths(marks[b, own].tolist(), S)
        assert_same(logits[b, own], naive(model, tokens(length, seed=b)[0], chunks, closed).logits)


@MODES
def test_documents_of_a_row_are_the_equations(mode: dict[str, Any]) -> None:
    """Of one token, of whole chunks, shorter and longer than a chunk; a new one reads nothing of the last."""
    model, lengths = rpt(**mode), [17, 4, 1, 3, 12, 9]
    texts = [tokens(n, seed=i)[0] for i, n in enumerate(lengths)]
    ids = torch.cat([torch.full((n,), 7 * i) for i, n in enumerate(lengths)])
    logits = logits_of(model, torch.cat(texts)[None], document_ids=ids[None])[0]
    for i, (part, text) in enumerate(zip(logits.split(lengths), texts, strict=True)):
        assert_same(part, naive(model, text, close=i + 1 < len(texts)).logits)


# --- RETRO's shift -----------------------------------------------------------------------------------------


def test_the_last_token_of_a_chunk_reads_with_all_but_the_last_of_the_next() -> None:
    grid = lay_out(3 * S + 2, S, landmarks=False)
    readers = Readers.of(grid)
    assert readers.source.array.tolist() == [[-1, 0, 1, 2]]
    groups = [[t for t in range(3 * S + 2) if readers.grid.chunk[0, t] == g] for g in range(4)]
    assert groups == [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10], [11, 12, 13]]
    assert readers.places.array.tolist() == [
        [S, S + 1, S + 2] + [S - 1, S, S + 1, S + 2] * 2 + [S - 1, S, S + 1]
    ]


@pytest.mark.parametrize("mode", [{}, WHOLE], ids=str)
@pytest.mark.parametrize("asking", [3, 5])
def test_what_a_chunk_selected_changes_just_its_readers(mode: dict[str, Any], asking: int) -> None:
    """One upper layer and a window of one token: nothing else carries what was read on."""
    sizes = {"num_hidden_layers": 2, "num_lower_layers": 1, "sliding_window": 1}
    mode = mode | sizes | {"retriever": "encoder"}
    model, ids = rpt(**mode), tokens(7 * S + 2)
    table = torch.tensor([[[max(0, c - 2), c - 1] if c > 1 else [-1, -1] for c in range(7)]])
    before = logits_of(model, ids, neighbours=table)
    assert_same(before[0], naive(model, ids[0], neighbours=table[0].tolist()).logits)
    table[0, asking] = torch.tensor([0, asking - 1])
    changed = (logits_of(model, ids, neighbours=table) != before).any(-1)[0].nonzero()[:, 0].tolist()
    last = asking * S + S - 1
    assert changed == list(range(last, last + S))


def test_what_selected_nothing_reads_the_null_value() -> None:
    model, ids = rpt(), tokens(2 * S)
    layer = model.upper_layers[0].cca
    with torch.no_grad():
        x = torch.randn(1, 2 * S, 16, dtype=torch.float64)
        readers = Readers.of(lay_out(2 * S, S, landmarks=False))
        nothing = torch.full((1, 3, K), -1), torch.randn(1, 2, S, 16).double()
        out = layer(x, *readers.reading(model.config, x, *nothing))
        value = layer.null_v.view(2, 4).repeat_interleave(2, 0).flatten()
        assert_same(out, layer.o_proj(value).expand(1, 2 * S, 16))
    assert logits_of(model, ids).isfinite().all()


@pytest.mark.parametrize(
    ("mode", "window"),
    [*(({}, window) for window in (1, 4, 5, 9, 14, 30)), ({"retriever": "encoder"}, 9)],
    ids=str,
)
def test_chunks_wholly_visible_to_the_last_reader_are_excluded(mode: dict[str, Any], window: int) -> None:
    """With room for all, just the allowed ones are selected, split or not. (RPT: only from earlier windows.)"""
    N = 8
    model = rpt(sliding_window=window, num_retrieved_chunks=N, **mode)
    ids = tokens(N * S)
    for pieces in ([N * S], [S], [7]):
        cache = model.new_cache()
        with torch.no_grad():
            outs = [model(x, past_key_values=cache, output_retrieval=True) for x in split(ids, pieces)]
        ours = [chunk for out in outs for chunk in found(out.retrieval[0].indices[0])]
        for asking in range(N):
            last_reader = asking * S + S - 1 + S - 1
            first = last_reader - window + 1
            assert ours[asking] == [m for m in range(asking) if m * S < first]


# --- causality, and the defects of the published code --------------------------------------------------------


@pytest.mark.parametrize("position", ["alibi", "rope"])
def test_the_window_slides(position: str) -> None:
    """The published code cuts windows, and shows a token the far part of the window before its own, not the near."""
    W, ids = 6, tokens(40)
    model = rpt(
        sliding_window=W, num_hidden_layers=2, num_lower_layers=1, window_position=position, chunk_size=40
    )
    for t in range(2 * W, 3 * W):
        changed = ids.clone()
        changed[0, t] = (ids[0, t] + 1) % 50
        moved = (logits_of(model, ids) != logits_of(model, changed)).any(-1)[0].nonzero()[:, 0].tolist()
        assert moved == list(range(t, t + 2 * (W - 1) + 1))  # two layers


@MODES
def test_a_far_token_changes_later_logits_through_what_is_read_alone(mode: dict[str, Any]) -> None:
    model, ids = rpt(sliding_window=2, **mode), tokens(60)
    changed = ids.clone()
    changed[0, 5] = (ids[0, 5] + 1) % 50
    last = 5 + 2 * model.config.num_hidden_layers
    assert (logits_of(model, ids) - logits_of(model, changed)).abs().amax(-1)[0, last:].max() > 1e-6
    with torch.no_grad():
        for layer in model.upper_layers:
            layer.cca.o_proj.weight.zero_()
    assert torch.equal(logits_of(model, ids)[:, last:], logits_of(model, changed)[:, last:])


# --- any split into calls ------------------------------------------------------------------------------------


RPTS = st.fixed_dictionaries(
    {
        "retriever": st.sampled_from(["learned", "encoder"]),
        "chunk_size": st.sampled_from([1, 2, 4, 5]),
        "sliding_window": st.sampled_from([1, 2, 7, 12]),
        "window_position": st.sampled_from(["alibi", "rope"]),
        "exclude_visible_chunks": st.booleans(),
        "num_retrieved_chunks": st.sampled_from([1, 2, 50]),
        "continuation": st.booleans(),
        "neighbour_augmentation": st.booleans(),
        "neighbour_gate": st.booleans(),
        "cross_attention_every": st.sampled_from([1, 2]),
    }
)


# a row closes a chunk while the other goes on with what its last one found; then calls that close none
TURNS = (Step("forward", (10, 9)), Step("forward", (2, 2)), Step("token by token", (2, 1)))


@settings(max_examples=25)
@given(stories(RPTS, longest=45))
@example(Story((), (20, 16), 0.0, TURNS))
@example(Story(tuple(WHOLE.items()), (20, 16), 0.0, TURNS))
@example(Story((("retriever", "encoder"),), (60, 31), 0.3, BEHIND, read_tokens=4))
def test_any_calls_of_any_batch_are_one_forward_of_each_text(story: Story) -> None:
    """Read, forward, for the last tokens, token by token; ragged rows, early ends."""
    if story.memory_dtype is not None:
        return  # rounds what is kept: another model than without a cache
    model = rpt(**dict(story.options))
    texts = zip(story.texts(), story.marks(), strict=True)
    exact = [
        SimpleNamespace(logits=logits_of(model, text[None], close_chunk=torch.tensor([marks]))[0])
        for text, marks in texts
    ]
    Told(story, model, exact)


def test_the_upper_layers_run_on_the_last_positions_only() -> None:
    model, seen = rpt(), {}
    for name, layer in model.named_modules():
        if name.endswith("layers.0.attention") and "encoder" not in name:
            layer.register_forward_hook(lambda _, args, out, name=name: seen.update({name: args[0].shape[1]}))
    cache = model.read(tokens(160))
    assert seen == {"lower_layers.0.attention": 160}
    logits_of(model, tokens(2), past_key_values=cache, logits_to_keep=1)
    assert model.reach() < 40
    assert seen == {"lower_layers.0.attention": 2, "upper_layers.0.attention": model.reach() + 1}


@pytest.mark.parametrize(
    ("tier", "mode"), [("device", {}), ("host", {"retriever": "encoder"}), ("disk", WHOLE)], ids=str
)
def test_a_saved_memory_goes_on_bit_for_bit(tier: str, mode: dict[str, Any], tmp_path: Path) -> None:
    model, ids = rpt(**mode), tokens(70)
    cache = model.new_cache(memory_tier=tier)
    model.read(ids[:, :30], cache)
    logits_of(model, ids[:, 30:41], past_key_values=cache)  # so that something is left to be read
    cache.save(tmp_path / "memory")
    loaded = model.load_cache(tmp_path / "memory", memory_tier=tier)
    for pieces in ([1, 1, 1, 1, 1, 24], [29]):
        branches = cache.branch(2), loaded.branch(2)
        for piece in split(ids[:, 41:].expand(2, -1), pieces):
            ours, theirs = (logits_of(model, piece, past_key_values=x) for x in branches)
            assert torch.equal(ours, theirs)
    assert_same(logits_of(model, ids[:, 41:], past_key_values=loaded.branch()), logits_of(model, ids)[:, 41:])


def test_rows_go_on_from_any_row() -> None:
    model, ids = rpt(**WHOLE), tokens(45, batch=3)
    cache = model.new_cache()
    logits_of(model, ids[:, :30], past_key_values=cache)
    rows = torch.tensor([2, 0, 0])
    cache.reorder_cache(rows)
    exact = logits_of(model, torch.cat([ids[rows, :30], ids[:, 30:]], 1))[:, 30:]
    assert_same(logits_of(model, ids[:, 30:], past_key_values=cache), exact)


@MODES
def test_generating_is_asking_for_each_next_token(mode: dict[str, Any]) -> None:
    model, prompt = rpt(**mode), tokens(18)
    made = model.generate(prompt, max_new_tokens=9, do_sample=False)
    ids = prompt
    marks = torch.zeros(1, 27, dtype=torch.bool)
    marks[0, 17] = True  # generate ends the prompt's chunk
    for _ in range(9):
        logits = logits_of(model, ids, close_chunk=marks[:, : ids.shape[1]])
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(made, ids)


def test_the_model_saved_is_the_model(tmp_path: Path) -> None:
    model, ids = rpt(**WHOLE), tokens(30)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert isinstance(loaded, RPTForCausalLM)
    assert loaded.config.to_diff_dict() | {"dtype": None} == model.config.to_diff_dict() | {"dtype": None}
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))


@pytest.mark.parametrize("options", VARIANTS[1:5], ids=str)
def test_implementations_agree(options: dict[str, Any]) -> None:
    ids = tokens(46, batch=2)
    fast, oracle = (rpt(**options | {"implementation": way}) for way in (None, "reference"))
    assert_same(logits_of(fast, ids), logits_of(oracle, ids))


@MODES
def test_precision(mode: dict[str, Any]) -> None:
    """The same chunks read, so that only roundings differ."""
    ids = tokens(46)
    mode = mode | {"num_retrieved_chunks": 12}
    exact, wide = rpt(**mode), rpt(**mode).float()
    oracle = rpt(**mode, implementation="reference").float()
    assert_within_budget(logits_of(wide, ids), logits_of(oracle, ids), logits_of(exact.float().double(), ids))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = wide(ids, output_retrieval=True).retrieval[0].scores
    assert scores.dtype == torch.float32


# --- training ------------------------------------------------------------------------------------------------


def candidates(ids: Tensor, count: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Up to ``count`` earlier chunks for each whole chunk, and scores: [B, C, n] each."""
    B, C = ids.shape[0], ids.shape[1] // S
    random = torch.Generator().manual_seed(seed)
    table = torch.full((B, C, count), -1)
    for c in range(1, C):
        n = min(c, count)
        for b in range(B):
            table[b, c, :n] = torch.randperm(c, generator=random)[:n].sort().values
    return table, torch.randn(B, C, count, generator=random, dtype=torch.float64)


@MODES
def test_every_parameter_always_gets_a_gradient(mode: dict[str, Any]) -> None:
    """Zeros where nothing was retrieved or ranked, not None: DDP waits for all."""
    for length, ranked in ((2, False), (S, False), (30, False), (30, True)):
        if ranked and mode.get("retriever") == "encoder":
            continue
        model, ids = rpt(**mode).train(), tokens(length, batch=2)
        given = dict(zip(("neighbours", "neighbour_scores"), candidates(ids), strict=True)) if ranked else {}
        model(ids, labels=ids, **given).loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, (length, name)
            # what is no part of the language model learns from the ranking alone
            learns = length == 30 and (ranked or not name.startswith("retriever."))
            assert bool(parameter.grad.any()) is learns or length < 30, (length, name)
            assert parameter.grad.isfinite().all()


def test_the_ranking_loss_is_that_of_its_candidates() -> None:
    model, ids = rpt(ranking_weight=0.5, ranking_margin=3.0, ranking_threshold=0.1), tokens(30, batch=2)
    table, scores = candidates(ids)
    out = model(ids, labels=ids, neighbours=table, neighbour_scores=scores, output_retrieval=True)
    plain = model(ids, labels=ids)
    assert torch.equal(out.logits, plain.logits)  # read is what the retriever finds
    assert_same(out.loss, plain.loss + out.ranking_loss.mean())
    exact = []
    for b in range(2):
        every = NaiveRPT(rpt(exclude_visible_chunks=False), ids[b]).scores
        mine = torch.tensor(
            [[every[c][m] if m >= 0 else 0.0 for m in row] for c, row in enumerate(table[b].tolist())],
            dtype=torch.float64,
        )
        exact.append(0.5 * ranking_loss(mine[None], scores[b : b + 1], table[b : b + 1] >= 0, 3.0, 0.1))
    assert_same(out.ranking_loss, torch.cat(exact))
    assert plain.ranking_loss is None


def test_what_changes_with_training() -> None:
    model, ids = rpt(ranking_margin=3.0), tokens(30, batch=2)
    table, scores = candidates(ids)

    def ranking(progress: float, margin: float) -> tuple[Tensor, Tensor]:
        model.ranking_progress = progress
        mine = model(ids, neighbours=table, neighbour_scores=scores).ranking_loss
        plain = rpt(ranking_margin=margin)
        return mine, plain(ids, neighbours=table, neighbour_scores=scores).ranking_loss

    for progress, margin in ((1.0, 3.0), (0.5, 2.0), (0.0, 1.0)):
        mine, plain = ranking(progress, margin)
        assert_same(mine, progress * plain)


def test_rows_read_the_best_by_target_score_or_what_the_retriever_finds() -> None:
    ids = tokens(30, batch=1).expand(64, -1)
    table, scores = (x[:1].expand(64, -1, -1) for x in candidates(ids[:1]))
    given = {"neighbours": table, "neighbour_scores": scores, "noise_seed": torch.arange(64)}
    predicted = rpt()(ids, output_retrieval=True).retrieval[0].indices[0]
    order = scores[0].masked_fill(table[0] < 0, -math.inf).argsort(-1, descending=True)[:, :K]
    gold = [sorted(m for m in row if m >= 0) for row in table[0].gather(1, order).tolist()]
    assert gold != found(predicted)

    def shares(progress: float, **options: Any) -> float:
        model = rpt(**options).train()
        model.ranking_progress = progress
        out = model(ids, output_retrieval=True, **given)
        rows = [found(row) for row in out.retrieval[0].indices]
        assert all(row in (gold, found(predicted)) for row in rows)
        assert torch.equal(out.logits, model(ids, output_retrieval=True, **given).logits)
        return sum(row == gold for row in rows) / 64

    assert shares(0.0) == 1
    assert shares(1.0) == 0
    assert 0.3 < shares(0.5) < 0.7
    assert 0.55 < shares(1.0, gold_probability=0.75) < 0.95
    assert shares(0.0, first_gold_probability=0.0) == 0
    # and nothing but the retriever outside training
    out = rpt(gold_probability=1.0)(ids, output_retrieval=True, neighbours=table, neighbour_scores=scores)
    assert torch.equal(out.retrieval[0].indices[0], predicted)


def test_the_retriever_learns_to_rank_relevant_chunks_first() -> None:
    """Chunks of one of 8 topics each, of a topic's own 6 tokens; those of its topic are relevant to a chunk."""
    topics, N = 8, 24
    random = torch.Generator().manual_seed(0)
    candidate = torch.where(torch.arange(N) < torch.arange(N)[:, None] - 2, torch.arange(N), -1)  # [C, n]

    def texts(count: int) -> tuple[Tensor, Tensor]:
        """Tokens [B, T], and which chunks are relevant [B, C, n]."""
        topic = torch.randint(topics, (count, N), generator=random)
        ids = topic[:, :, None] * 6 + torch.randint(6, (count, N, S), generator=random)
        return ids.flatten(1), (topic[:, None] == topic[..., None]) & (candidate >= 0)

    def recall(model: RPTForCausalLM, ids: Tensor, relevant: Tensor) -> float:
        indices = model.eval()(ids, output_retrieval=True).retrieval[0].indices
        hits = relevant.gather(2, indices.clamp(min=0)) & (indices >= 0)
        return float(hits.sum() / relevant.sum(-1).clamp(max=K).sum())

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "sliding_window": 4, "initialization": "fan_in"}
    model, held_out = RPTForCausalLM(rpt_config(**sizes)), texts(16)
    before = recall(model, *held_out)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        ids, relevant = texts(4)
        given = {"neighbours": candidate.expand(4, -1, -1), "neighbour_scores": 2 * relevant.float() - 1}
        model.train()(ids, labels=ids, **given).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert before < 0.35  # by chance: 0.2
    assert recall(model, *held_out) > 0.85


def test_muon_takes_its_matrices() -> None:
    model, ids = rpt(**WHOLE).float().train(), tokens(30)
    optimizer = MuonAdamW(model)
    matrices = {id(p) for p in optimizer.param_groups[-1]["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in matrices}
    assert {"upper_layers.0.cca.kv_proj.weight", "retriever.q_proj.weight", "gate.chunk_proj.weight"} <= names
    assert not any("null" in name or "norm" in name or "embed" in name for name in names)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
