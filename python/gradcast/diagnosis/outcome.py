"""The output of a diagnosis: a folder with doctor.json and the trace, and a text for the terminal."""

import json
import sys
from pathlib import Path
from typing import Any

from gradcast.diagnosis.report import text as text_report
from gradcast.diagnosis.runs import RESULT, TRACE
from gradcast.diagnosis.trace import files as trace_files
from gradcast.disk import check_writable, make_folder, write_file
from gradcast.terminal import visible


class Outcome:
    """The result of one diagnosis, or the reason why there is none. Rank 0 writes and prints.

    ``script`` is the script's name, for doctor.json. ``as_json`` prints doctor.json instead of the text.
    ``ends``: the doctor ends the program with exit code 0 after the diagnosis, on every rank.
    """

    def __init__(
        self, folder: str, *, rank: int, script: str | None = None, as_json: bool = False, ends: bool = False
    ) -> None:
        self._folder, self._rank, self._script = Path(folder), rank, script
        self._as_json, self.ends = as_json, ends
        self.result: dict[str, Any] | None = None
        self.why_nothing: str | None = None
        if rank != 0:
            return
        make_folder(folder)
        check_writable(str(self._folder / RESULT), "result")

    def save(self, result: dict[str, Any], trace: dict[str, Any] | None) -> None:
        """Prints and writes the fields of doctor.json and the trace of all ranks. Rank 0 only."""
        self.result = result | {"script": self._script}
        text = json.dumps(self.result)
        # Printed before anything is written, because the disk may be full.
        _print(text if self._as_json else self._text(trace is not None))
        write_file(self._folder / RESULT, text, "result")
        # A trace of an earlier run in this folder would be taken for this one's.
        (self._folder / TRACE).unlink(missing_ok=True)
        if trace is not None:
            trace_files.save(trace, self._folder / TRACE)

    def fail(self, why: str) -> None:
        """Records why there is no diagnosis, and prints it on rank 0. The exit code remains the script's."""
        self.why_nothing = why
        if self._rank == 0:
            print(f"gradcast doctor: no diagnosis: {why}", file=sys.stderr, flush=True)

    def _text(self, has_trace: bool) -> str:
        end = f"`gradcast report {self._folder}` renders it as an HTML page"
        end += f"; the trace {self._folder / TRACE} opens in Perfetto." if has_trace else "."
        return f"\n{text_report.text(self.result)}\n{end}"


def _print(text: str) -> None:
    print(visible(text, sys.stdout.encoding or "utf-8"), flush=True)
