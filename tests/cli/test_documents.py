"""The checked readers of JSON and CSV: what is wrong is refused with its place, and with what is expected."""

import json
import math
import re

import pytest

from gradcast import documents
from gradcast.documents import list_of, mapping, number, one_of, record, rounded, text, that, truth, version, whole
from gradcast.errors import Error

STEP = record({"ms": number(0, 1e10), "kind": one_of(("fast", "slow"))}, {"layer": text, "of": list_of(whole(0, 9))})
RUN = record({"version": version(1), "steps": list_of(STEP, least=1)}, {"parts": mapping(("a", "b"), number(-1, 1))})
GOOD = {"version": 1, "steps": [{"ms": 0.5, "kind": "fast", "layer": None, "of": [1, 2.0], "more": {"x": "…"}}]}


def refusal(reader, written):
    with pytest.raises(Error) as caught:
        documents.read(written if isinstance(written, str) else json.dumps(written), reader, "run.json")
    assert caught.value.code == "invalid_option"
    return str(caught.value)


def test_a_right_document_is_read_with_what_nobody_knows():
    found = documents.read(json.dumps(GOOD), RUN, "run.json")
    assert found == {"version": 1, "steps": [GOOD["steps"][0] | {"of": [1, 2]}]}


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("", "run.json is not valid JSON: it ends too early (is the file truncated?)"),
        (json.dumps(GOOD)[:40], "run.json is not valid JSON: it ends too early (is the file truncated?)"),
        ('{"a": 1,\n "b" 2}', "run.json is not valid JSON: the error is at line 2, column 6"),
        ('{"NaN": "NaN",\n "b": NaN}', "is not valid JSON: the error is at line 2, column 7; JSON has no NaN"),
        ('["\\"", -Infinity]', "the error is at line 1, column 8; JSON has no NaN"),
        ('{"a": 1e999}', "run.json has a number too large for a double: 1e999"),
        ("[" + "9" * 400 + "]", f"run.json has a number too large for a double: {'9' * 40}…"),
        ("[" + "9" * 5000 + "]", f"run.json has a number too large for a double: {'9' * 40}…"),
        ("[" * 100 + "]" * 100, "run.json nests deeper than 64 levels"),
        ("[" * 200_000, "run.json nests deeper than 64 levels"),
        ('{"a": {"b": 1, "b": 2}}', 'run.json has an object with the field "b" twice; which one counts is not known'),
        ('{"a": "\\ud800"}', "run.json has a text that is none, with half of a surrogate pair"),
        ('{"\\udfff": 1}', "run.json has a text that is none"),
        ("5", "run.json: the document is 5; an object is expected"),
        (GOOD | {"version": 2}, "run.json: version is 2; this gradcast reads version 1"),
        (GOOD | {"version": True}, "run.json: version is true; this"),
        ({"version": 1}, "run.json: steps is missing"),
        (GOOD | {"steps": []}, "run.json: steps is []; a list of at least 1 is expected"),
        (GOOD | {"parts": {"a": None}}, "run.json: parts.a is null; a number from -1 to 1 is expected"),
        (GOOD | {"parts": {"": 1}}, 'run.json: parts."" is not known'),
        (GOOD | {"parts": {"c": 1}}, "run.json: parts.c is not known; the fields are a, b"),
        (GOOD | {"parts": {"a\n": 1}}, 'run.json: parts."a\\n" is not known'),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_place(written, words):
    assert words in refusal(RUN, written)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ms": None}, "steps[0].ms is null; a number from 0 to 1e+10 is expected"),
        ({"ms": "5"}, 'steps[0].ms is "5"; a number'),
        ({"ms": True}, "steps[0].ms is true; a number"),
        ({"ms": -1e-9}, "steps[0].ms is -1e-09; a number"),
        ({"ms": 1e300}, "steps[0].ms is 1e+300; a number"),
        ({"kind": "other"}, 'steps[0].kind is "other"; one of fast, slow is expected'),
        ({"kind": ["fast"]}, 'steps[0].kind is ["fast"]; one of fast, slow is expected'),
        ({"layer": 5}, "steps[0].layer is 5; a text is expected"),
        ({"of": [1, 1.5]}, "steps[0].of[1] is 1.5; a whole number from 0 to 9 is expected"),
        ({"of": [10]}, "steps[0].of[0] is 10; a whole number"),
        ({"of": {"a": 1}}, 'steps[0].of is {"a": 1}; a list is expected'),
    ],
)
def test_values_inside_are_named_by_their_path(changes, words):
    assert words in refusal(RUN, GOOD | {"steps": [GOOD["steps"][0] | changes]})


def test_a_long_value_is_shown_by_its_beginning():
    assert re.search(r'is "x{39}…; a number', refusal(number(0, 1), json.dumps("x" * 1000)))


def test_numbers_near_nothing():
    assert documents.checked(1e-320, rounded(number(0, 1), 9), "x") == 0
    reader = number(1e-9, 1, or_zero=True)
    assert documents.checked(0, reader, "x") == 0
    for value in (1e-320, math.nan, math.inf):
        with pytest.raises(Error, match="0, or a number from 1e-09 to 1 is expected"):
            documents.checked(value, reader, "x")


def test_a_check_of_several_values_has_a_place_too():
    def equal(value):
        if value["a"] != value["b"]:
            raise documents.Wrong("is another").inside(3).inside("b")

    reader = that(record({"a": truth, "b": truth}, others=False), equal)
    assert refusal(reader, {"a": True, "b": False}) == "run.json: b[3] is another"
    assert refusal(reader, {"a": True, "b": True, "c": 1}) == "run.json: c is not known; the fields are a, b"


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("a;b\n1;2\n", "t.csv has no column a; its first line must name a and b"),
        ("a,b,a\n1,2,3\n", 't.csv has two columns "a"; omit one of them'),
        ("a,b\n1,2,3\n", "t.csv, line 2 has 3 fields; 2 are expected, as in the first line"),
        ('a,b\n"1,2\n', "t.csv, line 2: unexpected end of data; is this a CSV file?"),
        ("a,b\n" + "1" * 200_000 + ",2\n", "t.csv, line 2: field larger than field limit"),
    ],
)
def test_tables_are_refused_with_the_line(table, words):
    with pytest.raises(Error) as caught:
        list(documents.table_rows(table, "t.csv", ("a", "b"), "invalid_link"))
    assert words in str(caught.value)


@pytest.mark.parametrize("cell", ["nan", "inf", "1e400", "1_0", "٣", "0x5", "-1", "x", "1.5"])
def test_cells_that_are_no_numbers(cell):
    with pytest.raises(Error, match=r"^line 2: a is .*; a whole number from 0 to 9 is expected$"):
        documents.table_number({"a": cell}, "a", whole(0, 9), "line 2", "invalid_link")
    with pytest.raises(Error, match=r"^line 2: a is missing$"):
        documents.table_number({"a": ""}, "a", whole(0, 9), "line 2", "invalid_link")
