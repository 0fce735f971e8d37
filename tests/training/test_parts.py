"""Training a part of a model: the rest stays bit for bit, costs no optimizer state, and may have adapters."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.models.tiny import EXACT, block_recurrent, drt, hils, hsa, landmark, rpt, window_model
from tests.training.killed import ask_to_stop, begin, watched
from tests.training.tiny import TEXT, run_config, weights_of
from trailmark.models import TrailmarkForCausalLM
from trailmark.training.config import RunConfig, load_run_config
from trailmark.training.forecast import estimate_of
from trailmark.training.parts import Parts, base_name, is_adapter, merged
from trailmark.training.run import CHECKPOINTS, Run
from trailmark.training.trainer import make_optimizer
from trailmark.training.verification import verify

ADDITIONS = r"landmark|encoder\..*|retrievers\..*|upper_layers\.\d+\.gca_.*"
RETRIEVER = r"encoder\.landmark_proj\..*|retrievers\..*"
UPPER = rf"{ADDITIONS}|upper_layers\..*|norm\..*"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model to begin with."""
    folder = tmp_path_factory.mktemp("base")
    Run(run_config(folder / "run", seed=7), text=TEXT).model.save_pretrained(folder)
    return str(folder)


def staged(folder: Path, base: str, **training: Any) -> RunConfig:
    config = run_config(folder, **({"steps": 4, "logging_steps": 1, "save_steps": 2} | training))
    config.init_from = base
    return config


# --- which are which ---------------------------------------------------------------------------------------------


def test_each_architecture_says_which_of_its_weights_a_plain_model_lacks() -> None:
    plain = {re.sub(r"^layers\.\d+\.", "", name) for name, _ in window_model().named_parameters()}
    for model in (drt(), landmark(), rpt(), block_recurrent(), hils(calibration_rank=2), hsa()):
        parts = {name: model.part_of(name) for name, _ in model.named_parameters()}
        assert {"additions", "rest"} <= set(parts.values()), type(model)
        for name, part in parts.items():
            inner = re.sub(r"^(lower_|upper_)?layers\.\d+\.", "", name)
            assert (inner in plain) == (part not in ("additions", "retriever")), name
    assert {window_model().part_of(name) for name, _ in window_model().named_parameters()} == {"rest"}


# --- frozen ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("batch", ["plain", "ragged", "documents"])
@pytest.mark.sampled(3)
def test_fixed_tokens_cost_no_graph_and_change_no_gradient(batch: str, checkpointing: bool) -> None:
    """Below, landmarks alone have a gradient where nobody attends to them and the layers are not trained."""
    model = drt(
        landmarks_as_keys=False, num_sinks=2, max_sink_distance=9, window_position="rope", num_lower_layers=3,
        num_hidden_layers=5, num_retrieval_groups=1,
    ).double().train()  # fmt: skip
    Parts("additions").apply(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(0, model.config.vocab_size, (2, 41), generator=torch.Generator().manual_seed(1))
    given: dict[str, Tensor] = {}
    if batch == "ragged":
        given["attention_mask"] = (torch.arange(41) < torch.tensor([[41], [23]])).long()
        given["close_chunk"] = torch.arange(41).expand(2, 41) % 11 == 6
    elif batch == "documents":
        given["document_ids"] = (torch.arange(41) > torch.tensor([[18], [29]])).long()

    def gradients() -> tuple[float, dict[str, Tensor], int]:
        model.zero_grad()
        loss = model(ids, labels=ids, noise_seed=torch.arange(2), **given).loss
        with FlopCounterMode(display=False) as counted:
            loss.backward()
        named = {name: p.grad for name, p in model.named_parameters() if re.fullmatch(ADDITIONS, name)}
        return loss.item(), named, counted.get_total_flops()

    loss, fixed, flops = gradients()
    model.lower_layers[0].mlp_norm.weight.requires_grad_()  # now the tokens lead to something
    whole_loss, whole, whole_flops = gradients()
    assert loss == pytest.approx(whole_loss, rel=EXACT)
    assert fixed.keys() == whole.keys()
    for name, grad in whole.items():
        assert grad.abs().max() > 0, name
        torch.testing.assert_close(fixed[name], grad, rtol=EXACT, atol=EXACT, msg=name)
    assert flops < (0.85 if checkpointing else 0.75) * whole_flops  # a checkpoint computes the tokens again


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize(
    ("train", "trained"), [("retriever", RETRIEVER), ("additions", ADDITIONS), ("additions_and_upper", UPPER)]
)
@pytest.mark.sampled(6)
def test_what_is_not_trained_stays_bit_for_bit(
    train: str, trained: str, optimizer: str, base: str, tmp_path: Path
) -> None:
    config = staged(
        tmp_path / "run", base, train=train, optimizer=optimizer, weight_decay=0.1, decay_vectors=True
    )
    run = Run(config, text=TEXT)
    model = run.train()
    assert model is not None
    before, after = weights_of(base), weights_of(tmp_path / "run")
    assert before.keys() == after.keys()
    for name, x in before.items():
        assert torch.equal(x, after[name]) == (re.fullmatch(trained, name) is None), name
    assert run.trainer is not None
    inner = getattr(run.trainer.optimizer, "optimizer", run.trainer.optimizer)
    named = dict(model.named_parameters())
    with_state = {name for name, p in named.items() if p in inner.state}
    assert with_state == {name for name in named if re.fullmatch(trained, name)}
    verify(tmp_path / "run")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.slow
def test_two_processes_train_a_part_as_one_does(parallel: str, base: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "train": "additions",
        "optimizer": "adamw",
        "precision": "float64",
        "tokens_per_step": 320,
    }
    (one,) = begin(watched, staged(tmp_path / "one", base, **settings)).results()
    frozen = {name for name in one.parameters if not re.fullmatch(ADDITIONS, name)}
    config = staged(tmp_path / "two", base, parallel=parallel, **settings)
    for each in begin(watched, config, processes=2).results():
        assert set(each.without_gradient) == frozen
        for mine, theirs in zip(each.history, one.history, strict=True):
            assert mine["step_loss"] == pytest.approx(theirs["step_loss"], rel=1e-12, abs=0)
    before, after = weights_of(base), weights_of(tmp_path / "two")
    assert all(torch.equal(before[name], after[name]) for name in frozen & before.keys())


@pytest.mark.parametrize("lora_rank", [0, 3])
@pytest.mark.sampled(2)
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(
    lora_rank: int, base: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "train": "additions",
        "lora_rank": lora_rank,
        "addition_learning_rate_factor": 3.0,
        "retriever_learning_rate_factor": 0.5,
    }
    Run(staged(tmp_path / "whole", base, **settings), text=TEXT).train()
    config = staged(tmp_path / "stopped", base, **settings)
    watched(config, {2: ask_to_stop})
    assert not (tmp_path / "stopped" / "history.json").exists()
    Run(config, text=TEXT).train()
    whole, stopped = weights_of(tmp_path / "whole"), weights_of(tmp_path / "stopped")
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)


# --- rates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_additions_learn_at_a_rate_of_their_own(optimizer: str, weight_decay: float) -> None:
    model = drt()
    config = run_config(
        Path("unused"), optimizer=optimizer, weight_decay=weight_decay,
        learning_rate=1e-4, matrix_learning_rate=1e-3, addition_learning_rate_factor=3.0,
        retriever_learning_rate_factor=0.2,
    )  # fmt: skip
    groups = make_optimizer(model, config.training).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[id(p)]: (group["lr"], "momentum" in group) for group in groups for p in group["params"]}
    assert found.keys() == set(names.values())
    for name, (rate, by_muon) in found.items():
        factor = 3 if re.fullmatch(ADDITIONS, name) else 1
        if re.fullmatch(RETRIEVER, name):
            factor *= 0.2
        expected = (1e-3 if by_muon else 1e-4) * factor
        assert rate == pytest.approx(expected, rel=1e-12), name
        assert by_muon <= (optimizer == "muon")


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("vectors", [False, True])
def test_what_decays(optimizer: str, vectors: bool) -> None:
    model = drt()
    settings: dict[str, Any] = {"optimizer": optimizer, "weight_decay": 0.1, "decay_vectors": vectors}
    config = run_config(Path("unused"), **settings, decay_embeddings=False, addition_learning_rate_factor=3.0)
    names = {id(p): (name, p.dim()) for name, p in model.named_parameters()}
    found = {}
    for group in make_optimizer(model, config.training).param_groups:
        found |= {names[id(p)]: group["weight_decay"] for p in group["params"]}
    assert len(found) == len(names)
    for (name, dim), decay in found.items():
        decays = name != "embed_tokens.weight" and (dim > 1 or vectors)
        assert decay == (0.1 if decays else 0.0), name


def test_the_vectors_of_a_landmark_model_alone() -> None:
    """Muon has no matrix then."""
    model = landmark()
    Parts("additions").apply(model)
    optimizer = make_optimizer(model, run_config(Path("unused"), addition_learning_rate_factor=2.0).training)
    ids = torch.arange(20)[None] % 50
    model(ids, labels=ids).loss.backward()
    before = model.landmark.detach().clone()
    optimizer.step()
    assert not torch.equal(before, model.landmark)
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["landmark"]


# --- adapters ----------------------------------------------------------------------------------------------------


def adapted(train: Any = "additions", rank: int = 3) -> TrailmarkForCausalLM:
    model = drt()
    Parts(train, rank, 5).apply(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.normal_(std=0.3, generator=generator)
    return model


def test_adapters_begin_as_nothing() -> None:
    ids = torch.arange(40)[None] % 50
    plain, model = drt().eval(), drt().eval()
    Parts("additions", 3, 5).apply(model)
    assert torch.equal(plain(ids).logits, model(ids).logits)


def test_the_merged_model_computes_what_the_adapters_do() -> None:
    model, plain = adapted().eval(), drt().eval()
    ids = torch.arange(40)[None] % 50
    assert float((model(ids).logits - plain(ids).logits).abs().max()) > 0.01
    weights, kept = merged(model, model.state_dict())
    assert kept
    plain.load_state_dict(weights)
    assert float((model(ids).logits - plain(ids).logits).abs().max()) < EXACT


@pytest.mark.parametrize(("train", "pattern"), [
    ("additions", r"(lower|upper)_layers\.\d+\.(attention\.(qkv|o)|mlp\.(gate_up|down))_proj\.weight"),
    ("additions_and_upper", r"lower_layers\.\d+\.(attention\.(qkv|o)|mlp\.(gate_up|down))_proj\.weight"),
])  # fmt: skip
def test_matrices_of_layers_that_are_frozen_get_adapters(train: str, pattern: str) -> None:
    model = adapted(train)
    names = [name for name, _ in drt().named_parameters()]
    with_adapters = {
        base_name(n).replace(".lora_A.lora", "") for n, _ in model.named_parameters() if ".lora_A." in n
    }
    assert with_adapters == {name for name in names if re.fullmatch(pattern, name)}
    for name, parameter in model.named_parameters():
        trained = ("retriever", "additions", "upper")[: 2 + (train != "additions")]
        assert parameter.requires_grad == (is_adapter(name) or model.part_of(base_name(name)) in trained)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.sampled(2)
def test_a_run_with_adapters_leaves_a_plain_model(optimizer: str, base: str, tmp_path: Path) -> None:
    config = staged(tmp_path / "run", base, train="additions", lora_rank=2, optimizer=optimizer)
    run = Run(config, text=TEXT)
    model = run.train()
    assert model is not None
    plain = type(model).from_pretrained(tmp_path / "run").eval()
    checkpoint = type(model).from_pretrained(tmp_path / "run" / CHECKPOINTS / "step-00000004").eval()
    ids = torch.arange(60)[None]
    exact = model.double().eval()(ids).logits
    for found in (plain, checkpoint):
        assert float((found.double()(ids).logits - exact).abs().max()) < 1e-4
    before, after = weights_of(base), weights_of(tmp_path / "run")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "lower_layers.0.attention.qkv_proj.weight" in changed
    assert "embed_tokens.weight" not in changed


def test_a_twin_without_additions_trains_its_adapters_alone(tmp_path: Path) -> None:
    window_model(sliding_window=7, vocab_size=259).float().save_pretrained(tmp_path / "base")
    config = staged(tmp_path / "run", str(tmp_path / "base"), train="additions", lora_rank=2)
    config.model = {}
    run = Run(config, text=TEXT)
    trained = {name for name, x in run.model.named_parameters() if x.requires_grad}
    assert trained
    assert all(is_adapter(name) for name in trained)
    assert run.train() is not None
    before, after = weights_of(tmp_path / "base"), weights_of(tmp_path / "run")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "layers.0.mlp.down_proj.weight" in changed
    assert "embed_tokens.weight" not in changed


@pytest.mark.slow
def test_adapters_in_two_processes(base: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "train": "additions", "lora_rank": 2, "optimizer": "adamw", "precision": "float64", "tokens_per_step": 320
    }  # fmt: skip
    (one,) = begin(watched, staged(tmp_path / "one", base, **settings)).results()
    for parallel in ("ddp", "fsdp"):
        config = staged(tmp_path / parallel, base, parallel=parallel, **settings)
        for each in begin(watched, config, processes=2).results():
            for mine, theirs in zip(each.history, one.history, strict=True):
                assert mine["step_loss"] == pytest.approx(theirs["step_loss"], rel=1e-12, abs=0)
        ours, theirs = weights_of(tmp_path / parallel), weights_of(tmp_path / "one")
        assert all(float((ours[name] - theirs[name]).abs().max()) < EXACT for name in theirs)


@pytest.mark.slow
def test_shards_with_adapters_go_on(base: str, tmp_path: Path) -> None:
    """In two processes by FSDP2, then in one."""
    settings: dict[str, Any] = {
        "train": "additions", "lora_rank": 2, "optimizer": "adamw", "precision": "float64", "tokens_per_step": 320
    }  # fmt: skip
    Run(staged(tmp_path / "whole", base, **settings), text=TEXT).train()
    for steps, processes in ((1, 2), (3, 2), (9, 1)):
        config = staged(tmp_path / "run", base, parallel="fsdp", **settings)
        begin(watched, config, {steps: ask_to_stop}, processes=processes).results()
    ours, theirs = weights_of(tmp_path / "run"), weights_of(tmp_path / "whole")
    assert all(float((ours[name] - theirs[name]).abs().max()) < EXACT for name in theirs)


# --- what it costs -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_estimate_knows_what_is_trained(base: str, tmp_path: Path) -> None:
    def of(**training: Any) -> Any:
        return estimate_of(Run(staged(tmp_path / "none", base, optimizer="adamw", **training), text=TEXT))

    whole, part, lora = of(), of(train="additions"), of(train="additions", lora_rank=2)
    model = Run(staged(tmp_path / "none", base, train="additions"), text=TEXT).model
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    assert whole.trained == whole.parameters
    assert part.trained == sum(trained) < whole.trained
    assert part.parameters == whole.parameters
    assert part.gradients == 4 * sum(trained)
    assert part.optimizer_state == 2 * 4 * sum(trained) + 4 * len(trained)
    assert part.peak < whole.peak
    assert part.executed_flops < whole.executed_flops
    assert part.trained < lora.trained < whole.trained
    assert lora.parameters - part.parameters == lora.trained - part.trained


# --- refusals ----------------------------------------------------------------------------------------------------


REFUSED = {
    ("training.train=additions",): r"^init_from: expected a folder with weights with training.train additions, ",
    ("training.lora_rank=4",): r"^training.lora_rank: expected 0 with training.train all",
    ("training.train=additions", "init_from=x", "model.architecture=sliding_window"): (
        r"^training.train: expected all for sliding_window, which has no additions"
    ),
    ("training.addition_learning_rate_factor=3", "model.architecture=sliding_window"): (
        r"^training.addition_learning_rate_factor: expected 1 for sliding_window"
    ),
    ("training.retriever_learning_rate_factor=3", "model.architecture=landmark"): (
        r"^training.retriever_learning_rate_factor: expected 1 for landmark, which has no retriever that is learned"
    ),
    ("training.train=additions_and_upper", "init_from=x", "model.architecture=landmark"): (
        r"^training.train: expected additions or all for landmark, which has no upper layers"
    ),
    ("training.train=retriever", "init_from=x", "model.architecture=landmark"): (
        r"^training.train: expected additions or all for landmark, which has no retriever that is learned"
    ),
    ("distil.model=x", "distil.fit_retriever=text"): (
        r"^distil.fit_retriever: expected teacher without distil.fit_steps, got text"
    ),
    ("training.loss_positions=0.5", "data.task=needles", "model.chunk_size=32"): (
        r"^training.loss_positions: expected 1 with data.task needles"
    ),
    ("distil.retrieval_weight=1",): r"^distil.model: expected a teacher with distil.retrieval_weight 1",
    ("distil.model=x", "distil.weight=0"): (
        r"^distil.weight: expected distil.weight, distil.retrieval_weight or distil.fit_steps above 0"
    ),
    ("distil.model=x", "distil.retrieval_weight=1", "model.architecture=landmark"): (
        r"^distil.retrieval_weight: expected 0 for landmark"
    ),
    ("distil.model=x", "distil.retrieval_weight=1", "model.retriever=random"): (
        r"^distil.retrieval_weight: expected 0 for drt as it is configured"
    ),
}  # fmt: skip


def test_a_part_without_weights_is_refused() -> None:
    model = drt(retriever="encoder", encoder_weights="encoder")
    with pytest.raises(
        ValueError, match=r"^training.train: expected a part .* got retriever, of which it has none"
    ):
        Parts("retriever").apply(model)


@pytest.mark.parametrize("overrides", REFUSED, ids=" ".join)
def test_what_does_not_fit_is_refused(overrides: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {architecture: drt}\n")
    with pytest.raises(ValueError, match=REFUSED[overrides]):
        load_run_config(path, [*overrides, "training.context_length=512"])


def test_without_peft_adapters_are_refused(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^training.lora_rank: expected 0 without the package peft, got 2"):
        Run(staged(tmp_path, base, train="additions", lora_rank=2), text=TEXT)
