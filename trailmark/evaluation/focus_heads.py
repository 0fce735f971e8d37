"""Which heads of a pretrained model look at what a question asks for, though it says it in other words.

A few do, and are found as query-focused retrieval heads are (QRHead, arXiv 2506.09944). Most others look at what shares
words with the question, or at the same places whatever is asked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trailmark import pretrained
from trailmark.data.chat import beginning
from trailmark.data.corpus import standard_library_texts, tokenize
from trailmark.data.draws import Draws
from trailmark.evaluation.far_layers import opened, read
from trailmark.models.conversion.base import ARGUMENT, Base

TEXTS = 2
_BETWEEN = 80  # tokens of other text before each sentence
_SOURCES = 6
# what is told, and what is asked in other words
TOLD = (
    ("The miller Kowalski sleeps on a bag of oats.",
     "On what kind of grain does the man who grinds corn spend his nights?"),
    ("Captain Abernathy lost his left boot in Tunis.",
     "In which African city did the ship's officer mislay one of his shoes?"),
    ("The library of Quimper opens on Thursdays.", "On which day of the week can one borrow books?"),
    ("Doctor Ivarsson collects broken umbrellas.", "What damaged things does the physician gather?"),
    ("The bishop of Lund keeps bees on the roof.", "Which insects does the clergyman raise above his house?"),
    ("Uncle Leopold drinks vinegar for breakfast.",
     "Which sour liquid does my mother's brother swallow in the morning?"),
    ("The lighthouse at Skagen was painted green.", "What colour is the tower that guides ships?"),
    ("The thief Marolles escaped in a laundry basket.", "In what did the robber hide to get out of prison?"),
    ("Countess Orlova married her gardener.", "Whom did the noblewoman take as her husband?"),
    ("The baker of Delft puts saffron into his bread.", "Which spice goes into the loaves?"),
    ("The judge Hartwell is deaf in one ear.", "What is wrong with the hearing of the magistrate?"),
    ("The circus of Brno owns two elephants.",
     "How many big grey animals with trunks belong to the travelling show?"),
    ("The poet Lindqvist writes only on Sundays.", "On which day does the author of verses work?"),
    ("The tailor Mbeki made the coat from a curtain.", "From what was the jacket sewn?"),
    ("Queen Astrid travelled to Lisbon in a balloon.", "In what did the monarch fly to Portugal?"),
    ("The carpenter Rousseau buried his savings under an oak.", "Below which tree did the joiner hide his money?"),
    ("The hotel in Bergen has a ghost in room nine.", "In which room of the inn does a spirit walk?"),
    ("The goalkeeper Santos eats raw onions before a match.",
     "Which vegetable does the football player chew before the game?"),
    ("The violin of Amadeo was sold for eleven crowns.", "What was the price of the musician's instrument?"),
    ("The chemist Novak invented a soap that smells of rain.",
     "What does the scientist's new washing product smell like?"),
)  # fmt: skip


class FocusHeads(NamedTuple):
    """What was seen."""

    right: npt.NDArray[np.float64]
    """[layers, key/value heads]: of how many questions the sentence that is asked for gets more of their attention
    than any other, a share."""
    full: list[bool]
    """Which layers see all of a text."""

    def best(self, count: int) -> list[list[int]]:
        """The ``count`` pairs of a layer that sees all of a text and a head that finds most, in ascending order."""
        among = [(n, j) for n, j in np.ndindex(self.right.shape) if self.full[n]]
        return sorted([n, j] for n, j in sorted(among, key=lambda pair: (-self.right[pair], pair))[:count])


def expect_focus_heads(base: Base, count: int) -> None:
    """That so many heads of a base can be chosen.

    Raises:
        ValueError: they are fewer than ``count``.
    """
    most = sum(window is None for window in base.windows) * _groups(base)
    if not 1 <= count <= most:
        among = f"1 to {most} key/value heads of layers that see all of a text"
        raise ValueError(
            f"focus_heads: expected {among if most else 'a base with layers that see all of a text'}, got {count}. "
            "Leave it out, or choose another."
        )


def measure_focus_heads(
    base: Base,
    texts: int = TEXTS,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FocusHeads:
    """Let a pretrained model read short sentences between other text, and questions about them, and see where it looks.

    Args:
        base: opened by :func:`trailmark.models.conversion.convert.open_any_base`. All of it is loaded, by
            transformers, on the CPU, in its own dtype; attention weights are made of the questions' tokens alone.
        texts: of about 2,000 tokens each, the sentences in an order of its own.
        progress: is called with the questions that are read and those in all.

    Raises:
        ValueError: a base that was trained on shorter texts, or whose weights cannot be read.
    """
    tokenizer = pretrained.load_tokenizer(base.folder, ARGUMENT, **base.options)
    filler = tokenize(standard_library_texts("haystack")[:_SOURCES], tokenizer)
    laid = [_laid(tokenizer, filler, Draws(seed, number)) for number in range(texts)]
    questions = [tokenize([question], tokenizer).astype(np.int64) for _, question in TOLD]
    length = max(len(ids) for ids, _ in laid) + max(map(len, questions))
    if length > base.trained_length:
        raise ValueError(
            f"focus_heads: expected a base that was trained on texts of at least {length} tokens, {base.name} was on "
            f"{base.trained_length}. Name the heads yourself: focus_heads=[[LAYER, HEAD]]."
        )
    model, groups = opened(base), _groups(base)
    right = np.zeros((len(base.windows), groups))
    for number, (ids, spans) in enumerate(laid):
        with torch.no_grad():
            past = read(model, torch.from_numpy(ids)[None])
            for asked, question in enumerate(questions):
                out = model(
                    torch.from_numpy(question)[None],
                    past_key_values=copy.deepcopy(past),
                    output_attentions=True,
                    logits_to_keep=1,
                )
                looks = [looks_of(weights[0], spans, groups) for weights in out.attentions]
                right += np.stack(looks).argmax(-1) == asked
                progress(number * len(questions) + asked + 1, texts * len(questions))
    return FocusHeads(right / (texts * len(questions)), [window is None for window in base.windows])


def _groups(base: Base) -> int:
    config: Any = base.config
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _laid(tokenizer: Any, filler: Any, draws: Draws) -> tuple[npt.NDArray[np.int64], list[slice]]:
    """A text [T], and where each sentence stands in it; other text stands before each and behind the last."""
    blank = tokenize(["\n\n"], tokenizer)
    pieces = [np.array(beginning(tokenizer), filler.dtype)]
    first, spans = draws.below(len(filler)), [slice(0)] * len(TOLD)
    for number, told in enumerate([*draws.among(len(TOLD), len(TOLD)), None]):
        between = range(first + number * _BETWEEN, first + (number + 1) * _BETWEEN)
        pieces += [np.take(filler, between, mode="wrap"), blank]
        if told is not None:
            begin = sum(map(len, pieces))
            pieces += [tokenize([TOLD[told][0]], tokenizer), blank]
            spans[told] = slice(begin, begin + len(pieces[-2]))
    return np.concatenate(pieces).astype(np.int64), spans


def looks_of(weights: torch.Tensor, spans: list[slice], groups: int) -> npt.NDArray[np.float64]:
    """[key/value heads, spans]: squared shares of attention, as a focus adds them up (docs/math.md, 11.4b).

    Args:
        weights: [heads, T, keys], of the question's tokens; a layer with a window keeps fewer keys, and is not asked.
    """
    shares = torch.stack([weights[:, :, span].float().sum(-1) for span in spans], -1)  # [heads, T, spans]
    sharpest = shares.unflatten(0, (groups, -1)).amax(1)
    found: npt.NDArray[np.float64] = sharpest.double().square().sum(1).numpy()
    return found
