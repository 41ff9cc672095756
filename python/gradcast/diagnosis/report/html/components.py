"""Shared parts of sections: tables, colour keys, and the choice of ranks."""

from collections.abc import Callable, Sequence
from typing import Any

from gradcast.diagnosis.report.html.markup import Markup, element

# Tables with more rows are folded.
_FOLDED_FROM = 12
_PRINTED_MAX = 20
# Figures have a row for each of at most this many ranks.
_RANKS_MAX = 16


def some_ranks(ranks: Sequence[dict[str, Any]], order: Callable[[dict[str, Any]], Any]) -> list[dict[str, Any]]:
    """Returns the first ranks in the given order, as many as fit into a figure, sorted by rank."""
    return sorted(sorted(ranks, key=order)[:_RANKS_MAX], key=lambda rank: rank["rank"])


def key(entries: Sequence[tuple[str, str]]) -> Markup:
    items = [element("li", element("i", class_=f"swatch {class_}"), words) for class_, words in entries]
    return element("ul", items, class_="key", aria_label="colours")


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]], align: str, caption: str) -> Markup:
    """``align``: one letter per column, l or r. A long table is folded. A cell that is a <td> already is kept."""
    sides = [None if letter == "l" else "r" for letter in align]

    def cell(value: Any, side: str | None, is_first: bool) -> Markup:
        if isinstance(value, Markup) and value.startswith("<td"):
            return value
        return element("th", value, scope="row", class_=side) if is_first else element("td", value, class_=side)

    head = [element("th", word, scope="col", class_=side) for word, side in zip(headers, sides, strict=True)]
    body = [
        element("tr", [cell(*each, not index) for index, each in enumerate(zip(row, sides, strict=True))])
        for row in rows
    ]
    whole = element("table", element("caption", caption), element("thead", element("tr", head)), element("tbody", body))
    whole = element("div", whole, class_="table")
    if len(rows) < _FOLDED_FROM:
        return whole
    # On paper tables are unfolded, except for those with one line per step.
    long = "long" if len(rows) > _PRINTED_MAX else None
    return element("details", element("summary", f"{caption} ({len(rows)} rows)"), whole, class_=long)
