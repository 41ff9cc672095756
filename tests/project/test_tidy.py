"""Rules of the tree that no compiler and no linter holds."""

import ast
import re
from pathlib import Path

import pytest
from tree import files, files_in

from conftest import ROOT

BYTES_MAX = 1_000_000
TEXT = {".py", ".pyi", ".cc", ".h", ".md", ".toml", ".txt", ".sh", ".json", ".csv", ".yml"}
TEXT_NAMES = {"Makefile", "LICENSE", ".gitignore", ".clang-format", "run"}
# Folders of one machine: nobody else has them. (Written so that the pattern does not match itself.)
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|farm|root|home/\w+|Users/\w+|tmp/\w*job\w*)/")
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


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
    headers = [path for path in files_in(folder, ".h") if path.name != "version.h"]
    assert headers
    for path in headers:
        head = path.read_text().split("#pragma once")[0]
        assert head.startswith("// "), f"{path}: no opening comment"
        assert re.search(r"Thread safety:\s*(//\s*)?(pure; any\s+(//\s*)?thread|loop thread only|any thread)", head), (
            path
        )


def test_python_modules_say_what_they_are():
    for path in files_in("python", ".py"):
        assert path.read_text().startswith('"""'), path


# Files whose texts are in the language of the field.
PLAIN = re.compile(r"python/gradcast/.*\.pyi?|(include/gradcast|csrc)/.*\.h")
NO_NOUN_PHRASE = re.compile(r"(What|Whether|How|As)\b")
PRIVATE_WORD = re.compile(
    r"\b(travel\w*|passengers?|apart|hears?|heard|told|due|borrowed forward|lends?|long frozen|certified share|left out"
    r"|lea(ve|ves|ving) (\w+ )?out)\b",
    re.IGNORECASE,
)


def descriptions(path: Path) -> list[str]:
    """The docstrings of a Python file, the comments of a header."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".h":
        blocks = re.findall(r"^ *// .*(?:\n *//.*)*", text, re.MULTILINE)
        return [re.sub(r"^ *// ?", "", block, flags=re.MULTILINE) for block in blocks]
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, DOCUMENTED)]
    return [doc for node in nodes if (doc := ast.get_docstring(node))]


def test_docstrings_are_in_the_language_of_the_field():
    """House rules: a noun phrase or "Returns ..."; the field's words, not private ones."""
    clean = [path for path in files() if PLAIN.fullmatch(str(path.relative_to(ROOT)))]
    assert len(clean) > 250
    found = [(path, text) for path in clean for text in descriptions(path)]
    assert not [f"{path}: {text[:60]}" for path, text in found if NO_NOUN_PHRASE.match(text)]
    assert not [f"{path}: {match[0]}" for path, text in found if (match := PRIVATE_WORD.search(text))]


# What a user gets is written by disk.write_file, which loses nothing. These write other things: a cache, a lock, dumps
# of a failure, what only processes of the laboratory read, and snapshots, which have a protocol of their own.
WRITES_BY_ITSELF = re.compile(r"gradcast/(disk|snapshots/.*|frameworks/.*|lab/.*|training/(compat|ranks)/.*)\.py")
WRITING = re.compile(r"""\.write_(text|bytes)\(|savefig\((?!content\b)|open\([^\n]*["'][rb]*[wax+]""")


def test_what_users_get_is_written_in_one_place():
    sources = files_in("python/gradcast", ".py")
    found = [f"{path}: {match[0]}" for path in sources for match in WRITING.finditer(path.read_text())]
    assert any("disk.py" in each for each in found)
    assert not [each for each in found if not WRITES_BY_ITSELF.search(each.split(": ")[0])]


def test_plots_have_the_colours_of_the_palette():
    for path in files_in("python/gradcast/plots", ".py"):
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
