"""What becomes of a diagnosis: a folder with its result and trace, and a text for the terminal."""

import json
import sys
from pathlib import Path
from typing import Any

from gradcast import trace_files
from gradcast.diagnosis import words
from gradcast.errors import Error
from gradcast.files import write_text
from gradcast.runs import RESULT, TRACE


class Outcome:
    """``script``: its name, for the result. ``ends``: the program is over with the diagnosis. Rank 0 writes."""

    def __init__(
        self, folder: str, *, rank: int, script: str | None = None, as_json: bool = False, ends: bool = False
    ) -> None:
        self._folder, self._rank, self._script = Path(folder), rank, script
        self._as_json, self._ends = as_json, ends
        self.result: dict[str, Any] | None = None
        if rank != 0:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Error(f"the folder {folder} cannot be made: {(error.strerror or str(error)).lower()}") from None

    def arrived(self, found: tuple[dict[str, Any], dict[str, Any] | None] | None) -> None:
        """``found``: the result and the trace, on rank 0; None elsewhere."""
        if found is not None:
            self.result, trace = found[0] | {"script": self._script}, found[1]
            # Of an earlier run in this folder: it would be taken for this one's.
            (self._folder / TRACE).unlink(missing_ok=True)
            write_text(str(self._folder / RESULT), json.dumps(self.result), "result")
            if trace is not None:
                trace_files.save(trace, self._folder / TRACE)
            told = f"\n{self._text(trace is not None)}"
            print(json.dumps(self.result) if self._as_json else told, flush=True)
        if self._ends:
            raise SystemExit(0)

    def nothing(self, why: str) -> None:
        """Said by one rank, and with no exit code of its own: that is the script's."""
        if self._rank == 0:
            print(f"gradcast doctor: no diagnosis: {why}", file=sys.stderr, flush=True)

    def _text(self, traced: bool) -> str:
        end = f"`gradcast report {self._folder}` makes a page of it"
        end += f"; the trace {self._folder / TRACE} opens in Perfetto." if traced else "."
        return f"{words.text(self.result)}\n{end}"
