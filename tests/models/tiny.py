"""Tiny models in float64 with weights of a trained scale, and texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from trailmark.models import (
    BlockRecurrentConfig,
    BlockRecurrentForCausalLM,
    DRTConfig,
    DRTForCausalLM,
    HiLSConfig,
    HiLSForCausalLM,
    HSAConfig,
    HSAForCausalLM,
    LandmarkConfig,
    LandmarkForCausalLM,
    RPTConfig,
    RPTForCausalLM,
    SlidingWindowConfig,
    SlidingWindowForCausalLM,
    TrailmarkForCausalLM,
)
from trailmark.models.configuration import TrailmarkConfig

Model = TypeVar("Model", bound=TrailmarkForCausalLM)
EXACT = 1e-10  # guarantee 7
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 7,
}
# RoPE beyond a trained length, so short that few positions are inside
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 4.0}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
# what pretrained weights ask for
PRETRAINED: dict[str, Any] = {
    "window_position": "rope",
    "head_dim": 6,
    "attention_bias": True,
    "qk_norm": "head",
    "rope_scaling": YARN,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
TIERS = ("device", "host", "disk")  # that keep keys and values
# S + 1 = 5 positions a chunk. The lower layers, then the upper ones of all groups:
LAYERS = {1: (1, 2), 2: (1, 4), 3: (2, 3)}


def _variant(
    groups: int, rope: int, residual: int, off_by_one: int, projections: int, exclude: int
) -> dict[str, Any]:
    return {
        "groups": groups,
        "window_position": "rope" if rope else "alibi",
        "residual_gca": bool(residual),
        "softmax_off_by_one": bool(off_by_one),
        "retrieval_projections": bool(projections),
        "exclude_visible_chunks": bool(exclude),
        # one that shows whole chunks, so that there is something to exclude
        "sliding_window": 15 if exclude else 7,
    }


# Every pair of values of two options occurs in some row.
VARIANTS = [
    _variant(1, 0, 1, 1, 0, 1),
    _variant(1, 1, 0, 0, 1, 0),
    _variant(2, 0, 0, 0, 0, 1),
    _variant(2, 1, 1, 1, 1, 0),
    _variant(3, 0, 1, 0, 0, 0),
    _variant(3, 0, 1, 1, 1, 1),
    _variant(3, 1, 0, 1, 0, 1),
]


def variant_name(options: dict[str, Any]) -> str:
    on = [name for name, value in options.items() if value is True]
    on += ["hidden"] * (not options.get("landmarks_as_keys", True))
    on += [f"{options.get('num_sinks')}-sinks"] * ("num_sinks" in options)
    on += ["beside-window"] * (options.get("virtual_key") == "window")
    on += ["mean"] * (options.get("chunk_summary") == "mean")
    on += [f"recency-{options.get('retrieval_recency')}"] * ("retrieval_recency" in options)
    on += [f"kv-per-{options.get('memory_kv')}"] * ("memory_kv" in options)
    on += ["asks-as-chunk"] * (options.get("retrieval_query") == "chunk")
    on += ["next"] * (options.get("memory_values") == "next")
    return "-".join([f"{options['groups']}", options["window_position"], *on])


# what a pretrained base needs: windows of tokens alone, with the first of them
VARIANTS += [
    _variant(2, 1, 0, 1, 1, 0) | {"landmarks_as_keys": False, "num_sinks": 2, "max_sink_distance": 20},
    _variant(1, 0, 1, 0, 1, 1) | {"landmarks_as_keys": False, "num_sinks": 3},
    _variant(1, 1, 1, 1, 1, 0) | {"num_sinks": 6},
    _variant(2, 1, 1, 1, 1, 0) | {"memory_kv": "group", "memory_values": "next"},
    _variant(2, 0, 0, 1, 1, 0) | {"memory_kv": "layer", "retrieval_query": "chunk"},
    _variant(2, 1, 1, 1, 1, 0) | {"virtual_key": "window", "landmarks_as_keys": False, "num_sinks": 2},
    _variant(1, 1, 0, 1, 1, 1) | {"virtual_key": "window", "memory_kv": "layer"},
    _variant(2, 1, 1, 1, 0, 1) | {"retrieval_recency": 1.5, "chunk_summary": "mean"},
]


DRT_VARIANTS = pytest.mark.parametrize("options", VARIANTS, ids=variant_name)


def drt_config(groups: int = 1, **changes: Any) -> DRTConfig:
    lower, upper = LAYERS[groups]
    sizes = SIZES | {
        "num_hidden_layers": lower + upper,
        "num_lower_layers": lower,
        "num_retrieval_groups": groups,
        "num_retrieved_chunks": 3,
        "num_encoder_layers": 1,
        "chunk_size": 4,
    }
    return DRTConfig(**(sizes | changes))


def window_config(**changes: Any) -> SlidingWindowConfig:
    return SlidingWindowConfig(**(SIZES | {"num_hidden_layers": 3} | changes))


def landmark_config(**changes: Any) -> LandmarkConfig:
    """Chunks of 4 and their landmark, 3 of the memory, cells of 11 tokens: ends of cells and chunks meet rarely."""
    sizes = SIZES | {
        "sliding_window": None,
        "num_hidden_layers": 3,
        "chunk_size": 4,
        "num_retrieved_chunks": 3,
        "local_length": 11,
        "max_position_embeddings": 1000,
    }
    return LandmarkConfig(**(sizes | changes))


def hils_config(**changes: Any) -> HiLSConfig:
    """Chunks of 4, 3 of them read beside a window that ends inside one."""
    sizes = SIZES | {"num_hidden_layers": 3, "chunk_size": 4, "num_retrieved_chunks": 3}
    return HiLSConfig(**(sizes | changes))


def hsa_config(groups: int = 2, **changes: Any) -> HSAConfig:
    """Chunks of 4, 3 of them read by each token; one key/value head of what is read, two of windows."""
    lower, upper = LAYERS[groups]
    sizes = SIZES | {
        "num_hidden_layers": lower + upper,
        "num_lower_layers": lower,
        "num_retrieval_groups": groups,
        "num_retrieved_chunks": 3,
        "num_memory_heads": 1,
        "retrieval_size": 12,
        "chunk_size": 4,
    }
    return HSAConfig(**(sizes | changes))


def block_recurrent_config(**changes: Any) -> BlockRecurrentConfig:
    """Blocks of 5, 3 states in the second of 4 layers: a window shows more than a block, and ends inside one."""
    sizes = SIZES | {"num_hidden_layers": 4, "recurrent_layer": 2, "block_size": 5, "num_states": 3}
    return BlockRecurrentConfig(**(sizes | changes))


def _made(kind: type[Model], config: TrailmarkConfig, seed: int) -> Model:
    model = kind(config).double().eval()
    draw_weights(model, seed)
    return model


def drt(groups: int = 1, seed: int = 0, **changes: Any) -> DRTForCausalLM:
    return _made(DRTForCausalLM, drt_config(groups, **changes), seed)


def window_model(seed: int = 0, **changes: Any) -> SlidingWindowForCausalLM:
    return _made(SlidingWindowForCausalLM, window_config(**changes), seed)


def landmark(seed: int = 0, **changes: Any) -> LandmarkForCausalLM:
    return _made(LandmarkForCausalLM, landmark_config(**changes), seed)


def hils(seed: int = 0, **changes: Any) -> HiLSForCausalLM:
    return _made(HiLSForCausalLM, hils_config(**changes), seed)


def hsa(groups: int = 2, seed: int = 0, **changes: Any) -> HSAForCausalLM:
    return _made(HSAForCausalLM, hsa_config(groups, **changes), seed)


def block_recurrent(seed: int = 0, **changes: Any) -> BlockRecurrentForCausalLM:
    return _made(BlockRecurrentForCausalLM, block_recurrent_config(**changes), seed)


EACH_MODEL = pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda **kw: drt(2, **kw), id="drt"),
        pytest.param(window_model, id="window"),
        pytest.param(lambda **kw: hils(**{"num_sinks": 2, "far_position": "window"} | kw), id="hils"),
        pytest.param(lambda **kw: hsa(**{"num_sinks": 2} | kw), id="hsa"),
        pytest.param(
            lambda **kw: block_recurrent(**{"block_size": 4} | kw),
            id="block-recurrent",
            marks=pytest.mark.slow,
        ),
    ],
)


class TokenCounter:
    """A chunk embedder: how often each token comes; what asks counts a token once, and some weigh more than others."""

    def __init__(self, size: int = 50) -> None:
        self.size, self.fingerprint = size, f"counts of {size}"

    def __call__(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        rows = [row[:n] for row, n in zip(ids.tolist(), lengths.tolist(), strict=True)]
        queries, keys = zip(*map(self.vectors, rows), strict=True)
        return torch.tensor(queries), torch.tensor(keys)

    def vectors(self, chunk: list[int]) -> tuple[list[float], list[float]]:
        # quarters: sums of their products are exact in any order
        query = [(1 + i % 7) / 4 if i in chunk else 0.0 for i in range(self.size)]
        return query, [chunk.count(i) / 4 for i in range(self.size)]


def rpt_config(**changes: Any) -> RPTConfig:
    """Chunks of 4, 2 of them read: a window that shows more than a chunk, and ends inside one."""
    sizes = SIZES | {
        "num_hidden_layers": 4,
        "num_lower_layers": 1,
        "num_encoder_layers": 1,
        "num_retrieved_chunks": 2,
        "chunk_size": 4,
    }
    return RPTConfig(**(sizes | changes))


def rpt(seed: int = 0, **changes: Any) -> RPTForCausalLM:
    model = RPTForCausalLM(rpt_config(**changes)).double().eval()
    draw_weights(model, seed)
    if model.config.retriever == "encoder":
        model.embedder = TokenCounter()
    return model


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int) -> None:
    """Large enough that what is selected, and every layer, shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if name.endswith("norm.weight"):
            drawn = 1 + 0.2 * drawn
        elif parameter.dim() == 2 and "embed" not in name:
            drawn = drawn * 1.5 * parameter.shape[1] ** -0.5
        parameter.copy_(drawn)


def tokens(length: int, batch: int = 1, seed: int = 0, vocab: int = 50) -> Tensor:
    """[B, T]"""
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(1000 + seed))


def early(length: int, seed: int = 0, share: float = 0.2, batch: int = 1) -> Tensor:
    """bool [B, T]: where landmarks stand early."""
    return torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) < share


def name_of(case: dict[str, Any]) -> str:
    """Of the case of a test."""
    return "-".join(str(value) for value in case.values())


def pad(rows: Sequence[Tensor], side: str = "left", extra: int = 0) -> Tensor:
    """Rows [T_b] as [B, T] with zeros at one side; ``extra`` columns are of no row."""
    width = max(map(len, rows)) + extra
    out = rows[0].new_zeros(len(rows), width)
    for b, row in enumerate(rows):
        out[b, place(len(row), width, side)] = row
    return out


def padded(lengths: Sequence[int], side: str = "left", extra: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and mask of texts of these lengths; row b is ``tokens(length, seed=b)``."""
    texts = [tokens(n, seed=b)[0] for b, n in enumerate(lengths)]
    return pad(texts, side, extra), pad([torch.ones_like(text) for text in texts], side, extra)


def place(length: int, width: int, side: str) -> slice:
    """Where a row's own columns stand."""
    return slice(width - length, width) if side == "left" else slice(0, length)


def chunk_lengths(marks: Sequence[bool], chunk_size: int) -> tuple[list[int], bool]:
    """Of a text with early landmarks after the tokens marked: tokens of each chunk, and if the last is closed."""
    lengths, n = [], 0
    for early in marks:
        n += 1
        if n == chunk_size or early:
            lengths.append(n)
            n = 0
    return [*lengths, n] if n else lengths, n == 0


@torch.no_grad()
def logits_of(model: TrailmarkForCausalLM, ids: Tensor, **arguments: Any) -> Tensor:
    return model(ids, **arguments).logits


def split(ids: Tensor, pieces: Sequence[int]) -> tuple[Tensor, ...]:
    """[B, T] in pieces of these lengths, over and over until the end."""
    lengths: list[int] = []
    while (left := ids.shape[1] - sum(lengths)) > 0:
        lengths.append(min(left, pieces[len(lengths) % len(pieces)]))
    return ids.split(lengths, dim=1)


def assert_same(ours: Tensor, exact: Tensor) -> None:
    """Equal by guarantee 7 in float64."""
    assert ours.dtype == exact.dtype == torch.float64
    assert ours.shape == exact.shape
    assert ours.numel() == 0 or (ours - exact).abs().max() <= EXACT
