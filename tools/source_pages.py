"""For `make docs`: fills marks in pages from the sources.

``<!-- messages of FOLDER -->``: the errors, warnings and log lines in this folder of python/gradcast, "…" for values.
``<!-- waits -->``: what makes steps wait, and what to do instead.
``<!-- statistics of GROUP -->``: the rows of a table of ``handle.stats()``.
``<!-- header of FILE -->``: what the file says about itself.
``<!-- help of COMMAND -->``: its ``--help``, and that of the commands inside it.
``<!-- output of COMMAND -->``: what it prints.
"""

import argparse
import ast
import functools
import html
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_PYTHON = _ROOT / "python"
_PACKAGE = _PYTHON / "gradcast"
_MARK = re.compile(r"<!-- (messages|statistics|header|help|output) of (.+?) -->|<!-- (waits) -->")
_FILE = re.compile(r"(?<![`/\w])[\w/]+\.(?:py|cc|h|md)\b")
_CALLS = {"Error", "BuildError", "refused", "error", "exception", "info", "log", "warning", "_warn_once"}
_ANCHOR_CHARACTERS = 60
_COLUMNS = "100"


def on_page_markdown(markdown: str, **_: object) -> str:
    """A hook of mkdocs."""
    return _MARK.sub(lambda mark: _filled(mark[1] or mark[3], mark[2]), markdown)


def _filled(kind: str, name: str) -> str:
    match kind:
        case "messages":
            return _list(name, messages(name))
        case "waits":
            return _list("wait", _waits())
        case "statistics":
            rows = ast.literal_eval(_assigned("training/sessions/stats.py", "MEANINGS"))[name]
            return "\n".join(f"| `{key}` | {meaning} |" for key, meaning in rows.items())
        case "header":
            return _header(_ROOT / name)
        case "help":
            return "\n\n".join(_helps()[name])
        case _:
            return f"```text\n{_run('-m', 'gradcast', *name.split())}```"


def messages(folder: str) -> list[str]:
    calls = (
        node
        for path in sorted((_PACKAGE / folder).rglob("*.py"))
        for node in ast.walk(_parsed(path))
        if isinstance(node, ast.Call) and node.args
    )
    texts = {_first_text(call) for call in calls if getattr(call.func, "id", getattr(call.func, "attr", "")) in _CALLS}
    return sorted(text for text in texts if re.search(r"\w{3}", text))


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _first_text(call: ast.Call) -> str:
    """The first text among the arguments: ``log`` takes the level before the sentence."""
    return next((text for text in map(_text, call.args) if text != "…"), "")


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[.\d]*[sdfg]", "…", node.value).replace("%%", "%")
    return "…"


def _waits() -> list[str]:
    body = _parsed(_PACKAGE / "training" / "measure" / "early_waits.py").body
    (causes,) = (node for node in body if isinstance(node, ast.ClassDef) and node.name == "Cause")
    pairs = (node.value.elts for node in causes.body if isinstance(node, ast.Assign))
    return [f"{_text(what)}: {_text(advice)}" for what, advice in pairs]


def _list(prefix: str, texts: list[str]) -> str:
    items = []
    for text in texts:
        anchor = re.sub(r"\W+", "-", f"{prefix} {text}".lower())[:_ANCHOR_CHARACTERS].strip("-")
        shown = re.sub(r"([\\`*_\[\]])", r"\\\1", html.escape(text, quote=False))
        items.append(f'* <a id="{anchor}"></a>{shown}')
    return "\n".join(items)


def _assigned(file: str, name: str) -> ast.expr:
    body = _parsed(_PACKAGE / file).body
    (value,) = (node.value for node in body if isinstance(node, ast.Assign) and node.targets[0].id == name)
    return value


def _header(path: Path) -> str:
    """Without the paragraphs about threads."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)).replace("::\n", ":\n")
    else:
        text = re.match(r"(//.*\n)+", text)[0].replace("// ", "").replace("//", "")
    text = _FILE.sub(r"`\g<0>`", text)
    return "\n\n".join(part for part in text.strip().split("\n\n") if not part.startswith("Thread safety"))


def _run(*arguments: str) -> str:
    """By the first ``python`` of the PATH, where gradcast is: mkdocs has an environment of its own."""
    environment = {**os.environ, "PYTHONPATH": str(_PYTHON), "COLUMNS": _COLUMNS}
    return subprocess.check_output(["python", *arguments], env=environment, text=True)


@functools.cache
def _helps() -> dict[str, list[str]]:
    return json.loads(_run(__file__))


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _help(parser: argparse.ArgumentParser) -> Iterator[str]:
    heading = f"### {parser.prog}\n\n" if parser.prog.count(" ") > 1 else ""
    yield f"{heading}```text\n{parser.format_help().replace(f'{_PYTHON}{os.sep}', '')}```"
    for _, inner in _commands(parser):
        yield from _help(inner)


if __name__ == "__main__":
    from gradcast.cli import main

    print(json.dumps({name: list(_help(parser)) for name, parser in _commands(main.build_parser())}))
