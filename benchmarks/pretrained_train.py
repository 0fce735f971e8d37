"""Train what a conversion added to SmolLM2-135M, on LaTeX and source code, for benchmarks/pretrained.py to measure.

    TRAILMARK_DATA=... python benchmarks/pretrained_train.py [--steps 100] [--window 256] [--seed 0] [--set ...]

The additions alone, from the base with full attention as a teacher: a recipe for hours of a CPU. Its twin is the base
with the same window and sinks: all that is not an addition stays bit for bit as it was. Stopped, the same command goes
on.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common import data_folder
from pretrained import FOLDER, converted, has_bfloat16
from training_text import prepared, train

from trailmark.data.corpus import standard_library_texts
from trailmark.files import write_text
from trailmark.training.config import RunConfig, load_run_config

LENGTH = 4096


def corpus(folder: Path, tokenizer: Path) -> Path:
    """Shards of the chapters and modules to train on, made once."""
    texts = folder / "texts"
    if not texts.exists():
        for file in sorted((data_folder("math") / "train").glob("*.tex")):
            write_text(texts / file.name, file.read_text())
        for number, text in enumerate(standard_library_texts("train")):
            write_text(texts / f"module-{number:04d}.py", text)
    prepared(texts, folder / "shards", tokenizer)
    return folder / "shards"


def config(options: argparse.Namespace) -> RunConfig:
    teacher = converted(options.folder, "sliding_window")
    # one encoder layer: the states of the lower layers say more than layers that begin as nothing
    drt = converted(
        options.folder, "drt", f"sliding_window={options.window}", "num_encoder_layers=1", *options.model
    )
    file = options.folder / "additions.yaml"
    write_text(file, "model: {}\n")
    return load_run_config(
        file,
        [
            f"output={options.folder / options.name}",
            f"init_from={drt}",
            f"data.paths=[{corpus(options.folder, teacher)}]",
            f"data.tokenizer={drt}",
            "training.train=additions",
            f"training.steps={options.steps}",
            f"training.seed={options.seed}",
            f"training.tokens_per_step={LENGTH}",
            f"training.context_length={LENGTH}",
            "training.micro_batch_size=1",
            f"training.precision={'bfloat16' if has_bfloat16() else 'float32'}",
            "training.matrix_learning_rate=0.03",
            "training.learning_rate=0.003",
            "training.weight_decay=0",
            "training.warmup_steps=4",
            "training.loss_positions=0.25",
            "training.save_steps=10",
            "training.logging_steps=2",
            f"distil.model={teacher}",
            "distil.weight=2",
            "distil.retrieval_weight=2",
            *options.set,
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="conversions, text and models")
    parser.add_argument("--name", default="drt-additions", help="of the trained model's folder there")
    parser.add_argument("--steps", type=int, default=100, help=f"of {LENGTH:,} tokens")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", nargs="*", default=[], help="fields of the converted model, as key=value")
    parser.add_argument("--set", nargs="*", default=[], help="keys of the run, as key=value")
    train(config(parser.parse_args()))


if __name__ == "__main__":
    main()
