"""What the retrievers of learning.py choose: labels that are cited, what these are worth, what a chunk is found by."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from case_study.references import Reference
from common import keep
from learning_models import FIELDS, FIT_STEPS, LENGTH, fitted, trained
from pretrained_models import FOLDER, Losses, Text, Totals, chapters, converted, interval, opened, weights_of
from pretrained_references import Chapter, bm25_scores, candidates_of, chapter, hits, share
from pretrained_train import corpus
from torch import Tensor, nn

from trailmark.data.corpus import Tokens, load_tokenizer, read_text
from trailmark.data.neighbours.bm25 import best_chunks, fit_bm25
from trailmark.data.shards import Corpus
from trailmark.evaluation.retrieval.run import losses_of, parts_of, row_of
from trailmark.models.candidates import TextCandidates
from trailmark.models.drt.config import DRTConfig
from trailmark.models.layers import rms_normalize
from trailmark.models.with_retrieved import without_retrieval
from trailmark.ops.score_parts import without_recency
from trailmark.report.console import Progress
from trailmark.training.next_chunk import NextChunk

SCORED = 32768  # tokens of a chapter at most, where nothing but scores is computed
NAMED_LENGTH = 16384  # and where names are predicted
SWEEPS = 200
CANDIDATES = ((0, SCORED), (0, 130), (131, 520), (521, SCORED))  # as in docs/case-study.md
SUMMARIES = "states", "embeddings"


# --- what scores say -----------------------------------------------------------------------------------------------


def scores(options: argparse.Namespace) -> None:
    """Before and after: how popular chunks are, and whose choice holds the label that is about to be cited.

    Nothing above the retriever runs, so texts are longer, and chunks have more candidates.
    """
    progress, hits_of, parts = Progress(), [], []
    tokenizer = load_tokenizer(str(converted(FOLDER, "sliding_window")))
    models = {f"before, seed {seed}": opened(fitted(options.begin, seed)) for seed in options.seeds}
    models |= {f"learned, seed {seed}": opened(trained(options.begin, seed)) for seed in options.seeds}
    config = next(iter(models.values())).config
    corpus_of = Corpus.open(FOLDER / "shards")
    bm25 = fit_bm25(corpus_of, config.chunk_size, tokenizer, FOLDER / "bm25.json").bm25
    for file in chapters():
        progress.show(file.name)
        begun = chapter(read_text(file), tokenizer, SCORED, config.chunk_size)
        found = _scores(models, begun.ids)
        parts.append({name: parts_of(torch.from_numpy(own), config) for name, own in found.items()})
        for seed in options.seeds:
            popular = popular_scores(torch.from_numpy(found[f"learned, seed {seed}"]), config)
            found[f"popular, seed {seed}"] = popular.numpy()
        candidates = (found[f"before, seed {options.seeds[0]}"] > -np.inf).sum(1)
        chunks = np.arange(len(candidates), dtype=np.float64)
        found["BM25"] = bm25_scores(bm25, begun.ids, config.chunk_size)
        found["recent"] = np.broadcast_to(chunks, (len(chunks), len(chunks)))
        hits_of.append(
            [
                (known, own | _seeds(own))
                for known, own in hits(begun, found, candidates, config.num_retrieved_chunks)
            ]
        )
    keep(options.output, f"scores, {options.begin}", {
        "length": SCORED, "chosen": config.num_retrieved_chunks, "label": _by_candidates(hits_of),
        "parts": [
            {"scores": name} | {part: float(np.mean([own[name][part] for own in parts])) for part in parts[0][name]}
            for name in models
        ],
    })  # fmt: skip
    progress.say(f"Measured, in {options.output}")


def _by_candidates(hits_of: Sequence[Sequence[tuple[int, Mapping[str, float]]]]) -> list[dict[str, Any]]:
    """The shares of references found by each rule, of each text's hits, by how many candidates there are."""
    rules, rows = next(own for text in hits_of for _, own in text), list[dict[str, Any]]()
    for least, most in CANDIDATES:
        those = [[own for known, own in text if least <= known <= most] for text in hits_of]
        asked = [own for own in those if own]
        counted = {"least": least, "most": most if most < SCORED else None, "texts": len(asked)}
        rows += [counted | {"references": sum(map(len, asked))} | row for row in share(asked, rules)]
    return rows


class _EnoughError(Exception):
    """What a retriever is asked with has been seen."""


@torch.no_grad()
def _states(first: Any, ids: Tokens) -> dict[str, Tensor]:
    """What a text's chunks are summed up by, and what their landmarks ask with, [1, C, E]; nothing above runs."""
    seen: dict[str, Tensor] = {}

    def summary(module: Any, inputs: tuple[torch.Tensor]) -> None:
        seen["summary"] = inputs[0]

    def hidden(module: Any, inputs: tuple[torch.Tensor]) -> None:
        seen["hidden"] = inputs[0]
        raise _EnoughError

    hooks = [
        first.encoder.landmark_proj.register_forward_pre_hook(summary),
        first.retrievers[0].register_forward_pre_hook(hidden),
    ]
    with suppress(_EnoughError):
        first(row_of(first, ids.astype(np.int64)), logits_to_keep=1, use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


@torch.no_grad()
def _scores(models: Mapping[str, Any], ids: Tokens) -> dict[str, Any]:
    """[C, C] of each; below the retriever, where all are one, the first of them runs for all."""
    first = next(iter(models.values()))
    seen, config = _states(first, ids), first.config
    among = TextCandidates(first.layouts.of(len(ids), False), config.first_visible, False, first.device)
    scale = config.retrieval_scale * config.hidden_size**-0.5
    return {
        name: among.scores(
            model.retrievers[0](seen["hidden"]),
            model.encoder.landmark_vectors(seen["summary"]),
            scale,
            config.retrieval_recency,
        )[0]
        .double()
        .cpu()
        .numpy()
        for name, model in models.items()
    }


def _seeds(own: Mapping[str, float]) -> dict[str, float]:
    """The means of the seeds, and how far what was learned lies above the others."""
    means = {
        name: float(np.mean([hit for rule, hit in own.items() if rule.startswith(f"{name}, seed")]))
        for name in ("before", "learned", "popular")
    }
    others = means | {rule: own[rule] for rule in ("BM25", "recent", "random")}
    above = {
        f"learned above {rule}": means["learned"] - hit for rule, hit in others.items() if rule != "learned"
    }
    return means | above


def popular_scores(scores: Tensor, config: Any) -> Tensor:
    """Scores [C, C] if a past chunk had the same for all that ask, but for its age.

    What rows and columns explain by least squares (sweeps over both come to it): scores that are such sums stay as they
    are. A mark, and no choice that could be made: chunks that ask later have a say too.
    """
    known, plain = scores.isfinite(), without_recency(scores, config.retrieval_recency)
    rest, popular = plain.masked_fill(~known, 0), plain.new_zeros(plain.shape[-1])
    in_row, in_column = known.sum(-1, keepdim=True).clamp(min=1), known.sum(-2).clamp(min=1)
    for _ in range(SWEEPS):
        rest = (rest - rest.sum(-1, keepdim=True) / in_row).masked_fill(~known, 0)
        step = rest.sum(-2) / in_column
        rest, popular = (rest - step).masked_fill(~known, 0), popular + step
    return torch.where(known, popular + scores.double() - plain, -torch.inf)


# --- what a label's chunk is worth to its name ---------------------------------------------------------------------

CITED = "the label's", "another", "none"  # chunk with the name that is read


def names(options: argparse.Namespace) -> None:
    """What it is worth to the tokens of a label's name, where it is cited, that a chunk with this name is read.

    Beside the model's own choice stand the same weights without retrieval, and its choice but for these chunks, of all
    names of a text at once.
    """
    progress, folders = Progress(), {seed: trained(options.begin, seed) for seed in options.seeds}
    tokenizer = load_tokenizer(str(converted(FOLDER, "sliding_window")))
    S = DRTConfig.from_pretrained(folders[options.seeds[0]]).chunk_size
    begun = {
        file.name: chapter(read_text(file), tokenizer, NAMED_LENGTH, S, whole=True) for file in chapters()
    }
    texts = [Text(name, one.ids) for name, one in begun.items()]
    for seed, folder in folders.items():  # in files of their own, as in measure
        weights = weights_of(folder)
        losses = Losses(FOLDER / f"learning-names-{options.begin}-{seed}.json", progress)
        of_texts = losses.of(
            f"weights {weights[:12]}", partial(opened, folder), texts, partial(_names, [*begun.values()])
        )
        # each seed by itself: what it reads is of its own choice, and another may be measured elsewhere
        keep(options.output, f"names, {options.begin}, seed {seed}", {
            "length": NAMED_LENGTH, "seed": seed, "weights": weights, "rows": _of_names(np.array(of_texts)),
        })  # fmt: skip
    progress.say(f"Measured, in {options.output}")


def _of_names(by_text: np.ndarray) -> list[dict[str, Any]]:
    """What :func:`_names` found in all texts [texts, CITED, 5], by which chunk with the name is read."""
    rows = []
    for cited, (found, tokens, own, off, other) in zip(CITED, by_text.transpose(1, 2, 0), strict=True):
        if not tokens.any():
            continue
        read = other - own if cited != CITED[-1] else own - other
        rows.append(
            {"read": cited, "names": int(found.sum()), "texts": int((found > 0).sum())}
            | {"nats": float(own.sum() / tokens.sum())}
            | interval("retrieval", off - own, tokens)
            | interval("name", read, tokens)
        )
    return rows


@torch.no_grad()
def _names(begun: Sequence[Chapter], model: Any, number: int) -> Totals:
    """[CITED, 5]: names, their tokens, the nats of these by own choice, without retrieval, and by the other choice.

    Of a chapter. The other one reads no chunk with the name, or the label's if none was read. Names that the window
    still shows are left out, tokens that the chunk before predicts, and all but the first of the names in a chunk.
    """
    layout, tokens = begun[number]
    ids, K = tokens.astype(np.int64), model.config.num_retrieved_chunks
    scores = _scores({"own": model}, tokens)["own"]
    limits = np.isfinite(scores).sum(1)
    chosen, others, cited = best_chunks(scores, limits, K), scores.copy(), dict[int, tuple[int, Reference]]()
    for one, known in candidates_of(layout, limits):
        asking, there = one.chunk - 1, np.isin(one.mentions, chosen[one.chunk - 1])
        if asking in cited or one.mentions[-1] >= known or known - len(one.mentions) < K:
            continue
        kind = 0 if one.label_chunk in chosen[asking] else 1 if there.any() else 2
        others[asking, list(one.mentions) if kind < 2 else one.label_chunk] = -np.inf if kind < 2 else np.inf
        cited[asking] = kind, one
    other = best_chunks(others, limits, K)
    nats = [losses_of(model, ids), losses_of(without_retrieval(model), ids), losses_of(model, ids, other)]
    found = np.zeros((len(CITED), 5))
    for kind, one in cited.values():
        # a token is predicted at the one before it
        first, stop = max(one.tokens[0], int(layout.chunk_tokens[one.chunk]) + 1), one.tokens[1]
        if first < stop:
            found[kind] += [1, stop - first, *(own[first - 1 : stop - 1].sum() for own in nats)]
    return found


# --- what a chunk is searched by ---------------------------------------------------------------------------------


@torch.no_grad()
def keys(options: argparse.Namespace) -> None:
    """Labels found by what sums a chunk up, asked with the chunk that reads: what no choice can know before."""
    progress, hits_of = Progress(), []
    base = converted(FOLDER, "sliding_window")
    tokenizer, texts = load_tokenizer(str(base)), Corpus.open(corpus(FOLDER, base))
    model = opened(converted(FOLDER, "drt", *FIELDS))
    config, E = model.config, model.config.hidden_size
    fits = {name: NextChunk(nn.Linear(E, E, bias=False), []) for name in SUMMARIES}  # without a query
    for number in range(FIT_STEPS):
        progress.show(f"text {number + 1} of {FIT_STEPS}")
        first = number * (len(texts) - LENGTH) // FIT_STEPS
        for name, own in _summaries(model, texts.read(first, first + LENGTH)).items():
            there = torch.ones(own.shape[:2], dtype=torch.bool)
            fits[name].add(own, [], there, there)
    for fit in fits.values():
        fit.solve()
    bm25 = fit_bm25(texts, config.chunk_size, tokenizer, FOLDER / "bm25.json").bm25
    for file in chapters():
        progress.show(file.name)
        # whole chunks: nothing sums up part of one
        begun = chapter(read_text(file), tokenizer, SCORED, config.chunk_size, whole=True)
        layout = model.layouts.of(len(begun.ids), False)
        among = TextCandidates(layout, config.first_visible, False, model.device)
        words = bm25_scores(bm25, begun.ids, config.chunk_size)
        found = {"BM25, asking": words, "BM25, next": np.roll(words, -1, 0)}
        for name, own in _summaries(model, begun.ids).items():
            vectors = rms_normalize(fits[name].landmark(own), config.rms_norm_eps)
            scores = among.scores(vectors.roll(-1, 1), vectors, E**-0.5, config.retrieval_recency)
            found[f"{name}, next"] = scores[0].double().numpy()
        candidates = among.limits.flatten().numpy()
        hits_of.append([*hits(begun, found, candidates, config.num_retrieved_chunks)])
    kept = {"length": SCORED, "chosen": config.num_retrieved_chunks, "tokens": FIT_STEPS * LENGTH}
    keep(options.output, "keys", kept | {"label": _by_candidates(hits_of)})
    progress.say(f"Measured, in {options.output}")


def _summaries(model: Any, ids: Tokens) -> dict[str, Tensor]:
    """Of a text's whole chunks by name what sums them up [1, C, E]: their states' mean, or their embeddings'."""
    S = model.config.chunk_size
    chunks = torch.from_numpy(ids[: len(ids) // S * S].astype(np.int64)).view(1, -1, S)
    embeddings = model.embed_tokens(chunks.to(model.device)).float().mean(2)
    return {"states": _states(model, ids)["summary"].float().cpu(), "embeddings": embeddings.cpu()}
