"""Does a small model learn from nothing to retrieve from text, and does it give more than layers?

    TRAILMARK_DATA=... python benchmarks/case_study prepare
    TRAILMARK_DATA=... python benchmarks/learning_small.py [train diagnose measure] [--rows DRT lookup ...] [--seeds 0]

Writes benchmarks/learning_small.json. The case study's model (configs/laptop-drt-math.yaml) and others learn from the
same tokens of LaTeX in as many steps: "DRT" as published, "DRT, residual" with what is read in the residual stream,
"lookup" with that, values of what came next and a GCA that begins as a lookup, "lookup, no noise" without noise in the
choice of training, "lookup, random" with chunks drawn at random in training and after it, and without a memory
"window", "window, layers" (as many parameters as the DRT, within 5%) and "full attention". diagnose: the suite of
`trailmark evaluate --suite retrieval` as the training of the DRTs goes on. measure: the last tokens of held-out
stretches after 1, 4 and 16 training lengths, the same tokens for all; a DRT also with random chunks and with BM25's in
place of its own. Of each row the seeds are measured that were trained. Stopped, the same command goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, keep, parameters
from learning import diagnosed, held_out
from learning_lengths import COUNTED, below, last_tokens
from pretrained_models import (
    FOLDER,
    Losses,
    Text,
    chapters,
    interval,
    opened,
    parser_of,
    run_parts,
    weights_of,
)
from training_text import train as train_run

from trailmark.data.corpus import load_tokenizer, read_text, tokenize
from trailmark.files import write_text
from trailmark.report.console import Progress
from trailmark.training.config import RunConfig, load_run_config
from trailmark.untrusted import read_yaml

OUTPUT = Path(__file__).with_suffix(".json")
CONFIG = ROOT / "configs" / "laptop-drt-math.yaml"
STEPS = (250, 500, 1000)  # at which a DRT is diagnosed; trained for the last
LOOKUP = ("model.memory_values=next", "model.gca_start=lookup", "model.residual_gca=true")
DRTS = {
    "DRT": (),
    "DRT, residual": LOOKUP[-1:],
    "lookup": LOOKUP,
    "lookup, no noise": (*LOOKUP, "model.retrieval_noise=false"),
    "lookup, random": (*LOOKUP, "model.retriever=random"),
}
PLAIN = {
    "window": (),
    "window, layers": ("model.num_hidden_layers=6",),
    "full attention": ("model.sliding_window=null",),
}
ROWS = DRTS | PLAIN
RULES = dict.fromkeys(("DRT", "lookup"), ("random", "BM25"))
FACTORS = (1, 4, 16)  # of the training length
OTHERS = ("window", "window, layers", "lookup, random", "DRT")  # below which a row is told to lie


def trained(row: str, seed: int) -> Path:
    return FOLDER / "-".join(["from-nothing", *row.replace("DRT", "").replace(",", "").split(), str(seed)])


def config_of(row: str, seed: int) -> RunConfig:
    """The run of a row; a model without a memory has of the DRT's fields those that every model has."""
    file, fields = trained(row, seed).with_suffix(".yaml"), read_yaml(CONFIG, "config")
    if row in PLAIN:
        names = (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "sliding_window",
            "initialization", "logit_scale",
        )  # fmt: skip
        fields["model"] = {name: fields["model"][name] for name in names} | {"architecture": "sliding_window"}
    lines = [f"  {name}: {value}" for name, value in fields.pop("model").items()]
    write_text(file, "\n".join(["model:", *lines, ""]))
    settings = [
        f"{part}.{name}={str(value).lower() if isinstance(value, bool) else value}"
        for part in ("data", "training")
        for name, value in fields[part].items()
    ]
    return load_run_config(file, [
        *settings, f"output={trained(row, seed)}", f"training.seed={seed}", f"training.steps={STEPS[-1]}",
        f"training.save_steps={STEPS[0]}", f"training.keep_checkpoints={STEPS[-1] // STEPS[0]}", *ROWS[row],
    ])  # fmt: skip


def train(options: argparse.Namespace) -> None:
    for seed in options.seeds:
        for row in options.rows:
            train_run(config_of(row, seed))


# --- what it makes of chunks ---------------------------------------------------------------------------------------


def diagnose(options: argparse.Namespace) -> None:
    (seed, *_) = options.seeds
    for name in (row for row in options.rows if row in RULES):
        folder, config = trained(name, seed), config_of(name, seed)
        text, length, rows = held_out(Path(config.data.tokenizer)), config.training.context_length, []
        for step in STEPS:
            checkpoint = folder / "checkpoints" / f"step-{step:08d}"
            own = diagnosed(checkpoint, f"{folder.name}-{step}-diagnosis", length, options.texts, text)
            rows.append({"step": step, "tokens": step * config.training.tokens_per_step} | own)
        about = {"seed": seed, "length": length, "texts": options.texts}
        about |= {"parameters": parameters(opened(folder))}
        keep(options.output, f"diagnosis, {name}", about | {"rows": rows})


# --- the same tokens after more and more text ----------------------------------------------------------------------


def stretches(tokenizer: Any, length: int, joined: bool) -> Iterator[Text]:
    """Held-out stretches that share nothing, of each chapter or of each work's chapters one after another."""
    files = chapters()
    for name, own in groupby(files, lambda file: file.stem.split("_")[0] if joined else file.stem):
        ids = tokenize([read_text(file) for file in own], tokenizer)
        for first in range(0, len(ids) - length + 1, length):
            yield Text(f"{name} from {first}", ids[first : first + length])


def measure(options: argparse.Namespace) -> None:
    progress = Progress()
    config = config_of("DRT", 0)
    tokenizer, length = load_tokenizer(str(config.data.tokenizer)), config.training.context_length
    there: dict[str, dict[int, Path]] = {}
    for row in ROWS:
        folders = {seed: trained(row, seed) for seed in options.seeds}
        if own := {seed: x for seed, x in folders.items() if (x / "model.safetensors").exists()}:
            there[row] = own
    losses, rows = Losses(FOLDER / "learning-small.json", progress), []
    for most in FACTORS[1:]:
        texts = list(stretches(tokenizer, most * length, most == FACTORS[-1]))
        for factor in (f for f in FACTORS if f <= most):
            found: dict[str, Any] = {}  # [seeds, texts] nats of a token by case
            for row, folders in there.items():
                if row == "full attention" and factor > 1:
                    continue  # never trained so long
                rules = RULES.get(row, ())
                cut = [text._replace(ids=text.ids[-factor * length :]) for text in texts]
                nats = [
                    np.array(losses.of(
                        f"{row}, {weights_of(folder)[:12]}, {', '.join(rules)}", partial(opened, folder), cut,
                        partial(last_tokens, cut, rules),
                    )).mean(-1)
                    for folder in folders.values()
                ]  # fmt: skip
                cases = (row, *(f"{row}, told {rule}" for rule in rules))
                found |= dict(zip(cases, np.moveaxis(np.array(nats), -1, 0), strict=True))
            rows += [_row(most, factor, case, found) for case in found]
    models = {
        row: {"seeds": [*folders], "parameters": parameters(opened(next(iter(folders.values()))))}
        for row, folders in there.items()
    }
    about = {"length": length, "counted": COUNTED, "steps": STEPS[-1], "models": models}
    about |= {"tokens": STEPS[-1] * config.training.tokens_per_step}
    keep(options.output, "losses", about | {"rows": rows})
    progress.say(f"Measured, in {options.output}")


def _row(most: int, factor: int, case: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Of a case its nats, and how far they lie below those of others, with intervals over texts."""
    own = found[case]
    row = {"of": most, "factor": factor, "case": case, "texts": own.shape[1], "nats": float(own.mean())}
    row["by_seed"] = own.mean(1).tolist()
    others = {other: other for other in OTHERS} | {
        f"{case}, told {rule}": f"told {rule}" for rule in RULES.get(case, ())
    }
    for other, called in others.items():
        if other != case and other in found:
            row |= interval(f"below {called}", below(found[other], own))
    return row


PARTS = {"train": train, "diagnose": diagnose, "measure": measure}


def main() -> None:
    parser = parser_of(__doc__, PARTS, OUTPUT, any_folder=False)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=(0,))
    parser.add_argument("--texts", type=int, default=8, help="that are diagnosed")
    run_parts(PARTS, parser.parse_args())


if __name__ == "__main__":
    main()
