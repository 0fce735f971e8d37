"""The same weights with another number of chunks to read; with none, retrieval is off, and the window (or cell) is all.

What retrieval is worth to a text is the difference between a model and :func:`without_retrieval` of it.
"""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from transformers import PreTrainedModel

Model = TypeVar("Model", bound=PreTrainedModel)


def without_retrieval(model: Model) -> Model:
    """:func:`with_retrieved` of no chunk: nothing of past chunks is read or kept.

    A Landmark model without a cache attends to a text whole, with retrieval off too: pass it a cache.
    """
    return with_retrieved(model, 0)


def with_retrieved(model: Model, count: int) -> Model:
    """A model of the same class over the same weights, none of them copied, with ``num_retrieved_chunks`` ``count``.

    It is in eval mode and for reading: a forward in training is refused where parts would get no gradient. Its caches
    are its own. It has no embedder; without chunks it needs none.

    Raises:
        ValueError: a model that retrieves nothing by its architecture, or one that holds other weights than its
            configuration describes (adapters, quantised ones); a count below 0.
    """
    kind = type(model)
    if not hasattr(model.config, "num_retrieved_chunks"):
        raise ValueError(
            f"model: expected one that retrieves (DRT, HiLS, HSA, RPT, Landmark Attention), got {kind.__name__}: there "
            "are no chunks to read more or less of. It predicts from its window and states alone; use it as it is."
        )
    config = copy.deepcopy(model.config)
    config.num_retrieved_chunks = count
    config.validate_architecture()
    with torch.device("meta"):
        other = kind(config)
    parts, own = dict(model.named_modules()), dict(other.named_modules())
    if parts.keys() != own.keys() or _names(model) != _names(other):
        wrong = sorted((parts.keys() ^ own.keys()) | (_names(model) ^ _names(other)))
        raise ValueError(
            f"model: expected a {kind.__name__} with the weights that its configuration describes, got one that "
            f"differs in {wrong[0]}. Merge adapters into it, or load it anew, first."
        )
    for name, part in own.items():
        # the parameters themselves: a tied weight stays one, and what is trained or moved is so for both
        part._parameters.update(parts[name]._parameters)
        part._buffers.update(parts[name]._buffers)
    other.generation_config = copy.deepcopy(model.generation_config)
    return other.eval()


def _names(model: torch.nn.Module) -> set[str]:
    named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {name for of in named for name, _ in of}
