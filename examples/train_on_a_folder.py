"""Train a small DRT on a folder of text and see what it makes of text it has not seen.

    python examples/train_on_a_folder.py my-folder held-out-folder runs/mine [--steps 500]

Started again after a stop, it goes on. The same by command: docs/training.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from trailmark.data.prepare import prepare
from trailmark.data.recipes import parse_source
from trailmark.evaluation.perplexity.run import evaluate_perplexity
from trailmark.evaluation.subject import load
from trailmark.training.config import load_run_config
from trailmark.training.run import Run

CONFIG = Path(__file__).parent.parent / "configs" / "text.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="UTF-8 text files to train on")
    parser.add_argument("held_out", type=Path, help="text to measure on")
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    arguments = parser.parse_args()

    # text -> tokens on disk, in parallel; a second time they are there already
    shards = arguments.output / "data"
    corpus = prepare(parse_source([arguments.folder]), shards)
    print(f"{len(corpus):,} tokens of {corpus.documents:,} documents in {shards}")

    config = load_run_config(
        CONFIG,
        [
            f"data.paths={json.dumps([str(shards)])}",
            f"output={arguments.output}",
            f"training.steps={arguments.steps}",
        ],
    )

    def show(run: Run) -> None:
        if run.step % 10 == 0:
            print(
                f"step {run.step}: loss {run.averages['loss']:.3f} (average), {run.tokens_per_second:,.0f} tokens/s"
            )

    run = Run(config, show, say=print)
    if not run.finished:
        run.train()

    model = load(arguments.output)
    length = config.training.context_length
    found = evaluate_perplexity(model.model, model.tokens([arguments.held_out]), length)
    print(f"perplexity on {arguments.held_out}: {found.perplexity:.2f} ({found.tokens:,} tokens)")


if __name__ == "__main__":
    main()
