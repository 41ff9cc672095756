"""The command ``gradcast-bench``: replaces this process by the C++ program of that name in the package."""

import os
import sys
from pathlib import Path
from typing import NoReturn

PROGRAM = Path(__file__).resolve().parent / "bin" / "gradcast-bench"


def main() -> NoReturn:
    if not PROGRAM.exists():
        sys.exit(
            "gradcast-bench: the program was not built; pip install builds it if it can (with -v it says why not), "
            "and make test builds it in a source tree"
        )
    os.execv(PROGRAM, [str(PROGRAM), *sys.argv[1:]])
