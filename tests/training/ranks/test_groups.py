"""Process groups: a forgotten one, one of other workers, one for other devices, and a part of the workers."""

import os
from unittest import mock

import pytest

import gradcast
from training import compare, optimizers
from training.models import TASKS
from training.needs import torch

nn = torch.nn


def attach_without_group(rank):
    """The program forgot init_process_group, but it was started as one of several workers."""
    torch.distributed.destroy_process_group()
    os.environ["WORLD_SIZE"] = "2"
    try:
        gradcast.attach(nn.Linear(3, 3))
    except gradcast.Error as error:
        return error.code, str(error)
    finally:
        del os.environ["WORLD_SIZE"]
    return None, "accepted"


def test_a_forgotten_process_group_is_named(ranks):
    for code, message in ranks.run(2, attach_without_group):
        assert code == "invalid_use"
        assert "init_process_group" in message


def attach_outside_group(rank):
    part = torch.distributed.new_group([0, 1])
    if rank.index < 2:
        ours = TASKS["plain"].module()
        gradcast.attach(ours, process_group=part).detach()
        return "invalid_use", "a member"
    try:
        gradcast.attach(nn.Linear(3, 3), process_group=part)
    except gradcast.Error as error:
        return error.code, str(error)
    return None, "accepted"


def test_a_rank_outside_the_group_is_refused(ranks):
    for code, message in ranks.run(3, attach_outside_group):
        assert code == "invalid_use", message


def attach_with_other_backend(rank):
    """A group whose one backend is for another kind of device."""
    group = torch.distributed.new_group(backend="cuda:gloo")
    try:
        gradcast.attach(nn.Linear(3, 3), process_group=group)
    except gradcast.Error as error:
        return error.code, str(error)
    return None, "accepted"


def test_a_group_without_a_backend_for_the_device_is_refused(ranks):
    for code, message in ranks.run(2, attach_with_other_backend):
        assert code == "invalid_use", message
        assert "cpu" in message
        assert "backend" in message


def train_on_a_part(rank):
    """Ranks 1 and 2 of three train together, in a group of their own, in which they are 0 and 1."""
    part = torch.distributed.new_group([1, 2])
    if rank.index == 0:
        return []
    task = TASKS["convnet"]
    ours, theirs = task.module(seed=rank.index), task.module(seed=rank.index)
    ddp = nn.parallel.DistributedDataParallel(theirs, process_group=part)
    recipes = [optimizers.make("adam plain", module) for module in (theirs, ours)]
    handle = gradcast.attach(
        ours, recipes[1].optimizer, process_group=part, options=gradcast.Options(adapt=False, warmup_steps=3)
    )
    for number in range(6):
        for forward, recipe in zip((ddp, ours), recipes, strict=True):
            recipe.optimizer.zero_grad()
            task.loss(forward, task.batch(rank.index, number)).backward()
            recipe.optimizer.step()
    handle.flush()
    found = compare.modules(ours, theirs) + compare.optimizers(recipes[1].optimizer, recipes[0].optimizer)
    found += [] if (handle.rank, handle.world_size) == (rank.index - 1, 2) else ["rank or world size is wrong"]
    handle.detach()
    return found


def test_a_part_of_the_workers_trains_together(ranks):
    for found in ranks.run(3, train_on_a_part):
        assert found == []


def users_own_collectives(rank):
    """The user's own operations on the default group, of other sizes and in between, while gradients travel."""
    task = TASKS["plain"]
    ours, theirs = task.module(seed=rank.index), task.module(seed=rank.index)
    ddp = nn.parallel.DistributedDataParallel(theirs)
    recipes = [optimizers.make("adam plain", module) for module in (theirs, ours)]
    handle = gradcast.attach(
        ours, recipes[1].optimizer, options=gradcast.Options(adapt=False, warmup_steps=3, policy="fifo")
    )
    totals = []
    for number in range(10):
        for forward, recipe in zip((ddp, ours), recipes, strict=True):
            recipe.optimizer.zero_grad()
            task.loss(forward, task.batch(rank.index, number)).backward()
            recipe.optimizer.step()
            values = torch.arange(100.0 + number)
            torch.distributed.all_reduce(values)
            totals.append(bool((values == rank.size * torch.arange(100.0 + number)).all()))
    handle.flush()
    found = compare.modules(ours, theirs)
    handle.detach()
    return found, all(totals)


def test_the_users_own_collectives_are_not_disturbed(ranks):
    for found, right in ranks.run(2, users_own_collectives):
        assert found == []
        assert right


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
        try:
            made = group.make_group(None, torch.device("cuda", 1), None)
        except gradcast.Error as error:
            return error.code, str(error)
    return (
        zeros.call_args == mock.call(1, device=torch.device("cuda", 1)),
        all_reduce.call_args == mock.call(made.own, "one number"),
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
        try:
            gradcast.attach(nn.Linear(3, 3))
        except gradcast.Error as error:
            return error.code, str(error)
    return None, "accepted"


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
