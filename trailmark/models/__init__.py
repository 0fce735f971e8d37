"""The models, registered with transformers' Auto classes."""

from trailmark.models.block_recurrent import BlockRecurrentForCausalLM
from trailmark.models.block_recurrent_config import BlockRecurrentConfig
from trailmark.models.causal_lm import CausalLMOutput, TrailmarkForCausalLM
from trailmark.models.configuration import TrailmarkConfig
from trailmark.models.drt import DRTForCausalLM
from trailmark.models.drt_config import DRTConfig
from trailmark.models.landmark import LandmarkForCausalLM
from trailmark.models.landmark_config import LandmarkConfig
from trailmark.models.registry import MODELS, architectures, register, short_name
from trailmark.models.rpt import RPTForCausalLM
from trailmark.models.rpt_config import RPTConfig
from trailmark.models.sliding_window import SlidingWindowForCausalLM
from trailmark.models.sliding_window_config import SlidingWindowConfig

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
