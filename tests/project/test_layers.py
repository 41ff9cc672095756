"""Reads the includes of every C++ file and fails if a layer uses what it may not (docs/internals/architecture.md).

The table below is the rule. A new folder under csrc needs a line in it.
"""

import ast
import graphlib
import re
import runpy
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tree import files, files_in

from conftest import ROOT

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)

# Which layer a public header belongs to; every other one is the core's.
PUBLIC_LAYER = {
    "engine.h": "engine",
    "inproc.h": "transport",
    "mpi.h": "transport",
    "nccl.h": "transport",
    "transport.h": "transport",
}
# Public headers that carry nothing but words, errors and an interface, which even a transport may use.
WORDS = {"gradcast/types.h", "gradcast/error.h", "gradcast/gradient_sink.h"}

# Standard headers that a pure layer has no use for: threads, clocks, randomness, printing, files.
IMPURE = {
    "atomic", "barrier", "chrono", "condition_variable", "ctime", "filesystem", "fstream", "future", "iostream",
    "latch", "mutex", "ostream", "print", "random", "semaphore", "shared_mutex", "stop_token", "syncstream", "thread",
}  # fmt: skip
# Words that reach the environment, the clock or the terminal without a header of their own.
IMPURE_WORDS = re.compile(r"\b(getenv|std::rand|srand|printf|fprintf|puts|std::cout|std::cerr|std::time)\b")


@dataclass(frozen=True)
class Layer:
    public: str  # layers whose public headers it may include
    # What else it may include: beginnings of other libraries' headers, and folders and files with private headers.
    others: str = ""
    pure: bool = False
    words_only: bool = False  # of the core's public headers, only WORDS


TRANSPORT, LIVE = "core transport", "core engine transport"
SHARED = "csrc/transport/common/ csrc/platform/"  # what every transport may use

LAYERS = {
    "include/gradcast": Layer(LIVE, "mpi.h"),
    # The core, from the bottom up. A folder of it that is not named here is in no layer.
    "csrc/core/model": Layer("core", "nlohmann/", pure=True),
    "csrc/core/cost": Layer("core", "csrc/core/model/", pure=True),
    "csrc/core/policies": Layer("core", "csrc/core/model/ csrc/core/cost/", pure=True),
    "csrc/core/planner": Layer("core", "csrc/core/cost/ csrc/core/policies/", pure=True),
    "csrc/core/adapt": Layer("core", pure=True),
    "csrc/platform": Layer("", "pthread.h sys/prctl.h dlfcn.h"),
    "csrc/transport/common": Layer(TRANSPORT, "csrc/platform/", words_only=True),
    "csrc/transport/inproc": Layer(TRANSPORT, SHARED, words_only=True),
    "csrc/transport/mpi": Layer(TRANSPORT, f"mpi.h {SHARED}", words_only=True),
    "csrc/transport/nccl": Layer(TRANSPORT, f"nccl.h cuda_runtime {SHARED}", words_only=True),
    "csrc/transport/torch": Layer(
        TRANSPORT, f"torch/ c10/ ATen/ pybind11/ structmember.h csrc/bindings/capsule.h {SHARED}", words_only=True
    ),
    "csrc/engine": Layer(LIVE, "csrc/platform/"),
    "csrc/cuda": Layer("", "cuda"),
    # parts.h is written by CMake from parts.h.in.
    "csrc/bench": Layer(LIVE, f"nlohmann/ mpi.h cuda_runtime getopt.h unistd.h csrc/cuda/ parts.h {SHARED}"),
    "csrc/bindings": Layer(LIVE, "pybind11/"),
    "tests/support": Layer(TRANSPORT, "gtest/"),
    "tests/bench": Layer("", "gtest/ nlohmann/ csrc/bench/run.h csrc/cuda/spin.h tests/transport/nccl/"),
    "tests/bindings": Layer(TRANSPORT, "pybind11/ csrc/bindings/ tests/support/ csrc/bench/transport_driver.h"),
    "tests/core": Layer("core", "gtest/ gmock/ nlohmann/ csrc/core/ tests/support/"),
    "tests/engine": Layer(LIVE, f"gtest/ pthread.h unistd.h csrc/engine/ tests/core/ tests/support/ {SHARED}"),
    "tests/sim/simulator": Layer("core", "csrc/engine/follower.h", pure=True),
    "tests/sim": Layer(
        "core", "gtest/ tests/sim/simulator/ tests/core/ tests/engine/ tests/support/ csrc/engine/follower.h"
    ),
    "tests/transport/inproc": Layer(TRANSPORT, "gtest/ csrc/transport/common/ tests/core/ tests/support/"),
    "tests/transport/mpi": Layer(TRANSPORT, "gtest/ mpi.h pybind11/ tests/bindings/ tests/support/"),
    "tests/transport/nccl": Layer(TRANSPORT, f"gtest/ nccl.h cuda_runtime tests/support/ {SHARED}"),
    "tests/training": Layer(TRANSPORT, "torch/ c10/ pybind11/ dlfcn.h pthread.h csrc/transport/torch/ csrc/bindings/"),
    "tests/nccl_mirror": Layer("", "gtest/ benchmarks/nccl_mirror/"),
    "tests/fuzz": Layer("core", "fuzzer/ csrc/core/"),
    "benchmarks": Layer(
        LIVE,
        "benchmark/ csrc/core/ tests/core/ csrc/bench/instant_transport.h csrc/transport/torch/int8_group.h",
    ),
    "benchmarks/nccl_mirror": Layer("", "cuda nccl.h"),
}

# Of a layer that is not pure, what the simulator runs too.
PURE_FILES = {"csrc/engine/follower.h", "csrc/engine/follower.cc"}

# A private header is named from the include root of its target, never from the folder of the file that includes it.
CORE_USERS = ("csrc/core/", "tests/core/", "tests/fuzz/", "benchmarks/")


def private_header(path: str, name: str) -> str | None:
    """Where the header lies that ``path`` includes as "name"."""
    roots = ["csrc/core"] if path.startswith(CORE_USERS) else []
    if not path.startswith("csrc/core/"):
        roots.append("csrc")
    if path.startswith(("tests/", "benchmarks/")):
        roots.append(".")
    return next((str(Path(root, name)) for root in roots if (ROOT / root / name).exists()), None)


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
        if owner not in layer.public.split():
            return f"{folder} may not reach {owner}"
        if owner == "core" and layer.words_only and name not in WORDS:
            return f"{folder} may use of the core only {', '.join(sorted(WORDS))}"
        return None
    header = private_header(path, name) or name if quote == '"' else name
    if header.startswith(tuple(layer.others.split())) or layer_of(header) == folder:
        return None
    if quote == '"' or "/" in name or "." in name:
        return f"{folder} may use only {layer.others}"
    if layer.pure and name in IMPURE:
        return f"{folder} is pure: no threads, clocks, randomness, files or printing"
    return None


def cxx_files() -> list[str]:
    folders = ("include", "csrc", "tests", "benchmarks")
    paths = (path for folder in folders for path in files_in(folder, ".h", ".cc", ".cu", ".cuh"))
    return sorted(str(path.relative_to(ROOT)) for path in paths)


def test_no_layer_reaches_where_it_may_not():
    files = cxx_files()
    assert len(files) > 30
    found = [fault for path in files for fault in faults(path, (ROOT / path).read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        # What is pure: headers, words, vendors, other layers.
        ("csrc/core/cost/x.cc", "#include <chrono>"),
        ("csrc/core/cost/x.cc", 'auto v = std::getenv("HOME");'),
        ("csrc/core/cost/x.cc", "#include <unistd.h>"),
        ("csrc/core/cost/x.cc", '#include "gradcast/engine.h"'),
        ("csrc/engine/follower.cc", "#include <chrono>"),
        # The core goes up only, and names headers from its root.
        ("csrc/core/cost/x.cc", '#include "planner/zigzag.h"'),
        ("csrc/core/cost/x.cc", '#include "problem.h"'),
        # Public headers, and private ones of other layers.
        ("include/gradcast/x.h", "#include <nlohmann/json.hpp>"),
        ("tests/sim/simulator/x.cc", '#include "engine/loop.h"'),
        ("csrc/engine/x.cc", '#include "tests/sim/simulator/simulate.h"'),
        ("csrc/bindings/x.cc", '#include "engine/loop.h"'),
        # Transports know words and errors of the core, their vendor, and what they share.
        ("csrc/transport/mpi/x.cc", '#include "gradcast/plan.h"'),
        ("csrc/transport/mpi/x.cc", "#include <nccl.h>"),
        ("csrc/transport/inproc/x.cc", '#include "gradcast/engine.h"'),
        ("csrc/transport/torch/x.cc", '#include "transport/nccl/calls.h"'),
        # A folder in no layer.
        ("csrc/novel/x.cc", "#include <vector>"),
    ],
)
def test_the_rule_has_teeth(path, text):
    assert faults(path, text)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("csrc/core/planner/x.cc", '#include <vector>\n#include "policies/online.h"\n#include "planner/zigzag.h"'),
        ("csrc/transport/mpi/x.cc", '#include <mpi.h>\n#include <thread>\n#include "gradcast/error.h"'),
        ("csrc/core/cost/x.cc", 'std::snprintf(text, 5, "%d", 1);'),
    ],
)
def test_the_rule_lets_through_what_it_should(path, text):
    assert faults(path, text) == []


# --- Locks in one place: what is annotated there is checked by clang, what is locked elsewhere by nobody. ---

LOCKS = re.compile(r"\bstd::(\w*mutex|condition_variable\w*|\w*_lock|lock_guard|atomic\w*|\w*semaphore)\b")


def test_locks_stand_in_one_place_only():
    sources = [path for path in cxx_files() if path.startswith("csrc/")]
    assert LOCKS.search((ROOT / "csrc/platform/sync.h").read_text())
    found = [
        f"{path} uses {match[0]}"
        for path in sources
        if path != "csrc/platform/sync.h"
        for match in LOCKS.finditer((ROOT / path).read_text())
    ]
    assert not found


# --- Every source is built: a test outside the build is dead. ---

GLOB = re.compile(r"file\(GLOB\s+\w+\s+(?:CONFIGURE_DEPENDS\s+)?([^)]*)\)")
SOURCE_NAME = re.compile(r"[\w./${}]+\.cc\b")


def built_files() -> set[str]:
    built: set[Path] = set()
    for listfile in (path for path in files() if path.name == "CMakeLists.txt"):
        folder, text = listfile.parent, re.sub(r"#.*", "", listfile.read_text())
        for patterns in GLOB.findall(text):
            for pattern in patterns.split():
                built |= set(folder.glob(pattern))
        built |= {folder / name for name in SOURCE_NAME.findall(GLOB.sub("", text))}
    # What the package compiles by itself, for the torch that it meets.
    built |= set(runpy.run_path(str(ROOT / "python/gradcast/training/compat/native_build.py"))["files"](ROOT))
    # What a test compiles with torch's headers, which CMake does not know.
    tests = "".join(path.read_text() for path in files_in("tests/training", ".py") if path.name.startswith("test_"))
    built |= {path for path in files_in("tests/training", ".cc") if f'"{path.name}"' in tests}
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


# --- Python: no circles, who uses which package, and imports inside training and diagnosis go down only. ---

# What is used by all that trains: groups of ranks and their hosts, torch's hooks and wrappers, the native part.
RANKS = "training.ranks.group training.ranks.group_pool training.ranks.hosts training.compat"
# Beside its own and the modules that lie directly in gradcast, a package uses these: packages, modules or single names.
USES = {
    "comparison": "",
    "scaling": "comparison",
    "training": "comparison scaling",
    "training.handle": "comparison scaling snapshots",  # handle.snapshots()
    "snapshots": f"training.state {RANKS}",
    "diagnosis": f"comparison scaling training.observe training.Handle training.Options training.Watch {RANKS}",
    # The link that training would fit: its samples, its fit, and its measurement of packing.
    "diagnosis.network.bench": f"training.measure.network_cost training.measure.stopwatch {RANKS}",
    "frameworks": f"snapshots training.state training.Handle training.Options training.attach.attach_inside "
    f"training.attach.attach_to_quorum training.attached_modules.detach_left training.sessions.quorum.Plans "
    f"training.called_clipping {RANKS}",
    "lab": "comparison training.observe",
    "plots": "comparison scaling lab",
    "cli": f"comparison scaling diagnosis plots lab {RANKS}",
}
BINARY = {"gradcast._core", "gradcast._c10d"}  # they import nothing of ours

TRAINING, DIAGNOSIS = "gradcast.training", "gradcast.diagnosis"
# Folders from the top ("") down. A module may import from its own folder and from those after it.
ORDERS = {
    TRAINING: ("", "plan", "step", "measure", "ranks", "compat"),
    DIAGNOSIS: ("", "report", "analyze", "probe", "observe", "network", "trace"),
}
LEAVES = {TRAINING: "options", DIAGNOSIS: "runs"}  # modules of the top that every folder may import
# Folders of diagnosis that need no torch, except for the annotations of a type checker.
WITHOUT_TORCH = ("analyze", "report", "trace")


def imported_modules(text: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """What each module of gradcast imports."""
    root = ROOT / "python"
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): imported_modules(
            path.read_text()
        )
        for path in files_in("python/gradcast", ".py")
    }


def module_of(name: str, modules: Collection[str]) -> str:
    """The module that an import of this name runs; "" for another library's."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules of which each imports the one before it; empty if there are none."""
    known = {*imports, *BINARY}
    graph = {module: {module_of(name, known) for name in names} - {module, ""} for module, names in imports.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def is_in(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"gradcast.{package}.")


def forbidden_uses(module: str, names: set[str]) -> list[str]:
    """The imports of packages of ours that USES does not allow to a module."""
    row = max((each for each in USES if is_in(module, each)), key=len, default="")
    allowed = [*row.split(".")[:1], *USES.get(row, "").split()]
    return [
        f"{module} imports {name}"
        for name in sorted(names)
        if any(is_in(name, each) for each in USES) and not any(is_in(name, each) for each in allowed)
    ]


def test_no_module_imports_itself_by_way_of_others(imports):
    """Also inside of functions, and for annotations only."""
    assert not circle(imports)


def test_packages_use_only_what_is_meant_for_them(imports):
    assert {each.split(".")[0] for each in USES} == {each.split(".")[1] for each in imports if each.count(".") > 1}
    shows = ("gradcast", "gradcast.__main__")  # names of all packages, and the command line
    assert not [
        each for module, names in imports.items() if module not in shows for each in forbidden_uses(module, names)
    ]


@pytest.mark.parametrize(
    "text",
    [
        "from gradcast.y import g",
        "def f():\n    from gradcast import y",
        "if TYPE_CHECKING:\n    import gradcast.y",
    ],
)
def test_a_circle_is_found(text):
    others = {"gradcast": {"gradcast.x"}, "gradcast.y": {"gradcast.x"}, "gradcast.y.z": {"gradcast.x"}}
    assert circle(others | {"gradcast.x": {"gradcast._core.Plan", "torch.nn", "gradcast.x"}}) == []
    assert set(circle(others | {"gradcast.x": imported_modules(text)})) == {"gradcast.x", "gradcast.y"}


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("snapshots.x", "training.sessions.session.Session"),
        ("snapshots.x", "training.handle.Handle"),
        ("diagnosis.probe.x", "training.attach.attach_inside"),
        ("diagnosis.probe.x", "training.state"),
        ("lab.x", "training.measure.compute_cost"),
        ("frameworks.x", "training.acceptance.accept"),
        ("training.sessions.x", "snapshots.start"),
        ("comparison.x", "training.observe"),
        ("alarms", "training.observe"),
        ("cli.x", "training.observe"),
    ],
)
def test_the_rule_for_packages_has_teeth(module, name):
    assert forbidden_uses(f"gradcast.{module}", {f"gradcast.{name}"})


def rank(package: str, module: str) -> int:
    """The place, in the package's order of layers, of the folder that the module lies in."""
    first = module.removeprefix(package + ".").split(".")[0]
    return ORDERS[package].index(first) if first in ORDERS[package] else 0


def upward_imports(package: str, module: str, names: set[str]) -> list[str]:
    return [
        f"{module} imports {name}"
        for name in sorted(names)
        if name.startswith(package + ".")
        and name.split(".")[2] != LEAVES[package]
        and rank(package, name) < rank(package, module)
    ]


@pytest.mark.parametrize("package", ORDERS)
def test_imports_go_down_only(imports, package):
    modules = [module for module in imports if module.startswith(package + ".")]
    assert {rank(package, module) for module in modules} == set(range(len(ORDERS[package])))
    assert not [fault for module in modules for fault in upward_imports(package, module, imports[module])]
    leaf = imports[f"{package}.{LEAVES[package]}"]
    assert not [name for name in leaf if name.startswith(package)]


def test_analysis_and_reports_do_not_import_torch(imports):
    folders = tuple(f"{DIAGNOSIS}.{folder}" for folder in WITHOUT_TORCH)
    found = [(module, name) for module, names in imports.items() if module.startswith(folders) for name in names]
    assert not [(module, name) for module, name in found if name.split(".")[0] == "torch" or name.startswith(TRAINING)]


@pytest.mark.parametrize(
    ("module", "text", "is_allowed"),
    [
        ("training.step.x", "from gradcast.training.plan import agreement", False),
        ("training.step.x", "from gradcast.training.sessions.session import Session", False),
        ("training.compat.x", "def f():\n    from gradcast.training.ranks.group import Group", False),
        ("training.plan.x", "from gradcast.training.step.pending import mark", True),
        ("training.compat.x", "from gradcast.training.options import Options", True),
        ("training.sessions.session", "from gradcast.training.plan import agreement", True),
        ("diagnosis.probe.x", "from gradcast.diagnosis.analyze import timelines", False),
        ("diagnosis.report.html.x", "from gradcast.diagnosis.doctor import Doctor", False),
        ("diagnosis.trace.x", "from gradcast.diagnosis.runs import TRACE", True),
        ("diagnosis.doctor", "from gradcast.diagnosis.report import text", True),
    ],
)
def test_the_rule_for_python_has_teeth(module, text, is_allowed):
    package = TRAINING if module.startswith("training") else DIAGNOSIS
    assert (not upward_imports(package, f"gradcast.{module}", imported_modules(text))) == is_allowed


# --- Tests use what the product shows: each private name that they know is one that cannot be changed freely. ---

PRIVATE_USES_MAX = 40
# Private names of other libraries that gradcast happens to use as well.
NOT_OURS = {"_actions", "_replace", "_timeout"}


def private_names(text: str) -> set[str]:
    """Those that a module of ours gives to attributes, functions and classes."""
    nodes = list(ast.walk(ast.parse(text)))
    stored = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    stored |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    stored |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return {name for name in stored - NOT_OURS if name.startswith("_") and not name.endswith("__")}


def private_uses(text: str, names: Collection[str]) -> Iterator[ast.Attribute]:
    """Where the text asks something else than ``self``, ``cls`` and torch for one of the names."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Attribute) or node.attr not in names:
            continue
        whole = ast.unparse(node.value)
        if whole not in ("self", "cls") and not re.match(r"(torch|os|sys)\b", whole):
            yield node


def test_tests_use_few_private_names():
    names = set().union(*(private_names(path.read_text()) for path in files_in("python/gradcast", ".py")))
    assert "_session" in names
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
        for path in files_in("tests", ".py")
        for node in private_uses(path.read_text(), names)
    ]
    assert len(found) <= PRIVATE_USES_MAX, "\n".join(found)
    assert not [each for each in found if each.endswith("._session")]


def test_private_uses_are_found():
    text = "self._a; cls._a; torch.nn._a; handle._b; handle._a; self.x._a.y; torch_like._a"
    assert {ast.unparse(node) for node in private_uses(text, {"_a"})} == {"handle._a", "self.x._a", "torch_like._a"}
