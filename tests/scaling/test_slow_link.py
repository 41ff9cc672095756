"""Which host has the slow link: rings of hosts, with one link or host slow, or none."""

import random

import pytest

from gradcast.slow_link import Flow, slow_hosts

MB = 1e6


def ring(hosts, slow=(), factor=2.0, noise=0.03, seed=1):
    """What goes around at 100 MB/s, slower between the pairs given; and small messages the other way."""
    draw = random.Random(seed)
    for host in range(hosts):
        pair = host, (host + 1) % hosts
        rate = 100 * MB * (1 + draw.uniform(-noise, noise)) / (factor if pair in slow else 1)
        yield Flow(*pair, 500 * MB, 500 * MB / rate)
        yield Flow(*reversed(pair), 1 * MB, 0.1)


@pytest.mark.parametrize("hosts", [3, 4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_the_slow_link_or_host_of_a_ring(hosts, seed):
    last = hosts - 1
    assert slow_hosts(ring(hosts, seed=seed), hosts, 2.0) == ()
    assert slow_hosts(ring(hosts, [(1, 2)], seed=seed), hosts, 2.0) == (1, 2)
    assert slow_hosts(ring(hosts, [(last, 0)], seed=seed), hosts, 2.0) == (0, last)
    assert slow_hosts(ring(hosts, [(0, 1), (1, 2)], seed=seed), hosts, 2.0) == (1,)
    assert slow_hosts(ring(hosts, [(0, 1), (1, 2)], 1.3, seed=seed), hosts, 1.3) == (1,)


def test_all_links_slow_is_no_links_fault():
    everybody = [(host, (host + 1) % 4) for host in range(4)]
    assert slow_hosts(ring(4, everybody), 4, 2.0) == ()


def test_links_that_share_no_host_are_no_links_fault():
    assert slow_hosts(ring(8, [(0, 1), (4, 5)]), 8, 2.0) == ()


def test_a_difference_that_explains_little_of_the_loss_names_nobody():
    assert slow_hosts(ring(4, [(1, 2)], 1.4), 4, 3.0) == ()


def test_two_hosts_have_one_link():
    assert slow_hosts([], 2, 1.2) == (0, 1)


def test_nothing_is_known_without_connections():
    assert slow_hosts([], 4, 2.0) is None
    assert slow_hosts([Flow(0, 0, 5 * MB, 1.0), Flow(0, 1, 0.0, 0.0)], 4, 2.0) is None


def test_connections_of_several_ranks_count_together():
    one = [Flow(0, 1, 100 * MB, 1.0), Flow(1, 2, 100 * MB, 1.0), Flow(2, 0, 100 * MB, 1.0)]
    other = [Flow(0, 1, 100 * MB, 9.0), Flow(1, 2, 100 * MB, 1.0), Flow(2, 0, 100 * MB, 1.0)]
    assert slow_hosts([*one, *other], 3, 2.0) == (0, 1)


def test_what_four_hosts_have_measured_with_the_link_of_host_1_halved():
    """1.2 Gbit/s, 600 Mbit/s; host 3 was not ready to receive most of the time (benchmarks/alarm_causes.py)."""
    busy = [Flow(0, 3, 153.4e6, 0.352), Flow(1, 0, 153.4e6, 2.152), Flow(2, 1, 153.4e6, 2.16), Flow(3, 2, 153.4e6, 1.0)]
    idle = [Flow(flow.receiver, flow.sender, 0.03e6, 2.1) for flow in busy]
    assert slow_hosts([*busy, *idle], 4, 2.01) == (1,)


def test_a_link_that_is_cut_is_the_slow_one():
    cut = [Flow(0, 1, 100 * MB, 1.0), Flow(1, 2, 100 * MB, 1.0), Flow(2, 3, 100 * MB, 1.0), Flow(3, 0, 20 * MB, 40.0)]
    assert slow_hosts(cut, 4, 20.0) == (0, 3)
