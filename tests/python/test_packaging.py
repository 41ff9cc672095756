"""The package as others install it."""

import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import gradcast
from conftest import ROOT


def test_the_version_stands_in_one_place():
    header = (ROOT / "include/gradcast/version.h").read_text()
    assert gradcast.__version__ == re.search(r'"([^"]+)"', header)[1]
    assert f"## {gradcast.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_tool_is_pinned():
    """Whatever builds or checks this project has an exact version; the Makefile installs what is pinned, only that."""
    text = (ROOT / "pyproject.toml").read_text()
    for section in ("requires", "dev"):
        listed = re.search(rf"^{section} = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)[1]
        names = re.findall(r'"([^"]+)"', listed)
        assert names
        assert all("==" in name for name in names), names


def test_the_package_carries_its_data():
    package = Path(gradcast.__file__).parent
    assert {"resnet50", "vgg16"} <= set(gradcast.files.bundled_profiles())
    for name in ("py.typed", "_core.pyi", "data/README.md"):
        assert (package / name).exists()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_wheel_works_alone(tmp_path):
    """Built in isolation, installed into a bare environment, far from the tree, without torch or matplotlib."""
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("gradcast-*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    binaries = tmp_path / "venv" / "bin"
    subprocess.run([binaries / "python", "-m", "pip", "install", wheel], check=True)
    command = [binaries / "gradcast", "simulate", "vgg16", "--bandwidth", "10gbit", "--workers", "8"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "forecast reaches" in result.stdout
