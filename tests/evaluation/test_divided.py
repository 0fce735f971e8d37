"""``torchrun -m trailmark evaluate``: what several processes measure together is what one finds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.data.corpora import prose
from tests.evaluation.yardsticks.test_yardsticks import babilong
from tests.models.tiny import drt, landmark
from tests.torchrun import by_processes
from trailmark.byte_tokenizer import ByteTokenizer
from trailmark.evaluation.evaluate import evaluate
from trailmark.evaluation.suite import Request

_OF_TIME = {
    "environment", "seconds", "seconds_reading", "seconds_asking", "seconds_writing", "tokens_per_second",
    "resident_bytes", "command",
}  # fmt: skip
_OF_WHAT_WAS_MISSING = {"cells_read_for", "tokens_read"}
NEEDLES = ["--suite", "needles", "--format", "marks", "--questions", "5", "--depths", "0.2,0.7"]
TEXT = ["--suite", "perplexity", "--max-tokens", "2000", "--lengths", "150,260"]
BY_PARTS = {
    "retrieval": ["--text", "text.txt", "--lengths", "400", "--texts", "3", "--sample", "4"],
    "summarization": ["--pairs", "pairs.jsonl", "--max-new-tokens", "3"],
    "lm-eval": ["--tasks", "ruler_fwe", "--limit", "1", "--lengths", "1200,1300"],
    "yardstick": ["--benchmark", "babilong", "--data", "tasks"],
}


def saved(name: str, folder: Path) -> Path:
    tokenizer = ByteTokenizer(extra_ids=0)
    tokenizer.save_pretrained(folder)
    if name == "llama":
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    else:
        made = {"drt": drt, "landmark": landmark}[name](vocab_size=len(tokenizer))
        made.save_pretrained(folder)
    return folder


def measured(model: Path, output: Path, processes: int, *words: str) -> dict[str, dict[str, Any]]:
    """The records by their suites, without what every run measures anew; and what the models wrote."""
    said = by_processes(processes, "evaluate", model, *words, "--output", output)
    assert said.count("Next: trailmark report") == 1  # one of them speaks
    found = {}
    for path in (output / model.name).glob("*.json"):
        results = json.loads(path.read_text())["results"]
        lines = path.with_name(f"{path.stem}.generations.jsonl")
        written = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
        found[path.stem] = {"results": [_untimed(result) for result in results], "written": written}
    return found


def _untimed(result: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name not in _OF_TIME}


@pytest.mark.parametrize(("name", "processes"), [("drt", 2), ("landmark", 3), ("llama", 3)])
@pytest.mark.slow
def test_several_processes_find_what_one_does(name: str, processes: int, tmp_path: Path) -> None:
    model = saved(name, tmp_path / "model")
    (tmp_path / "text.txt").write_text(prose(1, 300))
    words = [*NEEDLES, *TEXT, "--text", str(tmp_path / "text.txt")]
    one = measured(model, tmp_path / "one", 1, *words)
    several = measured(model, tmp_path / "several", processes, *words)
    assert one.keys() == {"needles", "perplexity"}
    assert len(one["needles"]["results"]) == 4
    assert several == one
    # a second start finds all of it, and a part that is missing alone is measured
    record = tmp_path / "several" / model.name / "needles.json"
    content = json.loads(record.read_text())
    del content["results"][1:3]
    record.write_text(json.dumps(content))
    again = measured(model, tmp_path / "several", processes, *words)
    results = [
        {
            result["id"]: {key: value for key, value in result.items() if key not in _OF_WHAT_WAS_MISSING}
            for result in each["needles"]["results"]
        }
        for each in (one, again)
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize("suite", BY_PARTS)
@pytest.mark.slow
def test_parts_are_shared_out(suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip({"summarization": "rouge_score", "lm-eval": "lm_eval"}.get(suite, "trailmark"))
    monkeypatch.chdir(tmp_path)
    model = saved("drt", tmp_path / "model")
    (tmp_path / "text.txt").write_text(prose(1, 300))
    babilong(tmp_path / "tasks")
    documents = [{"document": prose(seed, 2), "summary": f"Story {seed}."} for seed in range(70)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    words = ["--suite", suite, *BY_PARTS[suite]]
    one = measured(model, tmp_path / "one", 1, *words)
    several = measured(model, tmp_path / "several", 2, *words)
    assert len(one[suite]["results"]) >= 2
    assert several == one


MEASURE = """
import sys
from pathlib import Path
from trailmark.evaluation.record import Part, Record
from trailmark.processes import rank, together

with together():
    model = dict.fromkeys(("name", "folder", "architecture", "set", "config_sha256", "weights_sha256"), "m")
    parts = [Part({"n": n}, lambda: {"rank": rank()}) for n in range(5)]
    Record(Path(sys.argv[1]), "needles", model).measure_all(parts)
"""


@pytest.mark.slow
def test_every_process_makes_its_share_of_parts(tmp_path: Path) -> None:
    (tmp_path / "measure.py").write_text(MEASURE)
    launch = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        str(tmp_path / "measure.py"),
        str(tmp_path),
    ]
    subprocess.run([sys.executable, *launch], check=True, timeout=300)
    results = json.loads((tmp_path / "needles.json").read_text())["results"]
    assert [(result["settings"]["n"], result["rank"]) for result in results] == [(n, n % 2) for n in range(5)]


def test_what_is_not_shared_out_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved("drt", tmp_path / "model")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"^suite: expected one of .*retrieval.* with 2 processes, got cost"):
        next(evaluate(Request((model,), suite=("cost",)), {}))
