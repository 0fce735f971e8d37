"""Cost: formulas are what caches count, generation is generate's, and every cell says what it compares."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from tests.evaluation.needles.test_planting import drt_of_encoder
from tests.models.tiny import (
    PRETRAINED,
    block_recurrent,
    drt,
    hils,
    hsa,
    landmark,
    rpt,
    window_model,
)
from trailmark.evaluation.cost import run as cost
from trailmark.evaluation.cost.inference import Text
from trailmark.evaluation.cost.rounds import random_tokens, spread
from trailmark.evaluation.cost.run import (
    INFERENCE,
    TABLE_3,
    TABLE_4,
    TRAINING,
    CostSettings,
    base_of,
    ratios,
    run,
)
from trailmark.evaluation.cost.suite import SUITE
from trailmark.evaluation.cost.training import Step
from trailmark.evaluation.record import Record
from trailmark.evaluation.subject import Subject
from trailmark.memory import ChunkMemory
from trailmark.memory.tiers import records
from trailmark.models import MODELS, TrailmarkForCausalLM
from trailmark.models.costs import foreign_cache_bytes, num_closed
from trailmark.report.tables import result_table
from trailmark.training.config import load_run_config

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))


def config_of(name: str) -> Any:
    """The model's configuration of a file in configs/."""
    return load_run_config(CONFIGS[0].parent / f"{name}.yaml").model_config(384)


MODELS_MADE: dict[str, Callable[[], TrailmarkForCausalLM]] = {
    "window": window_model,
    "window, wide heads": lambda: window_model(head_dim=6, qk_norm="head", attention_bias=True),
    "drt, wide heads": lambda: drt(**PRETRAINED),
    "landmark, wide heads": lambda: landmark(**PRETRAINED),
    "drt": drt,
    "drt, 2 groups": lambda: drt(2, exclude_visible_chunks=True, sliding_window=13),
    "drt, hidden": lambda: drt(
        2, landmarks_as_keys=False, num_sinks=2, exclude_visible_chunks=True, sliding_window=13
    ),
    "window, sinks": lambda: window_model(num_sinks=3),
    "drt, encoder": lambda: drt_of_encoder(encoder_weights="encoder"),
    "rpt": rpt,
    "rpt, encoder": lambda: rpt(retriever="encoder", exclude_visible_chunks=False),
    "rpt, whole": lambda: rpt(
        continuation=True, neighbour_augmentation=True, neighbour_gate=True, cross_attention_every=2
    ),
    "landmark": landmark,
    "landmark, whole chunks": lambda: landmark(local_length=12, retrieve_per="token"),
    "landmark, head": lambda: landmark(retrieve_per="head"),
    "landmark, cell": lambda: landmark(retrieve_per="cell", causal_retrieval=False),
    "block-recurrent": block_recurrent,
    "hils": lambda: hils(num_sinks=2),
    "hils, read with windows": lambda: hils(num_sinks=2, reading="windows"),
    "hsa": hsa,
    "hsa, heads": lambda: hsa(num_memory_heads=2, num_retrieval_heads=2, num_sinks=2),
    "hils, mean": lambda: hils(
        chunk_score="mean", layer_types=["sliding_attention", "full_attention", "full_attention"]
    ),
    "hils, mass": lambda: hils(chunk_score="mass", chunk_weights="keys"),
}
OFF: dict[str, Callable[[], TrailmarkForCausalLM]] = {
    "drt, retrieval off": lambda: drt(2).without_retrieval(),
    "rpt, retrieval off": lambda: rpt(retriever="encoder").without_retrieval(),
    "hsa, retrieval off": lambda: hsa().without_retrieval(),
    "hils, retrieval off": lambda: hils().without_retrieval(),
    "landmark, retrieval off": lambda: landmark().without_retrieval(),
}
ONE_OF_EACH = ("window", "drt, 2 groups", "rpt, encoder", "landmark", "block-recurrent", "hils", "hsa")


def each(models: dict[str, Callable[[], TrailmarkForCausalLM]]) -> Any:
    return pytest.mark.parametrize(
        "make",
        [
            pytest.param(make, id=name, marks=[] if name in ONE_OF_EACH else [pytest.mark.slow])
            for name, make in models.items()
        ],
    )


EVERY_MODEL, AND_OFF = each(MODELS_MADE), each(MODELS_MADE | OFF)


def subject_of(model: Any, name: str = "model") -> Subject:
    return Subject(Path("runs") / name, model, None, {})


def measured(text: Text) -> dict[str, Any]:
    text.prepare()
    text.round(1)
    text.finish()
    return text.row()


def foreign(kind: str = "gpt2") -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=64, n_embd=16, n_layer=2, n_head=4))
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 50}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8}
        model = MistralForCausalLM(MistralConfig(**sizes, **heads, max_position_embeddings=64))
    return model.eval()


# --- bytes -----------------------------------------------------------------------------------------------


def assert_as_predicted(text: Text) -> None:
    row, expected = measured(text), text.expected()
    assert expected is not None
    assert (row["window_bytes"], row["memory_bytes"]) == (expected.window_bytes, expected.memory_bytes)
    assert (
        row["cache_bytes"]
        == row["formula_bytes"]
        == sum(row["formula_parts"].values()) - (expected.gathered + expected.recent)
    )
    assert row["device_bytes"] == row["formula_device_bytes"]


@AND_OFF
@pytest.mark.parametrize(("prompt", "generate"), [(3, 2), (23, 6)])
@pytest.mark.sampled(11)
def test_the_formula_is_what_the_cache_counts(
    make: Callable[[], TrailmarkForCausalLM], prompt: int, generate: int
) -> None:
    assert_as_predicted(Text("model", subject_of(make()), "device", prompt, generate))


@pytest.mark.slow
@AND_OFF
@pytest.mark.parametrize("prompt", [2, 4, 5, 11, 12, 22, 44, 50])
@pytest.mark.parametrize("generate", [2, 14])
def test_the_formula_at_every_phase(
    make: Callable[[], TrailmarkForCausalLM], prompt: int, generate: int
) -> None:
    assert_as_predicted(Text("model", subject_of(make()), "host", prompt, generate))


@pytest.mark.parametrize(
    ("name", "tier", "memory_dtype"),
    [
        ("drt", "disk", torch.int8),
        ("rpt, encoder", "disk", torch.bfloat16),
        ("landmark", "disk", None),
        ("drt", "host", torch.bfloat16),
        ("landmark", "disk", torch.int8),
        ("hsa", "host", torch.int8),
        ("rpt, encoder", "device", torch.int8),
        ("hils", "disk", torch.int8),
    ],
)
@pytest.mark.sampled(4)
def test_tiers_and_types(tier: str, name: str, memory_dtype: torch.dtype | None) -> None:
    model = MODELS_MADE[name]().float()
    text = Text("model", subject_of(model), tier, 41, 6, memory_dtype)
    assert_as_predicted(text)


@pytest.mark.parametrize("name", ["drt", "hsa", "rpt, encoder", "window"])
@pytest.mark.parametrize("memory_dtype", [None, torch.bfloat16])
@pytest.mark.sampled(8)
def test_a_memory_of_tokens(name: str, memory_dtype: torch.dtype | None) -> None:
    text = Text("model", subject_of(MODELS_MADE[name]().float()), "tokens", 41, 6, memory_dtype)
    assert_as_predicted(text)


def test_what_cannot_be_encoded_again_is_a_rows_problem() -> None:
    text = Text("model", subject_of(landmark()), "tokens", 41, 6)
    text.prepare()
    assert text.problem == "its chunks cannot be encoded again from their tokens"


@pytest.mark.slow
def test_what_lies_on_the_device() -> None:
    """Of a DRT: the tier says where 2 S J D numbers a chunk lie; landmarks stay, tables are the host's."""
    model = drt()
    S, J, D, E, chunks = 4, 2, 4, 16, 11 + 1  # 41 tokens make 11, the last closed early; 5 more close one
    rows = {
        tier: measured(Text("m", subject_of(model), tier, 41, 6))
        for tier in ("device", "host", "disk", "tokens")
    }
    records = chunks * 2 * S * J * D * 8
    assert rows["device"]["memory_bytes"] == records + chunks * (E * 8 + 24)
    assert rows["host"]["device_bytes"] == rows["host"]["window_bytes"] + chunks * E * 8
    assert rows["device"]["device_bytes"] == rows["host"]["device_bytes"] + records
    recent = rows["disk"]["formula_parts"]["recent"]
    assert rows["disk"]["device_bytes"] == rows["host"]["device_bytes"] + recent
    assert model.cache_bytes(41, 5).on_device("host", "cuda") == rows["disk"]["device_bytes"]


@pytest.mark.parametrize("name", ["drt", "landmark"])
def test_records_used_last_are_counted(name: str) -> None:
    text = Text("m", subject_of(MODELS_MADE[name]()), "disk", 41, 6)
    text.prepare()
    expected, slab = text.expected(), text.cache.memory._recent._slab
    assert expected is not None
    assert expected.recent == slab.numel() * slab.element_size()


@pytest.mark.parametrize(
    ("per", "prompt", "generate"),  # 2 chunks of 3; more; a chunk closes
    [("token_and_head", 41, 6), ("token", 12, 3), ("head", 41, 3), ("cell", 41, 6)],
)
@pytest.mark.sampled(4)
def test_what_a_layer_of_landmark_attention_gathers(
    per: str, prompt: int, generate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Text("m", subject_of(landmark(retrieve_per=per)), "device", prompt, generate)
    text.prepare()
    gather, found = ChunkMemory.gather, []

    def counted(*arguments: Any) -> Any:
        records, lengths = gather(*arguments)
        found.append(records.numel() * records.element_size())
        return records, lengths

    monkeypatch.setattr(ChunkMemory, "gather", counted)
    text.finish()
    expected = text.expected()
    assert expected is not None
    assert max(found) == expected.gathered


@pytest.mark.slow
def test_full_attention_uses_what_the_formula_says() -> None:
    """Its buffers have spare places; those in use are all positions of all layers."""
    model = window_model(sliding_window=None)
    for prompt, generate in ((2, 2), (60, 8)):
        text = Text("m", subject_of(model), "device", prompt, generate)
        row = measured(text)
        used = prompt + generate - 1
        assert row["formula_bytes"] == 3 * 2 * used * 2 * 4 * 8
        text.prepare()
        text.finish()
        slots = [layer.keys.shape[2] for layer in text.cache.layers]
        assert row["cache_bytes"] == sum(2 * n * 2 * 4 * 8 for n in slots)
        assert all(used <= n <= max(64, used * 3 // 2) for n in slots)


def test_the_papers_formula() -> None:
    """Of Table 3's sizes: L d / S + N / 2 K S d + N W d, keys and values counted apart."""
    config: Any = config_of("drt-x1-128m")
    E, S, W, N, K = 768, 64, 512, 12, 8
    assert (config.hidden_size, config.chunk_size, config.sliding_window) == (E, S, W)

    def paper_bytes(config: Any) -> int | None:
        with torch.device("meta"):
            return MODELS[config.model_type](config).bfloat16().paper_bytes(16_384)

    found = paper_bytes(config)
    assert found == 2 * (16_384 * E // S + 6 * K * S * 2 * E + N * W * 2 * E)
    base = paper_bytes(config_of("base-512-128m"))
    assert base == 2 * N * W * 2 * E
    full = config_of("full-attention-128m")
    assert paper_bytes(full) == 2 * N * 16_384 * 2 * E
    assert landmark().paper_bytes(100) is None


@pytest.mark.parametrize("length", [1, 4, 5, 23, 46])
def test_multiply_adds_are_counted_one_by_one(length: int) -> None:
    E, S, K, W = 16, 4, 3, 7
    positions = []
    for token in range(length):
        positions.append(token // S)
        if token % S == S - 1:
            positions.append(token // S)  # the landmark
    closed = length // S
    window = sum(min(p + 1, W) for p in range(len(positions)))
    read = sum(min(K, max(0, c - 1)) * S for c in positions)  # c - 1 has c - 1 candidates
    asked = sum(range(closed))
    assert drt(2).attention_multiply_adds(length) == {
        "window": 2 * E * 5 * window,
        "retrieved": 2 * E * 4 * read,
        "selection": E * 2 * asked,
    }
    n = 3
    beyond = [min(n, max(0, p - W + 1)) for p in range(length + 1)]
    seen = [min(p + 1, W) + beyond[p] for p in range(length)]
    asking = sum(min(p, W - 1) + beyond[p] for p in range(S, length + 1, S))
    hidden = drt(2, landmarks_as_keys=False, num_sinks=n).attention_multiply_adds(length)
    assert hidden["window"] == 2 * E * 5 * (sum(seen) + asking)
    assert window_model(num_sinks=n).attention_multiply_adds(length) == {"window": 2 * E * 3 * sum(seen)}
    window = sum(min(p + 1, W) for p in range(length))
    assert window_model().attention_multiply_adds(length) == {"window": 2 * E * 3 * window}
    everything = sum(range(1, len(positions) + 1))
    assert landmark().attention_multiply_adds(length) == {"all": 2 * E * 3 * everything}
    full = window_model(sliding_window=None)
    assert full.attention_multiply_adds(length) == {"all": 2 * E * 3 * sum(range(1, length + 1))}
    blocks, M = (length - 1) // 5, 3
    states = length * M + blocks * (M * M + M * 5)
    assert block_recurrent().attention_multiply_adds(length)["states"] == 2 * E * states


RETRIEVERS = {
    name: MODELS_MADE[name]
    for name in ("drt, 2 groups", "drt, hidden", "drt, encoder", "rpt", "rpt, encoder", "rpt, whole")
} | {"drt, a window of a chunk": lambda: drt(exclude_visible_chunks=True, sliding_window=3)}


@pytest.mark.parametrize("make", RETRIEVERS.values(), ids=RETRIEVERS.keys())
@pytest.mark.parametrize("length", [5, 46])
@torch.no_grad()
def test_multiply_adds_are_of_what_the_model_selects(
    make: Callable[[], TrailmarkForCausalLM], length: int
) -> None:
    """Counted in the selections of a forward and in the candidates of its grid."""
    model: Any = make()
    config, S, K = model.config, model.config.chunk_size, model.config.num_retrieved_chunks
    out = model(random_tokens(subject_of(model), length, 0), output_retrieval=True)
    selected = [int((row >= 0).sum()) for row in out.retrieval[0].indices[0].flatten(1)]
    rows = [
        min(S, length - c * S) + (config.has_landmarks and (c + 1) * S <= length) for c in range(1, length)
    ]
    read = sum(count * row * S for count, row in zip(selected, rows, strict=False) if row > 0)
    every, both = getattr(config, "cross_attention_every", 1), getattr(config, "continuation", False)
    found = model.attention_multiply_adds(length)
    assert found["retrieved"] == 2 * 16 * -(-config.num_upper_layers // every) * (1 + both) * read
    # those that may be selected are all that are, while there are not more than K
    size, groups = 16, getattr(config, "num_retrieval_groups", 1)
    if config.retriever == "encoder":
        size, groups = model.embedder.size, 1
    wide: Any = make().config
    wide.num_retrieved_chunks = 50
    many = type(model)(wide)
    many.embedder = model.embedder
    out = many.double().eval()(random_tokens(subject_of(model), length, 0), output_retrieval=True)
    assert found["selection"] == size * groups * int((out.retrieval[0].indices >= 0).sum())
    assert max(selected) <= K


def test_chunks_of_a_prompt_and_what_follows() -> None:
    assert [num_closed(p, g, 4) for p, g in ((1, 0), (4, 0), (5, 3), (5, 4), (8, 9))] == [1, 1, 2, 3, 4]


# --- generation ------------------------------------------------------------------------------------------


@AND_OFF
@pytest.mark.sampled(12)
def test_it_generates_what_generate_does(make: Callable[[], TrailmarkForCausalLM]) -> None:
    model = make()
    text = Text("m", subject_of(model), "device", 23, 6, seed=5)
    text.prepare()
    text.round(0)
    on_a_branch = text.tokens
    text.round(1)
    assert text.tokens[0] == int(random_tokens(text.subject, 1, 1))
    assert len(text.times) == 1
    text.finish()
    assert text.tokens == on_a_branch
    ids = random_tokens(text.subject, 23, 5)
    memory = model.read(ids[:, :-1])  # as a text, which a HiLS may read otherwise than a prompt
    found = model.generate(ids[:, -1:], past_key_values=memory, max_new_tokens=6, do_sample=False)
    assert text.tokens == found[0, 1:].tolist()


@pytest.mark.parametrize("kind", ["gpt2", "mistral"])
def test_a_model_of_transformers(kind: str) -> None:
    model = foreign(kind)
    text = Text("m", subject_of(model), "host", 30, 11)
    row = measured(text)
    ids = random_tokens(text.subject, 30, 0)
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=11, do_sample=False, eos_token_id=None
    )
    assert text.tokens == found[0, 30:].tolist()
    assert row["cache_bytes"] == row["formula_bytes"] == row["device_bytes"]
    layers, J, seen = (2, 4, 40) if kind == "gpt2" else (2, 2, 7)
    assert row["cache_bytes"] == layers * 2 * J * 4 * seen * 4
    assert not row["keeps_chunks"]


def test_a_model_whose_sizes_are_not_known() -> None:
    config = MistralConfig()
    config.layer_types = ["linear_attention"]
    assert foreign_cache_bytes(config, 10, 4) is None


def test_rounds_are_in_turn_and_the_first_does_not_count() -> None:
    messages: list[str] = []
    texts = [Text(name, subject_of(window_model(), name), "device", 9, 3) for name in ("a", "b")]
    rows = cost.measure(texts, 2, messages.append)
    turns = [message.split(":")[1].split()[0] for message in messages if message.startswith("round")]
    assert turns == ["a", "b"] * 3
    for row in rows:
        time = row["ms_per_token"]
        assert (time["rounds"], len(time["values"])) == (2, 2)
        assert 0 < time["p25"] <= time["median"] <= time["p75"]
        assert row["tokens_per_second_reading"] == 9 / (row["read_seconds"] + row["first_token_seconds"])
    assert all(text.cache is None for text in texts)


def test_the_same_seed_is_the_same_prompt() -> None:
    subject = subject_of(window_model())
    a, b, c = (random_tokens(subject, 50, seed) for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert 0 <= int(a.min()) <= int(a.max()) < 50


def test_a_text_that_does_not_fit_has_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Text("small", subject_of(window_model()), "device", 40, 3)
    large = Text("large", subject_of(window_model(sliding_window=None)), "device", 40, 3)
    needs = [text.expected().window_bytes for text in (small, large)]  # type: ignore[union-attr]
    free = (3 * sum(needs)) // 2  # between the two: a window is held three times at most
    monkeypatch.setattr(records.psutil, "virtual_memory", lambda: type("", (), {"available": free}))
    rows = cost.measure([small, large], 1, lambda message: None)
    assert rows[0]["problem"] is None
    assert rows[0]["ms_per_token"]["median"] > 0
    assert rows[1]["problem"].startswith("RAM needs ")
    assert rows[1]["ms_per_token"] is rows[1]["cache_bytes"] is None
    assert rows[1]["formula_bytes"] == needs[1]
    assert ratios(rows, "small")[1]["time_ratio"] is None


# --- training --------------------------------------------------------------------------------------------


@EVERY_MODEL
def test_a_training_step_changes_nothing(make: Callable[[], TrailmarkForCausalLM]) -> None:
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    step = Step("m", subject_of(model), 20, 2)
    assert step.run() > 0
    assert not model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_training_of_a_model_of_transformers() -> None:
    step = Step("m", subject_of(foreign()), 20, 1)
    step.times = [step.run() for _ in range(2)]
    row = step.row()
    assert row["tokens_per_second"] == 20 / row["seconds"]["median"]
    assert row["attention_multiply_adds"] is None


def test_out_of_memory_on_a_device_is_a_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = Step.run

    def run_step(self: Step) -> float:
        if self.name == "drt":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self)

    monkeypatch.setattr(Step, "run", run_step)
    subjects = [subject_of(window_model(), "window"), subject_of(drt(), "drt")]
    settings = CostSettings(lengths=(), training_lengths=(8,), rounds=2)
    [cell] = run(subjects, settings, Record(tmp_path, "cost", [s.identity() for s in subjects]))
    assert [row["problem"] for row in cell["rows"]] == [None, "out of memory on the device"]
    assert [row["time_ratio"] for row in cell["rows"]] == [1.0, None]


# --- the suite -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_cells_are_kept_and_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subjects = [subject_of(drt(), "drt"), subject_of(window_model(), "window")]
    settings = CostSettings(
        lengths=(9, 12), generate=2, rounds=2, training_lengths=(8,), training_batch_tokens=16
    )
    messages: list[str] = []

    def measure_all() -> list[dict[str, Any]]:
        record = Record(tmp_path, "cost", [s.identity() for s in subjects])
        return run(subjects, settings, record, messages.append)

    found = measure_all()
    assert any("round 2 of 2: drt generates" in message for message in messages)
    kept = json.loads((tmp_path / "cost.json").read_text())
    assert kept["results"] == found
    places = [(cell["settings"]["prompt"], cell["settings"]["tier"]) for cell in found[:4]]
    assert places == [(9, "device"), (9, "host"), (12, "device"), (12, "host")]
    assert {cell["base"] for cell in found} == {"window"}
    notes = [cell.get("note") for cell in found]  # on a CPU device and host are one memory
    assert [bool(note) for note in notes] == [False, True, False, True, False]
    assert result_table(SUITE, found, 0).count(str(notes[1])) == 1
    assert all(cell["base_is_window_only"] for cell in found)
    for cell in found:
        own = next(row for row in cell["rows"] if row["model"] == "window")
        assert (own["time_ratio"], own["memory_ratio"]) == (1.0, 1.0)
    rows = [row for cell in found for row in SUITE.rows(cell)]
    assert [row["model"] for row in rows] == ["drt", "window"] * (len(rows) // 2)
    assert all(row["base"] == "window" for row in rows)
    assert [row["protocol"] for row in rows] == [INFERENCE] * 8 + [TRAINING] * 2
    trained = rows[-1]
    assert (trained["length"], trained["texts"]) == (8, 2)
    monkeypatch.setattr(cost, "measure", None)
    assert measure_all() == found


def test_without_a_window_alone_the_first_is_the_base(tmp_path: Path) -> None:
    subjects = [subject_of(drt(), "drt"), subject_of(window_model(sliding_window=None), "full")]
    assert base_of(subjects) == 0
    settings = CostSettings(lengths=(9,), generate=2, rounds=1, tiers=("device",))
    [cell] = run(subjects, settings, Record(tmp_path, "cost", [s.identity() for s in subjects]))
    assert (cell["base"], cell["base_is_window_only"]) == ("drt", False)


@pytest.mark.slow
def test_what_has_nothing_to_offload_is_measured_once(tmp_path: Path) -> None:
    made = {"window": window_model, "drt": drt, "full": lambda: window_model(sliding_window=None)}
    subjects = [subject_of(make(), name) for name, make in made.items()]

    def problems(*tiers: str) -> list[list[str | None]]:
        settings = CostSettings(lengths=(9,), generate=2, rounds=1, tiers=tiers)
        cells = run(subjects, settings, Record(tmp_path, "cost", [s.identity() for s in subjects]))
        return [[row["problem"] for row in cell["rows"]] for cell in cells]

    nothing = [None, None, None]
    assert problems("device", "host") == [nothing, [None, None, cost.NOTHING_TO_OFFLOAD]]
    assert problems("host") == [nothing]


def test_ratios_are_of_the_rounds_and_of_the_device() -> None:
    def row(model: str, times: list[float] | None, held: int | None) -> dict[str, Any]:
        return {
            "model": model,
            "ms_per_token": None if times is None else spread(times),
            "device_bytes": held,
        }

    rows = [row("a", [1.0, 10.0, 2.0], 100), row("b", [2.0, 30.0, 5.0], 150), row("c", None, None)]
    a, b, c = ratios(rows, "a")
    assert (a["time_ratio"], a["memory_ratio"]) == (1.0, 1.0)
    assert (b["time_ratio"], b["time_ratio_quartiles"], b["memory_ratio"]) == (2.5, [2.25, 2.75], 1.5)
    assert c["time_ratio"] is c["time_ratio_quartiles"] is c["memory_ratio"] is None
    trained = [
        {"model": "a", "seconds": spread([2.0]), "peak_bytes": 10},
        {"model": "b", "seconds": spread([3.0]), "peak_bytes": None},
    ]
    assert [r["time_ratio"] for r in ratios(trained, "a")] == [1.0, 1.5]
    assert [r["memory_ratio"] for r in ratios(trained, "a")] == [1.0, None]


def test_each_model_is_compared_once(tmp_path: Path) -> None:
    twice = [subject_of(window_model(), "x/drt")] * 2
    for subjects, message in ((twice, "expected each once, got 'drt'"), ([], "expected at least one")):
        with pytest.raises(ValueError, match=f"models: {message}"):
            run(subjects, CostSettings(), Record(tmp_path, "cost", []))


def test_what_the_paper_printed() -> None:
    found = {(row["model"], row["prompt"], row["tier"]): row for row in TABLE_3}
    assert len(found) == len(TABLE_3) == 12
    assert found["DRT retrieval x1", "48K", "device"]["memory_ratio"] == 9.41
    assert found["Landmark Attn.", "16K", "host"]["time_ratio"] == 160.9
    table = {(row["model"], row["parameters"]): row for row in TABLE_4}
    assert len(table) == len(TABLE_4) == 24
    assert [row["model"] for row in TABLE_4 if row["tokens_per_second"] is None] == ["BRT"]
    assert table["DRT retrieval x1", "3B"]["memory_gb"] == 80


def test_what_the_paper_printed_stands_beside_its_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "measure", lambda cases, *rest: [case.row() for case in cases])
    monkeypatch.setattr(
        Text, "row", lambda self: {"model": self.name, "ms_per_token": None, "device_bytes": None}
    )
    monkeypatch.setattr(Step, "row", lambda self: {"model": self.name, "seconds": None, "peak_bytes": None})
    subjects = [subject_of(window_model())]
    settings = CostSettings(lengths=(16_384, 16_385), training_lengths=(4096, 100))
    cells = run(subjects, settings, Record(tmp_path, "cost", [s.identity() for s in subjects]))
    rows = [cell["published"] for cell in cells]
    assert [len(printed) for printed in rows] == [3, 3, 0, 0, 6, 0]
    assert {row["tier"] for row in rows[1]} == {"host"}
    assert {row["parameters"] for row in rows[4]} == {"3B"}


# --- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": ()}, "lengths, training_lengths: expected some"),
        ({"lengths": (1,)}, "lengths: expected 2 or more, got 1"),
        ({"training_lengths": (0,)}, "training_lengths: expected 2 or more, got 0"),
        ({"generate": 1}, "generate: expected 2 or more, got 1"),
        ({"rounds": 0}, "rounds: expected 1 or more, got 0"),
        ({"seed": -1}, "seed: expected 0 to 4294967295, got -1"),
        (
            {"tiers": ("device", "gpu")},
            "tiers: expected one of 'device', 'host', 'disk', 'tokens', got 'gpu'",
        ),
        ({"tiers": ()}, "tiers: expected at least one"),
        ({"memory_dtype": "int4"}, "memory_dtype: expected one of"),
        (
            {"memory_dtype": "int8", "tiers": ("device", "tokens")},
            "memory_dtype: expected float32, bfloat16 or float16 with memory_tier 'tokens'",
        ),
        (
            {"training_lengths": (64,), "training_batch_tokens": 100},
            "training_batch_tokens: expected whole texts of 64 tokens, got 100. 64 would be 1",
        ),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            CostSettings(lengths=(60,), generate=6),
            "lengths: expected at most 59 tokens for 'gpt2', which has 64",
        ),
        (CostSettings(lengths=(), training_lengths=(65,)), "training_lengths: expected at most 64 tokens"),
    ],
)
def test_a_prompt_that_a_model_has_no_positions_for(
    settings: CostSettings, message: str, tmp_path: Path
) -> None:
    record = Record(tmp_path, "cost", [{}])
    with pytest.raises(ValueError, match=message):
        run([subject_of(foreign(), "gpt2")], settings, record)
    assert record.results == []
