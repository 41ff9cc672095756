"""For `make docs`: fills docs/reference/messages.md with the sentences of the package.

A mark ``<!-- messages of FOLDER -->`` becomes a list of the errors, warnings and log lines in this folder of
python/gradcast, with "…" for values; ``<!-- waits -->`` one of what makes steps wait, and what to do instead.
"""

import ast
import html
import re
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent / "python" / "gradcast"
_WAITS = _PACKAGE / "training" / "measure" / "early_waits.py"
_MARK = re.compile(r"<!-- messages of (\S+) -->")
_CALLS = {"Error", "BuildError", "refused", "error", "exception", "info", "log", "warning", "_warn_once"}
_ANCHOR_CHARACTERS = 60


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
    """Of the arguments: ``log`` has the level before the sentence."""
    return next((text for text in map(_text, call.args) if text != "…"), "")


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[.\d]*[sdfg]", "…", node.value).replace("%%", "%")
    return "…"


def _waits() -> list[str]:
    (causes,) = (node for node in _parsed(_WAITS).body if isinstance(node, ast.ClassDef) and node.name == "Cause")
    pairs = (node.value.elts for node in causes.body if isinstance(node, ast.Assign))
    return [f"{_text(what)}: {_text(advice)}" for what, advice in pairs]


def _list(prefix: str, texts: list[str]) -> str:
    items = []
    for text in texts:
        anchor = re.sub(r"\W+", "-", f"{prefix} {text}".lower())[:_ANCHOR_CHARACTERS].strip("-")
        shown = re.sub(r"([\\`*_\[\]])", r"\\\1", html.escape(text, quote=False))
        items.append(f'* <a id="{anchor}"></a>{shown}')
    return "\n".join(items)


def on_page_markdown(markdown: str, **_: object) -> str:
    """A hook of mkdocs."""
    filled = _MARK.sub(lambda mark: _list(mark[1], messages(mark[1])), markdown)
    return filled.replace("<!-- waits -->", _list("wait", _waits()))
