"""The wheel: what is in it, and that ``trailmark.ops`` works where torch is the only library."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import trailmark

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow

OPS_ALONE = """
import importlib.util
import sys

for name in ("transformers", "accelerate", "numpy", "safetensors", "yaml"):
    assert importlib.util.find_spec(name) is None, f"{name} can be imported here: the test proves nothing"

import torch
import trailmark
from trailmark.ops import grouped_cross_attention, select_chunks, sliding_window_attention

assert trailmark.__file__.startswith(sys.prefix), trailmark.__file__
q = torch.randn(1, 2, 3, 4, 8, requires_grad=True)  # [B, N, R, H, D]
k, v = torch.randn(2, 1, 5, 3, 2, 8)  # [B, M, S, J, D]
selection = select_chunks(torch.randn(1, 2, 16), torch.randn(1, 5, 16), 2, torch.tensor([1, 5]))
out = grouped_cross_attention(q, k, v, selection.indices, selection.weights)
out.sum().backward()
assert out.shape == q.shape
assert out.isfinite().all()
assert q.grad.isfinite().all()
out = sliding_window_attention(torch.randn(1, 6, 4, 8), *torch.randn(2, 1, 6, 2, 8), window=3)
assert out.shape == (1, 6, 4, 8)
"""


def run(*command: str | Path) -> str:
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def build(folder: Path) -> Path:
    """A release in ``folder``: the archive of the sources, and the wheel."""
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-t", "wheel", "-d", folder)
    return folder


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("release"))


def distributions_needed_by(name: str) -> dict[str, metadata.Distribution]:
    """``name`` and everything it requires here, without extras, by canonical name."""
    found: dict[str, metadata.Distribution] = {}
    names = [name]
    while names:
        name = canonicalize_name(names.pop())
        if name in found:
            continue
        found[name] = metadata.distribution(name)
        for line in found[name].requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                names.append(requirement.name)
    return found


def link(distribution: metadata.Distribution, site: Path) -> None:
    """Symbolic links in ``site`` to all that ``distribution`` installed beside its metadata."""
    source = Path(str(distribution.locate_file("")))
    tops = {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}
    for top in tops:
        target = site / top
        # namespace folders (nvidia) belong to several distributions; .pth files are start-up hooks
        if not target.exists() and not top.endswith(".pth"):
            target.symlink_to(source / top)


def test_the_wheel_holds_the_library_and_nothing_else(release: Path) -> None:
    (wheel,) = release.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (meta,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
        (scripts,) = (
            archive.read(name).decode() for name in names if name.endswith(".dist-info/entry_points.txt")
        )
    library = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    files = [path for path in (ROOT / "trailmark").rglob("[!.]*") if path.is_file()]
    assert library == {path.relative_to(ROOT).as_posix() for path in files if path.suffix != ".pyc"}
    assert "trailmark/py.typed" in library
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert "trailmark = trailmark.cli:main" in scripts
    assert "License-Expression: Apache-2.0" in meta
    assert "Requires-Python: >=3.11" in meta


def test_a_release_is_built_again_byte_for_byte(release: Path, tmp_path: Path) -> None:
    first, again = (
        {file.name: file.read_bytes() for file in made.iterdir()} for made in (release, build(tmp_path))
    )
    assert sorted(name.partition("-")[2] for name in first) == [
        f"{trailmark.__version__}-py3-none-any.whl",
        f"{trailmark.__version__}.tar.gz",
    ]
    assert first == again


def test_ops_need_torch_alone(release: Path, tmp_path: Path) -> None:
    (wheel,) = release.glob("*.whl")
    environment = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    for distribution in distributions_needed_by("torch").values():
        link(distribution, site)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install")
    run(*pip, "--quiet", "--no-deps", "--no-index", wheel)
    # -I: neither this checkout, as the working folder, nor PYTHONPATH may lend its packages
    run(python, "-I", "-W", "ignore", "-c", textwrap.dedent(OPS_ALONE))
