"""Tables that programs write into the project's pages, and the commit whose numbers they are."""

import subprocess
import sys
from pathlib import Path


def refresh(path: str, mark: str, text: str) -> None:
    """Puts ``text`` between ``<!-- mark -->`` and ``<!-- /mark -->`` of a Markdown page."""
    page, begin, end = Path(path), f"<!-- {mark} -->", f"<!-- /{mark} -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    if not after:
        sys.exit(f"{path} lacks the marks {begin} and {end}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def commit() -> str:
    told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return told.stdout.strip() or "unknown"
