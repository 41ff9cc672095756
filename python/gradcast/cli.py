"""The command line: ``gradcast COMMAND``. Each command is a module of ``gradcast.commands``.

A user's mistake ends with one sentence on stderr and exit code 2. Exit code 1 is a defect of gradcast itself;
``GRADCAST_DEBUG=1`` shows where.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from gradcast import __version__
from gradcast.commands import ALL
from gradcast.errors import Error

EXIT_USER_ERROR = 2
EXIT_DEFECT = 1
_EXIT_INTERRUPTED = 130  # as shells report SIGINT

_DESCRIPTION = """\
Plans the gradient traffic of data-parallel training: what every known schedule would make of a model on a network, what
the best possible is, and how far each is from it.
"""
_EXAMPLE = """\
example:
  gradcast simulate resnet50 --scale 0.5 --bandwidth 3gbit --workers 8
"""


class _Parser(argparse.ArgumentParser):
    """argparse with one sentence instead of the whole usage for a wrong argument."""

    def error(self, message: str) -> None:
        self.exit(EXIT_USER_ERROR, f"gradcast: error: {message}; see `{self.prog} --help`\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="gradcast",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"gradcast {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for command in ALL:
        command.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(arguments)
    try:
        args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # `gradcast … | head` is no error; the interpreter's own flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("gradcast: interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED
    except Error as error:
        if error.code == "internal":
            return _defect(error)
        print(f"gradcast: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except Exception as error:
        return _defect(error)
    return 0


def _defect(error: Exception) -> int:
    if os.environ.get("GRADCAST_DEBUG"):
        raise error
    print(
        f"gradcast: this is a defect of gradcast, please report it: {type(error).__name__}: {error} "
        "(GRADCAST_DEBUG=1 shows where)",
        file=sys.stderr,
    )
    return EXIT_DEFECT
