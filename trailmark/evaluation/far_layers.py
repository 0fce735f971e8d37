"""Which layers of a pretrained model look far: where it looks while it repeats sentences that stood far before.

A few do. In those alone chunks need to be chosen and kept: in the others a window serves as well, and costs less.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
import torch

from trailmark import pretrained
from trailmark.data.chat import beginning
from trailmark.data.corpus import standard_library_texts, tokenize
from trailmark.data.draws import Draws
from trailmark.data.needles.haystacks import Filler, Haystack
from trailmark.data.needles.tasks import make_task
from trailmark.models.conversion.base import ARGUMENT, Base, layer_kinds
from trailmark.models.conversion.ours import OurTensors
from trailmark.models.conversion.targets import WINDOW

TEXTS, LENGTH = 8, 1024  # so many texts of so many tokens, the sentence at least a WINDOW back
_OTHERS = 4  # sentences about other names in a text
_CHUNK, _SOURCES = 32, 20


class FarLayers(NamedTuple):
    """What was seen."""

    mass: list[float]
    """Of each layer: the share of the attention of its farthest-looking head that lies on the sentence. A mean over
    the answers' tokens and the texts."""
    full: list[bool]
    """Which layers see all of a text."""
    right: float
    """The share of the texts whose answer the model gave."""

    def best(self, count: int) -> list[int]:
        """The ``count`` layers of those that see all of a text that look far most, in ascending order."""
        among = [number for number, full in enumerate(self.full) if full]
        return sorted(sorted(among, key=lambda number: (-self.mass[number], number))[:count])


def layer_types(full: Collection[int], layers: int) -> str:
    """The field of a configuration, as key=value: of so many layers these see all of a text."""
    return f"layer_types={json.dumps(layer_kinds(None if n in full else 0 for n in range(layers)))}"


def expect_far_layers(base: Base, count: int) -> list[bool]:
    """Which layers of a base see all of a text.

    Raises:
        ValueError: they are fewer than ``count``.
    """
    full = [window is None for window in base.windows]
    if not 1 <= count <= sum(full):
        among = f"1 to {sum(full)}, for so many layers see all of a text" if any(full) else "a base"
        none = "" if any(full) else " some of whose layers see all of a text; none of this one does"
        raise ValueError(f"far_layers: expected {among}{none}, got {count}. Leave it out, or choose another.")
    return full


def measure_far_layers(
    base: Base,
    texts: int = TEXTS,
    length: int = LENGTH,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FarLayers:
    """Let a pretrained model complete sentences that stood at least 512 tokens before, and see where it looks.

    Args:
        base: opened by :func:`trailmark.models.conversion.convert.open_any_base`. All of it is loaded, by
            transformers, on the CPU, in its own dtype; attention weights are made of the answers' tokens alone.
        texts: sources of Python's standard library with five such sentences each. length: their tokens, or
            as many more as the sentences need.
        progress: is called with the texts that are read and those in all.

    Raises:
        ValueError: a base that was trained on shorter texts, or whose weights cannot be read.
    """
    tokenizer = pretrained.load_tokenizer(base.folder, ARGUMENT, **base.options)
    task = make_task(tokenizer, "sentences", "single", 1, 1, _OTHERS, None, 1, True, None)
    begin, near = tuple(beginning(tokenizer)), WINDOW // _CHUNK
    least = task.least_chunks(_CHUNK, len(begin)) + near  # sentences take longer in bytes
    chunks = max(task.chunks(length, _CHUNK), least)
    length = max(length, (chunks + 1) * _CHUNK + task.sizes[1])
    if length > base.trained_length:
        raise ValueError(
            f"far_layers: expected a base that was trained on texts of at least {length} tokens, which hold a sentence "
            f"{WINDOW} tokens back, {base.name} was on {base.trained_length}. Name the layers yourself, by layer_types."
        )
    model = _opened(base)
    filler = Filler(tokenize(standard_library_texts("haystack")[:_SOURCES], tokenizer), task.format.replaced)
    total, right = np.zeros(len(base.windows)), 0
    for number in range(texts):
        start = Draws(seed, number).below(len(filler))
        haystack = Haystack(filler, start, chunks, _CHUNK, begin=begin)
        ((trial,),) = task.lay(haystack, length, chunks - near, [None], 1, seed, number).values()
        (question,), needle = trial.questions, trial.needles[0]
        whole = haystack.holding(trial.needles)[:].flatten().numpy()
        ids = torch.from_numpy(np.concatenate([whole, question.prompt, question.answer]))
        mass, correct = watched(model, ids[None], len(question.answer), slice(needle.start, needle.stop))
        total += mass
        right += correct
        progress(number + 1, texts)
    return FarLayers((total / texts).tolist(), [window is None for window in base.windows], right / texts)


def _opened(base: Base) -> Any:
    """The model, by transformers."""
    from transformers import AutoModelForCausalLM as Auto

    options = {"dtype": "auto", **base.options}
    if base.ours is not None:
        tensors = OurTensors(base)
        model = Auto.from_config(base.config, dtype=tensors.dtype)
        model.load_state_dict({name: tensors.read(name) for name in tensors.shapes}, strict=False)
    elif base.gguf is None:
        model, _ = pretrained.load_model(Auto, base.config, base.folder, ARGUMENT, **options)
    else:
        with pretrained.loading(ARGUMENT, f"cannot load {str(base.gguf)!r}", pretrained.AGAIN):
            model = Auto.from_pretrained(str(base.folder), **pretrained.NO_CODE, **options)
    pretrained.expect_finite(model.named_parameters(), ARGUMENT, base.name)
    return model.eval()


@torch.no_grad()
def watched(model: Any, ids: torch.Tensor, answer: int, needle: slice) -> tuple[Any, bool]:
    """Where a model of transformers looks while it gives the answer that a text [1, T] ends with.

    Args:
        answer: how many of the last tokens it is. needle: the tokens that tell it.

    Returns:
        Each layer's mass on the needle [layers], and whether each token of the answer was the likeliest.
    """
    before = ids.shape[1] - answer - 1  # the tokens from here on predict the answer
    model.set_attn_implementation("sdpa")
    past = model(ids[:, :before], use_cache=True, logits_to_keep=1).past_key_values
    model.set_attn_implementation("eager")  # which gives its weights
    out = model(ids[:, before:-1], past_key_values=past, output_attentions=True)
    # a layer with a window of its own keeps fewer keys: its numbers are not asked for
    mass = [weights[0, :, :, needle].float().sum(-1).mean(-1).max().item() for weights in out.attentions]
    return np.array(mass), bool((out.logits[0].argmax(-1) == ids[0, -answer:]).all())
