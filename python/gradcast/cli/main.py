"""The command line: ``gradcast COMMAND``. Each command is a module of ``gradcast.cli``.

Every failure ends with one sentence on stderr; ``GRADCAST_DEBUG=1`` shows the traceback of a defect.
"""

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from gradcast import __version__, terminal
from gradcast.cli import GROUPS
from gradcast.errors import Error

EXIT_FINE = 0
EXIT_WRONG_USE = 2  # also argparse's
EXIT_ENVIRONMENT = 3
EXIT_DEFECT = 70  # EX_SOFTWARE of sysexits.h
EXIT_INTERRUPTED = 130  # as shells report SIGINT
# By the code of an Error. All others are about what the user has written.
_EXIT_CODES = {"environment": EXIT_ENVIRONMENT, "communication": EXIT_ENVIRONMENT, "internal": EXIT_DEFECT}

_LONG_OPTION = re.compile(r"--[a-z-]+")
_NEGATIVE = re.compile(r"-\.?\d")

_DESCRIPTION = """\
Schedules the gradient traffic of data-parallel training: finds out why a training is slow, and predicts what a schedule
or another network would bring.
"""
_EXAMPLE = """\
example:
  gradcast simulate resnet50 --scale 0.5 --bandwidth 3gbit --workers 8
"""


class _Parser(argparse.ArgumentParser):
    """argparse, but with one sentence instead of the whole usage for a wrong argument."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
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

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_WRONG_USE, f"gradcast: error: {terminal.on_one_line(message)}; see `{self.prog} --help`\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="gradcast",
        usage="gradcast [-h] [--version] COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"gradcast {__version__}")
    # argparse lists all commands in one group, so that the description lists them.
    commands = parser.add_subparsers(
        metavar="COMMAND", dest="command", required=True, help=argparse.SUPPRESS, prog="gradcast"
    )
    parts = [_DESCRIPTION]
    for title, modules in GROUPS.items():
        listed = len(commands._choices_actions)
        for module in modules:
            module.add_parser(commands)
        lines = (f"  {action.dest:<9} {action.help}\n" for action in commands._choices_actions[listed:])
        parts.append(f"{title}:\n{''.join(lines)}")
    parser.description = "\n".join(parts)
    parser.epilog = _EXAMPLE
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    with contextlib.ExitStack() as output:
        output.enter_context(terminal.escaping())
        return _run(sys.argv[1:] if arguments is None else arguments, output)


def _run(arguments: Sequence[str], output: contextlib.ExitStack) -> int:
    """``output``: closed for a command that runs a program of the user's in this process, whose output is its own."""
    try:
        if sys.stdout is None:
            raise Error("cannot write to the standard output: it is closed", "environment")
        args = build_parser().parse_args(_negative_values_joined(arguments))
        if args.command == "doctor":
            output.close()
        code = args.run(args)
        sys.stdout.flush()
        return code or EXIT_FINE
    except KeyboardInterrupt:
        print("gradcast: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Error as error:
        code = _EXIT_CODES.get(error.code, EXIT_WRONG_USE)
        if code == EXIT_DEFECT:
            return _defect(error)
        # A name from a file must not add a line that looks like one of gradcast's.
        message = str(error) if getattr(error, "has_lines", False) else terminal.on_one_line(str(error))
        print(f"gradcast: error: {message}", file=sys.stderr)
        return code
    except BrokenPipeError:
        # The reader, for instance `head`, has read all that it wanted.
        _discard_output()
        return EXIT_FINE
    except OSError as error:
        # Errors of files that a user names have messages of their own. An error without a file name is one of the
        # standard output.
        return _defect(error) if error.filename is not None else _no_output(error)
    except Exception as error:
        return _defect(error)


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
    return EXIT_ENVIRONMENT


def _defect(error: Exception) -> int:
    if os.environ.get("GRADCAST_DEBUG"):
        raise error
    print(
        f"gradcast: this is a defect of gradcast, please report it: {type(error).__name__}: {error} "
        "(GRADCAST_DEBUG=1 shows where)",
        file=sys.stderr,
    )
    return EXIT_DEFECT
