"""Adds up JUnit files: ends with the line `N passed, N failed[, N skipped]`; fails if a test failed or none ran.

    count_results.py STATUS FILE...

A missing file counts as one failure: its tests did not run. If no test failed, a STATUS (of `make test`) other than 0
counts as one failure: then the build or the style check failed. The reason of each skip is printed once. Failed tests
are named, the first ones with what they said, because a log may keep no more than its end.
"""

import itertools
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

SAID_CHARACTERS = 12_000
EXPLAINED = 5  # failed tests that are more than named


def count(path: str, reasons: Counter, failures: list[str]) -> tuple[int, int, int]:
    """Passed, failed and skipped tests of one file. Adds why tests were skipped, and which failed."""
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        print(f"{path} is missing or broken: its tests did not run to the end", file=sys.stderr)
        return 0, 1, 0
    failed = [case for case in cases if failure(case) is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    reasons.update(reason(case) for case in skipped)
    failures += map(described, failed)
    return len(cases) - len(failed) - len(skipped), len(failed), len(skipped)


def failure(case: ElementTree.Element) -> ElementTree.Element | None:
    return next((each for each in case if each.tag in ("failure", "error")), None)


def described(case: ElementTree.Element) -> str:
    """With pytest's message, or the end of what GoogleTest printed, whose message is "Failed" or empty."""
    printed = (case.findtext("system-out") or "")[-SAID_CHARACTERS:]
    said = printed or (failure(case).get("message") or "")[:SAID_CHARACTERS]
    return f"failed: {case.get('classname', '')}: {case.get('name')}\n{textwrap.indent(said, '    ')}".rstrip()


def reason(case: ElementTree.Element) -> str:
    """pytest writes it into the element; of GoogleTest it is the line after "Skipped" in the output."""
    lines = (case.findtext("system-out") or "").splitlines()
    for line, following in itertools.pairwise(lines):
        if line.endswith(": Skipped"):
            return following.strip()
    return case.find("skipped").get("message") or "no reason given"


def main(status: int, paths: list[str]) -> int:
    reasons: Counter = Counter()
    failures: list[str] = []
    counts = {Path(path).stem: count(path, reasons, failures) for path in paths}
    for number, each in enumerate(failures):
        print(each if number < EXPLAINED else each.partition("\n")[0])
    for each, tests in reasons.most_common():
        print(f"skipped {tests}: {each}")
    for name, (passed, failed, skipped) in counts.items():
        print(f"{name}: {passed} passed, {failed} failed, {skipped} skipped")
    passed, failed, skipped = (sum(column) for column in zip(*counts.values(), strict=True))
    if status != 0 and failed == 0:
        print("no test failed, but the build or the style check did: see above")
        failed = 1
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
