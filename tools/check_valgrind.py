"""Reads valgrind's log (its path is the argument) and fails where an error has a frame of gradcast's own module.

CPython itself causes reports when it makes small integers and when it ends; those are not ours to fix.
"""

import re
import sys
from pathlib import Path


def reports(log: str) -> list[str]:
    """The error reports of a log, each with its stack."""
    lines = [re.sub(r"^==\d+== ?", "", line) for line in log.splitlines() if line.startswith("==")]
    return [report for report in "\n".join(lines).split("\n\n") if " at 0x" in report]


def main(path: str) -> int:
    found = reports(Path(path).read_text(errors="replace"))
    own = [report for report in found if re.search(r"gradcast|pybind11|_core\.", report)]
    print(f"valgrind: {len(found)} reports, {len(own)} with a frame of gradcast")
    print("\n\n".join(own))
    return 1 if own else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
