"""Does a small model learn from nothing to retrieve from text, and does it give more than layers?

    TRAILMARK_DATA=... python benchmarks/learning_small.py [prepare train diagnose measure] [--kind LaTeX]
        [--rows DRT lookup ...] [--seeds 0]

Writes benchmarks/learning_small.json. The case study's model (configs/laptop-drt-math.yaml) and others learn from the
same tokens of LaTeX, source code or books (--kind) in as many steps: "DRT" as published, "DRT, residual" with what is
read in the residual stream, "lookup" with that, values of what came next and a GCA that begins as a lookup, "lookup,
no noise" without noise in the choice of training, "lookup, random" with chunks drawn at random in training and after
it, and without a memory "window", "window, layers" (as many parameters as the DRT, within 5%) and "full attention".
prepare: a vocabulary and shards. diagnose: the suite of `trailmark evaluate --suite retrieval` as the training of the
DRTs goes on. measure: the last tokens of held-out stretches after 1, 4 and 16 training lengths, the same tokens for
all; a DRT also with random chunks and with BM25's in place of its own. Of each row the seeds are measured that were
trained. Stopped, the same command goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, keep, parameters
from learning import diagnosed
from learning_kinds import KINDS, folder_of, held_out_texts, prepare_kind
from learning_lengths import COUNTED, below, last_tokens
from pretrained_models import (
    FOLDER,
    Losses,
    Text,
    interval,
    opened,
    parser_of,
    run_parts,
    weights_of,
)
from training_text import train as train_run

from trailmark.data.corpus import load_tokenizer, tokenize
from trailmark.evaluation.documents import Documents
from trailmark.files import write_text
from trailmark.report.console import Progress
from trailmark.training.config import RunConfig, load_run_config
from trailmark.untrusted import read_yaml

OUTPUT = Path(__file__).with_suffix(".json")
CONFIG = ROOT / "configs" / "laptop-drt-math.yaml"
STEPS = (250, 500, 1000)  # at which a DRT is diagnosed; trained for the last
LOOKUP = ("model.memory_values=next", "model.gca_start=lookup", "model.residual_gca=true")
NEAR = ("model.chunk_summary=mean", "model.retrieval_query=chunk", "model.retrieval_recency=0.5")
DRTS = {
    "DRT": (),
    "DRT, residual": LOOKUP[-1:],
    "lookup": LOOKUP,
    "lookup, near": (*LOOKUP, *NEAR),
    "lookup, no noise": (*LOOKUP, "model.retrieval_noise=false"),
    "lookup, random": (*LOOKUP, "model.retriever=random"),
}
PLAIN = {
    "window": (),
    "window, layers": ("model.num_hidden_layers=6",),
    "full attention": ("model.sliding_window=null",),
}
ROWS = DRTS | PLAIN
RULES = dict.fromkeys(("DRT", "lookup", "lookup, near"), ("random", "BM25", "recent"))
FACTORS = (1, 4, 16)  # of the training length
MOST = 18  # stretches of a length
LATEX = "LaTeX"
OTHERS = ("window", "window, layers", "lookup, random", "DRT")  # below which a row is told to lie


def trained(row: str, seed: int, kind: str = LATEX) -> Path:
    words = [*([] if kind == LATEX else [kind.lower()]), *row.replace("DRT", "").replace(",", "").split()]
    return FOLDER / "-".join(["from-nothing", *words, str(seed)])


def called(name: str, kind: str) -> str:
    """How a part is named in the JSON, of a kind of text."""
    return name if kind == LATEX else f"{name}, {kind}"


def config_of(row: str, seed: int, kind: str = LATEX) -> RunConfig:
    """The run of a row; a model without a memory has of the DRT's fields those that every model has."""
    folder, fields = trained(row, seed, kind), read_yaml(CONFIG, "config")
    file, texts = folder.with_suffix(".yaml"), folder_of(kind)
    if row in PLAIN:
        names = (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "sliding_window",
            "initialization", "logit_scale",
        )  # fmt: skip
        fields["model"] = {name: fields["model"][name] for name in names} | {"architecture": "sliding_window"}
    if kind != LATEX:  # measured when it is trained, not while
        fields["data"] |= {
            "paths": f"[{texts / 'train'}]",
            "tokenizer": texts / "tokenizer",
            "validation": "null",
        }
        fields["training"] |= {"eval_steps": "null"}
    lines = [f"  {name}: {value}" for name, value in fields.pop("model").items()]
    write_text(file, "\n".join(["model:", *lines, ""]))
    settings = [
        f"{part}.{name}={str(value).lower() if isinstance(value, bool) else value}"
        for part in ("data", "training")
        for name, value in fields[part].items()
    ]
    return load_run_config(file, [
        *settings, f"output={folder}", f"training.seed={seed}", f"training.steps={STEPS[-1]}",
        f"training.save_steps={STEPS[0]}", f"training.keep_checkpoints={STEPS[-1] // STEPS[0]}", *ROWS[row],
    ])  # fmt: skip


def prepare(options: argparse.Namespace) -> None:
    prepare_kind(options.kind)


def train(options: argparse.Namespace) -> None:
    for seed in options.seeds:
        for row in options.rows:
            train_run(config_of(row, seed, options.kind))


# --- what it makes of chunks ---------------------------------------------------------------------------------------


def diagnose(options: argparse.Namespace) -> None:
    (seed, *_) = options.seeds
    for name in (row for row in options.rows if row in RULES):
        folder, config = trained(name, seed, options.kind), config_of(name, seed, options.kind)
        text = Documents.of(held_out_texts(options.kind), load_tokenizer(str(config.data.tokenizer)))
        length, rows = config.training.context_length, list[dict[str, Any]]()
        for step in STEPS:
            checkpoint = folder / "checkpoints" / f"step-{step:08d}"
            own = diagnosed(checkpoint, f"{folder.name}-{step}-diagnosis", length, options.texts, text)
            rows.append({"step": step, "tokens": step * config.training.tokens_per_step} | own)
        about = {"seed": seed, "length": length, "texts": options.texts}
        about |= {"parameters": parameters(opened(folder))}
        keep(options.output, called(f"diagnosis, {name}", options.kind), about | {"rows": rows})


# --- the same tokens after more and more text ----------------------------------------------------------------------


def stretches(tokenizer: Any, length: int, joined: bool, kind: str = LATEX) -> list[Text]:
    """Held-out stretches that share nothing, of each text or of those that belong together one after another."""
    found = []
    for name, texts in KINDS[kind].held_out(joined):
        ids = tokenize(texts, tokenizer)
        for first in range(0, len(ids) - length + 1, length):
            found.append(Text(f"{name} from {first}", ids[first : first + length]))
    spread = np.linspace(0, len(found) - 1, min(MOST, len(found))).round().astype(int)
    return [found[number] for number in spread]


def measure(options: argparse.Namespace) -> None:
    progress, kind = Progress(), options.kind
    config = config_of("DRT", 0, kind)
    tokenizer, length = load_tokenizer(str(config.data.tokenizer)), config.training.context_length
    there: dict[str, dict[int, Path]] = {}
    for row in ROWS:
        folders = {seed: trained(row, seed, kind) for seed in options.seeds}
        if own := {seed: x for seed, x in folders.items() if (x / "model.safetensors").exists()}:
            there[row] = own
    losses = Losses(FOLDER / f"{called('learning-small', kind).lower().replace(', ', '-')}.json", progress)
    rows = list[dict[str, Any]]()
    for most in FACTORS[1:]:
        texts = stretches(tokenizer, most * length, most == FACTORS[-1], kind)
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
    keep(options.output, called("losses", kind), about | {"rows": rows})
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


PARTS = {"prepare": prepare, "train": train, "diagnose": diagnose, "measure": measure}


def main() -> None:
    parser = parser_of(__doc__, PARTS, OUTPUT, any_folder=False)
    parser.add_argument("--kind", choices=KINDS, default=LATEX, help="of text")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=(0,))
    parser.add_argument("--texts", type=int, default=8, help="that are diagnosed")
    run_parts(PARTS, parser.parse_args())


if __name__ == "__main__":
    main()
