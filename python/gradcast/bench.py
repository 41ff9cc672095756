"""The command ``gradcast-bench``: this process becomes the C++ program of that name, which lies in the package."""

import os
import sys
from pathlib import Path
from typing import NoReturn

PROGRAM = Path(__file__).resolve().parent / "bin" / "gradcast-bench"


def main() -> NoReturn:
    if not PROGRAM.exists():
        sys.exit("gradcast-bench: it could not be built when gradcast was installed; pip install -v gradcast shows why")
    os.execv(PROGRAM, [str(PROGRAM), *sys.argv[1:]])
