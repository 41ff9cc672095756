"""The command ``gradcast-bench``: this process becomes the C++ program of that name, which lies in the package."""

import os
import sys
from pathlib import Path
from typing import NoReturn

PROGRAM = Path(__file__).resolve().parent / "bin" / "gradcast-bench"


def main() -> NoReturn:
    if not PROGRAM.exists():
        sys.exit(
            "gradcast-bench: it is not here; pip install builds it where it can (with -v it shows why not), "
            "in a source tree make test does"
        )
    os.execv(PROGRAM, [str(PROGRAM), *sys.argv[1:]])
