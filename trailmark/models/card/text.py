"""The model card: what a model is, how it was trained and what was measured of it, as the hub's Markdown.

A pure function of what the files beside the weights say (:mod:`trailmark.models.card.files` reads them): nothing
stands in a card that is not in them, and whatever they say is shown as text, never as markup.
"""

from __future__ import annotations

import json
import re
import shlex
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, TypeGuard

from huggingface_hub import EvalResult, ModelCardData

from trailmark.models.registry import MODELS
from trailmark.trained import trained_length
from trailmark.values import in_common, layers_by_kind, number

Json = Mapping[str, Any]

_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_lower_layers", "num_encoder_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias", "qk_norm", "sliding_window",
    "layer_types", "window_position", "rope_scaling", "chunk_size",
    "num_retrieved_chunks", "num_focus_chunks", "summary_tokens", "reading", "far_position", "far_distance",
    "num_sinks", "num_retrieval_groups", "retriever", "embedder", "retrieve_per", "memory_position",
    "local_length", "max_position_embeddings", "block_size", "num_states", "dtype",
)  # fmt: skip
_DATA = (
    "task", "paths", "tokenizer", "neighbours", "early_landmarks", "needle_share", "answer_weight", "hops",
    "distractors", "num_landmarks",
)  # fmt: skip
_TRAINING = (
    "tokens_per_step", "context_length", "precision", "optimizer", "learning_rate", "matrix_learning_rate", "seed"
)  # fmt: skip


def model_card(
    config: Json,
    parameters: int,
    run: Json | None = None,
    history: Json | None = None,
    evaluations: Sequence[Json] = (),
    *,
    name: str = "model",
    tags: Sequence[str] = (),
    versions: Json | None = None,
    changed_since: bool = False,
    notes: Sequence[str] = (),
    conversion: Json | None = None,
) -> str:
    """Markdown with the hub's YAML at its top.

    Args:
        config: as in config.json.
        parameters: how many numbers are trained; a tied matrix counts once.
        run: run.yaml. history: history.json. evaluations: records, each of this model's weights.
        name: of the folder or the hub's repository, for the example.
        tags: of the hub, besides ours.
        versions: what the training ran with.
        changed_since: the weights are not those that this training left; ``evaluations`` is empty then.
        notes: sentences on what could not be shown.
        conversion: conversion.json, of a model that another one was made into.
    """
    evaluations = [record for record in evaluations if isinstance(record.get("results"), list)]
    sizes = _rows_of("", config, _SIZES)
    parts = [
        _front_matter(name, tags, evaluations),
        f"# {plain(name)}",
        _what(config, parameters),
        "## Use",
        _example(name),
        "## Training",
        _conversion(conversion),
        _training(run, history, versions, changed_since) if run or history or not conversion else "",
        "## Results",
        *_results(evaluations, changed_since),
        "## Limits",
        _limits(config, run, history, evaluations, changed_since),
        "## Sizes",
        _table(("field", "value"), sizes) if sizes else "",
        *[plain(note) for note in notes],
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


# --- text that is only text ------------------------------------------------------------------------------------


def one_line(value: object) -> str:
    """Without line ends, control and format characters (which may turn text around), or halves of characters."""
    kept = (c if unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") else " " for c in str(value))
    return " ".join("".join(kept).split())


def plain(value: object) -> str:
    """Markdown that shows ``value`` as it is: nothing in it is markup, a link, HTML or a table's border."""
    text = one_line(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*_{}\[\]#!|~$])", r"\\\1", text)
    text = re.sub(r"(?i)(https?|ftp)(:)//", r"\1&#58;//", text)  # which GitHub's Markdown makes a link of
    text = re.sub(r"(?i)\bwww\.", "www&#46;", text).replace("@", "&#64;")
    # at the beginning of a line: a list, or a heading's underline
    return re.sub(r"^(\d*)([.)])(?=\s|$)|^()([-+=])", r"\1\3\\\2\4", text)


def _shown(value: object, digits: str = ".3f") -> str:
    """A table's cell."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return format(value, digits)
    if isinstance(value, list | tuple):
        return ", ".join(_shown(part, "g") for part in value)
    return plain(json.dumps(value, sort_keys=True) if isinstance(value, Mapping) else value)


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Of cells that are Markdown already."""
    lines = ["| " + " | ".join(headers) + " |", "|" + " --- |" * len(headers)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _rows_of(section: str, fields: Json, names: Sequence[str]) -> list[tuple[str, str]]:
    """A table's row for each of these fields that is there."""
    found = {name: fields[name] for name in names if fields.get(name) is not None}
    if isinstance(kinds := found.get("layer_types"), list):
        found["layer_types"] = layers_by_kind(kinds)
    return [(f"`{section}{name}`", _shown(value, "g")) for name, value in found.items()]


def _named(fields: Json) -> str:
    """Settings in a sentence."""
    pairs = ((plain(name), _shown(_without_folders(value), "g")) for name, value in fields.items())
    return ", ".join(f"{name} {value}" for name, value in pairs)


def _finite(value: object) -> TypeGuard[int | float]:
    return number(value) is not None


def _mapping(value: object) -> Json:
    return value if isinstance(value, Mapping) else {}


# --- what it is ------------------------------------------------------------------------------------------------


def _what(config: Json, parameters: int) -> str:
    kind = str(config.get("model_type"))
    title, sentence, papers = MODELS[kind].card_facts(config) if kind in MODELS else (kind, "", ())
    links = " and ".join(f"[{name}, arXiv {id}](https://arxiv.org/abs/{id})" for name, id in papers)
    source = f" After {links}." if links else ""
    return f"A language model of {parameters:,} parameters, made with trailmark: a {plain(title)}. {sentence}{source}"


def _example(name: str) -> str:
    # JSON's strings are Python's, without line ends
    return f"""```python
import trailmark  # transformers knows its models from here on
from transformers import AutoModelForCausalLM, AutoTokenizer

name = {json.dumps(one_line(name))}  # this folder, or its name on the hub
model = AutoModelForCausalLM.from_pretrained(name)
tokenizer = AutoTokenizer.from_pretrained(name)
text = tokenizer("It was", return_tensors="pt")
print(tokenizer.decode(model.generate(**text, max_new_tokens=16)[0]))
```

A text of any length is read once, a piece at a time: `cache = model.new_cache()`, `model.read(ids, cache)`; questions
are asked on branches of it: `model.generate(**question, past_key_values=cache.branch())`."""


# --- conversion ------------------------------------------------------------------------------------------------


def _conversion(record: Json | None) -> str:
    """What the model was made of, and what in it was new."""
    record = record or {}
    base, counts = _mapping(record.get("base")), _mapping(record.get("parameters"))
    if not base:
        return ""
    of = f"{plain(base.get('family'))}, {_shown(counts.get('base'))} parameters"
    revision = f", revision {plain(base['revision'])}" if base.get("revision") else ""
    before = _mapping(base.get("of"))
    came = f", which came from {plain(_last_part(before.get('name')))}" if before else ""
    if before.get("sha256"):
        came += f" (SHA-256 {plain(before['sha256'])})"
    said = (
        f"Converted from {plain(_last_part(base.get('name')))} ({of}{revision}){came}: {_shown(counts.get('copied'))} "
        f"parameters as they were, {_shown(counts.get('permuted'))} in another order, {_shown(counts.get('new'))} new."
    )
    if "learned" in counts:
        said += (
            f" A training before taught it {_shown(counts['learned'])} more, and changed "
            f"{_shown(counts.get('adapted'))} of the base's by adapters; both came from a file of their own."
        )
    parts = record.get("parts")
    new = [row for row in map(_mapping, parts if isinstance(parts, list) else ()) if row.get("what") == "new"]
    rows = [
        [plain(row.get("tensors")), _shown(row.get("parameters")), plain(row.get("starts_as"))] for row in new
    ]
    return "\n\n".join([said, _table(("new", "parameters", "started as"), rows)] if rows else [said])


# --- training --------------------------------------------------------------------------------------------------


def _training(run: Json | None, history: Json | None, versions: Json | None, changed_since: bool) -> str:
    if not run and not history:
        return "Nothing beside the weights says how they were trained."
    run, history = run or {}, history or {}
    data, training, last = _mapping(run.get("data")), _mapping(run.get("training")), _last_line(history)
    said = []
    if changed_since:
        said.append(
            "These weights are not the ones that this training left: they were changed or converted after they were "
            "loaded."
        )
    if _finite(tokens := history.get("tokens")):
        step = last.get("step")
        said.append(
            f"Trained on {_shown(tokens)} tokens"
            + (f" in {step:,} steps" if isinstance(step, int) else "")
            + (f", {_duration(history['seconds'])}" if _finite(history.get("seconds")) else "")
            + (f", {history['tokens_per_second']:,.0f} tokens/s" if _finite(history.get("tokens_per_second")) else "")
            + "."
        )  # fmt: skip
    if run.get("init_from"):
        said.append(f"It began with the weights of {plain(_last_part(run['init_from']))}.")
    said += _staged(training, _mapping(run.get("distil")))
    if data and data.get("paths") is None and data.get("task") != "summarization":
        said.append("The text: sources of Python's standard library.")
    if versions:
        said.append("Run with " + ", ".join(f"{plain(k)} {plain(v)}" for k, v in versions.items()) + ".")
    # a path on somebody's disk is nobody's business: its last part names the data
    named = {key: _last_parts(value) for key, value in data.items()}
    rows = _rows_of("data.", named, _DATA) + _rows_of("training.", training, _TRAINING)
    rows += [
        (f"last {key}", _shown(last[key], ".4g")) for key in ("loss", "accuracy") if _finite(last.get(key))
    ]
    table = _table(("setting", "value"), rows) if rows else ""
    return "\n\n".join(part for part in (" ".join(said), table) if part)


def _staged(training: Json, distil: Json) -> list[str]:
    """What was not trained of it, and what it learned from beside the text."""
    trained = {
        "retriever": "Of its weights only those that score past chunks were trained",
        "additions": "Of its weights only those that a plain language model lacks were trained",
        "additions_and_upper": "Of its weights only the upper layers and those that a plain language model lacks were "
        "trained",
    }.get(str(training.get("train")))
    said = []
    if trained is not None:
        rank = training.get("lora_rank")
        adapters = f", and adapters of rank {rank} that are merged into the matrices of other layers"
        said.append(trained + (adapters if isinstance(rank, int) and rank > 0 else "") + ".")
    if distil.get("model"):
        said.append(f"Beside the text it learned from the model {plain(_last_part(distil['model']))}.")
    return said


def _last_line(history: Json) -> Json:
    steps = history.get("steps")
    return _mapping(steps[-1]) if isinstance(steps, list) and steps else {}


def _last_parts(value: object) -> object:
    if isinstance(value, list):
        return [_last_part(part) for part in value]
    return _last_part(value) if isinstance(value, str) else value


def _last_part(path: object) -> str:
    text = str(path)
    return (
        (PurePosixPath(text).name or text)
        if text.startswith(("/", ".", "~")) or text.count("/") > 1
        else text
    )


def _without_folders(value: Any) -> Any:
    """Of the places on a disk in a text or a list of texts, the last parts: the others are nobody's business."""
    if isinstance(value, list):
        return [_without_folders(part) for part in value]
    if not isinstance(value, str):
        return value
    return re.sub(r"(?<![\w.~-])~?/[^,\]\s]*", lambda match: _last_part(match[0]), value)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


# --- results ---------------------------------------------------------------------------------------------------

_ENVIRONMENT = ("trailmark", "torch", "transformers", "python", "processor", "gpu", "threads", "date")


def _results(evaluations: Sequence[Json], changed_since: bool) -> list[str]:
    shown = [record for record in evaluations if record["results"]]
    if not shown:
        why = " Results of the model that they came from are not theirs." if changed_since else ""
        return [f"Nothing was measured of these weights.{why}"]
    parts = []
    for record in shown:
        header, rows = _kept_table(record) or _plain_table(record)
        numbered = [[*cells, _environment_number(result)] for result, cells in rows]
        table = _table([*map(plain, header), "run"], numbered)
        parts += [f"### {plain(_title(record))}", table, _how(record)]
    return parts


def _title(record: Json) -> object:
    return _mapping(record.get("card")).get("title") or record.get("suite")


_Rows = list[tuple[Json, list[str]]]  # a result, and the cells that are shown of it


def _kept_table(record: Json) -> tuple[Sequence[object], _Rows] | None:
    """The table that the record keeps for the card; None where an older version wrote the record."""
    card, results = _mapping(record.get("card")), record["results"]
    header, rows = card.get("header"), card.get("rows")
    if not isinstance(header, list) or not isinstance(rows, list):
        return None
    kept: _Rows = []
    for row in rows:
        number, cells = _mapping(row).get("result"), _mapping(row).get("cells")
        if not isinstance(number, int) or not 0 <= number < len(results) or not isinstance(cells, list):
            return None
        kept.append((_mapping(results[number]), [_shown(_without_folders(cell)) for cell in cells]))
    return header, kept


def _plain_table(record: Json) -> tuple[Sequence[object], _Rows]:
    """The settings that tell results apart, and all that was measured, under their own names."""
    results = _whole(record)
    _, varying = _settings(results)
    found = dict.fromkeys(
        name for result in results for name in result if name not in (*_OF_A_RECORD, *varying)
    )

    def measured(result: Json, name: str) -> str:
        value = result.get(name)
        value = value.get("f") if _scored(value) else value
        return _shown(value, ".4g") if _finite(value) else "-"

    names = [name for name in found if any(measured(result, name) != "-" for result in results)]
    rows = []
    for result in results:
        told = [_shown(_mapping(result.get("settings")).get(name), "g") for name in varying]
        rows.append((result, [*told, *(measured(result, name) for name in names)]))
    return [*varying, *names], rows


# of each result, whatever was measured
_OF_A_RECORD = ("id", "settings", "environment", "seconds", "command")


def _scored(value: object) -> TypeGuard[Json]:
    """Whether it is a score with its interval, as ROUGE's."""
    return isinstance(value, Mapping) and {"f", "low", "high"} <= value.keys()


def _whole(record: Json) -> list[Json]:
    """The results but those of a part, which a suite keeps on its way to the whole."""
    results = [_mapping(result) for result in record["results"]]
    return [result for result in results if _mapping(result.get("settings")).get("block") is None]


def _settings(results: Sequence[Json]) -> tuple[dict[str, object], list[str]]:
    """The settings that all results share, and the names of those that tell them apart."""
    return in_common([_mapping(result.get("settings")) for result in results])


def _environment_number(result: Json) -> str:
    number = result.get("environment")
    return _shown(number + 1 if isinstance(number, int) else None)


def _how(record: Json) -> str:
    results, model = _whole(record), _mapping(record.get("model"))
    common, _ = _settings(results)
    told = {name: x for name, x in common.items() if name != "suite" and x not in (None, {}, [])}
    changed, environments = _mapping(model.get("set")), record.get("environments")
    lines = [
        "Measured"
        + (f" in {plain(model['dtype'])}" if model.get("dtype") else "")
        + (f", with {_named(changed)} set" if changed else "")
        + (f"; in all: {_named(told)}" if told else "")
        + "."
    ]
    for place, fields in enumerate(environments if isinstance(environments, list) else (), start=1):
        known = {name: x for name in _ENVIRONMENT if (x := _mapping(fields).get(name)) is not None}
        lines.append(f"Run {place}: {_named(known)}.")
    commands = dict.fromkeys(_command(r["command"]) for r in results if isinstance(r.get("command"), str))
    # an indented line ends where the line ends, whatever it holds
    return "\n\n".join([*lines, "\n".join(f"    {command}" for command in commands)]).rstrip()


def _command(line: str) -> str:
    """As it was typed, but for where on a disk things lie."""
    try:
        return one_line(shlex.join(_without_folders(word) for word in shlex.split(line)))
    except ValueError:  # no shell's
        return one_line(line)


# --- limits ----------------------------------------------------------------------------------------------------


def _limits(
    config: Json, run: Json | None, history: Json | None, evaluations: Sequence[Json], changed_since: bool
) -> str:
    said = []
    trained = trained_length(config, run, history)
    if trained is not None:
        said.append(
            f"{'Once trained' if changed_since else 'Trained'} on texts of at most {trained:,} tokens."
        )
    for record in evaluations:
        found = [length for result in record["results"] if _finite(length := _mapping(result).get("length"))]
        if found:
            said.append(f"{plain(_title(record))}: measured from {min(found):,} to {max(found):,} tokens.")
    said.append("What this card does not name was not measured: other texts, languages, tasks and lengths.")
    return " ".join(said)


# --- for the hub -----------------------------------------------------------------------------------------------


def _front_matter(name: str, tags: Sequence[str], evaluations: Sequence[Json]) -> str:
    found = [result for record in evaluations for result in _hub_results(record)]
    own = ["trailmark", "long-context"]
    kept = [tag for tag in (one_line(tag) for tag in tags) if tag and tag not in own]
    data = ModelCardData(
        library_name="trailmark",
        pipeline_tag="text-generation",
        tags=own + kept,
        model_name=(one_line(name) or "model") if found else None,
        eval_results=found or None,
    )
    return f"---\n{data.to_yaml()}\n---"


def _hub_results(record: Json) -> Iterable[EvalResult]:
    """What the hub lists beside a model: of results under the model's own configuration."""
    suite = str(record.get("suite"))
    if _mapping(_mapping(record.get("model")).get("set")):
        return
    results = [r for r in _whole(record) if not _mapping(_mapping(r.get("settings")).get("set"))]
    _, varying = _settings(results)
    always = [name for name in ("kind", "format", "windows", "protocol") if name not in varying]
    for result in results:
        settings = _mapping(result.get("settings"))
        named = [(name, settings.get(name)) for name in always + varying]
        cell = ", ".join(
            f"{name} {value if isinstance(value, str) else json.dumps(value)}"
            for name, value in named
            if name in varying or value is not None
        )
        for name, value in result.items():
            if _scored(value):
                value = value.get("f")
            elif f"{name}_low" not in result:
                continue  # no measure, or one of no known error
            if _finite(value):
                yield EvalResult(
                    task_type="text-generation",
                    dataset_type=f"trailmark-{suite}",
                    dataset_name=one_line(f"{suite}: {cell}" if cell else suite),
                    dataset_config=one_line(cell) or None,  # the hub takes those of one for the same
                    metric_type=name,
                    metric_name=name,
                    metric_value=value,
                )
