"""Reads the includes of every C++ file and fails where a layer reaches where it may not (docs/design.md, layers).

The table below is the rule. A new folder under csrc needs a line in it.
"""

import ast
import re
import runpy
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from conftest import ROOT

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)

# Which layer a public header belongs to; every other one is the core's.
PUBLIC_LAYER = {
    "engine.h": "engine",
    "host_buffer.h": "transport",
    "inproc.h": "transport",
    "mpi.h": "transport",
    "nccl.h": "transport",
    "sim.h": "sim",
    "transport.h": "transport",
}
# Public headers that carry nothing but words and errors, which even a transport may use.
WORDS = {"gradcast/types.h", "gradcast/error.h"}

# Standard headers that a pure layer has no use for: threads, clocks, randomness, printing, files.
IMPURE = {
    "atomic", "barrier", "chrono", "condition_variable", "ctime", "filesystem", "fstream", "future", "iostream",
    "latch", "mutex", "ostream", "print", "random", "semaphore", "shared_mutex", "stop_token", "syncstream", "thread",
}  # fmt: skip
# Words that reach the environment, the clock or the terminal without a header of their own.
IMPURE_WORDS = re.compile(r"\b(getenv|std::rand|srand|printf|fprintf|puts|std::cout|std::cerr|std::time)\b")


@dataclass(frozen=True)
class Layer:
    public: frozenset[str]  # layers whose public headers it may include
    vendors: tuple[str, ...] = ()  # beginnings of other libraries' headers
    pure: bool = False
    words_only: bool = False  # of the core's public headers, only WORDS
    own: tuple[str, ...] = field(default=())  # folders whose private headers it may include besides its own
    files: tuple[str, ...] = field(default=())  # single private headers of other layers


LAYERS = {
    "include/gradcast": Layer(frozenset({"core", "sim", "engine", "transport"}), ("mpi.h", "cuda_runtime")),
    "csrc/core": Layer(frozenset({"core"}), ("nlohmann/",), pure=True),
    "csrc/sim": Layer(frozenset({"core", "sim"}), pure=True, files=("csrc/engine/follower.h",)),
    "csrc/transport/shared": Layer(frozenset({"core", "transport"}), words_only=True),
    "csrc/transport/inproc": Layer(
        frozenset({"core", "transport"}), ("pthread.h",), words_only=True, own=("csrc/transport/shared",)
    ),
    "csrc/transport/mpi": Layer(
        frozenset({"core", "transport"}), ("mpi.h", "pthread.h"), words_only=True, own=("csrc/transport/shared",)
    ),
    "csrc/transport/nccl": Layer(
        frozenset({"core", "transport"}),
        ("nccl.h", "cuda_runtime", "pthread.h", "sys/prctl.h"),
        words_only=True,
        own=("csrc/transport/shared",),
    ),
    "csrc/engine": Layer(frozenset({"core", "engine", "transport"}), ("pthread.h",)),
    "csrc/cuda": Layer(frozenset(), ("cuda",)),
    "tests/cuda": Layer(frozenset(), ("gtest/",), own=("csrc/cuda",)),
    "tests/nccl": Layer(frozenset({"core", "transport"}), ("gtest/", "nccl.h", "cuda_runtime")),
    "csrc/bench": Layer(
        frozenset({"core", "engine", "transport"}),
        ("nlohmann/", "mpi.h", "cuda_runtime", "getopt.h", "time.h", "sys/prctl.h"),
        own=("csrc/cuda", "csrc/transport/shared"),
        files=("csrc/bench/parts.h",),  # written by CMake from parts.h.in
    ),
    "csrc/bindings": Layer(
        frozenset({"core", "sim", "engine", "transport"}), ("pybind11/",), own=("csrc/transport/shared",)
    ),
    "csrc/torch": Layer(
        frozenset({"core", "transport"}),
        ("torch/", "c10/", "ATen/", "pybind11/", "pthread.h", "sys/prctl.h"),
        words_only=True,
        own=("csrc/transport/shared",),
    ),
    "tests/training": Layer(
        frozenset({"core", "transport"}),
        ("torch/", "c10/", "pybind11/", "dlfcn.h", "pthread.h"),
        own=("csrc/torch", "csrc/bindings"),
    ),
    "tests/mpi": Layer(
        frozenset({"core", "transport"}),
        ("gtest/", "mpi.h", "pybind11/"),
        own=("csrc/bindings", "csrc/transport/shared"),
    ),
    "tests/core": Layer(frozenset({"core"}), ("gtest/", "gmock/", "nlohmann/"), own=("csrc/core",)),
    "tests/engine": Layer(
        frozenset({"core", "engine", "transport"}),
        ("gtest/", "pthread.h", "unistd.h"),
        own=("csrc/engine", "csrc/transport/shared", "tests/core"),
    ),
    "tests/sim": Layer(
        frozenset({"core", "sim"}),
        ("gtest/",),
        own=("csrc/sim", "tests/core", "tests/engine"),
        files=("csrc/engine/follower.h",),
    ),
    "tests/fuzz": Layer(frozenset({"core"}), ("fuzzer/",), own=("csrc/core",)),
    "benchmarks": Layer(
        frozenset({"core", "sim", "engine", "transport"}),
        ("benchmark/", "sys/resource.h", "cuda_runtime"),
        own=("csrc/core", "csrc/cuda", "csrc/transport/shared", "tests/core"),
    ),
}

# Of a layer that is not pure, what the simulator runs too.
PURE_FILES = {"csrc/engine/follower.h", "csrc/engine/follower.cc"}


def layer_of(path: str) -> str | None:
    """The longest folder of the table that holds the path."""
    return max((folder for folder in LAYERS if path.startswith(folder + "/")), key=len, default=None)


def faults(path: str, text: str) -> list[str]:
    folder = layer_of(path)
    if folder is None:
        return [f"{path}: its folder is in no layer; add it to the table in {Path(__file__).name}"]
    layer = LAYERS[folder]
    found = []
    for quote, name in INCLUDE.findall(text):
        reason = _fault_of_include(path, folder, layer, quote, name)
        if reason:
            found.append(f"{path} includes {name}: {reason}")
    if layer.pure or path in PURE_FILES:
        found += [f"{path} uses {match[0]}: {folder} is pure" for match in IMPURE_WORDS.finditer(text)]
    if path in PURE_FILES:
        found += [f"{path} includes {name}: it is pure" for _, name in INCLUDE.findall(text) if name in IMPURE]
    return found


def _fault_of_include(path: str, folder: str, layer: Layer, quote: str, name: str) -> str | None:
    if name.startswith("gradcast/"):
        owner = PUBLIC_LAYER.get(name.removeprefix("gradcast/"), "core")
        if owner not in layer.public:
            return f"{folder} may not reach {owner}"
        if owner == "core" and layer.words_only and name not in WORDS:
            return f"{folder} may use of the core only {', '.join(sorted(WORDS))}"
        return None
    if any(name.startswith(vendor) for vendor in layer.vendors):
        return None
    if quote == '"':
        own = [folder, *layer.own]
        if any((ROOT / place / name).exists() for place in own) or any(Path(file).name == name for file in layer.files):
            return None
        return f"it is in none of {', '.join(own)}"
    if "/" in name or "." in name:
        return f"{folder} may not use this library"
    if layer.pure and name in IMPURE:
        return f"{folder} is pure: no threads, clocks, randomness, files or printing"
    return None


def cxx_files() -> list[str]:
    folders = ("include", "csrc", "tests", "benchmarks")
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return sorted(str(path.relative_to(ROOT)) for path in paths if path.suffix in {".h", ".cc", ".cu", ".cuh"})


def test_no_layer_reaches_where_it_may_not():
    files = cxx_files()
    assert len(files) > 30
    found = [fault for path in files for fault in faults(path, (ROOT / path).read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("csrc/core/x.cc", "#include <chrono>"),
        ("csrc/core/x.cc", "#include <thread>"),
        ("csrc/core/x.cc", "#include <random>"),
        ("csrc/core/x.cc", "#include <iostream>"),
        ("csrc/core/x.cc", '  printf("%d", x);'),
        ("csrc/core/x.cc", 'auto v = std::getenv("HOME");'),
        ("csrc/core/x.cc", "#include <torch/extension.h>"),
        ("csrc/core/x.cc", "#include <pybind11/pybind11.h>"),
        ("csrc/core/x.cc", "#include <cuda_runtime.h>"),
        ("csrc/core/x.cc", "#include <unistd.h>"),
        ("csrc/core/x.cc", '#include "gradcast/engine.h"'),
        ("csrc/core/policy/x.cc", '#include "bindings.h"'),
        ("include/gradcast/x.h", "#include <nlohmann/json.hpp>"),
        ("include/gradcast/x.h", '#include "problem.h"'),
        ("csrc/sim/x.cc", '#include "gradcast/engine.h"'),
        ("csrc/sim/x.cc", "#include <chrono>"),
        ("csrc/sim/x.cc", '#include "loop.h"'),
        ("csrc/sim/x.cc", '#include "sentences.h"'),
        ("tests/sim/x_test.cc", '#include "gradcast/inproc.h"'),
        ("csrc/engine/follower.cc", "#include <chrono>"),
        ("csrc/engine/follower.h", "#include <thread>"),
        ("csrc/engine/x.cc", '#include "gradcast/sim.h"'),
        ("csrc/engine/x.cc", "#include <nccl.h>"),
        ("csrc/engine/x.cc", "#include <torch/torch.h>"),
        ("csrc/transport/mpi/x.cc", '#include "gradcast/plan.h"'),
        ("csrc/transport/mpi/x.cc", "#include <nccl.h>"),
        ("csrc/bindings/x.cc", "#include <torch/extension.h>"),
        ("csrc/bindings/x.cc", '#include "problem.h"'),
        ("csrc/bindings/x.cc", '#include "loop.h"'),
        ("csrc/transport/inproc/x.cc", '#include "gradcast/engine.h"'),
        ("csrc/transport/inproc/x.cc", '#include "sync.h"'),
        ("csrc/engine/x.cc", '#include "wire.h"'),
        ("csrc/engine/x.cc", '#include "pieces.h"'),
        ("csrc/torch/x.cc", '#include "gradcast/engine.h"'),
        ("csrc/torch/x.cc", '#include "gradcast/plan.h"'),
        ("csrc/torch/x.cc", "#include <cuda_runtime.h>"),
        ("csrc/novel/x.cc", "#include <vector>"),
    ],
)
def test_the_rule_has_teeth(path, text):
    assert faults(path, text)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "csrc/core/x.cc",
            '#include <vector>\n#include <nlohmann/json.hpp>\n#include "gradcast/plan.h"\n#include "problem.h"',
        ),
        ("csrc/core/policy/x.cc", '#include "policy/online.h"'),
        ("csrc/bindings/x.cc", '#include <pybind11/stl.h>\n#include "bindings.h"\n#include "gradcast/plan.h"'),
        ("csrc/engine/x.cc", '#include <thread>\n#include "gradcast/transport.h"\n#include "gradcast/plan.h"'),
        ("csrc/sim/x.cc", '#include <queue>\n#include "follower.h"\n#include "gradcast/sim.h"'),
        ("csrc/bindings/x.cc", '#include "gradcast/inproc.h"\n#include "host_memory.h"'),
        ("tests/engine/x_test.cc", '#include "follower.h"\n#include "gradcast/inproc.h"\n#include "refusals.h"'),
        ("csrc/torch/x.cc", "#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>"),
        ("csrc/transport/mpi/x.cc", '#include <mpi.h>\n#include "gradcast/transport.h"\n#include "gradcast/error.h"'),
        ("tests/core/x_test.cc", '#include <gtest/gtest.h>\n#include <chrono>\n#include "problem.h"'),
        ("csrc/core/x.cc", 'std::snprintf(text, 5, "%d", 1);'),
    ],
)
def test_the_rule_lets_through_what_it_should(path, text):
    assert faults(path, text) == []


# --- Locks in one place: what is annotated there is checked by clang, what is locked elsewhere by nobody. ---

LOCKS = re.compile(r"\bstd::(\w*mutex|condition_variable\w*|\w*_lock|lock_guard|atomic\w*|\w*semaphore)\b")


def test_the_engine_locks_in_one_place_only():
    sources = [path for path in cxx_files() if path.startswith("csrc/engine/")]
    assert LOCKS.search((ROOT / "csrc/engine/sync.h").read_text())
    found = [
        f"{path} uses {match[0]}"
        for path in sources
        if path != "csrc/engine/sync.h"
        for match in LOCKS.finditer((ROOT / path).read_text())
    ]
    assert not found


# --- Every source is built: a test outside the build is dead. ---

GLOB = re.compile(r"file\(GLOB\s+\w+\s+(?:CONFIGURE_DEPENDS\s+)?([^)]*)\)")
SOURCE_NAME = re.compile(r"[\w./${}]+\.cc\b")


def built_files() -> set[str]:
    built: set[Path] = set()
    for listfile in ROOT.rglob("CMakeLists.txt"):
        if listfile.relative_to(ROOT).parts[0].startswith((".venv", "build")):
            continue
        folder, text = listfile.parent, re.sub(r"#.*", "", listfile.read_text())
        for patterns in GLOB.findall(text):
            for pattern in patterns.split():
                built |= set(folder.glob(pattern))
        built |= {folder / name for name in SOURCE_NAME.findall(GLOB.sub("", text))}
    # What the package compiles by itself, for the torch that it meets.
    built |= set(runpy.run_path(str(ROOT / "python/gradcast/training/compat/native_build.py"))["files"](ROOT))
    # What a test compiles with torch's headers, which CMake does not know.
    tests = "".join(path.read_text() for path in (ROOT / "tests/training").glob("test_*.py"))
    built |= {path for path in (ROOT / "tests/training").glob("*.cc") if f'"{path.name}"' in tests}
    return {str(path.relative_to(ROOT)) for path in built if path.exists() and path.suffix == ".cc"}


def test_every_source_is_in_the_build():
    sources = {path for path in cxx_files() if path.endswith(".cc")}
    missing = sorted(sources - built_files())
    assert not missing, f"in no CMakeLists.txt, and not compiled by native_build.py: {missing}"


def test_every_test_file_is_named_as_one():
    """A file with TEST( that is not called *_test.cc hides from people who look for tests."""
    for path in cxx_files():
        if path.endswith(".cc") and re.search(r"^TEST(_F|_P)?\(", (ROOT / path).read_text(), re.MULTILINE):
            assert path.endswith("_test.cc"), path


# --- Python: imports inside gradcast.training go down only, and nobody outside imports a step's parts. ---

TRAINING = "gradcast.training"
# From the top down. A module may import from its own folder and from those after it.
ORDER = ("", "plan", "step", "measure", "ranks", "compat")
LEAVES = {"options"}  # modules of the top that every folder may import


def python_files() -> dict[str, str]:
    root = ROOT / "python"
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
        for path in sorted((root / "gradcast").rglob("*.py"))
    }


def imported_modules(text: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def folder_of(module: str) -> str:
    """The folder of gradcast.training that a module lies in; "" is its top."""
    first = module.removeprefix(TRAINING + ".").split(".")[0]
    return first if first in ORDER else ""


def upward_imports(module: str, text: str) -> list[str]:
    own = ORDER.index(folder_of(module))
    return [
        f"{module} imports {name}"
        for name in sorted(imported_modules(text))
        if name.startswith(TRAINING + ".") and name.split(".")[2] not in LEAVES and ORDER.index(folder_of(name)) < own
    ]


def test_training_imports_go_down_only():
    files = {module: text for module, text in python_files().items() if module.startswith(TRAINING + ".")}
    assert {folder_of(module) for module in files} == set(ORDER)
    found = [fault for module, text in files.items() for fault in upward_imports(module, text)]
    assert not found, "\n".join(found)


def test_only_training_knows_the_parts_of_a_step():
    found = [
        f"{module} imports {name}"
        for module, text in python_files().items()
        if not module.startswith(TRAINING)
        for name in imported_modules(text)
        if name.startswith(TRAINING + ".step")
    ]
    assert not found


def test_options_is_a_leaf():
    names = imported_modules(python_files()[f"{TRAINING}.options"])
    assert not [name for name in names if name.startswith(TRAINING)]


@pytest.mark.parametrize(
    ("module", "text", "is_allowed"),
    [
        ("step.x", "from gradcast.training.plan import agreement", False),
        ("step.x", "from gradcast.training.session import Session", False),
        ("ranks.x", "from gradcast.training.measure.step_trace import Trace", False),
        ("compat.x", "from gradcast.training import preflight", False),
        ("compat.x", "def f():\n    from gradcast.training.ranks.group import Group", False),
        ("plan.x", "from gradcast.training.step.pending import mark", True),
        ("compat.x", "from gradcast.training.options import Options", True),
        ("session", "from gradcast.training.plan import agreement", True),
    ],
)
def test_the_rule_for_training_has_teeth(module, text, is_allowed):
    assert (not upward_imports(f"{TRAINING}.{module}", text)) == is_allowed
