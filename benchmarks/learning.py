"""Does a retriever learn from real text, from the language-modelling loss alone, among layers that can read?

    TRAILMARK_DATA=... python benchmarks/learning.py [train measure scores] [--seeds 0 1 2] [--steps 60]

Writes benchmarks/learning.json. SmolLM2-135M is converted to a DRT, and its memory is fitted to the base's own layers:
so it reads, and its retriever is as conversion left it. Then the retriever alone is trained, by the loss of the next
token and nothing else: all other weights stay. Measured on the held-out texts of pretrained.py, before and after, with
the chunks that it chooses and with others in their place, an interval over texts for each seed and for their mean; the
base with a window alone and with full attention are the marks. Stopped, the same command goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import data_folder, keep
from pretrained_models import (
    DRT_FIELDS,
    FOLDER,
    KINDS_OF_TEXT,
    STEP_TOKENS,
    UNSEEN,
    Losses,
    Text,
    Totals,
    converted,
    has_bfloat16,
    latex,
    named,
    opened,
    totals,
)  # fmt: skip
from pretrained_references import Ranking, chapter, share
from pretrained_train import corpus
from training_text import train as train_run

from trailmark.data.corpus import load_tokenizer, read_text
from trailmark.evaluation.retrieval.run import choices_of, losses_of, parts_of
from trailmark.files import read_json, write_text
from trailmark.report.console import Progress
from trailmark.statistics import bootstrap_ratio
from trailmark.training.config import load_run_config
from trailmark.training.run import HISTORY_FILE
from trailmark.training.run_folder import config_hash

OUTPUT = Path(__file__).with_suffix(".json")
WINDOW, LENGTH, FIT_STEPS = 256, 4096, 48
# with noise: a chunk that scores a little lower is read too, so that the loss says something of it
FIELDS = (f"sliding_window={WINDOW}", *(own for own in DRT_FIELDS if own != "retrieval_noise=false"))
RULES = ("random", "recent", "BM25")


def trained(seed: int) -> Path:
    return FOLDER / f"learning-{seed}"


def train(options: argparse.Namespace) -> None:
    """Each seed's run: the fit, then the retriever alone."""
    file = FOLDER / "learning.yaml"
    write_text(file, "model: {}\n")
    teacher = converted(FOLDER, "sliding_window")
    begin, shards = converted(FOLDER, "drt", *FIELDS), corpus(FOLDER, teacher)
    for seed in options.seeds:
        settings = [
            f"output={trained(seed)}", f"init_from={begin}", f"data.paths=[{shards}]", f"data.tokenizer={teacher}",
            "training.train=retriever", f"training.steps={options.steps}", f"training.seed={seed}",
            f"training.tokens_per_step={STEP_TOKENS}", f"training.context_length={LENGTH}",
            "training.micro_batch_size=1", f"training.precision={'bfloat16' if has_bfloat16() else 'float32'}",
            "training.optimizer=adamw", "training.learning_rate=0.001", "training.weight_decay=0",
            "training.warmup_steps=8", "training.save_steps=15", "training.keep_checkpoints=100",
            "training.logging_steps=1", f"distil.model={teacher}", "distil.weight=0", f"distil.fit_steps={FIT_STEPS}",
            "distil.fit_retriever=false",
        ]  # fmt: skip
        train_run(load_run_config(file, [*settings, *options.set]))


# --- what was learned ----------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> None:
    progress = Progress()
    base = converted(FOLDER, "sliding_window")
    tokenizer = load_tokenizer(str(base))
    texts = {kind: texts_of(tokenizer, LENGTH) for kind, texts_of in KINDS_OF_TEXT.items()}
    # of a seed first, in a file of its own: so one process may measure one seed, and another another
    own = {
        seed: {kind: _of_seed(seed, of_kind, progress) for kind, of_kind in texts.items()}
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
    runs = {seed: load_run_config(trained(seed) / "run.yaml") for seed in options.seeds}
    keep(options.output, "learning", {
        "window": WINDOW, "length": LENGTH, "counted": LENGTH - UNSEEN, "step_tokens": STEP_TOKENS,
        "steps": {seed: run.training.steps for seed, run in runs.items()},
        "fit_steps": {seed: run.distil.fit_steps for seed, run in runs.items()},
        "runs": {seed: config_hash(run) for seed, run in runs.items()}, "rows": rows,
    })  # fmt: skip
    progress.say(f"Measured, in {options.output}")


def _of_seed(seed: int, texts: Sequence[Text], progress: Progress) -> dict[str, Totals]:
    """Nats of each text by who chooses; all are read whole, in one way."""
    folder, losses = trained(seed), Losses(FOLDER / f"learning-losses-{seed}.json", progress)
    name = f"{folder.name} {config_hash(load_run_config(folder / 'run.yaml'))[:8]}"
    last = read_json(folder / HISTORY_FILE)["tokens"] // STEP_TOKENS
    models = {"learned": partial(opened, folder), "before": partial(_before, folder)}
    for step in sorted(folder.glob("checkpoints/step-*")):
        if int(step.name.removeprefix("step-")) == last // 2:
            models["half of the steps"] = partial(opened, step)
    found = {
        chunks: totals(losses.of(f"{name} {chunks}", make, texts, partial(_told, texts, None)))
        for chunks, make in models.items()
    }
    for rule in RULES:
        told = losses.of(f"{name} {rule}", models["learned"], texts, partial(_told, texts, rule))
        found[rule] = totals(told)
    return found


def _before(folder: Path) -> Any:
    """The trained model with the scores of before: nothing else of it was trained."""
    model, begun = opened(folder), dict(opened(converted(FOLDER, "drt", *FIELDS)).named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if model.part_of(name) == "retriever":
                parameter.copy_(begun[name])
    return model


def _told(texts: Sequence[Text], rule: str | None, model: Any, number: int) -> Any:
    """The losses of a text with the chunks that a rule chooses; None: the model."""
    ids, config = texts[number].ids.astype(np.int64), model.config
    if rule is None:
        return losses_of(model, ids)
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
        low, high = bootstrap_ratio(closed, gap)
        more_low, more_high = bootstrap_ratio(more, gap)
        rows.append({
            "kind": kind, "seed": seed, "chunks": chunks, "texts": len(own), "closed": float(closed.sum() / gap.sum()),
            "closed_low": low, "closed_high": high, "more": float(more.sum() / gap.sum()), "more_low": more_low,
            "more_high": more_high, "nats": float(own.sum() / len(own) / (LENGTH - UNSEEN)),
        })  # fmt: skip
    return rows


# --- what scores say -----------------------------------------------------------------------------------------------


def scores(options: argparse.Namespace) -> None:
    """Before and after: how popular chunks are, and whose choice holds the label that is about to be cited.

    Nothing but scores is computed: so texts are twice as long, and chunks have more candidates.
    """
    progress, length = Progress(), 2 * LENGTH
    base = converted(FOLDER, "sliding_window")
    tokenizer = load_tokenizer(str(base))
    drts = {"before": _before(trained(options.seeds[0]))}  # the fit changes what is read, no score
    drts |= {f"learned, seed {seed}": opened(trained(seed)) for seed in options.seeds}
    ranking = Ranking(opened(base), drts, FOLDER / "shards", tokenizer, FOLDER / "bm25.json")
    hits, parts, texts = [], [], latex(tokenizer, length)
    for text in texts:
        progress.show(text.name)
        whole = read_text(data_folder("math") / "test" / text.name)
        begun = chapter(whole, tokenizer, length, ranking.config.chunk_size)
        found = ranking.scores(begun.ids)
        hits.append(list(ranking.ranks(begun, found)))
        parts.append({name: parts_of(torch.from_numpy(found[name]), ranking.config) for name in drts})
    asked = [own for own in hits if own]
    for own in asked:
        for one in own:
            one["learned"] = float(np.mean([one[f"learned, seed {seed}"] for seed in options.seeds]))
            one["learned above BM25"] = one["learned"] - one["BM25"]
    rules = [rule for rule in asked[0][0] if rule != "attention, reading"]
    keep(options.output, "scores", {
        "length": length, "chosen": ranking.chosen, "texts": len(asked), "references": sum(map(len, asked)),
        "label": share(asked, rules),
        "parts": [
            {"scores": name} | {part: float(np.mean([own[name][part] for own in parts])) for part in parts[0][name]}
            for name in drts
        ],
    })  # fmt: skip
    progress.say(f"Measured, in {options.output}")


PARTS = {"train": train, "measure": measure, "scores": scores}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all by default")
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--steps", type=int, default=60, help=f"of {STEP_TOKENS:,} tokens")
    parser.add_argument("--set", nargs="*", default=[], help="keys of the runs, as key=value")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in options.parts or PARTS:
        PARTS[name](options)


if __name__ == "__main__":
    main()
