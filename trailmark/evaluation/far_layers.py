"""Which layers of a pretrained model look far: where it looks while it repeats sentences that stood far before.

A few do. In those alone chunks need to be chosen and kept: in the others a window serves as well, and costs less.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from trailmark import pretrained
from trailmark.data.corpus import standard_library_texts, tokenize
from trailmark.data.draws import Draws
from trailmark.data.needles.haystacks import Filler, Haystack
from trailmark.data.needles.tasks import make_task
from trailmark.models.conversion.base import ARGUMENT, Base, open_base
from trailmark.models.conversion.ours import is_ours

TEXTS, LENGTH, WINDOW = 8, 1024, 512  # texts of so many tokens, the sentence at least so far back
_OTHERS = 4  # sentences about other names in a text
_CHUNK = 32


class FarLayers(NamedTuple):
    """What was seen."""

    mass: list[float]
    """Of each layer: the share of the attention of its farthest-looking head that lies on the sentence. A mean over
    the answers' tokens and the texts. Of a layer with a window of its own 0."""
    right: float
    """The share of the texts whose answer the model gave."""

    def best(self, count: int) -> list[int]:
        """The ``count`` layers that look far most, in ascending order.

        Raises:
            ValueError: fewer layers than that see all of a text.
        """
        looking = sum(mass > 0 for mass in self.mass)
        if not 1 <= count <= looking:
            raise ValueError(
                f"far_layers: expected 1 to {looking}, the layers that see all of a text, got {count}."
            )
        return sorted(sorted(range(len(self.mass)), key=lambda n: (-self.mass[n], n))[:count])


def measure_far_layers(
    model: str | os.PathLike[str],
    texts: int = TEXTS,
    length: int = LENGTH,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FarLayers:
    """Let a pretrained model complete sentences that stood at least 512 tokens before, and see where it looks.

    Args:
        model: a folder with safetensors or one .gguf file, such a file, or a name on the hub, of a base that
            :func:`trailmark.models.conversion.convert.convert` takes. It is computed by transformers, on the CPU, in
            its own dtype; attention weights are made of the answers' tokens alone.
        texts: sources of Python's standard library with five such sentences each. length: their tokens, or
            as many more as the sentences need.
        progress: is called with the texts that are read and those in all.

    Raises:
        ValueError: no such model, or one that no conversion takes.
    """
    if is_ours(str(model)):
        raise ValueError(
            f"far_layers: expected a base of transformers', {str(model)!r} is a model of ours. Convert it back to one "
            "first (--to llama), or leave it out: layers that have a window keep it."
        )
    base = open_base(model)
    tokenizer = pretrained.load_tokenizer(base.folder, ARGUMENT, **base.options)
    opened = _opened(base)
    total, right = np.zeros(opened.config.num_hidden_layers), 0
    for number, (ids, answer, needle) in enumerate(_texts(tokenizer, texts, length, seed)):
        mass, correct = _watched(opened, ids, answer, needle)
        total += mass
        right += correct
        progress(number + 1, texts)
    full = np.array([window is None for window in base.windows])
    return FarLayers((total / texts * full).tolist(), right / texts)


def _texts(tokenizer: Any, count: int, length: int, seed: int) -> Iterator[tuple[torch.Tensor, int, slice]]:
    """Texts [1, T], how many of their last tokens are the answer, and where the sentence stands that tells it."""
    task = make_task(tokenizer, "sentences", "single", 1, 1, _OTHERS, None, 1, True, None)
    filler = Filler(tokenize(standard_library_texts("haystack"), tokenizer), task.format.replaced)
    near = WINDOW // _CHUNK
    chunks = max(
        task.chunks(length, _CHUNK), task.least_chunks(_CHUNK) + near
    )  # sentences take longer in bytes
    length = max(length, (chunks + 1) * _CHUNK + task.sizes[1])
    for number in range(count):
        haystack = Haystack(filler, Draws(seed, number).below(len(filler)), chunks, _CHUNK)
        ((trial,),) = task.lay(haystack, length, chunks - near, [None], 1, seed, number).values()
        (question,), needle = trial.questions, trial.needles[0]
        whole = haystack.holding(trial.needles)[:].flatten().numpy()
        ids = torch.from_numpy(np.concatenate([whole, question.prompt, question.answer]))
        yield ids[None], len(question.answer), slice(needle.start, needle.stop)


def _opened(base: Base) -> Any:
    from transformers import AutoModelForCausalLM as Auto

    options = {"dtype": "auto", **base.options}
    if base.gguf is None:
        return pretrained.load_model(Auto, base.config, base.folder, ARGUMENT, **options)[0].eval()
    with pretrained.loading(ARGUMENT, f"cannot load {str(base.gguf)!r}"):
        return Auto.from_pretrained(str(base.folder), **pretrained.NO_CODE, **options).eval()


@torch.no_grad()
def _watched(model: Any, ids: torch.Tensor, answer: int, needle: slice) -> tuple[Any, bool]:
    """Each layer's mass [layers] on the needle, and whether the answer was the likeliest, token by token."""
    before = ids.shape[1] - answer - 1  # the tokens from here on predict the answer
    model.set_attn_implementation("sdpa")
    past = model(ids[:, :before], use_cache=True, logits_to_keep=1).past_key_values
    model.set_attn_implementation("eager")  # which gives its weights
    out = model(ids[:, before:-1], past_key_values=past, output_attentions=True)
    # a layer with a window of its own keeps fewer keys: what it sees of the needle does not count
    mass = [weights[0, :, :, needle].float().sum(-1).mean(-1).max().item() for weights in out.attentions]
    return np.array(mass), bool((out.logits[0].argmax(-1) == ids[0, -answer:]).all())
