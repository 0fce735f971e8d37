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

STEPS, ROWS, LENGTH = 20, 2, 46


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
    "drt": [
        4.82365677, 3.78982026, 3.18174886, 2.77153926, 2.47094754,
        2.19837442, 2.02019477, 1.83501172, 1.68421728, 1.55123677,
        1.44860266, 1.31093236, 1.19832507, 1.11031242, 1.02384569,
        0.93277718, 0.84789439, 0.78294253, 0.70864609, 0.64954344,
    ],
    "drt, as published": [
        3.91972805, 3.77334722, 3.71157681, 3.60903327, 3.44607555,
        3.30451052, 3.12443513, 2.97842233, 2.81002474, 2.63669926,
        2.45437045, 2.30084488, 2.13732314, 1.96963462, 1.85067605,
        1.67041668, 1.49151811, 1.37469348, 1.24917224, 1.09699343,
    ],
    "window": [
        4.74377883, 3.97288439, 3.44891349, 3.09209338, 2.81224741,
        2.57383018, 2.36330059, 2.17866828, 1.99988814, 1.85972972,
        1.73213725, 1.59812245, 1.49362696, 1.40532065, 1.31179835,
        1.21951431, 1.12771253, 1.04895832, 0.97284751, 0.89617827,
    ],
    "landmark": [
        5.81241873, 5.01230277, 4.89785853, 4.42907081, 4.38854893,
        4.24157739, 4.07295811, 3.89915072, 3.98411647, 3.71734849,
        3.70439638, 3.56777952, 3.59378896, 3.77742937, 3.19002138,
        3.70031377, 3.47344179, 3.09851123, 3.70250580, 3.41175861,
    ],
    "hils": [
        4.81793570, 3.97682183, 3.43126315, 3.05790470, 2.77482384,
        2.54471760, 2.35618891, 2.18990114, 2.04283107, 1.90722080,
        1.78212290, 1.65694495, 1.54430357, 1.45445625, 1.34910814,
        1.25683207, 1.16112102, 1.07325837, 0.98883089, 0.91242995,
    ],
    "moba": [
        4.78113632, 4.05899221, 3.55974681, 3.20671558, 2.91344675,
        2.67464273, 2.48776069, 2.30081094, 2.15112318, 2.01748611,
        1.87001112, 1.75838259, 1.64199315, 1.53882994, 1.44408892,
        1.34243861, 1.24343857, 1.15271854, 1.06293619, 0.98026612,
    ],
    "hsa": [
        4.92932011, 3.78434992, 3.16114625, 2.75897498, 2.44905760,
        2.21458490, 2.04153632, 1.84678099, 1.68756364, 1.54554642,
        1.46012218, 1.33807418, 1.23781749, 1.13341924, 1.03910704,
        0.94793892, 0.87046860, 0.81342318, 0.74691944, 0.68336148,
    ],
    "hsa, stick-breaking": [
        4.88923230, 3.75688054, 3.13080361, 2.74627839, 2.43680417,
        2.20233599, 2.00344338, 1.84033524, 1.66275627, 1.51931162,
        1.37855946, 1.27611690, 1.15935611, 1.07699930, 0.97510291,
        0.89828232, 0.82727864, 0.75928628, 0.69795957, 0.64315071,
    ],
}
# fmt: on


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(4)
def test_training_losses(name: str) -> None:
    assert train(MODELS[name]) == pytest.approx(GOLDEN[name], rel=0, abs=1e-8)


if __name__ == "__main__":
    for name in MODELS:
        print(f'    "{name}": [')
        losses = train(MODELS[name])
        for first in range(0, STEPS, 5):
            print("        " + " ".join(f"{loss:.8f}," for loss in losses[first : first + 5]))
        print("    ],")
