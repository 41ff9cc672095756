"""What programs share that train on hosts with slow links (root, iproute2): options, start, and turns."""

import argparse
import inspect
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from gradcast.cli.common import BANDWIDTH
from gradcast.lab import Network
from gradcast.lab.workers import run_for_result

TIMEOUT_S = 3600.0
T = TypeVar("T")


def parser_of(doc: str, *, rate: str, hosts: int | None = 2) -> argparse.ArgumentParser:
    """A parser with the hosts (None: the program's own option) and their links."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if hosts is not None:
        parser.add_argument("--hosts", type=int, default=hosts, help=f"how many (default: {hosts})")
    link = f"of each link, each way (default: {rate})"
    parser.add_argument("--rate", type=BANDWIDTH, default=rate, help=link)
    return parser


def name_of(function: Callable[..., Any]) -> str:
    """The name by which a rank finds a function of the program that runs."""
    return f"{inspect.getmodule(function).__spec__.name}:{function.__name__}"


def measured(
    train: Callable[..., Any], hosts: int, rate_bits_per_s: float, *arguments: Any, promptly: bool = False
) -> Any:
    """What ``train(*arguments)`` returns on rank 0 of hosts with such links. ``promptly``: see ``run_for_result``."""
    with Network(hosts, rate_bits_per_s) as network:
        return run_for_result(
            name_of(train),
            arguments,
            hosts,
            promptly=promptly,
            timeout_s=TIMEOUT_S,
            network=network,
            output=sys.stderr,
        )


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
