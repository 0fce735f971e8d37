"""lm-eval's tasks asked of our models: its own numbers, in a constant window, and nothing cut."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.evaluation.in_memory import InMemory
from tests.models.tiny import drt, hils, hsa, landmark, tokens, window_model
from tests.training.tiny import prose, write_run
from trailmark.byte_tokenizer import ByteTokenizer
from trailmark.evaluation.harness import model as module
from trailmark.evaluation.harness import ruler
from trailmark.evaluation.harness.model import Reads
from trailmark.evaluation.harness.run import quiet, run
from trailmark.evaluation.harness.suite import HarnessSettings
from trailmark.evaluation.subject import Subject
from trailmark.files import read_json

pytestmark = pytest.mark.usefixtures("one_thread", "no_restart")
Command = Callable[..., tuple[int, str, str]]
BYTES = ByteTokenizer()


@pytest.fixture(autouse=True)
def silent() -> None:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


def words() -> PreTrainedTokenizerFast:
    """A token for each word: texts of a thousand tokens are long enough for every task."""
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "the": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    )


def subject(make: Callable[..., Any] = drt, tokenizer: Any = BYTES, **changes: Any) -> Subject:
    return Subject.of(make(vocab_size=len(tokenizer), **changes), tokenizer, 4)


def asked(kind: str, *arguments: Any) -> list[Instance]:
    return [Instance(kind, {}, given, n) for n, given in enumerate(arguments)]  # type: ignore[arg-type]


PAIRS = [
    ("A question is", " answered"),
    ("A question is", " here"),
    ("Another", " one, much longer"),
    ("", "none"),
]


# Without landmarks: what transformers says


def test_log_likelihoods_are_those_of_one_forward() -> None:
    full = subject(window_model, sliding_window=None)
    with quiet():
        theirs = HFLM(pretrained=full.model, tokenizer=BYTES, backend="causal", max_length=4096)
        ours = Reads(full)
        for kind, given in (("loglikelihood", PAIRS), ("loglikelihood_rolling", [("a text " * 40,), ("b",)])):
            found, exact = (getattr(x, kind)(asked(kind, *given)) for x in (ours, theirs))
            for one, other in zip(found, exact, strict=True):
                assert one == pytest.approx(other, rel=1e-12)


def test_continuations_are_those_of_generate() -> None:
    full = subject(window_model, sliding_window=None)
    prompts = [
        ("What is this", {"until": ["q"], "max_gen_toks": 9}),
        ("A much longer one", {"max_gen_toks": 9}),
        ("a", {"max_gen_toks": 8}),  # a batch of its own
    ]
    with quiet():
        theirs = HFLM(pretrained=full.model, tokenizer=BYTES, backend="causal", max_length=4096, batch_size=2)
        exact = theirs.generate_until(asked("generate_until", *prompts))
        assert Reads(full, 2).generate_until(asked("generate_until", *prompts)) == exact


# With retrieval: in any pieces, and no prompt is too long


@pytest.mark.parametrize("make", [drt, hsa, landmark])
def test_how_a_text_is_split_changes_nothing(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with quiet():
        reads = Reads(subject(make))
        text = (prose(3)[:140],)  # nothing in it twice: rounding may decide between equals
        whole = reads.loglikelihood(asked("loglikelihood", *PAIRS))
        rolling = reads.loglikelihood_rolling(asked("loglikelihood_rolling", text))
        monkeypatch.setattr(type(reads.model), "reading_piece", lambda self, length: 4)
        in_pieces = reads.loglikelihood(asked("loglikelihood", *PAIRS))
        assert [x for x, _ in in_pieces] == pytest.approx([x for x, _ in whole], rel=1e-10)
        again = reads.loglikelihood_rolling(asked("loglikelihood_rolling", text))
        assert again == pytest.approx(rolling, rel=1e-10)


def test_a_context_is_a_prompt_and_no_text_that_is_read() -> None:
    """Where a model reads a text otherwise than it predicts one."""
    pairs = [(prose(3)[:140], " answered"), *PAIRS]
    prompts = [(prose(3)[:140], {"max_gen_toks": 9})]
    with quiet():
        found = []
        for reading in ("chooses", "windows"):
            reads = Reads(subject(hils, reading=reading, num_retrieved_chunks=2))
            likely = reads.loglikelihood(asked("loglikelihood", *pairs))
            found.append((likely, reads.generate_until(asked("generate_until", *prompts))))
    assert [x for x, _ in found[0][0]] == pytest.approx([x for x, _ in found[1][0]], rel=1e-10)
    assert found[0][1] == found[1][1]


def test_a_prompt_ends_with_a_landmark() -> None:
    own = subject()
    ids = tokens(21, vocab=200)
    wanted = [5, 7, 9]
    ((found, _),) = Reads(own)._loglikelihood_tokens([(("", ""), ids[0].tolist(), wanted)])
    cache, logp = own.model.new_cache(), 0.0
    with torch.no_grad():
        logits = own.model(ids, past_key_values=cache, close_chunk=True).logits[0, -1]
        for token in wanted:
            logp += float(logits.log_softmax(-1)[token])
            logits = own.model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1]
    assert found == pytest.approx(logp, rel=1e-10)


def test_a_long_prompt_is_read_and_not_cut() -> None:
    """lm-eval takes 2,048 tokens where nothing says how many there may be."""
    own = subject()
    with quiet():
        reads = Reads(own)
        assert reads.max_length == module.ENDLESS
        seen: list[int] = []
        read = type(own.model).read

        def counted(self: Any, ids: torch.Tensor, *rest: Any, **more: Any) -> Any:
            seen.append(ids.shape[1])
            return read(self, ids, *rest, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(own.model), "read", counted)
            reads.generate_until(asked("generate_until", ("a" * 3000, {"max_gen_toks": 1})))
    assert seen == [2999]


# RULER


@pytest.mark.slow
@pytest.mark.parametrize("task", ruler.MADE)
def test_a_task_that_makes_its_texts_makes_as_many_as_are_asked(task: str) -> None:
    own, kept, said = subject(tokenizer=words()), InMemory(), list[str]()
    length = 2000 if task == "ruler_cwe" else 1200
    settings = HarnessSettings(tasks=(task,), lengths=(length,), limit=2)
    (found,) = run(own, settings, kept, said.append)  # type: ignore[arg-type]
    assert found["texts"] == len(kept.written) == 2
    assert 0 <= found["metrics"]["score"]["score"] <= 1
    assert [line for line in said if line.startswith(task)][-2:] == [f"{task}: text 1", f"{task}: text 2"]


@pytest.mark.slow
def test_what_is_answered_counts() -> None:
    """A model that is told the answers has all points: scores are of texts as they were asked."""
    own, kept = subject(tokenizer=words()), InMemory()
    settings = HarnessSettings(tasks=("ruler_fwe",), lengths=(300,), limit=3)
    wanted: list[str] = []

    def right(self: Reads, requests: list[Instance], **_: Any) -> list[str]:
        wanted.extend(", ".join(request.doc["outputs"]) for request in requests)
        return [f"it is {' '.join(request.doc['outputs'])}" for request in requests[:2]] + ["no"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reads, "generate_until", right)
        (found,) = run(own, settings, kept)  # type: ignore[arg-type]
    assert found["metrics"]["score"]["score"] == pytest.approx(2 / 3)
    assert [line["wanted"] for line in kept.written] == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "length", "tokenizer", "message"),
    [
        ("ruler_vt", 4000, BYTES, "^tasks: ruler_vt .*at most 500 tokens"),
        ("ruler_vt", 600, words(), "^lengths: expected at least .* for ruler_vt"),
        ("ruler_cwe", 400, words(), "^lengths: expected at least .* for ruler_cwe"),
        ("ruler_fwe", 60, words(), "^lengths: expected at least .* for ruler_fwe"),
    ],
)
def test_lengths_at_which_lm_eval_would_never_end_are_refused(
    task: str, length: int, tokenizer: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(subject(tokenizer=tokenizer), HarnessSettings(tasks=(task,), lengths=(length,)), InMemory())  # type: ignore[arg-type]


def test_a_tokenizer_is_saved_without_code(tmp_path: Path) -> None:
    tokenizer = words()
    tokenizer.init_kwargs["auto_map"] = {"AutoTokenizer": ["code.Tokenizer", None]}
    config = read_json(Path(ruler.saved_tokenizer(tokenizer, tmp_path)) / "tokenizer_config.json")
    assert "auto_map" not in config


# The command


@pytest.mark.slow
def test_the_command_measures_once_and_shows_it(tmp_path: Path, command: Command) -> None:
    assert command("train", write_run(tmp_path, steps=1))[0] == 0
    words = ("evaluate", tmp_path / "run", "--suite", "lm-eval", "--tasks", "ruler_fwe", "--limit", "1")
    code, out, err = command(*words, "--lengths", "1200")
    assert code == 0, err
    assert "ruler_fwe" in out
    record = read_json(tmp_path / "run" / "evaluation" / "lm-eval.json")
    assert command(*words, "--lengths", "1200")[0] == 0
    assert read_json(tmp_path / "run" / "evaluation" / "lm-eval.json") == record
    assert command("report", tmp_path / "run", "-o", tmp_path / "report.html")[0] == 0
    assert "ruler_fwe" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_a_name_that_is_not_known_is_told_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"^tasks: .*'niah_singel_1'.*niah_single_1"):
        run(subject(), HarnessSettings(tasks=("niah_singel_1",)), InMemory())  # type: ignore[arg-type]


def test_what_is_wrong_is_said_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^tasks: .* got none"):
        HarnessSettings()
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(ValueError, match=r"lm-eval is not installed. pip install 'trailmark\[lm-eval\]'"):
        run(subject(), HarnessSettings(tasks=("niah_single_1",)), InMemory())  # type: ignore[arg-type]
