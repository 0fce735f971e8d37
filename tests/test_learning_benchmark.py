"""What benchmarks/learning_labels.py says of scores, what learning_lengths.py reads, learning_small.py's rows."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import benchmark_scripts
from tests.models.tiny import drt, logits_of, window_model
from trailmark.byte_tokenizer import ByteTokenizer
from trailmark.data.neighbours.bm25 import best_chunks
from trailmark.evaluation.retrieval.run import choices_of, losses_of
from trailmark.models.fields import build_config
from trailmark.ops import score_chunks

labels = benchmark_scripts.modules("learning_labels")
lengths = benchmark_scripts.modules("learning_lengths")
small = benchmark_scripts.modules("learning_small")
kinds = benchmark_scripts.modules("learning_kinds")
references = benchmark_scripts.modules("case_study.references")
SIZES = {"num_retrieval_groups": 1, "retrieval_recency": 1.0, "exclude_visible_chunks": True}


def test_scores_need_nothing_above_the_retriever(labels: ModuleType) -> None:
    models = {"before": drt(**SIZES), "learned": drt(**SIZES)}
    torch.nn.init.normal_(models["learned"].retrievers[0].q_proj.weight)
    torch.nn.init.normal_(models["learned"].encoder.landmark_proj.weight)
    ids = np.random.default_rng(0).integers(0, models["before"].config.vocab_size, 90)
    found = labels._scores(models, ids)
    for name, model in models.items():
        with torch.no_grad():
            out = model(torch.from_numpy(ids)[None], output_retrieval_scores=True)
        np.testing.assert_allclose(found[name], out.retrieval_scores.scores[0][0], rtol=1e-5, atol=1e-6)
    finite = np.isfinite(found["before"])
    assert not np.allclose(found["before"][finite], found["learned"][finite])


def test_scores_that_are_the_same_for_all_stay_as_they_are(labels: ModuleType) -> None:
    """But for what a row adds to all of its own, and whatever a drift: the same chunks are chosen."""
    model, generator = drt(**SIZES), torch.Generator().manual_seed(0)
    C = 40
    of_row, of_chunk = (torch.randn(1, C, 1, generator=generator, dtype=torch.float64) for _ in range(2))
    of_chunk += torch.arange(C)[:, None] / 10
    one = torch.ones_like(of_row)
    query, keys = torch.cat([of_row, one], -1), torch.cat([one, of_chunk], -1)
    limits = (torch.arange(C) - 3).clamp(min=0)
    (scores,) = score_chunks(query, keys, limits, 0, 1.0, 1.0)
    popular = labels.popular_scores(scores, model.config)
    assert torch.equal(popular.isfinite(), scores.isfinite())
    choices = [
        best_chunks(x.numpy(), limits.numpy(), model.config.num_retrieved_chunks) for x in (scores, popular)
    ]
    np.testing.assert_array_equal(*choices)


def test_what_a_name_is_worth_is_told_by_a_choice_that_differs_where_names_are_cited(
    labels: ModuleType, references: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, generator = drt(**SIZES | {"num_retrieved_chunks": 16}), torch.Generator().manual_seed(0)
    torch.nn.init.normal_(model.retrievers[0].q_proj.weight, generator=generator)
    S = model.config.chunk_size
    names = [f"n{number}x" for number in range(12)]
    cited = "".join(f"{'.' * (number % 5)}\\ref{{{name}}}" for number, name in enumerate(names))
    text = "".join(f"{'.' * number}\\label{{{name}}}" for number, name in enumerate(names)) + 2 * (
        "." * 40 + cited
    )
    ids = np.array([ord(c) % model.config.vocab_size for c in text])
    layout = references.Layout(text, np.arange(len(ids)), np.array([*range(0, len(ids), S), len(ids)]))
    begun = labels.Chapter(layout, ids)
    asked, nats = [], [np.random.default_rng(n).random(len(ids) - 1) for n in range(3)]

    def losses(of: object, tokens: object, chosen: object = None) -> object:
        asked.append((of, chosen))
        return nats[len(asked) - 1]

    monkeypatch.setattr(labels, "losses_of", losses)
    found = labels._names([begun], model, 0)
    (own, _), (off, _), (too, other) = asked
    assert own is too is model
    assert off.config.num_retrieved_chunks == 0

    with torch.no_grad():
        chosen = model(torch.from_numpy(ids)[None], output_retrieval=True).retrieval[0].indices[0].numpy()
    limits = np.isfinite(labels._scores({"": model}, ids)[""]).sum(1)
    expected, changed = np.zeros((3, 5)), set()
    places = [(found[1], found.start(1)) for found in re.finditer(r"\{(\w+)\}", text)]
    for place, (name, first) in enumerate(places[len(names) :], len(names)):
        label, *again = [at // S for other_name, at in places[:place] if other_name == name]
        chunk, mentions = first // S, {label, *again}
        if chunk in changed or max(mentions) >= limits[chunk - 1]:
            continue
        changed.add(chunk)
        read, told = set(chosen[chunk - 1]), set(other[chunk - 1])
        kind = 0 if label in read else 1 if mentions & read else 2
        assert mentions & told == ({label} if kind == 2 else set())
        assert told - read <= {label} or kind < 2
        tokens = [n for n in range(first, first + len(name)) if n // S == chunk and n % S]
        expected[kind] += [bool(tokens), len(tokens), *(sum(x[n - 1] for n in tokens) for x in nats)]
    same = [c for c in range(len(other)) if c + 1 not in changed]
    np.testing.assert_array_equal(other[same], chosen[same])
    np.testing.assert_allclose(found, expected)
    assert (found[:, 0] > 0).all()


def test_chunks_are_told_in_a_memory_as_in_a_whole_text(
    lengths: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = drt(**SIZES)
    for layer in model.upper_layers:
        torch.nn.init.normal_(layer.gca_o_proj.weight)
    S, K = model.config.chunk_size, model.config.num_retrieved_chunks
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, 30 * S + 2)
    monkeypatch.setattr(lengths, "COUNTED", counted := 4 * S + 1)
    found = lengths.last_tokens([lengths.Text("", ids)], ("random", "BM25"), model, 0)
    limits = model.layouts.of(len(ids), False).candidates(model.config.first_visible, torch.device("cpu"))
    told = dict(choices_of(ids, S, limits.flatten().numpy(), K, 0, 0))
    whole = np.stack([losses_of(model, ids, told.get(rule)) for rule in ("own", "random", "BM25")])
    np.testing.assert_allclose(found, whole[:, -counted:], rtol=1e-5, atol=1e-6)
    assert not np.allclose(found[0], found[1])


def test_layers_that_are_added_change_nothing_yet(lengths: ModuleType) -> None:
    base = window_model()
    model = lengths.with_layers(base, (1, 3))
    assert model.config.num_hidden_layers == base.config.num_hidden_layers + 2
    ids = torch.arange(40)[None]
    assert torch.equal(logits_of(model, ids), logits_of(base, ids))
    for number in (1, 3):
        added, before = model.layers[number], model.layers[number - 1]
        assert torch.equal(added.mlp.gate_up_proj.weight, before.mlp.gate_up_proj.weight)
        assert not added.attention.o_proj.weight.any()


def test_each_model_has_the_seeds_that_were_trained(lengths: ModuleType, tmp_path: Path) -> None:
    compared = lengths.Compared(lengths.deepened)
    with pytest.raises(SystemExit, match="deepened-0: expected a model that was trained"):
        compared.trained(tmp_path, (0, 1, 2))
    for seed in (0, 1, 2):  # that of seed 1 was stopped
        (tmp_path / f"deepened-{seed}").mkdir()
        if seed != 1:
            (tmp_path / f"deepened-{seed}" / "model.safetensors").touch()
    assert compared.trained(tmp_path, (0, 1, 2)) == {tmp_path / "deepened-0": 0, tmp_path / "deepened-2": 2}
    alike = lengths.Compared(lambda folder, seed: folder / "deepened-0")
    assert alike.trained(tmp_path, (2, 0)) == {tmp_path / "deepened-0": 2}


@pytest.mark.parametrize("kind", ["LaTeX", "Python"])
def test_small_models_that_are_compared_are_alike_but_for_what_is_compared(
    small: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    monkeypatch.setattr(small, "FOLDER", tmp_path)
    runs = {row: small.config_of(row, 1, kind) for row in small.ROWS}
    assert len({run.output for run in runs.values()}) == len(runs)
    counts = {}
    for row, run in runs.items():
        assert (run.data, run.training) == (runs["DRT"].data, runs["DRT"].training)
        assert run.training.seed == 1
        architecture = dict(run.model)
        config = build_config(architecture, {"vocab_size": 4096})
        with torch.device("meta"):
            counts[row] = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    assert counts["DRT"] == counts["lookup"] == counts["lookup, random"]
    assert abs(counts["window, layers"] / counts["DRT"] - 1) < 0.05
    assert counts["window"] == counts["full attention"] < counts["DRT"]


def test_small_stretches_share_nothing_and_join_the_chapters_of_a_work(
    small: ModuleType, kinds: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = [tmp_path / name for name in ("a_one.tex", "a_two.tex", "b_three.tex")]
    for number, file in enumerate(files):
        file.write_text("xyz"[number] * 250)
    monkeypatch.setattr(kinds, "chapters", lambda: files)
    alone, joined = (small.stretches(ByteTokenizer(), 100, join) for join in (False, True))
    assert [len(text.ids) for text in alone] == [100] * 6
    assert [len(text.ids) for text in joined] == [100] * 7  # 500 bytes of one work, 250 of the other
    assert [len(set(text.ids.tolist())) for text in alone] == [1] * 6
    middle = joined[2].ids.tolist()  # where one chapter ends and the next begins
    assert len(set(middle[:50])) == len(set(middle[50:])) == 1
    assert middle[0] != middle[-1]


def test_of_many_stretches_some_are_taken_from_begin_to_end(
    small: ModuleType, kinds: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds, "standard_library_texts", lambda split: ["x" * 300, "y" * 700])
    monkeypatch.setattr(small, "MOST", 3)
    found = small.stretches(ByteTokenizer(), 100, True, "Python")
    assert [text.name for text in found] == ["modules from 0", "modules from 400", "modules from 900"]


def test_sources_of_a_folder_are_one_text_and_no_test_is_among_them(
    kinds: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kinds, "_PROJECTS", ("sympy",))  # all would take seconds
    folder = kinds.KINDS["Python"].splits(tmp_path)["train"]
    names = {file.stem for file in folder.iterdir()}
    assert {"standard-library", "sympy.core"} <= names
    assert not any(part.startswith("test") for name in names for part in name.split("."))
    assert len(names) == len({name.lower() for name in names})
    held_out = kinds.held_out_texts("Python")
    assert not any(
        text in (folder / "standard-library.txt").read_text() for text in held_out if len(text) > 1000
    )


def test_a_small_row_is_told_below_others_by_their_names(small: ModuleType) -> None:
    found = {
        "lookup": np.array([[1.0, 2.0], [3.0, 4.0]]),  # two seeds, two texts
        "lookup, told random": np.array([[2.0, 3.0], [4.0, 5.0]]),
        "lookup, random": np.array([[5.0, 6.0]]),
        "window, layers": np.array([[2.5, 4.5]]),
    }
    row = small._row(4, 1, "lookup", found)
    assert (row["nats"], row["by_seed"], row["texts"]) == (2.5, [1.5, 3.5], 2)
    told = {name: value for name, value in row.items() if f"{name}_low" in row}
    assert told == {"below told random": 1.0, "below lookup, random": 3.0, "below window, layers": 1.0}
    assert "below window, layers" in small._row(4, 1, "lookup, random", found)
