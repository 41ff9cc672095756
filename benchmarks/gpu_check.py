"""Runs the checks that need a GPU, the most valuable first, until the time is over, and prints a table of what passed.

    make gpu-kit                                  # on any machine with nvcc: see gpu_kit.py
    python -m benchmarks.gpu_check FOLDER         # on the machine with the GPU, with build-gpu/kit carried there
    python -m benchmarks.gpu_check FOLDER --only 'tiny|mirror-25'      # these, also of the longer ones (--list)

FOLDER receives the logs and table.txt. A check that an earlier run in this folder has passed, of the same tree and on
the same device, does not run again (--again), so that the time may come in pieces. A check begins if there is time for
what it may take. It is ended with all its processes when it takes much longer, or when the time is over. What was not
reached, and what a check leaves out, is named, and has not passed; nor has what skips a test. Lines with a goal or a
measured number are for the reader: no time is asserted.

Exit status: 0 if all passed, 1 if something failed, 3 if something was not reached or left out.

``--device cpu`` tries what can be tried without a GPU, with the tree's own build unless ``--kit`` names one.
"""

import argparse
import contextlib
import math
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import gpu_kit
from benchmarks.gpu_kit import ROOT, KitError

DEADLINE_S = 560.0  # a command on a machine that is lent may take ten minutes
_LIMIT_FACTOR = 2  # a check may take at most so many times its budget
_ABORT_S = 5.0  # for Python to print where its threads are
_INCOMPLETE = 3  # exit status, of a check as well
_SHOWN = re.compile(r"(goal|measured): |case |\| |NCCL refuses|after \d+ s the ranks")
_SHOWN_LINES = 15  # of one that has failed
_SKIPPED = re.compile(r"\[  SKIPPED \]|\b[1-9]\d* skipped")
_LEFT_OUT = re.compile(r"^(?:case (.*): )?left out[,:] (.*)", re.MULTILINE)


class Check(NamedTuple):
    """``command``: words, with {python}, {kit} and {logs} in them. ``on_cpu``: it can be tried on the CPU, too."""

    name: str
    budget_s: float
    command: str
    environment: Mapping[str, str] = {}
    on_cpu: bool = False

    def fits(self, device: str, left_s: float = math.inf) -> bool:
        return (self.on_cpu or device != "cpu") and self.budget_s <= left_s


_CASES, _TRAINING = "{python} -m benchmarks.gpu_cases", "{python} -m benchmarks.gpu_training"
_MIRROR = "{python} -m benchmarks.nccl_mirror.mirror --library {kit}/lib/libnccl.so.2 --traces {logs}/traces"
_COMPARED = "--ways 'alone,DDP 4 MiB,DDP 25 MiB,gradcast hook,gradcast overlap,gradcast fallback,gradcast fallback DDP'"
_SYNC = "SyncBatchNorm and metrics"
FIRST = (
    Check("smoke", 120, f"{_TRAINING} --steps 12", on_cpu=True),
    Check("ddp", 90, f"{_CASES} --limit 80 'DDP with batch norm on late ranks'", on_cpu=True),
    Check(
        "order",
        90,
        f"{_CASES} --limit 60 '{_SYNC}, 2 connections' '{_SYNC}, 8 connections' '{_SYNC}, 32 connections' "
        "'the launch order of NCCL'",
    ),
    Check(
        "nccl-options", 60, f"{_CASES} --limit 55 'at most 2 thread blocks' 'fewer thread blocks' 'registered memory'"
    ),
    Check("sharded", 45, f"{_CASES} --limit 40 replicate HSDP 'FSDP beside a group of replicas'", on_cpu=True),
    Check("mirror", 150, f"{_MIRROR} --models ResNet --gbit 100 {_COMPARED}", on_cpu=True),
    Check(
        "host-bound",
        60,
        f"{_MIRROR} --models ResNet --gbit inf --latency-us 0 --batch 8 --turns 3 {_COMPARED}",
        on_cpu=True,
    ),
    Check("memory", 60, f"{_CASES} --limit 55 memory", on_cpu=True),
    Check(
        "compiled",
        60,
        f"{_MIRROR} --compiled --models ResNet --gbit 25 --turns 3 --ways 'DDP 25 MiB,gradcast overlap'",
        on_cpu=True,
    ),
    Check("reduce-overhead", 45, f"{_CASES} --limit 80 'blocks compiled with reduce-overhead'", on_cpu=True),
    Check("tiny", 60, f"{_CASES} --limit 110 'tiny steps'", on_cpu=True),
)

_PYTEST = "{python} -m pytest -q -rs -p no:cacheprovider tests/training/step/test_cuda.py"
_SANITIZER = "compute-sanitizer --error-exitcode 9 --tool"
_ALL = "--target-processes all"
# NCCL and torch try calls that a device may refuse, and take another way: only what happens to memory counts.
_MEMCHECK = "memcheck --report-api-errors no"
_GLOO = f"{_TRAINING} --backend gloo"
_SOME = "--gbit 25,100 --ways 'alone,DDP 25 MiB,gradcast hook,gradcast overlap'"
_STREAMS = {"TORCH_CUDA_SANITIZER": "1"}  # torch's: reads and writes of a tensor on two streams without an order
LONGER = (
    Check("nccl", 60, "{kit}/bin/nccl_device_test"),
    Check("nccl-memcheck", 300, f"{_SANITIZER} {_MEMCHECK} {{kit}}/bin/nccl_device_test"),
    Check("tests-gloo", 300, _PYTEST),
    Check("tests-nccl", 300, _PYTEST, {"GRADCAST_TEST_BACKEND": "cpu:gloo,cuda:nccl"}),
    Check("cases", 300, _CASES, on_cpu=True),
    Check("training-gloo", 120, f"{_GLOO} --trace {{logs}}/trace.json"),
    Check("bandwidth", 60, "{python} -m benchmarks.gpu_bandwidth", on_cpu=True),
    *(
        Check(f"training-{tool.split()[0]}", 300, f"{_SANITIZER} {tool} {_ALL} {_GLOO} --steps 8 --width 64")
        for tool in (_MEMCHECK, "racecheck", "initcheck", "synccheck")
    ),
    Check("training-streams", 120, f"{_GLOO} --steps 8 --width 64", _STREAMS),
    # In fewer steps: the tool slows NCCL's kernels, which wait for each other.
    Check("training-memcheck-nccl", 300, f"{_SANITIZER} {_MEMCHECK} {_ALL} {_TRAINING} --steps 6 --width 32"),
    Check("training-streams-nccl", 120, f"{_TRAINING} --steps 8 --width 64", _STREAMS),
    *(Check(f"mirror-{gbit}", 420, f"{_MIRROR} --gbit {gbit}", on_cpu=True) for gbit in (25, 100, 400)),
    *(
        Check(f"mirror-10-{model}", 420, f"{_MIRROR} --gbit 10 --models {model} --turns 3")
        for model in ("ResNet", "GPT")
    ),
    Check("mirror-foreach", 420, f"{_MIRROR} {_SOME} --optimizer foreach"),
    Check("mirror-compiled", 420, f"{_MIRROR} {_SOME} --compiled"),
    Check("mirror-compiled-foreach", 420, f"{_MIRROR} {_SOME} --compiled --optimizer foreach"),
    Check("bench", 120, "mpirun --allow-run-as-root -n 1 {kit}/bin/gradcast-bench --transport nccl"),
)


class Machine(NamedTuple):
    """Where the checks run, and with what. ``identity``: what two runs share whose results belong together."""

    device: str
    kit: Path
    logs: Path
    environment: Mapping[str, str]
    identity: str

    def words(self, check: Check) -> list[str]:
        places = {"python": sys.executable, "kit": self.kit, "logs": self.logs}
        words = [word.format(**places) for word in shlex.split(check.command)]
        return [*words, "--device", "cpu"] if self.device == "cpu" else words


class Table:
    """table.txt, which also goes to the standard output. A line is there as soon as its check has ended."""

    def __init__(self, path: Path, identity: str) -> None:
        self._path = path
        self.passed = {name for name, state in self._states(identity).items() if state.startswith("passed")}
        self.add(f"== {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, {identity}")

    def _states(self, identity: str) -> dict[str, str]:
        """The last result of each check in earlier runs."""
        states, is_ours = {}, False
        for line in self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else ():
            if line.startswith("== "):
                is_ours = line.endswith(f" UTC, {identity}")
            elif is_ours and not line.startswith(" "):
                name, _, state = line.partition(" ")
                states[name] = state.strip()
        return states

    def add(self, *lines: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            for line in lines:
                file.write(line + "\n")
                print(line, flush=True)


def limit_s(budget_s: float, left_s: float, later_s: float) -> float:
    """Time for a check: its budget, and of what is to spare as much again. ``later_s``: the budgets of later ones that
    fit into the time that is left."""
    return min(_LIMIT_FACTOR * budget_s, max(budget_s, left_s - later_s), left_s)


def run(checks: Sequence[Check], machine: Machine, deadline_s: float, *, again: bool = False) -> int:
    """Returns the exit status. ``deadline_s``: time for all."""
    end_s = time.monotonic() + deadline_s
    table = Table(machine.logs / "table.txt", machine.identity)
    states = []
    open_ = [each for each in checks if again or each.name not in table.passed]
    for each in checks:
        if each not in open_:
            print(f"{each.name:<24} passed in an earlier run", flush=True)
    for number, check in enumerate(open_):
        left_s = end_s - time.monotonic()
        if not check.fits(machine.device):
            state, shown = "left out: it needs a GPU", []
        elif not check.fits(machine.device, left_s):
            state, shown = f"not reached: {left_s:.0f} s were left, and it may take {check.budget_s:g}", []
        else:
            later_s = sum(each.budget_s for each in open_[number + 1 :] if each.fits(machine.device, left_s))
            state, shown = run_check(check, machine, limit_s(check.budget_s, left_s, later_s))
        states.append(state)
        table.add(f"{check.name:<24} {state}", *(f"    {line}" for line in shown))
    if any(state.startswith("FAILED") for state in states):
        return 1
    return 0 if all(state.startswith("passed") for state in states) else _INCOMPLETE


def run_check(check: Check, machine: Machine, limit: float) -> tuple[str, list[str]]:
    """Returns the result of a check that has ended, and the lines of its log that belong into the table."""
    words, log, begin_s = machine.words(check), machine.logs / f"{check.name}.log", time.monotonic()
    if shutil.which(words[0]) is None:
        return f"left out: there is no {words[0]} here", []
    code = _end_of(words, machine.environment | dict(check.environment), log, limit)
    took_s, text = time.monotonic() - begin_s, log.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines()
    shown = [line for line in lines if _SHOWN.match(line)]
    omitted = "; ".join(f"{name}: {why}" if name else why for name, why in _LEFT_OUT.findall(text))
    if code is None:
        state = f"FAILED, it had not ended after {took_s:.0f} s and was ended, see {log}"
    elif code == _INCOMPLETE and omitted:
        state = f"left out: {omitted}, see {log}"
    elif code != 0:
        state, shown = f"FAILED after {took_s:.0f} s, exit status {code}, see {log}", shown + lines[-_SHOWN_LINES:]
    elif _SKIPPED.search(text):
        state = f"FAILED, something was skipped, see {log}"
    else:
        state = f"passed, {took_s:.0f} s{', but left out: ' + omitted if omitted else ''}"
    return state, shown


def _end_of(words: Sequence[str], environment: Mapping[str, str], log: Path, limit: float) -> int | None:
    """The exit status of a command, None if it had to be ended. Its process group ends with it."""
    with log.open("w", encoding="utf-8") as file:
        # A group, not a session: what ends this program may look for the processes of its session.
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env={**environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            preexec_fn=os.setpgrp,
        )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        _signal_group(process, signal.SIGABRT)  # Python prints the stacks of its threads
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_ABORT_S)
        return None
    finally:
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _signal_group(process: subprocess.Popen, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def device_name() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise KitError("there is no CUDA device here (nvidia-smi finds none); --device cpu tries the rest") from None
    return told.strip().replace("\n", " and ")


def commit() -> str:
    told = subprocess.run(["git", "describe", "--always"], cwd=ROOT, capture_output=True, text=True, check=False)
    return told.stdout.strip() or "unknown"


def machine_of(args: argparse.Namespace) -> Machine:
    """Raises KitError if the checks cannot run here."""
    device = device_name() if args.device == "cuda" else "CPU"
    kit = args.kit or (gpu_kit.KIT if args.device == "cuda" else None)
    package = ROOT / "python"
    if kit is not None:
        kit = kit.resolve()
        if args.build:
            gpu_kit.build_modules(kit, sys.executable)
        package = gpu_kit.site_of(kit)
    tree = gpu_kit.digest((*gpu_kit.SOURCES, "python/gradcast", "benchmarks", "tests/training"), (*gpu_kit.CPP, ".py"))
    paths = [str(package), str(ROOT / "tests"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONFAULTHANDLER": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # sums in the same order each time, for comparing bits
        "LD_LIBRARY_PATH": gpu_kit.library_path(),
    }
    (args.folder / "traces").mkdir(parents=True, exist_ok=True)
    logs = args.folder.resolve()
    return Machine(args.device, kit or gpu_kit.KIT, logs, environment, f"{device}, commit {commit()}, tree {tree}")


def chosen(pattern: str | None) -> Iterator[Check]:
    """The checks of the first list, or those of both whose whole names match."""
    for each in (*FIRST, *LONGER) if pattern else FIRST:
        if pattern is None or re.fullmatch(pattern, each.name):
            yield each


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=gpu_kit.BUILD / "logs", help="default: build-gpu/logs")
    parser.add_argument(
        "--deadline", type=float, default=DEADLINE_S, metavar="S", help="for all (default: %(default)g)"
    )
    parser.add_argument("--only", metavar="PATTERN", help="the checks with such names, a regular expression")
    parser.add_argument("--again", action="store_true", help="also what has passed before")
    parser.add_argument("--list", action="store_true", help="print the checks, and the seconds that each may take")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--kit", type=Path, help="what gpu_kit.py has built (default: build-gpu/kit)")
    parser.add_argument("--build", action="store_true", help="build the kit's Python modules here first")
    args = parser.parse_args()
    checks = list(chosen(args.only))
    if args.list:
        for each in checks if args.only else (*FIRST, *LONGER):
            print(f"{each.name:<24} {each.budget_s:g}")
        return 0
    if not checks:
        parser.error(f"no check is named {args.only!r}; --list prints the names")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which ends the check that runs, too
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        return run(checks, machine_of(args), args.deadline, again=args.again)
    except KitError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
