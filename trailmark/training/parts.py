"""Which parts of a model are trained: all, or what a pretrained base lacks; and adapters for what is not."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn

from trailmark.models import TrailmarkForCausalLM
from trailmark.models.conversion.additions import Change
from trailmark.training.config import Train, TrainingConfig
from trailmark.training.tensors import unwrapped_name

_ADAPTER = "lora"  # peft's name of ours
_ADDITIONS = ("retriever", "additions")
_TRAINED = {
    "retriever": ("retriever",),
    "additions": _ADDITIONS,
    "additions_and_upper": (*_ADDITIONS, "upper"),
    "all": (*_ADDITIONS, "upper", "rest"),
}


@dataclass(frozen=True)
class Parts:
    """What is trained of a model, and how large its adapters are."""

    train: Train = "all"
    lora_rank: int = 0
    lora_alpha: int = 16

    @classmethod
    def of(cls, settings: TrainingConfig) -> Self:
        """Those of a run.

        Raises:
            ValueError: adapters are wanted, and peft is not installed.
        """
        if settings.lora_rank and importlib.util.find_spec("peft") is None:
            raise ValueError(
                f"training.lora_rank: expected 0 without the package peft, got {settings.lora_rank}. pip install "
                "trailmark[convert]"
            )
        return cls(settings.train, settings.lora_rank, settings.lora_alpha)

    def apply(self, model: TrailmarkForCausalLM) -> None:
        """Let a model's other weights be as they are, and give the matrices among them in layers adapters.

        Raises:
            ValueError: the model has no weights to train.
        """
        if self.train == "all":
            return
        trained = _TRAINED[self.train]
        frozen = [name for name, _ in model.named_parameters() if model.part_of(name) not in trained]
        if self.lora_rank:
            _inject(model, frozen, self.lora_rank, self.lora_alpha)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_adapter(name) or model.part_of(base_name(name)) in trained)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(
                f"training.train: expected a part that the model has weights of, got {self.train}, of which it has "
                "none as it is configured. Train additions or all."
            )


WHOLE = Parts()
"""All of a model is trained."""


def is_adapter(name: str) -> bool:
    """Whether a parameter of that name is an adapter's."""
    return ".lora_A." in name or ".lora_B." in name


def base_name(name: str) -> str:
    """The name that a parameter has in a model without adapters and wrappers."""
    return unwrapped_name(name).replace(".base_layer.", ".")


def rate_factor(model: Any, settings: TrainingConfig, name: str) -> float:
    """What the learning rates of a model's parameter are multiplied by."""
    part = _part_of(model, name)
    factor = settings.addition_learning_rate_factor if part in _ADDITIONS else 1.0
    return factor * settings.retriever_learning_rate_factor if part == "retriever" else factor


def _part_of(model: Any, name: str) -> str:
    """Of a parameter; the model may be wrapped, or none of ours."""
    part_of = getattr(getattr(model, "module", model), "part_of", None)
    return "rest" if part_of is None else str(part_of(base_name(name)))


def _inject(model: TrailmarkForCausalLM, frozen: list[str], rank: int, alpha: int) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    layers = {id(module) for layer in model.split_layers() for module in layer.modules()}
    matrices = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) in layers and f"{name}.weight" in frozen
    ]
    settings = LoraConfig(r=rank, lora_alpha=alpha, target_modules=matrices, lora_dropout=0.0, bias="none")
    inject_adapter_in_model(settings, model, adapter_name=_ADAPTER)


# --- saving ------------------------------------------------------------------------------------------------------


def has_adapters(model: nn.Module) -> bool:
    return any(is_adapter(name) for name, _ in model.named_parameters())


def merged(model: nn.Module, weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights of a plain model that computes what one with adapters does, and beside them what is lost in it.

    Args:
        model: with adapters, whole or in shards: their factors are its own.
        weights: all of its state, whole.

    Returns:
        The state of a model without adapters; and the matrices that were merged, as they were, with their adapters,
        all by the names that they have in ``model``.
    """
    kept = {name: x for name, x in weights.items() if ".base_layer." in name or is_adapter(name)}
    plain = _without_adapters(weights)
    for name, change in _changes(model, weights).items():
        plain[name] = change.added_to(plain[name])
    return plain, kept


def learned(model: nn.Module, weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Change]]:
    """What a model has beside the weights of its base, which are not trained: :class:`Additions` are made of it.

    Args:
        model, weights: as :func:`merged` takes them.

    Returns:
        Tensors that are trained, or that the base has not, and what adapters add, by the names of a plain model.
    """
    trained = {base_name(name) for name, p in model.named_parameters() if p.requires_grad}
    own = _without_adapters(weights)
    whole = {name: x for name, x in own.items() if name in trained or _part_of(model, name) in _ADDITIONS}
    return whole, _changes(model, weights)


def _without_adapters(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """By the names of a plain model; matrices that have adapters are as they were before."""
    return {base_name(name): x for name, x in weights.items() if not is_adapter(name)}


def _changes(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Change]:
    """What the adapters add to matrices, by the names of those in a plain model."""
    factors = {name: module.scaling[_ADAPTER] for name, module in _adapted(model)}
    found = {}
    for name in weights:
        if name.endswith(".base_layer.weight"):
            place = name.removesuffix(".base_layer.weight")
            down, up = (weights[f"{place}.lora_{side}.{_ADAPTER}.weight"] for side in "AB")
            found[base_name(name)] = Change(down, up, factors[place])
    return found


def _adapted(model: nn.Module) -> list[tuple[str, Any]]:
    """The modules with adapters, by the names that they have in the unwrapped model."""
    named = [(unwrapped_name(name), module) for name, module in model.named_modules()]
    return [(name, module) for name, module in named if isinstance(getattr(module, "scaling", None), dict)]
