"""Damages files at random, in their bytes and in their values. Equal dice damage equally."""

import copy
import gzip
import json
import re

DEEP = "[" * 5000 + "]" * 5000
# What a value of a document is replaced by, as it is written there.
JSON_VALUES = [
    *("null", "true", "NaN", "Infinity", "-Infinity", "-1", "0", "-0.0", "0.5", "1", "7", "1000", "1e308", "-1e308"),
    *("1e-320", "1e999", "9007199254740993", "9" * 400, "9" * 5000, '""', '"x"', '"5"', '"../../x"', '"a\\nb"'),
    *('"\\u001b[31m"', '"\\ud800"', '"\\u2028"', '"$x^{"', "[]", "{}", "[[]]", "[null]", '{"a": 1}', "[1, 2]"),
    *(DEEP, '{"a": 1, "a": 2}'),
]
# Of a table, or of TOML.
WORDS = [
    *("", "nan", "inf", "-1", "0", "1", "7", "1000", "0.5", "1e308", "1e-320", "9" * 400, "x", '"', '"x', "1_0", "٣"),
    *("\x1b[31m", "a" * 150_000),
]
_MARK = "\0here\0"


def as_json(text, dice):
    if dice.random() < 0.25:
        return as_bytes(text.encode(), dice)
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        try:
            text = _with_another_value(text, dice)
        except (ValueError, RecursionError):  # the change before has made it no JSON
            break
    return text.encode("utf-8", "surrogatepass")


def _with_another_value(text, dice):
    """One value, anywhere in the document, is replaced, removed, doubled, or becomes one beside it."""
    document = json.loads(text)
    parents = [document] if isinstance(document, dict | list) else []
    for parent in parents:
        inner = parent.values() if isinstance(parent, dict) else parent
        parents += [value for value in inner if isinstance(value, dict | list)]
    parents = [parent for parent in parents if parent]
    if not parents:
        return dice.choice(JSON_VALUES)
    parent = dice.choice(parents)
    keys = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
    key, change = dice.choice(keys), dice.randrange(8)
    if change == 0:
        del parent[key]
    elif change == 1 and isinstance(parent, list):
        parent.append(copy.deepcopy(parent[key]))
    elif change == 2:
        parent[key] = copy.deepcopy(parent[dice.choice(keys)])
    else:
        parent[key] = _MARK
    return json.dumps(document).replace(json.dumps(_MARK), dice.choice(JSON_VALUES))


def as_lines_of_json(text, dice):
    lines = text.splitlines()
    index = dice.randrange(len(lines))
    lines[index] = as_json(lines[index], dice).decode("utf-8", "surrogateescape")
    if dice.random() < 0.2:
        dice.shuffle(lines)
    return "\n".join(lines).encode("utf-8", "surrogateescape")


def as_packed_json(text, dice):
    packed = gzip.compress(as_json(text, dice), 1)
    return as_bytes(packed, dice) if dice.random() < 0.2 else packed


def as_words(text, dice):
    if dice.random() < 0.25:
        return as_bytes(text.encode(), dice)
    words = re.split(r"([\w.+-]+)", text)
    for _ in range(dice.choice([1, 1, 2, 3])):
        words[dice.randrange(1, len(words), 2)] = dice.choice(WORDS)
    return "".join(words).encode()


def as_bytes(data, dice):
    data = bytearray(data)
    for _ in range(dice.choice([1, 1, 2, 8])):
        at, size, change = dice.randrange(len(data) + 1), dice.randrange(1, 40), dice.randrange(5)
        if change == 0 and at < len(data):
            data[at] ^= 1 << dice.randrange(8)
        elif change == 1:
            del data[at : at + size]
        elif change == 2:
            data[at:at] = data[at : at + size]
        elif change == 3:
            data[at:at] = dice.randbytes(size)
        elif change == 4:
            del data[at:]
    return bytes(data)
