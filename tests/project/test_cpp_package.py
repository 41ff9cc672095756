"""The CMake package: installed to a folder of its own, found by another project, enough to plan and to schedule."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT

pytestmark = pytest.mark.slow

# `make test TORCH=...` has a build folder of its own, and says so.
BUILD = ROOT / os.environ.get("GRADCAST_BUILD", "build")

needs_build = pytest.mark.skipif(
    not (BUILD / "csrc/engine/libgradcast_engine.a").exists(), reason="the tree is not built: make test builds it"
)


def run(*command: object, cwd: Path) -> str:
    ended = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=280, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", BUILD, "--prefix", folder, cwd=ROOT)
    return folder


@needs_build
def test_the_installed_bench_finds_its_profiles(prefix, tmp_path):
    """Also where the tree that it was built from is gone."""
    quick = ["--bytes-max", "64k", "--factor", "4", "--iterations", "4", "--rounds", "1", "--compute-ms", "2"]
    schedule = ["--schedule", "--scale-size", "0.0001", *quick, "--profile"]
    text = run(prefix / "bin/gradcast-bench", "--ranks", "2", *schedule, "vgg16", cwd=tmp_path)
    assert "ms per step of vgg16" in text
    shutil.copytree(prefix, tmp_path / "moved")
    profiles = tmp_path / "moved/share/gradcast/profiles"
    (profiles / "vgg16.json").rename(profiles / "another.json")
    text = run(tmp_path / "moved/bin/gradcast-bench", *schedule, "another", cwd=tmp_path)
    assert "ms per step of" in text


@needs_build
@pytest.mark.timeout(400)
def test_another_project_finds_it_and_trains(prefix, tmp_path):
    """The trainer of examples/, with nothing of the tree but what was installed."""
    pytest.importorskip("torch", reason="this needs PyTorch, which is not installed: pip install torch")
    source = ROOT / "examples/cpp_trainer"
    arguments = [f"-DCMAKE_PREFIX_PATH={prefix}", f"-DPython_EXECUTABLE={sys.executable}"]
    run("cmake", "-S", source, "-B", tmp_path, *arguments, cwd=tmp_path)
    run("cmake", "--build", tmp_path, cwd=tmp_path)
    text = run(tmp_path / "cpp_trainer", cwd=tmp_path)
    assert "all ranks have the same parameters" in text
    first, last = (float(word) for word in text.split("loss ")[1].split("\n")[0].split(" -> "))
    assert last < 0.5 * first
