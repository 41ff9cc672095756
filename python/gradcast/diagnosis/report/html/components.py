"""Shared parts of sections: their frame, tables, and colour keys."""

from collections.abc import Callable, Sequence
from typing import Any

from gradcast.diagnosis.report.html.markup import Markup, element

# Tables with more rows are folded.
_FOLDED_FROM = 12
_PRINTED_MAX = 20
# Figures have a row for each of at most this many ranks.
_RANKS_MAX = 16


def section(name: str, heading: str, *children: Any) -> Markup:
    return element(
        "section", element("h2", heading, id=f"{name}-heading"), *children, id=name, aria_labelledby=f"{name}-heading"
    )


def missing(name: str, heading: str, reason: str) -> Markup:
    return section(name, heading, element("p", reason, class_="missing"))


def untried(run: dict[str, Any], name: str, heading: str, otherwise: str) -> Markup:
    """A section that is empty because no step followed a plan; says why, if the run does."""
    reason = f"No step followed a plan: {run['not_tried']}" if run.get("not_tried") else otherwise
    return missing(name, heading, reason)


def some_ranks(ranks: Sequence[dict[str, Any]], order: Callable[[dict[str, Any]], Any]) -> list[dict[str, Any]]:
    """Returns the first ranks in the given order, as many as fit into a figure, sorted by rank."""
    return sorted(sorted(ranks, key=order)[:_RANKS_MAX], key=lambda rank: rank["rank"])


def figure(picture: Markup, caption: Any) -> Markup:
    return element("figure", picture, element("figcaption", caption))


def key(entries: Sequence[tuple[str, str]]) -> Markup:
    """Draws a colour key from pairs of CSS class and text."""
    return element(
        "ul",
        [element("li", element("i", class_=f"swatch {class_}"), words) for class_, words in entries],
        class_="key",
        aria_label="colours",
    )


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]], align: str, caption: str) -> Markup:
    """``align`` has one letter per column, l or r. A long table is folded."""
    made = _table(headers, rows, align, caption)
    if len(rows) < _FOLDED_FROM:
        return element("div", made, class_="table")
    # On paper tables are unfolded, except for those with one line per step.
    long = "long" if len(rows) > _PRINTED_MAX else None
    summary = element("summary", f"{caption} ({len(rows)} rows)")
    return element("details", summary, element("div", made, class_="table"), class_=long)


def _table(headers: Sequence[str], rows: Sequence[Sequence[Any]], align: str, caption: str) -> Markup:
    sides = [None if letter == "l" else "r" for letter in align]
    head = [element("th", word, scope="col", class_=side) for word, side in zip(headers, sides, strict=True)]
    body = [
        element(
            "tr",
            [_cell(cell, side, first=not index) for index, (cell, side) in enumerate(zip(row, sides, strict=True))],
        )
        for row in rows
    ]
    return element("table", element("caption", caption), element("thead", element("tr", head)), element("tbody", body))


def _cell(cell: Any, side: str | None, first: bool) -> Markup:
    """A cell that is a <td> already is kept, because it may have a colour."""
    if isinstance(cell, Markup) and cell.startswith("<td"):
        return cell
    return element("th", cell, scope="row", class_=side) if first else element("td", cell, class_=side)
