"""Measures pairs of ranks, over raw TCP and over Gloo. Collective: all ranks call; ranks without a pair wait."""

import dataclasses
import datetime
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from gradcast.diagnosis.network import tcp
from gradcast.diagnosis.network.findings import STREAMS, Pair
from gradcast.diagnosis.network.hosts import HostInterfaces, Rounds
from gradcast.errors import Error, first_line
from gradcast.training.compat import extension
from gradcast.training.ranks.group import Group

# For one stream over another interface, and the timeout of its connection: many such networks connect no hosts.
_TRY_S = 0.2
TRY_TIMEOUT_S = 1.5
# Time of the largest Gloo message. It is long enough that start-up does not count, also at a high latency, where TCP
# needs many round trips before it fills a link.
_GLOO_MESSAGE_S = 0.05
_GLOO_BYTES = (64 << 10, 256 << 20)
# The other size costs only start-up. A size in between would measure the token bucket of a traffic shaper, which lets
# the first bytes through at once.
_GLOO_SMALL_BYTES = 1 << 10
_GLOO_MESSAGES = 3
# Assumed if TCP could not be measured.
_UNKNOWN_GBIT_PER_S = 0.01

Progress = Callable[[str], None]
# Bytes, and ns until the reply.
Samples = list[tuple[int, float]]


@dataclasses.dataclass(frozen=True)
class Network:
    """The context of all measurements. ``hosts``, and the ``addresses`` on which they listen, are by rank."""

    group: Group  # over Gloo, for the check alone
    hosts: Sequence[HostInterfaces]
    token: bytes
    report: Progress
    listener: tcp.Listener | None = None
    addresses: Sequence[tcp.ListenAddress] = ()

    def label(self, rank: int) -> str:
        return f"rank {rank} ({self.hosts[rank].name}, {self.hosts[rank].chosen.address})"


def barrier(group: Group, what: str) -> None:
    """Waits until all ranks have come here. Raises an Error that names the missing ranks after the group's timeout."""
    try:
        dist.monitored_barrier(group.own, datetime.timedelta(seconds=group.timeout_s), wait_all_ranks=True)
    except RuntimeError as error:
        raise Error(
            f"{what}: not all ranks have arrived; on rank {group.rank}: {first_line(error)}", "communication"
        ) from None


def measured_over_tcp(network: Network, rounds: Rounds, seconds: float) -> list[Pair]:
    """Returns all pairs, the same on every rank. A pair that fails has a fault; the others go on."""
    own: dict[tuple[int, int], tcp.ReceivedRates | str] = {}
    for pair in _own_pairs(network, rounds, "raw TCP"):
        try:
            own[pair] = _measure(network, pair, seconds)
        except Error as error:
            own[pair] = str(error)
    everybody = network.group.gather(own)
    pairs = sorted(pair for each in rounds for pair in each)
    return [pair_of(everybody[a][a, b], everybody[b][a, b], a, b) for a, b in pairs]


def measured_over_gloo(network: Network, rounds: Rounds, pairs: Sequence[Pair]) -> list[Pair]:
    """Adds Gloo's rates to ``pairs``. Messages go in one direction at a time, as over TCP."""
    over_tcp = {(pair.a, pair.b): pair for pair in pairs}
    own: dict[tuple[int, int], Samples] = {}
    for pair in _own_pairs(network, rounds, "Gloo"):
        sizes = (_GLOO_SMALL_BYTES, gloo_bytes(over_tcp[pair]))
        own[pair] = [sample for size in sizes for sample in _messages(network.group, pair, size)]
    everybody = network.group.gather(own)
    return [with_gloo(pair, [everybody[rank][pair.a, pair.b] for rank in (pair.a, pair.b)]) for pair in pairs]


def gloo_bytes(pair: Pair) -> int:
    seconds = tcp.long_enough_s(_GLOO_MESSAGE_S, 2e-6 * (pair.latency_us or 0.0))
    size = int(seconds * 1e9 * (pair.tcp_gbit_per_s or _UNKNOWN_GBIT_PER_S) / 8)
    return min(max(size, _GLOO_BYTES[0]), _GLOO_BYTES[1])


def with_gloo(pair: Pair, directions: Sequence[Samples]) -> Pair:
    """Adds Gloo's rate and cost. ``directions`` are the samples of each side's messages; the slower one counts."""
    gbit_per_s, alpha_us, beta = min(map(_line, directions))
    return dataclasses.replace(pair, gloo_gbit_per_s=gbit_per_s, alpha_us=alpha_us, beta_ns_per_byte=beta)


def _line(samples: Samples) -> tuple[float, float, float]:
    """Returns the largest message's Gbit/s, and the cost of a message: start-up us, and ns per byte.

    The line goes through the smallest and the largest size. A sample holds a message and its reply, which takes as long
    as a message takes to start; hence the half.
    """
    sizes = [size for size, _ in samples]
    small, large = min(sizes), max(sizes)
    small_ns, large_ns = (
        statistics.median(time_ns for size, time_ns in samples if size == each) for each in (small, large)
    )
    beta = max(0.0, large_ns - small_ns) / (large - small)
    return 8 * large / large_ns, max(0.0, small_ns - beta * small) / 2 / 1e3, beta


def one_way_gbit_per_s(network: Network, pair: tuple[int, int]) -> float | None:
    """Returns the rate of one stream to the first of the pair; None if it fails, and on all other ranks."""
    first, second = pair
    token = tcp.pair_token(network.token, pair)
    try:
        if network.group.rank == first:
            return tcp.answer_one_way(network.listener, token, network.label(second)) / 1e9
        if network.group.rank == second:
            tcp.measure_one_way(network.addresses[first], token, _TRY_S, network.label(first), TRY_TIMEOUT_S)
    except Error:
        return None
    return None


def _own_pairs(network: Network, rounds: Rounds, what: str) -> Iterator[tuple[int, int]]:
    """Yields this rank's pairs, each when all ranks have reached its round."""
    for index, pairs in enumerate(rounds):
        what_round = f"{what}, round {index + 1} of {len(rounds)}"
        barrier(network.group, f"network check, {what_round}")
        network.report(f"{what_round}: " + ", ".join(f"{a}-{b}" for a, b in pairs[:4]))
        yield from (pair for pair in pairs if network.group.rank in pair)


def _measure(network: Network, pair: tuple[int, int], seconds: float) -> tcp.ReceivedRates:
    """Measures a pair; the higher rank connects to the lower one."""
    first, second = pair
    token = tcp.pair_token(network.token, pair)
    if network.group.rank == first:
        return tcp.answer(network.listener, token, streams=STREAMS, whom=network.label(second))
    return tcp.measure(network.addresses[first], token, streams=STREAMS, seconds=seconds, whom=network.label(first))


def pair_of(a_found: tcp.ReceivedRates | str, b_found: tcp.ReceivedRates | str, a: int, b: int) -> Pair:
    if isinstance(a_found, str) or isinstance(b_found, str):
        # The connecting side knows more about the failure than the waiting side.
        return Pair(a, b, fault=b_found if isinstance(b_found, str) else str(a_found))
    one = min(a_found.one_bits_per_s, b_found.one_bits_per_s)
    several = min(a_found.several_bits_per_s, b_found.several_bits_per_s)
    fault = None if one and several else "too few bytes arrived to compute a rate"
    return Pair(a, b, b_found.latency_us, one / 1e9 or None, several / 1e9 or None, fault=fault)


def _messages(group: Group, pair: tuple[int, int], size_bytes: int) -> Samples:
    """Returns bytes and ns of this rank's messages to the other, until the reply that they have arrived."""
    sends_first = group.rank == pair[0]
    other = pair[1] if sends_first else pair[0]
    message, reply = (torch.zeros(size, dtype=torch.uint8, device="cpu") for size in (size_bytes, 1))
    times = []
    for sends in [sends_first, not sends_first] * _GLOO_MESSAGES:
        start = time.perf_counter()
        for tensor, is_sent in ((message, sends), (reply, not sends)):
            _move(group, tensor, other, is_sent)
        if sends:
            times.append((size_bytes, 1e9 * (time.perf_counter() - start)))
    return times


def _move(group: Group, tensor: torch.Tensor, other: int, sends: bool) -> None:
    c10d = extension.load()
    try:
        (c10d.send if sends else c10d.receive)(group.own, tensor, other, group.timeout_s)
    except RuntimeError as error:
        what = "to" if sends else "from"
        raise Error(
            f"network check: a message {what} rank {other} failed on rank {group.rank}: {first_line(error)}",
            "communication",
        ) from None
