"""Text for a terminal. Control characters, and those that its encoding lacks, are escaped: \\u001b, \\u202e, \\u2026.

Names in profiles, plans and runs come from files of other people. Inside JSON the same escapes mean the same text.
"""

import codecs
import contextlib
import json
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO

# Control characters but tabs and line feeds, what changes the direction of text or begins a line, half surrogates.
_ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_ERRORS = "gradcast.escaped"


def _escaped(text: str) -> str:
    return json.dumps(text)[1:-1]


def _encode_escaped(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return _escaped(error.object[error.start : error.end]), error.end


codecs.register_error(_ERRORS, _encode_escaped)


def visible(text: str, encoding: str = "utf-8") -> str:
    if text.isascii() and text.isprintable():
        return text
    return _ACTS.sub(lambda match: _escaped(match[0]), text).encode(encoding, _ERRORS).decode(encoding)


def on_one_line(name: str) -> str:
    """Returns a name as part of a sentence: a line of its own could pass for one of gradcast's."""
    return visible(name).replace("\n", "\\n").replace("\t", "\\t")


class _Escaping:
    """A stream that escapes control characters."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(visible(text, self._stream.encoding or "utf-8"))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def escaping() -> Iterator[None]:
    """Escapes standard output and errors inside the block."""
    with contextlib.ExitStack() as stack:
        if sys.stdout is not None:
            stack.enter_context(contextlib.redirect_stdout(_Escaping(sys.stdout)))
        if sys.stderr is not None:
            stack.enter_context(contextlib.redirect_stderr(_Escaping(sys.stderr)))
        yield
