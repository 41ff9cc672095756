"""HTML and SVG as text. Functions make the elements, so that all text of a run is escaped exactly once.

Control characters, such as ESC, are shown as on a terminal: HTML must not hold some of them.
"""

import html
from typing import Any

from gradcast.terminal import visible

_VOID = {"meta", "rect", "line", "circle", "polyline", "polygon"}


class Markup(str):
    """Text that is markup already; all other text is escaped."""

    __slots__ = ()


def element(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """``class_`` stands for class, ``text_anchor`` for text-anchor. None is omitted; a list counts as its elements."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = _text(children)
    return Markup(f"<{name}{written}>{inside}</{name}>" if inside or name not in _VOID else f"<{name}{written}/>")


def _text(child: Any) -> str:
    if child is None or isinstance(child, Markup):
        return child or ""
    if isinstance(child, list | tuple):
        return "".join(map(_text, child))
    return html.escape(visible(str(child)), quote=False)


def _attribute(value: Any) -> str:
    # Two decimals are a hundredth of a pixel.
    text = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return html.escape("0" if text == "-0" else visible(text))
