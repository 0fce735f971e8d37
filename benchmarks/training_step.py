"""One training step of a DRT against the model with a window alone, of equal layers.

    python benchmarks/training_step.py            writes benchmarks/training_step.json

Forward with the loss, backward and AdamW, on one text; every size of the papers' models that is not named below is
their configuration's (vocabulary 50,257, window 512, 8 chunks read, 2 encoder layers). Rounds are interleaved: both
models take a step in each, medians are reported. On a CPU d = 512 and 4,096 tokens, in float32 and under bfloat16
autocast; on CUDA d = 768 and 16,384 tokens under bfloat16 autocast.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import tables
import torch

from trailmark.evaluation.record import environment
from trailmark.files import write_json
from trailmark.machine import start_again_set_up
from trailmark.models import (
    DRTConfig,
    DRTForCausalLM,
    SlidingWindowConfig,
    SlidingWindowForCausalLM,
    TrailmarkForCausalLM,
)

PARTS = ("forward", "backward", "optimizer", "step")
SIZES: dict[str, dict[str, int]] = {
    "cpu": {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "tokens": 4096},
    "cuda": {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "tokens": 16384},
}


def make(name: str, sizes: dict[str, Any], device: str) -> TrailmarkForCausalLM:
    torch.manual_seed(0)
    with torch.device(device):
        if name == "window":
            return SlidingWindowForCausalLM(SlidingWindowConfig(**sizes)).train()
        return DRTForCausalLM(DRTConfig(**sizes)).train()


class Steps:
    """Training steps of one model on one text, each part timed."""

    def __init__(self, name: str, sizes: dict[str, Any], tokens: int, device: str, dtype: str) -> None:
        self.model = make(name, sizes, device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.device, self.dtype = device, dtype
        random = torch.Generator().manual_seed(0)
        vocabulary = self.model.config.vocab_size
        self.ids = torch.randint(vocabulary, (1, tokens), generator=random).to(device)
        self.times: dict[str, list[float]] = {part: [] for part in PARTS}
        self.loss = float("nan")

    def run(self, keep: bool) -> None:
        """One step; ``keep`` its times."""
        seed = torch.tensor([len(self.times["step"])], device=self.device)
        began = self._now()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == "bfloat16"):
            loss = self.model(self.ids, labels=self.ids, noise_seed=seed).loss
        forward = self._now()
        loss.backward()
        backward = self._now()
        self.optimizer.step()
        self.optimizer.zero_grad()
        end = self._now()
        self.loss = float(loss.detach())
        if keep:
            spans = (forward - began, backward - forward, end - backward, end - began)
            for part, span in zip(PARTS, spans, strict=True):
                self.times[part].append(span)

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def compare(
    device: str,
    dtype: str,
    rounds: int = 5,
    warm_up: int = 1,
    **changes: Any,
) -> dict[str, Any]:
    """Steps of both models in turn; medians of the seconds of each part, and the ratio of the steps.

    Args:
        device: "cpu" or "cuda": also the sizes, which ``changes`` replaces: fields of the configurations (those
            that the window model lacks go to the DRT alone) and ``tokens``.
        dtype: "float32", or "bfloat16" for autocast over float32 weights.
    """
    sizes: dict[str, Any] = SIZES[device] | changes
    tokens = sizes.pop("tokens")
    own = SlidingWindowConfig().to_dict()
    shared = {name: size for name, size in sizes.items() if name in own}
    runs = {
        name: Steps(name, own, tokens, device, dtype) for name, own in (("window", shared), ("drt", sizes))
    }
    for number in range(warm_up + rounds):
        for run in runs.values():
            run.run(keep=number >= warm_up)
    configs = {name: run.model.config for name, run in runs.items()}
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "dtype": dtype,
        "tokens": tokens,
        "rounds": rounds,
        "sizes": {name: getattr(configs["drt"], name) for name in _SHOWN},
        "parameters": {n: sum(p.numel() for p in run.model.parameters()) for n, run in runs.items()},
        "loss": {name: run.loss for name, run in runs.items()},
        "seconds": {
            name: {part: statistics.median(run.times[part]) for part in PARTS} for name, run in runs.items()
        },
        "steps": {name: run.times["step"] for name, run in runs.items()},
        "flops_ratio": flops(configs["drt"], tokens) / flops(configs["window"], tokens),
    }
    # of one round: what slows the machine down for a while slows both down
    pairs = zip(runs["drt"].times["step"], runs["window"].times["step"], strict=True)
    result["ratio"] = statistics.median(drt / window for drt, window in pairs)
    return result


_SHOWN = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "vocab_size", "sliding_window", "chunk_size", "num_retrieved_chunks", "num_retrieval_groups",
    "num_encoder_layers",
)  # fmt: skip


def flops(config: Any, tokens: int) -> float:
    """Of a forward pass, by the matrix products; a backward pass takes twice as many."""
    E, H, J, D = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    layer = E * (H + 2 * J) * D + H * D * E + 3 * E * config.intermediate_size
    drt = isinstance(config, DRTConfig)
    S = config.chunk_size if drt else 0
    chunks = tokens // S if drt else 0
    positions = tokens + chunks
    seen = min(config.sliding_window, positions)
    total = positions * config.num_hidden_layers * (layer + 2 * seen * H * D) + tokens * E * config.vocab_size
    if drt:
        rows = chunks * (S + 1)
        total += rows * (config.num_encoder_layers * (layer + 2 * (S + 1) * H * D) + 2 * E * J * D)
        read = 2 * E * H * D + 2 * config.num_retrieved_chunks * S * H * D
        total += positions * config.num_upper_layers * read
    return 2.0 * total


def table(results: list[dict[str, Any]]) -> str:
    rows = [
        result
        | {"name": name, "own": seconds, "ratio": seconds["step"] / result["seconds"]["window"]["step"]}
        for result in results
        for name, seconds in result["seconds"].items()
    ]
    return tables.table(COLUMNS, rows)


COLUMNS: tables.Columns = {
    "model": "{name}",
    "dtype": "{dtype}",
    "d": "{sizes[hidden_size]}",
    "tokens": "{tokens:,}",
    **{part: f"{{own[{part}]:ms ,.0f}} ms" for part in PARTS},
    "of window only": "{ratio:.2f}x",
    "FLOPs": lambda row: f"{row['flops_ratio']:.2f}x" if row["name"] == "drt" else "1.00x",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None)
    parser.add_argument("--dtypes", default=None, help="as float32,bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=NUMBER", help="as tokens=1024")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    start_again_set_up()  # as `trailmark train` does
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtypes = (arguments.dtypes or ("bfloat16" if device == "cuda" else "float32,bfloat16")).split(",")
    changes = {name: int(number) for name, number in (item.split("=") for item in arguments.set)}
    results = [compare(device, dtype, arguments.rounds, **changes) for dtype in dtypes]
    write_json(arguments.output, {"environment": environment(), "results": results})
    print(table(results))
    print(f"Numbers: {arguments.output}")


if __name__ == "__main__":
    main()
