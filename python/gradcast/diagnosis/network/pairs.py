"""Measures pairs of ranks, over raw TCP and over Gloo. Collective: all ranks call, whoever is in no pair waits."""

import dataclasses
import datetime
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from gradcast.diagnosis.network import tcp
from gradcast.diagnosis.network.findings import Pair
from gradcast.diagnosis.network.hosts import Place
from gradcast.errors import Error
from gradcast.training.compat import extension
from gradcast.training.ranks.group import Group

STREAMS = 4
# Of one stream over another interface, and for how long it is waited for there: many such networks connect nobody.
_TRY_S = 0.2
TRY_TIMEOUT_S = 1.5
# Of the largest Gloo message: long enough that what it costs to start does not count, also at a high latency, where
# TCP needs many round trips before it fills a link.
_GLOO_MESSAGE_S = 0.05
_GLOO_BYTES = (64 << 10, 256 << 20)
# The other size is one that costs nothing but to start. One in between would tell of the bucket that lets the first
# bytes through at once.
_GLOO_SMALL_BYTES = 1 << 10
_GLOO_MESSAGES = 3
# Where TCP could not be measured: 10 Mbit/s.
_UNKNOWN_BITS_PER_S = 10e6

Rounds = Sequence[Sequence[tuple[int, int]]]
Progress = Callable[[str], None]
# Bytes, and ns until the answer.
Samples = list[tuple[int, float]]


@dataclasses.dataclass(frozen=True)
class Ends:
    """What both ranks of a pair need to know, on every rank: where each listens, and how they are called."""

    group: Group
    listener: tcp.Listener
    addresses: Sequence[tcp.Address]
    token: bytes
    labels: Sequence[str]


def labels(places: Sequence[Place], hosts: Sequence[str]) -> list[str]:
    both = zip(places, hosts, strict=True)
    return [f"rank {rank} ({host}, {place.chosen.address})" for rank, (place, host) in enumerate(both)]


def step(group: Group, limit_s: float, what: str) -> None:
    """All ranks have come here. Raises an Error that names who has not, within ``limit_s``."""
    try:
        dist.monitored_barrier(group.own, datetime.timedelta(seconds=limit_s), wait_all_ranks=True)
    except RuntimeError as error:
        raise Error(
            f"{what}: not all ranks are there; on rank {group.rank}: {_first_line(error)}", "communication"
        ) from None


def measured_over_tcp(ends: Ends, rounds: Rounds, seconds: float, limit_s: float, progress: Progress) -> list[Pair]:
    """The same on every rank. A pair that fails says why, and the others go on."""
    own: dict[tuple[int, int], tcp.Found | str] = {}
    for pair in _own_pairs(ends.group, rounds, limit_s, "raw TCP", progress):
        try:
            own[pair] = _measure(ends, pair, seconds)
        except Error as error:
            own[pair] = str(error)
    everybody = ends.group.gather(own)
    return [
        _pair(everybody[a][a, b], everybody[b][a, b], a, b) for a, b in sorted(pair for each in rounds for pair in each)
    ]


def measured_over_gloo(
    group: Group, rounds: Rounds, pairs: Sequence[Pair], limit_s: float, progress: Progress
) -> list[Pair]:
    """``pairs`` with Gloo's rates: of messages, in one direction at a time, as TCP's."""
    over_tcp = {(pair.a, pair.b): pair for pair in pairs}
    own: dict[tuple[int, int], Samples] = {}
    for pair in _own_pairs(group, rounds, limit_s, "Gloo", progress):
        sizes = (_GLOO_SMALL_BYTES, gloo_bytes(over_tcp[pair]))
        own[pair] = [sample for size in sizes for sample in _messages(group, pair, size, limit_s)]
    everybody = group.gather(own)
    return [with_gloo(pair, [everybody[rank][pair.a, pair.b] for rank in (pair.a, pair.b)]) for pair in pairs]


def gloo_bytes(pair: Pair) -> int:
    """Of the largest message of a pair."""
    seconds = tcp.long_enough_s(_GLOO_MESSAGE_S, 2e-6 * (pair.latency_us or 0.0))
    size = int(seconds * (pair.tcp_bits_per_s or _UNKNOWN_BITS_PER_S) / 8)
    return min(max(size, _GLOO_BYTES[0]), _GLOO_BYTES[1])


def with_gloo(pair: Pair, directions: Sequence[Samples]) -> Pair:
    """``directions``: what each side's messages took."""
    bits_per_s, alpha_us, beta = min(map(_line, directions))
    return dataclasses.replace(pair, gloo_bits_per_s=bits_per_s, alpha_us=alpha_us, beta_ns_per_byte=beta)


def _line(samples: Samples) -> tuple[float, float, float]:
    """The largest message's rate in bits per second, and the line through the smallest and the largest: us, and ns per
    byte. A sample holds a message and its answer, which is as long on the way as what a message takes to start."""
    sizes = [size for size, _ in samples]
    small, large = min(sizes), max(sizes)
    small_ns, large_ns = (
        statistics.median(time_ns for size, time_ns in samples if size == each) for each in (small, large)
    )
    beta = max(0.0, large_ns - small_ns) / (large - small)
    return 8e9 * large / large_ns, max(0.0, small_ns - beta * small) / 2 / 1e3, beta


def one_way_bits_per_s(ends: Ends, pair: tuple[int, int]) -> float | None:
    """Of one stream from the second of the pair to the first; None where it fails, and on all other ranks."""
    first, second = pair
    token = tcp.pair_token(ends.token, pair)
    try:
        if ends.group.rank == first:
            return tcp.answer_one_way(ends.listener, token, ends.labels[second])
        if ends.group.rank == second:
            tcp.measure_one_way(ends.addresses[first], token, _TRY_S, ends.labels[first], TRY_TIMEOUT_S)
    except Error:
        return None
    return None


def _own_pairs(
    group: Group, rounds: Rounds, limit_s: float, what: str, progress: Progress
) -> Iterator[tuple[int, int]]:
    """This rank's pairs, each when all ranks are at its round."""
    for index, pairs in enumerate(rounds):
        step(group, limit_s, f"network check, {what}, round {index + 1} of {len(rounds)}")
        progress(f"{what}, round {index + 1} of {len(rounds)}: " + ", ".join(f"{a}-{b}" for a, b in pairs[:4]))
        yield from (pair for pair in pairs if group.rank in pair)


def _measure(ends: Ends, pair: tuple[int, int], seconds: float) -> tcp.Found:
    """The higher rank connects to the lower one."""
    first, second = pair
    token = tcp.pair_token(ends.token, pair)
    if ends.group.rank == first:
        return tcp.answer(ends.listener, token, streams=STREAMS, whom=ends.labels[second])
    return tcp.measure(ends.addresses[first], token, streams=STREAMS, seconds=seconds, whom=ends.labels[first])


def _pair(a_found: tcp.Found | str, b_found: tcp.Found | str, a: int, b: int) -> Pair:
    if isinstance(a_found, str) or isinstance(b_found, str):
        # Who connects knows more of why it failed than who waits.
        return Pair(a, b, fault=b_found if isinstance(b_found, str) else str(a_found))
    one = min(a_found.one_bits_per_s, b_found.one_bits_per_s)
    several = min(a_found.several_bits_per_s, b_found.several_bits_per_s)
    fault = None if one and several else "too few bytes arrived to tell a rate"
    return Pair(a, b, b_found.latency_us, one or None, several or None, fault=fault)


def _messages(group: Group, pair: tuple[int, int], size_bytes: int, limit_s: float) -> Samples:
    """What this rank's messages to the other take, until the answer that they have arrived."""
    sends_first = group.rank == pair[0]
    other = pair[1] if sends_first else pair[0]
    message, answer = (torch.zeros(size, dtype=torch.uint8, device="cpu") for size in (size_bytes, 1))
    times = []
    for sends in [sends_first, not sends_first] * _GLOO_MESSAGES:
        start = time.perf_counter()
        for tensor, is_sent in ((message, sends), (answer, not sends)):
            _move(group, tensor, other, is_sent, limit_s)
        if sends:
            times.append((size_bytes, 1e9 * (time.perf_counter() - start)))
    return times


def _move(group: Group, tensor: torch.Tensor, other: int, sends: bool, limit_s: float) -> None:
    c10d = extension.load()
    try:
        (c10d.send if sends else c10d.receive)(group.own, tensor, other, limit_s)
    except RuntimeError as error:
        what = "to" if sends else "from"
        raise Error(
            f"network check: a message {what} rank {other} failed on rank {group.rank}: {_first_line(error)}",
            "communication",
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
