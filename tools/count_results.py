"""Adds up JUnit files: ends with the line `N passed, N failed[, N skipped]`; fails if a test failed or none ran.

    count_results.py STATUS FILE...

A missing file counts as one failure: its tests did not run. If no test failed, a STATUS (of `make test`) other than 0
counts as one failure: then the build or the style check failed. The reason of each skip is printed once.
"""

import itertools
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path


def count(path: str, reasons: Counter) -> tuple[int, int, int]:
    """Passed, failed and skipped tests of one file. Adds why tests were skipped to ``reasons``."""
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        print(f"{path} is missing or broken: its tests did not run to the end", file=sys.stderr)
        return 0, 1, 0
    failed = sum(1 for case in cases if case.find("failure") is not None or case.find("error") is not None)
    skipped = [case for case in cases if case.find("skipped") is not None]
    reasons.update(reason(case) for case in skipped)
    return len(cases) - failed - len(skipped), failed, len(skipped)


def reason(case: ElementTree.Element) -> str:
    """pytest writes it into the element; of GoogleTest it is the line after "Skipped" in the output."""
    lines = (case.findtext("system-out") or "").splitlines()
    for line, following in itertools.pairwise(lines):
        if line.endswith(": Skipped"):
            return following.strip()
    return case.find("skipped").get("message") or "no reason given"


def main(status: int, paths: list[str]) -> int:
    reasons: Counter = Counter()
    counts = {Path(path).stem: count(path, reasons) for path in paths}
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
