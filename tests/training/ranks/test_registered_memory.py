"""Gradients in memory that NCCL knows beforehand. Without a device: what is asked of torch, and what it cannot do."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest

import gradcast
from training.attached import attach, not_refused
from training.needs import torch
from training.pool import on_ranks

pytest.importorskip("training.needs")
from gradcast.training.ranks import registered_memory
from gradcast.training.sessions import session

nn = torch.nn


@contextlib.contextmanager
def nccl(register, calls):
    """As if the group had NCCL for the module's device. ``register``: its register_mem_pool."""

    @contextlib.contextmanager
    def use(pool, device):
        calls.append(f"allocates in {pool}")
        yield

    def get_backend(_, device):
        return SimpleNamespace(mem_allocator="NCCL's memory", register_mem_pool=register)

    with (
        mock.patch.object(torch.cuda, "MemPool", side_effect=lambda allocator: f"a pool of {allocator}"),
        mock.patch.object(torch.cuda, "use_mem_pool", use),
        mock.patch.object(session, "backend_of", return_value="nccl"),
        mock.patch.object(registered_memory, "_backend", get_backend),
    ):
        yield


@on_ranks(2)
def test_buffers_are_allocated_in_a_registered_pool(rank, mode):
    calls = []
    module = nn.Linear(3, 3)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    with nccl(lambda pool: calls.append(f"registers {pool}"), calls):
        attach(module, sgd, mode).detach()
        assert calls == []
        attach(module, sgd, mode, nccl=gradcast.Nccl(register_buffers=True)).detach()
    pool = "a pool of NCCL's memory"
    assert calls[:2] == [f"registers {pool}", f"allocates in {pool}"]


@on_ranks(2)
def test_memory_that_one_rank_cannot_register_is_refused_on_all(rank):
    def register(_):
        if rank.index == 1:
            raise RuntimeError("this NCCL registers nothing")

    with nccl(register, []):
        words = ["rank 1 cannot make (this NCCL registers nothing)", "leave the option out"]
        options = {"nccl": gradcast.Nccl(register_buffers=True)}
        return not_refused(lambda: attach(nn.Linear(3, 3), None, "hook", **options), *words)
