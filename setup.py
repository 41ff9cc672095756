"""Builds the extension module gradcast._core with CMake; everything else about the package is in pyproject.toml.

The build needs a C++20 compiler and nothing of torch, so one build serves every torch version, and none. The part for
torch (`_c10d`, csrc/transport/torch) is shipped as source, which gradcast.training.compat.extension compiles when
training begins. Where torch can be seen already (pip install --no-build-isolation), it is compiled at once and put
beside _core.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
# Modules of the package that can be loaded by themselves, before there is a package.
COMPAT = ROOT / "python/gradcast/training/compat"


def read_version() -> str:
    text = (ROOT / "include/gradcast/version.h").read_text()
    return re.search(r'GRADCAST_VERSION "([^"]+)"', text).group(1)


def build_tools() -> dict[str, str]:
    """The tools and headers of the packages in [build-system].requires, as CMake cache entries.

    All are given at each configuration: under build isolation they lie in a new folder each time, and a cached path
    of the last one no longer exists.
    """
    import ninja
    import nlohmann_json
    import pybind11

    json_include = nlohmann_json.get_include()
    return {
        "pybind11_DIR": pybind11.get_cmake_dir(),
        "NLOHMANN_JSON_HINT": str(json_include),
        "NLOHMANN_JSON_INCLUDE_DIR": str(json_include),
        "CMAKE_MAKE_PROGRAM": str(Path(ninja.BIN_DIR) / "ninja"),
        "Python_EXECUTABLE": sys.executable,
    }


def cmake(*arguments: str) -> None:
    try:
        subprocess.run(["cmake", *arguments], check=True)
    except FileNotFoundError:
        sys.exit("gradcast: cmake is missing; without build isolation: pip install cmake ninja pybind11 nlohmann-json")
    except subprocess.CalledProcessError as error:
        sys.exit(f"gradcast: building the C++ part failed (cmake exit code {error.returncode}); its messages are above")


def configuration(build_dir: str, entries: dict[str, str]) -> tuple[str, ...]:
    given = shlex.split(os.environ.get("CMAKE_ARGS", ""))  # last, so that it decides
    defined = (f"-D{key}={value}" for key, value in entries.items())
    return ("-S", str(ROOT), "-B", build_dir, "-G", "Ninja", *defined, *given)


def load_alone(name: str) -> ModuleType:
    """A module of gradcast.training without the package around it, which needs _core."""
    spec = importlib.util.spec_from_file_location(name, COMPAT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class SourcesToo(build_py):
    """Copies what `_c10d` is compiled from into the package, as gradcast/native."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # there the tree itself is at hand
            # The build folder may be that of an earlier build, which setuptools would pack as it is.
            shutil.rmtree(Path(self.build_lib) / "gradcast" / "native", ignore_errors=True)
            for source, target in self.native_files().items():
                self.mkpath(str(Path(target).parent))
                self.copy_file(str(source), target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *self.native_files().values()]

    def native_files(self) -> dict[Path, str]:
        native = Path(self.build_lib) / "gradcast" / "native"
        files = load_alone("native_build").files(ROOT)
        return {path: str(native / path.relative_to(ROOT)) for path in files}


class CMakeBuild(build_ext):
    def run(self) -> None:
        super().run()
        if self.inplace or self.editable_mode:  # the sources will change; they are compiled into the cache
            return
        for left_over in Path(self.build_lib).glob("gradcast/_c10d.torch-*"):
            left_over.unlink()
        if importlib.util.find_spec("torch"):
            self.build_for_torch()

    def build_for_torch(self) -> None:
        import torch

        native_build = load_alone("native_build")
        target = Path(self.build_lib).resolve() / "gradcast" / native_build.installed_name(torch.__version__)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            native_build.build(ROOT, target)
        except native_build.BuildError as error:
            # Planning works without it, and training says the same sentence when it begins.
            print(f"gradcast: warning: the part for torch was left out: {error}", file=sys.stderr)

    def build_extension(self, extension: Extension) -> None:
        target = Path(self.get_ext_fullpath(extension.name)).resolve()
        # The Makefile has a build folder of its own, with tests, and names it here: nothing is compiled twice. Its
        # module lies in the tree.
        shared_dir = os.environ.get("GRADCAST_BUILD_DIR")
        if shared_dir:
            cmake("--build", shared_dir, "--target", "_core")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / "python/gradcast" / target.name, target)
            return
        build_dir = str(Path(self.build_temp).resolve())
        entries = {
            **build_tools(),
            "CMAKE_BUILD_TYPE": "Release",
            # Each compiler warns of other things; that must not keep anyone from installing.
            "GRADCAST_WERROR": "OFF",
            "GRADCAST_BUILD_TESTS": "OFF",
            "GRADCAST_BUILD_BENCHMARKS": "OFF",
        }
        module = {"GRADCAST_MPI": "OFF", "GRADCAST_CUDA": "OFF", "GRADCAST_PYTHON_OUTPUT_DIR": str(target.parent)}
        cmake(*configuration(build_dir, entries | module))
        cmake("--build", build_dir, "--target", "_core")
        self.build_bench(f"{build_dir}-bench", entries, target.parent / "bin")

    def build_bench(self, build_dir: str, entries: dict[str, str], folder: Path) -> None:
        """gradcast-bench, with MPI, CUDA and NCCL where they are at hand. Everything else works without it."""
        entries = entries | {"GRADCAST_BUILD_PYTHON": "OFF"}
        for given in ({}, {"GRADCAST_CUDA": "OFF"}):  # a toolkit that cannot build it must not take the rest along
            commands = configuration(build_dir, entries | given), ("--build", build_dir, "--target", "gradcast-bench")
            if all(subprocess.run(["cmake", *each], check=False).returncode == 0 for each in commands):
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy2(Path(build_dir) / "csrc/bench/gradcast-bench", folder / "gradcast-bench")
                return
        print("gradcast: warning: gradcast-bench could not be built and is left out", file=sys.stderr)


setup(
    version=read_version(),
    ext_modules=[Extension("gradcast._core", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "build_py": SourcesToo},
)
