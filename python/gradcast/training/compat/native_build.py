"""Compiles the module `_c10d` for the installed torch. Used by setup.py at install, and by `extension` later.

It imports nothing of gradcast, because setup.py runs before gradcast is installed, and torch only inside functions.
"""

import concurrent.futures
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path

MODULE_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
# The headers of other folders that csrc/transport/torch includes; a test compares this list with the sources.
HEADERS = (
    "include/gradcast/error.h",
    "include/gradcast/gradient_sink.h",
    "include/gradcast/transport.h",
    "include/gradcast/types.h",
    "csrc/bindings/capsule.h",
    "csrc/platform/capture.h",
    "csrc/platform/clock.h",
    "csrc/platform/sync.h",
    "csrc/platform/thread.h",
    "csrc/transport/common/completion_gate.h",
    "csrc/transport/common/host_memory.h",
    "csrc/transport/common/parts.h",
    "csrc/transport/common/range_map.h",
    "csrc/transport/common/stream_points.h",
)
_COMPILERS = ("c++", "g++", "clang++")
# O3: loops over gradients are vectorised.
_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden")
_WARNINGS = ("-Wall", "-Wextra", "-Wconversion", "-Wno-sign-conversion")
_LIBRARIES = ("-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python")
# The sources are compiled as this many units: most of the time of a small one is spent on torch's headers. The number
# is the same on all machines, so that everyone compiles what the tests have compiled. A unit takes about 30 s.
_UNITS = 4
_TIMEOUT_S = 600
_SHOWN_LINES = 15
_MODE = 0o755


class BuildError(Exception):
    """Error whose text says what is missing or what the compiler printed, and what to do."""


class NoCompilerError(BuildError):
    """Error where there is no compiler."""


def files(root: Path) -> list[Path]:
    """The module's sources. ``root``: the source tree, or the copy of its parts in an installed package."""
    headers = [root / name for name in HEADERS]
    own = root / "csrc/transport/torch"
    found = sorted(own.glob("*.cc")) + sorted(own.glob("*.h")) + headers
    missing = [path for path in headers if not path.exists()]
    if len(found) == len(headers) or missing:
        raise BuildError(f"the sources of the part for torch are not in {root}; install gradcast again")
    return found


def installed_name(torch_version: str, suffix: str = MODULE_SUFFIX) -> str:
    """The file name of a module built at install, beside _core. It names the torch and the Python that can load it."""
    return f"_c10d.torch-{torch_version}{suffix}"


def key(root: Path, torch_version: str) -> tuple[str, str | None]:
    """The name of a build, and that of the compiler that makes it, None if there is none here. The first is equal for
    equal sources, flags, torch, Python's ABI (in the suffix) and C library, the second for equal compilers and CPUs.
    Raises BuildError."""
    import torch

    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else ""
    of_torch = (torch.version.git_version, str(torch.compiled_with_cxx11_abi()))
    texts = (*_FLAGS, *_WARNINGS, *_LIBRARIES, *user_flags(), os.environ.get("CXX", ""), libc, *of_torch)
    sources = [part for path in files(root) for part in (path.name.encode(), path.read_bytes())]
    name = f"torch-{torch_version}{MODULE_SUFFIX.removesuffix('.so')}-{_digest([*sources, *map(str.encode, texts)])}"
    try:
        compiler = compiler_command()
    except NoCompilerError:
        return name, None
    return name, _digest([os.path.realpath(shutil.which(compiler[0])).encode(), _macros(compiler)])


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:16]


def _macros(compiler: list[str]) -> bytes:
    """The macros that this compiler defines with the flags of a build: among them its version, that of the C++ library,
    and the CPU's features that it uses. Our own flags name no CPU, but CXXFLAGS=-march=native does, or a compiler's
    wrapper, and then the build runs on CPUs like this one only."""
    command = [*compiler, *_FLAGS, *user_flags(), "-dM", "-E", "-x", "c++", "-"]
    return _run_one([], command, "#include <version>\n").encode()


def build(root: Path, target: Path, python_include: str | None = None) -> None:
    """Compiles into ``target``, which appears complete or not at all, writable by this user only. Raises BuildError.
    ``python_include``: the headers of another Python than this one, for which the module is then."""
    compiler = compiler_command()
    include_flags = _include_flags(root, python_include or sysconfig.get_path("include"))
    sources = [path for path in files(root) if path.suffix == ".cc"]
    sources.sort(key=lambda path: path.stat().st_size)
    units = list(filter(None, (sources[index::_UNITS] for index in range(_UNITS))))
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
        objects = [Path(folder) / f"{index}.o" for index in range(len(units))]
        compile_ = [*compiler, *_FLAGS, *_WARNINGS, *user_flags(), *include_flags, "-c", "-x", "c++", os.devnull]
        included = [[word for path in unit for word in ("-include", str(path))] for unit in units]
        _run([[*compile_, *unit, "-o", str(object_)] for unit, object_ in zip(included, objects, strict=True)])
        module = Path(folder) / target.name
        # No run path is needed: the torch that imports this module has already loaded these libraries.
        link_flags = [f"-L{_torch_folder() / 'lib'}", *_LIBRARIES, "-Wl,-s"]
        _run([[*compiler, "-shared", "-o", str(module), *map(str, objects), *link_flags]])
        module.chmod(_MODE)
        with module.open("rb") as file:
            os.fsync(file.fileno())  # after a crash of the host, its name would stand for an empty file
        module.replace(target)


def names_this_cpu() -> bool:
    """Returns whether the user's flags ask for the CPU at hand."""
    return any("native" in flag for flag in (*user_flags(), os.environ.get("CXX", "")))


def _words(variable: str) -> list[str]:
    try:
        return shlex.split(os.environ.get(variable, ""))
    except ValueError as error:
        raise BuildError(f"the environment variable {variable} is wrong: {error}; correct its quotes") from None


def user_flags() -> list[str]:
    return _words("CXXFLAGS")


def compiler_command() -> list[str]:
    chosen = _words("CXX")
    if chosen:
        if shutil.which(chosen[0]) is None:
            raise NoCompilerError(
                f"the C++ compiler {chosen[0]} of the environment variable CXX was not found; install it or change CXX"
            )
        return chosen
    for name in _COMPILERS:
        if shutil.which(name):
            return [name]
    raise NoCompilerError(
        f"no C++ compiler was found ({', '.join(_COMPILERS)}); install one that supports C++20, for instance g++, "
        "or name it with the environment variable CXX"
    )


def _include_flags(root: Path, python_include: str) -> list[str]:
    if not (Path(python_include) / "Python.h").exists():
        raise BuildError(
            f"Python's headers are missing ({python_include}/Python.h); install them: "
            "the package is called python3-dev on Debian and Ubuntu, python3-devel on Fedora"
        )
    # Other headers are system headers, so that only our own sources cause warnings.
    own = (f"-I{root / folder}" for folder in ("include", "csrc"))
    return [*own, "-isystem", str(_torch_folder() / "include"), "-isystem", python_include]


def _torch_folder() -> Path:
    # torch.utils.cpp_extension knows this too, but without CUDA it prints a warning.
    import torch

    return Path(torch.__file__).resolve().parent


def _run(commands: list[list[str]]) -> None:
    """Runs as many at a time as there are cores. Raises BuildError with the last lines of the first failure."""
    pool = concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    begun: list[subprocess.Popen] = []
    try:
        for _ in pool.map(functools.partial(_run_one, begun), commands):
            pass
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in begun:
            process.kill()
        pool.shutdown()


def _run_one(begun: list[subprocess.Popen], command: list[str], text: str = "") -> str:
    """Returns what the compiler prints; ``text``: its standard input."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True, errors="replace")
    begun.append(process)
    try:
        output = process.communicate(text, timeout=_TIMEOUT_S)[0]
    except subprocess.TimeoutExpired:
        raise BuildError(f"the C++ compiler did not end within {_TIMEOUT_S} s: {shlex.join(command)}") from None
    if process.returncode != 0:
        last = "\n".join(output.splitlines()[-_SHOWN_LINES:])
        raise BuildError(
            f"compiling the part for torch failed (exit code {process.returncode} of {command[0]}); "
            f"it needs a compiler that supports C++20. The last lines:\n{last}"
        )
    return output
