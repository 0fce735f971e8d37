"""A state that a stranger signed again: each tensor in turn is missing or another; a refusal, or an answer."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from tests.memory.test_strangers import sign_state
from tests.models.tiny import block_recurrent, drt, hils, hsa, landmark, rpt, tokens, window_model

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS: dict[str, Callable[[], Any]] = {
    "drt": drt,
    "drt of two groups": lambda: drt(2),
    "rpt": rpt,
    "window": window_model,
    "block recurrent": block_recurrent,
    "landmark": landmark,
    "hils": lambda: hils(num_sinks=2),
    "hsa": hsa,
    "hsa, tokens": hsa,
    "drt, tokens": lambda: drt(2, num_sinks=2),
}
_INTEGERS = (-1, 2**62, 2**63 - 1, -(2**63))


def others(tensor: Tensor) -> Iterator[tuple[str, Tensor | None]]:
    """What a tensor may be changed to; None: it is missing."""
    yield "missing", None
    if tensor.dtype == torch.bool:
        yield "turned", ~tensor
    elif tensor.is_floating_point():
        for number in (float("nan"), float("inf"), 1e30):
            yield f"all {number}", torch.full_like(tensor, number)
    else:
        for number in _INTEGERS:
            yield f"all {number}", torch.full_like(tensor, number)
        yield "one more", tensor + 1
    for dim in range(tensor.dim()):
        yield f"twice along {dim}", torch.cat([tensor, tensor], dim)
        yield f"none along {dim}", tensor.narrow(dim, 0, 0)
        yield f"less along {dim}", tensor.narrow(dim, 0, max(0, tensor.shape[dim] - 1))


def put(state: dict[str, Tensor], name: str, other: Tensor | None) -> None:
    if other is None:
        del state[name]
    else:
        state[name] = other


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, str]:
    model = MODELS[request.param]()
    folder = tmp_path_factory.mktemp("made") / "memory"
    tier = "tokens" if request.param.endswith("tokens") else "disk"
    cache = model.new_cache(tier, memory_folder=folder)
    with torch.no_grad():
        model.read(tokens(61, seed=1), cache)
    cache.save(folder)
    return model, folder, "disk" if tier == "tokens" else "host"


@torch.no_grad()
@pytest.mark.sampled(12)
def test_every_tensor_is_checked(made: tuple[Any, Path, str], tmp_path: Path) -> None:
    model, source, tier = made
    (path,) = source.glob("state-*")
    folder = shutil.copytree(source, tmp_path / "memory")
    wrong, refused = [], 0
    for name, tensor in safetensors.torch.load_file(path).items():
        for said, other in others(tensor):
            for file in (path.name, "memory.json"):
                shutil.copy(source / file, folder)
            sign_state(folder, partial(put, name=name, other=other))
            try:
                cache = model.load_cache(folder, tier)
            except ValueError as error:
                refused += 1
                if "\n" in str(error) or len(str(error)) > 900:
                    wrong.append(f"{name} {said}: {str(error)[:900]!r}")
                continue
            if torch.isnan(tensor if other is None else other.float()).any():
                wrong.append(f"{name} {said}: it is loaded")
            for keep in (True, False):
                branch = cache.branch()
                try:
                    if keep:
                        model(tokens(25, seed=2), past_key_values=branch)
                    else:
                        model.read(tokens(25, seed=2), branch)
                        model(tokens(1, seed=2), past_key_values=branch)
                except Exception as error:
                    wrong.append(f"{name} {said}: {type(error).__name__} {str(error)[:200]}")
    assert not wrong, "\n" + "\n".join(wrong)
    assert refused
