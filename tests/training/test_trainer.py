"""Training: a run that was stopped, killed or moved goes on as if nothing had happened."""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.disks import snapshot
from tests.training.tiny import CHUNK_SIZE, TEXT, prose, run_config, without_seconds
from trailmark.data.batches import Windows
from trailmark.data.corpus import load_tokenizer, tokenize
from trailmark.data.needles.curriculum_texts import CURRICULUM, PACKED, Level
from trailmark.data.shards import Corpus
from trailmark.files import read_json
from trailmark.training import checkpoints
from trailmark.training import forecast as module
from trailmark.training.curriculum import Curriculum
from trailmark.training.forecast import estimate_of, forecast, measure_speed
from trailmark.training.loss import Called, Meter, weighted_loss
from trailmark.training.run import HISTORY_FILE, Run

Act = Callable[[Run], None]


class Killed(Exception):
    pass


def press_ctrl_c(run: Run) -> None:
    signal.raise_signal(signal.SIGINT)


def kill(run: Run) -> None:
    raise Killed


def start(output: Path, at: dict[int, Act] | None = None, threshold: float = -1, **settings: Any) -> Run:
    """A run that does ``at[step]`` after ``step``. Below 0 every level of the curriculum is passed."""
    acts = at or {}

    def progress(run: Run) -> None:
        acts.get(run.step, lambda run: None)(run)

    run = Run(run_config(output, **settings), progress, TEXT)
    run.curriculum.threshold = threshold
    return run


def trained(output: Path, **settings: Any) -> Run:
    run = start(output, **settings)
    run.train()
    return run


def weights(run: Run) -> dict[str, Tensor]:
    return run.model.state_dict()


def assert_same_run(ours: Run, other: Run) -> None:
    assert ours.tokens_trained == other.tokens_trained
    for name, weight in weights(other).items():
        assert torch.equal(weights(ours)[name], weight), name
    assert without_seconds(ours.history) == without_seconds(other.history)
    assert ours.averages == other.averages
    assert ours.curriculum == other.curriculum


VARIANTS: dict[str, dict[str, Any]] = {
    "text": {"task": "text"},
    "text, window, adamw": {"task": "text", "model": "window", "optimizer": "adamw"},
    "needles": {"task": "needles"},
    "needles, window": {"task": "needles", "model": "window", "weight_decay": 0.1},
    "text, landmark": {"task": "text", "model": "landmark, drawing"},
    "needles, landmark": {"task": "needles", "model": "landmark"},
    "text, hils": {"task": "text", "model": "hils"},
    "needles, hsa": {"task": "needles", "model": "hsa"},
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Of a variant, trained once, if it is asked for."""
    return cache(lambda name: trained(tmp_path_factory.mktemp("run"), **VARIANTS[name]))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.sampled(4)
def test_a_stopped_run_goes_on_exactly(
    variant: str, uninterrupted: Callable[[str], Run], tmp_path: Path
) -> None:
    for stop in (3, 10):  # between the saved steps 5 and 10, and at one
        run = start(tmp_path, {stop: press_ctrl_c}, **VARIANTS[variant])
        with pytest.raises(KeyboardInterrupt):
            run.train()
        assert run.step == stop
        assert not run.finished
    resumed = start(tmp_path, **VARIANTS[variant])
    resumed.train()
    assert_same_run(resumed, uninterrupted(variant))


@pytest.mark.parametrize("variant", ["text", "needles"])
@pytest.mark.sampled(2)
def test_a_killed_run_goes_on_from_its_last_checkpoint(
    variant: str, uninterrupted: Callable[[str], Run], tmp_path: Path
) -> None:
    for death in (2, 7, 9):  # before anything was saved, and after step 5 was
        with pytest.raises(Killed):
            start(tmp_path, {death: kill}, **VARIANTS[variant]).train()
    steps: list[int] = []
    every = {step: lambda run: steps.append(run.step) for step in range(13)}
    resumed = start(tmp_path, every, **VARIANTS[variant])
    resumed.train()
    assert steps == [6, 7, 8, 9, 10, 11, 12]
    assert_same_run(resumed, uninterrupted(variant))


def test_what_was_earned_towards_the_next_level_is_kept(tmp_path: Path) -> None:
    def earn(run: Run) -> None:
        run.curriculum.average = 0.3  # a model this small earns nothing in so few steps

    whole = start(tmp_path / "whole", {1: earn}, threshold=1, task="needles")
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "run", {1: earn, 3: press_ctrl_c}, threshold=1, task="needles").train()
    resumed = start(tmp_path / "run", threshold=1, task="needles")
    resumed.train()
    assert resumed.curriculum.average > 0.1
    assert_same_run(resumed, whole)


def test_half_a_checkpoint_of_a_killed_run_pushes_out_no_whole_one(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        start(tmp_path, {11: kill}).train()
    (tmp_path / "checkpoints" / "step-00000010" / "manifest.json").unlink()
    with pytest.raises(Killed):
        start(tmp_path, {6: kill}).train()
    assert checkpoints.is_whole(tmp_path / "checkpoints" / "step-00000005")


def test_a_run_does_not_go_on_with_another_text(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, {3: press_ctrl_c}).train()
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match=r"^data: expected the text that the run in .* began with"):
        Run(run_config(tmp_path), text=TEXT[:-1]).train()
    assert snapshot(tmp_path) == before


def test_a_stop_at_the_last_step_is_a_stop(uninterrupted: Callable[[str], Run], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, {12: press_ctrl_c}).train()
    resumed = trained(tmp_path)
    assert resumed.finished
    assert_same_run(resumed, uninterrupted("text"))


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)

    def twice(run: Run) -> None:
        press_ctrl_c(run)
        press_ctrl_c(run)

    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, {3: twice}).train()
    assert not list(tmp_path.glob("checkpoints/step-*"))
    assert signal.getsignal(signal.SIGINT) is before


def test_the_levels_of_the_curriculum_are_passed(uninterrupted: Callable[[str], Run]) -> None:
    curriculum = uninterrupted("needles").curriculum
    assert curriculum.starts == [0, 2, 4, 6, 8]
    assert uninterrupted("needles").history[-1]["level"] == 4


def test_the_same_run_twice_and_another_seed(uninterrupted: Callable[[str], Run], tmp_path: Path) -> None:
    assert_same_run(trained(tmp_path / "a"), uninterrupted("text"))
    other = trained(tmp_path / "b", seed=1)
    assert not torch.equal(other.model.embed_tokens.weight, uninterrupted("text").model.embed_tokens.weight)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers renames it
@pytest.mark.parametrize("task", ["text", "needles"])
def test_gradient_checkpointing_changes_nothing(
    task: str, uninterrupted: Callable[[str], Run], tmp_path: Path
) -> None:
    run = start(tmp_path, task=task, gradient_checkpointing=True)
    run.train()
    assert any(getattr(module, "gradient_checkpointing", False) for module in run.model.modules())
    assert_same_run(run, uninterrupted(task))


def test_micro_batches_divide_the_samples_of_each_level(tmp_path: Path) -> None:
    config = run_config(tmp_path, "needles", tokens_per_step=CHUNK_SIZE * 48, micro_batch_size=1)
    with pytest.raises(
        ValueError, match=r"^training\.micro_batch_size: .* got 1, .* do not divide so\. Set it higher"
    ):
        _ = Run(config, text=TEXT).micro


def test_needles_are_measured_on_text_of_any_length(tmp_path: Path) -> None:
    config = run_config(tmp_path, "needles", steps=2, context_length=70, eval_steps=1)
    (tmp_path / "text.txt").write_text(prose())
    data = dataclasses.replace(config.data, validation=[str(tmp_path / "text.txt")])
    run = Run(dataclasses.replace(config, data=data), text=TEXT)
    run.train()
    assert "eval_loss" in run.history[-1]


def test_measuring_the_speed_changes_nothing(uninterrupted: Callable[[str], Run], tmp_path: Path) -> None:
    run = start(tmp_path, task="needles")
    assert measure_speed(run, 3) > 0
    run.train()
    assert_same_run(run, uninterrupted("needles"))


def test_a_forecast_takes_no_step_that_is_long_or_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "A step took" in list(forecast(start(tmp_path)))[-1]
    run = start(tmp_path)
    needed = estimate_of(run).peak
    monkeypatch.setattr(module, "measure_flops_per_second", lambda *_: 1e3)
    assert "would take too long" in list(forecast(run))[-1]
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: SimpleNamespace(available=needed))
    assert re.search(r"may need .* GB of memory", list(forecast(run))[-1])


# --- what a run leaves behind ------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.sampled(4)
def test_the_folder_holds_the_trained_model(variant: str, uninterrupted: Callable[[str], Run]) -> None:
    run = uninterrupted(variant)
    model = AutoModelForCausalLM.from_pretrained(run.output)
    assert type(model) is type(run.model)
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in weights(run).items())
    assert AutoTokenizer.from_pretrained(run.output)("ab")["input_ids"] == run.tokenizer("ab")["input_ids"]
    history = read_json(run.output / HISTORY_FILE)
    assert [h["step"] for h in history["steps"]] == [10, 12]
    assert history["steps"] == run.history
    assert history["seconds"] == run.seconds > 0
    batches = [run.batch(step) for step in range(12)]
    # chunks of 20: a text of 16 or 32 of them is longer than the 160 tokens of a step
    width = 2 * 160 + 2 * 320 + 8 * 640 if "needles" in variant else 12 * 160
    assert sum(batch["input_ids"].numel() for batch in batches) == width
    tokens = sum(int(batch.get("attention_mask", batch["input_ids"] >= 0).sum()) for batch in batches)
    assert (tokens < width) == ("needles" in variant)  # early questions leave tokens out
    assert history["tokens_per_second"] == pytest.approx(tokens / run.seconds)
    assert ("accuracy" in history["steps"][-1]) == ("needles" in variant)
    assert ("recall" in history["steps"][-1]) == (variant == "needles")
    kept = {folder.name for folder in (run.output / "checkpoints").iterdir()}
    assert kept == {"step-00000010", "step-00000012"}  # the last two
    assert not list(run.output.glob(".*"))


def test_a_finished_run_is_recognised(uninterrupted: Callable[[str], Run], tmp_path: Path) -> None:
    done = uninterrupted("text").output
    assert start(done).finished
    assert not start(done, steps=13).finished
    assert not start(done, task="needles").finished
    assert not start(tmp_path / "empty").finished
    moved = tmp_path / "moved"
    moved.symlink_to(done)
    assert start(moved).finished


def test_a_run_from_before_a_setting_was_new_is_recognised(tmp_path: Path) -> None:
    trained(tmp_path)
    other = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert other["data"].pop("level_accuracy") == 0.9
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(other))
    assert start(tmp_path).finished
    other["data"]["first_level"] = 1
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(other))
    assert not start(tmp_path).finished


def test_a_run_without_its_history_is_not_finished(tmp_path: Path) -> None:
    trained(tmp_path)
    (tmp_path / HISTORY_FILE).write_text("{")
    assert not start(tmp_path).finished


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(path.read_bytes()[:-1]), Path.unlink])
@pytest.mark.sampled(2)
def test_a_finished_run_whose_model_is_damaged_says_so_and_makes_it_again(
    tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    trained(tmp_path)
    weights = tmp_path / "model.safetensors"
    before = weights.read_bytes()
    damage(weights)
    with pytest.raises(
        ValueError, match=r"^output: .*model\.safetensors.* remove that file and history\.json"
    ):
        _ = start(tmp_path).finished
    (tmp_path / HISTORY_FILE).unlink()
    again = start(tmp_path)
    again.train()
    assert again.finished
    assert weights.read_bytes() == before


@pytest.mark.parametrize(
    "change", [{"steps": 13}, {"seed": 1}, {"task": "needles"}, {"model": "window"}, {"learning_rate": 0.5}]
)
def test_a_folder_of_another_run_is_refused(
    uninterrupted: Callable[[str], Run], change: dict[str, Any]
) -> None:
    done = uninterrupted("text").output
    before = snapshot(done)
    message = r"^output: .* holds a run with another configuration \(run\.yaml\): .* there, .* here.*Choose"
    with pytest.raises(ValueError, match=message):
        start(done, **change).train()
    assert snapshot(done) == before


@pytest.mark.parametrize("content", [b"", b"hello", b"- 1", b"a: [", b"\xff\xfe\x00"])
def test_a_foreign_run_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.yaml").write_bytes(content)
    run = start(tmp_path)
    assert not run.finished
    with pytest.raises(ValueError, match="another configuration"):
        run.train()
    assert (tmp_path / "run.yaml").read_bytes() == content


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"^output: expected a folder to write in"):
        start(tmp_path / "file" / "below").train()


def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    config.model["vocab_size"] = 100
    with pytest.raises(ValueError, match=r"^model\.vocab_size: expected at least the 259 tokens .*got 100"):
        Run(config, text=TEXT)


def test_popularity_that_lasts_is_said_once(tmp_path: Path) -> None:
    told: list[str] = []
    run = Run(run_config(tmp_path), text=TEXT, say=told.append)
    for number, share in enumerate((*[0.9] * 4, 0.5, *[0.9] * 7, 0.5, *[0.9] * 9)):
        run.history.append({"step": number, "retrieval_popular": share})
        run.history.append({"step": number})  # an entry without
        run._warn_of_popularity()
        assert [line for line in told if "whoever asks" in line] == (told[-1:] if number >= 9 else [])
    assert told[-1].startswith("Mind: 90% of the variance of the retrieval's scores")


@pytest.mark.parametrize("early_landmarks", [0.0, 0.2])
def test_popularity_is_logged_where_the_window_hides_chunks(tmp_path: Path, early_landmarks: float) -> None:
    """What was selected is then known in full texts alone; scores say which chunks could have been."""
    config = run_config(tmp_path, steps=2, logging_steps=1)
    config.model |= {"exclude_visible_chunks": True, "sliding_window": 9}
    config.data.early_landmarks = early_landmarks
    run = Run(config, text=TEXT)
    run.train()
    for entry in run.history:
        assert -1 < entry["retrieval_popular"] <= 1
        assert ("retrieval_age" in entry) == (early_landmarks == 0)


def test_one_retrieved_chunk_trains_no_retriever(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    config.model["num_retrieved_chunks"] = 1
    with pytest.raises(ValueError, match="num_retrieved_chunks"):
        Run(config, text=TEXT).train()


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^data: expected at least context_length = 80 tokens, got 79"):
        Run(run_config(tmp_path), text=TEXT[:79])
    with pytest.raises(ValueError, match=r"^data: expected more than 640 tokens .*got 640"):
        Run(run_config(tmp_path, "needles"), text=TEXT[:640])


# --- learning ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "model"),
    [
        ("muon", "drt"),
        ("muon", "landmark"),
        ("muon", "hils"),
        ("muon", "hsa"),
        ("adamw", "drt"),
        ("adamw", "window"),
        pytest.param("muon", "window", marks=pytest.mark.slow),
        pytest.param("adamw", "landmark", marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(3)
def test_the_loss_falls(model: str, optimizer: str, tmp_path: Path) -> None:
    text = tokenize(["abcdefgh" * 100], load_tokenizer())
    config = run_config(
        tmp_path,
        "text",
        model,
        optimizer=optimizer,
        steps=40,
        save_steps=1000,
        learning_rate=0.03,
        matrix_learning_rate=0.02,
    )
    run = Run(config, text=text)
    ids = torch.from_numpy(text[:200]).long()[None]

    def loss() -> float:
        with torch.no_grad():
            return float(run.model.eval()(ids, labels=ids).loss)

    before = loss()
    run.train()
    assert before > 4  # near log(259) = 5.6
    assert loss() < 0.5


def test_the_loss_is_the_weighted_mean() -> None:
    run = Run(run_config(Path("unused"), "needles"), text=TEXT)
    run.model.eval()
    inputs = run.batch(0)
    drawn = inputs["loss_weights"].unique().tolist()
    assert drawn == pytest.approx([0, 0.1, 1, 3])
    loss, out, labels, *_ = weighted_loss(run.model, inputs)
    total = weight = 0.0
    logits = out.logits.detach().double()
    for row, ids in enumerate(inputs["input_ids"]):
        for t in range(1, len(ids)):  # predicted at t - 1
            share = float(inputs["loss_weights"][row, t])
            total -= share * float(logits[row, t - 1].log_softmax(-1)[ids[t]])
            weight += share
    assert float(loss.detach()) == pytest.approx(total / weight, rel=1e-5)  # float32
    assert out.retrieval is not None
    assert labels.shape == inputs["input_ids"].shape


def landmark_run(convention: str, **changes: Any) -> Run:
    config = run_config(Path("unused"), model="landmark")
    config.model |= {"landmark_loss": convention, "vocab_size": 259} | changes
    config.data.early_landmarks = 0.0
    return Run(config, text=TEXT)


def test_where_landmarks_are_text_they_weigh_as_the_tokens_before_them() -> None:
    run = landmark_run("text")
    inputs = run.batch(0)
    seeds = inputs["noise_seed"]
    whole = run.model(inputs["input_ids"], labels=inputs["labels"], noise_seed=seeds)
    assert whole.landmark_loss is not None
    loss, out, _, *_ = weighted_loss(run.model, inputs)
    torch.testing.assert_close(loss, whole.loss)
    inputs["loss_weights"] = torch.rand(inputs["labels"].shape, generator=torch.Generator().manual_seed(0))
    loss, _, labels, *_ = weighted_loss(run.model, inputs)
    share = inputs["loss_weights"][:, 1:]
    plain = -out.logits[:, :-1].log_softmax(-1).gather(2, labels[:, :-1, None])[..., 0]
    expected = ((plain + whole.landmark_loss[:, :-1]) * share).sum() / share.sum()
    torch.testing.assert_close(loss, expected)


def test_what_follows_an_end_of_text_bears_no_loss_where_the_model_says_so() -> None:
    eos = int(TEXT[40])
    run, other = landmark_run("none_after_eos", eos_token_id=eos), landmark_run("none")
    inputs = run.batch(0)
    assert 3 < int((inputs["input_ids"] == eos).sum()) < 60
    whole = run.model(inputs["input_ids"], labels=inputs["labels"], noise_seed=inputs["noise_seed"])
    loss, _, labels, *_ = weighted_loss(run.model, inputs)
    torch.testing.assert_close(loss, whole.loss)
    # at t the label of t + 1, which follows the token at t
    assert torch.equal(labels[:, :-1] == -100, inputs["input_ids"][:, :-1] == eos)
    assert not torch.equal(loss, weighted_loss(other.model, inputs)[0])


def test_accuracy_and_recall_count_first_digits_and_chunks(tmp_path: Path) -> None:
    run = start(tmp_path, task="needles", tokens_per_step=800)
    inputs = run.batch(0)
    labels = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
    needles = inputs["needle_chunks"]  # [B, N]
    questions = int((needles >= 0).sum())
    assert questions == int(inputs["first_digits"].sum()) > 3
    asked = torch.nn.functional.pad(inputs["first_digits"][:, 1:], (0, 1))

    def measure(right: int, found: int) -> dict[str, float]:
        predicted = torch.full_like(labels, 200)  # no digit
        for row, t in asked.nonzero()[:right].tolist():
            predicted[row, t] = labels[row, t]
        selected = torch.full((*needles.shape, 2), -1)
        for row, n in (needles >= 0).nonzero()[:found].tolist():
            selected[row, n, 1] = needles[row, n]
        nothing = torch.full_like(selected, -1)
        out = SimpleNamespace(
            logits=torch.nn.functional.one_hot(predicted, 259).float(),
            # found by either group
            retrieval=[SimpleNamespace(indices=nothing), SimpleNamespace(indices=selected)],
        )
        meter = Meter()
        meter.add(Called(torch.tensor(1.5), out, labels, None), inputs)  # type: ignore[arg-type]
        return meter.read(meter.vector().tolist()).averages()

    for right, found in ((0, 0), (1, questions), (questions, 2)):
        expected = {"loss": 1.5, "accuracy": right / questions, "recall": found / questions}
        assert measure(right, found) == pytest.approx(expected)


# --- early landmarks ---------------------------------------------------------------------------------------


def early_run(output: Path, share: float) -> Run:
    run = start(output, task="needles", tokens_per_step=960)
    run.curriculum.levels = (Level(8, 0.5, 0.5, 0.0, early=share),)
    return run


def test_early_questions_train_as_each_text_alone(tmp_path: Path) -> None:
    """Texts of different lengths with chunks of different sizes, in one batch and one by one without padding."""
    run = early_run(tmp_path, 1.0)
    model = run.model.double().eval()
    inputs = run.batch(0)
    counts = inputs["attention_mask"].sum(1).tolist()
    assert len(set(counts)) > 1
    assert inputs["close_chunk"].sum() > 6
    loss, out, _, *_ = weighted_loss(model, inputs)
    total = weight = 0.0
    for row, count in enumerate(counts):
        alone = {
            key: x[row : row + 1, :count] for key, x in inputs.items() if x.shape == inputs["labels"].shape
        }
        alone |= {"noise_seed": inputs["noise_seed"][row : row + 1]}
        del alone["attention_mask"]
        mean, single, *_ = weighted_loss(model, alone)
        share = float(alone["loss_weights"][:, 1:].double().sum())
        total, weight = total + float(mean.detach()) * share, weight + share
        assert torch.equal(single.retrieval[0].indices[0], out.retrieval[0].indices[row])
    assert float(loss.detach()) == pytest.approx(total / weight, rel=1e-6)  # loss weights are float32
    assert single.retrieval[0].indices.shape == (1, 8, 2)  # every chunk closes: needle_chunks are theirs


def test_a_batch_without_early_questions_is_laid_out_as_one_text(tmp_path: Path) -> None:
    early, end = (early_run(tmp_path, share).batch(0) for share in (1.0, 0.0))
    assert set(early) - set(end) == {"attention_mask", "close_chunk"}
    assert set(end) <= set(early)


def test_tokens_are_counted_without_padding(tmp_path: Path) -> None:
    for share in (0.0, 1.0):
        run = early_run(tmp_path, share)
        inputs = run.batch(0)
        meter = Meter()
        meter.add(weighted_loss(run.model.eval(), inputs), inputs)
        measured = meter.read(meter.vector().tolist())
        assert measured.tokens == int(inputs.get("attention_mask", torch.ones(6, 160)).sum())
        assert (measured.tokens == 960) == (share == 0)
        assert measured.recall is not None
        assert 0 <= measured.recall <= 1


@pytest.mark.parametrize("model", ["drt", "window", "landmark"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_text_with_early_landmarks(model: str, share: float, tmp_path: Path) -> None:
    config = run_config(tmp_path, model=model)
    config.data.early_landmarks = share
    inputs = Run(config, text=TEXT).batch(3)
    if model == "window" or share == 0:
        assert "close_chunk" not in inputs
    else:
        expected = Windows(Corpus.of_tokens(TEXT), 80, 0).close_chunk(6, 2, CHUNK_SIZE, share)
        assert expected.any()
        assert torch.equal(inputs["close_chunk"], expected)
        ends = inputs["close_chunk"].nonzero()
        weighted_loss(run := Run(config, text=TEXT).model.eval(), inputs)
        moved = run(inputs["input_ids"], close_chunk=inputs["close_chunk"]).logits
        plain = run(inputs["input_ids"]).logits
        row, first = ends[0].tolist()
        assert not torch.equal(moved[row, first + 1], plain[row, first + 1])  # the model is told


def test_chunks_of_one_token_are_always_full(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    config.model["chunk_size"] = 1
    assert config.data.early_landmarks > 0
    assert "close_chunk" not in Run(config, text=TEXT).batch(0)


# --- the curriculum ----------------------------------------------------------------------------------------


def test_a_level_begins_two_steps_after_it_is_earned() -> None:
    curriculum = Curriculum(threshold=0.5)
    step = 0
    while len(curriculum.starts) == 1:
        curriculum.update(step, 1.0, rows=4)
        step += 1
    assert step == 14  # the first n with 1 - 0.95 ** n > 0.5
    assert curriculum.starts == [0, 13 + 2]
    assert [curriculum.level_at(s) for s in (0, 14, 15, 99)] == [0, 0, 1, 1]
    curriculum.update(14, 1.0, rows=4)  # of the old level
    assert curriculum.average == 0
    for step in range(15, 1000):
        curriculum.update(step, 1.0, rows=2)
    assert len(curriculum.starts) == len(CURRICULUM)
    assert curriculum.level_at(999) == len(CURRICULUM) - 1


def test_the_configuration_says_when_a_level_is_passed() -> None:
    config = run_config(Path("unused"), "needles")
    assert Run(config, text=TEXT).curriculum.threshold == 0.9
    config.data.level_accuracy = 0.2
    assert Run(config, text=TEXT).curriculum.threshold == 0.2


def test_packed_texts_stand_before_the_level_to_begin_with() -> None:
    config = run_config(Path("unused"), "needles")
    config.data.packed, config.data.first_level = True, 3
    assert Run(config, text=TEXT).curriculum.levels == (*PACKED, *CURRICULUM[3:])


def test_no_level_is_passed_below_the_threshold() -> None:
    curriculum = Curriculum(threshold=0.5)
    for step in range(1000):
        curriculum.update(step, 0.5, rows=1)
    assert curriculum.starts == [0]
