"""Does what a retriever learned help more, the more text there is; and more than layers in place of a memory?

    TRAILMARK_DATA=... python benchmarks/learning.py train --begin slowly --seeds 0
    TRAILMARK_DATA=... python benchmarks/learning.py train --begin additions --seeds 0
    TRAILMARK_DATA=... python benchmarks/learning_lengths.py [deepen measure rates] [--seeds 0 1] [--texts 6 5 4]

Writes benchmarks/learning_lengths.json. The same last tokens of a text are read after 1, 4 and 16 training lengths of
it: by a DRT with the chunks that it chooses and with others in their place, by its base with a window alone, and by
that base with as many parameters as the DRT (within 5%), in layers more that learned from as many tokens. A text is a
stretch of one chapter or book, or of modules one after another, for few are so long. Of each model the seeds are
measured that were trained. "rates": what the layers and the DRT whose additions learn give at other learning rates,
each seed by itself, on more texts, which are as long as those of the training. Stopped, the same command goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from common import keep, parameters
from learning_models import (
    FIT_STEPS,
    LENGTH,
    STEPS,
    WAYS,
    WINDOW,
    at_rate,
    learn,
    run_config,
    trained,
)  # fmt: skip
from pretrained_models import (
    STEP_TOKENS,
    UNSEEN,
    Losses,
    Text,
    chapters,
    converted,
    held_out_books,
    interval,
    opened,
    parser_of,
    run_parts,
    weights_of,
    window_fields,
)
from torch import nn
from training_text import train as train_run

from trailmark.data.corpus import load_tokenizer, read_text, standard_library_texts, tokenize
from trailmark.evaluation.retrieval.run import Integers, choices_of, row_of
from trailmark.models import SlidingWindowForCausalLM
from trailmark.models.drt.chunks import MemoryChunks
from trailmark.report.console import Progress, counted
from trailmark.trace.losses import nats
from trailmark.untrusted import read_yaml

OUTPUT = Path(__file__).with_suffix(".json")
FACTORS = (1, 4, 16)  # of the training length
COUNTED = LENGTH - UNSEEN  # last tokens of a text, the same at every length
ADDED = (21, 26, 31)  # layers of the deeper model that its base has not: among those that read in the DRT
RATES = (0.0005, 0.001, 0.002)
"""Of the layers that are added. Only the part "rates" uses more than the first."""
DRT_RATES = (WAYS["additions"].rate, 0.0005)
"""Of a DRT's additions, likewise."""


def deepened(folder: Path, seed: int, rate: float | None = None) -> Path:
    return folder / at_rate(f"deepened-{seed}", rate, RATES[0])


# --- layers in place of a memory -----------------------------------------------------------------------------------


def with_layers(base: SlidingWindowForCausalLM, added: Sequence[int]) -> SlidingWindowForCausalLM:
    """A model with layers more, of these numbers in it, which say nothing yet.

    Block expansion (arXiv 2401.02415): each is a copy of the layer before it whose output projections are 0, so the
    model begins as its base.
    """
    layer: Any
    layers = base.config.num_hidden_layers + len(added)
    config = type(base.config)(**base.config.to_dict() | {"num_hidden_layers": layers})
    model = SlidingWindowForCausalLM(config).to(base.dtype)
    for name in ("embed_tokens", "norm"):
        getattr(model, name).load_state_dict(getattr(base, name).state_dict())
    for number, layer in enumerate(model.layers):
        layer.load_state_dict(base.layers[number - sum(other <= number for other in added)].state_dict())
        if number in added:
            for output in (layer.attention.o_proj, layer.mlp.down_proj):
                nn.init.zeros_(output.weight)
    return model


def deeper(folder: Path) -> Path:
    """The base with a window and three layers more, made once."""
    made = folder / "deeper"
    if not made.exists():
        window, part = converted(folder, "sliding_window", *window_fields(WINDOW)), folder / "deeper.part"
        with_layers(SlidingWindowForCausalLM.from_pretrained(window), ADDED).save_pretrained(part)
        load_tokenizer(str(window)).save_pretrained(part)
        part.rename(made)
    return made


def deepen(options: argparse.Namespace) -> None:
    """Teach the layers that were added, on as many tokens as the DRT was fitted to and learned from."""
    _deepen(options, options.seeds, RATES[:1])


def _deepen(options: argparse.Namespace, seeds: Sequence[int], rates: Sequence[float]) -> None:
    begin = deeper(options.folder)
    SlidingWindowForCausalLM.additions = tuple(f"layers.{number}.*" for number in ADDED)
    for seed, rate in product(seeds, rates):
        train_run(run_config(
            options.folder, seed, f"output={deepened(options.folder, seed, rate)}", f"init_from={begin}",
            "training.train=additions", f"training.steps={FIT_STEPS + STEPS}", f"training.learning_rate={rate}",
            "training.warmup_steps=8", "training.save_steps=15", *options.set,
        ))  # fmt: skip


# --- the same tokens after more and more text ----------------------------------------------------------------------


def _stretches(tokenizer: Any, length: int, counts: Sequence[int]) -> dict[str, list[Text]]:
    """Held-out stretches of a length that share nothing: of one chapter or book, and of modules in turn."""
    found: dict[str, list[Text]] = {}
    texts = {
        "LaTeX": [(file.name, tokenize([read_text(file)], tokenizer)) for file in chapters()],
        "Python": [("modules", tokenize(standard_library_texts("haystack"), tokenizer))],
        "books": [(file.name, tokenize([read_text(file)], tokenizer)) for file in held_out_books()],
    }
    for (kind, of_kind), count in zip(texts.items(), counts, strict=True):
        all_of = [
            Text(f"{name} from {first}", ids[first : first + length])
            for name, ids in of_kind
            for first in range(0, len(ids) - length + 1, length)
        ]
        if not all_of:
            raise SystemExit(f"{kind}: expected a held-out text of {length:,} tokens, there is none.")
        spread = np.linspace(0, len(all_of) - 1, min(count, len(all_of))).round().astype(int)
        found[kind] = [all_of[number] for number in spread]
    return found


def _told(table: Integers) -> AbstractContextManager[Any]:
    """While it lasts chunks that close choose those of their row [C, K], weighed by the model's own scores."""
    score, rows = MemoryChunks._score, torch.from_numpy(table)

    def score_told(self: MemoryChunks, query: torch.Tensor, indices: Any, noise_seed: Any) -> Any:
        told = rows[torch.from_numpy(self.candidates.asking)]
        return score(self, query, told.to(query.device), noise_seed)

    return patch.object(MemoryChunks, "_score", score_told)


@torch.no_grad()
def last_tokens(texts: Sequence[Text], rules: Sequence[str], model: Any, number: int) -> Any:
    """[1 + rules, COUNTED] nats of a text's last tokens: with its own choice, and with that of each rule."""
    ids, config = texts[number].ids.astype(np.int64), model.config
    S = getattr(config, "chunk_size", 1)
    # what the first counted row reads was chosen by the chunk before its own: that one is told too
    begin = ((len(ids) - COUNTED - 1) // S - 1) * S
    cache, piece = model.read(row_of(model, ids[:begin])), row_of(model, ids[begin:])
    ways: list[AbstractContextManager[Any]] = [nullcontext()]
    if rules:
        limits = model.layouts.of(len(ids), False).candidates(config.first_visible, torch.device("cpu"))
        choices = dict(choices_of(ids, S, limits.flatten().numpy(), config.num_retrieved_chunks, 0, number))
        ways += [_told(choices[rule]) for rule in rules]
    found = []
    for way in ways:
        with way:
            logits = model(piece, past_key_values=cache.branch()).logits[:, -COUNTED - 1 : -1]
        found.append(nats(logits, piece[:, -COUNTED:])[0])
    return np.stack(found)


class Compared(NamedTuple):
    """A model that is read, and who chooses in its place beside itself."""

    folder: Callable[..., Path]
    """By the folder of all, the seed and, where several were tried, the learning rate."""
    rules: tuple[str, ...] = ()

    def trained(self, folder: Path, seeds: Sequence[int]) -> dict[Path, int]:
        """The models of those seeds that were trained, and their seeds; one, where no seed has a part in it."""
        own: dict[Path, int] = {}
        for seed in seeds:
            own.setdefault(self.folder(folder, seed), seed)
        found = {one: seed for one, seed in own.items() if (one / "model.safetensors").exists()}
        if not found:
            raise SystemExit(f"{next(iter(own))}: expected a model that was trained, there is none.")
        return found


def _additions(folder: Path, seed: int, rate: float | None = None, retriever: float | None = None) -> Path:
    return trained("additions", seed, folder, rate, retriever)


COMPARED = {
    "window": Compared(lambda folder, seed: converted(folder, "sliding_window", *window_fields(WINDOW))),
    "window and layers": Compared(deepened),
    "retriever": Compared(lambda folder, seed: trained("slowly", seed, folder), ("random", "BM25")),
    "additions": Compared(_additions, ("random",)),
}
FULL = "full attention"


class Measured:
    """The losses of a text's last tokens, which are kept as they are found."""

    def __init__(self, folder: Path, longest: int, counts: Sequence[int]) -> None:
        self.base = converted(folder, "sliding_window")
        self.losses = Losses(folder / "learning-lengths.json", Progress())
        self.stretches = _stretches(load_tokenizer(str(self.base)), longest, counts)

    def of(self, kind: str, length: int, name: str, folder: Path, rules: tuple[str, ...] = ()) -> Any:
        """[texts, 1 + rules] nats of a token after ``length`` tokens of each text."""
        texts = [text._replace(ids=text.ids[-length:]) for text in self.stretches[kind]]
        known = f"{name}, {weights_of(folder)[:12]}, {', '.join(rules)}"
        own = self.losses.of(known, partial(opened, folder), texts, partial(last_tokens, texts, rules))
        return np.array(own).mean(-1)


def measure(options: argparse.Namespace) -> None:
    measured = Measured(options.folder, LENGTH * FACTORS[-1], options.texts)
    rows, seeds = [], options.seeds
    there = {name: compared.trained(options.folder, seeds) for name, compared in COMPARED.items()}
    for name, own_seeds in there.items():
        said = f"{counted(len(own_seeds), 'model')} of seed {', '.join(map(str, own_seeds.values()))}"
        measured.losses.progress.say(f"{name}: {said}")
    for kind in measured.stretches:
        gains = []
        for length in (LENGTH * factor for factor in FACTORS):
            found: dict[str, Any] = {}  # [seeds, texts] nats of a token by case
            if length == LENGTH:
                found[FULL] = measured.of(kind, length, FULL, measured.base)[None, :, 0]
            for name, compared in COMPARED.items():
                own = [measured.of(kind, length, name, folder, compared.rules) for folder in there[name]]
                cases = [name, *(f"{name}, {rule}" for rule in compared.rules)]
                found |= dict(zip(cases, np.moveaxis(np.array(own), -1, 0), strict=True))
            rows += [_row(kind, length, case, found) for case in found]
            gains.append({name: below(found["window"], found[name]) for name in COMPARED})
        for name in COMPARED:
            grown = gains[-1][name] - gains[0][name]
            rows.append({"kind": kind, "case": name, "texts": len(grown)} | interval("grown", grown))
    models: dict[str, dict[str, Any]] = {}
    for name, own_seeds in there.items():
        folder = next(iter(own_seeds))
        models[name] = {"parameters": parameters(opened(folder)), "seeds": [*own_seeds.values()]}
        if (file := folder / "run.yaml").exists():
            training = read_yaml(file, "run.yaml")["training"]
            models[name]["tokens"] = training["steps"] * training["tokens_per_step"]
            models[name]["rate"] = training["learning_rate"]
    kept = {"window": WINDOW, "counted": COUNTED, "fitted": FIT_STEPS * STEP_TOKENS}
    keep(options.output, "lengths", kept | {"models": models, "rows": rows})
    measured.losses.progress.say(f"Measured, in {options.output}")


def rates(options: argparse.Namespace) -> None:
    """The layers and the DRT at their learning rates, each seed by itself, on texts of the training length."""
    layers, drt = "window and layers", "additions"
    tried = {layers: options.layer_rates, drt: options.drt_rates}
    folders: dict[str, Callable[..., Path]] = {
        layers: deepened,
        drt: partial(_additions, retriever=options.retriever_rate),
    }
    _deepen(options, options.seeds, options.layer_rates)
    for seed, rate in product(options.seeds, options.drt_rates):
        learn(drt, seed, *options.set, folder=options.folder, rate=rate, retriever=options.retriever_rate)
    measured = Measured(options.folder, LENGTH, options.short_texts)
    for seed in options.seeds:
        rows = []
        for kind in measured.stretches:
            nats = {  # of each text
                (name, rate): measured.of(
                    kind, LENGTH, f"{name} at {rate}", folders[name](options.folder, seed, rate)
                )[:, 0]
                for name, of_name in tried.items()
                for rate in of_name
            }
            for (name, rate), own in nats.items():
                row = {"kind": kind, "case": name, "rate": rate, "texts": len(own), "nats": float(own.mean())}
                if rate != (first := tried[name][0]):
                    row |= interval("below its first rate", nats[name, first] - own)
                if name == drt:
                    for other in options.layer_rates:
                        row |= interval(f"below {layers} at {other:.0e}", nats[layers, other] - own)
                rows.append(row)
        about = {"seed": seed, "length": LENGTH, "retriever_rate": options.retriever_rate}
        apart = f", retriever at {options.retriever_rate}" if options.retriever_rate else ""
        keep(options.output, f"rates, seed {seed}{apart}", about | {"rows": rows})


def _row(kind: str, length: int, case: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Of a case its nats, and how far they lie below those of others, with intervals over texts."""
    name, own = case.split(",")[0], found[case]
    row = {"kind": kind, "length": length, "case": case, "texts": own.shape[1], "nats": float(own.mean())}
    row["by_seed"] = own.mean(1).tolist()
    for other in ("window", "window and layers", f"{name}, random", f"{name}, BM25"):
        if other != case and other in found:
            row |= interval(f"below {other.removeprefix(f'{name}, ')}", below(found[other], own))
    return row


def below(other: Any, own: Any) -> Any:
    """How far a case [seeds, texts] lies below another, of each text: of the mean of each one's seeds."""
    return other.mean(0) - own.mean(0)


PARTS = {"deepen": deepen, "measure": measure, "rates": rates}


def main() -> None:
    parser = parser_of(__doc__, PARTS, OUTPUT)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0,))
    parser.add_argument(
        "--texts", type=int, nargs=3, default=(6, 5, 4), help="stretches of LaTeX, of Python and of books"
    )
    parser.add_argument(
        "--short-texts",
        type=int,
        nargs=3,
        default=(24, 12, 6),
        help="the same of the training length, in the part rates",
    )
    for name, usual in (("layer", RATES), ("drt", DRT_RATES)):
        parser.add_argument(
            f"--{name}-rates", type=float, nargs="*", default=usual, help="learning rates, in the part rates"
        )
    parser.add_argument(
        "--retriever-rate",
        type=float,
        help="of what scores chunks, in the part rates; default: that of the other additions",
    )
    parser.add_argument("--set", nargs="*", default=[], help="keys of the training, as key=value")
    run_parts(PARTS, parser.parse_args())


if __name__ == "__main__":
    main()
