"""Finds the module `_c10d` for the torch that runs, and builds it if there is none.

It looks for the module built when gradcast was installed, then in the cache; otherwise it compiles the module into the
cache. GRADCAST_CACHE_DIR names the cache; the default is ``gradcast`` in XDG_CACHE_HOME or in ``~/.cache``.

Thread safety: any thread, any process.
"""

import contextlib
import fcntl
import importlib.machinery
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from gradcast.errors import refused
from gradcast.training.compat import native_build

_PACKAGE = Path(__file__).resolve().parents[2]
# Longer than any compilation takes, so a process that holds the lock for so long hangs.
_LOCK_TIMEOUT_S = 900.0

_lock = threading.Lock()
_module: ModuleType | None = None


def load() -> ModuleType:
    """The module `_c10d`. Raises Error that says what to install if it cannot be built."""
    global _module
    with _lock:
        if _module is None:
            version = _torch_version()
            _module = _import(_installed(version) or _cached(version))
        return _module


def sources_root() -> Path:
    """The folder that holds ``csrc/transport/torch``: in the installed package, or else the source tree."""
    shipped = _PACKAGE / "native"
    return shipped if shipped.is_dir() else _PACKAGE.parents[1]


def find() -> Path | None:
    """The file of the module for the torch that runs, None if it is not compiled yet. Raises Error without torch."""
    version = _torch_version()
    cached = _path_in_cache(version)
    return _installed(version) or (cached if cached.exists() else None)


def cache_folder() -> Path:
    own = os.environ.get("GRADCAST_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "gradcast"


def _torch_version() -> str:
    try:
        import torch
    except ImportError:
        raise refused("training needs PyTorch, which is not installed here; pip install torch") from None
    if not torch.distributed.is_available():
        raise refused("this PyTorch was built without torch.distributed; install one that has it")
    return torch.__version__


def _installed(torch_version: str) -> Path | None:
    path = _PACKAGE / native_build.installed_name(torch_version)
    return path if path.exists() else None


def _path_in_cache(torch_version: str) -> Path:
    return cache_folder() / native_build.key(sources_root(), torch_version) / f"_c10d{native_build.MODULE_SUFFIX}"


def _cached(torch_version: str) -> Path:
    try:
        path = _path_in_cache(torch_version)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with _only_one_builds(path.parent):
                if not path.exists():  # another process may have built it meanwhile
                    text = f"building the part for torch {torch_version}, once; it takes a minute or two ..."
                    print(f"gradcast: {text}", file=sys.stderr, flush=True)
                    native_build.build(sources_root(), path)
    except native_build.BuildError as error:
        raise refused(str(error)) from None
    except OSError as error:
        raise refused(
            f"cannot write the part for torch into the cache ({error}); "
            "set GRADCAST_CACHE_DIR to a folder that can be written"
        ) from None
    return path


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
                    raise refused(
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
        raise refused(
            f"the part for torch was built but does not load ({error}); remove {path} and start again"
        ) from None
    sys.modules[name] = module
    return module
