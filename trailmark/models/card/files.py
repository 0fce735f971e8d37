"""The model card's file: read what lies beside the weights, write README.md, and never over what a person wrote."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig

from trailmark import pretrained, untrusted
from trailmark.files import write_text
from trailmark.models.card.text import Json, model_card
from trailmark.trained import RECORD_FORMAT, RECORD_KIND, weights_sha256

logger = logging.getLogger(__name__)

README = "README.md"
UPLOAD = (  # what ``push_to_hub`` takes
    "repo_id", "tags", "private", "revision", "create_pr", "commit_message", "commit_description",
)  # fmt: skip
_BEGIN = (
    "<!-- Card made by trailmark from the files beside the weights. Edited, it is yours and never replaced."
)
_MARK = re.compile(
    rf"^{re.escape(_BEGIN)} weights:(\S+) trained:(known|changed|unknown) results:(\d+) sha256:\S+ -->\n",
    re.MULTILINE,
)


# --- what tells a model ----------------------------------------------------------------------------------------


def config_sha256(fields: Mapping[str, Any]) -> str:
    """Of a configuration's fields, but those that tell where a copy lies, what saved it and which tokens it was fed."""
    without = ("_name_or_path", "transformers_version", "tokenizer_fingerprint")
    own = {name: x for name, x in fields.items() if name not in without}
    return hashlib.sha256(json.dumps(own, sort_keys=True, default=str).encode()).hexdigest()


# --- what lies beside the weights ------------------------------------------------------------------------------


@dataclass
class Known:
    """What files say of a model."""

    run: dict[str, Any] | None = None
    history: dict[str, Any] | None = None
    versions: dict[str, Any] | None = None
    conversion: dict[str, Any] | None = None
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # on files that could not be read


def read_known(folder: Path) -> Known:
    """What made the model, trained it and measured it; what is damaged is a note."""
    known = Known()
    known.run = _read(folder / "run.yaml", known)
    known.history = _read(folder / "history.json", known)
    known.conversion = _read(folder / "conversion.json", known)
    for path in sorted(folder.glob("checkpoints/step-*/manifest.json"))[-1:]:
        about = (_read(path, known) or {}).get("about")
        if isinstance(about, dict):
            names = ("trailmark", "torch", "transformers", "python", "processes")
            known.versions = {name: about[name] for name in names if name in about} or None
    for path in sorted(folder.glob("evaluation/*.json")):
        content = _read(path, known)
        if content is None or content.get("kind") != RECORD_KIND:
            continue  # not of trailmark evaluate
        if content.get("format") != RECORD_FORMAT or not isinstance(content.get("results"), list):
            known.notes.append(f"Not shown: {path.name} (another format).")
        else:
            known.evaluations.append(content)
    return known


def _read(path: Path, known: Known) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        read = untrusted.read_yaml if path.suffix == ".yaml" else partial(untrusted.read_json, finite=False)
        content = read(path, "model", links=True)
        if not isinstance(content, dict):
            raise ValueError("no mapping")
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read (%s): the model card goes without it.", path, error)
        known.notes.append(f"Not shown: {path.name} (it cannot be read).")
        return None
    return content


def _why_not(record: Json, weights: str | None, config: Json) -> str | None:
    """Which other model results are of; None: of this one, or of this one with the fields that the record names."""
    model = record.get("model")
    models = [x for x in (model if isinstance(model, list) else [model]) if isinstance(x, dict)]
    if weights is None or all(x.get("weights_sha256") != weights for x in models):
        return "that other weights gave"
    if not isinstance(model, dict) or model.get("set"):
        return None
    return None if model.get("config_sha256") == config_sha256(config) else "of another configuration"


# --- a card that is ours, and unchanged ------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """What the comment in a card of ours says."""

    weights: str | None
    trained: str  # "known", "changed" (the weights, since), "unknown"
    results: int

    @property
    def knows(self) -> bool:
        return self.trained != "unknown" or self.results > 0


def marked(card: str, mark: Mark) -> str:
    """The card with the comment after its YAML, by which :func:`read_mark` knows it again."""
    end = card.find("\n---\n", 3) + len("\n---\n")
    said = f"weights:{mark.weights or 'none'} trained:{mark.trained} results:{mark.results}"
    digest = hashlib.sha256(f"{said}\n{card}".encode(errors="replace")).hexdigest()
    return f"{card[:end]}{_BEGIN} {said} sha256:{digest} -->\n{card[end:]}"


def read_mark(text: str) -> Mark | None:
    """Of a card that we made and nobody edited since; else None."""
    found = _MARK.search(text)
    if found is None:
        return None
    weights, trained, results = found.groups()
    mark = Mark(None if weights == "none" else weights, trained, int(results))
    return mark if marked(text[: found.start()] + text[found.end() :], mark) == text else None


def _read_text(path: Path) -> str | None:
    """The text; None: no file. What is not UTF-8 is read as something that is not ours."""
    try:
        untrusted.expect_regular(path, "model", links=True)
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None


def _tags(card: str | None) -> list[str]:
    if card is None:
        return []
    tags = ModelCard(card, ignore_metadata_errors=True).data.to_dict().get("tags")
    return tags if isinstance(tags, list) else []


# --- a call of save_pretrained ---------------------------------------------------------------------------------


class Saving:
    """The card of one ``save_pretrained`` or ``push_to_hub``: made before it begins, for what may be written over.

    What a person wrote into README.md stays, there and on the hub. A training and results are shown where the model
    was loaded from their folder, results only if the weights are still the same, byte for byte.

    Args:
        name_or_path: where the model was loaded from. folder: where it will be saved; None: nowhere but on the hub.
    """

    def __init__(
        self, name_or_path: str, config: PreTrainedConfig, parameters: int, folder: Path | None = None
    ) -> None:
        self.config, self.parameters, self.folder = config, parameters, folder
        origin = Path(name_or_path) if name_or_path and Path(name_or_path).is_dir() else None
        self.known = Known() if origin is None else read_known(origin)
        self.origin_weights = None
        if origin is not None:
            try:
                self.origin_weights = weights_sha256(origin)
            except (OSError, ValueError) as error:
                logger.warning(
                    "The weights of %s cannot be read (%s): no result is shown of them.", origin, error
                )

    def text(self, weights: str | None, name: str, tags: Sequence[str] = ()) -> str:
        """The card of the weights that were saved."""
        changed = weights is None or weights != self.origin_weights
        return _make(self.config.to_dict(), self.parameters, self.known, weights, changed, name, tags)

    def write(self) -> None:
        """README.md in the folder, unless there is one of somebody else's."""
        if self.folder is None or not self.folder.is_dir():  # transformers said why
            return
        path = self.folder / README
        with _warned_of(path):
            if not _stays(path, _read_text(path)):
                write_text(path, self.text(weights_sha256(self.folder), _name(self.folder)))

    def upload(
        self,
        save: Callable[[Path], None],
        repo_id: str,
        *,
        tags: Sequence[str] | None = None,
        token: bool | str | None = None,
        private: bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        commit_message: str | None = None,
        commit_description: str | None = None,
    ) -> Any:
        """Send what ``save`` puts into a folder to the hub, with the card.

        A card that is there stays if a person wrote or edited it, or if it knows more of the same weights.
        """
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
        there = _read_hub(repo_id, token)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            save(folder)
            own = self._for_hub(folder, repo_id, [*(tags or ()), *_tags(there)])
            if _is_theirs(there):
                logger.warning("README.md of %s was not written by trailmark, or edited: it stays.", repo_id)
            elif not _knows_more(there, own):
                (folder / README).write_bytes(own)
            if revision is not None and not revision.startswith("refs/pr") and not create_pr:
                api.create_branch(repo_id, branch=revision, token=token, exist_ok=True)
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            return api.create_commit(
                repo_id,
                [CommitOperationAdd(path.relative_to(folder).as_posix(), path) for path in files],
                commit_message=commit_message or "Upload model",
                commit_description=commit_description,
                token=token,
                revision=revision,
                create_pr=create_pr,
            )

    def _for_hub(self, folder: Path, repo_id: str, tags: Sequence[str]) -> bytes:
        """What a person wrote into the folder that is saved to, else the card of the weights in ``folder``."""
        if self.folder is not None and _is_theirs(_read_text(self.folder / README)):
            return (self.folder / README).read_bytes()
        return self.text(weights_sha256(folder), repo_id, list(dict.fromkeys(tags))).encode()


def _is_theirs(text: str | None) -> bool:
    """Whether a person wrote or edited a card."""
    return text is not None and read_mark(text) is None


def _knows_more(there: str | None, own: bytes) -> bool:
    """Whether the hub's card of the same weights says what ours cannot: no files lie beside weights from the hub."""
    mark, mine = read_mark(there or ""), read_mark(own.decode(errors="replace"))
    if mark is None or mine is None:
        return False
    return mark.knows and not mine.knows and mark.weights == mine.weights


def _read_hub(repo_id: str, token: bool | str | None) -> str | None:
    try:
        return _read_text(Path(hf_hub_download(repo_id, README, token=token)))
    except EntryNotFoundError:
        return None


def _make(
    config: Json,
    parameters: int,
    known: Known,
    weights: str | None,
    changed: bool,
    name: str,
    tags: Sequence[str] = (),
) -> str:
    evaluations, notes = [], list(known.notes)
    for record in [] if changed else known.evaluations:
        if why := _why_not(record, weights, config):
            notes.append(f"Not shown: results of {record.get('suite')} {why}.")
        else:
            evaluations.append(record)
    trained = "unknown" if not known.run and not known.history else "changed" if changed else "known"
    text = model_card(
        config,
        parameters,
        known.run,
        known.history,
        evaluations,
        name=name,
        tags=tags,
        versions=known.versions,
        changed_since=trained == "changed",
        notes=notes,
        conversion=known.conversion,
    )
    return marked(text, Mark(weights, trained, sum(len(r["results"]) for r in evaluations)))


def _name(folder: Path) -> str:
    return folder.resolve().name or "model"


def refresh_card(folder: Path, history: dict[str, Any] | None = None) -> bool:
    """Make README.md of a model folder anew from what lies there now, as after an evaluation.

    Where there is none, one is written only for a finished training run; one that was edited stays. A training or an
    evaluation does not fail for its card: where none can be made, a warning says why.

    Args:
        history: of a training that is about to write it: history.json, which says that a run is whole, comes last.

    Returns:
        Whether it was written.
    """
    path = folder / README
    with _warned_of(path):
        text = _read_text(path)
        finished = (folder / "run.yaml").is_file() and (
            history is not None or (folder / "history.json").is_file()
        )
        wanted = (folder / "config.json").is_file() and (text is not None or finished)
        if not wanted or _stays(path, text):
            return False
        known, mark, weights = read_known(folder), read_mark(text or ""), weights_sha256(folder)
        known.history = known.history if history is None else history
        if mark is not None and mark.trained == "unknown":
            known.run = known.history = known.versions = None
        changed = mark is not None and mark.trained == "changed" and mark.weights == weights
        fields, parameters = pretrained.load_config(folder, "model").to_dict(), _count_parameters(folder)
        write_text(path, _make(fields, parameters, known, weights, changed, _name(folder), _tags(text)))
        return True
    return False


@contextmanager
def _warned_of(path: Path) -> Iterator[None]:
    """Where no card can be made a warning says why, whatever lies there: it is not worth the work that is done."""
    try:
        yield
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        logger.warning("The model card %s cannot be written (%s); all else is saved.", path, why)


def _stays(path: Path, text: str | None) -> bool:
    """Whether a card on the disk is a person's, which is said."""
    if _is_theirs(text):
        logger.info("%s was not written by trailmark, or edited: it stays.", path)
    return _is_theirs(text)


def _count_parameters(folder: Path) -> int:
    """From the headers alone: a tied matrix is saved once, and no model here saves anything else."""
    count = 0
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"model: cannot read {str(path)!r}: {error}. Save or download the model again."
            ) from error
    return count
