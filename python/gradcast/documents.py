"""Checked reading of JSON and CSV: a tree of readers defines the expected content of a document.

A reader takes a value and returns it, or raises ``Wrong`` with the place and the expectation::

    step = record({"ms": number(0, 1e10)}, {"layer": text})
    read('{"ms": -5}', step, "run.json")    # Error: run.json: ms is -5; a number from 0 to 1e+10 is expected

No value of a document that was read is NaN, infinite, too large for a double, or text that cannot be encoded.
csrc/core/model/json.cc does the same for profiles, plans and links.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

from gradcast.errors import Error

T = TypeVar("T")
Reader = Callable[[Any], Any]

# As in json.cc: no file of ours nests deeper than 8. What is deeper could exhaust the stack when it is written again.
_DEPTH_MAX = 64
_SHOWN_MAX = 40
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)
_CONSTANT = re.compile(r'"(?:[^"\\]|\\.)*"|-?Infinity|NaN')


class Wrong(Exception):  # noqa: N818
    """An unexpected value. ``sentence`` follows its place: "is 5; a text is expected"."""

    def __init__(self, sentence: str, place: str = "") -> None:
        super().__init__(sentence)
        self.sentence, self.place = sentence, place

    def inside(self, name: str | int) -> "Wrong":
        """Returns the same fault with its place in the object or list around it."""
        step = f"[{name}]" if isinstance(name, int) else name if name.isidentifier() else shown(name)
        separator = "." if self.place and not self.place.startswith("[") else ""
        return Wrong(self.sentence, f"{step}{separator}{self.place}")


def read(text: str, reader: Callable[[Any], T], where: str, code: str = "invalid_option") -> T:
    """Parses and checks a JSON document. ``where``: the file, and perhaps the line, for errors. Raises Error."""
    return checked(parsed(text, where, code), reader, where, code)


def checked(value: Any, reader: Callable[[Any], T], where: str, code: str = "invalid_option") -> T:
    """Checks a value that was parsed. Raises Error."""
    try:
        return reader(value)
    except Wrong as wrong:
        raise Error(f"{where}: {wrong.place or 'the document'} {wrong.sentence}", code) from None


def parsed(text: str, where: str, code: str = "invalid_option") -> Any:
    """Returns the value of a JSON document; only the properties in this file's header are checked. Raises Error."""
    try:
        value = json.loads(
            text,
            parse_int=_whole_or_float,
            parse_float=_finite,
            parse_constant=lambda _: _refuse_constant(text),
            object_pairs_hook=_object,
        )
    except json.JSONDecodeError as error:
        ends = not text[error.pos :].strip() or error.msg.startswith("Unterminated string")
        place = "it ends too early (is the file truncated?)" if ends else _line_and_column(text, error.pos)
        raise Error(f"{where} is not valid JSON: {place}", code) from None
    except RecursionError:
        raise Error(f"{where} nests deeper than {_DEPTH_MAX} levels", code) from None
    except Wrong as wrong:
        raise Error(f"{where} {wrong.sentence}", code) from None
    return examined(value, where, code)


def examined(value: Any, where: str, code: str = "invalid_option") -> Any:
    """Returns a value that was parsed, of JSON or TOML, if it can be written again. Raises Error."""
    try:
        _check_depth_and_texts(value)
    except Wrong as wrong:
        raise Error(f"{where} {wrong.sentence}", code) from None
    return value


def _line_and_column(text: str, position: int) -> str:
    line_start = text.rfind("\n", 0, position) + 1
    return f"the error is at line {text.count(chr(10), 0, position) + 1}, column {position - line_start + 1}"


def _whole_or_float(text: str) -> int | float:
    return int(text) if len(text) < 20 else _finite(text)


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise Wrong(f"has a number too large for a double: {_shortened(text)}")
    return value


def _refuse_constant(text: str) -> NoReturn:
    first = next(match for match in _CONSTANT.finditer(text) if not match[0].startswith('"'))
    raise Wrong(f"is not valid JSON: {_line_and_column(text, first.start())}; JSON has no NaN and no Infinity")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Wrong(f"has an object with the field {shown(twice)} twice; which one counts is not known")
    return fields


def _check_depth_and_texts(document: Any) -> None:
    values = [document]
    for _ in range(_DEPTH_MAX + 1):
        inner: list[Any] = []
        for value in values:
            if isinstance(value, dict):
                inner += value
                inner += value.values()
            elif isinstance(value, list):
                inner += value
            elif isinstance(value, str) and not value.isascii():
                _check_encodable(value)
        values = inner
        if not values:
            return
    raise Wrong(f"nests deeper than {_DEPTH_MAX} levels")


def _check_encodable(value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Wrong(f"has a text that is none, with half of a surrogate pair: {shown(value)}") from None


def shown(value: Any) -> str:
    """A value as JSON, shortened, for messages."""
    return _shortened(json.dumps(value, default=str))  # TOML has dates


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"


def refuse(value: Any, expected: str) -> NoReturn:
    """Raises Wrong. ``expected``: in words, such as "a text"."""
    raise Wrong(f"is {shown(value)}; {expected} is expected")


# --- Readers ---


def text(value: Any) -> str:
    if not isinstance(value, str):
        refuse(value, "a text")
    return value


def truth(value: Any) -> bool:
    if not isinstance(value, bool):
        refuse(value, "true or false")
    return value


def number(low: float, high: float, *, or_zero: bool = False) -> Reader:
    """``or_zero``: 0 is accepted, too: no time, or an unknown one."""
    expected = f"{'0, or ' if or_zero else ''}a number from {low:g} to {high:g}"

    def read_number(value: Any) -> int | float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            refuse(value, expected)
        if not low <= value <= high and not (or_zero and value == 0):
            refuse(value, expected)
        return value

    return read_number


def rounded(reader: Reader, digits: int) -> Reader:
    return lambda value: round(reader(value), digits)


def whole(low: int, high: int) -> Reader:
    expected = f"a whole number from {low} to {high}"

    def read_whole(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            refuse(value, expected)
        if value != int(value):
            refuse(value, expected)
        return int(value)

    return read_whole


def one_of(words: Collection[str]) -> Reader:
    expected = f"one of {', '.join(words)}" if len(words) > 1 else f'"{next(iter(words))}"'

    def read_word(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            refuse(value, expected)
        return value

    return read_word


def version(known: int) -> Reader:
    def read_version(value: Any) -> int:
        if isinstance(value, bool) or value != known:
            raise Wrong(f"is {shown(value)}; this gradcast reads version {known}")
        return known

    return read_version


def nullable(reader: Reader) -> Reader:
    return lambda value: None if value is None else reader(value)


def list_of(reader: Reader, *, least: int = 0) -> Reader:
    expected = "a list" if least == 0 else f"a list of at least {least}"

    def read_list(value: Any) -> list[Any]:
        if not isinstance(value, list | tuple) or len(value) < least:  # a tuple: of a value that was never written
            refuse(value, expected)
        read_values: list[Any] = []
        try:
            read_values.extend(map(reader, value))
        except Wrong as wrong:
            raise wrong.inside(len(read_values)) from None
        return read_values

    return read_list


def mapping(keys: Collection[str], reader: Reader) -> Reader:
    """An object with only these fields, and perhaps not all."""

    def read_mapping(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            refuse(value, "an object")
        _refuse_others(value, keys)
        return record(dict.fromkeys(value, reader))(value)

    return read_mapping


def _refuse_others(value: dict[str, Any], names: Collection[str]) -> None:
    for name in value:
        if name not in names:
            raise Wrong(f"is not known; the fields are {', '.join(names)}").inside(name)


def record(
    required: Mapping[str, Reader], optional: Mapping[str, Reader] | None = None, *, others: bool = True
) -> Reader:
    """An object. ``optional``: fields that may be null or absent. ``others``: unknown fields are kept, not refused."""
    known = [*required.items(), *((name, nullable(reader)) for name, reader in (optional or {}).items())]
    names = [name for name, _ in known]

    def read_record(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            refuse(value, "an object")
        found = dict(value)
        for name, reader in known:
            if name in value:
                try:
                    found[name] = reader(value[name])
                except Wrong as wrong:
                    raise wrong.inside(name) from None
            elif name in required:
                raise Wrong("is missing").inside(name)
        if not others:
            _refuse_others(value, names)
        return found

    return read_record


def that(reader: Reader, *checks: Callable[[Any], None]) -> Reader:
    """A reader with further ``checks``, which raise Wrong."""

    def read_checked(value: Any) -> Any:
        found = reader(value)
        for check in checks:
            check(found)
        return found

    return read_checked


# --- CSV ---


def table_rows(text_: str, path: str, columns: Collection[str], code: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields the lines of a CSV with a header, each with its place. ``columns``: the required ones. Raises Error."""
    rows = csv.DictReader(io.StringIO(text_), strict=True)
    try:
        names = [(name or "").strip() for name in rows.fieldnames or []]
        if missing := next((column for column in columns if column not in names), None):
            raise Error(f"{path} has no column {missing}; its first line must name {' and '.join(columns)}", code)
        if twice := next((name for name in names if name and names.count(name) > 1), None):
            raise Error(f"{path} has two columns {shown(twice)}; omit one of them", code)
        rows.fieldnames = names
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            if None in row:
                count = len(names) + len(row[None])
                raise Error(f"{where} has {count} fields; {len(names)} are expected, as in the first line", code)
            yield where, {name: (value or "").strip() for name, value in row.items()}
    except csv.Error as error:
        raise Error(f"{path}, line {rows.reader.line_num}: {error}; is this a CSV file?", code) from None


def table_number(row: Mapping[str, str], column: str, reader: Reader, where: str, code: str) -> Any:
    """Returns a number in a line of a table. ``reader``: its check. Raises Error."""
    cell = row.get(column, "")
    if not cell:
        raise Error(f"{where}: {column} is missing", code)
    is_number = _NUMBER.fullmatch(cell) and float(cell) < float("inf")
    value: Any = float(cell) if is_number else cell
    try:
        return reader(value)
    except Wrong as wrong:
        raise Error(f"{where}: {column} {wrong.sentence}", code) from None
