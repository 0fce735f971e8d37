"""The engine: jobs that are decoded together, each as it is alone."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.models.landmark.test_reading import CAUSAL
from tests.models.tiny import block_recurrent, drt, hils, hsa, landmark, logits_of, rpt, tokens, window_model
from trailmark.memory import ChunkCache
from trailmark.models import TrailmarkForCausalLM
from trailmark.server.engine import Answer, Busy, Engine, Job, Retrieved, Sampling, Token

pytestmark = pytest.mark.usefixtures("one_thread")
S, READ = 4, 90
GREEDY = Sampling(9, 0.0)


@pytest.fixture(scope="module")
def model() -> TrailmarkForCausalLM:
    return drt(2, logit_scale=0.3)


@pytest.fixture(scope="module")
def memory(model: TrailmarkForCausalLM) -> ChunkCache:
    return model.read(tokens(READ))


@pytest.fixture
def engine(model: TrailmarkForCausalLM) -> Iterator[Engine]:
    engine = Engine(model, max_rows=4, max_waiting=6, prefill_tokens=8)
    yield engine
    engine.close()


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(tokens(length, seed=100 + seed)[0].tolist())


async def all_of(answer: Answer) -> list[Token]:
    return [token async for token in answer]


def run(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """What they give, or the exceptions that they end with, run together."""

    async def together() -> list[Any]:
        return await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), 60)

    return asyncio.run(together())


def answered(engine: Engine, *jobs: Job) -> list[list[Token]]:
    return run(*(all_of(engine.submit(job)) for job in jobs))


def numbers(answer: Sequence[Token], number: int = 0) -> list[int]:
    return [token.token for token in answer if token.answer == number]


def alone(model: TrailmarkForCausalLM, job: Job, cache: ChunkCache | None, focus: bool = True) -> list[int]:
    """By ``generate``, greedily; ``focus``: on what the prompt looks at."""
    ids = torch.tensor([job.prompt])
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "past_key_values": cache}
    if cache is not None and focus:
        model.focus(ids, cache)
    count = job.sampling.max_tokens
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, **options
    )
    return out[0, ids.shape[1] :].tolist()


# --- together as alone -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made",
    [
        lambda: drt(2),
        lambda: drt(2, landmarks_as_keys=False, num_sinks=3),
        window_model,
        rpt,
        block_recurrent,
        lambda: landmark(**CAUSAL[2]),
        hils,
        lambda: hils(reading="windows", num_focus_chunks=1),
        lambda: hils(reading="windows"),
        lambda: hsa(num_sinks=2),
    ],
    ids=[
        "drt",
        "hidden",
        "window",
        "rpt",
        "block-recurrent",
        "landmark",
        "hils",
        "hils, focus",
        "hils, windows",
        "hsa",
    ],
)
@pytest.mark.sampled(7)
def test_jobs_of_any_lengths_are_answered_as_generate_does(made: Any) -> None:
    model = made()
    memory, engine = model.read(tokens(READ)), Engine(model, max_rows=3, prefill_tokens=8)
    lengths, wanted = [1, 30, 4, 17, 2, 9], [5, 1, 12, 7, 9, 9]
    jobs = [
        Job(prompt(n, b), memory.branch() if b % 3 else None, Sampling(count, 0.0))
        for b, (n, count) in enumerate(zip(lengths, wanted, strict=True))
    ]

    async def asked(job: Job) -> list[Token]:
        if job.cache is not None:
            await engine.focus(job.cache, job.prompt)
        return await all_of(engine.submit(job))

    found = run(*map(asked, jobs))
    engine.close()
    for b, (job, answer) in enumerate(zip(jobs, found, strict=True)):
        assert numbers(answer) == alone(model, job, memory.branch() if b % 3 else None)
        assert [token.finish for token in answer] == [None] * (wanted[b] - 1) + ["length"]
    assert memory.num_tokens.tolist() == [READ]


def test_log_probabilities_are_the_models(
    engine: Engine, model: TrailmarkForCausalLM, memory: ChunkCache
) -> None:
    job = Job(prompt(11), memory.branch(), Sampling(6, 0.7, 0.8, seed=3, top_logprobs=4))
    (answer,) = answered(engine, job)
    text = torch.tensor([[*tokens(READ)[0].tolist(), *job.prompt, *numbers(answer)]])
    marks = torch.zeros_like(text, dtype=torch.bool)
    marks[0, READ + 10] = True
    logs = logits_of(model, text, close_chunk=marks)[0, READ + 10 : -1].log_softmax(-1)
    for token, exact in zip(answer, logs, strict=True):
        assert token.logprob == pytest.approx(exact[token.token].item(), abs=1e-9)
        best = exact.topk(4)
        assert [number for number, _ in token.top] == best.indices.tolist()
        assert [log for _, log in token.top] == pytest.approx(best.values.tolist(), abs=1e-9)


def test_a_landmark_may_stand_inside_a_prompt_or_nowhere(
    engine: Engine, model: TrailmarkForCausalLM, memory: ChunkCache
) -> None:
    places = [0, 3, 9, 20]
    asked = prompt(20)
    jobs = [Job(asked, memory.branch(), GREEDY, landmark=place) for place in places]
    for place, answer in zip(places, answered(engine, *jobs), strict=True):
        cache = memory.branch()
        marks = torch.zeros(1, 20, dtype=torch.bool)
        marks[0, place - 1 : place] = True
        best = logits_of(model, torch.tensor([asked]), past_key_values=cache, close_chunk=marks)[
            0, -1
        ].argmax()
        assert numbers(answer)[0] == best
        again = Job((int(best),), cache, Sampling(8, 0.0), landmark=0)
        assert numbers(answered(engine, again)[0]) == numbers(answer)[1:]


def test_a_question_gives_a_cache_its_focus(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for its turn as jobs do, counts among those that may wait, and is not looked with once it is left."""
    model, words, looked = hils(reading="windows", num_focus_chunks=1), prompt(4, 1), []
    memory, focus, go_on = model.read(tokens(READ)), model.focus, threading.Event()

    def watched(ids: torch.Tensor, cache: ChunkCache) -> None:
        looked.append(tuple(ids[0].tolist()))
        go_on.wait(60)
        focus(ids, cache)

    monkeypatch.setattr(model, "focus", watched)
    engine = Engine(model, max_rows=2, max_waiting=2, prefill_tokens=8)
    caches = [memory.branch() for _ in range(3)]

    async def together() -> None:
        first = asyncio.create_task(engine.focus(caches[0], words))
        left = asyncio.create_task(engine.focus(caches[1], words[:2]))
        while not looked:
            await asyncio.sleep(0.01)
        with pytest.raises(Busy):
            await engine.focus(caches[2], words)
        with pytest.raises(Busy):
            engine.submit(Job(words, caches[2], GREEDY))
        left.cancel()
        await asyncio.sleep(0)
        go_on.set()
        await first
        with pytest.raises(asyncio.CancelledError):
            await left

    asyncio.run(together())
    assert looked == [words]
    expected = memory.branch()
    focus(torch.tensor([words]), expected)
    assert expected.state is not None
    assert caches[0].state is not None
    assert caches[1].state is not None
    (found_here,), (found_there,) = caches[0].state.focus, expected.state.focus
    assert found_here is not None
    assert found_there is not None
    assert found_here.chunks.tolist() == found_there.chunks.tolist()
    assert not caches[1].state.focus
    job = Job(prompt(9), caches[0], GREEDY)
    (found,) = answered(engine, job)
    with pytest.raises(ValueError, match="tokens: expected at least one"):
        asyncio.run(engine.focus(caches[2], ()))
    engine.close()
    assert numbers(found) == alone(model, job, expected, focus=False)


def test_a_seed_draws_the_same_whoever_is_beside(engine: Engine, memory: ChunkCache) -> None:
    def job(seed: int) -> Job:
        return Job(prompt(5, seed), memory.branch(), Sampling(12, 1.3, 0.9, seed=seed))

    together = answered(engine, *map(job, range(6)))
    for seed in range(6):
        (by_itself,) = answered(engine, job(seed))
        assert numbers(together[seed]) == numbers(by_itself)
    (other,) = answered(engine, Job(prompt(5, 0), memory.branch(), Sampling(12, 1.3, 0.9, seed=99)))
    assert numbers(other) != numbers(together[0])


def test_several_answers_read_the_prompt_once(
    engine: Engine, model: TrailmarkForCausalLM, memory: ChunkCache
) -> None:
    job = Job(prompt(21), memory.branch(), Sampling(7, 1.0, seed=5), n=3)
    answer = engine.submit(job)
    (found,) = run(all_of(answer))
    assert engine.stats()["tokens_read"] == 21
    for number in range(3):
        one = Job(prompt(21), memory.branch(), Sampling(7, 1.0, seed=5 + number))
        assert numbers(found, number) == numbers(answered(engine, one)[0])


def test_what_was_read_is_told_with_its_place(
    engine: Engine, model: TrailmarkForCausalLM, memory: ChunkCache
) -> None:
    asked = prompt(6)
    (answer,) = answered(engine, Job(asked, memory.branch(), GREEDY))
    cache = memory.branch()
    out = model(
        torch.tensor([asked]),
        past_key_values=cache,
        close_chunk=True,
        logits_to_keep=1,
        output_retrieval=True,
    )
    # the prompt's first tokens fill the chunk that the memory left open; its last one reads what that selected
    first = [(read.group, read.chunk) for read in answer[0].retrieved]
    assert first == [(g, m) for g, chosen in enumerate(out.retrieval) for m in chosen.indices[0, 0].tolist()]
    told = answer[1].retrieved
    for group, chosen in enumerate(out.retrieval):
        mine = [read for read in told if read.group == group]
        assert [read.chunk for read in mine] == chosen.indices[0, -1].tolist()
        assert [read.weight for read in mine] == pytest.approx(chosen.weights[0, -1].tolist(), abs=1e-10)
    assert all(isinstance(read, Retrieved) for read in told)
    # chunks of 4 tokens, but for 22: what the memory left open and the prompt filled, and 23: its rest
    assert all(
        read.positions == ((4 * read.chunk, 4 * read.chunk + 4) if read.chunk < 24 else (96, 96))
        for read in told
    )
    # the next chunk is read with what the end of this one selected
    assert answer[4].retrieved == told
    assert answer[6].retrieved != told


# --- coming and going ------------------------------------------------------------------------------------


def test_it_stops_where_it_is_asked_to(engine: Engine, memory: ChunkCache) -> None:
    asked: list[tuple[int, int]] = []

    def ends(answer: int, token: int) -> bool:
        asked.append((answer, token))
        return len(asked) == 4

    long = Job(prompt(4), memory.branch(), Sampling(12, 0.0))
    stopped = Job(prompt(4), memory.branch(), Sampling(12, 0.0), ends=ends)
    whole, part = answered(engine, long, stopped)
    assert numbers(part) == numbers(whole)[:4]
    assert part[-1].finish == "stop"
    assert asked == [(0, token) for token in numbers(part)]


def test_a_queue_that_is_full_is_told(engine: Engine, memory: ChunkCache) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def ends(answer: int, token: int) -> bool:
        begun.set()
        return not go_on.wait(60)

    first = engine.submit(Job(prompt(2), memory.branch(), GREEDY, n=4, ends=ends))
    begun.wait(60)
    waiting = [engine.submit(Job(prompt(2), memory.branch(), GREEDY)) for _ in range(6)]
    with pytest.raises(Busy, match="6 jobs wait"):
        engine.submit(Job(prompt(2), None, GREEDY))
    assert engine.stats()["waiting"] == 6
    late = time.monotonic() - 1
    waiting[2].cancel()
    go_on.set()
    found = run(*map(all_of, [first, *waiting]))
    assert [len(answer) for answer in found] == [36, 9, 9, 0, 9, 9, 9]
    assert engine.stats()["cancelled"] == 1
    (over,) = answered(engine, Job(prompt(2), None, GREEDY, deadline=late))
    assert isinstance(over, TimeoutError)


def test_a_cancelled_answer_ends_and_a_deadline_too(engine: Engine, memory: ChunkCache) -> None:
    async def cancelled(answer: Answer) -> list[Token]:
        found = []
        async for token in answer:
            found.append(token)
            if len(found) == 3:
                answer.cancel()
        return found

    job = Job(prompt(5), memory.branch(), Sampling(100_000, 0.0))
    late = Job(prompt(5), memory.branch(), Sampling(100_000, 0.0), deadline=time.monotonic() + 0.3)
    beside = Job(prompt(7), memory.branch(), Sampling(30, 0.0))
    answer = engine.submit(job)
    found, over, whole = run(cancelled(answer), all_of(engine.submit(late)), all_of(engine.submit(beside)))
    assert found[-1].finish == "cancelled"
    assert 3 < len(found) < 100_000
    assert over[-1].finish == "deadline"
    assert len(whole) == 30
    assert engine.stats()["rows"] == 0


def test_one_rows_trouble_is_its_own(model: TrailmarkForCausalLM, memory: ChunkCache, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    cache = model.new_cache(memory_tier="disk", memory_folder=folder)
    model.read(tokens(33), cache)
    shutil.rmtree(folder)  # found as the first chunk closes that is made while it is decoded

    def raises(answer: int, token: int) -> bool:
        raise KeyError(token)

    sampling = Sampling(20, 0.0)
    jobs = [
        Job(prompt(9), memory.branch(), sampling),
        Job(prompt(2), cache, sampling, landmark=0),
        Job(prompt(9, 1), memory.branch(), sampling, ends=raises),
        Job(prompt(3), memory, sampling, n=1, landmark=0)
        if False
        else Job(prompt(9, 2), None, sampling, n=1),
        Job(prompt(3), drt(1).read(tokens(8)), sampling),
    ]
    engine = Engine(model, max_rows=5, prefill_tokens=1024)  # all begin together
    found = answered(engine, *jobs)
    engine.close()
    assert numbers(found[0]) == alone(model, jobs[0], memory.branch())
    assert numbers(found[3]) == alone(model, jobs[3], None)
    assert isinstance(found[1], ValueError)
    assert str(found[1]).startswith("memory_folder: expected the folder")
    assert isinstance(found[2], KeyError)
    assert isinstance(found[4], ValueError)
    assert str(found[4]).startswith("past_key_values: expected a cache of this model")
    assert engine.stats()["failed"] == 3


def test_logits_that_are_no_numbers_end_their_row(memory: ChunkCache) -> None:
    model = drt(2, logit_scale=0.3)
    with torch.no_grad():
        model.embed_tokens.weight[7] = torch.nan  # read by who asks with it
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.nan_to_num())
    engine = Engine(model)
    good, bad = answered(engine, Job((1, 2, 3), None, GREEDY), Job((1, 7), None, GREEDY))
    engine.close()
    assert len(good) == 9
    assert isinstance(bad, ValueError)
    assert str(bad).startswith("model: expected finite logits")


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (Job((), None, GREEDY), "prompt: expected at least one token, got none"),
        (Job((1, 50), None, GREEDY), "prompt: expected tokens from 0 to 49, got 50"),
        (Job((1,), None, GREEDY, n=5), "n: expected 1 to 4 answers"),
        (Job((1,), None, GREEDY, landmark=2), "landmark: expected 0 to 1 tokens of the prompt, got 2"),
    ],
)
def test_jobs_that_cannot_be_are_refused(engine: Engine, job: Job, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        engine.submit(job)


# --- reading beside decoding -----------------------------------------------------------------------------


def after_each_piece(engine: Engine, then: Callable[[int], None]) -> None:
    """Call with the tokens that were read once a piece of a text was."""
    read_on = engine._read_on

    def told(item: Any) -> bool:
        goes_on = read_on(item)
        then(item.done)
        return goes_on

    engine._read_on = told  # type: ignore[method-assign]


def test_a_text_is_read_between_the_steps_of_others(
    engine: Engine, model: TrailmarkForCausalLM, memory: ChunkCache
) -> None:
    heard: list[tuple[int, int]] = []
    text, cache = tokens(200, seed=8), model.new_cache()
    after_each_piece(engine, lambda done: heard.append((done, engine.stats()["tokens_made"])))

    async def reading() -> None:
        await engine.read(cache, text[0].tolist())

    job = Job(prompt(3), memory.branch(), Sampling(40, 0.0))
    long = Job(prompt(120), memory.branch(), GREEDY)  # and a long prompt is read in turns with it
    answer, late, _ = run(all_of(engine.submit(job)), all_of(engine.submit(long)), reading())
    assert numbers(answer) == alone(model, job, memory.branch())
    assert numbers(late) == alone(model, long, memory.branch())
    assert [n for n, *_ in heard] == list(range(8, 201, 8))
    assert heard[-1][1] - heard[0][1] >= 20  # tokens were made meanwhile
    exact = logits_of(model, torch.cat([text, tokens(5)], 1))[:, 200:]
    assert (logits_of(model, tokens(5), past_key_values=cache) - exact).abs().max() < 1e-10


def test_who_stops_reading_finds_whole_pieces(engine: Engine, model: TrailmarkForCausalLM) -> None:
    cache, text = model.new_cache(), tokens(100_000, seed=8)[0].tolist()
    begun = threading.Event()
    after_each_piece(engine, lambda done: begun.set())

    async def stopped() -> None:
        task = asyncio.create_task(engine.read(cache, text))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        await task

    (cancelled,) = run(stopped())
    assert isinstance(cancelled, asyncio.CancelledError)
    read = cache.get_seq_length()
    assert 0 < read < 100_000
    assert read % 8 == 0
    time.sleep(0.05)
    assert cache.get_seq_length() == read
    (wrong,) = run(engine.read(cache, [50]))
    assert str(wrong).startswith("tokens: expected tokens from 0 to 49, got 50")


def test_closing_ends_everything(model: TrailmarkForCausalLM, memory: ChunkCache) -> None:
    engine = Engine(model, max_rows=1)
    answers = [engine.submit(Job(prompt(2), memory.branch(), Sampling(100_000))) for _ in range(2)]

    async def closed() -> None:
        async for _ in answers[0]:
            await asyncio.to_thread(engine.close)

    _, rest, reading = run(closed(), all_of(answers[1]), engine.read(model.new_cache(), [1] * 10_000_000))
    assert rest == []
    assert isinstance(reading, RuntimeError)
    with pytest.raises(RuntimeError, match="this one was closed"):
        engine.submit(Job((1,), None, GREEDY))


def test_memory_stays_flat(engine: Engine, memory: ChunkCache) -> None:
    def some() -> None:
        answered(engine, *(Job(prompt(5, n), memory.branch(), Sampling(6 + n % 3, 0.0)) for n in range(6)))

    some()
    before, threads = psutil.Process().memory_info().rss, threading.active_count()
    for _ in range(3):
        some()
    assert psutil.Process().memory_info().rss < 1.02 * before
    assert threading.active_count() == threads
