"""The command ``gradcast-bench``: replaces this process by the C++ program of that name in the package."""

import os
import sys
from pathlib import Path
from typing import NoReturn

_EXIT_ENVIRONMENT = 3  # as of the command line
PROGRAM = Path(__file__).resolve().parent / "bin" / "gradcast-bench"


def main() -> NoReturn:
    if not PROGRAM.exists():
        print(
            "gradcast-bench: the program was not built; pip install builds it if it can (with -v it says why not), "
            "and make test builds it in a source tree",
            file=sys.stderr,
        )
        sys.exit(_EXIT_ENVIRONMENT)
    os.execv(PROGRAM, [str(PROGRAM), *sys.argv[1:]])
