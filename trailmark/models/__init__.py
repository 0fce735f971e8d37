"""The models, registered with transformers' Auto classes, and with them the tokenizer that lies beside most."""

import trailmark.byte_tokenizer  # noqa: F401 - it registers itself
from trailmark.models.block_recurrent.config import BlockRecurrentConfig
from trailmark.models.block_recurrent.model import BlockRecurrentForCausalLM
from trailmark.models.causal_lm import TrailmarkForCausalLM, is_ours
from trailmark.models.configuration import TrailmarkConfig
from trailmark.models.drt.config import DRTConfig
from trailmark.models.drt.model import DRTForCausalLM
from trailmark.models.hils.config import HiLSConfig
from trailmark.models.hils.model import HiLSForCausalLM
from trailmark.models.hsa.config import HSAConfig
from trailmark.models.hsa.model import HSAForCausalLM
from trailmark.models.landmark.config import LandmarkConfig
from trailmark.models.landmark.model import LandmarkForCausalLM
from trailmark.models.loss import BearingTokens
from trailmark.models.outputs import CausalLMOutput
from trailmark.models.registry import MODELS, architectures, architectures_with, register, short_name
from trailmark.models.rpt.config import RPTConfig
from trailmark.models.rpt.model import RPTForCausalLM
from trailmark.models.window.config import SlidingWindowConfig
from trailmark.models.window.model import SlidingWindowForCausalLM

for _model in (
    BlockRecurrentForCausalLM,
    DRTForCausalLM,
    HiLSForCausalLM,
    HSAForCausalLM,
    LandmarkForCausalLM,
    RPTForCausalLM,
    SlidingWindowForCausalLM,
):
    register(_model.config_class, _model)

__all__ = [
    "MODELS",
    "BearingTokens",
    "BlockRecurrentConfig",
    "BlockRecurrentForCausalLM",
    "CausalLMOutput",
    "DRTConfig",
    "DRTForCausalLM",
    "HSAConfig",
    "HSAForCausalLM",
    "HiLSConfig",
    "HiLSForCausalLM",
    "LandmarkConfig",
    "LandmarkForCausalLM",
    "RPTConfig",
    "RPTForCausalLM",
    "SlidingWindowConfig",
    "SlidingWindowForCausalLM",
    "TrailmarkConfig",
    "TrailmarkForCausalLM",
    "architectures",
    "architectures_with",
    "is_ours",
    "register",
    "short_name",
]
