"""What training costs beside the model's own arithmetic, and how its time grows with the context.

    python benchmarks/training.py overhead         trailmark train against a bare loop of the same training
    python benchmarks/training.py loader           batches alone against what the demo's model consumes
    python benchmarks/training.py length           time per token by context length

Each writes its part of benchmarks/training.json (on CUDA training-cuda.json) as it goes and, started again, goes on
where it was stopped; a part with other settings or from another machine is measured anew. What is compared is
interleaved in one process.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from common import CONFIGS, ROOT, Timers, interleaved, parameters, spread
from torch import nn
from training_text import prepared_bytes

from trailmark.data.shards import Corpus
from trailmark.evaluation.record import environment
from trailmark.files import read_json, write_json
from trailmark.machine import start_again_set_up
from trailmark.models import MODELS, TrailmarkForCausalLM
from trailmark.training import trainer as trainer_module
from trailmark.training.config import RunConfig, load_run_config
from trailmark.training.loss import Meter, weighted_loss
from trailmark.training.run import Run
from trailmark.training.tasks import NeedleTask, Task, TextTask
from trailmark.training.trainer import make_optimizer, schedule

OUTPUT = Path(__file__).with_suffix(".json")
FOLDER = ROOT / "runs" / "benchmark-training"


class Record:
    """The JSON file: each part with its settings, and the machine it was measured on."""

    def __init__(self, path: Path) -> None:
        self.path, self.content = path, read_json(path) or {}

    def part(self, name: str, settings: dict[str, Any], again: bool = False) -> dict[str, Any]:
        """What was measured of a part so far; an empty one if that was with other settings, or elsewhere."""
        here = environment()
        kept = self.content.get(name)
        if not again and kept is not None and kept["settings"] == settings:
            there = kept["environment"]
            if all(there.get(key) == here[key] for key in here if key != "date"):
                return kept
        part = self.content[name] = {"environment": here, "settings": settings, "results": []}
        return part

    def keep(self) -> None:
        write_json(self.path, self.content)


# --- overhead ----------------------------------------------------------------------------------------------

WARM_UP = 10  # steps before the first block
WHO = ("trailmark", "bare")


class BareLoop:
    """The same steps without a Trainer: batch, loss, backward, clipping, optimizer, schedule; nothing is measured,
    guarded or saved. It begins with the run's own weights."""

    def __init__(self, run: Run, timers: Timers) -> None:
        self.run, self.settings = run, run.config.training
        self.model = copy.deepcopy(run.model).train()
        self.optimizer = make_optimizer(self.model, self.settings)
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]
        self.clip = timers.around("clipping", nn.utils.clip_grad_norm_)
        self.backward = timers.around("backward", torch.Tensor.backward)
        self.loss = timers.around("forward", weighted_loss)

    def step(self, number: int) -> int:
        """Step 0, 1, ...; returns its tokens."""
        device = next(self.model.parameters()).device
        batch = {key: x.to(device) for key, x in self.run.batch(number).items()}
        rate = schedule(self.settings, number)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * rate
        with torch.autocast(device.type, torch.bfloat16, enabled=self.settings.computes_in == "bfloat16"):
            loss = self.loss(self.model, batch).loss
        self.backward(loss)
        self.clip(self.model.parameters(), self.settings.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return batch["input_ids"].numel()


class Overhead:
    """Trains a configuration and, after every step, takes the same step in a bare loop: both see the same machine."""

    def __init__(self, config: RunConfig, block: int) -> None:
        self.block, self.timers = block, Timers()
        self.parts = {"trailmark": self.timers.seconds, "bare": Timers().seconds}
        self.run = Run(config, self._after_step)
        self.bare = BareLoop(self.run, self.timers)
        self.spans: dict[str, list[float]] = {who: [] for who in WHO}  # of each step
        self.tokens: list[int] = []
        self.resumed = time.perf_counter()

    def measure(self) -> dict[str, Any]:
        optimizer = type(self.bare.optimizer)
        with self.timers.on(
            (type(self.run.task), "batch", "batch"),
            (trainer_module, "total_weight", "weights of the loss"),
            (trainer_module, "weighted_loss", "forward"),
            (Meter, "add", "measuring"),
            (Run, "look_at", "retrieval statistics"),
            (Accelerator, "backward", "backward"),
            (Accelerator, "clip_grad_norm_", "clipping"),
            (Run, "may_step", "guard and averages"),
            (optimizer, "step", "optimizer"),
            (Run, "save_checkpoint", "checkpoints"),
        ):
            if self.run.train() is None:
                raise SystemExit("overhead: stopped. The same command begins this configuration anew.")
        return self._found()

    def _after_step(self, run: Run) -> None:
        """Called by the run: what lies between two calls is the Trainer's step, checkpoints included."""
        now = time.perf_counter()
        self.spans["trailmark"].append(now - self.resumed)
        self.timers.seconds = self.parts["bare"]
        self.tokens.append(self.bare.step(run.step - 1))
        self.timers.seconds = self.parts["trailmark"]
        if run.step == WARM_UP:
            for parts in self.parts.values():
                parts.clear()
        self.resumed = time.perf_counter()
        self.spans["bare"].append(self.resumed - now)

    def _found(self) -> dict[str, Any]:
        blocks = [
            slice(first, first + self.block)
            for first in range(WARM_UP, len(self.tokens) - self.block + 1, self.block)
        ]
        counted = slice(WARM_UP, WARM_UP + len(blocks) * self.block)
        rates = {who: [sum(self.tokens[b]) / sum(self.spans[who][b]) for b in blocks] for who in WHO}
        parts: dict[str, dict[str, float]] = {}
        for who in WHO:  # milliseconds of a step, by part
            taken = {name: s / (len(self.tokens) - WARM_UP) for name, s in self.parts[who].items()}
            whole = statistics.fmean(self.spans[who][counted])
            parts[who] = {
                name: s * 1000 for name, s in (taken | {"rest": whole - sum(taken.values())}).items()
            }
        own, bare = self.run.model.state_dict(), self.bare.model.state_dict()
        return {
            "tokens_per_second": {who: spread(rates[who]) for who in WHO},
            "ratios": [own / bare for own, bare in zip(rates["trailmark"], rates["bare"], strict=True)],
            "median_step_ratio": statistics.median(self.spans["bare"][counted])
            / statistics.median(self.spans["trailmark"][counted]),
            "milliseconds_of_a_step": parts,
            # that the loop is the same training is not claimed but seen
            "same_weights": all(torch.equal(own[name], bare[name]) for name in own),
        }


def overhead(arguments: argparse.Namespace, record: Record) -> None:
    settings = {"steps": arguments.steps, "blocks": arguments.blocks}
    part = record.part("overhead", settings, arguments.again)
    for name in arguments.configs:
        if any(result["config"] == name for result in part["results"]):
            continue
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:  # the disk that a run would be on
            steps = WARM_UP + arguments.steps * arguments.blocks
            changes = [
                f"output={folder}/run",
                f"training.steps={steps}",
                f"training.save_steps={arguments.steps}",
            ]
            config = load_run_config(CONFIGS / f"{name}.yaml", changes + arguments.set)
            result = {"config": name} | Overhead(config, arguments.steps).measure()
        part["results"].append(result)
        record.keep()
        print(name, "ratios", [f"{ratio:.3f}" for ratio in result["ratios"]], flush=True)


# --- loader ------------------------------------------------------------------------------------------------


def tokens_per_second(work: Callable[[int], int], first: int, enough: float) -> tuple[float, int]:
    """Tokens/s of ``work(step)``, which returns its tokens, for ``enough`` seconds; the step to go on with."""
    began, tokens, step = time.perf_counter(), 0, first
    while True:
        tokens += work(step)
        step += 1
        if (taken := time.perf_counter() - began) >= enough:
            return tokens / taken, step


def loader_tasks(corpus: Corpus) -> dict[str, Task]:
    """Text as configs/text.yaml has it, with and without documents and early landmarks; the demo's needles."""
    tasks: dict[str, Task] = {}
    for documents in (False, True):
        for early in (0.0, 0.1):
            config = load_run_config(CONFIGS / "text.yaml", [f"data.early_landmarks={early}"])
            config.data.separate_documents = documents
            name = "text" + ", documents apart" * documents + ", early landmarks" * (early > 0)
            tasks[name] = TextTask(config, corpus, config.model_config().chunk_size)
    return tasks


def needle_tasks(run: Run) -> dict[str, Task]:
    """The first and the last level of the demo's curriculum."""
    tasks: dict[str, Task] = {}
    assert run.corpus is not None
    for level in (0, len(run.curriculum.levels) - 1):
        curriculum = copy.deepcopy(run.curriculum)
        curriculum.starts = curriculum.samples = [0] * (level + 1)
        task = NeedleTask(run.config, run.corpus, run.tokenizer, curriculum)
        tasks[f"needles, {curriculum.levels[level].chunks} chunks"] = task
    return tasks


def loader(arguments: argparse.Namespace, record: Record) -> None:
    settings = {"rounds": arguments.rounds, "seconds": arguments.seconds}
    part = record.part("loader", settings, arguments.again)
    if part["results"]:
        return
    corpus = prepared_bytes(FOLDER)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        run = Run(load_run_config(CONFIGS / "needle-drt.yaml", [f"output={folder}"]))
    bare = BareLoop(run, Timers())
    tasks = loader_tasks(corpus) | needle_tasks(run)

    def of_task(task: Task) -> Callable[[int], int]:
        return lambda step: task.batch(step, 0, task.rows(step))["input_ids"].numel()

    work = {name: of_task(task) for name, task in tasks.items()} | {"the demo's model": bare.step}
    steps = dict.fromkeys(work, 0)

    def rate(name: str) -> float:
        found, steps[name] = tokens_per_second(work[name], steps[name], arguments.seconds)
        return found

    found = interleaved({name: functools.partial(rate, name) for name in work}, arguments.rounds)
    model = statistics.median(found["the demo's model"])
    part |= {"corpus": {"tokens": len(corpus), "documents": len(corpus.document_starts)}}
    part["results"] = [
        {
            "what": name,
            "tokens_per_second": spread(rates),
            "times_the_model": statistics.median(rates) / model,
        }
        for name, rates in found.items()
    ]
    record.keep()
    for result in part["results"]:
        print(
            f"{result['what']}: {result['tokens_per_second']['median']:,.0f}, {result['times_the_model']:.1f}x"
        )


# --- a step of a model on random tokens ----------------------------------------------------------------------


class Step:
    """Training steps of one model: micro-batches of ``rows`` random texts, bfloat16 autocast on CUDA."""

    def __init__(self, config: RunConfig, device: str, vocab_size: int | None = None) -> None:
        fields = config.model_config(vocab_size)
        torch.manual_seed(0)
        with torch.device(device):
            self.model: TrailmarkForCausalLM = MODELS[fields.model_type](fields).train()
        self.optimizer = make_optimizer(self.model, config.training)
        self.device, self.count = device, 0

    @property
    def parameters(self) -> int:
        return parameters(self.model)

    def run(self, rows: int, length: int, micro: int = 1) -> tuple[float, float]:
        """Forward, backward of ``micro`` micro-batches and the optimizer: seconds, and seconds of processor time."""
        self.count += 1
        generator = torch.Generator().manual_seed(self.count)
        vocab_size = self.model.config.vocab_size
        ids = torch.randint(vocab_size, (micro, rows, length), generator=generator).to(self.device)
        seeds = torch.arange(rows, device=self.device) + self.count
        began, processor = self._now(), time.process_time()
        for part in ids:
            with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
                loss = self.model(part, labels=part, noise_seed=seeds).loss
            (loss / micro).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self._now() - began, time.process_time() - processor

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


# --- length ------------------------------------------------------------------------------------------------

LENGTH_MODELS = {
    "window only": "laptop-base-128",
    "full attention": "laptop-full-attention",
    "DRT x1": "laptop-drt-x1",
    "DRT x2": "laptop-drt-x2",
}


def length(arguments: argparse.Namespace, record: Record) -> None:
    device = arguments.device
    most = arguments.longest or (65_536 if device == "cuda" else 16_384)
    lengths = [1024 << n for n in range(most.bit_length()) if 1024 << n <= most]
    tokens = arguments.tokens or most
    settings = {"lengths": lengths, "tokens_per_step": tokens, "rounds": arguments.rounds, "device": device}
    part = record.part("length", settings, arguments.again)
    results = {(r["model"], r["length"]): r for r in part["results"]}
    models = {
        name: Step(load_run_config(CONFIGS / f"{config}.yaml"), device, arguments.vocabulary)
        for name, config in LENGTH_MODELS.items()
    }
    for name, step in models.items():
        for n in lengths:
            blank = {
                "model": name,
                "length": n,
                "parameters": step.parameters,
                "seconds": [],
                "processor": [],
            }
            results.setdefault((name, n), blank)
    part["results"] = list(results.values())
    done = min(len(r["seconds"]) for r in part["results"])
    for r in part["results"]:  # a round that was interrupted is taken again
        r["seconds"], r["processor"] = r["seconds"][:done], r["processor"][:done]
    for number in range(done, arguments.rounds + 1):
        for (name, n), result in results.items():
            seconds, processor = models[name].run(tokens // n, n)
            if number == done:  # the first round of a process warms up
                continue
            result["seconds"].append(seconds)
            result["processor"].append(processor)
        record.keep()
        print(f"round {number} of {arguments.rounds}", flush=True)
    for name, flat in deviations(part).items():
        print(f"{name}: at most {flat:.1%} from the median time per token")


def time_per_token(part: dict[str, Any]) -> dict[str, dict[int, float]]:
    """Seconds per token by model and length: medians over rounds."""
    found: dict[str, dict[int, float]] = {}
    for r in part["results"]:
        median = statistics.median(r["seconds"]) / part["settings"]["tokens_per_step"]
        found.setdefault(r["model"], {})[r["length"]] = median
    return found


def deviations(part: dict[str, Any]) -> dict[str, float]:
    """Of each model: how far its time per token at any length is from the median over lengths, as a share of it."""
    found = {}
    for name, times in time_per_token(part).items():
        middle = statistics.median(times.values())
        found[name] = max(abs(t - middle) / middle for t in times.values())
    return found


# --- the command -------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)

    def add(name: str, work: Callable[[argparse.Namespace, Record], None]) -> argparse.ArgumentParser:
        added = parts.add_parser(name)
        added.set_defaults(work=work)
        added.add_argument(
            "--output", type=Path, help="default: benchmarks/training.json, training-cuda.json"
        )
        added.add_argument("--again", action="store_true", help="also what the file holds already")
        return added

    one = add("overhead", overhead)
    one.add_argument("--configs", nargs="+", default=["needle-drt", "text"])
    one.add_argument("--steps", type=int, default=200, help="of a block, with one checkpoint")
    one.add_argument("--blocks", type=int, default=3)
    one.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="changes of the configuration")
    one = add("loader", loader)
    one.add_argument("--rounds", type=int, default=7)
    one.add_argument("--seconds", type=float, default=0.5, help="of each case in a round")
    one = add("length", length)
    one.add_argument("--rounds", type=int, default=5)
    one.add_argument("--longest", type=int, help="tokens; default: 16,384, on CUDA 65,536")
    one.add_argument("--tokens", type=int, help="of a step; default: the longest text")
    one.add_argument("--vocabulary", type=int, default=384)
    one.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse()
    start_again_set_up()  # as trailmark train does
    transformers.utils.logging.disable_progress_bar()
    try:
        measure(arguments)
    except KeyboardInterrupt:
        raise SystemExit("Stopped. The same command goes on from here.") from None


def measure(arguments: argparse.Namespace) -> None:
    output = arguments.output
    if output is None:
        on_cuda = torch.cuda.is_available() and getattr(arguments, "device", "cuda") == "cuda"
        output = OUTPUT.with_stem("training-cuda") if on_cuda else OUTPUT
    arguments.work(arguments, Record(output))
    print(f"Numbers: {output}")


if __name__ == "__main__":
    main()
