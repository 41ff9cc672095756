"""Adds up JUnit files: ends with the line `N passed, N failed`, and fails where a test failed or none ran.

    count_results.py STATUS FILE...

A missing file counts as one failure: its tests did not run. So does a STATUS (of `make test`) other than 0 when no test
failed: then it was the build or the style check.
"""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def count(path: str) -> tuple[int, int, int]:
    """Passed, failed and skipped tests of one file."""
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        print(f"{path} is missing or broken: its tests did not run to the end", file=sys.stderr)
        return 0, 1, 0
    failed = sum(1 for case in cases if case.find("failure") is not None or case.find("error") is not None)
    skipped = sum(1 for case in cases if case.find("skipped") is not None)
    return len(cases) - failed - skipped, failed, skipped


def main(status: int, paths: list[str]) -> int:
    counts = {Path(path).stem: count(path) for path in paths}
    for name, (passed, failed, skipped) in counts.items():
        print(f"{name}: {passed} passed, {failed} failed, {skipped} skipped")
    passed, failed, _ = (sum(column) for column in zip(*counts.values(), strict=True))
    if status != 0 and failed == 0:
        print("no test failed, but the build or the style check did: see above")
        failed = 1
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
