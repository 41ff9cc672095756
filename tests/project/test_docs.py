"""The documentation holds what the code has: messages, options, statistics and commands."""

import argparse
import ast
import collections
import dataclasses
import importlib.util
import re
from collections.abc import Iterator

import pytest
from tree import files_in

from conftest import ROOT
from gradcast.cli import main

DOCS = ROOT / "docs"
MESSAGES = DOCS / "reference" / "messages.md"
# Words of others in the page, and examples of messages with numbers filled in.
NOT_OURS = ("terminate called", "Connection refused", "py-spy", "waiting for 30 s", "block 3 of 9", "no diagnosis")
PLACEHOLDER = re.compile(r"\b[XN]\b|…")
PAGE = re.compile(r"\bdocs/[\w/-]+\.md")
SPACES = re.compile(r"\s+")
FRAGMENT_CHARACTERS_MIN = 10  # shorter pieces between placeholders occur anywhere


def python_text(text: str) -> str:
    """All strings of a module, each with a mark where a value is put in."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
    return "\n".join(found)


@pytest.fixture(scope="module")
def source() -> str:
    python = [python_text(path.read_text()) for path in files_in("python", ".py")]
    # Neighbouring literals of C++ are one string.
    cpp = [re.sub(r'"\s*"', "", path.read_text()) for path in files_in("csrc", ".cc")]
    return SPACES.sub(" ", "\n".join(python + cpp))


def quoted_messages() -> list[str]:
    lines = re.sub(r"\n *(?=[^|*# \n])", " ", MESSAGES.read_text()).splitlines()
    first_cells = [line.split(" | ")[0] for line in lines if '<a id="' in line]
    found = [message for cell in first_cells for message in re.findall(r"`([^`]+)`", cell)]
    return [message for message in found if " " in message and not message.startswith(NOT_OURS)]


@pytest.mark.parametrize("message", quoted_messages())
def test_messages_of_the_page_are_in_the_code(source, message):
    for fragment in PLACEHOLDER.split(message):
        fragment = fragment.strip(" ;,:.(){}")
        if len(fragment) >= FRAGMENT_CHARACTERS_MIN:
            assert fragment in source, f"docs/reference/messages.md quotes {message!r}"


def filled(page: str) -> str:
    """As `make docs` fills it."""
    spec = importlib.util.spec_from_file_location("source_pages", ROOT / "tools" / "source_pages.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    text = program.on_page_markdown((DOCS / page).read_text())
    assert "<!--" not in text
    assert not re.search(rf"(?<![\w/]){re.escape(str(ROOT))}(?![\w-])", text)
    return text


@pytest.mark.parametrize("folder", ["reference", "internals"])
def test_marks_are_filled(folder):
    for path in files_in(f"docs/{folder}", ".md"):
        filled(f"{folder}/{path.name}")


def test_the_page_lists_all_errors():
    page = filled("reference/messages.md")
    assert "</a>gradcast is attached with this manager already; give all modules as one list\n" in page
    assert r"(\_apply\_optimizer\_in\_backward)" in page
    anchors = re.findall('<a id="(.*?)"', page)
    assert sorted(each for each, count in collections.Counter(anchors).items() if count > 1) == []


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from options(command)
        elif action.help != argparse.SUPPRESS:  # names of an earlier release
            yield from (option for option in action.option_strings if option.startswith("--"))


def test_every_option_of_a_command_is_documented():
    page = filled("reference/command-line.md")
    named = {"--version", *re.findall(r"(?<![\w-])--[a-z][a-z-]*", page)}
    assert sorted(set(options(main.build_parser())) - named) == []


def test_every_option_is_documented():
    """In the docstring that the API page shows."""
    from gradcast.training import options

    for group in (options.Options, *options._GROUPS.values()):
        assert [field.name for field in dataclasses.fields(group) if f"``{field.name}``" not in group.__doc__] == []
        assert f"::: gradcast.{group.__name__}\n" in (ROOT / "docs/reference/api.md").read_text()


def test_every_statistic_is_documented():
    from gradcast.training.sessions import stats

    page = filled("reference/statistics.md")
    assert [key for key in stats.KEYS if f"`{key}`" not in page] == []


def test_every_public_name_is_on_the_api_page():
    import gradcast

    page = (DOCS / "reference" / "api.md").read_text()
    names = [name for name in gradcast.__all__ if name != "__version__"]
    assert [name for name in names if f"::: gradcast.{name}\n" not in page] == []


def test_pages_that_the_code_names_exist():
    folders = ("python", "csrc", "include", "tests", "benchmarks", "examples", "tools")
    suffixes = (".py", ".pyi", ".cc", ".h", ".cu", ".toml", ".sh")
    sources = [path for folder in folders for path in files_in(folder, *suffixes)]
    named = {(page, str(path.relative_to(ROOT))) for path in sources for page in PAGE.findall(path.read_text())}
    assert [(page, path) for page, path in sorted(named) if not (ROOT / page).exists()] == []


@pytest.mark.parametrize("page", files_in("docs", ".md"), ids=lambda page: page.stem)
def test_what_examples_import_is_there(page):
    for module, names in re.findall(r"^from (gradcast\S*) import ([\w, ]*\w)", page.read_text(), re.MULTILINE):
        place = (ROOT / "python").joinpath(*module.split("."))
        source = (place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).read_text()
        missing = [name for name in names.split(", ") if not re.search(rf"\b{name}\b", source)]
        assert [name for name in missing if not (place / f"{name}.py").is_file()] == []


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    pages = [path.relative_to(DOCS).as_posix() for path in files_in("docs", ".md")]
    assert [page for page in pages if f" {page}\n" not in navigation] == []
