"""Several processes share a text: logits, losses and gradients are those of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.models.tiny import LLAMA3, assert_same, drt, hils, landmark, rpt, tokens, window_model
from tests.training.killed import begin
from trailmark.models import TrailmarkForCausalLM
from trailmark.models.context_parallel import share_texts

BASE: dict[str, Any] = {
    "window_position": "rope",
    "rope_scaling": LLAMA3,
    "num_sinks": 3,
    "max_sink_distance": 30,
}
CASES: dict[str, dict[str, Any]] = {
    "window": {"model": "window"},
    "window, sinks": {"model": "window", **BASE},
    "one group": {"groups": 1},
    "two groups": {"groups": 2},
    "as published": {
        "groups": 2,
        "residual_gca": True,
        "retrieval_normalization": False,
        "softmax_off_by_one": True,
    },
    "sinks": {"groups": 2, **BASE},
    "hidden landmarks": {"groups": 2, "landmarks_as_keys": False, **BASE},
    "what the window shows left out": {"groups": 2, "exclude_visible_chunks": True},
    "at random": {"groups": 1, "retriever": "random"},
    "without noise": {"groups": 2, "retrieval_noise": False, "retrieval_recency": 0.5},
    "keys of each layer": {"groups": 1, "memory_kv": "layer"},
    "checkpointed": {"groups": 2, "checkpointed": True},
    "lower layers fixed": {"groups": 2, "landmarks_as_keys": False, "fixed": True, **BASE},
    "reference": {"groups": 2, "implementation": "reference"},
}
# by how many processes each is computed
RUNS = [("window", 2), ("two groups", 2), *((case, 4) for case in CASES)]
LENGTH = 64  # of four stretches each is 4 chunks of 4 tokens, twice the window of 7 and more


def model_of(case: str) -> TrailmarkForCausalLM:
    options = dict(CASES[case])
    checkpointed, fixed = options.pop("checkpointed", False), options.pop("fixed", False)
    if options.pop("model", "drt") == "window":
        model: TrailmarkForCausalLM = window_model(**options)
    else:
        model = drt(options.pop("groups"), **options)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for part in (model.lower_layers, model.embed_tokens) if fixed else ():
        part.requires_grad_(False)
    return model.train()


def found(model: TrailmarkForCausalLM, ids: Tensor, labels: Tensor, total: int) -> dict[str, Tensor]:
    """Logits, this part of the loss, and the gradients of the weights by it; the groups' selections."""
    seed = torch.arange(len(ids)) + 5
    out = model(ids, noise_seed=seed, output_retrieval=True)
    losses = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    loss = losses / total
    loss.backward()
    kept = {f"grad {name}": x.grad for name, x in model.named_parameters() if x.grad is not None}
    chosen = {f"selection {n}": one.indices for n, one in enumerate(out.retrieval or ())}
    return {"logits": out.logits.detach(), "loss": loss.detach()} | chosen | kept


def text() -> tuple[Tensor, Tensor]:
    ids = tokens(LENGTH, 2)
    return ids, F.pad(ids[:, 1:], (0, 1), value=-100)


def share(file: str) -> None:
    """In each process: the cases by two and by four of them, as the sum or the row of what all have."""
    dist.init_process_group("gloo")
    rank, (ids, labels) = dist.get_rank(), text()
    cases = {}
    for size in (2, 4):
        groups = [dist.new_group(range(first, first + size)) for first in range(0, 4, size)]
        group, place = groups[rank // size], rank % size
        assert isinstance(group, dist.ProcessGroup)
        own = slice(place * LENGTH // size, (place + 1) * LENGTH // size)
        for case in (case for case, by in RUNS if by == size):
            model = model_of(case)
            share_texts(model, group)
            part = found(model, ids[:, own], labels[:, own], int((labels >= 0).sum()))
            for name, x in part.items():
                if name.startswith(("logits", "selection")):
                    pieces = [torch.empty_like(x) for _ in range(size)]
                    dist.all_gather(pieces, x.contiguous(), group=group)
                    part[name] = torch.cat(pieces, dim=1)
                else:
                    dist.all_reduce(x, group=group)
            cases[size, case] = part
        if size == 4:
            continue
        unequal = drt()
        share_texts(unequal, group)
        try:
            unequal(ids[:, : 16 - 4 * (place == 1)])
        except ValueError as error:
            own_words = torch.tensor([list(str(error).encode()[:40])])
        told = [torch.empty_like(own_words) for _ in range(size)]
        dist.all_gather(told, own_words, group=group)
        cases[size, "unequal"] = {"message": torch.cat(told)}
    dist.destroy_process_group()
    if rank == 0:
        torch.save(cases, file)


Cases = dict[tuple[int, str], dict[str, Tensor]]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    file = tmp_path_factory.mktemp("shared") / "found.pt"
    begin(share, str(file), processes=4).results()
    found: Cases = torch.load(file)
    return found


@pytest.mark.parametrize(("case", "size"), RUNS)
def test_is_as_one_process(shared: Cases, case: str, size: int) -> None:
    ids, labels = text()
    alone = found(model_of(case), ids, labels, int((labels >= 0).sum()))
    assert shared[size, case].keys() == alone.keys()
    for name, wanted in alone.items():
        if name.startswith("selection"):
            assert torch.equal(shared[size, case][name], wanted), name
        else:
            assert_same(shared[size, case][name], wanted)


def test_stretches_of_other_lengths_are_refused_by_all(shared: Cases) -> None:
    told = shared[2, "unequal"]["message"]
    assert told.unique(dim=0).shape == (1, len("input_ids: expected stretches of as many"))
    assert bytes(told[0].tolist()).decode() == "input_ids: expected stretches of as many"


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """Of one process, which shares its texts with nobody."""
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    whole = dist.group.WORLD
    assert whole is not None
    yield whole
    dist.destroy_process_group()


def test_stretches_are_whole_and_as_long_as_a_window(group: dist.ProcessGroup) -> None:
    model = drt()
    share_texts(model, group)
    with pytest.raises(ValueError, match="input_ids: expected a stretch of whole chunks of 4 tokens"):
        model(tokens(18))
    with pytest.raises(
        ValueError, match=r"at least the 6 positions that a window or the sinks ask for, got 5"
    ):
        model(tokens(4))


@pytest.mark.parametrize(
    "asked",
    [
        {"labels": tokens(8)},
        {"close_chunk": True},
        {"logits_to_keep": 1},
        {"attention_mask": torch.ones(1, 8).tril(3)},
        {"document_ids": torch.zeros(1, 8, dtype=torch.int64)},
        {"logits_at": torch.zeros(1, 1, dtype=torch.int64)},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_a_stretch_cannot_answer(asked: dict[str, Any], group: dist.ProcessGroup) -> None:
    model = drt().eval()
    share_texts(model, group)
    with pytest.raises(ValueError, match=f"{next(iter(asked))}: expected none of a model whose texts"):
        model(tokens(8), **asked)


def test_no_memory_is_read_of_a_stretch_and_noise_is_the_texts(group: dist.ProcessGroup) -> None:
    model = drt()
    share_texts(model, group)
    with pytest.raises(ValueError, match="noise_seed: expected that of each text"):
        model.train()(tokens(8))
    with pytest.raises(ValueError, match="past_key_values: expected none of a model whose texts"):
        model.eval()(tokens(8), use_cache=True)
    with pytest.raises(ValueError, match="model: expected one whose texts are not shared, to read"):
        model.read(tokens(8))
    model.context_parallel = None
    assert model.read(tokens(8)).get_seq_length() == 8


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (landmark, "a drt or a sliding_window model, got LandmarkForCausalLM"),
        (rpt, "got RPTForCausalLM"),
        (hils, "got HiLSForCausalLM"),
        (lambda: window_model(sliding_window=None), "one window, got sliding_window None"),
        (lambda: drt(retriever="encoder", embedder="hash"), "got 'encoder'"),
    ],
)
def test_which_models_share_no_text(
    model: Callable[[], TrailmarkForCausalLM], message: str, group: dist.ProcessGroup
) -> None:
    made = model()
    with pytest.raises(ValueError, match=f"context_parallel: expected .*{message}"):
        share_texts(made, group)
    assert made.context_parallel is None
