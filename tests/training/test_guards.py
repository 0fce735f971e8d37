"""Guards: which module, gradient and step are named; what a report says; how often a run may skip."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.models.tiny import drt, landmark, window_model
from trailmark.models.outputs import CausalLMOutput
from trailmark.models.text import RetrievalScores
from trailmark.ops import ChunkSelection
from trailmark.training.guards import (
    REPORT_FILE,
    Guard,
    NonFiniteError,
    first_nonfinite,
    nonfinite_gradients,
    nonfinite_parameters,
)

NAN = math.nan
MODELS: dict[str, Callable[[], nn.Module]] = {
    "drt": lambda: drt(2).float(),
    "landmark": lambda: landmark().float(),
    "window": lambda: window_model().float(),
}
TOKENS = torch.arange(40).reshape(2, 20)


def step_of(model: nn.Module, wrapped: nn.Module | None = None) -> Callable[[], Any]:
    run = wrapped or model
    return lambda: run(input_ids=TOKENS, labels=TOKENS).loss.backward()


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


# --- the first module ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_named_where_all_is_finite(name: str) -> None:
    """Though chunks that select nothing have scores of -inf."""
    model = MODELS[name]()
    outputs: list[Any] = []
    options = {"output_retrieval": True} if name == "drt" else {}
    assert first_nonfinite(model, lambda: outputs.append(model(input_ids=TOKENS, **options))) is None
    if name == "drt":
        assert outputs[0].retrieval[0].scores.isinf().any()
    assert hooks(model) == 0
    step_of(model)()
    assert nonfinite_gradients(model) == nonfinite_parameters(model) == []


@pytest.mark.parametrize(
    ("name", "value"), [("drt", NAN), ("landmark", math.inf), ("window", -math.inf), ("window", NAN)]
)
@pytest.mark.sampled(4)
def test_the_first_of_all_leaves_that_break_is_named(name: str, value: float) -> None:
    """Each leaf in turn gives a value that is not finite; modules that contain it do too, but later."""
    model, seen = MODELS[name](), []
    for leaf, module in model.named_modules():
        if not leaf or list(module.children()):
            continue
        ran: list[str] = []

        def spoil(module: nn.Module, inputs: Any, output: Any, ran: list[str] = ran) -> Any:
            ran.append("yes")
            output.view(-1)[output.numel() // 2] = value
            return output

        handle = module.register_forward_hook(spoil)
        found = first_nonfinite(model, lambda: model(input_ids=TOKENS))
        handle.remove()
        assert hooks(model) == 0
        expected = f"{leaf} ({type(module).__name__})" if ran else None
        assert found == expected
        seen += ran
    assert len(seen) > 5


def test_a_module_that_breaks_by_itself_is_named_not_what_it_contains() -> None:
    class Log(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return (self.inner(x) * 0 - 1).log()

    model = nn.Sequential(nn.Linear(3, 3), Log(), nn.Linear(3, 3))
    assert first_nonfinite(model, lambda: model(torch.ones(3))) == "1 (Log)"
    assert first_nonfinite(model[1], lambda: model[1](torch.ones(3))) == "the model (Log)"


class Pair(NamedTuple):
    number: int
    tensor: Tensor


@dataclass
class Holder:
    text: str
    parts: list[Any]


def selection(weight: float, score: float) -> ChunkSelection:
    indices = torch.tensor([[[0, -1]]])
    return ChunkSelection(indices, torch.tensor([[[weight, 0.0]]]), torch.tensor([[[score, -math.inf]]]))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x,
        lambda x: (1, None, x),
        lambda x: [torch.tensor(3), x],
        lambda x: {"a": 1, "b": {"c": x}},
        lambda x: Pair(1, x),
        lambda x: Holder("text", [x]),
        lambda x: CausalLMOutput(logits=x),
        lambda x: x.to(torch.complex64),
        lambda x: x.bfloat16(),
        lambda x: selection(float(x.sum()), 1.0),
        lambda x: selection(1.0, float(x.sum())),
        lambda x: RetrievalScores((torch.tensor([[[-math.inf, float(x.sum())]]]),), torch.zeros(1, 2)),
    ],
)
def test_outputs_of_every_form_are_looked_into(wrap: Callable[[Tensor], Any]) -> None:
    class Wrapping(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return wrap(x)

    model = Wrapping()
    assert first_nonfinite(model, lambda: model(torch.tensor([1.0, NAN]))) == "the model (Wrapping)"
    assert first_nonfinite(model, lambda: model(torch.tensor([1.0, 2.0]))) is None


def test_autocast_overflows_are_found() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.init.constant_(model[1].weight, 6e4)

    def forward() -> None:
        with torch.autocast("cpu", torch.float16):
            model(torch.ones(1, 4) * 100)

    assert first_nonfinite(model, lambda: model(torch.ones(1, 4) * 100)) is None
    assert first_nonfinite(model, forward) == "1 (Linear)"


def test_an_error_after_the_first_is_expected_and_one_without_is_passed_on() -> None:
    model = nn.Sequential(nn.Linear(2, 2))

    def fails(x: Tensor) -> None:
        model(x)
        raise IndexError("NaN is no index")

    assert first_nonfinite(model, lambda: fails(torch.tensor([1.0, NAN]))) == "0 (Linear)"
    with pytest.raises(IndexError, match="no index"):
        first_nonfinite(model, lambda: fails(torch.ones(2)))
    assert hooks(model) == 0


# --- gradients and parameters ----------------------------------------------------------------------------------


def test_gradients_and_parameters_are_named() -> None:
    model = window_model().float()
    names = [name for name, _ in model.named_parameters()]
    for name in names[1::2]:
        parameter = model.get_parameter(name)
        parameter.grad = torch.zeros_like(parameter)
    model.get_parameter(names[3]).grad.view(-1)[-1] = -math.inf
    model.get_parameter(names[1]).grad.view(-1)[0] = NAN
    assert nonfinite_gradients(model) == [names[1], names[3]]
    with torch.no_grad():
        model.get_parameter(names[2]).view(-1)[0] = NAN
    assert nonfinite_parameters(model) == [names[2]]


def test_sparse_gradients_are_looked_into() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    model(torch.tensor([1, 1])).sum().backward()
    assert nonfinite_gradients(model) == []
    (model(torch.tensor([3])) * math.inf).sum().backward()
    assert nonfinite_gradients(model) == ["weight"]


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_names_are_those_of_the_model_without_ddp() -> None:
    model = window_model().float()
    wrapped = DistributedDataParallel(model)
    with torch.no_grad():
        model.layers[0].mlp.down_proj.weight[0, 0] = NAN
    assert first_nonfinite(wrapped, step_of(model, wrapped)) == "layers.0.mlp.down_proj (Linear)"
    assert nonfinite_parameters(wrapped) == ["layers.0.mlp.down_proj.weight"]
    gradients = nonfinite_gradients(wrapped)
    assert "layers.0.mlp.down_proj.weight" in gradients
    assert set(gradients) <= {name for name, _ in model.named_parameters()}


@pytest.mark.usefixtures("one_process")
def test_sharded_parameters_are_looked_into() -> None:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    x = torch.ones(1, 3)
    assert first_nonfinite(model, lambda: model(x).sum().backward()) is None
    assert nonfinite_gradients(model) == nonfinite_parameters(model) == []
    with torch.no_grad():
        model[1].bias.to_local()[1] = math.inf
    assert nonfinite_parameters(model) == ["1.bias"]
    assert first_nonfinite(model, lambda: model(x).square().sum().backward()) == "1 (Linear)"
    assert "1.weight" in nonfinite_gradients(model)


# --- the guard -------------------------------------------------------------------------------------------------


def broken() -> tuple[nn.Module, Callable[[], Any]]:
    model = window_model().float()
    model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: output * math.inf)
    return model, step_of(model)


@pytest.mark.parametrize(("loss", "norm"), [(2.5, 1.0), (0.0, 0.0), (2.5, None), (1e30, 1e30)])
def test_finite_steps_go(tmp_path: Path, loss: float, norm: float | None) -> None:
    guard = Guard(0, tmp_path)
    assert guard.check(1, loss, norm) == "go"
    assert not (tmp_path / REPORT_FILE).exists()


@pytest.mark.parametrize(
    ("loss", "norm", "what"),
    [
        (NAN, 1.0, "the loss is nan"),
        (-math.inf, NAN, "the loss is -inf"),
        (2.0, math.inf, "the norm of the gradients is inf"),
        (NAN, None, "the loss is nan"),
    ],
)
def test_the_first_stops_the_run_with_a_report(
    tmp_path: Path, loss: float, norm: float | None, what: str
) -> None:
    model, repeat = broken()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    repeat()
    for p in model.parameters():  # clipping by a norm that is NaN spoils them all
        assert p.grad is not None
        p.grad.fill_(NAN)
    with pytest.raises(NonFiniteError) as caught:
        Guard(0, tmp_path).check(12, loss, norm, samples=range(44, 48), model=model, repeat=repeat)
    message = str(caught.value)
    assert message.startswith(
        f"training: {what} at step 12. It was not taken: the weights are those of step 11. "
    )
    assert f"First in the output of layers.1.mlp (MLP). Report: {tmp_path / REPORT_FILE}. " in message
    assert "\n" not in message
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, FloatingPointError)
    report = json.loads((tmp_path / REPORT_FILE).read_text(), parse_constant=pytest.fail)  # JSON has no NaN
    assert report["step"] == 12
    assert report["samples"] == [44, 45, 46, 47]
    assert report["loss"] == (loss if math.isfinite(loss) else str(loss))
    assert report["grad_norm"] == (norm if norm is None or math.isfinite(norm) else str(norm))
    assert report["first_module"] == "layers.1.mlp (MLP)"
    assert "layers.1.mlp.down_proj.weight" in report["gradients"]
    assert report["parameters"] == report["skipped"] == []
    assert report["not_repeated"] is None
    assert len(report["try_this"]) > 2
    for name, p in model.named_parameters():
        assert p.equal(before[name])
        assert p.grad is None
    assert hooks(model) == 1  # the one that breaks it


def test_skips_are_counted_over_the_run_and_a_resumed_one(tmp_path: Path) -> None:
    guard = Guard(2, tmp_path)
    assert [guard.check(step, loss, 1.0) for step, loss in ((4, NAN), (5, 1.0))] == ["skip", "go"]
    assert json.loads((tmp_path / REPORT_FILE).read_text())["step"] == 4
    resumed = Guard(2, tmp_path)
    resumed.restore(json.loads(json.dumps(guard.state())))
    assert resumed.check(9, 1.0, math.inf) == "skip"
    assert resumed.state() == {"skipped": [4, 9]}
    assert guard.state() == {"skipped": [4]}
    with pytest.raises(NonFiniteError, match="at step 10 after 2 skipped steps"):
        resumed.check(10, NAN, 1.0)
    assert json.loads((tmp_path / REPORT_FILE).read_text())["skipped"] == [4, 9]
    assert resumed.state() == {"skipped": [4, 9]}


def test_a_step_that_cannot_be_repeated_is_still_reported(tmp_path: Path) -> None:
    model = window_model().float()

    def repeat() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(NonFiniteError, match="the loss is nan at step 2"):
        Guard(0, tmp_path).check(2, NAN, 1.0, model=model, repeat=repeat)
    report = json.loads((tmp_path / REPORT_FILE).read_text())
    assert report["not_repeated"] == "RuntimeError: out of memory"


def test_a_report_that_cannot_be_written_hides_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    guard = Guard(0, folder / "deep")
    folder.touch()
    with pytest.raises(NonFiniteError, match=r"the loss is nan at step 2.* \(it cannot be written: "):
        guard.check(2, NAN, 1.0)
