"""The files of the tree: those that git tracks, not what programs have left in the checkout."""

import functools
import re
import subprocess
from pathlib import Path

from conftest import ROOT

# Without git, as in a container or an unpacked archive: what lies in these folders and is no build's output, and files
# beside them that are named like ours.
_FOLDERS = (".ci", ".github", "benchmarks", "cmake", "csrc", "docs", "examples", "include", "python", "tests", "tools")
_BESIDE = re.compile(r"[A-Z]+(\.\w+)?|\.[a-z-]+(\.yaml)?|[A-Z][a-z]+file|CMakeLists\.txt|(mkdocs|pyproject|setup)\.\w+")
_OUTPUTS = re.compile(r"bin|build|__pycache__|\..*_cache|.*\.egg-info|.*\.so")


@functools.cache
def files() -> tuple[Path, ...]:
    return tuple(path for path in sorted(tracked() or unpacked()) if path.is_file())


def tracked() -> list[Path]:
    """Empty without git, and inside of somebody else's repository."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [ROOT / name for name in listed.split("\0") if name]


def unpacked() -> list[Path]:
    inside = [path for folder in _FOLDERS for path in (ROOT / folder).rglob("*")]
    beside = [path for path in ROOT.iterdir() if path.is_file() and _BESIDE.fullmatch(path.name)]
    return beside + [
        path for path in inside if not any(_OUTPUTS.fullmatch(part) for part in path.relative_to(ROOT).parts)
    ]


def files_in(folder: str, *suffixes: str) -> list[Path]:
    """Those in a folder, named from the root, with one of these suffixes, or all."""
    return [path for path in files() if (ROOT / folder) in path.parents and (not suffixes or path.suffix in suffixes)]
