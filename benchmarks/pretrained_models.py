"""What the benchmarks of a pretrained base share: held-out texts, models on disk, and losses that are read once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from common import ROOT, data_folder, keep

from tests.smollm2 import convert_smollm2, smollm2
from trailmark.data.corpus import Tokens, read_text, standard_library_texts, tokenize
from trailmark.evaluation.losses import token_losses
from trailmark.evaluation.subject import Subject, load, own_device
from trailmark.files import read_json, sha256_of, write_json
from trailmark.machine import fast_precision, start_again_set_up
from trailmark.models.conversion.convert import convert
from trailmark.models.drt.config import DRTConfig
from trailmark.report.console import Progress
from trailmark.statistics import bootstrap_ratio
from trailmark.training.config import load_run_config
from trailmark.training.run import HISTORY_FILE

FOLDER = ROOT / "runs" / "benchmark-pretrained"
SINKS = 4
_FAR_TOKENS = 1 << 17  # at each length beyond the base's
UNSEEN = 1024  # tokens at the beginning of a text that are read and not counted
STEP_TOKENS = 4096  # of pretrained_train.py
WINDOW = 512  # of a HiLS, and of layers that do not look far
Flags = npt.NDArray[np.bool_]
Totals = npt.NDArray[np.float64]


class Text(NamedTuple):
    name: str
    ids: Tokens


# --- texts -----------------------------------------------------------------------------------------------------


def chapters() -> list[Path]:
    """The held-out LaTeX."""
    return sorted((data_folder("math") / "test").glob("*.tex"))


def held_out_books() -> list[Path]:
    return sorted((data_folder("books") / "test").glob("*.txt"))


def latex(tokenizer: Any, length: int) -> list[Text]:
    """The beginning of each held-out chapter that is long enough."""
    return _long_enough(((file.name, read_text(file)) for file in chapters()), tokenizer, length)


def sources(tokenizer: Any, length: int) -> list[Text]:
    """The beginning of each held-out module that is long enough, of the first six of these."""
    texts = enumerate(standard_library_texts("haystack"))
    return _long_enough(((f"module {n}", text) for n, text in texts), tokenizer, length, most=6)


def books(tokenizer: Any, length: int) -> list[Text]:
    """The beginning of each held-out book that is long enough."""
    return _long_enough(((file.name, read_text(file)) for file in held_out_books()), tokenizer, length)


def _long_enough(
    texts: Iterable[tuple[str, str]], tokenizer: Any, length: int, most: int | None = None
) -> list[Text]:
    found: list[Text] = []
    for name, text in texts:
        if len(found) != most and len(text) > 2 * length:
            ids = tokenize([text[: 8 * length]], tokenizer)  # no tokenizer here makes less of 8 letters
            if len(ids) >= length:
                found.append(Text(name, ids[:length]))
    return found


KINDS_OF_TEXT = {"LaTeX": latex, "Python": sources}


def outside(ids: Tokens, window: int) -> Flags:
    """Of each token but the first: whether it stood before, but not among the ``window`` tokens before it."""
    last: dict[int, int] = {}
    found = np.zeros(len(ids), bool)
    for place, token in enumerate(ids.tolist()):
        found[place] = token in last and place - last[token] > window
        last[token] = place
    return found[1:]


# --- parts of a benchmark --------------------------------------------------------------------------------------


def parser_of(
    description: str | None, parts: Iterable[str], output: Path, any_folder: bool = True
) -> argparse.ArgumentParser:
    """The options that every benchmark of a pretrained base has; ``any_folder``: it need not be FOLDER."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*parts, []], help="all of them by default")
    if any_folder:
        parser.add_argument(
            "--folder", type=Path, default=FOLDER, help="models that are made, and what is known of them"
        )
    parser.add_argument("--output", type=Path, default=output)
    return parser


def run_parts(parts: Mapping[str, Callable[[argparse.Namespace], None]], options: argparse.Namespace) -> None:
    """The parts that were asked for, each of which keeps what it finds."""
    start_again_set_up()  # as the commands do
    getattr(options, "folder", FOLDER).mkdir(parents=True, exist_ok=True)
    for name in options.parts or parts:
        parts[name](options)


def measure_parts(
    parts: Mapping[str, Callable[[argparse.Namespace, Progress], Any]],
    options: argparse.Namespace,
    called: Callable[[str], str] = str,
) -> None:
    """The parts that were asked for, each kept when it is done; ``called``: by which name."""
    start_again_set_up()  # as the commands do
    options.folder.mkdir(parents=True, exist_ok=True)
    progress = Progress()
    for part in options.parts or parts:
        keep(options.output, called(part), parts[part](options, progress))
        progress.say(f"{called(part)}: measured, in {options.output}")


# --- models ----------------------------------------------------------------------------------------------------


@cache
def converted(folder: Path, to: str, *fields: str) -> Path:
    """The base as a model of ours, made once."""
    made = folder / "-".join([to, *fields])
    if not made.exists():
        convert_smollm2(made, to, *fields)
    return made


def subject(folder: Path, *changes: str) -> Subject:
    """With its tokenizer, on a GPU if there is one; in bfloat16 where that is multiplied, else in float32."""
    found = load(folder, changes, device=own_device(None))
    found.model = found.model.eval().to(getattr(torch, precision()))
    return found


def opened(folder: Path, *changes: str) -> Any:
    return subject(folder, *changes).model


KINDS = ("drt", "window", "full")
# Depth 18: in its states the keys of the layers that look far (17 to 23) are found best. One encoder layer: the states
# say more than layers that begin as nothing.
LAYERS = ("num_lower_layers=18", "num_encoder_layers=1", "num_retrieval_groups=1")
# no noise: the teacher says which chunks it looks at
DRT_FIELDS = (*LAYERS, "retrieval_noise=false", "num_retrieved_chunks=32")


TAUGHT = ("recall", "further", "few", "longer")  # by pretrained_train.py, each on from the one before
READERS = {"reader": 1, "reader-some": 0.05, "reader-none": 0}  # the share of their texts that holds facts
# the seven that look far most in the base that was taught to recall (part "layers" of pretrained_hils_needles.py)
FAR_LAYERS = (7, 14, 17, 18, 20, 21, 23)
NUM_LAYERS = 30  # of the base
FINE = 2  # keys that one summary stands for, in a HiLS of few layers
APART = 1024  # tokens: farther than the window is long
READER = ("reading=windows", "summary_tokens=1", f"far_distance={APART}")
READ = 4  # chunks that a token reads in a layer
READER_FIELDS = (*READER, f"num_retrieved_chunks={READ}")


def far_base(folder: Path) -> Path:
    """The base with full attention in the layers that look far most of itself, made once."""
    made = folder / "far"
    if not made.exists():
        convert_smollm2(made, "sliding_window", "--far-layers", str(len(FAR_LAYERS)), *window_fields(WINDOW))
    return made


def hils_of(folder: Path, taught: Path) -> Path:
    """A HiLS of a model with a window alone, made once."""
    made = folder / f"hils of {taught.name}"
    if not made.exists():
        convert(taught, made, "hils")
    return made


def taught_hils(folder: Path, kind: str) -> tuple[Path, Path]:
    """What pretrained_train.py has made of the base, and a HiLS of it."""
    taught = trained(folder, kind, 0, 0)
    if not (taught / HISTORY_FILE).exists():
        sys.exit(f"{taught} is not there. Train it: python benchmarks/pretrained_train.py {kind}")
    return taught, hils_of(folder, taught)


def training_of(folder: Path) -> dict[str, Any]:
    """The tokens and seconds of a training; of what was not trained nothing."""
    history = read_json(folder / HISTORY_FILE)
    return {} if history is None else {f"trained_{name}": history[name] for name in ("tokens", "seconds")}


def shipped(folder: Path) -> Path:
    """The reader of models/smollm2-135m-reader, with full attention in the layers that look far, made once."""
    taught = folder / "shipped"
    if not taught.exists():
        convert(
            smollm2(), taught, additions=ROOT / "models" / "smollm2-135m-reader" / "additions.safetensors"
        )
    return taught


def shipped_reader(folder: Path) -> Path:
    """A HiLS of it, made once."""
    return hils_of(folder, shipped(folder))


def trained(folder: Path, kind: str, window: int, seed: int) -> Path:
    """Where ``pretrained_train.py`` leaves one of its kinds."""
    return folder / (f"{kind}-{window}-{seed}" if kind in ("drt", "needles", "window") else f"{kind}-{seed}")


class Models(NamedTuple):
    """Folders: the base as it was converted, and what is compared."""

    base: Path
    begun: Path
    drt: Path
    window: Path
    full: Path

    @classmethod
    def of(cls, options: argparse.Namespace) -> Models:
        folders = [trained(options.folder, kind, options.window, options.seed) for kind in KINDS]
        if missing := [str(folder) for folder in folders if not (folder / "config.json").exists()]:
            sys.exit(
                f"{missing[0]} is not there. Train it: python benchmarks/pretrained_train.py "
                f"--window {options.window} --seed {options.seed}"
            )
        begun = converted(options.folder, "drt", f"sliding_window={options.window}", *DRT_FIELDS)
        return cls(converted(options.folder, "sliding_window"), begun, *folders)

    def folders(self) -> dict[str, Path]:
        """Of KINDS."""
        return {kind: getattr(self, kind) for kind in KINDS}

    def training(self) -> dict[str, Any]:
        """What stands beside every number of theirs."""
        history = {kind: read_json(folder / HISTORY_FILE) for kind, folder in self.folders().items()}
        tokens, seconds = ({kind: x[name] for kind, x in history.items()} for name in ("tokens", "seconds"))
        fitted = load_run_config(self.drt / "run.yaml").distil.fit_steps * STEP_TOKENS
        config = DRTConfig.from_pretrained(self.drt)
        return {
            "trained": self.drt.name,
            "trained_window": config.sliding_window,
            "trained_chunks": config.num_retrieved_chunks,
            "trained_tokens": tokens,
            "trained_seconds": seconds,
            "fitted_tokens": fitted,
        }


def precision() -> str:
    """What models compute in: "bfloat16" where it is multiplied."""
    return fast_precision(own_device(None).type)[0]


def window_fields(window: int) -> tuple[str, ...]:
    return f"sliding_window={window}", f"num_sinks={SINKS}", "max_sink_distance=8191"


def windowed(folder: Path, window: int, *changes: str) -> Any:
    return opened(folder, *window_fields(window), *changes)


def name_of(folder: Path) -> str:
    """Of a trained model, or of a checkpoint on its way."""
    return folder.name if folder.parent.name != "checkpoints" else f"{folder.parents[1].name} {folder.name}"


def named(folder: Path, window: int, *changes: str) -> tuple[str, Callable[[], Any]]:
    """What losses are known by, and how the model is opened."""
    name = " ".join([name_of(folder), f"window {window}", *changes])
    return name, partial(windowed, folder, window, *changes)


def by_step(folder: Path) -> dict[int, Path]:
    """A training's checkpoints, and at its end the model itself."""
    found = {int(x.name.removeprefix("step-")): x for x in folder.glob("checkpoints/step-*")}
    return found | {read_json(folder / HISTORY_FILE)["tokens"] // STEP_TOKENS: folder}


@cache
def weights_of(folder: Path) -> str:
    """The SHA-256 of a model's weights."""
    return sha256_of(folder / "model.safetensors")


class Losses:
    """What each token of each text costs each model, or what else is counted of it; a file keeps it for good."""

    def __init__(self, file: Path, progress: Progress) -> None:
        self.file, self.progress = file, progress
        self.known: dict[str, list[Any]] = read_json(file) or {}

    def of(
        self,
        name: str,
        open_model: Callable[[], Any],
        texts: Sequence[Text],
        read: Callable[[Any, int], Any] | None = None,
    ) -> list[Any]:
        """[T - 1] nats of each text, or what ``read`` makes of a model and a text's number, to four places."""
        model, found = None, []
        for number, text in enumerate(texts):
            key = f"{name} | {text.name} | {len(text.ids)}"
            if key not in self.known:
                model = model or open_model()
                self.progress.show(key)
                losses = read(model, number) if read else token_losses(model, text.ids[None]).losses[0]
                # another process may have added to it
                self.known = (read_json(self.file) or {}) | self.known | {key: np.round(losses, 4).tolist()}
                write_json(self.file, self.known)
            found.append(np.array(self.known[key]))
        return found


def of_kinds(
    losses: Losses, folders: Mapping[str, Path], window: int, texts: Sequence[Text]
) -> dict[str, list[Any]]:
    """The losses of KINDS: with full attention, and with a window the others."""
    full = losses.of(name_of(folders["full"]), partial(opened, folders["full"]), texts)
    others = {kind: losses.of(*named(folders[kind], window), texts) for kind in ("window", "drt")}
    return {"full": full} | others


def row_of_gap(
    found: Mapping[str, Sequence[Any]], flags: Sequence[Flags], tokens: str, own: str = "drt"
) -> dict[str, Any]:
    """How much of what a window loses to full attention a model gives back.

    Args:
        found: losses of each text: "full", "window" and ``own``.
        tokens: which count, of those after UNSEEN: "all", or those "outside", which ``flags`` names for each text.
    """
    counted = [np.arange(len(flag)) >= UNSEEN - 1 for flag in flags]
    if tokens == "outside":
        counted = [late & flag for late, flag in zip(counted, flags, strict=True)]
    total = {
        name: np.array([float(x[those].sum()) for x, those in zip(losses, counted, strict=True)])
        for name, losses in found.items()
    }
    count = sum(int(those.sum()) for those in counted)
    given, lost = total["window"] - total[own], total["window"] - total["full"]
    means = {name: float(values.sum() / count) for name, values in total.items()}
    return {"nats": means, "texts": len(flags), "counted": count} | interval("closed", given, lost)


def on_short_texts(
    losses: Losses,
    base: Path,
    own: tuple[str, Callable[[], Any]],
    texts: Mapping[str, Sequence[Text]],
    length: int,
    name: str,
) -> list[dict[str, Any]]:
    """By kind of text, every fourth piece of ``length`` tokens, of which a window sees all: what a training took.

    Its interval is over pieces, and over the texts that they are of, under "worse" and "by_text".

    Args:
        own: what the losses of the trained model are known by, and how it is opened; its row is called ``name``.
    """
    rows = []
    for kind, long in texts.items():
        of_text = {
            text.name: [
                Text(f"{text.name} at {first}", text.ids[first : first + length])
                for first in range(0, len(text.ids) - length + 1, 4 * length)
            ]
            for text in long
            if len(text.ids) >= length
        }
        pieces = [*chain(*of_text.values())]
        pair = losses.of("base", partial(opened, base), pieces), losses.of(*own, pieces)
        before, after = (np.array([x.mean() for x in each]) for each in pair)
        ends = np.cumsum([len(own) for own in of_text.values()])[:-1]
        sums = [(x.sum(), len(x)) for x in np.split(after - before, ends)]
        rows.append(
            {"kind": kind, "texts": len(pieces), "length": length, "of": len(of_text)}
            | {"base": float(before.mean()), name: float(after.mean())}
            | interval("worse", after - before)
            | interval("by_text", *map(np.array, zip(*sums, strict=True)))
            | {"each": {name: total / count for name, (total, count) in zip(of_text, sums, strict=True)}}
        )
    return rows


def beyond(
    losses: Losses,
    tokenizer: Any,
    lengths: Sequence[int],
    window: tuple[str, Callable[[], Any]],
    own: tuple[str, Callable[[], Any]],
    name: str,
) -> list[dict[str, Any]]:
    """By length, of chapters one after another that the base cannot read: a model beside its twin with a window.

    Args:
        window, own: what the losses of both are known by, and how they are opened; those of ``own`` stand under
            ``name``, and how far they lie below the others' under "gain".
    """
    whole, rows = tokenize([read_text(file) for file in chapters()], tokenizer), []
    for length in lengths:
        count = min(4, max(1, _FAR_TOKENS // length), len(whole) // length)
        texts = [
            Text(f"chapters from {n * length}", whole[n * length : (n + 1) * length]) for n in range(count)
        ]
        twin, mine = (
            np.array([x[UNSEEN - 1 :].mean() for x in losses.of(*pair, texts)]) for pair in (window, own)
        )
        rows.append(
            {"length": length, "texts": count, "window": float(twin.mean()), name: float(mine.mean())}
            | interval("gain", twin - mine)
        )
    return rows


def interval(name: str, sums: Any, counts: Any = None) -> dict[str, float]:
    """sum(sums) / sum(counts), a number of each text, with its 95% interval; without ``counts`` the mean."""
    counts = np.ones_like(sums) if counts is None else counts
    low, high = bootstrap_ratio(sums, counts)
    return {name: float(sums.sum() / counts.sum()), f"{name}_low": low, f"{name}_high": high}


def totals(losses: Sequence[Any]) -> Totals:
    """Nats of each text, of the tokens that count."""
    return np.array([own[UNSEEN - 1 :].sum() for own in losses])
