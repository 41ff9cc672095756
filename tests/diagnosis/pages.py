"""Reads the page of a run back."""

import xml.etree.ElementTree as ElementTree

from gradcast.diagnosis.report import html as html_report

NAMESPACE = "{http://www.w3.org/2000/svg}"


def parsed(run):
    """Parses the page strictly, so that every mistake in its markup is an error."""
    text = html_report.build(run)
    assert text.startswith("<!DOCTYPE html>\n")
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def part_of(document, name):
    (found,) = (each for each in document.iter("section") if each.get("id") == name)
    return found


def section(run, name):
    return part_of(parsed(run), name)


def words_of(node):
    return " ".join(" ".join(node.itertext()).split())


def svg(node, tag):
    return list(node.iter(NAMESPACE + tag))
