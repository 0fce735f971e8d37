"""Learning from a teacher: its divergences against oracles, what they weigh, and a loss on a sample of positions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.tiny import EXACT
from tests.training import killed
from tests.training.killed import begin, watched
from tests.training.tiny import CHUNK_SIZE, SHARED, TEXT, run_config, without_seconds
from trailmark.data.corpus import load_tokenizer, tokenizer_fingerprint
from trailmark.models import SlidingWindowConfig, SlidingWindowForCausalLM
from trailmark.training.config import RunConfig
from trailmark.training.distil import chunk_targets
from trailmark.training.forecast import estimate_of, seconds_per_step
from trailmark.training.loss import Meter, drawn_positions, weighted_loss
from trailmark.training.run import Run

SIZES: dict[str, Any] = {key: value for key, value in SHARED.items() if key != "sliding_window"}


def save_teacher(folder: Path, **fields: Any) -> str:
    """A Llama-like model with full attention, whose weights were drawn."""
    torch.manual_seed(3)
    config = SlidingWindowConfig(
        **(SIZES | {"sliding_window": None, "window_position": "rope", "num_hidden_layers": 3, **fields}),
        tokenizer_fingerprint=tokenizer_fingerprint(load_tokenizer()),
    )
    SlidingWindowForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_teacher(tmp_path_factory.mktemp("teacher"))


def taught(folder: Path, teacher: str | None, **training: Any) -> RunConfig:
    settings: dict[str, Any] = {"steps": 4, "logging_steps": 1, "precision": "float64", "optimizer": "adamw"}
    config = run_config(folder, **(settings | training))
    config.distil.model = teacher
    config.distil.weight = 0.7
    config.distil.retrieval_weight = 0.0 if teacher is None else 0.5
    return config


def model_on(run: Run) -> Any:
    return run.model.train()


# --- the divergences ---------------------------------------------------------------------------------------------


def attention_of(model: Any, ids: Tensor, documents: Tensor | None) -> list[Tensor]:
    """Of each layer [H, T, T], of one text, by transformers' way: all at once, float64."""
    from trailmark.models.layers import rotary_table, rotate

    T = ids.shape[0]
    found: list[Tensor] = []

    def look(module: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        q, k, _ = module.heads(inputs[0])
        table = rotary_table(T, module.head_dim, 10000.0, inputs[0])
        q, k = rotate(q, table)[0], rotate(k, table)[0]  # [T, H, D]
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = torch.einsum("ihd,jhd->hij", q, k) * module.head_dim**-0.5
        hidden = torch.ones(T, T).triu(1).bool()
        if documents is not None:
            hidden = hidden | (documents[:, None] != documents)
        found.append(scores.masked_fill(hidden, -torch.inf).softmax(-1))

    hooks = [layer.attention.register_forward_hook(look) for layer in model.layers]
    model(ids[None], document_ids=None if documents is None else documents[None])
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("source", ["reading", "asking"])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("excluded", "sinks"), [(False, 0), (True, 3)])
@pytest.mark.sampled(4)
def test_the_loss_is_its_definition(
    source: Any, apart: bool, excluded: bool, sinks: int, teacher: str, tmp_path: Path
) -> None:
    """By plain loops over the tokens and chunks of each text: layouts with early landmarks, and with documents."""
    (tmp_path / "texts").mkdir()
    for number in range(12):
        (tmp_path / "texts" / f"{number}.txt").write_text(
            "some words of a text " * (2 + number % 3) + str(number)
        )
    config = taught(tmp_path / "run", teacher, tokens_per_step=480, context_length=240)
    config.data.early_landmarks, config.data.paths = 0.3, [str(tmp_path / "texts")]
    config.data.separate_documents = apart
    config.model |= {"exclude_visible_chunks": excluded, "sliding_window": 30, "num_sinks": sinks}
    config.distil.retrieval_from = source
    run = Run(config)
    run.model.eval()  # no noise, which changes what is read
    inputs, lesson = run.batch(0), run.lesson(1)
    assert ("document_ids" in inputs) == apart
    assert lesson is not None
    assert lesson.retrieval_weight == 0.5 * 3 / 4
    called = weighted_loss(run.model, inputs, lesson=lesson)
    plain = weighted_loss(run.model, inputs)
    assert run.teacher is not None
    master = run.teacher.model
    ids, documents = inputs["input_ids"], inputs.get("document_ids")
    scored = run.model(
        **{key: inputs[key] for key in ("input_ids", "close_chunk", "document_ids") if key in inputs},
        output_retrieval_scores=True,
    ).retrieval_scores
    tokens, count, chunks = 0.0, 0, 0.0
    for b in range(len(ids)):
        own = None if documents is None else documents[b]
        theirs = master(ids[b][None], document_ids=None if own is None else own[None]).logits[0]
        for t in range(ids.shape[1] - 1):
            if own is not None and own[t] != own[t + 1]:
                continue
            p, q = theirs[t].log_softmax(0), called.out.logits[b, t].log_softmax(0)
            tokens, count = tokens + float((p.exp() * (p - q)).sum()), count + 1
        looks = sum(
            layer.sum(0) for layer in attention_of(master, ids[b], own)[1:]
        )  # upper: 1 of 2, so 1 of 3
        of, scores = scored.chunks[b].clone(), scored.scores[0][b]
        for t in range(len(of)):  # sinks count for no chunk
            begin = max(s for s in range(t + 1) if s == 0 or (own is not None and own[s] != own[s - 1]))
            if t - begin < sinks:
                of[t] = -1
        terms = []
        for n in range(scores.shape[0]):
            asking = n + 1 if source == "reading" else n
            candidates = [m for m in range(scores.shape[1]) if scores[n, m] > -torch.inf]
            y = [float(looks[of == asking][:, of == m].sum()) for m in candidates]
            if sum(y) > 0:
                p = torch.tensor(y, dtype=torch.float64) / sum(y)
                q = scores[n, candidates].softmax(0)
                terms.append(
                    sum(float(a) * math.log(float(a) / float(c)) for a, c in zip(p, q, strict=True) if a > 0)
                )
        assert len(terms) > 2
        chunks += sum(terms) / len(terms) / len(ids)
    assert called.told is not None
    assert called.told.chunks is not None
    assert float(called.told.tokens) == pytest.approx(tokens / count, rel=EXACT)
    assert float(called.told.chunks) == pytest.approx(chunks, rel=EXACT)
    whole = float(plain.loss) + 0.7 * tokens / count + 0.5 * 0.75 * chunks
    assert float(called.loss) == pytest.approx(whole, rel=EXACT)
    meter = Meter()
    meter.add(called, inputs)
    measured = Meter.read(meter.vector().tolist())
    assert measured.loss == pytest.approx(float(plain.loss), rel=EXACT)
    assert measured.distil == pytest.approx(tokens / count, rel=EXACT)
    assert measured.distil_retrieval == pytest.approx(chunks, rel=EXACT)


def test_the_gradient_is_that_of_the_loss(teacher: str, tmp_path: Path) -> None:
    """Against differences, along a direction in which all weights change; what is read stays the same."""
    run = Run(taught(tmp_path, teacher, tokens_per_step=160), text=TEXT)
    model, inputs, lesson = run.model.eval(), run.batch(0), run.lesson(0)

    def loss() -> Tensor:
        return weighted_loss(model, inputs, lesson=lesson).loss

    loss().backward()
    generator = torch.Generator().manual_seed(0)
    ways = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in model.parameters()]
    slope = sum(float((p.grad * way).sum()) for p, way in zip(model.parameters(), ways, strict=True))
    size, values = 1e-5, []
    with torch.no_grad():
        for step in (size, -2 * size):
            for p, way in zip(model.parameters(), ways, strict=True):
                p.add_(way, alpha=step)
            values.append(float(loss()))
    assert (values[0] - values[1]) / (2 * size) == pytest.approx(slope, rel=1e-5)


def test_chunks_that_nothing_follows_are_not_taught_by_a_reading() -> None:
    mass = torch.arange(9.0).view(1, 3, 3)
    assert chunk_targets(mass, 3, reading=True).tolist() == [[[3, 4, 5], [6, 7, 8], [0, 0, 0]]]
    assert chunk_targets(mass, 2, reading=True).tolist() == [[[3, 4], [6, 7]]]
    assert chunk_targets(mass, 3, reading=False).tolist() == mass.tolist()


# --- a run -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_scores_come_to_where_the_teacher_looks(teacher: str, tmp_path: Path) -> None:
    config = taught(tmp_path, teacher, steps=30, precision="float32", optimizer="muon", warmup_steps=1)
    config.distil.retrieval_weight, config.distil.weight = 20.0, 0.1
    config.data.early_landmarks = 0.0
    run = Run(config, text=TEXT)
    run.train()
    told = [line["distil_retrieval"] for line in run.history]
    assert told[-1] < 0.7 * told[0]
    assert all(line["distil"] > 0 for line in run.history)


@pytest.mark.slow
def test_processes_and_micro_batches_learn_the_same(teacher: str, tmp_path: Path) -> None:
    def of(name: str, **settings: Any) -> RunConfig:
        return taught(tmp_path / name, teacher, tokens_per_step=320, loss_positions=0.5, **settings)

    (one,) = begin(watched, of("one")).results()
    assert [set(line) & {"distil", "distil_retrieval"} for line in one.history] == [
        {"distil", "distil_retrieval"}
    ] * 4
    for name, processes, settings in (
        ("micro", 1, {"micro_batch_size": 1}),
        ("ddp", 2, {}),
        ("fsdp", 2, {"parallel": "fsdp", "micro_batch_size": 1}),
    ):
        for each in begin(watched, of(name, **settings), processes=processes).results():
            for mine, theirs in zip(each.history, one.history, strict=True):
                for number in ("step_loss", "grad_norm", "distil", "distil_retrieval"):
                    assert mine[number] == pytest.approx(theirs[number], rel=1e-11, abs=0), (name, number)


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_its_teacher(teacher: str, tmp_path: Path) -> None:
    (whole,) = begin(watched, taught(tmp_path / "whole", teacher)).results()
    begin(watched, taught(tmp_path / "run", teacher), {2: killed.ask_to_stop}).results()
    (rest,) = begin(watched, taught(tmp_path / "run", teacher)).results()

    assert without_seconds(rest.history) == without_seconds(whole.history)


def test_a_run_without_a_teacher_logs_what_it_did(tmp_path: Path) -> None:
    run = Run(taught(tmp_path, None, steps=1), text=TEXT)
    run.train()
    assert run.teacher is None
    assert not any("distil" in name for name in run.history[-1])


def test_a_model_of_transformers_teaches(tmp_path: Path) -> None:
    """Its tokenizer lies beside it; of its attention nothing is asked."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path / "llama"
    sizes = {
        key: SHARED[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    }
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=80)).save_pretrained(
        folder
    )
    load_tokenizer().save_pretrained(folder)
    config = taught(tmp_path / "run", str(folder), loss_positions=0.25)
    config.distil.retrieval_weight = 0.0
    run = Run(config, text=TEXT)
    inputs = run.batch(0)
    assert run.teacher is not None
    at = drawn_positions(inputs["noise_seed"], 80, 0.25)
    logits, mass = run.teacher.read(inputs, at, None)
    whole, _ = run.teacher.read(inputs, None, None)
    assert mass is None
    assert all(torch.equal(logits[b], whole[b, at[b]]) for b in range(len(at)))
    run.train()
    assert run.history[-1]["distil"] > 0
    config = taught(tmp_path / "longer", str(folder), context_length=160)
    config.distil.retrieval_weight = 0.0
    with pytest.raises(ValueError, match=r"^training.context_length: expected at most the 80 tokens"):
        Run(config, text=TEXT)


def test_what_does_not_fit_is_refused_before_the_model_is_made(teacher: str, tmp_path: Path) -> None:
    windowed = save_teacher(tmp_path / "windowed", sliding_window=9)
    other = save_teacher(tmp_path / "other", vocab_size=300)
    folder = tmp_path / "tokens"
    SlidingWindowForCausalLM(
        SlidingWindowConfig(**SIZES, sliding_window=None, tokenizer_fingerprint="0" * 64)
    ).save_pretrained(folder)
    for name, message in (
        (windowed, r"^distil.model: expected a model of trailmark's with full attention"),
        (other, r"^distil.model: expected a teacher with the model's vocabulary of 259 tokens, .* has 300"),
        (str(folder), r"^distil.model: expected a teacher with the run's tokenizer"),
        (str(tmp_path / "absent"), r"^distil.model: cannot read"),
    ):
        with pytest.raises(ValueError, match=message):
            Run(taught(tmp_path / "run", name), text=TEXT)


@pytest.mark.parametrize("left", ["conversion", "training"])
def test_no_text_is_longer_than_the_teacher_was_trained_for(left: str, tmp_path: Path) -> None:
    folder = save_teacher(tmp_path / "teacher")
    if left == "conversion":
        (tmp_path / "teacher" / "conversion.json").write_text('{"base": {"trained_length": 159}}')
    else:
        (tmp_path / "teacher" / "run.yaml").write_text("training: {context_length: 159}")
    Run(taught(tmp_path / "run", folder), text=TEXT)
    with pytest.raises(
        ValueError, match=r"^training.context_length: expected at most the 159 tokens that the teacher"
    ):
        Run(taught(tmp_path / "run", folder, context_length=160), text=TEXT)


@pytest.mark.slow
def test_what_a_teacher_costs_is_counted(teacher: str, tmp_path: Path) -> None:
    run, alone = Run(taught(tmp_path, teacher), text=TEXT), Run(taught(tmp_path, None), text=TEXT)
    with_one, without = estimate_of(run), estimate_of(alone)
    assert run.teacher is not None
    count = sum(p.numel() for p in run.teacher.model.parameters())
    assert with_one.teacher == 8 * count
    assert with_one.executed_flops - without.executed_flops == 2 * count
    assert with_one.peak - without.peak >= 8 * count
    assert len(seconds_per_step(run)) == 1


# --- a sample of positions ---------------------------------------------------------------------------------------


def test_every_position_is_drawn_as_often_as_any_other() -> None:
    seeds, length = torch.arange(4000), 10
    drawn = drawn_positions(seeds, length, 0.3)
    assert drawn.shape == (4000, 3)
    assert bool((drawn.diff(dim=1) > 0).all())
    counts = torch.bincount(drawn.flatten(), minlength=length)
    expected, spread = 1200, math.sqrt(4000 * 0.3 * 0.7)
    assert float((counts - expected).abs().max()) < 5 * spread
    assert torch.equal(drawn_positions(seeds[7:9], length, 0.3), drawn[7:9])
    assert drawn_positions(seeds[:2], length, 0.0).shape == (2, 1)
    assert torch.equal(drawn_positions(seeds[:1], length, 1.0), torch.arange(length)[None])


@pytest.mark.parametrize("model", ["drt", "window", "landmark", "landmark, drawing"])
def test_a_loss_on_a_sample_is_that_of_its_positions(model: str, tmp_path: Path) -> None:
    config = run_config(tmp_path, model=model, precision="float64")
    run = Run(config, text=TEXT)
    inputs = run.batch(0)
    run.model.train()
    whole = run.model(
        input_ids=inputs["input_ids"],
        noise_seed=inputs["noise_seed"],
        close_chunk=inputs.get("close_chunk", False),
    )
    called = weighted_loss(run.model, inputs, positions=0.4)
    at = drawn_positions(inputs["noise_seed"], 80, 0.4)
    total, T = 0.0, inputs["input_ids"].shape[1]
    for b, columns in enumerate(at.tolist()):
        for t in columns:
            if t + 1 < T:
                total -= float(whole.logits[b, t].log_softmax(0)[inputs["input_ids"][b, t + 1]])
                total += 0 if whole.landmark_loss is None else float(whole.landmark_loss[b, t])
    expected = total * T / at.shape[1] / (len(at) * (T - 1))
    assert called.out.logits is not None
    assert called.out.logits.shape[1] == at.shape[1] == 32
    assert float(called.loss) == pytest.approx(expected, rel=EXACT)


@pytest.mark.slow
def test_the_sampled_loss_is_unbiased(tmp_path: Path) -> None:
    """Its mean over many draws is the whole loss, within what means of so many draws vary."""
    run = Run(run_config(tmp_path, model="window", precision="float64", tokens_per_step=80), text=TEXT)
    inputs = run.batch(0)
    whole = float(weighted_loss(run.model, inputs).loss)
    losses = []
    with torch.no_grad():
        for seed in range(300):
            losses.append(
                float(
                    weighted_loss(
                        run.model, inputs | {"noise_seed": torch.tensor([seed])}, positions=0.2
                    ).loss
                )
            )
    drawn = torch.tensor(losses, dtype=torch.float64)
    assert float(drawn.std()) > 0
    assert abs(float(drawn.mean()) - whole) < 4 * float(drawn.std()) / math.sqrt(len(losses))


@pytest.mark.slow
def test_fewer_logits_take_less_memory(tmp_path: Path) -> None:
    whole, part = (
        estimate_of(Run(run_config(tmp_path, loss_positions=share), text=TEXT)) for share in (1.0, 0.25)
    )
    assert part.logits == whole.logits / 4
    assert part.peak < whole.peak
    assert part.forward_flops < whole.forward_flops
    slabs = estimate_of(Run(run_config(tmp_path, loss_slab=20), text=TEXT))
    assert slabs.logits == whole.logits / 8
    assert slabs.peak < whole.peak
    assert slabs.forward_flops == whole.forward_flops  # computed again in the backward
    assert slabs.executed_flops > whole.executed_flops


# --- what a model returns ----------------------------------------------------------------------------------------


def test_scores_agree_with_what_is_selected(tmp_path: Path) -> None:
    """In a padded batch with early landmarks and two groups."""
    config = run_config(tmp_path, precision="float64")
    config.model |= {"num_hidden_layers": 3, "num_retrieval_groups": 2, "num_lower_layers": 1}
    model = Run(config, text=TEXT).model.eval()
    ids = torch.from_numpy(TEXT[:180].reshape(2, 90).astype("int64"))
    mask = torch.ones(2, 90, dtype=torch.int64)
    mask[1, :17] = 0  # on the left
    close = torch.zeros(2, 90, dtype=torch.bool)
    close[:, 47] = True
    out = model(
        ids, attention_mask=mask, close_chunk=close, output_retrieval=True, output_retrieval_scores=True
    )
    assert out.retrieval is not None
    assert out.retrieval_scores is not None
    scores, chunks = out.retrieval_scores
    assert len(scores) == 2
    for found, chosen in zip(scores, out.retrieval, strict=True):
        for b in range(2):
            for n in range(found.shape[1]):
                for m, score in zip(chosen.indices[b, n].tolist(), chosen.scores[b, n].tolist(), strict=True):
                    assert m < 0 or abs(float(found[b, n, m]) - score) < EXACT
                best = (
                    found[b, n]
                    .topk(min(2, int((found[b, n] > -torch.inf).sum())))
                    .indices.sort()
                    .values.tolist()
                )
                assert best == [m for m in chosen.indices[b, n].tolist() if m >= 0]
    # 20 tokens a chunk, from each row's first token on; the early end at 47
    assert chunks[0].tolist() == [*[0] * 20, *[1] * 20, *[2] * 8, *[3] * 20, *[4] * 20, *[5] * 2]
    assert chunks[1].tolist() == [*[-1] * 17, *[0] * 20, *[1] * 11, *[2] * 20, *[3] * 20, *[4] * 2]
    assert CHUNK_SIZE == 20


def test_what_cannot_be_returned_is_refused(tmp_path: Path) -> None:
    model = Run(run_config(tmp_path), text=TEXT).model.eval()
    window = Run(run_config(tmp_path, model="window"), text=TEXT).model.eval()
    ids = torch.arange(30)[None]
    with pytest.raises(
        ValueError, match=r"^output_retrieval_scores: expected False for a model that does not score"
    ):
        window(ids, output_retrieval_scores=True)
    with pytest.raises(ValueError, match=r"^output_retrieval_scores: expected False with a cache"):
        model(ids, output_retrieval_scores=True, use_cache=True)
    for wrong, message in (
        (
            torch.zeros(2, 3, dtype=torch.int64),
            r"expected int64 of shape \[1, n\], got torch.int64 of \(2, 3\)",
        ),
        (torch.tensor([[30]]), "expected columns 0 to 29"),
        (torch.tensor([[0.5]]), r"expected int64 of shape \[1, n\], got torch.float32"),
    ):
        with pytest.raises(ValueError, match=f"^logits_at: {message}"):
            model(ids, logits_at=wrong)
    with pytest.raises(ValueError, match=r"^logits_at: expected none together with labels"):
        model(ids, logits_at=torch.tensor([[3]]), labels=ids)
