"""Training losses to 8 digits: any change of the initialisation, the arithmetic or the noise shows here.

After a change that is meant, print the new lists and paste them below:

    PYTHONPATH=. python -m tests.models.test_golden
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.models.tiny import drt_config, hils_config, hsa_config, landmark_config, window_config
from trailmark.models import (
    DRTForCausalLM,
    HiLSForCausalLM,
    HSAForCausalLM,
    LandmarkForCausalLM,
    SlidingWindowForCausalLM,
    TrailmarkForCausalLM,
)
from trailmark.ops import fold_seed

STEPS, ROWS, LENGTH = 5, 2, 46


def train(make: Callable[[], TrailmarkForCausalLM]) -> list[float]:
    """Losses of some AdamW steps on the same two texts, in float64."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # drawn in float32, weights depend on the processor
    try:
        torch.manual_seed(0)
        model = make().train()
    finally:
        torch.set_default_dtype(default)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, betas=(0.9, 0.95), eps=1e-4)
    count = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)
    ids = (count * count + 3 * count // 7) % 50
    losses = []
    for step in range(STEPS):
        seeds = fold_seed(torch.arange(ROWS), step)
        loss = model(ids, labels=ids, noise_seed=seeds).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


FAN_IN = {"initialization": "fan_in", "logit_scale": 0.25}  # 16 ** -0.5
MODELS: dict[str, Callable[[], TrailmarkForCausalLM]] = {
    "drt": lambda: DRTForCausalLM(drt_config(2, **FAN_IN)),
    "drt, as published": lambda: DRTForCausalLM(drt_config(2, retrieval_projections=False)),
    "window": lambda: SlidingWindowForCausalLM(window_config(**FAN_IN)),
    "landmark": lambda: LandmarkForCausalLM(
        landmark_config(**FAN_IN, gate_probability=0.5, position_jump=9, landmark_loss="text")
    ),
    "hils": lambda: HiLSForCausalLM(hils_config(**FAN_IN, calibration_rank=2, num_sinks=2)),
    "moba": lambda: HiLSForCausalLM(hils_config(**FAN_IN, chunk_score="mean", chunk_weights="keys")),
    "hsa": lambda: HSAForCausalLM(hsa_config(**FAN_IN, num_sinks=2)),
    "hsa, stick-breaking": lambda: HSAForCausalLM(
        hsa_config(**FAN_IN, chunk_weights="stick_breaking", recency_decay=False)
    ),
}

# fmt: off
GOLDEN: dict[str, list[float]] = {
    "drt": [4.82365677, 3.78982026, 3.18174886, 2.77153926, 2.47094754],
    "drt, as published": [3.91972805, 3.77334722, 3.71157681, 3.60903327, 3.44607555],
    "window": [4.74377883, 3.97288439, 3.44891349, 3.09209338, 2.81224741],
    "landmark": [5.81241873, 5.01230277, 4.89785853, 4.42907081, 4.38854893],
    "hils": [4.81793570, 3.97682183, 3.43126315, 3.05790470, 2.77482384],
    "moba": [4.78113632, 4.05899221, 3.55974681, 3.20671558, 2.91344675],
    "hsa": [4.92932011, 3.78434992, 3.16114625, 2.75897498, 2.44905760],
    "hsa, stick-breaking": [4.88923230, 3.75688054, 3.13080361, 2.74627839, 2.43680417],
}
# fmt: on


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(4)
def test_training_losses(name: str) -> None:
    assert train(MODELS[name]) == pytest.approx(GOLDEN[name], rel=0, abs=1e-8)


if __name__ == "__main__":
    for name in MODELS:
        losses = ", ".join(f"{loss:.8f}" for loss in train(MODELS[name]))
        print(f'    "{name}": [{losses}],')
