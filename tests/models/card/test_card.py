"""The model card: nothing that is not in the files, no text that becomes markup, nobody's words are lost."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from tests.models.tiny import drt, landmark, rpt
from tests.training.tiny import TEXT, run_config
from trailmark.evaluation.record import Record, identity
from trailmark.files import read_json, write_json
from trailmark.models import MODELS, DRTForCausalLM
from trailmark.models.card import files as card_files
from trailmark.models.card.files import (
    README,
    config_sha256,
    marked,
    read_known,
    read_mark,
    refresh_card,
    weights_sha256,
)
from trailmark.models.card.text import model_card, one_line, plain
from trailmark.training.run import Run
from trailmark.training.verification import verify

MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable("table")
THEIRS = "# My model\n\nMy words.\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    Run(run_config(folder, steps=6), text=TEXT).train()
    assert [path.parent for path in folder.rglob(README)] == [folder]  # of the run, not of its checkpoints
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(trained, tmp_path / "tiny"))
    (folder / README).unlink()
    return folder


def measured(folder: Path, **changes: Any) -> dict[str, Any]:
    """Results of three suites, as trailmark evaluate leaves them."""
    model = identity(DRTForCausalLM.from_pretrained(folder), folder) | changes
    needles = Record(
        folder / "evaluation", "needles", model, command="trailmark evaluate /home/me/tiny --seed 7"
    )
    for length in (80, 640):
        found = {"length": length, "questions": 100, "correct": 90, "accuracy": 0.9, "recall": 0.95}
        found |= {"accuracy_low": 0.826, "accuracy_high": 0.945}
        needles.measure(
            {"length": length, "seed": 7, "kind": "single", "depth": None}, lambda found=found: found
        )
    perplexity = Record(folder / "evaluation", "perplexity", model)
    found = {"length": 160, "windows": 4, "tokens": 636, "perplexity": 12.345678}
    found |= {"perplexity_low": 11.5, "perplexity_high": 13.25, "bits_per_byte": 3.6}
    perplexity.measure({"length": 160, "windows": "sliding"}, lambda: found)
    summaries = Record(folder / "evaluation", "summarization", model)
    summaries.measure(
        {"block": [0, 64]}, lambda: {"documents": 64, "rouge1": {"f": 0.99}}
    )  # on the way to all
    summaries.measure(
        {"block": None}, lambda: {"documents": 99, "rouge1": {"f": 0.31, "low": 0.3, "high": 0.32}}
    )
    return model


def front_matter(card: str) -> dict[str, Any]:
    assert card.startswith("---\n")
    return yaml.safe_load(card[4 : card.index("\n---\n")])


def card_of(folder: Path) -> str:
    return (folder / README).read_text(encoding="utf-8")


# --- what stands in it -----------------------------------------------------------------------------------------


def test_a_run_s_card_says_what_its_files_say(run: Path) -> None:
    measured(run)
    assert refresh_card(run)
    card, history = card_of(run), read_json(run / "history.json")
    assert f"Trained on {history['tokens']:,} tokens in 6 steps" in card
    assert "arXiv 2410.01651](https://arxiv.org/abs/2410.01651)" in card
    assert "| 80 | single | anywhere | 100 | 0.900 | 0.826–0.945 | 0.950 | 1 |" in card
    assert "| sliding | 160 | 636 | 12.346 | 11.500–13.250 | 3.6000 | 1 |" in card
    assert "| 99 | 0.3100 | 0.3000–0.3200 | 1 |" in card
    assert "0.99" not in card
    assert "at most 80 tokens" in card
    assert "measured from 80 to 640 tokens" in card
    assert re.search(r"Run 1: trailmark [\d.]+, torch \d", card)
    assert "    trailmark evaluate tiny --seed 7\n" in card  # where it lies is nobody's business
    assert "/home" not in card
    assert str(run.parent) not in card


@pytest.mark.parametrize("version", ["this", "0.1.0"])
def test_the_hub_reads_the_results(run: Path, version: str) -> None:
    measured(run)
    if version == "0.1.0":  # its records kept nothing for a card
        for path in (run / "evaluation").glob("*.json"):
            write_json(path, {name: x for name, x in read_json(path).items() if name != "card"})
    refresh_card(run)
    assert "| 0.9 |" in card_of(run) if version == "0.1.0" else "| 0.900 |" in card_of(run)
    data = ModelCard(card_of(run)).data
    assert (data.library_name, data.pipeline_tag, data.license) == ("trailmark", "text-generation", None)
    assert "trailmark" in data.tags
    found = {(r.dataset_name, r.metric_type, r.metric_value) for r in data.eval_results}
    assert found == {
        ("needles: kind single, length 80", "accuracy", 0.9),
        ("needles: kind single, length 640", "accuracy", 0.9),
        ("perplexity: windows sliding", "perplexity", 12.345678),
        ("summarization", "rouge1", 0.31),
    }


def test_a_changed_configuration_is_named_and_not_for_the_hub(run: Path) -> None:
    model = measured(run)
    changed = Record(
        run / "evaluation", "perplexity", model | {"set": {"num_retrieved_chunks": 4}, "config_sha256": "x"}
    )
    changed.measure({"length": 160}, lambda: {"length": 160, "perplexity": 9.0})
    refresh_card(run)
    assert "with num\\_retrieved\\_chunks 4 set" in card_of(run)
    values = {result.metric_value for result in ModelCard(card_of(run)).data.eval_results}
    assert values == {0.9, 12.345678, 0.31}


def test_the_example_runs(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refresh_card(run)
    (code,) = re.findall(r"```python\n(.*?)```", card_of(run), re.DOTALL)
    monkeypatch.chdir(run.parent)
    exec(compile(code, "card", "exec"), {})
    assert capsys.readouterr().out.startswith("It was")


@pytest.mark.parametrize("name", ["drt", "rpt", "landmark"])
def test_parameters_are_counted_from_the_file_as_from_the_model(name: str, tmp_path: Path) -> None:
    make: dict[str, Callable[[], Any]] = {"drt": drt, "rpt": rpt, "landmark": landmark}
    model = make[name]()
    model.save_pretrained(tmp_path / "m")
    count = sum(parameter.numel() for parameter in model.parameters())
    assert f"of {count:,} parameters" in card_of(tmp_path / "m")
    first = card_of(tmp_path / "m")
    assert refresh_card(tmp_path / "m")
    assert card_of(tmp_path / "m") == first


def test_every_architecture_has_its_sentence() -> None:
    for kind in MODELS:
        card = model_card({"model_type": kind, "sliding_window": 8}, 5)
        assert f"a {kind}" not in card.replace("\\_", "_")  # by its name, not its type's
    assert "full attention" in model_card(
        {"model_type": "trailmark_sliding_window", "sliding_window": None}, 5
    )


# --- whose weights ---------------------------------------------------------------------------------------------


def test_a_copy_keeps_what_is_known(run: Path, tmp_path: Path) -> None:
    measured(run)
    DRTForCausalLM.from_pretrained(run).save_pretrained(tmp_path / "copy")
    refresh_card(run)
    ours, copy = (card_of(f).splitlines() for f in (run, tmp_path / "copy"))
    told = [(a, b) for a, b in zip(ours, copy, strict=True) if a != b]
    assert [b for _, b in told if "sha256:" not in b] == ["- name: copy", "# copy", next(
        line for line in copy if line.startswith("name = "))]  # fmt: skip


def test_other_weights_have_no_results_of_these(run: Path, tmp_path: Path) -> None:
    measured(run)
    model = DRTForCausalLM.from_pretrained(run)
    with torch.no_grad():
        model.embed_tokens.weight[0, 0] += 1e-3
    model.save_pretrained(tmp_path / "other")
    card = card_of(tmp_path / "other")
    assert "Trained on" in card
    assert "These weights are not the ones that this training left" in card
    assert "Nothing was measured of these weights." in card
    assert "0.900" not in card
    assert "model-index" not in front_matter(card)
    model.save_pretrained(run)  # over the trained ones
    for _ in range(2):
        assert "not the ones that this training left" in card_of(run)
        assert "12.346" not in card_of(run)
        assert refresh_card(run)


def test_results_of_another_model_that_lie_there_are_named_and_not_shown(run: Path) -> None:
    measured(run, weights_sha256="0" * 64)
    refresh_card(run)
    card = card_of(run)
    assert card.count("Not shown: results of") == 3
    assert "Nothing was measured" in card


def test_a_model_made_in_python_is_of_no_training(tmp_path: Path, run: Path) -> None:
    """Even where files of a training lie in the folder that it is saved to."""
    drt().save_pretrained(run)
    assert "Nothing beside the weights says how they were trained." in card_of(run)
    assert refresh_card(run)
    assert "Nothing beside the weights says how they were trained." in card_of(run)


# --- what a person wrote ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [THEIRS.encode(), b"", b"\xff\xfe broken \xe9"])
def test_a_persons_readme_stays(run: Path, content: bytes) -> None:
    (run / README).write_bytes(content)
    DRTForCausalLM.from_pretrained(run).save_pretrained(run)
    assert not refresh_card(run)
    assert (run / README).read_bytes() == content


CARD = marked(model_card({"model_type": "trailmark_drt"}, 7), card_files.Mark("a" * 64, "known", 3))


@settings(max_examples=60)
@given(st.integers(0, len(CARD) - 1), st.sampled_from(["", "x", "\n", " ", "é"]), st.integers(0, 3))
def test_any_edit_makes_a_card_a_persons(place: int, new: str, removed: int) -> None:
    edited = CARD[:place] + new + CARD[place + removed :]
    assert (read_mark(edited) is not None) == (edited == CARD)


def test_a_mark_is_read_as_it_was_written() -> None:
    assert read_mark(CARD) == card_files.Mark("a" * 64, "known", 3)
    windows = CARD.replace("\n", "\r\n")  # a checkout there
    assert read_mark(windows.replace("\r\n", "\n")) is not None


def test_no_card_where_none_was_wanted(run: Path, tmp_path: Path) -> None:
    model = DRTForCausalLM.from_pretrained(run)
    model.save_pretrained(tmp_path / "m", card=False)
    assert not (tmp_path / "m" / README).exists()
    assert not refresh_card(tmp_path / "m")  # no finished run
    model.save_pretrained(tmp_path / "n", is_main_process=False)
    model.save_pretrained(tmp_path / "o", state_dict=model.state_dict())  # as a checkpoint
    model.save_pretrained(tmp_path / "p", True, model.state_dict())
    assert not list(tmp_path.glob(f"[nop]/{README}"))
    model.save_pretrained(tmp_path / "q", state_dict=model.state_dict(), card=True)
    assert (tmp_path / "q" / README).exists()


def test_a_card_costs_a_checkpoint_nothing_and_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drt().save_pretrained(tmp_path / "base")
    model, hashed = DRTForCausalLM.from_pretrained(tmp_path / "base"), list[Path]()
    weights_sha256 = card_files.weights_sha256
    monkeypatch.setattr(
        card_files, "weights_sha256", lambda path: hashed.append(path) or weights_sha256(path)
    )
    model.save_pretrained(tmp_path / "a", state_dict=model.state_dict())
    model.save_pretrained(tmp_path / "a", is_main_process=False)
    assert not hashed
    (tmp_path / "base" / "model.safetensors").unlink()
    (tmp_path / "base" / "model.safetensors").symlink_to(tmp_path / "gone")
    model.save_pretrained(tmp_path / "b")
    assert (tmp_path / "b" / "model.safetensors").is_file()
    assert (tmp_path / "b" / "README.md").is_file()
    assert "base cannot be read" in caplog.text


def test_a_pipe_that_is_called_as_a_card_hangs_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(tmp_path / "README.md")
    drt().save_pretrained(tmp_path)
    card_files.refresh_card(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    assert caplog.text.count("expected a regular file") == 2


def test_a_card_changes_nothing_for_a_run_and_its_checkpoints(run: Path) -> None:
    def files() -> dict[str, bytes]:
        found = {str(p.relative_to(run)): p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file()}
        found.pop(README, None)
        return found

    before, whole = files(), verify(run)
    assert refresh_card(run)
    assert verify(run) == whole != []
    assert files() == before
    again = Run(run_config(run, steps=6), text=TEXT)
    assert again.finished


def test_a_training_writes_the_card_that_its_files_make(trained: Path, run: Path) -> None:
    assert refresh_card(run)
    assert card_of(trained) == card_of(run)


@pytest.mark.parametrize("broken", ["card", "config", "weights"])
def test_a_card_that_cannot_be_made_is_a_warning(
    run: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A training and an evaluation are done by then."""
    if broken == "card":
        (run / README).mkdir()
    else:
        name = {"config": "config.json", "weights": "model.safetensors"}[broken]
        (run / name).write_text("{broken")
    assert not refresh_card(run)
    assert f"The model card {run / README} cannot be written" in caplog.text
    assert not list(run.glob(f".{README}*"))


def test_a_model_is_saved_whose_card_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(card_files, "write_text", fail)
    drt().save_pretrained(tmp_path)
    assert DRTForCausalLM.from_pretrained(tmp_path).config.model_type == "trailmark_drt"
    assert "cannot be written (OSError: no space)" in caplog.text


# --- text stays text -------------------------------------------------------------------------------------------

HOSTILE = [
    "<script>alert(1)</script>", "[x](javascript:alert(1))", "![x](http://e.vil/x.png)", "a | b |\n| c",
    "---\nlicense: mit\n---", "```\n<b>x</b>", "--> <img src=x onerror=1>", "\u202eevil\u2066", "\ud800half",
    "# heading\n## two", "{{ x }} $\\rm x$", "'\"\\`*_~", "http://e.vil www.e.vil @everyone", "a\x00b\x85c\u2028d",
    "", "- : [", "1. one", "\n\n    code\n", "&lt;b&gt; &#60;",
]  # fmt: skip


def filled(text: str) -> str:
    """Every text in every file is this one."""
    settings_ = {text: text, "kind": text, "windows": text, "set": {text: text}}
    result = {
        "settings": settings_,
        "environment": 0,
        "length": 5,
        "accuracy": 0.5,
        "accuracy_low": 0.4,
        "command": text,
        "kind": text,
    }
    model = {"set": {text: text}, "dtype": text}
    record = {"suite": "needles", "model": model, "results": [result, result | {"settings": {text: 1}}]}
    record |= {"environments": [{"trailmark": text, "processor": text, "gpu": text}]}
    kept = {"title": text, "header": [text], "rows": [{"result": 0, "cells": [text]}]}
    unset = record | {
        "model": {},
        "results": [{"settings": {text: text}, "accuracy": 1.0, "accuracy_low": 0.9}, {"accuracy": 0.5}],
    }
    data = {"task": text, "paths": [text], "tokenizer": text}
    return model_card(
        {"model_type": text, "retriever": text, "embedder": text, "dtype": text},
        3,
        {"data": data, "training": {"optimizer": text, "seed": text}, "init_from": text},
        {"tokens": 5, "steps": [{"step": 2, "loss": 0.5, text: text}]},
        [
            record,
            record | {"suite": text},
            record | {"card": kept},
            unset,
        ],
        name=text,
        tags=[text],
        versions={text: text},
        notes=[text],
    )


def shape(card: str) -> list[tuple[str, str]]:
    """The elements of what a reader sees, without their text."""
    found = []
    for token in MARKDOWN.parse(card[card.index("\n---\n", 3) + 5 :]):
        found.append((token.type, token.tag))
        found += [(child.type, child.tag) for child in token.children or () if child.type != "text"]
    return found


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_text(text: str) -> None:
    card = filled(text)
    card.encode("utf-8")
    body = card[card.index("\n---\n", 3) + 5 :]
    html = MARKDOWN.render(body)
    assert not re.search(r"<(script|img|b)\b", html)
    assert set(re.findall(r'href="([^"]*)"', html)) <= {"https://arxiv.org/abs/2410.01651"}
    data = front_matter(card)
    assert set(data) <= {"library_name", "pipeline_tag", "tags", "model-index"}
    assert data["model-index"][0]["name"] == (one_line(text) or "model")
    ModelCard(card)
    if one_line(text):  # what is there, whatever it says, changes no element of the page
        assert shape(card) == shape(filled("plain"))


@settings(max_examples=80)
@given(st.text(max_size=30))
def test_plain_shows_what_was_given(text: str) -> None:
    (inline,) = [t for t in MARKDOWN.parse(f"x {plain(text)} x") if t.type == "inline"]
    assert inline.content
    shown = "".join(child.content for child in inline.children or ())
    assert {child.type for child in inline.children or ()} <= {"text", "text_special"}
    assert shown.split() == ["x", *one_line(text).split(), "x"]


NAMES = [
    "suite", "model", "results", "environments", "settings", "environment", "command", "set", "data", "training",
    "steps", "tokens", "levels", "chunks", "seconds", "task", "paths", "context_length", "chunk_size", "model_type",
    "accuracy", "accuracy_low", "accuracy_high", "length", "depth", "rouge1", "f", "low", "high", "perplexity",
    "trailmark", "init_from", "tokens_per_second", "card", "title", "header", "rows", "result", "cells",
]  # fmt: skip
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["needles", "summarization"])
)
JSON = st.recursive(
    LEAVES,
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(NAMES), x, max_size=6),
    max_leaves=10,
)
OBJECT = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=8)


@settings(max_examples=20)
@given(OBJECT, OBJECT, OBJECT, st.lists(OBJECT, max_size=3), st.lists(OBJECT, max_size=2))
def test_any_json_makes_a_card(
    config: Any, run: Any, history: Any, results: list[Any], environments: list[Any]
) -> None:
    records = [
        {"suite": suite, "model": config, "results": results, "environments": environments}
        for suite in ("needles", "perplexity", "retrieval", "summarization", "cost")
    ]
    card = model_card(config, 1, run, history, records)
    ModelCard(card)
    json.dumps(front_matter(card), allow_nan=False)


def test_files_that_cannot_be_read_are_named(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    (run / "history.json").write_text("{broken")
    (run / "evaluation").mkdir()
    (run / "evaluation" / "needles.json").write_text('{"kind": "trailmark evaluation", "format": 99}')
    (run / "evaluation" / "other.json").write_text("[1]")
    refresh_card(run)
    card = card_of(run)
    assert "Not shown: history.json (it cannot be read)." in card
    assert "Not shown: needles.json (another format)." in card
    assert "Not shown: other.json (it cannot be read)." in card
    assert "history.json cannot be read" in caplog.text
    assert read_known(run).evaluations == []


# --- the hub ---------------------------------------------------------------------------------------------------


class Hub:
    """A folder in place of the hub's repository: what stands for the calls that go over the network."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        folder.mkdir()
        monkeypatch.setattr(
            HfApi, "create_repo", lambda api, repo_id, **_: type("Url", (), {"repo_id": repo_id})
        )
        monkeypatch.setattr(HfApi, "create_commit", self._commit)
        monkeypatch.setattr("huggingface_hub.repocard.hf_hub_download", self._download)
        monkeypatch.setattr(card_files, "hf_hub_download", self._download)

    def _commit(self, repo_id: str, operations: Any, **_: Any) -> str:
        self.sent = {operation.path_in_repo for operation in operations}
        for operation in operations:
            shutil.copyfile(operation.path_or_fileobj, self.folder / operation.path_in_repo)
        return "commit"

    def _download(self, repo_id: str, name: str, **_: Any) -> str:
        if not (self.folder / name).exists():
            raise EntryNotFoundError(name)
        return str(self.folder / name)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    return Hub(tmp_path / "hub", monkeypatch)


def test_a_pushed_model_has_our_card(hub: Hub, run: Path) -> None:
    measured(run)
    model = DRTForCausalLM.from_pretrained(run)
    model.push_to_hub("me/tiny", tags=["books"])
    card = card_of(hub.folder)
    assert read_mark(card) is not None
    assert 'name = "me/tiny"' in card
    assert "0.900" in card
    assert front_matter(card)["tags"] == ["trailmark", "long-context", "books"]
    shutil.rmtree(run / "evaluation")
    DRTForCausalLM.from_pretrained(run).push_to_hub("me/tiny")  # replaced: it is ours
    assert "0.900" not in card_of(hub.folder)
    assert "books" in front_matter(card_of(hub.folder))["tags"]


def test_a_persons_card_on_the_hub_stays(hub: Hub, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    (hub.folder / README).write_text(THEIRS)
    DRTForCausalLM.from_pretrained(run).push_to_hub("me/tiny")
    assert card_of(hub.folder) == THEIRS
    assert "model.safetensors" in hub.sent
    assert README not in hub.sent
    assert "README.md of me/tiny was not written by trailmark" in caplog.text


@pytest.mark.parametrize("on_the_hub", [None, THEIRS.replace("My", "Our"), CARD])
def test_a_persons_readme_in_a_folder_that_is_pushed_stays(
    hub: Hub, run: Path, on_the_hub: str | None
) -> None:
    if on_the_hub is not None:
        (hub.folder / README).write_text(on_the_hub)
    (run / README).write_text(THEIRS)
    DRTForCausalLM.from_pretrained(run).save_pretrained(run, push_to_hub=True, repo_id="me/tiny")
    assert card_of(run) == THEIRS
    assert card_of(hub.folder) == (THEIRS if on_the_hub in (None, CARD) else on_the_hub)


def test_a_push_that_fails_leaves_a_persons_readme(
    hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(HfApi, "create_commit", fail)
    (run / README).write_text(THEIRS)
    with pytest.raises(OSError, match="no network"):
        DRTForCausalLM.from_pretrained(run).save_pretrained(run, push_to_hub=True, repo_id="me/tiny")
    assert card_of(run) == THEIRS


def test_the_hubs_card_stays_where_it_knows_more_of_the_same_weights(
    hub: Hub, run: Path, tmp_path: Path
) -> None:
    """Loaded from the hub, no files lie beside the weights."""
    measured(run)
    DRTForCausalLM.from_pretrained(run).push_to_hub("me/tiny")
    known = card_of(hub.folder)
    model = DRTForCausalLM.from_pretrained(run)
    model.name_or_path = "me/tiny"
    model.push_to_hub("me/tiny")
    assert card_of(hub.folder) == known
    with torch.no_grad():
        model.embed_tokens.weight.mul_(2)
    model.push_to_hub("me/tiny")
    assert "0.900" not in card_of(hub.folder)


# --- what tells a model ----------------------------------------------------------------------------------------


def test_hashes_tell_weights_and_configurations(run: Path, tmp_path: Path) -> None:
    model = DRTForCausalLM.from_pretrained(run)
    model.save_pretrained(tmp_path / "copy")
    assert weights_sha256(tmp_path / "copy") == weights_sha256(run)
    assert weights_sha256(run / "checkpoints" / "step-00000005") not in (None, weights_sha256(run))
    copy = DRTForCausalLM.from_pretrained(tmp_path / "copy")
    assert config_sha256(copy.config.to_dict()) == config_sha256(model.config.to_dict())
    copy.config.num_retrieved_chunks += 1
    assert config_sha256(copy.config.to_dict()) != config_sha256(model.config.to_dict())
    assert weights_sha256(tmp_path) is None
    write_json(tmp_path / "copy" / "x.json", {})
    assert weights_sha256(tmp_path / "copy") == weights_sha256(run)
