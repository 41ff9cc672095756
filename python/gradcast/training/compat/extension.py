"""Finds the module `_c10d` for the torch that runs, and builds it if there is none.

It looks for the module built when gradcast was installed, then in the cache; otherwise it compiles the module into the
cache. GRADCAST_CACHE_DIR names the cache; the default is ``gradcast`` in XDG_CACHE_HOME or in ``~/.cache``.

What is loaded from the cache runs as this user. So the cache, a build's folder in it and its file have to belong to
this user, to root, or to the owner of the folder that the environment names (a container's root with a mounted home
may use that), and nobody else may be able to write into them.

Thread safety: any thread, any process.
"""

import contextlib
import fcntl
import importlib.machinery
import importlib.util
import os
import shlex
import stat
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from gradcast.errors import Error
from gradcast.training.compat import native_build, reference_counts

_PACKAGE = Path(__file__).resolve().parents[2]
# Longer than any compilation takes, so a process that holds the lock for so long hangs.
_LOCK_TIMEOUT_S = 900.0
_FOLDER_MODE = 0o755
_NAME_A_FOLDER = "set GRADCAST_CACHE_DIR to a folder that only you can write into"

_lock = threading.Lock()
_module: ModuleType | None = None


def load() -> ModuleType:
    """The module `_c10d`. Raises Error that says what to install if it cannot be built, or cannot be used here."""
    global _module
    if _module is None:  # asked without the lock, which takes longer than all of this
        with _lock:
            if _module is None:
                version = _torch_version()
                module = _import(_installed(version) or _cached(version))
                reference_counts.check(module)
                _module = module
    return _module


def loaded() -> ModuleType | None:
    """The module `_c10d` if it is loaded already."""
    return _module


def sources_root() -> Path:
    """The folder that holds ``csrc/transport/torch``: in the installed package, or else the source tree."""
    shipped = _PACKAGE / "native"
    return shipped if shipped.is_dir() else _PACKAGE.parents[1]


def find() -> Path | None:
    """The file of the module for the torch that runs, None if it is not compiled yet. Raises Error without torch."""
    version = _torch_version()
    installed = _installed(version)
    if installed is not None:
        return installed
    cached = path_in_cache(version)
    return cached if cached.exists() else None


def cache_folder() -> Path:
    return _cache_folder()[0]


def _cache_folder() -> tuple[Path, Path]:
    """The cache, and the folder that the environment names: the cache itself or one that it is in."""
    try:
        if own := os.environ.get("GRADCAST_CACHE_DIR"):
            return Path(own).expanduser(), Path(own).expanduser()
        if shared := os.environ.get("XDG_CACHE_HOME"):
            return Path(shared) / "gradcast", Path(shared)
        return Path.home() / ".cache" / "gradcast", Path.home()
    except RuntimeError as error:
        raise _unusable(f"there is no place for the part for torch: {error}; {_NAME_A_FOLDER}") from None


def _unusable(message: str) -> Error:
    return Error(message, "environment")


def _check_trusted(path: Path) -> None:
    """Raises Error if others than those whom this user trusts could have written what is at this path."""
    cache, named = _cache_folder()
    found = path.stat()
    trusted = {os.geteuid(), 0, named.stat().st_uid}
    if found.st_uid not in trusted:
        raise _unusable(
            f"{path} belongs to the user with the number {found.st_uid}, and what is compiled there would run as "
            f"{os.geteuid()}; remove it, or {_NAME_A_FOLDER}"
        )
    # In a folder as /tmp nobody may replace what belongs to others.
    may_write = 0 if path == cache and found.st_mode & stat.S_ISVTX else stat.S_IWGRP | stat.S_IWOTH
    if found.st_mode & may_write:
        raise _unusable(
            f"others can write into {path} (its mode is {stat.S_IMODE(found.st_mode):o}), and what is compiled there "
            f"would run as you; chmod go-w {shlex.quote(str(path))}, or {_NAME_A_FOLDER}"
        )


def _torch_version() -> str:
    try:
        import torch
    except ImportError:
        raise _unusable("training needs PyTorch, which is not installed here; pip install torch") from None
    if not torch.distributed.is_available():
        raise _unusable("this PyTorch was built without torch.distributed; install one that has it")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise _unusable(
            "this Python is free-threaded, where reference counts do not show which gradients a program keeps; train "
            "with an ordinary build, one that has the GIL"
        )
    return torch.__version__


def _installed(torch_version: str) -> Path | None:
    path = _PACKAGE / native_build.installed_name(torch_version)
    return path if path.exists() else None


def path_in_cache(torch_version: str) -> Path:
    cache, name = cache_folder(), f"_c10d{native_build.MODULE_SUFFIX}"
    build, compiler = native_build.key(sources_root(), torch_version)
    if compiler is None and not native_build.names_this_cpu():
        # Another host has compiled it, or the image of this container was made with a compiler.
        compiled = sorted(cache.glob(f"{build}-*/{name}"), key=lambda path: path.stat().st_mtime_ns)
        if compiled:
            return compiled[-1]
    return cache / f"{build}-{compiler or 'none'}" / name


def _cached(torch_version: str) -> Path:
    try:
        path = path_in_cache(torch_version)
        if not path.exists():
            _build_into_cache(torch_version, path)
        for each in (path.parent.parent, path.parent, path):
            _check_trusted(each)
    except native_build.BuildError as error:
        raise _unusable(str(error)) from None
    except OSError as error:
        raise _unusable(f"the cache for the part for torch cannot be used ({error}); {_NAME_A_FOLDER}") from None
    return path


def _build_into_cache(torch_version: str, path: Path) -> None:
    for folder in (path.parent.parent, path.parent):
        folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        _check_trusted(folder)  # before anything is compiled there
    with _only_one_builds(path.parent):
        if not path.exists():  # another process may have built it meanwhile
            text = f"building the part for torch {torch_version}, once; it takes a minute or two ..."
            print(f"gradcast: {text}", file=sys.stderr, flush=True)
            native_build.build(sources_root(), path)


@contextlib.contextmanager
def _only_one_builds(folder: Path) -> Iterator[None]:
    """Lets one process build at a time. The system releases the lock of a process that dies."""
    path = folder / "lock"
    with path.open("a") as file:
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise _unusable(
                        f"another process has been building the part for torch for {_LOCK_TIMEOUT_S:.0f} s; "
                        f"end it (it holds {path}) and start again"
                    ) from None
                time.sleep(0.1)
        yield


def _import(path: Path) -> ModuleType:
    name = "gradcast._c10d"
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise _unusable(
            f"the part for torch was built but does not load ({error}); remove {path} and start again"
        ) from None
    sys.modules[name] = module
    return module
