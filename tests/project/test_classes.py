"""The sizes of the classes that a session consists of, and the files that its way of a gradient names."""

import ast
import re

import pytest

from conftest import ROOT

TRAINING = ROOT / "python/gradcast/training"
FILES = [*sorted((TRAINING / "sessions").glob("*.py")), TRAINING / "attachment.py"]
FILES += [path for folder in ("local", "step") for path in sorted((TRAINING / folder).glob("*.py"))]
CLASSES = {
    node.name: node for path in FILES for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)
}
FIELDS_MAX, METHODS_MAX = 15, 25


def members(node: ast.ClassDef) -> tuple[set[str], set[str]]:
    """Fields and methods, those of the bases counted."""
    fields, methods = set(), {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self":
            fields.add(each.attr)
    for each in node.body:
        targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]
        fields |= {target.id for target in targets if isinstance(target, ast.Name)}
    for base in node.bases:
        if (known := CLASSES.get(ast.unparse(base).split(".")[-1])) is not None:
            more_fields, more_methods = members(known)
            fields, methods = fields | more_fields, methods | more_methods
    return fields, methods


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_class_has_few_fields_and_methods(name):
    fields, methods = members(CLASSES[name])
    assert len(fields) <= FIELDS_MAX, sorted(fields)
    assert len(methods) <= METHODS_MAX, sorted(methods)


def test_the_way_of_a_gradient_has_at_most_ten_files():
    named = re.findall(r"^ *(\d+)\. (\S+)", (TRAINING / "sessions/session.py").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in named] == list(range(1, len(named) + 1))
    assert 5 < len(named) <= 10
    assert not [path for _, path in named if not (TRAINING / path).is_file() and not (ROOT / path).is_file()]
