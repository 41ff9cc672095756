"""What programs share that train on hosts with slow links (root, iproute2): options, start, and one rank's frame."""

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gradcast.cli.common import BANDWIDTH
from gradcast.lab import Network
from gradcast.lab.cores import wake_promptly
from gradcast.lab.workers import run_for_result

_TIMEOUT_S = 3600.0
T = TypeVar("T")


def parser_of(doc: str, *, rate: str, hosts: int | None = 2) -> argparse.ArgumentParser:
    """A parser with the hosts (None: the program's own option), their links, and what makes the program one rank."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if hosts is not None:
        parser.add_argument("--hosts", type=int, default=hosts, help=f"how many (default: {hosts})")
    link = f"of each link, each way (default: {rate})"
    parser.add_argument("--rate", type=BANDWIDTH, default=rate, help=link)
    add_worker(parser)
    return parser


def add_worker(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--worker", metavar="RESULTS", help=argparse.SUPPRESS)


def measured(program: str, hosts: int, rate_bits_per_s: float, arguments: Sequence[str] | None = None) -> Any:
    """What rank 0 writes when the program trains on these hosts. ``arguments``: None for those of the command line."""
    given = sys.argv[1:] if arguments is None else arguments
    with Network(hosts, rate_bits_per_s) as network:
        return run_for_result(
            f"benchmarks.{program}",
            [*given, "--worker"],
            hosts,
            timeout_s=_TIMEOUT_S,
            network=network,
            output=sys.stderr,
        )


@contextlib.contextmanager
def one_rank(*, promptly: bool = False) -> Iterator[int]:
    """One rank of the training. ``promptly``: it waits for a stand-in, rather than compute."""
    torch.set_num_threads(1)
    if promptly:
        wake_promptly()
    dist.init_process_group("gloo")
    yield dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()


def write(path: str, facts: Any) -> None:
    """On rank 0."""
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(facts))


def in_turns(names: Sequence[T], rounds: int) -> Iterator[T]:
    """Each name once per round. Every second round is the one before it backwards, so what drifts with time favours
    none; each pair of rounds begins with another name."""
    for number in range(rounds):
        first = number // 2 % len(names)
        turns = [*names[first:], *names[:first]]
        yield from turns if number % 2 == 0 else reversed(turns)


def spread(times_ms: Sequence[float]) -> tuple[str, str]:
    """The median, and where 80 % of the times lie."""
    ordered, tenth = sorted(times_ms), len(times_ms) // 10
    return f"{statistics.median(ordered):.1f}", f"{ordered[tenth]:.0f} to {ordered[-1 - tenth]:.0f}"
