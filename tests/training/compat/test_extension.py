"""Finding, caching and building the part for torch. A module of ten lines stands for it, the real one is slow."""

import fcntl
import os
import platform
import pwd
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import gradcast
from conftest import ROOT

pytest.importorskip("torch", reason="this needs PyTorch, which is not installed: pip install torch")
import torch

from gradcast.training.compat import extension, native_build, reference_counts

MODULE = """
#include <Python.h>
#include "gradcast/types.h"
static PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "_c10d", 0, -1, 0, 0, 0, 0, 0}};
PyMODINIT_FUNC PyInit__c10d() {{
  PyObject* module = PyModule_Create(&definition);
  PyModule_AddIntConstant(module, "answer", {answer});
  return module;
}}
"""


def write_sources(root: Path, answer: int = 42, extra: str = "") -> None:
    (root / "csrc/transport/torch").mkdir(parents=True, exist_ok=True)
    (root / "csrc/transport/torch/module.cc").write_text(MODULE.format(answer=answer) + extra)
    for name in native_build.HEADERS:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("#pragma once\n")


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A tree with a small module, an empty cache, nothing loaded yet. Returns the tree."""
    tree = tmp_path / "tree"
    (tree / "python/gradcast").mkdir(parents=True)
    write_sources(tree)
    monkeypatch.setattr(extension, "_PACKAGE", tree / "python/gradcast")
    monkeypatch.setattr(extension, "_module", None)
    monkeypatch.setitem(sys.modules, "gradcast._c10d", None)
    monkeypatch.setenv("GRADCAST_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(reference_counts, "check", lambda native: None)  # this module has nothing that counts
    for name in ("CXX", "CXXFLAGS"):
        monkeypatch.delenv(name, raising=False)
    return tree


@pytest.fixture
def load(world, monkeypatch, capsys):
    """Loads as a new process would; returns the module and whether it had to be built."""

    def load_anew():
        monkeypatch.setattr(extension, "_module", None)
        module = extension.load()
        said = capsys.readouterr().err
        assert said.count("\n") == said.count("gradcast: building the part for torch") <= 1
        return module, bool(said)

    return load_anew


def built_files() -> list[Path]:
    return sorted(extension.cache_folder().rglob("_c10d*"))


def refusal(load, match: str) -> str:
    with pytest.raises(gradcast.Error, match=match) as raised:
        load()
    assert raised.value.code == "environment"
    return str(raised.value)


def no_compiler(monkeypatch, tmp_path) -> None:
    (tmp_path / "empty").mkdir(exist_ok=True)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))


def test_it_is_built_once_and_then_found(load, monkeypatch, tmp_path):
    module, built = load()
    assert built
    assert module.answer == 42
    assert sys.modules["gradcast._c10d"] is module
    (path,) = built_files()
    assert path.parent.name.startswith(f"torch-{torch.__version__}.cpython-")
    no_compiler(monkeypatch, tmp_path)
    module, built = load()
    assert not built, "the host that runs needs no compiler"
    assert module.answer == 42
    assert extension.load() is module
    monkeypatch.setenv("CXXFLAGS", "-march=native")
    refusal(load, r"no C\+\+ compiler was found")


CHANGES = {
    "source": lambda world, patch: write_sources(world, answer=43),
    "header": lambda world, patch: (world / "include/gradcast/types.h").write_text("#pragma once\n// changed\n"),
    "flags": lambda world, patch: patch.setenv("CXXFLAGS", "-O1 -g0"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_built_anew(load, world, monkeypatch, change):
    load()
    CHANGES[change](world, monkeypatch)
    module, built = load()
    assert built
    assert module.answer == (43 if change == "source" else 42)
    assert len(built_files()) == 2
    write_sources(world)
    monkeypatch.delenv("CXXFLAGS", raising=False)
    assert not load()[1], "both stay"


COMPILER = """#!/bin/sh
exec c++ "$@" $(cat {flags})
"""


@pytest.mark.parametrize("flags", ["-mavx2", "-D__VERSION__=99"], ids=["CPU", "version"])
@pytest.mark.skipif(platform.machine() != "x86_64", reason="-mavx2 is for x86_64")
def test_another_compiler_or_cpu_behind_the_same_name_builds_anew(load, monkeypatch, tmp_path, flags):
    """As on hosts that share a home, with -march=native in CXXFLAGS or in a compiler's wrapper, or after an update."""
    compiler, own_flags = tmp_path / "compiler", tmp_path / "flags"
    compiler.write_text(COMPILER.format(flags=own_flags))
    compiler.chmod(0o755)
    own_flags.write_text("")
    monkeypatch.setenv("CXX", str(compiler))
    assert load()[1]
    own_flags.write_text(flags)
    assert load()[1]
    own_flags.write_text("")
    assert not load()[1]


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")


def places(world: Path) -> dict[str, Path]:
    """The cache, a build's folder and its file."""
    path = extension.path_in_cache(torch.__version__)
    return {"cache": path.parent.parent, "folder": path.parent, "file": path}


@pytest.mark.parametrize("what", ["cache", "folder", "file"])
@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_what_others_can_write_is_not_loaded(load, world, what, mode):
    load()
    path = places(world)[what]
    path.chmod(mode)
    said = refusal(load, rf"others can write into .* \(its mode is {mode:o}\).*; chmod go-w {re.escape(str(path))}, or")
    path.chmod(0o755)
    assert not load()[1], said


@needs_root
@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_belongs_to_others_is_not_loaded(load, world, what):
    load()
    os.chown(places(world)[what], 12345, -1)
    assert str(places(world)[what]) in refusal(load, "belongs to the user with the number 12345")


@needs_root
def test_nothing_is_built_in_a_folder_of_others(load, world):
    """That one has made before, in a folder as /tmp."""
    folder = lock_of(world).parent
    extension.cache_folder().chmod(0o1777)
    os.chown(folder, 12345, -1)
    refusal(load, "belongs to the user with the number 12345")
    assert list(folder.iterdir()) == []
    folder.rmdir()
    assert load()[1]


@needs_root
def test_root_uses_the_cache_of_a_mounted_home(load, world, monkeypatch, tmp_path):
    """In a container. Who trusts the owner with HOME runs Python's files there already."""
    monkeypatch.delenv("GRADCAST_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    load()
    for path in (tmp_path, *places(world).values()):
        os.chown(path, 12345, -1)
    assert not load()[1]
    os.chown(tmp_path, 0, -1)
    refusal(load, "belongs to the user with the number 12345")


def test_what_is_built_is_not_writable_by_others(load, world):
    before = os.umask(0)
    try:
        assert load()[1]
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in places(world).values()} == {0o755}


def test_a_user_without_a_name_and_a_home_is_told_what_to_do(load, monkeypatch):
    for name in ("GRADCAST_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", mock.Mock(side_effect=KeyError))
    refusal(load, "no place for the part for torch: .* home .*; set GRADCAST_CACHE_DIR to a folder")


def test_another_python_has_a_module_and_headers_of_its_own(world, tmp_path):
    target = tmp_path / native_build.installed_name("2.9.0", ".cpython-399.so")
    assert target.name == "_c10d.torch-2.9.0.cpython-399.so"
    with pytest.raises(native_build.BuildError, match=rf"headers are missing \({tmp_path}/Python.h\)"):
        native_build.build(world, target, str(tmp_path))


def test_the_one_built_at_install_comes_first(load, world, monkeypatch, tmp_path):
    installed = world / "python/gradcast" / native_build.installed_name(torch.__version__)
    native_build.build(world, installed)
    no_compiler(monkeypatch, tmp_path)
    module, built = load()
    assert not built
    assert module.answer == 42
    assert Path(module.__file__) == installed
    assert built_files() == []


def test_one_built_at_install_for_another_torch_is_left_alone(load, world):
    other = world / "python/gradcast" / native_build.installed_name("1.2.3")
    other.write_bytes(b"of another torch")
    module, built = load()
    assert built
    assert Path(module.__file__) != other


def test_an_installed_package_brings_its_sources(load, world):
    shipped = world / "python/gradcast/native"
    write_sources(shipped, answer=7)
    assert load()[0].answer == 7


LACKING = {
    "a compiler": (lambda world, patch: no_compiler(patch, world), r"no C\+\+ compiler was found .*g\+\+"),
    "that compiler": (
        lambda world, patch: patch.setenv("CXX", "no-such-compiler -O2"),
        "no-such-compiler of the environment variable CXX was not found",
    ),
    "Python's headers": (
        lambda world, patch: patch.setattr(native_build.sysconfig, "get_path", lambda name: str(world / "nothing")),
        r"Python's headers are missing \(.*Python\.h\).*python3-dev",
    ),
    "sources": (lambda world, patch: (world / "csrc/transport/torch/module.cc").unlink(), "install gradcast again"),
    "the GIL": (
        lambda world, patch: patch.setattr(extension.sysconfig, "get_config_var", lambda name: 1),
        "free-threaded.*train with an ordinary build",
    ),
    "a cache": (
        lambda world, patch: patch.setenv("GRADCAST_CACHE_DIR", str(world / native_build.HEADERS[0] / "cache")),
        "set GRADCAST_CACHE_DIR to a folder",
    ),
}


@pytest.mark.parametrize("what", LACKING)
def test_what_is_missing_is_named(load, world, monkeypatch, what):
    remove, said = LACKING[what]
    remove(world, monkeypatch)
    refusal(load, said)


def test_the_compiler_has_the_last_word(load, world):
    write_sources(world, extra="#error the torch of the day\n")
    text = refusal(load, "compiling the part for torch failed")
    assert "the torch of the day" in text
    assert "C++20" in text
    left = [path.name for path in extension.cache_folder().rglob("*") if path.is_file()]
    assert left == ["lock"]


def test_a_file_that_does_not_load_is_named(load, world):
    path = lock_of(world).with_name(f"_c10d{native_build.MODULE_SUFFIX}")
    path.write_bytes(b"no module at all")
    assert str(path) in refusal(load, "does not load .* remove")


def test_where_the_cache_is(monkeypatch):
    known = {"GRADCAST_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/c", "HOME": "/d"}
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    for name, expected in zip(known, ("/a/b", "/c/gradcast", "/d/.cache/gradcast"), strict=True):
        assert extension.cache_folder() == Path(expected)
        monkeypatch.delenv(name)


def lock_of(tree: Path) -> Path:
    path = extension.path_in_cache(torch.__version__).with_name("lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def test_the_lock_of_a_dead_process_stops_nobody(load, world):
    program = "import fcntl, os, sys; fcntl.flock(open(sys.argv[1], 'a'), fcntl.LOCK_EX); os._exit(1)"
    subprocess.run([sys.executable, "-c", program, str(lock_of(world))], check=False, timeout=60)
    assert load()[1]


def test_a_process_that_hangs_is_not_waited_for_without_end(load, world, monkeypatch):
    monkeypatch.setattr(extension, "_LOCK_TIMEOUT_S", 0.3)
    with lock_of(world).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert str(lock_of(world)) in refusal(load, "another process has been building")
    assert load()[1]


LOADER = """
import sys
from pathlib import Path
from gradcast.training.compat import extension
extension._PACKAGE = Path(sys.argv[1])
extension.reference_counts.check = lambda native: None
sys.stdout.write("ready\\n"); sys.stdout.flush()
sys.stdin.readline()
print(extension.load().answer)
"""


@pytest.mark.slow
def test_two_processes_at_once_build_once(world, monkeypatch, tmp_path):
    """The compiler writes down each call; both processes are let go together when both have imported torch."""
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nsleep 0.5\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    environment = os.environ | {"CXX": str(compiler)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LOADER, str(world / "python/gradcast")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        said = [process.communicate("go\n", timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [out for out, _ in said] == ["42\n", "42\n"], said
    assert sorted(err.count("building the part for torch") for _, err in said) == [0, 1], said
    calls = [call for call in (tmp_path / "calls").read_text().splitlines() if " -dM " not in call]
    assert len(calls) == 2, "one file to compile, one module to link"


def test_every_header_that_the_sources_reach_is_shipped():
    reached: set[str] = set()
    waiting = sorted((ROOT / "csrc/transport/torch").glob("*.*"))
    while waiting:
        for name in re.findall(r'#include "([^"]+)"', waiting.pop().read_text()):
            found = [folder for folder in ("include", "csrc") if (ROOT / folder / name).exists()]
            for path in (f"{folder}/{name}" for folder in found):
                if path not in reached and not path.startswith("csrc/transport/torch/"):
                    reached.add(path)
                    waiting.append(ROOT / path)
    assert reached == set(native_build.HEADERS)


def test_the_tree_is_what_is_built():
    assert extension.sources_root() == ROOT
    assert {path for path in native_build.files(ROOT) if path.suffix == ".cc"} == set(
        ROOT.glob("csrc/transport/torch/*.cc")
    )


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("units", [native_build._UNITS, 100], ids=["together", "alone"])
def test_the_sources_compile_without_a_warning(tmp_path, monkeypatch, units):
    monkeypatch.setenv("CXXFLAGS", "-Werror")
    monkeypatch.setattr(native_build, "_UNITS", units)
    native_build.build(ROOT, tmp_path / "_c10d.so")
    assert (tmp_path / "_c10d.so").exists()
