"""FSDP's groups on a device, with streams that are recorded."""

import contextlib
from types import SimpleNamespace
from unittest import mock

from gradcast.training.compat.sharding import ShardGroup
from training.needs import torch


def group_on_device(calls: mock.Mock):
    parameter = torch.nn.Parameter(torch.zeros(2))

    def post_backward():
        parameter.grad = torch.ones(2)

    return SimpleNamespace(
        device=torch.device("cuda"),
        device_handle=SimpleNamespace(
            current_stream=lambda: "current", stream=lambda name: contextlib.nullcontext(calls.entered(name))
        ),
        comm_ctx=SimpleNamespace(
            all_gather_copy_in_stream=calls.copy_in, all_gather_stream=calls.gather, reduce_scatter_stream="reduce"
        ),
        fsdp_params=[SimpleNamespace(sharded_param=parameter)],
        mesh_info=SimpleNamespace(shard_mesh_size=2),
        post_forward_mesh_info=None,
        is_unsharded=False,
        reduce_grads=True,
        _all_gather_result=None,
        unshard=calls.unshard,
        post_backward=post_backward,
    )


def test_what_is_gathered_comes_behind_the_updates():
    calls = mock.Mock()
    group = group_on_device(calls)
    ShardGroup(group).take_over(calls.before_read, calls.on_reduced, {})
    group.unshard(True)
    names = [name for name, *_ in calls.mock_calls]
    assert names == ["before_read", "copy_in.wait_stream", "gather.wait_stream", "unshard"]
    calls.copy_in.wait_stream.assert_called_once_with("current")


def test_gradients_are_handed_over_on_the_stream_that_writes_them():
    calls = mock.Mock()
    group = group_on_device(calls)
    ShardGroup(group).take_over(calls.before_read, calls.on_reduced, {})
    group.post_backward()
    assert [name for name, *_ in calls.mock_calls] == ["entered", "on_reduced"]
    calls.entered.assert_called_once_with("reduce")


def test_what_is_gathered_already_waits_for_nothing():
    calls = mock.Mock()
    group = group_on_device(calls)
    ShardGroup(group).take_over(calls.before_read, calls.on_reduced, {})
    group.is_unsharded = True
    group.unshard()
    assert not calls.before_read.called
