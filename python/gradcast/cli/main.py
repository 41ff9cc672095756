"""The command line: ``gradcast COMMAND``. Each command is a module of ``gradcast.cli``.

A user's mistake ends with one sentence on stderr and exit code 2. Exit code 1 is a defect of gradcast;
``GRADCAST_DEBUG=1`` shows its traceback.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from gradcast import __version__
from gradcast.cli import ALL
from gradcast.errors import Error

EXIT_USER_ERROR = 2
EXIT_DEFECT = 1
_EXIT_INTERRUPTED = 130  # as shells report SIGINT
_LONG_OPTION = re.compile(r"--[a-z-]+")
_NEGATIVE = re.compile(r"-\.?\d")

_DESCRIPTION = """\
Schedules the gradient traffic of data-parallel training. Diagnoses slow trainings, plans and compares schedules for a
model on a network, and measures networks.
"""
_EXAMPLE = """\
example:
  gradcast simulate resnet50 --scale 0.5 --bandwidth 3gbit --workers 8
"""


class _Parser(argparse.ArgumentParser):
    """argparse, but with one sentence instead of the whole usage for a wrong argument."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        """Rejects unknown arguments here, because the parent parser would point to its own --help."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    def _print_message(self, message: str, file: Any = None) -> None:
        """Unlike argparse, reports a full disk under --help and --version."""
        if file is not sys.stdout:
            super()._print_message(message, file)
            return
        sys.stdout.write(message)
        sys.stdout.flush()

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
    try:
        if sys.stdout is None:
            raise Error("cannot write to the standard output: it is closed")
        args = build_parser().parse_args(_negative_values_joined(sys.argv[1:] if arguments is None else arguments))
        args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("gradcast: interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED
    except Error as error:
        if error.code == "internal":
            return _defect(error)
        print(f"gradcast: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except BrokenPipeError:
        # The reader, for instance `head`, has read all that it wanted.
        _discard_output()
    except OSError as error:
        # Errors of files that a user names have messages of their own. An error without a file name is one of the
        # standard output.
        return _defect(error) if error.filename is not None else _no_output(error)
    except Exception as error:
        return _defect(error)
    return 0


def _negative_values_joined(arguments: Sequence[str]) -> list[str]:
    """Rewrites ``--latency -5us`` as ``--latency=-5us``: argparse takes the value for an option and gives no reason."""
    joined: list[str] = []
    for index, argument in enumerate(arguments):
        if argument == "--" or joined == ["doctor"]:
            return [*joined, *arguments[index:]]  # the rest belongs to a script
        if joined and _LONG_OPTION.fullmatch(joined[-1]) and _NEGATIVE.match(argument):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _discard_output() -> None:
    # The interpreter flushes again at exit, which must not fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _no_output(error: OSError) -> int:
    _discard_output()
    print(f"gradcast: error: cannot write to the standard output: {error.strerror}", file=sys.stderr)
    return EXIT_USER_ERROR


def _defect(error: Exception) -> int:
    if os.environ.get("GRADCAST_DEBUG"):
        raise error
    print(
        f"gradcast: this is a defect of gradcast, please report it: {type(error).__name__}: {error} "
        "(GRADCAST_DEBUG=1 shows where)",
        file=sys.stderr,
    )
    return EXIT_DEFECT
