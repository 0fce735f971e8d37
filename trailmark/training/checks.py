"""Whether the settings of a run are within their bounds and go together, before anything is made of them."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import yaml

from trailmark.data.needles.curriculum_texts import CURRICULUM, PACKED
from trailmark.data.needles.mixed import most_questions
from trailmark.models import MODELS, TrailmarkConfig, architectures_with, short_name
from trailmark.models.context_parallel import expect_shareable, least_stretch
from trailmark.settings import expect_bounds

if TYPE_CHECKING:
    from trailmark.training.config import RunConfig


def check(config: RunConfig) -> None:
    """Raise a ValueError, which names the setting, for settings that cannot be or do not go together."""
    expect_bounds(config.data, "data")
    expect_bounds(config.training, "training")
    expect_bounds(config.distil, "distil")
    _check_data(config)
    if config.data.task != "needles":
        config.rows_per_step()
    model = config.model_config()
    chunk_size = getattr(model, "chunk_size", None)
    if config.data.task == "needles" and chunk_size is not None and chunk_size != config.data.chunk_size:
        raise ValueError(
            f"data.chunk_size: expected the model's chunk_size {chunk_size}, got {config.data.chunk_size}: "
            "a question's landmark must fall right after it."
        )
    try:
        model.expect_trainable()
    except ValueError as error:
        raise ValueError(f"model.{error}") from error
    _check_lengths(config, model)
    _check_neighbours(config, model)
    _check_parts(config, model)
    _check_distil(config, model)
    _check_sharing(config, model)


def _check_neighbours(config: RunConfig, model: TrailmarkConfig) -> None:
    """That a model whose chunks come from outside has them, and no other."""
    data, retriever = config.data, getattr(model, "retriever", None)
    if data.neighbours is None:
        if retriever == "encoder" and getattr(model, "embedder", None) is None:
            raise ValueError(
                "model.embedder: expected an embedder ('hash', 'transformers:FOLDER', ...) or a table of its "
                "neighbours (data.neighbours) with model.retriever 'encoder', got neither. trailmark neighbours makes "
                "one."
            )
        if retriever == "learned" and config.init_from is None:
            raise ValueError(
                "data.neighbours: expected a table of target scores with model.retriever 'learned', got none: its "
                "ranking learns from nothing else. trailmark targets makes one of a prepared corpus; or set "
                "model.retriever to 'encoder', or init_from to a model whose retriever is trained."
            )
        return
    if not model.needs_neighbours:
        name = short_name(model.model_type)
        own = f"{name} with model.retriever {retriever!r}" if retriever else name
        ways = (f"{kind!r} ({' or '.join(architectures_with(kind))})" for kind in ("encoder", "learned"))
        raise ValueError(
            f"data.neighbours: expected none for {own}, which finds what it reads by itself, got {data.neighbours!r}. "
            f"Leave it out, or train with model.retriever {' or '.join(ways)}."
        )
    for name, expected, why in (
        ("task", "text", "a table is one of windows of a text"),
        ("separate_documents", False, "a table's windows are one text each"),
        ("needle_share", 0, "a table knows nothing of what is written over its windows"),
        ("early_landmarks", 0, "a table's chunks are full"),
    ):
        beside = f"data.{name}", getattr(data, name), expected
        _expect_beside(*beside, "data.neighbours", why, "leave data.neighbours out")


def _expect_beside(name: str, came: Any, expected: Any, other: str, why: str, way_out: str) -> None:
    """Raise a ValueError where a setting is not the one that goes with another."""
    if came != expected:
        wanted = _as_yaml(expected)
        raise ValueError(
            f"{name}: expected {wanted} with {other}, got {_as_yaml(came)}: {why}. Set {name}={wanted}, or {way_out}."
        )


def _as_yaml(value: Any) -> str:
    return yaml.safe_dump(value).removesuffix("...\n").strip()


def _check_parts(config: RunConfig, model: TrailmarkConfig) -> None:
    """That what is trained is there, and what is not was trained before."""
    training, architecture = config.training, MODELS[model.model_type]
    train, name = training.train, short_name(model.model_type)
    if train != "all" and config.init_from is None:
        raise ValueError(
            f"init_from: expected a folder with weights with training.train {train}, got none: what is not trained "
            "would stay as it is drawn. Name a converted or trained model, or set training.train=all."
        )
    parts = {
        "additions": (architecture.additions, "additions to a plain language model"),
        "additions_and_upper": (architecture.upper, "upper layers"),
        "retriever": (architecture.scoring, "retriever that is learned"),
    }
    for part, (patterns, lacks) in parts.items():
        if train.startswith(part) and not patterns:
            if train == "additions" and training.lora_rank:
                continue  # the twin of a model with additions: adapters alone
            raise ValueError(
                f"training.train: expected {'all' if not architecture.additions else 'additions or all'} for {name}, "
                f"which has no {lacks}, got {train}. With additions and training.lora_rank adapters alone are trained."
            )
    for key, part in (("addition", "additions"), ("retriever", "retriever")):
        patterns, lacks = parts[part]
        factor = getattr(training, f"{key}_learning_rate_factor")
        if factor != 1 and not patterns:
            raise ValueError(
                f"training.{key}_learning_rate_factor: expected 1 for {name}, which has no {lacks}, got {factor}."
            )
    if training.lora_rank and train == "all":
        raise ValueError(
            f"training.lora_rank: expected 0 with training.train all, which trains the matrices themselves, got "
            f"{training.lora_rank}. Set training.train=additions, or leave it out."
        )
    if training.loss_slab is not None:
        for name, came, expected in (
            ("data.task", config.data.task, "text"),
            ("distil.model", config.distil.model if config.distil.teaches else None, None),
            ("model.landmark_loss", getattr(model, "landmark_loss", None) == "text", False),
        ):
            if came != expected:
                raise ValueError(
                    f"training.loss_slab: expected none with {name} {_as_yaml(came)}, which needs all logits, got "
                    f"{training.loss_slab}. Leave it out."
                )
    if training.loss_positions < 1 and config.data.task != "text":
        raise ValueError(
            f"training.loss_positions: expected 1 with data.task {config.data.task}, where few tokens bear loss, got "
            f"{training.loss_positions}."
        )


def _check_distil(config: RunConfig, model: TrailmarkConfig) -> None:
    distil = config.distil
    if distil.fit_retriever != "teacher" and not distil.fit_steps:
        raise ValueError(
            f"distil.fit_retriever: expected teacher without distil.fit_steps, got {distil.fit_retriever}: nothing is "
            "fitted. Leave it out, or set distil.fit_steps."
        )
    if distil.model is None:
        if distil.retrieval_weight:
            raise ValueError(
                f"distil.model: expected a teacher with distil.retrieval_weight {distil.retrieval_weight}, got none. "
                "Name a folder with one, or leave the weight out."
            )
        if distil.fit_steps:
            raise ValueError(
                f"distil.model: expected a teacher with distil.fit_steps {distil.fit_steps}, got none. Name a folder "
                "with one, or leave the steps out."
            )
        return
    if distil.fit_steps and config.data.task != "text":
        raise ValueError(
            f"distil.fit_steps: expected 0 with data.task {config.data.task}, which has no running text to fit a "
            f"memory to, got {distil.fit_steps}."
        )
    if not distil.weight and not distil.retrieval_weight and not distil.fit_steps:
        raise ValueError(
            "distil.weight: expected distil.weight, distil.retrieval_weight or distil.fit_steps above 0 with a "
            "teacher, got 0 for all: nothing would be learned from it. Leave distil.model out."
        )
    if distil.retrieval_weight and not model.ranks_all_chunks:
        raise ValueError(
            f"distil.retrieval_weight: expected 0 for {short_name(model.model_type)} as it is configured, which does "
            f"not score all chunks by itself, got {distil.retrieval_weight}. A drt with retriever 'causal' does."
        )


def _check_sharing(config: RunConfig, model: TrailmarkConfig) -> None:
    """That texts which several processes share may be cut into stretches of whole chunks."""
    data, training = config.data, config.training
    if (size := training.context_parallel) == 1:
        return
    try:
        expect_shareable(MODELS[model.model_type], model)
    except ValueError as error:
        raise ValueError(f"training.{error}") from error
    chunk_size = getattr(model, "chunk_size", None)
    plain: list[tuple[str, Any, Any]] = [
        ("data.task", data.task, "text"),
        ("data.separate_documents", data.separate_documents, False),
        ("data.needle_share", data.needle_share, 0),
        ("data.early_landmarks", data.early_landmarks if chunk_size else 0, 0),
        ("training.loss_positions", training.loss_positions, 1),
        ("distil.model", config.distil.model, None),
    ]
    other, why = (
        f"training.context_parallel {size}",
        "texts are shared that are one piece of text in full chunks",
    )
    for name, came, expected in plain:
        _expect_beside(name, came, expected, other, why, "training.context_parallel=1")
    tokens = chunk_size or 1
    positions = tokens + bool(chunk_size and model.has_landmarks and not model.hides_landmarks)
    step, least = size * tokens, -(-least_stretch(model, size) // positions) * size * tokens
    if training.context_length % step or training.context_length < least:
        near = max(least, round(training.context_length / step) * step)
        what = "stretches" if chunk_size is None else "stretches of whole chunks"
        raise ValueError(
            f"training.context_length: expected {what}, each at least as long as the window, for "
            f"training.context_parallel {size}: a multiple of {step}, at least {least}; got "
            f"{training.context_length}. {near} would do."
        )


_OF_TASKS = {
    **dict.fromkeys(("hops", "chains", "distractors"), ("niah",)),
    "num_landmarks": ("niah", "needles"),
    **dict.fromkeys(("filler_weight", "first_digit_weight", "first_level", "level_accuracy"), ("needles",)),
}
"""Fields of data that other tasks would pass over, and the tasks that they are of."""


def _check_data(config: RunConfig) -> None:
    data, training = config.data, config.training
    for name in ("paths", "validation"):
        if getattr(data, name) == []:
            raise ValueError(
                f"data.{name}: expected files or folders, got an empty list. Name some, or null for "
                f"{'the Python standard library' if name == 'paths' else 'none'}."
            )
    if data.separate_documents and data.task != "text":
        raise ValueError(
            f"data.separate_documents: expected false with data.task {data.task}, whose samples are one document each."
        )
    for field in fields(data):
        tasks = _OF_TASKS.get(field.name, (data.task,))
        if data.task not in tasks:
            wanted, beside = (getattr(data, field.name), field.default), f"data.task {data.task}"
            why = f"it belongs to task {' or '.join(tasks)}"
            _expect_beside(f"data.{field.name}", *wanted, beside, why, f"set data.task={tasks[0]}")
    if data.needle_share > 0 and data.task != "text":
        raise ValueError(
            f"data.needle_share: expected 0 with data.task {data.task}, got {data.needle_share}: needles are mixed "
            "into text. Set data.task=text, or leave it out."
        )
    bears = data.task in ("niah", "summarization") or (data.task == "text" and data.needle_share > 0)
    if data.answer_weight != 1 and not bears:
        raise ValueError(
            f"data.answer_weight: expected 1 with data.task {data.task} and data.needle_share {data.needle_share}, got "
            f"{data.answer_weight}: there are no such answers. Set data.needle_share for text, or leave it out."
        )
    if data.packed and data.task != "needles":
        raise ValueError(f"data.packed: expected false with data.task {data.task}, got true. Leave it out.")
    if data.task == "summarization" and data.paths is None:
        raise ValueError(
            "data.paths: expected files of pairs (document, summary) with data.task summarization, got none. "
            "trailmark prepare xsum --pairs makes one."
        )
    if data.task == "summarization" and (data.validation is not None or training.eval_steps is not None):
        raise ValueError(
            "data.validation, training.eval_steps: expected none with data.task summarization: only text is measured "
            "on the way."
        )
    if training.eval_steps is not None and data.validation is None and data.task != "needles":
        raise ValueError(
            "data.validation: expected text to measure on every training.eval_steps, got none. Name files, or leave "
            "eval_steps out."
        )


def _check_lengths(config: RunConfig, model: TrailmarkConfig) -> None:
    """That the model has positions for the training texts, and that chunks begin where the task needs them."""
    data, last = config.data, CURRICULUM[-1].chunks
    if data.task == "needles":
        if model.begins_texts_inside_chunks:
            raise ValueError(
                "model.landmark_phase: expected 'fixed' with data.task needles, got 'random': the task says where "
                "chunks begin."
            )
        least = max(level.least_chunk for level in PACKED)
        if data.packed and data.chunk_size < least:
            raise ValueError(
                f"data.packed: expected data.chunk_size of at least {least}, so that packed needles have room, got "
                f"{data.chunk_size}."
            )
        most = model.longest_training_text()
        if most is not None and last * data.chunk_size > most:
            raise ValueError(
                f"model.max_position_embeddings: expected positions for the {last} chunks of {data.chunk_size} tokens "
                f"that the last level has, got as many as {most} tokens take."
            )
        return
    length = config.training.context_length
    early = {"niah": data.num_landmarks + (data.early_landmarks > 0), "summarization": 1}
    early["text"] = most_questions(length) if data.needle_share > 0 else 0
    most = model.longest_training_text(early.get(data.task, 0))
    if most is not None and length > most:
        wanted = model.training_positions(length, early.get(data.task, 0))
        raise ValueError(
            f"training.context_length: expected at most {most} tokens, which with their landmarks have all positions "
            f"of the model, got {length}. Set it lower, or model.max_position_embeddings={wanted}."
        )
