"""Options that the actions of ``gradcast lab`` share: hosts, links, and the stand-in that is trained."""

import argparse
import importlib.util

from gradcast import _core
from gradcast.cli import common
from gradcast.errors import Error
from gradcast.files import check_writable, load_profile, scaled_profile
from gradcast.lab.hosts import obstacle
from gradcast.lab.settings import REAL_MODELS
from gradcast.units import parse_bandwidth_bits_per_s

_HOSTS_MAX = 250
WHERE = """\
The hosts are network namespaces on this machine,
connected by links that tc throttles. This needs Linux, root and iproute2, and cleans up when it ends."""
STAND_IN = f"""\
With a profile as --model, the workers train a timed
stand-in for an accelerator: a model with the profile's tensors that sleeps where an accelerator would compute.
Communication, copies and updates are real. {WHERE}"""


def add_links(parser: argparse.ArgumentParser) -> None:
    add_hosts_option(parser, default=None, help_="number of hosts (default: 2, or as many as --rates has)")
    add_rate_option(parser, "1gbit")
    parser.add_argument(
        "--rates",
        type=_list_of_rates,
        metavar="RATES",
        help="bandwidth of each host's link, separated by commas: 2gbit,2gbit,1gbit",
    )


def add_stand_in(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--forward-ms", type=common.POSITIVE, metavar="MS", help="stand-in: time of forward (default: the profile's)"
    )
    parser.add_argument(
        "--backward-ms", type=common.POSITIVE, metavar="MS", help="stand-in: time of backward (default: the profile's)"
    )
    parser.add_argument(
        "--scale-size",
        type=common.POSITIVE,
        metavar="FACTOR",
        help="stand-in: multiply the bytes of every tensor (default: 1)",
    )


def add_hosts_option(parser: argparse.ArgumentParser, *, default: int | None, help_: str) -> None:
    parser.add_argument("--hosts", type=common.whole_number(1, _HOSTS_MAX), default=default, metavar="N", help=help_)


def add_rate_option(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--rate",
        type=common.BANDWIDTH,
        default=parse_bandwidth_bits_per_s(default),
        help=f"bandwidth of each host's link, each way (default: {default})",
    )


def add_latency_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--latency",
        type=common.TIME,
        default=0.0,
        metavar="TIME",
        help="latency of each host's link, each way: 500us; twice that between two hosts (default: none)",
    )


def add_timeout_option(parser: argparse.ArgumentParser, default_s: float) -> None:
    parser.add_argument(
        "--timeout",
        type=common.POSITIVE,
        default=default_s,
        metavar="SECONDS",
        help=f"end the run after this time (default: {default_s:g})",
    )


def _list_of_rates(text: str) -> tuple[float, ...]:
    return tuple(common.BANDWIDTH(part) for part in text.split(","))


def rates_of(args: argparse.Namespace) -> tuple[float, ...]:
    """Returns the bandwidth of each host's link."""
    hosts = args.hosts or len(args.rates or (0, 0))
    rates = args.rates or (args.rate,) * hosts
    if len(rates) != hosts:
        raise Error(f"--rates has {len(rates)} rates for {hosts} hosts; write one for each")
    if hosts < 2:
        raise Error("one host has no communication; ask for 2 or more with --hosts")
    return rates


def stand_in_profile(args: argparse.Namespace) -> _core.Profile:
    """Loads the profile, with the requested times of forward and backward."""
    try:
        profile = load_profile(args.model)
    except Error as error:
        raise Error(f"{error}; `gradcast lab train` trains {' and '.join(REAL_MODELS)} for real") from None
    forward_factor = args.forward_ms * 1e6 / profile.forward_ns if args.forward_ms else 1.0
    backward_factor = args.backward_ms * 1e6 / profile.backward_ns if args.backward_ms else 1.0
    return scaled_profile(profile, forward_factor, backward_factor=backward_factor)


def check_machine(args: argparse.Namespace) -> None:
    """Checks what the lab needs before anything runs, not after minutes of training."""
    if reason := obstacle():
        raise Error(reason)
    if importlib.util.find_spec("torch") is None:
        raise Error("gradcast lab needs PyTorch, which is not installed: pip install torch")
    if args.output:
        check_writable(args.output, "picture")
        importlib.import_module("gradcast.plots")  # its import raises an Error if matplotlib is missing
