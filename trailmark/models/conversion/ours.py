"""A model of ours with a window alone as a base: a base that was taught with some layers' windows becomes another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from trailmark import pretrained
from trailmark.files import read_json
from trailmark.models.conversion.additions import ADDITIONS, Additions
from trailmark.models.conversion.back import BACK, family_config, lacking, parts_of
from trailmark.models.conversion.base import ARGUMENT, Base, fields_of
from trailmark.models.conversion.tensors import SafetensorFiles, expect_tensors, pretrained_without_weights
from trailmark.models.size import without_weights
from trailmark.models.window.config import SlidingWindowConfig
from trailmark.trained import CONVERSION, base_length
from trailmark.untrusted import brief

_CARRIED = "num_sinks", "sliding_window", "layer_types"  # a Base says these itself


def is_folder_of_ours(model: str) -> bool:
    """Whether it is a folder with a model of ours that has a window alone."""
    found = read_json(Path(model) / "config.json", links=True)
    return isinstance(found, dict) and found.get("model_type") == SlidingWindowConfig.model_type


def as_base(model: str) -> Base:
    """Such a folder as a base of the first family that computes the same within each layer.

    Raises:
        ValueError: there is none, or nothing says for which length the weights were trained.
    """
    folder = Path(model)
    pretrained.expect_safetensors(folder, ARGUMENT)
    config, name = pretrained.load_config(folder, ARGUMENT), folder.resolve().name
    pretrained.expect_fits(config, folder, ARGUMENT)
    without = {
        to: {what: came for what, came in lacking(config, to).items() if what not in _CARRIED} for to in BACK
    }
    family = min(BACK, key=lambda to: len(without[to]))
    if without[family]:
        what, came = next(iter(without[family].items()))
        raise ValueError(
            f"{ARGUMENT}: expected layers as {', '.join(BACK[:-1])} or {BACK[-1]} has them, {name} has {what} = "
            f"{brief(came)}. Convert a model that came from one of them."
        )
    length = _trained_length(folder, config)
    if length is None:
        back = [to for to in BACK if not lacking(config, to)]
        raise ValueError(
            f"{ARGUMENT}: expected {CONVERSION} or {ADDITIONS} in {name}, which say how long the base's training "
            "texts were, got neither. "
            + (
                f"Convert it back first, with that length: --to {back[0]} max_position_embeddings=NUMBER."
                if back
                else "Convert the base that it came from."
            )
        )
    sinks = None
    if any(window is not None for window in config.windows):
        kept = {what: getattr(config, what) for what in ("num_sinks", "max_sink_distance")}
        sinks = kept if config.num_sinks else {}
    alike = family_config(config, family, length)
    return Base(name, folder, None, None, alike, fields_of(alike), tuple(config.windows), config, sinks)


def _trained_length(folder: Path, config: Any) -> int | None:
    """Of the base's texts: as its conversion said, before a training or after it; or as far as sinks may seem."""
    length = base_length(read_json(folder / CONVERSION, links=True))
    if length is None and (folder / ADDITIONS).exists():
        length = base_length({"base": Additions.read(folder / ADDITIONS).base})
    if length is None and config.num_sinks and config.max_sink_distance is not None:
        length = config.max_sink_distance + 1
    return length


class OurTensors:
    """The tensors of such a base under the names of transformers."""

    def __init__(self, base: Base) -> None:
        self._own = SafetensorFiles(base.folder, base.name)
        expect_tensors(self._own, without_weights(base.ours), base.name)
        self.files, self.dtype, self._parts = self._own.files, self._own.dtype, parts_of(base.ours)
        state = pretrained_without_weights(base.config, base.name).state_dict()
        self.shapes = {name: tuple(state[name].shape) for name in self._parts}

    def read(self, name: str) -> Tensor:
        return self._parts[name].make(self._own.read)
