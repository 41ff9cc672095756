"""The package as others install it."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from tree import files

import gradcast
from conftest import ROOT


def test_the_version_stands_in_one_place():
    header = (ROOT / "include/gradcast/version.h").read_text()
    assert gradcast.__version__ == re.search(r'"([^"]+)"', header)[1]
    assert f"## [{gradcast.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


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


def test_nobody_gets_another_torch_by_installing():
    """Whoever trains has a torch that fits the machine; pip would replace it by one that fits a requirement."""
    requirements = metadata.requires("gradcast")
    assert any(requirement.startswith("tabulate") for requirement in requirements)
    assert not [text for text in requirements if text.startswith("torch") and "extra ==" not in text]


WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = None; from gradcast.cli.main import main; sys.exit(main(['dev', 'policies']))"
)


def test_planning_works_without_torch():
    result = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "forecast" in result.stdout


def unpacked(tmp_path: Path) -> Path:
    """The tree as others get it: without the build folders, where setuptools would look for what it can use again."""
    tree = tmp_path / "tree"
    for path in files():
        copied = tree / path.relative_to(ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copied)
    return tree


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_wheel_works_alone(tmp_path):
    """Built in isolation, installed into a bare environment, far from the tree, without torch or matplotlib."""
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", tmp_path, unpacked(tmp_path)], check=True)
    (wheel,) = tmp_path.glob("gradcast-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "gradcast/native/csrc/transport/torch/module.cc" in names
    assert not [name for name in names if "_c10d.torch" in name], "built for a torch that is not there"
    venv.create(tmp_path / "venv", with_pip=True)
    binaries = tmp_path / "venv" / "bin"
    subprocess.run([binaries / "python", "-m", "pip", "install", wheel], check=True)
    command = [binaries / "gradcast", "simulate", "vgg16", "--bandwidth", "10gbit", "--workers", "8"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "forecast reaches" in result.stdout


LOAD = "from gradcast.training.compat import extension; print(extension.load().__file__)"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_an_install_that_sees_torch_brings_the_part_for_it(tmp_path):
    """Without build isolation; what it built is used without a compiler and without a cache."""
    torch = pytest.importorskip("torch", reason="this needs PyTorch, which is not installed: pip install torch")
    install = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--target"]
    subprocess.run([*install, tmp_path / "site", unpacked(tmp_path)], check=True)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "PATH": "", "GRADCAST_CACHE_DIR": "/nowhere"}
    load = [sys.executable, "-c", LOAD]
    result = subprocess.run(load, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.startswith(f"{tmp_path / 'site'}/gradcast/_c10d.torch-{torch.__version__}")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_source_archive_is_complete(tmp_path):
    tree = unpacked(tmp_path)
    program = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", program], cwd=tree, check=True, stdout=subprocess.DEVNULL)
    (archive,) = tmp_path.glob("gradcast-*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.split("/", 1)[-1] for name in file.getnames()}
    sources = [path.relative_to(tree) for folder in ("csrc", "include") for path in (tree / folder).rglob("*.*")]
    assert len(sources) > 50
    assert not [str(path) for path in sources if str(path) not in names]
