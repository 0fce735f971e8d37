"""A memory that is fitted to a teacher's layers: the least squares, and that the model reads by it."""

from __future__ import annotations

import copy
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.tiny import EXACT
from tests.training.killed import ask_to_stop, begin, watched
from tests.training.tiny import TEXT, save_converted_llama, without_seconds
from trailmark.ops import selection_divergence, token_divergence
from trailmark.training import forecast as module
from trailmark.training.config import RunConfig, load_run_config
from trailmark.training.distil import chunk_targets
from trailmark.training.fit import MemoryFit
from trailmark.training.next_chunk import NextChunk
from trailmark.training.run import Run

S, WINDOW, SINKS = 7, 16, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four layers whose attention is sharp, and what it was converted to."""
    folder = tmp_path_factory.mktemp("bases")
    drt = [f"sliding_window={WINDOW}", f"chunk_size={S}", "num_retrieved_chunks=3", "num_encoder_layers=1"]
    groups = [*drt, "memory_kv=group", "num_retrieval_groups=2"]
    made = {"drt": ("drt", drt), "group": ("drt", groups), "shared": ("drt", [*drt, "memory_kv=shared"])}
    save_converted_llama(folder, made | {"full": ("sliding_window", [])}, initializer_range=0.3)
    return folder


def config_of(folder: Path, output: str, *overrides: str, begin_with: str = "drt") -> RunConfig:
    path = folder / "run.yaml"
    path.write_text("model: {}\n")
    settings = [
        f"init_from={folder / begin_with}", f"distil.model={folder / 'full'}", "distil.fit_steps=3",
        "training.train=additions", "training.steps=4", "training.tokens_per_step=192",
        "training.context_length=96", "training.precision=float64", "training.optimizer=adamw",
        "training.save_steps=2", "data.early_landmarks=0", f"output={folder / output}",
    ]  # fmt: skip
    return load_run_config(path, [*settings, *overrides])


def run_of(folder: Path, output: str, *overrides: str, begin_with: str = "drt") -> Run:
    return Run(config_of(folder, output, *overrides, begin_with=begin_with), text=TEXT)


def divergence(run: Run, step: int) -> float:
    """From the teacher, on a batch, of the tokens behind the window."""
    assert run.teacher is not None
    ids = run.batch(step)["input_ids"]
    with torch.no_grad():
        theirs, own = (model.eval()(input_ids=ids).logits for model in (run.teacher.model, run.model))
    return float(token_divergence(theirs, own)[:, WINDOW:].mean())


def looks_from_afar(teacher: Any, heads: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """What each token of a text gets of a layer's attention from chunks that do not see it in their windows, [T]."""
    q, k, _ = (x[0].repeat_interleave(4 // x.shape[2], dim=1) for x in heads)  # [T, 4, D]
    turned = [torch.stack([turn(row, place) for place, row in enumerate(x)]) for x in (q, k)]
    scores = torch.einsum("ihd,jhd->hij", *turned) * q.shape[-1] ** -0.5
    T = scores.shape[-1]
    place = torch.arange(T)
    looks = scores.masked_fill(place[:, None] < place, -torch.inf).softmax(-1).sum(0)
    looks = looks.masked_fill((place // S * S)[:, None] - place < WINDOW, 0).sum(0)
    looks[:SINKS] = 0
    return looks


def turn(x: Tensor, place: int) -> Tensor:
    """RoPE of heads [H, D], by pairs of neighbours."""
    half = x.shape[-1] // 2
    angle = place * 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    a, b = x.unflatten(-1, (half, 2)).unbind(-1)
    return torch.stack([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).flatten(-2)


@pytest.mark.parametrize("kind", ["drt", "group", "shared"])
def test_the_memory_is_the_least_squares_solution(folder: Path, kind: str) -> None:
    """Against the rows of all chunks and layers, put together by hand and solved by another routine."""
    run = run_of(folder, f"solved-{kind}", begin_with=kind)
    c: Any = run.model_config
    assert run.teacher is not None
    teacher, states, wanted = run.teacher.model, [], []

    def keep(_: Any, arguments: tuple[Tensor, ...]) -> None:
        states.append(arguments[0].flatten(0, 2))

    seen: dict[int, Any] = {}
    hooks = [run.model.encoder.kv_proj.register_forward_pre_hook(keep)]
    for number, layer in enumerate(teacher.layers):
        hooks.append(
            layer.attention.register_forward_pre_hook(
                lambda module, arguments, number=number: seen.update({number: module.heads(arguments[0])})
            )
        )
    counts = []
    with torch.no_grad():
        for step in range(3):
            for row in run.batch(step)["input_ids"]:
                run.model.eval()(input_ids=row[None])
                teacher(input_ids=row[None])
                last = len(row) // S * S  # the chunks that are full
                own = [(seen[n][1], seen[n][2]) for n in c.first_readers]
                wanted.append([torch.cat([k.flatten(2), v.flatten(2)], dim=2)[0, :last] for k, v in own])
                looks = [looks_from_afar(teacher, seen[n]) for n in c.first_readers]
                counts.append([(0.1 + x / x.mean())[:last] for x in looks])
    for hook in hooks:
        hook.remove()
    x, keys, values = torch.cat(states), [], []
    for own, count in zip(zip(*wanted, strict=True), zip(*counts, strict=True), strict=True):
        y, w = torch.cat(own), torch.cat(count)[:, None].sqrt()
        ridge = (1e-3 * (w * x).square().sum(0).mean()).sqrt() * torch.eye(x.shape[1], dtype=x.dtype)
        both = torch.cat([w * x, ridge]), torch.cat([w * y, y.new_zeros(len(ridge), y.shape[1])])
        k, v = torch.linalg.lstsq(*both).solution.chunk(2, dim=1)
        keys.append(k)
        values.append(v)
    expected = torch.cat([*keys, *values], dim=1)
    run._fit_memory(torch.device("cpu"))
    assert (run.model.encoder.kv_proj.weight.T - expected).abs().max() <= EXACT


def forecast_of(
    run: Run, monkeypatch: pytest.MonkeyPatch, *fits: float, speed: float = 1e12
) -> tuple[list[str], float]:
    """Its last lines, and the seconds they took, by a clock that only ``fits`` move: what each text takes."""
    add, now, left = MemoryFit.add, [0.0], list(fits)

    def slow(fit: MemoryFit, batch: dict[str, Tensor]) -> None:
        assert batch["input_ids"].shape[0] == 1
        add(fit, batch)
        now[0] += left.pop(0)

    monkeypatch.setattr(MemoryFit, "add", slow)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(module, "measure_flops_per_second", lambda *_: speed)
    lines = list(module.forecast(run))
    begin = lines.index("The memory is fitted to 6 texts first.")  # 3 steps of 192 tokens, 96 each
    return lines[begin + 1 :], now[0]


@pytest.mark.slow  # what it estimates besides takes seconds
def test_a_forecast_says_how_long_the_fit_takes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its second text: the first warms up."""
    (fit, step), _ = forecast_of(run_of(folder, "forecast"), monkeypatch, 20.0, 3.0)
    assert "a text took 3.00 s, after one to warm up: 0:18 for all 6 of them, before the first step" in fit
    assert "A step took 0.00 s" in step


@pytest.mark.slow
@pytest.mark.parametrize("first", [31.0, 61.0])
def test_a_slow_fit_keeps_within_the_minute(
    folder: Path, monkeypatch: pytest.MonkeyPatch, first: float
) -> None:
    """One text may go over it, for nobody knows before; nothing after it does."""
    (fit, step), took = forecast_of(run_of(folder, "slow"), monkeypatch, first)
    assert f"Its first text took {first:.2f} s; to measure a second one would take too long" in fit
    assert ("A step took" in step) == (first < 60)
    assert took == first


@pytest.mark.slow
@pytest.mark.parametrize("why", ["several processes", "of memory", "would take too long"])
def test_a_forecast_that_measures_nothing_says_that_a_fit_comes_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    run, speed = run_of(folder, "unmeasured"), 1e12
    found = module.estimate_of(run)
    if why == "several processes":
        monkeypatch.setattr(type(run.sharing), "processes", 2)
        monkeypatch.setattr(module, "estimate_of", lambda run: found)
    elif why == "of memory":
        monkeypatch.setattr(module.psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
    else:
        speed = 1.0
    (last,), _ = forecast_of(run, monkeypatch, speed=speed)
    assert why in last


def test_a_fitted_model_is_nearer_to_its_teacher(folder: Path) -> None:
    run = run_of(folder, "nearer")
    window = divergence(run, 9)  # it begins as its window
    run._fit_memory(torch.device("cpu"))
    assert divergence(run, 9) < window
    # and it is what is read that brings it there
    for layer in run.model.upper_layers:
        layer.gca_o_proj.weight.data.zero_()
    assert divergence(run, 9) == pytest.approx(window)


@pytest.mark.parametrize("groups", [1, 2])
def test_the_retriever_looks_where_the_teacher_does(folder: Path, groups: int) -> None:
    run = run_of(
        folder, f"looks-{groups}", "distil.retrieval_weight=1", begin_with=["drt", "group"][groups - 1]
    )

    def distance(step: int) -> float:
        batch = run.batch(step)
        with torch.no_grad():
            out = run.model.eval()(input_ids=batch["input_ids"], output_retrieval_scores=True)
            assert run.teacher is not None
            found = out.retrieval_scores
            _, mass = run.teacher.read({"input_ids": batch["input_ids"]}, None, found.chunks)
            targets = chunk_targets(mass, found.scores[0].shape[-1], reading=True)
        assert len(found.scores) == groups
        return max(float(selection_divergence(own, targets).mean()) for own in found.scores)

    before = [distance(step) for step in range(4)]
    run._fit_memory(torch.device("cpu"))
    after = [distance(step) for step in range(4)]
    assert all(a < b for a, b in zip(after[:3], before, strict=False))  # texts that it learned from
    assert after[3] < before[3]  # and another
    assert not any(parameter.grad is not None for parameter in run.model.parameters())


@pytest.mark.parametrize("early", [0, 0.3])
@pytest.mark.sampled(2)
def test_a_retriever_that_is_not_taught_stays_and_learns_from_the_loss(folder: Path, early: float) -> None:
    """In a memory that is fitted as ever; nothing else is trained, and the teacher is no part of the loss."""
    marks = f"data.early_landmarks={early}"
    alone = [
        "training.train=retriever",
        "distil.fit_retriever=nothing",
        "distil.weight=0",
        "training.steps=1",
        marks,
    ]
    run, taught = run_of(folder, f"untaught-{early}", *alone), run_of(folder, "taught", marks)
    before = {name: x.clone() for name, x in run.model.state_dict().items()}
    for one in (run, taught):
        one._fit_memory(torch.device("cpu"))
    fitted = {name: x.clone() for name, x in run.model.state_dict().items()}
    changed = {name for name, x in fitted.items() if not torch.equal(x, before[name])}
    assert changed == {name for name in fitted if name.endswith("gca_o_proj.weight")} | {
        "encoder.kv_proj.weight"
    }
    other = taught.model.state_dict()
    for name in changed:
        torch.testing.assert_close(fitted[name], other[name], rtol=EXACT, atol=EXACT)
    assert not torch.equal(other["encoder.landmark_proj.weight"], fitted["encoder.landmark_proj.weight"])
    whole = run_of(folder, f"untaught-{early}", *alone)
    trained = whole.train()
    assert trained is not None
    learned = {name for name, x in trained.state_dict().items() if not torch.equal(x, fitted[name])}
    assert learned == {name for name in fitted if trained.part_of(name) == "retriever"}
    assert "distil" not in whole.history[-1]


@pytest.mark.parametrize("kind", ["drt", "group"])
def test_a_retriever_that_is_set_from_texts(folder: Path, kind: str) -> None:
    """Each group by what its own landmarks ask with, on the texts of the fit; the memory is fitted as ever."""
    run = run_of(folder, f"text-{kind}", "distil.fit_retriever=text", begin_with=kind)
    taught = run_of(folder, f"looks-{kind}", begin_with=kind)
    model: Any = run.model.eval()
    parts = [model.encoder.landmark_proj, *(own.q_proj for own in model.retrievers)]
    landmark, *queries = copy.deepcopy(parts)
    by_hand, known = NextChunk(landmark, queries), dict[int, Tensor]()
    hooks = [
        part.register_forward_pre_hook(lambda _, x, number=number: known.update({number: x[0]}))
        for number, part in enumerate(parts)
    ]
    for step in range(run.config.distil.fit_steps):
        with torch.no_grad():
            model(input_ids=run.batch(step)["input_ids"])
        there = torch.ones(known[0].shape[:2], dtype=torch.bool)
        by_hand.add(known[0], [known[n] for n in range(1, len(parts))], there, there)
    for hook in hooks:
        hook.remove()
    by_hand.solve()
    for one in (run, taught):
        one._fit_memory(torch.device("cpu"))
    for part, expected in zip(parts, (landmark, *queries), strict=True):
        torch.testing.assert_close(part.weight, expected.weight, rtol=EXACT, atol=EXACT)
    other: Any = taught.model
    torch.testing.assert_close(
        model.encoder.kv_proj.weight, other.encoder.kv_proj.weight, rtol=EXACT, atol=EXACT
    )


def test_texts_set_no_retriever_that_is_not_learned(folder: Path) -> None:
    run = run_of(folder, "random", "distil.fit_retriever=text", "model.retriever=random")
    with pytest.raises(
        ValueError, match=r"^distil.fit_retriever: expected teacher or nothing for a model whose"
    ):
        run._fit_memory(torch.device("cpu"))


def test_a_retriever_of_a_model_that_reads_nothing_is_refused(folder: Path) -> None:
    run = run_of(folder, "deaf", "training.train=retriever", "distil.fit_steps=0")
    with pytest.raises(
        ValueError, match=r"^training.train: expected additions or all for a model whose layers read no"
    ):
        run.train()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_fit_is_stopped_after_the_text_that_it_reads(number: signal.Signals, folder: Path) -> None:
    def stop(message: str) -> None:
        if message.startswith("Fitting the memory"):
            signal.raise_signal(number)

    run = Run(config_of(folder, f"stopped-{number}"), say=stop)
    fitted, add = [], MemoryFit.add

    def watched_add(self: MemoryFit, batch: Any) -> None:
        fitted.append(batch)
        add(self, batch)

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(KeyboardInterrupt) if number == signal.SIGINT else nullcontext(),
    ):
        patch.setattr(MemoryFit, "add", watched_add)
        assert run.train() is None
    assert not fitted
    assert run.step == 0
    assert not list(run.output.glob("checkpoints/step-*"))


@pytest.mark.slow
def test_a_stopped_run_goes_on_from_its_fit(folder: Path) -> None:
    (whole,) = begin(watched, config_of(folder, "whole")).results()
    begin(watched, config_of(folder, "stopped"), {2: ask_to_stop}).results()
    (rest,) = begin(watched, config_of(folder, "stopped")).results()

    assert without_seconds(rest.history) == without_seconds(whole.history)


@pytest.mark.parametrize("retriever", ["teacher", "text"])
@pytest.mark.slow
def test_processes_fit_the_same(folder: Path, retriever: str) -> None:
    how = f"distil.fit_retriever={retriever}"
    (alone,) = begin(watched, config_of(folder, f"alone-{retriever}", how)).results()
    several = begin(watched, config_of(folder, f"several-{retriever}", how), processes=2).results()

    def losses(seen: Any) -> list[float]:
        return [line["loss"] for line in seen.history]

    for one in several:
        assert losses(one) == pytest.approx(losses(alone), rel=EXACT)


def test_texts_without_a_whole_chunk_fit_nothing(folder: Path) -> None:
    run = run_of(folder, "short", "training.context_length=6", "training.tokens_per_step=12")
    with pytest.raises(
        ValueError, match=r"^distil.fit_steps: expected texts with whole chunks to fit the memory to"
    ):
        run._fit_memory(torch.device("cpu"))


@pytest.mark.parametrize("override", ["data.early_landmarks=0.5", "data.separate_documents=true"])
def test_chunks_that_end_early_are_fitted_too(folder: Path, override: str) -> None:
    run = run_of(folder, override, "distil.retrieval_weight=1", override)
    window = divergence(run, 9)
    run._fit_memory(torch.device("cpu"))
    assert divergence(run, 9) < window


def test_what_cannot_be_fitted_is_refused(folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^distil.fit_steps: expected 0 for sliding_window as it is configured"
    ):
        run_of(folder, "refused", "training.train=all", begin_with="full")
    run = run_of(folder, "again")
    run._fit_memory(torch.device("cpu"))
    with pytest.raises(
        ValueError, match=r"^distil.fit_steps: expected 0 for a model whose layers read already"
    ):
        run._fit_memory(torch.device("cpu"))
    with pytest.raises(
        ValueError, match=r"^distil.model: expected a teacher with distil.fit_steps 3, got none"
    ):
        run_of(folder, "refused", "distil.model=null")
    with pytest.raises(
        ValueError, match=r"^distil.model: expected a model of trailmark's with full attention"
    ):
        run_of(folder, "refused", f"distil.model={folder / 'base'}")
