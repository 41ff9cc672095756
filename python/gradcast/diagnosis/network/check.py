"""Measures the network and Gloo's share of it: pairs of hosts over raw TCP and over Gloo, and all-reduces by size.

Takes about ten seconds, in which nothing else should use the network. Collective. Ranks on one host share its link, so
one rank of each host measures the pairs.
"""

import contextlib
import dataclasses
import datetime
import secrets
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from gradcast.diagnosis.network import collective as network_collective
from gradcast.diagnosis.network import findings as network_findings
from gradcast.diagnosis.network import hosts as network_hosts
from gradcast.diagnosis.network import pairs as network_pairs
from gradcast.diagnosis.network import tcp
from gradcast.diagnosis.network.findings import STREAMS, NetworkMeasurements, Pair
from gradcast.diagnosis.network.hosts import HostInterfaces, Rounds
from gradcast.diagnosis.network.pairs import Network, Progress
from gradcast.errors import Error
from gradcast.host_traffic import Hosts, saves_nothing
from gradcast.training.ranks.group import Group, backend_of
from gradcast.training.ranks.group_pool import lasting_group

# Shares of the time for raw TCP and for all-reduces; the rest is for Gloo's messages.
_TCP_SHARE, _COLLECTIVE_SHARE = 0.5, 0.3
# Four measurements per pair. Each takes longer than its nominal time: connections are opened, queues drain.
_MEASUREMENTS, _OVERHEAD = 4, 1.5
_MEASUREMENT_S = (0.06, 0.25)
# A rank that has not arrived after this time is gone. Far longer than the longest round.
_TIMEOUT_S = 60.0


def check(
    group: Group, progress: Progress | None = None, *, device_type: str = "cpu", seconds: float = 10.0
) -> dict[str, Any] | None:
    """Returns the key "network" of doctor.json on every rank, or None for a world of one rank.

    Collective over ``group``. ``progress`` gets a line on rank 0 whenever a new measurement begins. ``device_type`` is
    that of the training's gradients and decides which backend carries them; the check itself always measures Gloo on
    the CPU. ``seconds`` is the time to spend; slow links or more than 8 hosts take somewhat longer.
    Raises Error, naming the missing ranks, if a rank is gone.
    """
    if group.world_size == 1:
        return None
    control = _control(group)
    network_pairs.barrier(control, "network check")
    gathered: list[HostInterfaces] = control.computed_by_each(
        network_hosts.own_interfaces, "reading the network's interfaces"
    )
    names = network_hosts.names([each.host for each in gathered])
    network = Network(
        control,
        [dataclasses.replace(each, name=name) for each, name in zip(gathered, names, strict=True)],
        control.from_first(secrets.token_bytes(tcp.TOKEN_BYTES)),
        progress if progress is not None and group.rank == 0 else lambda _: None,
    )
    return _checked(network, backend_of(group.shared, device_type), seconds)


def _checked(network: Network, backend: str, seconds: float) -> dict[str, Any]:
    hosts = Hosts.of([each.name for each in network.hosts])
    # Ranks of one host have no network between them; one pair shows what Gloo costs there.
    ranks = [0, 1] if hosts.count == 1 else [members[0] for members in hosts.ranks]
    rounds = [[(ranks[a], ranks[b]) for a, b in each] for each in network_hosts.rounds(len(ranks))]
    pairs = _over_tcp(network, rounds, seconds)
    alternatives = _alternatives(network, pairs[0])
    pairs = network_pairs.measured_over_gloo(network, rounds, pairs)
    network.report("all-reduce of 1 KiB and more")
    network_pairs.barrier(network.group, "network check, all-reduce")
    samples = network_collective.samples(network.group, _COLLECTIVE_SHARE * seconds)
    measured = NetworkMeasurements(
        {rank: network.hosts[rank] for rank in ranks},
        pairs,
        backend,
        hosts.count == 1,
        alternatives,
        narrow_saves=saves_nothing(hosts, "bf16") is None,
    )
    return {
        "interfaces": [each.chosen.interface for each in network.hosts],
        "collective": network_collective.fitted(samples, network.group.world_size),
        "pairs": [_as_json(pair) for pair in pairs],
        "alternatives": [
            {"interface": name, "gbit_per_s": rate, "chosen_gbit_per_s": pairs[0].tcp_gbit_per_s}
            for name, rate in alternatives.items()
        ],
        "connections": network.hosts[ranks[0]].chosen.connections,
        "findings": [dataclasses.asdict(found) for found in network_findings.findings(measured)],
    }


def _as_json(pair: Pair) -> dict[str, Any]:
    fields = dataclasses.asdict(pair) | {"streams": STREAMS}
    del fields["fault"]  # is in a finding
    return fields


def _control(group: Group) -> Group:
    """Makes a Gloo group with its own timeout, independent of the backend and of other uses of ``group``."""
    limit = datetime.timedelta(seconds=_TIMEOUT_S)
    own = lasting_group(dist.get_process_group_ranks(group.own), limit, "gloo", "network check")
    return Group(group.rank, group.world_size, group.shared, own, _TIMEOUT_S)


def _over_tcp(network: Network, rounds: Rounds, seconds: float) -> list[Pair]:
    each_s = _TCP_SHARE * seconds / (len(rounds) * _MEASUREMENTS * _OVERHEAD)
    each_s = min(max(each_s, _MEASUREMENT_S[0]), _MEASUREMENT_S[1])
    own = network.hosts[network.group.rank].chosen.address
    with _listening(network, own) as listening:
        return network_pairs.measured_over_tcp(listening, rounds, each_s)


@contextlib.contextmanager
def _listening(network: Network, address: str, timeout_s: float | None = None) -> Iterator[Network]:
    """Listens on ``address`` on every rank. Raises on all ranks if one cannot."""
    listener, fault = None, None
    try:
        listener = tcp.Listener(address, timeout_s)
    except Error as error:
        fault = f"rank {network.group.rank}: {error}"
    try:
        gathered = network.group.gather((listener.address if listener else None, fault))
        if faults := [each for _, each in gathered if each]:
            raise Error(f"network check: {'; '.join(faults)}", "communication")
        yield dataclasses.replace(network, listener=listener, addresses=[each for each, _ in gathered])
    finally:
        if listener:
            listener.close()


def _alternatives(network: Network, pair: Pair) -> dict[str, float]:
    """Measures other interfaces that both hosts of the pair have under one name. Returns Gbit/s."""
    ends = (pair.a, pair.b)
    if pair.tcp_gbit_per_s is None or network.hosts[pair.a].name == network.hosts[pair.b].name:
        return {}
    found = {}
    for name in network_hosts.common_alternatives([network.hosts[rank] for rank in ends]):
        network.report(f"raw TCP over {name}")
        if rate := rate_over(network, ends, name):
            found[name] = rate
    return found


def rate_over(network: Network, pair: tuple[int, int], name: str) -> float | None:
    """Returns Gbit/s, or None on all ranks if the two hosts cannot reach each other over this interface."""
    rank = network.group.rank
    own = network.hosts[rank]
    address = own.chosen.address
    if rank == pair[0]:
        address = next(each.addresses[0] for each in own.others() if each.name == name)
    try:
        with _listening(network, address, network_pairs.TRY_TIMEOUT_S) as listening:
            return network.group.gather(network_pairs.one_way_gbit_per_s(listening, pair))[pair[0]]
    except Error:
        return None
