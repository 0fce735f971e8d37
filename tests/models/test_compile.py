"""``torch.compile``: a training step is one graph, of the same arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.budgets import assert_same_bits, assert_within_budget
from tests.models.tiny import MIXED, PRETRAINED, block_recurrent, drt, tokens, window_model
from trailmark.models import TrailmarkForCausalLM

LENGTH = 46
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "window": (window_model, {}),
    "window, pretrained": (window_model, PRETRAINED | {"layer_types": MIXED}),
    "drt, pretrained": (drt, PRETRAINED | {"groups": 2}),
    "drt, beside its window": (drt, PRETRAINED | {"virtual_key": "window"}),
    "block-recurrent": (block_recurrent, {"truncation_blocks": 3}),
    "drt": (drt, {}),
    "drt, other options": (
        drt,
        {
            "groups": 2,
            "window_position": "rope",
            "residual_gca": True,
            "sliding_window": 15,
            "exclude_visible_chunks": True,
            "retrieval_normalization": True,
            "softmax_off_by_one": False,
        },
    ),
    "drt, hidden landmarks": (
        drt,
        {"landmarks_as_keys": False, "num_sinks": 2, "max_sink_distance": 20, "window_position": "rope"},
    ),
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def make(name: str) -> TrailmarkForCausalLM:
    build, options = MODELS[name]
    model: TrailmarkForCausalLM = build(**options).float().train()
    return model


def step(model: TrailmarkForCausalLM, call: Any, length: int = LENGTH, **arguments: Any) -> list[Tensor]:
    """Loss, logits, what was selected, and all gradients of a training step."""
    ids = tokens(length, batch=2)
    seed = torch.tensor([11, 12])
    out = call(ids, labels=ids, noise_seed=seed, output_retrieval=True, **arguments)
    out.loss.backward()
    selected = [chosen.indices for chosen in out.retrieval or ()]
    return [out.loss.detach(), out.logits.detach(), *selected, *(p.grad for p in model.parameters())]


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("name", "checkpointed"),
    [
        pytest.param("window", False, marks=pytest.mark.slow),
        pytest.param("block-recurrent", True, marks=pytest.mark.slow),
        ("drt", False),
        pytest.param("window, pretrained", False, marks=pytest.mark.slow),
        pytest.param("drt, pretrained", True, marks=pytest.mark.slow),
        pytest.param("drt, other options", True, marks=pytest.mark.slow),
        ("drt, hidden landmarks", False),
    ],
)
@pytest.mark.slow
def test_a_training_step_is_one_graph_with_the_same_bits(name: str, checkpointed: bool) -> None:
    plain, compiled = make(name), make(name)
    if checkpointed:
        compiled.gradient_checkpointing_enable({"use_reentrant": False})
    call = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    assert_same_bits(step(compiled, call), step(plain, plain))


@pytest.mark.slow
def test_another_length_is_another_graph() -> None:
    model = make("drt")
    call = torch.compile(model, backend="eager", fullgraph=True)
    for length in (LENGTH, 17, LENGTH):
        model.zero_grad()
        ours = step(model, call, length)
        model.zero_grad()
        assert_same_bits(ours, step(model, model, length))


@pytest.mark.slow
def test_calls_of_other_layouts_run_too() -> None:
    """A mask, padding, early landmarks, and a cache: with breaks, but with the same result."""
    model, ids = make("drt"), tokens(LENGTH, batch=2)
    mask = torch.ones_like(ids)
    padded, marks = mask.clone(), torch.zeros_like(ids, dtype=torch.bool)
    padded[0, :9], marks[:, 17] = 0, True
    call = torch.compile(model, backend="eager")
    cases: list[dict[str, Any]] = [
        {"attention_mask": mask},
        {"attention_mask": padded},
        {"close_chunk": marks},
    ]
    for arguments in cases:
        model.zero_grad()
        ours = step(model, call, **arguments)
        model.zero_grad()
        assert_same_bits(ours, step(model, model, **arguments))
    model.eval()
    with torch.no_grad():
        for arguments in ({"logits_to_keep": 3}, {"use_cache": True}):
            assert torch.equal(call(ids, **arguments).logits, model(ids, **arguments).logits)
        cache, own = model.new_cache(), model.new_cache()
        for piece in ids.split([19, 1, 26], dim=1):
            ours = call(piece, past_key_values=cache, close_chunk=True).logits
            assert torch.equal(ours, model(piece, past_key_values=own, close_chunk=True).logits)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*has been deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", ["window", "drt"])
def test_generated_code_computes_the_same(name: str) -> None:
    """By torch's own compiler (C++ on a CPU), within the error budget of float32."""
    plain, compiled = make(name), make(name)
    call = torch.compile(compiled, fullgraph=True)
    exact = make(name).double()
    found, expected, truth = step(compiled, call), step(plain, plain), step(exact, exact)
    for ours, theirs, value in zip(found, expected, truth, strict=True):
        if value.dtype == torch.int64:
            assert torch.equal(ours, value)
        else:
            assert_within_budget(ours, theirs, value)
