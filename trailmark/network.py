"""Whether the Hugging Face hub answers, asked once and quickly: libraries ask again and again for half a minute.

Without a network a hub name is found in this machine's cache or refused at once, with the way out.
"""

from __future__ import annotations

import os
import threading
from functools import cache
from pathlib import Path
from typing import Any

SECONDS = 2.0
"""In which the hub must begin to answer."""


@cache
def unreachable() -> str | None:
    """Why the hub cannot be asked, in a few words; None: it answers. The network is asked once in a process."""
    from huggingface_hub import constants

    reason = f"no answer within {SECONDS:g} seconds"

    def ask() -> None:
        nonlocal reason
        from huggingface_hub import get_session

        try:
            get_session().head(constants.ENDPOINT, timeout=SECONDS)  # any answer will do
        except Exception as error:  # no network, a proxy: what the client raises is its own
            reason = " ".join(str(error).split()) or type(error).__name__
        else:
            reason = ""

    # looking a name up has no time limit of its own
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(SECONDS + 0.5)
    return reason or None


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE keeps the libraries from the network: then they fail at once by themselves."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def from_pretrained_options(name: str | os.PathLike[str], argument: str) -> dict[str, Any]:
    """What ``from_pretrained`` is to be told of a folder or a hub name so that it does not wait for a network in vain.

    Raises:
        ValueError: it is no folder, the hub does not answer, and nothing of it lies in this machine's cache.
    """
    if Path(name).exists() or not may_be_on_the_hub(str(name)):
        return {"local_files_only": True}
    if is_offline() or unreachable() is None:
        return {}
    if not _is_cached(str(name)):
        raise ValueError(
            f"{argument}: {str(name)!r} is no folder here, and {no_hub()} Name a folder; or, where there is a network, "
            f"download it: hf download {name}"
        )
    return {"local_files_only": True}


def no_hub() -> str:
    """The sentence that says so."""
    from huggingface_hub import constants

    return f"the hub cannot be reached ({constants.ENDPOINT}: {unreachable()})."


def may_be_on_the_hub(name: str) -> bool:
    """A path, say, is no name there: the libraries say so without asking."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _is_cached(name: str) -> bool:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")
    return any(folder.glob("snapshots/*/*"))
