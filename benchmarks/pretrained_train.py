"""Train SmolLM2-135M as a DRT, with a window alone and with full attention on the same tokens, for pretrained.py.

    TRAILMARK_DATA=... python benchmarks/pretrained_train.py [drt window full] [--steps 20] [--window 256] [--seed 0]

LaTeX and source code, with the base under full attention as a teacher of all three. Each learns adapters of its layers,
so that what the kind of text teaches is in all of them; the DRT learns its additions too, after its memory was
fitted to the teacher. A recipe for an hour of a CPU. Stopped, the same command goes on; what is trained already is left
as it is. ``needles`` goes on with the DRT, on texts that hold facts and questions about them; ``landmark`` trains all
weights of a Landmark Attention model instead, by itself; ``hils`` adapters of a HiLS on texts that all hold facts;
``recall`` those of the base with full attention on short texts of that kind, which a HiLS then has without a training;
``further`` goes on from there with longer ones, ``few`` from that with full attention in seven layers alone, and
``longer`` from that with longer ones again, in which answers weigh more. ``reader`` learns the like at once, from the
base with full attention in the seven layers that ``trailmark convert --far-layers 7`` finds; ``reader-some`` with
facts in a twentieth of the texts, and ``reader-none`` without any.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common import data_folder
from pretrained_models import (
    DRT_FIELDS,
    FAR_LAYERS,
    FOLDER,
    KINDS,
    NUM_LAYERS,
    READERS,
    STEP_TOKENS,
    TAUGHT,
    WINDOW,
    converted,
    far_base,
    trained,
    window_fields,
)
from training_text import prepared, train

from trailmark.data.corpus import standard_library_texts
from trailmark.evaluation.far_layers import layer_types
from trailmark.files import write_text
from trailmark.machine import start_again_set_up
from trailmark.training.config import RunConfig, load_run_config

LENGTH = STEP_TOKENS  # a text a step
MORE = ("needles", "landmark", "hils", *TAUGHT, *READERS)
STEPS = {"recall": 200, "further": 70, "few": 150, "longer": 100} | dict.fromkeys(READERS, 180)
# of texts that hold facts; others 2,048
LENGTHS = {"recall": 1024, "longer": 4096} | dict.fromkeys(READERS, 4096)


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


def config(kind: str, steps: int, options: argparse.Namespace) -> RunConfig:
    """Of one of KINDS or MORE."""
    teacher, window = converted(options.folder, "sliding_window"), f"sliding_window={options.window}"
    changes = ["distil.retrieval_weight=0"]
    if kind == "landmark":  # nothing of it is added that could learn alone
        begin = converted(options.folder, "landmark")
        changes += [
            "training.train=all",
            "training.lora_rank=0",
            "training.optimizer=adamw",
            "training.learning_rate=0.0003",
            "training.context_length=2048",  # so that its own length can be passed 32 times in minutes
        ]
    elif kind in ("hils", *TAUGHT, *READERS):  # needs no teacher: what it learns is to complete facts
        begin = teacher
        if kind == "hils":
            begin = converted(options.folder, "hils")
        elif kind in READERS:
            begin = far_base(options.folder)
        share = READERS.get(kind, 1)
        changes = [
            "distil.model=null",
            f"data.needle_share={share}",
            f"training.context_length={LENGTHS.get(kind, 2048)}",
            "training.loss_positions=1",
        ]
        if kind in TAUGHT[1:]:
            before = TAUGHT[TAUGHT.index(kind) - 1]
            begin = trained(options.folder, before, options.window, options.seed)
            # so "few" begins with the samples of "further" again
            changes.append(f"training.seed={options.seed + (2 if kind == 'longer' else 1)}")
        if kind == "further":
            changes.append("training.constant_fraction=1")  # another training follows
        if kind == "longer" or (kind in READERS and share):
            changes.append("data.answer_weight=8")
        if kind in ("few", "longer"):
            fields = (*window_fields(WINDOW), layer_types(FAR_LAYERS, NUM_LAYERS))
            changes += [f"model.{field}" for field in fields]
    elif kind == "needles":  # on from the DRT: nothing but texts with facts and questions about them
        begin = trained(options.folder, "drt", options.window, options.seed)
        changes = [
            "distil.retrieval_weight=10",
            "data.needle_share=1",
            "training.context_length=1024",
            "training.loss_positions=1",
        ]
    elif kind == "drt":
        begin = converted(options.folder, "drt", window, *DRT_FIELDS, *options.model)
        changes = ["distil.retrieval_weight=10", "distil.fit_steps=48"]
    else:
        begin = teacher if kind == "full" else converted(options.folder, "sliding_window", window)
    file = options.folder / "additions.yaml"
    write_text(file, "model: {}\n")
    return load_run_config(
        file,
        [
            f"output={trained(options.folder, kind, options.window, options.seed)}",
            f"init_from={begin}",
            f"data.paths=[{corpus(options.folder, teacher)}]",
            f"data.tokenizer={teacher}",
            "training.train=additions",
            "training.lora_rank=8",
            f"training.steps={steps}",
            f"training.seed={options.seed}",
            f"training.tokens_per_step={LENGTH}",
            f"training.context_length={LENGTH}",
            "training.micro_batch_size=1",
            "training.precision=auto",
            "training.matrix_learning_rate=0.01",
            "training.learning_rate=0.001",
            "training.weight_decay=0",
            "training.warmup_steps=4",
            "training.loss_positions=0.25",
            "training.save_steps=10",
            "training.keep_checkpoints=100",  # for the curve
            "training.logging_steps=2",
            f"distil.model={teacher}",
            "distil.weight=2",
            *changes,
            *options.set,
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "kinds",
        nargs="*",
        choices=[*KINDS, *MORE, []],
        help="default: all that are compared",
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="conversions, text and models")
    parser.add_argument(
        "--steps", type=int, nargs="+",
        help=f"of {LENGTH:,} tokens, of all kinds or of each; default: {STEPS}, others 20",
    )  # fmt: skip
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", nargs="*", default=[], help="fields of the converted DRT, as key=value")
    parser.add_argument("--set", nargs="*", default=[], help="keys of the runs, as key=value")
    options = parser.parse_args()
    kinds = options.kinds or KINDS
    if options.steps and len(options.steps) not in (1, len(kinds)):
        parser.error(
            f"--steps: expected one number, or one for each of {len(kinds)} kinds, got {len(options.steps)}."
        )
    start_again_set_up()  # as `trailmark train` does
    for number, kind in enumerate(kinds):
        steps = STEPS.get(kind, 20) if options.steps is None else (options.steps * len(kinds))[number]
        train(config(kind, steps, options))


if __name__ == "__main__":
    main()
