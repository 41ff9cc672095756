"""Writes docs/evaluation/peers.md from the results of a run: python -m peers.table FILE... > docs/evaluation/peers.md

Of a test that is in several files the last result counts.
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter

HEAD = """# Other projects' tests of DDP

`make test-peers` runs tests that others wrote for DDP, with gradcast attached to every DDP module that they make. With
`tests` in `PYTHONPATH`, `python -m peers.table build/pytest-peers.xml > docs/evaluation/peers.md` writes this page.

* **PyTorch**: the tests of DDP in `torch.testing._internal.distributed.distributed_test`, on CPUs over Gloo.
  What passes with DDP alone has to pass with gradcast.
* **Accelerate**: the programs in `accelerate.test_utils.scripts`, on two ranks.
* **Overlap mode** runs where a test makes an optimizer of exactly the module's parameters.
* **In part**: a module that gradcast refuses (a communication hook), or that is detached, stays DDP's.
* Not in the wheel, so not run: PyTorch's `test/distributed/test_c10d_gloo.py`.
"""
MODES = ("hook", "overlap")


class Suite:
    """What the tests of one project gave. ``cases``: per test or program its results by mode, or a reason."""

    def __init__(self) -> None:
        self.cases: dict[str, dict[str, str]] = {}

    def count(self, mode: str, word: str) -> int:
        return sum(each.get(mode) == word for each in self.cases.values())

    @property
    def reasons(self) -> Counter:
        """How often each reason occurs for which a test is not applicable."""
        return Counter(each["reason"].partition(":")[0] for each in self.cases.values() if "reason" in each)

    @property
    def failures(self) -> list[str]:
        cases = sorted(self.cases.items())
        return [f"{name} ({mode})" for name, each in cases for mode in MODES if each.get(mode) == "fails"]


def has_failed(case: ElementTree.Element) -> bool:
    return case.find("failure") is not None or case.find("error") is not None


def results(case: ElementTree.Element) -> dict[str, str]:
    """How one test of PyTorch ended, by mode, or the reason why it was skipped."""
    found = {each.get("name", ""): each.get("value", "") for each in case.iter("property")}
    if case.find("skipped") is not None:
        return {"reason": found.get("reason", "")}
    modes = {mode: found[mode] for mode in MODES if mode in found}
    if has_failed(case) and modes:
        modes[list(modes)[-1]] = "fails"  # the last mode that was run
    return modes | ({"part": found["part"]} if "part" in found else {})


def suites(paths: list[str]) -> dict[str, Suite]:
    found = {"PyTorch": Suite(), "Accelerate": Suite()}
    cases = {each.get("name"): each for path in paths for each in ElementTree.parse(path).iter("testcase")}
    for case in cases.values():
        name = case.get("name", "").partition("[")[2].rstrip("]")
        if not name:
            continue
        if "test_accelerate_scripts" not in case.get("classname", ""):
            found["PyTorch"].cases[name] = results(case)
            continue
        skipped = case.find("skipped")
        if skipped is not None:
            found["Accelerate"].cases[name] = {"reason": skipped.get("message", "").removeprefix("not applicable: ")}
            continue
        mode, _, program = name.rpartition("-")
        found["Accelerate"].cases.setdefault(program, {})[mode] = "fails" if has_failed(case) else "passed"
    return found


def main(paths: list[str]) -> None:
    found = suites(paths)
    print(HEAD)
    print("| | tests | pass in hook mode | in part | pass in overlap mode | fail | not applicable |")
    print("|---|---|---|---|---|---|---|")
    for name, suite in found.items():
        numbers = [
            len(suite.cases),
            suite.count("hook", "passed"),
            sum("part" in each for each in suite.cases.values()),
            suite.count("overlap", "passed"),
            len(suite.failures),
            sum(suite.reasons.values()),
        ]
        print(f"| {name} | {' | '.join(str(number) for number in numbers)} |")
    for name, suite in found.items():
        if suite.failures:
            print(f"\n{name}, failing: {', '.join(suite.failures)}.")
    print("\nWhy tests are not applicable:\n\n| | reasons |\n|---|---|")
    for name, suite in found.items():
        print(f"| {name} | {'; '.join(f'{reason} ({number})' for reason, number in suite.reasons.most_common())} |")


if __name__ == "__main__":
    main(sys.argv[1:])
