"""What programs share: a record of runs, one JSON value a line, tables in the project's pages, and how they end."""

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradcast.errors import Error
from gradcast.lab.program import unwind_when_told_to_end

RESULTS = Path(__file__).resolve().parent / "results"


def parser_of(doc: str, record: str | None = None) -> argparse.ArgumentParser:
    """A parser with ``--refresh`` and, with the name of a record in results/, ``--record``. ``doc``: its help."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--refresh", metavar="PAGE", help="renew the tables between the marks of this Markdown page")
    if record is not None:
        parser.add_argument("--record", type=Path, default=RESULTS / record, metavar="JSONL")
    return parser


def read_record(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def find_run(record: list[dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any] | None:
    """The last run of the record with these settings."""
    return next((run for run in reversed(record) if settings.items() <= run.items()), None)


def append(path: Path, value: Any) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")


def show(text: str, mark: str, page: str | None) -> None:
    """Prints the text, and puts it into the page if there is one."""
    print(text)
    if page is not None:
        refresh(page, mark, text)


def refresh(path: str, mark: str, text: str) -> None:
    """Puts ``text`` between ``<!-- mark -->`` and ``<!-- /mark -->`` of a Markdown page."""
    page, begin, end = Path(path), f"<!-- {mark} -->", f"<!-- /{mark} -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    if not after:
        sys.exit(f"{path} lacks the marks {begin} and {end}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def run_program(main: Callable[[], int | None], name: str) -> int:
    """Runs a program that makes networks, and returns its exit code: an error of gradcast is one sentence."""
    unwind_when_told_to_end()
    try:
        return main() or 0
    except Error as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def commit() -> str:
    told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return told.stdout.strip() or "unknown"
