"""Lines of the program that make a step wait before the next forward pass.

Communication that the program waits for between backward and forward overlaps with neither. Only actual waits are
looked up, so a step without them pays nothing. In the warm-up ``step()`` waits for everything; there, its wait is
charged to the first line that would otherwise have waited.

Thread safety: under the session's lock.
"""

import contextlib
import dataclasses
import enum
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from gradcast import errors
from gradcast.comparison.compare import NOTICEABLE_GAIN
from gradcast.training.measure.step_trace import StepTrace

_MS = 1e6
_WAITED_NS_MIN = 50_000  # less than this is looking, not waiting
_REPORTED_STEPS_MIN = 3
_SHOWN = 5  # lines in the statistics
OURS = tuple(os.path.dirname(each.__file__) + os.sep for each in (torch, errors))
_STANDARD = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_GENERATED = ("<frozen", "<string>", "<eval_with_key>")


class Cause(enum.Enum):
    """Causes of waits: a description of the line, and advice."""

    PARAMETERS = "reads parameters after step()", "pass what reads them, as an EMA, to handle.on_update"
    STATE = "uses the optimizer's state after step()", "use it less often, or after the next forward pass"
    GRADIENTS = (
        "uses gradients between backward and step()",
        "clip with gradcast.Options(clip=Clip(norm=...)), and log handle.stats()['grad_norm']",
    )
    GRADIENTS_AFTER_STEP = "uses gradients after step()", "log handle.stats()['grad_norm'], or use them less often"
    NORM = "reads the norm of the gradients", "read it less often, as a log every few steps does"
    REPLACED = "takes a step with gradients that were replaced after backward", "change gradients in hooks of autograd"
    SECOND_BACKWARD = (
        "calls backward() again before step()",
        "put all backward passes but the last one under handle.no_sync()",
    )
    SETTINGS = (
        "takes a step of an optimizer that reads objects of which nobody can tell whether they change",
        "give it numbers, strings, or lists and dicts of these",
    )
    STATE_HELD = (
        "takes a step while the program holds the dict optimizer.state itself (a Lookahead, for example)",
        "fetch optimizer.state each time",
    )
    HOOKS = (
        "takes a step of an optimizer whose base class runs step hooks inside of it",
        "register none, or let its step() not call that of its base class",
    )
    SCALER = "takes a step with a GradScaler", "train in bf16, which needs no scaler"
    OTHER_STREAM = (
        "takes a step on another CUDA stream than that on which parameters are read",
        "call step() on the stream of forward",
    )
    FAILED = "takes a step after a backward pass that has failed", "leave the step out on all ranks"
    HELD = (
        "takes a step while the program holds the memory of parameters",
        "drop views, arrays, scripts and graphs of them before step()",
    )
    COMPILED = (
        "calls a model that is compiled as a whole",
        "pass gradcast.Options(split_compiled=True), or compile its blocks instead (block.compile())",
    )
    COMPLETION = "completes the step (flush(), state_dict())", "do so less often"

    def __init__(self, what: str, advice: str) -> None:
        self.what, self.advice = what, advice


# Better advice, by functions of torch through which the line has come.
_ADVICE = {
    "update_parameters": "call handle.keep_average(averaged) once instead",
    "clip_grad_norm_": "clip with gradcast.Options(clip=Clip(norm=...))",
    "clip_grad_value_": "clip with gradcast.Options(clip=Clip(value=...))",
    "_unscale_grads_": Cause.SCALER.advice,
    "zero_grad": "call zero_grad() right after step(), or with set_to_none=True",
}


@dataclasses.dataclass
class _Line:
    """A line of the program that waits. ``count``: steps in which it did; ``parameters``: that it reads, if known."""

    where: str
    cause: Cause
    advice: str
    count: int = 0
    total_ns: int = 0
    last_step: int = -1
    parameters: int | None = None
    reported: bool = False


class EarlyWaits:
    """The waits of one session. ``report`` gets a sentence to log, once per line that costs noticeable time."""

    def __init__(self, trace: StepTrace, parameter_count: int, report: Callable[[str], None]) -> None:
        self._trace, self._parameter_count, self._report = trace, parameter_count, report
        self._lines: dict[tuple[Any, ...], _Line] = {}
        self._reads: list[tuple[_Line, int]] = []  # of this step, with ns; they count once forward has been seen
        self._read_counts: dict[int, int] = {}  # of this step in the warm-up: parameters by id of the line
        self._steps, self._elapsed_ns = 0, 0  # those that have ended and counted
        self._began_ns: int | None = None
        self._counts = self._measuring = self._in_forward = self._inside = False
        self._hidden_ns = 0  # what step() has waited in this step of the warm-up, until a line has got it

    def begin_step(self, now_ns: int, *, measuring: bool, counts: bool) -> None:
        """Called where backward begins. ``measuring``: in a warm-up. ``counts``: the step can overlap with forward."""
        if self._counts:
            self._steps += 1
            self._elapsed_ns += now_ns - self._began_ns
            self._report_noticeable()
        # The first step sets up connections. A warm-up's waits count until there are those of a plan.
        counts &= self._began_ns is not None
        if counts and measuring != self._measuring:
            self._forget()
        self._counts, self._measuring, self._began_ns = counts, measuring, now_ns
        self._in_forward, self._hidden_ns = False, 0
        self._reads.clear()
        self._read_counts.clear()

    def _forget(self) -> None:
        self._steps, self._elapsed_ns = 0, 0
        for line in self._lines.values():
            line.count, line.total_ns, line.last_step = 0, 0, -1

    @contextlib.contextmanager
    def at(self, cause: Cause, *, in_forward: bool = False) -> Iterator[None]:
        """Charges waits inside to the program's line. ``in_forward``: also after the start of forward."""
        if not self._counts or self._inside or (self._in_forward and not in_forward):
            yield
            return
        before_ns, self._inside = self._trace.waited_ns, True
        try:
            yield
        finally:
            self._inside = False
        waited_ns = self._trace.waited_ns - before_ns
        if waited_ns > _WAITED_NS_MIN:
            self._add(self._line(cause), waited_ns)

    def step_waited(self, waited_ns: int) -> None:
        """Charges the wait of ``step()``, in the warm-up, to the first line that would otherwise have waited."""
        self._hidden_ns = waited_ns

    def would_wait(self, cause: Cause, parameters: int = 0) -> None:
        """Notes a would-be wait of the program's line, in the warm-up. ``parameters``: that it reads for the first
        time."""
        if not self._counts or self._in_forward:
            return
        line = self._line(cause)
        if parameters:
            self._read_counts[id(line)] = self._read_counts.get(id(line), 0) + parameters
        waited_ns, self._hidden_ns = self._hidden_ns, 0
        self._add(line, waited_ns)

    def forward_begins(self) -> None:
        """Called where forward of the module begins: reads between ``step()`` and it are not forward's own."""
        if self._in_forward:
            return
        self._in_forward = True
        for line, waited_ns in self._reads:
            line.parameters = self._read_counts.get(id(line), line.parameters)
            self._count(line, waited_ns)
        self._reads.clear()

    def _add(self, line: _Line, waited_ns: int) -> None:
        if line.cause is Cause.PARAMETERS:
            self._reads.append((line, waited_ns))
        else:
            self._count(line, waited_ns)

    def _count(self, line: _Line, waited_ns: int) -> None:
        line.total_ns += waited_ns
        line.count += line.last_step != self._steps
        line.last_step = self._steps

    def _report_noticeable(self) -> None:
        for line in self._lines.values():
            if not line.reported and line.count >= _REPORTED_STEPS_MIN and self._is_noticeable(line):
                line.reported = True
                self._report(f"{self._sentence(line)}, {self._ms_per_step(line):.1f} ms per step: {line.advice}")

    def reason(self) -> str | None:
        """Returns the line that costs the most overlap, as "train.py:83 reads all parameters after step()"; None if no
        line costs a noticeable share of most steps."""
        usual = [each for each in self._lines.values() if 2 * each.count >= self._steps and self._is_noticeable(each)]
        return self._sentence(max(usual, key=lambda line: line.total_ns)) if usual else None

    def stats(self) -> list[dict[str, Any]]:
        """For handle.stats(): the worst first."""
        waited = [line for line in self._lines.values() if line.count]
        return [
            {
                "where": line.where,
                "what": self._what(line),
                "count": line.count,
                "ms_per_step": self._ms_per_step(line),
                "advice": line.advice,
            }
            for line in sorted(waited, key=lambda line: -line.total_ns)[:_SHOWN]
        ]

    def _line(self, cause: Cause) -> _Line:
        key, where_, advice = line_here(cause)
        if key not in self._lines:
            # The caller logs a longer sentence.
            self._lines[key] = _Line(where_, cause, advice, reported=cause in (Cause.COMPILED, Cause.HELD))
        return self._lines[key]

    def _is_noticeable(self, line: _Line) -> bool:
        return line.count > 0 and line.total_ns > NOTICEABLE_GAIN * self._elapsed_ns

    def _ms_per_step(self, line: _Line) -> float:
        return line.total_ns / _MS / max(self._steps, line.count)

    def _what(self, line: _Line) -> str:
        if line.parameters is None:
            return line.cause.what
        return counted(line.cause, line.parameters, self._parameter_count)

    def _sentence(self, line: _Line) -> str:
        return f"{line.where} {self._what(line)}"


def call_site() -> tuple[str, int, Sequence[str]]:
    """File and line of the innermost frame that is neither of gradcast, torch nor Python's library, and the names of
    functions that it has called to come here."""
    passed: list[str] = []
    for frame, number in traceback.walk_stack(sys._getframe(1)):
        code = frame.f_code
        if not _is_library(code.co_filename):
            return code.co_filename, number, passed
        passed.append(code.co_name)
    return "", 0, passed


def _is_library(file: str) -> bool:
    standard = file.startswith(_STANDARD) and "-packages" not in file
    return standard or file.startswith(OURS) or file.startswith(_GENERATED)


def counted(cause: Cause, parameters: int, total: int) -> str:
    """Returns a description of the line with its number of parameters: "reads all parameters after step()"."""
    if cause is not Cause.PARAMETERS:
        return cause.what
    count = "all" if parameters == total else f"{parameters} of {total}"
    return cause.what.replace("parameters", f"{count} parameters")


def line_here(cause: Cause) -> tuple[tuple[Any, ...], str, str]:
    """A key for the program's line, the line as "train.py:83", and what to do there instead."""
    file, number, passed = call_site()
    advice = next((_ADVICE[name] for name in passed if name in _ADVICE), cause.advice)
    return (file, number, cause), shown_line(file, number), advice


def where() -> str:
    """The program's line, as "train.py:83"."""
    return shown_line(*call_site()[:2])


def shown_line(file: str, number: int) -> str:
    """The path from the current folder, or else its last two parts."""
    if not file:
        return "a thread of autograd"
    here = os.getcwd() + os.sep
    path = file.removeprefix(here) if file.startswith(here) else os.sep.join(file.split(os.sep)[-2:])
    return f"{path}:{number}"
