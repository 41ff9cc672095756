"""Rules of the tree that no compiler and no linter holds."""

import re
import subprocess
from pathlib import Path

import pytest

from conftest import ROOT

BYTES_MAX = 1_000_000
SKIPPED_FOLDERS = re.compile(r"(\.git|\.venv.*|bin|build|build-.*|dist|__pycache__|\.(pytest|ruff)_cache|\.hypothesis)")
TEXT = {".py", ".pyi", ".cc", ".h", ".md", ".toml", ".txt", ".sh", ".json", ".csv", ".yml"}
TEXT_NAMES = {"Makefile", "LICENSE", ".gitignore", ".clang-format", "run"}
# Folders of one machine: nobody else has them. (Written so that the pattern does not match itself.)
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|farm|root|home/\w+|Users/\w+|tmp/\w*job\w*)/")
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def files() -> list[Path]:
    """What is in the repository or about to be; in an unpacked archive, everything but build outputs."""
    try:
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        paths = [ROOT / name for name in listed if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [path for path in ROOT.rglob("*") if not is_output(path)]
    return [path for path in paths if path.is_file()]


def is_output(path: Path) -> bool:
    return path.suffix == ".so" or any(SKIPPED_FOLDERS.fullmatch(part) for part in path.relative_to(ROOT).parts)


def texts() -> list[tuple[Path, str]]:
    return [
        (path, path.read_text(encoding="utf-8")) for path in files() if path.suffix in TEXT or path.name in TEXT_NAMES
    ]


def test_no_large_files():
    large = {str(path.relative_to(ROOT)): path.stat().st_size for path in files() if path.stat().st_size > BYTES_MAX}
    assert not large


@pytest.mark.parametrize("pattern", [MACHINE_PATH, UNFINISHED], ids=["a path of one machine", "unfinished"])
def test_no_text_has(pattern):
    found = [f"{path.relative_to(ROOT)}: {match[0]}" for path, text in texts() for match in pattern.finditer(text)]
    assert not found


def test_text_files_end_with_one_newline():
    wrong = [
        str(path.relative_to(ROOT)) for path, text in texts() if text and (text[-1] != "\n" or text.endswith("\n\n"))
    ]
    assert not wrong


@pytest.mark.parametrize(
    "folder", ["include/gradcast", "csrc", "tests/sim/simulator", "tests/bindings", "tests/support"]
)
def test_headers_say_what_they_are_and_who_may_call_them(folder):
    headers = [path for path in sorted((ROOT / folder).rglob("*.h")) if path.name != "version.h"]
    assert headers
    for path in headers:
        head = path.read_text().split("#pragma once")[0]
        assert head.startswith("// "), f"{path}: no opening comment"
        assert re.search(r"Thread safety:\s*(//\s*)?(pure; any\s+(//\s*)?thread|loop thread only|any thread)", head), (
            path
        )


def test_python_modules_say_what_they_are():
    for path in sorted((ROOT / "python").rglob("*.py")):
        assert path.read_text().startswith('"""'), path


def test_plots_have_the_colours_of_the_palette():
    for path in (ROOT / "python/gradcast/plots").glob("*.py"):
        assert not re.findall(r'"#[0-9a-fA-F]{6}"', path.read_text()), f"{path}: colours belong in palette.py"


def test_links_in_documents_lead_somewhere():
    for path in files():
        if path.suffix != ".md":
            continue
        for target in LINK.findall(path.read_text()):
            if re.match(r"[a-z]+:", target) or target.startswith("#"):
                continue
            assert (path.parent / target.split("#")[0]).exists(), f"{path.relative_to(ROOT)} links to {target}"


def test_scripts_can_be_run():
    for name in (".ci/run", "tools/need.sh"):
        assert (ROOT / name).stat().st_mode & 0o100, f"{name} is not executable"
