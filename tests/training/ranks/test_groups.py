"""Process groups: a forgotten one, one of other workers, one for other devices, and a part of the workers."""

import os
from unittest import mock

import pytest

import gradcast
from training.attached import error_of
from training.models import TASKS
from training.needs import torch
from training.sides import differences, net

nn = torch.nn


def attach_without_group(rank):
    """The program forgot init_process_group, but it was started as one of several workers."""
    torch.distributed.destroy_process_group()
    with mock.patch.dict(os.environ, WORLD_SIZE="2"):
        return error_of(lambda: gradcast.attach(nn.Linear(3, 3)))


def test_a_forgotten_process_group_is_named(ranks):
    for code, message in ranks.run(2, attach_without_group):
        assert code == "invalid_use"
        assert "init_process_group" in message


def attach_outside_group(rank):
    part = torch.distributed.new_group([0, 1])
    return error_of(lambda: gradcast.attach(nn.Linear(3, 3), process_group=part).detach())


def test_a_rank_outside_the_group_is_refused(ranks):
    *members, (code, message) = ranks.run(3, attach_outside_group)
    assert members == [(None, "no error")] * 2
    assert code == "invalid_use", message


def attach_with_other_backend(rank):
    """A group whose one backend is for another kind of device."""
    group = torch.distributed.new_group(backend="cuda:gloo")
    return error_of(lambda: gradcast.attach(nn.Linear(3, 3), process_group=group))


def test_a_group_without_a_backend_for_the_device_is_refused(ranks):
    for code, message in ranks.run(2, attach_with_other_backend):
        assert code == "invalid_use", message
        assert "cpu" in message
        assert "backend" in message


def train_on_a_part(rank):
    """Ranks 1 and 2 of three train together, in a group of their own, in which they are 0 and 1."""
    part = torch.distributed.new_group([1, 2])

    def program(side):
        module = TASKS["convnet"].module(seed=rank.index)
        adam = torch.optim.Adam(module.parameters(), lr=3e-3)
        called = side.called(module, adam, part)
        for number in range(6):
            adam.zero_grad()
            TASKS["convnet"].loss(called, TASKS["convnet"].batch(rank.index, number)).backward()
            adam.step()
        if side.handle is not None:
            assert (side.handle.rank, side.handle.world_size) == (rank.index - 1, 2)
        return module.state_dict() | side.result(module, adam)

    return [] if rank.index == 0 else differences(rank, program, "overlap")


def test_a_part_of_the_workers_trains_together(ranks):
    for found in ranks.run(3, train_on_a_part):
        assert found == []


def users_own_collectives(rank):
    """The user's own operations on the default group, of other sizes and in between, while gradients travel."""

    def program(side):
        module = net()
        adam = torch.optim.Adam(module.parameters(), lr=3e-3)
        for number in side.steps(side.called(module, adam, policy="fifo"), adam):
            values = torch.arange(100.0 + number)
            torch.distributed.all_reduce(values)
            assert torch.equal(values, rank.size * torch.arange(100.0 + number))
        return side.result(module, adam)

    return differences(rank, program, "overlap")


def test_the_users_own_collectives_are_not_disturbed(ranks):
    for found in ranks.run(2, users_own_collectives):
        assert found == []


def group_over_nccl(rank):
    """Without a device: what gradcast asks torch for, where the trainer's group has NCCL for one."""
    from gradcast.training.ranks.group import make_group

    dist = torch.distributed
    with (
        mock.patch.object(dist, "get_backend_config", return_value="cpu:gloo,cuda:nccl"),
        mock.patch.object(dist, "new_group", return_value=dist.group.WORLD) as new_group,
    ):
        make_group(None, torch.device("cpu"), 30.0)
    asked = new_group.call_args.kwargs
    return asked["backend"], asked["pg_options"].is_high_priority_stream, asked["pg_options"]._timeout.total_seconds()


@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="this torch has no NCCL")
def test_blocks_go_before_compute_on_nccl(ranks):
    assert ranks.run(2, group_over_nccl) == [("cpu:gloo,cuda:nccl", True, 30.0)] * 2


def connect_devices(rank, words):
    """Without a device: what make_group sends over the new group, where the module is on one."""
    from gradcast.training.compat import extension
    from gradcast.training.ranks import group

    failure = None if words is None else torch.distributed.DistBackendError(words)
    with (
        mock.patch.object(group, "_timeout_of", return_value=None),
        mock.patch.object(group, "on_device", group.contextlib.nullcontext),
        mock.patch.object(torch, "zeros", return_value="one number") as zeros,
        mock.patch.object(extension.load(), "all_reduce", side_effect=failure) as all_reduce,
    ):
        made = []
        answer = error_of(lambda: made.append(group.make_group(None, torch.device("cuda", 1), None)))
    return (
        answer
        if words
        else (
            zeros.call_args == mock.call(1, device=torch.device("cuda", 1)),
            all_reduce.call_args == mock.call(made[0].own, "one number"),
        )
    )


def test_devices_are_connected_when_gradcast_is_attached(ranks):
    """Not in the first backward pass: what NCCL refuses is heard at once."""
    assert ranks.run(2, connect_devices, None) == [(True, True)] * 2
    for code, message in ranks.run(2, connect_devices, "NCCL error ... unhandled system error"):
        assert code == "communication"
        assert message.startswith("connecting the ranks' devices failed on rank")


def groups_beside_a_bound_device(rank):
    """init_process_group(device_id=...): torch would split a new group off, and wait for the ranks outside of it."""
    from gradcast.training.ranks.group import make_group

    dist = torch.distributed
    everybody, part = dist.group.WORLD, dist.new_group([0, 1])
    bound = torch.device("cuda", rank.index)
    seen = []

    def new_group(**_):
        seen.append(everybody.bound_device_id)
        return part

    if rank.index == 2:
        return None
    everybody.bound_device_id = bound
    try:
        with mock.patch.object(dist, "new_group", new_group):
            make_group(part, torch.device("cpu"), None)
            kept = everybody.bound_device_id
            make_group(None, torch.device("cpu"), None)
    finally:
        everybody.bound_device_id = None
    return seen == [None, bound] and kept == bound


def test_a_group_of_a_part_of_the_workers_waits_for_no_others(ranks):
    assert ranks.run(3, groups_beside_a_bound_device) == [True, True, None]


def refused_by_nccl(rank, words):
    """What attach says where the first operation of the trainer's group fails."""
    from gradcast.training.compat import extension

    failure = torch.distributed.DistBackendError(words)
    with mock.patch.object(extension.load(), "gather", side_effect=failure):
        return error_of(lambda: gradcast.attach(nn.Linear(3, 3)))


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (
            "NCCL error ... Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",
            "invalid_use",
            "use the same GPU, which NCCL refuses; give each rank a GPU of its own, with torch.cuda.set_device(",
        ),
        (
            "NCCL error ... unhandled system error",
            "communication",
            "comparing the ranks' calls of attach failed on rank",
        ),
    ],
)
def test_what_nccl_refuses_is_told_in_a_sentence(ranks, words, code, told):
    for found, message in ranks.run(2, refused_by_nccl, words):
        assert found == code
        assert told in message
