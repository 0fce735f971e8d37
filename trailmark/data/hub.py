"""Documents out of datasets of the Hugging Face hub, pinned to a commit."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from trailmark import network
from trailmark.data.sources import (
    LocalFiles,
    Row,
    Source,
    Where,
    condition_text,
    expect_columns,
    import_extra,
    needed_columns,
    row_texts,
)
from trailmark.untrusted import first_line

logger = logging.getLogger(__name__)


class HubDataset(Source):
    """A dataset of the Hugging Face hub by name, or a folder that the ``datasets`` package can load.

    Args:
        name: "owner/name", or a folder.
        config, split, revision: as ``datasets.load_dataset`` takes them; the revision is pinned to a commit.
        streaming: read over the network as it comes, without a copy on this machine.

    Raises:
        ValueError: the package is missing, or the dataset cannot be loaded.
    """

    def __init__(
        self,
        name: str,
        column: str = "text",
        config: str | None = None,
        split: str = "train",
        revision: str | None = None,
        streaming: bool = False,
        summary_column: str | None = None,
        where: Where | None = None,
    ) -> None:
        self.name, self.column, self.config, self.split = name, column, config, split
        self.summary_column, self.where, self.streaming = summary_column, where, streaming
        self._package = import_extra("datasets")
        self.revision = None if Path(name).is_dir() else pinned_revision(name, revision)

    @cached_property
    def _dataset(self) -> Any:
        if not Path(self.name).is_dir() and not network.is_offline() and network.unreachable():
            raise ValueError(
                f"source: cannot load {self._shown}: {network.no_hub()} Prepare it where there is a network; what was "
                "downloaded to this machine before is found when HF_HUB_OFFLINE=1 is set."
            )
        try:
            return self._package.load_dataset(
                self.name, self.config, split=self.split, revision=self.revision, streaming=self.streaming
            )
        except (OSError, ValueError, RuntimeError, self._package.exceptions.DatasetsError) as error:
            # RuntimeError: a dataset that only a script of its owner could load
            raise ValueError(
                f"source: cannot load {self._shown} from the hub ({first_line(error)}). Check name, config, split "
                "and revision, and that the hub can be reached."
            ) from error

    @property
    def _shown(self) -> str:
        return " ".join(filter(None, [self.name, self.config, f"split {self.split}", self.revision]))

    def description(self) -> dict[str, Any]:
        asked = {"name": self.name, "config": self.config, "split": self.split, "revision": self.revision}
        asked |= {"column": self.column, "where": condition_text(self.where)}
        if (
            self.revision is None
        ):  # a folder, or a hub that could not be asked: the data itself says what it is
            asked["fingerprint"] = None if self.streaming else str(self._dataset._fingerprint)
        return {"kind": "hub", **asked}

    def size(self) -> int | None:
        return None if self.streaming else len(self._dataset)

    def rows(self, columns: Sequence[str], first: int = 0) -> Iterator[Row]:
        dataset = self._dataset
        needed = needed_columns(columns, self.where)
        if (names := dataset.column_names) is not None:  # a stream may tell with its first row only
            expect_columns(needed, names, self._shown)
            dataset = dataset.select_columns(needed)
        if not self.streaming and first >= len(dataset):
            return  # skip refuses to leave nothing
        number = first
        try:
            for record in dataset.skip(first):
                if names is None:
                    names = list(record)
                    expect_columns(needed, names, self._shown)
                place = f"{self._shown}, row {number}"
                yield Row(number, row_texts(record, columns, self.where, place), number + 1)
                number += 1
        except OSError as error:
            raise ValueError(
                f"source: reading {self._shown} failed at row {number} ({first_line(error)}). "
                "The same command goes on where it stopped."
            ) from error


class HubFiles(LocalFiles):
    """Files of a hub dataset that ``datasets`` cannot load itself: they are downloaded and read as local files.

    Raises:
        ValueError: the files cannot be downloaded, or there are none.
    """

    def __init__(self, name: str, patterns: Sequence[str], revision: str | None = None, **local: Any) -> None:
        self.name, self.patterns = name, list(patterns)
        self.revision = pinned_revision(name, revision)
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        here = not network.is_offline() and network.unreachable() is not None
        try:
            folder = Path(
                snapshot_download(
                    name,
                    repo_type="dataset",
                    revision=self.revision,
                    allow_patterns=self.patterns,
                    local_files_only=here,
                )
            )
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
            raise ValueError(
                f"source: cannot download {name}: {network.no_hub()} Prepare it where there is a network."
                if here
                else f"source: cannot download {name} from the hub ({first_line(error)}). Check name and revision, and "
                "that the hub can be reached."
            ) from error
        files = sorted(path for pattern in self.patterns for path in folder.glob(pattern))
        if not files:
            raise ValueError(
                f"source: expected files {', '.join(self.patterns)} in {name} at revision {self.revision}, found none."
            )
        super().__init__(files, **local)

    def description(self) -> dict[str, Any]:
        local = super().description()
        del local["paths"]  # where this machine keeps its downloads says nothing of the text
        return local | {"kind": "hub files", "name": self.name, "revision": self.revision}


def pinned_revision(name: str, revision: str | None) -> str | None:
    """The commit that a revision of a hub dataset is now; as given, with a warning, if the hub cannot be asked."""
    if revision is not None and len(revision) == 40 and set(revision) <= set("0123456789abcdef"):
        return revision
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        if not network.is_offline() and (reason := network.unreachable()):
            raise ConnectionError(reason)
        return HfApi().dataset_info(name, revision=revision).sha
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        asked = f"{name} at revision {revision}" if revision else name
        raise ValueError(f"source: the hub has no dataset {asked} ({first_line(error)}).") from error
    except Exception as error:  # no network, a proxy, an outage: every client library raises its own
        logger.warning(
            "The hub cannot be asked which commit %s is (%s): the manifest will say revision %s.",
            name,
            type(error).__name__,
            revision,
        )
        return revision
