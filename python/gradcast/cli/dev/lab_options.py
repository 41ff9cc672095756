"""Options that the commands of ``gradcast dev lab`` share: hosts, links, and the stand-in that is trained."""

import argparse

from gradcast import _core
from gradcast.cli import common
from gradcast.errors import Error
from gradcast.files import bundled_profiles, load_profile, stretched_profile
from gradcast.lab.hosts import obstacle
from gradcast.lab.settings import REAL_MODELS

PROFILES = f"a JSON file, or one of {', '.join(bundled_profiles())}"
_HOSTS_MAX = 250
_RANKS_PER_HOST_MAX = 64
WHERE = """\
The hosts are network namespaces on this machine,
connected by links that tc throttles. This needs Linux, root and iproute2, and cleans up when it ends."""
STAND_IN = f"""\
With a profile as --model, the workers train a timed
stand-in for an accelerator: a model with the profile's tensors that sleeps where an accelerator would compute.
Communication, copies and updates are real. {WHERE}"""


def add_links(parser: argparse.ArgumentParser) -> None:
    add_hosts_option(parser, "number of hosts (default: 2, or as many as --bandwidth has)")
    bandwidths = "bandwidth of each host's link, each way; 2gbit,2gbit,1gbit gives each host its own"
    common.option(parser, "--bandwidth", "LIST", bandwidths, common.list_of(common.BANDWIDTH), "1gbit")


def add_stand_in(parser: argparse.ArgumentParser) -> None:
    for name in ("forward", "backward"):
        words = f"stand-in: time of {name}, for instance 100ms (default: the profile's)"
        common.option(parser, f"--{name}", "TIME", words, common.DURATION)
    size = "stand-in: multiply the bytes of every tensor (default: 1)"
    common.option(parser, "--scale-size", "FACTOR", size, common.factor(1e-6, 1e6))


def add_hosts_option(parser: argparse.ArgumentParser, help_: str, default: str | None = None) -> None:
    common.option(parser, "--hosts", "N", help_, common.whole_number(1, _HOSTS_MAX), default)
    ranks = "number of ranks on each host, which share its link"
    common.option(parser, "--ranks-per-host", "N", ranks, common.whole_number(1, _RANKS_PER_HOST_MAX), "1")


def add_latency_option(parser: argparse.ArgumentParser) -> None:
    latency = "latency of each host's link, each way: 500us; twice that between two hosts"
    common.option(parser, "--latency", "TIME", latency, common.TIME, "0us")


def add_timeout_option(parser: argparse.ArgumentParser, default: str) -> None:
    common.option(parser, "--timeout", "TIME", "end the run after this time", common.DURATION, default)


def add_output_options(parser: argparse.ArgumentParser, what: str) -> None:
    common.option(parser, "--plot", "PNG", f"draw the {what}", common.not_empty)
    common.add_json_option(parser)


def bandwidths_of(args: argparse.Namespace) -> tuple[float, ...]:
    given = args.bandwidth
    hosts = args.hosts or max(2, len(given))
    if len(given) not in (1, hosts):
        raise Error(f"--bandwidth has {len(given)} bandwidths for {hosts} hosts; write one, or one for each")
    if hosts < 2:
        raise Error("one host has no communication; ask for 2 or more with --hosts")
    return tuple(given) if len(given) == hosts else (given[0],) * hosts


def stand_in_profile(args: argparse.Namespace) -> _core.Profile:
    try:
        profile = load_profile(args.model)
    except Error as error:
        raise Error(f"{error}; `gradcast dev lab train` trains {' and '.join(REAL_MODELS)} for real") from None
    wanted_ns = (None if seconds is None else 1e9 * seconds for seconds in (args.forward, args.backward))
    return stretched_profile(profile, *wanted_ns)


def check_machine(args: argparse.Namespace) -> None:
    """Checks what the lab needs before anything runs, not after minutes of training."""
    if reason := obstacle():
        raise Error(reason, "environment")
    common.require_torch("gradcast dev lab")
    if args.plot:
        common.check_picture(args.plot)
