"""The compiled parts of gpu_check.py's checks: built on one machine, carried to another one, used there as they are.

    python -m benchmarks.gpu_kit [--arch 90] [--python python3.12 ...] [--kit build-gpu/kit]

Builds into one folder, which may have at most 64 MiB: the programs and the mirror of NCCL for one architecture, and for
each of these Pythons (default: the one that runs this) gradcast's two modules, for the torch that is installed here.
`make gpu-kit` does this. Needs nvcc, GoogleTest, cmake, pybind11, nlohmann-json, NCCL (torch's) and each Python's
headers; a Python needs no torch of its own. On the machine with the GPU the modules load if it has that torch and that
Python. ``--modules-only`` builds nothing else, for there.

The folder remembers its C++ sources; with others it is refused.
"""

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build-gpu"
KIT = BUILD / "kit"
SIZE_MAX = 64 << 20  # what a machine with a GPU takes along with a command
SOURCES = (
    "CMakeLists.txt",
    "cmake",
    "csrc",
    "include",
    "benchmarks/nccl_mirror",
    "tests/transport/nccl",
    "tests/support",
)
CPP = (".cc", ".cu", ".h", ".in", ".txt", ".cmake")
_PROGRAMS = {  # target: what is built, in the build folder, and its place in the kit
    "nccl_device_test": ("tests/nccl_device_test", "bin/nccl_device_test"),
    "gradcast-bench": ("csrc/bench/gradcast-bench", "bin/gradcast-bench"),
    "nccl_mirror": ("benchmarks/nccl_mirror/libnccl.so.2", "lib/libnccl.so.2"),
}


class KitError(Exception):
    """Error whose text says what is wrong with the kit, and what to do."""


def digest(names: Iterable[str], suffixes: Collection[str]) -> str:
    """A hash of these files of the tree, and of the files with such names in these folders."""
    found = hashlib.sha256()
    for name in names:
        path = ROOT / name
        files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.suffix in suffixes)
        for each in files:
            found.update(f"{each.relative_to(ROOT)} {each.stat().st_size}\n".encode() + each.read_bytes())
    return found.hexdigest()[:12]


def nvidia_folder(*parts: str) -> Path | None:
    """A folder of the libraries that torch brings along."""
    spec = importlib.util.find_spec("nvidia")
    places = [] if spec is None else [Path(each, *parts) for each in spec.submodule_search_locations or ()]
    return next((each for each in places if each.is_dir()), None)


# --- Building ---


def build(kit: Path, arch: str, pythons: Iterable[str]) -> None:
    _build_programs(kit, arch)
    for python in pythons:
        build_modules(kit, python)
    shutil.rmtree(kit / "site", ignore_errors=True)  # made anew where the kit is used
    size = sum(each.stat().st_size for each in kit.rglob("*") if each.is_file())
    print(f"{kit}: {size / (1 << 20):.1f} MiB")
    if size > SIZE_MAX:
        raise KitError(f"{kit} has {size / (1 << 20):.1f} MiB, more than the {SIZE_MAX >> 20} that can be carried")


def _build_programs(kit: Path, arch: str) -> None:
    settings = {"CUDA": "ON", "BUILD_PYTHON": "OFF", "BUILD_BENCHMARKS": "OFF"}
    entries = {"CMAKE_CUDA_ARCHITECTURES": f"{arch}-real"}
    if nccl := nvidia_folder("nccl"):
        entries |= {"NCCL_INCLUDE_DIR": str(nccl / "include"), "NCCL_LIBRARY": str(nccl / "lib/libnccl.so.2")}
    _cmake(BUILD / "programs", kit, settings, entries, _PROGRAMS)
    for source, place in _PROGRAMS.values():
        target = kit / place
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(BUILD / "programs" / source, target)
        subprocess.run(["strip", target], check=False)
    headers = kit / "include/nlohmann"  # for --modules-only elsewhere
    if not headers.exists():
        shutil.copytree(_json_headers(kit) / "nlohmann", headers)
    shutil.copytree(ROOT / "python/gradcast/data", kit / "data", dirs_exist_ok=True)  # where gradcast-bench looks
    (kit / "sources").write_text(digest(SOURCES, CPP) + "\n", encoding="utf-8")


def build_modules(kit: Path, python: str) -> None:
    """For this Python, and for the torch of the one that runs this."""
    suffix, include = _of_python(python)
    modules = kit / "modules"
    modules.mkdir(parents=True, exist_ok=True)
    settings = {"BUILD_TESTS": "OFF", "BUILD_BENCHMARKS": "OFF", "BUILD_BENCH": "OFF", "CUDA": "OFF", "MPI": "OFF"}
    entries = {"pybind11_DIR": _output(sys.executable, "-m", "pybind11", "--cmakedir")}
    entries |= {"Python_EXECUTABLE": _which(python), "GRADCAST_PYTHON_OUTPUT_DIR": str(modules)}
    _cmake(BUILD / f"modules{suffix}", kit, settings, entries, ["_core"])
    native_build = _native_build()
    target = modules / native_build.installed_name(_torch_version(), suffix)
    print(f"building {target.name}", flush=True)
    try:
        native_build.build(ROOT, target, include)
    except native_build.BuildError as error:
        raise KitError(str(error)) from None


def _cmake(folder: Path, kit: Path, settings: dict[str, str], entries: dict[str, str], targets: Iterable[str]) -> None:
    entries = {"CMAKE_BUILD_TYPE": "Release", "NLOHMANN_JSON_HINT": str(_json_headers(kit)), **entries}
    defined = [f"-DGRADCAST_{name}={value}" for name, value in settings.items()]
    defined += [f"-D{name}={value}" for name, value in entries.items()]
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    jobs = str(len(os.sched_getaffinity(0)))
    for command in (
        ["-S", str(ROOT), "-B", str(folder), *generator, *defined],
        ["--build", str(folder), "--parallel", jobs, "--target", *targets],
    ):
        if subprocess.run(["cmake", *command], check=False).returncode != 0:
            raise KitError(f"cmake has failed; its messages are above; what it has built is kept in {folder}")


def _json_headers(kit: Path) -> Path:
    if importlib.util.find_spec("nlohmann_json"):
        import nlohmann_json

        return Path(nlohmann_json.get_include())
    return kit / "include"


def _native_build() -> Any:
    """The module of gradcast without the package around it, which needs what is built here."""
    path = ROOT / "python/gradcast/training/compat/native_build.py"
    spec = importlib.util.spec_from_file_location("native_build", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _torch_version() -> str:
    """As torch says it, which takes seconds to import."""
    spec = importlib.util.find_spec("torch")
    if spec is None:
        raise KitError(f"{sys.executable} has no torch, for which the modules are built")
    told = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    return re.search(r"^__version__ = '([^']+)'", told, re.MULTILINE)[1]


def _which(python: str) -> str:
    found = shutil.which(python)
    if found is None:
        raise KitError(f"there is no {python} here; install it with its headers, or name another one with --python")
    return found


def _of_python(python: str) -> tuple[str, str]:
    """The suffix of its modules, and the folder of its headers."""
    program = "import sysconfig as s; print(s.get_config_var('EXT_SUFFIX'), s.get_path('include'))"
    suffix, include = _output(_which(python), "-c", program).split()
    if not Path(include, "Python.h").exists():
        raise KitError(f"the headers of {python} are missing: there is no {include}/Python.h")
    return suffix, include


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


# --- Using ---


def check_sources(kit: Path) -> None:
    path = kit / "sources"
    if not path.exists():
        raise KitError(f"there is no kit in {kit}: `make gpu-kit` builds one, on any machine with nvcc")
    if path.read_text(encoding="utf-8").strip() != digest(SOURCES, CPP):
        raise KitError(f"the kit in {kit} was built from other C++ sources than this tree's; `make gpu-kit` again")


def module_names() -> list[str]:
    """Files that this Python can load beside this torch."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return [f"_core{suffix}", _native_build().installed_name(_torch_version(), suffix)]


def site_of(kit: Path) -> Path:
    """A folder for PYTHONPATH: a copy of the package with the kit's modules, which leaves the tree as it is. Raises
    KitError if they do not load here."""
    check_sources(kit)
    wanted = module_names()
    here = f"this is Python {sys.version_info.major}.{sys.version_info.minor} with torch {_torch_version()}"
    remedy = f"build them with `make gpu-kit GPU_PYTHON=python3.{sys.version_info.minor}`, or here with --build"
    if missing := [name for name in wanted if not (kit / "modules" / name).exists()]:
        raise KitError(f"the kit in {kit} has no {' and no '.join(missing)}, and {here}; {remedy}")
    site = kit / "site"
    shutil.rmtree(site, ignore_errors=True)
    package = site / "python/gradcast"
    shutil.copytree(ROOT / "python/gradcast", package, ignore=shutil.ignore_patterns("*.so", "__pycache__", "bin"))
    (site / "examples").symlink_to(ROOT / "examples")  # as the package finds them in the tree
    for name in wanted:
        shutil.copy(kit / "modules" / name, package)
    program = "from gradcast.training.compat import extension; extension.load()"
    environment = os.environ | {"PYTHONPATH": str(package.parent)}
    told = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    if told.returncode != 0:
        why = told.stderr.strip().rpartition("\n")[2]
        raise KitError(f"the kit's modules do not load, and {here}: {why}; {remedy}")
    return package.parent


def library_path() -> str:
    """Folders with the libraries that torch brings along, for programs without torch."""
    folder = nvidia_folder()
    found = [] if folder is None else sorted(map(str, folder.glob("*/lib")))
    return os.pathsep.join([*found, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kit", type=Path, default=KIT, help="the folder (default: build-gpu/kit)")
    parser.add_argument("--arch", default="90", help="of the GPU: 80 is A100, 90 is H100 and H200 (default: 90)")
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="build the modules for these")
    parser.add_argument("--modules-only", action="store_true")
    args = parser.parse_args()
    try:
        if args.modules_only:
            for python in args.python:
                build_modules(args.kit.resolve(), python)
        else:
            build(args.kit.resolve(), args.arch, args.python)
    except KitError as error:
        print(f"gpu_kit: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
