"""What becomes of a diagnosis: a folder with its result and trace, and a text for the terminal."""

import json
import sys
from pathlib import Path
from typing import Any

from gradcast.atomic import write_atomically
from gradcast.diagnosis.report import text as text_report
from gradcast.diagnosis.runs import RESULT, TRACE
from gradcast.diagnosis.trace import files as trace_files
from gradcast.errors import Error
from gradcast.files import check_writable


class Outcome:
    """``script``: its name, for the result. ``ends``: the program is over with the diagnosis. Rank 0 writes."""

    def __init__(
        self, folder: str, *, rank: int, script: str | None = None, as_json: bool = False, ends: bool = False
    ) -> None:
        self._folder, self._rank, self._script = Path(folder), rank, script
        self._as_json, self._ends = as_json, ends
        self.result: dict[str, Any] | None = None
        self.why_nothing: str | None = None
        if rank != 0:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Error(f"the folder {folder} cannot be made: {(error.strerror or str(error)).lower()}") from None
        check_writable(str(self._folder / RESULT), "result")

    def arrived(self, result: dict[str, Any], trace: dict[str, Any] | None) -> None:
        """Doctor.json's fields, and the trace of all ranks. On rank 0; told first, since a disk may be full."""
        self.result = result | {"script": self._script}
        text = json.dumps(self.result)
        _print(text if self._as_json else f"\n{self._text(trace is not None)}")
        write_atomically(self._folder / RESULT, text, "result")
        # Of an earlier run in this folder: it would be taken for this one's.
        (self._folder / TRACE).unlink(missing_ok=True)
        if trace is not None:
            trace_files.save(trace, self._folder / TRACE)

    def over(self) -> None:
        """On every rank, after ``arrived``."""
        if self._ends:
            raise SystemExit(0)

    def nothing(self, why: str) -> None:
        """Said by one rank, and with no exit code of its own: that is the script's."""
        self.why_nothing = why
        if self._rank == 0:
            print(f"gradcast doctor: no diagnosis: {why}", file=sys.stderr, flush=True)

    def _text(self, traced: bool) -> str:
        end = f"`gradcast report {self._folder}` makes a page of it"
        end += f"; the trace {self._folder / TRACE} opens in Perfetto." if traced else "."
        return f"{text_report.text(self.result)}\n{end}"


def _print(text: str) -> None:
    """Also where a terminal does not know every character."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, errors="replace").decode(encoding), flush=True)
