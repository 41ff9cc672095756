"""Which ranks share a host: all ranks agree on it in attach, from torchrun's variables or from what the hosts are."""

import logging
import os
from unittest import mock

import pytest

from training.attached import attach, heard, hosts_of
from training.needs import torch
from training.pool import on_ranks

pytest.importorskip("training.needs")
from gradcast.host_traffic import Hosts
from gradcast.training.attach import _tell_exchange
from gradcast.training.ranks import hosts
from gradcast.training.ranks.group import Group
from gradcast.training.ranks.hosts import Launch, Place

A, B = ("node", "boot-a net-1"), ("node", "boot-b net-1")  # machines with equal names
A_CONTAINER = ("node", "boot-a net-2")
TWO_BY_TWO = [Launch(0, 0, 2), Launch(0, 1, 2), Launch(1, 0, 2), Launch(1, 1, 2)]


def places(identities, launches=None):
    return [Place(*each) for each in zip(identities, launches or [None] * len(identities), strict=True)]


@pytest.mark.parametrize(
    ("identities", "launches", "host_of"),
    [
        ([A, A, B, B], None, (0, 0, 1, 1)),
        ([A, B, A, A_CONTAINER], None, (0, 1, 0, 2)),
        ([A, A, B, B], TWO_BY_TWO, (0, 0, 1, 1)),
        # Two launchers on one machine; hosts of different size; a group of some ranks of each host.
        ([A, A, A, A], TWO_BY_TWO, (0, 0, 1, 1)),
        ([B, A, A], [Launch(3, 0, 1), Launch(1, 1, 2), Launch(1, 0, 2)], (0, 1, 1)),
        ([A, B], [Launch(0, 5, 8), Launch(1, 5, 8)], (0, 1)),
    ],
)
def test_ranks_are_on_the_hosts_that_they_say(identities, launches, host_of):
    assert hosts.agreed(places(identities, launches)) == (Hosts(host_of), None)


@pytest.mark.parametrize(
    ("identities", "launches", "words"),
    [
        ([A, A], [Launch(0, 0, 2), None], "rank 1 lacks GROUP_RANK"),
        # Started by torchrun with one rank per host, which then starts the others by itself.
        (
            [A, A],
            [Launch(0, 0, 1), Launch(0, 0, 1)],
            "rank 1 has GROUP_RANK=0, LOCAL_RANK=0 and LOCAL_WORLD_SIZE=1, as",
        ),
        ([A, A], [Launch(0, 0, 2), Launch(0, 2, 2)], "local ranks count from 0"),
        ([A, A], [Launch(0, 0, 2), Launch(0, 1, 4)], "rank 0 has LOCAL_WORLD_SIZE=2 there"),
        ([A, B], [Launch(0, 0, 2), Launch(0, 1, 2)], "rank 0 with this GROUP_RANK is on another host"),
    ],
)
def test_variables_that_contradict_themselves_do_not_count(identities, launches, words):
    found, doubt = hosts.agreed(places(identities, launches))
    assert found == hosts.agreed(places(identities))[0]
    assert words in doubt
    assert "\n" not in doubt


@on_ranks(4)
def test_attach_agrees_on_the_hosts_and_tells_them(rank):
    def told(variables):
        with mock.patch.dict(os.environ, variables), heard() as lines:
            handle = attach(torch.nn.Linear(3, 3), None, "hook")
        found = handle.stats()["hosts"]
        handle.detach()
        return found, [line for line in lines if "host" in line]

    torch.distributed.barrier()
    own = {"GROUP_RANK": rank.index // 2, "LOCAL_RANK": rank.index % 2, "LOCAL_WORLD_SIZE": 2}
    torchrun = {name: str(value) for name, value in own.items()}
    two = {"count": 2, "ranks_per_host": 2}, ["2 hosts of 2 ranks; gradients are summed inside each host first"]
    one = {"count": 1, "ranks_per_host": 4}, ["1 host of 4 ranks"]
    found = [told(torchrun), told({}), told(torchrun if rank.index < 3 else {})]
    if rank.index > 0:
        return [each for each, (expected, _) in zip(found, (two, one, one), strict=True) if each != (expected, [])]
    doubtful = found.pop()
    assert doubtful[0] == one[0]
    assert "rank 3 lacks GROUP_RANK" in doubtful[1][0]
    return [] if found == [two, one] else found


def tell_exchange(found, *arguments, **named):
    _tell_exchange(Group(0, len(found.host_of), hosts=found), None, *arguments, **named)


def test_a_wire_format_that_is_slower_is_warned_of_once():
    with heard(logging.WARNING) as lines:
        tell_exchange(Hosts.even(4, 8), "bf16", {}, on_device=True)
        tell_exchange(Hosts.even(4, 8), "bf16", {}, on_device=False)
        tell_exchange(Hosts.even(4, 8), "fp32", {}, on_device=True)
        tell_exchange(Hosts.even(8, 2), "bf16", {}, on_device=True)
    assert len(lines) == 1
    assert "6.00 times the bytes" in lines[0]
    assert "with fp32 1.94 times; omit options.wire" in lines[0]


def test_what_is_lossy_and_what_is_summed_first_is_said():
    with heard() as lines:
        tell_exchange(Hosts.even(2, 4), "int8", {}, on_device=False)
        tell_exchange(Hosts((0, 0, 1)), "fp32", {}, on_device=False)
    assert lines[0] == "2 hosts of 4 ranks; gradients are summed inside each host first"
    assert lines[1].startswith("lossy: int8 on the wire with error feedback")
    assert lines[2:] == [
        "2 hosts with 3 ranks in all; hosts with differently many ranks do not sum their gradients first"
    ]


def test_gradients_that_travel_as_they_are_are_named():
    parameters = {f"{name}.weight": torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)) for name in "abcde"}
    parameters |= {"f": torch.nn.Parameter(torch.zeros(2))}
    with heard() as lines:
        tell_exchange(Hosts.even(2, 1), "bf16", parameters, on_device=False)
    named = ", ".join(f"{name}.weight (torch.float64)" for name in "abc")
    assert lines[1:] == [f"not in bf16, but as they are: the gradients of {named} and 2 more"]


@on_ranks(2)
def test_on_one_host_there_is_no_wire_format(rank):
    with hosts_of(2), heard(logging.WARNING) as lines:
        handle = attach(torch.nn.Linear(3, 3), None, "hook", wire="int8")
    expected = "int8 on the wire saves nothing on 1 host of 2 ranks: no gradient leaves it; they are sent in fp32"
    assert lines == ([expected] if rank.index == 0 else [])
    assert handle.stats()["wire"] == "fp32"
