"""What gradcast and the program send do not mix: the program's group is gradcast's in attach only, and blocks wait for
``handle.collective()``."""

import contextlib
import os
import sys
import threading
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest

import gradcast
from training.attached import Attached, attach, heard, not_refused
from training.inside import session_of
from training.needs import torch
from training.pool import on_ranks
from training.step.test_late_device import late_device

pytest.importorskip("training.needs")
from gradcast.training import launch_order
from gradcast.training.ranks.store_gather import StoreGather

nn = torch.nn
dist = torch.distributed


def operations_of_program():
    """Their number so far on the program's group."""
    return dist.group.WORLD._get_sequence_number_for_group()


@on_ranks(2)
def test_nothing_of_gradcast_travels_on_the_programs_group_during_training(rank, mode):
    attached = Attached(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mode)
    before = operations_of_program()
    dataset = torch.utils.data.TensorDataset(torch.ones(64, 4))
    sampler = gradcast.BalancedBatchSampler(dataset, attached.handle, batch=8)
    attached.module[1].bias.requires_grad_(False)
    (batch,) = next(iter(torch.utils.data.DataLoader(dataset, batch_sampler=sampler)))
    for step in range(5):
        if step == 3:
            attached.module[1].bias.requires_grad_(True)  # gradcast begins again with one more parameter
        with attached.handle.weight(len(batch)):
            attached.step(batch)
    assert "1.bias" in [each.name for each in attached.handle.layout]
    attached.handle.detach()
    assert operations_of_program() == before


@on_ranks(2)
def test_local_steps_use_the_programs_group_in_attach_only(rank):
    module = nn.Linear(4, 4)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    handle = gradcast.attach(module, sgd, options=gradcast.Options(local=gradcast.LocalSteps(2)))
    before = operations_of_program()
    for _ in range(4):
        module(torch.ones(2, 4)).sum().backward()
        sgd.step()
    handle.end_round()
    handle.detach()
    assert operations_of_program() == before


@on_ranks(2)
def test_who_does_not_come_to_an_agreement_is_named(rank):
    """The key of a rank that has not come lies in no store: the others stop waiting for it."""
    store = StoreGather("who comes", rank.index, 2, timeout_s=30.0)
    assert store.gather(rank.index) == [0, 1]
    store = StoreGather("who does not", rank.index, 2, timeout_s=0.2)
    if rank.index == 1:
        return []
    found = not_refused(lambda: store.gather(0), "rank 1 has not come here within 0 s", code="communication")
    return found + not_refused(lambda: store.gather(0), "rank 1 has not come here within 0 s", code="communication")


def test_a_store_that_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr("gradcast.training.ranks.store_gather._LATE_S", 0.1)
    answers = threading.Event()
    stopped = SimpleNamespace(timeout=timedelta(seconds=0.2))
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: stopped)
    monkeypatch.setattr("torch.distributed.PrefixStore", lambda *_: answers.wait(30))
    with pytest.raises(gradcast.Error, match=r"the store of torch\.distributed has not answered within 0 s"):
        StoreGather("stopped", 0, 2, timeout_s=None).gather(0)
    answers.set()


@on_ranks(2)
def test_inside_a_collective_block_nothing_travels_and_no_update_is_due(rank):
    with late_device(200_000):
        attached = Attached(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    for _ in range(6):
        attached.step(torch.ones(4, 8))
    handle = attached.handle
    assert session_of(handle).report.is_sending
    with handle.collective(), handle.collective():
        assert not session_of(handle).report.is_sending
        assert not session_of(handle).pending_names()
    attached.step(torch.ones(4, 8))


@on_ranks(2)
def test_a_collective_block_keeps_backward_out_and_stays_out_of_backward(rank, mode):
    module = nn.Linear(8, 8)
    attached = Attached(module, mode)
    attached.step(torch.ones(4, 8))
    handle, found = attached.handle, []
    loss = module(torch.ones(4, 8)).sum()
    with handle.collective():
        found += not_refused(loss.backward, "backward() inside handle.collective()", "end the block first")
    attached.step(torch.ones(4, 8))
    output = module(torch.ones(4, 8))
    output.register_hook(lambda _: handle.collective().__enter__())
    found += not_refused(output.sum().backward, "inside a backward pass", "behind backward()")
    return found


@on_ranks(2)
def test_a_collective_block_holds_when_gradcast_begins_again_inside(rank):
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].bias.requires_grad_(False)
    attached = Attached(module)
    attached.step(torch.ones(2, 4))
    with attached.handle.collective():
        module[1].bias.requires_grad_(True)
        loss = module(torch.ones(2, 4)).sum()
        found = not_refused(loss.backward, "inside handle.collective()")
    attached.step(torch.ones(2, 4))
    return found


@on_ranks(2)
def test_with_local_steps_a_collective_block_keeps_steps_out(rank):
    module = nn.Linear(4, 4)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    handle = gradcast.attach(module, sgd, options=gradcast.Options(local=gradcast.LocalSteps(2)))
    module(torch.ones(2, 4)).sum().backward()
    with handle.collective():
        found = not_refused(sgd.step, "step() inside handle.collective()")
        found += not_refused(handle.end_round, "handle.end_round() inside handle.collective()")
    sgd.step()
    handle.end_round()
    return found


@contextlib.contextmanager
def as_over_nccl(**variables):
    """Without a device: as if the program's group had NCCL for the module's. What is logged."""
    module_of_attach = sys.modules["gradcast.training.attach"]
    with contextlib.ExitStack() as stack:
        for module in (launch_order, module_of_attach):
            stack.enter_context(mock.patch.object(module, "backend_of", return_value="nccl"))
        stack.enter_context(mock.patch.dict(os.environ, variables))
        yield stack.enter_context(heard())


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        (launch_order.CONNECTIONS, "1", "CUDA_DEVICE_MAX_CONNECTIONS is 1, so the GPU has one queue"),
        (launch_order.ORDER, "1", "NCCL_LAUNCH_ORDER_IMPLICIT is set, so NCCL begins operations in the order"),
    ],
)
@on_ranks(2)
def test_an_order_of_all_operations_is_refused_where_ranks_differ(rank, variable, value, words):
    """Where blocks travel under forward, and in backward if that has collectives."""
    module = nn.Linear(3, 3)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    local = gradcast.Options(local=gradcast.LocalSteps(2))
    with as_over_nccl(**{variable: value}):
        found = not_refused(lambda: attach(module, sgd), words, "hook mode")
        found += not_refused(lambda: gradcast.attach(module, sgd, options=local), words, "hook mode")
        attach(module, None, "hook").detach()
        found += not_refused(lambda: attach(Normalized(), None, "hook"), words, "norm, a SyncBatchNorm", "DDP")
        for harmless in ("0", "no number", "32"):
            if variable == launch_order.ORDER and harmless == "32":
                continue
            os.environ[variable] = harmless
            attach(module, sgd).detach()
            gradcast.attach(module, sgd, options=local).detach()
    return found


FEW_QUEUES = "so the GPU's streams share {} queues"
HOST_WAITS = "{} is set, so the host waits for the end of each block"


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        (launch_order.CONNECTIONS, "2", {"overlap": FEW_QUEUES.format(2)}),
        (launch_order.CONNECTIONS, "8", {"overlap": FEW_QUEUES.format(8)}),
        (launch_order.CONNECTIONS, "32", {}),
        *((name, "1", dict.fromkeys(("overlap", "hook"), HOST_WAITS.format(name))) for name in launch_order.BLOCKING),
        (launch_order.BLOCKING[0], "0", {}),
    ],
)
@on_ranks(2)
def test_what_makes_steps_longer_or_a_hang_likelier_is_warned_of(rank, variable, value, expected, mode):
    """By rank 0, once; training goes on."""
    module = nn.Linear(3, 3)
    with as_over_nccl(**{variable: value}) as lines:
        attach(module, torch.optim.SGD(module.parameters(), lr=0.1), mode).detach()
    said = [each for each in lines if each.startswith(variable)]
    assert len(said) == (1 if mode in expected and rank.index == 0 else 0), lines
    assert all(expected[mode] in each for each in said)


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.SyncBatchNorm(3)


@on_ranks(2)
def test_collectives_in_forward_are_warned_of_where_blocks_travel_beside_them_over_nccl(rank, mode):
    """Without a device: as if the program's group had NCCL for the module's."""
    told = []
    for backend in ("nccl", "gloo"):
        module = Normalized()
        sgd = torch.optim.SGD(module.parameters(), lr=0.1)
        module_of_attach = sys.modules["gradcast.training.attach"]
        with heard() as lines, mock.patch.object(module_of_attach, "backend_of", return_value=backend):
            attach(module, sgd, mode).detach()
        told.append(any("norm is a SyncBatchNorm" in each and "hook mode" in each for each in lines))
    assert told == [rank.index == 0 and mode == "overlap", False]
