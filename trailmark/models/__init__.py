"""The models, registered with transformers' Auto classes."""

from transformers import AutoConfig, AutoModelForCausalLM

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
from trailmark.models.rpt import RPTForCausalLM
from trailmark.models.sliding_window import SlidingWindowForCausalLM

MODELS: dict[str, type[TrailmarkForCausalLM]] = {
    model.config_class.model_type: model
    for model in (
        BlockRecurrentForCausalLM,
        DRTForCausalLM,
        LandmarkForCausalLM,
        RPTForCausalLM,
        SlidingWindowForCausalLM,
    )
}
for _name, _model in MODELS.items():
    AutoConfig.register(_name, _model.config_class, exist_ok=True)
    AutoModelForCausalLM.register(_model.config_class, _model, exist_ok=True)

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
]
