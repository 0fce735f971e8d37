"""The models, registered with transformers' Auto classes."""

from trailmark.models.block_recurrent import BlockRecurrentForCausalLM
from trailmark.models.causal_lm import CausalLMOutput, TrailmarkForCausalLM
from trailmark.models.configuration import (
    BlockRecurrentConfig,
    DRTConfig,
    LandmarkConfig,
    RPTConfig,
    SlidingWindowConfig,
    TrailmarkConfig,
)
from trailmark.models.drt import DRTForCausalLM
from trailmark.models.landmark import LandmarkForCausalLM
from trailmark.models.registry import MODELS, architectures, register, short_name
from trailmark.models.rpt import RPTForCausalLM
from trailmark.models.sliding_window import SlidingWindowForCausalLM

for _model in (
    BlockRecurrentForCausalLM,
    DRTForCausalLM,
    LandmarkForCausalLM,
    RPTForCausalLM,
    SlidingWindowForCausalLM,
):
    register(_model.config_class, _model)

__all__ = [
    "MODELS",
    "BlockRecurrentConfig",
    "BlockRecurrentForCausalLM",
    "CausalLMOutput",
    "DRTConfig",
    "DRTForCausalLM",
    "LandmarkConfig",
    "LandmarkForCausalLM",
    "RPTConfig",
    "RPTForCausalLM",
    "SlidingWindowConfig",
    "SlidingWindowForCausalLM",
    "TrailmarkConfig",
    "TrailmarkForCausalLM",
    "architectures",
    "register",
    "short_name",
]
