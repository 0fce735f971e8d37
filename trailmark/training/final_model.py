"""The manifest of a run's final model. It needs no torch: ``trailmark verify`` starts at once."""

from __future__ import annotations

import os
from pathlib import Path

from trailmark import untrusted
from trailmark.files import Progress, write_text
from trailmark.training import manifests

MODEL_MANIFEST = "model.json"
_KIND, _FORMAT, _NOUN = "trailmark model", 1, "a trained model"


def sign_model(output: Path, names: list[str]) -> None:
    """Write the manifest of the model's and the tokenizer's files that lie in a run's folder."""
    files = manifests.entries_of(output, sorted(names))
    content = manifests.signed({"kind": _KIND, "format": _FORMAT, "files": files})
    write_text(output / MODEL_MANIFEST, content.decode(), durable=True)


def has_signed_model(output: Path) -> bool:
    """Whether a run's final model has a manifest: those of an older trailmark have none."""
    return os.path.lexists(output / MODEL_MANIFEST)


def lacks_manifest(output: Path) -> bool:
    """Whether a model lies in a folder without a manifest, as that of an older trailmark does."""
    return not has_signed_model(output) and os.path.lexists(output / "model.safetensors")


def expects_manifest(output: Path) -> bool:
    """Whether the history of a run says that its model was signed."""
    try:
        history = untrusted.read_json(output / "history.json", "history.json", finite=False)
    except (OSError, ValueError):
        return False
    return isinstance(history, dict) and history.get("model_manifest") == MODEL_MANIFEST


def verify_model(output: Path, progress: Progress | None = None) -> None:
    """Compare every byte of a run's final model with its manifest, and the manifest with itself.

    Raises:
        ValueError: what is wrong, in one line that names the file.
    """
    if not has_signed_model(output):
        raise ValueError(
            f"{MODEL_MANIFEST}: is missing, with which the model was saved. Copy the whole folder again."
        )
    manifest = manifests.read(output, MODEL_MANIFEST, manifests.Manifest, _KIND, _FORMAT, _NOUN)
    manifests.expect_same(output, manifest.entries(), progress)
    # transformers would load it instead, or with the others
    for path in untrusted.files_like(output, "*.safetensors"):
        if path.name not in manifest.files:
            raise ValueError(f"{path.name}: is not in {MODEL_MANIFEST}: expected nothing that was not saved.")
