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

PROJECT = """
cmake_minimum_required(VERSION 3.22)
project(consumer LANGUAGES CXX)
set(CMAKE_CXX_STANDARD 20)
find_package(gradcast 0.1 REQUIRED)
add_executable(consumer main.cc)
target_link_libraries(consumer PRIVATE gradcast::engine gradcast::inproc)
"""
# Two ranks, two gradients each, one plan: the sums have to arrive.
MAIN = """
#include <cstdio>
#include <thread>
#include <vector>
#include "gradcast/engine.h"
#include "gradcast/inproc.h"
#include "gradcast/policy.h"

int main() {
  gradcast::Profile profile;
  profile.name = "two tensors";
  profile.forward_ns = profile.backward_ns = 1e6;
  for (int i = 0; i < 2; ++i) {
    gradcast::Tensor tensor;
    tensor.name = std::to_string(i);
    tensor.bytes = 40;
    tensor.ready_ns = i == 0 ? 1e6 : 0;
    tensor.need_ns = i == 0 ? 0 : 5e5;
    profile.tensors.push_back(tensor);
  }
  gradcast::LinkModel link;
  link.all_reduce.pieces = {{.alpha_ns = 1e3, .beta_ns_per_byte = 10}};
  const gradcast::Plan plan = gradcast::make_plan(profile, link, {});
  gradcast::InprocWorld world(2);
  std::vector<std::thread> threads;
  std::vector<std::vector<float>> numbers = {std::vector<float>(20, 1), std::vector<float>(20, 2)};
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      auto transport = world.transport(rank, {{numbers[rank].data(), 80, gradcast::Element::kFloat32}});
      gradcast::Engine engine(*transport, {});
      engine.follow(profile, plan);
      engine.begin();
      engine.on_ready(1);
      engine.on_ready(0);
      engine.wait_all(10'000'000'000);
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("%zu blocks, sum %g\\n", plan.blocks.size(), numbers[1][19]);
}
"""

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
def test_another_project_finds_it(prefix, tmp_path):
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)
    (tmp_path / "main.cc").write_text(MAIN)
    run("cmake", "-S", ".", "-B", "out", f"-DCMAKE_PREFIX_PATH={prefix}", cwd=tmp_path)
    run("cmake", "--build", "out", cwd=tmp_path)
    assert run(tmp_path / "out/consumer", cwd=tmp_path).endswith("sum 3\n")


@needs_build
def test_the_installed_bench_finds_its_profiles(prefix, tmp_path):
    """Also where the tree that it was built from is gone."""
    tool = prefix / "bin/gradcast-bench"
    quick = ["--bytes-max", "64k", "--factor", "4", "--iterations", "4", "--rounds", "1", "--compute-ms", "2"]
    text = run(tool, "--ranks", "2", "--schedule", "--profile", "vgg16", "--scale-size", "0.0001", *quick, cwd=tmp_path)
    assert "ms per step of vgg16" in text
    shutil.copytree(prefix, tmp_path / "moved")
    profiles = tmp_path / "moved/share/gradcast/profiles"
    (profiles / "vgg16.json").rename(profiles / "another.json")
    text = run(
        tmp_path / "moved/bin/gradcast-bench",
        "--schedule",
        "--profile",
        "another",
        "--scale-size",
        "0.0001",
        *quick,
        cwd=tmp_path,
    )
    assert "ms per step of" in text


@needs_build
@pytest.mark.timeout(400)
def test_the_trainer_in_cpp_learns(prefix, tmp_path):
    pytest.importorskip("torch", reason="this needs PyTorch, which is not installed: pip install torch")
    source = ROOT / "examples/cpp_trainer"
    arguments = [f"-DCMAKE_PREFIX_PATH={prefix}", f"-DPython_EXECUTABLE={sys.executable}"]
    run("cmake", "-S", source, "-B", tmp_path, *arguments, cwd=tmp_path)
    run("cmake", "--build", tmp_path, cwd=tmp_path)
    text = run(tmp_path / "cpp_trainer", cwd=tmp_path)
    assert "all ranks have the same parameters" in text
    first, last = (float(word) for word in text.split("loss ")[1].split("\n")[0].split(" -> "))
    assert last < 0.5 * first
