"""For `make docs`: fills docs/reference/messages.md with the sentences of the package's errors and warnings.

A mark ``<!-- messages of FOLDER -->`` becomes a list of those in this folder of python/gradcast, with "…" for values.
"""

import ast
import html
import re
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent / "python" / "gradcast"
_MARK = re.compile(r"<!-- messages of (\S+) -->")
_CALLS = {"Error", "BuildError", "refused", "warning", "_warn_once"}
_ANCHOR_CHARACTERS = 60


def messages(folder: str) -> list[str]:
    calls = (
        node
        for path in sorted((_PACKAGE / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and node.args
    )
    texts = {
        _text(call.args[0]) for call in calls if getattr(call.func, "id", getattr(call.func, "attr", "")) in _CALLS
    }
    return sorted(text for text in texts if re.search(r"\w{3}", text))


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[.\d]*[sdfg]", "…", node.value).replace("%%", "%")
    return "…"


def _list(folder: str) -> str:
    items = []
    for text in messages(folder):
        anchor = re.sub(r"\W+", "-", f"{folder} {text}".lower())[:_ANCHOR_CHARACTERS].strip("-")
        shown = re.sub(r"([\\`*_\[\]])", r"\\\1", html.escape(text, quote=False))
        items.append(f'* <a id="{anchor}"></a>{shown}')
    return "\n".join(items)


def on_page_markdown(markdown: str, **_: object) -> str:
    """A hook of mkdocs."""
    return _MARK.sub(lambda mark: _list(mark[1]), markdown)
