"""Does a retriever learn from real text, from the language-modelling loss alone, among layers that can read?

    TRAILMARK_DATA=... python benchmarks/learning.py [train measure scores names diagnose keys] [--begin nothing]
        [--seeds 0 1 2]

Writes benchmarks/learning.json. SmolLM2-135M is converted to a DRT, and its memory is fitted to the base's own layers:
so it reads. Its retriever is as conversion left it (nothing), or set from the same texts alone (the others). Then the
retriever alone is trained, by the loss of the next token and nothing else, with "additions" all that the base has not:
all other weights stay. The training begins with the texts of the fit again. Measured on the
held-out texts of pretrained.py, before and after, with the chunks that it chooses and with others in their place, an
interval over texts for each seed and for their mean; the base with a window alone and with full attention are the
marks. The part "keys" trains nothing: it says how well chunks can be found by what sums them up. Stopped, the same
command goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import keep
from learning_labels import keys, names, popular_scores, scores
from learning_models import LENGTH, STEPS, WAYS, WINDOW, fitted, learn, trained
from pretrained_models import (
    FOLDER,
    KINDS_OF_TEXT,
    STEP_TOKENS,
    UNSEEN,
    Losses,
    Text,
    Totals,
    chapters,
    converted,
    interval,
    named,
    opened,
    parser_of,
    run_parts,
    subject,
    totals,
    weights_of,
)  # fmt: skip

from trailmark.data.corpus import load_tokenizer, read_text
from trailmark.data.neighbours.bm25 import best_chunks
from trailmark.evaluation.documents import Documents
from trailmark.evaluation.record import Record
from trailmark.evaluation.retrieval.run import choices_of, losses_of, row_of, run
from trailmark.evaluation.retrieval.suite import RetrievalSettings
from trailmark.report.console import Progress
from trailmark.training.config import load_run_config

OUTPUT = Path(__file__).with_suffix(".json")
RULES = ("random", "BM25", "popular")


def train(options: argparse.Namespace) -> None:
    for seed in options.seeds:
        learn(options.begin, seed, f"training.steps={options.steps}", *options.set)


# --- what was learned ----------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> None:
    progress = Progress()
    base = converted(FOLDER, "sliding_window")
    tokenizer = load_tokenizer(str(base))
    texts = {kind: texts_of(tokenizer, LENGTH) for kind, texts_of in KINDS_OF_TEXT.items()}
    # of a seed first, in a file of its own: so one process may measure one seed, and another another
    own = {
        seed: {kind: _of_seed(options.begin, seed, of_kind, progress) for kind, of_kind in texts.items()}
        for seed in options.seeds
    }
    losses, rows = Losses(FOLDER / "learning-losses.json", progress), []
    for kind, of_kind in texts.items():
        full = totals(losses.of("base", partial(opened, base), of_kind))
        window = totals(losses.of(*named(base, WINDOW), of_kind))
        for seed in options.seeds:
            rows += _rows(kind, seed, own[seed][kind], window, full)
        together = {
            chunks: np.stack([own[seed][kind][chunks] for seed in options.seeds]).mean(0)
            for chunks in own[options.seeds[0]][kind]
        }
        rows += _rows(kind, None, together, window, full)
    fits, runs = (
        {seed: load_run_config(of(options.begin, seed) / "run.yaml") for seed in options.seeds}
        for of in (fitted, trained)
    )
    found = {
        "window": WINDOW, "length": LENGTH, "counted": LENGTH - UNSEEN,
        "step_tokens": runs[options.seeds[0]].training.tokens_per_step, "fit_step_tokens": STEP_TOKENS,
        "steps": {seed: run.training.steps for seed, run in runs.items()},
        "fit_steps": {seed: run.distil.fit_steps for seed, run in fits.items()},
        "weights": {seed: weights_of(trained(options.begin, seed)) for seed in runs},
    }  # fmt: skip
    keep(options.output, f"losses, {options.begin}", found | {"rows": rows})
    by_kind = {kind: {seed: own[seed][kind] for seed in options.seeds} for kind in texts}
    rows = [row for kind, of_seeds in by_kind.items() for row in nats_rows(kind, of_seeds)]
    keep(options.output, f"nats, {options.begin}", found | {"rows": rows})
    progress.say(f"Measured, in {options.output}")


def _of_seed(begin: str, seed: int, texts: Sequence[Text], progress: Progress) -> dict[str, Totals]:
    """Nats of each text by who chooses; all are read whole, in one way."""
    folder = trained(begin, seed)
    losses = Losses(FOLDER / f"learning-losses-{begin}-{seed}.json", progress)

    def of(chunks: str, model: Path, rule: str | None = None) -> Totals:
        name = f"{chunks}, weights {weights_of(model)[:12]}"  # kept for these and no others
        return totals(losses.of(name, partial(opened, model), texts, partial(_told, texts, rule)))

    found = {"learned": of("learned", folder), "before": of("before", fitted(begin, seed))}
    return found | {rule: of(rule, folder, rule) for rule in RULES}


@torch.no_grad()
def _told(texts: Sequence[Text], rule: str | None, model: Any, number: int) -> Any:
    """The losses of a text with the chunks that a rule chooses; None: the model."""
    ids, config = texts[number].ids.astype(np.int64), model.config
    if rule is None:
        return losses_of(model, ids)
    if rule == "popular":
        seen = model(row_of(model, ids), output_retrieval_scores=True, logits_to_keep=1)
        scores = popular_scores(seen.retrieval_scores.scores[0][0].cpu(), config).numpy()
        limits = np.isfinite(scores).sum(1)  # candidates come first
        return losses_of(model, ids, best_chunks(scores, limits, config.num_retrieved_chunks))
    grid = model.layouts.of(len(ids), False)
    limits = grid.candidates(config.first_visible, torch.device("cpu")).flatten().numpy()
    choices = choices_of(ids, config.chunk_size, limits, config.num_retrieved_chunks, 0, number)
    return losses_of(model, ids, dict(choices)[rule])


def _rows(
    kind: str, seed: int | None, found: dict[str, Totals], window: Totals, full: Totals
) -> list[dict[str, Any]]:
    """Of each choice the share of the gap closed, and how much more the learned one closes; seed None: of all seeds."""
    gap, rows = window - full, []
    for chunks, own in found.items():
        closed, more = window - own, own - found["learned"]
        rows.append(
            {"kind": kind, "seed": seed, "chunks": chunks, "texts": len(own)}
            | interval("closed", closed, gap)
            | interval("more", more, gap)
            | {"nats": float(own.sum() / len(own) / (LENGTH - UNSEEN))}
        )
    return rows


def nats_rows(kind: str, own: Mapping[int, Mapping[str, Totals]]) -> list[dict[str, Any]]:
    """Of each choice the nats of a token, and how many more than what was learned costs: of the seeds' mean."""
    rows = []
    for chunks in next(iter(own.values())):
        mine, learned = (
            np.stack([found[name] for found in own.values()]) / (LENGTH - UNSEEN)
            for name in (chunks, "learned")
        )
        rows.append(
            {"kind": kind, "chunks": chunks, "texts": mine.shape[1], "nats": float(mine.mean())}
            | {"by_seed": mine.mean(1).tolist()}
            | interval("less", (mine - learned).mean(0))
        )
    return rows


# --- what the right chunks would be worth --------------------------------------------------------------------------


def diagnose(options: argparse.Namespace) -> None:
    """``trailmark evaluate --suite retrieval`` of the first seed's model on held-out chapters, before and after."""
    (seed, *_), found = options.seeds, {}
    text = held_out(converted(FOLDER, "sliding_window"))
    for name, folder in (("before", fitted(options.begin, seed)), ("learned", trained(options.begin, seed))):
        found[name] = diagnosed(folder, f"{folder.name}-diagnosis", LENGTH, options.texts, text)
    about = {"seed": seed, "length": LENGTH, "texts": options.texts}
    keep(options.output, f"diagnosis, {options.begin}", about | found)


def held_out(tokenizer: Path) -> Documents:
    """The chapters that no training saw."""
    return Documents.of([read_text(file) for file in chapters()], load_tokenizer(str(tokenizer)))


def diagnosed(folder: Path, name: str, length: int, texts: int, text: Documents) -> dict[str, Any]:
    """What the retrieval suite finds of a model in so many stretches of a length, kept in a folder of that name."""
    progress, asked = Progress(), subject(folder)
    record = Record(FOLDER / name, "retrieval", asked.identity())
    settings = RetrievalSettings(lengths=(length,), texts=texts)
    (found,) = run(asked, settings, text, record, progress.show)
    progress.say(f"Diagnosed: {folder}")
    return found


PARTS = {
    "train": train, "measure": measure, "scores": scores, "names": names, "diagnose": diagnose, "keys": keys,
}  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__, PARTS, OUTPUT, any_folder=False)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of {STEP_TOKENS:,} tokens")
    parser.add_argument(
        "--begin",
        choices=WAYS,
        default="nothing",
        help="what the retriever is set to first; slowly: from texts, then a fifth of the learning rate",
    )
    parser.add_argument("--texts", type=int, default=4, help="that are diagnosed")
    parser.add_argument("--set", nargs="*", default=[], help="keys of the runs, as key=value")
    run_parts(PARTS, parser.parse_args())


if __name__ == "__main__":
    main()
