"""RoPE beyond the length that a model was trained at: which frequencies its positions turn with, and their factor.

The keys and the arithmetic are those of transformers (``modeling_rope_utils``), in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trailmark.untrusted import brief

# of each rope_type: the keys that it must have, and those that it may have
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
}


ROPE_TYPES = tuple(_KEYS)
"""Of transformers, that ``rope_scaling`` may name."""
_KEYS["in_range"] = (("turns", "original_max_position_embeddings"), ())
Rope = float | tuple[float, tuple[tuple[str, Any], ...]]
"""``rope_theta``; with a ``rope_scaling``, both. Hashable, as tables are kept by it, and plain, for torch.compile."""


def rope_of(theta: float, scaling: Mapping[str, Any] | None) -> Rope:
    """What the two fields of a configuration say together."""
    return theta if scaling is None else (theta, tuple(sorted(scaling.items())))


def inverse_frequencies(head_dim: int, rope: Rope) -> Tensor:
    """[D / 2] in float64: by what angle a position turns the neighbours (x_2i, x_2i+1) of a head.

    "linear" divides all by ``factor``. "llama3" leaves the short waves, divides the long ones and goes from one to the
    other between. "yarn" (arXiv 2309.00071, Sec. 3.2) does so by the turns that a wave makes in the trained length.
    "in_range" (HiLS, arXiv 2607.02980) leaves the waves that make so many ``turns`` in the trained length, and lets
    positions turn no other pair.
    """
    if not isinstance(rope, tuple):
        return rope ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    theta, scaling = rope[0], dict(rope[1])
    plain = inverse_frequencies(head_dim, theta)
    if scaling["rope_type"] == "in_range":
        least = 2 * math.pi * scaling["turns"] / scaling["original_max_position_embeddings"]
        return plain.masked_fill(plain < least, 0)
    divided = plain / scaling["factor"]
    if scaling["rope_type"] == "linear":
        return divided
    trained = scaling["original_max_position_embeddings"]
    if scaling["rope_type"] == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = trained * plain / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    else:
        kept = 1 - _ramp(head_dim, theta, trained, scaling)
    return (1 - kept) * divided + kept * plain


def _ramp(head_dim: int, theta: float, trained: float, scaling: Mapping[str, Any]) -> Tensor:
    """[D / 2] from 0, for pairs that turn ``beta_fast`` times in the trained length or more, to 1, ``beta_slow``."""

    def pair(turns: float) -> float:
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(scaling.get("beta_fast") or 32), pair(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    return ((torch.arange(head_dim // 2, dtype=torch.float64) - first) / (last - first)).clamp(0, 1)


def attention_factor(scaling: Mapping[str, Any] | None) -> float:
    """What the rotated queries and keys are multiplied by, each of them; 1 but for "yarn"."""
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    if (given := scaling.get("attention_factor")) is not None:
        return float(given)

    def scale(weight: float) -> float:
        factor: float = scaling["factor"]
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    weight, weight_of_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return scale(weight) / scale(weight_of_all) if weight and weight_of_all else scale(1.0)


def expect_scaling(scaling: Mapping[str, Any], theta: float) -> None:
    """Raise a ValueError that names the key of ``rope_scaling`` that is missing, unknown or has another value."""
    kind = scaling.get("rope_type")
    if not isinstance(kind, str) or kind not in _KEYS:
        known = ", ".join(map(repr, _KEYS))
        raise ValueError(
            f"rope_scaling: expected a rope_type out of {known}, or None for RoPE without scaling, got {brief(kind)}."
        )
    required, optional = _KEYS[kind]
    for key in required:
        if scaling.get(key) is None:
            raise ValueError(f"rope_scaling: expected {key} with rope_type {kind!r}, got none.")
    for key, value in scaling.items():
        if key == "rope_type":
            continue
        if key not in required + optional:
            told = " The base of the angles is the field rope_theta." if key == "rope_theta" else ""
            raise ValueError(
                f"rope_scaling: expected {', '.join(required + optional)} with rope_type {kind!r}, got "
                f"{brief(key)}.{told}"
            )
        _expect_value(key, value, key in optional)
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        raise ValueError(
            "rope_scaling: expected high_freq_factor above low_freq_factor, got "
            f"{scaling['high_freq_factor']} and {scaling['low_freq_factor']}."
        )
    if kind == "yarn" and theta <= 1:
        raise ValueError(f"rope_theta: expected more than 1 with rope_type 'yarn', got {theta}.")
    if kind == "yarn" and (scaling.get("beta_fast") or 32) < (scaling.get("beta_slow") or 1):
        raise ValueError(
            "rope_scaling: expected beta_fast of at least beta_slow, got "
            f"{scaling.get('beta_fast') or 32} and {scaling.get('beta_slow') or 1}."
        )


def _expect_value(key: str, value: Any, optional: bool) -> None:
    if optional and value is None:
        return
    if key == "truncate":
        fits, expected = isinstance(value, bool), "true or false"
    else:
        number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e30
        least = 1 if key in ("factor", "original_max_position_embeddings") else 0
        positive = key != "mscale" and key != "mscale_all_dim"
        fits = number and value >= least and (value > 0 or not positive)
        expected = "1 or more" if least else "a positive number" if positive else "0 or more"
    if not fits:
        raise ValueError(f"rope_scaling: expected {expected} for {key}, got {brief(value)}.")
