"""HTML and SVG as text. Elements are made by functions, so that all text of a run is escaped, exactly once."""

import html
from collections.abc import Iterable
from typing import Any

_VOID = {"meta", "br", "hr", "rect", "line", "circle", "path", "polyline", "polygon", "col"}


class Markup(str):
    """Text that is markup already; all other text is escaped."""

    __slots__ = ()


def element(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """``class_="x"`` stands for class, ``text_anchor`` for text-anchor. Attributes and children that are None are
    left out.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = joined(children)
    if not inside and name in _VOID:
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{inside}</{name}>")


def joined(children: Iterable[Any]) -> Markup:
    return Markup("".join(_child(child) for child in children))


def _child(child: Any) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, list | tuple):
        return joined(child)
    return html.escape(str(child), quote=False)


def _attribute(value: Any) -> str:
    # Two decimals are a hundredth of a pixel.
    text = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return html.escape("0" if text in ("-0", "") and isinstance(value, float) else text)
