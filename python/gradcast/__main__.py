"""``python -m gradcast``: the command line."""

import sys

from gradcast.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
