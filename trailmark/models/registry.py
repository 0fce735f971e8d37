"""Which model class goes with which configuration: trailmark's own, and those that a user registers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import AutoConfig, AutoModelForCausalLM

if TYPE_CHECKING:
    from trailmark.models.causal_lm import TrailmarkForCausalLM
    from trailmark.models.configuration import TrailmarkConfig

_PREFIX = "trailmark_"

MODELS: dict[str, type[TrailmarkForCausalLM]] = {}
"""The model classes by ``model_type``. :func:`register` adds to it; nobody else changes it."""


def register(config_class: type[TrailmarkConfig], model_class: type[TrailmarkForCausalLM]) -> None:
    """Make an architecture known to trailmark's commands and to transformers' Auto classes.

    Its short name, as in ``model.architecture``, is its ``model_type`` without a leading "trailmark_".

    Args:
        config_class: with a ``model_type`` of its own.
        model_class: whose ``config_class`` this is. What trailmark needs to know of it beside its arithmetic it answers
            itself: :class:`trailmark.models.answers.ModelAnswers` has the questions, with defaults.

    Raises:
        ValueError: another architecture of that name, or a model class of another configuration.
    """
    name = config_class.model_type
    if model_class.config_class is not config_class:
        raise ValueError(
            f"model_class: expected one whose config_class is {config_class.__name__}, {model_class.__name__} has "
            f"{model_class.config_class.__name__}. Set config_class in its body."
        )
    taken = architectures().get(short_name(name), model_class)
    if taken is not model_class:
        raise ValueError(
            f"config_class: expected a model_type that is not taken, got {name!r}, which {taken.__name__} has. "
            "Choose another model_type."
        )
    AutoConfig.register(name, config_class, exist_ok=True)
    AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)
    MODELS[name] = model_class


def architectures() -> dict[str, type[TrailmarkForCausalLM]]:
    """The model classes by their short names, such as "drt"."""
    return {short_name(name): model for name, model in MODELS.items()}


def architectures_with(retriever: str) -> list[str]:
    """The short names of those that read, with this ``retriever``, chunks that come with the text."""
    return [
        name
        for name, model in architectures().items()
        if retriever in model.config_class.retrievers_with_neighbours()
    ]


def short_name(model_type: str) -> str:
    """A ``model_type`` as settings and messages write it."""
    return model_type.removeprefix(_PREFIX)
